/* SPDX-License-Identifier: Apache-2.0 */
/* Pools learn how many writers pay, from holders that report to a real Redis or a real file: what
 * they write takes as long as a storage would that is a formula. */
#include "slots/slots.h"
#include "support/check_main.h"
#include "support/must.h"
#include "support/redis_server.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LEASE_MS 3000u
#define WRITERS 24u
#define BYTES (64 * MIB)
#define ALONE_MS 12u   /* one writer's time for that */
#define PATIENCE 1000u /* rounds, until it must have been learnt */

static struct redis_server server;
static char redis_address[128], folder[64], local_address[80];
static struct slots_answer answer;
static struct base_error error;

static void start(void)
{
	redis_server_init(&server);
	redis_server_start(&server);
	snprintf(redis_address, sizeof(redis_address), "unix://%s", server.socket);
	poll(NULL, 0, LEASE_MS / 2 + 1100); /* as in test_redis.c */
}

static void stop(void)
{
	redis_server_free(&server);
}

static void setup(void)
{
	snprintf(folder, sizeof(folder), "/dev/shm/ioshape-test-XXXXXX");
	MUST(mkdtemp(folder), "no folder");
	snprintf(local_address, sizeof(local_address), "local:%s", folder);
	redis_server_tell(&server, "FLUSHALL");
}

static void teardown(void)
{
	MUST(!rmdir(folder), "the folder stays");
}

static struct test_case tests = {
	.name = "capacity", .start = start, .stop = stop, .setup = setup, .teardown = teardown
};

/* ---- Writers --------------------------------------------------------------------------------- */

static const struct slots_ops *const coordinators[] = { &slots_local, &slots_redis };

#define EACH(name) LOOP_TEST(tests, name, 1, 2)

struct crowd {
	const struct slots_ops *ops;
	void *pool;
	char ids[WRITERS][SLOTS_ID_BYTES];
	bool holds[WRITERS];
	unsigned made;
};

static void open_crowd(struct crowd *crowd, int which, uint32_t asked, uint32_t start_with)
{
	struct slots_config config = {
		.address = which ? redis_address : local_address,
		.pool = "p",
		.identity = { .client = "0000000000000001",
			      .job = "job",
			      .node = "here",
			      .ranks = 1,
			      .share = 100 },
		.lease_ms = LEASE_MS,
		.asked_capacity = asked,
		.default_capacity = start_with,
	};

	memset(crowd, 0, sizeof(*crowd));
	crowd->ops = coordinators[which];
	MUST(!crowd->ops->open(&crowd->pool, &config, &error), "%s", error.text);
}

static void enter(struct crowd *crowd, unsigned i)
{
	struct slots_request request = { .weight = 1, .bytes = BYTES };

	snprintf(request.id, sizeof(request.id), "0000000000000001-%u", crowd->made++);
	memcpy(crowd->ids[i], request.id, sizeof(request.id));
	MUST(!crowd->ops->acquire(crowd->pool, &request, &answer, &error), "%s", error.text);
	crowd->holds[i] = answer.state == SLOTS_HOLDING;
}

static unsigned count_holders(struct crowd *crowd)
{
	unsigned count = 0;

	for (unsigned i = 0; i < WRITERS; i++) {
		struct slots_beat beat = { .holding = crowd->holds[i] };

		memcpy(beat.id, crowd->ids[i], sizeof(beat.id));
		MUST(!crowd->ops->beat(crowd->pool, &beat, &answer, &error), "%s", error.text);
		crowd->holds[i] = answer.state == SLOTS_HOLDING;
		/* We were not run for longer than a lease. */
		if (answer.state == SLOTS_NONE)
			enter(crowd, i);
		count += crowd->holds[i];
	}
	return count;
}

/* Those that hold write, as if `fill` writers filled the storage, or each slowed the others down
 * (0); then others do. */
static void write_round(struct crowd *crowd, unsigned fill)
{
	const unsigned count = count_holders(crowd);

	poll(NULL, 0, (int)(fill ? ALONE_MS * MAX(count, fill) / fill : count * count));
	for (unsigned i = 0; i < WRITERS; i++) {
		if (!crowd->holds[i])
			continue;
		MUST(!crowd->ops->release(crowd->pool, crowd->ids[i], BYTES, &error), "%s",
		     error.text);
		enter(crowd, i);
	}
}

static void write_for(struct crowd *crowd, unsigned fill, unsigned rounds)
{
	if (!crowd->made) {
		for (unsigned i = 0; i < WRITERS; i++)
			enter(crowd, i);
	}
	for (unsigned i = 0; i < rounds; i++)
		write_round(crowd, fill);
}

static struct ioshape_pool_status *status_of(struct crowd *crowd)
{
	struct ioshape_pool_status *status;

	MUST(!crowd->ops->status(crowd->pool, &status, &error), "%s", error.text);
	return status;
}

/* Until a number of writers in these bounds is the best known. */
static void write_until(struct crowd *crowd, unsigned fill, uint32_t least, uint32_t most)
{
	for (unsigned i = 0; i < PATIENCE; i++) {
		struct ioshape_pool_status *status;
		uint32_t best;

		write_for(crowd, fill, 1);
		status = status_of(crowd);
		best = status->learned.writers;
		ioshape_pool_status_free(status);
		if (best >= least && best <= most)
			return;
	}
	ck_abort_msg("it was not learnt in %u rounds", PATIENCE);
}

