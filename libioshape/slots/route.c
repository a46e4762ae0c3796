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
			redisReply **reply, uint64_t until_ns, char *why)
{
	struct link_command command = { 0 };

	link_add_text(&command, "SENTINEL");
	link_add_text(&command, "get-master-addr-by-name");
	link_add_text(&command, address->service);
	return link_ask(link, &command, reply, until_ns, why);
}

static int read_master(const struct slots_link *link, const struct slots_address *address,
		       const redisReply *reply, struct slots_node *master, char *why)
{
	char text[ADDRESS_HOST_BYTES + 8], words[200];

	if (reply->type == REDIS_REPLY_ERROR) {
		link_words(reply, words, sizeof(words));
		snprintf(why, LINK_WHY_BYTES, "the sentinel (%s) says: %s", link_name(link), words);
		return -EACCES;
	}
	if (reply->type == REDIS_REPLY_NIL) {
		snprintf(why, LINK_WHY_BYTES,
			 "the sentinel (%s) knows no service \"%s\"; check the name in the address",
			 link_name(link), address->service);
		return -ENOENT;
	}
	if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
	    reply->element[0]->type == REDIS_REPLY_STRING &&
	    reply->element[1]->type == REDIS_REPLY_STRING &&
	    (size_t)snprintf(text, sizeof(text), "%s:%s", reply->element[0]->str,
			     reply->element[1]->str) < sizeof(text) &&
	    !address_parse_node(master, text, strlen(text)) && *master->host)
		return 0;
	snprintf(why, LINK_WHY_BYTES, "the sentinel (%s) names no usable master", link_name(link));
	return -EPROTO;
}

static int find_master(const struct slots_address *address, const struct slots_node *sentinel,
		       struct slots_node *master, uint64_t until_ns, char *why)
{
	struct slots_link *link;
	redisReply *reply = NULL;
	int ret;

	ret = link_open(&link, address, sentinel, false, until_ns, why);
	if (ret)
		return ret;
	ret = ask_sentinel(link, address, &reply, until_ns, why);
	if (!ret && link_says(reply, "NOAUTH") && address->has_password) {
		freeReplyObject(reply);
		reply = NULL;
		ret = link_show_password(link, address, until_ns, why);
		if (!ret)
			ret = ask_sentinel(link, address, &reply, until_ns, why);
	}
	if (!ret)
		ret = read_master(link, address, reply, master, why);
	freeReplyObject(reply);
	link_close(link);
	return ret;
}

/* After a failover sentinels may name the old master for a moment: it says READONLY then. */
static int connect_master(const struct slots_address *address, const struct slots_node *sentinel,
			  struct slots_link **out, uint64_t until_ns, char *why)
{
	struct slots_node master;
	int ret = find_master(address, sentinel, &master, until_ns, why);

	return ret ? ret : link_open(out, address, &master, true, until_ns, why);
}

/* ---- All ------------------------------------------------------------------------------------- */

static int connect_through(const struct slots_address *address, const struct slots_node *node,
			   struct slots_link **out, uint64_t until_ns, char *why)
{
	if (address->kind == ADDRESS_SENTINEL)
		return connect_master(address, node, out, until_ns, why);
	return link_open(out, address, node, true, until_ns, why);
}

int route_connect(struct slots_route *route, struct slots_link **out, uint64_t until_ns, char *why)
{
	const struct slots_address *address = route->address;
	const size_t count = address->node_count;
	char last[LINK_WHY_BYTES] = "";
	int ret = -EINVAL;

	*out = NULL;
	if (address->kind == ADDRESS_UNIX)
		return link_open(out, address, NULL, true, until_ns, why);
	if (route->has_moved) {
		ret = link_open(out, address, &route->moved, true, until_next(until_ns, 2), why);
		if (!ret)
			return 0;
		route->has_moved = false;
	}
	for (size_t i = 0; i < count; i++) {
		ret = connect_through(address, &address->nodes[(route->next + i) % count], out,
				      until_next(until_ns, count - i), why);
		if (!ret) {
			route->next = (route->next + i) % count;
			return 0;
		}
		snprintf(last, sizeof(last), "%s", why);
	}
	route->next = (route->next + 1) % count;
	if (count > 1)
		snprintf(why, LINK_WHY_BYTES,
			 "none of the %zu hosts in the address helps; the "
			 "last: %.380s",
			 count, last);
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
