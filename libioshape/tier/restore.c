/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes get what their ranks want of a generation on tiers: from the node that has it, where ranks
 * have moved, or made from what the others keep, where it is lost.
 */
#define _GNU_SOURCE
#include "tier/parity.h"
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Who has the files of which node. */
struct holding {
	uint32_t holder; /* node of today */
	uint32_t node;   /* of the generation */
	uint32_t parities;
};

/* A generation that lies there. */
struct spread {
	uint64_t step, serial;
	char attempt[ZIP_ATTEMPT_BYTES];
	struct parity_record record;
	uint32_t *node_of_rank; /* of the generation; owned */
	struct holding *holdings;
	uint32_t holding_count;
};

struct group_spreads { /* newest first */
	struct spread *all;
	size_t count;
};

/* Rank 0's decision. */
struct restoring {
	uint64_t step;
	char attempt[ZIP_ATTEMPT_BYTES];
	uint32_t nodes;               /* of the generation */
	uint32_t *holders, *parities; /* by node; owned, in one piece of memory */
	uint32_t count;
	struct parity_making *makings; /* owned */
	char *folder;                  /* owned */
};

/* A message about the generation, from the node that has the manifest. */
struct known {
	struct base_buffer note;
	const uint8_t *text; /* of the manifest, in the note */
	size_t text_bytes;
	struct zip_manifest manifest;
	struct parity_record record;
};

/* Older ones are at their destination, or soon will be. */
#define MOST_OFFERED 3u

/* ---- What this node has ---------------------------------------------------------------------- */

/* One generation here. */
struct offer {
	const struct ioshape_group *group;
	const struct group_generation *generation;
	struct group_note *note;
	uint32_t count; /* of nodes whose files are here */
	/* The record that the others have to agree with; owned. sets.nodes is 0 before there is
	 * one. */
	struct parity_record described;
};

static bool has_all_files(const struct offer *offer, const struct parity_record *record)
{
	const struct zip_manifest *manifest = &offer->generation->manifest;
	struct ring_entry entry;

	if (record->file_count != manifest->file_count)
		return false;
	for (uint32_t file = 0; file < manifest->file_count; file++) {
		if (record->node_of_file[file] != record->node)
			continue;
		if (ring_folder_look(&offer->generation->folder, manifest->files[file].name, &entry,
				     NULL) ||
		    entry.bytes != manifest->files[file].bytes)
			return false;
	}
	return true;
}

/* The parities that are there in their length. */
static uint32_t parities_here(const struct offer *offer, const struct parity_record *record,
			      uint64_t record_bytes, uint64_t file_bytes)
{
	const struct parity_set set = parity_set_of(&record->sets, record->node);
	const uint64_t segment = parity_segment_bytes(&offer->generation->manifest, record, &set);

	return record_bytes + record->parities * segment <= file_bytes ? record->parities : 0;
}

/* Writes once what is equal for all nodes. Takes the record. */
static void describe(struct offer *offer, struct parity_record *record,
		     const struct base_buffer *text)
{
	const struct zip_manifest *manifest = &offer->generation->manifest;

	group_note_number(offer->note, manifest->step);
	group_note_number(offer->note, manifest->serial);
	group_note_text(offer->note, manifest->attempt);
	group_note_bytes(offer->note, text->data, text->bytes);
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		group_note_number(offer->note, record->node_of_file[manifest->parts[rank].file]);
	offer->described = *record;
	*record = (struct parity_record){ 0 };
}

/* Two parity files of one generation with different sets cannot both be right. */
static bool agrees(const struct offer *offer, const struct parity_record *record, const char *name)
{
	if (!offer->described.sets.nodes || parity_records_agree(&offer->described, record))
		return true;
	base_log(save_log(offer->group->context), IOSHAPE_LOG_WARNING,
		 "cannot use \"%s/%s\": another file of parities there names other sets of nodes",
		 offer->generation->folder.path, name);
	return false;
}

