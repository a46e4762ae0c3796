/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The holder: takes slots for a program that runs with the preload library, and outlives it by
 * moments. Descriptor MAILBOX_FD is their shared memory. The slot is free when the program closes
 * its file or ends, pauses, or computes more than it writes.
 */
#define _GNU_SOURCE
#include "fs/fs.h"
#include "preload/mailbox.h"
#include "save/save.h"

#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <syslog.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

#define TICK_MS 50
/* A program that writes nothing for so long loses its slot. It has half of the time each time that
 * it asks again at once, because it may be part of a pipeline in which others wait for the slot. */
#define PAUSE_MS 2000u
#define WINDOW_TICKS 100u   /* 5 s */
#define LEAST_BUSY_TICKS 10 /* of a window in which the program writes in fewer ticks is slow */
#define LEAVE_MS 10000u     /* the holder ends after so long without a request */
/* The program may write so many bytes, then as many more. */
#define PACE_BYTES (UINT64_C(1) << 20)
#define MOST_AHEAD (UINT64_C(64) << 20)

/* State of this process. */
static struct {
	struct mailbox *box;
	_Atomic bool ended; /* whether the program has ended */
} holder;

/* A request and what became of it, for the log. */
struct turn {
	char path[MAILBOX_PATH_BYTES];
	struct ioshape_slot_info slot;
	double waited_s, held_s;
	uint64_t bytes;
	const char *end, *error;
	int fd; /* of the file, to sync it; -1 if this process may not read it */
};

/* ---- Log ------------------------------------------------------------------------------------- */

/* Appends a quoted text, with unsafe characters as \xNN. */
static void print_quoted(FILE *line, const char *name, const char *text)
{
	fprintf(line, " %s=\"", name);
	for (; *text; text++) {
		const unsigned char c = (unsigned char)*text;

		fprintf(line, c < ' ' || c == '"' || c == '\\' || c == 0x7f ? "\\x%02x" : "%c", c);
	}
	fputc('"', line);
}

static void print_turn(FILE *line, const struct turn *turn)
{
	char now_text[32];
	const time_t now = time(NULL);
	struct tm utc;

	strftime(now_text, sizeof(now_text), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
	fprintf(line, "%s pid=%d", now_text, holder.box->pid);
	print_quoted(line, "program", holder.box->program);
	print_quoted(line, "path", turn->path);
	print_quoted(line, "pool", turn->slot.pool);
	fprintf(line, " waited_s=%.3f held_s=%.3f bytes=%llu end=%s", turn->waited_s, turn->held_s,
		(unsigned long long)turn->bytes, turn->end);
	if (turn->error)
		print_quoted(line, "error", turn->error);
	fputc('\n', line);
}

/* Writes a line to the log by a single write(), because other holders write there, too. */
static void log_turn(const struct turn *turn)
{
	const char *log = getenv("IOSHAPE_PRELOAD_LOG");
	char *text = NULL;
	size_t bytes = 0;
	FILE *line = log && *log ? open_memstream(&text, &bytes) : NULL;
	int fd;

	if (!line)
		return;
	print_turn(line, turn);
	if (!fclose(line) && !strcmp(log, "syslog")) {
		syslog(LOG_USER | LOG_INFO, "ioshape-preload: %s", text);
	} else if (text) {
		fd = base_above_streams(
			open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0644));
		(void)!write(fd, text, bytes);
		close(fd);
	}
	free(text);
}

/* ---- The program ----------------------------------------------------------------------------- */

/* Tells the program that this process works, and watches whether the program does. Without a pidfd
 * the program may have ended before this process began. */
static void *beat(void *unused)
{
	const int fd = base_above_streams((int)syscall(SYS_pidfd_open, holder.box->pid, 0));
	struct pollfd program = { fd, POLLIN, 0 };

	(void)unused;
	do
		atomic_store(&holder.box->beat_ms, mailbox_now_ms());
	while (!poll(&program, 1, MAILBOX_BEAT_MS) &&
	       (fd >= 0 || !syscall(SYS_kill, holder.box->pid, 0)));
	atomic_store(&holder.ended, true);
	mailbox_wake(&holder.box->state);
	return NULL;
}

/* ---- Taking a slot --------------------------------------------------------------------------- */

