/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Detects stale bytes: a save whose large records all equal those of the previous save. Then
 * training changes other tensors than the saved ones. For example the program took a state_dict
 * only once, or a buffer is a stale copy.
 *
 * The comparison needs only the checksums of records. Writing computes them anyway, and a load
 * finds them in the zip directory. So a restarted job compares its first save with the checkpoint
 * that it loaded.
 */
#include "save/file.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Size from which a record is large. Small records (step counters, states of random generators)
 * change even if all tensors stand still. */
#define LARGE_BYTES (1 * MIB)
/* In a file without such records, those of at least half the largest size count as large, but never
 * below this limit. The state of torch's generator, which has 5 KiB, never counts. */
#define LEAST_LARGE_BYTES (16 * KIB)

struct large_record {
	uint64_t bytes;
	uint32_t crc32;
};

struct save_seen {
	TAILQ_ENTRY(save_seen) entry;
	char *path;     /* absolute path */
	uint64_t bytes; /* size of all large records */
	size_t count;
	struct large_record records[]; /* sorted by size and checksum */
};

/* ---- Facts remembered of a file -------------------------------------------------------------- */

/* Returns whether a record is the pickle. It has numbers and other objects, so it never counts as
 * large. */
static bool is_pickle(const struct format_entry *entry)
{
	const char *slash = strrchr(entry->name, '/');

	return !strcmp(slash ? slash + 1 : entry->name, "data.pkl");
}

static uint64_t least_large_bytes(const struct format_entry *entries, uint64_t count)
{
	uint64_t most = 0;

	for (uint64_t i = 0; i < count; i++)
		if (!is_pickle(&entries[i]))
			most = MAX(most, entries[i].bytes);
	return MIN(MAX(most / 2, LEAST_LARGE_BYTES), LARGE_BYTES);
}

static int compare_records(const void *one, const void *other)
{
	const struct large_record *a = one, *b = other;

	if (a->bytes != b->bytes)
		return a->bytes < b->bytes ? -1 : 1;
	return (a->crc32 > b->crc32) - (a->crc32 < b->crc32);
}

static void free_seen(struct save_seen *seen)
{
	if (seen)
		free(seen->path);
	free(seen);
}

/* Collects the large records of a file; the result has no path yet. NULL: there are none, or no
 * memory. That makes no save or load fail. */
static struct save_seen *look(const struct format_entry *entries, uint64_t count)
{
	const uint64_t least = least_large_bytes(entries, count);
	struct save_seen *seen;
	size_t large = 0;

	for (uint64_t i = 0; i < count; i++)
		large += entries[i].bytes >= least && !is_pickle(&entries[i]);
	if (!large)
		return NULL;
	seen = calloc(1, sizeof(*seen) + large * sizeof(*seen->records));
	if (!seen)
		return NULL;
	for (uint64_t i = 0; i < count; i++) {
		if (entries[i].bytes < least || is_pickle(&entries[i]))
			continue;
		seen->records[seen->count].bytes = entries[i].bytes;
		seen->records[seen->count++].crc32 = entries[i].crc32;
		seen->bytes += entries[i].bytes;
	}
	qsort(seen->records, seen->count, sizeof(*seen->records), compare_records);
	return seen;
}

/* Returns the size of the records that both files have. Positions do not matter, because a new
 * tensor renumbers all tensors behind it. */
static uint64_t bytes_in_both(const struct save_seen *one, const struct save_seen *other)
{
	size_t i = 0, j = 0;
	uint64_t bytes = 0;

	while (i < one->count && j < other->count) {
		int order = compare_records(&one->records[i], &other->records[j]);

		if (!order)
			bytes += one->records[i].bytes;
		i += order <= 0;
		j += order >= 0;
	}
	return bytes;
}

/* ---- Checkpoint families --------------------------------------------------------------------- */

/* Returns whether two paths belong to one checkpoint family: they differ at most in their
 * numbers. */
static bool is_same_series(const char *one, const char *other)
{
	for (;; one++, other++) {
		while (isdigit((unsigned char)*one))
			one++;
		while (isdigit((unsigned char)*other))
			other++;
		if (*one != *other)
			return false;
		if (!*one)
			return true;
	}
}

static struct save_seen *find(const struct save_seen_list *list, const char *path)
{
	struct save_seen *seen = TAILQ_FIRST(&list->all);

	while (seen && !is_same_series(seen->path, path))
		seen = TAILQ_NEXT(seen, entry);
	return seen;
}

static void forget(struct save_seen_list *list, struct save_seen *seen)
{
	TAILQ_REMOVE(&list->all, seen, entry);
	list->count--;
	free_seen(seen);
}

/* Adds a file to the list, and removes the previous one of its family. If the list is full, removes
 * the oldest instead. */
