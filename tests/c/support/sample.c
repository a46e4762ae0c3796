/* SPDX-License-Identifier: Apache-2.0 */
#include "support/sample.h"

#include "support/must.h"
#include "support/open_context.h"
#include "support/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
	const char *name;
	enum ioshape_dtype dtype;
	uint32_t dims;
	int64_t shape[4];
	int64_t strides[4]; /* all 0: contiguous */
} kinds[SAMPLE_TENSORS] = {
	{ .name = "layer.0.weight", .dtype = IOSHAPE_FLOAT32, .dims = 2, .shape = { 128, 64 } },
	{ .name = "layer.0.bias", .dtype = IOSHAPE_BFLOAT16, .dims = 1, .shape = { 77 } },
	{ .name = "step", .dtype = IOSHAPE_INT64, .dims = 0 },
	{ .name = "empty", .dtype = IOSHAPE_FLOAT16, .dims = 3, .shape = { 4, 0, 5 } },
	{ .name = "large", .dtype = IOSHAPE_UINT8, .dims = 1 },
	{ .name = "transposed",
	  .dtype = IOSHAPE_FLOAT64,
	  .dims = 2,
	  .shape = { 50, 70 },
	  .strides = { 1, 50 } },
	{ .name = "permuted",
	  .dtype = IOSHAPE_INT32,
	  .dims = 3,
	  .shape = { 4, 15, 40 },
	  .strides = { 40, 160, 1 } },
	{ .name = "\xc3\xa4\xe4\xb8\xad/with.dots and spaces",
	  .dtype = IOSHAPE_COMPLEX64,
	  .dims = 4,
	  .shape = { 2, 3, 4, 5 } },
	{ .name = "last", .dtype = IOSHAPE_BOOL, .dims = 1, .shape = { 100001 } },
};

static const struct ioshape_attribute attributes[2] = { { "model", "sample" }, { "note", "" } };

static uint64_t elements_of(const struct ioshape_tensor *tensor)
{
	uint64_t count = 1;

	for (uint32_t i = 0; i < tensor->dims; i++)
		count *= (uint64_t)tensor->shape[i];
	return count;
}

static void fill(uint64_t *state, void *memory, size_t bytes, enum ioshape_dtype dtype)
{
	uint8_t *to = memory;

	test_random_fill(state, memory, bytes);
	for (size_t i = 0; dtype == IOSHAPE_BOOL && i < bytes; i++)
		to[i] &= 1;
}

static void make_tensor(struct sample *sample, size_t i, uint64_t *state, size_t large_bytes)
{
	struct ioshape_tensor *tensor = &sample->tensors[i];
	size_t element = ioshape_dtype_bytes(kinds[i].dtype);
	uint64_t elements;

	memcpy(sample->shapes[i], kinds[i].shape, sizeof(kinds[i].shape));
	memcpy(sample->strides[i], kinds[i].strides, sizeof(kinds[i].strides));
	*tensor = (struct ioshape_tensor){
		.name = kinds[i].name,
		.dtype = kinds[i].dtype,
		.dims = kinds[i].dims,
		.shape = sample->shapes[i],
		.strides = kinds[i].strides[0] ? sample->strides[i] : NULL,
	};
	if (!strcmp(tensor->name, "large"))
		sample->shapes[i][0] = (int64_t)large_bytes;
	elements = elements_of(tensor);
	sample->bytes[i] = elements * element;
	sample->memory[i] = malloc(sample->bytes[i] + 1);
	sample->expected[i] = malloc(sample->bytes[i] + 1);
	MUST(sample->memory[i] && sample->expected[i], "memory for %s", tensor->name);
	fill(state, sample->memory[i], sample->bytes[i], tensor->dtype);
	tensor->data = elements ? sample->memory[i] : NULL;
	memcpy(sample->expected[i], sample->memory[i], sample->bytes[i]);
	sample->total_bytes += sample->bytes[i];
}

