/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libioshape: checkpoint I/O in an orderly convoy. This header has contexts, errors, saves, files
 * in other formats, and loads. ioshape/group.h (ranks that save together), ioshape/slots.h (slots
 * for programs that do their own I/O), ioshape/tier.h (a fast disk first) and ioshape/mpi.h include
 * it.
 *
 * Fork: a context belongs to the process that opened it. In a child every call on it answers -EPERM
 * and touches nothing; ioshape_context_free() in a child only forgets the handle.
 *
 * Option structs: set `size` to sizeof the struct and everything else to zero, then fill in what
 * should differ (the struct's INIT macro does the first part). Zero always means "the default". A
 * struct from a newer header is accepted as long as the fields this library does not know are zero,
 * and refused with -EINVAL otherwise. A NULL pointer to options means all defaults.
 */
#ifndef IOSHAPE_IOSHAPE_H
#define IOSHAPE_IOSHAPE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version --------------------------------------------------------------------------------- */

#define IOSHAPE_VERSION_MAJOR 0
#define IOSHAPE_VERSION_MINOR 2
#define IOSHAPE_VERSION_PATCH 0
#define IOSHAPE_VERSION "0.2.0"

/* ---- Errors ---------------------------------------------------------------------------------- */
/*
 * Every function of libioshape that can fail returns 0 (or a count) on success and a negative code
 * on failure: a negative errno (-ENOSPC, -EACCES, ...) where the operating system has a word for
 * what happened, or one of the codes below. ioshape_last_error() tells the rest.
 */

/** Codes of the library's own. They lie far below every errno of Linux, which end at 4095. */
enum ioshape_code {
	/** Not a torch zip, or one with a feature that is not read (compression, encryption). */
	IOSHAPE_E_FORMAT = -5001,
	/** The bytes are not those that were written: a checksum or a cross-check failed. */
	IOSHAPE_E_DAMAGED = -5002,
	/** A count, a length or a nesting in the file or the arguments is above a limit. */
	IOSHAPE_E_LIMIT = -5003,
	/** The file is sound, but has no tensor table: not written through the tensor calls. */
	IOSHAPE_E_NO_TABLE = -5004,
	/** The coordinator of slots is unreachable, or refuses us. */
	IOSHAPE_E_COORDINATOR = -5005,
	/** The save did not fit, and was not tried: IOSHAPE_FULL_SKIP was set. */
	IOSHAPE_E_SKIPPED = -5006,
	/** The save would repeat the one before it, and IOSHAPE_UNCHANGED_FAIL was set. */
	IOSHAPE_E_UNCHANGED = -5007,
	/** What was to be copied later changed before it was copied. */
	IOSHAPE_E_CHANGED = -5008,
	/** There are checkpoints, and none of them can be used: damaged, or of another kind. Where
	 * there is none at all, the code is -ENOENT: only then is it the first start. */
	IOSHAPE_E_UNUSABLE = -5009
};

/**
 * Gives a short text for a code.
 *
 * Any thread may call this.
 *
 * @param code  one that the library returned: its own or a negative errno
 * @return the text, never NULL, never to be freed; "unknown error" for an unknown code
 */
const char *ioshape_strerror(int code);

/**
 * What a call failed with.
 *
 * Programs look at the code and the numbers; sentence and remedy are for people, and may be worded
 * otherwise in any version. Texts are never NULL: "" where there is none.
 */
struct ioshape_error {
	size_t size; /**< sizeof(struct ioshape_error) of this library */
	int code;    /**< what the call returned; 0: no call of this thread has failed yet */
	const char *operation; /**< "save", "load", "verify", "probe", "acquire", ... */
	const char *path;      /**< of the file or directory that it is about */
	const char *sentence;  /**< what failed, and why */
	const char *remedy;    /**< what to do about it; "" if nothing is known to help */
	const char *record;    /**< or tensor that it is about; "" if it is about none */
	uint64_t offset;       /**< in the file; UINT64_MAX: it is about no place in it */
	uint64_t needed_bytes; /**< what the save takes; UINT64_MAX: it is not about space */
	uint64_t free_bytes;   /**< where it is to go; UINT64_MAX: not known, or not about space */
	int64_t rank;          /**< of the group, the one that failed; -1: not one of them */
};

/**
 * Tells about the last call of this thread that failed. Calls that succeed leave it alone.
 *
 * What a background save failed with is told to the thread that calls ioshape_save_wait() for it.
 *
 * @return the error, never NULL, never to be freed; it and its texts are valid until the thread's
 *         next call into the library
 */
const struct ioshape_error *ioshape_last_error(void);

/* ---- Contexts -------------------------------------------------------------------------------- */
/*
 * A context holds settings, kept memory, I/O engines and background saves of one user of the
 * library. Several contexts can live in one process. One context serves several threads at once:
 * every function here may be called from any thread, except that ioshape_context_free() must be the
 * last call on it.
 */

/** Settings, kept memory, I/O engines and background saves of one user of the library. */
struct ioshape_context;

/* Begins an option struct: its size, and zeros. */
#ifdef __cplusplus
#define IOSHAPE_SIZED(type)                                                                        \
	[] {                                                                                       \
		struct type value = {};                                                            \
		value.size = sizeof(value);                                                        \
		return value;                                                                      \
	}()
#else
#define IOSHAPE_SIZED(type)                                                                        \
	{                                                                                          \
		.size = sizeof(struct type)                                                        \
	}
#endif

/** Whether something is done that can be left out. */
enum ioshape_switch {
	IOSHAPE_DEFAULT = 0, /**< on, where nothing else is said */
	IOSHAPE_ON,
	IOSHAPE_OFF
};

/** What moves the bytes. */
enum ioshape_engine {
	/** URING on local filesystems, URING_ASYNC on network filesystems and FUSE; where the
	 * kernel refuses io_uring, THREADS, and else BUFFERED */
	IOSHAPE_ENGINE_AUTO = 0,
	IOSHAPE_ENGINE_URING, /**< io_uring */
	/** io_uring that never tries a request in the submitting thread (IOSQE_ASYNC): for files
	 * whose writes would be served one after the other */
	IOSHAPE_ENGINE_URING_ASYNC,
	IOSHAPE_ENGINE_THREADS, /**< a few threads calling pwrite and pread */
	IOSHAPE_ENGINE_BUFFERED /**< pwrite and pread on the saving thread, through the page cache
				 */
};

/** Whether bytes go past the page cache (O_DIRECT). */
enum ioshape_direct {
	/**
	 * Where the filesystem can. Otherwise files go through the page cache, and the report says
	 * so. On FUSE they do so by rule: most daemons are faster with it.
	 */
	IOSHAPE_DIRECT_PREFER = 0,
	IOSHAPE_DIRECT_REQUIRE, /**< fail where it cannot */
	IOSHAPE_DIRECT_OFF
};

/** What a save does while the coordinator that keeps the order of writers is unreachable. */
enum ioshape_unreachable {
	/** It waits for a share of time of its own, made from its rank, and then writes. */
	IOSHAPE_UNREACHABLE_STAGGER = 0,
	IOSHAPE_UNREACHABLE_WAIT, /**< until the coordinator is back */
	IOSHAPE_UNREACHABLE_FAIL  /**< the save fails */
};

/** What a save does that does not fit into the free space of its filesystem. */
enum ioshape_full {
	IOSHAPE_FULL_FAIL = 0, /**< -ENOSPC, before anything is written */
	/** IOSHAPE_E_SKIPPED, before anything is written: for programs that then train on */
	IOSHAPE_FULL_SKIP
};

/** What a save does whose large tensors are all those of the save before it. */
enum ioshape_unchanged {
	IOSHAPE_UNCHANGED_WARN = 0, /**< a line of the log says so; the report always does */
	IOSHAPE_UNCHANGED_FAIL,  /**< IOSHAPE_E_UNCHANGED, and what was at the path stays there */
	IOSHAPE_UNCHANGED_IGNORE /**< nothing is compared, and nothing remembered */
};

/** How important a line of the log is. */
enum ioshape_log_level {
	IOSHAPE_LOG_ERROR = 1,
	IOSHAPE_LOG_WARNING = 2,
	/** nothing is wrong, but somebody may wonder: a save waits for its slot for long */
	IOSHAPE_LOG_NOTICE = 3,
	IOSHAPE_LOG_INFO = 4, /**< the default: one line where something was not as preferred */
	IOSHAPE_LOG_DEBUG = 5
};

/**
 * Receives log lines: without a newline, valid only during the call.
 *
 * It is called from the caller's and from the library's threads, possibly at the same time. It must
 * not call back into the same context, and should be quick: heartbeats of slots may wait for it.
 */
typedef void (*ioshape_log_fn)(void *user, enum ioshape_log_level level, const char *message);

/**
 * Settings of a context.
 *
 * A field left at zero takes its value from the environment variable that is named beside it, if
 * that is set, and from the built-in default otherwise.
 */
struct ioshape_context_options {
	size_t size;                /**< sizeof(struct ioshape_context_options) */
	enum ioshape_engine engine; /**< IOSHAPE_ENGINE */
	enum ioshape_direct direct; /**< IOSHAPE_DIRECT */
	/** The least important lines that `log` is called for; no variable */
	enum ioshape_log_level log_level;
	/** IOSHAPE_STAGING_BYTES: most memory that asynchronous saves may hold; from 16 MiB on */
	uint64_t staging_bytes;
	ioshape_log_fn log; /**< NULL: no log. The library itself never prints. */
	void *log_user;     /**< borrowed until the context is freed */
	/**
	 * IOSHAPE_COORDINATOR: who says which saves may write now; see docs/slots.md.
	 *   "local"            the processes of this host among themselves, without a server
	 *   "local:/folder"    the same through this folder, which containers may share
	 *   "redis://[user[:password]@]host[:port][/db]" (several hosts, with commas, of a cluster)
	 *   "rediss://..."     the same with TLS
	 *   "unix:///path/of/socket[?db=N]"
	 *   "sentinel://[user[:password]@]host[:port],.../service[/db]"
	 *   "open"             nobody: all write at once
	 * The default is "local".
	 */
	const char *coordinator;
	/** IOSHAPE_PASSWORD_FILE: its first line is the coordinator's password, if the address has
	 * none. Without a file the variable IOSHAPE_PASSWORD has the password. The file is read
	 * before each connection. While it cannot be read, the coordinator counts as unreachable.
	 */
	const char *password_file;
	const char *pool; /**< IOSHAPE_POOL: all saves use this one, whatever their filesystem */
	const char *job;  /**< IOSHAPE_JOB: its name; the default is the launcher's */
	uint32_t share; /**< IOSHAPE_SHARE: of the pool for this job, against others; 1 to 1000; 100
			 */
	/** IOSHAPE_SLOTS: writers at a time, if the operator has set nothing; see docs/slots.md */
	uint32_t slots;
	enum ioshape_unreachable unreachable; /**< IOSHAPE_UNREACHABLE */
	uint64_t rate; /**< IOSHAPE_RATE: bytes per second of all ranks of the job; 0: any */
	/**
	 * IOSHAPE_LAYOUT: how new files shall lie on the targets of a striped filesystem (Lustre,
	 * BeeGFS); elsewhere it is ignored. See docs/filesystems.md.
	 *   "auto"       by size, where the directory's own layout would be narrower; the default
	 *   "directory"  as the directory says
	 *   "stripe_count=8,stripe_size=4M,pool=flash"  any of the three; stripe_count may be "all"
	 *   "to=100M,stripe_count=1; to=10G,stripe_count=8; stripe_count=32"  progressive
	 */
	const char *layout;
	enum ioshape_full full;           /**< IOSHAPE_FULL */
	enum ioshape_unchanged unchanged; /**< IOSHAPE_UNCHANGED; see docs/api.md */
};

#define IOSHAPE_CONTEXT_OPTIONS_INIT IOSHAPE_SIZED(ioshape_context_options)

/**
 * Opens a context.
 *
 * It creates no file, starts no thread and connects to nothing. An environment variable with a
 * value that cannot be understood fails the call; the error names it.
 *
 * @param out      receives the context, to be freed with ioshape_context_free(), or NULL
 * @param options  NULL for all defaults
 * @return 0 or a negative code
 */
int ioshape_context_open(struct ioshape_context **out,
			 const struct ioshape_context_options *options);

/**
 * Frees a context and what it keeps. It must be the last call on it.
 *
 * Handles made from it (writers, readers, files, slots, groups, generations) must have been freed
 * before. A save still in the background is aborted and waited for, leaving no temporary file; its
 * handle stays valid for ioshape_save_free() only.
 *
 * @param context  the context; NULL is fine
 */
void ioshape_context_free(struct ioshape_context *context);

/**
 * Frees memory that a call gave out and that is no handle: steps, names of pools, what a probe
 * found.
 *
 * @param memory  what the call gave; NULL is fine
 */
void ioshape_free(void *memory);

/**
 * Tells the version of the library in use, as opposed to that of the headers (IOSHAPE_VERSION).
 *
 * @return a string MAJOR.MINOR.PATCH, never NULL
 */
const char *ioshape_version(void);

/* ---- Saving tensors -------------------------------------------------------------------------- */
/*
 * Named tensors become one durable file that torch.load() opens as a dict of
 * tensors (also with weights_only=True and mmap=True).
 *
 * A save is atomic. Until the new file is complete and on stable storage, readers see what was at
 * the path before; from then on they see the new file. A save that fails or is killed leaves the
 * old file as it was. (Pipes and devices cannot be replaced: they are written straight.)
 */

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

/** Where a request for a slot stands in the queue. */
struct ioshape_place {
	size_t size;       /**< sizeof(struct ioshape_place) */
	uint32_t position; /**< requests that are ahead of it in the queue: at 0 it is the next */
	uint32_t capacity; /**< slots of the pool; 0 if it is not known */
	double waited_s;
	char ahead[128];      /**< who goes before it, or holds a slot: "job 4711, rank 7 on n03" */
	char pool[128];       /**< "" if there is no coordination */
	char coordinator[16]; /**< "redis", "local"; "unreachable" while there is no answer */
};

#define IOSHAPE_PLACE_INIT IOSHAPE_SIZED(ioshape_place)

/**
 * Told about ten times a second while a request waits, in the thread that waits.
 *
 * Anything but 0 gives up: acquiring then fails with -ECANCELED. The function must not call the
 * library.
 */
typedef int (*ioshape_queue_fn)(void *user, const struct ioshape_place *place);

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
	IOSHAPE_STEP_CHECKSUMS = 13, /**< checksums that were asked for are not beside the file */
	IOSHAPE_STEP_TIER = 14,      /**< saved directly, though the group has a tier */
	/** On the tiers of a group's nodes, which could not protect each other. */
	IOSHAPE_STEP_PARITY = 15
};

