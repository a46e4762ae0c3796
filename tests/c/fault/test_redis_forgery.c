/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A neighbour with the documented Redis user forges messages of another user's group. The ranks are
 * real and meet through a real server.
 */
#define _GNU_SOURCE
/* Included, because the functions that seal messages are static. */
#include "group/group.h"
#include "group/store_redis.c"
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <ioshape/group.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2u
#define STEP 1u
#define TOKEN "somebody's job"
/* Limit for calls that must not hang, generous enough for any machine. */
#define PATIENCE_MS 60000u

static struct redis_server server;
static char address[160], directory[512], evil[512], store_name[17];

static void setup(void)
{
	char text[600];

	scratch_setup();
	redis_server_init(&server);
	redis_server_option(&server, "--aclfile", IOSHAPE_USERS_ACL);
	redis_server_start(&server);
	/* Commands of this program are sent as the neighbour. */
	server.user = "ioshape";
	server.password = "CHANGE-THIS";
	snprintf(address, sizeof(address), "redis://ioshape:CHANGE-THIS@127.0.0.1:%u", server.port);
	snprintf(directory, sizeof(directory), "%s", scratch_path("run"));
	snprintf(evil, sizeof(evil), "%s", scratch_path("evil"));
	ck_assert(!mkdir(evil, 0777));
	/* The name that group.c derives from what any user can know. */
	snprintf(text, sizeof(text), "%s\n%s\n%u\n%u", TOKEN, directory, RANKS,
		 GROUP_MESSAGES_FORMAT);
	snprintf(store_name, sizeof(store_name), "%016llx",
		 (unsigned long long)base_hash_text(text));
}

static void teardown(void)
{
	redis_server_free(&server);
	scratch_teardown();
}

static struct test_case tests = { .name = "redis_forgery", .setup = setup, .teardown = teardown };

/* ---- Ranks ----------------------------------------------------------------------------------- */

struct rank {
	pid_t pid;
	int go; /* the rank saves when it reads a byte from this pipe */
};

static int save(uint32_t rank, uint32_t deadline_ms, int go)
{
	struct ioshape_context_options context_options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	static float weights[1024];
	const int64_t shape[] = { 1024 };
	const struct ioshape_tensor tensors[] = {
		{ "weights", IOSHAPE_FLOAT32, 1, shape, NULL, weights },
	};
	struct ioshape_context *context;
	struct ioshape_group *group;
	char byte;
	int ret;

	context_options.coordinator = address;
	context_options.pool = "scratch";
	options.rank = rank;
	options.ranks = RANKS;
	options.mode = IOSHAPE_MODE_EACH;
	options.token = TOKEN;
	options.deadline_ms = deadline_ms;
	ret = open_context_with(&context, &context_options, (struct test_rules){ .lease_ms = 900 });
	if (!ret)
		ret = ioshape_group_open(context, directory, &options, &group);
	if (ret || read(go, &byte, 1) != 1) {
		fprintf(stderr, "rank %u: %s\n", rank, ioshape_last_error()->sentence);
		return 100;
	}
	ret = ioshape_group_save_tensors(group, STEP, tensors, 1, NULL, NULL);
	/* No clean end of the group, because the other rank would be waited for. */
	return -ret;
}

static struct rank start(uint32_t rank, uint32_t deadline_ms)
{
	struct rank started;
	int pipes[2];

	ck_assert(!pipe(pipes));
	started.pid = fork();
	ck_assert_int_ge(started.pid, 0);
	if (!started.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(pipes[1]);
		scratch_leave_child(save(rank, deadline_ms, pipes[0]));
	}
	close(pipes[0]);
	started.go = pipes[1];
	return started;
}

static void let_save(const struct rank *rank)
{
	ck_assert_int_eq(write(rank->go, "", 1), 1);
}

/* Returns the exit code of the rank; -EINPROGRESS if it still runs after `most_ms`. */
static int code_of(struct rank *rank, uint32_t most_ms)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(most_ms);
	int status;

	while (!waitpid(rank->pid, &status, WNOHANG)) {
		if (base_now_ns() >= end_ns)
			return -EINPROGRESS;
		poll(NULL, 0, 10);
	}
	close(rank->go);
	return WIFEXITED(status) ? -WEXITSTATUS(status) : -EINTR;
}

