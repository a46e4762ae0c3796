/* SPDX-License-Identifier: Apache-2.0 */
/* Parity: which nodes protect each other, and which elements restore a lost one. Also the encoding
 * of the record in front of a node's parities, and the exchange in which nodes compute elements
 * together. */
#define _GNU_SOURCE
#include "tier/parity.h"
#include "tier/tier.h"

#include <errno.h>
#include <isa-l/erasure_code.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Reed-Solomon codes ---------------------------------------------------------------------- */

/* ISA-L computes them. The first parity is an exclusive or, the second that of RAID 6. */

/* Piece that stays in the caches nearest to the core while it is summed. */
#define PIECE_BYTES (64 * KIB)
#define TABLE_BYTES 32

/* Adds coefficient * element to `sum`. A sum begins with zeros. */
static void add_multiple(void *sum, const void *element, size_t bytes, uint8_t coefficient)
{
	uint8_t table[TABLE_BYTES], *to = sum;
	const uint8_t *from = element;

	ec_init_tables(1, 1, &coefficient, table);
	for (size_t piece; bytes; to += piece, from += piece, bytes -= piece) {
		piece = MIN(bytes, PIECE_BYTES);
		/* ISA-L omits a const, which this cast removes. */
		ec_encode_data_update((int)piece, 1, 1, 0, table, (uint8_t *)(uintptr_t)from, &to);
	}
}

/* Computes the coefficients that give element `wanted` as a sum of `data` other elements, whose
 * numbers are in `have`. Returns false if it does not follow from them. */
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
	/* Expresses the row of the wanted element by the rows of the known ones. */
	for (unsigned i = 0; i < data; i++) {
		coefficients[i] = 0;
		for (unsigned j = 0; j < data; j++)
			coefficients[i] ^= gf_mul(rows[wanted * data + j], inverse[j * data + i]);
	}
	return true;
}

/* ---- Sets ------------------------------------------------------------------------------------ */

/* Nodes of one domain, which are taken one at a time and in order. */
struct domain {
	uint32_t first; /* first node of the domain; domains are in the order of these nodes */
	uint32_t taken; /* next node to take; sets.nodes if none is left */
};

static uint32_t next_of_domain(const char *const *domains, uint32_t nodes, const char *name,
			       uint32_t from)
{
	while (from < nodes && strcmp(domains[from], name))
		from++;
	return from;
}

/* Fills the order with one node of each domain in turn. Neighbours in the order are in different
 * domains, as long as several domains have nodes left. */
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

/*
 * Returns the set of the node at a position of the order. Sets have set_nodes members, and
 * left-over nodes make sets larger: the first `larger` sets have one member more than the others.
 */
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

/*
 * Returns how many positions the member with this element is behind the first member of the group.
 */
static uint32_t shift_of(const struct parity_set *set, uint32_t element)
{
	const uint32_t segments = parity_segments_of(set);

	return element < segments ? set->parity + element : element - segments;
}

/* Returns the group of an element. A group has the position of its first member as its number. */
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

/*
 * Finds the sources of an element of the node at set->position. If a node holds the element and it
 * is not `fresh`, the only source is the element itself. Otherwise the sources are the remaining
 * elements of its group. The arrays holders[] and parities[] have one item for each node of the
 * sets. They are the current node that has its files, and the number of parities stored with them.
 * Returns 0, or -ENOENT if too much of the group is lost.
 */
static int sources_of(const struct parity_set *set, const uint32_t *holders,
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
	/* The number of an element is also its number in the group. */
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
			if (sources_of(&set, holders, parities, element, false, sources, &count))
				return false;
		}
	}
	return true;
}

/* ---- Records --------------------------------------------------------------------------------- */

static const char magic[8] = "iosparit";

/* Magic, then 32 bits each: format, length of the whole record, checksum of the bytes behind the
 * header. */
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
		(!payload->body && !*bad && !are_all_different(sets->order, sets->nodes));
}

