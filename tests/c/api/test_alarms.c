/* SPDX-License-Identifier: Apache-2.0 */
/* Saves are judged by the rules of the setting `examine`. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGE 8192 /* numbers: 32 KiB, which is large in a file without larger tensors */
#define SMALL 16
#define NUMBERS (2 * LARGE + SMALL)

/* Two large tensors, a small one, and a step counter. */
static float numbers[NUMBERS];
static float *const weights = numbers, *const moments = numbers + LARGE,
		    *const bias = numbers + 2 * LARGE;
static float step;
static uint32_t groups[2]; /* of weights and bias, and of moments */

static struct ioshape_context *context;
static struct ioshape_report report;
static char warnings[4][1024];
static unsigned warning_count;

static char asked_of[16]; /* the record whose tensor was asked for last */
static ioshape_name_fn namer;

static void listen(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user;
	if (level == IOSHAPE_LOG_WARNING)
		snprintf(warnings[warning_count++ % 4], sizeof(*warnings), "%s", message);
}

static void open_context(const char *examine)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	ioshape_context_free(context);
	options.examine = examine;
	options.log = listen;
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
}

/* Changes all tensors. */
static void train(void)
{
	for (size_t i = 0; i < NUMBERS; i++)
		numbers[i] += 0.01f * (float)(i % 5);
	step++;
}

static void setup(void)
{
	scratch_setup();
	for (size_t i = 0; i < NUMBERS; i++)
		numbers[i] = (float)(i % 11) - 5;
	step = 0;
	groups[0] = groups[1] = 0;
	warning_count = 0;
	*asked_of = 0;
	namer = NULL;
	open_context(NULL);
}

static void teardown(void)
{
	ioshape_context_free(context);
	context = NULL;
	scratch_teardown();
}

static void name_tensor(void *user, const char *record, char *name, size_t bytes)
{
	ck_assert_ptr_eq(user, asked_of);
	ck_assert_str_eq(name, "");
	snprintf(asked_of, sizeof(asked_of), "%s", record);
	if (strcmp(record, "data/0") == 0)
		snprintf(name, bytes, "layer.bias");
}

/* Saves the first `count` records. */
static int try_save(const char *name, size_t count)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_record records[] = {
		{ .data = bias, .bytes = SMALL * sizeof(float), .group = groups[0] },
		{ .data = weights, .bytes = LARGE * sizeof(float), .group = groups[0] },
		{ .data = moments, .bytes = LARGE * sizeof(float), .group = groups[1] },
		{ .data = &step, .bytes = sizeof(float), .group = groups[1] },
	};
	static const char *const names[] = { "data/0", "data/1", "data/2", "data/3" };

	for (size_t i = 0; i < count; i++) {
		records[i].name = names[i];
		records[i].dtype = IOSHAPE_FLOAT32;
	}
	report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
	options.report = &report;
	options.tensor_name = namer;
	options.tensor_name_user = asked_of;
	warning_count = 0;
	return ioshape_save_records(context, scratch_path(name), records, count, &options, NULL);
}

