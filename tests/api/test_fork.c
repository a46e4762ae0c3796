/* SPDX-License-Identifier: Apache-2.0 */
/* A process that forks, as data loaders do: the child touches nothing, the parent notices nothing.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/write_record.h"

#include <errno.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* In a child the parent's threads are neither there nor joined. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "report_thread_leaks=0";
}

static struct ioshape_context *context;
static struct ioshape_reader *reader;
static struct ioshape_writer *writer;
static struct ioshape_file *file;
static struct ioshape_save *save;
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

static struct ioshape_save_options with_metadata(void)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &sample.metadata;
	return options;
}

static void must_hold(const char *path)
{
	char why[512];
	int ret = sample_check(context, path, &sample, why, sizeof(why));

	ck_assert_msg(!ret, "%s", why);
}

/* The number of the first call that did not answer -EPERM; 0 if all did. */
static int use_everything(void *argument)
{
	struct ioshape_record_info record = { .size = sizeof(record) };
	struct ioshape_tensor_info tensor = { .size = sizeof(tensor) };
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_load_request request = { 0 };
	struct ioshape_reader *other_reader;
	struct ioshape_writer *other_writer;
	struct ioshape_save *other_save;
	struct ioshape_file *other_file;
	struct ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	uint64_t number;
	char byte;
	const int answers[] = {
		ioshape_save_tensors(context, "child", sample.tensors, sample.count, NULL, NULL),
		ioshape_save_tensors(context, "child", sample.tensors, sample.count, NULL,
				     &other_save),
		ioshape_save_records(context, "child", NULL, 0, NULL, NULL),
		ioshape_save_records(context, "child", NULL, 0, NULL, &other_save),
		ioshape_file_open(context, "child", NULL, &other_file),
		ioshape_reader_open(context, "file", NULL, &other_reader),
		ioshape_writer_open(context, "child", NULL, &other_writer),
		ioshape_context_reserve(context, 1),
		ioshape_save_wait(save, -1),
		ioshape_save_get_report(save, &report),
		ioshape_save_get_status(save, &status, NULL),
		ioshape_file_write(file, "a", 1),
		ioshape_file_commit(file, NULL),
		ioshape_writer_begin_record(writer, "a", 1, 0),
		ioshape_writer_write(writer, "a", 1),
		ioshape_writer_end_record(writer),
		ioshape_writer_commit(writer, NULL),
		ioshape_reader_get_record(reader, 0, &record),
		ioshape_reader_find_record(reader, "data.pkl", &number),
		ioshape_reader_read(reader, 0, 0, &byte, 1),
		ioshape_reader_read_file(reader, 0, &byte, 1),
		ioshape_reader_verify(reader),
		ioshape_reader_get_info(reader, &info),
		ioshape_reader_get_tensor(reader, 0, &tensor),
		ioshape_reader_find_tensor(reader, "step", &number),
		ioshape_reader_load(reader, &request, 1),
		ioshape_reader_get_metadata(reader, &metadata),
	};

	(void)argument;
	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++)
		if (answers[i] != -EPERM)
			return (int)i + 1;
	if (ioshape_last_error()->code != -EPERM || !*ioshape_last_error()->remedy)
		return 100;
	/* All handles can be let go of. */
	ioshape_save_free(save);
	ioshape_writer_free(writer);
	ioshape_file_free(file);
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	return 0;
}

static int use_everything_and_leave(void *argument)
{
	scratch_leave_child(use_everything(argument));
}

struct gate {
	sem_t reached, opened;
};

static int stand_still(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct gate *gate = user;

	(void)total;
	if (phase != IOSHAPE_PHASE_WRITE || done != 1 << 20)
		return 0;
	sem_post(&gate->reached);
	sem_wait(&gate->opened);
	return 0;
}

