/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which generation all ranks of a group load: the newest complete one, or the newest intact one.
 * Rank 0 goes through what lies in the directory and on the tier, newest first. For each one there
 * is a round, in which it says what it has found, until one is good for all.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* How long a generation that rank 0 sees may stay unseen on other hosts: as NFS caches names. */
#define PATIENCE_NS 10000000000ull

/* A directory that changes faster than it can be looked at is not listed for ever. */
#define MOST_LISTINGS 16

/* What lies in one of the two places. */
struct place {
	struct io_folder directory;
	struct group_candidates candidates;
	size_t at;
};

/* Of rank 0. The others hear. */
struct search {
	const struct ioshape_search_options *options;
	bool begun, looked;
	struct place near, there;
	struct group_spreads *spreads; /* of the candidates of `near`, if nodes have tiers */
	struct group_unusable unusable;
	struct base_error unseen; /* why the tier could not be listed */
	unsigned listings;
};

static const struct group_tier_ops *tiers_of(const struct ioshape_group *group)
{
	return group_tier_of(&group->options)->ops;
}

static const char *directory_of(const struct ioshape_group *group, const struct group_found *found)
{
	return found->near ? group->near : group->directory;
}

/* Rank 0's answer becomes that of all. */
static int share(struct group_round *round, const struct group_message *message,
		 struct group_found *found, struct base_error *error)
{
	int ret;

	if (!round->group->options.rank)
		return group_tell(round, message, found, error);
	ret = group_hear(round, message, 0, found, NULL, NULL, error);
	if (!ret && found->near && !round->group->near)
		ret = base_refuse(error, -EPROTO, "cannot read what rank 0 says of %s",
				  round->group->directory);
	return ret;
}

/* ---- Rank 0: the next one -------------------------------------------------------------------- */

static int list_place(struct place *place, const char *path, struct base_error *failure)
{
	const int ret = group_open_directory(&place->directory, path, failure);

	return ret ? ret : group_list_by_age(&place->directory, &place->candidates, failure);
}

static void begin_search(struct ioshape_group *group, struct search *search,
			 struct base_error *failure)
{
	search->begun = true;
	/* There need not be anything. */
	if (!group_has_tiers(group) && group->near &&
	    list_place(&search->near, group->near, &search->unseen) &&
	    search->unseen.code != -ENOENT)
		base_log(save_log(group->context), IOSHAPE_LOG_WARNING, "%s", search->unseen.text);
	list_place(&search->there, group->directory, failure);
}

/*
 * Between the look at the names and the look behind one, a newer generation may come and this one
 * go. True: the names are others by now, and it is begun again with these.
 */
static bool has_changed(struct search *search, struct place *place)
{
	struct group_candidates *before = &place->candidates, now;
	bool changed;

	if (++search->listings > MOST_LISTINGS || group_list_by_age(&place->directory, &now, NULL))
		return false;
	changed = now.count != before->count ||
		  memcmp(now.all, before->all, now.count * sizeof(*now.all)) != 0;
	if (changed) {
		group_candidates_free(before);
		*before = now;
		place->at = 0;
	} else {
		group_candidates_free(&now);
	}
	return changed;
}

/* Whether it cannot be had from the tiers, and need not. */
static bool is_drained_only(const struct ioshape_group *group, const struct search *search)
{
	const uint64_t serial = search->near.candidates.all[search->near.at].serial;
	const struct group_candidates *there = &search->there.candidates;
	struct base_error unseen = { 0 };
	bool drained = false;

	for (size_t i = search->there.at; i < there->count; i++)
		drained |= there->all[i].serial == serial;
	return drained && tiers_of(group)->check(search->spreads, search->near.at, &unseen);
}

/* The place with the newest that is left, of two that are the same the tier; NULL: none is. */
static struct place *next_place(const struct ioshape_group *group, struct search *search)
{
	struct place *near = &search->near, *there = &search->there;

	for (; near->at < near->candidates.count; near->at++) {
		if (there->at < there->candidates.count &&
		    near->candidates.all[near->at].serial < there->candidates.all[there->at].serial)
			break;
		if (!group_has_tiers(group) || !is_drained_only(group, search))
			return near;
	}
	return there->at < there->candidates.count ? there : NULL;
}

