/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups that save on a tier first: two real ranks, and the checkpoints that they find afterwards.
 */
#define _GNU_SOURCE
#include "group/group.h"
#include "support/tier_case.h"

#include <ioshape/group.h>
#include <ioshape/tier.h>

#include <limits.h>
#include <sys/wait.h>

/* valgrind crashes if io_uring maps its memory while another thread maps memory. */
static void setup(void)
{
	if (scratch_under_valgrind())
		ck_assert_int_eq(setenv("IOSHAPE_ENGINE", "threads", 1), 0);
	tier_setup();
}

static struct test_case tests = { .name = "groups on a tier",
				  .setup = setup,
				  .teardown = tier_teardown };

/* ---- Ranks ----------------------------------------------------------------------------------- */

#define RANKS 2

struct scene {
	bool several_nodes;
	bool on_tier[RANKS]; /* whether the rank has the tier */
	uint64_t steps;
	uint32_t keep_last;
	bool no_replace;
	uint32_t save_deadline_ms;
	int code; /* result of its saves */
};

static const struct scene usual = { .on_tier = { true, true }, .steps = 3 };

struct rank {
	const struct scene *scene;
	uint32_t rank;
	struct ioshape_context *context;
	struct ioshape_group *group;
};

static struct rank open_rank(const struct scene *scene, uint32_t rank,
			     struct ioshape_context *own_context, struct ioshape_tier *own_tier)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct rank opened = { .scene = scene, .rank = rank, .context = own_context };

	options.rank = rank;
	options.ranks = options.local_ranks = RANKS;
	options.mode = IOSHAPE_MODE_EACH;
	options.token = scratch_directory();
	options.deadline_ms = 30000;
	options.keep_last = scene->keep_last;
	options.node = scene->several_nodes && rank ? "another" : "one";
	options.tier = scene->on_tier[rank] ? own_tier : NULL;
	ck_assert_msg(!ioshape_group_open(own_context, there("run"), &options, &opened.group), "%s",
		      ioshape_last_error()->sentence);
	return opened;
}

static struct ioshape_report save_step(const struct rank *rank, uint64_t step)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	int ret;

	options.report = &report;
	options.replace = rank->scene->no_replace ? IOSHAPE_OFF : IOSHAPE_ON;
	options.deadline_ms = rank->scene->save_deadline_ms;
	ret = ioshape_group_save_tensors(rank->group, step, sample.tensors, sample.count, &options,
					 NULL);
	ck_assert_msg(ret == rank->scene->code, "rank %u: %s", rank->rank,
		      ioshape_last_error()->sentence);
	return report;
}

static void save_all(const struct rank *rank)
{
	for (uint64_t step = 1; step <= rank->scene->steps; step++)
		save_step(rank, step);
}

/* Calls of pass_over(). */
static struct {
	unsigned count;
	char directories[4][4096];
} passed;

struct looking {
	const char *directory;
};

static void pass_over(void *user, uint64_t step)
{
	const struct looking *looking = user;

	(void)step;
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->path, looking->directory));
	snprintf(passed.directories[passed.count++], sizeof(*passed.directories), "%s",
		 looking->directory);
}

/* Finds the newest checkpoint. Returns its directory; the group owns the text. */
static const char *find(const struct rank *rank, bool intact, uint64_t *step)
{
	struct ioshape_search_options options = { .size = sizeof(options) };
	struct looking looking = { NULL };

	memset(&passed, 0, sizeof(passed));
	options.intact = intact;
	options.passed_over = pass_over;
	options.passed_over_user = &looking;
	options.directory = &looking.directory;
	ck_assert_msg(!ioshape_group_get_latest(rank->group, &options, step), "%s",
		      ioshape_last_error()->sentence);
	return looking.directory;
}

/* Starts the second rank in a process of its own. */
static pid_t start(const struct scene *scene, void (*body)(const struct rank *))
{
	struct ioshape_tier *own_tier;
	struct ioshape_context *own;
	struct rank rank;
	pid_t child = fork();

	ck_assert_int_ge(child, 0);
	if (child)
		return child;
	/* Equal parts of ranks would be stored once. */
	sample_free(&sample);
	sample_make(&sample, 1 + 1, LARGE);
	own = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ck_assert_int_eq(ioshape_tier_open(own, scratch_path("tier"), NULL, &own_tier), 0);
	rank = open_rank(scene, 1, own, own_tier);
	body(&rank);
	ioshape_group_free(rank.group);
	ioshape_tier_free(own_tier);
	ioshape_context_free(own);
	scratch_leave_child(0);
}

static void run(const struct scene *scene, void (*body)(const struct rank *))
{
	const pid_t child = start(scene, body);
	const struct rank rank = open_rank(scene, 0, context, tier);
	int status;

	body(&rank);
	ioshape_group_free(rank.group);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
}

/* ---- Locations of checkpoints ---------------------------------------------------------------- */

static const char *step_path(uint64_t step)
{
	static char name[64];

	snprintf(name, sizeof(name), "run/step-%010llu", (unsigned long long)step);
	return name;
}

