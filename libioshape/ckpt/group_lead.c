/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0's part in a generation besides its own: it hears what all want, plans, hears what was
 * written, puts the generation in place, and says how it went.
 */
#define _GNU_SOURCE
#include "ckpt/generation.h"
#include "ckpt/group.h"
#include "ckpt/storage.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- What all want --------------------------------------------------------------------------- */

struct wants {
	struct ckpt_part *part;
	bool *have;
	struct base_error failure; /* of one of the ranks */
};

static int found_want(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct wants *wants = user;
	struct ckpt_part *part = wants->part;
	struct ckpt_note_reader reader = ckpt_read_note(note);
	int code = (int)(int64_t)ckpt_read_number(&reader);
	char text[BASE_ERROR_TEXT_BYTES];
	uint64_t step;

	ckpt_read_text(&reader, text, sizeof(text));
	step = ckpt_read_number(&reader);
	part->plan.bytes[rank] = ckpt_read_number(&reader);
	wants->have[rank] = true;
	if (reader.bad)
		return base_fail(&wants->failure, -EPROTO, "cannot read what %s wants",
				 CKPT_SHOWN_RANK(part->group, rank));
	if (code)
		return base_fail_as_told(&wants->failure, code, "%s: %s",
					 CKPT_SHOWN_RANK(part->group, rank), text);
	if (step != part->save->step)
		return base_fail(&wants->failure, -EINVAL,
				 "%s saves step %llu while rank 0 saves step %llu; all ranks must "
				 "save the same steps in the same order",
				 CKPT_SHOWN_RANK(part->group, rank), (unsigned long long)step,
				 (unsigned long long)part->save->step);
	return 0;
}

/* ---- The plan ------------------------------------------------------------------------ */

