/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging memory: chunks that are made and kept, how a save copies into them and writes from them,
 * and what it copies after the call.
 */
#define _GNU_SOURCE
#include "save/background.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- The memory ------------------------------------------------------------------------------ */

void save_staging_init(struct save_staging *pool, uint64_t limit_bytes, bool shared)
{
	*pool = (struct save_staging){
		.limit = MAX(1, limit_bytes / SAVE_CHUNK_BYTES),
		.shared = shared,
		.fd = -1,
	};
	TAILQ_INIT(&pool->waiters);
	pthread_mutex_init(&pool->lock, NULL);
	base_cond_init(&pool->change);
}

/* ---- Shared chunks --------------------------------------------------------------------------- */

static int fail_shared(struct base_error *error, int code)
{
	switch (code) {
	case -EMFILE:
	case -ENFILE:
		return base_fail_with(
			error, code, "raise ulimit -n",
			"cannot make shared memory to stage in: no file descriptor is "
			"free");
	case -EFBIG:
		return base_fail_with(
			error, code, "raise ulimit -f",
			"cannot make shared memory to stage in larger than the limit of "
			"file sizes");
	case -ENOMEM:
		return base_fail_with(error, code,
				      "allow the container more memory, or lower staging_bytes",
				      "there are no %llu MiB of shared memory left to stage in",
				      (unsigned long long)(SAVE_CHUNK_BYTES / MIB));
	default:
		return base_fail_with(error, code, "allow it, or use mode \"each\"",
				      "cannot make shared memory (memfd_create) to stage in");
	}
}

/* Under the lock. */
static int need_fd(struct save_staging *pool)
{
	int fd;

	if (pool->fd >= 0)
		return 0;
	fd = base_shared_open();
	if (fd < 0)
		return fd;
	pool->fd = fd;
	return 0;
}

/* An unused part of the fd, which grows at need. Under the lock. */
static int take_range(struct save_staging *pool, struct save_chunk *chunk)
{
	struct save_chunk *range = pool->ranges;
	int ret = need_fd(pool);

	if (ret)
		return ret;
	if (range) {
		pool->ranges = range->next;
		chunk->offset = range->offset;
		free(range);
		return 0;
	}
	ret = base_shared_grow(pool->fd, pool->fd_bytes + SAVE_CHUNK_BYTES);
	if (ret)
		return ret;
	chunk->offset = pool->fd_bytes;
	pool->fd_bytes += SAVE_CHUNK_BYTES;
	return 0;
}

static void keep_range(struct save_staging *pool, struct save_chunk *chunk)
{
	pthread_mutex_lock(&pool->lock);
	chunk->next = pool->ranges;
	pool->ranges = chunk;
	pthread_mutex_unlock(&pool->lock);
}

static int map_shared(struct save_staging *pool, struct save_chunk **chunk,
		      struct base_error *error)
{
	void *memory;
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = take_range(pool, *chunk);
	pthread_mutex_unlock(&pool->lock);
	if (ret)
		return fail_shared(error, ret);
	ret = base_shared_map(pool->fd, (*chunk)->offset, SAVE_CHUNK_BYTES, &memory);
	if (ret) {
		keep_range(pool, *chunk);
		*chunk = NULL;
		return fail_shared(error, ret);
	}
	(*chunk)->memory = memory;
	return 0;
}

/* ---- Chunks ---------------------------------------------------------------------------------- */

static void free_chunk(struct save_staging *pool, struct save_chunk *chunk)
{
	base_unmap(chunk->memory, SAVE_CHUNK_BYTES);
	chunk->memory = NULL;
	if (!pool->shared) {
		free(chunk);
		return;
	}
	base_shared_drop(pool->fd, chunk->offset, SAVE_CHUNK_BYTES);
	keep_range(pool, chunk);
}

static int make_chunk(struct save_staging *pool, struct save_chunk **out, struct base_error *error)
{
	struct save_chunk *chunk = calloc(1, sizeof(*chunk));
	int ret = 0;

	if (!chunk)
		return base_no_memory(error, "staging", sizeof(*chunk));
	if (pool->shared) {
		ret = map_shared(pool, &chunk, error);
	} else {
		chunk->memory = base_map(SAVE_CHUNK_BYTES);
		if (!chunk->memory)
			ret = base_no_memory(error, "staging", SAVE_CHUNK_BYTES);
	}
	if (ret) {
		free(chunk);
		return ret;
	}
	/* To touch it takes longer than the copy, and several threads can make chunks. */
	if (!pool->shared)
		base_prefault(chunk->memory, SAVE_CHUNK_BYTES);
	*out = chunk;
	return 0;
}

