/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator that is a Redis, from the bottom up:
 *
 *     A connection    Socket, TLS, password, one command and its reply.
 *     A client        Reads the password, finds the server, connects, and handles lost connections,
 *                     missing scripts, redirects and refusals.
 *     A pool          Calls the script that keeps the queue (slots.lua), and waits for wake-ups.
 *     Messages        Hashes beside a pool's keys, in which ranks leave each other messages.
 *
 * hiredis formats commands and parses replies. Sockets never block; this file does all waiting,
 * with deadlines. The time-outs of hiredis apply to each read of a reply, and leave a connection
 * whose replies no longer match its commands. Its own connect functions set no CLOEXEC, and put no
 * limit on name look-ups.
 */
#define _GNU_SOURCE
#include "fs/fs.h"
#include "slots/address.h"
#include "slots/slots.h"

#include <errno.h>
#include <fcntl.h>
#include <hiredis.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#ifdef SLOTS_TLS
#include <hiredis_ssl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#endif

/* Version of the script's data format, part of each key. Versions of the library with different
 * formats use separate pools. */
#define REDIS_SCRIPT_FORMAT BASE_FORMAT(7u)

/* ---- A connection ---------------------------------------------------------------------------- */

/*
 * One thread at a time may use a connection. No function waits past its deadline, and a closed
 * connection raises no SIGPIPE.
 *
 * Functions return 0; -ECONNRESET if the server closed the connection; -ETIMEDOUT; or another
 * negative errno. After any failure the replies no longer match the commands, so only link_close()
 * may follow.
 */

#define LINK_MOST_ARGUMENTS 136
#define LINK_MOST_NUMBERS 24

struct slots_link {
	redisContext *context;
	struct slots_node node;             /* "" and 0 for a Unix socket */
	char name[ADDRESS_HOST_BYTES + 32]; /* such as "redis at host:port" */
	bool tls;
	size_t reply_bytes; /* bytes received of a reply that is not complete yet */
	size_t most_reply_bytes;
	size_t sent_bytes; /* bytes sent of the latest command */
};

/* A command under construction. Texts are borrowed until it is sent; the command keeps its own copy
 * of numbers. */
struct link_command {
	int count, number_count;
	char numbers[LINK_MOST_NUMBERS][24];
	const char *texts[LINK_MOST_ARGUMENTS];
	size_t bytes[LINK_MOST_ARGUMENTS];
};

#define CONNECT_NS 1000000000ull

/* Limits of one reply, unless the caller expects longer ones. */
#define MOST_REPLY_BYTES (16 * MIB)
#define MOST_REPLY_ELEMENTS (1u << 20)
#define BYTES_PER_S (4 * MIB)

/* Name look-ups that run at a time in this process: each may hang for half a minute. */
#define MOST_LOOKUPS 4

/* Returns the milliseconds until until_ns, at least 0, rounded up. */
static int link_time_left_ms(uint64_t until_ns)
{
	uint64_t now = base_now_ns();

	if (until_ns <= now)
		return 0;
	return (int)MIN((until_ns - now + 999999) / 1000000, 3600000u);
}

/* ---- Name look-ups --------------------------------------------------------------------------- */

static int lookups;

/* Resets the counter in a forked child, which lacks the threads that would count it down. */
static void forget_lookups(void)
{
	__atomic_store_n(&lookups, 0, __ATOMIC_RELAXED);
}

static void expect_forks(void)
{
	pthread_atfork(NULL, NULL, forget_lookups);
}

/* A look-up in a thread of its own, because getaddrinfo() has no deadline. (glibc's getaddrinfo_a()
 * does not work in a child of fork().) Of the look-up's thread and the thread that waits for it,
 * the last one to use it frees it. */
struct lookup {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	char host[ADDRESS_HOST_BYTES], port[8];
	struct addrinfo *found;
	int code;
	bool done, abandoned;
};

static int ask_for(const char *host, const char *port, int flags, struct addrinfo **found)
{
	const struct addrinfo wanted = { .ai_socktype = SOCK_STREAM,
					 .ai_flags = AI_NUMERICSERV | flags };

	return getaddrinfo(host, port, &wanted, found);
}

static void free_lookup(struct lookup *lookup)
{
	pthread_cond_destroy(&lookup->changed);
	pthread_mutex_destroy(&lookup->lock);
	free(lookup);
}

static void *run_lookup(void *argument)
{
	struct lookup *lookup = argument;
	struct addrinfo *found = NULL;
	int code = ask_for(lookup->host, lookup->port, AI_ADDRCONFIG, &found);
	bool abandoned;

	__atomic_sub_fetch(&lookups, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&lookup->lock);
	lookup->code = code;
	lookup->found = code ? NULL : found;
	lookup->done = true;
	abandoned = lookup->abandoned;
	pthread_cond_signal(&lookup->changed);
	pthread_mutex_unlock(&lookup->lock);
	if (abandoned) {
		if (lookup->found)
			freeaddrinfo(lookup->found);
		free_lookup(lookup);
	}
	return NULL;
}

static struct lookup *start_lookup(const char *host, const char *port)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct lookup *lookup = calloc(1, sizeof(*lookup));
	pthread_t thread;

	if (!lookup)
		return NULL;
	pthread_once(&once, expect_forks);
	pthread_mutex_init(&lookup->lock, NULL);
	base_cond_init(&lookup->changed);
	snprintf(lookup->host, sizeof(lookup->host), "%s", host);
	snprintf(lookup->port, sizeof(lookup->port), "%s", port);
	if (__atomic_add_fetch(&lookups, 1, __ATOMIC_RELAXED) > MOST_LOOKUPS ||
	    base_start_thread(&thread, run_lookup, lookup)) {
		__atomic_sub_fetch(&lookups, 1, __ATOMIC_RELAXED);
		free_lookup(lookup);
		return NULL;
	}
	pthread_detach(thread);
	return lookup;
}

/* Looks up a host by the deadline. Returns a code of getaddrinfo(); EAI_AGAIN after the
 * deadline. */
static int look_up(const char *host, const char *port, uint64_t until_ns, struct addrinfo **found)
{
	struct lookup *lookup = start_lookup(host, port);
	int code = EAI_AGAIN, left;

	if (!lookup)
		return EAI_MEMORY;
	pthread_mutex_lock(&lookup->lock);
	while (!lookup->done && (left = link_time_left_ms(until_ns)) > 0)
		base_cond_wait_ms(&lookup->changed, &lookup->lock, left);
	if (!lookup->done) {
		lookup->abandoned = true;
		pthread_mutex_unlock(&lookup->lock);
		return code;
	}
	pthread_mutex_unlock(&lookup->lock);
	code = lookup->code;
	*found = lookup->found;
	free_lookup(lookup);
	return code;
}

/* ---- Sockets --------------------------------------------------------------------------------- */

static int wait_until_connected(int fd, uint64_t until_ns)
{
	struct pollfd ready = { .fd = fd, .events = POLLOUT };
	socklen_t bytes = sizeof(int);
	int code = 0, ret;

	do {
		ret = poll(&ready, 1, link_time_left_ms(until_ns));
	} while (ret < 0 && errno == EINTR);
	if (ret <= 0)
		return ret ? -errno : -ETIMEDOUT;
	if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &bytes))
		return -errno;
	return -code;
}

static int connect_to(const struct sockaddr *to, socklen_t bytes, uint64_t until_ns)
{
	int fd = base_above_streams(
		socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	int ret = 0;

	if (fd < 0)
		return -errno;
	if (connect(fd, to, bytes))
		ret = errno == EINPROGRESS || errno == EINTR ? wait_until_connected(fd, until_ns) :
							       -errno;
	if (!ret)
		return fd;
	close(fd);
	/* EAGAIN: the queue of a Unix socket is full, so the server accepts no connections. */
	return ret == -EAGAIN ? -ETIMEDOUT : ret;
}

/* Makes the kernel detect within seconds that the peer vanished. Best effort; errors are
 * ignored. */
static void set_tcp_options(int fd)
{
	const int on = 1, idle_s = 15, interval_s = 5, probes = 3, unanswered_ms = 10000;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof(unanswered_ms));
}

