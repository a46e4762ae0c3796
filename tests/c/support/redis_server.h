/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real redis-server for one test, with its own Unix socket, TCP port and folder. It dies with the
 * test's process. If one of these functions fails, the test fails.
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
	const char *user, *password; /* the operator's, if the server asks for them */
	bool sentinel;               /* run redis-sentinel with the file DIRECTORY/sentinel.conf */
};

/* Returns a port on which no process listens. */
uint16_t redis_server_free_port(void);

/*
 * Makes the folder. Options may be added before redis_server_start(); their strings are borrowed.
 */
void redis_server_init(struct redis_server *server);
void redis_server_option(struct redis_server *server, const char *name, const char *value);
/*
 * Starts the server, and returns when it answers. After a kill it starts with the data on its disk.
 */
void redis_server_start(struct redis_server *server);
void redis_server_kill(struct redis_server *server);
void redis_server_signal(struct redis_server *server, int signal);
/* Ends the server and removes its folder. */
void redis_server_free(struct redis_server *server);

/* Runs a command as the operator. Returns the reply, to be freed. Errors are replies, too. */
redisReply *redis_server_say(struct redis_server *server, const char *format, ...);
/* Runs a command that must reply "OK" or a number. Returns the number. */
long long redis_server_tell(struct redis_server *server, const char *format, ...);

#endif
