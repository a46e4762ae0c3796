/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Builds messages from any numbers, as nodes exchange them while a checkpoint on their tiers is
 * restored: offers, decisions of rank 0, the manifest with its record. Accepted messages are used
 * like those of a real exchange.
 */
#define _GNU_SOURCE
#include <ioshape/group.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "input.h"
/* Included, because the functions that handle messages are static. */
#include "tier/nodes.c"
#include "tier/parity.c"

static void put_number(struct group_body *body, uint64_t number)
{
	struct group_payload writing = { .body = body };

	group_pass_number(&writing, &number);
}

static void put_text(struct group_body *body, const char *text)
{
	struct group_payload writing = { .body = body };

	/* Writing a text does not change it. */
	group_pass_text(&writing, (char *)(uintptr_t)text, 0);
}

static void put_bytes(struct group_body *body, struct base_buffer *bytes)
{
	struct group_payload writing = { .body = body };

	group_pass_bytes(&writing, bytes);
}

#define MOST_RANKS 12u
#define MOST_FILES 12u
#define MOST_SAID 8u /* offers, and nodes in each */

static const char *const attempts[] = { "0a", "0b", "not one" };

/* Returns mostly a small number, so that values repeat, and now and then any number. */
static uint64_t take_small(struct input *input)
{
	const uint64_t number = take(input, 1);

	return number < 224 ? number % 16 : number < 240 ? PARITY_NOWHERE : take(input, 8);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static void say_numbers(struct group_body *body, struct input *input, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++)
		put_number(body, take_small(input));
}

/* Adds the nodes in some order, rarely with other numbers. */
static void say_order(struct group_body *body, struct input *input, uint64_t nodes)
{
	const uint64_t how = take(input, 1);

	if (how > 250)
		say_numbers(body, input, nodes);
	for (uint64_t i = 0; how <= 250 && i < nodes; i++)
		put_number(body, (i + how) % nodes);
}

static void say_record(struct group_body *body, struct input *input)
{
	uint64_t nodes, files;

	put_number(body, take_small(input)); /* node */
	put_number(body, take(input, 1) % 4);
	nodes = take(input, 1) % (2 * MOST_RANKS);
	put_number(body, nodes);
	put_number(body, take(input, 1) % 4);
	put_number(body, take(input, 1) % 20);
	say_order(body, input, nodes);
	files = take(input, 1) % (MOST_FILES + 1);
	put_number(body, files);
	say_numbers(body, input, files);
}

static const char *take_attempt(struct input *input)
{
	return attempts[take(input, 1) % ARRAY_LENGTH(attempts)];
}

static void say_offers(struct group_body *body, struct input *input, uint32_t ranks)
{
	const uint64_t offers = take(input, 1) % MOST_SAID;

	put_number(body, offers);
	for (uint64_t i = 0; i < offers; i++) {
		const uint64_t count = 1 + take(input, 1) % MOST_SAID;

		say_numbers(body, input, 2); /* step, serial number */
		put_text(body, take_attempt(input));
		say_record(body, input);
		say_numbers(body, input, ranks);
		put_number(body, count);
		say_numbers(body, input, 2 * count);
	}
}

static void say_restoring(struct group_body *body, struct input *input)
{
	const uint64_t nodes = take(input, 1) % (2 * MOST_RANKS), count = take(input, 1) % 16;

	put_number(body, take_small(input));
	put_text(body, take_attempt(input));
	say_record(body, input);
	say_numbers(body, input, 2 * nodes);
	put_number(body, count);
	say_numbers(body, input, 3 * count);
}

/* Adds a manifest whose ranks have a file each, or share files. */
static void say_manifest(struct group_body *body, struct input *input, uint32_t ranks)
{
	char names[MOST_FILES][32];
	struct format_manifest_file files[MOST_FILES] = { 0 };
	struct format_manifest_shard shards[MOST_RANKS + 1] = { 0 };
	struct format_manifest manifest = {
		.step = take_small(input),
		.mode = IOSHAPE_MODE_NODE,
		.file_count = 1 + (uint32_t)take(input, 1) % MOST_FILES,
		.rank_count = ranks + (take(input, 1) == 1),
		.files = files,
		.shards = shards,
	};
	struct base_buffer text = { 0 };

	snprintf(manifest.attempt, sizeof(manifest.attempt), "%s", take_attempt(input));
	for (uint32_t i = 0; i < manifest.file_count; i++) {
		snprintf(names[i], sizeof(names[i]), "file-%u", i);
		files[i] = (struct format_manifest_file){
			.name = names[i],
			.bytes = take_amount(input, MOST_RANKS + 1, UINT64_MAX),
			.bundle = true,
		};
	}
	for (uint32_t i = 0; i < manifest.rank_count; i++)
		shards[i] = (struct format_manifest_shard){
			.file = (uint32_t)take(input, 1) % manifest.file_count,
			.offset = i,
			.bytes = 1,
		};
	put_number(body, 0); /* no error */
	if (format_manifest_encode(&text, &manifest))
		text.bytes = 0;
	put_bytes(body, &text);
	base_buffer_free(&text);
}

