/* SPDX-License-Identifier: Apache-2.0 */
/* Replies of a Redis: each part must have the expected type and value. */
/* Included, because the functions that read replies are static. */
#include "slots/redis.c"
#include "support/check_main.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct test_case tests = { .name = "replies" };

/* ---- Replies from texts: "( 1 =2 word ( 3 ) )", where =2 is a word --------------------------- */

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

/* ---- Readers of replies ---------------------------------------------------------------------- */

static int understand_answer(const redisReply *reply)
{
	struct slots_answer answer;

	return read_answer(reply, &answer);
}

static int understand_grant(const redisReply *reply)
{
	struct slots_grant grant;

	return read_grant(reply, &grant);
}

static const struct {
	int (*read)(const redisReply *reply);
	const char *good;
	const char *bad[5]; /* numbers, names and lists that are invalid */
} kinds[] = {
	{ understand_answer,
	  "( state 1 epoch 6 capacity 3 beat 400 position 2 ahead somebody )",
	  { "( state 9 epoch 6 capacity 3 )", "( state 1 epoch 6 capacity 3 beat 400 position 2 )",
	    "( state 1 epoch 6 capacity )", "( 1 5 6 1 )", "1" } },
	{ understand_answer,
	  "( state 2 epoch 6 capacity 3 beat 400 fence 5 weight 1 target 9 )",
	  { "( state 2 epoch 6 capacity 3 beat 400 position 2 ahead somebody )" } },
	{ understand_answer, "( state 0 epoch 6 capacity 3 )", { "( state 0 epoch 6 )", "( )" } },
	{ understand_grant,
	  "( bytes 1048576 start 10 end 20 )",
	  { "( bytes 1048576 start 20 end 10 )", "( bytes 1 start 2 )", "word" } },
};
#define KINDS ((int)ARRAY_LENGTH(kinds))

/* Checks that a part of another type makes the reply invalid. */
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
