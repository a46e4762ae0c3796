/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the space of each target as a real client shows it in /sys/fs/lustre and in debugfs. The
 * folders are sys/ and debug/ in the backing folder, and are updated a moment after each change.
 */
#include "stripefs.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { SOON_NS = 20 * 1000 * 1000 };

static const char *root;
static char name[64]; /* of the filesystem */
static bool to_come;

static void make_folders(char *path)
{
	for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
		*at = '\0';
		mkdir(path, 0755);
		*at = '/';
	}
}

__attribute__((format(printf, 2, 3))) static void put(const char *path, const char *format, ...)
{
	char whole[4096], fresh[4104];
	va_list arguments;
	FILE *file;

	snprintf(whole, sizeof(whole), "%s/%s", root, path);
	snprintf(fresh, sizeof(fresh), "%s.new", whole);
	make_folders(whole);
	file = fopen(fresh, "we");
	if (!file)
		return;
	va_start(arguments, format);
	vfprintf(file, format, arguments);
	va_end(arguments);
	/* The rename keeps readers from seeing half a number. */
	if (!fclose(file))
		rename(fresh, whole);
}

static void put_sizes(const char *folder, uint64_t total, uint64_t free)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/kbytestotal", folder);
	put(path, "%ju\n", total / 1024);
	snprintf(path, sizeof(path), "%s/kbytesfree", folder);
	put(path, "%ju\n", free / 1024);
	snprintf(path, sizeof(path), "%s/kbytesavail", folder);
	put(path, "%ju\n", free / 1024);
}

static void put_all(void *unused)
{
	uint64_t total = 0, free = 0;
	char folder[160];

	(void)unused;
	to_come = false;
	for (unsigned int i = 0; i < options.targets; i++) {
		snprintf(folder, sizeof(folder),
			 "sys/fs/lustre/osc/%s-OST%04x-osc-ffff888100000000", name, i);
		put_sizes(folder, targets[i].capacity_bytes, target_free(&targets[i]));
		total += targets[i].capacity_bytes;
		free += target_free(&targets[i]);
	}
	snprintf(folder, sizeof(folder), "sys/fs/lustre/llite/%s-ffff888100000000", name);
	put_sizes(folder, total, free);
}

void sysfs_renew(void)
{
	if (to_come || options.play != PLAY_LUSTRE)
		return;
	to_come = true;
	model_later(now_ns() + SOON_NS, put_all, NULL);
}

void sysfs_open(const char *folder)
{
	const char *last = strrchr(options.fsname, '/');
	char path[200];

	if (options.play != PLAY_LUSTRE)
		return;
	root = folder;
	snprintf(name, sizeof(name), "%s", last ? last + 1 : options.fsname);
	for (unsigned int i = 0; i < options.targets; i++) {
		snprintf(path, sizeof(path),
			 "debug/lustre/osc/%s-OST%04x-osc-ffff888100000000/ost_server_uuid", name,
			 i);
		put(path, "%s-OST%04x_UUID\tFULL\n", name, i);
		snprintf(path, sizeof(path),
			 "sys/fs/lustre/osc/%s-OST%04x-osc-ffff888100000000/uuid", name, i);
		put(path, "%s-OST%04x_UUID\n", name, i);
	}
	put_all(NULL);
}