static int connect_any(const struct addrinfo *found, uint64_t until_ns)
{
	int fd = -EADDRNOTAVAIL;
	unsigned count = 0;

	for (const struct addrinfo *at = found; at; at = at->ai_next)
		count++;
	/* Each address gets an equal part of the time, because the network of the first one may
	 * drop all packets. */
	for (; found; found = found->ai_next, count--) {
		uint64_t now = base_now_ns();
		uint64_t left = until_ns > now ? until_ns - now : 0;

		fd = connect_to(found->ai_addr, found->ai_addrlen, now + left / count);
		if (fd >= 0)
			break;
	}
	return fd;
}

static int fail_to_connect(int code, const char *name, struct base_error *error)
{
	return base_fail_with(error, code, "check that it runs, and that this host can reach it",
			      "cannot connect to %s", name);
}

static int connect_host(const struct slots_node *node, uint64_t until_ns, const char *name,
			struct base_error *error)
{
	struct addrinfo *found = NULL;
	char port[8];
	int code, fd;

	snprintf(port, sizeof(port), "%u", node->port);
	code = ask_for(node->host, port, AI_NUMERICHOST, &found);
	if (code)
		code = look_up(node->host, port, until_ns, &found);
	if (code)
		return base_fail_reason_with(error, code == EAI_AGAIN ? -ETIMEDOUT : -EHOSTUNREACH,
					     "check its name, and this host's name resolution",
					     "the host of %s cannot be found (%s)", name,
					     gai_strerror(code));
	fd = connect_any(found, until_ns);
	freeaddrinfo(found);
	if (fd < 0)
		return fail_to_connect(fd, name, error);
	set_tcp_options(fd);
	return fd;
}

/* Returns a connected, non-blocking socket, or a negative errno. */
static int open_socket(const struct slots_address *address, const struct slots_node *node,
		       uint64_t until_ns, const char *name, struct base_error *error)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int fd;

	if (node)
		return connect_host(node, until_ns, name, error);
	/* A path that fills sun_path has no final 0. The kernel accepts that. */
	memcpy(to.sun_path, address->path, sizeof(to.sun_path));
	fd = connect_to((const struct sockaddr *)&to, sizeof(to), until_ns);
	return fd < 0 ? fail_to_connect(fd, name, error) : fd;
}

/* ---- TLS ------------------------------------------------------------------------------------- */

#ifdef SLOTS_TLS

/* Available if the build found hiredis >= 1.0 with TLS. OpenSSL decides which certificates are
 * valid (SSL_CERT_FILE, SSL_CERT_DIR). */

/* Trusted certificates. Shared by all connections of the process, and loaded at first use. */
static SSL_CTX *trust;
static pthread_once_t trust_once = PTHREAD_ONCE_INIT;

static void make_trust(void)
{
	SSL_CTX *made = SSL_CTX_new(TLS_client_method());

	if (!made)
		return;
	SSL_CTX_set_verify(made, SSL_VERIFY_PEER, NULL);
	if (!SSL_CTX_set_min_proto_version(made, TLS1_2_VERSION) ||
	    !SSL_CTX_set_default_verify_paths(made)) {
		SSL_CTX_free(made);
		return;
	}
	trust = made;
}

/* Makes a TLS session that checks the certificate's names against the host. The set-up of hiredis
 * does not check them. NULL: failure. */
static SSL *new_session(const char *host)
{
	X509_VERIFY_PARAM *wanted;
	SSL *session;

	pthread_once(&trust_once, make_trust);
	session = trust ? SSL_new(trust) : NULL;
	if (!session)
		return NULL;
	wanted = SSL_get0_param(session);
	if (X509_VERIFY_PARAM_set1_ip_asc(wanted, host))
		return session;
	if (SSL_set1_host(session, host) && SSL_set_tlsext_host_name(session, host))
		return session;
	SSL_free(session);
	return NULL;
}

static int tls_refused(SSL *session, const char *name, struct base_error *error)
{
	const long verdict = SSL_get_verify_result(session);
	const char *reason = ERR_reason_error_string(ERR_peek_last_error());

	if (verdict != X509_V_OK)
		reason = X509_verify_cert_error_string(verdict);
	return base_fail_reason_with(
		error, -EPROTO,
		"check that it uses TLS on this port, that its certificate is for "
		"this name, and that SSL_CERT_FILE has the CA that signed it",
		"cannot start TLS with %s (%.100s)", name,
		reason ? reason : "the connection ended");
}

/* Does one step of the handshake. Returns 0 when it is complete; -EAGAIN with the events to wait
 * for; or -EPROTO. */
static int step(SSL *session, short *events)
{
	struct base_held_sigpipe held;
	int ret;

	base_hold_sigpipe(&held);
	ERR_clear_error();
	ret = SSL_do_handshake(session);
	base_let_sigpipe(&held, true);
	if (ret == 1)
		return 0;
	ret = SSL_get_error(session, ret);
	*events = ret == SSL_ERROR_WANT_WRITE ? POLLOUT : POLLIN;
	return ret == SSL_ERROR_WANT_READ || ret == SSL_ERROR_WANT_WRITE ? -EAGAIN : -EPROTO;
}

/* Completes the handshake by the deadline, however slowly the peer answers. */
static int shake_hands(SSL *session, int fd, uint64_t until_ns, const char *name,
		       struct base_error *error)
{
	struct pollfd ready = { .fd = fd };
	int ret;

	while ((ret = step(session, &ready.events)) == -EAGAIN) {
		if (base_now_ns() >= until_ns)
			return base_fail_reason_with(error, -ETIMEDOUT,
						     "check that it uses TLS on this port",
						     "%s does not answer in time", name);
		/* The loop checks the clock, so the result of poll() does not matter. */
		(void)poll(&ready, 1, link_time_left_ms(until_ns));
	}
	return ret ? tls_refused(session, name, error) : 0;
}

static int start_tls(redisContext *context, const char *host, uint64_t until_ns, const char *name,
		     struct base_error *error)
{
	SSL *session = new_session(host);
	struct base_held_sigpipe held;
	int ret;

	if (!session)
		return base_fail_reason(error, -ENOMEM, "cannot set up TLS for %s", name);
	/* With a non-blocking socket this only starts the handshake. On success the context owns
	 * the session. */
	base_hold_sigpipe(&held);
	ret = redisInitiateSSL(context, session);
	base_let_sigpipe(&held, true);
	if (ret == REDIS_OK)
		return shake_hands(session, context->fd, until_ns, name, error);
	ret = tls_refused(session, name, error);
	SSL_free(session);
	return ret;
}

#else

static int start_tls(redisContext *context, const char *host, uint64_t until_ns, const char *name,
		     struct base_error *error)
{
	(void)context, (void)host, (void)until_ns;
	return base_fail_reason(error, -ENOTSUP, "cannot connect to %s with TLS", name);
}

#endif

/* ---- Commands -------------------------------------------------------------------------------- */

static void link_add_bytes(struct link_command *command, const char *text, size_t bytes)
{
	command->texts[command->count] = text;
	command->bytes[command->count++] = bytes;
}

static void link_add_text_list(struct link_command *command, const char *const texts[],
			       size_t count)
{
	for (size_t i = 0; i < count; i++)
		link_add_bytes(command, texts[i], strlen(texts[i]));
}

static void link_add_number_list(struct link_command *command, const uint64_t numbers[],
				 size_t count)
{
	for (size_t i = 0; i < count; i++) {
		char *text = command->numbers[command->number_count++];

		snprintf(text, sizeof(command->numbers[0]), "%llu", (unsigned long long)numbers[i]);
		link_add_bytes(command, text, strlen(text));
	}
}

#define link_add_texts(command, ...)                                                               \
	link_add_text_list(command, (const char *const[]){ __VA_ARGS__ },                          \
			   ARRAY_LENGTH(((const char *const[]){ __VA_ARGS__ })))
#define link_add_numbers(command, ...)                                                             \
	link_add_number_list(command, (const uint64_t[]){ __VA_ARGS__ },                           \
			     ARRAY_LENGTH(((const uint64_t[]){ __VA_ARGS__ })))

/* ---- Sending and receiving ------------------------------------------------------------------- */

static int is_closed(const struct slots_link *link, struct base_error *error)
{
	return base_fail_reason(error, -ECONNRESET, "%s closed the connection", link->name);
}

/* Records an errno of the socket. */
static int is_cut(const struct slots_link *link, int code, struct base_error *error)
{
	if (code != ETIMEDOUT && code != EHOSTUNREACH && code != ENETUNREACH)
		return is_closed(link, error);
	return base_fail(error, -code, "%s is unreachable", link->name);
}

