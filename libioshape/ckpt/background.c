/* SPDX-License-Identifier: Apache-2.0 */
/* How a save in the background begins, and what its thread does. */
#include "ckpt/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- How far it is --------------------------------------------------------------------------- */

static void note_progress(struct ioshape_save *save, enum ioshape_phase phase, uint64_t done_bytes,
			  uint64_t total_bytes)
{
	pthread_mutex_lock(&save->lock);
	/* Where staging and writing go on at the same time, writing is what is left. Writing that
	 * has found no room waits again. */
	if (phase >= save->phase || phase == IOSHAPE_PHASE_WAIT) {
		/* The end is when everything has ended, not only the file. */
		save->phase = MIN(phase, IOSHAPE_PHASE_COMMIT);
		save->done_bytes = done_bytes;
		save->total_bytes = total_bytes;
	}
	pthread_mutex_unlock(&save->lock);
}

int ckpt_track(void *user, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes)
{
	struct ioshape_save *save = user;

	note_progress(save, phase, done_bytes, total_bytes);
	return save->progress ?
		       save->progress(save->progress_user, phase, done_bytes, total_bytes) :
		       0;
}

/* An ioshape_queue_fn: notes where it stands, and tells the caller's. */
static int track_place(void *user, const struct ioshape_place *place)
{
	struct ioshape_save *save = user;

	pthread_mutex_lock(&save->lock);
	save->place = *place;
	pthread_mutex_unlock(&save->lock);
	return save->queue ? save->queue(save->queue_user, place) : 0;
}

/* ---- Writing --------------------------------------------------------------------------------- */

struct ckpt_source ckpt_source_of(struct ioshape_save *save, struct ckpt_direct *direct)
{
	*direct = (struct ckpt_direct){ .plan = &save->plan };
	return save->borrow ?
		       (struct ckpt_source){ ckpt_direct_next, ckpt_direct_restart, direct } :
		       (struct ckpt_source){ ckpt_stage_next, ckpt_stage_restart, save };
}

struct ckpt_watch ckpt_watch_of(struct ioshape_save *save)
{
	return (struct ckpt_watch){ track_place, save, save->blocks ? &save->caller : NULL };
}

static int write_file(struct ioshape_save *save, struct ioshape_report *report,
		      struct base_error *error)
{
	struct ckpt_direct direct;
	const struct ckpt_source source = ckpt_source_of(save, &direct);
	const struct ckpt_watch watch = ckpt_watch_of(save);
	int ret;

	note_progress(save, IOSHAPE_PHASE_WAIT, 0, save->plan.expected_bytes);
	ret = ckpt_save(save->context, save->path, &save->plan, &source, &save->file_options,
			&watch, &save->turn, report, error);
	free(direct.scratch);
	return ret;
}

static void *run_save(void *argument)
{
	struct ioshape_save *save = argument;
	struct ioshape_report report = { .size = sizeof(report) };
	struct base_error error = { 0 };
	struct ioshape_group *group;
	bool copying;
	int ret;

	if (save->group)
		ret = ckpt_group_run(save, &report, &error);
	else
		ret = write_file(save, &report, &error);
	if (ret)
		base_log(&save->context->log,
			 atomic_load(&save->abort) ? IOSHAPE_LOG_INFO :
			 ret == IOSHAPE_E_SKIPPED  ? IOSHAPE_LOG_WARNING :
						     IOSHAPE_LOG_ERROR,
			 "%s", error.text);
	if (!save->group)
		ckpt_turn_end(save->context, &save->turn);
	pthread_mutex_lock(&save->lock);
	save->written = true;
	copying = save->copying;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	/* Before anybody is told: the next save must find the memory free. */
	if (!copying)
		ckpt_stage_release(save);
	pthread_mutex_lock(&save->lock);
	report.stage_s = save->report.stage_s;
	report.plan_s += save->report.plan_s;
	report.total_s = base_seconds(base_now_ns() - save->begin_ns);
	report.started_s = base_wall_seconds() - report.total_s;
	save->report = report;
	save->result = ret;
	save->error = error;
	save->phase = IOSHAPE_PHASE_DONE;
	save->done = true;
	pthread_cond_broadcast(&save->change);
	group = save->group;
	pthread_mutex_unlock(&save->lock);
	/* From here on the save may be gone. */
	if (group)
		ckpt_group_leave(group);
	return NULL;
}

