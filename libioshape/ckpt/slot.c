/* SPDX-License-Identifier: Apache-2.0 */
/* The pools of a context, and the slots that its saves take. */
#include "ckpt/slot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/*
 * Writers at a time where nobody said anything else: one keeps the storage busy, another fills the
 * gaps while it creates, syncs and renames (docs/performance.md).
 */
#define DEFAULT_CAPACITY 2u

#define MOST_PASSWORD_BYTES 1024

struct ckpt_pool_use {
	struct ckpt_pool_use *next;
	struct slots_pool *pool;
};

/* Which pool a mount's saves use: finding that out anew costs more than a small save. */
struct ckpt_pool_of_device {
	struct ckpt_pool_of_device *next;
	uint64_t device;
	struct slots_pool *pool;
};

/* ---- A context's ----------------------------------------------------------------------------- */

/* The first line of a file, or the variable. */
static int take_password(struct ckpt_slots *slots, const char *file_name, struct base_error *error)
{
	const char *variable = getenv("IOSHAPE_PASSWORD");
	char line[MOST_PASSWORD_BYTES], more[2];
	FILE *file;
	int ret = 0;

	if (!file_name || !*file_name) {
		if (variable && *variable && !(slots->password = strdup(variable)))
			return base_no_memory(error, "a password", strlen(variable));
		return 0;
	}
	file = fopen(file_name, "re");
	if (!file)
		return base_fail(error, -errno, "cannot open the password file %s", file_name);
	setvbuf(file, NULL, _IONBF, 0); /* leaves no copy behind */
	if (!fgets(line, sizeof(line), file))
		ret = base_fail(error, -EINVAL, "the password file %s is empty", file_name);
	else if (!strpbrk(line, "\r\n") && fgets(more, sizeof(more), file) &&
		 !strpbrk(more, "\r\n"))
		ret = base_fail(error, -EINVAL,
				"the first line of the password file %s is longer than %d bytes",
				file_name, MOST_PASSWORD_BYTES - 1);
	fclose(file);
	if (ret) {
		explicit_bzero(line, sizeof(line));
		return ret;
	}
	line[strcspn(line, "\r\n")] = 0;
	slots->password = strdup(line);
	explicit_bzero(line, sizeof(line));
	return slots->password ? 0 : base_no_memory(error, "a password", MOST_PASSWORD_BYTES);
}

static int copy_text(char **into, const char *from, struct base_error *error)
{
	if (!from || !*from)
		return 0;
	*into = strdup(from);
	return *into ? 0 : base_no_memory(error, "a setting", strlen(from));
}

