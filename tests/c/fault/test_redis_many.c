/* SPDX-License-Identifier: Apache-2.0 */
/* Several Redis servers: a master with a replica and sentinels, and clusters. */
#include "group/group.h"
#include "support/check_main.h"
#include "support/redis_case.h"
#include "support/scratch.h"

#include <poll.h>
#include <signal.h>

#define SENTINELS 3
#define NODES 3

/* ---- Sentinel -------------------------------------------------------------------------------- */

static struct redis_server master, replica, sentinels[SENTINELS];
static char replica_of[32], address[512];

static bool sentinels_are_locked;

static void write_sentinel(const struct redis_server *sentinel)
{
	char path[128], text[1000];

	snprintf(path, sizeof(path), "%s/sentinel.conf", sentinel->directory);
	snprintf(text, sizeof(text),
		 "sentinel monitor trains 127.0.0.1 %u 2\n"
		 "sentinel down-after-milliseconds trains 500\n"
		 "sentinel failover-timeout trains 2000\n"
		 "sentinel auth-pass trains open-SECRET\n"
		 "protected-mode no\n%s",
		 master.port,
		 sentinels_are_locked ? "requirepass open-SECRET\n"
					"sentinel sentinel-pass open-SECRET\n" :
					"");
	scratch_write(path, text, strlen(text));
}

static void start_sentinels(void)
{
	int used = snprintf(address, sizeof(address), "sentinel://:open-SECRET@127.0.0.1:1");

	redis_server_init(&master);
	redis_server_init(&replica);
	snprintf(replica_of, sizeof(replica_of), "127.0.0.1 %u", master.port);
	redis_server_option(&replica, "--replicaof", replica_of);
	struct redis_server *both[] = { &master, &replica };
	for (int i = 0; i < 2; i++) {
		redis_server_option(both[i], "--requirepass", "open-SECRET");
		redis_server_option(both[i], "--masterauth", "open-SECRET");
		redis_server_option(both[i], "--repl-diskless-sync-delay", "0");
		redis_server_start(both[i]);
		both[i]->user = "default";
		both[i]->password = "open-SECRET";
	}
	for (int i = 0; i < SENTINELS; i++) {
		redis_server_init(&sentinels[i]);
		sentinels[i].sentinel = true;
		if (sentinels_are_locked) {
			sentinels[i].user = "default";
			sentinels[i].password = "open-SECRET";
		}
		write_sentinel(&sentinels[i]);
		redis_server_start(&sentinels[i]);
		used += snprintf(address + used, sizeof(address) - (size_t)used, ",127.0.0.1:%u",
				 sentinels[i].port);
	}
	snprintf(address + used, sizeof(address) - (size_t)used, "/trains");
}

/* Starts sentinels that require a password. */
static void start_locked_sentinels(void)
{
	sentinels_are_locked = true;
	start_sentinels();
}

static void stop_sentinels(void)
{
	for (int i = 0; i < SENTINELS; i++)
		redis_server_free(&sentinels[i]);
	redis_server_free(&replica);
	redis_server_free(&master);
}

/*
 * Waits until the sentinels know each other and the replica, without which they cannot fail over.
 */
static void wait_for_sentinels(void)
{
	for (int i = 0; i < SENTINELS; i++) {
		for (int waited = 0;; waited += 50) {
			redisReply *reply = redis_server_say(&sentinels[i], "INFO sentinel");
			bool well = strstr(reply->str, "slaves=1,sentinels=3");

			freeReplyObject(reply);
			if (well)
				break;
			ck_assert_int_lt(waited, 20000);
			poll(NULL, 0, 50);
		}
	}
}

static struct test_case failover_case = { .name = "sentinel",
					  .setup = start_sentinels,
					  .teardown = stop_sentinels };

TEST(failover_case, sentinels_lead_to_the_master_and_after_it_died_to_the_next)
{
	struct slots_answer held, kept;
	void *pool = redis_case_open(address, "1");
	uint64_t begin;

	wait_for_sentinels();
	/* The first sentinel in the address does not run. */
	held = redis_case_hold(pool, "1-1");
	slots_redis.rest(pool);
	ck_assert_int_eq(redis_case_beat(pool, "1-1", &held).state, SLOTS_HOLDING);
	ck_assert_int_gt(redis_server_tell(&master, "WAIT 1 5000"), 0);
	begin = base_now_ns();
	redis_server_kill(&master);
	redis_case_until_well(pool, "1-1");
	kept = redis_case_beat(pool, "1-1", &held);
	/* Within the lease, the holder's record is still there or is restored. */
	if (redis_case_ms_since(begin) < LEASE_MS - 200) {
		ck_assert_int_eq(kept.state, SLOTS_HOLDING);
		ck_assert_uint_eq(kept.fence, held.fence);
	}
	ck_assert_uint_gt(kept.epoch, held.epoch);
	/* The old master comes back as a replica, and clients must not use it. */
	redis_server_start(&master);
	for (int i = 0; i < 20; i++) {
		redis_case_until_well(pool, "1-2");
		redis_case_release(pool, "1-2");
		poll(NULL, 0, 20);
	}
	slots_redis.close(pool);
}