/* Returns the directory of the checkpoints on the tier. */
static const char *near(void)
{
	static char path[2 * PATH_MAX];

	snprintf(path, sizeof(path), "%s/ioshape-%u/files%s", scratch_path("tier"),
		 (unsigned)geteuid(), there("run"));
	return path;
}

static size_t count_in(const char *directory, uint64_t *newest)
{
	uint64_t *steps;
	size_t count;

	ck_assert_int_eq(ioshape_checkpoint_list(context, directory, &steps, &count), 0);
	if (newest)
		*newest = count ? steps[count - 1] : 0;
	free(steps);
	return count;
}

static void must_be_intact(const char *directory, uint64_t step)
{
	struct ioshape_checkpoint_info info = IOSHAPE_CHECKPOINT_INFO_INIT;
	struct ioshape_checkpoint *checkpoint;

	ck_assert_int_eq(ioshape_checkpoint_open(context, directory, step, &checkpoint), 0);
	ck_assert_int_eq(ioshape_checkpoint_get_info(checkpoint, &info), 0);
	ck_assert_uint_eq(info.ranks, RANKS);
	ck_assert_msg(!ioshape_checkpoint_verify(checkpoint, NULL, NULL), "%s",
		      ioshape_last_error()->sentence);
	ioshape_checkpoint_free(checkpoint);
}

static void damage(const char *directory, uint64_t step)
{
	char path[4200];

	snprintf(path, sizeof(path), "%s/step-%010llu/rank-00001.pt", directory,
		 (unsigned long long)step);
	flip(path, LARGE / 2);
}

/* ---- Saving ---------------------------------------------------------------------------------- */

static void save_and_find(const struct rank *rank)
{
	uint64_t step;

	save_all(rank);
	for (int intact = 0; intact < 2; intact++) {
		ck_assert_str_eq(find(rank, intact, &step), near());
		ck_assert(step == 3 && !passed.count);
	}
}

TEST(tests, they_save_on_the_tier_and_the_drain_keeps_the_last_at_the_destination)
{
	struct scene scene = usual;
	uint64_t newest;

	scene.keep_last = 2;
	run(&scene, save_and_find);
	ck_assert_uint_eq(waiting(NULL), 3);
	ck_assert_uint_eq(count_in(near(), NULL), 3);
	ck_assert_uint_eq(count_in(there("run"), NULL), 0);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(count_in(there("run"), &newest), 2);
	ck_assert_uint_eq(newest, 3);
	must_be_intact(there("run"), 3);
	must_be_intact(there("run"), 2);
	/* Retention does not apply to the tier. */
	ck_assert_uint_eq(count_in(near(), NULL), 3);
}

/* Part of the sentence that each rank's report must contain. */
static const char *reason;

static void save_directly(const struct rank *rank)
{
	const struct ioshape_report report = save_step(rank, 1);
	bool said = false;

	for (uint32_t i = 0; i < report.downgrade_count && i < IOSHAPE_REPORT_DOWNGRADES; i++)
		said |= report.downgrades[i].code == IOSHAPE_DOWNGRADE_TIER &&
			strstr(report.downgrades[i].sentence, reason);
	ck_assert_msg(said, "rank %u does not say \"%s\"", rank->rank, reason);
}

static void run_directly(const struct scene *scene, const char *why)
{
	reason = why;
	run(scene, save_directly);
	ck_assert_uint_eq(waiting(NULL), 0);
	ck_assert_uint_eq(count_in(there("run"), NULL), 1);
	must_be_intact(there("run"), 1);
}

/* The tier may be a shared filesystem over the disks of all nodes. */
TEST(tests, ranks_of_several_nodes_save_on_one_tier_together)
{
	struct scene scene = usual;

	scene.several_nodes = true;
	run(&scene, save_and_find);
	ck_assert_uint_eq(waiting(NULL), 3);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(count_in(there("run"), NULL), 3);
	must_be_intact(there("run"), 3);
}

TEST(tests, what_must_not_replace_anything_is_saved_directly)
{
	struct scene scene = usual;

	scene.no_replace = true;
	run_directly(&scene, "not replace an existing");
}

TEST(tests, what_has_a_deadline_is_saved_directly)
{
	struct scene scene = usual;

	scene.save_deadline_ms = 50000;
	run_directly(&scene, "deadline");
}

TEST(tests, what_does_not_fit_on_the_tier_is_saved_directly)
{
	/* There is space for the part of one rank only. */
	ioshape_tier_free(tier);
	tier = open_tier(LARGE + LARGE / 2, 0);
	run_directly(&usual, "it needs");
}

static void save_once(const struct rank *rank)
{
	save_step(rank, 7);
}

static void save_again(const struct rank *rank)
{
	save_step(rank, 8);
}

