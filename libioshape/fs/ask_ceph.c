/* SPDX-License-Identifier: Apache-2.0 */
/* New files with a layout on CephFS: it can be set for as long as a file is empty. */
#define _GNU_SOURCE
#include "fs/ask.h"
#include "fs/family.h"
#include "fs/text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>

#define CEPH_LAYOUT "ceph.file.layout"
#define CEPH_TEXT_BYTES 256

/* A number above 0. */
static bool find_number(const char *text, size_t bytes, const char *name, uint64_t *number)
{
	return fs_find_number(text, bytes, ' ', name, number) && *number && *number <= UINT32_MAX;
}

int fs_ceph_ask(const struct fs_layout *ask, const char *now, size_t now_bytes, char *text,
		size_t text_bytes)
{
	const struct fs_part *part = &ask->parts[0];
	uint64_t unit, count, object;
	int length;

	if (!find_number(now, now_bytes, "stripe_unit", &unit) ||
	    !find_number(now, now_bytes, "stripe_count", &count) ||
	    !find_number(now, now_bytes, "object_size", &object) || ask->count != 1)
		return -EINVAL;
	if (part->stripe_bytes)
		unit = part->stripe_bytes;
	/* How many there are, clients do not know. */
	if (part->stripe_count && part->stripe_count != FS_ALL_TARGETS)
		count = part->stripe_count;
	/* An object holds whole stripe units. */
	object = (MAX(object, unit) + unit - 1) / unit * unit;
	/* All in one: one after the other, some order or other of them is not valid in between. */
	length = snprintf(text, text_bytes,
			  "stripe_unit=%llu stripe_count=%llu object_size=%llu%s%s",
			  (unsigned long long)unit, (unsigned long long)count,
			  (unsigned long long)object, *part->pool ? " pool=" : "", part->pool);
	return length < 0 || (size_t)length >= text_bytes ? -EINVAL : 0;
}

static void set_ceph_layout(int fd, const struct fs_layout *ask, struct fs_answer *answer)
{
	char now[CEPH_TEXT_BYTES], text[CEPH_TEXT_BYTES];
	ssize_t bytes = fgetxattr(fd, CEPH_LAYOUT, now, sizeof(now));

	if (bytes < 0) {
		fs_refused(answer, "reading " CEPH_LAYOUT);
	} else if (fs_ceph_ask(ask, now, (size_t)bytes, text, sizeof(text))) {
		errno = EINVAL;
		fs_refused(answer, CEPH_LAYOUT " is not understood");
	} else if (fsetxattr(fd, CEPH_LAYOUT, text, strlen(text), 0)) {
		fs_refused(answer, "setting " CEPH_LAYOUT);
	}
}

int fs_ask_ceph(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		struct fs_answer *answer)
{
	int fd = fs_create_plainly(directory_fd, name, mode, 0);

	if (fd < 0)
		return fd;
	answer->plain = true;
	set_ceph_layout(fd, ask, answer);
	fs_ask_for_layout(fd, FS_CEPH, false, &answer->got);
	return fd;
}
