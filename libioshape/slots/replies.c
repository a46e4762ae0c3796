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
int redis_read_number(const redisReply *reply, uint64_t *number)
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
	EXACT,   /* uint64_t; a larger number is refused */
	AMOUNT,  /* uint64_t; any client may have made it up: a larger number counts as the largest
		  */
	SMALL,   /* uint32_t, in the same way */
	COUNT,   /* size_t, in the same way */
	SECONDS, /* double, from milliseconds */
	TEXT     /* char[]; others chose it: what could mislead a terminal is left out */
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
	ret = redis_read_number(value, &number);
	if (ret && (ret != -ERANGE || field->kind == EXACT))
		return -EPROTO;
	switch (field->kind) {
	case SMALL:
		*(uint32_t *)at = (uint32_t)MIN(number, UINT32_MAX);
		break;
	case COUNT:
		*(size_t *)at = (size_t)MIN(number, SIZE_MAX);
		break;
	case SECONDS:
		*(double *)at = (double)number / 1e3;
		break;
	default:
		*(uint64_t *)at = number;
	}
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
		FIELD("ticket", EXACT, struct slots_answer, ticket),
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

/* ---- Status ---------------------------------------------------------------------------------- */

typedef char text[SLOTS_NAME_BYTES];

struct member_row {
	struct ioshape_member member;
	text id, job, node;
};

static int read_member(const redisReply *reply, bool holder, struct ioshape_pool_status *status)
{
	static const struct field fields[] = {
		FIELD("id", TEXT, struct member_row, id),
		FIELD("job", TEXT, struct member_row, job),
		FIELD("node", TEXT, struct member_row, node),
		FIELD("rank", SMALL, struct member_row, member.rank),
		FIELD("weight", SMALL, struct member_row, member.weight),
		FIELD("express", SMALL, struct member_row, member.express),
		FIELD("urgent", SMALL, struct member_row, member.urgent),
		FIELD("bytes", AMOUNT, struct member_row, member.expected_bytes),
		FIELD("passed", AMOUNT, struct member_row, member.written_bytes),
		FIELD("fence", AMOUNT, struct member_row, member.fence),
		FIELD("since", SECONDS, struct member_row, member.since_s),
		FIELD("lease", SECONDS, struct member_row, member.lease_s),
	};
	struct member_row row = { .member.id = row.id,
				  .member.job = row.job,
				  .member.node = row.node };

	if (TAKE(reply, fields, &row))
		return -EPROTO;
	slots_status_add(status, holder, &row.member);
	return 0;
}

static int read_holder(const redisReply *reply, struct ioshape_pool_status *status)
{
	return read_member(reply, true, status);
}

static int read_waiter(const redisReply *reply, struct ioshape_pool_status *status)
{
	return read_member(reply, false, status);
}

struct job_row {
	struct ioshape_pool_job job;
	text name, user;
};

static int read_job(const redisReply *reply, struct ioshape_pool_status *status)
{
	static const struct field fields[] = {
		FIELD("job", TEXT, struct job_row, name),
		FIELD("user", TEXT, struct job_row, user),
		FIELD("written", AMOUNT, struct job_row, job.written_bytes),
		FIELD("writes", AMOUNT, struct job_row, job.writes),
		FIELD("held", SECONDS, struct job_row, job.held_s),
		FIELD("waited", SECONDS, struct job_row, job.waited_s),
	};
	struct job_row row = { .job.job = row.name, .job.user = row.user };

	if (TAKE(reply, fields, &row))
		return -EPROTO;
	slots_status_add_job(status, &row.job);
	return 0;
}

struct limit_row {
	struct ioshape_pool_limit limit;
	text name;
};

static int read_limit(const redisReply *reply, struct ioshape_pool_status *status)
{
	const bool is_job = find(reply, "job") != NULL;
	const struct field fields[] = {
		FIELD(is_job ? "job" : "user", TEXT, struct limit_row, name),
		FIELD("share", SMALL, struct limit_row, limit.share),
		FIELD("rate", AMOUNT, struct limit_row, limit.bytes_per_s),
	};
	struct limit_row row = { .limit = { 0 } };

	if (TAKE(reply, fields, &row))
		return -EPROTO;
	*(is_job ? &row.limit.job : &row.limit.user) = row.name;
	slots_status_add_limit(status, &row.limit);
	return 0;
}

static int read_rows(const redisReply *reply, const char *name,
		     int (*read)(const redisReply *row, struct ioshape_pool_status *status),
		     struct ioshape_pool_status *status)
{
	const redisReply *rows = find(reply, name);
	int ret = rows && rows->type == REDIS_REPLY_ARRAY ? 0 : -EPROTO;

	for (size_t i = 0; !ret && i < rows->elements; i++)
		ret = read(rows->element[i], status);
	return ret;
}

static int read_who_set(const redisReply *reply, struct ioshape_pool_status *status)
{
	static const char *const known[] = { "default", "job", "operator" };
	const redisReply *by = find(reply, "by");

	status->capacity_by = NULL;
	for (size_t i = 0; by && by->type == REDIS_REPLY_STRING && i < ARRAY_LENGTH(known); i++) {
		if (!strcmp(by->str, known[i]))
			status->capacity_by = known[i];
	}
	return status->capacity_by ? 0 : -EPROTO;
}

int redis_read_status(const redisReply *reply, const char *pool,
		      struct ioshape_pool_status **status, struct base_error *error)
{
	static const struct field fields[] = {
		FIELD("capacity", SMALL, struct ioshape_pool_status, capacity),
		FIELD("used", SMALL, struct ioshape_pool_status, used),
		FIELD("pool_rate", AMOUNT, struct ioshape_pool_status, pool_bytes_per_s),
		FIELD("job_rate", AMOUNT, struct ioshape_pool_status, job_bytes_per_s),
		FIELD("small", AMOUNT, struct ioshape_pool_status, small_bytes),
		FIELD("express", SMALL, struct ioshape_pool_status, express),
		FIELD("changed", SECONDS, struct ioshape_pool_status, changed_s),
		FIELD("grants", AMOUNT, struct ioshape_pool_status, grants),
		FIELD("grants_last_minute", SMALL, struct ioshape_pool_status, grants_last_minute),
		FIELD("holder_count", COUNT, struct ioshape_pool_status, holder_count),
		FIELD("waiter_count", COUNT, struct ioshape_pool_status, waiter_count),
		FIELD("written", AMOUNT, struct ioshape_pool_status, written_bytes),
		FIELD("held", SECONDS, struct ioshape_pool_status, held_s),
		FIELD("waited", SECONDS, struct ioshape_pool_status, waited_s),
	};
	int ret = slots_status_new(status, pool, "redis", error);

	if (ret)
		return ret;
	if (!TAKE(reply, fields, *status) && !read_who_set(reply, *status) &&
	    !read_rows(reply, "holders", read_holder, *status) &&
	    !read_rows(reply, "waiters", read_waiter, *status) &&
	    !read_rows(reply, "jobs", read_job, *status) &&
	    !read_rows(reply, "limits", read_limit, *status))
		return 0;
	ioshape_pool_status_free(*status);
	*status = NULL;
	return -EPROTO;
}
