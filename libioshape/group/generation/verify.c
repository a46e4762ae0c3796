/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation read from end to end: once as files, for the checksums of the manifest, and once
 * part by part, for those inside the parts.
 */
#include "group/generation/handle.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

struct verifying {
	struct ioshape_generation *generation;
	struct ring_lane *lane;
	struct zip_manifest_part const **parts; /* by file and offset */
	size_t part_count;
	struct ring_piece *pieces; /* of one file: enough for all parts, and what is between them */
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t done, total; /* bytes of the calls that have ended; of all */
};

/* As a callback of one of several calls. */
static int tell(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct verifying *verifying = user;

	(void)total;
	return verifying->progress(verifying->progress_user, phase,
				   MIN(verifying->done + done, verifying->total), verifying->total);
}

static int compare(const void *left, const void *right)
{
	const struct zip_manifest_part *a = *(struct zip_manifest_part *const *)left;
	const struct zip_manifest_part *b = *(struct zip_manifest_part *const *)right;

	if (a->file != b->file)
		return a->file < b->file ? -1 : 1;
	return a->offset < b->offset ? -1 : a->offset > b->offset;
}

static int prepare(struct verifying *verifying, struct base_error *error)
{
	const struct zip_manifest *manifest = &verifying->generation->found.manifest;

	verifying->part_count = manifest->rank_count;
	verifying->parts = calloc(MAX(manifest->rank_count, 1), sizeof(*verifying->parts));
	verifying->pieces =
		calloc(2 * (size_t)manifest->rank_count + 1, sizeof(*verifying->pieces));
	if (!verifying->parts || !verifying->pieces)
		return base_no_memory(error, "verifying",
				      manifest->rank_count * 2 * sizeof(*verifying->pieces));
	for (uint32_t i = 0; i < manifest->rank_count; i++) {
		verifying->parts[i] = &manifest->parts[i];
		verifying->total += manifest->parts[i].bytes;
	}
	qsort(verifying->parts, manifest->rank_count, sizeof(*verifying->parts), compare);
	verifying->total += group_generation_bytes(&verifying->generation->found);
	return 0;
}

/* ---- Files ----------------------------------------------------------------------------------- */

static void add_piece(struct verifying *verifying, size_t *count, uint64_t begin, uint64_t end)
{
	if (end > begin)
		verifying->pieces[(*count)++] = (struct ring_piece){ .offset = begin,
								     .bytes = end - begin,
								     .want_crc = true };
}

/* The parts of a file, which begin at `first`, and what is between them: all of it, in order. */
static size_t cut(struct verifying *verifying, uint32_t file, size_t first)
{
	const struct zip_manifest *manifest = &verifying->generation->found.manifest;
	uint64_t at = 0;
	size_t count = 0;

	for (size_t i = first; i < verifying->part_count && verifying->parts[i]->file == file;
	     i++) {
		const struct zip_manifest_part *part = verifying->parts[i];

		add_piece(verifying, &count, at, part->offset);
		at = part->offset + part->bytes;
		add_piece(verifying, &count, part->offset, at);
	}
	add_piece(verifying, &count, at, manifest->files[file].bytes);
	return count;
}

static int compare_checksums(const struct verifying *verifying, uint32_t file, size_t first,
			     size_t count, const char *path, struct base_error *error)
{
	const struct zip_manifest *manifest = &verifying->generation->found.manifest;
	uint32_t whole = 0;
	size_t part = first;

	for (size_t i = 0; i < count; i++) {
		const struct ring_piece *piece = &verifying->pieces[i];

		whole = base_crc32_combine(whole, piece->crc, piece->bytes);
		/* Parts of no bytes have no piece. */
		while (part < verifying->part_count && verifying->parts[part]->file == file &&
		       !verifying->parts[part]->bytes)
			part++;
		if (part == verifying->part_count || verifying->parts[part]->file != file ||
		    verifying->parts[part]->offset != piece->offset)
			continue;
		if (verifying->parts[part]->crc32 != piece->crc)
			return base_refuse(
				error, IOSHAPE_E_DAMAGED,
				"\"%s\" is damaged: the checksum of the part of rank %zu is not "
				"the manifest's" BASE_REMEDY "load another generation",
				path, (size_t)(verifying->parts[part] - manifest->parts));
		part++;
	}
	if (whole != manifest->files[file].crc32)
		return base_refuse(
			error, IOSHAPE_E_DAMAGED,
			"\"%s\" is damaged: its checksum is not the manifest's" BASE_REMEDY
			"load another generation",
			path);
	return 0;
}

