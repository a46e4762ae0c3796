/* SPDX-License-Identifier: Apache-2.0 */
/* What a path sits on, and what a save would do there. */
#define _GNU_SOURCE
#include "save/slot/pools.h"

#include <ioshape/probe.h>

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_FOR_BYTES (4 * GIB)

/* Buffers larger than this are not registered for a trial: they would be made of real memory. */
#define MOST_MEMORY_BYTES (256 * MIB)

#define CLAUSE_BYTES 256

_Static_assert(IOSHAPE_ALL_TARGETS == FS_ALL_TARGETS, "both say all");

/* What the caller gets, and all that it points to, in one piece. */
struct probe {
	struct ioshape_storage shown; /* first: this is what is freed */
	struct fs_storage storage;
	uint32_t targets_counted; /* as a save does: it may know less than the former */
	struct ioshape_storage_target targets[ARRAY_LENGTH(((struct fs_storage *)0)->target)];
	char directory[PATH_MAX];
	char stripes[CLAUSE_BYTES], file_stripes[CLAUSE_BYTES], stripes_asked[CLAUSE_BYTES];
	char stripes_why[CLAUSE_BYTES], writers_why[CLAUSE_BYTES];
	char engine_note[2 * CLAUSE_BYTES];
	struct ring_forecast forecast;
	char pool[FS_POOL_BYTES];
};

/* ---- The path -------------------------------------------------------------------------------- */

/* The directory that a path's last part is in, without links. NULL and errno if there is none. */
static char *parent_of(const char *path)
{
	char *whole = strdup(path), *end, *found;

	if (!whole)
		return NULL;
	end = whole + strlen(whole);
	while (end > whole + 1 && end[-1] == '/')
		*--end = 0;
	end = strrchr(whole, '/');
	if (end == whole)
		end[1] = 0;
	else if (end)
		*end = 0;
	found = realpath(end ? whole : ".", NULL);
	free(whole);
	return found;
}

/*
 * Opens the directory that the path is or is in. *file is the path itself, without links, if it is
 * there and no directory; to be freed.
 */
static int find_directory(const char *path, struct ring_folder *folder, char **file,
			  struct base_error *error)
{
	char *real = realpath(path, NULL), *directory;
	int ret;

	*file = NULL;
	if (real) {
		ret = ring_folder_open(folder, real, NULL);
		if (ret != -ENOTDIR) {
			if (ret)
				base_fail(error, ret, "cannot look at \"%s\"", path);
			free(real);
			return ret;
		}
		directory = parent_of(real);
	} else {
		directory = parent_of(path);
	}
	if (!directory) {
		ret = base_fail(
			error, -errno,
			"cannot look at \"%s\": the directory that it would be in is not there",
			path);
	} else {
		ret = ring_folder_open(folder, directory, error);
	}
	free(directory);
	if (ret)
		free(real);
	else
		*file = real;
	return ret;
}

static enum ioshape_answer answer(bool known, bool yes)
{
	return !known ? IOSHAPE_UNKNOWN : yes ? IOSHAPE_YES : IOSHAPE_NO;
}

/* ---- What is underneath ---------------------------------------------------------------------- */

static void show_storage(struct probe *probe)
{
	struct ioshape_storage *shown = &probe->shown;
	const struct fs_storage *storage = &probe->storage;

	shown->family = fs_family_name(storage->family);
	shown->variant = storage->variant;
	shown->type = storage->type;
	shown->source = storage->source;
	shown->mount_point = storage->mount_point;
	shown->options = storage->options;
	shown->total_bytes = storage->total_bytes;
	shown->free_bytes = storage->free_bytes;
	shown->write_unit = storage->write_unit;
	shown->flight_bytes = storage->flight_bytes;
	shown->rotational = answer(storage->rotational_known, storage->rotational);
	shown->remote = storage->remote;
	shown->serial_direct = storage->serial_direct;
	shown->targets = storage->targets;
	shown->target_listed = MIN(storage->target_count, (uint32_t)ARRAY_LENGTH(probe->targets));
	shown->target = probe->targets;
	for (uint32_t i = 0; i < shown->target_listed; i++)
		probe->targets[i] =
			(struct ioshape_storage_target){ storage->target[i].name,
							 storage->target[i].total_bytes,
							 storage->target[i].free_bytes };
}

