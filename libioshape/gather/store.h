/* SPDX-License-Identifier: Apache-2.0 */
/* What the stores of all kinds share. Private to this layer. */
#ifndef GATHER_STORE_H
#define GATHER_STORE_H

#include "gather/gather.h"

/* A message that this rank has put, and not dropped. */
struct store_own {
	struct store_own *next;
	char scope[GATHER_NAME_BYTES];
	char name[GATHER_NAME_BYTES];
	size_t bytes;
	uint8_t data[];
};

/*
 * What a kind of store does. The caller has checked the names and the process. No member but
 * has_ended is NULL.
 */
struct gather_store_ops {
	const char *id;
	/* A wait lasts for this part (1/wait_part) of the time since the last news, within these
	 * bounds. */
	unsigned wait_part;
	uint64_t least_wait_ns, most_wait_ns;

	int (*open)(struct gather_store **out, const struct gather_store_config *config,
		    struct base_error *error);
	int (*put)(struct gather_store *store, const char *scope, const char *name,
		   const void *message, size_t bytes, struct base_error *error);
	/* Puts it again if the medium has lost it. 0, or a code: the rest is tried later. */
	int (*restore)(struct gather_store *store, const struct store_own *own);
	int (*get)(struct gather_store *store, const char *scope, const char *name,
		   struct base_buffer *message, struct base_error *error);
	int (*collect)(struct gather_store *store, const char *scope, const char *prefix,
		       const bool *have, gather_found_fn *found, void *user,
		       struct base_error *error);
	bool (*has_ended)(struct gather_store *store, uint32_t rank);
	/* Rank 0: removes what all ranks have put in the scope. */
	void (*drop)(struct gather_store *store, const char *scope);
	/* Frees everything but the struct itself. */
	void (*close)(struct gather_store *store);
};

/* The first member of each kind's own struct. */
struct gather_store {
	const struct gather_store_ops *ops;
	struct gather_store_config config;
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
void *store_new(size_t bytes, const struct gather_store_ops *ops,
		const struct gather_store_config *config, struct base_error *error);
/* Writes "<prefix>-<rank>". */
void store_name_of(char name[GATHER_NAME_BYTES], const char *prefix, uint32_t rank);
/* For get() and collect(): a message with this stamp was read. */
void store_saw(struct gather_store *store, uint64_t stamp);
/* Restores this rank's lost messages now, whether or not that is due. */
void store_restore(struct gather_store *store);
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
