/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A new file: how it shall lie on storage targets, and its space, before its first byte; and the
 * space that replaced files give back.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

/* Interruptions in a row before we believe that they will not end. */
#define MAX_INTERRUPTIONS 100

/* ---- Stripes --------------------------------------------------------------------------------- */

/* Of the whole file, whoever writes it; 0: not known. */
static uint64_t bytes_of(const struct io_file_options *options)
{
	return options->part_bytes ? options->file_bytes : options->expected_bytes;
}

static bool is_small(const struct io_destination *destination)
{
	const uint64_t bytes = bytes_of(destination->options);

	return bytes && bytes <= IO_SMALL_FILE_BYTES;
}

/* What it takes to be worth asking: what came before on this mount, or what the directory says. */
static bool must_ask(struct io_destination *destination)
{
	const struct io_file_options *options = destination->options;
	const struct fs_layout_request *request = &destination->config->layout;
	const uint64_t bytes = bytes_of(options);
	const int directory_fd = destination->directory_fd;
	const char *directory = destination->directory;
	struct fs_memory *memory = destination->memory;
	struct fs_facts facts = { .file_bytes = bytes, .writers = options->files };
	struct fs_info info;
	char why[160];
	int ask;

	memset(&destination->asked, 0, sizeof(destination->asked));
	if (is_small(destination) || request->kind == FS_REQUEST_DIRECTORY)
		return false;
	/* One stripe is what every directory gives, at least. */
	if (request->kind == FS_REQUEST_AUTO && !options->place && bytes <= FS_ONE_STRIPE_BYTES)
		return false;
	/* Most files follow others on the same mount, where nothing is to be asked for: they cost
	 * no call. If this one does not, it is found out when it is looked at. */
	destination->guessed = *memory->type && !fs_takes_layouts(memory->family);
	if (destination->guessed || fs_describe(directory_fd, directory, memory, &info, NULL))
		return false;
	if (!fs_takes_layouts(info.family))
		return false;
	facts.family = info.family;
	facts.directory = info.layout;
	facts.targets = fs_remembered_targets(directory_fd, memory);
	ask = fs_choose_layout(request, &facts, &destination->asked, why, sizeof(why));
	base_log(&destination->config->log, IOSHAPE_LOG_DEBUG, "new file in %s: %s", directory,
		 why);
	if (options->place)
		ask |= fs_take_place(&facts, fs_even_targets(directory_fd, directory, memory),
				     options->place, options->places, &destination->asked);
	return ask > 0;
}

/* ---- Direct I/O ------------------------------------------------------------------------------ */

static bool is_on_device_of(const struct fs_memory *memory, int directory_fd)
{
	struct stat status;

	return *memory->type && !fstat(directory_fd, &status) &&
	       major(status.st_dev) == memory->device_major &&
	       minor(status.st_dev) == memory->device_minor;
}

static bool may_go_direct(const struct io_destination *destination)
{
	const struct io_engine_ops *ops = io_engine_of(destination->config->engine);

	return !destination->buffered && !is_small(destination) &&
	       destination->config->direct != IOSHAPE_DIRECT_OFF && (!ops || ops->direct);
}

/*
 * Whether the file must have O_DIRECT when it is opened: on FUSE, if it will be written directly.
 * FUSE decides then whether it keeps pages of the file, and lets direct writes go side by side only
 * if it keeps none.
 */
static bool opens_direct(const struct io_destination *destination)
{
	struct fs_memory *memory = destination->memory;
	struct fs_info info;

	/* Most files follow others on a mount that is no FUSE: they cost no call. */
	if (!may_go_direct(destination) || (*memory->type && memory->magic != FS_FUSE_MAGIC))
		return false;
	if (!is_on_device_of(memory, destination->directory_fd) &&
	    fs_describe(destination->directory_fd, destination->directory, memory, &info, NULL))
		return false;
	return memory->magic == FS_FUSE_MAGIC &&
	       (destination->config->direct == IOSHAPE_DIRECT_REQUIRE ||
		!fs_writes_cached(memory->family, memory->magic));
}

/* ---- Creating -------------------------------------------------------------------------------- */

