/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Information about a mount, from the real mount table and client files and from those of the test.
 * The test's files replace those in /proc and /sys.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "fs/fs.h"
#include "support/check_main.h"
#include "support/scratch.h"

static struct fs_storage storage;

/* Writes a file below the test's root, and makes its folders. */
static void put(const char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(const char *text, const char *format, ...)
{
	char name[256], path[1024];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(name, sizeof(name), format, arguments);
	va_end(arguments);
	snprintf(path, sizeof(path), "%s%s", scratch_directory(), name);
	for (char *at = strchr(path + strlen(scratch_directory()) + 1, '/'); at;
	     at = strchr(at + 1, '/')) {
		*at = 0;
		ck_assert(!mkdir(path, 0755) || errno == EEXIST);
		*at = '/';
	}
	scratch_write(path, text, strlen(text));
}

/* Writes a mount table in which the test's directory is on such a mount. */
static void mount_as_number(uint64_t number, const char *type, const char *source,
			    const char *options)
{
	struct stat status;
	char line[1024];

	ck_assert_int_eq(stat(scratch_directory(), &status), 0);
	snprintf(line, sizeof(line),
		 "1 0 0:1 / /other rw - ext4 /dev/other rw\n"
		 "%llu 1 %u:%u / /mnt/a\\040b rw,noatime shared:1 - %s %s %s\n",
		 (unsigned long long)(number & INT32_MAX), major(status.st_dev),
		 minor(status.st_dev), type, source, options);
	put(line, "/proc/self/mountinfo");
}

static uint64_t mount_of_path(const char *path)
{
	struct fs_found found;

	fs_find(path, &found);
	ck_assert_int_eq(found.code, 0);
	return found.mount;
}

static void mount_as(const char *type, const char *source, const char *options)
{
	mount_as_number(mount_of_path(scratch_directory()), type, source, options);
}

static void look(const char *root)
{
	struct base_error error = { 0 };
	int fd = open(scratch_directory(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	memset(&storage, 0xa5, sizeof(storage));
	ck_assert_int_ge(fd, 0);
	ck_assert_msg(!fs_look_at_storage(fd, "here", root, &storage, &error), "%s", error.text);
	close(fd);
}

static void target(const char *place, const char *name, const char *total, const char *available)
{
	put(total, "%s/osc/%s/kbytestotal", place, name);
	put(available, "%s/osc/%s/kbytesavail", place, name);
}

/* ---- Filesystems of any kind ----------------------------------------------------------------- */

static struct test_case cases = { .name = "mounts",
				  .setup = scratch_setup,
				  .teardown = scratch_teardown };

TEST(cases, without_tables_there_is_what_the_kernel_answers)
{
	look(scratch_path("nothing"));
	ck_assert_str_eq(storage.mount.mount_point, "");
	ck_assert_uint_ne(storage.mount.type[0], 0);
	ck_assert_uint_gt(storage.total_bytes, 0);
}

TEST(cases, a_table_without_the_number_of_the_mount_may_have_its_device)
{
	mount_as_number(mount_of_path(scratch_directory()) + 100000, "xfs", "/dev/sdx", "rw");
	look(scratch_directory());
	ck_assert_str_eq(storage.mount.type, "xfs");
	ck_assert_str_eq(storage.mount.source, "/dev/sdx");
}

TEST(cases, what_is_not_open_cannot_be_looked_at)
{
	struct base_error error = { 0 };

	ck_assert_int_eq(fs_look_at_storage(-1, "/some/path", "", &storage, &error), -EBADF);
	ck_assert_int_eq(error.code, -EBADF);
}

/* ---- Lustre ---------------------------------------------------------------------------------- */

TEST(cases, the_client_of_a_lustre_is_read)
{
	static const char place[] = "/sys/fs/lustre";

	mount_as("lustre", "10.0.0.1@o2ib:/scr/home", "rw,flock");
	target(place, "scr-OST0000-osc-ffff8f3a1c2d4800", "1000\n", "400\n");
	target(place, "scr-OST0001-osc-ffff8f3a1c2d4800", "1000\n", "50\n");
	/*
	 * This target on another mount; a target of another filesystem; an inactive target; one
	 * with invalid sizes.
	 */
	target(place, "scr-OST0001-osc-ffff8f3a1c2d5000", "1000\n", "999\n");
	target(place, "scr2-OST0000-osc-ffff8f3a1c2d6000", "1000\n", "400\n");
	put("ffff\n", "%s/osc/scr-OST0002-osc-ffff8f3a1c2d4800/kbytestotal", place);
	target(place, "scr-OST0003-osc-ffff8f3a1c2d4800", "1000\n", "1001\n");
	look(scratch_directory());
	ck_assert_int_eq(storage.family, FS_LUSTRE);
	ck_assert(storage.remote);
	ck_assert_str_eq(storage.mount.type, "lustre");
	ck_assert_str_eq(storage.mount.source, "10.0.0.1@o2ib:/scr/home");
	ck_assert_str_eq(storage.mount.mount_point, "/mnt/a b");
	ck_assert_str_eq(storage.mount.options, "rw,noatime,rw,flock");
	ck_assert_uint_eq(storage.targets, 4);
	ck_assert_uint_eq(storage.target_count, 2);
	for (uint32_t i = 0; i < 2; i++) {
		bool first = !strcmp(storage.target[i].name, "scr-OST0000");

		ck_assert(first || !strcmp(storage.target[i].name, "scr-OST0001"));
		ck_assert_uint_eq(storage.target[i].total_bytes, 1000 * KIB);
		/* From either mount; only one of them is asked for each target. */
		ck_assert(storage.target[i].free_bytes == (first ? 400 : 50) * KIB ||
			  (!first && storage.target[i].free_bytes == 999 * KIB));
	}
	ck_assert_uint_eq(storage.layout.count, 0);
}

TEST(cases, an_old_client_of_a_lustre_is_read)
{
	static const char place[] = "/proc/fs/lustre";

	mount_as("lustre", "mgs@tcp:/scr", "rw");
	target(place, "scr-OST0000-osc-ffff8f3a1c2d4800", "1000", "400");
	look(scratch_directory());
	ck_assert_uint_eq(storage.target_count, 1);
	ck_assert_uint_eq(storage.targets, 1);
}

TEST(cases, numbers_without_sense_are_not_believed)
{
	static const char place[] = "/sys/fs/lustre";
	static const char one[] = "scr-OST0000-osc-ffff8f3a1c2d4800";

	mount_as("lustre", "mgs@tcp:/scr", "rw");
	target(place, one, "99999999999999999999999\n", "1\n");
	look(scratch_directory());
	ck_assert_uint_eq(storage.target_count, 0);
	ck_assert_uint_eq(storage.targets, 1);
}

TEST(cases, more_targets_than_have_room_are_counted)
{
	char name[64];

	mount_as("lustre", "mgs@tcp:/scr", "rw");
	for (unsigned i = 0; i < 70; i++) {
		snprintf(name, sizeof(name), "scr-OST%04x-osc-ffff8f3a1c2d4800", i);
		target("/sys/fs/lustre", name, "1000\n", "400\n");
	}
	look(scratch_directory());
	ck_assert_uint_eq(storage.target_count, 64);
	ck_assert_uint_eq(storage.targets, 70);
}

/* ---- Other filesystems ----------------------------------------------------------------------- */

static const struct {
	const char *type;
	bool remote;
} far[] = { { "fuseblk", false }, { "fuse.sshfs", true }, { "fuse", true }, { "weirdfs", false } };

LOOP_TEST(cases, a_block_device_behind_fuse_is_this_host_s, 0, ARRAY_LENGTH(far))
{
	mount_as(far[_i].type, "somewhere", "rw");
	look(scratch_directory());
	ck_assert_str_eq(storage.mount.type, far[_i].type);
	ck_assert_int_eq(storage.remote, far[_i].remote);
}

TEST(cases, unknown_targets_are_not_counted)
{
	int fd = open(scratch_directory(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	/* Only Lustre answers this ioctl. */
	for (int family = 0; family < FS_FAMILIES; family++)
		ck_assert_uint_eq(fs_count_targets(fd, (enum fs_family)family), 0);
	close(fd);
	ck_assert_uint_eq(fs_count_targets(-1, FS_LUSTRE), 0);
}
