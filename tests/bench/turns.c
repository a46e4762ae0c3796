/* SPDX-License-Identifier: Apache-2.0 */
/*
 * turns [TURNS [FOLDER]]: measures an uncontended turn on one host against two pairs of
 * flock(LOCK_EX) and flock(LOCK_UN). A turn is one acquire and one release through the coordinator
 * "local". flock() is the cheapest lock there is. Both are interleaved in 400 rounds, and the
 * median of each counts. Prints one line of JSON.
 */
#include "slots/slots.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* Rounds are short, so that most of them end before another process takes the processor. */
#define ROUNDS 400

static void fail(const char *what)
{
	printf("{\"error\": \"%s\"}\n", what);
	exit(1);
}

/* Makes the next id, of equal length. It is cheap, because making ids must not be measured. */
static void count_up(char *digit)
{
	for (; *digit == '9'; digit--)
		*digit = '0';
	++*digit;
}

static double turn_ns(void *pool, unsigned turns)
{
	static struct slots_request request = { .id = "0123456789abcdef-000000000",
						.weight = 1,
						.bytes = 64 * MIB };
	char *last = request.id + strlen(request.id) - 1;
	struct base_error error = { 0 };
	const uint64_t began = base_now_ns();

	for (unsigned i = 0; i < turns; i++) {
		struct slots_answer answer;

		count_up(last);
		if (slots_local.acquire(pool, &request, &answer, &error) ||
		    answer.state != SLOTS_HOLDING ||
		    slots_local.release(pool, request.id, 64 * MIB, &error))
			fail(error.text);
	}
	return (double)(base_now_ns() - began) / turns;
}

static double two_pairs_ns(int fd, unsigned turns)
{
	const uint64_t began = base_now_ns();

	for (unsigned i = 0; i < 2 * turns; i++) {
		if (flock(fd, LOCK_EX | LOCK_NB) || flock(fd, LOCK_UN))
			fail("flock");
	}
	return (double)(base_now_ns() - began) / turns;
}

static int by_value(const void *a, const void *b)
{
	const double *left = a, *right = b;

	return (*left > *right) - (*left < *right);
}

int main(int argc, char **argv)
{
	const unsigned turns = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 20000;
	const char *folder = argc > 2 ? argv[2] : "/dev/shm";
	char address[300], path[300];
	struct slots_config config = {
		.address = address,
		.identity = { .client = "0123456789abcdef",
			      .job = "turns",
			      .node = "here",
			      .ranks = 1,
			      .share = 100 },
		.lease_ms = 15000,
		.default_capacity = 2,
	};
	double ours[ROUNDS], theirs[ROUNDS];
	struct base_error error = { 0 };
	void *pool;
	int fd;

	if (turns < ROUNDS)
		fail("too few turns");
	snprintf(address, sizeof(address), "local:%s", folder);
	snprintf(path, sizeof(path), "%s/ioshape-turns-%d", folder, (int)getpid());
	snprintf(config.pool, sizeof(config.pool), "turns-%d", (int)getpid());
	fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0 || unlink(path))
		fail("no file for flock");
	if (slots_local.open(&pool, &config, &error))
		fail(error.text);
	for (unsigned i = 0; i < ROUNDS; i++) {
		ours[i] = turn_ns(pool, turns / ROUNDS);
		theirs[i] = two_pairs_ns(fd, turns / ROUNDS);
	}
	slots_local.close(pool);
	close(fd);
	qsort(ours, ROUNDS, sizeof(ours[0]), by_value);
	qsort(theirs, ROUNDS, sizeof(theirs[0]), by_value);
	printf("{\"turn_ns\": %.0f, \"two_flock_pairs_ns\": %.0f, \"ratio\": %.3f}\n",
	       ours[ROUNDS / 2], theirs[ROUNDS / 2], ours[ROUNDS / 2] / theirs[ROUNDS / 2]);
	return 0;
}