/* Direct I/O begins when its engine does: until then it is a file like all others. */
static int create_plainly(const struct io_destination *destination, mode_t mode)
{
	const int directory_fd = destination->directory_fd;
	const char *name = destination->temporary;
	int fd = -1;

	if (opens_direct(destination)) {
		fd = fs_create_plainly(directory_fd, name, mode, O_DIRECT);
		/* Not where it is refused; but then there is a file on some. */
		if (fd == -EINVAL)
			unlinkat(directory_fd, name, 0);
		else if (fd < 0)
			return fd;
		if (fd >= 0 && !io_set_direct(fd, false))
			return fd;
	}
	if (fd >= 0) {
		close(fd);
		unlinkat(directory_fd, name, 0);
	}
	return fs_create_plainly(directory_fd, name, mode, 0);
}

/* The same file, opened for direct I/O instead; or as it was, where that cannot be done. */
static int open_direct(const struct io_destination *destination, int fd)
{
	int again = base_above_streams(openat(destination->directory_fd, destination->temporary,
					      O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC));
	struct stat before, now;

	if (again < 0)
		return fd;
	if (io_set_direct(again, false) || fstat(fd, &before) || fstat(again, &now) ||
	    before.st_ino != now.st_ino || before.st_dev != now.st_dev) {
		close(again);
		return fd;
	}
	close(fd);
	return again;
}

int io_new_file_create(struct io_destination *destination, mode_t mode)
{
	char note[256];
	int fd;

	if (!must_ask(destination))
		return create_plainly(destination, mode);
	fd = fs_create_with_layout(destination->directory_fd, destination->temporary, mode,
				   destination->memory->family, &destination->asked, note,
				   sizeof(note));
	if (fd >= 0 && *note)
		io_note(destination->notes, IOSHAPE_STEP_LAYOUT, "%s", note);
	if (fd >= 0 && opens_direct(destination))
		fd = open_direct(destination, fd);
	return fd;
}

/* ---- Replaced files -------------------------------------------------------------------------- */

/*
 * A filesystem frees the blocks of a file when the last descriptor of it is closed; for 1 GiB, ext4
 * with the discard mount option took 0.12 s, an eighth of the time of a whole save. Nobody need
 * wait for that: a thread of its own closes large ones.
 */

/* Smaller ones go faster than a thread starts. */
#define LARGE_FILE_BYTES (64 * MIB)

#define PATIENCE_NS (10ull * 1000000000)

/* Files that are on their way, in this process; that is where their space is missing. */
static atomic_uint releasing;

static void *release(void *fd)
{
	base_close((int)(intptr_t)fd);
	atomic_fetch_sub(&releasing, 1);
	return NULL;
}

void io_release(int fd)
{
	struct statx status;
	pthread_t thread;

	if (fd < 0)
		return;
	/* As far as the kernel knows it: that decides only who closes it. */
	if (!statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_SIZE | STATX_NLINK, &status) &&
	    !status.stx_nlink && status.stx_size >= LARGE_FILE_BYTES) {
		atomic_fetch_add(&releasing, 1);
		/* It touches nothing that could be freed, so nobody has to wait for it. */
		if (!base_start_thread(&thread, release, (void *)(intptr_t)fd)) {
			pthread_detach(thread);
			return;
		}
		atomic_fetch_sub(&releasing, 1);
	}
	base_close(fd);
}

bool io_await_releases(void)
{
	const struct timespec pause = { .tv_nsec = 5000000 };
	uint64_t begin = base_now_ns();
	bool waited = false;

	/* In a forked child the thread of its parent is not there, hence the limit. */
	while (atomic_load(&releasing) && base_now_ns() - begin < PATIENCE_NS) {
		nanosleep(&pause, NULL);
		waited = true;
	}
	return waited;
}

/* ---- Space ----------------------------------------------------------------------------------- */

/* Blocks for so many bytes, interrupted or not. */
static int allocate(int fd, uint64_t offset, uint64_t bytes)
{
	int interruptions = 0, ret;

	do {
		ret = fallocate(fd, 0, (off_t)offset, (off_t)bytes) ? -errno : 0;
	} while (ret == -EINTR && ++interruptions < MAX_INTERRUPTIONS);
	return ret;
}

