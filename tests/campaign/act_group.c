/* SPDX-License-Identifier: Apache-2.0 */
/* Acts of ranks that save a checkpoint together, which may replace an older one of its step, and
 * acts that remove checkpoints. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/wires.h"

#include <ioshape/group.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define DEADLINE_MS 1000 /* the library's minimum */
#define KEPT 10u         /* a step that no act changes */
#define OLDEST 5u
#define STEP 7u
#define NEXT 9u

/* The contents of a checkpoint: one sample for each rank. */
enum content {
	OLD_PARTS,
	NEW_PARTS,
	NEXT_PARTS,
	CONTENTS,
};

struct variant {
	enum ioshape_mode mode;
	enum ioshape_store store;
	unsigned nodes;
	bool background;
	bool replace; /* an older checkpoint of this step is replaced */
	bool no_swap; /* the filesystem cannot swap names, as NFS */
	bool no_locks;
	bool prune;  /* prune instead of save: the older one is removed, a newer one stays */
	bool again;  /* the older one is saved again right before it is removed */
	bool first;  /* nothing exists yet, not even the folder */
	bool keep;   /* the group's retention removes a still older one */
	bool fails;  /* before the save, one rank reports that another step failed */
	bool latest; /* all ranks search for the newest intact checkpoint */
	bool relics; /* files of jobs that were killed long ago are there */
	bool redis;  /* the ranks meet in a Redis */
};

/* Made before any faults. */
static struct sample samples[CONTENTS][HARM_RANKS];

/* New sockets for each run, so that no bytes are left in them. */
static struct wires wires;

/* ---- Saves ----------------------------------------------------------------------------------- */

static struct ioshape_context *open_context(const struct variant *variant)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	options.coordinator = variant && variant->redis ? harm_redis() : "open";
	options.staging_bytes = 32 * MIB;
	return harm_heed(open_context_with(&context, &options,
					   (struct test_rules){ .queue_depth = 2 })) ?
		       NULL :
		       context;
}

static int save_in(struct ioshape_group *group, uint64_t step, const struct sample *sample,
		   bool background)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *save = NULL;
	int ret;

	options.metadata = &sample->metadata;
	ret = harm_heed(ioshape_group_save_tensors(group, step, sample->tensors, sample->count,
						   &options, background ? &save : NULL));
	if (save) {
		ret = harm_heed(ioshape_save_wait(save, -1));
		ioshape_save_free(save);
	}
	return ret;
}

/* Fails a step on rank 0. The save of this step must then fail on all ranks. */
static int fail_together(struct ioshape_group *group, unsigned rank)
{
	int ret;

	if (!rank)
		return harm_heed(ioshape_group_fail(group, NEXT + 1, "made to fail"));
	ret = ioshape_group_save_tensors(group, NEXT + 1, samples[NEW_PARTS][rank].tensors,
					 samples[NEW_PARTS][rank].count, NULL, NULL);
	return ret ? 0 : harm_wrong("it was saved without rank 0");
}

static void passed_over(void *user, uint64_t step)
{
	uint64_t *latest = user;

	*latest = step;
}

/* Searches the newest checkpoint. A rank passes over one that it cannot read, and reports it. */
static int find_latest(struct ioshape_group *group, uint64_t step)
{
	struct ioshape_search_options options = { .size = sizeof(options) };
	uint64_t found = 0, damaged = 0;
	int ret;

	options.intact = 1;
	options.passed_over = passed_over;
	options.passed_over_user = &damaged;
	ret = harm_heed(ioshape_group_get_latest(group, &options, &found));
	if (!ret && found != step && damaged != step)
		ret = harm_wrong("step %llu is said to be the newest", (unsigned long long)found);
	return ret;
}

/* Asks for a rank's share of a checkpoint that is in one file. */
static int ask_for_part(struct ioshape_context *context, uint64_t step)
{
	struct ioshape_shard_info info = IOSHAPE_SHARD_INFO_INIT;
	struct ioshape_checkpoint *checkpoint;
	int ret = harm_heed(ioshape_checkpoint_open(context, "runs", step, &checkpoint));

	if (ret)
		return ret;
	ret = harm_heed(ioshape_checkpoint_get_shard(checkpoint, 1, &info));
	ioshape_checkpoint_free(checkpoint);
	return ret;
}

