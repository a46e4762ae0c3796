/* SPDX-License-Identifier: Apache-2.0 */
/* Pools as this process opens and closes them. */
#include "slots/pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void free_pool(struct slots_pool *pool)
{
	base_free_secret(pool->password);
	base_free_secret(pool->address);
	free(pool->password_file);
	pthread_cond_destroy(&pool->thread_change);
	pthread_cond_destroy(&pool->change);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

static int choose_coordinator(struct slots_pool *pool, struct base_error *error)
{
	pool->ops = pool->config.ops ? pool->config.ops : slots_coordinator_of(pool->address);
	if (!pool->ops)
		return base_refuse(
			error, -EINVAL,
			"the coordinator's address begins with an unknown word" BASE_REMEDY
			"it takes local, open, redis://, rediss://, unix:// or sentinel://");
	return pool->ops->open(&pool->coordinator, &pool->config, error);
}

int slots_pool_open(struct slots_pool **out, const struct slots_config *config,
		    const struct slots_policy *policy, struct base_error *error)
{
	struct slots_pool *pool = calloc(1, sizeof(*pool));
	int ret;

	*out = NULL;
	if (!pool)
		return base_no_memory(error, "a pool of slots", sizeof(*pool));
	pthread_mutex_init(&pool->lock, NULL);
	base_cond_init(&pool->change);
	base_cond_init(&pool->thread_change);
	pool->config = *config;
	pool->policy = *policy;
	slots_checkpoints_init(&pool->checkpoints);
	pool->address = strdup(config->address);
	pool->password = config->password ? strdup(config->password) : NULL;
	pool->password_file = config->password_file ? strdup(config->password_file) : NULL;
	if (!pool->address || (config->password && !pool->password) ||
	    (config->password_file && !pool->password_file)) {
		ret = base_no_memory(error, "a pool of slots", sizeof(*pool));
	} else {
		pool->config.address = pool->address;
		pool->config.password = pool->password;
		pool->config.password_file = pool->password_file;
		ret = choose_coordinator(pool, error);
	}
	if (ret)
		free_pool(pool);
	else
		*out = pool;
	return ret;
}

void slots_pool_close(struct slots_pool *pool)
{
	if (!pool)
		return;
	slots_stop(pool);
	pool->ops->close(pool->coordinator);
	free_pool(pool);
}

const char *slots_pool_name(const struct slots_pool *pool)
{
	return pool->config.pool;
}

const struct slots_ops *slots_pool_ops(const struct slots_pool *pool, void **coordinator)
{
	*coordinator = pool->coordinator;
	return pool->ops;
}
