/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public handle of a generation: what it consists of, readers of its parts, and its
 * verification. All files are read from end to end and compared with the checksums of the manifest,
 * which cover every byte, also those inside the parts.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Opening --------------------------------------------------------------------------------- */

static int open_found(struct ioshape_generation *generation, const char *path, const uint64_t *step,
		      struct base_error *error)
{
	const char *slash;
	int ret = group_open_directory(&generation->directory, path, error);

	if (!ret && step)
		ret = group_open_step(&generation->found, &generation->directory, *step, error);
	else if (!ret)
		ret = group_open_latest(&generation->found, &generation->directory,
					save_log(generation->context), error);
	if (ret)
		return ret;
	slash = strrchr(generation->found.folder.path, '/');
	snprintf(generation->name, sizeof(generation->name), "%s", slash + 1);
	generation->paths = calloc(generation->found.manifest.file_count + 1ull, sizeof(char *));
	generation->part_names =
		calloc(generation->found.manifest.rank_count + 1ull, sizeof(char *));
	return generation->paths && generation->part_names ?
		       0 :
		       base_no_memory(error, "a generation",
				      generation->found.manifest.rank_count * sizeof(char *));
}

IOSHAPE_EXPORT int ioshape_generation_open(struct ioshape_context *context, const char *path,
					   uint64_t step, struct ioshape_generation **out)
{
	struct ioshape_generation *generation = NULL;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("load");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && !path)
		ret = base_refuse(&error, -EINVAL, "no directory of generations was given");
	if (ret)
		return base_leave(ret, "load", path, &error);
	generation = calloc(1, sizeof(*generation));
	if (!generation) {
		ret = base_no_memory(&error, "a generation", sizeof(*generation));
		return base_leave(ret, "load", path, &error);
	}
	generation->context = context;
	generation->directory = (struct io_folder)IO_NO_FOLDER;
	generation->found = (struct group_generation)GROUP_NO_GENERATION;
	pthread_mutex_init(&generation->lock, NULL);
	ret = open_found(generation, path, step == IOSHAPE_LATEST ? NULL : &step, &error);
	if (ret)
		ioshape_generation_free(generation);
	else
		*out = generation;
	return base_leave(ret, "load", path, &error);
}

static void free_texts(char **texts, uint32_t count)
{
	for (uint32_t i = 0; texts && i < count; i++)
		free(texts[i]);
	free(texts);
}

/* Also in a forked child: its descriptors are its own, and the parent's lock stays. */
IOSHAPE_EXPORT void ioshape_generation_free(struct ioshape_generation *generation)
{
	if (!generation)
		return;
	free_texts(generation->paths, generation->found.manifest.file_count);
	free_texts(generation->part_names, generation->found.manifest.rank_count);
	group_generation_close(&generation->found);
	io_folder_close(&generation->directory);
	pthread_mutex_destroy(&generation->lock);
	free(generation);
}

/* ---- What it consists of --------------------------------------------------------------------- */

static int enter(struct ioshape_generation *generation, const void *result,
		 struct base_error *error)
{
	int ret = save_enter(generation->context, error);

	if (!ret && !result)
		ret = base_refuse(error, -EINVAL, "nowhere to put what was asked about %s",
				  generation->found.folder.path);
	return ret;
}

IOSHAPE_EXPORT int ioshape_generation_get_info(struct ioshape_generation *generation,
					       struct ioshape_generation_info *info)
{
	struct ioshape_generation_info full = { .size = sizeof(full) };
	const struct format_manifest *manifest;
	struct base_error error = { 0 };
	int ret;

	if (!generation)
		return base_missing("load");
	manifest = &generation->found.manifest;
	full.step = manifest->step;
	full.ranks = manifest->rank_count;
	full.files = manifest->file_count;
	full.bytes = group_generation_bytes(&generation->found);
	full.saved_s = manifest->saved;
	full.mode = (enum ioshape_mode)manifest->mode;
	full.path = generation->found.folder.path;
	full.serial = manifest->serial;
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		full.distinct += !manifest->parts[rank].repeats;
	ret = enter(generation, info, &error);
	if (!ret)
		ret = base_give_struct(info, &full, sizeof(full), "ioshape_generation_info",
				       &error);
	return base_leave(ret, "load", generation->found.folder.path, &error);
}

static const char *path_of(struct ioshape_generation *generation, uint32_t file)
{
	char **path = &generation->paths[file];

	pthread_mutex_lock(&generation->lock);
	if (!*path && asprintf(path, "%s/%s", generation->found.folder.path,
			       generation->found.manifest.files[file].name) < 0)
		*path = NULL;
	pthread_mutex_unlock(&generation->lock);
	return *path;
}

