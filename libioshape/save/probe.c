/* SPDX-License-Identifier: Apache-2.0 */
/* What a path sits on, and what a save would do there. */
#define _GNU_SOURCE
#include "save/file.h"

#include <ioshape/probe.h>

#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_FOR_BYTES (4 * GIB)

/* Buffers larger than this are not registered here: they would be made of real memory. */
#define MOST_MEMORY_BYTES (256 * MIB)

/* What is found out on the way to the answer, which is one object of JSON. */
struct probe {
	FILE *json;
	char *directory; /* absolute, without links */
	uint64_t for_bytes;
	struct fs_storage storage;
	uint32_t targets_counted; /* as a save does: it may know less than storage.targets */
	char engine_note[512];
};

/* ---- The answer ------------------------------------------------------------------------------ */

static void say_text(FILE *json, const char *name, const char *text)
{
	fprintf(json, ", \"%s\": \"", name);
	for (; *text; text++) {
		if ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\')
			fprintf(json, "\\u%04x", (unsigned char)*text);
		else
			fputc(*text, json);
	}
	fputc('"', json);
}

static void say_number(FILE *json, const char *name, uint64_t number)
{
	fprintf(json, ", \"%s\": %llu", name, (unsigned long long)number);
}

/* FS_ALL_TARGETS is -1. */
static void say_stripes(FILE *json, const char *name, uint32_t count)
{
	fprintf(json, ", \"%s\": %lld", name, count == FS_ALL_TARGETS ? -1 : (long long)count);
}

static void say_bool(FILE *json, const char *name, bool yes)
{
	fprintf(json, ", \"%s\": %s", name, yes ? "true" : "false");
}

/* ---- The path -------------------------------------------------------------------------------- */

/*
 * Opens the directory that the path is or is in. *file is the path itself, without links, if it is
 * there and no directory; to be freed.
 */
static int find_directory(const char *path, struct ring_folder *folder, char **file,
			  struct base_error *error)
{
	char *real = realpath(path, NULL), *name = strdup(real ? real : path), *parent;
	int ret = real ? ring_folder_open(folder, real, NULL) : -ENOTDIR;

