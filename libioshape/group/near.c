/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation that is saved on a tier first: whether it can be, and what makes it last.
 *
 * If nodes have tiers of their own, each saves its part of it there. Before it is written, every
 * node makes room and a directory for its files, or all save directly. When all is written, every
 * node gets the manifest and protects the others; then each puts its directory in place and keeps
 * it for the drain. Only after that it has been saved.
 */
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- One node -------------------------------------------------------------------------------- */

static const char *find_reason(const struct group_part *part)
{
	const struct io_file_options *options = &part->task->file_options;

	if (!part->group->near)
		return "a rank has no tier";
	if (options->no_replace)
		return "what is at its destination is not to be replaced";
	if (options->deadline_ns)
		return "it has a deadline";
	return NULL;
}

/* On all ranks. */
static void note_reason(struct group_part *part)
{
	if (!*part->plan.not_near)
		return;
	io_note(&part->notes, IOSHAPE_STEP_TIER, "saved directly, not on the tier: %s",
		part->plan.not_near);
	io_notes_report(&part->notes, part->report);
}

void group_save_directly(struct group_part *part, const char *why)
{
	part->plan.near = false;
	snprintf(part->plan.not_near, sizeof(part->plan.not_near), "%s", why);
	note_reason(part);
}

uint64_t group_bytes_here(const struct group_part *part)
{
	const struct ioshape_group *group = part->group;
	uint64_t bytes = 0;

	if (!group_is_spread(part))
		return part->plan.total_bytes;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		bytes += group_is_local(group, rank) ? part->plan.ranks[rank].bytes : 0;
	return bytes;
}

/* For what is written on this node's tier, and what it keeps for others. */
static int make_room(const struct group_part *part, struct base_error *error)
{
	const struct ioshape_group *group = part->group;
	struct group_tier *tier = group_tier_of(&group->options);

	return tier->ops->make_room(tier, part->task->path, group_bytes_here(part),
				    group_is_spread(part) ? group->node_count : 1, error);
}

void group_choose_place(struct group_part *part)
{
	struct base_error failure = { 0 };
	const char *reason;

	if (!group_tier_of(&part->group->options))
		return;
	reason = find_reason(part);
	part->plan.near = !reason;
	if (!reason && make_room(part, &failure))
		reason = failure.sentence;
	if (reason)
		group_save_directly(part, reason);
}

void group_take_place(struct group_part *part)
{
	note_reason(part);
}

void group_continue_serials(struct group_part *part, struct group_attempt *attempt)
{
	struct ioshape_group *group = part->group;
	const char *other = part->plan.near ? group->directory : group->near;
	struct io_folder directory = IO_NO_FOLDER;

	/* Once: the destination may be slow, and whatever is saved there later has the number of
	 * its time. */
	if (other && !group->serials_known && !io_folder_open(&directory, other, NULL)) {
		group->last_serial = group_last_serial(&directory, &attempt->log);
		io_folder_close(&directory);
	}
	group->serials_known = true;
	attempt->last_serial = MAX(attempt->last_serial, group->last_serial);
}

int group_keep(const struct group_part *part, struct base_error *error)
{
	const struct ioshape_group_options *options = &part->group->options;
	struct group_tier *tier = group_tier_of(options);

	if (!part->plan.near)
		return 0;
	return tier->ops->keep(tier, part->task->path, options->keep_last, options->keep_every,
			       error);
}

/* ---- Tiers of several nodes: room ------------------------------------------------------------ */

int group_ask_for_room(struct group_part *part, struct base_error *error)
{
	struct group_answers answers = { 0 };
	int ret = group_collect_answers(&part->round, &group_room,
					"did not say whether it has room", &answers, error);

	if (ret || !answers.failure.code)
		return ret;
	part->plan.together = answers.same == answers.count;
	if (part->plan.together)
		return 0;
	base_refuse(error, -EAGAIN, "%s", answers.failure.sentence);
	return -EAGAIN;
}

/* As on a filesystem that a job has made over the disks of all its nodes. */
static bool is_rank0s(const struct ioshape_group *group, const char *attempt)
{
	struct io_folder directory = IO_NO_FOLDER;
	struct io_entry entry;
	const bool there = !io_folder_open(&directory, group->near, NULL) &&
			   !io_folder_look(&directory, attempt, &entry, NULL);

	io_folder_close(&directory);
	return there;
}

static int join(struct group_part *part, struct group_attempt *attempt, struct base_error *error)
{
	const struct ioshape_group *group = part->group;
	int ret;

	if (is_rank0s(group, part->plan.attempt))
		return base_refuse_with(error, -EEXIST,
					"give each node a tier of its own, or all the same one",
					"it sees the tier of rank 0, as others do not");
	ret = make_room(part, error);
	return ret ? ret :
		     group_attempt_join(attempt, group->near, part->step, part->plan.attempt,
					group->job, save_log(group->context), error);
}

int group_answer_for_room(struct group_part *part, struct group_attempt *attempt,
			  struct base_error *error)
{
	struct group_answer answer = { 0 };

