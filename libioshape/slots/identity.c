/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process says of itself when it asks for a slot: who it is, as far as its launcher says so
 * in variables, and a boost for what its waiting costs. And when it writes if no coordinator
 * answers, which follows from who it is. Calls no coordinator.
 */
#define _GNU_SOURCE
#include "slots/slots.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Identity -------------------------------------------------------------------------------- */

/* Others read it in their logs and terminals: what could do harm there is replaced. */
static void take_text(char *into, size_t room, const char *from)
{
	size_t i;

	for (i = 0; from[i] && i < room - 1; i++)
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

/* What every host calls itself. */
static bool is_loopback(const char *address)
{
	return !strcmp(address, "localhost") || !strcmp(address, "::1") ||
	       !strncmp(address, "127.", 4);
}

static void name_job(struct slots_identity *identity, const struct base_job *job)
{
	const char *meeting = secure_getenv("MASTER_ADDR"), *port = secure_getenv("MASTER_PORT");
	char text[sizeof(job->id)];

	/* Ranks of one job meet at one place; and what is started by hand shares a terminal. */
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

/* Without asking a directory service, which may hang. */
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

/* ---- Boost ----------------------------------------------------------------------------------- */

/* A boost is time of the whole pool by which a request may get ahead of its job's share. Twice the
 * cost of waiting for each byte is a minute more. */
#define DOUBLE_MS 60000.0

/* 419 failures of 16384 GPUs in 54 days (Llama 3). A failure rate of its own no job knows better
 * than by guessing; it matters only beside jobs whose saves hold them up. */
#define RANK_MTBF_S (54.0 * 86400 * 16384 / 419)

/* Ranks lost, for each byte: of a job that neither goes before others nor lets them pass. About 500
 * nodes of 8 ranks that save 4 GB each, every ten minutes, in the background. */
#define USUAL_COST 3e-11

/* For a factor above 0; straight between powers of two, which is at most 5 s off. */
static double factor_ms(double factor)
{
	int power;
	const double part = frexp(factor, &power); /* 0.5 to 1 */

	return DOUBLE_MS * (power - 1 + 2 * part - 1);
}

int32_t slots_boost_ms(const struct slots_stake *stake)
{
	const double ranks = MAX(stake->ranks, 1u);
	const double writers = stake->writers ? stake->writers : ranks;
	/* In each second: all ranks stand still; or a failure destroys what all did since. */
	const double at_risk = ranks * base_seconds(stake->age_ns) / RANK_MTBF_S;
	const double lost = ranks * (stake->holds_up + at_risk);
	double ms;

	if (!stake->bytes || lost <= 0)
		return 0;
	ms = factor_ms(lost / (writers * (double)stake->bytes) / USUAL_COST);
	return (int32_t)MAX(MIN(ms, SLOTS_MOST_BOOST_MS), -SLOTS_MOST_BOOST_MS);
}

/* ---- How old the work is --------------------------------------------------------------------- */

/* A pause of less than this part of the time between two checkpoints is one within a checkpoint. */
#define PAUSE_PART 10

/* About when the program began: what it has done before its first checkpoint began then. */
static uint64_t loaded_ns;

__attribute__((constructor)) static void note_load(void)
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

/* ---- A time of one's own --------------------------------------------------------------------- */

/* Of a writer that knows nothing of the others: it may be one of so many. */
#define UNKNOWN_RANKS 4u

/* Well mixed (the end of splitmix64): neighbours get numbers far apart. */
static uint64_t mix(uint64_t value)
{
	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
	value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
	return value ^ (value >> 31);
}

/*
 * The ranks of a job are dealt out over as many rounds of writing as it takes when `capacity` write
 * at a time, so that no two meet that need not. Which ranks write first is left to chance, by job
 * and save: two jobs do not meet every time, and no rank is always the last.
 */
uint32_t slots_stagger_ms(const struct slots_identity *identity, uint64_t save, uint32_t capacity,
			  uint32_t write_ms, uint32_t most_ms)
{
	const uint64_t ranks = identity->ranks > 1 ? identity->ranks : UNKNOWN_RANKS;
	const uint64_t rounds = (ranks + capacity - 1) / MAX(capacity, 1);
	const uint64_t chance = mix(base_hash_text(identity->job) + save * 0x9e3779b97f4a7c15);
	const uint64_t own = identity->ranks > 1 ? identity->rank :
						   mix(base_hash_text(identity->client));
	/* A quarter of a write, different for each: they must not begin in the same instant. */
	const uint64_t jitter = mix(chance ^ base_hash_text(identity->client)) % (write_ms / 4 + 1);
	const uint64_t delay = (own + chance) % MAX(rounds, 1) * write_ms + jitter;
	const uint64_t longest = MAX(rounds, 1) * write_ms;

	/* Rounds that would take too long are made shorter, all alike: the order stays. */
	if (longest <= most_ms)
		return (uint32_t)delay;
	return (uint32_t)((double)delay / (double)(longest + write_ms / 4) * most_ms);
}
