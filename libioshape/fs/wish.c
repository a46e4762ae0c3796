/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts that are asked for: the setting, and the rule. */
#include "fs/fs.h"

#include <errno.h>
#include <string.h>

int fs_wish_parse(const char *text, struct fs_wish *wish, struct base_error *error)
{
	memset(wish, 0, sizeof(*wish));
	if (!strcmp(text, "auto")) {
		wish->kind = FS_WISH_AUTO;
		return 0;
	}
	if (!strcmp(text, "directory")) {
		wish->kind = FS_WISH_DIRECTORY;
		return 0;
	}
	return base_fail(error, -EINVAL,
			 "the layout \"%s\" is not understood; it takes auto, directory, or such "
			 "as stripe_count=8,stripe_size=4M,pool=flash",
			 text);
}
