/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public calls that save: blocking saves, and background saves from their beginning to their
 * end. A background save copies into staging memory, writes from there, and may copy some records
 * only after the call has returned.
 */
#define _GNU_SOURCE
#include "save/background.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Progress -------------------------------------------------------------------------------- */

static void record_progress(struct ioshape_save *save, enum ioshape_phase phase,
			    uint64_t done_bytes, uint64_t total_bytes)
{
	pthread_mutex_lock(&save->lock);
	/* If staging and writing go on at the same time, the progress is that of writing. */
	if (phase >= save->state.phase) {
		/* The phase DONE begins only when the whole save has ended, not just its file. */
		save->state.phase = MIN(phase, IOSHAPE_PHASE_COMMIT);
		save->state.done_bytes = done_bytes;
		save->state.total_bytes = total_bytes;
	}
	pthread_mutex_unlock(&save->lock);
}

int save_track(void *user, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes)
{
	struct ioshape_save *save = user;

	record_progress(save, phase, done_bytes, total_bytes);
	return save->request.progress ? save->request.progress(save->request.progress_user, phase,
							       done_bytes, total_bytes) :
					0;
}

bool save_is_stopped(const struct ioshape_save *save)
{
	return atomic_load_explicit(&save->abort, memory_order_relaxed);
}

/* ---- Copying into chunks --------------------------------------------------------------------- */

/* Below this size, starting threads costs more than it gains. */
#define PARALLEL_BYTES (32 * MIB)

/* The records that are copied. */
enum which { ALL_RECORDS, RECORDS_NOW, RECORDS_LATER };

/* Returns the record that contains byte `position` of the payload: the last one that begins there
 * or before. */
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

/* Copies bytes [at, end) of the payload, if they belong to records of this kind. */
static int fill_records(struct ioshape_save *save, uint64_t at, uint64_t end, uint8_t *memory,
			enum which which, struct base_error *error)
{
	const struct save_plan *plan = &save->request.plan;
	int ret = 0;

	for (size_t i = record_at(plan, at); !ret && i < plan->count; i++) {
		const struct save_record *record = &plan->records[i];
		const uint64_t from = MAX(record->start, at);
		const uint64_t to = MIN(record->start + record->bytes, end);

		if (record->start >= end)
			break;
		/* The record is empty, or ends before `at`. */
		if (to <= from ||
		    (which != ALL_RECORDS && record->later != (which == RECORDS_LATER)))
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

	return fill_records(save, at, end, memory, save->stage.later ? RECORDS_NOW : ALL_RECORDS,
			    error);
}

/* Returns whether the whole chunk will be copied after the call. */
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

/* Makes copying fail with this error, unless it has failed already. */
static void give_up_copying(struct ioshape_save *save, const struct base_error *error)
{
	pthread_mutex_lock(&save->lock);
	if (!save->stage.failure.code)
		save->stage.failure = *error;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
}

/* Returns whether chunks are left to be filled. The caller holds the lock. */
static bool is_filling(const struct save_stage *stage)
{
	return !stage->failure.code && !stage->written && stage->next_to_fill < stage->chunk_count;
}

/* Calls the progress callback with the progress of copying. -ECANCELED: the callback wants to
 * stop. */
static int stage_tell(void *user, struct base_error *error)
{
	struct ioshape_save *save = user;

	if (!save_track(save, IOSHAPE_PHASE_STAGE, atomic_load(&save->stage.copied_bytes),
			save->request.plan.payload_bytes))
		return 0;
	return base_fail_reason(error, -ECANCELED,
				"the save to \"%s\" was stopped by its progress callback",
				save->request.path);
}

/*
 * Waits for a free chunk, and claims the next position to fill. Returns false if no position is
 * left, or if the save has failed or ended.
 */
static bool claim_chunk(struct ioshape_save *save, bool speaks, size_t *position)
{
	struct save_stage *stage = &save->stage;
	struct base_error error = { 0 };
	bool claimed;

	pthread_mutex_lock(&save->lock);
	while (is_filling(stage) && stage->held == stage->admitted) {
		if (base_cond_wait_ms(&save->change, &save->lock, SAVE_POLL_MS) || !speaks)
			continue;
		pthread_mutex_unlock(&save->lock);
		if (stage_tell(save, &error))
			give_up_copying(save, &error);
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

/* Copies until nothing is left. Only the caller's own thread calls the progress callback
 * (`speaks`). */
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
			give_up_copying(save, &error);
			return;
		}
		ret = fill_chunk(save, position, chunk->memory, &error);
		/* Ask before the last chunk is published: the save may be over a moment later, when
		 * it is too late to stop it. */
		if (!ret && speaks)
			ret = stage_tell(save, &error);
		if (ret)
			give_up_copying(save, &error);
		publish_chunk(save, position, chunk);
	}
}

