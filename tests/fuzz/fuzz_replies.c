/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as what a Redis sends: taken apart by hiredis, and each reply read as each answer. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "slots/redis.h"

static void check_name(const char *text)
{
	const size_t length = strnlen(text, SLOTS_NAME_BYTES);

	MUST(length < SLOTS_NAME_BYTES);
	for (size_t i = 0; i < length; i++)
		MUST(text[i] >= ' ' && text[i] <= '~');
}

static void check_status(const struct ioshape_pool_status *status)
{
	MUST(status->holder_listed <= SLOTS_LISTED && status->waiter_listed <= SLOTS_LISTED);
	MUST(status->job_listed <= SLOTS_LISTED_JOBS);
	for (size_t i = 0; i < status->holder_listed; i++)
		check_name(status->holders[i].id);
	for (size_t i = 0; i < status->waiter_listed; i++)
		check_name(status->waiters[i].node);
	for (size_t i = 0; i < status->job_listed; i++)
		check_name(status->jobs[i].user);
	MUST(status->limit_listed <= SLOTS_LIMITS);
	for (size_t i = 0; i < status->limit_listed; i++)
		check_name(status->limits[i].job ? status->limits[i].job : status->limits[i].user);
}

static void try_reply(const redisReply *reply)
{
	struct ioshape_pool_status *status;
	struct slots_answer answer;
	struct slots_grant grant;
	uint64_t number;
	char words[16];

	if (!redis_read_answer(reply, &answer)) {
		MUST(answer.state <= SLOTS_HOLDING);
		check_name(answer.ahead);
	}
	if (!redis_read_grant(reply, &grant))
		MUST(grant.start_ms <= grant.end_ms);
	redis_read_number(reply, &number);
	if (!redis_read_status(reply, "pool", &status, NULL)) {
		check_status(status);
		ioshape_pool_status_free(status);
	}
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
