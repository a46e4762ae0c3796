/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/stream_case.h"
#include "group/stream.h"
#include "support/scratch.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

void stream_fail(const char *sentence)
{
	fprintf(stderr, "process %d: %s (errno: %s)\n", (int)getpid(), sentence, strerror(errno));
	abort();
}

unsigned stream_slowness(void)
{
	const char *text = getenv("CK_TIMEOUT_MULTIPLIER");

	return text && atoi(text) > 1 ? (unsigned)atoi(text) : 1;
}

/* Returns how soon the death of a peer must be detected: before stream_patient gives up. */
static uint64_t stream_soon_ns(void)
{
	/* Less than the limit of wait_patiently(). */
	return base_ms_to_ns(100000) * stream_slowness();
}

static int wait_patiently(void *user, struct base_error *error)
{
	static uint64_t since;

	(void)user;
	if (!since)
		since = base_now_ns();
	if (base_now_ns() - since < base_ms_to_ns(120000) * stream_slowness())
		return 0;
	return base_fail(error, -ETIMEDOUT, "the test waited too long");
}

const struct stream_wait stream_patient = { wait_patiently, NULL };

uint64_t stream_random(uint64_t seed)
{
	uint64_t value = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15);

	value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
	return value ^ (value >> 31);
}

static uint64_t word_at(uint64_t at, uint64_t seed)
{
	return (at / 8 + seed) * UINT64_C(0x9e3779b97f4a7c15) ^ (at >> 20);
}

static uint8_t byte_at(uint64_t at, uint64_t seed)
{
	return (uint8_t)(word_at(at, seed) >> (8 * (at % 8)));
}

void stream_fill(void *into, uint64_t at, size_t bytes, uint64_t seed)
{
	uint8_t *to = into;
	size_t i = 0;

	for (; i < bytes && (at + i) % 8; i++)
		to[i] = byte_at(at + i, seed);
	for (; i + 8 <= bytes; i += 8) {
		uint64_t word = word_at(at + i, seed);

		memcpy(to + i, &word, 8);
	}
	for (; i < bytes; i++)
		to[i] = byte_at(at + i, seed);
}

bool stream_holds(const void *data, uint64_t at, size_t bytes, uint64_t seed)
{
	uint8_t wanted[4096];

	for (size_t i = 0; i < bytes; i += sizeof(wanted)) {
		const size_t step = MIN(sizeof(wanted), bytes - i);

		stream_fill(wanted, at + i, step, seed);
		if (memcmp(wanted, (const uint8_t *)data + i, step))
			return false;
	}
	return true;
}

pid_t stream_start(void (*run)(const void *argument), const void *argument)
{
	pid_t parent = getpid(), child = fork();

	STREAM_MUST(child >= 0);
	if (child)
		return child;
	/* The child dies with a test that fails. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	run(argument);
	scratch_leave_child(0);
}

void stream_expect_well(pid_t child)
{
	int status;

	STREAM_MUST(waitpid(child, &status, 0) == child);
	STREAM_MUST(WIFEXITED(status) && !WEXITSTATUS(status));
}

/* Returns whether the child sleeps, and its processor time so far in the kernel's ticks. */
static bool is_asleep(pid_t child, unsigned long *ticks)
{
	unsigned long user = 0, system = 0;
	char path[64], line[1024], state = 0;
	const char *behind_name = NULL;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)child);
	file = fopen(path, "re");
	STREAM_MUST(file);
	if (fgets(line, sizeof(line), file))
		behind_name = strrchr(line, ')');
	fclose(file);
	STREAM_MUST(behind_name &&
		    sscanf(behind_name + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
			   &state, &user, &system) == 3);
	*ticks = user + system;
	return state == 'S';
}

void stream_await_sleep(pid_t child)
{
	unsigned long ticks, before = 0;

	for (unsigned slept = 0; slept < 10; before = ticks) {
		usleep(20000);
		slept = is_asleep(child, &ticks) && ticks == before ? slept + 1 : 0;
	}
}

int stream_count_fds(void)
{
	DIR *directory = opendir("/proc/self/fd");
	int count = 0;

	STREAM_MUST(directory);
	while (readdir(directory))
		count++;
	closedir(directory);
	return count;
}

void stream_memory_open(struct stream_memory *memory, size_t bytes)
{
	void *base;

	*memory = (struct stream_memory){ .fd = base_shared_open(), .bytes = bytes };
	STREAM_MUST(memory->fd >= 0);
	STREAM_MUST(!base_shared_grow(memory->fd, memory->bytes));
	STREAM_MUST(!base_shared_map(memory->fd, 0, memory->bytes, &base));
	memory->base = base;
}

void stream_memory_close(struct stream_memory *memory)
{
	base_unmap(memory->base, memory->bytes);
	base_close(memory->fd);
}

