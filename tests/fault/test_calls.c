/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A save replaces an older file, and at each system call on the way, one after the other, the call
 * fails or the process is killed. Whatever comes of it: there is the old file or the new one.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/calls.h"
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/write_record.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Leaks are looked for where the sanitizer is there to do it. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

static const struct scenario {
	const char *name;
	enum ioshape_engine engine;
	enum ioshape_direct direct;
	uint64_t block_bytes;
	enum { TENSORS, RECORDS, WRITER, RAW } what;
	bool background;
	bool borrow;
	bool no_replace; /* and there is no older file */
} scenarios[] = {
	{ .name = "uring", .engine = IOSHAPE_ENGINE_URING, .block_bytes = 512 << 10 },
	{ .name = "threads in the background",
	  .engine = IOSHAPE_ENGINE_THREADS,
	  .block_bytes = 512 << 10,
	  .background = true },
	{ .name = "buffered",
	  .engine = IOSHAPE_ENGINE_BUFFERED,
	  .direct = IOSHAPE_DIRECT_OFF,
	  .block_bytes = 512 << 10 },
	{ .name = "small", .block_bytes = 4 << 20 },
	{ .name = "no replace", .block_bytes = 512 << 10, .no_replace = true },
	{ .name = "writer", .block_bytes = 512 << 10, .what = WRITER },
	{ .name = "records, borrowed",
	  .block_bytes = 512 << 10,
	  .what = RECORDS,
	  .background = true,
	  .borrow = true },
	{ .name = "raw", .block_bytes = 512 << 10, .what = RAW },
};

/* What a child has to tell, in memory that it shares with its parent. */
struct outcome {
	bool ended;
	int ret;
	unsigned descriptors; /* too many */
	bool leaked;
	bool named; /* the error is about the file */
	char message[1024];
};

static const struct scenario *scenario;
static struct sample sample;
static struct outcome *outcome;
static uint8_t *new_file;
static size_t new_bytes;
static const char old_file[] = "what was there before";

static enum calls_mode mode;
static unsigned long nth;
static int code;
static const char *name_to_fail = "fsync";

static struct ioshape_context *open_context(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	/* The files of the local coordinator are not what this is about. */
	options.coordinator = "open";
	options.engine = scenario->engine;
	options.direct = scenario->direct;
	options.block_bytes = scenario->block_bytes;
	options.queue_depth = 2;
	options.staging_bytes = 64 << 20;
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
	return context;
}

/* What the error says that came with the code. */
static int heed(int ret)
{
	const struct ioshape_error *error = ioshape_last_error();
	const char *name = strrchr(error->path, '/');

	outcome->named = !strcmp(name ? name + 1 : error->path, "file");
	snprintf(outcome->message, sizeof(outcome->message), "%s", ret ? error->sentence : "");
	return ret;
}

static int write_raw(struct ioshape_context *context)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;
	int ret;

	options.expected_bytes = sample.total_bytes;
	ret = ioshape_file_open(context, "file", &options, &file);
	if (ret)
		return heed(ret);
	for (size_t i = 0; !ret && i < sample.count; i++)
		ret = ioshape_file_write(file, sample.expected[i], sample.bytes[i]);
	if (!ret)
		ret = ioshape_file_commit(file, NULL);
	heed(ret);
	ioshape_file_free(file);
	return ret;
}

static int write_records(struct ioshape_context *context)
{
	struct ioshape_writer_options options = IOSHAPE_WRITER_OPTIONS_INIT;
	struct ioshape_writer *writer;
	int ret;

	options.expected_bytes = sample.total_bytes;
	ret = ioshape_writer_open(context, "file", &options, &writer);
	if (ret)
		return heed(ret);
	for (size_t i = 0; !ret && i < sample.count; i++) {
		char name[32];

		snprintf(name, sizeof(name), "data/%zu", i);
		ret = write_record(writer, name, sample.expected[i], sample.bytes[i], 0);
	}
	if (!ret)
		ret = ioshape_writer_commit(writer, NULL);
	heed(ret);
	ioshape_writer_free(writer);
	return ret;
}

static int begin_save(struct ioshape_context *context, const struct ioshape_save_options *options,
		      struct ioshape_save **handle)
{
	struct ioshape_record records[SAMPLE_TENSORS] = { 0 };
	char names[SAMPLE_TENSORS][32];

