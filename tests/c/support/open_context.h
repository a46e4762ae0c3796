/* SPDX-License-Identifier: Apache-2.0 */
/* Opens contexts in which a test overrides rules of the library. */
#ifndef SUPPORT_OPEN_CONTEXT_H
#define SUPPORT_OPEN_CONTEXT_H

#include <ioshape/ioshape.h>

/* Values for the rules; 0: the library's rule. See struct save_test_options. */
struct test_rules {
	uint64_t block_bytes;
	uint32_t queue_depth;
	uint32_t lease_ms;
};

/* Opens a context like ioshape_context_open(), with these rules. */
int open_context_with(struct ioshape_context **out, const struct ioshape_context_options *options,
		      struct test_rules rules);

#endif
