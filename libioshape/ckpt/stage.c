/* SPDX-License-Identifier: Apache-2.0 */
/* Between the caller's memory and a save's thread: copying into chunks, and reading from them. */
#include "ckpt/background.h"

#include <errno.h>

#define MAX_COPY_THREADS 64u

/* Copying less than this is not worth starting threads for. */
#define PARALLEL_BYTES (32 * MIB)

/* ---- Copying into chunks --------------------------------------------------------------------- */

/* The record that holds byte `position` of the payload: the last that begins at or before it. */
static size_t record_at(const struct ckpt_plan *plan, uint64_t position)
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
	const struct ckpt_plan *plan = &save->plan;
	uint64_t at = position * CKPT_CHUNK_BYTES;
	uint64_t end = MIN(at + CKPT_CHUNK_BYTES, plan->payload_bytes), bytes;
	size_t i = record_at(plan, at);
	int ret = 0;

	for (; !ret && at < end; at += bytes, i++) {
		const struct ckpt_record *record = &plan->records[i];

		bytes = MIN(record->start + record->bytes, end) - at;
		ret = ckpt_plan_copy(plan, i, at - record->start, memory, bytes, error);
		memory += bytes;
		if (!ret)
			atomic_fetch_add(&save->staged_bytes, bytes);
	}
	return ret;
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

static bool must_wait(const struct ioshape_save *save)
{
	return !save->failed && !save->written && save->next_to_fill < save->chunk_count &&
	       save->held == save->admitted;
}

/*
 * The next chunk to fill, when there may be one more. False when there is none left, or no point.
 */
static bool claim_chunk(struct ioshape_save *save, bool speaks, size_t *position)
{
	struct base_error error = { 0 };
	bool claimed = false;

	pthread_mutex_lock(&save->lock);
	while (must_wait(save)) {
		if (base_cond_wait_ms(&save->change, &save->lock, CKPT_PATIENCE_MS) || !speaks)
			continue;
		pthread_mutex_unlock(&save->lock);
		if (ckpt_stage_tell(save, &error))
			give_up(save, &error);
		pthread_mutex_lock(&save->lock);
	}
	if (!save->failed && !save->written && save->next_to_fill < save->chunk_count) {
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

int ckpt_stage_tell(void *user, struct base_error *error)
{
	struct ioshape_save *save = user;

	if (!ckpt_track(save, IOSHAPE_PHASE_STAGE, atomic_load(&save->staged_bytes),
			save->plan.payload_bytes))
		return 0;
	return base_fail(error, -ECANCELED, "the save to %s was stopped by its progress callback",
			 save->path);
}

/* Copies until nothing is left. Only the caller's own thread speaks to the progress callback. */
static void copy_chunks(struct ioshape_save *save, bool speaks)
{
	struct base_error error = { 0 };
	struct ckpt_chunk *chunk;
	size_t position;
	int ret = 0;

	while (!ret && claim_chunk(save, speaks, &position)) {
		ret = ckpt_pool_get(save->staging, &chunk, &error);
		if (ret) {
			give_up(save, &error);
			return;
		}
		ret = fill_chunk(save, position, chunk->memory, &error);
		/* With the last chunk the save may be over in a moment: then it is too late to stop
		 * it. */
		if (!ret && speaks)
			ret = ckpt_stage_tell(save, &error);
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

void ckpt_stage_copy(struct ioshape_save *save)
{
	unsigned wanted = MIN(save->context->copy_threads, MAX_COPY_THREADS) - 1;
	pthread_t helpers[MAX_COPY_THREADS];
	unsigned started = 0;

	/* The caller's functions are called in order, and by nobody but the caller's thread. */
	if (save->plan.payload_bytes < PARALLEL_BYTES || save->plan.fetches)
		wanted = 0;
	while (started < wanted && !base_start_thread(&helpers[started], copy_in_thread, save))
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
	*chunk = save->failed ? NULL : save->chunks[position];
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
	ckpt_pool_put(save->staging, chunk);
	if (leave)
		ckpt_pool_leave(save->staging, 1);
	else
		pthread_cond_broadcast(&save->change);
}

/* What lies before `position` goes back. */
static int leave_behind(struct ioshape_save *save, size_t position, struct base_error *error)
{
	int ret = 0;

	if (save->leaving && position > save->read_position)
		ret = save->leaving(save->leaving_user, error);
	save->read_position = position;
	while (!ret && save->reader_chunk + save->lag < position)
		release_chunk(save, save->reader_chunk++);
	return ret;
}

int ckpt_stage_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		    struct base_error *error)
{
	struct ioshape_save *save = user;
	uint64_t at = save->plan.records[record].start + offset;
	size_t position = at / CKPT_CHUNK_BYTES;
	struct ckpt_chunk *chunk;
	int ret;

	ret = leave_behind(save, position, error);
	if (!ret)
		ret = await_chunk(save, position, &chunk, error);
	if (ret)
		return ret;
	save->reading = chunk;
	*data = chunk->memory + at % CKPT_CHUNK_BYTES;
	*bytes = MIN(*bytes, CKPT_CHUNK_BYTES - at % CKPT_CHUNK_BYTES);
	return 0;
}

bool ckpt_stage_restart(void *user)
{
	struct ioshape_save *save = user;

	save->read_position = 0;
	return !save->reader_chunk;
}

void ckpt_stage_release(struct ioshape_save *save)
{
	for (size_t i = 0; i < save->chunk_count; i++) {
		if (save->chunks[i])
			ckpt_pool_put(save->staging, save->chunks[i]);
		save->chunks[i] = NULL;
	}
	ckpt_pool_leave(save->staging, save->admitted);
	save->admitted = 0;
	save->held = 0;
}
