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

struct wants {
	struct group_part *part;
	bool *have;
	struct base_error failure; /* of one of the ranks */
};

static int found_want(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct wants *wants = user;
	struct group_part *part = wants->part;
	struct group_note_reader reader = group_read_note(note);
	struct base_error theirs = { 0 };
	uint64_t step;

	group_read_error(&reader, &theirs);
	step = group_read_number(&reader);
	part->plan.bytes[rank] = group_read_number(&reader);
	group_read_sum(&reader, &part->sums[rank]);
	wants->have[rank] = true;
	if (reader.bad)
		base_refuse(&theirs, -EPROTO, "cannot read what it wants");
	else if (!theirs.code && step != part->step)
		base_refuse(&theirs, -EINVAL,
			    "it saves step %llu while rank 0 saves step %llu" BASE_REMEDY
			    "all ranks must save the same steps in the same order",
			    (unsigned long long)step, (unsigned long long)part->step);
	return theirs.code ? group_fail_of_rank(part->group, rank, &theirs, &wants->failure) : 0;
}

/* ---- The plan -------------------------------------------------------------------------------- */

static int collect_wants(struct group_part *part, struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct wants wants = { .part = part };
	struct group_collection collection = {
		.what = "want",
		.missing = "did not come to save",
		.found = found_want,
		.user = &wants,
	};
	int ret;

	wants.have = calloc(group->options.ranks, sizeof(bool));
	if (!wants.have)
		return base_no_memory(error, "a plan", group->options.ranks);
	wants.have[0] = true;
	collection.have = wants.have;
	ret = group_round_collect(&part->round, &collection, error);
	if (wants.failure.code)
		*error = wants.failure;
	free(wants.have);
	return ret ? ret : wants.failure.code;
}

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
	struct gather_facts facts = {
		.ranks = group->options.ranks,
		.nodes = group->node_count,
		.shared = true,
		.bytes = plan->total_bytes,
		.comm = group->options.comm && !group->comm_failed,
		.apart = group_is_spread(part),
	};

	for (uint32_t rank = 0; rank < facts.ranks; rank++)
		facts.most_bytes = MAX(facts.most_bytes, plan->bytes[rank]);
	save_look_at_storage(attempt->folder.fd, attempt->folder.path, &group->storage, &storage);
	files = files_of(part, IOSHAPE_MODE_NODE, facts.bytes, &storage);
	facts.targets = storage.targets;
	facts.stripes = files.stripes;
	facts.capacity = asked_capacity ? asked_capacity : files.capacity;
	plan->mode = gather_choose_mode(group->options.mode, &facts, plan->why, sizeof(plan->why));
	files = files_of(part, plan->mode, facts.bytes, &storage);
	plan->alignment = part_alignment(facts.bytes, facts.ranks, files.stripe_bytes);
}

/* What dead attempts of this job hold can be freed. */
static void remove_dead_attempts(void *user)
{
	const struct group_part *part = user;
	const struct ioshape_group *group = part->group;
	struct ring_folder directory = RING_NO_FOLDER;

	if (ring_folder_open(&directory, group_place_of(part), NULL))
		return;
	group_tidy(&directory, group->job, NULL, NULL, save_log(group->context));
	ring_folder_close(&directory);
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
		part->plan.total_bytes += part->plan.bytes[rank];
	group_choose_place(part);
	return begin_attempt(part, attempt, error);
}

static int say_plan(struct group_part *part, const char *what, const struct base_error *failure,
		    struct base_error *error)
{
	const struct group_plan *plan = &part->plan;
	struct group_note note = { 0 };

	group_note_error(&note, failure);
	group_note_number(&note, false); /* no question */
	group_note_number(&note, plan->mode);
	group_note_text(&note, plan->why);
	group_note_number(&note, plan->near);
	group_note_number(&note, plan->together);
	group_note_text(&note, plan->not_near);
	group_note_text(&note, plan->attempt);
	group_note_number(&note, plan->alignment);
	group_note_number(&note, plan->total_bytes);
	group_note_number(&note, plan->repeated_bytes);
	for (uint32_t rank = 0; plan->kept && rank < part->group->options.ranks; rank++) {
		group_note_number(&note, plan->bytes[rank]);
		group_note_number(&note, plan->same[rank]);
		group_note_number(&note, plan->kept[rank]);
	}
	return group_round_post(&part->round, what, &note, error);
}

/* All nodes have room for their files, or all save directly. */
static int agree_on_place(struct group_part *part, struct group_attempt *attempt,
			  struct base_error *error)
{
	struct base_error unsaid = { 0 };
	int ret = group_ask_for_room(part, error);

	if (ret == -EAGAIN) {
		group_attempt_abandon(attempt);
		group_save_directly(part, error->sentence);
		base_error_begin(error);
		ret = begin_attempt(part, attempt, error);
	}
	if (say_plan(part, "agreed", error, &unsaid) && !ret)
		ret = base_pass_on(error, &unsaid);
	return ret;
}

/* ---- What was written ------------------------------------------------------------------------ */

/* What rank 0 has heard from the writers. */
struct sum {
	struct group_part *part;
	struct zip_manifest manifest;
	bool *have; /* of the writers; the other ranks count as heard */
	uint32_t parts;
	struct base_error failure;
};

static int add_part(struct sum *sum, uint32_t file, uint32_t writer,
		    struct group_note_reader *reader)
{
	const struct ioshape_group *group = sum->part->group;
	uint64_t rank = group_read_number(reader);
	struct zip_manifest_part made = { .file = file };