/* ---- Use of accepted messages ---------------------------------------------------------------- */

static void try_offers(const struct ioshape_group *group, struct input *input)
{
	struct group_spreads spreads = { 0 };
	struct base_error error = { 0 };

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		struct group_body body = { 0 };

		say_offers(&body, input, group->options.ranks);
		read_offers(group, rank, &body.bytes, &spreads);
		base_buffer_free(&body.bytes);
	}
	for (size_t i = 0; i < spreads.count; i++) {
		const struct spread *spread = &spreads.all[i];

		MUST(spread->record.sets.nodes <= group->options.ranks);
		for (uint32_t rank = 0; rank < group->options.ranks; rank++)
			MUST(spread->node_of_rank[rank] < spread->record.sets.nodes);
		check(&spreads, i, &error);
	}
	empty(&spreads);
}

/* Computes the sources of all elements, as parity.c does for all blocks. */
static void use_making(const struct restoring *restoring, const struct format_manifest *manifest,
		       const struct parity_making *making)
{
	const struct parity_record *record = &restoring->record;
	const struct parity_set set = parity_set_of(&record->sets, making->node);
	const uint64_t segment = parity_segment_bytes(manifest, record, &set);
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count, leaders = 0;

	MUST(set.nodes[set.position] == making->node &&
	     making->target < restoring->group->node_count);
	/* No sum of sizes in a set may overflow. */
	MUST(segment <= UINT64_MAX / PARITY_MOST_DATA);
	for (uint32_t i = 0; i < set.count; i++)
		leaders += restoring->holders[set.nodes[i]] != PARITY_NOWHERE;
	for (uint32_t element = 0; element < set.count; element++) {
		if (sources_of(&set, restoring->holders, restoring->parities, element, false,
			       sources, &count))
			continue;
		MUST(count && count <= parity_segments_of(&set) && leaders);
		for (uint32_t i = 0; i < count; i++)
			MUST(restoring->holders[sources[i].node] < restoring->group->node_count &&
			     sources[i].element < set.count);
	}
}

static void try_restoring(const struct ioshape_group *group, struct input *input)
{
	struct restoring restoring = { .group = group, .folder = strdup("folder") };
	struct group_body said = { 0 }, text = { 0 };
	struct format_manifest manifest = { 0 };
	struct base_error error = { 0 };
	struct given given = { 0 };
	bool fits;

	say_restoring(&said, input);
	say_manifest(&text, input, group->options.ranks);
	fits = group_read_message(&restore_message, &said.bytes, &restoring) &&
	       group_read_message(&manifest_message, &text.bytes, &given);
	if (fits) {
		const int ret = read_given(&restoring, &given, &manifest, &error);

		MUST(ret == error.code);
		fits = !ret;
	}
	for (uint32_t i = 0; fits && i < restoring.count; i++)
		use_making(&restoring, &manifest, &restoring.makings[i]);
	format_manifest_free(&manifest);
	base_buffer_free(&given.text);
	restoring_free(&restoring);
	base_buffer_free(&text.bytes);
	base_buffer_free(&said.bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct input input = { data, bytes };
	struct group_rank ranks[MOST_RANKS] = { 0 };
	struct ioshape_group group = { .ranks = ranks };

	group.options.ranks = 1 + (uint32_t)take(&input, 1) % MOST_RANKS;
	group.node_count = 1 + (uint32_t)take(&input, 1) % group.options.ranks;
	for (uint32_t rank = 0; rank < group.options.ranks; rank++)
		ranks[rank].node = rank % group.node_count;
	try_restoring(&group, &input);
	try_offers(&group, &input);
	return 0;
}