static void help_to_copy(void *save)
{
	copy_chunks(save, false);
}

/* Returns how many helpers are worth starting beside the thread that copies. */
static unsigned helpers_for(const struct ioshape_save *save)
{
	return save->request.plan.payload_bytes < PARALLEL_BYTES ?
		       0 :
		       save->context->config.threads - 1;
}

/* Copies the payload into chunks. Returns early if that fails, or if the writer ends. */
static void stage_copy(struct ioshape_save *save)
{
	struct base_crew crew;

	base_crew_init(&crew, 0);
	/* Only the calling thread may call the caller's functions. */
	if (!save->request.plan.fetches)
		base_crew_begin(&crew, helpers_for(save), help_to_copy, save);
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

/* Gives a chunk back: to the copying while that needs more chunks, and later to other saves. */
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

/* Gives back the chunks before `position`, except those that the outlet still needs. */
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

/* Returns staged bytes in order, and gives back the chunks before them. A save_source function. */
static int stage_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
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
		io_writer_borrow(save->stage.file, chunk->memory, SAVE_CHUNK_BYTES);
	*data = chunk->memory + at % SAVE_CHUNK_BYTES;
	*bytes = MIN(*bytes, SAVE_CHUNK_BYTES - at % SAVE_CHUNK_BYTES);
	return 0;
}

/* Gives back the remaining chunks and the rest of the promise, when copying and writing have
 * ended. */
static void stage_release(struct ioshape_save *save)
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

/* ---- Keeping chunks for their consumer ------------------------------------------------------- */

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
	/* If chunks are reused, the other half is for the copying. */
	stage->lag = outlet ? MIN(stage->admitted / 2, SAVE_MOST_LAG) : 0;
}

static uint64_t offset_in_file(void *file)
{
	return io_writer_offset(file);
}

static int await_file(void *file, uint64_t offset, struct base_error *error)
{
	return io_writer_wait_written(file, offset, error);
}

/* Declares the file that is written from the chunks. A save_source function. */
static void stage_to_file(void *user, struct io_writer *file)
{
	struct ioshape_save *save = user;
	const struct save_outlet outlet = { offset_in_file, await_file, file };

	/* If there is a single chunk, nothing could be copied while it is written. */
	if (save->stage.admitted < 2)
		return;
	save->stage.file = file;
	save_keep_chunks(save, &outlet);
}

/* ---- Copying after the call ------------------------------------------------------------------ */
/*
 * Some records may be copied after the call has returned, because the caller keeps them unchanged
 * until it waits for the copying. A thread of the lowest priority copies slice by slice, and rests
 * as long as it has copied. A thread that waits for the copying helps. Slices are small, so that it
 * does not wait long for a copying thread that the kernel does not schedule. If it takes
 * long, the save's own thread copies the rest: busy processors may never schedule the other one.
 */

#define SLICE_BYTES (256 * KIB)
#define NS_PER_MS 1000000
/* The time for copying in the background: longer than most steps, and than any copying but by a
 * thread that hardly runs. */
#define BACKGROUND_NS (10000ull * NS_PER_MS)
#define BACKGROUND_NS_PER_BYTE 10
#define BACKGROUND_CHECK_MS 1000
/* Limit of a rest. If a slice seems to have taken longer, the thread did not run all the time. */
#define LONGEST_REST_MS 10
/* Sample of each record. */
#define SAMPLE_PIECES 16
#define SAMPLE_PIECE_BYTES 64

/* ---- Detecting early changes ----------------------------------------------------------------- */

/* Continues the CRC-32 over staged bytes of the payload. */
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

/* Takes a sample of the records that will be copied later, so that compare() can detect a
 * change. */
static void later_look(struct ioshape_save *save)
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
		base_fail_reason_with(
			error, IOSHAPE_E_CHANGED, "change it only after the save has copied it",
			"cannot save \"%s\": record '%s' changed before ioshape had copied it",
			save->request.path, record->name);
		base_error_in_record(error, record->name);
		return IOSHAPE_E_CHANGED;
	}
	return 0;
}

/* ---- Copying in slices ----------------------------------------------------------------------- */

/* Returns the size of a slice. The caller's functions are called for a whole chunk, and by one
 * thread. */
static uint64_t slice_bytes(const struct ioshape_save *save)
{
	return save->request.plan.fetches ? SAVE_CHUNK_BYTES : SLICE_BYTES;
}

static uint64_t slice_count(const struct ioshape_save *save)
{
	const uint64_t bytes = save->request.plan.staged_bytes, slice = slice_bytes(save);

	return bytes / slice + (bytes % slice != 0);
}

