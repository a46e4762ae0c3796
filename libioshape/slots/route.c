/* SPDX-License-Identifier: Apache-2.0 */
/* Which server to speak to: the one named, a cluster's node, or the master that sentinels know. */
#include "slots/link.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* So that one host that swallows everything does not take the time of the others. */
static uint64_t until_next(uint64_t until_ns, size_t hosts_left)
{
	uint64_t now = base_now_ns();

	return now + (until_ns > now ? until_ns - now : 0) / hosts_left;
}

/* ---- Sentinel -------------------------------------------------------------------------------- */

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
		return base_refuse(error, -EACCES, "the sentinel (%s) says: %s", link_name(link),
				   words);
	}
	if (reply->type == REDIS_REPLY_NIL)
		return base_refuse(error, -ENOENT,
				   "the sentinel (%s) knows no service \"%s\"" BASE_REMEDY
				   "check the name in the address",
				   link_name(link), address->service);
	if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
	    reply->element[0]->type == REDIS_REPLY_STRING &&
	    reply->element[1]->type == REDIS_REPLY_STRING &&
	    (size_t)snprintf(text, sizeof(text), "%s:%s", reply->element[0]->str,
			     reply->element[1]->str) < sizeof(text) &&
	    !address_parse_node(master, text, strlen(text)) && *master->host)
		return 0;
	return base_refuse(error, -EPROTO, "the sentinel (%s) names no usable master",
			   link_name(link));
}

static int find_master(const struct slots_address *address, const struct slots_node *sentinel,
		       struct slots_node *master, uint64_t until_ns, struct base_error *error)
{
	struct slots_link *link;
	redisReply *reply = NULL;
	int ret;

	ret = link_open(&link, address, sentinel, false, until_ns, error);
	if (ret)
		return ret;
	ret = ask_sentinel(link, address, &reply, until_ns, error);
	if (!ret && link_says(reply, "NOAUTH") && address->has_password) {
		freeReplyObject(reply);
		reply = NULL;
		ret = link_show_password(link, address, until_ns, error);
		if (!ret)
			ret = ask_sentinel(link, address, &reply, until_ns, error);
	}
	if (!ret)
		ret = read_master(link, address, reply, master, error);
	freeReplyObject(reply);
	link_close(link);
	return ret;
}

/* After a failover sentinels may name the old master for a moment: it says READONLY then. */
static int connect_through(const struct slots_address *address, const struct slots_node *node,
			   struct slots_link **out, uint64_t until_ns, struct base_error *error)
{
	struct slots_node master;
	int ret = 0;

	if (address->kind == ADDRESS_SENTINEL) {
		ret = find_master(address, node, &master, until_ns, error);
		node = &master;
	}
	return ret ? ret : link_open(out, address, node, true, until_ns, error);
}

/* ---- All ------------------------------------------------------------------------------------- */

int route_connect(struct slots_route *route, struct slots_link **out, uint64_t until_ns,
		  struct base_error *error)
{
	const struct slots_address *address = route->address;
	const size_t count = address->node_count;
	struct base_error why = { 0 };
	int ret = -EINVAL;

	*out = NULL;
	if (address->kind == ADDRESS_UNIX)
		return link_open(out, address, NULL, true, until_ns, error);
	if (route->has_moved) {
		ret = link_open(out, address, &route->moved, true, until_next(until_ns, 2), NULL);
		if (!ret)
			return 0;
		route->has_moved = false;
	}
	for (size_t i = 0; i < count; i++) {
		why.code = 0; /* the last one's is told */
		ret = connect_through(address, &address->nodes[(route->next + i) % count], out,
				      until_next(until_ns, count - i), &why);
		if (!ret) {
			route->next = (route->next + i) % count;
			return 0;
		}
	}
	route->next = (route->next + 1) % count;
	if (count > 1)
		base_rephrase(&why, ret, "none of the %zu hosts in the address helps; the last: %s",
			      count, why.sentence);
	base_pass_on(error, &why);
	return ret;
}

bool route_is_redirect(const struct slots_link *link, const redisReply *reply,
		       struct slots_node *node, bool *ask)
{
	const char *text = reply->str, *where;

	if (reply->type != REDIS_REPLY_ERROR)
		return false;
	*ask = !strncmp(text, "ASK ", 4);
	if (!*ask && strncmp(text, "MOVED ", 6) != 0)
		return false;
	/* "MOVED 3999 host:port" */
	where = strrchr(text, ' ') + 1;
	if (address_parse_node(node, where, strlen(where)))
		return false;
	if (!*node->host)
		memcpy(node->host, link_node(link)->host, sizeof(node->host));
	return true;
}
