/* SPDX-License-Identifier: Apache-2.0 */
/* How far a save in the background is, and how it ended. */
#include "save/background/background.h"

#include <errno.h>

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

bool save_is_stopped(const struct ioshape_save *save)
{
	return atomic_load_explicit(&save->abort, memory_order_relaxed);
}

/* ---- What its handle is asked ---------------------------------------------------------------- */

/* First in every call. In a child of fork() the save's thread does not exist, and its lock may be
 * held for ever. */
int save_enter_handle(const struct ioshape_save *save, struct base_error *error)
{
	if (!save)
		return base_refuse(error, -EINVAL, "no save was given");
	if (save->request.owner != base_pid())
		return base_refuse(error, -EPERM,
				   "this save belongs to the parent process" BASE_REMEDY
				   "ask for it there");
	return 0;
}

static int still_runs(struct base_error *error)
{
	return base_refuse(error, -EINPROGRESS,
			   "the save has not ended yet" BASE_REMEDY "wait longer");
}

IOSHAPE_EXPORT int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms)
{
	bool for_ever = timeout_ms < 0, done;
	uint64_t begin_ns = base_now_ns();
	struct base_error error = { 0 };
	int64_t waited_ms;
	int ret = save_enter_handle(save, &error);

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

IOSHAPE_EXPORT int ioshape_save_get_report(struct ioshape_save *save, struct ioshape_report *report)
{
	struct base_error error = { 0 };
	int ret = save_enter_handle(save, &error);

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
	int ret = save_enter_handle(save, &error);

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
