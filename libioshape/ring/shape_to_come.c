/* SPDX-License-Identifier: Apache-2.0 */
/* How a save would write, for who only wants to know. */
#define _GNU_SOURCE
#include "ring/calibrate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ring_shape_to_come(const struct ring_config *config, const char *directory,
		       const struct fs_layout *layout, uint64_t file_bytes,
		       struct ring_shape *shape, struct ring_calibration *calibration, char *why,
		       size_t why_bytes, struct base_error *error)
{
	/* For less than this nothing is tried. */
	const uint64_t untried_bytes = RING_TRIAL_FILE_BYTES - 1;
	struct ring_choice choice;
	char *path = NULL;

	if (asprintf(&path, "%s/calibration", directory) < 0)
		return base_no_memory(error, "a path", strlen(directory));
	ring_choose(config, path, MIN(MAX(file_bytes, 1), untried_bytes), &choice);
	free(path);
	if (!choice.known && file_bytes > untried_bytes && *choice.mount &&
	    !strcmp(choice.why, RING_NOT_LARGE_ENOUGH))
		snprintf(choice.why, sizeof(choice.why), "not calibrated so far");
	*shape = ring_shape_chosen(config, &choice, layout, file_bytes, why, why_bytes);
	memset(calibration, 0, sizeof(*calibration));
	if (choice.known)
		*calibration = choice.calibration;
	return 0;
}
