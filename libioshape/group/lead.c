/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0's part in a generation besides its own: it hears what all want, plans, hears what was
 * written, puts the generation in place, and says how it went.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Where parts begin in bundles ------------------------------------------------------------ */

/* Parts in a bundle begin on multiples of this where stripes are not known; in small generations of
 * the lesser one. */
#define PART_ALIGNMENT (1 * MIB)
#define SMALL_PART_ALIGNMENT 4096u
#define SMALL_PARTS_BYTES (64 * MIB)

/* What lies between parts is written, too: on average half of this for each. */
#define MOST_PART_ALIGNMENT (16 * MIB)
#define PART_ALIGNMENTS 4u

static uint64_t part_alignment(uint64_t bytes, uint32_t parts, uint64_t stripe_bytes)
{
	const uint64_t part_bytes = bytes / MAX(parts, 1);
	uint64_t divisor = 1;

	if (bytes < SMALL_PARTS_BYTES)
		return SMALL_PART_ALIGNMENT;
	if (!stripe_bytes || stripe_bytes % SMALL_PART_ALIGNMENT)
		return PART_ALIGNMENT;
	if (stripe_bytes <= PART_ALIGNMENT)
		return (PART_ALIGNMENT + stripe_bytes - 1) / stripe_bytes * stripe_bytes;
	/* All of a stripe, or what divides it. */
	while (stripe_bytes / divisor > PART_ALIGNMENT &&
	       (stripe_bytes % (divisor * SMALL_PART_ALIGNMENT) ||
		stripe_bytes / divisor > MOST_PART_ALIGNMENT ||
		stripe_bytes / divisor > part_bytes / PART_ALIGNMENTS))
		divisor++;
	return stripe_bytes % (divisor * SMALL_PART_ALIGNMENT) ? PART_ALIGNMENT :
								 stripe_bytes / divisor;
}

/* ---- What all ranks want --------------------------------------------------------------------- */

static int found_want(void *user, uint32_t rank, const struct base_buffer *note,
		      struct base_error *failure)
{
	struct group_part *part = user;
	struct group_want want = { 0 };

	if (!group_read_message(&group_want, note, &want))
		return base_refuse(failure, -EPROTO, "cannot read what it wants");
	if (want.failure.code)
		return base_pass_on(failure, &want.failure);
	if (want.step != part->step)
		return base_refuse_with(
			failure, -EINVAL, "all ranks must save the same steps in the same order",
			"it saves step %llu while rank 0 saves step %llu",
			(unsigned long long)want.step, (unsigned long long)part->step);
	part->plan.ranks[rank].bytes = want.bytes;
	part->sums[rank] = want.sample;
	part->sums[rank].key.bytes = want.bytes;
	return 0;
}

static int collect_wants(struct group_part *part, struct base_error *error)
{
	const struct group_collection collection = {
		.what = group_want.name,
		.missing = "did not come to save",
		.found = found_want,
		.user = part,
	};

	return group_round_collect(&part->round, &collection, error);
}

/* ---- The plan -------------------------------------------------------------------------------- */

/* How the files of a generation lie, which are about of one size. */
struct files {
	uint32_t stripes, capacity; /* 0 unknown */
	uint64_t stripe_bytes;
};

static struct files files_of(const struct group_part *part, enum ioshape_mode mode, uint64_t bytes,
			     const struct fs_facts *storage)
{
	const uint32_t count = group_count_files(part, mode);
	const struct save_expected expected = {
		.request = &save_config(part->group->context)->layout,
		.bytes = bytes / count,
		.files = count,
	};
	struct files files = { 0 };
	struct fs_layout layout;
	const struct fs_part *most;

	files.capacity = save_stripes_of(storage, &expected, &layout);
	most = fs_layout_main(&layout, expected.bytes);
	if (!most)
		return files;
	files.stripe_bytes = most->stripe_bytes;
	files.stripes = most->stripe_count;
	if (storage->targets || most->stripe_count == FS_ALL_TARGETS)
		files.stripes = MIN(most->stripe_count, storage->targets);
	return files;
}

