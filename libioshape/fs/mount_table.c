/* SPDX-License-Identifier: Apache-2.0 */
/* The text of /proc/self/mountinfo. Pure. */
#define _GNU_SOURCE
#include "fs/mountinfo.h"
#include "fs/text.h"

#include <errno.h>
#include <string.h>

static bool is_octal(char digit)
{
	return digit >= '0' && digit <= '7';
}

/* Up to the next space, "\040" as the byte it stands for; moves *at behind the space. What does not
 * fit is left out. */
static void take_escaped(const char **at, const char *end, char *word, size_t word_bytes)
{
	size_t used = strlen(word);

	while (*at < end && **at != ' ') {
		unsigned char byte = (unsigned char)*(*at)++;

		if (byte == '\\' && end - *at >= 3 && is_octal((*at)[0]) && is_octal((*at)[1]) &&
		    is_octal((*at)[2])) {
			byte = (unsigned char)(((*at)[0] - '0') << 6 | ((*at)[1] - '0') << 3 |
					       ((*at)[2] - '0'));
			*at += 3;
		}
		if (used + 1 < word_bytes && byte)
			word[used++] = (char)byte;
	}
	word[used] = 0;
	if (*at < end)
		++*at;
}

static void add_comma(char *text, size_t text_bytes)
{
	size_t used = strlen(text);

	if (used && used + 1 < text_bytes)
		memcpy(text + used, ",", 2);
}

/*
 * A line of mountinfo: "36 35 98:0 /root /mount options [optional ...] - type source
 * super-options". The number of optional fields varies; " - " ends them.
 */
static bool read_line(const char *line, const char *end, uint64_t mount, unsigned device_major,
		      unsigned device_minor, struct fs_mount *found)
{
	unsigned id, parent, line_major, line_minor;
	const char *at = line, *dash;
	char root[1] = ""; /* is not kept */

	if (!fs_take_number(&at, end, ' ', &id) || !fs_take_number(&at, end, ' ', &parent) ||
	    !fs_take_number(&at, end, ':', &line_major) ||
	    !fs_take_number(&at, end, ' ', &line_minor))
		return false;
	if (mount ? id != mount : line_major != device_major || line_minor != device_minor)
		return false;
	dash = memmem(at, (size_t)(end - at), " - ", 3);
	if (!dash)
		return false;
	memset(found, 0, sizeof(*found));
	take_escaped(&at, dash, root, sizeof(root));
	take_escaped(&at, dash, found->mount_point, sizeof(found->mount_point));
	take_escaped(&at, dash, found->options, sizeof(found->options));
	dash += 3;
	take_escaped(&dash, end, found->type, sizeof(found->type));
	take_escaped(&dash, end, found->source, sizeof(found->source));
	add_comma(found->options, sizeof(found->options));
	take_escaped(&dash, end, found->options, sizeof(found->options));
	return *found->type && *found->mount_point;
}

int fs_mountinfo_line(const char *mountinfo, uint64_t mount, unsigned device_major,
		      unsigned device_minor, struct fs_mount *found)
{
	struct fs_mount candidate;
	const char *line, *end;
	int ret = -ENOENT;

	for (line = mountinfo; *line; line = *end ? end + 1 : end) {
		end = strchrnul(line, '\n');
		if (!read_line(line, end, mount, device_major, device_minor, &candidate))
			continue;
		*found = candidate;
		ret = 0;
		if (mount)
			break;
	}
	return ret;
}

size_t fs_lustre_name(const char *source, const char **name)
{
	/* Servers' names have colons, and never one before a slash. */
	const char *colon = strstr(source, ":/");

	if (!colon)
		return 0;
	*name = colon + 2;
	return strcspn(*name, "/");
}
