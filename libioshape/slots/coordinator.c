/* SPDX-License-Identifier: Apache-2.0 */
/* Which coordinator an address means. */
#include "slots/slots.h"

#include <string.h>

static bool has_scheme(const char *address, const char *scheme)
{
	size_t bytes = strlen(scheme);

	return !strncmp(address, scheme, bytes) && (!address[bytes] || address[bytes] == ':');
}

const struct slots_ops *slots_coordinator_of(const char *address)
{
	static const struct {
		const char *scheme;
		const struct slots_ops *ops;
	} known[] = {
		{ "local", &slots_local },  { "open", &slots_open },      { "redis", &slots_redis },
		{ "rediss", &slots_redis }, { "sentinel", &slots_redis }, { "unix", &slots_redis },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(known); i++) {
		if (has_scheme(address, known[i].scheme))
			return known[i].ops;
	}
	return NULL;
}
