/* SPDX-License-Identifier: Apache-2.0 */
/* Acts that save on a tier, drain it, or look at it. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/group.h>
#include <ioshape/tier.h>

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define THERE "there"
#define NEAR "tier"
#define OLDER THERE "/older" /* a file that was drained before */
#define NOTHING THERE "/nothing"
#define STEP 7
#define STEP_NAME "step-0000000007"
#define SHARD "rank-00000.pt"

enum content {
	OLD,
	NEW,
	CONTENTS,
};

struct variant {
	bool folder;  /* the saved object is a checkpoint of a group */
	bool drains;  /* the harmed operation is the drain, not the save */
	bool full;    /* there is space only if a drained copy is removed */
	bool forgets; /* a kept save is forgotten */
	bool first;   /* nothing is at the destination before */
	bool no_swap; /* the filesystem cannot swap names, as NFS */
};

static struct sample samples[CONTENTS];
static uint8_t *archives[CONTENTS]; /* files with the samples */
static size_t archive_bytes[CONTENTS];
static uint8_t *shards[CONTENTS]; /* shards of checkpoints with the samples */
static size_t shard_bytes[CONTENTS];
static char places[PATH_MAX]; /* folder of the copies of files below THERE */

static struct ioshape_context *context;
static struct ioshape_tier *tier;

/* ---- Operations, each in a process of its own ------------------------------------------------ */

static int open_all(bool full, uint32_t keep_last)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_tier_options tier_options = IOSHAPE_TIER_OPTIONS_INIT;
	int ret;

	options.coordinator = "open";
	ret = harm_heed(
		open_context_with(&context, &options, (struct test_rules){ .queue_depth = 2 }));
	if (ret)
		return ret;
	/* Three copies are made, and the tier has space for two of them. */
	tier_options.most_bytes = full ? archive_bytes[NEW] * 5 / 2 : 0;
	tier_options.keep_last = keep_last;
	return harm_heed(ioshape_tier_open(context, NEAR, &tier_options, &tier));
}

static int close_all(int ret)
{
	ioshape_tier_free(tier);
	ioshape_context_free(context);
	tier = NULL;
	context = NULL;
	return ret;
}

/* Saves a checkpoint of one rank, as a group. */
static int save_step(const char *directory, enum content content)
{
	const struct sample *sample = &samples[content];
	struct ioshape_group *group;
	int ret = harm_heed(ioshape_group_open(context, directory, NULL, &group));

	if (ret)
		return ret;
	ret = harm_heed(ioshape_group_save_tensors(group, STEP, sample->tensors, sample->count,
						   NULL, NULL));
	ioshape_group_free(group);
	return ret;
}

static const char *path_of(const struct variant *variant)
{
	return variant->folder ? THERE "/" STEP_NAME : THERE "/file";
}

static int save_near(bool folder, const char *path, enum content content)
{
	char *copy_path;
	int ret = harm_heed(ioshape_tier_path(tier, path, archive_bytes[content], &copy_path));

	if (ret)
		return ret;
	if (folder) {
		*strrchr(copy_path, '/') = 0;
		ret = save_step(copy_path, content);
	} else {
		ret = harm_heed(sample_save(context, copy_path, &samples[content], NULL));
	}
	ioshape_free(copy_path);
	return ret ? ret : harm_heed(ioshape_tier_keep(tier, path, NULL));
}

static int drain(void)
{
	return harm_heed(ioshape_tier_drain(tier, NULL));
}

static int run(const struct act *act, unsigned rank)
{
	const struct variant *variant = act->variant;
	/* One drained copy is kept, and the older one is removed. */
	int ret = open_all(variant->full, variant->drains && variant->folder);

	(void)rank;
	if (variant->no_swap)
		harm_deny("renameat2", EINVAL);
	if (!ret && variant->forgets)
		ret = harm_heed(ioshape_tier_forget(tier, path_of(variant), NULL));
	else if (!ret)
		ret = variant->drains ? drain() : save_near(variant->folder, path_of(variant), NEW);
	return close_all(ret);
}

