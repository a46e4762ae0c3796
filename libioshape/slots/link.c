/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection to a Redis: socket, TLS, password, commands and replies. hiredis formats commands
 * and parses replies. Sockets never block; this file does all waiting, with deadlines. The
 * time-outs of hiredis apply to each read of a reply, and leave a connection whose replies no
 * longer match its commands. Its own connect functions set no CLOEXEC, and put no limit on name
 * look-ups.
 */
#define _GNU_SOURCE
#include "slots/link.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#ifdef SLOTS_TLS
#include <hiredis_ssl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#endif

#define CONNECT_NS 1000000000ull

/* Limits of one reply, unless the caller expects longer ones. */
#define MOST_REPLY_BYTES (16 * MIB)
#define MOST_REPLY_ELEMENTS (1u << 20)
#define BYTES_PER_S (4 * MIB)

/* Name look-ups that run at a time in this process: each may hang for half a minute. */
#define MOST_LOOKUPS 4

int link_time_left_ms(uint64_t until_ns)
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
		return base_refuse_with(error, code == EAI_AGAIN ? -ETIMEDOUT : -EHOSTUNREACH,
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
	return base_refuse_with(error, -EPROTO,
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
			return base_refuse_with(error, -ETIMEDOUT,
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
		return base_refuse(error, -ENOMEM, "cannot set up TLS for %s", name);
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
	return base_refuse(error, -ENOTSUP, "cannot connect to %s with TLS", name);
}

#endif

/* ---- Commands -------------------------------------------------------------------------------- */

void link_add_bytes(struct link_command *command, const char *text, size_t bytes)
{
	command->texts[command->count] = text;
	command->bytes[command->count++] = bytes;
}

void link_add_text_list(struct link_command *command, const char *const texts[], size_t count)
{
	for (size_t i = 0; i < count; i++)
		link_add_bytes(command, texts[i], strlen(texts[i]));
}

void link_add_number_list(struct link_command *command, const uint64_t numbers[], size_t count)
{
	for (size_t i = 0; i < count; i++) {
		char *text = command->numbers[command->number_count++];

		snprintf(text, sizeof(command->numbers[0]), "%llu", (unsigned long long)numbers[i]);
		link_add_bytes(command, text, strlen(text));
	}
}

/* ---- Sending and receiving ------------------------------------------------------------------- */

static int is_closed(const struct slots_link *link, struct base_error *error)
{
	return base_refuse(error, -ECONNRESET, "%s closed the connection", link->name);
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
	return base_refuse(error, -EPROTO, "%s does not answer like a Redis (%.100s)", link->name,
			   link->context->errstr);
}

static int no_memory(const struct slots_link *link, struct base_error *error)
{
	return base_refuse(error, -ENOMEM, "no memory for a command to %s", link->name);
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
	return base_refuse(error, -ETIMEDOUT, "%s does not answer in time", link->name);
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

int link_send(struct slots_link *link, const struct link_command *command, uint64_t until_ns,
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
	return base_refuse(error, -EPROTO, "%s does not answer like a Redis (a reply is too long)",
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

/* ---- Opening a connection -------------------------------------------------------------------- */

int link_authenticate(struct slots_link *link, const struct slots_address *address,
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
		ret = base_refuse(error, -EACCES, "%s rejects the user or the password",
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
		ret = base_refuse(error, -EACCES, "%s refuses database %u: %s", link->name,
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

	fd = open_socket(address, node, MIN(until_ns, base_now_ns() + CONNECT_NS), link->name,
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
	return start_tls(link->context, link->node.host, until_ns, link->name, error);
}

int link_open(struct slots_link **out, const struct slots_address *address,
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

void link_close(struct slots_link *link)
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