TEST(failover_case, a_master_that_was_made_a_replica_is_left)
{
	void *pool = redis_case_open(address, "1");
	redisReply *reply;

	redis_case_until_well(pool, "1-1");
	wait_for_sentinels();
	reply = redis_server_say(&sentinels[0], "SENTINEL FAILOVER trains");
	ck_assert_msg(reply->type != REDIS_REPLY_ERROR, "%s", reply->str);
	freeReplyObject(reply);
	/* The old master answers until it is a replica; then the client finds the new one. */
	for (int i = 0; i < 100; i++) {
		redis_case_until_well(pool, "1-1");
		slots_redis.wait(pool, 50, NULL);
	}
	ck_assert_int_eq(redis_server_tell(&replica, "EXISTS {ios:scratch}:v7:m"), 1);
	reply = redis_server_say(&replica, "ROLE");
	ck_assert_str_eq(reply->element[0]->str, "master");
	freeReplyObject(reply);
	slots_redis.close(pool);
}

static void must_refuse(const char *password, const char *service, const char *words)
{
	struct base_error error;
	char text[100];
	void *pool;

	snprintf(text, sizeof(text), "sentinel://:%s@127.0.0.1:%u/%s", password, sentinels[0].port,
		 service);
	pool = redis_case_open(text, "1");
	redis_case_refused(pool, &error);
	redis_case_must_say(&error, words);
	ck_assert_ptr_null(strstr(error.text, "SECRET"));
	slots_redis.close(pool);
}

TEST(failover_case, sentinels_that_know_no_such_service_say_so)
{
	must_refuse("open-SECRET", "pqueues", "\"pqueues\"");
}

static struct test_case locked = { .name = "locked",
				   .setup = start_locked_sentinels,
				   .teardown = stop_sentinels };

TEST(locked, sentinels_may_ask_for_the_password)
{
	void *pool = redis_case_open(address, "1");

	redis_case_acquire(pool, "1-1");
	slots_redis.close(pool);
	must_refuse("no-SECRET", "trains", "rejects");
}

/* ---- Cluster --------------------------------------------------------------------------------- */

static struct redis_server nodes[NODES];

static bool cluster_is_well(void)
{
	for (int i = 0; i < NODES; i++) {
		redisReply *reply = redis_server_say(&nodes[i], "CLUSTER INFO");
		bool well = strstr(reply->str, "cluster_state:ok") &&
			    strstr(reply->str, "cluster_known_nodes:3");

		freeReplyObject(reply);
		if (!well)
			return false;
	}
	return true;
}

static void start_cluster(void)
{
	for (int i = 0; i < NODES; i++) {
		redis_server_init(&nodes[i]);
		redis_server_option(&nodes[i], "--cluster-enabled", "yes");
		redis_server_option(&nodes[i], "--cluster-node-timeout", "2000");
		redis_server_start(&nodes[i]);
		redis_server_tell(&nodes[i], "CLUSTER ADDSLOTSRANGE %d %d", i * 16384 / NODES,
				  (i + 1) * 16384 / NODES - 1);
	}
	for (int i = 1; i < NODES; i++)
		redis_server_tell(&nodes[0], "CLUSTER MEET 127.0.0.1 %d", nodes[i].port);
	for (int waited = 0; !cluster_is_well(); waited += 50) {
		ck_assert_int_lt(waited, 20000);
		poll(NULL, 0, 50);
	}
}

static void stop_cluster(void)
{
	for (int i = 0; i < NODES; i++)
		redis_server_free(&nodes[i]);
}

static void address_of(int node, char *text, size_t room)
{
	snprintf(text, room, "redis://127.0.0.1:1,127.0.0.1:%u", nodes[node].port);
}

static struct test_case cluster_case = { .name = "cluster",
					 .setup = start_cluster,
					 .teardown = stop_cluster };

/* Each pool is on one node of the cluster; a client finds it through any node. */
TEST(cluster_case, any_node_of_a_cluster_leads_to_the_pool)
{
	unsigned before = scratch_descriptors();

	for (int node = 0; node < NODES; node++) {
		for (int number = 0; number < 6; number++) {
			struct slots_config config;
			char text[100];
			void *pool;

			address_of(node, text, sizeof(text));
			config = redis_case_config(text, "1");
			snprintf(config.pool, sizeof(config.pool), "pool-%d", number);
			pool = redis_case_open_config(&config);
			redis_case_acquire(pool, "1-1");
			redis_case_wait(pool, 20);
			slots_redis.rest(pool);
			redis_case_release(pool, "1-1");
			slots_redis.close(pool);
		}
	}
	ck_assert_uint_eq(scratch_descriptors(), before);
}

