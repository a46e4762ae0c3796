/* SPDX-License-Identifier: Apache-2.0 */
/* One file replaces an older one, in all the ways there are to write one. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum way {
	TENSORS,
	SAFETENSORS,
	RECORDS,
	FETCHED,
	WRITER,
	RAW,
};

struct variant {
	enum way way;
	enum ioshape_engine engine;
	enum ioshape_direct direct;
	bool small;
	bool background;
	bool borrow;
	bool no_replace; /* and there is no older file */
	bool usual;      /* slots of the host, a trial of the filesystem: as users have it */
};

static struct sample sample;
static uint8_t *new_file;
static size_t new_bytes;
static const char old_file[] = "what was there before";

static int open_context(const struct variant *variant, struct ioshape_context **context)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.coordinator = variant->usual ? harm_coordinator() : "open";
	options.calibrate = variant->usual ? IOSHAPE_CALIBRATE_AGAIN : IOSHAPE_CALIBRATE_OFF;
	options.engine = variant->engine;
	options.direct = variant->direct;
	options.block_bytes = variant->usual ? 0 : 512 * KIB;
	options.queue_depth = 2;
	options.staging_bytes = 64 * MIB;
	return ioshape_context_open(context, &options);
}

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	memcpy(into, (const uint8_t *)user + offset, bytes);
	return 0;
}

static int begin_save(struct ioshape_context *context, const struct variant *variant,
		      const struct ioshape_save_options *options, struct ioshape_save **handle)
{
	struct ioshape_record records[SAMPLE_TENSORS] = { 0 };
	char names[SAMPLE_TENSORS][32];

	if (variant->way == TENSORS)
		return ioshape_save_tensors(context, "file", sample.tensors, sample.count, options,
					    handle);
	if (variant->way == SAFETENSORS)
		return ioshape_save_safetensors(context, "file", sample.tensors, sample.count,
						options, handle);
	for (size_t i = 0; i < sample.count; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%zu", i);
		records[i].name = names[i];
		records[i].bytes = sample.bytes[i];
		if (variant->way == FETCHED && i % 2) {
			records[i].fetch = fetch;
			records[i].fetch_user = sample.expected[i];
		} else {
			records[i].data = sample.expected[i];
		}
	}
	return ioshape_save_records(context, "file", records, sample.count, options, handle);
}

static int save(struct ioshape_context *context, const struct variant *variant)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *handle = NULL;
	int ret;

	if (variant->way == WRITER)
		return harm_heed(sample_write_records(context, "file", &sample));
	if (variant->way == RAW)
		return harm_heed(sample_write_raw(context, "file", &sample));
	/* Which has a step, for which safetensors files have no place. */
	if (variant->way != SAFETENSORS)
		options.metadata = &sample.metadata;
	options.replace = variant->no_replace ? IOSHAPE_OFF : IOSHAPE_ON;
	options.borrow = variant->borrow;
	ret = begin_save(context, variant, &options, variant->background ? &handle : NULL);
	if (!handle)
		return harm_heed(ret);
	ret = harm_heed(ioshape_save_wait(handle, -1));
	ioshape_save_free(handle);
	return ret;
}

static int run(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = harm_heed(open_context(act->variant, &context));

	(void)rank;
	if (ret)
		return ret;
	ret = save(context, act->variant);
	ioshape_context_free(context);
	return ret;
}

static void begin(const struct act *act)
{
	const struct variant *variant = act->variant;

	unlink("file");
	if (!variant->no_replace)
		scratch_write("file", old_file, sizeof(old_file));
}

static enum state look(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (access("file", F_OK))
		return variant->no_replace ? STATE_OLD : STATE_GONE;
	if (scratch_same("file", new_file, new_bytes))
		return STATE_NEW;
	if (!variant->no_replace && scratch_same("file", old_file, sizeof(old_file)))
		return STATE_OLD;
	return STATE_TORN;
}

static void save_well(const struct variant *variant)
{
	struct ioshape_context *context;

	harm_must(open_context(variant, &context), "open a context");
	harm_must(save(context, variant), "save");
	ioshape_context_free(context);
}

static unsigned again(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->no_replace)
		unlink("file");
	save_well(variant);
	return scratch_entries(".") - 1;
}

static void open_act(const struct act *act)
{
	const struct variant *variant = act->variant;

	sample_make(&sample, 7, variant->small ? 1000 : variant->usual ? 40 * MIB : 1200000);
	save_well(variant);
	new_file = scratch_read("file", &new_bytes);
}

static void close_act(const struct act *act)
{
	(void)act;
	free(new_file);
	sample_free(&sample);
}

#define ACT(id, ...)                                                                               \
	{                                                                                          \
		.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .open = open_act,   \
		.close = close_act, .begin = begin, .run = run, .look = look, .again = again,      \
		.durable = (id)[0] != 'a',                                                         \
	}

static const struct act acts[] = {
	ACT("uring", .engine = IOSHAPE_ENGINE_URING),
	ACT("uring with workers", .engine = IOSHAPE_ENGINE_URING_ASYNC, .way = FETCHED),
	ACT("threads in the background", .engine = IOSHAPE_ENGINE_THREADS, .background = true),
	ACT("buffered", .engine = IOSHAPE_ENGINE_BUFFERED, .direct = IOSHAPE_DIRECT_OFF),
	ACT("small", .small = true),
	ACT("no replace", .no_replace = true),
	ACT("writer", .way = WRITER),
	ACT("lent records in the background", .way = RECORDS, .background = true, .borrow = true),
	ACT("fetched in the background", .way = FETCHED, .background = true),
	ACT("raw", .way = RAW),
	ACT("as users have it", .usual = true),
	ACT("safetensors", .way = SAFETENSORS),
	ACT("safetensors in the background", .way = SAFETENSORS, .background = true),
	{ .name = NULL },
};

const struct act *const file_acts = acts;
