/* SPDX-License-Identifier: Apache-2.0 */
/* The slot of one save, and the slots that the open files of a context share. */
#include "save/slot/pools.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Waiting --------------------------------------------------------------------------------- */

/* After so long somebody wonders why nothing happens; and again after so long. */
#define FIRST_NOTICE_S 5.0
#define NEXT_NOTICE_S 60.0

/* A save that waits for a slot. */
struct waiting_save {
	const struct save_watch *watch;
	const struct ring_file_options *options;
	const struct base_log *log;
	const char *path;
	double next_notice_s; /* of waiting */
};

static void notice_waiting(struct waiting_save *waiting, const struct ioshape_place *place)
{
	const char *ahead = *place->ahead ? place->ahead : "others";

	if (place->waited_s < waiting->next_notice_s)
		return;
	waiting->next_notice_s = place->waited_s + NEXT_NOTICE_S;
	base_log(waiting->log, IOSHAPE_LOG_NOTICE,
		 "the save to \"%s\" has waited %.0f s for a slot of pool \"%s\", behind %s",
		 waiting->path, place->waited_s, place->pool, ahead);
}

static int tell_waiting(void *user, const struct ioshape_place *place)
{
	struct waiting_save *waiting = user;
	const struct ring_file_options *options = waiting->options;
	const struct save_watch *watch = waiting->watch;
	int stop = 0;

	if (options->abort && atomic_load_explicit(options->abort, memory_order_relaxed))
		return 1;
	notice_waiting(waiting, place);
	if (watch->queue)
		stop = watch->queue(watch->queue_user, place);
	if (!stop && options->progress)
		stop = options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0,
					 options->progress_total);
	return stop;
}

static int wait_for_slot(const struct base_log *log, struct slots_pool *pool, uint32_t capacity,
			 const char *path, const struct ring_file_options *options,
			 const struct save_watch *watch, struct slots_slot **slot,
			 struct base_error *error)
{
	struct waiting_save waiting = { watch, options, log, path, FIRST_NOTICE_S };
	const struct slots_wanted wanted = {
		.weight = 1,
		.bytes = options->expected_bytes,
		.default_capacity = capacity,
		.writers = options->files,
		.holds_up = watch->blocked && !watch->drains,
		.yields = watch->drains,
		.deadline_ns = options->deadline_ns,
		.waiting = tell_waiting,
		.waiting_user = &waiting,
	};
	struct base_error why = { 0 };
	int ret;

	ret = slots_acquire(pool, &wanted, slot, &why);
	if (ret == -ECANCELED)
		return base_fail(error, ret,
				 "the save to \"%s\" was stopped while it waited for a slot", path);
	if (why.code)
		return base_fail(error, ret, "cannot save to \"%s\": %s", path, why.text);
	return ret;
}

static bool find_pool(struct save_slot *slot, struct ioshape_context *context, const char *path,
		      const struct fs_found *found, const struct ring_file_options *options,
		      struct slots_pool **pool, uint32_t *capacity)
{
	struct save_expected expected = {
		.request = &context->slots.layout,
		.bytes = options->expected_bytes,
		.files = options->files,
	};
	struct base_error why = { 0 };

	/* What goes to a pipe or a device takes no other writer's time. */
	if (!found->code && !found->absent && !found->regular)
		return false;
	if (!save_slots_of_path(&context->slots, path, found, &expected, pool, capacity, &why))
		return true;
	/* What cannot be looked at cannot be written either: opening it will say why. All else is
	 * no reason not to save, and is said. */
	if (!found->code) {
		snprintf(slot->info.note, sizeof(slot->info.note), "no slot was acquired: %.200s",
			 why.text);
		base_log(&context->log, IOSHAPE_LOG_WARNING, "saving %s without a slot: %s", path,
			 why.text);
	}
	return false;
}

/* ---- Slots that the open files of a context share -------------------------------------------- */

struct save_shared_slot {
	struct save_shared_slot *next; /* in the context, under its lock */
	struct slots_pool *pool;
	struct slots_slot *slot;
	pthread_t opener;              /* the thread that waited for it */
	const struct save_slot *first; /* of the file that it waited for */
	unsigned users;                /* under the context's lock */
	pthread_mutex_t lock;          /* of passing */
};

static bool is_lost(const struct save_shared_slot *shared)
{
	struct ioshape_slot_info info;

	slots_info(shared->slot, &info);
	return info.lost;
}

/* One that is held already; `opener` is NULL, or the thread that it must be of. */
static struct save_shared_slot *join(struct ioshape_context *context, const struct slots_pool *pool,
				     const pthread_t *opener)
{
	struct save_shared_slot *shared;

	pthread_mutex_lock(&context->lock);
	shared = context->shared_slots;
	while (shared && (shared->pool != pool || is_lost(shared) ||
			  (opener && !pthread_equal(shared->opener, *opener))))
		shared = shared->next;
	if (shared)
		shared->users++;
	pthread_mutex_unlock(&context->lock);
	return shared;
}

