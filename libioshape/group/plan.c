/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a save: who writes what. Rank 0 tells it, and may have to ask before.
 *
 * Equal parts of a generation are stored once: ranks that train data-parallel all save the same.
 * With what it wants each rank sends a sample of its part. If the samples of several ranks are
 * equal, rank 0 draws a key, and these ranks send the digests of all their bytes; so ranks with
 * parts of their own read no more than the samples. Of equal digests the lowest rank's part is
 * written, and the manifest names it for the others. On the tiers of several nodes each node has
 * its own copy, because a node that is lost would take the only one with it.
 */
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Before it ------------------------------------------------------------------------------- */

static void take_sample(struct group_part *part)
{
	struct group_sum *sample = &part->sample;
	struct base_error unused = { 0 };

	if (part->group->options.ranks < 2 || !save_has_digest(part->round.save))
		return;
	sample->key.bytes = part->task->expected_bytes;
	sample->known = !save_take_sample(part->round.save, sample->key.mac, &unused);
	part->report->hashed_bytes = MIN(part->task->payload_bytes, SAVE_SAMPLE_BYTES);
}

int group_begin_plan(struct group_part *part, struct base_error *error)
{
	const struct ioshape_group_options *options = &part->group->options;
	struct group_plan *plan = &part->plan;

	plan->count = options->ranks;
	plan->ranks = calloc(plan->count, sizeof(*plan->ranks));
	if (!plan->ranks)
		return base_no_memory(error, "a plan", plan->count * sizeof(*plan->ranks));
	for (uint32_t rank = 0; rank < plan->count; rank++)
		plan->ranks[rank].same = plan->ranks[rank].kept = rank;
	plan->ranks[options->rank].bytes = part->task->expected_bytes;
	take_sample(part);
	return 0;
}

void group_free_plan(struct group_plan *plan)
{
	free(plan->ranks);
	plan->ranks = NULL;
}

/* ---- Telling it ------------------------------------------------------------------------------ */

int group_tell_plan(struct group_part *part, enum group_question question,
		    const struct base_error *failure, struct base_error *error)
{
	struct group_plan *plan = &part->plan;

	plan->asks = question;
	plan->failure = *failure;
	return group_tell(&part->round, &group_plans[part->plans++], plan, error);
}

/* ---- Which are equal ------------------------------------------------------------------------- */

/*
 * Finds for each rank the lowest one whose sum is equal: the rank itself if its sum is not known.
 * `on_nodes`: the sums differ between nodes, so that it says only whose part is kept.
 */
static int find_equal(const struct group_sum *sums, struct group_plan *plan, bool on_nodes)
{
	struct format_names *names;
	int ret = format_names_new(&names, plan->count);

	for (uint32_t rank = 0; !ret && rank < plan->count; rank++) {
		const char *key = (const char *)&sums[rank].key;
		uint64_t first = rank;

		if (sums[rank].known)
			ret = format_names_add(names, key, sizeof(sums[rank].key), rank);
		if (ret == -EEXIST) {
			format_names_find(names, key, sizeof(sums[rank].key), &first);
			ret = 0;
		}
		plan->ranks[rank].kept = (uint32_t)first;
		if (!on_nodes)
			plan->ranks[rank].same = (uint32_t)first;
	}
	format_names_free(names);
	return ret;
}

/* Which parts are equal, and of which a copy is kept: one, or one on each node. */
static int keep_equal(struct group_part *part)
{
	const struct ioshape_group *group = part->group;
	struct group_plan *plan = &part->plan;
	int ret = find_equal(part->sums, plan, false);

	for (uint32_t rank = 0; group->near && rank < plan->count; rank++)
		part->sums[rank].key.node = group->ranks[rank].node;
	if (!ret && group->near)
		ret = find_equal(part->sums, plan, true);
	for (uint32_t rank = 0; !ret && rank < plan->count; rank++) {
		if (group_is_kept(plan, rank))
			continue;
		plan->repeated_bytes += plan->ranks[rank].bytes;
		plan->ranks[rank].bytes = 0;
	}
	return ret;
}

/* ---- Digests --------------------------------------------------------------------------------- */

static int go_on(void *user, struct base_error *error)
{
	struct group_part *part = user;

	return group_round_go_on(&part->round, IOSHAPE_PHASE_WAIT, 0, part->task->expected_bytes,
				 error);
}

static int take_digest(struct group_part *part, struct base_error *error)
{
	int ret = save_take_digest(part->round.save, part->plan.key, &part->digest, go_on, part,
				   error);

	part->report->hashed_bytes += part->digest.bytes;
	return ret;
}

static struct group_sum sum_of(const struct save_digest *digest)
{
	struct group_sum sum = { .known = true, .key = { .bytes = digest->bytes } };

	memcpy(sum.key.mac, digest->mac, sizeof(sum.key.mac));
	return sum;
}

static int answer_digest(struct group_part *part, struct base_error *error)
{
	struct group_digest digest = { 0 };
	struct base_error unsaid = { 0 };
	int ret;

	if (!part->plan.ranks[part->group->options.rank].asked)
		return 0;
	ret = take_digest(part, &digest.failure);
	digest.sum = sum_of(&part->digest);
	if (group_tell(&part->round, &group_digest, &digest, &unsaid) && !ret)
		ret = base_pass_on(error, &unsaid);
	return base_pass_on(error, &digest.failure) ? error->code : ret;
}

static bool is_asked(const void *user, uint32_t rank)
{
	const struct group_part *part = user;

	return part->plan.ranks[rank].asked;
}

static int found_digest(void *user, uint32_t rank, const struct base_buffer *note,
			struct base_error *failure)
{
	struct group_part *part = user;
	struct group_digest digest = { 0 };

