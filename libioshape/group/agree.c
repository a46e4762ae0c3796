/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan on which the ranks of a group agree before a save writes. Rank 0 collects what all ranks
 * want and sends them the plan. It may ask them questions first.
 *
 * Equal shards of a checkpoint are stored once, because data-parallel ranks all save the same
 * bytes. Each rank sends a sample of its shard with what it wants. If the samples of several ranks
 * are equal, rank 0 draws a key, and these ranks send the digests of all their bytes. So a rank
 * whose shard is unique reads no more than the sample. Of shards with equal digests the one of the
 * lowest rank is written, and the manifest refers the other ranks to it. On the tiers of several
 * nodes each node keeps a copy of its own, because the loss of a node would otherwise lose the only
 * copy.
 *
 * If nodes have tiers of their own, each node first saves its part of the checkpoint on its tier.
 * Before that, every node reserves space and makes a directory for its files. If one cannot, all
 * ranks save directly.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Choosing the mode ----------------------------------------------------------------------- */

/*
 * The first row that holds:
 *
 *   asked for | when                                                | mode
 *   ----------|-----------------------------------------------------|----------------------------
 *   any       | one rank                                            | each
 *   each      |                                                     | each
 *   node      |                                                     | node
 *   rank0     | nodes can send bytes to each other and have no own  | rank0
 *             | tiers, or there is one node                         |
 *   rank0     | otherwise                                           | node
 *   auto      | several nodes, 64 MiB or less in all, and rank0 is  | rank0
 *             | possible: more files would cost more than the bytes |
 *   auto      | one rank on each node: one file for each anyway     | each
 *   auto      | otherwise                                           | node
 */

struct facts {
	uint32_t ranks, nodes;
	uint64_t bytes; /* bytes of all ranks */
	bool comm;      /* nodes can send bytes to each other */
	bool own_tiers; /* each node writes to a tier of its own */
};

#define FEW_BYTES (64 * MIB)

static bool rank0_is_possible(const struct facts *facts)
{
	return (facts->comm && !facts->own_tiers) || facts->nodes == 1;
}

static enum ioshape_mode as_asked(enum ioshape_mode asked, const struct facts *facts, char *why,
				  size_t size)
{
	if (asked != IOSHAPE_MODE_RANK0 || rank0_is_possible(facts)) {
		snprintf(why, size, "as requested");
		return asked;
	}
	snprintf(why, size, "rank0 was requested, but %s",
		 facts->own_tiers ? "each node saves to its own tier" :
				    "nodes cannot send data to each other (give the group a comm)");
	return IOSHAPE_MODE_NODE;
}

static enum ioshape_mode by_rule(const struct facts *facts, char *why, size_t size)
{
	if (facts->nodes > 1 && facts->bytes <= FEW_BYTES && rank0_is_possible(facts)) {
		snprintf(why, size, "few bytes from %u nodes: one file", facts->nodes);
		return IOSHAPE_MODE_RANK0;
	}
	if (facts->ranks == facts->nodes) {
		snprintf(why, size, "one rank on each of %u nodes", facts->nodes);
		return IOSHAPE_MODE_EACH;
	}
	snprintf(why, size, "%u ranks on %u node%s: a file for each node", facts->ranks,
		 facts->nodes, facts->nodes == 1 ? "" : "s");
	return IOSHAPE_MODE_NODE;
}

/* Returns the mode. `why` receives a clause for the report, even if the requested mode is not
 * possible. */
static enum ioshape_mode mode_for(enum ioshape_mode asked, const struct facts *facts, char *why,
				  size_t why_bytes)
{
	if (facts->ranks <= 1) {
		snprintf(why, why_bytes, "one rank");
		return IOSHAPE_MODE_EACH;
	}
	return asked == IOSHAPE_MODE_AUTO ? by_rule(facts, why, why_bytes) :
					    as_asked(asked, facts, why, why_bytes);
}

