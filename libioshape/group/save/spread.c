/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation that each node saves on its own tier. Before it is written, every node makes room
 * and a directory for its files, or all save directly. When all is written, every node gets the
 * manifest; the nodes make each other's parities; then each puts its directory in place and keeps
 * it for the drain. Only after that it has been saved.
 */
#define _GNU_SOURCE
#include "group/group.h"
#include "group/parity/parity.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* By enum ioshape_parity. */
static const struct {
	uint32_t parity, nodes;
} kinds[] = { { 0, 1 }, { 1, 2 }, { 1, 4 }, { 1, 8 }, { 2, 4 }, { 2, 6 }, { 2, 8 } };

uint64_t group_parity_bytes(const struct ioshape_group *group, uint64_t bytes)
{
	const uint32_t nodes = MIN(kinds[group->options.parity].nodes, group->node_count);
	const uint32_t parity = MIN(kinds[group->options.parity].parity, nodes - 1);

	return (bytes * parity + nodes - parity - 1) / (nodes - parity);
}

/* ---- Room ------------------------------------------------------------------------------------ */

int group_ask_for_room(struct group_part *part, struct base_error *error)
{
	struct group_answers answers = { 0 };
	int ret = group_collect_answers(&part->round, "room", "did not say whether it has room",
					&answers, error);

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
	struct ring_folder directory = RING_NO_FOLDER;
	struct ring_entry entry;
	const bool there = !ring_folder_open(&directory, group->near, NULL) &&
			   !ring_folder_look(&directory, attempt, &entry, NULL);

	ring_folder_close(&directory);
	return there;
}

static int make_room(struct group_part *part, struct group_attempt *attempt,
		     struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct group_tier *tier = group_tier_of(&group->options);
	int ret;

	if (is_rank0s(group, part->plan.attempt))
		return base_refuse(error, -EEXIST,
				   "it sees the tier of rank 0, as others do not" BASE_REMEDY
				   "give each node a tier of its own, or all the same one");
	ret = tier->ops->make_room(tier, part->task->path, group_bytes_here(part), error);
	return ret ? ret :
		     group_attempt_join(attempt, group->near, part->step, part->plan.attempt,
					group->job, save_log(group->context), error);
}

int group_answer_for_room(struct group_part *part, struct group_attempt *attempt,
			  struct base_error *error)
{
	struct base_error failure = { 0 };
	int ret = 0;

	if (group_leads_node(part->group, part->group->options.rank)) {
		make_room(part, attempt, &failure);
		ret = group_answer(&part->round, "room", &failure, "", error);
	}
	if (!ret)
		ret = group_await_plan(part, "agreed", error);
	if (ret || !part->plan.near)
		group_attempt_abandon(attempt);
	return ret;
}

/* ---- Who protects whom ----------------------------------------------------------------------- */

static int make_sets(const struct ioshape_group *group, struct group_sets *sets,
		     struct base_error *error)
{
	const char **domains = calloc(group->node_count, sizeof(*domains));
	int ret = -ENOMEM;

	for (uint32_t node = 0; domains && node < group->node_count; node++)
		domains[node] = group->ranks[group->leaders[node]].domain;
	if (domains)
		ret = group_sets_make(sets, group->node_count, kinds[group->options.parity].parity,
				      kinds[group->options.parity].nodes, domains);
	free(domains);
	return ret ? base_no_memory(error, "sets of nodes", group->node_count) : 0;
}

static int list_files(const struct ioshape_group *group, const struct zip_manifest *manifest,
		      struct group_record *record, struct base_error *error)
{
	record->file_count = manifest->file_count;
	record->node_of_file = calloc(manifest->file_count, sizeof(*record->node_of_file));
	if (!record->node_of_file)
		return base_no_memory(error, "files of nodes", manifest->file_count);
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		record->node_of_file[manifest->parts[rank].file] = group->ranks[rank].node;
	return 0;
}

/* ---- What protects it ------------------------------------------------------------------------ */

/* All nodes at once: each makes the parities that it keeps for the others. */
static int make_parities(struct group_part *part, const struct zip_manifest *manifest,
			 const struct group_record *record, const char *folder,
			 struct base_error *error)
{
	struct ioshape_group *group = part->group;
	const uint32_t nodes = group->node_count;
	struct group_making *makings = calloc(nodes, sizeof(*makings));
	uint32_t *numbers = calloc(2 * (size_t)nodes, sizeof(*numbers));
	struct group_exchange exchange = {
		.round = &part->round,
		.manifest = manifest,
		.record = record,
		.holders = numbers, /* each has its own */
		.parities = numbers + nodes,
		.makings = makings,
		.count = nodes,
		.fresh = true,
		.folder = folder,
	};
	int ret = 0;

	if (!makings || !numbers)
		ret = base_no_memory(error, "what nodes send each other", nodes);
	for (uint32_t node = 0; !ret && node < nodes; node++) {
		numbers[node] = node;
		makings[node] = (struct group_making){ node, node, 0 };
	}
	if (!ret)
		ret = group_exchange_run(&exchange, group->context, error);
	group->comm_failed |= exchange.broken;
	free(numbers);
	free(makings);
	return ret;
}

/* So that it is known for what it is: the files of one node. */
static int put_bare_record(const struct group_attempt *attempt, const struct group_record *record,
			   struct base_error *error)
{
	char name[GROUP_PARITY_NAME_BYTES];
	struct base_buffer text = { 0 };
	int ret = group_record_encode(&text, record);

	group_parity_name(name, record->node);
	if (ret)
		base_no_memory(error, "who protects whom", text.bytes);
	else
		ret = ring_folder_put(&attempt->folder, name, text.data, text.bytes, error);
	base_buffer_free(&text);
	return ret;
}

