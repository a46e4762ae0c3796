/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tensor level: named tensors become one durable file that torch.load() opens as a dict of
 * tensors (also with weights_only=True and mmap=True).
 *
 * A save is atomic. Until the new file is complete and on stable storage, readers see what was at
 * the path before; from then on they see the new file. A save that fails or is killed leaves the
 * old file as it was. (Pipes and devices cannot be replaced: they are written straight.)
 */
#ifndef IOSHAPE_TENSORS_H
#define IOSHAPE_TENSORS_H

#include <stddef.h>
#include <stdint.h>

#include <ioshape/context.h>
#include <ioshape/slots.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The values are part of the file format: they never change. */
enum ioshape_dtype {
	IOSHAPE_UINT8 = 1,
	IOSHAPE_INT8 = 2,
	IOSHAPE_INT16 = 3,
	IOSHAPE_INT32 = 4,
	IOSHAPE_INT64 = 5,
	IOSHAPE_FLOAT16 = 6,
	IOSHAPE_FLOAT32 = 7,
	IOSHAPE_FLOAT64 = 8,
	IOSHAPE_COMPLEX32 = 9, /* two float16: real, imaginary */
	IOSHAPE_COMPLEX64 = 10,
	IOSHAPE_COMPLEX128 = 11,
	IOSHAPE_BOOL = 12, /* one byte, 0 or 1 */
	IOSHAPE_BFLOAT16 = 13,
	IOSHAPE_UINT16 = 14,
	IOSHAPE_UINT32 = 15,
	IOSHAPE_UINT64 = 16,
	IOSHAPE_FLOAT8_E4M3FN = 17,
	IOSHAPE_FLOAT8_E5M2 = 18,
	IOSHAPE_FLOAT8_E4M3FNUZ = 19,
	IOSHAPE_FLOAT8_E5M2FNUZ = 20,
	IOSHAPE_FLOAT8_E8M0FNU = 21,
	/* One byte holds two values; shapes count bytes, as in torch. */
	IOSHAPE_FLOAT4_E2M1FN_X2 = 22
};

/* Bytes of one element, 0 for a value that is not a dtype. */
size_t ioshape_dtype_bytes(enum ioshape_dtype dtype);

/* torch's name without the "torch." ("bfloat16"); NULL for a value that is not a dtype. */
const char *ioshape_dtype_name(enum ioshape_dtype dtype);

/* Limits. Above them calls answer IOSHAPE_E_LIMIT. */
#define IOSHAPE_MAX_TENSORS 4194304u /* tensors in a file */
#define IOSHAPE_MAX_NAME_BYTES 4096u /* bytes of a tensor's, record's or attribute's name */
#define IOSHAPE_MAX_DIMS 64u         /* dimensions of a tensor, as in torch */
#define IOSHAPE_MAX_ATTRIBUTES 4096u /* string attributes of a file */
#define IOSHAPE_MAX_METADATA_BYTES (16u << 20) /* user blob and attributes together */

/* A tensor in the caller's memory. All it points to is borrowed (each call says for how long). */
struct ioshape_tensor {
	const char *name; /* UTF-8, unique in the file, not empty */
	enum ioshape_dtype dtype;
	uint32_t dims;        /* 0 is a scalar */
	const int64_t *shape; /* `dims` lengths, each >= 0 */
	/*
	 * `dims` distances between neighbours, in elements, each >= 0; NULL for a contiguous
	 * (row-major) tensor. Where the strides permute dense memory (a transposed matrix,
	 * channels_last) the file keeps them; otherwise the elements are packed row-major.
	 */
	const int64_t *strides;
	const void *data; /* may be NULL if there are no elements */
};

/* Travels with the tensors; torch.load does not show it, ioshape_reader_metadata() does. */
struct ioshape_attribute {
	const char *name; /* UTF-8, not empty, unique among the attributes */
	const char *value;
};

struct ioshape_metadata {
	size_t size;      /* sizeof(struct ioshape_metadata) */
	int64_t step;     /* the caller's counter; 0 if not given */
	const void *blob; /* a few bytes of the caller's own */
	size_t blob_bytes;
	const struct ioshape_attribute *attributes;
	size_t attribute_count;
};

#define IOSHAPE_METADATA_INIT IOSHAPE_SIZED(ioshape_metadata)

