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

/** Types of elements. The values are part of the file format: they never change. */
enum ioshape_dtype {
	IOSHAPE_UINT8 = 1,
	IOSHAPE_INT8 = 2,
	IOSHAPE_INT16 = 3,
	IOSHAPE_INT32 = 4,
	IOSHAPE_INT64 = 5,
	IOSHAPE_FLOAT16 = 6,
	IOSHAPE_FLOAT32 = 7,
	IOSHAPE_FLOAT64 = 8,
	IOSHAPE_COMPLEX32 = 9, /**< two float16: real, imaginary */
	IOSHAPE_COMPLEX64 = 10,
	IOSHAPE_COMPLEX128 = 11,
	IOSHAPE_BOOL = 12, /**< one byte, 0 or 1 */
	IOSHAPE_BFLOAT16 = 13,
	IOSHAPE_UINT16 = 14,
	IOSHAPE_UINT32 = 15,
	IOSHAPE_UINT64 = 16,
	IOSHAPE_FLOAT8_E4M3FN = 17,
	IOSHAPE_FLOAT8_E5M2 = 18,
	IOSHAPE_FLOAT8_E4M3FNUZ = 19,
	IOSHAPE_FLOAT8_E5M2FNUZ = 20,
	IOSHAPE_FLOAT8_E8M0FNU = 21,
	/** One byte holds two values; shapes count bytes, as in torch. */
	IOSHAPE_FLOAT4_E2M1FN_X2 = 22
};

/**
 * Tells the size of an element.
 *
 * @param dtype  type of the element
 * @return its bytes; 0 for a value that is not a dtype
 */
size_t ioshape_dtype_bytes(enum ioshape_dtype dtype);

/* Limits. Above them calls answer IOSHAPE_E_LIMIT. */
#define IOSHAPE_MAX_TENSORS 4194304u /* tensors in a file */
#define IOSHAPE_MAX_NAME_BYTES 4096u /* bytes of a tensor's, record's or attribute's name */
#define IOSHAPE_MAX_DIMS 64u         /* dimensions of a tensor, as in torch */
#define IOSHAPE_MAX_ATTRIBUTES 4096u /* string attributes of a file */
#define IOSHAPE_MAX_METADATA_BYTES (16u << 20) /* user blob and attributes together */

/** A tensor in the caller's memory. Each call says for how long that is borrowed. */
struct ioshape_tensor {
	const char *name; /**< UTF-8, unique in the file, not empty */
	enum ioshape_dtype dtype;
	uint32_t dims;        /**< 0 is a scalar */
	const int64_t *shape; /**< `dims` lengths, each >= 0 */
	/**
	 * `dims` distances between neighbours, in elements, each >= 0; NULL for a contiguous
	 * (row-major) tensor. Where the strides permute dense memory (a transposed matrix,
	 * channels_last) the file keeps them; otherwise the elements are packed row-major.
	 */
	const int64_t *strides;
	const void *data; /**< may be NULL if there are no elements */
};

/** A string that travels with a file. */
struct ioshape_attribute {
	const char *name; /**< UTF-8, not empty, unique among the attributes */
	const char *value;
};

/** What travels with a file besides tensors or records. torch does not show it. */
struct ioshape_metadata {
	size_t size;      /**< sizeof(struct ioshape_metadata) */
	int64_t step;     /**< the caller's counter; 0 if not given */
	const void *blob; /**< a few bytes of the caller's own */
	size_t blob_bytes;
	const struct ioshape_attribute *attributes;
	size_t attribute_count;
};

#define IOSHAPE_METADATA_INIT IOSHAPE_SIZED(ioshape_metadata)

/** What a call is doing. */
enum ioshape_phase {
	/** Copying tensors away (asynchronous saves, in the caller's thread). */
	IOSHAPE_PHASE_STAGE = 1,
	IOSHAPE_PHASE_WAIT = 2, /**< for a slot: other writers come first; see slots.h */
	IOSHAPE_PHASE_PLAN = 3, /**< the file has been created, its space is not reserved yet */
	IOSHAPE_PHASE_WRITE = 4,
	IOSHAPE_PHASE_SYNC = 5,   /**< waiting for stable storage */
	IOSHAPE_PHASE_COMMIT = 6, /**< the new file takes the place of the old */
	IOSHAPE_PHASE_READ = 7,   /**< loading or verifying */
	IOSHAPE_PHASE_DONE = 8
};