/* Without parities it is a good generation all the same. */
static int protect(struct group_part *part, const struct group_attempt *attempt,
		   const struct zip_manifest *manifest, const struct group_record *record,
		   struct base_error *error)
{
	struct ioshape_group *group = part->group;
	struct base_error why = { 0 };

	if (!record->sets.parity)
		return put_bare_record(attempt, record, error);
	if (!group->options.comm || group->comm_failed)
		base_refuse(&why, -ENOTCONN, "%s",
			    group->options.comm ?
				    "bytes do not travel between nodes any more" :
				    "there is no way for bytes between nodes (give the group a "
				    "comm)");
	else if (!make_parities(part, manifest, record, attempt->folder.path, &why))
		return 0;
	snprintf(part->unprotected, sizeof(part->unprotected), "%s", why.sentence);
	return put_bare_record(attempt, record, error);
}

/* ---- In place -------------------------------------------------------------------------------- */

/* One node's part of it. `record` is for all nodes. */
static int commit_here(struct group_part *part, struct group_attempt *attempt,
		       const struct zip_manifest *manifest, const struct group_record *record,
		       struct base_error *error)
{
	const struct ioshape_group *group = part->group;
	struct group_record own = *record;
	bool *here = calloc(manifest->file_count, sizeof(*here));
	int ret;

	if (!here)
		return base_no_memory(error, "files of a node", manifest->file_count);
	own.node = group->ranks[group->options.rank].node;
	for (uint32_t file = 0; file < manifest->file_count; file++)
		here[file] = record->node_of_file[file] == own.node;
	attempt->files_here = here;
	ret = protect(part, attempt, manifest, &own, error);
	if (!ret)
		ret = group_attempt_commit(attempt, manifest, false, error);
	attempt->files_here = NULL;
	free(here);
	return ret ? ret : group_keep(part, error);
}

static int say_commit(struct group_part *part, const struct zip_manifest *manifest,
		      const struct group_record *record, struct base_error *error)
{
	struct base_buffer text = { 0 }, sets = { 0 };
	struct group_note note = { 0 };
	int ret = zip_manifest_encode(&text, manifest);

	if (!ret)
		ret = group_record_encode(&sets, record);
	if (ret) {
		base_fail(error, ret, "cannot tell the other nodes what was written");
	} else {
		group_note_bytes(&note, text.data, text.bytes);
		group_note_bytes(&note, sets.data, sets.bytes);
		ret = group_round_post(&part->round, "commit", &note, error);
	}
	base_buffer_free(&sets);
	base_buffer_free(&text);
	return ret;
}

int group_commit_spread(struct group_part *part, struct group_attempt *attempt,
			struct zip_manifest *manifest, struct base_error *error)
{
	struct group_record record = { 0 };
	struct group_answers answers = { .remark = part->unprotected };
	struct base_error own = { 0 };
	int ret = make_sets(part->group, &record.sets, error);

	if (!ret)
		ret = list_files(part->group, manifest, &record, error);
	manifest->serial = group_next_serial(attempt);
	if (!ret)
		ret = say_commit(part, manifest, &record, error);
	if (!ret) {
		commit_here(part, attempt, manifest, &record, &own);
		ret = group_collect_answers(&part->round, "kept", "did not put its files in place",
					    &answers, error);
	}
	if (!ret && own.code)
		ret = group_fail_of_rank(part->group, 0, &own, error);
	if (!ret && answers.failure.code)
		ret = base_pass_on(error, &answers.failure);
	if (!ret)
		part->group->last_serial = MAX(part->group->last_serial, manifest->serial);
	group_record_free(&record);
	return ret;
}

/* ---- The other nodes ------------------------------------------------------------------------- */

static int read_commit(const struct ioshape_group *group, const struct base_buffer *note,
		       struct zip_manifest *manifest, struct group_record *record,
		       struct base_error *error)
{
	struct group_note_reader reader = group_read_note(note);
	size_t text_bytes, sets_bytes;
	const uint8_t *text = group_read_bytes(&reader, &text_bytes),
		      *sets = group_read_bytes(&reader, &sets_bytes);
	int ret;

	if (reader.bad)
		return base_refuse(error, -EPROTO, "cannot read what rank 0 puts in place");
	ret = zip_manifest_decode(manifest, (const char *)text, text_bytes,
				  "the manifest of rank 0", error);
	if (!ret)
		ret = group_record_decode(record, sets, sets_bytes, "what rank 0 says", error);
	return ret ? ret :
		     group_record_check(record, manifest, group->node_count, "what rank 0 says",
					error);
}

/* -ECANCELED, without a sentence: there is a verdict already, and it cannot be a good one. */
static int await_commit(struct group_part *part, struct base_buffer *note, struct base_error *error)
{
	struct group_watched watched = { 0 };
	int ret;

	for (;;) {
		ret = group_round_look(&part->round, "commit", 0, &watched, note, error);
		if (ret != -EAGAIN)
			return ret;
		ret = group_round_look(&part->round, "verdict", 0, &watched, note, error);
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
	struct base_error failure = { 0 }, unsaid = { 0 };
	struct zip_manifest manifest = { 0 };
	struct group_record record = { 0 };
	struct base_buffer note = { 0 };
	int ret = await_commit(part, &note, &failure);

	if (!ret) {
		ret = read_commit(part->group, &note, &manifest, &record, &failure);
		if (!ret)
			ret = commit_here(part, attempt, &manifest, &record, &failure);
		group_answer(&part->round, "kept", &failure, part->unprotected, &unsaid);
	}
	if (ret && failure.code && !error->code)
		base_pass_on(error, &failure);
	group_record_free(&record);
	zip_manifest_free(&manifest);
	base_buffer_free(&note);
}