void sample_make(struct sample *sample, uint64_t seed, size_t large_bytes)
{
	uint64_t state = seed;

	memset(sample, 0, sizeof(*sample));
	sample->seed = seed;
	sample->count = SAMPLE_TENSORS;
	for (size_t i = 0; i < SAMPLE_TENSORS; i++)
		make_tensor(sample, i, &state, large_bytes);
	memcpy(sample->attributes, attributes, sizeof(attributes));
	sample->metadata = (struct ioshape_metadata)IOSHAPE_METADATA_INIT;
	sample->metadata.step = (int64_t)seed;
	sample->metadata.blob = "blob\0with zero";
	sample->metadata.blob_bytes = 15;
	sample->metadata.attributes = sample->attributes;
	sample->metadata.attribute_count = 2;
}

void sample_free(struct sample *sample)
{
	for (size_t i = 0; i < sample->count; i++) {
		free(sample->memory[i]);
		free(sample->expected[i]);
	}
	memset(sample, 0, sizeof(*sample));
}

void sample_spoil(struct sample *sample)
{
	for (size_t i = 0; i < sample->count; i++)
		memset(sample->memory[i], 0xa5, sample->bytes[i]);
}

/* ---- Comparison with a file ------------------------------------------------------------------ */

static int complain(char *why, size_t why_bytes, const char *what, const char *name)
{
	snprintf(why, why_bytes, "%s of %s", what, name);
	return -EBADMSG;
}

static int check_info(struct ioshape_reader *reader, const struct sample *sample, size_t i,
		      uint64_t *index, char *why, size_t why_bytes)
{
	const struct ioshape_tensor *tensor = &sample->tensors[i];
	struct ioshape_tensor_info info = { .size = sizeof(info) };
	int ret = ioshape_reader_find_tensor(reader, tensor->name, index);

	if (!ret)
		ret = ioshape_reader_get_tensor(reader, *index, &info);
	if (ret) {
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
		return ret;
	}
	if (info.dtype != tensor->dtype || info.dims != tensor->dims)
		return complain(why, why_bytes, "dtype or dims", tensor->name);
	if (info.bytes != sample->bytes[i])
		return complain(why, why_bytes, "bytes", tensor->name);
	for (uint32_t k = 0; k < info.dims; k++)
		if (info.shape[k] != tensor->shape[k])
			return complain(why, why_bytes, "shape", tensor->name);
	return 0;
}

static int check_data(struct ioshape_reader *reader, const struct sample *sample, char *why,
		      size_t why_bytes)
{
	struct ioshape_load_request requests[SAMPLE_TENSORS];
	uint8_t *memory = malloc(sample->total_bytes + 1), *at = memory;
	int ret = 0;

	if (!memory)
		return -ENOMEM;
	for (size_t i = 0; !ret && i < sample->count; i++) {
		requests[i] =
			(struct ioshape_load_request){ .bytes = sample->bytes[i], .into = at };
		at += sample->bytes[i];
		ret = check_info(reader, sample, i, &requests[i].tensor, why, why_bytes);
	}
	if (ret)
		goto out;
	ret = ioshape_reader_load(reader, requests, sample->count);
	if (ret) {
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
		goto out;
	}
	for (size_t i = 0; !ret && i < sample->count; i++)
		if (memcmp(requests[i].into, sample->expected[i], sample->bytes[i]) != 0)
			ret = complain(why, why_bytes, "the bytes", sample->tensors[i].name);
out:
	free(memory);
	return ret;
}

static int check_metadata(struct ioshape_reader *reader, const struct sample *sample, char *why,
			  size_t why_bytes)
{
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	int ret = ioshape_reader_get_metadata(reader, &metadata);

	if (ret)
		return ret;
	if (metadata.step != sample->metadata.step ||
	    metadata.blob_bytes != sample->metadata.blob_bytes ||
	    (metadata.blob_bytes &&
	     memcmp(metadata.blob, sample->metadata.blob, metadata.blob_bytes) != 0) ||
	    metadata.attribute_count != sample->metadata.attribute_count)
		return complain(why, why_bytes, "metadata", "the file");
	for (size_t i = 0; i < metadata.attribute_count; i++)
		if (strcmp(metadata.attributes[i].name, sample->attributes[i].name) != 0 ||
		    strcmp(metadata.attributes[i].value, sample->attributes[i].value) != 0)
			return complain(why, why_bytes, "attributes", "the file");
	return 0;
}

