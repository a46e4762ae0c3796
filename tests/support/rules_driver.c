/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the rules of turns (rules.c) on operations from stdin, one per line, words parted by single
 * spaces; the arguments are those of slots.lua, in its order:
 *
 *   NOW make                             begins an empty pool, whose epoch is NOW (0 is made first)
 *   NOW acquire ID CLIENT NODE JOB RANK SHARE WEIGHT BYTES LEASE ASKED DEFAULT EPOCH NEVER-WAIT
 *   NOW beat ID PASSED LEASE EPOCH HOLDING FENCE WEIGHT BYTES CLIENT NODE JOB RANK SHARE
 *   NOW release ID PASSED LEASE EPOCH
 *   NOW pace JOB BYTES JOB-RATE LEASE EPOCH
 *   NOW set CLEAR CAPACITY POOL-RATE JOB-RATE SMALL EXPRESS
 *   NOW kick ID
 *   NOW status
 *   NOW bury CLIENT                      all of that client's is forgotten (not in slots.lua)
 *
 * and answers with one line: what slots.lua returns, parted by single spaces, then a tab, then the
 * clients that were woken, in order (one word for each grant to one that waited):
 *
 *   acquire, beat        STATE FENCE EPOCH WEIGHT POSITION CAPACITY BEAT AHEAD...
 *                        (AHEAD is the rest up to the tab: it may be empty or hold spaces; "full"
 *                        alone if there is no room for one more)
 *   release, set, kick   1 or 0
 *   pace                 BYTES START END
 *   status               11 numbers, then " H" and 11 words for each holder, then " W" and 11 words
 *                        for each waiter
 *   make, bury           1
 *
 * A line that is none of these: "?" and what is wrong. Known beforehand: there is no grace, and
 * nothing is reclaimed (EPOCH, HOLDING and what follows in a beat have no effect); pools hold 1024
 * members and as many jobs.
 */
#include "slots/rules.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_WORDS 20
#define MOST_CLIENTS 65536

struct line {
	char *words[MOST_WORDS];
	unsigned count;
};

static struct rules_state state;
/* Clients stand for processes: the number is the place in here. */
static char clients[MOST_CLIENTS][64];
static uint32_t client_count;

static uint32_t client_number(const char *client)
{
	for (uint32_t i = 0; i < client_count; i++) {
		if (!strcmp(clients[i], client))
			return i;
	}
	if (client_count == MOST_CLIENTS)
		exit(2);
	snprintf(clients[client_count], sizeof(clients[0]), "%s", client);
	return client_count++;
}

static uint64_t number(const char *word)
{
	return strtoull(word, NULL, 10);
}

static void copy(char *to, const char *word, size_t room)
{
	snprintf(to, room, "%s", word);
}

static void print_answer(const struct slots_answer *answer)
{
	printf("%d %" PRIu64 " %" PRIu64 " %u %u %u %u %s", (int)answer->state, answer->fence,
	       answer->epoch, answer->weight, answer->position, answer->capacity, answer->beat_ms,
	       answer->ahead);
}

static void run_make(int64_t now, char **word)
{
	(void)word;
	rules_make(&state, now, 0, 0);
	state.pool.fence = 0; /* as in a Redis that has just begun */
	printf("1");
}

static void run_acquire(int64_t now, char **word)
{
	struct slots_config config = {
		.identity = { .rank = (uint32_t)number(word[4]),
			      .share = (uint32_t)number(word[5]) },
		.lease_ms = (uint32_t)number(word[8]),
		.asked_capacity = (uint32_t)number(word[9]),
		.default_capacity = (uint32_t)number(word[10]),
	};
	struct slots_request request = {
		.weight = (uint32_t)number(word[6]),
		.bytes = number(word[7]),
		.never_wait = !strcmp(word[12], "1"),
	};
	struct slots_answer answer;

	copy(request.id, word[0], sizeof(request.id));
	copy(config.identity.node, word[2], sizeof(config.identity.node));
	copy(config.identity.job, word[3], sizeof(config.identity.job));
	if (rules_acquire(&state, now, &config, &request, client_number(word[1]), &answer))
		printf("full");
	else
		print_answer(&answer);
}

static void run_beat(int64_t now, char **word)
{
	const struct slots_config config = { .lease_ms = (uint32_t)number(word[2]) };
	struct slots_beat beat = { .passed = number(word[1]) };
	struct slots_answer answer;

	copy(beat.id, word[0], sizeof(beat.id));
	rules_beat(&state, now, &config, &beat, &answer);
	print_answer(&answer);
}

