/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation replaces an older one, and at each system call on the way, one after the other, the
 * call fails or the process is killed. Whatever comes of it: readers find the old one or the new
 * one, and the next save leaves nothing else behind.
 */
#define _GNU_SOURCE
#include "support/calls.h"
#include "support/check_main.h"
#include "support/generation_case.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define OLD "what was there before"
#define NEW "new"
#define STEP 7u
#define PLACE "step-0000000007"

static const struct scenario {
	const char *name;
	bool replace; /* an older one of the same step */
	bool no_swap; /* as on NFS */
	bool no_locks;
	bool prune; /* instead: the old one goes, a newer one stays */
	bool again; /* the old one is saved again, when it is just to be removed */
} scenarios[] = {
	{ .name = "first" },
	{ .name = "replace", .replace = true },
	{ .name = "replace without swap", .replace = true, .no_swap = true },
	{ .name = "replace without swap and locks",
	  .replace = true,
	  .no_swap = true,
	  .no_locks = true },
	{ .name = "prune", .replace = true, .prune = true },
	{ .name = "prune what is replaced", .replace = true, .prune = true, .again = true },
};

struct outcome {
	bool ended;
	int ret;
	unsigned descriptors; /* too many */
	char message[1024];
};

static const struct scenario *scenario;
static struct outcome *outcome;
static enum calls_mode mode;
static unsigned long nth;
static int code;

static struct ioshape_context *open_context(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	options.coordinator = "open";
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
	return context;
}

static void save_again(void *user, uint64_t step, uint64_t bytes)
{
	struct base_error error = { 0 };

	(void)user;
	(void)bytes;
	if (scenario->again)
		generation_save(step, NEW, false, &error);
}

static int prune(struct ioshape_context *context)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	int ret;

	options.keep_last = 1;
	options.removing = save_again;
	ret = ioshape_generation_prune(context, "runs", &options, NULL);
	if (ret)
		snprintf(outcome->message, sizeof(outcome->message), "%s",
			 ioshape_last_error()->sentence);
	return ret;
}

static int act(struct ioshape_context *context)
{
	struct base_error error = { 0 };
	int ret;

	if (scenario->prune)
		return prune(context);
	ret = generation_save(STEP, NEW, false, &error);
	snprintf(outcome->message, sizeof(outcome->message), "%s", error.text);
	return ret;
}

/* In a child. */
static int act_with_trouble(void *argument)
{
	struct ioshape_context *context = open_context();
	unsigned descriptors;

	(void)argument;
	ring_machine_tag();
	descriptors = scratch_descriptors();
	if (scenario->no_swap)
		calls_deny("renameat2", EINVAL);
	if (scenario->no_locks)
		calls_deny("flock", EBADF);
	calls_begin(mode, nth, code);
	outcome->ret = act(context);
	calls_end();
	outcome->descriptors = scratch_descriptors() - descriptors;
	outcome->ended = true;
	return 0;
}

static void begin(void)
{
	struct base_error error = { 0 };

	scratch_remove("runs");
	ck_assert_int_eq(generation_save(1, OLD, false, &error), 0);
	if (scenario->prune)
		ck_assert_int_eq(generation_save(STEP + 1, NEW, false, &error), 0);
	else if (scenario->replace)
		ck_assert_int_eq(generation_save(STEP, OLD, false, &error), 0);
}

/* False if there were fewer calls than nth. */
static bool run(void)
{
	int status;

	begin();
	memset(outcome, 0, sizeof(*outcome));
	status = scratch_in_child(act_with_trouble, NULL);
	if (mode == CALLS_COUNT || atomic_load(&calls_record()->count) < nth) {
		ck_assert_msg(outcome->ended && !outcome->ret, "%s", outcome->message);
		return false;
	}
	if (mode == CALLS_FAIL)
		ck_assert_msg(WIFEXITED(status) && outcome->ended, "%s: call %lu: it died",
			      scenario->name, nth);
	else
		ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
			      "%s: call %lu: status %x", scenario->name, nth, (unsigned)status);
	return true;
}

static const char *where(void)
{
	static char text[256];
	const char *name = nth <= CALLS_MOST ? atomic_load(&calls_record()->names[nth - 1]) : NULL;

	snprintf(text, sizeof(text), "%s: %s %s (call %lu)", scenario->name,
		 mode == CALLS_FAIL        ? "failed" :
		 mode == CALLS_KILL_BEFORE ? "killed before" :
					     "killed after",
		 name ? name : "?", nth);
	return text;
}

/* The text of generation `step` as a reader finds it, or "" if there is none. */
static const char *read_step(struct ioshape_context *context, uint64_t step)
{
	static char text[64];
	struct ioshape_part_info part = { .size = sizeof(part) };
	struct ioshape_generation *generation;
	uint8_t *data;
	size_t bytes;
	int ret = ioshape_generation_open(context, "runs", step, &generation);

	*text = 0;
	ck_assert_msg(!ret || ret == -ENOENT, "%s: %s", where(), ioshape_last_error()->sentence);
	if (ret)
		return text;
	ck_assert_int_eq(ioshape_generation_get_part(generation, 0, &part), 0);
	data = scratch_read(part.file, &bytes);
	ck_assert_uint_lt(bytes, sizeof(text));
	memcpy(text, data, bytes);
	text[bytes] = 0;
	free(data);
	ioshape_generation_free(generation);
	return text;
}