static int verify_file(struct verifying *verifying, uint32_t file, size_t first,
		       struct base_error *error)
{
	struct ioshape_generation *generation = verifying->generation;
	const char *path = group_generation_path(generation, file);
	uint64_t bytes = generation->found.manifest.files[file].bytes;
	size_t count = cut(verifying, file, first);
	struct ring_input input;
	int ret;

	if (!path)
		return base_no_memory(error, "a path", 1);
	ret = ring_input_open(&input, path, 0, 0, save_config(generation->context)->direct, error);
	if (ret)
		return ret;
	ret = group_generation_check_place(generation, error);
	if (!ret && input.bytes != bytes)
		ret = base_refuse(error, IOSHAPE_E_DAMAGED,
				  "\"%s\" has %llu bytes, but the manifest says %llu", path,
				  (unsigned long long)input.bytes, (unsigned long long)bytes);
	if (!ret)
		ret = ring_read(verifying->lane, &input, verifying->pieces, count,
				verifying->progress ? tell : NULL, verifying, error);
	if (!ret)
		ret = compare_checksums(verifying, file, first, count, path, error);
	ring_input_close(&input);
	verifying->done += bytes;
	return ret;
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* The failure of another call. */
static int pass_on(uint32_t rank, struct base_error *error)
{
	base_pass_on(error, base_last_error());
	base_error_of_rank(error, rank);
	return base_rephrase(error, error->code, "the part of rank %u: %s", rank, error->sentence);
}

static int verify_part(struct verifying *verifying, uint32_t rank, struct base_error *error)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_generation *generation = verifying->generation;
	struct ioshape_reader *reader;
	int ret;

	options.progress = verifying->progress ? tell : NULL;
	options.progress_user = verifying;
	ret = ioshape_generation_open_part(generation, rank, &options, &reader);
	if (ret)
		return pass_on(rank, error);
	ret = ioshape_reader_verify(reader);
	/* Without checksums inside: the manifest's hold. */
	if (ret == -ENODATA)
		ret = 0;
	if (ret)
		pass_on(rank, error);
	ioshape_reader_free(reader);
	verifying->done += generation->found.manifest.parts[rank].bytes;
	return ret;
}

static int verify(struct verifying *verifying, struct base_error *error)
{
	const struct zip_manifest *manifest = &verifying->generation->found.manifest;
	size_t first = 0;
	int ret = 0;

	for (uint32_t file = 0; !ret && file < manifest->file_count; file++) {
		ret = verify_file(verifying, file, first, error);
		while (first < verifying->part_count && verifying->parts[first]->file == file)
			first++;
	}
	for (uint32_t rank = 0; !ret && rank < manifest->rank_count; rank++)
		ret = verify_part(verifying, rank, error);
	return ret;
}

/* One that reads, whatever the context writes with. */
static int open_lane(struct verifying *verifying, struct base_error *error)
{
	struct ring_config config = *save_config(verifying->generation->context);

	if (config.engine == IOSHAPE_ENGINE_NIL)
		config.engine = IOSHAPE_ENGINE_AUTO;
	return ring_lane_open(&verifying->lane, &config, error);
}

IOSHAPE_EXPORT int ioshape_generation_verify(struct ioshape_generation *generation,
					     ioshape_progress_fn progress, void *progress_user)
{
	struct verifying verifying = {
		.generation = generation,
		.progress = progress,
		.progress_user = progress_user,
	};
	struct base_error error = { 0 };
	int ret;

	if (!generation)
		return base_missing("verify");
	ret = save_enter(generation->context, &error);
	if (!ret)
		ret = prepare(&verifying, &error);
	if (!ret)
		ret = open_lane(&verifying, &error);
	if (!ret)
		ret = verify(&verifying, &error);
	ring_lane_close(verifying.lane);
	free(verifying.pieces);
	free(verifying.parts);
	return base_leave(ret, "verify", generation->found.folder.path, &error);
}
