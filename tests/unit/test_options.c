/* SPDX-License-Identifier: Apache-2.0 */
/* Structs of other versions of the headers, and settings from the environment. */
#include "base/base.h"
#include "support/check_main.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What this version of the library knows, and what a later header might hold. */
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

START_TEST(null_means_the_defaults)
{
	struct base_error error = { 0 };
	struct known into;

	memset(&into, 0xff, sizeof(into));
	ck_assert_int_eq(base_take_options(&into, sizeof(into), NULL, "known", &error), 0);
	ck_assert_mem_eq(&into, &nothing, sizeof(into));
}
END_TEST

START_TEST(a_struct_of_older_headers_is_filled_up_with_zeros)
{
	struct base_error error = { 0 };
	struct known into,
		from = { .size = sizeof(size_t) + sizeof(uint64_t), .first = 7, .second = 8 };

	memset(&into, 0xff, sizeof(into));
	ck_assert_int_eq(base_take_options(&into, sizeof(into), &from, "known", &error), 0);
	ck_assert_uint_eq(into.size, sizeof(into));
	ck_assert_uint_eq(into.first, 7);
	ck_assert_uint_eq(into.second, 0);

	from.size = sizeof(size_t); /* nothing but the size */
	ck_assert_int_eq(base_take_options(&into, sizeof(into), &from, "known", &error), 0);
	ck_assert_mem_eq(&into, &nothing, sizeof(into));
}
END_TEST

START_TEST(a_struct_of_newer_headers_is_taken_if_what_is_new_is_zero)
{
	struct newer from = { .known = { sizeof(from), 7, 8 } };
	struct base_error error = { 0 };
	struct known into;

	ck_assert_int_eq(base_take_options(&into, sizeof(into), &from, "known", &error), 0);
	ck_assert_uint_eq(into.size, sizeof(into));
	ck_assert_uint_eq(into.first, 7);
	ck_assert_uint_eq(into.second, 8);
}
END_TEST

START_TEST(a_field_that_is_not_known_is_refused_wherever_it_lies)
{
	for (size_t i = sizeof(struct known); i < sizeof(struct newer); i++) {
		struct newer from = { .known = { sizeof(from), 7, 8 } };
		struct base_error error = { 0 };
		struct known into;

		((char *)&from)[i] = 1;
		ck_assert_int_eq(
			base_take_options(&into, sizeof(into), &from, "ioshape_known", &error),
			-EINVAL);
		ck_assert_ptr_nonnull(strstr(error.text, "ioshape_known"));
		ck_assert_ptr_nonnull(strstr(error.text, ioshape_version()));
	}
}
END_TEST

START_TEST(a_size_that_cannot_be_is_refused)
{
	static const size_t sizes[] = { 0, 1, sizeof(size_t) - 1, 4097, SIZE_MAX, (size_t)1 << 63 };
	struct known into;

	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
		struct known from = { .size = sizes[i] };
		struct base_error error = { 0 };

		ck_assert_int_eq(
			base_take_options(&into, sizeof(into), &from, "ioshape_known", &error),
			-EINVAL);
		ck_assert_ptr_nonnull(strstr(error.text, "ioshape_known"));
		ck_assert_int_eq(base_give_struct(&from, &nothing, sizeof(nothing), "known", NULL),
				 -EINVAL);
		ck_assert_uint_eq(from.size, sizes[i]);
	}
}
END_TEST

START_TEST(a_struct_that_is_filled_keeps_to_the_callers_size)
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
END_TEST

START_TEST(sizes_are_numbers_with_at_most_one_binary_suffix)
{
	static const struct {
		const char *text;
		uint64_t value;
	} good[] = {
		{ "0", 0 },
		{ "1", 1 },
		{ "007", 7 },
		{ "4194304", 4194304 },
		{ "4K", 4096 },
		{ "4k", 4096 },
		{ "4M", 4194304 },
		{ "4m", 4194304 },
		{ "3G", 3ull << 30 },
		{ "3g", 3ull << 30 },
		{ "2T", 2ull << 40 },
		{ "2t", 2ull << 40 },
		{ "18446744073709551615", UINT64_MAX },
		{ "16777215T", 16777215ull << 40 },
	};
	uint64_t value;

	for (size_t i = 0; i < ARRAY_LENGTH(good); i++) {
		ck_assert_msg(!base_parse_bytes(good[i].text, &value), "%s", good[i].text);
		ck_assert_uint_eq(value, good[i].value);
	}
}
END_TEST

START_TEST(what_is_no_size_is_refused)
{
	static const char *const bad[] = { "",    " ",   " 1",   "1 ",  "-1",   "+1",
					   "K",   "1KB", "1KiB", "1P",  "1.5M", "0x10",
					   "1e3", "1M1", "M1",   "one", "1 M",  "\xff" };
	static const char *const large[] = { "18446744073709551616", "99999999999999999999999",
					     "16777216T", "17179869184G", "18446744073709551615K" };
	uint64_t value = 77;

	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++)
		ck_assert_msg(base_parse_bytes(bad[i], &value) == -EINVAL, "\"%s\"", bad[i]);
	for (size_t i = 0; i < ARRAY_LENGTH(large); i++)
		ck_assert_msg(base_parse_bytes(large[i], &value) == -ERANGE, "\"%s\"", large[i]);
	ck_assert_uint_eq(value, 77);
}
END_TEST