static void pass_record(struct group_payload *payload, void *message)
{
	parity_pass_record(payload, message);
}

static const struct group_message record_message = { "record", pass_record };

int parity_record_encode(struct base_buffer *out, const struct parity_record *record)
{
	static const uint8_t zeros[PARITY_RECORD_UNIT];
	struct group_body body = { 0 };
	uint8_t head[HEAD_BYTES];
	size_t bytes;
	int ret;

	group_write_message(&record_message, &body, record);
	bytes = HEAD_BYTES + body.bytes.bytes;
	bytes += (PARITY_RECORD_UNIT - bytes % PARITY_RECORD_UNIT) % PARITY_RECORD_UNIT;
	memcpy(head, magic, sizeof(magic));
	base_put_le(head + 8, PARITY_FORMAT, 4);
	base_put_le(head + 12, bytes, 4);
	base_put_le(head + 16, base_crc32(0, body.bytes.data, body.bytes.bytes), 4);
	ret = body.failed || bytes > MOST_RECORD_BYTES ? -ENOMEM : 0;
	if (!ret)
		ret = base_buffer_append(out, head, sizeof(head));
	if (!ret)
		ret = base_buffer_append(out, body.bytes.data, body.bytes.bytes);
	if (!ret)
		ret = base_buffer_append(out, zeros, bytes - HEAD_BYTES - body.bytes.bytes);
	base_buffer_free(&body.bytes);
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
		return base_fail_reason(error, IOSHAPE_E_DAMAGED,
					"\"%s\" does not begin as a parity file does", path);
	if (base_get_le(head + 8, 4) != PARITY_FORMAT)
		return base_fail_reason(error, -EOPNOTSUPP,
					"\"%s\" was written by another version of the library",
					path);
	reading.at = body;
	reading.left = bytes - HEAD_BYTES;
	parity_pass_record(&reading, record);
	used = (size_t)(reading.at - body);
	if (!reading.bad && base_crc32(0, body, used) == base_get_le(head + 16, 4))
		return 0;
	parity_record_free(record);
	return base_fail_reason(error, IOSHAPE_E_DAMAGED, "\"%s\" is damaged%s", path,
				reading.bad ? "" : ": its checksum does not match");
}

void parity_record_free(struct parity_record *record)
{
	sets_free(&record->sets);
	free(record->node_of_file);
	*record = (struct parity_record){ 0 };
}

/* ---- Sizes of elements ----------------------------------------------------------------------- */

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

/* ---- The exchange ---------------------------------------------------------------------------- */

/*
 * Nodes compute elements together. All nodes process one list in the same order, block by block.
 * For each element to be made, the list has its sources. A node that holds a source sends it, on a
 * thread of its own, and the target adds the sources up.
 *
 * The exchange cannot deadlock: the first transfer of the list that has not happened is always the
 * next one for both sides. For this reason a node that has failed still processes the whole list.
 * It stops only when bytes can no longer travel between nodes.
 */

/* Files of a node that this node holds. One thread reads them. */
struct held {
	const struct parity_exchange *exchange;
	bool is_open;
	uint32_t node;
	struct parity_set set;
	uint64_t segment_bytes;
	uint32_t count; /* number of its files */
	struct held_file {
		struct io_input input;
		uint64_t at; /* offset of the file when all files are one behind the other */
	} * files;
	struct io_input parity; /* file of the parities; its path is NULL until it is open */
	uint64_t parity_at;     /* offset of the first parity */
};

/* ---- Elements that this node holds ----------------------------------------------------------- */

static void held_close(struct held *held)
{
	const struct parity_exchange *exchange = held->exchange;

	while (held->count)
		io_input_close(&held->files[--held->count].input);
	free(held->files);
	if (held->parity.path)
		io_input_close(&held->parity);
	*held = (struct held){ .exchange = exchange };
}

static int open_input(const struct parity_exchange *exchange, const char *name,
		      struct io_input *input, struct base_error *error)
{
	char *path;
	int ret;

