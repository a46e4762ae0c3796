/* SPDX-License-Identifier: Apache-2.0 */
/* A generation that is saved on a tier first: whether it can be, and what makes it last. */
#include "group/group.h"

#include <stdio.h>

static const char *find_reason(const struct group_part *part)
{
	const struct ring_file_options *options = &part->task->file_options;

	if (!part->group->near)
		return "a rank has no tier";
	if (options->no_replace)
		return "what is at its destination is not to be replaced";
	if (options->deadline_ns)
		return "it has a deadline";
	return NULL;
}

/* On all ranks. */
static void note_reason(struct group_part *part)
{
	if (!*part->plan.not_near)
		return;
	ring_note(&part->notes, (enum ioshape_step_code)IOSHAPE_STEP_TIER,
		  "saved directly, not on the tier: %s", part->plan.not_near);
	ring_notes_report(&part->notes, part->report);
}

void group_save_directly(struct group_part *part, const char *why)
{
	part->plan.near = false;
	snprintf(part->plan.not_near, sizeof(part->plan.not_near), "%s", why);
	note_reason(part);
}

uint64_t group_bytes_here(const struct group_part *part)
{
	const struct ioshape_group *group = part->group;
	uint64_t bytes = 0;

	if (!group_is_spread(part))
		return part->plan.total_bytes;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		bytes += group_is_local(group, rank) ? part->plan.bytes[rank] : 0;
	return bytes + group_parity_bytes(group, bytes);
}

void group_choose_place(struct group_part *part)
{
	struct group_tier *tier = group_tier_of(&part->group->options);
	struct group_plan *plan = &part->plan;
	struct base_error failure = { 0 };
	const char *reason;

	if (!tier)
		return;
	reason = find_reason(part);
	plan->near = !reason;
	if (!reason &&
	    tier->ops->make_room(tier, part->task->path, group_bytes_here(part), &failure))
		reason = failure.sentence;
	if (reason)
		group_save_directly(part, reason);
}

void group_take_place(struct group_part *part)
{
	note_reason(part);
}

void group_continue_serials(struct group_part *part, struct group_attempt *attempt)
{
	struct ioshape_group *group = part->group;
	const char *other = part->plan.near ? group->directory : group->near;
	struct ring_folder directory = RING_NO_FOLDER;

	/* Once: the destination may be slow, and whatever is saved there later has the number of
	 * its time. */
	if (other && !group->serials_known && !ring_folder_open(&directory, other, NULL)) {
		group->last_serial = group_last_serial(&directory, &attempt->log);
		ring_folder_close(&directory);
	}
	group->serials_known = true;
	attempt->last_serial = MAX(attempt->last_serial, group->last_serial);
}

int group_keep(const struct group_part *part, struct base_error *error)
{
	const struct ioshape_group_options *options = &part->group->options;
	struct group_tier *tier = group_tier_of(options);

	if (!part->plan.near)
		return 0;
	return tier->ops->keep(tier, part->task->path, options->keep_last, options->keep_every,
			       error);
}
