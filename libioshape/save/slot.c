/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of a context: its pools, the slots that its saves and files take, and the public calls on
 * slots. */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/*
 * Default number of writers at a time. One keeps the storage busy, and another fills the gaps while
 * the first one creates, syncs and renames (docs/performance.md).
 */
#define DEFAULT_CAPACITY 2u
/* Capacity of filesystems that do not report their targets, where the in-flight controller
 * (io/depth.c) gives each writer few requests. */
#define BLIND_CAPACITY 8u

/* CephFS and GlusterFS do not report their number of servers, and two files leave some idle. A file
 * of CephFS is spread over many servers, a file of GlusterFS is on one. */
#define CEPH_CAPACITY 3u
#define GLUSTER_CAPACITY 4u

/* Longest staggered start of a writer while the coordinator is unreachable. */
#define MOST_STAGGER_MS 120000u
/* A writer without progress for so long loses its slot. This is longer than any sync or pause of a
 * healthy storage, and longer than several leases. */
#define STALL_MS 120000u

/* A writer without a heartbeat for so long counts as dead. */
#define LEASE_MS 15000u

struct save_pool_use {
	struct save_pool_use *next;
	struct slots_pool *pool;
};

/* The pool for saves to a mount, remembered because finding it costs more than a small save. */
struct save_pool_of_mount {
	struct save_pool_of_mount *next;
	uint64_t mount;
	struct slots_pool *pool;
	struct fs_facts storage;
};

/* ---- Storage below a directory --------------------------------------------------------------- */

void save_look_at_storage(int directory_fd, const char *directory, struct fs_memory *memory,
			  struct fs_facts *facts)
{
	struct fs_info info;

	memset(facts, 0, sizeof(*facts));
	if (fs_describe(directory_fd, directory, memory, &info, NULL))
		return;
	facts->family = info.family;
	facts->directory = info.layout;
	facts->targets = fs_remembered_targets(directory_fd, memory);
}

uint32_t save_stripes_of(const struct fs_facts *storage, const struct save_expected *expected,
			 struct fs_layout *layout)
{
	struct fs_facts facts = *storage;

	facts.file_bytes = expected->bytes;
	facts.writers = expected->files;
	if (fs_choose_layout(expected->request, &facts, layout, NULL, 0) <= 0)
		*layout = facts.directory;
	return fs_capacity(facts.targets, layout, facts.file_bytes);
}

/* ---- Names of pools -------------------------------------------------------------------------- */

static int check_pool_name(const char *name, struct base_error *error)
{
	size_t bytes = strlen(name);

	if (!bytes)
		return base_fail_reason_with(error, -EINVAL, "give a name or leave it out",
					     "the pool's name is empty");
	if (bytes >= SLOTS_NAME_BYTES)
		return base_fail_reason_with(error, -EINVAL,
					     BASE_WORDS("it takes %d", SLOTS_NAME_BYTES - 1),
					     "the pool's name has %zu characters", bytes);
	/* The message does not quote the name: a user who confuses the settings gives an address
	 * here, with its password. */
	if (strspn(name, FS_POOL_CHARACTERS) != bytes)
		return base_fail_reason_with(error, -EINVAL, "it takes letters, digits and ._:@+/-",
					     "the pool's name has a character that is not allowed");
	return 0;
}

/* ---- Settings of a context ------------------------------------------------------------------- */

/* Takes the password from IOSHAPE_PASSWORD, unless a password file is set. */
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
		    uint32_t lease_ms, const struct base_log *log, struct base_error *error)
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
	slots->policy = (struct slots_policy){ options->unreachable, MOST_STAGGER_MS, STALL_MS };
	slots->config = (struct slots_config){
		.address = slots->address,
		.password = slots->password,
		.password_file = slots->password_file,
		.lease_ms = lease_ms ? lease_ms : LEASE_MS,
		.asked_capacity = options->slots,
		.default_capacity = DEFAULT_CAPACITY,
		.rate = options->rate,
		.log = *log,
	};
	slots_identify(&slots->config.identity, options->job, options->share);
	/* Open a pool for a moment, so that a mistake in the address is reported now and not by the
	 * first save. */
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

