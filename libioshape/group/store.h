/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores: key-value stores for the messages between the ranks of a job. The layer above
 * (messages.c) defines the messages.
 */
#ifndef GROUP_STORE_H
#define GROUP_STORE_H

#include "base/base.h"
#include "slots/slots.h"

/* Configuration of a store. Strings are borrowed until the store is closed. */
struct store_config {
	const char *name; /* hex digits; equal for all ranks of a job, different for other jobs */
	uint32_t rank;    /* this process's rank */
	uint32_t ranks;   /* number of ranks */
	/* Directory of the checkpoints, in which store_files keeps its folder. */
	const char *directory;
	const struct slots_config *coordinator; /* Redis: address, password, pool, log */
	/* Deadline of store_open(), in milliseconds, within which the ranks of a store_redis meet.
	 */
	uint32_t deadline_ms;
	/* Parent of the folder in memory; NULL: /dev/shm, or else XDG_RUNTIME_DIR. */
	const char *memory;
};

#define STORE_MAX_MESSAGE_BYTES (64 * MIB)
/* Size of a message's or scope's name ([a-z0-9-]), with the final 0. */
#define STORE_NAME_BYTES 64

/* Called by store_collect() for each message. Anything but 0 ends the collection with that code. */
typedef int store_found_fn(void *user, uint32_t rank, const struct base_buffer *message);

/*
 * A store keeps messages of ranks: short texts or bytes under names, grouped in scopes (such as one
 * for each round). Any rank may put and get. A message replaces an earlier one of its name. The
 * medium may lose messages, as a Redis that restarts does. The rank that put a message puts it
 * again on its own, until it drops the scope.
 *
 * A store belongs to one thread at a time, and to the process that opened it. In a forked child
 * calls return -EPERM, and store_close() does nothing. IOSHAPE_E_COORDINATOR means that the store
 * is out of reach now; the next call tries again. Calls return within about two seconds.
 */
struct store;
struct store_ops;

/* The kinds of stores. store_files is in the directory of the checkpoints, for ranks that share
 * nothing else. store_memory is in the memory of a host, if all ranks share it: its name is used
 * once, and rank 0 opens it before the others. store_redis is in the coordinator's Redis. */
extern const struct store_ops store_files;
extern const struct store_ops store_memory;
extern const struct store_ops store_redis;

int store_open(struct store **out, const struct store_ops *ops, const struct store_config *config,
	       struct base_error *error);
void store_close(struct store *store); /* NULL is fine */

int store_put(struct store *store, const char *scope, const char *name, const void *message,
	      size_t bytes, struct base_error *error);
/* Replaces the contents of `message`. Returns -EAGAIN, without an error message, if there is no
 * such message. */
int store_get(struct store *store, const char *scope, const char *name, struct base_buffer *message,
	      struct base_error *error);
/*
 * Gets the messages "<prefix>-<rank>" of all ranks for which have[rank] is not set, in as few round
 * trips as the medium allows. Calls found() for each message that is there; found() may set
 * have[rank].
 */
int store_collect(struct store *store, const char *scope, const char *prefix, const bool *have,
		  store_found_fn *found, void *user, struct base_error *error);
/* Records that a message has come for which this rank waited: others may follow soon. */
void store_has_news(struct store *store);
/* Sleeps until another look is worthwhile, but no longer than timeout_ms. */
void store_wait(struct store *store, uint32_t timeout_ms);
/* Returns whether the process of a rank is known to have ended. Only store_memory can know. */
bool store_has_ended(struct store *store, uint32_t rank);
/* Drops this rank's messages in the scope; on rank 0, those of all ranks. */
void store_drop(struct store *store, const char *scope);

/*
 * Writes an id of the memory where this process keeps stores. Ranks with equal ids can
 * meet there and share memory. A host has one such memory, and one more for each container with a
 * /dev/shm of its own.
 */
#define STORE_MEMORY_ID_BYTES 48
void store_identify_memory(char id[STORE_MEMORY_ID_BYTES]);

/* ---- Shared by all kinds of stores (store*.c) ------------------------------------------------ */

/* A message that this rank has put and not dropped. */
struct store_own {
	struct store_own *next;
	char scope[STORE_NAME_BYTES];
	char name[STORE_NAME_BYTES];
	size_t bytes;
	uint8_t data[];
};

/*
 * The operations of one kind of store. The caller has checked names and process. Only has_ended may
 * be NULL.
 */
struct store_ops {
	const char *id; /* "files", "host" or "redis" */
	/* A wait lasts 1/wait_divisor of the time since the last news, within these bounds. */
	unsigned wait_divisor;
	uint64_t least_wait_ns, most_wait_ns;

	int (*open)(struct store **out, const struct store_config *config,
		    struct base_error *error);
	int (*put)(struct store *store, const char *scope, const char *name, const void *message,
		   size_t bytes, struct base_error *error);
	/* Puts the message again if the medium has lost it. On failure, store_restore() tries the
	 * rest of the messages later. */
	int (*restore)(struct store *store, const struct store_own *own);
	int (*get)(struct store *store, const char *scope, const char *name,
		   struct base_buffer *message, struct base_error *error);
	int (*collect)(struct store *store, const char *scope, const char *prefix, const bool *have,
		       store_found_fn *found, void *user, struct base_error *error);
	bool (*has_ended)(struct store *store, uint32_t rank);
	/* Removes the messages of all ranks in the scope. Called on rank 0. */
	void (*drop)(struct store *store, const char *scope);
	/* Frees everything but the struct itself. */
	void (*close)(struct store *store);
};

/* Base of all stores: the first member of each kind's own struct. */
struct store {
	const struct store_ops *ops;
	struct store_config config;
	pid_t pid;

	struct store_own *own;
	size_t own_count;
	uint64_t own_bytes;
	uint32_t restore_ms; /* interval between two checks for lost messages */
	uint64_t restore_ns; /* time of the next check */

	uint64_t news_ns;    /* time when this rank last put a message or got one it waited for */
	uint64_t looking_ns; /* time spent on looking at ranks since the last wait */
};

/* Allocates a store of `bytes` bytes for open() and initialises its base; the rest is zero. Returns
 * NULL, with an error message, if there is no memory. */
void *store_new(size_t bytes, const struct store_ops *ops, const struct store_config *config,
		struct base_error *error);
/* Writes "<prefix>-<rank>". */
void store_name_of(char name[STORE_NAME_BYTES], const char *prefix, uint32_t rank);
/* Puts this rank's lost messages again now, whether or not the check is due. */
void store_restore(struct store *store);
/* Sleeps for `ns` nanoseconds, even if signals arrive. */
void store_sleep_ns(uint64_t ns);

/*
 * Finds the folder in this host's memory where ranks of one user meet, for their messages and for
 * the sockets of their streams. Creates it with mode 0700 if it is missing. `given` replaces
 * /dev/shm as its parent; it may be NULL.
 */
#define STORE_FOLDER_BYTES 256
int store_find_folder(char path[STORE_FOLDER_BYTES], const char *given, struct base_error *error);

#endif
