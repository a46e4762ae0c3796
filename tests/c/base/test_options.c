/* SPDX-License-Identifier: Apache-2.0 */
/* Structs of other versions of the headers, and settings from the environment. */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/check_main.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A struct that this version knows, and a larger one of a later header. */
struct known {
	size_t size;
	uint64_t first;
	uint64_t second;
};

struct newer {
	struct known known;
	uint64_t third;
	char name[8];
};

static const struct known nothing = { .size = sizeof(struct known) };

static struct test_case structs = { .name = "structs" };

TEST(structs, structs_of_older_and_newer_headers_are_taken)
{
	const struct known both = { sizeof(both), 7, 8 }, first = { sizeof(first), 7, 0 };
	struct newer from = { .known = { 0, 7, 8 } };
	const struct {
		size_t size; /* size in the caller's headers; 0: no struct is given */
		const struct known *into;
	} cases[] = {
		{ 0, &nothing },
		{ sizeof(size_t), &nothing },
		{ sizeof(size_t) + sizeof(uint64_t), &first },
		{ sizeof(struct known), &both },
		{ sizeof(struct newer), &both },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct known into;

		memset(&into, 0xff, sizeof(into));
		from.known.size = cases[i].size;
		ck_assert_int_eq(base_take_options(&into, sizeof(into),
						   cases[i].size ? &from : NULL, "known", NULL),
				 0);
		ck_assert_mem_eq(&into, cases[i].into, sizeof(into));
	}
}

TEST(structs, a_field_that_is_not_known_is_refused_wherever_it_lies)
{
	for (size_t i = sizeof(struct known); i < sizeof(struct newer); i++) {
		struct newer from = { .known = { sizeof(from), 7, 8 } };
		struct known into;

		((char *)&from)[i] = 1;
		ck_assert_int_eq(base_take_options(&into, sizeof(into), &from, "known", NULL),
				 -EINVAL);
	}
}

TEST(structs, a_size_that_cannot_be_is_refused)
{
	static const size_t sizes[] = { 0, 1, sizeof(size_t) - 1, 4097, SIZE_MAX, (size_t)1 << 63 };
	struct known into;

	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
		struct known from = { .size = sizes[i] };

		ck_assert_int_eq(base_take_options(&into, sizeof(into), &from, "known", NULL),
				 -EINVAL);
		ck_assert_int_eq(base_give_struct(&from, &nothing, sizeof(nothing), "known", NULL),
				 -EINVAL);
		ck_assert_uint_eq(from.size, sizes[i]);
	}
}

TEST(structs, a_struct_that_is_filled_keeps_to_the_callers_size)
{
	const struct known from = { .size = sizeof(from), .first = 7, .second = 8 };

	for (size_t size = sizeof(size_t); size <= sizeof(struct newer); size++) {
		struct newer into;

		memset(&into, 0xee, sizeof(into));
		into.known.size = size;
		ck_assert_int_eq(base_give_struct(&into, &from, sizeof(from), "known", NULL), 0);
		ck_assert_uint_eq(into.known.size, size);
		for (size_t i = sizeof(size_t); i < sizeof(into); i++) {
			uint8_t expected = i >= size         ? 0xee :
					   i >= sizeof(from) ? 0 :
							       ((const uint8_t *)&from)[i];

			ck_assert_uint_eq(((uint8_t *)&into)[i], expected);
		}
	}
}

/* ---- The table of settings ------------------------------------------------------------------- */

static struct ioshape_context_options options;
static struct base_error error;

static int take(void)
{
	memset(&error, 0, sizeof(error));
	return base_settings_take(BASE_SETTINGS_CONTEXT, &options, &error);
}

static void begin(void)
{
	memset(&options, 0, sizeof(options));
}

static struct test_case environment = { .name = "environment", .setup = begin };

