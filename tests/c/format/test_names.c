/* SPDX-License-Identifier: Apache-2.0 */
/* Names: the hash table, UTF-8, and names in messages. */
#include "format/format.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MANY 20000u

static struct test_case tests = { .name = "names" };

TEST(tests, every_name_is_found_where_it_was_put)
{
	static char names[MANY][16];
	const unsigned many = scratch_rounds(MANY);
	struct format_names *table;
	uint64_t position;

	ck_assert_int_eq(format_names_new(&table, 0), 0); /* 0, so that the table has to grow */
	for (uint64_t i = 0; i < many; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%u", (unsigned)i);
		ck_assert(!format_names_find(table, names[i], strlen(names[i]), &position));
		ck_assert_int_eq(format_names_add(table, names[i], strlen(names[i]), i * 7), 0);
	}
	for (uint64_t i = 0; i < many; i++) {
		ck_assert(format_names_find(table, names[i], strlen(names[i]), &position));
		ck_assert_uint_eq(position, i * 7);
		ck_assert_int_eq(format_names_add(table, names[i], strlen(names[i]), 0), -EEXIST);
	}
	ck_assert(!format_names_find(table, "data/x", 6, &position));
	format_names_free(table);
}

/* Names of all lengths around the hash's word size, each a prefix of the next. */
TEST(tests, names_that_begin_alike_are_told_apart)
{
	static char letters[64];
	struct format_names *table;
	uint64_t position;

	memset(letters, 'a', sizeof(letters));
	ck_assert_int_eq(format_names_new(&table, 4), 0);
	for (size_t length = 0; length <= sizeof(letters); length++)
		ck_assert_int_eq(format_names_add(table, letters, length, length), 0);
	for (size_t length = 0; length <= sizeof(letters); length++) {
		ck_assert(format_names_find(table, letters, length, &position));
		ck_assert_uint_eq(position, length);
	}
	format_names_free(table);
	format_names_free(NULL);
}

/* Decodes UTF-8 by its definition: bits into a code point, then the rules about code points. */
static bool is_utf8_by_definition(const uint8_t *text, size_t bytes)
{
	static const uint32_t least[] = { 0, 1, 0x80, 0x800, 0x10000 };

	for (size_t i = 0, length; i < bytes; i += length) {
		uint32_t code = text[i];

		length = code < 0x80     ? 1 :
			 code >> 5 == 6  ? 2 :
			 code >> 4 == 14 ? 3 :
			 code >> 3 == 30 ? 4 :
					   0;
		if (!length || length > bytes - i)
			return false;
		if (length > 1)
			code &= 0xffu >> (length + 1);
		for (size_t j = 1; j < length; j++) {
			if (text[i + j] >> 6 != 2)
				return false;
			code = code << 6 | (text[i + j] & 0x3fu);
		}
		if (code < least[length] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff))
			return false;
	}
	return true;
}

TEST(tests, utf8_is_what_the_definition_says)
{
	/*
	 * The second byte decides what the first one leaves open; later bytes only have to be
	 * continuations.
	 */
	static const uint8_t later[] = { 0x00, 0x41, 0x7f, 0x80, 0xbf, 0xc0, 0xff };
	uint8_t text[4];
	/*
	 * 29 is coprime to 256, so runs under valgrind still try every value of either byte.
	 */
	const uint32_t step = scratch_under_valgrind() ? 29 : 1;
	unsigned wrong = 0;

	ck_assert(format_utf8_valid("", 0));
	ck_assert(format_utf8_valid("Zürich/☃/🚂", strlen("Zürich/☃/🚂")));
	for (uint32_t first = 0; first < 0x10000; first += step) {
		text[0] = (uint8_t)(first >> 8);
		text[1] = (uint8_t)first;
		for (size_t i = 0; i < ARRAY_LENGTH(later) * ARRAY_LENGTH(later); i++) {
			text[2] = later[i / ARRAY_LENGTH(later)];
			text[3] = later[i % ARRAY_LENGTH(later)];
			for (size_t bytes = 1; bytes <= 4; bytes++)
				wrong += format_utf8_valid((char *)text, bytes) !=
					 is_utf8_by_definition(text, bytes);
		}
	}
	ck_assert_uint_eq(wrong, 0);
}

/* Messages go to terminals and logs, so names must not contain escapes or be very long. */
TEST(tests, shown_names_are_short_and_harmless)
{
	static const char *const pairs[][2] = {
		{ "data/0", "data/0" },
		{ "", "" },
		{ "Zürich ☃", "Zürich ☃" },
		{ "a\x1b[31mb\nc\x7f", "a?[31mb?c?" },
		{ "\xc2\x9b"
		  "31m",
		  "?31m" }, /* this escape as one character, CSI */
		{ "a\xff\xc3", "a??" },
	};
	char shown[FORMAT_SHOWN_NAME_BYTES], name[5000];
	uint64_t seed = 2;

	for (size_t i = 0; i < ARRAY_LENGTH(pairs); i++)
		ck_assert_str_eq(format_show_name(shown, pairs[i][0], strlen(pairs[i][0])),
				 pairs[i][1]);
	for (unsigned i = 0; i < scratch_rounds(5000); i++) {
		size_t bytes = test_random_below(&seed, 300);

		test_random_fill(&seed, name, bytes);
		format_show_name(shown, name, bytes);
		ck_assert_uint_lt(strlen(shown), FORMAT_SHOWN_NAME_BYTES);
		ck_assert(format_utf8_valid(shown, strlen(shown)));
		for (const char *at = shown; *at; at++)
			ck_assert((uint8_t)*at >= 0x20 && *at != 0x7f);
	}
	memset(name, 'x', sizeof(name));
	format_show_name(shown, name, sizeof(name));
	ck_assert_str_eq(shown + strlen(shown) - 4, "x...");
}
