/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context: settings, kept memory, I/O engines and background saves of one user of the library.
 *
 * Several contexts can live in one process. One context serves several threads at once: every
 * function here may be called from any thread, except that ioshape_context_free() must be the last
 * call on it.
 *
 * Fork: a context belongs to the process that opened it. In a child every call on it answers -EPERM
 * and touches nothing; ioshape_context_free() in a child only forgets the handle.
 *
 * Option structs: set `size` to sizeof the struct and everything else to zero, then fill in what
 * should differ (IOSHAPE_CONTEXT_OPTIONS_INIT does the first part). Zero always means "the
 * default". A struct from a newer header is accepted as long as the fields this library does not
 * know are zero, and refused with -EINVAL otherwise. A NULL pointer to options means all defaults.
 */
#ifndef IOSHAPE_CONTEXT_H
#define IOSHAPE_CONTEXT_H

#include <stddef.h>
#include <stdint.h>

#include <ioshape/errors.h>

#ifdef __cplusplus
extern "C" {
#endif

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
	IOSHAPE_ENGINE_THREADS,  /**< a few threads calling pwrite and pread */
	IOSHAPE_ENGINE_BUFFERED  /**< pwrite and pread on the saving thread, through the page cache
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
	/** IOSHAPE_BLOCK_BYTES: bytes per request; a power of two from 64 KiB to 64 MiB. The
	 * default is chosen for the filesystem, as that of the next. */
	uint64_t block_bytes;
	/** IOSHAPE_QUEUE_DEPTH: requests in flight per save; 1 to 64 */
	uint32_t queue_depth;
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
	uint32_t
		lease_ms; /**< IOSHAPE_LEASE_MS: a dead writer's slot is kept so long; 300 to 600000
			   */
	enum ioshape_unreachable unreachable; /**< IOSHAPE_UNREACHABLE */
	uint64_t rate; /**< IOSHAPE_RATE: bytes per second of all ranks of the job; 0: any */
	/**
	 * IOSHAPE_LAYOUT: how new files shall lie on the targets of a striped filesystem (Lustre,
	 * BeeGFS, CephFS); elsewhere it is ignored. See docs/tuning.md.
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

#ifdef __cplusplus
}
#endif

#endif
