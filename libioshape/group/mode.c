/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which mode. The first row that holds:
 *
 *   asked for | when                                                | mode
 *   ----------|-----------------------------------------------------|----------------------------
 *   any       | one rank                                            | each
 *   each      |                                                     | each
 *   node      | the ranks of a node can share memory, or are alone  | node
 *   rank0     | the same, and bytes can travel, or there is 1 node; | rank0
 *             | not on the tiers of several nodes                   |
 *   any other | not possible                                        | node if possible, or each
 *   auto      | one node, whose ranks can share memory              | node
 *   auto      | several nodes, 64 MiB or less in all, rank0 is      | rank0
 *             | possible: more files would cost more than the bytes |
 *   auto      | one rank on each node: a file for each is the same  | each
 *   auto      | the ranks of a node can share memory                | node
 *   auto      | otherwise                                           | each
 */
#include "group/group.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define FEW_BYTES (64 * MIB)
/* A quarter of the targets and less is few. */
#define FEW_TARGETS 4u

static void say(char *why, size_t room, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static void say(char *why, size_t room, const char *format, ...)
{
	const size_t used = room ? strnlen(why, room - 1) : 0;
	va_list args;

	va_start(args, format);
	vsnprintf(why ? why + used : NULL, room - used, format, args);
	va_end(args);
}

static bool node_is_possible(const struct group_facts *facts)
{
	return facts->shared || facts->ranks == facts->nodes;
}

static bool rank0_is_possible(const struct group_facts *facts)
{
	return node_is_possible(facts) && ((facts->comm && !facts->apart) || facts->nodes == 1);
}

static enum ioshape_mode as_asked(enum ioshape_mode asked, const struct group_facts *facts,
				  char *why, size_t room)
{
	const bool node = node_is_possible(facts);

	if (asked == IOSHAPE_MODE_EACH || (asked == IOSHAPE_MODE_NODE && node) ||
	    (asked == IOSHAPE_MODE_RANK0 && rank0_is_possible(facts))) {
		say(why, room, "as asked for");
		return asked;
	}
	say(why, room, "%s was asked for, but %s", asked == IOSHAPE_MODE_NODE ? "node" : "rank0",
	    !node        ? "the ranks of a node cannot share memory here" :
	    facts->apart ? "each node saves on its own tier" :
			   "there is no way for bytes between nodes (give the group a comm)");
	return node ? IOSHAPE_MODE_NODE : IOSHAPE_MODE_EACH;
}

/* Not reasons, but what to know about a file for each node. */
static void add_remarks(const struct group_facts *facts, char *why, size_t room)
{
	const uint64_t reached = (uint64_t)facts->nodes * facts->stripes;

	if (facts->targets && reached && reached * FEW_TARGETS <= facts->targets)
		say(why, room,
		    "; they reach %llu of %u storage targets: wider stripes, or mode each, "
		    "would reach more",
		    (unsigned long long)reached, facts->targets);
	if (facts->capacity && facts->capacity < facts->nodes)
		say(why, room, "; at most %u of %u write at a time", facts->capacity, facts->nodes);
}

static enum ioshape_mode by_rule(const struct group_facts *facts, char *why, size_t room)
{
	if (facts->nodes > 1 && facts->bytes <= FEW_BYTES && rank0_is_possible(facts)) {
		say(why, room, "few bytes from %u nodes: one file", facts->nodes);
		return IOSHAPE_MODE_RANK0;
	}
	if (facts->ranks == facts->nodes) {
		say(why, room, "one rank on each of %u nodes", facts->nodes);
		return IOSHAPE_MODE_EACH;
	}
	if (!facts->shared) {
		say(why, room, "the ranks of a node cannot share memory here");
		return IOSHAPE_MODE_EACH;
	}
	say(why, room, "%u ranks on %u node%s: a file for each node", facts->ranks, facts->nodes,
	    facts->nodes == 1 ? "" : "s");
	add_remarks(facts, why, room);
	return IOSHAPE_MODE_NODE;
}

enum ioshape_mode group_choose_mode(enum ioshape_mode asked, const struct group_facts *facts,
				    char *why, size_t why_bytes)
{
	if (why_bytes)
		*why = 0;
	if (facts->ranks <= 1) {
		say(why, why_bytes, "one rank");
		return IOSHAPE_MODE_EACH;
	}
	return asked == IOSHAPE_MODE_AUTO ? by_rule(facts, why, why_bytes) :
					    as_asked(asked, facts, why, why_bytes);
}
