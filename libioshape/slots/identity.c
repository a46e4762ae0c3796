/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The identity that a process gives itself when it asks for a slot: its job, rank, node and user,
 * and a priority boost for what waiting costs. Also computes when the process writes if no
 * coordinator answers. Calls no coordinator.
 */
#define _GNU_SOURCE
#include "slots/slots.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Identity -------------------------------------------------------------------------------- */

/* Copies a text. Others read it in logs and terminals, so unsafe characters are replaced. */
static void take_text(char *into, size_t size, const char *from)
{
	size_t i;

	for (i = 0; from[i] && i < size - 1; i++)
		into[i] = from[i] > ' ' && from[i] < 0x7f ? from[i] : '_';
	into[i] = 0;
}

static const char *first_set(const char *const *variables)
{
	for (; *variables; variables++) {
		const char *text = secure_getenv(*variables);

		if (text && *text)
			return text;
	}
	return NULL;
}

/* Returns whether an address means this host on every host. */
static bool is_loopback(const char *address)
{
	return !strcmp(address, "localhost") || !strcmp(address, "::1") ||
	       !strncmp(address, "127.", 4);
}

static void name_job(struct slots_identity *identity, const struct base_job *job)
{
	const char *meeting = secure_getenv("MASTER_ADDR"), *port = secure_getenv("MASTER_PORT");
	char text[sizeof(job->id)];

	/* Ranks of one job have the same MASTER_ADDR and MASTER_PORT. Processes started by hand
	 * share a session. */
	if (meeting && is_loopback(meeting))
		meeting = identity->node;
	if (*job->id)
		snprintf(text, sizeof(text), "%s", job->id);
	else if (meeting && *meeting && port && *port)
		snprintf(text, sizeof(text), "%.50s:%.8s", meeting, port);
	else
		snprintf(text, sizeof(text), "%.50s-%ld", identity->node, (long)getsid(0));
	take_text(identity->job, sizeof(identity->job), text);
}

/* Finds the user's name. Does not ask a directory service, because that may hang. */
static void name_user(struct slots_identity *identity)
{
	static const char *const users[] = { "SLURM_JOB_USER", "USER", "LOGNAME", NULL };
	const char *user = first_set(users);

	if (user)
		take_text(identity->user, sizeof(identity->user), user);
	else
		snprintf(identity->user, sizeof(identity->user), "uid%lu",
			 (unsigned long)geteuid());
}

void slots_identify(struct slots_identity *identity, const char *job, uint32_t share)
{
	struct base_job found;
	char node[SLOTS_TEXT_BYTES] = "";

	memset(identity, 0, sizeof(*identity));
	gethostname(node, sizeof(node) - 1);
	take_text(identity->node, sizeof(identity->node), *node ? node : "?");
	name_user(identity);
	base_job_find(&found);
	identity->rank = found.rank;
	identity->ranks = found.ranks;
	identity->share = share ? share : SLOTS_USUAL_SHARE;
	if (job && *job)
		take_text(identity->job, sizeof(identity->job), job);
	else
		name_job(identity, &found);
}

/* Waiting requests show so many characters of a node's name. */
#define NODE_SHOWN 50u

void slots_identify_program(struct slots_identity *identity, const char *program, const char *path)
{
	const size_t used = strlen(identity->node), path_bytes = strlen(path);
	const size_t fixed = used + strlen("::") + strlen(program);
	char text[2 * SLOTS_TEXT_BYTES];

	/* The end of a path says more than its beginning. */
	if (fixed + path_bytes <= NODE_SHOWN)
		snprintf(text, sizeof(text), ":%s:%s", program, path);
	else if (fixed + strlen("...") < NODE_SHOWN)
		snprintf(text, sizeof(text), ":%s:...%s", program,
			 path + path_bytes - (NODE_SHOWN - fixed - strlen("...")));
	else
		snprintf(text, sizeof(text), ":%s", program);
	take_text(identity->node + used, sizeof(identity->node) - used, text);
}

/* ---- Priority boost -------------------------------------------------------------------------- */

/* A boost is time of the whole pool by which a request may get ahead of its job's share. When the
 * cost of waiting per byte doubles, the boost grows by this much. */
#define DOUBLE_MS 60000.0

/* Time between failures of one rank: 419 failures of 16384 GPUs in 54 days (Llama 3). No job knows
 * its own failure rate better. The value matters only against jobs whose training waits for
 * saves. */