static int collect_wants(struct ckpt_part *part, struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct wants wants = { .part = part };
	struct ckpt_collection collection = {
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
	ret = ckpt_round_collect(&part->round, &collection, error);
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

static struct files files_of(const struct ckpt_part *part, enum ioshape_mode mode, uint64_t bytes,
			     const struct fs_facts *storage)
{
	const uint32_t count = ckpt_files_of(part->group, mode);
	const struct ckpt_expected expected = {
		.wish = &part->group->context->config.layout,
		.bytes = bytes / count,
		.files = count,
	};
	struct files files = { 0 };
	struct fs_layout layout;
	const struct fs_part *most;

	files.capacity = ckpt_stripes_of(storage, &expected, &layout);
	most = fs_layout_main(&layout, expected.bytes);
	if (!most)
		return files;
	files.stripe_bytes = most->stripe_bytes;
	files.stripes = most->stripe_count;
	if (storage->targets || most->stripe_count == FS_ALL_TARGETS)
		files.stripes = MIN(most->stripe_count, storage->targets);
	return files;
}

static void choose_mode(struct ckpt_part *part, const struct ckpt_attempt *attempt)
{
	struct ioshape_group *group = part->group;
	const uint32_t asked_capacity = group->context->slots.config.asked_capacity;
	struct ckpt_group_plan *plan = &part->plan;
	struct fs_facts storage;
	struct files files;
	struct gather_facts facts = {
		.ranks = group->options.ranks,
		.nodes = group->node_count,
		.shared = true,
		.bytes = plan->total_bytes,
		.comm = group->options.comm && !group->comm_failed,
	};

	for (uint32_t rank = 0; rank < facts.ranks; rank++)
		facts.most_bytes = MAX(facts.most_bytes, plan->bytes[rank]);
	ckpt_look_at_storage(attempt->folder.fd, attempt->folder.path, &group->storage, &storage);
	files = files_of(part, IOSHAPE_MODE_NODE, facts.bytes, &storage);
	facts.targets = storage.targets;
	facts.stripes = files.stripes;
	facts.capacity = asked_capacity ? asked_capacity : files.capacity;
	plan->mode = gather_choose_mode(group->options.mode, &facts, plan->why, sizeof(plan->why));
	files = files_of(part, plan->mode, facts.bytes, &storage);
	plan->alignment = ckpt_part_alignment(facts.bytes, facts.ranks, files.stripe_bytes);
}

/* What dead attempts of this job hold is room, too. */
static void remove_dead_attempts(void *user)
{
	const struct ioshape_group *group = user;
	struct ring_folder directory = RING_NO_FOLDER;
	char job[CKPT_JOB_BYTES];

	if (ring_folder_open(&directory, group->directory, NULL))
		return;
	ckpt_job_hash(job, group->token);
	ckpt_tidy(&directory, job, &group->context->log);
	ring_folder_close(&directory);
}

/* For the parts of all ranks; the others wait for the plan, and hear that this rank is alive. */
static int find_room(struct ckpt_part *part, struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct ring_file_options options = part->save->file_options;
	struct ckpt_room room = {
		.context = group->context,
		.path = group->directory,
		.in_directory = true,
		.needed_bytes = part->plan.total_bytes,
		.options = &options,
		.clear = remove_dead_attempts,
		.clear_user = group,
	};
	int ret;

	options.progress = ckpt_part_track;
	options.progress_user = part;
	options.progress_total = part->plan.total_bytes;
	ret = ckpt_room_await(&room, error);
	/* That it is skipped is noted by all ranks. */
	ckpt_room_note(&room, 0, &part->notes, error);
	return ret;
}

static int make_plan(struct ckpt_part *part, struct ckpt_attempt *attempt, struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct ioshape_save *save = part->save;
	int ret;

	ret = collect_wants(part, error);
	if (ret)
		return ret;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		part->plan.total_bytes += part->plan.bytes[rank];
	ret = find_room(part, error);
	if (ret)
		return ret;
	ret = ckpt_attempt_begin(attempt, group->directory, save->step, group->token,
				 &group->context->log, error);
	if (!ret && strlen(ckpt_attempt_path(attempt)) >= sizeof(part->plan.path))
		ret = base_fail(error, -ENAMETOOLONG, "cannot save into %s", group->directory);
	if (!ret)
		snprintf(part->plan.path, sizeof(part->plan.path), "%s",
			 ckpt_attempt_path(attempt));
	if (!ret)
		choose_mode(part, attempt);
	return ret;
}

static int say_plan(struct ckpt_part *part, const struct base_error *failure,
		    struct base_error *error)
{
	const struct ckpt_group_plan *plan = &part->plan;
	struct ckpt_note note = { 0 };

	ckpt_note_number(&note, (uint64_t)(int64_t)failure->code);
	ckpt_note_text(&note, failure->text);
	ckpt_note_number(&note, plan->mode);
	ckpt_note_text(&note, plan->why);
	ckpt_note_text(&note, plan->path);
	ckpt_note_number(&note, plan->alignment);
	ckpt_note_number(&note, plan->total_bytes);
	for (uint32_t rank = 0; plan->bytes && rank < part->group->options.ranks; rank++)
		ckpt_note_number(&note, plan->bytes[rank]);
	return ckpt_round_post(&part->round, "plan", &note, error);
}

/* ---- What was written ------------------------------------------------------------------------ */

/* Rank 0's list. */
struct sum {
	struct ckpt_part *part;
	struct zip_manifest manifest;
	bool *have; /* writers; the others count as had */
	uint32_t parts;
	struct base_error failure;
};

static int add_part(struct sum *sum, uint32_t file, uint32_t writer,
		    struct ckpt_note_reader *reader)
{
	const struct ioshape_group *group = sum->part->group;
	uint64_t rank = ckpt_read_number(reader);
	struct zip_manifest_part made = { .file = file };

	made.crc32 = (uint32_t)ckpt_read_number(reader);
	made.offset = ckpt_read_number(reader);
	made.bytes = ckpt_read_number(reader);
	/* A rank that was there before has bytes: no part is empty. */
	if (reader->bad || rank >= group->options.ranks || sum->manifest.parts[rank].bytes ||
	    ckpt_writer_of(group, sum->part->plan.mode, (uint32_t)rank) != writer)
		return -EPROTO;
	sum->manifest.parts[rank] = made;
	sum->parts++;
	return 0;
}

static int add_file(struct sum *sum, uint32_t writer, struct ckpt_note_reader *reader)
{
	struct zip_manifest *manifest = &sum->manifest;
	struct zip_manifest_file *file = &manifest->files[manifest->file_count];
	char name[ZIP_PART_NAME_BYTES];
	uint64_t count;
	int ret = 0;

	ckpt_read_text(reader, name, sizeof(name));
	file->name = strdup(name);
	if (!file->name)
		return -ENOMEM;
	file->bytes = ckpt_read_number(reader);
	file->crc32 = (uint32_t)ckpt_read_number(reader);
	file->bundle = sum->part->plan.mode != IOSHAPE_MODE_EACH;
	manifest->file_count++;
	count = ckpt_read_number(reader);
	for (uint64_t i = 0; !ret && i < count; i++)
		ret = add_part(sum, manifest->file_count - 1, writer, reader);
	return ret;
}

static int found_done(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct sum *sum = user;
	const struct ioshape_group *group = sum->part->group;
	struct ckpt_note_reader reader = ckpt_read_note(note);
	int code = (int)(int64_t)ckpt_read_number(&reader), ret;
	char text[BASE_ERROR_TEXT_BYTES];

	ckpt_read_text(&reader, text, sizeof(text));
	sum->have[rank] = true;
	if (code)
		return base_fail_as_told(&sum->failure, code, "%s: %s",
					 CKPT_SHOWN_RANK(group, rank), text);
	ret = add_file(sum, rank, &reader);
	return ret ? base_fail(&sum->failure, ret, "cannot use what %s has written",
			       CKPT_SHOWN_RANK(group, rank)) :
		     0;
}

/* Rank 0 has been told by itself. */
static int add_own(struct sum *sum, const struct ckpt_written *written)
{
	struct zip_manifest *manifest = &sum->manifest;
	struct zip_manifest_file *file = &manifest->files[manifest->file_count];

	file->name = strdup(written->name);
	if (!file->name)
		return -ENOMEM;
	file->bytes = written->bytes;
	file->crc32 = written->crc32;
	file->bundle = sum->part->plan.mode != IOSHAPE_MODE_EACH;
	for (uint32_t i = 0; i < written->count; i++) {
		const struct ckpt_written_part *own = &written->parts[i];

		manifest->parts[own->rank] = (struct zip_manifest_part){
			manifest->file_count,
			own->crc32,
			own->offset,
			own->bytes,
		};
	}
	sum->parts += written->count;
	manifest->file_count++;
	return 0;
}

static int sum_up(struct sum *sum, const struct ckpt_written *written, struct base_error *error)
{
	struct ckpt_part *part = sum->part;
	const struct ioshape_group *group = part->group;
	const uint32_t ranks = group->options.ranks;
	struct ckpt_collection collection = {
		.what = "done",
		.missing = "did not finish",
		.have = sum->have,
		.found = found_done,
		.user = sum,
		.signs = true,
		.tells = true,
	};
	int ret;

	for (uint32_t rank = 0; rank < ranks; rank++)
		sum->have[rank] = ckpt_writer_of(group, part->plan.mode, rank) != rank || !rank;
	ret = add_own(sum, written);
	if (ret)
		return base_no_memory(error, "a manifest", 0);
	part->round.group_total = part->plan.total_bytes;
	ret = ckpt_round_collect(&part->round, &collection, error);
	if (sum->failure.code)
		*error = sum->failure;
	if (ret || sum->failure.code)
		return ret ? ret : sum->failure.code;
	return sum->parts == ranks ?
		       0 :
		       base_fail(error, -EPROTO, "%u of %u parts of generation %llu were written",
				 sum->parts, ranks, (unsigned long long)part->save->step);
}

/* ---- The verdict ----------------------------------------------------------------------------- */

static int put_in_place(struct sum *sum, struct ckpt_attempt *attempt,
			const struct ckpt_written *written, struct base_error *error)
{
	struct ckpt_part *part = sum->part;
	const uint32_t ranks = part->group->options.ranks;
	struct zip_manifest *manifest = &sum->manifest;
	int ret;

	manifest->step = part->save->step;
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
	return ckpt_attempt_commit(attempt, manifest, part->save->file_options.no_replace, error);
}

static int say_verdict(struct ckpt_part *part, const struct base_error *failure,
		       struct base_error *error)
{
	struct ckpt_note note = { 0 };

	ckpt_note_number(&note, (uint64_t)(int64_t)failure->code);
	ckpt_note_text(&note, failure->text);
	ckpt_note_number(&note, part->report->generation_bytes);
	return ckpt_round_post(&part->round, "verdict", &note, error);
}

/* ---- Rank 0 ---------------------------------------------------------------------------------- */

/* The one that was just saved stays, also where a job has gone back to earlier steps. */
static void retain(const struct ckpt_part *part)
{
	const struct ioshape_group *group = part->group;
	const struct ioshape_prune_options options = {
		.size = sizeof(options),
		.keep_last = group->options.keep_last,
		.keep_every = group->options.keep_every,
	};
	struct base_error why = { 0 };
	char job[CKPT_JOB_BYTES];

	if (!options.keep_last)
		return;
	ckpt_job_hash(job, group->token);
	if (ckpt_prune(group->context, group->directory, job, &options, &part->save->step, NULL,
		       &why))
		base_log(&group->context->log, IOSHAPE_LOG_WARNING,
			 "old generations of %s were not removed: %s", group->directory, why.text);
}

/* Of ranks that are alone everybody knows who it was. */
static void name_failure(const struct ckpt_part *part, const struct base_error *own,
			 struct base_error *failure)
{
	if (own->code && part->group->ops)
		base_fail_as_told(failure, own->code, "%s: %s", CKPT_SHOWN_RANK(part->group, 0),
				  own->text);
	else if (own->code && !failure->code)
		*failure = *own;
}

int ckpt_lead(struct ckpt_part *part, const struct base_error *own, struct base_error *error)
{
	struct ckpt_attempt attempt = CKPT_NO_ATTEMPT;
	struct ckpt_written written = { 0 };
	struct base_error own_failure = { 0 }, failure = { 0 }, ignored = { 0 };
	struct sum sum = { .part = part };
	int ret = own->code, told = 0;

	if (!ret)
		ret = ckpt_room_verdict(part->group->context, make_plan(part, &attempt, &failure),
					&failure);
	else
		name_failure(part, own, &failure);
	if (part->group->ops) {
		if (!ret)
			ckpt_round_forget(&part->round);
		told = say_plan(part, &failure, &failure);
		ret = ret ? ret : told;
	}
	if (!ret)
		ret = ckpt_write_parts(part, &written, &own_failure);
	name_failure(part, &own_failure, &failure);
	if (!ret)
		ret = put_in_place(&sum, &attempt, &written, &failure);
	ret = ckpt_room_verdict(part->group->context, ret, &failure);
	/* If the plan was not heard, nor will this be: the others find out by their deadline. */
	if (part->group->ops && !told)
		say_verdict(part, &failure, &ignored);
	ckpt_attempt_abandon(&attempt);
	if (!ret)
		retain(part);
	zip_manifest_free(&sum.manifest);
	free(sum.have);
	free(written.parts);
	*error = failure;
	return ret;
}

int ckpt_lead_nowhere(struct ckpt_part *part, const struct base_error *why,
		      struct base_error *error)
{
	struct base_error named = { 0 };

	name_failure(part, why, &named);
	return say_plan(part, &named, error);
}
