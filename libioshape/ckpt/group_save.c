/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation, from the first "want" to the verdict. Every rank says what it brings; rank 0 plans;
 * writers write, the others bring them their parts; writers say what they have written; rank 0 puts
 * the generation in place, and says how it went.
 */
#define _GNU_SOURCE
#include "ckpt/group.h"

#include "ckpt/generation.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t ckpt_files_of(const struct ioshape_group *group, enum ioshape_mode mode)
{
	if (mode == IOSHAPE_MODE_RANK0)
		return 1;
	return MAX(mode == IOSHAPE_MODE_NODE ? group->node_count : group->options.ranks, 1);
}

uint32_t ckpt_writer_of(const struct ioshape_group *group, enum ioshape_mode mode, uint32_t rank)
{
	uint32_t first = 0;

	if (mode == IOSHAPE_MODE_RANK0)
		return 0;
	if (mode != IOSHAPE_MODE_NODE)
		return rank;
	while (group->ranks[first].node != group->ranks[rank].node)
		first++;
	return first;
}

bool ckpt_group_shares_memory(const struct ioshape_group *group)
{
	return group->options.rank != group->leader && group->options.mode != IOSHAPE_MODE_EACH;
}

int ckpt_part_track(void *user, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes)
{
	struct ckpt_part *part = user;

	part->round.done_bytes = done_bytes;
	ckpt_round_beat(&part->round);
	/* That a file is complete is not the end. */
	part->phase = MAX(part->phase, MIN(phase, IOSHAPE_PHASE_COMMIT));
	return ckpt_track(part->save, part->phase, done_bytes, total_bytes);
}

/* ---- What each rank wants -------------------------------------------------------------------- */

static int say_want(struct ckpt_round *round, uint64_t step, uint64_t bytes,
		    const struct base_error *why, struct base_error *error)
{
	struct ckpt_note note = { 0 };

	ckpt_note_number(&note, (uint64_t)(int64_t)why->code);
	ckpt_note_text(&note, why->text);
	ckpt_note_number(&note, step);
	ckpt_note_number(&note, bytes);
	return ckpt_round_post(round, "want", &note, error);
}

/* ---- The plan: the others -------------------------------------------------------------------- */

static int await_plan(struct ckpt_part *part, struct base_error *error)
{
	struct ckpt_group_plan *plan = &part->plan;
	struct base_buffer note = { 0 };
	char text[BASE_ERROR_TEXT_BYTES];
	struct ckpt_note_reader reader;
	int ret, code;

	ret = ckpt_round_await(&part->round, "plan", 0, &note, NULL, NULL, error);
	if (ret) {
		base_buffer_free(&note);
		return ret;
	}
	reader = ckpt_read_note(&note);
	code = (int)(int64_t)ckpt_read_number(&reader);
	ckpt_read_text(&reader, text, sizeof(text));
	plan->mode = (enum ioshape_mode)ckpt_read_number(&reader);
	ckpt_read_text(&reader, plan->why, sizeof(plan->why));
	ckpt_read_text(&reader, plan->path, sizeof(plan->path));
	plan->alignment = ckpt_read_number(&reader);
	plan->total_bytes = ckpt_read_number(&reader);
	for (uint32_t rank = 0; rank < part->group->options.ranks; rank++)
		plan->bytes[rank] = ckpt_read_number(&reader);
	if (code)
		ret = base_fail_as_told(error, code, "%s", text);
	else if (reader.bad || plan->mode < IOSHAPE_MODE_EACH || plan->mode > IOSHAPE_MODE_RANK0)
		ret = base_fail(error, -EPROTO, "cannot read the plan of rank 0");
	base_buffer_free(&note);
	return ret;
}

/* ---- What writers have written --------------------------------------------------------------- */

