/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between ranks: the table of all messages, how they are written and read, the rounds that
 * they belong to, heartbeats, and waiting for messages. A message is a value that a rank puts into
 * the store, in the scope of a round: numbers, texts and errors, one after the other.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Names of ranks for error messages ------------------------------------------------------- */

const char *group_show_rank(const struct ioshape_group *group, uint32_t rank,
			    char into[GROUP_RANK_BYTES])
{
	const char *where = group->ranks[rank].where;

	if (*where)
		snprintf(into, GROUP_RANK_BYTES, "rank %u (%.64s)", rank, where);
	else
		snprintf(into, GROUP_RANK_BYTES, "rank %u", rank);
	return into;
}

void group_name_rank(struct group_names *names, const struct ioshape_group *group, uint32_t rank)
{
	const size_t used = strlen(names->text), size = sizeof(names->text) - used;

	if (!names->count++)
		names->first = rank;
	if (names->count <= GROUP_MOST_NAMED)
		snprintf(names->text + used, size, "%s%s", used ? ", " : "",
			 GROUP_SHOWN_RANK(group, rank));
	else if (names->count == GROUP_MOST_NAMED + 1)
		snprintf(names->text + used, size, " and others");
}

int group_fail_of_rank(const struct ioshape_group *group, uint32_t rank,
		       const struct base_error *failure, struct base_error *error)
{
	struct base_error named = *failure;

	base_error_of_rank(&named, rank);
	base_rephrase(&named, failure->code, "%s: %s", GROUP_SHOWN_RANK(group, rank),
		      failure->sentence);
	return base_propagate(error, &named);
}

/* ---- Payloads -------------------------------------------------------------------------------- */

#define NUMBER_BYTES 8

void group_pass_number(struct group_payload *payload, uint64_t *number)
{
	struct group_body *body = payload->body;
	uint8_t bytes[NUMBER_BYTES];

	if (body) {
		base_put_le(bytes, *number, NUMBER_BYTES);
		body->failed |= base_buffer_append(&body->bytes, bytes, NUMBER_BYTES) != 0;
		return;
	}
	payload->bad |= payload->left < NUMBER_BYTES;
	*number = payload->bad ? 0 : base_get_le(payload->at, NUMBER_BYTES);
	if (payload->bad)
		return;
	payload->at += NUMBER_BYTES;
	payload->left -= NUMBER_BYTES;
}

/* Passes a length and that many bytes. Returns where the bytes that were read begin in the
 * message. */
static const uint8_t *pass_chunk(struct group_payload *payload, const void *data, size_t *bytes)
{
	struct group_body *body = payload->body;
	uint64_t length = *bytes;
	const uint8_t *at;

	group_pass_number(payload, &length);
	if (body) {
		body->failed |= base_buffer_append(&body->bytes, data, *bytes) != 0;
		return data;
	}
	payload->bad |= length > payload->left;
	*bytes = payload->bad ? 0 : length;
	at = payload->at;
	/* In an empty message the pointer is NULL, to which C does not allow adding. */
	if (*bytes)
		payload->at += *bytes;
	payload->left -= *bytes;
	return at;
}

void group_pass_small(struct group_payload *payload, uint32_t *number, uint32_t most)
{
	uint64_t whole = *number;

	group_pass_number(payload, &whole);
	payload->bad |= whole > most;
	/* Writing leaves *number untouched: other threads may be reading it. */
	if (!payload->body)
		*number = payload->bad ? 0 : (uint32_t)whole;
}

void group_pass_half(struct group_payload *payload, uint32_t *number)
{
	group_pass_small(payload, number, UINT32_MAX);
}

static void pass_flag(struct group_payload *payload, bool *flag)
{
	uint32_t number = *flag;

	group_pass_small(payload, &number, 1);
	if (!payload->body)
		*flag = number;
}

