/* SPDX-License-Identifier: Apache-2.0 */
/* Slot pools of one host, for tests: a folder for each test, and processes that take part. */
#ifndef TESTS_SUPPORT_LOCAL_POOL_H
#define TESTS_SUPPORT_LOCAL_POOL_H

#include "slots/local.h"
#include "support/must.h"
#include "support/scratch.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char pool_folder[64];
static char pool_address[80];
static char pool_file[320]; /* slot file of the pool "p" */
static unsigned pool_warnings;
static struct slots_answer answer;
static struct base_error error;

static void note_warning(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user, (void)level, (void)message;
	pool_warnings++;
}

static void folder_setup(void)
{
	char name[LOCAL_FILE_NAME_BYTES];

	snprintf(pool_folder, sizeof(pool_folder), "/dev/shm/ioshape-test-XXXXXX");
	MUST(mkdtemp(pool_folder), "no folder");
	MUST(!chmod(pool_folder, 01777), "not for everybody");
	snprintf(pool_address, sizeof(pool_address), "local:%s", pool_folder);
	local_file_name(name, "p");
	snprintf(pool_file, sizeof(pool_file), "%s/%s", pool_folder, name);
	pool_warnings = 0;
	error.code = 0;
}

static void folder_teardown(void)
{
	char command[128];

	snprintf(command, sizeof(command), "rm -rf %s", pool_folder);
	MUST(!system(command), "the folder stays");
}

static void *open_pool(const char *name, uint32_t capacity, uint32_t lease_ms)
{
	struct slots_config config = {
		.address = pool_address,
		.identity = { .job = "job", .node = "here", .ranks = 1, .share = 100 },
		.lease_ms = lease_ms,
		.default_capacity = capacity,
		.log = { .write = note_warning, .level = IOSHAPE_LOG_WARNING },
	};
	void *pool;

	snprintf(config.pool, sizeof(config.pool), "%s", name);
	MUST(!slots_local.open(&pool, &config, &error), "%s", error.text);
	return pool;
}

static int ask(void *pool, const char *id, uint32_t weight)
{
	struct slots_request request = { .weight = weight };

	error.code = 0;
	snprintf(request.id, sizeof(request.id), "%s", id);
	return slots_local.acquire(pool, &request, &answer, &error);
}

static int look(void *pool, const char *id)
{
	struct slots_beat beat = { .passed = 0 };

	error.code = 0;
	snprintf(beat.id, sizeof(beat.id), "%s", id);
	return slots_local.beat(pool, &beat, &answer, &error);
}

static inline int give_back(void *pool, const char *id)
{
	error.code = 0;
	return slots_local.release(pool, id, 0, &error);
}

static double ms_since(uint64_t began)
{
	return (double)(base_now_ns() - began) / 1e6;
}

/*
 * Waits until it holds a slot, is no longer waiting, or the time is over, as the save layer does.
 */
static inline void wait_for_slot(void *pool, const char *id, double most_ms)
{
	const uint64_t began = base_now_ns();

	while (answer.state == SLOTS_WAITING && ms_since(began) < most_ms) {
		MUST(!slots_local.wait(pool, answer.beat_ms, &error), "%s", error.text);
		MUST(!look(pool, id), "%s", error.text);
	}
}

/* A child process that takes part in a pool, and a pipe on which it reports. */
struct player {
	pid_t pid;
	int told;
};

typedef void (*player_fn)(void (*tell)(char), const char *argument);

static int tell_fd;

static void tell_parent(char what)
{
	if (write(tell_fd, &what, 1) != 1)
		scratch_leave_child(9);
}

static inline struct player start_player(player_fn play, const char *argument)
{
	struct player player;
	int pipes[2];

	MUST(!pipe(pipes), "no pipe");
	player.pid = fork();
	MUST(player.pid >= 0, "no child");
	if (!player.pid) {
		/* The child dies with a test that fails. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(pipes[0]);
		tell_fd = pipes[1];
		play(tell_parent, argument);
		scratch_leave_child(0);
	}
	close(pipes[1]);
	player.told = pipes[0];
	return player;
}

/* Returns the next letter that the process reports; 0 when it has ended. */
static inline char hear(const struct player *player)
{
	char what = 0;

	return read(player->told, &what, 1) == 1 ? what : 0;
}

static inline int end_player(const struct player *player, int signal)
{
	int status;

	if (signal)
		kill(player->pid, signal);
	MUST(waitpid(player->pid, &status, 0) == player->pid, "lost");
	close(player->told);
	return status;
}

/* Holds a slot of "p", or waits for one, until the process is killed. */
static inline void stay_in(void (*tell)(char), const char *id)
{
	void *pool = open_pool("p", 1, 15000);

	if (ask(pool, id, 1))
		scratch_leave_child(8);
	tell(answer.state == SLOTS_HOLDING ? 'h' : 'w');
	for (;;)
		pause();
}

#endif
