/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room for what is saved: looked for before a save queues for its slot, so that nobody waits for a
 * turn that he cannot use. Nothing is reserved: what others take meanwhile is found out when the
 * file is opened, or written, and the same rule decides what becomes of the save then.
 */
#define _GNU_SOURCE
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* How often a save that waits looks whether it may go on waiting. */
#define TICK_NS 50000000ull
/* Between two looks at the filesystem, or two tries: twice as long each time, up to the second. */
#define FIRST_PAUSE_NS 100000000ull
#define MOST_PAUSE_NS 5000000000ull

static bool is_for_want_of_room(int code)
{
	return code == -ENOSPC || code == -EDQUOT;
}

static uint64_t patience_ns(const struct ckpt_room *room)
{
	return room->context->full_wait_ms * 1000000ull;
}

/* ---- Looking --------------------------------------------------------------------------------- */

static bool fits(struct ckpt_room *room)
{
	int ret = room->in_directory ? fs_room_of_directory(room->path, &room->seen) :
				       fs_room_of_path(room->path, &room->seen);

	/* What cannot be looked at, or is a pipe: opening it will say what there is to say. */
	return ret || room->needed_bytes <= room->seen.free_bytes;
}

static void clear(const struct ckpt_room *room)
{
	if (room->clear)
		room->clear(room->clear_user);
	else
		ring_clear_room(room->path, &room->context->log);
}

static void say_too_little(const struct ckpt_room *room, struct base_error *why)
{
	bool replaces = room->seen.replaced_bytes &&
			room->seen.free_bytes + room->seen.replaced_bytes >= room->needed_bytes;
	char type[32];

	fs_room_type(&room->seen, type, sizeof(type));
	base_fail(why, -ENOSPC,
		  "cannot save to %s: it needs %llu bytes and %llu are free on its filesystem "
		  "(%s)%s; free space%s save elsewhere%s",
		  room->path, (unsigned long long)room->needed_bytes,
		  (unsigned long long)room->seen.free_bytes, type,
		  replaces ? ", where the old file stays until the new one is complete" : "",
		  room->context->full == IOSHAPE_FULL_FAIL ? "," : " or",
		  room->context->full == IOSHAPE_FULL_FAIL ? ", or set full=wait or full=skip" :
							     "");
}

/* A write found no room. What statfs() says of the whole filesystem may be something else. */
static void explain(struct ckpt_room *room, const char *more, struct base_error *error)
{
	const struct base_error why = *error;
	bool elsewhere = fits(room) && room->seen.free_bytes != UINT64_MAX;

	*error = (struct base_error){ 0 };
	if (elsewhere && why.code == -ENOSPC)
		base_fail_as_told(error, why.code,
				  "%s (%llu bytes are free on the whole filesystem: one of its "
				  "storage targets may be full, or its inodes used up)%s",
				  why.text, (unsigned long long)room->seen.free_bytes, more);
	else
		base_fail_as_told(error, why.code, "%s%s", why.text, more);
}

/* ---- Skipping -------------------------------------------------------------------------------- */

static int skip(const struct base_error *why, struct base_error *error)
{
	return base_fail_as_told(error, IOSHAPE_E_SKIPPED, "skipped (full=skip): %s", why->text);
}

int ckpt_room_verdict(const struct ioshape_context *context, int ret, struct base_error *error)
{
	const struct base_error why = *error;

	if (!is_for_want_of_room(ret) || context->full != IOSHAPE_FULL_SKIP)
		return ret;
	*error = (struct base_error){ 0 };
	return skip(&why, error);
}

void ckpt_room_note_skip(struct ring_notes *notes, const struct base_error *error)
{
	/* Clauses are told apart by "; ": the remedy is another one, and not for a report. */
	ring_note(notes, "%.*s", (int)strcspn(error->text, ";"), error->text);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* -ECANCELED, or -ENOSPC if there is no point in waiting any more. */
static int may_wait_on(const struct ckpt_room *room, struct base_error *error)
{
	const struct ring_file_options *options = room->options;
	bool stop = options->abort && atomic_load_explicit(options->abort, memory_order_relaxed);

	if (!stop && options->progress)
		stop = options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0,
					 options->progress_total);
	if (stop)
		return base_fail(error, -ECANCELED,
				 "the save to %s was stopped while it waited for room", room->path);
	if (room->turn && ckpt_turn_is_overtaken(room->context, room->turn))
		return base_fail(error, -ENOSPC,
				 "cannot save to %s: a later save to it has taken the room, and "
				 "would wait for this one",
				 room->path);
	return 0;
}