static void pass_mode(struct group_payload *payload, enum ioshape_mode *mode)
{
	uint32_t number = *mode;

	group_pass_small(payload, &number, IOSHAPE_MODE_RANK0);
	if (!payload->body)
		*mode = number;
}

/* Passes a text; reading cuts off what does not fit. */
void group_pass_text(struct group_payload *payload, char *text, size_t bytes)
{
	size_t length = payload->body ? strlen(text) : 0;
	const uint8_t *at = pass_chunk(payload, text, &length);

	if (payload->body)
		return;
	length = MIN(length, bytes - 1);
	if (length)
		memcpy(text, at, length);
	text[length] = 0;
}
#define PASS_TEXT(payload, text) group_pass_text(payload, text, sizeof(text))

static void pass_mac(struct group_payload *payload, uint8_t mac[BASE_MAC_BYTES])
{
	size_t bytes = BASE_MAC_BYTES;
	const uint8_t *at = pass_chunk(payload, mac, &bytes);

	payload->bad |= bytes != BASE_MAC_BYTES;
	if (!payload->body && !payload->bad)
		memcpy(mac, at, BASE_MAC_BYTES);
}

/* Passes a failure. If its code is 0, nothing follows the code. */
void group_pass_failure(struct group_payload *payload, struct base_error *failure)
{
	uint64_t code = (uint64_t)(int64_t)failure->code;
	char remedy[BASE_ERROR_TEXT_BYTES];

	if (!payload->body)
		base_error_begin(failure);
	group_pass_number(payload, &code);
	payload->bad |= (int)(int64_t)code > 0;
	if (!code || payload->bad)
		return;
	PASS_TEXT(payload, failure->sentence);
	PASS_TEXT(payload, failure->remedy);
	PASS_TEXT(payload, failure->path);
	PASS_TEXT(payload, failure->record);
	group_pass_half(payload, &failure->known);
	group_pass_number(payload, &failure->offset);
	group_pass_number(payload, &failure->needed_bytes);
	group_pass_number(payload, &failure->free_bytes);
	group_pass_half(payload, &failure->rank);
	if (payload->body)
		return;
	strcpy(remedy, failure->remedy);
	base_rephrase_with(failure, (int)(int64_t)code, remedy, "%s", failure->sentence);
	if (payload->bad)
		base_error_begin(failure);
}

void group_pass_bytes(struct group_payload *payload, struct base_buffer *bytes)
{
	size_t length = bytes->bytes;
	const uint8_t *at = pass_chunk(payload, bytes->data, &length);

	if (!payload->body)
		payload->bad |= base_buffer_append(bytes, at, length) != 0;
}

void group_pass_list(struct group_payload *payload, uint32_t **list, uint32_t count, uint32_t most)
{
	if (!payload->body) {
		payload->bad |= count > payload->left / NUMBER_BYTES;
		*list = payload->bad ? NULL : calloc(MAX(count, 1), sizeof(**list));
		payload->bad |= !*list;
	}
	for (uint32_t i = 0; *list && i < count; i++)
		group_pass_small(payload, &(*list)[i], most);
}

/* Passes the number of a list's elements. Before reading, *count says for how many there is
 * memory. */
static void pass_count(struct group_payload *payload, uint32_t *count)
{
	group_pass_small(payload, count, *count);
}

static void pass_nothing(struct group_payload *payload, void *nothing)
{
	(void)payload, (void)nothing;
}

static void pass_hello(struct group_payload *payload, void *message)
{
	struct group_hello *hello = message;

	group_pass_number(payload, &hello->own.nonce);
	group_pass_number(payload, &hello->ranks);
	group_pass_number(payload, &hello->roster);
	PASS_TEXT(payload, hello->own.node_key);
	PASS_TEXT(payload, hello->own.where);
	PASS_TEXT(payload, hello->own.domain);
	pass_flag(payload, &hello->own.has_tier);
}

