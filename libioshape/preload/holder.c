/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The holder: takes slots for a program that runs with the preload library, and outlives it by
 * moments. Descriptor MAILBOX_FD is their shared memory. The slot is free when the program closes
 * its file or ends, pauses, or computes more than it writes.
 */
#define _GNU_SOURCE
#include "fs/fs.h"
#include "preload/mailbox.h"

#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
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
	int program_fd; /* pidfd of the program; -1: the kernel has none */
	_Atomic uint32_t ended; /* 1 when the program has ended */
	_Atomic uint32_t lost;  /* 1 when the slot is lost */
	struct ioshape_context *context;
	bool known, shared; /* whether the filesystem was looked at, and whether it is shared */
} holder = { .program_fd = -1 };

/* A request and what became of it, for the log. */
struct turn {
	char path[MAILBOX_PATH_BYTES];
	char pool[128];
	char error[512];
	double waited_s, held_s;
	uint64_t bytes;
	const char *end;
};

/* ---- Log ------------------------------------------------------------------------------------- */

/* Appends a quoted text, with unsafe characters as \xNN. */
static void print_quoted(FILE *line, const char *text)
{
	fputc('"', line);
	for (; *text; text++) {
		const unsigned char c = (unsigned char)*text;

		if (c < ' ' || c == '"' || c == '\\' || c == 0x7f)
			fprintf(line, "\\x%02x", c);
		else
			fputc(c, line);
	}
	fputc('"', line);
}

static void print_turn(FILE *line, const struct turn *turn)
{
	fprintf(line, "pid=%d program=", holder.box->pid);
	print_quoted(line, holder.box->program);
	fputs(" path=", line);
	print_quoted(line, turn->path);
	fputs(" pool=", line);
	print_quoted(line, turn->pool);
	fprintf(line, " waited_s=%.3f held_s=%.3f bytes=%llu end=%s", turn->waited_s, turn->held_s,
		(unsigned long long)turn->bytes, turn->end);
	if (*turn->error) {
		fputs(" error=", line);
		print_quoted(line, turn->error);
	}
}

/* Appends a line to a file by a single write(), because other holders do so, too. */
static void append(const char *path, const char *line)
{
	char text[MAILBOX_PATH_BYTES * 5], time_text[32];
	const time_t now = time(NULL);
	struct tm utc;
	int fd, bytes;

	strftime(time_text, sizeof(time_text), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
	bytes = snprintf(text, sizeof(text), "%s %s\n", time_text, line);
	fd = base_above_streams(
		open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0644));
	if (fd < 0)
		return;
	if (write(fd, text, (size_t)bytes) != bytes)
		close(fd); /* nowhere to report it */
	else
		close(fd);
}

static void log_turn(const struct turn *turn)
{
	const char *log = getenv("IOSHAPE_PRELOAD_LOG");
	char *text = NULL;
	size_t bytes;
	FILE *line;

	if (!log || !*log)
		return;
	line = open_memstream(&text, &bytes);
	if (!line)
		return;
	print_turn(line, turn);
	if (!fclose(line)) {
		if (strcmp(log, "syslog"))
			append(log, text);
		else
			syslog(LOG_USER | LOG_INFO, "ioshape-preload: %s", text);
	}
	free(text);
}

/* ---- The program ----------------------------------------------------------------------------- */

static bool program_has_ended(int wait_ms)
{
	struct pollfd program = { holder.program_fd, POLLIN, 0 };

	if (holder.program_fd >= 0)
		return poll(&program, 1, wait_ms) > 0;
	poll(NULL, 0, wait_ms);
	return kill(holder.box->pid, 0) && errno == ESRCH;
}

/* Tells the program that this process works, and watches whether the program does. */
static void *beat(void *unused)
{
	bool ended;

	(void)unused;
	do {
		atomic_store(&holder.box->beat_ms, mailbox_now_ms());
		ended = program_has_ended(MAILBOX_BEAT_MS);
	} while (!ended);
	atomic_store(&holder.ended, 1);
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

static void note_loss(void *user, const char *why)
{
	(void)user;
	(void)why;
	atomic_store(&holder.lost, 1);
	mailbox_wake(&holder.box->state);
}

/* Returns whether other hosts may share the filesystem of a file. */
static bool is_shared(const char *path)
{
	static struct fs_storage storage;
	char *folder;
	int fd;

	if (holder.known)
		return holder.shared;
	folder = base_directory_of(path);
	fd = folder ? base_above_streams(open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC)) : -1;
	free(folder);
	if (fd < 0)
		return false;
	holder.known = !fs_look_at_storage(fd, path, "", &storage, NULL);
	holder.shared = holder.known && storage.remote;
	close(fd);
	return holder.shared;
}