int ckpt_slots_init(struct ckpt_slots *slots, const struct ioshape_context_options *options,
		    const struct base_log *log, struct base_error *error)
{
	struct slots_pool *trial;
	int ret;

	memset(slots, 0, sizeof(*slots));
	pthread_mutex_init(&slots->lock, NULL);
	ret = copy_text(&slots->address, options->coordinator, error);
	if (!ret)
		ret = copy_text(&slots->pool_name, options->pool, error);
	if (!ret)
		ret = take_password(slots, options->password_file, error);
	if (ret)
		goto fail;
	slots->policy =
		(struct slots_policy){ options->away, options->stagger_most_ms, options->stall_ms };
	slots->config = (struct slots_config){
		.address = slots->address,
		.password = slots->password,
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
	if (ret)
		goto fail;
	slots_pool_close(trial);
	return 0;
fail:
	ckpt_slots_destroy(slots);
	return ret;
}

static void free_secret(char *text)
{
	if (text)
		explicit_bzero(text, strlen(text));
	free(text);
}

void ckpt_slots_destroy(struct ckpt_slots *slots)
{
	while (slots->devices) {
		struct ckpt_pool_of_device *first = slots->devices;

		slots->devices = first->next;
		free(first);
	}
	while (slots->pools) {
		struct ckpt_pool_use *first = slots->pools;

		slots->pools = first->next;
		slots_pool_close(first->pool);
		free(first);
	}
	free_secret(slots->address);
	free_secret(slots->password);
	free(slots->pool_name);
	pthread_mutex_destroy(&slots->lock);
}

/* ---- Pools ----------------------------------------------------------------------------------- */

/* The lock is held. */
static int find_or_open(struct ckpt_slots *slots, const char *name, struct slots_pool **pool,
			struct base_error *error)
{
	struct slots_config config = slots->config;
	struct ckpt_pool_use *use;
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

int ckpt_slots_named(struct ckpt_slots *slots, const char *name, struct slots_pool **pool,
		     struct base_error *error)
{
	int ret;

	if (!name)
		name = slots->pool_name;
	if (!name)
		return base_fail(error, -EINVAL,
				 "no pool was given; name one, or set it for the context");
	ret = ckpt_check_pool_name(name, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&slots->lock);
	ret = find_or_open(slots, name, pool, error);
	pthread_mutex_unlock(&slots->lock);
	return ret;
}

/* The lock is held. */
static int open_for_device(struct ckpt_slots *slots, const char *path, uint64_t device,
			   struct slots_pool **pool, struct base_error *error)
{
	struct ckpt_pool_of_device *known;
	char name[FS_POOL_BYTES];
	int ret;

	for (known = slots->devices; known; known = known->next) {
		if (known->device == device) {
			*pool = known->pool;
			return 0;
		}
	}
	ret = fs_pool_of_path(path, name, error);
	if (!ret)
		ret = find_or_open(slots, name, pool, error);
	if (ret)
		return ret;
	/* Without memory it is found out again next time. */
	known = calloc(1, sizeof(*known));
	if (known) {
		*known = (struct ckpt_pool_of_device){ slots->devices, device, *pool };
		slots->devices = known;
	}
	return 0;
}

int ckpt_slots_of_path(struct ckpt_slots *slots, const char *path, struct slots_pool **pool,
		       struct base_error *error)
{
	uint64_t device;
	int ret;

	if (slots->pool_name)
		return ckpt_slots_named(slots, NULL, pool, error);
	/* Nobody keeps an order: it makes no difference where they write. */
	if (slots_coordinator_of(slots->address) == &slots_open)
		return ckpt_slots_named(slots, "open", pool, error);
	ret = fs_device_of_path(path, &device);
	if (ret)
		return base_fail(error, ret, "cannot look at the directory of %s", path);
	pthread_mutex_lock(&slots->lock);
	ret = open_for_device(slots, path, device, pool, error);
	pthread_mutex_unlock(&slots->lock);
	return ret;
}

/* ---- The slot of a save ---------------------------------------------------------------------- */

/* Who waits for a slot on behalf of a save. */
struct waiting_save {
	const struct ckpt_watch *watch;
	const struct ring_file_options *options;
};

static int tell_waiting(void *user, const struct ioshape_place *place)
{
	const struct waiting_save *waiting = user;
	const struct ring_file_options *options = waiting->options;
	const struct ckpt_watch *watch = waiting->watch;
	int stop = 0;

	if (options->abort && atomic_load_explicit(options->abort, memory_order_relaxed))
		return 1;
	if (watch->queue)
		stop = watch->queue(watch->queue_user, place);
	if (!stop && options->progress)
		stop = options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0,
					 options->progress_total);
	return stop;
}

static int take(struct slots_pool *pool, const char *path, const struct ring_file_options *options,
		const struct ckpt_watch *watch, struct slots_slot **slot, struct base_error *error)
{
	struct waiting_save waiting = { watch, options };
	const struct slots_wish wish = {
		.weight = 1,
		.bytes = options->expected_bytes,
		.waiting = tell_waiting,
		.waiting_user = &waiting,
	};
	struct base_error why = { 0 };
	int ret;

	ret = slots_acquire(pool, &wish, slot, &why);
	if (ret == -ECANCELED)
		return base_fail(error, ret,
				 "the save to %s was stopped while it waited for a slot", path);
	if (why.code)
		return base_fail(error, ret, "cannot save to %s: %s", path, why.text);
	return ret;
}

/* The pool that a file's writer needs a slot of. False if it needs none. */
static bool find_pool(struct ioshape_context *context, const char *path, struct slots_pool **pool)
{
	struct stat status;

	/* What goes nowhere is in nobody's way, nor is what goes to a pipe or a device. */
	if (context->config.engine == IOSHAPE_ENGINE_NIL ||
	    (!stat(path, &status) && !S_ISREG(status.st_mode)))
		return false;
	/* What cannot be looked at cannot be written either: opening it will say why. */
	return !ckpt_slots_of_path(&context->slots, path, pool, NULL);
}

int ckpt_slot_take(struct ckpt_slot *slot, struct ioshape_context *context, const char *path,
		   const struct ring_file_options *options, const struct ckpt_watch *watch,
		   struct base_error *error)
{
	struct slots_pool *pool;

	*slot = (struct ckpt_slot){ .abort = options->abort };
	if (!find_pool(context, path, &pool))
		return 0;
	return take(pool, path, options, watch, &slot->slot, error);
}

static int is_aborted(void *user)
{
	const atomic_bool *abort = user;

	return abort && atomic_load_explicit(abort, memory_order_relaxed);
}

void ckpt_slot_pass(void *user, uint64_t bytes)
{
	struct ckpt_slot *slot = user;

	if (slot->slot)
		slots_pass(slot->slot, bytes, is_aborted, (void *)(uintptr_t)slot->abort);
}

void ckpt_slot_release(struct ckpt_slot *slot)
{
	if (!slot->slot)
		return;
	slots_info(slot->slot, &slot->info);
	slots_release(slot->slot);
	slot->slot = NULL;
}

void ckpt_slot_report(const struct ckpt_slot *slot, struct ring_notes *notes,
		      struct ioshape_report *report)
{
	const struct ioshape_slot_info *info = &slot->info;

	report->slot_s = info->waited_s;
	report->paced_s = info->paced_s;
	report->fence = info->fence;
	report->position = info->position;
	report->slot_lost = info->lost;
	report->express = info->express;
	report->capacity = info->capacity;
	snprintf(report->coordinator, sizeof(report->coordinator), "%s", info->coordinator);
	snprintf(report->pool, sizeof(report->pool), "%s", info->pool);
	snprintf(report->ahead, sizeof(report->ahead), "%s", info->ahead);
	if (*info->note)
		ring_note(notes, "%s", info->note);
}

/* ---- Slots of handles ------------------------------------------------------------------------ */

/* One that is held already. */
static struct ckpt_shared_slot *join(struct ioshape_context *context, const struct slots_pool *pool)
{
	struct ckpt_shared_slot *shared;

	pthread_mutex_lock(&context->lock);
	for (shared = context->shared_slots; shared && shared->pool != pool; shared = shared->next)
		;
	if (shared)
		shared->handles++;
	pthread_mutex_unlock(&context->lock);
	return shared;
}

/* One for whoever comes, and for those who come while it is held. */
static int take_shared(struct ckpt_shared_slot **out, struct ioshape_context *context,
		       struct slots_pool *pool, const char *path,
		       const struct ring_file_options *options, struct base_error *error)
{
	struct ckpt_shared_slot *shared = calloc(1, sizeof(*shared));
	const struct ckpt_watch nobody = { NULL, NULL };
	int ret;

	if (!shared)
		return base_no_memory(error, "a slot", sizeof(*shared));
	ret = take(pool, path, options, &nobody, &shared->slot.slot, error);
	if (ret) {
		free(shared);
		return ret;
	}
	shared->pool = pool;
	shared->handles = 1;
	pthread_mutex_init(&shared->lock, NULL);
	pthread_mutex_lock(&context->lock);
	shared->next = context->shared_slots;
	context->shared_slots = shared;
	pthread_mutex_unlock(&context->lock);
	*out = shared;
	return 0;
}

int ckpt_shared_slot_take(struct ckpt_shared_slot **shared, struct ioshape_context *context,
			  const char *path, const struct ring_file_options *options,
			  struct base_error *error)
{
	struct slots_pool *pool;

	*shared = NULL;
	if (!find_pool(context, path, &pool))
		return 0;
	*shared = join(context, pool);
	return *shared ? 0 : take_shared(shared, context, pool, path, options, error);
}

void ckpt_shared_slot_pass(void *user, uint64_t bytes)
{
	struct ckpt_shared_slot *shared = user;

	if (!shared)
		return;
	pthread_mutex_lock(&shared->lock);
	ckpt_slot_pass(&shared->slot, bytes);
	pthread_mutex_unlock(&shared->lock);
}

void ckpt_shared_slot_release(struct ckpt_shared_slot *shared, struct ioshape_context *context,
			      struct ckpt_slot *seen)
{
	struct ckpt_shared_slot **link = &context->shared_slots;
	bool last;

	if (!shared)
		return;
	pthread_mutex_lock(&context->lock);
	last = !--shared->handles;
	while (*link != shared)
		link = &(*link)->next;
	if (last)
		*link = shared->next;
	pthread_mutex_unlock(&context->lock);
	if (!last) {
		slots_info(shared->slot.slot, &seen->info);
		return;
	}
	ckpt_slot_release(&shared->slot);
	seen->info = shared->slot.info;
	pthread_mutex_destroy(&shared->lock);
	free(shared);
}

/* ---- Pools for one call ---------------------------------------------------------------------- */

int ckpt_slots_borrow(struct ckpt_slots *slots, const char *name, struct slots_pool **pool,
		      bool *close, struct base_error *error)
{
	struct slots_config config = slots->config;
	const struct ckpt_pool_use *use;
	int ret;

	*close = false;
	if (!name)
		return ckpt_slots_named(slots, NULL, pool, error);
	ret = ckpt_check_pool_name(name, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&slots->lock);
	for (use = slots->pools; use && strcmp(slots_pool_name(use->pool), name) != 0;
	     use = use->next)
		;
	pthread_mutex_unlock(&slots->lock);
	if (use) {
		*pool = use->pool;
		return 0;
	}
	snprintf(config.pool, sizeof(config.pool), "%s", name);
	slots_identify_client(&config.identity);
	ret = slots_pool_open(pool, &config, &slots->policy, error);
	*close = !ret;
	return ret;
}
