/* SPDX-License-Identifier: Apache-2.0 */
/* Which nodes protect each other, and which elements make up for a lost one. */
#include "group/parity/parity.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Sets ------------------------------------------------------------------------------------ */

/* The nodes of one domain, in order, which are taken one at a time. */
struct domain {
	uint32_t first; /* node, by which domains are in order */
	uint32_t taken;
};

static uint32_t next_of_domain(const char *const *domains, uint32_t nodes, const char *name,
			       uint32_t from)
{
	while (from < nodes && strcmp(domains[from], name))
		from++;
	return from;
}

/* One node of each domain, again and again. Nodes next to each other are in different ones, as
 * long as there are several left. */
static void mix(struct group_sets *sets, const char *const *domains, struct domain *all,
		uint32_t count)
{
	uint32_t filled = 0;

	while (filled < sets->nodes) {
		for (uint32_t i = 0; i < count; i++) {
			if (all[i].taken >= sets->nodes)
				continue;
			sets->order[filled++] = all[i].taken;
			all[i].taken = next_of_domain(domains, sets->nodes, domains[all[i].first],
						      all[i].taken + 1);
		}
	}
}

int group_sets_make(struct group_sets *sets, uint32_t nodes, uint32_t parity, uint32_t set_nodes,
		    const char *const *domains)
{
	struct domain *all = calloc(nodes, sizeof(*all));
	struct zip_names *names = NULL;
	uint32_t count = 0;
	int ret = all ? zip_names_new(&names, nodes) : -ENOMEM;

	*sets = (struct group_sets){ nodes, parity, set_nodes, calloc(nodes, sizeof(uint32_t)) };
	if (!ret && !sets->order)
		ret = -ENOMEM;
	for (uint32_t node = 0; !ret && node < nodes; node++) {
		ret = zip_names_add(names, domains[node], strlen(domains[node]), count);
		if (!ret)
			all[count++] = (struct domain){ node, node };
		else if (ret == -EEXIST)
			ret = 0;
	}
	if (!ret)
		mix(sets, domains, all, count);
	zip_names_free(names);
	free(all);
	return ret;
}

void group_sets_free(struct group_sets *sets)
{
	free(sets->order);
	*sets = (struct group_sets){ 0 };
}

/* The set of the node at a place of the order. All sets have set_nodes members, or as many more as
 * are left over: the first `larger` sets have one more than the others. */
static struct group_set set_at(const struct group_sets *sets, uint32_t at)
{
	const uint32_t sets_count = MAX(sets->nodes / MAX(sets->set_nodes, 1), 1);
	const uint32_t least = sets->nodes / sets_count, larger = sets->nodes % sets_count;
	const uint32_t in_larger = larger * (least + 1);
	struct group_set set = { .count = least + (at < in_larger) };
	const uint32_t first = at < in_larger ? 0 : in_larger;

	set.position = (at - first) % set.count;
	set.nodes = sets->order + at - set.position;
	set.parity = MIN(sets->parity, set.count - 1);
	return set;
}

struct group_set group_set_of(const struct group_sets *sets, uint32_t node)
{
	uint32_t at = 0;

	while (sets->order[at] != node)
		at++;
	return set_at(sets, at);
}

/* ---- Groups of elements ---------------------------------------------------------------------- */

/* By so much the member that has it is behind the first of the group. */
static uint32_t shift_of(const struct group_set *set, uint32_t element)
{
	const uint32_t segments = group_segments_of(set);

	return element < segments ? set->parity + element : element - segments;
}

/* The group is named by the position of its first member. */
static uint32_t group_of(const struct group_set *set, uint32_t element)
{
	return (set->position + set->count - shift_of(set, element)) % set->count;
}

static uint32_t member_of(const struct group_set *set, uint32_t group, uint32_t element)
{
	return set->nodes[(group + shift_of(set, element)) % set->count];
}

static bool is_there(const struct group_set *set, const uint32_t *holders, const uint32_t *parities,
		     uint32_t node, uint32_t element)
{
	return holders[node] != GROUP_NOWHERE && element < group_segments_of(set) + parities[node];
}

int group_find_sources(const struct group_set *set, const uint32_t *holders,
		       const uint32_t *parities, uint32_t element, bool fresh,
		       struct group_source sources[BASE_MOST_DATA], uint32_t *count)
{
	const uint32_t segments = group_segments_of(set), group = group_of(set, element);
	const uint32_t node = set->nodes[set->position];
	unsigned have[BASE_MOST_DATA];
	uint8_t coefficients[BASE_MOST_DATA];

	*count = 0;
	if (!fresh && is_there(set, holders, parities, node, element)) {
		sources[(*count)++] = (struct group_source){ node, element, 1 };
		return 0;
	}
	/* An element has its number in its group, too. */
	for (uint32_t other = 0; other < set->count && *count < segments; other++) {
		const uint32_t owner = member_of(set, group, other);

		if (other == element || !is_there(set, holders, parities, owner, other))
			continue;
		have[*count] = other;
		sources[(*count)++] = (struct group_source){ owner, other, 0 };
	}
	if (*count < segments || !base_erasure_solve(segments, have, element, coefficients))
		return -ENOENT;
	for (uint32_t i = 0; i < segments; i++)
		sources[i].coefficient = coefficients[i];
	return 0;
}

bool group_can_restore(const struct group_sets *sets, const uint32_t *holders,
		       const uint32_t *parities)
{
	struct group_source sources[BASE_MOST_DATA];
	uint32_t count;

	for (uint32_t at = 0; at < sets->nodes; at++) {
		const struct group_set set = set_at(sets, at);

		for (uint32_t element = 0; element < group_segments_of(&set); element++) {
			if (group_find_sources(&set, holders, parities, element, false, sources,
					       &count))
				return false;
		}
	}
	return true;
}
