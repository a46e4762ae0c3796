/* SPDX-License-Identifier: Apache-2.0 */
/* How a new file shall lie on storage targets. */
#define _GNU_SOURCE
#include "ring/destination.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* What it takes to be worth asking: what came before on this mount, or what the directory says. */
static bool must_ask(struct ring_striping *striping, int directory_fd, const char *directory)
{
	struct fs_memory *memory = striping->memory;
	struct fs_info info;
	struct fs_facts facts = { .file_bytes = striping->bytes, .writers = striping->files };
	char why[160];
	int ask;

	memset(&striping->asked, 0, sizeof(striping->asked));
	if (!striping->request || striping->request->kind == FS_REQUEST_DIRECTORY)
		return false;
	/* One stripe is what every directory gives, at least. */
	if (striping->request->kind == FS_REQUEST_AUTO && !striping->place &&
	    striping->bytes <= FS_ONE_STRIPE_BYTES)
		return false;
	/* Most files follow others on the same mount, where nothing is to be asked for: they cost
	 * no call. If this one does not, it is found out when it is looked at. */
	striping->guessed = *memory->type && !fs_takes_layouts(memory->family);
	if (striping->guessed || fs_describe(directory_fd, directory, memory, &info, NULL))
		return false;
	if (!fs_takes_layouts(info.family))
		return false;
	facts.family = info.family;
	facts.directory = info.layout;
	facts.targets = fs_count_targets(directory_fd, info.family);
	ask = fs_choose_layout(striping->request, &facts, &striping->asked, why, sizeof(why));
	base_log(striping->log, IOSHAPE_LOG_DEBUG, "new file in %s: %s", directory, why);
	if (striping->place)
		ask |= fs_take_place(&facts, fs_even_targets(directory_fd, directory, memory),
				     striping->place, striping->places, &striping->asked);
	return ask > 0;
}

static bool is_on_device_of(const struct fs_memory *memory, int directory_fd)
{
	struct stat status;

	return *memory->type && !fstat(directory_fd, &status) &&
	       major(status.st_dev) == memory->device_major &&
	       minor(status.st_dev) == memory->device_minor;
}

/* Whether the file must have O_DIRECT when it is opened: on FUSE, if it will be written directly.
 */
static bool opens_direct(const struct ring_striping *striping, int directory_fd,
			 const char *directory)
{
	struct fs_memory *memory = striping->memory;
	struct fs_info info;

	/* Most files follow others on a mount that is no FUSE: they cost no call. */
	if (!striping->direct || (*memory->type && memory->magic != FS_FUSE_MAGIC))
		return false;
	if (!is_on_device_of(memory, directory_fd) &&
	    fs_describe(directory_fd, directory, memory, &info, NULL))
		return false;
	return memory->magic == FS_FUSE_MAGIC &&
	       (striping->direct_required || !fs_writes_cached(memory->family, memory->magic));
}

/* Direct I/O begins when its engine does: until then it is a file like all others. */
int ring_leave_direct(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags & ~O_DIRECT) ? -errno : 0;
}

static int create_plainly(struct ring_striping *striping, int directory_fd, const char *directory,
			  const char *name, mode_t mode)
{
	int fd = -1;

	if (opens_direct(striping, directory_fd, directory)) {
		fd = fs_create_plainly(directory_fd, name, mode, O_DIRECT);
		/* Not where it is refused; but then there is a file on some. */
		if (fd == -EINVAL)
			unlinkat(directory_fd, name, 0);
		else if (fd < 0)
			return fd;
		if (fd >= 0 && !ring_leave_direct(fd))
			return fd;
	}
	if (fd >= 0) {
		close(fd);
		unlinkat(directory_fd, name, 0);
	}
	return fs_create_plainly(directory_fd, name, mode, 0);
}

/* The same file, opened for direct I/O instead; or as it was, where that cannot be done. */
static int open_direct(int directory_fd, const char *name, int fd)
{
	int again = base_above_streams(
		openat(directory_fd, name, O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC));
	struct stat before, now;

	if (again < 0)
		return fd;
	if (ring_leave_direct(again) || fstat(fd, &before) || fstat(again, &now) ||
	    before.st_ino != now.st_ino || before.st_dev != now.st_dev) {
		close(again);
		return fd;
	}
	close(fd);
	return again;
}

int ring_striping_create(struct ring_striping *striping, int directory_fd, const char *directory,
			 const char *name, mode_t mode, struct ring_notes *notes)
{
	char note[256];
	int fd;

	if (!must_ask(striping, directory_fd, directory))
		return create_plainly(striping, directory_fd, directory, name, mode);
	fd = fs_create_with_layout(directory_fd, name, mode, striping->memory->family,
				   &striping->asked, note, sizeof(note));
	if (fd >= 0 && *note)
		ring_note(notes, IOSHAPE_STEP_LAYOUT, "%s", note);
	if (fd >= 0 && opens_direct(striping, directory_fd, directory))
		fd = open_direct(directory_fd, name, fd);
	return fd;
}

bool ring_striping_guessed_wrong(const struct ring_striping *striping, const struct fs_info *file)
{
	return striping->guessed && fs_takes_layouts(file->family);
}

void ring_striping_report(const struct ring_striping *striping, const struct fs_layout *layout,
			  struct ioshape_report *report)
{
	const struct fs_part *part = fs_layout_main(layout, report->file_bytes);

	fs_layout_text(&striping->asked, report->stripes_asked, sizeof(report->stripes_asked));
	fs_layout_text(layout, report->stripes, sizeof(report->stripes));
	report->stripe_count = part && part->stripe_count != FS_ALL_TARGETS ? part->stripe_count :
									      0;
	report->stripe_bytes = part ? part->stripe_bytes : 0;
}
