/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requested layouts: the setting, the rule by size, the number of writers, and requests to servers
 * and their answers. Also files that cannot be created as requested.
 */
#define _GNU_SOURCE
/* Included, because it tests static functions. */
#include "fs/layout.c"
#undef MOST_STRIPES
#include "fs/lustre.c"
#undef PATH_BYTES
#include "fs/storage.c"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- The setting ----------------------------------------------------------------------------- */

static struct fs_layout layout_of(const struct fs_layout_request *request)
{
	return (struct fs_layout){ .count = 1, .mirrors = 1, .components = { request->component } };
}

/* Returns a parsed request as text; "" if it is refused. */
static const char *parsed(const char *text)
{
	static char words[256];
	struct fs_layout_request request;
	struct fs_layout layout;

	if (fs_layout_request_parse(text, &request, NULL))
		return "";
	layout = layout_of(&request);
	if (request.kind == FS_REQUEST_LAYOUT)
		fs_layout_text(&layout, words, sizeof(words));
	else
		strcpy(words, request.kind == FS_REQUEST_AUTO ? "auto" : "directory");
	return words;
}

static const struct {
	const char *text, *words;
} understood[] = {
	{ "auto", "auto" },
	{ " auto\n", "auto" },
	{ "directory", "directory" },
	{ "stripe_count=8,stripe_size=4M,pool=flash", "8 x 4M, pool flash" },
	{ "  stripe_size = 4M ,\tstripe_count = 8 ", "8 x 4M" },
	{ "stripe_count=all", "all x default" },
	{ "stripe_count=2000", "2000 x default" },
	{ "stripe_size=64K", "default x 64K" },
	{ "stripe_size=65536", "default x 64K" },
	{ "pool=fifteen-letters", "default x default, pool fifteen-letters" },
	{ "pool=A_b.9-", "default x default, pool A_b.9-" },
};

static struct test_case pure = { .name = "pure" };

LOOP_TEST(pure, a_request_is_understood, 0, ARRAY_LENGTH(understood))
{
	ck_assert_str_eq(parsed(understood[_i].text), understood[_i].words);
}

static const char *const refused[] = {
	"",
	"automatic",
	"auto,stripe_count=8",
	"stripes=8",
	"Stripe_Count=8",
	"stripe_count=8,",
	"stripe_count=0",
	"stripe_count=2001",
	"stripe_count=-1",
	"stripe_count=+1",
	"stripe_count=8x",
	"stripe_count=",
	"stripe_count=99999999999999999999",
	"stripe_size=100K",
	"stripe_size=1",
	"stripe_size=0",
	"stripe_size=4G",
	"stripe_size=4MB",
	"stripe_count=8,stripe_count=9",
	"pool=",
	"pool=sixteen--letters",
	"pool=fla/sh",
	"pool=fla sh",
	"to=100M,stripe_count=1",
	"stripe_count=1;stripe_count=2",
	"to=100M,stripe_count=1;stripe_count=8",
};

LOOP_TEST(pure, a_mistake_in_a_request_is_refused, 0, ARRAY_LENGTH(refused))
{
	struct base_error error = { 0 };
	struct fs_layout_request request;

	ck_assert_int_eq(fs_layout_request_parse(refused[_i], &request, &error), -EINVAL);
	ck_assert_int_eq(error.code, -EINVAL);
	ck_assert_str_ne(error.remedy, "");
}

TEST(pure, a_mistake_is_named_wording)
{
	struct base_error error = { 0 };
	struct fs_layout_request request;

	ck_assert_int_eq(fs_layout_request_parse("stripe_count=0", &request, &error), -EINVAL);
	ck_assert_str_eq(
		error.sentence,
		"cannot use the layout \"stripe_count=0\": \"0\" is not a valid stripe_count");
	ck_assert_str_eq(error.remedy, "give 1 to 2000, or all");
}