static void remember(struct save_seen_list *list, struct save_seen *seen)
{
	struct save_seen *old = find(list, seen->path);

	if (!old && list->count == SAVE_KEPT_SERIES)
		for (old = TAILQ_FIRST(&list->all); TAILQ_NEXT(old, entry);)
			old = TAILQ_NEXT(old, entry);
	if (old)
		forget(list, old);
	TAILQ_INSERT_HEAD(&list->all, seen, entry);
	list->count++;
}

void save_seen_forget(struct ioshape_context *context)
{
	while (context->saved.count)
		forget(&context->saved, TAILQ_FIRST(&context->saved.all));
	while (context->loaded.count)
		forget(&context->loaded, TAILQ_FIRST(&context->loaded.all));
}

/* ---- Comparing a save ------------------------------------------------------------------------ */

/* Compares a save with an earlier one, unless that is NULL. `stale` keeps the first earlier save
 * that has all its bytes. */
static void compare_with(struct save_compare *compare, const struct save_seen *before,
			 struct base_error *stale)
{
	const struct save_seen *seen = compare->seen;
	uint64_t same;

	if (!before)
		return;
	same = bytes_in_both(seen, before);
	compare->compared_bytes = seen->bytes;
	compare->unchanged_bytes = MAX(compare->unchanged_bytes, same);
	if (same == seen->bytes)
		base_refuse_with(
			stale, IOSHAPE_E_UNCHANGED,
			"save the tensors that training updates, not an old copy of them, or set "
			"unchanged=ignore",
			"%s \"%s\": all its large tensors (%s) are identical to those of \"%s\"",
			compare->context->unchanged == IOSHAPE_UNCHANGED_FAIL ? "cannot save" :
										"saving",
			compare->path, BASE_SIZE(seen->bytes), before->path);
}

static void compare_with_series(struct save_compare *compare, struct base_error *stale)
{
	struct ioshape_context *context = compare->context;
	const char *path = compare->seen->path;
	const struct save_compare *other;

	TAILQ_FOREACH(other, &context->compared, entry)
	if (is_same_series(other->seen->path, path))
		compare_with(compare, other->seen, stale);
	compare_with(compare, find(&context->saved, path), stale);
	compare_with(compare, find(&context->loaded, path), stale);
}

int save_compare_records(struct save_compare *compare, const struct format_entry *entries,
			 uint64_t count, struct base_error *error)
{
	struct ioshape_context *context = compare->context;
	struct base_error stale = { 0 };

	/* A save whose digest was computed has been compared already. */
	if (context->unchanged == IOSHAPE_UNCHANGED_IGNORE || compare->seen)
		return 0;
	compare->seen = look(entries, count);
	if (compare->seen)
		compare->seen->path = strdup(compare->path);
	if (!compare->seen || !compare->seen->path) {
		free_seen(compare->seen);
		compare->seen = NULL;
		return 0;
	}
	pthread_mutex_lock(&context->lock);
	compare_with_series(compare, &stale);
	TAILQ_INSERT_HEAD(&context->compared, compare, entry);
	pthread_mutex_unlock(&context->lock);
	if (stale.code && context->unchanged == IOSHAPE_UNCHANGED_FAIL)
		return base_pass_on(error, &stale);
	if (stale.code)
		base_log(&context->log, IOSHAPE_LOG_WARNING, "%s", stale.text);
	return 0;
}

void save_compare_end(struct save_compare *compare, bool in_place, struct ioshape_report *report)
{
	struct ioshape_context *context = compare->context;

	report->unchanged = compare->compared_bytes &&
			    compare->compared_bytes == compare->unchanged_bytes;
	if (compare->compared_bytes)
		base_log(&context->log, IOSHAPE_LOG_DEBUG,
			 "%s: %" PRIu64 " of %" PRIu64
			 " bytes of large tensors are unchanged since the previous save",
			 compare->path, compare->unchanged_bytes, compare->compared_bytes);
	if (!compare->seen)
		return;
	pthread_mutex_lock(&context->lock);
	TAILQ_REMOVE(&context->compared, compare, entry);
	if (in_place)
		remember(&context->saved, compare->seen);
	else
		free_seen(compare->seen);
	pthread_mutex_unlock(&context->lock);
	compare->seen = NULL;
}

/* ---- Remembering a load ---------------------------------------------------------------------- */

void save_compare_loaded(struct ioshape_context *context, const char *path,
			 const struct format_reader *zip)
{
	const struct format_directory *directory = &zip->directory;
	struct save_seen *seen;

	if (context->unchanged == IOSHAPE_UNCHANGED_IGNORE || zip->no_checksums)
		return;
	seen = look(directory->entries, directory->count - zip->has_index);
	if (!seen || save_absolute_path(path, &seen->path, NULL)) {
		free_seen(seen);
		return;
	}
	pthread_mutex_lock(&context->lock);
	remember(&context->loaded, seen);
	pthread_mutex_unlock(&context->lock);
}
