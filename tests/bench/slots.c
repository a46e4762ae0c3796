/* SPDX-License-Identifier: Apache-2.0 */
/* Commands for slots through the public functions, and their baselines. */
#define _GNU_SOURCE
#include "bench.h"

#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* Default size of a request. It is too large for the small-file bypass of the queue. */
#define USUAL_BYTES (64ull << 20)

static struct ioshape_slot *acquire(struct bench *bench, uint64_t bytes)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot;

	if (!bench->context)
		fail("open a context first");
	options.path = "/";
	options.expected_bytes = bytes;
	if (ioshape_slot_acquire(bench->context, &options, &slot))
		fail("no slot: %s", ioshape_last_error()->sentence);
	return slot;
}

static void pass(struct ioshape_slot *slot, uint64_t bytes)
{
	if (ioshape_slot_pace(slot, bytes))
		fail("a slot lets nothing pass");
}

/* Takes a slot, and holds it until `release` or the end of the process. Key: bytes=N. */
void run_acquire(struct bench *bench, const struct command *command)
{
	if (bench->slot)
		fail("a slot is held already");
	bench->slot = acquire(bench, command_number(command, "bytes", USUAL_BYTES));
	answer_number("at_s", (double)now_ns() / 1e9);
}

void run_release(struct bench *bench, const struct command *command)
{
	(void)command;
	ioshape_slot_free(bench->slot);
	bench->slot = NULL;
}

/* Takes and releases a slot `count` times. Keys: count=N bytes=N. */
void run_turns(struct bench *bench, const struct command *command)
{
	const uint64_t count = command_number(command, "count", 1);
	const uint64_t bytes = command_number(command, "bytes", USUAL_BYTES);
	struct cost cost;

	cost_begin(&cost);
	for (uint64_t i = 0; i < count; i++) {
		struct ioshape_slot *slot = acquire(bench, bytes);

		pass(slot, bytes);
		ioshape_slot_free(slot);
	}
	cost_end(&cost);
}

/* Baseline of turns with Redis: two PINGs for each of `count` turns. Keys: count=N, socket=PATH or
 * port=N. */
void run_pings(struct bench *bench, const struct command *command)
{
	const uint64_t count = command_number(command, "count", 1);
	const char *path = command_text(command, "socket");
	redisContext *server;
	struct cost cost;

	(void)bench;
	server = path ? redisConnectUnix(path) :
			redisConnect("127.0.0.1", (int)command_number(command, "port", 0));
	if (!server || server->err)
		fail("no connection: %s", server ? server->errstr : "no memory");
	/* An unmeasured PING, because the server has to accept the connection first. */
	freeReplyObject(redisCommand(server, "PING"));
	cost_begin(&cost);
	for (uint64_t i = 0; i < 2 * count; i++) {
		redisReply *reply = redisCommand(server, "PING");

		if (!reply)
			fail("no answer: %s", server->errstr);
		freeReplyObject(reply);
	}
	cost_end(&cost);
	redisFree(server);
}

/* Baseline of local turns: two pairs of flock() for each of `count` turns. Keys: count=N
 * path=FILE. */
void run_flocks(struct bench *bench, const struct command *command)
{
	const uint64_t count = command_number(command, "count", 1);
	const char *path = command_need(command, "path");
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	struct cost cost;

	(void)bench;
	if (fd < 0)
		fail("cannot open %s: %s", path, strerror(errno));
	cost_begin(&cost);
	for (uint64_t i = 0; i < 2 * count; i++) {
		if (flock(fd, LOCK_EX) || flock(fd, LOCK_UN))
			fail("cannot lock %s: %s", path, strerror(errno));
	}
	cost_end(&cost);
	close(fd);
}

/* Returns the seconds that two intervals have in common. */
static double common_s(uint64_t begin, uint64_t end, uint64_t from, uint64_t until)
{
	begin = begin > from ? begin : from;
	end = end < until ? end : until;
	return end > begin ? (double)(end - begin) / 1e9 : 0;
}

/*
 * Takes slots and holds each for `hold_us` until `until_ns`, in competition with other processes.
 * Answers how long slots were held between `from_ns` and `until_ns`. Keys: from_ns=T until_ns=T
 * hold_us=N bytes=N.
 */
void run_contend(struct bench *bench, const struct command *command)
{
	const uint64_t from = command_number(command, "from_ns", 0);
	const uint64_t until = command_number(command, "until_ns", 0);
	const uint64_t bytes = command_number(command, "bytes", USUAL_BYTES);
	const useconds_t hold_us = (useconds_t)command_number(command, "hold_us", 1000);
	double held_s = 0;

	while (now_ns() < until) {
		struct ioshape_slot *slot = acquire(bench, bytes);
		const uint64_t began = now_ns();

		pass(slot, bytes);
		usleep(hold_us);
		held_s += common_s(began, now_ns(), from, until);
		ioshape_slot_free(slot);
	}
	answer_number("held_s", held_s);
}

/* Saves repeatedly for `seconds`. Keys: path=FILE seconds=N. */
void run_stream(struct bench *bench, const struct command *command)
{
	const uint64_t seconds = command_number(command, "seconds", 1);
	const char *path = command_need(command, "path");
	const uint64_t began = now_ns();

	if (!bench->context)
		fail("open a context first");
	while (now_ns() - began < seconds * 1000000000) {
		if (ioshape_save_tensors(bench->context, path, bench->workload.tensors,
					 bench->workload.count, NULL, NULL))
			fail("cannot save: %s", ioshape_last_error()->sentence);
	}
}