/* "rank-00007.pt" of a part in a zip. */
static const char *part_name(struct ioshape_generation *generation, uint32_t rank)
{
	char name[FORMAT_PART_NAME_BYTES], **kept = &generation->part_names[rank];

	format_part_name(name, rank);
	pthread_mutex_lock(&generation->lock);
	if (!*kept)
		*kept = strdup(name);
	pthread_mutex_unlock(&generation->lock);
	return *kept;
}

static int find_part(struct ioshape_generation *generation, uint32_t rank,
		     struct ioshape_part_info *info, struct base_error *error)
{
	const struct format_manifest *manifest = &generation->found.manifest;
	const struct format_manifest_part *part;
	const struct format_manifest_file *file;

	if (rank >= manifest->rank_count)
		return base_refuse(error, -ENOENT,
				   "%s is a generation of %u ranks, from 0 on, and no rank %u",
				   generation->found.folder.path, manifest->rank_count, rank);
	part = &manifest->parts[rank];
	file = &manifest->files[part->file];
	info->file = path_of(generation, part->file);
	info->name = file->bundle ? part_name(generation, part->holder) : file->name;
	info->offset = part->offset;
	info->bytes = part->bytes;
	info->crc32 = part->crc32;
	info->same_as = part->repeats ? part->same : rank;
	return info->file && info->name ? 0 : base_no_memory(error, "a name", 1);
}

IOSHAPE_EXPORT int ioshape_generation_get_part(struct ioshape_generation *generation, uint32_t rank,
					       struct ioshape_part_info *info)
{
	struct ioshape_part_info full = { .size = sizeof(full) };
	struct base_error error = { 0 };
	int ret;

	if (!generation)
		return base_missing("load");
	ret = enter(generation, info, &error);
	if (!ret)
		ret = find_part(generation, rank, &full, &error);
	if (!ret)
		ret = base_give_struct(info, &full, sizeof(full), "ioshape_part_info", &error);
	return base_leave(ret, "load", generation->found.folder.path, &error);
}

static int check_place(const struct ioshape_generation *generation, struct base_error *error)
{
	if (io_folder_is_named(&generation->found.folder, &generation->directory, generation->name))
		return 0;
	return base_refuse_with(error, -ESTALE, "open it again",
				"\"%s\" was replaced or removed after it was opened",
				generation->found.folder.path);
}

static void explain_missing(const struct ioshape_generation *generation, const char *path,
			    struct base_error *error)
{
	if (!group_is_of_nodes(&generation->found.folder))
		return;
	base_error_begin(error);
	base_refuse_with(error, -ENOENT,
			 "open it there, or at its destination when all nodes have drained it",
			 "cannot open \"%s\": it is on the tier of another node", path);
}

static int open_reader(struct ioshape_generation *generation, uint32_t rank,
		       const struct ioshape_reader_options *given, struct ioshape_reader **out,
		       struct base_error *error)
{
	struct ioshape_reader_options options;
	struct ioshape_part_info part;
	int ret;

	ret = base_take_options(&options, sizeof(options), given, "ioshape_reader_options", error);
	if (!ret && (options.file_offset || options.file_bytes))
		ret = base_refuse_with(
			error, -EINVAL, "leave file_offset and file_bytes at 0",
			"where a rank's part lies in its file is told by the generation");
	if (!ret)
		ret = find_part(generation, rank, &part, error);
	if (ret)
		return ret;
	options.size = sizeof(options);
	options.file_offset = part.offset;
	options.file_bytes = part.bytes;
	ret = ioshape_reader_open(generation->context, part.file, &options, out);
	if (ret == -ENOENT)
		explain_missing(generation, part.file, error);
	if (ret)
		return ret; /* with a sentence of its own */
	ret = check_place(generation, error);
	if (ret) {
		ioshape_reader_free(*out);
		*out = NULL;
		return ret;
	}
	save_reader_is_part_of(*out, generation->found.folder.path);
	return 0;
}

IOSHAPE_EXPORT int ioshape_generation_open_part(struct ioshape_generation *generation,
						uint32_t rank,
						const struct ioshape_reader_options *options,
						struct ioshape_reader **out)
{
	struct base_error error = { 0 };
	int ret;

	if (!out || !generation)
		return base_missing("load");
	*out = NULL;
	ret = save_enter(generation->context, &error);
	if (!ret)
		ret = open_reader(generation, rank, options, out, &error);
	return error.code ? base_leave(ret, "load", generation->found.folder.path, &error) : ret;
}

/* ---- Verifying ---------------------------------------------------------------------------------
 */

/* Of a file: several threads read them where they are cached. */
#define PIECES 16u

struct verifying {
	struct ioshape_generation *generation;
	struct io_lane *lane;
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

static int read_crc(struct verifying *verifying, const struct io_input *input, uint64_t offset,
		    uint64_t bytes, ioshape_progress_fn progress, uint32_t *crc,
		    struct base_error *error)
{
	struct io_piece pieces[PIECES] = { 0 };
	uint64_t begin = 0, end;
	int ret;

