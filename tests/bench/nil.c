/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nil BYTES FOLDER ROUNDS: measures saves and loads without storage. The engine "nil" completes
 * each request at once and moves no byte, so what is left is the work of the processor. Each round
 * saves tensors in each way of the table below, loads zeros, and does the work of a save without
 * the library's order. It prints a line of JSON for each. The saved file in FOLDER has no content.
 * The engine exists only in this program.
 */
#define _GNU_SOURCE
#include "bench.h"

#include "io/queue.h"
#include "save/context.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The engine ------------------------------------------------------------------------------ */

struct nil {
	const uint8_t *memory; /* the queue's buffers */
	size_t memory_bytes;
	struct io_op *first;
	struct io_op **end;
};

/* Bytes of requests that are in memory of the caller. */
static uint64_t borrowed_bytes;

static int nil_open(void **engine, const struct io_engine_params *params, char *why,
		    size_t why_bytes)
{
	struct nil *nil = calloc(1, sizeof(*nil));

	(void)why_bytes;
	why[0] = 0;
	*engine = nil;
	if (!nil)
		return -ENOMEM;
	/* Pages of their own: the kernel's page of zeros would always be in a cache. */
	memset(params->memory, 0, params->memory_bytes);
	nil->memory = params->memory;
	nil->memory_bytes = params->memory_bytes;
	nil->end = &nil->first;
	return 0;
}

static uint64_t bytes_borrowed_by(const struct nil *nil, const struct io_op *op)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < op->range_count; i++) {
		const uint8_t *at = op->ranges[i].iov_base;

		if (at < nil->memory || at >= nil->memory + nil->memory_bytes)
			bytes += op->ranges[i].iov_len;
	}
	return bytes;
}

static int nil_submit(void *engine, struct io_op *op)
{
	struct nil *nil = engine;

	borrowed_bytes += bytes_borrowed_by(nil, op);
	op->result = (int64_t)op->bytes;
	op->next = NULL;
	*nil->end = op;
	nil->end = &op->next;
	return 0;
}

static struct io_op *nil_wait(void *engine)
{
	struct nil *nil = engine;
	struct io_op *op = nil->first;

	if (op) {
		nil->first = op->next;
		if (!nil->first)
			nil->end = &nil->first;
	}
	return op;
}

static void nil_close(void *engine)
{
	free(engine);
}

static const struct io_engine_ops nil_ops = {
	.id = "nil",
	.direct = true,
	.open = nil_open,
	.submit = nil_submit,
	.wait = nil_wait,
	.close = nil_close,
};

/* ---- Tensors --------------------------------------------------------------------------------- */

#define PAGE_BYTES 4096u

/* Clears the highest bit of the exponents of floats, because random bits contain infinities, which
 * no checkpoint of a healthy training has. */
static void make_finite(struct ioshape_tensor *tensor)
{
	const unsigned bytes = ioshape_dtype_bytes(tensor->dtype);
	uint8_t *at = (uint8_t *)(uintptr_t)tensor->data;
	const uint64_t size = tensor_bytes(tensor);

	if (tensor->dtype != IOSHAPE_BFLOAT16 && tensor->dtype != IOSHAPE_FLOAT32)
		return;
	for (uint64_t i = bytes - 1; i < size; i += bytes)
		at[i] &= 0xbf;
}

/* Smaller tensors are copied anyway. */
#define LEAST_MOVED_BYTES (64 * KIB)

/* Returns the tensors without a page at either end, so that each large one begins at this offset in
 * a page. */
static struct workload moved(const struct workload *workload, uintptr_t offset)
{
	struct workload result = { .count = workload->count };

	result.tensors = calloc(workload->count, sizeof(*result.tensors));
	if (!result.tensors)
		fail("no memory for tensors");
	for (size_t i = 0; i < workload->count; i++) {
		struct ioshape_tensor *tensor = &result.tensors[i];
		int64_t *shape = malloc(sizeof(*shape));

		*tensor = workload->tensors[i];
		if (!shape)
			fail("no memory for tensors");
		*shape = tensor->shape[0];
		tensor->shape = shape;
		if (tensor_bytes(tensor) >= LEAST_MOVED_BYTES) {
			*shape -= (int64_t)(2 * PAGE_BYTES / ioshape_dtype_bytes(tensor->dtype));
			tensor->data = (const char *)tensor->data + PAGE_BYTES + offset -
				       (uintptr_t)tensor->data % PAGE_BYTES;
		}
		result.bytes += tensor_bytes(tensor);
	}
	return result;
}

/* ---- Saves ----------------------------------------------------------------------------------- */

/* Offset of torch's large tensors in a page, which local filesystems rarely accept. */
#define TORCH_OFFSET TENSOR_ALIGNMENT

/* An offset that every filesystem accepts which reports the alignment of direct I/O. It is not that
 * of a page, which a filesystem accepts that reports nothing. */
#define ALIGNED_OFFSET 512

