/* SPDX-License-Identifier: Apache-2.0 */
/* Which checkpoints pruning removes and keeps, while other processes read and save. */
#define _GNU_SOURCE
#include "support/checkpoint_view.h"
#include "support/lock_domain.h"

#include <ioshape/group.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* ---- Pruning --------------------------------------------------------------------------------- */

struct told {
	char steps[512];
	uint64_t bytes;
};

static void tell(void *user, uint64_t step, uint64_t bytes)
{
	struct told *told = user;
	size_t length = strlen(told->steps);

	snprintf(told->steps + length, sizeof(told->steps) - length, "%llu ",
		 (unsigned long long)step);
	told->bytes += bytes;
}

static struct told prune(uint32_t keep_last, uint64_t keep_every, bool dry_run)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	unsigned before = scratch_descriptors();
	struct told told = { 0 };
	uint64_t removed, spaces = 0;

	options.keep_last = keep_last;
	options.keep_every = keep_every;
	options.dry_run = dry_run;
	options.removing = tell;
	options.removing_user = &told;
	ck_assert_msg(!ioshape_checkpoint_prune(context, "runs", &options, &removed), "%s",
		      message());
	for (const char *c = told.steps; *c; c++)
		spaces += *c == ' ';
	ck_assert_uint_eq(removed, spaces);
	ck_assert_uint_eq(scratch_descriptors(), before);
	return told;
}

static void save_some(unsigned count)
{
	char text[32];

	for (unsigned step = 1; step <= count; step++) {
		snprintf(text, sizeof(text), "%u", step);
		ck_assert_int_eq(checkpoint_save(step, text, false, &error), 0);
	}
}

static struct test_case pruning = { .name = "pruning", .setup = setup, .teardown = teardown };

TEST(pruning, what_is_not_kept_goes_oldest_first)
{
	struct told told;

	save_some(8);
	told = prune(2, 3, true);
	ck_assert_str_eq(told.steps, "1 2 4 5 ");
	ck_assert_uint_eq(told.bytes, 4);
	ck_assert_str_eq(steps(), "1 2 3 4 5 6 7 8 ");
	told = prune(2, 3, false);
	ck_assert_str_eq(told.steps, "1 2 4 5 ");
	ck_assert_str_eq(steps(), "3 6 7 8 ");
	ck_assert_uint_eq(scratch_entries("runs"), 4);
	ck_assert_str_eq(prune(2, 3, false).steps, "");
	ck_assert_str_eq(prune(0, 0, false).steps, "");
	ck_assert_str_eq(prune(1, 0, false).steps, "3 6 7 ");
	ck_assert_str_eq(prune(1, 0, false).steps, "");
	ck_assert_uint_eq(latest(), 8);
}

/* Incomplete checkpoints do not count, and are not removed. */
TEST(pruning, the_newest_complete_one_stays_whatever_is_newer)
{
	save_some(4);
	unlink(PLACE(4) "/manifest.json");
	scratch_write(PLACE(3) "/rank-00000.pt", "longer than it was", 18);
	ck_assert_str_eq(prune(1, 0, false).steps, "1 ");
	ck_assert_uint_eq(latest(), 2);
	ck_assert_uint_eq(scratch_entries("runs"), 3);
}

/*
 * Runs in a child with few descriptors. Returns 0 if listing and pruning either do all or report an
 * error.
 */
static int prune_with_few_descriptors(void *argument)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	struct ioshape_context *own = open_context();
	const int first = open("/dev/null", O_RDONLY | O_CLOEXEC);
	struct rlimit limit;
	uint64_t *list, removed;
	size_t count;
	int ret;

	close(first);
	ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
	limit.rlim_cur = (rlim_t)first + *(unsigned *)argument;
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
	ret = ioshape_checkpoint_list(own, "runs", &list, &count);
	if (ret ? ret != -EMFILE : count != 2)
		return 2;
	ioshape_free(list);
	options.keep_last = 1;
	ret = ioshape_checkpoint_prune(own, "runs", &options, &removed);
	ioshape_context_free(own);
	return ret ? (ret == -EMFILE ? 0 : 3) : (removed == 1 ? 0 : 4);
}

/* A prune that could not look must not report that there is nothing to remove. */
TEST(pruning, who_has_no_descriptors_left_says_so)
{
	unsigned more = 0;

	save_some(2);
	for (; access(PLACE(1), F_OK) == 0; more++)
		ck_assert_int_eq(scratch_in_child(prune_with_few_descriptors, &more), 0);
	ck_assert_uint_gt(more, 3);
}

static int hold_until_told(void *argument)
{
	const int *ends = argument;
	struct ioshape_context *own = open_context();
	struct ioshape_checkpoint *checkpoint;
	char byte = '!';

	if (ioshape_checkpoint_open(own, "runs", 1, &checkpoint) || write(ends[1], &byte, 1) != 1)
		return 1;
	for (;;)
		pause();
}

TEST(pruning, one_that_somebody_reads_stays)
{
	int ends[2], status;
	char byte;
	pid_t pid;

	save_some(3);
	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (!pid)
		_exit(hold_until_told(ends));
	close(ends[1]);
	ck_assert_int_eq(read(ends[0], &byte, 1), 1);
	close(ends[0]);
	ck_assert_str_eq(prune(1, 0, false).steps, "2 ");
	ck_assert_str_eq(steps(), "1 3 ");
	kill(pid, SIGKILL);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert_str_eq(prune(1, 0, false).steps, "1 ");
}