static void choose_mode(struct group_part *part, const struct group_attempt *attempt)
{
	struct ioshape_group *group = part->group;
	const uint32_t asked_capacity = save_slots_config(group->context)->asked_capacity;
	struct group_plan *plan = &part->plan;
	struct fs_facts storage;
	struct files files;
	struct group_facts facts = {
		.ranks = group->options.ranks,
		.nodes = group->node_count,
		.shared = true,
		.bytes = plan->total_bytes,
		.comm = group->options.comm && !group->comm_failed,
		.apart = group_is_spread(part),
	};

	for (uint32_t rank = 0; rank < facts.ranks; rank++)
		facts.most_bytes = MAX(facts.most_bytes, plan->ranks[rank].bytes);
	save_look_at_storage(attempt->folder.fd, attempt->folder.path, &group->storage, &storage);
	files = files_of(part, IOSHAPE_MODE_NODE, facts.bytes, &storage);
	facts.targets = storage.targets;
	facts.stripes = files.stripes;
	facts.capacity = asked_capacity ? asked_capacity : files.capacity;
	plan->mode = group_choose_mode(group->options.mode, &facts, plan->why, sizeof(plan->why));
	files = files_of(part, plan->mode, facts.bytes, &storage);
	plan->alignment = part_alignment(facts.bytes, facts.ranks, files.stripe_bytes);
}

/* What dead attempts of this job hold can be freed. */
static void remove_dead_attempts(void *user)
{
	const struct group_part *part = user;
	const struct ioshape_group *group = part->group;
	struct io_folder directory = IO_NO_FOLDER;

	if (io_folder_open(&directory, group_place_of(part), NULL))
		return;
	group_tidy(&directory, group->job, NULL, NULL, save_log(group->context));
	io_folder_close(&directory);
}

/* For what is written there. */
static int check_space(struct group_part *part, struct base_error *error)
{
	const struct save_space space = {
		.context = part->group->context,
		.path = group_place_of(part),
		.needed_bytes = group_bytes_here(part),
		.clear = remove_dead_attempts,
		.clear_user = part,
	};

	return save_space_check(&space, &part->notes, error);
}

static int begin_attempt(struct group_part *part, struct group_attempt *attempt,
			 struct base_error *error)
{
	struct ioshape_group *group = part->group;
	int ret = check_space(part, error);

	if (ret)
		return ret;
	ret = group_attempt_begin(attempt, group_place_of(part), part->step, group->job,
				  save_log(group->context), error);
	if (ret)
		return ret;
	group_continue_serials(part, attempt);
	strcpy(part->plan.attempt, attempt->name);
	choose_mode(part, attempt);
	return 0;
}

/* All nodes have room for their files, or all save directly. */
static int agree_on_place(struct group_part *part, struct group_attempt *attempt,
			  struct base_error *error)
{
	const struct base_error none = { 0 };
	int ret = group_tell_plan(part, GROUP_ASKS_ROOM, &none, error);

	if (!ret)
		ret = group_ask_for_room(part, error);
	if (ret == -EAGAIN) {
		group_attempt_abandon(attempt);
		group_save_directly(part, error->sentence);
		base_error_begin(error);
		ret = begin_attempt(part, attempt, error);
	}
	return ret;
}

static int make_plan(struct group_part *part, struct group_attempt *attempt,
		     struct base_error *error)
{
	int ret;

	part->sums = calloc(part->group->options.ranks, sizeof(*part->sums));
	if (!part->sums)
		return base_no_memory(error, "a plan",
				      part->group->options.ranks * sizeof(*part->sums));
	part->sums[0] = part->sample;
	ret = collect_wants(part, error);
	if (!ret)
		ret = group_find_same(part, error);
	free(part->sums);
	part->sums = NULL;
	if (ret)
		return ret;
	for (uint32_t rank = 0; rank < part->group->options.ranks; rank++)
		part->plan.total_bytes += part->plan.ranks[rank].bytes;
	group_choose_place(part);
	ret = begin_attempt(part, attempt, error);
	return !ret && group_is_spread(part) ? agree_on_place(part, attempt, error) : ret;
}

/* ---- What was written ------------------------------------------------------------------------ */

/* What rank 0 has heard from the writers. */
struct sum {
	struct group_part *part;
	struct format_manifest manifest;
	bool *writes;                     /* by rank */
	struct group_written_part *heard; /* of one of them: memory for the parts of all ranks */
	uint32_t parts;
};

