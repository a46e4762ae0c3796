/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers for tests. They are equal in every run unless the seed is changed. */
#ifndef TESTS_SUPPORT_RANDOM_H
#define TESTS_SUPPORT_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Returns the next number of SplitMix64 (Steele, Lea, Flood 2014). */
static inline uint64_t test_random(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15u);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

/* Returns a number from 0 to `limit` - 1. */
static inline uint64_t test_random_below(uint64_t *state, uint64_t limit)
{
	return test_random(state) % limit;
}

void test_random_fill(uint64_t *state, void *into, size_t bytes);

#endif
