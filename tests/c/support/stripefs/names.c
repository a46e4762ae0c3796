/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on names, directories and attributes of files. */
#include "stripefs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE (1 << 0)
#define RENAME_EXCHANGE (1 << 1)
#endif

static void do_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	struct entry *entry = entry_find(node_of(parent), name);

	if (!entry) {
		answer_error(request, OP_LOOKUP, ENOENT);
	} else if (entry->known_to & asking) {
		answer_known_entry(request, entry->node);
	} else {
		entry->known_to |= asking;
		answer_entry(request, OP_LOOKUP, entry->node);
	}
}

static void forget(fuse_ino_t ino, uint64_t count)
{
	struct node *node = node_of(ino);

	if (node == tree_root())
		return;
	node->lookups -= count;
	node_settle(node);
}

static void do_forget(fuse_req_t request, fuse_ino_t ino, uint64_t count)
{
	forget(ino, count);
	fuse_reply_none(request);
}

static void do_forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgets)
{
	for (size_t i = 0; i < count; i++)
		forget(forgets[i].ino, forgets[i].nlookup);
	fuse_reply_none(request);
}

static void do_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
	struct node *node = node_of(ino);

	(void)file;
	/*
	 * These answers are free. The kernel asks again for a directory after each change in it, to
	 * check permissions, and for what it has changed itself. A real client holds a lock that
	 * says that its copy is current.
	 */
	if (S_ISDIR(node->stat.st_mode))
		fuse_reply_attr(request, &node->stat, 0);
	else if (node->known_to & asking)
		fuse_reply_attr(request, &node->stat, answer_valid_s());
	else
		answer_attributes(request, OP_GETATTR, node);
}

static void do_setattr(fuse_req_t request, fuse_ino_t ino, struct stat *stat, int which,
		       struct fuse_file_info *file)
{
	struct node *node = node_of(ino);
	struct timespec now;

	(void)file;
	clock_gettime(CLOCK_REALTIME, &now);
	if (which & FUSE_SET_ATTR_SIZE) {
		if (S_ISDIR(node->stat.st_mode)) {
			answer_error(request, OP_SETATTR, EISDIR);
			return;
		}
		content_truncate(node, (uint64_t)stat->st_size);
		node->stat.st_mtim = now;
		node->read_by &= asking;
	}
	node->known_to &= asking;
	if (which & FUSE_SET_ATTR_MODE)
		node->stat.st_mode = (node->stat.st_mode & S_IFMT) | (stat->st_mode & 07777);
	if (which & FUSE_SET_ATTR_UID)
		node->stat.st_uid = stat->st_uid;
	if (which & FUSE_SET_ATTR_GID)
		node->stat.st_gid = stat->st_gid;
	if (which & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_ATIME_NOW))
		node->stat.st_atim = which & FUSE_SET_ATTR_ATIME_NOW ? now : stat->st_atim;
	if (which & (FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_MTIME_NOW))
		node->stat.st_mtim = which & FUSE_SET_ATTR_MTIME_NOW ? now : stat->st_mtim;
	node->stat.st_ctim = which & FUSE_SET_ATTR_CTIME ? stat->st_ctim : now;
	answer_attributes(request, OP_SETATTR, node);
}

/* Checks a name that is to be added. Returns 0 or an errno (positive). */
static int may_add(struct node *directory, const char *name)
{
	if (strlen(name) > 255)
		return ENAMETOOLONG;
	if (directory->stat.st_nlink < 2)
		return ENOENT;
	return entry_find(directory, name) ? EEXIST : 0;
}

static struct node *add(fuse_req_t request, struct node *directory, const char *name, mode_t mode)
{
	struct node *node = node_create(directory, mode, fuse_req_ctx(request));

	/* A new directory inherits the default layout. */
	if (S_ISDIR(mode) && directory->layout) {
		node->layout = malloc(sizeof(*node->layout));
		if (!node->layout)
			abort();
		*node->layout = *directory->layout;
	}
	entry_add(directory, name, node);
	return node;
}

static void do_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode)
{
	struct node *directory = node_of(parent);
	const int error = may_add(directory, name);

	if (error)
		answer_error(request, OP_MKDIR, error);
	else
		answer_entry(request, OP_MKDIR,
			     add(request, directory, name, S_IFDIR | (mode & 07777)));
}

static void do_mknod(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
		     dev_t device)
{
	struct node *directory = node_of(parent), *node;
	int error = may_add(directory, name);

	if (error) {
		answer_error(request, OP_MKNOD, error);
		return;
	}
	node = add(request, directory, name, mode);
	node->stat.st_rdev = device;
	if (S_ISREG(mode))
		file_lay_out(node, directory, false);
	answer_entry(request, OP_MKNOD, node);
}

static void do_symlink(fuse_req_t request, const char *link, fuse_ino_t parent, const char *name)
{
	struct node *directory = node_of(parent), *node;
	const int error = may_add(directory, name);

	if (error) {
		answer_error(request, OP_SYMLINK, error);
		return;
	}
	node = add(request, directory, name, S_IFLNK | 0777);
	node->link = strdup(link);
	if (!node->link)
		abort();
	node->stat.st_size = (off_t)strlen(link);
	answer_entry(request, OP_SYMLINK, node);
}

static void do_readlink(fuse_req_t request, fuse_ino_t ino)
{
	const struct node *node = node_of(ino);

	answer_bytes(request, OP_READLINK, node->link, strlen(node->link));
}

