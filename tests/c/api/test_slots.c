/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of every coordinator, tested through the public calls, with the same tests for each. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>
#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LEASE_MS 900u
#define MIB (1ull << 20)

enum { LOCAL, REDIS, COORDINATORS };

static struct redis_server server;
static uint32_t lease_ms = LEASE_MS;
static uint64_t rate; /* rate limit of the job */
static char address[256];
static struct ioshape_context *contexts[16]; /* each is a client of its own */

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static struct ioshape_context *open_context(const char *job, uint32_t slots)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	int ret;

	options.coordinator = address;
	options.pool = "shared";
	options.job = job;
	options.slots = slots;
	options.rate = rate;
	ret = open_context_with(&context, &options, (struct test_rules){ .lease_ms = lease_ms });
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	return context;
}

static struct ioshape_slot *take(struct ioshape_context *context,
				 const struct ioshape_slot_options *given);

static void begin(int which)
{
	scratch_setup();
	if (which == REDIS) {
		redis_server_init(&server);
		redis_server_start(&server);
		snprintf(address, sizeof(address), "unix://%s", server.socket);
	} else {
		snprintf(address, sizeof(address), "local:%s", scratch_directory());
	}
}

static void end(int which)
{
	for (size_t i = 0; i < sizeof(contexts) / sizeof(*contexts); i++) {
		ioshape_context_free(contexts[i]);
		contexts[i] = NULL;
	}
	if (which == REDIS)
		redis_server_free(&server);
	scratch_teardown();
}

/* Opens `count` clients of job "J" in contexts[]. */
static void open_clients(unsigned count, uint32_t slots)
{
	for (unsigned i = 0; i < count; i++)
		contexts[i] = open_context("J", slots);
	/* A new server first serves holders from before. Taking a slot waits for that. */
	ioshape_slot_free(take(contexts[0], NULL));
}

static struct ioshape_slot_options plain(void)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;

	return options;
}

static struct ioshape_slot *take(struct ioshape_context *context,
				 const struct ioshape_slot_options *given)
{
	struct ioshape_slot_options options = given ? *given : plain();
	struct ioshape_slot *slot;
	int ret;

	if (!options.timeout_ms)
		options.timeout_ms = 10000;
	ret = ioshape_slot_acquire(context, &options, &slot);
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	return slot;
}

static int try_to_take(struct ioshape_context *context, uint32_t weight)
{
	struct ioshape_slot_options options = plain();
	struct ioshape_slot *slot;
	int ret;

	options.timeout_ms = -1;
	options.weight = weight;
	ret = ioshape_slot_acquire(context, &options, &slot);
	ioshape_slot_free(slot);
	return ret;
}

/* Checks that no slot is held: a request for more than all slots is granted only then. */
static void must_be_idle(struct ioshape_context *context)
{
	ck_assert_int_eq(try_to_take(context, 1000), 0);
}

static struct ioshape_slot_info info_of(struct ioshape_slot *slot)
{
	struct ioshape_slot_info info = { .size = sizeof(info) };

	ck_assert_int_eq(ioshape_slot_get_info(slot, &info), 0);
	return info;
}

/* A thread that takes a slot, records when, and releases it at once. */
struct visitor {
	struct ioshape_context *context;
	struct ioshape_slot_options options;
	pthread_t thread;
	int ret;
	unsigned place; /* position in the order of grants, from 1 */
	atomic_bool waits;
	struct ioshape_slot_info info;
};

static atomic_uint grants;

static void *visit(void *argument)
{
	struct visitor *visitor = argument;
	struct ioshape_slot *slot;

	visitor->ret = ioshape_slot_acquire(visitor->context, &visitor->options, &slot);
	if (visitor->ret)
		return NULL;
	visitor->place = atomic_fetch_add(&grants, 1) + 1;
	visitor->info = info_of(slot);
	usleep(10000);
	ioshape_slot_free(slot);
	return NULL;
}

static int note_waiting(void *user, const struct ioshape_place *place)
{
	struct visitor *visitor = user;

	(void)place;
	atomic_store(&visitor->waits, true);
	return 0;
}

