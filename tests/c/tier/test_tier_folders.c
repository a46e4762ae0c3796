/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of groups on a tier, and their copies at the destination. */
#define _GNU_SOURCE
#include "support/tier_case.h"

#include <ioshape/group.h>

static struct test_case tests = { .name = "folders",
				  .setup = tier_setup,
				  .teardown = tier_teardown };

/* Saves a checkpoint of one rank into `directory`, which is on the tier or at the destination. */
static void save_checkpoint(const char *directory, uint64_t step, const struct sample *what)
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
	static char names[4][64];
	static unsigned next;
	char *name = names[next++ % 4];

	snprintf(name, sizeof(*names), "run/step-%010llu", (unsigned long long)step);
	return name;
}

/* Cuts the last component off a path. */
static void cut_name(char *path)
{
	*strrchr(path, '/') = 0;
}

static void save_on_tier(uint64_t step, const struct sample *what)
{
	char *copy_path = place_of(step_name(step));

	cut_name(copy_path);
	save_checkpoint(copy_path, step, what);
	keep(step_name(step));
	free(copy_path);
}

static const char *in(const char *folder, const char *name)
{
	static char path[8192];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	return path;
}

#define SHARD "rank-00000.pt"

static void must_be_there_as(uint64_t step, const struct sample *what)
{
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;
	void *loaded = malloc(what->total_bytes);

	ck_assert_int_eq(ioshape_checkpoint_open(context, there("run"), step, &checkpoint), 0);
	ck_assert_int_eq(ioshape_checkpoint_verify(checkpoint, NULL, NULL), 0);
	ck_assert_int_eq(ioshape_checkpoint_open_shard(checkpoint, 0, NULL, &reader), 0);
	ck_assert_int_eq(sample_load(reader, what, loaded), 0);
	ioshape_reader_free(reader);
	ioshape_checkpoint_free(checkpoint);
	free(loaded);
	ck_assert_uint_eq(scratch_entries(there("run")), 1);
}

static mode_t mode_of(const char *path)
{
	struct stat status;

	ck_assert_int_eq(stat(path, &status), 0);
	return status.st_mode & 07777;
}

TEST(tests, a_checkpoint_is_copied_with_its_times_and_modes)
{
	struct ioshape_tier_copy *copies;
	struct stat here, drained;
	uint64_t bytes;
	size_t count;

	save_on_tier(1, &sample);
	ck_assert_int_eq(ioshape_tier_list(tier, &copies, &count), 0);
	ck_assert_uint_eq(count, 1);
	ck_assert_uint_eq(copies->directory, 1);
	bytes = copies->bytes;
	ck_assert_uint_gt(bytes, LARGE);
	ck_assert_int_eq(chmod(in(copies->copy_path, SHARD), 0600), 0);
	ck_assert_int_eq(stat(copies->copy_path, &here), 0);
	free(copies);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.bytes, bytes);
	must_be_there_as(1, &sample);
	ck_assert_uint_eq(mode_of(in(there(step_name(1)), SHARD)), 0600);
	ck_assert_int_eq(stat(there(step_name(1)), &drained), 0);
	ck_assert_int_eq(here.st_mtime, drained.st_mtime);
	ck_assert_uint_eq(scratch_entries(there(step_name(1))), 2);
	ck_assert(has_copy(step_name(1)));
	/* A file that is added later makes the destination newer. */
	shift_time(there(step_name(1)), 1);
	ck_assert(!has_copy(step_name(1)));
}

TEST(tests, it_takes_the_place_of_an_older_one)
{
	save_checkpoint(there("run"), 1, &other);
	shift_time(there(step_name(1)), -60);
	save_on_tier(1, &sample);
	ck_assert_int_eq(drain(), 0);
	must_be_there_as(1, &sample);
	/* A drained copy is replaced by the next save. */
	save_on_tier(1, &other);
	ck_assert_int_eq(drain(), 0);
	must_be_there_as(1, &other);
}