static int say_done(struct ckpt_part *part, const struct ckpt_written *written,
		    const struct base_error *failure, struct base_error *error)
{
	struct ckpt_note note = { 0 };

	ckpt_note_number(&note, (uint64_t)(int64_t)failure->code);
	ckpt_note_text(&note, failure->text);
	ckpt_note_text(&note, written->name);
	ckpt_note_number(&note, written->bytes);
	ckpt_note_number(&note, written->crc32);
	ckpt_note_number(&note, written->count);
	for (uint32_t i = 0; i < written->count; i++) {
		ckpt_note_number(&note, written->parts[i].rank);
		ckpt_note_number(&note, written->parts[i].crc32);
		ckpt_note_number(&note, written->parts[i].offset);
		ckpt_note_number(&note, written->parts[i].bytes);
	}
	return ckpt_round_post(&part->round, "done", &note, error);
}

/* ---- The verdict ----------------------------------------------------------------------------- */

static int take_verdict(struct ckpt_part *part, const struct base_buffer *note,
			struct base_error *error)
{
	struct ckpt_note_reader reader = ckpt_read_note(note);
	int code = (int)(int64_t)ckpt_read_number(&reader);
	char text[BASE_ERROR_TEXT_BYTES];

	ckpt_read_text(&reader, text, sizeof(text));
	part->report->generation_bytes = ckpt_read_number(&reader);
	if (reader.bad)
		return base_fail(error, -EPROTO, "cannot read the verdict of rank 0");
	return code ? base_fail_as_told(error, code, "%s", text) : 0;
}

/* While others write: how far all are. */
static void tell_progress(void *user)
{
	struct ckpt_part *part = user;

	if (part->round.group_total)
		ckpt_part_track(part, IOSHAPE_PHASE_SYNC,
				MIN(part->round.group_done, part->round.group_total),
				part->round.group_total);
}

/* Rank 0 may have put the generation in place, and have ended before we heard of it. */
static bool is_in_place(struct ckpt_part *part)
{
	struct ring_folder directory = RING_NO_FOLDER;
	struct ckpt_generation generation;
	const char *name = strrchr(part->plan.path, '/');
	char step_name[CKPT_STEP_NAME_BYTES];
	bool ours = false;

	ckpt_step_name(step_name, part->save->step);
	if (!name || ring_folder_open(&directory, part->group->directory, NULL))
		return false;
	if (!ckpt_generation_open(&generation, &directory, step_name, part->save->step, NULL)) {
		ours = !strcmp(generation.manifest.attempt, ckpt_parse_name(name + 1).id);
		for (uint32_t i = 0; ours && i < generation.manifest.file_count; i++)
			part->report->generation_bytes += generation.manifest.files[i].bytes;
		ckpt_generation_close(&generation);
	}
	ring_folder_close(&directory);
	return ours;
}

/* *heard: there is one; its code may be any, also that of a rank 0 that was not heard. */
static int await_verdict(struct ckpt_part *part, bool *heard, struct base_error *error)
{
	struct base_buffer note = { 0 };
	int ret;

	ret = ckpt_round_await(&part->round, "verdict", 0, &note, tell_progress, part, error);
	*heard = !ret;
	if (!ret)
		ret = take_verdict(part, &note, error);
	else if (ret == -ETIMEDOUT && is_in_place(part))
		ret = error->code = 0;
	base_buffer_free(&note);
	return ret;
}

/* ---- The others ------------------------------------------------------------------------------ */

static int follow(struct ckpt_part *part, struct base_error *error)
{
	const struct ioshape_group *group = part->group;
	struct ckpt_written written = { 0 };
	struct base_error own = { 0 }, told = { 0 };
	bool writes, heard;
	int ret, verdict;

	ret = await_plan(part, error);
	if (ret) {
		/* Rank 0 may have counted on us already. */
		say_done(part, &written, error, &own);
		return ret;
	}
	writes = ckpt_writer_of(group, part->plan.mode, group->options.rank) == group->options.rank;
	ret = writes ? ckpt_write_parts(part, &written, &own) : ckpt_bring_part(part, &own);
	/* Also who has nothing to write tells that it failed: its writer waits for it. */
	if (writes || ret)
		say_done(part, &written, &own, &own);
	free(written.parts);
	/* Who brought his part to nobody waits all the same: the verdict says what was the cause.
	 */
	verdict = await_verdict(part, &heard, &told);
	if (!verdict) /* our part was complete, whatever happened then */
		return 0;
	*error = own.code && (!heard || atomic_load(&part->save->abort)) ? own : told;
	return error->code;
}

