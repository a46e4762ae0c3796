/* SPDX-License-Identifier: Apache-2.0 */
/* Storage of a path: the mount table, magic numbers, and real paths. */
#define _GNU_SOURCE
/* Included, because it tests static functions. */
#include "fs/storage.c"
#include "support/check_main.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static const char table[] =
	"22 28 0:20 / /proc rw,nosuid,nodev,noexec,relatime shared:14 - proc proc rw\n"
	"28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,discard\n"
	"102 28 8:17 /sub /data rw,noatime unbindable - xfs /dev/sdb1 rw\n"
	"104 28 0:48 / /no-newline-at-the-end rw - tmpfs tmpfs rw";

static const char *type_of(const char *text, unsigned device_major, unsigned device_minor)
{
	static struct fs_mount mount;

	return find_line(text, 0, device_major, device_minor, &mount) ? NULL : mount.type;
}

static struct test_case pure = { .name = "mount table and magic" };

TEST(pure, a_device_has_its_own_type)
{
	ck_assert_str_eq(type_of(table, 0, 20), "proc");
	ck_assert_str_eq(type_of(table, 254, 0), "ext4");
	ck_assert_str_eq(type_of(table, 0, 48), "tmpfs");
	ck_assert_ptr_null(type_of(table, 0, 2));
	ck_assert_ptr_null(type_of(table, 254, 1));
	ck_assert_ptr_null(type_of(table, 254, 20));
	ck_assert_ptr_null(type_of(table, 8, 1)); /* a prefix of 8:17 */
	ck_assert_ptr_null(type_of("", 0, 0));
	ck_assert_ptr_null(type_of("\n\n\n", 0, 0));
}

TEST(pure, malformed_lines_are_passed_over)
{
	static const char *const bad[] = {
		"102 28 8:17",
		"102 28 8:17 ",
		"102 28 8:17 /sub /data rw,noatime",
		"102 28 8:17 /sub /data rw,noatime - ",
		"102 28 8:17 /sub /data rw,noatime -",
		"102 28 8:17 /sub /data rw,noatime -xfs /dev/sdb1",
		"102 28 x:17 /sub /data rw - xfs /dev/sdb1 rw",
		"102 28 8 17 /sub /data rw - xfs /dev/sdb1 rw",
		"102 28",
		"102",
		" - xfs",
		"garbage - xfs /dev/sdb1 rw",
		/* Fields of several lines must not be combined. */
		"102\n28 8:17 /sub /data rw - xfs /dev/sdb1 rw",
		"102 28\n8:17 /sub /data rw - xfs /dev/sdb1 rw",
		"102 28 8:17\n/sub /data rw - xfs /dev/sdb1 rw",
		"-",
	};

	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++) {
		char text[512];

		ck_assert_msg(!type_of(bad[i], 8, 17), "%s", bad[i]);
		/* Only the next line counts. */
		snprintf(text, sizeof(text), "%s\n1 2 8:17 / / rw - ext4 /dev/x rw\n", bad[i]);
		ck_assert_msg(type_of(text, 8, 17) && !strcmp(type_of(text, 8, 17), "ext4"), "%s",
			      bad[i]);
		snprintf(text, sizeof(text), "%s\n", bad[i]);
		ck_assert_msg(!type_of(text, 8, 17), "%s", bad[i]);
	}
}

TEST(pure, a_huge_table_is_looked_through_once)
{
	/* Scanning the rest of the table from each line would take minutes. */
	const size_t lines = 200000;
	struct base_buffer text = { 0 };
	char line[128];

	for (size_t i = 0; i < lines; i++) {
		int length = snprintf(line, sizeof(line),
				      "%zu 1 7:%zu / /mnt/%zu rw - squashfs /dev/l rw\n", i, i, i);

		ck_assert_int_eq(base_buffer_append(&text, line, (size_t)length), 0);
	}
	ck_assert_int_eq(base_buffer_append(&text, "", 1), 0);
	ck_assert_str_eq(type_of((const char *)text.data, 7, lines - 1), "squashfs");
	ck_assert_ptr_null(type_of((const char *)text.data, 7, lines));
	base_buffer_free(&text);
}

static void describe_path(const char *path, struct fs_info *info)
{
	struct base_error error = { 0 };
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	ck_assert_int_ge(fd, 0);
	ck_assert_msg(!fs_describe(fd, path, NULL, info, &error), "%s", error.text);
	close(fd);
}

