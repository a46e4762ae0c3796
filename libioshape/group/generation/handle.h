/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the group floor: the public handle of a generation. */
#ifndef GROUP_GENERATION_HANDLE_H
#define GROUP_GENERATION_HANDLE_H

#include "group/generation/generation.h"

struct ioshape_generation {
	struct ioshape_context *context;
	struct ring_folder directory;
	struct group_generation found;
	char name[GROUP_ATTEMPT_NAME_BYTES]; /* of its directory when it was opened */
	pthread_mutex_t lock;                /* of the texts below, which are made at need */
	char **paths;                        /* of files */
	char **part_names;                   /* by rank, where they are not those of files */
};

/* The path of a file, for as long as the handle lives; NULL if there is no memory. */
const char *group_generation_path(struct ioshape_generation *generation, uint32_t file);

/* After -ENOENT: says so, if the file is on the tier of another node. */
void group_generation_explain(const struct ioshape_generation *generation, const char *path,
			      struct base_error *error);

/* -ESTALE if another took its place: what lies at its paths is not what the manifest tells of. */
int group_generation_check_place(const struct ioshape_generation *generation,
				 struct base_error *error);

/*
 * Compares the parts of ranks `first`, `first` + `stride`, ... with the manifest's checksums: all
 * bytes of each. IOSHAPE_E_DAMAGED for the first that differs. `progress` is not NULL.
 */
int group_verify_parts(struct ioshape_generation *generation, uint32_t first, uint32_t stride,
		       ioshape_progress_fn progress, void *progress_user, struct base_error *error);

#endif
