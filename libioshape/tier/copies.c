/* SPDX-License-Identifier: Apache-2.0 */
/* Where copies lie, what they are, and how they go. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Destinations ---------------------------------------------------------------------------- */

/* The names of a path that is not there yet, put behind what is. */
static int add_names(struct base_buffer *made, const char *names, const char *path,
		     struct base_error *error)
{
	while (*names) {
		const size_t bytes = strcspn(names, "/");

		if (bytes == 2 && !strncmp(names, "..", 2))
			return base_refuse(
				error, -EINVAL,
				"cannot find a place for \"%s\" on a tier: its "
				"directory is not there, or it ends in \"..\"" BASE_REMEDY
				"write the path without it",
				path);
		if (bytes && !(bytes == 1 && *names == '.') &&
		    (base_buffer_append(made, "/", 1) || base_buffer_append(made, names, bytes)))
			return base_no_memory(error, "a path", strlen(path));
		names += bytes + (names[bytes] == '/');
	}
	return 0;
}

/* As much of an absolute path as is there, without its last name, with links resolved. Puts the
 * rest into *names. NULL without memory. */
static char *resolve_above(char *path, const char **names)
{
	char *resolved, *slash = strrchr(path, '/');

	for (;;) {
		*names = slash + 1;
		*slash = 0;
		resolved = realpath(*path ? path : "/", NULL);
		*slash = '/';
		if (resolved || slash == path || errno == ENOMEM)
			return resolved;
		for (slash--; *slash != '/';)
			slash--;
	}
}

static int resolve(char *absolute, char **destination, struct base_error *error)
{
	struct base_buffer made = { 0 };
	const char *names;
	char *above = resolve_above(absolute, &names);
	int ret = 0;

	if (!above || base_buffer_append(&made, above, strcmp(above, "/") ? strlen(above) : 0))
		ret = base_no_memory(error, "a path", strlen(absolute));
	if (!ret)
		ret = add_names(&made, names, absolute, error);
	if (!ret && base_buffer_append(&made, "", 1))
		ret = base_no_memory(error, "a path", made.bytes);
	free(above);
	*destination = (char *)made.data;
	return ret;
}

/* "runs/step-10/" is as good as "runs/step-10". */
static int make_absolute(const char *path, char **absolute, struct base_error *error)
{
	size_t bytes = strlen(path);
	char *given;
	int ret;

	while (bytes > 1 && path[bytes - 1] == '/')
		bytes--;
	given = strndup(path, bytes);
	if (!given)
		return base_no_memory(error, "a path", bytes);
	ret = save_absolute_path(given, absolute, error);
	free(given);
	return ret;
}

int tier_destination(const struct ioshape_tier *tier, const char *path, char **destination,
		     struct base_error *error)
{
	const size_t root = strlen(tier->root.path);
	char *absolute;
	int ret;

	*destination = NULL;
	ret = make_absolute(path, &absolute, error);
	if (ret)
		return ret;
	ret = resolve(absolute, destination, error);
	free(absolute);
	if (!ret && !strncmp(*destination, tier->root.path, root) && (*destination)[root] == '/')
		ret = base_refuse(error, -EINVAL,
				  "\"%s\" lies on the tier itself" BASE_REMEDY
				  "give the path where it shall end",
				  path);
	else if (!ret && !tier_is_plain_path(*destination))
		ret = base_refuse(error, -EINVAL, "\"%s\" is no path that can be saved to", path);
	if (ret) {
		free(*destination);
		*destination = NULL;
	}
	return ret;
}

/* ---- Copies ---------------------------------------------------------------------------------- */

char *tier_place(const struct ioshape_tier *tier, const char *destination)
{
	const size_t bytes = strlen(tier->files) + strlen(destination) + 1;
	char *place = malloc(bytes);

	if (place)
		snprintf(place, bytes, "%s%s", tier->files, destination);
	return place;
}