int sample_check_reader(struct ioshape_reader *reader, const struct sample *sample, char *why,
			size_t why_bytes)
{
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	int ret;

	ret = ioshape_reader_get_info(reader, &info);
	if (ret)
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
	else if (info.tensors != sample->count)
		ret = complain(why, why_bytes, "the number", "tensors");
	if (!ret)
		ret = check_data(reader, sample, why, why_bytes);
	return ret ? ret : check_metadata(reader, sample, why, why_bytes);
}

int sample_check(struct ioshape_context *context, const char *path, const struct sample *sample,
		 char *why, size_t why_bytes)
{
	struct ioshape_reader *reader;
	int ret;

	ret = ioshape_reader_open(context, path, NULL, &reader);
	if (ret) {
		snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
		return ret;
	}
	ret = sample_check_reader(reader, sample, why, why_bytes);
	ioshape_reader_free(reader);
	return ret;
}

int sample_save(struct ioshape_context *context, const char *path, const struct sample *sample,
		const struct ioshape_save_options *options)
{
	struct ioshape_save_options own = IOSHAPE_SAVE_OPTIONS_INIT;

	own.metadata = &sample->metadata;
	return ioshape_save_tensors(context, path, sample->tensors, sample->count,
				    options ? options : &own, NULL);
}

int sample_write_raw(struct ioshape_context *context, const char *path, const struct sample *sample)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;
	int ret;

	options.expected_bytes = sample->total_bytes;
	ret = ioshape_file_open(context, path, &options, &file);
	if (ret)
		return file ? -EBADMSG : ret;
	for (size_t i = 0; !ret && i < sample->count; i++)
		ret = ioshape_file_write(file, sample->expected[i], sample->bytes[i]);
	if (!ret)
		ret = ioshape_file_commit(file, NULL);
	ioshape_file_free(file);
	return ret;
}

int sample_write_records(struct ioshape_context *context, const char *path,
			 const struct sample *sample)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_record records[SAMPLE_TENSORS] = { 0 };
	char names[SAMPLE_TENSORS][32];

	options.metadata = &sample->metadata;
	for (size_t i = 0; i < sample->count; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%zu", i);
		records[i].name = names[i];
		records[i].data = sample->bytes[i] ? sample->expected[i] : NULL;
		records[i].bytes = sample->bytes[i];
	}
	return ioshape_save_records(context, path, records, sample->count, &options, NULL);
}

int sample_load(struct ioshape_reader *reader, const struct sample *sample, void *into)
{
	struct ioshape_load_request requests[SAMPLE_TENSORS];
	uint8_t *at = into;
	int ret;

	for (size_t i = 0; i < sample->count; i++) {
		requests[i] = (struct ioshape_load_request){ i, 0, sample->bytes[i], at };
		at += sample->bytes[i];
	}
	ret = ioshape_reader_load(reader, requests, sample->count);
	for (size_t i = 0; !ret && i < sample->count; i++)
		if (memcmp(requests[i].into, sample->expected[i], sample->bytes[i]) != 0)
			ret = -EBADMSG;
	return ret;
}

struct ioshape_context *sample_context(enum ioshape_engine engine, enum ioshape_direct direct)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	int ret;

	options.engine = engine;
	options.direct = direct;
	options.staging_bytes = 64 << 20;
	ret = open_context_with(&context, &options,
				(struct test_rules){ .block_bytes = 64 * 1024, .queue_depth = 4 });
	MUST(!ret, "%s", ioshape_last_error()->sentence);
	return context;
}
