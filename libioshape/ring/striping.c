/* SPDX-License-Identifier: Apache-2.0 */
/* How a new file shall lie on storage targets. */
#define _GNU_SOURCE
#include "ring/target.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* What it takes to be worth asking: what came before on this mount, or what the directory says. */
static bool must_ask(struct ring_striping *striping, int directory_fd, const char *directory)
{
	struct fs_memory *memory = striping->memory;
	struct fs_info info;
	struct fs_facts facts = { .file_bytes = striping->bytes, .writers = striping->files };
	char why[160];
	int ask;

	memset(&striping->asked, 0, sizeof(striping->asked));
	if (!striping->wish || striping->wish->kind == FS_WISH_DIRECTORY)
		return false;
	if (striping->wish->kind == FS_WISH_AUTO && !striping->bytes)
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
	facts.targets = fs_remembered_targets(directory_fd, memory);
	ask = fs_choose_layout(striping->wish, &facts, &striping->asked, why, sizeof(why));
	base_log(striping->log, IOSHAPE_LOG_DEBUG, "new file in %s: %s", directory, why);
	return ask > 0;
}

int ring_striping_create(struct ring_striping *striping, int directory_fd, const char *directory,
			 const char *name, mode_t mode, struct ring_notes *notes)
{
	char note[256];
	int fd;

	if (!must_ask(striping, directory_fd, directory)) {
		fd = openat(directory_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
			    mode);
		return fd < 0 ? -errno : fd;
	}
	fd = fs_create_with_layout(directory_fd, name, mode, striping->memory->family,
				   &striping->asked, note, sizeof(note));
	if (fd >= 0 && *note)
		ring_note(notes, "%s", note);
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
