/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes that protect each other's files: sets of nodes, elements that restore lost ones, and
 * records.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
/*
 * Included, because the functions that handle messages are static, and this test sends wrong ones.
 */
#include "tier/nodes.c"
#include "tier/parity.c"

#include <ioshape/group.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NODES 31u
#define ELEMENT_BYTES 257u

static struct test_case protecting = { .name = "parity" };

/* Each node is in a rack of its own. */
static const char *const same[MOST_NODES] = {
	"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p",
	"q", "r", "s", "t", "u", "v", "w", "x", "y", "z", "0", "1", "2", "3", "4",
};

/* All elements of a set. */
struct elements {
	struct parity_sets sets;
	uint32_t holders[MOST_NODES], parities[MOST_NODES];
	uint8_t bytes[MOST_NODES][MOST_NODES][ELEMENT_BYTES];
};

static void make_element(const struct elements *elements, uint32_t node, uint32_t element,
			 bool fresh, uint8_t into[ELEMENT_BYTES])
{
	const struct parity_set set = parity_set_of(&elements->sets, node);
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count;

	REQUIRE(!sources_of(&set, elements->holders, elements->parities, element, fresh, sources,
			    &count));
	memset(into, 0, ELEMENT_BYTES);
	for (uint32_t i = 0; i < count; i++) {
		REQUIRE(elements->holders[sources[i].node] != PARITY_NOWHERE);
		add_multiple(into, elements->bytes[sources[i].node][sources[i].element],
			     ELEMENT_BYTES, sources[i].coefficient);
	}
}

/* Returns elements as nodes save them, with the parities that nodes make for each other. */
static struct elements *fill(uint32_t nodes, uint32_t parity, uint32_t set_nodes)
{
	struct elements *elements = calloc(1, sizeof(*elements));

	ck_assert_ptr_nonnull(elements);
	ck_assert_int_eq(parity_sets_make(&elements->sets, nodes, parity, set_nodes, same), 0);
	for (uint32_t node = 0; node < nodes; node++) {
		const struct parity_set set = parity_set_of(&elements->sets, node);

		elements->holders[node] = node;
		for (uint32_t i = 0; i < parity_segments_of(&set); i++)
			for (uint32_t j = 0; j < ELEMENT_BYTES; j++)
				elements->bytes[node][i][j] =
					(uint8_t)(node * 37 + i * 11 + j * (node + 3));
	}
	for (uint32_t node = 0; node < nodes; node++) {
		const struct parity_set set = parity_set_of(&elements->sets, node);

		for (uint32_t i = parity_segments_of(&set); i < set.count; i++)
			make_element(elements, node, i, true, elements->bytes[node][i]);
		elements->parities[node] = set.parity;
	}
	return elements;
}

static void check_all(struct elements *elements)
{
	uint8_t made[ELEMENT_BYTES];

	REQUIRE(parity_can_restore(&elements->sets, elements->holders, elements->parities));
	for (uint32_t node = 0; node < elements->sets.nodes; node++) {
		const struct parity_set set = parity_set_of(&elements->sets, node);

		for (uint32_t i = 0; i < set.count; i++) {
			make_element(elements, node, i, false, made);
			REQUIRE(!memcmp(made, elements->bytes[node][i], ELEMENT_BYTES));
		}
	}
}

/* By enum ioshape_parity. Leftover nodes make some sets larger. */
static const struct {
	uint32_t parity, set_nodes, least, most;
} shapes[] = {
	{ 1, 2, 2, 9 },  { 1, 4, 2, 11 }, { 1, 8, 2, 17 },
	{ 2, 4, 2, 11 }, { 2, 6, 3, 13 }, { 2, 8, 3, 17 },
};

static void lose_two(struct elements *elements, uint32_t lost, uint32_t other)
{
	const struct parity_set one = parity_set_of(&elements->sets, lost),
				two = parity_set_of(&elements->sets, other);

	elements->holders[other] = PARITY_NOWHERE;
	if (one.nodes != two.nodes || one.parity == 2)
		check_all(elements);
	else
		REQUIRE(!parity_can_restore(&elements->sets, elements->holders,
					    elements->parities));
	elements->holders[other] = other;
}

static void lose_any(uint32_t nodes, uint32_t parity, uint32_t set_nodes)
{
	struct elements *elements = fill(nodes, parity, set_nodes);

	for (uint32_t lost = 0; lost < nodes; lost++) {
		elements->holders[lost] = PARITY_NOWHERE;
		check_all(elements);
		for (uint32_t other = lost + 1; other < nodes; other++)
			lose_two(elements, lost, other);
		elements->holders[lost] = lost;
	}
	free(elements->sets.order);
	free(elements);
}

