/* SPDX-License-Identifier: Apache-2.0 */
/* Acts that change no file: loads, probes, searches for checkpoints, and saves that cannot
 * succeed. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/group.h>

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

static struct sample sample, small;

struct variant {
	enum ioshape_engine engine;
	bool cached;      /* the file is in the page cache */
	bool in_a_row;    /* the file is read front to back */
	bool other;       /* the file has another format, with checksums in a file beside it */
	bool turned;      /* the zip directory lists two records in the opposite order */
	bool fresh;       /* the memory to read into was never written to */
	const char *path; /* the path to probe */
};

static int open_context(const struct variant *variant, struct ioshape_context **context)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.coordinator = "open";
	options.engine = variant ? variant->engine : IOSHAPE_ENGINE_AUTO;
	return harm_heed(ioshape_context_open(context, &options));
}

/* ---- Files ----------------------------------------------------------------------------------- */

/* Reads the file front to back, a piece at a time. */
static int read_in_a_row(struct ioshape_reader *reader)
{
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	static uint8_t piece[100000];
	int ret = harm_heed(ioshape_reader_get_info(reader, &info));

	for (uint64_t at = 0; !ret && at < info.file_bytes; at += sizeof(piece))
		ret = harm_heed(save_reader_read_file(reader, at, piece,
						      MIN(sizeof(piece), info.file_bytes - at)));
	return ret;
}

static int load_all(struct ioshape_reader *reader, void *into)
{
	const int ret = sample_load(reader, &sample, into);

	return ret == -EBADMSG ? harm_wrong("a tensor was loaded wrongly") : harm_heed(ret);
}

static int load_in(struct ioshape_context *context, const struct variant *variant)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader *reader;
	static uint8_t into[16 << 20];
	int ret;

	options.fresh_memory = variant->fresh;
	options.any_format = variant->other;
	ret = harm_heed(ioshape_reader_open(context, "file", &options, &reader));
	if (ret)
		return ret;
	/* The file's table of tensors no longer fits the directory, so tensors are not loaded. */
	if (variant->turned)
		ret = 0;
	else
		ret = variant->in_a_row ? read_in_a_row(reader) : load_all(reader, into);
	if (!ret)
		ret = harm_heed(ioshape_reader_verify(reader, 1));
	ioshape_reader_free(reader);
	return ret;
}

static int load(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = open_context(act->variant, &context);

	(void)rank;
	if (ret)
		return ret;
	ret = load_in(context, act->variant);
	ioshape_context_free(context);
	return ret;
}

static int probe(const struct act *act, unsigned rank)
{
	const struct variant *variant = act->variant;
	struct ioshape_context *context;
	struct save_probe found;
	int ret = open_context(NULL, &context);

	(void)rank;
	if (ret)
		return ret;
	ret = harm_heed(save_probe_path(context, variant->path, 40 * MIB, 0, &found));
	ioshape_context_free(context);
	return ret;
}

static int save_raw(struct ioshape_context *context)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;
	int ret;

	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	ret = ioshape_file_open(context, "file", &options, &file);
	if (ret)
		return ret;
	ret = ioshape_file_write(file, sample.expected[0], sample.bytes[0]);
	if (!ret)
		ret = ioshape_file_commit(file, NULL);
	ioshape_file_free(file);
	return ret;
}

/* Returns the length of an entry of the zip's central directory. */
static size_t record_bytes(const uint8_t *at)
{
	return 46 + (size_t)at[28] + 256 * (size_t)at[29] + at[30] + 256 * (size_t)at[31] + at[32] +
	       256 * (size_t)at[33];
}

/* Swaps the first two entries of the central directory, as another tool may write them. */
static void turn_directory(void)
{
	static const uint8_t mark[] = { 'P', 'K', 1, 2 };
	size_t bytes, first, second;
	uint8_t *file = scratch_read("file", &bytes), *at, *before;

	at = memmem(file, bytes, mark, sizeof(mark));
	if (!at)
		harm_must(-ENOENT, "find a directory");
	first = record_bytes(at);
	second = record_bytes(at + first);
	before = malloc(first);
	memcpy(before, at, first);
	memmove(at, at + first, second);
	memcpy(at + second, before, first);
	scratch_write("file", file, bytes);
	free(before);
	free(file);
}