	if (asprintf(&path, "%s/%s", exchange->folder, name) < 0)
		return base_no_memory(error, "a path", strlen(exchange->folder));
	ret = io_input_open(input, path, 0, 0, IOSHAPE_DIRECT_OFF, error);
	free(path);
	return ret;
}

static int open_files(struct held *held, struct base_error *error)
{
	const struct format_manifest *manifest = held->exchange->manifest;
	uint64_t at = 0;
	int ret = 0;

	held->files = calloc(manifest->file_count, sizeof(*held->files));
	if (!held->files)
		return base_no_memory(error, "files of a node",
				      manifest->file_count * sizeof(*held->files));
	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		if (held->exchange->record->node_of_file[i] != held->node)
			continue;
		held->files[held->count].at = at;
		ret = open_input(held->exchange, manifest->files[i].name,
				 &held->files[held->count].input, error);
		held->count += !ret;
		at += manifest->files[i].bytes;
	}
	return ret;
}

/* Opens the file of the parities, if it is not open. While a node's parities are being made, it
 * does not exist yet. */
static int open_parity(struct held *held, struct base_error *error)
{
	char name[GROUP_PARITY_NAME_BYTES];
	uint8_t begin[PARITY_RECORD_UNIT];
	int ret;

	if (held->parity.path)
		return 0;
	group_parity_name(name, held->node);
	ret = open_input(held->exchange, name, &held->parity, error);
	if (ret)
		return ret;
	ret = io_input_get(&held->parity, 0, begin, sizeof(begin), error);
	held->parity_at = ret ? 0 : parity_record_bytes(begin, sizeof(begin));
	if (!ret && !held->parity_at)
		ret = base_fail_reason(error, IOSHAPE_E_DAMAGED,
				       "\"%s\" does not begin as a parity file does",
				       held->parity.path);
	return ret;
}

