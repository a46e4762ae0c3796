/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New files with a layout, on clients of Lustre and BeeGFS that give unexpected answers. The result
 * is a new file that is ours alone, or an error.
 */
#define _GNU_SOURCE
#include "fs/fs.h"
/* Included, because its functions are static. */
#include "io/atomic_file.c"
#include "support/check_main.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

static int directory = -1;

static void setup(void)
{
	scratch_setup();
	directory = open(scratch_directory(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	ck_assert_int_ge(directory, 0);
}

static void teardown(void)
{
	close(directory);
	scratch_teardown();
}

static struct test_case tests = { .name = "answers", .setup = setup, .teardown = teardown };

/* ---- The simulated client -------------------------------------------------------------------- */

#define BEEGFS_MAKE 0x4018661bu
#define LUSTRE_SET 0x4008669au

/* Answers to ioctls and to reads and writes of the layout attribute. */
static struct {
	int (*ioctl)(int fd, const void *argument);
	const void *attribute;
	size_t bytes;
} client;

int __wrap_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	const void *argument;

	va_start(args, request);
	argument = va_arg(args, const void *);
	va_end(args);
	if (client.ioctl && (request == BEEGFS_MAKE || request == LUSTRE_SET))
		return client.ioctl(fd, argument);
	errno = ENOTTY;
	return -1;
}

ssize_t __wrap_fgetxattr(int fd, const char *name, void *into, size_t room);
ssize_t __wrap_fgetxattr(int fd, const char *name, void *into, size_t room)
{
	(void)fd;
	(void)name;
	if (!client.attribute || room < client.bytes) {
		errno = client.attribute ? ERANGE : ENODATA;
		return -1;
	}
	memcpy(into, client.attribute, client.bytes);
	return (ssize_t)client.bytes;
}

static struct fs_layout wish(void)
{
	return (struct fs_layout){
		.count = 1,
		.mirrors = 1,
		.components = { { .end = UINT64_MAX, .stripe_bytes = MIB, .stripe_count = 4 } },
	};
}

static int create(enum fs_family family, const struct fs_layout *layout, char note[256])
{
	return fs_create_with_layout(directory, "new", 0640, family, layout, note, 256);
}

/* Checks that the file is empty, is ours and has no other name, and removes it. */
static void must_be_new(int fd)
{
	struct stat status, named;

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(fstat(fd, &status), 0);
	ck_assert_int_eq(fstatat(directory, "new", &named, AT_SYMLINK_NOFOLLOW), 0);
	ck_assert_uint_eq(status.st_ino, named.st_ino);
	ck_assert(S_ISREG(status.st_mode) && !status.st_size && status.st_nlink == 1);
	ck_assert_int_eq(fcntl(fd, F_GETFL) & (O_NONBLOCK | O_ACCMODE), O_RDWR);
	close(fd);
	ck_assert_int_eq(unlinkat(directory, "new", 0), 0);
}

/* ---- BeeGFS ---------------------------------------------------------------------------------- */

/* Argument of BeeGFS's ioctl that creates a file. */
struct hints {
	const char *name;
	uint32_t mode, targets, chunk;
};

static int make(int fd, const void *argument)
{
	const struct hints *hints = argument;
	const int made = openat(fd, hints->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
				(mode_t)hints->mode);

	ck_assert_uint_eq(hints->targets, 4);
	ck_assert_uint_eq(hints->chunk, MIB);
	if (made < 0)
		return -1;
	close(made);
	return 0;
}

/* Answers as if another user of the directory replaced the new file before it is opened. */
static int make_a_link(int fd, const void *argument)
{
	const struct hints *hints = argument;

	scratch_write(scratch_path("empty"), "", 0);
	return symlinkat("empty", fd, hints->name);
}

static int make_a_pipe(int fd, const void *argument)
{
	const struct hints *hints = argument;

	return mkfifoat(fd, hints->name, 0600);
}

static int make_two_names(int fd, const void *argument)
{
	const struct hints *hints = argument;

	return make(fd, argument) ? -1 : linkat(fd, hints->name, fd, "other name", 0);
}

static int make_something(int fd, const void *argument)
{
	const struct hints *hints = argument;
	int made;

	if (make(fd, argument))
		return -1;
	made = openat(fd, hints->name, O_WRONLY | O_CLOEXEC);
	ck_assert_int_eq(write(made, "text", 4), 4);
	return close(made);
}

static int make_nothing(int fd, const void *argument)
{
	(void)fd;
	(void)argument;
	return 0;
}

TEST(tests, beegfs_makes_the_file)
{
	const struct fs_layout layout = wish();
	char note[256];

	client.ioctl = make;
	must_be_new(create(FS_BEEGFS, &layout, note));
	scratch_write(scratch_path("new"), "mine", 4);
	ck_assert_int_eq(create(FS_BEEGFS, &layout, note), -EEXIST);
	ck_assert(scratch_same(scratch_path("new"), "mine", 4));
}

static int (*const makers[])(int fd, const void *argument) = {
	make_a_link, make_a_pipe, make_two_names, make_something, make_nothing,
};

LOOP_TEST(tests, what_beegfs_made_and_is_not_ours_and_new_is_not_written_to, 0,
	  (int)ARRAY_LENGTH(makers))
{
	const struct fs_layout layout = wish();
	char note[256];

	client.ioctl = makers[_i];
	must_be_new(create(FS_BEEGFS, &layout, note));
	ck_assert_str_ne(note, "");
}

TEST(tests, what_beegfs_does_not_take_is_a_plain_file)
{
	const struct fs_layout layout = wish();
	char note[256];

	must_be_new(create(FS_BEEGFS, &layout, note));
	ck_assert_str_ne(note, "");
}

/* ---- Lustre ---------------------------------------------------------------------------------- */

static int agree(int fd, const void *argument)
{
	(void)fd;
	(void)argument;
	return 0;
}

/* Encodes a layout of 4 stripes of 1 MiB. Returns its length. */
static size_t put_lustre(uint8_t blob[256], uint32_t magic, uint16_t count)
{
	const size_t head = magic == 0x0BD30BD0u ? 48 : 32;
	const uint32_t words[] = { magic, 1, MIB };
	const size_t at[] = { 0, 4, 24 };

	memset(blob, 0, 256);
	for (size_t i = 0; i < ARRAY_LENGTH(words); i++)
		memcpy(blob + at[i], &words[i], sizeof(words[i]));
	memcpy(blob + 28, &count, sizeof(count));
	return head + 4 * 24;
}

static const struct {
	uint32_t magic;
	uint16_t count;
	size_t less; /* bytes that are cut off */
	bool striped;
} lustre[] = {
	{ 0x0BD10BD0u, 4, 0, true },
	{ 0x0BD30BD0u, 4, 0, true },
	/* A layout without objects: a directory's default, not this file's. */
	{ 0x0BD10BD0u, 0, 0, false },
	{ 0x0BD30BD0u, 0, 0, false },
	{ 0x0BD10BD0u, 4, 4 * 24, false },
	{ 0x0BD30BD0u, 4, 4 * 24, false },
	{ 0x0BD10BD0u, 4, 110, false },
	{ 0x12345678u, 4, 0, false },
};

LOOP_TEST(tests, lustre_says_what_a_file_got, 0, (int)ARRAY_LENGTH(lustre))
{
	const struct fs_layout layout = wish();
	uint8_t blob[256];
	char note[256];

	client.ioctl = agree;
	client.bytes = put_lustre(blob, lustre[_i].magic, lustre[_i].count) - lustre[_i].less;
	client.attribute = blob;
	/* A file without objects cannot be written, so the library creates another one. */
	must_be_new(create(FS_LUSTRE, &layout, note));
	ck_assert_msg(!*note == lustre[_i].striped, "\"%s\"", note);
}

TEST(tests, a_lustre_layout_that_is_refused_is_the_directorys)
{
	struct fs_layout layout = wish();
	char note[256];

	must_be_new(create(FS_LUSTRE, &layout, note));
	ck_assert_str_ne(note, "");
	layout.components[0].overstriped = true;
	must_be_new(create(FS_LUSTRE, &layout, note));
	ck_assert_str_ne(note, "");
	scratch_write(scratch_path("new"), "mine", 4);
	ck_assert_int_eq(create(FS_LUSTRE, &layout, note), -EEXIST);
}

TEST(tests, others_take_no_layouts)
{
	const struct fs_layout layout = wish();
	char note[256];

	must_be_new(create(FS_EXT, &layout, note));
	ck_assert_str_ne(note, "");
}

/* ---- FUSE, which decides at open() how a file is written ------------------------------------- */

static struct {
	bool asks;       /* the filesystem accepts layouts */
	int direct_code; /* error of an open for direct I/O */
	bool leaves;     /* the open fails but creates the file */
	bool elsewhere;  /* another file is opened */
	bool no_flags;   /* flags cannot be changed */
	bool no_status;
} fuse;

int __real_openat64(int fd, const char *name, int flags, ...);
int __wrap_openat64(int fd, const char *name, int flags, ...);
int __wrap_openat64(int fd, const char *name, int flags, ...)
{
	mode_t mode;
	va_list args;

	va_start(args, flags);
	mode = va_arg(args, mode_t);
	va_end(args);
	if (!(flags & O_DIRECT))
		return __real_openat64(fd, name, flags, mode);
	if (fuse.leaves)
		close(__real_openat64(fd, name, flags & ~O_DIRECT, mode));
	errno = fuse.direct_code;
	if (fuse.direct_code)
		return -1;
	if (fuse.elsewhere)
		return __real_openat64(fd, "other", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	/* Not every filesystem that tests run on supports direct I/O. */
	return __real_openat64(fd, name, flags & ~O_DIRECT, mode);
}

int __real_fcntl64(int fd, int command, ...);
int __wrap_fcntl64(int fd, int command, ...);
int __wrap_fcntl64(int fd, int command, ...)
{
	va_list args;
	long argument;

	va_start(args, command);
	argument = va_arg(args, long);
	va_end(args);
	if (command == F_SETFL && fuse.no_flags) {
		errno = EPERM;
		return -1;
	}
	return __real_fcntl64(fd, command, argument);
}

int __real_fstat64(int fd, struct stat *status);
int __wrap_fstat64(int fd, struct stat *status);
int __wrap_fstat64(int fd, struct stat *status)
{
	if (!fuse.no_status)
		return __real_fstat64(fd, status);
	errno = EIO;
	return -1;
}

int __real_fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		       struct base_error *error);
int __wrap_fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		       struct base_error *error);
int __wrap_fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		       struct base_error *error)
{
	*info = (struct fs_info){ .family = FS_LUSTRE };
	return fuse.asks ? 0 : __real_fs_describe(fd, path, memory, info, error);
}

