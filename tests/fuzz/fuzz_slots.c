/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any operations on the queue of one host, with any settings, while clocks jump. Each reads the
 * table from a file and writes it back. What one has written holds for the next, all of it.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"
#include "input.h"
#include "slots/local.h"

#define IDS 24
#define JOBS 48 /* more than are remembered */

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

static bool playing; /* the fuzzer needs the real time */
static uint64_t monotonic_ms, wall_ms;

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	const uint64_t ms = clock == CLOCK_MONOTONIC ? monotonic_ms : wall_ms;

	if (!playing)
		return __real_clock_gettime(clock, now);
	*now = (struct timespec){ .tv_sec = (time_t)(ms / 1000),
				  .tv_nsec = (long)(ms % 1000) * 1000000 };
	return 0;
}

/* ---- What the input says --------------------------------------------------------------------- */

static void take_id(struct input *input, char *id)
{
	snprintf(id, SLOTS_ID_BYTES, "r-%u", (unsigned)take(input, 1) % IDS);
}

static void take_config(struct input *input, struct slots_config *config)
{
	const uint64_t job = take(input, 1) % JOBS;

	*config = (struct slots_config){ .default_capacity = 2,
					 .identity = { .node = "here", .user = "me" } };
	config->lease_ms = (uint32_t)take_amount(input, 300, 600000);
	config->asked_capacity = (uint32_t)take_amount(input, 0, SLOTS_MOST_CAPACITY);
	config->rate = take_amount(input, 0, INT64_MAX);
	config->identity.share = (uint32_t)take_amount(input, 1, 1000);
	snprintf(config->identity.job, sizeof(config->identity.job), "job%u", (unsigned)job);
}

/* ---- Operations ------------------------------------------------------------------------------ */

static void pass_time(struct input *input)
{
	const uint64_t most_ms = UINT64_C(1) << 42; /* the year 2109 */

	monotonic_ms += take_amount(input, 0, most_ms - monotonic_ms);
	wall_ms = take(input, 1) % 2 ? take_amount(input, 0, most_ms) : wall_ms + take(input, 2);
}

static void acquire(struct local_table *table, struct input *input)
{
	const uint32_t process = (uint32_t)take(input, 2) % LOCAL_NUMBERS;
	const uint64_t how = take(input, 1);
	struct slots_request request = { .never_wait = how % 8 == 7, .urgent = how / 8 % 4 == 3 };
	struct slots_config config;
	struct slots_answer answer;

	take_config(input, &config);
	take_id(input, request.id);
	request.weight = (uint32_t)take_amount(input, 0, UINT32_MAX);
	request.bytes = take_amount(input, 0, UINT64_MAX);
	MUST(!local_queue_acquire(table, &config, &request, process, process, &answer));
}

static void beat(struct local_table *table, struct input *input)
{
	struct slots_beat beat = { 0 };
	struct slots_config config;
	struct slots_answer answer;

	take_config(input, &config);
	take_id(input, beat.id);
	beat.passed = take_amount(input, 0, UINT64_MAX);
	local_queue_beat(table, &config, &beat, &answer);
}

static void set(struct local_table *table, struct input *input)
{
	struct ioshape_pool_settings settings = { .clear = take(input, 1) % 8 == 7 };
	struct slots_config config;

	take_config(input, &config);
	settings.capacity = (uint32_t)take_amount(input, 0, SLOTS_MOST_CAPACITY);
	settings.pool_bytes_per_s = take_amount(input, 0, UINT64_MAX);
	settings.job_bytes_per_s = take_amount(input, 0, UINT64_MAX);
	settings.small_bytes = take_amount(input, 0, UINT64_MAX);
	settings.express = (uint32_t)take_amount(input, 0, SLOTS_MOST_CAPACITY);
	local_queue_set(table, &settings);
}

static void pace(struct local_table *table, struct input *input)
{
	const int64_t most = (int64_t)SLOTS_MOST_BYTES;
	const int64_t bytes = (int64_t)take_amount(input, 0, SLOTS_MOST_BYTES * 2) - most;
	struct slots_config config;
	struct slots_grant grant;

	take_config(input, &config);
	local_queue_pace(table, &config, bytes, &grant);
	MUST(grant.start_ms <= grant.end_ms);
}

static void leave(struct local_table *table, struct input *input, uint64_t how)
{
	char id[SLOTS_ID_BYTES];
	struct slots_config config;

	take_config(input, &config);
	take_id(input, id);
	if (how == 0)
		local_queue_kick(table, id);
	else if (how == 1)
		local_queue_bury(table, (uint32_t)take(input, 2) % LOCAL_NUMBERS);
	else
		local_queue_release(table, id, take_amount(input, 0, UINT64_MAX));
}

static void operate(struct local_table *table, struct input *input)
{
	const uint64_t what = take(input, 1) % 16;

	if (what < 6)
		acquire(table, input);
	else if (what < 8)
		beat(table, input);
	else if (what < 11)
		leave(table, input, what - 8);
	else if (what < 13)
		pace(table, input);
	else if (what < 14)
		set(table, input);
	else
		pass_time(input);
}

/* ---- What must be so ------------------------------------------------------------------------- */

static void check_same(struct local_table *now, struct local_table *before)
{
	const struct local_head *head = &now->image.head;

	MUST(!memcmp(head, &before->image.head, sizeof(*head)));
	for (uint32_t i = 0; i < head->job_end; i++)
		MUST(!memcmp(local_job(now, i), local_job(before, i), sizeof(struct local_job)));
	for (uint32_t i = 0; i < head->member_end; i++)
		MUST(!memcmp(local_member(now, i), local_member(before, i),
			     sizeof(struct local_member)));
}

/* No slot was granted beyond the capacity, but one to a request with a deadline: a lower capacity
 * takes from nobody. */
static void check_capacity(struct local_table *table, uint64_t fence_before)
{
	const struct local_usage usage = local_count(table);
	const struct local_member *latest = local_next(table, LOCAL_HOLDING, NULL);

	for (const struct local_member *next = latest; next;
	     next = local_next(table, LOCAL_HOLDING, next))
		latest = next;
	if (!latest || !latest->given || latest->fence <= fence_before)
		return;
	MUST(usage.used <= local_capacity(&table->image.head) || usage.used == latest->given ||
	     (local_is_urgent(latest) &&
	      usage.used - latest->given <= local_capacity(&table->image.head)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	static struct local_table table, before;
	struct input input = { data, bytes };
	const int fd = memfd_create("pool", MFD_CLOEXEC);

	MUST(fd >= 0);
	monotonic_ms = 1000000;
	wall_ms = UINT64_C(1700000000000);
	memset(&table, 0, sizeof(table));
	playing = true;
	MUST(local_read(&table, fd, "p") == LOCAL_EMPTY);
	local_clear(&table, "p");
	while (input.left) {
		const uint64_t fence = table.image.head.fence;

		operate(&table, &input);
		MUST(table.image.head.fence >= fence);
		check_capacity(&table, fence);
		MUST(!local_write(&table, fd));
		before = table;
		MUST(local_read(&table, fd, "p") == LOCAL_FOUND);
		check_same(&table, &before);
	}
	playing = false;
	close(fd);
	return 0;
}
