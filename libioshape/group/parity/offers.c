/* SPDX-License-Identifier: Apache-2.0 */
/* What generations lie on the tiers of several nodes, and which node has what of them. */
#define _GNU_SOURCE
#include "group/parity/restore.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
	struct group_record described;
};

static bool has_all_files(const struct offer *offer, const struct group_record *record)
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
static uint32_t parities_here(const struct offer *offer, const struct group_record *record,
			      uint64_t record_bytes, uint64_t file_bytes)
{
	const struct group_set set = group_set_of(&record->sets, record->node);
	const uint64_t segment = group_segment_bytes(&offer->generation->manifest, record, &set);

	return record_bytes + record->parities * segment <= file_bytes ? record->parities : 0;
}

/* Writes once what is equal for all nodes. Takes the record. */
static void describe(struct offer *offer, struct group_record *record,
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
	*record = (struct group_record){ 0 };
}

/* Two parity files of one generation with different sets cannot both be right. */
static bool agrees(const struct offer *offer, const struct group_record *record, const char *name)
{
	if (!offer->described.sets.nodes || group_records_agree(&offer->described, record))
		return true;
	base_log(save_log(offer->group->context), IOSHAPE_LOG_WARNING,
		 "cannot use \"%s/%s\": another file of parities there names other sets of nodes",
		 offer->generation->folder.path, name);
	return false;
}

int group_read_record(const struct ring_folder *folder, const char *name, struct base_buffer *text,
		      uint64_t *file_bytes)
{
	uint8_t begin[GROUP_RECORD_UNIT];
	struct ring_entry entry;
	uint64_t bytes;
	ssize_t got = ring_folder_peek(folder, name, begin, sizeof(begin));

	bytes = got < (ssize_t)sizeof(begin) ? 0 : group_record_bytes(begin, sizeof(begin));
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
	struct group_record record = { 0 };
	uint64_t file_bytes;
	uint32_t node, parities;

	(void)error;
	if (!group_parse_parity_name(name, &node) ||
	    group_read_record(&offer->generation->folder, name, &text, &file_bytes) ||
	    group_record_decode(&record, text.data, text.bytes, name, NULL))
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
	group_record_free(&record);
	base_buffer_free(&text);
	return 0;
}

/* All of it is here: saved by the ranks of one node, or of several on one tier. */
static void offer_whole(struct offer *offer)
{
	struct base_buffer text = { 0 };
	struct group_record record;

	if (group_record_whole(&record, offer->generation->manifest.file_count))
		return;
	if (!group_record_encode(&text, &record)) {
		describe(offer, &record, &text);
		group_note_number(offer->note, 0);
		group_note_number(offer->note, 0);
		offer->count++;
	}
	base_buffer_free(&text);
	group_record_free(&record);
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
	group_record_free(&offer.described);
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

static void spread_free(struct group_spread *spread)
{
	group_record_free(&spread->record);
	free(spread->node_of_rank);
	free(spread->holdings);
	*spread = (struct group_spread){ 0 };
}

void group_spreads_free(struct group_spreads *spreads)
{
	while (spreads->count)
		spread_free(&spreads->all[--spreads->count]);
	free(spreads->all);
	spreads->all = NULL;
}

static bool is_same(const struct group_spread *left, const struct group_spread *right)
{
	return left->step == right->step && left->serial == right->serial &&
	       !strcmp(left->attempt, right->attempt) &&
	       group_records_agree(&left->record, &right->record);
}

/* The one that is this one already, or else a new one, which takes what was read; NULL without
 * memory. What nodes say that do not agree about the sets is not put together. */
static struct group_spread *place_for(struct group_spreads *spreads, struct group_spread *read)
{
	struct group_spread *all;

	for (size_t i = 0; i < spreads->count; i++) {
		if (is_same(&spreads->all[i], read))
			return &spreads->all[i];
	}
	all = reallocarray(spreads->all, spreads->count + 1, sizeof(*all));
	if (!all)
		return NULL;
	spreads->all = all;
	all[spreads->count] = *read;
	*read = (struct group_spread){ 0 };
	return &all[spreads->count++];
}

static bool read_offer(const struct ioshape_group *group, struct group_note_reader *reader,
		       struct group_spread *read)
{
	const uint8_t *text;
	size_t bytes;

	*read = (struct group_spread){ .step = group_read_number(reader),
				       .serial = group_read_number(reader) };
	group_read_text(reader, read->attempt, sizeof(read->attempt));
	text = group_read_bytes(reader, &bytes);
	read->node_of_rank = calloc(group->options.ranks, sizeof(*read->node_of_rank));
	if (!read->node_of_rank || reader->bad ||
	    group_record_decode(&read->record, text, bytes, "what a node offers", NULL))
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

static bool read_holdings(struct group_spread *spread, struct group_note_reader *reader,
			  uint32_t holder, uint64_t count)
{
	struct group_holding *all = NULL;

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
			(struct group_holding){ holder, (uint32_t)node, (uint32_t)parities };
	}
	return !reader->bad;
}

void group_read_offers(const struct ioshape_group *group, uint32_t rank,
		       const struct base_buffer *note, struct group_spreads *spreads)
{
	struct group_note_reader reader = group_read_note(note);
	struct group_spread read, *spread;

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
	group_read_offers(hearing->group, rank, note, hearing->spreads);
	return 0;
}

static int compare_spreads(const void *left, const void *right)
{
	const struct group_spread *a = left, *b = right;

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

int group_look_at_tiers(struct group_round *round, struct group_spreads *spreads,
			struct base_error *error)
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
	ret = note.failed ? base_no_memory(error, "what a node has", note.bytes.bytes) :
			    hear_offers(round, &note, spreads, error);
	base_buffer_free(&note.bytes);
	return ret;
}