/* Pieces of requests in random order. */
TEST(pure, any_text_is_a_request_or_a_mistake)
{
	static const char *const pieces[] = {
		"auto",
		"directory",
		"stripe_count=",
		"stripe_size=",
		"pool=",
		"all",
		"1",
		"8",
		"64K",
		"1M",
		"4G",
		"p",
		"=",
		",",
		";",
		" ",
		"-",
		"\xff",
	};
	unsigned taken = 0;
	uint64_t random = 7;

	for (int round = 0; round < 20000; round++) {
		uint64_t count = test_random_below(&random, 12);
		char text[200] = "";
		struct fs_layout_request request;
		int ret;

		if (round % 2)
			strcpy(text, "stripe_size=64K,pool=");
		for (uint64_t i = 0; i < count; i++)
			strcat(text, pieces[test_random_below(&random, ARRAY_LENGTH(pieces))]);
		ret = fs_layout_request_parse(text, &request, NULL);
		REQUIRE(ret == 0 || ret == -EINVAL);
		if (ret || request.kind != FS_REQUEST_LAYOUT)
			continue;
		taken++;
		REQUIRE(request.component.end == UINT64_MAX);
	}
	ck_assert_uint_gt(taken, 10);
}

TEST(pure, a_request_that_is_too_long_is_refused)
{
	static char text[70000];
	struct fs_layout_request request;

	memset(text, ';', sizeof(text) - 1);
	ck_assert_int_eq(fs_layout_request_parse(text, &request, NULL), -EINVAL);
}

/* ---- The rule -------------------------------------------------------------------------------- */

#define ANY UINT64_MAX
#define ONE_COMPONENT(stripes, bytes)                                                              \
	{                                                                                          \
		.count = 1, .mirrors = 1, .components = {                                          \
			{ .end = UINT64_MAX, .stripe_count = stripes, .stripe_bytes = bytes }      \
		}                                                                                  \
	}

