/* SPDX-License-Identifier: Apache-2.0 */
/* Parses the address of a Redis. The text may be untrusted; address.h has the interface. */
#define _GNU_SOURCE
#include "slots/address.h"

#include <errno.h>
#include <string.h>

#define REDIS_PORT 6379
#define SENTINEL_PORT 26379
#define MOST_DATABASE 1000000u
#define LONGEST_ADDRESS 8192u

/* A section of the address. */
struct span {
	const char *at;
	size_t bytes;
};

static struct span until(struct span text, size_t bytes)
{
	return (struct span){ text.at, bytes };
}

static struct span after(struct span text, size_t bytes)
{
	return (struct span){ text.at + bytes, text.bytes - bytes };
}

/* Splits `text` at the first `mark`: *head is the part before it, *tail the part behind it. Returns
 * false if there is no mark; then *head is all of the text. */
static bool cut(struct span text, char mark, struct span *head, struct span *tail)
{
	const char *at = text.bytes ? memchr(text.at, mark, text.bytes) : NULL;

	*head = text;
	*tail = after(text, text.bytes);
	if (!at)
		return false;
	*head = until(text, (size_t)(at - text.at));
	*tail = after(text, head->bytes + 1);
	return true;
}

static int digit(char letter)
{
	if (letter >= '0' && letter <= '9')
		return letter - '0';
	if (letter >= 'a' && letter <= 'f')
		return letter - 'a' + 10;
	if (letter >= 'A' && letter <= 'F')
		return letter - 'A' + 10;
	return -1;
}

/* Resolves percent escapes. -EINVAL: an escape is malformed, the result contains a 0, or it is too
 * long. */
static int decode(struct span text, char *into, size_t size)
{
	size_t used = 0;

	for (size_t i = 0; i < text.bytes; i++) {
		char letter = text.at[i];

		if (letter == '%') {
			if (text.bytes - i < 3 || digit(text.at[i + 1]) < 0 ||
			    digit(text.at[i + 2]) < 0)
				return -EINVAL;
			letter = (char)(digit(text.at[i + 1]) * 16 + digit(text.at[i + 2]));
			i += 2;
		}
		if (!letter || used + 1 >= size)
			return -EINVAL;
		into[used++] = letter;
	}
	into[used] = 0;
	return 0;
}

static int parse_number(struct span text, uint32_t most, uint32_t *number)
{
	uint32_t value = 0;

	if (!text.bytes || text.bytes > 9)
		return -EINVAL;
	for (size_t i = 0; i < text.bytes; i++) {
		if (text.at[i] < '0' || text.at[i] > '9')
			return -EINVAL;
		value = value * 10 + (uint32_t)(text.at[i] - '0');
	}
	*number = value;
	return value <= most ? 0 : -EINVAL;
}

/* Returns whether a text has only characters of host names and addresses. None of them can mislead
 * the reader of a message. */
static bool is_host(struct span text, bool in_brackets)
{
	if (!text.bytes || text.bytes >= ADDRESS_HOST_BYTES)
		return false;
	for (size_t i = 0; i < text.bytes; i++) {
		char c = text.at[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
		      c == '.' || c == '-' || c == '_' || (in_brackets && (c == ':' || c == '%'))))
			return false;
	}
	return true;
}

static void set_host(struct slots_node *node, struct span host)
{
	memcpy(node->host, host.at, host.bytes);
	node->host[host.bytes] = 0;
}

