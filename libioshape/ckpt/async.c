/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves in the background. The caller's thread, helped by others, copies the tensors into chunks of
 * staging memory, which hold their records' bytes one after the other; a thread of the save's own
 * writes them from there. If all chunks can be held at once writing begins when copying is over, so
 * that the two do not fight for memory bandwidth while training waits. Otherwise they go round: the
 * writer hands back what it has written, and the copying goes on with that.
 */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_COPY_THREADS 64u

/* Copying less than this is not worth starting threads for. */
#define PARALLEL_BYTES (32 * MIB)

struct ioshape_save {
	pid_t owner;
	struct ioshape_context *context;
	struct ioshape_save *next; /* in context->background, under the context's lock */
	char *path;
	struct ckpt_plan plan;
	struct ckpt_file_options file_options;
	struct ckpt_turn turn;
	uint64_t begin_ns;
	bool joined; /* the thread has been waited for, or never ran */
	pthread_t thread;
	atomic_bool abort;

	/* Staging. */
	uint64_t *starts; /* of each tensor in the staged bytes; one more for the end */
	struct ckpt_chunk *
		*chunks; /* by position; NULL before it is filled and after it was written */
	size_t chunk_count;
	size_t admitted;     /* chunks that may be held at a time; shrinks as the last ones go */
	size_t reader_chunk; /* the one being written; those before it have been handed back */
	_Atomic uint64_t staged_bytes;

	pthread_mutex_t lock; /* of what follows, and of `chunks` */
	pthread_cond_t change;
	size_t next_to_fill;
	size_t held; /* chunks in our hands */
	bool copying;
	bool failed; /* copying ended early */
	bool done;
	int result;
	struct ioshape_report report;
	struct base_error error;
};

/* ---- Copying into chunks --------------------------------------------------------------------- */

/* The tensor that holds byte `position` of the staged bytes: the last that begins at or before it.
 */
static size_t tensor_at(const struct ioshape_save *save, uint64_t position)
{
	size_t low = 0, high = save->plan.count;

	while (high - low > 1) {
		size_t middle = low + (high - low) / 2;

		if (save->starts[middle] <= position)
			low = middle;
		else
			high = middle;
	}
	return low;
}

static void fill_chunk(struct ioshape_save *save, size_t position, uint8_t *memory)
{
	uint64_t at = position * CKPT_CHUNK_BYTES;
	uint64_t end = MIN(at + CKPT_CHUNK_BYTES, save->plan.tensor_bytes), bytes;
	size_t tensor = tensor_at(save, at);

	for (; at < end; at += bytes, tensor++) {
		bytes = MIN(save->starts[tensor + 1], end) - at;
		ckpt_plan_copy(&save->plan, tensor, at - save->starts[tensor], memory, bytes);
		memory += bytes;
		atomic_fetch_add(&save->staged_bytes, bytes);
	}
}

/* The next chunk to fill, when there may be one more. False when there is none left, or no point.
 */
static bool claim_chunk(struct ioshape_save *save, size_t *position)
{
	bool claimed = false;

	pthread_mutex_lock(&save->lock);
	while (!save->failed && !save->done && save->next_to_fill < save->chunk_count &&
	       save->held == save->admitted)
		pthread_cond_wait(&save->change, &save->lock);
	if (!save->failed && !save->done && save->next_to_fill < save->chunk_count) {
		*position = save->next_to_fill++;
		save->held++;
		claimed = true;
	}
	pthread_mutex_unlock(&save->lock);
	return claimed;
}

static void publish_chunk(struct ioshape_save *save, size_t position, struct ckpt_chunk *chunk)
{
	pthread_mutex_lock(&save->lock);
	save->chunks[position] = chunk;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
}

static void give_up(struct ioshape_save *save, const struct base_error *error)
{
	pthread_mutex_lock(&save->lock);
	if (!save->failed)
		save->error = *error;
	save->failed = true;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
}

static int tell_staging(struct ioshape_save *save, struct base_error *error)
{
	const struct ckpt_file_options *options = &save->file_options;

	if (options->progress &&
	    options->progress(options->progress_user, IOSHAPE_PHASE_STAGE,
			      atomic_load(&save->staged_bytes), save->plan.tensor_bytes))
		return base_fail(error, -ECANCELED,
				 "the save to %s was stopped by its progress callback", save->path);
	return 0;
}

