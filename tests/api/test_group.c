/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that save together: real processes, in every mode, and what becomes of it when some fail. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_RANKS 8
#define MIB ((size_t)1 << 20)

/* ---- Bytes between ranks, over sockets made before the fork ---------------------------------- */

static int wires[MOST_RANKS][MOST_RANKS][2]; /* [from][to]: reading end, writing end */

static int move_bytes(int fd, void *data, size_t bytes, uint32_t timeout_ms, bool out)
{
	struct pollfd ready = { .fd = fd, .events = out ? POLLOUT : POLLIN };
	ssize_t moved;

	while (bytes) {
		if (poll(&ready, 1, (int)timeout_ms) <= 0)
			return -ETIMEDOUT;
		moved = out ? send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) :
			      recv(fd, data, bytes, MSG_DONTWAIT);
		if (moved < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (moved <= 0)
			return -ECONNRESET;
		data = (char *)data + moved;
		bytes -= (size_t)moved;
	}
	return 0;
}

static int wire_send(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		     uint32_t timeout_ms)
{
	const uint32_t *rank = user;

	(void)tag;
	return move_bytes(wires[*rank][to][1], (void *)(uintptr_t)data, bytes, timeout_ms, true);
}

static int wire_receive(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			uint32_t timeout_ms)
{
	const uint32_t *rank = user;

	(void)tag;
	return move_bytes(wires[from][*rank][0], into, bytes, timeout_ms, false);
}

/* Only the ends of this rank stay open: whoever dies closes his. */
static void keep_own_wires(uint32_t rank)
{
	for (uint32_t from = 0; from < MOST_RANKS; from++) {
		for (uint32_t to = 0; to < MOST_RANKS; to++) {
			if (to != rank)
				close(wires[from][to][0]);
			if (from != rank)
				close(wires[from][to][1]);
		}
	}
}

/* ---- Ranks ----------------------------------------------------------------------------------- */

struct scene {
	uint32_t ranks, nodes;
	enum ioshape_mode mode;
	enum ioshape_board board;
	bool background;
	size_t bytes;      /* of a rank's large tensor */
	size_t more_bytes; /* of the last rank's */
	uint64_t steps;
	uint32_t keep_last;
	uint32_t deadline_ms;
	bool wired;
	const char *layout; /* that it comes to */
};

struct member {
	const struct scene *scene;
	uint32_t rank;
	struct ioshape_context *context;
	struct ioshape_group *group;
};

static uint64_t seed_of(uint32_t rank, uint64_t step)
{
	return rank * 1000 + step;
}

static void make_sample(struct sample *sample, const struct scene *scene, uint32_t rank,
			uint64_t step)
{
	sample_make(sample, seed_of(rank, step),
		    rank + 1 == scene->ranks && scene->more_bytes ? scene->more_bytes :
								    scene->bytes);
}

static void open_member(struct member *member)
{
	static struct ioshape_comm comm = { sizeof(comm), NULL, wire_send, wire_receive, NULL };
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	const struct scene *scene = member->scene;
	char node[32];
	int ret;

	member->context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	snprintf(node, sizeof(node), "n%u", member->rank * scene->nodes / scene->ranks);
	comm.user = &member->rank;
	options.rank = member->rank;
	options.ranks = scene->ranks;
	options.local_ranks = scene->ranks;
	options.mode = scene->mode;
	options.board = scene->board;
	options.node = node;
	options.comm = scene->wired ? &comm : NULL;
	options.token = scratch_directory();
	options.deadline_ms = scene->deadline_ms ? scene->deadline_ms : 20000;
	options.keep_last = scene->keep_last;
	ret = ioshape_group_open(member->context, scratch_path("checkpoints"), &options,
				 &member->group);
	ck_assert_msg(!ret, "rank %u: %s", member->rank, ioshape_context_message(member->context));
}

static int save_step(struct member *member, uint64_t step, struct ioshape_report *report,
		     char *why, size_t why_bytes)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *save;
	struct sample sample;
	int ret;

	make_sample(&sample, member->scene, member->rank, step);
	options.metadata = &sample.metadata;
	if (member->scene->background) {
		ret = ioshape_group_save_tensors_async(member->group, step, sample.tensors,
						       sample.count, &options, &save);
		if (!ret) {
			sample_spoil(&sample);
			ret = ioshape_save_wait(save, -1);
			snprintf(why, why_bytes, "%s", ioshape_save_message(save));
			ioshape_save_report(save, report);
			ioshape_save_free(save);
			sample_free(&sample);
			return ret;
		}
	} else {
		options.report = report;
		ret = ioshape_group_save_tensors(member->group, step, sample.tensors, sample.count,
						 &options);
	}
	snprintf(why, why_bytes, "%s", ret ? ioshape_context_message(member->context) : "");
	sample_free(&sample);
	return ret;
}

static void close_member(struct member *member)
{
	ioshape_group_free(member->group);
	ioshape_context_free(member->context);
}

static int run_well(struct member *member)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	uint64_t latest = 0;
	char why[1024];
	int ret;

	open_member(member);
	for (uint64_t step = 1; step <= member->scene->steps; step++) {
		ret = save_step(member, step, &report, why, sizeof(why));
		if (ret) fprintf(stderr, "XX rank %u: %s\n", member->rank, why);
		ck_assert_msg(!ret, "rank %u: %s", member->rank, why);
		ck_assert_str_eq(report.layout, member->scene->layout);
		ck_assert_uint_eq(report.ranks, member->scene->ranks);
		ck_assert_uint_gt(report.generation_bytes, member->scene->ranks * member->scene->bytes);
	}
	ck_assert_int_eq(ioshape_group_latest(member->group, &latest), 0);
	ck_assert_uint_eq(latest, member->scene->steps);
	close_member(member);
	return 0;
}

