/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/redis_server.h"

#include "support/must.h"
#include "support/scratch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_MS 10000

#define LOWEST_PORT 10000
#define CLUSTER_DISTANCE 10000 /* offset of the port on which a cluster node also listens */
#define GIVEN_AWAY 32768       /* lowest port that the kernel gives to outgoing connections */

static bool is_free(unsigned port)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_port = htons((uint16_t)port),
				       .sin_addr.s_addr = htonl(INADDR_ANY) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool well;

	MUST(fd >= 0, "no socket to look for a free port");
	well = !bind(fd, (struct sockaddr *)&address, sizeof(address));

	close(fd);
	return well;
}

uint16_t redis_server_free_port(void)
{
	unsigned port, chance;

	do {
		MUST(getrandom(&chance, sizeof(chance), 0) == sizeof(chance), "no free port");
		port = LOWEST_PORT + chance % (GIVEN_AWAY - CLUSTER_DISTANCE - LOWEST_PORT);
	} while (!is_free(port) || !is_free(port + CLUSTER_DISTANCE));
	return (uint16_t)port;
}

void redis_server_init(struct redis_server *server)
{
	memset(server, 0, sizeof(*server));
	/* Not in the scratch directory: paths of sockets must be short. */
	strcpy(server->directory, "/tmp/ioshape-redis.XXXXXX");
	MUST(mkdtemp(server->directory), "no folder for a redis-server");
	snprintf(server->socket, sizeof(server->socket), "%s/socket", server->directory);
	snprintf(server->log, sizeof(server->log), "%s/log", server->directory);
	server->port = redis_server_free_port();
}

void redis_server_option(struct redis_server *server, const char *name, const char *value)
{
	MUST(server->option_count + 2 < (int)(sizeof(server->options) / sizeof(char *)),
	     "too many options");
	server->options[server->option_count++] = name;
	server->options[server->option_count++] = value;
}

static void run_server(struct redis_server *server, pid_t parent)
{
	const char *arguments[64];
	char port[8], config[112];
	sigset_t none;
	int count = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	snprintf(port, sizeof(port), "%u", server->port);
	snprintf(config, sizeof(config), "%s/sentinel.conf", server->directory);
	arguments[count++] = server->sentinel ? "redis-sentinel" : "redis-server";
	if (server->sentinel)
		arguments[count++] = config;
	const char *const usual[] = { "--port",    port,        "--bind",
				      "127.0.0.1", "--dir",     server->directory,
				      "--logfile", server->log, "--daemonize",
				      "no" };
	for (size_t i = 0; i < sizeof(usual) / sizeof(*usual); i++)
		arguments[count++] = usual[i];
	if (!server->sentinel) {
		const char *const more[] = { "--unixsocket",           server->socket, "--save", "",
					     "--enable-debug-command", "yes" };

		for (size_t i = 0; i < sizeof(more) / sizeof(*more); i++)
			arguments[count++] = more[i];
	}
	for (int i = 0; i < server->option_count; i++)
		arguments[count++] = server->options[i];
	arguments[count] = NULL;
	execvp(arguments[0], (char *const *)(uintptr_t)arguments);
	perror(arguments[0]);
	_exit(127);
}

/*
 * Returns whether the server has answered PING. Any answer but LOADING will do, because a password
 * may be required.
 */
static bool answers(const struct redis_server *server)
{
	struct timeval patience = { 1, 0 };
	redisContext *context = redisConnectWithTimeout("127.0.0.1", server->port, patience);
	redisReply *reply = NULL;
	bool well;

	if (context && !context->err)
		reply = redisCommand(context, "PING");
	well = reply && !(reply->type == REDIS_REPLY_ERROR && strstr(reply->str, "LOADING"));
	freeReplyObject(reply);
	redisFree(context);
	return well;
}

void redis_server_start(struct redis_server *server)
{
	const pid_t parent = getpid();
	int status;

	MUST(!server->pid, "the redis-server runs already");
	server->pid = fork();
	MUST(server->pid >= 0, "no process for a redis-server");
	if (!server->pid)
		run_server(server, parent);
	for (int waited = 0; !answers(server); waited += 10) {
		MUST(waitpid(server->pid, &status, WNOHANG) == 0,
		     "the redis-server ended; see %s (is the package redis-server installed?)",
		     server->log);
		MUST(waited < PATIENCE_MS, "the redis-server does not answer; see %s", server->log);
		poll(NULL, 0, 10);
	}
}

void redis_server_kill(struct redis_server *server)
{
	int status;

	if (!server->pid)
		return;
	kill(server->pid, SIGKILL);
	MUST(waitpid(server->pid, &status, 0) == server->pid, "the redis-server was lost");
	server->pid = 0;
}

void redis_server_signal(struct redis_server *server, int signal)
{
	MUST(!kill(server->pid, signal), "no signal for the redis-server");
}

void redis_server_free(struct redis_server *server)
{
	redis_server_kill(server);
	scratch_remove(server->directory);
}

static redisReply *say(struct redis_server *server, const char *format, va_list args)
{
	struct timeval patience = { 5, 0 };
	redisContext *context = redisConnectWithTimeout("127.0.0.1", server->port, patience);
	redisReply *reply;

	MUST(context && !context->err, "cannot connect to our redis-server");
	if (server->password) {
		reply = redisCommand(context, "AUTH %s %s", server->user, server->password);
		freeReplyObject(reply);
	}
	reply = redisvCommand(context, format, args);
	MUST(reply, "no reply to %s", format);
	redisFree(context);
	return reply;
}

redisReply *redis_server_say(struct redis_server *server, const char *format, ...)
{
	redisReply *reply;
	va_list args;

	va_start(args, format);
	reply = say(server, format, args);
	va_end(args);
	return reply;
}

long long redis_server_tell(struct redis_server *server, const char *format, ...)
{
	redisReply *reply;
	long long number;
	va_list args;

	va_start(args, format);
	reply = say(server, format, args);
	va_end(args);
	MUST(reply->type != REDIS_REPLY_ERROR, "%s: %s", format, reply->str);
	number = reply->integer;
	freeReplyObject(reply);
	return number;
}