void save_name_program(struct ioshape_context *context, const char *program, const char *path)
{
	slots_identify_program(&context->slots.config.identity, program, path);
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

/* Finds the pool of this name, or opens it. The caller holds the lock. */
static int find_or_open(struct save_slots *slots, const char *name, struct slots_pool **pool,
			struct base_error *error)
{
	struct slots_config config;
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
	config = slots->config;
	snprintf(config.pool, sizeof(config.pool), "%s", name);
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

/* Finds a pool by its name; NULL: the context's pool. The pool lives as long as the context. */
static int save_slots_named(struct save_slots *slots, const char *name, struct slots_pool **pool,
			    struct base_error *error)
{
	/* The name of the context's pool was checked when the context was opened. */
	int ret = name ? check_pool_name(name, error) : 0;

	if (ret)
		return ret;
	if (!name)
		name = slots->pool_name;
	if (!name)
		return base_fail_reason_with(error, -EINVAL,
					     "name a pool, or set it for the context",
					     "no pool was given");
	pthread_mutex_lock(&slots->lock);
	ret = find_or_open(slots, name, pool, error);
	pthread_mutex_unlock(&slots->lock);
	return ret;
}

/* Finds out about the storage below a directory. One that cannot be opened leaves zeros. */
static void look_at_storage(const char *directory, struct fs_facts *storage)
{
	struct io_folder folder = IO_NO_FOLDER;
	struct fs_memory memory = { 0 };

	if (!io_folder_open(&folder, directory, NULL))
		save_look_at_storage(folder.fd, directory, &memory, storage);
	io_folder_close(&folder);
}

/* Returns a path's directory, for the caller to free; NULL if it is on another mount than the path,
 * which is a link then. */
static char *directory_on(const char *path, uint64_t mount)
{
	char *directory = base_directory_of(path);
	struct fs_found at;

	if (!directory)
		return NULL;
	fs_find(directory, &at);
	if (!at.code && at.mount == mount)
		return directory;
	free(directory);
	return NULL;
}

/* Adds a mount whose pool and storage are not known yet. The caller holds the lock. */
static int add_mount(struct save_slots *slots, const char *path, const char *directory,
		     uint64_t mount, struct base_error *error)
{
	struct save_pool_of_mount *known;
	struct slots_pool *pool;
	char name[FS_POOL_BYTES];
	/* The file does not exist yet, so a look at it would cost a request to the server. */
	int ret = fs_pool_of_path(directory ? directory : path, name, error);

	if (!ret)
		ret = find_or_open(slots, name, &pool, error);
	if (ret)
		return ret;
	known = calloc(1, sizeof(*known));
	if (!known)
		return base_no_memory(error, "a pool of slots", sizeof(*known));
	*known = (struct save_pool_of_mount){ slots->mounts, mount, pool, { 0 } };
	/* The layout of the first directory stands for all directories of the mount, because they
	 * share the storage. */
	if (directory)
		look_at_storage(directory, &known->storage);
	slots->mounts = known;
	return 0;
}

/* Finds the pool of a mount, or opens it. The caller holds the lock. */
static int find_mount(struct save_slots *slots, const char *path, uint64_t mount,
		      struct save_pool_of_mount **out, struct base_error *error)
{
	struct save_pool_of_mount *known;
	char *directory;
	int ret = 0;

	for (known = slots->mounts; known && known->mount != mount; known = known->next)
		;
	if (!known) {
		directory = directory_on(path, mount);
		ret = add_mount(slots, path, directory, mount, error);
		free(directory);
		known = ret ? NULL : slots->mounts;
	}
	*out = known;
	return ret;
}

uint32_t save_slots_usual(const struct save_slots *slots, enum fs_family family)
{
	if (family == FS_CEPH || family == FS_GLUSTER)
		return family == FS_CEPH ? CEPH_CAPACITY : GLUSTER_CAPACITY;
	return fs_cuts_requests(family) ? BLIND_CAPACITY : slots->config.default_capacity;
}

/* Finds the pool for a path. *capacity receives how many such files may be written at a time by
 * rule, whatever the settings say. */
static int save_slots_of_path(struct save_slots *slots, const char *path, const struct fs_found *at,
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
	/* Without coordination the filesystem makes no difference. */
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

void save_slots_record_layout(struct save_slots *slots, uint64_t mount,
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

/* ---- For the operator's commands in Python --------------------------------------------------- */

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
			      base_fail_reason_with(&error, -ENOTSUP, "set another coordinator",
						    "the coordinator \"open\" has no pools");
	}
	return base_return(ret, "status", NULL, &error);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* Times after which a waiting save is logged, for users who wonder why nothing happens. */
#define FIRST_NOTICE_S 5.0
#define NEXT_NOTICE_S 60.0

/* A save that waits for a slot. */
struct waiting_save {
	const struct save_watch *watch;
	const struct io_file_options *options;
	const struct base_log *log;
	const char *path;
	double next_notice_s; /* logged next after this time of waiting */
};

static void notice_waiting(struct waiting_save *waiting, const struct ioshape_place *place)
{
	const char *ahead = *place->ahead ? place->ahead : "others";

	if (place->waited_s < waiting->next_notice_s)
		return;
	waiting->next_notice_s = place->waited_s + NEXT_NOTICE_S;
	base_log(waiting->log, IOSHAPE_LOG_NOTICE,
		 "the save to \"%s\" has waited %.0f s for a slot of pool \"%s\", behind %s",
		 waiting->path, place->waited_s, place->pool, ahead);
}

static int tell_waiting(void *user, const struct ioshape_place *place)
{
	struct waiting_save *waiting = user;
	const struct io_file_options *options = waiting->options;
	const struct save_watch *watch = waiting->watch;
	int stop = 0;

	if (options->abort && atomic_load_explicit(options->abort, memory_order_relaxed))
		return 1;
	notice_waiting(waiting, place);
	if (watch->queue)
		stop = watch->queue(watch->queue_user, place);
	if (!stop && options->progress)
		stop = options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0,
					 options->progress_total);
	return stop;
}

static int wait_for_slot(const struct base_log *log, struct slots_pool *pool, uint32_t capacity,
			 const char *path, const struct io_file_options *options,
			 const struct save_watch *watch, struct slots_slot **slot,
			 struct base_error *error)
{
	struct waiting_save waiting = { watch, options, log, path, FIRST_NOTICE_S };
	const struct slots_wanted wanted = {
		.weight = 1,
		.bytes = options->expected_bytes,
		.default_capacity = capacity,
		.writers = options->files,
		.blocks_training = watch->blocked && !watch->drains,
		.yields = watch->drains,
		.deadline_ns = options->deadline_ns,
		.waiting = tell_waiting,
		.waiting_user = &waiting,
	};
	struct base_error why = { 0 };
	int ret;

	ret = slots_acquire(pool, &wanted, slot, &why);
	if (ret == -ECANCELED)
		return base_fail(error, ret,
				 "the save to \"%s\" was stopped while it waited for a slot", path);
	if (why.code)
		return base_fail(error, ret, "cannot save to \"%s\": %s", path, why.text);
	return ret;
}

static bool find_pool(struct save_slot *slot, struct ioshape_context *context, const char *path,
		      const struct fs_found *found, const struct io_file_options *options,
		      struct slots_pool **pool, uint32_t *capacity)
{
	struct save_expected expected = {
		.request = &context->slots.layout,
		.bytes = options->expected_bytes,
		.files = options->files,
	};
	struct base_error why = { 0 };

	/* Writing to a pipe or a device delays no other writer. */
	if (!found->code && !found->absent && !found->regular)
		return false;
	if (!save_slots_of_path(&context->slots, path, found, &expected, pool, capacity, &why))
		return true;
	/* If the path cannot be looked at, opening it will fail and report why. Any other error is
	 * only reported, and the save goes on without a slot. */
	if (!found->code) {
		snprintf(slot->info.note, sizeof(slot->info.note), "no slot was acquired: %.200s",
			 why.text);
		base_log(&context->log, IOSHAPE_LOG_WARNING, "saving %s without a slot: %s", path,
			 why.text);
	}
	return false;
}

void save_count_alarms(struct ioshape_context *context, const char *path, uint32_t alarms)
{
	const struct save_expected expected = { .request = &context->slots.layout };
	struct base_error ignored = { 0 };
	struct slots_pool *pool;
	struct fs_found found;
	uint32_t capacity;

	fs_find(path, &found);
	if (!save_slots_of_path(&context->slots, path, &found, &expected, &pool, &capacity,
				&ignored))
		slots_count_alarms(pool, alarms);
}

/* ---- Slots shared by several files ----------------------------------------------------------- */

/* A slot of a pool, and the number of files that use it. */
struct save_hold {
	/* In the context's list if other files may join; protected by the context's lock. */
	struct save_hold *next;
	struct slots_pool *pool;
	struct slots_slot *slot;
	pthread_t opener; /* thread that waited for the slot */
	bool listed;
	unsigned users;       /* protected by the context's lock */
	pthread_mutex_t lock; /* serialises calls of slots_pass() */
};

static bool is_lost(const struct save_hold *hold)
{
	struct ioshape_slot_info info;

	slots_info(hold->slot, &info);
	return info.lost;
}

/* Joins the slot of an open file. `opener` is the thread that must have opened it; NULL: any.
 * Returns NULL if there is none. */
static struct save_hold *join(struct ioshape_context *context, const struct slots_pool *pool,
			      const pthread_t *opener)
{
	struct save_hold *hold;

	pthread_mutex_lock(&context->lock);
	hold = context->holds;
	while (hold && (hold->pool != pool || is_lost(hold) ||
			(opener && !pthread_equal(hold->opener, *opener))))
		hold = hold->next;
	if (hold)
		hold->users++;
	pthread_mutex_unlock(&context->lock);
	return hold;
}

/* Waits for a slot. If `listed`, files that are opened later may join it. */
static int take(struct save_hold **out, struct ioshape_context *context, struct slots_pool *pool,
		uint32_t capacity, const char *path, const struct io_file_options *options,
		const struct save_watch *watch, bool listed, struct base_error *error)
{
	struct save_hold *hold = calloc(1, sizeof(*hold));
	int ret;

	if (!hold)
		return base_no_memory(error, "a slot", sizeof(*hold));
	ret = wait_for_slot(&context->log, pool, capacity, path, options, watch, &hold->slot,
			    error);
	if (ret) {
		free(hold);
		return ret;
	}
	hold->pool = pool;
	hold->users = 1;
	hold->opener = pthread_self();
	hold->listed = listed;
	pthread_mutex_init(&hold->lock, NULL);
	pthread_mutex_lock(&context->lock);
	if (listed) {
		hold->next = context->holds;
		context->holds = hold;
	}
	pthread_mutex_unlock(&context->lock);
	*out = hold;
	return 0;
}

static void let_go(struct ioshape_context *context, struct save_hold *hold)
{
	struct save_hold **link = &context->holds;
	bool last;

	pthread_mutex_lock(&context->lock);
	last = !--hold->users;
	while (hold->listed && *link != hold)
		link = &(*link)->next;
	if (last && hold->listed)
		*link = hold->next;
	pthread_mutex_unlock(&context->lock);
	if (!last)
		return;
	slots_release(hold->slot);
	pthread_mutex_destroy(&hold->lock);
	free(hold);
}

/* ---- The slot of one file -------------------------------------------------------------------- */

/* Returns whether a save must stop while it waits for bandwidth. */
static int must_stop(void *user)
{
	const struct save_slot *slot = user;
	const struct io_file_options *options = slot->options;

	if (options->abort && atomic_load_explicit(options->abort, memory_order_relaxed))
		return 1;
	if (!options->progress)
		return 0;
	return options->progress(options->progress_user, IOSHAPE_PHASE_WRITE,
				 MIN(slot->passed, options->progress_total),
				 options->progress_total);
}

/* Waits until a block may be written within the bandwidth limits. An io_file_options.before_block
 * function. */
static void pass(void *user, uint64_t bytes)
{
	struct save_slot *slot = user;
	struct save_hold *hold = slot->hold;

	if (hold) {
		pthread_mutex_lock(&hold->lock);
		/* If files share the slot, no callback may run under this lock, because it may
		 * write to another of these files. */
		slots_pass(hold->slot, bytes, hold->listed ? NULL : must_stop, slot);
		pthread_mutex_unlock(&hold->lock);
	}
	slot->passed += bytes;
}

int save_slot_take(struct save_slot *slot, struct ioshape_context *context, const char *path,
		   const struct fs_found *found, struct io_file_options *options,
		   const struct save_watch *watch, struct base_error *error)
{
	static const struct save_watch untold = { .queue = NULL };
	struct slots_pool *pool;
	uint32_t capacity;
	int ret;

	*slot = (struct save_slot){ .context = context, .options = options };
	options->before_block = pass;
	options->before_block_user = slot;
	if (!find_pool(slot, context, path, found, options, &pool, &capacity))
		return 0;
	options->target_groups = MIN(capacity, SLOTS_MOST_TARGET_GROUPS);
	if (!watch || watch->blocked)
		slot->hold = join(context, pool, watch ? watch->blocked : NULL);
	if (slot->hold)
		return 0;
	ret = take(&slot->hold, context, pool, capacity, path, options, watch ? watch : &untold,
		   !watch, error);
	slot->waited = !ret;
	if (!ret && watch)
		options->target_group = slots_target_group(slot->hold->slot);
	return ret;
}

void save_slot_release(struct save_slot *slot)
{
	if (!slot->hold)
		return;
	slots_info(slot->hold->slot, &slot->info);
	if (!slot->waited) {
		slot->info.waited_s = slot->info.paced_s = 0;
		slot->info.position = 0;
		*slot->info.ahead = 0;
	}
	let_go(slot->context, slot->hold);
	slot->hold = NULL;
}

void save_slot_report(const struct save_slot *slot, struct io_downgrades *downgrades,
		      struct ioshape_report *report)
{
	const struct ioshape_slot_info *info = &slot->info;

	report->slot_s = info->waited_s;
	report->paced_s = info->paced_s;
	snprintf(report->coordinator, sizeof(report->coordinator), "%s", info->coordinator);
	snprintf(report->ahead, sizeof(report->ahead), "%s", info->ahead);
	if (*info->note)
		io_add_downgrade(downgrades, IOSHAPE_DOWNGRADE_SLOT, "%s", info->note);
}

struct ioshape_slot {
	pid_t owner;
	struct slots_slot *slot;
};

/* ---- Slots of programs that do their own I/O ------------------------------------------------- */

static int pool_of_options(struct ioshape_context *context,
			   const struct ioshape_slot_options *options, struct slots_pool **pool,
			   uint32_t *capacity, struct base_error *error)
{
	/* The program that writes the file requests no layout, so the file gets that of its
	 * directory. */
	const struct fs_layout_request none = { .kind = FS_REQUEST_DIRECTORY };
	const struct save_expected expected = { .request = &none,
						.bytes = options->expected_bytes };

	struct fs_found found;

	*capacity = 0;
	if (options->pool || !options->path || context->slots.pool_name)
		return save_slots_named(&context->slots, options->pool, pool, error);
	fs_find(options->path, &found);
	return save_slots_of_path(&context->slots, options->path, &found, &expected, pool, capacity,
				  error);
}

static int acquire(struct ioshape_context *context, const struct ioshape_slot_options *options,
		   struct ioshape_slot **out, struct base_error *error)
{
	struct slots_wanted wanted = {
		.weight = MAX(options->weight, 1),
		.bytes = options->expected_bytes,
		.timeout_ms = options->timeout_ms,
		.deadline_ns = base_deadline_ns(options->deadline_ms),
		.waiting = options->waiting,
		.waiting_user = options->waiting_user,
		.lost = options->lost,
		.lost_user = options->lost_user,
	};
	struct ioshape_slot *slot;
	struct slots_pool *pool;
	int ret;

	if (options->weight > SLOTS_MOST_CAPACITY)
		return base_fail_reason_with(error, -EINVAL,
					     BASE_WORDS("it takes 1 to %u", SLOTS_MOST_CAPACITY),
					     "weight is %u", options->weight);
	ret = pool_of_options(context, options, &pool, &wanted.default_capacity, error);
	if (ret)
		return ret;
	slot = calloc(1, sizeof(*slot));
	if (!slot)
		return base_no_memory(error, "a slot", sizeof(*slot));
	slot->owner = context->owner;
	ret = slots_acquire(pool, &wanted, &slot->slot, error);
	if (ret) {
		free(slot);
		return ret;
	}
	*out = slot;
	return 0;
}

IOSHAPE_EXPORT int ioshape_slot_acquire(struct ioshape_context *context,
					const struct ioshape_slot_options *given,
					struct ioshape_slot **out)
{
	struct ioshape_slot_options options;
	struct base_error error;
	int ret;

	if (!out)
		return base_null_argument("acquire");
	*out = NULL;
	base_error_begin(&error);
	ret = save_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_slot_options",
					&error);
	if (!ret)
		ret = acquire(context, &options, out, &error);
	return base_return(ret, "acquire", NULL, &error);
}

/* Begins a call on a slot. In a child of fork() the library's thread does not exist, and locks may
 * be held for ever. */
static int enter(const struct ioshape_slot *slot, struct base_error *error)
{
	if (!slot)
		return base_fail_reason(error, -EINVAL, "no slot was given");
	if (slot->owner != base_pid())
		return base_fail_reason_with(error, -EPERM, "acquire one after the fork",
					     "this slot belongs to the parent process");
	return 0;
}

IOSHAPE_EXPORT int ioshape_slot_pace(struct ioshape_slot *slot, uint64_t bytes)
{
	struct base_error error;
	int ret;

	base_error_begin(&error);
	ret = enter(slot, &error);
	if (!ret)
		ret = slots_pass(slot->slot, bytes, NULL, NULL);
	return base_return(ret, "pass", NULL, &error);
}

IOSHAPE_EXPORT int ioshape_slot_get_info(struct ioshape_slot *slot, struct ioshape_slot_info *info)
{
	struct base_error error = { 0 };
	struct ioshape_slot_info now;
	int ret = enter(slot, &error);

	if (!ret && !info)
		ret = base_fail_reason(&error, -EINVAL,
				       "no pointer for the slot's state was given");
	if (!ret) {
		slots_info(slot->slot, &now);
		ret = base_give_struct(info, &now, sizeof(now), "ioshape_slot_info", &error);
	}
	return base_return(ret, "acquire", NULL, &error);
}

IOSHAPE_EXPORT void ioshape_slot_free(struct ioshape_slot *slot)
{
	if (enter(slot, NULL))
		return;
	slots_release(slot->slot);
	free(slot);
}

/* ---- Names of pools, for Python -------------------------------------------------------------- */

int save_pool_of_path(struct ioshape_context *context, const char *path, char *name, size_t bytes)
{
	struct base_error error = { 0 };
	char whole[FS_POOL_BYTES];
	int ret = save_enter(context, &error);

	if (!ret && (!path || !name || !bytes))
		ret = base_fail_reason(&error, -EINVAL, "no %s was given",
				       path ? "buffer for the name" : "path");
	if (!ret && context->slots.pool_name)
		snprintf(whole, sizeof(whole), "%s", context->slots.pool_name);
	else if (!ret)
		ret = fs_pool_of_path(path, whole, &error);
	if (!ret && strlen(whole) >= bytes)
		ret = base_fail(&error, -ENAMETOOLONG,
				"the pool's name for %s does not fit in %zu bytes", path, bytes);
	if (!ret)
		snprintf(name, bytes, "%s", whole);
	return base_return(ret, "pool_name", path, &error);
}