/* Returns whether slices are left to be copied. The caller holds the lock. */
static bool is_left(struct ioshape_save *save)
{
	const struct save_stage *stage = &save->stage;

	return !stage->failure.code && !stage->written && !save_is_stopped(save) &&
	       stage->next_slice < slice_count(save);
}

/* Returns the chunk at `position`. One thread makes a missing chunk, and the other threads wait for
 * it. */
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
		ret = fill_records(save, at, end, chunk->memory + at % SAVE_CHUNK_BYTES,
				   RECORDS_LATER, &error);
	if (ret)
		give_up_copying(save, &error);
}

/* Copies the next slice. Returns false if none is left. */
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
	/* Also wake waiters if no slice was left, because the save may have been stopped. */
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

static void *copy_in_background(void *argument)
{
	uint64_t begin_ns, copied_ns = 0;

	/* If SCHED_IDLE is not allowed, the thread keeps its priority, but still rests. */
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

/* Waits until all slices are copied, and checks that the records did not change before. Then the
 * caller may change its memory, or the save fails. */
static int await_copied(struct ioshape_save *save, struct base_error *error)
{
	const uint64_t until_ns = base_now_ns() + BACKGROUND_NS +
				  save->request.plan.staged_bytes * BACKGROUND_NS_PER_BYTE;
	struct save_stage *stage = &save->stage;
	int ret;

	pthread_mutex_lock(&save->lock);
	while (is_left(save) && base_now_ns() < until_ns)
		base_cond_wait_ms(&save->change, &save->lock, BACKGROUND_CHECK_MS);
	pthread_mutex_unlock(&save->lock);
	while (copy_next(save))
		;
	pthread_mutex_lock(&save->lock);
	while (stage->copiers)
		pthread_cond_wait(&save->change, &save->lock);
	*error = stage->failure;
	ret = error->code;
	pthread_mutex_unlock(&save->lock);
	if (!ret && save_is_stopped(save))
		ret = base_fail_reason(error, -ECANCELED, "the save to \"%s\" was aborted",
				       save->request.path);
	if (!ret)
		ret = compare(save, error);
	pthread_mutex_lock(&save->lock);
	stage->copied = true;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	return ret;
}

/* Copies the records that were left for later, on the save's thread. Returns IOSHAPE_E_CHANGED, or
 * the failure of the copying. */
static int later_copy(struct ioshape_save *save, struct base_error *error)
{
	const struct save_request *request = &save->request;
	bool in_background;
	pthread_t thread;
	int ret;

	if (!save->stage.later)
		return 0;
	/* A function of the caller may take a lock that other threads need, so it is not called at
	 * the lowest priority. */
	in_background = !request->plan.fetches && !request->task.file_options.deadline_ns &&
			!base_start_thread(&thread, copy_in_background, save);
	while (!in_background && copy_next(save))
		;
	ret = await_copied(save, error);
	/* Join only now, because a thread of the lowest priority may not run again for a long
	 * time. */
	if (in_background)
		pthread_join(thread, NULL);
	return ret;
}

/* ---- Waiting for the copying ----------------------------------------------------------------- */

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

/* Makes the copying hurry, because the calling thread waits for it. It copies without rests, and
 * until until_ns the calling thread and others help. */
static void later_hurry(struct ioshape_save *save, uint64_t until_ns)
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
		/* Use as many threads as a save that copies during the call. The context exists
		 * until the copying ends. */
		if ((slice_count(save) - save->stage.next_slice) * slice_bytes(save) >=
		    PARALLEL_BYTES)
			wanted = save->context->config.threads - 1;
	}
	pthread_mutex_unlock(&save->lock);
	if (!copying || save->request.plan.fetches)
		return;
	base_crew_init(&crew, 0);
	base_crew_begin(&crew, wanted, give_help, &help);
	give_help(&help);
	base_crew_finish(&crew);
	base_crew_dismiss(&crew);
}

/* ---- Position in the queue ------------------------------------------------------------------- */

/* Records the position in the queue, and passes it on to the caller's callback. An
 * ioshape_queue_fn. */
static int track_place(void *user, const struct ioshape_place *place)
{
	struct ioshape_save *save = user;

	pthread_mutex_lock(&save->lock);
	save->state.place = *place;
	pthread_mutex_unlock(&save->lock);
	return save->request.queue ? save->request.queue(save->request.queue_user, place) : 0;
}

struct save_watch save_watch_of(struct ioshape_save *save)
{
	const struct save_request *request = &save->request;