START_TEST(a_child_is_refused_everywhere_and_the_parent_goes_on)
{
	struct ioshape_save_options options = with_metadata();
	struct gate gate;
	int status;

	ck_assert_int_eq(
		ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL),
		0);
	ck_assert_int_eq(ioshape_reader_open(context, "file", NULL, &reader), 0);
	ck_assert_int_eq(ioshape_writer_open(context, "records", NULL, &writer), 0);
	ck_assert_int_eq(ioshape_file_open(context, "raw", NULL, &file), 0);
	/* In the middle of a save. */
	sem_init(&gate.reached, 0, 0);
	sem_init(&gate.opened, 0, 0);
	options.progress = stand_still;
	options.progress_user = &gate;
	ck_assert_int_eq(ioshape_save_tensors(context, "background", sample.tensors, sample.count,
					      &options, &save),
			 0);
	sem_wait(&gate.reached);
	status = scratch_in_child(use_everything_and_leave, NULL);
	ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status), "call %d", WEXITSTATUS(status));
	ck_assert_int_ne(access("child", F_OK), 0);
	/* Three temporary files are under way, and all survive the child. */
	ck_assert_uint_eq(scratch_temporaries("."), 3);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	must_hold("background");
	ck_assert_int_eq(write_record(writer, "data.pkl", "x", 1, 0), 0);
	ck_assert_int_eq(ioshape_writer_commit(writer, NULL), 0);
	ioshape_writer_free(writer);
	ck_assert_int_eq(ioshape_file_write(file, "raw", 3), 0);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
	ck_assert(scratch_same("raw", "raw", 3));
	ck_assert_int_eq(ioshape_reader_verify(reader), 0);
	ioshape_reader_free(reader);
}
END_TEST

static int come_and_go(void *argument)
{
	(void)argument;
	ioshape_context_free(context);
	scratch_leave_child(0);
}

START_TEST(children_that_come_and_go_disturb_no_save)
{
	struct ioshape_save_options options = with_metadata();

	for (int round = 0; round < 8; round++) {
		ck_assert_int_eq(ioshape_save_tensors(context, "file", sample.tensors, sample.count,
						      &options, &save),
				 0);
		for (int child = 0; child < 5; child++)
			ck_assert_int_eq(scratch_in_child(come_and_go, NULL), 0);
		ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
		ioshape_save_free(save);
		must_hold("file");
	}
}
END_TEST

/* One that lives on holds copies of our descriptors: the next save must not be hindered by that. */
static int live_on(void *argument)
{
	(void)argument;
	pause();
	return 0;
}

START_TEST(a_child_that_lives_on_disturbs_no_save)
{
	struct ioshape_save_options options = with_metadata();
	struct gate gate;
	pid_t child;

	sem_init(&gate.reached, 0, 0);
	sem_init(&gate.opened, 0, 0);
	options.progress = stand_still;
	options.progress_user = &gate;
	ck_assert_int_eq(ioshape_save_tensors(context, "file", sample.tensors, sample.count,
					      &options, &save),
			 0);
	sem_wait(&gate.reached);
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child)
		_exit(live_on(NULL));
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	must_hold("file");
	options.progress = NULL;
	ck_assert_int_eq(
		ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL),
		0);
	must_hold("file");
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}
END_TEST

static int save_with_its_own(void *argument)
{
	struct ioshape_save_options options = with_metadata();
	int ret;

	(void)argument;
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ret = ioshape_save_tensors(context, "child", sample.tensors, sample.count, &options, NULL);
	if (ret)
		fprintf(stderr, "%s\n", ioshape_last_error()->sentence);
	ioshape_context_free(context);
	scratch_leave_child(ret ? 1 : 0);
}

START_TEST(a_child_can_open_a_context_of_its_own)
{
	struct ioshape_save_options options = with_metadata();

	ck_assert_int_eq(
		ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL),
		0);
	ck_assert_int_eq(scratch_in_child(save_with_its_own, NULL), 0);
	must_hold("child");
	must_hold("file");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("api/fork");
	TCase *tests = tcase_create("fork");

	tcase_add_checked_fixture(tests, setup, teardown);
	tcase_add_test(tests, a_child_is_refused_everywhere_and_the_parent_goes_on);
	tcase_add_test(tests, children_that_come_and_go_disturb_no_save);
	tcase_add_test(tests, a_child_that_lives_on_disturbs_no_save);
	/* It takes memory that a child does not inherit (MADV_DONTFORK) for there, and stumbles. */
	if (!scratch_under_valgrind())
		tcase_add_test(tests, a_child_can_open_a_context_of_its_own);
	tcase_set_timeout(tests, 60);
	suite_add_tcase(suite, tests);
	return check_main(suite);
}
