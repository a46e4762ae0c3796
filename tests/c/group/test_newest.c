/* SPDX-License-Identifier: Apache-2.0 */
/* The newest intact checkpoint, when some are damaged, or ranks end during the search. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/group.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define STEPS 3

struct rank {
	uint32_t number;
	struct ioshape_context *context;
	struct ioshape_group *group;
};

static struct rank open_rank(uint32_t rank, uint32_t ranks)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct rank opened = { .number = rank,
			       .context =
				       sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER) };

	options.rank = rank;
	options.ranks = options.local_ranks = ranks;
	options.mode = IOSHAPE_MODE_EACH;
	options.token = scratch_directory();
	options.deadline_ms = 20000;
	ck_assert_msg(
		!ioshape_group_open(opened.context, scratch_path("steps"), &options, &opened.group),
		"%s", ioshape_last_error()->sentence);
	return opened;
}

static void close_rank(const struct rank *rank)
{
	ioshape_group_free(rank->group);
	ioshape_context_free(rank->context);
}

static void save_steps(const struct rank *rank)
{
	struct sample sample;

	for (uint64_t step = 1; step <= STEPS; step++) {
		/* Equal parts of ranks would be stored once. */
		sample_make(&sample, 2 * step + rank->number, 100000);
		ck_assert_msg(!ioshape_group_save_tensors(rank->group, step, sample.tensors,
							  sample.count, NULL, NULL),
			      "%s", ioshape_last_error()->sentence);
		sample_free(&sample);
	}
}

/* Returns the path of a file of a checkpoint whose name contains `part`. */
static const char *file_of(int step, const char *shard)
{
	static char path[600];
	char folder[300];
	struct dirent *entry;
	DIR *listing;

	snprintf(folder, sizeof(folder), "%s/step-%010d", scratch_path("steps"), step);
	listing = opendir(folder);
	ck_assert_ptr_nonnull(listing);
	while ((entry = readdir(listing)) && !strstr(entry->d_name, shard))
		;
	ck_assert_ptr_nonnull(entry);
	snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
	closedir(listing);
	return path;
}

static void damage(int step, const char *shard)
{
	const int fd = open(file_of(step, shard), O_RDWR | O_CLOEXEC);
	struct stat status;
	char byte;

	ck_assert_int_ge(fd, 0);
	ck_assert(!fstat(fd, &status));
	ck_assert_int_eq(pread(fd, &byte, 1, status.st_size / 2), 1);
	byte ^= 1;
	ck_assert_int_eq(pwrite(fd, &byte, 1, status.st_size / 2), 1);
	close(fd);
}

static uint64_t passed[STEPS + 1];
static unsigned passed_count;

static void pass_over(void *user, uint64_t step)
{
	ck_assert_ptr_eq(user, passed);
	ck_assert_str_ne(ioshape_last_error()->sentence, "");
	passed[passed_count++] = step;
}

static int find(const struct rank *rank, uint64_t *step)
{
	struct ioshape_search_options options = { .size = sizeof(struct ioshape_search_options) };

	options.intact = 1;
	options.passed_over = pass_over;
	options.passed_over_user = passed;
	passed_count = 0;
	*step = 77;
	return ioshape_group_get_latest(rank->group, &options, step);
}

static struct test_case tests = { .name = "newest",
				  .setup = scratch_setup,
				  .teardown = scratch_teardown };

TEST(tests, what_is_damaged_is_passed_over)
{
	struct ioshape_search_options silent = { .size = sizeof(struct ioshape_search_options) };
	const struct rank rank = open_rank(0, 1);
	uint64_t step;

	save_steps(&rank);
	ck_assert_int_eq(find(&rank, &step), 0);
	ck_assert(step == 3 && !passed_count);
	damage(3, ".pt");
	ck_assert_int_eq(find(&rank, &step), 0);
	ck_assert(step == 2 && passed_count == 1 && passed[0] == 3);
	ck_assert(!unlink(file_of(2, "manifest")));
	ck_assert_int_eq(find(&rank, &step), 0);
	/* The age of a checkpoint without a manifest is unknown; it may be the newest. */
	ck_assert(step == 1 && passed_count == 2 && passed[0] == 2);
	silent.intact = 1;
	ck_assert_int_eq(ioshape_group_get_latest(rank.group, &silent, &step), 0);
	ck_assert_uint_eq(step, 1);
	/* A search for complete checkpoints reads no data. */
	ck_assert_int_eq(ioshape_group_get_latest(rank.group, NULL, &step), 0);
	ck_assert_uint_eq(step, 3);
	damage(1, ".pt");
	ck_assert_int_eq(find(&rank, &step), IOSHAPE_E_UNUSABLE);
	ck_assert(!step && passed_count == 3);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, "has no manifest"));
	close_rank(&rank);
}