	for (unsigned i = 0; i < PIECES; i++, begin = end) {
		end = bytes / PIECES * (i + 1) + (i + 1 == PIECES ? bytes % PIECES : 0);
		pieces[i] = (struct io_piece){ offset + begin, end - begin, .want_crc = true };
	}
	*crc = 0;
	ret = io_read(verifying->lane, input, pieces, PIECES, progress, verifying, error);
	for (unsigned i = 0; i < PIECES; i++)
		*crc = base_crc32_combine(*crc, pieces[i].crc, pieces[i].bytes);
	return ret;
}

/* Whether a part is as its rank wrote it. */
static int check_part(struct verifying *verifying, const struct io_input *input, uint32_t rank,
		      const char *path, ioshape_progress_fn progress, struct base_error *error)
{
	const struct format_manifest_part *part =
		&verifying->generation->found.manifest.parts[rank];
	uint32_t crc;
	int ret = read_crc(verifying, input, part->offset, part->bytes, progress, &crc, error);

	if (ret || crc == part->crc32)
		return ret;
	base_refuse_with(error, IOSHAPE_E_DAMAGED, "load another generation",
			 "\"%s\" is damaged: the checksum of the part of rank %u is not the "
			 "manifest's",
			 path, rank);
	base_error_of_rank(error, rank);
	return IOSHAPE_E_DAMAGED;
}

/* Says whose part it is, if it is one's. */
static int fail_damaged(struct verifying *verifying, const struct io_input *input, uint32_t file,
			const char *path, struct base_error *error)
{
	const struct format_manifest *manifest = &verifying->generation->found.manifest;

	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		int ret = manifest->parts[rank].file == file ?
				  check_part(verifying, input, rank, path, NULL, error) :
				  0;

		if (ret)
			return ret;
	}
	return base_refuse_with(error, IOSHAPE_E_DAMAGED, "load another generation",
				"\"%s\" is damaged: its checksum is not the manifest's", path);
}

/* It is as long as the manifest says. */
static int open_file(const struct verifying *verifying, uint32_t file, const char **path,
		     struct io_input *input, struct base_error *error)
{
	struct ioshape_generation *generation = verifying->generation;
	const struct format_manifest_file *expected = &generation->found.manifest.files[file];
	int ret;

	*path = path_of(generation, file);
	if (!*path)
		return base_no_memory(error, "a path", 1);
	ret = io_input_open(input, *path, 0, 0, save_config(generation->context)->direct, error);
	if (ret == -ENOENT)
		explain_missing(generation, *path, error);
	if (ret)
		return ret;
	ret = check_place(generation, error);
	if (!ret && input->bytes != expected->bytes)
		ret = base_refuse(error, IOSHAPE_E_DAMAGED,
				  "\"%s\" has %llu bytes, but the manifest says %llu", *path,
				  (unsigned long long)input->bytes,
				  (unsigned long long)expected->bytes);
	if (ret)
		io_input_close(input);
	return ret;
}

static int verify_file(struct verifying *verifying, uint32_t file, struct base_error *error)
{
	const struct format_manifest_file *expected =
		&verifying->generation->found.manifest.files[file];
	struct io_input input;
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
	io_input_close(&input);
	verifying->done += expected->bytes;
	return ret;
}

static int open_lane(struct verifying *verifying, struct base_error *error)
{
	return io_lane_open(&verifying->lane, save_config(verifying->generation->context), error);
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* Whether the part is read for this rank, and not for another one. */
static bool is_stored(const struct verifying *verifying, uint32_t rank)
{
	return verifying->generation->found.manifest.parts[rank].holder == rank;
}

static int verify_part(struct verifying *verifying, uint32_t rank, struct base_error *error)
{
	const uint32_t file = verifying->generation->found.manifest.parts[rank].file;
	struct io_input input;
	const char *path;
	int ret = open_file(verifying, file, &path, &input, error);

	if (!ret) {
		ret = check_part(verifying, &input, rank, path, tell, error);
		io_input_close(&input);
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
		ret = verify_part(&verifying, (uint32_t)rank, error);
		verifying.done += generation->found.manifest.parts[rank].bytes;
	}
	io_lane_close(verifying.lane);
	return ret;
}

/* ---- All of it ------------------------------------------------------------------------------- */

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
	verifying.total = group_generation_bytes(&generation->found);
	ret = save_enter(generation->context, &error);
	if (!ret)
		ret = open_lane(&verifying, &error);
	for (uint32_t file = 0; !ret && file < generation->found.manifest.file_count; file++)
		ret = verify_file(&verifying, file, &error);
	io_lane_close(verifying.lane);
	return base_leave(ret, "verify", generation->found.folder.path, &error);
}
