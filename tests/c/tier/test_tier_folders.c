/* SPDX-License-Identifier: Apache-2.0 */
/* Directories on a tier, including checkpoints of groups, and their copies at the destination. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/tier_case.h"

#include <ioshape/group.h>

static struct test_case tests = { .name = "folders",
				  .setup = tier_setup,
				  .teardown = tier_teardown };

static const char *in(const char *folder, const char *name)
{
	static char paths[4][8192];
	static unsigned next;
	char *path = paths[next++ % 4];

	snprintf(path, sizeof(*paths), "%s/%s", folder, name);
	return path;
}

static void put_raw(const char *path, const char *text)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;

	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	ck_assert_int_eq(ioshape_file_open(context, path, &options, &file), 0);
	ck_assert_int_eq(ioshape_file_write(file, text, strlen(text)), 0);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
}

/* Fills a directory like a framework, on the tier or at the destination. */
static void fill(const char *path, const struct sample *what, const char *text)
{
	struct save_directory *directory;
	char folder[4096];

	ck_assert_msg(!save_directory_make(context, path, &directory), "%s",
		      ioshape_last_error()->sentence);
	snprintf(folder, sizeof(folder), "%s", save_directory_path(directory));
	ck_assert_int_eq(sample_save(context, in(folder, "model.pt"), what, NULL), 0);
	put_raw(in(folder, "model.bin"), text);
	ck_assert_int_eq(mkdir(in(folder, "step"), 0750), 0);
	ck_assert_int_eq(mkdir(in(folder, "step/deeper"), 0777), 0);
	ck_assert_int_eq(mkdir(in(folder, "empty"), 0777), 0);
	ck_assert_int_eq(sample_save(context, in(folder, "step/deeper/zero.pt"), what, NULL), 0);
	scratch_write(in(folder, "config.json"), text, strlen(text));
	ck_assert_int_eq(chmod(in(folder, "config.json"), 0600), 0);
	ck_assert_msg(!save_directory_commit(directory), "%s", ioshape_last_error()->sentence);
	save_directory_free(directory);
}

static void save_folder(const char *name, const struct sample *what, const char *text)
{
	char *place = place_of(name);

	fill(place, what, text);
	keep(name);
	free(place);
}

static void must_hold_folder(const char *path, const struct sample *what, const char *text)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_reader *reader;

	must_hold(in(path, "model.pt"), what);
	must_hold(in(path, "step/deeper/zero.pt"), what);
	ck_assert(scratch_same(in(path, "config.json"), text, strlen(text)));
	options.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(context, in(path, "model.bin"), &options, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.checksums, 1);
	ioshape_reader_free(reader);
	ck_assert_uint_eq(scratch_entries(in(path, "empty")), 0);
	ck_assert_uint_eq(scratch_entries(path), 6);
	ck_assert_uint_eq(scratch_entries(in(path, "step")), 1);
}

static mode_t mode_of(const char *path)
{
	struct stat status;

	ck_assert_int_eq(stat(path, &status), 0);
	return status.st_mode & 07777;
}

TEST(tests, a_directory_is_carried_with_all_in_it)
{
	struct ioshape_tier_copy *copies;
	struct stat here, drained;
	uint64_t bytes;
	size_t count;

	save_folder("run/one", &sample, "one");
	ck_assert_int_eq(ioshape_tier_list(tier, &copies, &count), 0);
	ck_assert_uint_eq(count, 1);
	ck_assert_uint_eq(copies->directory, 1);
	bytes = copies->bytes;
	ck_assert_uint_gt(bytes, 2 * LARGE);
	ck_assert_int_eq(stat(copies->place, &here), 0);
	free(copies);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.bytes, bytes);
	must_hold_folder(there("run/one"), &sample, "one");
	ck_assert_uint_eq(mode_of(there("run/one/step")), 0750);
	ck_assert_uint_eq(mode_of(there("run/one/config.json")), 0600);
	ck_assert_int_eq(stat(there("run/one"), &drained), 0);
	ck_assert_int_eq(here.st_mtime, drained.st_mtime);
	ck_assert_uint_eq(scratch_entries(there("run")), 1);
	ck_assert(has_copy("run/one"));
	/* A file that is added later makes the destination newer. */
	shift_time(there("run/one"), 1);
	ck_assert(!has_copy("run/one"));
}