/* Parses "host[:port]". Returns NULL, or the problem as a part of a sentence. */
static const char *parse_host(struct slots_node *node, struct span text, uint16_t usual_port)
{
	bool brackets = text.bytes && *text.at == '[', has_port;
	struct span host, port;
	uint32_t number;

	if (brackets) {
		if (!cut(after(text, 1), ']', &host, &port))
			return "has no ] after its [";
		has_port = port.bytes > 0;
		if (has_port && *port.at != ':')
			return "has text other than a port after its ]";
		if (has_port)
			port = after(port, 1);
	} else {
		has_port = cut(text, ':', &host, &port);
	}
	if (!is_host(host, brackets))
		return "is missing, too long, or not a host name or IP address; write IPv6 "
		       "addresses in []";
	set_host(node, host);
	node->port = usual_port;
	if (!has_port)
		return NULL;
	if (parse_number(port, UINT16_MAX, &number) || !number)
		return "has a port that is not a number from 1 to 65535";
	node->port = (uint16_t)number;
	return NULL;
}

static int parse_hosts(struct slots_address *address, struct span text, uint16_t usual_port,
		       struct base_error *error)
{
	struct span one, rest = text;
	const char *wrong;
	bool more;

	do {
		more = cut(rest, ',', &one, &rest);
		if (address->node_count == ADDRESS_HOSTS)
			return base_fail_reason(
				error, -EINVAL,
				"the coordinator's address names more than %u hosts",
				ADDRESS_HOSTS);
		wrong = parse_host(&address->nodes[address->node_count++], one, usual_port);
		if (wrong)
			return base_fail_reason(
				error, -EINVAL,
				"host %zu in the coordinator's address %s (in a password, write "
				"%%40 for @, %%2F for /, %%3A for :, %%2C for a comma)",
				address->node_count, wrong);
	} while (more);
	return 0;
}

/* Parses "[user[:password]@]". *rest is the text behind it. */
static int parse_credentials(struct slots_address *address, struct span text, struct span *rest,
			     struct base_error *error)
{
	/* The last @ counts: earlier ones were meant to be part of the password. */
	const char *at = text.bytes ? memrchr(text.at, '@', text.bytes) : NULL;
	struct span user, password;

	*rest = text;
	if (!at)
		return 0;
	*rest = after(text, (size_t)(at - text.at) + 1);
	address->has_password = cut(until(text, (size_t)(at - text.at)), ':', &user, &password);
	if (decode(user, address->user, sizeof(address->user)) ||
	    decode(password, address->password, sizeof(address->password)))
		return base_fail_reason(
			error, -EINVAL,
			"the user or the password in the coordinator's address is "
			"longer than %d bytes, or has a %% that is not followed by two "
			"hexadecimal digits (%%25 stands for %%)",
			ADDRESS_SECRET_BYTES - 1);
	return 0;
}

static int parse_database(struct slots_address *address, struct span text, struct base_error *error)
{
	if (!text.bytes)
		return 0;
	if (parse_number(text, MOST_DATABASE, &address->database))
		return base_fail_reason(
			error, -EINVAL,
			"the database at the end of the coordinator's address is not a "
			"number from 0 to %u (in a password, write %%2F for /)",
			MOST_DATABASE);
	return 0;
}

static int parse_servers(struct slots_address *address, struct span text, struct base_error *error)
{
	struct span authority, database, hosts;
	int ret;

	cut(text, '/', &authority, &database);
	ret = parse_credentials(address, authority, &hosts, error);
	if (!ret)
		ret = parse_hosts(address, hosts, REDIS_PORT, error);
	if (!ret)
		ret = parse_database(address, database, error);
	if (!ret && address->node_count > 1 && address->database)
		return base_fail_reason(
			error, -EINVAL,
			"the coordinator's address names several hosts and a database: "
			"clusters have only database 0");
	return ret;
}

static int parse_sentinels(struct slots_address *address, struct span text,
			   struct base_error *error)
{
	struct span authority, path, hosts, service, database;
	int ret;

	cut(text, '/', &authority, &path);
	cut(path, '/', &service, &database);
	ret = parse_credentials(address, authority, &hosts, error);
	if (!ret)
		ret = parse_hosts(address, hosts, SENTINEL_PORT, error);
	if (ret)
		return ret;
	if (!is_host(service, true))
		return base_fail_reason(
			error, -EINVAL,
			"the coordinator's address lacks the service's name after the "
			"sentinels: sentinel://host,host/service");
	memcpy(address->service, service.at, service.bytes);
	return parse_database(address, database, error);
}

