/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors as records: the pickle and its companions, then one record for each tensor. */
#include "ckpt/plan.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "data/", the digits of a position below IOSHAPE_MAX_TENSORS, and the end. */
#define RECORD_NAME_BYTES 16

/* torch's version of the container, and the byte order of the tensors. */
#define VERSION_TEXT "3\n"
#define BYTE_ORDER_TEXT (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "little" : "big")

/* data.pkl, byteorder, version: tensor i is record i + 3. */
#define RECORDS_BEFORE_TENSORS 3u

/* Every tensor by itself. Their layouts' strides are written to scratch: this pass only checks. */
static int check_tensors(const struct ckpt_payload *payload, size_t *copy_bytes,
			 struct base_error *error)
{
	int64_t strides[IOSHAPE_MAX_DIMS];
	struct zip_layout layout = { .strides = strides };
	int ret = 0;

	*copy_bytes = 0;
	for (size_t i = 0; !ret && i < payload->count; i++) {
		const struct ioshape_tensor *tensor = &payload->tensors[i];

		ret = zip_layout_tensor(tensor, &layout, error);
		if (!ret)
			ret = ckpt_count_copy(copy_bytes,
					      ckpt_room_for(strlen(tensor->name) + 1) +
						      3 * tensor->dims * sizeof(int64_t),
					      "names and shapes of the tensors", error);
	}
	return ret;
}

static const char *name_of(const struct ckpt_payload *payload, size_t i)
{
	return payload->tensors[i].name;
}

static void copy_tensor(struct ckpt_plan *plan, size_t i, const struct ioshape_tensor *from,
			struct ckpt_arena *arena)
{
	struct ckpt_record *record = &plan->records[RECORDS_BEFORE_TENSORS + i];
	size_t bytes = from->dims * sizeof(int64_t);
	struct ioshape_tensor *to = &plan->tensors[i];
	struct zip_layout *layout = &plan->layouts[i];
	char name[32];

	*to = *from;
	to->name = ckpt_hand_out(arena, from->name, strlen(from->name) + 1);
	to->shape = ckpt_hand_out(arena, from->shape, bytes);
	to->strides = ckpt_hand_out(arena, from->strides, bytes);
	if (!from->strides)
		to->strides = NULL;
	layout->strides = ckpt_hand_out(arena, NULL, bytes);
	zip_layout_tensor(to, layout, NULL); /* has succeeded before */
	plan->rows[i] = (struct zip_tensor_row){
		.name = to->name,
		.dtype = to->dtype,
		.dims = to->dims,
		.shape = to->shape,
		.strides = layout->strides,
		.record = RECORDS_BEFORE_TENSORS + i,
	};
	snprintf(name, sizeof(name), "data/%zu", i);
	record->name = ckpt_hand_out(arena, name, strlen(name) + 1);
	record->bytes = layout->bytes;
	record->data = to->data;
	record->packed = layout->as_it_lies ? NULL : to;
}

static int copy_tensors(struct ckpt_plan *plan, const struct ckpt_payload *payload,
			size_t copy_bytes, struct base_error *error)
{
	size_t count = payload->count;
	struct ckpt_arena arena;
	int ret;

	ret = ckpt_plan_room(plan, RECORDS_BEFORE_TENSORS + count,
			     copy_bytes + count * RECORD_NAME_BYTES, &arena, error);
	if (ret)
		return ret;
	plan->tensors = calloc(MAX(count, 1), sizeof(*plan->tensors));
	plan->layouts = calloc(MAX(count, 1), sizeof(*plan->layouts));
	plan->rows = calloc(MAX(count, 1), sizeof(*plan->rows));
	if (!plan->tensors || !plan->layouts || !plan->rows)
		return base_no_memory(error, "a plan", count * sizeof(*plan->tensors));
	for (size_t i = 0; i < count; i++)
		copy_tensor(plan, i, &payload->tensors[i], &arena);
	plan->index.has_table = true;
	plan->index.tensor_count = count;
	plan->index.tensors = plan->rows;
	return 0;
}

/* What torch wants beside the tensors. */
static int add_companions(struct ckpt_plan *plan, size_t tensors, struct base_error *error)
{
	if (zip_pickle_tensors(&plan->pickle, plan->tensors, plan->layouts, tensors))
		return base_no_memory(error, "the pickle", tensors * 128);
	plan->records[0] = (struct ckpt_record){
		.name = "data.pkl",
		.data = plan->pickle.data,
		.bytes = plan->pickle.bytes,
	};
	plan->records[1] = (struct ckpt_record){
		.name = "byteorder",
		.data = BYTE_ORDER_TEXT,
		.bytes = strlen(BYTE_ORDER_TEXT),
	};
	plan->records[2] = (struct ckpt_record){
		.name = "version",
		.data = VERSION_TEXT,
		.bytes = strlen(VERSION_TEXT),
	};
	plan->own = RECORDS_BEFORE_TENSORS;
	return 0;
}

int ckpt_plan_tensors(struct ckpt_plan *plan, const struct ckpt_payload *payload,
		      struct base_error *error)
{
	size_t copy_bytes;
	int ret;

	ret = check_tensors(payload, &copy_bytes, error);
	if (!ret)
		ret = ckpt_check_unique(plan, payload, name_of, -EINVAL, error);
	if (!ret)
		ret = copy_tensors(plan, payload, copy_bytes, error);
	return ret ? ret : add_companions(plan, payload->count, error);
}