/* ---- Where shards begin in shard files ------------------------------------------------------- */

/* Alignment of shards in a shard file if stripes do not suit. Small checkpoints use the smaller
 * one. */
#define SHARD_ALIGNMENT (1 * MIB)
#define SMALL_SHARD_ALIGNMENT 4096u
#define SMALL_SHARDS_BYTES (64 * MIB)

/* Stripes are the alignment if they are no larger than this, and than the average shard divided by
 * PART_ALIGNMENTS. The gaps between shards are written, too: half the alignment for each, on
 * average. */
#define MOST_SHARD_ALIGNMENT (16 * MIB)
#define SHARD_ALIGNMENTS 4u

static uint64_t shard_alignment(uint64_t bytes, uint32_t shards, uint64_t stripe_bytes)
{
	const uint64_t part_bytes = bytes / MAX(shards, 1);

	if (bytes < SMALL_SHARDS_BYTES)
		return SMALL_SHARD_ALIGNMENT;
	return stripe_bytes >= SHARD_ALIGNMENT && stripe_bytes % SMALL_SHARD_ALIGNMENT == 0 &&
			       stripe_bytes <=
				       MIN(MOST_SHARD_ALIGNMENT, part_bytes / SHARD_ALIGNMENTS) ?
		       stripe_bytes :
		       SHARD_ALIGNMENT;
}

/* ---- Sending plans and questions ------------------------------------------------------------- */

int group_tell_plan(struct group_shard *shard, enum group_question question,
		    const struct base_error *failure, struct base_error *error)
{
	struct group_plan *plan = &shard->plan;

	plan->asks = question;
	plan->failure = *failure;
	return group_tell(&shard->round, &group_plans[shard->plans++], plan, error);
}

/* ---- Which shards are equal ------------------------------------------------------------------ */

/*
 * Finds for each rank the lowest rank with an equal sum, or the rank itself if its sum is not
 * known. `on_nodes`: the sums also differ between nodes, so only `kept` is set, and `same` is not.
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

/* Finds which shards are equal, and which copies are stored: one of each, or one on each node. */
static int keep_equal(struct group_shard *shard)
{
	const struct ioshape_group *group = shard->group;
	struct group_plan *plan = &shard->plan;
	int ret = find_equal(shard->sums, plan, false);

	for (uint32_t rank = 0; group->near && rank < plan->count; rank++)
		shard->sums[rank].key.node = group->ranks[rank].node;
	if (!ret && group->near)
		ret = find_equal(shard->sums, plan, true);
	for (uint32_t rank = 0; !ret && rank < plan->count; rank++) {
		if (group_is_kept(plan, rank))
			continue;
		plan->repeated_bytes += plan->ranks[rank].bytes;
		plan->ranks[rank].bytes = 0;
	}
	return ret;
}

/* ---- Exchanging digests ---------------------------------------------------------------------- */

static int go_on(void *user, struct base_error *error)
{
	struct group_shard *shard = user;

	return group_round_go_on(&shard->round, IOSHAPE_PHASE_WAIT, 0, shard->task->expected_bytes,
				 error);
}

static int take_digest(struct group_shard *shard, struct base_error *error)
{
	int ret = save_take_digest(shard->round.save, shard->plan.key, &shard->digest, go_on, shard,
				   error);

	shard->hashed_bytes += shard->digest.bytes;
	return ret;
}

static struct group_sum sum_of(const struct save_digest *digest)
{
	struct group_sum sum = { .known = true, .key = { .bytes = digest->bytes } };

	memcpy(sum.key.mac, digest->mac, sizeof(sum.key.mac));
	return sum;
}

static int answer_digest(struct group_shard *shard, struct base_error *error)
{
	struct group_digest digest = { 0 };
	struct base_error unsaid = { 0 };
	int ret;

	if (!shard->plan.ranks[shard->group->options.rank].asked)
		return 0;
	ret = take_digest(shard, &digest.failure);
	digest.sum = sum_of(&shard->digest);
	if (group_tell(&shard->round, &group_digest, &digest, &unsaid) && !ret)
		ret = base_propagate(error, &unsaid);
	return base_propagate(error, &digest.failure) ? error->code : ret;
}