/*
 * Otherwise a job would take this for its first start, and overwrite checkpoints that may be
 * repaired.
 */
TEST(tests, where_none_is_complete_it_does_not_look_like_the_first_start)
{
	const struct rank rank = open_rank(0, 1);
	struct ioshape_checkpoint *checkpoint;
	const char *said;
	uint64_t step;

	save_steps(&rank);
	for (int i = 1; i <= STEPS; i++)
		ck_assert(!truncate(file_of(i, ".pt"), 100));
	ck_assert_int_eq(ioshape_group_get_latest(rank.group, NULL, &step), IOSHAPE_E_UNUSABLE);
	ck_assert_int_eq(ioshape_checkpoint_open(rank.context, scratch_path("steps"),
						 IOSHAPE_LATEST, &checkpoint),
			 IOSHAPE_E_UNUSABLE);
	said = ioshape_last_error()->sentence;
	ck_assert_ptr_nonnull(strstr(said, "3 checkpoints are in it"));
	for (int i = 1; i <= STEPS; i++)
		ck_assert_ptr_nonnull(strstr(said, file_of(i, ".pt")));
	ck_assert_str_ne(ioshape_last_error()->remedy, "");
	close_rank(&rank);
}

TEST(tests, where_there_is_nothing_nothing_is_found)
{
	const struct rank rank = open_rank(0, 1);
	uint64_t step;

	ck_assert_int_eq(find(&rank, &step), -ENOENT);
	ck_assert_int_eq(ioshape_group_get_latest(rank.group, NULL, &step), -ENOENT);
	rmdir(scratch_path("steps"));
	ck_assert_int_eq(find(&rank, &step), -ENOENT);
	ck_assert_int_eq(ioshape_group_get_latest(rank.group, NULL, &step), -ENOENT);
	ck_assert_uint_eq(step, 0);
	close_rank(&rank);
}

/* ---- Two ranks ------------------------------------------------------------------------------- */

static int told[2]; /* pipe on which rank 0 reports that it has damaged the checkpoints */

static void tell(void)
{
	ck_assert_int_eq(write(told[1], "t", 1), 1);
}

static int search_in_child(const struct rank *rank)
{
	uint64_t step;

	if (find(rank, &step) || step != 1)
		return 1;
	return passed_count == 2 && passed[0] == 3 && passed[1] == 2 ? 0 : 2;
}

static int die_in_child(const struct rank *rank)
{
	(void)rank;
	kill(getpid(), SIGKILL);
	return 0;
}

/* Starts rank 1, which runs the function after rank 0 has damaged the checkpoints. */
static pid_t start_rank_1(int (*run)(const struct rank *rank))
{
	pid_t child;

	ck_assert(!pipe(told));
	child = fork();
	if (!child) {
		const struct rank rank = open_rank(1, 2);
		char byte;
		int ret;

		save_steps(&rank);
		ck_assert_int_eq(read(told[0], &byte, 1), 1);
		ret = run(&rank);
		close_rank(&rank);
		scratch_leave_child(ret);
	}
	return child;
}

TEST(tests, what_is_damaged_for_one_rank_is_passed_over_by_all)
{
	const pid_t child = start_rank_1(search_in_child);
	const struct rank rank = open_rank(0, 2);
	uint64_t step;
	int status;

	save_steps(&rank);
	damage(3, "rank-00000");
	damage(2, "rank-00001");
	tell();
	ck_assert_msg(!find(&rank, &step), "%s", ioshape_last_error()->sentence);
	ck_assert(step == 1 && passed_count == 2);
	close_rank(&rank);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
}

TEST(tests, a_rank_that_ends_while_all_look_is_named)
{
	const pid_t child = start_rank_1(die_in_child);
	const struct rank rank = open_rank(0, 2);
	uint64_t step;
	int status;

	save_steps(&rank);
	tell();
	ck_assert_int_eq(find(&rank, &step), -ETIMEDOUT);
	ck_assert_int_eq(ioshape_last_error()->rank, 1);
	ck_assert_uint_eq(step, 0);
	close_rank(&rank);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
}