static bool is_wanted(void)
{
	return atomic_load(&holder.box->state) == MAILBOX_ASKED && !atomic_load(&holder.ended);
}

static int give_up(void *user, const struct ioshape_place *place)
{
	(void)user;
	(void)place;
	return !is_wanted();
}

/* Returns whether other hosts may share the filesystem of a file. */
static bool is_shared(const char *path)
{
	static struct fs_storage storage;
	char *folder = base_directory_of(path);
	int fd = folder ? base_above_streams(open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC)) : -1;
	const bool known = fd >= 0 && !fs_look_at_storage(fd, path, "", &storage, NULL);

	free(folder);
	close(fd);
	return known && storage.remote;
}

/* Takes a slot for the program's file. Fills in why there is none. */
static struct ioshape_slot *take(struct turn *turn, struct ioshape_context *context)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot = NULL;
	const uint64_t begin_ms = mailbox_now_ms();
	int ret;

	if (!holder.box->everywhere && !is_shared(turn->path)) {
		turn->end = "local";
		return NULL;
	}
	options.path = turn->path;
	options.timeout_ms = (int64_t)holder.box->wait_ms + 1;
	options.waiting = give_up;
	if (context)
		save_name_program(context, holder.box->program, turn->path);
	ret = ioshape_slot_acquire(context, &options, &slot);
	turn->waited_s = (double)(mailbox_now_ms() - begin_ms) / 1e3;
	if (!ret) {
		ioshape_slot_get_info(slot, &turn->slot);
		/* Now, because programs rename files as soon as they have closed them. */
		turn->fd = base_above_streams(
			open(turn->path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	} else if (ret == -ECANCELED || ret == -ETIMEDOUT) {
		turn->end = "timeout";
	} else {
		turn->end = "refused";
		turn->error = ioshape_last_error()->sentence;
	}
	return slot;
}

/* ---- Holding it ------------------------------------------------------------------------------ */

/* Activity of the program in the slot so far. */
struct progress {
	uint64_t ahead;             /* bytes that it may write before it has to wait */
	uint64_t busy_ms;           /* when it last wrote */
	uint64_t pause_ms;          /* it loses the slot if it writes nothing for so long */
	unsigned ticks, busy_ticks; /* of the current window */
};

static bool is_held(void)
{
	return atomic_load(&holder.box->state) == MAILBOX_HELD && !atomic_load(&holder.ended);
}

/*
 * Allows the program to write the next bytes, as the bandwidth limits permit. Without a limit it
 * may soon write so much ahead that it need not wait for this process.
 */
static void allow(struct ioshape_slot *slot, struct progress *progress)
{
	struct mailbox *box = holder.box;
	uint64_t begin_ms;

	while (is_held() &&
	       atomic_load(&box->allowed) < atomic_load(&box->bytes) + progress->ahead) {
		begin_ms = mailbox_now_ms();
		ioshape_slot_pace(slot, PACE_BYTES);
		if (mailbox_now_ms() > begin_ms + 2)
			progress->ahead = PACE_BYTES;
		else
			progress->ahead = MIN(progress->ahead + PACE_BYTES, MOST_AHEAD);
		atomic_fetch_add(&box->allowed, PACE_BYTES);
		atomic_fetch_add(&box->grants, 1);
		mailbox_wake(&box->grants);
	}
}

/* Returns why the slot must be given back now, or NULL. */
static const char *reason_to_end(struct progress *progress, uint64_t before)
{
	struct mailbox *box = holder.box;
	const bool busy = atomic_load(&box->calls) > 0 || atomic_load(&box->bytes) != before;
	const uint64_t now_ms = mailbox_now_ms();

	if (atomic_load(&box->state) != MAILBOX_HELD)
		return "close";
	if (atomic_load(&holder.ended))
		return "exit";
	if (busy)
		progress->busy_ms = now_ms;
	if (now_ms - progress->busy_ms >= progress->pause_ms)
		return "pause";
	return NULL;
}

/* Returns whether the program writes so seldom that others should have the slot. */
static bool is_slow(struct progress *progress)
{
	const bool busy = atomic_load(&holder.box->calls) > 0;

	progress->busy_ticks += busy;
	if (++progress->ticks < WINDOW_TICKS)
		return false;
	if (progress->busy_ticks < LEAST_BUSY_TICKS)
		return true;
	progress->ticks = progress->busy_ticks = 0;
	return false;
}

/*
 * Holds the slot until there is a reason to give it back and the storage has the bytes of the file.
 * This process syncs by a descriptor of its own, so the program's fsync() still gets all errors.
 */
static void hold(struct ioshape_slot *slot, struct turn *turn, uint64_t first_byte)
{
	struct mailbox *box = holder.box;
	const uint64_t begin_ms = mailbox_now_ms();
	struct progress progress = { PACE_BYTES, begin_ms, PAUSE_MS >> box->bounces, 0, 0 };
	uint64_t tick_ms = begin_ms, before = first_byte;

	while (!turn->end) {
		allow(slot, &progress);
		mailbox_wait(&box->state, MAILBOX_HELD, TICK_MS);
		turn->end = reason_to_end(&progress, before);
		before = atomic_load(&box->bytes);
		/* The program may wake this process more often. */
		if (!turn->end && mailbox_now_ms() >= tick_ms + TICK_MS) {
			tick_ms = mailbox_now_ms();
			ioshape_slot_get_info(slot, &turn->slot);
			turn->end = turn->slot.lost ? "lost" : is_slow(&progress) ? "slow" : NULL;
		}
	}
	atomic_store(&box->paused_ms, strcmp(turn->end, "pause") ? 0 : mailbox_now_ms());
	turn->bytes = atomic_load(&box->bytes) - first_byte;
	if (strcmp(turn->end, "lost"))
		fdatasync(turn->fd);
	turn->held_s = (double)(mailbox_now_ms() - begin_ms) / 1e3;
}

/* Serves one request. */
static void serve(void)
{
	struct mailbox *box = holder.box;
	struct turn turn = { .slot = IOSHAPE_SLOT_INFO_INIT, .fd = -1 };
	const uint64_t first_byte = atomic_load(&box->bytes);
	struct ioshape_context *context; /* of its own, because it has the name of the file */
	struct ioshape_slot *slot;

	ioshape_context_open(&context, NULL);
	snprintf(turn.path, sizeof(turn.path), "%.*s", MAILBOX_PATH_BYTES - 1, box->path);
	slot = take(&turn, context);
	atomic_store(&box->allowed, first_byte);
	if (!slot)
		mailbox_move(box, MAILBOX_ASKED, MAILBOX_REFUSED);
	else if (mailbox_move(box, MAILBOX_ASKED, MAILBOX_HELD))
		hold(slot, &turn, first_byte);
	else
		turn.end = "timeout";
	ioshape_slot_free(slot);
	mailbox_move(box, MAILBOX_HELD, MAILBOX_IDLE);
	mailbox_move(box, MAILBOX_CLOSED, MAILBOX_IDLE);
	close(turn.fd);
	log_turn(&turn);
	ioshape_context_free(context);
}

/* ---- The process ----------------------------------------------------------------------------- */

static bool open_mailbox(void)
{
	struct stat found;

	if (fstat(MAILBOX_FD, &found) || found.st_size < (off_t)sizeof(*holder.box))
		return false;
	holder.box =
		mmap(NULL, sizeof(*holder.box), PROT_READ | PROT_WRITE, MAP_SHARED, MAILBOX_FD, 0);
	if (holder.box == MAP_FAILED)
		return false;
	return !strncmp(holder.box->version, MAILBOX_VERSION, sizeof(holder.box->version));
}

/* Signals stay blocked, as the library left them: this process ends when the program does. */
int main(void)
{
	pthread_t thread;
	uint64_t idle_ms = mailbox_now_ms();
	uint32_t state;

	if (!open_mailbox() || pthread_create(&thread, NULL, beat, NULL))
		return 1;
	close(MAILBOX_FD);
	while (!atomic_load(&holder.ended)) {
		state = atomic_load(&holder.box->state);
		if (state == MAILBOX_ASKED) {
			serve();
			idle_ms = mailbox_now_ms();
		} else if (state == MAILBOX_IDLE && mailbox_now_ms() > idle_ms + LEAVE_MS) {
			if (mailbox_move(holder.box, MAILBOX_IDLE, MAILBOX_ABSENT))
				break;
		} else {
			mailbox_wait(&holder.box->state, state, TICK_MS * 10);
		}
	}
	return 0;
}