/* Messages are stored on the node of the pool's keys. */
TEST(cluster_case, messages_follow_the_pool_in_a_cluster)
{
	for (int number = 0; number < 6; number++) {
		struct slots_config config;
		struct base_buffer note = { 0 };
		struct base_error error = { 0 };
		struct store_config store_config = { .name = "b",
						     .ranks = 1,
						     .directory = scratch_directory() };
		char text[100];
		struct store *store;

		address_of(number % NODES, text, sizeof(text));
		config = redis_case_config(text, "1");
		snprintf(config.pool, sizeof(config.pool), "pool-%d", number);
		store_config.coordinator = &config;
		ck_assert_msg(!store_open(&store, &store_redis, &store_config, &error), "%s",
			      error.text);
		ck_assert_int_eq(store_put(store, "s1", "n", "x", 1, NULL), 0);
		ck_assert_int_eq(store_get(store, "s1", "n", &note, NULL), 0);
		ck_assert_uint_eq(note.bytes, 1);
		store_drop(store, "s1");
		ck_assert_int_eq(store_get(store, "s1", "n", &note, NULL), -EAGAIN);
		base_buffer_free(&note);
		store_close(store);
	}
}

static int node_of(long long slot)
{
	for (int i = 0; i < NODES; i++) {
		if (slot < (i + 1) * 16384 / NODES)
			return i;
	}
	return 0;
}

static void id_of(int node, char *id)
{
	redisReply *reply = redis_server_say(&nodes[node], "CLUSTER MYID");

	snprintf(id, 48, "%s", reply->str);
	freeReplyObject(reply);
}

static void move_keys(int from, int to, long long slot)
{
	redisReply *keys;

	keys = redis_server_say(&nodes[from], "CLUSTER GETKEYSINSLOT %lld 100", slot);
	for (size_t i = 0; i < keys->elements; i++)
		redis_server_tell(&nodes[from], "MIGRATE 127.0.0.1 %d %s 0 5000", nodes[to].port,
				  keys->element[i]->str);
	freeReplyObject(keys);
}

TEST(cluster_case, a_pool_that_is_moved_to_another_node_is_followed)
{
	struct slots_answer held, kept;
	struct slots_beat beat;
	char text[100], from_id[48], to_id[48];
	long long slot = redis_server_tell(&nodes[0], "CLUSTER KEYSLOT {ios:scratch}:v7:m");
	int from = node_of(slot), to = (from + 1) % NODES;
	void *pool;

	address_of(from, text, sizeof(text));
	pool = redis_case_open(text, "1");
	held = redis_case_hold(pool, "1-1");
	id_of(from, from_id);
	id_of(to, to_id);
	redis_server_tell(&nodes[to], "CLUSTER SETSLOT %lld IMPORTING %s", slot, from_id);
	redis_server_tell(&nodes[from], "CLUSTER SETSLOT %lld MIGRATING %s", slot, to_id);
	move_keys(from, to, slot);
	/* The old node answers ASK: the coordinator is away until the move is complete. */
	beat = redis_case_beat_of("1-1", &held);
	ck_assert_int_eq(slots_redis.beat(pool, &beat, &kept, NULL), IOSHAPE_E_COORDINATOR);
	for (int i = 0; i < NODES; i++)
		redis_server_tell(&nodes[i], "CLUSTER SETSLOT %lld NODE %s", slot, to_id);
	/* Now it answers MOVED. */
	redis_case_until_well(pool, "1-1");
	kept = redis_case_beat(pool, "1-1", &held);
	ck_assert_int_eq(kept.state, SLOTS_HOLDING);
	ck_assert_uint_eq(kept.fence, held.fence);
	redis_case_wait(pool, 20);
	slots_redis.close(pool);
}

TEST(cluster_case, a_cluster_without_the_pools_node_is_away_and_comes_back)
{
	long long slot = redis_server_tell(&nodes[0], "CLUSTER KEYSLOT {ios:scratch}:v7:m");
	int home = node_of(slot);
	const struct slots_request request = redis_case_request("1-1");
	struct slots_answer answer;
	char text[100];
	void *pool;

	address_of((home + 1) % NODES, text, sizeof(text));
	pool = redis_case_open(text, "1");
	redis_case_acquire(pool, "1-1");
	redis_server_kill(&nodes[home]);
	for (int i = 0; i < 3; i++) {
		ck_assert_int_eq(slots_redis.acquire(pool, &request, &answer, NULL),
				 IOSHAPE_E_COORDINATOR);
		poll(NULL, 0, 200);
	}
	redis_server_start(&nodes[home]);
	redis_case_until_well(pool, "1-1");
	slots_redis.close(pool);
}

CHECK_ADD(locked, sentinels_that_know_no_such_service_say_so, 0, 1)
