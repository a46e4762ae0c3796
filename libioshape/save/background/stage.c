/* SPDX-License-Identifier: Apache-2.0 */
/* Between the caller's memory and a save's thread: copying into chunks, and reading from them. */
#include "save/background/background.h"

#include <errno.h>

/* Copying less than this is not worth starting threads for. */
#define PARALLEL_BYTES (32 * MIB)

/* ---- Copying into chunks --------------------------------------------------------------------- */

/* The record that holds byte `position` of the payload: the last that begins at or before it. */
static size_t record_at(const struct save_plan *plan, uint64_t position)
{
	size_t low = plan->own, high = plan->count;

	while (high - low > 1) {
		size_t middle = low + (high - low) / 2;

		if (plan->records[middle].start <= position)
			low = middle;
		else
			high = middle;
	}
	return low;
}

static int fill_chunk(struct ioshape_save *save, size_t position, uint8_t *memory,
		      struct base_error *error)
{
	const struct save_plan *plan = &save->request.plan;
	uint64_t at = position * SAVE_CHUNK_BYTES;
	uint64_t end = MIN(at + SAVE_CHUNK_BYTES, plan->payload_bytes), bytes;
	size_t i = record_at(plan, at);
	int ret = 0;

	for (; !ret && at < end; at += bytes, i++) {
		const struct save_record *record = &plan->records[i];

		bytes = MIN(record->start + record->bytes, end) - at;
		ret = save_plan_copy(plan, i, at - record->start, memory, bytes, error);
		memory += bytes;
		if (!ret)
			atomic_fetch_add(&save->stage.copied_bytes, bytes);
	}
	return ret;
}

static void give_up(struct ioshape_save *save, const struct base_error *error)
{
	pthread_mutex_lock(&save->lock);
	if (!save->stage.failure.code)
		save->stage.failure = *error;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
}

/* Chunks are left to be filled, and the writer waits for them. */
static bool is_filling(const struct save_stage *stage)
{
	return !stage->failure.code && !stage->written && stage->next_to_fill < stage->chunk_count;
}

/*
 * The next chunk to fill, when there may be one more. False when there is none left, or no point.
 */
static bool claim_chunk(struct ioshape_save *save, bool speaks, size_t *position)
{
	struct save_stage *stage = &save->stage;
	struct base_error error = { 0 };
	bool claimed;

	pthread_mutex_lock(&save->lock);
	while (is_filling(stage) && stage->held == stage->admitted) {
		if (base_cond_wait_ms(&save->change, &save->lock, SAVE_PATIENCE_MS) || !speaks)
			continue;
		pthread_mutex_unlock(&save->lock);
		if (save_stage_tell(save, &error))
			give_up(save, &error);
		pthread_mutex_lock(&save->lock);
	}
	claimed = is_filling(stage);
	if (claimed) {
		*position = stage->next_to_fill++;
		stage->held++;
	}
	pthread_mutex_unlock(&save->lock);
	return claimed;
}

static void publish_chunk(struct ioshape_save *save, size_t position, struct save_chunk *chunk)
{
	pthread_mutex_lock(&save->lock);
	save->stage.chunks[position] = chunk;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
}

int save_stage_tell(void *user, struct base_error *error)
{
	struct ioshape_save *save = user;

	if (!save_track(save, IOSHAPE_PHASE_STAGE, atomic_load(&save->stage.copied_bytes),
			save->request.plan.payload_bytes))
		return 0;
	return base_refuse(error, -ECANCELED,
			   "the save to \"%s\" was stopped by its progress callback",
			   save->request.path);
}

/* Copies until nothing is left. Only the caller's own thread speaks to the progress callback. */
static void copy_chunks(struct ioshape_save *save, bool speaks)
{
	struct base_error error = { 0 };
	struct save_chunk *chunk;
	size_t position;
	int ret = 0;

	while (!ret && claim_chunk(save, speaks, &position)) {
		ret = save_staging_get(save->stage.staging, &chunk, &error);
		if (ret) {
			give_up(save, &error);
			return;
		}
		ret = fill_chunk(save, position, chunk->memory, &error);
		/* With the last chunk the save may be over in a moment: then it is too late to stop
		 * it. */
		if (!ret && speaks)
			ret = save_stage_tell(save, &error);
		if (ret)
			give_up(save, &error);
		publish_chunk(save, position, chunk);
	}
}