static bool is_asked(const void *user, uint32_t rank)
{
	const struct group_shard *shard = user;

	return shard->plan.ranks[rank].asked;
}

static int found_digest(void *user, uint32_t rank, const struct base_buffer *body,
			struct base_error *failure)
{
	struct group_shard *shard = user;
	struct group_digest digest = { 0 };

	if (!group_read_message(&group_digest, body, &digest))
		return base_fail_reason(failure, -EPROTO, "cannot read the digest of its shard");
	shard->sums[rank] = digest.sum;
	shard->sums[rank].known = true;
	return base_propagate(failure, &digest.failure);
}

static int collect_digests(struct group_shard *shard, struct base_error *error)
{
	const struct group_collection collection = {
		.what = group_digest.name,
		.missing = "did not send the digest of its shard",
		.awaits = is_asked,
		.found = found_digest,
		.user = shard,
		.beats = true,
	};

	return group_round_collect(&shard->round, &collection, error);
}

/* Sets `asked` for the ranks whose sample equals that of another rank. Returns false if there are
 * none. */
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

/* Finds which shards are equal, and keeps one of each. Called on rank 0 with the samples of all
 * ranks. */
static int find_same(struct group_shard *shard, struct base_error *error)
{
	struct group_plan *plan = &shard->plan;
	const struct base_error none = { 0 };
	int ret = find_equal(shard->sums, plan, false);

	if (ret)
		return base_no_memory(error, "samples", plan->count * sizeof(*shard->sums));
	if (!choose_asked(plan))
		return 0;
	memset(shard->sums, 0, plan->count * sizeof(*shard->sums));
	base_put_le(plan->key, base_random(), 8);
	base_put_le(plan->key + 8, base_random(), 8);
	ret = group_tell_plan(shard, GROUP_ASKS_DIGESTS, &none, error);
	if (!ret && plan->ranks[0].asked) {
		ret = take_digest(shard, error);
		shard->sums[0] = sum_of(&shard->digest);
	}
	if (!ret)
		ret = collect_digests(shard, error);
	if (!ret && keep_equal(shard))
		ret = base_no_memory(error, "digests", plan->count * sizeof(*shard->sums));
	return ret;
}

/* ---- Tiers: where the checkpoint is written -------------------------------------------------- */

static const char *find_reason(const struct group_shard *shard)
{
	const struct io_file_options *options = &shard->task->file_options;

	if (!shard->group->near)
		return "a rank has no tier";
	if (options->no_replace)
		return "the save must not replace an existing checkpoint";
	if (options->deadline_ns)
		return "the save has a deadline";
	return NULL;
}

/* Records in the report why the save does not use the tier. Called on all ranks. */
static void record_reason(struct group_shard *shard)
{
	if (!*shard->plan.not_near)
		return;
	io_add_downgrade(&shard->downgrades, IOSHAPE_DOWNGRADE_TIER,
			 "saved directly, not on the tier: %s", shard->plan.not_near);
	io_report_downgrades(&shard->downgrades, shard->report);
}

/* Saves into the group's directory after all; all reports give the reason. Called on rank 0. */
static void save_directly(struct group_shard *shard, const char *why)
{
	shard->plan.near = false;
	snprintf(shard->plan.not_near, sizeof(shard->plan.not_near), "%s", why);
	record_reason(shard);
}

/* Estimates how many bytes are written where this node writes. */
static uint64_t bytes_here(const struct group_shard *shard)
{
	const struct ioshape_group *group = shard->group;
	uint64_t bytes = 0;

	if (!group_is_spread(shard))
		return shard->plan.total_bytes;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		bytes += group_is_local(group, rank) ? shard->plan.ranks[rank].bytes : 0;
	return bytes;
}

