/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a file and counts the requests that the library sends, with an engine that looks at each
 * and passes it to io_uring. For filesystems whose kernel client cuts requests before a server sees
 * them.
 *
 *     requests PATH BYTES
 *
 * prints {"requests": N, "crossing": N, "off_stripe": N, "longest": BYTES} for the layout that the
 * file was given. The last request of the file is not counted in `crossing` and `off_stripe`.
 *
 *     requests PATH BYTES auto | ENGINE [BLOCK_BYTES DEPTH]
 *
 * counts nothing. It uses the engine that the library chooses, or this one, and prints {"engine":
 * ..., "block_bytes": N, "depth": N, "direct": 0 | 1, "choice": ..., "seconds": S}
 */
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_REQUESTS 100000

static struct {
	uint64_t offset;
	size_t bytes;
} sent[MOST_REQUESTS];
static size_t count;
static struct io_shape shape; /* requests of the last file written */
static char choice[160];      /* why that shape was chosen */

static int counting_submit(void *engine, struct io_op *op)
{
	if (op->kind == IO_WRITE && count < MOST_REQUESTS) {
		sent[count].offset = op->offset;
		sent[count++].bytes = op->bytes;
	}
	return io_engine_uring.submit(engine, op);
}

static int write_file(const char *path, uint64_t bytes, const struct io_config *config,
		      struct ioshape_report *report, struct base_error *error)
{
	const struct io_file_options options = { .expected_bytes = bytes };
	struct io_downgrades downgrades = { 0 };
	struct io_writer *writer = NULL;
	struct io_queue *queue = NULL;
	const size_t piece = MIB + 12345; /* unaligned, as data usually is */
	uint8_t *data = calloc(1, piece);
	int ret = data ? io_queue_open(&queue, config, error) : -ENOMEM;

	if (!ret)
		ret = io_writer_open(&writer, queue, path, &options, &downgrades, error);
	for (uint64_t done = 0; !ret && done < bytes; done += piece)
		ret = io_writer_put(writer, data, MIN(piece, bytes - done), NULL, error);
	if (!ret)
		ret = io_writer_finish(writer, error);
	if (!ret)
		ret = io_writer_commit(writer, error);
	if (!ret) {
		io_writer_report(writer, report);
		shape = queue->shape;
		snprintf(choice, sizeof(choice), "%s", io_writer_choice(writer));
	}
	io_writer_free(writer);
	io_queue_close(queue);
	free(data);
	return ret;
}

static const struct fs_component *component_at(const struct fs_layout *layout, uint64_t offset)
{
	for (uint32_t i = 0; i < layout->count; i++) {
		if (offset >= layout->components[i].begin && offset < layout->components[i].end)
			return &layout->components[i];
	}
	return NULL;
}

static int tell(const char *path, struct base_error *error)
{
	size_t crossing = 0, off_stripe = 0, longest = 0;
	struct fs_info info;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	int ret = fd < 0 ? -errno : fs_describe(fd, path, NULL, &info, error);

	for (size_t i = 0; !ret && i + 1 < count; i++) {
		const struct fs_component *component = component_at(&info.layout, sent[i].offset);
		const uint64_t stripe = component ? component->stripe_bytes : 0;

		longest = MAX(longest, sent[i].bytes);
		if (!stripe)
			ret = base_fail(error, -EINVAL, "%s has no stripes", path);
		else if (sent[i].offset % stripe)
			off_stripe++;
		else if (sent[i].bytes > stripe || sent[i].offset + sent[i].bytes > component->end)
			crossing++;
	}
	if (fd >= 0)
		close(fd);
	if (!ret)
		printf("{\"requests\": %zu, \"crossing\": %zu, \"off_stripe\": %zu, "
		       "\"longest\": %zu}\n",
		       count, crossing, off_stripe, longest);
	return ret;
}

static bool take_choice(struct io_config *config, int given, char **words)
{
	if (!strcmp(words[0], "auto"))
		return given == 1;
	while (config->engine <= IOSHAPE_ENGINE_BUFFERED &&
	       (!io_engine_of(config->engine) ||
		strcmp(io_engine_of(config->engine)->id, words[0]) != 0))
		config->engine++;
	if (given == 3) {
		config->block_bytes = strtoull(words[1], NULL, 10);
		config->depth = (unsigned)strtoul(words[2], NULL, 10);
	}
	return config->engine <= IOSHAPE_ENGINE_BUFFERED && (given == 1 || given == 3);
}

static void tell_choice(const struct ioshape_report *report)
{
	printf("{\"engine\": \"%s\", \"block_bytes\": %llu, \"depth\": %u, \"direct\": %u, "
	       "\"choice\": \"%s\", \"seconds\": %.6f}\n",
	       report->engine, (unsigned long long)shape.block_bytes, shape.depth, report->direct,
	       choice, report->write_s + report->sync_s);
}

int main(int argc, char **argv)
{
	struct io_engine_ops counting = io_engine_uring;
	const struct io_engine_ops *const engines[] = { &counting, NULL };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct io_config config = { .threads = 1 };
	struct base_error error = { 0 };
	int ret;

	if (argc < 3 || (argc > 3 && !take_choice(&config, argc - 3, argv + 3)))
		return 2;
	counting.submit = counting_submit;
	if (argc == 3) {
		config.engines = engines;
		/* In the page cache the kernel would cut the requests itself. */
		config.direct = IOSHAPE_DIRECT_REQUIRE;
	}
	ret = write_file(argv[1], strtoull(argv[2], NULL, 10), &config, &report, &error);
	if (!ret && argc == 3)
		ret = tell(argv[1], &error);
	else if (!ret)
		tell_choice(&report);
	if (ret)
		fprintf(stderr, "%s\n", error.text);
	return ret ? 1 : 0;
}
