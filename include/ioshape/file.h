/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files in somebody else's format (torch's legacy format, safetensors, ...), written as safely and
 * quickly as checkpoints: bytes go in, front to back, and the file appears whole or not at all.
 *
 * A file may be used by one thread at a time; different files of one context are written at the
 * same time.
 */
#ifndef IOSHAPE_FILE_H
#define IOSHAPE_FILE_H

#include <ioshape/tensors.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ioshape_file;

struct ioshape_file_options {
	size_t size; /* sizeof(struct ioshape_file_options) */
	/*
	 * What the file will hold, if known: lets it be preallocated, so that a full disk is
	 * noticed at once. An estimate is fine; 0 if unknown.
	 */
	uint64_t expected_bytes;
	ioshape_progress_fn progress;
	void *progress_user; /* borrowed until the file is freed */
	uint32_t no_replace; /* as in struct ioshape_save_options */
	uint32_t no_sync;
};

#define IOSHAPE_FILE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_file_options)

/*
 * Begins a new file that will take its place at `path` when ioshape_file_commit() succeeds. On
 * failure *out is NULL and ioshape_context_message() says why.
 */
int ioshape_file_open(struct ioshape_context *context, const char *path,
		      const struct ioshape_file_options *options, struct ioshape_file **out);

/*
 * Appends bytes. The memory is borrowed during the call. After any failure but -EINVAL the file can
 * only be freed.
 */
int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes);

/*
 * Makes the file durable and puts it in place. `report` may be NULL. After this, well or not, the
 * file can only be asked for its message and freed - unless the report was refused (-EINVAL).
 */
int ioshape_file_commit(struct ioshape_file *file, struct ioshape_report *report);

/* The sentence about the file's last failure; "" if none. Valid until its next call. */
const char *ioshape_file_message(struct ioshape_file *file);

/* NULL is fine. Without a successful commit the file is abandoned, without a trace. */
void ioshape_file_free(struct ioshape_file *file);

#ifdef __cplusplus
}
#endif

#endif