/* Nothing in the directory is the first start only if the tier was looked at, too. */
static void fail_search(const struct ioshape_group *group, const struct search *search,
			struct base_error *failure)
{
	const struct base_error *unseen = &search->unseen;

	group_fail_unusable(&search->unusable, group->directory, failure);
	if (failure->code == -ENOENT && unseen->code && unseen->code != -ENOENT) {
		base_error_begin(failure);
		base_pass_on(failure, unseen);
	}
}

/* The next one of which nothing bad is known yet, or that is to be passed over. IOSHAPE_LATEST: no
 * more. */
static void look_for_next(struct ioshape_group *group, struct search *search,
			  struct group_found *found)
{
	struct base_error *failure = &found->failure;
	struct place *place;
	int ret;

	*found = (struct group_found){ .step = IOSHAPE_LATEST };
	if (!search->begun)
		begin_search(group, search, failure);
	if (failure->code)
		return;
	do {
		place = next_place(group, search);
		if (!place) {
			fail_search(group, search, failure);
			return;
		}
		found->near = place == &search->near;
		base_error_begin(failure);
		if (found->near && group_has_tiers(group))
			ret = tiers_of(group)->check(search->spreads, place->at, failure);
		else
			ret = group_look_at_candidate(&place->directory, &place->candidates,
						      place->at, failure);
	} while (ret == -ENOENT && has_changed(search, place));
	found->step = place->candidates.all[place->at++].step;
}

/* ---- All ranks: whether it is intact --------------------------------------------------------- */

/* Rank 0 has found it: a network filesystem may show it here a little later. */
static int open_patiently(struct group_round *round, const struct group_found *found,
			  struct ioshape_generation **generation)
{
	struct ioshape_group *group = round->group;
	const uint64_t begin_ns = base_now_ns();
	int ret;

	for (;;) {
		ret = ioshape_generation_open(group->context, directory_of(group, found),
					      found->step, generation);
		if (ret != -ENOENT || !group->options.rank ||
		    base_now_ns() - begin_ns > PATIENCE_NS)
			return ret;
		group_round_beat(round);
		group_round_rest(round);
	}
}

/* This rank's share of the parts, whoever saved them. */
static void check_share(struct group_round *round, struct group_found *found)
{
	const struct ioshape_group_options *options = &round->group->options;
	struct ioshape_generation *generation;

	if (open_patiently(round, found, &generation)) {
		base_pass_on(&found->failure, base_last_error());
		return;
	}
	group_verify_parts(generation, options->rank, options->ranks, group_round_track, round,
			   &found->failure);
	ioshape_generation_free(generation);
}

/* What the ranks found. */
struct checks {
	uint32_t lowest; /* rank of `failure` */
	struct base_error *failure;
};

/* All of them are heard: what the lowest rank failed with is why it is passed over. */
static int found_check(void *user, uint32_t rank, const struct base_buffer *note,
		       struct base_error *failure)
{
	struct checks *checks = user;
	struct group_found found;

	if (!group_read_message(&group_checked, note, &found))
		return base_refuse(failure, -EPROTO, "cannot read what it has found");
	if (found.failure.code && rank < checks->lowest) {
		*checks->failure = found.failure;
		checks->lowest = rank;
	}
	return 0;
}

static int collect_checks(struct group_round *round, struct base_error *failure,
			  struct base_error *error)
{
	struct checks checks = {
		.lowest = failure->code ? 0 : UINT32_MAX,
		.failure = failure,
	};
	const struct group_collection collection = {
		.what = group_checked.name,
		.missing = "did not say whether its share is intact",
		.found = found_check,
		.user = &checks,
		.beats = true,
	};

	return group_round_collect(round, &collection, error);
}

static int check(struct group_round *round, struct group_found *found, struct base_error *error)
{
	struct base_error lost = { 0 };
	int ret = 0;

	check_share(round, found);
	if (round->group->options.rank) {
		ret = group_tell(round, &group_checked, found, error);
	} else if (collect_checks(round, &found->failure, &lost)) {
		/* Without that rank there is no going on: the others hear which it is. */
		found->failure = lost;
		found->step = IOSHAPE_LATEST;
	}
	return ret ? ret : share(round, &group_intact, found, error);
}

