/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "data/" and the digits of a 64-bit number, "archive/" not counted. */
#define RECORD_NAME_BYTES 32

/*
 * Names and shapes of all tensors together. The index holds them, too, and has a limit of its own,
 * which would be found out only when everything is written.
 */
#define MAX_COPY_BYTES (ZIP_MAX_INDEX_BYTES / 2)

/* ---- Copies ---------------------------------------------------------------------------------- */

/* Memory that was counted first and is then handed out piece by piece. */
struct arena {
	uint8_t *next;
};

static void *hand_out(struct arena *arena, const void *from, size_t bytes)
{
	void *memory = arena->next;

	if (from && bytes)
		memcpy(memory, from, bytes);
	arena->next += base_round_up(bytes, sizeof(uint64_t));
	return memory;
}

static size_t room_for(size_t bytes)
{
	return base_round_up(bytes, sizeof(uint64_t));
}

static int copy_metadata(struct ioshape_metadata *into, void **memory,
			 const struct ioshape_metadata *from, struct base_error *error)
{
	struct ioshape_attribute *attributes;
	struct arena arena;
	size_t bytes;

	bytes = room_for(from->attribute_count * sizeof(*attributes)) + room_for(from->blob_bytes);
	for (size_t i = 0; i < from->attribute_count; i++)
		bytes += room_for(strlen(from->attributes[i].name) + 1) +
			 room_for(strlen(from->attributes[i].value) + 1);
	*memory = arena.next = malloc(MAX(bytes, 1));
	if (!*memory)
		return base_no_memory(error, "metadata", bytes);
	attributes = hand_out(&arena, NULL, from->attribute_count * sizeof(*attributes));
	for (size_t i = 0; i < from->attribute_count; i++) {
		const struct ioshape_attribute *attribute = &from->attributes[i];

		attributes[i].name = hand_out(&arena, attribute->name, strlen(attribute->name) + 1);
		attributes[i].value =
			hand_out(&arena, attribute->value, strlen(attribute->value) + 1);
	}
	*into = *from;
	into->blob = hand_out(&arena, from->blob, from->blob_bytes);
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

/* ---- Checks ---------------------------------------------------------------------------------- */

/* Every tensor by itself. Their layouts' strides are written to scratch: this pass only checks. */
static int check_tensors(const struct ioshape_tensor *tensors, size_t count, size_t *copy_bytes,
			 struct base_error *error)
{
	int64_t strides[IOSHAPE_MAX_DIMS];
	struct zip_layout layout = { .strides = strides };
	int ret = 0;

	*copy_bytes = 0;
	for (size_t i = 0; !ret && i < count; i++) {
		ret = zip_layout_tensor(&tensors[i], &layout, error);
		if (!ret)
			*copy_bytes += room_for(strlen(tensors[i].name) + 1) +
				       3 * tensors[i].dims * sizeof(int64_t);
		if (!ret && *copy_bytes > MAX_COPY_BYTES)
			ret = base_fail(
				error, IOSHAPE_E_LIMIT,
				"the names and shapes of the tensors take more than %llu bytes; "
				"shorten the names or save fewer in one file",
				MAX_COPY_BYTES);
	}
	return ret;
}

static int check_unique(const struct ioshape_tensor *tensors, size_t count,
			struct base_error *error)
{
	struct zip_names *names;
	int ret;

	ret = zip_names_new(&names, count);
	for (size_t i = 0; !ret && i < count; i++) {
		ret = zip_names_add(names, tensors[i].name, strlen(tensors[i].name), i);
		if (ret == -EEXIST) {
			ret = base_fail(
				error, -EINVAL,
				"two tensors are called \"%s\"; names must be unique in a file",
				tensors[i].name);
			zip_names_free(names);
			return ret;
		}
	}
	if (ret)
		return base_no_memory(error, "names of tensors", count);
	zip_names_free(names);
	return 0;
}

/* ---- The plan -------------------------------------------------------------------------------- */

static void copy_tensor(struct ckpt_plan *plan, size_t i, const struct ioshape_tensor *from,
			struct arena *arena)
{
	size_t bytes = from->dims * sizeof(int64_t);
	struct ioshape_tensor *to = &plan->tensors[i];

	*to = *from;
	to->name = hand_out(arena, from->name, strlen(from->name) + 1);
	to->shape = hand_out(arena, from->shape, bytes);
	to->strides = hand_out(arena, from->strides, bytes);
	if (!from->strides)
		to->strides = NULL;
	plan->layouts[i].strides = hand_out(arena, NULL, bytes);
	zip_layout_tensor(to, &plan->layouts[i], NULL); /* has succeeded before */
	plan->tensor_bytes += plan->layouts[i].bytes;
}

static int copy_tensors(struct ckpt_plan *plan, const struct ioshape_tensor *tensors, size_t count,
			size_t copy_bytes, struct base_error *error)
{
	struct arena arena;

	plan->tensors = calloc(MAX(count, 1), sizeof(*plan->tensors));
	plan->layouts = calloc(MAX(count, 1), sizeof(*plan->layouts));
	plan->rows = calloc(MAX(count, 1), sizeof(*plan->rows));
	plan->memory = arena.next = malloc(MAX(copy_bytes, 1));
	if (!plan->tensors || !plan->layouts || !plan->rows || !plan->memory)
		return base_no_memory(error, "a plan", copy_bytes + count * sizeof(*plan->tensors));
	plan->count = count;
	for (size_t i = 0; i < count; i++)
		copy_tensor(plan, i, &tensors[i], &arena);
	return 0;
}

/* What the file will hold, to the byte but for the index, whose size nobody needs beforehand. */
static int expect(struct ckpt_plan *plan, struct base_error *error)
{
	char name[RECORD_NAME_BYTES];
	struct zip_place place;
	uint64_t cursor = 0;
	int ret;

	ret = zip_place_record(0, strlen(ZIP_FOLDER "data.pkl"), plan->pickle.bytes,
			       ZIP_SMALL_ALIGNMENT, &place);
	for (size_t i = 0; !ret && i < plan->count; i++) {
		uint64_t bytes = plan->layouts[i].bytes;

		cursor = place.end;
		ret = zip_place_record(
			cursor, (size_t)snprintf(name, sizeof(name), ZIP_FOLDER "data/%zu", i),
			bytes, zip_default_alignment(bytes), &place);
	}
	if (ret)
		return base_fail(error, ret,
				 "the tensors are too large for one file; save fewer in it");
	plan->expected_bytes = place.end;
	return 0;
}

int ckpt_plan_make(struct ckpt_plan *plan, const struct ioshape_tensor *tensors, size_t count,
		   const struct ioshape_metadata *metadata, struct base_error *error)
{
	size_t copy_bytes;
	int ret;

	memset(plan, 0, sizeof(*plan));
	if (count && !tensors)
		return base_fail(error, -EINVAL, "%zu tensors were announced, but none given",
				 count);
	if (count > IOSHAPE_MAX_TENSORS)
		return base_fail(error, IOSHAPE_E_LIMIT, "%zu tensors in one file; at most %u fit",
				 count, IOSHAPE_MAX_TENSORS);
	ret = ckpt_take_metadata(&plan->metadata, &plan->metadata_memory, metadata, error);
	if (!ret)
		ret = check_tensors(tensors, count, &copy_bytes, error);
	if (!ret)
		ret = check_unique(tensors, count, error);
	if (!ret)
		ret = copy_tensors(plan, tensors, count, copy_bytes, error);
	if (!ret && zip_pickle_tensors(&plan->pickle, plan->tensors, plan->layouts, count))
		ret = base_no_memory(error, "the pickle", count * 128);
	if (!ret)
		ret = expect(plan, error);
	for (size_t i = 0; !ret && i < count; i++)
		plan->rows[i] = (struct zip_tensor_row){
			.name = plan->tensors[i].name,
			.dtype = plan->tensors[i].dtype,
			.dims = plan->tensors[i].dims,
			.shape = plan->tensors[i].shape,
			.strides = plan->layouts[i].strides,
		};
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
	memset(plan, 0, sizeof(*plan));
}

void ckpt_plan_copy(const struct ckpt_plan *plan, size_t tensor, uint64_t offset, void *into,
		    size_t bytes)
{
	const struct ioshape_tensor *from = &plan->tensors[tensor];

	if (!bytes)
		return; /* a tensor without elements may have no data to point into */
	if (plan->layouts[tensor].as_it_lies)
		memcpy(into, (const char *)from->data + offset, bytes);
	else
		zip_pack(from, ioshape_dtype_bytes(from->dtype), offset, into, bytes);
}
