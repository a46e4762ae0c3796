/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file store on a server that fails for a moment, at each system call of a put, a get and a
 * collect in turn. The store is unreachable then, and the next call succeeds.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "support/calls.h"
#include "support/check_main.h"
#include "support/store_case.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static struct store_case stores;
static struct store *zero, *one;

static void setup(void)
{
	scratch_setup();
	store_case_begin(&stores, 1, 4);
	ck_assert_str_eq(stores.ops->id, "files");
	zero = store_case_open(&stores, 0);
	one = store_case_open(&stores, 1);
}

static void teardown(void)
{
	store_close(one);
	store_close(zero);
	scratch_teardown();
}

static int post(struct base_error *error)
{
	return store_put(one, "s1", "want-1", "note of 1", 9, error);
}

static int look(struct base_error *error)
{
	struct base_buffer note = { 0 };
	const int ret = store_get(zero, "s1", "want-1", &note, error);

	if (!ret)
		ck_assert(note.bytes == 9 && !memcmp(note.data, "note of 1", 9));
	base_buffer_free(&note);
	return ret;
}

static int collect(struct base_error *error)
{
	bool have[4] = { 0 };
	struct store_case_found found = { .have = have };
	const int ret = store_collect(zero, "s1", "want", have, store_case_count, &found, error);

	ck_assert_uint_eq(found.count, found.calls);
	return ret || have[1] ? ret : -EAGAIN;
}

static int (*const acts[])(struct base_error *error) = { post, look, collect };
static const int codes[] = { ESTALE, EIO, ETIMEDOUT, EINTR };

static struct test_case tests = { .name = "files", .setup = setup, .teardown = teardown };

LOOP_TEST(tests, test_what_passes_is_tried_anew, 0, (int)ARRAY_LENGTH(codes))
{
	const int code = codes[_i];
	unsigned long failed = 0;

	ck_assert_int_eq(post(NULL), 0);
	for (size_t act = 0; act < ARRAY_LENGTH(acts); act++) {
		for (unsigned long nth = 1;; nth++) {
			struct base_error error = { 0 };
			int ret;

			calls_begin(CALLS_FAIL, nth, code);
			ret = acts[act](&error);
			calls_end();
			if (atomic_load(&calls_record()->count) < nth) {
				ck_assert_int_eq(ret, 0);
				break;
			}
			/*
			 * -EAGAIN: the folder disappeared during the listing, so there is no
			 * message yet.
			 */
			ck_assert_msg(!ret || ret == IOSHAPE_E_COORDINATOR || ret == -EAGAIN,
				      "%zu, call %lu: %d: %s", act, nth, ret, error.text);
			ck_assert_int_eq(error.code, ret == -EAGAIN ? 0 : ret);
			failed += ret != 0;
			ck_assert_msg(!acts[act](&error), "%zu, call %lu: %s", act, nth,
				      error.text);
		}
	}
	ck_assert_uint_ge(failed, 5);
}

/* A lasting failure is reported with its own code, because waiting would not help. */
TEST(tests, test_what_does_not_pass_is_told)
{
	struct base_error error = { 0 };

	ck_assert_int_eq(post(NULL), 0);
	calls_begin_named("write", ENOSPC);
	ck_assert_int_eq(post(&error), -ENOSPC);
	calls_end();
	memset(&error, 0, sizeof(error));
	calls_begin_named("openat64", EACCES);
	ck_assert_int_eq(look(&error), -EACCES);
	calls_end();
	ck_assert_int_eq(error.code, -EACCES);
}

/* ---- New directories ------------------------------------------------------------------------- */

static int make_directory(struct base_error *error)
{
	const char *path = scratch_path("made");
	struct base_budget budget = base_budget_begin();
	struct io_new_folder made;
	int ret = io_new_folder_make(&made, path, &budget, NULL, error);

	if (ret)
		return ret;
	ret = io_new_folder_commit(&made, error);
	io_new_folder_close(&made, NULL);
	return ret;
}

/* Runs in a child. */
static int make_where_all_is_locked(void *unused)
{
	struct base_error error = { 0 };

	(void)unused;
	calls_begin(CALLS_COUNT, 0, 0);
	calls_deny("flock", EWOULDBLOCK);
	return make_directory(&error) != -EAGAIN || !*error.sentence;
}

TEST(tests, test_names_that_are_all_taken_end_in_words)
{
	ck_assert_int_eq(scratch_in_child(make_where_all_is_locked, NULL), 0);
	ck_assert(access(scratch_path("made"), F_OK));
}