	return (struct save_watch){
		.queue = track_place,
		.queue_user = save,
		.blocked = request->collective.blocks ? &request->caller : NULL,
	};
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* Returns the source of a save's bytes: staging memory, or the caller's memory. The caller ends
 * `direct`. */
static struct save_source source_of(struct ioshape_save *save, struct save_direct *direct)
{
	*direct = (struct save_direct){ .plan = &save->request.plan };
	if (!save->request.task.borrow)
		return (struct save_source){ stage_next, stage_to_file, save,
					     save_direct_parallel(direct, save->context) };
	return save_direct_source(direct, save->context);
}

int save_write_payload(struct ioshape_save *save, struct format_writer *zip, struct io_writer *file,
		       struct base_error *error)
{
	struct save_direct direct;
	const struct save_source source = source_of(save, &direct);
	int ret;

	if (file)
		save_source_to_file(&source, file);
	ret = save_write_records(zip, &save->request.plan, &source, &save->compare, error);
	save_direct_end(&direct);
	return ret;
}

static int write_file(struct ioshape_save *save, struct ioshape_report *report,
		      struct base_error *error)
{
	const struct save_request *request = &save->request;
	struct save_direct direct;
	const struct save_source source = source_of(save, &direct);
	const struct save_watch watch = save_watch_of(save);
	int ret;

	ret = later_copy(save, error);
	record_progress(save, IOSHAPE_PHASE_WAIT, 0, request->plan.expected_bytes);
	if (!ret)
		ret = save_write(save->context, NULL, &request->plan, &source,
				 &request->task.file_options, &watch, &save->order, report, error);
	save_direct_end(&direct);
	save_order_end(save->context, &save->order);
	return ret;
}

/* Runs a collective save. Shards that another process writes are compared with earlier saves here,
 * where their bytes are. */
static int run_collective(struct ioshape_save *save, struct ioshape_report *report,
			  struct base_error *error)
{
	const struct save_request *request = &save->request;
	const struct save_collective *collective = &request->collective;
	int ret;

	save->compare.context = save->context;
	save->compare.path = request->path;
	ret = collective->run(collective->user, save, &request->task, report, error);
	save_compare_end(&save->compare, !ret, report);
	return ret;
}

static void log_failure(const struct ioshape_save *save, int ret, const struct base_error *error)
{
	enum ioshape_log_level level = IOSHAPE_LOG_ERROR;

	/* The caller of a skipped save gets its code, and in Python a warning. */
	if (save_is_stopped(save) || ret == IOSHAPE_E_SKIPPED)
		level = IOSHAPE_LOG_INFO;
	base_log(&save->context->log, level, "%s", error->text);
}

/* Ends the copying if it still goes on. Otherwise the staging memory is free from here on. */
static void end_staging(struct ioshape_save *save)
{
	bool copying;

	pthread_mutex_lock(&save->lock);
	save->stage.written = true;
	copying = save->stage.copying;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	if (!copying)
		stage_release(save);
}

static void end(struct ioshape_save *save, int result, const struct ioshape_report *report,
		const struct base_error *error)
{
	struct save_state *state = &save->state;
	double stage_s, plan_s;

	pthread_mutex_lock(&save->lock);
	stage_s = state->report.stage_s;
	plan_s = state->report.plan_s;
	state->report = *report;
	state->report.stage_s = stage_s;
	state->report.plan_s += plan_s;
	save_report_end(&state->report, save->request.begin_ns,
			save->request.task.file_options.deadline_ns);
	state->result = result;
	state->error = *error;
	state->phase = IOSHAPE_PHASE_DONE;
	state->done = true;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
}

static void *run_save(void *argument)
{
	struct ioshape_save *save = argument;
	struct ioshape_report report = { .size = sizeof(report) };
	struct base_error error = { 0 };
	int ret;

	if (save->request.collective.run)
		ret = run_collective(save, &report, &error);
	else
		ret = write_file(save, &report, &error);
	/* A function of the caller returned this code. To a caller that waits it would mean that
	 * the save is still under way. */
	if (ret == -EINPROGRESS)
		ret = -EIO;
	base_error_about(&error, "save", save->request.path);
	if (ret)
		log_failure(save, ret, &error);
	/* Free the memory before callers learn of the end: their next save must find it free. */
	end_staging(save);
	end(save, ret, &report, &error);
	return NULL;
}

/* ---- Beginning ------------------------------------------------------------------------------- */

/* Frees a save that was joined and is in no list. */
static void save_free(struct ioshape_save *save)
{
	save_plan_free(&save->request.plan);
	free(save->request.path);
	free(save->stage.chunks);
	pthread_cond_destroy(&save->change);
	pthread_mutex_destroy(&save->lock);
	free(save);
}

static struct ioshape_save *new_save(struct ioshape_context *context,
				     const struct ioshape_save_options *options,
				     const struct save_collective *collective)
{
	struct ioshape_save *save = calloc(1, sizeof(*save));
	struct save_request *request;

	if (!save)
		return NULL;
	request = &save->request;
	request->owner = context->owner;
	request->progress = options->progress;
	request->progress_user = options->progress_user;
	request->queue = options->queue;
	request->queue_user = options->queue_user;
	request->caller = pthread_self();
	request->begin_ns = base_now_ns();
	if (collective)
		request->collective = *collective;
	request->task.borrow = options->borrow;
	request->task.file_options = SAVE_FILE_OPTIONS(options);
	request->task.file_options.umask_then = 1 + base_umask();
	request->task.file_options.progress = save_track;
	request->task.file_options.progress_user = save;
	request->task.file_options.abort = &save->abort;
	save->context = context;
	save->joined = true;
	save->stage.staging = request->collective.shared_memory ? &context->shared_pool :
								  &context->pool;
	save->state.report.size = sizeof(save->state.report);
	pthread_mutex_init(&save->lock, NULL);
	base_cond_init(&save->change);
	return save;
}

/* Takes over everything but the bytes of the payload: makes the path absolute and plans the
 * file. */
static int take_payload(struct ioshape_save *save, const char *path,
			const struct save_payload *payload, const struct ioshape_metadata *metadata,
			struct base_error *error)
{
	struct save_request *request = &save->request;
	struct save_stage *stage = &save->stage;
	int ret;

