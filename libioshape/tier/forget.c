/* SPDX-License-Identifier: Apache-2.0 */
/* What waits and can never be drained goes, when somebody says so. */
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Whether anything waits for the path. */
static bool waits(const struct tier_journal *journal, const char *path)
{
	for (size_t i = 0; i < journal->count; i++) {
		if (!journal->all[i].drained && !strcmp(journal->all[i].path, path))
			return true;
	}
	return false;
}

static int sync_above(const struct ioshape_tier *tier, const char *path, struct base_error *error)
{
	char *place = tier_place(tier, path);
	char *above = place ? base_directory_of(place) : NULL;
	struct ring_folder folder;
	int ret = above ? ring_folder_open(&folder, above, error) :
			  base_no_memory(error, "a path", strlen(path));

	if (!ret) {
		ret = ring_folder_sync(&folder, error);
		ring_folder_close(&folder);
	}
	free(above);
	free(place);
	return ret;
}

/* For good: without its entry nobody would know that it was given up. */
static int drop_copy(const struct ioshape_tier *tier, const char *path, uint64_t *bytes,
		     struct base_error *error)
{
	struct ring_entry copy;
	int ret = tier_look(tier, path, &copy, error);

	if (!ret)
		ret = tier_bytes_of(tier, path, &copy, bytes, error);
	if (!ret)
		ret = tier_drop(tier, path, &copy, error);
	if (ret == -EBUSY || ret == -ESTALE)
		base_refuse(error, ret,
			    "cannot forget \"%s\": it is being %s on the tier \"%s\"" BASE_REMEDY
			    "try again when that has ended",
			    path, ret == -EBUSY ? "read" : "saved", tier->root.path);
	if (ret == -ENOENT) /* it was removed by hand */
		return 0;
	return ret ? ret : sync_above(tier, path, error);
}

/* All of them: those before the newest would only be overtaken by it. */
static int drop_entries(const struct ioshape_tier *tier, const struct tier_journal *journal,
			const char *path, struct base_error *error)
{
	int ret = 0;

	for (size_t i = 0; i < journal->count && !ret; i++) {
		if (!strcmp(journal->all[i].path, path))
			ret = tier_journal_change(tier, &journal->all[i], NULL, error);
	}
	return ret;
}

/* With the journal's lock. `given` may be a path whose links lead elsewhere since it was kept. */
static int forget_kept(const struct ioshape_tier *tier, const char *given, const char *destination,
		       uint64_t *bytes, struct base_error *error)
{
	struct tier_journal journal;
	const char *path = destination;
	int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	if (waits(&journal, given))
		path = given;
	else if (!waits(&journal, destination))
		ret = base_refuse(error, -ENOENT,
				  "nothing that was saved for \"%s\" waits on the tier \"%s\"",
				  destination, tier->root.path);
	if (!ret)
		ret = drop_copy(tier, path, bytes, error);
	if (!ret)
		ret = drop_entries(tier, &journal, path, error);
	tier_journal_free(&journal);
	return ret;
}

static int forget(const struct ioshape_tier *tier, const char *given, const char *destination,
		  uint64_t *bytes, struct base_error *error)
{
	struct ring_hold drain = RING_NO_HOLD, hold = RING_NO_HOLD;
	int ret = tier_lock_drain(tier, &drain, error);

	if (ret == -EBUSY)
		base_refuse(error, ret,
			    "cannot forget \"%s\": a process drains the tier \"%s\" now" BASE_REMEDY
			    "end that drain, or try again when it has ended",
			    given, tier->root.path);
	if (!ret)
		ret = tier_lock(tier, &hold, error);
	if (!ret)
		ret = forget_kept(tier, given, destination, bytes, error);
	ring_folder_let_go(&hold);
	ring_folder_let_go(&drain);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_forget(struct ioshape_tier *tier, const char *path, uint64_t *bytes)
{
	struct base_error error = { 0 };
	uint64_t of_copy = 0;
	char *destination;
	int ret;

	if (!tier)
		return base_missing("forget");
	ret = tier_enter(tier, path, &destination, &error);
	if (!ret)
		ret = forget(tier, path, destination, &of_copy, &error);
	free(destination);
	if (bytes)
		*bytes = ret ? 0 : of_copy;
	return base_leave(ret, "forget", path, &error);
}
