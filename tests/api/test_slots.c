/* SPDX-License-Identifier: Apache-2.0 */
/* What every coordinator has to do, through the public calls: the same tests for each of them. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>
#include <ioshape/operator.h>

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
	options.lease_ms = lease_ms;
	ret = ioshape_context_open(&context, &options);
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

/* `count` clients of job "J", in contexts[]. */
static void open_clients(unsigned count, uint32_t slots)
{
	for (unsigned i = 0; i < count; i++)
		contexts[i] = open_context("J", slots);
	/* A server that was just started first lets those in that held slots before. */
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

static struct ioshape_slot_info info_of(struct ioshape_slot *slot)
{
	struct ioshape_slot_info info = { .size = sizeof(info) };

	ck_assert_int_eq(ioshape_slot_get_info(slot, &info), 0);
	return info;
}

static struct ioshape_pool_status *status_of(struct ioshape_context *context)
{
	struct ioshape_pool_status *status;
	int ret = ioshape_pool_get_status(context, NULL, &status);

	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	return status;
}

static void set_capacity(struct ioshape_context *context, uint32_t capacity)
{
	struct ioshape_pool_settings settings = IOSHAPE_POOL_SETTINGS_INIT;

	settings.capacity = capacity;
	ck_assert_int_eq(ioshape_pool_set(context, NULL, &settings), 0);
}

/* A thread that takes a slot, notes when, and gives it back at once. */
struct visitor {
	struct ioshape_context *context;
	struct ioshape_slot_options options;
	pthread_t thread;
	int ret;
	unsigned place; /* from 1 on, in the order of the grants */
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

static void wait_until_waiting(size_t count)
{
	for (int tries = 0; tries < 500; tries++) {
		struct ioshape_pool_status *status = status_of(contexts[0]);
		size_t waiting = status->waiter_count;

		ioshape_pool_status_free(status);
		if (waiting == count)
			return;
		usleep(10000);
	}
	ck_abort_msg("there are not %zu waiters", count);
}

/* Returns when it stands in the queue, as the last of `position`. */
static void send(struct visitor *visitor, struct ioshape_context *context, size_t position)
{
	visitor->context = context;
	visitor->options.size = sizeof(visitor->options);
	if (!visitor->options.timeout_ms)
		visitor->options.timeout_ms = 10000;
	ck_assert_int_eq(pthread_create(&visitor->thread, NULL, visit, visitor), 0);
	wait_until_waiting(position);
}

static void await(struct visitor *visitor)
{
	pthread_join(visitor->thread, NULL);
	ck_assert_int_eq(visitor->ret, 0);
}

/* One that a coordinator of its own is kept for: meson.build runs them side by side. */
static struct test_case local = { .name = "local" };
static struct test_case redis = { .name = "redis", .tags = "redis" };

/* A test for both. */
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
		send(&visitors[i], contexts[i + 1], i + 1);
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
	/* As much as a turn of a job, and more. */
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
		send(&many[i], contexts[i + 1], i + 1);
	}
	send(&few, contexts[8], 7);
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
	/* More than there is comes in alone. */
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
	send(&heavy, contexts[2], 1);
	send(&light, contexts[3], 2);
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
	send(&large, contexts[1], 1);
	tiny.context = contexts[2];
	tiny.options.size = sizeof(tiny.options);
	ck_assert_int_eq(pthread_create(&tiny.thread, NULL, visit, &tiny), 0);
	await(&tiny);
	ck_assert_uint_eq(tiny.place, 1);
	ck_assert_uint_eq(tiny.info.express, 1);
	ioshape_slot_free(slot);
	await(&large);
	ck_assert_uint_eq(large.info.express, 0);
	end(_i);
}

