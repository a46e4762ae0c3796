/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A save replaces an older file, and a system call on the way fails. tests/campaign/harm.c tries a
 * failure and a kill at every call; this file tests single promises.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/calls.h"
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/group.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

static const struct scenario {
	const char *name;
	enum ioshape_engine engine;
	enum ioshape_direct direct;
	uint64_t block_bytes;
} scenarios[] = {
	{ .name = "uring", .engine = IOSHAPE_ENGINE_URING, .block_bytes = 512 << 10 },
	{ .name = "buffered",
	  .engine = IOSHAPE_ENGINE_BUFFERED,
	  .direct = IOSHAPE_DIRECT_OFF,
	  .block_bytes = 512 << 10 },
	{ .name = "small", .block_bytes = 4 << 20 },
};
enum { URING, BUFFERED, SMALL };

/* Result of a child, in memory that it shares with its parent. */
struct outcome {
	bool ended;
	int ret;
	char message[1024];
};

static const struct scenario *scenario;
static struct sample sample;
static struct outcome *outcome;
static const char old_file[] = "what was there before";
static mode_t old_mode = 0644;
static bool old_names_a_user; /* in an ACL, if the filesystem supports them */

/* The ACL as setfacl stores it: USER_OBJ rw, USER 65534 none, GROUP_OBJ r, MASK r, OTHER r. */
static const uint8_t acl[] = {
	2,    0, 0, 0,                                                             /* version */
	0x01, 0, 6, 0, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 0, 0, 0xfe, 0xff, 0,    0, /* 65534 */
	0x04, 0, 4, 0, 0xff, 0xff, 0xff, 0xff, 0x10, 0, 4, 0, 0xff, 0xff, 0xff, 0xff,
	0x20, 0, 4, 0, 0xff, 0xff, 0xff, 0xff,
};

static struct ioshape_context *open_context(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	/* Without a coordinator, because the calls of the local one are not tested here. */
	options.coordinator = "open";
	options.engine = scenario->engine;
	options.direct = scenario->direct;
	options.staging_bytes = 64 << 20;
	ck_assert_int_eq(
		open_context_with(&context, &options,
				  (struct test_rules){ .block_bytes = scenario->block_bytes,
						       .queue_depth = 2 }),
		0);
	return context;
}

static int heed(int ret)
{
	snprintf(outcome->message, sizeof(outcome->message), "%s",
		 ret ? ioshape_last_error()->sentence : "");
	return ret;
}

static int save(struct ioshape_context *context)
{
	return heed(sample_save(context, "file", &sample, NULL));
}

/* Runs in a child. */
static int save_and_count(void *unused)
{
	struct ioshape_context *context = open_context();

	(void)unused;
	calls_begin(CALLS_COUNT, 0, 0);
	outcome->ret = save(context);
	calls_end();
	ioshape_context_free(context);
	outcome->ended = true;
	return 0;
}

static void restore_old_file(void)
{
	unlink("file");
	scratch_write("file", old_file, sizeof(old_file));
	ck_assert_int_eq(chmod("file", old_mode), 0);
	if (old_names_a_user)
		old_names_a_user =
			!setxattr("file", "system.posix_acl_access", acl, sizeof(acl), 0);
}

/* Saves in a child, which records its calls. */
static void run(void)
{
	restore_old_file();
	memset(outcome, 0, sizeof(*outcome));
	ck_assert_int_eq(scratch_in_child(save_and_count, NULL), 0);
	ck_assert_msg(outcome->ended && !outcome->ret, "%s", outcome->message);
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
	scenario = &scenarios[i];
	sample_make(&sample, 7, i == SMALL ? 1000 : 1200000);
}