/* A new one, which files that are opened later may join. */
static int take(struct save_shared_slot **out, struct ioshape_context *context,
		struct slots_pool *pool, uint32_t capacity, const char *path,
		const struct ring_file_options *options, struct base_error *error)
{
	struct save_shared_slot *shared = calloc(1, sizeof(*shared));
	const struct save_watch untold = { .queue = NULL };
	int ret;

	if (!shared)
		return base_no_memory(error, "a slot", sizeof(*shared));
	ret = wait_for_slot(&context->log, pool, capacity, path, options, &untold, &shared->slot,
			    error);
	if (ret) {
		free(shared);
		return ret;
	}
	shared->pool = pool;
	shared->users = 1;
	shared->opener = pthread_self();
	pthread_mutex_init(&shared->lock, NULL);
	pthread_mutex_lock(&context->lock);
	shared->next = context->shared_slots;
	context->shared_slots = shared;
	pthread_mutex_unlock(&context->lock);
	*out = shared;
	return 0;
}

int save_shared_slot_take(struct save_shared_slot **shared, struct ioshape_context *context,
			  const char *path, const struct fs_found *found,
			  const struct ring_file_options *options, struct save_slot *seen,
			  struct base_error *error)
{
	struct slots_pool *pool;
	uint32_t capacity;
	int ret;

	*shared = NULL;
	if (!find_pool(seen, context, path, found, options, &pool, &capacity))
		return 0;
	*shared = join(context, pool, NULL);
	if (*shared)
		return 0;
	ret = take(shared, context, pool, capacity, path, options, error);
	if (!ret)
		(*shared)->first = seen;
	return ret;
}

void save_shared_slot_pass(void *user, uint64_t bytes)
{
	struct save_shared_slot *shared = user;

	if (!shared)
		return;
	pthread_mutex_lock(&shared->lock);
	slots_pass(shared->slot, bytes, NULL, NULL);
	pthread_mutex_unlock(&shared->lock);
}

/* Those that joined did not wait for it. */
static void fill_seen(const struct save_shared_slot *shared, struct save_slot *seen)
{
	slots_info(shared->slot, &seen->info);
	if (seen == shared->first)
		return;
	seen->info.waited_s = seen->info.paced_s = 0;
	seen->info.position = 0;
	*seen->info.ahead = 0;
}

void save_shared_slot_release(struct save_shared_slot *shared, struct ioshape_context *context,
			      struct save_slot *seen)
{
	struct save_shared_slot **link = &context->shared_slots;
	bool last;

	if (!shared)
		return;
	fill_seen(shared, seen);
	pthread_mutex_lock(&context->lock);
	last = !--shared->users;
	while (*link != shared)
		link = &(*link)->next;
	if (last)
		*link = shared->next;
	pthread_mutex_unlock(&context->lock);
	if (!last)
		return;
	slots_release(shared->slot);
	pthread_mutex_destroy(&shared->lock);
	free(shared);
}

/* ---- One save -------------------------------------------------------------------------------- */

int save_slot_take(struct save_slot *slot, struct ioshape_context *context, const char *path,
		   const struct fs_found *found, const struct ring_file_options *options,
		   const struct save_watch *watch, struct base_error *error)
{
	struct slots_pool *pool;
	uint32_t capacity;

	*slot = (struct save_slot){
		.context = context,
		.abort = options->abort,
		.progress = options->progress,
		.progress_user = options->progress_user,
		.progress_total = options->progress_total,
	};
	if (!find_pool(slot, context, path, found, options, &pool, &capacity))
		return 0;
	slot->places = MIN(capacity, SLOTS_MOST_PLACES);
	if (watch->blocked)
		slot->shared = join(context, pool, watch->blocked);
	if (slot->shared)
		return 0;
	return wait_for_slot(&context->log, pool, capacity, path, options, watch, &slot->slot,
			     error);
}

uint32_t save_slot_place(const struct save_slot *slot, uint32_t *places)
{
	*places = slot->places;
	return slot->slot ? slots_place(slot->slot) : 0;
}

/* Asked while it waits for bandwidth. */
static int must_stop(void *user)
{
	const struct save_slot *slot = user;

	if (slot->abort && atomic_load_explicit(slot->abort, memory_order_relaxed))
		return 1;
	return slot->progress ? slot->progress(slot->progress_user, IOSHAPE_PHASE_WRITE,
					       MIN(slot->passed, slot->progress_total),
					       slot->progress_total) :
				0;
}

void save_slot_pass(void *user, uint64_t bytes)
{
	struct save_slot *slot = user;

	if (slot->slot)
		slots_pass(slot->slot, bytes, must_stop, slot);
	else
		save_shared_slot_pass(slot->shared, bytes);
	slot->passed += bytes;
}

void save_slot_release(struct save_slot *slot)
{
	if (slot->shared)
		save_shared_slot_release(slot->shared, slot->context, slot);
	slot->shared = NULL;
	if (!slot->slot)
		return;
	slots_info(slot->slot, &slot->info);
	slots_release(slot->slot);
	slot->slot = NULL;
}

void save_slot_report(const struct save_slot *slot, struct ring_notes *notes,
		      struct ioshape_report *report)
{
	const struct ioshape_slot_info *info = &slot->info;

	report->slot_s = info->waited_s;
	report->paced_s = info->paced_s;
	report->fence = info->fence;
	report->position = info->position;
	report->slot_lost = info->lost;
	report->express = info->express;
	report->capacity = info->capacity;
	snprintf(report->coordinator, sizeof(report->coordinator), "%s", info->coordinator);
	snprintf(report->pool, sizeof(report->pool), "%s", info->pool);
	snprintf(report->ahead, sizeof(report->ahead), "%s", info->ahead);
	if (*info->note)
		ring_note(notes, IOSHAPE_STEP_SLOT, "%s", info->note);
}
