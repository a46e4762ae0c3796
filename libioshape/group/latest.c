/* SPDX-License-Identifier: Apache-2.0 */
/* Which generation all ranks of a group load: the newest complete one, or the newest intact one. */
#define _GNU_SOURCE
#include "group/generation/handle.h"
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>

/* How long a generation that rank 0 sees may stay unseen on other hosts: as NFS caches names. */
#define PATIENCE_NS 10000000000ull

/* ---- What rank 0 tells ----------------------------------------------------------------------- */

/* Rank 0 posts, the others read: a step, or why there is none. */
static int tell(struct group_round *round, const char *what, uint64_t step,
		const struct base_error *failure, struct base_error *error)
{
	struct group_note note = { 0 };

	group_note_error(&note, failure);
	group_note_number(&note, step);
	return group_round_post(round, what, &note, error);
}

static int hear(struct group_round *round, const char *what, uint64_t *step,
		struct base_error *failure, struct base_error *error)
{
	struct base_buffer note = { 0 };
	struct group_note_reader reader;
	int ret = group_round_await(round, what, 0, &note, NULL, NULL, error);

	if (!ret) {
		reader = group_read_note(&note);
		group_read_error(&reader, failure);
		*step = group_read_number(&reader);
		if (reader.bad)
			ret = base_refuse(error, -EPROTO, "cannot read what rank 0 says of %s",
					  round->group->directory);
	}
	base_buffer_free(&note);
	return ret;
}

/* Rank 0's answer becomes that of all. */
static int share(struct group_round *round, const char *what, uint64_t *step,
		 struct base_error *failure, struct base_error *error)
{
	if (round->group->options.rank)
		return hear(round, what, step, failure, error);
	return tell(round, what, *step, failure, error);
}

/* ---- The newest complete one ----------------------------------------------------------------- */

static uint64_t look_for_latest(struct ioshape_group *group, struct base_error *failure)
{
	struct ioshape_generation_info info = { .size = sizeof(info) };
	struct ioshape_generation *generation;

	if (ioshape_generation_open(group->context, group->directory, IOSHAPE_LATEST,
				    &generation)) {
		base_pass_on(failure, base_last_error());
		return 0;
	}
	ioshape_generation_get_info(generation, &info);
	ioshape_generation_free(generation);
	return info.step;
}

static int find_complete(struct ioshape_group *group, uint64_t *step, struct base_error *error)
{
	struct base_error failure = { 0 };
	struct group_round round;
	int ret;

	group_round_begin(&round, group, group_round_reserve(group), NULL);
	if (!group->options.rank)
		*step = look_for_latest(group, &failure);
	ret = share(&round, "latest", step, &failure, error);
	group_round_end(&round);
	return !ret && failure.code ? base_pass_on(error, &failure) : ret;
}

/* ---- The newest intact one ------------------------------------------------------------------- */

/* Of rank 0. The others hear. */
struct search {
	struct ring_folder directory;
	struct group_candidates candidates;
	size_t at;
};

/* What the ranks found. */
struct checks {
	bool *have;
	uint32_t lowest; /* rank of `failure` */
	struct base_error *failure;
};

/* Its manifest holds, and the files are there; else `failure` says why it does not count. */
static void look_at(struct search *search, size_t at, struct base_error *failure)
{
	const struct group_candidate *candidate = &search->candidates.all[at];
	struct group_generation generation;
	int ret = group_open_candidate(&generation, &search->directory, &search->candidates, at,
				       failure);

	if (!ret)
		group_generation_close(&generation);
	else if (ret == -ENOENT)
		base_refuse(failure, ret, "\"%s/%s\" has no manifest: it is not complete",
			    search->directory.path, candidate->name);
}

/* The next one of which nothing bad is known yet, or that is to be passed over. IOSHAPE_LATEST: no
 * more. */
static uint64_t look_for_next(struct ioshape_group *group, struct search *search,
			      struct base_error *failure)
{
	if (search->directory.fd < 0) {
		if (group_open_directory(&search->directory, group->directory, failure) ||
		    group_list_by_age(&search->directory, &search->candidates, failure))
			return IOSHAPE_LATEST;
	}
	if (search->at == search->candidates.count) {
		base_refuse(failure, -ENOENT, "there is no intact generation in %s",
			    group->directory);
		return IOSHAPE_LATEST;
	}
	look_at(search, search->at, failure);
	return search->candidates.all[search->at++].step;
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
static int open_patiently(struct group_round *round, uint64_t step,
			  struct ioshape_generation **generation)
{
	struct ioshape_group *group = round->group;
	const uint64_t begin_ns = base_now_ns();
	int ret;

	for (;;) {
		ret = ioshape_generation_open(group->context, group->directory, step, generation);
		if (ret != -ENOENT || !group->options.rank ||
		    base_now_ns() - begin_ns > PATIENCE_NS)
			return ret;
		group_round_beat(round);
		group_round_rest(round);
	}
}

/* This rank's share of the parts, whoever saved them. */
static void check_share(struct group_round *round, uint64_t step, struct base_error *failure)
{
	const struct ioshape_group_options *options = &round->group->options;
	struct ioshape_generation *generation;

	if (open_patiently(round, step, &generation)) {
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
static int check(struct group_round *round, uint64_t *step, struct base_error *failure,
		 struct base_error *error)
{
	struct base_error lost = { 0 };
	int ret = 0;

	check_share(round, *step, failure);
	if (round->group->options.rank) {
		ret = tell(round, "checked", *step, failure, error);
		*failure = (struct base_error){ 0 };
	} else if (collect_checks(round, failure, &lost)) {
		/* Without that rank there is no going on: the others hear which it is. */
		*failure = lost;
		*step = IOSHAPE_LATEST;
	}
	return ret ? ret : share(round, "intact", step, failure, error);
}

/* One generation, in one round. */
static int try_next(struct ioshape_group *group, struct search *search, uint64_t *step,
		    struct base_error *failure, struct base_error *error)
{
	struct group_round round;
	int ret;

	group_round_begin(&round, group, group_round_reserve(group), NULL);
	if (!group->options.rank)
		*step = look_for_next(group, search, failure);
	ret = share(&round, "next", step, failure, error);
	if (!ret && !failure->code)
		ret = check(&round, step, failure, error);
	group_round_end(&round);
	return ret;
}

static int find_intact(struct ioshape_group *group, const struct ioshape_search_options *options,
		       uint64_t *step, struct base_error *error)
{
	struct search search = { .directory = RING_NO_FOLDER };
	int ret;

	for (;;) {
		struct base_error failure = { 0 };

		ret = try_next(group, &search, step, &failure, error);
		if (ret || !failure.code)
			break;
		if (*step == IOSHAPE_LATEST || !group_is_its_own_fault(failure.code)) {
			ret = base_pass_on(error, &failure);
			break;
		}
		base_leave(failure.code, "load", group->directory, &failure);
		if (options->passed_over)
			options->passed_over(options->passed_over_user, *step);
	}
	group_candidates_free(&search.candidates);
	ring_folder_close(&search.directory);
	return ret;
}

/* ---- What users call ------------------------------------------------------------------------- */

IOSHAPE_EXPORT int ioshape_group_get_latest(struct ioshape_group *group,
					    const struct ioshape_search_options *given,
					    uint64_t *step)
{
	struct ioshape_search_options options;
	struct base_error error = { 0 };
	uint64_t found = 0;
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
	if (!ret)
		*step = found;
	return base_leave(ret, "load", group->directory, &error);
}
