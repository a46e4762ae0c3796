/* SPDX-License-Identifier: Apache-2.0 */
/* Names of journal entries, and conversion between two clocks. */
#define _GNU_SOURCE
#include "support/check_main.h"
/* Included, because it tests static functions. */
#include "tier/tier.c"

#include <stdlib.h>
#include <string.h>

static struct test_case names = { .name = "names" };

static const struct named {
	const char *name;
	struct tier_entry entry;
} named[] = {
	{ "00000000000000000001", { .number = 1 } },
	{ "18446744073709551615", { .number = UINT64_MAX } },
	{ "00000000000000000007-5--3",
	  { .number = 7, .drained = true, .copy_ns = 5, .there_ns = -3 } },
	{ "00000000000000000007-1763928165123456789-9223372036854775807",
	  { .number = 7, .drained = true, .copy_ns = 1763928165123456789, .there_ns = INT64_MAX } },
};

LOOP_TEST(names, a_name_says_what_it_was_made_of, 0, (int)ARRAY_LENGTH(named))
{
	const struct named *one = &named[_i];
	char name[NAME_BYTES];
	struct tier_entry entry;

	entry_name(name, &one->entry);
	ck_assert_str_eq(name, one->name);
	ck_assert(parse_name(name, &entry));
	ck_assert_uint_eq(entry.number, one->entry.number);
	ck_assert_int_eq(entry.drained, one->entry.drained);
	ck_assert_int_eq(entry.copy_ns, one->entry.copy_ns);
	ck_assert_int_eq(entry.there_ns, one->entry.there_ns);
}

static const char *const no_names[] = {
	"",
	"1",
	"00000000000000000000",
	"+0000000000000000001",
	"00000000000000000001 ",
	"00000000000000000001-",
	"00000000000000000001-5",
	"00000000000000000001-5-",
	"00000000000000000001-5-3-",
	"00000000000000000001-05-3",
	"00000000000000000001-5-9223372036854775808",
	"18446744073709551616",
	"99999999999999999999",
	"journal",
};

LOOP_TEST(names, other_names_are_none, 0, (int)ARRAY_LENGTH(no_names))
{
	struct tier_entry entry;

	ck_assert(!parse_name(no_names[_i], &entry));
}

static const struct tier_entry told[] = {
	{ .path = (char[]){ "/a" } },
	{ .path = (char[]){ "/a b/\n/1 2 /c" }, .keep_last = 3, .keep_every = 1000 },
	{ .path = (char[]){ "/..a/.b/c.." }, .keep_last = UINT32_MAX, .keep_every = UINT64_MAX },
};

LOOP_TEST(names, a_text_says_what_it_was_made_of, 0, (int)ARRAY_LENGTH(told))
{
	char *text = entry_text(&told[_i]);
	struct tier_entry entry = { 0 };
	const char *path;

	ck_assert(parse_text(text, &entry, &path));
	ck_assert_str_eq(path, told[_i].path);
	ck_assert_uint_eq(entry.keep_last, told[_i].keep_last);
	ck_assert_uint_eq(entry.keep_every, told[_i].keep_every);
	free(text);
}

static const char *const no_texts[] = {
	"",
	"/a",
	"0 /a",
	"0 0",
	"0 0 ",
	"0 0 a",
	"0  0 /a",
	"-1 0 /a",
	"+1 0 /a",
	" 1 0 /a",
	"0 0 /",
	"0 0 /a/",
	"0 0 //a",
	"0 0 /./a",
	"0 0 /a/..",
	"4294967296 0 /a",
	"0 18446744073709551616 /a",
	"x 0 /a",
};

LOOP_TEST(names, other_texts_are_none, 0, (int)ARRAY_LENGTH(no_texts))
{
	struct tier_entry entry = { 0 };
	const char *path;

	ck_assert(!parse_text(no_texts[_i], &entry, &path));
}

#define S 1000000000ll
#define MS 1000000ll

/* A save at 100 s, and looks at the clocks from 200 s on. */
static const struct {
	int64_t before, there, after, expected;
} clocks[] = {
	/* The clocks may be one. */
	{ 200 * S + 1, 200 * S + 2, 200 * S + 3, 100 * S },
	{ 200 * S + 5 * MS, 200 * S + 1, 200 * S + 6 * MS, 100 * S },
	{ 200 * S + 1, 200 * S + 9 * MS, 200 * S + 2, 100 * S },
	/* One clock that counts whole seconds. */
	{ 200 * S + 999 * MS, 200 * S, 201 * S, 100 * S },
	{ 200 * S + 999 * MS, 201 * S, 201 * S + 1, 100 * S },
	/* Another clock. */
	{ 200 * S + 1, 260 * S + 1, 200 * S + 1, 160 * S },
	{ 200 * S + 1, 150 * S + 1, 200 * S + 1, 50 * S },
	{ 200 * S + 1, 198 * S, 200 * S, 98 * S },
	/* If looking took long, the earlier result is used. */
	{ 200 * S + 1, 270 * S + 1, 210 * S + 1, 160 * S },
	/* Our clock was set back after the save: the result is not later than now. */
	{ 90 * S + 1, 90 * S + 2, 90 * S + 3, 90 * S + 3 },
	{ 90 * S + 1, 10 * S + 2, 90 * S + 3, 10 * S + 2 },
};

LOOP_TEST(names, a_time_is_read_by_the_other_clock, 0, (int)ARRAY_LENGTH(clocks))
{
	ck_assert_int_eq(time_there(100 * S, clocks[_i].before, clocks[_i].there, clocks[_i].after),
			 clocks[_i].expected);
}