/* Saves, and returns the alarms of the report. They are those of the file and of the log. */
static uint32_t save(const char *name)
{
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_reader *reader;
	struct ioshape_context *other;

	ck_assert_int_eq(try_save(name, 4), 0);
	ck_assert_uint_eq(warning_count, (unsigned)__builtin_popcount(report.alarms));
	ck_assert_int_eq(*report.alarm != 0, report.alarms != 0);
	ck_assert_int_eq(ioshape_context_open(&other, NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(other, scratch_path(name), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.alarms, report.alarms);
	ioshape_reader_free(reader);
	ioshape_context_free(other);
	return report.alarms;
}

static void load(const char *name)
{
	struct ioshape_reader *reader;

	ck_assert_int_eq(ioshape_reader_open(context, scratch_path(name), NULL, &reader), 0);
	ioshape_reader_free(reader);
}

/* ---- Rules ----------------------------------------------------------------------------------- */

static struct test_case rules = { .name = "rules", .setup = setup, .teardown = teardown };

TEST(rules, training_raises_no_alarm)
{
	for (int i = 0; i < 4; i++) {
		ck_assert_uint_eq(save("last.pt"), 0);
		train();
	}
}

TEST(rules, new_nan_and_infinities_raise_an_alarm)
{
	save("step-1.pt");
	train();
	bias[3] = NAN;
	moments[0] = moments[1] = -INFINITY;
	ck_assert_uint_eq(save("step-2.pt"), IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(report.alarm, "\"data/0\" has 1 NaN and 0 infinities"));
	ck_assert_ptr_nonnull(strstr(warnings[0], "step-1.pt"));
	ck_assert_ptr_nonnull(strstr(warnings[0], "and 1 more tensors"));
	/* The alarm stays until the tensor is repaired. */
	train();
	ck_assert_uint_eq(save("step-3.pt"), IOSHAPE_ALARM_NONFINITE);
	bias[3] = moments[0] = moments[1] = 0;
	ck_assert_uint_eq(save("step-4.pt"), 0);
}

TEST(rules, what_was_infinite_before_may_be)
{
	bias[0] = -INFINITY; /* such as a mask */
	ck_assert_uint_eq(save("a.pt"), 0);
	train();
	bias[1] = -INFINITY;
	ck_assert_uint_eq(save("a.pt"), 0);
}

TEST(rules, a_tensor_that_becomes_constant_raises_an_alarm)
{
	save("a.pt");
	train();
	memset(moments, 0, LARGE * sizeof(float));
	ck_assert_uint_eq(save("a.pt"), IOSHAPE_ALARM_CONSTANT);
	ck_assert_ptr_nonnull(
		strstr(report.alarm, "tensor \"data/2\" has 8192 numbers that are all 0"));
	train();
	ck_assert_uint_eq(save("a.pt"), 0);
}

TEST(rules, a_tensor_may_begin_constant_and_a_small_one_may_become_so)
{
	memset(moments, 0, LARGE * sizeof(float));
	ck_assert_uint_eq(save("a.pt"), 0);
	weights[0]++;
	memset(bias, 0, SMALL * sizeof(float));
	ck_assert_uint_eq(save("a.pt"), 0);
	train();
	ck_assert_uint_eq(save("a.pt"), 0);
}

TEST(rules, a_jump_raises_an_alarm_only_if_asked_for)
{
	save("a.pt");
	for (size_t i = 0; i < LARGE; i++)
		weights[i] *= 20;
	train();
	ck_assert_uint_eq(save("a.pt"), 0);
	open_context("jump=warn");
	save("a.pt");
	train();
	ck_assert_uint_eq(save("a.pt"), 0);
	for (size_t i = 0; i < LARGE; i++)
		weights[i] /= 20;
	ck_assert_uint_eq(save("a.pt"), IOSHAPE_ALARM_JUMP);
}

TEST(rules, alarms_name_the_tensor_if_the_program_knows_it)
{
	namer = name_tensor;
	save("a.pt");
	train();
	ck_assert_uint_eq(save("a.pt"), 0);
	ck_assert_str_eq(asked_of, ""); /* a healthy save asks for no name */
	train();
	bias[3] = NAN;
	ck_assert_uint_eq(save("a.pt"), IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(report.alarm, "tensor \"layer.bias\" has 1 NaN"));
	ck_assert_ptr_nonnull(strstr(warnings[0], "tensor \"layer.bias\" has 1 NaN"));
	train();
	bias[3] = 0;
	moments[0] = NAN;
	ck_assert_uint_eq(save("a.pt"), IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(report.alarm, "tensor \"data/2\" has 1 NaN"));
	open_context("nonfinite=fail");
	bias[3] = 0;
	moments[0] = 0;
	save("a.pt");
	bias[3] = NAN;
	ck_assert_int_eq(try_save("a.pt", 4), IOSHAPE_E_ALARM);
	ck_assert_str_eq(ioshape_last_error()->record, "layer.bias");
}

TEST(rules, a_group_that_stops_raises_an_alarm)
{
	groups[0] = 1;
	groups[1] = 2;
	save("a.pt");
	weights[0]++;
	bias[0]++;
	/* The moments have never moved. */
	ck_assert_uint_eq(save("a.pt"), 0);
	train();
	ck_assert_uint_eq(save("a.pt"), 0);
	weights[0]++;
	step++;
	ck_assert_uint_eq(save("a.pt"), IOSHAPE_ALARM_UNCHANGED);
	ck_assert_ptr_nonnull(strstr(report.alarm, "all tensors of the optimizer ("));
	/* A small tensor of the first group moves: its large one is frozen. */
	bias[0]++;
	moments[0]++;
	ck_assert_uint_eq(save("a.pt"), 0);
}

TEST(rules, small_tensors_may_train_beside_frozen_ones)
{
	/* Such as adapters: 64 numbers of the moments are a tensor of their own. */
	const int64_t large = LARGE, small = 64, tiny = 63;
	struct ioshape_tensor tensors[] = {
		{ .name = "a",
		  .dtype = IOSHAPE_FLOAT32,
		  .dims = 1,
		  .shape = &large,
		  .data = weights },
		{ .name = "b",
		  .dtype = IOSHAPE_FLOAT32,
		  .dims = 1,
		  .shape = &small,
		  .data = moments },
	};

	for (int i = 0; i < 4; i++) {
		tensors[1].shape = i < 2 ? &small : &tiny;
		moments[0]++;
		ck_assert_int_eq(
			ioshape_save_tensors(context, scratch_path("a.pt"), tensors, 2, NULL, NULL),
			0);
		ck_assert_uint_eq(warning_count, i < 2 ? 0 : (unsigned)i - 1);
	}
}

TEST(rules, tensors_are_matched_if_others_appear)
{
	struct ioshape_tensor tensors[3];
	const int64_t large = LARGE;

	for (size_t i = 0; i < 3; i++)
		tensors[i] = (struct ioshape_tensor){
			.name = (const char *const[]){ "b", "a", "c" }[i],
			.dtype = IOSHAPE_FLOAT32,
			.dims = 1,
			.shape = &large,
			.data = i ? moments : weights,
		};
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, 1, NULL, NULL), 0);
	weights[5] = INFINITY;
	tensors[2] = tensors[0];
	tensors[0].name = "new";
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, 3, NULL, NULL), 0);
	/* Only "b" existed before, and it has moved from record 3 to record 5. */
	ck_assert_uint_eq(warning_count, 1);
	ck_assert_ptr_nonnull(strstr(warnings[0], "tensor \"b\" has"));
	ck_assert_ptr_null(strstr(warnings[0], "more tensors"));
}

