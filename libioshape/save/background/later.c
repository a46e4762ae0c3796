/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying after the call has returned: of what stays as it is until its owner says otherwise. A
 * thread of the lowest priority copies slice by slice, and rests as long as it has copied. Whoever
 * waits copies, too; slices are small, so that nobody waits long for a thread that does not run.
 */
#define _GNU_SOURCE
#include "save/background/background.h"

#include <errno.h>
#include <sched.h>

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
		base_refuse(
			error, IOSHAPE_E_CHANGED,
			"cannot save \"%s\": record '%s' was to be copied later, and has changed "
			"before" BASE_REMEDY "wait until it is copied before it changes",
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

int save_wait_copied(struct ioshape_save *save)
{
	struct base_error error = { 0 };
	int ret = save_enter_handle(save, &error);
	bool later;

	if (ret)
		return base_leave(ret, "save", NULL, &error);
	/* What is borrowed is in use to the end. */
	later = save->stage.later || (save->request.task.borrow && save->request.plan.later);
	save_later_hurry(save, UINT64_MAX);
	pthread_mutex_lock(&save->lock);
	while (later && !save->stage.copied && !save->state.done)
		pthread_cond_wait(&save->change, &save->lock);
	pthread_mutex_unlock(&save->lock);
	return base_leave(0, "save", NULL, &error);
}
