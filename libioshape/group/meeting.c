/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the ranks of a job find each other. Every other rank leaves "hello" for rank 0, with a number
 * that it has drawn. When rank 0 has all of them it answers with the "roster". A rank that finds
 * its own number in it says "ready". Other ranks have read what is left of an earlier life of the
 * job, and go on waiting. When all are ready rank 0 says "start".
 */
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How often the board is asked, at least. */
#define LOOK_MS 100u

struct meeting {
	struct group_round *round;
	bool *have; /* hello */
	bool *ready;
	bool changed; /* a rank came in a new life */
};

static int say_hello(struct group_round *round, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	const struct group_rank *own = &group->ranks[group->options.rank];
	struct group_note note = { 0 };

	group_note_number(&note, own->nonce);
	group_note_number(&note, group->options.ranks);
	group_note_text(&note, own->node_key);
	group_note_text(&note, own->where);
	group_note_text(&note, own->domain);
	group_note_number(&note, own->has_tier);
	return group_round_post(round, "hello", &note, error);
}

static int say_id(struct group_round *round, const char *what, struct base_error *error)
{
	struct group_note note = { 0 };

	group_note_number(&note, round->group->id);
	return group_round_post(round, what, &note, error);
}

/* ---- Rank 0 ---------------------------------------------------------------------------------- */

static int found_hello(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct meeting *meeting = user;
	struct ioshape_group *group = meeting->round->group;
	struct group_rank *known = &group->ranks[rank];
	struct group_note_reader reader = group_read_note(note);
	uint64_t nonce = group_read_number(&reader);

	/* Of an earlier life with another number of ranks: this one will say hello again. */
	if (group_read_number(&reader) != group->options.ranks)
		return 0;
	group_read_text(&reader, known->node_key, sizeof(known->node_key));
	group_read_text(&reader, known->where, sizeof(known->where));
	group_read_text(&reader, known->domain, sizeof(known->domain));
	known->has_tier = group_read_number(&reader) != 0;
	if (reader.bad)
		return 0;
	meeting->changed |= !meeting->have[rank] || known->nonce != nonce;
	known->nonce = nonce;
	meeting->have[rank] = true;
	return 0;
}

static int found_ready(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct meeting *meeting = user;
	struct group_note_reader reader = group_read_note(note);

	meeting->ready[rank] = group_read_number(&reader) == meeting->round->group->id;
	return 0;
}

static int post_roster(struct group_round *round, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct group_note note = { 0 };

	if (group_find_nodes(group))
		return base_no_memory(error, "a list of nodes", group->options.ranks);
	group->id = base_random();
	group->has_tiers = true;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		group->has_tiers &= group->ranks[rank].has_tier;
	group_note_number(&note, group->id);
	group_note_number(&note, group->options.mode);
	group_note_number(&note, group->has_tiers);
	group_note_number(&note, group->node_count);
	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		group_note_number(&note, group->ranks[rank].nonce);
		group_note_number(&note, group->ranks[rank].node);
		group_note_text(&note, group->ranks[rank].where);
	}
	return group_round_post(round, "roster", &note, error);
}

/* One look at the board. */
static int gather_up(struct meeting *meeting, struct base_error *error)
{
	struct ioshape_group *group = meeting->round->group;
	int ret;

	/* Ranks that are not ready yet may be in a new life, too. */
	ret = gather_board_collect(group->board, meeting->round->scope, "hello", meeting->ready,
				   found_hello, meeting, error);
	if (ret || !group_has_all(group, meeting->have))
		return ret;
	if (meeting->changed) {
		meeting->changed = false;
		memset(meeting->ready, 0, group->options.ranks * sizeof(*meeting->ready));
		meeting->ready[0] = true;
		ret = post_roster(meeting->round, error);
	}
	return ret ? ret :
		     gather_board_collect(group->board, meeting->round->scope, "ready",
					  meeting->ready, found_ready, meeting, error);
}

static int fail_missing(const struct meeting *meeting, const char *board_says,
			struct base_error *error)
{
	const struct ioshape_group *group = meeting->round->group;
	const bool *there = group_has_all(group, meeting->have) ? meeting->ready : meeting->have;
	struct group_names missing = { 0 };

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		if (!there[rank])
			group_name_rank(&missing, group, rank);
	}
	base_refuse(error, -ETIMEDOUT,
		    "the group of %s is not complete: %u of %u ranks did not come within %u s "
		    "(%s)" BASE_REMEDY
		    "do all ranks of the job call it, with the same directory, job and version of "
		    "this library?%s%s",
		    group->directory, missing.count, group->options.ranks,
		    group->options.deadline_ms / 1000, missing.text, *board_says ? " " : "",
		    board_says);
	base_error_of_rank(error, missing.first);
	return -ETIMEDOUT;
}

