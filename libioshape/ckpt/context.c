/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "ckpt/slot.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_COPY_THREADS 4u
#define LEAST_STAGING_BYTES (64 * MIB)

/* ---- Messages -------------------------------------------------------------------------------- */

/* By thread, so that threads sharing a context do not read each other's sentences. */
static _Thread_local struct {
	uint64_t context; /* its number */
	char text[BASE_ERROR_TEXT_BYTES];
} last_message;

int ckpt_enter(const struct ioshape_context *context, struct base_error *error)
{
	if (!context)
		return base_fail(error, -EINVAL, "no context was given; open one first");
	if (context->owner != base_pid())
		return base_fail(
			error, -EPERM,
			"this context belongs to the parent process; open one after the fork");
	return 0;
}

int ckpt_leave(struct ioshape_context *context, int code, const struct base_error *error)
{
	if (code >= 0)
		return code;
	last_message.context = context ? context->number : 0;
	snprintf(last_message.text, sizeof(last_message.text), "%s",
		 error->code ? error->text : ioshape_strerror(code));
	return code;
}

IOSHAPE_EXPORT const char *ioshape_context_message(struct ioshape_context *context)
{
	return last_message.context == (context ? context->number : 0) ? last_message.text : "";
}

/* ---- Options --------------------------------------------------------------------------------- */

/* The smaller of the machine's memory and the container's limit. */
static uint64_t memory_bytes(void)
{
	uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	unsigned long long limit;
	FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");

	if (file) {
		if (fscanf(file, "%llu", &limit) == 1) /* "max" is none */
			bytes = MIN(bytes, limit);
		fclose(file);
	}
	return bytes;
}

/* A quarter of the memory, shared among the ranks that torchrun started on this host. */
static uint64_t default_staging_bytes(void)
{
	uint32_t ranks = 1;

	base_env_count("LOCAL_WORLD_SIZE", &ranks, NULL);
	return MAX(memory_bytes() / 4 / MAX(ranks, 1), LEAST_STAGING_BYTES);
}

static int take_environment(struct ioshape_context_options *options, struct base_error *error)
{
	/* Not nil: a variable left over from a measurement must not swallow checkpoints. */
	static const char *const engines[] = { "auto",     "uring",       "threads",
					       "buffered", "uring-async", NULL };
	enum { NOT_NIL = 4 };
	static const char *const directs[] = { "prefer", "require", "off", NULL };
	static const char *const fulls[] = { "wait", "refuse", NULL };
	static const char *const levels[] = {
		"default", "error", "warning", "info", "debug", NULL
	};
	int engine = options->engine, direct = options->direct, full = options->staging_full;
	int level = options->log_level, ret = 0;

	if (!engine)
		ret = base_env_choice("IOSHAPE_ENGINE", engines, &engine, error);
	if (!ret && !direct)
		ret = base_env_choice("IOSHAPE_DIRECT", directs, &direct, error);
	if (!ret && !full)
		ret = base_env_choice("IOSHAPE_STAGING_FULL", fulls, &full, error);
	if (!ret && !level)
		ret = base_env_choice("IOSHAPE_LOG_LEVEL", levels, &level, error);
	if (!ret && !options->block_bytes)
		ret = base_env_bytes("IOSHAPE_BLOCK_BYTES", &options->block_bytes, error);
	if (!ret && !options->queue_depth)
		ret = base_env_count("IOSHAPE_QUEUE_DEPTH", &options->queue_depth, error);
	if (!ret && !options->copy_threads)
		ret = base_env_count("IOSHAPE_COPY_THREADS", &options->copy_threads, error);
	if (!ret && !options->staging_bytes)
		ret = base_env_bytes("IOSHAPE_STAGING_BYTES", &options->staging_bytes, error);
	if (!options->engine && engine == NOT_NIL)
		engine = IOSHAPE_ENGINE_URING_ASYNC;
	options->engine = (enum ioshape_engine)engine;
	options->direct = (enum ioshape_direct)direct;
	options->staging_full = (enum ioshape_staging_full)full;
	options->log_level = (enum ioshape_log_level)level;
	if (!ret)
		ret = ckpt_storage_environment(options, error);
	return ret ? ret : ckpt_slots_environment(options, error);
}

