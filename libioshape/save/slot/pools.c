/* SPDX-License-Identifier: Apache-2.0 */
/* The pools of a context. */
#define _GNU_SOURCE
#include "save/slot/pools.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * Writers at a time where nothing else was set: one keeps the storage busy, another fills the
 * gaps while it creates, syncs and renames (docs/performance.md).
 */
#define DEFAULT_CAPACITY 2u
/* Where nothing is told and requests are counted (ring/depth.c), each has few in flight. */
#define BLIND_CAPACITY 8u

/* CephFS and GlusterFS do not tell how many servers they have, and two files leave some idle. A
 * file of CephFS is spread over many servers, a file of GlusterFS lies on one. */
#define CEPH_CAPACITY 3u
#define GLUSTER_CAPACITY 4u

/* A writer that waits for a share of time of its own waits no longer than this. */
#define MOST_STAGGER_MS 120000u
/* A writer that has moved nothing for so long loses its slot: longer than any sync or stop of a
 * healthy storage, and than several leases. */
#define LEAST_STALL_MS 120000u

struct save_pool_use {
	struct save_pool_use *next;
	struct slots_pool *pool;
};

/* Which pool a mount's saves use: finding that out again costs more than a small save. */
struct save_pool_of_mount {
	struct save_pool_of_mount *next;
	uint64_t mount;
	struct slots_pool *pool;
	struct fs_facts storage;
};

/* ---- Names ----------------------------------------------------------------------------------- */

static int check_pool_name(const char *name, struct base_error *error)
{
	size_t bytes = strlen(name);

	if (!bytes)
		return base_refuse(error, -EINVAL,
				   "the pool's name is empty" BASE_REMEDY "give one, or none");
	if (bytes >= SLOTS_NAME_BYTES)
		return base_refuse(error, -EINVAL,
				   "the pool's name has %zu characters" BASE_REMEDY "it takes %d",
				   bytes, SLOTS_NAME_BYTES - 1);
	/* Not repeated: who mistakes one for the other gives an address, with its password. */
	if (strspn(name, FS_POOL_CHARACTERS) != bytes)
		return base_refuse(error, -EINVAL,
				   "the pool's name has a character that none can have" BASE_REMEDY
				   "it takes letters, digits and ._:@+/-");
	return 0;
}

/* ---- A context's ----------------------------------------------------------------------------- */

/* Without a file it is the variable's. */
static int take_password(struct save_slots *slots, const char *file, struct base_error *error)
{
	const char *variable = secure_getenv("IOSHAPE_PASSWORD");
	const bool used = variable && *variable && !(file && *file);

	slots->password = used ? strdup(variable) : NULL;
	return used && !slots->password ? base_no_memory(error, "a password", strlen(variable)) : 0;
}

static int copy_text(char **into, const char *from, struct base_error *error)
{
	if (!from || !*from)
		return 0;
	*into = strdup(from);
	return *into ? 0 : base_no_memory(error, "a setting", strlen(from));
}

int save_slots_init(struct save_slots *slots, const struct ioshape_context_options *options,
		    const struct base_log *log, struct base_error *error)
{
	struct slots_pool *trial;
	int ret;

	memset(slots, 0, sizeof(*slots));
	pthread_mutex_init(&slots->lock, NULL);
	ret = copy_text(&slots->address, options->coordinator, error);
	if (!ret)
		ret = copy_text(&slots->pool_name, options->pool, error);
	if (!ret && slots->pool_name && check_pool_name(slots->pool_name, error))
		ret = base_settings_blame(error, "pool", options->pool);
	if (!ret)
		ret = copy_text(&slots->password_file, options->password_file, error);
	if (!ret)
		ret = take_password(slots, options->password_file, error);
	if (ret)
		goto fail;
	slots->policy = (struct slots_policy){ options->unreachable, MOST_STAGGER_MS,
					       MAX(LEAST_STALL_MS, 8 * options->lease_ms) };
	slots->config = (struct slots_config){
		.address = slots->address,
		.password = slots->password,
		.password_file = slots->password_file,
		.lease_ms = options->lease_ms,
		.asked_capacity = options->slots,
		.default_capacity = DEFAULT_CAPACITY,
		.rate = options->rate,
		.log = *log,
	};
	slots_identify(&slots->config.identity, options->job, options->share);
	/* So that a mistake in the address is not found out by the first save. */
	snprintf(slots->config.pool, sizeof(slots->config.pool), "trial");
	ret = slots_pool_open(&trial, &slots->config, &slots->policy, error);
	if (ret) {
		base_settings_blame(error, "coordinator", options->coordinator);
		goto fail;
	}
	slots_pool_close(trial);
	return 0;
fail:
	save_slots_destroy(slots);
	return ret;
}

