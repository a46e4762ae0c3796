/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: opening and freeing. */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_DEADLINE_MS 120000u

/* Rank 0 goes no earlier than the others have read what it said last, but not much later either. */
#define LONGEST_PARTING_MS 10000u

/* ---- Options --------------------------------------------------------------------------------- */

/* For tests, which put several nodes on one host: no settings, and not promised. */
static int take_test_variables(struct ioshape_group_options *options, struct base_error *error)
{
	static const char *const boards[] = { "auto", "redis", "host", "files" };
	const char *board = secure_getenv("IOSHAPE_TEST_BOARD"),
		   *node = secure_getenv("IOSHAPE_TEST_NODE");

	if (!options->node || !*options->node)
		options->node = node;
	if (options->board || !board || !*board)
		return 0;
	for (size_t i = 0; i < ARRAY_LENGTH(boards); i++) {
		if (!strcmp(board, boards[i])) {
			options->board = (enum ioshape_board)i;
			return 0;
		}
	}
	return base_refuse(error, -EINVAL, "IOSHAPE_TEST_BOARD cannot be \"%.64s\"", board);
}

static int check_options(const struct ioshape_group_options *options, struct base_error *error)
{
	if ((unsigned)options->board > IOSHAPE_BOARD_FILES)
		return base_refuse(
			error, -EINVAL,
			"a group option has a value that its enum does not have" BASE_REMEDY
			"zero the struct before filling it in");
	if (options->reserved)
		return base_refuse(error, -EINVAL, "options.reserved is %u", options->reserved);
	if (options->ranks > ZIP_MAX_RANKS || options->rank >= options->ranks)
		return base_refuse(error, -EINVAL,
				   "rank %u of %u cannot be" BASE_REMEDY
				   "ranks begin at 0, and there are at most %u",
				   options->rank, options->ranks, ZIP_MAX_RANKS);
	if (options->comm && (options->comm->size < sizeof(struct ioshape_comm) ||
			      !options->comm->send || !options->comm->receive))
		return base_refuse(error, -EINVAL,
				   "struct ioshape_comm needs its size, send and receive set");
	return 0;
}

/* Which medium: all ranks must come to the same answer without having talked. NULL: a failure. */
static const struct gather_board_ops *choose_board(const struct ioshape_group *group,
						   struct base_error *error)
{
	const bool redis = slots_coordinator_of(group->coordinator.address) == &slots_redis;
	const enum ioshape_board asked = group->options.board;

	if (asked == IOSHAPE_BOARD_REDIS && !redis) {
		base_refuse(error, -EINVAL,
			    "the group of %s is to meet through Redis, but the coordinator is "
			    "another" BASE_REMEDY "set IOSHAPE_COORDINATOR",
			    group->directory);
		return NULL;
	}
	if (redis && (asked == IOSHAPE_BOARD_REDIS || !asked))
		return &gather_board_redis;
	if (asked == IOSHAPE_BOARD_HOST ||
	    (!asked && group->options.local_ranks == group->options.ranks))
		return &gather_board_host;
	return &gather_board_files;
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Where this process is: ranks share memory if they can meet in it. */
static void find_own_place(struct ioshape_group *group)
{
	struct group_rank *own = &group->ranks[group->options.rank];
	char place[GATHER_PLACE_BYTES];

	gather_identify_place(place);
	own->nonce = group->nonce = base_random();
	snprintf(own->node_key, sizeof(own->node_key), "%08x %s",
		 (unsigned)base_hash_text(group->node ? group->node : ""), place);
	snprintf(own->where, sizeof(own->where), "%.40s, process %ld",
		 group->node ? group->node : save_slots_config(group->context)->identity.node,
		 (long)base_pid());
}

static int copy_strings(struct ioshape_group *group, const char *directory,
			struct base_error *error)
{
	const struct ioshape_group_options *options = &group->options;
	size_t bytes = strlen(directory);
	char *trimmed;
	int ret;