/* Reserves space on this node's tier for its own files and for what it keeps for other nodes. */
static int reserve_space(const struct group_shard *shard, struct base_error *error)
{
	const struct ioshape_group *group = shard->group;
	struct group_tier *tier = group_tier_of(&group->options);

	return tier->ops->reserve_space(tier, shard->task->path, bytes_here(shard),
					group_is_spread(shard) ? group->node_count : 1, error);
}

/* Decides whether the checkpoint is written on the tier, and reserves space for this node. Called
 * on rank 0. */
static void choose_path(struct group_shard *shard)
{
	struct base_error failure = { 0 };
	const char *reason;

	if (!group_tier_of(&shard->group->options))
		return;
	reason = find_reason(shard);
	shard->plan.near = !reason;
	if (!reason && reserve_space(shard, &failure))
		reason = failure.sentence;
	if (reason)
		save_directly(shard, reason);
}

/* Raises the attempt's serial number above those of the tier and of the directory. Called on rank
 * 0. */
static void continue_serials(struct group_shard *shard, struct group_attempt *attempt)
{
	struct ioshape_group *group = shard->group;
	const char *other = shard->plan.near ? group->directory : group->near;
	struct io_folder directory = IO_NO_FOLDER;

	/* Read the other directory only once: the destination may be slow, and a checkpoint that is
	 * saved there later gets a number from its time. */
	if (other && !group->serials_known && !io_folder_open(&directory, other, NULL)) {
		group->last_serial = group_last_serial(&directory, &attempt->log);
		io_folder_close(&directory);
	}
	group->serials_known = true;
	attempt->last_serial = MAX(attempt->last_serial, group->last_serial);
}

/* ---- Tiers of several nodes: free space ------------------------------------------------------ */

/*
 * Asks the first rank of each other node whether it has free space. Called on rank 0, which has it.
 * Returns -EAGAIN, with an error message, if a node does not. If all nodes see rank 0's attempt,
 * they share one tier.
 */
static int ask_for_space(struct group_shard *shard, struct base_error *error)
{
	struct group_answers answers = { 0 };
	int ret = group_collect_answers(&shard->round, &group_space,
					"did not report whether it has free space", &answers,
					error);

	if (ret || !answers.failure.code)
		return ret;
	shard->plan.together = answers.same == answers.count;
	if (shard->plan.together)
		return 0;
	base_fail_reason(error, -EAGAIN, "%s", answers.failure.sentence);
	return -EAGAIN;
}

/* Returns whether this node sees rank 0's attempt, as on a filesystem that a job has made over the
 * disks of all its nodes. */
static bool is_rank0s(const struct ioshape_group *group, const char *attempt)
{
	struct io_folder directory = IO_NO_FOLDER;
	struct io_entry entry;
	const bool there = !io_folder_open(&directory, group->near, NULL) &&
			   !io_folder_look(&directory, attempt, &entry, NULL);

	io_folder_close(&directory);
	return there;
}

static int join(struct group_shard *shard, struct group_attempt *attempt, struct base_error *error)
{
	const struct ioshape_group *group = shard->group;
	int ret;

	if (is_rank0s(group, shard->plan.attempt))
		return base_fail_reason_with(
			error, -EEXIST, "give each node its own tier, or all nodes the same one",
			"it sees the tier of rank 0, but other nodes do not");
	ret = reserve_space(shard, error);
	return ret ? ret :
		     group_attempt_begin(attempt, group->near, shard->step, shard->plan.attempt,
					 group->job, save_settings(group->context).log, error);
}

/* Tells rank 0 whether this node has free space. Called on the other ranks. */
static int answer_for_space(struct group_shard *shard, struct group_attempt *attempt,
			    struct base_error *error)
{
	struct group_answer answer = { 0 };