/* ---- One save -------------------------------------------------------------------------------- */

static void report_group(const struct ckpt_part *part, uint64_t begin_ns, double own_s)
{
	static const char *const modes[] = { "", "each", "node", "rank0" };
	struct ioshape_report *report = part->report;

	report->group_s = MAX(base_seconds(base_now_ns() - begin_ns) - own_s, 0);
	report->ranks = part->group->options.ranks;
	snprintf(report->layout, sizeof(report->layout), "%s", modes[part->plan.mode]);
	snprintf(report->why, sizeof(report->why), "%s", part->plan.why);
	report->tensor_bytes = part->save->plan.payload_bytes;
}

/* On all ranks, whatever they had written by then. */
static void report_skip(struct ckpt_part *part, const struct base_error *why)
{
	struct ioshape_report *report = part->report;

	ckpt_room_note_skip(&part->notes, why);
	report->skipped = 1;
	report->fallbacks = part->notes.count;
	snprintf(report->fallback_text, sizeof(report->fallback_text), "%s", part->notes.text);
}

static int run_part(struct ckpt_part *part, struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct ioshape_save *save = part->save;
	struct base_error own = { 0 }, failure = { 0 };
	int ret;

	part->plan.bytes = calloc(group->options.ranks, sizeof(*part->plan.bytes));
	if (!part->plan.bytes)
		base_no_memory(&own, "a plan", group->options.ranks * sizeof(uint64_t));
	else
		part->plan.bytes[group->options.rank] = save->plan.expected_bytes;
	if (!own.code && atomic_load(&save->abort))
		base_fail(&own, -ECANCELED, "the save to %s was stopped", save->path);
	ckpt_part_track(part, IOSHAPE_PHASE_WAIT, 0, save->plan.expected_bytes);
	if (!group->options.rank) {
		ret = ckpt_lead(part, &own, &failure);
	} else {
		ret = say_want(&part->round, save->step, save->plan.expected_bytes, &own, &failure);
		if (!ret)
			ret = own.code ? (failure = own, own.code) : follow(part, &failure);
		/* So that rank 0 does not wait for a rank that has given up. */
		if (ret && !own.code)
			say_want(&part->round, save->step, 0, &failure, &own);
	}
	if (ret == IOSHAPE_E_SKIPPED)
		report_skip(part, &failure);
	if (ret)
		base_fail_as_told(error, ret, "%s was not saved: %s", save->path, failure.text);
	else
		ckpt_track(save, IOSHAPE_PHASE_DONE, part->report->generation_bytes,
			   part->report->generation_bytes);
	free(part->plan.bytes);
	part->plan.bytes = NULL;
	return ret;
}

int ckpt_group_run(struct ioshape_save *save, struct ioshape_report *report,
		   struct base_error *error)
{
	uint64_t begin_ns = base_now_ns();
	struct ckpt_part part = { .group = save->group, .save = save, .report = report };
	int ret;

	ckpt_round_begin(&part.round, save->group, save->round, &save->abort);
	ret = run_part(&part, error);
	ckpt_round_end(&part.round);
	report_group(&part, begin_ns,
		     report->slot_s + report->plan_s + report->write_s + report->sync_s);
	return ret;
}

int ckpt_group_give_up(const struct ckpt_group_share *share, const struct base_error *why,
		       struct base_error *error)
{
	struct ckpt_part part = { .group = share->group };
	int ret = 0;

	ckpt_round_begin(&part.round, share->group, share->round, NULL);
	if (share->group->ops && share->group->options.rank)
		ret = say_want(&part.round, share->step, 0, why, error);
	else if (share->group->ops)
		ret = ckpt_lead_nowhere(&part, why, error);
	ckpt_round_end(&part.round);
	return ret;
}
