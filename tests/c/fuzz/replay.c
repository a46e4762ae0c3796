/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces libFuzzer: runs a target once with each file on the command line. */
#include "fuzz.h"

int main(int count, char **paths)
{
	static uint8_t data[4 << 20];

	for (int i = 1; i < count; i++) {
		FILE *file = fopen(paths[i], "rb");

		MUST(file);
		LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof(data), file));
		fclose(file);
	}
	return 0;
}
