/* SPDX-License-Identifier: Apache-2.0 */
/* Mechanisms that are left out to find out what they are worth. Only in a build with
 * -Dablation=true. */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

bool base_without(const char *mechanism)
{
	const char *left_out = secure_getenv("IOSHAPE_TEST_WITHOUT");

	return left_out && !strcmp(left_out, mechanism);
}
