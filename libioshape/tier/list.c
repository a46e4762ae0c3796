/* SPDX-License-Identifier: Apache-2.0 */
/* What lies on a tier. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct copies {
	const struct ioshape_tier *tier;
	struct base_buffer rows; /* struct ioshape_tier_copy: their texts are offsets into */
	struct base_buffer texts;
};

static const char *offset_of(const struct copies *copies)
{
	return (const char *)(uintptr_t)copies->texts.bytes;
}

static int add_text(struct copies *copies, const char *text)
{
	return base_buffer_append(&copies->texts, text, strlen(text) + 1);
}

static int add(struct copies *copies, const struct tier_entry *entry, struct base_error *error)
{
	struct ioshape_tier_copy row = { .number = entry->drained ? 0 : entry->number };
	struct ring_entry copy;
	char *place;
	int ret = tier_look(copies->tier, entry->path, &copy, error);

	if (!ret)
		ret = tier_bytes_of(copies->tier, entry->path, &copy, &row.bytes, error);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	row.saved_s = copy.modified;
	row.directory = copy.kind == RING_FOLDER;
	place = tier_place(copies->tier, entry->path);
	row.path = offset_of(copies);
	ret = !place || add_text(copies, entry->path);
	row.place = offset_of(copies);
	if (ret || add_text(copies, place) || base_buffer_append(&copies->rows, &row, sizeof(row)))
		ret = base_no_memory(error, "a list of copies", copies->texts.bytes);
	free(place);
	return ret;
}

/* In one piece of memory. */
static int give(const struct copies *copies, struct ioshape_tier_copy **out, size_t *count,
		struct base_error *error)
{
	const size_t bytes = copies->rows.bytes;
	struct ioshape_tier_copy *rows = malloc(MAX(bytes + copies->texts.bytes, 1));
	const char *texts = (const char *)rows + bytes;

	if (!rows)
		return base_no_memory(error, "a list of copies", bytes + copies->texts.bytes);
	*out = rows;
	*count = bytes / sizeof(*rows);
	if (!bytes)
		return 0;
	memcpy(rows, copies->rows.data, bytes);
	memcpy((char *)rows + bytes, copies->texts.data, copies->texts.bytes);
	for (size_t i = 0; i < *count; i++) {
		rows[i].path = texts + (uintptr_t)rows[i].path;
		rows[i].place = texts + (uintptr_t)rows[i].place;
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