TEST(rules, tensors_that_cannot_be_told_apart_are_not_matched)
{
	save("a.pt");
	moments[0] = NAN;
	weights[0]++;
	/* The number of tensors of this size differs. */
	ck_assert_int_eq(try_save("a.pt", 2), 0);
	ck_assert_uint_eq(report.alarms, 0);
	weights[0]++;
	ck_assert_int_eq(try_save("a.pt", 4), 0);
	ck_assert_uint_eq(report.alarms, 0);
}

/* ---- Predecessors and actions ---------------------------------------------------------------- */

static struct test_case saves = { .name = "saves", .setup = setup, .teardown = teardown };

TEST(saves, each_rule_has_an_action_of_its_own)
{
	open_context("nonfinite=off,constant=fail");
	save("a.pt");
	train();
	moments[7] = NAN;
	ck_assert_uint_eq(save("a.pt"), 0);
	memset(weights, 0, LARGE * sizeof(float));
	ck_assert_int_eq(try_save("a.pt", 4), IOSHAPE_E_ALARM);
	ck_assert_uint_eq(report.alarms, IOSHAPE_ALARM_CONSTANT);
}

TEST(saves, without_a_checkpoint_before_there_is_no_alarm)
{
	open_context("fail");
	numbers[0] = NAN;
	ck_assert_int_eq(try_save("a.pt", 4), 0);
	ck_assert_int_eq(try_save("b.pt", 4), 0);
}

TEST(saves, a_restarted_job_is_compared_with_what_it_loaded)
{
	save("step-1.pt");
	open_context(NULL);
	load("step-1.pt");
	train();
	weights[0] = NAN;
	ck_assert_uint_eq(save("step-2.pt"), IOSHAPE_ALARM_NONFINITE);
	open_context(NULL);
	load("step-2.pt");
	train();
	ck_assert_uint_eq(save("step-3.pt"), IOSHAPE_ALARM_NONFINITE);
	/* A job that goes back is compared with the checkpoint to which it went. */
	load("step-1.pt");
	weights[0] = 0;
	weights[1] = NAN;
	ck_assert_uint_eq(save("step-3.pt"), IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(warnings[0], "step-1.pt"));
}

/* Saves the numbers as one tensor of a safetensors file, and returns the alarms of the report. They
 * are those beside the file. */
static uint32_t save_safetensors(const char *name)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_reader_options reading = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_reader *reader;
	const int64_t shape = NUMBERS;
	const struct ioshape_tensor tensor = {
		.name = "w", .dtype = IOSHAPE_FLOAT32, .dims = 1, .shape = &shape, .data = numbers
	};

	options.format = IOSHAPE_FORMAT_SAFETENSORS;
	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	options.report = &report;
	report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path(name), &tensor, 1, &options, NULL), 0);
	reading.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path(name), &reading, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.examined, 1);
	ck_assert_uint_eq(info.alarms, report.alarms);
	ioshape_reader_free(reader);
	return report.alarms;
}

TEST(saves, safetensors_files_are_judged_too)
{
	ck_assert_uint_eq(save_safetensors("a.safetensors"), 0);
	numbers[9] = INFINITY;
	ck_assert_uint_eq(save_safetensors("a.safetensors"), IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(report.alarm, "tensor \"w\""));
}

TEST(saves, a_restarted_job_is_compared_with_a_safetensors_file)
{
	struct ioshape_reader_options reading = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader *reader;

	save_safetensors("step-1.safetensors");
	open_context(NULL);
	reading.any_format = 1;
	ck_assert_int_eq(
		ioshape_reader_open(context, scratch_path("step-1.safetensors"), &reading, &reader),
		0);
	ioshape_reader_free(reader);
	numbers[9] = NAN;
	ck_assert_uint_eq(save_safetensors("step-2.safetensors"), IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(warnings[0], "step-1.safetensors"));
}
