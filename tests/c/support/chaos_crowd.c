/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The modes of chaos-client that share folders (tests/campaign/crowd_storm.py). A client saves
 * files of its own and files of its user's other clients, in the foreground and in the background.
 * It loads, prunes, and tries to read the folders of other users. Or it is a rank that saves
 * checkpoints with a group.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "support/chaos_client.h"

#include <ioshape/group.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARED_FILES 3
#define AT_ONCE 2 /* background saves at a time */
#define KEEP_LAST 3
#define DEADLINE_MS 3000

/*
 * Arguments of a client. Clients of a user whose numbers have the same remainder modulo `alike` use
 * the same mount.
 */
struct crowd {
	const char *folder, *checkpoints;
	unsigned number, alike, clients;
	size_t large_bytes;
	unsigned turn;
};

/* ---- Files ----------------------------------------------------------------------------------- */

static void choose_path(const struct crowd *crowd, char *path)
{
	if (chance(2))
		snprintf(path, PATH_MAX, "%s/own-%u.pt", crowd->folder, crowd->number);
	else
		snprintf(path, PATH_MAX, "%s/shared-%u.pt", crowd->folder,
			 (unsigned)chance(SHARED_FILES));
}

static void save_in_background(struct crowd *crowd, const char *path)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *saves[AT_ONCE] = { 0 };
	struct span spans[AT_ONCE] = { 0 };
	const unsigned first = crowd->turn;
	int ret;

	options.progress = on_progress;
	for (unsigned i = 0; i < AT_ONCE; i++, crowd->turn++) {
		const uint64_t seed = new_seed();
		struct sample sample;

		sample_make(&sample, seed, (size_t)chance(crowd->large_bytes) + 4096);
		options.metadata = &sample.metadata;
		options.progress_user = &spans[i];
		note_asked(crowd->turn, path, seed);
		ret = ioshape_save_tensors(context, path, sample.tensors, sample.count, &options,
					   &saves[i]);
		if (ret)
			note_saved(crowd->turn, ret, &report, &spans[i]);
		sample_free(&sample);
	}
	for (unsigned i = 0; i < AT_ONCE; i++) {
		if (!saves[i])
			continue;
		ret = ioshape_save_wait(saves[i], -1);
		note_saved(first + i, ret ? ret : ioshape_save_get_report(saves[i], &report),
			   &report, &spans[i]);
		ioshape_save_free(saves[i]);
	}
}

/* Loads a file of a random client that may be replacing it meanwhile. */
static void load(const struct crowd *crowd)
{
	const unsigned like_me = crowd->number % crowd->alike;
	char path[PATH_MAX], why[512];
	uint64_t seed;
	int ret;

	snprintf(path, sizeof(path), "%s/own-%u.pt", crowd->folder,
		 like_me + crowd->alike * (unsigned)chance(crowd->clients / crowd->alike));
	ret = check_file(path, &seed, why, sizeof(why));
	if (!ret)
		note(now_ns(), "loaded step=%" PRIu64, seed);
	else if (ret != -ENOENT)
		note(now_ns(), "torn code=%d; %s: %s", ret, path, why);
}

/* ---- Other users ----------------------------------------------------------------------------- */

static void spy_into(const char *folder)
{
	DIR *listing = opendir(folder);
	struct dirent *entry;
	struct stat status;

	while (listing && (entry = readdir(listing))) {
		int fd = openat(dirfd(listing), entry->d_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

		/* Without root all clients run as one user. */
		if (fd >= 0 && !fstat(fd, &status) && S_ISREG(status.st_mode) &&
		    status.st_uid != geteuid())
			note(now_ns(), "spied; %s/%s", folder, entry->d_name);
		if (fd >= 0)
			close(fd);
	}
	if (listing)
		closedir(listing);
}

static void spy(const struct crowd *crowd)
{
	const char *own = strrchr(crowd->folder, '/') + 1;
	char path[PATH_MAX], other[PATH_MAX + NAME_MAX + 1];
	struct dirent *entry;
	DIR *listing;

	snprintf(path, sizeof(path), "%.*s", (int)(own - crowd->folder), crowd->folder);
	listing = opendir(path);
	while (listing && (entry = readdir(listing))) {
		snprintf(other, sizeof(other), "%s%s", path, entry->d_name);
		if (!strncmp(entry->d_name, "user", 4) && strcmp(entry->d_name, own))
			spy_into(other);
	}
	if (listing)
		closedir(listing);
}

/* ---- Checkpoints of a group ------------------------------------------------------------------ */

static uint64_t part_seed(uint64_t step, unsigned rank)
{
	return step * 64 + rank;
}

/* Verifies the checkpoint of this step. Returns 0, or an error code and the reason in `why`. */
static int check_checkpoint(const char *directory, uint64_t step, uint64_t *found, char *why,
			    size_t why_bytes)
{
	struct ioshape_checkpoint_info info = IOSHAPE_CHECKPOINT_INFO_INIT;
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;
	uint64_t seed = 0;
	int ret = ioshape_checkpoint_open(context, directory, step, &checkpoint);

	if (!ret)
		ret = ioshape_checkpoint_get_info(checkpoint, &info);
	for (unsigned rank = 0; !ret && rank < info.ranks; rank++) {
		ret = ioshape_checkpoint_open_shard(checkpoint, rank, NULL, &reader);
		if (ret)
			break;
		ret = check_reader(reader, &seed, why, why_bytes);
		if (!ret && seed != part_seed(info.step, rank)) {
			snprintf(why, why_bytes, "rank %u has %" PRIu64 " in step %" PRIu64, rank,
				 seed, info.step);
			ret = IOSHAPE_E_DAMAGED;
		}
		ioshape_reader_free(reader);
	}
	if (ret && !*why)
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
	*found = info.step;
	ioshape_checkpoint_free(checkpoint);
	return ret;
}

int crowd_check_checkpoints(const char *directory)
{
	uint64_t *steps, step;
	size_t count;
	int bad = 0;

	if (ioshape_checkpoint_list(context, directory, &steps, &count)) {
		printf("bad %s %s\n", directory, ioshape_last_error()->sentence);
		return 1;
	}
	for (size_t i = 0; i < count; i++) {
		char why[512] = "";

		if (check_checkpoint(directory, steps[i], &step, why, sizeof(why)))
			bad = 1;
		printf("%s %" PRIu64 " %s\n", *why ? "bad" : "whole", steps[i], why);
	}
	ioshape_free(steps);
	return bad;
}

/* Loads the newest checkpoint of a job that goes on saving. */
static void load_checkpoint(const struct crowd *crowd)
{
	char why[512] = "";
	uint64_t step;
	int ret = check_checkpoint(crowd->checkpoints, IOSHAPE_LATEST, &step, why, sizeof(why));

	if (ret == IOSHAPE_E_DAMAGED)
		note(now_ns(), "torn code=%d; %s: %s", ret, crowd->checkpoints, why);
	else
		note(now_ns(), "checkpoint code=%d; %s", ret, why);
}

static void prune(const struct crowd *crowd)
{
	struct ioshape_prune_options options = { .size = sizeof(options), .keep_last = KEEP_LAST };
	uint64_t removed = 0;
	int ret = ioshape_checkpoint_prune(context, crowd->checkpoints, &options, &removed);

	note(now_ns(), "pruned code=%d count=%" PRIu64 "; %s", ret, removed,
	     ret ? ioshape_last_error()->sentence : "");
}

static int save_checkpoint(struct ioshape_group *group, uint64_t step, unsigned rank,
			   size_t large_bytes)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct sample sample;
	int ret;

	sample_make(&sample, part_seed(step, rank), (size_t)chance(large_bytes) + 4096);
	options.metadata = &sample.metadata;
	ret = ioshape_group_save_tensors(group, step, sample.tensors, sample.count, &options, NULL);
	if (ret)
		note(now_ns(), "broke turn=%" PRIu64 " code=%d; %s", step, ret,
		     ioshape_last_error()->sentence);
	else
		note(now_ns(), "kept turn=%" PRIu64, step);
	sample_free(&sample);
	return ret;
}

