/* SPDX-License-Identifier: Apache-2.0 */
/* Which generation all ranks of a group load: the newest complete one, or the newest intact one. */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>

/* How long a generation that rank 0 sees may stay unseen on other hosts: as NFS caches names. */
#define PATIENCE_NS 10000000000ull

/* A generation, on the group's tier or in its directory. IOSHAPE_LATEST: none. */
struct found {
	uint64_t step;
	bool near;
};

/* ---- What rank 0 tells ----------------------------------------------------------------------- */

/* Rank 0 posts, the others read: a generation, or why there is none. */
static int tell(struct group_round *round, const char *what, const struct found *found,
		const struct base_error *failure, struct base_error *error)
{
	struct group_note note = { 0 };

	group_note_error(&note, failure);
	group_note_number(&note, found->step);
	group_note_number(&note, found->near);
	return group_round_post(round, what, &note, error);
}

static int hear(struct group_round *round, const char *what, struct found *found,
		struct base_error *failure, struct base_error *error)
{
	struct base_buffer note = { 0 };
	struct group_note_reader reader;
	int ret = group_round_await(round, what, 0, &note, NULL, NULL, error);

	if (!ret) {
		reader = group_read_note(&note);
		group_read_error(&reader, failure);
		found->step = group_read_number(&reader);
		found->near = group_read_number(&reader) != 0;
		if (reader.bad || (found->near && !round->group->near))
			ret = base_refuse(error, -EPROTO, "cannot read what rank 0 says of %s",
					  round->group->directory);
	}
	base_buffer_free(&note);
	return ret;
}

/* Rank 0's answer becomes that of all. */
static int share(struct group_round *round, const char *what, struct found *found,
		 struct base_error *failure, struct base_error *error)
{
	if (round->group->options.rank)
		return hear(round, what, found, failure, error);
	return tell(round, what, found, failure, error);
}

static const char *directory_of(const struct ioshape_group *group, const struct found *found)
{
	return found->near ? group->near : group->directory;
}

/* ---- The newest complete one ----------------------------------------------------------------- */

/* Its serial number; 0: there is none. */
static uint64_t look_in(struct ioshape_group *group, const char *directory, uint64_t *step,
			struct base_error *failure)
{
	struct ioshape_generation_info info = { .size = sizeof(info) };
	struct ioshape_generation *generation;

	if (ioshape_generation_open(group->context, directory, IOSHAPE_LATEST, &generation)) {
		base_pass_on(failure, base_last_error());
		return 0;
	}
	ioshape_generation_get_info(generation, &info);
	ioshape_generation_free(generation);
	*step = info.step;
	return info.serial;
}

/* The generations on the tiers of several nodes, newest first. */
struct on_tiers {
	struct group_spreads *spreads;
	struct group_candidates found; /* rank 0's */
};

static const struct group_tier_ops *tiers_of(const struct ioshape_group *group)
{
	return group_tier_of(&group->options)->ops;
}

static void forget_tiers(const struct ioshape_group *group, struct on_tiers *tiers)
{
	if (tiers->spreads)
		tiers_of(group)->free(tiers->spreads);
	group_candidates_free(&tiers->found);
}

/* The position of the newest of which all is there, or can be made. If there is none, that is their
 * count, and `near` says why. */
static size_t first_restorable(const struct ioshape_group *group, const struct on_tiers *tiers,
			       struct base_error *near)
{
	struct group_unusable unusable = { 0 };
	size_t at;

	for (at = 0; at < tiers->found.count; at++) {
		struct base_error why = { 0 };

		if (!tiers_of(group)->check(tiers->spreads, at, &why))
			break;
		group_unusable_add(&unusable, &why);
	}
	if (at == tiers->found.count && at)
		group_fail_unusable(&unusable, group->directory, near);
	return at;
}

