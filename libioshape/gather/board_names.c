/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define MOST_RANK_DIGITS 10u /* of 32 bits */

static size_t name_length(const char *name)
{
	return strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-");
}

bool board_is_name(const char *name)
{
	const size_t length = name_length(name);

	return length && !name[length] && length < GATHER_NAME_BYTES;
}

static int bad_name(const char *what, const char *name, struct base_error *error)
{
	(void)name; /* it may hold anything */
	return base_refuse(error, -EINVAL,
			   "a board's %s must have 1 to %d letters of a-z, 0-9 and \"-\"", what,
			   GATHER_NAME_BYTES - 1);
}

int board_check(const char *scope, const char *name, size_t bytes, struct base_error *error)
{
	if (!board_is_name(scope))
		return bad_name("scope", scope, error);
	if (!board_is_name(name))
		return bad_name("note", name, error);
	if (bytes > GATHER_MAX_NOTE_BYTES)
		return base_refuse(error, -E2BIG,
				   "note %s-%s has %zu bytes" BASE_REMEDY
				   "a board takes notes of up to %llu",
				   scope, name, bytes, GATHER_MAX_NOTE_BYTES);
	return 0;
}

int board_check_prefix(const char *scope, const char *prefix, struct base_error *error)
{
	const int ret = board_check(scope, prefix, 0, error);

	if (!ret && strlen(prefix) + 1 + MOST_RANK_DIGITS >= GATHER_NAME_BYTES)
		return base_refuse(error, -EINVAL, "\"%s\" is too long to begin notes' names with",
				   prefix);
	return ret;
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

int board_check_config(const struct gather_board_config *config, struct base_error *error)
{
	if (!board_is_name(config->name))
		return bad_name("name", config->name, error);
	if (config->rank < config->ranks)
		return 0;
	return base_refuse(error, -EINVAL, "there is no rank %" PRIu32 " among %" PRIu32 " ranks",
			   config->rank, config->ranks);
}

void board_sleep_ms(uint32_t ms)
{
	struct timespec left = { .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 };

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}