static int read_record(const struct ring_folder *folder, const char *name, struct base_buffer *text,
		       uint64_t *file_bytes)
{
	uint8_t begin[PARITY_RECORD_UNIT];
	struct ring_entry entry;
	uint64_t bytes;
	ssize_t got = ring_folder_peek(folder, name, begin, sizeof(begin));

	bytes = got < (ssize_t)sizeof(begin) ? 0 : parity_record_bytes(begin, sizeof(begin));
	if (!bytes || ring_folder_look(folder, name, &entry, NULL) ||
	    base_buffer_reserve(text, bytes))
		return -EINVAL;
	if (file_bytes)
		*file_bytes = entry.bytes;
	got = ring_folder_peek(folder, name, text->data, bytes);
	text->bytes = bytes;
	return got == (ssize_t)bytes ? 0 : -EINVAL;
}

/* The files of one node, if they are all there. */
static int see_node(void *user, const char *name, struct base_error *error)
{
	struct offer *offer = user;
	struct base_buffer text = { 0 };
	struct parity_record record = { 0 };
	uint64_t file_bytes;
	uint32_t node, parities;

	(void)error;
	if (!group_parse_parity_name(name, &node) ||
	    read_record(&offer->generation->folder, name, &text, &file_bytes) ||
	    parity_record_decode(&record, text.data, text.bytes, name, NULL))
		goto out;
	if (record.node == node && has_all_files(offer, &record) && agrees(offer, &record, name)) {
		parities = parities_here(offer, &record, text.bytes, file_bytes);
		if (!offer->described.sets.nodes)
			describe(offer, &record, &text);
		group_note_number(offer->note, node);
		group_note_number(offer->note, parities);
		offer->count++;
	}
out:
	parity_record_free(&record);
	base_buffer_free(&text);
	return 0;
}

/* All of it is here: saved by the ranks of one node, or of several on one tier. */
static void offer_whole(struct offer *offer)
{
	struct base_buffer text = { 0 };
	struct parity_record record;

	if (parity_record_whole(&record, offer->generation->manifest.file_count))
		return;
	if (!parity_record_encode(&text, &record)) {
		describe(offer, &record, &text);
		group_note_number(offer->note, 0);
		group_note_number(offer->note, 0);
		offer->count++;
	}
	base_buffer_free(&text);
	parity_record_free(&record);
}

/* False: nothing of it can be offered. */
static bool offer_one(const struct ioshape_group *group, const struct group_generation *generation,
		      struct group_note *note)
{
	struct group_note own = { 0 };
	struct offer offer = { .group = group, .generation = generation, .note = &own };

	if (generation->manifest.rank_count != group->options.ranks) {
		base_log(save_log(group->context), IOSHAPE_LOG_WARNING,
			 "%s was saved by %u ranks, and this job has %u: it can be loaded when it "
			 "has been drained",
			 generation->folder.path, generation->manifest.rank_count,
			 group->options.ranks);
		return false;
	}
	if (group_is_of_nodes(&generation->folder))
		ring_folder_list(&generation->folder, see_node, &offer, NULL);
	else
		offer_whole(&offer);
	if (offer.count) {
		group_note_number(note, offer.count);
		note->failed |= own.failed ||
				base_buffer_append(&note->bytes, own.bytes.data, own.bytes.bytes);
	}
	base_buffer_free(&own.bytes);
	parity_record_free(&offer.described);
	return offer.count > 0;
}

/* The newest, by their manifests; 0 is behind the last. */
static void offer_all(const struct ioshape_group *group, struct group_note *note)
{
	struct ring_folder directory = RING_NO_FOLDER;
	struct group_candidates candidates = { 0 };
	struct group_generation generation;
	uint32_t offered = 0;

	if (!ring_folder_open(&directory, group->near, NULL) &&
	    !group_list_by_age(&directory, &candidates, NULL)) {
		for (size_t i = 0; i < candidates.count && offered < MOST_OFFERED; i++) {
			if (group_open_candidate(&generation, &directory, &candidates, i, NULL))
				continue;
			offered += offer_one(group, &generation, note);
			group_generation_close(&generation);
		}
	}
	group_note_number(note, 0);
	group_candidates_free(&candidates);
	ring_folder_close(&directory);
}

/* ---- What all nodes have --------------------------------------------------------------------- */

struct hearing {
	struct ioshape_group *group;
	bool *have;
	struct group_spreads *spreads;
};

static void spread_free(struct spread *spread)
{
	parity_record_free(&spread->record);
	free(spread->node_of_rank);
	free(spread->holdings);
	*spread = (struct spread){ 0 };
}