/* What a call is doing. */
enum ioshape_phase {
	/* Copying tensors away (asynchronous saves, in the caller's thread). */
	IOSHAPE_PHASE_STAGE = 1,
	IOSHAPE_PHASE_WAIT = 2, /* for a slot: other writers come first; see slots.h */
	IOSHAPE_PHASE_PLAN = 3, /* the file has been created, its space is not reserved yet */
	IOSHAPE_PHASE_WRITE = 4,
	IOSHAPE_PHASE_SYNC = 5,   /* waiting for stable storage */
	IOSHAPE_PHASE_COMMIT = 6, /* the new file takes the place of the old */
	IOSHAPE_PHASE_READ = 7,   /* loading or verifying */
	IOSHAPE_PHASE_DONE = 8
};

/*
 * Told when a phase begins and about every block in it (while it waits for a slot: ten times a
 * second): done of total bytes, never more than all (a
 * total of 0 is unknown: a writer that was not told what to expect). Called from whichever thread
 * does the work; an asynchronous save larger than the staging memory is staged and written
 * at the same time, and calls from two threads at once. Returning anything but 0 stops the
 * operation, which then fails with -ECANCELED; in the phases COMMIT and DONE it is too late, and
 * the value is ignored. It must not call back into the library with the same handle.
 */
typedef int (*ioshape_progress_fn)(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				   uint64_t total_bytes);

#define IOSHAPE_REPORT_TEXT_BYTES 512

/*
 * What a save did. Times are seconds of the clock on the wall. Strings are part of the struct:
 * nothing to free.
 */
struct ioshape_report {
	size_t size; /* sizeof(struct ioshape_report): set before the call */
	uint64_t file_bytes;
	uint64_t tensor_bytes; /* of the tensors; where there are none, of all records or bytes */
	double stage_s;        /* copying into staging memory, waiting for room in it included */
	double plan_s;
	double write_s;
	double sync_s;
	double commit_s; /* waiting for earlier saves to the same file included */
	double total_s;
	char engine[16]; /* "uring", "uring-async", "threads", "buffered", "nil" */
	char layout[16]; /* "single": one process, one file; or a group's: "each", "node", "rank0"
			  */
	uint32_t direct; /* 1 if blocks went past the page cache, up to the last one */
	uint32_t queue_depth;
	uint64_t block_bytes;
	/* What the filesystem asks of direct I/O; 0 if it said nothing. */
	uint32_t memory_alignment;
	uint32_t offset_alignment;
	char filesystem[32];    /* "ext4", "xfs", "tmpfs", "fuse.sshfs", ... */
	uint32_t fallbacks;     /* how often something was not as preferred */
	uint32_t short_results; /* requests the kernel cut short or interrupted, and we continued */
	char fallback_text[IOSHAPE_REPORT_TEXT_BYTES]; /* why, each a clause, separated by "; " */
	double slot_s;                                 /* waiting for a slot */
	double paced_s;                                /* waiting for bandwidth; part of write_s */
	uint64_t fence;                                /* of the slot; 0 without coordination */
	uint32_t position;    /* in the queue when it began to wait, from 1 on; 0: it did not */
	uint32_t slot_lost;   /* 1: the slot was lost before the file was complete */
	uint32_t express;     /* 1: small enough to be let past the queue */
	uint32_t capacity;    /* slots of the pool; 0 without coordination */
	char coordinator[16]; /* "redis", "local", "open"; "stagger": out of reach */
	char pool[128];       /* "" without coordination */
	char ahead[128];      /* who was before it in the queue; "" if nobody */
	/* Of a group's save only. */
	double group_s;            /* waiting for other ranks */
	uint64_t generation_bytes; /* of all files; 0 if it failed */
	uint32_t ranks;
	uint32_t reserved;
	char why[160]; /* why the layout is what it is */
	/* Of every save again. */
	double started_s;       /* when it began, in seconds since 1970 */
	uint64_t stripe_bytes;  /* of the file on a striped filesystem; 0 elsewhere */
	uint32_t stripe_count;  /* over so many storage targets; 0: not striped, or not known */
	uint32_t skipped;       /* 1: it did not fit, and IOSHAPE_FULL_SKIP was set */
	char stripes[96];       /* the file's layout in words; "" if not striped */
	char stripes_asked[96]; /* what was asked for; "" if nothing was */
	char choice[160];       /* why engine, block_bytes and queue_depth are what they are */
};

#define IOSHAPE_REPORT_INIT IOSHAPE_SIZED(ioshape_report)