/* Lists and finds copies. This changes nothing. */
static int look_around(const struct act *act, unsigned rank)
{
	struct ioshape_tier_copy *copies;
	size_t count = 0;
	char *copy_path;
	int ret = open_all(false, 0);

	(void)rank;
	if (!ret)
		ret = harm_heed(ioshape_tier_list(tier, &copies, &count));
	if (!ret) {
		ioshape_free(copies);
		if (count != 2)
			ret = harm_wrong("%zu copies are listed", count);
	}
	if (!ret) {
		ret = harm_heed(ioshape_tier_find(tier, path_of(act->variant), &copy_path));
		ioshape_free(copy_path);
	}
	if (!ret) {
		ret = ioshape_tier_find(tier, NOTHING, &copy_path);
		if (!ret)
			ret = harm_wrong("a copy of nothing is found");
		else
			ret = ret == -ENOENT ? 0 : harm_heed(ret);
		ioshape_free(copy_path);
	}
	return close_all(ret);
}

/* ---- State before and after ------------------------------------------------------------------ */

static int prepare(const struct act *act)
{
	const struct variant *variant = act->variant;
	int ret = open_all(false, 0);

	if (!ret)
		ret = save_near(false, OLDER, OLD);
	if (!ret && !variant->first)
		ret = save_near(variant->folder, path_of(variant), OLD);
	if (!ret)
		ret = drain();
	if (!ret && (variant->drains || variant->forgets))
		ret = save_near(variant->folder, path_of(variant), NEW);
	return close_all(ret);
}

static void begin(const struct act *act)
{
	scratch_remove(THERE);
	scratch_remove(NEAR);
	if (mkdir(THERE, 0700) || mkdir(NEAR, 0700))
		harm_must(-errno, "make folders");
	harm_alone(prepare, act, "save on a tier");
}

static int drain_well(const struct act *act)
{
	int ret = open_all(false, 0);

	(void)act;
	if (!ret)
		ret = drain();
	return close_all(ret);
}

static bool holds(const struct variant *variant, enum content content)
{
	const char *path = path_of(variant);
	char shard[64], manifest[64];

	if (!variant->folder)
		return scratch_same(path, archives[content], archive_bytes[content]);
	snprintf(shard, sizeof(shard), "%s/" SHARD, path);
	snprintf(manifest, sizeof(manifest), "%s/manifest.json", path);
	return !access(manifest, F_OK) &&
	       scratch_same(shard, shards[content], shard_bytes[content]);
}

static enum state look_there(const struct variant *variant)
{
	if (access(path_of(variant), F_OK))
		return STATE_GONE;
	return holds(variant, NEW) ? STATE_NEW : holds(variant, OLD) ? STATE_OLD : STATE_TORN;
}

/* Returns whether a checkpoint on the tier has lost a file. */
static bool is_copy_torn(const struct variant *variant)
{
	char shard[PATH_MAX + 64], manifest[PATH_MAX + 64];

	snprintf(shard, sizeof(shard), "%s/" STEP_NAME "/" SHARD, places);
	snprintf(manifest, sizeof(manifest), "%s/" STEP_NAME "/manifest.json", places);
	return variant->folder && !access(shard, F_OK) != !access(manifest, F_OK);
}

/* Returns the state in which the destination is in the end, if the destination has the old content
 * now and the copies on the tier were drained then. */
static enum state judge_drained(const struct variant *variant)
{
	enum state later = look_there(variant);

	if (later == STATE_GONE && variant->first)
		later = STATE_OLD;
	if (variant->forgets)
		return later == STATE_NEW ? STATE_OLD : later == STATE_OLD ? STATE_NEW : later;
	if (!variant->drains)
		return later;
	return later == STATE_NEW ? STATE_OLD : later == STATE_OLD ? STATE_GONE : later;
}

/* Looks at the destination. A copy that was kept, or that a drain left, is drained first. */
static enum state look(const struct act *act)
{
	const struct variant *variant = act->variant;
	enum state state = look_there(variant);

	/* A process that dies between two renames leaves nothing there until the next drain. */
	if (state == STATE_GONE && (variant->first || variant->no_swap))
		state = STATE_OLD;
	if (is_copy_torn(variant) || (state == STATE_NEW && !variant->drains))
		return STATE_TORN;
	if (state != STATE_OLD)
		return state;
	harm_alone(drain_well, act, "drain a tier");
	return judge_drained(variant);
}

