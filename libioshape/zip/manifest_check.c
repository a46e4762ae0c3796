/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a manifest holds together: before it is written, and when it has been read. */
#define _GNU_SOURCE
#include "zip/manifest.h"

#include "zip/zip.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* In the directory of the generation, and beside the manifest. NULL if it is fine, else what is
 * wrong.
 */
static const char *name_problem(const char *name)
{
	size_t bytes = strlen(name);

	if (!bytes || bytes > ZIP_MAX_FILE_NAME_BYTES || !zip_utf8_valid(name, bytes))
		return "the name of a file is empty, too long or not UTF-8";
	if (strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, "..") ||
	    !strcmp(name, ZIP_MANIFEST_NAME))
		return "a file is not one of the generation's own directory";
	return NULL;
}

static bool is_too_large(const struct zip_manifest *manifest)
{
	uint64_t left = ZIP_MAX_GENERATION_BYTES;

	for (uint32_t i = 0; i < manifest->file_count; i++) {
		if (manifest->files[i].bytes > left)
			return true;
		left -= manifest->files[i].bytes;
	}
	return false;
}

static const char *attempt_problem(const char *attempt)
{
	return *attempt && !attempt[strspn(attempt, "0123456789abcdefABCDEF-")] ?
		       NULL :
		       "the attempt is not hexadecimal digits";
}

/* One part against its file. */
static const char *part_problem(const struct zip_manifest *manifest,
				const struct zip_manifest_part *part)
{
	const struct zip_manifest_file *file;

	if (part->file >= manifest->file_count)
		return "a part is in a file that is not there";
	/* Also because readers are asked for all of a file by 0 bytes. */
	if (!part->bytes)
		return "a part is empty";
	file = &manifest->files[part->file];
	if (part->offset > file->bytes || part->bytes > file->bytes - part->offset)
		return "a part leaves its file";
	if (!file->bundle &&
	    (part->offset || part->bytes != file->bytes || part->crc32 != file->crc32))
		return "a file that is no bundle is not the part of its rank";
	return NULL;
}

/* Says what is wrong with a part that names another one; NULL: nothing. */
static const char *repeat_problem(const struct zip_manifest *manifest, uint32_t rank)
{
	const struct zip_manifest_part *part = &manifest->parts[rank], *same;

	if (!part->repeats)
		return NULL;
	if (part->same >= rank || manifest->parts[part->same].repeats)
		return "a part repeats one that is not of a lower rank, or that repeats another";
	same = &manifest->parts[part->same];
	return same->bytes == part->bytes && same->crc32 == part->crc32 ?
		       NULL :
		       "a part is not equal to the one that it repeats";
}

static uint32_t content_of(const struct zip_manifest *manifest, uint32_t rank)
{
	return manifest->parts[rank].repeats ? manifest->parts[rank].same : rank;
}

static int compare_places(const void *left, const void *right, void *user)
{
	const struct zip_manifest_part *parts = user;
	const struct zip_manifest_part *a = &parts[*(const uint32_t *)left];
	const struct zip_manifest_part *b = &parts[*(const uint32_t *)right];

	if (a->file != b->file)
		return a->file < b->file ? -1 : 1;
	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	if (a->bytes != b->bytes)
		return a->bytes < b->bytes ? -1 : 1;
	return a < b ? -1 : a > b;
}

/* Parts that lie in their files. Only parts of one content lie in one place. */
static int check_apart(const struct zip_manifest *manifest, const char **problem)
{
	struct zip_manifest_part *before, *part, *parts = manifest->parts;
	uint32_t *order = reallocarray(NULL, MAX(manifest->rank_count, 1), sizeof(*order));

	if (!order)
		return -ENOMEM;
	for (uint32_t i = 0; i < manifest->rank_count; i++)
		parts[i].holder = order[i] = i;
	qsort_r(order, manifest->rank_count, sizeof(*order), compare_places, manifest->parts);
	for (uint32_t i = 1; i < manifest->rank_count && !*problem; i++) {
		before = &parts[order[i - 1]];
		part = &parts[order[i]];
		if (part->file != before->file || before->offset + before->bytes <= part->offset)
			continue;
		part->holder = before->holder;
		if (part->offset != before->offset || part->bytes != before->bytes ||
		    content_of(manifest, order[i]) != content_of(manifest, order[i - 1]))
			*problem = "two parts overlap";
	}
	free(order);
	return 0;
}

static int check_names(const struct zip_manifest *manifest, const char **problem)
{
	struct zip_names *names;
	const char *name;
	int ret;

	ret = zip_names_new(&names, manifest->file_count);
	for (uint32_t i = 0; i < manifest->file_count && !ret && !*problem; i++) {
		name = manifest->files[i].name;
		*problem = name_problem(name);
		if (!*problem)
			ret = zip_names_add(names, name, strlen(name), i);
	}
	zip_names_free(names);
	if (ret != -EEXIST)
		return ret;
	*problem = "two files have the same name";
	return 0;
}

int zip_manifest_check(const struct zip_manifest *manifest, const char **problem)
{
	int ret;

	*problem = attempt_problem(manifest->attempt);
	if (!*problem && (!manifest->rank_count || !manifest->file_count))
		*problem = "it has no files, or no parts";
	if (!*problem && manifest->serial > ZIP_MAX_SERIAL)
		*problem = "the serial number is too large";
	if (!*problem && is_too_large(manifest))
		*problem = "its files are larger than any filesystem";
	if (*problem)
		return 0;
	ret = check_names(manifest, problem);
	for (uint32_t i = 0; i < manifest->rank_count && !ret && !*problem; i++) {
		*problem = part_problem(manifest, &manifest->parts[i]);
		if (!*problem)
			*problem = repeat_problem(manifest, i);
	}
	return ret || *problem ? ret : check_apart(manifest, problem);
}
