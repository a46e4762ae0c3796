/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internals of libioshape-tier. A tier is the user's folder FOLDER/ioshape-UID with these entries:
 *
 *     files/<absolute path of the destination>  a copy: an ordinary checkpoint
 *     journal/<number>                          a copy that waits to be drained
 *     journal/<number>-<time>-<time there>      a drained copy: the modification times of the copy
 *                                               and of its destination
 *     lock, drain.lock                          lock files of the journal and of the drain
 *
 * Entries of the journal are symbolic links whose text is "<keep_last> <keep_every> <destination>".
 * No process follows them. A link appears atomically with its text, and its name changes
 * atomically. Numbers increase in the order of the saves.
 *
 * A copy is identified by its path on the tier. The destination is the end
 * of that path.
 */
#ifndef TIER_TIER_H
#define TIER_TIER_H

#include "group/group.h"

#include <ioshape/tier.h>

/* A tier that is open. */
struct ioshape_tier {
	struct group_tier of_groups;
	struct ioshape_context *context;
	struct ioshape_tier_options options;
	struct io_folder root, journal;
	char *files; /* path of "files"; owned */
	size_t files_bytes;
};

/* Returns the destination of a copy: the end of its path on the tier. */
static inline const char *tier_destination(const struct ioshape_tier *tier, const char *copy_path)
{
	return copy_path + tier->files_bytes;
}

/* Functions of the tier that groups call (nodes.c). */
extern const struct group_tier_ops tier_for_groups;

/* ---- The journal (tier.c) -------------------------------------------------------------------- */

/* An entry of the journal. */
struct tier_entry {
	uint64_t number; /* from 1 on */
	bool drained;    /* false: the copy waits to be drained */
	/* For a drained entry: modification times of the copy that was drained, and of its
	 * destination by the clock of that filesystem. Nanoseconds since 1970. */
	int64_t copy_ns, there_ns;
	uint32_t keep_last;
	uint64_t keep_every;
	char *copy_path;  /* path of the copy on the tier; owned */
	const char *path; /* path of the destination: the end of `copy_path` */
};

/* All entries of the journal. */
struct tier_journal {
	struct tier_entry *all; /* sorted by number */
	size_t count;
};

/* Locks the journal. A process must hold the lock to change the journal or to remove copies. */
int tier_lock(const struct ioshape_tier *tier, struct io_hold *hold, struct base_error *error);

/* Reads all entries. Skips names and texts that are no entries, and logs a warning for each. */
int tier_journal_read(const struct ioshape_tier *tier, struct tier_journal *journal,
		      struct base_error *error);
void tier_journal_free(struct tier_journal *journal);

/* Returns the newest entry of a copy, or NULL if there is none. */
const struct tier_entry *tier_newest(const struct tier_journal *journal, const char *copy_path);
/* Returns whether an entry is the newest of its copy. */
static inline bool tier_is_newest(const struct tier_journal *journal,
				  const struct tier_entry *entry)
{
	return tier_newest(journal, entry->copy_path) == entry;
}

/* Changes an entry to `now`, durably, or removes it if `now` is NULL. */
int tier_journal_change(const struct ioshape_tier *tier, const struct tier_entry *entry,
			const struct tier_entry *now, struct base_error *error);

/* ---- Copies (tier.c) ------------------------------------------------------------------------- */

/* Begins a call with a path and returns the path of its copy, which the caller frees. The
 * destination is made absolute, and its links are resolved as far as the path exists. */
int tier_enter(const struct ioshape_tier *tier, const char *path, char **copy_path,
	       struct base_error *error);

/* Fails with -EPERM if a link of another user leads to the destination. Names that do not exist yet
 * are no links. */
int tier_check_links(const char *destination, struct base_error *error);

/* Looks up a copy and adds up its bytes unless `bytes` is NULL; for a directory with everything in
 * it. Returns -ENOENT without an error message if there is no copy. */
int tier_look(const char *copy_path, struct io_entry *copy, uint64_t *bytes,
	      struct base_error *error);

/* Records durably that the copy waits to be drained. With `once`, does nothing if it is already
 * recorded. */
int tier_keep(const struct ioshape_tier *tier, const char *copy_path, uint32_t keep_last,
	      uint64_t keep_every, bool once, struct base_error *error);

/* Converts a time of the tier's clock to the clock of the destination's filesystem. */
int tier_clock_there(const struct ioshape_tier *tier, const char *destination, int64_t time_ns,
		     int64_t *there_ns, struct base_error *error);

/* Frees `bytes` bytes of space, and creates the directory of the copy. */
int tier_prepare(const struct ioshape_tier *tier, const char *copy_path, uint64_t bytes,
		 struct base_error *error);

/* Removes the copy of a drained entry, if it is still the copy that was drained, and the entry.
 * Removes nothing while a process reads the copy. The caller holds the journal's lock. *bytes
 * receives the size of what was removed. */
int tier_discard(const struct ioshape_tier *tier, const struct tier_entry *entry, uint64_t *bytes,
		 struct base_error *error);

/* ---- Drains (drain.c) ------------------------------------------------------------------------ */

/* Takes the lock that allows one drain at a time. Returns -EBUSY without an error message if
 * another process drains or forgets. */
static inline int tier_lock_drain(const struct ioshape_tier *tier, struct io_hold *hold,
				  struct base_error *error)
{
	return io_folder_take(&tier->root, "drain.lock", false, hold, error);
}

#endif
