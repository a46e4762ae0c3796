/* SPDX-License-Identifier: Apache-2.0 */
/* Stale bytes are detected: a save whose large tensors all equal those of the save before. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/gate.h"
#include "support/scratch.h"
#include "support/write_record.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define TENSORS 3

/* Two tensors that training changes, and a step counter. */
static struct state {
	size_t bytes[TENSORS];
	int64_t shapes[TENSORS];
	uint8_t *memory[TENSORS];
	struct ioshape_tensor tensors[TENSORS];
} state;

static struct ioshape_context *context;
static struct ioshape_report report;
static atomic_uint warnings;
static unsigned long long compared_bytes, unchanged_bytes; /* of the newest save */

static void listen(void *user, enum ioshape_log_level level, const char *message)
{
	const char *numbers = strstr(message, ": ");

	(void)user;
	if (level == IOSHAPE_LOG_WARNING)
		atomic_fetch_add(&warnings, 1);
	if (numbers && strstr(message, "bytes of large tensors"))
		sscanf(numbers, ": %llu of %llu", &unchanged_bytes, &compared_bytes);
}

static void open_context(const char *examine)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	ioshape_context_free(context);
	options.examine = examine;
	options.log = listen;
	options.log_level = IOSHAPE_LOG_DEBUG;
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
}

static void make_state(size_t large_bytes, size_t small_bytes)
{
	static const char *const names[] = { "weights", "moments", "step" };
	const size_t bytes[] = { large_bytes, large_bytes + 4 * KIB, small_bytes };

	for (size_t i = 0; i < TENSORS; i++) {
		state.bytes[i] = bytes[i];
		state.shapes[i] = (int64_t)bytes[i];
		state.memory[i] = realloc(state.memory[i], bytes[i]);
		ck_assert_ptr_nonnull(state.memory[i]);
		memset(state.memory[i], (int)i, bytes[i]);
		state.tensors[i] = (struct ioshape_tensor){
			.name = names[i],
			.dtype = IOSHAPE_UINT8,
			.dims = 1,
			.shape = &state.shapes[i],
			.data = state.memory[i],
		};
	}
}

static void setup(void)
{
	scratch_setup();
	open_context("warn");
	make_state(2 * MIB, 8);
}

static void teardown(void)
{
	ioshape_context_free(context);
	for (size_t i = 0; i < TENSORS; i++)
		free(state.memory[i]);
	scratch_teardown();
}

static uint64_t large_bytes(void)
{
	return state.bytes[0] + state.bytes[1];
}

static void train(void)
{
	state.memory[0][state.bytes[0] / 2] ^= 1;
	state.memory[1][0] ^= 1;
	state.memory[2][0]++;
}

static int try_save(const char *name)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
	compared_bytes = unchanged_bytes = 0;
	options.report = &report;
	return ioshape_save_tensors(context, scratch_path(name), state.tensors, TENSORS, &options,
				    NULL);
}

/* Saves. Returns how many warnings the log got. */
static unsigned save(const char *name)
{
	unsigned before = atomic_load(&warnings);

	ck_assert_int_eq(try_save(name), 0);
	return atomic_load(&warnings) - before;
}

static void load(const char *name)
{
	struct ioshape_reader *reader;

	ck_assert_int_eq(ioshape_reader_open(context, scratch_path(name), NULL, &reader), 0);
	ioshape_reader_free(reader);
}

/* ---- Detection ------------------------------------------------------------------------------- */

static struct test_case telling = { .name = "telling", .setup = setup, .teardown = teardown };

TEST(telling, a_save_that_repeats_the_one_before_it_is_told)
{
	ck_assert_uint_eq(save("model-1000.pt"), 0);
	ck_assert_uint_eq(compared_bytes, 0);
	/* The step counter changes; only large tensors must. */
	state.memory[2][0]++;
	ck_assert_uint_eq(save("model-1100.pt"), 1);
	ck_assert_uint_eq(compared_bytes, large_bytes());
	ck_assert_uint_eq(unchanged_bytes, large_bytes());
	train();
	ck_assert_uint_eq(save("model-1200.pt"), 0);
	ck_assert_uint_eq(compared_bytes, large_bytes());
	ck_assert_uint_eq(unchanged_bytes, 0);
}

