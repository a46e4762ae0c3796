/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turns of this process: asking its holders for slots, waiting for them, and leaving them. Threads
 * that write to one filesystem wait together. No thread waits for another thread of the program,
 * except while that thread waits for the slot of both.
 */
#define _GNU_SOURCE
#include "preload/preload.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define TURNS 4 /* filesystems that a process writes to in slots */

#define SLICE_MS 100 /* a waiting thread checks this often whether the holder still works */
/* A thread that handled a signal waits only this much longer: the signal may be Ctrl-C. */
#define AFTER_SIGNAL_MS 5000u
/* After a holder refused, died or could not be started, the program does not ask for so long. */
#define RETRY_MS 60000u
/*
 * The programs of a pipeline may wait for each other and for one slot. Each loses the slot by a
 * pause and asks again soon, when the next one has it. After so many times it goes on without.
 */
#define MOST_BOUNCES 3u
#define BOUNCE_MS 3000u

/* State of this process, in pages of its own. A forked child begins with zeros. */
static union {
	struct {
		_Atomic int32_t owner; /* process id */
		struct preload_turn turns[TURNS];
	};
	char pages[65536];
} process __attribute__((aligned(65536)));

static union preload_box boxes[TURNS] __attribute__((aligned(65536)));

static struct mailbox *box_of(const struct preload_turn *turn)
{
	return &boxes[turn - process.turns].box;
}

/* Returns the state of a request. A forked child inherits the mailboxes of its parent and must not
 * use them. */
static uint32_t state_of(const struct preload_turn *turn)
{
	return atomic_load(&turn->started) ? atomic_load(&box_of(turn)->state) : MAILBOX_ABSENT;
}

/* ---- The process ----------------------------------------------------------------------------- */

void preload_turns_prepare(void)
{
	madvise(&process, sizeof(process), MADV_WIPEONFORK);
	atomic_store(&process.owner, (int32_t)getpid());
}

bool preload_is_owner(void)
{
	const int32_t pid = (int32_t)getpid();
	int32_t expected = 0;

	return atomic_load(&process.owner) == pid ||
	       atomic_compare_exchange_strong(&process.owner, &expected, pid);
}

struct preload_turn *preload_turn_find(dev_t device)
{
	const uint64_t key = (uint64_t)device + 1;

	for (struct preload_turn *turn = process.turns; turn < process.turns + TURNS; turn++) {
		uint64_t found = 0;

		if (atomic_compare_exchange_strong(&turn->device, &found, key) || found == key)
			return atomic_load(&turn->retry_ms) <= mailbox_now_ms() ? turn : NULL;
	}
	return NULL;
}

/* ---- The holder ------------------------------------------------------------------------------ */

static bool is_alive(const struct mailbox *box)
{
	const int32_t holder = atomic_load(&box->holder);
	const uint64_t beat_ms = atomic_load(&box->beat_ms);

	if (mailbox_now_ms() > beat_ms + MAILBOX_STILL_MS)
		return false;
	return !holder || !kill(holder, 0) || errno == EPERM;
}

bool preload_turn_check(struct preload_turn *turn)
{
	if (state_of(turn) == MAILBOX_ABSENT)
		return false;
	if (is_alive(box_of(turn)))
		return true;
	atomic_store(&turn->retry_ms, mailbox_now_ms() + RETRY_MS);
	atomic_store(&turn->started, 0);
	return false;
}