static int save_as(const struct act *act, unsigned rank, const char *token, uint64_t step,
		   enum content content)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	const struct variant *variant = act->variant;
	struct ioshape_context *context = open_context(variant);
	struct ioshape_group *group;
	char node[32];
	int ret;

	if (!context)
		return -ENOMEM;
	options.rank = rank;
	options.ranks = act->ranks;
	options.mode = variant->mode;
	options.store = variant->store;
	options.token = token;
	options.deadline_ms = DEADLINE_MS;
	options.keep_last = variant->keep ? 2 : 0;
	options.keep_every = variant->keep ? KEPT : 0;
	if (variant->nodes) {
		snprintf(node, sizeof(node), "n%u", rank * variant->nodes / act->ranks);
		options.node = node;
		options.local_ranks = act->ranks / variant->nodes;
		options.comm = wires_be(&wires, rank);
	}
	ret = harm_heed(ioshape_group_open(context, "runs", &options, &group));
	if (!ret) {
		if (variant->fails)
			ret = fail_together(group, rank);
		if (!ret)
			ret = save_in(group, step, &samples[content][rank], variant->background);
		if (!ret && variant->latest)
			ret = find_latest(group, step);
		if (!ret && variant->latest)
			ret = ask_for_part(context, step);
		ioshape_group_free(group);
	}
	ioshape_context_free(context);
	return ret;
}

/* Saves in one process with one rank. look() reads such checkpoints, too. */
static int save_alone(const char *token, uint64_t step, enum content content)
{
	static const struct variant plain = { .store = IOSHAPE_STORE_HOST };
	const struct act alone = { .variant = &plain, .ranks = 1 };

	return save_as(&alone, 0, token, step, content);
}

static void save_again(void *user, uint64_t step, uint64_t bytes)
{
	const struct variant *variant = user;

	(void)bytes;
	if (variant->again)
		save_alone("again", step, NEW_PARTS);
}

static int prune(const struct variant *variant)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	struct ioshape_context *context = open_context(NULL);
	int ret;

	if (!context)
		return -ENOMEM;
	options.keep_last = 1;
	options.keep_every = KEPT;
	options.removing = save_again;
	options.removing_user = (void *)(uintptr_t)variant;
	ret = harm_heed(ioshape_checkpoint_prune(context, "runs", &options, NULL));
	ioshape_context_free(context);
	return ret;
}

/* true: run() saves the step after the harmed one */
static bool next;

static int run(const struct act *act, unsigned rank)
{
	const struct variant *variant = act->variant;

	if (variant->no_swap)
		harm_deny("renameat2", EINVAL);
	if (variant->no_locks)
		harm_deny("flock", EBADF);
	if (variant->prune)
		return prune(variant);
	return save_as(act, rank, "job", next ? NEXT : STEP, next ? NEXT_PARTS : NEW_PARTS);
}

static void leave_folder(const char *path)
{
	const struct timespec long_ago[2] = { { .tv_sec = 1000000 }, { .tv_sec = 1000000 } };
	char note[128];

	mkdir(path, 0700);
	snprintf(note, sizeof(note), "%s/note", path);
	scratch_write(note, "x", 1);
	if (utimensat(AT_FDCWD, path, long_ago, 0))
		harm_must(-errno, "leave a folder");
}

/* Leaves a socket at which no process listens. */
static void leave_socket(const char *place)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(at.sun_path, sizeof(at.sun_path), "%s/stream-%x", place, (unsigned)getpid());
	if (fd < 0 || (bind(fd, (struct sockaddr *)&at, sizeof(at)) && errno != EADDRINUSE))
		harm_must(-errno, "leave a socket");
	close(fd);
}

/* Leaves files of ranks that met there and were killed long ago. */
static void leave_relics(const struct variant *variant)
{
	char place[40], path[64];

	if (variant->store == IOSHAPE_STORE_FILES) {
		mkdir("runs", 0700);
		leave_folder("runs/.ioshape-store-0123456789abcdef");
		return;
	}
	snprintf(place, sizeof(place), "/dev/shm/ioshape-%u", (unsigned)geteuid());
	mkdir(place, 0700);
	snprintf(path, sizeof(path), "%s/store-%x", place, (unsigned)getpid());
	leave_folder(path);
	leave_socket(place);
}

static void begin(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->nodes) {
		wires_cut(&wires);
		harm_must(!wires_lay(&wires, act->ranks), "make sockets");
	}
	scratch_remove("runs");
	if (variant->relics)
		leave_relics(variant);
	if (variant->first)
		return;
	if (variant->keep)
		harm_must(save_alone("before", OLDEST, OLD_PARTS), "save");
	harm_must(save_alone("before", KEPT, NEXT_PARTS), "save");
	if (variant->replace || variant->prune)
		harm_must(save_alone("before", STEP, OLD_PARTS), "save");
	if (variant->prune)
		harm_must(save_alone("before", NEXT, NEXT_PARTS), "save");
}

static bool holds(struct ioshape_checkpoint *checkpoint, enum content content, unsigned ranks)
{
	bool right = !ioshape_checkpoint_verify(checkpoint, NULL, NULL);
	struct ioshape_reader *reader;
	char why[256];

	for (unsigned rank = 0; right && rank < ranks; rank++) {
		reader = NULL;
		right = !ioshape_checkpoint_open_shard(checkpoint, rank, NULL, &reader);
		right = right &&
			!sample_check_reader(reader, &samples[content][rank], why, sizeof(why));
		ioshape_reader_free(reader);
	}
	return right;
}