TEST(environment, sizes_are_numbers_with_at_most_one_binary_suffix)
{
	static const struct {
		const char *text;
		uint64_t value;
	} good[] = {
		{ "0", 0 },
		{ "007", 7 },
		{ "4194304", 4194304 },
		{ "4k", 4096 },
		{ "4M", 4194304 },
		{ "3g", 3ull << 30 },
		{ "2T", 2ull << 40 },
		{ "18446744073709551615", UINT64_MAX },
		{ "16777215T", 16777215ull << 40 },
	};
	static const char *const bad[] = {
		"",   " ",    " 1",   "1 ",  "-1",  "+1", "K",   "1KB",
		"1P", "1.5M", "0x10", "1e3", "1M1", "M1", "one", "\xff"
	};
	static const char *const large[] = { "18446744073709551616", "16777216T",
					     "18446744073709551615K" };
	uint64_t value;

	for (size_t i = 0; i < ARRAY_LENGTH(good); i++) {
		ck_assert_msg(!base_parse_bytes(good[i].text, &value), "%s", good[i].text);
		ck_assert_uint_eq(value, good[i].value);
	}
	value = 77;
	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++)
		ck_assert_msg(base_parse_bytes(bad[i], &value) == -EINVAL, "\"%s\"", bad[i]);
	for (size_t i = 0; i < ARRAY_LENGTH(large); i++)
		ck_assert_msg(base_parse_bytes(large[i], &value) == -ERANGE, "\"%s\"", large[i]);
	ck_assert_uint_eq(value, 77);
}

TEST(environment, what_nobody_sets_stays_zero)
{
	static const struct ioshape_context_options zeros;

	setenv("IOSHAPE_ENGINE", "", 1);
	setenv("IOSHAPE_POOL", "", 1);
	setenv("IOSHAPE_SLOTS", "", 1);
	ck_assert_int_eq(take(), 0);
	ck_assert_mem_eq(&options, &zeros, sizeof(zeros));
}

TEST(environment, variables_fill_what_the_program_left_open)
{
	setenv("IOSHAPE_ENGINE", "uring-async", 1);
	setenv("IOSHAPE_DIRECT", "off", 1);
	setenv("IOSHAPE_STAGING_BYTES", "64M", 1);
	setenv("IOSHAPE_SLOTS", "65536", 1);
	setenv("IOSHAPE_POOL", "a", 1);
	options.direct = IOSHAPE_DIRECT_REQUIRE;
	ck_assert_int_eq(take(), 0);
	ck_assert_int_eq(options.engine, IOSHAPE_ENGINE_URING_ASYNC);
	ck_assert_int_eq(options.direct, IOSHAPE_DIRECT_REQUIRE);
	ck_assert_uint_eq(options.staging_bytes, 64 * MIB);
	ck_assert_uint_eq(options.slots, 65536);
	ck_assert_str_eq(options.pool, "a");
}

/* The words in the table must have the order of the enums. */
TEST(environment, each_word_means_its_constant)
{
	static const struct {
		const char *variable, *word;
		size_t offset;
		int value;
	} words[] = {
#define WORD(variable, word, field, value)                                                         \
	{ variable, word, offsetof(struct ioshape_context_options, field), value }
		WORD("IOSHAPE_ENGINE", "auto", engine, IOSHAPE_ENGINE_AUTO),
		WORD("IOSHAPE_ENGINE", "uring", engine, IOSHAPE_ENGINE_URING),
		WORD("IOSHAPE_ENGINE", "threads", engine, IOSHAPE_ENGINE_THREADS),
		WORD("IOSHAPE_ENGINE", "buffered", engine, IOSHAPE_ENGINE_BUFFERED),
		WORD("IOSHAPE_DIRECT", "prefer", direct, IOSHAPE_DIRECT_PREFER),
		WORD("IOSHAPE_DIRECT", "require", direct, IOSHAPE_DIRECT_REQUIRE),
		WORD("IOSHAPE_UNREACHABLE", "stagger", unreachable, IOSHAPE_UNREACHABLE_STAGGER),
		WORD("IOSHAPE_UNREACHABLE", "wait", unreachable, IOSHAPE_UNREACHABLE_WAIT),
		WORD("IOSHAPE_UNREACHABLE", "fail", unreachable, IOSHAPE_UNREACHABLE_FAIL),
		WORD("IOSHAPE_FULL", "fail", full, IOSHAPE_FULL_FAIL),
		WORD("IOSHAPE_FULL", "skip", full, IOSHAPE_FULL_SKIP),
	};

	for (size_t i = 0; i < ARRAY_LENGTH(words); i++) {
		int found;

		memset(&options, 0, sizeof(options));
		setenv(words[i].variable, words[i].word, 1);
		ck_assert_int_eq(take(), 0);
		memcpy(&found, (char *)&options + words[i].offset, sizeof(found));
		ck_assert_msg(found == words[i].value, "%s", words[i].word);
		unsetenv(words[i].variable);
	}
}

