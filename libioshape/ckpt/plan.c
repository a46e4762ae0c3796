/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Copies ---------------------------------------------------------------------------------- */

void *ckpt_hand_out(struct ckpt_arena *arena, const void *from, size_t bytes)
{
	void *memory = arena->next;

	if (from && bytes)
		memcpy(memory, from, bytes);
	arena->next += ckpt_room_for(bytes);
	return memory;
}

int ckpt_count_copy(size_t *copy_bytes, size_t more, const char *what, struct base_error *error)
{
	*copy_bytes += more;
	if (*copy_bytes <= CKPT_MAX_COPY_BYTES)
		return 0;
	return base_fail(error, IOSHAPE_E_LIMIT,
			 "the %s take more than %llu bytes; shorten the names or save fewer in one "
			 "file",
			 what, CKPT_MAX_COPY_BYTES);
}

int ckpt_plan_room(struct ckpt_plan *plan, size_t count, size_t copy_bytes,
		   struct ckpt_arena *arena, struct base_error *error)
{
	plan->records = calloc(MAX(count, 1), sizeof(*plan->records));
	plan->memory = arena->next = malloc(MAX(copy_bytes, 1));
	if (!plan->records || !plan->memory)
		return base_no_memory(error, "a plan", copy_bytes + count * sizeof(*plan->records));
	plan->count = count;
	return 0;
}

static int copy_metadata(struct ioshape_metadata *into, void **memory,
			 const struct ioshape_metadata *from, struct base_error *error)
{
	struct ioshape_attribute *attributes;
	struct ckpt_arena arena;
	size_t bytes;

	bytes = ckpt_room_for(from->attribute_count * sizeof(*attributes)) +
		ckpt_room_for(from->blob_bytes);
	for (size_t i = 0; i < from->attribute_count; i++)
		bytes += ckpt_room_for(strlen(from->attributes[i].name) + 1) +
			 ckpt_room_for(strlen(from->attributes[i].value) + 1);
	*memory = arena.next = malloc(MAX(bytes, 1));
	if (!*memory)
		return base_no_memory(error, "metadata", bytes);
	attributes = ckpt_hand_out(&arena, NULL, from->attribute_count * sizeof(*attributes));
	for (size_t i = 0; i < from->attribute_count; i++) {
		const struct ioshape_attribute *attribute = &from->attributes[i];

		attributes[i].name =
			ckpt_hand_out(&arena, attribute->name, strlen(attribute->name) + 1);
		attributes[i].value =
			ckpt_hand_out(&arena, attribute->value, strlen(attribute->value) + 1);
	}
	*into = *from;
	into->blob = ckpt_hand_out(&arena, from->blob, from->blob_bytes);
	into->attributes = attributes;
	return 0;
}

int ckpt_take_metadata(struct ioshape_metadata *into, void **memory,
		       const struct ioshape_metadata *from, struct base_error *error)
{
	struct ioshape_metadata given;
	int ret;

	*memory = NULL;
	ret = base_take_options(&given, sizeof(given), from, "ioshape_metadata", error);
	if (!ret)
		ret = zip_check_metadata(&given, error);
	return ret ? ret : copy_metadata(into, memory, &given, error);
}

/* ---- The plan -------------------------------------------------------------------------------- */

static const char *kind_of(const struct ckpt_payload *payload)
{
	return payload->raw ? "records" : "tensors";
}

int ckpt_check_unique(const struct ckpt_plan *plan, const struct ckpt_payload *payload,
		      ckpt_name_fn name, int code, struct base_error *error)
{
	struct zip_names *names;
	int ret;

	ret = zip_names_new(&names, payload->count);
	if (ret)
		return base_no_memory(error, "names", payload->count);
	for (size_t i = 0; !ret && i < payload->count; i++) {
		const char *one = name(payload, i);

		ret = zip_names_add(names, one, strlen(one), i);
		if (ret == -EEXIST)
			ret = base_fail(
				error, code,
				"cannot save to %s: two %s are called \"%s\"; names must be "
				"unique in a file",
				plan->path, kind_of(payload), ZIP_SHOWN(one));
		else if (ret)
			base_no_memory(error, "names", payload->count);
	}
	zip_names_free(names);
	return ret;
}

