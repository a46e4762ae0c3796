/* SPDX-License-Identifier: Apache-2.0 */
/* What the script's answers mean. The server is not trusted to be the one we think it is. */
#include "slots/redis.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The script's shortest time is 1 ms; nothing that it waits for is worth so many heartbeats. */
#define LEAST_BEAT_MS 20u

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

/* What any client may have made up: one that says too much must not hide all the others. */
static int read_amount(const redisReply *reply, uint64_t *number)
{
	int ret = redis_read_number(reply, number);

	return ret == -ERANGE ? 0 : ret; /* then it is the greatest there is */
}

static int read_small(const redisReply *reply, uint32_t *number)
{
	uint64_t value;

	if (read_amount(reply, &value))
		return -EPROTO;
	*number = (uint32_t)MIN(value, UINT32_MAX);
	return 0;
}

/* Others chose these texts: what could mislead a terminal is left out. */
static void copy_text(const redisReply *reply, char *into, size_t room)
{
	link_words(reply, into, room);
}

static bool is_list(const redisReply *reply, size_t at_least)
{
	return reply->type == REDIS_REPLY_ARRAY && reply->elements >= at_least;
}

int redis_read_answer(const redisReply *reply, struct slots_answer *answer)
{
	redisReply **part = reply->element;
	uint32_t state;

	memset(answer, 0, sizeof(*answer));
	if (!is_list(reply, 10) || read_small(part[0], &state) || state > SLOTS_HOLDING ||
	    redis_read_number(part[1], &answer->fence) ||
	    redis_read_number(part[2], &answer->epoch) || read_small(part[3], &answer->weight) ||
	    read_small(part[4], &answer->position) || read_small(part[5], &answer->capacity) ||
	    read_small(part[6], &answer->beat_ms) || part[7]->type != REDIS_REPLY_STRING ||
	    redis_read_number(part[8], &answer->ticket) || read_small(part[9], &answer->place))
		return -EPROTO;
	answer->state = (enum slots_state)state;
	if (answer->beat_ms)
		answer->beat_ms = MAX(answer->beat_ms, LEAST_BEAT_MS);
	copy_text(part[7], answer->ahead, sizeof(answer->ahead));
	return 0;
}

int redis_read_grant(const redisReply *reply, struct slots_grant *grant)
{
	if (!is_list(reply, 3) || redis_read_number(reply->element[0], &grant->bytes) ||
	    read_small(reply->element[1], &grant->start_ms) ||
	    read_small(reply->element[2], &grant->end_ms) || grant->end_ms < grant->start_ms)
		return -EPROTO;
	return 0;
}

/* ---- Status ---------------------------------------------------------------------------------- */

/* {id, job, node, rank, weight, express, bytes, passed, fence, since, left, urgent} */
static int read_member(const redisReply *row, bool holder, struct ioshape_pool_status *status)
{
	struct ioshape_member member = { 0 };
	redisReply **part = row->element;
	uint64_t since_ms, left_ms;
	char texts[3][SLOTS_NAME_BYTES];

	if (!is_list(row, 12))
		return -EPROTO;
	for (size_t i = 0; i < 3; i++) {
		if (part[i]->type != REDIS_REPLY_STRING)
			return -EPROTO;
		copy_text(part[i], texts[i], sizeof(texts[i]));
	}
	member.id = texts[0];
	member.job = texts[1];
	member.node = texts[2];
	if (read_small(part[3], &member.rank) || read_small(part[4], &member.weight) ||
	    read_small(part[5], &member.express) || read_amount(part[6], &member.expected_bytes) ||
	    read_amount(part[7], &member.written_bytes) || read_amount(part[8], &member.fence) ||
	    read_amount(part[9], &since_ms) || read_amount(part[10], &left_ms) ||
	    read_small(part[11], &member.urgent))
		return -EPROTO;
	member.since_s = (double)since_ms / 1e3;
	member.lease_s = (double)left_ms / 1e3;
	slots_status_add(status, holder, &member);
	return 0;
}

static int read_holder(const redisReply *row, struct ioshape_pool_status *status)
{
	return read_member(row, true, status);
}

static int read_waiter(const redisReply *row, struct ioshape_pool_status *status)
{
	return read_member(row, false, status);
}