static void pass_roster(struct group_payload *payload, void *message)
{
	struct group_roster *roster = message;

	group_pass_number(payload, &roster->id);
	pass_flag(payload, &roster->complete);
	pass_mode(payload, &roster->mode);
	pass_flag(payload, &roster->has_tiers);
	group_pass_half(payload, &roster->nodes);
	pass_count(payload, &roster->count);
	for (uint32_t rank = 0; rank < roster->count; rank++) {
		group_pass_number(payload, &roster->ranks[rank].nonce);
		group_pass_half(payload, &roster->ranks[rank].node);
		PASS_TEXT(payload, roster->ranks[rank].where);
	}
}

static void pass_beat(struct group_payload *payload, void *message)
{
	struct group_beat *beat = message;

	group_pass_number(payload, &beat->now_ns);
	group_pass_number(payload, &beat->round);
}

static void pass_want(struct group_payload *payload, void *message)
{
	struct group_want *want = message;

	group_pass_failure(payload, &want->failure);
	group_pass_number(payload, &want->step);
	group_pass_number(payload, &want->bytes);
	pass_flag(payload, &want->sample.known);
	pass_mac(payload, want->sample.key.mac);
}

static void pass_plan(struct group_payload *payload, void *message)
{
	struct group_plan *plan = message;
	uint32_t asks = plan->asks;

	group_pass_failure(payload, &plan->failure);
	group_pass_small(payload, &asks, GROUP_ASKS_SPACE);
	if (!payload->body)
		plan->asks = asks;
	pass_mac(payload, plan->key);
	pass_mode(payload, &plan->mode);
	PASS_TEXT(payload, plan->why);
	pass_flag(payload, &plan->near);
	pass_flag(payload, &plan->together);
	PASS_TEXT(payload, plan->not_near);
	PASS_TEXT(payload, plan->attempt);
	group_pass_number(payload, &plan->alignment);
	group_pass_number(payload, &plan->total_bytes);
	group_pass_number(payload, &plan->repeated_bytes);
	pass_count(payload, &plan->count);
	for (uint32_t rank = 0; rank < plan->count; rank++) {
		group_pass_number(payload, &plan->ranks[rank].bytes);
		group_pass_half(payload, &plan->ranks[rank].same);
		group_pass_half(payload, &plan->ranks[rank].kept);
		pass_flag(payload, &plan->ranks[rank].asked);
	}
}

static void pass_digest(struct group_payload *payload, void *message)
{
	struct group_digest *digest = message;

	group_pass_failure(payload, &digest->failure);
	group_pass_number(payload, &digest->sum.key.bytes);
	pass_mac(payload, digest->sum.key.mac);
}

static void pass_call(struct group_payload *payload, void *message)
{
	struct group_call *call = message;

	group_pass_half(payload, &call->rank);
}

static void pass_written(struct group_payload *payload, void *message)
{
	struct group_written *written = message;

	group_pass_failure(payload, &written->failure);
	PASS_TEXT(payload, written->name);
	group_pass_number(payload, &written->bytes);
	group_pass_half(payload, &written->crc32);
	pass_count(payload, &written->count);
	for (uint32_t i = 0; i < written->count; i++) {
		group_pass_half(payload, &written->shards[i].rank);
		group_pass_half(payload, &written->shards[i].crc32);
		group_pass_number(payload, &written->shards[i].offset);
		group_pass_number(payload, &written->shards[i].bytes);
	}
}

static void pass_verdict(struct group_payload *payload, void *message)
{
	struct group_verdict *verdict = message;

	group_pass_failure(payload, &verdict->failure);
	group_pass_number(payload, &verdict->checkpoint_bytes);
	PASS_TEXT(payload, verdict->unprotected);
}

static void pass_found(struct group_payload *payload, void *message)
{
	struct group_found *found = message;

	group_pass_failure(payload, &found->failure);
	group_pass_number(payload, &found->step);
	pass_flag(payload, &found->near);
}

