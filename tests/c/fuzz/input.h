/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes numbers from a fuzzer's input, for targets that build their own data. Returns 0 when no
 * bytes are left.
 */
#ifndef TESTS_FUZZ_INPUT_H
#define TESTS_FUZZ_INPUT_H

#include "base/base.h"

#include <stdint.h>

struct input {
	const uint8_t *at;
	size_t left;
};

static inline uint64_t take(struct input *input, unsigned bytes)
{
	uint64_t number = 0;

	for (; bytes && input->left; bytes--, input->left--)
		number = number << 8 | *input->at++;
	return number;
}

/*
 * Takes a number with a random number of bytes, so that small numbers are as likely as large ones.
 */
static inline uint64_t take_amount(struct input *input, uint64_t least, uint64_t most)
{
	const uint64_t amount = take(input, (unsigned)take(input, 1) % 9);

	return MIN(MAX(amount, least), most);
}

#endif
