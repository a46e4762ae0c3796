/* SPDX-License-Identifier: Apache-2.0 */
/* What the stripes of files have to do with how many write at a time, and with where parts begin.
 */
#include "ckpt/storage.h"

#include <string.h>

/* Parts in a bundle begin on multiples of this where stripes are not known; in small generations of
 * the lesser one. */
#define PART_ALIGNMENT (1 * MIB)
#define SMALL_PART_ALIGNMENT 4096u
#define SMALL_PARTS_BYTES (64 * MIB)

/* What lies between parts is written, too: on average half of this for each. */
#define MOST_PART_ALIGNMENT (16 * MIB)
#define PART_ALIGNMENTS 4u

void ckpt_look_at_storage(int directory_fd, const char *directory, struct fs_memory *memory,
			  struct fs_facts *facts)
{
	struct fs_info info;

	memset(facts, 0, sizeof(*facts));
	if (fs_describe(directory_fd, directory, memory, &info, NULL))
		return;
	facts->family = info.family;
	facts->directory = info.layout;
	if (fs_takes_layouts(info.family))
		facts->targets = fs_remembered_targets(directory_fd, memory);
}

uint32_t ckpt_stripes_of(const struct fs_facts *storage, const struct ckpt_expected *expected,
			 struct fs_layout *layout)
{
	struct fs_facts facts = *storage;

	facts.file_bytes = expected->bytes;
	facts.writers = expected->files;
	if (fs_choose_layout(expected->wish, &facts, layout, NULL, 0) <= 0)
		*layout = facts.directory;
	return fs_capacity(facts.targets, layout, facts.file_bytes);
}

uint64_t ckpt_part_alignment(uint64_t bytes, uint32_t parts, uint64_t stripe_bytes)
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
