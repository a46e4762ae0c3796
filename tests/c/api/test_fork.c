/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fork, as in data loaders: a child cannot use the library's objects, and does not disturb the
 * parent.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/every_call.h"
#include "support/gate.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Configures ThreadSanitizer: in a child the parent's threads do not exist and cannot be joined. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "report_thread_leaks=0";
}

static struct ioshape_context *context;
static struct sample sample;

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	sample_make(&sample, 3, 3 << 20);
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	sample_free(&sample);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static void must_hold(const char *path)
{
	char why[512];
	int ret = sample_check(context, path, &sample, why, sizeof(why));

	ck_assert_msg(!ret, "%s", why);
}

static int use_everything(void *handles)
{
	const struct handles *with = handles;
	int other = first_call_without(with, -EPERM);

	if (!other && !*ioshape_last_error()->remedy)
		other = 100;
	/* A child may free all handles. */
	ioshape_save_free(with->save);
	ioshape_file_free(with->file);
	ioshape_reader_free(with->reader);
	ioshape_context_free(with->context);
	scratch_leave_child(other);
}

/* Begins a save that stops in the middle of writing. */
static struct ioshape_save *begin_gated(struct gate *gate, const char *path)
{
	struct ioshape_save_options options = gate_options(gate, IOSHAPE_PHASE_WRITE, 1 << 20);
	struct ioshape_save *save;

	options.metadata = &sample.metadata;
	ck_assert_int_eq(
		ioshape_save_tensors(context, path, sample.tensors, sample.count, &options, &save),
		0);
	sem_wait(&gate->reached);
	return save;
}

/* Opens the gate, unless it is NULL, and waits for the end of the save. */
static void end(struct ioshape_save *save, struct gate *gate)
{
	if (gate)
		sem_post(&gate->opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
}

static struct test_case fork_tests = { .name = "fork", .setup = setup, .teardown = teardown };

TEST(fork_tests, a_child_is_refused_everywhere_and_the_parent_goes_on)
{
	struct handles all = { .context = context };
	struct gate gate;
	int status;

	ck_assert_int_eq(sample_save(context, "file", &sample, NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(context, "file", NULL, &all.reader), 0);
	ck_assert_int_eq(ioshape_file_open(context, "raw", NULL, &all.file), 0);
	all.save = begin_gated(&gate, "background");
	status = scratch_in_child(use_everything, &all);
	ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status), "call %d", WEXITSTATUS(status));
	ck_assert_int_ne(access("new", F_OK), 0);
	/* Two saves are in progress, and their temporary files survive the child. */
	ck_assert_uint_eq(scratch_temporaries("."), 2);
	end(all.save, &gate);
	must_hold("background");
	ck_assert_int_eq(ioshape_file_write(all.file, "raw", 3), 0);
	ck_assert_int_eq(ioshape_file_commit(all.file, NULL), 0);
	ioshape_file_free(all.file);
	ck_assert(scratch_same("raw", "raw", 3));
	ck_assert_int_eq(ioshape_reader_verify(all.reader, 1), 0);
	ioshape_reader_free(all.reader);
}

static int come_and_go(void *argument)
{
	(void)argument;
	ioshape_context_free(context);
	scratch_leave_child(0);
}

TEST(fork_tests, children_that_come_and_go_disturb_no_save)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *save;

	options.metadata = &sample.metadata;
	for (int round = 0; round < 8; round++) {
		ck_assert_int_eq(ioshape_save_tensors(context, "file", sample.tensors, sample.count,
						      &options, &save),
				 0);
		for (int child = 0; child < 5; child++)
			ck_assert_int_eq(scratch_in_child(come_and_go, NULL), 0);
		end(save, NULL);
		must_hold("file");
	}
}

/* Returns how many files, rings and shared memory objects of the library a process has open. */
static unsigned count_ours(pid_t pid)
{
	const char *const ours[] = { scratch_directory(), "/memfd:ioshape", "/dev/shm/ioshape",
				     "anon_inode:[io_uring]" };
	char path[64], to[PATH_MAX];
	struct dirent *entry;
	unsigned count = 0;
	DIR *listing;

	snprintf(path, sizeof(path), "/proc/%ld/fd", (long)pid);
	listing = opendir(path);
	ck_assert_ptr_nonnull(listing);
	while ((entry = readdir(listing))) {
		ssize_t bytes = readlinkat(dirfd(listing), entry->d_name, to, sizeof(to) - 1);

		to[bytes < 0 ? 0 : bytes] = 0;
		for (size_t i = 0; i < sizeof(ours) / sizeof(*ours); i++)
			count += !strncmp(to, ours[i], strlen(ours[i]));
	}
	closedir(listing);
	return count;
}

/* The child must hold neither locks nor the space of files that are replaced. */
TEST(fork_tests, a_child_that_lives_on_holds_nothing_and_disturbs_no_save)
{
	struct ioshape_reader *reader;
	struct ioshape_save *save;
	struct gate gate;
	int ends[2];
	pid_t child;
	char byte;

	ck_assert_int_eq(sample_save(context, "old", &sample, NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(context, "old", NULL, &reader), 0);
	save = begin_gated(&gate, "file");
	ck_assert_uint_ge(count_ours(getpid()), 3);
	ck_assert_int_eq(pipe(ends), 0);
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child) {
		close(ends[1]);
		_exit(pause());
	}
	close(ends[1]);
	ck_assert_int_eq(read(ends[0], &byte, 1), 0); /* the child is running */
	close(ends[0]);
	ck_assert_uint_eq(count_ours(child), 0);
	ioshape_reader_free(reader);
	end(save, &gate);
	must_hold("file");
	ck_assert_int_eq(sample_save(context, "file", &sample, NULL), 0);
	must_hold("file");
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static int save_with_its_own(void *argument)
{
	int ret;

	(void)argument;
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ret = sample_save(context, "child", &sample, NULL);
	ioshape_context_free(context);
	scratch_leave_child(ret ? 1 : 0);
}

/* valgrind crashes here: the test uses memory that a child does not inherit (MADV_DONTFORK). */
TEST_IF(fork_tests, a_child_can_open_a_context_of_its_own, !scratch_under_valgrind())
{
	ck_assert_int_eq(sample_save(context, "file", &sample, NULL), 0);
	ck_assert_int_eq(scratch_in_child(save_with_its_own, NULL), 0);
	must_hold("child");
	must_hold("file");
}
