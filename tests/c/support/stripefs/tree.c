/* SPDX-License-Identifier: Apache-2.0 */
/* The tree of files, directories and names, in memory. */
#include "stripefs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BUCKETS = 1 << 16 };

static struct entry *buckets[BUCKETS];
static struct node *root;
static uint64_t last_number, nodes;

static void *must_allocate(size_t count, size_t bytes)
{
	void *memory = calloc(count, bytes);

	if (!memory)
		abort();
	return memory;
}

struct node *tree_root(void)
{
	return root;
}

uint64_t tree_nodes(void)
{
	return nodes;
}

struct node *node_of(fuse_ino_t ino)
{
	return ino == FUSE_ROOT_ID ? root : (struct node *)(uintptr_t)ino;
}

fuse_ino_t ino_of(const struct node *node)
{
	return node == root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)node;
}

void node_touch(struct node *node, bool modified)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	node->stat.st_ctim = now;
	node->known_to &= asking;
	if (modified) {
		node->stat.st_mtim = now;
		node->read_by &= asking;
	}
}

struct node *node_create(struct node *directory, mode_t mode, const struct fuse_ctx *context)
{
	struct node *node = must_allocate(1, sizeof(*node));

	node->stat.st_ino = ++last_number;
	node->stat.st_mode = mode;
	node->stat.st_uid = context ? context->uid : 0;
	node->stat.st_gid = context ? context->gid : 0;
	if (directory && directory->stat.st_mode & S_ISGID) {
		node->stat.st_gid = directory->stat.st_gid;
		if (S_ISDIR(mode))
			node->stat.st_mode |= S_ISGID;
	}
	/* Real clients report this block size, whatever the stripe size is. */
	node->stat.st_blksize = options.play == PLAY_LUSTRE ? 4 << 20 :
				options.play == PLAY_BEEGFS ? 512 << 10 :
				options.play == PLAY_CEPH   ? 4 << 20 :
							      1 << 20;
	node->next_cookie = 3; /* after "." and ".." */
	node_touch(node, true);
	node->stat.st_atim = node->stat.st_mtim;
	if (S_ISDIR(mode)) {
		node->stat.st_nlink = 2;
		node->stat.st_size = PAGE;
	}
	nodes++;
	return node;
}

void tree_open(void)
{
	root = node_create(NULL, S_IFDIR | 0777, NULL);
	root->parent = root;
	root->lookups = 1;
}

void node_settle(struct node *node)
{
	const nlink_t unlinked = S_ISDIR(node->stat.st_mode) ? 1 : 0;

	if (node->opens || node->stat.st_nlink > unlinked || node->oldest || node->leaving ||
	    node->waiters)
		return;
	/*
	 * A client that missed the removal of a file may keep references to it for long, so its
	 * space is freed first.
	 */
	if (S_ISREG(node->stat.st_mode))
		content_truncate(node, 0);
	if (node->lookups)
		return;
	while (node->attributes) {
		struct attribute *attribute = node->attributes;

		node->attributes = attribute->next;
		free(attribute->name);
		free(attribute->value);
		free(attribute);
	}
	free(node->link);
	free(node->layout);
	free(node->blocks);
	free(node);
	nodes--;
}

static struct entry **bucket_of(const struct node *directory, const char *name)
{
	uint64_t hash = directory->stat.st_ino * UINT64_C(0x9e3779b97f4a7c15);

	for (; *name; name++)
		hash = (hash ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
	return &buckets[(hash ^ hash >> 32) % BUCKETS];
}

struct entry *entry_find(struct node *directory, const char *name)
{
	struct entry *entry = *bucket_of(directory, name);

	while (entry && (entry->directory != directory || strcmp(entry->name, name) != 0))
		entry = entry->hash_next;
	return entry;
}

struct entry *entry_add(struct node *directory, const char *name, struct node *node)
{
	struct entry **bucket = bucket_of(directory, name);
	struct entry *entry = must_allocate(1, sizeof(*entry) + strlen(name) + 1);

	memcpy(entry->name, name, strlen(name) + 1);
	entry->directory = directory;
	entry->node = node;
	entry->known_to = asking;
	entry->cookie = directory->next_cookie++;
	entry->hash_next = *bucket;
	*bucket = entry;
	entry->previous = directory->last;
	*(entry->previous ? &entry->previous->next : &directory->first) = entry;
	directory->last = entry;
	if (S_ISDIR(node->stat.st_mode)) {
		node->parent = directory;
		directory->stat.st_nlink++;
		node->stat.st_nlink = 2;
	} else {
		node->stat.st_nlink++;
	}
	node_touch(directory, true);
	return entry;
}

void entry_remove(struct entry *entry)
{
	struct node *directory = entry->directory;
	struct entry **at = bucket_of(directory, entry->name);

	while (*at != entry)
		at = &(*at)->hash_next;
	*at = entry->hash_next;
	*(entry->previous ? &entry->previous->next : &directory->first) = entry->next;
	*(entry->next ? &entry->next->previous : &directory->last) = entry->previous;
	if (S_ISDIR(entry->node->stat.st_mode)) {
		directory->stat.st_nlink--;
		entry->node->stat.st_nlink = 1;
	} else {
		entry->node->stat.st_nlink--;
	}
	node_touch(entry->node, false);
	node_touch(directory, true);
	free(entry);
}
