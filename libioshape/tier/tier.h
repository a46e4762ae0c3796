/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the tier floor. Below FOLDER/ioshape-UID, which is the user's own:
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
 */
#ifndef TIER_TIER_H
#define TIER_TIER_H

#include "group/group.h"

#include <ioshape/tier.h>

struct ioshape_tier {
	struct group_tier of_groups;
	struct ioshape_context *context;
	struct ioshape_tier_options options;
	struct ring_folder root, journal;
	char *files; /* path; owned */
};

/* ioshape_tier_keep() for what lies there, if it has not been kept; 0 also if nothing does
 * (tier.c). */
int tier_keep_once(struct group_tier *of_groups, const char *path, uint32_t keep_last,
		   uint64_t keep_every, struct base_error *error);

/* First in every call with a path; *destination is to be freed (tier.c). */
int tier_enter(const struct ioshape_tier *tier, const char *path, char **destination,
	       struct base_error *error);

/* ---- Names and texts (names.c; pure) --------------------------------------------------------- */

struct tier_entry {
	uint64_t number; /* from 1 on */
	bool drained;
	/* Nanoseconds since 1970, if drained: when the copy was modified that was carried, and when
	 * its destination, by that one's clock. */
	int64_t copy_ns, there_ns;
	uint32_t keep_last;
	uint64_t keep_every;
	char *path; /* of the destination; owned */
};

#define TIER_NAME_BYTES 64

void tier_entry_name(char into[TIER_NAME_BYTES], const struct tier_entry *entry);
/* False if it is none of the journal's; sets all but what the text says. */
bool tier_parse_name(const char *name, struct tier_entry *entry);

/* To be freed; NULL without memory. */
char *tier_entry_text(const struct tier_entry *entry);
/* Sets the rest. *path points into the text. False if it is none of the journal's. */
bool tier_parse_text(const char *text, struct tier_entry *entry, const char **path);

/* Whether a path is absolute, and without ".", ".." and empty names: only such a one has a place.
 */
bool tier_is_plain_path(const char *path);

/*
 * What a time of the tier's clock is by that of the destination, which said `there_ns` between two
 * looks at the tier's own: the same, where both may be one clock, which tick with a precision of
 * their own. It is not later than `there_ns`.
 */
int64_t tier_time_there(int64_t time_ns, int64_t before_ns, int64_t there_ns, int64_t after_ns);

/* ---- The journal (journal.c) ----------------------------------------------------------------- */

struct tier_journal {
	struct tier_entry *all; /* by number */
	size_t count;
};

/* Whoever changes the journal, or removes copies, holds its lock. */
int tier_lock(const struct ioshape_tier *tier, struct ring_hold *hold, struct base_error *error);

/* What is not understood is left out, and said to the log. */
int tier_journal_read(const struct ioshape_tier *tier, struct tier_journal *journal,
		      struct base_error *error);
void tier_journal_free(struct tier_journal *journal);

/* The newest entry of a path; NULL if there is none. */
const struct tier_entry *tier_newest(const struct tier_journal *journal, const char *path);
static inline bool tier_is_newest(const struct tier_journal *journal,
				  const struct tier_entry *entry)
{
	return tier_newest(journal, entry->path) == entry;
}
/* Whether an entry that waits need not be drained: a later save to its path waits, or the copy that
 * lies there is the one that a later entry says is drained. An entry that says so of another copy,
 * because it is damaged or forged, loses nothing. */
bool tier_is_overtaken(const struct ioshape_tier *tier, const struct tier_journal *journal,
		       const struct tier_entry *entry);

/* A new entry, durably: its number is given here. */
int tier_journal_add(const struct ioshape_tier *tier, struct tier_entry *entry,
		     struct base_error *error);
/* From now on it is as `now` says, durably; NULL: it is gone. */
int tier_journal_change(const struct ioshape_tier *tier, const struct tier_entry *entry,
			const struct tier_entry *now, struct base_error *error);

