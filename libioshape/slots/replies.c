/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers of the script: lists of names and values. The server is not trusted to be the one we
 * think it is. A table says which names an answer has and where their values go; names that it does
 * not have are ignored.
 */
#include "slots/redis.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* The script's shortest time is 1 ms; nothing that it waits for is worth so many heartbeats. */
#define LEAST_BEAT_MS 20u

/* ---- Values ---------------------------------------------------------------------------------- */

/* Integers, and numbers as text, which Lua uses above 2^53 or where it was given text. */
static int read_number(const redisReply *reply, uint64_t *number)
{
	char *end;

	if (reply->type == REDIS_REPLY_INTEGER) {
		*number = reply->integer > 0 ? (uint64_t)reply->integer : 0;
		return 0;
	}
	if (reply->type != REDIS_REPLY_STRING || !reply->len)
		return -EPROTO;
	if (reply->str[0] == '-') {
		*number = 0;
		return 0;
	}
	if (reply->str[0] < '0' || reply->str[0] > '9')
		return -EPROTO;
	errno = 0;
	*number = strtoull(reply->str, &end, 10);
	if (end != reply->str + reply->len)
		return -EPROTO;
	return errno ? -ERANGE : 0;
}

enum kind {
	EXACT,  /* uint64_t; a larger number is refused */
	AMOUNT, /* uint64_t; any client may have made it up: a larger number counts as the largest
		 */
	SMALL,  /* uint32_t, in the same way */
	TEXT    /* char[]; others chose it: what could mislead a terminal is left out */
};

struct field {
	const char *name;
	enum kind kind;
	size_t offset;
	size_t bytes; /* of a text, with the final 0 */
};

#define FIELD(name, kind, type, member)                                                            \
	{                                                                                          \
		name, kind, offsetof(type, member), sizeof(((type *)NULL)->member)                 \
	}

static int take(const redisReply *value, const struct field *field, void *into)
{
	void *at = (char *)into + field->offset;
	uint64_t number;
	int ret;

	if (field->kind == TEXT) {
		if (value->type != REDIS_REPLY_STRING)
			return -EPROTO;
		link_words(value, at, field->bytes);
		return 0;
	}
	ret = read_number(value, &number);
	if (ret && (ret != -ERANGE || field->kind == EXACT))
		return -EPROTO;
	if (field->kind == SMALL)
		*(uint32_t *)at = (uint32_t)MIN(number, UINT32_MAX);
	else
		*(uint64_t *)at = number;
	return 0;
}

/* Return the value of a name, or NULL: there is none, or this is no list of names and values. */
static const redisReply *find(const redisReply *reply, const char *name)
{
	if (reply->type != REDIS_REPLY_ARRAY || reply->elements % 2)
		return NULL;
	for (size_t i = 0; i < reply->elements; i += 2) {
		if (reply->element[i]->type != REDIS_REPLY_STRING)
			return NULL;
		if (!strcmp(reply->element[i]->str, name))
			return reply->element[i + 1];
	}
	return NULL;
}

/* Read all fields of a table. Each of them must be there. */
static int take_all(const redisReply *reply, const struct field *fields, size_t count, void *into)
{
	for (size_t i = 0; i < count; i++) {
		const redisReply *value = find(reply, fields[i].name);

		if (!value || take(value, &fields[i], into))
			return -EPROTO;
	}
	return 0;
}

#define TAKE(reply, fields, into) take_all(reply, fields, ARRAY_LENGTH(fields), into)

/* ---- Requests -------------------------------------------------------------------------------- */

int redis_read_answer(const redisReply *reply, struct slots_answer *answer)
{
	static const struct field all[] = {
		FIELD("state", SMALL, struct slots_answer, state),
		FIELD("epoch", EXACT, struct slots_answer, epoch),
		FIELD("capacity", SMALL, struct slots_answer, capacity),
	};
	static const struct field waiter[] = {
		FIELD("beat", SMALL, struct slots_answer, beat_ms),
		FIELD("position", SMALL, struct slots_answer, position),
		FIELD("ahead", TEXT, struct slots_answer, ahead),
	};
	static const struct field holder[] = {
		FIELD("beat", SMALL, struct slots_answer, beat_ms),
		FIELD("fence", EXACT, struct slots_answer, fence),
		FIELD("weight", SMALL, struct slots_answer, weight),
		FIELD("target", SMALL, struct slots_answer, place),
	};

	_Static_assert(sizeof(answer->state) == sizeof(uint32_t), "not read as a number");
	memset(answer, 0, sizeof(*answer));
	if (TAKE(reply, all, answer) || (uint32_t)answer->state > SLOTS_HOLDING ||
	    (answer->state == SLOTS_WAITING && TAKE(reply, waiter, answer)) ||
	    (answer->state == SLOTS_HOLDING && TAKE(reply, holder, answer)))
		return -EPROTO;
	if (answer->beat_ms)
		answer->beat_ms = MAX(answer->beat_ms, LEAST_BEAT_MS);
	return 0;
}

int redis_read_grant(const redisReply *reply, struct slots_grant *grant)
{
	static const struct field fields[] = {
		FIELD("bytes", AMOUNT, struct slots_grant, bytes),
		FIELD("start", SMALL, struct slots_grant, start_ms),
		FIELD("end", SMALL, struct slots_grant, end_ms),
	};

	return TAKE(reply, fields, grant) || grant->end_ms < grant->start_ms ? -EPROTO : 0;
}