static int add_part(struct sum *sum, uint32_t file, uint32_t writer,
		    const struct group_written_part *written)
{
	const struct ioshape_group *group = sum->part->group;
	const uint32_t rank = written->rank;

	/* A rank that was there before has bytes: no part is empty. */
	if (rank >= group->options.ranks || sum->manifest.parts[rank].bytes ||
	    !group_is_kept(&sum->part->plan, rank) ||
	    group_writer_of(group, sum->part->plan.mode, rank) != writer)
		return -EPROTO;
	sum->manifest.parts[rank] = (struct format_manifest_part){
		.file = file,
		.crc32 = written->crc32,
		.offset = written->offset,
		.bytes = written->bytes,
	};
	sum->parts++;
	return 0;
}

static int add_file(struct sum *sum, uint32_t writer, const struct group_written *written)
{
	struct format_manifest *manifest = &sum->manifest;
	struct format_manifest_file *file = &manifest->files[manifest->file_count];
	int ret = 0;

	file->name = strdup(written->name);
	if (!file->name)
		return -ENOMEM;
	file->bytes = written->bytes;
	file->crc32 = written->crc32;
	file->bundle = sum->part->plan.mode != IOSHAPE_MODE_EACH;
	manifest->file_count++;
	for (uint32_t i = 0; !ret && i < written->count; i++)
		ret = add_part(sum, manifest->file_count - 1, writer, &written->parts[i]);
	return ret;
}

static bool writes(const void *user, uint32_t rank)
{
	const struct sum *sum = user;

	return sum->writes[rank];
}

static int found_done(void *user, uint32_t rank, const struct base_buffer *note,
		      struct base_error *failure)
{
	struct sum *sum = user;
	struct group_written written = { .parts = sum->heard,
					 .count = sum->part->group->options.ranks };
	int ret = group_read_message(&group_done, note, &written) ? 0 : -EPROTO;

	if (!ret && written.failure.code)
		return base_pass_on(failure, &written.failure);
	if (!ret)
		ret = add_file(sum, rank, &written);
	return ret ? base_fail(failure, ret, "cannot use what it has written") : 0;
}

/* Names a part that is stored once for all ranks that have it. */
static void repeat_parts(struct sum *sum)
{
	const struct group_plan *plan = &sum->part->plan;
	struct format_manifest_part *parts = sum->manifest.parts;

	for (uint32_t rank = 0; rank < sum->manifest.rank_count; rank++) {
		parts[rank] = parts[plan->ranks[rank].kept];
		parts[rank].repeats = plan->ranks[rank].same != rank;
		parts[rank].same = plan->ranks[rank].same;
	}
}

static int sum_up(struct sum *sum, const struct group_written *written, struct base_error *error)
{
	struct group_part *part = sum->part;
	const struct ioshape_group *group = part->group;
	const uint32_t ranks = group->options.ranks;
	uint32_t kept = 0;
	const struct group_collection collection = {
		.what = group_done.name,
		.missing = "did not finish",
		.awaits = writes,
		.found = found_done,
		.user = sum,
		.beats = true,
	};
	int ret;

	for (uint32_t rank = 0; rank < ranks; rank++) {
		if (!group_is_kept(&part->plan, rank))
			continue;
		sum->writes[group_writer_of(group, part->plan.mode, rank)] = true;
		kept++;
	}
	ret = add_file(sum, 0, written);
	if (ret)
		return base_fail(error, ret, "cannot use what rank 0 has written");
	part->round.group_total = part->plan.total_bytes;
	ret = group_round_collect(&part->round, &collection, error);
	if (ret)
		return ret;
	if (sum->parts != kept)
		return base_refuse(error, -EPROTO, "%u of %u parts of generation %llu were written",
				   sum->parts, kept, (unsigned long long)part->step);
	repeat_parts(sum);
	return 0;
}

/* ---- The verdict ----------------------------------------------------------------------------- */

static int commit(struct sum *sum, struct group_attempt *attempt,
		  const struct group_written *written, struct base_error *error)
{
	struct group_part *part = sum->part;
	const uint32_t ranks = part->group->options.ranks;
	struct format_manifest *manifest = &sum->manifest;
	int ret;

	manifest->step = part->step;
	manifest->saved = (int64_t)time(NULL);
	manifest->mode = part->plan.mode;
	snprintf(manifest->attempt, sizeof(manifest->attempt), "%s", attempt->id);
	manifest->rank_count = ranks;
	manifest->parts = calloc(ranks, sizeof(*manifest->parts));
	manifest->files = calloc(ranks, sizeof(*manifest->files));
	sum->writes = calloc(ranks, sizeof(*sum->writes));
	sum->heard = calloc(ranks, sizeof(*sum->heard));
	if (!manifest->parts || !manifest->files || !sum->writes || !sum->heard)
		return base_no_memory(error, "a manifest", ranks * sizeof(*manifest->parts));
	ret = sum_up(sum, written, error);
	if (ret)
		return ret;
	for (uint32_t i = 0; i < manifest->file_count; i++)
		part->report->generation_bytes += manifest->files[i].bytes;
	if (group_is_spread(part))
		return group_commit_spread(part, attempt, manifest, error);
	ret = group_attempt_commit(attempt, manifest, part->task->file_options.no_replace, error);
	if (ret)
		return ret;
	part->group->last_serial = MAX(part->group->last_serial, attempt->last_serial);
	return group_keep(part, error);
}

