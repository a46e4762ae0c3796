/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: opens them, lets their ranks find each other (the meeting), and frees them. */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Numbering the nodes --------------------------------------------------------------------- */

/* Numbers the nodes in the order of their lowest ranks. Ranks with equal keys are on one node. */

static int find_nodes(struct ioshape_group *group)
{
	struct format_names *keys;
	int ret;

	ret = format_names_new(&keys, group->options.ranks);
	if (ret)
		return ret;
	group->node_count = 0;
	for (uint32_t rank = 0; !ret && rank < group->options.ranks; rank++) {
		const char *key = group->ranks[rank].node_key;
		uint64_t node = group->node_count;

		ret = format_names_add(keys, key, strlen(key), node);
		if (!ret)
			group->leaders[group->node_count++] = rank;
		else if (ret == -EEXIST && format_names_find(keys, key, strlen(key), &node))
			ret = 0;
		group->ranks[rank].node = (uint32_t)node;
	}
	format_names_free(keys);
	return ret;
}

/* Finds the first rank of each node from the ranks' nodes, which rank 0 has numbered. Returns false
 * if the numbers are not valid. */
static bool find_leaders(struct ioshape_group *group, uint64_t node_count)
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

/* ---- Choosing and opening stores ------------------------------------------------------------- */

/* Returns the kind of store in which ranks meet, or NULL after a failure. All ranks must come to
 * the same answer without talking to each other. */
static const struct store_ops *choose_store(const struct ioshape_group *group,
					    struct base_error *error)
{
	const bool redis = slots_coordinator_of(group->coordinator.address) == &slots_redis;
	const enum ioshape_store asked = group->options.store;

	if (asked == IOSHAPE_STORE_REDIS && !redis) {
		base_fail_reason_with(
			error, -EINVAL, "set IOSHAPE_COORDINATOR",
			"the group of %s must use Redis, but the coordinator is not a Redis",
			group->directory);
		return NULL;
	}
	return redis && (asked == IOSHAPE_STORE_REDIS || !asked) ? &store_redis : &store_files;
}

/* Names the store. The name includes the version of messages, so that ranks of different versions
 * meet in different stores and never misread each other. */
static int name_store(struct ioshape_group *group, struct base_error *error)
{
	char *text;

	if (asprintf(&text, "%s\n%s\n%u\n%u", group->token, group->directory, group->options.ranks,
		     GROUP_MESSAGES_FORMAT) < 0)
		return base_no_memory(error, "a group's name", strlen(group->directory));
	snprintf(group->store_name, sizeof(group->store_name), "%016llx",
		 (unsigned long long)base_hash_text(text));
	free(text);
	return 0;
}

static int open_store(struct ioshape_group *group, const struct store_ops *ops, const char *name,
		      struct store **store, struct base_error *error)
{
	const struct store_config config = {
		.name = name,
		.rank = group->options.rank,
		.ranks = group->options.ranks,
		.directory = group->directory,
		.coordinator = &group->coordinator,
		.deadline_ms = group->options.deadline_ms,
	};

	return store_open(store, ops, &config, error);
}

static int open_chosen_store(struct ioshape_group *group, struct base_error *error)
{
	const char *pool_name = save_settings(group->context).pool_name;
	const struct store_ops *ops;
	int ret;

	if (group->options.ranks == 1)
		return 0;
	ops = choose_store(group, error);
	if (!ops)
		return error->code;
	group->may_move = ops == &store_files && group->options.store != IOSHAPE_STORE_FILES;
	ret = name_store(group, error);
	/* The pool only decides under which keys the Redis keeps the messages. */
	snprintf(group->coordinator.pool, sizeof(group->coordinator.pool), "%s",
		 pool_name ? pool_name : "groups");
	return ret ? ret : open_store(group, ops, group->store_name, &group->store, error);
}

/*
 * Opens the store in memory, to which ranks that share memory move after they have met in the
 * directory. It is faster, and the kernel tells at once which rank has ended. Rank 0 opens it
 * before it puts the complete roster. So a rank that finds no store in memory knows that rank 0 has
 * ended.
 */
