/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which engine a mount likes, by trial; and what becomes of that for one file.
 *
 * The trial is short: it lies in front of a save. First a few requests tell how fast the storage is
 * at all; from that follows how much each candidate may write. Who takes longer than it need be is
 * cut off. It runs within the slot of the save, so that as few others write as while we save.
 */
#define _GNU_SOURCE
#include "ring/calibrate.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* No trial begins later than this after the beginning; it ends at less than 0.3 s. */
#define LATEST_MS 240

/* What a candidate may write: so much as takes so long at the speed of the first requests. */
#define TRIAL_MS 25
#define MOST_TRIAL_BYTES (16 * MIB)
#define PROBE_BLOCKS 4
/* The first requests of a slower storage have to do for the first engine. */
#define SLOW_PROBE_MS 50

/* Requests of a trial, and how many are in flight. */
#define TRIAL_BLOCK_BYTES (1 * MIB)
#define TRIAL_DEPTH 16

/* Who comes first in the order below stays, unless another is faster by more than this: once, and
 * again; or by more than the other. */
#define MARGIN_PERCENT 10
#define UNSURE_MARGIN_PERCENT 50

/* After a failure. */
#define AGAIN_AFTER_S 600

static const enum ioshape_engine order[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_URING_ASYNC,
					     IOSHAPE_ENGINE_THREADS, IOSHAPE_ENGINE_BUFFERED };
#define ENGINES ARRAY_LENGTH(order)
#define BUFFERED (ENGINES - 1)

/* Tried only if there is time for one that is so many times slower than the best. */
#define BUFFERED_PART 3

#define TOO_SLOW "too slow to compare anything"

/* ---- Trials ---------------------------------------------------------------------------------- */

struct search {
	struct ring_bench bench;
	struct ring_calibration *calibration;
	size_t block;
	uint64_t bytes; /* of a trial */
	size_t best;    /* engine so far, in the order above; ENGINES: none */
	uint64_t rate;  /* its bytes per second; 0 while there is none */
	bool complete;  /* all that go direct have been tried, as far as they can be had */
};

/* Requests as long as the real ones, or even parts of them. */
static size_t trial_block(const struct fs_layout *layout)
{
	const struct fs_part *part = ring_stripes_at(layout, 0);
	const size_t block = part ? ring_stripe_block(part->stripe_bytes) : RING_BLOCK_BYTES;

	if (block % TRIAL_BLOCK_BYTES && block <= RING_BLOCK_BYTES)
		return block;
	return TRIAL_BLOCK_BYTES;
}

static uint64_t ns_for(uint64_t bytes, uint64_t bytes_per_s)
{
	return (uint64_t)((double)bytes * 1e9 / (double)MAX(bytes_per_s, 1));
}

static bool has_time(const struct search *search, uint64_t bytes, uint64_t bytes_per_s)
{
	return base_now_ns() + ns_for(bytes, bytes_per_s) < search->bench.end_ns;
}

static bool is_faster(uint64_t rate, uint64_t than, unsigned percent)
{
	return rate * 100 > than * (100 + percent);
}

static void record(struct search *search, const struct ring_trial *trial)
{
	struct ring_calibration *calibration = search->calibration;

	if (calibration->trial_count < RING_MOST_TRIALS)
		calibration->trials[calibration->trial_count++] = *trial;
}

/* Its bytes per second, or 0. Whoever is much slower than the best is cut off. */
static uint64_t try_engine(struct search *search, size_t i)
{
	struct ring_trial trial = { order[i], search->block, TRIAL_DEPTH, 0 };
	const uint64_t give_up = search->rate ? ns_for(search->bytes, search->rate) * 3 / 2 : 0;

	if (ring_bench_try(&search->bench, &trial, search->bytes, give_up)) {
		search->complete &= search->bench.refused[order[i]];
		return 0;
	}
	record(search, &trial);
	return trial.bytes_per_s;
}

/*
 * It becomes the best if it is faster by the margin, and is so again when both are compared once
 * more: the best may have been held up by somebody else, and this one lucky. If there is no time
 * for that, it has to be faster by the larger margin.
 */
