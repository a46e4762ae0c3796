/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: the pools of a context, and the slots that its saves take. */
#ifndef SAVE_POOLS_H
#define SAVE_POOLS_H

#include "save/file/file.h"

/* Connects to nothing yet. On failure there is nothing to destroy. */
int save_slots_init(struct save_slots *slots, const struct ioshape_context_options *options,
		    const struct base_log *log, struct base_error *error);
/* All slots have been released. */
void save_slots_destroy(struct save_slots *slots);

/* ---- Pools ----------------------------------------------------------------------------------- */

/* The pool of this name (NULL: the context's), or of what the path is on. It lives as long as the
 * context. */
int save_slots_named(struct save_slots *slots, const char *name, struct slots_pool **pool,
		     struct base_error *error);
/* `capacity` receives how many files as the expected one may be written there at a time, by rule,
 * whatever the user said. */
int save_slots_of_path(struct save_slots *slots, const char *path, const struct fs_found *found,
		       const struct save_expected *expected, struct slots_pool **pool,
		       uint32_t *capacity, struct base_error *error);

/* The same where targets are not known. */
uint32_t save_slots_usual(const struct save_slots *slots, enum fs_family family);

/* A file on that mount that asked for nothing has this layout: where directories do not tell. */
void save_slots_note_layout(struct save_slots *slots, uint64_t mount,
			    const struct fs_layout *layout);

#endif
