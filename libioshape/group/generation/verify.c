/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation read from end to end: once as files, for the checksums of the manifest, and once
 * part by part, for those inside the parts.
 */
#include "group/generation/handle.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Of a file: several threads read them where they are cached. */
#define PIECES 16u

struct verifying {
	struct ioshape_generation *generation;
	struct ring_lane *lane;
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

/* ---- Files ----------------------------------------------------------------------------------- */

static int read_crc(struct verifying *verifying, const struct ring_input *input, uint64_t offset,
		    uint64_t bytes, ioshape_progress_fn progress, uint32_t *crc,
		    struct base_error *error)
{
	struct ring_piece pieces[PIECES] = { 0 };
	uint64_t begin = 0, end;
	int ret;

	for (unsigned i = 0; i < PIECES; i++, begin = end) {
		end = bytes / PIECES * (i + 1) + (i + 1 == PIECES ? bytes % PIECES : 0);
		pieces[i] = (struct ring_piece){ offset + begin, end - begin, .want_crc = true };
	}
	*crc = 0;
	ret = ring_read(verifying->lane, input, pieces, PIECES, progress, verifying, error);
	for (unsigned i = 0; i < PIECES; i++)
		*crc = base_crc32_combine(*crc, pieces[i].crc, pieces[i].bytes);
	return ret;
}

/* Whether a part is as its rank wrote it. */
static int check_part(struct verifying *verifying, const struct ring_input *input, uint32_t rank,
		      const char *path, ioshape_progress_fn progress, struct base_error *error)
{
	const struct zip_manifest_part *part = &verifying->generation->found.manifest.parts[rank];
	uint32_t crc;
	int ret = read_crc(verifying, input, part->offset, part->bytes, progress, &crc, error);

	if (ret || crc == part->crc32)
		return ret;
	base_refuse(error, IOSHAPE_E_DAMAGED,
		    "\"%s\" is damaged: the checksum of the part of rank %u is not the "
		    "manifest's" BASE_REMEDY "load another generation",
		    path, rank);
	base_error_of_rank(error, rank);
	return IOSHAPE_E_DAMAGED;
}

/* Says whose part it is, if it is one's. */
static int fail_damaged(struct verifying *verifying, const struct ring_input *input, uint32_t file,
			const char *path, struct base_error *error)
{
	const struct zip_manifest *manifest = &verifying->generation->found.manifest;

	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		int ret = manifest->parts[rank].file == file ?
				  check_part(verifying, input, rank, path, NULL, error) :
				  0;

		if (ret)
			return ret;
	}
	return base_refuse(error, IOSHAPE_E_DAMAGED,
			   "\"%s\" is damaged: its checksum is not the manifest's" BASE_REMEDY
			   "load another generation",
			   path);
}

/* It is as long as the manifest says. */
static int open_file(const struct verifying *verifying, uint32_t file, const char **path,
		     struct ring_input *input, struct base_error *error)
{
	struct ioshape_generation *generation = verifying->generation;
	const struct zip_manifest_file *expected = &generation->found.manifest.files[file];
	int ret;

	*path = group_generation_path(generation, file);
	if (!*path)
		return base_no_memory(error, "a path", 1);
	ret = ring_input_open(input, *path, 0, 0, save_config(generation->context)->direct, error);
	if (ret == -ENOENT)
		group_generation_explain(generation, *path, error);
	if (ret)
		return ret;
	ret = group_generation_check_place(generation, error);
	if (!ret && input->bytes != expected->bytes)
		ret = base_refuse(error, IOSHAPE_E_DAMAGED,
				  "\"%s\" has %llu bytes, but the manifest says %llu", *path,
				  (unsigned long long)input->bytes,
				  (unsigned long long)expected->bytes);
	if (ret)
		ring_input_close(input);
	return ret;
}

static int verify_file(struct verifying *verifying, uint32_t file, struct base_error *error)
{
	const struct zip_manifest_file *expected =
		&verifying->generation->found.manifest.files[file];
	struct ring_input input;
	const char *path;
	uint32_t crc = 0;
	int ret = open_file(verifying, file, &path, &input, error);

	if (ret) {
		base_error_about(error, "verify", path);
		return ret;
	}
	ret = read_crc(verifying, &input, 0, expected->bytes, verifying->progress ? tell : NULL,
		       &crc, error);
	if (!ret && crc != expected->crc32)
		ret = fail_damaged(verifying, &input, file, path, error);
	if (ret)
		base_error_about(error, "verify", path);
	ring_input_close(&input);
	verifying->done += expected->bytes;
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

/* Whether the part is read for this rank, and not for another one. */
static bool is_stored(const struct verifying *verifying, uint32_t rank)
{
	return verifying->generation->found.manifest.parts[rank].holder == rank;
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
	ret = ioshape_reader_verify(reader, 1);
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
	int ret = 0;

	verifying->total = group_generation_bytes(&verifying->generation->found);
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		verifying->total += is_stored(verifying, rank) ? manifest->parts[rank].bytes : 0;
	for (uint32_t file = 0; !ret && file < manifest->file_count; file++)
		ret = verify_file(verifying, file, error);
	for (uint32_t rank = 0; !ret && rank < manifest->rank_count; rank++)
		ret = is_stored(verifying, rank) ? verify_part(verifying, rank, error) : 0;
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

static int verify_manifests_part(struct verifying *verifying, uint32_t rank,
				 struct base_error *error)
{
	const uint32_t file = verifying->generation->found.manifest.parts[rank].file;
	struct ring_input input;
	const char *path;
	int ret = open_file(verifying, file, &path, &input, error);

	if (!ret) {
		ret = check_part(verifying, &input, rank, path, tell, error);
		ring_input_close(&input);
	}
	if (ret)
		base_error_about(error, "verify", path);
	return ret;
}

int group_verify_parts(struct ioshape_generation *generation, uint32_t first, uint32_t stride,
		       ioshape_progress_fn progress, void *progress_user, struct base_error *error)
{
	struct verifying verifying = {
		.generation = generation,
		.progress = progress,
		.progress_user = progress_user,
		.total = group_generation_bytes(&generation->found),
	};
	int ret = open_lane(&verifying, error);

	for (uint64_t rank = first; !ret && rank < generation->found.manifest.rank_count;
	     rank += stride) {
		if (!is_stored(&verifying, (uint32_t)rank))
			continue;
		ret = verify_manifests_part(&verifying, (uint32_t)rank, error);
		verifying.done += generation->found.manifest.parts[rank].bytes;
	}
	ring_lane_close(verifying.lane);
	return ret;
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
		ret = open_lane(&verifying, &error);
	if (!ret)
		ret = verify(&verifying, &error);
	ring_lane_close(verifying.lane);
	return base_leave(ret, "verify", generation->found.folder.path, &error);
}