	/* The save's thread must not depend on the working directory, which the application may
	 * change. */
	ret = save_absolute_path(path, &request->path, error);
	if (!ret)
		ret = save_plan_make(&request->plan, request->path, payload, metadata,
				     save->context->examines, error);
	if (ret)
		return ret;
	save->state.report.plan_s = base_seconds(base_now_ns() - request->begin_ns);
	request->task.path = request->path;
	request->task.payload_bytes = request->plan.payload_bytes;
	request->task.expected_bytes = request->plan.expected_bytes;
	if (request->task.borrow) {
		record_progress(save, IOSHAPE_PHASE_WAIT, 0, request->plan.expected_bytes);
	} else {
		record_progress(save, IOSHAPE_PHASE_STAGE, 0, request->plan.payload_bytes);
		stage->chunk_count = save_chunks_for(request->plan.staged_bytes);
	}
	stage->chunks = calloc(MAX(stage->chunk_count, 1), sizeof(*stage->chunks));
	return stage->chunks ? 0 :
			       base_no_memory(error, "staging",
					      stage->chunk_count * sizeof(*stage->chunks));
}

static int make_save(struct ioshape_save **out, struct ioshape_context *context, const char *path,
		     const struct save_payload *payload, const struct ioshape_save_options *options,
		     const struct save_collective *collective, struct base_error *error)
{
	struct ioshape_save *save = new_save(context, options, collective);
	int ret;

	if (!save)
		return base_no_memory(error, "a save", sizeof(*save));
	ret = take_payload(save, path, payload, options->metadata, error);
	save->request.plan.tensor_name = options->tensor_name;
	save->request.plan.tensor_name_user = options->tensor_name_user;
	if (ret)
		save_free(save);
	else
		*out = save;
	return ret;
}

static int start_writing(struct ioshape_save *save, struct base_error *error)
{
	int ret = base_start_thread(&save->thread, run_save, save);

	if (ret)
		return base_fail(error, ret, "cannot save to \"%s\": no thread could be started",
				 save->request.path);
	save->joined = false;
	save->started = true;
	return 0;
}

/* Waits for the save's thread, if it was started. */
static void save_join(struct ioshape_save *save)
{
	if (!save->joined)
		pthread_join(save->thread, NULL);
	save->joined = true;
}

static int abandon(struct ioshape_save *save, int ret)
{
	atomic_store(&save->abort, true);
	if (!save->started && !save->request.collective.run)
		save_order_end(save->context, &save->order);
	save_join(save);
	stage_release(save);
	return ret;
}

/* Copies the payload and lets the save's thread do the rest. On failure, nothing but the save's own
 * memory is left to free. */
static int stage(struct ioshape_save *save, uint64_t begin_ns, struct base_error *error)
{
	struct save_stage *stage = &save->stage;
	bool all_at_once = stage->chunk_count <= stage->admitted, written;
	int ret;

	stage->copying = true;
	stage->later = all_at_once && save->request.plan.later && !save->request.collective.run;
	ret = stage_tell(save, error);
	if (!ret && !all_at_once)
		ret = start_writing(save, error);
	if (!ret)
		stage_copy(save);
	if (!ret)
		later_look(save);
	pthread_mutex_lock(&save->lock);
	/* The writer may have failed early and ended the copying. That failure is reported by the
	 * handle, not by this call. */
	if (stage->failure.code) {
		*error = stage->failure;
		ret = error->code;
	}
	save->state.report.stage_s = base_seconds(base_now_ns() - begin_ns);
	stage->copying = false;
	written = stage->written;
	pthread_mutex_unlock(&save->lock);
	if (!ret && all_at_once)
		ret = start_writing(save, error);
	if (ret)
		return abandon(save, ret);
	if (written)
		stage_release(save);
	return 0;
}

/* Begins a save: waits for staging memory, takes its place among the saves to its path, copies, and
 * starts the thread. */
static int begin(struct ioshape_save *save, struct base_error *error)
{
	struct ioshape_context *context = save->context;
	struct save_stage *staged = &save->stage;
	const bool borrow = save->request.task.borrow;
	uint64_t begin_ns = base_now_ns();
	int ret = 0;

	staged->admitted = MIN(staged->chunk_count, staged->staging->limit);
	if (!borrow)
		ret = save_staging_admit(staged->staging, staged->admitted, stage_tell, save,
					 error);
	if (ret)
		return ret;
	if (!save->request.collective.run)
		ret = save_order_begin(context, &save->order, save->request.path, error);
	if (ret) {
		save_staging_leave(staged->staging, staged->admitted);
		return ret;
	}
	if (!borrow)
		return stage(save, begin_ns, error);
	ret = start_writing(save, error);
	return ret ? abandon(save, ret) : 0;
}

int save_begin(struct ioshape_context *context, const char *path,
	       const struct save_payload *payload, const struct ioshape_save_options *options,
	       struct save_collective *collective, struct ioshape_save **out,
	       struct base_error *error)
{
	struct ioshape_save *save = NULL;
	int ret;