static struct test_case real_case = { .name = "real paths",
				      .setup = scratch_setup,
				      .teardown = scratch_teardown };

TEST(real_case, a_real_file_is_described)
{
	struct statfs system;
	struct fs_info info;

	scratch_write(scratch_path("file"), "abc", 3);
	describe_path(scratch_path("file"), &info);
	ck_assert_int_eq(statfs(scratch_directory(), &system), 0);
	ck_assert_uint_eq(info.magic, (uint64_t)(unsigned long)system.f_type & 0xffffffff);
	ck_assert_uint_ne(info.type[0], 0);
	ck_assert(strncmp(info.type, "0x", 2) != 0);
	ck_assert_uint_gt(info.block_bytes, 0);
	if (info.direct_known && info.direct_works) {
		ck_assert_uint_gt(info.offset_alignment, 0);
		ck_assert_uint_gt(info.memory_alignment, 0);
		ck_assert_uint_eq(info.offset_alignment & (info.offset_alignment - 1), 0);
		ck_assert(scratch_direct());
	}
	describe_path("/proc/self/status", &info);
	ck_assert_str_eq(info.type, "proc");
	ck_assert(!info.direct_known || !info.direct_works);
}

TEST(real_case, a_type_is_remembered_for_its_device_only)
{
	int fd = open(scratch_directory(), O_RDONLY | O_CLOEXEC);
	int proc = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
	struct fs_memory right = { 0 }, memory[4];
	struct fs_info info;
	char type[32];

	ck_assert_int_eq(fs_describe(fd, "first", &right, &info, NULL), 0);
	ck_assert_str_eq(right.type, info.type);
	strcpy(type, right.type);
	strcpy(right.type, "remembered");
	/*
	 * A device number must match completely, and may be reused by another filesystem. Newer
	 * kernels give each mount an ID that is never reused.
	 */
	for (size_t i = 0; i < ARRAY_LENGTH(memory); i++) {
		memory[i] = right;
		memory[i].mount = 0;
	}
	memory[1].device_minor++;
	memory[2].device_major++;
	memory[3].magic++;
	for (size_t i = 0; i < ARRAY_LENGTH(memory); i++) {
		ck_assert_int_eq(fs_describe(fd, "again", &memory[i], &info, NULL), 0);
		ck_assert_str_eq(info.type, i ? type : "remembered");
	}
	ck_assert_int_eq(fs_describe(proc, "other", &right, &info, NULL), 0);
	ck_assert_str_eq(info.type, "proc");
	ck_assert_int_eq(fs_describe(fd, "back", &right, &info, NULL), 0);
	ck_assert_str_eq(info.type, type);
	close(proc);
	close(fd);
}

TEST(real_case, what_is_not_open_cannot_be_described)
{
	struct base_error error = { 0 };
	struct fs_info info;

	ck_assert_int_eq(fs_describe(-1, "/some/path", NULL, &info, &error), -EBADF);
	ck_assert_int_eq(error.code, -EBADF);
}

/* ---- Pools ----------------------------------------------------------------------------------- */

static const struct {
	const char *type, *source, *target_pool, *pool;
} pools[] = {
	/* The name is equal on every host that mounts the storage, by whatever network path. */
	{ "nfs4", "server:/export/home", "", "nfs:server:/export/home" },
	{ "nfs", "server:/export/home", "", "nfs:server:/export/home" },
	{ "lustre", "10.0.0.1@tcp:10.0.0.2@tcp:/fs1", "", "lustre:fs1" },
	{ "lustre", "mgs@o2ib:/fs1", "", "lustre:fs1" },
	/* A mount may show a subdirectory; targets may be in pools. */
	{ "lustre", "mgs@o2ib:/fs1/home/a", "", "lustre:fs1" },
	{ "lustre", "mgs@o2ib:/fs1/home/a", "flash", "lustre:fs1.flash" },
	{ "lustre", "mgs", "", "lustre:mgs" },
	{ "fuse.stripefs", "stripefs", "flash", "fuse.stripefs:stripefs.flash" },
	{ "beegfs", "/etc/beegfs/a.conf", "", "beegfs:/etc/beegfs/a.conf" },
	{ "ceph", "11111111-2222-3333-4444-555555555555", "",
	  "ceph:11111111-2222-3333-4444-555555555555" },
	{ "fuse.juicefs", "JuiceFS:mine", "", "fuse.juicefs:JuiceFS:mine" },
	{ "wekafs", "backend/default", "", "wekafs:backend/default" },
	/* Local storage has the host's name in its pool. */
	{ "ext4", "/dev/root", "", "ext4:/dev/root@host1" },
	{ "tmpfs", "tmpfs", "", "tmpfs:tmpfs@host1" },
	/* Characters with a special meaning elsewhere are replaced. */
	{ "nfs", "a{b}\\040c,d*", "", "nfs:a_b__040c_d_" },
};