static int create_on_fuse(bool asks)
{
	const struct io_config config = {
		.direct = IOSHAPE_DIRECT_REQUIRE,
		.layout = { .kind = FS_REQUEST_LAYOUT, .component = wish().components[0] },
	};
	const struct io_file_options options = { .expected_bytes = GIB };
	struct fs_memory memory = {
		.type = "fuse.lustre",
		.magic = FS_FUSE_MAGIC,
		.family = asks ? FS_LUSTRE : FS_FUSE,
	};
	struct io_downgrades downgrades = { 0 };
	char here[] = ".", name[] = "new";
	struct io_destination file = {
		.options = &options,
		.config = &config,
		.memory = &memory,
		.downgrades = &downgrades,
		.directory = here,
		.temporary = name,
		.directory_fd = directory,
	};
	uint8_t blob[256];
	struct stat status;
	int fd;

	if (!fstat(directory, &status)) { /* the wrapped fstat() may be made to fail */
		memory.device_major = major(status.st_dev);
		memory.device_minor = minor(status.st_dev);
	}
	fuse.asks = asks;
	client.ioctl = agree;
	client.bytes = put_lustre(blob, 0x0BD10BD0u, 4);
	client.attribute = blob;
	fd = destination_create(&file, 0640);
	fuse.no_flags = fuse.no_status = false;
	if (fd >= 0)
		ck_assert(!(fcntl(fd, F_GETFL) & O_DIRECT));
	return fd;
}

