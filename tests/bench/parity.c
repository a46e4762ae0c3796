/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parity [DATA PARITY [MIB]]: measures how many bytes of data one core makes parities of in a
 * second. It works block by block as the tier does, from memory. Prints GB/s of the best of several
 * rounds.
 */
/* Included because its functions are static. */
#include "tier/parity.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 15
#define BLOCK_BYTES (4 * MIB)

/* Makes all parities of a group on one core. */
static void make_parities(uint8_t *const *data, unsigned segments, uint8_t *const *parities,
			  unsigned parity_count, uint8_t coefficients[][PARITY_MOST_DATA],
			  size_t bytes)
{
	for (size_t at = 0; at < bytes; at += BLOCK_BYTES) {
		for (unsigned p = 0; p < parity_count; p++) {
			memset(parities[p] + at, 0, BLOCK_BYTES);
			for (unsigned d = 0; d < segments; d++)
				add_multiple(parities[p] + at, data[d] + at, BLOCK_BYTES,
					     coefficients[p][d]);
		}
	}
}

int main(int argc, char **argv)
{
	const unsigned segments = argc > 1 ? (unsigned)atoi(argv[1]) : 4;
	const unsigned parity_count = argc > 2 ? (unsigned)atoi(argv[2]) : 2;
	const size_t bytes = (argc > 3 ? (size_t)atoi(argv[3]) : 64) * MIB;
	uint8_t coefficients[PARITY_MOST][PARITY_MOST_DATA];
	uint8_t *all[PARITY_MOST_DATA + PARITY_MOST];
	unsigned have[PARITY_MOST_DATA];
	double best_s = 1e9;

	if (!segments || segments > PARITY_MOST_DATA || parity_count > PARITY_MOST)
		return 2;
	for (unsigned i = 0; i < segments + parity_count; i++) {
		all[i] = base_map(bytes);
		if (!all[i])
			return 1;
		memset(all[i], (int)i + 1, bytes);
	}
	for (unsigned d = 0; d < segments; d++)
		have[d] = d;
	for (unsigned p = 0; p < parity_count; p++)
		solve(segments, have, segments + p, coefficients[p]);
	for (unsigned round = 0; round < ROUNDS; round++) {
		const uint64_t began_ns = base_now_ns();

		make_parities(all, segments, all + segments, parity_count, coefficients, bytes);
		best_s = MIN(best_s, base_seconds(base_now_ns() - began_ns));
	}
	printf("%.2f\n", (double)segments * (double)bytes / best_s / 1e9);
	return 0;
}