TEST(protecting, any_nodes_that_a_set_may_lose_follow_from_the_others)
{
	for (size_t i = 0; i < ARRAY_LENGTH(shapes); i++) {
		for (uint32_t nodes = shapes[i].least; nodes <= shapes[i].most; nodes++)
			lose_any(nodes, shapes[i].parity, shapes[i].set_nodes);
	}
}

TEST(protecting, parities_that_could_not_be_made_make_up_for_nothing)
{
	struct elements *elements = fill(4, 1, 4);

	elements->holders[1] = PARITY_NOWHERE;
	ck_assert(parity_can_restore(&elements->sets, elements->holders, elements->parities));
	elements->parities[2] = 0;
	ck_assert(!parity_can_restore(&elements->sets, elements->holders, elements->parities));
	elements->holders[1] = 1;
	ck_assert(parity_can_restore(&elements->sets, elements->holders, elements->parities));
	free(elements->sets.order);
	free(elements);
}

TEST(protecting, a_partner_has_a_copy)
{
	struct elements *elements = fill(2, 1, 2);

	for (uint32_t node = 0; node < 2; node++)
		ck_assert_mem_eq(elements->bytes[node][1], elements->bytes[1 - node][0],
				 ELEMENT_BYTES);
	free(elements->sets.order);
	free(elements);
}

TEST(protecting, members_of_a_set_are_in_different_racks)
{
	static const char *const racks[] = { "r1", "r1", "r1", "r1", "r2", "r2",
					     "r2", "r2", "r3", "r3", "r3", "r3" };
	struct parity_sets sets;
	bool seen[12] = { false };

	ck_assert_int_eq(parity_sets_make(&sets, 12, 1, 3, racks), 0);
	for (uint32_t node = 0; node < 12; node++) {
		const struct parity_set set = parity_set_of(&sets, node);

		ck_assert_uint_eq(set.count, 3);
		ck_assert_uint_eq(set.nodes[set.position], node);
		ck_assert(!seen[sets.order[node]]);
		seen[sets.order[node]] = true;
		for (uint32_t i = 0; i < 3; i++)
			for (uint32_t j = 0; j < i; j++)
				ck_assert_str_ne(racks[set.nodes[i]], racks[set.nodes[j]]);
	}
	free(sets.order);
}

/* ---- Records --------------------------------------------------------------------------------- */

static struct base_buffer text_of(struct parity_record *record)
{
	static uint32_t node_of_file[] = { 0, 0, 1, 2, 4, 3 };
	struct base_buffer text = { 0 };

	*record = (struct parity_record){ .node = 3,
					  .parities = 1,
					  .file_count = ARRAY_LENGTH(node_of_file),
					  .node_of_file = node_of_file };
	ck_assert_int_eq(parity_sets_make(&record->sets, 5, 1, 2, same), 0);
	ck_assert_int_eq(parity_record_encode(&text, record), 0);
	return text;
}

TEST(protecting, a_record_is_read_as_it_was_written)
{
	struct parity_record record, read;
	struct base_error error = { 0 };
	struct base_buffer text = text_of(&record);

	ck_assert_uint_eq(text.bytes % PARITY_RECORD_UNIT, 0);
	ck_assert_uint_eq(parity_record_bytes(text.data, PARITY_RECORD_UNIT), text.bytes);
	ck_assert_int_eq(parity_record_decode(&read, text.data, text.bytes, "text", &error), 0);
	ck_assert_uint_eq(read.node, 3);
	ck_assert_uint_eq(read.parities, 1);
	ck_assert_uint_eq(read.sets.set_nodes, 2);
	ck_assert_mem_eq(read.sets.order, record.sets.order, 5 * sizeof(uint32_t));
	ck_assert_uint_eq(read.file_count, record.file_count);
	ck_assert_mem_eq(read.node_of_file, record.node_of_file, 6 * sizeof(uint32_t));
	parity_record_free(&read);
	free(record.sets.order);
	base_buffer_free(&text);
}

/* Every significant byte. */
TEST(protecting, a_damaged_record_is_refused)
{
	struct parity_record record, read;
	struct base_buffer text = text_of(&record);

	for (size_t at = 0; at < 20 + 8 * (6 + 5 + 6); at++) {
		struct base_error error = { 0 };
		int ret;

		text.data[at] ^= 0x41;
		ret = parity_record_decode(&read, text.data, text.bytes, "text", &error);
		ck_assert_msg(ret == IOSHAPE_E_DAMAGED || ret == -EOPNOTSUPP, "byte %zu: %d", at,
			      ret);
		ck_assert_int_eq(ret == -EOPNOTSUPP, at >= 8 && at < 12);
		text.data[at] ^= 0x41;
	}
	free(record.sets.order);
	base_buffer_free(&text);
}

