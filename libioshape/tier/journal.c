/* SPDX-License-Identifier: Apache-2.0 */
/* What is still to be drained, and what has been. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Names and texts of entries -------------------------------------------------------------- */

bool tier_is_plain_path(const char *path)
{
	const char *name = path;

	if (*path != '/')
		return false;
	while (*name == '/') {
		const size_t bytes = strcspn(++name, "/");

		if (!bytes || (bytes <= 2 && !strncmp(name, "..", bytes)))
			return false;
		name += bytes;
	}
	return true;
}

#define NAME_BYTES 64

static void entry_name(char into[NAME_BYTES], const struct tier_entry *entry)
{
	const int bytes = snprintf(into, NAME_BYTES, "%020" PRIu64, entry->number);

	if (entry->drained)
		snprintf(into + bytes, NAME_BYTES - (size_t)bytes, "-%" PRId64 "-%" PRId64,
			 entry->copy_ns, entry->there_ns);
}

/* False if it is none of the journal's; sets all but what the text says. */
static bool parse_name(const char *name, struct tier_entry *entry)
{
	char again[NAME_BYTES], *end;

	*entry = (struct tier_entry){ 0 };
	entry->number = strtoull(name, &end, 10);
	entry->drained = *end == '-';
	if (entry->drained) {
		entry->copy_ns = strtoll(end + 1, &end, 10);
		entry->there_ns = *end == '-' ? strtoll(end + 1, &end, 10) : 0;
	}
	/* Whatever else the calls above would take. */
	entry_name(again, entry);
	return entry->number && !strcmp(name, again);
}

/* To be freed; NULL without memory. */
static char *entry_text(const struct tier_entry *entry)
{
	char *text;

	return asprintf(&text, "%" PRIu32 " %" PRIu64 " %s", entry->keep_last, entry->keep_every,
			entry->path) < 0 ?
		       NULL :
		       text;
}

/* A number and a blank; what follows, or NULL. */
static const char *parse_number(const char *text, uint64_t most, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	return *text >= '0' && *text <= '9' && !errno && *number <= most && *end == ' ' ? end + 1 :
											  NULL;
}

/* Sets the rest. *path points into the text. False if it is none of the journal's. */
static bool parse_text(const char *text, struct tier_entry *entry, const char **path)
{
	uint64_t keep_last = 0;
	const char *at = parse_number(text, UINT32_MAX, &keep_last);

	if (at)
		at = parse_number(at, UINT64_MAX, &entry->keep_every);
	entry->keep_last = (uint32_t)keep_last;
	*path = at;
	return at && tier_is_plain_path(at);
}

const char *tier_path_of_entry(const char *name, const char *text, int *drained)
{
	struct tier_entry entry;
	const char *path;

	if (!parse_name(name, &entry) || !parse_text(text, &entry, &path))
		return NULL;
	*drained = entry.drained;
	return path;
}

/* ---- Reading --------------------------------------------------------------------------------- */

int tier_lock(const struct ioshape_tier *tier, struct io_hold *hold, struct base_error *error)
{
	return io_folder_take(&tier->root, "lock", true, hold, error);
}

struct listing {
	const struct ioshape_tier *tier;
	struct base_buffer entries;
};

static int add_entry(struct listing *listing, struct tier_entry *entry, const char *path,
		     struct base_error *error)
{
	const struct ioshape_tier *tier = listing->tier;

	if (asprintf(&entry->place, "%s%s", tier->files, path) < 0)
		entry->place = NULL;
	else
		entry->path = tier_destination(tier, entry->place);
	if (entry->place && !base_buffer_append(&listing->entries, entry, sizeof(*entry)))
		return 0;
	free(entry->place);
	return base_no_memory(error, "the journal of a tier", listing->entries.bytes);
}