static int receive_all(struct meeting *meeting, struct base_error *error)
{
	struct ioshape_group *group = meeting->round->group;
	uint64_t begin_ns = base_now_ns();
	int ret;

	for (;;) {
		struct base_error why = { 0 };

		ret = gather_up(meeting, &why);
		if (!ret && group_has_all(group, meeting->have) &&
		    group_has_all(group, meeting->ready))
			return say_id(meeting->round, "start", error);
		if (ret && ret != IOSHAPE_E_COORDINATOR)
			return base_pass_on(error, &why);
		if (base_now_ns() - begin_ns > group->deadline_ns)
			return fail_missing(meeting, why.text, error);
		gather_board_wait(group->board, LOOK_MS);
	}
}

static int meet_as_host(struct group_round *round, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	struct meeting meeting = {
		.round = round,
		.have = calloc(group->options.ranks, sizeof(bool)),
		.ready = calloc(group->options.ranks, sizeof(bool)),
		.changed = true,
	};
	int ret;

	if (meeting.have && meeting.ready) {
		meeting.have[0] = meeting.ready[0] = true;
		ret = receive_all(&meeting, error);
	} else {
		ret = base_no_memory(error, "a meeting", group->options.ranks);
	}
	free(meeting.have);
	free(meeting.ready);
	return ret;
}

/* ---- The others ------------------------------------------------------------------------------ */

bool group_take_roster(struct ioshape_group *group, const struct base_buffer *note)
{
	struct group_note_reader reader = group_read_note(note);
	uint64_t id = group_read_number(&reader), mode = group_read_number(&reader);
	const bool has_tiers = group_read_number(&reader) != 0;
	uint64_t nodes = group_read_number(&reader);
	bool known = false;

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		uint64_t nonce = group_read_number(&reader);

		if (rank == group->options.rank)
			known = nonce == group->nonce;
		group->ranks[rank].nonce = nonce;
		group->ranks[rank].node = (uint32_t)group_read_number(&reader);
		group_read_text(&reader, group->ranks[rank].where,
				sizeof(group->ranks[rank].where));
	}
	if (reader.bad || reader.left || !known || (has_tiers && !group->options.tier) ||
	    mode > IOSHAPE_MODE_RANK0 || !group_find_leaders(group, nodes))
		return false;
	group->id = id;
	group->has_tiers = has_tiers;
	group->options.mode = (enum ioshape_mode)mode;
	return true;
}

static int look_for_roster(struct group_round *round, struct base_buffer *note, bool *started,
			   struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct group_note_reader reader;
	uint64_t before = group->id;
	int ret;

	ret = gather_board_look(group->board, round->scope, "roster-0", note, error);
	if (ret)
		return ret == -EAGAIN ? 0 : ret;
	if (!group_take_roster(group, note)) {
		group->id = 0;
		return 0;
	}
	if (group->id != before) {
		ret = say_id(round, "ready", error);
		if (ret)
			return ret;
	}
	ret = gather_board_look(group->board, round->scope, "start-0", note, error);
	if (ret)
		return ret == -EAGAIN ? 0 : ret;
	reader = group_read_note(note);
	*started = group_read_number(&reader) == group->id && !reader.bad;
	return 0;
}

static int meet_as_guest(struct group_round *round, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	uint64_t begin_ns = base_now_ns();
	struct base_buffer note = { 0 };
	bool started = false;
	int ret = 0;

	while (!started) {
		struct base_error why = { 0 };

		ret = look_for_roster(round, &note, &started, &why);
		if (ret && ret != IOSHAPE_E_COORDINATOR) {
			ret = base_pass_on(error, &why);
			break;
		}
		ret = 0;
		if (!started && (gather_board_is_gone(group->board, 0) ||
				 base_now_ns() - begin_ns > group->deadline_ns)) {
			ret = base_refuse(error, -ETIMEDOUT,
					  "the group of %s is not complete: rank 0 %s" BASE_REMEDY
					  "do all ranks of the job call it, with the same "
					  "directory, job and version of this library?%s%s",
					  group->directory,
					  gather_board_is_gone(group->board, 0) ?
						  "has ended" :
						  "did not start it",
					  *why.text ? " " : "", why.text);
			break;
		}
		if (!started)
			gather_board_wait(group->board, LOOK_MS);
	}
	base_buffer_free(&note);
	return ret;
}

/* ---- All ranks ------------------------------------------------------------------------------- */

int group_meet(struct ioshape_group *group, struct base_error *error)
{
	struct group_round round = { .group = group, .scope = "meeting" };
	struct group_note nobody = { 0 };
	int ret;

	if (!group->board)
		return group_find_nodes(group) ? base_no_memory(error, "a list of nodes", 1) : 0;
	/* Rank 0 takes away the roster of an earlier life; by that others may notice the new one.
	 */
	ret = group->options.rank ? say_hello(&round, error) :
				    group_round_post(&round, "roster", &nobody, error);
	if (ret)
		return ret;
	return group->options.rank ? meet_as_guest(&round, error) : meet_as_host(&round, error);
}
