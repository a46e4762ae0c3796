/* SPDX-License-Identifier: Apache-2.0 */
/* Between rules.c and rules_turns.c. */
#ifndef SLOTS_RULES_PARTS_H
#define SLOTS_RULES_PARTS_H

#include "slots/rules.h"

typedef bool (*rules_before_fn)(const struct rules_member *, const struct rules_member *);

bool rules_queues_before(const struct rules_member *a, const struct rules_member *b);
bool rules_ends_before(const struct rules_member *a, const struct rules_member *b);

/* The operator's numbers, or else the jobs' and the built-in ones. */
uint32_t rules_capacity(const struct rules_state *state);
uint64_t rules_small_bytes(const struct rules_state *state);
uint32_t rules_express(const struct rules_state *state);

/* A third of a lease, rounded up. */
uint32_t rules_third(uint32_t lease);
/* Zeros behind the text, too: nothing of our memory goes into files. */
void rules_put_text(char *to, const char *text, size_t room);

/* NULL if there is none. Pointers to members last until one is forgotten. */
struct rules_member *rules_find(struct rules_state *state, const char *id);
struct rules_member *rules_first(struct rules_state *state, enum rules_member_state which,
				 rules_before_fn before);
/* Makes room for a job that is not known. NULL if all have members, who are as many as can be. */
struct rules_job *rules_job_named(struct rules_state *state, const char *name);

/* What every operation begins with: time passes, the dead go, those that fit come in. */
void rules_tick(struct rules_state *state, int64_t now);
void rules_let_in(struct rules_state *state);
bool rules_fit(const struct rules_state *state, uint32_t weight);
void rules_admit(struct rules_state *state, struct rules_member *member, uint32_t given,
		 uint32_t lease);
/* `passed` if it is the holder that says so, or NULL. */
void rules_forget(struct rules_state *state, struct rules_member *member, const uint64_t *passed);
/* Its job has one member more. */
void rules_join(struct rules_state *state, struct rules_job *job, uint32_t share);
/* Into the pool's sums, or out of them, by its state as it is. */
void rules_count(struct rules_state *state, const struct rules_member *member, bool in);

#endif
