/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the in-flight controller (io/depth.c) on modelled storages:
 *
 *     depth SEED
 *
 * Prints for each storage, as JSON, its throughput and that of the best fixed depth. Also prints
 * how soon the limit is halved after another writer has come, and how soon the throughput returns
 * after that writer has left.
 */
#include "base/base.h"
#include "support/modelled_storage.h"

#include <stdio.h>
#include <stdlib.h>

/* Size of a large checkpoint, and the rate at which its bytes are copied into buffers. */
#define BYTES (2 * GIB)
#define FILL_BYTES_PER_S 8e9

/* The other writer. Its depth is the most that the slowest answers allow. */
#define NEIGHBOUR_DEPTH 16u
#define COMES_S 3.0
#define LEAVES_S 6.0
#define ENDS_S 9.0
#define SLICE_S 0.05
#define SLICES 180u

static const unsigned depths[] = { 1, 2, 3, 4, 6, 8, 12, 16, 24, 31, 48, 63 };

static struct modelled_run run_on(const struct modelled_storage *storage, uint64_t seed)
{
	return (struct modelled_run){
		.storage = storage,
		.fill = (double)storage->request_bytes / FILL_BYTES_PER_S,
		.seed = seed,
	};
}

static struct modelled_result write_alone(const struct modelled_storage *storage, unsigned fixed,
					  uint64_t seed)
{
	struct modelled_run run = run_on(storage, seed);

	run.fixed = fixed;
	run.bytes = BYTES;
	return modelled_write(&run);
}

static void tell_alone(const struct modelled_storage *storage, uint64_t seed)
{
	const struct modelled_result ours = write_alone(storage, 0, seed);
	double rate, best = 0;
	unsigned best_depth = 0;

	for (size_t i = 0; i < ARRAY_LENGTH(depths) && depths[i] < storage->buffers; i++) {
		rate = write_alone(storage, depths[i], seed).bytes_per_s;
		if (rate > best * 1.001) {
			best = rate;
			best_depth = depths[i];
		}
	}
	printf("\"ratio\": %.4f, \"mb_per_s\": %.1f, \"limit\": %u, \"best_mb_per_s\": %.1f, "
	       "\"best_depth\": %u",
	       ours.bytes_per_s / best, ours.bytes_per_s / 1e6, ours.depth.limit, best / 1e6,
	       best_depth);
}

/* ---- Another writer on the storage ----------------------------------------------------------- */

struct course {
	uint64_t request_bytes;
	double limits, answers; /* sum and number of limits before the other writer comes */
	double halved;          /* seconds from its arrival; negative: not yet halved */
	double bytes[SLICES];
};

static void follow(void *user, double now, const struct io_depth *depth)
{
	struct course *course = user;

	if (now < ENDS_S)
		course->bytes[(unsigned)(now / SLICE_S)] += (double)course->request_bytes;
	if (now > 1 && now < COMES_S) {
		course->limits += depth->limit;
		course->answers++;
	} else if (now >= COMES_S && course->halved < 0 &&
		   (depth->limit == 1 || depth->limit <= course->limits / course->answers / 2)) {
		course->halved = now - COMES_S;
	}
}

static double rate_between(const struct course *course, double from, double to)
{
	double bytes = 0;

	for (unsigned i = (unsigned)(from / SLICE_S); i < (unsigned)(to / SLICE_S); i++)
		bytes += course->bytes[i];
	return bytes / (to - from);
}

static void tell_beside(const struct modelled_storage *storage, uint64_t seed)
{
	struct course course = { .request_bytes = storage->request_bytes, .halved = -1 };
	struct modelled_run run = run_on(storage, seed);
	double from = LEAVES_S;

	run.seconds = ENDS_S;
	run.neighbour = (struct modelled_neighbour){ .from = COMES_S,
						     .to = LEAVES_S,
						     .depth = NEIGHBOUR_DEPTH,
						     .bytes = storage->request_bytes };
	run.watch = follow;
	run.user = &course;
	modelled_write(&run);
	while (from + 4 * SLICE_S < ENDS_S && rate_between(&course, from, from + 4 * SLICE_S) <
						      0.9 * rate_between(&course, 1, COMES_S))
		from += SLICE_S;
	printf("\"reaction_ms\": %.1f, \"recovery_ms\": %.0f",
	       (course.halved < 0 ? ENDS_S : course.halved) * 1e3, (from - LEAVES_S) * 1e3);
}

int main(int argc, char **argv)
{
	const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;

	printf("{");
	for (unsigned i = 0; i < modelled_storage_count; i++) {
		printf("%s\n\"%s\": {", i ? "," : "", modelled_storages[i].name);
		tell_alone(&modelled_storages[i], seed);
		printf(", ");
		tell_beside(&modelled_storages[i], seed);
		printf("}");
	}
	printf("\n}\n");
	return 0;
}