static const struct choice {
	const char *name, *request;
	struct fs_facts facts;
	const char *asked; /* NULL: no request */
} choices[] = {
	/* By size, in a directory with one stripe. */
	{ "100 MiB", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 100, 100 * MIB, 1 }, NULL },
	{ "more", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 100, 100 * MIB + 1, 1 }, "8 x 1M" },
	{ "10 GiB", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 100, 10 * GIB, 1 }, "8 x 1M" },
	{ "more", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 100, 10 * GIB + 1, 1 }, "16 x 1M" },
	{ "100 GiB", "auto", { FS_LUSTRE, ONE_COMPONENT(8, MIB), 100, 100 * GIB, 1 }, "16 x 1M" },
	{ "more", "auto", { FS_LUSTRE, ONE_COMPONENT(8, MIB), 100, 100 * GIB + 1, 1 }, "32 x 1M" },
	{ "huge", "auto", { FS_LUSTRE, ONE_COMPONENT(8, MIB), 0, UINT64_MAX, 0 }, "32 x 1M" },
	/* Limited by targets, and by files at a time. */
	{ "4 targets", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 4, GIB, 1 }, "4 x 1M" },
	{ "1 target", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 1, GIB, 1 }, NULL },
	{ "4 files", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 16, GIB, 4 }, "4 x 1M" },
	{ "3 files", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 16, GIB, 3 }, "5 x 1M" },
	{ "more files than targets",
	  "auto",
	  { FS_LUSTRE, ONE_COMPONENT(1, MIB), 8, GIB, 64 },
	  NULL },
	{ "few files", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 64, GIB, 2 }, "8 x 1M" },
	/* The directory's layout. */
	{ "wide enough", "auto", { FS_LUSTRE, ONE_COMPONENT(8, MIB), 64, GIB, 1 }, NULL },
	{ "all", "auto", { FS_LUSTRE, ONE_COMPONENT(FS_ALL_TARGETS, MIB), 64, GIB, 1 }, NULL },
	{ "tiny stripes", "auto", { FS_LUSTRE, ONE_COMPONENT(1, 64 * KIB), 64, GIB, 1 }, "8 x 4M" },
	{ "large stripes",
	  "auto",
	  { FS_LUSTRE, ONE_COMPONENT(2, 64 * MIB), 64, GIB, 1 },
	  "8 x 64M" },
	{ "its pool",
	  "auto",
	  { FS_LUSTRE,
	    { .count = 1,
	      .mirrors = 1,
	      .components = { { .end = ANY, .stripe_count = 1, .pool = "p" } } },
	    64,
	    GIB,
	    1 },
	  "8 x default, pool p" },
	{ "progressive",
	  "auto",
	  { FS_LUSTRE,
	    { .count = 2,
	      .mirrors = 1,
	      .components = { { .end = MIB, .stripe_count = 1 },
			      { .begin = MIB, .end = ANY, .stripe_count = 2 } } },
	    64,
	    GIB,
	    1 },
	  NULL },
	{ "mirrored",
	  "auto",
	  { FS_LUSTRE,
	    { .count = 1, .mirrors = 2, .components = { { .end = ANY, .stripe_count = 1 } } },
	    64,
	    GIB,
	    1 },
	  NULL },
	{ "nothing told", "auto", { FS_LUSTRE, { 0 }, 64, GIB, 1 }, "8 x default" },
	{ "nothing told", "auto", { FS_BEEGFS, { 0 }, 0, GIB, 1 }, "8 x default" },
	{ "BeeGFS, small", "auto", { FS_BEEGFS, { 0 }, 0, 50 * MIB, 1 }, NULL },
	{ "size unknown", "auto", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 64, 0, 1 }, NULL },
	{ "CephFS", "auto", { FS_CEPH, ONE_COMPONENT(1, 4 * MIB), 0, GIB, 1 }, NULL },
	{ "ext4", "auto", { FS_EXT, { 0 }, 0, GIB, 1 }, NULL },
	/* Explicit requests. */
	{ "ext4", "stripe_count=8", { FS_EXT, { 0 }, 0, GIB, 1 }, NULL },
	{ "NFS", "stripe_count=8", { FS_NFS, { 0 }, 0, GIB, 1 }, NULL },
	{ "none", "directory", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 64, GIB, 1 }, NULL },
	{ "count", "stripe_count=4", { FS_LUSTRE, ONE_COMPONENT(1, MIB), 64, GIB, 1 }, "4 x 1M" },
	{ "narrower", "stripe_count=1", { FS_LUSTRE, ONE_COMPONENT(8, MIB), 64, 0, 1 }, "1 x 1M" },
	{ "size", "stripe_size=8M", { FS_LUSTRE, ONE_COMPONENT(2, MIB), 64, GIB, 1 }, "2 x 8M" },
	{ "pool",
	  "pool=flash",
	  { FS_LUSTRE, ONE_COMPONENT(2, MIB), 64, GIB, 1 },
	  "2 x 1M, pool flash" },
	{ "all", "stripe_count=all", { FS_LUSTRE, ONE_COMPONENT(2, MIB), 0, GIB, 1 }, "all x 1M" },
	{ "more than there are",
	  "stripe_count=100",
	  { FS_LUSTRE, ONE_COMPONENT(2, MIB), 4, GIB, 1 },
	  "100 x 1M" },
	{ "what it is", "stripe_count=2", { FS_LUSTRE, ONE_COMPONENT(2, MIB), 64, GIB, 1 }, NULL },
	{ "CephFS", "stripe_count=8", { FS_CEPH, ONE_COMPONENT(1, 4 * MIB), 0, GIB, 1 }, NULL },
	{ "of a directory whose files begin on metadata servers",
	  "stripe_size=16M",
	  { FS_LUSTRE,
	    { .count = 2,
	      .mirrors = 1,
	      .components = { { .end = MIB, .on_metadata = true },
			      { .begin = MIB, .end = ANY, .stripe_count = 6, .pool = "p" } } },
	    64,
	    GIB,
	    1 },
	  "6 x 16M, pool p" },
};

LOOP_TEST(pure, what_is_asked_for, 0, ARRAY_LENGTH(choices))
{
	const struct choice *choice = &choices[_i];
	struct fs_layout ask;
	struct fs_layout_request request;
	char text[96], why[160];
	int ret;

	ck_assert_int_eq(fs_layout_request_parse(choice->request, &request, NULL), 0);
	ret = fs_choose_layout(&request, &choice->facts, &ask, why, sizeof(why));
	fs_layout_text(&ask, text, sizeof(text));
	ck_assert_msg(ret == (choice->asked != NULL), "%s, %s: %d (%s), %s", choice->name,
		      choice->request, ret, text, why);
	if (choice->asked)
		ck_assert_str_eq(text, choice->asked);
	ck_assert_str_ne(why, "");
	/* Without a buffer for the reason. */
	ck_assert_int_eq(fs_choose_layout(&request, &choice->facts, &ask, NULL, 0), ret);
}