static void empty(struct group_spreads *spreads)
{
	while (spreads->count)
		spread_free(&spreads->all[--spreads->count]);
	free(spreads->all);
}

void parity_spreads_free(struct group_spreads *spreads)
{
	empty(spreads);
	free(spreads);
}

static bool is_same(const struct spread *left, const struct spread *right)
{
	return left->step == right->step && left->serial == right->serial &&
	       !strcmp(left->attempt, right->attempt) &&
	       parity_records_agree(&left->record, &right->record);
}

/* The one that is this one already, or else a new one, which takes what was read; NULL without
 * memory. What nodes say that do not agree about the sets is not put together. */
static struct spread *place_for(struct group_spreads *spreads, struct spread *read)
{
	struct spread *all;

	for (size_t i = 0; i < spreads->count; i++) {
		if (is_same(&spreads->all[i], read))
			return &spreads->all[i];
	}
	all = reallocarray(spreads->all, spreads->count + 1, sizeof(*all));
	if (!all)
		return NULL;
	spreads->all = all;
	all[spreads->count] = *read;
	*read = (struct spread){ 0 };
	return &all[spreads->count++];
}

static bool read_offer(const struct ioshape_group *group, struct group_note_reader *reader,
		       struct spread *read)
{
	const uint8_t *text;
	size_t bytes;

	*read = (struct spread){ .step = group_read_number(reader),
				 .serial = group_read_number(reader) };
	group_read_text(reader, read->attempt, sizeof(read->attempt));
	text = group_read_bytes(reader, &bytes);
	read->node_of_rank = calloc(group->options.ranks, sizeof(*read->node_of_rank));
	if (!read->node_of_rank || reader->bad ||
	    parity_record_decode(&read->record, text, bytes, "what a node offers", NULL))
		return false;
	/* It was saved by as many ranks as there are, and each node had one at least. */
	reader->bad |= read->record.sets.nodes > group->options.ranks;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		const uint64_t node = group_read_number(reader);

		reader->bad |= node >= read->record.sets.nodes;
		read->node_of_rank[rank] = (uint32_t)node;
	}
	return !reader->bad;
}

static bool read_holdings(struct spread *spread, struct group_note_reader *reader, uint32_t holder,
			  uint64_t count)
{
	struct holding *all = NULL;

	if (count <= spread->record.sets.nodes && count <= reader->left / 16)
		all = reallocarray(spread->holdings, spread->holding_count + count, sizeof(*all));
	if (!all)
		return false;
	spread->holdings = all;
	for (uint64_t i = 0; i < count; i++) {
		const uint64_t node = group_read_number(reader),
			       parities = group_read_number(reader);

		if (node >= spread->record.sets.nodes || parities > spread->record.sets.parity)
			return false;
		all[spread->holding_count++] =
			(struct holding){ holder, (uint32_t)node, (uint32_t)parities };
	}
	return !reader->bad;
}

static void read_offers(const struct ioshape_group *group, uint32_t rank,
			const struct base_buffer *note, struct group_spreads *spreads)
{
	struct group_note_reader reader = group_read_note(note);
	struct spread read, *spread;

	/* What cannot be read is not offered. */
	for (uint32_t i = 0; i < MOST_OFFERED; i++) {
		const uint64_t count = group_read_number(&reader);

		if (!count || reader.bad)
			return;
		spread = read_offer(group, &reader, &read) ? place_for(spreads, &read) : NULL;
		spread_free(&read);
		if (!spread || !read_holdings(spread, &reader, group->ranks[rank].node, count))
			return;
	}
}

static int found_offer(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct hearing *hearing = user;

	hearing->have[rank] = true;
	read_offers(hearing->group, rank, note, hearing->spreads);
	return 0;
}

static int compare_spreads(const void *left, const void *right)
{
	const struct spread *a = left, *b = right;

	return a->serial == b->serial ? 0 : a->serial < b->serial ? 1 : -1;
}

