/* SPDX-License-Identifier: Apache-2.0 */
/* What a path sits on: the mount table, magic numbers, and real paths. */
#define _GNU_SOURCE
#include "fs/fs.h"
#include "support/check_main.h"
#include "support/random.h"
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
	"99 28 0:45 / /mnt/with\\040a\\040space\\040-\\040and\\040dash rw shared:1 master:2 - "
	"fuse.sshfs "
	"user@host:/x\\040y rw,user_id=0\n"
	"101 28 0:46 / /home rw - nfs4 server:/export/home rw,vers=4.2,wsize=1048576\n"
	"102 28 8:17 /sub /data rw,noatime unbindable - xfs /dev/sdb1 rw\n"
	"103 28 0:47 / /lustre rw,flock - lustre mgs@o2ib:/fs1 rw\n"
	"104 28 0:48 / /no-newline-at-the-end rw - tmpfs tmpfs rw";

static const char *type_of(const char *text, unsigned device_major, unsigned device_minor)
{
	static char type[32];

	strcpy(type, "untouched");
	return fs_mountinfo_type(text, device_major, device_minor, type, sizeof(type)) ? NULL :
											 type;
}

START_TEST(the_type_of_each_device_is_found)
{
	ck_assert_str_eq(type_of(table, 0, 20), "proc");
	ck_assert_str_eq(type_of(table, 254, 0), "ext4");
	ck_assert_str_eq(type_of(table, 0, 45), "fuse.sshfs");
	ck_assert_str_eq(type_of(table, 0, 46), "nfs4");
	ck_assert_str_eq(type_of(table, 8, 17), "xfs");
	ck_assert_str_eq(type_of(table, 0, 47), "lustre");
	ck_assert_str_eq(type_of(table, 0, 48), "tmpfs");
}
END_TEST

START_TEST(a_device_that_is_not_mounted_has_no_type)
{
	ck_assert_ptr_null(type_of(table, 0, 2));
	ck_assert_ptr_null(type_of(table, 254, 1));
	ck_assert_ptr_null(type_of(table, 8, 0));
	ck_assert_ptr_null(type_of(table, 254, 20));
	ck_assert_ptr_null(type_of(table, 8, 1)); /* a beginning of 8:17 */
	ck_assert_ptr_null(type_of("", 0, 0));
	ck_assert_ptr_null(type_of("\n\n\n", 0, 0));
}
END_TEST

START_TEST(malformed_lines_are_passed_over)
{
	static const char *const bad[] = {
		"102 28 8:17",
		"102 28 8:17 ",
		"102 28 8:17 /sub /data rw,noatime",
		"102 28 8:17 /sub /data rw,noatime - ",
		"102 28 8:17 /sub /data rw,noatime -",
		"102 28 8:17 /sub /data rw,noatime -xfs /dev/sdb1",
		"102 28 8:17 /sub /data rw - a-type-with-a-name-longer-than-any-that-there-is d rw",
		"102 28 x:17 /sub /data rw - xfs /dev/sdb1 rw",
		"102 28 8 17 /sub /data rw - xfs /dev/sdb1 rw",
		"102 28",
		"102",
		" - xfs",
		"garbage - xfs /dev/sdb1 rw",
		"-",
	};

	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++) {
		char text[512];

		ck_assert_msg(!type_of(bad[i], 8, 17), "%s", bad[i]);
		/* The next line counts, and only by itself. */
		snprintf(text, sizeof(text), "%s\n1 2 8:17 / / rw - ext4 /dev/x rw\n", bad[i]);
		ck_assert_msg(type_of(text, 8, 17) && !strcmp(type_of(text, 8, 17), "ext4"), "%s",
			      bad[i]);
		snprintf(text, sizeof(text), "%s\n", bad[i]);
		ck_assert_msg(!type_of(text, 8, 17), "%s", bad[i]);
	}
}
END_TEST

START_TEST(fields_do_not_come_together_from_several_lines)
{
	ck_assert_ptr_null(type_of("102\n28 8:17 /sub /data rw - xfs /dev/sdb1 rw\n", 8, 17));
	ck_assert_ptr_null(type_of("102 28\n8:17 /sub /data rw - xfs /dev/sdb1 rw\n", 8, 17));
	ck_assert_ptr_null(type_of("102 28 8:17\n/sub /data rw - xfs /dev/sdb1 rw\n", 8, 17));
}
END_TEST