static int open_memory(struct ioshape_group *group, struct base_error *error)
{
	/* With IOSHAPE_STORE_HOST all nodes are on this host, whatever their names. */
	if (!group->may_move ||
	    (group->node_count > 1 && group->options.store != IOSHAPE_STORE_HOST))
		return 0;
	snprintf(group->memory_name, sizeof(group->memory_name), "%016llx",
		 (unsigned long long)group->id);
	return open_store(group, &store_memory, group->memory_name, &group->memory, error);
}

/* Moves to the store in memory. The store in the directory stays open until all ranks have come to
 * the first round: they may still have to read rank 0's messages there. */
static void move_to_memory(struct ioshape_group *group)
{
	if (!group->memory)
		return;
	group->met = group->store;
	group->store = group->memory;
	group->memory = NULL;
}

/* ---- Meeting: the protocol ------------------------------------------------------------------- */

/*
 * Every other rank sends rank 0 a hello with a random number. When rank 0 has one of every rank, it
 * answers with the roster, which has all these numbers. A rank that finds its own number in the
 * roster sends its hello again, with the roster's id. A rank that does not has read what an earlier
 * run of the job left, and goes on waiting. When all ranks have answered the roster, rank 0 puts it
 * again as complete.
 */

/* Longest interval between two looks into the store. */
#define LOOK_MS 100u

struct meeting {
	struct group_round *round;
	bool *have;   /* by rank: a hello was read */
	bool *ready;  /* by rank: the hello that answers the last roster was read */
	bool changed; /* a rank is new, or has restarted, since the last roster */
};

/* ---- Meeting: rank 0 ------------------------------------------------------------------------- */

static int found_hello(void *user, uint32_t rank, const struct base_buffer *body)
{
	struct meeting *meeting = user;
	struct ioshape_group *group = meeting->round->group;
	struct group_rank *known = &group->ranks[rank];
	struct group_hello hello = { 0 };

	/* Left by an earlier run with another number of ranks: the rank will put its hello
	 * again. */
	if (!group_read_message(&group_hello, body, &hello) || hello.ranks != group->options.ranks)
		return 0;
	if (!meeting->have[rank] || known->nonce != hello.own.nonce) {
		*known = hello.own;
		meeting->changed = true;
	}
	meeting->have[rank] = true;
	meeting->ready[rank] = !meeting->changed && hello.roster == group->id;
	return 0;
}

static int put_roster(struct group_round *round, bool complete, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	const struct group_roster roster = {
		.id = group->id,
		.complete = complete,
		.mode = group->options.mode,
		.has_tiers = group->has_tiers,
		.nodes = group->node_count,
		.count = group->options.ranks,
		.ranks = group->ranks,
	};

	return group_tell(round, &group_roster, &roster, error);
}

static int make_roster(struct group_round *round, struct base_error *error)
{
	struct ioshape_group *group = round->group;

	if (find_nodes(group))
		return base_no_memory(error, "a list of nodes", group->options.ranks);
	group->id = base_random();
	group->has_tiers = true;
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		group->has_tiers &= group->ranks[rank].has_tier;
	return put_roster(round, false, error);
}

/* Looks into the store once, and puts a new roster if one is needed. */
static int gather_up(struct meeting *meeting, struct base_error *error)
{
	struct ioshape_group *group = meeting->round->group;
	/* Also reads the hellos of ranks that have not answered the roster yet: they may have
	 * restarted. */
	int ret = store_collect(group->store, meeting->round->scope, group_hello.name,
				meeting->ready, found_hello, meeting, error);

	if (ret || !meeting->changed || !group_has_all(group, meeting->have))
		return ret;
	meeting->changed = false;
	memset(meeting->ready, 0, group->options.ranks * sizeof(*meeting->ready));
	meeting->ready[0] = true;
	return make_roster(meeting->round, error);
}

static int fail_missing(const struct meeting *meeting, const char *store_says,
			struct base_error *error)
{
	const struct ioshape_group *group = meeting->round->group;
	const bool *there = group_has_all(group, meeting->have) ? meeting->ready : meeting->have;
	struct group_names missing = { 0 };

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		if (!there[rank])
			group_name_rank(&missing, group, rank);
	}
	base_fail_reason_with(
		error, -ETIMEDOUT,
		BASE_WORDS("check that all ranks of the job open it with the same directory, job "
			   "and version of this library%s%s",
			   *store_says ? "; " : "", store_says),
		"the group of %s is not complete: %u of %u ranks did not join within %u s (%s)",
		group->directory, missing.count, group->options.ranks,
		group->options.deadline_ms / 1000, missing.text);
	base_error_of_rank(error, missing.first);
	return -ETIMEDOUT;
}