#define RANK_MTBF_S (54.0 * 86400 * 16384 / 419)

/* Cost of waiting at which the boost is 0, in idle ranks per byte. About that of 500 nodes of 8
 * ranks which save 4 GB per node every ten minutes, in the background. */
#define USUAL_COST 3e-11

/* Returns DOUBLE_MS * log2(factor), for a factor above 0. Linear between powers of two, with an
 * error of at most 5 s. */
static double factor_ms(double factor)
{
	int power;
	const double part = frexp(factor, &power); /* between 0.5 and 1 */

	return DOUBLE_MS * (power - 1 + 2 * part - 1);
}

int32_t slots_boost_ms(const struct slots_priority_inputs *inputs)
{
	const double ranks = MAX(inputs->ranks, 1u);
	const double writers = inputs->writers ? inputs->writers : ranks;
	/* Expected loss for each second of waiting, in rank-seconds. Either all ranks stand still,
	 * or a failure may destroy the work of all ranks since the last checkpoint. */
	const double at_risk = ranks * base_seconds(inputs->age_ns) / RANK_MTBF_S;
	const double lost = ranks * (inputs->blocks_training + at_risk);
	double ms;

	if (!inputs->bytes || lost <= 0)
		return 0;
	ms = factor_ms(lost / (writers * (double)inputs->bytes) / USUAL_COST);
	return (int32_t)MAX(MIN(ms, SLOTS_MOST_BOOST_MS), -SLOTS_MOST_BOOST_MS);
}

/* ---- Age of the work ------------------------------------------------------------------------- */

/* Files belong to one checkpoint if the pause between them is shorter than 1 / PAUSE_PART of the
 * time between the last two checkpoints. */
#define PAUSE_PART 10

/* About the time when the program began. The work before its first checkpoint began then. */
static uint64_t loaded_ns;

__attribute__((constructor)) static void record_load(void)
{
	loaded_ns = base_now_ns();
}

uint64_t slots_checkpoints_begin(struct slots_checkpoints *checkpoints, uint64_t now_ns)
{
	if (!checkpoints->begin_ns)
		checkpoints->begin_ns = checkpoints->last_ns = loaded_ns;
	if (now_ns - checkpoints->last_ns > checkpoints->age_ns / PAUSE_PART) {
		checkpoints->age_ns = now_ns - checkpoints->begin_ns;
		checkpoints->begin_ns = now_ns;
	}
	checkpoints->last_ns = now_ns;
	return checkpoints->age_ns;
}

/* ---- Staggered start without a coordinator --------------------------------------------------- */

/* Assumed number of writers if the process does not know how many ranks there are. */
#define UNKNOWN_RANKS 4u

/* Returns a well-mixed value (the end of splitmix64), so that neighbouring values end up far
 * apart. */
static uint64_t mix(uint64_t value)
{
	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
	value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
	return value ^ (value >> 31);
}

/*
 * Distributes the ranks of a job over rounds in which `capacity` ranks write, so that ranks meet
 * only if they must. The round of each rank depends on a hash of job and save. So two jobs do not
 * collide every time, and no rank is always last.
 */
uint32_t slots_stagger_ms(const struct slots_identity *identity, uint64_t save, uint32_t capacity,
			  uint32_t write_ms, uint32_t most_ms)
{
	const uint64_t ranks = identity->ranks > 1 ? identity->ranks : UNKNOWN_RANKS;
	const uint64_t rounds = (ranks + capacity - 1) / MAX(capacity, 1);
	const uint64_t chance = mix(base_hash_text(identity->job) + save * 0x9e3779b97f4a7c15);
	const uint64_t own = identity->ranks > 1 ? identity->rank :
						   mix(base_hash_text(identity->client));
	/* The jitter is up to a quarter of a write, so that ranks of a round do not begin at the
	 * same instant. */
	const uint64_t jitter = mix(chance ^ base_hash_text(identity->client)) % (write_ms / 4 + 1);
	const uint64_t delay = (own + chance) % MAX(rounds, 1) * write_ms + jitter;
	const uint64_t longest = MAX(rounds, 1) * write_ms;

	/* If the rounds would take longer than most_ms, all delays shrink by one factor, which
	 * keeps their order. */
	if (longest <= most_ms)
		return (uint32_t)delay;
	return (uint32_t)((double)delay / (double)(longest + write_ms / 4) * most_ms);
}
