/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes get what their ranks want of a generation on tiers: from the node that has it, where ranks
 * have moved, or made from what the others keep, where it is lost.
 */
#define _GNU_SOURCE
#include "group/parity/restore.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void group_restoring_free(struct group_restoring *restoring)
{
	free(restoring->holders);
	free(restoring->makings);
	free(restoring->folder);
}

static int make_lists(struct group_restoring *restoring, uint32_t nodes, uint64_t makings,
		      struct base_error *error)
{
	restoring->nodes = nodes;
	restoring->holders = calloc(2 * (size_t)nodes, sizeof(*restoring->holders));
	restoring->makings = calloc(MAX(makings, 1), sizeof(*restoring->makings));
	if (!restoring->holders || !restoring->makings)
		return base_no_memory(error, "what is to be restored", nodes + makings);
	restoring->parities = restoring->holders + nodes;
	return 0;
}

/* ---- Rank 0: who gets what ------------------------------------------------------------------- */

/* Of several that have the same, the one with most parities. */
static void find_holders(const struct group_spread *spread, uint32_t *holders, uint32_t *parities)
{
	for (uint32_t node = 0; node < spread->record.sets.nodes; node++)
		holders[node] = GROUP_NOWHERE;
	for (uint32_t i = 0; i < spread->holding_count; i++) {
		const struct group_holding *holding = &spread->holdings[i];

		if (holders[holding->node] != GROUP_NOWHERE &&
		    parities[holding->node] >= holding->parities)
			continue;
		holders[holding->node] = holding->holder;
		parities[holding->node] = holding->parities;
	}
}

bool group_is_restorable(const struct group_spread *spread, struct base_error *error)
{
	const uint32_t nodes = spread->record.sets.nodes;
	uint32_t *holders = calloc(2 * (size_t)nodes, sizeof(*holders));
	bool well;

	if (!holders) {
		base_no_memory(error, "what nodes have", nodes);
		return false;
	}
	find_holders(spread, holders, holders + nodes);
	well = group_can_restore(&spread->record.sets, holders, holders + nodes);
	free(holders);
	if (!well)
		base_refuse(error, IOSHAPE_E_DAMAGED,
			    "generation %llu lies on the tiers of %u nodes, and too many of them "
			    "are lost" BASE_REMEDY
			    "start the job on nodes that still have it, or load another one",
			    (unsigned long long)spread->step, nodes);
	return well;
}

static bool has(const struct group_spread *spread, uint32_t holder, uint32_t node)
{
	for (uint32_t i = 0; i < spread->holding_count; i++) {
		if (spread->holdings[i].holder == holder && spread->holdings[i].node == node)
			return true;
	}
	return false;
}

static bool is_listed(const struct group_restoring *restoring, uint32_t target, uint32_t node)
{
	for (uint32_t i = restoring->count; i--;) {
		if (restoring->makings[i].target == target && restoring->makings[i].node == node)
			return true;
	}
	return false;
}

static uint32_t turns_of(const struct group_restoring *restoring, uint32_t target)
{
	uint32_t turns = 0;

	for (uint32_t i = 0; i < restoring->count; i++)
		turns += restoring->makings[i].target == target;
	return turns;
}

/* What the ranks of each node want and the node has not. */
static int decide(const struct ioshape_group *group, const struct group_spread *spread,
		  struct group_restoring *restoring, struct base_error *error)
{
	int ret = make_lists(restoring, spread->record.sets.nodes, group->options.ranks, error);

	if (ret)
		return ret;
	restoring->step = spread->step;
	memcpy(restoring->attempt, spread->attempt, sizeof(restoring->attempt));
	find_holders(spread, restoring->holders, restoring->parities);
	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		const uint32_t target = group->ranks[rank].node, node = spread->node_of_rank[rank];

		if (has(spread, target, node) || is_listed(restoring, target, node))
			continue;
		restoring->makings[restoring->count] =
			(struct group_making){ target, node, turns_of(restoring, target) };
		restoring->count++;
	}
	return 0;
}

static int say(struct group_round *round, const struct group_restoring *restoring,
	       struct base_error *error)
{
	struct group_note note = { 0 };

	group_note_number(&note, restoring->step);
	group_note_text(&note, restoring->attempt);
	group_note_number(&note, restoring->nodes);
	group_note_number(&note, restoring->count);
	for (uint32_t node = 0; node < restoring->nodes; node++) {
		group_note_number(&note, restoring->holders[node]);
		group_note_number(&note, restoring->parities[node]);
	}
	for (uint32_t i = 0; i < restoring->count; i++) {
		group_note_number(&note, restoring->makings[i].target);
		group_note_number(&note, restoring->makings[i].node);
		group_note_number(&note, restoring->makings[i].turn);
	}
	return group_round_post(round, "restore", &note, error);
}

