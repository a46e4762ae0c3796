/* SPDX-License-Identifier: Apache-2.0 */
#include "support/random.h"

#include <string.h>

/* Fills whole words: under a sanitizer many tests would take most of their time here. */
void test_random_fill(uint64_t *state, void *into, size_t bytes)
{
	uint8_t *to = into;
	uint64_t number;

	for (; bytes >= sizeof(number); bytes -= sizeof(number), to += sizeof(number)) {
		number = test_random(state);
		memcpy(to, &number, sizeof(number));
	}
	number = bytes ? test_random(state) : 0;
	memcpy(to, &number, bytes);
}
