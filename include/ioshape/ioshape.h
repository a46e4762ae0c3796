/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libioshape writes and reads checkpoints of training jobs. This header declares contexts, errors,
 * saves, files in other formats, and loads.
 *
 * Four more headers include this one:
 *
 * - ioshape/group.h: the ranks of a job save one checkpoint together.
 * - ioshape/slots.h: slots for programs that do their own I/O.
 * - ioshape/tier.h: saves go to a fast local disk first.
 * - ioshape/mpi.h: groups of programs that use MPI.
 *
 * Results: functions that return int return 0 on success and a negative code on failure.
 * ioshape_last_error() then describes the failure.
 *
 * Fork: a context and its handles belong to the process that opened the context. In a child of
 * fork(), functions that return int return -EPERM and change nothing. Functions that free a handle
 * may be called. They leave the parent's saves, files and slots as they are. To save in a child,
 * open a context there.
 *
 * Option structs: set `size` to sizeof the struct and all other members to zero, then set the
 * members that should differ. The struct's INIT macro sets `size` and zeroes the rest. Zero always
 * means the default. A NULL pointer to options means all defaults. A struct from a newer header is
 * accepted if the members that this library does not know are zero. Otherwise the call fails with
 * -EINVAL.
 *
 * Structs that a call fills: set `size` to sizeof the struct before the call. If your header is
 * newer than the library, members that the library does not know become zero.
 *
 * Pointers: the library borrows memory that you pass until the call returns, unless the function
 * says otherwise. Strings end with a zero byte, and names are UTF-8.
 *
 * Units: names that end in `_bytes` count bytes, `_ms` milliseconds and `_s` seconds.
 */
#ifndef IOSHAPE_IOSHAPE_H
#define IOSHAPE_IOSHAPE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version of these headers ---------------------------------------------------------------- */

/** Major version of these headers. ioshape_version() returns the version of the library in use. */
#define IOSHAPE_VERSION_MAJOR 0
/** Minor version of these headers. Before 1.0, a new minor version may change the API. */
#define IOSHAPE_VERSION_MINOR 2
/** Patch version of these headers. */
#define IOSHAPE_VERSION_PATCH 0
/** Version of these headers as a string MAJOR.MINOR.PATCH. */
#define IOSHAPE_VERSION "0.2.0"

/* ---- Errors ---------------------------------------------------------------------------------- */
/* A function that can fail returns 0 on success and a negative code on failure. The code is a
 * negative errno (-ENOSPC, -EACCES, ...) where Linux has one that fits. Otherwise it is a member of
 * enum ioshape_code. ioshape_last_error() returns the details. */

/** Error codes of this library. They are below -5000. Every errno of Linux is at most 4095, so a
 * code is never a negative errno as well. */
enum ioshape_code {
	/** The file is not a torch zip, or it uses a feature that the library cannot read, such as
	 * compression or encryption. */
	IOSHAPE_E_FORMAT = -5001,
	/** The file is damaged: a checksum or a cross-check failed, or the file is truncated or
	 * empty. */
	IOSHAPE_E_DAMAGED = -5002,
	/** A count, a length or a nesting depth in the file or in the arguments exceeds a limit. */
	IOSHAPE_E_LIMIT = -5003,
	/** The file is valid but has no tensor table, because it was not written by the calls that
	 * save tensors. */
	IOSHAPE_E_NO_TABLE = -5004,
	/** The coordinator of slots is unreachable or rejects this process. */
	IOSHAPE_E_COORDINATOR = -5005,
	/** The save did not fit into the free space and wrote nothing, because the context has
	 * IOSHAPE_FULL_SKIP. */
	IOSHAPE_E_SKIPPED = -5006,
	/** The content of the save looks wrong, compared with the checkpoint before it, and
	 * `examine` of the context's options says that the save fails. */
	IOSHAPE_E_ALARM = -5007,
	IOSHAPE_E_UNCHANGED = -5007, /**< former name of IOSHAPE_E_ALARM */
	/** The program changed memory that a save still read: in a save of a group that borrows, or
	 * in a save of the Python package that copies after the call. */
	IOSHAPE_E_CHANGED = -5008,
	/**
	 * There are checkpoints, but none of them can be used: each is damaged or of another kind.
	 * If there is no checkpoint at all, the code is -ENOENT instead, which means that the job
	 * starts for the first time.
	 */
	IOSHAPE_E_UNUSABLE = -5009
};

/**
 * Returns a short text that describes an error code.
 *
 * Any thread may call this function.
 *
 * @param code  code that a function returned. A member of enum ioshape_code or a negative errno
 * @return constant text, never NULL, not to be freed; "unknown error" for an unknown code
 */
const char *ioshape_strerror(int code);

/**
 * Details of a failed call.
 *
 * Programs evaluate the code and the numbers. The sentence and the remedy are for people, and their
 * wording may change in any version. Text members are never NULL. A text that does not apply is "".
 */
struct ioshape_error {
	size_t size; /**< size of this struct in bytes, as this library knows it */
	int code;    /**< code that the call returned; 0 if no call of this thread has failed yet */
	/** operation that failed: "save", "load", "verify", "open", "acquire", ... */
	const char *operation;
	const char *path;     /**< path of the file or directory that the error is about */
	const char *sentence; /**< what failed and why, in one sentence */
	const char *remedy;   /**< what to do about the failure; "" if no remedy is known */
	/** name of the record or tensor that the error is about; "" if it is about none */
	const char *record;
	/** offset in the file where the failure is; UINT64_MAX if there is none */
	uint64_t offset;
	/** bytes that the save needs; UINT64_MAX if the error is not about space */
	uint64_t needed_bytes;
	/**
	 * bytes free at the destination; UINT64_MAX if unknown, or if the error is not about space
	 */
	uint64_t free_bytes;
	int64_t rank; /**< rank of the group that failed; -1 if no rank of a group did */
};

/**
 * Returns the details of the last call of this thread that failed.
 *
 * Successful calls do not change the details. If a background save fails, the thread that calls
 * ioshape_save_wait() for that save gets its details.
 *
 * @return details of the error. NULL is never returned. The struct and its texts belong to the
 *         library, and are valid until the next call of this thread that fails
 */
const struct ioshape_error *ioshape_last_error(void);

/* ---- Contexts -------------------------------------------------------------------------------- */
/* Every save, load, file and slot belongs to a context. It holds settings, cached memory, I/O
 * engines and background saves. One context is enough for a process. Any number of threads may use
 * it at the same time. ioshape_context_free() must be the last call on it. */

/** Settings, cached memory, I/O engines and background saves of a program. */
struct ioshape_context;

/* Initializes an option struct: sets its size and zeroes all other members. */
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

/** Setting of a feature that can be turned off. */
enum ioshape_switch {
	/** the default of the member, which is on unless its description says otherwise */
	IOSHAPE_DEFAULT = 0,
	IOSHAPE_ON, /**< the feature is on */
	IOSHAPE_OFF /**< the feature is off */
};

/** I/O engine: how the bytes reach the storage. */
enum ioshape_engine {
	/** The library chooses: URING on local filesystems, URING_ASYNC on network filesystems and
	 * FUSE. If the kernel refuses io_uring, it takes THREADS, and if that fails, BUFFERED. */
	IOSHAPE_ENGINE_AUTO = 0,
	IOSHAPE_ENGINE_URING, /**< io_uring; saves fail where the kernel refuses io_uring */
	/**
	 * io_uring with IOSQE_ASYNC: kernel threads serve every request. Filesystems that serve the
	 * writes of a file in the submitting thread, one after the other, are faster with it.
	 */
	IOSHAPE_ENGINE_URING_ASYNC,
	IOSHAPE_ENGINE_THREADS, /**< up to 16 threads that call pwrite and pread */
	/** pwrite and pread on the saving thread, through the page cache */
	IOSHAPE_ENGINE_BUFFERED
};

/** Whether blocks bypass the page cache (O_DIRECT). */
enum ioshape_direct {
	/**
	 * Use direct I/O where the filesystem supports it. Elsewhere, blocks go through the page
	 * cache, and the report says so. On FUSE, blocks always go through the page cache, because
	 * most FUSE daemons are faster that way.
	 */
	IOSHAPE_DIRECT_PREFER = 0,
	IOSHAPE_DIRECT_REQUIRE, /**< fail where the filesystem does not support direct I/O */
	IOSHAPE_DIRECT_OFF      /**< always go through the page cache */
};