/* Rank 0 hears its own, too. */
static int hear_offers(struct group_round *round, const struct group_note *own,
		       struct group_spreads *spreads, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct hearing hearing = {
		.group = group,
		.have = calloc(group->options.ranks, sizeof(bool)),
		.spreads = spreads,
	};
	struct group_collection collection = {
		.what = "offer",
		.missing = "did not say what its tier has",
		.have = hearing.have,
		.found = found_offer,
		.user = &hearing,
		.beats = true,
	};
	int ret;

	if (!hearing.have)
		return base_no_memory(error, "what nodes have", group->options.ranks);
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		hearing.have[rank] = !group_leads_node(group, rank);
	found_offer(&hearing, 0, &own->bytes);
	ret = group_round_collect(round, &collection, error);
	free(hearing.have);
	if (!ret && spreads->count)
		qsort(spreads->all, spreads->count, sizeof(*spreads->all), compare_spreads);
	return ret;
}

static int list_candidates(const struct group_spreads *spreads, struct group_candidates *found,
			   struct base_error *error)
{
	found->all = calloc(MAX(spreads->count, 1), sizeof(*found->all));
	if (!found->all)
		return base_no_memory(error, "a list of generations", spreads->count);
	for (; found->count < spreads->count; found->count++) {
		found->all[found->count].step = spreads->all[found->count].step;
		found->all[found->count].serial = spreads->all[found->count].serial;
	}
	return 0;
}

int parity_look(struct group_round *round, struct group_spreads **spreads,
		struct group_candidates *found, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	const uint32_t rank = group->options.rank;
	struct group_note note = { 0 };
	int ret = 0;

	if (!group_leads_node(group, rank))
		return 0;
	offer_all(group, &note);
	if (rank)
		return group_round_post(round, "offer", &note, error);
	*spreads = calloc(1, sizeof(**spreads));
	if (note.failed || !*spreads)
		ret = base_no_memory(error, "what a node has", note.bytes.bytes);
	if (!ret)
		ret = hear_offers(round, &note, *spreads, error);
	if (!ret)
		ret = list_candidates(*spreads, found, error);
	base_buffer_free(&note.bytes);
	return ret;
}

static void restoring_free(struct restoring *restoring)
{
	free(restoring->holders);
	free(restoring->makings);
	free(restoring->folder);
}

static int make_lists(struct restoring *restoring, uint32_t nodes, uint64_t makings,
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
static void find_holders(const struct spread *spread, uint32_t *holders, uint32_t *parities)
{
	for (uint32_t node = 0; node < spread->record.sets.nodes; node++)
		holders[node] = PARITY_NOWHERE;
	for (uint32_t i = 0; i < spread->holding_count; i++) {
		const struct holding *holding = &spread->holdings[i];

		if (holders[holding->node] != PARITY_NOWHERE &&
		    parities[holding->node] >= holding->parities)
			continue;
		holders[holding->node] = holding->holder;
		parities[holding->node] = holding->parities;
	}
}

int parity_check(const struct group_spreads *spreads, size_t at, struct base_error *error)
{
	const struct spread *spread = &spreads->all[at];
	const uint32_t nodes = spread->record.sets.nodes;
	uint32_t *holders = calloc(2 * (size_t)nodes, sizeof(*holders));
	bool well;

	if (!holders)
		return base_no_memory(error, "what nodes have", nodes);
	find_holders(spread, holders, holders + nodes);
	well = parity_can_restore(&spread->record.sets, holders, holders + nodes);
	free(holders);
	if (well)
		return 0;
	return base_refuse(
		error, IOSHAPE_E_DAMAGED,
		"generation %llu lies on the tiers of %u nodes, and too many of them are "
		"lost" BASE_REMEDY "start the job on nodes that still have it, or load another one",
		(unsigned long long)spread->step, nodes);
}

static bool has(const struct spread *spread, uint32_t holder, uint32_t node)
{
	for (uint32_t i = 0; i < spread->holding_count; i++) {
		if (spread->holdings[i].holder == holder && spread->holdings[i].node == node)
			return true;
	}
	return false;
}

static bool is_listed(const struct restoring *restoring, uint32_t target, uint32_t node)
{
	for (uint32_t i = restoring->count; i--;) {
		if (restoring->makings[i].target == target && restoring->makings[i].node == node)
			return true;
	}
	return false;
}

static uint32_t turns_of(const struct restoring *restoring, uint32_t target)
{
	uint32_t turns = 0;

	for (uint32_t i = 0; i < restoring->count; i++)
		turns += restoring->makings[i].target == target;
	return turns;
}

/* What the ranks of each node want and the node has not. */
static int decide(const struct ioshape_group *group, const struct spread *spread,
		  struct restoring *restoring, struct base_error *error)
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
			(struct parity_making){ target, node, turns_of(restoring, target) };
		restoring->count++;
	}
	return 0;
}

