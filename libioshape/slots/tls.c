/* SPDX-License-Identifier: Apache-2.0 */
/* TLS as hiredis >= 1.0 does it, if the build found that; which certificates hold is up to OpenSSL
 * (SSL_CERT_FILE, SSL_CERT_DIR). */
#define _GNU_SOURCE
#include "slots/link.h"

#include <errno.h>
#include <stdio.h>

#ifdef SLOTS_TLS

#include <hiredis_ssl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>

bool link_has_tls(void)
{
	return true;
}

/* One for the process, made at first use: it holds what is known of certificates. */
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

/* hiredis's own set-up does not compare the certificate's names with the host. */
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

static int refused(SSL *session, const char *name, struct base_error *error)
{
	const long verdict = SSL_get_verify_result(session);
	const char *reason = ERR_reason_error_string(ERR_peek_last_error());

	if (verdict != X509_V_OK)
		reason = X509_verify_cert_error_string(verdict);
	return base_refuse(error, -EPROTO,
			   "no TLS with %s (%.100s)" BASE_REMEDY
			   "check that it speaks TLS on this port, that its certificate is for "
			   "this name, and that SSL_CERT_FILE names who signed it",
			   name, reason ? reason : "the connection ended");
}

/* One step of the handshake: 0 when it is over, or what the socket has to be ready for. */
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

/* However slowly the other side speaks, it has until then for all of it. */
static int shake_hands(SSL *session, int fd, uint64_t until_ns, const char *name,
		       struct base_error *error)
{
	struct pollfd ready = { .fd = fd };
	int ret;

	while ((ret = step(session, &ready.events)) == -EAGAIN) {
		if (base_now_ns() >= until_ns)
			return base_refuse(error, -ETIMEDOUT,
					   "%s does not answer in time" BASE_REMEDY
					   "check that it speaks TLS on this port",
					   name);
		/* Whether it failed or not, the clock ends it. */
		(void)poll(&ready, 1, link_time_left_ms(until_ns));
	}
	return ret ? refused(session, name, error) : 0;
}

int link_start_tls(redisContext *context, const char *host, uint64_t until_ns, const char *name,
		   struct base_error *error)
{
	SSL *session = new_session(host);
	struct base_held_sigpipe held;
	int ret;

	if (!session)
		return base_refuse(error, -ENOMEM, "TLS cannot be set up for %s", name);
	/* The socket does not block: it begins the handshake, and takes the session over. */
	base_hold_sigpipe(&held);
	ret = redisInitiateSSL(context, session);
	base_let_sigpipe(&held, true);
	if (ret == REDIS_OK)
		return shake_hands(session, context->fd, until_ns, name, error);
	ret = refused(session, name, error);
	SSL_free(session);
	return ret;
}

bool link_queue_encrypted(redisContext *context, const char *text, size_t bytes)
{
	return redisAppendFormattedCommand(context, text, bytes) == REDIS_OK;
}

/* hiredis knows nothing of MSG_NOSIGNAL. */
bool link_write_encrypted(redisContext *context, int *done)
{
	struct base_held_sigpipe held;
	int ret;

	base_hold_sigpipe(&held);
	ret = redisBufferWrite(context, done);
	base_let_sigpipe(&held, true);
	return ret == REDIS_OK;
}

#else

bool link_has_tls(void)
{
	return false;
}

int link_start_tls(redisContext *context, const char *host, uint64_t until_ns, const char *name,
		   struct base_error *error)
{
	(void)context, (void)host, (void)until_ns;
	return base_refuse(error, -ENOTSUP, "%s cannot be spoken to with TLS", name);
}

bool link_queue_encrypted(redisContext *context, const char *text, size_t bytes)
{
	(void)context, (void)text, (void)bytes;
	return false;
}

bool link_write_encrypted(redisContext *context, int *done)
{
	(void)context, (void)done;
	return false;
}

#endif
