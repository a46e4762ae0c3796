/* SPDX-License-Identifier: Apache-2.0 */
/* What entries of the journal are called, what they say, and when things were saved. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void tier_entry_name(char into[TIER_NAME_BYTES], const struct tier_entry *entry)
{
	const int bytes = snprintf(into, TIER_NAME_BYTES, "%020" PRIu64, entry->number);

	if (entry->drained)
		snprintf(into + bytes, TIER_NAME_BYTES - (size_t)bytes, "-%" PRId64 "-%" PRId64,
			 entry->copy_ns, entry->there_ns);
}

bool tier_parse_name(const char *name, struct tier_entry *entry)
{
	char again[TIER_NAME_BYTES], *end;

	*entry = (struct tier_entry){ 0 };
	entry->number = strtoull(name, &end, 10);
	entry->drained = *end == '-';
	if (entry->drained) {
		entry->copy_ns = strtoll(end + 1, &end, 10);
		entry->there_ns = *end == '-' ? strtoll(end + 1, &end, 10) : 0;
	}
	/* Whatever else the calls above would take. */
	tier_entry_name(again, entry);
	return entry->number && !strcmp(name, again);
}

char *tier_entry_text(const struct tier_entry *entry)
{
	char *text;

	return asprintf(&text, "%" PRIu32 " %" PRIu64 " %s", entry->keep_last, entry->keep_every,
			entry->path) < 0 ?
		       NULL :
		       text;
}

/* A number and a blank; what follows, or NULL. */
static const char *parse_number(const char *text, uint64_t most, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	return *text >= '0' && *text <= '9' && !errno && *number <= most && *end == ' ' ? end + 1 :
											  NULL;
}

bool tier_parse_text(const char *text, struct tier_entry *entry, const char **path)
{
	uint64_t keep_last = 0;
	const char *at = parse_number(text, UINT32_MAX, &keep_last);

	if (at)
		at = parse_number(at, UINT64_MAX, &entry->keep_every);
	entry->keep_last = (uint32_t)keep_last;
	*path = at;
	return at && tier_is_plain_path(at);
}

const char *tier_path_of_entry(const char *name, const char *text, int *drained)
{
	struct tier_entry entry;
	const char *path;

	if (!tier_parse_name(name, &entry) || !tier_parse_text(text, &entry, &path))
		return NULL;
	*drained = entry.drained;
	return path;
}

bool tier_is_plain_path(const char *path)
{
	const char *name = path;

	if (*path != '/')
		return false;
	while (*name == '/') {
		const size_t bytes = strcspn(++name, "/");

		if (!bytes || (bytes <= 2 && !strncmp(name, "..", bytes)))
			return false;
		name += bytes;
	}
	return true;
}

/* A clock that counts whole seconds says what it was at the beginning of this one; others tick a
 * hundred times a second or more. */
#define SECOND_NS INT64_C(1000000000)
#define TICK_NS (SECOND_NS / 100)

int64_t tier_time_there(int64_t time_ns, int64_t before_ns, int64_t there_ns, int64_t after_ns)
{
	const int64_t tick_ns = there_ns % SECOND_NS ? TICK_NS : SECOND_NS;
	const bool same = there_ns > before_ns - tick_ns && there_ns < after_ns + TICK_NS;

	if (same)
		return MIN(time_ns, MAX(there_ns, after_ns));
	return MIN(time_ns + there_ns - after_ns, there_ns);
}
