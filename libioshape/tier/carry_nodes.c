/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation that lies on the tiers of several nodes: each brings the files that it has into one
 * directory beside the destination, which no reader sees. Whoever finds that all are there puts it
 * in place, with the manifest, which all of them have.
 */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A generation on its way, and where it goes. */
struct gathering {
	struct tier_carry *carry;
	struct group_generation here;
	struct ring_folder there;                /* the directory of generations */
	const char *name;                        /* in it */
	char together[GROUP_ATTEMPT_NAME_BYTES]; /* name of the directory that all bring files to */
	struct ring_folder folder;               /* that one */
};

/* ---- What is there --------------------------------------------------------------------------- */

/* Another node, or we before a crash, have put it in place. */
static bool is_in_place(struct gathering *gathering)
{
	struct tier_carry *carry = gathering->carry;
	const struct zip_manifest *manifest = &gathering->here.manifest;
	struct group_generation found;
	struct ring_entry entry;
	bool same;

	if (group_generation_open(&found, &gathering->there, gathering->name, manifest->step, NULL))
		return false;
	same = !strcmp(found.manifest.attempt, manifest->attempt) &&
	       !ring_folder_look(&found.folder, ".", &entry, NULL);
	if (same)
		carry->there_ns = entry.modified_ns;
	group_generation_close(&found);
	return same;
}

/* There is a newer one, and what is missing has not come for a day: a node was lost with it. */
static bool is_given_up(const struct gathering *gathering)
{
	const struct tier_carry *carry = gathering->carry;
	const struct base_log *log = save_log(carry->tier->context);
	struct ring_clock clock = { .directory_fd = carry->tier->root.fd };

	return ring_is_abandoned(&clock, carry->copy.modified) &&
	       group_last_serial(&gathering->there, log) > gathering->here.manifest.serial;
}

static int wait_for_others(struct gathering *gathering, struct base_error *error)
{
	struct tier_carry *carry = gathering->carry;

	if (is_given_up(gathering)) {
		ring_folder_remove(&gathering->folder, &gathering->there, gathering->together, NULL,
				   NULL, NULL);
		tier_find_newer(carry);
		return 0;
	}
	carry->result = IOSHAPE_DRAINED_WAITS;
	base_refuse(error, -EAGAIN,
		    "\"%s\" waits for the files of other nodes" BASE_REMEDY
		    "drain their tiers, too",
		    carry->entry->path);
	return 0;
}

/* ---- Our files ------------------------------------------------------------------------------- */

static int bring_file(struct gathering *gathering, const struct zip_manifest_file *listed,
		      const struct ring_entry *copy, struct base_error *error)
{
	struct tier_carry *carry = gathering->carry;
	struct tier_file file = {
		.carry = carry,
		.copy = *copy,
		.original = {
			.modified_ns = carry->original.modified_ns,
			.mode = copy->mode,
			.newest_ns = INT64_MAX, /* it is the same, whoever has brought it */
		},
	};
	char *from = NULL, *to = NULL;
	int ret;

	if (asprintf(&from, "%s/%s", carry->place, listed->name) < 0)
		from = NULL;
	if (asprintf(&to, "%s/%s", gathering->folder.path, listed->name) < 0)
		to = NULL;
	file.from = from;
	file.to = to;
	ret = from && to ? tier_carry_file(&file, error) :
			   base_no_memory(error, "a path", strlen(carry->place));
	free(from);
	free(to);
	return ret;
}

/* Those that are here and not there. */
static int bring_all(struct gathering *gathering, struct base_error *error)
{
	const struct zip_manifest *manifest = &gathering->here.manifest;
	struct ring_entry copy, there;
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		const struct zip_manifest_file *listed = &manifest->files[i];

		ret = ring_folder_look(&gathering->here.folder, listed->name, &copy, error);
		if (ret == -ENOENT) {
			ret = 0;
			continue;
		}
		if (!ret && (ring_folder_look(&gathering->folder, listed->name, &there, NULL) ||
			     there.bytes != listed->bytes))
			ret = bring_file(gathering, listed, &copy, error);
		gathering->carry->done += copy.bytes;
	}
	return ret;
}

/* ---- In place -------------------------------------------------------------------------------- */

static int put_manifest(struct gathering *gathering, struct base_error *error)
{
	struct ring_hold hold = RING_NO_HOLD;
	struct base_buffer text = { 0 };
	int ret;

	ret = ring_folder_get(&gathering->here.folder, ZIP_MANIFEST_NAME, ZIP_MAX_MANIFEST_BYTES,
			      &text, &hold, error);
	if (!ret)
		ret = ring_folder_put(&gathering->folder, ZIP_MANIFEST_NAME, text.data, text.bytes,
				      error);
	ring_folder_let_go(&hold);
	base_buffer_free(&text);
	return ret;
}

