/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions of a tier that groups call (struct group_tier_ops). They protect what the nodes have
 * just saved, and find out which checkpoints the tiers of all nodes have together. They restore
 * files that the ranks of a node need. If ranks have moved, the files come from the node that has
 * them. If they are lost, they are computed from what the other nodes keep. All ranks take part, in
 * rounds. The first rank of each node reads, sends and writes.
 */
#define _GNU_SOURCE
#include "tier/parity.h"
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The tier of one node -------------------------------------------------------------------- */

static const struct ioshape_tier *tier_of(const struct group_tier *of_groups)
{
	return (const struct ioshape_tier *)of_groups;
}

static int find_for_group(struct group_tier *of_groups, const char *path, char **copy_path,
			  struct base_error *error)
{
	return tier_enter(tier_of(of_groups), path, copy_path, error);
}

/* Parities and nodes of a set, by enum ioshape_parity. */
static const struct {
	uint32_t parity, nodes;
} kinds[] = { { 0, 1 }, { 1, 2 }, { 1, 4 }, { 1, 8 }, { 2, 4 }, { 2, 6 }, { 2, 8 } };

/* Returns the bytes that a node keeps for others if `nodes` nodes save `bytes` bytes each. */
static uint64_t parity_bytes(enum ioshape_parity parity, uint64_t bytes, uint32_t nodes)
{
	const uint32_t in_set = MIN(kinds[parity].nodes, nodes);
	const uint32_t lost = MIN(kinds[parity].parity, in_set - 1);

	return (bytes * lost + in_set - lost - 1) / (in_set - lost);
}

static int reserve_for_group(struct group_tier *of_groups, const char *path, uint64_t bytes,
			     uint32_t nodes, struct base_error *error)
{
	const struct ioshape_tier *tier = tier_of(of_groups);
	char *copy_path;
	int ret = tier_enter(tier, path, &copy_path, error);

	bytes += parity_bytes(tier->options.parity, bytes, nodes);
	if (!ret)
		ret = tier_prepare(tier, copy_path, bytes, error);
	free(copy_path);
	return ret;
}

/* Records that a copy waits to be drained. With `once`, does nothing if it is already recorded. */
static int keep_path(struct group_tier *of_groups, const char *path, uint32_t keep_last,
		     uint64_t keep_every, bool once, struct base_error *error)
{
	char *copy_path;
	int ret = tier_enter(tier_of(of_groups), path, &copy_path, error);

	if (!ret)
		ret = tier_keep(tier_of(of_groups), copy_path, keep_last, keep_every, once, error);
	free(copy_path);
	return ret;
}

static int keep_for_group(struct group_tier *of_groups, const char *path, uint32_t keep_last,
			  uint64_t keep_every, struct base_error *error)
{
	return keep_path(of_groups, path, keep_last, keep_every, false, error);
}

/* ---- Protecting what the nodes have just saved ----------------------------------------------- */

static int make_sets(const struct ioshape_group *group, struct parity_sets *sets,
		     struct base_error *error)
{
	const enum ioshape_parity parity = group->options.tier->options.parity;
	const char **domains = calloc(group->node_count, sizeof(*domains));
	int ret = -ENOMEM;

	for (uint32_t node = 0; domains && node < group->node_count; node++)
		domains[node] = group->ranks[group->leaders[node]].domain;
	if (domains)
		ret = parity_sets_make(sets, group->node_count, kinds[parity].parity,
				       kinds[parity].nodes, domains);
	free(domains);
	return ret ? base_no_memory(error, "sets of nodes", group->node_count) : 0;
}

static int list_files(const struct ioshape_group *group, const struct format_manifest *manifest,
		      struct parity_record *record, struct base_error *error)
{
	record->file_count = manifest->file_count;
	record->node_of_file = calloc(manifest->file_count, sizeof(*record->node_of_file));
	if (!record->node_of_file)
		return base_no_memory(error, "files of nodes", manifest->file_count);
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		record->node_of_file[manifest->shards[rank].file] = group->ranks[rank].node;
	return 0;
}

static int make_plan(const struct ioshape_group *group, const struct format_manifest *manifest,
		     struct base_buffer *plan, struct base_error *error)
{
	struct parity_record record = { 0 };
	int ret = make_sets(group, &record.sets, error);

	if (!ret)
		ret = list_files(group, manifest, &record, error);
	if (!ret && parity_record_encode(plan, &record))
		ret = base_no_memory(error, "a parity record", plan->bytes);
	parity_record_free(&record);
	return ret;
}

/* Makes the parities. All nodes do so at the same time, and each gets those that it keeps for the
 * others. */
