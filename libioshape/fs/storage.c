/* SPDX-License-Identifier: Apache-2.0 */
/* All that can be found out about a mount without writing to it. */
#define _GNU_SOURCE
#include "fs/storage.h"
#include "fs/family.h"
#include "fs/mountinfo.h"
#include "fs/sysfile.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

/* ---- Which one of its family ----------------------------------------------------------------- */

/* The product name is only for reports: no code decides by it. */

/* ---- FSx for Lustre -------------------------------------------------------------------------- */

#define FSX_NAME_BYTES 8

/* Returns 1 if this is a host of Amazon, 0 if not, -1 if the vendor is unknown. */
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

/* Amazon draws names of eight lower-case letters and digits. Sets `typical` if the name also has
 * the letters of all names seen so far, which Amazon does not promise. The oldest kind is always
 * called "fsx". */
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
 * proof. The mount table mostly has an address in its place. Then only host and name remain as
 * evidence, and a self-managed Lustre on Amazon's hosts can look like FSx.
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

/* Names the product, from the other fields of `storage`. */
static void name_variant(const char *root, struct fs_storage *storage)
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

/* ---- All of it ------------------------------------------------------------------------------- */

/* What it cuts files into, by default and as a rule. */
#define JUICEFS_BLOCK (4 * MIB)

static void read_mount(const char *root, const struct statx *status, struct fs_mount *mount)
{
	const unsigned device_major = status->stx_dev_major, device_minor = status->stx_dev_minor;
	const uint64_t number = fs_mount_number(status);
	struct fs_mount found;

	/* Its number is not in the table of another namespace; its device may be. */
	if (!fs_find_mount(root, number, device_major, device_minor, &found) ||
	    (number && !fs_find_mount(root, 0, device_major, device_minor, &found)))
		*mount = found;
}

static bool is_remote(const struct fs_storage *storage)
{
	/* "fuseblk" is none: a block device behind FUSE is this host's. */
	if (storage->family == FS_OTHER || storage->family == FS_FUSE)
		return fs_type_is_shared(storage->mount.type);
	return !fs_is_local(storage->family);
}

/* Disks have it beside themselves; partitions, in the folder above. */
static bool read_rotational(const char *root, unsigned device_major, unsigned device_minor,
			    bool *rotational)
{
	static const char *const above[] = { "", "/.." };
	uint64_t number;
	char path[96];

	for (size_t i = 0; i < ARRAY_LENGTH(above); i++) {
		snprintf(path, sizeof(path), "/sys/dev/block/%u:%u%s/queue/rotational",
			 device_major, device_minor, above[i]);
		if (!fs_read_number(root, path, &number)) {
			*rotational = number;
			return true;
		}
	}
	return false;
}

static void look_at_disk(const char *root, const struct statx *status, struct fs_storage *storage)
{
	unsigned device_major = status->stx_dev_major, device_minor = status->stx_dev_minor;
	struct stat source;

	/* btrfs makes up numbers of devices; the mount table names one of its own. */
	if (!device_major) {
		if (strncmp(storage->mount.source, "/dev/", 5) ||
		    stat(storage->mount.source, &source) || !S_ISBLK(source.st_mode))
			return;
		device_major = major(source.st_rdev);
		device_minor = minor(source.st_rdev);
	}
	storage->rotational_known =
		read_rotational(root, device_major, device_minor, &storage->rotational);
}

static void look_closer(const char *root, const struct statx *status, struct fs_storage *storage)
{
	const struct fs_part *part;
	struct fs_nfs_options nfs;
	const char *name = "";
	size_t bytes;

	switch (storage->family) {
	case FS_LUSTRE:
		bytes = fs_lustre_name(storage->mount.source, &name);
		fs_look_at_lustre(root, name, bytes, storage);
		return;
	case FS_BEEGFS:
		storage->targets = fs_count_beegfs_targets(root, storage->mount.options);
		break;
	case FS_NFS:
		fs_nfs_options(storage->mount.options, strlen(storage->mount.options), &nfs);
		storage->write_unit = nfs.write_bytes;
		return;
	case FS_JUICEFS:
		storage->write_unit = JUICEFS_BLOCK;
		return;
	default:
		break;
	}
	part = fs_layout_main(&storage->layout, 0);
	storage->write_unit = part && part->stripe_bytes ? part->stripe_bytes : status->stx_blksize;
	if (!storage->remote)
		look_at_disk(root, status, storage);
}

int fs_look_at_storage(int directory_fd, const char *path, const char *root,
		       struct fs_storage *storage, struct base_error *error)
{
	struct statx status;
	struct statfs system;
	uint64_t magic;
	int ret;

	memset(storage, 0, sizeof(*storage));
	ret = fs_stat(directory_fd, path, FS_STATX_MOUNT, &status, &system, error);
	if (ret)
		return ret;
	magic = fs_magic(&system);
	storage->total_bytes = (uint64_t)system.f_blocks * (uint64_t)system.f_frsize;
	storage->free_bytes = (uint64_t)system.f_bavail * (uint64_t)system.f_frsize;
	fs_magic_name(magic, storage->mount.type, sizeof(storage->mount.type));
	read_mount(root, &status, &storage->mount);
	storage->family = fs_family_of_open(directory_fd, storage->mount.type, magic);
	storage->remote = is_remote(storage);
	storage->targets = fs_count_targets(directory_fd, storage->family);
	fs_ask_for_layout(directory_fd, storage->family, S_ISDIR(status.stx_mode),
			  &storage->layout);
	look_closer(root, &status, storage);
	name_variant(root, storage);
	return 0;
}