TEST(environment, a_variable_that_makes_no_sense_is_refused)
{
	static const char *const bad[][2] = { { "IOSHAPE_ENGINE", "(uring)" },
					      { "IOSHAPE_ENGINE", "uring " },
					      { "IOSHAPE_ENGINE", "u" },
					      { "IOSHAPE_ENGINE", "URING" },
					      { "IOSHAPE_RATE", "lots" },
					      { "IOSHAPE_RATE", "0" },
					      { "IOSHAPE_SLOTS", "0" },
					      { "IOSHAPE_SLOTS", "4294967297" },
					      { "IOSHAPE_SHARE", "-1" },
					      { "IOSHAPE_SHARE", "1001" },
					      { "IOSHAPE_STAGING_BYTES", "8E" },
					      { "IOSHAPE_JOB", "a b" },
					      { "IOSHAPE_JOB", "\xc3\xa9" },
					      { "IOSHAPE_COORDINATOR", "open\n" },
					      { "IOSHAPE_PASSWORD_FILE", "a\x7f" } };
	static char value[8192];

	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++) {
		memset(&options, 0, sizeof(options));
		setenv(bad[i][0], bad[i][1], 1);
		ck_assert_int_eq(take(), -EINVAL);
		ck_assert_str_ne(error.remedy, "");
		unsetenv(bad[i][0]);
	}
	memset(value, 'v', sizeof(value) - 1);
	setenv("IOSHAPE_ENGINE", value, 1);
	ck_assert_int_eq(take(), -EINVAL);
	ck_assert_uint_lt(strlen(error.sentence), 256);
}

TEST(environment, a_variable_is_named_wording)
{
	setenv("IOSHAPE_SHARE", "1001", 1);
	ck_assert_int_eq(take(), -EINVAL);
	ck_assert_str_eq(error.sentence, "IOSHAPE_SHARE cannot be \"1001\"");
	ck_assert_str_eq(error.remedy, "it takes 1 to 1000");
}

TEST(environment, a_secret_is_not_repeated)
{
	setenv("IOSHAPE_COORDINATOR", "redis://u:s3cret@h\n", 1);
	ck_assert_int_eq(take(), -EINVAL);
	ck_assert_ptr_null(strstr(error.text, "s3cret"));
}

static char heard[1024];

static void listen(void *user, enum ioshape_log_level level, const char *line)
{
	(void)user, (void)level;
	strcat(strcat(heard, line), "\n");
}

TEST(environment, a_retired_setting_does_nothing_and_warns_once)
{
	const struct base_log log = { listen, NULL, IOSHAPE_LOG_WARNING };
	static const struct ioshape_context_options zeros;

	clearenv();
	*heard = 0;
	setenv("IOSHAPE_CALIBRATE", "whatever", 1);
	ck_assert_int_eq(take(), 0);
	ck_assert_mem_eq(&options, &zeros, sizeof(zeros));
	base_settings_warn(&log);
	ck_assert_ptr_nonnull(strstr(heard, "IOSHAPE_CALIBRATE does nothing any more: "));
	*heard = 0;
	base_settings_warn(&log);
	ck_assert_str_eq(heard, "");
}

TEST(environment, variables_that_are_no_settings_are_told_once)
{
	const struct base_log nobody = { 0 }, log = { listen, NULL, IOSHAPE_LOG_WARNING };

	clearenv();
	setenv("IOSHAPE_ENGIN", "threads", 1);
	setenv("IOSHAPE_SHRAE", "300", 1);
	setenv("IOSHAPE_ENGINE", "threads", 1);
	setenv("IOSHAPE_PASSWORD", "s3cret", 1);
	setenv("IOSHAPE_RUN", "1", 1);
	setenv("IOSHAPE_INTEGRATIONS", "a=b:c", 1);
	setenv("IOSHAPE_PRELOAD_LOG", "syslog", 1);
	setenv("IOSHAPE_TEST_NODE", "a", 1);
	setenv("OTHER_ENGIN", "a", 1);
	base_settings_warn(&nobody);
	base_settings_warn(&log);
	ck_assert_ptr_nonnull(strstr(heard, "there is no setting IOSHAPE_ENGIN; "));
	ck_assert_ptr_nonnull(strstr(heard, "there is no setting IOSHAPE_SHRAE; "));
	ck_assert_ptr_eq(strchr(strchr(heard, '\n') + 1, '\n'), heard + strlen(heard) - 1);
	*heard = 0;
	base_settings_warn(&log);
	ck_assert_str_eq(heard, "");
}