/* ---- Parts of the targets -------------------------------------------------------------------- */

TEST(pure, files_of_a_component_lie_on_its_targets)
{
	const struct fs_even_targets even = { .count = 6, .number = { 9, 8, 7, 6, 5, 4 } };
	const struct fs_layout two = ONE_COMPONENT(2, MIB);
	const struct fs_facts facts = { .family = FS_LUSTRE, .directory = two, .targets = 6 };
	struct fs_layout ask = { 0 };

	ck_assert_int_eq(fs_take_target_group(&facts, &even, 3, 3, &ask), 1);
	ck_assert_uint_eq(ask.components[0].stripe_count, 2);
	ck_assert_uint_eq(ask.components[0].stripe_bytes, MIB);
	ck_assert_uint_eq(ask.chosen, 2);
	ck_assert_uint_eq(ask.target[0], 5);
	ck_assert_uint_eq(ask.target[1], 4);
}

TEST(pure, a_component_that_makes_no_sense_is_not_asked_for)
{
	const struct fs_even_targets even = { .count = 6 }, uneven = { 0 };
	struct fs_facts facts = { .family = FS_LUSTRE,
				  .directory = ONE_COMPONENT(2, MIB),
				  .targets = 6 };
	struct fs_layout ask = { 0 };

	ck_assert_int_eq(fs_take_target_group(&facts, &uneven, 1, 3, &ask), 0);
	ck_assert_int_eq(fs_take_target_group(&facts, &even, 4, 3, &ask), 0);
	ck_assert_int_eq(fs_take_target_group(&facts, &even, 1, 4, &ask), 0);
	ck_assert_int_eq(fs_take_target_group(&facts, &even, 1, 1, &ask), 0);
	facts.directory.components[0].on_metadata = true;
	ck_assert_int_eq(fs_take_target_group(&facts, &even, 1, 3, &ask), 0);
	facts.directory.components[0].on_metadata = false;
	strcpy(facts.directory.components[0].pool, "flash");
	ck_assert_int_eq(fs_take_target_group(&facts, &even, 1, 3, &ask), 0);
	facts.directory.components[0].pool[0] = 0;
	facts.family = FS_BEEGFS;
	ck_assert_int_eq(fs_take_target_group(&facts, &even, 1, 3, &ask), 0);
	ck_assert_uint_eq(ask.count, 0);
}

/* ---- Concurrent writers ---------------------------------------------------------------------- */

static const struct {
	uint32_t targets;
	struct fs_layout layout;
	uint64_t bytes;
	uint32_t capacity;
} capacities[] = {
	{ 8, ONE_COMPONENT(1, MIB), GIB, 8 },
	{ 8, ONE_COMPONENT(8, MIB), GIB, 1 },
	{ 8, ONE_COMPONENT(FS_ALL_TARGETS, MIB), GIB, 1 },
	{ 8, ONE_COMPONENT(3, MIB), GIB, 2 },
	{ 8, ONE_COMPONENT(5, MIB), GIB, 1 },
	{ 8, ONE_COMPONENT(16, MIB), GIB, 1 }, /* overstriped */
	{ 500, ONE_COMPONENT(1, MIB), GIB, 64 },
	{ 64, ONE_COMPONENT(1, MIB), GIB, 64 },
	{ 0, ONE_COMPONENT(1, MIB), GIB, 0 },
	{ 8, { 0 }, GIB, 0 },
	{ 8, ONE_COMPONENT(0, MIB), GIB, 0 },
	{ 32,
	  { .count = 2,
	    .mirrors = 1,
	    .components = { { .end = 100 * MIB, .stripe_count = 1 },
			    { .begin = 100 * MIB, .end = ANY, .stripe_count = 8 } } },
	  32 * MIB,
	  32 },
	{ 32,
	  { .count = 2,
	    .mirrors = 1,
	    .components = { { .end = 100 * MIB, .stripe_count = 1 },
			    { .begin = 100 * MIB, .end = ANY, .stripe_count = 8 } } },
	  GIB,
	  4 },
	/* All bytes are on the metadata server, which is one. */
	{ 32,
	  { .count = 1, .mirrors = 1, .components = { { .end = ANY, .on_metadata = true } } },
	  MIB,
	  0 },
};

