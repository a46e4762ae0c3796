/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores: the messages that the ranks of a job leave each other. The layer above knows what they
 * mean.
 */
#ifndef GROUP_STORE_H
#define GROUP_STORE_H

#include "base/base.h"
#include "slots/slots.h"

/* What a store is opened with. Strings are borrowed until it is closed. */
struct store_config {
	const char *name; /* the same for all ranks of a job, another for other jobs; hex digits */
	uint32_t rank;    /* of ours */
	uint32_t ranks;   /* of all */
	const char *directory; /* of the generations: the store's folder may be made in it */
	const struct slots_config *coordinator; /* redis: its address, password, pool, log */
	uint32_t deadline_ms; /* how long the others wait for what rank 0 does first */
	const char *memory;   /* the folder in memory; NULL: /dev/shm or XDG_RUNTIME_DIR */
};

#define STORE_MAX_MESSAGE_BYTES (64 * MIB)
#define STORE_NAME_BYTES 64 /* of messages and scopes, with the final 0: [a-z0-9-] */

/* What collect() calls for each message. */
typedef int store_found_fn(void *user, uint32_t rank, const struct base_buffer *message);

/*
 * A store keeps messages of ranks: short texts or bytes under names, in scopes (one for each
 * generation). Any rank may put and get; a message that is put again is replaced. The medium may
 * lose messages (a Redis that starts anew): the rank that put one puts it again by itself, for as
 * long as it has not dropped the scope.
 *
 * A store belongs to one thread at a time, and to the process that opened it: a forked child gets
 * -EPERM, and closes nothing. IOSHAPE_E_COORDINATOR: the store is out of reach now; the next call
 * tries anew. Calls return within about two seconds.
 */
struct store;
struct store_ops;

/* In the directory of the generations, for ranks that share nothing else; in the memory of a host
 * that all ranks share; in the coordinator's Redis. */
extern const struct store_ops store_files;
extern const struct store_ops store_memory;
extern const struct store_ops store_redis;

int store_open(struct store **out, const struct store_ops *ops, const struct store_config *config,
	       struct base_error *error);
void store_close(struct store *store); /* NULL is fine */
const char *store_id(const struct store *store);

int store_put(struct store *store, const char *scope, const char *name, const void *message,
	      size_t bytes, struct base_error *error);
/* Replaces what `message` holds. -EAGAIN if there is no such message (no sentence). */
int store_get(struct store *store, const char *scope, const char *name, struct base_buffer *message,
	      struct base_error *error);
/*
 * The same for the messages "<prefix>-<rank>" of all ranks for which have[rank] is not set yet, in
 * as few round trips as the medium allows. Calls found() for each one that is there; found() may
 * set have[rank].
 */
int store_collect(struct store *store, const char *scope, const char *prefix, const bool *have,
		  store_found_fn *found, void *user, struct base_error *error);
/* Waits until it is worth another look, but no longer than timeout_ms. */
void store_wait(struct store *store, uint32_t timeout_ms);
/* Whether the medium knows that the process of this rank has ended. Only memory does. */
bool store_has_ended(struct store *store, uint32_t rank);
/* This rank's messages in the scope are not needed any more; rank 0: no rank's are. */
void store_drop(struct store *store, const char *scope);

/*
 * Which ranks can meet in memory and share it: those for whom this is the same. A host has one, or
 * one for each container that has a /dev/shm of its own.
 */
#define STORE_PLACE_ID_BYTES 48
void store_identify_place(char id[STORE_PLACE_ID_BYTES]);

/* ---- What the stores of all kinds share (store*.c) ------------------------------------------- */

/* A message that this rank has put, and not dropped. */
struct store_own {
	struct store_own *next;
	char scope[STORE_NAME_BYTES];
	char name[STORE_NAME_BYTES];
	size_t bytes;
	uint8_t data[];
};

/*
 * What a kind of store does. The caller has checked the names and the process. No member but
 * has_ended is NULL.
 */
struct store_ops {
	const char *id; /* "files", "host", "redis" */
	/* A wait lasts for this part (1/wait_part) of the time since the last news, within these
	 * bounds. */
	unsigned wait_part;
	uint64_t least_wait_ns, most_wait_ns;

	int (*open)(struct store **out, const struct store_config *config,
		    struct base_error *error);
	int (*put)(struct store *store, const char *scope, const char *name, const void *message,
		   size_t bytes, struct base_error *error);
	/* Puts it again if the medium has lost it. 0, or a code: the rest is tried later. */
	int (*restore)(struct store *store, const struct store_own *own);
	int (*get)(struct store *store, const char *scope, const char *name,
		   struct base_buffer *message, struct base_error *error);
	int (*collect)(struct store *store, const char *scope, const char *prefix, const bool *have,
		       store_found_fn *found, void *user, struct base_error *error);
	bool (*has_ended)(struct store *store, uint32_t rank);
	/* Rank 0: removes what all ranks have put in the scope. */
	void (*drop)(struct store *store, const char *scope);
	/* Frees everything but the struct itself. */
	void (*close)(struct store *store);
};

/* The first member of each kind's own struct. */
struct store {
	const struct store_ops *ops;
	struct store_config config;
	pid_t pid;

	struct store_own *own;
	size_t own_count;
	uint64_t own_bytes;
	uint32_t restore_ms; /* between two looks for lost messages */
	uint64_t restore_ns; /* when the next one is due */

	uint64_t news_ns;    /* when this rank last put a message, or read a new one */
	uint64_t looking_ns; /* spent on all ranks since the last wait */
	uint64_t stamps[16]; /* of messages read lately: others are news */
	unsigned next_stamp;
};

/* For open(): `bytes` zeros but for the struct above; or NULL, with a sentence. */
void *store_new(size_t bytes, const struct store_ops *ops, const struct store_config *config,
		struct base_error *error);
/* Writes "<prefix>-<rank>". */
void store_name_of(char name[STORE_NAME_BYTES], const char *prefix, uint32_t rank);
/* For get() and collect(): a message with this stamp was read. */
void store_saw(struct store *store, uint64_t stamp);
/* Restores this rank's lost messages now, whether or not that is due. */
void store_restore(struct store *store);
/* Sleeps for so long, whatever signals come. */
void store_sleep_ns(uint64_t ns);

/*
 * Finds the folder in this host's memory where ranks of one user meet: for their messages, and for
 * the sockets of their streams. Makes it, mode 0700, if it is not there. `given`: NULL, or the
 * folder that replaces /dev/shm.
 */
#define STORE_PLACE_BYTES 256
int store_find_place(char path[STORE_PLACE_BYTES], const char *given, struct base_error *error);

#endif
