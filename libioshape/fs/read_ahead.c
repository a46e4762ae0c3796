/* SPDX-License-Identifier: Apache-2.0 */
/* How far the kernel reads ahead by itself, as the machine's owner has set it. */
#include "fs/sysfile.h"

#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

/* By the number of a mount's device; of a disk's partition by the disk. */
static const struct {
	const char *before, *behind;
} places[] = {
	{ "/sys/class/bdi/", "/read_ahead_kb" },
	{ "/sys/dev/block/", "/../queue/read_ahead_kb" },
};

uint64_t fs_read_ahead_bytes(const char *root, unsigned device_major, unsigned device_minor)
{
	uint64_t kib = 0;
	char path[96];

	for (size_t i = 0; i < ARRAY_LENGTH(places); i++) {
		snprintf(path, sizeof(path), "%s%u:%u%s", places[i].before, device_major,
			 device_minor, places[i].behind);
		if (!fs_read_number(root, path, &kib))
			return kib * KIB;
	}
	return 0;
}

uint64_t fs_read_ahead_of(int fd)
{
	struct stat status;

	if (fstat(fd, &status))
		return 0;
	return fs_read_ahead_bytes("", major(status.st_dev), minor(status.st_dev));
}
