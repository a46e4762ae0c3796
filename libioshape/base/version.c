/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <ioshape/version.h>

IOSHAPE_EXPORT const char *ioshape_version(void)
{
	return IOSHAPE_VERSION;
}
