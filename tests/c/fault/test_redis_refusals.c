/* SPDX-License-Identifier: Apache-2.0 */
/* A Redis that refuses commands: passwords, permissions, memory, replicas, TLS. */
#define _GNU_SOURCE
/* Included, because the functions that connect and read refusals are static. */
#include "slots/redis.c"
#include "support/check_main.h"
#include "support/fake_redis.h"
#include "support/redis_case.h"
#include "support/scratch.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static struct redis_server server;
static char address[160];

static void setup(void)
{
	redis_server_init(&server);
	snprintf(address, sizeof(address), "redis://127.0.0.1:%u", server.port);
}

static void teardown(void)
{
	redis_server_free(&server);
}

static struct test_case tests = { .name = "redis_refusals", .setup = setup, .teardown = teardown };

TEST(tests, passwords_open_doors_and_are_never_said)
{
	static const char *const wrong[] = { "", ":no-SECRET@", "ann:no-SECRET@" };
	struct slots_config config;
	struct base_error error;
	char text[200];
	void *pool;

	redis_server_option(&server, "--requirepass", "open-SECRET");
	redis_server_start(&server);
	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		snprintf(text, sizeof(text), "redis://%s127.0.0.1:%u", wrong[i], server.port);
		pool = redis_case_open(text, "1");
		redis_case_refused(pool, &error);
		ck_assert_ptr_null(strstr(error.text, "SECRET"));
		redis_case_must_say(&error, *wrong[i] ? "rejects" : "IOSHAPE_PASSWORD");
		slots_redis.close(pool);
	}
	snprintf(text, sizeof(text), "redis://:open-SECRET@127.0.0.1:%u", server.port);
	pool = redis_case_open(text, "1");
	redis_case_acquire(pool, "1-1");
	slots_redis.close(pool);
	config = redis_case_config(address, "1");
	config.password = "open-SECRET";
	pool = redis_case_open_config(&config);
	redis_case_acquire(pool, "1-1");
	slots_redis.close(pool);
}

/* Returns whether the text is on the heap of this process. */
static bool is_on_the_heap(const char *text)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned long begin = 0, end = 0;
	char line[400];

	ck_assert_ptr_nonnull(maps);
	while (fgets(line, sizeof(line), maps) && !strstr(line, "[heap]"))
		;
	fclose(maps);
	ck_assert_int_eq(sscanf(line, "%lx-%lx", &begin, &end), 2);
	return memmem((void *)begin, end - begin, text, strlen(text));
}

TEST(tests, a_closed_pool_leaves_no_password_in_memory)
{
	struct base_error error;
	char text[300];
	void *pool;

	/* Long, so that later allocations do not overwrite it by chance. */
	redis_server_option(&server, "--requirepass", "another");
	redis_server_start(&server);
	snprintf(text, sizeof(text), "redis://:%0200d-SECRET@127.0.0.1:%u", 0, server.port);
	pool = redis_case_open(text, "1");
	redis_case_refused(pool, &error);
	redis_case_must_say(&error, "rejects");
	ck_assert(is_on_the_heap("0000-SECRET"));
	slots_redis.close(pool);
	ck_assert(!is_on_the_heap("0000-SECRET"));
}

TEST(tests, a_server_that_repeats_its_arguments_does_not_betray_the_password)
{
	struct fake_redis fake;
	struct base_error error;
	char text[200];
	void *pool;

	fake_redis_start(&fake, FAKE_SAYS,
			 "-ERR unknown command `AUTH`, with args beginning with: `SECRET`\r\n");
	snprintf(text, sizeof(text), "redis://:SECRET@%s", strstr(fake.address, "127"));
	pool = redis_case_open(text, "1");
	redis_case_refused(pool, &error);
	ck_assert_ptr_null(strstr(error.text, "SECRET"));
	redis_case_must_say(&error, "password");
	slots_redis.close(pool);
	fake_redis_stop(&fake);
}

/* Number of calls that were refused because of a missing permission. */
static unsigned denials;

