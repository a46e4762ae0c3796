/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans of saves. Plans of tensors and plans of records check and copy their input differently, and
 * then share all other steps. This file also brings the bytes of a plan's records to an archive.
 */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * Limit for names and shapes together. The index and the zip directory hold copies of them, and
 * have limits that would be exceeded only at the end of the save.
 */
#define MAX_COPY_BYTES (FORMAT_MAX_INDEX_BYTES / 2)

/* "data/", the digits of an index below IOSHAPE_MAX_TENSORS, and the final 0. */
#define RECORD_NAME_BYTES 16

/* torch's version of the container, and the byte order of tensors. */
#define VERSION_TEXT "3\n"
#define BYTE_ORDER_TEXT (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "little" : "big")

/* The records data.pkl, byteorder and version come first: tensor i is record i + 3. */
#define RECORDS_BEFORE_TENSORS 3u

/* ---- Copies ---------------------------------------------------------------------------------- */

/* Memory of a size that was counted first, handed out piece by piece. */
struct arena {
	uint8_t *next;
};

static size_t space_for(size_t bytes)
{
	return base_round_up(bytes, sizeof(uint64_t));
}

static void *hand_out(struct arena *arena, const void *from, size_t bytes)
{
	void *memory = arena->next;

	if (from && bytes)
		memcpy(memory, from, bytes);
	arena->next += space_for(bytes);
	return memory;
}

/* Counts the memory for the copies of one tensor or record. IOSHAPE_E_LIMIT: the limit is
 * exceeded. */
static int count_copy(size_t *copy_bytes, size_t more, const char *what, struct base_error *error)
{
	*copy_bytes += more;
	if (*copy_bytes <= MAX_COPY_BYTES)
		return 0;
	return base_fail_reason_with(error, IOSHAPE_E_LIMIT,
				     "shorten the names or save fewer in one file",
				     "the %s take more than %llu bytes", what, MAX_COPY_BYTES);
}

/* Allocates `count` records and memory for copies; save_plan_free() frees both. */
static int make_space(struct save_plan *plan, size_t count, size_t copy_bytes, struct arena *arena,
		      struct base_error *error)
{
	plan->records = calloc(MAX(count, 1), sizeof(*plan->records));
	plan->memory = arena->next = malloc(MAX(copy_bytes, 1));
	if (!plan->records || !plan->memory)
		return base_no_memory(error, "a plan", copy_bytes + count * sizeof(*plan->records));
	plan->count = count;
	if (!plan->index.has_statistics)
		return 0;
	plan->index.examined = plan->examined = calloc(MAX(count, 1), sizeof(*plan->examined));
	return plan->examined ?
		       0 :
		       base_no_memory(error, "statistics", count * sizeof(*plan->examined));
}