START_TEST(an_unset_or_empty_variable_changes_nothing)
{
	static const char *const words[] = { "zero", "one", NULL };
	uint64_t bytes = 5;
	uint32_t count = 6;
	int choice = 7;

	for (int set = 0; set < 2; set++) {
		if (set)
			setenv("IOSHAPE_TEST", "", 1);
		else
			unsetenv("IOSHAPE_TEST");
		ck_assert_int_eq(base_env_bytes("IOSHAPE_TEST", &bytes, NULL), 0);
		ck_assert_int_eq(base_env_count("IOSHAPE_TEST", &count, NULL), 0);
		ck_assert_int_eq(base_env_choice("IOSHAPE_TEST", words, &choice, NULL), 0);
	}
	ck_assert_uint_eq(bytes, 5);
	ck_assert_uint_eq(count, 6);
	ck_assert_int_eq(choice, 7);
}
END_TEST

START_TEST(variables_are_read)
{
	static const char *const words[] = { "zero", "one", "two", NULL };
	uint64_t bytes;
	uint32_t count;
	int choice;

	setenv("IOSHAPE_TEST", "64M", 1);
	ck_assert_int_eq(base_env_bytes("IOSHAPE_TEST", &bytes, NULL), 0);
	ck_assert_uint_eq(bytes, 64 * MIB);
	setenv("IOSHAPE_TEST", "4294967295", 1);
	ck_assert_int_eq(base_env_count("IOSHAPE_TEST", &count, NULL), 0);
	ck_assert_uint_eq(count, UINT32_MAX);
	for (int i = 0; words[i]; i++) {
		setenv("IOSHAPE_TEST", words[i], 1);
		ck_assert_int_eq(base_env_choice("IOSHAPE_TEST", words, &choice, NULL), 0);
		ck_assert_int_eq(choice, i);
	}
}
END_TEST

START_TEST(a_variable_that_makes_no_sense_is_named_with_its_value_and_what_is_allowed)
{
	static const char *const words[] = { "wait", "refuse", NULL };
	struct base_error error = { 0 };
	uint64_t bytes = 5;
	uint32_t count = 6;
	int choice = 7;

	setenv("IOSHAPE_TEST", "lots", 1);
	ck_assert_int_eq(base_env_bytes("IOSHAPE_TEST", &bytes, &error), -EINVAL);
	ck_assert_ptr_nonnull(strstr(error.text, "IOSHAPE_TEST is \"lots\""));
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(base_env_count("IOSHAPE_TEST", &count, &error), -EINVAL);
	ck_assert_ptr_nonnull(strstr(error.text, "IOSHAPE_TEST is \"lots\""));
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(base_env_choice("IOSHAPE_TEST", words, &choice, &error), -EINVAL);
	ck_assert_ptr_nonnull(strstr(error.text, "IOSHAPE_TEST is \"lots\""));
	ck_assert_ptr_nonnull(strstr(error.text, "wait, refuse"));
	memset(&error, 0, sizeof(error));
	setenv("IOSHAPE_TEST", "4294967296", 1);
	ck_assert_int_eq(base_env_count("IOSHAPE_TEST", &count, &error), -EINVAL);
	ck_assert_uint_eq(bytes, 5);
	ck_assert_uint_eq(count, 6);
	ck_assert_int_eq(choice, 7);
}
END_TEST

START_TEST(neither_a_long_value_nor_many_choices_overflow_the_sentence)
{
	static const char *words[200];
	static char value[8192];
	struct base_error error = { 0 };
	int choice = 7;

	for (size_t i = 0; i + 1 < ARRAY_LENGTH(words); i++)
		words[i] = "a-choice-with-a-name";
	memset(value, 'v', sizeof(value) - 1);
	setenv("IOSHAPE_TEST", value, 1);
	ck_assert_int_eq(base_env_choice("IOSHAPE_TEST", words, &choice, &error), -EINVAL);
	ck_assert_uint_lt(strlen(error.text), BASE_ERROR_TEXT_BYTES);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("base/options");
	TCase *structs = tcase_create("structs"), *environment = tcase_create("environment");

	tcase_add_test(structs, null_means_the_defaults);
	tcase_add_test(structs, a_struct_of_older_headers_is_filled_up_with_zeros);
	tcase_add_test(structs, a_struct_of_newer_headers_is_taken_if_what_is_new_is_zero);
	tcase_add_test(structs, a_field_that_is_not_known_is_refused_wherever_it_lies);
	tcase_add_test(structs, a_size_that_cannot_be_is_refused);
	tcase_add_test(structs, a_struct_that_is_filled_keeps_to_the_callers_size);
	suite_add_tcase(suite, structs);
	tcase_add_test(environment, sizes_are_numbers_with_at_most_one_binary_suffix);
	tcase_add_test(environment, what_is_no_size_is_refused);
	tcase_add_test(environment, an_unset_or_empty_variable_changes_nothing);
	tcase_add_test(environment, variables_are_read);
	tcase_add_test(environment,
		       a_variable_that_makes_no_sense_is_named_with_its_value_and_what_is_allowed);
	tcase_add_test(environment, neither_a_long_value_nor_many_choices_overflow_the_sentence);
	suite_add_tcase(suite, environment);
	return check_main(suite);
}
