/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client of tests/support/harm/chaos.py. Takes turns or saves files until SIGTERM, and logs what
 * it observes: one line and one write() for each event, so that a kill leaves whole lines. Times
 * are CLOCK_MONOTONIC in ns, which all processes of a host share.
 *
 *   chaos-client turns LOG NAME SEED HOLD_MS WEIGHT large|mixed
 *   chaos-client saves LOG NAME SEED FILE LARGE_BYTES PAUSE_MS
 *   chaos-client crowd LOG NAME SEED FOLDER CHECKPOINTS NUMBER ALIKE CLIENTS LARGE_BYTES PAUSE_MS
 *   chaos-client group LOG NAME SEED CHECKPOINTS TOKEN STORE MODE RANK RANKS LARGE_BYTES PAUSE_MS
 *   chaos-client last LOG NAME SEED FOLDER and the arguments of a rank
 *   chaos-client check FILE...        verify files, bit by bit
 *   chaos-client checkpoints DIR      verify the checkpoints of a group
 *
 * The coordinator and other settings come from the environment, as in any program that uses the
 * library.
 *
 * A line is "TIME NAME EVENT key=value ...; TEXT". A turn is held from before "got" until after
 * "release" or "lost".
 */
#define _GNU_SOURCE
#include "support/chaos_client.h"

#include "support/open_context.h"

#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)

/* Interval of progress reports, like the pieces of a real write. */
#define PIECE_MS 10u

/* Some turns are longer than a lease. */
#define LONG_MS 3000u

struct ioshape_context *context;
volatile sig_atomic_t stop;
static const char *name = "-";
static int events = -1;
static uint64_t random_state;

static void on_sigterm(int number)
{
	(void)number;
	stop = 1;
}

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t chance(uint64_t most)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return most ? random_state % most : 0;
}

uint64_t new_seed(void)
{
	chance(1);
	return random_state >> 16;
}

void give_up(const char *what, const char *why)
{
	fprintf(stderr, "chaos-client %s: %s: %s\n", name, what, why);
	_exit(3);
}

void note(uint64_t at_ns, const char *format, ...)
{
	char line[900];
	va_list arguments;
	int used, more;

	used = snprintf(line, sizeof(line), "%" PRIu64 " %s ", at_ns, name);
	va_start(arguments, format);
	more = vsnprintf(line + used, sizeof(line) - (size_t)used - 1, format, arguments);
	va_end(arguments);
	used += more < (int)sizeof(line) - used - 1 ? more : (int)sizeof(line) - used - 2;
	line[used++] = '\n';
	if (write(events, line, (size_t)used) != used)
		give_up("its log", strerror(errno));
}

void sleep_ms(uint64_t ms)
{
	struct timespec time = { .tv_sec = (time_t)(ms / 1000),
				 .tv_nsec = (long)(ms % 1000 * 1000000) };

	nanosleep(&time, NULL);
}

/* Save that this thread is writing. */
static _Thread_local struct span *writing;

static void on_log(void *user, enum ioshape_log_level level, const char *message)
{
	const char *slot = strstr(message, ", slot ");

	(void)user;
	if (level != IOSHAPE_LOG_DEBUG || !slot || !writing)
		return;
	writing->fence = strtoull(slot + strlen(", slot "), NULL, 10);
	writing->express = strstr(slot, ", small-file bypass") != NULL;
	writing->lost = strstr(slot, ", lost before the save ended") != NULL;
}

static void open_context(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	const char *lease = getenv("CHAOS_LEASE_MS");
	const uint32_t lease_ms = lease ? (uint32_t)strtoul(lease, NULL, 10) : 0;

	/*
	 * A direct save hands its slot on before its end, which other processes cannot see. A
	 * buffered save keeps it until its bytes are on the disk.
	 */
	options.direct = IOSHAPE_DIRECT_OFF;
	options.log = on_log;
	options.log_level = IOSHAPE_LOG_DEBUG;

	if (open_context_with(&context, &options,
			      (struct test_rules){ .block_bytes = 65536, .lease_ms = lease_ms }))
		give_up("no context", ioshape_last_error()->sentence);
}

