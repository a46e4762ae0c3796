/* SPDX-License-Identifier: Apache-2.0 */
/* What stands in front of the parities of a node: whose they are, and who protects whom. */
#include "group/parity/parity.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char magic[8] = "iosparit";

/* Magic, format, length of all of it, checksum of what follows: 32 bits each but for the first. */
#define HEAD_BYTES 20u
#define MOST_RECORD_BYTES (64 * MIB)

static void put_body(struct group_note *note, const struct group_record *record)
{
	group_note_number(note, record->node);
	group_note_number(note, record->parities);
	group_note_number(note, record->sets.nodes);
	group_note_number(note, record->sets.parity);
	group_note_number(note, record->sets.set_nodes);
	for (uint32_t i = 0; i < record->sets.nodes; i++)
		group_note_number(note, record->sets.order[i]);
	group_note_number(note, record->file_count);
	for (uint32_t i = 0; i < record->file_count; i++)
		group_note_number(note, record->node_of_file[i]);
}

int group_record_encode(struct base_buffer *out, const struct group_record *record)
{
	static const uint8_t zeros[GROUP_RECORD_UNIT];
	struct group_note note = { 0 };
	uint8_t head[HEAD_BYTES];
	size_t bytes;
	int ret;

	put_body(&note, record);
	bytes = HEAD_BYTES + note.bytes.bytes;
	bytes += (GROUP_RECORD_UNIT - bytes % GROUP_RECORD_UNIT) % GROUP_RECORD_UNIT;
	memcpy(head, magic, sizeof(magic));
	base_put_le(head + 8, GROUP_PARITY_FORMAT, 4);
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

uint64_t group_record_bytes(const void *begin, size_t bytes)
{
	const uint8_t *head = begin;
	uint64_t length;

	if (bytes < HEAD_BYTES || memcmp(head, magic, sizeof(magic)))
		return 0;
	length = base_get_le(head + 12, 4);
	return length < GROUP_RECORD_UNIT || length % GROUP_RECORD_UNIT ||
			       length > MOST_RECORD_BYTES ?
		       0 :
		       length;
}

/* So many numbers below `limit`. NULL: they are not there, or there is no memory. */
static uint32_t *read_numbers(struct group_note_reader *reader, uint64_t count, uint64_t limit)
{
	uint32_t *numbers = NULL;

	if (count && count <= reader->left / 8)
		numbers = calloc(count, sizeof(*numbers));
	for (uint64_t i = 0; numbers && i < count; i++) {
		const uint64_t number = group_read_number(reader);

		reader->bad |= number >= limit;
		numbers[i] = (uint32_t)number;
	}
	return numbers;
}

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

static bool is_sound(const struct group_record *record)
{
	const struct group_sets *sets = &record->sets;

	return sets->order && record->node_of_file && record->node < sets->nodes &&
	       sets->parity <= BASE_MOST_PARITY && record->parities <= sets->parity &&
	       sets->set_nodes && sets->set_nodes <= BASE_MOST_DATA / 2 &&
	       are_all_different(sets->order, sets->nodes);
}

static bool read_body(struct group_record *record, struct group_note_reader reader)
{
	const uint64_t node = group_read_number(&reader), parities = group_read_number(&reader);
	const uint64_t nodes = group_read_number(&reader), parity = group_read_number(&reader);
	const uint64_t set_nodes = group_read_number(&reader);
	uint64_t files;

	record->sets.order = read_numbers(&reader, nodes, nodes);
	files = group_read_number(&reader);
	record->node_of_file = read_numbers(&reader, files, nodes);
	if (reader.bad || (node | parities | parity | set_nodes) > UINT32_MAX)
		return false;
	record->node = (uint32_t)node;
	record->parities = (uint32_t)parities;
	record->sets.nodes = (uint32_t)nodes;
	record->sets.parity = (uint32_t)parity;
	record->sets.set_nodes = (uint32_t)set_nodes;
	record->file_count = (uint32_t)files;
	return is_sound(record);
}

int group_record_decode(struct group_record *record, const void *data, size_t bytes,
			const char *path, struct base_error *error)
{
	const uint8_t *head = data;
	const struct base_buffer body = {
		.data = (uint8_t *)(uintptr_t)head + HEAD_BYTES,
		.bytes = bytes - HEAD_BYTES,
	};
	struct group_note_reader reader = group_read_note(&body);
	size_t used;

	*record = (struct group_record){ 0 };
	if (!bytes || group_record_bytes(data, bytes) != bytes)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "\"%s\" does not begin as a file of parities", path);
	if (base_get_le(head + 8, 4) != GROUP_PARITY_FORMAT)
		return base_refuse(error, -EOPNOTSUPP,
				   "\"%s\" was written by another version of the library", path);
	if (!read_body(record, reader)) {
		group_record_free(record);
		return base_refuse(error, IOSHAPE_E_DAMAGED, "\"%s\" is damaged", path);
	}
	used = 8 * (6 + (size_t)record->sets.nodes + record->file_count);
	if (base_crc32(0, body.data, used) == base_get_le(head + 16, 4))
		return 0;
	group_record_free(record);
	return base_refuse(error, IOSHAPE_E_DAMAGED, "\"%s\" is damaged: its checksum is another",
			   path);
}

int group_record_check(const struct group_record *record, const struct zip_manifest *manifest,
		       uint32_t nodes, const char *path, struct base_error *error)
{
	if (record->sets.nodes == nodes && record->file_count == manifest->file_count)
		return 0;
	return base_refuse(
		error, IOSHAPE_E_DAMAGED,
		"\"%s\" is damaged: its parities are those of %u nodes with %u files, and "
		"the generation has %u nodes with %u files" BASE_REMEDY "load another generation",
		path, record->sets.nodes, record->file_count, nodes, manifest->file_count);
}

bool group_records_agree(const struct group_record *left, const struct group_record *right)
{
	const struct group_sets *a = &left->sets, *b = &right->sets;

	return a->nodes == b->nodes && a->parity == b->parity && a->set_nodes == b->set_nodes &&
	       left->file_count == right->file_count &&
	       !memcmp(a->order, b->order, a->nodes * sizeof(*a->order)) &&
	       !memcmp(left->node_of_file, right->node_of_file,
		       left->file_count * sizeof(*left->node_of_file));
}

int group_record_whole(struct group_record *record, uint32_t file_count)
{
	static const char *const nowhere[] = { "" };

	*record = (struct group_record){
		.file_count = file_count,
		.node_of_file = calloc(file_count, sizeof(*record->node_of_file)),
	};
	if (record->node_of_file && !group_sets_make(&record->sets, 1, 0, 1, nowhere))
		return 0;
	group_record_free(record);
	return -ENOMEM;
}

void group_record_free(struct group_record *record)
{
	group_sets_free(&record->sets);
	free(record->node_of_file);
	*record = (struct group_record){ 0 };
}