static void pass_answer(struct group_payload *payload, void *message)
{
	struct group_answer *answer = message;

	group_pass_failure(payload, &answer->failure);
	PASS_TEXT(payload, answer->remark);
}

static void pass_commit(struct group_payload *payload, void *message)
{
	struct group_commit *commit = message;

	group_pass_bytes(payload, &commit->manifest);
	group_pass_bytes(payload, &commit->plan);
}

/* ---- The table of messages ------------------------------------------------------------------- */

/*
 * All messages between ranks, in the order in which they are sent. Within a round, "all" means all
 * ranks but rank 0, which decides. tier/nodes.c has the messages by which nodes compare their tiers
 * and restore a checkpoint.
 */

/* Opening the group, all → rank 0: identity of the rank. Sent again for each roster that it has
 * read. */
const struct group_message group_hello = { "hello", pass_hello };
/* Rank 0 → all: the ranks. Sent again if a rank has restarted, and as complete when all ranks have
 * answered it with a hello. */
const struct group_message group_roster = { "roster", pass_roster };
/* Rank 0 → all, first of all: replaces the roster of an earlier run of the job. */
const struct group_message group_no_roster = { "roster", pass_nothing };

/* Any rank → the ranks that wait for it, regularly during everything that takes long. */
const struct group_message group_beat = { "beat", pass_beat };

/* A save, all → rank 0: how much each rank saves, or why it saves nothing. */
const struct group_message group_want = { "want", pass_want };
/* Rank 0 → all: the plan; or a question, and the next message when it was answered. */
const struct group_message group_plans[GROUP_MOST_PLANS] = { { "plan", pass_plan },
							     { "plan2", pass_plan },
							     { "plan3", pass_plan } };
/* Ranks that were asked → rank 0. */
const struct group_message group_digest = { "digest", pass_digest };
/* A writer → the ranks of other nodes, one after the other: asks them to send. */
const struct group_message group_call = { "call", pass_call };
/* A rank that was called → its writer: begins to send now. */
const struct group_message group_here = { "here", pass_nothing };
/* Writers → rank 0: what they have written. A rank that cannot send → its writer and rank 0. */
const struct group_message group_done = { "done", pass_written };
/* On tiers of several nodes, the first rank of each → rank 0: whether it has free space. */
const struct group_message group_space = { "size", pass_answer };
/* Rank 0 → the first rank of each node: asks it to commit its files. */
const struct group_message group_commit = { "commit", pass_commit };
/* The first rank of each node → rank 0: whether its files are committed, and why they are
 * unprotected. */
const struct group_message group_kept = { "kept", pass_answer };
/* Rank 0 → all: whether the save succeeded. */
const struct group_message group_verdict = { "verdict", pass_verdict };

/* Search for the newest checkpoint, rank 0 → all: the candidate of this round. */
const struct group_message group_next = { "next", pass_found };
/* On tiers, the first rank of each node → rank 0: whether it has the files that its ranks need. */
const struct group_message group_restored = { "restored", pass_answer };
/* Rank 0 → all: whether the candidate's files are on the tiers of the nodes that want them. */
const struct group_message group_whole = { "whole", pass_found };
/* All → rank 0: whether this rank's share of the candidate is intact. */
const struct group_message group_checked = { "checked", pass_found };
/* Rank 0 → all: whether all shares are intact. */
const struct group_message group_intact = { "intact", pass_found };

/* Freeing the group, all → rank 0, which waits for it. */
const struct group_message group_bye = { "bye", pass_nothing };

void group_write_message(const struct group_message *message, struct group_body *body,
			 const void *payload)
{
	struct group_payload writing = { .body = body };

	/* pass() only reads the payload while it writes the message. */
	message->pass(&writing, (void *)(uintptr_t)payload);
}

bool group_read_message(const struct group_message *message, const struct base_buffer *body,
			void *payload)
{
	struct group_payload reading = { .at = body->data, .left = body->bytes };

	message->pass(&reading, payload);
	return !reading.bad && !reading.left;
}