/* Starts the thread, and returns when its request is queued. */
static void send(struct visitor *visitor, struct ioshape_context *context)
{
	visitor->context = context;
	visitor->options.waiting = note_waiting;
	visitor->options.waiting_user = visitor;
	visitor->options.size = sizeof(visitor->options);
	if (!visitor->options.timeout_ms)
		visitor->options.timeout_ms = 10000;
	ck_assert_int_eq(pthread_create(&visitor->thread, NULL, visit, visitor), 0);
	for (int tries = 0; tries < 500 && !atomic_load(&visitor->waits); tries++)
		usleep(10000);
	ck_assert(atomic_load(&visitor->waits));
}

static void await(struct visitor *visitor)
{
	pthread_join(visitor->thread, NULL);
	ck_assert_int_eq(visitor->ret, 0);
}

/* Separate cases, because meson.build runs the coordinators in parallel. */
static struct test_case local = { .name = "local" };
static struct test_case redis = { .name = "redis", .tags = "redis" };

/* Defines a test for both coordinators. */
#define EACH(name)                                                                                 \
	static void name(int _i);                                                                  \
	CHECK_ADD(local, name, LOCAL, LOCAL + 1)                                                   \
	CHECK_ADD(redis, name, REDIS, REDIS + 1)                                                   \
	static void name(int _i)

/* ---- Slots ----------------------------------------------------------------------------------- */

EACH(no_more_hold_than_there_are_slots)
{
	struct ioshape_slot *first, *second;

	begin(_i);
	open_clients(3, 2);
	first = take(contexts[0], NULL);
	second = take(contexts[1], NULL);
	ck_assert_int_eq(try_to_take(contexts[2], 1), -EAGAIN);
	ck_assert_uint_eq(info_of(first).capacity, 2);
	ioshape_slot_free(first);
	ck_assert_int_eq(try_to_take(contexts[2], 1), 0);
	ioshape_slot_free(second);
	end(_i);
}

