/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle of a save in the background: how it is stopped and freed. */
#include "save/background/background.h"

#include <errno.h>

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
	if (save_enter_handle(save, NULL))
		return;
	if (save->context) {
		forget(save->context, save);
		end_save(save);
	}
	save_free(save);
}