/*
 * Where each record will lie: what the file will hold, to the byte but for the index, whose size
 * nobody needs beforehand. Bounds the sum of the records, too.
 */
static int place_records(struct ckpt_plan *plan, struct base_error *error)
{
	uint64_t cursor = 0;
	int ret = 0;

	for (size_t i = 0; !ret && i < plan->count; i++) {
		struct ckpt_record *record = &plan->records[i];
		struct zip_place place;

		ret = zip_place_record(cursor, strlen(ZIP_FOLDER) + strlen(record->name),
				       record->bytes,
				       record->alignment ? record->alignment :
							   zip_default_alignment(record->bytes),
				       &place);
		cursor = place.end;
		record->start = plan->payload_bytes;
		if (!ret && i >= plan->own)
			plan->payload_bytes += record->bytes;
	}
	if (ret)
		return base_fail(error, ret,
				 "what is to be saved to %s is too large for one file; save less "
				 "in it",
				 plan->path);
	plan->expected_bytes = cursor;
	return 0;
}

int ckpt_plan_make(struct ckpt_plan *plan, const char *path, const struct ckpt_payload *payload,
		   const struct ioshape_metadata *metadata, struct base_error *error)
{
	/* One place is kept for the index. */
	size_t most = payload->raw ? ZIP_MAX_RECORDS - 1 : IOSHAPE_MAX_TENSORS;
	bool given = payload->raw ? payload->records != NULL : payload->tensors != NULL;
	int ret;

	memset(plan, 0, sizeof(*plan));
	plan->path = path;
	if (payload->count && !given)
		return base_fail(error, -EINVAL, "%zu %s were announced, but none given",
				 payload->count, kind_of(payload));
	if (payload->count > most)
		return base_fail(error, IOSHAPE_E_LIMIT, "%zu %s in one file; at most %zu fit",
				 payload->count, kind_of(payload), most);
	ret = ckpt_take_metadata(&plan->index.metadata, &plan->metadata_memory, metadata, error);
	if (!ret)
		ret = payload->raw ? ckpt_plan_records(plan, payload, error) :
				     ckpt_plan_tensors(plan, payload, error);
	if (!ret)
		ret = place_records(plan, error);
	if (ret)
		ckpt_plan_free(plan);
	return ret;
}

void ckpt_plan_free(struct ckpt_plan *plan)
{
	base_buffer_free(&plan->pickle);
	free(plan->metadata_memory);
	free(plan->memory);
	free(plan->rows);
	free(plan->layouts);
	free(plan->tensors);
	free(plan->records);
	memset(plan, 0, sizeof(*plan));
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

static int fetch(const struct ckpt_plan *plan, const struct ckpt_record *record, uint64_t offset,
		 void *into, size_t bytes, struct base_error *error)
{
	int ret = record->fetch(record->fetch_user, offset, into, bytes);

	if (!ret)
		return 0;
	return base_fail(error, ret < 0 && ret > -4096 ? ret : -EIO,
			 "cannot save to %s: fetching record \"%s\" at offset %llu answered %d",
			 plan->path, ZIP_SHOWN(record->name), (unsigned long long)offset, ret);
}

int ckpt_plan_copy(const struct ckpt_plan *plan, size_t i, uint64_t offset, void *into,
		   size_t bytes, struct base_error *error)
{
	const struct ckpt_record *record = &plan->records[i];

	if (!bytes)
		return 0; /* a record without bytes may have no data to point into */
	if (record->fetch)
		return fetch(plan, record, offset, into, bytes, error);
	if (record->packed)
		zip_pack(record->packed, ioshape_dtype_bytes(record->packed->dtype), offset, into,
			 bytes);
	else
		memcpy(into, (const char *)record->data + offset, bytes);
	return 0;
}