	if (!group_read_message(&group_digest, note, &digest))
		return base_refuse(failure, -EPROTO, "cannot read the digest of its part");
	part->sums[rank] = digest.sum;
	part->sums[rank].known = true;
	return base_pass_on(failure, &digest.failure);
}

static int collect_digests(struct group_part *part, struct base_error *error)
{
	const struct group_collection collection = {
		.what = group_digest.name,
		.missing = "did not read its part",
		.awaits = is_asked,
		.found = found_digest,
		.user = part,
		.beats = true,
	};

	return group_round_collect(&part->round, &collection, error);
}

/* The ranks that have the sample of another one. False: there are none. */
static bool choose_asked(struct group_plan *plan)
{
	bool any = false;

	for (uint32_t rank = 0; rank < plan->count; rank++) {
		const uint32_t first = plan->ranks[rank].same;

		if (first == rank)
			continue;
		plan->ranks[first].asked = plan->ranks[rank].asked = any = true;
	}
	return any;
}

int group_find_same(struct group_part *part, struct base_error *error)
{
	struct group_plan *plan = &part->plan;
	const struct base_error none = { 0 };
	int ret = find_equal(part->sums, plan, false);

	if (ret)
		return base_no_memory(error, "samples", plan->count * sizeof(*part->sums));
	if (!choose_asked(plan))
		return 0;
	memset(part->sums, 0, plan->count * sizeof(*part->sums));
	base_put_le(plan->key, base_random(), 8);
	base_put_le(plan->key + 8, base_random(), 8);
	ret = group_tell_plan(part, GROUP_ASKS_DIGESTS, &none, error);
	if (!ret && plan->ranks[0].asked) {
		ret = take_digest(part, error);
		part->sums[0] = sum_of(&part->digest);
	}
	if (!ret)
		ret = collect_digests(part, error);
	if (!ret && keep_equal(part))
		ret = base_no_memory(error, "digests", plan->count * sizeof(*part->sums));
	return ret;
}

/* ---- Hearing it ------------------------------------------------------------------------------ */

/* Every part is stored, by a rank that has it and keeps its own. */
static bool keeps_all(const struct group_planned *ranks, uint32_t count)
{
	for (uint32_t rank = 0; rank < count; rank++) {
		const uint32_t same = ranks[rank].same, kept = ranks[rank].kept;

		if (same > rank || kept > rank || kept < same || ranks[same].same != same ||
		    ranks[kept].kept != kept || ranks[kept].same != same)
			return false;
	}
	return true;
}

/* A plan names an attempt at this step, and no other place. */
static bool is_sound(const struct group_plan *plan, uint32_t ranks, uint64_t step)
{
	const struct group_name name = group_parse_name(plan->attempt);

	if (plan->count != ranks)
		return false;
	return plan->asks == GROUP_ASKS_DIGESTS ||
	       (keeps_all(plan->ranks, ranks) && name.kind == GROUP_NAME_ATTEMPT &&
		name.step == step && plan->mode != IOSHAPE_MODE_AUTO);
}

static int hear_plan(struct group_part *part, struct base_error *error)
{
	struct group_plan *plan = &part->plan;
	int ret;

	/* It answers two questions at most. */
	if (part->plans == GROUP_MOST_PLANS)
		return base_refuse(error, -EPROTO, "rank 0 asks for more than there is");
	ret = group_hear(&part->round, &group_plans[part->plans++], 0, plan, NULL, NULL, error);
	if (!ret)
		ret = base_pass_on(error, &plan->failure);
	if (!ret && !is_sound(plan, part->group->options.ranks, part->step))
		ret = base_refuse(error, -EPROTO, "cannot follow the plan of rank 0");
	return ret;
}

/* Answers what rank 0 asks until there is a plan. `attempt` is on this node's own tier. */
int group_await_plan(struct group_part *part, struct group_attempt *attempt,
		     struct base_error *error)
{
	int ret;

	do {
		ret = hear_plan(part, error);
		if (!ret && part->plan.asks == GROUP_ASKS_DIGESTS)
			ret = answer_digest(part, error);
		else if (!ret && part->plan.asks == GROUP_ASKS_ROOM)
			ret = group_answer_for_room(part, attempt, error);
	} while (!ret && part->plan.asks);
	if (ret || !part->plan.near)
		group_attempt_abandon(attempt);
	if (!ret)
		group_take_place(part);
	return ret;
}

/* ---- What follows from it -------------------------------------------------------------------- */

uint32_t group_count_files(const struct group_part *part, enum ioshape_mode mode)
{
	const struct ioshape_group *group = part->group;
	/* By writer. Without memory the most that there can be is as good. */
	bool *counted = calloc(group->options.ranks, sizeof(*counted));
	uint32_t files = 0;

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		const uint32_t writer = group_writer_of(group, mode, rank);

		if (!group_is_kept(&part->plan, rank) || (counted && counted[writer]))
			continue;
		files++;
		if (counted)
			counted[writer] = true;
	}
	free(counted);
	return files;
}

int group_check_digest(const struct group_part *part, uint32_t crc32, struct base_error *error)
{
	const uint32_t ranks = part->group->options.ranks, own = part->group->options.rank;
	bool needed = false;

	for (uint32_t rank = 0; rank < ranks; rank++)
		needed |= rank != own && part->plan.ranks[rank].same == part->plan.ranks[own].same;
	if (!needed || crc32 == part->digest.crc32)
		return 0;
	return base_refuse_with(error, IOSHAPE_E_CHANGED,
				"change nothing of it until the save has ended",
				"what is saved has changed since the save began");
}