static void record_denial(int ret, struct base_error *error)
{
	if (ret) {
		ck_assert_int_eq(ret, IOSHAPE_E_COORDINATOR);
		redis_case_must_say(error, "users.acl");
		denials++;
	}
	memset(error, 0, sizeof(*error));
}

static int ignore_message(void *user, size_t index, const void *data, size_t bytes)
{
	(void)user, (void)index, (void)data, (void)bytes;
	return 0;
}

/* Makes the calls of a group's ranks. */
static void use_messages(const struct slots_config *config)
{
	const char *const names[] = { "n", "m" };
	struct base_error error = { 0 };
	struct slots_messages *messages;

	ck_assert_int_eq(slots_messages_open(&messages, config, &error), 0);
	record_denial(slots_messages_put(messages, "b:s1", "n", "x", 1, &error), &error);
	record_denial(slots_messages_get(messages, "b:s1", names, 2, ignore_message, NULL, &error),
		      &error);
	record_denial(slots_messages_remove(messages, "b:s1", &error), &error);
	slots_messages_close(messages);
}

/* Makes the calls of the operator's commands, which are written in Python. */
#define use_script(client, operation, ...)                                                         \
	use_numbers(client, operation, (const uint64_t[]){ __VA_ARGS__ },                          \
		    ARRAY_LENGTH(((const uint64_t[]){ __VA_ARGS__ })))

static void use_numbers(struct redis_client *client, const char *operation, const uint64_t *numbers,
			size_t count)
{
	struct base_error error = { 0 };
	struct link_command command;
	redisReply *reply;

	begin_call(client, &command, operation, "", 0);
	link_add_number_list(&command, numbers, count);
	record_denial(client_call(client, &command, &reply, &error), &error);
	freeReplyObject(reply);
}

static void list_pools(struct redis_client *client)
{
	struct link_command command = { 0 };
	struct base_error error = { 0 };
	redisReply *reply;

	link_add_texts(&command, "SCAN", "0", "MATCH", "{ios:*}:v7:[mo]");
	record_denial(client_call(client, &command, &reply, &error), &error);
	freeReplyObject(reply);
}

static void use_all(const char *as)
{
	struct slots_config config = redis_case_config(as, "1");
	struct slots_request request = redis_case_request("1-1");
	struct base_error error = { 0 };
	struct slots_answer answer = { 0 };
	struct slots_grant grant;
	struct slots_beat beat;
	struct redis_client client;
	void *pool;

	pool = redis_case_open_config(&config);
	ck_assert_int_eq(client_open(&client, &config, &error), 0);
	redis_server_tell(&server, "FLUSHALL");
	redis_server_tell(&server, "SCRIPT FLUSH");
	record_denial(slots_redis.acquire(pool, &request, &answer, &error), &error);
	beat = redis_case_beat_of(request.id, &answer);
	record_denial(slots_redis.beat(pool, &beat, &answer, &error), &error);
	for (int i = 2; i < 5; i++) {
		snprintf(request.id, sizeof(request.id), "1-%d", i);
		request.bytes = 1 << 20;
		record_denial(slots_redis.acquire(pool, &request, &answer, &error), &error);
	}
	record_denial(slots_redis.pace(pool, 100, 100, &grant, &error), &error);
	use_script(&client, "status", 2);
	for (int i = 1; i < 5; i++) {
		snprintf(request.id, sizeof(request.id), "1-%d", i);
		record_denial(slots_redis.release(pool, request.id, 1 << 20, &error), &error);
	}
	record_denial(slots_redis.wait(pool, 10, &error), &error);
	use_script(&client, "set", 1, 2);
	list_pools(&client);
	/* Releasing the last slot removes the job. */
	for (int i = 2; i < 5; i++) {
		snprintf(request.id, sizeof(request.id), "1-%d", i);
		record_denial(slots_redis.release(pool, request.id, 0, &error), &error);
	}
	client_close(&client);
	slots_redis.close(pool);
	use_messages(&config);
}