/* `candidate` is the newest on the tiers of several nodes, or NULL. */
static uint64_t look_near(struct ioshape_group *group, const struct group_candidate *candidate,
			  uint64_t *step, struct base_error *near)
{
	if (!group_has_tiers(group))
		return group->near ? look_in(group, group->near, step, near) : 0;
	*step = candidate ? candidate->step : 0;
	return candidate ? candidate->serial : 0;
}

/* Nothing in the directory is the first start only if nothing is on the tier, either. */
static void prefer(struct base_error *failure, const struct base_error *near)
{
	if (failure->code != -ENOENT || !near->code || near->code == -ENOENT)
		return;
	base_error_begin(failure);
	base_pass_on(failure, near);
}

/* Of two that are the same, that on the tier. */
static void look_for_latest(struct ioshape_group *group, const struct group_candidate *candidate,
			    struct base_error *near, struct found *found,
			    struct base_error *failure)
{
	uint64_t serial, there, step = 0;

	serial = look_near(group, candidate, &found->step, near);
	there = look_in(group, group->directory, &step, failure);
	found->near = serial && serial >= there;
	if (found->near)
		base_error_begin(failure);
	else
		found->step = step;
	prefer(failure, near);
}

/*
 * All ranks: each node gets what its ranks want of it. If one does not, all load from the
 * directory.
 */
static int restore(struct group_round *round, const struct on_tiers *tiers, size_t at,
		   struct found *found, struct base_error *failure, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct base_error near;
	int ret = tiers_of(group)->restore(round, tiers->spreads, at, failure, error);

	if (ret)
		return ret;
	if (!group->options.rank && failure->code) {
		base_log(save_log(group->context), IOSHAPE_LOG_WARNING,
			 "generation %llu on the tiers is passed over: %s",
			 (unsigned long long)found->step, failure->text);
		near = *failure;
		base_error_begin(failure);
		found->near = false;
		look_in(group, group->directory, &found->step, failure);
		base_rephrase(&near, IOSHAPE_E_UNUSABLE, "%s", near.sentence);
		prefer(failure, &near);
	}
	return share(round, "whole", found, failure, error);
}

static int find_complete_in(struct group_round *round, struct on_tiers *tiers, struct found *found,
			    struct base_error *failure, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct base_error near = { 0 };
	size_t at = 0;
	int ret = group_has_tiers(group) ?
			  tiers_of(group)->look(round, &tiers->spreads, &tiers->found, error) :
			  0;

	if (ret)
		return ret;
	at = first_restorable(group, tiers, &near);
	if (!group->options.rank)
		look_for_latest(group, at < tiers->found.count ? &tiers->found.all[at] : NULL,
				&near, found, failure);
	ret = share(round, "latest", found, failure, error);
	if (!ret && !failure->code && found->near && group_has_tiers(group))
		ret = restore(round, tiers, at, found, failure, error);
	return ret;
}

static int find_complete(struct ioshape_group *group, struct found *found, struct base_error *error)
{
	struct on_tiers tiers = { 0 };
	struct base_error failure = { 0 };
	struct group_round round;
	int ret;

	group_round_begin(&round, group, group_round_reserve(group), NULL);
	ret = find_complete_in(&round, &tiers, found, &failure, error);
	group_round_end(&round);
	forget_tiers(group, &tiers);
	return !ret && failure.code ? base_pass_on(error, &failure) : ret;
}

/* ---- The newest intact one ------------------------------------------------------------------- */

/* What lies in one of the two places. */
struct place {
	struct ring_folder directory;
	struct group_candidates candidates;
	size_t at;
};

/* Of rank 0. The others hear. */
struct search {
	bool begun, looked;
	struct place near, there;
	struct group_spreads *spreads; /* of the candidates of `near`, if nodes have tiers */
	struct group_unusable unusable;
	struct base_error unseen; /* why the tier could not be listed */
};

/* What the ranks found. */
struct checks {
	bool *have;
	uint32_t lowest; /* rank of `failure` */
	struct base_error *failure;
};

static int list_place(struct place *place, const char *path, struct base_error *failure)
{
	const int ret = group_open_directory(&place->directory, path, failure);

	return ret ? ret : group_list_by_age(&place->directory, &place->candidates, failure);
}

