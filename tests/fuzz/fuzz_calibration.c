/* SPDX-License-Identifier: Apache-2.0 */
/* Any text as a calibration that somebody remembered. What is accepted is what is printed of it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "ring/calibrate.h"

#define MOUNT "host-disk"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct ring_calibration calibration;
	char text[RING_CALIBRATION_TEXT_BYTES];
	/* Of its own, so that a read beyond it is noticed. */
	char *copy = malloc(bytes ? bytes : 1);
	int ret;

	MUST(copy);
	if (bytes)
		memcpy(copy, data, bytes);
	ret = ring_calibration_parse(MOUNT, copy, bytes, &calibration);
	MUST(!ret || ret == -EINVAL);
	if (!ret) {
		MUST(ring_calibration_print(MOUNT, &calibration, text, sizeof(text)) == bytes);
		MUST(!memcmp(text, copy, bytes));
		MUST(calibration.bytes_per_s);
	}
	free(copy);
	return 0;
}