static int say_verdict(struct group_part *part, const struct base_error *failure,
		       struct base_error *error)
{
	struct group_verdict verdict = {
		.failure = *failure,
		.generation_bytes = part->report->generation_bytes,
	};

	strcpy(verdict.unprotected, part->unprotected);
	return group_tell(&part->round, &group_verdict, &verdict, error);
}

/* ---- Rank 0 ---------------------------------------------------------------------------------- */

/* The one that was just saved stays, also where a job has gone back to earlier steps. */
static void retain(const struct group_part *part)
{
	const struct ioshape_group *group = part->group;
	const struct ioshape_prune_options options = {
		.size = sizeof(options),
		.keep_last = group->options.keep_last,
		.keep_every = group->options.keep_every,
	};
	struct base_error why = { 0 };

	/* Of those on the tier it is asked of the drain. */
	if (!options.keep_last || part->plan.near)
		return;
	if (group_prune(group->context, group->directory, group->job, &options, NULL, &why))
		base_log(save_log(group->context), IOSHAPE_LOG_WARNING,
			 "old generations of %s were not removed: %s", group->directory, why.text);
}

/* What rank 0 failed with itself. A rank that is alone needs no name. */
static int fail_own(const struct group_part *part, const struct base_error *own,
		    struct base_error *error)
{
	if (part->group->board)
		return group_fail_of_rank(part->group, 0, own, error);
	return base_pass_on(error, own);
}

/* Plans, and tells the others: the plan, or why there is none. *told: they have been told. */
static int plan_and_tell(struct group_part *part, struct group_attempt *attempt,
			 const struct base_error *own, bool *told, struct base_error *error)
{
	struct base_error unsaid = { 0 };
	int ret;

	ret = own->code ? fail_own(part, own, error) : make_plan(part, attempt, error);
	ret = save_space_verdict(part->group->context, ret, error);
	if (!part->group->board)
		return ret;
	if (!ret)
		group_round_forget(&part->round);
	*told = !group_tell_plan(part, GROUP_NO_QUESTION, error, &unsaid);
	if (!ret && !*told)
		ret = base_pass_on(error, &unsaid);
	return ret;
}

static int write_and_commit(struct group_part *part, struct group_attempt *attempt,
			    struct base_error *error)
{
	struct group_written written = { 0 };
	struct sum sum = { .part = part };
	struct base_error own = { 0 };
	int ret;

	if (group_write_parts(part, &written, &own))
		ret = fail_own(part, &own, error);
	else
		ret = commit(&sum, attempt, &written, error);
	format_manifest_free(&sum.manifest);
	free(sum.writes);
	free(sum.heard);
	free(written.parts);
	return save_space_verdict(part->group->context, ret, error);
}

int group_lead(struct group_part *part, const struct base_error *own, struct base_error *error)
{
	struct group_attempt attempt = GROUP_NO_ATTEMPT;
	struct base_error unsaid = { 0 };
	bool told = false;
	int ret;

	ret = plan_and_tell(part, &attempt, own, &told, error);
	if (!ret)
		ret = write_and_commit(part, &attempt, error);
	/* Ranks that have not heard the plan find out by their deadline. */
	if (told)
		say_verdict(part, error, &unsaid);
	group_attempt_abandon(&attempt);
	/* The next save does it. */
	if (!ret && !part->task->file_options.deadline_ns)
		retain(part);
	return ret;
}

int group_lead_nowhere(struct group_part *part, const struct base_error *why,
		       struct base_error *error)
{
	struct base_error named = { 0 };

	fail_own(part, why, &named);
	return group_tell_plan(part, GROUP_NO_QUESTION, &named, error);
}