/**
 * Told when a phase begins, about every block in it, and ten times a second in a wait for a slot.
 *
 * done_bytes is never more than total_bytes. A total of 0 is unknown: a writer that was not told
 * what to expect. The function is called from whichever thread does the work; a background save
 * larger than the staging memory is staged and written at the same time, and calls from two threads
 * at once. Anything but 0 stops the operation, which then fails with -ECANCELED; in the phases
 * COMMIT and DONE it is too late, and the value is ignored. The function must not call back into
 * the library with the same handle.
 */
typedef int (*ioshape_progress_fn)(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				   uint64_t total_bytes);

/** The steps down that a report can hold; further ones are counted, not told. */
#define IOSHAPE_REPORT_STEPS 6

/** What was not as preferred. Codes stay; sentences may be worded otherwise in any version. */
enum ioshape_step_code {
	IOSHAPE_STEP_ENGINE = 1, /**< another engine than the preferred one */
	IOSHAPE_STEP_DIRECT = 2, /**< through the page cache: the filesystem refuses direct I/O */
	IOSHAPE_STEP_PREALLOCATE = 3, /**< no space was reserved beforehand */
	IOSHAPE_STEP_LAYOUT = 4,      /**< other stripes than those that were asked for */
	IOSHAPE_STEP_LOCK = 5,        /**< the temporary file is not locked */
	IOSHAPE_STEP_OWNER = 6,       /**< owner, mode or ACL of the replaced file were not kept */
	IOSHAPE_STEP_SYNC = 7,        /**< the directory was not synced */
	/** written without a slot, or after it was lost; or without the share that was set */
	IOSHAPE_STEP_SLOT = 9,
	IOSHAPE_STEP_SKIPPED = 10,   /**< not saved: there is not enough free space */
	IOSHAPE_STEP_OVERTAKEN = 12, /**< a later save with a deadline took its place */
	IOSHAPE_STEP_CHECKSUMS = 13  /**< checksums that were asked for are not beside the file */
};

/** One of them. */
struct ioshape_step {
	enum ioshape_step_code code;
	char sentence[252]; /**< for people: what, and why */
};

/** Whether a save that was given a deadline was in time. */
enum ioshape_deadline {
	IOSHAPE_DEADLINE_NONE = 0,  /**< it had none */
	IOSHAPE_DEADLINE_MET = 1,   /**< all that was asked for was done, in time */
	IOSHAPE_DEADLINE_MISSED = 2 /**< it came later, or the save failed */
};

/**
 * What a save did.
 *
 * Times are seconds of the clock on the wall. Strings are part of the struct: nothing to free. A
 * save that failed fills in as far as it came.
 */
struct ioshape_report {
	size_t size; /**< sizeof(struct ioshape_report): set before the call */
	uint64_t file_bytes;
	uint64_t tensor_bytes; /**< of the tensors; where there are none, of all records or bytes */
	double stage_s;        /**< copying into staging memory, waiting for room in it included */
	double plan_s;
	double write_s;
	double sync_s;
	double commit_s; /**< waiting for earlier saves to the same file included */
	double total_s;
	char engine[16]; /**< "uring", "uring-async", "threads", "buffered" */
	char mode[16];   /**< "single": one process, one file; or a group's: "each", "node", "rank0"
			  */
	uint32_t direct; /**< 1 if blocks went past the page cache, up to the last one */
	uint32_t queue_depth;
	uint64_t block_bytes;
	/** What the filesystem asks of direct I/O; 0 if it said nothing. */
	uint32_t memory_alignment;
	uint32_t offset_alignment;
	char filesystem[32];    /**< "ext4", "xfs", "tmpfs", "fuse.sshfs", ... */
	uint32_t fallbacks;     /**< how often something was not as preferred */
	uint32_t short_results; /**< requests the kernel cut short or interrupted, and we continued
				 */
	/** What, in the order in which it came: the first `fallbacks` of them, if there is room. */
	struct ioshape_step steps[IOSHAPE_REPORT_STEPS];
	double slot_s;        /**< waiting for a slot */
	double paced_s;       /**< waiting for bandwidth; part of write_s */
	uint64_t fence;       /**< of the slot; 0 without coordination */
	uint32_t position;    /**< in the queue when it began to wait, from 1 on; 0: it did not */
	uint32_t slot_lost;   /**< 1: the slot was lost before the file was complete */
	uint32_t express;     /**< 1: small enough to be let past the queue */
	uint32_t capacity;    /**< slots of the pool; 0 without coordination */
	char coordinator[16]; /**< "redis", "local", "open"; "stagger", "deadline": without one */
	char pool[128];       /**< "" without coordination */
	char ahead[128];      /**< who was before it in the queue; "" if nobody */
	/** Of a group's save only. */
	double group_s;            /**< waiting for other ranks */
	uint64_t generation_bytes; /**< of all files; 0 if it failed */
	uint32_t ranks;
	enum ioshape_deadline deadline; /**< of every save: whether it was in time */
	char why[160];                  /**< why the layout is what it is */
	/** Of every save again. */
	double started_s;       /**< when it began, in seconds since 1970 */
	uint64_t stripe_bytes;  /**< of the file on a striped filesystem; 0 elsewhere */
	uint32_t stripe_count;  /**< over so many storage targets; 0: not striped, or not known */
	uint32_t skipped;       /**< 1: it did not fit, and IOSHAPE_FULL_SKIP was set */
	char stripes[96];       /**< the file's layout in words; "" if not striped */
	char stripes_asked[96]; /**< what was asked for; "" if nothing was */
	char choice[160];       /**< why engine, block_bytes and queue_depth are what they are */
	double deadline_left_s; /**< when the save ended; below 0: so much too late */
	/** Of large tensors or records, which were compared with the save before it in its series;
	 * 0: there was none, or nothing is large. */
	uint64_t compared_bytes;
	uint64_t unchanged_bytes; /**< as they were. If all are, what was saved may be stale */
	double request_s;         /**< that a write request took, on average */
	double least_request_s;   /**< the same while none waited for another; 0: not known */
	/** In a group: bytes of all ranks' parts that were not written because another rank's part
	 * is equal; and bytes of this rank's part that were read to find that out. */
	uint64_t repeated_bytes;
	uint64_t hashed_bytes;
};

