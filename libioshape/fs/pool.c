/* SPDX-License-Identifier: Apache-2.0 */
/* Which storage a path shares with others, in one word: the name of its pool of slots. */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Linux 5.11 and libcephfs 16 answer it. */
#define CEPH_ID_XATTR "ceph.cluster_fsid"

/* Replaces type and source of a CephFS mount by "ceph" and that name: the mount table says
 * "ceph-fuse" for every cluster, or lists monitors. Leaves them alone if the id is not known. */
static void name_ceph(const char *directory, struct fs_mount *mount)
{
	char id[FS_CEPH_ID_BYTES + 1] = "", name[sizeof(mount->source)];
	const ssize_t got = lgetxattr(directory, CEPH_ID_XATTR, id, FS_CEPH_ID_BYTES);

	id[got == FS_CEPH_ID_BYTES ? FS_CEPH_ID_BYTES : 0] = 0;
	if (!fs_ceph_name(mount, id, name, sizeof(name)))
		return;
	memcpy(mount->source, name, sizeof(name));
	/* The kernel's client and ceph-fuse meet in one pool. */
	snprintf(mount->type, sizeof(mount->type), "ceph");
}

static void make_safe(char *name)
{
	for (; *name; name++) {
		if (!strchr(FS_POOL_CHARACTERS, *name))
			*name = '_';
	}
}

/* As fs_pool_of_path() makes it from the mount table; `target_pool` is "" if there is none. Made of
 * characters that are safe in names of files and in Redis: no space, no brace. Pure. */
static void name_mount(const char *type, const char *source, const char *target_pool,
		       const char *host, char name[FS_POOL_BYTES])
{
	char whole[64 + sizeof(((struct fs_mount *)0)->source) + FS_TARGET_POOL_BYTES + 64];
	const char *dot = *target_pool ? "." : "";
	const char *part;
	int bytes = (int)strlen(source);

	/* Clients name any of several management servers, and may mount a folder; the name of the
	 * filesystem is what counts. */
	if (!strcmp(type, "lustre") && fs_lustre_name(source, &part)) {
		bytes = (int)fs_lustre_name(source, &part);
		source = part;
	}
	if (!strcmp(type, "nfs4"))
		type = "nfs";
	if (fs_type_is_shared(type))
		snprintf(whole, sizeof(whole), "%s:%.*s%s%s", type, bytes, source, dot,
			 target_pool);
	else
		snprintf(whole, sizeof(whole), "%s:%.*s%s%s@%s", type, bytes, source, dot,
			 target_pool, host);
	make_safe(whole);
	if (strlen(whole) < FS_POOL_BYTES)
		snprintf(name, FS_POOL_BYTES, "%s", whole);
	else
		snprintf(name, FS_POOL_BYTES, "%.*s-%016llx", FS_POOL_BYTES - 18, whole,
			 /* what is cut off makes a difference, too */
			 (unsigned long long)base_hash_text(whole));
}

/* The same for all containers of a host, unlike its name. "" if the kernel does not say. */
static void name_host(char *host, size_t bytes)
{
	if (fs_read_line("", "/proc/sys/kernel/random/boot_id", host, bytes))
		*host = 0;
	host[strcspn(host, "-")] = 0;
}

/* A directory for its own sake, or the one that a file is or will be in. Negative if there is none.
 */
static int open_directory(const char *path)
{
	int fd = base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	char *parent;

	if (fd >= 0)
		return fd;
	parent = base_directory_of(path);
	if (parent)
		fd = base_above_streams(open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	free(parent);
	return fd;
}

/* The pool of targets that new files there lie on, on a Lustre. Disks of another kind are behind
 * another one, and have nothing to wait for here. "" if there is none. */
static void find_target_pool(const char *path, const char *type, char pool[FS_TARGET_POOL_BYTES])
{
	enum fs_family family = fs_family_of(type, 0);
	const struct fs_part *part;
	struct fs_layout layout;
	int fd;

	*pool = 0;
	if (family != FS_LUSTRE && family != FS_FUSE)
		return;
	fd = open_directory(path);
	if (fd < 0)
		return;
	if (fs_family_of_open(fd, type, 0) == FS_LUSTRE &&
	    fs_ask_for_layout(fd, FS_LUSTRE, true, &layout)) {
		part = fs_layout_main(&layout, 0);
		memcpy(pool, part ? part->pool : "", part ? FS_TARGET_POOL_BYTES : 1);
	}
	close(fd);
}

int fs_pool_of_path(const char *path, char name[FS_POOL_BYTES], struct base_error *error)
{
	char host[40], target_pool[FS_TARGET_POOL_BYTES];
	struct fs_mount mount = { .type = "device" };
	struct statx status;
	uint64_t number;
	int ret;

	/* By the number that the mount table has. */
	ret = fs_statx_path(path, STATX_TYPE | FS_STATX_MOUNT, &status);
	if (ret)
		return base_fail(error, ret, "cannot look at the directory of \"%s\"", path);
	number = fs_mount_number(&status);
	/* Without a mount table the device is name enough for this host. */
	snprintf(mount.source, sizeof(mount.source), "%u:%u", status.stx_dev_major,
		 status.stx_dev_minor);
	/* Where the table says only that it is a BeeGFS or a CephFS, the client knows which one. */
	if (number && !fs_find_mount("", number, 0, 0, &mount)) {
		if (fs_family_of(mount.type, 0) == FS_BEEGFS)
			fs_name_beegfs("", mount.options, mount.source, sizeof(mount.source));
		if (fs_family_of(mount.type, 0) == FS_CEPH)
			name_ceph(mount.mount_point, &mount);
	}
	find_target_pool(path, mount.type, target_pool);
	name_host(host, sizeof(host));
	name_mount(mount.type, mount.source, target_pool, host, name);
	return 0;
}
