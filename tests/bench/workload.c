/* SPDX-License-Identifier: Apache-2.0 */
/* Makes tensors like those of a training process. */
#define _GNU_SOURCE
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Contents -------------------------------------------------------------------------------- */

/* Returns the next number of splitmix64. No layer below can compress, deduplicate or skip these
 * bytes. */
static uint64_t next_random(uint64_t *state)
{
	uint64_t value = *state += 0x9e3779b97f4a7c15;

	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
	value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
	return value ^ (value >> 31);
}

static void fill(uint8_t *data, uint64_t bytes, uint64_t seed)
{
	uint64_t value, done;

	for (done = 0; done + sizeof(value) <= bytes; done += sizeof(value)) {
		value = next_random(&seed);
		memcpy(data + done, &value, sizeof(value));
	}
	value = next_random(&seed);
	memcpy(data + done, &value, bytes - done);
}

static uint64_t digest(const uint8_t *data, uint64_t bytes, uint64_t before)
{
	uint64_t value, done;

	for (done = 0; done + sizeof(value) <= bytes; done += sizeof(value)) {
		memcpy(&value, data + done, sizeof(value));
		before = (before ^ value) * 0x9e3779b97f4a7c15;
		before ^= before >> 29;
	}
	for (; done < bytes; done++)
		before = (before ^ data[done]) * 0x9e3779b97f4a7c15;
	return before;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

uint64_t tensor_bytes(const struct ioshape_tensor *tensor)
{
	uint64_t bytes = ioshape_dtype_bytes(tensor->dtype);

	for (uint32_t i = 0; i < tensor->dims; i++)
		bytes *= (uint64_t)tensor->shape[i];
	return bytes;
}

static void add_tensor(struct workload *workload, const char *name, enum ioshape_dtype dtype,
		       uint64_t bytes)
{
	struct ioshape_tensor *tensors, *tensor;
	int64_t *shape = malloc(sizeof(*shape));
	void *data = NULL;

	tensors = realloc(workload->tensors, (workload->count + 1) * sizeof(*tensors));
	if (!tensors || !shape || posix_memalign(&data, TENSOR_ALIGNMENT, bytes))
		fail("no memory for tensors");
	workload->tensors = tensors;
	tensor = &tensors[workload->count];
	shape[0] = (int64_t)(bytes / ioshape_dtype_bytes(dtype));
	*tensor =
		(struct ioshape_tensor){ .dtype = dtype, .dims = 1, .shape = shape, .data = data };
	tensor->name = strdup(name);
	if (!tensor->name)
		fail("no memory for names");
	/* Ranks have tensors of their own: a checkpoint keeps those that are alike only once. */
	fill(data, bytes, ((uint64_t)getpid() << 32) + workload->count);
	workload->count++;
	workload->bytes += tensor_bytes(tensor);
}

/*
 * One layer of a transformer under Adam: weights in bf16, some moments in fp32, and small tensors.
 * A size is fixed, or given in millionths of all bytes. Odd values keep sizes off round numbers.
 */
struct part {
	const char *name;
	enum ioshape_dtype dtype;
	unsigned millionths;
	unsigned fixed_bytes;
};

#define LAYERS 24

static const struct part layer_parts[] = {
	{ "norm1.weight", IOSHAPE_BFLOAT16, 0, 8192 },
	{ "attention.qkv.weight", IOSHAPE_BFLOAT16, 4117, 0 },
	{ "attention.qkv.bias", IOSHAPE_BFLOAT16, 0, 24578 },
	{ "attention.out.weight", IOSHAPE_BFLOAT16, 1371, 0 },
	{ "norm2.weight", IOSHAPE_FLOAT32, 0, 16384 },
	{ "up.weight", IOSHAPE_BFLOAT16, 5503, 0 },
	{ "up.bias", IOSHAPE_FLOAT32, 0, 44036 },
	{ "down.weight", IOSHAPE_BFLOAT16, 5489, 0 },
	{ "exp_avg", IOSHAPE_FLOAT32, 8231, 0 },
	{ "exp_avg_sq", IOSHAPE_FLOAT32, 8219, 0 },
	{ "step", IOSHAPE_INT64, 0, 8 },
	{ "rng", IOSHAPE_UINT8, 0, 5056 },
};

static const struct part other_parts[] = {
	{ "embedding.weight", IOSHAPE_BFLOAT16, 71003, 0 },
	{ "scale", IOSHAPE_FLOAT32, 0, 4 },
	{ "epoch", IOSHAPE_INT64, 0, 8 },
};

static void add_part(struct workload *workload, const char *prefix, const struct part *part,
		     uint64_t total)
{
	uint64_t bytes = total / 1000000 * part->millionths + part->fixed_bytes;
	uint64_t element = ioshape_dtype_bytes(part->dtype);
	char name[128];

	snprintf(name, sizeof(name), "%s%s", prefix, part->name);
	add_tensor(workload, name, part->dtype, bytes / element * element);
}

void workload_make_mixed(struct workload *workload, uint64_t bytes)
{
	const struct part *part;
	char prefix[64];

	for (unsigned layer = 0; layer < LAYERS; layer++) {
		snprintf(prefix, sizeof(prefix), "layers.%u.", layer);
		for (part = layer_parts; part < layer_parts + sizeof(layer_parts) / sizeof(*part);
		     part++)
			add_part(workload, prefix, part, bytes);
	}
	for (part = other_parts; part < other_parts + sizeof(other_parts) / sizeof(*part); part++)
		add_part(workload, "", part, bytes);
	if (workload->bytes > bytes)
		fail("a mixed checkpoint takes at least %llu bytes",
		     (unsigned long long)workload->bytes);
	/* One more tensor has the missing bytes, about a seventh of all. */
	add_tensor(workload, "head.weight", IOSHAPE_UINT8, bytes - workload->bytes);
}

void workload_make_equal(struct workload *workload, uint64_t count, uint64_t each)
{
	char name[32];

	for (uint64_t i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "tensor.%llu", (unsigned long long)i);
		add_tensor(workload, name, IOSHAPE_UINT8, each);
	}
}

void workload_free(struct workload *workload)
{
	for (size_t i = 0; i < workload->count; i++) {
		free((void *)(uintptr_t)workload->tensors[i].name);
		free((void *)(uintptr_t)workload->tensors[i].shape);
		free((void *)(uintptr_t)workload->tensors[i].data);
	}
	free(workload->tensors);
	free(workload->twin);
	memset(workload, 0, sizeof(*workload));
}

/* Uses huge pages where possible, as the library does for its own memory. */
void workload_need_twin(struct workload *workload, uint64_t bytes)
{
	const size_t huge_page = 2 << 20;
	void *twin;

	if (workload->twin_bytes >= bytes)
		return;
	free(workload->twin);
	workload->twin_bytes = (bytes + huge_page - 1) / huge_page * huge_page;
	if (posix_memalign(&twin, huge_page, workload->twin_bytes))
		fail("no memory for a second copy of the tensors");
	madvise(twin, workload->twin_bytes, MADV_HUGEPAGE);
	memset(twin, 1, workload->twin_bytes);
	workload->twin = twin;
}

uint64_t workload_digest(const struct workload *workload)
{
	uint64_t value = 0;

	for (size_t i = 0; i < workload->count; i++)
		value = digest(workload->tensors[i].data, tensor_bytes(&workload->tensors[i]),
			       value);
	return value;
}

void workload_spoil(struct workload *workload)
{
	for (size_t i = 0; i < workload->count; i++)
		memset((void *)(uintptr_t)workload->tensors[i].data, 0x5a,
		       tensor_bytes(&workload->tensors[i]));
}
