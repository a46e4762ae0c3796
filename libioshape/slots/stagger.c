/* SPDX-License-Identifier: Apache-2.0 */
/* While nobody keeps the order each writer has a time of its own. Pure. */
#include "slots/slots.h"

/* Of a writer that knows nothing of the others: it may be one of so many. */
#define UNKNOWN_RANKS 4u

/* Well mixed (the end of splitmix64): neighbours get numbers far apart. */
static uint64_t mix(uint64_t value)
{
	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
	value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
	return value ^ (value >> 31);
}

/*
 * The ranks of a job are dealt out over as many rounds of writing as it takes when `capacity` write
 * at a time, so that no two meet that need not. Which ranks write first is left to chance, by job
 * and save: two jobs do not meet every time, and no rank is always the last.
 */
uint32_t slots_stagger_ms(const struct slots_identity *identity, uint64_t save, uint32_t capacity,
			  uint32_t write_ms, uint32_t most_ms)
{
	const uint64_t ranks = identity->ranks > 1 ? identity->ranks : UNKNOWN_RANKS;
	const uint64_t rounds = (ranks + capacity - 1) / MAX(capacity, 1);
	const uint64_t chance = mix(base_hash_text(identity->job) + save * 0x9e3779b97f4a7c15);
	const uint64_t own = identity->ranks > 1 ? identity->rank :
						   mix(base_hash_text(identity->client));
	/* A quarter of a write, different for each: they must not begin in the same instant. */
	const uint64_t jitter = mix(chance ^ base_hash_text(identity->client)) % (write_ms / 4 + 1);
	const uint64_t delay = (own + chance) % MAX(rounds, 1) * write_ms + jitter;
	const uint64_t longest = MAX(rounds, 1) * write_ms;

	/* Rounds that would take too long are made shorter, all alike: the order stays. */
	if (longest <= most_ms)
		return (uint32_t)delay;
	return (uint32_t)((double)delay / (double)(longest + write_ms / 4) * most_ms);
}
