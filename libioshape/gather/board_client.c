/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The others' side of a board of sockets. One request at a time; an answer that comes too late is
 * known by its id and passed over.
 */
#define _GNU_SOURCE
#include "gather/board_sockets.h"

#include "gather/own.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LEAST_PATIENCE_NS 100000000ull

struct sockets_client {
	struct sockets_address address;
	uint32_t rank, ranks;
	int fd;
	bool lost;    /* rank 0 closed the connection */
	bool garbled; /* or its end of it speaks no sense; both are for good */
	bool changed; /* for wait() */
	bool gone[SOCKETS_MOST_RANKS];
	uint32_t id; /* of the latest request */
	struct wire_input input;
	struct base_buffer body;   /* of the frame that is coming */
	struct base_buffer unsent; /* of requests that were given up half-way */
	size_t unsent_from;
};

static int lose(struct sockets_client *client)
{
	client->lost = true;
	client->changed = true;
	client->gone[0] = true;
	return -ECONNRESET;
}

/* It may well be alive. */
static int give_up(struct sockets_client *client)
{
	client->garbled = true;
	client->changed = true;
	return -EPROTO;
}

static bool is_over(const struct sockets_client *client)
{
	return client->lost || client->garbled;
}

static int is_lost(const struct sockets_client *client, struct base_error *error)
{
	return base_fail(error, IOSHAPE_E_COORDINATOR,
			 "rank 0 of the group has closed the board at %s, or ended; see what it "
			 "says",
			 client->address.text);
}

static int is_garbled(const struct sockets_client *client, struct base_error *error)
{
	return base_fail(error, -EPROTO,
			 "rank 0 of the group sends what cannot be understood at %s; have all "
			 "ranks the same version of the library?",
			 client->address.text);
}