static const struct way {
	const char *name;
	uintptr_t offset; /* of large tensors in a page */
	unsigned cores;   /* 0: all */
	const char *examine;
	bool staged; /* a background save */
} ways[] = {
	{ "copied", TORCH_OFFSET, 1, "off", false },
	{ "examined", TORCH_OFFSET, 1, NULL, false },
	{ "examined_by_all", TORCH_OFFSET, 0, NULL, false },
	{ "borrowed", ALIGNED_OFFSET, 1, "off", false },
	{ "borrowed_examined", ALIGNED_OFFSET, 1, NULL, false },
	{ "borrowed_examined_by_all", ALIGNED_OFFSET, 0, NULL, false },
	{ "staged_examined", ALIGNED_OFFSET, 1, NULL, true },
	{ "staged_examined_by_all", ALIGNED_OFFSET, 0, NULL, true },
};

#define WAYS (sizeof(ways) / sizeof(*ways))

/* Opens a context whose rule for the number of threads sees so many cores; 0: all. */
static struct ioshape_context *open_nil(unsigned cores, const char *examine)
{
	static const struct io_engine_ops *const engines[] = { &nil_ops, NULL };
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	cpu_set_t all, few;

	if (sched_getaffinity(0, sizeof(all), &all))
		fail("cannot read the cores of this process");
	few = all;
	for (int core = 0; cores && core < CPU_SETSIZE; core++)
		if (CPU_COUNT(&few) > (int)cores)
			CPU_CLR(core, &few);
	sched_setaffinity(0, sizeof(few), &few);
	options.examine = examine;
	options.coordinator = "open";
	if (ioshape_context_open(&context, &options))
		fail("no context: %s", ioshape_last_error()->sentence);
	sched_setaffinity(0, sizeof(all), &all);
	context->config.engines = engines;
	return context;
}

static void save(struct ioshape_context *context, const struct way *way, const char *path,
		 const struct workload *workload)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *background = NULL;
	struct cost cost;

	borrowed_bytes = 0;
	options.report = way->staged ? NULL : &report;
	cost_begin(&cost);
	if (ioshape_save_tensors(context, path, workload->tensors, workload->count, &options,
				 way->staged ? &background : NULL))
		fail("cannot save: %s", ioshape_last_error()->sentence);
	if (background) {
		/* The copy to staging memory is over. */
		cost_begin(&cost);
		if (ioshape_save_wait(background, -1))
			fail("cannot save: %s", ioshape_last_error()->sentence);
	}
	cost_end(&cost);
	if (background && ioshape_save_get_report(background, &report))
		fail("no report: %s", ioshape_last_error()->sentence);
	ioshape_save_free(background);
	answer_text("way", way->name);
	answer_number("tensor_bytes", (double)workload->bytes);
	answer_number("borrowed_bytes", (double)borrowed_bytes);
	answer_number("write_s", report.write_s);
	answer_number("direct", report.direct);
	answer_number("threads", context->config.threads);
	answer_send();
}

/* ---- Loads ----------------------------------------------------------------------------------- */

static const struct load_way {
	const char *name;
	unsigned cores; /* 0: all */
} load_ways[] = { { "loaded", 1 }, { "loaded_by_all", 0 } };

#define LOAD_WAYS (sizeof(load_ways) / sizeof(*load_ways))

/* Saves zeros, which are also what the buffers of a queue hold that the engine never fills. */
static void save_zeros(const char *path, uint8_t *zeros, uint64_t bytes)
{
	const int64_t shape = (int64_t)bytes;
	const struct ioshape_tensor tensor = {
		.name = "zeros", .dtype = IOSHAPE_UINT8, .dims = 1, .shape = &shape, .data = zeros
	};
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	options.coordinator = "open";
	options.direct = IOSHAPE_DIRECT_REQUIRE;
	if (ioshape_context_open(&context, &options) ||
	    ioshape_save_tensors(context, path, &tensor, 1, NULL, NULL))
		fail("cannot save zeros: %s", ioshape_last_error()->sentence);
	ioshape_context_free(context);
}

static void load(struct ioshape_context *context, const struct load_way *way, const char *path,
		 uint8_t *into, uint64_t bytes)
{
	const struct ioshape_load_request request = { .bytes = bytes, .into = into };
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader *reader;
	struct cost cost;

	options.shared = IOSHAPE_OFF;
	if (ioshape_reader_open(context, path, &options, &reader))
		fail("cannot open: %s", ioshape_last_error()->sentence);
	cost_begin(&cost);
	if (ioshape_reader_load(reader, &request, 1))
		fail("cannot load: %s", ioshape_last_error()->sentence);
	cost_end(&cost);
	ioshape_reader_free(reader);
	answer_text("way", way->name);
	answer_number("tensor_bytes", (double)bytes);
	answer_send();
}

/* ---- The ceiling ----------------------------------------------------------------------------- */

/* Bytes that a thread examines, and then moves while they are in its cache. */
#define PIECE_BYTES (128 * KIB)
/* Bytes that a thread takes at a time. */
#define SLICE_BYTES (4 * MIB)
/* Memory into which a thread copies: its half of a queue's buffers. */
#define TARGET_BYTES (28 * MIB)

