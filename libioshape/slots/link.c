/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection. hiredis makes commands and takes replies apart; sockets never block, and all
 * waiting is done here, by a deadline: hiredis's own time-outs are for each read of a reply, and
 * leave a connection behind that is out of step.
 */
#define _GNU_SOURCE
#include "slots/link.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECT_NS 1000000000ull

/* Of one reply; the longest that is ours lists all pools. */
#define MOST_REPLY_BYTES (16 * MIB) /* unless more is expected */
#define MOST_REPLY_ELEMENTS (1u << 20)
#define BYTES_PER_S (4 * MIB)

struct slots_link {
	redisContext *context;
	struct slots_node node;
	bool tls;
	size_t reply_bytes; /* that came of a reply which is not whole yet */
	size_t most_reply_bytes;
	size_t sent_bytes; /* of the latest command */
	char name[ADDRESS_HOST_BYTES + 32];
};

/* ---- Commands -------------------------------------------------------------------------------- */

void link_add_bytes(struct link_command *command, const char *text, size_t bytes)
{
	command->texts[command->count] = text;
	command->bytes[command->count++] = bytes;
}

void link_add_text(struct link_command *command, const char *text)
{
	link_add_bytes(command, text, strlen(text));
}

void link_add_text_list(struct link_command *command, const char *const texts[], size_t count)
{
	for (size_t i = 0; i < count; i++)
		link_add_text(command, texts[i]);
}

void link_add_number_list(struct link_command *command, const uint64_t numbers[], size_t count)
{
	for (size_t i = 0; i < count; i++) {
		char *text = command->numbers[command->number_count++];

		snprintf(text, sizeof(command->numbers[0]), "%llu", (unsigned long long)numbers[i]);
		link_add_text(command, text);
	}
}

void link_expect(struct slots_link *link, size_t most_reply_bytes)
{
	link->most_reply_bytes = MAX(most_reply_bytes, MOST_REPLY_BYTES);
}

/* ---- Sending and receiving ------------------------------------------------------------------- */

int link_fd(const struct slots_link *link)
{
	return link->context->fd;
}

const char *link_name(const struct slots_link *link)
{
	return link->name;
}

const struct slots_node *link_node(const struct slots_link *link)
{
	return &link->node;
}

static int is_closed(const struct slots_link *link, struct base_error *error)
{
	return base_refuse(error, -ECONNRESET, "%s closed the connection", link->name);
}

/* What the kernel says went wrong. */
static int is_cut(const struct slots_link *link, int code, struct base_error *error)
{
	if (code != ETIMEDOUT && code != EHOSTUNREACH && code != ENETUNREACH)
		return is_closed(link, error);
	return base_fail(error, -code, "%s is unreachable", link->name);
}

/* What hiredis says went wrong. */
static int lost(struct slots_link *link, struct base_error *error)
{
	const int code = errno;

	if (link->context->err == REDIS_ERR_EOF)
		return is_closed(link, error);
	if (link->context->err == REDIS_ERR_IO)
		return is_cut(link, code, error);
	return base_refuse(error, -EPROTO, "%s does not answer as a Redis does (%.100s)",
			   link->name, link->context->errstr);
}

static int no_memory(const struct slots_link *link, struct base_error *error)
{
	return base_refuse(error, -ENOMEM, "no memory for a command to %s", link->name);
}

/*
 * Where long replies are expected, commands are long as well: for each second that BYTES_PER_S
 * would take for what has passed there is one more. Where nothing passes it ends as soon as ever.
 */
static uint64_t until_with(const struct slots_link *link, uint64_t until_ns)
{
	if (link->most_reply_bytes <= MOST_REPLY_BYTES)
		return until_ns;
	return until_ns + (link->sent_bytes + link->reply_bytes) * 1000 / (BYTES_PER_S / 1000000);
}

static int wait_for(const struct slots_link *link, short events, uint64_t until_ns,
		    struct base_error *error)
{
	struct pollfd ready = { .fd = link->context->fd, .events = events };
	int ret;

	do {
		ret = poll(&ready, 1, link_time_left_ms(until_ns));
	} while (ret < 0 && errno == EINTR);
	if (ret > 0)
		return 0;
	if (ret < 0)
		return base_fail(error, -errno, "cannot wait for %s", link->name);
	return base_refuse(error, -ETIMEDOUT, "%s does not answer in time", link->name);
}

static int send_encrypted(struct slots_link *link, const char *text, size_t bytes,
			  uint64_t until_ns, struct base_error *error)
{
	int done = 0, ret;

	if (!link_queue_encrypted(link->context, text, bytes))
		return no_memory(link, error);
	link->sent_bytes = bytes;
	for (;;) {
		if (!link_write_encrypted(link->context, &done))
			return lost(link, error);
		if (done)
			return 0;
		ret = wait_for(link, POLLOUT, until_with(link, until_ns), error);
		if (ret)
			return ret;
	}
}

