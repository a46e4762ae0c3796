/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a path sits on, and what a save would do there. "ioshape probe" is made of it.
 */
#ifndef IOSHAPE_PROBE_H
#define IOSHAPE_PROBE_H

#include <stddef.h>
#include <stdint.h>

#include <ioshape/context.h>

#ifdef __cplusplus
extern "C" {
#endif

/** For what not every filesystem tells. */
enum ioshape_answer { IOSHAPE_UNKNOWN = 0, IOSHAPE_NO, IOSHAPE_YES };

/** One of the servers or disks that files are spread over: an OST, a BeeGFS target. */
struct ioshape_storage_target {
	const char *name;
	uint64_t total_bytes;
	uint64_t free_bytes;
};

#define IOSHAPE_ALL_TARGETS UINT32_MAX

/** What was found out, at one moment. Strings belong to the struct; none is NULL. */
struct ioshape_storage {
	size_t size;           /**< sizeof(struct ioshape_storage), set by the library */
	const char *directory; /**< that was looked at: the path, or the one it is in; absolute */

	/** ---- What is underneath ---- */
	const char *family;      /**< "lustre", "nfs", "ext", ... or "other" */
	const char *variant;     /**< "FSx for Lustre", "NFSv4.2 over RDMA"; or "" */
	const char *type;        /**< of the mount table: "lustre", "nfs4", "fuse.juicefs" */
	const char *source;      /**< "10.0.0.1@tcp:/scratch", "server:/export", "/dev/sda1" */
	const char *mount_point; /**< "" if the mount table does not tell */
	const char *options;     /**< of the mount and of its filesystem, with commas */
	uint64_t total_bytes;    /**< 0: it does not tell */
	uint64_t free_bytes;     /**< for this user, quotas apart */
	uint64_t write_unit;     /**< a request should be a multiple of it; 0 unknown */
	uint64_t
		flight_bytes; /**< in flight for one file or target, as the client can; 0 unknown */
	uint32_t memory_alignment; /**< that direct I/O asks for; 0 unknown */
	uint32_t offset_alignment;
	enum ioshape_answer direct;     /**< whether direct I/O works */
	enum ioshape_answer rotational; /**< whether the local disk spins */
	uint32_t remote;                /**< 1: other hosts may share it */
	uint32_t serial_direct; /**< 1: direct writes to one file are served one after the other */

	/** ---- Striping: of new files in the directory that ask for nothing ---- */
	uint32_t targets;       /**< storage targets; 0 unknown */
	uint32_t target_listed; /**< so many of them follow */
	const struct ioshape_storage_target *target;
	const char *stripes;      /**< in words: "8 x 1M, pool flash"; "" if not striped */
	uint64_t stripe_bytes;    /**< where most of a file of for_bytes lies; 0 unknown */
	uint32_t stripe_count;    /**< 0: not striped, or as the filesystem likes; or ALL_TARGETS */
	uint32_t mirrors;         /**< copies; 0 if not striped */
	const char *target_pool;  /**< "" if none */
	const char *file_stripes; /**< of the path itself, if that is a file; "" otherwise */
	uint32_t file_stripe_count;
	uint32_t is_file;            /**< 1: the path is a file that exists */
	uint32_t asked_stripe_count; /**< of stripes_asked, below; 0 if that is "" */
	uint32_t trial_to_come;      /**< 1: the first save of for_bytes will calibrate */

	/** ---- What a save of a file of so many bytes would do ---- */
	uint64_t for_bytes;
	const char *engine;        /**< "uring", "uring-async", "threads", "buffered", "nil" */
	const char *choice;        /**< why it is that one, and the next three */
	uint64_t block_bytes;      /**< of a request */
	uint32_t queue_depth;      /**< requests in flight for a file */
	int32_t uring_code;        /**< 0, or the negative errno that io_uring is refused with */
	uint64_t target_bytes;     /**< in flight for one storage target, per file; 0: no limit */
	const char *engine_note;   /**< what of the engines does not work here, and why; or "" */
	const char *stripes_asked; /**< the layout it would ask for; "" if the directory's own */
	const char *stripes_why;   /**< and why */
	const char *pool;          /**< of slots; "" if it has none */
	const char *writers_why;
	uint32_t writers;         /**< files written at a time, unless an operator has set that */
	uint32_t calibrated;      /**< 1: engine, block and depth were found by a trial */
	double calibrated_s;      /**< when, in seconds since 1970 */
	double calibrated_rate;   /**< bytes per second that the trial wrote; 0 unknown */
	uint32_t buffers_refused; /**< 1: io_uring would not register a save's buffers */
	uint32_t reserved;
};

/** What to look for. */
struct ioshape_probe_options {
	size_t size;        /**< sizeof(struct ioshape_probe_options) */
	uint64_t bytes;     /**< of a file that is to be saved; 0: 4 GiB */
	uint32_t files;     /**< that are written at the same time; 0: not known */
	uint32_t calibrate; /**< 1: find out by a trial, which writes a file and removes it again */
};

#define IOSHAPE_PROBE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_probe_options)

/**
 * Tells what a path sits on, and what a save would do there and why.
 *
 * Nothing is written unless options->calibrate is set (at most, an empty file without a name is
 * opened for a moment), and nobody but the kernel and the filesystem is asked. Any thread may call
 * this.
 *
 * @param context  an open context
 * @param path     a directory, or a file; one that does not exist yet needs its directory
 * @param options  NULL for all defaults
 * @param out      receives what was found, to be freed with ioshape_free(), or NULL
 * @return 0 or a negative code
 */
int ioshape_probe(struct ioshape_context *context, const char *path,
		  const struct ioshape_probe_options *options, struct ioshape_storage **out);
#ifdef __cplusplus
}
#endif

#endif
