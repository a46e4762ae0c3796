/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes generations of files that are there, as a group would, for tests/python.
 *
 *   generation write DIR STEP each|rank0 FILE...    the file of rank 0, of rank 1, ...
 *   generation begin DIR STEP    an attempt, which is there for as long as stdin is open; then the
 *                                process ends without tidying
 */
#define _GNU_SOURCE
#include "group/generation/generation.h"
#include "support/file_writer.h"

#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 64
#define BOUNDARY 65536

static struct base_error error;

static void must(int result)
{
	if (!result)
		return;
	fprintf(stderr, "generation: %s\n", error.code ? error.text : ioshape_strerror(result));
	exit(1);
}

static struct base_buffer read_file(const char *path)
{
	struct base_buffer data = { 0 };
	struct ring_folder here;
	char *copy = strdup(path), *slash = strrchr(copy, '/');

	*slash = 0;
	must(ring_folder_open(&here, copy, &error));
	must(ring_folder_get(&here, slash + 1, GIB, &data, NULL, &error));
	ring_folder_close(&here);
	free(copy);
	return data;
}

static void write_each(const struct group_attempt *attempt, struct zip_manifest *manifest,
		       char **paths)
{
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		struct base_buffer data = read_file(paths[rank]);
		struct zip_manifest_file *file = &manifest->files[rank];

		file->name = malloc(ZIP_PART_NAME_BYTES);
		zip_part_name(file->name, rank);
		file->bytes = data.bytes;
		file->crc32 = base_crc32(0, data.data, data.bytes);
		manifest->parts[rank] =
			(struct zip_manifest_part){ rank, file->crc32, 0, data.bytes };
		must(ring_folder_put(&attempt->folder, file->name, data.data, data.bytes, &error));
		base_buffer_free(&data);
	}
	manifest->file_count = manifest->rank_count;
}

static void write_bundle(const struct group_attempt *attempt, struct zip_manifest *manifest,
			 char **paths)
{
	struct file_write write = file_write_defaults();
	struct zip_manifest_file *file = &manifest->files[0];
	char path[4096], name[ZIP_PART_NAME_BYTES];
	struct zip_bundle *bundle;
	struct zip_member member;
	struct base_buffer whole;

	snprintf(path, sizeof(path), "%s/ranks.zip", group_attempt_path(attempt));
	must(file_write_open(&write, path));
	must(zip_bundle_new(&bundle, write.writer, path, BOUNDARY, &error));
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		struct base_buffer data = read_file(paths[rank]);

		zip_part_name(name, rank);
		must(zip_bundle_begin(bundle, name, &error));
		must(zip_bundle_put(bundle, data.data, data.bytes, &error));
		must(zip_bundle_end(bundle, &member, &error));
		manifest->parts[rank] =
			(struct zip_manifest_part){ 0, member.crc32, member.offset, member.bytes };
		base_buffer_free(&data);
	}
	must(zip_bundle_finish(bundle, &error));
	must(ring_writer_commit(write.writer, &error));
	zip_bundle_free(bundle);
	ring_lane_close(write.lane);
	whole = read_file(path);
	*file = (struct zip_manifest_file){ strdup("ranks.zip"), whole.bytes,
					    base_crc32(0, whole.data, whole.bytes), true };
	base_buffer_free(&whole);
	manifest->file_count = 1;
}

static void write_generation(struct group_attempt *attempt, const char *mode, char **paths,
			     int count)
{
	static struct zip_manifest_part parts[MOST_RANKS];
	static struct zip_manifest_file files[MOST_RANKS];
	bool each = !strcmp(mode, "each");
	struct zip_manifest manifest = {
		.step = attempt->step,
		.saved = time(NULL),
		.mode = each ? IOSHAPE_MODE_EACH : IOSHAPE_MODE_RANK0,
		.rank_count = (uint32_t)MIN(count, MOST_RANKS),
		.parts = parts,
		.files = files,
	};

	snprintf(manifest.attempt, sizeof(manifest.attempt), "%s", attempt->id);
	(each ? write_each : write_bundle)(attempt, &manifest, paths);
	must(group_attempt_commit(attempt, &manifest, false, &error));
}

int main(int argc, char **argv)
{
	struct group_attempt attempt;
	char byte;

	if (argc < 4)
		return 2;
	must(group_attempt_begin(&attempt, argv[2], strtoull(argv[3], NULL, 10), "0000471a", NULL,
				 &error));
	if (!strcmp(argv[1], "begin")) {
		must(ring_folder_put(&attempt.folder, "rank-00000.pt", "half", 4, &error));
		puts(group_attempt_path(&attempt));
		fflush(stdout);
		return read(0, &byte, 1) < 0;
	}
	write_generation(&attempt, argv[4], argv + 5, argc - 5);
	return 0;
}