static int receive_all(struct meeting *meeting, struct base_error *error)
{
	struct ioshape_group *group = meeting->round->group;
	uint64_t begin_ns = base_now_ns();
	int ret;

	for (;;) {
		struct base_error why = { 0 };

		ret = gather_up(meeting, &why);
		if (!ret && group_has_all(group, meeting->ready)) {
			ret = open_memory(group, error);
			return ret ? ret : put_roster(meeting->round, true, error);
		}
		if (ret && ret != IOSHAPE_E_COORDINATOR)
			return base_propagate(error, &why);
		if (base_now_ns() - begin_ns > group->deadline_ns)
			return fail_missing(meeting, why.text, error);
		store_wait(group->store, LOOK_MS);
	}
}

static int meet_as_host(struct group_round *round, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	struct meeting meeting = {
		.round = round,
		.have = calloc(group->options.ranks, sizeof(bool)),
		.ready = calloc(group->options.ranks, sizeof(bool)),
		.changed = true,
	};
	int ret;

	if (meeting.have && meeting.ready) {
		meeting.have[0] = meeting.ready[0] = true;
		ret = receive_all(&meeting, error);
	} else {
		ret = base_no_memory(error, "a meeting", group->options.ranks);
	}
	free(meeting.have);
	free(meeting.ready);
	return ret;
}

/* ---- Meeting: the other ranks ---------------------------------------------------------------- */

static bool take_roster(struct ioshape_group *group, const struct base_buffer *body, bool *complete)
{
	struct group_roster roster = { .count = group->options.ranks, .ranks = group->ranks };

	if (!group_read_message(&group_roster, body, &roster) ||
	    roster.count != group->options.ranks ||
	    group->ranks[group->options.rank].nonce != group->nonce ||
	    (roster.has_tiers && !group->options.tier) || !find_leaders(group, roster.nodes))
		return false;
	group->id = roster.id;
	group->has_tiers = roster.has_tiers;
	group->options.mode = roster.mode;
	*complete = roster.complete;
	return true;
}

static int look_for_roster(struct group_round *round, struct group_hello *hello,
			   struct base_buffer *body, bool *complete, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	int ret;

	ret = store_get(group->store, round->scope, "roster-0", body, error);
	if (ret)
		return ret == -EAGAIN ? 0 : ret;
	if (!take_roster(group, body, complete)) {
		*complete = false;
		return 0;
	}
	if (group->id == hello->roster)
		return 0;
	hello->roster = group->id;
	return group_tell(round, &group_hello, hello, error);
}

static int meet_as_guest(struct group_round *round, struct base_error *error)
{
	struct ioshape_group *group = round->group;
	struct group_hello hello = {
		.own = group->ranks[group->options.rank],
		.ranks = group->options.ranks,
	};
	uint64_t begin_ns = base_now_ns();
	struct base_buffer body = { 0 };
	bool started = false;
	int ret = group_tell(round, &group_hello, &hello, error);

	while (!ret && !started) {
		struct base_error why = { 0 };

		ret = look_for_roster(round, &hello, &body, &started, &why);
		if (ret && ret != IOSHAPE_E_COORDINATOR) {
			ret = base_propagate(error, &why);
			break;
		}
		ret = 0;
		if (!started && (store_has_ended(group->store, 0) ||
				 base_now_ns() - begin_ns > group->deadline_ns)) {
			ret = base_fail_reason_with(
				error, -ETIMEDOUT,
				BASE_WORDS("check that all ranks of the job open it with the same "
					   "directory, job and version of this library%s%s",
					   *why.text ? "; " : "", why.text),
				"the group of %s is not complete: rank 0 %s", group->directory,
				store_has_ended(group->store, 0) ? "has ended" : "did not open it");
			break;
		}
		if (!started)
			store_wait(group->store, LOOK_MS);
	}
	base_buffer_free(&body);
	return ret ? ret : open_memory(group, error);
}

/* ---- Meeting: all ranks ---------------------------------------------------------------------- */