static void open_file(const struct act *act)
{
	const struct variant *variant = act->variant;
	struct ioshape_context *context;

	sample_make(&sample, 7, variant->fresh ? 9 * MIB : 1200000);
	harm_must(open_context(NULL, &context), "open a context");
	if (variant->other)
		harm_must(save_raw(context), "save");
	else
		harm_must(sample_save(context, "file", &sample, NULL), "save");
	ioshape_context_free(context);
	if (variant->turned)
		turn_directory();
}

static void close_file(const struct act *act)
{
	(void)act;
	sample_free(&sample);
	sample_free(&small);
}

static void open_pipe(const struct act *act)
{
	open_file(act);
	if (mkfifo("pipe", 0600))
		harm_must(-errno, "make a pipe");
}

static void evict(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (!variant->cached)
		scratch_evict("file");
}

/* Saves a file, which tidies up after the trial. */
static unsigned again(const struct act *act)
{
	struct ioshape_context *context;

	(void)act;
	harm_must(open_context(NULL, &context), "open a context");
	harm_must(sample_save(context, "file", &sample, NULL), "save");
	ioshape_context_free(context);
	return scratch_entries(".") - 2;
}

/* ---- Checkpoints ----------------------------------------------------------------------------- */

static int save_checkpoint(struct ioshape_context *context, const char *directory, uint64_t step,
			   const struct sample *what)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_group *group;
	int ret;

	options.token = "look";
	options.store = IOSHAPE_STORE_HOST;
	ret = harm_heed(ioshape_group_open(context, directory, &options, &group));
	if (ret)
		return ret;
	ret = harm_heed(
		ioshape_group_save_tensors(group, step, what->tensors, what->count, NULL, NULL));
	ioshape_group_free(group);
	return ret;
}

static void open_checkpoints(const struct act *act)
{
	struct ioshape_context *context;

	(void)act;
	sample_make(&sample, 7, 20000);
	harm_must(open_context(NULL, &context), "open a context");
	for (uint64_t step = 1; step <= 2; step++)
		harm_must(save_checkpoint(context, "runs", step, &sample), "save a checkpoint");
	ioshape_context_free(context);
}

/* Verifies the newest checkpoint. It exists, so not finding it is wrong, whatever failed. */
static int verify_latest(struct ioshape_context *context)
{
	struct ioshape_checkpoint_info info = { .size = sizeof(info) };
	struct ioshape_shard_info part = IOSHAPE_SHARD_INFO_INIT;
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;
	int ret;

	ret = harm_heed(ioshape_checkpoint_open(context, "runs", IOSHAPE_LATEST, &checkpoint));
	if (ret)
		return ret;
	ret = harm_heed(ioshape_checkpoint_get_info(checkpoint, &info));
	if (!ret && info.step > 2)
		ret = harm_wrong("step %llu was found", (unsigned long long)info.step);
	if (!ret)
		ret = harm_heed(ioshape_checkpoint_verify(checkpoint, NULL, NULL));
	if (!ret)
		ret = harm_heed(ioshape_checkpoint_get_shard(checkpoint, 0, &part));
	if (!ret)
		ret = harm_heed(ioshape_checkpoint_open_shard(checkpoint, 0, NULL, &reader));
	if (!ret)
		ioshape_reader_free(reader);
	ioshape_checkpoint_free(checkpoint);
	return ret;
}

static int list(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	uint64_t *steps;
	size_t count;
	int ret = open_context(NULL, &context);

	(void)act, (void)rank;
	if (ret)
		return ret;
	ret = harm_heed(ioshape_checkpoint_list(context, "runs", &steps, &count));
	if (!ret)
		ioshape_free(steps);
	if (!ret)
		ret = verify_latest(context);
	ioshape_context_free(context);
	return ret;
}