static void do_link(fuse_req_t request, fuse_ino_t ino, fuse_ino_t parent, const char *name)
{
	struct node *node = node_of(ino), *directory = node_of(parent);
	const int error = may_add(directory, name);

	if (error) {
		answer_error(request, OP_LINK, error);
		return;
	}
	entry_add(directory, name, node);
	node_touch(node, false);
	answer_entry(request, OP_LINK, node);
}

static void drop(struct entry *entry)
{
	struct node *node = entry->node;

	entry_remove(entry);
	node_settle(node);
}

static void do_unlink(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	struct entry *entry = entry_find(node_of(parent), name);

	if (entry)
		drop(entry);
	answer_error(request, OP_UNLINK, entry ? 0 : ENOENT);
}

static void do_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	struct entry *entry = entry_find(node_of(parent), name);
	int error = entry ? 0 : ENOENT;

	if (entry && entry->node->first)
		error = ENOTEMPTY;
	if (!error)
		drop(entry);
	answer_error(request, OP_RMDIR, error);
}

static void exchange(struct entry *a, struct entry *b)
{
	struct node *from = a->node, *to = b->node;

	a->node = to;
	b->node = from;
	if (S_ISDIR(from->stat.st_mode))
		from->parent = b->directory;
	if (S_ISDIR(to->stat.st_mode))
		to->parent = a->directory;
	a->directory->stat.st_nlink +=
		(nlink_t)(S_ISDIR(to->stat.st_mode) - S_ISDIR(from->stat.st_mode));
	b->directory->stat.st_nlink +=
		(nlink_t)(S_ISDIR(from->stat.st_mode) - S_ISDIR(to->stat.st_mode));
}

static int rename_entry(struct entry *from, struct node *directory, const char *name,
			unsigned int flags)
{
	struct entry *to = entry_find(directory, name);
	struct node *node;

	if (!from)
		return ENOENT;
	if (flags & RENAME_EXCHANGE) {
		if (to)
			exchange(from, to);
		return to ? 0 : ENOENT;
	}
	if (to && flags & RENAME_NOREPLACE)
		return EEXIST;
	node = from->node;
	if (to && to->node == node)
		return 0;
	if (to && to->node->first)
		return ENOTEMPTY;
	/* Keeps the node alive while it has no name. */
	node->lookups++;
	if (to)
		drop(to);
	entry_remove(from);
	entry_add(directory, name, node);
	node->lookups--;
	return 0;
}

static void do_rename(fuse_req_t request, fuse_ino_t parent, const char *name, fuse_ino_t to_parent,
		      const char *to_name, unsigned int flags)
{
	struct entry *from = entry_find(node_of(parent), name);

	answer_error(request, OP_RENAME, rename_entry(from, node_of(to_parent), to_name, flags));
}

static void do_opendir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
	(void)ino;
	fuse_reply_open(request, file);
}

static size_t add_name(fuse_req_t request, char *buffer, size_t room, const char *name,
		       const struct node *node, uint64_t cookie)
{
	const struct stat stat = { .st_ino = node->stat.st_ino, .st_mode = node->stat.st_mode };
	const size_t size = fuse_add_direntry(request, buffer, room, name, &stat, (off_t)cookie);

	return size <= room ? size : 0;
}

static void do_readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t after,
		       struct fuse_file_info *file)
{
	const struct node *directory = node_of(ino);
	const struct entry *entry = directory->first;
	char *buffer = malloc(size);
	size_t used = 0, more = 1;

	(void)file;
	if (!buffer)
		abort();
	if (after < 1)
		used += add_name(request, buffer, size, ".", directory, 1);
	if (after < 2)
		used += add_name(request, buffer + used, size - used, "..", directory->parent, 2);
	while (entry && (off_t)entry->cookie <= after)
		entry = entry->next;
	for (; entry && more; entry = entry->next) {
		more = add_name(request, buffer + used, size - used, entry->name, entry->node,
				entry->cookie);
		used += more;
	}
	answer_bytes(request, OP_READDIR, buffer, used);
	free(buffer);
}

static void do_releasedir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
	(void)ino;
	(void)file;
	fuse_reply_err(request, 0);
}

static void do_statfs(fuse_req_t request, fuse_ino_t ino)
{
	struct statvfs statfs = {
		.f_bsize = PAGE,
		.f_frsize = PAGE,
		.f_namemax = 255,
		.f_files = 1 << 24,
	};
	uint64_t used = 0, free = 0;

	(void)ino;
	for (unsigned int i = 0; i < options.targets; i++) {
		used += targets[i].used_bytes;
		free += target_free(&targets[i]);
	}
	statfs.f_blocks = (used + free) / PAGE;
	statfs.f_bfree = statfs.f_bavail = free / PAGE;
	statfs.f_ffree = statfs.f_favail = statfs.f_files - tree_nodes();
	answer_statfs(request, &statfs);
}

void names_operations(struct fuse_lowlevel_ops *operations)
{
	operations->lookup = do_lookup;
	operations->forget = do_forget;
	operations->forget_multi = do_forget_multi;
	operations->getattr = do_getattr;
	operations->setattr = do_setattr;
	operations->mkdir = do_mkdir;
	operations->mknod = do_mknod;
	operations->symlink = do_symlink;
	operations->readlink = do_readlink;
	operations->link = do_link;
	operations->unlink = do_unlink;
	operations->rmdir = do_rmdir;
	operations->rename = do_rename;
	operations->opendir = do_opendir;
	operations->readdir = do_readdir;
	operations->releasedir = do_releasedir;
	operations->statfs = do_statfs;
}
