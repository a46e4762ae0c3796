/* SPDX-License-Identifier: Apache-2.0 */
/* The processes of one host among themselves: the table of functions. */
#include "slots/local.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The first that waits looks so often whether the holders still exist; the others less often. */
#define BEAT_MS 20u

static int local_open(void **out, const struct slots_config *config, struct base_error *error)
{
	const char *folder = config->address + strlen("local");
	struct local_pool *pool;

	*out = NULL;
	if (*folder && (strncmp(folder, ":/", 2) ||
			strlen(folder) > sizeof(((struct local_file *)NULL)->folder)))
		return base_refuse(
			error, -EINVAL,
			"the coordinator's address begins with \"local\"" BASE_REMEDY
			"say \"local\", or \"local:/FOLDER\" with a path of at most 500 bytes");
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pool->config = *config;
	pool->folder = *folder ? folder + 1 : NULL;
	atomic_init(&pool->file, NULL);
	pool->interrupt = base_above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (pool->interrupt < 0) {
		int code = -errno;

		free(pool);
		return base_fail(error, code, "no eventfd for pool \"%s\"", config->pool);
	}
	local_open_wake(pool);
	*out = pool;
	return 0;
}

static int file_of(struct local_pool *pool, struct local_file **out, struct base_error *error)
{
	struct local_file *none = NULL;
	int ret;

	*out = atomic_load(&pool->file);
	if (*out)
		return 0;
	ret = local_file_get(out, pool, error);
	if (ret || atomic_compare_exchange_strong(&pool->file, &none, *out))
		return ret;
	/* Another thread was quicker: it is the same one. */
	local_file_put(*out);
	*out = none;
	return 0;
}

static int enter(struct local_pool *pool, struct local_file **file, struct base_error *error)
{
	int ret = file_of(pool, file, error);

	return ret ? ret : local_enter(*file, error);
}

/* Those behind it wait for the ones before them, and see a dead one in time. */
static void beat_in_time(struct slots_answer *answer)
{
	if (answer->state == SLOTS_WAITING)
		answer->beat_ms =
			(uint32_t)MIN(answer->beat_ms, BEAT_MS * ((uint64_t)answer->position + 1));
}

static int local_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	int ret = enter(pool, &file, error), full;

	if (ret)
		return ret;
	ret = local_take_number(pool, file, error);
	if (ret) {
		local_leave(file, error);
		return ret;
	}
	full = local_queue_acquire(file->table, &pool->config, request, pool->number, pool->wake,
				   answer);
	if ((full || answer->state != SLOTS_HOLDING) && local_bury_dead(file))
		full = local_queue_acquire(file->table, &pool->config, request, pool->number,
					   pool->wake, answer);
	ret = local_leave(file, error);
	if (!ret && full)
		return base_refuse(
			error, IOSHAPE_E_COORDINATOR,
			"pool \"%s\" has %u members already, more have no room in its file",
			pool->config.pool, LOCAL_MEMBERS);
	if (!full)
		beat_in_time(answer);
	return ret;
}

static int local_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	int ret = enter(pool, &file, error);

	if (ret)
		return ret;
	local_queue_beat(file->table, &pool->config, beat, answer);
	if (answer->state == SLOTS_WAITING && local_bury_dead(file))
		local_queue_beat(file->table, &pool->config, beat, answer);
	beat_in_time(answer);
	return local_leave(file, error);
}

static int local_release(void *opaque, const char *id, uint64_t passed, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	int ret = enter(pool, &file, error);

	if (ret)
		return ret;
	local_queue_release(file->table, id, passed);
	return local_leave(file, error);
}

static void local_interrupt(void *opaque)
{
	const struct local_pool *pool = opaque;
	const uint64_t one = 1;

	/* It only fails where it is full, which serves as well. */
	if (write(pool->interrupt, &one, sizeof(one)) < 0)
		errno = 0;
}

/* No call waits for anybody. */
static void local_hurry(void *pool, uint64_t until_ns)
{
	(void)pool;
	(void)until_ns;
}

/* The socket is kept: it costs nothing. */
static void local_rest(void *pool)
{
	(void)pool;
}

static int local_pace(void *opaque, int64_t bytes, struct slots_grant *grant,
		      struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	int ret = enter(pool, &file, error);

	if (ret)
		return ret;
	local_queue_pace(file->table, &pool->config, bytes, grant);
	return local_leave(file, error);
}

static int local_set(void *opaque, const struct ioshape_pool_settings *settings,
		     struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	int ret;

	if (settings->job || settings->user)
		return base_refuse(error, -ENOTSUP,
				   "the processes of this host keep no limits for one job or user "
				   "of pool \"%s\"" BASE_REMEDY
				   "use a Redis as coordinator, also on one host",
				   pool->config.pool);
	ret = enter(pool, &file, error);
	if (ret)
		return ret;
	local_queue_set(file->table, settings);
	return local_leave(file, error);
}

static int local_kick(void *opaque, const char *id, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	bool found;
	int ret = enter(pool, &file, error);

	if (ret)
		return ret;
	found = local_queue_kick(file->table, id);
	ret = local_leave(file, error);
	if (!ret && !found)
		return base_refuse(error, -ENOENT, "pool \"%s\" has no member \"%.*s\"",
				   pool->config.pool, SLOTS_ID_BYTES, id);
	return ret;
}

static int tell_status(void *opaque, struct ioshape_pool_status **status, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_file *file;
	int ret;

	ret = slots_status_new(status, pool->config.pool, "local", error);
	if (ret)
		return ret;
	ret = enter(pool, &file, error);
	if (!ret) {
		local_bury_dead(file);
		local_status(file->table, pool->config.default_capacity, *status);
		ret = local_leave(file, error);
	}
	if (!ret)
		return 0;
	ioshape_pool_status_free(*status);
	*status = NULL;
	return ret;
}

/* What is left behind is what the operator set, and what others take part in. */
static void leave_pool(struct local_pool *pool, struct local_file *file)
{
	if (local_enter(file, NULL))
		return; /* the locks end with the descriptor; without them it is dead to others */
	if (pool->opened == file->opened) {
		local_queue_bury(file->table, pool->number);
		local_drop_number(pool, file);
	}
	if (local_file_is_last(file) && !local_is_set(&file->table->image.head) &&
	    !local_others(file->fd))
		local_retire(file);
	else
		local_leave(file, NULL);
}

static void local_close(void *opaque)
{
	struct local_pool *pool = opaque;
	struct local_file *file = atomic_load(&pool->file);

	if (file) {
		leave_pool(pool, file);
		local_file_put(file);
	}
	if (pool->wake_fd >= 0)
		close(pool->wake_fd);
	close(pool->interrupt);
	free(pool);
}

const struct slots_ops slots_local = {
	.id = "local",
	.open = local_open,
	.acquire = local_acquire,
	.beat = local_beat,
	.release = local_release,
	.wait = local_wait,
	.interrupt = local_interrupt,
	.rest = local_rest,
	.hurry = local_hurry,
	.pace = local_pace,
	.set = local_set,
	.kick = local_kick,
	.status = tell_status,
	.names = local_names,
	.close = local_close,
};