static void take_defaults(struct ioshape_context_options *options)
{
	long cores = sysconf(_SC_NPROCESSORS_ONLN);

	if (!options->copy_threads)
		options->copy_threads = cores > 0 ? MIN((uint32_t)cores, DEFAULT_COPY_THREADS) : 1;
	if (!options->staging_bytes)
		options->staging_bytes = default_staging_bytes();
	if (!options->log_level)
		options->log_level = IOSHAPE_LOG_INFO;
	ckpt_storage_defaults(options);
	ckpt_slots_defaults(options);
}

static int check_options(const struct ioshape_context_options *options, struct base_error *error)
{
	if ((unsigned)options->engine > IOSHAPE_ENGINE_URING_ASYNC ||
	    (unsigned)options->direct > IOSHAPE_DIRECT_OFF ||
	    (unsigned)options->staging_full > IOSHAPE_STAGING_REFUSE ||
	    (unsigned)options->log_level > IOSHAPE_LOG_DEBUG)
		return base_fail(
			error, -EINVAL,
			"a context option has a value that its enum does not have; zero the struct "
			"before filling it in");
	if (options->block_bytes &&
	    (options->block_bytes < 64 * KIB || options->block_bytes > 64 * MIB ||
	     (options->block_bytes & (options->block_bytes - 1))))
		return base_fail(error, -EINVAL,
				 "block_bytes is %llu; it takes a power of two from 64K to 64M",
				 (unsigned long long)options->block_bytes);
	if (options->queue_depth > 64 || options->copy_threads > 64)
		return base_fail(error, -EINVAL,
				 "queue_depth is %u and copy_threads is %u; they take 1 to 64",
				 options->queue_depth, options->copy_threads);
	if (options->staging_bytes < CKPT_CHUNK_BYTES)
		return base_fail(error, -EINVAL, "staging_bytes is %llu; it takes 16M or more",
				 (unsigned long long)options->staging_bytes);
	if (options->engine == IOSHAPE_ENGINE_BUFFERED && options->direct == IOSHAPE_DIRECT_REQUIRE)
		return base_fail(
			error, -EINVAL,
			"the buffered engine was asked for together with direct=require; drop one");
	return ckpt_slots_check(options, error);
}

/* ---- Opening and freeing --------------------------------------------------------------------- */

static int open_context(struct ioshape_context **out, const struct ioshape_context_options *given,
			struct base_error *error)
{
	static _Atomic uint64_t next_number = 1;
	struct ioshape_context_options options;
	struct ioshape_context *context;
	struct fs_wish wish;
	int ret;

	ret = base_take_options(&options, sizeof(options), given, "ioshape_context_options", error);
	if (!ret)
		ret = take_environment(&options, error);
	if (ret)
		return ret;
	ring_calibration_prepare();
	take_defaults(&options);
	ret = check_options(&options, error);
	if (!ret)
		ret = ckpt_storage_check(&options, &wish, error);
	if (ret)
		return ret;
	context = calloc(1, sizeof(*context));
	if (!context)
		return base_no_memory(error, "a context", sizeof(*context));
	context->owner = base_pid();
	context->number = atomic_fetch_add(&next_number, 1);
	context->log = (struct base_log){ options.log, options.log_user, options.log_level };
	context->config = (struct ring_config){
		.engine = options.engine,
		.direct = options.direct,
		.block_bytes = options.block_bytes,
		.depth = options.queue_depth,
		.threads = options.copy_threads,
		.layout = wish,
		.target_bytes = options.target_bytes,
		.calibrate = options.calibrate,
		.opened_s = base_wall_seconds(),
		.log = context->log,
	};
	context->copy_threads = options.copy_threads;
	context->staging_full = options.staging_full;
	context->full = options.full;
	context->full_wait_ms = options.full_wait_ms;
	ret = ckpt_slots_init(&context->slots, &options, &context->log, error);
	if (ret) {
		free(context);
		return ret;
	}
	context->slots.layout = wish;
	ckpt_pool_init(&context->pool, options.staging_bytes, false);
	ckpt_pool_init(&context->shared_pool, options.staging_bytes, true);
	pthread_mutex_init(&context->lock, NULL);
	pthread_cond_init(&context->saves_change, NULL);
	*out = context;
	return 0;
}