	if (!group_leads_node(shard->group, shard->group->options.rank))
		return 0;
	join(shard, attempt, &answer.failure);
	return group_tell(&shard->round, &group_space, &answer, error);
}

/* ---- Collecting what all ranks want ---------------------------------------------------------- */

static int found_want(void *user, uint32_t rank, const struct base_buffer *body,
		      struct base_error *failure)
{
	struct group_shard *shard = user;
	struct group_want want = { 0 };

	if (!group_read_message(&group_want, body, &want))
		return base_fail_reason(failure, -EPROTO, "cannot read its save request");
	if (want.failure.code)
		return base_propagate(failure, &want.failure);
	if (want.step != shard->step)
		return base_fail_reason_with(
			failure, -EINVAL, "all ranks must save the same steps in the same order",
			"it saves step %llu while rank 0 saves step %llu",
			(unsigned long long)want.step, (unsigned long long)shard->step);
	shard->plan.ranks[rank].bytes = want.bytes;
	shard->sums[rank] = want.sample;
	shard->sums[rank].key.bytes = want.bytes;
	return 0;
}

static int collect_wants(struct group_shard *shard, struct base_error *error)
{
	const struct group_collection collection = {
		.what = group_want.name,
		.missing = "did not join the save",
		.found = found_want,
		.user = shard,
	};

	return group_round_collect(&shard->round, &collection, error);
}

/* ---- Making the plan ------------------------------------------------------------------------- */

/* Returns the stripe size of the checkpoint's files, which are of about one size; 0: not known. */
static uint64_t stripe_bytes_of(const struct group_shard *shard, const struct fs_facts *storage)
{
	const uint32_t count = group_count_files(shard, shard->plan.mode);
	const struct save_expected expected = {
		.request = &save_settings(shard->group->context).io->layout,
		.bytes = shard->plan.total_bytes / count,
		.files = count,
	};
	struct fs_layout layout;
	const struct fs_component *most;

	save_stripes_of(storage, &expected, &layout);
	most = fs_layout_main(&layout, expected.bytes);
	return most ? most->stripe_bytes : 0;
}

static void choose_mode(struct group_shard *shard, const struct group_attempt *attempt)
{
	struct ioshape_group *group = shard->group;
	struct group_plan *plan = &shard->plan;
	struct fs_facts storage;
	const struct facts facts = {
		.ranks = group->options.ranks,
		.nodes = group->node_count,
		.bytes = plan->total_bytes,
		.comm = group->options.comm && !group->comm_failed,
		.own_tiers = group_is_spread(shard),
	};

	save_look_at_storage(attempt->folder.fd, attempt->folder.path, &group->storage, &storage);
	plan->mode = mode_for(group->options.mode, &facts, plan->why, sizeof(plan->why));
	plan->alignment =
		shard_alignment(facts.bytes, facts.ranks, stripe_bytes_of(shard, &storage));
}

/* Frees the space that dead attempts of this job hold. */
static void remove_dead_attempts(void *user)
{
	const struct group_shard *shard = user;
	const struct ioshape_group *group = shard->group;
	struct io_folder directory = IO_NO_FOLDER;

	if (io_folder_open(&directory, group_directory_of(shard), NULL))
		return;
	group_tidy(&directory, group->job, NULL, NULL, save_settings(group->context).log);
	io_folder_close(&directory);
}

/* Checks that there is space where this node writes. */
static int check_space(struct group_shard *shard, struct base_error *error)
{
	const struct save_space space = {
		.context = shard->group->context,
		.path = group_directory_of(shard),
		.needed_bytes = bytes_here(shard),
		.clear = remove_dead_attempts,
		.clear_user = shard,
	};

	return save_space_check(&space, &shard->downgrades, error);
}

static int begin_attempt(struct group_shard *shard, struct group_attempt *attempt,
			 struct base_error *error)
{
	struct ioshape_group *group = shard->group;
	int ret = check_space(shard, error);