LOOP_TEST(pure, how_many_may_write, 0, ARRAY_LENGTH(capacities))
{
	ck_assert_uint_eq(
		fs_capacity(capacities[_i].targets, &capacities[_i].layout, capacities[_i].bytes),
		capacities[_i].capacity);
}

/* ---- Requests to servers --------------------------------------------------------------------- */

/* The parser of Lustre's answers reads a request as it was written. */
LOOP_TEST(pure, lustre_is_told_what_is_asked, 0, ARRAY_LENGTH(understood))
{
	uint8_t blob[REQUEST_BYTES];
	struct fs_layout layout, back;
	struct fs_component *component = &layout.components[0];
	struct fs_layout_request request;
	char text[256];
	size_t bytes;

	if (fs_layout_request_parse(understood[_i].text, &request, NULL) ||
	    request.kind != FS_REQUEST_LAYOUT)
		return;
	/* In an answer no value is left open. */
	layout = layout_of(&request);
	component->stripe_bytes = component->stripe_bytes ? component->stripe_bytes : MIB;
	component->stripe_count = component->stripe_count ? component->stripe_count : 3;
	bytes = make_request(&layout, blob);
	ck_assert_uint_le(bytes, sizeof(blob));
	ck_assert_int_eq(parse_layout(blob, bytes, &back), 0);
	ck_assert_int_eq(compare(&layout, &back, text, sizeof(text)), 0);
}

TEST(pure, lustre_is_told_byte_for_byte)
{
	static const uint8_t v3[48] = {
		0xd0, 0x0b, 0xd3, 0x0b, 1,   0,   [24] = 0, 0,   0x40, 0, /* 4 MiB */
		8,    0,    0xff, 0xff, 'f', 'l', 'a',      's', 'h',
	};
	struct fs_layout layout = ONE_COMPONENT(8, 4 * MIB);
	uint8_t blob[REQUEST_BYTES];

	strcpy(layout.components[0].pool, "flash");
	ck_assert_uint_eq(make_request(&layout, blob), sizeof(v3));
	ck_assert_mem_eq(blob, v3, sizeof(v3));
	*layout.components[0].pool = 0;
	ck_assert_uint_eq(make_request(&layout, blob), 32);
	layout.components[0].stripe_count = FS_ALL_TARGETS;
	make_request(&layout, blob);
	ck_assert_uint_eq(blob[28] | blob[29] << 8, 0xffff);
}

/* ---- Answers of servers ---------------------------------------------------------------------- */

static const struct {
	const char *ask, *got;
	int differs;
} answers[] = {
	{ "stripe_count=8,stripe_size=4M", "stripe_count=8,stripe_size=4M", 0 },
	{ "stripe_count=8", "stripe_count=8,stripe_size=4M,pool=p", 0 },
	{ "stripe_count=all", "stripe_count=3,stripe_size=4M", 0 },
	{ "stripe_size=4M", "stripe_count=3,stripe_size=4M", 0 },
	{ "stripe_count=8,stripe_size=4M", "stripe_count=4,stripe_size=4M", 1 },
	{ "stripe_count=8,stripe_size=4M", "stripe_count=9,stripe_size=4M", 2 },
	{ "stripe_count=8,stripe_size=4M", "stripe_count=8,stripe_size=1M", 2 },
	{ "stripe_count=8,stripe_size=4M", "stripe_count=4,stripe_size=1M", 2 },
	{ "stripe_count=8,pool=p", "stripe_count=8,stripe_size=1M", 2 },
	{ "stripe_count=8,pool=p", "stripe_count=8,pool=q", 2 },
};

LOOP_TEST(pure, what_is_given_is_compared_with_what_was_asked, 0, ARRAY_LENGTH(answers))
{
	struct fs_layout_request ask, got;
	struct fs_layout asked, given;
	char text[256];

	ck_assert_int_eq(fs_layout_request_parse(answers[_i].ask, &ask, NULL), 0);
	ck_assert_int_eq(fs_layout_request_parse(answers[_i].got, &got, NULL), 0);
	asked = layout_of(&ask);
	given = layout_of(&got);
	ck_assert_int_eq(compare(&asked, &given, text, sizeof(text)), answers[_i].differs);
	ck_assert_int_eq(*text != 0, answers[_i].differs != 0);
	given.components[0].end = GIB;
	given.count = 2;
	ck_assert_int_eq(compare(&asked, &given, text, sizeof(text)), 2);
}