static void run_release(int64_t now, char **word)
{
	printf("%d", rules_release(&state, now, word[0], number(word[1])));
}

static void run_pace(int64_t now, char **word)
{
	struct slots_config config = { .rate = number(word[2]) };
	struct slots_grant grant;

	copy(config.identity.job, word[0], sizeof(config.identity.job));
	rules_pace(&state, now, &config, strtoll(word[1], NULL, 10), &grant);
	printf("%" PRIu64 " %u %u", grant.bytes, grant.start_ms, grant.end_ms);
}

static void run_set(int64_t now, char **word)
{
	const struct ioshape_pool_settings settings = {
		.clear = !strcmp(word[0], "1"),
		.capacity = (uint32_t)number(word[1]),
		.pool_rate = number(word[2]),
		.job_rate = number(word[3]),
		.small_bytes = number(word[4]),
		.express = (uint32_t)number(word[5]),
	};

	rules_set(&state, now, &settings);
	printf("1");
}

static void run_kick(int64_t now, char **word)
{
	printf("%d", rules_kick(&state, now, word[0]));
}

static void print_rows(char kind, const struct ioshape_member *rows, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		const struct ioshape_member *row = &rows[i];

		printf(" %c %s %s %s %u %u %u %" PRIu64 " %" PRIu64 " %" PRIu64 " %.0f %.0f", kind,
		       row->id, row->job, row->node, row->rank, row->weight, row->express,
		       row->bytes, row->passed, row->fence, row->since_s * 1000,
		       row->lease_s * 1000);
	}
}

static void run_status(int64_t now, char **word)
{
	struct base_error error = { 0 };
	struct slots_status_maker *maker;
	struct ioshape_pool_status *status;

	(void)word;
	if (slots_status_new(&maker, "driver", "local", &error) || rules_status(&state, now, maker))
		exit(2);
	status = slots_status_of(maker);
	printf("%u %d %u %" PRIu64 " %" PRIu64 " %" PRIu64 " %u %" PRIu64 " %u %zu %zu",
	       status->capacity,
	       !strcmp(status->capacity_by, "operator") ? 2 : !strcmp(status->capacity_by, "job"),
	       status->used, status->pool_rate, status->job_rate, status->small_bytes,
	       status->express, status->grants, status->grants_last_minute, status->waiter_count,
	       status->holder_count);
	print_rows('H', status->holders, status->holder_listed);
	print_rows('W', status->waiters, status->waiter_listed);
	slots_status_abandon(maker);
}

static void run_bury(int64_t now, char **word)
{
	rules_bury(&state, now, client_number(word[0]));
	printf("1");
}

static void run(struct line *line)
{
	static const struct {
		const char *name;
		void (*run)(int64_t now, char **word);
		unsigned words;
	} operations[] = {
		{ "make", run_make, 0 },  { "acquire", run_acquire, 13 },
		{ "beat", run_beat, 13 }, { "release", run_release, 4 },
		{ "pace", run_pace, 5 },  { "set", run_set, 6 },
		{ "kick", run_kick, 1 },  { "status", run_status, 0 },
		{ "bury", run_bury, 1 },
	};

	for (size_t i = 0; line->count >= 2 && i < ARRAY_LENGTH(operations); i++) {
		if (strcmp(line->words[1], operations[i].name))
			continue;
		if (line->count != operations[i].words + 2)
			break;
		state.woken_count = 0;
		operations[i].run(strtoll(line->words[0], NULL, 10), line->words + 2);
		printf("\t");
		for (uint32_t j = 0; j < state.woken_count; j++)
			printf("%s%s", j ? " " : "", clients[state.woken[j]]);
		printf("\n");
		return;
	}
	printf("? no such operation, or the wrong number of words\n");
}

int main(void)
{
	char text[4096];

	rules_make(&state, 0, 0, 0);
	while (fgets(text, sizeof(text), stdin)) {
		struct line line = { .count = 0 };
		char *rest = text, *word;

		text[strcspn(text, "\n")] = 0;
		while (line.count < MOST_WORDS && (word = strsep(&rest, " ")))
			line.words[line.count++] = word;
		run(&line);
		fflush(stdout);
	}
	return 0;
}