/* ---- Beginning ------------------------------------------------------------------------------- */

void ckpt_free_save(struct ioshape_save *save)
{
	ckpt_plan_free(&save->plan);
	free(save->chunks);
	free(save->path);
	pthread_cond_destroy(&save->change);
	pthread_mutex_destroy(&save->lock);
	free(save);
}

static struct ioshape_save *new_save(struct ioshape_context *context,
				     const struct ioshape_save_options *options,
				     const struct ckpt_group_share *share)
{
	struct ioshape_save *save = calloc(1, sizeof(*save));

	if (!save)
		return NULL;
	save->owner = context->owner;
	save->context = context;
	save->joined = true;
	save->report.size = sizeof(save->report);
	save->borrow = options->borrow;
	save->progress = options->progress;
	save->progress_user = options->progress_user;
	save->queue = options->queue;
	save->queue_user = options->queue_user;
	save->file_options = ckpt_file_options(options);
	save->file_options.progress = ckpt_track;
	save->file_options.progress_user = save;
	save->file_options.abort = &save->abort;
	pthread_mutex_init(&save->lock, NULL);
	base_cond_init(&save->change);
	save->begin_ns = base_now_ns();
	save->staging = &context->pool;
	if (share) {
		save->group = share->group;
		save->step = share->step;
		save->round = share->round;
		save->blocks = share->blocks;
		save->caller = pthread_self();
		if (ckpt_group_shares_memory(share->group))
			save->staging = &context->shared_pool;
	}
	return save;
}

static int make_save(struct ioshape_save **out, struct ioshape_context *context, const char *path,
		     const struct ckpt_payload *payload, const struct ioshape_save_options *options,
		     const struct ckpt_group_share *share, struct base_error *error)
{
	struct ioshape_save *save = new_save(context, options, share);
	int ret;

	if (!save)
		return base_no_memory(error, "a save", sizeof(*save));
	/* The thread must not depend on where the application changes its directory to. */
	ret = ckpt_absolute_path(path, &save->path, error);
	if (!ret)
		ret = ckpt_plan_make(&save->plan, save->path, payload, options->metadata, error);
	if (ret)
		goto fail;
	save->report.plan_s = base_seconds(base_now_ns() - save->begin_ns);
	if (save->borrow) {
		note_progress(save, IOSHAPE_PHASE_WAIT, 0, save->plan.expected_bytes);
	} else {
		note_progress(save, IOSHAPE_PHASE_STAGE, 0, save->plan.payload_bytes);
		save->chunk_count = ckpt_chunks_for(save->plan.payload_bytes);
	}
	save->chunks = calloc(MAX(save->chunk_count, 1), sizeof(struct ckpt_chunk *));
	if (!save->chunks) {
		ret = base_no_memory(error, "staging", save->chunk_count * sizeof(*save->chunks));
		goto fail;
	}
	*out = save;
	return 0;
fail:
	ckpt_free_save(save);
	return ret;
}

static int start_writing(struct ioshape_save *save, struct base_error *error)
{
	int ret = base_start_thread(&save->thread, run_save, save);

	if (ret)
		return base_fail(error, ret, "cannot save to %s: no thread could be started",
				 save->path);
	save->joined = false;
	save->started = true;
	return 0;
}

void ckpt_join(struct ioshape_save *save)
{
	if (!save->joined)
		pthread_join(save->thread, NULL);
	save->joined = true;
}

static int abandon(struct ioshape_save *save, int ret)
{
	atomic_store(&save->abort, true);
	if (save->joined && !save->group)
		ckpt_turn_end(save->context, &save->turn);
	ckpt_join(save);
	ckpt_stage_release(save);
	return ret;
}

/* Copies, and leaves the rest to the thread. On failure only the save's own memory is left of it.
 */
