/* SPDX-License-Identifier: Apache-2.0 */
/* Who used a pool, and when, as a coordinator tells it; owned by the caller. */
#include "slots/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef char text[SLOTS_NAME_BYTES];

struct hour {
	struct ioshape_pool_hour hour;
	text job, user;
};

struct act {
	struct ioshape_pool_act act;
	text who, what;
};

/* It is the first member: so the pointer that callers hold frees it all. */
struct whole {
	struct ioshape_pool_history history;
	struct slots_history texts;
};

int slots_history_add_hour(struct slots_history *history, const struct ioshape_pool_hour *hour)
{
	struct hour row = { .hour = *hour };

	snprintf(row.job, sizeof(row.job), "%s", hour->job);
	snprintf(row.user, sizeof(row.user), "%s", hour->user);
	return base_buffer_append(&history->hours, &row, sizeof(row));
}

int slots_history_add_act(struct slots_history *history, const struct ioshape_pool_act *act)
{
	struct act row = { .act = *act };

	snprintf(row.who, sizeof(row.who), "%s", act->who);
	snprintf(row.what, sizeof(row.what), "%s", act->what);
	return base_buffer_append(&history->acts, &row, sizeof(row));
}

static int by_time(const void *a, const void *b)
{
	const struct hour *left = a, *right = b;
	const struct ioshape_pool_hour *one = &left->hour, *other = &right->hour;

	if (one->begin_s != other->begin_s)
		return one->begin_s < other->begin_s ? -1 : 1;
	if (one->written_bytes != other->written_bytes)
		return one->written_bytes > other->written_bytes ? -1 : 1;
	return strcmp(left->job, right->job);
}

struct ioshape_pool_history *slots_history_end(struct slots_history *history)
{
	struct hour *hours = (void *)history->hours.data;
	struct act *acts = (void *)history->acts.data;
	const size_t hour_count = history->hours.bytes / sizeof(*hours);
	const size_t act_count = history->acts.bytes / sizeof(*acts);
	struct whole *whole = calloc(1, sizeof(*whole) + hour_count * sizeof(hours->hour) +
						act_count * sizeof(acts->act));
	struct ioshape_pool_hour *hour_rows;
	struct ioshape_pool_act *act_rows;

	if (!whole)
		return NULL;
	hour_rows = (void *)(whole + 1);
	act_rows = (void *)(hour_rows + hour_count);
	whole->texts = *history;
	memset(history, 0, sizeof(*history));
	if (hour_count)
		qsort(hours, hour_count, sizeof(*hours), by_time);
	for (size_t i = 0; i < hour_count; i++) {
		hour_rows[i] = hours[i].hour;
		hour_rows[i].job = hours[i].job;
		hour_rows[i].user = hours[i].user;
	}
	for (size_t i = 0; i < act_count; i++) {
		act_rows[i] = acts[i].act;
		act_rows[i].who = acts[i].who;
		act_rows[i].what = acts[i].what;
	}
	whole->history = (struct ioshape_pool_history){
		.size = sizeof(whole->history),
		.hours = hour_rows,
		.hour_count = hour_count,
		.acts = act_rows,
		.act_count = act_count,
	};
	return &whole->history;
}

IOSHAPE_EXPORT void ioshape_pool_history_free(struct ioshape_pool_history *history)
{
	struct whole *whole = (struct whole *)history;

	if (!whole)
		return;
	base_buffer_free(&whole->texts.hours);
	base_buffer_free(&whole->texts.acts);
	free(whole);
}
