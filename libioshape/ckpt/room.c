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
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* How often a save that waits looks whether it may go on waiting. */
#define TICK_NS 50000000ull
/* Between two looks at the filesystem, or two tries: twice as long each time, up to the second. */
#define FIRST_PAUSE_NS 100000000ull
#define MOST_PAUSE_NS 5000000000ull

/* Smaller files are not worth a look at each storage target, which costs some hundred system calls;
 * nor is one more often than that. */
#define WORTH_A_LOOK_BYTES (64 * MIB)
#define LOOK_AGAIN_NS 60000000000ull

#define TARGETS_BYTES 320

#define LUSTRE_MAGIC 0x0bd00bd0

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

/*
 * What is removed is counted as free later: by XFS when a thread of its own has come to it, by
 * btrfs with its next transaction. Who asks them for room gets it.
 */
static bool counts_late(const struct ckpt_room *room)
{
	static const char *const late[] = { "xfs", "btrfs", "ext4" };
	char type[32];

	fs_magic_name(room->seen.magic, type, sizeof(type));
	for (size_t i = 0; i < ARRAY_LENGTH(late); i++) {
		if (!strcmp(type, late[i]))
			return true;
	}
	return false;
}

static bool fits_after_all(struct ckpt_room *room)
{
	return fits(room) || (counts_late(room) &&
			      ring_can_reserve(room->path, room->in_directory, room->needed_bytes));
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

/*
 * Storage targets, where a filesystem is made of such and tells of each, that could not hold their
 * part of the file: which of them it will get is known only when it is created.
 */
static void name_full_targets(const struct ckpt_room *room, char *into, size_t into_bytes)
{
	const char *slash = strrchr(room->path, '/');
	char *directory = room->in_directory || !slash ?
				  strdup(room->path) :
				  strndup(room->path, (size_t)(slash - room->path) + 1);
	struct ring_folder folder = RING_NO_FOLDER;
	const struct fs_part *part;
	struct fs_storage storage;
	uint64_t stripes = 1;

	*into = 0;
	if (directory && !ring_folder_open(&folder, directory, NULL) &&
	    !fs_look_at_storage(folder.fd, directory, "", &storage, NULL)) {
		part = fs_layout_main(&storage.layout, room->needed_bytes);
		if (part && part->stripe_count)
			stripes = part->stripe_count;
		/* All of them are the most that it can have. */
		fs_name_full_targets(&storage,
				     room->needed_bytes / MIN(stripes, MAX(storage.targets, 1)) + 1,
				     into, into_bytes);
	}
	ring_folder_close(&folder);
	free(directory);
}

/* A write found no room. What statfs() says of the whole filesystem may be something else. */
static void explain(struct ckpt_room *room, const char *more, struct base_error *error)
{
	const struct base_error why = *error;
	bool elsewhere = fits(room) && room->seen.free_bytes != UINT64_MAX;
	char targets[TARGETS_BYTES];

	*error = (struct base_error){ 0 };
	if (elsewhere && why.code == -ENOSPC) {
		name_full_targets(room, targets, sizeof(targets));
		base_fail_as_told(error, why.code,
				  "%s (%llu bytes are free on the whole filesystem: %s%s)%s",
				  why.text, (unsigned long long)room->seen.free_bytes,
				  room->seen.no_inodes ? "its inodes are used up" :
				  *targets             ? "of its storage targets are full " :
							 "one of its storage targets may be full",
				  room->seen.no_inodes ? "" : targets, more);
	} else {
		base_fail_as_told(error, why.code, "%s%s", why.text, more);
	}
}

/* There is room on the whole, but perhaps not on each of its targets. Only Lustre tells of them. */
static void warn_of_full_targets(struct ckpt_room *room)
{
	struct ioshape_context *context = room->context;
	uint64_t now_ns = base_now_ns(), last_ns = atomic_load(&context->targets_looked_ns);
	char targets[TARGETS_BYTES];

	if (room->seen.magic != LUSTRE_MAGIC || room->needed_bytes < WORTH_A_LOOK_BYTES ||
	    (last_ns && now_ns - last_ns < LOOK_AGAIN_NS) ||
	    !atomic_compare_exchange_strong(&context->targets_looked_ns, &last_ns, now_ns))
		return;
	name_full_targets(room, targets, sizeof(targets));
	if (*targets)
		base_log(&context->log, IOSHAPE_LOG_WARNING,
			 "%s may fail: storage targets that could not hold their part of it: %s",
			 room->path, targets);
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

static void tell_end(const struct ckpt_room *room, const char *what)
{
	base_log(&room->context->log, IOSHAPE_LOG_WARNING, "%s: %s after waiting %.1f s for room",
		 room->path, what, (double)room->waited_ns / 1e9);
}

static int wait_for_room(struct ckpt_room *room, struct base_error *error)
{
	const uint64_t begin_ns = base_now_ns();
	int ret;

	/* Once, however often it is tried. */
	if (!room->waited_ns)
		base_log(&room->context->log, IOSHAPE_LOG_WARNING,
			 "waits for room, at most %.1f s: %s", (double)patience_ns(room) / 1e9,
			 room->why.text);
	if (room->turn)
		ckpt_turn_note_room(room->context, room->turn, CKPT_ROOM_AWAITED);
	ret = keep_waiting(room, begin_ns, error);
	if (room->turn)
		ckpt_turn_note_room(room->context, room->turn, CKPT_ROOM_UNKNOWN);
	room->waited_ns += base_now_ns() - begin_ns;
	if (!ret && !room->failures)
		tell_end(room, "goes on");
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
		if (fits(room)) {
			warn_of_full_targets(room);
		} else {
			clear(room);
			if (!fits_after_all(room))
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
	if (!ret && room->failures)
		tell_end(room, "was written");
	if (room->waited_ns)
		ring_note(notes, "waited %.1f s for room", (double)room->waited_ns / 1e9);
	if (ret == IOSHAPE_E_SKIPPED)
		ckpt_room_note_skip(notes, error);
	if (room->why.code && !*notes->filesystem)
		fs_room_type(&room->seen, notes->filesystem, sizeof(notes->filesystem));
}
