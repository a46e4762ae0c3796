/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/fs.h"

#include <stdio.h>

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