/* ---- The others ------------------------------------------------------------------------------ */

static bool read_lists(const struct ioshape_group *group, struct group_restoring *restoring,
		       struct group_note_reader *reader, uint64_t count)
{
	for (uint32_t node = 0; node < restoring->nodes; node++) {
		const uint64_t holder = group_read_number(reader),
			       parities = group_read_number(reader);

		reader->bad |= (holder >= group->node_count && holder != GROUP_NOWHERE) ||
			       parities > BASE_MOST_PARITY;
		restoring->holders[node] = (uint32_t)holder;
		restoring->parities[node] = (uint32_t)parities;
	}
	for (uint64_t i = 0; i < count; i++) {
		const uint64_t target = group_read_number(reader), node = group_read_number(reader),
			       turn = group_read_number(reader);

		reader->bad |= target >= group->node_count || node >= restoring->nodes ||
			       turn >= count;
		restoring->makings[i] =
			(struct group_making){ (uint32_t)target, (uint32_t)node, (uint32_t)turn };
	}
	restoring->count = (uint32_t)count;
	return !reader->bad;
}

int group_read_restoring(const struct ioshape_group *group, const struct base_buffer *note,
			 struct group_restoring *restoring, struct base_error *error)
{
	struct group_note_reader reader = group_read_note(note);
	const uint32_t ranks = group->options.ranks;
	uint64_t nodes, count;
	int ret = 0;

	restoring->step = group_read_number(&reader);
	group_read_text(&reader, restoring->attempt, sizeof(restoring->attempt));
	nodes = group_read_number(&reader);
	count = group_read_number(&reader);
	/* A node had a rank at least, and each rank wants the files of one node. */
	if (reader.bad || !nodes || nodes > ranks || count > ranks)
		ret = -EPROTO;
	if (!ret)
		ret = make_lists(restoring, (uint32_t)nodes, count, error);
	if (!ret && !read_lists(group, restoring, &reader, count))
		ret = -EPROTO;
	if (ret == -EPROTO)
		base_refuse(error, ret, "cannot read what rank 0 says of generation %llu",
			    (unsigned long long)restoring->step);
	return ret;
}

static int hear(struct group_round *round, struct group_restoring *restoring,
		struct base_error *error)
{
	struct base_buffer note = { 0 };
	int ret = group_round_await(round, "restore", 0, &note, NULL, NULL, error);

	if (!ret)
		ret = group_read_restoring(round->group, &note, restoring, error);
	base_buffer_free(&note);
	return ret;
}

/* ---- The manifest ---------------------------------------------------------------------------- */

/* The first whose files are still there: whoever holds them gives the manifest. */
static uint32_t first_held(const struct group_restoring *restoring)
{
	uint32_t node = 0;

	while (node + 1 < restoring->nodes && restoring->holders[node] == GROUP_NOWHERE)
		node++;
	return node;
}

static int make_whole_record(const struct base_buffer *manifest, const char *path,
			     struct base_buffer *text, struct base_error *error)
{
	struct zip_manifest decoded = { 0 };
	struct group_record record;
	int ret = zip_manifest_decode(&decoded, (const char *)manifest->data, manifest->bytes, path,
				      error);

	if (ret)
		return ret;
	ret = group_record_whole(&record, decoded.file_count);
	if (!ret)
		ret = group_record_encode(text, &record);
	if (!ret)
		group_record_free(&record);
	else
		base_no_memory(error, "files of a node", decoded.file_count);
	zip_manifest_free(&decoded);
	return ret;
}

/* With the record of that node. */
static int read_own(const struct group_restoring *restoring, struct group_note *note,
		    struct base_error *error)
{
	struct base_buffer manifest = { 0 }, record = { 0 };
	struct ring_folder folder = RING_NO_FOLDER;
	struct ring_hold hold = RING_NO_HOLD;
	char name[GROUP_PARITY_NAME_BYTES];
	int ret = ring_folder_open(&folder, restoring->folder, error);

