/* SPDX-License-Identifier: Apache-2.0 */
/* Which CephFS a mount is: the same name for all clients, however they name their monitors. */
#define _GNU_SOURCE
#include "fs/storage.h"

#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>

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

void fs_name_ceph(const char *directory, struct fs_mount *mount)
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
