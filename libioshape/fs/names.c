/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const struct {
	uint64_t magic;
	const char *name;
} known[] = {
	{ 0x0bd00bd0, "lustre" },  { 0x19830326, "beegfs" }, { 0x47504653, "gpfs" },
	{ 0x00c36400, "ceph" },    { 0x00006969, "nfs" },    { 0x58465342, "xfs" },
	{ 0x0000ef53, "ext4" },    { 0x9123683e, "btrfs" },  { 0x01021994, "tmpfs" },
	{ 0x794c7630, "overlay" }, { 0x65735546, "fuse" },   { 0x2fc12fc1, "zfs" },
};

void fs_magic_name(uint64_t magic, char *type, size_t type_bytes)
{
	for (size_t i = 0; i < ARRAY_LENGTH(known); i++) {
		if (known[i].magic == magic) {
			snprintf(type, type_bytes, "%s", known[i].name);
			return;
		}
	}
	snprintf(type, type_bytes, "0x%llx", (unsigned long long)magic);
}

/* A decimal number that ends at `stop`; moves *at behind that. sscanf() would measure all the rest
 * of the table. */
static bool take_number(const char **at, const char *end, char stop, unsigned *number)
{
	const char *begin = *at;
	uint64_t value = 0;

	for (; *at < end && **at >= '0' && **at <= '9' && value <= UINT32_MAX; ++*at)
		value = value * 10 + (unsigned)(**at - '0');
	if (*at == begin || *at == end || **at != stop || value > UINT32_MAX)
		return false;
	++*at;
	*number = (unsigned)value;
	return true;
}

/* A word that ends at a space; moves *at behind that. */
static bool take_word(const char **at, const char *end, char *word, size_t word_bytes)
{
	size_t length;

	for (length = 0; *at + length < end && (*at)[length] != ' '; length++)
		;
	if (!length || length >= word_bytes)
		return false;
	memcpy(word, *at, length);
	word[length] = 0;
	*at += MIN(length + 1, (size_t)(end - *at));
	return true;
}

/*
 * A line of mountinfo: "36 35 98:0 /root /mount options [optional ...] - type source
 * super-options". The number of optional fields varies; " - " ends them.
 */
static int line_type(const char *line, const char *end, unsigned device_major,
		     unsigned device_minor, char *type, size_t type_bytes)
{
	unsigned id, parent, line_major, line_minor;
	const char *at = line, *dash;

	if (!take_number(&at, end, ' ', &id) || !take_number(&at, end, ' ', &parent) ||
	    !take_number(&at, end, ':', &line_major) || !take_number(&at, end, ' ', &line_minor))
		return -ENOENT;
	if (line_major != device_major || line_minor != device_minor)
		return -ENOENT;
	dash = memmem(at, (size_t)(end - at), " - ", 3);
	if (!dash)
		return -ENOENT;
	dash += 3;
	return take_word(&dash, end, type, type_bytes) ? 0 : -ENOENT;
}

int fs_mountinfo_type(const char *mountinfo, unsigned device_major, unsigned device_minor,
		      char *type, size_t type_bytes)
{
	const char *line, *end;

	for (line = mountinfo; *line; line = *end ? end + 1 : end) {
		end = strchr(line, '\n');
		if (!end)
			end = line + strlen(line);
		if (!line_type(line, end, device_major, device_minor, type, type_bytes))
			return 0;
	}
	return -ENOENT;
}

static int line_mount(const char *line, const char *end, uint64_t mount, char *type,
		      size_t type_bytes, char *source, size_t source_bytes)
{
	const char *at = line, *dash;
	unsigned id;

	if (!take_number(&at, end, ' ', &id) || id != mount)
		return -ENOENT;
	dash = memmem(at, (size_t)(end - at), " - ", 3);
	if (!dash)
		return -ENOENT;
	dash += 3;
	return take_word(&dash, end, type, type_bytes) &&
			       take_word(&dash, end, source, source_bytes) ?
		       0 :
		       -ENOENT;
}

int fs_mountinfo_mount(const char *mountinfo, uint64_t mount, char *type, size_t type_bytes,
		       char *source, size_t source_bytes)
{
	const char *line, *end;

	for (line = mountinfo; *line; line = *end ? end + 1 : end) {
		end = strchr(line, '\n');
		if (!end)
			end = line + strlen(line);
		if (!line_mount(line, end, mount, type, type_bytes, source, source_bytes))
			return 0;
	}
	return -ENOENT;
}
