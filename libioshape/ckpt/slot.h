/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the ckpt floor: the pools of a context, and the slots that its saves take. */
#ifndef CKPT_SLOT_H
#define CKPT_SLOT_H

#include "ckpt/ckpt.h"
#include "ckpt/storage.h"

/* First variables, then defaults, then the check; as for the other options of a context. */
int ckpt_slots_environment(struct ioshape_context_options *options, struct base_error *error);
void ckpt_slots_defaults(struct ioshape_context_options *options);
int ckpt_slots_check(const struct ioshape_context_options *options, struct base_error *error);

int ckpt_check_pool_name(const char *name, struct base_error *error);

/* Connects to nothing yet. On failure there is nothing to destroy. */
int ckpt_slots_init(struct ckpt_slots *slots, const struct ioshape_context_options *options,
		    const struct base_log *log, struct base_error *error);
/* All slots have been released. */
void ckpt_slots_destroy(struct ckpt_slots *slots);

/* ---- For save_slot.c and shared_slot.c ------------------------------------------------------- */

/* The pool that a file's writer needs a slot of. False if it needs none, or if there is none to be
 * had, which is noted in the slot. */
bool ckpt_slot_find_pool(struct ckpt_slot *slot, struct ioshape_context *context, const char *path,
			 const struct ring_file_options *options, struct slots_pool **pool,
			 uint32_t *capacity);
/* With a capacity by rule, or 0. */
int ckpt_slot_wait(struct slots_pool *pool, uint32_t capacity, const char *path,
		   const struct ring_file_options *options, const struct ckpt_watch *watch,
		   struct slots_slot **slot, struct base_error *error);

/* ---- Pools ----------------------------------------------------------------------------------- */

/* The pool of this name (NULL: the context's), or of what the path is on. It lives as long as the
 * context. */
int ckpt_slots_named(struct ckpt_slots *slots, const char *name, struct slots_pool **pool,
		     struct base_error *error);
/* `capacity` receives how many files as the expected one may be written there at a time, by rule; 0
 * if there is none for it, or if somebody said how many. */
int ckpt_slots_of_path(struct ckpt_slots *slots, const char *path,
		       const struct ckpt_expected *expected, struct slots_pool **pool,
		       uint32_t *capacity, struct base_error *error);

/* A file there that asked for nothing has this layout: where directories do not tell. */
void ckpt_slots_learn(struct ckpt_slots *slots, const char *path, const struct fs_layout *layout);

/*
 * The same for one call of an operator's, who may look at all pools that there are: one that no
 * save uses is opened for it, and *close tells the caller to close it again.
 */
int ckpt_slots_borrow(struct ckpt_slots *slots, const char *name, struct slots_pool **pool,
		      bool *close, struct base_error *error);

#endif
