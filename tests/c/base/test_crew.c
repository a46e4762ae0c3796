/* SPDX-License-Identifier: Apache-2.0 */
/* Helper threads, and copies by them. */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/check_main.h"
#include "support/random.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define HELPERS 4u
#define JOBS 2000

static struct base_crew crew;
static _Atomic unsigned calls, working;
static _Atomic bool hold;

/* Wraps pthread_create(): a thread takes a while to start if the flag is set. */
static _Atomic bool start_slowly, starting;
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument)
{
	int ret;

	starting = true;
	if (start_slowly)
		usleep(300000);
	ret = __real_pthread_create(thread, attributes, run, argument);
	starting = false;
	return ret;
}

/* ThreadSanitizer counts cores before it can be told of memory accesses. */
#ifdef __clang__
#define UNSEEN __attribute__((disable_sanitizer_instrumentation))
#else
#define UNSEEN
#endif

/* Wraps calls that count cores: the host has so many if the number is not 0. */
static unsigned cores;
long __real_sysconf(int name);
long __wrap_sysconf(int name);
UNSEEN long __wrap_sysconf(int name)
{
	return cores && name == _SC_NPROCESSORS_ONLN ? (long)cores : __real_sysconf(name);
}

int __real_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set);
int __wrap_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set);
UNSEEN int __wrap_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set)
{
	if (!cores)
		return __real_sched_getaffinity(process, bytes, set);
	CPU_ZERO_S(bytes, set);
	for (unsigned i = 0; i < cores; i++)
		CPU_SET_S(i, bytes, set);
	return 0;
}

static void set_up(void)
{
	base_crew_init(&crew, 0);
	calls = working = cores = 0;
	hold = start_slowly = starting = false;
}

static void clean_up(void)
{
	base_crew_dismiss(&crew);
}

static struct test_case tests = { .name = "Crew", .setup = set_up, .teardown = clean_up };

static void work(void *user)
{
	ck_assert_ptr_eq(user, &crew);
	working++;
	calls++;
	while (hold)
		usleep(1000);
	working--;
}

static void wait_for_calls(unsigned wanted)
{
	while (calls < wanted)
		usleep(100);
}

TEST(tests, each_helper_is_called_once)
{
	base_crew_begin(&crew, HELPERS, work, &crew);
	wait_for_calls(HELPERS);
	base_crew_finish(&crew);
	ck_assert_uint_eq(calls, HELPERS);
}

/* Helpers that look for work before they sleep are called as often as others. */
TEST(tests, each_helper_that_looks_for_work_is_called_once)
{
	base_crew_dismiss(&crew);
	base_crew_init(&crew, 200000);
	for (unsigned job = 1; job <= 100; job++) {
		base_crew_begin(&crew, HELPERS, work, &crew);
		/* In some rounds all helpers sleep, in others none. */
		if (job % 10 == 0)
			usleep(2000);
		wait_for_calls(job * HELPERS);
		base_crew_finish(&crew);
		ck_assert_uint_eq(working, 0);
	}
	ck_assert_uint_eq(calls, 100 * HELPERS);
}

TEST(tests, who_has_begun_has_ended_and_nobody_begins_any_more)
{
	for (unsigned job = 0; job < JOBS; job++) {
		unsigned before = calls;

		base_crew_begin(&crew, job % (HELPERS + 1), work, &crew);
		base_crew_finish(&crew);
		ck_assert_uint_eq(working, 0);
		ck_assert_uint_le(calls, before + job % (HELPERS + 1));
		before = calls;
		usleep(job % 10 ? 0 : 200);
		ck_assert_uint_eq(calls, before);
	}
	ck_assert_uint_eq(crew.started, HELPERS);
}

TEST(tests, who_works_is_waited_for)
{
	hold = true;
	base_crew_begin(&crew, 1, work, &crew);
	wait_for_calls(1);
	ck_assert_uint_eq(working, 1);
	hold = false;
	base_crew_finish(&crew);
	ck_assert_uint_eq(working, 0);
}

TEST(tests, a_child_has_no_helpers)
{
	int status;
	pid_t child;

	base_crew_begin(&crew, HELPERS, work, &crew);
	wait_for_calls(HELPERS);
	base_crew_finish(&crew);
	child = fork();
	if (!child) {
		base_crew_dismiss(&crew); /* would wait forever */
		_exit(7);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

static void *begin(void *argument)
{
	base_crew_begin(&crew, 1, work, &crew);
	return argument;
}

TEST(tests, no_child_is_made_while_a_thread_starts)
{
	bool starting_then;
	pthread_t beginner;
	int status;
	pid_t child;

	start_slowly = true;
	ck_assert_int_eq(__real_pthread_create(&beginner, NULL, begin, NULL), 0);
	while (!starting)
		usleep(1000);
	child = fork();
	if (!child) {
		starting_then = starting;
		base_crew_init(&crew, 0);
		begin(NULL); /* starts a thread, too */
		_exit(starting_then ? 8 : 7);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
	pthread_join(beginner, NULL);
	base_crew_finish(&crew);
}

TEST(tests, copies_are_the_same)
{
	static const size_t lengths[] = {
		0, 1, 100, 1 * MIB - 1, 1 * MIB, 1 * MIB + 13, 5 * MIB + 4097
	};
	const size_t most = 6 * MIB;
	struct base_copier *copier = base_copier_open();
	uint8_t *from = malloc(most), *to = malloc(most);
	uint64_t state = 3;

	ck_assert_ptr_nonnull(copier);
	test_random_fill(&state, from, most);
	for (size_t i = 0; i < 2 * ARRAY_LENGTH(lengths); i++) {
		const size_t bytes = lengths[i / 2];

		memset(to, 0x5a, most);
		base_copier_copy(i % 2 ? copier : NULL, to + 1, from + i, bytes);
		ck_assert_mem_eq(to + 1, from + i, bytes);
		ck_assert_uint_eq(to[0], 0x5a);
		ck_assert_uint_eq(to[1 + bytes], 0x5a);
	}
	base_copier_free(copier);
	base_copier_free(NULL);
	free(from);
	free(to);
}

TEST(tests, ranks_share_the_cores_of_their_host)
{
	static const struct {
		unsigned cores;
		const char *ranks;
		unsigned threads;
	} hosts[] = { { 8, "1", 8 }, { 8, "4", 2 }, { 2, "8", 1 }, { 96, "8", 8 } };

	for (size_t i = 0; i < ARRAY_LENGTH(hosts); i++) {
		cores = hosts[i].cores;
		setenv("RANK", "0", 1);
		setenv("LOCAL_RANK", "0", 1);
		setenv("WORLD_SIZE", hosts[i].ranks, 1);
		setenv("LOCAL_WORLD_SIZE", hosts[i].ranks, 1);
		ck_assert_uint_eq(base_copy_threads(), hosts[i].threads);
	}
}