static int be(struct held *held, uint32_t node, struct base_error *error)
{
	const struct parity_exchange *exchange = held->exchange;

	if (held->is_open && held->node == node)
		return 0;
	held_close(held);
	held->is_open = true;
	held->node = node;
	held->set = parity_set_of(&exchange->record->sets, node);
	held->segment_bytes =
		parity_segment_bytes(exchange->manifest, exchange->record, &held->set);
	return open_files(held, error);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static int get_from_files(const struct held *held, uint64_t at, uint8_t *into, size_t bytes,
			  struct base_error *error)
{
	int ret = 0;

	memset(into, 0, bytes);
	for (uint32_t i = 0; !ret && i < held->count; i++) {
		const struct held_file *file = &held->files[i];
		const uint64_t begin = MAX(file->at, at),
			       end = MIN(file->at + file->input.bytes, at + bytes);

		if (begin < end)
			ret = io_input_get(&file->input, begin - file->at, into + (begin - at),
					   end - begin, error);
	}
	return ret;
}

/* Reads bytes of an element of a node. Behind the last file there are zeros. The files stay open
 * until those of another node are needed. */
static int held_get(struct held *held, uint32_t node, uint32_t element, uint64_t offset, void *into,
		    size_t bytes, struct base_error *error)
{
	uint32_t segments;
	int ret = be(held, node, error);

	if (ret)
		return ret;
	segments = parity_segments_of(&held->set);
	if (element < segments)
		return get_from_files(held, element * held->segment_bytes + offset, into, bytes,
				      error);
	ret = open_parity(held, error);
	return ret ? ret :
		     io_input_get(&held->parity,
				  held->parity_at + (element - segments) * held->segment_bytes +
					  offset,
				  into, bytes, error);
}

/* ---- The list of work, in the order in which all nodes process it ---------------------------- */

#define BLOCK_BYTES (4 * MIB)
/* A block and its checksum. */
#define MESSAGE_BYTES (BLOCK_BYTES + 4)

/* Assignment that concerns this node. Nodes of other sets exchange nothing with it. */
struct parity_work {
	struct parity_making making;
	struct parity_set set;
	uint64_t segment_bytes;
	uint32_t first, count; /* elements that are made */
	uint64_t blocks;       /* number of blocks of each element */
};

static uint32_t rank_of(const struct parity_exchange *exchange, uint32_t node)
{
	return exchange->round->group->leaders[node];
}

static uint32_t tag_of(const struct parity_exchange *exchange)
{
	const struct group_round *round = exchange->round;

	return (uint32_t)((round->group->id % 16384 + round->number) % 16384);
}

/* Returns the timeout of one block. A rank sends no heartbeat while it waits for a block. Half of
 * the group's deadline keeps it from counting as lost. */
static uint32_t most_wait_ms(const struct parity_exchange *exchange)
{
	return exchange->round->group->options.deadline_ms / 2;
}

static uint64_t steps_of(const struct parity_work *work)
{
	return work->count * work->blocks;
}

static bool concerns(const struct parity_exchange *exchange, const struct parity_work *work)
{
	bool concerned = work->making.target == exchange->own;

	for (uint32_t i = 0; i < work->set.count; i++)
		concerned |= exchange->holders[work->set.nodes[i]] == exchange->own;
	return concerned;
}

static struct parity_work work_for(const struct parity_exchange *exchange,
				   const struct parity_making *making)
{
	struct parity_work work = {
		.making = *making,
		.set = parity_set_of(&exchange->record->sets, making->node),
	};

	work.segment_bytes = parity_segment_bytes(exchange->manifest, exchange->record, &work.set);
	work.first = exchange->fresh ? parity_segments_of(&work.set) : 0;
	work.count = parity_segments_of(&work.set) + work.set.parity - work.first;
	work.blocks = (work.segment_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
	return work;
}

static int list_works(struct parity_exchange *exchange, struct base_error *error)
{

	exchange->works = calloc(MAX(exchange->count, 1), sizeof(*exchange->works));
	if (!exchange->works)
		return base_no_memory(error, "messages between nodes",
				      exchange->count * sizeof(*exchange->works));
	for (uint32_t i = 0; i < exchange->count; i++) {
		const struct parity_work work = work_for(exchange, &exchange->makings[i]);

		if (!concerns(exchange, &work))
			continue;
		exchange->works[exchange->work_count++] = work;
		exchange->turns = MAX(exchange->turns, work.making.turn + 1);
		exchange->most_steps = MAX(exchange->most_steps, steps_of(&work));
	}
	return 0;
}

/* One block of one element. */
struct step {
	uint32_t element;
	uint64_t offset;
	size_t bytes;
};

static struct step step_at(const struct parity_work *work, uint64_t number)
{
	struct step step = {
		.element = work->first + (uint32_t)(number / work->blocks),
		.offset = number % work->blocks * BLOCK_BYTES,
	};

	step.bytes = MIN(BLOCK_BYTES, work->segment_bytes - step.offset);
	return step;
}

static int find_sources(const struct parity_exchange *exchange, const struct parity_work *work,
			uint32_t element, struct parity_source sources[PARITY_MOST_DATA],
			uint32_t *count, struct base_error *error)
{

	if (!sources_of(&work->set, exchange->holders, exchange->parities, element, exchange->fresh,
			sources, count))
		return 0;
	return base_fail_reason(
		error, -ENODATA,
		"too many nodes are lost to restore the files of node %u in checkpoint %llu",
		work->making.node, (unsigned long long)exchange->manifest->step);
}

/* ---- Sending --------------------------------------------------------------------------------- */

/*
 * Sends a block. If it cannot be read, it is sent with a wrong checksum, which tells the receiver.
 */
static int send_block(struct parity_exchange *exchange, struct held *held,
		      const struct parity_work *work, const struct parity_source *source,
		      const struct step *step, uint8_t *message, struct base_error *error)
{
	const struct ioshape_group_options *options = &exchange->round->group->options;
	const uint32_t to = rank_of(exchange, work->making.target);
	uint32_t crc;
	int sent, ret = held_get(held, source->node, source->element, step->offset, message,
				 step->bytes, error);

	crc = base_crc32(0, message, step->bytes);
	base_put_le(message + step->bytes, ret ? ~crc : crc, 4);
	sent = options->comm->send(options->comm->user, to, tag_of(exchange), message,
				   step->bytes + 4, most_wait_ms(exchange));
	if (!sent)
		return ret;
	atomic_store(&exchange->broken, true);
	return base_fail(error, sent, "cannot send parity data to rank %u", to);
}

static int send_step(struct parity_exchange *exchange, struct held *held,
		     const struct parity_work *work, uint64_t number, uint8_t *message,
		     struct base_error *error)
{
	const uint32_t *holders = exchange->holders;
	const struct step step = step_at(work, number);
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count;
	int ret = find_sources(exchange, work, step.element, sources, &count, error);

	for (uint32_t i = 0; i < count && !atomic_load(&exchange->broken); i++) {
		if (holders[sources[i].node] == exchange->own &&
		    work->making.target != exchange->own &&
		    send_block(exchange, held, work, &sources[i], &step, message, error))
			ret = error->code;
	}
	return ret;
}

/* Sends all blocks that other nodes need. Goes on after a failure and reports the first one. */
static void send_all(struct parity_exchange *exchange, uint8_t *message, struct base_error *error)
{
	struct held held = { .exchange = exchange };

	for (uint32_t turn = 0; turn < exchange->turns; turn++) {
		for (uint64_t number = 0; number < exchange->most_steps; number++) {
			for (uint32_t i = 0; i < exchange->work_count; i++) {
				const struct parity_work *work = &exchange->works[i];
				struct base_error failure = { 0 };

				if (atomic_load(&exchange->broken))
					goto out;
				if (work->making.turn == turn && number < steps_of(work) &&
				    send_step(exchange, &held, work, number, message, &failure))
					base_propagate(error, &failure);
			}
		}
	}
out:
	held_close(&held);
}

static void *run_sending(void *user)
{
	struct parity_exchange *exchange = user;
	struct base_error error = { 0 };
	/* zeroed, because blocks that cannot be read are sent, too */
	uint8_t *message = calloc(1, MESSAGE_BYTES);

	if (message) {
		send_all(exchange, message, &error);
	} else {
		atomic_store(&exchange->broken, true);
		base_no_memory(&error, "a copy buffer", MESSAGE_BYTES);
	}
	free(message);
	exchange->sending = error;
	return NULL;
}

/* ---- Adding up ------------------------------------------------------------------------------- */

/* State of one target: it gets one block after the other. */
struct summing {
	struct parity_exchange *exchange;
	const struct parity_work *work;
	struct held held;
	uint64_t next;    /* number of the next step */
	uint8_t *message; /* received block */
	uint8_t *sum;
	size_t at, bytes; /* bytes of the sum that were taken, and that there are */
};

static int receive(struct summing *summing, uint32_t from, size_t bytes, struct base_error *error)
{
	struct parity_exchange *exchange = summing->exchange;
	const struct ioshape_group_options *options = &exchange->round->group->options;
	const int ret = options->comm->receive(options->comm->user, from, tag_of(exchange),
					       summing->message, bytes + 4, most_wait_ms(exchange));

	if (ret) {
		atomic_store(&exchange->broken, true);
		return base_fail(error, ret, "cannot receive parity data from rank %u", from);
	}
	if (base_crc32(0, summing->message, bytes) == base_get_le(summing->message + bytes, 4))
		return 0;
	return base_fail_reason(error, -EIO,
				"rank %u cannot read its files, or they were damaged in transit",
				from);
}

static int add_source(struct summing *summing, const struct parity_source *source,
		      const struct step *step, struct base_error *error)
{
	const struct parity_exchange *exchange = summing->exchange;
	const uint32_t holder = exchange->holders[source->node];
	int ret;

	if (holder == exchange->own)
		ret = held_get(&summing->held, source->node, source->element, step->offset,
			       summing->message, step->bytes, error);
	else
		ret = receive(summing, rank_of(exchange, holder), step->bytes, error);
	if (!ret)
		add_multiple(summing->sum, summing->message, step->bytes, source->coefficient);
	return ret;
}

static bool is_broken(const struct summing *summing)
{
	return atomic_load(&summing->exchange->broken);
}

/* Computes the next block. It receives every block that is sent for it, even after a failure. */
static int next_block(struct summing *summing, struct base_error *error)
{
	const struct step step = step_at(summing->work, summing->next++);
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count;
	int ret = find_sources(summing->exchange, summing->work, step.element, sources, &count,
			       error);

	memset(summing->sum, 0, step.bytes);
	for (uint32_t i = 0; i < count && !is_broken(summing); i++) {
		struct base_error failure = { 0 };

		if (add_source(summing, &sources[i], &step, &failure))
			ret = base_propagate(error, &failure);
	}
	if (!ret && is_broken(summing))
		ret = base_fail_reason(error, -ECANCELED,
				       "the exchange of parity data was stopped");
	summing->at = 0;
	summing->bytes = ret ? 0 : step.bytes;
	group_round_beat(summing->exchange->round);
	return ret;
}

/* Receives the remaining blocks after a failure, because the other nodes send them anyway. */
static void skip_rest(struct summing *summing)
{
	while (summing->next < steps_of(summing->work) && !is_broken(summing))
		next_block(summing, NULL);
}

/* Puts the next bytes into `file`, or drops them if `file` is NULL. */
static int put_next(struct summing *summing, struct io_writer *file, uint64_t bytes,
		    struct base_error *error)
{
	int ret = 0;

	while (!ret && bytes) {
		size_t piece;

		if (summing->at == summing->bytes)
			ret = next_block(summing, error);
		piece = MIN(summing->bytes - summing->at, bytes);
		if (!ret && file)
			ret = io_writer_put(file, summing->sum + summing->at, piece, NULL, error);
		summing->at += piece;
		bytes -= piece;
	}
	return ret;
}

/* ---- Files ----------------------------------------------------------------------------------- */

struct target_file {
	struct summing *summing;
	/* file to restore; NULL for the file of the parities */
	const struct format_manifest_file *restored;
	const struct base_buffer *record;
	uint64_t bytes; /* size of the parities */
	const char *path;
};

static int put_file(void *user, struct io_writer *writer, struct base_error *error)
{
	const struct target_file *file = user;
	int ret = 0;

	if (file->restored)
		ret = put_next(file->summing, writer, file->restored->bytes, error);
	else
		ret = io_writer_put(writer, file->record->data, file->record->bytes, NULL, error);
	if (!ret && !file->restored)
		ret = put_next(file->summing, writer, file->bytes, error);
	if (ret || !file->restored || io_writer_crc32(writer) == file->restored->crc32)
		return ret;
	return base_fail_reason(
		error, IOSHAPE_E_DAMAGED,
		"\"%s\" was restored from other nodes, and its checksum does not match: "
		"one of their copies is damaged",
		file->path);
}

static int write_file(struct target_file *target, const char *name, uint64_t bytes,
		      struct base_error *error)
{
	const struct parity_exchange *exchange = target->summing->exchange;
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .blocked = &self };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct save_file file = {
		.context = exchange->round->group->context,
		.options = { .expected_bytes = bytes, .exact = true, .want_crc32 = true },
		/* Nodes wait for each other's blocks, so none of them may wait for a slot. */
		.without_slot = true,
		.put = put_file,
		.user = target,
	};
	char *path;
	int ret;

	if (asprintf(&path, "%s/%s", exchange->folder, name) < 0)
		return base_no_memory(error, "a path", strlen(name));
	target->path = file.path = path;
	ret = save_write_file(&file, &watch, NULL, &report, error);
	free(path);
	return ret;
}

/*
 * Writes the restored files, in the order of the manifest, and drops the rest of the last segment.
 */
static int write_restored(struct summing *summing, struct base_error *error)
{
	const struct parity_exchange *exchange = summing->exchange;
	const struct parity_work *work = summing->work;
	uint64_t left = work->segment_bytes * parity_segments_of(&work->set);
	int ret = 0;

	for (uint32_t i = 0; !ret && i < exchange->manifest->file_count; i++) {
		struct target_file target = {
			.summing = summing,
			.restored = &exchange->manifest->files[i],
		};

		if (exchange->record->node_of_file[i] != work->making.node)
			continue;
		left -= target.restored->bytes;
		ret = write_file(&target, target.restored->name, target.restored->bytes, error);
	}
	return ret ? ret : put_next(summing, NULL, left, error);
}

static int write_parities(struct summing *summing, struct base_error *error)
{
	const struct parity_work *work = summing->work;
	struct parity_record record = *summing->exchange->record;
	struct base_buffer text = { 0 };
	struct target_file target = {
		.summing = summing,
		.record = &text,
		.bytes = work->segment_bytes * work->set.parity,
	};
	char name[GROUP_PARITY_NAME_BYTES];
	int ret;

	record.node = work->making.node;
	record.parities = work->set.parity;
	group_parity_name(name, record.node);
	ret = parity_record_encode(&text, &record);
	if (ret)
		base_no_memory(error, "a parity record", text.bytes);
	else
		ret = write_file(&target, name, text.bytes + target.bytes, error);
	base_buffer_free(&text);
	return ret;
}

static int make(struct parity_exchange *exchange, const struct parity_work *work,
		struct base_error *error)
{
	struct summing summing = {
		.exchange = exchange,
		.work = work,
		.held = { .exchange = exchange },
		.message = malloc(MESSAGE_BYTES),
		.sum = malloc(BLOCK_BYTES),
	};
	int ret = 0;

	if (!summing.message || !summing.sum)
		ret = base_no_memory(error, "a copy buffer", MESSAGE_BYTES + BLOCK_BYTES);
	if (!ret && !exchange->fresh)
		ret = write_restored(&summing, error);
	if (!ret)
		ret = write_parities(&summing, error);
	if (summing.message && summing.sum)
		skip_rest(&summing);
	else
		atomic_store(&exchange->broken, true);
	held_close(&summing.held);
	free(summing.message);
	free(summing.sum);
	return ret;
}

static int make_all(struct parity_exchange *exchange, struct base_error *error)
{
	int ret = 0;

	for (uint32_t turn = 0; turn < exchange->turns; turn++) {
		for (uint32_t i = 0; i < exchange->work_count; i++) {
			const struct parity_work *work = &exchange->works[i];
			struct base_error failure = { 0 };

			if (work->making.turn == turn && work->making.target == exchange->own &&
			    make(exchange, work, &failure))
				ret = base_propagate(error, &failure);
		}
	}
	return ret;
}

/* ---- Running the exchange -------------------------------------------------------------------- */

static int run_both(struct parity_exchange *exchange, struct base_error *error)
{
	pthread_t thread;
	int ret = base_start_thread(&thread, run_sending, exchange);

	if (ret)
		return base_fail(error, ret, "cannot start a thread that sends to other nodes");
	ret = make_all(exchange, error);
	pthread_join(thread, NULL);
	if (exchange->sending.code && (!ret || ret == -ECANCELED)) {
		base_error_begin(error);
		ret = base_propagate(error, &exchange->sending);
	}
	return ret;
}

int parity_exchange_run(struct parity_exchange *exchange, struct base_error *error)
{
	struct ioshape_group *group = exchange->round->group;
	int ret;

	exchange->own = group->ranks[group->options.rank].node;
	ret = list_works(exchange, error);
	if (!ret && exchange->work_count)
		ret = run_both(exchange, error);
	group->comm_failed |= atomic_load(&exchange->broken);
	free(exchange->works);
	return ret;
}