	group_parity_name(name, first_held(restoring));
	if (!ret)
		ret = ring_folder_get(&folder, ZIP_MANIFEST_NAME, ZIP_MAX_MANIFEST_BYTES, &manifest,
				      &hold, error);
	if (!ret && !group_is_of_nodes(&folder))
		ret = make_whole_record(&manifest, folder.path, &record, error);
	else if (!ret && group_read_record(&folder, name, &record, NULL))
		ret = base_refuse(error, -EINVAL, "cannot read \"%s/%s\"", folder.path, name);
	if (!ret) {
		group_note_bytes(note, manifest.data, manifest.bytes);
		group_note_bytes(note, record.data, record.bytes);
	}
	ring_folder_let_go(&hold);
	ring_folder_close(&folder);
	base_buffer_free(&record);
	base_buffer_free(&manifest);
	return ret;
}

/* Compares another node's message with that of rank 0 before any of it is used. */
static int check_known(const struct ioshape_group *group, const struct group_restoring *restoring,
		       const struct group_known *known, struct base_error *error)
{
	const struct zip_manifest *manifest = &known->manifest;

	if (manifest->step != restoring->step || manifest->rank_count != group->options.ranks ||
	    strcmp(manifest->attempt, restoring->attempt) != 0)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "cannot restore \"%s\": the node that has it gave the manifest "
				   "of another generation" BASE_REMEDY "load another generation",
				   restoring->folder);
	return group_record_check(&known->record, manifest, restoring->nodes, restoring->folder,
				  error);
}

int group_read_known(const struct ioshape_group *group, const struct group_restoring *restoring,
		     struct group_known *known, struct base_error *error)
{
	const char *path = restoring->folder;
	struct group_note_reader reader = group_read_note(&known->note);
	const uint8_t *record;
	size_t bytes;
	int ret = group_read_error(&reader, error);

	known->text = group_read_bytes(&reader, &known->text_bytes);
	record = group_read_bytes(&reader, &bytes);
	if (!ret && reader.bad)
		ret = base_refuse(error, -EPROTO, "cannot read the manifest that another node has");
	if (!ret)
		ret = zip_manifest_decode(&known->manifest, (const char *)known->text,
					  known->text_bytes, path, error);
	if (!ret)
		ret = group_record_decode(&known->record, record, bytes, path, error);
	return ret ? ret : check_known(group, restoring, known, error);
}

void group_known_free(struct group_known *known)
{
	group_record_free(&known->record);
	zip_manifest_free(&known->manifest);
	base_buffer_free(&known->note);
}

static int get_known(struct group_round *round, const struct group_restoring *restoring,
		     struct group_known *known, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	const uint32_t holder = restoring->holders[first_held(restoring)];
	struct group_note note = { 0 }, own = { 0 };
	struct base_error failure = { 0 };
	int ret;

	if (holder == GROUP_NOWHERE)
		return base_refuse(error, -EPROTO, "cannot read what rank 0 says");
	if (group->options.rank != group->leaders[holder]) {
		ret = group_round_await(round, "manifest", group->leaders[holder], &known->note,
					NULL, NULL, error);
		return ret ? ret : group_read_known(group, restoring, known, error);
	}
	read_own(restoring, &own, &failure);
	group_note_error(&note, &failure);
	note.failed |= own.failed ||
		       base_buffer_append(&note.bytes, own.bytes.data, own.bytes.bytes);
	base_buffer_free(&own.bytes);
	if (note.failed || base_buffer_append(&known->note, note.bytes.data, note.bytes.bytes))
		base_no_memory(error, "a manifest", note.bytes.bytes);
	ret = group_round_post(round, "manifest", &note, error);
	return ret ? ret : group_read_known(group, restoring, known, error);
}

/* ---- Here ------------------------------------------------------------------------------------ */

static bool gets_something(const struct ioshape_group *group,
			   const struct group_restoring *restoring)
{
	return turns_of(restoring, group->ranks[group->options.rank].node) > 0;
}

/* Another generation of that step makes room; files of the same one stay. */
static int prepare(struct ioshape_group *group, const struct group_restoring *restoring,
		   const struct group_known *known, struct base_error *error)
{
	struct group_tier *tier = group_tier_of(&group->options);
	struct ring_folder directory = RING_NO_FOLDER;
	struct group_generation there;
	char name[GROUP_STEP_NAME_BYTES], *path;
	bool same = false;
	int ret = 0;

	group_step_name(name, restoring->step);
	if (!ring_folder_open(&directory, group->near, NULL) &&
	    !group_generation_open(&there, &directory, name, restoring->step, NULL)) {
		same = !strcmp(there.manifest.attempt, known->manifest.attempt);
		group_generation_close(&there);
	}
	ring_folder_close(&directory);
	if (asprintf(&path, "%s/%s", group->directory, name) < 0)
		return base_no_memory(error, "a path", strlen(group->directory));
	if (!same)
		ret = tier->ops->make_room(tier, path, 0, error);
	free(path);
	return ret ? ret : ring_folder_make(restoring->folder, error);
}

