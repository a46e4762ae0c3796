/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <stdio.h>

int base_umask(void)
{
	FILE *status = fopen("/proc/self/status", "re");
	unsigned mask;
	char line[256];
	int found = -1;

	/* It stands in one of the first lines. */
	while (status && found < 0 && fgets(line, sizeof(line), status))
		if (sscanf(line, "Umask: %o", &mask) == 1)
			found = (int)(mask & 0777);
	if (status)
		fclose(status);
	return found;
}
