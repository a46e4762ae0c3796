/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How near the learnt number of writers comes to the best, on modelled storages, for tests/bench.
 * Prints a list with an object for each storage: means over SEEDS runs of the second ten minutes,
 * beginning with what a pool has where nothing is known.
 */
#include "support/learning.h"

#include <stdio.h>

#define SEEDS 32u
#define FROM_S 600
#define TO_S 1200
#define START 2u
#define MOST_TRIED 80u

static double mean_of(const struct learning_storage *storage, uint32_t capacity,
		      double *mean_learnt)
{
	struct learning_result result;
	double sum = 0;

	*mean_learnt = 0;
	for (uint64_t seed = 1; seed <= SEEDS; seed++) {
		learning_run(storage, capacity, START, seed, FROM_S, TO_S, &result);
		sum += result.bytes_per_s / SEEDS;
		*mean_learnt += (double)result.capacity / SEEDS;
	}
	return sum;
}

static void tell(const struct learning_storage *storage)
{
	double best = 0, learnt, writers;
	uint32_t best_writers = 0;

	for (uint32_t tried = 1; tried <= MOST_TRIED; tried += 1 + tried / 4) {
		const double rate = mean_of(storage, tried, &writers);

		if (rate > best) {
			best = rate;
			best_writers = tried;
		}
	}
	learnt = mean_of(storage, 0, &writers);
	printf("{\"storage\": \"%s\", \"best_writers\": %u, \"best_bytes_per_s\": %.0f, "
	       "\"learnt_writers\": %.1f, \"learnt_bytes_per_s\": %.0f}",
	       storage->name, best_writers, best, writers, learnt);
}

int main(void)
{
	for (size_t i = 0; i < learning_storage_count; i++) {
		printf(i ? ",\n" : "[");
		tell(&learning_storages[i]);
	}
	printf("]\n");
	return 0;
}