TEST(tests, it_takes_the_place_of_an_older_one)
{
	fill(there("one"), &other, "old");
	shift_time(there("one"), -60);
	save_folder("one", &sample, "new");
	ck_assert_int_eq(drain(), 0);
	must_hold_folder(there("one"), &sample, "new");
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 1);
	/* A drained copy is replaced by the next save. */
	save_folder("one", &other, "newest");
	ck_assert_int_eq(drain(), 0);
	must_hold_folder(there("one"), &other, "newest");
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 1);
}

/* The process died between the save and the keep. */
TEST(tests, one_that_was_never_kept_is_no_hindrance)
{
	char *place = place_of("one");

	fill(place, &other, "lost");
	free(place);
	save_folder("one", &sample, "new");
	ck_assert_uint_eq(waiting(NULL), 1);
	ck_assert_int_eq(drain(), 0);
	must_hold_folder(there("one"), &sample, "new");
	/* A copy that waits stays, even if its path is requested again. */
	save_folder("one", &other, "newest");
	free(place_of("one"));
	ck_assert_int_eq(drain(), 0);
	must_hold_folder(there("one"), &other, "newest");
}

TEST(tests, it_does_not_take_the_place_of_a_newer_one)
{
	save_folder("one", &sample, "old");
	fill(there("one"), &other, "new");
	shift_time(there("one"), 60);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_NEWER], 1);
	must_hold_folder(there("one"), &other, "new");
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 1);
}

TEST(tests, an_empty_one_is_nobodys)
{
	save_folder("one", &sample, "text");
	ck_assert_int_eq(mkdir(there("one"), 0777), 0);
	shift_time(there("one"), 60);
	ck_assert_int_eq(drain(), 0);
	must_hold_folder(there("one"), &sample, "text");
}

TEST(tests, a_file_and_a_directory_do_not_replace_each_other)
{
	save_folder("one", &sample, "text");
	scratch_write(there("one"), "file", 4);
	shift_time(there("one"), -60);
	ck_assert_int_eq(drain(), -EEXIST);
	ck_assert_ptr_nonnull(strstr(told.why, "there/one"));
	ck_assert(scratch_same(there("one"), "file", 4));
	ck_assert_uint_eq(waiting(NULL), 1);
}

TEST(tests, one_with_a_damaged_file_does_not_appear)
{
	char *place = place_of("one");

	save_folder("one", &sample, "text");
	flip(in(place, "step/deeper/zero.pt"), LARGE / 2);
	ck_assert_int_eq(drain(), IOSHAPE_E_DAMAGED);
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	ck_assert_uint_eq(waiting(NULL), 1);
	free(place);
}

TEST(tests, what_is_no_file_is_not_carried)
{
	char *place = place_of("one");

	save_folder("one", &sample, "text");
	ck_assert_int_eq(symlink("model.pt", in(place, "link")), 0);
	ck_assert_int_eq(drain(), -EINVAL);
	ck_assert_ptr_nonnull(strstr(told.why, "one/link"));
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	free(place);
}

static int stop_in_the_middle(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	ck_assert_uint_le(done, total);
	return phase == IOSHAPE_PHASE_WRITE && done > total / 2;
}

TEST(tests, a_drain_that_is_stopped_leaves_nothing)
{
	save_folder("one", &sample, "text");
	ck_assert_int_eq(drain_with(stop_in_the_middle, NULL), -ECANCELED);
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	ck_assert_int_eq(drain(), 0);
	must_hold_folder(there("one"), &sample, "text");
}

static bool meddled;

static int save_again(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !meddled) {
		char *place = place_of("one");

		meddled = true;
		scratch_remove(place);
		fill(place, &other, "new");
		keep("one");
		free(place);
	}
	return 0;
}

TEST(tests, one_that_is_replaced_while_it_is_drained_is_never_mixed)
{
	save_folder("one", &sample, "text");
	ck_assert_int_eq(drain_with(save_again, NULL), 0);
	ck_assert(meddled);
	must_hold_folder(there("one"), &other, "new");
	ck_assert_uint_eq(waiting(NULL), 0);
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 1);
}

TEST(tests, drained_directories_make_room)
{
	save_folder("one", &sample, "text");
	save_folder("two", &sample, "text");
	ck_assert_int_eq(drain_with(NULL, there("one")), 0);
	ioshape_tier_free(tier);
	tier = open_tier(5 * LARGE, 0);
	free(place_of("three"));
	ck_assert(!has_copy("one"));
	ck_assert(has_copy("two"));
	must_hold_folder(there("one"), &sample, "text");
}