TEST(pruning, attempts_of_the_dead_go_as_well)
{
	char here[IO_DOMAIN_BYTES];

	save_some(2);
	ck_assert_int_eq(rename(PLACE(1), "runs/.step-0000000001.01234567-00000000-"
					  "0123456789abcdef"),
			 0);
	ck_assert_str_eq(prune(1, 0, false).steps, "");
	ck_assert_uint_eq(scratch_entries("runs"), 2); /* another machine's new attempt */
	scratch_remove("runs/.step-0000000001.01234567-00000000-0123456789abcdef");
	ck_assert_int_eq(mkdir("runs/x", 0777), 0);
	domain_of(".", here);
	if (strcmp(here, IO_NOWHERE)) {
		char name[128];

		snprintf(name, sizeof(name), "runs/.step-0000000001.01234567-%s-0123456789abcdef",
			 here);
		ck_assert_int_eq(rename("runs/x", name), 0);
		prune(0, 0, true);
		ck_assert_uint_eq(scratch_entries("runs"), 2);
		prune(0, 0, false);
		ck_assert_uint_eq(scratch_entries("runs"), 1);
	}
}

#define PRUNED "runs/.pruned-step-0000000001.0123456789abcdef"

/* A pruning process died before it had removed the manifest, or after that. */
TEST(pruning, what_was_to_be_removed_is_there_until_its_manifest_goes)
{
	save_some(2);
	ck_assert_int_eq(rename(PLACE(1), PRUNED), 0);
	ck_assert_str_eq(steps(), "1 2 ");
	ck_assert_str_eq(prune(0, 0, false).steps, "");
	ck_assert(checkpoint_is("step-0000000001", 1, "1"));
	ck_assert_uint_eq(scratch_entries("runs"), 2);

	ck_assert_int_eq(rename(PLACE(1), PRUNED), 0);
	ck_assert_int_eq(checkpoint_save(1, "again", false, &error), 0);
	prune(0, 0, false);
	ck_assert(checkpoint_is("step-0000000001", 1, "again"));
	ck_assert_uint_eq(scratch_entries("runs"), 2);

	ck_assert_int_eq(rename(PLACE(1), PRUNED), 0);
	ck_assert_int_eq(unlink(PRUNED "/manifest.json"), 0);
	prune(0, 0, false);
	ck_assert_str_eq(steps(), "2 ");
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}

TEST(pruning, what_does_not_belong_there_is_left_and_named)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;

	save_some(3);
	ck_assert_int_eq(mkdir(PLACE(1) "/notes", 0777), 0);
	options.keep_last = 1;
	ck_assert_int_eq(ioshape_checkpoint_prune(context, "runs", &options, NULL), -ENOTEMPTY);
	ck_assert_ptr_nonnull(strstr(message(), "notes"));
	ck_assert_str_eq(steps(), "3 ");
	ck_assert_int_eq(access(PLACE(1) "/notes", F_OK), 0);
}

/* ---- Concurrent processes -------------------------------------------------------------------- */

#define ROUNDS 60

/* Returns the newest step, or 0 if there is none. */
static uint64_t newest(struct ioshape_context *own)
{
	struct ioshape_checkpoint *checkpoint;
	uint64_t step;

	if (ioshape_checkpoint_open(own, "runs", IOSHAPE_LATEST, &checkpoint))
		return 0;
	step = step_of(checkpoint);
	ioshape_checkpoint_free(checkpoint);
	return step;
}

static int prune_often(void *argument)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	struct ioshape_context *own = open_context();
	uint64_t removed, all = 0;

	(void)argument;
	options.keep_last = 1;
	while (newest(own) < ROUNDS - 1) {
		if (ioshape_checkpoint_prune(own, "runs", &options, &removed))
			return 1;
		all += removed;
	}
	ioshape_context_free(own);
	return all ? 0 : 2;
}

/* Checks that an open checkpoint stays whole, and that the newest step never decreases. */
static int read_often(void *argument)
{
	struct ioshape_context *own = open_context();
	struct ioshape_checkpoint_info info = { .size = sizeof(info) };
	struct ioshape_checkpoint *checkpoint;
	char path[512], text[32];
	uint64_t before = 0;

	(void)argument;
	while (before < ROUNDS - 1) {
		if (ioshape_checkpoint_open(own, "runs", IOSHAPE_LATEST, &checkpoint) ||
		    ioshape_checkpoint_get_info(checkpoint, &info) || info.step < before)
			return 1;
		before = info.step;
		usleep(500);
		snprintf(path, sizeof(path), "%s/rank-00000.pt", info.path);
		snprintf(text, sizeof(text), "%llu", (unsigned long long)info.step);
		if (access(path, F_OK) || !scratch_same(path, text, strlen(text)))
			return 2;
		ioshape_checkpoint_free(checkpoint);
	}
	ioshape_context_free(own);
	return 0;
}

TEST(pruning, savers_pruners_and_readers_get_along)
{
	int (*const bodies[])(void *) = { prune_often, prune_often, read_often, read_often };
	pid_t children[ARRAY_LENGTH(bodies)];
	char text[32];
	int status;

	save_some(1);
	for (size_t i = 0; i < ARRAY_LENGTH(bodies); i++) {
		children[i] = fork();
		ck_assert_int_ge(children[i], 0);
		if (!children[i])
			scratch_leave_child(bodies[i](NULL));
	}
	for (unsigned step = 2; step < ROUNDS; step++) {
		snprintf(text, sizeof(text), "%u", step);
		ck_assert_msg(!checkpoint_save(step, text, false, &error), "%s", error.text);
	}
	for (size_t i = 0; i < ARRAY_LENGTH(bodies); i++) {
		ck_assert_int_eq(waitpid(children[i], &status, 0), children[i]);
		ck_assert_msg(status == 0, "child %zu: status %x", i, (unsigned)status);
	}
	prune(1, 0, false);
	ck_assert_uint_eq(latest(), ROUNDS - 1);
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}