/* ---- The neighbour --------------------------------------------------------------------------- */

static void list_of(char list[SLOTS_MESSAGES_LIST_BYTES], const char *scope)
{
	snprintf(list, SLOTS_MESSAGES_LIST_BYTES, "%s:%s", store_name, scope);
}

/* Waits for a message of at least so many bytes. Returns it, to be freed. */
static redisReply *read_message(const char *scope, const char *name, size_t least)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(PATIENCE_MS);
	char list[SLOTS_MESSAGES_LIST_BYTES];
	redisReply *reply;

	list_of(list, scope);
	for (;;) {
		reply = redis_server_say(&server, "HGET {ios:scratch}:store:%s %s", list, name);
		if (reply->type == REDIS_REPLY_STRING && reply->len >= least)
			return reply;
		ck_assert_msg(reply->type != REDIS_REPLY_ERROR, "%s", reply->str);
		freeReplyObject(reply);
		ck_assert_uint_lt(base_now_ns(), end_ns);
		poll(NULL, 0, 10);
	}
}

static void write_message(const char *scope, const char *name, const void *bytes, size_t count)
{
	char list[SLOTS_MESSAGES_LIST_BYTES];

	list_of(list, scope);
	redis_server_tell(&server, "HSET {ios:scratch}:store:%s %s %b", list, name, bytes, count);
}

/* Stores the scope "r<id>-<end>". The group's ID is the first number of the roster. */
static void find_scope(char scope[STORE_NAME_BYTES], const char *end)
{
	redisReply *roster = read_message("meeting", "roster-0", BASE_MAC_BYTES + 9);

	snprintf(scope, STORE_NAME_BYTES, "r%016llx-%s",
		 (unsigned long long)base_get_le((uint8_t *)roster->str + BASE_MAC_BYTES, 8), end);
	freeReplyObject(roster);
}

/* Returns a plan that says that all is well and that ranks are to write to `evil`. */
static struct base_buffer forged_plan(void)
{
	struct group_planned ranks[RANKS] = { 0 };
	struct group_plan plan = {
		.mode = IOSHAPE_MODE_EACH,
		.alignment = 4096,
		.total_bytes = 8192,
		.count = RANKS,
		.ranks = ranks,
	};
	struct group_body note = { 0 };

	snprintf(plan.attempt, sizeof(plan.attempt), "%s", evil);
	for (uint32_t rank = 0; rank < RANKS; rank++)
		ranks[rank] = (struct group_planned){ .bytes = 4096, .same = rank, .kept = rank };
	group_write_message(&group_plans[0], &note, &plan);
	ck_assert(!note.failed);
	return note.bytes;
}

static struct base_buffer forged_verdict(void)
{
	struct group_verdict verdict = { .checkpoint_bytes = 8192 };
	struct group_body note = { 0 };

	group_write_message(&group_verdict, &note, &verdict);
	ck_assert(!note.failed);
	return note.bytes;
}

/* Stores a message that is sealed with this secret; NULL: with a guess. */
static void forge(const struct redis_store *secret, const char *scope, const char *name,
		  struct base_buffer note)
{
	static const struct redis_store guessed;
	struct base_buffer sealed = { 0 };
	char list[SLOTS_MESSAGES_LIST_BYTES];

	list_of(list, scope);
	ck_assert(!seal(secret ? secret : &guessed, list, name, note.data, note.bytes, &sealed));
	write_message(scope, name, sealed.data, sealed.bytes);
	base_buffer_free(&sealed);
	base_buffer_free(&note);
}

/* ---- Tests ----------------------------------------------------------------------------------- */