/** What a save does while the coordinator that orders the writers is unreachable. */
enum ioshape_unreachable {
	/** Wait for a time that depends on the rank, 2 minutes at most, then write without a slot.
	 * So the ranks of a job do not all write at once. */
	IOSHAPE_UNREACHABLE_STAGGER = 0,
	IOSHAPE_UNREACHABLE_WAIT, /**< wait until the coordinator is reachable again */
	IOSHAPE_UNREACHABLE_FAIL  /**< fail with IOSHAPE_E_COORDINATOR */
};

/** What a save does if the free space of its filesystem is too small. */
enum ioshape_full {
	IOSHAPE_FULL_FAIL = 0, /**< fail with -ENOSPC before anything is written */
	/** End with IOSHAPE_E_SKIPPED before anything is written, for programs that train on and
	 * save again later. */
	IOSHAPE_FULL_SKIP
};

/** Faults in the content of a checkpoint, compared with the checkpoint before it. */
enum ioshape_alarm {
	/** a tensor has NaN or infinities, and had none */
	IOSHAPE_ALARM_NONFINITE = 1,
	/** all large tensors are byte for byte those of the checkpoint before, or all of a group
	 * that moved before are. A file that is saved to its path again raises no alarm if
	 * nothing in it has changed */
	IOSHAPE_ALARM_UNCHANGED = 2,
	/** a large tensor has one number everywhere, and had several */
	IOSHAPE_ALARM_CONSTANT = 4,
	/** the norm of a large tensor is more than ten times, or less than a tenth of what it was
	 */
	IOSHAPE_ALARM_JUMP = 8
};

/** Severity of a log line. Lower values are more severe. */
enum ioshape_log_level {
	/** a background save failed; failures of other calls are returned instead */
	IOSHAPE_LOG_ERROR = 1,
	IOSHAPE_LOG_WARNING = 2, /**< an unexpected event, such as an abandoned temporary file */
	/** nothing is wrong, but the operator may want to know: a save has waited for its slot for
	 * a while */
	IOSHAPE_LOG_NOTICE = 3,
	IOSHAPE_LOG_INFO = 4, /**< the default: one line for each downgrade of a save */
	IOSHAPE_LOG_DEBUG = 5 /**< details of each save */
};

/**
 * Receives one log line.
 *
 * The library calls this function from threads of the caller and from its own threads, possibly at
 * the same time. The function must not call the library with the same context. It should return
 * quickly, because heartbeats of slots may wait for it.
 *
 * @param user     `log_user` of the context's options
 * @param level    severity of the line
 * @param message  text without a newline; valid only during the call
 */
typedef void (*ioshape_log_fn)(void *user, enum ioshape_log_level level, const char *message);

/**
 * Settings of a context.
 *
 * If a member is zero, ioshape_context_open() takes the value of the environment variable that the
 * member's description names. If that variable is unset or empty, the default holds. A program with
 * more rights than its user (setuid, setgid, capabilities) ignores the variables.
 */
struct ioshape_context_options {
	size_t size;                /**< sizeof(struct ioshape_context_options) */
	enum ioshape_engine engine; /**< I/O engine (IOSHAPE_ENGINE) */
	enum ioshape_direct direct; /**< direct I/O (IOSHAPE_DIRECT) */
	/**
	 * Least severe level that `log` receives. Default: IOSHAPE_LOG_INFO. There is no variable.
	 */
	enum ioshape_log_level log_level;
	/**
	 * Most bytes of memory that background saves may hold (IOSHAPE_STAGING_BYTES): 16 MiB or
	 * more. Default: a quarter of the memory, divided by the ranks that the launcher started on
	 * this host, but at least 64 MiB. In a container, its memory limit counts as the memory.
	 */
	uint64_t staging_bytes;
	ioshape_log_fn log; /**< function that receives log lines; NULL for no log */
	void *log_user;     /**< passed to `log`; borrowed until the context is freed */
	/**
	 * Address of the coordinator, which decides which saves may write now
	 * (IOSHAPE_COORDINATOR). docs/slots.md describes how it decides. Default: "local".
	 *
	 *     "local"            the processes of this host, without a server.
	 *     "local:/folder"    the processes that share this folder, such as several containers.
	 *     "redis://[user[:password]@]host[:port][/db]"
	 *                        a Redis or Valkey; a comma between several hosts of a cluster.
	 *     "rediss://..."     a Redis or Valkey, with TLS.
	 *     "unix:///path/of/socket[?db=N]"
	 *                        a Redis or Valkey, through a socket of this host.
	 *     "sentinel://[user[:password]@]host[:port],.../service[/db]"
	 *                        the Redis master that these sentinels name.
	 *     "open"             no coordination: all processes write at once.
	 */
	const char *coordinator;
	/**
	 * Path of a file whose first line is the coordinator's password (IOSHAPE_PASSWORD_FILE). A
	 * password in the address takes precedence. The library reads the file before each
	 * connection. While the file cannot be read, the coordinator counts as unreachable. NULL:
	 * the environment variable IOSHAPE_PASSWORD has the password, if there is one.
	 */
	const char *password_file;
	/**
	 * Name of the pool of slots in which all saves of this context queue (IOSHAPE_POOL):
	 * letters, digits and ._:@+/- only. Default: one pool for each filesystem, named after it.
	 */
	const char *pool;
	/** Name of the job (IOSHAPE_JOB), by which operators see and limit it. Default: the number
	 * or name that the launcher gives, such as SLURM_JOB_ID. */
	const char *job;
	/** Share of this job in the slots of a pool that several jobs use, with a Redis
	 * (IOSHAPE_SHARE): 1 to 1000. Twice the share gets twice the slots. Default: 100. */
	uint32_t share;
	/** Number of writers that the pool admits at a time, if the operator has set none
	 * (IOSHAPE_SLOTS): 1 to 65536. Default: by the filesystem, see docs/slots.md. */
	uint32_t slots;
	/** what a save does while the coordinator is unreachable (IOSHAPE_UNREACHABLE) */
	enum ioshape_unreachable unreachable;
	/** Bandwidth limit in bytes per second for all ranks of the job together (IOSHAPE_RATE).
	 * Default: no limit. */
	uint64_t rate;
	/**
	 * Layout of new files on the targets of a striped filesystem, Lustre or BeeGFS
	 * (IOSHAPE_LAYOUT). Other filesystems ignore it. docs/filesystems.md has the details.
	 * Default: "auto".
	 *
	 *     "auto"       by the file's size, if the layout of the directory would be narrower.
	 *     "directory"  the layout of the directory.
	 *     "stripe_count=8,stripe_size=4M,pool=flash"
	 *                  any of these three; stripe_count may be "all".
	 */
	const char *layout;
	enum ioshape_full full; /**< what a save that does not fit does (IOSHAPE_FULL) */
	/**
	 * What a save does if its content looks wrong, compared with the checkpoint before it
	 * (IOSHAPE_EXAMINE): "warn" writes a line to the log, "fail" fails with IOSHAPE_E_ALARM and
	 * leaves the old file at the path, "off" does nothing. A list sets single rules, such as
	 * "nonfinite=fail,jump=warn"; enum ioshape_alarm describes the rules. The others keep
	 * their default, which is "warn", and "off" for `jump`. A word without a rule sets all
	 * rules but `jump`. Default: "warn".
	 *
	 * The checkpoint before is the newest that this context saved or loaded and whose path
	 * differs in numbers at most. Without one, there are no alarms. If all rules are off, saves
	 * take no statistics.
	 */
	const char *examine;
};

/** Initializes a struct ioshape_context_options with all defaults. */
#define IOSHAPE_CONTEXT_OPTIONS_INIT IOSHAPE_SIZED(ioshape_context_options)

/**
 * Opens a context.
 *
 * The call creates no file, starts no thread and makes no connection.
 *
 * @param out      receives the context, to be freed with ioshape_context_free(); NULL if the call
 *                 fails
 * @param options  settings of the context; NULL for all defaults
 * @return 0; -EINVAL if an option or an environment variable has an invalid value, which the error
 *         names; -ENOMEM
 */
int ioshape_context_open(struct ioshape_context **out,
			 const struct ioshape_context_options *options);

