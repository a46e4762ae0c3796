/* SPDX-License-Identifier: Apache-2.0 */
/* Room for what is to be saved: what has been drained goes, oldest first. */
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- What there is --------------------------------------------------------------------------- */

/* Of what lies on the tier, files that are being written included. */
struct below {
	const struct ring_folder *folder;
	uint64_t bytes;
};

static int add_bytes(void *user, const char *name, struct base_error *error)
{
	struct below *below = user, inner = { .bytes = 0 };
	struct ring_folder folder;
	struct ring_entry entry;
	int ret = ring_folder_look(below->folder, name, &entry, error);

	if (ret)
		return ret == -ENOENT ? 0 : ret;
	if (entry.kind == RING_FILE)
		below->bytes += entry.bytes;
	if (entry.kind != RING_FOLDER ||
	    ring_folder_open_in(&folder, below->folder, name, NULL)) /* gone by now */
		return 0;
	inner.folder = &folder;
	ret = ring_folder_list(&folder, add_bytes, &inner, error);
	ring_folder_close(&folder);
	below->bytes += inner.bytes;
	return ret;
}

int tier_bytes_of(const struct ioshape_tier *tier, const char *destination,
		  const struct ring_entry *copy, uint64_t *bytes, struct base_error *error)
{
	struct ring_folder folder;
	struct below below = { .folder = &folder };
	char *place;
	int ret;

	*bytes = copy->bytes;
	if (copy->kind != RING_FOLDER)
		return 0;
	place = tier_place(tier, destination);
	ret = place ? ring_folder_open(&folder, place, error) :
		      base_no_memory(error, "a path", strlen(destination));
	free(place);
	if (!ret) {
		ret = ring_folder_list(&folder, add_bytes, &below, error);
		ring_folder_close(&folder);
	}
	*bytes = below.bytes;
	return ret;
}

static int count_bytes(const struct ioshape_tier *tier, uint64_t *bytes, struct base_error *error)
{
	struct below below = { .folder = &tier->root };
	const int ret = add_bytes(&below, "files", error);

	*bytes = below.bytes;
	return ret;
}

/* How many bytes have to go. */
static int find_lack(const struct ioshape_tier *tier, uint64_t needed, uint64_t *lack,
		     struct base_error *error)
{
	const uint64_t most = tier->options.most_bytes;
	struct fs_space space;
	uint64_t used = 0;
	int ret = fs_space_of_directory(tier->root.path, &space);

	if (ret)
		return base_fail(error, ret, "cannot look at \"%s\"", tier->root.path);
	*lack = needed > space.free_bytes ? needed - space.free_bytes : 0;
	if (!most)
		return 0;
	ret = count_bytes(tier, &used, error);
	if (__builtin_add_overflow(used, needed, &used))
		used = UINT64_MAX;
	*lack = MAX(*lack, used > most ? used - most : 0);
	return ret;
}

/* ---- What goes ------------------------------------------------------------------------------- */

static bool may_go(const struct tier_journal *journal, const struct tier_entry *entry)
{
	return entry->drained && tier_is_newest(journal, entry);
}

/* Whether enough may go: else nothing does, in vain. */
static int check_enough(const struct ioshape_tier *tier, const char *destination, uint64_t needed,
			uint64_t lack, const struct tier_journal *journal, struct base_error *error)
{
	struct ring_entry copy;
	size_t waiting = 0;
	uint64_t bytes;

	for (size_t i = 0; i < journal->count && lack; i++) {
		const struct tier_entry *entry = &journal->all[i];

		waiting += !entry->drained;
		if (may_go(journal, entry) && !tier_look(tier, entry->path, &copy, NULL) &&
		    !tier_bytes_of(tier, entry->path, &copy, &bytes, NULL))
			lack -= MIN(lack, bytes);
	}
	if (!lack)
		return 0;
	base_refuse(error, -ENOSPC,
		    "cannot save \"%s\" on the tier \"%s\": it needs %s, and what is there waits "
		    "to be drained (%zu saves)" BASE_REMEDY "drain it, or save directly",
		    destination, tier->root.path, BASE_SIZE(needed), waiting);
	base_error_space(error, needed, UINT64_MAX);
	return -ENOSPC;
}

static int free_bytes(const struct ioshape_tier *tier, const char *destination, uint64_t needed,
		      struct base_error *error)
{
	struct tier_journal journal;
	uint64_t lack = 0, bytes;
	int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	ret = find_lack(tier, needed, &lack, error);
	if (!ret)
		ret = check_enough(tier, destination, needed, lack, &journal, error);
	/* Filesystems count late what was removed: so it is counted here. */
	for (size_t i = 0; !ret && lack && i < journal.count; i++) {
		if (!may_go(&journal, &journal.all[i]))
			continue;
		ret = tier_discard(tier, &journal.all[i], &bytes, error);
		lack -= MIN(lack, bytes);
	}
	tier_journal_free(&journal);
	return ret;
}

int tier_make_room(const struct ioshape_tier *tier, const char *destination, uint64_t needed,
		   struct base_error *error)
{
	struct ring_hold hold = RING_NO_HOLD;
	uint64_t lack = 0;
	int ret = find_lack(tier, needed, &lack, error);

	if (ret || !lack)
		return ret;
	ret = tier_lock(tier, &hold, error);
	if (!ret)
		ret = free_bytes(tier, destination, needed, error);
	ring_folder_let_go(&hold);
	return ret;
}