static int make_parities(struct group_round *round, const struct format_manifest *manifest,
			 const struct parity_record *record, const char *folder,
			 struct base_error *error)
{
	struct ioshape_group *group = round->group;
	const uint32_t nodes = group->node_count;
	struct parity_making *makings = calloc(nodes, sizeof(*makings));
	uint32_t *numbers = calloc(2 * (size_t)nodes, sizeof(*numbers));
	struct parity_exchange exchange = {
		.round = round,
		.manifest = manifest,
		.record = record,
		.holders = numbers, /* each node has its own files */
		.parities = numbers + nodes,
		.makings = makings,
		.count = nodes,
		.fresh = true,
		.folder = folder,
	};
	int ret = 0;

	if (!makings || !numbers)
		ret = base_no_memory(error, "messages between nodes", nodes);
	for (uint32_t node = 0; !ret && node < nodes; node++) {
		numbers[node] = node;
		makings[node] = (struct parity_making){ node, node, 0 };
	}
	if (!ret)
		ret = parity_exchange_run(&exchange, error);
	free(numbers);
	free(makings);
	return ret;
}

/* Writes a record without parities, which marks the folder as the files of one node. */
static int put_bare_record(const struct io_folder *folder, const struct parity_record *record,
			   struct base_error *error)
{
	char name[GROUP_PARITY_NAME_BYTES];
	struct base_buffer text = { 0 };
	int ret = parity_record_encode(&text, record);

	group_parity_name(name, record->node);
	if (ret)
		base_no_memory(error, "a parity record", text.bytes);
	else
		ret = io_folder_put(folder, name, text.data, text.bytes, error);
	base_buffer_free(&text);
	return ret;
}

/* Makes the parities, or writes a bare record if that is not possible. The checkpoint is valid
 * without parities; `unprotected` then has the reason. */
static int protect(struct group_round *round, const struct format_manifest *manifest,
		   const struct parity_record *record, const struct io_folder *folder,
		   char unprotected[BASE_ERROR_TEXT_BYTES], struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct base_error why = { 0 };

	if (!record->sets.parity)
		return put_bare_record(folder, record, error);
	if (!group->options.comm || group->comm_failed)
		base_fail_reason(
			&why, -ENOTCONN, "%s",
			group->options.comm ?
				"sending data between nodes failed before" :
				"nodes cannot send data to each other (give the group a comm)");
	else if (!make_parities(round, manifest, record, folder->path, &why))
		return 0;
	snprintf(unprotected, BASE_ERROR_TEXT_BYTES, "%s", why.sentence);
	return put_bare_record(folder, record, error);
}

/* Compares a record from another process or a disk with the manifest and the number of nodes. Its
 * numbers are used as indices of their arrays. Returns 0 or IOSHAPE_E_DAMAGED. */
static int check_record(const struct parity_record *record, const struct format_manifest *manifest,
			uint32_t nodes, const char *path, struct base_error *error)
{
	if (record->sets.nodes == nodes && record->file_count == manifest->file_count)
		return 0;
	return base_fail_reason_with(
		error, IOSHAPE_E_DAMAGED, "load another checkpoint",
		"\"%s\" is damaged: its parity is for %u nodes with %u files, and "
		"the checkpoint has %u nodes with %u files",
		path, record->sets.nodes, record->file_count, nodes, manifest->file_count);
}

static int protect_nodes(struct group_round *round, const struct format_manifest *manifest,
			 const struct base_buffer *plan, const struct io_folder *folder,
			 char unprotected[BASE_ERROR_TEXT_BYTES], struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	struct parity_record record;
	int ret = parity_record_decode(&record, plan->data, plan->bytes, "the message of rank 0",
				       error);

	if (ret)
		return ret;
	ret = check_record(&record, manifest, group->node_count, "the message of rank 0", error);
	if (!ret) {
		record.node = group->ranks[group->options.rank].node;
		ret = protect(round, manifest, &record, folder, unprotected, error);
	}
	parity_record_free(&record);
	return ret;
}

/* ---- Checkpoints on tiers -------------------------------------------------------------------- */

/*
 * Number of checkpoints that a node offers. Older ones are at their destination, or soon will be.
 */
#define MOST_OFFERED 3u

/* Current node (holder) that has the files of a node of the checkpoint. */
struct holding {
	uint32_t holder, node;
	uint32_t parities;
};

/* A checkpoint that is spread over tiers. */
struct spread {
	uint64_t step, serial;
	char attempt[FORMAT_ATTEMPT_BYTES];
	struct parity_record record;
	uint32_t *node_of_rank; /* node of the checkpoint, for each rank; owned */
	uint32_t holding_count;
	struct holding *holdings; /* owned */
};

struct group_spreads { /* sorted, newest first */
	struct spread *all;
	size_t count;
};

/* ---- Messages -------------------------------------------------------------------------------- */