/**
 * Frees a context and everything that it caches.
 *
 * This must be the last call on the context. Free all readers, files, slots, groups, tiers and
 * checkpoints of the context before. Saves that are still in the background are aborted and leave
 * no temporary file. The call waits for their end. Their handles stay valid for ioshape_save_free()
 * only. In a forked child the call does nothing.
 *
 * @param context  the context; NULL is allowed
 */
void ioshape_context_free(struct ioshape_context *context);

/**
 * Frees memory that the library allocated for the caller and that is not a handle.
 *
 * Such memory comes from ioshape_checkpoint_list(), ioshape_tier_path(), ioshape_tier_find() and
 * ioshape_tier_list(). Any thread may call this function.
 *
 * @param memory  the memory; NULL is allowed
 */
void ioshape_free(void *memory);

/**
 * Returns the version of the library in use. IOSHAPE_VERSION is the version of the headers.
 *
 * Any thread may call this function.
 *
 * @return constant string MAJOR.MINOR.PATCH, never NULL, not to be freed
 */
const char *ioshape_version(void);

/* ---- Saving tensors -------------------------------------------------------------------------- */
/*
 * Named tensors become one durable file that torch.load() opens as a dict of tensors, also with
 * weights_only=True and mmap=True.
 *
 * A save is atomic. Readers see the old file until the new file is complete and on stable storage.
 * From then on they see the new file. A save that fails or is killed leaves the old file as it was.
 * Pipes and devices cannot be replaced: the library writes to them directly.
 */

/** Types of tensor elements. The values are part of the file format and never change. */
enum ioshape_dtype {
	IOSHAPE_UINT8 = 1,          /**< unsigned integer, 1 byte */
	IOSHAPE_INT8 = 2,           /**< signed integer, 1 byte */
	IOSHAPE_INT16 = 3,          /**< signed integer, 2 bytes */
	IOSHAPE_INT32 = 4,          /**< signed integer, 4 bytes */
	IOSHAPE_INT64 = 5,          /**< signed integer, 8 bytes */
	IOSHAPE_FLOAT16 = 6,        /**< IEEE 754 half precision, 2 bytes */
	IOSHAPE_FLOAT32 = 7,        /**< IEEE 754 single precision, 4 bytes */
	IOSHAPE_FLOAT64 = 8,        /**< IEEE 754 double precision, 8 bytes */
	IOSHAPE_COMPLEX32 = 9,      /**< two float16: real and imaginary part */
	IOSHAPE_COMPLEX64 = 10,     /**< two float32: real and imaginary part */
	IOSHAPE_COMPLEX128 = 11,    /**< two float64: real and imaginary part */
	IOSHAPE_BOOL = 12,          /**< one byte, 0 or 1 */
	IOSHAPE_BFLOAT16 = 13,      /**< bfloat16, 2 bytes */
	IOSHAPE_UINT16 = 14,        /**< unsigned integer, 2 bytes */
	IOSHAPE_UINT32 = 15,        /**< unsigned integer, 4 bytes */
	IOSHAPE_UINT64 = 16,        /**< unsigned integer, 8 bytes */
	IOSHAPE_FLOAT8_E4M3FN = 17, /**< 1 byte: 4 bits of exponent, 3 of mantissa, no infinities */
	IOSHAPE_FLOAT8_E5M2 = 18,   /**< 1 byte: 5 bits of exponent, 2 of mantissa */
	/** 1 byte, as FLOAT8_E4M3FN with another bias and no negative zero */
	IOSHAPE_FLOAT8_E4M3FNUZ = 19,
	/** 1 byte, as FLOAT8_E5M2 with another bias, no infinities and no negative zero */
	IOSHAPE_FLOAT8_E5M2FNUZ = 20,
	IOSHAPE_FLOAT8_E8M0FNU = 21, /**< 1 byte: an exponent of 8 bits only */
	/** two values of 4 bits in one byte; shapes count bytes, as in torch */
	IOSHAPE_FLOAT4_E2M1FN_X2 = 22
};

/**
 * Returns the size of an element in bytes.
 *
 * Any thread may call this function.
 *
 * @param dtype  type of the element
 * @return size in bytes; 0 if the value is not a member of enum ioshape_dtype
 */
size_t ioshape_dtype_bytes(enum ioshape_dtype dtype);

/** Largest number of tensors in a file. Calls that exceed it fail with IOSHAPE_E_LIMIT. */
#define IOSHAPE_MAX_TENSORS 4194304u
/** Longest name in bytes of a tensor, record or attribute. Calls that exceed it fail with
 * IOSHAPE_E_LIMIT. */
#define IOSHAPE_MAX_NAME_BYTES 4096u
/** Largest number of dimensions of a tensor, as in torch. Calls that exceed it fail with
 * IOSHAPE_E_LIMIT. */
#define IOSHAPE_MAX_DIMS 64u
/** Largest number of string attributes of a file. Calls that exceed it fail with IOSHAPE_E_LIMIT.
 */
#define IOSHAPE_MAX_ATTRIBUTES 4096u
/** Largest size in bytes of the user blob and all attributes of a file together. Calls that exceed
 * it fail with IOSHAPE_E_LIMIT. */
#define IOSHAPE_MAX_METADATA_BYTES (16u << 20)

/** A tensor in the caller's memory. The call that takes it says how long it borrows that memory. */
struct ioshape_tensor {
	const char *name;         /**< UTF-8, not empty, unique in the file */
	enum ioshape_dtype dtype; /**< type of the elements */
	uint32_t dims;            /**< number of dimensions; 0 for a scalar */
	const int64_t *shape;     /**< `dims` lengths, none negative */
	/**
	 * `dims` distances between neighbours, in elements, none negative. NULL for a contiguous
	 * (row-major) tensor. The strides must permute dense memory (a transposed matrix,
	 * channels_last), and the file keeps them. Other strides are refused with -EINVAL: save a
	 * contiguous copy.
	 */
	const int64_t *strides;
	const void *data; /**< first element; may be NULL if there are no elements */
};

/** A pair of strings that is stored in a file. */
struct ioshape_attribute {
	const char *name;  /**< UTF-8, not empty, unique among the attributes */
	const char *value; /**< UTF-8, not NULL */
};

/** User data in a file beside its tensors or records. torch does not show it. All members but
 * `size` are optional. */
struct ioshape_metadata {
	size_t size;       /**< sizeof(struct ioshape_metadata) */
	int64_t step;      /**< training step, or another counter of the caller; 0 if not given */
	const void *blob;  /**< `blob_bytes` bytes of the caller */
	size_t blob_bytes; /**< size of `blob` */
	const struct ioshape_attribute *attributes; /**< `attribute_count` attributes */
	size_t attribute_count;                     /**< number of attributes */
};

/** Initializes a struct ioshape_metadata without any data. */
#define IOSHAPE_METADATA_INIT IOSHAPE_SIZED(ioshape_metadata)

/** Position of a request in the queue for a slot. */
struct ioshape_place {
	size_t size; /**< sizeof(struct ioshape_place) */
	/** number of requests ahead in the queue; 0 if this request is the next */
	uint32_t position;
	uint32_t capacity; /**< number of slots of the pool; 0 if unknown */
	double waited_s;   /**< seconds that the request has waited so far */
	char ahead[128];   /**< request ahead, or holder of a slot: "job 4711, rank 7 on n03" */
	char pool[128];    /**< name of the pool; "" without coordination */
	/** "redis" or "local"; "unreachable" while the coordinator does not answer */
	char coordinator[16];
};

/** Initializes a struct ioshape_place. */
#define IOSHAPE_PLACE_INIT IOSHAPE_SIZED(ioshape_place)

/**
 * Receives the position of a request while it waits for a slot.
 *
 * The library calls this function about ten times a second, on the thread that waits: the caller's
 * thread, or in a background save a thread of the library. The function must not call the library.
 *
 * @param user   pointer that the caller gave together with the function
 * @param place  position in the queue. It is valid only during the call
 * @return 0 to wait on. Another value gives up, and the request then fails with -ECANCELED
 */
typedef int (*ioshape_queue_fn)(void *user, const struct ioshape_place *place);