	if (!group_leads_node(part->group, part->group->options.rank))
		return 0;
	join(part, attempt, &answer.failure);
	return group_tell(&part->round, &group_room, &answer, error);
}

/* ---- In place -------------------------------------------------------------------------------- */

/* This node's files: its ranks wrote them. To be freed; NULL without memory. */
static bool *find_files_here(const struct ioshape_group *group,
			     const struct format_manifest *manifest)
{
	bool *here = calloc(manifest->file_count, sizeof(*here));

	for (uint32_t rank = 0; here && rank < group->options.ranks; rank++) {
		if (group_is_local(group, rank))
			here[manifest->parts[rank].file] = true;
	}
	return here;
}

/* One node's part of it. */
static int commit_here(struct group_part *part, struct group_attempt *attempt,
		       const struct format_manifest *manifest, const struct base_buffer *plan,
		       struct base_error *error)
{
	const struct ioshape_group *group = part->group;
	const struct group_tier *tier = group_tier_of(&group->options);
	bool *here = find_files_here(group, manifest);
	int ret;

	if (!here)
		return base_no_memory(error, "files of a node", manifest->file_count);
	attempt->files_here = here;
	ret = tier->ops->protect(&part->round, manifest, plan, &attempt->folder, part->unprotected,
				 error);
	if (!ret)
		ret = group_attempt_commit(attempt, manifest, false, error);
	attempt->files_here = NULL;
	free(here);
	return ret ? ret : group_keep(part, error);
}

int group_commit_spread(struct group_part *part, struct group_attempt *attempt,
			struct format_manifest *manifest, struct base_error *error)
{
	const struct group_tier *tier = group_tier_of(&part->group->options);
	struct group_answers answers = { .remark = part->unprotected };
	struct group_commit commit = { 0 };
	struct base_error own = { 0 };
	int ret = tier->ops->plan(part->group, manifest, &commit.plan, error);

	manifest->serial = group_next_serial(attempt);
	if (!ret && format_manifest_encode(&commit.manifest, manifest))
		ret = base_no_memory(error, "a manifest", manifest->rank_count);
	if (!ret)
		ret = group_tell(&part->round, &group_commit, &commit, error);
	if (!ret) {
		commit_here(part, attempt, manifest, &commit.plan, &own);
		ret = group_collect_answers(&part->round, &group_kept,
					    "did not put its files in place", &answers, error);
	}
	if (!ret && own.code)
		ret = group_fail_of_rank(part->group, 0, &own, error);
	if (!ret && answers.failure.code)
		ret = base_pass_on(error, &answers.failure);
	if (!ret)
		part->group->last_serial = MAX(part->group->last_serial, manifest->serial);
	base_buffer_free(&commit.manifest);
	base_buffer_free(&commit.plan);
	return ret;
}

/* ---- The other nodes ------------------------------------------------------------------------- */

static int read_manifest(const struct ioshape_group *group, const struct base_buffer *text,
			 struct format_manifest *manifest, struct base_error *error)
{
	const int ret = format_manifest_decode(manifest, (const char *)text->data, text->bytes,
					       "the manifest of rank 0", error);

	if (ret || manifest->rank_count == group->options.ranks)
		return ret;
	return base_refuse_with(
		error, IOSHAPE_E_DAMAGED, "save again",
		"the manifest of rank 0 is damaged: it has %u ranks, and the group has "
		"%u",
		manifest->rank_count, group->options.ranks);
}

/* -ECANCELED, without a sentence: there is a verdict already, and it cannot be a good one. */
static int await_commit(struct group_part *part, struct group_commit *commit,
			struct base_error *error)
{
	struct group_watched watched = { 0 };
	struct group_verdict verdict;
	int ret;

	for (;;) {
		ret = group_look(&part->round, &group_commit, 0, &watched, commit, error);
		if (ret != -EAGAIN)
			return ret;
		ret = group_look(&part->round, &group_verdict, 0, &watched, &verdict, error);
		if (ret != -EAGAIN)
			return ret ? ret : -ECANCELED;
		ret = group_round_go_on(&part->round, IOSHAPE_PHASE_SYNC, part->round.group_done,
					part->round.group_total, error);
		if (ret)
			return ret;
		group_round_rest(&part->round);
	}
}

void group_follow_commit(struct group_part *part, struct group_attempt *attempt,
			 struct base_error *error)
{
	struct group_answer answer = { 0 };
	struct base_error unsaid = { 0 };
	struct format_manifest manifest = { 0 };
	struct group_commit commit = { 0 };
	int ret = await_commit(part, &commit, &answer.failure);

	if (!ret) {
		ret = read_manifest(part->group, &commit.manifest, &manifest, &answer.failure);
		if (!ret)
			ret = commit_here(part, attempt, &manifest, &commit.plan, &answer.failure);
		memcpy(answer.remark, part->unprotected, sizeof(answer.remark));
		group_tell(&part->round, &group_kept, &answer, &unsaid);
	}
	if (ret && answer.failure.code && !error->code)
		base_pass_on(error, &answer.failure);
	format_manifest_free(&manifest);
	base_buffer_free(&commit.manifest);
	base_buffer_free(&commit.plan);
}