/* ---- All ranks: one after the other ---------------------------------------------------------- */

/* Each node gets what it wants of it, or it is passed over. */
static int restore(struct group_round *round, const struct search *search,
		   struct group_found *found, struct base_error *error)
{
	struct base_error *failure = &found->failure;
	int ret = tiers_of(round->group)
			  ->restore(round, search->spreads, search->near.at - 1, failure, error);

	/* Whatever a node could not do: an older one may be had. */
	if (failure->code && !group_is_its_own_fault(failure->code))
		base_rephrase(failure, IOSHAPE_E_DAMAGED, "%s", failure->sentence);
	return ret ? ret : share(round, &group_whole, found, error);
}

static int try_in(struct group_round *round, struct search *search, struct group_found *found,
		  struct base_error *error)
{
	struct ioshape_group *group = round->group;
	int ret = 0;

	if (group_has_tiers(group) && !search->looked)
		ret = tiers_of(group)->look(round, &search->spreads, &search->near.candidates,
					    error);
	search->looked = true;
	if (!ret && !group->options.rank)
		look_for_next(group, search, found);
	if (!ret)
		ret = share(round, &group_next, found, error);
	if (!ret && !found->failure.code && found->near && group_has_tiers(group))
		ret = restore(round, search, found, error);
	if (!ret && !found->failure.code && search->options->intact)
		ret = check(round, found, error);
	return ret;
}

/* In one round. */
static int try_next(struct ioshape_group *group, struct search *search, struct group_found *found,
		    struct base_error *error)
{
	struct group_round round;
	int ret;

	group_round_begin(&round, group, group_round_reserve(group), NULL);
	ret = try_in(&round, search, found, error);
	group_round_end(&round);
	return ret;
}

static void say_where(const struct ioshape_group *group,
		      const struct ioshape_search_options *options, const struct group_found *found)
{
	if (options->directory)
		*options->directory = directory_of(group, found);
}

static void pass_over(const struct ioshape_group *group, struct search *search,
		      struct group_found *found)
{
	const struct ioshape_search_options *options = search->options;

	group_unusable_add(&search->unusable, &found->failure);
	if (!options->intact && !group->options.rank)
		base_log(save_log(group->context), IOSHAPE_LOG_WARNING,
			 "generation %llu of %s is passed over: %s",
			 (unsigned long long)found->step, directory_of(group, found),
			 found->failure.text);
	if (!options->intact)
		return;
	base_leave(found->failure.code, "load", directory_of(group, found), &found->failure);
	say_where(group, options, found);
	if (options->passed_over)
		options->passed_over(options->passed_over_user, found->step);
}

static void close_place(struct place *place)
{
	group_candidates_free(&place->candidates);
	io_folder_close(&place->directory);
}

static int find(struct ioshape_group *group, const struct ioshape_search_options *options,
		struct group_found *found, struct base_error *error)
{
	struct search search = {
		.options = options,
		.near.directory = IO_NO_FOLDER,
		.there.directory = IO_NO_FOLDER,
	};
	int ret;

	for (;;) {
		ret = try_next(group, &search, found, error);
		if (ret || !found->failure.code)
			break;
		if (found->step == IOSHAPE_LATEST || !group_is_its_own_fault(found->failure.code)) {
			ret = base_pass_on(error, &found->failure);
			break;
		}
		pass_over(group, &search, found);
	}
	close_place(&search.near);
	close_place(&search.there);
	if (search.spreads)
		tiers_of(group)->free(search.spreads);
	return ret;
}

/* ---- What users call ------------------------------------------------------------------------- */

IOSHAPE_EXPORT int ioshape_group_get_latest(struct ioshape_group *group,
					    const struct ioshape_search_options *given,
					    uint64_t *step)
{
	struct ioshape_search_options options;
	struct base_error error = { 0 };
	struct group_found found = { 0 };
	int ret;

	if (!group || !step)
		return base_missing("load");
	*step = 0;
	ret = save_enter(group->context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_search_options",
					&error);
	if (!ret)
		ret = find(group, &options, &found, &error);
	if (!ret) {
		*step = found.step;
		say_where(group, &options, &found);
	}
	return base_leave(ret, "load", group->directory, &error);
}