static void challenge(struct search *search, size_t i, unsigned margin_percent)
{
	uint64_t rate = try_engine(search, i), again = 0;

	if (!is_faster(rate, search->rate, margin_percent))
		return;
	if (search->rate) {
		search->rate = MAX(search->rate, try_engine(search, search->best));
		again = try_engine(search, i);
		if (again)
			rate = MIN(rate, again);
		else
			margin_percent = UNSURE_MARGIN_PERCENT;
	}
	if (is_faster(rate, search->rate, margin_percent)) {
		search->best = i;
		search->rate = rate;
	}
}

/* How fast it is at all: the first requests, of which the very first does not count. -ENOTSUP if
 * no engine can write. */
static int probe(struct search *search)
{
	struct ring_trial trial = { IOSHAPE_ENGINE_AUTO, search->block, PROBE_BLOCKS, 0 };
	int ret = -ENOTSUP;
	size_t i;

	for (i = 0; ret && i < ENGINES; i++) {
		trial.engine = order[i];
		ret = ring_bench_try(&search->bench, &trial, search->block, 0);
	}
	if (!ret)
		ret = ring_bench_try(&search->bench, &trial, PROBE_BLOCKS * search->block, 0);
	if (ret)
		return ret;
	search->bytes = (uint64_t)((double)trial.bytes_per_s * TRIAL_MS / 1e3);
	search->bytes = MIN(search->bytes, MOST_TRIAL_BYTES) / search->block * search->block;
	search->bytes = MAX(search->bytes, PROBE_BLOCKS * search->block);
	if (ns_for(search->bytes, trial.bytes_per_s) > base_ms_to_ns(SLOW_PROBE_MS)) {
		search->best = i - 1;
		search->rate = trial.bytes_per_s;
		record(search, &trial);
	}
	return 0;
}

/*
 * In their order, those that go past the page cache; then the page cache. A few megabytes flatter
 * that: it takes them as fast as memory, and what it does to a gigabyte is not seen. So it has to
 * be faster by the larger margin. It may also be slow, and cannot be cut off once it has its bytes.
 */
static int choose_engine(struct search *search)
{
	search->complete = true;
	for (size_t i = 0; i < BUFFERED; i++) {
		if (i != search->best)
			challenge(search, i, MARGIN_PERCENT);
	}
	/* The first one that won by being the only one is better compared another time. */
	if (!search->best && !search->complete)
		return -ETIME;
	if (!search->rate || has_time(search, search->bytes, search->rate / BUFFERED_PART))
		challenge(search, BUFFERED, UNSURE_MARGIN_PERCENT);
	return search->rate ? 0 : -ETIME;
}

static int search_all(struct search *search, struct base_error *error)
{
	struct ring_calibration *calibration = search->calibration;
	int ret;

	search->block = trial_block(&search->bench.fs.layout);
	ret = probe(search);
	if (ret)
		return base_fail(error, ret, ret == -ETIME ? TOO_SLOW : "nothing could be written");
	ret = choose_engine(search);
	if (ret)
		return base_refuse(error, ret, TOO_SLOW);
	calibration->engine = order[search->best];
	calibration->bytes_per_s = search->rate;
	return 0;
}

/* Beside `path`, which need not exist. */
static int calibrate(const struct ring_config *config, const char *path, uint64_t leave_bytes,
		     struct ring_calibration *calibration, struct base_error *error)
{
	struct search search = { .calibration = calibration,
				 .bench.leave_bytes = leave_bytes,
				 .best = ENGINES };
	uint64_t begin = base_now_ns();
	int ret;

	memset(calibration, 0, sizeof(*calibration));
	search.bench.end_ns = begin + base_ms_to_ns(LATEST_MS);
	ret = ring_bench_open(&search.bench, config, path, error);
	if (!ret)
		ret = search_all(&search, error);
	ring_bench_close(&search.bench);
	calibration->took_s = base_seconds(base_now_ns() - begin);
	calibration->measured_at = base_wall_seconds();
	return ret;
}

/* ---- Now ------------------------------------------------------------------------------------- */

/* With the turn of this process and of this user's others. */
static int calibrate_and_keep(const struct ring_config *config, const char *path,
			      uint64_t leave_bytes, const char *mount, struct ring_turn *turn,
			      struct ring_calibration *calibration, struct base_error *error)
{
	int ret = calibrate(config, path, leave_bytes, calibration, error);

