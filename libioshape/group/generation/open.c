/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a directory is a complete generation. */
#include "group/generation/generation.h"

#include <errno.h>
#include <stdio.h>

static int read_manifest(struct group_generation *generation, struct base_error *error)
{
	struct base_buffer text = { 0 };
	char path[BASE_ERROR_TEXT_BYTES / 2];
	int ret;

	ret = ring_folder_get(&generation->folder, ZIP_MANIFEST_NAME, ZIP_MAX_MANIFEST_BYTES, &text,
			      &generation->held, error);
	snprintf(path, sizeof(path), "%s/" ZIP_MANIFEST_NAME, generation->folder.path);
	if (!ret)
		ret = zip_manifest_decode(&generation->manifest, (const char *)text.data,
					  text.bytes, path, error);
	base_buffer_free(&text);
	return ret;
}

static int check_file(const struct ring_folder *folder, const struct zip_manifest_file *file,
		      const char *remedy, struct base_error *error)
{
	struct ring_entry entry;
	int ret = ring_folder_look(folder, file->name, &entry, error);

	if (ret == -ENOENT)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "\"%s/%s\" is missing: the generation is incomplete" BASE_REMEDY
				   "%s",
				   folder->path, file->name, remedy);
	if (ret)
		return ret;
	if (entry.kind == RING_FILE && entry.bytes == file->bytes)
		return 0;
	return base_refuse(
		error, IOSHAPE_E_DAMAGED,
		"\"%s/%s\" has %llu bytes, but the manifest says %llu: it was changed" BASE_REMEDY
		"%s",
		folder->path, file->name, (unsigned long long)entry.bytes,
		(unsigned long long)file->bytes, remedy);
}

int group_check_files(const struct ring_folder *folder, const struct zip_manifest *manifest,
		      const char *remedy, struct base_error *error)
{
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++)
		ret = check_file(folder, &manifest->files[i], remedy, error);
	return ret;
}

static int see_parity(void *user, const char *name, struct base_error *error)
{
	uint32_t node;

	(void)user, (void)error;
	return group_parse_parity_name(name, &node);
}

bool group_is_of_nodes(const struct ring_folder *folder)
{
	return ring_folder_list(folder, see_parity, NULL, NULL) == 1;
}

/* Those of other nodes are not there. */
static int check_own_files(const struct group_generation *generation, struct base_error *error)
{
	const struct ring_folder *folder = &generation->folder;
	const struct zip_manifest *manifest = &generation->manifest;
	struct ring_entry entry;
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		ret = ring_folder_look(folder, manifest->files[i].name, &entry, error);
		if (!ret)
			ret = check_file(folder, &manifest->files[i], "use another generation",
					 error);
		ret = ret == -ENOENT ? 0 : ret;
	}
	return ret;
}

static int check(const struct group_generation *generation, uint64_t step, struct base_error *error)
{
	const struct zip_manifest *manifest = &generation->manifest;
	struct base_error incomplete = { 0 };
	int ret;

	if (manifest->step != step)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "%s has the manifest of step %llu: the directory was renamed",
				   generation->folder.path, (unsigned long long)manifest->step);
	ret = group_check_files(&generation->folder, manifest, "use another generation",
				&incomplete);
	if (ret == IOSHAPE_E_DAMAGED && group_is_of_nodes(&generation->folder))
		return check_own_files(generation, error);
	return ret ? base_pass_on(error, &incomplete) : 0;
}

int group_generation_open(struct group_generation *generation, const struct ring_folder *directory,
			  const char *name, uint64_t step, struct base_error *error)
{
	struct base_error unopened = { 0 };
	int ret;

	*generation = (struct group_generation)GROUP_NO_GENERATION;
	ret = ring_folder_open_in(&generation->folder, directory, name, &unopened);
	if (ret == -ENOENT)
		return ret;
	if (ret)
		return base_fail(error, ret, "cannot open the generation %s/%s", directory->path,
				 name);
	ret = read_manifest(generation, error);
	if (!ret)
		ret = check(generation, step, error);
	if (ret)
		group_generation_close(generation);
	return ret;
}

void group_generation_close(struct group_generation *generation)
{
	zip_manifest_free(&generation->manifest);
	ring_folder_let_go(&generation->held);
	ring_folder_close(&generation->folder);
}

uint64_t group_generation_bytes(const struct group_generation *generation)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < generation->manifest.file_count; i++)
		bytes += generation->manifest.files[i].bytes;
	return bytes;
}
