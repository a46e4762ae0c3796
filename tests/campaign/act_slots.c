/* SPDX-License-Identifier: Apache-2.0 */
/* Acts that take slots of this host or of a Redis, also in two processes at a time. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/open_context.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <ioshape/slots.h>

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
	THIS_HOST_AS_EVER, /* in the default folder */
	REDIS,
	REDIS_SOCKET,
	REDIS_PASSWORD_FILE,
	REDIS_PASSWORD_VARIABLE,
	REDIS_AWAY,
};

struct variant {
	enum where where;
	bool no_pool; /* the pool is that of the filesystem */
	bool urgent;
	bool no_wakes; /* the Redis forbids BLPOP, by which waiters are woken */
};

static struct redis_server server;
static char address[128];

/* ---- A Redis, also for other acts ------------------------------------------------------------ */

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

/* ---- Slots ----------------------------------------------------------------------------------- */

static int open_context(const struct variant *variant, struct ioshape_context **context)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.coordinator = variant->where == THIS_HOST         ? harm_coordinator() :
			      variant->where == THIS_HOST_AS_EVER ? "local" :
								    address;
	options.pool = variant->no_pool ? NULL : POOL;
	options.slots = 1;
	options.unreachable = variant->where == REDIS_AWAY ? IOSHAPE_UNREACHABLE_STAGGER :
							     IOSHAPE_UNREACHABLE_FAIL;
	if (variant->where == REDIS_PASSWORD_FILE)
		options.password_file = "password";
	if (variant->where == REDIS_PASSWORD_VARIABLE)
		setenv("IOSHAPE_PASSWORD", PASSWORD, 1);
	return harm_heed(
		open_context_with(context, &options, (struct test_rules){ .lease_ms = 1000 }));
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
	/* The other rank has to wait meanwhile. */
	usleep(2000);
	ioshape_slot_free(slot);
	return ret;
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
	{ ACT("slots of a Redis that is away", .where = REDIS_AWAY, .urgent = true), .slow = true },
	{ .name = NULL },
};

const struct act *const slots_acts = acts;
