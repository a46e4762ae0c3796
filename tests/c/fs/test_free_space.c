/* SPDX-License-Identifier: Apache-2.0 */
/* Free space for a file. */
#define _GNU_SOURCE
/* Included, because it tests static functions. */
#include "fs/storage.c"
#include "io/io.h"
#include "support/check_main.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

static struct test_case room_case = { .name = "room",
				      .setup = scratch_setup,
				      .teardown = scratch_teardown };

static int space_at(const char *path, struct fs_space *space)
{
	struct fs_found found;

	fs_find(path, &found);
	return fs_space_of_found(path, &found, space);
}

TEST(room_case, room_is_that_of_what_is_there_or_of_its_directory)
{
	struct statfs system;
	struct fs_space room;
	char type[32];

	ck_assert_int_eq(statfs(scratch_directory(), &system), 0);
	ck_assert_int_eq(space_at(scratch_path("new"), &room), 0);
	ck_assert_uint_eq(fs_replaced_bytes(scratch_path("new")), 0);
	ck_assert_uint_eq(room.magic, (uint64_t)(unsigned long)system.f_type & 0xffffffff);
	ck_assert_uint_gt(room.free_bytes, 0);
	ck_assert_uint_lt(room.free_bytes, (uint64_t)system.f_blocks * (uint64_t)system.f_bsize);
	scratch_write(scratch_path("old"), "old", 3);
	ck_assert_int_eq(space_at(scratch_path("old"), &room), 0);
	ck_assert_uint_gt(fs_replaced_bytes(scratch_path("old")), 0);
	/* The space at the link's destination counts. */
	ck_assert_int_eq(symlink("/dev/shm", scratch_path("elsewhere")), 0);
	ck_assert_int_eq(space_at(scratch_path("elsewhere/new"), &room), 0);
	fs_space_type(&room, type, sizeof(type));
	ck_assert_str_eq(type, "tmpfs");
}

TEST(room_case, where_nothing_is_known_nothing_is_said)
{
	struct fs_space room;

	ck_assert_int_eq(space_at(scratch_path("missing/new"), &room), -ENOENT);
	ck_assert_uint_eq(room.free_bytes, UINT64_MAX);
	ck_assert_int_eq(symlink("/nowhere/at/all", scratch_path("dangling")), 0);
	ck_assert_int_eq(space_at(scratch_path("dangling"), &room), -ENOENT);
	ck_assert_int_eq(mkfifo(scratch_path("pipe"), 0600), 0);
	ck_assert_int_eq(space_at(scratch_path("pipe"), &room), -EINVAL);
	ck_assert_int_eq(space_at("/dev/full", &room), -EINVAL);
	ck_assert_int_eq(space_at(scratch_directory(), &room), -EINVAL);
	/* /proc reports no blocks. */
	ck_assert_int_eq(fs_space_of_directory("/proc/self", &room), 0);
	ck_assert_uint_eq(room.free_bytes, UINT64_MAX);
}

TEST(room_case, directories_may_have_to_be_made)
{
	struct fs_space there, later;

	ck_assert_int_eq(fs_space_of_directory(scratch_directory(), &there), 0);
	ck_assert_int_eq(fs_space_of_directory(scratch_path("a/b/c"), &later), 0);
	ck_assert_uint_eq(later.magic, there.magic);
	ck_assert_uint_eq(later.device_minor, there.device_minor);
	ck_assert_int_eq(fs_space_of_directory("missing", &later), 0);
	scratch_write(scratch_path("file"), "", 0);
	ck_assert_int_eq(fs_space_of_directory(scratch_path("file/b"), &later), -ENOTDIR);
}

TEST(room_case, only_root_has_what_is_kept_for_root)
{
	struct statfs system = {
		.f_type = 0xef53,
		.f_blocks = 100,
		.f_bavail = 5,
		.f_bfree = 10,
		.f_frsize = 4096,
		.f_bsize = 1,
	};

	ck_assert_uint_eq(free_bytes(&system), (geteuid() ? 5 : 10) * 4096);
	system.f_type = 0x58465342;
	ck_assert_uint_eq(free_bytes(&system), 5 * 4096);
	system.f_frsize = 0;
	ck_assert_uint_eq(free_bytes(&system), 5);
	system.f_frsize = 1 << 20;
	system.f_bavail = UINT64_MAX / 2;
	ck_assert_uint_eq(free_bytes(&system), UINT64_MAX);
	system.f_blocks = 0;
	system.f_bavail = 0;
	ck_assert_uint_eq(free_bytes(&system), UINT64_MAX);
}

/* ---- Reserving space ------------------------------------------------------------------------- */

TEST(room_case, space_is_reserved_where_the_file_will_be)
{
	const struct rlimit limit = { 4 * MIB, RLIM_INFINITY };

	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert(io_can_reserve("new", false, MIB));
	ck_assert(io_can_reserve("./new", false, MIB));
	ck_assert(io_can_reserve(".", true, MIB));
	ck_assert(io_can_reserve(scratch_path("new"), false, MIB));
	/* Through a link. */
	scratch_write("old", "old", 3);
	ck_assert_int_eq(mkdir("elsewhere", 0700), 0);
	ck_assert_int_eq(symlink("../old", "elsewhere/link"), 0);
	ck_assert(io_can_reserve("elsewhere/link", false, MIB));
	ck_assert(!io_can_reserve("missing/new", false, MIB));
	ck_assert(!io_can_reserve("missing", true, MIB));
	ck_assert(!io_can_reserve("old/new", false, MIB));
	ck_assert(!io_can_reserve("new", false, INT64_MAX));
	/* A write beyond the limit would end the process. */
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	ck_assert(io_can_reserve("new", false, 4 * MIB));
	ck_assert(!io_can_reserve("new", false, 4 * MIB + 1));
	ck_assert_uint_eq(scratch_entries("."), 2);
}

TEST(room_case, clearing_space_takes_nothing_of_anybodys)
{
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	scratch_write("old", "old", 3);
	io_clear_space("new", NULL);
	io_clear_space("old", NULL);
	io_clear_space("/new", NULL);
	io_clear_space("missing/new", NULL);
	ck_assert(scratch_same("old", "old", 3));
	ck_assert_uint_eq(scratch_entries("."), 1);
}
