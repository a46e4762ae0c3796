/* SPDX-License-Identifier: Apache-2.0 */
/* A pool kept by a Redis: its connections and commands (traffic.c), wakes (wake.c), what is said
 * (redis.c), and what the answers mean (replies.c). */
#ifndef SLOTS_REDIS_H
#define SLOTS_REDIS_H

#include "slots/link.h"
#include "slots/slots.h"

#define REDIS_KEY_BYTES (SLOTS_NAME_BYTES + 32)

struct redis_pool {
	struct slots_config config;
	struct slots_address address; /* with the password, wherever that came from */
	char key[REDIS_KEY_BYTES];
	char wake_key[REDIS_KEY_BYTES];
	uint64_t epoch;          /* the latest that an answer told; atomic */
	uint64_t name_due_ns;    /* when the pool's name is to be written down; atomic */
	size_t most_reply_bytes; /* 0: as usual */
	uint64_t hurry_ns;       /* no call lasts longer; 0: as long as any; atomic */

	pthread_mutex_t lock; /* of what follows, until wake */
	struct slots_route route;
	struct slots_link *commands; /* NULL: none yet, lost, or at rest */
	/* After failures: until then nothing is tried, and the last one is the answer. */
	unsigned failures;
	uint64_t not_before_ns;
	struct base_error last_failure;
	uint64_t heal_not_before_ns; /* what the script could not read was dropped just before */

	/* Of the thread that waits. */
	struct slots_link *wake;   /* on which BLPOP is asked; NULL: none yet, lost, or at rest */
	bool asked;                /* BLPOP was sent, and its answer has not come */
	bool woken;                /* a wake may have been missed: the next wait() ends at once */
	uint64_t due_ns;           /* when that answer comes at the latest, if the server is well */
	uint64_t refused_until_ns; /* BLPOP is not tried; 0: it was never refused */
	uint32_t refused_ms;       /* for so long, since it was last refused; 0: it is answered */
	uint64_t wakes_ns;         /* wakes were as many as had been due until then */
	unsigned cut_short; /* connections that ended with BLPOP asked, since one was answered */
	int interruption;   /* an eventfd */
};

/* ---- Connections and commands (traffic.c) ---------------------------------------------------- */

/* No call takes longer, whatever the network does. */
#define REDIS_CALL_NS 2000000000ull
/* An answer to BLPOP that is so late will not come. */
#define REDIS_DEAD_NS 2000000000ull

void redis_hurry(void *opaque, uint64_t until_ns);
/* When a call that begins now has to be over. */
uint64_t redis_call_end(const struct redis_pool *pool);

/* Both with the lock. A connection as the back-off allows; failures are noted. */
int redis_obtain(struct redis_pool *pool, struct slots_link **out, uint64_t until_ns,
		 struct base_error *error);
void redis_note_failure(struct redis_pool *pool, const struct base_error *error);

/* A call of the script: begins with the operation, whom it is about (an id, a job, an operator) and
 * the epoch that this client knows; arguments are added by link_add_*(). */
void redis_begin(const struct redis_pool *pool, struct link_command *command, const char *operation,
		 const char *subject, uint64_t known_epoch);

/*
 * Sends a command and returns what is no error of any kind; *reply is the caller's. It may reach
 * the server twice: *repeated tells (NULL: nobody asks).
 */
int redis_call(struct redis_pool *pool, struct link_command *command, redisReply **reply,
	       bool *repeated, struct base_error *error);
/* The same, within `most_ns`, for what no slot depends on: a failure is no sign that the
 * coordinator is unreachable. In a cluster the key may be on another node than the pool's. */
int redis_call_aside(struct redis_pool *pool, struct link_command *command, uint64_t most_ns,
		     redisReply **reply, struct base_error *error);

/* With the lock. Reads the first line of the pool's password file into the pool's address
 * (secret.c). If that fails, a password that was read before stays. Without one the coordinator
 * counts as unreachable: no save fails because an operator has changed the mode of a file. */
int redis_read_password(struct redis_pool *pool, struct base_error *error);

/* Errors after which another server may be the right one. */
bool redis_must_look_anew(const redisReply *reply);
/* An error reply as a failure. */
int redis_refused(const struct slots_link *link, const redisReply *reply, struct base_error *error);

/* ---- Wakes (wake.c) -------------------------------------------------------------------------- */

int redis_wait(void *opaque, uint32_t timeout_ms, struct base_error *error);
void redis_rest(void *opaque);
void redis_interrupt(void *opaque);

/* ---- Answers (replies.c) --------------------------------------------------------------------- */

int redis_read_answer(const redisReply *reply, struct slots_answer *answer);
int redis_read_grant(const redisReply *reply, struct slots_grant *grant);
int redis_read_status(const redisReply *reply, const char *pool,
		      struct ioshape_pool_status **status, struct base_error *error);
int redis_read_number(const redisReply *reply, uint64_t *number);

#endif