EACH(waiting_ends_with_the_time_out_and_leaves_no_trace)
{
	struct ioshape_slot_options options = plain();
	struct ioshape_pool_status *status;
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
	status = status_of(contexts[0]);
	ck_assert_uint_eq(status->waiter_count, 0);
	ck_assert_uint_eq(status->holder_count, 1);
	ioshape_pool_status_free(status);
	ioshape_slot_free(slot);
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

static const int64_t long_ms = 600000; /* nobody goes ahead without a slot in a test */

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
	struct ioshape_pool_status *status;
	struct ioshape_slot *slot, *first;

	begin(_i);
	open_clients(10, 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	for (unsigned i = 0; i < 8; i++)
		send(&visitors[i], contexts[i + 1], i + 1);
	first = take(contexts[9], &hurried);
	ck_assert_uint_eq(grants, 0);
	ck_assert_uint_gt(info_of(first).fence, info_of(slot).fence);
	status = status_of(contexts[0]);
	ck_assert_uint_eq(status->used, 2);
	ck_assert_uint_eq(status->capacity, 1);
	ck_assert_uint_eq(status->holders[0].urgent, 0);
	ck_assert_uint_eq(status->holders[1].urgent, 1);
	ck_assert_uint_eq(status->waiters[0].urgent, 0);
	ioshape_pool_status_free(status);
	/* It has taken a slot in advance: the one that comes free is not given to anybody. */
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
	send(&plain_one, contexts[2], 1);
	send(&second, contexts[3], 2);
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
	struct ioshape_pool_status *status;
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
	status = status_of(contexts[0]);
	ck_assert_uint_eq(status->used + status->waiter_count, 0);
	ioshape_pool_status_free(status);
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

/* Takes a slot in a process of its own, says so, and holds it. Before this process has threads: the
 * sanitizers cannot be relied on in a child that was forked beside one. */
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
	/* When it wakes up it does not get it back. */
	kill(holder, SIGCONT);
	usleep(LEASE_MS * 1000);
	ck_assert_uint_eq(info_of(slot).lost, 0);
	ioshape_slot_free(slot);
	kill(holder, SIGKILL);
	waitpid(holder, NULL, 0);
	end(_i);
}

static atomic_uint losses;

static void count_loss(void *user, const char *why)
{
	(void)user, (void)why;
	losses++;
}

TEST(redis, a_kicked_holder_hears_of_it)
{
	struct ioshape_slot_options options = plain();
	struct ioshape_pool_status *status;
	struct ioshape_slot *slot, *next;

	begin(REDIS);
	open_clients(2, 1);
	losses = 0;
	options.lost = count_loss;
	slot = take(contexts[0], &options);
	status = status_of(contexts[1]);
	ck_assert_uint_eq(status->holder_count, 1);
	ck_assert_int_eq(ioshape_pool_kick(contexts[1], NULL, status->holders[0].id), 0);
	ck_assert_int_eq(ioshape_pool_kick(contexts[1], NULL, status->holders[0].id), -ENOENT);
	ioshape_pool_status_free(status);
	next = take(contexts[1], NULL);
	for (int tries = 0; tries < 200 && !losses; tries++)
		usleep(10000);
	ck_assert_uint_eq(losses, 1);
	ck_assert_uint_eq(info_of(slot).lost, 1);
	ioshape_slot_free(slot);
	ck_assert_uint_eq(info_of(next).lost, 0);
	ioshape_slot_free(next);
	end(REDIS);
}

/* ---- The operator ---------------------------------------------------------------------------- */

/* The kernel keeps slots for their processes. */
TEST(local, no_slot_is_kicked_away_and_the_error_says_what_to_do)
{
	struct ioshape_pool_status *status;
	struct ioshape_slot *slot;

	begin(LOCAL);
	open_clients(2, 1);
	slot = take(contexts[0], NULL);
	status = status_of(contexts[1]);
	ck_assert_uint_eq(status->holders[0].pid, (uint32_t)getpid());
	ck_assert_int_eq(ioshape_pool_kick(contexts[1], NULL, status->holders[0].id), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->remedy, "process"));
	ck_assert_uint_eq(info_of(slot).lost, 0);
	ioshape_pool_status_free(status);
	ioshape_slot_free(slot);
	end(LOCAL);
}

EACH(what_the_operator_sets_wins_at_once)
{
	struct ioshape_pool_settings clear = IOSHAPE_POOL_SETTINGS_INIT;
	struct visitor visitor = { 0 };
	struct ioshape_slot *slot;

	begin(_i);
	open_clients(2, 1);
	grants = 0;
	slot = take(contexts[0], NULL);
	send(&visitor, contexts[1], 1);
	set_capacity(contexts[0], 2);
	await(&visitor);
	ck_assert_uint_eq(visitor.place, 1);
	ck_assert_int_eq(try_to_take(contexts[1], 1), 0);
	clear.clear = 1;
	ck_assert_int_eq(ioshape_pool_set(contexts[1], NULL, &clear), 0);
	ck_assert_int_eq(try_to_take(contexts[1], 1), -EAGAIN);
	ioshape_slot_free(slot);
	end(_i);
}