/* The manifest comes last. */
static int complete(const struct group_restoring *restoring, const struct group_known *known,
		    struct base_error *error)
{
	struct ring_folder folder = RING_NO_FOLDER;
	struct ring_entry entry;
	int ret = ring_folder_open(&folder, restoring->folder, error);

	if (!ret && ring_folder_look(&folder, ZIP_MANIFEST_NAME, &entry, NULL))
		ret = ring_folder_put(&folder, ZIP_MANIFEST_NAME, known->text, known->text_bytes,
				      error);
	if (!ret)
		ret = ring_folder_sync(&folder, error);
	ring_folder_close(&folder);
	return ret;
}

/* What is here will be drained: also in the place of whoever has lost it, or has died before it
 * was kept. */
static int keep(struct ioshape_group *group, const struct group_restoring *restoring, bool restored,
		struct base_error *error)
{
	const struct ioshape_group_options *options = &group->options;
	struct group_tier *tier = group_tier_of(options);
	char name[GROUP_STEP_NAME_BYTES], *path;
	int ret;

	group_step_name(name, restoring->step);
	if (asprintf(&path, "%s/%s", group->directory, name) < 0)
		return base_no_memory(error, "a path", strlen(group->directory));
	ret = (restored ? tier->ops->keep : tier->ops->keep_once)(tier, path, options->keep_last,
								  options->keep_every, error);
	free(path);
	return ret;
}

static int exchange(struct group_round *round, const struct group_restoring *restoring,
		    const struct group_known *known, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct group_exchange exchange = {
		.round = round,
		.manifest = &known->manifest,
		.record = &known->record,
		.holders = restoring->holders,
		.parities = restoring->parities,
		.makings = restoring->makings,
		.count = restoring->count,
		.folder = restoring->folder,
	};
	int ret;

	if (!group->options.comm || group->comm_failed)
		return base_refuse(error, -ENOTCONN,
				   "a node lacks files of generation %llu, and there is no way for "
				   "bytes between nodes",
				   (unsigned long long)restoring->step);
	ret = group_exchange_run(&exchange, group->context, error);
	group->comm_failed |= exchange.broken;
	return ret;
}

/* The first rank of a node. */
static int restore_here(struct group_round *round, struct group_restoring *restoring,
			struct base_error *error)
{
	struct ioshape_group *group = round->group;
	const bool gets = gets_something(group, restoring);
	struct group_known known = { 0 };
	char name[GROUP_STEP_NAME_BYTES];
	int ret = 0;

	if (!restoring->count)
		return keep(group, restoring, false, error);
	group_step_name(name, restoring->step);
	if (asprintf(&restoring->folder, "%s/%s", group->near, name) < 0) {
		restoring->folder = NULL;
		return base_no_memory(error, "a path", strlen(group->near));
	}
	ret = get_known(round, restoring, &known, error);
	if (!ret && gets)
		ret = prepare(group, restoring, &known, error);
	if (!ret)
		ret = exchange(round, restoring, &known, error);
	if (!ret && gets)
		ret = complete(restoring, &known, error);
	if (!ret)
		ret = keep(group, restoring, gets, error);
	group_known_free(&known);
	return ret;
}

/* ---- All ranks ------------------------------------------------------------------------------- */

static int follow(struct group_round *round, struct base_error *error)
{
	struct group_restoring restoring = { 0 };
	struct base_error own = { 0 };
	int ret;

	if (!group_leads_node(round->group, round->group->options.rank))
		return 0;
	ret = hear(round, &restoring, error);
	if (!ret) {
		restore_here(round, &restoring, &own);
		ret = group_answer(round, "restored", &own, "", error);
	}
	group_restoring_free(&restoring);
	return ret;
}

int group_restore(struct group_round *round, const struct group_spread *spread,
		  struct base_error *failure, struct base_error *error)
{
	struct group_restoring restoring = { 0 };
	struct group_answers answers = { 0 };
	int ret;

	if (round->group->options.rank)
		return follow(round, error);
	ret = decide(round->group, spread, &restoring, error);
	if (!ret)
		ret = say(round, &restoring, error);
	if (!ret) {
		restore_here(round, &restoring, failure);
		ret = group_collect_answers(
			round, "restored", "did not say whether it has its files", &answers, error);
		if (answers.failure.code && !failure->code)
			*failure = answers.failure;
	}
	group_restoring_free(&restoring);
	return ret;
}
