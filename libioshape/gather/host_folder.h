/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The folder of a board in memory, and who lives in it: each rank has a file life-<rank> there,
 * which it has locked. The kernel drops the lock when the process ends, however it ends. A folder
 * whose life-0 is not locked is a dead job's. Private to this floor.
 */
#ifndef GATHER_HOST_FOLDER_H
#define GATHER_HOST_FOLDER_H

#include "gather/news.h"
#include "gather/place.h"

struct host_folder {
	char place[PLACE_PATH_BYTES];                         /* in which it is; "" for none */
	char path[PLACE_PATH_BYTES + GATHER_NAME_BYTES + 16]; /* its own */
	uint32_t rank;
	int fd;
	int life_fd;  /* our own, locked */
	int rank0_fd; /* rank 0's; rank 0: -1 */
	struct news news;
};

void host_folder_init(struct host_folder *folder, const struct gather_board_config *config);
/*
 * Rank 0 makes it, and removes those of dead jobs. 0 or a negative errno; -EADDRINUSE: a rank 0
 * that lives has one of this name.
 */
int host_folder_take(struct host_folder *folder);
/* The others: -ENOENT if there is none yet, -EEXIST if it has had a rank of this number. */
int host_folder_join(struct host_folder *folder);
/* The descriptor of the folder itself is left alone if keep_fd is set. */
void host_folder_leave(struct host_folder *folder, bool keep_fd);

/* Whether this rank has been here, and has ended. */
bool host_folder_is_gone(const struct host_folder *folder, uint32_t rank);
/* Sets here[rank] for all who have come. */
void host_folder_count(const struct host_folder *folder, bool *here, uint32_t ranks);

#endif