/* Longest sleep between two looks into the store: an abort is noticed this soon. */
#define LOOK_MS 100u

/* ---- Rounds ---------------------------------------------------------------------------------- */

uint64_t group_round_reserve(struct ioshape_group *group)
{
	uint64_t number;

	pthread_mutex_lock(&group->lock);
	number = group->next_round++;
	pthread_mutex_unlock(&group->lock);
	return number;
}

/* Sets only the round's scope. */
static void name_round(struct group_round *round, const struct ioshape_group *group,
		       uint64_t number)
{
	snprintf(round->scope, sizeof(round->scope), "r%016llx-%llu", (unsigned long long)group->id,
		 (unsigned long long)number);
}

void group_round_begin(struct group_round *round, struct ioshape_group *group, uint64_t number,
		       const atomic_bool *abort)
{
	*round = (struct group_round){ .group = group, .number = number, .abort = abort };
	name_round(round, group, number);
	/* An aborted round waits for its turn, too: the others expect messages of this rank in
	 * every round. */
	pthread_mutex_lock(&group->lock);
	while (group->round != number)
		pthread_cond_wait(&group->change, &group->lock);
	pthread_mutex_unlock(&group->lock);
	/* Earlier rounds have ended, so this rank's messages of them have been read. */
	if (group->options.rank)
		group_round_forget(round);
}

void group_round_forget(const struct group_round *round)
{
	struct ioshape_group *group = round->group;
	struct group_round last;

	for (; group->store && group->kept_round < round->number; group->kept_round++) {
		name_round(&last, group, group->kept_round);
		store_drop(group->store, last.scope);
	}
	store_close(group->met);
	group->met = NULL;
}

void group_round_end(struct group_round *round)
{
	struct ioshape_group *group = round->group;

	pthread_mutex_lock(&group->lock);
	group->round++;
	pthread_cond_broadcast(&group->change);
	pthread_mutex_unlock(&group->lock);
}

/* ---- Sending messages ------------------------------------------------------------------------ */

static void name_message(char into[STORE_NAME_BYTES], const char *what, uint32_t rank)
{
	snprintf(into, STORE_NAME_BYTES, "%s-%u", what, rank);
}

static int check_abort(const struct group_round *round, struct base_error *error)
{
	if (round->abort && atomic_load_explicit(round->abort, memory_order_relaxed))
		return base_fail_reason(error, -ECANCELED, "the save was stopped");
	return 0;
}

void group_round_rest(struct group_round *round)
{
	struct ioshape_group *group = round->group;

	if (group->options.comm && group->options.comm->progress)
		group->options.comm->progress(group->options.comm->user);
	store_wait(group->store, LOOK_MS);
}

static int put_message(struct group_round *round, const char *what, struct group_body *body,
		       struct base_error *error)
{
	struct ioshape_group *group = round->group;
	uint64_t begin_ns = base_now_ns();
	char name[STORE_NAME_BYTES];
	int ret = 0;

	if (body->failed)
		ret = base_no_memory(error, "a message to the other ranks", body->bytes.bytes);
	name_message(name, what, group->options.rank);
	while (!ret && group->store) {
		struct base_error why = { 0 };

		ret = store_put(group->store, round->scope, name, body->bytes.data,
				body->bytes.bytes, &why);
		if (!ret)
			break;
		if (ret == IOSHAPE_E_COORDINATOR && base_now_ns() - begin_ns < group->deadline_ns &&
		    !store_has_ended(group->store, 0)) {
			group_round_rest(round);
			ret = 0;
			continue;
		}
		base_fail_reason(error, ret, "cannot send a message to the other ranks of %s: %s",
				 group->directory, why.text);
		/* Rank 0 has ended. Its folder may be gone as well: other jobs remove the folders
		 * of dead jobs. */
		if (ret == IOSHAPE_E_COORDINATOR && store_has_ended(group->store, 0))
			base_error_of_rank(error, 0);
	}
	base_buffer_free(&body->bytes);
	return ret;
}