static pid_t start(const struct scene *scene, uint32_t rank, int (*run)(struct member *))
{
	pid_t child = fork();

	ck_assert_int_ge(child, 0);
	if (!child) {
		struct member member = { .scene = scene, .rank = rank };

		keep_own_wires(rank);
		scratch_leave_child(run(&member));
	}
	return child;
}

static void run_all(const struct scene *scene, int (*run)(struct member *), int expected[MOST_RANKS])
{
	pid_t children[MOST_RANKS];
	int status;

	for (uint32_t rank = 0; rank < scene->ranks; rank++)
		children[rank] = start(scene, rank, run);
	for (uint32_t rank = 0; rank < MOST_RANKS; rank++) {
		for (uint32_t to = 0; to < MOST_RANKS; to++) {
			close(wires[rank][to][0]);
			close(wires[rank][to][1]);
		}
	}
	for (uint32_t rank = 0; rank < scene->ranks; rank++) {
		ck_assert_int_eq(waitpid(children[rank], &status, 0), children[rank]);
		if (expected && expected[rank] < 0)
			ck_assert_msg(WIFSIGNALED(status), "rank %u", rank);
		else
			ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status),
				      "rank %u: status %#x", rank, (unsigned)status);
	}
}

static void setup(void)
{
	scratch_setup();
	for (uint32_t from = 0; from < MOST_RANKS; from++) {
		for (uint32_t to = 0; to < MOST_RANKS; to++) {
			int pair[2];

			ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
			wires[from][to][0] = pair[0];
			wires[from][to][1] = pair[1];
		}
	}
}

/* ---- Looking at what there is ---------------------------------------------------------------- */

static void check_generation(const struct scene *scene, uint64_t step)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_generation *generation;
	struct ioshape_reader *reader;
	struct sample sample;
	char why[1024];
	int ret;

	ret = ioshape_generation_open(context, scratch_path("checkpoints"), step, &generation);
	ck_assert_msg(!ret, "%s", ioshape_context_message(context));
	for (uint32_t rank = 0; rank < scene->ranks; rank++) {
		ret = ioshape_generation_reader(generation, rank, NULL, &reader);
		ck_assert_msg(!ret, "%s", ioshape_context_message(context));
		make_sample(&sample, scene, rank, step);
		ret = sample_check_reader(reader, &sample, why, sizeof(why));
		ck_assert_msg(!ret, "rank %u: %s", rank, why);
		sample_free(&sample);
		ioshape_reader_free(reader);
	}
	ret = ioshape_generation_verify(generation, NULL, NULL);
	ck_assert_msg(!ret, "%s", ioshape_context_message(context));
	ioshape_generation_free(generation);
	ioshape_context_free(context);
}

/* ---- Everything is well ---------------------------------------------------------------------- */

static const struct scene good[] = {
	{ .ranks = 1, .nodes = 1, .layout = "each" },
	{ .ranks = 3, .nodes = 1, .mode = IOSHAPE_MODE_EACH, .layout = "each" },
	{ .ranks = 4, .nodes = 1, .layout = "node" },
	{ .ranks = 4, .nodes = 1, .layout = "node", .background = true },
	{ .ranks = 4, .nodes = 2, .mode = IOSHAPE_MODE_NODE, .layout = "node", .background = true },
	{ .ranks = 4, .nodes = 1, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0" },
	{ .ranks = 5, .nodes = 2, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0", .wired = true },
	{ .ranks = 6, .nodes = 3, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0", .wired = true,
	  .background = true },
	/* More than all staging memory; one rank has much more than the others. */
	{ .ranks = 3, .nodes = 1, .layout = "node", .background = true, .more_bytes = 80 * MIB },
	{ .ranks = 3, .nodes = 1, .layout = "node", .more_bytes = 80 * MIB },
	{ .ranks = 3, .nodes = 3, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0", .wired = true,
	  .more_bytes = 80 * MIB, .background = true },
};

START_TEST(saves_and_loads)
{
	static const enum ioshape_board boards[] = { IOSHAPE_BOARD_AUTO };
	struct scene scene = good[_i % (int)(sizeof(good) / sizeof(*good))];

	scene.board = boards[0];
	scene.bytes = 3 * MIB;
	scene.steps = 2;
	run_all(&scene, run_well, NULL);
	for (uint64_t step = 1; step <= scene.steps; step++)
		check_generation(&scene, step);
	/* Nothing else is left in there. */
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), scene.steps);
}
END_TEST

START_TEST(keeps_as_many_as_asked)
{
	const struct scene scene = {
		.ranks = 3, .nodes = 1, .layout = "node", .bytes = MIB, .steps = 5, .keep_last = 2,
	};

	run_all(&scene, run_well, NULL);
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), 2);
	check_generation(&scene, 4);
	check_generation(&scene, 5);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("group");
	TCase *tests = tcase_create("saves");

	tcase_set_timeout(tests, 60);
	tcase_add_checked_fixture(tests, setup, scratch_teardown);
	tcase_add_loop_test(tests, saves_and_loads, 0, sizeof(good) / sizeof(*good));
	tcase_add_test(tests, keeps_as_many_as_asked);
	suite_add_tcase(suite, tests);
	return check_main(suite);
}