int tier_look(const struct ioshape_tier *tier, const char *destination, struct ring_entry *copy,
	      struct base_error *error)
{
	char *place = tier_place(tier, destination);
	int ret = place ? ring_look(place, false, copy) :
			  base_no_memory(error, "a path", strlen(destination));

	if (place && ret && ret != -ENOENT)
		base_fail(error, ret, "cannot look at \"%s\"", place);
	free(place);
	return ret;
}

static int discard_at(const char *place, const struct ring_entry *copy, struct base_error *error)
{
	char *above = base_directory_of(place), sums[NAME_MAX + 1];
	const char *name = strrchr(place, '/') + 1;
	struct ring_folder folder = RING_NO_FOLDER;
	int ret;

	if (!above)
		return base_no_memory(error, "a path", strlen(place));
	ret = ring_folder_open(&folder, above, error);
	if (!ret)
		ret = ring_folder_discard(&folder, name, copy, ZIP_MANIFEST_NAME, error);
	/* They tell of nothing any more. */
	if (!ret && snprintf(sums, sizeof(sums), "%s" ZIP_CHECKSUMS_SUFFIX, name) <= NAME_MAX)
		ret = ring_folder_drop_text(&folder, sums, error);
	ring_folder_close(&folder);
	free(above);
	return ret;
}

int tier_drop(const struct ioshape_tier *tier, const char *destination,
	      const struct ring_entry *copy, struct base_error *error)
{
	char *place = tier_place(tier, destination);
	const int ret = place ? discard_at(place, copy, error) :
				base_no_memory(error, "a path", strlen(destination));

	free(place);
	return ret;
}

/* As tier_drop(). */
static int discard_copy(const struct ioshape_tier *tier, const struct tier_entry *entry,
			uint64_t *bytes, struct base_error *error)
{
	struct ring_entry copy;
	int ret = tier_look(tier, entry->path, &copy, error);

	if (ret)
		return ret;
	if (copy.kind == RING_OTHER || copy.modified_ns != entry->copy_ns)
		return -ESTALE;
	ret = tier_bytes_of(tier, entry->path, &copy, bytes, error);
	return ret ? ret : tier_drop(tier, entry->path, &copy, error);
}

int tier_discard(const struct ioshape_tier *tier, const struct tier_entry *entry, uint64_t *bytes,
		 struct base_error *error)
{
	int ret = discard_copy(tier, entry, bytes, error);

	if (ret)
		*bytes = 0;
	if (ret == -EBUSY)
		return 0;
	/* It is gone, or was replaced by what will have an entry of its own. */
	return !ret || ret == -ENOENT || ret == -ESTALE ?
		       tier_journal_change(tier, entry, NULL, error) :
		       ret;
}

/* Nobody has been told that it is saved: whoever saved it has died before, or failed. */
static int discard_unkept(const struct ioshape_tier *tier, const char *destination,
			  const struct ring_entry *copy, struct base_error *error)
{
	const int ret = tier_drop(tier, destination, copy, error);

	return ret == -EBUSY || ret == -ENOENT || ret == -ESTALE ? 0 : ret;
}

int tier_clear_place(const struct ioshape_tier *tier, const char *destination,
		     struct base_error *error)
{
	struct ring_hold hold = RING_NO_HOLD;
	struct tier_journal journal = { 0 };
	const struct tier_entry *entry;
	struct ring_entry copy;
	uint64_t bytes;
	int ret = tier_look(tier, destination, &copy, error);

	if (ret || copy.kind != RING_FOLDER)
		return ret == -ENOENT ? 0 : ret;
	ret = tier_lock(tier, &hold, error);
	if (!ret)
		ret = tier_journal_read(tier, &journal, error);
	entry = ret ? NULL : tier_newest(&journal, destination);
	if (entry && entry->drained)
		ret = tier_discard(tier, entry, &bytes, error);
	else if (!ret && !entry)
		ret = discard_unkept(tier, destination, &copy, error);
	tier_journal_free(&journal);
	ring_folder_let_go(&hold);
	return ret;
}
