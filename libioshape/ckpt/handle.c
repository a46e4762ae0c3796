/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle of a save in the background. */
#include "ckpt/background.h"

#include <errno.h>

/* In a child of fork() the thread does not exist and the lock may be held for ever. */
static bool is_ours(const struct ioshape_save *save)
{
	return save->owner == base_pid();
}

IOSHAPE_EXPORT int ioshape_save_poll(struct ioshape_save *save)
{
	int done;

	if (!save)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	done = save->done;
	pthread_mutex_unlock(&save->lock);
	return done;
}

IOSHAPE_EXPORT int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms)
{
	bool for_ever = timeout_ms < 0;
	uint64_t begin_ns = base_now_ns();
	int64_t waited_ms = 0;
	int ret;

	if (!save)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	while (!save->done && (for_ever || waited_ms < timeout_ms)) {
		if (for_ever)
			pthread_cond_wait(&save->change, &save->lock);
		else
			base_cond_wait_ms(&save->change, &save->lock, timeout_ms - waited_ms);
		waited_ms = (int64_t)((base_now_ns() - begin_ns) / 1000000);
	}
	ret = save->done ? save->result : -ETIMEDOUT;
	pthread_mutex_unlock(&save->lock);
	return ret;
}

IOSHAPE_EXPORT int ioshape_save_report(struct ioshape_save *save, struct ioshape_report *report)
{
	int ret;

	if (!save || !report)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	ret = save->done ? base_give_struct(report, &save->report, sizeof(save->report),
					    "ioshape_report", NULL) :
			   -EINPROGRESS;
	pthread_mutex_unlock(&save->lock);
	return ret;
}

IOSHAPE_EXPORT int ioshape_save_progress(struct ioshape_save *save, enum ioshape_phase *phase,
					 uint64_t *done_bytes, uint64_t *total_bytes)
{
	if (!save)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	if (phase)
		*phase = save->phase;
	/* Threads that help to copy tell nobody how far they are. */
	if (done_bytes)
		*done_bytes = save->phase == IOSHAPE_PHASE_STAGE ?
				      atomic_load(&save->staged_bytes) :
				      save->done_bytes;
	if (total_bytes)
		*total_bytes = save->total_bytes;
	pthread_mutex_unlock(&save->lock);
	return 0;
}

IOSHAPE_EXPORT int ioshape_save_place(struct ioshape_save *save, struct ioshape_place *place)
{
	struct ioshape_place now = { .size = sizeof(now) };

	if (!save || !place)
		return -EINVAL;
	if (!is_ours(save))
		return -EPERM;
	pthread_mutex_lock(&save->lock);
	if (save->phase == IOSHAPE_PHASE_WAIT && save->place.size)
		now = save->place;
	pthread_mutex_unlock(&save->lock);
	return base_give_struct(place, &now, sizeof(now), "ioshape_place", NULL);
}

IOSHAPE_EXPORT const char *ioshape_save_message(struct ioshape_save *save)
{
	return save && ioshape_save_poll(save) == 1 ? save->error.text : "";
}

static void ask_to_stop(struct ioshape_save *save)
{
	struct ioshape_context *context = save->context;

	atomic_store(&save->abort, true);
	pthread_mutex_lock(&context->lock);
	save->turn.abort_waits = true;
	pthread_cond_broadcast(&context->saves_change);
	pthread_mutex_unlock(&context->lock);
}

IOSHAPE_EXPORT int ioshape_save_cancel(struct ioshape_save *save)
{
	int ended = ioshape_save_poll(save);

	if (ended < 0)
		return ended;
	/* The context may be gone, but not before the save has ended. */
	if (!ended)
		ask_to_stop(save);
	return 0;
}

static void end_save(struct ioshape_save *save)
{
	ask_to_stop(save);
	ckpt_join(save);
	save->context = NULL;
}

static void forget(struct ioshape_context *context, struct ioshape_save *save)
{
	struct ioshape_save **link = &context->background;

	pthread_mutex_lock(&context->lock);
	while (*link != save)
		link = &(*link)->next;
	*link = save->next;
	pthread_mutex_unlock(&context->lock);
}

void ckpt_end_background(struct ioshape_context *context)
{
	while (context->background) {
		struct ioshape_save *save = context->background;

		forget(context, save);
		end_save(save);
	}
}

void ckpt_end_background_of(struct ioshape_context *context, const struct ioshape_group *group)
{
	struct ioshape_save *save;

	/* All of them first: each waits for those that were begun before it. */
	pthread_mutex_lock(&context->lock);
	for (save = context->background; save; save = save->next) {
		if (save->group == group)
			atomic_store(&save->abort, true);
	}
	pthread_mutex_unlock(&context->lock);
	for (;;) {
		pthread_mutex_lock(&context->lock);
		for (save = context->background; save && save->group != group; save = save->next)
			;
		pthread_mutex_unlock(&context->lock);
		if (!save)
			return;
		forget(context, save);
		end_save(save);
	}
}

IOSHAPE_EXPORT void ioshape_save_free(struct ioshape_save *save)
{
	if (!save || !is_ours(save))
		return;
	if (save->context) {
		forget(save->context, save);
		end_save(save);
	}
	ckpt_free_save(save);
}