LOOP_TEST(tests, a_file_on_fuse_is_opened_for_direct_io, 0, 2)
{
	must_be_new(create_on_fuse(_i));
}

LOOP_TEST(tests, where_fuse_refuses_direct_io_files_are_like_others, 0, 4)
{
	fuse.direct_code = EINVAL;
	fuse.leaves = _i == 1;
	must_be_new(create_on_fuse(_i >= 2));
	fuse.direct_code = _i == 3 ? EACCES : 0;
	fuse.leaves = false;
	fuse.no_flags = true;
	must_be_new(create_on_fuse(_i >= 2));
}

TEST(tests, a_directory_where_no_file_can_be_made_is_an_error)
{
	fuse.direct_code = EACCES;
	ck_assert_int_eq(create_on_fuse(false), -EACCES);
	scratch_write(scratch_path("new"), "mine", 4);
	fuse.direct_code = EEXIST;
	ck_assert_int_eq(create_on_fuse(false), -EEXIST);
	ck_assert(scratch_same(scratch_path("new"), "mine", 4));
}

LOOP_TEST(tests, another_file_in_its_place_is_not_taken_for_it, 0, 2)
{
	fuse.elsewhere = _i == 0;
	fuse.no_status = _i == 1;
	must_be_new(create_on_fuse(true));
}