IOSHAPE_EXPORT int ioshape_context_open(struct ioshape_context **out,
					const struct ioshape_context_options *options,
					char *message, size_t message_bytes)
{
	struct base_error error = { 0 };
	int ret;

	if (message && message_bytes)
		*message = 0;
	if (!out)
		return -EINVAL;
	*out = NULL;
	ret = open_context(out, options, &error);
	if (ret && message && message_bytes)
		snprintf(message, message_bytes, "%s", error.text);
	return ret;
}

static void trim(struct ioshape_context *context)
{
	struct ring_lane *lanes[CKPT_KEPT_LANES];
	size_t count;

	pthread_mutex_lock(&context->lock);
	count = context->lane_count;
	memcpy(lanes, context->lanes, sizeof(lanes));
	context->lane_count = 0;
	pthread_mutex_unlock(&context->lock);
	while (count)
		ring_lane_close(lanes[--count]);
	ckpt_pool_trim(&context->pool);
	ckpt_pool_trim(&context->shared_pool);
}

IOSHAPE_EXPORT int ioshape_context_trim(struct ioshape_context *context)
{
	struct base_error error = { 0 };
	int ret = ckpt_enter(context, &error);

	if (!ret)
		trim(context);
	return ckpt_leave(context, ret, &error);
}

IOSHAPE_EXPORT int ioshape_context_reserve(struct ioshape_context *context, uint64_t bytes)
{
	struct base_error error = { 0 };
	int ret = ckpt_enter(context, &error);

	if (!ret)
		ret = ckpt_pool_reserve(&context->pool, ckpt_chunks_for(bytes), &error);
	return ckpt_leave(context, ret, &error);
}

IOSHAPE_EXPORT void ioshape_context_free(struct ioshape_context *context)
{
	if (!context || context->owner != base_pid())
		return;
	ckpt_end_background(context);
	trim(context);
	ckpt_slots_destroy(&context->slots);
	ckpt_pool_destroy(&context->pool);
	ckpt_pool_destroy(&context->shared_pool);
	for (size_t i = 0; i < context->tidied_count; i++)
		free(context->tidied[i]);
	pthread_cond_destroy(&context->saves_change);
	pthread_mutex_destroy(&context->lock);
	free(context);
}

/* ---- What a context keeps -------------------------------------------------------------------- */

int ckpt_take_lane(struct ioshape_context *context, struct ring_lane **lane,
		   struct base_error *error)
{
	*lane = NULL;
	pthread_mutex_lock(&context->lock);
	if (context->lane_count)
		*lane = context->lanes[--context->lane_count];
	pthread_mutex_unlock(&context->lock);
	return *lane ? 0 : ring_lane_open(lane, &context->config, error);
}

void ckpt_return_lane(struct ioshape_context *context, struct ring_lane *lane)
{
	if (!lane)
		return;
	pthread_mutex_lock(&context->lock);
	if (context->lane_count < CKPT_KEPT_LANES) {
		context->lanes[context->lane_count++] = lane;
		lane = NULL;
	}
	pthread_mutex_unlock(&context->lock);
	ring_lane_close(lane);
}

bool ckpt_should_tidy(struct ioshape_context *context, const char *path)
{
	const char *slash = strrchr(path, '/');
	char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup("./");
	bool known = !directory;

	pthread_mutex_lock(&context->lock);
	for (size_t i = 0; !known && i < context->tidied_count; i++)
		known = !strcmp(context->tidied[i], directory);
	/* A job that saves into ever new directories has nothing to tidy in them. */
	if (!known && context->tidied_count < CKPT_KEPT_DIRECTORIES) {
		context->tidied[context->tidied_count++] = directory;
		directory = NULL;
	} else {
		known = true;
	}
	pthread_mutex_unlock(&context->lock);
	free(directory);
	return !known;
}
