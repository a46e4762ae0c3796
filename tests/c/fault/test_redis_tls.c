/* SPDX-License-Identifier: Apache-2.0 */
/* TLS to a Redis, if hiredis supports it. */
#include "support/check_main.h"
#include "support/fake_redis.h"
#include "support/redis_case.h"
#include "support/scratch.h"

#include <poll.h>
#include <signal.h>

static struct redis_server server;
static char certificate[128], key[128], address[64], tls_port[8];

/* Makes a self-signed certificate for this name. */
static void certify(const char *name)
{
	char command[600];

	snprintf(certificate, sizeof(certificate), "%s/certificate", server.directory);
	snprintf(key, sizeof(key), "%s/key", server.directory);
	snprintf(command, sizeof(command),
		 "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
		 "-days 2 -subj /CN=test -addext subjectAltName=%s -keyout %s -out %s 2>/dev/null",
		 name, key, certificate);
	MUST(!system(command), "openssl made no certificate");
	MUST(!setenv("SSL_CERT_FILE", certificate, 1), "no environment");
}

static void start(const char *name)
{
	certify(name);
	snprintf(tls_port, sizeof(tls_port), "%u", redis_server_free_port());
	snprintf(address, sizeof(address), "rediss://127.0.0.1:%s", tls_port);
	redis_server_option(&server, "--tls-port", tls_port);
	redis_server_option(&server, "--tls-cert-file", certificate);
	redis_server_option(&server, "--tls-key-file", key);
	redis_server_option(&server, "--tls-auth-clients", "no");
	redis_server_start(&server);
}

static void setup(void)
{
	redis_server_init(&server);
}

static void teardown(void)
{
	redis_server_free(&server);
}

static struct test_case tests = { .name = "redis_tls", .setup = setup, .teardown = teardown };

TEST(tests, calls_and_waiting_work_as_without_it)
{
	unsigned before = scratch_descriptors();
	void *pool, *other;

	start("IP:127.0.0.1");
	pool = redis_case_open(address, "1");
	other = redis_case_open(address, "2");
	redis_case_hold(pool, "1-1");
	ck_assert_int_eq(redis_case_acquire(other, "2-1").state, SLOTS_WAITING);
	slots_redis.interrupt(other);
	redis_case_be_woken(other);
	slots_redis.rest(pool);
	redis_case_release(pool, "1-1");
	redis_case_be_woken(other);
	slots_redis.close(pool);
	slots_redis.close(other);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

TEST(tests, a_certificate_for_another_name_is_refused)
{
	struct base_error error;
	void *pool;

	start("DNS:elsewhere.example");
	pool = redis_case_open(address, "1");
	redis_case_refused(pool, &error);
	ck_assert_msg(strstr(error.text, "certificate"), "%s", error.text);
	slots_redis.close(pool);
}

TEST(tests, a_certificate_that_nobody_vouches_for_is_refused)
{
	struct base_error error;
	void *pool;

	start("IP:127.0.0.1");
	unsetenv("SSL_CERT_FILE");
	pool = redis_case_open(address, "1");
	redis_case_refused(pool, &error);
	ck_assert_msg(strstr(error.text, "SSL_CERT_FILE"), "%s", error.text);
	slots_redis.close(pool);
}

TEST(tests, a_server_without_tls_is_given_up_in_time)
{
	struct base_error error;
	char plain[64];
	void *pool;

	start("IP:127.0.0.1");
	snprintf(plain, sizeof(plain), "rediss://127.0.0.1:%u", server.port);
	pool = redis_case_open(plain, "1");
	redis_case_refused(pool, &error);
	slots_redis.close(pool);
}

/* The server announces a TLS record of 16 KiB and sends it byte by byte. */
TEST(tests, a_handshake_that_drips_is_given_up_in_time)
{
	unsigned before;
	struct fake_redis fake;
	struct base_error error;
	char dripping[64];
	void *pool;

	certify("IP:127.0.0.1");
	fake_redis_start(&fake, FAKE_TRICKLES, "\x16\x03\x03\x3f\xff\x02");
	before = scratch_descriptors();
	snprintf(dripping, sizeof(dripping), "rediss://%s", strstr(fake.address, "127"));
	pool = redis_case_open(dripping, "1");
	redis_case_refused(pool, &error);
	redis_case_must_say(&error, "in time");
	slots_redis.close(pool);
	fake_redis_stop(&fake);
	ck_assert_uint_le(scratch_descriptors(), before);
}

TEST(tests, a_server_that_hangs_or_dies_is_given_up_in_time)
{
	struct base_error error;
	void *pool, *fresh;

	signal(SIGPIPE, SIG_DFL);
	start("IP:127.0.0.1");
	pool = redis_case_open(address, "1");
	fresh = redis_case_open(address, "2");
	redis_case_acquire(pool, "1-1");
	redis_server_signal(&server, SIGSTOP);
	redis_case_refused(pool, &error);
	redis_case_refused(fresh, &error); /* during the handshake */
	redis_server_signal(&server, SIGCONT);
	poll(NULL, 0, 300);
	redis_case_acquire(pool, "1-1");
	redis_server_kill(&server);
	redis_case_refused(pool, &error);
	slots_redis.close(pool);
	slots_redis.close(fresh);
}
