/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics as JSON. */
#include "stripefs.h"

#include <stdlib.h>

static const char *const names[OP_KINDS] = {
	[OP_LOOKUP] = "lookup",     [OP_GETATTR] = "getattr",   [OP_SETATTR] = "setattr",
	[OP_CREATE] = "create",     [OP_OPEN] = "open",         [OP_CLOSE] = "close",
	[OP_UNLINK] = "unlink",     [OP_RENAME] = "rename",     [OP_LINK] = "link",
	[OP_SYMLINK] = "symlink",   [OP_READLINK] = "readlink", [OP_MKNOD] = "mknod",
	[OP_MKDIR] = "mkdir",       [OP_RMDIR] = "rmdir",       [OP_READDIR] = "readdir",
	[OP_GETXATTR] = "getxattr", [OP_SETXATTR] = "setxattr", [OP_IOCTL] = "ioctl",
	[OP_STATFS] = "statfs",     [OP_FSYNC] = "fsync",       [OP_FALLOCATE] = "fallocate",
};

struct statistics statistics;

void statistics_reset(void)
{
	statistics = (struct statistics){ .started_ns = now_ns() };
	for (unsigned int i = 0; i <= options.targets; i++) {
		struct target *target = &targets[i];

		target->requests = target->seeks = target->busy_ns = 0;
		target->bytes_read = target->bytes_written = 0;
		target->longest_queue = target->queue;
	}
}

/*
 * Counts a write request. A stripe that is larger than the largest request comes in several
 * requests, so such a request is aligned if it begins at a multiple of the largest size. A request
 * that begins elsewhere in the last stripe of a file is not counted as unaligned, because a file
 * may end within a stripe.
 */
void statistics_write(struct node *node, uint64_t offset, uint32_t bytes)
{
	const struct component *component = layout_component(node->layout, offset);
	const uint64_t size = component->stripe_size;
	const uint64_t unit = size < BLOCK_BYTES ? size : BLOCK_BYTES;
	const uint64_t first = offset / size, last = (offset + bytes - 1) / size;
	const bool off = offset % unit != 0;

	statistics.write_requests++;
	statistics.bytes_written += bytes;
	if (!node->ever_written || last > node->last_stripe) {
		statistics.off_stripe += node->pending_off;
		node->pending_off = 0;
		node->last_stripe = last;
		node->ever_written = true;
	}
	statistics.crossing += last > first;
	if (off && (last > first || first < node->last_stripe))
		statistics.off_stripe++;
	else
		node->pending_off += off;
}

static void target_text(FILE *text, unsigned int index)
{
	const struct target *target = &targets[index];

	fprintf(text,
		"%s{\"index\": %u, \"requests\": %ju, \"seeks\": %ju, \"bytes_read\": %ju, "
		"\"bytes_written\": %ju, \"busy_s\": %.6f, \"queue\": %u, \"longest_queue\": %u, "
		"\"used_bytes\": %ju, \"free_bytes\": %ju}",
		index ? ", " : "", index, target->requests, target->seeks, target->bytes_read,
		target->bytes_written, (double)target->busy_ns / NS_PER_S, target->queue,
		target->longest_queue, target->used_bytes,
		target->capacity_bytes - target->used_bytes);
}

char *statistics_text(void)
{
	char *bytes = NULL;
	size_t size;
	FILE *text = open_memstream(&bytes, &size);
	uint64_t sum = 0;

	if (!text)
		abort();
	for (int kind = 0; kind < OP_KINDS; kind++)
		sum += statistics.operations[kind];
	fprintf(text, "{\"elapsed_s\": %.6f, \"metadata\": {\"total\": %ju",
		(double)(now_ns() - statistics.started_ns) / NS_PER_S, sum);
	for (int kind = 0; kind < OP_KINDS; kind++)
		fprintf(text, ", \"%s\": %ju", names[kind], statistics.operations[kind]);
	fprintf(text,
		"}, \"writes\": {\"requests\": %ju, \"bytes\": %ju, \"crossing\": %ju, "
		"\"off_stripe\": %ju, \"misaligned\": %ju, \"direct\": %ju}, \"reads\": "
		"{\"requests\": %ju, \"bytes\": %ju, \"direct\": %ju}, \"nodes\": %ju, "
		"\"targets\": [",
		statistics.write_requests, statistics.bytes_written, statistics.crossing,
		statistics.off_stripe, statistics.misaligned, statistics.direct_writes,
		statistics.read_requests, statistics.bytes_read, statistics.direct_reads,
		tree_nodes());
	/* The last entry of `targets` is the metadata server's own storage and is left out. */
	for (unsigned int i = 0; i < options.targets; i++)
		target_text(text, i);
	fprintf(text, "]}");
	if (fclose(text))
		abort();
	return bytes;
}
