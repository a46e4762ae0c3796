/* SPDX-License-Identifier: Apache-2.0 */
/* Extended attributes: those of users, and those that describe layouts. */
#include "stripefs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>

enum { MOST_BYTES = 1 << 16 };

static struct attribute **find(struct node *node, const char *name)
{
	struct attribute **at = &node->attributes;

	while (*at && strcmp((*at)->name, name) != 0)
		at = &(*at)->next;
	return at;
}

/* Returns whether an attribute of this name is only stored, without a meaning to the filesystem. */
static bool is_plain(const char *name)
{
	return strncmp(name, "user.", 5) == 0 || strncmp(name, "trusted.", 8) == 0 ||
	       strncmp(name, "security.", 9) == 0;
}

static void do_getxattr(fuse_req_t request, fuse_ino_t ino, const char *name, size_t room)
{
	struct node *node = node_of(ino);
	struct attribute *attribute;
	static char blob[MOST_BYTES];
	ssize_t bytes = -EOPNOTSUPP;

	bytes = layout_attribute(node, name, blob);
	if (bytes != -EOPNOTSUPP) {
		if (bytes < 0)
			answer_error(request, OP_GETXATTR, (int)-bytes);
		else
			answer_value(request, blob, (size_t)bytes, room);
		return;
	}
	if (!is_plain(name)) {
		/* The kernel also asks for access control lists, which stripefs lacks. */
		fuse_reply_err(request, EOPNOTSUPP);
		return;
	}
	attribute = *find(node, name);
	if (attribute)
		answer_value(request, attribute->value, attribute->bytes, room);
	else
		answer_error(request, OP_GETXATTR, ENODATA);
}

static int set(struct node *node, const char *name, const char *value, size_t bytes, int flags)
{
	struct attribute **at = find(node, name), *attribute = *at;
	char *copy;

	if (attribute && flags & XATTR_CREATE)
		return EEXIST;
	if (!attribute && flags & XATTR_REPLACE)
		return ENODATA;
	if (bytes > MOST_BYTES)
		return E2BIG;
	copy = malloc(bytes + 1);
	if (!copy)
		abort();
	memcpy(copy, value, bytes);
	if (!attribute) {
		attribute = *at = calloc(1, sizeof(*attribute));
		if (!attribute || !(attribute->name = strdup(name)))
			abort();
	}
	free(attribute->value);
	attribute->value = copy;
	attribute->bytes = bytes;
	return 0;
}

static void do_setxattr(fuse_req_t request, fuse_ino_t ino, const char *name, const char *value,
			size_t bytes, int flags)
{
	struct node *node = node_of(ino);
	int result;

	result = -set_layout_attribute(node, name, value, bytes);
	if (result == EOPNOTSUPP && is_plain(name))
		result = set(node, name, value, bytes, flags);
	answer_error(request, OP_SETXATTR, result);
}

static void do_removexattr(fuse_req_t request, fuse_ino_t ino, const char *name)
{
	struct attribute **at = find(node_of(ino), name), *attribute = *at;

	if (attribute) {
		*at = attribute->next;
		free(attribute->name);
		free(attribute->value);
		free(attribute);
	}
	answer_error(request, OP_SETXATTR, attribute ? 0 : ENODATA);
}

static void do_listxattr(fuse_req_t request, fuse_ino_t ino, size_t room)
{
	const struct node *node = node_of(ino);
	static char blob[MOST_BYTES];
	char *list = NULL;
	size_t bytes;
	FILE *text = open_memstream(&list, &bytes);

	if (!text)
		abort();
	if (layout_attribute(node, "lustre.lov", blob) >= 0)
		fwrite("lustre.lov", 1, sizeof("lustre.lov"), text);
	for (const struct attribute *at = node->attributes; at; at = at->next)
		fwrite(at->name, 1, strlen(at->name) + 1, text);
	if (fclose(text))
		abort();
	answer_value(request, list, bytes, room);
	free(list);
}

void attributes_operations(struct fuse_lowlevel_ops *operations)
{
	operations->getxattr = do_getxattr;
	operations->setxattr = do_setxattr;
	operations->removexattr = do_removexattr;
	operations->listxattr = do_listxattr;
}