	*file = NULL;
	if (!name) {
		ret = base_no_memory(error, "a path", strlen(path));
	} else if (ret == -ENOTDIR) {
		parent = realpath(dirname(name), NULL);
		ret = parent ? ring_folder_open(folder, parent, error) :
			       base_fail(error, -errno,
					 "cannot look at \"%s\": the directory that it would be in "
					 "is not there",
					 path);
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

/* ---- What is underneath ---------------------------------------------------------------------- */

static void say_storage(FILE *json, const struct fs_storage *storage)
{
	say_text(json, "family", fs_family_name(storage->family));
	say_text(json, "type", storage->mount.type);
	say_text(json, "source", storage->mount.source);
	say_text(json, "mount_point", storage->mount.mount_point);
	say_text(json, "options", storage->mount.options);
	say_number(json, "total_bytes", storage->total_bytes);
	say_number(json, "free_bytes", storage->free_bytes);
	if (storage->rotational_known)
		say_bool(json, "rotational", storage->rotational);
	say_bool(json, "remote", storage->remote);
	say_number(json, "target_count", storage->targets);
	fputs(", \"targets\": [", json);
	for (uint32_t i = 0; i < MIN(storage->target_count, ARRAY_LENGTH(storage->target)); i++) {
		fprintf(json, "%s{\"free_bytes\": %llu", i ? ", " : "",
			(unsigned long long)storage->target[i].free_bytes);
		say_number(json, "total_bytes", storage->target[i].total_bytes);
		say_text(json, "name", storage->target[i].name);
		fputc('}', json);
	}
	fputc(']', json);
}

static void say_layout(const struct probe *probe)
{
	const struct fs_layout *layout = &probe->storage.layout;
	const struct fs_part *part = fs_layout_main(layout, probe->for_bytes);
	char text[256];

	if (!layout->count || !part)
		return;
	fs_layout_text(layout, text, sizeof(text));
	say_text(probe->json, "stripes", text);
	say_number(probe->json, "stripe_bytes", part->stripe_bytes);
	say_stripes(probe->json, "stripe_count", part->stripe_count);
	say_text(probe->json, "target_pool", part->pool);
	say_number(probe->json, "mirrors", MAX(layout->mirrors, 1u));
}

/* Of a regular file. Others, pipes for one, are not even opened. */
static void say_file(FILE *json, const struct ring_folder *folder, const char *file)
{
	const char *name = strrchr(file, '/') + 1;
	struct ring_input input;
	struct ring_entry entry;
	const struct fs_part *part;
	char text[256];

	if (ring_folder_look(folder, name, &entry, NULL) || entry.kind != RING_FILE)
		return;
	say_bool(json, "is_file", true);
	/* One that may not be read has its layout for itself. */
	if (ring_input_open(&input, file, 0, 0, IOSHAPE_DIRECT_OFF, NULL))
		return;
	part = fs_layout_main(&input.fs.layout, input.bytes);
	if (input.fs.layout.count && part) {
		fs_layout_text(&input.fs.layout, text, sizeof(text));
		say_text(json, "file_stripes", text);
		say_stripes(json, "file_stripe_count", part->stripe_count);
	}
	ring_input_close(&input);
}

/* ---- What a save would do -------------------------------------------------------------------- */

static void add_clause(char *text, size_t bytes, const char *clause)
{
	const size_t used = strlen(text);

	if (*clause)
		snprintf(text + used, bytes - used, "%s%s", used ? "; " : "", clause);
}

/* Opens it, as a save does, with buffers like a save's, and closes it again. */
static int try_engine(struct probe *probe, const struct ring_engine_ops *ops,
		      const struct ring_shape *shape, const struct base_log *log)
{
	struct ring_engine_params params = { .depth = shape->depth, .log = *log };
	const size_t bytes = shape->block_bytes * shape->depth;
	void *memory = bytes <= MOST_MEMORY_BYTES ? base_map(bytes) : NULL;
	char why[200] = "";
	void *engine;
	int ret;

	if (memory) {
		params.memory = memory;
		params.memory_bytes = bytes;
	}
	ret = ops->open(&engine, &params, why, sizeof(why));
	if (!ret)
		ops->close(engine);
	/* All that an engine which opens may note. */
	if (!ret && *why)
		say_bool(probe->json, "buffers_refused", true);
	add_clause(probe->engine_note, sizeof(probe->engine_note), why);
	if (memory)
		base_unmap(memory, bytes);
	return ret;
}

/* Where the engine of the rule does not work, the next one is tried, as saves do. */
static void choose_engine(struct probe *probe, const struct ring_config *config,
			  const struct ring_shape *shape)
{
	const struct ring_engine_ops *const asked[] = { ring_engine_of(config->engine), NULL };
	const struct ring_engine_ops *const *ops = asked[0] ? asked :
							      ring_engines_from(shape->engine);
	int ret = try_engine(probe, *ops, shape, &config->log);

	if (!asked[0])
		say_number(probe->json, "uring_errno", (uint64_t)-ret);
	while (ret && ops[1])
		ret = try_engine(probe, *++ops, shape, &config->log);
	say_text(probe->json, "engine", (*ops)->id);
	say_text(probe->json, "engine_note", probe->engine_note);
}

/* `info` describes a file there, and has the layout of the file to come. */
static void choose_shape(struct probe *probe, const struct ring_config *config,
			 const struct fs_info *info)
{
	FILE *json = probe->json;
	struct ring_shape shape;
	char why[160];

	shape = ring_shape_for(config, info, probe->for_bytes, why, sizeof(why));
	say_text(json, "choice", why);
	say_number(json, "block_bytes", shape.block_bytes);
	say_number(json, "queue_depth", shape.depth);
	choose_engine(probe, config, &shape);
}

/* The layout that the file will have: its count is 0 if that is not known. */
static void choose_layout(const struct probe *probe, const struct ring_config *config,
			  uint32_t files, struct fs_layout *layout)
{
	const struct fs_facts facts = {
		.family = probe->storage.family,
		.directory = probe->storage.layout,
		.targets = probe->targets_counted,
		.file_bytes = probe->for_bytes,
		.writers = files,
	};
	char why[256] = "", text[256];
	const struct fs_part *part;
	struct fs_layout ask;

	*layout = probe->storage.layout;
	if (fs_choose_layout(&config->layout, &facts, &ask, why, sizeof(why)) > 0) {
		*layout = ask;
		fs_layout_text(&ask, text, sizeof(text));
		part = fs_layout_main(&ask, probe->for_bytes);
		say_text(probe->json, "stripes_asked", text);
		say_stripes(probe->json, "asked_stripe_count", part ? part->stripe_count : 0);
	}
	say_text(probe->json, "stripes_why", why);
}

static int choose_slots(const struct probe *probe, const struct save_slots *slots,
			const struct fs_layout *layout, struct base_error *error)
{
	const uint32_t by_targets = fs_capacity(probe->targets_counted, layout, probe->for_bytes);
	uint32_t writers = save_slots_usual(slots, probe->storage.family);
	char text[96], inside[PATH_MAX + 1], pool[FS_POOL_BYTES];
	char why[256] = "the default where storage targets are not known";
	int ret = 0;

	if (slots->config.asked_capacity) {
		writers = slots->config.asked_capacity;
		snprintf(why, sizeof(why), "as the setting slots says");
	} else if (by_targets) {
		writers = by_targets;
		fs_layout_text(layout, text, sizeof(text));
		snprintf(why, sizeof(why), "%u storage targets, and %s for each file",
			 probe->targets_counted, text);
	}
	/* It is asked about what is in the directory. */
	snprintf(inside, sizeof(inside), "%s/", probe->directory);
	if (!slots->pool_name)
		ret = fs_pool_of_path(inside, pool, error);
	say_text(probe->json, "pool", slots->pool_name ? slots->pool_name : ret ? "" : pool);
	say_number(probe->json, "writers", writers);
	say_text(probe->json, "writers_why", why);
	return ret;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static int look(struct ioshape_context *context, struct probe *probe,
		const struct ioshape_probe_options *options, const struct ring_folder *folder,
		const char *file, struct base_error *error)
{
	FILE *json = probe->json;
	struct fs_info info;
	int ret;

	ret = fs_look_at_storage(folder->fd, folder->path, "", &probe->storage, error);
	if (!ret)
		ret = ring_folder_describe_file(folder, &info, error);
	if (ret)
		return ret;
	probe->directory = folder->path;
	probe->targets_counted = fs_count_targets(folder->fd, probe->storage.family);
	probe->for_bytes = options->bytes ? options->bytes : DEFAULT_FOR_BYTES;
	fprintf(json, "{\"for_bytes\": %llu", (unsigned long long)probe->for_bytes);
	say_text(json, "directory", probe->directory);
	say_number(json, "memory_alignment", info.memory_alignment);
	say_number(json, "offset_alignment", info.offset_alignment);
	if (info.direct_known)
		say_bool(json, "direct", info.direct_works);
	say_storage(json, &probe->storage);
	say_layout(probe);
	if (file)
		say_file(json, folder, file);
	choose_layout(probe, &context->config, options->files, &info.layout);
	choose_shape(probe, &context->config, &info);
	ret = choose_slots(probe, &context->slots, &info.layout, error);
	fputc('}', json);
	return ret;
}

static int begin(struct ioshape_context *context, const char *path,
		 const struct ioshape_probe_options *options, char **out, struct base_error *error)
{
	struct ring_folder folder = RING_NO_FOLDER;
	struct probe probe = { 0 };
	char *file = NULL;
	size_t bytes;
	int ret;

	if (!*path)
		return base_refuse(error, -EINVAL, "no path was given");
	probe.json = open_memstream(out, &bytes);
	if (!probe.json)
		return base_no_memory(error, "what a path sits on", 0);
	ret = find_directory(path, &folder, &file, error);
	if (!ret)
		ret = look(context, &probe, options, &folder, file, error);
	free(file);
	ring_folder_close(&folder);
	if (fclose(probe.json) && !ret)
		ret = base_no_memory(error, "what a path sits on", bytes);
	if (ret) {
		free(*out);
		*out = NULL;
	}
	return ret;
}

IOSHAPE_EXPORT int ioshape_probe(struct ioshape_context *context, const char *path,
				 const struct ioshape_probe_options *given, char **out)
{
	struct ioshape_probe_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("probe");
	*out = NULL;
	ret = save_enter_path(context, path, &options, sizeof(options), given,
			      "ioshape_probe_options", &error);
	if (!ret && options.reserved)
		ret = base_refuse(&error, -EINVAL, "options.reserved is %u", options.reserved);
	if (!ret)
		ret = begin(context, path, &options, out, &error);
	return base_leave(ret, "probe", path, &error);
}