static void show_layout(struct probe *probe)
{
	const struct fs_layout *layout = &probe->storage.layout;
	const struct fs_part *part = fs_layout_main(layout, probe->shown.for_bytes);

	if (!layout->count || !part)
		return;
	fs_layout_text(layout, probe->stripes, sizeof(probe->stripes));
	probe->shown.stripe_bytes = part->stripe_bytes;
	probe->shown.stripe_count = part->stripe_count;
	probe->shown.target_pool = part->pool;
	probe->shown.mirrors = MAX(layout->mirrors, 1u);
}

/* Of a regular file. Others, pipes for one, are not even opened. */
static void show_file(struct probe *probe, const struct ring_folder *folder, const char *file)
{
	const char *name = strrchr(file, '/') + 1;
	struct ring_input input;
	struct ring_entry entry;
	const struct fs_part *part;

	if (ring_folder_look(folder, name, &entry, NULL) || entry.kind != RING_FILE)
		return;
	probe->shown.is_file = 1;
	/* One that may not be read has its layout for itself. */
	if (ring_input_open(&input, file, 0, 0, IOSHAPE_DIRECT_OFF, NULL))
		return;
	part = fs_layout_main(&input.fs.layout, input.bytes);
	if (input.fs.layout.count && part) {
		fs_layout_text(&input.fs.layout, probe->file_stripes, sizeof(probe->file_stripes));
		probe->shown.file_stripe_count = part->stripe_count;
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
	probe->shown.buffers_refused = !ret && *why;
	add_clause(probe->engine_note, sizeof(probe->engine_note), why);
	if (memory)
		base_unmap(memory, bytes);
	return ret;
}

/* Where the best does not work, the next one is tried, as saves do. */
static void choose_engine(struct probe *probe, const struct ring_shape *shape,
			  const struct base_log *log)
{
	const struct ring_engine_ops *ops = ring_engine_of(shape->engine);
	struct ioshape_storage *shown = &probe->shown;
	int ret = -ENOTSUP;

	if (ops)
		ret = try_engine(probe, ops, shape, log);
	for (size_t i = 0; !ops && ring_engines[i] && ret; i++) {
		shown->engine = ring_engines[i]->id;
		ret = try_engine(probe, ring_engines[i], shape, log);
		if (ring_engines[i] == &ring_engine_uring)
			shown->uring_code = ret;
	}
	if (ops)
		shown->engine = ops->id;
}

/* A trial that cannot be made, for want of space or permission, is no failure of the probe. */
static void try_now(struct probe *probe, const struct ring_config *config)
{
	struct ring_calibration calibration;
	struct base_error why = { 0 };

	if (!ring_calibrate_now(probe->directory, config, &calibration, &why))
		return;
	add_clause(probe->engine_note, sizeof(probe->engine_note), "no trial could be made");
	add_clause(probe->engine_note, sizeof(probe->engine_note), why.text);
}

static int choose_shape(struct probe *probe, const struct ring_config *config,
			const struct fs_layout *layout, struct base_error *error)
{
	const struct fs_part *part = fs_layout_main(layout, probe->shown.for_bytes);
	struct ioshape_storage *shown = &probe->shown;
	const struct ring_shape *shape = &probe->forecast.shape;
	int ret;

	ret = ring_foresee(config, probe->directory, layout, shown->for_bytes, &probe->forecast,
			   error);
	if (ret)
		return ret;
	shown->block_bytes = shape->block_bytes;
	shown->queue_depth = shape->depth;
	shown->target_bytes = shape->burst ? shape->burst * shape->block_bytes :
			      part         ? ring_flight(1, part->stripe_bytes, 0) :
					     0;
	shown->calibrated = probe->forecast.calibration.measured_at > 0;
	shown->calibrated_s = probe->forecast.calibration.measured_at;
	shown->calibrated_rate = (double)probe->forecast.calibration.bytes_per_s;
	shown->trial_to_come = probe->forecast.trial_to_come;
	choose_engine(probe, shape, &config->log);
	return 0;
}

/* The layout that the file will have: its count is 0 if that is not known. */
static void choose_layout(struct probe *probe, const struct ring_config *config, uint32_t files,
			  struct fs_layout *layout)
{
	const struct fs_facts facts = {
		.family = probe->storage.family,
		.directory = probe->storage.layout,
		.targets = probe->targets_counted,
		.file_bytes = probe->shown.for_bytes,
		.writers = files,
	};
	const struct fs_part *part;
	struct fs_layout ask;

	*layout = probe->storage.layout;
	if (fs_choose_layout(&config->layout, &facts, &ask, probe->stripes_why,
			     sizeof(probe->stripes_why)) <= 0)
		return;
	*layout = ask;
	fs_layout_text(&ask, probe->stripes_asked, sizeof(probe->stripes_asked));
	part = fs_layout_main(&ask, probe->shown.for_bytes);
	probe->shown.asked_stripe_count = part ? part->stripe_count : 0;
}

static int choose_slots(struct probe *probe, const struct save_slots *slots,
			const struct fs_layout *layout, struct base_error *error)
{
	struct ioshape_storage *shown = &probe->shown;
	char text[96], inside[PATH_MAX + 1];
	const uint32_t by_targets = fs_capacity(probe->targets_counted, layout, shown->for_bytes);

	if (slots->config.asked_capacity) {
		shown->writers = slots->config.asked_capacity;
		snprintf(probe->writers_why, sizeof(probe->writers_why),
			 "as the setting slots says");
	} else if (by_targets) {
		shown->writers = by_targets;
		fs_layout_text(layout, text, sizeof(text));
		snprintf(probe->writers_why, sizeof(probe->writers_why),
			 "%u storage targets, and %s for each file", probe->targets_counted, text);
	} else {
		shown->writers = slots->config.default_capacity;
		snprintf(probe->writers_why, sizeof(probe->writers_why),
			 "the default where storage targets are not known");
	}
	if (slots->pool_name) {
		snprintf(probe->pool, sizeof(probe->pool), "%s", slots->pool_name);
		return 0;
	}
	/* It is asked about what is in the directory. */
	snprintf(inside, sizeof(inside), "%s/", probe->directory);
	return fs_pool_of_path(inside, probe->pool, error);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static void point(struct probe *probe)
{
	struct ioshape_storage *shown = &probe->shown;

	shown->size = sizeof(*shown);
	shown->directory = probe->directory;
	shown->stripes = probe->stripes;
	shown->target_pool = "";
	shown->file_stripes = probe->file_stripes;
	shown->engine = "";
	shown->choice = probe->forecast.why;
	shown->engine_note = probe->engine_note;
	shown->stripes_asked = probe->stripes_asked;
	shown->stripes_why = probe->stripes_why;
	shown->pool = probe->pool;
	shown->writers_why = probe->writers_why;
}

static int look(struct ioshape_context *context, struct probe *probe,
		const struct ioshape_probe_options *options, const struct ring_folder *folder,
		const char *file, struct base_error *error)
{
	struct fs_layout layout;
	struct fs_info info;
	int ret;

	ret = fs_look_at_storage(folder->fd, folder->path, "", &probe->storage, error);
	if (!ret)
		probe->targets_counted = fs_count_targets(folder->fd, probe->storage.family);
	if (!ret)
		ret = ring_folder_try_file(folder, &info, error);
	if (ret)
		return ret;
	snprintf(probe->directory, sizeof(probe->directory), "%s", folder->path);
	point(probe);
	probe->shown.for_bytes = options->bytes ? options->bytes : DEFAULT_FOR_BYTES;
	probe->shown.memory_alignment = info.memory_alignment;
	probe->shown.offset_alignment = info.offset_alignment;
	probe->shown.direct = answer(info.direct_known, info.direct_works);
	show_storage(probe);
	show_layout(probe);
	if (file)
		show_file(probe, folder, file);
	choose_layout(probe, &context->config, options->files, &layout);
	if (options->calibrate)
		try_now(probe, &context->config);
	ret = choose_shape(probe, &context->config, &layout, error);
	return ret ? ret : choose_slots(probe, &context->slots, &layout, error);
}

static int begin(struct ioshape_context *context, const char *path,
		 const struct ioshape_probe_options *options, struct ioshape_storage **out,
		 struct base_error *error)
{
	struct ring_folder folder = RING_NO_FOLDER;
	struct probe *probe;
	char *file = NULL;
	int ret;

	if (!path || !*path)
		return base_refuse(error, -EINVAL, "no path was given");
	probe = calloc(1, sizeof(*probe));
	if (!probe)
		return base_no_memory(error, "what a path sits on", sizeof(*probe));
	ret = find_directory(path, &folder, &file, error);
	if (!ret)
		ret = look(context, probe, options, &folder, file, error);
	free(file);
	ring_folder_close(&folder);
	if (ret)
		ioshape_free(&probe->shown);
	else
		*out = &probe->shown;
	return ret;
}

IOSHAPE_EXPORT int ioshape_probe(struct ioshape_context *context, const char *path,
				 const struct ioshape_probe_options *given,
				 struct ioshape_storage **out)
{
	struct ioshape_probe_options options = { 0 };
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("probe");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && given)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_probe_options",
					&error);
	if (!ret)
		ret = begin(context, path, &options, out, &error);
	return base_leave(ret, "probe", path, &error);
}