static int parse_socket(struct slots_address *address, struct span text, struct base_error *error)
{
	struct span authority, path, query, rest;
	int ret;

	cut(text, '/', &authority, &path);
	ret = parse_credentials(address, authority, &rest, error);
	if (ret)
		return ret;
	if (rest.bytes || authority.bytes == text.bytes)
		return base_fail_reason(
			error, -EINVAL,
			"the coordinator's address has no absolute path: unix:///path/of/socket");
	path = after(text, authority.bytes); /* begins with its / */
	if (cut(path, '?', &path, &query) && query.bytes) {
		if (query.bytes < 3 || memcmp(query.at, "db=", 3))
			return base_fail_reason(
				error, -EINVAL,
				"the coordinator's address can have only ?db=N after "
				"the socket's path");
		ret = parse_database(address, after(query, 3), error);
		if (ret)
			return ret;
	}
	if (decode(path, address->path, sizeof(address->path)))
		return base_fail_reason(
			error, -EINVAL,
			"the path in the coordinator's address is longer than %d bytes, "
			"or has a %% that is not followed by two hexadecimal digits",
			ADDRESS_PATH_BYTES - 1);
	return 0;
}

int address_parse(struct slots_address *address, const char *text, struct base_error *error)
{
	static const struct {
		const char *scheme;
		enum slots_address_kind kind;
		bool tls;
		int (*parse)(struct slots_address *address, struct span text,
			     struct base_error *error);
	} schemes[] = {
		{ "redis://", ADDRESS_HOST, false, parse_servers },
		{ "rediss://", ADDRESS_HOST, true, parse_servers },
		{ "unix://", ADDRESS_UNIX, false, parse_socket },
		{ "sentinel://", ADDRESS_SENTINEL, false, parse_sentinels },
	};
	const size_t bytes = strnlen(text, LONGEST_ADDRESS + 1);
	int ret;

	memset(address, 0, sizeof(*address));
	if (bytes > LONGEST_ADDRESS)
		return base_fail_reason(error, -EINVAL,
					"the coordinator's address is longer than %u bytes",
					LONGEST_ADDRESS);
	for (size_t i = 0; i < ARRAY_LENGTH(schemes); i++) {
		size_t prefix = strlen(schemes[i].scheme);

		if (strncmp(text, schemes[i].scheme, prefix))
			continue;
		address->kind = schemes[i].kind;
		address->tls = schemes[i].tls;
		ret = schemes[i].parse(address, (struct span){ text + prefix, bytes - prefix },
				       error);
		if (ret)
			explicit_bzero(address, sizeof(*address));
		return ret;
	}
	return base_fail_reason(
		error, -EINVAL,
		"the coordinator's address is not local or open, and does not begin "
		"with redis://, rediss://, unix:// or sentinel://");
}

int address_parse_node(struct slots_node *node, const char *text, size_t bytes)
{
	/* Unlike in our addresses, IPv6 has no brackets here: the port follows the last colon. */
	const char *colon = bytes ? memrchr(text, ':', bytes) : NULL;
	struct span host, port;
	uint32_t number;

	if (!colon)
		return -EINVAL;
	host = (struct span){ text, (size_t)(colon - text) };
	port = (struct span){ colon + 1, bytes - host.bytes - 1 };
	if (parse_number(port, UINT16_MAX, &number) || !number)
		return -EINVAL;
	node->port = (uint16_t)number;
	node->host[0] = 0;
	if (host.bytes >= 2 && *host.at == '[' && host.at[host.bytes - 1] == ']')
		host = (struct span){ host.at + 1, host.bytes - 2 };
	if (!host.bytes || (host.bytes == 1 && *host.at == '?'))
		return 0;
	if (!is_host(host, true))
		return -EINVAL;
	set_host(node, host);
	return 0;
}