/* {job, user, written, writes, held, waited} */
static int read_job(const redisReply *row, struct ioshape_pool_status *status)
{
	struct ioshape_pool_job job = { 0 };
	char name[SLOTS_NAME_BYTES], user[SLOTS_NAME_BYTES];
	redisReply **part = row->element;
	uint64_t held_ms, waited_ms;

	if (!is_list(row, 6) || part[0]->type != REDIS_REPLY_STRING ||
	    part[1]->type != REDIS_REPLY_STRING || read_amount(part[2], &job.written_bytes) ||
	    read_amount(part[3], &job.writes) || read_amount(part[4], &held_ms) ||
	    read_amount(part[5], &waited_ms))
		return -EPROTO;
	job.held_s = (double)held_ms / 1e3;
	job.waited_s = (double)waited_ms / 1e3;
	copy_text(part[0], name, sizeof(name));
	copy_text(part[1], user, sizeof(user));
	job.job = name;
	job.user = user;
	slots_status_add_job(status, &job);
	return 0;
}

/* {kind, name, share, rate} */
static int read_limit(const redisReply *row, struct ioshape_pool_status *status)
{
	struct ioshape_pool_limit limit = { 0 };
	char name[SLOTS_NAME_BYTES];
	redisReply **part = row->element;

	if (!is_list(row, 4) || part[0]->type != REDIS_REPLY_STRING ||
	    part[1]->type != REDIS_REPLY_STRING || read_small(part[2], &limit.share) ||
	    read_amount(part[3], &limit.bytes_per_s))
		return -EPROTO;
	copy_text(part[1], name, sizeof(name));
	*(strcmp(part[0]->str, "job") ? &limit.user : &limit.job) = name;
	slots_status_add_limit(status, &limit);
	return 0;
}

static int read_rows(const redisReply *list,
		     int (*read)(const redisReply *row, struct ioshape_pool_status *status),
		     struct ioshape_pool_status *status)
{
	int ret = is_list(list, 0) ? 0 : -EPROTO;

	for (size_t i = 0; !ret && i < list->elements; i++)
		ret = read(list->element[i], status);
	return ret;
}

static int read_numbers(const redisReply *numbers, struct ioshape_pool_status *status)
{
	static const char *const by[] = { "default", "job", "operator" };
	redisReply **part = numbers->element;
	uint32_t who, waiters, holders, order;
	uint64_t held_ms, waited_ms, changed_ms;

	if (!is_list(numbers, 16) || read_small(part[0], &status->capacity) ||
	    read_small(part[1], &who) || who >= ARRAY_LENGTH(by) ||
	    read_small(part[2], &status->used) || read_amount(part[3], &status->pool_bytes_per_s) ||
	    read_amount(part[4], &status->job_bytes_per_s) ||
	    read_amount(part[5], &status->small_bytes) || read_small(part[6], &status->express) ||
	    read_amount(part[7], &status->grants) ||
	    read_small(part[8], &status->grants_last_minute) || read_small(part[9], &waiters) ||
	    read_small(part[10], &holders) || read_amount(part[11], &status->written_bytes) ||
	    read_amount(part[12], &held_ms) || read_amount(part[13], &waited_ms) ||
	    read_small(part[14], &order) || order > IOSHAPE_ORDER_FIRST ||
	    read_amount(part[15], &changed_ms))
		return -EPROTO;
	status->held_s = (double)held_ms / 1e3;
	status->waited_s = (double)waited_ms / 1e3;
	status->changed_s = (double)changed_ms / 1e3;
	status->capacity_by = by[who];
	status->order = slots_order_name(order);
	status->waiter_count = waiters;
	status->holder_count = holders;
	return 0;
}

int redis_read_status(const redisReply *reply, const char *pool,
		      struct ioshape_pool_status **status, struct base_error *error)
{
	redisReply **part = reply->element;
	int ret;

	*status = NULL;
	if (!is_list(reply, 5))
		return -EPROTO;
	ret = slots_status_new(status, pool, "redis", error);
	if (ret)
		return ret;
	if (!read_numbers(part[0], *status) && !read_rows(part[1], read_holder, *status) &&
	    !read_rows(part[2], read_waiter, *status) && !read_rows(part[3], read_job, *status) &&
	    !read_rows(part[4], read_limit, *status))
		return 0;
	ioshape_pool_status_free(*status);
	*status = NULL;
	return -EPROTO;
}