TEST(telling, a_state_that_is_saved_again_to_one_path_is_not_told)
{
	save("last.pt");
	for (int i = 0; i < 2; i++) {
		ck_assert_uint_eq(save("last.pt"), 0);
		ck_assert_uint_eq(unchanged_bytes, large_bytes());
	}
	/* Another number in the path shows that training went on, and so does the step. */
	ck_assert_uint_eq(save("model-1.pt"), 0);
	ck_assert_uint_eq(save("model-2.pt"), 1);
	state.memory[2][0]++;
	ck_assert_uint_eq(save("last.pt"), 1);
	/* A stale file stays stale, in a restarted job, too. */
	ck_assert_uint_eq(save("last.pt"), 1);
	open_context("warn");
	load("last.pt");
	ck_assert_uint_eq(save("last.pt"), 1);
	train();
	ck_assert_uint_eq(save("last.pt"), 0);
	open_context("warn");
	load("last.pt");
	ck_assert_uint_eq(save("last.pt"), 0);
	/* The state of torch's generator changes during an evaluation. */
	make_state(2 * MIB, 5056);
	ck_assert_uint_eq(save("evaluated.pt"), 0);
	state.memory[2][0]++;
	ck_assert_uint_eq(save("evaluated.pt"), 0);
}

TEST(telling, one_bit_of_one_large_tensor_is_a_change)
{
	ck_assert_uint_eq(save("last.pt"), 0);
	state.memory[1][state.bytes[1] - 1] ^= 0x80;
	ck_assert_uint_eq(save("last.pt"), 0);
	/* A frozen layer causes no warning. */
	ck_assert_uint_eq(compared_bytes, large_bytes());
	ck_assert_uint_eq(unchanged_bytes, state.bytes[0]);
}

TEST(telling, tensors_that_moved_in_the_file_are_the_same)
{
	struct ioshape_tensor first = state.tensors[0];

	save("last.pt");
	state.tensors[0] = state.tensors[1];
	state.tensors[1] = first;
	ck_assert_uint_eq(save("last.pt"), 1);
}

TEST(telling, of_small_models_the_largest_tensors_count)
{
	/* 5,056 bytes is the size of torch's generator states. */
	make_state(20 * KIB, 5056);
	save("model-1.pt");
	state.memory[2][0]++;
	ck_assert_uint_eq(save("model-2.pt"), 1);
	train();
	ck_assert_uint_eq(save("model-3.pt"), 0);
	make_state(4 * KIB, 8);
	save("tiny.pt");
	ck_assert_uint_eq(save("tiny.pt"), 0);
	ck_assert_uint_eq(compared_bytes, 0);
}

TEST(telling, of_safetensors_files_the_same_is_told)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.report = &report;
	options.format = IOSHAPE_FORMAT_SAFETENSORS;
	for (unsigned i = 0; i < 3; i++) {
		unsigned before = atomic_load(&warnings);

		report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
		compared_bytes = unchanged_bytes = 0;
		if (i == 2)
			train();
		state.memory[2][0]++;
		ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("a.safetensors"),
						      state.tensors, TENSORS, &options, NULL),
				 0);
		ck_assert_uint_eq(compared_bytes, i ? large_bytes() : 0);
		ck_assert_uint_eq(unchanged_bytes, i == 1 ? large_bytes() : 0);
		ck_assert_uint_eq(atomic_load(&warnings) - before, i == 1);
	}
}