static int say(struct group_round *round, const struct restoring *restoring,
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

static bool read_lists(const struct ioshape_group *group, struct restoring *restoring,
		       struct group_note_reader *reader, uint64_t count)
{
	for (uint32_t node = 0; node < restoring->nodes; node++) {
		const uint64_t holder = group_read_number(reader),
			       parities = group_read_number(reader);

		reader->bad |= (holder >= group->node_count && holder != PARITY_NOWHERE) ||
			       parities > PARITY_MOST;
		restoring->holders[node] = (uint32_t)holder;
		restoring->parities[node] = (uint32_t)parities;
	}
	for (uint64_t i = 0; i < count; i++) {
		const uint64_t target = group_read_number(reader), node = group_read_number(reader),
			       turn = group_read_number(reader);

		reader->bad |= target >= group->node_count || node >= restoring->nodes ||
			       turn >= count;
		restoring->makings[i] =
			(struct parity_making){ (uint32_t)target, (uint32_t)node, (uint32_t)turn };
	}
	restoring->count = (uint32_t)count;
	return !reader->bad;
}

static int read_restoring(const struct ioshape_group *group, const struct base_buffer *note,
			  struct restoring *restoring, struct base_error *error)
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

static int hear(struct group_round *round, struct restoring *restoring, struct base_error *error)
{
	struct base_buffer note = { 0 };
	int ret = group_round_await(round, "restore", 0, &note, NULL, NULL, error);

	if (!ret)
		ret = read_restoring(round->group, &note, restoring, error);
	base_buffer_free(&note);
	return ret;
}

/* ---- The manifest ---------------------------------------------------------------------------- */

/* The first whose files are still there: whoever holds them gives the manifest. */
static uint32_t first_held(const struct restoring *restoring)
{
	uint32_t node = 0;

	while (node + 1 < restoring->nodes && restoring->holders[node] == PARITY_NOWHERE)
		node++;
	return node;
}

static int make_whole_record(const struct base_buffer *manifest, const char *path,
			     struct base_buffer *text, struct base_error *error)
{
	struct zip_manifest decoded = { 0 };
	struct parity_record record;
	int ret = zip_manifest_decode(&decoded, (const char *)manifest->data, manifest->bytes, path,
				      error);

	if (ret)
		return ret;
	ret = parity_record_whole(&record, decoded.file_count);
	if (!ret)
		ret = parity_record_encode(text, &record);
	if (!ret)
		parity_record_free(&record);
	else
		base_no_memory(error, "files of a node", decoded.file_count);
	zip_manifest_free(&decoded);
	return ret;
}

/* With the record of that node. */
static int read_own(const struct restoring *restoring, struct group_note *note,
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
	else if (!ret && read_record(&folder, name, &record, NULL))
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
static int check_known(const struct ioshape_group *group, const struct restoring *restoring,
		       const struct known *known, struct base_error *error)
{
	const struct zip_manifest *manifest = &known->manifest;

	if (manifest->step != restoring->step || manifest->rank_count != group->options.ranks ||
	    strcmp(manifest->attempt, restoring->attempt) != 0)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "cannot restore \"%s\": the node that has it gave the manifest "
				   "of another generation" BASE_REMEDY "load another generation",
				   restoring->folder);
	return parity_record_check(&known->record, manifest, restoring->nodes, restoring->folder,
				   error);
}

static int read_known(const struct ioshape_group *group, const struct restoring *restoring,
		      struct known *known, struct base_error *error)
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
		ret = parity_record_decode(&known->record, record, bytes, path, error);
	return ret ? ret : check_known(group, restoring, known, error);
}

static void known_free(struct known *known)
{
	parity_record_free(&known->record);
	zip_manifest_free(&known->manifest);
	base_buffer_free(&known->note);
}