/* Copies until nothing is left. Only the caller's own thread speaks to the progress callback. */
static void copy_chunks(struct ioshape_save *save, bool speaks)
{
	struct base_error error = { 0 };
	struct ckpt_chunk *chunk;
	size_t position;
	int ret = 0;

	while (!ret && claim_chunk(save, &position)) {
		ret = ckpt_pool_get(&save->context->pool, &chunk, &error);
		if (ret)
			break;
		fill_chunk(save, position, chunk->memory);
		publish_chunk(save, position, chunk);
		if (speaks)
			ret = tell_staging(save, &error);
	}
	if (ret)
		give_up(save, &error);
}

static void *copy_in_thread(void *argument)
{
	copy_chunks(argument, false);
	return NULL;
}

static int start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int ret;

	/* The application's signals are for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = pthread_create(thread, NULL, run, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -ret;
}

static void copy_all(struct ioshape_save *save)
{
	unsigned wanted = save->plan.tensor_bytes < PARALLEL_BYTES ?
				  0 :
				  MIN(save->context->copy_threads, MAX_COPY_THREADS) - 1;
	pthread_t helpers[MAX_COPY_THREADS];
	unsigned started = 0;

	while (started < wanted && !start_thread(&helpers[started], copy_in_thread, save))
		started++;
	copy_chunks(save, true);
	while (started)
		pthread_join(helpers[--started], NULL);
}

/* ---- Writing from chunks --------------------------------------------------------------------- */

/* Waits until the chunk at `position` is filled. */
static int await_chunk(struct ioshape_save *save, size_t position, struct ckpt_chunk **chunk,
		       struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&save->lock);
	while (!save->chunks[position] && !save->failed)
		pthread_cond_wait(&save->change, &save->lock);
	*chunk = save->chunks[position];
	if (!*chunk) {
		*error = save->error;
		ret = error->code;
	}
	pthread_mutex_unlock(&save->lock);
	return ret;
}

/* Hands the chunk back: to the copying while that needs more of them, afterwards to other saves. */
static void release_chunk(struct ioshape_save *save, size_t position)
{
	struct ckpt_chunk *chunk;
	bool leave;

	pthread_mutex_lock(&save->lock);
	chunk = save->chunks[position];
	save->chunks[position] = NULL;
	save->held--;
	leave = save->next_to_fill == save->chunk_count;
	if (leave)
		save->admitted--;
	pthread_mutex_unlock(&save->lock);
	ckpt_pool_put(&save->context->pool, chunk);
	if (leave)
		ckpt_pool_leave(&save->context->pool, 1);
	else
		pthread_cond_broadcast(&save->change);
}

static int next_staged(void *user, size_t tensor, uint64_t offset, const void **data, size_t *bytes,
		       struct base_error *error)
{
	struct ioshape_save *save = user;
	uint64_t at = save->starts[tensor] + offset;
	size_t position = at / CKPT_CHUNK_BYTES;
	struct ckpt_chunk *chunk;
	int ret;

	while (save->reader_chunk < position)
		release_chunk(save, save->reader_chunk++);
	ret = await_chunk(save, position, &chunk, error);
	if (ret)
		return ret;
	*data = chunk->memory + at % CKPT_CHUNK_BYTES;
	*bytes = MIN(*bytes, CKPT_CHUNK_BYTES - at % CKPT_CHUNK_BYTES);
	return 0;
}

/* Nobody copies or writes any more: whatever is still held, and the rest of the promise, goes back.
 */
static void release_staging(struct ioshape_save *save)
{
	for (size_t i = 0; i < save->chunk_count; i++) {
		if (save->chunks[i])
			ckpt_pool_put(&save->context->pool, save->chunks[i]);
		save->chunks[i] = NULL;
	}
	ckpt_pool_leave(&save->context->pool, save->admitted);
	save->admitted = 0;
	save->held = 0;
}

static void *run_save(void *argument)
{
	struct ioshape_save *save = argument;
	const struct ckpt_source source = { next_staged, save };
	struct base_error error = { 0 };
	struct ioshape_report report = save->report;
	bool copying;
	int ret;

	ret = ckpt_save(save->context, save->path, &save->plan, &source, &save->file_options,
			&save->abort, &save->turn, &report, &error);
	ckpt_turn_end(save->context, &save->turn);
	pthread_mutex_lock(&save->lock);
	report.stage_s = save->report.stage_s;
	report.total_s = base_seconds(base_now_ns() - save->begin_ns);
	save->report = report;
	save->result = ret;
	save->error = error;
	save->done = true;
	copying = save->copying;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	if (!copying)
		release_staging(save);
	return NULL;
}

/* ---- Beginning ------------------------------------------------------------------------------- */

