/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Addresses of coordinators: valid ones, errors in invalid ones, and secrets that messages must not
 * contain.
 */
/* Included, because look-ups of names are static. */
#include "slots/redis.c"

#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Replaces the C library's function by a slow name service. */
int getaddrinfo(const char *restrict host, const char *restrict port,
		const struct addrinfo *restrict wanted, struct addrinfo **restrict found)
{
	(void)host, (void)port, (void)found;
	if (!(wanted->ai_flags & AI_NUMERICHOST))
		poll(NULL, 0, 3000);
	return EAI_NONAME;
}

static struct slots_address parse(const char *text)
{
	struct slots_address address;
	struct base_error error = { 0 };

	ck_assert_msg(!address_parse(&address, text, &error), "%s: %s", text, error.text);
	return address;
}

static struct test_case tests = { .name = "address" };

TEST(tests, a_host_alone_is_enough)
{
	struct slots_address address = parse("redis://cache.example");

	ck_assert_int_eq(address.kind, ADDRESS_HOST);
	ck_assert_uint_eq(address.node_count, 1);
	ck_assert_str_eq(address.nodes[0].host, "cache.example");
	ck_assert_uint_eq(address.nodes[0].port, 6379);
	ck_assert(!address.tls && !address.has_password && !address.database);
}

TEST(tests, all_parts_are_found)
{
	struct slots_address address = parse("rediss://ann:pa%3Ass%20w%25rd@10.0.0.7:7001/12");

	ck_assert(address.tls && address.has_password);
	ck_assert_str_eq(address.user, "ann");
	ck_assert_str_eq(address.password, "pa:ss w%rd");
	ck_assert_str_eq(address.nodes[0].host, "10.0.0.7");
	ck_assert_uint_eq(address.nodes[0].port, 7001);
	ck_assert_uint_eq(address.database, 12);
}

TEST(tests, a_password_needs_no_user_and_a_user_no_password)
{
	struct slots_address address = parse("redis://:secret@h");

	ck_assert_str_eq(address.user, "");
	ck_assert_str_eq(address.password, "secret");
	address = parse("redis://ann@h");
	ck_assert_str_eq(address.user, "ann");
	ck_assert(!address.has_password);
}

TEST(tests, an_at_sign_in_a_password_is_taken_as_meant)
{
	struct slots_address address = parse("redis://:p@ss@h:1/");

	ck_assert_str_eq(address.password, "p@ss");
	ck_assert_str_eq(address.nodes[0].host, "h");
}

TEST(tests, several_hosts_are_a_cluster)
{
	struct slots_address address = parse("redis://a:7000,[::1]:7001,[fe80::1%eth0],b/");

	ck_assert_uint_eq(address.node_count, 4);
	ck_assert_str_eq(address.nodes[1].host, "::1");
	ck_assert_uint_eq(address.nodes[1].port, 7001);
	ck_assert_str_eq(address.nodes[2].host, "fe80::1%eth0");
	ck_assert_uint_eq(address.nodes[2].port, 6379);
	ck_assert_str_eq(address.nodes[3].host, "b");
}

TEST(tests, sockets_have_a_path_and_maybe_a_database)
{
	struct slots_address address = parse("unix:///run/redis/a%20b.sock?db=3");

	ck_assert_int_eq(address.kind, ADDRESS_UNIX);
	ck_assert_str_eq(address.path, "/run/redis/a b.sock");
	ck_assert_uint_eq(address.database, 3);
	address = parse("unix://ann:x@/s");
	ck_assert_str_eq(address.path, "/s");
	ck_assert_str_eq(address.user, "ann");
	ck_assert_str_eq(address.password, "x");
}

TEST(tests, sentinels_know_a_service)
{
	struct slots_address address = parse("sentinel://u:p@s1,s2:26380/my-master/4");

	ck_assert_int_eq(address.kind, ADDRESS_SENTINEL);
	ck_assert_uint_eq(address.node_count, 2);
	ck_assert_uint_eq(address.nodes[0].port, 26379);
	ck_assert_uint_eq(address.nodes[1].port, 26380);
	ck_assert_str_eq(address.service, "my-master");
	ck_assert_uint_eq(address.database, 4);
	ck_assert_str_eq(address.user, "u");
}

static const char *const wrong[] = {
	"",
	"redis",
	"redis:",
	"redis:/h",
	"http://h",
	"Redis://h",
	"redis://",
	"redis:///0",
	"redis://u:SECRET@",
	"redis://u:SECRET@:6379",
	"redis://u:SECRET@h:",
	"redis://u:SECRET@h:0",
	"redis://u:SECRET@h:65536",
	"redis://u:SECRET@h:99999999999999999999",
	"redis://u:SECRET@h:-1",
	"redis://u:SECRET@h:6379x",
	"redis://u:SECRET@h/x",
	"redis://u:SECRET@h/1/2",
	"redis://u:SECRET@h/1000001",
	"redis://u:SECRET@h/-1",
	"redis://u:SECRET@h h",
	"redis://u:SECRET@h\n",
	"redis://u:SECRET@a,,b",
	"redis://u:SECRET@a,b/1",
	"redis://u:SECRET@[::1",
	"redis://u:SECRET@[::1]x",
	"redis://u:SECRET@[]",
	"redis://u:SECRET@::1",
	"redis://u:SECRET%@h",
	"redis://u:SECRET%2@h",
	"redis://u:SECRET%zz@h",
	"redis://u:SECRET%00@h",
	"redis://u%:SECRET@h",
	"redis://u:/SECRET@h", /* not escaped */
	"redis://u:SECRET/x@h",
	"redis://u:1/SECRET@h",
	"redis://a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q",
	"unix://",
	"unix://SECRET",
	"unix://relative/SECRET",
	"unix://u:SECRET@",
	"unix://u:SECRET@x/y",
	"unix:///s?database=1",
	"unix:///s?db=SECRET",
	"unix:///%00SECRET",
	"sentinel://u:SECRET@s",
	"sentinel://u:SECRET@s/",
	"sentinel://u:SECRET@/service",
	"sentinel://u:SECRET@s/service/x",
	"sentinel://u:SECRET@s/ser vice",
};