int group_tell(struct group_round *round, const struct group_message *message, const void *payload,
	       struct base_error *error)
{
	struct group_body body = { 0 };

	group_write_message(message, &body, payload);
	return put_message(round, message->name, &body, error);
}

void group_round_beat(struct group_round *round)
{
	struct ioshape_group *group = round->group;
	uint64_t now_ns = base_now_ns();
	struct group_body body = { 0 };
	char name[STORE_NAME_BYTES];

	/* Several heartbeats fit into a deadline, so that a late or lost one does no harm. */
	if (!group->store || round->silent ||
	    now_ns - round->last_beat_ns < MIN(group->deadline_ns / 8, 500000000ull))
		return;
	round->last_beat_ns = now_ns;
	group_write_message(&group_beat, &body, &(struct group_beat){ now_ns, round->number });
	name_message(name, group_beat.name, group->options.rank);
	/* Best effort: the next heartbeat follows soon. */
	if (!body.failed)
		store_put(group->store, group->life, name, body.bytes.data, body.bytes.bytes, NULL);
	base_buffer_free(&body.bytes);
}

int group_round_track(void *user, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes)
{
	struct group_round *round = user;

	round->done_bytes = done_bytes;
	group_round_beat(round);
	if (!round->save)
		return 0;
	/* A complete file is not the end of a group's save: the commit follows. */
	round->phase = MAX(round->phase, MIN(phase, IOSHAPE_PHASE_COMMIT));
	return save_track(round->save, round->phase, done_bytes, total_bytes);
}

int group_round_go_on(struct group_round *round, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes, struct base_error *error)
{
	if (group_round_track(round, phase, done_bytes, total_bytes))
		return base_fail_reason(error, -ECANCELED, "the save was stopped");
	return check_abort(round, error);
}

/* ---- Waiting for one rank -------------------------------------------------------------------- */

static void hear_beat(struct group_round *round, uint32_t rank, struct group_watched *watched,
		      const struct base_buffer *body)
{
	struct group_rank *known = &round->group->ranks[rank];
	struct group_beat beat;

	if (!group_read_message(&group_beat, body, &beat))
		return;
	/* Ignore a heartbeat that is no newer: another user of the Redis may have put an old one
	 * there again. */
	if (beat.now_ns > known->beat) {
		known->beat = beat.now_ns;
		known->heard_ns = base_now_ns();
	}
	watched->heard_ns = MAX(watched->heard_ns, known->heard_ns);
	watched->ahead = beat.round > round->number;
}

struct lost {
	struct group_names names;
	bool gone, ahead;
};

static bool is_overdue(const struct group_round *round, const struct group_watched *watched)
{
	return base_now_ns() - watched->heard_ns > round->group->deadline_ns;
}

/* Fails because ranks were lost. `missing` says what they failed to do, if they neither ended nor
 * went on to a later round. `store_says` is what the store reported, or "". */
static int fail_lost(const struct group_round *round, const struct lost *lost, const char *missing,
		     const char *store_says, struct base_error *error)
{
	if (lost->gone)
		base_fail_reason(error, -ETIMEDOUT, "%s ended or was killed", lost->names.text);
	else if (lost->ahead)
		base_fail_reason(error, -ETIMEDOUT, "%s continued without reporting its result",
				 lost->names.text);
	else
		base_fail_reason(error, -ETIMEDOUT, "%s %s within %u s (deadline_ms)%s%s",
				 lost->names.text, missing,
				 round->group->options.deadline_ms / 1000, *store_says ? "; " : "",
				 store_says);
	base_error_of_rank(error, lost->names.first);
	return -ETIMEDOUT;
}