/* Threads that share the work of a save, and nothing else: no order, no file, no hand-over. */
static const struct ceiling {
	const char *name;
	unsigned threads;
} ceilings[] = { { "ceiling_one", 1 }, { "ceiling_two", 2 } };

#define MOST_THREADS 2

struct share {
	pthread_t thread;
	const struct workload *workload;
	_Atomic unsigned *next; /* first slice that no thread has taken */
	uint8_t *target;
	size_t moved; /* position in the target */
	uint32_t crc;
};

static void move_slice(struct share *share, enum ioshape_dtype dtype, const uint8_t *data,
		       uint64_t bytes)
{
	struct base_statistics_rest rest = { 0 };
	struct base_statistics statistics;
	size_t piece;

	base_statistics_begin(&statistics, dtype);
	for (; bytes; data += piece, bytes -= piece) {
		piece = MIN(bytes, PIECE_BYTES);
		base_statistics_add(&statistics, &rest, data, piece);
		share->crc = base_copy_crc32(share->crc, share->target + share->moved, data, piece);
		share->moved = (share->moved + PIECE_BYTES) % TARGET_BYTES;
	}
	base_statistics_end(&statistics, &rest);
}

static void *move_slices(void *user)
{
	struct share *share = user;
	unsigned mine = atomic_fetch_add(share->next, 1), slice = 0;

	for (size_t i = 0; i < share->workload->count; i++) {
		const struct ioshape_tensor *tensor = &share->workload->tensors[i];
		const uint64_t bytes = tensor_bytes(tensor);

		for (uint64_t at = 0; at < bytes; at += SLICE_BYTES, slice++) {
			if (slice != mine)
				continue;
			move_slice(share, tensor->dtype, (const uint8_t *)tensor->data + at,
				   MIN(bytes - at, SLICE_BYTES));
			mine = atomic_fetch_add(share->next, 1);
		}
	}
	return NULL;
}

static void reach_ceiling(const struct ceiling *ceiling, const struct workload *workload,
			  uint8_t *targets[MOST_THREADS])
{
	struct share shares[MOST_THREADS];
	_Atomic unsigned next = 0;
	struct cost cost;

	cost_begin(&cost);
	for (unsigned i = 0; i < ceiling->threads; i++) {
		shares[i] =
			(struct share){ .workload = workload, .next = &next, .target = targets[i] };
		if (i && pthread_create(&shares[i].thread, NULL, move_slices, &shares[i]))
			fail("cannot start a thread");
	}
	move_slices(&shares[0]);
	for (unsigned i = 1; i < ceiling->threads; i++)
		pthread_join(shares[i].thread, NULL);
	cost_end(&cost);
	answer_text("way", ceiling->name);
	answer_number("tensor_bytes", (double)workload->bytes);
	answer_send();
}

int main(int count, char **arguments)
{
	struct ioshape_context *contexts[WAYS], *load_contexts[LOAD_WAYS];
	struct workload all = { 0 }, workloads[WAYS];
	uint8_t *targets[MOST_THREADS];
	char path[4096], zeros_path[4096];
	uint8_t *zeros;

	if (count != 4)
		fail("usage: bench-nil BYTES FOLDER ROUNDS");
	snprintf(path, sizeof(path), "%s/nil.pt", arguments[2]);
	workload_make_mixed(&all, strtoull(arguments[1], NULL, 10));
	for (size_t i = 0; i < all.count; i++)
		make_finite(&all.tensors[i]);
	for (size_t i = 0; i < WAYS; i++) {
		workloads[i] = moved(&all, ways[i].offset);
		contexts[i] = open_nil(ways[i].cores, ways[i].examine);
	}
	zeros = base_map(all.bytes);
	if (!zeros)
		fail("no memory for a load");
	snprintf(zeros_path, sizeof(zeros_path), "%s/zeros.pt", arguments[2]);
	save_zeros(zeros_path, zeros, all.bytes);
	for (size_t i = 0; i < LOAD_WAYS; i++)
		load_contexts[i] = open_nil(load_ways[i].cores, NULL);
	for (unsigned i = 0; i < MOST_THREADS; i++) {
		targets[i] = base_map(TARGET_BYTES);
		if (!targets[i])
			fail("no memory for copies");
		memset(targets[i], 0, TARGET_BYTES);
	}
	for (int round = 0; round < atoi(arguments[3]); round++) {
		for (size_t i = 0; i < WAYS; i++)
			save(contexts[i], &ways[i], path, &workloads[i]);
		for (size_t i = 0; i < LOAD_WAYS; i++)
			load(load_contexts[i], &load_ways[i], zeros_path, zeros, all.bytes);
		for (size_t i = 0; i < ARRAY_LENGTH(ceilings); i++)
			reach_ceiling(&ceilings[i], &workloads[0], targets);
	}
	for (size_t i = 0; i < WAYS; i++)
		ioshape_context_free(contexts[i]);
	for (size_t i = 0; i < LOAD_WAYS; i++)
		ioshape_context_free(load_contexts[i]);
	return 0;
}