TEST(tests, what_is_wrong_is_refused_without_saying_the_password)
{
	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		struct base_error error = { 0 };
		struct slots_address address;

		ck_assert_msg(address_parse(&address, wrong[i], &error) == -EINVAL,
			      "\"%s\" was accepted", wrong[i]);
		ck_assert_int_eq(error.code, -EINVAL);
		ck_assert_msg(!strstr(error.text, "SECRET"), "%s", error.text);
		ck_assert_msg(strstr(error.text, "address"), "%s", error.text);
		for (size_t byte = 0; byte < sizeof(address); byte++)
			REQUIRE(!((const char *)&address)[byte]); /* all bytes were zeroed */
	}
}

TEST(tests, lengths_are_limited)
{
	static char text[10000];
	struct base_error error = { 0 };
	struct slots_address address;
	static const struct {
		const char *before, *behind;
		int most;
	} cases[] = {
		{ "redis://", "", ADDRESS_HOST_BYTES - 1 },
		{ "redis://:", "@h", ADDRESS_SECRET_BYTES - 1 },
		{ "redis://", ":x@h", ADDRESS_SECRET_BYTES - 1 },
		{ "unix:///", "", ADDRESS_PATH_BYTES - 2 },
		{ "sentinel://h/", "", ADDRESS_HOST_BYTES - 1 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		for (int more = 0; more < 2; more++) {
			snprintf(text, sizeof(text), "%s%0*d%s", cases[i].before,
				 cases[i].most + more, 1, cases[i].behind);
			ck_assert_int_eq(address_parse(&address, text, &error), more ? -EINVAL : 0);
		}
	}
	memset(text, ',', sizeof(text) - 1);
	memcpy(text, "redis://", 8);
	ck_assert_int_eq(address_parse(&address, text, &error), -EINVAL);
}

TEST(tests, no_text_whatsoever_does_harm)
{
	static const char letters[] = "redis://unixentl:@/[]%,.?=db0129aF \xff";
	struct slots_address address;
	uint64_t state = 7;
	char text[64];

	for (unsigned round = 0; round < 200000; round++) {
		size_t length = test_random_below(&state, sizeof(text) - 1);
		size_t kept = test_random_below(&state, 14);

		snprintf(text, sizeof(text), "%s", round % 2 ? "redis://u:p@h:1" : "sentinel://[");
		for (size_t i = strlen(text) < kept ? strlen(text) : kept; i < length; i++)
			text[i] = letters[test_random_below(&state, sizeof(letters) - 1)];
		text[length] = 0;
		if (!address_parse(&address, text, NULL)) {
			REQUIRE(address.kind == ADDRESS_UNIX || address.node_count > 0);
			REQUIRE(address.node_count <= ADDRESS_HOSTS);
		}
	}
}

TEST(tests, nodes_of_redirects_are_understood)
{
	struct slots_node node;

	ck_assert_int_eq(address_parse_node(&node, "10.1.2.3:7000", 13), 0);
	ck_assert_str_eq(node.host, "10.1.2.3");
	ck_assert_uint_eq(node.port, 7000);
	ck_assert_int_eq(address_parse_node(&node, "fe80::1:7000", 12), 0);
	ck_assert_str_eq(node.host, "fe80::1");
	ck_assert_int_eq(address_parse_node(&node, "[::1]:7000", 10), 0);
	ck_assert_str_eq(node.host, "::1");
	ck_assert_int_eq(address_parse_node(&node, ":7000", 5), 0);
	ck_assert_str_eq(node.host, "");
	ck_assert_int_eq(address_parse_node(&node, "?:7000", 6), 0);
	ck_assert_str_eq(node.host, "");
	ck_assert_int_eq(address_parse_node(&node, "", 0), -EINVAL);
	ck_assert_int_eq(address_parse_node(&node, "host", 4), -EINVAL);
	ck_assert_int_eq(address_parse_node(&node, "host:", 5), -EINVAL);
	ck_assert_int_eq(address_parse_node(&node, "host:0", 6), -EINVAL);
	ck_assert_int_eq(address_parse_node(&node, "ho st:1", 7), -EINVAL);
}

static int look_up_slowly(void)
{
	const struct slots_address address = { .kind = ADDRESS_HOST };
	const struct slots_node node = { .host = "hangs", .port = 1 };
	struct slots_link *link;

	return link_open(&link, &address, &node, false, 0, base_now_ns() + 10000000, NULL);
}

TEST(tests, a_forked_child_can_look_names_up_however_many_hang_in_its_parent)
{
	int status;
	pid_t child;

	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(look_up_slowly(), -ETIMEDOUT);
	/* With too many look-ups in progress, no further one begins. */
	ck_assert_int_eq(look_up_slowly(), -EHOSTUNREACH);
	child = fork();
	if (!child)
		scratch_leave_child(look_up_slowly() == -ETIMEDOUT ? 0 : 1);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
	ck_assert_int_eq(look_up_slowly(), -EHOSTUNREACH);
}
