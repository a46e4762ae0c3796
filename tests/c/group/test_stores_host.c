/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store in the shared memory of a host: processes that end, dead jobs, and memory that cannot
 * be used.
 */
#define _GNU_SOURCE
#include "group/store.h"
#include "io/io.h"
#include "support/check_main.h"
#include "support/store_case.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

static struct store_case stores;
static struct store *of[8];
static char memory[300], folder[512], beside[512];

static void setup(void)
{
	scratch_setup();
	store_case_begin(&stores, 0, 8);
	ck_assert_str_eq(stores.ops->id, "host");
	snprintf(memory, sizeof(memory), "%s", scratch_path("memory"));
	ck_assert(!mkdir(memory, 0755));
	stores.memory = memory;
	snprintf(folder, sizeof(folder), "%s/ioshape-%u/store-%s", memory, (unsigned)geteuid(),
		 stores.name);
	snprintf(beside, sizeof(beside), "%s/.ioshape-store-%s", scratch_directory(), stores.name);
}

static void open_ranks(uint32_t first, uint32_t last)
{
	for (uint32_t i = first; i <= last; i++)
		of[i] = store_case_open(&stores, i);
}

static void close_all(void)
{
	for (uint32_t i = ARRAY_LENGTH(of); i-- > 0;) {
		if (of[i])
			store_close(of[i]);
		of[i] = NULL;
	}
	ck_assert(access(folder, F_OK));
	ck_assert(access(beside, F_OK));
}

static bool exists(const char *path)
{
	return !access(path, F_OK);
}

static void wait_until_gone(struct store *store, uint32_t rank)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(20000);

	while (!store_has_ended(store, rank)) {
		ck_assert_uint_lt(base_now_ns(), end);
		store_wait(store, 1000);
	}
}

/* ---- Ends of processes ----------------------------------------------------------------------- */

/*
 * Starts a process with a store, and a child of that process that outlives it. Its message says
 * that both are running.
 */
static pid_t start_process(uint32_t rank, pid_t *orphan)
{
	int pipes[2];
	pid_t pid;

	ck_assert(!pipe(pipes));
	pid = fork();
	if (!pid) {
		struct store *store = store_case_open(&stores, rank);
		pid_t child = fork();

		if (!child) {
			alarm(30);
			pause();
			_exit(0);
		}
		/* Lets the child return from fork() before it is reported. */
		usleep(50000);
		store_case_put_own(store, "s1", "hello", rank);
		MUST(write(pipes[1], &child, sizeof(child)) == sizeof(child), "no pipe");
		alarm(30);
		for (;;)
			pause();
	}
	ck_assert_int_eq(read(pipes[0], orphan, sizeof(*orphan)), sizeof(*orphan));
	close(pipes[0]);
	close(pipes[1]);
	return pid;
}

static void kill_now(pid_t pid)
{
	int status;

	kill(pid, SIGKILL);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
}

static struct test_case tests = { .name = "host", .setup = setup, .teardown = scratch_teardown };

TEST(tests, test_all_see_that_a_rank_was_killed)
{
	pid_t orphan, pid;

	open_ranks(0, 2);
	pid = start_process(3, &orphan);
	for (uint32_t i = 0; i < 3; i++)
		ck_assert(!store_has_ended(of[i], 3));
	kill_now(pid);
	for (uint32_t i = 0; i < 3; i++) {
		wait_until_gone(of[i], 3);
		ck_assert(!store_has_ended(of[i], 0));
		ck_assert(!store_has_ended(of[i], 1));
		/* This rank has not come yet. */
		ck_assert(!store_has_ended(of[i], 4));
		/* Messages of a dead rank remain. */
		store_case_expect(of[i], "s1", "hello-3", "note of 3", 9);
	}
	/* Ranks that come later learn of the death, too. */
	open_ranks(4, 4);
	wait_until_gone(of[4], 3);
	kill(orphan, SIGKILL);
	close_all();
}

TEST(tests, test_all_see_that_rank_0_was_killed_and_the_next_job_removes_its_folder)
{
	struct store_case next = stores;
	struct base_error error = { 0 };
	struct base_buffer body = { 0 };
	struct store *other;
	pid_t orphan, pid = start_process(0, &orphan);

	open_ranks(1, 2);
	store_case_expect(of[1], "s1", "hello-0", "note of 0", 9);
	kill_now(pid);
	for (uint32_t i = 1; i < 3; i++)
		wait_until_gone(of[i], 0);
	ck_assert_int_eq(store_case_try(&stores, 3, 0, &other, &error), -ETIMEDOUT);
	ck_assert_ptr_nonnull(strstr(error.sentence, "has ended"));
	/* A child of the dead rank 0 lives, and does not keep the folder. */
	strcat(next.name, "a");
	other = store_case_open(&next, 0);
	ck_assert(!exists(folder));
	ck_assert_int_eq(store_get(of[1], "s1", "hello-0", &body, NULL), IOSHAPE_E_COORDINATOR);
	store_close(other);
	kill(orphan, SIGKILL);
	base_buffer_free(&body);
	close_all();
}