	*handle = NULL;
	if (!scenario->background)
		handle = NULL;
	if (scenario->what == TENSORS)
		return ioshape_save_tensors(context, "file", sample.tensors, sample.count, options,
					    handle);
	for (size_t i = 0; i < sample.count; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%zu", i);
		records[i].name = names[i];
		records[i].data = sample.expected[i];
		records[i].bytes = sample.bytes[i];
	}
	return ioshape_save_records(context, "file", records, sample.count, options, handle);
}

static int save(struct ioshape_context *context)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *handle;
	int ret;

	if (scenario->what == WRITER)
		return write_records(context);
	if (scenario->what == RAW)
		return write_raw(context);
	options.metadata = &sample.metadata;
	options.replace = scenario->no_replace ? IOSHAPE_OFF : IOSHAPE_ON;
	options.borrow = scenario->borrow;
	ret = begin_save(context, &options, &handle);
	if (!handle)
		return heed(ret);
	ret = ioshape_save_wait(handle, -1);
	heed(ret);
	ioshape_save_free(handle);
	return ret;
}

/* In a child. */
static int save_with_trouble(void *argument)
{
	unsigned descriptors = scratch_descriptors();
	struct ioshape_context *context = open_context();

	(void)argument;
	if (mode == CALLS_FAIL_FIRST)
		calls_begin_named(name_to_fail, code);
	else
		calls_begin(mode, nth, code);
	outcome->ret = save(context);
	calls_end();
	ioshape_context_free(context);
	outcome->descriptors = scratch_descriptors() - descriptors;
	outcome->leaked = __lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check();
	outcome->ended = true;
	return 0;
}

static void restore_old_file(void)
{
	unlink("file");
	if (!scenario->no_replace)
		scratch_write("file", old_file, sizeof(old_file));
}

/* Returns false when the save has fewer calls than nth. */
static bool run(void)
{
	int status;

	restore_old_file();
	memset(outcome, 0, sizeof(*outcome));
	status = scratch_in_child(save_with_trouble, NULL);
	if (mode == CALLS_FAIL_FIRST)
		return WIFEXITED(status) && outcome->ended;
	if (mode == CALLS_COUNT || atomic_load(&calls_record()->count) < nth) {
		ck_assert_msg(outcome->ended && !outcome->ret, "%s", outcome->message);
		return false;
	}
	if (mode == CALLS_FAIL)
		ck_assert_msg(WIFEXITED(status) && outcome->ended, "%s: call %lu: the process died",
			      scenario->name, nth);
	else
		ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
			      "%s: call %lu: status %d", scenario->name, nth, status);
	return true;
}

static bool is_old(void)
{
	return scenario->no_replace ? access("file", F_OK) != 0 :
				      scratch_same("file", old_file, sizeof(old_file));
}

static bool is_new(void)
{
	return access("file", F_OK) == 0 && scratch_same("file", new_file, new_bytes);
}

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	outcome = mmap(NULL, sizeof(*outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		       -1, 0);
	ck_assert_ptr_ne(outcome, MAP_FAILED);
	calls_record();
}

static void begin_scenario(int i)
{
	struct ioshape_context *context;

	scenario = &scenarios[i];
	sample_make(&sample, 7, !strcmp(scenario->name, "small") ? 1000 : 1200000);
	context = open_context();
	restore_old_file();
	ck_assert_int_eq(save(context), 0);
	new_file = scratch_read("file", &new_bytes);
	if (scenario->what == TENSORS) {
		char why[256];

		ck_assert_msg(!sample_check(context, "file", &sample, why, sizeof(why)), "%s", why);
	}
	ioshape_context_free(context);
}

