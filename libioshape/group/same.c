/* SPDX-License-Identifier: Apache-2.0 */
/*
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

/* ---- Samples --------------------------------------------------------------------------------- */

void group_take_sample(struct group_part *part)
{
	struct group_sum *sample = &part->sample;
	struct base_error unused = { 0 };

	if (part->group->options.ranks < 2 || !save_has_digest(part->round.save))
		return;
	sample->key.bytes = part->task->expected_bytes;
	sample->known = !save_take_sample(part->round.save, sample->key.mac, &unused);
	part->report->hashed_bytes = MIN(part->task->payload_bytes, SAVE_SAMPLE_BYTES);
}

/* ---- Which are equal ------------------------------------------------------------------------- */

/*
 * Finds for each rank the lowest one whose sum is equal: the rank itself if its sum is not known.
 * `on_nodes`: the sums differ between nodes, so that it says only whose part is kept.
 */
static int find_equal(const struct group_sum *sums, struct group_plan *plan, bool on_nodes)
{
	struct zip_names *names;
	int ret = zip_names_new(&names, plan->count);

	for (uint32_t rank = 0; !ret && rank < plan->count; rank++) {
		const char *key = (const char *)&sums[rank].key;
		uint64_t first = rank;

		if (sums[rank].known)
			ret = zip_names_add(names, key, sizeof(sums[rank].key), rank);
		if (ret == -EEXIST) {
			zip_names_find(names, key, sizeof(sums[rank].key), &first);
			ret = 0;
		}
		plan->ranks[rank].kept = (uint32_t)first;
		if (!on_nodes)
			plan->ranks[rank].same = (uint32_t)first;
	}
	zip_names_free(names);
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

int group_answer_digest(struct group_part *part, struct base_error *error)
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

struct digests {
	struct group_part *part;
	bool *have;
	struct base_error failure; /* of one of the ranks */
};

static int found_digest(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct digests *digests = user;
	struct group_part *part = digests->part;
	struct group_digest digest = { 0 };

	digests->have[rank] = true;
	if (!group_read_message(&group_digest, note, &digest)) {
		base_error_begin(&digest.failure);
		base_refuse(&digest.failure, -EPROTO, "cannot read the digest of its part");
	}
	digest.sum.known = true;
	part->sums[rank] = digest.sum;
	return digest.failure.code ?
		       group_fail_of_rank(part->group, rank, &digest.failure, &digests->failure) :
		       0;
}

static int collect_digests(struct group_part *part, struct base_error *error)
{
	const uint32_t ranks = part->group->options.ranks;
	struct digests digests = { .part = part };
	struct group_collection collection = {
		.what = group_digest.name,
		.missing = "did not read its part",
		.found = found_digest,
		.user = &digests,
		.beats = true,
	};
	int ret;

	digests.have = calloc(ranks, sizeof(*digests.have));
	if (!digests.have)
		return base_no_memory(error, "digests", ranks);
	for (uint32_t rank = 0; rank < ranks; rank++)
		digests.have[rank] = !rank || !part->plan.ranks[rank].asked;
	collection.have = digests.have;
	ret = group_round_collect(&part->round, &collection, error);
	if (digests.failure.code)
		*error = digests.failure;
	free(digests.have);
	return ret ? ret : digests.failure.code;
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

/* ---- What comes of it ------------------------------------------------------------------------ */

bool group_has_file(const struct group_part *part)
{
	const struct ioshape_group *group = part->group;

	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		if (group_is_kept(&part->plan, rank) &&
		    group_writer_of(group, part->plan.mode, rank) == group->options.rank)
			return true;
	return false;
}

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
	return base_refuse(error, IOSHAPE_E_CHANGED,
			   "what is saved has changed since the save began" BASE_REMEDY
			   "change nothing of it until the save has ended");
}
