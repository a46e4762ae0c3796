/* SPDX-License-Identifier: Apache-2.0 */
/* Elements as they lie in the files of a node. */
#define _GNU_SOURCE
#include "group/parity/parity.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t group_node_bytes(const struct zip_manifest *manifest, const struct group_record *record,
			  uint32_t node)
{
	uint64_t bytes = 0;

	for (uint32_t file = 0; file < manifest->file_count; file++) {
		if (record->node_of_file[file] == node)
			bytes += manifest->files[file].bytes;
	}
	return bytes;
}

uint64_t group_segment_bytes(const struct zip_manifest *manifest, const struct group_record *record,
			     const struct group_set *set)
{
	uint64_t most = 0, bytes;

	for (uint32_t i = 0; i < set->count; i++)
		most = MAX(most, group_node_bytes(manifest, record, set->nodes[i]));
	bytes = (most + group_segments_of(set) - 1) / group_segments_of(set);
	return (bytes + GROUP_RECORD_UNIT - 1) / GROUP_RECORD_UNIT * GROUP_RECORD_UNIT;
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int open_input(const struct group_exchange *exchange, const char *name,
		      struct ring_input *input, struct base_error *error)
{
	char *path;
	int ret;

	if (asprintf(&path, "%s/%s", exchange->folder, name) < 0)
		return base_no_memory(error, "a path", strlen(exchange->folder));
	ret = ring_input_open(input, path, 0, 0, IOSHAPE_DIRECT_OFF, error);
	free(path);
	return ret;
}

static int open_files(struct group_held *held, struct base_error *error)
{
	const struct zip_manifest *manifest = held->exchange->manifest;
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

/* Of a node whose parities are being made there is no such file yet. */
static int open_parity(struct group_held *held, struct base_error *error)
{
	char name[GROUP_PARITY_NAME_BYTES];
	uint8_t begin[GROUP_RECORD_UNIT];
	int ret;

	if (held->parity.path)
		return 0;
	group_parity_name(name, held->node);
	ret = open_input(held->exchange, name, &held->parity, error);
	if (ret)
		return ret;
	ret = ring_input_get(&held->parity, 0, begin, sizeof(begin), error);
	held->parity_at = ret ? 0 : group_record_bytes(begin, sizeof(begin));
	if (!ret && !held->parity_at)
		ret = base_refuse(error, IOSHAPE_E_DAMAGED,
				  "\"%s\" does not begin as a file of parities", held->parity.path);
	return ret;
}

static int be(struct group_held *held, uint32_t node, struct base_error *error)
{
	const struct group_exchange *exchange = held->exchange;

	if (held->is_open && held->node == node)
		return 0;
	group_held_close(held);
	held->is_open = true;
	held->node = node;
	held->set = group_set_of(&exchange->record->sets, node);
	held->segment_bytes = group_segment_bytes(exchange->manifest, exchange->record, &held->set);
	return open_files(held, error);
}

void group_held_close(struct group_held *held)
{
	const struct group_exchange *exchange = held->exchange;

	while (held->count)
		ring_input_close(&held->files[--held->count].input);
	free(held->files);
	if (held->parity.path)
		ring_input_close(&held->parity);
	*held = (struct group_held){ .exchange = exchange };
}

/* ---- Reading --------------------------------------------------------------------------------- */

static int get_from_files(const struct group_held *held, uint64_t at, uint8_t *into, size_t bytes,
			  struct base_error *error)
{
	int ret = 0;

	memset(into, 0, bytes);
	for (uint32_t i = 0; !ret && i < held->count; i++) {
		const struct held_file *file = &held->files[i];
		const uint64_t begin = MAX(file->at, at),
			       end = MIN(file->at + file->input.bytes, at + bytes);

		if (begin < end)
			ret = ring_input_get(&file->input, begin - file->at, into + (begin - at),
					     end - begin, error);
	}
	return ret;
}

int group_held_get(struct group_held *held, uint32_t node, uint32_t element, uint64_t offset,
		   void *into, size_t bytes, struct base_error *error)
{
	uint32_t segments;
	int ret = be(held, node, error);

	if (ret)
		return ret;
	segments = group_segments_of(&held->set);
	if (element < segments)
		return get_from_files(held, element * held->segment_bytes + offset, into, bytes,
				      error);
	ret = open_parity(held, error);
	return ret ? ret :
		     ring_input_get(&held->parity,
				    held->parity_at + (element - segments) * held->segment_bytes +
					    offset,
				    into, bytes, error);
}
