/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: what directories of any kind have in common (folder_files.c). Answers are
 * 0 or a negative errno, without a sentence.
 */
#ifndef RING_FOLDER_H
#define RING_FOLDER_H

#include "ring/ring.h"

#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>

static inline int64_t ring_modified_ns(const struct stat *status)
{
	return (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

/* To list it. NULL and errno after a failure. Opened anew: all duplicates of a descriptor share the
 * position that listing moves. */
DIR *ring_listing(int folder_fd);

/* ".model.pt.ioshape-tmp-<lock domain>-<random>", the first part shortened so that it is a legal
 * name (domain.c). */
void ring_temporary_name(int folder_fd, const char *name, char into[NAME_MAX + 1]);

/* What a file has that is made there now: its owner and its time, as the server gives them
 * (domain.c). It is removed again. 0 or a negative errno. */
int ring_look_at_new(int folder_fd, struct stat *status);

/*
 * A new file that appears whole, in place of what has the name: on stable storage, or as it comes.
 * `mode` as for open(). Lists know it by its dot until then.
 */
int ring_put_whole(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		   mode_t mode);

/* Replaces what `into` holds by all of a regular file. -EPERM if it is none, -EFBIG if it is longer
 * than that. *status is what it was before. */
int ring_read_whole(int fd, size_t most_bytes, struct base_buffer *into, struct stat *status);

#endif
