/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ckpt floor: what plans of tensors and of records have in common. Each kind checks what
 * it was given, copies it, and fills in the plan's records; the rest is done for both.
 */
#ifndef CKPT_PLAN_H
#define CKPT_PLAN_H

#include "ckpt/ckpt.h"

/*
 * Names and shapes together. The index or the directory holds them, too, and those have limits of
 * their own, which would be found out only when everything is written.
 */
#define CKPT_MAX_COPY_BYTES (ZIP_MAX_INDEX_BYTES / 2)

/* Memory that was counted first and is then handed out piece by piece. */
struct ckpt_arena {
	uint8_t *next;
};

void *ckpt_hand_out(struct ckpt_arena *arena, const void *from, size_t bytes);

static inline size_t ckpt_room_for(size_t bytes)
{
	return base_round_up(bytes, sizeof(uint64_t));
}

/* Adds what copies of one tensor or record take; IOSHAPE_E_LIMIT where it becomes too much. */
int ckpt_count_copy(size_t *copy_bytes, size_t more, const char *what, struct base_error *error);

/* `count` records, and memory for copies: both are freed with the plan. */
int ckpt_plan_room(struct ckpt_plan *plan, size_t count, size_t copy_bytes,
		   struct ckpt_arena *arena, struct base_error *error);

/* The name of one of the caller's tensors or records. */
typedef const char *(*ckpt_name_fn)(const struct ckpt_payload *payload, size_t i);

/* `code` if two names are the same. */
int ckpt_check_unique(const struct ckpt_plan *plan, const struct ckpt_payload *payload,
		      ckpt_name_fn name, int code, struct base_error *error);

/* plan_tensors.c, plan_records.c. What fails halfway is freed with the plan. */
int ckpt_plan_tensors(struct ckpt_plan *plan, const struct ckpt_payload *payload,
		      struct base_error *error);
int ckpt_plan_records(struct ckpt_plan *plan, const struct ckpt_payload *payload,
		      struct base_error *error);

#endif
