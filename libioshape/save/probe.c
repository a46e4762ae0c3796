/* SPDX-License-Identifier: Apache-2.0 */
/* Probing a path: the filesystem below it, and the choices that a save would make there. Nothing is
 * written. */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_FOR_BYTES (4 * GIB)

/* ---- The path -------------------------------------------------------------------------------- */

/*
 * Opens the directory that the path names, or that contains it. If the path exists and is no
 * directory, *file is the path without links. The caller frees it.
 */
static int find_directory(const char *path, struct io_folder *folder, char **file,
			  struct base_error *error)
{
	char *real = realpath(path, NULL), *name = strdup(real ? real : path), *parent;
	int ret = real ? io_folder_open(folder, real, NULL) : -ENOTDIR;

	*file = NULL;
	if (!name) {
		ret = base_no_memory(error, "a path", strlen(path));
	} else if (ret == -ENOTDIR) {
		parent = realpath(dirname(name), NULL);
		ret = parent ? io_folder_open(folder, parent, error) :
			       base_fail(error, -errno,
					 "cannot look at \"%s\": cannot find its directory", path);
		free(parent);
		if (!ret)
			*file = real;
	} else if (ret) {
		base_fail(error, ret, "cannot look at \"%s\"", path);
	}
	if (!*file)
		free(real);
	free(name);
	return ret;
}

/* ---- Filesystem and layout ------------------------------------------------------------------- */

static void copy(char *into, size_t size, const char *text)
{
	snprintf(into, size, "%s", text);
}
#define COPY(into, text) copy(into, sizeof(into), text)

static void take_storage(struct save_probe *found, const struct fs_storage *storage)
{
	COPY(found->family, fs_family_name(storage->family));
	COPY(found->type, storage->mount.type);
	COPY(found->source, storage->mount.source);
	COPY(found->mount_point, storage->mount.mount_point);
	COPY(found->options, storage->mount.options);
	found->total_bytes = storage->total_bytes;
	found->free_bytes = storage->free_bytes;
	found->remote = storage->remote;
	found->target_count = storage->targets;
	found->targets_listed = MIN(storage->target_count, (uint32_t)PROBE_TARGETS);
	for (uint32_t i = 0; i < found->targets_listed; i++) {
		COPY(found->targets[i].name, storage->target[i].name);
		found->targets[i].total_bytes = storage->target[i].total_bytes;
		found->targets[i].free_bytes = storage->target[i].free_bytes;
	}
}

static void take_layout(struct save_probe *found, const struct fs_layout *layout)
{
	const struct fs_component *component = fs_layout_main(layout, found->for_bytes);

	if (!layout->count || !component)
		return;
	fs_layout_text(layout, found->stripes, sizeof(found->stripes));
	found->stripe_bytes = component->stripe_bytes;
	found->stripe_count =
		component->stripe_count == FS_ALL_TARGETS ? -1 : (int64_t)component->stripe_count;
	COPY(found->target_pool, component->pool);
	found->mirrors = MAX(layout->mirrors, 1u);
}

/* Describes a regular file. Other files, such as pipes, are not opened. */
static void take_file(struct save_probe *found, const struct io_folder *folder, const char *file)
{
	const char *name = strrchr(file, '/') + 1;
	struct io_input input;
	struct io_entry entry;

	if (io_folder_look(folder, name, &entry, NULL) || entry.kind != IO_FILE)
		return;
	found->is_file = true;
	/* If this user may not read the file, its layout stays unknown. */
	if (io_input_open(&input, file, 0, 0, IOSHAPE_DIRECT_OFF, NULL))
		return;
	if (input.fs.layout.count && fs_layout_main(&input.fs.layout, input.bytes))
		fs_layout_text(&input.fs.layout, found->file_stripes, sizeof(found->file_stripes));
	io_input_close(&input);
}

/* ---- Choices of a save ----------------------------------------------------------------------- */

/* Chooses blocks, queue depth and engine. `info` describes a file in the directory, with the layout
 * of the future file. */