TEST(tests, only_a_drained_checkpoint_makes_room_for_the_next)
{
	struct scene scene = usual;
	uint64_t newest;

	ioshape_tier_free(tier);
	tier = open_tier(3 * LARGE, 0);
	scene.steps = 1;
	run(&scene, save_all);
	/* A checkpoint that waits is not removed. */
	run(&usual, save_once);
	ck_assert_uint_eq(count_in(near(), &newest), 1);
	ck_assert_uint_eq(newest, 1);
	ck_assert_int_eq(drain(), 0);
	run(&usual, save_again);
	ck_assert_uint_eq(count_in(near(), &newest), 1);
	ck_assert_uint_eq(newest, 8);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(count_in(there("run"), NULL), 3);
}

TEST(tests, a_rank_without_the_tier_has_all_save_directly)
{
	struct scene scene = { .on_tier = { true, false } };

	run_directly(&scene, "no tier");
}

/* ---- The newest checkpoint ------------------------------------------------------------------- */

/* Saves a checkpoint like a host whose clock is ahead. */
static void save_ahead(const char *directory, uint64_t step)
{
	static const char text[] = "text";
	const uint32_t crc = base_crc32(0, text, sizeof(text));
	struct format_manifest_file file = { (char[]){ "rank-00000.pt" }, sizeof(text), crc,
					     false };
	struct format_manifest_shard shard = { .crc32 = crc, .bytes = sizeof(text) };
	struct format_manifest manifest = {
		.step = step,
		.mode = IOSHAPE_MODE_EACH,
		.rank_count = 1,
		.shards = &shard,
		.file_count = 1,
		.files = &file,
	};
	struct group_attempt attempt;

	ck_assert_int_eq(
		group_attempt_begin(&attempt, directory, step, NULL, "00000000", NULL, NULL), 0);
	snprintf(manifest.attempt, sizeof(manifest.attempt), "%s", attempt.id);
	attempt.last_serial = (uint64_t)(base_wall_seconds() * 1000) + 1000000000;
	ck_assert_int_eq(io_folder_put(&attempt.folder, "rank-00000.pt", text, sizeof(text), NULL),
			 0);
	ck_assert_int_eq(group_attempt_commit(&attempt, &manifest, false, NULL), 0);
}

static void save_on(const struct rank *rank)
{
	uint64_t step;

	save_step(rank, 7);
	find(rank, false, &step);
	ck_assert_uint_eq(step, 7);
	save_step(rank, 6);
	find(rank, false, &step);
	ck_assert_uint_eq(step, 6);
}

TEST(tests, numbers_continue_those_of_the_destination)
{
	save_ahead(there("run"), 8);
	run(&usual, save_on);
	ck_assert_uint_eq(waiting(NULL), 2);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(count_in(there("run"), NULL), 3);
}

TEST(tests, what_is_saved_directly_continues_those_of_the_tier)
{
	struct scene scene = usual;

	save_ahead(near(), 8);
	scene.save_deadline_ms = 50000;
	run(&scene, save_on);
	ck_assert_uint_eq(count_in(there("run"), NULL), 2);
}

static void find_there(const struct rank *rank)
{
	uint64_t step;

	for (int intact = 0; intact < 2; intact++) {
		ck_assert_str_eq(find(rank, intact, &step), there("run"));
		ck_assert(step == 7 && !passed.count);
	}
}

TEST(tests, a_newer_one_at_the_destination_is_found_and_stays)
{
	const struct scene direct = { .on_tier = { false, false } };

	run(&usual, save_once);
	run(&direct, save_once);
	shift_time(there(step_path(7)), 60);
	run(&usual, find_there);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_NEWER], 1);
	run(&usual, find_there);
	must_be_intact(there("run"), 7);
}

static void find_drained(const struct rank *rank)
{
	uint64_t step;

	ck_assert_str_eq(find(rank, true, &step), there("run"));
	ck_assert_uint_eq(step, 7);
	ck_assert_uint_eq(passed.count, 1);
	ck_assert_str_eq(passed.directories[0], near());
}

static void find_older(const struct rank *rank)
{
	uint64_t step;

	ck_assert_str_eq(find(rank, true, &step), near());
	ck_assert_uint_eq(step, 2);
	ck_assert_uint_eq(passed.count, 1);
}

TEST(tests, a_damaged_copy_is_passed_over_for_the_one_at_the_destination)
{
	run(&usual, save_once);
	ck_assert_int_eq(drain(), 0);
	damage(near(), 7);
	run(&usual, find_drained);
}

TEST(tests, so_is_one_without_its_manifest)
{
	char path[2 * PATH_MAX + 64];

	run(&usual, save_once);
	ck_assert_int_eq(drain(), 0);
	snprintf(path, sizeof(path), "%s/step-0000000007/manifest.json", near());
	ck_assert_int_eq(unlink(path), 0);
	run(&usual, find_drained);
}

TEST(tests, a_damaged_copy_that_is_nowhere_else_is_passed_over_for_an_older_one)
{
	run(&usual, save_all);
	damage(near(), 3);
	run(&usual, find_older);
	/* A damaged checkpoint is not drained. */
	ck_assert_int_eq(drain(), IOSHAPE_E_DAMAGED);
	ck_assert_uint_eq(count_in(there("run"), NULL), 2);
}