/* One more, which pool->made already counts. */
static int make_counted_chunk(struct save_staging *pool, struct save_chunk **chunk,
			      struct base_error *error)
{
	int ret = make_chunk(pool, chunk, error);

	if (!ret)
		return 0;
	pthread_mutex_lock(&pool->lock);
	pool->made--;
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

void save_staging_destroy(struct save_staging *pool)
{
	struct save_chunk *range, *next;

	save_staging_trim(pool);
	for (range = pool->ranges; range; range = next) {
		next = range->next;
		free(range);
	}
	if (pool->fd >= 0)
		base_close(pool->fd);
	pthread_cond_destroy(&pool->change);
	pthread_mutex_destroy(&pool->lock);
}

/* ---- Admission ------------------------------------------------------------------------------- */

/* A save that waits for staging memory; first come, first served. */
struct save_waiter {
	TAILQ_ENTRY(save_waiter) entry;
};

int save_staging_admit(struct save_staging *pool, size_t chunks,
		       int (*go_on)(void *user, struct base_error *error), void *user,
		       struct base_error *error)
{
	struct save_waiter waiter;
	int ret = 0;

	pthread_mutex_lock(&pool->lock);
	/* A queue: without one small saves would overtake a large one for ever. */
	TAILQ_INSERT_TAIL(&pool->waiters, &waiter, entry);
	while (!ret &&
	       (TAILQ_FIRST(&pool->waiters) != &waiter || pool->admitted + chunks > pool->limit)) {
		if (base_cond_wait_ms(&pool->change, &pool->lock, SAVE_PATIENCE_MS))
			continue;
		pthread_mutex_unlock(&pool->lock);
		ret = go_on(user, error);
		pthread_mutex_lock(&pool->lock);
	}
	TAILQ_REMOVE(&pool->waiters, &waiter, entry);
	pthread_cond_broadcast(&pool->change);
	if (!ret)
		pool->admitted += chunks;
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

void save_staging_leave(struct save_staging *pool, size_t chunks)
{
	pthread_mutex_lock(&pool->lock);
	pool->admitted -= chunks;
	pthread_cond_broadcast(&pool->change);
	pthread_mutex_unlock(&pool->lock);
}

int save_staging_get(struct save_staging *pool, struct save_chunk **chunk, struct base_error *error)
{
	pthread_mutex_lock(&pool->lock);
	*chunk = pool->free;
	if (*chunk)
		pool->free = (*chunk)->next;
	else
		pool->made++;
	pthread_mutex_unlock(&pool->lock);
	return *chunk ? 0 : make_counted_chunk(pool, chunk, error);
}

void save_staging_put(struct save_staging *pool, struct save_chunk *chunk)
{
	pthread_mutex_lock(&pool->lock);
	chunk->next = pool->free;
	pool->free = chunk;
	pthread_mutex_unlock(&pool->lock);
}

int save_staging_reserve(struct save_staging *pool, size_t chunks, struct base_error *error)
{
	struct save_chunk *chunk;
	bool enough;
	int ret;

	if (chunks > pool->limit) {
		ret = base_refuse_with(
			error, -ENOMEM,
			BASE_WORDS("staging_bytes allows %llu",
				   (unsigned long long)(pool->limit * SAVE_CHUNK_BYTES / MIB)),
			"cannot reserve %llu MiB of staging memory",
			(unsigned long long)(chunks * SAVE_CHUNK_BYTES / MIB));
		base_error_space(error, chunks * SAVE_CHUNK_BYTES, pool->limit * SAVE_CHUNK_BYTES);
		return ret;
	}
	for (;;) {
		pthread_mutex_lock(&pool->lock);
		enough = pool->made >= chunks;
		pool->made += !enough;
		pthread_mutex_unlock(&pool->lock);
		if (enough)
			return 0;
		ret = make_counted_chunk(pool, &chunk, error);
		if (ret)
			return ret;
		save_staging_put(pool, chunk);
	}
}

void save_staging_trim(struct save_staging *pool)
{
	struct save_chunk *chunk, *next;

	pthread_mutex_lock(&pool->lock);
	chunk = pool->free;
	pool->free = NULL;
	for (next = chunk; next; next = next->next)
		pool->made--;
	pthread_mutex_unlock(&pool->lock);
	for (; chunk; chunk = next) {
		next = chunk->next;
		free_chunk(pool, chunk);
	}
}

/* ---- For another process that writes --------------------------------------------------------- */

int save_shared_fd(struct ioshape_context *context, int *fd, struct base_error *error)
{
	struct save_staging *pool = &context->shared_pool;
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = need_fd(pool);
	*fd = pool->fd;
	pthread_mutex_unlock(&pool->lock);
	return ret ? fail_shared(error, ret) : 0;
}

int save_shared_get(struct ioshape_context *context, struct save_chunk **chunk,
		    struct base_error *error)
{
	return save_staging_get(&context->shared_pool, chunk, error);
}

void save_shared_put(struct ioshape_context *context, struct save_chunk *chunk)
{
	save_staging_put(&context->shared_pool, chunk);
}

/* ---- What the save tells --------------------------------------------------------------------- */

void save_note_progress(struct ioshape_save *save, enum ioshape_phase phase, uint64_t done_bytes,
			uint64_t total_bytes)
{
	pthread_mutex_lock(&save->lock);
	/* Where staging and writing go on at the same time, writing is what is told. */
	if (phase >= save->state.phase) {
		/* The end is when everything has ended, not only the file. */
		save->state.phase = MIN(phase, IOSHAPE_PHASE_COMMIT);
		save->state.done_bytes = done_bytes;
		save->state.total_bytes = total_bytes;
	}
	pthread_mutex_unlock(&save->lock);
}

int save_track(void *user, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes)
{
	struct ioshape_save *save = user;

	save_note_progress(save, phase, done_bytes, total_bytes);
	return save->request.progress ? save->request.progress(save->request.progress_user, phase,
							       done_bytes, total_bytes) :
					0;
}

bool save_is_stopped(const struct ioshape_save *save)
{
	return atomic_load_explicit(&save->abort, memory_order_relaxed);
}

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

/* Copies bytes [at, end) of the payload, as far as they are of such records. */
static int save_stage_fill(struct ioshape_save *save, uint64_t at, uint64_t end, uint8_t *memory,
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

/* Copying fails with this, unless it has failed already. */
static void save_stage_give_up(struct ioshape_save *save, const struct base_error *error)
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

/*
 * Has the chunks made, by helpers, that one thread will fill: it alone calls functions of the
 * caller's, and new memory costs more than the copy to it.
 */
static void save_stage_make_chunks(struct ioshape_save *save, struct base_crew *crew)
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
		io_writer_lend(save->stage.file, chunk->memory, SAVE_CHUNK_BYTES);
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
	return io_writer_offset(file);
}

static int await_file(void *file, uint64_t offset, struct base_error *error)
{
	return io_writer_settle(file, offset, error);
}

void save_stage_to_file(void *user, struct io_writer *file)
{
	struct ioshape_save *save = user;
	const struct save_outlet outlet = { offset_in_file, await_file, file };

	/* With a single chunk nothing could be copied while it is written. */
	if (save->stage.admitted < 2)
		return;
	save->stage.file = file;
	save_keep_chunks(save, &outlet);
}

/* ---- Copying after the call ------------------------------------------------------------------ */
/*
 * Copying after the call has returned: of what stays as it is until its owner says otherwise. A
 * thread of the lowest priority copies slice by slice, and rests as long as it has copied. Whoever
 * waits copies, too; slices are small, so that nobody waits long for a thread that does not run.
 */

#define SLICE_BYTES (256 * KIB)
#define NS_PER_MS 1000000
/* What seems to have copied for longer has not run all the time. */
#define LONGEST_REST_MS 10
/* What is looked at of each record. */
#define SAMPLE_PIECES 16
#define SAMPLE_PIECE_BYTES 64

/* ---- Whether it has changed ------------------------------------------------------------------ */

/* Of bytes of the payload, which are staged. */
static uint32_t crc32_of_staged(const struct save_stage *stage, uint32_t crc, uint64_t at,
				uint64_t bytes)
{
	uint64_t within, count;

	for (; bytes; at += count, bytes -= count) {
		within = at % SAVE_CHUNK_BYTES;
		count = MIN(bytes, SAVE_CHUNK_BYTES - within);
		crc = base_crc32(crc, stage->chunks[at / SAVE_CHUNK_BYTES]->memory + within, count);
	}
	return crc;
}

static uint32_t look_at(const struct ioshape_save *save, const struct save_record *record,
			bool staged)
{
	const uint64_t piece = MIN(record->bytes, SAMPLE_PIECE_BYTES);
	const uint64_t step = (record->bytes - piece) / (SAMPLE_PIECES - 1);
	uint32_t crc = 0;

	for (uint64_t i = 0; i < SAMPLE_PIECES; i++) {
		if (staged)
			crc = crc32_of_staged(&save->stage, crc, record->start + i * step, piece);
		else
			crc = base_crc32(crc, (const char *)record->data + i * step, piece);
	}
	return crc;
}

void save_later_look(struct ioshape_save *save)
{
	struct save_plan *plan = &save->request.plan;

	for (size_t i = plan->own; save->stage.later && i < plan->count; i++)
		if (plan->records[i].later && !plan->records[i].fetch)
			plan->records[i].sample = look_at(save, &plan->records[i], false);
}

static int compare(struct ioshape_save *save, struct base_error *error)
{
	const struct save_plan *plan = &save->request.plan;

	for (size_t i = plan->own; i < plan->count; i++) {
		const struct save_record *record = &plan->records[i];

		if (!record->later || record->fetch ||
		    look_at(save, record, true) == record->sample)
			continue;
		base_refuse_with(
			error, IOSHAPE_E_CHANGED, "wait until it is copied before it changes",
			"cannot save \"%s\": record '%s' was to be copied later, and has changed "
			"before",
			save->request.path, record->name);
		base_error_in_record(error, record->name);
		return IOSHAPE_E_CHANGED;
	}
	return 0;
}

/* ---- Copying --------------------------------------------------------------------------------- */

/* A function of the caller's is called for much at a time, and by one thread. */
static uint64_t slice_bytes(const struct ioshape_save *save)
{
	return save->request.plan.fetches ? SAVE_CHUNK_BYTES : SLICE_BYTES;
}

static uint64_t slice_count(const struct ioshape_save *save)
{
	const uint64_t bytes = save->request.plan.staged_bytes, slice = slice_bytes(save);

	return bytes / slice + (bytes % slice != 0);
}

/* Slices are left to be copied, and somebody wants them. Under the lock. */
static bool is_left(struct ioshape_save *save)
{
	const struct save_stage *stage = &save->stage;

	return !stage->failure.code && !stage->written && !save_is_stopped(save) &&
	       stage->next_slice < slice_count(save);
}

/* The chunk at `position`, made if there is none yet: by one thread, the others wait for it. */
static int chunk_at(struct ioshape_save *save, size_t position, struct save_chunk **chunk,
		    struct base_error *error)
{
	struct save_stage *stage = &save->stage;
	int ret = 0;