static int stop_waiting(void *user, const struct ioshape_place *place)
{
	(void)user;
	(void)place;
	return stop;
}

/* ---- Turns ----------------------------------------------------------------------------------- */

static void on_lost(void *user, const char *why)
{
	note(now_ns(), "lost turn=%u; %s", *(const unsigned *)user, why);
}

static void hold(struct ioshape_slot *slot, uint64_t hold_ms)
{
	const uint64_t end_ns = now_ns() + hold_ms * 1000000;

	for (uint64_t now = now_ns(); now < end_ns && !stop; now = now_ns()) {
		uint64_t left_ms = (end_ns - now) / 1000000 + 1;

		ioshape_slot_pace(slot, MIB);
		sleep_ms(left_ms < PIECE_MS ? left_ms : PIECE_MS);
	}
}

static void take_turn(unsigned turn, uint64_t hold_ms, uint32_t weight, bool mixed)
{
	static const uint64_t sizes[] = { 64 * MIB, 64 * MIB, 0, 1 * MIB };
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot_info info = { .size = sizeof(info) };
	struct ioshape_slot *slot;
	uint64_t held_ns;
	int ret;

	options.weight = weight;
	options.expected_bytes = sizes[mixed ? chance(4) : 0];
	options.waiting = stop_waiting;
	options.lost = on_lost;
	options.lost_user = &turn;
	note(now_ns(), "ask turn=%u", turn);
	ret = ioshape_slot_acquire(context, &options, &slot);
	held_ns = now_ns();
	if (ret) {
		note(held_ns, "%s turn=%u code=%d; %s", ret == -ECANCELED ? "gave-up" : "fail",
		     turn, ret, ioshape_last_error()->sentence);
		return;
	}
	ioshape_slot_get_info(slot, &info);
	note(held_ns, "got turn=%u fence=%" PRIu64 " by=%s express=%u weight=%u capacity=%u; %s",
	     turn, info.fence, info.coordinator, info.bypass, weight, info.capacity, info.note);
	hold(slot, hold_ms);
	note(now_ns(), "release turn=%u", turn);
	ioshape_slot_free(slot);
	note(now_ns(), "free turn=%u", turn);
}

static void take_turns(uint64_t hold_ms, uint32_t weight, bool mixed)
{
	const uint64_t long_ms = 30 * hold_ms < LONG_MS ? 30 * hold_ms : LONG_MS;

	for (unsigned turn = 0; !stop; turn++) {
		uint64_t most_ms = chance(8) || long_ms < hold_ms ? hold_ms : long_ms;

		take_turn(turn, chance(most_ms + 1), weight, mixed);
		/* Pauses at random, because a coordinator without clients works differently. */
		if (!chance(8))
			sleep_ms(chance(2 * hold_ms + 1));
	}
}

/* ---- Saves ----------------------------------------------------------------------------------- */

int on_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct span *span = user;

	(void)done;
	(void)total;
	writing = span;
	if (phase == IOSHAPE_PHASE_PLAN && !span->begin_ns)
		span->begin_ns = now_ns();
	if (phase == IOSHAPE_PHASE_WRITE || phase == IOSHAPE_PHASE_SYNC)
		span->end_ns = now_ns();
	return phase == IOSHAPE_PHASE_WAIT && stop;
}

void note_asked(unsigned turn, const char *path, uint64_t seed)
{
	note(now_ns(), "ask turn=%u step=%" PRIu64 " file=%s", turn, seed, path);
}

void note_saved(unsigned turn, int ret, const struct ioshape_report *report,
		const struct span *span)
{
	writing = NULL;
	if (ret)
		note(now_ns(), "%s turn=%u code=%d; %s",
		     ret == -ECANCELED && stop ? "gave-up" : "fail", turn, ret,
		     ioshape_last_error()->sentence);
	else
		note(now_ns(),
		     "saved turn=%u fence=%" PRIu64 " by=%s express=%u lost=%u begin=%" PRIu64
		     " end=%" PRIu64 "; %s",
		     turn, span->fence, report->coordinator, span->express, span->lost,
		     span->begin_ns, span->end_ns, report->downgrades[0].sentence);
}

