/* SPDX-License-Identifier: Apache-2.0 */
/* Which nodes protect each other, which elements make up for a lost one, and how both are written
 * down in front of the parities of a node. */
#include "tier/parity.h"

#include <errno.h>
#include <isa-l/erasure_code.h>
#include <stdlib.h>
#include <string.h>

/* ---- Reed-Solomon codes ---------------------------------------------------------------------- */

/* By ISA-L: the first parity is an exclusive or, the second that of RAID 6. */

/* Of an even length, while a piece of the sum is in the caches nearest to the core. */
#define PIECE_BYTES (64 * KIB)
#define TABLE_BYTES 32

void parity_add(void *sum, const void *element, size_t bytes, uint8_t coefficient)
{
	uint8_t table[TABLE_BYTES], *to = sum;
	const uint8_t *from = element;

	ec_init_tables(1, 1, &coefficient, table);
	for (size_t piece; bytes; to += piece, from += piece, bytes -= piece) {
		piece = MIN(bytes, PIECE_BYTES);
		/* The cast takes away a const that ISA-L forgot. */
		ec_encode_data_update((int)piece, 1, 1, 0, table, (uint8_t *)(uintptr_t)from, &to);
	}
}

/*
 * Finds the coefficients by which the element `wanted` is the sum of `data` others, whose numbers
 * `have` are. False if it does not follow from them.
 */
static bool solve(unsigned data, const unsigned *have, unsigned wanted, uint8_t *coefficients)
{
	uint8_t rows[(PARITY_MOST_DATA + PARITY_MOST) * PARITY_MOST_DATA];
	uint8_t known[PARITY_MOST_DATA * PARITY_MOST_DATA],
		inverse[PARITY_MOST_DATA * PARITY_MOST_DATA];

	gf_gen_rs_matrix(rows, (int)(data + PARITY_MOST), (int)data);
	for (unsigned i = 0; i < data; i++)
		memcpy(known + i * data, rows + have[i] * data, data);
	if (gf_invert_matrix(known, inverse, (int)data))
		return false;
	/* The row of what is wanted, in terms of what there is. */
	for (unsigned i = 0; i < data; i++) {
		coefficients[i] = 0;
		for (unsigned j = 0; j < data; j++)
			coefficients[i] ^= gf_mul(rows[wanted * data + j], inverse[j * data + i]);
	}
	return true;
}

/* ---- Sets ------------------------------------------------------------------------------------ */

/* The nodes of one domain, in order, which are taken one at a time. */
struct domain {
	uint32_t first; /* node, by which domains are in order */
	uint32_t taken;
};

static uint32_t next_of_domain(const char *const *domains, uint32_t nodes, const char *name,
			       uint32_t from)
{
	while (from < nodes && strcmp(domains[from], name))
		from++;
	return from;
}

/* One node of each domain, again and again. Nodes next to each other are in different ones, as
 * long as there are several left. */
static void mix(struct parity_sets *sets, const char *const *domains, struct domain *all,
		uint32_t count)
{
	uint32_t filled = 0;

	while (filled < sets->nodes) {
		for (uint32_t i = 0; i < count; i++) {
			if (all[i].taken >= sets->nodes)
				continue;
			sets->order[filled++] = all[i].taken;
			all[i].taken = next_of_domain(domains, sets->nodes, domains[all[i].first],
						      all[i].taken + 1);
		}
	}
}

int parity_sets_make(struct parity_sets *sets, uint32_t nodes, uint32_t parity, uint32_t set_nodes,
		     const char *const *domains)
{
	struct domain *all = calloc(nodes, sizeof(*all));
	struct format_names *names = NULL;
	uint32_t count = 0;
	int ret = all ? format_names_new(&names, nodes) : -ENOMEM;

	*sets = (struct parity_sets){ nodes, parity, set_nodes, calloc(nodes, sizeof(uint32_t)) };
	if (!ret && !sets->order)
		ret = -ENOMEM;
	for (uint32_t node = 0; !ret && node < nodes; node++) {
		ret = format_names_add(names, domains[node], strlen(domains[node]), count);
		if (!ret)
			all[count++] = (struct domain){ node, node };
		else if (ret == -EEXIST)
			ret = 0;
	}
	if (!ret)
		mix(sets, domains, all, count);
	format_names_free(names);
	free(all);
	return ret;
}

static void sets_free(struct parity_sets *sets)
{
	free(sets->order);
	*sets = (struct parity_sets){ 0 };
}

/* The set of the node at a place of the order. All sets have set_nodes members, or as many more as
 * are left over: the first `larger` sets have one more than the others. */
static struct parity_set set_at(const struct parity_sets *sets, uint32_t at)
{
	const uint32_t sets_count = MAX(sets->nodes / MAX(sets->set_nodes, 1), 1);
	const uint32_t least = sets->nodes / sets_count, larger = sets->nodes % sets_count;
	const uint32_t in_larger = larger * (least + 1);
	struct parity_set set = { .count = least + (at < in_larger) };
	const uint32_t first = at < in_larger ? 0 : in_larger;

