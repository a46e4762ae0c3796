/* SPDX-License-Identifier: Apache-2.0 */
/* The public slot level: slots for programs that do their own I/O, and the operator's view. */
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

/* ---- The operator's view --------------------------------------------------------------------- */

IOSHAPE_EXPORT int ioshape_pool_get_name(struct ioshape_context *context, const char *path,
					 char *name, size_t bytes)
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

/* What an operator's call goes to. */
struct view {
	struct slots_pool *pool;
	bool close;
	const struct slots_ops *ops;
	void *coordinator;
};

static int open_view(struct ioshape_context *context, const char *name, struct view *view,
		     struct base_error *error)
{
	int ret;

	*view = (struct view){ 0 };
	ret = save_enter(context, error);
	if (!ret)
		ret = save_slots_borrow(&context->slots, name, &view->pool, &view->close, error);
	if (!ret)
		view->ops = slots_pool_ops(view->pool, &view->coordinator);
	return ret;
}

static void close_view(const struct view *view)
{
	if (view->close)
		slots_pool_close(view->pool);
}

IOSHAPE_EXPORT int ioshape_pool_get_status(struct ioshape_context *context, const char *pool,
					   struct ioshape_pool_status **out)
{
	struct base_error error = { 0 };
	struct view view;
	int ret;

	if (!out)
		return base_missing("status");
	*out = NULL;
	ret = open_view(context, pool, &view, &error);
	if (!ret)
		ret = view.ops->status(view.coordinator, out, &error);
	close_view(&view);
	return base_leave(ret, "status", NULL, &error);
}

static int check_settings(const struct ioshape_pool_settings *settings, struct base_error *error)
{
	const struct {
		const char *name;
		uint64_t value, most;
	} limits[] = {
		{ "the capacity", settings->capacity, SLOTS_MOST_CAPACITY },
		{ "express", settings->express, SLOTS_MOST_CAPACITY },
		{ "pool_bytes_per_s", settings->pool_bytes_per_s, SLOTS_MOST_BYTES },
		{ "job_bytes_per_s", settings->job_bytes_per_s, SLOTS_MOST_BYTES },
		{ "small_bytes", settings->small_bytes, SLOTS_MOST_BYTES },
		{ "the share", settings->share, SLOTS_MOST_SHARE },
	};
	const char *const name = settings->job ? settings->job : settings->user;
	const bool of_pool = settings->capacity || settings->pool_bytes_per_s ||
			     settings->small_bytes || settings->express;

	for (size_t i = 0; i < ARRAY_LENGTH(limits); i++) {
		if (limits[i].value > limits[i].most)
			return base_refuse(error, -EINVAL,
					   "%s is %llu" BASE_REMEDY "it takes 1 to %llu",
					   limits[i].name, (unsigned long long)limits[i].value,
					   (unsigned long long)limits[i].most);
	}
	if (name && (!*name || strlen(name) >= SLOTS_TEXT_BYTES))
		return base_refuse(error, -EINVAL, "\"%.80s\" is no name of a job or user", name);
	if ((name && of_pool) || (!name && settings->share) || (settings->job && settings->user))
		return base_refuse(
			error, -EINVAL,
			"these settings do not go together" BASE_REMEDY
			"name one job or one user for share and job_bytes_per_s, none for "
			"what the whole pool allows");
	return 0;
}

IOSHAPE_EXPORT int ioshape_pool_set(struct ioshape_context *context, const char *pool,
				    const struct ioshape_pool_settings *given)
{
	struct ioshape_pool_settings settings = { 0 };
	struct base_error error = { 0 };
	struct view view;
	int ret;

	ret = open_view(context, pool, &view, &error);
	if (!ret && !given)
		ret = base_refuse(&error, -EINVAL, "no settings were given");
	if (!ret)
		ret = base_take_options(&settings, sizeof(settings), given, "ioshape_pool_settings",
					&error);
	if (!ret)
		ret = check_settings(&settings, &error);
	if (!ret)
		ret = view.ops->set(view.coordinator, &settings, &error);
	close_view(&view);
	return base_leave(ret, "set", NULL, &error);
}

IOSHAPE_EXPORT int ioshape_pool_kick(struct ioshape_context *context, const char *pool,
				     const char *id)
{
	struct base_error error = { 0 };
	struct view view;
	int ret;

	ret = open_view(context, pool, &view, &error);
	if (!ret && (!id || !*id || strlen(id) >= SLOTS_ID_BYTES))
		ret = base_refuse(&error, -EINVAL,
				  "no id was given that can be one" BASE_REMEDY
				  "the pool's status lists them");
	if (!ret)
		ret = view.ops->kick(view.coordinator, id, &error);
	close_view(&view);
	return base_leave(ret, "kick", NULL, &error);
}

static int list_names(struct ioshape_context *context, char **names, struct base_error *error)
{
	struct base_buffer text = { 0 };
	struct view view;
	int ret;

	/* Any pool can ask for the names of all. */
	ret = open_view(context, context->slots.pool_name ? NULL : "names", &view, error);
	if (!ret)
		ret = view.ops->names(view.coordinator, &text, error);
	close_view(&view);
	if (!ret && base_buffer_append(&text, "", 1))
		ret = base_no_memory(error, "the names of pools", text.bytes);
	if (ret) {
		base_buffer_free(&text);
		return ret;
	}
	*names = (char *)text.data;
	return 0;
}

IOSHAPE_EXPORT int ioshape_pool_list(struct ioshape_context *context, char **names)
{
	struct base_error error = { 0 };
	int ret;

	if (!names)
		return base_missing("list");
	*names = NULL;
	ret = save_enter(context, &error);
	if (!ret)
		ret = list_names(context, names, &error);
	return base_leave(ret, "list", NULL, &error);
}
