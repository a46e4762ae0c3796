/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <ioshape/ioshape.h>

#include <stdlib.h>

IOSHAPE_EXPORT void ioshape_free(void *memory)
{
	free(memory);
}

IOSHAPE_EXPORT const char *ioshape_version(void)
{
	return IOSHAPE_VERSION;
}
