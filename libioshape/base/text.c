/* SPDX-License-Identifier: Apache-2.0 */
/* Texts with foreign names in them, for people. */
#include "base/base.h"

#include <string.h>

/* (Unicode 15, table 3-7.) */
size_t base_utf8_bytes(const char *text, size_t room)
{
	const uint8_t *at = (const uint8_t *)text;
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

/* C0, DEL and C1; what separates lines, changes the direction of writing, or is not seen. */
static bool acts(const char *character, size_t bytes)
{
	const uint8_t *at = (const uint8_t *)character;

	if (bytes == 1)
		return at[0] < 0x20 || at[0] == 0x7f;
	if (bytes == 2)
		return at[0] == 0xc2 && at[1] < 0xa0;
	if (bytes == 3 && at[0] == 0xe2 && at[1] == 0x80) /* U+200B-200F, U+2028-202E */
		return (at[2] >= 0x8b && at[2] <= 0x8f) || (at[2] >= 0xa8 && at[2] <= 0xae);
	if (bytes == 3 && at[0] == 0xe2 && at[1] == 0x81) /* U+2060-206F */
		return at[2] >= 0xa0 && at[2] <= 0xaf;
	return bytes == 3 && !memcmp(at, "\xef\xbb\xbf", 3);
}

void base_make_plain(char *text)
{
	size_t left = strlen(text), bytes;
	char *into = text;

	for (const char *from = text; left; from += bytes, left -= bytes) {
		bytes = base_utf8_bytes(from, left);
		if (bytes && !acts(from, bytes)) {
			memmove(into, from, bytes);
			into += bytes;
		} else {
			*into++ = '?';
			bytes = MAX(bytes, 1);
		}
	}
	*into = 0;
}
