/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of this host and of a Redis: they are taken, also by two at a time, and operated. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <ioshape/operator.h>

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATIENCE_MS 20000
#define URGENT_MS 300
#define POOL "harm"
#define PASSWORD "secret"

enum where {
	THIS_HOST,
	THIS_HOST_AS_EVER, /* in the usual folder */
	REDIS,
	REDIS_SOCKET,
	REDIS_PASSWORD_FILE,
	REDIS_PASSWORD_VARIABLE,
	REDIS_AWAY,
};

struct variant {
	enum where where;
	bool no_pool; /* that of the filesystem */
	bool urgent;
	bool no_wakes; /* the Redis lets nobody wait for them */
};

/* The file of the old pool, and what was in it. */
static glob_t old_files;
static uint8_t *old_file;
static size_t old_bytes;

static struct redis_server server;
static char address[128];

/* ---- A Redis, for others as well --------------------------------------------------------------
 */

const char *harm_redis(void)
{
	return address;
}

void harm_open_redis(const struct act *act)
{
	(void)act;
	redis_server_init(&server);
	redis_server_start(&server);
	snprintf(address, sizeof(address), "redis://localhost:%u", server.port);
}

void harm_close_redis(const struct act *act)
{
	(void)act;
	redis_server_free(&server);
}

static void open_where(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->where == REDIS_AWAY)
		snprintf(address, sizeof(address), "redis://localhost:%u",
			 redis_server_free_port());
	if (variant->where <= THIS_HOST_AS_EVER || variant->where == REDIS_AWAY)
		return;
	redis_server_init(&server);
	if (variant->where >= REDIS_PASSWORD_FILE) {
		redis_server_option(&server, "--requirepass", PASSWORD);
		server.password = PASSWORD;
		scratch_write("password", PASSWORD, strlen(PASSWORD));
	}
	redis_server_start(&server);
	snprintf(address, sizeof(address), "redis://localhost:%u", server.port);
	if (variant->where == REDIS_SOCKET)
		snprintf(address, sizeof(address), "unix://%s", server.socket);
	if (variant->no_wakes)
		freeReplyObject(redis_server_say(&server, "ACL SETUSER default -blpop"));
}

static void close_where(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->where > THIS_HOST_AS_EVER && variant->where != REDIS_AWAY)
		redis_server_free(&server);
}

/* ---- Slots ------------------------------------------------------------------------------------
 */

static int open_context(const struct variant *variant, struct ioshape_context **context)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.coordinator = variant->where == THIS_HOST         ? harm_coordinator() :
			      variant->where == THIS_HOST_AS_EVER ? "local" :
								    address;
	options.pool = variant->no_pool ? NULL : POOL;
	options.slots = 1;
	options.lease_ms = 1000;
	options.unreachable = variant->where == REDIS_AWAY ? IOSHAPE_UNREACHABLE_STAGGER :
							     IOSHAPE_UNREACHABLE_FAIL;
	if (variant->where == REDIS_PASSWORD_FILE)
		options.password_file = "password";
	if (variant->where == REDIS_PASSWORD_VARIABLE)
		setenv("IOSHAPE_PASSWORD", PASSWORD, 1);
	return harm_heed(ioshape_context_open(context, &options));
}

static int take_slot(struct ioshape_context *context, const struct variant *variant)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot_info info = IOSHAPE_SLOT_INFO_INIT;
	struct ioshape_slot *slot;
	int ret;

	options.path = "file";
	options.timeout_ms = PATIENCE_MS;
	options.deadline_ms = variant->urgent ? URGENT_MS : 0;
	ret = harm_heed(ioshape_slot_acquire(context, &options, &slot));
	if (ret)
		return ret;
	ret = harm_heed(ioshape_slot_pace(slot, MIB));
	if (!ret)
		ret = harm_heed(ioshape_slot_get_info(slot, &info));
	/* Others have to wait meanwhile. */
	usleep(2000);
	ioshape_slot_free(slot);
	return ret;
}

static int set_capacity(struct ioshape_context *context, uint32_t capacity)
{
	struct ioshape_pool_settings settings = IOSHAPE_POOL_SETTINGS_INIT;
	struct ioshape_pool_status *status;
	int ret;

	settings.capacity = capacity;
	ret = harm_heed(ioshape_pool_set(context, POOL, &settings));
	if (!ret)
		ret = harm_heed(ioshape_pool_get_status(context, POOL, &status));
	if (ret)
		return ret;
	if (status->capacity != capacity)
		ret = harm_wrong("what the operator set is not there");
	ioshape_pool_status_free(status);
	return ret;
}