START_TEST(a_short_buffer_for_the_type_is_not_overrun)
{
	char type[6] = "abcde";

	/* "ext4" and its end fit; "fuse.sshfs" does not, and is left to the magic number. */
	ck_assert_int_eq(fs_mountinfo_type(table, 254, 0, type, 5), 0);
	ck_assert_str_eq(type, "ext4");
	ck_assert_int_eq(fs_mountinfo_type(table, 254, 0, type, 4), -ENOENT);
	ck_assert_int_eq(fs_mountinfo_type(table, 0, 45, type, sizeof(type)), -ENOENT);
	ck_assert_str_eq(type, "ext4");
}
END_TEST

START_TEST(a_huge_table_is_looked_through_once)
{
	/* To look at all the rest of the table from every line would take minutes. */
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
END_TEST

START_TEST(any_text_at_all_is_survived)
{
	static const char letters[] = "0123456789:  -/\n\nabc\\040,\t";
	uint64_t state = 6;

	for (int i = 0; i < 3000; i++) {
		size_t length = test_random_below(&state, 200);
		char *text = malloc(length + 1);

		for (size_t at = 0; at < length; at++)
			text[at] = letters[test_random_below(&state, sizeof(letters) - 1)];
		text[length] = 0;
		type_of(text, (unsigned)test_random_below(&state, 3),
			(unsigned)test_random_below(&state, 3));
		free(text);
	}
}
END_TEST

START_TEST(magic_numbers_have_names)
{
	static const struct {
		uint64_t magic;
		const char *name;
	} pairs[] = {
		{ 0x0bd00bd0, "lustre" },  { 0x19830326, "beegfs" }, { 0x47504653, "gpfs" },
		{ 0x00c36400, "ceph" },    { 0x6969, "nfs" },        { 0x58465342, "xfs" },
		{ 0xef53, "ext4" },        { 0x9123683e, "btrfs" },  { 0x01021994, "tmpfs" },
		{ 0x794c7630, "overlay" }, { 0x65735546, "fuse" },   { 0x12345678, "0x12345678" },
	};
	char type[32], small[4];

	for (size_t i = 0; i < ARRAY_LENGTH(pairs); i++) {
		fs_magic_name(pairs[i].magic, type, sizeof(type));
		ck_assert_str_eq(type, pairs[i].name);
	}
	fs_magic_name(0x0bd00bd0, small, sizeof(small));
	ck_assert_str_eq(small, "lus");
	fs_magic_name(0x12345678, small, sizeof(small));
	ck_assert_str_eq(small, "0x1");
}
END_TEST

static void describe(const char *path, struct fs_info *info)
{
	struct base_error error = { 0 };
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	ck_assert_int_ge(fd, 0);
	ck_assert_msg(!fs_describe(fd, path, NULL, info, &error), "%s", error.text);
	close(fd);
}

START_TEST(a_real_file_is_described)
{
	struct statfs system;
	struct fs_info info;

	scratch_write(scratch_path("file"), "abc", 3);
	describe(scratch_path("file"), &info);
	ck_assert_int_eq(statfs(scratch_directory(), &system), 0);
	ck_assert_uint_eq(info.magic, (uint64_t)(unsigned long)system.f_type & 0xffffffff);
	ck_assert_uint_ne(info.type[0], 0);
	ck_assert(strncmp(info.type, "0x", 2) != 0);
	ck_assert_uint_gt(info.free_bytes, 0);
	ck_assert_uint_gt(info.block_bytes, 0);
	if (info.direct_known && info.direct_works) {
		ck_assert_uint_gt(info.offset_alignment, 0);
		ck_assert_uint_gt(info.memory_alignment, 0);
		ck_assert_uint_eq(info.offset_alignment & (info.offset_alignment - 1), 0);
		ck_assert(scratch_direct());
	}
}
END_TEST

START_TEST(a_directory_and_proc_are_described)
{
	struct fs_info info;

	describe(scratch_directory(), &info);
	ck_assert_uint_ne(info.type[0], 0);
	describe("/proc/self/status", &info);
	ck_assert_str_eq(info.type, "proc");
	ck_assert(!info.direct_known || !info.direct_works);
}
END_TEST

START_TEST(a_type_is_remembered_for_its_device_only)
{
	struct fs_memory memory = { 0 };
	struct fs_info first, again, other;
	int fd = open(scratch_directory(), O_RDONLY | O_CLOEXEC);
	int proc = open("/proc/self/status", O_RDONLY | O_CLOEXEC);

	ck_assert_int_eq(fs_describe(fd, "first", &memory, &first, NULL), 0);
	ck_assert_str_eq(memory.type, first.type);
	ck_assert_int_eq(fs_describe(fd, "again", &memory, &again, NULL), 0);
	ck_assert_str_eq(again.type, first.type);
	ck_assert_int_eq(fs_describe(proc, "other", &memory, &other, NULL), 0);
	ck_assert_str_eq(other.type, "proc");
	ck_assert_int_eq(fs_describe(fd, "back", &memory, &again, NULL), 0);
	ck_assert_str_eq(again.type, first.type);
	/* Half the number is not enough. */
	memory = (struct fs_memory){ .device_major = memory.device_major,
				     .device_minor = memory.device_minor + 1,
				     .type = "another" };
	ck_assert_int_eq(fs_describe(fd, "minor", &memory, &again, NULL), 0);
	ck_assert_str_eq(again.type, first.type);
	memory = (struct fs_memory){ .device_major = memory.device_major + 1,
				     .device_minor = memory.device_minor,
				     .type = "another" };
	ck_assert_int_eq(fs_describe(fd, "major", &memory, &again, NULL), 0);
	ck_assert_str_eq(again.type, first.type);
	/* A device's number may be given to another filesystem. */
	memory.magic++;
	strcpy(memory.type, "another");
	ck_assert_int_eq(fs_describe(fd, "magic", &memory, &again, NULL), 0);
	ck_assert_str_eq(again.type, first.type);
	strcpy(memory.type, "remembered");
	ck_assert_int_eq(fs_describe(fd, "same", &memory, &again, NULL), 0);
	ck_assert_str_eq(again.type, "remembered");
	close(proc);
	close(fd);
}
END_TEST

START_TEST(what_is_not_open_cannot_be_described)
{
	struct base_error error = { 0 };
	struct fs_info info;

	ck_assert_int_eq(fs_describe(-1, "/some/path", NULL, &info, &error), -EBADF);
	ck_assert_ptr_nonnull(strstr(error.text, "/some/path"));
}
END_TEST

/* ---- Pools ----------------------------------------------------------------------------------- */

START_TEST(a_mount_is_found_by_its_number)
{
	char type[32], source[64];

	ck_assert_int_eq(fs_mountinfo_mount(table, 101, type, sizeof(type), source, sizeof(source)),
			 0);
	ck_assert_str_eq(type, "nfs4");
	ck_assert_str_eq(source, "server:/export/home");
	ck_assert_int_eq(fs_mountinfo_mount(table, 99, type, sizeof(type), source, sizeof(source)),
			 0);
	ck_assert_str_eq(source, "user@host:/x\\040y");
	ck_assert_int_eq(fs_mountinfo_mount(table, 104, type, sizeof(type), source, sizeof(source)),
			 0);
	ck_assert_str_eq(source, "tmpfs");
	ck_assert_int_eq(fs_mountinfo_mount(table, 10, type, sizeof(type), source, sizeof(source)),
			 -ENOENT);
	ck_assert_int_eq(fs_mountinfo_mount(table, 101, type, sizeof(type), source, 5), -ENOENT);
	ck_assert_int_eq(fs_mountinfo_mount("", 1, type, sizeof(type), source, sizeof(source)),
			 -ENOENT);
}
END_TEST

static const struct {
	const char *type, *source, *target_pool, *pool;
} pools[] = {
	/* The same on every host that mounts it, whatever it calls the way there. */
	{ "nfs4", "server:/export/home", "", "nfs:server:/export/home" },
	{ "nfs", "server:/export/home", "", "nfs:server:/export/home" },
	{ "lustre", "10.0.0.1@tcp:10.0.0.2@tcp:/fs1", "", "lustre:fs1" },
	{ "lustre", "mgs@o2ib:/fs1", "", "lustre:fs1" },
	/* Some mount a folder of it; targets may be in pools. */
	{ "lustre", "mgs@o2ib:/fs1/home/a", "", "lustre:fs1" },
	{ "lustre", "mgs@o2ib:/fs1/home/a", "flash", "lustre:fs1.flash" },
	{ "lustre", "mgs", "", "lustre:mgs" },
	{ "fuse.stripefs", "stripefs", "flash", "fuse.stripefs:stripefs.flash" },
	{ "beegfs", "mgmt01:8008", "", "beegfs:mgmt01:8008" },
	{ "fuse.juicefs", "JuiceFS:mine", "", "fuse.juicefs:JuiceFS:mine" },
	{ "wekafs", "backend/default", "", "wekafs:backend/default" },
	/* What one host alone can reach has its name. */
	{ "ext4", "/dev/root", "", "ext4:/dev/root@host1" },
	{ "tmpfs", "tmpfs", "", "tmpfs:tmpfs@host1" },
	/* Characters that would mean something elsewhere. */
	{ "nfs", "a{b}\\040c,d*", "", "nfs:a_b__040c_d_" },
};

START_TEST(a_pool_has_the_name_of_the_storage_that_is_shared)
{
	char name[FS_POOL_BYTES];

	fs_pool_of_mount(pools[_i].type, pools[_i].source, pools[_i].target_pool, "host1", name);
	ck_assert_str_eq(name, pools[_i].pool);
}
END_TEST

START_TEST(long_names_are_cut_and_stay_different)
{
	char source[400], first[FS_POOL_BYTES], second[FS_POOL_BYTES];

	memset(source, 'a', sizeof(source));
	source[sizeof(source) - 1] = 0;
	fs_pool_of_mount("nfs", source, "", "host1", first);
	source[sizeof(source) - 2] = 'b';
	fs_pool_of_mount("nfs", source, "", "host1", second);
	ck_assert_uint_eq(strlen(first), FS_POOL_BYTES - 1);
	ck_assert_str_ne(first, second);
}
END_TEST

START_TEST(paths_on_one_mount_share_a_pool)
{
	char first[FS_POOL_BYTES], second[FS_POOL_BYTES], elsewhere[FS_POOL_BYTES];
	struct base_error error = { 0 };
	uint64_t mount, other;

	ck_assert_int_eq(fs_pool_of_path(scratch_path("not-there"), first, &error), 0);
	ck_assert_int_eq(fs_pool_of_path(scratch_directory(), second, &error), 0);
	ck_assert_int_eq(fs_pool_of_path("/proc/self", elsewhere, &error), 0);
	ck_assert_str_eq(first, second);
	ck_assert_str_ne(first, elsewhere);
	/* A mount point is what is mounted there, and a link what it leads to. */
	ck_assert_int_eq(fs_pool_of_path("/proc", second, &error), 0);
	ck_assert_str_eq(second, elsewhere);
	ck_assert_int_eq(symlink("/proc/self/status", scratch_path("link")), 0);
	ck_assert_int_eq(fs_pool_of_path(scratch_path("link"), second, &error), 0);
	ck_assert_str_eq(second, elsewhere);
	ck_assert_int_eq(fs_mount_of_path(scratch_path("not-there"), &mount), 0);
	ck_assert_int_eq(fs_mount_of_path("/proc/self", &other), 0);
	ck_assert_uint_ne(mount, other);
	ck_assert_int_eq(fs_pool_of_path(scratch_path("no/folder/x"), first, &error), -ENOENT);
	ck_assert_ptr_nonnull(strstr(error.text, "no/folder"));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fs");
	TCase *pure = tcase_create("mount table and magic"), *real = tcase_create("real paths");

	tcase_add_test(pure, the_type_of_each_device_is_found);
	tcase_add_test(pure, a_device_that_is_not_mounted_has_no_type);
	tcase_add_test(pure, malformed_lines_are_passed_over);
	tcase_add_test(pure, fields_do_not_come_together_from_several_lines);
	tcase_add_test(pure, a_short_buffer_for_the_type_is_not_overrun);
	tcase_add_test(pure, a_huge_table_is_looked_through_once);
	tcase_add_test(pure, any_text_at_all_is_survived);
	tcase_add_test(pure, magic_numbers_have_names);
	tcase_add_test(pure, a_mount_is_found_by_its_number);
	tcase_add_loop_test(pure, a_pool_has_the_name_of_the_storage_that_is_shared, 0,
			    ARRAY_LENGTH(pools));
	tcase_add_test(pure, long_names_are_cut_and_stay_different);
	suite_add_tcase(suite, pure);
	tcase_add_checked_fixture(real, scratch_setup, scratch_teardown);
	tcase_add_test(real, a_real_file_is_described);
	tcase_add_test(real, a_directory_and_proc_are_described);
	tcase_add_test(real, a_type_is_remembered_for_its_device_only);
	tcase_add_test(real, what_is_not_open_cannot_be_described);
	tcase_add_test(real, paths_on_one_mount_share_a_pool);
	suite_add_tcase(suite, real);
	return check_main(suite);
}