/**
 * Names the tensor in a record, for the sentence of an alarm (enum ioshape_alarm).
 *
 * A save calls this function only if it raises an alarm, on the thread that writes. The function
 * must not call the library.
 *
 * @param user    pointer that the caller gave together with the function
 * @param record  name of the record
 * @param name    receives the name of its tensor in UTF-8, with a zero at the end. It begins as an
 *                empty string, and stays so if the name is unknown
 * @param bytes   size of `name`
 */
typedef void (*ioshape_name_fn)(void *user, const char *record, char *name, size_t bytes);

/** Phase of a save, a load or a verification. */
enum ioshape_phase {
	/** copying the tensors into staging memory, in the caller's thread; background saves only
	 */
	IOSHAPE_PHASE_STAGE = 1,
	/** waiting for a slot, while other writers come first; see ioshape/slots.h */
	IOSHAPE_PHASE_WAIT = 2,
	IOSHAPE_PHASE_PLAN = 3,   /**< reserving the space of the temporary file */
	IOSHAPE_PHASE_WRITE = 4,  /**< writing */
	IOSHAPE_PHASE_SYNC = 5,   /**< waiting for stable storage */
	IOSHAPE_PHASE_COMMIT = 6, /**< renaming the new file over the old one */
	IOSHAPE_PHASE_READ = 7,   /**< loading or verifying */
	IOSHAPE_PHASE_DONE = 8    /**< the operation has ended */
};

/**
 * Receives the progress of an operation.
 *
 * The library calls this function when a phase begins, about once for each block, and ten times a
 * second while the operation waits. The function must not call the library with the same handle.
 *
 * Blocking calls call it on the caller's thread. A background save calls it on the caller's thread
 * in IOSHAPE_PHASE_STAGE, and on a thread of the library in all other phases. If the save is larger
 * than the staging memory, it stages and writes at the same time, and may call the function from
 * both threads at once. A blocking save of a group calls it on a thread of the library.
 *
 * @param user         pointer that the caller gave together with the function
 * @param phase        current phase
 * @param done_bytes   bytes done in this phase. They are never more than `total_bytes` if that is
 *                     known
 * @param total_bytes  bytes of the whole operation, without the file's index; 0 if unknown, as for
 *                     a file without `expected_bytes`
 * @return 0 to continue; another value to stop the operation, which then fails with -ECANCELED. In
 *         IOSHAPE_PHASE_COMMIT and IOSHAPE_PHASE_DONE the library ignores the value, because it is
 *         too late to stop.
 */
typedef int (*ioshape_progress_fn)(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				   uint64_t total_bytes);

/** Number of downgrades that a report holds. Further ones are counted in `downgrade_count` only. */
#define IOSHAPE_REPORT_DOWNGRADES 6

/** Reasons for which a save was not done as preferred (downgrades). The codes are stable. The
 * sentences may change in any version. */
enum ioshape_downgrade_code {
	IOSHAPE_DOWNGRADE_ENGINE = 1, /**< another engine than the preferred one */
	IOSHAPE_DOWNGRADE_DIRECT =
		2, /**< through the page cache: the filesystem refuses direct I/O */
	IOSHAPE_DOWNGRADE_PREALLOCATE = 3, /**< no space was reserved beforehand */
	IOSHAPE_DOWNGRADE_LAYOUT = 4,      /**< other stripes than the requested ones */
	IOSHAPE_DOWNGRADE_LOCK = 5,        /**< the temporary file is not locked */
	IOSHAPE_DOWNGRADE_OWNER = 6, /**< owner, mode or ACL of the replaced file were not kept */
	IOSHAPE_DOWNGRADE_SYNC = 7,  /**< the directory was not synced */
	/** written without a slot, or after the slot was lost, or without the requested share */
	IOSHAPE_DOWNGRADE_SLOT = 9,
	IOSHAPE_DOWNGRADE_SKIPPED = 10, /**< not saved: the free space is too small */
	IOSHAPE_DOWNGRADE_OVERTAKEN =
		12, /**< a later save with a deadline replaced the file first */
	IOSHAPE_DOWNGRADE_CHECKSUMS = 13, /**< the requested checksums are not beside the file */
	IOSHAPE_DOWNGRADE_TIER = 14,      /**< saved directly, although the group has a tier */
	/** the nodes of a group could not protect each other's tiers with parity */
	IOSHAPE_DOWNGRADE_PARITY = 15
};

/** A downgrade: one respect in which a save was not done as preferred. */
struct ioshape_downgrade {
	enum ioshape_downgrade_code code; /**< reason */
	char sentence[252];               /**< what happened and why, for people */
};

/**
 * Result of a save: timing breakdown, layout and downgrades.
 *
 * Times are elapsed (wall clock) seconds. The report of a failed save covers the phases that it
 * reached. Strings are part of the struct, so there is nothing to free. ioshape_report_text()
 * writes the report as one line for people.
 */
struct ioshape_report {
	size_t size; /**< sizeof(struct ioshape_report); set before the call */
	/** size of the file; in a group, this rank's part or, if the rank writes for others, their
	 * file */
	uint64_t file_bytes;
	double started_s; /**< start of the save, in seconds since 1970 */
	double total_s;   /**< whole save */
	/** copying into staging memory, including the wait for free staging memory */
	double stage_s;
	double slot_s; /**< waiting for a slot */
	double plan_s; /**< planning and creating the file */
	/** Writing, including `paced_s` and the examining of tensors. Each piece of 128 KiB is
	 * examined and written in turn, so examining has no time of its own. */
	double write_s;
	double paced_s; /**< waiting for bandwidth, if the operator or `rate` limits it */
	double sync_s;  /**< waiting until all bytes are on stable storage */
	/** putting the file in place, including the wait for earlier saves to the path */
	double commit_s;
	double group_s; /**< waiting for other ranks of the group */
	/** Time between the end of the save and its deadline. Negative if the save was late; 0 if
	 * it had no deadline. */
	double deadline_left_s;
	/** number of downgrades, including those that `downgrades` has no size for */
	uint32_t downgrade_count;
	/** the first IOSHAPE_REPORT_DOWNGRADES downgrades, in the order in which they happened */
	struct ioshape_downgrade downgrades[IOSHAPE_REPORT_DOWNGRADES];
	char engine[16];     /**< engine: "uring", "uring-async", "threads" or "buffered" */
	uint32_t direct;     /**< 1 if all blocks but possibly the last bypassed the page cache */
	uint32_t alarms;     /**< what looks wrong with the content: bits of enum ioshape_alarm */
	char alarm[256];     /**< the first alarm as a sentence; "" if there is none */
	char filesystem[32]; /**< filesystem: "ext4", "xfs", "tmpfs", "fuse.sshfs", ... */
	char stripes[96];    /**< layout of the file, for people; "" if it is not striped */
	/** coordinator: "redis", "local" or "open"; "stagger" or "deadline" if the save wrote
	 * without a slot */
	char coordinator[16];
	char ahead[128]; /**< request that was ahead in the queue; "" if there was none */
	/** "single": one process, one file. In a group: "each", "node" or "rank0". */
	char mode[16];
	/* The following members are set by saves of a group only. */
	char why[160];             /**< reason for the mode */
	uint64_t checkpoint_bytes; /**< size of all files of the checkpoint; 0 if the save failed */
	/** bytes that the ranks together did not write, because another rank saved an equal part */
	uint64_t repeated_bytes;
};

/** Initializes a struct ioshape_report. */
#define IOSHAPE_REPORT_INIT IOSHAPE_SIZED(ioshape_report)

/** Whether a file gets checksums beside it. */
enum ioshape_keep_checksums {
	IOSHAPE_CHECKSUMS_NONE = 0, /**< compute no checksums */
	/** write one CRC-32 for each MiB to `NAME.ioshape-sums` beside the file */
	IOSHAPE_CHECKSUMS_BESIDE = 1
};

/** File format of saved tensors. */
enum ioshape_format {
	/** zip that torch.load() opens as a dict of tensors */
	IOSHAPE_FORMAT_TORCH = 0,
	/**
	 * safetensors file, byte for byte as the safetensors library writes it: large elements
	 * before small ones, then by name. The attributes of options->metadata become the file's
	 * "__metadata__", in their order. Without options->metadata the file has none. The file
	 * holds no checksums; options->checksums writes them beside it.
	 *
	 * The save fails with -EINVAL for tensors that are not contiguous, and for the dtypes
	 * IOSHAPE_COMPLEX32 and IOSHAPE_COMPLEX128, which the format lacks. It also fails with
	 * -EINVAL for a tensor called "__metadata__", and for metadata with a step or a blob. It
	 * fails with IOSHAPE_E_LIMIT if the header would exceed 32 MiB, the most that the Python
	 * package reads.
	 */
	IOSHAPE_FORMAT_SAFETENSORS = 1
};