static int save_and_drain(const struct act *act)
{
	const struct variant *variant = act->variant;
	int ret = open_all(false, 0);

	if (!ret)
		ret = drain();
	if (!ret)
		ret = save_near(variant->folder, path_of(variant), OLD);
	/* A file's save removes a dead process's copy that was moved aside; a group's does not. */
	if (!ret && variant->folder)
		ret = save_near(false, NOTHING, OLD);
	if (!ret)
		ret = drain();
	/* A save beside the tier, which replaces a file that the tier has drained. */
	if (!ret)
		ret = sample_save(context, OLDER, &samples[NEW], NULL);
	return close_all(ret);
}

static unsigned again(const struct act *act)
{
	harm_alone(save_and_drain, act, "save on a tier again");
	return scratch_temporaries(THERE) - harm_homeless(THERE) + scratch_temporaries(places) -
	       harm_homeless(places);
}

static int save_archives(const struct act *act)
{
	int ret = open_all(false, 0);

	(void)act;
	if (!ret)
		ret = sample_save(context, "old", &samples[OLD], NULL);
	if (!ret)
		ret = sample_save(context, "new", &samples[NEW], NULL);
	if (!ret)
		ret = save_step("olds", OLD);
	if (!ret)
		ret = save_step("news", NEW);
	return close_all(ret);
}

static void open_act(const struct act *act)
{
	char *here = getcwd(NULL, 0);

	/* Files are compared byte by byte, and alarms are in the files. */
	setenv("IOSHAPE_EXAMINE", "off", 1);
	snprintf(places, sizeof(places), NEAR "/ioshape-%u/files%s/" THERE, (unsigned)geteuid(),
		 here);
	free(here);
	for (unsigned content = 0; content < CONTENTS; content++)
		sample_make(&samples[content], content, 20000);
	if (mkdir(NEAR, 0700))
		harm_must(-errno, "make a folder");
	harm_alone(save_archives, act, "save");
	archives[OLD] = scratch_read("old", &archive_bytes[OLD]);
	archives[NEW] = scratch_read("new", &archive_bytes[NEW]);
	shards[OLD] = scratch_read("olds/" STEP_NAME "/" SHARD, &shard_bytes[OLD]);
	shards[NEW] = scratch_read("news/" STEP_NAME "/" SHARD, &shard_bytes[NEW]);
}

static void open_look(const struct act *act)
{
	open_act(act);
	begin(act);
}

static void close_act(const struct act *act)
{
	(void)act;
	for (unsigned content = 0; content < CONTENTS; content++) {
		free(archives[content]);
		free(shards[content]);
		sample_free(&samples[content]);
	}
}

#define ACT(id, ...)                                                                               \
	.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .open = open_act,           \
	.close = close_act, .begin = begin, .run = run, .look = look, .again = again,              \
	.slow = true, .leaves = true

/* Checksums beside a file may be lost, and a copy that makes space is renamed first. So some of
 * these acts are not durable. */
static const struct act acts[] = {
	{ ACT("save on a tier", .full = false), .durable = true },
	{ ACT("save on a full tier", .full = true), .durable = true },
	{ ACT("save a directory on a tier", .folder = true) },
	{ ACT("first save on a tier", .first = true), .durable = true },
	{ ACT("drain a file", .drains = true), .durable = true },
	{ ACT("drain the first file", .drains = true, .first = true), .durable = true },
	{ ACT("drain a directory", .drains = true, .folder = true) },
	{ ACT("drain the first directory", .drains = true, .folder = true, .first = true) },
	{ ACT("drain a directory without swap", .drains = true, .folder = true, .no_swap = true) },
	{ ACT("forget a file", .forgets = true) },
	{ ACT("forget a directory", .forgets = true, .folder = true, .first = true) },
	{ .name = "look at a tier",
	  .variant = &(const struct variant){ .drains = true },
	  .open = open_look,
	  .close = close_act,
	  .run = look_around,
	  .slow = true },
	{ .name = NULL },
};

const struct act *const tier_acts = acts;