TEST(tests, test_a_stopped_rank_lives)
{
	pid_t orphan, pid;

	open_ranks(0, 0);
	pid = start_process(1, &orphan);
	kill(pid, SIGSTOP);
	store_wait(of[0], 200);
	ck_assert(!store_has_ended(of[0], 1));
	kill_now(pid);
	wait_until_gone(of[0], 1);
	kill(orphan, SIGKILL);
	close_all();
}

TEST(tests, test_a_rank_that_finds_no_folder_names_rank_0)
{
	struct base_error error = { 0 };
	struct store *store;

	ck_assert_int_eq(store_case_try(&stores, 1, 0, &store, &error), -ETIMEDOUT);
	ck_assert_ptr_null(store);
	ck_assert_int_eq(error.code, -ETIMEDOUT);
}

TEST(tests, test_a_name_is_used_once)
{
	struct store *store;

	open_ranks(0, 1);
	ck_assert_int_eq(store_case_try(&stores, 0, 0, &store, NULL), -EEXIST);
	ck_assert_int_eq(store_case_try(&stores, 1, 0, &store, NULL), -EEXIST);
	ck_assert(exists(folder));
	close_all();
}

/* ---- The folder ------------------------------------------------------------------------------ */

TEST(tests, test_the_folder_is_ours_alone_and_nothing_is_beside_the_checkpoints)
{
	struct stat stat_of;
	char *slash;

	stores.ranks = 3;
	open_ranks(0, 2);
	store_case_put(of[1], "s1", "n", "x", 1);
	ck_assert(!stat(folder, &stat_of));
	ck_assert_uint_eq(stat_of.st_mode & 07777, 0700);
	ck_assert(!exists(beside));
	close_all();
	slash = strrchr(folder, '/');
	*slash = 0;
	ck_assert(!stat(folder, &stat_of));
	ck_assert_uint_eq(stat_of.st_mode & 07777, 0700);
	ck_assert_uint_eq(scratch_entries(folder), 0);
}

TEST(tests, test_folders_of_dead_jobs_are_removed)
{
	struct store_case next = stores;
	char dead[600], file[700], empty[600];
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, { 0 } };
	struct store *other;

	open_ranks(0, 0);
	snprintf(dead, sizeof(dead), "%s/ioshape-%u/store-dead", memory, (unsigned)geteuid());
	ck_assert(!mkdir(dead, 0700));
	snprintf(file, sizeof(file), "%s/life-0", dead);
	scratch_write(file, "", 0);
	snprintf(empty, sizeof(empty), "%s/ioshape-%u/store-empty", memory, (unsigned)geteuid());
	ck_assert(!mkdir(empty, 0700));
	/* Rank 0 of any job removes folders of dead processes. It keeps those of living ones, and
	 * those that may be new. */
	strcat(next.name, "other");
	other = store_case_open(&next, 0);
	ck_assert(!exists(dead));
	ck_assert(exists(folder) && exists(empty));
	store_close(other);
	ck_assert(!utimensat(AT_FDCWD, empty, times, 0));
	store_close(store_case_open(&next, 0));
	ck_assert(exists(folder) && !exists(empty));
	close_all();
}

/* ---- Unusable memory ------------------------------------------------------------------------- */

TEST(tests, test_a_folder_of_another_user_is_not_used)
{
	struct base_error error = { 0 };
	struct store *store;
	char squatted[400];

	if (geteuid())
		return;
	snprintf(squatted, sizeof(squatted), "%s/ioshape-%u", memory, (unsigned)geteuid());
	ck_assert(!mkdir(squatted, 0700));
	ck_assert(!chown(squatted, 12345, (gid_t)-1));
	for (uint32_t rank = 0; rank < 2; rank++) {
		memset(&error, 0, sizeof(error));
		ck_assert_int_eq(store_case_try(&stores, rank, 200, &store, &error), -EACCES);
		ck_assert(*error.sentence && *error.remedy);
		ck_assert_ptr_null(store);
	}
	ck_assert_uint_eq(scratch_entries(squatted), 0);
	close_all();
}

