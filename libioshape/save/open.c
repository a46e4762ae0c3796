/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: options and their defaults, opening, trimming and freeing. */
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Options --------------------------------------------------------------------------------- */

#define LEAST_STAGING_BYTES (64 * MIB)

/* Returns the memory of the machine, or the container's limit if that is smaller. */
static uint64_t memory_bytes(void)
{
	uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	unsigned long long limit;
	FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");

	if (file) {
		if (fscanf(file, "%llu", &limit) == 1) /* "max" means no limit */
			bytes = MIN(bytes, limit);
		fclose(file);
	}
	return bytes;
}

static uint32_t local_ranks(void)
{
	struct base_job job;

	base_job_find(&job);
	return job.local_ranks;
}

/* Returns a quarter of the memory, divided by the number of ranks on this host. */
static uint64_t default_staging_bytes(void)
{
	return MAX(memory_bytes() / 4 / local_ranks(), LEAST_STAGING_BYTES);
}

static void take_defaults(struct ioshape_context_options *options)
{
	if (!options->staging_bytes)
		options->staging_bytes = default_staging_bytes();
	if (!options->log_level)
		options->log_level = IOSHAPE_LOG_INFO;
	if (!options->coordinator)
		options->coordinator = "local";
	if (!options->layout)
		options->layout = "auto";
}

/* Checks the options that one setting alone cannot decide. */
static int check_together(const struct ioshape_context_options *options, struct base_error *error)
{
	if ((unsigned)options->log_level > IOSHAPE_LOG_DEBUG)
		return base_fail_reason_with(error, -EINVAL, "zero the struct before filling it in",
					     "log_level is not a value of enum ioshape_log_level");
	if (options->engine == IOSHAPE_ENGINE_BUFFERED && options->direct == IOSHAPE_DIRECT_REQUIRE)
		return base_fail_reason_with(
			error, -EINVAL, "use one of them",
			"the buffered engine cannot be combined with direct=require");
	return 0;
}

/* Takes the options that only tests set. *given points to the public options afterwards, which may
 * be those in *taken. */
static void take_test_options(struct save_test_options *taken,
			      const struct ioshape_context_options **given)
{
	const size_t size = sizeof(struct ioshape_context_options);

	if (!*given || (*given)->size != sizeof(*taken)) {
		memset(taken, 0, sizeof(*taken));
		return;
	}
	memcpy(taken, *given, sizeof(*taken));
	memcpy(taken->options, &size, sizeof(size));
	*given = (const struct ioshape_context_options *)taken;
}

static int take_options(struct ioshape_context_options *options,
			const struct ioshape_context_options *given,
			struct fs_layout_request *request, struct base_error *error)
{
	int ret;

	ret = base_take_options(options, sizeof(*options), given, "ioshape_context_options", error);
	if (!ret)
		ret = base_settings_take(BASE_SETTINGS_CONTEXT, options, error);
	if (ret)
		return ret;
	take_defaults(options);
	ret = check_together(options, error);
	if (!ret && fs_layout_request_parse(options->layout, request, error))
		ret = base_settings_blame(error, "layout", options->layout);
	return ret;
}

/* ---- Opening and freeing --------------------------------------------------------------------- */

static int open_context(struct ioshape_context **out, const struct ioshape_context_options *given,
			struct base_error *error)
{
	struct ioshape_context_options options;
	struct save_test_options tests;
	struct ioshape_context *context;
	struct fs_layout_request request;
	uint8_t examine[SAVE_RULES];
	int ret;

	take_test_options(&tests, &given);
	ret = take_options(&options, given, &request, error);
	if (!ret && save_examine_parse(examine, options.examine, error))
		ret = base_settings_blame(error, "examine", options.examine);
	if (ret)
		return ret;
	context = calloc(1, sizeof(*context));
	if (!context)
		return base_no_memory(error, "a context", sizeof(*context));
	context->owner = getpid();
	context->log = (struct base_log){ options.log, options.log_user, options.log_level };
	context->config = (struct io_config){
		.engine = options.engine,
		.direct = options.direct,
		.block_bytes = tests.block_bytes,
		.depth = tests.queue_depth,
		.threads = base_copy_threads(),
		.layout = request,
		.log = context->log,
	};
	context->has_neighbours = local_ranks() > 1;
	context->full = options.full;
	memcpy(context->examine, examine, sizeof(examine));
	for (enum save_rule rule = 0; rule < SAVE_RULES; rule++)
		context->examines |= examine[rule] != SAVE_OFF;
	base_settings_warn(&context->log);
	ret = save_slots_init(&context->slots, &options, tests.lease_ms, &context->log, error);
	if (ret) {
		free(context);
		return ret;
	}
	context->slots.layout = request;
	save_staging_init(&context->pool, options.staging_bytes, false);
	save_staging_init(&context->shared_pool, options.staging_bytes, true);
	TAILQ_INIT(&context->orders);
	TAILQ_INIT(&context->saved.all);
	TAILQ_INIT(&context->loaded.all);
	TAILQ_INIT(&context->compared);
	TAILQ_INIT(&context->background);
	pthread_mutex_init(&context->lock, NULL);
	pthread_cond_init(&context->saves_change, NULL);
	*out = context;
	return 0;
}

IOSHAPE_EXPORT int ioshape_context_open(struct ioshape_context **out,
					const struct ioshape_context_options *options)
{
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_null_argument("open");
	*out = NULL;
	ret = open_context(out, options, &error);
	return base_return(ret, "open", NULL, &error);
}

static void trim(struct ioshape_context *context)
{
	struct io_queue *queues[SAVE_KEPT_QUEUES];
	size_t count;

	pthread_mutex_lock(&context->lock);
	count = context->queue_count;
	memcpy(queues, context->queues, sizeof(queues));
	context->queue_count = 0;
	pthread_mutex_unlock(&context->lock);
	while (count)
		io_queue_close(queues[--count]);
	save_staging_trim(&context->pool);
	save_staging_trim(&context->shared_pool);
}

int save_reserve(struct ioshape_context *context, uint64_t bytes)
{
	struct base_error error = { 0 };
	int ret = save_enter(context, &error);

	if (!ret && !bytes)
		trim(context);
	else if (!ret)
		ret = save_staging_reserve(&context->pool, save_chunks_for(bytes), &error);
	return base_return(ret, "reserve", NULL, &error);
}

IOSHAPE_EXPORT void ioshape_context_free(struct ioshape_context *context)
{
	if (!context || context->owner != getpid())
		return;
	save_end_background(context);
	trim(context);
	save_slots_destroy(&context->slots);
	save_staging_destroy(&context->pool);
	save_staging_destroy(&context->shared_pool);
	save_seen_forget(context);
	pthread_cond_destroy(&context->saves_change);
	pthread_mutex_destroy(&context->lock);
	free(context);
}