static int found_name(void *user, const char *name, struct base_error *error)
{
	struct listing *listing = user;
	const struct io_folder *journal = &listing->tier->journal;
	char text[PATH_MAX];
	struct tier_entry entry;
	const char *path;
	int ret = -EINVAL;

	if (parse_name(name, &entry))
		ret = io_folder_get_text(journal, name, text);
	if (ret == -ENOENT)
		return 0;
	/* An unreadable entry is an error: skipping it would hide a copy. */
	if (ret && ret != -EINVAL && ret != -ENAMETOOLONG)
		return base_fail(error, ret, "cannot read \"%s/%s\"", journal->path, name);
	if (!ret && parse_text(text, &entry, &path))
		return add_entry(listing, &entry, path, error);
	base_log(save_log(listing->tier->context), IOSHAPE_LOG_WARNING,
		 "\"%s/%s\" is ignored: it is no entry of the journal", journal->path, name);
	return 0;
}

static int compare_numbers(const void *left, const void *right)
{
	const struct tier_entry *a = left, *b = right;

	return a->number < b->number ? -1 : a->number > b->number;
}

int tier_journal_read(const struct ioshape_tier *tier, struct tier_journal *journal,
		      struct base_error *error)
{
	struct listing listing = { .tier = tier };
	int ret = io_folder_list(&tier->journal, found_name, &listing, error);

	/* The buffer's memory is malloc()'s, and the struct's alignment is no stricter. */
	journal->all = (struct tier_entry *)(void *)listing.entries.data;
	journal->count = listing.entries.bytes / sizeof(*journal->all);
	if (ret)
		tier_journal_free(journal);
	else if (journal->count)
		qsort(journal->all, journal->count, sizeof(*journal->all), compare_numbers);
	return ret;
}

void tier_journal_free(struct tier_journal *journal)
{
	for (size_t i = 0; i < journal->count; i++)
		free(journal->all[i].place);
	free(journal->all);
	*journal = (struct tier_journal){ 0 };
}

const struct tier_entry *tier_newest(const struct tier_journal *journal, const char *place)
{
	for (size_t i = journal->count; i; i--) {
		if (!strcmp(journal->all[i - 1].place, place))
			return &journal->all[i - 1];
	}
	return NULL;
}

/* ---- Changing -------------------------------------------------------------------------------- */

/* Numbers that something else has taken, which is no entry. */
#define MOST_TAKEN 16

int tier_journal_add(const struct ioshape_tier *tier, const struct tier_journal *journal,
		     struct tier_entry *entry, struct base_error *error)
{
	char name[NAME_BYTES], *text = entry_text(entry);
	int ret = -EEXIST;

	if (!text)
		return base_no_memory(error, "an entry of a tier's journal", strlen(entry->path));
	entry->number = journal->count ? journal->all[journal->count - 1].number : 0;
	for (int tries = 0; ret == -EEXIST && tries < MOST_TAKEN; tries++) {
		entry->number++;
		entry_name(name, entry);
		ret = io_folder_put_text(&tier->journal, name, text, error);
	}
	if (ret == -EEXIST)
		base_fail(error, ret, "cannot make \"%s/%s\"", tier->journal.path, name);
	if (!ret)
		ret = io_folder_sync(&tier->journal, error);
	free(text);
	return ret;
}

int tier_journal_change(const struct ioshape_tier *tier, const struct tier_entry *entry,
			const struct tier_entry *now, struct base_error *error)
{
	char name[NAME_BYTES], next[NAME_BYTES];
	int ret;

	entry_name(name, entry);
	if (now) {
		entry_name(next, now);
		ret = io_folder_rename(&tier->journal, name, next);
		if (ret && ret != -ENOENT)
			base_fail(error, ret, "cannot rename \"%s/%s\"", tier->journal.path, name);
		ret = ret == -ENOENT ? 0 : ret;
	} else {
		ret = io_folder_drop_text(&tier->journal, name, error);
	}
	return ret ? ret : io_folder_sync(&tier->journal, error);
}
