/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a group: on which node each is, and which rank writes for it. */
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int group_find_nodes(struct ioshape_group *group)
{
	struct zip_names *keys;
	int ret;

	ret = zip_names_new(&keys, group->options.ranks);
	if (ret)
		return ret;
	group->node_count = 0;
	for (uint32_t rank = 0; !ret && rank < group->options.ranks; rank++) {
		const char *key = group->ranks[rank].node_key;
		uint64_t node = group->node_count;

		ret = zip_names_add(keys, key, strlen(key), node);
		if (!ret)
			group->leaders[group->node_count++] = rank;
		else if (ret == -EEXIST && zip_names_find(keys, key, strlen(key), &node))
			ret = 0;
		group->ranks[rank].node = (uint32_t)node;
	}
	zip_names_free(keys);
	return ret;
}

bool group_find_leaders(struct ioshape_group *group, uint64_t node_count)
{
	uint32_t found = 0;

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		uint32_t node = group->ranks[rank].node;

		if (node > found)
			return false;
		if (node == found)
			group->leaders[found++] = rank;
	}
	group->node_count = found;
	return found == node_count;
}

uint32_t group_writer_of(const struct ioshape_group *group, enum ioshape_mode mode, uint32_t rank)
{
	if (mode == IOSHAPE_MODE_RANK0)
		return 0;
	return mode == IOSHAPE_MODE_NODE ? group->leaders[group->ranks[rank].node] : rank;
}

bool group_is_local(const struct ioshape_group *group, uint32_t rank)
{
	return group->ranks[rank].node == group->ranks[group->options.rank].node;
}

bool group_has_all(const struct ioshape_group *group, const bool *have)
{
	return !memchr(have, false, group->options.ranks * sizeof(*have));
}

const char *group_show_rank(const struct ioshape_group *group, uint32_t rank,
			    char into[GROUP_RANK_BYTES])
{
	const char *where = group->ranks[rank].where;

	if (*where)
		snprintf(into, GROUP_RANK_BYTES, "rank %u (%.64s)", rank, where);
	else
		snprintf(into, GROUP_RANK_BYTES, "rank %u", rank);
	return into;
}

void group_name_rank(struct group_names *names, const struct ioshape_group *group, uint32_t rank)
{
	const size_t used = strlen(names->text), room = sizeof(names->text) - used;

	if (!names->count++)
		names->first = rank;
	if (names->count <= GROUP_MOST_NAMED)
		snprintf(names->text + used, room, "%s%s", used ? ", " : "",
			 GROUP_SHOWN_RANK(group, rank));
	else if (names->count == GROUP_MOST_NAMED + 1)
		snprintf(names->text + used, room, " and others");
}

int group_fail_of_rank(const struct ioshape_group *group, uint32_t rank,
		       const struct base_error *failure, struct base_error *error)
{
	struct base_error named = *failure;

	base_error_of_rank(&named, rank);
	base_rephrase(&named, failure->code, "%s: %s", GROUP_SHOWN_RANK(group, rank),
		      failure->sentence);
	return base_pass_on(error, &named);
}