/* Checkpoints that a node has. */
struct offers {
	uint32_t ranks; /* ranks of the group; only a checkpoint of as many ranks can be offered */
	uint32_t count;
	struct spread all[MOST_OFFERED];
};

/* Rank 0's decision about what is restored, and where. */
struct restoring {
	const struct ioshape_group *group;
	uint64_t step;
	char attempt[FORMAT_ATTEMPT_BYTES];
	struct parity_record record;  /* record of any node */
	uint32_t *holders, *parities; /* arrays by node of the checkpoint; owned */
	uint32_t count;
	struct parity_making *makings; /* owned */
	char *folder;                  /* owned; not part of the message */
};

/* Manifest from a node that has the checkpoint. */
struct given {
	struct base_error failure;
	struct base_buffer text; /* text of the manifest */
};

static void pass_spread(struct group_payload *payload, struct spread *spread, uint32_t ranks)
{
	const struct parity_sets *sets = &spread->record.sets;

	group_pass_number(payload, &spread->step);
	group_pass_number(payload, &spread->serial);
	group_pass_text(payload, spread->attempt, sizeof(spread->attempt));
	parity_pass_record(payload, &spread->record);
	/* Each node had at least one rank. */
	payload->bad |= sets->nodes > ranks;
	group_pass_list(payload, &spread->node_of_rank, ranks, sets->nodes - 1);
	group_pass_small(payload, &spread->holding_count, sets->nodes);
	if (!payload->body && !payload->bad) {
		spread->holdings = calloc(spread->holding_count, sizeof(*spread->holdings));
		payload->bad |= !spread->holdings;
	}
	for (uint32_t i = 0; spread->holdings && i < spread->holding_count; i++) {
		struct holding *holding = &spread->holdings[i];

		group_pass_small(payload, &holding->node, sets->nodes - 1);
		group_pass_small(payload, &holding->parities, sets->parity);
	}
}

static void pass_offers(struct group_payload *payload, void *message)
{
	struct offers *offers = message;

	group_pass_small(payload, &offers->count, MOST_OFFERED);
	for (uint32_t i = 0; i < offers->count && !payload->bad; i++)
		pass_spread(payload, &offers->all[i], offers->ranks);
}

static void pass_restoring(struct group_payload *payload, void *message)
{
	struct restoring *restoring = message;
	const struct ioshape_group *group = restoring->group;
	const uint32_t nodes = group->node_count, ranks = group->options.ranks;
	bool *bad = &payload->bad;

	group_pass_number(payload, &restoring->step);
	group_pass_text(payload, restoring->attempt, sizeof(restoring->attempt));
	parity_pass_record(payload, &restoring->record);
	*bad |= restoring->record.sets.nodes > ranks;
	group_pass_list(payload, &restoring->holders, restoring->record.sets.nodes, UINT32_MAX);
	group_pass_list(payload, &restoring->parities, restoring->record.sets.nodes, PARITY_MOST);
	for (uint32_t node = 0; !*bad && node < restoring->record.sets.nodes; node++)
		*bad |= restoring->holders[node] >= nodes &&
			restoring->holders[node] != PARITY_NOWHERE;
	/* Each rank needs the files of one node. */
	group_pass_small(payload, &restoring->count, ranks);
	if (!payload->body)
		restoring->makings = calloc(ranks, sizeof(*restoring->makings));
	*bad |= !restoring->makings;
	for (uint32_t i = 0; !*bad && i < restoring->count; i++) {
		struct parity_making *making = &restoring->makings[i];

		group_pass_small(payload, &making->target, nodes - 1);
		group_pass_small(payload, &making->node, restoring->record.sets.nodes - 1);
		group_pass_small(payload, &making->turn, restoring->count - 1);
	}
}

static void pass_given(struct group_payload *payload, void *message)
{
	struct given *given = message;

	group_pass_failure(payload, &given->failure);
	group_pass_bytes(payload, &given->text);
}

/* First rank of each node to rank 0: what its tier has. */
static const struct group_message offer_message = { "offer", pass_offers };
/* Rank 0 to the first rank of each node: what is restored, and where. */
static const struct group_message restore_message = { "restore", pass_restoring };
/* First rank of a node that has the checkpoint to the others: the manifest. */
static const struct group_message manifest_message = { "manifest", pass_given };

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

static void free_spreads(struct group_spreads *spreads)
{
	empty(spreads);
	free(spreads);
}

static void restoring_free(struct restoring *restoring)
{
	parity_record_free(&restoring->record);
	free(restoring->holders);
	free(restoring->parities);
	free(restoring->makings);
	free(restoring->folder);
}

/* ---- Checkpoints of this node ---------------------------------------------------------------- */

/* A checkpoint on this node. */
struct offer {
	const struct ioshape_group *group;
	const struct group_checkpoint *checkpoint;
	struct spread *spread; /* record.sets.nodes is 0 until a record is found */
};

