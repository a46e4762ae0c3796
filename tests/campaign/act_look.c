/* SPDX-License-Identifier: Apache-2.0 */
/* What changes no file: loads, looks at filesystems and generations, slots of this host and of a
 * Redis, and their operator. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/redis_server.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/operator.h>
#include <ioshape/probe.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct sample sample;
static struct redis_server server;
static char redis_address[128];

static int open_context(const char *coordinator, struct ioshape_context **context)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.coordinator = coordinator;
	options.calibrate = IOSHAPE_CALIBRATE_OFF;
	options.pool = strcmp(coordinator, "open") ? "pool" : NULL;
	options.lease_ms = 1000;
	options.unreachable = IOSHAPE_UNREACHABLE_FAIL;
	return harm_heed(ioshape_context_open(context, &options));
}

/* ---- Files ------------------------------------------------------------------------------------
 */

static int load_in(struct ioshape_context *context)
{
	struct ioshape_load_request requests[SAMPLE_TENSORS];
	static uint8_t into[4 << 20];
	struct ioshape_reader *reader;
	uint8_t *at = into;
	int ret;

	ret = harm_heed(ioshape_reader_open(context, "file", NULL, &reader));
	if (ret)
		return ret;
	for (size_t i = 0; i < sample.count; i++) {
		requests[i] = (struct ioshape_load_request){ i, 0, sample.bytes[i], at };
		at += sample.bytes[i];
	}
	ret = harm_heed(ioshape_reader_load(reader, requests, sample.count));
	for (size_t i = 0; !ret && i < sample.count; i++)
		if (memcmp(requests[i].into, sample.expected[i], sample.bytes[i]) != 0)
			ret = harm_wrong("tensor %zu was loaded wrongly", i);
	if (!ret)
		ret = harm_heed(ioshape_reader_verify(reader, 1));
	ioshape_reader_free(reader);
	return ret;
}

static int load(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = open_context("open", &context);

	(void)act, (void)rank;
	if (ret)
		return ret;
	ret = load_in(context);
	ioshape_context_free(context);
	return ret;
}

static int probe(const struct act *act, unsigned rank)
{
	struct ioshape_probe_options options = IOSHAPE_PROBE_OPTIONS_INIT;
	struct ioshape_context *context;
	char *told;
	int ret = open_context("open", &context);

	(void)act, (void)rank;
	if (ret)
		return ret;
	options.bytes = 40 * MIB;
	options.calibrate = 1;
	ret = harm_heed(ioshape_probe(context, ".", &options, &told));
	if (!ret)
		ioshape_free(told);
	ioshape_context_free(context);
	return ret;
}

static void open_file(const struct act *act)
{
	struct ioshape_context *context;

	(void)act;
	sample_make(&sample, 7, 1200000);
	harm_must(open_context("open", &context), "open a context");
	harm_must(sample_save(context, "file", &sample, NULL), "save");
	ioshape_context_free(context);
}

static void close_file(const struct act *act)
{
	(void)act;
	sample_free(&sample);
}

static void evict(const struct act *act)
{
	(void)act;
	scratch_evict("file");
}

/* A save tidies after a trial, too. */
static unsigned again(const struct act *act)
{
	struct ioshape_context *context;

	(void)act;
	harm_must(open_context("open", &context), "open a context");
	harm_must(sample_save(context, "file", &sample, NULL), "save");
	ioshape_context_free(context);
	return scratch_entries(".") - 1;
}

/* ---- Generations ------------------------------------------------------------------------------
 */

static int save_generation(struct ioshape_context *context, uint64_t step)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_group *group;
	int ret;

	options.token = "look";
	options.board = IOSHAPE_BOARD_HOST;
	ret = harm_heed(ioshape_group_open(context, "runs", &options, &group));
	if (ret)
		return ret;
	ret = harm_heed(
		ioshape_group_save_tensors(group, step, sample.tensors, sample.count, NULL, NULL));
	ioshape_group_free(group);
	return ret;
}

static void open_generations(const struct act *act)
{
	struct ioshape_context *context;

	(void)act;
	sample_make(&sample, 7, 20000);
	harm_must(open_context("open", &context), "open a context");
	for (uint64_t step = 1; step <= 2; step++)
		harm_must(save_generation(context, step), "save a generation");
	ioshape_context_free(context);
}

