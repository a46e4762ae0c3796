/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files in somebody else's format (torch's legacy format, ...), written as safely and
 * quickly as checkpoints: bytes go in, front to back, and the file appears whole or not at all.
 *
 * A file may be used by one thread at a time; different files of one context are written at the
 * same time.
 */
#ifndef IOSHAPE_FILE_H
#define IOSHAPE_FILE_H

#include <ioshape/container.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A file that is being written. */
struct ioshape_file;

/** How a file is written. */
struct ioshape_file_options {
	size_t size; /**< sizeof(struct ioshape_file_options) */
	/**
	 * What the file will hold, if known: lets it be preallocated, so that a full disk is
	 * noticed at once. An estimate is fine; 0 if unknown.
	 */
	uint64_t expected_bytes;
	ioshape_progress_fn progress;
	void *progress_user;         /**< borrowed until the file is freed */
	enum ioshape_switch replace; /**< as in struct ioshape_save_options */
	enum ioshape_switch sync;
	int64_t deadline_ms; /**< the same; until the commit has ended */
	/**
	 * Of each MiB, computed while it is written. Beside a file they are put in place after it,
	 * as durably; if that fails, the report says so (IOSHAPE_STEP_CHECKSUMS), and the file
	 * stands. Pipes and devices have none beside them.
	 */
	enum ioshape_keep_checksums checksums;
	uint32_t reserved; /**< 0 */
	/**
	 * If not 0, the file is one that several processes write at the same time, each its own
	 * part: from part_offset on at most part_bytes. Both are multiples of IOSHAPE_PART_UNIT,
	 * and no two parts overlap. Whoever comes first makes the file, for file_bytes. It has its
	 * name at once, so put it into a temporary directory that you rename. A commit brings the
	 * part to stable storage. Without a commit the file stays, and what the part holds is
	 * undefined. `replace` has no meaning; `checksums`
	 * must be IOSHAPE_CHECKSUMS_NONE.
	 */
	uint64_t part_bytes;
	uint64_t part_offset; /**< of the part in the file */
	uint64_t file_bytes;  /**< about what all parts hold, for the file's stripes */
};

/** What parts of a file begin and end at, in bytes. */
#define IOSHAPE_PART_UNIT (UINT64_C(1) << 20)

#define IOSHAPE_FILE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_file_options)

/**
 * Begins a new file, which takes its place at `path` when it is committed.
 *
 * @param context  an open context; it must outlive the file
 * @param path     the file to make or to replace
 * @param options  NULL for all defaults
 * @param out      receives the file, to be freed with ioshape_file_free(), or NULL
 * @return 0 or a negative code
 */
int ioshape_file_open(struct ioshape_context *context, const char *path,
		      const struct ioshape_file_options *options, struct ioshape_file **out);

/**
 * Appends bytes. After any failure but -EINVAL the file can only be freed.
 *
 * @param file   the file
 * @param data   borrowed during the call
 * @param bytes  how many
 * @return 0 or a negative code
 */
int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes);

/**
 * Makes a file durable and puts it in place.
 *
 * After this, well or not, the file can only be freed, unless the report was refused (-EINVAL).
 *
 * @param file    the file
 * @param report  filled, also if the commit failed; report->size must be set; may be NULL
 * @return 0 or a negative code
 */
int ioshape_file_commit(struct ioshape_file *file, struct ioshape_report *report);

/**
 * Frees a file. Without a successful commit it is abandoned, without a trace.
 *
 * @param file  the file; NULL is fine
 */
void ioshape_file_free(struct ioshape_file *file);

#ifdef __cplusplus
}
#endif

#endif