static void free_save(struct ioshape_save *save)
{
	ckpt_plan_free(&save->plan);
	free(save->chunks);
	free(save->starts);
	free(save->path);
	pthread_cond_destroy(&save->change);
	pthread_mutex_destroy(&save->lock);
	free(save);
}

static int make_save(struct ioshape_save **out, struct ioshape_context *context, const char *path,
		     const struct ioshape_tensor *tensors, size_t count,
		     const struct ioshape_save_options *options, struct base_error *error)
{
	struct ioshape_save *save = calloc(1, sizeof(*save));
	pthread_condattr_t attributes;
	uint64_t start = 0;
	int ret;

	if (!save)
		return base_no_memory(error, "a save", sizeof(*save));
	save->owner = context->owner;
	save->context = context;
	save->joined = true;
	save->report.size = sizeof(save->report);
	save->file_options = (struct ckpt_file_options){
		.progress = options->progress,
		.progress_user = options->progress_user,
		.no_replace = options->no_replace,
		.no_sync = options->no_sync,
	};
	pthread_mutex_init(&save->lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&save->change, &attributes);
	pthread_condattr_destroy(&attributes);
	save->begin_ns = base_now_ns();
	save->path = strdup(path);
	ret = save->path ? ckpt_plan_make(&save->plan, tensors, count, options->metadata, error) :
			   base_no_memory(error, "a path", strlen(path));
	if (ret)
		goto fail;
	save->report.plan_s = base_seconds(base_now_ns() - save->begin_ns);
	save->chunk_count = ckpt_chunks_for(save->plan.tensor_bytes);
	save->chunks = calloc(MAX(save->chunk_count, 1), sizeof(struct ckpt_chunk *));
	save->starts = calloc(count + 1, sizeof(*save->starts));
	if (!save->chunks || !save->starts) {
		ret = base_no_memory(error, "staging",
				     (save->chunk_count + count) * sizeof(uint64_t));
		goto fail;
	}
	for (size_t i = 0; i < count; i++) {
		save->starts[i] = start;
		start += save->plan.layouts[i].bytes;
	}
	save->starts[count] = start;
	*out = save;
	return 0;
fail:
	free_save(save);
	return ret;
}

static int start_writing(struct ioshape_save *save, struct base_error *error)
{
	int ret = start_thread(&save->thread, run_save, save);

	if (ret)
		return base_fail(error, ret, "cannot save to %s: no thread could be started",
				 save->path);
	save->joined = false;
	return 0;
}

static void join(struct ioshape_save *save)
{
	if (!save->joined)
		pthread_join(save->thread, NULL);
	save->joined = true;
}

static int abandon(struct ioshape_save *save, int ret)
{
	atomic_store(&save->abort, true);
	if (save->joined)
		ckpt_turn_end(save->context, &save->turn);
	join(save);
	release_staging(save);
	return ret;
}

/* Stages, and leaves the rest to the thread. On failure nothing of the save is left but its memory.
 */
static int stage(struct ioshape_save *save, struct base_error *error)
{
	bool all_at_once = save->chunk_count <= save->admitted, done;
	uint64_t begin = base_now_ns();
	int ret = 0;

	ckpt_turn_begin(save->context, &save->turn, save->path);
	save->copying = true;
	ret = tell_staging(save, error);
	if (!ret && !all_at_once)
		ret = start_writing(save, error);
	if (!ret)
		copy_all(save);
	pthread_mutex_lock(&save->lock);
	/* A writer that failed early ends the copying, too, but that failure belongs to the handle.
	 */
	if (save->failed) {
		*error = save->error;
		ret = error->code;
	}
	save->report.stage_s = base_seconds(base_now_ns() - begin);
	save->copying = false;
	done = save->done;
	pthread_mutex_unlock(&save->lock);
	if (!ret && all_at_once)
		ret = start_writing(save, error);
	if (ret)
		return abandon(save, ret);
	if (done)
		release_staging(save);
	return 0;
}

static int save_async(struct ioshape_context *context, const char *path,
		      const struct ioshape_tensor *tensors, size_t count,
		      const struct ioshape_save_options *options, struct ioshape_save **out,
		      struct base_error *error)
{
	struct ioshape_save *save = NULL;
	int ret;

