/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nil BYTES FOLDER ROUNDS: measures saves without storage. The engine "nil" completes each write at
 * once and moves no byte, so what is left is the work of the processor. Each round saves tensors
 * in each way of the table below, and prints a line of JSON for each save. The file in FOLDER has
 * no content. The engine exists only in this program.
 */
#define _GNU_SOURCE
#include "bench.h"

#include "io/queue.h"
#include "save/context.h"

#include <errno.h>
#include <sched.h>
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

/* Bytes of all requests, and those of them that are in memory of the caller. */
static uint64_t written_bytes, borrowed_bytes;

static int nil_open(void **engine, const struct io_engine_params *params, char *why,
		    size_t why_bytes)
{
	struct nil *nil = calloc(1, sizeof(*nil));

	(void)why_bytes;
	why[0] = 0;
	*engine = nil;
	if (!nil)
		return -ENOMEM;
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

	written_bytes += op->bytes;
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
} ways[] = {
	{ "copied", TORCH_OFFSET, 1, "off" },
	{ "examined", TORCH_OFFSET, 1, NULL },
	{ "examined_by_all", TORCH_OFFSET, 0, NULL },
	{ "borrowed", ALIGNED_OFFSET, 1, "off" },
	{ "borrowed_examined", ALIGNED_OFFSET, 1, NULL },
	{ "borrowed_examined_by_all", ALIGNED_OFFSET, 0, NULL },
};

#define WAYS (sizeof(ways) / sizeof(*ways))

/* Opens a context whose rule for the number of threads sees so many cores; 0: all. */
static struct ioshape_context *open_nil(const struct way *way)
{
	static const struct io_engine_ops *const engines[] = { &nil_ops, NULL };
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	cpu_set_t all, few;

	if (sched_getaffinity(0, sizeof(all), &all))
		fail("cannot read the cores of this process");
	few = all;
	for (int core = 0; way->cores && core < CPU_SETSIZE; core++)
		if (CPU_COUNT(&few) > (int)way->cores)
			CPU_CLR(core, &few);
	sched_setaffinity(0, sizeof(few), &few);
	options.examine = way->examine;
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
	struct cost cost;

	written_bytes = borrowed_bytes = 0;
	options.report = &report;
	cost_begin(&cost);
	if (ioshape_save_tensors(context, path, workload->tensors, workload->count, &options, NULL))
		fail("cannot save: %s", ioshape_last_error()->sentence);
	cost_end(&cost);
	answer_text("way", way->name);
	answer_number("tensor_bytes", (double)workload->bytes);
	answer_number("written_bytes", (double)written_bytes);
	answer_number("borrowed_bytes", (double)borrowed_bytes);
	answer_number("write_s", report.write_s);
	answer_number("direct", report.direct);
	answer_number("threads", context->config.threads);
	answer_send();
}

int main(int count, char **arguments)
{
	struct ioshape_context *contexts[WAYS];
	struct workload all = { 0 }, workloads[WAYS];
	char path[4096];

	if (count != 4)
		fail("usage: bench-nil BYTES FOLDER ROUNDS");
	snprintf(path, sizeof(path), "%s/nil.pt", arguments[2]);
	workload_make_mixed(&all, strtoull(arguments[1], NULL, 10));
	for (size_t i = 0; i < all.count; i++)
		make_finite(&all.tensors[i]);
	for (size_t i = 0; i < WAYS; i++) {
		workloads[i] = moved(&all, ways[i].offset);
		contexts[i] = open_nil(&ways[i]);
	}
	for (int round = 0; round < atoi(arguments[3]); round++)
		for (size_t i = 0; i < WAYS; i++)
			save(contexts[i], &ways[i], path, &workloads[i]);
	for (size_t i = 0; i < WAYS; i++)
		ioshape_context_free(contexts[i]);
	return 0;
}