/* Looks once for a message. Returns -EAGAIN if it is not there and the rank is not lost. */
static int look(struct group_round *round, const char *what, uint32_t rank,
		struct group_watched *watched, struct base_buffer *body, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct base_error why = { 0 };
	struct lost lost = { .ahead = watched->ahead };
	char name[STORE_NAME_BYTES];
	int ret;

	if (!watched->heard_ns)
		watched->heard_ns = base_now_ns();
	/* Check this before the store: a message that the rank put before it ended is still
	 * there. */
	lost.gone = store_has_ended(group->store, rank);
	name_message(name, what, rank);
	ret = store_get(group->store, round->scope, name, body, &why);
	if (!ret) {
		store_has_news(group->store);
		return 0;
	}
	if (ret != -EAGAIN && ret != IOSHAPE_E_COORDINATOR)
		return base_fail_reason(error, ret, "cannot read the message of %s: %s",
					GROUP_SHOWN_RANK(group, rank), why.text);
	name_message(name, group_beat.name, rank);
	if (ret == -EAGAIN && !store_get(group->store, group->life, name, body, &why))
		hear_beat(round, rank, watched, body);
	/* `lost.ahead` is from the look before: if the rank had put the message, this look would
	 * have found it. */
	if (!lost.gone && !lost.ahead && !is_overdue(round, watched))
		return -EAGAIN;
	group_name_rank(&lost.names, group, rank);
	return fail_lost(round, &lost, "sent no heartbeat", why.text, error);
}

int group_look(struct group_round *round, const struct group_message *message, uint32_t rank,
	       struct group_watched *watched, void *payload, struct base_error *error)
{
	struct base_buffer body = { 0 };
	int ret = look(round, message->name, rank, watched, &body, error);

	if (!ret && !group_read_message(message, &body, payload))
		ret = base_fail_reason(error, -EPROTO, "cannot read the message of %s (\"%s\")",
				       GROUP_SHOWN_RANK(round->group, rank), message->name);
	base_buffer_free(&body);
	return ret;
}

int group_hear(struct group_round *round, const struct group_message *message, uint32_t rank,
	       void *payload, struct base_error *error)
{
	struct group_watched watched = { 0 };
	int ret;

	while ((ret = group_look(round, message, rank, &watched, payload, error)) == -EAGAIN) {
		ret = check_abort(round, error);
		if (ret)
			return ret;
		group_round_beat(round);
		group_round_rest(round);
	}
	return ret;
}

/* ---- Waiting for many ranks ------------------------------------------------------------------ */

struct watching {
	struct group_round *round;
	const struct group_collection *collection;
	struct group_watched *ranks;
	bool *have;
	struct base_error failure; /* first failure that a rank reported */
};

static int found_beat(void *user, uint32_t rank, const struct base_buffer *body)
{
	struct watching *watching = user;

	hear_beat(watching->round, rank, &watching->ranks[rank], body);
	return 0;
}

static int found_message(void *user, uint32_t rank, const struct base_buffer *body)
{
	struct watching *watching = user;
	struct base_error theirs = { 0 };

	watching->have[rank] = true;
	store_has_news(watching->round->group->store);
	if (!watching->collection->found(watching->collection->user, rank, body, &theirs))
		return 0;
	return group_fail_of_rank(watching->round->group, rank, &theirs, &watching->failure);
}

static struct lost find_lost(const struct watching *watching)
{
	const struct group_round *round = watching->round;
	const struct ioshape_group *group = round->group;
	struct lost lost = { 0 };

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		bool gone;

		if (watching->have[rank])
			continue;
		gone = store_has_ended(group->store, rank);
		lost.gone |= gone;
		lost.ahead |= watching->ranks[rank].ahead;
		if (gone || watching->ranks[rank].ahead ||
		    is_overdue(round, &watching->ranks[rank]))
			group_name_rank(&lost.names, group, rank);
	}
	return lost;
}