/** Options of a save of tensors or records. */
struct ioshape_save_options {
	size_t size; /**< sizeof(struct ioshape_save_options) */
	/** user data for the file; borrowed during the call; NULL for none */
	const struct ioshape_metadata *metadata;
	ioshape_progress_fn progress; /**< receives the progress; NULL for none */
	void *progress_user; /**< passed to `progress`; borrowed until the save has ended */
	/**
	 * Filled when the call returns, also if the save failed. report->size must be set. Must be
	 * NULL for a background save, which fails with -EINVAL otherwise: call
	 * ioshape_save_get_report() instead.
	 */
	struct ioshape_report *report;
	/** IOSHAPE_OFF: fail with -EEXIST if the path exists when the file is committed. Default:
	 * replace it. */
	enum ioshape_switch replace;
	/**
	 * IOSHAPE_ON, the default: the save succeeds when the file and its name are on stable
	 * storage (fsync), so they survive a power failure. IOSHAPE_OFF: it succeeds when the file
	 * is complete and in place. Readers still see the old file or the new one. After a power
	 * failure, the new file may be missing or damaged, and the old one may be gone.
	 */
	enum ioshape_switch sync;
	/**
	 * 1: the background save copies nothing. The memory of `data` and `fetch_user` must stay
	 * valid and unchanged until the save has ended. Names, shapes, strides and metadata are
	 * copied anyway. Blocking saves always borrow and ignore this member.
	 */
	uint32_t borrow;
	/** receives the position in the queue while the save waits for a slot; NULL for none */
	ioshape_queue_fn queue;
	void *queue_user; /**< passed to `queue`; borrowed until the save has ended */
	/**
	 * Milliseconds from the call until the process will end, for a save that must be in place
	 * before that. 0: no deadline. Negative: the deadline has passed already. Such a save gets
	 * its slot before saves without a deadline, and waits for it for half of the time at most,
	 * as struct ioshape_slot_options describes. It removes no temporary files of dead processes
	 * and no old checkpoints. After the deadline the save goes on, and `deadline_left_s` in the
	 * report is negative.
	 */
	int64_t deadline_ms;
	/**
	 * IOSHAPE_CHECKSUMS_BESIDE writes one CRC-32 for each MiB to `NAME.ioshape-sums`. It is for
	 * safetensors files, which hold no checksums, and fails with -EINVAL for others. The
	 * checksums follow the file and are as durable as it is. If writing them fails, the save
	 * succeeds and reports IOSHAPE_DOWNGRADE_CHECKSUMS.
	 */
	enum ioshape_keep_checksums checksums;
	/** Format of the file. Saves of records and of groups support IOSHAPE_FORMAT_TORCH only. */
	enum ioshape_format format;
	/** names the tensors in alarms, for saves of records; NULL: alarms name the records */
	ioshape_name_fn tensor_name;
	void *tensor_name_user; /**< passed to `tensor_name`; borrowed until the save has ended */
};

/** Initializes a struct ioshape_save_options with all defaults. */
#define IOSHAPE_SAVE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_save_options)

/** A background save, in progress or ended. */
struct ioshape_save;

/**
 * Saves tensors to a file.
 *
 * If `out` is NULL, the call returns when the tensors are on stable storage and the file is in
 * place. It borrows everything that is passed until then.
 *
 * With `out` the save goes on in the background, on a thread of the library. The call returns when
 * the tensors are copied into staging memory. From then on the caller may change or free everything
 * that was passed, except options->progress_user and options->queue_user. With options->borrow the
 * call copies no tensor and returns at once. While earlier saves hold the staging memory, the call
 * waits for it. A checkpoint that is larger than the staging memory passes through it in pieces.
 * The call then returns when the last piece is staged.
 *
 * Saves of a context to one path are put in place in the order of the calls. A save with a deadline
 * does not wait for earlier saves to its path. Such an earlier save ends later, finds the newer
 * file in place, and drops its own. It succeeds with IOSHAPE_DOWNGRADE_OVERTAKEN in its report. A
 * relative path is resolved during the call. Any thread may call this function.
 *
 * If the save fails, the old file is unchanged and no temporary file is left. There is one
 * exception: if only the sync of the directory fails, at the very end, the new file is in place and
 * the error says so.
 *
 * @param context  an open context
 * @param path     path of the new file. An existing file is replaced
 * @param tensors  tensors to save. Their names must differ
 * @param count    number of tensors; may be 0
 * @param options  options of the save. NULL for all defaults
 * @param out      receives the background save, to be freed with ioshape_save_free(). NULL makes
 *                 the call wait. If the call fails, *out is NULL
 * @return 0; -EINVAL for an invalid argument; IOSHAPE_E_LIMIT; -ENOSPC, -EDQUOT or
 *         IOSHAPE_E_SKIPPED for lack of space; -EEXIST; IOSHAPE_E_ALARM; IOSHAPE_E_COORDINATOR;
 *         -ECANCELED if a callback stopped the save; another negative code. In the background,
 *         errors after the copy are returned by ioshape_save_wait()
 */
int ioshape_save_tensors(struct ioshape_context *context, const char *path,
			 const struct ioshape_tensor *tensors, size_t count,
			 const struct ioshape_save_options *options, struct ioshape_save **out);

/**
 * Waits until a background save has ended.
 *
 * Any thread may call this function, any number of times. It does not free the save.
 *
 * @param save        the save
 * @param timeout_ms  longest wait in ms: 0 returns at once, a negative value waits without a limit
 * @return 0 if the file is in place and, unless options->sync is off, on stable storage;
 *         -EINPROGRESS if the save has not ended, and only then; -EPERM in a forked child;
 *         otherwise the code with which the save failed
 */
int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms);

/**
 * Asks a background save to stop, and returns at once.
 *
 * ioshape_save_wait() returns -ECANCELED once no I/O is in flight and no temporary file is left. It
 * returns 0 if the new file was already in place. A save that has ended is not affected. Any thread
 * may call this function.
 *
 * @param save  the save
 * @return 0; -EINVAL if `save` is NULL; -EPERM in a forked child
 */
int ioshape_save_cancel(struct ioshape_save *save);

/** State of a background save. */
struct ioshape_save_status {
	size_t size; /**< sizeof(struct ioshape_save_status); set before the call */
	/** Current phase. It is IOSHAPE_PHASE_DONE if and only if the save has ended, successfully
	 * or not. */
	enum ioshape_phase phase;
	/** bytes done in the phase; after the end, the bytes that the save reached */
	uint64_t done_bytes;
	uint64_t total_bytes; /**< bytes of the whole phase */
};

/** Initializes a struct ioshape_save_status. */
#define IOSHAPE_SAVE_STATUS_INIT IOSHAPE_SIZED(ioshape_save_status)

/**
 * Returns the state of a background save.
 *
 * Any thread may call this function.
 *
 * @param save    the save
 * @param status  filled; set its `size` before the call
 * @param place   filled with the position in the queue for a slot. Its size must be set before the
 *                call. All other members are zero unless the save waits for a slot. NULL if not
 *                needed
 * @return 0; -EINVAL if an argument is NULL or a size is invalid; -EPERM in a forked child
 */
int ioshape_save_get_status(struct ioshape_save *save, struct ioshape_save_status *status,
			    struct ioshape_place *place);

/**
 * Returns the report of a background save that has ended.
 *
 * Any thread may call this function.
 *
 * @param save    the save
 * @param report  filled, also if the save failed. Its size must be set before the call
 * @return 0; -EINPROGRESS if the save has not ended; -EINVAL if an argument is NULL or the size is
 *         invalid; -EPERM in a forked child
 */
int ioshape_save_get_report(struct ioshape_save *save, struct ioshape_report *report);

