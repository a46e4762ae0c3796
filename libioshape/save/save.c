/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public calls that save: saves that block; saves in the background, how one begins, what its
 * thread does, what its handle tells, its end.
 */
#include "save/background.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- What is told while it waits --------------------------------------------------------------
 */

/* An ioshape_queue_fn: notes where it stands, and tells the caller's. */
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

/* Where its bytes are: what it has staged, or what it borrows. direct->scratch is to be freed. */
static struct save_source source_of(struct ioshape_save *save, struct save_direct *direct)
{
	*direct = (struct save_direct){ .plan = &save->request.plan };
	return save->request.task.borrow ?
		       (struct save_source){ save_direct_next, save_direct_to_file, direct } :
		       (struct save_source){ save_stage_next, save_stage_to_file, save };
}

int save_write_payload(struct ioshape_save *save, struct format_writer *zip, struct io_writer *file,
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
		ret = save_write(save->context, NULL, &request->plan, &source,
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

/* The last of it; it has been joined and is in no list. */
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

/* ---- What its handle is asked ---------------------------------------------------------------- */

/* First in every call. In a child of fork() the save's thread does not exist, and its lock may be
 * held for ever. */
static int enter_handle(const struct ioshape_save *save, struct base_error *error)
{
	if (!save)
		return base_refuse(error, -EINVAL, "no save was given");
	if (save->request.owner != base_pid())
		return base_refuse_with(error, -EPERM, "ask for it there",
					"this save belongs to the parent process");
	return 0;
}

static int still_runs(struct base_error *error)
{
	return base_refuse_with(error, -EINPROGRESS, "wait longer", "the save has not ended yet");
}

IOSHAPE_EXPORT int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms)
{
	bool for_ever = timeout_ms < 0, done;
	uint64_t begin_ns = base_now_ns();
	struct base_error error = { 0 };
	int64_t waited_ms;
	int ret = enter_handle(save, &error);

	if (ret)
		return base_leave(ret, "save", NULL, &error);
	if (timeout_ms)
		save_later_hurry(save, for_ever ? UINT64_MAX : base_deadline_ns(timeout_ms));
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
	/* Nobody writes to a save that has ended. */
	ret = done ? save->state.result : still_runs(&error);
	return base_leave(ret, "save", NULL, done ? &save->state.error : &error);
}

int save_wait_copied(struct ioshape_save *save)
{
	struct base_error error = { 0 };
	int ret = enter_handle(save, &error);
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

IOSHAPE_EXPORT int ioshape_save_get_report(struct ioshape_save *save, struct ioshape_report *report)
{
	struct base_error error = { 0 };
	int ret = enter_handle(save, &error);

	if (!ret && !report)
		ret = base_refuse(&error, -EINVAL, "nowhere to put the report was given");
	if (ret)
		return base_leave(ret, "save", NULL, &error);
	pthread_mutex_lock(&save->lock);
	ret = save->state.done ?
		      base_give_struct(report, &save->state.report, sizeof(save->state.report),
				       "ioshape_report", &error) :
		      still_runs(&error);
	pthread_mutex_unlock(&save->lock);
	return base_leave(ret, "save", NULL, &error);
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
		ret = base_refuse(&error, -EINVAL, "nowhere to put the status was given");
	if (ret)
		return base_leave(ret, "save", NULL, &error);
	pthread_mutex_lock(&save->lock);
	now.phase = save->state.phase;
	/* Threads that help to copy tell nobody how far they are. */
	now.done_bytes = now.phase == IOSHAPE_PHASE_STAGE ? atomic_load(&save->stage.copied_bytes) :
							    save->state.done_bytes;
	now.total_bytes = save->state.total_bytes;
	if (now.phase == IOSHAPE_PHASE_WAIT && save->state.place.size)
		here = save->state.place;
	pthread_mutex_unlock(&save->lock);
	ret = base_give_struct(status, &now, sizeof(now), "ioshape_save_status", &error);
	if (!ret && place)
		ret = base_give_struct(place, &here, sizeof(here), "ioshape_place", &error);
	return base_leave(ret, "save", NULL, &error);
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

	/* The context may be gone, but not before the save has ended. */
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
	const struct save_source source = { save_direct_next, save_direct_to_file, &direct };
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .queue = options->queue,
					  .queue_user = options->queue_user,
					  .blocked = &self };
	uint64_t begin = base_now_ns();
	struct save_order order;
	struct save_plan plan;
	int ret;

	ret = save_plan_make(&plan, path, payload, options->metadata, error);
	if (ret)
		return ret;
	report->plan_s = base_seconds(base_now_ns() - begin);
	direct.plan = &plan;
	ret = save_order_begin(context, &order, path, error);
	if (!ret) {
		ret = save_write(context, path, &plan, &source, &file_options, &watch, &order,
				 report, error);
		save_order_end(context, &order);
	}
	free(direct.scratch);
	save_plan_free(&plan);
	save_report_end(report, begin, file_options.deadline_ns, ret);
	return ret;
}

static int save_here(struct ioshape_context *context, const char *path,
		     const struct save_payload *payload, const struct ioshape_save_options *options,
		     struct base_error *error)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT, ignored = IOSHAPE_REPORT_INIT;
	int ret = 0;

	/* So that a report that cannot be delivered is not found out after the work. */
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
		ret = base_refuse_with(error, -EINVAL,
				       "ask ioshape_save_get_report() when it has ended",
				       "a background save cannot fill options.report");
	if (!ret && ((unsigned)options->format > IOSHAPE_FORMAT_SAFETENSORS ||
		     (options->format && !formats)))
		ret = base_refuse_with(
			error, -EINVAL,
			"set one of enum ioshape_format, for ioshape_save_tensors() only",
			"options.format is %u", (unsigned)options->format);
	if (!ret && options->checksums &&
	    (options->checksums != IOSHAPE_CHECKSUMS_BESIDE ||
	     options->format != IOSHAPE_FORMAT_SAFETENSORS))
		ret = base_refuse_with(
			error, -EINVAL,
			"set it for safetensors files only, to IOSHAPE_CHECKSUMS_BESIDE",
			"options.checksums is %u", (unsigned)options->checksums);
	return ret;
}

/* In the background if `out` is given. */
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
		ret = base_refuse(&error, -EINVAL, "no path to save to was given");
	if (!ret && out)
		ret = save_begin(context, path, payload, &options, NULL, out, &error);
	else if (!ret)
		ret = save_here(context, path, payload, &options, &error);
	return base_leave(ret, "save", path, &error);
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