static void *copy_in_thread(void *argument)
{
	copy_chunks(argument, false);
	return NULL;
}

void save_stage_copy(struct ioshape_save *save)
{
	unsigned wanted = save->context->config.threads - 1;
	pthread_t helpers[SAVE_MOST_COPY_THREADS];
	unsigned started = 0;

	/* The caller's functions are called in order, and by the caller's thread alone. */
	if (save->request.plan.payload_bytes < PARALLEL_BYTES || save->request.plan.fetches)
		wanted = 0;
	while (started < wanted && !base_start_thread(&helpers[started], copy_in_thread, save))
		started++;
	copy_chunks(save, true);
	while (started)
		pthread_join(helpers[--started], NULL);
}

/* ---- Writing from chunks --------------------------------------------------------------------- */

/* Waits until the chunk at `position` is filled. */
static int await_chunk(struct ioshape_save *save, size_t position, struct save_chunk **chunk,
		       struct base_error *error)
{
	struct save_stage *stage = &save->stage;

	pthread_mutex_lock(&save->lock);
	while (!stage->chunks[position] && !stage->failure.code)
		pthread_cond_wait(&save->change, &save->lock);
	*chunk = stage->chunks[position];
	*error = stage->failure;
	pthread_mutex_unlock(&save->lock);
	return error->code;
}

/* Hands the chunk back: to the copying while that needs more of them, afterwards to other saves. */
static void release_chunk(struct ioshape_save *save, size_t position)
{
	struct save_stage *stage = &save->stage;
	struct save_chunk *chunk;
	bool leave;

	pthread_mutex_lock(&save->lock);
	chunk = stage->chunks[position];
	stage->chunks[position] = NULL;
	stage->held--;
	leave = stage->next_to_fill == stage->chunk_count;
	if (leave)
		stage->admitted--;
	pthread_mutex_unlock(&save->lock);
	save_staging_put(stage->staging, chunk);
	if (leave)
		save_staging_leave(stage->staging, 1);
	else
		pthread_cond_broadcast(&save->change);
}

/* What lies before `position` goes back. */
static int leave_behind(struct ioshape_save *save, size_t position, struct base_error *error)
{
	struct save_stage *stage = &save->stage;
	int ret = 0;

	if (stage->leaving && position > stage->position)
		ret = stage->leaving(stage->leaving_user, error);
	stage->position = position;
	while (!ret && stage->oldest + stage->lag < position)
		release_chunk(save, stage->oldest++);
	return ret;
}

int save_stage_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		    struct base_error *error)
{
	struct ioshape_save *save = user;
	uint64_t at = save->request.plan.records[record].start + offset;
	size_t position = at / SAVE_CHUNK_BYTES;
	struct save_chunk *chunk;
	int ret;

	ret = leave_behind(save, position, error);
	if (!ret)
		ret = await_chunk(save, position, &chunk, error);
	if (ret)
		return ret;
	save->stage.reading = chunk;
	*data = chunk->memory + at % SAVE_CHUNK_BYTES;
	*bytes = MIN(*bytes, SAVE_CHUNK_BYTES - at % SAVE_CHUNK_BYTES);
	return 0;
}

void save_stage_release(struct ioshape_save *save)
{
	struct save_stage *stage = &save->stage;

	for (size_t i = 0; i < stage->chunk_count; i++) {
		if (stage->chunks[i])
			save_staging_put(stage->staging, stage->chunks[i]);
		stage->chunks[i] = NULL;
	}
	save_staging_leave(stage->staging, stage->admitted);
	stage->admitted = 0;
	stage->held = 0;
}

/* ---- For another process that writes --------------------------------------------------------- */

bool save_find_staged(const struct ioshape_save *save, const void *data, uint64_t *offset)
{
	const struct save_chunk *chunk = save->stage.reading;
	const uint8_t *at = data;

	if (!chunk || at < chunk->memory || at >= chunk->memory + SAVE_CHUNK_BYTES)
		return false;
	*offset = chunk->offset + (uint64_t)(at - chunk->memory);
	return true;
}

bool save_watch_chunks(struct ioshape_save *save,
		       int (*leaving)(void *user, struct base_error *error), void *user)
{
	struct save_stage *stage = &save->stage;

	stage->leaving = leaving;
	stage->leaving_user = user;
	/* So that the process that writes has always one to go on with. */
	stage->lag = leaving && stage->admitted > 1;
	return stage->lag;
}
