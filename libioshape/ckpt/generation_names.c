/* SPDX-License-Identifier: Apache-2.0 */
/* Names in a directory of generations. */
#include "ckpt/generation.h"

#include <stdio.h>
#include <string.h>

#define REPLACED ".replaced-"
#define RANDOM_DIGITS 16u

void ckpt_step_name(char into[CKPT_STEP_NAME_BYTES], uint64_t step)
{
	snprintf(into, CKPT_STEP_NAME_BYTES, "step-%010llu", (unsigned long long)step);
}

/* "step-0000001000" as ckpt_step_name() makes it; returns what follows, or NULL. */
static const char *parse_step(const char *text, uint64_t *step)
{
	char again[CKPT_STEP_NAME_BYTES];
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
	ckpt_step_name(again, *step);
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

struct ckpt_name ckpt_parse_name(const char *name)
{
	const size_t replaced = strlen(REPLACED);
	struct ckpt_name parsed = { .kind = CKPT_NAME_OTHER };
	const char *end;

	if (*name != '.') {
		end = parse_step(name, &parsed.step);
		if (end && !*end)
			parsed.kind = CKPT_NAME_STEP;
	} else if (!strncmp(name, REPLACED, replaced)) {
		end = parse_step(name + replaced, &parsed.step);
		if (end && *end == '.' && is_hex(end + 1, RANDOM_DIGITS) && !end[1 + RANDOM_DIGITS])
			parsed.kind = CKPT_NAME_REPLACED;
	} else {
		end = parse_step(name + 1, &parsed.step);
		if (end && *end == '.' && is_id(end + 1)) {
			parsed.kind = CKPT_NAME_ATTEMPT;
			memcpy(parsed.id, end + 1, sizeof(parsed.id));
		}
	}
	return parsed;
}
