/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real redis-server for one test, on a socket and a TCP port of its own, in a folder of its own.
 * It dies with the test's process. Tests fail where these fail.
 */
#ifndef TESTS_SUPPORT_REDIS_SERVER_H
#define TESTS_SUPPORT_REDIS_SERVER_H

#include <hiredis.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define REDIS_SERVER_OPTIONS 16

struct redis_server {
	pid_t pid; /* 0 while it does not run */
	uint16_t port;
	char directory[64];
	char socket[96];
	char log[96];
	const char *options[2 * REDIS_SERVER_OPTIONS]; /* "--name", "value", ... */
	int option_count;
	const char *user, *password; /* of the operator, if one is asked for */
	bool sentinel;               /* redis-sentinel, with the file DIRECTORY/sentinel.conf */
};

/* A port that nobody listens on. */
uint16_t redis_server_free_port(void);

/* Makes the folder; options, borrowed, may be added before redis_server_start(). */
void redis_server_init(struct redis_server *server);
void redis_server_option(struct redis_server *server, const char *name, const char *value);
/* Returns when it answers. Also after it ended, with what it then had on its disk. */
void redis_server_start(struct redis_server *server);
/* Asks it to end, and waits. */
void redis_server_stop(struct redis_server *server);
void redis_server_kill(struct redis_server *server);
void redis_server_signal(struct redis_server *server, int signal);
/* Ends it and removes its folder. */
void redis_server_free(struct redis_server *server);

/* A command as an operator would give it; the reply is to be freed. Errors are replies, too. */
redisReply *redis_server_say(struct redis_server *server, const char *format, ...);
/* The same where "OK" or a number is all that is expected. */
long long redis_server_tell(struct redis_server *server, const char *format, ...);

#endif