TEST(protecting, a_record_that_is_cut_off_is_refused)
{
	struct parity_record record, read;
	struct base_buffer text = text_of(&record);

	for (size_t bytes = 0; bytes < text.bytes; bytes++) {
		struct base_error error = { 0 };

		ck_assert_int_eq(parity_record_decode(&read, text.data, bytes, "text", &error),
				 IOSHAPE_E_DAMAGED);
	}
	free(record.sets.order);
	base_buffer_free(&text);
}

/* ---- Messages from other processes ----------------------------------------------------------- */

#define RANKS 4u

static struct group_rank ranks[RANKS];

static struct ioshape_group *a_group(void)
{
	static struct ioshape_group group = { .ranks = ranks, .node_count = RANKS };

	group.options.ranks = RANKS;
	for (uint32_t rank = 0; rank < RANKS; rank++)
		ranks[rank].node = rank;
	return &group;
}

/* Possible errors in the manifest that a node sends. */
enum lie { NO_LIE, OTHER_FILES, OTHER_STEP, OTHER_ATTEMPT, OTHER_RANKS, LIES };

/* Returns the text of a manifest of step 7 with a file for each rank. */
static struct base_buffer what_a_node_gives(enum lie lie)
{
	struct format_manifest_file files[RANKS] = { 0 };
	struct format_manifest_shard shards[RANKS] = { 0 };
	char file_names[RANKS][FORMAT_SHARD_NAME_BYTES];
	struct format_manifest manifest = {
		.step = lie == OTHER_STEP ? 8 : 7,
		.mode = IOSHAPE_MODE_EACH,
		.rank_count = lie == OTHER_RANKS ? RANKS - 1 : RANKS,
		.file_count = RANKS,
		.files = files,
		.shards = shards,
	};
	struct base_buffer text = { 0 };

	snprintf(manifest.attempt, sizeof(manifest.attempt), lie == OTHER_ATTEMPT ? "0b" : "0a");
	for (uint32_t i = 0; i < RANKS; i++) {
		format_shard_name(file_names[i], i);
		files[i] = (struct format_manifest_file){ file_names[i], 10, 1, false };
		shards[i] = (struct format_manifest_shard){ .file = i, .bytes = 10, .crc32 = 1 };
	}
	ck_assert_int_eq(format_manifest_encode(&text, &manifest), 0);
	return text;
}

LOOP_TEST(protecting, what_a_node_gives_must_fit_what_rank_0_says, NO_LIE, LIES)
{
	char folder[] = "folder";
	struct restoring restoring = {
		.group = a_group(),
		.step = 7,
		.attempt = "0a",
		.record = { .sets.nodes = RANKS,
			    .file_count = _i == OTHER_FILES ? RANKS + 1 : RANKS },
		.folder = folder,
	};
	struct given given = { .text = what_a_node_gives((enum lie)_i) };
	struct format_manifest manifest = { 0 };
	struct base_error error = { 0 };

	ck_assert_int_eq(read_given(&restoring, &given, &manifest, &error),
			 _i == NO_LIE ? 0 : IOSHAPE_E_DAMAGED);
	format_manifest_free(&manifest);
	base_buffer_free(&given.text);
}

/* Returns a record of so many nodes that have one file. */
static struct parity_record record_of(uint32_t nodes)
{
	static uint32_t node_of_file;
	struct parity_record record = { .file_count = 1, .node_of_file = &node_of_file };

	ck_assert_int_eq(parity_sets_make(&record.sets, nodes, 1, 2, same), 0);
	return record;
}

static const struct {
	uint32_t nodes, holder, node;
	bool fits;
} said[] = {
	{ RANKS, 0, 3, true },      { 1, PARITY_NOWHERE, 0, true },
	{ RANKS + 1, 0, 0, false }, /* more nodes than ranks */
	{ RANKS, RANKS, 0, false }, { RANKS, 0, RANKS, false },
};

/*
 * Rank 0 says that there are so many nodes, each with its own files and without parities. It also
 * says what node 0 gets.
 */
LOOP_TEST(protecting, what_rank_0_says_must_fit_the_job, 0, (int)ARRAY_LENGTH(said))
{
	uint32_t holders[MOST_NODES], parities[MOST_NODES] = { 0 };
	struct parity_making making = { 0, said[_i].node, 0 };
	struct restoring says = {
		.group = a_group(),
		.step = 7,
		.attempt = "0a",
		.record = record_of(said[_i].nodes),
		.holders = holders,
		.parities = parities,
		.count = 1,
		.makings = &making,
	};
	struct restoring hears = { .group = a_group() };
	struct group_body body = { 0 };

	for (uint32_t node = 0; node < said[_i].nodes; node++)
		holders[node] = said[_i].holder;
	group_write_message(&restore_message, &body, &says);
	ck_assert_int_eq(group_read_message(&restore_message, &body.bytes, &hears), said[_i].fits);
	restoring_free(&hears);
	free(says.record.sets.order);
	base_buffer_free(&body.bytes);
}

