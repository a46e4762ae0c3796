/* SPDX-License-Identifier: Apache-2.0 */
/* Names in a directory of generations. */
#include "group/generation/generation.h"

#include <stdio.h>
#include <string.h>

static const char *const aside_words[] = {
	[GROUP_NAME_REPLACED] = ".replaced-",
	[GROUP_NAME_PRUNED] = ".pruned-",
};

static const char drained_word[] = ".drained-";

#define RANDOM_DIGITS 16u

void group_step_name(char into[GROUP_STEP_NAME_BYTES], uint64_t step)
{
	snprintf(into, GROUP_STEP_NAME_BYTES, "step-%010llu", (unsigned long long)step);
}

/* "step-0000001000" as group_step_name() makes it; returns what follows, or NULL. */
static const char *parse_step(const char *text, uint64_t *step)
{
	char again[GROUP_STEP_NAME_BYTES];
	size_t digits;

	if (strncmp(text, "step-", 5))
		return NULL;
	digits = strspn(text + 5, "0123456789");
	if (digits < 10 || digits > 20)
		return NULL;
	*step = 0;
	for (size_t i = 0; i < digits; i++)
		*step = *step * 10 + (uint64_t)(text[5 + i] - '0');
	/* Too large, or with a 0 too many. */
	group_step_name(again, *step);
	return strlen(again) == 5 + digits && !strncmp(text, again, 5 + digits) ?
		       text + 5 + digits :
		       NULL;
}

static bool is_hex(const char *text, size_t digits)
{
	return strspn(text, "0123456789abcdef") == digits;
}

static bool is_id(const char *text)
{
	return is_hex(text, 8) && text[8] == '-' && is_hex(text + 9, 8) && text[17] == '-' &&
	       is_hex(text + 18, RANDOM_DIGITS) && !text[18 + RANDOM_DIGITS];
}

/* "step-0000001000.<random>" */
static bool parse_aside(const char *text, uint64_t *step)
{
	const char *end = parse_step(text, step);

	return end && *end == '.' && is_hex(end + 1, RANDOM_DIGITS) && !end[1 + RANDOM_DIGITS];
}

struct group_name group_parse_name(const char *name)
{
	struct group_name parsed = { .kind = GROUP_NAME_OTHER };
	const char *end;

	if (*name != '.') {
		end = parse_step(name, &parsed.step);
		if (end && !*end)
			parsed.kind = GROUP_NAME_STEP;
		return parsed;
	}
	for (enum group_name_kind kind = GROUP_NAME_REPLACED; kind <= GROUP_NAME_PRUNED; kind++) {
		const size_t bytes = strlen(aside_words[kind]);

		if (!strncmp(name, aside_words[kind], bytes) &&
		    parse_aside(name + bytes, &parsed.step))
			parsed.kind = kind;
	}
	if (parsed.kind == GROUP_NAME_OTHER) {
		const bool drained = !strncmp(name, drained_word, strlen(drained_word));

		end = parse_step(name + (drained ? strlen(drained_word) : 1), &parsed.step);
		if (end && *end == '.' && is_id(end + 1)) {
			parsed.kind = drained ? GROUP_NAME_DRAINED : GROUP_NAME_ATTEMPT;
			memcpy(parsed.id, end + 1, sizeof(parsed.id));
		}
	}
	return parsed;
}

void group_drained_name(char into[GROUP_ATTEMPT_NAME_BYTES], uint64_t step, const char *id)
{
	char place[GROUP_STEP_NAME_BYTES];

	group_step_name(place, step);
	snprintf(into, GROUP_ATTEMPT_NAME_BYTES, "%s%s.%s", drained_word, place, id);
}

void group_aside_name(char into[GROUP_ATTEMPT_NAME_BYTES], enum group_name_kind kind, uint64_t step,
		      uint64_t number)
{
	char place[GROUP_STEP_NAME_BYTES];

	group_step_name(place, step);
	snprintf(into, GROUP_ATTEMPT_NAME_BYTES, "%s%s.%016llx", aside_words[kind], place,
		 (unsigned long long)number);
}

void group_parity_name(char into[GROUP_PARITY_NAME_BYTES], uint32_t node)
{
	snprintf(into, GROUP_PARITY_NAME_BYTES, "node-%05u.parity", node);
}

bool group_parse_parity_name(const char *name, uint32_t *node)
{
	char again[GROUP_PARITY_NAME_BYTES];
	unsigned number;

	if (sscanf(name, "node-%u.parity", &number) != 1)
		return false;
	*node = number;
	group_parity_name(again, number);
	return !strcmp(again, name);
}