/* ---- Saves that cannot succeed --------------------------------------------------------------- */

static void open_device(const struct act *act)
{
	(void)act;
	sample_make(&sample, 7, 1200000);
	if (symlink("/dev/null", "file"))
		harm_must(-errno, "make a link");
}

static int save_to_device(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = open_context(act->variant, &context);

	(void)rank;
	if (ret)
		return ret;
	ret = harm_heed(sample_save(context, "file", &sample, NULL));
	ioshape_context_free(context);
	return ret;
}

/* Mounts a full filesystem in a mount namespace of this process. Its cgroup has no memory limit. */
static void open_full(const struct act *act)
{
	(void)act;
	sample_make(&sample, 7, 1200000);
	sample_make(&small, 8, 1000);
	/* The folder may be missing. */
	mkdir("/sys/fs/cgroup", 0755);
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mkdir("full", 0700) || mount("tmpfs", "full", "tmpfs", 0, "size=1m") ||
	    mount("none", "/sys/fs/cgroup", "tmpfs", 0, NULL))
		harm_must(-errno, "mount a small filesystem");
	scratch_write("/sys/fs/cgroup/memory.max", "max\n", 4);
}

static int save_too_much(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = open_context(NULL, &context);

	(void)act, (void)rank;
	if (ret)
		return ret;
	ret = harm_heed(sample_save(context, "full/file", &sample, NULL));
	if (ret == -ENOSPC)
		ret = save_checkpoint(context, "full", 1, &sample);
	if (!ret)
		ret = harm_wrong("it was saved where it does not fit");
	ioshape_context_free(context);
	return ret == -ENOSPC ? 0 : ret;
}

/* Makes saves that fit, which tidy up. */
static unsigned save_a_little(const struct act *act)
{
	struct ioshape_context *context;

	(void)act;
	harm_must(open_context(NULL, &context), "open a context");
	harm_must(sample_save(context, "full/file", &small, NULL), "save");
	unlink("full/file");
	harm_must(save_checkpoint(context, "full", 2, &small), "save a checkpoint");
	scratch_remove("full/step-0000000002");
	ioshape_context_free(context);
	return scratch_entries("full");
}

#define LOAD(id, ...)                                                                              \
	{                                                                                          \
		.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .open = open_file,  \
		.close = close_file, .begin = evict, .run = load                                   \
	}

#define PROBE(id, what)                                                                            \
	{                                                                                          \
		.name = id, .variant = &(const struct variant){ .path = what }, .open = open_pipe, \
		.close = close_file, .run = probe, .again = again, .slow = true                    \
	}

static const struct act acts[] = {
	LOAD("load", .engine = IOSHAPE_ENGINE_AUTO),
	LOAD("load with threads", .engine = IOSHAPE_ENGINE_THREADS),
	LOAD("load through the cache", .engine = IOSHAPE_ENGINE_BUFFERED),
	LOAD("load from the cache", .cached = true),
	LOAD("load into fresh memory", .fresh = true, .cached = true),
	LOAD("load another format", .other = true, .in_a_row = true),
	LOAD("load in a row", .in_a_row = true),
	LOAD("load with a turned directory", .turned = true),
	PROBE("probe", "."),
	PROBE("probe what is not there", "not yet"),
	PROBE("probe a pipe", "pipe"),
	{ .name = "save to a device",
	  .open = open_device,
	  .close = close_file,
	  .run = save_to_device },
	{ .name = "save what does not fit",
	  .mounts = true,
	  .open = open_full,
	  .close = close_file,
	  .run = save_too_much,
	  .again = save_a_little },
	{ .name = "look at checkpoints",
	  .open = open_checkpoints,
	  .close = close_file,
	  .run = list },
	{ .name = NULL },
};

const struct act *const look_acts = acts;
