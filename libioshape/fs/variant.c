/* SPDX-License-Identifier: Apache-2.0 */
/* Which one of its family a filesystem is, for reports: nothing is decided by it. */
#define _GNU_SOURCE
#include "fs/mountinfo.h"
#include "fs/storage.h"
#include "fs/sysfile.h"

#include <stdio.h>
#include <string.h>

/* ---- FSx for Lustre -------------------------------------------------------------------------- */

#define FSX_NAME_BYTES 8

/* Whether the host says that it is one of Amazon's: 1, 0, or -1 if it does not tell what it is. */
static int is_amazon(const char *root)
{
	char vendor[64];

	if (fs_read_line(root, "/sys/class/dmi/id/sys_vendor", vendor, sizeof(vendor)))
		return -1;
	return !strncmp(vendor, "Amazon", 6);
}

static bool is_lower_or_digit(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

/* Names are drawn for it: eight lower-case letters and digits. `typical`, if it also ends as those
 * that are seen: nobody promises that. The oldest kind is always called "fsx". */
static bool fsx_name(const char *name, size_t bytes, bool *typical)
{
	*typical = bytes == 3 && !memcmp(name, "fsx", 3);
	if (*typical)
		return true;
	for (size_t i = 0; i < bytes; i++) {
		if (!is_lower_or_digit(name[i]))
			return false;
	}
	if (bytes != FSX_NAME_BYTES)
		return false;
	*typical = name[5] == 'b' && name[7] == 'v';
	return true;
}

/*
 * The mount command names "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com@tcp:/NAME", which is
 * proof; the mount table mostly has an address in its place. Then host and name are what there is
 * to go by: a Lustre that somebody runs himself on Amazon's hosts can look the same.
 */
static const char *fsx_variant(const char *root, const char *source)
{
	const char *name;
	size_t bytes = fs_lustre_name(source, &name);
	bool typical;
	int amazon;

	if (strstr(source, ".fsx.") && strstr(source, ".amazonaws.com"))
		return "FSx for Lustre";
	if (!bytes || !fsx_name(name, bytes, &typical) ||
	    (!strstr(source, "@tcp") && !strstr(source, "@efa")))
		return "";
	amazon = is_amazon(root);
	if (amazon > 0)
		return typical ? "FSx for Lustre" : "perhaps FSx for Lustre";
	return amazon < 0 && typical ? "perhaps FSx for Lustre" : "";
}

/* ---- Others ---------------------------------------------------------------------------------- */

/* BeeGFS on demand lives on the disks of a job's own hosts: the mount table knows it only by what
 * its files are called. */
static bool is_beeond(const struct fs_storage *storage)
{
	return strcasestr(storage->mount.source, "beeond") ||
	       strcasestr(storage->mount.options, "beeond") ||
	       strcasestr(storage->mount.mount_point, "beeond");
}

void fs_name_variant(const char *root, struct fs_storage *storage)
{
	const size_t room = sizeof(storage->variant);
	bool in_user_space = !strncmp(storage->mount.type, "fuse", 4);
	struct fs_nfs_options nfs;

	switch (storage->family) {
	case FS_LUSTRE:
		if (in_user_space)
			snprintf(storage->variant, room, "by way of %.20s", storage->mount.type);
		else
			snprintf(storage->variant, room, "%s",
				 fsx_variant(root, storage->mount.source));
		break;
	case FS_BEEGFS:
		snprintf(storage->variant, room, "%s", is_beeond(storage) ? "BeeOND" : "");
		break;
	case FS_CEPH:
		snprintf(storage->variant, room, "%s", in_user_space ? "ceph-fuse" : "");
		break;
	case FS_NFS:
		fs_nfs_options(storage->mount.options, strlen(storage->mount.options), &nfs);
		fs_nfs_text(&nfs, storage->variant, room);
		break;
	case FS_FUSE:
		if (!strncmp(storage->mount.type, "fuse.", 5))
			snprintf(storage->variant, room, "%.31s", storage->mount.type + 5);
		break;
	case FS_OVERLAY:
		snprintf(storage->variant, room, "what lies below is hidden");
		break;
	default:
		break;
	}
}
