/* SPDX-License-Identifier: Apache-2.0 */
/* What is JSON and what is not, and what becomes of it. */
#include "support/check_main.h"
#include "zip/json.h"

#include <ioshape/ioshape.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct zip_json over(const char *text)
{
	return (struct zip_json){ .text = text, .bytes = strlen(text) };
}

static int skip_all(const char *text, size_t bytes)
{
	struct zip_json json = { .text = text, .bytes = bytes };
	int ret = zip_json_skip(&json);

	if (!ret)
		ret = zip_json_end(&json);
	ck_assert_uint_le(json.at, bytes);
	ck_assert_int_eq(!ret, !json.problem);
	if (!ret)
		ck_assert_uint_eq(json.depth, 0);
	return ret;
}

static const char *const good[] = {
	"0",
	"-0",
	"12.5e-3",
	"1E+400",
	"true",
	" false ",
	"\t\r\nnull\n",
	"\"\"",
	"\"text\"",
	"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e4\\ud83d\\ude00\"",
	"\"\xc3\xa4\xf0\x9f\x98\x80\x7f\"",
	"[]",
	"[ ]",
	"[1, [2], {\"a\": 3}]",
	"{}",
	"{ }",
	"{\"a\":1,\"b\":{\"a\":2},\"\":3}",
	"123456789012345678901234567890",
	"[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]",
};

static const char *const bad[] = {
	"",
	" ",
	"tru",
	"True",
	"nullnull",
	"nul",
	"01",
	"-",
	"-a",
	"+1",
	"1.",
	".5",
	"1e",
	"1e+",
	"0x10",
	"NaN",
	"Infinity",
	"1 2",
	"'a'",
	"\"",
	"\"\\",
	"\"\\\"",
	"\"\\x\"",
	"\"\\u12\"",
	"\"\\u12g4\"",
	"\"\\u0000\"",
	"\"\\ud83d\"",
	"\"\\ud83dx\"",
	"\"\\ud83d\\u0041\"",
	"\"\\ude00\"",
	"\"\\ud83d\\ud83d\"",
	"\"\n\"",
	"\"\x01\"",
	"\"\xff\"",
	"\"\xc3\"",
	"\"\xc0\x80\"",
	"\"\xed\xa0\x80\"",
	"\"\xc3\\u00a4\"",
	"[",
	"]",
	"[1",
	"[1,",
	"[1,]",
	"[,1]",
	"[1 2]",
	"[1}",
	"{",
	"}",
	"{1:2}",
	"{\"a\"}",
	"{\"a\":}",
	"{\"a\":1,}",
	"{\"a\":1 \"b\":2}",
	"{\"a\":1]",
	"{a:1}",
	"{\"a\":1,\"a\":2}",
	"{\"a\":1,\"\\u0061\":2}",
	"[{\"x\":{\"b\":1,\"c\":1,\"b\":1}}]",
	"/* */1",
	"1 // one",
	"\357\273\2771",
};

static struct test_case tests = { .name = "values" };

TEST(tests, json_is_what_the_standard_says)
{
	for (size_t i = 0; i < ARRAY_LENGTH(good); i++)
		ck_assert_msg(!skip_all(good[i], strlen(good[i])), "%s", good[i]);
	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++)
		ck_assert_msg(skip_all(bad[i], strlen(bad[i])) == IOSHAPE_E_DAMAGED, "%s", bad[i]);
	ck_assert_int_eq(skip_all("1\0", 2), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(skip_all("\"\0\"", 3), IOSHAPE_E_DAMAGED);
}

/* In memory of their exact length, so that the sanitizers see a look beyond it. */
TEST(tests, what_is_cut_short_is_never_read_beyond)
{
	for (size_t i = 0; i < ARRAY_LENGTH(good); i++) {
		for (size_t bytes = 0; bytes < strlen(good[i]); bytes++) {
			char *cut = malloc(bytes + !bytes);

			memcpy(cut, good[i], bytes);
			/* A number may end anywhere. */
			skip_all(cut, bytes);
			free(cut);
		}
	}
}

TEST(tests, nesting_members_and_names_have_limits)
{
	char text[4096] = "", name[ZIP_JSON_MAX_NAME_BYTES + 8];
	struct zip_json json;

	memset(text, '[', sizeof(text) - 1);
	ck_assert_int_eq(skip_all(text, strlen(text)), IOSHAPE_E_LIMIT);
	memset(text, 0, sizeof(text));
	for (unsigned i = 0; i <= ZIP_JSON_MAX_DEPTH; i++)
		strcat(text, "{\"a\":");
	ck_assert_int_eq(skip_all(text, strlen(text)), IOSHAPE_E_LIMIT);

	for (unsigned members = ZIP_JSON_MAX_MEMBERS; members < ZIP_JSON_MAX_MEMBERS + 2;
	     members++) {
		strcpy(text, "{");
		for (unsigned i = 0; i < members; i++)
			sprintf(text + strlen(text), "%s\"%u\":0", i ? "," : "", i);
		strcat(text, "}");
		ck_assert_int_eq(skip_all(text, strlen(text)),
				 members > ZIP_JSON_MAX_MEMBERS ? IOSHAPE_E_LIMIT : 0);
	}
	for (unsigned more = 0; more < 2; more++) {
		memset(name, 'n', sizeof(name));
		name[ZIP_JSON_MAX_NAME_BYTES + more] = '\0';
		sprintf(text, "{\"%s\":0}", name);
		ck_assert_int_eq(skip_all(text, strlen(text)), more ? IOSHAPE_E_LIMIT : 0);
	}
	json = over("\"123456\"");
	ck_assert_int_eq(zip_json_string(&json, name, 7), 0);
	ck_assert_str_eq(name, "123456");
	json = over("\"123456\"");
	ck_assert_int_eq(zip_json_string(&json, name, 6), IOSHAPE_E_LIMIT);
	json = over("\"12345\\u00e4\"");
	ck_assert_int_eq(zip_json_string(&json, name, 7), IOSHAPE_E_LIMIT);
}

