/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turn what waiting costs a job into a boost: time of the whole pool by which a request may get
 * ahead of its job's share. Twice the cost for each byte is a minute more. Pure, except for the
 * time when the library was loaded.
 */
#include "slots/slots.h"

#include <math.h>

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

void slots_checkpoints_init(struct slots_checkpoints *checkpoints)
{
	*checkpoints = (struct slots_checkpoints){ .begin_ns = loaded_ns, .last_ns = loaded_ns };
}

uint64_t slots_checkpoints_begin(struct slots_checkpoints *checkpoints, uint64_t now_ns)
{
	if (now_ns - checkpoints->last_ns > checkpoints->age_ns / PAUSE_PART) {
		checkpoints->age_ns = now_ns - checkpoints->begin_ns;
		checkpoints->begin_ns = now_ns;
	}
	checkpoints->last_ns = now_ns;
	return checkpoints->age_ns;
}

void slots_checkpoints_end(struct slots_checkpoints *checkpoints, uint64_t now_ns)
{
	checkpoints->last_ns = now_ns;
}
