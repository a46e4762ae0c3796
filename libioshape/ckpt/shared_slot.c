/* SPDX-License-Identifier: Apache-2.0 */
/* Slots that the open files of a context share. */
#include "ckpt/slot.h"

#include <stdlib.h>

struct ckpt_shared_slot {
	struct ckpt_shared_slot *next; /* in the context, under its lock */
	struct slots_pool *pool;
	struct slots_slot *slot;
	pthread_t opener;              /* the thread that waited for it */
	const struct ckpt_slot *first; /* of the file that it waited for */
	unsigned users;                /* under the context's lock */
	pthread_mutex_t lock;          /* of passing */
};

static bool is_lost(const struct ckpt_shared_slot *shared)
{
	struct ioshape_slot_info info;

	slots_info(shared->slot, &info);
	return info.lost;
}

/* One that is held already; `opener` is NULL, or the thread that it must be of. */
static struct ckpt_shared_slot *join(struct ioshape_context *context, const struct slots_pool *pool,
				     const pthread_t *opener)
{
	struct ckpt_shared_slot *shared;

	pthread_mutex_lock(&context->lock);
	shared = context->shared_slots;
	while (shared && (shared->pool != pool || is_lost(shared) ||
			  (opener && !pthread_equal(shared->opener, *opener))))
		shared = shared->next;
	if (shared)
		shared->users++;
	pthread_mutex_unlock(&context->lock);
	return shared;
}

struct ckpt_shared_slot *ckpt_shared_slot_of_thread(struct ioshape_context *context,
						    const struct slots_pool *pool, pthread_t thread)
{
	return join(context, pool, &thread);
}

/* One for whoever comes, and for those who come while it is held. */
static int take(struct ckpt_shared_slot **out, struct ioshape_context *context,
		struct slots_pool *pool, uint32_t capacity, const char *path,
		const struct ring_file_options *options, struct base_error *error)
{
	struct ckpt_shared_slot *shared = calloc(1, sizeof(*shared));
	const struct ckpt_watch nobody = { .queue = NULL };
	int ret;

	if (!shared)
		return base_no_memory(error, "a slot", sizeof(*shared));
	ret = ckpt_slot_wait(pool, capacity, path, options, &nobody, &shared->slot, error);
	if (ret) {
		free(shared);
		return ret;
	}
	shared->pool = pool;
	shared->users = 1;
	shared->opener = pthread_self();
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
			  struct ckpt_slot *seen, struct base_error *error)
{
	struct slots_pool *pool;
	uint32_t capacity;
	int ret;

	*shared = NULL;
	if (!ckpt_slot_find_pool(seen, context, path, options, &pool, &capacity))
		return 0;
	*shared = join(context, pool, NULL);
	if (*shared)
		return 0;
	ret = take(shared, context, pool, capacity, path, options, error);
	if (!ret)
		(*shared)->first = seen;
	return ret;
}

void ckpt_shared_slot_pass(void *user, uint64_t bytes)
{
	struct ckpt_shared_slot *shared = user;

	if (!shared)
		return;
	pthread_mutex_lock(&shared->lock);
	slots_pass(shared->slot, bytes, NULL, NULL);
	pthread_mutex_unlock(&shared->lock);
}

/* Those that joined did not wait for it. */
static void fill_seen(const struct ckpt_shared_slot *shared, struct ckpt_slot *seen)
{
	slots_info(shared->slot, &seen->info);
	if (seen == shared->first)
		return;
	seen->info.waited_s = seen->info.paced_s = 0;
	seen->info.position = 0;
	*seen->info.ahead = 0;
}

void ckpt_shared_slot_release(struct ckpt_shared_slot *shared, struct ioshape_context *context,
			      struct ckpt_slot *seen)
{
	struct ckpt_shared_slot **link = &context->shared_slots;
	bool last;

	if (!shared)
		return;
	fill_seen(shared, seen);
	pthread_mutex_lock(&context->lock);
	last = !--shared->users;
	while (*link != shared)
		link = &(*link)->next;
	if (last)
		*link = shared->next;
	pthread_mutex_unlock(&context->lock);
	if (!last)
		return;
	slots_release(shared->slot);
	pthread_mutex_destroy(&shared->lock);
	free(shared);
}
