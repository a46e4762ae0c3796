/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts with what a test sets in the place of a rule of the library. */
#ifndef SUPPORT_OPEN_CONTEXT_H
#define SUPPORT_OPEN_CONTEXT_H

#include <ioshape/ioshape.h>

/* 0: by rule. See struct save_test_options. */
struct test_rules {
	uint64_t block_bytes;
	uint32_t queue_depth;
	uint32_t lease_ms;
};

/* As ioshape_context_open(). */
int open_context_with(struct ioshape_context **out, const struct ioshape_context_options *options,
		      struct test_rules rules);

#endif