#define IOSHAPE_REPORT_INIT IOSHAPE_SIZED(ioshape_report)

/** What becomes of the checksums of a file. */
enum ioshape_keep_checksums {
	IOSHAPE_CHECKSUMS_NONE = 0,  /**< none are computed */
	IOSHAPE_CHECKSUMS_BESIDE = 1 /**< in a file beside it, `NAME.ioshape-sums` */
};

/** In which format tensors are saved. */
enum ioshape_format {
	/** A zip that torch.load() opens as a dict of tensors. */
	IOSHAPE_FORMAT_TORCH = 0,
	/**
	 * The safetensors file that the original library makes of the same tensors, to the byte:
	 * large elements before small ones, then by name. Tensors with strides are packed
	 * row-major. The attributes of options->metadata become the file's "__metadata__", in their
	 * order; without options->metadata there is none. The file holds no checksums:
	 * options->checksums puts them beside it.
	 *
	 * Refused with -EINVAL: the dtypes IOSHAPE_COMPLEX32 and IOSHAPE_COMPLEX128, which the
	 * format does not have; a tensor called "__metadata__"; metadata with a step or a blob.
	 * IOSHAPE_E_LIMIT: the header would have more than 32 MiB, the most that the Python package
	 * reads.
	 */
	IOSHAPE_FORMAT_SAFETENSORS = 1
};

/** How tensors or records are saved. */
struct ioshape_save_options {
	size_t size;                             /**< sizeof(struct ioshape_save_options) */
	const struct ioshape_metadata *metadata; /**< borrowed during the call; NULL for none */
	ioshape_progress_fn progress;            /**< NULL for none */
	void *progress_user;                     /**< borrowed until the save has ended */
	/**
	 * Filled when the call returns, also when it failed. A save in the background has
	 * ioshape_save_get_report() instead: there, this is -EINVAL.
	 */
	struct ioshape_report *report;
	/** Off: fail with -EEXIST if the path exists when the file is committed. */
	enum ioshape_switch replace;
	/** Off: return without waiting for stable storage. Still atomic for readers. */
	enum ioshape_switch sync;
	/**
	 * 1, background saves only: nothing is copied; what is passed must stay valid and unchanged
	 * until the save has ended. That is the memory the bytes lie in (`data`, `fetch_user`):
	 * names, shapes, strides and metadata are copied all the same. Blocking saves borrow
	 * anyway, and ignore it.
	 */
	uint32_t borrow;
	ioshape_queue_fn queue; /**< told while the save waits for a slot; NULL for none */
	void *queue_user;       /**< borrowed until the save has ended */
	/**
	 * ms from the call on by which the file must be in place, because the process will end; 0:
	 * none; below 0: they are over. Such a save goes before others, as
	 * ioshape_slot_options.deadline_ms says, and leaves out what takes time: tidying, removing
	 * old generations. It goes on when the time is over: the report says whether it was in
	 * time.
	 */
	int64_t deadline_ms;
	/**
	 * IOSHAPE_CHECKSUMS_BESIDE, for safetensors files, which hold none: as in struct
	 * ioshape_file_options. Anything else is -EINVAL; torch zips have checksums in the file.
	 */
	enum ioshape_keep_checksums checksums;
	enum ioshape_format format; /**< of the file; a group's is IOSHAPE_FORMAT_TORCH */
};

