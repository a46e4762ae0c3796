/* SPDX-License-Identifier: Apache-2.0 */
/* The search for the newest checkpoint, while other jobs save and prune in the directory. */
#define _GNU_SOURCE

/* Included, because the test acts between two calls of static functions: listing and looking. */
#include "group/handle.c"

#include "support/checkpoint_view.h"

#include <ioshape/group.h>

static struct ioshape_search_options options;
static struct ioshape_group *group;
static struct search search;
static struct group_found found;

static void setup_search(void)
{
	setup();
	ck_assert_msg(!ioshape_group_open(context, "runs", NULL, &group), "%s", message());
	search = (struct search){
		.options = &options,
		.near.directory = IO_NO_FOLDER,
		.there.directory = IO_NO_FOLDER,
	};
	ck_assert_int_eq(checkpoint_save(5, "five", false, &error), 0);
	begin_search(group, &search, &error);
	ck_assert_int_eq(error.code, 0);
}

static void teardown_search(void)
{
	end_walk(&search.near);
	end_walk(&search.there);
	ioshape_group_free(group);
	teardown();
}

static void keep_newest(void)
{
	struct ioshape_prune_options keep = IOSHAPE_PRUNE_OPTIONS_INIT;

	keep.keep_last = 1;
	ck_assert_int_eq(ioshape_checkpoint_prune(context, "runs", &keep, NULL), 0);
}

static struct test_case searching = { .name = "searching",
				      .setup = setup_search,
				      .teardown = teardown_search };

TEST(searching, one_that_is_pruned_after_the_listing_makes_way_for_the_next)
{
	ck_assert_int_eq(checkpoint_save(6, "six", false, &error), 0);
	keep_newest();
	look_for_next(group, &search, &found);
	ck_assert_int_eq(found.failure.code, 0);
	ck_assert_uint_eq(found.step, 6);
}

TEST(searching, one_without_a_manifest_is_passed_over_once)
{
	ck_assert_int_eq(unlink("runs/step-0000000005/manifest.json"), 0);
	look_for_next(group, &search, &found);
	ck_assert_int_eq(found.failure.code, -ENOENT);
	ck_assert_uint_eq(found.step, 5);
	look_for_next(group, &search, &found);
	ck_assert_uint_eq(found.step, IOSHAPE_LATEST);
}

TEST(searching, what_was_saved_after_the_listing_is_left_to_the_next_search)
{
	ck_assert_int_eq(checkpoint_save(6, "six", false, &error), 0);
	look_for_next(group, &search, &found);
	ck_assert_int_eq(found.failure.code, 0);
	ck_assert_uint_eq(found.step, 5);
}

TEST(searching, one_whose_age_was_unreadable_during_the_listing_finds_its_position)
{
	struct group_candidate *listed;

	ck_assert_int_eq(checkpoint_save(6, "six", false, &error), 0);
	ck_assert(has_changed(&search.there));
	listed = search.there.candidates.all;
	listed[1] = listed[0];
	listed[0] = (struct group_candidate){ .step = 5, .serial = GROUP_UNKNOWN_SERIAL };
	group_step_name(listed[0].name, 5);
	look_for_next(group, &search, &found);
	ck_assert_uint_eq(found.step, 6);
	look_for_next(group, &search, &found);
	ck_assert_uint_eq(found.step, 5);
}