/**
 * Writes a report as one line of text, without a newline.
 *
 * The line has the size, the timing breakdown, the way of writing and each downgrade:
 *
 *     2,147,483,648 bytes in 0.612 s, slot 0.020 (behind job 4711, rank 7 on n03; redis),
 *     write 0.560, sync 0.029, uring, direct on ext4
 *
 * The wording may change in any version. Programs should read the members of the report. Any thread
 * may call this function.
 *
 * @param report  a filled report, with its size set
 * @param text    receives the text and a zero byte, truncated to `size` bytes. NULL if `size` is 0
 * @param size    size of `text` in bytes
 * @return length of the whole text, as snprintf() returns it; 0 if report->size is invalid
 */
size_t ioshape_report_text(const struct ioshape_report *report, char *text, size_t size);

/**
 * Frees a background save.
 *
 * A save that has not ended is aborted: the call waits until no I/O is in flight and no temporary
 * file is left. The old file then stays, unless the new one was already in place. To keep the save,
 * call ioshape_save_wait() first. In a forked child the call does nothing.
 *
 * @param save  the save, which no other thread may use any more; NULL is allowed
 */
void ioshape_save_free(struct ioshape_save *save);

/* ---- Saving records -------------------------------------------------------------------------- */
/* Records are the members of a torch zip. Their names are relative to the archive's only folder:
 * "data.pkl", "data/0", "version". */

/**
 * Copies bytes [offset, offset + bytes) of a record to `into`.
 *
 * The function must not save with the same context, because it could wait for memory that its own
 * save holds.
 *
 * @param user    `fetch_user` of the record
 * @param offset  offset in the record
 * @param into    receives the bytes
 * @param bytes   number of bytes, at most 16 MiB
 * @return 0. Another value fails the save, with that value if it is a negative errno and with -EIO
 *         otherwise
 */
typedef int (*ioshape_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

/** A record: bytes in the caller's memory, or bytes that a function delivers. */
struct ioshape_record {
	/**
	 * Relative path without ".", ".." or empty names, unique in the file. Names under
	 * ".ioshape/" are reserved for the library. torch needs "data.pkl", as the first record,
	 * and "version".
	 */
	const char *name;
	/** bytes of the record; NULL if there are none, or if `fetch` delivers them */
	const void *data;
	uint64_t bytes; /**< size of the record */
	/** Alignment of the data in the file: a power of two up to 4096. 0 for the default: 4096
	 * for records of 256 KiB or more, 64 for others. */
	uint32_t alignment;
	/** Delivers the bytes from memory that the CPU cannot read, such as that of a GPU. NULL
	 * otherwise. */
	ioshape_fetch_fn fetch;
	void *fetch_user; /**< passed to `fetch` */
	/** Type of the elements: a member of enum ioshape_dtype. The save then examines them. 0 if
	 * the record is no tensor. */
	uint32_t dtype;
	/** Group of tensors that change together: 1 for the parameters of the model, 2 for the
	 * state of the optimizer, other numbers up to 255 for others. 0 for no group. See `examine`
	 * of the context's options. */
	uint32_t group;
};

/**
 * Saves records to a file, for files with a pickle of the caller's own.
 *
 * The file holds the records in the order of the array. All records are checked before anything is
 * created.
 *
 * If `out` is NULL, the call returns when the records are on stable storage and the file is in
 * place. It borrows everything that is passed until then.
 *
 * With `out` the save goes on in the background, on a thread of the library. The call returns when
 * the records are copied into staging memory. From then on the caller may change or free everything
 * that was passed, except options->progress_user and options->queue_user. With options->borrow the
 * call copies no record and returns at once. While earlier saves hold the staging memory, the call
 * waits for it. A file that is larger than the staging memory passes through it in pieces.
 *
 * The library calls `fetch` in the order of records and offsets, once for each byte, with pieces of
 * at most 16 MiB. It calls `fetch` on the caller's thread, and has called it for everything when
 * the call returns. A background save with options->borrow calls `fetch` on a thread of the library
 * instead, until the save has ended.
 *
 * Saves of a context to one path are put in place in the order of the calls. A save with a deadline
 * does not wait for earlier saves to its path. A relative path is resolved during the call. Any
 * thread may call this function. If the save fails, the old file is unchanged and no temporary file
 * is left. There is one exception: if only the sync of the directory fails, at the very end, the
 * new file is in place and the error says so.
 *
 * @param context  an open context
 * @param path     path of the new file. An existing file is replaced
 * @param records  records to save. Their names must differ
 * @param count    number of records; 0 is allowed
 * @param options  options of the save, with the format IOSHAPE_FORMAT_TORCH. NULL for all defaults
 * @param out      receives the background save, to be freed with ioshape_save_free(). NULL makes
 *                 the call wait. If the call fails, *out is NULL
 * @return 0; -EEXIST if two records have the same name, or if options->replace is off and the path
 *         exists; -EINVAL for an invalid argument; IOSHAPE_E_LIMIT; -ENOSPC, -EDQUOT or
 *         IOSHAPE_E_SKIPPED for lack of space; IOSHAPE_E_ALARM; IOSHAPE_E_COORDINATOR;
 *         -ECANCELED if a callback stopped the save; another negative code. In the background,
 *         errors after the copy are returned by ioshape_save_wait()
 */
int ioshape_save_records(struct ioshape_context *context, const char *path,
			 const struct ioshape_record *records, size_t count,
			 const struct ioshape_save_options *options, struct ioshape_save **out);

/* ---- Files in other formats ------------------------------------------------------------------ */
/*
 * Files in a format that the library does not know, such as torch's legacy format. The caller
 * appends bytes. The library writes them as safely and as quickly as a checkpoint, and the file
 * appears whole or not at all.
 *
 * One thread at a time may use a file. Different files of a context may be written at the same
 * time.
 */

/** A file that is being written. */
struct ioshape_file;

/** Options of a file in another format. */
struct ioshape_file_options {
	size_t size; /**< sizeof(struct ioshape_file_options) */
	/** Expected size of the file; 0 if unknown. The library preallocates its space, so that a
	 * full disk is noticed at once. An estimate is sufficient. */
	uint64_t expected_bytes;
	ioshape_progress_fn progress; /**< receives the progress; NULL for none */
	void *progress_user;          /**< passed to `progress`; borrowed until the file is freed */
	/** IOSHAPE_OFF: fail with -EEXIST if the path exists at the commit. Default: replace it. */
	enum ioshape_switch replace;
	/** IOSHAPE_OFF: the commit does not wait for stable storage, as struct ioshape_save_options
	 * describes it. Default: wait. */
	enum ioshape_switch sync;
	/**
	 * Milliseconds from ioshape_file_open() until the process will end, for a file that must be
	 * committed before that. 0: no deadline. Negative: the deadline has passed already. Such a
	 * file gets its slot before others, as struct ioshape_slot_options describes.
	 */
	int64_t deadline_ms;
	/**
	 * IOSHAPE_CHECKSUMS_BESIDE computes a CRC-32 of each MiB while it is written. After the
	 * file is in place, the checksums are written to `NAME.ioshape-sums`, as durably as the
	 * file. If that fails, the commit succeeds and reports IOSHAPE_DOWNGRADE_CHECKSUMS. Pipes
	 * and devices get no checksums.
	 */
	enum ioshape_keep_checksums checksums;
	uint32_t reserved; /**< must be 0 */
	/**
	 * Size of this process' part of a file that several processes write at the same time; 0 for
	 * a file of this process alone. The part begins at `part_offset`. Both are multiples of
	 * IOSHAPE_PART_UNIT, and parts must not overlap. The first process to open the path creates
	 * the file, with the layout for `file_bytes`. The file has its name at once, so put it into
	 * a temporary directory that you rename. A commit brings this part to stable storage.
	 * Without a commit the file stays and the content of the part is undefined. `replace` has
	 * no effect, and `checksums` must be IOSHAPE_CHECKSUMS_NONE.
	 */
	uint64_t part_bytes;
	uint64_t part_offset; /**< offset of the part in the file */
	uint64_t file_bytes;  /**< approximate size of all parts together, for the file's stripes */
};

/** Unit of part_bytes and part_offset in struct ioshape_file_options, in bytes. */
#define IOSHAPE_PART_UNIT (UINT64_C(1) << 20)

/** Initializes a struct ioshape_file_options with all defaults. */
#define IOSHAPE_FILE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_file_options)

/**
 * Begins a new file, which appears at `path` when it is committed.
 *
 * The call takes a slot of the file's pool and may wait for it. Open files of a context in one pool
 * share a slot. A relative path is resolved during the call.
 *
 * @param context  an open context, which must outlive the file
 * @param path     path of the new file. An existing file is replaced
 * @param options  options of the file. NULL for all defaults
 * @param out      receives the file, to be freed with ioshape_file_free(). NULL if the call fails
 * @return 0; -EINVAL for an invalid argument; -ENOSPC, -EDQUOT or IOSHAPE_E_SKIPPED for lack of
 *         space; IOSHAPE_E_COORDINATOR; another negative code
 */
int ioshape_file_open(struct ioshape_context *context, const char *path,
		      const struct ioshape_file_options *options, struct ioshape_file **out);

/**
 * Appends bytes to a file.
 *
 * After a failure other than -EINVAL, the file can only be freed. One thread at a time may use the
 * file.
 *
 * @param file   the file
 * @param data   bytes to append; borrowed during the call
 * @param bytes  number of bytes
 * @return 0; -EINVAL for an invalid argument, or after a commit; -ECANCELED if the progress
 *         function stopped the file; -ENOSPC, -EDQUOT or IOSHAPE_E_SKIPPED for lack of space;
 *         another negative code
 */
int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes);

