/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <time.h>

uint64_t base_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}
