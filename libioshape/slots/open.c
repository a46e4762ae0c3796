/* SPDX-License-Identifier: Apache-2.0 */
/* No coordination: everybody has a slot at once. */
#include "slots/slots.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static int open_open(void **pool, const struct slots_config *config, struct base_error *error)
{
	*pool = NULL;
	if (strcmp(config->address, "open"))
		return base_refuse(
			error, -EINVAL,
			"the coordinator's address begins with \"open\", which takes no more");
	return 0;
}

static int open_acquire(void *pool, const struct slots_request *request,
			struct slots_answer *answer, struct base_error *error)
{
	(void)pool, (void)error;
	*answer = (struct slots_answer){ .state = SLOTS_HOLDING, .weight = request->weight };
	return 0;
}

static int open_beat(void *pool, const struct slots_beat *beat, struct slots_answer *answer,
		     struct base_error *error)
{
	(void)pool, (void)error;
	*answer = (struct slots_answer){ .state = SLOTS_HOLDING, .weight = beat->weight };
	return 0;
}

static int open_release(void *pool, const char *id, uint64_t passed, struct base_error *error)
{
	(void)pool, (void)id, (void)passed, (void)error;
	return 0;
}

/* Nobody ever waits here. */
static int open_wait(void *pool, uint32_t timeout_ms, struct base_error *error)
{
	(void)pool, (void)timeout_ms, (void)error;
	return 0;
}

static void open_nothing(void *pool)
{
	(void)pool;
}

static void open_hurry(void *pool, uint64_t until_ns)
{
	(void)pool;
	(void)until_ns;
}

static int open_pace(void *pool, int64_t bytes, struct slots_grant *grant, struct base_error *error)
{
	(void)pool, (void)bytes, (void)error;
	*grant = (struct slots_grant){ .end_ms = UINT32_MAX };
	return 0;
}

static int refuse(struct base_error *error)
{
	return base_refuse(error, -ENOTSUP,
			   "there are no pools without coordination" BASE_REMEDY
			   "set another coordinator than \"open\"");
}

static int open_set(void *pool, const struct ioshape_pool_settings *settings,
		    struct base_error *error)
{
	(void)pool, (void)settings;
	return refuse(error);
}

static int open_kick(void *pool, const char *id, struct base_error *error)
{
	(void)pool, (void)id;
	return refuse(error);
}

static int open_status(void *pool, struct ioshape_pool_status **status, struct base_error *error)
{
	(void)pool;
	*status = NULL;
	return refuse(error);
}

static int open_names(void *pool, struct base_buffer *names, struct base_error *error)
{
	(void)pool, (void)names;
	return refuse(error);
}

const struct slots_ops slots_open = {
	.id = "open",
	.open = open_open,
	.acquire = open_acquire,
	.beat = open_beat,
	.release = open_release,
	.wait = open_wait,
	.interrupt = open_nothing,
	.rest = open_nothing,
	.hurry = open_hurry,
	.pace = open_pace,
	.set = open_set,
	.kick = open_kick,
	.status = open_status,
	.names = open_names,
	.close = open_nothing,
};