	if (!ret)
		ring_memory_put(config->memory, mount, calibration);
	ring_memory_tried(config->memory, mount, ret ? base_wall_seconds() + AGAIN_AFTER_S : 0,
			  turn);
	if (!ret)
		base_log(&config->log, IOSHAPE_LOG_DEBUG, "calibrated %s in %.3f s: %s, %.0f MB/s",
			 mount, calibration->took_s, ring_engine_name(calibration->engine),
			 (double)calibration->bytes_per_s / 1e6);
	return ret;
}

int ring_calibrate_now(const char *directory, const struct ring_config *config,
		       struct ring_calibration *calibration, struct base_error *error)
{
	char mount[FS_POOL_BYTES], *path = NULL;
	struct ring_turn turn;
	int ret;

	if (asprintf(&path, "%s/calibration", directory) < 0)
		return base_no_memory(error, "a path", strlen(directory));
	ret = fs_pool_of_path(path, mount, error);
	if (!ret) {
		ret = ring_memory_try(config->memory, mount, (double)INT64_MAX, &turn);
		if (ret)
			base_fail(error, ret, "somebody else is trying how %s is best written to",
				  mount);
	}
	if (!ret)
		ret = calibrate_and_keep(config, path, 0, mount, &turn, calibration, error);
	free(path);
	return ret;
}

/* ---- The choice for one file ----------------------------------------------------------------- */

const char *ring_reason_text(enum ring_reason reason)
{
	static const char *const texts[] = {
		[RING_AS_CALIBRATED] = "as calibrated",
		[RING_AS_ASKED] = "as asked for",
		[RING_SMALL_FILE] = "small file",
		[RING_CALIBRATION_OFF] = "not calibrated: off",
		[RING_DIRECT_OFF] = "not calibrated: direct I/O is off",
		[RING_UNKNOWN_MOUNT] = "not calibrated: nobody knows what it is on",
		[RING_IN_MEMORY] = "not calibrated: in memory",
		[RING_SIZE_UNKNOWN] = "not calibrated: the file's size is not known ahead",
		[RING_NOT_LARGE] = "not calibrated: the file is not large enough",
		[RING_NO_REGULAR_FILE] = "not calibrated: no regular file",
		[RING_NOT_TRIED] = "not calibrated so far",
		[RING_TRIED_ELSEWHERE] = "not calibrated: another trial runs, or one failed lately",
		[RING_TRIAL_FAILED] = "not calibrated",
	};

	return texts[reason];
}

static void give_reason(struct ring_choice *choice, enum ring_reason reason)
{
	choice->reason = reason;
	snprintf(choice->why, sizeof(choice->why), "%s", ring_reason_text(reason));
}

/* "2 h ago"; whole units are enough. */
static void age_text(double seconds, char *text, size_t text_bytes)
{
	if (seconds < 120)
		snprintf(text, text_bytes, "%.0f s ago", MAX(seconds, 0));
	else if (seconds < 7200)
		snprintf(text, text_bytes, "%.0f min ago", seconds / 60);
	else if (seconds < 172800)
		snprintf(text, text_bytes, "%.0f h ago", seconds / 3600);
	else
		snprintf(text, text_bytes, "%.0f days ago", seconds / 86400);
}

static void follow(struct ring_choice *choice, const char *when)
{
	const struct ring_calibration *calibration = &choice->calibration;

	choice->reason = RING_AS_CALIBRATED;
	snprintf(choice->why, sizeof(choice->why), "calibrated %s: %s, %.2f GB/s", when,
		 ring_engine_name(calibration->engine), (double)calibration->bytes_per_s / 1e9);
}

static bool recall(struct ring_choice *choice, const struct ring_config *config)
{
	const double now = base_wall_seconds();
	const double since = config->calibrate == IOSHAPE_CALIBRATE_AGAIN ? config->opened_s : 0;
	char when[32];

	if (ring_memory_get(config->memory, choice->mount, since, now, &choice->calibration))
		return false;
	age_text(now - choice->calibration.measured_at, when, sizeof(when));
	follow(choice, when);
	return true;
}