static void teardown(void)
{
	free(new_file);
	sample_free(&sample);
	munmap(outcome, sizeof(*outcome));
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static const char *call_name(unsigned long number)
{
	const char *name = number <= CALLS_MOST ? atomic_load(&calls_record()->names[number - 1]) :
						  NULL;

	return name ? name : "?";
}

/* ---- Failing calls --------------------------------------------------------------------------- */

static const int codes[] = { EIO, ENOSPC, EINTR, EPERM };

static void check_failure(void)
{
	const char *name = call_name(nth);

	ck_assert_msg(!outcome->descriptors, "%s: %s (call %lu): descriptors left open",
		      scenario->name, name, nth);
	ck_assert_msg(!outcome->leaked, "%s: %s (call %lu): leaked", scenario->name, name, nth);
	if (!outcome->ret) {
		ck_assert_msg(is_new(), "%s: %s (call %lu): success, but not the new file",
			      scenario->name, name, nth);
	} else {
		ck_assert_msg(outcome->named, "%s: %s: \"%s\"", scenario->name, name,
			      outcome->message);
		/* The new file is in place by then. */
		if (!strcmp(name, "fsync directory"))
			ck_assert_msg(is_new(), "\"%s\"", outcome->message);
		else
			ck_assert_msg(is_old(),
				      "%s: %s (call %lu): failed, and the old file is gone",
				      scenario->name, name, nth);
	}
	/* Who may not remove a file leaves it behind. */
	if (strcmp(name, "unlinkat") != 0)
		ck_assert_msg(!scratch_temporaries("."),
			      "%s: %s (call %lu): temporary file left behind", scenario->name, name,
			      nth);
}

START_TEST(each_call_may_fail)
{
	begin_scenario(_i);
	mode = CALLS_FAIL;
	for (size_t i = 0; i < ARRAY_LENGTH(codes); i++) {
		code = codes[i];
		for (nth = 1; run(); nth++)
			check_failure();
	}
	/* As many as one expects at the least: the test must see them. */
	ck_assert_uint_gt(nth, 15);
}
END_TEST

/* ATC'20: after a failed fsync the kernel may call the lost pages clean. */
START_TEST(a_failed_fsync_fails_the_save_and_is_not_tried_again)
{
	long first;

	begin_scenario(_i);
	mode = CALLS_FAIL_FIRST;
	code = EIO;
	ck_assert(run());
	ck_assert_int_eq(outcome->ret, -EIO);
	first = calls_find("fsync", 0);
	ck_assert_int_ge(first, 0);
	ck_assert_int_eq(calls_find("fsync", (unsigned long)first + 1), -1);
	ck_assert(is_old());
	ck_assert_uint_eq(scratch_temporaries("."), 0);
}
END_TEST

/* Calls whose failure nobody may overlook. */
START_TEST(a_failure_that_matters_fails_the_save)
{
	static const char *const names[] = {
		"fsync",     "fsync directory", "close temporary",    "renameat",
		"renameat2", "fallocate64",     "ftruncate64",        "pwrite64",
		"openat64",  "statx temporary", "fstatfs64 temporary"
	};
	unsigned failed = 0;

	begin_scenario(_i);
	code = EIO;
	for (size_t i = 0; i < ARRAY_LENGTH(names); i++) {
		name_to_fail = names[i];
		mode = CALLS_COUNT;
		run();
		if (calls_find(names[i], 0) < 0)
			continue;
		mode = CALLS_FAIL_FIRST;
		ck_assert(run());
		ck_assert_msg(outcome->ret == -EIO, "%s: %s: %d", scenario->name, names[i],
			      outcome->ret);
		ck_assert_msg(strcmp(names[i], "fsync directory") ? is_old() : is_new(), "%s: %s",
			      scenario->name, names[i]);
		ck_assert_uint_eq(scratch_temporaries("."), 0);
		failed++;
	}
	ck_assert_uint_ge(failed, 5);
}
END_TEST

START_TEST(the_order_of_calls_survives_a_power_failure)
{
	long synced, renamed, directory;

	begin_scenario(_i);
	mode = CALLS_COUNT;
	nth = 0;
	run();
	synced = calls_find("fsync", 0);
	renamed = calls_find(scenario->no_replace ? "renameat2" : "renameat", 0);
	directory = calls_find("fsync directory", 0);
	ck_assert_int_ge(synced, 0);
	ck_assert_int_gt(renamed, synced);
	ck_assert_int_gt(directory, renamed);
	/* Nothing is written between the sync and the rename. */
	for (long i = synced; i < renamed; i++) {
		const char *name = call_name((unsigned long)i + 1);

		ck_assert(strcmp(name, "pwrite64") && strcmp(name, "ftruncate64") &&
			  strcmp(name, "io_uring_submit") && strcmp(name, "fallocate64"));
	}
}
END_TEST

START_TEST(the_temporary_file_is_created_as_it_must_be)
{
	begin_scenario(_i);
	mode = CALLS_COUNT;
	nth = 0;
	run();
	ck_assert_int_eq(calls_record()->temporary_flags &
				 (O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC),
			 O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC);
	/* While it is empty nobody may open it who could not open what it replaces. */
	ck_assert_uint_eq(calls_record()->temporary_mode, scenario->no_replace ? 0666 : 0600);
}
END_TEST

/* Over NFS the file that a name meant may be gone when something is asked of it: another host has
 * replaced it, and the name means the new one. */
START_TEST(a_file_that_another_host_replaced_is_looked_for_anew)
{
	static const char *const names[] = { "fstat64", "statx", "fstatfs64", "pread64" };
	struct ioshape_context *context;
	struct ioshape_reader *reader;
	char why[512];

	begin_scenario(0);
	mode = CALLS_COUNT;
	run();
	context = open_context();
	for (size_t i = 0; i < ARRAY_LENGTH(names); i++) {
		calls_begin_named(names[i], ESTALE);
		ck_assert_msg(!ioshape_reader_open(context, "file", NULL, &reader), "%s: %s",
			      names[i], ioshape_last_error()->sentence);
		calls_end();
		ck_assert_int_ge(calls_find(names[i], 0), 0);
		ck_assert_msg(!sample_check_reader(reader, &sample, why, sizeof(why)), "%s: %s",
			      names[i], why);
		ioshape_reader_free(reader);
		calls_begin_named(names[i], EIO);
		ck_assert_int_eq(ioshape_reader_open(context, "file", NULL, &reader), -EIO);
		calls_end();
	}
	ioshape_context_free(context);
}
END_TEST

/* ---- Killed at calls ------------------------------------------------------------------------- */

/* A save in this directory from a new context: it tidies. */
static void save_again(void)
{
	struct ioshape_context *context = open_context();

	unlink("file");
	ck_assert_msg(!save(context), "%s", outcome->message);
	ioshape_context_free(context);
	ck_assert(is_new());
}

static void check_killed(void)
{
	const char *when = mode == CALLS_KILL_BEFORE ? "before" : "after";

	ck_assert_msg(is_old() || is_new(),
		      "%s: killed %s %s (call %lu): neither the old file nor the new",
		      scenario->name, when, call_name(nth), nth);
	ck_assert_uint_le(scratch_temporaries("."), 1);
	save_again();
	/* The kernel takes rings apart, and so lets go of their files, some time after the process
	 * is gone. */
	for (int tries = 0; scratch_entries(".") != 1 && tries < 100; tries++) {
		usleep(10000);
		save_again();
	}
	ck_assert_msg(scratch_entries(".") == 1, "%s: killed %s %s (call %lu): not tidied",
		      scenario->name, when, call_name(nth), nth);
}

START_TEST(each_call_may_be_the_last)
{
	unsigned old = 0, new = 0;

	begin_scenario(_i / 2);
	mode = _i % 2 ? CALLS_KILL_AFTER : CALLS_KILL_BEFORE;
	for (nth = 1; run(); nth++) {
		old += is_old();
		new += is_new();
		check_killed();
	}
	ck_assert_uint_gt(old, 10);
	ck_assert_uint_gt(new, 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fault/calls");
	TCase *fail = tcase_create("failing"), *killed = tcase_create("killed");
	const int count = (int)ARRAY_LENGTH(scenarios);

	tcase_add_checked_fixture(fail, setup, teardown);
	tcase_add_loop_test(fail, each_call_may_fail, 0, count);
	tcase_add_loop_test(fail, a_failed_fsync_fails_the_save_and_is_not_tried_again, 0, count);
	tcase_add_loop_test(fail, a_failure_that_matters_fails_the_save, 0, count);
	tcase_add_loop_test(fail, the_order_of_calls_survives_a_power_failure, 0, count);
	tcase_add_loop_test(fail, the_temporary_file_is_created_as_it_must_be, 0, count);
	tcase_add_test(fail, a_file_that_another_host_replaced_is_looked_for_anew);
	tcase_set_timeout(fail, 240);
	suite_add_tcase(suite, fail);
	tcase_add_checked_fixture(killed, setup, teardown);
	tcase_add_loop_test(killed, each_call_may_be_the_last, 0, 2 * count);
	tcase_set_timeout(killed, 240);
	suite_add_tcase(suite, killed);
	return check_main(suite);
}