static int send_plain(struct slots_link *link, const char *text, size_t bytes, uint64_t until_ns,
		      struct base_error *error)
{
	size_t sent = 0;

	link->sent_bytes = 0;
	while (sent < bytes) {
		ssize_t now = send(link->context->fd, text + sent, bytes - sent, MSG_NOSIGNAL);
		int ret = 0;

		if (now >= 0)
			link->sent_bytes = sent += (size_t)now;
		else if (errno == EAGAIN)
			ret = wait_for(link, POLLOUT, until_with(link, until_ns), error);
		else if (errno != EINTR)
			ret = is_cut(link, errno, error);
		if (ret)
			return ret;
	}
	return 0;
}

int link_send(struct slots_link *link, const struct link_command *command, uint64_t until_ns,
	      struct base_error *error)
{
	/* Its declaration lacks a const, not its code. */
	const char **texts = (const char **)(uintptr_t)command->texts;
	char *text = NULL;
	long long bytes = redisFormatCommandArgv(&text, command->count, texts, command->bytes);
	int ret;

	if (bytes < 0)
		return no_memory(link, error);
	ret = (link->tls ? send_encrypted : send_plain)(link, text, (size_t)bytes, until_ns, error);
	/* It may hold the password. */
	explicit_bzero(text, (size_t)bytes);
	redisFreeCommand(text);
	return ret;
}

/* Takes what has come. TLS may have to write for that. */
static int pull(struct slots_link *link, struct base_error *error)
{
	const size_t before = link->context->reader->len;
	struct base_held_sigpipe held;
	int ret;

	if (link->tls)
		base_hold_sigpipe(&held);
	ret = redisBufferRead(link->context);
	if (link->tls)
		base_let_sigpipe(&held, true);
	if (ret != REDIS_OK)
		return lost(link, error);
	link->reply_bytes += link->context->reader->len - before;
	if (link->reply_bytes <= link->most_reply_bytes)
		return 0;
	return base_refuse(error, -EPROTO,
			   "%s does not answer as a Redis does (a reply has no end)", link->name);
}

static int take_parsed(struct slots_link *link, redisReply **reply, struct base_error *error)
{
	void *parsed = NULL;

	if (redisGetReplyFromReader(link->context, &parsed) != REDIS_OK)
		return lost(link, error);
	*reply = parsed;
	if (parsed)
		link->reply_bytes = 0;
	return 0;
}

int link_take(struct slots_link *link, redisReply **reply, struct base_error *error)
{
	int ret;

	*reply = NULL;
	ret = take_parsed(link, reply, error);
	if (ret || *reply)
		return ret;
	ret = pull(link, error);
	return ret ? ret : take_parsed(link, reply, error);
}

int link_ask(struct slots_link *link, const struct link_command *command, redisReply **reply,
	     uint64_t until_ns, struct base_error *error)
{
	int ret = link_send(link, command, until_ns, error);

	*reply = NULL;
	while (!ret && !*reply) {
		ret = wait_for(link, POLLIN, until_with(link, until_ns), error);
		if (!ret)
			ret = link_take(link, reply, error);
	}
	return ret;
}

/* ---- Error replies --------------------------------------------------------------------------- */

void link_words(const redisReply *reply, char *words, size_t room)
{
	size_t used = 0;

	for (size_t i = 0; i < reply->len && used + 1 < room; i++) {
		char c = reply->str[i];

		words[used++] = c >= ' ' && c <= '~' ? c : '?';
	}
	words[used] = 0;
}