/* Until there is room, or, after a write that found none, until it may be tried again. */
static int keep_waiting(struct ckpt_room *room, uint64_t begin_ns, struct base_error *error)
{
	const struct timespec tick = { .tv_nsec = (long)TICK_NS };
	const uint64_t end_ns = begin_ns + patience_ns(room) - room->waited_ns;
	uint64_t pause_ns = FIRST_PAUSE_NS << MIN(room->failures, 6u), next_ns, now_ns;
	int ret;

	for (next_ns = begin_ns + pause_ns;;) {
		ret = may_wait_on(room, error);
		if (ret)
			return ret;
		now_ns = base_now_ns();
		if (now_ns >= end_ns)
			return base_fail_as_told(error, room->why.code,
						 "after waiting %.1f s for room (full_wait_ms): %s",
						 (double)patience_ns(room) / 1e9, room->why.text);
		if (now_ns >= next_ns) {
			if (!(room->turn && ckpt_turn_is_behind(room->context, room->turn)) &&
			    fits(room))
				return 0;
			pause_ns = MIN(2 * pause_ns, MOST_PAUSE_NS);
			next_ns = now_ns + pause_ns;
		}
		nanosleep(&tick, NULL);
	}
}

static int wait_for_room(struct ckpt_room *room, struct base_error *error)
{
	const uint64_t begin_ns = base_now_ns();
	int ret;

	base_log(&room->context->log, IOSHAPE_LOG_WARNING, "waits for room, at most %.1f s: %s",
		 (double)(patience_ns(room) - room->waited_ns) / 1e9, room->why.text);
	if (room->turn)
		ckpt_turn_note_room(room->context, room->turn, CKPT_ROOM_AWAITED);
	ret = keep_waiting(room, begin_ns, error);
	if (room->turn)
		ckpt_turn_note_room(room->context, room->turn, CKPT_ROOM_UNKNOWN);
	room->waited_ns += base_now_ns() - begin_ns;
	if (!ret)
		base_log(&room->context->log, IOSHAPE_LOG_WARNING,
			 "%s: goes on after waiting %.1f s for room", room->path,
			 (double)room->waited_ns / 1e9);
	return ret;
}

/* ---- One save -------------------------------------------------------------------------------- */

int ckpt_room_await(struct ckpt_room *room, struct base_error *error)
{
	const struct ioshape_context *context = room->context;

	if (context->config.engine == IOSHAPE_ENGINE_NIL)
		return 0;
	if (!room->failures) {
		if (room->needed_bytes <= RING_SMALL_FILE_BYTES)
			return 0;
		if (!fits(room)) {
			clear(room);
			if (!fits(room))
				say_too_little(room, &room->why);
		}
		if (!room->why.code && !(context->full == IOSHAPE_FULL_WAIT && room->turn &&
					 ckpt_turn_is_behind(room->context, room->turn)))
			return 0;
		if (!room->why.code)
			base_fail(&room->why, -ENOSPC,
				  "cannot save to %s: an earlier save to it waits for room",
				  room->path);
	}
	switch (context->full) {
	case IOSHAPE_FULL_WAIT:
		return wait_for_room(room, error);
	case IOSHAPE_FULL_SKIP:
		return skip(&room->why, error);
	case IOSHAPE_FULL_FAIL:
		break;
	}
	return base_fail_as_told(error, room->why.code, "%s", room->why.text);
}

bool ckpt_room_again(struct ckpt_room *room, int *ret, bool repeats, struct base_error *error)
{
	const struct ioshape_context *context = room->context;
	struct fs_room seen;

	if (!is_for_want_of_room(*ret) || context->config.engine == IOSHAPE_ENGINE_NIL)
		return false;
	/* Bytes that have gone to a pipe or a device are gone. */
	if (!room->in_directory && fs_room_of_path(room->path, &seen) == -EINVAL)
		return false;
	if (context->full == IOSHAPE_FULL_WAIT && repeats && room->waited_ns < patience_ns(room)) {
		explain(room, "", error);
		room->failures++;
		room->why = *error;
		*error = (struct base_error){ 0 };
		*ret = 0;
		return true;
	}
	explain(room,
		context->full == IOSHAPE_FULL_WAIT && !repeats ?
			"; not tried again, because its bytes cannot be had once more" :
			"",
		error);
	*ret = ckpt_room_verdict(context, *ret, error);
	return false;
}

void ckpt_room_note(const struct ckpt_room *room, int ret, struct ring_notes *notes,
		    const struct base_error *error)
{
	if (room->waited_ns)
		ring_note(notes, "waited %.1f s for room", (double)room->waited_ns / 1e9);
	if (ret == IOSHAPE_E_SKIPPED)
		ckpt_room_note_skip(notes, error);
	if (room->why.code && !*notes->filesystem)
		fs_room_type(&room->seen, notes->filesystem, sizeof(notes->filesystem));
}
