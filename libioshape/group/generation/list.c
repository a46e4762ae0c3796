/* SPDX-License-Identifier: Apache-2.0 */
/* What generations there are in a directory. */
#define _GNU_SOURCE
#include "group/generation/generation.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Directories that change faster than one can look are not looked at for ever. */
#define MOST_ROUNDS 16

int group_open_directory(struct ring_folder *directory, const char *path, struct base_error *error)
{
	/* A working directory that was removed has no name. */
	char *absolute = *path == '/' ? NULL : realpath(path, NULL);
	const int ret = ring_folder_open(directory, absolute ? absolute : path, error);

	free(absolute);
	/* As the user wrote it, without slashes at the end that names are put behind. */
	for (size_t end = ret ? 0 : strlen(directory->path);
	     end > 1 && directory->path[end - 1] == '/';)
		directory->path[--end] = 0;
	return ret;
}

/* ---- Listing --------------------------------------------------------------------------------- */

static int add_candidate(void *user, const char *name, struct base_error *error)
{
	struct group_candidate candidate = { 0 };
	struct group_name parsed = group_parse_name(name);
	struct base_buffer *list = user;

	if (parsed.kind == GROUP_NAME_OTHER || parsed.kind == GROUP_NAME_ATTEMPT ||
	    parsed.kind == GROUP_NAME_DRAINED)
		return 0;
	candidate.step = parsed.step;
	candidate.aside = parsed.kind != GROUP_NAME_STEP;
	snprintf(candidate.name, sizeof(candidate.name), "%s", name);
	if (base_buffer_append(list, &candidate, sizeof(candidate)))
		return base_no_memory(error, "a list of generations", list->bytes);
	return 0;
}

static int compare_steps(const void *left, const void *right)
{
	const struct group_candidate *a = left, *b = right;

	if (a->step != b->step)
		return a->step < b->step ? 1 : -1;
	return a->aside != b->aside ? a->aside - b->aside : strcmp(a->name, b->name);
}

static int compare_ages(const void *left, const void *right)
{
	const struct group_candidate *a = left, *b = right;

	if (a->serial != b->serial)
		return a->serial < b->serial ? 1 : -1;
	return compare_steps(left, right);
}

int group_list_generations(const struct ring_folder *directory, struct group_candidates *candidates,
			   struct base_error *error)
{
	struct base_buffer list = { 0 };
	int ret = ring_folder_list(directory, add_candidate, &list, error);

	*candidates = (struct group_candidates){ 0 };
	if (ret) {
		base_buffer_free(&list);
		return ret;
	}
	/* The buffer's memory is malloc()'s, and the struct's alignment is no stricter. */
	candidates->all = (struct group_candidate *)(void *)list.data;
	candidates->count = list.bytes / sizeof(*candidates->all);
	if (candidates->count)
		qsort(candidates->all, candidates->count, sizeof(*candidates->all), compare_steps);
	return 0;
}

void group_candidates_free(struct group_candidates *candidates)
{
	free(candidates->all);
	*candidates = (struct group_candidates){ 0 };
}

void group_sort_by_age(struct group_candidates *candidates)
{
	if (candidates->count)
		qsort(candidates->all, candidates->count, sizeof(*candidates->all), compare_ages);
}

/* It could not be read when they were sorted. Those from there on are sorted again. */
static bool was_misplaced(struct group_candidates *candidates, size_t at,
			  const struct group_generation *opened)
{
	struct group_candidates rest = { &candidates->all[at], candidates->count - at };

	if (rest.all->serial != GROUP_UNKNOWN_SERIAL ||
	    opened->manifest.serial == GROUP_UNKNOWN_SERIAL)
		return false;
	rest.all->serial = opened->manifest.serial;
	group_sort_by_age(&rest);
	return true;
}

int group_open_candidate(struct group_generation *generation, const struct ring_folder *directory,
			 struct group_candidates *candidates, size_t at, struct base_error *error)
{
	const struct group_candidate *candidate = &candidates->all[at];

	for (;;) {
		const int ret = group_generation_open(generation, directory, candidate->name,
						      candidate->step, error);

		if (ret || !was_misplaced(candidates, at, generation))
			return ret;
		group_generation_close(generation);
	}
}

/* As the manifest begins: read whole, those of many generations of many ranks would take long. */
int group_peek_serial(const struct ring_folder *directory, const char *name, uint64_t *serial)
{
	char path[NAME_MAX + 1 + sizeof(ZIP_MANIFEST_NAME)];
	char head[ZIP_MANIFEST_HEAD_BYTES];
	ssize_t bytes;

	snprintf(path, sizeof(path), "%s/" ZIP_MANIFEST_NAME, name);
	bytes = ring_folder_peek(directory, path, head, sizeof(head));
	*serial = bytes < 0 ? GROUP_UNKNOWN_SERIAL : zip_manifest_peek_serial(head, (size_t)bytes);
	return (int)MIN(bytes, 0);
}

/*
 * What stepped aside and has no manifest is being removed, or was when its process died: none of
 * them.
 */
static void look_at_ages(const struct ring_folder *directory, struct group_candidates *candidates)
{
	size_t kept = 0;

	for (size_t i = 0; i < candidates->count; i++) {
		struct group_candidate *candidate = &candidates->all[i];

		if (group_peek_serial(directory, candidate->name, &candidate->serial) == -ENOENT &&
		    candidate->aside)
			continue;
		candidates->all[kept++] = *candidate;
	}
	candidates->count = kept;
}

int group_list_by_age(const struct ring_folder *directory, struct group_candidates *candidates,
		      struct base_error *error)
{
	int ret = group_list_generations(directory, candidates, error);

	look_at_ages(directory, candidates);
	group_sort_by_age(candidates);
	return ret;
}