static int meet(struct ioshape_group *group, struct base_error *error)
{
	struct group_round round = { .group = group, .scope = "meeting" };
	int ret;

	if (!group->store)
		return find_nodes(group) ? base_no_memory(error, "a list of nodes", 1) : 0;
	if (group->options.rank) {
		ret = meet_as_guest(&round, error);
	} else {
		/* Replaces the roster of an earlier run. In a Redis, its MAC also shows the other
		 * ranks that rank 0 has drawn a new secret. */
		ret = group_tell(&round, &group_no_roster, NULL, error);
		if (!ret)
			ret = meet_as_host(&round, error);
	}
	if (!ret)
		move_to_memory(group);
	return ret;
}

#define DEFAULT_DEADLINE_MS 120000u

/* Longest time that rank 0 waits for the other ranks to read its last messages. */
#define LONGEST_PARTING_MS 10000u

/* ---- Options --------------------------------------------------------------------------------- */

/* Reads environment variables by which tests put several nodes on one host. They are no settings
 * and may change at any time. */
static int take_test_variables(struct ioshape_group_options *options, struct base_error *error)
{
	static const char *const stores[] = { "auto", "redis", "host", "files" };
	const char *store = secure_getenv("IOSHAPE_TEST_STORE"),
		   *node = secure_getenv("IOSHAPE_TEST_NODE");

	if (!options->node || !*options->node)
		options->node = node;
	if (options->store || !store || !*store)
		return 0;
	for (size_t i = 0; i < ARRAY_LENGTH(stores); i++) {
		if (!strcmp(store, stores[i])) {
			options->store = (enum ioshape_store)i;
			return 0;
		}
	}
	return base_fail_reason(error, -EINVAL, "IOSHAPE_TEST_STORE cannot be \"%.64s\"", store);
}

static int check_options(const struct ioshape_group_options *options, struct base_error *error)
{
	if ((unsigned)options->store > IOSHAPE_STORE_FILES)
		return base_fail_reason_with(error, -EINVAL, "zero the struct before filling it in",
					     "options.store is not a value of enum ioshape_store");
	if (options->reserved)
		return base_fail_reason(error, -EINVAL, "options.reserved is %u",
					options->reserved);
	if (options->ranks > FORMAT_MAX_RANKS || options->rank >= options->ranks)
		return base_fail_reason_with(
			error, -EINVAL,
			BASE_WORDS("ranks count from 0, and there are at most %u",
				   FORMAT_MAX_RANKS),
			"rank %u of %u is not valid", options->rank, options->ranks);
	if (options->comm && (options->comm->size < sizeof(struct ioshape_comm) ||
			      !options->comm->send || !options->comm->receive))
		return base_fail_reason(error, -EINVAL,
					"struct ioshape_comm needs its size, send and receive set");
	return 0;
}

/* ---- Opening a group ------------------------------------------------------------------------- */

/* Fills in where this process is. Ranks with equal keys can meet in memory, and so share it. */
static void find_node_key(struct ioshape_group *group)
{
	struct group_rank *own = &group->ranks[group->options.rank];
	char memory[STORE_MEMORY_ID_BYTES];

	store_identify_memory(memory);
	own->nonce = group->nonce = base_random();
	snprintf(own->node_key, sizeof(own->node_key), "%08x %s",
		 (unsigned)base_hash_text(group->node ? group->node : ""), memory);
	snprintf(own->where, sizeof(own->where), "%.40s, process %ld",
		 group->node ? group->node : save_settings(group->context).slots->identity.node,
		 (long)getpid());
}

/* Computes the hash of the job, which begins the ids of its attempts. */
static void hash_job(struct ioshape_group *group)
{
	const uint64_t hash = base_hash_text(group->token);

	snprintf(group->job, sizeof(group->job), "%08x", (uint32_t)(hash ^ hash >> 32));
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
				      save_settings(group->context).slots->identity.job);
	if (options->node && *options->node)
		group->node = strdup(options->node);
	group->ranks = calloc(options->ranks, sizeof(*group->ranks));
	group->leaders = calloc(options->ranks, sizeof(*group->leaders));
	if (!trimmed || !group->token || !group->ranks || !group->leaders ||
	    (options->node && *options->node && !group->node)) {
		free(trimmed);
		return base_no_memory(error, "a group", options->ranks * sizeof(*group->ranks));
	}
	ret = save_absolute_path(trimmed, &group->directory, error);
	free(trimmed);
	group->options.token = group->token;
	hash_job(group);
	group->options.node = group->node;
	return ret;
}

