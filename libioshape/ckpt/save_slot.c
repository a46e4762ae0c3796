/* SPDX-License-Identifier: Apache-2.0 */
/* The slot of one save. */
#include "ckpt/slot.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ---- Waiting --------------------------------------------------------------------------------- */

/* Who waits for a slot on behalf of a save. */
struct waiting_save {
	const struct ckpt_watch *watch;
	const struct ring_file_options *options;
};

static int tell_waiting(void *user, const struct ioshape_place *place)
{
	const struct waiting_save *waiting = user;
	const struct ring_file_options *options = waiting->options;
	const struct ckpt_watch *watch = waiting->watch;
	int stop = 0;

	if (options->abort && atomic_load_explicit(options->abort, memory_order_relaxed))
		return 1;
	if (watch->queue)
		stop = watch->queue(watch->queue_user, place);
	if (!stop && options->progress)
		stop = options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0,
					 options->progress_total);
	return stop;
}

int ckpt_slot_wait(struct slots_pool *pool, uint32_t capacity, const char *path,
		   const struct ring_file_options *options, const struct ckpt_watch *watch,
		   struct slots_slot **slot, struct base_error *error)
{
	struct waiting_save waiting = { watch, options };
	const struct slots_wish wish = {
		.weight = 1,
		.bytes = options->expected_bytes,
		.default_capacity = capacity,
		.waiting = tell_waiting,
		.waiting_user = &waiting,
	};
	struct base_error why = { 0 };
	int ret;

	ret = slots_acquire(pool, &wish, slot, &why);
	if (ret == -ECANCELED)
		return base_fail(error, ret,
				 "the save to %s was stopped while it waited for a slot", path);
	if (why.code)
		return base_fail(error, ret, "cannot save to %s: %s", path, why.text);
	return ret;
}

bool ckpt_slot_find_pool(struct ckpt_slot *slot, struct ioshape_context *context, const char *path,
			 const struct ring_file_options *options, struct slots_pool **pool,
			 uint32_t *capacity)
{
	struct ckpt_expected expected = {
		.wish = &context->slots.layout,
		.bytes = options->expected_bytes,
		.files = options->files,
	};
	struct base_error why = { 0 };
	struct stat status;
	uint64_t mount;

	/* What goes nowhere is in nobody's way, nor is what goes to a pipe or a device. */
	if (context->config.engine == IOSHAPE_ENGINE_NIL)
		return false;
	if (!stat(path, &status)) {
		if (!S_ISREG(status.st_mode))
			return false;
	} else {
		expected.absent = errno == ENOENT;
	}
	if (!ckpt_slots_of_path(&context->slots, path, &expected, pool, capacity, &why))
		return true;
	/* What cannot be looked at cannot be written either: opening it will say why. All else is
	 * no reason not to save, and is said. */
	if (!fs_mount_of_path(path, &mount)) {
		snprintf(slot->info.note, sizeof(slot->info.note), "no slot was taken: %.200s",
			 why.text);
		base_log(&context->log, IOSHAPE_LOG_WARNING, "saving %s without a slot: %s", path,
			 why.text);
	}
	return false;
}

/* ---- One save -------------------------------------------------------------------------------- */

int ckpt_slot_take(struct ckpt_slot *slot, struct ioshape_context *context, const char *path,
		   const struct ring_file_options *options, const struct ckpt_watch *watch,
		   struct base_error *error)
{
	struct slots_pool *pool;
	uint32_t capacity;

	*slot = (struct ckpt_slot){
		.context = context,
		.abort = options->abort,
		.progress = options->progress,
		.progress_user = options->progress_user,
		.progress_total = options->progress_total,
	};
	if (!ckpt_slot_find_pool(slot, context, path, options, &pool, &capacity))
		return 0;
	if (watch->blocked)
		slot->shared = ckpt_shared_slot_of_thread(context, pool, *watch->blocked);
	if (slot->shared)
		return 0;
	return ckpt_slot_wait(pool, capacity, path, options, watch, &slot->slot, error);
}

/* Asked while it waits for bandwidth. */
static int must_stop(void *user)
{
	const struct ckpt_slot *slot = user;

	if (slot->abort && atomic_load_explicit(slot->abort, memory_order_relaxed))
		return 1;
	return slot->progress ? slot->progress(slot->progress_user, IOSHAPE_PHASE_WRITE,
					       MIN(slot->passed, slot->progress_total),
					       slot->progress_total) :
				0;
}

void ckpt_slot_pass(void *user, uint64_t bytes)
{
	struct ckpt_slot *slot = user;

	if (slot->slot)
		slots_pass(slot->slot, bytes, must_stop, slot);
	else
		ckpt_shared_slot_pass(slot->shared, bytes);
	slot->passed += bytes;
}

void ckpt_slot_hand_over(void *user)
{
	ckpt_slot_release(user);
}

void ckpt_slot_release(struct ckpt_slot *slot)
{
	if (slot->shared)
		ckpt_shared_slot_release(slot->shared, slot->context, slot);
	slot->shared = NULL;
	if (!slot->slot)
		return;
	slots_info(slot->slot, &slot->info);
	slots_release(slot->slot);
	slot->slot = NULL;
}

void ckpt_slot_report(const struct ckpt_slot *slot, struct ring_notes *notes,
		      struct ioshape_report *report)
{
	const struct ioshape_slot_info *info = &slot->info;

	/* A save that found no room has waited for a slot before. */
	report->slot_s += info->waited_s;
	report->paced_s += info->paced_s;
	report->fence = info->fence;
	report->position = info->position;
	report->slot_lost = info->lost;
	report->express = info->express;
	report->capacity = info->capacity;
	snprintf(report->coordinator, sizeof(report->coordinator), "%s", info->coordinator);
	snprintf(report->pool, sizeof(report->pool), "%s", info->pool);
	snprintf(report->ahead, sizeof(report->ahead), "%s", info->ahead);
	if (*info->note)
		ring_note(notes, "%s", info->note);
}