static bool has_all_files(const struct offer *offer, const struct parity_record *record)
{
	const struct format_manifest *manifest = &offer->checkpoint->manifest;
	struct io_entry entry;

	if (record->file_count != manifest->file_count)
		return false;
	for (uint32_t file = 0; file < manifest->file_count; file++) {
		if (record->node_of_file[file] != record->node)
			continue;
		if (io_folder_look(&offer->checkpoint->folder, manifest->files[file].name, &entry,
				   NULL) ||
		    entry.bytes != manifest->files[file].bytes)
			return false;
	}
	return true;
}

/*
 * Returns the number of parities in the file: all of them if it has the full length, otherwise 0.
 */
static uint32_t parities_here(const struct offer *offer, const struct parity_record *record,
			      uint64_t record_bytes, uint64_t file_bytes)
{
	const struct parity_set set = parity_set_of(&record->sets, record->node);
	const uint64_t segment = parity_segment_bytes(&offer->checkpoint->manifest, record, &set);

	return record_bytes + record->parities * segment <= file_bytes ? record->parities : 0;
}

static bool add_holding(struct spread *spread, struct holding holding)
{
	struct holding *all =
		reallocarray(spread->holdings, spread->holding_count + 1, sizeof(*all));

	if (!all)
		return false;
	spread->holdings = all;
	all[spread->holding_count++] = holding;
	return true;
}

/* Fills the spread of the offer and takes the record. Returns false if there is no memory. */
static bool describe(struct offer *offer, struct parity_record *record)
{
	const struct format_manifest *manifest = &offer->checkpoint->manifest;
	struct spread *spread = offer->spread;

	spread->step = manifest->step;
	spread->serial = manifest->serial;
	memcpy(spread->attempt, manifest->attempt, sizeof(spread->attempt));
	spread->node_of_rank = calloc(manifest->rank_count, sizeof(*spread->node_of_rank));
	if (!spread->node_of_rank)
		return false;
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		spread->node_of_rank[rank] = record->node_of_file[manifest->shards[rank].file];
	spread->record = *record;
	*record = (struct parity_record){ 0 };
	return true;
}

/* Returns whether two records have the same sets and the same files of each node. */
static bool records_agree(const struct parity_record *left, const struct parity_record *right)
{
	const struct parity_sets *a = &left->sets, *b = &right->sets;

	return a->nodes == b->nodes && a->parity == b->parity && a->set_nodes == b->set_nodes &&
	       left->file_count == right->file_count &&
	       !memcmp(a->order, b->order, a->nodes * sizeof(*a->order)) &&
	       !memcmp(left->node_of_file, right->node_of_file,
		       left->file_count * sizeof(*left->node_of_file));
}

/* Returns whether a record agrees with the first one of this checkpoint. Two files of parities with
 * different sets cannot both be right, and the second one is logged. */
static bool agrees(const struct offer *offer, const struct parity_record *record, const char *name)
{
	if (records_agree(&offer->spread->record, record))
		return true;
	base_log(save_settings(offer->group->context).log, IOSHAPE_LOG_WARNING,
		 "cannot use \"%s/%s\": another parity file there has different sets of nodes",
		 offer->checkpoint->folder.path, name);
	return false;
}

/* Reads the record from a file of parities, and the length of that file. Returns false if there is
 * no valid record. */
static bool read_record(const struct io_folder *folder, const char *name,
			struct parity_record *record, uint64_t *record_bytes, uint64_t *file_bytes)
{
	uint8_t begin[PARITY_RECORD_UNIT];
	struct base_buffer text = { 0 };
	struct io_entry entry;
	ssize_t got = io_folder_peek(folder, name, begin, sizeof(begin));
	bool well;

	*record_bytes = got < (ssize_t)sizeof(begin) ? 0 :
						       parity_record_bytes(begin, sizeof(begin));
	if (!*record_bytes || io_folder_look(folder, name, &entry, NULL) ||
	    base_buffer_reserve(&text, *record_bytes))
		return false;
	*file_bytes = entry.bytes;
	got = io_folder_peek(folder, name, text.data, *record_bytes);
	well = got == (ssize_t)*record_bytes &&
	       !parity_record_decode(record, text.data, *record_bytes, name, NULL);
	base_buffer_free(&text);
	return well;
}

/* Adds the files of one node to the offer, if they are complete. */
static int see_node(void *user, const char *name, struct base_error *error)
{
	struct offer *offer = user;
	struct parity_record record = { 0 };
	uint64_t record_bytes, file_bytes;
	uint32_t node, parities;

	(void)error;
	if (!group_parse_parity_name(name, &node) ||
	    !read_record(&offer->checkpoint->folder, name, &record, &record_bytes, &file_bytes))
		return 0;
	if (record.node == node && has_all_files(offer, &record)) {
		parities = parities_here(offer, &record, record_bytes, file_bytes);
		if (offer->spread->record.sets.nodes ? agrees(offer, &record, name) :
						       describe(offer, &record))
			add_holding(offer->spread, (struct holding){ 0, node, parities });
	}
	parity_record_free(&record);
	return 0;
}