static int operate(struct ioshape_context *context)
{
	char *names, name[128];
	int ret = set_capacity(context, 3);

	if (!ret)
		ret = harm_heed(ioshape_pool_list(context, &names));
	if (ret)
		return ret;
	ioshape_free(names);
	if (!ret)
		ret = harm_heed(ioshape_pool_get_name(context, "file", name, sizeof(name)));
	if (ret)
		return ret;
	ret = ioshape_pool_kick(context, POOL, "nobody");
	/* The processes of one host kick nobody. */
	return ret == -ENOENT || ret == -ENOTSUP ? 0 : harm_heed(ret);
}

static int take(const struct act *act, unsigned rank)
{
	const struct variant *variant = act->variant;
	struct ioshape_context *context;
	int ret = open_context(variant, &context);

	(void)rank;
	if (ret)
		return ret;
	for (int i = 0; !ret && i < 2; i++)
		ret = take_slot(context, variant);
	if (!ret && !act->ranks && !variant->no_pool && variant->where != REDIS_AWAY)
		ret = operate(context);
	ioshape_context_free(context);
	return ret;
}

/* The last one of a pool removes its file, unless it dies. */
static int take_and_die(const struct act *act)
{
	struct ioshape_context *context;
	struct ioshape_slot *slot;
	int ret = open_context(act->variant, &context);

	if (!ret)
		ret = ioshape_slot_acquire(context, NULL, &slot);
	if (!ret)
		_exit(0);
	return ret;
}

static void open_old_pool(const struct act *act)
{
	harm_alone(take_and_die, act, "take a slot");
	if (glob("../pools/*", 0, NULL, &old_files) || old_files.gl_pathc != 1)
		harm_must(-ENOENT, "find the file of a pool");
	old_file = scratch_read(old_files.gl_pathv[0], &old_bytes);
}

static void close_old_pool(const struct act *act)
{
	(void)act;
	free(old_file);
	globfree(&old_files);
}

static void leave_old_pool(const struct act *act)
{
	const struct timespec long_ago[2] = { { .tv_sec = 1000000 }, { .tv_sec = 1000000 } };
	const char *path = old_files.gl_pathv[0];

	(void)act;
	scratch_write(path, old_file, old_bytes);
	if (utimensat(AT_FDCWD, path, long_ago, 0))
		harm_must(-errno, "leave a pool");
}

static int list_pools(const struct act *act, unsigned rank)
{
	struct ioshape_context *context;
	int ret = open_context(act->variant, &context);
	char *names;

	(void)rank;
	if (ret)
		return ret;
	ret = harm_heed(ioshape_pool_list(context, &names));
	if (!ret)
		ioshape_free(names);
	ioshape_context_free(context);
	return ret;
}

#define ACT(id, ...)                                                                               \
	.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .open = open_where,         \
	.close = close_where, .run = take

static const struct act acts[] = {
	{ ACT("slots of the host", .where = THIS_HOST) },
	{ ACT("slots of the host in the usual folder", .where = THIS_HOST_AS_EVER) },
	{ ACT("slots of the host for a filesystem", .where = THIS_HOST, .no_pool = true) },
	{ ACT("slots of the host for two", .where = THIS_HOST), .ranks = 2, .apart = true },
	{ ACT("slots of a Redis", .where = REDIS) },
	{ ACT("slots of a Redis at a socket", .where = REDIS_SOCKET, .urgent = true) },
	{ ACT("slots of a Redis with a password", .where = REDIS_PASSWORD_FILE) },
	{ ACT("slots of a Redis with a password in a variable", .where = REDIS_PASSWORD_VARIABLE) },
	{ ACT("slots of a Redis for two", .where = REDIS), .ranks = 2, .apart = true },
	{ ACT("slots of a Redis without wakes", .where = REDIS, .no_wakes = true), .ranks = 2,
	  .apart = true },
	{ .name = "list of pools with an old one",
	  .variant = &(const struct variant){ .where = THIS_HOST },
	  .open = open_old_pool,
	  .close = close_old_pool,
	  .begin = leave_old_pool,
	  .run = list_pools },
	{ ACT("slots of a Redis that is away", .where = REDIS_AWAY, .urgent = true), .slow = true },
	{ .name = NULL },
};

const struct act *const slots_acts = acts;