	if (ret)
		return ret;
	ret = group_attempt_begin(attempt, group_directory_of(shard), shard->step, NULL, group->job,
				  save_settings(group->context).log, error);
	if (ret)
		return ret;
	continue_serials(shard, attempt);
	strcpy(shard->plan.attempt, attempt->name);
	choose_mode(shard, attempt);
	return 0;
}

/* Asks the other nodes for space. If one has none, all ranks save directly. */
static int agree_on_path(struct group_shard *shard, struct group_attempt *attempt,
			 struct base_error *error)
{
	const struct base_error none = { 0 };
	int ret = group_tell_plan(shard, GROUP_ASKS_SPACE, &none, error);

	if (!ret)
		ret = ask_for_space(shard, error);
	if (ret == -EAGAIN) {
		group_attempt_abandon(attempt);
		save_directly(shard, error->sentence);
		base_error_begin(error);
		ret = begin_attempt(shard, attempt, error);
	}
	return ret;
}

int group_make_plan(struct group_shard *shard, struct group_attempt *attempt,
		    struct base_error *error)
{
	int ret;

	shard->sums = calloc(shard->group->options.ranks, sizeof(*shard->sums));
	if (!shard->sums)
		return base_no_memory(error, "a plan",
				      shard->group->options.ranks * sizeof(*shard->sums));
	shard->sums[0] = shard->sample;
	ret = collect_wants(shard, error);
	if (!ret)
		ret = find_same(shard, error);
	free(shard->sums);
	shard->sums = NULL;
	if (ret)
		return ret;
	for (uint32_t rank = 0; rank < shard->group->options.ranks; rank++)
		shard->plan.total_bytes += shard->plan.ranks[rank].bytes;
	choose_path(shard);
	ret = begin_attempt(shard, attempt, error);
	return !ret && group_is_spread(shard) ? agree_on_path(shard, attempt, error) : ret;
}

/* ---- Receiving the plan ---------------------------------------------------------------------- */

/* Returns whether the plan stores every shard: each rank's copy is that of a rank that keeps its
 * own and has an equal shard. */
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

/* Returns whether a plan is valid. It must name an attempt at this step, and no other path. */
static bool is_valid(const struct group_plan *plan, uint32_t ranks, uint64_t step)
{
	const struct group_name name = group_parse_name(plan->attempt);

	if (plan->count != ranks)
		return false;
	return plan->asks == GROUP_ASKS_DIGESTS ||
	       (keeps_all(plan->ranks, ranks) && name.kind == GROUP_NAME_ATTEMPT &&
		name.step == step && plan->mode != IOSHAPE_MODE_AUTO);
}

static int hear_plan(struct group_shard *shard, struct base_error *error)
{
	struct group_plan *plan = &shard->plan;
	int ret;

	/* Rank 0 asks two questions at most. */
	if (shard->plans == GROUP_MOST_PLANS)
		return base_fail_reason(error, -EPROTO, "rank 0 sent more plans than a save has");
	ret = group_hear(&shard->round, &group_plans[shard->plans++], 0, plan, error);
	if (!ret)
		ret = base_propagate(error, &plan->failure);
	if (!ret && !is_valid(plan, shard->group->options.ranks, shard->step))
		ret = base_fail_reason(error, -EPROTO, "the plan of rank 0 is not valid");
	return ret;
}

int group_await_plan(struct group_shard *shard, struct group_attempt *attempt,
		     struct base_error *error)
{
	int ret;

	do {
		ret = hear_plan(shard, error);
		if (!ret && shard->plan.asks == GROUP_ASKS_DIGESTS)
			ret = answer_digest(shard, error);
		else if (!ret && shard->plan.asks == GROUP_ASKS_SPACE)
			ret = answer_for_space(shard, attempt, error);
	} while (!ret && shard->plan.asks);
	if (ret || !shard->plan.near)
		group_attempt_abandon(attempt);
	if (!ret)
		record_reason(shard);
	return ret;
}