/* The process died between the save and the keep. */
TEST(tests, one_that_was_never_kept_is_no_hindrance)
{
	char *copy_path = place_of(step_name(1));

	cut_name(copy_path);
	save_checkpoint(copy_path, 1, &other);
	free(copy_path);
	save_on_tier(1, &sample);
	ck_assert_uint_eq(waiting(NULL), 1);
	ck_assert_int_eq(drain(), 0);
	must_be_there_as(1, &sample);
	/* A copy that waits stays, even if its path is requested again. */
	save_on_tier(1, &other);
	free(place_of(step_name(1)));
	ck_assert_int_eq(drain(), 0);
	must_be_there_as(1, &other);
}

TEST(tests, it_does_not_take_the_place_of_a_newer_one)
{
	save_on_tier(1, &sample);
	save_checkpoint(there("run"), 1, &other);
	shift_time(there(step_name(1)), 60);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_NEWER], 1);
	must_be_there_as(1, &other);
}

TEST(tests, an_empty_directory_is_replaced)
{
	save_on_tier(1, &sample);
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	ck_assert_int_eq(mkdir(there(step_name(1)), 0777), 0);
	shift_time(there(step_name(1)), 60);
	ck_assert_int_eq(drain(), 0);
	must_be_there_as(1, &sample);
}

TEST(tests, a_file_and_a_directory_do_not_replace_each_other)
{
	save_on_tier(1, &sample);
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	scratch_write(there(step_name(1)), "file", 4);
	for (int later = -60; later <= 60; later += 120) {
		shift_time(there(step_name(1)), later);
		ck_assert_int_eq(drain(), -EEXIST);
		ck_assert_ptr_nonnull(strstr(told.why, there(step_name(1))));
		ck_assert(scratch_same(there(step_name(1)), "file", 4));
		ck_assert_uint_eq(waiting(NULL), 1);
	}
}

TEST(tests, one_with_a_damaged_file_does_not_appear)
{
	char *copy_path = place_of(step_name(1));

	save_on_tier(1, &sample);
	flip(in(copy_path, SHARD), LARGE / 2);
	ck_assert_int_eq(drain(), IOSHAPE_E_DAMAGED);
	ck_assert_uint_eq(scratch_entries(there("run")), 0);
	ck_assert_uint_eq(waiting(NULL), 1);
	free(copy_path);
}

TEST(tests, one_that_is_not_complete_does_not_appear)
{
	char *copy_path = place_of(step_name(1));

	save_on_tier(1, &sample);
	ck_assert_int_eq(unlink(in(copy_path, "manifest.json")), 0);
	ck_assert_int_eq(drain(), IOSHAPE_E_DAMAGED);
	ck_assert_ptr_nonnull(strstr(told.why, "no manifest"));
	ck_assert_uint_eq(waiting(NULL), 1);
	save_on_tier(2, &sample);
	free(copy_path);
	copy_path = place_of(step_name(2));
	ck_assert_int_eq(unlink(in(copy_path, SHARD)), 0);
	ck_assert_int_eq(drain(), IOSHAPE_E_DAMAGED);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_FAILED], 2);
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	free(copy_path);
}

TEST(tests, a_directory_that_is_no_checkpoint_is_not_kept)
{
	char *copy_path = place_of("run");

	ck_assert_int_eq(mkdir(copy_path, 0777), 0);
	ck_assert_int_eq(ioshape_tier_keep(tier, there("run"), NULL), -EINVAL);
	ck_assert_uint_eq(waiting(NULL), 0);
	free(copy_path);
}

static int stop_in_the_middle(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	ck_assert_uint_le(done, total);
	return phase == IOSHAPE_PHASE_WRITE && done > total / 2;
}

TEST(tests, a_drain_that_is_stopped_leaves_nothing)
{
	save_on_tier(1, &sample);
	ck_assert_int_eq(drain_with(stop_in_the_middle, NULL), -ECANCELED);
	ck_assert_uint_eq(scratch_entries(there("run")), 0);
	ck_assert_int_eq(drain(), 0);
	must_be_there_as(1, &sample);
}

static bool meddled;

static int save_again(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !meddled) {
		meddled = true;
		save_on_tier(1, &other);
	}
	return 0;
}

