/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for reading a generation. */
#define _GNU_SOURCE
#include "group/generation/handle.h"

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
	generation->directory = (struct ring_folder)RING_NO_FOLDER;
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
	ring_folder_close(&generation->directory);
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
	const struct zip_manifest *manifest;
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

const char *group_generation_path(struct ioshape_generation *generation, uint32_t file)
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
	char name[ZIP_PART_NAME_BYTES], **kept = &generation->part_names[rank];

	zip_part_name(name, rank);
	pthread_mutex_lock(&generation->lock);
	if (!*kept)
		*kept = strdup(name);
	pthread_mutex_unlock(&generation->lock);
	return *kept;
}

static int find_part(struct ioshape_generation *generation, uint32_t rank,
		     struct ioshape_part_info *info, struct base_error *error)
{
	const struct zip_manifest *manifest = &generation->found.manifest;
	const struct zip_manifest_part *part;
	const struct zip_manifest_file *file;

	if (rank >= manifest->rank_count)
		return base_refuse(error, -ENOENT,
				   "%s is a generation of %u ranks, from 0 on, and no rank %u",
				   generation->found.folder.path, manifest->rank_count, rank);
	part = &manifest->parts[rank];
	file = &manifest->files[part->file];
	info->file = group_generation_path(generation, part->file);
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

int group_generation_check_place(const struct ioshape_generation *generation,
				 struct base_error *error)
{
	if (ring_folder_is_named(&generation->found.folder, &generation->directory,
				 generation->name))
		return 0;
	return base_refuse(error, -ESTALE,
			   "\"%s\" was replaced or removed after it was opened" BASE_REMEDY
			   "open it again",
			   generation->found.folder.path);
}

void group_generation_explain(const struct ioshape_generation *generation, const char *path,
			      struct base_error *error)
{
	if (!group_is_of_nodes(&generation->found.folder))
		return;
	base_error_begin(error);
	base_refuse(error, -ENOENT,
		    "cannot open \"%s\": it is on the tier of another node" BASE_REMEDY
		    "open it there, or at its destination when all nodes have drained it",
		    path);
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
		ret = base_refuse(
			error, -EINVAL,
			"where a rank's part lies in its file is told by the generation" BASE_REMEDY
			"leave file_offset and file_bytes at 0");
	if (!ret)
		ret = find_part(generation, rank, &part, error);
	if (ret)
		return ret;
	options.size = sizeof(options);
	options.file_offset = part.offset;
	options.file_bytes = part.bytes;
	ret = ioshape_reader_open(generation->context, part.file, &options, out);
	if (ret == -ENOENT)
		group_generation_explain(generation, part.file, error);
	if (ret)
		return ret; /* with a sentence of its own */
	ret = group_generation_check_place(generation, error);
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