static uint64_t piece_bytes(const struct stream_plan *plan, unsigned piece)
{
	const uint64_t dice = stream_random(plan->seed * 1000 + piece);

	if (!piece)
		return plan->most_bytes;
	/* Many small pieces, few large ones. */
	return (dice >> 8) % ((MIN(plan->most_bytes, 4 * MIB) >> (dice % 20)) + 1);
}

static uint64_t stream_plan_bytes(const struct stream_plan *plan)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < plan->pieces; i++)
		bytes += piece_bytes(plan, i);
	return bytes;
}

/* Returns an offset of shared memory that the receiver no longer reads. */
static uint64_t take_place(struct stream_memory *memory, struct stream_sender *sender, size_t bytes)
{
	if (memory->used + bytes > memory->bytes) {
		memory->used = 0;
		STREAM_MUST(!stream_sender_await_taken(sender, stream_sender_offset(sender), NULL));
	}
	memory->used += bytes;
	return memory->used - bytes;
}

void stream_send_plan(struct stream_sender *sender, const struct stream_plan *plan,
		      struct stream_memory *memory)
{
	struct base_error error = { 0 };
	uint32_t crc = 0;
	int ret = 0;

	for (unsigned i = 0; !ret && i < plan->pieces; i++) {
		const size_t bytes = piece_bytes(plan, i);
		const uint64_t place = take_place(memory, sender, bytes);
		uint8_t *data = memory->base + place;

		stream_fill(data, stream_sender_offset(sender), bytes, plan->seed);
		crc = base_crc32(crc, data, bytes);
		if (stream_random(plan->seed + i) % 3) {
			ret = stream_sender_put_shared(sender, data, place, bytes,
						       base_crc32(0, data, bytes), &error);
		} else {
			ret = stream_sender_put(sender, data, bytes, &error);
			/* The data may change as soon as it has been put. */
			memset(data, 0xee, bytes);
		}
	}
	if (!ret)
		ret = stream_sender_end(sender, crc, &error);
	if (ret)
		stream_fail(error.text);
	STREAM_MUST(sender->taken == stream_plan_bytes(plan));
}

uint64_t stream_receive_all(struct stream_receiver *receiver, uint64_t seed)
{
	struct base_error error = { 0 };
	const void *data;
	uint64_t at = 0;
	size_t bytes;

	for (;; at += bytes) {
		if (stream_receiver_next(receiver, &data, &bytes, &error))
			stream_fail(error.text);
		if (!bytes)
			return at;
		if (!stream_holds(data, at, bytes, seed))
			stream_fail("other bytes came than were sent");
	}
}

void stream_receive_plan(struct stream_receiver *receiver, const struct stream_plan *plan)
{
	uint8_t block[65536];
	const uint64_t bytes = stream_plan_bytes(plan);
	uint32_t crc = 0;

	STREAM_MUST(stream_receive_all(receiver, plan->seed) == bytes);
	for (uint64_t at = 0; at < bytes; at += sizeof(block)) {
		const size_t step = MIN(sizeof(block), bytes - at);

		stream_fill(block, at, step, plan->seed);
		crc = base_crc32(crc, block, step);
	}
	STREAM_MUST(stream_receiver_crc32(receiver) == crc);
}

/* ---- Streams that fail ----------------------------------------------------------------------- */

static uint64_t kill_in_time(struct stream_end *end, uint64_t began_ns, uint64_t killed_ns)
{
	if (killed_ns || !end->life_ns || base_now_ns() - began_ns < end->life_ns)
		return killed_ns;
	kill(end->child, SIGKILL);
	return base_now_ns();
}

static int judge_end(struct stream_end *end, int ret, uint64_t killed_ns)
{
	STREAM_MUST(!end->life_ns || base_now_ns() - killed_ns < stream_soon_ns());
	if (end->life_ns)
		waitpid(end->child, NULL, 0);
	return ret;
}

int stream_drain(struct stream_receiver *receiver, struct stream_end *end)
{
	const uint64_t began_ns = base_now_ns();
	uint64_t killed_ns = 0;
	const void *data;
	size_t bytes = 1;
	int ret = 0;

	while (!ret && bytes) {
		ret = stream_receiver_next(receiver, &data, &bytes, &end->error);
		killed_ns = kill_in_time(end, began_ns, killed_ns);
	}
	return judge_end(end, ret, killed_ns);
}

int stream_flood(struct stream_sender *sender, const struct stream_memory *shared,
		 struct stream_end *end)
{
	static const char bytes[200000];
	const uint64_t began_ns = base_now_ns();
	uint64_t killed_ns = 0;
	int ret = 0;

	while (!ret) {
		if (shared)
			ret = stream_sender_put_shared(sender, shared->base, 0, 3 * MIB + 5, 0,
						       &end->error);
		if (!ret)
			ret = stream_sender_put(sender, bytes, sizeof(bytes), &end->error);
		killed_ns = kill_in_time(end, began_ns, killed_ns);
	}
	return judge_end(end, ret, killed_ns);
}