bool link_says(const redisReply *reply, const char *word)
{
	return reply->type == REDIS_REPLY_ERROR && reply->str && strstr(reply->str, word);
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Some servers repeat the arguments of a command that they do not know. */
static int refuse_password(const redisReply *reply, const char *name, struct base_error *error)
{
	static const char *const harmless[] = { "WRONGPASS",
						"NOPERM",
						"ERR AUTH <password> called",
						"ERR Client sent AUTH",
						"ERR invalid password",
						"ERR wrong number" };
	char words[200] = "";

	for (size_t i = 0; i < ARRAY_LENGTH(harmless); i++) {
		if (!strncmp(reply->str, harmless[i], strlen(harmless[i])))
			link_words(reply, words, sizeof(words));
	}
	return base_refuse(error, -EACCES, "%s does not take the user or the password%s%s", name,
			   *words ? ": " : "", words);
}

int link_show_password(struct slots_link *link, const struct slots_address *address,
		       uint64_t until_ns, struct base_error *error)
{
	struct link_command command = { 0 };
	redisReply *reply;
	int ret;

	link_add_text(&command, "AUTH");
	if (*address->user)
		link_add_text(&command, address->user);
	link_add_text(&command, address->password);
	ret = link_ask(link, &command, &reply, until_ns, error);
	if (!ret && reply->type == REDIS_REPLY_ERROR)
		ret = refuse_password(reply, link->name, error);
	freeReplyObject(reply);
	return ret;
}

static int select_database(struct slots_link *link, uint32_t database, uint64_t until_ns,
			   struct base_error *error)
{
	struct link_command command = { 0 };
	redisReply *reply;
	char words[200];
	int ret;

	link_add_text(&command, "SELECT");
	link_add_numbers(&command, database);
	ret = link_ask(link, &command, &reply, until_ns, error);
	if (!ret && reply->type == REDIS_REPLY_ERROR) {
		link_words(reply, words, sizeof(words));
		ret = base_refuse(error, -EACCES, "%s does not give database %u: %s", link->name,
				  database, words);
	}
	freeReplyObject(reply);
	return ret;
}

static int greet_server(struct slots_link *link, const struct slots_address *address,
			uint64_t until_ns, struct base_error *error)
{
	int ret = 0;

	if (address->has_password || *address->user)
		ret = link_show_password(link, address, until_ns, error);
	if (!ret && address->database)
		ret = select_database(link, address->database, until_ns, error);
	return ret;
}

static void name_it(struct slots_link *link, const struct slots_address *address,
		    const struct slots_node *node)
{
	if (!node) {
		snprintf(link->name, sizeof(link->name), "redis at %s", address->path);
		return;
	}
	link->node = *node;
	snprintf(link->name, sizeof(link->name),
		 strchr(node->host, ':') ? "redis at [%s]:%u" : "redis at %s:%u", node->host,
		 node->port);
}

/* hiredis makes room for as many elements as a server announces: before 1.0.1, and by default. */
#if HIREDIS_MAJOR >= 1
typedef size_t element_count;
#else
typedef int element_count;
#endif

static redisReplyObjectFunctions makers;
static void *(*make_array)(const redisReadTask *task, element_count elements);
static pthread_once_t makers_once = PTHREAD_ONCE_INIT;

static void *make_short_array(const redisReadTask *task, element_count elements)
{
	return (uint64_t)elements > MOST_REPLY_ELEMENTS ? NULL : make_array(task, elements);
}

static void choose_makers(void)
{
	redisReader *reader = redisReaderCreate();

	if (!reader)
		return;
	makers = *reader->fn;
	make_array = makers.createArray;
	makers.createArray = make_short_array;
	redisReaderFree(reader);
}

void link_limit_replies(redisReader *reader)
{
	pthread_once(&makers_once, choose_makers);
	if (make_array)
		reader->fn = &makers;
}

static int connect_link(struct slots_link *link, const struct slots_address *address,
			const struct slots_node *node, uint64_t until_ns, struct base_error *error)
{
	int fd;

	fd = link_connect(address, node, MIN(until_ns, base_now_ns() + CONNECT_NS), link->name,
			  error);
	if (fd < 0)
		return fd;
	link->context = redisConnectFd(fd);
	if (!link->context || link->context->err) {
		if (!link->context)
			close(fd);
		return base_refuse(error, -ENOMEM, "no memory for a connection to %s", link->name);
	}
	link->context->flags &= ~REDIS_BLOCK;
	link_limit_replies(link->context->reader);
	link->tls = address->tls;
	if (!link->tls)
		return 0;
	return link_start_tls(link->context, link->node.host, until_ns, link->name, error);
}

int link_open(struct slots_link **out, const struct slots_address *address,
	      const struct slots_node *node, bool greet, uint64_t until_ns,
	      struct base_error *error)
{
	struct slots_link *link = calloc(1, sizeof(*link));
	int ret;

	*out = NULL;
	if (!link)
		return base_no_memory(error, "a connection", sizeof(*link));
	name_it(link, address, node);
	link_expect(link, 0);
	ret = connect_link(link, address, node, until_ns, error);
	if (!ret && greet)
		ret = greet_server(link, address, until_ns, error);
	if (ret) {
		link_close(link);
		return ret;
	}
	*out = link;
	return 0;
}

void link_close(struct slots_link *link)
{
	struct base_held_sigpipe held;

	if (!link)
		return;
	if (link->context) {
		/* TLS may say good-bye. */
		base_hold_sigpipe(&held);
		redisFree(link->context);
		base_let_sigpipe(&held, true);
	}
	free(link);
}
