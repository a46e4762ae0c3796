/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New files with a layout. It is fixed when a file is created, servers may cut it, ignore it or
 * refuse it, and some report success when it was not applied. So it is read back. Where a file
 * cannot get the layout it gets the directory's, because a save matters more than its stripes.
 */
#define _GNU_SOURCE
#include "fs/ask.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define TEXT_BYTES 64

/* ---- What was given ---------------------------------------------------------------------------
 */

static bool part_is_another(const struct fs_part *ask, const struct fs_part *got)
{
	if (ask->begin != got->begin || ask->end != got->end || got->on_metadata)
		return true;
	if (ask->stripe_bytes && ask->stripe_bytes != got->stripe_bytes)
		return true;
	if (*ask->pool && strcmp(ask->pool, got->pool) != 0)
		return true;
	return ask->stripe_count && ask->stripe_count < got->stripe_count;
}

int fs_differs(const struct fs_layout *ask, const struct fs_layout *got, char *text,
	       size_t text_bytes)
{
	char asked[TEXT_BYTES], given[TEXT_BYTES];
	bool fewer = false, another = ask->count != got->count;

	for (uint32_t i = 0; !another && i < ask->count; i++) {
		const struct fs_part *a = &ask->parts[i], *g = &got->parts[i];

		another = part_is_another(a, g);
		fewer = fewer ||
			(a->stripe_count != FS_ALL_TARGETS && g->stripe_count < a->stripe_count);
	}
	if (text_bytes)
		*text = 0;
	if (!another && !fewer)
		return 0;
	fs_layout_text(ask, asked, sizeof(asked));
	fs_layout_text(got, given, sizeof(given));
	snprintf(text, text_bytes, "layout %s was asked for, %s was given", asked,
		 got->count ? given : "none");
	return another ? 2 : 1;
}

/* ---- Any --------------------------------------------------------------------------------------
 */

static int ask_for(int directory_fd, const char *name, mode_t mode, enum fs_family family,
		   const struct fs_layout *ask, struct fs_answer *answer)
{
	switch (family) {
	case FS_LUSTRE:
		return fs_ask_lustre(directory_fd, name, mode, ask, answer);
	case FS_BEEGFS:
		return fs_ask_beegfs(directory_fd, name, mode, ask, answer);
	case FS_CEPH:
		return fs_ask_ceph(directory_fd, name, mode, ask, answer);
	default:
		snprintf(answer->why, sizeof(answer->why), "%s takes no layouts",
			 fs_family_name(family));
		return -EOPNOTSUPP;
	}
}

int fs_create_with_layout(int directory_fd, const char *name, mode_t mode, enum fs_family family,
			  const struct fs_layout *ask, char *note, size_t note_bytes)
{
	struct fs_answer answer = { 0 };
	char asked[TEXT_BYTES], given[TEXT_BYTES];
	int fd, differs;

	if (note_bytes)
		*note = 0;
	fd = ask_for(directory_fd, name, mode, family, ask, &answer);
	if (fd == -EEXIST)
		return fd;
	if (fd >= 0) {
		differs = fs_differs(ask, &answer.got, note, note_bytes);
		if (differs < 2 || (answer.plain && !*answer.why))
			return fd;
		if (!answer.plain) {
			unlinkat(directory_fd, name, 0);
			close(fd);
			fd = -1;
		}
	}
	/* A save matters more than its stripes. */
	fs_layout_text(ask, asked, sizeof(asked));
	fs_layout_text(&answer.got, given, sizeof(given));
	if (!*answer.why)
		snprintf(answer.why, sizeof(answer.why), "%s was given",
			 answer.got.count ? given : "none");
	snprintf(note, note_bytes,
		 "the file could not get the layout %s and has the directory's: %s", asked,
		 answer.why);
	return fd >= 0 ? fd : fs_create_plainly(directory_fd, name, mode, 0);
}