/* Starts the holder, or waits for the thread that does. Returns false if it cannot be started. */
static bool start(struct preload_turn *turn)
{
	bool started;

	if (atomic_exchange(&turn->starting, 1)) {
		mailbox_wait(&turn->starting, 1, 1);
		return true;
	}
	started = state_of(turn) != MAILBOX_ABSENT ||
		  preload_start_holder(&boxes[turn - process.turns]);
	atomic_store(&turn->started, started);
	if (!started)
		atomic_store(&turn->retry_ms, mailbox_now_ms() + RETRY_MS);
	atomic_store(&turn->starting, 0);
	return started;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* A wait of one thread. */
struct wait {
	uint64_t begin_ms, end_ms;
	bool asked; /* whether this thread asked for the slot */
};

static struct wait wait_begin(uint64_t longest_ms)
{
	const uint64_t now = mailbox_now_ms();

	return (struct wait){ now, now + longest_ms, false };
}

/* Waits for a moment while `word` is `value`. Returns false if the wait must end. */
static bool wait_on(struct wait *wait, struct preload_turn *turn, _Atomic uint32_t *word,
		    uint32_t value)
{
	const bool interrupted = mailbox_wait(word, value, SLICE_MS) && errno == EINTR;
	const uint64_t now = mailbox_now_ms();

	if (interrupted && now + AFTER_SIGNAL_MS < wait->end_ms)
		wait->end_ms = now + AFTER_SIGNAL_MS;
	return now < wait->end_ms && preload_turn_check(turn);
}

bool preload_turn_is_over(const struct preload_turn *turn)
{
	return atomic_load(&turn->waited_ms) >= preload_settings.wait_ms;
}

/* Counts a request. Returns false if the program shall no longer ask for slots. */
static bool may_ask(struct preload_turn *turn)
{
	const uint64_t paused_ms = atomic_load(&box_of(turn)->paused_ms), now = mailbox_now_ms();

	if (!paused_ms || now > paused_ms + BOUNCE_MS)
		atomic_store(&turn->bounces, 0);
	else if (atomic_fetch_add(&turn->bounces, 1) + 1 >= MOST_BOUNCES)
		atomic_store(&turn->waited_ms, preload_settings.wait_ms);
	return !preload_turn_is_over(turn) && atomic_load(&turn->retry_ms) <= now;
}

/* Takes the next step towards a slot. Returns 1 if the process has it, -1 if it shall go on
 * without, 0 to call again. */
static int step(struct preload_turn *turn, const char *path, struct wait *wait)
{
	struct mailbox *box = box_of(turn);
	const uint32_t state = state_of(turn);

	switch (state) {
	case MAILBOX_HELD:
		return 1;
	case MAILBOX_ABSENT:
		return (path || atomic_load(&turn->starting)) && start(turn) ? 0 : -1;
	case MAILBOX_IDLE:
		if (!path || !may_ask(turn))
			return -1;
		if (mailbox_move(box, MAILBOX_IDLE, MAILBOX_ASKING)) {
			snprintf(box->path, sizeof(box->path), "%s", path);
			box->bounces = atomic_load(&turn->bounces);
			wait->asked = true;
			mailbox_move(box, MAILBOX_ASKING, MAILBOX_ASKED);
		}
		return 0;
	case MAILBOX_REFUSED:
		atomic_store(&turn->retry_ms, mailbox_now_ms() + RETRY_MS);
		mailbox_move(box, MAILBOX_REFUSED, MAILBOX_IDLE);
		return -1;
	default:
		if (wait_on(wait, turn, &box->state, state))
			return 0;
		if (state_of(turn) == MAILBOX_ASKED)
			atomic_store(&turn->waited_ms, preload_settings.wait_ms);
		mailbox_move(box, MAILBOX_ASKED, MAILBOX_IDLE);
		return -1;
	}
}

bool preload_turn_ask(struct preload_turn *turn, const char *path)
{
	const uint64_t waited = atomic_load(&turn->waited_ms);
	struct wait wait;
	int result;

	if (waited >= preload_settings.wait_ms)
		return false;
	wait = wait_begin(preload_settings.wait_ms - waited);
	do
		result = step(turn, path, &wait);
	while (!result);
	/* One of the threads that wait together counts for all. */
	if (wait.asked)
		atomic_fetch_add(&turn->waited_ms, mailbox_now_ms() - wait.begin_ms);
	return result > 0;
}

/* ---- Writing --------------------------------------------------------------------------------- */

struct mailbox *preload_turn_touch(struct preload_turn *turn)
{
	struct mailbox *box = box_of(turn);

	atomic_fetch_add(&box->calls, 1);
	return box;
}

/* Bytes that the program may still write decide when it wakes the holder, which sleeps. */
#define LITTLE_LEFT (UINT64_C(512) << 10)

/* Waits until the bandwidth limits allow `bytes` bytes in all. */
static void wait_for_bandwidth(struct preload_turn *turn, uint64_t bytes)
{
	struct mailbox *box = box_of(turn);
	struct wait wait = wait_begin(preload_settings.wait_ms);
	uint32_t grants;

	do {
		grants = atomic_load(&box->grants);
		if (atomic_load(&box->allowed) < bytes + LITTLE_LEFT)
			mailbox_wake(&box->state);
	} while (atomic_load(&box->allowed) < bytes && state_of(turn) == MAILBOX_HELD &&
		 wait_on(&wait, turn, &box->grants, grants));
}

struct mailbox *preload_turn_write(struct preload_turn *turn, uint64_t bytes)
{
	struct mailbox *box = box_of(turn);

	if (state_of(turn) != MAILBOX_HELD && !preload_turn_ask(turn, NULL))
		return NULL;
	preload_turn_touch(turn);
	wait_for_bandwidth(turn, atomic_fetch_add(&box->bytes, bytes) + bytes);
	return box;
}

void preload_turn_leave(struct preload_turn *turn, bool closed)
{
	if (closed) {
		atomic_store(&turn->waited_ms, 0);
		atomic_store(&turn->bounces, 0);
	}
	if (atomic_fetch_sub(&turn->files, 1) <= 1) {
		atomic_store(&turn->files, 0);
		mailbox_move(box_of(turn), MAILBOX_HELD, MAILBOX_CLOSED);
	}
}
