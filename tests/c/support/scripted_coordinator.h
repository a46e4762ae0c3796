/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A coordinator that does what a test says: the `ops` of a pool's config. One pool at a time. All
 * of it can be changed while pools are open; each change ends a wait().
 */
#ifndef TESTS_SUPPORT_SCRIPTED_COORDINATOR_H
#define TESTS_SUPPORT_SCRIPTED_COORDINATOR_H

#include "slots/slots.h"

struct script {
	bool unreachable;          /* all calls fail with IOSHAPE_E_COORDINATOR */
	enum slots_state acquired; /* what acquire() answers */
	enum slots_state beaten;   /* what beat() answers */
	uint32_t position;         /* of waiters */
	uint32_t beat_ms;          /* when the next is due */
	uint32_t capacity;
	uint64_t rate;       /* of pace(); 0: no limit */
	uint32_t silence_ms; /* each call takes so long */
	bool deaf;           /* wait() fails, and nothing else */
	bool floods;         /* wait() ends at once */
};

struct script_counts {
	int32_t boost_ms; /* of the last request */
	unsigned acquires, beats, releases, paces, waits, rests;
	uint64_t passed;   /* as of the last beat or release */
	int64_t paced;     /* bytes handed out and not handed back */
	char released[64]; /* the last id */
	bool holding;      /* as of the last beat */
};

extern const struct slots_ops script_coordinator;

void script_install(const struct script *script);
void script_change(const struct script *script);
struct script_counts script_counts(void);

#endif
