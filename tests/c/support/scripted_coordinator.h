/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A coordinator that follows a test's script: the `ops` of a pool's configuration. One pool at a
 * time. The script may change while pools are open; each change ends a wait().
 */
#ifndef TESTS_SUPPORT_SCRIPTED_COORDINATOR_H
#define TESTS_SUPPORT_SCRIPTED_COORDINATOR_H

#include "slots/slots.h"

struct script {
	bool unreachable;          /* all calls fail with IOSHAPE_E_COORDINATOR */
	enum slots_state acquired; /* answer of acquire() */
	enum slots_state beaten;   /* answer of beat() */
	uint32_t position;         /* position in the queue */
	uint32_t beat_ms;          /* time until the next heartbeat is due */
	uint32_t capacity;
	uint64_t rate;       /* bytes/s of pace(); 0: no limit */
	uint32_t silence_ms; /* duration of each call */
	bool deaf;           /* wait() fails, other calls do not */
	bool floods;         /* wait() returns at once */
};

struct script_counts {
	int32_t boost_ms; /* of the last request */
	unsigned acquires, beats, releases, paces, waits, rests;
	uint64_t passed;   /* as of the last beat or release */
	char released[64]; /* last ID */
	bool holding;      /* as of the last beat */
};

extern const struct slots_ops script_coordinator;

void script_install(const struct script *script);
void script_change(const struct script *script);
struct script_counts script_counts(void);

#endif