TEST(tests, one_that_is_replaced_while_it_is_drained_is_never_mixed)
{
	save_on_tier(1, &sample);
	ck_assert_int_eq(drain_with(save_again, NULL), 0);
	ck_assert(meddled);
	must_be_there_as(1, &other);
	ck_assert_uint_eq(waiting(NULL), 0);
}

TEST(tests, drained_checkpoints_make_room)
{
	save_on_tier(1, &sample);
	save_on_tier(2, &sample);
	ck_assert_int_eq(drain_with(NULL, there(step_name(1))), 0);
	ioshape_tier_free(tier);
	tier = open_tier(3 * LARGE, 0);
	free(place_of("three"));
	ck_assert(!has_copy(step_name(1)));
	ck_assert(has_copy(step_name(2)));
	must_be_there_as(1, &sample);
}

static void keep_checkpoint(uint64_t step, uint32_t keep_last, const struct sample *what)
{
	struct ioshape_tier_keep_options options = IOSHAPE_TIER_KEEP_OPTIONS_INIT;
	char *copy_path = place_of(step_name(step));

	options.keep_last = keep_last;
	options.keep_every = 10;
	cut_name(copy_path);
	save_checkpoint(copy_path, step, what);
	ck_assert_int_eq(ioshape_tier_keep(tier, there(step_name(step)), &options), 0);
	free(copy_path);
}

static void must_be_there(const uint64_t *steps, size_t count)
{
	uint64_t *found;
	size_t found_count;

	ck_assert_int_eq(ioshape_checkpoint_list(context, there("run"), &found, &found_count), 0);
	ck_assert_uint_eq(found_count, count);
	ck_assert_mem_eq(found, steps, count * sizeof(*steps));
	free(found);
}

TEST(tests, of_checkpoints_so_many_stay_at_the_destination)
{
	static const uint64_t all[] = { 10, 12, 13 };
	struct ioshape_checkpoint *checkpoint;

	for (uint64_t step = 9; step < 14; step++)
		keep_checkpoint(step, 2, &sample);
	ck_assert_int_eq(drain(), 0);
	must_be_there(all, 3);
	ck_assert_int_eq(
		ioshape_checkpoint_open(context, there("run"), IOSHAPE_LATEST, &checkpoint), 0);
	ck_assert_int_eq(ioshape_checkpoint_verify(checkpoint, NULL, NULL), 0);
	ioshape_checkpoint_free(checkpoint);
	ck_assert_uint_eq(scratch_entries(there("run")), 3);
}

/*
 * A checkpoint that is open for reading is not removed, neither from the tier nor from the
 * destination.
 */
TEST(tests, a_checkpoint_that_is_open_stays)
{
	struct ioshape_checkpoint *open_there, *open_here;
	char *copy_path = place_of(step_name(1));

	keep_checkpoint(1, 0, &sample);
	ck_assert_int_eq(drain(), 0);
	cut_name(copy_path);
	ck_assert_int_eq(ioshape_checkpoint_open(context, copy_path, 1, &open_here), 0);
	ioshape_tier_free(tier);
	tier = open_tier(LARGE + LARGE / 2, 0);
	free(place_of("x"));
	ck_assert(has_copy(step_name(1)));
	ck_assert_int_eq(ioshape_checkpoint_verify(open_here, NULL, NULL), 0);
	ioshape_checkpoint_free(open_here);
	free(place_of("x"));
	ck_assert(!has_copy(step_name(1)));
	keep_checkpoint(1, 0, &other);
	ck_assert_int_eq(ioshape_checkpoint_open(context, there("run"), 1, &open_there), 0);
	ck_assert_int_eq(drain(), -EBUSY);
	ck_assert_ptr_nonnull(strstr(told.why, "is reading it"));
	ck_assert_int_eq(ioshape_checkpoint_verify(open_there, NULL, NULL), 0);
	ioshape_checkpoint_free(open_there);
	ck_assert_int_eq(drain(), 0);
	ck_assert_int_eq(ioshape_checkpoint_open(context, there("run"), 1, &open_there), 0);
	ck_assert_int_eq(ioshape_checkpoint_verify(open_there, NULL, NULL), 0);
	ioshape_checkpoint_free(open_there);
	ck_assert_uint_eq(scratch_entries(there("run")), 1);
	free(copy_path);
}