TEST(tests, the_documented_rights_are_enough_and_each_is_needed)
{
	char text[200], rights[1000] = "", *rest, *right;
	redisReply *reply;
	FILE *file = fopen(IOSHAPE_USERS_ACL, "re");

	ck_assert_ptr_nonnull(file);
	while (strncmp(rights, "user ioshape", 12))
		ck_assert_ptr_nonnull(fgets(rights, sizeof(rights), file));
	fclose(file);
	redis_server_option(&server, "--aclfile", IOSHAPE_USERS_ACL);
	redis_server_start(&server);
	server.user = "admin";
	server.password = "CHANGE-THIS-ONE-TOO";
	poll(NULL, 0, LEASE_MS / 2 + 1100);
	snprintf(text, sizeof(text), "redis://ioshape:CHANGE-THIS@127.0.0.1:%u", server.port);
	use_all(text);
	ck_assert_uint_eq(denials, 0);
	/* Nor may the server have logged a denied command that the client ignored. */
	reply = redis_server_say(&server, "ACL LOG");
	ck_assert_uint_eq(reply->elements, 0);
	freeReplyObject(reply);
	for (right = strtok_r(rights, " \n", &rest); right; right = strtok_r(NULL, " \n", &rest)) {
		/* These are only needed for databases other than 0 and for clusters. */
		if (*right != '+' || !strcmp(right, "+select") || !strcmp(right, "+cluster|slots"))
			continue;
		denials = 0;
		redis_server_tell(&server, "ACL SETUSER ioshape -%s", right + 1);
		/* On a busy machine, wait() may end before its new connection has asked. */
		for (int tries = 0; tries < 10 && !denials; tries++)
			use_all(text);
		redis_server_tell(&server, "ACL SETUSER ioshape %s", right);
		ck_assert_msg(denials, "nothing needs %s", right);
	}
}

/* ---- BLPOP denied ---------------------------------------------------------------------------- */

static unsigned lines;

static void count_line(void *user, enum ioshape_log_level level, const char *line)
{
	(void)user, (void)level, (void)line;
	lines++;
}

static void *open_counting(const char *at)
{
	struct slots_config config = redis_case_config(at, "1");

	lines = 0;
	config.log = (struct base_log){ count_line, NULL, IOSHAPE_LOG_WARNING };
	return redis_case_open_config(&config);
}

TEST(tests, without_the_right_to_be_woken_waiting_fails_and_all_else_goes_on)
{
	struct slots_answer held;
	void *pool;

	redis_server_start(&server);
	pool = open_counting(address);
	held = redis_case_hold(pool, "1-1");
	redis_server_tell(&server, "ACL SETUSER default -blpop");
	for (int i = 0; i < 5; i++) {
		ck_assert_int_eq(slots_redis.wait(pool, 100, NULL), IOSHAPE_E_COORDINATOR);
		ck_assert_int_eq(redis_case_beat(pool, "1-1", &held).state, SLOTS_HOLDING);
	}
	ck_assert_uint_eq(lines, 1);
	/* The operator grants the permission: the wake of the next grant arrives. */
	redis_server_tell(&server, "ACL SETUSER default +blpop");
	redis_case_be_woken(pool);
	ck_assert_uint_eq(lines, 1);
	slots_redis.close(pool);
}

TEST(tests, a_proxy_that_hangs_up_at_blpop_is_no_server_that_is_away)
{
	struct fake_redis fake;
	void *pool;

	fake_redis_start(&fake, FAKE_HANGS_UP, "BLPOP");
	pool = open_counting(fake.address);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(slots_redis.wait(pool, 50, NULL), IOSHAPE_E_COORDINATOR);
	/* The failure did not start a back-off, which would delay commands. */
	ck_assert_int_eq(fake_redis_connections(&fake), 3);
	slots_redis.close(pool);
	fake_redis_stop(&fake);
}