static void choose_shape(struct save_probe *found, const struct io_config *config,
			 const struct fs_info *info)
{
	struct io_choice choice;

	io_choose(config, info, found->for_bytes, &choice);
	COPY(found->choice, choice.why);
	found->block_bytes = choice.block_bytes;
	found->queue_depth = choice.depth;
	COPY(found->engine, choice.engine);
	COPY(found->engine_note, choice.downgrade);
	found->uring_errno = -choice.code;
}

/* Chooses the layout of the future file; its count is 0 if that is unknown. */
static void choose_layout(struct save_probe *found, const struct fs_facts *facts,
			  const struct io_config *config, struct fs_layout *layout)
{
	struct fs_layout ask;

	*layout = facts->directory;
	if (fs_choose_layout(&config->layout, facts, &ask, found->stripes_why,
			     sizeof(found->stripes_why)) <= 0)
		return;
	*layout = ask;
	fs_layout_text(&ask, found->stripes_asked, sizeof(found->stripes_asked));
}

static int choose_slots(struct save_probe *found, const struct save_slots *slots,
			const struct fs_facts *facts, const struct fs_layout *layout,
			struct base_error *error)
{
	const uint32_t by_targets = fs_capacity(facts->targets, layout, found->for_bytes);
	char text[96], inside[PATH_MAX + 1];

	found->writers = save_slots_usual(slots, facts->family);
	COPY(found->writers_why, "the default if the number of storage targets is unknown");
	if (slots->config.asked_capacity) {
		found->writers = slots->config.asked_capacity;
		COPY(found->writers_why, "from the setting slots");
	} else if (by_targets) {
		found->writers = by_targets;
		fs_layout_text(layout, text, sizeof(text));
		snprintf(found->writers_why, sizeof(found->writers_why),
			 "%u storage targets, %s per file", facts->targets, text);
	}
	if (slots->pool_name) {
		COPY(found->pool, slots->pool_name);
		return 0;
	}
	/* A path inside the directory has the pool of the directory's contents. */
	snprintf(inside, sizeof(inside), "%s/", found->directory);
	return fs_pool_of_path(inside, found->pool, error);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static int look(struct ioshape_context *context, struct save_probe *found, uint32_t files,
		const struct io_folder *folder, const char *file, struct base_error *error)
{
	struct fs_storage storage;
	struct fs_facts facts = { .writers = files };
	struct fs_info info;
	int ret;

	ret = fs_look_at_storage(folder->fd, folder->path, "", &storage, error);
	if (!ret)
		ret = io_folder_describe_file(folder, &info, error);
	if (ret)
		return ret;
	COPY(found->directory, folder->path);
	found->memory_alignment = info.memory_alignment;
	found->offset_alignment = info.offset_alignment;
	found->direct = info.direct_known ? info.direct_works : -1;
	take_storage(found, &storage);
	take_layout(found, &storage.layout);
	if (file)
		take_file(found, folder, file);
	/* Counts targets as a save does: without the list of the client. */
	facts.family = storage.family;
	facts.directory = storage.layout;
	facts.targets = fs_count_targets(folder->fd, storage.family);
	facts.file_bytes = found->for_bytes;
	choose_layout(found, &facts, &context->config, &info.layout);
	choose_shape(found, &context->config, &info);
	return choose_slots(found, &context->slots, &facts, &info.layout, error);
}

int save_probe_path(struct ioshape_context *context, const char *path, uint64_t bytes,
		    uint32_t files, struct save_probe *found)
{
	struct io_folder folder = IO_NO_FOLDER;
	struct base_error error = { 0 };
	char *file = NULL;
	int ret = save_enter(context, &error);

	memset(found, 0, sizeof(*found));
	found->for_bytes = bytes ? bytes : DEFAULT_FOR_BYTES;
	if (!ret && (!path || !*path))
		ret = base_fail_reason(&error, -EINVAL, "no path was given");
	if (!ret)
		ret = find_directory(path, &folder, &file, &error);
	if (!ret)
		ret = look(context, found, files, &folder, file, &error);
	free(file);
	io_folder_close(&folder);
	return base_return(ret, "probe", path, &error);
}
