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

void group_note_sum(struct group_note *note, const struct group_sum *sum)
{
	group_note_number(note, sum->known);
	group_note_number(note, sum->key.bytes);
	group_note_bytes(note, sum->key.mac, sizeof(sum->key.mac));
}

void group_read_sum(struct group_note_reader *reader, struct group_sum *sum)
{
	const uint64_t known = group_read_number(reader);
	const uint8_t *mac;
	size_t bytes;

	sum->key.bytes = group_read_number(reader);
	mac = group_read_bytes(reader, &bytes);
	reader->bad |= known > 1 || bytes != sizeof(sum->key.mac);
	sum->known = known && !reader->bad;
	if (sum->known)
		memcpy(sum->key.mac, mac, sizeof(sum->key.mac));
}

/* ---- Which are equal ------------------------------------------------------------------------- */

/* first[rank]: the lowest rank whose sum is equal; the rank itself if its sum is not known. */
static int find_equal(const struct group_sum *sums, uint32_t ranks, uint32_t *first)
{
	struct zip_names *names;
	uint64_t position;
	int ret = zip_names_new(&names, ranks);

	for (uint32_t rank = 0; !ret && rank < ranks; rank++) {
		const char *key = (const char *)&sums[rank].key;

		first[rank] = rank;
		if (!sums[rank].known)
			continue;
		ret = zip_names_add(names, key, sizeof(sums[rank].key), rank);
		if (ret != -EEXIST)
			continue;
		ret = 0;
		if (zip_names_find(names, key, sizeof(sums[rank].key), &position))
			first[rank] = (uint32_t)position;
	}
	zip_names_free(names);
	return ret;
}

/* Which parts are equal, and of which a copy is kept: one, or one on each node. */
static int keep_equal(struct group_part *part)
{
	const struct ioshape_group *group = part->group;
	const uint32_t ranks = group->options.ranks;
	struct group_plan *plan = &part->plan;
	int ret = find_equal(part->sums, ranks, plan->same);

	for (uint32_t rank = 0; group->near && rank < ranks; rank++)
		part->sums[rank].key.node = group->ranks[rank].node;
	if (!ret)
		ret = find_equal(part->sums, ranks, plan->kept);
	for (uint32_t rank = 0; !ret && rank < ranks; rank++) {
		if (group_is_kept(plan, rank))
			continue;
		plan->repeated_bytes += plan->bytes[rank];
		plan->bytes[rank] = 0;
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
	struct base_error unsaid = { 0 };
	struct group_note note = { 0 };
	struct group_sum sum;
	int ret;

	if (!part->plan.asked[part->group->options.rank])
		return 0;
	ret = take_digest(part, error);
	sum = sum_of(&part->digest);
	group_note_error(&note, error);
	group_note_sum(&note, &sum);
	if (group_round_post(&part->round, "digest", &note, &unsaid) && !ret)
		ret = base_pass_on(error, &unsaid);
	return ret;
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
	struct group_note_reader reader = group_read_note(note);
	struct base_error theirs = { 0 };

	digests->have[rank] = true;
	if (!group_read_error(&reader, &theirs)) {
		group_read_sum(&reader, &part->sums[rank]);
		if (reader.bad)
			base_refuse(&theirs, -EPROTO, "cannot read the digest of its part");
	}
	return theirs.code ? group_fail_of_rank(part->group, rank, &theirs, &digests->failure) : 0;
}

static int collect_digests(struct group_part *part, struct base_error *error)
{
	const uint32_t ranks = part->group->options.ranks;
	struct digests digests = { .part = part };
	struct group_collection collection = {
		.what = "digest",
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
		digests.have[rank] = !rank || !part->plan.asked[rank];
	collection.have = digests.have;
	ret = group_round_collect(&part->round, &collection, error);
	if (digests.failure.code)
		*error = digests.failure;
	free(digests.have);
	return ret ? ret : digests.failure.code;
}

/* The ranks that have the sample of another one. False: there are none. */
static bool choose_asked(struct group_plan *plan, uint32_t ranks)
{
	bool any = false;

	for (uint32_t rank = 0; rank < ranks; rank++) {
		const uint32_t first = plan->same[rank];

		if (first == rank)
			continue;
		plan->asked[first] = plan->asked[rank] = any = true;
	}
	return any;
}

static int ask_for_digests(struct group_part *part, struct base_error *error)
{
	struct group_plan *plan = &part->plan;
	struct group_note note = { 0 };
	const struct base_error none = { 0 };
	int ret;

	base_put_le(plan->key, base_random(), 8);
	base_put_le(plan->key + 8, base_random(), 8);
	group_note_error(&note, &none);
	group_note_number(&note, true);
	group_note_bytes(&note, plan->key, sizeof(plan->key));
	group_note_bytes(&note, plan->asked, part->group->options.ranks * sizeof(*plan->asked));
	ret = group_round_post(&part->round, "plan", &note, error);
	part->asked = !ret;
	return ret;
}

int group_find_same(struct group_part *part, struct base_error *error)
{
	const uint32_t ranks = part->group->options.ranks;
	struct group_plan *plan = &part->plan;
	int ret = find_equal(part->sums, ranks, plan->same);

	if (ret)
		return base_no_memory(error, "samples", ranks * sizeof(*part->sums));
	if (!choose_asked(plan, ranks))
		return 0; /* plan->same is that of all parts */
	memset(part->sums, 0, ranks * sizeof(*part->sums));
	ret = ask_for_digests(part, error);
	if (!ret && plan->asked[0])
		ret = take_digest(part, error);
	if (!ret && plan->asked[0])
		part->sums[0] = sum_of(&part->digest);
	if (!ret)
		ret = collect_digests(part, error);
	if (!ret && keep_equal(part))
		ret = base_no_memory(error, "digests", ranks * sizeof(*part->sums));
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
		needed |= rank != own && part->plan.same[rank] == part->plan.same[own];
	if (!needed || crc32 == part->digest.crc32)
		return 0;
	return base_refuse(error, IOSHAPE_E_CHANGED,
			   "what is saved has changed since the save began" BASE_REMEDY
			   "change nothing of it until the save has ended");
}