TEST(tests, a_replica_is_not_written_to)
{
	unsigned before = scratch_descriptors();
	struct base_error error;
	void *pool;

	redis_server_option(&server, "--replicaof", "127.0.0.1 1");
	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_refused(pool, &error);
	redis_case_must_say(&error, "READONLY");
	/*
	 * The client has closed its connections to find the master again; only an eventfd remains.
	 */
	ck_assert_uint_eq(scratch_descriptors(), before + 1);
	redis_server_tell(&server, "REPLICAOF NO ONE");
	redis_case_until_well(pool, "1-1");
	slots_redis.close(pool);
}

TEST(tests, a_master_whose_replicas_have_left_it_is_left)
{
	unsigned before = scratch_descriptors();
	struct base_error error;
	void *pool;

	redis_server_option(&server, "--min-replicas-to-write", "1");
	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_refused(pool, &error);
	redis_case_must_say(&error, "NOREPLICAS");
	ck_assert_uint_eq(scratch_descriptors(), before + 1);
	redis_server_tell(&server, "CONFIG SET min-replicas-to-write 0");
	redis_case_until_well(pool, "1-1");
	slots_redis.close(pool);
}

TEST(tests, a_server_without_memory_says_so_and_nothing_is_lost_by_it)
{
	struct base_error error;
	void *pool;

	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_hold(pool, "1-2");
	redis_server_tell(&server, "CONFIG SET maxmemory 1");
	redis_case_refused(pool, &error);
	redis_case_must_say(&error, "maxmemory");
	slots_redis.release(pool, "1-2", 0, NULL);
	redis_server_tell(&server, "CONFIG SET maxmemory 0");
	redis_case_release(pool, "1-2");
	ck_assert_int_eq(redis_server_tell(&server, "ZCARD {ios:scratch}:v7:h"), 0);
	ck_assert_int_eq(redis_case_acquire(pool, "1-3").state, SLOTS_HOLDING);
	slots_redis.close(pool);
}

TEST(tests, tls_that_is_not_there_is_refused_with_what_to_install)
{
	struct slots_config config = redis_case_config("rediss://h", "1");
	struct base_error error = { 0 };
	void *pool;

	if (!slots_redis.open(&pool, &config, &error)) { /* this build supports TLS */
		slots_redis.close(pool);
		return;
	}
	ck_assert_int_eq(error.code, -EINVAL);
	redis_case_must_say(&error, "hiredis_ssl");
}

/* ---- Redirections to other servers ----------------------------------------------------------- */

static const struct {
	const char *says;
	int code;
} sentinels[] = {
	{ "-ERR not now\r\n", -EACCES },
	{ "*-1\r\n", -ENOENT },
	{ "$4\r\ntext\r\n", -EPROTO },
	{ "*1\r\n$9\r\n127.0.0.1\r\n", -EPROTO },
	{ "*2\r\n:1\r\n$4\r\n6379\r\n", -EPROTO },
	{ "*2\r\n$9\r\n127.0.0.1\r\n:6379\r\n", -EPROTO },
	{ "*2\r\n$9\r\n127.0.0.1\r\n$5\r\n99999\r\n", -EPROTO },
	{ "*2\r\n$0\r\n\r\n$4\r\n6379\r\n", -EPROTO },
	{ "*2\r\n$9\r\n127.0.0.1\r\n$300\r\n"
	  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
	  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
	  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
	  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n",
	  -EPROTO },
};

LOOP_TEST(tests, a_sentinel_that_names_no_master_is_no_way_to_one, 0, (int)ARRAY_LENGTH(sentinels))
{
	struct base_error error = { 0 };
	struct redis_client client;
	struct slots_config config;
	struct fake_redis fake;
	struct slots_link *link;
	char text[100];

	fake_redis_start(&fake, FAKE_SAYS, sentinels[_i].says);
	snprintf(text, sizeof(text), "sentinel%s/trains", strchr(fake.address, ':'));
	config = redis_case_config(text, "1");
	ck_assert_int_eq(client_open(&client, &config, &error), 0);
	ck_assert_int_eq(connect_beside(&client, &link, &error), sentinels[_i].code);
	ck_assert_ptr_null(link);
	ck_assert_int_eq(error.code, sentinels[_i].code);
	client_close(&client);
	fake_redis_stop(&fake);
}

