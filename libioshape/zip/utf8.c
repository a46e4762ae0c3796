/* SPDX-License-Identifier: Apache-2.0 */
#include "zip/zip.h"

#include <string.h>

/*
 * The bytes of the sequence that begins here, 0 if it is not one: no overlong forms, no surrogates,
 * nothing above U+10FFFF, no NUL. (Unicode 15, table 3-7.)
 */
static size_t sequence_bytes(const uint8_t *at, size_t room)
{
	uint8_t lowest = 0x80, highest = 0xbf;
	size_t need;

	if (at[0] < 0x80)
		return at[0] ? 1 : 0;
	if (at[0] < 0xc2 || at[0] > 0xf4)
		return 0;
	need = at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
	if (room < need)
		return 0;
	if (at[0] == 0xe0)
		lowest = 0xa0;
	else if (at[0] == 0xed)
		highest = 0x9f;
	else if (at[0] == 0xf0)
		lowest = 0x90;
	else if (at[0] == 0xf4)
		highest = 0x8f;
	if (at[1] < lowest || at[1] > highest)
		return 0;
	for (size_t i = 2; i < need; i++)
		if ((at[i] & 0xc0) != 0x80)
			return 0;
	return need;
}

bool zip_utf8_valid(const char *text, size_t bytes)
{
	const uint8_t *at = (const uint8_t *)text;

	for (size_t i = 0, step; i < bytes; i += step) {
		step = sequence_bytes(at + i, bytes - i);
		if (!step)
			return false;
	}
	return true;
}

const char *zip_show_name(char into[ZIP_SHOWN_NAME_BYTES], const char *name, size_t bytes)
{
	static const char more[] = "...";
	const uint8_t *from = (const uint8_t *)name;
	size_t used = 0;

	for (size_t i = 0, step; i < bytes; i += step) {
		step = sequence_bytes(from + i, bytes - i);
		if (used + MAX(step, 1) + sizeof(more) > ZIP_SHOWN_NAME_BYTES) {
			memcpy(into + used, more, sizeof(more));
			return into;
		}
		/* C0, DEL and C1 controls could drive the terminal that shows the message. */
		if (!step || from[i] < 0x20 || from[i] == 0x7f ||
		    (from[i] == 0xc2 && from[i + 1] < 0xa0)) {
			into[used++] = '?';
			step = MAX(step, 1);
			continue;
		}
		memcpy(into + used, from + i, step);
		used += step;
	}
	into[used] = '\0';
	return into;
}