static int begin_search(struct ioshape_group *group, struct search *search,
			struct base_error *failure)
{
	if (search->begun)
		return 0;
	search->begun = true;
	/* There need not be anything. */
	if (!group_has_tiers(group) && group->near &&
	    list_place(&search->near, group->near, &search->unseen) &&
	    search->unseen.code != -ENOENT)
		base_log(save_log(group->context), IOSHAPE_LOG_WARNING, "%s", search->unseen.text);
	return list_place(&search->there, group->directory, failure);
}

/* The place with the newest that is left; NULL: none is. */
static struct place *next_place(struct search *search)
{
	const struct group_candidates *near = &search->near.candidates,
				      *there = &search->there.candidates;
	const size_t at_near = search->near.at, at_there = search->there.at;

	if (at_near < near->count &&
	    (at_there == there->count || near->all[at_near].serial >= there->all[at_there].serial))
		return &search->near;
	return at_there < there->count ? &search->there : NULL;
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

/* The next one of which nothing bad is known yet, or that is to be passed over. IOSHAPE_LATEST: no
 * more. */
static void look_for_next(struct ioshape_group *group, struct search *search, struct found *found,
			  struct base_error *failure)
{
	struct place *place;

	found->step = IOSHAPE_LATEST;
	if (begin_search(group, search, failure))
		return;
	place = next_place(search);
	while (place == &search->near && group_has_tiers(group) && is_drained_only(group, search)) {
		search->near.at++;
		place = next_place(search);
	}
	if (!place) {
		group_fail_unusable(&search->unusable, group->directory, failure);
		prefer(failure, &search->unseen);
		return;
	}
	found->near = place == &search->near;
	if (found->near && group_has_tiers(group))
		tiers_of(group)->check(search->spreads, place->at, failure);
	else
		group_look_at_candidate(&place->directory, &place->candidates, place->at, failure);
	found->step = place->candidates.all[place->at++].step;
}

static int beat(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct group_round *round = user;

	(void)phase;
	(void)total;
	round->done_bytes = done;
	group_round_beat(round);
	return 0;
}

/* Rank 0 has found it: a network filesystem may show it here a little later. */
static int open_patiently(struct group_round *round, const struct found *found,
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
static void check_share(struct group_round *round, const struct found *found,
			struct base_error *failure)
{
	const struct ioshape_group_options *options = &round->group->options;
	struct ioshape_generation *generation;

	if (open_patiently(round, found, &generation)) {
		base_pass_on(failure, base_last_error());
		return;
	}
	group_verify_parts(generation, options->rank, options->ranks, beat, round, failure);
	ioshape_generation_free(generation);
}

static int found_check(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct group_note_reader reader = group_read_note(note);
	struct checks *checks = user;
	struct base_error failure = { 0 };

	checks->have[rank] = true;
	group_read_error(&reader, &failure);
	if (reader.bad)
		base_refuse(&failure, -EPROTO, "cannot read what rank %u says", rank);
	if (failure.code && rank < checks->lowest) {
		*checks->failure = failure;
		checks->lowest = rank;
	}
	return 0;
}

/* Rank 0: what the lowest rank failed with that did. */
static int collect_checks(struct group_round *round, struct base_error *failure,
			  struct base_error *error)
{
	const uint32_t ranks = round->group->options.ranks;
	struct checks checks = {
		.have = calloc(ranks, sizeof(*checks.have)),
		.lowest = failure->code ? 0 : UINT32_MAX,
		.failure = failure,
	};
	struct group_collection collection = {
		.what = "checked",
		.missing = "did not say whether its share is intact",
		.have = checks.have,
		.found = found_check,
		.user = &checks,
		.beats = true,
	};
	int ret;

	if (!checks.have)
		return base_no_memory(error, "what ranks found", ranks);
	checks.have[0] = true;
	ret = group_round_collect(round, &collection, error);
	free(checks.have);
	return ret;
}

/* All ranks: whether it is intact for all. */
static int check(struct group_round *round, struct found *found, struct base_error *failure,
		 struct base_error *error)
{
	struct base_error lost = { 0 };
	int ret = 0;

	check_share(round, found, failure);
	if (round->group->options.rank) {
		ret = tell(round, "checked", found, failure, error);
		*failure = (struct base_error){ 0 };
	} else if (collect_checks(round, failure, &lost)) {
		/* Without that rank there is no going on: the others hear which it is. */
		*failure = lost;
		found->step = IOSHAPE_LATEST;
	}
	return ret ? ret : share(round, "intact", found, failure, error);
}

/* All ranks: each node gets what it wants of it, or it is passed over. */
static int restore_next(struct group_round *round, const struct search *search, struct found *found,
			struct base_error *failure, struct base_error *error)
{
	int ret = tiers_of(round->group)
			  ->restore(round, search->spreads, search->near.at - 1, failure, error);

	/* Whatever a node could not do: an older one may be had. */
	if (failure->code && !group_is_its_own_fault(failure->code))
		base_rephrase(failure, IOSHAPE_E_DAMAGED, "%s", failure->sentence);
	return ret ? ret : share(round, "whole", found, failure, error);
}

/* One generation. */
static int try_in(struct group_round *round, struct search *search, struct found *found,
		  struct base_error *failure, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	int ret = 0;

	if (group_has_tiers(group) && !search->looked)
		ret = tiers_of(group)->look(round, &search->spreads, &search->near.candidates,
					    error);
	search->looked = true;
	if (!ret && !group->options.rank)
		look_for_next(group, search, found, failure);
	if (!ret)
		ret = share(round, "next", found, failure, error);
	if (!ret && !failure->code && found->near && group_has_tiers(group))
		ret = restore_next(round, search, found, failure, error);
	if (!ret && !failure->code)
		ret = check(round, found, failure, error);
	return ret;
}

/* In one round. */
static int try_next(struct ioshape_group *group, struct search *search, struct found *found,
		    struct base_error *failure, struct base_error *error)
{
	struct group_round round;
	int ret;

	group_round_begin(&round, group, group_round_reserve(group), NULL);
	ret = try_in(&round, search, found, failure, error);
	group_round_end(&round);
	return ret;
}

static void say_where(const struct ioshape_group *group,
		      const struct ioshape_search_options *options, const struct found *found)
{
	if (options->directory)
		*options->directory = directory_of(group, found);
}

static void close_place(struct place *place)
{
	group_candidates_free(&place->candidates);
	ring_folder_close(&place->directory);
}

static int find_intact(struct ioshape_group *group, const struct ioshape_search_options *options,
		       struct found *found, struct base_error *error)
{
	struct search search = {
		.near.directory = RING_NO_FOLDER,
		.there.directory = RING_NO_FOLDER,
	};
	int ret;

	for (;;) {
		struct base_error failure = { 0 };

		ret = try_next(group, &search, found, &failure, error);
		if (ret || !failure.code)
			break;
		if (found->step == IOSHAPE_LATEST || !group_is_its_own_fault(failure.code)) {
			ret = base_pass_on(error, &failure);
			break;
		}
		group_unusable_add(&search.unusable, &failure);
		base_leave(failure.code, "load", directory_of(group, found), &failure);
		say_where(group, options, found);
		if (options->passed_over)
			options->passed_over(options->passed_over_user, found->step);
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
	struct found found = { 0 };
	int ret;

	if (!group || !step)
		return base_missing("load");
	*step = 0;
	ret = save_enter(group->context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_search_options",
					&error);
	if (!ret && options.intact)
		ret = find_intact(group, &options, &found, &error);
	else if (!ret)
		ret = find_complete(group, &found, &error);
	if (!ret) {
		*step = found.step;
		say_where(group, &options, &found);
	}
	return base_leave(ret, "load", group->directory, &error);
}