struct ioshape_save_options {
	size_t size;                             /* sizeof(struct ioshape_save_options) */
	const struct ioshape_metadata *metadata; /* borrowed during the call; NULL for none */
	ioshape_progress_fn progress;            /* NULL for none */
	void *progress_user;                     /* borrowed until the save has ended */
	/*
	 * Filled when the (blocking) call returns, also when it failed. For an asynchronous save
	 * use ioshape_save_report() instead: setting it there is -EINVAL.
	 */
	struct ioshape_report *report;
	/* 1: fail with -EEXIST if the path exists when the file is committed. */
	uint32_t no_replace;
	/* 1: return without waiting for stable storage. Still atomic for readers. */
	uint32_t no_sync;
	/*
	 * 1, background saves only: nothing is copied; what is passed must stay valid and unchanged
	 * until the save has ended. That is the memory the bytes lie in (`data`, `fetch_user`):
	 * names, shapes, strides and metadata are copied all the same. Blocking saves borrow
	 * anyway, and ignore it.
	 */
	uint32_t borrow;
	ioshape_queue_fn queue; /* told while the save waits for a slot; NULL for none */
	void *queue_user;       /* borrowed until the save has ended */
};

#define IOSHAPE_SAVE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_save_options)

/*
 * Saves `count` tensors (0 is fine) to `path` and returns when they are on stable storage and the
 * file is in place. Everything passed is borrowed until it returns. `options` may be NULL.
 *
 * On failure: a negative code, ioshape_context_message() tells the rest, what was at `path` is
 * untouched and no temporary file is left. There is one exception: if it is the last step that
 * fails, bringing the directory to stable storage, the new file is in place, and the message says
 * so.
 */
int ioshape_save_tensors(struct ioshape_context *context, const char *path,
			 const struct ioshape_tensor *tensors, size_t count,
			 const struct ioshape_save_options *options);

/* A save in the background. */
struct ioshape_save;

/*
 * As ioshape_save_tensors(), but returns as soon as the tensors are copied into staging memory:
 * from then on everything passed may be changed or freed (`progress_user` excepted). The rest
 * happens on a thread of the library. With options->borrow nothing is copied, and the call returns
 * at once. A relative path means what it means at the call. Saves to the same file take their
 * places in the order of the calls.
 *
 * When earlier saves hold the staging memory the call waits for them, or returns -EAGAIN, as the
 * context's staging_full says. A checkpoint larger than all of staging_bytes is passed through it
 * in pieces: the call then returns when the last piece is staged.
 *
 * On success *out is a handle to be freed with ioshape_save_free(). On failure *out is NULL and
 * nothing has happened.
 */
int ioshape_save_tensors_async(struct ioshape_context *context, const char *path,
			       const struct ioshape_tensor *tensors, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);

/* 1 if the save has ended (well or not), 0 if it is under way. Any thread. */
int ioshape_save_poll(struct ioshape_save *save);

/*
 * Waits until the save has ended, at most timeout_ms (negative: as long as it takes). 0 when the
 * file is durable and in place, -ETIMEDOUT if it is still under way, otherwise the code it failed
 * with: which may be -ETIMEDOUT, too, so ioshape_save_poll() says whether it has ended. Any thread,
 * any number of times.
 */
int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms);

/*
 * Asks a save under way to stop, and returns at once; ioshape_save_wait() then answers -ECANCELED
 * as soon as no I/O is in flight and no temporary file is left, or 0 if the new file was in place
 * already. Nothing happens to a save that has ended. Any thread.
 */
int ioshape_save_cancel(struct ioshape_save *save);

/* What the save did; -EINPROGRESS while it is under way. report->size must be set. Any thread. */
int ioshape_save_report(struct ioshape_save *save, struct ioshape_report *report);

/*
 * How far a background save is: what it is doing, and how many bytes of how many. Any thread; any
 * pointer may be NULL. 0, -EINVAL, -EPERM in a forked child. After the end: IOSHAPE_PHASE_DONE
 * (also after a failure) with done as far as it came.
 */
int ioshape_save_progress(struct ioshape_save *save, enum ioshape_phase *phase,
			  uint64_t *done_bytes, uint64_t *total_bytes);

/*
 * Where a background save stands in the queue for a slot; all zeros if it does not wait for one.
 * place->size must be set. Any thread. 0, -EINVAL, -EPERM in a forked child.
 */
int ioshape_save_place(struct ioshape_save *save, struct ioshape_place *place);

/* The sentence about the failure, valid until the save is freed; "" unless it ended and failed. */
const char *ioshape_save_message(struct ioshape_save *save);

/*
 * Frees the handle. NULL is fine. A save still under way is aborted first: this then waits until no
 * I/O is in flight; no temporary file is left and the previous file stays - unless the new one was
 * already in place. Wait first to keep the save.
 */
void ioshape_save_free(struct ioshape_save *save);

#ifdef __cplusplus
}
#endif

#endif