	pthread_mutex_lock(&save->lock);
	while (!(*chunk = stage->chunks[position]) && stage->making)
		pthread_cond_wait(&save->change, &save->lock);
	if (!*chunk) {
		stage->making = true;
		pthread_mutex_unlock(&save->lock);
		ret = save_staging_get(stage->staging, chunk, error);
		pthread_mutex_lock(&save->lock);
		stage->chunks[position] = ret ? NULL : *chunk;
		stage->making = false;
		pthread_cond_broadcast(&save->change);
	}
	pthread_mutex_unlock(&save->lock);
	return ret;
}

static void copy_slice(struct ioshape_save *save, uint64_t slice)
{
	const uint64_t at = slice * slice_bytes(save);
	const uint64_t end = MIN(at + slice_bytes(save), save->request.plan.staged_bytes);
	struct base_error error = { 0 };
	struct save_chunk *chunk;
	int ret;

	ret = chunk_at(save, at / SAVE_CHUNK_BYTES, &chunk, &error);
	if (!ret)
		ret = save_stage_fill(save, at, end, chunk->memory + at % SAVE_CHUNK_BYTES,
				      SAVE_LATER, &error);
	if (ret)
		save_stage_give_up(save, &error);
}

/* False if there is none. */
static bool copy_next(struct ioshape_save *save)
{
	struct save_stage *stage = &save->stage;
	uint64_t slice = 0;
	bool claimed;

	pthread_mutex_lock(&save->lock);
	claimed = is_left(save);
	if (claimed) {
		slice = stage->next_slice++;
		stage->copiers++;
	}
	pthread_mutex_unlock(&save->lock);
	if (claimed)
		copy_slice(save, slice);
	pthread_mutex_lock(&save->lock);
	stage->copiers -= claimed;
	/* Also if none was left: the save may have been stopped. */
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	return claimed;
}

static void rest(struct ioshape_save *save, int64_t ms)
{
	pthread_mutex_lock(&save->lock);
	if (!save->stage.hurry)
		base_cond_wait_ms(&save->change, &save->lock, MIN(ms, LONGEST_REST_MS));
	pthread_mutex_unlock(&save->lock);
}

static void *copy_at_leisure(void *argument)
{
	uint64_t begin_ns, copied_ns = 0;

	/* Where this is not allowed it goes on as it is: it rests all the same. */
	pthread_setschedparam(pthread_self(), SCHED_IDLE, &(struct sched_param){ 0 });
	for (begin_ns = base_now_ns(); copy_next(argument); begin_ns = base_now_ns()) {
		copied_ns += base_now_ns() - begin_ns;
		if (copied_ns < NS_PER_MS)
			continue;
		rest(argument, (int64_t)(copied_ns / NS_PER_MS));
		copied_ns = 0;
	}
	return NULL;
}

/* Its memory may change when this has returned, or the save is to fail. */
static int await_copied(struct ioshape_save *save, struct base_error *error)
{
	struct save_stage *stage = &save->stage;
	int ret;

	pthread_mutex_lock(&save->lock);
	while (stage->copiers || is_left(save))
		pthread_cond_wait(&save->change, &save->lock);
	*error = stage->failure;
	ret = error->code;
	pthread_mutex_unlock(&save->lock);
	if (!ret && save_is_stopped(save))
		ret = base_refuse(error, -ECANCELED, "the save to \"%s\" was aborted",
				  save->request.path);
	if (!ret)
		ret = compare(save, error);
	pthread_mutex_lock(&save->lock);
	stage->copied = true;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	return ret;
}

int save_later_copy(struct ioshape_save *save, struct base_error *error)
{
	const struct save_request *request = &save->request;
	struct base_crew crew;
	bool at_leisure;
	pthread_t thread;
	int ret;

	if (!save->stage.later)
		return 0;
	/* A function of the caller's may take a lock that others wait for. */
	at_leisure = !request->plan.fetches && !request->task.file_options.deadline_ns &&
		     !base_start_thread(&thread, copy_at_leisure, save);
	base_crew_init(&crew);
	if (request->plan.fetches)
		save_stage_make_chunks(save, &crew);
	while (!at_leisure && copy_next(save))
		;
	base_crew_finish(&crew);
	base_crew_dismiss(&crew);
	ret = await_copied(save, error);
	/* Only now: it may be long until a thread of the lowest priority runs once more. */
	if (at_leisure)
		pthread_join(thread, NULL);
	return ret;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

struct help {
	struct ioshape_save *save;
	uint64_t until_ns;
};

static void give_help(void *user)
{
	const struct help *help = user;

	while (base_now_ns() < help->until_ns && copy_next(help->save))
		;
}

void save_later_hurry(struct ioshape_save *save, uint64_t until_ns)
{
	struct help help = { save, until_ns };
	struct base_crew crew;
	unsigned wanted = 0;
	bool copying;

	pthread_mutex_lock(&save->lock);
	copying = save->stage.later && !save->stage.copied && !save->state.done;
	if (copying) {
		save->stage.hurry = true;
		pthread_cond_broadcast(&save->change);
		/* As many as a save in the call would take. Its context exists until it ends. */
		if ((slice_count(save) - save->stage.next_slice) * slice_bytes(save) >=
		    SAVE_PARALLEL_BYTES)
			wanted = save->context->config.threads - 1;
	}
	pthread_mutex_unlock(&save->lock);
	if (!copying || save->request.plan.fetches)
		return;
	base_crew_init(&crew);
	base_crew_begin(&crew, wanted, give_help, &help);
	give_help(&help);
	base_crew_finish(&crew);
	base_crew_dismiss(&crew);
}