/* ---- Checkpoints of groups ------------------------------------------------------------------- */

/* Saves on the tier or directly. */
static void save_generation(const char *directory, uint64_t step, const struct sample *what)
{
	struct ioshape_group *group;

	ck_assert_msg(!ioshape_group_open(context, directory, NULL, &group), "%s",
		      ioshape_last_error()->sentence);
	ck_assert_msg(
		!ioshape_group_save_tensors(group, step, what->tensors, what->count, NULL, NULL),
		"%s", ioshape_last_error()->sentence);
	ioshape_group_free(group);
}

static const char *step_name(uint64_t step)
{
	static char name[64];

	snprintf(name, sizeof(name), "run/step-%010llu", (unsigned long long)step);
	return name;
}

/* Cuts the last component off a path. */
static void cut_name(char *path)
{
	size_t bytes = strlen(path);

	while (path[bytes] != '/')
		bytes--;
	path[bytes] = 0;
}

static void keep_generation(uint64_t step, uint32_t keep_last, const struct sample *what)
{
	struct ioshape_tier_keep_options options = IOSHAPE_TIER_KEEP_OPTIONS_INIT;
	char *place = place_of(step_name(step));

	options.keep_last = keep_last;
	options.keep_every = 10;
	cut_name(place);
	save_generation(place, step, what);
	ck_assert_int_eq(ioshape_tier_keep(tier, there(step_name(step)), &options), 0);
	free(place);
}

static void must_be_there(const uint64_t *steps, size_t count)
{
	uint64_t *found;
	size_t found_count;

	ck_assert_int_eq(ioshape_generation_list(context, there("run"), &found, &found_count), 0);
	ck_assert_uint_eq(found_count, count);
	ck_assert_mem_eq(found, steps, count * sizeof(*steps));
	free(found);
}

TEST(tests, of_generations_so_many_stay_at_the_destination)
{
	static const uint64_t all[] = { 10, 12, 13 };
	struct ioshape_generation *generation;

	for (uint64_t step = 9; step < 14; step++)
		keep_generation(step, 2, &sample);
	ck_assert_int_eq(drain(), 0);
	must_be_there(all, 3);
	ck_assert_int_eq(
		ioshape_generation_open(context, there("run"), IOSHAPE_LATEST, &generation), 0);
	ck_assert_int_eq(ioshape_generation_verify(generation, NULL, NULL), 0);
	ioshape_generation_free(generation);
	ck_assert_uint_eq(scratch_entries(there("run")), 3);
}

/*
 * A checkpoint that is open for reading is not removed, neither from the tier nor from the
 * destination.
 */
TEST(tests, a_generation_that_is_open_stays)
{
	struct ioshape_generation *open_there, *open_here;
	char *place = place_of(step_name(1));

	keep_generation(1, 0, &sample);
	ck_assert_int_eq(drain(), 0);
	cut_name(place);
	ck_assert_int_eq(ioshape_generation_open(context, place, 1, &open_here), 0);
	ioshape_tier_free(tier);
	tier = open_tier(LARGE + LARGE / 2, 0);
	free(place_of("x"));
	ck_assert(has_copy(step_name(1)));
	ck_assert_int_eq(ioshape_generation_verify(open_here, NULL, NULL), 0);
	ioshape_generation_free(open_here);
	free(place_of("x"));
	ck_assert(!has_copy(step_name(1)));
	keep_generation(1, 0, &other);
	ck_assert_int_eq(ioshape_generation_open(context, there("run"), 1, &open_there), 0);
	ck_assert_int_eq(drain(), -EBUSY);
	ck_assert_ptr_nonnull(strstr(told.why, "is reading it"));
	ck_assert_int_eq(ioshape_generation_verify(open_there, NULL, NULL), 0);
	ioshape_generation_free(open_there);
	ck_assert_int_eq(drain(), 0);
	ck_assert_int_eq(ioshape_generation_open(context, there("run"), 1, &open_there), 0);
	ck_assert_int_eq(ioshape_generation_verify(open_there, NULL, NULL), 0);
	ioshape_generation_free(open_there);
	ck_assert_uint_eq(scratch_entries(there("run")), 1);
	free(place);
}

int main(void)
{
	return check_run("api/tier folders");
}