/**
 * Makes a file durable and puts it in place.
 *
 * The call waits for earlier saves of the context to the same path. After the commit, successful or
 * not, the file can only be freed. If `report` has an invalid size, the call fails with -EINVAL
 * before the commit and can be repeated.
 *
 * @param file    the file
 * @param report  filled, also if the commit failed. Its size must be set before the call. NULL if
 *                not needed
 * @return 0; -EINVAL for an invalid argument, or after a commit; -EEXIST if `replace` is off and
 *         the path exists; -ENOSPC, -EDQUOT or IOSHAPE_E_SKIPPED for lack of space; another
 *         negative code
 */
int ioshape_file_commit(struct ioshape_file *file, struct ioshape_report *report);

/**
 * Frees a file.
 *
 * A file without a successful commit is abandoned: the old file stays, and no temporary file is
 * left. A file that several processes write (`part_bytes`) is not removed. In a forked child the
 * call does nothing.
 *
 * @param file  the file; NULL is allowed
 */
void ioshape_file_free(struct ioshape_file *file);

/* ---- Loading --------------------------------------------------------------------------------- */
/*
 * One thread at a time may use a reader. Different readers of a context may work at the same time.
 */

/** A file that is open for reading: a torch zip of this library or of torch.save(), or a file in
 * another format. */
struct ioshape_reader;

/** Options of a reader. */
struct ioshape_reader_options {
	size_t size;                /**< sizeof(struct ioshape_reader_options) */
	enum ioshape_switch verify; /**< compare checksums while reading; default: on */
	/**
	 * 1: you promise that the memory that calls read into was just allocated and never written
	 * to. The library then asks the kernel for huge pages in large pieces of it, which makes a
	 * load several times as fast. It stops asking where huge pages cost more than small ones.
	 */
	uint32_t fresh_memory;
	ioshape_progress_fn progress; /**< receives the progress; NULL for none */
	void *progress_user; /**< passed to `progress`; borrowed until the reader is freed */
	/**
	 * First byte of the part of the file to read, such as a member of a zip. The part is read
	 * as if it were a whole file: all offsets and sizes of the reader then count from here. If
	 * `file_offset` and `file_bytes` are both 0, the whole file is read.
	 */
	uint64_t file_offset;
	uint64_t file_bytes; /**< size of the part */
	/**
	 * 1: accept a file in any format. If checksums lie beside the file (`NAME.ioshape-sums`),
	 * they verify it, unless the file was modified after they were written. Otherwise, a torch
	 * zip is read as a torch zip, and any other file is read without verification. A file that
	 * is not read as a torch zip is record 0, which has no name.
	 */
	uint32_t any_format;
	/**
	 * IOSHAPE_ON: other processes of this host read the file at about the same time. All then
	 * read through the page cache, so that the storage delivers the bytes once. IOSHAPE_OFF: no
	 * other process does. Default: on if the job has several ranks on this host, if at most 256
	 * MiB are read, or if another reader of this host has the file open. A context that
	 * requires direct I/O never shares.
	 */
	enum ioshape_switch shared;
};

/** Initializes a struct ioshape_reader_options with all defaults. */
#define IOSHAPE_READER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_reader_options)

/** What an open file consists of. */
struct ioshape_reader_info {
	size_t size;         /**< sizeof(struct ioshape_reader_info); set before the call */
	uint64_t file_bytes; /**< size of the file, or of the part that is open */
	/** Number of records; indices begin at 0, in the order of the file. 0 for a file that is
	 * not read as a torch zip, although its bytes can be read as record 0. */
	uint64_t records;
	uint64_t tensors; /**< number of tensors; 0 without a tensor table */
	/** 1 if the file has a tensor table, so that the functions for tensors can be used */
	uint32_t has_table;
	/** Size of the blocks that have a checksum each, so that parts of records can be verified.
	 * 0 if only whole records have checksums. */
	uint32_t block_bytes;
	/** 1 if the file is read as a torch zip; 0 if it is read as a file in another format */
	uint32_t torch_zip;
	uint32_t checksums; /**< 1 if the file has checksums to verify what is read */
	/** 1 if the file has statistics of its tensors, or has them beside it */
	uint32_t examined;
	/** faults that the save found: bits of enum ioshape_alarm */
	uint32_t alarms;
};

/** Initializes a struct ioshape_reader_info. */
#define IOSHAPE_READER_INFO_INIT IOSHAPE_SIZED(ioshape_reader_info)

/** A record of an open file. */
struct ioshape_record_info {
	size_t size;      /**< sizeof(struct ioshape_record_info); set before the call */
	const char *name; /**< name of the record; valid until the reader is freed */
	uint64_t bytes;   /**< size of the record */
	/** offset of the first byte of the record's data, in the file or the part that is open */
	uint64_t file_offset;
	uint32_t crc32;    /**< CRC-32 of the whole record */
	uint32_t reserved; /**< 0 */
};

/** Initializes a struct ioshape_record_info. */
#define IOSHAPE_RECORD_INFO_INIT IOSHAPE_SIZED(ioshape_record_info)

/**
 * Statistics of the numbers in a record, which the save took. A complex element counts as two
 * numbers.
 */
struct ioshape_statistics {
	size_t size; /**< sizeof(struct ioshape_statistics); set before the call */
	/** type of the elements; 0 if the record was not examined, and then all else is 0 */
	uint32_t dtype;
	uint32_t alarms;     /**< what is wrong with this record: bits of enum ioshape_alarm */
	uint64_t count;      /**< number of numbers */
	uint64_t nans;       /**< how many of them are NaN */
	uint64_t infinities; /**< how many are infinite */
	uint64_t zeros;      /**< how many are zero */
	/** smallest finite number; infinity if there is none */
	double minimum;
	/** largest finite number; minus infinity if there is none */
	double maximum;
	double sum_squares; /**< sum of the squares of all finite numbers, to about six digits */
	uint32_t constant;  /**< 1 if all numbers are finite and equal */
	uint32_t reserved;  /**< 0 */
};

/** Initializes a struct ioshape_statistics. */
#define IOSHAPE_STATISTICS_INIT IOSHAPE_SIZED(ioshape_statistics)

/** A tensor of an open file. */
struct ioshape_tensor_info {
	size_t size;              /**< sizeof(struct ioshape_tensor_info); set before the call */
	const char *name;         /**< name of the tensor; valid until the reader is freed */
	enum ioshape_dtype dtype; /**< type of the elements */
	uint32_t dims;            /**< number of dimensions */
	const int64_t *shape;     /**< `dims` lengths; valid until the reader is freed */
	/**
	 * `dims` strides in elements, not NULL if `dims` is not 0; valid until the reader is freed
	 */
	const int64_t *strides;
	/** size of the tensor's memory in this layout, which ioshape_reader_load() delivers */
	uint64_t bytes;
	uint64_t record; /**< index of the record that holds the tensor */
	/** torch's name of the type without "torch.", such as "bfloat16" */
	const char *dtype_name;
};

