/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses any bytes as output of a Redis with hiredis, and reads each reply as an answer of each
 * kind.
 */
/* Included, because the functions that read answers are static. */
#include "slots/redis.c"

#include "fuzz.h"

static void check_name(const char *text)
{
	const size_t length = strnlen(text, SLOTS_NAME_BYTES);

	MUST(length < SLOTS_NAME_BYTES);
	for (size_t i = 0; i < length; i++)
		MUST(text[i] >= ' ' && text[i] <= '~');
}

static void try_reply(const redisReply *reply)
{
	struct slots_answer answer;
	struct slots_grant grant;
	char words[16];

	if (!read_answer(reply, &answer)) {
		MUST(answer.state <= SLOTS_HOLDING);
		check_name(answer.ahead);
	}
	if (!read_grant(reply, &grant))
		MUST(grant.start_ms <= grant.end_ms);
	if (reply->type == REDIS_REPLY_ERROR || reply->type == REDIS_REPLY_STRING) {
		link_words(reply, words, sizeof(words));
		check_name(words);
	}
	link_says(reply, "NOSCRIPT");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	redisReader *reader = redisReaderCreate();
	void *reply = NULL;

	MUST(reader);
	link_limit_replies(reader);
	redisReaderFeed(reader, (const char *)data, bytes);
	while (redisReaderGetReply(reader, &reply) == REDIS_OK && reply) {
		try_reply(reply);
		freeReplyObject(reply);
	}
	redisReaderFree(reader);
	return 0;
}