void save_once(unsigned turn, const char *path, size_t large_bytes)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	const uint64_t seed = new_seed();
	struct span span = { 0 };
	struct sample sample;

	sample_make(&sample, seed, large_bytes);
	options.metadata = &sample.metadata;
	options.progress = on_progress;
	options.progress_user = &span;
	options.report = &report;
	note_asked(turn, path, seed);
	note_saved(
		turn,
		ioshape_save_tensors(context, path, sample.tensors, sample.count, &options, NULL),
		&report, &span);
	sample_free(&sample);
}

static void save_files(const char *path, size_t large_bytes, uint64_t pause_ms)
{
	for (unsigned round = 0; !stop; round++) {
		save_once(round, path, (size_t)chance(large_bytes) + 4096);
		sleep_ms(chance(pause_ms + 1));
	}
}

/* ---- Verification ---------------------------------------------------------------------------- */

int check_reader(struct ioshape_reader *reader, uint64_t *seed, char *why, size_t why_bytes)
{
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_tensor_info info = { .size = sizeof(info) };
	uint64_t index, large = 0;
	struct sample sample;
	int ret = ioshape_reader_get_metadata(reader, &metadata);

	if (ret) {
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
		return ret;
	}
	if (!ioshape_reader_find_tensor(reader, "large", &index) &&
	    !ioshape_reader_get_tensor(reader, index, &info))
		large = info.bytes;
	*seed = (uint64_t)metadata.step;
	sample_make(&sample, *seed, large);
	ret = sample_check_reader(reader, &sample, why, why_bytes);
	sample_free(&sample);
	return ret;
}

int check_file(const char *path, uint64_t *seed, char *why, size_t why_bytes)
{
	struct ioshape_reader *reader;
	int ret = ioshape_reader_open(context, path, NULL, &reader);

	if (ret) {
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
		return ret;
	}
	ret = check_reader(reader, seed, why, why_bytes);
	ioshape_reader_free(reader);
	return ret;
}

static int check_files(char **paths)
{
	char why[512];
	uint64_t seed;
	int bad = 0;

	for (; *paths; paths++) {
		if (check_file(*paths, &seed, why, sizeof(why))) {
			printf("bad %s %s\n", *paths, why);
			bad = 1;
		} else {
			printf("whole %" PRIu64 " %s\n", seed, *paths);
		}
	}
	return bad;
}

/* ---- Main ------------------------------------------------------------------------------------ */

static void begin(char **argv)
{
	struct sigaction action = { .sa_handler = on_sigterm };

	events = open(argv[2], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
	if (events < 0)
		give_up(argv[2], strerror(errno));
	name = argv[3];
	random_state = strtoull(argv[4], NULL, 10) * 2 + 1;
	for (unsigned i = 0; i < 8; i++)
		chance(1);
	sigaction(SIGTERM, &action, NULL);
	open_context();
	note(now_ns(), "begin pid=%d", (int)getpid());
}

static int run(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";

	if (!strcmp(mode, "turns") && argc == 8) {
		begin(argv);
		take_turns(strtoull(argv[5], NULL, 10), (uint32_t)strtoul(argv[6], NULL, 10),
			   !strcmp(argv[7], "mixed"));
	} else if (!strcmp(mode, "saves") && argc == 8) {
		begin(argv);
		save_files(argv[5], strtoull(argv[6], NULL, 10), strtoull(argv[7], NULL, 10));
	} else if (!strcmp(mode, "crowd") || !strcmp(mode, "group") || !strcmp(mode, "last")) {
		begin(argv);
		if (crowd_run(mode, argc - 5, argv + 5))
			give_up("arguments", mode);
	} else if (!strcmp(mode, "check")) {
		open_context();
		return check_files(argv + 2);
	} else if (!strcmp(mode, "checkpoints") && argc == 3) {
		open_context();
		return crowd_check_checkpoints(argv[2]);
	} else {
		give_up("arguments", "see the beginning of chaos_client.c");
	}
	note(now_ns(), "stopped");
	return 0;
}

int main(int argc, char **argv)
{
	int ret = run(argc, argv);

	ioshape_context_free(context);
	if (events >= 0)
		note(now_ns(), "end");
	return ret;
}
