/* SPDX-License-Identifier: Apache-2.0 */
/* Which storage a path shares with others, in one word. */
#define _GNU_SOURCE
#include "fs/family.h"
#include "fs/mountinfo.h"
#include "fs/storage.h"
#include "fs/sysfile.h"
#include "fs/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

/* ---- CephFS ---------------------------------------------------------------------------------- */

/* All clients get one name for a CephFS, although they may list different monitors. */

/* A cluster's id is a UUID as text. */
#define ID_BYTES 36

/* Linux 5.11 and libcephfs 16 answer it. */
#define ID_XATTR "ceph.cluster_fsid"

/* The value of an option with commas before and behind it; its length, or 0. */
static size_t find_option(const char *options, const char *name, const char **value)
{
	const size_t bytes = strlen(name);
	const char *at = options;

	while (*at) {
		if (!strncmp(at, name, bytes) && at[bytes] == '=') {
			*value = at + bytes + 1;
			return strcspn(*value, ",");
		}
		at += strcspn(at, ",");
		at += *at == ',';
	}
	return 0;
}

/* "ID.NAME" in "USER@ID.NAME=/FOLDER", as newer mount commands write it; ID may be missing. */
static bool find_in_source(const char *source, const char **id, size_t *id_bytes, const char **name,
			   size_t *name_bytes)
{
	const char *begin = strchr(source, '@'), *end = begin ? strstr(begin, "=/") : NULL;
	const char *dot = end ? memchr(begin, '.', (size_t)(end - begin)) : NULL;

	if (!dot)
		return false;
	*id = begin + 1;
	*id_bytes = (size_t)(dot - *id);
	*name = dot + 1;
	*name_bytes = (size_t)(end - *name);
	return *id_bytes == 0 || *id_bytes == ID_BYTES;
}

bool fs_ceph_name(const struct fs_mount *mount, const char *cluster_id, char *name,
		  size_t name_bytes)
{
	const char *id = cluster_id, *filesystem = "", *told;
	size_t id_bytes = strlen(cluster_id), bytes = 0, told_bytes;

	if (find_in_source(mount->source, &told, &told_bytes, &filesystem, &bytes)) {
		if (told_bytes) {
			id = told;
			id_bytes = told_bytes;
		}
	} else {
		bytes = find_option(mount->options, "mds_namespace", &filesystem);
	}
	if (id_bytes != ID_BYTES)
		return false;
	snprintf(name, name_bytes, "%.*s%s%.*s", (int)id_bytes, id, bytes ? "." : "", (int)bytes,
		 filesystem);
	return true;
}

/* Replaces type and source of a CephFS mount by "ceph" and that name: the mount table says
 * "ceph-fuse" for every cluster, or lists monitors. Leaves them alone if the id is not known. */
static void name_ceph(const char *directory, struct fs_mount *mount)
{
	char id[ID_BYTES + 1] = "", name[sizeof(mount->source)];
	const ssize_t got = lgetxattr(directory, ID_XATTR, id, ID_BYTES);

	id[got == ID_BYTES ? ID_BYTES : 0] = 0;
	if (!fs_ceph_name(mount, id, name, sizeof(name)))
		return;
	memcpy(mount->source, name, sizeof(name));
	/* The kernel's client and ceph-fuse meet in one pool. */
	snprintf(mount->type, sizeof(mount->type), "ceph");
}

/* ---- Any filesystem -------------------------------------------------------------------------- */

static void make_safe(char *name)
{
	for (; *name; name++) {
		if (!strchr(FS_POOL_CHARACTERS, *name))
			*name = '_';
	}
}

void fs_pool_of_mount(const char *type, const char *source, const char *target_pool,
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

/* What is there, also behind a symbolic link; and what is not will be in its directory. */
static int look(const char *path, unsigned mask, struct statx *status)
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
	int ret = look(path, wanted, &status);

	if (!ret)
		*mount = mount_of(&status);
	return ret;
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
	ret = look(path, STATX_TYPE | FS_STATX_MOUNT, &status);
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
	fs_pool_of_mount(mount.type, mount.source, target_pool, host, name);
	return 0;
}