void save_slots_destroy(struct save_slots *slots)
{
	while (slots->mounts) {
		struct save_pool_of_mount *first = slots->mounts;

		slots->mounts = first->next;
		free(first);
	}
	while (slots->pools) {
		struct save_pool_use *first = slots->pools;

		slots->pools = first->next;
		slots_pool_close(first->pool);
		free(first);
	}
	base_free_secret(slots->address);
	base_free_secret(slots->password);
	free(slots->password_file);
	free(slots->pool_name);
	pthread_mutex_destroy(&slots->lock);
}

/* ---- Pools ----------------------------------------------------------------------------------- */

/* The lock is held. */
static int find_or_open(struct save_slots *slots, const char *name, struct slots_pool **pool,
			struct base_error *error)
{
	struct slots_config config = slots->config;
	struct save_pool_use *use;
	int ret;

	for (use = slots->pools; use; use = use->next) {
		if (!strcmp(slots_pool_name(use->pool), name)) {
			*pool = use->pool;
			return 0;
		}
	}
	use = calloc(1, sizeof(*use));
	if (!use)
		return base_no_memory(error, "a pool of slots", sizeof(*use));
	snprintf(config.pool, sizeof(config.pool), "%s", name);
	slots_identify_client(&config.identity);
	ret = slots_pool_open(&use->pool, &config, &slots->policy, error);
	if (ret) {
		free(use);
		return ret;
	}
	use->next = slots->pools;
	slots->pools = use;
	*pool = use->pool;
	return 0;
}

int save_slots_named(struct save_slots *slots, const char *name, struct slots_pool **pool,
		     struct base_error *error)
{
	/* The context's own was checked when that was opened. */
	int ret = name ? check_pool_name(name, error) : 0;

	if (ret)
		return ret;
	if (!name)
		name = slots->pool_name;
	if (!name)
		return base_refuse(error, -EINVAL,
				   "no pool was given" BASE_REMEDY
				   "name one, or set it for the context");
	pthread_mutex_lock(&slots->lock);
	ret = find_or_open(slots, name, pool, error);
	pthread_mutex_unlock(&slots->lock);
	return ret;
}

/* Of the directory of a path. What cannot be opened has no storage to tell of. */
static void look_at_storage(const char *path, uint64_t mount, struct fs_facts *storage)
{
	char *directory = base_directory_of(path);
	struct ring_folder folder = RING_NO_FOLDER;
	struct fs_memory memory = { 0 };
	uint64_t its_mount;

	/* The path may be a link to somewhere else. */
	if (directory && !fs_mount_of_path(directory, &its_mount) && its_mount == mount &&
	    !ring_folder_open(&folder, directory, NULL))
		save_look_at_storage(folder.fd, directory, &memory, storage);
	ring_folder_close(&folder);
	free(directory);
}

/* The lock is held. */
static int find_mount(struct save_slots *slots, const char *path, uint64_t mount,
		      struct save_pool_of_mount **out, struct base_error *error)
{
	struct save_pool_of_mount *known;
	struct slots_pool *pool;
	char name[FS_POOL_BYTES];
	int ret;