/* Makes the record of a checkpoint that is in one directory, as if one node had saved it. Returns 0
 * or -ENOMEM. */
static int whole_record(struct parity_record *record, uint32_t file_count)
{
	static const char *const nowhere[] = { "" };

	*record = (struct parity_record){
		.file_count = file_count,
		.node_of_file = calloc(file_count, sizeof(*record->node_of_file)),
	};
	if (record->node_of_file && !parity_sets_make(&record->sets, 1, 0, 1, nowhere))
		return 0;
	parity_record_free(record);
	return -ENOMEM;
}

/* Offers a checkpoint that is complete on this tier. The ranks of one node saved it, or those of
 * several nodes on one tier. */
static void offer_whole(struct offer *offer)
{
	struct parity_record record;

	if (whole_record(&record, offer->checkpoint->manifest.file_count))
		return;
	if (describe(offer, &record))
		add_holding(offer->spread, (struct holding){ 0 });
	parity_record_free(&record);
}

static void offer_one(const struct ioshape_group *group, const struct group_checkpoint *checkpoint,
		      struct offers *offers)
{
	struct offer offer = { group, checkpoint, &offers->all[offers->count] };

	if (checkpoint->manifest.rank_count != group->options.ranks) {
		base_log(save_settings(group->context).log, IOSHAPE_LOG_WARNING,
			 "%s was saved by %u ranks, and this job has %u: it can be loaded after it "
			 "has been drained",
			 checkpoint->folder.path, checkpoint->manifest.rank_count,
			 group->options.ranks);
		return;
	}
	if (group_is_of_nodes(&checkpoint->folder))
		io_folder_list(&checkpoint->folder, see_node, &offer, NULL);
	else
		offer_whole(&offer);
	if (offer.spread->holding_count)
		offers->count++;
	else
		spread_free(offer.spread);
}

/* Offers the newest checkpoints, by their manifests. */
static void offer_all(const struct ioshape_group *group, struct offers *offers)
{
	struct io_folder directory = IO_NO_FOLDER;
	struct group_candidates candidates = { 0 };
	struct group_checkpoint checkpoint;

	if (!io_folder_open(&directory, group->near, NULL) &&
	    !group_list_by_age(&directory, &candidates, NULL)) {
		for (size_t i = 0; i < candidates.count && offers->count < MOST_OFFERED; i++) {
			if (group_checkpoint_open(&checkpoint, &directory, candidates.all[i].name,
						  candidates.all[i].step, NULL))
				continue;
			offer_one(group, &checkpoint, offers);
			group_checkpoint_close(&checkpoint);
		}
	}
	group_candidates_free(&candidates);
	io_folder_close(&directory);
}

/* ---- Checkpoints of all nodes ---------------------------------------------------------------- */

static bool is_same(const struct spread *left, const struct spread *right)
{
	return left->step == right->step && left->serial == right->serial &&
	       !strcmp(left->attempt, right->attempt) &&
	       records_agree(&left->record, &right->record);
}

/* Returns the spread of an offered checkpoint: an existing one, or a new one that takes the offered
 * data. Returns NULL if there is no memory. Offers that disagree about the sets are not merged. */
static struct spread *spread_for(struct group_spreads *spreads, struct spread *offered)
{
	struct spread *all;

	for (size_t i = 0; i < spreads->count; i++) {
		if (is_same(&spreads->all[i], offered))
			return &spreads->all[i];
	}
	all = reallocarray(spreads->all, spreads->count + 1, sizeof(*all));
	if (!all)
		return NULL;
	spreads->all = all;
	all[spreads->count] = *offered;
	all[spreads->count].holdings = NULL;
	all[spreads->count].holding_count = 0;
	offered->record = (struct parity_record){ 0 };
	offered->node_of_rank = NULL;
	return &all[spreads->count++];
}

/* Adds what a current node offers. */
static void take_offers(struct group_spreads *spreads, struct offers *offers, uint32_t holder)
{
	for (uint32_t i = 0; i < offers->count; i++) {
		struct spread *offered = &offers->all[i], *spread = spread_for(spreads, offered);

		for (uint32_t k = 0; spread && k < offered->holding_count; k++)
			add_holding(spread, (struct holding){ holder, offered->holdings[k].node,
							      offered->holdings[k].parities });
	}
}

static void free_offers(struct offers *offers)
{
	for (uint32_t i = 0; i < MOST_OFFERED; i++)
		spread_free(&offers->all[i]);
}

