/* SPDX-License-Identifier: Apache-2.0 */
/* Errors, their sentences, and the log. Only this test compares their exact words. */
/* Included, because it tests static functions. */
#include "base/error.c"
#include "support/check_main.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static struct test_case tests = { .name = "errors, log and clock" };

TEST(tests, the_remedy_is_told_from_the_sentence_whatever_the_path_is)
{
	static const char *const paths[] = { "a; b", "a\036b", "%s; ", "" };
	static const char *const wanted[] = { "a; b", "a?b", "%s; ", "" };

	for (size_t i = 0; i < ARRAY_LENGTH(paths); i++) {
		struct base_error error = { 0 };
		char sentence[64];

		base_fail_reason_with(&error, -EINVAL, BASE_WORDS("mount %s first", paths[i]),
				      "cannot open \"%s\"", paths[i]);
		snprintf(sentence, sizeof(sentence), "cannot open \"%s\"", wanted[i]);
		ck_assert_str_eq(error.sentence, sentence);
		snprintf(sentence, sizeof(sentence), "mount %s first", wanted[i]);
		ck_assert_str_eq(error.remedy, sentence);
	}
}

/*
 * Names with dangerous characters, and how messages show them. They set a terminal's title in 7 and
 * 8 bits, write from right to left, begin a new line, or are not UTF-8.
 */
static const char *const names[][2] = {
	{ "\x1b]0;pwned\x07", "?]0;pwned?" },
	{ "\xc2\x9d"
	  "0;pwned\xc2\x9c",
	  "?0;pwned?" },
	{ "a\nERROR\r\x7f", "a?ERROR??" },
	{ "a\xe2\x80\xae"
	  "b\xe2\x81\xa6\xe2\x80\xa8\xe2\x80\x8b\xef\xbb\xbf",
	  "a?b????" },
	{ "a\xff\x9b\xe2\x80", "a????" },
	{ "Z\xc3\xbcrich \xe2\x98\x83 \xf0\x9f\x9a\x82 \xe2\x80\x93 \xc2\xa0",
	  "Z\xc3\xbcrich \xe2\x98\x83 \xf0\x9f\x9a\x82 \xe2\x80\x93 \xc2\xa0" },
};

static char logged[BASE_ERROR_TEXT_BYTES];

static void keep_line(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user;
	(void)level;
	snprintf(logged, sizeof(logged), "%s", message);
}

TEST(tests, no_name_in_an_error_or_a_log_line_drives_a_terminal)
{
	const struct base_log log = { .write = keep_line, .level = IOSHAPE_LOG_DEBUG };

	for (size_t i = 0; i < ARRAY_LENGTH(names); i++) {
		struct base_error error = { 0 };
		char wanted[128];

		base_fail_reason_with(&error, -EINVAL, BASE_WORDS("rename %s", names[i][0]),
				      "tensor \"%s\"", names[i][0]);
		snprintf(wanted, sizeof(wanted), "tensor \"%s\"", names[i][1]);
		ck_assert_str_eq(error.sentence, wanted);
		snprintf(wanted, sizeof(wanted), "rename %s", names[i][1]);
		ck_assert_str_eq(error.remedy, wanted);
		snprintf(wanted, sizeof(wanted), "tensor \"%s\"; rename %s", names[i][1],
			 names[i][1]);
		ck_assert_str_eq(error.text, wanted);
		base_rephrase(&error, -EINVAL, "of %s", names[i][0]);
		snprintf(wanted, sizeof(wanted), "of %s", names[i][1]);
		ck_assert_str_eq(error.sentence, wanted);
		base_log(&log, IOSHAPE_LOG_INFO, "%s", names[i][0]);
		ck_assert_str_eq(logged, names[i][1]);
	}
}

TEST(tests, the_reason_stands_before_the_remedy)
{
	struct base_error error = { 0 };
	char line[128];

	base_fail_with(&error, -ENOSPC, "free space", "cannot write \"%s\"", "a");
	ck_assert_str_eq(error.sentence, "cannot write \"a\": No space left on device");
	ck_assert_str_eq(error.remedy, "free space");
	error_line(&error, line, sizeof(line));
	ck_assert_str_eq(line, "cannot write \"a\": No space left on device; free space");
	error_line(&error, line, 47);
	ck_assert_str_eq(line, "cannot write \"a\": No space left on device; fre");
	/* The first error is kept. */
	ck_assert_int_eq(base_fail(&error, -EIO, "cannot remove \"b\""), -EIO);
	ck_assert_int_eq(error.code, -ENOSPC);
	ck_assert_str_eq(error.sentence, "cannot write \"a\": No space left on device");
	ck_assert_int_eq(base_fail(NULL, -EIO, "nobody listens"), -EIO);
}

TEST(tests, what_an_error_is_about_is_said_once_and_only_after_a_failure)
{
	struct base_error error = { 0 };

	base_error_about(&error, "save", "a");
	base_error_at(&error, 1);
	ck_assert_str_eq(error.path, "");
	ck_assert_uint_eq(error.known, 0);
	base_fail_reason(&error, -EIO, "it failed");
	base_error_about(&error, NULL, "near");
	base_error_about(&error, "save", "far");
	base_error_at(&error, 1);
	base_error_at(&error, 2);
	base_error_space(&error, 3, UINT64_MAX);
	ck_assert_str_eq(error.path, "near");
	ck_assert_str_eq(error.operation, "save");
	ck_assert_uint_eq(error.known, BASE_KNOWS_OFFSET | BASE_KNOWS_SPACE);
	ck_assert_uint_eq(error.offset, 1);
}