static void teardown(void)
{
	sample_free(&sample);
	munmap(outcome, sizeof(*outcome));
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

/* ---- Failing calls --------------------------------------------------------------------------- */

static struct test_case fail = { .name = "failing", .setup = setup, .teardown = teardown };

/* Runs in a child, because a denial cannot be undone. */
static int save_with_denial(void *name)
{
	calls_deny(name, EINTR);
	return save_and_count(NULL);
}

TEST(fail, what_never_ceases_to_be_interrupted_fails)
{
	static char name[] = "pwrite64 temporary";

	begin_scenario(SMALL);
	restore_old_file();
	ck_assert_int_eq(scratch_in_child(save_with_denial, name), 0);
	ck_assert_int_eq(outcome->ret, -EINTR);
	ck_assert(scratch_same("file", old_file, sizeof(old_file)));
	ck_assert_uint_eq(scratch_temporaries("."), 0);
}

/* Runs in a child. */
static int save_with_a_stale_handle(void *nth)
{
	struct ioshape_context *context = open_context();

	calls_begin(CALLS_FAIL, *(unsigned long *)nth, ESTALE);
	outcome->ret = save(context);
	calls_end();
	if (outcome->ret && outcome->ret != ioshape_last_error()->code)
		outcome->ret = -EPROTO;
	ioshape_context_free(context);
	return 0;
}

/*
 * The library asks more about a file of another user. Without root the owner cannot be changed, and
 * the test covers less.
 */
TEST(fail, a_look_that_fails_fails_the_save_with_its_code)
{
	unsigned failed = 0;
	long nth = -1;

	begin_scenario(SMALL);
	for (unsigned long from = 0;; from = (unsigned long)nth + 1) {
		restore_old_file();
		(void)!chown("file", 1000, 1000);
		ck_assert_int_eq(scratch_in_child(save_and_count, NULL), 0);
		nth = calls_find("statx", from);
		if (nth++ < 0)
			break;
		restore_old_file();
		(void)!chown("file", 1000, 1000);
		ck_assert_int_eq(scratch_in_child(save_with_a_stale_handle, &nth), 0);
		ck_assert_msg(!outcome->ret || outcome->ret == -ESTALE, "call %ld: %d", nth,
			      outcome->ret);
		failed += outcome->ret != 0;
		nth--;
	}
	ck_assert_uint_ge(failed, 1);
}

LOOP_TEST(fail, the_temporary_file_is_created_as_it_must_be, 0, ARRAY_LENGTH(scenarios))
{
	begin_scenario(_i);
	run();
	ck_assert_int_eq(calls_record()->temporary_flags &
				 (O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC),
			 O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC);
}

/*
 * A process that opens the temporary file while it is empty can read all that is written later. So
 * its first mode grants no user, in whatever class of the file, more than the old file's mode.
 */
TEST(fail, nobody_opens_the_temporary_file_who_may_not_open_the_old_one)
{
	static const mode_t modes[][2] = {
		{ 0644, 0644 }, { 0600, 0600 }, { 0640, 0600 },
		{ 0604, 0600 }, { 0664, 0644 }, { 06775, 0755 },
	};

	begin_scenario(URING);
	for (size_t i = 0; i < ARRAY_LENGTH(modes); i++) {
		old_mode = modes[i][0];
		run();
		ck_assert_msg(calls_record()->temporary_mode == modes[i][1], "%o: %o", old_mode,
			      calls_record()->temporary_mode);
	}
	old_mode = 0644;
	old_names_a_user = true;
	run();
	if (old_names_a_user)
		ck_assert_uint_eq(calls_record()->temporary_mode, 0600);
}

/*
 * Over NFS a file may disappear between two calls because another host has replaced it. The name
 * then means the new file.
 */
TEST(fail, a_file_that_another_host_replaced_is_looked_for_anew)
{
	static const char *const names[] = { "fstat64", "statx", "fstatfs64", "pread64" };
	struct ioshape_context *context;
	struct ioshape_reader *reader;
	char why[512];

	begin_scenario(URING);
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

/* Returns the number of calls of a context's second save. The first save makes more calls. */
static unsigned long calls_of_second_save(const char *examine)
{
	struct ioshape_context *context;

	setenv("IOSHAPE_EXAMINE", examine, 1);
	context = open_context();
	unsetenv("IOSHAPE_EXAMINE");
	ck_assert_int_eq(save(context), 0);
	calls_begin(CALLS_COUNT, 0, 0);
	ck_assert_int_eq(save(context), 0);
	calls_end();
	ioshape_context_free(context);
	return atomic_load(&calls_record()->count);
}

/*
 * Buffered, because direct requests may complete in any order and take a varying number of calls.
 */
TEST(fail, examining_takes_no_call)
{
	unsigned long wanted;

	begin_scenario(BUFFERED);
	wanted = calls_of_second_save("off");
	ck_assert_uint_gt(wanted, 0);
	ck_assert_uint_eq(calls_of_second_save("warn"), wanted);
}

/*
 * With a relative path, ranks with different working directories would use different directories.
 */
TEST(fail, a_relative_path_is_not_taken_for_an_absolute_one)
{
	struct ioshape_context *context;
	struct ioshape_group *group;

	begin_scenario(URING);
	context = open_context();
	calls_begin_named("getcwd", EIO);
	ck_assert_int_eq(ioshape_group_open(context, "not/yet", NULL, &group), -EIO);
	calls_end();
	ck_assert_ptr_null(group);
	ck_assert_int_ne(access("not", F_OK), 0);
	ck_assert_int_eq(ioshape_group_open(context, "not/yet", NULL, &group), 0);
	ioshape_group_free(group);
	scratch_remove("not");
	ioshape_context_free(context);
}
