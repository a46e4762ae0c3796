/* SPDX-License-Identifier: Apache-2.0 */
#include "support/open_context.h"

#include "internal.h"

#include <string.h>

int open_context_with(struct ioshape_context **out, const struct ioshape_context_options *options,
		      struct test_rules rules)
{
	struct save_test_options all = { .block_bytes = rules.block_bytes,
					 .queue_depth = rules.queue_depth,
					 .lease_ms = rules.lease_ms };
	struct ioshape_context_options given = *options;

	given.size = sizeof(all);
	memcpy(all.options, &given, sizeof(given));
	return ioshape_context_open(out, (const struct ioshape_context_options *)&all);
}