	ret = make_save(&save, context, path, payload, options, collective, error);
	if (!ret)
		ret = begin(save, error);
	if (collective)
		collective->started = save && save->started;
	if (ret) {
		if (save)
			save_free(save);
		return ret;
	}
	pthread_mutex_lock(&context->lock);
	TAILQ_INSERT_HEAD(&context->background, save, entry);
	pthread_mutex_unlock(&context->lock);
	*out = save;
	return 0;
}

/* ---- Calls on a handle ----------------------------------------------------------------------- */

/* Begins a call on a handle. In a child of fork() the save's thread does not exist, and its lock
 * may be held for ever. */
static int enter_handle(const struct ioshape_save *save, struct base_error *error)
{
	if (!save)
		return base_fail_reason(error, -EINVAL, "no save was given");
	if (save->request.owner != getpid())
		return base_fail_reason_with(error, -EPERM, "use it there",
					     "this save belongs to the parent process");
	return 0;
}

static int still_runs(struct base_error *error)
{
	return base_fail_reason_with(error, -EINPROGRESS, "wait longer",
				     "the save has not ended yet");
}

IOSHAPE_EXPORT int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms)
{
	bool for_ever = timeout_ms < 0, done;
	uint64_t begin_ns = base_now_ns();
	struct base_error error = { 0 };
	int64_t waited_ms;
	int ret = enter_handle(save, &error);

	if (ret)
		return base_return(ret, "save", NULL, &error);
	if (timeout_ms)
		later_hurry(save, for_ever ? UINT64_MAX : base_deadline_ns(timeout_ms));
	waited_ms = (int64_t)((base_now_ns() - begin_ns) / 1000000);
	pthread_mutex_lock(&save->lock);
	while (!save->state.done && (for_ever || waited_ms < timeout_ms)) {
		if (for_ever)
			pthread_cond_wait(&save->change, &save->lock);
		else
			base_cond_wait_ms(&save->change, &save->lock, timeout_ms - waited_ms);
		waited_ms = (int64_t)((base_now_ns() - begin_ns) / 1000000);
	}
	done = save->state.done;
	pthread_mutex_unlock(&save->lock);
	/* No thread changes a save that has ended, so no lock is needed. */
	ret = done ? save->state.result : still_runs(&error);
	return base_return(ret, "save", NULL, done ? &save->state.error : &error);
}

int save_wait_copied(struct ioshape_save *save)
{
	struct base_error error = { 0 };
	int ret = enter_handle(save, &error);
	bool later;

	if (ret)
		return base_return(ret, "save", NULL, &error);
	/* Borrowed memory is in use until the save ends. */
	later = save->stage.later || (save->request.task.borrow && save->request.plan.later);
	later_hurry(save, UINT64_MAX);
	pthread_mutex_lock(&save->lock);
	while (later && !save->stage.copied && !save->state.done)
		pthread_cond_wait(&save->change, &save->lock);
	pthread_mutex_unlock(&save->lock);
	return base_return(0, "save", NULL, &error);
}

