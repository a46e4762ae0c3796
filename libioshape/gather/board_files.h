/* SPDX-License-Identifier: Apache-2.0 */
/* gather_board_files, for the board that keeps its notes in the same way: board_host.c. */
#ifndef GATHER_BOARD_FILES_H
#define GATHER_BOARD_FILES_H

#include "gather/board.h"

/*
 * A board of files in a folder that is there. It is held open, so that nobody can put another one
 * in its place; folder_fd is the board's from then on, if it succeeds.
 */
int files_open_held(struct gather_board **out, const struct gather_board_config *config,
		    const char *path, int folder_fd, struct base_error *error);
/* Posts what `from` has posted, and not dropped. */
int files_copy(struct gather_board *to, const struct gather_board *from, struct base_error *error);
/* Whether the folder is there in which gather_board_files keeps its notes. */
bool files_are_beside(const struct gather_board_config *config);

#endif