LOOP_TEST(pure, a_pool_has_the_name_of_the_storage_that_is_shared, 0, ARRAY_LENGTH(pools))
{
	char name[FS_POOL_BYTES];

	name_mount(pools[_i].type, pools[_i].source, pools[_i].target_pool, "host1", name);
	ck_assert_str_eq(name, pools[_i].pool);
}

static const struct {
	const char *options, *source;
} beegfs_mounts[] = {
	{ "rw,relatime,rw,cfgFile=/etc/beegfs/a.conf", "/etc/beegfs/a.conf" },
	{ "rw,rw,cfgFile=/etc/beegfs/b.conf,_netdev", "/etc/beegfs/b.conf" },
	{ "rw,relatime,rw", "beegfs_nodev" },
	{ "", "beegfs_nodev" },
};

LOOP_TEST(pure, a_beegfs_has_the_name_of_its_configuration_file, 0, ARRAY_LENGTH(beegfs_mounts))
{
	struct fs_mount mount = { .source = "beegfs_nodev" };

	snprintf(mount.options, sizeof(mount.options), "%s", beegfs_mounts[_i].options);
	name_beegfs(&mount);
	ck_assert_str_eq(mount.source, beegfs_mounts[_i].source);
}

TEST(real_case, a_ceph_without_an_id_keeps_its_source)
{
	struct fs_mount mount = { .type = "fuse.ceph-fuse", .source = "ceph-fuse" };

	snprintf(mount.mount_point, sizeof(mount.mount_point), "%s", scratch_directory());
	name_ceph(&mount);
	ck_assert_str_eq(mount.type, "fuse.ceph-fuse");
	ck_assert_str_eq(mount.source, "ceph-fuse");
}

TEST(pure, long_names_are_cut_and_stay_different)
{
	char source[400], first[FS_POOL_BYTES], second[FS_POOL_BYTES];

	memset(source, 'a', sizeof(source));
	source[sizeof(source) - 1] = 0;
	name_mount("nfs", source, "", "host1", first);
	source[sizeof(source) - 2] = 'b';
	name_mount("nfs", source, "", "host1", second);
	ck_assert_uint_eq(strlen(first), FS_POOL_BYTES - 1);
	ck_assert_str_ne(first, second);
}

TEST(real_case, paths_on_one_mount_share_a_pool)
{
	char first[FS_POOL_BYTES], second[FS_POOL_BYTES], elsewhere[FS_POOL_BYTES];
	struct base_error error = { 0 };
	struct fs_found here, other;

	ck_assert_int_eq(fs_pool_of_path(scratch_path("not-there"), first, &error), 0);
	ck_assert_int_eq(fs_pool_of_path(scratch_directory(), second, &error), 0);
	ck_assert_int_eq(fs_pool_of_path("/proc/self", elsewhere, &error), 0);
	ck_assert_str_eq(first, second);
	ck_assert_str_ne(first, elsewhere);
	/* A mount point means the mounted filesystem, and a link its destination. */
	ck_assert_int_eq(fs_pool_of_path("/proc", second, &error), 0);
	ck_assert_str_eq(second, elsewhere);
	ck_assert_int_eq(symlink("/proc/self/status", scratch_path("link")), 0);
	ck_assert_int_eq(fs_pool_of_path(scratch_path("link"), second, &error), 0);
	ck_assert_str_eq(second, elsewhere);
	fs_find(scratch_path("not-there"), &here);
	fs_find("/proc/self", &other);
	ck_assert_int_eq(here.code, 0);
	ck_assert_int_eq(other.code, 0);
	ck_assert_uint_ne(here.mount, other.mount);
	ck_assert_int_eq(fs_pool_of_path(scratch_path("no/folder/x"), first, &error), -ENOENT);
}
