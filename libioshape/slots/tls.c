/* SPDX-License-Identifier: Apache-2.0 */
/* TLS as hiredis >= 1.0 does it, if the build found that; which certificates hold is up to OpenSSL
 * (SSL_CERT_FILE, SSL_CERT_DIR). */
#define _GNU_SOURCE
#include "slots/link.h"

#include <errno.h>
#include <stdio.h>

#ifdef SLOTS_TLS

#include <fcntl.h>
#include <hiredis_ssl.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/time.h>

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

/* The handshake waits; afterwards the socket does not again. */
static void let_wait(redisContext *context, uint64_t until_ns, bool wait)
{
	const int left_ms = MAX(link_time_left_ms(until_ns), 1);
	const struct timeval left = { left_ms / 1000, left_ms % 1000 * 1000 };
	int flags = fcntl(context->fd, F_GETFL);

	setsockopt(context->fd, SOL_SOCKET, SO_RCVTIMEO, &left, sizeof(left));
	setsockopt(context->fd, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof(left));
	fcntl(context->fd, F_SETFL, wait ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
	if (wait)
		context->flags |= REDIS_BLOCK;
	else
		context->flags &= ~REDIS_BLOCK;
}

int link_start_tls(redisContext *context, const char *host, uint64_t until_ns, const char *name,
		   char *why)
{
	SSL *session = new_session(host);
	struct base_held_sigpipe held;
	int ret;

	if (!session) {
		snprintf(why, LINK_WHY_BYTES, "TLS cannot be set up for %s", name);
		return -ENOMEM;
	}
	let_wait(context, until_ns, true);
	base_hold_sigpipe(&held);
	ret = redisInitiateSSL(context, session);
	base_let_sigpipe(&held, true);
	let_wait(context, until_ns, false);
	if (ret == REDIS_OK)
		return 0;
	snprintf(why, LINK_WHY_BYTES,
		 "no TLS with %s (%.100s); does it speak TLS on this port, is its certificate for "
		 "this name, and does SSL_CERT_FILE name who signed it?",
		 name, context->errstr);
	return -EPROTO;
}

#else

bool link_has_tls(void)
{
	return false;
}

int link_start_tls(redisContext *context, const char *host, uint64_t until_ns, const char *name,
		   char *why)
{
	(void)context, (void)host, (void)until_ns;
	snprintf(why, LINK_WHY_BYTES, "%s cannot be spoken to with TLS", name);
	return -ENOTSUP;
}

#endif