EACH(requests_of_a_job_are_served_in_their_order)
{
	struct visitor visitors[5] = { 0 };
	struct ioshape_slot *slot;

	begin(_i);
	open_clients(6, 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	for (unsigned i = 0; i < 5; i++)
		send(&visitors[i], contexts[i + 1]);
	ioshape_slot_free(slot);
	for (unsigned i = 0; i < 5; i++)
		await(&visitors[i]);
	for (unsigned i = 0; i < 5; i++) {
		ck_assert_uint_eq(visitors[i].place, i + 1);
		ck_assert_uint_eq(visitors[i].info.position, i + 1);
		ck_assert_ptr_nonnull(strstr(visitors[i].info.ahead, "job J, rank 0"));
		if (i)
			ck_assert_uint_gt(visitors[i].info.fence, visitors[i - 1].info.fence);
	}
	end(_i);
}

TEST(redis, a_job_with_few_writers_does_not_wait_behind_all_of_one_with_many)
{
	/* As much as a turn of a job, or more. */
	const uint64_t bytes = UINT64_C(64) << 30;
	struct visitor many[6] = { 0 }, few = { .options.expected_bytes = bytes };
	struct ioshape_slot *slot;

	begin(REDIS);
	open_clients(8, 1);
	contexts[8] = open_context("K", 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	for (unsigned i = 0; i < 6; i++) {
		many[i].options.expected_bytes = bytes;
		send(&many[i], contexts[i + 1]);
	}
	send(&few, contexts[8]);
	ioshape_slot_free(slot);
	for (unsigned i = 0; i < 6; i++)
		await(&many[i]);
	await(&few);
	ck_assert_uint_le(few.place, 3);
	end(REDIS);
}

EACH(requests_take_as_many_slots_as_they_weigh)
{
	struct ioshape_slot_options heavy = plain(), oversized = plain();
	struct ioshape_slot *slot;

	begin(_i);
	open_clients(3, 4);
	heavy.weight = 3;
	slot = take(contexts[0], &heavy);
	ck_assert_int_eq(try_to_take(contexts[1], 2), -EAGAIN);
	ck_assert_int_eq(try_to_take(contexts[1], 1), 0);
	ioshape_slot_free(slot);
	/* A request for more than all slots is granted when no other is held. */
	oversized.weight = 9;
	slot = take(contexts[0], &oversized);
	ck_assert_int_eq(try_to_take(contexts[1], 1), -EAGAIN);
	ioshape_slot_free(slot);
	end(_i);
}

EACH(a_heavy_request_is_not_overtaken_by_light_ones)
{
	struct visitor heavy = { .options = { .weight = 2 } }, light = { 0 };
	struct ioshape_slot *first, *second;

	begin(_i);
	open_clients(4, 2);
	grants = 0;
	first = take(contexts[0], NULL);
	second = take(contexts[1], NULL);
	send(&heavy, contexts[2]);
	send(&light, contexts[3]);
	ioshape_slot_free(first);
	usleep(200000);
	ck_assert_uint_eq(grants, 0);
	ioshape_slot_free(second);
	await(&heavy);
	await(&light);
	ck_assert_uint_eq(heavy.place, 1);
	end(_i);
}

EACH(a_small_request_passes_the_queue)
{
	struct visitor large = { .options = { .expected_bytes = 1ull << 40 } };
	struct visitor tiny = { .options = { .expected_bytes = 100000 } };
	struct ioshape_slot_options huge = plain();
	struct ioshape_slot *slot;

	begin(_i);
	open_clients(3, 1);
	grants = 0;
	huge.expected_bytes = 1ull << 40;
	slot = take(contexts[0], &huge);
	send(&large, contexts[1]);
	tiny.context = contexts[2];
	tiny.options.size = sizeof(tiny.options);
	ck_assert_int_eq(pthread_create(&tiny.thread, NULL, visit, &tiny), 0);
	await(&tiny);
	ck_assert_uint_eq(tiny.place, 1);
	ck_assert_uint_eq(tiny.info.bypass, 1);
	ioshape_slot_free(slot);
	await(&large);
	ck_assert_uint_eq(large.info.bypass, 0);
	end(_i);
}

EACH(waiting_ends_with_the_time_out_and_leaves_no_trace)
{
	struct ioshape_slot_options options = plain();
	struct ioshape_slot *slot, *none;
	double begin_s;

	begin(_i);
	open_clients(2, 1);
	slot = take(contexts[0], NULL);
	options.timeout_ms = 250;
	begin_s = now_s();
	ck_assert_int_eq(ioshape_slot_acquire(contexts[1], &options, &none), -ETIMEDOUT);
	ck_assert_ptr_null(none);
	ck_assert_double_ge(now_s() - begin_s, 0.25);
	ioshape_slot_free(slot);
	ck_assert_int_eq(try_to_take(contexts[0], 1), 0);
	end(_i);
}

EACH(two_pools_are_two_queues)
{
	struct ioshape_slot_options other = plain();
	struct ioshape_slot *first, *second;

	begin(_i);
	open_clients(2, 1);
	first = take(contexts[0], NULL);
	other.pool = "other";
	second = take(contexts[0], &other);
	ck_assert_str_eq(info_of(first).pool, "shared");
	ck_assert_str_eq(info_of(second).pool, "other");
	ioshape_slot_free(first);
	ioshape_slot_free(second);
	end(_i);
}

/* ---- Deadlines ------------------------------------------------------------------------------- */

static const int64_t long_ms = 600000; /* no request of these tests reaches its deadline */

static struct ioshape_slot_options urgent(void)
{
	struct ioshape_slot_options options = plain();

	options.deadline_ms = long_ms;
	return options;
}

static int try_urgently(struct ioshape_context *context)
{
	struct ioshape_slot_options options = urgent();
	struct ioshape_slot *slot;
	int ret;

	options.timeout_ms = -1;
	ret = ioshape_slot_acquire(context, &options, &slot);
	ioshape_slot_free(slot);
	return ret;
}

EACH(a_deadline_is_next_of_many_though_the_slot_is_held)
{
	const struct ioshape_slot_options hurried = urgent();
	struct visitor visitors[8] = { 0 };
	struct ioshape_slot *slot, *first;

	begin(_i);
	open_clients(10, 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	for (unsigned i = 0; i < 8; i++)
		send(&visitors[i], contexts[i + 1]);
	first = take(contexts[9], &hurried);
	ck_assert_uint_eq(grants, 0);
	ck_assert_uint_gt(info_of(first).fence, info_of(slot).fence);
	ck_assert_uint_eq(info_of(first).capacity, 1);
	/*
	 * It holds a slot in advance, so the slot that becomes free is not granted to another
	 * request.
	 */
	ioshape_slot_free(slot);
	usleep(200000);
	ck_assert_uint_eq(grants, 0);
	ioshape_slot_free(first);
	for (unsigned i = 0; i < 8; i++) {
		await(&visitors[i]);
		ck_assert_uint_eq(visitors[i].place, i + 1);
	}
	end(_i);
}

EACH(a_second_deadline_waits_for_the_first_and_is_next_then)
{
	const struct ioshape_slot_options hurried = urgent();
	struct visitor plain_one = { 0 }, second = { .options = hurried };
	struct ioshape_slot *slot, *first;

	begin(_i);
	open_clients(4, 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	first = take(contexts[1], &hurried);
	send(&plain_one, contexts[2]);
	send(&second, contexts[3]);
	ck_assert_int_eq(try_urgently(contexts[1]), -EAGAIN);
	ck_assert_uint_eq(grants, 0);
	ioshape_slot_free(first);
	await(&second);
	ck_assert_uint_eq(second.place, 1);
	ck_assert_uint_eq(second.info.position, 1);
	ioshape_slot_free(slot);
	await(&plain_one);
	end(_i);
}

EACH(many_with_deadlines_are_served_in_their_order_and_leave_nothing_behind)
{
	struct visitor visitors[6] = { 0 };
	struct ioshape_slot *slot;

	begin(_i);
	open_clients(7, 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	for (unsigned i = 0; i < 6; i++) {
		visitors[i].options = i ? urgent() : plain();
		visitors[i].context = contexts[i + 1];
		visitors[i].options.timeout_ms = 10000;
		ck_assert_int_eq(pthread_create(&visitors[i].thread, NULL, visit, &visitors[i]), 0);
	}
	for (unsigned i = 1; i < 6; i++)
		await(&visitors[i]);
	ck_assert_uint_eq(grants, 5);
	ioshape_slot_free(slot);
	await(&visitors[0]);
	must_be_idle(contexts[0]);
	end(_i);
}

/* ---- Leases ---------------------------------------------------------------------------------- */

EACH(a_slot_is_kept_for_longer_than_a_lease)
{
	struct ioshape_slot *slot;

	begin(_i);
	open_clients(2, 1);
	slot = take(contexts[0], NULL);
	usleep(LEASE_MS * 2500);
	ck_assert_int_eq(try_to_take(contexts[1], 1), -EAGAIN);
	ck_assert_uint_eq(info_of(slot).lost, 0);
	ioshape_slot_free(slot);
	end(_i);
}

/*
 * Starts a process that takes a slot, reports it, and holds it. To be called before this process
 * has threads: sanitizers are unreliable in a child of a threaded process.
 */
static pid_t start_holder(int64_t deadline_ms)
{
	int said[2];
	char byte;
	pid_t pid;

	ck_assert_int_eq(pipe(said), 0);
	pid = fork();
	if (!pid) {
		struct ioshape_context *context = open_context("J", 1);
		struct ioshape_slot *slot;
		struct ioshape_slot_options options = plain();
		int ret;

		options.deadline_ms = deadline_ms;
		ret = ioshape_slot_acquire(context, &options, &slot);
		ret = ret || write(said[1], "h", 1) != 1;
		while (!ret)
			pause();
		scratch_leave_child(1);
	}
	close(said[1]);
	ck_assert_int_eq(read(said[0], &byte, 1), 1);
	close(said[0]);
	return pid;
}

EACH(the_slot_of_a_killed_process_goes_to_the_next)
{
	struct ioshape_slot *slot;
	pid_t holder;

	begin(_i);
	holder = start_holder(0);
	contexts[0] = open_context("J", 1);
	ck_assert_int_eq(try_to_take(contexts[0], 1), -EAGAIN);
	kill(holder, SIGKILL);
	waitpid(holder, NULL, 0);
	slot = take(contexts[0], NULL);
	ioshape_slot_free(slot);
	end(_i);
}

EACH(the_place_beside_the_slots_of_a_killed_process_goes_to_the_next)
{
	const struct ioshape_slot_options hurried = urgent();
	pid_t holder, beside;

	begin(_i);
	holder = start_holder(0);
	beside = start_holder(long_ms);
	contexts[0] = open_context("J", 1);
	ck_assert_int_eq(try_urgently(contexts[0]), -EAGAIN);
	kill(beside, SIGKILL);
	waitpid(beside, NULL, 0);
	ioshape_slot_free(take(contexts[0], &hurried));
	ck_assert_int_eq(try_to_take(contexts[0], 1), -EAGAIN);
	kill(holder, SIGKILL);
	waitpid(holder, NULL, 0);
	end(_i);
}

EACH(the_slot_of_a_stopped_process_goes_to_the_next_when_its_lease_is_over)
{
	struct ioshape_slot *slot;
	pid_t holder;

	begin(_i);
	holder = start_holder(0);
	contexts[0] = open_context("J", 1);
	kill(holder, SIGSTOP);
	slot = take(contexts[0], NULL);
	/* After it continues, it does not get the slot back. */
	kill(holder, SIGCONT);
	usleep(LEASE_MS * 1000);
	ck_assert_uint_eq(info_of(slot).lost, 0);
	ioshape_slot_free(slot);
	kill(holder, SIGKILL);
	waitpid(holder, NULL, 0);
	end(_i);
}

/* ---- Bandwidth ------------------------------------------------------------------------------- */

TEST(redis, processes_of_a_job_share_its_bandwidth)
{
	struct ioshape_slot *first, *second;
	double begin_s;

	begin(REDIS);
	rate = 20000000;
	open_clients(2, 2);
	first = take(contexts[0], NULL);
	second = take(contexts[1], NULL);
	begin_s = now_s();
	for (int i = 0; i < 20; i++) {
		ioshape_slot_pace(first, 500000);
		ioshape_slot_pace(second, 500000);
	}
	/* 20 MB at 20 MB/s, less the initial burst. */
	ck_assert_double_ge(now_s() - begin_s, 0.7);
	ioshape_slot_free(first);
	ioshape_slot_free(second);
	rate = 0;
	end(REDIS);
}

/* ---- Many clients ---------------------------------------------------------------------------- */

/*
 * Takes and releases many slots. The pipe contains a byte for each slot. A holder reads a byte and
 * writes it back; if there is none, too many slots are granted.
 */
static int take_many_slots(int count, const int tokens[2])
{
	struct ioshape_context *context;
	int ret = 0;

	/* A long lease, so that no process is taken for dead on a busy machine. */
	lease_ms = 20 * LEASE_MS;
	context = open_context("J", 2);

	for (int i = 0; i < count && !ret; i++) {
		struct ioshape_slot_options options = plain();
		struct ioshape_slot *slot;
		char byte;

		options.timeout_ms = 20000;
		if (ioshape_slot_acquire(context, &options, &slot))
			return 1;
		if (read(tokens[0], &byte, 1) != 1)
			ret = 2;
		usleep(1000);
		if (!ret && write(tokens[1], &byte, 1) != 1)
			ret = 3;
		ioshape_slot_free(slot);
	}
	ioshape_context_free(context);
	return ret;
}

EACH(processes_at_full_speed_never_exceed_the_capacity)
{
	enum { PROCESSES = 8, GRANTS = 25 };
	int tokens[2], failed = 0;
	pid_t pids[PROCESSES];

	begin(_i);
	ck_assert_int_eq(pipe2(tokens, O_NONBLOCK), 0);
	ck_assert_int_eq(write(tokens[1], "xx", 2), 2);
	for (int i = 0; i < PROCESSES; i++) {
		pids[i] = fork();
		if (!pids[i])
			scratch_leave_child(take_many_slots(GRANTS, tokens));
	}
	open_clients(1, 2);
	for (int i = 0; i < PROCESSES; i++) {
		int ended;

		ck_assert_int_eq(waitpid(pids[i], &ended, 0), pids[i]);
		failed += !WIFEXITED(ended) || WEXITSTATUS(ended);
	}
	ck_assert_int_eq(failed, 0);
	must_be_idle(contexts[0]);
	close(tokens[0]);
	close(tokens[1]);
	end(_i);
}
