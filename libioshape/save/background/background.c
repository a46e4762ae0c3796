/* SPDX-License-Identifier: Apache-2.0 */
/* How a save in the background begins, and what its thread does. */
#include "save/background/background.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Writing --------------------------------------------------------------------------------- */

/* Where its bytes are: what it has staged, or what it borrows. direct->scratch is to be freed. */
static struct save_source source_of(struct ioshape_save *save, struct save_direct *direct)
{
	*direct = (struct save_direct){ .plan = &save->request.plan };
	return save->request.task.borrow ?
		       (struct save_source){ save_direct_next, save_direct_to_file, direct } :
		       (struct save_source){ save_stage_next, save_stage_to_file, save };
}

int save_write_payload(struct ioshape_save *save, struct zip_writer *zip, struct ring_writer *file,
		       struct base_error *error)
{
	struct save_direct direct;
	const struct save_source source = source_of(save, &direct);
	int ret;

	if (file)
		source.to_file(source.user, file);
	ret = save_write_records(zip, &save->request.plan, &source, &save->compare, error);
	free(direct.scratch);
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

	ret = save_later_copy(save, error);
	save_note_progress(save, IOSHAPE_PHASE_WAIT, 0, request->plan.expected_bytes);
	if (!ret)
		ret = save_write(save->context, request->path, &request->plan, &source,
				 &request->task.file_options, &watch, &save->order, report, error);
	free(direct.scratch);
	save_order_end(save->context, &save->order);
	return ret;
}

/* What the others save is compared where they are. */
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

	/* The caller of a skipped save is told by its code, and in Python by a warning. */
	if (save_is_stopped(save) || ret == IOSHAPE_E_SKIPPED)
		level = IOSHAPE_LOG_INFO;
	base_log(&save->context->log, level, "%s", error->text);
}

/* The copying ends, too, if it still goes on; otherwise the staging memory is free from here on. */
static void end_staging(struct ioshape_save *save)
{
	bool copying;

	pthread_mutex_lock(&save->lock);
	save->stage.written = true;
	copying = save->stage.copying;
	pthread_cond_broadcast(&save->change);
	pthread_mutex_unlock(&save->lock);
	if (!copying)
		save_stage_release(save);
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
			save->request.task.file_options.deadline_ns, result);
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
	/* A function of the caller's answered so. To a caller that waits it means "under way". */
	if (ret == -EINPROGRESS)
		ret = -EIO;
	base_error_about(&error, "save", save->request.path);
	if (ret)
		log_failure(save, ret, &error);
	/* Before callers hear of the end: the next save must find the memory free. */
	end_staging(save);
	end(save, ret, &report, &error);
	return NULL;
}

/* ---- Beginning ------------------------------------------------------------------------------- */

void save_free(struct ioshape_save *save)
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

/* Everything about the save but its bytes. */
static int take_payload(struct ioshape_save *save, const char *path,
			const struct save_payload *payload, const struct ioshape_metadata *metadata,
			struct base_error *error)
{
	struct save_request *request = &save->request;
	struct save_stage *stage = &save->stage;
	int ret;

	/* The thread must not depend on where the application changes its directory to. */
	ret = save_absolute_path(path, &request->path, error);
	if (!ret)
		ret = save_plan_make(&request->plan, request->path, payload, metadata, error);
	if (ret)
		return ret;
	save->state.report.plan_s = base_seconds(base_now_ns() - request->begin_ns);
	request->task.path = request->path;
	request->task.payload_bytes = request->plan.payload_bytes;
	request->task.expected_bytes = request->plan.expected_bytes;
	if (request->task.borrow) {
		save_note_progress(save, IOSHAPE_PHASE_WAIT, 0, request->plan.expected_bytes);
	} else {
		save_note_progress(save, IOSHAPE_PHASE_STAGE, 0, request->plan.payload_bytes);
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

void save_join(struct ioshape_save *save)
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
	save_stage_release(save);
	return ret;
}

/* Copies, and leaves the rest to the thread. On failure only the save's own memory is left of it.
 */
static int stage(struct ioshape_save *save, uint64_t begin_ns, struct base_error *error)
{
	struct save_stage *stage = &save->stage;
	bool all_at_once = stage->chunk_count <= stage->admitted, written;
	int ret;

	stage->copying = true;
	stage->later = all_at_once && save->request.plan.later && !save->request.collective.run;
	ret = save_stage_tell(save, error);
	if (!ret && !all_at_once)
		ret = start_writing(save, error);
	if (!ret)
		save_stage_copy(save);
	if (!ret)
		save_later_look(save);
	pthread_mutex_lock(&save->lock);
	/* A writer that failed early ends the copying, too; that failure belongs to the handle. */
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
		save_stage_release(save);
	return 0;
}

/* From here on the save has its place among those to its path. */
static int begin(struct ioshape_save *save, struct base_error *error)
{
	struct ioshape_context *context = save->context;
	struct save_stage *staged = &save->stage;
	const bool borrow = save->request.task.borrow;
	uint64_t begin_ns = base_now_ns();
	int ret = 0;

	staged->admitted = MIN(staged->chunk_count, staged->staging->limit);
	if (!borrow)
		ret = save_staging_admit(staged->staging, staged->admitted, save_stage_tell, save,
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