TEST(tests, a_forged_plan_and_verdict_are_no_messages)
{
	struct rank zero = start(0, PATIENCE_MS), one = start(1, PATIENCE_MS);
	char scope[STORE_NAME_BYTES];

	let_save(&one);
	find_scope(scope, "0");
	freeReplyObject(read_message(scope, "want-1", 1));
	forge(NULL, scope, "plan-0", forged_plan());
	forge(NULL, scope, "verdict-0", forged_verdict());
	ck_assert_int_eq(code_of(&one, 1000), -EINPROGRESS);
	ck_assert_uint_eq(scratch_entries(evil), 0);
	/* The save succeeds nevertheless. */
	let_save(&zero);
	ck_assert_int_eq(code_of(&one, PATIENCE_MS), 0);
	ck_assert_int_eq(code_of(&zero, PATIENCE_MS), 0);
	ck_assert(!access(scratch_path("run/step-0000000001/manifest.json"), F_OK));
	ck_assert_uint_eq(scratch_entries(evil), 0);
}

/* A message that a rank wrote, stored under another name, is ignored. */
TEST(tests, a_message_put_somewhere_else_is_none)
{
	struct rank zero = start(0, PATIENCE_MS), one = start(1, PATIENCE_MS);
	char scope[STORE_NAME_BYTES];
	redisReply *note;

	let_save(&one);
	find_scope(scope, "0");
	note = read_message("meeting", "roster-0", 1);
	write_message(scope, "plan-0", note->str, note->len);
	freeReplyObject(note);
	note = read_message(scope, "want-1", 1);
	write_message(scope, "plan-0", note->str, note->len);
	write_message(scope, "verdict-0", note->str, note->len);
	freeReplyObject(note);
	ck_assert_int_eq(code_of(&one, 1000), -EINPROGRESS);
	let_save(&zero);
	ck_assert_int_eq(code_of(&one, PATIENCE_MS), 0);
	ck_assert_int_eq(code_of(&zero, PATIENCE_MS), 0);
}

/*
 * Even with a known secret, a forged plan cannot make ranks write outside an attempt's directory.
 */
TEST(tests, a_plan_is_for_no_place_but_an_attempt)
{
	struct rank zero = start(0, PATIENCE_MS), one = start(1, PATIENCE_MS);
	char scope[STORE_NAME_BYTES], path[64];
	struct redis_store secret = { 0 };
	uint8_t *key;
	size_t bytes;

	let_save(&one);
	find_scope(scope, "0");
	freeReplyObject(read_message(scope, "want-1", 1));
	snprintf(path, sizeof(path), "run/.ioshape-store-%s/redis.secret", store_name);
	key = scratch_read(scratch_path(path), &bytes);
	ck_assert_uint_eq(bytes, sizeof(secret.secret));
	memcpy(secret.secret, key, sizeof(secret.secret));
	free(key);
	forge(&secret, scope, "plan-0", forged_plan());
	ck_assert_int_eq(code_of(&one, PATIENCE_MS), -EPROTO);
	ck_assert_uint_eq(scratch_entries(evil), 0);
	kill(zero.pid, SIGKILL);
	code_of(&zero, PATIENCE_MS);
}

TEST(tests, heartbeats_of_the_dead_count_for_nothing)
{
	struct rank zero = start(0, 2000), one = start(1, 2000);
	char scope[STORE_NAME_BYTES];
	redisReply *first, *second;
	int code = -EINPROGRESS;

	/* The rank waits for the other one and sends heartbeats. */
	let_save(&zero);
	find_scope(scope, "life");
	first = read_message(scope, "beat-0", 1);
	do {
		second = read_message(scope, "beat-0", 1);
		if (!memcmp(first->str, second->str, first->len)) {
			freeReplyObject(second);
			second = NULL;
		}
	} while (!second);
	kill(zero.pid, SIGKILL);
	code_of(&zero, PATIENCE_MS);
	let_save(&one);
	for (uint32_t i = 0; code == -EINPROGRESS; i++) {
		const redisReply *beat = i % 2 ? second : first;

		ck_assert_uint_lt(i * 50, PATIENCE_MS);
		write_message(scope, "beat-0", beat->str, beat->len);
		code = code_of(&one, 50);
	}
	ck_assert_int_eq(code, -ETIMEDOUT);
	freeReplyObject(first);
	freeReplyObject(second);
}