static const struct {
	const char *says;
	enum sequel sequel;
	const char *host;
} redirects[] = {
	{ "-MOVED 3999 10.0.0.7:6380\r\n", REDIRECTED, "10.0.0.7" },
	/* Without a host, the port is on the node that answers. */
	{ "-MOVED 3999 :6380\r\n", REDIRECTED, "127.0.0.1" },
	{ "-MOVED 3999 10.0.0.7:port\r\n", REFUSED, "" },
	{ "-ASK 3999 10.0.0.7:6380\r\n", LOST, "" },
	{ "-ERR 3999\r\n", REFUSED, "" },
};

LOOP_TEST(tests, a_node_of_a_cluster_leads_to_another, 0, (int)ARRAY_LENGTH(redirects))
{
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(20000);
	struct link_command command = { 0 };
	struct base_error error = { 0 };
	struct redis_client client;
	struct slots_config config;
	struct fake_redis fake;
	struct slots_link *link;
	redisReply *reply;

	fake_redis_start(&fake, FAKE_SAYS, redirects[_i].says);
	config = redis_case_config(fake.address, "1");
	ck_assert_int_eq(client_open(&client, &config, &error), 0);
	ck_assert_int_eq(connect_beside(&client, &link, &error), 0);
	link_add_texts(&command, "PING");
	ck_assert_int_eq(link_ask(link, &command, &reply, until_ns, NULL), 0);
	ck_assert_int_eq(take_error(&client, link, reply, &error), redirects[_i].sequel);
	ck_assert_int_eq(client.has_moved, redirects[_i].sequel == REDIRECTED);
	if (client.has_moved) {
		ck_assert_str_eq(client.moved.host, redirects[_i].host);
		ck_assert_uint_eq(client.moved.port, 6380);
	}
	freeReplyObject(reply);
	link_close(link);
	client_close(&client);
	fake_redis_stop(&fake);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static int nothing_is_found(void *user, size_t index, const void *data, size_t bytes)
{
	(void)user;
	(void)index;
	(void)data;
	(void)bytes;
	ck_abort_msg("a note was found");
	return 0;
}

static const char *const lists[] = {
	":1\r\n",
	"*1\r\n$-1\r\n",
	"*2\r\n:1\r\n:2\r\n",
};

LOOP_TEST(tests, a_list_of_messages_that_is_none_is_refused, 0, (int)ARRAY_LENGTH(lists))
{
	static const char *const names[] = { "one", "two" };
	struct slots_config config;
	struct base_error error = { 0 };
	struct slots_messages *messages;
	struct fake_redis fake;

	fake_redis_start(&fake, FAKE_SAYS, lists[_i]);
	config = redis_case_config(fake.address, "1");
	ck_assert_int_eq(slots_messages_open(&messages, &config, &error), 0);
	ck_assert_int_eq(
		slots_messages_get(messages, "list", names, 2, nothing_is_found, NULL, &error),
		IOSHAPE_E_COORDINATOR);
	slots_messages_close(messages);
	fake_redis_stop(&fake);
}

TEST(tests, messages_need_a_redis)
{
	struct slots_config config = redis_case_config("open", "1");
	struct slots_messages *messages;

	ck_assert_int_eq(slots_messages_open(&messages, NULL, NULL), -EINVAL);
	ck_assert_int_eq(slots_messages_open(&messages, &config, NULL), -EINVAL);
	config.address = NULL;
	ck_assert_int_eq(slots_messages_open(&messages, &config, NULL), -EINVAL);
	config.address = "redis://host:port:port";
	ck_assert_int_lt(slots_messages_open(&messages, &config, NULL), 0);
	ck_assert_ptr_null(messages);
	slots_messages_close(NULL);
}
