/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's part in a generation: what writers and senders have in common. */
#include "group/save/part.h"

#include <errno.h>
#include <stdio.h>

/* Parts in a bundle begin on multiples of this where stripes are not known; in small generations of
 * the lesser one. */
#define PART_ALIGNMENT (1 * MIB)
#define SMALL_PART_ALIGNMENT 4096u
#define SMALL_PARTS_BYTES (64 * MIB)

/* What lies between parts is written, too: on average half of this for each. */
#define MOST_PART_ALIGNMENT (16 * MIB)
#define PART_ALIGNMENTS 4u

int group_part_track(void *user, enum ioshape_phase phase, uint64_t done_bytes,
		     uint64_t total_bytes)
{
	struct group_part *part = user;

	part->round.done_bytes = done_bytes;
	group_round_beat(&part->round);
	/* That a file is complete is not the end. */
	part->phase = MAX(part->phase, MIN(phase, IOSHAPE_PHASE_COMMIT));
	return save_track(part->save, part->phase, done_bytes, total_bytes);
}

int group_part_go_on(struct group_part *part, enum ioshape_phase phase, uint64_t done_bytes,
		     uint64_t total_bytes, struct base_error *error)
{
	if (group_part_track(part, phase, done_bytes, total_bytes) || save_is_stopped(part->save))
		return base_refuse(error, -ECANCELED, "the save was stopped");
	return 0;
}

void group_note_written(struct group_note *note, const struct group_written *written,
			const struct base_error *failure)
{
	group_note_error(note, failure);
	group_note_text(note, written->name);
	group_note_number(note, written->bytes);
	group_note_number(note, written->crc32);
	group_note_number(note, written->count);
	for (uint32_t i = 0; i < written->count; i++) {
		group_note_number(note, written->parts[i].rank);
		group_note_number(note, written->parts[i].crc32);
		group_note_number(note, written->parts[i].offset);
		group_note_number(note, written->parts[i].bytes);
	}
}

void group_stream_address(const struct group_part *part, uint32_t writer, char *into,
			  size_t into_bytes)
{
	snprintf(into, into_bytes, "%016llx-%llu-%u", (unsigned long long)part->group->id,
		 (unsigned long long)part->round.number, writer);
}

/* MPI promises tags up to 32767. Other groups may use the same functions. */
uint32_t group_stream_tag(const struct group_part *part)
{
	return (uint32_t)((part->group->id % 16384 + part->round.number) % 16384);
}

/* ---- Where parts begin in bundles ------------------------------------------------------------ */

uint64_t group_part_alignment(uint64_t bytes, uint32_t parts, uint64_t stripe_bytes)
{
	const uint64_t part_bytes = bytes / MAX(parts, 1);
	uint64_t divisor = 1;

	if (bytes < SMALL_PARTS_BYTES)
		return SMALL_PART_ALIGNMENT;
	if (!stripe_bytes || stripe_bytes % SMALL_PART_ALIGNMENT)
		return PART_ALIGNMENT;
	if (stripe_bytes <= PART_ALIGNMENT)
		return (PART_ALIGNMENT + stripe_bytes - 1) / stripe_bytes * stripe_bytes;
	/* All of a stripe, or what divides it. */
	while (stripe_bytes / divisor > PART_ALIGNMENT &&
	       (stripe_bytes % (divisor * SMALL_PART_ALIGNMENT) ||
		stripe_bytes / divisor > MOST_PART_ALIGNMENT ||
		stripe_bytes / divisor > part_bytes / PART_ALIGNMENTS))
		divisor++;
	return stripe_bytes % (divisor * SMALL_PART_ALIGNMENT) ? PART_ALIGNMENT :
								 stripe_bytes / divisor;
}
