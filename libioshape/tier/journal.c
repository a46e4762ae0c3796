/* SPDX-License-Identifier: Apache-2.0 */
/* What is still to be drained, and what has been. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int tier_lock(const struct ioshape_tier *tier, struct ring_hold *hold, struct base_error *error)
{
	return ring_folder_take(&tier->root, "lock", true, hold, error);
}

/* ---- Reading --------------------------------------------------------------------------------- */

struct listing {
	const struct ioshape_tier *tier;
	struct base_buffer entries;
};

static int add_entry(struct listing *listing, struct tier_entry *entry, const char *path,
		     struct base_error *error)
{
	entry->path = strdup(path);
	if (entry->path && !base_buffer_append(&listing->entries, entry, sizeof(*entry)))
		return 0;
	free(entry->path);
	return base_no_memory(error, "the journal of a tier", listing->entries.bytes);
}

static int found_name(void *user, const char *name, struct base_error *error)
{
	struct listing *listing = user;
	const struct ring_folder *journal = &listing->tier->journal;
	char text[PATH_MAX];
	struct tier_entry entry;
	const char *path;
	int ret = -EINVAL;

	if (tier_parse_name(name, &entry))
		ret = ring_folder_get_text(journal, name, text);
	if (ret == -ENOENT)
		return 0;
	/* Who cannot read it must not take the rest for all that waits. */
	if (ret && ret != -EINVAL && ret != -ENAMETOOLONG)
		return base_fail(error, ret, "cannot read \"%s/%s\"", journal->path, name);
	if (!ret && tier_parse_text(text, &entry, &path))
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
	int ret = ring_folder_list(&tier->journal, found_name, &listing, error);

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
		free(journal->all[i].path);
	free(journal->all);
	*journal = (struct tier_journal){ 0 };
}

const struct tier_entry *tier_newest(const struct tier_journal *journal, const char *path)
{
	for (size_t i = journal->count; i; i--) {
		if (!strcmp(journal->all[i - 1].path, path))
			return &journal->all[i - 1];
	}
	return NULL;
}

static bool a_later_one_waits(const struct tier_journal *journal, const struct tier_entry *entry)
{
	for (const struct tier_entry *later = entry; ++later < journal->all + journal->count;) {
		if (!later->drained && !strcmp(later->path, entry->path))
			return true;
	}
	return false;
}

bool tier_is_overtaken(const struct ioshape_tier *tier, const struct tier_journal *journal,
		       const struct tier_entry *entry)
{
	const struct tier_entry *newest = tier_newest(journal, entry->path);
	struct ring_entry copy;

	if (newest == entry || a_later_one_waits(journal, entry))
		return newest != entry;
	return !tier_look(tier, entry->path, &copy, NULL) && copy.modified_ns == newest->copy_ns;
}

/* ---- Changing -------------------------------------------------------------------------------- */

/* Numbers that something else has taken, which is no entry. */
#define MOST_TAKEN 16
/* Saves do not count as far: a larger number is damaged or forged. Its entry is drained like all
 * others, but none is numbered after it, as there may be no number left. */
#define MOST_NUMBER (UINT64_MAX / 2)

/* The number after all that there are. */
static int choose_number(const struct ioshape_tier *tier, uint64_t *number,
			 struct base_error *error)
{
	struct tier_journal journal;
	const int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	*number = 1;
	for (size_t i = 0; i < journal.count && journal.all[i].number < MOST_NUMBER; i++)
		*number = journal.all[i].number + 1;
	tier_journal_free(&journal);
	return 0;
}

int tier_journal_add(const struct ioshape_tier *tier, struct tier_entry *entry,
		     struct base_error *error)
{
	char name[TIER_NAME_BYTES], *text = tier_entry_text(entry);
	int ret;

	if (!text)
		return base_no_memory(error, "an entry of a tier's journal", strlen(entry->path));
	ret = choose_number(tier, &entry->number, error);
	for (int tries = 0; !ret; tries++, entry->number++) {
		tier_entry_name(name, entry);
		ret = ring_folder_put_text(&tier->journal, name, text, error);
		if (ret != -EEXIST)
			break;
		ret = tries < MOST_TAKEN ? 0 :
					   base_fail(error, ret, "cannot make \"%s/%s\"",
						     tier->journal.path, name);
	}
	if (!ret)
		ret = ring_folder_sync(&tier->journal, error);
	free(text);
	return ret;
}

int tier_journal_change(const struct ioshape_tier *tier, const struct tier_entry *entry,
			const struct tier_entry *now, struct base_error *error)
{
	char name[TIER_NAME_BYTES], next[TIER_NAME_BYTES];
	int ret;

	tier_entry_name(name, entry);
	if (now) {
		tier_entry_name(next, now);
		ret = ring_folder_rename(&tier->journal, name, next);
		if (ret && ret != -ENOENT)
			base_fail(error, ret, "cannot rename \"%s/%s\"", tier->journal.path, name);
		ret = ret == -ENOENT ? 0 : ret;
	} else {
		ret = ring_folder_drop_text(&tier->journal, name, error);
	}
	return ret ? ret : ring_folder_sync(&tier->journal, error);
}