	for (known = slots->mounts; known && known->mount != mount; known = known->next)
		;
	*out = known;
	if (known)
		return 0;
	ret = fs_pool_of_path(path, name, error);
	if (!ret)
		ret = find_or_open(slots, name, &pool, error);
	if (ret)
		return ret;
	known = calloc(1, sizeof(*known));
	if (!known)
		return base_no_memory(error, "a pool of slots", sizeof(*known));
	*known = (struct save_pool_of_mount){ slots->mounts, mount, pool, { 0 } };
	/* The layout of the first directory that is written to stands for all of them: what the
	 * storage is made of is the same. */
	look_at_storage(path, mount, &known->storage);
	slots->mounts = known;
	*out = known;
	return 0;
}

uint32_t save_slots_usual(const struct save_slots *slots, enum fs_family family)
{
	if (family == FS_CEPH || family == FS_GLUSTER)
		return family == FS_CEPH ? CEPH_CAPACITY : GLUSTER_CAPACITY;
	return fs_cuts_requests(family) ? BLIND_CAPACITY : slots->config.default_capacity;
}

int save_slots_of_path(struct save_slots *slots, const char *path, const struct fs_found *at,
		       const struct save_expected *expected, struct slots_pool **pool,
		       uint32_t *capacity, struct base_error *error)
{
	struct save_pool_of_mount *found;
	struct fs_facts storage;
	struct fs_layout layout;
	int ret;

	*capacity = 0;
	if (slots->pool_name)
		return save_slots_named(slots, NULL, pool, error);
	/* Without a coordinator it makes no difference where they write. */
	if (slots_coordinator_of(slots->address) == &slots_open)
		return save_slots_named(slots, "open", pool, error);
	if (at->code)
		return base_fail(error, at->code, "cannot look at the directory of \"%s\"", path);
	pthread_mutex_lock(&slots->lock);
	ret = find_mount(slots, path, at->mount, &found, error);
	if (!ret) {
		*pool = found->pool;
		storage = found->storage;
	}
	pthread_mutex_unlock(&slots->lock);
	if (!ret)
		*capacity = save_stripes_of(&storage, expected, &layout);
	if (!ret && !*capacity)
		*capacity = save_slots_usual(slots, storage.family);
	return ret;
}

void save_slots_note_layout(struct save_slots *slots, uint64_t mount,
			    const struct fs_layout *layout)
{
	struct save_pool_of_mount *known;

	if (!layout->count)
		return;
	pthread_mutex_lock(&slots->lock);
	for (known = slots->mounts; known && known->mount != mount; known = known->next)
		;
	if (known && fs_takes_layouts(known->storage.family) && !known->storage.directory.count)
		known->storage.directory = *layout;
	pthread_mutex_unlock(&slots->lock);
}

/* ---- For Python ------------------------------------------------------------------------------ */

int save_find_coordinator(struct ioshape_context *context, const char *pool,
			  struct slots_coordinator *found)
{
	const struct slots_ops *ops;
	struct base_error error = { 0 };
	struct slots_config config;
	int ret = save_enter(context, &error);

	memset(found, 0, sizeof(*found));
	if (!ret && pool)
		ret = check_pool_name(pool, &error);
	if (!ret) {
		config = context->slots.config;
		snprintf(config.pool, sizeof(config.pool), "%s", pool ? pool : "");
		found->lease_ms = config.lease_ms;
		found->default_capacity = config.default_capacity;
		ops = slots_coordinator_of(config.address);
		ret = ops->describe ?
			      ops->describe(&config, found, &error) :
			      base_refuse(&error, -ENOTSUP,
					  "there are no pools without coordination" BASE_REMEDY
					  "set another coordinator than \"open\"");
	}
	return base_leave(ret, "status", NULL, &error);
}