	ret = make_save(&save, context, path, tensors, count, options, error);
	if (ret)
		return ret;
	save->admitted = MIN(save->chunk_count, context->pool.limit);
	ret = ckpt_pool_admit(&context->pool, save->admitted,
			      context->staging_full == IOSHAPE_STAGING_REFUSE, error);
	if (ret) {
		free_save(save);
		return ret;
	}
	ret = stage(save, error);
	if (ret) {
		free_save(save);
		return ret;
	}
	pthread_mutex_lock(&context->lock);
	save->next = context->background;
	context->background = save;
	pthread_mutex_unlock(&context->lock);
	*out = save;
	return 0;
}

IOSHAPE_EXPORT int ioshape_save_tensors_async(struct ioshape_context *context, const char *path,
					      const struct ioshape_tensor *tensors, size_t count,
					      const struct ioshape_save_options *given,
					      struct ioshape_save **out)
{
	struct ioshape_save_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return -EINVAL;
	*out = NULL;
	ret = ckpt_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_save_options",
					&error);
	if (!ret && !path)
		ret = base_fail(&error, -EINVAL, "no path to save to was given");
	if (!ret && options.report)
		ret = base_fail(&error, -EINVAL,
				"an asynchronous save cannot fill options.report; ask "
				"ioshape_save_report() when it is done");
	if (!ret)
		ret = save_async(context, path, tensors, count, &options, out, &error);
	return ckpt_leave(context, ret, &error);
}

/* ---- Handles --------------------------------------------------------------------------------- */

/* In a child of fork() the thread does not exist and the lock may be held for ever. */
static bool is_ours(const struct ioshape_save *save)
{
	return save->owner == getpid();
}

IOSHAPE_EXPORT int ioshape_save_poll(struct ioshape_save *save)
{
	int done;

	if (!save)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	done = save->done;
	pthread_mutex_unlock(&save->lock);
	return done;
}

static struct timespec deadline_after(int64_t timeout_ms)
{
	struct timespec when;

	clock_gettime(CLOCK_MONOTONIC, &when);
	when.tv_sec += (time_t)(timeout_ms / 1000);
	when.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
	if (when.tv_nsec >= 1000000000) {
		when.tv_sec++;
		when.tv_nsec -= 1000000000;
	}
	return when;
}

/* Longer is for ever; it keeps the sum with the clock within its type. */
#define LONGEST_TIMEOUT_MS (1000ll * 3600 * 24 * 365 * 100)

IOSHAPE_EXPORT int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms)
{
	bool for_ever = timeout_ms < 0 || timeout_ms > LONGEST_TIMEOUT_MS;
	struct timespec deadline;
	int ret = 0;

	if (!save)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	if (!for_ever)
		deadline = deadline_after(timeout_ms);
	pthread_mutex_lock(&save->lock);
	while (!save->done && ret != ETIMEDOUT) {
		if (for_ever)
			pthread_cond_wait(&save->change, &save->lock);
		else
			ret = pthread_cond_timedwait(&save->change, &save->lock, &deadline);
	}
	ret = save->done ? save->result : -ETIMEDOUT;
	pthread_mutex_unlock(&save->lock);
	return ret;
}

IOSHAPE_EXPORT int ioshape_save_report(struct ioshape_save *save, struct ioshape_report *report)
{
	int ret;

	if (!save || !report)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	ret = save->done ? base_give_struct(report, &save->report, sizeof(save->report),
					    "ioshape_report", NULL) :
			   -EINPROGRESS;
	pthread_mutex_unlock(&save->lock);
	return ret;
}

IOSHAPE_EXPORT const char *ioshape_save_message(struct ioshape_save *save)
{
	return save && ioshape_save_poll(save) == 1 ? save->error.text : "";
}

static void end_save(struct ioshape_save *save)
{
	struct ioshape_context *context = save->context;

	atomic_store(&save->abort, true);
	pthread_mutex_lock(&context->lock);
	save->turn.abort_waits = true;
	pthread_cond_broadcast(&context->saves_change);
	pthread_mutex_unlock(&context->lock);
	join(save);
	save->context = NULL;
}

static void forget(struct ioshape_context *context, struct ioshape_save *save)
{
	struct ioshape_save **link = &context->background;

	pthread_mutex_lock(&context->lock);
	while (*link != save)
		link = &(*link)->next;
	*link = save->next;
	pthread_mutex_unlock(&context->lock);
}

void ckpt_end_background(struct ioshape_context *context)
{
	while (context->background) {
		struct ioshape_save *save = context->background;

		forget(context, save);
		end_save(save);
	}
}

IOSHAPE_EXPORT void ioshape_save_free(struct ioshape_save *save)
{
	if (!save || !is_ours(save))
		return;
	if (save->context) {
		forget(save->context, save);
		end_save(save);
	}
	free_save(save);
}