/* Adds the offers in a message. A message that cannot be read counts as no offer. */
static void read_offers(const struct ioshape_group *group, uint32_t rank,
			const struct base_buffer *body, struct group_spreads *spreads)
{
	struct offers offers = { .ranks = group->options.ranks };

	if (group_read_message(&offer_message, body, &offers))
		take_offers(spreads, &offers, group->ranks[rank].node);
	free_offers(&offers);
}

struct hearing {
	const struct ioshape_group *group;
	struct group_spreads *spreads;
};

static int found_offer(void *user, uint32_t rank, const struct base_buffer *body,
		       struct base_error *failure)
{
	struct hearing *hearing = user;

	(void)failure;
	read_offers(hearing->group, rank, body, hearing->spreads);
	return 0;
}

static int compare_spreads(const void *left, const void *right)
{
	const struct spread *a = left, *b = right;

	return a->serial == b->serial ? 0 : a->serial < b->serial ? 1 : -1;
}

static int hear_offers(struct group_round *round, struct group_spreads *spreads,
		       struct base_error *error)
{
	struct hearing hearing = { round->group, spreads };
	const struct group_collection collection = {
		.what = offer_message.name,
		.missing = "did not report which checkpoints its tier has",
		.leaders = true,
		.found = found_offer,
		.user = &hearing,
		.beats = true,
	};
	int ret = group_round_collect(round, &collection, error);

	if (!ret && spreads->count)
		qsort(spreads->all, spreads->count, sizeof(*spreads->all), compare_spreads);
	return ret;
}

static int list_candidates(const struct group_spreads *spreads, struct group_candidates *found,
			   struct base_error *error)
{
	found->all = calloc(MAX(spreads->count, 1), sizeof(*found->all));
	if (!found->all)
		return base_no_memory(error, "a list of checkpoints", spreads->count);
	for (; found->count < spreads->count; found->count++) {
		found->all[found->count].step = spreads->all[found->count].step;
		found->all[found->count].serial = spreads->all[found->count].serial;
	}
	return 0;
}

/* Collects the offers of all nodes on rank 0. `own` are those of its own node. */
static int hear_all(struct group_round *round, struct offers *own, struct group_spreads **spreads,
		    struct group_candidates *found, struct base_error *error)
{
	int ret;

	*spreads = calloc(1, sizeof(**spreads));
	if (!*spreads)
		return base_no_memory(error, "a list of what nodes have", sizeof(**spreads));
	take_offers(*spreads, own, round->group->ranks[0].node);
	ret = hear_offers(round, *spreads, error);
	return ret ? ret : list_candidates(*spreads, found, error);
}

static int look(struct group_round *round, struct group_spreads **spreads,
		struct group_candidates *found, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	struct offers offers = { .ranks = group->options.ranks };
	int ret;

	if (!group_leads_node(group, group->options.rank))
		return 0;
	offer_all(group, &offers);
	if (group->options.rank)
		ret = group_tell(round, &offer_message, &offers, error);
	else
		ret = hear_all(round, &offers, spreads, found, error);
	free_offers(&offers);
	return ret;
}

/* ---- Rank 0: which node gets which files ----------------------------------------------------- */

/* Finds the current holder of each node's files. If several have them, it takes the one with most
 * parities. */
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