#define IOSHAPE_SAVE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_save_options)

/** A save in the background. */
struct ioshape_save;

/**
 * Saves tensors to a file.
 *
 * With `out` NULL the call returns when the tensors are on stable storage and the file is in place.
 * Everything passed is borrowed until then.
 *
 * With `out` the save goes on in the background, on a thread of the library. The call returns as
 * soon as the tensors are copied into staging memory: from then on everything passed may be changed
 * or freed, except options->progress_user and options->queue_user. With options->borrow nothing is
 * copied, and the call returns at once. While earlier saves hold the staging memory, the call waits
 * for them. A checkpoint that is larger than all staging memory passes through it in pieces; the
 * call returns when the last is staged.
 *
 * Saves to one file take their places in the order of the calls. One with a deadline waits for none
 * before it; those then end well, as if it had replaced them at once. A relative path means what it
 * means at the call. Any thread may call this.
 *
 * If a save fails, what was at `path` is untouched and no temporary file is left, with one
 * exception: if only the last step fails, which brings the directory to stable storage, the new
 * file is in place and the error says so.
 *
 * @param context  an open context
 * @param path     the file to make or to replace
 * @param tensors  `count` tensors with different names
 * @param count    number of tensors; 0 is fine
 * @param options  NULL for all defaults
 * @param out      NULL to wait; otherwise receives the save, to be freed with ioshape_save_free(),
 *                 or NULL if the call fails
 * @return 0 or a negative code
 */
int ioshape_save_tensors(struct ioshape_context *context, const char *path,
			 const struct ioshape_tensor *tensors, size_t count,
			 const struct ioshape_save_options *options, struct ioshape_save **out);

/**
 * Waits until a save has ended.
 *
 * Any thread may call this, any number of times.
 *
 * @param save        the save
 * @param timeout_ms  how long to wait; negative: as long as it takes
 * @return 0 when the file is durable and in place; -EINPROGRESS if the save is still under way,
 *         and only then; otherwise the code that it failed with
 */
int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms);

/**
 * Asks a save to stop, and returns at once.
 *
 * ioshape_save_wait() then answers -ECANCELED as soon as no I/O is in flight and no temporary file
 * is left, or 0 if the new file was in place already. A save that has ended stays as it is. Any
 * thread may call this.
 *
 * @param save  the save
 * @return 0; -EPERM in a forked child
 */
int ioshape_save_cancel(struct ioshape_save *save);

/** What a save in the background is doing. */
struct ioshape_save_status {
	size_t size; /**< sizeof(struct ioshape_save_status): set before the call */
	/** IOSHAPE_PHASE_DONE, and only that: the save has ended, well or not. */
	enum ioshape_phase phase;
	uint64_t done_bytes; /**< after the end: as far as it came */
	uint64_t total_bytes;
};

#define IOSHAPE_SAVE_STATUS_INIT IOSHAPE_SIZED(ioshape_save_status)

/**
 * Tells what a save is doing.
 *
 * Any thread may call this.
 *
 * @param save    the save
 * @param status  filled; status->size must be set
 * @param place   where the save stands in the queue for a slot, all zeros unless it waits for one;
 *                place->size must be set; NULL if that is of no interest
 * @return 0; -EINVAL; -EPERM in a forked child
 */
int ioshape_save_get_status(struct ioshape_save *save, struct ioshape_save_status *status,
			    struct ioshape_place *place);

/**
 * Tells what a save did.
 *
 * Any thread may call this.
 *
 * @param save    the save
 * @param report  filled, also if the save failed; report->size must be set
 * @return 0; -EINPROGRESS if the save is still under way; -EINVAL; -EPERM in a forked child
 */
int ioshape_save_get_report(struct ioshape_save *save, struct ioshape_report *report);

/**
 * Frees a save.
 *
 * A save that is still under way is aborted first: the call then waits until no I/O is in flight;
 * no temporary file is left and the previous file stays, unless the new one was already in place.
 * Wait first to keep the save.
 *
 * @param save  the save; NULL is fine
 */
void ioshape_save_free(struct ioshape_save *save);

#ifdef __cplusplus
}
#endif

#endif
