/* SPDX-License-Identifier: Apache-2.0 */
/* One copy on its way to its destination. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Which is newer -------------------------------------------------------------------------- */

/* The directory that a path leads to: a file that is a link is replaced where it leads. */
static char *directory_of(const char *destination)
{
	char *real = realpath(destination, NULL);
	char *directory = base_directory_of(real ? real : destination);

	free(real);
	return directory;
}

int tier_clock_there(const struct ioshape_tier *tier, const char *destination, int64_t time_ns,
		     int64_t *there_ns, struct base_error *error)
{
	char *directory = directory_of(destination);
	int64_t before_ns = 0, now_there_ns = 0, after_ns = 0;
	int ret;

	if (!directory)
		return base_no_memory(error, "a path", strlen(destination));
	ret = ring_time_in(tier->root.path, &before_ns, error);
	if (!ret)
		ret = ring_time_in(directory, &now_there_ns, error);
	if (!ret)
		ret = ring_time_in(tier->root.path, &after_ns, error);
	*there_ns = tier_time_there(time_ns, before_ns, now_there_ns, after_ns);
	free(directory);
	return ret;
}

/*
 * The time that the destination gets, and what it may replace: whatever is not newer; and what an
 * earlier drain has put there, whatever clocks have done since.
 */
static int plan(struct tier_carry *carry, const struct ring_entry *there, struct base_error *error)
{
	int64_t time_ns;
	int ret = tier_clock_there(carry->tier, carry->entry->path, carry->copy.modified_ns,
				   &time_ns, error);

	if (there && carry->before && carry->before->there_ns == there->modified_ns)
		time_ns = MAX(time_ns, there->modified_ns);
	carry->original = (struct ring_original){
		.modified_ns = time_ns,
		.newest_ns = time_ns,
		.mode = carry->copy.mode,
	};
	return ret;
}

static bool is_newer_there(const struct tier_carry *carry)
{
	struct ring_entry there;

	return !ring_look(carry->entry->path, true, &there) &&
	       there.modified_ns > carry->original.newest_ns;
}

/* Then the copy is as old there as it would have been. */
void tier_find_newer(struct tier_carry *carry)
{
	carry->result = IOSHAPE_DRAINED_NEWER;
	carry->there_ns = carry->original.modified_ns;
}

static int see_name(void *user, const char *name, struct base_error *error)
{
	(void)user, (void)name, (void)error;
	return 1;
}

/* Such a directory is replaced by any, as by a direct save. */
static bool is_empty_folder(const char *path, const struct ring_entry *there)
{
	struct ring_folder folder;
	bool empty;

	if (there->kind != RING_FOLDER || ring_folder_open(&folder, path, NULL))
		return false;
	empty = !ring_folder_list(&folder, see_name, NULL, NULL);
	ring_folder_close(&folder);
	return empty;
}

/* A directory is made with those above it, as by a direct save. */
static int make_above(const char *path, struct base_error *error)
{
	char *above = base_directory_of(path);
	const int ret = above ? ring_folder_make(above, error) :
				base_no_memory(error, "a path", strlen(path));

	free(above);
	return ret;
}

int tier_look_there(struct tier_carry *carry, struct base_error *error)
{
	const char *path = carry->entry->path;
	struct ring_entry there;
	int ret = ring_look(path, true, &there);
	const bool is_there = !ret && !is_empty_folder(path, &there);

	if (ret && ret != -ENOENT)
		return base_fail(error, ret, "cannot look at \"%s\"", path);
	if (!ret && there.kind != carry->copy.kind)
		return base_refuse(error, -EEXIST, "cannot put \"%s\" in place: %s", path,
				   there.kind == RING_FOLDER ? "there is a directory" :
							       "what is there is none");
	ret = carry->copy.kind == RING_FOLDER ? make_above(path, error) : 0;
	if (!ret)
		ret = plan(carry, is_there ? &there : NULL, error);
	if (!ret && is_there && there.modified_ns > carry->original.newest_ns)
		tier_find_newer(carry);
	return ret;
}

/* ---- All of it ------------------------------------------------------------------------------- */

static int carry_file(struct tier_carry *carry, struct base_error *error)
{
	struct tier_file file = {
		.carry = carry,
		.from = carry->place,
		.to = carry->entry->path,
		.copy = carry->copy,
		.original = carry->original,
	};
	const int ret = tier_carry_file(&file, error);

	carry->there_ns = file.there_ns;
	return ret;
}

static int carry_what_is_there(struct tier_carry *carry, struct base_error *error)
{
	int ret =
		tier_bytes_of(carry->tier, carry->entry->path, &carry->copy, &carry->bytes, error);

	if (!ret && carry->copy.kind == RING_FOLDER) {
		ret = tier_carry_nodes(carry, error);
		if (ret <= 0)
			return ret;
		ret = 0;
	}
	if (!ret)
		ret = tier_look_there(carry, error);
	if (ret || carry->result != IOSHAPE_DRAINED)
		return ret;
	ret = carry->copy.kind == RING_FOLDER ? tier_carry_folder(carry, error) :
						carry_file(carry, error);
	/* Somebody was there just before us. */
	if (ret == -EEXIST && is_newer_there(carry)) {
		base_error_begin(error);
		tier_find_newer(carry);
		ret = 0;
	}
	return ret;
}

int tier_carry(struct tier_carry *carry, struct base_error *error)
{
	int ret = tier_look(carry->tier, carry->entry->path, &carry->copy, error);

	carry->result = ret == -ENOENT ? IOSHAPE_DRAINED_GONE : IOSHAPE_DRAINED;
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	carry->place = tier_place(carry->tier, carry->entry->path);
	if (!carry->place)
		return base_no_memory(error, "a path", strlen(carry->entry->path));
	if (carry->copy.kind == RING_OTHER)
		ret = base_refuse(error, -EINVAL, "\"%s\" is neither a file nor a directory",
				  carry->place);
	else
		ret = tier_check_links(carry->entry->path, error);
	if (!ret)
		ret = carry_what_is_there(carry, error);
	free(carry->place);
	carry->place = NULL;
	return ret;
}
