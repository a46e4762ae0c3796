/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the zip floor: what those who write a zip, whatever its records are, keep for its
 * directory and put around its records.
 */
#ifndef ZIP_ENTRIES_H
#define ZIP_ENTRIES_H

#include "zip/zip.h"

/* The entries of records that have begun. Zero it to begin. */
struct zip_entries {
	struct zip_entry *list;
	uint64_t count, room;
	struct zip_names *names; /* without the folder; made at the first entry */
};

/* Room for one more; twice as much each time, so that the cost per element stays the same. */
int zip_grow(void **array, uint64_t count, uint64_t *room, size_t element_bytes);

bool zip_entries_have(const struct zip_entries *entries, const char *name);
/* Takes up a record of folder and name, of which nothing is known yet but its place. -ENOMEM, after
 * which the entries can only be freed. */
int zip_entries_add(struct zip_entries *entries, const char *folder, const char *name,
		    const struct zip_place *place);
static inline struct zip_entry *zip_entries_last(const struct zip_entries *entries)
{
	return &entries->list[entries->count - 1];
}
void zip_entries_free(struct zip_entries *entries);

/* Puts the directory of these entries, and with it the end of the zip, behind what the sink has. */
int zip_put_directory(const struct zip_sink *sink, const struct zip_entries *entries,
		      const char *path, struct base_error *error);

#endif