static void try_now(struct ring_choice *choice, const struct ring_config *config, const char *path,
		    uint64_t expected_bytes)
{
	struct base_error error = { 0 };
	struct ring_turn turn;
	char when[32];

	if (ring_memory_try(config->memory, choice->mount, base_wall_seconds(), &turn)) {
		give_reason(choice, RING_TRIED_ELSEWHERE);
		return;
	}
	/* Another process may have been done just now. */
	if (recall(choice, config)) {
		ring_memory_tried(config->memory, choice->mount, 0, &turn);
		return;
	}
	if (calibrate_and_keep(config, path, expected_bytes, choice->mount, &turn,
			       &choice->calibration, &error)) {
		memset(&choice->calibration, 0, sizeof(choice->calibration));
		choice->reason = RING_TRIAL_FAILED;
		snprintf(choice->why, sizeof(choice->why), "%s: %.100s",
			 ring_reason_text(RING_TRIAL_FAILED), error.text);
		return;
	}
	snprintf(when, sizeof(when), "now in %.2f s", choice->calibration.took_s);
	follow(choice, when);
}

static bool is_no_file(const char *path)
{
	struct stat status;

	return !stat(path, &status) && !S_ISREG(status.st_mode);
}

/* Why nothing that is remembered is even looked for; RING_AS_CALIBRATED: it is. */
static enum ring_reason reason_against(const struct ring_config *config, const char *path,
				       uint64_t expected_bytes, char mount[FS_POOL_BYTES])
{
	if (config->engine != IOSHAPE_ENGINE_AUTO)
		return RING_AS_ASKED;
	if (expected_bytes && expected_bytes < RING_KNOWN_FILE_BYTES)
		return RING_SMALL_FILE;
	if (config->calibrate == IOSHAPE_CALIBRATE_OFF)
		return RING_CALIBRATION_OFF;
	if (config->direct == IOSHAPE_DIRECT_OFF)
		return RING_DIRECT_OFF;
	if (ring_memory_name(config->memory, path, mount))
		return RING_UNKNOWN_MOUNT;
	if (!strncmp(mount, "tmpfs:", 6) || !strncmp(mount, "ramfs:", 6))
		return RING_IN_MEMORY;
	return RING_AS_CALIBRATED;
}

void ring_choose(const struct ring_config *config, const char *path, uint64_t expected_bytes,
		 bool may_try, struct ring_choice *choice)
{
	enum ring_reason against;

	memset(choice, 0, sizeof(*choice));
	against = reason_against(config, path, expected_bytes, choice->mount);
	if (against)
		give_reason(choice, against);
	else if (recall(choice, config))
		return;
	else if (!expected_bytes)
		give_reason(choice, RING_SIZE_UNKNOWN);
	else if (expected_bytes < RING_TRIAL_FILE_BYTES)
		give_reason(choice, RING_NOT_LARGE);
	else if (is_no_file(path))
		give_reason(choice, RING_NO_REGULAR_FILE);
	else if (!may_try)
		give_reason(choice, RING_NOT_TRIED);
	else
		try_now(choice, config, path, expected_bytes);
}

int ring_foresee(const struct ring_config *config, const char *directory, enum fs_family family,
		 const struct fs_layout *layout, uint64_t file_bytes,
		 struct ring_forecast *forecast, struct base_error *error)
{
	struct ring_choice choice;
	char *path = NULL;

	memset(forecast, 0, sizeof(*forecast));
	if (asprintf(&path, "%s/calibration", directory) < 0)
		return base_no_memory(error, "a path", strlen(directory));
	ring_choose(config, path, MAX(file_bytes, 1), false, &choice);
	free(path);
	forecast->trial_to_come = choice.reason == RING_NOT_TRIED;
	forecast->calibration = choice.calibration;
	forecast->shape = ring_shape_chosen(config, &choice, family, layout, file_bytes,
					    forecast->why, sizeof(forecast->why));
	return 0;
}

struct ring_shape ring_shape_chosen(const struct ring_config *config,
				    const struct ring_choice *choice, enum fs_family family,
				    const struct fs_layout *layout, uint64_t file_bytes, char *why,
				    size_t why_bytes)
{
	const struct ring_calibration *calibration = &choice->calibration;
	struct ring_shape shape;
	char rule[64] = "";

	shape = ring_shape_for(config, family, layout, file_bytes, rule, sizeof(rule));
	snprintf(why, why_bytes, "%s%s%s", choice->why, *rule ? "; " : "", rule);
	if (choice->reason == RING_AS_CALIBRATED &&
	    (calibration->engine != IOSHAPE_ENGINE_BUFFERED ||
	     config->direct != IOSHAPE_DIRECT_REQUIRE))
		shape.engine = calibration->engine;
	return shape;
}
