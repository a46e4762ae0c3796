/* SPDX-License-Identifier: Apache-2.0 */
/* Which generations are kept. */
#include "ckpt/generation.h"

size_t ckpt_retention(const uint64_t *steps, size_t count, uint32_t keep_last, uint64_t keep_every,
		      bool *goes)
{
	size_t going = 0;

	for (size_t i = 0; i < count; i++) {
		/* The newest is among the last, however few they are. */
		bool is_last = !keep_last || count - i <= keep_last;
		bool is_multiple = keep_every && steps[i] % keep_every == 0;

		goes[i] = !is_last && !is_multiple;
		going += goes[i];
	}
	return going;
}