	set.position = (at - first) % set.count;
	set.nodes = sets->order + at - set.position;
	set.parity = MIN(sets->parity, set.count - 1);
	return set;
}

struct parity_set parity_set_of(const struct parity_sets *sets, uint32_t node)
{
	uint32_t at = 0;

	while (sets->order[at] != node)
		at++;
	return set_at(sets, at);
}

/* ---- Groups of elements ---------------------------------------------------------------------- */

/* By so much the member that has it is behind the first of the group. */
static uint32_t shift_of(const struct parity_set *set, uint32_t element)
{
	const uint32_t segments = parity_segments_of(set);

	return element < segments ? set->parity + element : element - segments;
}

/* The group is named by the position of its first member. */
static uint32_t group_of(const struct parity_set *set, uint32_t element)
{
	return (set->position + set->count - shift_of(set, element)) % set->count;
}

static uint32_t member_of(const struct parity_set *set, uint32_t group, uint32_t element)
{
	return set->nodes[(group + shift_of(set, element)) % set->count];
}

static bool is_there(const struct parity_set *set, const uint32_t *holders,
		     const uint32_t *parities, uint32_t node, uint32_t element)
{
	return holders[node] != PARITY_NOWHERE &&
	       element < parity_segments_of(set) + parities[node];
}

int parity_find_sources(const struct parity_set *set, const uint32_t *holders,
			const uint32_t *parities, uint32_t element, bool fresh,
			struct parity_source sources[PARITY_MOST_DATA], uint32_t *count)
{
	const uint32_t segments = parity_segments_of(set), group = group_of(set, element);
	const uint32_t node = set->nodes[set->position];
	unsigned have[PARITY_MOST_DATA];
	uint8_t coefficients[PARITY_MOST_DATA];

	*count = 0;
	if (!fresh && is_there(set, holders, parities, node, element)) {
		sources[(*count)++] = (struct parity_source){ node, element, 1 };
		return 0;
	}
	/* An element has its number in its group, too. */
	for (uint32_t other = 0; other < set->count && *count < segments; other++) {
		const uint32_t owner = member_of(set, group, other);

		if (other == element || !is_there(set, holders, parities, owner, other))
			continue;
		have[*count] = other;
		sources[(*count)++] = (struct parity_source){ owner, other, 0 };
	}
	if (*count < segments || !solve(segments, have, element, coefficients))
		return -ENOENT;
	for (uint32_t i = 0; i < segments; i++)
		sources[i].coefficient = coefficients[i];
	return 0;
}

bool parity_can_restore(const struct parity_sets *sets, const uint32_t *holders,
			const uint32_t *parities)
{
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count;

	for (uint32_t at = 0; at < sets->nodes; at++) {
		const struct parity_set set = set_at(sets, at);

		for (uint32_t element = 0; element < parity_segments_of(&set); element++) {
			if (parity_find_sources(&set, holders, parities, element, false, sources,
						&count))
				return false;
		}
	}
	return true;
}

/* ---- Records --------------------------------------------------------------------------------- */

static const char magic[8] = "iosparit";

/* Magic, format, length of all of it, checksum of what follows: 32 bits each but for the first. */
#define HEAD_BYTES 20u
#define MOST_RECORD_BYTES (64 * MIB)

static bool are_all_different(const uint32_t *numbers, uint32_t count)
{
	bool *seen = calloc(count, sizeof(*seen)), well = seen != NULL;

	for (uint32_t i = 0; well && i < count; i++) {
		well = !seen[numbers[i]];
		seen[numbers[i]] = true;
	}
	free(seen);
	return well;
}

void parity_pass_record(struct group_payload *payload, struct parity_record *record)
{
	struct parity_sets *sets = &record->sets;
	bool *bad = &payload->bad;

	group_pass_half(payload, &record->node);
	group_pass_half(payload, &record->parities);
	group_pass_half(payload, &sets->nodes);
	group_pass_small(payload, &sets->parity, PARITY_MOST);
	group_pass_half(payload, &sets->set_nodes);
	group_pass_list(payload, &sets->order, sets->nodes, sets->nodes - 1);
	group_pass_half(payload, &record->file_count);
	group_pass_list(payload, &record->node_of_file, record->file_count, sets->nodes - 1);
	*bad |= record->node >= sets->nodes || record->parities > sets->parity ||
		!record->file_count || !sets->set_nodes || sets->set_nodes > PARITY_MOST_DATA / 2 ||
		(!payload->note && !*bad && !are_all_different(sets->order, sets->nodes));
}

static void pass_record(struct group_payload *payload, void *message)
{
	parity_pass_record(payload, message);
}

static const struct group_message record_message = { "record", pass_record };