/** One of them. */
struct ioshape_step {
	enum ioshape_step_code code;
	char sentence[252]; /**< for people: what, and why */
};

/**
 * What a save did.
 *
 * Times are seconds of the clock on the wall. Strings are part of the struct: nothing to free. A
 * save that failed fills in as far as it came. ioshape_report_text() tells it to people.
 */
struct ioshape_report {
	size_t size; /**< sizeof(struct ioshape_report): set before the call */
	uint64_t file_bytes;
	double started_s; /**< when the save began, in seconds since 1970 */
	double total_s;
	double stage_s;  /**< copying into staging memory, waiting for room in it included */
	double slot_s;   /**< waiting for a slot */
	double plan_s;   /**< creating the file */
	double write_s;  /**< writing; paced_s is part of it */
	double paced_s;  /**< waiting for bandwidth, where the operator or `rate` limits it */
	double sync_s;   /**< waiting until all bytes are on stable storage */
	double commit_s; /**< waiting for earlier saves to the same file included */
	double group_s;  /**< in a group: waiting for other ranks */
	/** How long before its deadline the save ended; below 0: it was too late; 0: it had none.
	 */
	double deadline_left_s;
	uint32_t fallbacks; /**< how often something was not as preferred */
	/** What, in the order in which it came: the first `fallbacks` of them, if there is room. */
	struct ioshape_step steps[IOSHAPE_REPORT_STEPS];
	char engine[16]; /**< "uring", "uring-async", "threads", "buffered" */
	uint32_t direct; /**< 1 if blocks went past the page cache, up to the last one */
	/** 1: all large tensors or records are as in the save before it in its series. What was
	 * saved may be stale. */
	uint32_t unchanged;
	char filesystem[32];  /**< "ext4", "xfs", "tmpfs", "fuse.sshfs", ... */
	char stripes[96];     /**< the file's layout in words; "" if not striped */
	char coordinator[16]; /**< "redis", "local", "open"; "stagger", "deadline": without one */
	char ahead[128];      /**< who was before it in the queue; "" if nobody */
	char mode[16]; /**< "single": one process, one file; or a group's: "each", "node", "rank0"
			*/
	/* Of a group's save only. */
	char why[160];             /**< why the mode is what it is */
	uint64_t generation_bytes; /**< of all files; 0 if it failed */
	/** Of all ranks' parts: not written, because another rank's part is equal. */
	uint64_t repeated_bytes;
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
 * Writes a report as one line of text, without a newline: how many bytes, where the time went, how
 * they were written, and each thing that was not as preferred.
 *
 *     2,147,483,648 bytes in 0.612 s, slot 0.020 (behind job 4711, rank 7 on n03; redis),
 *     write 0.560, sync 0.029, uring, direct on ext4
 *
 * The words may change; programs read the fields. Any thread may call this.
 *
 * @param report  a report that was filled; report->size must be set
 * @param text    receives the text and a NUL, cut off if it does not fit; NULL if room is 0
 * @param room    bytes at text
 * @return the length of the whole text, as snprintf(); 0 if report->size is not that of any version
 */
size_t ioshape_report_text(const struct ioshape_report *report, char *text, size_t room);

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

/* ---- Saving records -------------------------------------------------------------------------- */
/*
 * Records are the members of a torch zip. Their names are relative to the archive's one folder:
 * "data.pkl", "data/0", "version".
 */

/**
 * Brings bytes [offset, offset + bytes) of a record to `into`.
 *
 * Anything but 0 fails the save with that code if it is a negative errno, and with -EIO otherwise.
 * The function must not save with the same context.
 */
typedef int (*ioshape_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

/** A record in the caller's memory, or of memory that a function reads. */
struct ioshape_record {
	/**
	 * A relative path without ".", ".." or empty parts, unique in the file. Names under
	 * ".ioshape/" are reserved for the library. torch needs "data.pkl", as the first record,
	 * and "version".
	 */
	const char *name;
	const void *data; /**< NULL if there are no bytes, or if `fetch` brings them */
	uint64_t bytes;
	/** Where in the file the data may begin: a power of two up to 4096. 0 chooses: 4096 from
	 * 256 KiB on, 64 below. */
	uint32_t alignment;
	/** For memory that the CPU cannot read, such as a GPU's; NULL otherwise. */
	ioshape_fetch_fn fetch;
	void *fetch_user;
};

/**
 * Saves records to a file: for files with a pickle of the caller's own.
 *
 * The file holds the records in the order of the array. All names are checked before anything is
 * created. All that ioshape_save_tensors() says holds here, too. options->format must be
 * IOSHAPE_FORMAT_TORCH.
 *
 * `fetch` is called in the order of records and offsets, once for each byte; a large record comes
 * in pieces. It is called on the calling thread, which then copies the other records alone, and has
 * brought everything when the call returns. A background save with options->borrow calls it on the
 * saving thread instead, until the save has ended.
 *
 * @param context  an open context
 * @param path     the file to make or to replace
 * @param records  `count` records with different names
 * @param count    number of records
 * @param options  NULL for all defaults
 * @param out      NULL to wait; otherwise receives the save, to be freed with ioshape_save_free(),
 *                 or NULL if the call fails
 * @return 0 or a negative code; -EEXIST: two records have one name
 */
int ioshape_save_records(struct ioshape_context *context, const char *path,
			 const struct ioshape_record *records, size_t count,
			 const struct ioshape_save_options *options, struct ioshape_save **out);

/* ---- Files in other formats ------------------------------------------------------------------ */
/*
 * Files in somebody else's format (torch's legacy format, ...), written as safely and
 * quickly as checkpoints: bytes go in, front to back, and the file appears whole or not at all.
 *
 * A file may be used by one thread at a time; different files of one context are written at the
 * same time.
 */

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

/* ---- Loading --------------------------------------------------------------------------------- */
/*
 * A reader may be used by one thread at a time; different readers of one context work at the same
 * time.
 */

/** A torch zip that is open for reading: one of this library or of torch.save(). */
struct ioshape_reader;

/** How a file is read. */
struct ioshape_reader_options {
	size_t size;                /**< sizeof(struct ioshape_reader_options) */
	enum ioshape_switch verify; /**< compare checksums while reading */
	/**
	 * 1: what is read into has just been allocated and never been written to. Where it is
	 * large, or many pieces lie side by side, it is then filled in huge pages, several times as
	 * fast, unless they cost the kernel more than small ones.
	 */
	uint32_t fresh_memory;
	ioshape_progress_fn progress;
	void *progress_user; /**< borrowed until the reader is freed */
	/**
	 * Reads a part of a file, such as a member of a bundle: file_bytes bytes from file_offset
	 * on, as if they were the whole of it. Offsets and file_bytes of all calls are then the
	 * part's. 0 and 0: all of the file.
	 */
	uint64_t file_offset;
	uint64_t file_bytes;
	/**
	 * 1: the file may be in any format. One that has checksums beside it
	 * (`NAME.ioshape-sums`) is verified by them; otherwise a torch zip is read as such, and
	 * any other file has nothing to verify. All of the file is then record 0, which has no
	 * name. Checksums beside a file count only if it has not been modified since.
	 */
	uint32_t any_format;
	/**
	 * IOSHAPE_ON: other processes of this host read the same bytes at about the same time. They
	 * come through the page cache then, and the storage is asked for them once (unless the
	 * context requires direct I/O). IOSHAPE_OFF: no other process does. By default it is on if
	 * the job has several ranks on this host, if at most 256 MiB are read, or if another reader
	 * of this host has the file open.
	 */
	enum ioshape_switch shared;
};

#define IOSHAPE_READER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_reader_options)

/** What a file consists of. */
struct ioshape_reader_info {
	size_t size; /**< sizeof(struct ioshape_reader_info): set before the call */
	uint64_t file_bytes;
	uint64_t records;   /**< their indices are 0 and up, in the order of the file */
	uint64_t tensors;   /**< 0 without a table */
	uint32_t has_table; /**< 1: of tensors; the functions for tensors can be used */
	/** What has a checksum of its own, so that parts are verified; 0: whole records only. */
	uint32_t block_bytes;
	uint32_t torch_zip; /**< 0: it is read as a file in another format */
	uint32_t checksums; /**< 1: what is read can be verified */
	/**
	 * For those who bring bytes to where the CPU does not see them, as by GPUDirect Storage: a
	 * descriptor of the file that was opened, for direct reads (O_DIRECT). The reader closes
	 * it. -1 if the file cannot be read directly.
	 */
	int32_t direct_fd;
	uint32_t reserved;
	uint64_t file_offset; /**< where in that file offset 0 is: a part may be open */
};

#define IOSHAPE_READER_INFO_INIT IOSHAPE_SIZED(ioshape_reader_info)

/** A record of a file. */
struct ioshape_record_info {
	size_t size;      /**< sizeof(struct ioshape_record_info): set before the call */
	const char *name; /**< valid until the reader is freed */
	uint64_t bytes;
	uint64_t file_offset; /**< of the record's first byte of data */
	uint32_t crc32;
	uint32_t reserved;
	/**
	 * One CRC-32 for each block_bytes of the record, the last one of what is left. NULL if
	 * there are none. Valid until the reader is freed.
	 */
	const uint32_t *block_crc32;
};

#define IOSHAPE_RECORD_INFO_INIT IOSHAPE_SIZED(ioshape_record_info)

/** A tensor of a file. */
struct ioshape_tensor_info {
	size_t size;      /**< sizeof(struct ioshape_tensor_info): set before the call */
	const char *name; /**< this, shape and strides: valid until the reader is freed */
	enum ioshape_dtype dtype;
	uint32_t dims;
	const int64_t *shape;
	const int64_t *strides; /**< never NULL if dims > 0; in elements */
	/** What ioshape_reader_load() delivers: the tensor's memory in this layout. */
	uint64_t bytes;
	uint64_t record;        /**< index of the record that holds it */
	const char *dtype_name; /**< torch's, without the "torch.": "bfloat16" */
};

#define IOSHAPE_TENSOR_INFO_INIT IOSHAPE_SIZED(ioshape_tensor_info)

/**
 * Opens a torch zip.
 *
 * The file is untrusted: every count and offset in it is checked against limits and the file's
 * size, in bounded time and memory. The reader goes on with the file that it opened, also when that
 * is replaced.
 *
 * @param context  an open context; it must outlive the reader
 * @param path     the file
 * @param options  NULL for all defaults
 * @param out      receives the reader, to be freed with ioshape_reader_free(), or NULL
 * @return 0; IOSHAPE_E_FORMAT, IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT; another negative code
 */
int ioshape_reader_open(struct ioshape_context *context, const char *path,
			const struct ioshape_reader_options *options, struct ioshape_reader **out);

/**
 * Tells what a file consists of.
 *
 * @param reader  the reader
 * @param info    filled; info->size must be set
 * @return 0 or a negative code
 */
int ioshape_reader_get_info(struct ioshape_reader *reader, struct ioshape_reader_info *info);

/**
 * Tells about a record.
 *
 * @param reader  the reader
 * @param index   of the record
 * @param info    filled; info->size must be set
 * @return 0; -ENOENT if there is no such index; another negative code
 */
int ioshape_reader_get_record(struct ioshape_reader *reader, uint64_t index,
			      struct ioshape_record_info *info);

/**
 * Finds a record by its name.
 *
 * @param reader  the reader
 * @param name    of the record
 * @param index   receives its index
 * @return 0; -ENOENT if there is no such name; another negative code
 */
int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name, uint64_t *index);

/**
 * Reads bytes [offset, offset + bytes) of a record.
 *
 * Files of this library have a checksum for each MiB of a record: every block that the range
 * touches is read and verified. Files of torch.save() have one for each record, which is verified
 * when all of the record is read. After IOSHAPE_E_DAMAGED what `into` holds is undefined; the error
 * names record and offset.
 *
 * Calls that go through the file front to back are as fast as one ioshape_reader_load(): the reader
 * reads ahead while the caller does other things. The memory for that is the reader's until the end
 * of the records is reached, another of its functions reads, a call fails, or the reader is freed.
 *
 * @param reader  the reader
 * @param record  index of the record; a file that is read in another format (`any_format`) is
 *                record 0, all of it
 * @param offset  in the record
 * @param into    receives the bytes
 * @param bytes   how many
 * @return 0; -ERANGE if the range leaves the record; IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record, uint64_t offset, void *into,
			size_t bytes);

/**
 * Checks the archive's structure, reads a share of the data, and compares its checksums.
 *
 * Structure are the directory, the index and all headers. What is read of the data is spread evenly
 * over the file from a random place on: MiBs of files of this library, records of files of
 * torch.save().
 *
 * @param reader  the reader
 * @param share   of the data, from 0 (structure only) to 1 (every record)
 * @return 0; IOSHAPE_E_DAMAGED for the first damage; -ENODATA if the file was written without
 *         checksums (torch's set_crc32_options(False)); -EINVAL if it is no such share; another
 *         negative code
 */
int ioshape_reader_verify(struct ioshape_reader *reader, double share);

/**
 * Tells about a tensor.
 *
 * @param reader  the reader
 * @param index   of the tensor
 * @param info    filled; info->size must be set
 * @return 0; -ENOENT if there is no such index; IOSHAPE_E_NO_TABLE if the file was not written
 *         through the calls for tensors; another negative code
 */
int ioshape_reader_get_tensor(struct ioshape_reader *reader, uint64_t index,
			      struct ioshape_tensor_info *info);

/**
 * Finds a tensor by its name.
 *
 * @param reader  the reader
 * @param name    of the tensor
 * @param index   receives its index
 * @return 0; -ENOENT if there is no such name; IOSHAPE_E_NO_TABLE; another negative code
 */
int ioshape_reader_find_tensor(struct ioshape_reader *reader, const char *name, uint64_t *index);

/** One tensor, or a range of its bytes, to be read into the caller's memory. */
struct ioshape_load_request {
	uint64_t tensor; /**< index */
	uint64_t offset; /**< in bytes of its memory */
	uint64_t bytes;
	void *into;
};

/**
 * Loads any number of tensors or ranges at once.
 *
 * They are read in the order of the file, far ahead: many in one call are much faster than one at a
 * time. Ranges may overlap.
 *
 * @param reader    the reader
 * @param requests  what to read, and where to
 * @param count     number of requests
 * @return 0; -ENOENT, -ERANGE, IOSHAPE_E_NO_TABLE, IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_reader_load(struct ioshape_reader *reader, const struct ioshape_load_request *requests,
			size_t count);

/**
 * Loads any number of records or ranges at once, as ioshape_reader_load() does tensors. The file
 * needs no table; one in another format (`any_format`) is record 0, all of it.
 *
 * @param reader    the reader
 * @param requests  what to read, and where to; `tensor` is the index of a record
 * @param count     number of requests
 * @return 0; -ENOENT, -ERANGE, IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_reader_load_records(struct ioshape_reader *reader,
				const struct ioshape_load_request *requests, size_t count);

/**
 * Tells what was given as metadata at the save; zeros for a file that has none.
 *
 * @param reader    the reader
 * @param metadata  filled, with pointers that are valid until the reader is freed; metadata->size
 *                  must be set
 * @return 0 or a negative code
 */
int ioshape_reader_get_metadata(struct ioshape_reader *reader, struct ioshape_metadata *metadata);

/**
 * Frees a reader.
 *
 * @param reader  the reader; NULL is fine
 */
void ioshape_reader_free(struct ioshape_reader *reader);

#ifdef __cplusplus
}
#endif

#endif