static void free_group(struct ioshape_group *group)
{
	store_close(group->store);
	store_close(group->memory);
	store_close(group->met);
	pthread_cond_destroy(&group->change);
	pthread_mutex_destroy(&group->lock);
	pthread_mutex_destroy(&group->beginning);
	free(group->directory);
	free(group->near);
	free(group->token);
	free(group->node);
	free(group->ranks);
	free(group->leaders);
	free(group);
}

/* Finds where the group's checkpoints are on the tier. */
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
	group->owner = getpid();
	group->context = context;
	group->options = options;
	group->coordinator = *save_settings(context).slots;
	group->deadline_ns = base_ms_to_ns(options.deadline_ms);
	pthread_mutex_init(&group->beginning, NULL);
	pthread_mutex_init(&group->lock, NULL);
	base_cond_init(&group->change);
	ret = copy_strings(group, directory, error);
	if (!ret) {
		find_node_key(group);
		snprintf(group->ranks[options.rank].domain, GROUP_WHERE_BYTES, "%s",
			 save_settings(context).slots->identity.node);
		group->ranks[options.rank].has_tier = group->has_tiers = options.tier != NULL;
		ret = io_folder_make(group->directory, error);
	}
	if (!ret)
		ret = open_chosen_store(group, error);
	if (!ret)
		ret = meet(group, error);
	if (!ret)
		ret = find_near(group, error);
	snprintf(group->life, sizeof(group->life), "r%016llx-life", (unsigned long long)group->id);
	if (ret) {
		free_group(group);
		return ret;
	}
	base_log(save_settings(context).log, IOSHAPE_LOG_DEBUG,
		 "%s: rank %u of %u, on %u nodes, messages through %s", group->directory,
		 options.rank, options.ranks, group->node_count,
		 group->store ? group->store->ops->id : "nothing");
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
		return base_null_argument("open");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && (!directory || !*directory))
		ret = base_fail_reason(&error, -EINVAL, "no checkpoint directory was given");
	if (!ret)
		ret = open_group(context, directory, options, out, &error);
	return base_return(ret, "open", directory, &error);
}

/* ---- Freeing a group ------------------------------------------------------------------------- */

static int found_bye(void *user, uint32_t rank, const struct base_buffer *body)
{
	bool *have = user;

	(void)body;
	have[rank] = true;
	return 0;
}

/* Sends the bye message. Rank 0 waits for those of the others, because in some stores its messages
 * disappear with its process. */
static void say_bye(struct ioshape_group *group)
{
	uint64_t begin_ns = base_now_ns();
	struct group_round round;
	bool *have, all = false;

	/* No rank waits for long here, whatever the store does. */
	group->deadline_ns = MIN(group->deadline_ns, base_ms_to_ns(LONGEST_PARTING_MS));
	round = (struct group_round){ .group = group };
	snprintf(round.scope, sizeof(round.scope), "r%016llx-end", (unsigned long long)group->id);
	if (group->options.rank) {
		group_tell(&round, &group_bye, NULL, NULL);
		return;
	}
	have = calloc(group->options.ranks, sizeof(*have));
	while (have && !all && base_now_ns() - begin_ns < group->deadline_ns) {
		have[0] = true;
		for (uint32_t rank = 1; rank < group->options.ranks; rank++)
			have[rank] |= store_has_ended(group->store, rank);
		if (store_collect(group->store, round.scope, group_bye.name, have, found_bye, have,
				  NULL))
			break;
		all = group_has_all(group, have);
		if (!all)
			store_wait(group->store, 50);
	}
	free(have);
}

/* Waits until the saves of the group have ended. Their handles stay valid. */
static void await_saves(struct ioshape_group *group)
{
	pthread_mutex_lock(&group->lock);
	while (group->running)
		pthread_cond_wait(&group->change, &group->lock);
	pthread_mutex_unlock(&group->lock);
}

IOSHAPE_EXPORT void ioshape_group_free(struct ioshape_group *group)
{
	if (!group || group->owner != getpid())
		return;
	save_stop_background_of(group->context, group);
	await_saves(group);
	if (group->store)
		say_bye(group);
	free_group(group);
}