IOSHAPE_EXPORT int ioshape_save_get_report(struct ioshape_save *save, struct ioshape_report *report)
{
	struct base_error error = { 0 };
	int ret = enter_handle(save, &error);

	if (!ret && !report)
		ret = base_fail_reason(&error, -EINVAL, "no pointer for the report was given");
	if (ret)
		return base_return(ret, "save", NULL, &error);
	pthread_mutex_lock(&save->lock);
	ret = save->state.done ?
		      base_give_struct(report, &save->state.report, sizeof(save->state.report),
				       "ioshape_report", &error) :
		      still_runs(&error);
	pthread_mutex_unlock(&save->lock);
	return base_return(ret, "save", NULL, &error);
}

IOSHAPE_EXPORT int ioshape_save_get_status(struct ioshape_save *save,
					   struct ioshape_save_status *status,
					   struct ioshape_place *place)
{
	struct ioshape_save_status now = { .size = sizeof(now) };
	struct ioshape_place here = { .size = sizeof(here) };
	struct base_error error = { 0 };
	int ret = enter_handle(save, &error);

	if (!ret && !status)
		ret = base_fail_reason(&error, -EINVAL, "no pointer for the status was given");
	if (ret)
		return base_return(ret, "save", NULL, &error);
	pthread_mutex_lock(&save->lock);
	now.phase = save->state.phase;
	/* Helper threads do not call record_progress(), so the counter is read directly. */
	now.done_bytes = now.phase == IOSHAPE_PHASE_STAGE ? atomic_load(&save->stage.copied_bytes) :
							    save->state.done_bytes;
	now.total_bytes = save->state.total_bytes;
	if (now.phase == IOSHAPE_PHASE_WAIT && save->state.place.size)
		here = save->state.place;
	pthread_mutex_unlock(&save->lock);
	ret = base_give_struct(status, &now, sizeof(now), "ioshape_save_status", &error);
	if (!ret && place)
		ret = base_give_struct(place, &here, sizeof(here), "ioshape_place", &error);
	return base_return(ret, "save", NULL, &error);
}

/* ---- Stopping and freeing -------------------------------------------------------------------- */

static void ask_to_stop(struct ioshape_save *save)
{
	struct ioshape_context *context = save->context;

	atomic_store(&save->abort, true);
	pthread_mutex_lock(&context->lock);
	save->order.abort_waits = true;
	pthread_cond_broadcast(&context->saves_change);
	pthread_mutex_unlock(&context->lock);
}

IOSHAPE_EXPORT int ioshape_save_cancel(struct ioshape_save *save)
{
	struct ioshape_save_status status = { .size = sizeof(status) };
	int ret = ioshape_save_get_status(save, &status, NULL);

	/* The context may have been freed, but only after the save has ended. */
	if (!ret && status.phase != IOSHAPE_PHASE_DONE)
		ask_to_stop(save);
	return ret;
}

static void end_save(struct ioshape_save *save)
{
	ask_to_stop(save);
	save_join(save);
	save->context = NULL;
}

static void forget(struct ioshape_context *context, struct ioshape_save *save)
{
	pthread_mutex_lock(&context->lock);
	TAILQ_REMOVE(&context->background, save, entry);
	pthread_mutex_unlock(&context->lock);
}

void save_end_background(struct ioshape_context *context)
{
	struct ioshape_save *save;

	while ((save = TAILQ_FIRST(&context->background))) {
		forget(context, save);
		end_save(save);
	}
}

void save_stop_background_of(struct ioshape_context *context, const void *owner)
{
	struct ioshape_save *save;

	pthread_mutex_lock(&context->lock);
	TAILQ_FOREACH(save, &context->background, entry)
	{
		if (save->request.collective.owner == owner)
			atomic_store(&save->abort, true);
	}
	pthread_mutex_unlock(&context->lock);
}

IOSHAPE_EXPORT void ioshape_save_free(struct ioshape_save *save)
{
	if (enter_handle(save, NULL))
		return;
	if (save->context) {
		forget(save->context, save);
		end_save(save);
	}
	save_free(save);
}

/* ---- Blocking saves -------------------------------------------------------------------------- */

static int save_blocking(struct ioshape_context *context, const char *path,
			 const struct save_payload *payload,
			 const struct ioshape_save_options *options, struct ioshape_report *report,
			 struct base_error *error)
{
	const struct io_file_options file_options = SAVE_FILE_OPTIONS(options);
	struct save_direct direct = { 0 };
	const struct save_source source = save_direct_source(&direct, context);
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .queue = options->queue,
					  .queue_user = options->queue_user,
					  .blocked = &self };
	uint64_t begin = base_now_ns();
	struct save_order order;
	struct save_plan plan;
	int ret;

	ret = save_plan_make(&plan, path, payload, options->metadata, context->examines, error);
	if (ret)
		return ret;
	report->plan_s = base_seconds(base_now_ns() - begin);
	plan.tensor_name = options->tensor_name;
	plan.tensor_name_user = options->tensor_name_user;
	direct.plan = &plan;
	ret = save_order_begin(context, &order, path, error);
	if (!ret) {
		ret = save_write(context, path, &plan, &source, &file_options, &watch, &order,
				 report, error);
		save_order_end(context, &order);
	}
	save_direct_end(&direct);
	save_plan_free(&plan);
	save_report_end(report, begin, file_options.deadline_ns);
	return ret;
}