/* A node's offer for one checkpoint. */
struct offered {
	uint32_t nodes; /* number of nodes of the checkpoint, by its record */
	uint32_t node_of_rank, count, node, parities; /* `count` equal holdings */
};

static void offer_of_rank(uint32_t rank, const struct offered *offered,
			  struct group_spreads *spreads)
{
	uint32_t node_of_rank[RANKS];
	struct holding holdings[2 * RANKS];
	struct offers offers = {
		.ranks = RANKS,
		.count = 1,
		.all[0] = { .step = 7,
			    .serial = 1,
			    .attempt = "0a",
			    .record = record_of(offered->nodes),
			    .node_of_rank = node_of_rank,
			    .holding_count = offered->count,
			    .holdings = holdings },
	};
	struct group_body body = { 0 };

	for (uint32_t i = 0; i < RANKS; i++)
		node_of_rank[i] = offered->node_of_rank;
	for (uint32_t i = 0; i < 2 * RANKS; i++)
		holdings[i] = (struct holding){ 0, offered->node, offered->parities };
	group_write_message(&offer_message, &body, &offers);
	read_offers(a_group(), rank, &body.bytes, spreads);
	free(offers.all[0].record.sets.order);
	base_buffer_free(&body.bytes);
}

static const struct {
	struct offered offered;
	size_t spreads;
	uint32_t holdings;
} offers[] = {
	{ { RANKS, 3, 1, 3, 1 }, 1, 1 },
	{ { RANKS + 1, 3, 1, 3, 1 }, 0, 0 },     /* more nodes than ranks */
	{ { RANKS, RANKS, 1, 3, 1 }, 0, 0 },     /* a rank without a node */
	{ { RANKS, 3, RANKS + 1, 3, 1 }, 0, 0 }, /* more nodes held than there are */
	{ { RANKS, 3, 1, RANKS, 1 }, 0, 0 },     /* holds no valid node */
	{ { RANKS, 3, 1, 3, 2 }, 0, 0 },         /* more parities than a set has */
};

LOOP_TEST(protecting, what_a_node_offers_must_fit_the_job, 0, (int)ARRAY_LENGTH(offers))
{
	struct group_spreads spreads = { 0 };

	offer_of_rank(0, &offers[_i].offered, &spreads);
	ck_assert_uint_eq(spreads.count, offers[_i].spreads);
	ck_assert_uint_eq(spreads.count ? spreads.all[0].holding_count : 0, offers[_i].holdings);
	empty(&spreads);
}

TEST(protecting, offers_that_disagree_about_the_nodes_are_not_put_together)
{
	const struct offered one = { RANKS, 0, 1, 0, 0 }, other = { RANKS - 1, 0, 1, 0, 0 };
	struct group_spreads spreads = { 0 };

	offer_of_rank(0, &one, &spreads);
	offer_of_rank(1, &one, &spreads);
	ck_assert_uint_eq(spreads.count, 1);
	offer_of_rank(2, &other, &spreads);
	ck_assert_uint_eq(spreads.count, 2);
	ck_assert_uint_eq(spreads.all[0].holding_count, 2);
	empty(&spreads);
}

/* A record of 64 MiB names millions of nodes, so the time per node must be constant. */
TEST(protecting, very_many_nodes_take_no_longer_than_they_are_many)
{
	const uint32_t nodes = 1000000;
	struct parity_sets sets = { nodes, 1, 2, calloc(nodes, sizeof(uint32_t)) };
	uint32_t *numbers = calloc(2 * (size_t)nodes, sizeof(*numbers));

	ck_assert(sets.order && numbers);
	for (uint32_t node = 0; node < nodes; node++)
		sets.order[node] = node;
	ck_assert(parity_can_restore(&sets, numbers, numbers + nodes));
	free(numbers);
	free(sets.order);
}

TEST(protecting, a_file_of_parities_is_known_by_its_name)
{
	char name[GROUP_PARITY_NAME_BYTES];
	uint32_t node;

	group_parity_name(name, 7);
	ck_assert_str_eq(name, "node-00007.parity");
	ck_assert(group_parse_parity_name(name, &node));
	ck_assert_uint_eq(node, 7);
	ck_assert(!group_parse_parity_name("node-7.parity", &node));
	ck_assert(!group_parse_parity_name("node-00007.parity2", &node));
	ck_assert(!group_parse_parity_name("node-00007.zip", &node));
}
