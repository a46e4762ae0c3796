/* SPDX-License-Identifier: Apache-2.0 */
/* What the filesystem that is played says about layouts: which of them is asked. */
#include "stripefs.h"

#include <errno.h>

ssize_t layout_attribute(const struct node *node, const char *name, char *blob)
{
	(void)node;
	(void)name;
	(void)blob;
	return -EOPNOTSUPP;
}

int set_layout_attribute(struct node *node, const char *name, const char *value, size_t bytes)
{
	(void)node;
	(void)name;
	(void)value;
	(void)bytes;
	return -EOPNOTSUPP;
}