/* All ranks notice that the folder was removed, including those that wait. */
TEST(tests, test_a_memory_that_is_cleared_away_is_told)
{
	struct base_buffer body = { 0 };
	bool have[8] = { 0 };

	open_ranks(0, 2);
	store_case_put(of[1], "s1", "before", "x", 1);
	scratch_remove(memory);
	for (uint32_t i = 0; i < 3; i++) {
		struct base_error errors[3] = { { 0 } };

		ck_assert_int_eq(store_get(of[i], "s1", "before", &body, &errors[0]), -ESTALE);
		ck_assert_int_eq(store_put(of[i], "s1", "after", "y", 1, &errors[1]), -ESTALE);
		ck_assert_int_eq(store_collect(of[i], "s1", "want", have, store_case_count, NULL,
					       &errors[2]),
				 -ESTALE);
		for (size_t k = 0; k < ARRAY_LENGTH(errors); k++)
			ck_assert(strstr(errors[k].sentence, folder) && *errors[k].remedy);
	}
	base_buffer_free(&body);
	close_all();
}

/* The folder's removal by rank 0 at its end is reported as the end of rank 0. */
TEST(tests, test_ranks_that_outlast_rank_0_are_told_that_it_ended)
{
	struct base_buffer body = { 0 };

	open_ranks(0, 1);
	store_close(of[0]);
	of[0] = NULL;
	ck_assert(store_has_ended(of[1], 0));
	ck_assert_int_eq(store_get(of[1], "s1", "n", &body, NULL), IOSHAPE_E_COORDINATOR);
	ck_assert_int_eq(store_put(of[1], "s1", "n", "x", 1, NULL), IOSHAPE_E_COORDINATOR);
	base_buffer_free(&body);
	close_all();
}

/* ---- Users without an ID in the namespace ---------------------------------------------------- */

/* Runs in a child. In a user namespace without a mapping, all users have the overflow ID 65534. */
static int be_nobody(void *own)
{
	struct stat ours;
	char path[STORE_FOLDER_BYTES];

	MUST(base_is_own_user(geteuid()), "not our own user");
	if (unshare(CLONE_NEWUSER))
		return 77;
	MUST(geteuid() == 65534, "a user with a number");
	MUST(!base_is_own_user(geteuid()), "everybody is this user");
	MUST(store_find_folder(path, memory, NULL) == -EACCES, "a stranger's folder was used");
	MUST(io_folder_make_private(own, &ours, NULL) == -EACCES,
	     "messages of other users would be read");
	return 0;
}

TEST(tests, test_what_belongs_to_nobody_of_a_namespace_is_not_ours)
{
	char stranger[400], own[400];
	int status;

	if (geteuid())
		return;
	snprintf(stranger, sizeof(stranger), "%s/ioshape-65534", memory);
	snprintf(own, sizeof(own), "%s/notes", memory);
	ck_assert(!mkdir(stranger, 0700) && !chown(stranger, 54322, 54322));
	status = scratch_in_child(be_nobody, own);
	ck_assert(WIFEXITED(status));
	/* 77: the kernel or a container forbids user namespaces. */
	ck_assert(!WEXITSTATUS(status) || WEXITSTATUS(status) == 77);
}

/* ---- Limits ---------------------------------------------------------------------------------- */

TEST(tests, test_messages_have_a_limit_together)
{
	uint8_t *big = calloc(1, STORE_MAX_MESSAGE_BYTES);
	char name[32];
	int ret, count = 0;

	open_ranks(0, 0);
	for (;; count++) {
		snprintf(name, sizeof(name), "n-%d", count);
		ret = store_put(of[0], "s1", name, big, STORE_MAX_MESSAGE_BYTES, NULL);
		if (ret)
			break;
	}
	ck_assert_int_eq(ret, -E2BIG);
	ck_assert_int_eq(count, 3);
	store_drop(of[0], "s1");
	/* An empty message counts, too; replacing a message does not. */
	for (count = 0; count < 4096; count++) {
		snprintf(name, sizeof(name), "n-%d", count);
		REQUIRE(!store_put(of[0], "s1", name, NULL, 0, NULL));
	}
	ck_assert_int_eq(store_put(of[0], "s1", "n", NULL, 0, NULL), -E2BIG);
	store_drop(of[0], "s1");
	for (count = 0; count < 4200; count++)
		REQUIRE(!store_put(of[0], "s1", "n", NULL, 0, NULL));
	close_all();
	free(big);
}