/* Saves until a save fails. Then a rank of the job has died, and all ranks start again. */
static void save_checkpoints(const char *directory, const struct ioshape_group_options *options,
			     size_t large_bytes, uint64_t pause_ms, unsigned most)
{
	struct ioshape_group *group;
	uint64_t step = 0;
	int ret = ioshape_group_open(context, directory, options, &group);

	if (!ret) {
		ret = ioshape_group_get_latest(group, NULL, &step);
		ret = ret == -ENOENT ? 0 : ret;
	}
	if (ret)
		note(now_ns(), "broke code=%d; %s", ret, ioshape_last_error()->sentence);
	else
		note(now_ns(), "latest step=%" PRIu64, step);
	while (!ret && !stop && most--) {
		ret = save_checkpoint(group, ++step, options->rank, large_bytes);
		sleep_ms(chance(pause_ms + 1));
	}
	ioshape_group_free(group);
}

/* ---- Main ------------------------------------------------------------------------------------ */

static void act(struct crowd *crowd)
{
	char path[PATH_MAX];

	choose_path(crowd, path);
	switch (chance(12)) {
	case 0:
	case 1:
	case 2:
		save_in_background(crowd, path);
		break;
	case 3:
	case 4:
		load(crowd);
		break;
	case 5:
		spy(crowd);
		break;
	case 6:
		prune(crowd);
		break;
	case 7:
		load_checkpoint(crowd);
		break;
	default:
		save_once(crowd->turn++, path, (size_t)chance(crowd->large_bytes) + 4096);
	}
}

static unsigned number(const char *text)
{
	return (unsigned)strtoul(text, NULL, 10);
}

static int be_one_of_many(char **argv)
{
	const uint64_t pause_ms = number(argv[6]);
	struct crowd crowd = { .folder = argv[0],
			       .checkpoints = argv[1],
			       .number = number(argv[2]),
			       .alike = number(argv[3]),
			       .clients = number(argv[4]),
			       .large_bytes = number(argv[5]) };

	while (!stop) {
		act(&crowd);
		sleep_ms(chance(pause_ms + 1));
	}
	return 0;
}

static int be_a_rank(char **argv, unsigned most)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;

	options.token = options.node = argv[1];
	options.store = (enum ioshape_store)number(argv[2]);
	options.mode = (enum ioshape_mode)number(argv[3]);
	options.rank = number(argv[4]);
	options.ranks = options.local_ranks = number(argv[5]);
	options.keep_last = KEEP_LAST;
	options.deadline_ms = DEADLINE_MS;
	save_checkpoints(argv[0], &options, number(argv[6]), number(argv[7]), most);
	return 0;
}

/* Saves a file and a checkpoint at the end of the campaign, to remove what dead processes left. */
static int save_last(char **argv)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/last-%s.pt", argv[0], argv[5]);
	save_once(0, path, 4096);
	return be_a_rank(argv + 1, 1);
}

int crowd_run(const char *mode, int argc, char **argv)
{
	umask(077);
	if (!strcmp(mode, "crowd") && argc == 7)
		return be_one_of_many(argv);
	if (!strcmp(mode, "group") && argc == 8)
		return be_a_rank(argv, UINT_MAX);
	if (!strcmp(mode, "last") && argc == 9)
		return save_last(argv);
	return -1;
}