static int stage(struct ioshape_save *save, uint64_t begin_ns, struct base_error *error)
{
	bool all_at_once = save->chunk_count <= save->admitted, written;
	int ret;

	save->copying = true;
	ret = ckpt_stage_tell(save, error);
	if (!ret && !all_at_once)
		ret = start_writing(save, error);
	if (!ret)
		ckpt_stage_copy(save);
	pthread_mutex_lock(&save->lock);
	/* A writer that failed early ends the copying, too; that failure belongs to the handle. */
	if (save->failed) {
		*error = save->error;
		ret = error->code;
	}
	save->report.stage_s = base_seconds(base_now_ns() - begin_ns);
	save->copying = false;
	written = save->written;
	pthread_mutex_unlock(&save->lock);
	if (!ret && all_at_once)
		ret = start_writing(save, error);
	if (ret)
		return abandon(save, ret);
	if (written)
		ckpt_stage_release(save);
	return 0;
}

/* The save has its turn from here on. */
static int begin(struct ioshape_save *save, struct base_error *error)
{
	struct ioshape_context *context = save->context;
	uint64_t begin_ns = base_now_ns();
	int ret;

	save->admitted = MIN(save->chunk_count, save->staging->limit);
	/* So that what finds no room in the middle can be written from its beginning again. */
	if (context->full == IOSHAPE_FULL_WAIT && !save->group &&
	    save->admitted == save->chunk_count)
		save->lag = save->chunk_count;
	if (!save->borrow) {
		ret = ckpt_pool_admit(save->staging, save->admitted,
				      context->staging_full == IOSHAPE_STAGING_REFUSE,
				      ckpt_stage_tell, save, error);
		if (ret)
			return ret;
	}
	ret = save->group ? 0 : ckpt_turn_begin(context, &save->turn, save->path, error);
	if (ret) {
		ckpt_pool_leave(save->staging, save->admitted);
		return ret;
	}
	if (!save->borrow)
		return stage(save, begin_ns, error);
	ret = start_writing(save, error);
	return ret ? abandon(save, ret) : 0;
}

int ckpt_begin_save(struct ioshape_context *context, const char *path,
		    const struct ckpt_payload *payload, const struct ioshape_save_options *options,
		    const struct ckpt_group_share *share, struct ioshape_save **out,
		    struct base_error *error)
{
	struct ioshape_save *save = NULL;
	bool started;
	int ret;

	ret = make_save(&save, context, path, payload, options, share, error);
	if (ret) {
		if (share)
			ckpt_group_give_up(share, error, NULL);
		return ret;
	}
	if (share)
		ckpt_group_enter(share->group);
	ret = begin(save, error);
	if (ret) {
		/* Its thread, if there was one, has told the others itself. */
		started = save->started;
		ckpt_free_save(save);
		if (share && !started) {
			ckpt_group_leave(share->group);
			ckpt_group_give_up(share, error, NULL);
		}
		return ret;
	}
	pthread_mutex_lock(&context->lock);
	save->next = context->background;
	context->background = save;
	pthread_mutex_unlock(&context->lock);
	*out = save;
	return 0;
}

static int begin_in_background(struct ioshape_context *context, const char *path,
			       const struct ckpt_payload *payload,
			       const struct ioshape_save_options *given, struct ioshape_save **out)
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
		ret = ckpt_begin_save(context, path, payload, &options, NULL, out, &error);
	return ckpt_leave(context, ret, &error);
}

IOSHAPE_EXPORT int ioshape_save_tensors_async(struct ioshape_context *context, const char *path,
					      const struct ioshape_tensor *tensors, size_t count,
					      const struct ioshape_save_options *options,
					      struct ioshape_save **out)
{
	const struct ckpt_payload payload = { .tensors = tensors, .count = count };

	return begin_in_background(context, path, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_save_records_async(struct ioshape_context *context, const char *path,
					      const struct ioshape_record *records, size_t count,
					      const struct ioshape_save_options *options,
					      struct ioshape_save **out)
{
	const struct ckpt_payload payload = { .raw = true, .records = records, .count = count };

	return begin_in_background(context, path, &payload, options, out);
}