int parity_record_encode(struct base_buffer *out, const struct parity_record *record)
{
	static const uint8_t zeros[PARITY_RECORD_UNIT];
	struct group_note note = { 0 };
	uint8_t head[HEAD_BYTES];
	size_t bytes;
	int ret;

	group_write_message(&record_message, &note, record);
	bytes = HEAD_BYTES + note.bytes.bytes;
	bytes += (PARITY_RECORD_UNIT - bytes % PARITY_RECORD_UNIT) % PARITY_RECORD_UNIT;
	memcpy(head, magic, sizeof(magic));
	base_put_le(head + 8, PARITY_FORMAT, 4);
	base_put_le(head + 12, bytes, 4);
	base_put_le(head + 16, base_crc32(0, note.bytes.data, note.bytes.bytes), 4);
	ret = note.failed || bytes > MOST_RECORD_BYTES ? -ENOMEM : 0;
	if (!ret)
		ret = base_buffer_append(out, head, sizeof(head));
	if (!ret)
		ret = base_buffer_append(out, note.bytes.data, note.bytes.bytes);
	if (!ret)
		ret = base_buffer_append(out, zeros, bytes - HEAD_BYTES - note.bytes.bytes);
	base_buffer_free(&note.bytes);
	return ret;
}

uint64_t parity_record_bytes(const void *begin, size_t bytes)
{
	const uint8_t *head = begin;
	uint64_t length;

	if (bytes < HEAD_BYTES || memcmp(head, magic, sizeof(magic)))
		return 0;
	length = base_get_le(head + 12, 4);
	return length < PARITY_RECORD_UNIT || length % PARITY_RECORD_UNIT ||
			       length > MOST_RECORD_BYTES ?
		       0 :
		       length;
}

int parity_record_decode(struct parity_record *record, const void *data, size_t bytes,
			 const char *path, struct base_error *error)
{
	const uint8_t *head = data, *body = head + HEAD_BYTES;
	struct group_payload reading = { 0 };
	size_t used;

	*record = (struct parity_record){ 0 };
	if (!bytes || parity_record_bytes(data, bytes) != bytes)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "\"%s\" does not begin as a file of parities", path);
	if (base_get_le(head + 8, 4) != PARITY_FORMAT)
		return base_refuse(error, -EOPNOTSUPP,
				   "\"%s\" was written by another version of the library", path);
	reading.at = body;
	reading.left = bytes - HEAD_BYTES;
	parity_pass_record(&reading, record);
	used = (size_t)(reading.at - body);
	if (!reading.bad && base_crc32(0, body, used) == base_get_le(head + 16, 4))
		return 0;
	parity_record_free(record);
	return base_refuse(error, IOSHAPE_E_DAMAGED, "\"%s\" is damaged%s", path,
			   reading.bad ? "" : ": its checksum is another");
}

int parity_record_check(const struct parity_record *record, const struct format_manifest *manifest,
			uint32_t nodes, const char *path, struct base_error *error)
{
	if (record->sets.nodes == nodes && record->file_count == manifest->file_count)
		return 0;
	return base_refuse_with(
		error, IOSHAPE_E_DAMAGED, "load another generation",
		"\"%s\" is damaged: its parities are those of %u nodes with %u files, and "
		"the generation has %u nodes with %u files",
		path, record->sets.nodes, record->file_count, nodes, manifest->file_count);
}

bool parity_records_agree(const struct parity_record *left, const struct parity_record *right)
{
	const struct parity_sets *a = &left->sets, *b = &right->sets;

	return a->nodes == b->nodes && a->parity == b->parity && a->set_nodes == b->set_nodes &&
	       left->file_count == right->file_count &&
	       !memcmp(a->order, b->order, a->nodes * sizeof(*a->order)) &&
	       !memcmp(left->node_of_file, right->node_of_file,
		       left->file_count * sizeof(*left->node_of_file));
}

int parity_record_whole(struct parity_record *record, uint32_t file_count)
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

void parity_record_free(struct parity_record *record)
{
	sets_free(&record->sets);
	free(record->node_of_file);
	*record = (struct parity_record){ 0 };
}

/* ---- Bytes of elements ----------------------------------------------------------------------- */

static uint64_t node_bytes(const struct format_manifest *manifest,
			   const struct parity_record *record, uint32_t node)
{
	uint64_t bytes = 0;

	for (uint32_t file = 0; file < manifest->file_count; file++) {
		if (record->node_of_file[file] == node)
			bytes += manifest->files[file].bytes;
	}
	return bytes;
}

uint64_t parity_segment_bytes(const struct format_manifest *manifest,
			      const struct parity_record *record, const struct parity_set *set)
{
	uint64_t most = 0, bytes;

	for (uint32_t i = 0; i < set->count; i++)
		most = MAX(most, node_bytes(manifest, record, set->nodes[i]));
	bytes = (most + parity_segments_of(set) - 1) / parity_segments_of(set);
	return (bytes + PARITY_RECORD_UNIT - 1) / PARITY_RECORD_UNIT * PARITY_RECORD_UNIT;
}