TEST(telling, a_pickle_of_any_size_does_not_hide_it)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_record records[2] = {
		{ .name = "data.pkl", .bytes = state.bytes[0], .data = state.memory[0] },
		{ .name = "data/0", .bytes = state.bytes[1], .data = state.memory[1] },
	};

	report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
	compared_bytes = unchanged_bytes = 0;
	options.report = &report;
	for (int i = 0; i < 2; i++) {
		state.memory[0][0]++;
		ck_assert_int_eq(ioshape_save_records(context, scratch_path("raw.pt"), records, 2,
						      &options, NULL),
				 0);
	}
	ck_assert_uint_eq(atomic_load(&warnings), 1);
	ck_assert_uint_eq(compared_bytes, state.bytes[1]);
}

TEST(telling, a_save_of_one_record_is_told_too)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.report = &report;
	for (int i = 0; i < 2; i++) {
		report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
		compared_bytes = unchanged_bytes = 0;
		ck_assert_int_eq(write_record(context, scratch_path(i ? "raw-1.pt" : "raw-0.pt"),
					      "weights", state.memory[0], state.bytes[0], &options),
				 0);
		ck_assert_uint_eq(compared_bytes, i ? state.bytes[0] : 0);
	}
	ck_assert_uint_eq(unchanged_bytes, state.bytes[0]);
	ck_assert_uint_eq(atomic_load(&warnings), 1);
}

/* ---- Which saves are compared ---------------------------------------------------------------- */

static struct test_case families = { .name = "families", .setup = setup, .teardown = teardown };

TEST(families, only_numbers_differ_in_the_paths_of_a_family)
{
	ck_assert_int_eq(mkdir(scratch_path("step-9"), 0777), 0);
	ck_assert_int_eq(mkdir(scratch_path("step-10"), 0777), 0);
	ck_assert_uint_eq(save("step-9/model.pt"), 0);
	ck_assert_uint_eq(save("step-10/model.pt"), 1);
	ck_assert_uint_eq(save("step-10/copy.pt"), 0);
	ck_assert_uint_eq(save("model.pt"), 0);
	ck_assert_uint_eq(compared_bytes, 0);
	ck_assert_uint_eq(save("model"), 0);
}

TEST(families, a_save_is_compared_with_the_newest_of_its_family_alone)
{
	save("a-1.pt");
	train();
	save("a-2.pt");
	save("b-1.pt");
	train(); /* equal to the first save, except for the step */
	ck_assert_uint_eq(save("a-3.pt"), 0);
	/* The comparison does not need the earlier file. */
	ck_assert_int_eq(unlink(scratch_path("a-3.pt")), 0);
	ck_assert_uint_eq(save("a-4.pt"), 1);
}

TEST(families, many_families_are_remembered_but_not_all)
{
	char name[16];

	make_state(20 * KIB, 8);
	for (char c = 'a'; c <= 'z'; c++) {
		snprintf(name, sizeof(name), "%c.pt", c);
		save(name);
	}
	state.memory[2][0]++;
	ck_assert_uint_eq(save("a.pt"), 1);
	for (char c = 'a'; c <= 'z'; c++) {
		snprintf(name, sizeof(name), "more-%c.pt", c);
		save(name);
	}
	ck_assert_uint_eq(save("b.pt"), 0);
	ck_assert_uint_eq(compared_bytes, 0);
	state.memory[2][0]++;
	ck_assert_uint_eq(save("more-z.pt"), 1);
}

static int refuse(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)done, (void)total;
	return phase == IOSHAPE_PHASE_SYNC;
}

TEST(families, a_save_that_failed_is_not_the_one_before)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	save("last.pt");
	train();
	options.progress = refuse;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("last.pt"), state.tensors,
					      TENSORS, &options, NULL),
			 -ECANCELED);
	ck_assert_uint_eq(save("last.pt"), 0);
	ck_assert_uint_eq(compared_bytes, large_bytes());
	state.memory[2][0]++;
	ck_assert_uint_eq(save("last.pt"), 1);
}

/* Begins a save that stops before its sync. */
static struct ioshape_save *begin_save(const char *name, struct gate *gate)
{
	struct ioshape_save_options options = gate_options(gate, IOSHAPE_PHASE_SYNC, 0);
	struct ioshape_save *save;

	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path(name), state.tensors, TENSORS,
					      &options, &save),
			 0);
	sem_wait(&gate->reached);
	return save;
}