static void set_capacity(struct crowd *crowd, uint32_t capacity)
{
	const struct ioshape_pool_settings settings = { .size = sizeof(settings),
							.capacity = capacity,
							.clear = !capacity };

	MUST(!crowd->ops->set(crowd->pool, &settings, &error), "%s", error.text);
}

/* ---- What they find -------------------------------------------------------------------------- */

EACH(a_storage_that_needs_many_gets_more_than_it_began_with)
{
	struct ioshape_pool_status *status;
	struct crowd crowd;

	open_crowd(&crowd, _i, 0, 2);
	write_until(&crowd, 8, 6, WRITERS);
	status = status_of(&crowd);
	ck_assert_str_eq(status->capacity_by, "learned");
	ck_assert_uint_gt(status->learned.bytes_per_s, 0);
	ck_assert(status->learned.fewer_permille || status->learned.more_permille);
	ck_assert(status->capacity == status->learned.writers ||
		  status->capacity == status->learned.tried);
	ioshape_pool_status_free(status);
	crowd.ops->close(crowd.pool);
}

EACH(a_storage_that_one_fills_gets_fewer_than_it_began_with)
{
	struct ioshape_pool_status *status;
	struct crowd crowd;

	open_crowd(&crowd, _i, 0, 8);
	write_until(&crowd, 0, 1, 3);
	status = status_of(&crowd);
	ck_assert_str_eq(status->capacity_by, "learned");
	ioshape_pool_status_free(status);
	crowd.ops->close(crowd.pool);
}

EACH(the_operator_wins_and_what_was_learnt_comes_back)
{
	struct ioshape_pool_status *status;
	uint32_t learned, trials = 0;
	struct crowd crowd;

	open_crowd(&crowd, _i, 0, 2);
	write_until(&crowd, 8, 4, WRITERS);
	status = status_of(&crowd);
	learned = status->learned.writers;
	ioshape_pool_status_free(status);
	set_capacity(&crowd, 3);
	write_for(&crowd, 8, WRITERS);
	status = status_of(&crowd);
	ck_assert_uint_eq(status->capacity, 3);
	ck_assert_str_eq(status->capacity_by, "operator");
	ck_assert_uint_eq(status->learned.writers, learned);
	trials = status->learned.tried;
	ioshape_pool_status_free(status);
	set_capacity(&crowd, 0);
	status = status_of(&crowd);
	ck_assert_str_eq(status->capacity_by, "learned");
	ck_assert(status->capacity == learned || status->capacity == trials);
	ioshape_pool_status_free(status);
	crowd.ops->close(crowd.pool);
}

EACH(what_a_job_asks_for_is_not_learnt_away)
{
	struct ioshape_pool_status *status;
	struct crowd crowd;

	open_crowd(&crowd, _i, 5, 2);
	write_for(&crowd, 1, 30);
	status = status_of(&crowd);
	ck_assert_uint_eq(status->capacity, 5);
	ck_assert_str_eq(status->capacity_by, "job");
	ioshape_pool_status_free(status);
	crowd.ops->close(crowd.pool);
}

/* Saves of a few bytes, or fewer at a time than may write, tell nothing. */
EACH(small_saves_and_lone_ones_do_not_teach)
{
	struct slots_request request = { .weight = 1 };
	struct ioshape_pool_status *status;
	struct crowd crowd;

	open_crowd(&crowd, _i, 0, 4);
	for (unsigned i = 0; i < 200; i++) {
		const uint64_t bytes = i % 2 ? BYTES : KIB;

		for (unsigned j = 0; j < (i % 2 ? 1 : 4); j++) {
			snprintf(request.id, sizeof(request.id), "0000000000000001-%u-%u", i, j);
			MUST(!crowd.ops->acquire(crowd.pool, &request, &answer, &error), "%s",
			     error.text);
		}
		poll(NULL, 0, 1);
		for (unsigned j = 0; j < (i % 2 ? 1 : 4); j++) {
			snprintf(request.id, sizeof(request.id), "0000000000000001-%u-%u", i, j);
			MUST(!crowd.ops->release(crowd.pool, request.id, bytes, &error), "%s",
			     error.text);
		}
	}
	status = status_of(&crowd);
	ck_assert_uint_eq(status->capacity, 4);
	ck_assert_str_eq(status->capacity_by, "default");
	ck_assert_uint_eq(status->learned.bytes_per_s, 0);
	ioshape_pool_status_free(status);
	crowd.ops->close(crowd.pool);
}

/* Whoever can write to the Redis can make us slow, and nothing else. */
TEST(tests, what_others_wrote_for_learnt_is_not_believed)
{
	static const char *const texts[] = { "", "nonsense", "2 0 0",
					     "2 99999999 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0" };

	for (size_t i = 0; i < ARRAY_LENGTH(texts); i++) {
		struct ioshape_pool_status *status;
		struct crowd crowd;

		redis_server_tell(&server, "FLUSHALL");
		open_crowd(&crowd, 1, 0, 2);
		write_for(&crowd, 8, 3);
		redis_server_tell(&server, "HSET {ios:p}:v3:m learnt %s", texts[i]);
		write_for(&crowd, 8, 20);
		status = status_of(&crowd);
		ck_assert_uint_ge(status->capacity, 1);
		ck_assert_uint_le(status->capacity, WRITERS);
		ck_assert_uint_ge(status->learned.writers, 2);
		ck_assert_uint_le(status->learned.writers, WRITERS);
		ioshape_pool_status_free(status);
		crowd.ops->close(crowd.pool);
	}
}

int main(void)
{
	return check_run("capacity");
}