static bool is_old(struct ioshape_context *context)
{
	if (scenario->prune)
		return !strcmp(read_step(context, 1), OLD);
	return !strcmp(read_step(context, STEP), scenario->replace ? OLD : "");
}

static bool is_new(struct ioshape_context *context)
{
	if (scenario->prune)
		return !strcmp(read_step(context, 1), scenario->again ? NEW : "");
	return !strcmp(read_step(context, STEP), NEW);
}

/* And the newest is never lost. */
static void check_either(struct ioshape_context *context)
{
	struct ioshape_generation_info info = { .size = sizeof(info) };
	struct ioshape_generation *generation;

	ck_assert_msg(is_old(context) || is_new(context), "%s: neither the old nor the new one",
		      where());
	ck_assert_msg(!ioshape_generation_open(context, "runs", IOSHAPE_LATEST, &generation),
		      "%s: %s", where(), ioshape_last_error()->sentence);
	ck_assert_int_eq(ioshape_generation_get_info(generation, &info), 0);
	if (scenario->prune)
		ck_assert_msg(info.step == STEP + 1, "%s", where());
	else
		ck_assert_msg(info.step == STEP || (!scenario->replace && info.step == 1), "%s",
			      where());
	ioshape_generation_free(generation);
}

/* The next save, of another process, tidies. */
static void check_tidied(struct ioshape_context *context)
{
	struct base_error error = { 0 };
	bool old = is_old(context);
	unsigned expected = 2 + (scenario->again ? 1 :
				 scenario->prune ? old :
						   (scenario->replace || !old));

	ck_assert_msg(!generation_save(STEP + 2, "another", false, &error), "%s: %s", where(),
		      error.text);
	ck_assert_msg(scratch_entries("runs") == expected, "%s: %u entries, not %u", where(),
		      scratch_entries("runs"), expected);
	ck_assert_msg(is_old(context) == old, "%s: changed by the next save", where());
}

static struct ioshape_context *context;

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	outcome = mmap(NULL, sizeof(*outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		       -1, 0);
	ck_assert_ptr_ne(outcome, MAP_FAILED);
	calls_record();
	context = open_context();
}

static void teardown(void)
{
	ioshape_context_free(context);
	munmap(outcome, sizeof(*outcome));
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

START_TEST(each_call_may_be_the_last)
{
	unsigned old = 0, new = 0;

	scenario = &scenarios[_i / 2];
	mode = _i % 2 ? CALLS_KILL_AFTER : CALLS_KILL_BEFORE;
	for (nth = 1; run(); nth++) {
		check_either(context);
		old += is_old(context);
		new += is_new(context);
		check_tidied(context);
	}
	ck_assert_uint_gt(old, 10);
	ck_assert_uint_gt(new, 2);
}
END_TEST

static const int codes[] = { EIO, EPERM };

START_TEST(each_call_may_fail)
{
	unsigned failed = 0;

	scenario = &scenarios[_i];
	mode = CALLS_FAIL;
	for (size_t i = 0; i < ARRAY_LENGTH(codes); i++) {
		code = codes[i];
		for (nth = 1; run(); nth++) {
			ck_assert_msg(!outcome->descriptors, "%s: descriptors left open", where());
			failed += outcome->ret != 0;
			check_either(context);
			if (!scenario->prune)
				ck_assert_msg(outcome->ret ? is_old(context) : is_new(context),
					      "%s: %d %s", where(), outcome->ret, outcome->message);
			if (outcome->ret)
				ck_assert_msg(strstr(outcome->message, "runs") &&
						      strstr(outcome->message, ": "),
					      "%s: \"%s\"", where(), outcome->message);
			check_tidied(context);
		}
	}
	ck_assert_uint_gt(failed, 5);
}
END_TEST

START_TEST(the_order_of_calls_survives_a_power_failure)
{
	long written, folder, placed, directory;

	scenario = &scenarios[_i];
	mode = CALLS_COUNT;
	nth = 0;
	run();
	/* The first is that of the rank's file. */
	written = calls_find("fsync", (unsigned long)calls_find("fsync", 0) + 1);
	ck_assert_int_gt(written, 0);
	folder = calls_find("fsync directory", (unsigned long)written);
	ck_assert_int_gt(folder, written);
	placed = calls_find("renameat", (unsigned long)folder);
	ck_assert_int_gt(placed, folder);
	directory = calls_find("fsync directory", (unsigned long)placed);
	ck_assert_int_gt(directory, placed);
	/* What was replaced goes only then. */
	if (scenario->replace)
		ck_assert_int_gt(calls_find("unlinkat", (unsigned long)placed), directory);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fault/generation calls");
	TCase *all = tcase_create("all");
	const int count = (int)ARRAY_LENGTH(scenarios);

	tcase_add_checked_fixture(all, setup, teardown);
	tcase_add_loop_test(all, each_call_may_be_the_last, 0, 2 * count);
	/* Where the save fails, the last one is as the one before. */
	tcase_add_loop_test(all, each_call_may_fail, 0, count - 1);
	tcase_add_loop_test(all, the_order_of_calls_survives_a_power_failure, 0, count - 2);
	tcase_set_timeout(all, 240);
	suite_add_tcase(suite, all);
	return check_main(suite);
}
