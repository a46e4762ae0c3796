/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hill climbing by comparison. The pool's throughput at the best known number of writers is
 * compared with that at another one, epoch by epoch in turns, so that a neighbour who comes or goes
 * meanwhile disturbs both alike. A clear difference is believed after one pair of epochs, a small
 * one after several. First steps double or halve; later ones add a half or take a third away.
 *
 * Latency needs no measurement of its own: with a fixed amount in flight for each writer, requests
 * take as long as all that is in flight takes at this throughput (Little's law). So weighing
 * throughput against latency is the same as asking a price for each writer.
 */
#include "slots/learn.h"

#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MORE 1u
#define FEWER 2u

/* Twice as many writers must give so much more; it is in proportion for smaller steps. */
#define PRICE 0.05
/* What a move must gain beyond that: so nothing moves to and fro. */
#define HYSTERESIS 0.01
/* Rates are compared as the trial's share of both, which is one half where they are alike. So no
 * single epoch can say too much. This is how far off a first pair may be by chance; the mean of
 * several is nearer. */
#define FIRST_DOUBT 0.07
#define MOST_PAIRS 12u
/* A small step is worth a second look: a neighbour may have come or gone just then. */
#define FINE_PAIRS 3u
#define MILLION 1000000u

#define LEAST_REPORTS 6u
#define MOST_REPORTS 24u
#define LEAST_PATIENCE 8u
#define MOST_PATIENCE 128u
/* The storage, or what is written, has changed: rates are so far from the usual twice in a row. */
#define SURPRISE 1.3
#define SURPRISES 2u
#define USUAL_WEIGHT 8u /* the latest epoch is one part in so many of the usual */

#define MOST_RATE (UINT64_C(1) << 50) /* bytes per second */

void learn_begin(struct learn *learn, uint32_t start)
{
	memset(learn, 0, sizeof(*learn));
	learn->start = MIN(MAX(start, 1u), LEARN_MOST_START);
	learn->best = learn->start;
	/* What each writer has in flight is being learnt as well: that comes first. */
	learn->patience = LEAST_PATIENCE;
}

uint32_t learn_capacity(const struct learn *learn)
{
	return (uint32_t)(learn->in_trial ? learn->trial : learn->best);
}

uint32_t learn_reports(const struct learn *learn)
{
	return MIN(MAX(learn_capacity(learn), LEAST_REPORTS), MOST_REPORTS);
}

/* ---- What to try ----------------------------------------------------------------------------- */

/* 0: there is nothing in that direction. */
static uint32_t next_in(const struct learn *learn, uint32_t direction, uint32_t wanted)
{
	const uint32_t best = (uint32_t)learn->best;
	uint32_t next;

	if (direction == MORE) {
		next = learn->fine ? MAX(best + best / 2, best + 1) : best * 2;
		next = MIN(next, MIN(MAX(wanted, 1u), LEARN_MOST));
		return next > best ? next : 0;
	}
	next = learn->fine ? best - (best + 2) / 3 : best / 2;
	return next;
}

static void begin_trial(struct learn *learn, uint32_t trial)
{
	learn->trial = trial;
	learn->pairs = learn->shares = 0;
	learn->in_trial = 1;
}

/* The search is over for now. The longer nothing changes, the longer it rests. */
static void rest(struct learn *learn)
{
	learn->trial = learn->in_trial = learn->tried = 0;
	learn->fine = 1;
	learn->quiet = learn->surprises = 0;
	learn->patience = MIN(MAX(learn->patience * 2, LEAST_PATIENCE), MOST_PATIENCE);
}

/* The next comparison of this search, which goes on with the direction that paid. `measured`: the
 * latest epoch was the best's, so that the trial comes next. */
static void go_on(struct learn *learn, uint32_t wanted)
{
	for (;;) {
		for (uint32_t direction = MORE; direction <= FEWER; direction++) {
			const uint32_t next =
				learn->tried & direction ? 0 : next_in(learn, direction, wanted);

			if (next) {
				begin_trial(learn, next);
				return;
			}
		}
		if (learn->fine)
			break;
		learn->fine = 1;
		learn->tried = 0;
	}
	rest(learn);
}

/* ---- What was found -------------------------------------------------------------------------- */

static uint32_t permille(double ratio)
{
	return (uint32_t)(MIN(ratio, 1000.0) * 1000 + 0.5);
}

/* The trial takes the best's place. */
static void move(struct learn *learn, double ratio)
{
	const struct learn_found before = { learn->best, permille(1 / ratio) };
	const bool more = learn->trial > learn->best;

	learn->best = learn->trial;
	learn->why = more ? LEARN_MORE : LEARN_FEWER;
	learn->more = more ? (struct learn_found){ 0 } : before;
	learn->fewer = more ? before : (struct learn_found){ 0 };
	learn->tried = more ? FEWER : MORE;
	learn->patience = 0;
	learn->trial = learn->in_trial = 0;
}

static void stay(struct learn *learn, double ratio)
{
	const struct learn_found found = { learn->trial, permille(ratio) };

	if (learn->trial > learn->best) {
		learn->more = found;
		learn->tried |= MORE;
	} else {
		learn->fewer = found;
		learn->tried |= FEWER;
	}
	if (learn->why == LEARN_START)
		learn->why = LEARN_KEPT;
	learn->trial = learn->in_trial = 0;
}

/* What the trial must write for each byte that the best writes. */
static double required(const struct learn *learn)
{
	const double best = (double)learn->best, trial = (double)learn->trial;

	return trial > best ? 1 + PRICE * (trial - best) / best + HYSTERESIS :
			      1 / (1 + PRICE * (best - trial) / trial) + HYSTERESIS;
}

/* 1: the trial pays; -1: it does not; 0: not clear yet. `ratio` receives its rate to the best's. */
static int judge(const struct learn *learn, double *ratio)
{
	const double pairs = (double)learn->pairs, share = (double)learn->shares / pairs / MILLION;
	const double need = required(learn), beyond = share - need / (1 + need);

	*ratio = share < 1 ? share / (1 - share) : 1000;
	if (learn->fine && learn->pairs < FINE_PAIRS)
		return 0;
	if (learn->pairs < MOST_PAIRS && beyond * beyond * pairs < FIRST_DOUBT * FIRST_DOUBT)
		return 0;
	return beyond > 0 ? 1 : -1;
}

/* An epoch of a comparison. */
static void compare(struct learn *learn, uint64_t rate, uint32_t wanted)
{
	const uint64_t of_trial = learn->in_trial ? rate : learn->rate;
	const bool measured_trial = learn->in_trial;
	double ratio;
	int verdict;

	learn->shares += (uint64_t)((double)of_trial / (double)(rate + learn->rate) * MILLION);
	learn->pairs++;
	learn->rate = rate;
	verdict = judge(learn, &ratio);
	if (!verdict) {
		learn->in_trial = !learn->in_trial;
		return;
	}
	if (verdict > 0)
		move(learn, ratio);
	else
		stay(learn, ratio);
	/* What is compared next needs a rate of the best's: the latest epoch may be the other's. */
	if (measured_trial == (verdict > 0))
		learn->usual = rate;
	else
		learn->rate = 0;
	go_on(learn, wanted);
	if (!learn->rate)
		learn->in_trial = 0;
}

/* An epoch of the best, while nothing is compared. */
static void watch(struct learn *learn, uint64_t rate, uint32_t wanted)
{
	const double ratio = learn->usual ? (double)rate / (double)learn->usual : 1;

	learn->surprises = ratio > SURPRISE || ratio < 1 / SURPRISE ? learn->surprises + 1 : 0;
	learn->rate = rate;
	learn->quiet++;
	if (learn->surprises >= SURPRISES) {
		learn->usual = rate;
		learn->surprises = 0;
		learn->patience = MIN(learn->patience, LEAST_PATIENCE);
	} else {
		learn->usual = learn->usual ? learn->usual - learn->usual / USUAL_WEIGHT +
						      rate / USUAL_WEIGHT :
					      rate;
	}
	if (learn->quiet >= learn->patience)
		go_on(learn, wanted);
}

void learn_from(struct learn *learn, const struct learn_epoch *epoch)
{
	const double rate = (double)epoch->bytes / epoch->seconds;

	/* Also what is no number. */
	if (!(epoch->seconds > 0) || !(rate >= 1 && rate <= (double)MOST_RATE))
		return;
	if (!learn->trial)
		watch(learn, (uint64_t)rate, epoch->wanted);
	else if (learn->rate)
		compare(learn, (uint64_t)rate, epoch->wanted);
	else {
		learn->rate = learn->usual = (uint64_t)rate;
		learn->in_trial = 1;
	}
}

bool learn_is_sound(const struct learn *learn)
{
	const struct learn_found *more = &learn->more, *fewer = &learn->fewer;
	const uint64_t most = MAX(learn->start, LEARN_MOST);

	return learn->start >= 1 && learn->start <= LEARN_MOST_START && learn->best >= 1 &&
	       learn->best <= most && learn->trial <= most && learn->trial != learn->best &&
	       learn->in_trial <= (learn->trial > 0) && learn->fine <= 1 &&
	       learn->tried <= (MORE | FEWER) && learn->pairs < MOST_PAIRS &&
	       learn->shares <= learn->pairs * MILLION && learn->rate <= MOST_RATE &&
	       learn->usual <= MOST_RATE && learn->quiet <= MOST_PATIENCE &&
	       learn->patience <= MOST_PATIENCE && learn->surprises < SURPRISES &&
	       learn->why <= LEARN_KEPT && more->writers <= most && more->permille <= MILLION &&
	       fewer->writers <= most && fewer->permille <= MILLION;
}

/* ---- As text --------------------------------------------------------------------------------- */

#define NUMBERS (sizeof(struct learn) / sizeof(uint64_t))

void learn_write(const struct learn *learn, char text[LEARN_TEXT_BYTES])
{
	uint64_t numbers[NUMBERS];
	size_t used = 0;

	memcpy(numbers, learn, sizeof(numbers));
	for (size_t i = 0; i < NUMBERS; i++)
		used += (size_t)snprintf(text + used, LEARN_TEXT_BYTES - used, i ? " %llu" : "%llu",
					 (unsigned long long)numbers[i]);
}

void learn_read(struct learn *learn, const char *text, uint32_t start)
{
	uint64_t numbers[NUMBERS] = { 0 };
	char again[LEARN_TEXT_BYTES], *end = NULL;
	const char *at = text;

	for (size_t i = 0; i < NUMBERS; i++, at = end)
		numbers[i] = strtoull(at, &end, 10);
	memcpy(learn, numbers, sizeof(*learn));
	/* strtoull() takes much for a number: what it took must be what is written. */
	learn_write(learn, again);
	if (strcmp(again, text) != 0 || learn->start != MIN(MAX(start, 1u), LEARN_MOST_START) ||
	    !learn_is_sound(learn))
		learn_begin(learn, start);
}