/* It is there: who says it is not, is wrong, whatever failed. */
static int verify_latest(struct ioshape_context *context)
{
	struct ioshape_generation_info info = { .size = sizeof(info) };
	struct ioshape_generation *generation;
	struct ioshape_reader *reader;
	int ret;

	ret = harm_heed(ioshape_generation_open(context, "runs", IOSHAPE_LATEST, &generation));
	if (ret)
		return ret;
	ret = harm_heed(ioshape_generation_get_info(generation, &info));
	if (!ret && info.step > 2)
		ret = harm_wrong("step %llu was found", (unsigned long long)info.step);
	if (!ret)
		ret = harm_heed(ioshape_generation_verify(generation, NULL, NULL));
	if (!ret)
		ret = harm_heed(ioshape_generation_open_part(generation, 0, NULL, &reader));
	if (!ret)
		ioshape_reader_free(reader);
	ioshape_generation_free(generation);
	return ret;
}

static int list(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	uint64_t *steps;
	size_t count;
	int ret = open_context("open", &context);

	(void)act, (void)rank;
	if (ret)
		return ret;
	ret = harm_heed(ioshape_generation_list(context, "runs", &steps, &count));
	if (!ret)
		ioshape_free(steps);
	if (!ret)
		ret = verify_latest(context);
	ioshape_context_free(context);
	return ret;
}

/* ---- Slots ------------------------------------------------------------------------------------
 */

static int take_slots(struct ioshape_context *context)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot_info info = IOSHAPE_SLOT_INFO_INIT;
	struct ioshape_slot *slot;
	int ret;

	options.path = ".";
	options.timeout_ms = 5000;
	for (int i = 0; i < 2; i++) {
		ret = harm_heed(ioshape_slot_acquire(context, &options, &slot));
		if (ret)
			return ret;
		ret = harm_heed(ioshape_slot_pace(slot, MIB));
		if (!ret)
			ret = harm_heed(ioshape_slot_get_info(slot, &info));
		ioshape_slot_free(slot);
		if (ret)
			return ret;
	}
	return 0;
}

static int operate(struct ioshape_context *context)
{
	struct ioshape_pool_settings settings = IOSHAPE_POOL_SETTINGS_INIT;
	struct ioshape_pool_status *status;
	char *names, name[128];
	int ret;

	settings.capacity = 3;
	ret = harm_heed(ioshape_pool_set(context, "pool", &settings));
	if (ret)
		return ret;
	ret = harm_heed(ioshape_pool_get_status(context, "pool", &status));
	if (ret)
		return ret;
	if (status->capacity != 3)
		ret = harm_wrong("what the operator set is not there");
	ioshape_pool_status_free(status);
	if (ret)
		return ret;
	ret = harm_heed(ioshape_pool_list(context, &names));
	if (ret)
		return ret;
	ioshape_free(names);
	return harm_heed(ioshape_pool_get_name(context, ".", name, sizeof(name)));
}

static int take(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = open_context(act->variant ? act->variant : harm_coordinator(), &context);

	(void)rank;
	if (ret)
		return ret;
	ret = take_slots(context);
	if (!ret)
		ret = operate(context);
	ioshape_context_free(context);
	return ret;
}

static void open_redis(const struct act *act)
{
	(void)act;
	redis_server_init(&server);
	redis_server_start(&server);
	snprintf(redis_address, sizeof(redis_address), "redis://localhost:%u", server.port);
}

static void close_redis(const struct act *act)
{
	(void)act;
	redis_server_free(&server);
}

static const struct act acts[] = {
	{ .name = "load", .open = open_file, .close = close_file, .begin = evict, .run = load },
	{ .name = "probe", .open = open_file, .close = close_file, .run = probe, .again = again },
	{ .name = "look at generations",
	  .open = open_generations,
	  .close = close_file,
	  .run = list },
	{ .name = "slots of the host", .run = take },
	{ .name = "slots of a Redis",
	  .variant = redis_address,
	  .open = open_redis,
	  .close = close_redis,
	  .run = take },
	{ .name = NULL },
};

const struct act *const look_acts = acts;
