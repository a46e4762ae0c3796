/* SPDX-License-Identifier: Apache-2.0 */
/* The public slot level: slots for programs that do their own I/O. */
#include "save/slot/pools.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ioshape_slot {
	pid_t owner;
	struct slots_slot *slot;
};

/* ---- Slots ----------------------------------------------------------------------------------- */

static int find_pool(struct ioshape_context *context, const struct ioshape_slot_options *options,
		     struct slots_pool **pool, uint32_t *capacity, struct base_error *error)
{
	/* The program that writes the file asks for no layout: it is its directory's. */
	const struct fs_layout_request none = { .kind = FS_REQUEST_DIRECTORY };
	const struct save_expected expected = { .request = &none,
						.bytes = options->expected_bytes };

	struct fs_found found;

	*capacity = 0;
	if (options->pool || !options->path)
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
		return base_refuse(error, -EINVAL, "weight is %u" BASE_REMEDY "it takes 1 to %u",
				   options->weight, SLOTS_MOST_CAPACITY);
	ret = find_pool(context, options, &pool, &wanted.default_capacity, error);
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
		return base_missing("acquire");
	*out = NULL;
	base_error_begin(&error);
	ret = save_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_slot_options",
					&error);
	if (!ret)
		ret = acquire(context, &options, out, &error);
	return base_leave(ret, "acquire", NULL, &error);
}

/* In a child of fork() the library's thread does not exist and locks may be held for ever. */
static int enter(const struct ioshape_slot *slot, struct base_error *error)
{
	if (!slot)
		return base_refuse(error, -EINVAL, "no slot was given");
	if (slot->owner != base_pid())
		return base_refuse(error, -EPERM,
				   "this slot belongs to the parent process" BASE_REMEDY
				   "acquire one after the fork");
	return 0;
}

IOSHAPE_EXPORT int ioshape_slot_pace(struct ioshape_slot *slot, uint64_t bytes)
{
	struct base_error error = { 0 };
	int ret = enter(slot, &error);

	if (!ret)
		ret = slots_pass(slot->slot, bytes, NULL, NULL);
	return base_leave(ret, "pass", NULL, &error);
}

IOSHAPE_EXPORT int ioshape_slot_get_info(struct ioshape_slot *slot, struct ioshape_slot_info *info)
{
	struct base_error error = { 0 };
	struct ioshape_slot_info now;
	int ret = enter(slot, &error);

	if (!ret && !info)
		ret = base_refuse(&error, -EINVAL, "nowhere to put the slot's state was given");
	if (!ret) {
		slots_info(slot->slot, &now);
		ret = base_give_struct(info, &now, sizeof(now), "ioshape_slot_info", &error);
	}
	return base_leave(ret, "acquire", NULL, &error);
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
		ret = base_refuse(&error, -EINVAL, "no %s was given",
				  path ? "buffer for a name" : "path");
	if (!ret && context->slots.pool_name)
		snprintf(whole, sizeof(whole), "%s", context->slots.pool_name);
	else if (!ret)
		ret = fs_pool_of_path(path, whole, &error);
	if (!ret && strlen(whole) >= bytes)
		ret = base_fail(&error, -ENAMETOOLONG,
				"the name of the pool of %s does not fit in %zu bytes", path,
				bytes);
	if (!ret)
		snprintf(name, bytes, "%s", whole);
	return base_leave(ret, "pool_name", path, &error);
}
