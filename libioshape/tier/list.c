/* SPDX-License-Identifier: Apache-2.0 */
/* What lies on a tier. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A row, whose texts lie so far into the texts of all rows. */
struct row {
	struct ioshape_tier_copy copy;
	size_t path_at, place_at;
};

struct copies {
	const struct ioshape_tier *tier;
	struct base_buffer rows; /* of struct row */
	struct base_buffer texts;
};

/* Appends a text, which lies at *at then. */
static int add_text(struct copies *copies, const char *text, size_t *at)
{
	*at = copies->texts.bytes;
	return base_buffer_append(&copies->texts, text, strlen(text) + 1);
}

static int add(struct copies *copies, const struct tier_entry *entry, struct base_error *error)
{
	struct row row = { .copy.number = entry->drained ? 0 : entry->number };
	struct ring_entry copy;
	char *place;
	int ret = tier_look(copies->tier, entry->path, &copy, error);

	if (!ret)
		ret = tier_bytes_of(copies->tier, entry->path, &copy, &row.copy.bytes, error);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	row.copy.saved_s = copy.modified;
	row.copy.directory = copy.kind == RING_FOLDER;
	place = tier_place(copies->tier, entry->path);
	if (!place || add_text(copies, entry->path, &row.path_at) ||
	    add_text(copies, place, &row.place_at) ||
	    base_buffer_append(&copies->rows, &row, sizeof(row)))
		ret = base_no_memory(error, "a list of copies", copies->texts.bytes);
	free(place);
	return ret;
}

/* Makes the public list, in one piece of memory: the texts follow the rows. */
static int give(const struct copies *copies, struct ioshape_tier_copy **out, size_t *count,
		struct base_error *error)
{
	const size_t rows = copies->rows.bytes / sizeof(struct row);
	const size_t bytes = rows * sizeof(**out) + copies->texts.bytes;
	struct ioshape_tier_copy *made = malloc(MAX(bytes, 1));
	char *texts = (char *)(made + rows);

	if (!made)
		return base_no_memory(error, "a list of copies", bytes);
	*out = made;
	*count = rows;
	if (copies->texts.bytes)
		memcpy(texts, copies->texts.data, copies->texts.bytes);
	for (size_t i = 0; i < rows; i++) {
		struct row row;

		memcpy(&row, copies->rows.data + i * sizeof(row), sizeof(row));
		made[i] = row.copy;
		made[i].path = texts + row.path_at;
		made[i].place = texts + row.place_at;
	}
	return 0;
}

/* Whether something waits for the path of an entry that says that it is drained. */
static bool waits_all_the_same(const struct ioshape_tier *tier, const struct tier_journal *journal,
			       const struct tier_entry *drained)
{
	for (const struct tier_entry *entry = drained; entry-- > journal->all;) {
		if (!entry->drained && !strcmp(entry->path, drained->path))
			return !tier_is_overtaken(tier, journal, entry);
	}
	return false;
}

static bool is_listed(const struct ioshape_tier *tier, const struct tier_journal *journal,
		      const struct tier_entry *entry)
{
	if (!entry->drained)
		return !tier_is_overtaken(tier, journal, entry);
	return tier_is_newest(journal, entry) && !waits_all_the_same(tier, journal, entry);
}

static int list(const struct ioshape_tier *tier, struct ioshape_tier_copy **out, size_t *count,
		struct base_error *error)
{
	struct copies copies = { .tier = tier };
	struct tier_journal journal;
	int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	for (int drained = 0; drained < 2; drained++) {
		for (size_t i = 0; !ret && i < journal.count; i++) {
			const struct tier_entry *entry = &journal.all[i];

			if (entry->drained == drained && is_listed(tier, &journal, entry))
				ret = add(&copies, entry, error);
		}
	}
	if (!ret)
		ret = give(&copies, out, count, error);
	tier_journal_free(&journal);
	base_buffer_free(&copies.texts);
	base_buffer_free(&copies.rows);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_list(struct ioshape_tier *tier, struct ioshape_tier_copy **copies,
				     size_t *count)
{
	struct base_error error = { 0 };
	int ret;

	if (!tier || !copies || !count)
		return base_missing("list");
	*copies = NULL;
	*count = 0;
	ret = save_enter(tier->context, &error);
	if (!ret)
		ret = list(tier, copies, count, &error);
	return base_leave(ret, "list", tier->root.path, &error);
}
