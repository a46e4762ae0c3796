/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mount table of this process, small texts of the kernel, and which mount a path is on.
 */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* ---- Numbers --------------------------------------------------------------------------------- */

/* Reads a decimal number that ends at `stop`; moves *at behind that. Not sscanf(): it measures all
 * the rest of the text first. */
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

bool fs_whole_number(const char *text, size_t bytes, uint64_t *number)
{
	uint64_t value = 0;

	if (!bytes)
		return false;
	for (size_t i = 0; i < bytes; i++) {
		unsigned digit = (unsigned)(unsigned char)text[i] - '0';

		if (digit > 9 || value > (UINT64_MAX - digit) / 10)
			return false;
		value = value * 10 + digit;
	}
	*number = value;
	return true;
}

/* ---- Small texts ----------------------------------------------------------------------------- */

#define PATH_BYTES 1024

static int open_below(const char *root, const char *path)
{
	char whole[PATH_BYTES];
	int fd;

	if ((size_t)snprintf(whole, sizeof(whole), "%s%s", root, path) >= sizeof(whole))
		return -ENAMETOOLONG;
	fd = base_above_streams(open(whole, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
	return fd < 0 ? -errno : fd;
}

int fs_read_whole(const char *root, const char *path, size_t most, struct base_buffer *text)
{
	int fd = open_below(root, path), ret;
	ssize_t got;

	if (fd < 0)
		return fd;
	do {
		ret = base_buffer_reserve(text, 16 * KIB);
		if (ret)
			break;
		got = read(fd, text->data + text->bytes, text->room - text->bytes - 1);
		if (got > 0)
			text->bytes += (size_t)got;
		else if (got < 0 && !text->bytes)
			ret = -errno;
	} while (got > 0 && text->bytes < most);
	if (text->data)
		text->data[text->bytes] = 0;
	close(fd);
	return ret;
}

int fs_read_line(const char *root, const char *path, char *line, size_t line_bytes)
{
	int fd = open_below(root, path), ret = 0;
	ssize_t got;

	if (fd < 0)
		return fd;
	got = read(fd, line, line_bytes);
	if (got < 0)
		ret = -errno;
	else if (memchr(line, '\n', (size_t)got))
		*(char *)memchr(line, '\n', (size_t)got) = 0;
	else if ((size_t)got < line_bytes)
		line[got] = 0;
	else
		ret = -E2BIG;
	close(fd);
	return ret;
}

int fs_read_number(const char *root, const char *path, uint64_t *number)
{
	char line[32];
	int ret = fs_read_line(root, path, line, sizeof(line));

	if (ret)
		return ret;
	return fs_whole_number(line, strlen(line), number) ? 0 : -EINVAL;
}

/* ---- The mount table ------------------------------------------------------------------------- */

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

	if (!take_number(&at, end, ' ', &id) || !take_number(&at, end, ' ', &parent) ||
	    !take_number(&at, end, ':', &line_major) || !take_number(&at, end, ' ', &line_minor))
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

/* As fs_find_mount(), in the text of /proc/self/mountinfo. Pure. */
static int find_line(const char *mountinfo, uint64_t mount, unsigned device_major,
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

/* Mount tables of big clusters have thousands of lines; lines beyond this are ignored. */
#define MOUNTINFO_BYTES (1 * MIB)

int fs_find_mount(const char *root, uint64_t mount, unsigned device_major, unsigned device_minor,
		  struct fs_mount *found)
{
	struct base_buffer text = { 0 };
	int ret = fs_read_whole(root, "/proc/self/mountinfo", MOUNTINFO_BYTES, &text);

	if (!ret)
		ret = find_line((const char *)text.data, mount, device_major, device_minor, found);
	base_buffer_free(&text);
	return ret;
}

/* Where newer headers have stx_mnt_id: part of the kernel's ABI. */
#define MNT_ID_AT 0x90

uint64_t fs_mount_number(const struct statx *status)
{
	uint64_t mount = 0;

	if (status->stx_mask & FS_STATX_MOUNT)
		memcpy(&mount, (const char *)status + MNT_ID_AT, sizeof(mount));
	return mount;
}

uint64_t fs_unique_mount_number(const struct statx *status)
{
	uint64_t mount = 0;

	if (status->stx_mask & FS_STATX_UNIQUE_MOUNT)
		memcpy(&mount, (const char *)status + MNT_ID_AT, sizeof(mount));
	return mount;
}

/* ---- Which mount a path is on ---------------------------------------------------------------- */

/* The number that no other mount gets, where the kernel has one; that of the mount table, where
 * not. */
static const unsigned wanted = STATX_TYPE | FS_STATX_MOUNT | FS_STATX_UNIQUE_MOUNT;

static int look_at_directory(const char *path, unsigned mask, struct statx *status)
{
	char *directory = base_directory_of(path);
	int ret;

	if (!directory)
		return -ENOMEM;
	ret = statx(AT_FDCWD, directory, 0, mask, status) ? -errno : 0;
	free(directory);
	return ret;
}

int fs_statx_path(const char *path, unsigned mask, struct statx *status)
{
	return statx(AT_FDCWD, path, 0, mask, status) ? look_at_directory(path, mask, status) : 0;
}

static uint64_t mount_of(const struct statx *status)
{
	uint64_t mount = fs_unique_mount_number(status);

	if (!mount)
		mount = fs_mount_number(status);
	/* Not by its device first: two mounts of a server may share one, and have two names. */
	return mount ? mount :
		       UINT64_C(1) << 63 | makedev(status->stx_dev_major, status->stx_dev_minor);
}

static void note_mount(struct fs_found *found, const struct statx *status)
{
	found->mount = mount_of(status);
	found->device_major = status->stx_dev_major;
	found->device_minor = status->stx_dev_minor;
}

void fs_find_directory(const char *path, struct fs_found *found)
{
	struct statx directory;

	memset(found, 0, sizeof(*found));
	found->absent = true;
	found->code = look_at_directory(path, wanted, &directory);
	if (!found->code)
		note_mount(found, &directory);
}

void fs_find(const char *path, struct fs_found *found)
{
	struct statx status;
	bool dangling;

	memset(found, 0, sizeof(*found));
	/* Not behind a link at first: what is absent would be asked for twice. */
	if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, wanted, &status)) {
		found->code = -errno;
	} else if (S_ISLNK(status.stx_mode) && statx(AT_FDCWD, path, 0, wanted, &status)) {
		found->code = -errno;
		found->dangling = errno == ENOENT;
	}
	if (found->code == -ENOENT) {
		dangling = found->dangling;
		fs_find_directory(path, found);
		found->dangling = dangling;
	}
	if (found->code || found->absent)
		return;
	found->regular = S_ISREG(status.stx_mode);
	note_mount(found, &status);
}

int fs_mount_of_path(const char *path, uint64_t *mount)
{
	struct statx status;
	int ret = fs_statx_path(path, wanted, &status);

	if (!ret)
		*mount = mount_of(&status);
	return ret;
}