static int replace(struct gathering *gathering, struct base_error *error)
{
	struct tier_carry *carry = gathering->carry;
	struct ring_new_folder made = {
		.above = gathering->there,
		.folder = gathering->folder,
		.name = (char *)(uintptr_t)gathering->name,
	};
	struct ring_entry entry;
	int ret = ring_folder_resemble(&gathering->folder, &carry->original, error);

	snprintf(made.temporary, sizeof(made.temporary), "%s", gathering->together);
	if (!ret)
		ret = ring_folder_look(&gathering->folder, ".", &entry, error);
	if (!ret)
		ret = ring_new_folder_replace(&made, ZIP_MANIFEST_NAME, carry->original.newest_ns,
					      error);
	if (!ret)
		carry->there_ns = entry.modified_ns;
	return ret;
}

/* One node at a time, where locks reach the others; and if its name has gone to the destination, it
 * is there. */
static int put_in_place(struct gathering *gathering, struct base_error *error)
{
	int ret = 0;

	if (ring_folder_lock(&gathering->folder) == RING_BUSY)
		return wait_for_others(gathering, error);
	if (ring_folder_is_named(&gathering->folder, &gathering->there, gathering->together)) {
		ret = put_manifest(gathering, error);
		if (!ret)
			ret = replace(gathering, error);
	}
	if (!ret || !is_in_place(gathering))
		return ret;
	base_error_begin(error);
	return 0;
}

/* ---- All of it ------------------------------------------------------------------------------- */

static int open_together(struct gathering *gathering, struct base_error *error)
{
	const struct zip_manifest *manifest = &gathering->here.manifest;
	char *path;
	int ret;

	group_drained_name(gathering->together, manifest->step, manifest->attempt);
	if (asprintf(&path, "%s/%s", gathering->there.path, gathering->together) < 0)
		return base_no_memory(error, "a path", strlen(gathering->there.path));
	ret = ring_folder_make(path, error);
	if (!ret)
		ret = ring_folder_open(&gathering->folder, path, error);
	free(path);
	return ret;
}

static int gather(struct gathering *gathering, struct base_error *error)
{
	struct tier_carry *carry = gathering->carry;
	struct base_error missing = { 0 };
	int ret;

	if (is_in_place(gathering))
		return 0;
	ret = tier_look_there(carry, error);
	if (ret || carry->result != IOSHAPE_DRAINED)
		return ret;
	ret = open_together(gathering, error);
	if (!ret)
		ret = bring_all(gathering, error);
	/* What failed, did perhaps because another node has put it in place. */
	if (ret && ret != -ECANCELED && is_in_place(gathering)) {
		base_error_begin(error);
		return 0;
	}
	if (ret)
		return ret;
	ret = group_check_files(&gathering->folder, &gathering->here.manifest, "", &missing);
	if (!ret)
		return put_in_place(gathering, error);
	if (is_in_place(gathering))
		return 0;
	return ret == IOSHAPE_E_DAMAGED ? wait_for_others(gathering, error) :
					  base_pass_on(error, &missing);
}

/* 1: it is none of several nodes. */
static int open_here(struct gathering *gathering, struct base_error *error)
{
	const struct tier_carry *carry = gathering->carry;
	const struct group_name name = group_parse_name(gathering->name);
	struct ring_folder above = RING_NO_FOLDER;
	char *path = base_directory_of(carry->place);
	int ret;

	if (!path)
		return base_no_memory(error, "a path", strlen(carry->place));
	ret = name.kind == GROUP_NAME_STEP ? ring_folder_open(&above, path, error) : 1;
	free(path);
	if (ret)
		return ret;
	if (group_generation_open(&gathering->here, &above, gathering->name, name.step, NULL))
		ret = 1;
	else if (!group_is_of_nodes(&gathering->here.folder))
		ret = 1;
	ring_folder_close(&above);
	return ret;
}

int tier_carry_nodes(struct tier_carry *carry, struct base_error *error)
{
	struct gathering gathering = {
		.carry = carry,
		.here = GROUP_NO_GENERATION,
		.there = RING_NO_FOLDER,
		.folder = RING_NO_FOLDER,
		.name = strrchr(carry->entry->path, '/') + 1,
	};
	char *above = NULL;
	int ret = open_here(&gathering, error);

	if (!ret) {
		above = base_directory_of(carry->entry->path);
		ret = above ? ring_folder_make(above, error) :
			      base_no_memory(error, "a path", strlen(carry->entry->path));
	}
	if (!ret)
		ret = ring_folder_open(&gathering.there, above, error);
	if (!ret)
		ret = gather(&gathering, error);
	ring_folder_close(&gathering.folder);
	ring_folder_close(&gathering.there);
	group_generation_close(&gathering.here);
	free(above);
	return ret;
}