static int copy_metadata(struct ioshape_metadata *into, void **memory,
			 const struct ioshape_metadata *from, struct base_error *error)
{
	struct ioshape_attribute *attributes;
	struct arena arena;
	size_t bytes;

	bytes = space_for(from->attribute_count * sizeof(*attributes)) +
		space_for(from->blob_bytes);
	for (size_t i = 0; i < from->attribute_count; i++)
		bytes += space_for(strlen(from->attributes[i].name) + 1) +
			 space_for(strlen(from->attributes[i].value) + 1);
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

/*
 * Checks the caller's metadata (NULL: none), and copies it with all that it points to into one
 * allocation. The caller frees *memory.
 */
static int save_take_metadata(struct ioshape_metadata *into, void **memory,
			      const struct ioshape_metadata *from, struct base_error *error)
{
	struct ioshape_metadata given;
	int ret;

	*memory = NULL;
	ret = base_take_options(&given, sizeof(given), from, "ioshape_metadata", error);
	if (!ret)
		ret = format_check_metadata(&given, error);
	return ret ? ret : copy_metadata(into, memory, &given, error);
}

/* ---- Names ----------------------------------------------------------------------------------- */

static const char *kind_of(const struct save_payload *payload)
{
	return payload->kind == SAVE_RECORDS ? "records" : "tensors";
}

/* Records the name of a tensor or record in an error. Returns `ret`. */
static int about(int ret, const char *name, struct base_error *error)
{
	if (ret && name)
		base_error_in_record(error, FORMAT_SHOWN(name));
	return ret;
}

/* Returns the name of one of the caller's tensors or records. */
typedef const char *(*name_fn)(const struct save_payload *payload, size_t i);

/* Checks that names are unique. Returns `code` if two are equal. */
static int check_unique(const struct save_plan *plan, const struct save_payload *payload,
			name_fn name, int code, struct base_error *error)
{
	struct format_names *names;
	int ret;

	ret = format_names_new(&names, payload->count);
	if (ret)
		return base_no_memory(error, "names", payload->count);
	for (size_t i = 0; !ret && i < payload->count; i++) {
		const char *one = name(payload, i);

		ret = format_names_add(names, one, strlen(one), i);
		if (ret == -EEXIST)
			ret = base_fail_with(error, code, "names must be unique in a file",
					     "cannot save to \"%s\": two %s are called \"%s\"",
					     plan->path, kind_of(payload), FORMAT_SHOWN(one));
		else if (ret)
			base_no_memory(error, "names", payload->count);
		ret = about(ret, one, error);
	}
	format_names_free(names);
	return ret;
}

/* ---- Records given by the caller ------------------------------------------------------------- */

/* Names in this folder are the library's own. */
#define RESERVED_FOLDER ".ioshape/"

/* Returns whether each part between slashes is a file name that unpacks below the target folder. */
static bool parts_valid(const char *name)
{
	for (;;) {
		size_t bytes = strcspn(name, "/");

		if (!bytes || (bytes == 1 && name[0] == '.') ||
		    (bytes == 2 && name[0] == '.' && name[1] == '.'))
			return false;
		if (!name[bytes])
			return true;
		name += bytes + 1;
	}
}

static int check_record_name(const char *name, const char *path, struct base_error *error)
{
	int ret = format_check_name("record", name, error);

	if (ret)
		return ret;
	if (!parts_valid(name))
		return base_fail_reason(
			error, -EINVAL,
			"cannot write record \"%s\" to \"%s\": names are relative paths "
			"without \".\", \"..\" or empty parts",
			FORMAT_SHOWN(name), path);
	if (!strncmp(name, RESERVED_FOLDER, strlen(RESERVED_FOLDER)))
		return base_fail_reason(
			error, -EINVAL,
			"cannot write record \"%s\" to \"%s\": the folder " RESERVED_FOLDER
			" is reserved for ioshape",
			FORMAT_SHOWN(name), path);
	return 0;
}

static int check_alignment(const struct ioshape_record *record, const char *path,
			   struct base_error *error)
{
	const uint32_t alignment = record->alignment;

	if (alignment & (alignment - 1) || alignment > FORMAT_LARGE_ALIGNMENT)
		return base_fail_reason(
			error, -EINVAL,
			"cannot align record \"%s\" of \"%s\" to %u bytes: it must be a "
			"power of two up to %u",
			FORMAT_SHOWN(record->name), path, alignment, FORMAT_LARGE_ALIGNMENT);
	return 0;
}

static int check_record(const struct ioshape_record *record, const char *path,
			struct base_error *error)
{
	int ret = check_record_name(record->name, path, error);

	if (!ret)
		ret = check_alignment(record, path, error);
	if (ret)
		return ret;
	if (record->data && record->fetch)
		return base_fail_reason_with(
			error, -EINVAL, "give one of them",
			"record \"%s\" for \"%s\" has both data and a function to fetch "
			"it",
			FORMAT_SHOWN(record->name), path);
	if (record->bytes == FORMAT_UNKNOWN_BYTES)
		return base_fail_reason_with(error, -EINVAL,
					     "use ioshape_file_open() for bytes of unknown length",
					     "record \"%s\" for \"%s\" must have a known size",
					     FORMAT_SHOWN(record->name), path);
	if ((record->dtype && !ioshape_dtype_bytes(record->dtype)) || record->group > UINT8_MAX)
		return base_fail_reason(
			error, -EINVAL,
			"record \"%s\" for \"%s\" has the dtype %u and the group %u, "
			"and one of them is unknown",
			FORMAT_SHOWN(record->name), path, record->dtype, record->group);
	if (record->bytes && !record->data && !record->fetch)
		return base_fail_reason(
			error, -EINVAL, "record \"%s\" for \"%s\" has %llu bytes but no data",
			FORMAT_SHOWN(record->name), path, (unsigned long long)record->bytes);
	return 0;
}

static const char *record_name(const struct save_payload *payload, size_t i)
{
	return payload->records[i].name;
}

static int plan_records(struct save_plan *plan, const struct save_payload *payload,
			struct base_error *error)
{
	struct arena arena;
	size_t copy_bytes = 0;
	int ret = 0;

	for (size_t i = 0; !ret && i < payload->count; i++) {
		const struct ioshape_record *record = &payload->records[i];

		ret = check_record(record, plan->path, error);
		if (!ret)
			ret = count_copy(&copy_bytes, space_for(strlen(record->name) + 1),
					 "names of the records", error);
		ret = about(ret, record->name, error);
	}
	if (!ret)
		ret = check_unique(plan, payload, record_name, -EEXIST, error);
	if (!ret)
		ret = make_space(plan, payload->count, copy_bytes, &arena, error);
	for (size_t i = 0; !ret && i < payload->count; i++) {
		const struct ioshape_record *from = &payload->records[i];

		plan->records[i] = (struct save_record){
			.name = hand_out(&arena, from->name, strlen(from->name) + 1),
			.bytes = from->bytes,
			.alignment = from->alignment,
			.dtype = from->dtype,
			.group = (uint8_t)from->group,
			.data = from->data,
			.fetch = from->fetch,
			.fetch_user = from->fetch_user,
			.later = payload->later && payload->later[i] && from->bytes,
		};
		plan->later |= plan->records[i].later;
		plan->fetches |= from->fetch && from->bytes;
	}
	return ret;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

/* Computes how a tensor becomes the bytes of a record. */
static int lay_out(const struct ioshape_tensor *tensor, enum save_kind kind,
		   struct format_layout *layout, struct base_error *error)
{
	return kind == SAVE_SAFETENSORS ? format_layout_safetensors(tensor, layout, error) :
					  format_layout_tensor(tensor, layout, error);
}

/* Checks each tensor and counts the memory for copies. The strides of layouts go to scratch,
 * because this pass only checks. */
static int check_tensors(const struct save_payload *payload, size_t *copy_bytes,
			 struct base_error *error)
{
	int64_t strides[IOSHAPE_MAX_DIMS];
	struct format_layout layout = { .strides = strides };
	int ret = 0;

	*copy_bytes = 0;
	for (size_t i = 0; !ret && i < payload->count; i++) {
		const struct ioshape_tensor *tensor = &payload->tensors[i];

		ret = lay_out(tensor, payload->kind, &layout, error);
		if (!ret)
			ret = count_copy(copy_bytes,
					 space_for(strlen(tensor->name) + 1) +
						 3 * tensor->dims * sizeof(int64_t),
					 "names and shapes of the tensors", error);
		ret = about(ret, tensor->name, error);
	}
	return ret;
}

static const char *tensor_name(const struct save_payload *payload, size_t i)
{
	return payload->tensors[i].name;
}

/* Copies a tensor except its bytes, and fills in the record that will contain them. */
static void copy_tensor(struct save_plan *plan, size_t i, const struct ioshape_tensor *from,
			struct save_record *record, struct arena *arena)
{
	size_t bytes = from->dims * sizeof(int64_t);
	struct ioshape_tensor *to = &plan->tensors[i];
	struct format_layout *layout = &plan->layouts[i];

	*to = *from;
	to->name = hand_out(arena, from->name, strlen(from->name) + 1);
	to->shape = hand_out(arena, from->shape, bytes);
	to->strides = hand_out(arena, from->strides, bytes);
	if (!from->strides)
		to->strides = NULL;
	layout->strides = hand_out(arena, NULL, bytes);
	/* This cannot fail: check_tensors() made the same call. */
	lay_out(to, plan->safetensors ? SAVE_SAFETENSORS : SAVE_TENSORS, layout, NULL);
	record->name = to->name;
	record->bytes = layout->bytes;
	record->data = to->data;
	record->dtype = to->dtype;
}

/* Allocates `own` records, those of `count` checked tensors, and the tensors' tables. */
static int make_space_for_tensors(struct save_plan *plan, size_t own, size_t count,
				  size_t copy_bytes, struct arena *arena, struct base_error *error)
{
	int ret = make_space(plan, own + count, copy_bytes, arena, error);

	if (ret)
		return ret;
	plan->own = own;
	plan->tensors = calloc(MAX(count, 1), sizeof(*plan->tensors));
	plan->layouts = calloc(MAX(count, 1), sizeof(*plan->layouts));
	if (!plan->tensors || !plan->layouts)
		return base_no_memory(error, "a plan", count * sizeof(*plan->tensors));
	return 0;
}

/* ---- A zip: the pickle and its companions, then one record for each tensor ------------------- */

static void add_to_table(struct save_plan *plan, size_t i, struct arena *arena)
{
	struct save_record *record = &plan->records[RECORDS_BEFORE_TENSORS + i];
	const struct ioshape_tensor *tensor = &plan->tensors[i];
	char name[32];

	plan->rows[i] = (struct format_tensor_row){
		.name = tensor->name,
		.dtype = tensor->dtype,
		.dims = tensor->dims,
		.shape = tensor->shape,
		.strides = plan->layouts[i].strides,
		.record = RECORDS_BEFORE_TENSORS + i,
	};
	snprintf(name, sizeof(name), "data/%zu", i);
	record->name = hand_out(arena, name, strlen(name) + 1);
}

static int copy_into_zip(struct save_plan *plan, const struct save_payload *payload,
			 size_t copy_bytes, struct base_error *error)
{
	size_t count = payload->count;
	struct arena arena;
	int ret;

	ret = make_space_for_tensors(plan, RECORDS_BEFORE_TENSORS, count,
				     copy_bytes + count * RECORD_NAME_BYTES, &arena, error);
	if (ret)
		return ret;
	plan->rows = calloc(MAX(count, 1), sizeof(*plan->rows));
	if (!plan->rows)
		return base_no_memory(error, "a plan", count * sizeof(*plan->rows));
	for (size_t i = 0; i < count; i++) {
		copy_tensor(plan, i, &payload->tensors[i],
			    &plan->records[RECORDS_BEFORE_TENSORS + i], &arena);
		add_to_table(plan, i, &arena);
	}
	plan->index.has_table = true;
	plan->index.tensor_count = count;
	plan->index.tensors = plan->rows;
	return 0;
}

/* Adds the records that torch needs beside the tensors. */
static int add_companions(struct save_plan *plan, size_t tensors, struct base_error *error)
{
	if (format_pickle_tensors(&plan->head, plan->tensors, plan->layouts, tensors))
		return base_no_memory(error, "the pickle", tensors * 128);
	plan->records[0] = (struct save_record){
		.name = "data.pkl",
		.data = plan->head.data,
		.bytes = plan->head.bytes,
	};
	plan->records[1] = (struct save_record){
		.name = "byteorder",
		.data = BYTE_ORDER_TEXT,
		.bytes = strlen(BYTE_ORDER_TEXT),
	};
	plan->records[2] = (struct save_record){
		.name = "version",
		.data = VERSION_TEXT,
		.bytes = strlen(VERSION_TEXT),
	};
	return 0;
}

/* ---- A safetensors file: the header, then the tensors in the order of the format ------------- */

static int compare_tensors(const void *one, const void *other)
{
	return format_safetensors_compare(*(const struct ioshape_tensor *const *)one,
					  *(const struct ioshape_tensor *const *)other);
}

static int copy_sorted(struct save_plan *plan, const struct save_payload *payload,
		       size_t copy_bytes, struct base_error *error)
{
	const size_t count = payload->count;
	const struct ioshape_tensor **order;
	struct arena arena;
	int ret;

	ret = make_space_for_tensors(plan, 1, count, copy_bytes, &arena, error);
	if (ret)
		return ret;
	order = reallocarray(NULL, MAX(count, 1), sizeof(*order));
	if (!order)
		return base_no_memory(error, "a plan", count * sizeof(*order));
	for (size_t i = 0; i < count; i++)
		order[i] = &payload->tensors[i];
	qsort(order, count, sizeof(*order), compare_tensors);
	for (size_t i = 0; i < count; i++)
		copy_tensor(plan, i, order[i], &plan->records[1 + i], &arena);
	free(order);
	return 0;
}

static int add_header(struct save_plan *plan, size_t tensors,
		      const struct ioshape_metadata *metadata, struct base_error *error)
{
	int ret = format_safetensors_header(&plan->head, plan->tensors, tensors, metadata, error);

	if (ret)
		return ret;
	plan->records[0] = (struct save_record){
		.name = "header",
		.data = plan->head.data,
		.bytes = plan->head.bytes,
	};
	return 0;
}

/* ---- The plan -------------------------------------------------------------------------------- */

static int plan_tensors(struct save_plan *plan, const struct save_payload *payload,
			const struct ioshape_metadata *metadata, struct base_error *error)
{
	size_t copy_bytes;
	int ret;

	ret = check_tensors(payload, &copy_bytes, error);
	if (!ret)
		ret = check_unique(plan, payload, tensor_name, -EINVAL, error);
	if (!ret && plan->safetensors) {
		ret = copy_sorted(plan, payload, copy_bytes, error);
		return ret ? ret : add_header(plan, payload->count, metadata, error);
	}
	if (!ret)
		ret = copy_into_zip(plan, payload, copy_bytes, error);
	return ret ? ret : add_companions(plan, payload->count, error);
}

static int lay_out_record(const struct save_plan *plan, const struct save_record *record,
			  struct format_length *length)
{
	if (plan->safetensors)
		return __builtin_add_overflow(length->cursor, record->bytes, &length->cursor) ||
				       length->cursor > (uint64_t)INT64_MAX ?
			       IOSHAPE_E_LIMIT :
			       0;
	return format_length_add(length, strlen(FORMAT_FOLDER) + strlen(record->name),
				 record->bytes, record->alignment);
}

/* Alignment of large records in staging memory. They have the position within a page that they will
 * have in the file, because direct I/O writes whole pages from there. */
#define PAGE_BYTES 4096u

static uint64_t staged_at(const struct save_plan *plan, const struct save_record *record,
			  const struct format_length *behind)
{
	const uint64_t at = plan->staged_bytes;
	const uint32_t alignment = record->alignment ? record->alignment :
						       format_default_alignment(record->bytes);

	if (record->bytes < FORMAT_LARGE_RECORD_BYTES)
		return at;
	if (plan->safetensors)
		return at + (behind->cursor - record->bytes - at) % PAGE_BYTES;
	return alignment % PAGE_BYTES ? at : base_round_up(at, PAGE_BYTES);
}

/* Computes the position of each record, in the file and in staging memory, and the exact size of
 * the file. IOSHAPE_E_LIMIT also covers the sum of all records. */
static int lay_out_records(struct save_plan *plan, struct base_error *error)
{
	struct format_length length = { 0 };
	int ret = 0;

	for (size_t i = 0; !ret && i < plan->count; i++) {
		struct save_record *record = &plan->records[i];

		ret = lay_out_record(plan, record, &length);
		if (ret || i < plan->own)
			continue;
		record->start = staged_at(plan, record, &length);
		plan->staged_bytes = record->start + record->bytes;
		plan->payload_bytes += record->bytes;
	}
	if (!ret && !plan->safetensors)
		ret = format_length_add_index(&length, &plan->index);
	if (ret)
		return base_fail_with(error, ret, "split the data over several files",
				      "the data to save to %s is too large for one file",
				      plan->path);
	plan->expected_bytes = plan->safetensors ? length.cursor : format_length_of(&length);
	return 0;
}

int save_plan_make(struct save_plan *plan, const char *path, const struct save_payload *payload,
		   const struct ioshape_metadata *metadata, bool examine, struct base_error *error)
{
	/* The index needs one record of its own. */
	const bool records = payload->kind == SAVE_RECORDS;
	size_t most = records ? FORMAT_MAX_RECORDS - 1 : IOSHAPE_MAX_TENSORS;
	bool given = records ? payload->records != NULL : payload->tensors != NULL;
	int ret;

	memset(plan, 0, sizeof(*plan));
	plan->path = path;
	plan->safetensors = payload->kind == SAVE_SAFETENSORS;
	plan->checksums = payload->checksums;
	plan->index.has_statistics = examine;
	if (payload->count && !given)
		return base_fail_reason(error, -EINVAL, "the array of %zu %s is NULL",
					payload->count, kind_of(payload));
	if (payload->count > most)
		return base_fail_reason_with(
			error, IOSHAPE_E_LIMIT, BASE_WORDS("save at most %zu", most),
			"%zu %s in one file", payload->count, kind_of(payload));
	ret = save_take_metadata(&plan->index.metadata, &plan->metadata_memory, metadata, error);
	if (!ret)
		ret = records ? plan_records(plan, payload, error) :
				plan_tensors(plan, payload, metadata ? &plan->index.metadata : NULL,
					     error);
	if (!ret)
		ret = lay_out_records(plan, error);
	if (ret)
		save_plan_free(plan);
	return ret;
}

void save_plan_free(struct save_plan *plan)
{
	base_buffer_free(&plan->head);
	free(plan->metadata_memory);
	free(plan->memory);
	free(plan->rows);
	free(plan->layouts);
	free(plan->tensors);
	free(plan->examined);
	free(plan->records);
	memset(plan, 0, sizeof(*plan));
}

/* ---- Copying a record's bytes ---------------------------------------------------------------- */

static int fetch(const struct save_plan *plan, const struct save_record *record, uint64_t offset,
		 void *into, size_t bytes, struct base_error *error)
{
	int ret = record->fetch(record->fetch_user, offset, into, bytes);

	if (!ret)
		return 0;
	ret = base_fail(error, ret < 0 && ret > -4096 ? ret : -EIO,
			"cannot save to \"%s\": fetching record \"%s\" at offset %llu returned %d",
			plan->path, FORMAT_SHOWN(record->name), (unsigned long long)offset, ret);
	return about(ret, record->name, error);
}

int save_plan_copy(const struct save_plan *plan, size_t i, uint64_t offset, void *into,
		   size_t bytes, struct base_error *error)
{
	const struct save_record *record = &plan->records[i];

	if (!bytes)
		return 0; /* data may be NULL if the record is empty */
	if (record->fetch)
		return fetch(plan, record, offset, into, bytes, error);
	memcpy(into, (const char *)record->data + offset, bytes);
	return 0;
}

/* ---- Writing the records of a plan ----------------------------------------------------------- */

/* If a thread works alone, it checks after so many bytes whether others should help. */
#define ALONE_BYTES (4 * MIB)

/* Returns the length of the next piece. It ends at a multiple of its greatest length in the file,
 * so that the writer can borrow whole pages. Staging memory has the same multiples. */
static size_t piece_of(const struct save_examining *examining, const struct save_parallel *parallel,
		       const uint8_t *data, size_t bytes)
{
	const size_t most = examining->statistics ? SAVE_CACHED_BYTES : ALONE_BYTES;
	const uint64_t at = parallel && parallel->file ? io_writer_offset(parallel->file) :
							 (uintptr_t)data;

	return MIN(bytes, most - at % most);
}

static void examine(struct save_examining *examining, const struct save_parallel *parallel,
		    const uint8_t *data, size_t bytes)
{
	const uint64_t begin_ns = base_now_ns();

	base_statistics_add(examining->statistics, &examining->rest, data, bytes);
	if (parallel && parallel->file)
		io_writer_spent(parallel->file, base_now_ns() - begin_ns);
}

/* Puts bytes of a record, and examines them. */
static int examine_and_put(struct save_examining *examining, struct save_parallel *parallel,
			   const struct save_sink *sink, const uint8_t *data, size_t bytes,
			   struct base_error *error)
{
	size_t piece;
	int ret = 0;

	for (; !ret && bytes; data += piece, bytes -= piece, examining->offset += piece) {
		piece = parallel ? bytes : 0;
		if (parallel)
			ret = save_parallel_put(parallel, examining, sink, data, &piece, error);
		if (ret || piece)
			continue;
		piece = piece_of(examining, parallel, data, bytes);
		if (examining->statistics)
			examine(examining, parallel, data, piece);
		ret = sink->put(sink->to, data, piece, NULL, error);
	}
	return ret;
}

int save_bring_record(const struct save_plan *plan, size_t i, const struct save_source *source,
		      const struct save_sink *sink, struct base_error *error)
{
	const struct save_record *record = &plan->records[i];
	struct save_parallel *parallel = i < plan->own ? NULL : source->parallel;
	const void *data = record->data;
	struct save_examining examining;
	size_t run;
	uint64_t done;
	int ret = 0;

	examining.statistics = plan->examined ? &plan->examined[i].statistics : NULL;
	examining.offset = 0;
	base_statistics_restart(&examining.rest);
	if (examining.statistics && !base_statistics_begin(examining.statistics, record->dtype))
		examining.statistics = NULL;
	for (done = 0; !ret && done < record->bytes; done += run) {
		run = record->bytes - done;
		if (i >= plan->own)
			ret = source->next(source->user, i, done, &data, &run, error);
		if (!ret)
			ret = examine_and_put(&examining, parallel, sink, data, run, error);
	}
	if (examining.statistics)
		base_statistics_end(examining.statistics, &examining.rest);
	return ret;
}

static int put_in_archive(void *zip, const void *data, size_t bytes, const uint32_t *crc,
			  struct base_error *error)
{
	return crc ? format_writer_put_summed(zip, data, bytes, *crc, error) :
		     format_writer_put(zip, data, bytes, error);
}

int save_write_records(struct format_writer *zip, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error)
{
	const struct save_sink sink = { put_in_archive, zip };
	struct format_index index = plan->index;
	const struct format_entry *entries;
	uint64_t count;
	int ret = 0;

	for (size_t i = 0; !ret && i < plan->count; i++) {
		const struct save_record *record = &plan->records[i];

		ret = format_writer_begin(zip, record->name, record->bytes, record->alignment,
					  error);
		if (!ret)
			ret = save_bring_record(plan, i, source, &sink, error);
		if (!ret)
			ret = format_writer_end(zip, error);
	}
	if (!ret && compare) {
		entries = format_writer_entries(zip, &count);
		ret = save_examine(compare, plan, entries, error);
		index.alarms = compare->alarms;
	}
	return ret ? ret : format_writer_finish(zip, &index, error);
}

/* ---- The source that reads the caller's memory ----------------------------------------------- */

/* Bytes fetched in one call of the caller's function. Each call to a device costs its latency. */
#define FETCH_BYTES (4 * MIB)

/* Most threads of a save. More find too little memory bandwidth, and too little of a block. */
#define MOST_THREADS 4u

void save_direct_to_file(void *user, struct io_writer *file)
{
	struct save_direct *direct = user;

	direct->file = file;
}

struct save_parallel *save_direct_parallel(struct save_direct *direct,
					   const struct ioshape_context *context)
{
	direct->parallel.helpers = MIN(context->config.threads, MOST_THREADS) - 1;
	return &direct->parallel;
}

struct save_source save_direct_source(struct save_direct *direct,
				      const struct ioshape_context *context)
{
	return (struct save_source){ save_direct_next, save_direct_to_file, direct,
				     save_direct_parallel(direct, context) };
}

void save_source_to_file(const struct save_source *source, struct io_writer *file)
{
	source->to_file(source->user, file);
	if (source->parallel)
		source->parallel->file = file;
}

void save_direct_end(struct save_direct *direct)
{
	save_parallel_close(&direct->parallel);
	free(direct->scratch);
}

/* Finds memory in which up to *bytes bytes can be made: in the file's block, or in scratch. May
 * lower *bytes. */
static int find_space(struct save_direct *direct, uint8_t **to, size_t *bytes,
		      struct base_error *error)
{
	size_t space;
	int ret;

	if (direct->file) {
		ret = io_writer_space(direct->file, to, &space, error);
		*bytes = ret ? 0 : MIN(*bytes, space);
		return ret;
	}
	if (!direct->scratch)
		direct->scratch = malloc(FETCH_BYTES);
	*to = direct->scratch;
	return *to ? 0 : base_no_memory(error, "a write buffer", FETCH_BYTES);
}

int save_direct_next(void *user, size_t i, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error)
{
	struct save_direct *direct = user;
	const struct save_record *record = &direct->plan->records[i];
	uint8_t *to;
	int ret;

	if (!record->fetch) {
		if (direct->file)
			io_writer_borrow(direct->file, record->data, record->bytes);
		*data = (const char *)record->data + offset;
		return 0;
	}
	*bytes = MIN(*bytes, FETCH_BYTES);
	ret = find_space(direct, &to, bytes, error);
	*data = to;
	return ret ? ret : save_plan_copy(direct->plan, i, offset, to, *bytes, error);
}
