/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crowd SOCKET POOL COUNT: runs COUNT clients that wait for a slot of a pool in the Redis behind
 * this socket, until standard input ends.
 *
 * For the server each client looks like a process with this library. It asks for slots and sends
 * heartbeats through the library's code on its own connection, and waits with BLPOP on a second
 * one. The clients share one thread, so that thousands of them fit on one machine beside the
 * measured processes. A client that gets the slot releases it at once and queues again.
 */
#define _GNU_SOURCE
#include "bench.h"
#include "slots/slots.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define LEASE_MS 15000u
#define BEAT_NS (LEASE_MS / 3 * 1000000ull)
#define STDIN_MARK UINT32_MAX

struct client {
	struct slots_config config;
	struct slots_request request;
	struct slots_answer answer;
	void *pool;
	int wake; /* the connection that BLPOP waits on */
};

struct crowd {
	struct client *clients;
	size_t count, next; /* `next`: client whose heartbeat is due */
	uint64_t began_ns, beats, grants;
	char address[256];
	const char *socket;
	int events;
};

static void connect_wake(struct crowd *crowd, uint32_t number)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	struct epoll_event event = { .events = EPOLLIN, .data.u32 = number };
	struct client *client = &crowd->clients[number];

	snprintf(to.sun_path, sizeof(to.sun_path), "%s", crowd->socket);
	client->wake = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (client->wake < 0 || connect(client->wake, (struct sockaddr *)&to, sizeof(to)) ||
	    epoll_ctl(crowd->events, EPOLL_CTL_ADD, client->wake, &event))
		fail("client %u: %s", number, strerror(errno));
}

static void wait_for_wake(const struct client *client)
{
	char key[SLOTS_NAME_BYTES + 64], text[SLOTS_NAME_BYTES + 128];
	int bytes;

	snprintf(key, sizeof(key), "{ios:%s}:v7:w:%s", client->config.pool,
		 client->config.identity.client);
	bytes = snprintf(text, sizeof(text), "*3\r\n$5\r\nBLPOP\r\n$%zu\r\n%s\r\n$1\r\n0\r\n",
			 strlen(key), key);
	if (write(client->wake, text, (size_t)bytes) != bytes)
		fail("a client cannot wait: %s", strerror(errno));
}

static void queue(struct client *client)
{
	static uint64_t number;
	struct base_error error = { 0 };

	snprintf(client->request.id, sizeof(client->request.id), "%s-%llu",
		 client->config.identity.client, (unsigned long long)++number);
	if (slots_redis.acquire(client->pool, &client->request, &client->answer, &error))
		fail("a client cannot queue: %s", error.text);
}

static void join(struct crowd *crowd, uint32_t number, const char *pool)
{
	struct client *client = &crowd->clients[number];
	struct slots_config *config = &client->config;
	struct base_error error = { 0 };

	*config = (struct slots_config){
		.address = crowd->address,
		.identity = { .job = "crowd", .node = "crowd", .ranks = 1, .share = 1 },
		.lease_ms = LEASE_MS,
		.default_capacity = 1,
	};
	config->identity.rank = number;
	snprintf(config->identity.client, sizeof(config->identity.client), "c%015x", number);
	snprintf(config->pool, sizeof(config->pool), "%s", pool);
	/* So many bytes that the measured clients, which ask for few, are always granted first. */
	client->request.weight = 1;
	client->request.bytes = 1ull << 40;
	if (slots_redis.open(&client->pool, config, &error))
		fail("%s", error.text);
	queue(client);
	connect_wake(crowd, number);
	wait_for_wake(client);
}

static void beat(struct client *client)
{
	struct slots_beat said = { .bytes = client->request.bytes };
	struct base_error error = { 0 };

	memcpy(said.id, client->request.id, sizeof(said.id));
	if (slots_redis.beat(client->pool, &said, &client->answer, &error))
		fail("a sign of life: %s", error.text);
	if (client->answer.state == SLOTS_NONE)
		queue(client);
}

static void be_woken(struct crowd *crowd, struct client *client)
{
	char text[512];

	if (read(client->wake, text, sizeof(text)) <= 0)
		fail("the server closed a connection");
	beat(client);
	if (client->answer.state == SLOTS_HOLDING) {
		crowd->grants++;
		slots_redis.release(client->pool, client->request.id, 0, NULL);
		queue(client);
	}
	wait_for_wake(client);
}

/* Sends the heartbeats that are due. They are spread evenly over time, as those of real
 * processes. */
static void beat_in_time(struct crowd *crowd)
{
	const uint64_t due = (base_now_ns() - crowd->began_ns) / (BEAT_NS / crowd->count);

	for (; crowd->beats < due; crowd->beats++) {
		beat(&crowd->clients[crowd->next]);
		crowd->next = (crowd->next + 1) % crowd->count;
	}
}

static bool listen_once(struct crowd *crowd)
{
	struct epoll_event events[64];
	int count = epoll_wait(crowd->events, events, 64, 5);

	for (int i = 0; i < count; i++) {
		if (events[i].data.u32 == STDIN_MARK)
			return false;
		be_woken(crowd, &crowd->clients[events[i].data.u32]);
	}
	return true;
}

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLHUP, .data.u32 = STDIN_MARK };
	struct crowd crowd = { .events = epoll_create1(EPOLL_CLOEXEC) };

	if (argc != 4)
		fail("crowd SOCKET POOL COUNT");
	crowd.socket = argv[1];
	snprintf(crowd.address, sizeof(crowd.address), "unix://%s", crowd.socket);
	crowd.count = strtoul(argv[3], NULL, 10);
	crowd.clients = crowd.count ? calloc(crowd.count, sizeof(*crowd.clients)) : NULL;
	if (!crowd.clients || epoll_ctl(crowd.events, EPOLL_CTL_ADD, STDIN_FILENO, &event))
		fail("a crowd of %zu cannot be made", crowd.count);
	for (uint32_t i = 0; i < crowd.count; i++)
		join(&crowd, i, argv[2]);
	answer_number("waiting", (double)crowd.count);
	answer_send();
	crowd.began_ns = base_now_ns();
	while (listen_once(&crowd))
		beat_in_time(&crowd);
	answer_number("beats", (double)crowd.beats);
	answer_number("grants", (double)crowd.grants);
	answer_send();
	return 0;
}