static enum state look_in(const struct act *act, struct ioshape_context *context)
{
	const struct variant *variant = act->variant;
	struct ioshape_checkpoint *checkpoint;
	enum state state = STATE_TORN;
	int ret;

	if (variant->first && access("runs", F_OK))
		return STATE_OLD;
	if (!variant->first) {
		if (ioshape_checkpoint_open(context, "runs", KEPT, &checkpoint))
			return STATE_GONE;
		ioshape_checkpoint_free(checkpoint);
	}
	ret = ioshape_checkpoint_open(context, "runs", STEP, &checkpoint);
	if (ret == -ENOENT && variant->prune)
		return variant->again ? STATE_GONE : STATE_NEW;
	if (ret == -ENOENT)
		return variant->replace ? STATE_GONE : STATE_OLD;
	if (ret)
		return STATE_TORN;
	if (holds(checkpoint, OLD_PARTS, 1))
		state = STATE_OLD;
	else if (holds(checkpoint, NEW_PARTS, act->ranks))
		state = STATE_NEW;
	ioshape_checkpoint_free(checkpoint);
	return state;
}

static enum state look(const struct act *act)
{
	struct ioshape_context *context = open_context(NULL);
	const enum state state = look_in(act, context);

	ioshape_context_free(context);
	return state;
}

static unsigned again(const struct act *act)
{
	const struct variant *variant = act->variant;
	const bool there = !access("runs/step-0000000007", F_OK);

	/* A rank that was killed may be the only one that knew the folder of a file store. So the
	 * job is started again, and takes it over. */
	if (act->ranks > 1) {
		next = true;
		harm_play();
		next = false;
	} else {
		harm_must(save_alone("after", NEXT, NEXT_PARTS), "save");
	}
	return scratch_entries("runs") - harm_homeless("runs") - 1 - !variant->first - there -
	       !access("runs/step-0000000005", F_OK);
}

static void open_act(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->redis)
		harm_open_redis(act);
	for (unsigned content = 0; content < CONTENTS; content++)
		for (unsigned rank = 0; rank < HARM_RANKS; rank++)
			sample_make(&samples[content][rank], 10 * content + rank, 20000);
}

static void close_act(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->redis)
		harm_close_redis(act);
	wires_cut(&wires);
	for (unsigned content = 0; content < CONTENTS; content++)
		for (unsigned rank = 0; rank < HARM_RANKS; rank++)
			sample_free(&samples[content][rank]);
}

#define ACT(id, count, ...)                                                                        \
	.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .ranks = count,             \
	.open = open_act, .close = close_act, .begin = begin, .run = run, .look = look,            \
	.again = again

static const struct act acts[] = {
	{ ACT("checkpoint", 1, .store = IOSHAPE_STORE_HOST), .durable = true },
	{ ACT("checkpoint replaced", 1, .replace = true), .durable = true },
	{ ACT("checkpoint replaced without swap", 1, .replace = true, .no_swap = true) },
	{ ACT("checkpoint replaced without swap and locks", 1, .replace = true, .no_swap = true,
	      .no_locks = true) },
	{ ACT("prune", 1, .prune = true), .passes_over = true },
	{ ACT("prune what is replaced", 1, .prune = true, .again = true), .no_faults = true },
	{ ACT("ranks of a host, each", 2, .mode = IOSHAPE_MODE_EACH, .store = IOSHAPE_STORE_HOST) },
	{ ACT("ranks of a host, one file", 3, .mode = IOSHAPE_MODE_NODE,
	      .store = IOSHAPE_STORE_HOST, .replace = true) },
	{ ACT("ranks with notes in files", 2, .mode = IOSHAPE_MODE_NODE,
	      .store = IOSHAPE_STORE_FILES, .background = true) },
	{ ACT("first checkpoint", 1, .first = true) },
	{ ACT("ranks of a host, newest found", 2, .mode = IOSHAPE_MODE_NODE,
	      .store = IOSHAPE_STORE_HOST, .latest = true, .fails = true) },
	{ ACT("ranks of a host, where others died", 2, .mode = IOSHAPE_MODE_NODE,
	      .store = IOSHAPE_STORE_HOST, .relics = true) },
	{ ACT("ranks with files, where others died", 2, .mode = IOSHAPE_MODE_EACH,
	      .store = IOSHAPE_STORE_FILES, .relics = true, .keep = true) },
	{ ACT("ranks that meet in a Redis", 2, .mode = IOSHAPE_MODE_RANK0,
	      .store = IOSHAPE_STORE_REDIS, .redis = true, .nodes = 2, .background = true) },
	{ ACT("ranks of two nodes, one file", 2, .mode = IOSHAPE_MODE_RANK0,
	      .store = IOSHAPE_STORE_FILES, .nodes = 2) },
	{ .name = NULL },
};

const struct act *const group_acts = acts;