/* ---- Links (links.c) ------------------------------------------------------------------------- */

/* Refuse a destination to which another user's link leads, -EPERM. What is not there yet is no
 * link. */
int tier_check_links(const char *destination, struct base_error *error);

/* ---- Copies (copies.c) ----------------------------------------------------------------------- */

/* The destination that a caller's path means: absolute, and links resolved as far as it is there.
 * To be freed. */
int tier_destination(const struct ioshape_tier *tier, const char *path, char **destination,
		     struct base_error *error);
/* Where its copy lies; to be freed. NULL without memory. */
char *tier_place(const struct ioshape_tier *tier, const char *destination);
/* What lies there: -ENOENT without a sentence. */
int tier_look(const struct ioshape_tier *tier, const char *destination, struct ring_entry *copy,
	      struct base_error *error);

/* How many bytes it has; a directory with all in it. */
int tier_bytes_of(const struct ioshape_tier *tier, const char *destination,
		  const struct ring_entry *copy, uint64_t *bytes, struct base_error *error);

/* Removes the copy of a drained entry, if it is still that one, and the entry; nothing, if somebody
 * reads it. The journal is locked. *bytes is what has become free. */
int tier_discard(const struct ioshape_tier *tier, const struct tier_entry *entry, uint64_t *bytes,
		 struct base_error *error);

/* Removes a copy, if it is still the one that was looked at: -EBUSY if somebody reads it, -ENOENT
 * and -ESTALE if it is gone or another; all three without a sentence. The journal is locked. */
int tier_drop(const struct ioshape_tier *tier, const char *destination,
	      const struct ring_entry *copy, struct base_error *error);

/* A directory is not put in the place of another: one that is drained, or was never kept, goes
 * before it is saved again. */
int tier_clear_place(const struct ioshape_tier *tier, const char *destination,
		     struct base_error *error);

/* Makes room for so many bytes that will be saved for this destination (space.c). */
int tier_make_room(const struct ioshape_tier *tier, const char *destination, uint64_t bytes,
		   struct base_error *error);

/* ---- Draining -------------------------------------------------------------------------------- */

/* Of whoever drains, or forgets: -EBUSY, without a sentence, if another does. */
static inline int tier_lock_drain(const struct ioshape_tier *tier, struct ring_hold *hold,
				  struct base_error *error)
{
	return ring_folder_take(&tier->root, "drain.lock", false, hold, error);
}

/* One copy on its way. */
struct tier_carry {
	const struct ioshape_tier *tier;
	const struct ioshape_drain_options *options;
	const struct tier_entry *entry;
	/* The one before it that was drained to the same path; NULL: none is known. */
	const struct tier_entry *before;
	char *place;
	struct ring_entry copy;
	struct ring_original original;
	uint64_t bytes; /* of all its files */
	uint64_t done;  /* of those before the one that is carried now */
	/* Out: how it ended, and its time at the destination. */
	enum ioshape_drained result;
	int64_t there_ns;
};

/* What a time here is by the clock of a destination (carry.c). */
int tier_clock_there(const struct ioshape_tier *tier, const char *destination, int64_t time_ns,
		     int64_t *there_ns, struct base_error *error);

/* -EAGAIN, without a sentence: it was changed meanwhile. */
int tier_carry(struct tier_carry *carry, struct base_error *error);

/* One file (carry_file.c). */
struct tier_file {
	struct tier_carry *carry;
	const char *from, *to; /* paths */
	struct ring_entry copy;
	struct ring_original original;
	bool in_new_directory;
	int64_t there_ns; /* out: its time at the destination */
};

/* As tier_carry(). -EEXIST: what is there is newer. */
int tier_carry_file(struct tier_file *file, struct base_error *error);

/* What it may replace, and the time that it gets; the result says whether there is a newer one
 * (carry.c). */
int tier_look_there(struct tier_carry *carry, struct base_error *error);
void tier_find_newer(struct tier_carry *carry);

#endif