/** Initializes a struct ioshape_tensor_info. */
#define IOSHAPE_TENSOR_INFO_INIT IOSHAPE_SIZED(ioshape_tensor_info)

/**
 * Opens a torch zip for reading, or with options->any_format a file in any format.
 *
 * The library trusts nothing in the file: it checks every count and offset against limits and
 * against the file's size, in bounded time and memory. If the file is replaced later, the reader
 * goes on with the file that it opened.
 *
 * @param context  an open context, which must outlive the reader
 * @param path     path of the file
 * @param options  options of the reader. NULL for all defaults
 * @param out      receives the reader, to be freed with ioshape_reader_free(). NULL if the call
 *                 fails
 * @return 0; IOSHAPE_E_FORMAT if the file is not a torch zip; IOSHAPE_E_DAMAGED; IOSHAPE_E_LIMIT;
 *         -ENOENT if there is no such file; -ESPIPE if it is not a regular file; another negative
 *         code
 */
int ioshape_reader_open(struct ioshape_context *context, const char *path,
			const struct ioshape_reader_options *options, struct ioshape_reader **out);

/**
 * Returns what an open file consists of.
 *
 * @param reader  the reader
 * @param info    filled; set its `size` before the call
 * @return 0; -EINVAL if an argument is NULL or the size is invalid; -EPERM in a forked child
 */
int ioshape_reader_get_info(struct ioshape_reader *reader, struct ioshape_reader_info *info);

/**
 * Returns the description of a record.
 *
 * @param reader  the reader
 * @param index   index of the record
 * @param info    filled; set its `size` before the call
 * @return 0; -ENOENT if there is no record with this index; -EINVAL if an argument is NULL or the
 *         size is invalid; -EPERM in a forked child
 */
int ioshape_reader_get_record(struct ioshape_reader *reader, uint64_t index,
			      struct ioshape_record_info *info);

/**
 * Returns the statistics of a record, or of a tensor of a safetensors file.
 *
 * @param reader      the reader
 * @param index       index of the record; in a safetensors file, position of the tensor from 0
 * @param statistics  filled. Its size must be set before the call
 * @return 0; -ENOENT if there is no record with this index; -ENODATA if the file has no
 *         statistics; -EINVAL if an argument is NULL or the size is invalid; -EPERM in a forked
 *         child
 */
int ioshape_reader_get_statistics(struct ioshape_reader *reader, uint64_t index,
				  struct ioshape_statistics *statistics);

/**
 * Finds a record by its name.
 *
 * @param reader  the reader
 * @param name    name of the record
 * @param index   receives the index of the record
 * @return 0; -ENOENT if there is no record with this name; -EINVAL if an argument is NULL; -EPERM
 *         in a forked child
 */
int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name, uint64_t *index);

/**
 * Reads bytes [offset, offset + bytes) of a record.
 *
 * Files of this library have a checksum for each MiB of a record. The call reads and verifies every
 * block that the range touches. Files of torch.save() have one checksum for each record, which is
 * verified if the whole record is read. After IOSHAPE_E_DAMAGED the content of `into` is undefined,
 * and the error names the record and the offset.
 *
 * Sequential calls are as fast as one ioshape_reader_load(), because the reader prefetches while
 * the caller does other work. The reader keeps the memory for that until the end of the records,
 * until another function reads, until a call fails, or until the reader is freed. Any use of the
 * reader is limited to one thread at a time.
 *
 * @param reader  the reader
 * @param record  index. 0 is the first record, or the whole file if it is read in another format
 *                (`any_format`)
 * @param offset  offset in the record
 * @param into    receives the bytes
 * @param bytes   number of bytes
 * @return 0; -ENOENT if there is no record with this index; -ERANGE if the range exceeds the
 *         record; IOSHAPE_E_DAMAGED if the bytes do not match a checksum; -ECANCELED if the
 *         progress function stopped the call; another negative code
 */
int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record, uint64_t offset, void *into,
			size_t bytes);

/**
 * Verifies the structure of a file, and its data by checksums.
 *
 * The structure is the directory, the index and all headers. The call verifies even if the reader
 * was opened with `verify` off.
 *
 * @param reader  the reader
 * @param data    1: read all data; 0: check the structure only
 * @return 0; IOSHAPE_E_DAMAGED for the first damage found; -ENODATA if `data` is 1 and the file has
 *         no checksums, such as after torch's set_crc32_options(False); -ECANCELED if the progress
 *         function stopped the call; another negative code
 */
int ioshape_reader_verify(struct ioshape_reader *reader, int data);

/**
 * Returns the description of a tensor.
 *
 * @param reader  the reader
 * @param index   index of the tensor
 * @param info    filled; set its `size` before the call
 * @return 0; -ENOENT if there is no tensor with this index; IOSHAPE_E_NO_TABLE if the file has no
 *         tensor table; -EINVAL if an argument is NULL or the size is invalid; -EPERM in a forked
 *         child
 */
int ioshape_reader_get_tensor(struct ioshape_reader *reader, uint64_t index,
			      struct ioshape_tensor_info *info);

/**
 * Finds a tensor by its name.
 *
 * @param reader  the reader
 * @param name    name of the tensor
 * @param index   receives the index of the tensor
 * @return 0; -ENOENT if there is no tensor with this name; IOSHAPE_E_NO_TABLE if the file has no
 *         tensor table; -EINVAL if an argument is NULL; -EPERM in a forked child
 */
int ioshape_reader_find_tensor(struct ioshape_reader *reader, const char *name, uint64_t *index);

/** A range of a tensor or record to be read into the caller's memory. */
struct ioshape_load_request {
	/** index of the tensor; for ioshape_reader_load_records(), index of the record */
	uint64_t tensor;
	uint64_t offset; /**< first byte of the range in the tensor's memory, or in the record */
	uint64_t bytes;  /**< size of the range */
	void *into;      /**< receives the bytes */
};

/**
 * Loads any number of tensors, or ranges of them.
 *
 * The reader sorts the ranges by their position in the file and prefetches. One call for many
 * tensors is therefore much faster than many calls. Ranges may overlap. Each block is verified by
 * its checksum, unless the reader was opened with `verify` off. After IOSHAPE_E_DAMAGED the memory
 * of all requests is undefined.
 *
 * @param reader    the reader
 * @param requests  ranges to read, and where to
 * @param count     number of requests
 * @return 0; -ENOENT if there is no tensor with such an index; -ERANGE if a range exceeds its
 *         tensor; IOSHAPE_E_NO_TABLE if the file has no tensor table; IOSHAPE_E_DAMAGED if the
 *         bytes do not match a checksum; -ECANCELED if the progress function stopped the call;
 *         another negative code
 */
int ioshape_reader_load(struct ioshape_reader *reader, const struct ioshape_load_request *requests,
			size_t count);

/**
 * Loads any number of records, or ranges of them.
 *
 * The file needs no tensor table. A file that is read in another format (`any_format`) is record 0.
 * The reader sorts the ranges by their position in the file and prefetches. Ranges may overlap.
 * Checksums verify the bytes, unless the reader was opened with `verify` off. After
 * IOSHAPE_E_DAMAGED the memory of all requests is undefined.
 *
 * @param reader    the reader
 * @param requests  ranges to read, and where to. `tensor` is the index of a record
 * @param count     number of requests
 * @return 0; -ENOENT if there is no record with such an index; -ERANGE if a range exceeds its
 *         record; IOSHAPE_E_DAMAGED if the bytes do not match a checksum; -ECANCELED if the
 *         progress function stopped the call; another negative code
 */
int ioshape_reader_load_records(struct ioshape_reader *reader,
				const struct ioshape_load_request *requests, size_t count);

/**
 * Returns the metadata that was given to the save.
 *
 * A file without metadata, or one that this library did not write, gives zeros.
 *
 * @param reader    the reader
 * @param metadata  filled with pointers. They are valid until the reader is freed. Its size must be
 *                  set before the call
 * @return 0; -EINVAL if an argument is NULL or the size is invalid; -EPERM in a forked child
 */
int ioshape_reader_get_metadata(struct ioshape_reader *reader, struct ioshape_metadata *metadata);

/**
 * Frees a reader.
 *
 * @param reader  the reader; NULL is allowed
 */
void ioshape_reader_free(struct ioshape_reader *reader);

#ifdef __cplusplus
}
#endif

#endif
