/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static size_t name_length(const char *name)
{
	return strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-");
}

bool board_is_name(const char *name)
{
	const size_t length = name_length(name);

	return length && !name[length] && length < GATHER_NAME_BYTES;
}

void board_name_of(char name[GATHER_NAME_BYTES], const char *prefix, uint32_t rank)
{
	/* Prefixes are checked: it always fits. */
	snprintf(name, GATHER_NAME_BYTES, "%.52s-%" PRIu32, prefix, rank);
}

uint64_t board_hash(const char *scope, const char *name)
{
	char key[BOARD_KEY_BYTES];

	snprintf(key, sizeof(key), "%s/%s", scope, name);
	return base_hash_text(key);
}

uint64_t board_hash_family(const char *name)
{
	const char *dash = strrchr(name, '-');
	char family[GATHER_NAME_BYTES];

	snprintf(family, sizeof(family), "%.*s",
		 (int)(dash ? dash - name : (ptrdiff_t)strlen(name)), name);
	return base_hash_text(family);
}

void board_sleep_ms(uint32_t ms)
{
	struct timespec left = { .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 };

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}