/* Takes a slot for the program's file. Fills in why there is none. */
static struct ioshape_slot *take(struct turn *turn)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot_info info = IOSHAPE_SLOT_INFO_INIT;
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
	options.lost = note_loss;
	atomic_store(&holder.lost, 0);
	ret = holder.context ? ioshape_slot_acquire(holder.context, &options, &slot) : -EINVAL;
	turn->waited_s = (double)(mailbox_now_ms() - begin_ms) / 1e3;
	if (!ret && !ioshape_slot_get_info(slot, &info)) {
		snprintf(turn->pool, sizeof(turn->pool), "%s", info.pool);
		return slot;
	}
	turn->end = ret == -ECANCELED || ret == -ETIMEDOUT ? "timeout" : "refused";
	if (!strcmp(turn->end, "refused"))
		snprintf(turn->error, sizeof(turn->error), "%s", ioshape_last_error()->sentence);
	return NULL;
}

/* ---- Holding it ------------------------------------------------------------------------------ */

/* What the program did in the slot so far. */
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
 * Allows the program to write the next bytes, as the bandwidth limits permit. Without a limit it may
 * soon write so much ahead that it need not wait for this process.
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
	if (atomic_load(&holder.lost))
		return "lost";
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
 * Waits until the storage has the bytes of the program's file. This process opens the file itself,
 * so the program's own fsync() still gets all errors.
 */
static void sync_file(const char *path)
{
	int fd = base_above_streams(open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));

	if (fd < 0)
		return;
	fdatasync(fd);
	close(fd);
}

/* Holds the slot until there is a reason to give it back. */
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
			turn->end = is_slow(&progress) ? "slow" : NULL;
		}
	}
	atomic_store(&box->paused_ms, strcmp(turn->end, "pause") ? 0 : mailbox_now_ms());
	turn->bytes = atomic_load(&box->bytes) - first_byte;
	if (strcmp(turn->end, "lost"))
		sync_file(turn->path);
	turn->held_s = (double)(mailbox_now_ms() - begin_ms) / 1e3;
}

/* Serves one request. */
static void serve(void)
{
	struct mailbox *box = holder.box;
	struct turn turn = { .end = NULL };
	const uint64_t first_byte = atomic_load(&box->bytes);
	struct ioshape_slot *slot;

	snprintf(turn.path, sizeof(turn.path), "%.*s", MAILBOX_PATH_BYTES - 1, box->path);
	slot = take(&turn);
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
	log_turn(&turn);
}

/* ---- The process ----------------------------------------------------------------------------- */

/* Undoes what the program did with signals, which its children inherit. */
static void reset_signals(void)
{
	sigset_t none;

	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static bool open_mailbox(void)
{
	struct stat found;

	if (fstat(MAILBOX_FD, &found) || found.st_size < (off_t)sizeof(*holder.box))
		return false;
	holder.box = mmap(NULL, sizeof(*holder.box), PROT_READ | PROT_WRITE, MAP_SHARED, MAILBOX_FD,
			  0);
	if (holder.box == MAP_FAILED)
		return false;
	return !strncmp(holder.box->version, MAILBOX_VERSION, sizeof(holder.box->version));
}

int main(void)
{
	pthread_t thread;
	uint64_t idle_ms;
	uint32_t state;

	reset_signals();
	if (!open_mailbox())
		return 2;
	close(MAILBOX_FD);
	holder.program_fd =
		base_above_streams((int)syscall(SYS_pidfd_open, holder.box->pid, 0));
	ioshape_context_open(&holder.context, NULL);
	if (pthread_create(&thread, NULL, beat, NULL))
		return 1;
	idle_ms = mailbox_now_ms();
	while (!atomic_load(&holder.ended)) {
		state = atomic_load(&holder.box->state);
		if (state == MAILBOX_ASKED) {
			serve();
			idle_ms = mailbox_now_ms();
		} else if (state == MAILBOX_IDLE && mailbox_now_ms() - idle_ms > LEAVE_MS) {
			if (mailbox_move(holder.box, MAILBOX_IDLE, MAILBOX_ABSENT))
				break;
		} else {
			mailbox_wait(&holder.box->state, state, TICK_MS * 10);
		}
	}
	ioshape_context_free(holder.context);
	return 0;
}
