/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside libioshape-tier. Below FOLDER/ioshape-UID, which is the user's own:
 *
 *   files/<absolute path of the destination>  a copy: an ordinary checkpoint
 *   journal/<number>                          it waits to be drained
 *   journal/<number>-<time>-<time there>      the copy of that time is drained, and has the other
 *                                             time at its destination
 *   lock, drain.lock                          of the journal, and of whoever drains
 *
 * Entries of the journal are symbolic links, which nobody follows: "<keep_last> <keep_every>
 * <destination>". A link appears whole, and its name changes in one step. Numbers rise in the order
 * of the saves.
 *
 * A copy is called by its place, the path that it has on the tier. The destination is the end of
 * that path.
 */
#ifndef TIER_TIER_H
#define TIER_TIER_H

#include "group/group.h"

#include <ioshape/tier.h>

struct ioshape_tier {
	struct group_tier of_groups;
	struct ioshape_context *context;
	struct ioshape_tier_options options;
	struct io_folder root, journal;
	char *files; /* path; owned */
	size_t files_bytes;
};

static inline const char *tier_destination(const struct ioshape_tier *tier, const char *place)
{
	return place + tier->files_bytes;
}

/* What groups ask of it (nodes.c). */
extern const struct group_tier_ops tier_for_groups;

/* ---- The journal (tier.c) -------------------------------------------------------------------- */

struct tier_entry {
	uint64_t number; /* from 1 on */
	bool drained;
	/* Nanoseconds since 1970, if drained: when the copy was modified that was carried, and when
	 * its destination, by that one's clock. */
	int64_t copy_ns, there_ns;
	uint32_t keep_last;
	uint64_t keep_every;
	char *place;      /* of the copy; owned */
	const char *path; /* of the destination: the end of `place` */
};

struct tier_journal {
	struct tier_entry *all; /* by number */
	size_t count;
};

/* Locks the journal: whoever changes it, or removes copies, holds this lock. */
int tier_lock(const struct ioshape_tier *tier, struct io_hold *hold, struct base_error *error);

/* Reads all entries. What is not understood is left out, and said to the log. */
int tier_journal_read(const struct ioshape_tier *tier, struct tier_journal *journal,
		      struct base_error *error);
void tier_journal_free(struct tier_journal *journal);

/* The newest entry of a copy; NULL if there is none. */
const struct tier_entry *tier_newest(const struct tier_journal *journal, const char *place);
static inline bool tier_is_newest(const struct tier_journal *journal,
				  const struct tier_entry *entry)
{
	return tier_newest(journal, entry->place) == entry;
}

/* Makes an entry say what `now` says, durably; NULL: removes it. */
int tier_journal_change(const struct ioshape_tier *tier, const struct tier_entry *entry,
			const struct tier_entry *now, struct base_error *error);

/* ---- Copies (tier.c) ----------------------------------------------------------------------- */

/* Begins every call with a path: finds the place of its copy. The destination is absolute, and its
 * links are resolved as far as it is there. *place is to be freed. */
int tier_enter(const struct ioshape_tier *tier, const char *path, char **place,
	       struct base_error *error);

/* Refuses a destination to which another user's link leads, -EPERM. What is not there yet is no
 * link. */
int tier_check_links(const char *destination, struct base_error *error);

/* Looks at a copy, and counts its bytes unless `bytes` is NULL; those of a directory with all in
 * it. -ENOENT without a sentence. */
int tier_look(const char *place, struct io_entry *copy, uint64_t *bytes, struct base_error *error);

/* Notes that what lies there is to be drained; `once`: unless it has been kept. */
int tier_keep(const struct ioshape_tier *tier, const char *place, uint32_t keep_last,
	      uint64_t keep_every, bool once, struct base_error *error);

/* What a time here is by the clock of a destination. */
int tier_clock_there(const struct ioshape_tier *tier, const char *destination, int64_t time_ns,
		     int64_t *there_ns, struct base_error *error);

/* Makes room for so many bytes, and the directory of the place. */
int tier_prepare_place(const struct ioshape_tier *tier, const char *place, uint64_t bytes,
		       struct base_error *error);

/* Removes the copy of a drained entry, if it is still that one, and the entry; nothing, if somebody
 * reads it. The journal is locked. *bytes is what has become free. */
int tier_discard(const struct ioshape_tier *tier, const struct tier_entry *entry, uint64_t *bytes,
		 struct base_error *error);

/* ---- Drains (drain.c) --------------------------------------------------------------- */

/* Locks out other drains: -EBUSY, without a sentence, if another process drains, or forgets. */
static inline int tier_lock_drain(const struct ioshape_tier *tier, struct io_hold *hold,
				  struct base_error *error)
{
	return io_folder_take(&tier->root, "drain.lock", false, hold, error);
}

#endif