	while (bytes > 1 && directory[bytes - 1] == '/')
		bytes--;
	trimmed = strndup(directory, bytes);
	group->token = strdup(options->token && *options->token ?
				      options->token :
				      save_slots_config(group->context)->identity.job);
	if (options->node && *options->node)
		group->node = strdup(options->node);
	if (options->rack && *options->rack)
		group->rack = strdup(options->rack);
	group->ranks = calloc(options->ranks, sizeof(*group->ranks));
	group->leaders = calloc(options->ranks, sizeof(*group->leaders));
	if (!trimmed || !group->token || !group->ranks || !group->leaders ||
	    (options->node && *options->node && !group->node) ||
	    (options->rack && *options->rack && !group->rack)) {
		free(trimmed);
		return base_no_memory(error, "a group", options->ranks * sizeof(*group->ranks));
	}
	ret = save_absolute_path(trimmed, &group->directory, error);
	free(trimmed);
	group->options.token = group->token;
	group_job_hash(group->job, group->token);
	group->options.node = group->node;
	group->options.rack = group->rack;
	return ret;
}

static int open_board(struct ioshape_group *group, struct base_error *error)
{
	const struct gather_board_config config = {
		.name = group->board_name,
		.rank = group->options.rank,
		.ranks = group->options.ranks,
		.directory = group->directory,
		.coordinator = &group->coordinator,
		.deadline_ms = group->options.deadline_ms,
		.log = *save_log(group->context),
	};
	const char *pool_name = save_pool_name(group->context);
	const struct gather_board_ops *ops;
	char *text = NULL;

	if (group->options.ranks == 1)
		return 0;
	ops = choose_board(group, error);
	if (!ops)
		return error->code;
	/* Ranks whose notes are of another format meet elsewhere: none is misread. */
	if (asprintf(&text, "%s\n%s\n%u\n%u", group->token, group->directory, group->options.ranks,
		     GROUP_NOTES_FORMAT) < 0)
		return base_no_memory(error, "a group's name", strlen(group->directory));
	snprintf(group->board_name, sizeof(group->board_name), "%016llx",
		 (unsigned long long)base_hash_text(text));
	free(text);
	/* Which pool is only a matter of where in the Redis it lies. */
	snprintf(group->coordinator.pool, sizeof(group->coordinator.pool), "%s",
		 pool_name ? pool_name : "groups");
	return gather_board_open(&group->board, ops, &config, error);
}

static void free_group(struct ioshape_group *group)
{
	gather_board_close(group->board);
	pthread_cond_destroy(&group->change);
	pthread_mutex_destroy(&group->lock);
	pthread_mutex_destroy(&group->beginning);
	free(group->directory);
	free(group->near);
	free(group->token);
	free(group->node);
	free(group->rack);
	free(group->ranks);
	free(group->leaders);
	free(group);
}

/* Where its generations are on the tier. */
static int find_near(struct ioshape_group *group, struct base_error *error)
{
	struct group_tier *tier = group_tier_of(&group->options);
	char name[GROUP_STEP_NAME_BYTES], *path, *place = NULL;
	int ret;

	if (!group->has_tiers)
		return 0;
	group_step_name(name, 0);
	if (asprintf(&path, "%s/%s", group->directory, name) < 0)
		return base_no_memory(error, "a path", strlen(group->directory));
	ret = tier->ops->find(tier, path, &place, error);
	free(path);
	if (ret)
		return ret;
	group->near = base_directory_of(place);
	free(place);
	return group->near ? 0 : base_no_memory(error, "a path", strlen(group->directory));
}

static int open_group(struct ioshape_context *context, const char *directory,
		      const struct ioshape_group_options *given, struct ioshape_group **out,
		      struct base_error *error)
{
	struct ioshape_group_options options;
	struct ioshape_group *group;
	int ret;