static int get_known(struct group_round *round, const struct restoring *restoring,
		     struct known *known, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	const uint32_t holder = restoring->holders[first_held(restoring)];
	struct group_note note = { 0 }, own = { 0 };
	struct base_error failure = { 0 };
	int ret;

	if (holder == PARITY_NOWHERE)
		return base_refuse(error, -EPROTO, "cannot read what rank 0 says");
	if (group->options.rank != group->leaders[holder]) {
		ret = group_round_await(round, "manifest", group->leaders[holder], &known->note,
					NULL, NULL, error);
		return ret ? ret : read_known(group, restoring, known, error);
	}
	read_own(restoring, &own, &failure);
	group_note_error(&note, &failure);
	note.failed |= own.failed ||
		       base_buffer_append(&note.bytes, own.bytes.data, own.bytes.bytes);
	base_buffer_free(&own.bytes);
	if (note.failed || base_buffer_append(&known->note, note.bytes.data, note.bytes.bytes))
		base_no_memory(error, "a manifest", note.bytes.bytes);
	ret = group_round_post(round, "manifest", &note, error);
	return ret ? ret : read_known(group, restoring, known, error);
}

/* ---- Here ------------------------------------------------------------------------------------ */

static bool gets_something(const struct ioshape_group *group, const struct restoring *restoring)
{
	return turns_of(restoring, group->ranks[group->options.rank].node) > 0;
}

/* Another generation of that step makes room; files of the same one stay. */
static int prepare(struct ioshape_group *group, const struct restoring *restoring,
		   const struct known *known, struct base_error *error)
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
		ret = tier->ops->make_room(tier, group, path, 0, 1, error);
	free(path);
	return ret ? ret : ring_folder_make(restoring->folder, error);
}

/* The manifest comes last. */
static int complete(const struct restoring *restoring, const struct known *known,
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
static int keep(struct ioshape_group *group, const struct restoring *restoring, bool restored,
		struct base_error *error)
{
	const struct ioshape_group_options *options = &group->options;
	struct group_tier *tier = group_tier_of(options);
	char name[GROUP_STEP_NAME_BYTES], *path;
	int ret;

	group_step_name(name, restoring->step);
	if (asprintf(&path, "%s/%s", group->directory, name) < 0)
		return base_no_memory(error, "a path", strlen(group->directory));
	ret = (restored ? tier->ops->keep : tier_keep_once)(tier, path, options->keep_last,
							    options->keep_every, error);
	free(path);
	return ret;
}

static int exchange(struct group_round *round, const struct restoring *restoring,
		    const struct known *known, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct parity_exchange exchange = {
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
	ret = parity_exchange_run(&exchange, group->context, error);
	group->comm_failed |= exchange.broken;
	return ret;
}

/* The first rank of a node. */
static int restore_here(struct group_round *round, struct restoring *restoring,
			struct base_error *error)
{
	struct ioshape_group *group = round->group;
	const bool gets = gets_something(group, restoring);
	struct known known = { 0 };
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
	known_free(&known);
	return ret;
}

/* ---- All ranks ------------------------------------------------------------------------------- */

static int follow(struct group_round *round, struct base_error *error)
{
	struct restoring restoring = { 0 };
	struct base_error own = { 0 };
	int ret;

	if (!group_leads_node(round->group, round->group->options.rank))
		return 0;
	ret = hear(round, &restoring, error);
	if (!ret) {
		restore_here(round, &restoring, &own);
		ret = group_answer(round, "restored", &own, "", error);
	}
	restoring_free(&restoring);
	return ret;
}

int parity_restore(struct group_round *round, const struct group_spreads *spreads, size_t at,
		   struct base_error *failure, struct base_error *error)
{
	struct restoring restoring = { 0 };
	struct group_answers answers = { 0 };
	int ret;

	if (round->group->options.rank)
		return follow(round, error);
	ret = decide(round->group, &spreads->all[at], &restoring, error);
	if (!ret)
		ret = say(round, &restoring, error);
	if (!ret) {
		restore_here(round, &restoring, failure);
		ret = group_collect_answers(
			round, "restored", "did not say whether it has its files", &answers, error);
		if (answers.failure.code && !failure->code)
			*failure = answers.failure;
	}
	restoring_free(&restoring);
	return ret;
}