static int reserve(const struct io_destination *destination, uint64_t length)
{
	const struct io_file_options *options = destination->options;
	int ret = allocate(destination->fd, options->part_offset, length);

	/* A bit less will do. */
	if (ret == -ENOSPC || ret == -EDQUOT || ret == -EFBIG)
		ret = allocate(destination->fd, options->part_offset, options->expected_bytes);
	return ret;
}

static int no_room(const struct io_destination *destination, int code, struct base_error *error)
{
	const uint64_t bytes = destination->options->expected_bytes;
	const uint64_t free_bytes = fs_free_bytes_behind(destination->fd);

	/* On the whole; not where the file would lie, or not for this user. */
	if (free_bytes >= bytes)
		base_fail_with(error, code, io_remedy(code),
			       "cannot save \"%s\": the %s that it needs cannot be reserved on its "
			       "filesystem (%s)",
			       destination->path, BASE_SIZE(bytes), destination->fs.type);
	else
		base_refuse_with(error, code, io_remedy(code),
				 "cannot save \"%s\": needs %s, %s are free on its filesystem "
				 "(%s)",
				 destination->path, BASE_SIZE(bytes), BASE_SIZE(free_bytes),
				 destination->fs.type);
	base_error_space(error, bytes, free_bytes);
	return code;
}

int io_new_file_reserve(struct io_destination *destination, uint64_t length,
			struct base_error *error)
{
	int ret = reserve(destination, length);

	/* The space of a file that we have replaced may be on its way. */
	if ((ret == -ENOSPC || ret == -EDQUOT) && io_await_releases())
		ret = reserve(destination, length);
	switch (ret) {
	case 0:
		return 0;
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
	case -EIO:
		return no_room(destination, ret, error);
	default:
		/* Nothing can be reserved: then what there is free decides. */
		if (destination->options->expected_bytes > fs_free_bytes_behind(destination->fd))
			return no_room(destination, -ENOSPC, error);
		io_note(destination->notes, IOSHAPE_STEP_PREALLOCATE, "no preallocation on %s: %s",
			destination->fs.type, ioshape_strerror(ret));
		/* Of a shared file it would cut what others have written. */
		if (!destination->shared && ftruncate(destination->fd, (off_t)length))
			base_log(&destination->config->log, IOSHAPE_LOG_DEBUG,
				 "cannot set the length of %s: %s", destination->path,
				 ioshape_strerror(-errno));
		return 0;
	}
}

/* ---- Before there is a file ------------------------------------------------------------------ */

/* The directory that a file at `path` will be in, behind a symbolic link as well; to be freed. */
static char *directory_of(const char *path)
{
	char *resolved = realpath(path, NULL), *directory = resolved ? resolved : strdup(path);
	char *slash = directory ? strrchr(directory, '/') : NULL;

	if (slash)
		slash[slash == directory] = 0;
	else if (directory)
		strcpy(directory, *directory ? "." : "");
	return directory;
}

static int open_directory(const char *path)
{
	return path ? base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) : -1;
}

void io_clear_space(const char *path, const struct base_log *log)
{
	char *directory = directory_of(path);
	const int fd = open_directory(directory);

	io_await_releases();
	if (fd >= 0) {
		/* Without this space the save fails: so all of it goes now. */
		io_remove_stale(fd, directory, NULL, log);
		close(fd);
	}
	free(directory);
}

bool io_can_reserve(const char *path, bool in_directory, uint64_t bytes)
{
	char *directory = in_directory ? NULL : directory_of(path);
	const int parent = open_directory(in_directory ? path : directory);
	int fd = -1;
	bool can;

	/* A file without a name: nothing is left of it, whatever happens. */
	if (parent >= 0)
		fd = base_above_streams(
			openat(parent, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
	/* Beyond the process's limit asking would end it. */
	can = fd >= 0 && bytes <= base_largest_file() && !allocate(fd, 0, bytes);
	if (fd >= 0)
		close(fd);
	if (parent >= 0)
		close(parent);
	free(directory);
	return can;
}