static int check(const struct group_spreads *spreads, size_t at, struct base_error *error)
{
	const struct spread *spread = &spreads->all[at];
	const uint32_t nodes = spread->record.sets.nodes;
	uint32_t *holders = calloc(2 * (size_t)nodes, sizeof(*holders));
	bool well;

	if (!holders)
		return base_no_memory(error, "a list of what nodes have", nodes);
	find_holders(spread, holders, holders + nodes);
	well = parity_can_restore(&spread->record.sets, holders, holders + nodes);
	free(holders);
	if (well)
		return 0;
	return base_fail_reason_with(
		error, IOSHAPE_E_DAMAGED,
		"start the job on nodes that still have it, or load another checkpoint",
		"checkpoint %llu is on the tiers of %u nodes, and too many of them are lost",
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

/* Lists the files that ranks need and their node lacks. restoring->record remains that of the
 * spread. */
static int decide(const struct ioshape_group *group, const struct spread *spread,
		  struct restoring *restoring, struct base_error *error)
{
	const uint32_t nodes = spread->record.sets.nodes, ranks = group->options.ranks;

	restoring->step = spread->step;
	memcpy(restoring->attempt, spread->attempt, sizeof(restoring->attempt));
	restoring->record = spread->record;
	restoring->holders = calloc(nodes, sizeof(*restoring->holders));
	restoring->parities = calloc(nodes, sizeof(*restoring->parities));
	restoring->makings = calloc(ranks, sizeof(*restoring->makings));
	if (!restoring->holders || !restoring->parities || !restoring->makings)
		return base_no_memory(error, "a list of files to restore", nodes + ranks);
	find_holders(spread, restoring->holders, restoring->parities);
	for (uint32_t rank = 0; rank < ranks; rank++) {
		const uint32_t target = group->ranks[rank].node, node = spread->node_of_rank[rank];

		if (has(spread, target, node) || is_listed(restoring, target, node))
			continue;
		restoring->makings[restoring->count] =
			(struct parity_making){ target, node, turns_of(restoring, target) };
		restoring->count++;
	}
	return 0;
}

/* ---- The manifest ---------------------------------------------------------------------------- */

/* Returns the node that sends the manifest: the holder of the first node whose files exist. Returns
 * PARITY_NOWHERE if there is none. */
static uint32_t giver_of(const struct restoring *restoring)
{
	for (uint32_t node = 0; node < restoring->record.sets.nodes; node++) {
		if (restoring->holders[node] != PARITY_NOWHERE)
			return restoring->holders[node];
	}
	return PARITY_NOWHERE;
}

static int read_own(const struct restoring *restoring, struct base_buffer *text,
		    struct base_error *error)
{
	struct io_folder folder = IO_NO_FOLDER;
	int ret = io_folder_open(&folder, restoring->folder, error);

	if (!ret)
		ret = io_folder_get(&folder, FORMAT_MANIFEST_NAME, FORMAT_MAX_MANIFEST_BYTES, text,
				    NULL, error);
	io_folder_close(&folder);
	return ret;
}

/* Compares the manifest from another node with rank 0's decision, before any of it is used. */
static int read_given(const struct restoring *restoring, const struct given *given,
		      struct format_manifest *manifest, struct base_error *error)
{
	const char *path = restoring->folder;
	int ret = given->failure.code;

	if (ret)
		return base_propagate(error, &given->failure);
	ret = format_manifest_decode(manifest, (const char *)given->text.data, given->text.bytes,
				     path, error);
	if (ret)
		return ret;
	if (manifest->step != restoring->step ||
	    manifest->rank_count != restoring->group->options.ranks ||
	    strcmp(manifest->attempt, restoring->attempt) != 0)
		return base_fail_reason_with(error, IOSHAPE_E_DAMAGED, "load another checkpoint",
					     "cannot restore \"%s\": the node that has it sent the "
					     "manifest of another checkpoint",
					     path);
	return check_record(&restoring->record, manifest, restoring->record.sets.nodes, path,
			    error);
}

static int get_manifest(struct group_round *round, const struct restoring *restoring,
			struct given *given, struct format_manifest *manifest,
			struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	const uint32_t giver = giver_of(restoring);
	int ret;

	if (giver == PARITY_NOWHERE)
		return base_fail_reason(error, -EPROTO, "cannot read the message of rank 0");
	if (group->options.rank != group->leaders[giver]) {
		ret = group_hear(round, &manifest_message, group->leaders[giver], given, error);
	} else {
		read_own(restoring, &given->text, &given->failure);
		ret = group_tell(round, &manifest_message, given, error);
	}
	return ret ? ret : read_given(restoring, given, manifest, error);
}

/* ---- Restoring on this node ------------------------------------------------------------------ */

/* Returns the path of a step in a directory as *path, to be freed; NULL if there is no memory. */
static int step_path(const char *directory, uint64_t step, char **path, struct base_error *error)
{
	char name[GROUP_STEP_NAME_BYTES];

	group_step_name(name, step);
	if (asprintf(path, "%s/%s", directory, name) >= 0)
		return 0;
	*path = NULL;
	return base_no_memory(error, "a path", strlen(directory));
}

/* Prepares the folder of the checkpoint on this tier. Another checkpoint of that step is removed.
 * Files of this checkpoint stay. */
static int prepare(struct ioshape_group *group, const struct restoring *restoring,
		   const struct format_manifest *manifest, struct base_error *error)
{
	struct io_folder directory = IO_NO_FOLDER;
	struct group_checkpoint there;
	char name[GROUP_STEP_NAME_BYTES], *path;
	bool same = false;
	int ret = 0;

	group_step_name(name, restoring->step);
	if (!io_folder_open(&directory, group->near, NULL) &&
	    !group_checkpoint_open(&there, &directory, name, restoring->step, NULL)) {
		same = !strcmp(there.manifest.attempt, manifest->attempt);
		group_checkpoint_close(&there);
	}
	io_folder_close(&directory);
	if (!same) {
		ret = step_path(group->directory, restoring->step, &path, error);
		if (!ret)
			ret = reserve_for_group(group_tier_of(&group->options), path, 0, 1, error);
		free(path);
	}
	return ret ? ret : io_folder_make(restoring->folder, error);
}

/* Writes the manifest last, which makes the checkpoint complete. */
static int complete(const struct restoring *restoring, const struct base_buffer *text,
		    struct base_error *error)
{
	struct io_folder folder = IO_NO_FOLDER;
	struct io_entry entry;
	int ret = io_folder_open(&folder, restoring->folder, error);

	if (!ret && io_folder_look(&folder, FORMAT_MANIFEST_NAME, &entry, NULL))
		ret = io_folder_put(&folder, FORMAT_MANIFEST_NAME, text->data, text->bytes, error);
	if (!ret)
		ret = io_folder_sync(&folder, error);
	io_folder_close(&folder);
	return ret;
}

/* Records that what is here waits to be drained. This covers files of a node that is lost, and of a
 * process that died before it recorded them. */
static int keep_here(struct ioshape_group *group, const struct restoring *restoring, bool restored,
		     struct base_error *error)
{
	const struct ioshape_group_options *options = &group->options;
	char *path;
	int ret = step_path(group->directory, restoring->step, &path, error);

	if (!ret)
		ret = keep_path(group_tier_of(options), path, options->keep_last,
				options->keep_every, !restored, error);
	free(path);
	if (ret != -ENOENT || restored)
		return ret;
	/* This node has no files of the checkpoint. */
	base_error_begin(error);
	return 0;
}

static int exchange(struct group_round *round, const struct restoring *restoring,
		    const struct format_manifest *manifest, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	struct parity_exchange exchange = {
		.round = round,
		.manifest = manifest,
		.record = &restoring->record,
		.holders = restoring->holders,
		.parities = restoring->parities,
		.makings = restoring->makings,
		.count = restoring->count,
		.folder = restoring->folder,
	};

	if (!group->options.comm || group->comm_failed)
		return base_fail_reason(
			error, -ENOTCONN,
			"a node lacks files of checkpoint %llu, and nodes cannot send "
			"data to each other",
			(unsigned long long)restoring->step);
	return parity_exchange_run(&exchange, error);
}

/* Restores on this node. The first rank of each node calls it. */
static int restore_here(struct group_round *round, struct restoring *restoring,
			struct base_error *error)
{
	struct ioshape_group *group = round->group;
	const bool gets = turns_of(restoring, group->ranks[group->options.rank].node) > 0;
	struct format_manifest manifest = { 0 };
	struct given given = { 0 };
	int ret;

	if (!restoring->count)
		return keep_here(group, restoring, false, error);
	ret = step_path(group->near, restoring->step, &restoring->folder, error);
	if (ret)
		return ret;
	ret = get_manifest(round, restoring, &given, &manifest, error);
	if (!ret && gets)
		ret = prepare(group, restoring, &manifest, error);
	if (!ret)
		ret = exchange(round, restoring, &manifest, error);
	if (!ret && gets)
		ret = complete(restoring, &given.text, error);
	if (!ret)
		ret = keep_here(group, restoring, gets, error);
	format_manifest_free(&manifest);
	base_buffer_free(&given.text);
	return ret;
}

/* ---- Restoring on all ranks ------------------------------------------------------------------ */

static int follow(struct group_round *round, struct base_error *error)
{
	struct restoring restoring = { .group = round->group };
	struct group_answer answer = { 0 };
	int ret;

	if (!group_leads_node(round->group, round->group->options.rank))
		return 0;
	ret = group_hear(round, &restore_message, 0, &restoring, error);
	if (!ret) {
		restore_here(round, &restoring, &answer.failure);
		ret = group_tell(round, &group_restored, &answer, error);
	}
	restoring_free(&restoring);
	return ret;
}

static int restore(struct group_round *round, const struct group_spreads *spreads, size_t at,
		   struct base_error *failure, struct base_error *error)
{
	struct restoring restoring = { .group = round->group };
	struct group_answers answers = { 0 };
	int ret;

	if (round->group->options.rank)
		return follow(round, error);
	ret = decide(round->group, &spreads->all[at], &restoring, error);
	if (!ret)
		ret = group_tell(round, &restore_message, &restoring, error);
	if (!ret) {
		restore_here(round, &restoring, failure);
		ret = group_collect_answers(round, &group_restored,
					    "did not report whether it has its files", &answers,
					    error);
		if (answers.failure.code && !failure->code)
			*failure = answers.failure;
	}
	restoring.record = (struct parity_record){ 0 };
	restoring_free(&restoring);
	return ret;
}

/* ---- Table of the functions for groups ------------------------------------------------------- */

const struct group_tier_ops tier_for_groups = {
	.find = find_for_group,
	.reserve_space = reserve_for_group,
	.keep = keep_for_group,
	.plan = make_plan,
	.protect = protect_nodes,
	.look = look,
	.check = check,
	.restore = restore,
	.free = free_spreads,
};