static int save_here(struct ioshape_context *context, const char *path,
		     const struct save_payload *payload, const struct ioshape_save_options *options,
		     struct base_error *error)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT, ignored = IOSHAPE_REPORT_INIT;
	int ret = 0;

	/* Check now that the report can be delivered, not after the work is done. */
	if (options->report)
		ret = base_give_struct(options->report, &ignored, sizeof(ignored), "ioshape_report",
				       error);
	if (!ret)
		ret = save_blocking(context, path, payload, options, &report, error);
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&context->log, IOSHAPE_LOG_INFO, "%s", error->text);
	if (options->report)
		base_give_struct(options->report, &report, sizeof(report), "ioshape_report", error);
	return ret;
}

/* ---- The public calls ------------------------------------------------------------------------ */

int save_take_options(struct ioshape_save_options *options,
		      const struct ioshape_save_options *given, bool formats, bool background,
		      struct base_error *error)
{
	int ret =
		base_take_options(options, sizeof(*options), given, "ioshape_save_options", error);

	if (!ret && background && options->report)
		ret = base_fail_reason_with(error, -EINVAL,
					    "call ioshape_save_get_report() after it has ended",
					    "a background save cannot fill options.report");
	if (!ret && ((unsigned)options->format > IOSHAPE_FORMAT_SAFETENSORS ||
		     (options->format && !formats)))
		ret = base_fail_reason_with(
			error, -EINVAL,
			"use a value of enum ioshape_format, in ioshape_save_tensors() only",
			"options.format is %u", (unsigned)options->format);
	if (!ret && options->checksums &&
	    (options->checksums != IOSHAPE_CHECKSUMS_BESIDE ||
	     options->format != IOSHAPE_FORMAT_SAFETENSORS))
		ret = base_fail_reason_with(
			error, -EINVAL,
			"set it to IOSHAPE_CHECKSUMS_BESIDE, for safetensors files only",
			"options.checksums is %u", (unsigned)options->checksums);
	return ret;
}

/* Saves tensors or records: in the background if `out` is not NULL, otherwise during the call. */
static int save(struct ioshape_context *context, const char *path, struct save_payload *payload,
		const struct ioshape_save_options *given, struct ioshape_save **out)
{
	struct ioshape_save_options options;
	struct base_error error = { 0 };
	int ret;

	if (out)
		*out = NULL;
	ret = save_enter(context, &error);
	if (!ret)
		ret = save_take_options(&options, given, payload->kind == SAVE_TENSORS, out != NULL,
					&error);
	if (!ret && options.format == IOSHAPE_FORMAT_SAFETENSORS)
		payload->kind = SAVE_SAFETENSORS;
	payload->checksums = !ret && options.checksums == IOSHAPE_CHECKSUMS_BESIDE;
	if (!ret && !path)
		ret = base_fail_reason(&error, -EINVAL, "no path to save to was given");
	if (!ret && out)
		ret = save_begin(context, path, payload, &options, NULL, out, &error);
	else if (!ret)
		ret = save_here(context, path, payload, &options, &error);
	return base_return(ret, "save", path, &error);
}

IOSHAPE_EXPORT int ioshape_save_tensors(struct ioshape_context *context, const char *path,
					const struct ioshape_tensor *tensors, size_t count,
					const struct ioshape_save_options *options,
					struct ioshape_save **out)
{
	struct save_payload payload = { .tensors = tensors, .count = count };

	return save(context, path, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_save_records(struct ioshape_context *context, const char *path,
					const struct ioshape_record *records, size_t count,
					const struct ioshape_save_options *options,
					struct ioshape_save **out)
{
	struct save_payload payload = { .kind = SAVE_RECORDS, .records = records, .count = count };

	return save(context, path, &payload, options, out);
}

int save_records_lazily(struct ioshape_context *context, const char *path,
			const struct ioshape_record *records, const uint8_t *later, size_t count,
			const struct ioshape_save_options *options, struct ioshape_save **out)
{
	struct save_payload payload = {
		.kind = SAVE_RECORDS,
		.records = records,
		.later = later,
		.count = count,
	};

	return save(context, path, &payload, options, out);
}