static int is_slow(const struct sockets_client *client, struct base_error *error)
{
	return base_fail(error, IOSHAPE_E_COORDINATOR,
			 "rank 0 of the group does not answer at %s; is it stopped?",
			 client->address.text);
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

/* The rest of earlier requests. How many bytes went, or a negative errno. */
static ssize_t send_unsent(struct sockets_client *client)
{
	struct base_buffer *unsent = &client->unsent;
	ssize_t went =
		wire_write(client->fd, unsent->data, unsent->bytes, NULL, 0, client->unsent_from);

	if (went <= 0)
		return went;
	client->unsent_from += (size_t)went;
	if (client->unsent_from == unsent->bytes) {
		base_buffer_free(unsent);
		client->unsent_from = 0;
	}
	return went;
}

/* Whether the socket became ready in time. */
static bool wait_for(const struct sockets_client *client, short events, uint64_t until_ns)
{
	struct pollfd polled = { .fd = client->fd, .events = events };
	uint64_t now;
	int ret;

	do {
		now = base_now_ns();
		if (now >= until_ns)
			return poll(&polled, 1, 0) > 0;
		ret = poll(&polled, 1, (int)MIN((until_ns - now + 999999) / 1000000, 60000));
	} while (ret < 0 && errno == EINTR);
	return ret > 0;
}

/* Frames that are no answer. */
static bool is_news(struct sockets_client *client)
{
	const struct wire_head *head = &client->input.head;

	if (head->type != WIRE_GONE && head->type != WIRE_CHANGED)
		return false;
	if (head->type == WIRE_GONE && head->number < client->ranks)
		client->gone[head->number] = true;
	client->changed = true;
	return true;
}

/* What has come: an event, WIRE_WHOLE for an answer to the latest request, or a negative errno. */
static int take(struct sockets_client *client)
{
	int event = wire_read(&client->input, client->fd);

	if (event == WIRE_HEAD) {
		client->body.bytes = 0;
		if (base_buffer_reserve(&client->body, client->input.head.body_bytes))
			return -ENOMEM;
		client->input.body = client->body.data;
		event = wire_read(&client->input, client->fd);
	}
	if (event < 0)
		return event == -EPROTO ? give_up(client) : lose(client);
	if (event != WIRE_WHOLE)
		return event;
	client->body.bytes = client->input.body_bytes;
	wire_next(&client->input);
	if (is_news(client) || client->input.head.id != client->id)
		return WIRE_HEAD;
	return WIRE_WHOLE;
}

/* An answer, at the latest a while after the last byte came. 0, -ETIMEDOUT or another negative
 * errno. */
static int receive(struct sockets_client *client, uint64_t patience_ns)
{
	int event = WIRE_HEAD;
	bool ready;

	while (event != WIRE_WHOLE) {
		if (event == WIRE_NOTHING) {
			ready = wait_for(client, POLLIN, base_now_ns() + patience_ns);
			if (!ready)
				return -ETIMEDOUT;
		}
		event = take(client);
		if (event < 0)
			return event;
	}
	return 0;
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* Bytes that are not sent in time are kept: the other side waits for the rest of the frame. */
static int keep_rest(struct sockets_client *client, const uint8_t *raw, size_t raw_bytes,
		     const void *body, size_t body_bytes, size_t sent)
{
	const size_t of_head = MIN(sent, raw_bytes), of_body = sent - of_head;
	int ret;

	ret = base_buffer_append(&client->unsent, raw + of_head, raw_bytes - of_head);
	if (!ret && body_bytes)
		ret = base_buffer_append(&client->unsent, (const uint8_t *)body + of_body,
					 body_bytes - of_body);
	return ret ? lose(client) : -ETIMEDOUT;
}

static int flush_unsent(struct sockets_client *client)
{
	ssize_t went;

	while (client->unsent.bytes) {
		went = send_unsent(client);
		if (went < 0)
			return lose(client);
		if (!went && !wait_for(client, POLLOUT, base_now_ns() + SOCKETS_CALL_NS))
			return -ETIMEDOUT;
	}
	return 0;
}

static int send_request(struct sockets_client *client, struct wire_head *head, const void *body)
{
	uint8_t raw[WIRE_MOST_HEAD_BYTES];
	size_t raw_bytes, sent = 0;
	ssize_t went;
	int ret;

	ret = client->garbled ? -EPROTO : client->lost ? -ECONNRESET : flush_unsent(client);
	if (ret)
		return ret;
	head->id = ++client->id;
	raw_bytes = wire_put_head(raw, head);
	while (sent < raw_bytes + head->body_bytes) {
		went = wire_write(client->fd, raw, raw_bytes, body, head->body_bytes, sent);
		if (went < 0)
			return lose(client);
		sent += (size_t)went;
		if (!went && !wait_for(client, POLLOUT, base_now_ns() + SOCKETS_CALL_NS))
			/* Nothing of it went: it was never said. */
			return sent ? keep_rest(client, raw, raw_bytes, body, head->body_bytes,
						sent) :
				      -ETIMEDOUT;
	}
	return 0;
}

static int fail(const struct sockets_client *client, int code, struct base_error *error)
{
	if (client->garbled || code == -EPROTO)
		return is_garbled(client, error);
	if (client->lost)
		return is_lost(client, error);
	if (code == -ETIMEDOUT)
		return is_slow(client, error);
	if (code == -ENOMEM)
		return base_no_memory(error, "a note", client->input.head.body_bytes);
	return base_fail(error, code, "rank 0 of the group refuses what was asked at %s",
			 client->address.text);
}

static int ask(struct sockets_client *client, struct wire_head *head, const void *body)
{
	const int ret = send_request(client, head, body);

	return ret ? ret : receive(client, SOCKETS_CALL_NS);
}

/* What the number of a DONE says: 0, 1 or a negative errno. */
static int result(const struct sockets_client *client)
{
	const struct wire_head *head = &client->input.head;
	const int32_t number = (int32_t)head->number;

	return head->type == WIRE_DONE && number <= 1 && number >= -4095 ? number : -EPROTO;
}

int sockets_client_post(struct sockets_client *client, const char *scope, const char *name,
			const void *bytes, size_t count, struct base_error *error)
{
	struct wire_head head = { .type = WIRE_POST, .body_bytes = (uint32_t)count };
	int ret;

	strcpy(head.scope, scope);
	strcpy(head.name, name);
	ret = ask(client, &head, bytes);
	if (!ret)
		ret = result(client);
	if (ret == -ENOSPC && !client->lost)
		return base_fail(error, ret, "the board's notes have more than %llu bytes",
				 BOARD_MOST_BYTES);
	return ret ? fail(client, ret, error) : 0;
}

int sockets_client_look(struct sockets_client *client, const char *scope, const char *name,
			struct base_buffer *note, struct base_error *error)
{
	struct wire_head head = { .type = WIRE_LOOK };
	struct base_buffer before = *note;
	int ret;

	strcpy(head.scope, scope);
	strcpy(head.name, name);
	ret = ask(client, &head, NULL);
	if (ret)
		return fail(client, ret, error);
	if (client->input.head.type == WIRE_NOTE) {
		*note = client->body;
		client->body = before;
		return 0;
	}
	ret = result(client);
	return ret == -EAGAIN ? ret : fail(client, ret, error);
}

/* The notes of one answer. 1 if there are more, 0, or a negative errno; or what found() said, and
 * *stopped. */
static int take_notes(struct sockets_client *client, uint8_t *seen,
		      int (*found)(void *user, uint32_t rank, const struct base_buffer *note),
		      void *user, bool *stopped)
{
	int ret;

	for (;;) {
		const uint32_t rank = client->input.head.number;

		if (client->input.head.type != WIRE_NOTE)
			return result(client);
		if (rank >= client->ranks)
			return -EPROTO;
		seen[rank / 8] |= (uint8_t)(1u << rank % 8);
		ret = found(user, rank, &client->body);
		*stopped = ret;
		if (!ret)
			ret = receive(client, SOCKETS_CALL_NS);
		if (ret)
			return ret;
	}
}

int sockets_client_collect(struct sockets_client *client, const char *scope, const char *prefix,
			   const bool *have,
			   int (*found)(void *user, uint32_t rank, const struct base_buffer *note),
			   void *user, struct base_error *error)
{
	struct wire_head head = { .type = WIRE_COLLECT, .body_bytes = (client->ranks + 7) / 8 };
	uint8_t seen[(SOCKETS_MOST_RANKS + 7) / 8] = { 0 };
	bool stopped = false;
	int ret;

	strcpy(head.scope, scope);
	strcpy(head.name, prefix);
	for (uint32_t i = 0; i < client->ranks; i++) {
		if (have[i])
			seen[i / 8] |= (uint8_t)(1u << i % 8);
	}
	do {
		ret = ask(client, &head, seen);
		if (!ret)
			ret = take_notes(client, seen, found, user, &stopped);
	} while (ret == 1 && !stopped);
	if (stopped || !ret)
		return ret;
	return fail(client, ret, error);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* Whatever has come by itself. */
static void hear(struct sockets_client *client)
{
	while (!is_over(client) && take(client) > WIRE_NOTHING)
		;
}

void sockets_client_wait(struct sockets_client *client, uint32_t timeout_ms)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(timeout_ms);

	if (is_over(client) && !client->changed) {
		board_sleep_ms(timeout_ms);
		return;
	}
	hear(client);
	while (!client->changed && wait_for(client, POLLIN, end_ns))
		hear(client);
	client->changed = false;
}

bool sockets_client_is_gone(struct sockets_client *client, uint32_t rank)
{
	hear(client);
	return rank < client->ranks && client->gone[rank];
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int connect_to(struct sockets_client *client)
{
	const struct sockets_address *address = &client->address;
	int fd, code = 0;

	gather_own_begin();
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		code = errno;
	gather_own_add(fd);
	gather_own_end();
	if (!code && connect(fd, (const struct sockaddr *)&address->un, address->bytes)) {
		code = errno;
		gather_own_close(fd);
	}
	if (!code)
		client->fd = fd;
	return -code;
}

static bool is_ours(int fd)
{
	struct ucred peer;
	socklen_t bytes = sizeof(peer);

	return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) && peer.uid == geteuid();
}

/* Says who we are, and hears whether we are taken in. */
static int introduce(struct sockets_client *client, uint64_t end_ns)
{
	struct wire_head head = { .type = WIRE_HELLO, .number = client->rank, .body_bytes = 4 };
	const uint64_t now = base_now_ns();
	/* Also the last attempt is to hear why it is not taken in. */
	const uint64_t patience_ns = MAX(end_ns > now ? end_ns - now : 0, LEAST_PATIENCE_NS);
	uint8_t ranks[4];
	int ret;

	if (!is_ours(client->fd))
		return -EACCES;
	base_put_le(ranks, client->ranks, 4);
	ret = send_request(client, &head, ranks);
	if (!ret)
		ret = receive(client, patience_ns);
	return ret ? ret : result(client);
}

static void start_anew(struct sockets_client *client)
{
	gather_own_close(client->fd);
	client->fd = -1;
	base_buffer_free(&client->unsent);
	client->unsent_from = 0;
	memset(&client->input, 0, sizeof(client->input));
	memset(client->gone, 0, sizeof(client->gone));
	client->lost = client->garbled = client->changed = false;
}

static int say_why(const struct sockets_client *client, int code, uint32_t deadline_ms,
		   struct base_error *error)
{
	const char *at = client->address.text;

	switch (code) {
	case -EACCES:
		return base_fail(error, code,
				 "the socket %s is another user's: all ranks of a group must run "
				 "as one user",
				 at);
	case -EEXIST:
	case -EINVAL:
		return base_fail(error, code,
				 "at %s runs another group with the same token, or one with a rank "
				 "%u of its own: end it, or give this one another token",
				 at, client->rank);
	case -ETIMEDOUT:
		return base_fail(error, code,
				 "rank 0 of the group does not answer at %s within %u ms; it is "
				 "stopped, or may have no more files open (ulimit -n)",
				 at, deadline_ms);
	case -ECONNREFUSED:
	case -ECONNRESET:
	case -EAGAIN:
		return base_fail(error, -ETIMEDOUT,
				 "rank 0 of the group has not come to %s within %u ms; it may have "
				 "failed, or run on another host or in another container",
				 at, deadline_ms);
	case -EPROTO:
		return is_garbled(client, error);
	default:
		return base_fail(error, code, "cannot connect to rank 0 of the group at %s", at);
	}
}

/* What goes away by itself: rank 0 is not there yet, or an earlier job still is. */
static bool may_pass(int code)
{
	static const int passing[] = { -ECONNREFUSED, -ECONNRESET, -EAGAIN, -EEXIST,
				       -EINVAL,       -EACCES,     -EPIPE,  -EPROTO };

	for (size_t i = 0; i < ARRAY_LENGTH(passing); i++) {
		if (code == passing[i])
			return true;
	}
	return false;
}

static int join(struct sockets_client *client, uint32_t deadline_ms, struct base_error *error)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(deadline_ms);
	uint32_t pause_ms = 2;
	int ret;

	for (;;) {
		ret = connect_to(client);
		if (!ret)
			ret = introduce(client, end_ns);
		if (!ret)
			return 0;
		if (!may_pass(ret) || base_now_ns() >= end_ns)
			break;
		start_anew(client);
		board_sleep_ms(pause_ms);
		pause_ms = MIN(2 * pause_ms, 100);
	}
	return say_why(client, ret, deadline_ms, error);
}

int sockets_join(struct sockets_client **out, const struct gather_board_config *config,
		 struct base_error *error)
{
	struct sockets_client *client = calloc(1, sizeof(*client));
	int ret;

	*out = NULL;
	if (!client)
		return base_no_memory(error, "a board", sizeof(*client));
	client->fd = -1;
	client->rank = config->rank;
	client->ranks = config->ranks;
	sockets_name(&client->address, config->name);
	ret = join(client, config->deadline_ms, error);
	if (ret) {
		sockets_client_close(client);
		return ret;
	}
	*out = client;
	return 0;
}

void sockets_client_close(struct sockets_client *client)
{
	if (client->fd >= 0)
		shutdown(client->fd, SHUT_RDWR);
	gather_own_close(client->fd);
	base_buffer_free(&client->body);
	base_buffer_free(&client->unsent);
	free(client);
}
