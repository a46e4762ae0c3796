/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes checkpoints of many ranks from existing files, as a group would, for tests/python.
 *
 *   checkpoint write DIR STEP each|rank0 FILE...    the files of rank 0, rank 1, ...
 *   checkpoint begin DIR STEP    begins a checkpoint and keeps it open until stdin is closed;
 *   then ends without cleaning up
 */
#define _GNU_SOURCE
#include "support/checkpoint_files.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct group_attempt attempt;
	struct base_error error = { 0 };
	char byte;

	if (argc < 4)
		return 2;
	MUST(!group_attempt_begin(&attempt, argv[2], strtoull(argv[3], NULL, 10), NULL, "0000471a",
				  NULL, &error),
	     "%s", error.text);
	if (!strcmp(argv[1], "begin")) {
		MUST(!io_folder_put(&attempt.folder, "rank-00000.pt", "half", 4, &error), "%s",
		     error.text);
		puts(group_attempt_path(&attempt));
		fflush(stdout);
		return read(0, &byte, 1) < 0;
	}
	checkpoint_write(&attempt, !strcmp(argv[4], "each"), time(NULL), argv + 5,
			 (uint32_t)argc - 5);
	return 0;
}