	ret = base_take_options(&options, sizeof(options), given, "ioshape_group_options", error);
	if (!ret && save_config(context)->engine == IOSHAPE_ENGINE_NIL)
		ret = base_refuse(error, -EINVAL,
				  "the engine \"nil\" writes nothing: a generation would have no "
				  "files" BASE_REMEDY "choose another");
	if (!ret)
		ret = base_settings_take(BASE_SETTINGS_GROUP, &options, error);
	if (!ret)
		ret = take_test_variables(&options, error);
	if (!options.ranks)
		options.ranks = 1;
	if (!options.deadline_ms)
		options.deadline_ms = DEFAULT_DEADLINE_MS;
	if (!ret)
		ret = check_options(&options, error);
	if (ret)
		return ret;
	group = calloc(1, sizeof(*group));
	if (!group)
		return base_no_memory(error, "a group", sizeof(*group));
	group->owner = base_pid();
	group->context = context;
	group->options = options;
	group->coordinator = *save_slots_config(context);
	group->deadline_ns = base_ms_to_ns(options.deadline_ms);
	pthread_mutex_init(&group->beginning, NULL);
	pthread_mutex_init(&group->lock, NULL);
	base_cond_init(&group->change);
	ret = copy_strings(group, directory, error);
	if (!ret) {
		find_own_place(group);
		snprintf(group->ranks[options.rank].domain, GROUP_WHERE_BYTES, "%s",
			 group->rack ? group->rack : save_slots_config(context)->identity.node);
		group->ranks[options.rank].has_tier = group->has_tiers = options.tier != NULL;
		ret = ring_folder_make(group->directory, error);
	}
	if (!ret)
		ret = open_board(group, error);
	if (!ret)
		ret = group_meet(group, error);
	if (!ret)
		ret = find_near(group, error);
	snprintf(group->life, sizeof(group->life), "r%016llx-life", (unsigned long long)group->id);
	if (ret) {
		free_group(group);
		return ret;
	}
	base_log(save_log(context), IOSHAPE_LOG_DEBUG,
		 "%s: rank %u of %u, on %u nodes, meeting through %s", group->directory,
		 options.rank, options.ranks, group->node_count,
		 group->board ? gather_board_id(group->board) : "nothing");
	*out = group;
	return 0;
}

IOSHAPE_EXPORT int ioshape_group_open(struct ioshape_context *context, const char *directory,
				      const struct ioshape_group_options *options,
				      struct ioshape_group **out)
{
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("open");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && (!directory || !*directory))
		ret = base_refuse(&error, -EINVAL, "no directory for generations was given");
	if (!ret)
		ret = open_group(context, directory, options, out, &error);
	return base_leave(ret, "open", directory, &error);
}

/* ---- Parting --------------------------------------------------------------------------------- */

static int found_bye(void *user, uint32_t rank, const struct base_buffer *note)
{
	bool *have = user;

	(void)note;
	have[rank] = true;
	return 0;
}

/* With rank 0's process goes, on some boards, what it said. */
static void part(struct ioshape_group *group)
{
	uint64_t begin_ns = base_now_ns();
	struct group_note note = { 0 };
	struct group_round round;
	bool *have, all = false;

	/* Whatever the board does: no rank waits long for a farewell. */
	group->deadline_ns = MIN(group->deadline_ns, base_ms_to_ns(LONGEST_PARTING_MS));
	round = (struct group_round){ .group = group };
	snprintf(round.scope, sizeof(round.scope), "r%016llx-end", (unsigned long long)group->id);
	if (group->options.rank) {
		group_note_number(&note, group->id);
		group_round_post(&round, "bye", &note, NULL);
		return;
	}
	have = calloc(group->options.ranks, sizeof(*have));
	while (have && !all && base_now_ns() - begin_ns < group->deadline_ns) {
		have[0] = true;
		for (uint32_t rank = 1; rank < group->options.ranks; rank++)
			have[rank] |= gather_board_is_gone(group->board, rank);
		if (gather_board_collect(group->board, round.scope, "bye", have, found_bye, have,
					 NULL))
			break;
		all = group_has_all(group, have);
		if (!all)
			gather_board_wait(group->board, 50);
	}
	free(have);
}

/* Their handles stay. */
static void await_saves(struct ioshape_group *group)
{
	pthread_mutex_lock(&group->lock);
	while (group->running)
		pthread_cond_wait(&group->change, &group->lock);
	pthread_mutex_unlock(&group->lock);
}

IOSHAPE_EXPORT void ioshape_group_free(struct ioshape_group *group)
{
	if (!group || group->owner != base_pid())
		return;
	save_stop_background_of(group->context, group);
	await_saves(group);
	if (group->board)
		part(group);
	free_group(group);
}