/* Records an error that hiredis reports. */
static int lost(struct slots_link *link, struct base_error *error)
{
	const int code = errno;

	if (link->context->err == REDIS_ERR_EOF)
		return is_closed(link, error);
	if (link->context->err == REDIS_ERR_IO)
		return is_cut(link, code, error);
	return base_fail_reason(error, -EPROTO, "%s does not answer like a Redis (%.100s)",
				link->name, link->context->errstr);
}

static int no_memory(const struct slots_link *link, struct base_error *error)
{
	return base_fail_reason(error, -ENOMEM, "no memory for a command to %s", link->name);
}

/*
 * Extends a deadline by the time that the bytes of this command and its reply take at BYTES_PER_S.
 * This applies only to connections with long replies, whose commands are long, too. A connection on
 * which no bytes pass keeps its deadline.
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
	return base_fail_reason(error, -ETIMEDOUT, "%s does not answer in time", link->name);
}

/* Sends a command over TLS, with SIGPIPE blocked, because hiredis does not use MSG_NOSIGNAL. */
static int send_encrypted(struct slots_link *link, const char *text, size_t bytes,
			  uint64_t until_ns, struct base_error *error)
{
	struct base_held_sigpipe held;
	int done = 0, ret = 0;

	if (redisAppendFormattedCommand(link->context, text, bytes) != REDIS_OK)
		return no_memory(link, error);
	link->sent_bytes = bytes;
	while (!ret && !done) {
		base_hold_sigpipe(&held);
		ret = redisBufferWrite(link->context, &done) == REDIS_OK ? 0 : -EIO;
		base_let_sigpipe(&held, true);
		if (ret)
			return lost(link, error);
		if (!done)
			ret = wait_for(link, POLLOUT, until_with(link, until_ns), error);
	}
	return ret;
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

/* Sends a command by until_ns at the latest. */
static int link_send(struct slots_link *link, const struct link_command *command, uint64_t until_ns,
		     struct base_error *error)
{
	/* The function modifies no text; its declaration just lacks a const. */
	const char **texts = (const char **)(uintptr_t)command->texts;
	char *text = NULL;
	long long bytes = redisFormatCommandArgv(&text, command->count, texts, command->bytes);
	int ret;

	if (bytes < 0)
		return no_memory(link, error);
	ret = (link->tls ? send_encrypted : send_plain)(link, text, (size_t)bytes, until_ns, error);
	/* The command may contain the password. */
	explicit_bzero(text, (size_t)bytes);
	redisFreeCommand(text);
	return ret;
}

/* Reads what has arrived. With TLS, reading may have to write, which can raise SIGPIPE. */
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
	return base_fail_reason(error, -EPROTO,
				"%s does not answer like a Redis (a reply is too long)",
				link->name);
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

/* Reads what has arrived. *reply stays NULL until a reply is complete. */
static int link_take(struct slots_link *link, redisReply **reply, struct base_error *error)
{
	int ret;

	*reply = NULL;
	ret = take_parsed(link, reply, error);
	if (ret || *reply)
		return ret;
	ret = pull(link, error);
	return ret ? ret : take_parsed(link, reply, error);
}

/* Sends a command and waits for its reply. */
static int link_ask(struct slots_link *link, const struct link_command *command, redisReply **reply,
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

/* Copies the text of an error reply into `words`, with control and non-ASCII characters replaced,
 * because these could mislead a terminal. */
static void link_words(const redisReply *reply, char *words, size_t size)
{
	size_t used = 0;

	for (size_t i = 0; i < reply->len && used + 1 < size; i++) {
		char c = reply->str[i];

		words[used++] = c >= ' ' && c <= '~' ? c : '?';
	}
	words[used] = 0;
}

/* Returns whether the reply is an error whose text contains `word`. Errors from scripts have the
 * code further back. */
static bool link_says(const redisReply *reply, const char *word)
{
	return reply->type == REDIS_REPLY_ERROR && reply->str && strstr(reply->str, word);
}

/* ---- Opening a connection -------------------------------------------------------------------- */

/* Sends the address's password. Needed for servers that ask for it only when a command comes. */
static int link_authenticate(struct slots_link *link, const struct slots_address *address,
			     uint64_t until_ns, struct base_error *error)
{
	struct link_command command = { 0 };
	redisReply *reply;
	int ret;

	link_add_texts(&command, "AUTH");
	if (*address->user)
		link_add_texts(&command, address->user);
	link_add_texts(&command, address->password);
	ret = link_ask(link, &command, &reply, until_ns, error);
	if (!ret && reply->type == REDIS_REPLY_ERROR)
		/* Not quoted: some servers repeat the arguments of a command. */
		ret = base_fail_reason(error, -EACCES, "%s rejects the user or the password",
				       link->name);
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

	link_add_texts(&command, "SELECT");
	link_add_numbers(&command, database);
	ret = link_ask(link, &command, &reply, until_ns, error);
	if (!ret && reply->type == REDIS_REPLY_ERROR) {
		link_words(reply, words, sizeof(words));
		ret = base_fail_reason(error, -EACCES, "%s refuses database %u: %s", link->name,
				       database, words);
	}
	freeReplyObject(reply);
	return ret;
}

static int greet(struct slots_link *link, const struct slots_address *address, uint64_t until_ns,
		 struct base_error *error)
{
	int ret = 0;

	if (address->has_password || *address->user)
		ret = link_authenticate(link, address, until_ns, error);
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

/* hiredis allocates as many elements as a server announces: always before 1.0.1, and by default
 * since. */
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

/* Makes the reader reject replies with more elements than any reply that the library expects. */
static void link_limit_replies(redisReader *reader)
{
	pthread_once(&makers_once, choose_makers);
	if (make_array)
		reader->fn = &makers;
}

static int connect_link(struct slots_link *link, const struct slots_address *address,
			const struct slots_node *node, uint64_t until_ns, struct base_error *error)
{
	int fd;

	fd = open_socket(address, node, MIN(until_ns, base_now_ns() + CONNECT_NS), link->name,
			 error);
	if (fd < 0)
		return fd;
	link->context = redisConnectFd(fd);
	if (!link->context || link->context->err) {
		if (!link->context)
			close(fd);
		return base_fail_reason(error, -ENOMEM, "no memory for a connection to %s",
					link->name);
	}
	link->context->flags &= ~REDIS_BLOCK;
	link_limit_replies(link->context->reader);
	link->tls = address->tls;
	if (!link->tls)
		return 0;
	return start_tls(link->context, link->node.host, until_ns, link->name, error);
}

/* Closes a connection. NULL is allowed. */
static void link_close(struct slots_link *link)
{
	struct base_held_sigpipe held;

	if (!link)
		return;
	if (link->context) {
		/* Closing TLS may send a message, which can raise SIGPIPE. */
		base_hold_sigpipe(&held);
		redisFree(link->context);
		base_let_sigpipe(&held, true);
	}
	free(link);
}

/* Connects by until_ns at the latest. `node` is NULL for the Unix socket of the address. If
 * `greeted`, also sends the password and selects the database. `most_reply_bytes` raises the limit
 * for the length of a reply; it never lowers it. */
static int link_open(struct slots_link **out, const struct slots_address *address,
		     const struct slots_node *node, bool greeted, size_t most_reply_bytes,
		     uint64_t until_ns, struct base_error *error)
{
	struct slots_link *link = calloc(1, sizeof(*link));
	int ret;

	*out = NULL;
	if (!link)
		return base_no_memory(error, "a connection", sizeof(*link));
	name_it(link, address, node);
	link->most_reply_bytes = MAX(most_reply_bytes, MOST_REPLY_BYTES);
	ret = connect_link(link, address, node, until_ns, error);
	if (!ret && greeted)
		ret = greet(link, address, until_ns, error);
	if (ret) {
		link_close(link);
		return ret;
	}
	*out = link;
	return 0;
}

/* ---- A client -------------------------------------------------------------------------------- */

/* A client of the server that has the keys of a pool. That is the server which the address names, a
 * node of a cluster, or the master that the sentinels name. */
struct redis_client {
	struct slots_config config;
	struct slots_address address; /* includes the password, whichever source it came from */
	char key[SLOTS_KEY_BYTES];    /* key of the script's data */
	size_t most_reply_bytes;      /* longest reply; 0: the default */

	pthread_mutex_t lock; /* protects all members below */
	/* NULL: not connected yet, connection lost, or closed while idle */
	struct slots_link *commands;
	struct slots_node moved; /* in a cluster: the node that has this pool's keys */
	bool has_moved;
	size_t next; /* index of the host in the address that is tried first */
	/* After failures the client does not connect before not_before_ns. Until then calls fail
	 * with last_failure. */
	unsigned failures;
	uint64_t not_before_ns;
	struct base_error last_failure;
};

/* Longest duration of a call, whatever the network does. */
#define REDIS_CALL_NS 2000000000ull

#define FIRST_BACKOFF_MS 50u
#define MOST_BACKOFF_MS 1000u
#define MOST_REDIRECTS 5
#define MOST_RESTARTS 2
#define MOST_HEALS 2

/* The script's times have a resolution of 1 ms. More frequent heartbeats would gain nothing. */
#define LEAST_BEAT_MS 20u

/* ---- The password ---------------------------------------------------------------------------- */

/* Reads the beginning of a file. Returns the number of bytes, or -errno. */
static ssize_t read_beginning(const char *path, char *text, size_t size)
{
	/* O_NONBLOCK: the call must not wait for the writer of a FIFO. */
	int fd = base_above_streams(open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
	ssize_t got = 1, bytes = 0;

	if (fd < 0)
		return -errno;
	while (got > 0 && (size_t)bytes < size) {
		got = TEMP_FAILURE_RETRY(read(fd, text + bytes, size - (size_t)bytes));
		if (got > 0)
			bytes += got;
	}
	if (got < 0)
		bytes = -errno;
	close(fd);
	return bytes;
}

static int refuse_file(const struct redis_client *client, const char *why, struct base_error *error)
{
	return base_fail_reason_with(
		error, IOSHAPE_E_COORDINATOR,
		"write the password on its first line, and let this user read it "
		"(chgrp GROUP, chmod 440)",
		"the password file \"%s\" %s", client->config.password_file, why);
}

/* Reads the first line of the password file into the address. The caller holds the lock. If that
 * fails, a password that was read earlier is kept. If there is none, the coordinator counts as
 * unreachable, so that no save fails because an operator changed the mode of a file. */
static int read_password(struct redis_client *client, struct base_error *error)
{
	struct slots_address *address = &client->address;
	char text[ADDRESS_SECRET_BYTES + 1], why[96];
	const char *end;
	ssize_t bytes;
	int ret = 0;

	if (!client->config.password_file)
		return 0;
	bytes = read_beginning(client->config.password_file, text, sizeof(text));
	end = bytes > 0 ? memchr(text, '\n', (size_t)bytes) : NULL;
	if (end)
		bytes = end - text;
	if (bytes > 0 && text[bytes - 1] == '\r')
		bytes--;
	snprintf(why, sizeof(why), "cannot be read (%s)", strerror(bytes < 0 ? (int)-bytes : 0));
	if (end && !bytes) {
		ret = 0; /* an empty line: the server needs no password */
	} else if (bytes > 0 && bytes < ADDRESS_SECRET_BYTES) {
		memcpy(address->password, text, (size_t)bytes);
		address->password[bytes] = 0;
		address->has_password = true;
	} else if (!address->has_password) {
		ret = refuse_file(client,
				  bytes < 0 ? why :
				  !bytes    ? "is empty" :
					      "has a first line that is too long for a password",
				  error);
	}
	explicit_bzero(text, sizeof(text));
	return ret;
}

/* ---- Finding the server ---------------------------------------------------------------------- */

/* Returns the deadline for the next host: an equal part of the time that is left. A host that drops
 * all packets must not use up the time of the others. */
static uint64_t until_next(uint64_t until_ns, size_t hosts_left)
{
	uint64_t now = base_now_ns();

	return now + (until_ns > now ? until_ns - now : 0) / hosts_left;
}

static int ask_sentinel(struct slots_link *link, const struct slots_address *address,
			redisReply **reply, uint64_t until_ns, struct base_error *error)
{
	struct link_command command = { 0 };

	link_add_texts(&command, "SENTINEL", "get-master-addr-by-name", address->service);
	return link_ask(link, &command, reply, until_ns, error);
}

static int read_master(const struct slots_link *link, const struct slots_address *address,
		       const redisReply *reply, struct slots_node *master, struct base_error *error)
{
	char text[ADDRESS_HOST_BYTES + 8], words[200];

	if (reply->type == REDIS_REPLY_ERROR) {
		link_words(reply, words, sizeof(words));
		return base_fail_reason(error, -EACCES, "the sentinel (%s) says: %s", link->name,
					words);
	}
	if (reply->type == REDIS_REPLY_NIL)
		return base_fail_reason_with(
			error, -ENOENT, "check the service name in the address",
			"the sentinel (%s) knows no service \"%s\"", link->name, address->service);
	if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
	    reply->element[0]->type == REDIS_REPLY_STRING &&
	    reply->element[1]->type == REDIS_REPLY_STRING &&
	    (size_t)snprintf(text, sizeof(text), "%s:%s", reply->element[0]->str,
			     reply->element[1]->str) < sizeof(text) &&
	    !address_parse_node(master, text, strlen(text)) && *master->host)
		return 0;
	return base_fail_reason(error, -EPROTO, "the sentinel (%s) names no usable master",
				link->name);
}

static int find_master(const struct slots_address *address, const struct slots_node *sentinel,
		       struct slots_node *master, uint64_t until_ns, struct base_error *error)
{
	struct slots_link *link;
	redisReply *reply = NULL;
	int ret;

	ret = link_open(&link, address, sentinel, false, 0, until_ns, error);
	if (ret)
		return ret;
	ret = ask_sentinel(link, address, &reply, until_ns, error);
	if (!ret && link_says(reply, "NOAUTH") && address->has_password) {
		freeReplyObject(reply);
		reply = NULL;
		ret = link_authenticate(link, address, until_ns, error);
		if (!ret)
			ret = ask_sentinel(link, address, &reply, until_ns, error);
	}
	if (!ret)
		ret = read_master(link, address, reply, master, error);
	freeReplyObject(reply);
	link_close(link);
	return ret;
}

/* Connects to a node, or to the master that a sentinel names. After a failover sentinels may name
 * the old master for a moment; it then answers READONLY. */
static int connect_through(const struct redis_client *client, const struct slots_node *node,
			   struct slots_link **out, uint64_t until_ns, struct base_error *error)
{
	struct slots_node master;
	int ret = 0;

	if (client->address.kind == ADDRESS_SENTINEL) {
		ret = find_master(&client->address, node, &master, until_ns, error);
		node = &master;
	}
	return ret ? ret :
		     link_open(out, &client->address, node, true, client->most_reply_bytes,
			       until_ns, error);
}

/* Finds the server and connects to it. The caller holds the lock. */
static int find_server(struct redis_client *client, struct slots_link **out, uint64_t until_ns,
		       struct base_error *error)
{
	const struct slots_address *address = &client->address;
	const size_t count = address->node_count, bytes = client->most_reply_bytes;
	struct base_error why = { 0 };
	int ret = -EINVAL;

	if (address->kind == ADDRESS_UNIX)
		return link_open(out, address, NULL, true, bytes, until_ns, error);
	if (client->has_moved) {
		ret = link_open(out, address, &client->moved, true, bytes, until_next(until_ns, 2),
				NULL);
		if (!ret)
			return 0;
		client->has_moved = false;
	}
	for (size_t i = 0; i < count; i++) {
		why.code = 0; /* keep the error of the last host */
		ret = connect_through(client, &address->nodes[(client->next + i) % count], out,
				      until_next(until_ns, count - i), &why);
		if (!ret) {
			client->next = (client->next + i) % count;
			return 0;
		}
	}
	client->next = (client->next + 1) % count;
	if (count > 1)
		base_rephrase(&why, ret,
			      "none of the %zu hosts in the address can be used; the last: %s",
			      count, why.sentence);
	base_propagate(error, &why);
	return ret;
}

/* ---- Connections ----------------------------------------------------------------------------- */

static int take_address(struct redis_client *client, struct base_error *error)
{
	struct slots_address *address = &client->address;
	struct slots_config *config = &client->config;
	int ret = address_parse(address, config->address, error);

	if (ret)
		return ret;
#ifndef SLOTS_TLS
	if (address->tls)
		return base_fail_reason_with(
			error, -EINVAL,
			"install hiredis 1.0 or newer with hiredis_ssl (Debian 13: libhiredis-dev "
			"and libssl-dev) and rebuild ioshape",
			"this library was built without TLS, so rediss:// cannot be used");
#endif
	/* A password in the address takes precedence. */
	if (address->has_password)
		config->password_file = NULL;
	if (address->has_password || config->password_file || !config->password ||
	    !*config->password)
		return 0;
	if (strlen(config->password) >= sizeof(address->password))
		return base_fail_reason(error, -EINVAL,
					"the coordinator's password is longer than %d bytes",
					ADDRESS_SECRET_BYTES - 1);
	strcpy(address->password, config->password);
	address->has_password = true;
	return 0;
}

/* Parses the address, and does not connect yet. -EINVAL: the error names the wrong part. */
static int client_open(struct redis_client *client, const struct slots_config *config,
		       struct base_error *error)
{
	*client = (struct redis_client){ .config = *config };
	pthread_mutex_init(&client->lock, NULL);
	/* Replace all characters that are not allowed in keys. Most of all, a name must not contain
	 * the braces that mark the keys' hash tag. */
	for (char *at = client->config.pool; *at; at++) {
		if (!strchr(FS_POOL_CHARACTERS, *at))
			*at = '_';
	}
	snprintf(client->key, sizeof(client->key), "{ios:%s}:v%u:m", client->config.pool,
		 REDIS_SCRIPT_FORMAT);
	return take_address(client, error);
}

/* Closes the connection, and erases the password from memory. */
static void client_close(struct redis_client *client)
{
	link_close(client->commands);
	pthread_mutex_destroy(&client->lock);
	explicit_bzero(&client->address, sizeof(client->address));
}

/* Closes the connection for commands. The caller holds the lock. */
static void drop(struct redis_client *client)
{
	link_close(client->commands);
	client->commands = NULL;
}

/* Records a failure and sets the time before which no call connects. The caller holds the lock. */
static void record_failure(struct redis_client *client, const struct base_error *error)
{
	const unsigned doublings = MIN(client->failures, 10u);
	const uint64_t most_ms = MIN(FIRST_BACKOFF_MS << doublings, MOST_BACKOFF_MS);

	client->failures++;
	/* The random half keeps thousands of clients from returning in the same millisecond. */
	client->not_before_ns =
		base_now_ns() + most_ms * 500000 + base_random() % (most_ms * 500000 + 1);
	client->last_failure = *error;
}

/* Connects to the server, or fails at once during the back-off. The caller holds the lock. */
static int obtain(struct redis_client *client, struct slots_link **out, uint64_t until_ns,
		  struct base_error *error)
{
	int ret;

	*out = NULL;
	if (client->failures && base_now_ns() < client->not_before_ns)
		return base_propagate(error, &client->last_failure);
	ret = read_password(client, error);
	if (!ret)
		ret = find_server(client, out, until_ns, error);
	if (ret)
		record_failure(client, error);
	return ret;
}

/* Returns when a call that begins now must end. A thread that waits for an answer cannot report a
 * lost slot, so a call takes less than what is left of a lease that the process trusts no more
 * (slot.c). */
static uint64_t call_end(const struct redis_client *client)
{
	return base_now_ns() + MIN(REDIS_CALL_NS, base_ms_to_ns(client->config.lease_ms) / 6);
}

/* Opens a second connection beside the one for commands, subject to the back-off. */
static int connect_beside(struct redis_client *client, struct slots_link **out,
			  struct base_error *error)
{
	int ret;

	pthread_mutex_lock(&client->lock);
	ret = obtain(client, out, call_end(client), error);
	pthread_mutex_unlock(&client->lock);
	return ret;
}

/* ---- Error replies --------------------------------------------------------------------------- */

/* Returns whether a reply is a redirect, "MOVED 3999 host:port". Fills in the node. */
static bool is_redirect(const struct slots_link *link, const redisReply *reply,
			struct slots_node *node)
{
	const char *const where = strrchr(reply->str, ' ');

	if (strncmp(reply->str, "MOVED ", 6) != 0)
		return false;
	if (address_parse_node(node, where + 1, strlen(where + 1)))
		return false;
	if (!*node->host)
		memcpy(node->host, link->node.host, sizeof(node->host));
	return true;
}

/* Returns whether another server may be the right one after this error. ASK and TRYAGAIN: the
 * cluster moves the pool's keys to another node. */
static bool is_moved(const redisReply *reply)
{
	static const char *const words[] = { "READONLY",  "LOADING",         "MASTERDOWN",
					     "UNBLOCKED", "CLUSTERDOWN",     "TRYAGAIN",
					     "NOAUTH",    "unauthenticated", "NOREPLICAS",
					     "ASK " };

	for (size_t i = 0; i < ARRAY_LENGTH(words); i++) {
		if (link_says(reply, words[i]))
			return true;
	}
	return false;
}

static void refuse(const struct slots_link *link, const redisReply *reply, struct base_error *error)
{
	const char *remedy = "";
	char words[200];

	link_words(reply, words, sizeof(words));
	if (link_says(reply, "NOPERM") || link_says(reply, "can't run this command") ||
	    link_says(reply, "No permissions"))
		remedy = "give its user the rights in docs/coordinator/users.acl";
	else if (link_says(reply, "NOAUTH") || link_says(reply, "unauthenticated"))
		remedy = "give a password in the address, password_file or IOSHAPE_PASSWORD";
	else if (link_says(reply, "OOM "))
		remedy = "raise its maxmemory";
	base_fail_reason_with(error, -EACCES, remedy, "%s says: %s", link->name, words);
}

/* Consequence of an error reply. */
enum sequel {
	REFUSED,    /* the server rejects this command; the connection stays usable */
	REDIRECTED, /* the next connection goes to another node of the cluster */
	LOST        /* another server may be the right one: connect again later */
};

/* Decides what follows from an error reply. The caller holds the lock. */
static enum sequel take_error(struct redis_client *client, const struct slots_link *link,
			      const redisReply *reply, struct base_error *error)
{
	struct slots_node node;

	if (is_redirect(link, reply, &node)) {
		client->moved = node;
		client->has_moved = true;
		return REDIRECTED;
	}
	refuse(link, reply, error);
	if (!is_moved(reply))
		return REFUSED;
	client->has_moved = false;
	record_failure(client, error);
	return LOST;
}

/* ---- Sending one command --------------------------------------------------------------------- */

/* Begins a call of the script. `subject` is the id of a request or the name of a job; known_epoch
 * is the latest epoch that this client has seen. The caller adds arguments by link_add_*(). */
static void begin_call(const struct redis_client *client, struct link_command *command,
		       const char *operation, const char *subject, uint64_t known_epoch)
{
	command->count = command->number_count = 0;
	link_add_texts(command, "EVALSHA", slots_script_sha1, "1", client->key, operation, subject);
	link_add_numbers(command, client->config.lease_ms, known_epoch);
}

/* Replaces the script's hash by its whole text, for a server that does not have the script. */
static void send_script_itself(struct link_command *command)
{
	command->texts[0] = "EVAL";
	command->bytes[0] = strlen("EVAL");
	command->texts[1] = slots_script;
	command->bytes[1] = strlen(slots_script);
}

/* Returns whether the script failed because it cannot read the pool's keys. Any client may write
 * garbage there, and the keys then stay unreadable. */
static bool cannot_be_read(const struct link_command *command, const redisReply *reply)
{
	static const char *const words[] = { "WRONGTYPE", "attempt to ", "Bad data format",
					     "Missing bytes in input", "bad argument #" };

	if (strncmp(command->texts[0], "EVAL", 4) != 0)
		return false;
	for (size_t i = 0; i < ARRAY_LENGTH(words); i++) {
		if (link_says(reply, words[i]))
			return true;
	}
	return false;
}

/* The state of one call. */
struct attempt {
	struct redis_client *client;
	struct link_command *command;
	uint64_t until_ns;
	unsigned redirects, restarts, heals;
	bool repeated, whole_script;
	struct base_error why;
};

enum verdict { DONE, AGAIN, FAILED };

/* Removes the pool's data, so that the script starts it again with the operator's settings. At the
 * second attempt it removes these settings instead; their key ends in "o". */
static bool heal(struct attempt *attempt, const redisReply *broken)
{
	struct redis_client *client = attempt->client;
	struct link_command command = { 0 };
	char key[SLOTS_KEY_BYTES], words[200];
	redisReply *reply = NULL;
	int ret;

	if (attempt->heals == MOST_HEALS)
		return false;
	memcpy(key, client->key, sizeof(key));
	if (attempt->heals++)
		key[strlen(key) - 1] = 'o';
	link_add_texts(&command, "DEL", key);
	ret = link_ask(client->commands, &command, &reply, attempt->until_ns, NULL);
	freeReplyObject(reply);
	link_words(broken, words, sizeof(words));
	if (attempt->heals == 1)
		base_log(&client->config.log, IOSHAPE_LOG_WARNING,
			 "pool \"%s\" had unreadable keys in %s (%s); it was reset, and keeps the "
			 "readable settings of operators",
			 client->config.pool, client->commands->name, words);
	return !ret;
}

static enum verdict judge(struct attempt *attempt, const redisReply *reply)
{
	struct redis_client *client = attempt->client;
	enum sequel sequel;

	if (reply->type != REDIS_REPLY_ERROR) {
		client->failures = 0;
		return DONE;
	}
	if (!strncmp(reply->str, "NOSCRIPT", 8) && !attempt->whole_script) {
		attempt->whole_script = true;
		send_script_itself(attempt->command);
		return AGAIN;
	}
	if (link_says(reply, "IOSHAPE-ANEW") && ++attempt->restarts < MOST_RESTARTS)
		return AGAIN;
	if (cannot_be_read(attempt->command, reply) && heal(attempt, reply))
		return AGAIN;
	sequel = take_error(client, client->commands, reply, &attempt->why);
	if (sequel == REDIRECTED && ++attempt->redirects > MOST_REDIRECTS) {
		base_fail_reason_with(
			&attempt->why, IOSHAPE_E_COORDINATOR, "check that the cluster is complete",
			"%s and other nodes redirect to each other", client->commands->name);
		record_failure(client, &attempt->why);
		sequel = LOST;
	}
	if (sequel != REFUSED)
		drop(client);
	return sequel == REDIRECTED ? AGAIN : FAILED;
}

static enum verdict try_once(struct attempt *attempt, redisReply **reply)
{
	struct redis_client *client = attempt->client;
	const bool kept = client->commands;
	enum verdict verdict;
	int ret;

	if (!kept && obtain(client, &client->commands, attempt->until_ns, &attempt->why))
		return FAILED;
	ret = link_ask(client->commands, attempt->command, reply, attempt->until_ns, &attempt->why);
	if (ret) {
		drop(client);
		/* A restarted server has dropped our connection. That is no failure yet: repeat the
		 * command once. */
		if (ret == -ECONNRESET && kept && !attempt->repeated) {
			attempt->repeated = true;
			attempt->why.code = 0;
			return AGAIN;
		}
		record_failure(client, &attempt->why);
		return FAILED;
	}
	verdict = judge(attempt, *reply);
	if (verdict != DONE) {
		freeReplyObject(*reply);
		*reply = NULL;
	}
	return verdict;
}

/* Sends a command and returns its reply, unless that is an error. The caller frees *reply. The
 * command may reach the server twice. */
static int client_call(struct redis_client *client, struct link_command *command,
		       redisReply **reply, struct base_error *error)
{
	struct attempt attempt = { .client = client, .command = command };
	enum verdict verdict;

	*reply = NULL;
	pthread_mutex_lock(&client->lock);
	attempt.until_ns = call_end(client);
	do {
		verdict = try_once(&attempt, reply);
	} while (verdict == AGAIN);
	pthread_mutex_unlock(&client->lock);
	if (verdict == DONE)
		return 0;
	attempt.why.code = IOSHAPE_E_COORDINATOR;
	return base_propagate(error, &attempt.why);
}

/* ---- The pool -------------------------------------------------------------------------------- */

/* A pool kept by a Redis. */
struct redis_pool {
	struct redis_client client;
	char wake_key[SLOTS_KEY_BYTES];
	_Atomic uint64_t epoch; /* epoch of the latest answer */

	/* Used only by the thread that waits. */
	/* Connection for BLPOP; NULL: not connected yet, lost, or closed while idle. */
	struct slots_link *wake;
	bool asked;        /* BLPOP was sent and not answered yet */
	bool woken;        /* a wake-up may have been lost: the next wait() returns at once */
	bool told_refused; /* whether the user was told that the server refuses BLPOP */
	uint64_t due_ns;   /* when a healthy server has answered BLPOP at the latest */
	int interruption;  /* an eventfd */
};

/* ---- Opening and closing --------------------------------------------------------------------- */

static void redis_close(void *opaque)
{
	struct redis_pool *pool = opaque;

	link_close(pool->wake);
	client_close(&pool->client);
	if (pool->interruption >= 0)
		close(pool->interruption);
	free(pool);
}

static int redis_open(void **out, const struct slots_config *config, struct base_error *error)
{
	struct redis_pool *pool = calloc(1, sizeof(*pool));
	int ret;

	*out = NULL;
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pool->interruption = -1;
	ret = client_open(&pool->client, config, error);
	if (!ret)
		pool->interruption = base_above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (!ret && pool->interruption < 0)
		ret = base_fail(error, -errno, "cannot make an eventfd");
	if (ret) {
		redis_close(pool);
		return ret;
	}
	snprintf(pool->wake_key, sizeof(pool->wake_key), "{ios:%s}:v%u:w:%s",
		 pool->client.config.pool, REDIS_SCRIPT_FORMAT, config->identity.client);
	*out = pool;
	return 0;
}

/* ---- Answers --------------------------------------------------------------------------------- */

/* The script answers with lists of names and values. The server may be an impostor, so every value
 * is checked. Unknown names are ignored. */

/* Reads an integer, or a number as text. Lua answers with text above 2^53, and for values that it
 * received as text. */
static int read_number(const redisReply *reply, uint64_t *number)
{
	char *end;

	if (reply->type == REDIS_REPLY_INTEGER) {
		*number = reply->integer > 0 ? (uint64_t)reply->integer : 0;
		return 0;
	}
	if (reply->type != REDIS_REPLY_STRING || !reply->len)
		return -EPROTO;
	if (reply->str[0] == '-') {
		*number = 0;
		return 0;
	}
	if (reply->str[0] < '0' || reply->str[0] > '9')
		return -EPROTO;
	errno = 0;
	*number = strtoull(reply->str, &end, 10);
	return errno || end != reply->str + reply->len ? -EPROTO : 0;
}

/* Returns the value of a name. NULL: the name is missing, or the reply is not a list of names and
 * values. */
static const redisReply *find(const redisReply *reply, const char *name)
{
	if (reply->type != REDIS_REPLY_ARRAY || reply->elements % 2)
		return NULL;
	for (size_t i = 0; i < reply->elements; i += 2) {
		if (reply->element[i]->type != REDIS_REPLY_STRING)
			return NULL;
		if (!strcmp(reply->element[i]->str, name))
			return reply->element[i + 1];
	}
	return NULL;
}

static int take(const redisReply *reply, const char *name, uint64_t *number)
{
	const redisReply *value = find(reply, name);

	return value ? read_number(value, number) : -EPROTO;
}

/* Reads a number of 32 bits. Another client may have forged it, so a number that is too large
 * counts as the largest. */
static int take_small(const redisReply *reply, const char *name, uint32_t *number)
{
	uint64_t large = 0;
	int ret = take(reply, name, &large);

	*number = (uint32_t)MIN(large, UINT32_MAX);
	return ret;
}

/* Reads a text without characters that could mislead a terminal, because other clients choose
 * it. */
static int take_words(const redisReply *reply, const char *name, char *words, size_t size)
{
	const redisReply *value = find(reply, name);

	if (!value || value->type != REDIS_REPLY_STRING)
		return -EPROTO;
	link_words(value, words, size);
	return 0;
}

static int read_answer(const redisReply *reply, struct slots_answer *answer)
{
	uint32_t state;

	*answer = (struct slots_answer){ .state = SLOTS_NONE };
	if (take_small(reply, "state", &state) || state > SLOTS_HOLDING ||
	    take(reply, "epoch", &answer->epoch) ||
	    take_small(reply, "capacity", &answer->capacity))
		return -EPROTO;
	answer->state = (enum slots_state)state;
	if (state == SLOTS_NONE)
		return 0;
	if (take_small(reply, "beat", &answer->beat_ms))
		return -EPROTO;
	if (answer->beat_ms)
		answer->beat_ms = MAX(answer->beat_ms, LEAST_BEAT_MS);
	if (state == SLOTS_WAITING)
		return take_small(reply, "position", &answer->position) ||
				       take_words(reply, "ahead", answer->ahead,
						  sizeof(answer->ahead)) ?
			       -EPROTO :
			       0;
	return take(reply, "fence", &answer->fence) ||
			       take_small(reply, "weight", &answer->weight) ||
			       take_small(reply, "target", &answer->target_group) ?
		       -EPROTO :
		       0;
}

static int read_grant(const redisReply *reply, struct slots_grant *grant)
{
	if (take(reply, "bytes", &grant->bytes) || take_small(reply, "start", &grant->start_ms) ||
	    take_small(reply, "end", &grant->end_ms) || grant->end_ms < grant->start_ms)
		return -EPROTO;
	return 0;
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* Returns a number of bytes, limited to what the script can count exactly. */
static uint64_t amount(uint64_t bytes)
{
	return MIN(bytes, SLOTS_MOST_BYTES);
}

static uint64_t known_epoch(const struct redis_pool *pool)
{
	return atomic_load_explicit(&pool->epoch, memory_order_relaxed);
}

static int not_understood(const struct redis_pool *pool, const char *operation,
			  struct base_error *error)
{
	return base_fail_reason_with(
		error, IOSHAPE_E_COORDINATOR,
		"check that it is a Redis, and that all jobs use the same version of ioshape",
		"the coordinator's answer to \"%s\" for pool %s is not valid", operation,
		pool->client.config.pool);
}

/* Makes a call whose answer is the state of a request. */
static int ask_about(struct redis_pool *pool, const char *operation, struct link_command *command,
		     struct slots_answer *answer, struct base_error *error)
{
	redisReply *reply;
	int ret;

	ret = client_call(&pool->client, command, &reply, error);
	if (ret)
		return ret;
	ret = read_answer(reply, answer);
	freeReplyObject(reply);
	if (ret)
		return not_understood(pool, operation, error);
	atomic_store_explicit(&pool->epoch, answer->epoch, memory_order_relaxed);
	return 0;
}

static int redis_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_config *config = &pool->client.config;
	const struct slots_identity *identity = &config->identity;
	struct link_command command;
	char boost[16];

	snprintf(boost, sizeof(boost), "%d", request->boost_ms);
	begin_call(&pool->client, &command, "acquire", request->id, known_epoch(pool));
	link_add_texts(&command, identity->client, identity->node, identity->job);
	link_add_numbers(&command, identity->rank, MAX(identity->share, 1u), request->weight,
			 amount(request->bytes), config->asked_capacity,
			 request->default_capacity ? request->default_capacity :
						     config->default_capacity);
	link_add_texts(&command, identity->user);
	link_add_numbers(&command, request->urgent);
	link_add_texts(&command, boost);
	return ask_about(pool, "acquire", &command, answer, error);
}

static int redis_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_identity *identity = &pool->client.config.identity;
	struct link_command command;

	/* A holder sends the epoch of its own slot: another slot of this process may have seen a
	 * newer epoch. */
	begin_call(&pool->client, &command, "beat", beat->id,
		   beat->holding ? beat->epoch : known_epoch(pool));
	link_add_numbers(&command, amount(beat->passed), beat->holding, beat->fence, beat->weight,
			 amount(beat->bytes));
	link_add_texts(&command, identity->client, identity->node, identity->job);
	link_add_numbers(&command, identity->rank, MAX(identity->share, 1u));
	return ask_about(pool, "beat", &command, answer, error);
}

static int redis_release(void *opaque, const char *id, uint64_t passed, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	begin_call(&pool->client, &command, "release", id, known_epoch(pool));
	link_add_numbers(&command, amount(passed));
	ret = client_call(&pool->client, &command, &reply, error);
	freeReplyObject(reply);
	return ret;
}

/* Asks for bandwidth. If an answer is lost and the call repeated, the first grant
 * is lost. Then writers are slower for a moment. */
static int redis_pace(void *opaque, uint64_t bytes, uint64_t most, struct slots_grant *grant,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	memset(grant, 0, sizeof(*grant));
	begin_call(&pool->client, &command, "pace", pool->client.config.identity.job,
		   known_epoch(pool));
	link_add_numbers(&command, amount(bytes), amount(most), amount(pool->client.config.rate));
	link_add_texts(&command, pool->client.config.identity.user);
	ret = client_call(&pool->client, &command, &reply, error);
	if (ret)
		return ret;
	ret = read_grant(reply, grant);
	freeReplyObject(reply);
	return ret ? not_understood(pool, "pace", error) : 0;
}

/* Counts alarms for the operator. If an answer is lost and the call repeated, they count twice. */
static int redis_alarm(void *opaque, uint32_t alarms, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	begin_call(&pool->client, &command, "alarm", pool->client.config.identity.job,
		   known_epoch(pool));
	link_add_numbers(&command, amount(alarms));
	link_add_texts(&command, pool->client.config.identity.user);
	ret = client_call(&pool->client, &command, &reply, error);
	freeReplyObject(reply);
	return ret;
}

/* ---- Waiting for a wake-up ------------------------------------------------------------------- */

/*
 * A waiter sends BLPOP for its client's own list, on a connection used for nothing else. If wait()
 * is interrupted, the BLPOP stays pending, and the next wait() continues with it.
 *
 * No wake-up is lost. What the server pushes stays in the list until a BLPOP takes it, and its
 * reply is read by this wait() or by the next one. If the connection breaks while a BLPOP is
 * pending, wait() fails, and the next heartbeat reports the state. A failure of wait() does not
 * mean that the coordinator is unreachable. The server may refuse only BLPOP; then heartbeats alone
 * report a grant.
 */

/* An answer to BLPOP that is this late will not come. */
#define DEAD_NS 2000000000ull
/* The server ends a BLPOP up to this late, because it looks for expired ones ten times a second. */
#define LATE_NS 150000000ull

static void redis_interrupt(void *opaque)
{
	struct redis_pool *pool = opaque;
	const uint64_t one = 1;

	/* The write fails only if the counter is full, and then an interruption is pending
	 * already. */
	while (write(pool->interruption, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static bool was_interrupted(struct redis_pool *pool)
{
	uint64_t count;

	return read(pool->interruption, &count, sizeof(count)) == sizeof(count);
}

static void drop_wake(struct redis_pool *pool)
{
	link_close(pool->wake);
	pool->wake = NULL;
	pool->asked = false;
}

/* Closes the connections of an idle pool. Otherwise a server with 100,000 processes that save twice
 * an hour would need most of its memory for connections. The next call connects again. */
static void redis_rest(void *opaque)
{
	struct redis_pool *pool = opaque;

	pool->woken |= pool->asked;
	drop_wake(pool);
	pthread_mutex_lock(&pool->client.lock);
	drop(&pool->client);
	pthread_mutex_unlock(&pool->client.lock);
}

static int ask_to_be_woken(struct redis_pool *pool, uint64_t until_ns, struct base_error *error)
{
	/* BLPOP takes 0 for "without limit". */
	const uint64_t left_ms = MAX((uint64_t)link_time_left_ms(until_ns), 1u);
	struct link_command command = { 0 };
	char seconds[32];

	snprintf(seconds, sizeof(seconds), "%llu.%03u", (unsigned long long)(left_ms / 1000),
		 (unsigned)(left_ms % 1000));
	link_add_texts(&command, "BLPOP", pool->wake_key, seconds);
	pool->asked = true;
	pool->due_ns = base_now_ns() + base_ms_to_ns(left_ms);
	return link_send(pool->wake, &command, call_end(&pool->client), error);
}

/* Warns once that the server refuses BLPOP, and why. */
static void tell_refused(struct redis_pool *pool, const struct base_error *error)
{
	if (!pool->told_refused)
		base_log(&pool->client.config.log, IOSHAPE_LOG_WARNING,
			 "the coordinator cannot wake processes in pool \"%s\", so they get slots "
			 "seconds late: %s",
			 pool->client.config.pool, error->text);
	pool->told_refused = true;
}

/* Reads the answer to BLPOP. Returns 1 for a wake-up, 0 if BLPOP must be sent again or its answer
 * is incomplete, or a negative code. */
static int take_wake(struct redis_pool *pool, struct base_error *error)
{
	enum sequel sequel;
	redisReply *reply;
	int ret = link_take(pool->wake, &reply, error);

	if (ret || !reply)
		return ret;
	pool->asked = false;
	if (reply->type != REDIS_REPLY_ERROR) {
		ret = reply->type != REDIS_REPLY_NIL;
	} else {
		pthread_mutex_lock(&pool->client.lock);
		sequel = take_error(&pool->client, pool->wake, reply, error);
		pthread_mutex_unlock(&pool->client.lock);
		if (sequel == REFUSED)
			tell_refused(pool, error);
		if (sequel != REFUSED)
			drop_wake(pool);
		ret = sequel == REDIRECTED ? 0 : -EACCES;
	}
	freeReplyObject(reply);
	return ret;
}

/* Returns when wait() ends. If an answer is due at about until_ns, wait() waits a little longer for
 * it. */
static uint64_t last_moment(const struct redis_pool *pool, uint64_t until_ns)
{
	return pool->asked && pool->due_ns <= until_ns + LATE_NS ? until_ns + LATE_NS : until_ns;
}

/* Waits once for the answer to BLPOP. Returns what take_wake() does. */
static int wait_once(struct redis_pool *pool, uint64_t until_ns, struct base_error *error)
{
	const uint64_t dead_ns = pool->due_ns + DEAD_NS;
	struct pollfd ready[] = {
		{ .fd = pool->wake->context->fd, .events = POLLIN },
		{ .fd = pool->interruption, .events = POLLIN },
	};

	if (poll(ready, ARRAY_LENGTH(ready), link_time_left_ms(MIN(until_ns, dead_ns))) < 0)
		return 0; /* a signal, or no memory: the caller's loop has a deadline */
	if (ready[0].revents)
		return take_wake(pool, error);
	if (base_now_ns() >= dead_ns)
		return base_fail_reason(error, -ETIMEDOUT, "%s does not answer in time",
					pool->wake->name);
	return 0;
}

static int redis_wait(void *opaque, uint32_t timeout_ms, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	struct base_error why = { 0 };
	int ret = pool->woken;

	pool->woken = false;
	while (!ret && !was_interrupted(pool)) {
		if (!pool->wake)
			ret = connect_beside(&pool->client, &pool->wake, &why);
		if (ret || base_now_ns() >= last_moment(pool, until_ns))
			break;
		if (!pool->asked)
			ret = ask_to_be_woken(pool, until_ns, &why);
		if (!ret)
			ret = wait_once(pool, last_moment(pool, until_ns), &why);
	}
	if (ret >= 0) {
		was_interrupted(pool);
		return 0;
	}
	/* After a refusal the connection stays usable. */
	if (ret != -EACCES)
		drop_wake(pool);
	why.code = IOSHAPE_E_COORDINATOR;
	return base_propagate(error, &why);
}

/* ---- For the operator's commands in Python --------------------------------------------------- */

static int redis_describe(const struct slots_config *config, struct slots_coordinator *found,
			  struct base_error *error)
{
	struct redis_client client;
	int ret = client_open(&client, config, error);

	if (!ret)
		ret = read_password(&client, error);
	found->id = slots_redis.id;
	found->address = client.address;
	memcpy(found->key, client.key, sizeof(found->key));
	found->small_bytes = SLOTS_SMALL_BYTES;
	found->bypass = SLOTS_BYPASS;
	client_close(&client);
	return ret;
}

const struct slots_ops slots_redis = {
	.id = "redis",
	.open = redis_open,
	.acquire = redis_acquire,
	.beat = redis_beat,
	.release = redis_release,
	.wait = redis_wait,
	.interrupt = redis_interrupt,
	.rest = redis_rest,
	.pace = redis_pace,
	.alarm = redis_alarm,
	.close = redis_close,
	.describe = redis_describe,
};

/* ---- Messages of ranks ----------------------------------------------------------------------- */

#define MESSAGES_KEY_BYTES (SLOTS_KEY_BYTES + SLOTS_MESSAGES_LIST_BYTES)

struct slots_messages {
	struct redis_client client;
};

/* Writes the key of a list. Its hash tag puts it on the cluster node that has the pool's keys, and
 * users.acl allows the name. */
static void name_key(const struct slots_messages *messages, char key[MESSAGES_KEY_BYTES],
		     const char *list)
{
	snprintf(key, MESSAGES_KEY_BYTES, "{ios:%s}:store:%s", messages->client.config.pool, list);
}

int slots_messages_open(struct slots_messages **out, const struct slots_config *config,
			struct base_error *error)
{
	struct slots_messages *messages;
	int ret;

	*out = NULL;
	if (!config || !config->address || slots_coordinator_of(config->address) != &slots_redis)
		return base_fail_reason(
			error, -EINVAL,
			"ranks cannot exchange messages through the coordinator: it is "
			"not a Redis");
	messages = calloc(1, sizeof(*messages));
	if (!messages)
		return base_no_memory(error, "a message store", sizeof(*messages));
	ret = client_open(&messages->client, config, error);
	messages->client.most_reply_bytes = SLOTS_MESSAGES_REPLY_BYTES;
	if (ret)
		slots_messages_close(messages);
	else
		*out = messages;
	return ret;
}

void slots_messages_close(struct slots_messages *messages)
{
	if (messages)
		client_close(&messages->client);
	free(messages);
}

/* Sends a command and ignores its answer. */
static int send_messages(struct slots_messages *messages, struct link_command *command,
			 struct base_error *error)
{
	redisReply *reply;
	int ret = client_call(&messages->client, command, &reply, error);

	freeReplyObject(reply);
	return ret;
}

int slots_messages_put(struct slots_messages *messages, const char *list, const char *name,
		       const void *data, size_t bytes, struct base_error *error)
{
	struct link_command command = { 0 };
	char key[MESSAGES_KEY_BYTES];
	int ret;

	name_key(messages, key, list);
	link_add_texts(&command, "HSET", key, name);
	link_add_bytes(&command, bytes ? data : "", bytes);
	ret = send_messages(messages, &command, error);
	if (ret)
		return ret;
	/* Without an expiry the list would stay for ever. */
	command = (struct link_command){ 0 };
	link_add_texts(&command, "PEXPIRE", key);
	link_add_numbers(&command, SLOTS_MESSAGES_KEPT_MS);
	return send_messages(messages, &command, error);
}

static int messages_not_understood(const char *key, struct base_error *error)
{
	return base_fail_reason_with(
		error, IOSHAPE_E_COORDINATOR, "check that it is a Redis",
		"the coordinator's answer about the messages in %s is not valid", key);
}

static int read_messages(const redisReply *reply, size_t count, const char *key,
			 int (*found)(void *user, size_t index, const void *data, size_t bytes),
			 void *user, struct base_error *error)
{
	int ret = 0;

	if (reply->type != REDIS_REPLY_ARRAY || reply->elements != count)
		return messages_not_understood(key, error);
	for (size_t i = 0; i < count && !ret; i++) {
		const redisReply *message = reply->element[i];

		if (message->type == REDIS_REPLY_STRING)
			ret = found(user, i, message->str, message->len);
		else if (message->type != REDIS_REPLY_NIL)
			ret = messages_not_understood(key, error);
	}
	return ret;
}

int slots_messages_get(struct slots_messages *messages, const char *list, const char *const *names,
		       size_t count,
		       int (*found)(void *user, size_t index, const void *data, size_t bytes),
		       void *user, struct base_error *error)
{
	struct link_command command = { 0 };
	char key[MESSAGES_KEY_BYTES];
	redisReply *reply;
	int ret;

	name_key(messages, key, list);
	link_add_texts(&command, "HMGET", key);
	for (size_t i = 0; i < count; i++)
		link_add_texts(&command, names[i]);
	ret = client_call(&messages->client, &command, &reply, error);
	if (!ret)
		ret = read_messages(reply, count, key, found, user, error);
	freeReplyObject(reply);
	return ret;
}

int slots_messages_remove(struct slots_messages *messages, const char *list,
			  struct base_error *error)
{
	struct link_command command = { 0 };
	char key[MESSAGES_KEY_BYTES];

	name_key(messages, key, list);
	link_add_texts(&command, "DEL", key);
	return send_messages(messages, &command, error);
}
