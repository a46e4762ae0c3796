/* SPDX-License-Identifier: Apache-2.0 */
/* Writes checkpoints of many ranks from existing files, as a group would. */
#ifndef TESTS_SUPPORT_CHECKPOINT_FILES_H
#define TESTS_SUPPORT_CHECKPOINT_FILES_H

#include "group/group.h"
#include "support/file_writer.h"
#include "support/must.h"

#include <ioshape/group.h>

#include <stdlib.h>

#define CHECKPOINT_MOST_RANKS 64
#define CHECKPOINT_BOUNDARY 65536

static inline struct base_buffer checkpoint_read(const char *path)
{
	struct base_error error = { 0 };
	struct base_buffer data = { 0 };
	struct io_folder here;
	char *copy = strdup(path), *slash = strrchr(copy, '/');

	*slash = 0;
	MUST(!io_folder_open(&here, copy, &error), "%s", error.text);
	MUST(!io_folder_get(&here, slash + 1, GIB, &data, NULL, &error), "%s", error.text);
	io_folder_close(&here);
	free(copy);
	return data;
}

static inline void checkpoint_write_each(const struct group_attempt *attempt,
					 struct format_manifest *manifest, char **paths)
{
	struct base_error error = { 0 };

	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		struct base_buffer data = checkpoint_read(paths[rank]);
		struct format_manifest_file *file = &manifest->files[rank];

		file->name = malloc(FORMAT_SHARD_NAME_BYTES);
		format_shard_name(file->name, rank);
		file->bytes = data.bytes;
		file->crc32 = base_crc32(0, data.data, data.bytes);
		manifest->shards[rank] = (struct format_manifest_shard){ .file = rank,
									 .crc32 = file->crc32,
									 .bytes = data.bytes };
		MUST(!io_folder_put(&attempt->folder, file->name, data.data, data.bytes, &error),
		     "%s", error.text);
		base_buffer_free(&data);
	}
	manifest->file_count = manifest->rank_count;
}

static inline void checkpoint_write_bundle(const struct group_attempt *attempt,
					   struct format_manifest *manifest, char **paths)
{
	struct file_write write = file_write_defaults();
	struct format_manifest_file *file = &manifest->files[0];
	char path[4096], name[FORMAT_SHARD_NAME_BYTES];
	const struct format_entry *member;
	struct format_writer *bundle;
	uint64_t count;
	struct base_error error = { 0 };
	struct base_buffer whole;

	snprintf(path, sizeof(path), "%s/ranks.zip", group_attempt_path(attempt));
	MUST(!file_write_open(&write, path), "%s", path);
	MUST(!format_writer_new_bundle(&bundle, format_sink_of_file(write.writer), path,
				       CHECKPOINT_BOUNDARY, &error),
	     "%s", error.text);
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		struct base_buffer data = checkpoint_read(paths[rank]);

		format_shard_name(name, rank);
		MUST(!format_writer_begin(bundle, name, data.bytes, 0, &error), "%s", error.text);
		MUST(!format_writer_put(bundle, data.data, data.bytes, &error), "%s", error.text);
		MUST(!format_writer_end(bundle, &error), "%s", error.text);
		member = format_writer_entries(bundle, &count) + rank;
		manifest->shards[rank] =
			(struct format_manifest_shard){ .crc32 = member->crc32,
							.offset = member->data_offset,
							.bytes = member->bytes };
		base_buffer_free(&data);
	}
	MUST(!format_writer_finish(bundle, NULL, &error), "%s", error.text);
	MUST(!io_writer_finish(write.writer, &error), "%s", error.text);
	MUST(!io_writer_commit(write.writer, &error), "%s", error.text);
	format_writer_free(bundle);
	io_writer_free(write.writer);
	io_queue_close(write.queue);
	whole = checkpoint_read(path);
	*file = (struct format_manifest_file){ strdup("ranks.zip"), whole.bytes,
					       base_crc32(0, whole.data, whole.bytes), true };
	base_buffer_free(&whole);
	manifest->file_count = 1;
}

/* Writes and commits a checkpoint with one file for each rank (`each`) or one file for all. */
static inline void checkpoint_write(struct group_attempt *attempt, bool each, int64_t saved,
				    char **paths, uint32_t count)
{
	struct format_manifest_shard shards[CHECKPOINT_MOST_RANKS] = { 0 };
	struct format_manifest_file files[CHECKPOINT_MOST_RANKS] = { 0 };
	struct base_error error = { 0 };
	struct format_manifest manifest = {
		.step = attempt->step,
		.saved = saved,
		.mode = each ? IOSHAPE_MODE_EACH : IOSHAPE_MODE_RANK0,
		.rank_count = MIN(count, CHECKPOINT_MOST_RANKS),
		.shards = shards,
		.files = files,
	};

	snprintf(manifest.attempt, sizeof(manifest.attempt), "%s", attempt->id);
	(each ? checkpoint_write_each : checkpoint_write_bundle)(attempt, &manifest, paths);
	MUST(!group_attempt_commit(attempt, &manifest, false, &error), "%s", error.text);
	for (uint32_t i = 0; i < manifest.file_count; i++)
		free(files[i].name);
}

#endif