TEST(tests, strings_are_decoded)
{
	static const char *const cases[][2] = {
		{ "\"\"", "" },
		{ " \"a\\\"\\\\\\/\\b\\f\\n\\r\\tz\"", "a\"\\/\b\f\n\r\tz" },
		{ "\"\\u0041\\u00e4\\u20AC\\ud83d\\uDE00\"",
		  "A\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80" },
		{ "\"\\u007f\\u0080\\u07ff\\u0800\\uffff\\udbff\\udfff\"",
		  "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf4\x8f\xbf\xbf" },
	};
	char text[64];

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct zip_json json = over(cases[i][0]);

		ck_assert_int_eq(zip_json_string(&json, text, sizeof(text)), 0);
		ck_assert_str_eq(text, cases[i][1]);
	}
}

TEST(tests, strings_come_back)
{
	char all[400], text[400];
	struct base_buffer out = { 0 };
	struct zip_json json;
	size_t bytes = 0;

	for (int c = 1; c < 128; c++)
		all[bytes++] = (char)c;
	strcpy(all + bytes, "\xc3\xa4\xf0\x9f\x98\x80");
	ck_assert_int_eq(zip_json_put_string(&out, all), 0);
	ck_assert_int_eq(skip_all((char *)out.data, out.bytes), 0);
	json = (struct zip_json){ .text = (char *)out.data, .bytes = out.bytes };
	ck_assert_int_eq(zip_json_string(&json, text, sizeof(text)), 0);
	ck_assert_str_eq(text, all);
	base_buffer_free(&out);
}

TEST(tests, numbers_are_whole_and_of_64_bits)
{
	static const struct {
		const char *text;
		bool fits_u64, fits_i64;
		uint64_t value;
	} cases[] = {
		{ "0", true, true, 0 },
		{ " 42 ", true, true, 42 },
		{ "9223372036854775807", true, true, INT64_MAX },
		{ "9223372036854775808", true, false, (uint64_t)INT64_MAX + 1 },
		{ "18446744073709551615", true, false, UINT64_MAX },
		{ "18446744073709551616", false, false, 0 },
		{ "99999999999999999999999", false, false, 0 },
		{ "-1", false, true, UINT64_MAX },
		{ "-9223372036854775808", false, true, (uint64_t)INT64_MIN },
		{ "-9223372036854775809", false, false, 0 },
		{ "00", false, false, 0 },
		{ "1.0", false, false, 0 },
		{ "1e3", false, false, 0 },
		{ "1E3", false, false, 0 },
		{ "\"1\"", false, false, 0 },
		{ "", false, false, 0 },
		{ "true", false, false, 0 },
		{ "- 1", false, false, 0 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct zip_json json = over(cases[i].text);
		uint64_t number;
		int64_t whole;

		ck_assert_int_eq(zip_json_u64(&json, &number),
				 cases[i].fits_u64 ? 0 : IOSHAPE_E_DAMAGED);
		if (cases[i].fits_u64)
			ck_assert_uint_eq(number, cases[i].value);
		json = over(cases[i].text);
		ck_assert_int_eq(zip_json_i64(&json, &whole),
				 cases[i].fits_i64 ? 0 : IOSHAPE_E_DAMAGED);
		if (cases[i].fits_i64)
			ck_assert_int_eq(whole, (int64_t)cases[i].value);
	}
}

TEST(tests, true_and_false_are_told_apart)
{
	struct zip_json json = over(" true");
	bool value = false;

	ck_assert_int_eq(zip_json_bool(&json, &value), 0);
	ck_assert(value);
	json = over("false");
	ck_assert_int_eq(zip_json_bool(&json, &value), 0);
	ck_assert(!value);
	json = over("1");
	ck_assert_int_eq(zip_json_bool(&json, &value), IOSHAPE_E_DAMAGED);
}

TEST(tests, values_that_nobody_knows_are_limited)
{
	const size_t bytes = 2 * (size_t)ZIP_JSON_MAX_SKIPPED;
	char *text = malloc(bytes + 2);
	struct zip_json json = { .text = text };

	for (size_t i = 0; i < bytes; i += 2)
		memcpy(text + i, i ? ",1" : "[1", 2);
	memcpy(text + bytes, ",]", 2);
	/* With the array itself there is one too many. */
	json.bytes = bytes + 2;
	ck_assert_int_eq(zip_json_skip(&json), IOSHAPE_E_LIMIT);
	memcpy(text + bytes - 2, "]", 1);
	json = (struct zip_json){ .text = text, .bytes = bytes - 1 };
	ck_assert_int_eq(zip_json_skip(&json), 0);
	free(text);
}

int main(void)
{
	return check_run("zip/json");
}
