/* SPDX-License-Identifier: Apache-2.0 */
/* What comes before the first byte of a file: how and where it is to lie, and room for it. */
#define _GNU_SOURCE
#include "ring/writer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ring_writer_reserve(struct ring_writer *writer, struct base_error *error)
{
	const struct ring_reservation reservation = {
		.bytes = writer->options.expected_bytes,
		.offset = writer->options.part_offset,
		.most_bytes = writer->most_bytes,
		.block_bytes = writer->keeps_length || writer->file.shared ?
				       0 :
				       writer->lane->shape.block_bytes,
		.fs = &writer->fs,
		.log = &writer->lane->config.log,
	};
	int ret;

	if (reservation.bytes <= RING_SMALL_FILE_BYTES || writer->file.stream)
		return 0;
	ret = ring_writer_check_limit(writer, reservation.bytes, error);
	return ret ? ret :
		     ring_destination_reserve(&writer->file, &reservation, writer->notes, error);
}

/* Engine, block and depth for this file. */
static int take_shape(struct ring_writer *writer, struct base_error *error)
{
	const struct ring_shape shape =
		ring_shape_for(&writer->lane->config, &writer->fs, writer->options.expected_bytes,
			       writer->shape_why, sizeof(writer->shape_why));

	return ring_lane_shape(writer->lane, &shape, error);
}

static bool goes_direct(const struct ring_config *config)
{
	const struct ring_engine_ops *ops = ring_engine_of(config->engine);

	return config->direct != IOSHAPE_DIRECT_OFF && (!ops || ops->direct);
}

/* If the umask is as it was, the kernel applies it, or in its place the directory's default ACL. */
static int changed_umask(const struct ring_file_options *options)
{
	return options->umask_then == 1 + base_umask() ? 0 : options->umask_then;
}

static void plan_stripes(struct ring_writer *writer)
{
	const struct ring_file_options *options = &writer->options;
	struct ring_lane *lane = writer->lane;
	const uint64_t bytes = options->part_bytes ? options->file_bytes : options->expected_bytes;
	const bool small = bytes && bytes <= RING_SMALL_FILE_BYTES;

	writer->striping = (struct ring_striping){
		.request = small ? NULL : &lane->config.layout,
		.bytes = bytes,
		.files = options->files,
		.place = options->place,
		.places = options->places,
		.direct = !small && goes_direct(&lane->config),
		.direct_required = lane->config.direct == IOSHAPE_DIRECT_REQUIRE,
		.umask_then = changed_umask(options),
		.memory = &lane->fs_memory,
		.log = &lane->config.log,
	};
}

/* What the new file is on. */
static int look_at_file(struct ring_writer *writer, const char *path, struct base_error *error)
{
	struct fs_memory *memory = &writer->lane->fs_memory;
	int ret;

	ret = fs_describe(writer->file.fd, path, memory, &writer->fs, error);
	if (ret || writer->file.stream || writer->file.shared ||
	    !ring_striping_guessed_wrong(&writer->striping, &writer->fs))
		return ret;
	ret = ring_destination_begin_again(&writer->file, &writer->striping, writer->notes, error);
	return ret ? ret : fs_describe(writer->file.fd, path, memory, &writer->fs, error);
}

static int open_file(struct ring_writer *writer, const char *path, struct base_error *error)
{
	const struct ring_file_options *options = &writer->options;
	int ret;

	plan_stripes(writer);
	ret = options->part_bytes ?
		      ring_destination_open_shared(&writer->file, path, &writer->striping,
						   writer->notes, error) :
		      ring_destination_open(&writer->file, path, options->unseen, &writer->striping,
					    writer->notes, error);
	if (!ret)
		ret = ring_writer_tell(writer, IOSHAPE_PHASE_PLAN, error);
	if (ret)
		return ret;
	if (options->tidying && !writer->file.stream)
		ring_remove_stale(writer->file.directory_fd, writer->file.directory,
				  options->tidying, &writer->lane->config.log);
	ret = look_at_file(writer, path, error);
	if (ret)
		return ret;
	writer->file.frees_here = fs_is_local(writer->fs.family);
	snprintf(writer->notes->filesystem, sizeof(writer->notes->filesystem), "%s",
		 writer->fs.type);
	ret = take_shape(writer, error);
	/* With direct=require the end is padded: GlusterFS opens the file with O_DIRECT on its
	 * servers as well. They refuse writes of partial units, and report it at fsync. */
	writer->keeps_length = options->exact && !writer->file.stream &&
			       options->expected_bytes > RING_SMALL_FILE_BYTES &&
			       writer->lane->config.direct != IOSHAPE_DIRECT_REQUIRE &&
			       !fs_is_local(writer->fs.family);
	return ret ? ret : ring_writer_reserve(writer, error);
}

/* There is only a name, for messages. */
static int open_nothing(struct ring_writer *writer, const char *path, struct base_error *error)
{
	int ret;

	writer->file.path = strdup(path);
	if (!writer->file.path)
		return base_no_memory(error, "a path", strlen(path));
	ring_note(writer->notes, IOSHAPE_STEP_NOTHING, "the nil engine writes nothing");
	ret = take_shape(writer, error);
	return ret ? ret : ring_writer_tell(writer, IOSHAPE_PHASE_PLAN, error);
}

int ring_writer_open(struct ring_writer **out, struct ring_lane *lane, const char *path,
		     const struct ring_file_options *options, struct ring_notes *notes,
		     struct base_error *error)
{
	uint64_t begin = base_now_ns();
	struct ring_writer *writer;
	int ret;

	*out = NULL;
	writer = calloc(1, sizeof(*writer));
	if (!writer)
		return base_no_memory(error, "a file writer", sizeof(*writer));
	writer->lane = lane;
	writer->options = *options;
	writer->notes = notes;
	writer->file.directory_fd = writer->file.fd = writer->file.lock_fd = -1;
	writer->nil = lane->config.engine == IOSHAPE_ENGINE_NIL;
	writer->most_bytes = base_largest_file();
	ret = writer->nil ? open_nothing(writer, path, error) : open_file(writer, path, error);
	writer->plan_ns = base_now_ns() - begin;
	if (ret) {
		ring_writer_free(writer);
		return ret;
	}
	*out = writer;
	return 0;
}