	made.crc32 = (uint32_t)group_read_number(reader);
	made.offset = group_read_number(reader);
	made.bytes = group_read_number(reader);
	/* A rank that was there before has bytes: no part is empty. */
	if (reader->bad || rank >= group->options.ranks || sum->manifest.parts[rank].bytes ||
	    !group_is_kept(&sum->part->plan, (uint32_t)rank) ||
	    group_writer_of(group, sum->part->plan.mode, (uint32_t)rank) != writer)
		return -EPROTO;
	sum->manifest.parts[rank] = made;
	sum->parts++;
	return 0;
}

static int add_file(struct sum *sum, uint32_t writer, struct group_note_reader *reader)
{
	struct zip_manifest *manifest = &sum->manifest;
	struct zip_manifest_file *file = &manifest->files[manifest->file_count];
	char name[ZIP_PART_NAME_BYTES];
	uint64_t count;
	int ret = 0;

	group_read_text(reader, name, sizeof(name));
	file->name = strdup(name);
	if (!file->name)
		return -ENOMEM;
	file->bytes = group_read_number(reader);
	file->crc32 = (uint32_t)group_read_number(reader);
	file->bundle = sum->part->plan.mode != IOSHAPE_MODE_EACH;
	manifest->file_count++;
	count = group_read_number(reader);
	for (uint64_t i = 0; !ret && i < count; i++)
		ret = add_part(sum, manifest->file_count - 1, writer, reader);
	return ret;
}

static int found_done(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct sum *sum = user;
	const struct ioshape_group *group = sum->part->group;
	struct group_note_reader reader = group_read_note(note);
	struct base_error theirs = { 0 };
	int ret;

	sum->have[rank] = true;
	ret = group_read_error(&reader, &theirs);
	if (!ret)
		ret = add_file(sum, rank, &reader);
	if (ret && !theirs.code)
		base_fail(&theirs, ret, "cannot use what it has written");
	return ret ? group_fail_of_rank(group, rank, &theirs, &sum->failure) : 0;
}

/* Rank 0 says it to itself, in the same words. */
static int add_own(struct sum *sum, const struct group_written *written)
{
	const struct base_error none = { 0 };
	struct group_note note = { 0 };
	int ret = -ENOMEM;

	group_note_written(&note, written, &none);
	if (!note.failed)
		ret = found_done(sum, 0, &note.bytes);
	base_buffer_free(&note.bytes);
	return ret;
}

/* Names a part that is stored once for all ranks that have it. */
static void repeat_parts(struct sum *sum)
{
	const struct group_plan *plan = &sum->part->plan;
	struct zip_manifest_part *parts = sum->manifest.parts;

	for (uint32_t rank = 0; rank < sum->manifest.rank_count; rank++) {
		parts[rank] = parts[plan->kept[rank]];
		parts[rank].repeats = plan->same[rank] != rank;
		parts[rank].same = plan->same[rank];
	}
}

static int sum_up(struct sum *sum, const struct group_written *written, struct base_error *error)
{
	struct group_part *part = sum->part;
	const struct ioshape_group *group = part->group;
	const uint32_t ranks = group->options.ranks;
	uint32_t kept = 0;
	struct group_collection collection = {
		.what = "done",
		.missing = "did not finish",
		.have = sum->have,
		.found = found_done,
		.user = sum,
		.beats = true,
	};
	int ret;

	memset(sum->have, true, ranks);
	for (uint32_t rank = 0; rank < ranks; rank++) {
		if (!group_is_kept(&part->plan, rank))
			continue;
		sum->have[group_writer_of(group, part->plan.mode, rank)] = false;
		kept++;
	}
	sum->have[0] = true;
	ret = add_own(sum, written);
	if (ret)
		return sum->failure.code ? base_pass_on(error, &sum->failure) :
					   base_no_memory(error, "a manifest", 0);
	part->round.group_total = part->plan.total_bytes;
	ret = group_round_collect(&part->round, &collection, error);
	if (sum->failure.code)
		*error = sum->failure;
	if (ret || sum->failure.code)
		return ret ? ret : sum->failure.code;
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
	struct zip_manifest *manifest = &sum->manifest;
	int ret;

	manifest->step = part->step;
	manifest->saved = (int64_t)time(NULL);
	manifest->mode = part->plan.mode;
	snprintf(manifest->attempt, sizeof(manifest->attempt), "%s", attempt->id);
	manifest->rank_count = ranks;
	manifest->parts = calloc(ranks, sizeof(*manifest->parts));
	manifest->files = calloc(ranks, sizeof(*manifest->files));
	sum->have = calloc(ranks, sizeof(*sum->have));
	if (!manifest->parts || !manifest->files || !sum->have)
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
	struct group_note note = { 0 };

	group_note_error(&note, failure);
	group_note_number(&note, part->report->generation_bytes);
	group_note_text(&note, part->unprotected);
	return group_round_post(&part->round, "verdict", &note, error);
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
	*told = !say_plan(part, part->asked ? "answered" : "plan", error, &unsaid);
	if (!ret && !*told) {
		*error = unsaid;
		ret = unsaid.code;
	}
	return !ret && group_is_spread(part) ? agree_on_place(part, attempt, error) : ret;
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
	zip_manifest_free(&sum.manifest);
	free(sum.have);
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
	return say_plan(part, "plan", &named, error);
}