static int collect(struct watching *watching, struct base_error *error)
{
	const struct group_collection *collection = watching->collection;
	struct group_round *round = watching->round;
	struct ioshape_group *group = round->group;
	struct base_error why;
	struct lost before, lost;
	int ret;

	for (;;) {
		why = (struct base_error){ 0 };
		/* Look once more after ranks were found lost: messages that they put before they
		 * ended are still there. */
		before = find_lost(watching);
		ret = store_collect(group->store, round->scope, collection->what, watching->have,
				    found_message, watching, &why);
		if (watching->failure.code)
			return base_propagate(error, &watching->failure);
		if (ret && ret != IOSHAPE_E_COORDINATOR)
			return base_propagate(error, &why);
		if (group_has_all(group, watching->have))
			return 0;
		if (!ret && collection->beats)
			store_collect(group->store, group->life, group_beat.name, watching->have,
				      found_beat, watching, &why);
		if (before.names.count) {
			lost = find_lost(watching);
			if (lost.names.count)
				return fail_lost(round, &lost, collection->missing, why.text,
						 error);
		}
		ret = check_abort(round, error);
		if (ret)
			return ret;
		group_round_beat(round);
		if (!before.names.count)
			group_round_rest(round);
	}
}

static bool is_awaited(const struct ioshape_group *group, const struct group_collection *collection,
		       uint32_t rank)
{
	return rank && (!collection->leaders || group_leads_node(group, rank)) &&
	       (!collection->awaits || collection->awaits(collection->user, rank));
}

int group_round_collect(struct group_round *round, const struct group_collection *collection,
			struct base_error *error)
{
	const uint32_t count = round->group->options.ranks;
	struct watching watching = {
		.round = round,
		.collection = collection,
		.ranks = calloc(count, sizeof(*watching.ranks)),
		.have = calloc(count, sizeof(*watching.have)),
	};
	int ret = 0;

	if (!watching.ranks || !watching.have)
		ret = base_no_memory(error, "the state of the ranks",
				     count * sizeof(*watching.ranks));
	for (uint32_t rank = 0; !ret && rank < count; rank++) {
		watching.ranks[rank].heard_ns = base_now_ns();
		watching.have[rank] = !is_awaited(round->group, collection, rank);
	}
	if (!ret && !group_has_all(round->group, watching.have))
		ret = collect(&watching, error);
	free(watching.ranks);
	free(watching.have);
	return ret;
}

/* ---- Answers of the first ranks of nodes to rank 0 ------------------------------------------- */

struct answering {
	const struct ioshape_group *group;
	const struct group_message *message;
	struct group_answers *answers;
};

/* Records one answer. Never fails: all answers are collected, even if some report failures. */
static int found_answer(void *user, uint32_t rank, const struct base_buffer *body,
			struct base_error *failure)
{
	struct answering *answering = user;
	struct group_answers *answers = answering->answers;
	struct group_answer answer;

	(void)failure;
	if (!group_read_message(answering->message, body, &answer)) {
		base_error_begin(&answer.failure);
		base_fail_reason(&answer.failure, -EPROTO, "cannot read its answer");
	}
	answers->count++;
	answers->same += answer.failure.code == -EEXIST;
	if (answer.failure.code && !answers->failure.code)
		group_fail_of_rank(answering->group, rank, &answer.failure, &answers->failure);
	else if (answers->remark && !*answers->remark)
		memcpy(answers->remark, answer.remark, sizeof(answer.remark));
	return 0;
}

int group_collect_answers(struct group_round *round, const struct group_message *message,
			  const char *missing, struct group_answers *answers,
			  struct base_error *error)
{
	struct answering answering = { round->group, message, answers };
	const struct group_collection collection = {
		.what = message->name,
		.missing = missing,
		.leaders = true,
		.found = found_answer,
		.user = &answering,
		.beats = true,
	};

	return group_round_collect(round, &collection, error);
}