TEST(families, a_save_under_way_counts)
{
	struct gate gate;
	struct ioshape_save *save_of_1 = begin_save("model-1.pt", &gate);

	ck_assert_uint_eq(save("model-2.pt"), 1);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save_of_1, -1), 0);
	report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
	compared_bytes = unchanged_bytes = 0;
	ck_assert_int_eq(ioshape_save_get_report(save_of_1, &report), 0);
	ck_assert_uint_eq(compared_bytes, 0);
	ioshape_save_free(save_of_1);
	train();
	ck_assert_uint_eq(save("model-3.pt"), 0);
}

TEST(families, a_save_that_was_overtaken_is_not_the_one_before)
{
	struct ioshape_save_options urgent = IOSHAPE_SAVE_OPTIONS_INIT;
	struct gate gate;
	struct ioshape_save *overtaken = begin_save("last.pt", &gate);

	train();
	urgent.deadline_ms = 60000;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("last.pt"), state.tensors,
					      TENSORS, &urgent, NULL),
			 0);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(overtaken, -1), 0);
	ioshape_save_free(overtaken);
	state.memory[2][0]++;
	ck_assert_uint_eq(save("last.pt"), 1);
}

TEST(families, a_job_that_restarts_compares_with_what_it_has_loaded)
{
	save("model-1000.pt");
	open_context("warn");
	ck_assert_uint_eq(save("model-1100.pt"), 0);
	open_context("warn");
	load("model-1000.pt");
	ck_assert_uint_eq(save("model-1100.pt"), 1);
	open_context("warn");
	load("model-1000.pt");
	train();
	ck_assert_uint_eq(save("model-1100.pt"), 0);
	ck_assert_uint_eq(compared_bytes, large_bytes());
}

/* ---- Actions --------------------------------------------------------------------------------- */

static struct test_case doing = { .name = "doing", .setup = setup, .teardown = teardown };

TEST(doing, fail_leaves_the_old_file_and_nothing_else)
{
	const struct ioshape_error *error;
	uint8_t *before;
	size_t bytes;

	open_context("unchanged=fail");
	save("last.pt");
	before = scratch_read(scratch_path("last.pt"), &bytes);
	state.memory[2][0]++;
	ck_assert_int_eq(try_save("last.pt"), IOSHAPE_E_ALARM);
	error = ioshape_last_error();
	ck_assert_str_eq(error->operation, "save");
	ck_assert_str_eq(error->path, scratch_path("last.pt"));
	ck_assert_ptr_nonnull(strstr(error->remedy, "examine="));
	ck_assert_uint_eq(report.alarms, IOSHAPE_ALARM_UNCHANGED);
	ck_assert_uint_eq(unchanged_bytes, large_bytes());
	ck_assert_uint_eq(compared_bytes, large_bytes());
	ck_assert(scratch_same(scratch_path("last.pt"), before, bytes));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	free(before);
	/* An unchanged save fails again; a changed one does not. */
	ck_assert_int_eq(try_save("last.pt"), IOSHAPE_E_ALARM);
	train();
	ck_assert_int_eq(try_save("last.pt"), 0);
	ck_assert_uint_eq(atomic_load(&warnings), 0);
}

TEST(doing, fail_fails_saves_in_the_background)
{
	struct ioshape_save *background;

	open_context("unchanged=fail");
	save("model-1.pt");
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("model-2.pt"), state.tensors,
					      TENSORS, NULL, &background),
			 0);
	ck_assert_int_eq(ioshape_save_wait(background, -1), IOSHAPE_E_ALARM);
	ioshape_save_free(background);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

TEST(doing, ignore_compares_nothing)
{
	open_context("off");
	save("last.pt");
	load("last.pt");
	ck_assert_uint_eq(save("last.pt"), 0);
	ck_assert_uint_eq(compared_bytes, 0);
	ck_assert_uint_eq(unchanged_bytes, 0);
}