TEST(pure, what_was_refused_first_is_told)
{
	struct fs_answer answer = { .plain = true };
	char first[sizeof(answer.why)];

	errno = EIO;
	fs_refused(&answer, "one");
	strcpy(first, answer.why);
	ck_assert(*first);
	errno = EPERM;
	fs_refused(&answer, "two");
	ck_assert_str_eq(answer.why, first);
}

/* ---- Files that cannot be created as requested ----------------------------------------------- */

/*
 * The scratch folder is on none of these filesystems; a client without such requests returns equal
 * errors.
 */
static const enum fs_family families[] = { FS_LUSTRE, FS_BEEGFS, FS_CEPH, FS_EXT };

static int create(enum fs_family family, const char *name, mode_t mode, char *note, size_t bytes)
{
	int folder = open(scratch_directory(), O_RDONLY | O_DIRECTORY), fd;
	const struct fs_layout layout = ONE_COMPONENT(4, 4 * MIB);

	fd = fs_create_with_layout(folder, name, mode, family, &layout, note, bytes);
	close(folder);
	return fd;
}

static struct test_case files_case = { .name = "files",
				       .setup = scratch_setup,
				       .teardown = scratch_teardown };

LOOP_TEST(files_case, where_there_are_no_layouts_there_is_a_file, 0, ARRAY_LENGTH(families))
{
	mode_t mask = umask(027);
	struct stat status;
	char note[256], byte = 'x';
	int fd = create(families[_i], "new", 0666, note, sizeof(note));

	umask(mask);
	ck_assert_msg(fd >= 0, "%s", strerror(-fd));
	ck_assert_int_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	ck_assert_int_eq(fcntl(fd, F_GETFL) & (O_ACCMODE | O_NONBLOCK), O_RDWR);
	ck_assert_int_eq(fcntl(fd, F_GETFL) & O_ASYNC, 0);
	ck_assert_int_eq(pwrite(fd, &byte, 1, 0), 1);
	ck_assert_int_eq(fstat(fd, &status), 0);
	ck_assert_int_eq(status.st_mode & 07777, 0640);
	ck_assert_int_eq(status.st_nlink, 1);
	ck_assert_str_ne(note, "");
	close(fd);
	ck_assert_int_eq(unlink(scratch_path("new")), 0);
	ck_assert_int_eq(create(families[_i], "new", 0600, NULL, 0), fd);
	close(fd);
}

LOOP_TEST(files_case, what_is_there_is_left_alone, 0, ARRAY_LENGTH(families))
{
	char note[256], bytes[8] = "";
	int fd = open(scratch_path("old"), O_WRONLY | O_CREAT, 0600);

	ck_assert_int_eq(write(fd, "theirs", 6), 6);
	close(fd);
	ck_assert_int_eq(symlink("nowhere", scratch_path("link")), 0);
	ck_assert_int_eq(create(families[_i], "old", 0666, note, sizeof(note)), -EEXIST);
	ck_assert_int_eq(create(families[_i], "link", 0666, note, sizeof(note)), -EEXIST);
	fd = open(scratch_path("old"), O_RDONLY);
	ck_assert_int_eq(read(fd, bytes, sizeof(bytes)), 6);
	ck_assert_str_eq(bytes, "theirs");
	close(fd);
	ck_assert_int_eq(access(scratch_path("nowhere"), F_OK), -1);
}

LOOP_TEST(files_case, a_folder_that_is_gone_has_no_file, 0, ARRAY_LENGTH(families))
{
	const struct fs_layout layout = ONE_COMPONENT(4, MIB);
	char note[256];
	int gone;

	ck_assert_int_eq(mkdir(scratch_path("gone"), 0700), 0);
	gone = open(scratch_path("gone"), O_RDONLY | O_DIRECTORY);
	ck_assert_int_eq(rmdir(scratch_path("gone")), 0);
	ck_assert_int_eq(
		fs_create_with_layout(gone, "new", 0600, families[_i], &layout, note, sizeof(note)),
		-ENOENT);
	close(gone);
}