TEST(local, settings_beyond_all_measure_are_refused)
{
	struct ioshape_pool_settings settings[4];

	begin(LOCAL);
	contexts[0] = open_context("J", 1);
	for (size_t i = 0; i < 4; i++)
		settings[i] = (struct ioshape_pool_settings)IOSHAPE_POOL_SETTINGS_INIT;
	settings[0].express = 65537;
	settings[1].pool_bytes_per_s = (UINT64_C(1) << 53) + 1;
	settings[2].job_bytes_per_s = UINT64_MAX;
	settings[3].small_bytes = UINT64_MAX;
	for (size_t i = 0; i < 4; i++)
		ck_assert_int_eq(ioshape_pool_set(contexts[0], "p", &settings[i]), -EINVAL);
	settings[1].pool_bytes_per_s--;
	ck_assert_int_eq(ioshape_pool_set(contexts[0], "p", &settings[1]), -ENOTSUP);
	end(LOCAL);
}

TEST(local, settings_that_do_not_go_together_are_refused)
{
	struct ioshape_pool_settings settings[5];

	begin(LOCAL);
	contexts[0] = open_context("J", 1);
	for (size_t i = 0; i < 5; i++)
		settings[i] = (struct ioshape_pool_settings)IOSHAPE_POOL_SETTINGS_INIT;
	settings[0].share = 50;
	settings[1].job = settings[1].user = "name";
	settings[2].job = "name";
	settings[2].capacity = 1;
	settings[3].user = "";
	settings[4].job = "name";
	settings[4].share = 1000001;
	for (size_t i = 0; i < 5; i++)
		ck_assert_int_eq(ioshape_pool_set(contexts[0], "p", &settings[i]), -EINVAL);
	settings[4].share = 50;
	ck_assert_int_eq(ioshape_pool_set(contexts[0], "p", &settings[4]), -ENOTSUP);
	end(LOCAL);
}

EACH(a_pool_that_was_only_set_is_known)
{
	struct ioshape_pool_settings settings = IOSHAPE_POOL_SETTINGS_INIT;
	char *names;

	begin(_i);
	contexts[0] = open_context("J", 1);
	settings.capacity = 7;
	ck_assert_int_eq(ioshape_pool_set(contexts[0], "only-set", &settings), 0);
	ck_assert_int_eq(ioshape_pool_list(contexts[0], &names), 0);
	ck_assert_ptr_nonnull(strstr(names, "only-set\n"));
	ioshape_free(names);
	ck_assert_int_eq(ioshape_pool_set(contexts[0], "", &settings), -EINVAL);
	end(_i);
}

TEST(redis, bandwidth_is_shared_by_who_writes)
{
	struct ioshape_pool_settings settings = IOSHAPE_POOL_SETTINGS_INIT;
	struct ioshape_slot *first, *second;
	double begin_s;

	begin(REDIS);
	open_clients(2, 2);
	settings.pool_bytes_per_s = 20000000;
	ck_assert_int_eq(ioshape_pool_set(contexts[0], NULL, &settings), 0);
	first = take(contexts[0], NULL);
	second = take(contexts[1], NULL);
	begin_s = now_s();
	for (int i = 0; i < 20; i++) {
		ioshape_slot_pace(first, 500000);
		ioshape_slot_pace(second, 500000);
	}
	/* 20 MB at 20 MB/s. */
	ck_assert_double_ge(now_s() - begin_s, 0.7);
	ioshape_slot_free(first);
	ioshape_slot_free(second);
	end(REDIS);
}

/* ---- Many ------------------------------------------------------------------------------------ */

/* Who holds a slot takes a byte out of a pipe that has as many as there are slots: if there is none
 * left, he is one too many. */
static int take_many_slots(int count, const int tokens[2])
{
	struct ioshape_context *context;
	int ret = 0;

	/* On a machine that has much else to do none of them shall be taken for dead. */
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
	struct ioshape_pool_status *status;
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
	status = status_of(contexts[0]);
	ck_assert_uint_eq(status->used, 0);
	if (_i == REDIS)
		ck_assert_uint_eq(status->grants, PROCESSES * GRANTS + 1);
	ioshape_pool_status_free(status);
	close(tokens[0]);
	close(tokens[1]);
	end(_i);
}

int main(void)
{
	return check_run("slots");
}
