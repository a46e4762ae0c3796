/* SPDX-License-Identifier: Apache-2.0 */
/* Acts of two ranks that save a checkpoint on a tier, or as two nodes on tiers with copies of each
 * other's files, and of nodes that restore what one of them has lost. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/wires.h"

#include <ioshape/group.h>
#include <ioshape/tier.h>

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANKS 2
#define DEADLINE_MS 1000 /* the library's minimum */
#define THERE "there"

enum {
	FIRST = 1, /* a step that no act changes */
	STEP,
	NEXT,
	STEPS,
};

struct variant {
	bool nodes;    /* each rank is a node, with a tier of its own */
	bool restores; /* a node has lost its tier, and all search for the newest checkpoint */
};

static struct sample samples[STEPS][RANKS];
static struct wires wires;

/* Step that run() saves; 0: run() searches for the newest checkpoint. */
static uint64_t doing;

static struct ioshape_context *context;
static struct ioshape_tier *tier;

static const char *tier_of(const struct variant *variant, unsigned rank)
{
	return variant->nodes && rank ? "tier-1" : "tier-0";
}

/* ---- Operations, each in a process of its own ------------------------------------------------ */

static int open_all(const char *folder)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_tier_options tier_options = IOSHAPE_TIER_OPTIONS_INIT;
	int ret;

	options.coordinator = "open";
	tier_options.parity = IOSHAPE_PARITY_1_OF_2;
	ret = harm_heed(
		open_context_with(&context, &options, (struct test_rules){ .queue_depth = 2 }));
	return ret ? ret : harm_heed(ioshape_tier_open(context, folder, &tier_options, &tier));
}

static int close_all(int ret)
{
	ioshape_tier_free(tier);
	ioshape_context_free(context);
	tier = NULL;
	context = NULL;
	return ret;
}

static int restore(struct ioshape_group *group, unsigned rank)
{
	uint64_t step;
	int ret = harm_heed(ioshape_group_get_latest(group, NULL, &step));

	if (!ret && mkdir(rank ? "restored-1" : "restored-0", 0700))
		ret = -errno;
	return ret;
}

static int save(struct ioshape_group *group, unsigned rank)
{
	const struct sample *sample = &samples[doing][rank];

	return harm_heed(ioshape_group_save_tensors(group, doing, sample->tensors, sample->count,
						    NULL, NULL));
}

static int run(const struct act *act, unsigned rank)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	const struct variant *variant = act->variant;
	struct ioshape_group *group;
	int ret = open_all(tier_of(variant, rank));

	options.rank = rank;
	options.ranks = options.local_ranks = RANKS;
	options.mode = IOSHAPE_MODE_EACH;
	options.token = "job";
	options.deadline_ms = DEADLINE_MS;
	options.tier = tier;
	if (variant->nodes) {
		options.node = rank ? "another" : "one";
		options.comm = wires_be(&wires, rank);
	}
	if (!ret)
		ret = harm_heed(ioshape_group_open(context, THERE, &options, &group));
	if (!ret) {
		ret = doing ? save(group, rank) : restore(group, rank);
		ioshape_group_free(group);
	}
	return close_all(ret);
}

static int drain(const struct act *act, unsigned rank)
{
	int ret = open_all(tier_of(act->variant, rank));

	if (!ret)
		ret = ioshape_tier_drain(tier, NULL);
	return close_all(ret == -EAGAIN ? 0 : ret); /* a save may wait for the other node */
}

static int drain_0(const struct act *act)
{
	return drain(act, 0);
}

static int drain_1(const struct act *act)
{
	return drain(act, 1);
}

/* ---- State before and after ------------------------------------------------------------------ */

static void lay_wires(void)
{
	wires_cut(&wires);
	harm_must(!wires_lay(&wires, RANKS), "make sockets");
}

/* Runs run() of all ranks, without faults. */
static void do_well(uint64_t step)
{
	const uint64_t before = doing;

	lay_wires();
	doing = step;
	harm_play();
	doing = before;
	lay_wires();
}

static void lose(const char *folder)
{
	scratch_remove(folder);
	if (mkdir(folder, 0700))
		harm_must(-errno, "make a folder");
}

static void begin(const struct act *act)
{
	const struct variant *variant = act->variant;

	lose(THERE);
	lose("tier-0");
	lose("tier-1");
	do_well(FIRST);
	if (!variant->restores)
		return;
	rmdir("restored-0");
	rmdir("restored-1");
	lose("tier-1");
}

static void drain_all(const struct act *act)
{
	for (unsigned turn = 0; turn < 2; turn++) {
		harm_alone(drain_0, act, "drain a tier");
		harm_alone(drain_1, act, "drain a tier");
	}
}

/* Returns the state of a step at the destination: gone, torn or new. */
static enum state look_for(uint64_t step)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_context *looking;
	int ret;

	options.coordinator = "open";
	harm_must(ioshape_context_open(&looking, &options), "open a context");
	ret = ioshape_checkpoint_open(looking, THERE, step, &checkpoint);
	if (!ret) {
		ret = ioshape_checkpoint_verify(checkpoint, NULL, NULL) ? -EBADMSG : 0;
		ioshape_checkpoint_free(checkpoint);
	}
	ioshape_context_free(looking);
	return ret == -ENOENT ? STATE_GONE : ret ? STATE_TORN : STATE_NEW;
}

static enum state look(const struct act *act)
{
	enum state state;

	drain_all(act);
	if (look_for(FIRST) != STATE_NEW)
		return STATE_GONE;
	state = look_for(STEP);
	return state == STATE_GONE ? STATE_OLD : state;
}

static unsigned again(const struct act *act)
{
	do_well(NEXT);
	drain_all(act);
	if (look_for(NEXT) != STATE_NEW)
		harm_must(-ENOENT, "find what was saved next");
	return scratch_temporaries(THERE) - harm_homeless(THERE);
}

/* Restarts the job. If both nodes had the checkpoint again, the other one may be lost now. */
static unsigned restart(const struct act *act)
{
	if (!access("restored-0", F_OK) && !access("restored-1", F_OK))
		lose("tier-0");
	rmdir("restored-0");
	rmdir("restored-1");
	do_well(0);
	drain_all(act);
	if (look_for(FIRST) != STATE_NEW)
		harm_must(-ENOENT, "find what was to be restored");
	return 0;
}

static void open_act(const struct act *act)
{
	const struct variant *variant = act->variant;

	for (unsigned step = 1; step < STEPS; step++)
		for (unsigned rank = 0; rank < RANKS; rank++)
			sample_make(&samples[step][rank], 10 * step + rank, 50000);
	doing = variant->restores ? 0 : STEP;
}

static void close_act(const struct act *act)
{
	(void)act;
	wires_cut(&wires);
	for (unsigned step = 1; step < STEPS; step++)
		for (unsigned rank = 0; rank < RANKS; rank++)
			sample_free(&samples[step][rank]);
}

#define ACT(id, ...)                                                                               \
	.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .ranks = RANKS,             \
	.open = open_act, .close = close_act, .begin = begin, .run = run, .leaves = true

static const struct act acts[] = {
	{ ACT("ranks save on a tier", .nodes = false), .look = look, .again = again },
	{ ACT("nodes save on their tiers", .nodes = true), .look = look, .again = again },
	{ ACT("nodes restore a lost tier", .nodes = true, .restores = true), .again = restart },
	{ .name = NULL },
};

const struct act *const tier_group_acts = acts;
