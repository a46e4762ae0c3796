/* SPDX-License-Identifier: Apache-2.0 */
/* What a Redis answers: each part of it must be what it should be. */
#include "slots/redis.h"
#include "support/check_main.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct test_case tests = { .name = "replies" };

/* ---- Replies from texts: "( 1 =2 word ( 3 ) )", of which =2 is a word, too ----------------------
 */

static redisReply *make(const char **text)
{
	redisReply *reply = calloc(1, sizeof(*reply));
	const char *word = *text += strspn(*text, " ");
	const size_t bytes = strcspn(word, " ");

	ck_assert_ptr_nonnull(reply);
	ck_assert_uint_gt(bytes, 0);
	*text += bytes;
	if (*word == '(') {
		reply->type = REDIS_REPLY_ARRAY;
		while (*(*text += strspn(*text, " ")) != ')') {
			reply->element = realloc(reply->element,
						 (reply->elements + 1) * sizeof(*reply->element));
			ck_assert_ptr_nonnull(reply->element);
			reply->element[reply->elements++] = make(text);
		}
		++*text;
	} else if (isdigit((unsigned char)*word)) {
		reply->type = REDIS_REPLY_INTEGER;
		reply->integer = strtoll(word, NULL, 10);
	} else {
		const bool marked = *word == '=';

		reply->type = REDIS_REPLY_STRING;
		reply->str = strndup(word + marked, bytes - marked);
		reply->len = bytes - marked;
	}
	return reply;
}

static void discard(redisReply *reply)
{
	for (size_t i = 0; i < reply->elements; i++)
		discard(reply->element[i]);
	free(reply->element);
	free(reply->str);
	free(reply);
}

/* ---- Who reads them ---------------------------------------------------------------------------
 */

static int read_answer(const redisReply *reply)
{
	struct slots_answer answer;

	return redis_read_answer(reply, &answer);
}

static int read_grant(const redisReply *reply)
{
	struct slots_grant grant;

	return redis_read_grant(reply, &grant);
}

static int read_status(const redisReply *reply)
{
	struct ioshape_pool_status *status;
	const int ret = redis_read_status(reply, "pool", &status, NULL);

	ck_assert(!ret == (status != NULL));
	ioshape_pool_status_free(status);
	return ret;
}

#define MEMBER(bytes)                                                                              \
	"( id r-1 job j node n rank 0 weight 1 express 0 urgent 0 bytes " bytes                    \
	" passed 4 fence 7 since 100 lease 200 )"
#define STATUS(by, job) STATUS_OF(by, job, "1", MEMBER("5"))
#define STATUS_OF(by, job, number, member)                                                         \
	"( capacity 3 by " by " used " number " pool_rate " number                                 \
	" job_rate 0 small 0 express 0 changed 1000 "                                              \
	"grants 9 grants_last_minute 2 waiter_count 1 holder_count 1 written 4096 held 10 "        \
	"waited 20 holders ( " member " ) waiters ( " member " ) jobs ( " job                      \
	" ) limits ( ( job name share 2 rate 0 ) ( user name share 1 rate 0 ) ) )"
#define JOB "( job j user u written 4096 writes 2 held 10 waited 20 )"

static const struct {
	int (*read)(const redisReply *reply);
	const char *good;
	const char *bad[5]; /* numbers, names and lists that are none of these */
} kinds[] = {
	{ read_answer,
	  "( state 1 epoch 6 capacity 3 beat 400 position 2 ticket 8 ahead somebody )",
	  { "( state 9 epoch 6 capacity 3 )", "( state 1 epoch 6 capacity 3 beat 400 position 2 )",
	    "( state 1 epoch 6 capacity )", "( 1 5 6 1 )", "1" } },
	{ read_answer,
	  "( state 2 epoch 6 capacity 3 beat 400 fence 5 weight 1 target 9 )",
	  { "( state 2 epoch 6 capacity 3 beat 400 position 2 ticket 8 ahead somebody )" } },
	{ read_answer, "( state 0 epoch 6 capacity 3 )", { "( state 0 epoch 6 )", "( )" } },
	{ read_grant,
	  "( bytes 1048576 start 10 end 20 )",
	  { "( bytes 1048576 start 20 end 10 )", "( bytes 1 start 2 )", "word" } },
	{ read_status,
	  STATUS("default", JOB),
	  { STATUS("nobody", JOB), STATUS("3", JOB), STATUS("job", "( job j user u )"), "( )" } },
};
#define KINDS ((int)ARRAY_LENGTH(kinds))

/* Nothing of a reply may be of another type than it is. */
static void damage(redisReply *part, const redisReply *whole, int (*read)(const redisReply *))
{
	const int type = part->type;

	part->type = REDIS_REPLY_NIL;
	ck_assert_int_eq(read(whole), -EPROTO);
	part->type = type;
	for (size_t i = 0; i < part->elements; i++)
		damage(part->element[i], whole, read);
}

LOOP_TEST(tests, each_part_of_a_reply_must_be_what_it_should_be, 0, KINDS)
{
	const char *text = kinds[_i].good;
	redisReply *reply = make(&text);

	ck_assert_int_eq(kinds[_i].read(reply), 0);
	damage(reply, reply, kinds[_i].read);
	ck_assert_int_eq(kinds[_i].read(reply), 0);
	discard(reply);
}

LOOP_TEST(tests, numbers_that_mean_nothing_and_short_lists_are_refused, 0, KINDS)
{
	for (size_t i = 0; i < ARRAY_LENGTH(kinds->bad) && kinds[_i].bad[i]; i++) {
		const char *text = kinds[_i].bad[i];
		redisReply *reply = make(&text);

		ck_assert_msg(kinds[_i].read(reply) == -EPROTO, "%s", kinds[_i].bad[i]);
		discard(reply);
	}
}

/* Another program may have written them. */
TEST(tests, numbers_that_no_type_holds_hide_nobody)
{
	const char *text =
		STATUS_OF("job", JOB, "=18446744073709551616", MEMBER("=18446744073709551616"));
	redisReply *reply = make(&text);
	struct ioshape_pool_status *status;

	ck_assert_int_eq(redis_read_status(reply, "p", &status, NULL), 0);
	ck_assert_uint_eq(status->pool_bytes_per_s, UINT64_MAX);
	ck_assert_uint_eq(status->used, UINT32_MAX);
	ck_assert_uint_eq(status->holders[0].expected_bytes, UINT64_MAX);
	ioshape_pool_status_free(status);
	discard(reply);
}

int main(void)
{
	return check_run("unit/replies");
}
