/* SPDX-License-Identifier: Apache-2.0 */
/* Generations that do not fit: what rank 0 finds out is told to all. */
#define _GNU_SOURCE
#include "support/full_case.h"

#include <sys/wait.h>

/* ---- Groups ---------------------------------------------------------------------------------- */

#define RANKS 2

struct scene {
	enum ioshape_full full;
	enum ioshape_mode mode;
	bool background;
	int code;
	uint32_t full_wait_ms;
};

static const struct scene *scene;

/* Tells the parent that the rank waits for room. */
static int tell_waiting(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)done, (void)total;
	if (phase == IOSHAPE_PHASE_WAIT && has_heard("waits for room"))
		write_zeros(scratch_path("waiting"), 1);
	return 0;
}

static int play_rank(void *argument)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_save_options save_options = options_of(&new_sample);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *context;
	struct ioshape_group *group;
	struct ioshape_save *save;
	const char *message;
	char checkpoints[PATH_MAX];
	uint64_t latest = 0;
	int ret;

	save_options.progress = tell_waiting;
	options.rank = (uint32_t)(uintptr_t)argument;
	options.ranks = options.local_ranks = RANKS;
	options.mode = scene->mode;
	options.token = scratch_directory();
	/* Shorter than what is waited for room: ranks are alive meanwhile. */
	options.deadline_ms = 1000;
	context = open_context(scene->full, scene->full_wait_ms);
	snprintf(checkpoints, sizeof(checkpoints), "%s/runs/checkpoints", where);
	if (ioshape_group_open(context, checkpoints, &options, &group)) {
		fprintf(stderr, "%s\n", ioshape_context_message(context));
		return 10;
	}
	if (ioshape_group_save_tensors_async(group, 2, new_sample.tensors, new_sample.count,
					     &save_options, &save))
		return 11;
	ret = ioshape_save_wait(save, 20000);
	ioshape_save_report(save, &report);
	message = ioshape_save_message(save);
	if (ret != scene->code) {
		fprintf(stderr, "rank %u: %d %s\n", options.rank, ret, message);
		return 12;
	}
	if (report.skipped != (ret == IOSHAPE_E_SKIPPED))
		return 13;
	if (ret && (!strstr(message, "it needs 8") || !strstr(message, checkpoints))) {
		fprintf(stderr, "rank %u: %s\n", options.rank, message);
		return 14;
	}
	if (report.skipped && !strstr(report.fallback_text, "it needs 8"))
		return 15;
	if (!ret && !options.rank && !strstr(report.fallback_text, "waited "))
		return 16;
	ret = ioshape_group_latest(group, &latest);
	if (scene->code ? ret != -ENOENT : ret || latest != 2)
		return 17;
	ioshape_save_free(save);
	ioshape_group_free(group);
	ioshape_context_free(context);
	return 0;
}

/* All ranks of a scene; the statuses of those that did not end well. */
static bool play(const struct scene *which, useconds_t room_after_us)
{
	pid_t pids[RANKS];
	bool well = true;
	int status;

	scene = which;
	unlink(scratch_path("waiting"));
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		pids[rank] = fork();
		if (!pids[rank])
			scratch_leave_child(play_rank((void *)(uintptr_t)rank));
	}
	if (room_after_us) {
		for (int tries = 0; tries < 2000 && access(scratch_path("waiting"), F_OK); tries++)
			usleep(10000);
		usleep(room_after_us);
		make_room();
	}
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		waitpid(pids[rank], &status, 0);
		if (status && well) {
			snprintf(complaint, sizeof(complaint),
				 "full %d, mode %d, rank %u: status %x", which->full, which->mode,
				 rank, status);
			well = false;
		}
	}
	return well;
}

static bool leaves_nothing(void)
{
	REQUIRE_THAT(!shell("[ -z \"$(find '%s/runs' -name '*step*' 2>/dev/null)\" ]", where));
	return true;
}

static bool groups_fail_or_skip(void)
{
	for (enum ioshape_mode mode = IOSHAPE_MODE_EACH; mode <= IOSHAPE_MODE_RANK0; mode++) {
		const struct scene fails = { IOSHAPE_FULL_FAIL, mode, true, -ENOSPC, 0 };
		const struct scene skipping = { IOSHAPE_FULL_SKIP, mode, true, IOSHAPE_E_SKIPPED,
						0 };

		if (!play(&fails, 0) || !leaves_nothing() || !play(&skipping, 0) ||
		    !leaves_nothing())
			return false;
	}
	return holds(&old_sample);
}

static bool groups_wait(void)
{
	for (enum ioshape_mode mode = IOSHAPE_MODE_EACH; mode <= IOSHAPE_MODE_RANK0; mode++) {
		const struct scene waiting = { IOSHAPE_FULL_WAIT, mode, true, 0, 60000 };

		if (!play(&waiting, mode == IOSHAPE_MODE_EACH ? 1200000 : 50000))
			return false;
		shell("rm -rf '%s/runs'", where);
		fill_up(LEFT_BYTES);
	}
	const struct scene too_long = { IOSHAPE_FULL_WAIT, IOSHAPE_MODE_NODE, true, -ENOSPC, 300 };

	return play(&too_long, 0) && leaves_nothing();
}

/* ---- All of them ----------------------------------------------------------------------------- */

static const struct full_test tests[] = {
	{ "a group that does not fit fails, or is skipped", groups_fail_or_skip, 1 },
	{ "a group waits for room", groups_wait, 1 },
};

int main(void)
{
	return run_tests(tests, ARRAY_LENGTH(tests));
}
