/* SPDX-License-Identifier: Apache-2.0 */
/* Between the caller's memory and a save's thread: copying into chunks, and reading from them. */
#include "save/background/background.h"

#include <errno.h>

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

int save_stage_fill(struct ioshape_save *save, uint64_t at, uint64_t end, uint8_t *memory,
		    enum save_which which, struct base_error *error)
{
	const struct save_plan *plan = &save->request.plan;
	int ret = 0;

	for (size_t i = record_at(plan, at); !ret && i < plan->count; i++) {
		const struct save_record *record = &plan->records[i];
		const uint64_t from = MAX(record->start, at);
		const uint64_t to = MIN(record->start + record->bytes, end);

		if (record->start >= end)
			break;
		/* Nothing is left of it, or ever was. */
		if (to <= from || (which != SAVE_ALL && record->later != (which == SAVE_LATER)))
			continue;
		ret = save_plan_copy(plan, i, from - record->start, memory + (from - at), to - from,
				     error);
		if (!ret)
			atomic_fetch_add(&save->stage.copied_bytes, to - from);
	}
	return ret;
}

static int fill_chunk(struct ioshape_save *save, size_t position, uint8_t *memory,
		      struct base_error *error)
{
	const uint64_t at = position * SAVE_CHUNK_BYTES;
	const uint64_t end = MIN(at + SAVE_CHUNK_BYTES, save->request.plan.staged_bytes);

	return save_stage_fill(save, at, end, memory, save->stage.later ? SAVE_NOW : SAVE_ALL,
			       error);
}

/* All of the chunk will be copied later. */
static bool is_for_later(const struct ioshape_save *save, size_t position)
{
	const struct save_plan *plan = &save->request.plan;
	const uint64_t at = position * SAVE_CHUNK_BYTES;

	if (!save->stage.later)
		return false;
	for (size_t i = record_at(plan, at);
	     i < plan->count && plan->records[i].start < at + SAVE_CHUNK_BYTES; i++)
		if (plan->records[i].bytes && !plan->records[i].later)
			return false;
	return true;
}

void save_stage_give_up(struct ioshape_save *save, const struct base_error *error)
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
			save_stage_give_up(save, &error);
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
		if (is_for_later(save, position))
			continue;
		ret = save_staging_get(save->stage.staging, &chunk, &error);
		if (ret) {
			save_stage_give_up(save, &error);
			return;
		}
		ret = fill_chunk(save, position, chunk->memory, &error);
		/* With the last chunk the save may be over in a moment: then it is too late to stop
		 * it. */
		if (!ret && speaks)
			ret = save_stage_tell(save, &error);
		if (ret)
			save_stage_give_up(save, &error);
		publish_chunk(save, position, chunk);
	}
}

static void help_to_copy(void *save)
{
	copy_chunks(save, false);
}

static void help_to_make(void *user)
{
	struct ioshape_save *save = user;
	struct base_error error = { 0 };
	size_t promised;

	pthread_mutex_lock(&save->lock);
	promised = save->stage.admitted;
	pthread_mutex_unlock(&save->lock);
	/* Who needs a chunk that cannot be made will say so. */
	save_staging_reserve(save->stage.staging, promised, &error);
}

/* So many threads are worth starting beside the one that copies. */
static unsigned helpers_for(const struct ioshape_save *save)
{
	return save->request.plan.payload_bytes < SAVE_PARALLEL_BYTES ?
		       0 :
		       save->context->config.threads - 1;
}

void save_stage_make_chunks(struct ioshape_save *save, struct base_crew *crew)
{
	base_crew_begin(crew, helpers_for(save), help_to_make, save);
}

void save_stage_copy(struct ioshape_save *save)
{
	struct base_crew crew;

	base_crew_init(&crew);
	if (!save->request.plan.fetches)
		base_crew_begin(&crew, helpers_for(save), help_to_copy, save);
	else if (!save->stage.later)
		save_stage_make_chunks(save, &crew);
	copy_chunks(save, true);
	base_crew_finish(&crew);
	base_crew_dismiss(&crew);
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
	const struct save_outlet *outlet = &stage->outlet;
	int ret = 0;

	for (; stage->position < position; stage->position++)
		if (outlet->offset)
			stage->ends[stage->position % ARRAY_LENGTH(stage->ends)] =
				outlet->offset(outlet->to);
	while (stage->oldest + stage->lag < position) {
		if (outlet->await)
			ret = outlet->await(outlet->to,
					    stage->ends[stage->oldest % ARRAY_LENGTH(stage->ends)],
					    error);
		if (ret)
			break;
		release_chunk(save, stage->oldest++);
	}
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
	if (save->stage.file)
		ring_writer_lend(save->stage.file, chunk->memory, SAVE_CHUNK_BYTES);
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

/* ---- For what uses the chunks longer ----------------------------------------------------------
 */

bool save_find_staged(const struct ioshape_save *save, const void *data, uint64_t *offset)
{
	const struct save_chunk *chunk = save->stage.reading;
	const uint8_t *at = data;

	if (!chunk || at < chunk->memory || at >= chunk->memory + SAVE_CHUNK_BYTES)
		return false;
	*offset = chunk->offset + (uint64_t)(at - chunk->memory);
	return true;
}

void save_keep_chunks(struct ioshape_save *save, const struct save_outlet *outlet)
{
	struct save_stage *stage = &save->stage;

	stage->outlet = outlet ? *outlet : (struct save_outlet){ .to = NULL };
	/* The rest is for the copying, where chunks go round. */
	stage->lag = outlet ? MIN(stage->admitted / 2, SAVE_MOST_LAG) : 0;
}

static uint64_t offset_in_file(void *file)
{
	return ring_writer_offset(file);
}

static int await_file(void *file, uint64_t offset, struct base_error *error)
{
	return ring_writer_settle(file, offset, error);
}

void save_stage_to_file(void *user, struct ring_writer *file)
{
	struct ioshape_save *save = user;
	const struct save_outlet outlet = { offset_in_file, await_file, file };

	/* With a single chunk nothing could be copied while it is written. */
	if (save->stage.admitted < 2)
		return;
	save->stage.file = file;
	save_keep_chunks(save, &outlet);
}