TEST(tests, sizes_are_told_in_the_unit_that_suits_them)
{
	static const struct {
		uint64_t bytes;
		const char *shown;
	} sizes[] = {
		{ 0, "0 bytes" },           { 1023, "1023 bytes" },   { 1024, "1.0 KiB" },
		{ MIB - 1, "1.0 MiB" },     { 40004242, "38.2 MiB" }, { 1023 * GIB, "1023.0 GiB" },
		{ UINT64_MAX, "16.0 EiB" },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++)
		ck_assert_str_eq(BASE_SIZE(sizes[i].bytes), sizes[i].shown);
}

TEST(tests, the_same_failure_in_other_words_keeps_what_it_is_about)
{
	struct base_error error = { 0 };

	base_fail_reason_with(&error, -ENOSPC, "free space", "it is full");
	base_error_space(&error, 2, 1);
	base_rephrase(&error, IOSHAPE_E_SKIPPED, "skipped: %s", error.sentence);
	ck_assert_int_eq(error.code, IOSHAPE_E_SKIPPED);
	ck_assert_str_eq(error.sentence, "skipped: it is full");
	ck_assert_str_eq(error.remedy, "free space");
	ck_assert_uint_eq(error.needed_bytes, 2);
}

TEST(tests, a_sentence_too_long_is_cut_but_not_its_reason)
{
	static char path[3 * BASE_ERROR_TEXT_BYTES];

	/* Around the length at which the code's text no longer fits, and far beyond it. */
	for (size_t length = BASE_ERROR_TEXT_BYTES - 64; length < sizeof(path) - 1;
	     length += length < BASE_ERROR_TEXT_BYTES + 64 ? 1 : 512) {
		struct base_error error = { 0 };

		memset(path, 'p', length);
		path[length] = 0;
		base_fail(&error, -EIO, "%s", path);
		ck_assert_int_eq(error.code, -EIO);
		ck_assert_uint_lt(strnlen(error.sentence, sizeof(error.sentence)),
				  sizeof(error.sentence));
		ck_assert_int_eq(error.sentence[0], 'p');
		ck_assert_str_eq(error.sentence + strlen(error.sentence) -
					 strlen(": Input/output error"),
				 ": Input/output error");
	}
}

TEST(tests, every_code_has_a_text)
{
	static const int unknown[] = { 1, -4095, -4096, -5000, -5010, INT32_MIN, INT32_MAX };

	ck_assert_str_eq(ioshape_strerror(0), "success");
	ck_assert_str_eq(ioshape_strerror(-ENOSPC), "No space left on device");
	for (int code = IOSHAPE_E_FORMAT; code >= IOSHAPE_E_UNUSABLE; code--) {
		ck_assert_ptr_nonnull(ioshape_strerror(code));
		ck_assert_str_ne(ioshape_strerror(code), "unknown error");
	}
	for (size_t i = 0; i < ARRAY_LENGTH(unknown); i++)
		ck_assert_str_eq(ioshape_strerror(unknown[i]), "unknown error");
}

struct heard {
	unsigned lines;
	enum ioshape_log_level level;
	char last[2 * BASE_ERROR_TEXT_BYTES];
};

static void listen(void *user, enum ioshape_log_level level, const char *message)
{
	struct heard *heard = user;

	heard->lines++;
	heard->level = level;
	snprintf(heard->last, sizeof(heard->last), "%s", message);
}

TEST(tests, the_log_passes_on_its_level_and_what_is_graver)
{
	struct heard heard = { 0 };
	struct base_log log = { listen, &heard, IOSHAPE_LOG_WARNING };

	base_log(&log, IOSHAPE_LOG_DEBUG, "no");
	base_log(&log, IOSHAPE_LOG_INFO, "no");
	ck_assert_uint_eq(heard.lines, 0);
	base_log(&log, IOSHAPE_LOG_WARNING, "%s %d", "yes", 1);
	ck_assert_uint_eq(heard.lines, 1);
	ck_assert_int_eq(heard.level, IOSHAPE_LOG_WARNING);
	ck_assert_str_eq(heard.last, "yes 1");
	base_log(NULL, IOSHAPE_LOG_ERROR, "to nobody");
	base_log(&(struct base_log){ 0 }, IOSHAPE_LOG_ERROR, "to nobody");
	base_log(&log, IOSHAPE_LOG_ERROR, "graver");
	ck_assert_uint_eq(heard.lines, 2);
	ck_assert_int_eq(heard.level, IOSHAPE_LOG_ERROR);
}

TEST(tests, a_log_line_too_long_is_cut)
{
	static char text[3 * BASE_ERROR_TEXT_BYTES];
	struct heard heard = { 0 };
	struct base_log log = { listen, &heard, IOSHAPE_LOG_DEBUG };

	memset(text, 't', sizeof(text) - 1);
	base_log(&log, IOSHAPE_LOG_INFO, "%s", text);
	ck_assert_uint_eq(strlen(heard.last), BASE_ERROR_TEXT_BYTES - 1);
}