/* ---- None that can be used ------------------------------------------------------------------- */

/* A sentence names so many. */
#define MOST_REASONS 3

void group_unusable_add(struct group_unusable *unusable, const struct base_error *why)
{
	const size_t used = strlen(unusable->why);

	unusable->count++;
	if (why && why->code && unusable->count <= MOST_REASONS)
		snprintf(unusable->why + used, sizeof(unusable->why) - used, "%s%s",
			 used ? "; " : "", why->sentence);
}

int group_fail_unusable(const struct group_unusable *unusable, const char *directory,
			struct base_error *error)
{
	if (!unusable->count)
		return base_refuse(error, -ENOENT,
				   "cannot load \"%s\": there is no generation in it yet",
				   directory);
	return base_refuse(error, IOSHAPE_E_UNUSABLE,
			   "cannot load \"%s\": %zu generation%s in it, and none can be used: "
			   "%s%s" BASE_REMEDY
			   "look at what \"ioshape verify --all %s\" says; to start anew, move "
			   "them away",
			   directory, unusable->count, unusable->count > 1 ? "s are" : " is",
			   unusable->why, unusable->count > MOST_REASONS ? "; ..." : "", directory);
}

/* ---- Finding --------------------------------------------------------------------------------- */

int group_open_step(struct group_generation *generation, const struct ring_folder *directory,
		    uint64_t step, struct base_error *error)
{
	struct group_candidates candidates;
	char name[GROUP_STEP_NAME_BYTES];
	int ret;

	group_step_name(name, step);
	ret = group_generation_open(generation, directory, name, step, error);
	if (ret != -ENOENT)
		return ret;
	ret = group_list_generations(directory, &candidates, error);
	if (ret)
		return ret;
	ret = -ENOENT;
	for (size_t i = 0; ret == -ENOENT && i < candidates.count; i++)
		if (candidates.all[i].step == step)
			ret = group_generation_open(generation, directory, candidates.all[i].name,
						    step, error);
	group_candidates_free(&candidates);
	if (ret == -ENOENT)
		base_fail(error, ret, "there is no complete generation of step %llu in %s",
			  (unsigned long long)step, directory->path);
	return ret;
}

bool group_is_shortage(int code)
{
	return code == -ENOMEM || code == -EMFILE || code == -ENFILE;
}

bool group_is_its_own_fault(int code)
{
	if (group_is_shortage(code))
		return false;
	switch (code) {
	case -EACCES:
	case -EPERM:
	/* Of a version of the library that this is not: the one before it would be an old state. */
	case -EOPNOTSUPP:
		return false;
	default:
		return true;
	}
}

static int say_no_manifest(const struct ring_folder *directory,
			   const struct group_candidate *candidate, struct base_error *why)
{
	return base_refuse(why, -ENOENT, "\"%s/%s\" has no manifest: it is not complete",
			   directory->path, candidate->name);
}

int group_look_at_candidate(const struct ring_folder *directory,
			    struct group_candidates *candidates, size_t at,
			    struct base_error *error)
{
	struct group_generation generation;
	int ret = group_open_candidate(&generation, directory, candidates, at, error);

	if (!ret)
		group_generation_close(&generation);
	return ret == -ENOENT ? say_no_manifest(directory, &candidates->all[at], error) : ret;
}

/* -ENOENT if none holds; *gone: one was not there any more, or had no manifest. */
static int open_first(struct group_generation *generation, const struct ring_folder *directory,
		      struct group_candidates *candidates, bool *gone,
		      struct group_unusable *unusable, const struct base_log *log,
		      struct base_error *error)
{
	int ret = -ENOENT;

	for (size_t i = 0; ret && i < candidates->count; i++) {
		const struct group_candidate *candidate = &candidates->all[i];
		struct base_error why = { 0 };

		ret = group_open_candidate(generation, directory, candidates, i, &why);
		if (ret && !group_is_its_own_fault(ret)) {
			*error = why;
			return ret;
		}
		if (ret == -ENOENT) {
			*gone = true;
			say_no_manifest(directory, candidate, &why);
		} else if (ret) {
			base_log(log, IOSHAPE_LOG_WARNING, "generation %s/%s is passed over: %s",
				 directory->path, candidate->name, why.text);
		}
		if (ret)
			group_unusable_add(unusable, &why);
	}
	return ret ? -ENOENT : 0;
}

/*
 * Between the look at the names and the look behind one, a newer generation may come and this one
 * go. While the names are read, too: then neither may be among them. So after one that is gone, and
 * where there seems to be none, the names are looked at again, until they and the answer stay the
 * same.
 */
int group_open_latest(struct group_generation *generation, const struct ring_folder *directory,
		      const struct base_log *log, struct base_error *error)
{
	struct group_unusable unusable;
	struct group_candidates candidates;
	uint32_t names, names_before = 0;
	bool gone = true;
	int ret = -ENOENT, ret_before = 0;

	*generation = (struct group_generation)GROUP_NO_GENERATION;
	for (int round = 0; gone && round < MOST_ROUNDS; round++) {
		group_generation_close(generation);
		ret = group_list_by_age(directory, &candidates, error);
		if (ret)
			return ret;
		gone = false;
		unusable = (struct group_unusable){ 0 };
		ret = open_first(generation, directory, &candidates, &gone, &unusable, log, error);
		gone = gone || ret;
		names = base_crc32(0, candidates.all, candidates.count * sizeof(*candidates.all));
		if (round && names == names_before && ret == ret_before)
			gone = false;
		names_before = names;
		ret_before = ret;
		group_candidates_free(&candidates);
		if (error->code)
			return ret;
	}
	return !ret ? 0 : group_fail_unusable(&unusable, directory->path, error);
}
