/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the ckpt floor: what is to be known of the storage below a directory. */
#ifndef CKPT_STORAGE_H
#define CKPT_STORAGE_H

#include "ckpt/ckpt.h"

/* The file that is to be written. */
struct ckpt_expected {
	const struct fs_wish *wish;
	uint64_t bytes; /* 0 unknown */
	uint32_t files; /* at a time; 0 unknown */
	bool absent;    /* there is nothing at the path */
};

/* Family, targets, and the layout of the directory; zeros where it does not tell. Few
 * system calls, if the memory is of this mount. */
void ckpt_look_at_storage(int directory_fd, const char *directory, struct fs_memory *memory,
			  struct fs_facts *facts);

/* The layout that the file will have (its count is 0 if that is not known), and how many such files
 * may be written at a time; 0 if that is not known. Pure. */
uint32_t ckpt_stripes_of(const struct fs_facts *storage, const struct ckpt_expected *expected,
			 struct fs_layout *layout);

/* What parts of a generation begin on multiples of, in bundles: stripe_bytes may be 0. Pure. */
uint64_t ckpt_part_alignment(uint64_t bytes, uint32_t parts, uint64_t stripe_bytes);

#endif
