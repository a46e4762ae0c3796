/* SPDX-License-Identifier: Apache-2.0 */
/* Formats a report as one line for people. Programs read the members of struct ioshape_report. */
#include "base/base.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct text {
	char *begin;
	size_t size, length;
};

__attribute__((format(printf, 2, 3))) static void put(struct text *text, const char *format, ...)
{
	const bool fits = text->length < text->size;
	va_list arguments;
	int written;

	va_start(arguments, format);
	written = vsnprintf(fits ? text->begin + text->length : NULL,
			    fits ? text->size - text->length : 0, format, arguments);
	va_end(arguments);
	text->length += written > 0 ? (size_t)written : 0;
}

/* Writes a number with a comma before each group of three digits. */
static void put_count(struct text *text, uint64_t count)
{
	uint64_t group = 1;

	while (count / group >= 1000)
		group *= 1000;
	put(text, "%" PRIu64, count / group);
	for (; group > 1; group /= 1000)
		put(text, ",%03" PRIu64, count % group / (group / 1000));
}

static void put_seconds(struct text *text, const char *what, double seconds)
{
	if (seconds > 0)
		put(text, ", %s %.3f", what, seconds);
}

static void put_turn(struct text *text, const struct ioshape_report *report)
{
	if (report->slot_s <= 0)
		return;
	put_seconds(text, "slot", report->slot_s);
	if (*report->ahead)
		put(text, " (behind %s; %s)", report->ahead, report->coordinator);
	else if (*report->coordinator)
		put(text, " (%s)", report->coordinator);
}

static void put_times(struct text *text, const struct ioshape_report *report)
{
	put_seconds(text, "stage", report->stage_s);
	put_turn(text, report);
	put_seconds(text, "plan", report->plan_s);
	put_seconds(text, "write", report->write_s);
	put_seconds(text, "sync", report->sync_s);
	put_seconds(text, "commit", report->commit_s);
	put_seconds(text, "paced", report->paced_s);
	put_seconds(text, "group", report->group_s);
	if (report->deadline_left_s > 0)
		put(text, ", %.3f s before its deadline", report->deadline_left_s);
	else if (report->deadline_left_s < 0)
		put(text, ", %.3f s after its deadline", -report->deadline_left_s);
}

static void put_group(struct text *text, const struct ioshape_report *report)
{
	if (*report->why) {
		put(text, ", part of ");
		put_count(text, report->checkpoint_bytes);
		put(text, " bytes, %s: %s", report->mode, report->why);
	}
	if (report->repeated_bytes) {
		put(text, ", ");
		put_count(text, report->repeated_bytes);
		put(text, " bytes of identical shards are stored once");
	}
}

IOSHAPE_EXPORT size_t ioshape_report_text(const struct ioshape_report *report, char *text,
					  size_t size)
{
	struct text line = { text, size, 0 };
	struct ioshape_report known;

	if (base_take_options(&known, sizeof(known), report, "ioshape_report", NULL))
		return 0;
	put_count(&line, known.file_bytes);
	put(&line, " bytes");
	put(&line, " in %.3f s", known.total_s);
	put_times(&line, &known);
	if (*known.engine)
		put(&line, ", %s%s on %s", known.engine, known.direct ? ", direct" : "",
		    known.filesystem);
	put_group(&line, &known);
	known.alarm[sizeof(known.alarm) - 1] = '\0';
	if (*known.alarm)
		put(&line, "; alarm: %s", known.alarm);
	for (uint32_t i = 0; i < MIN(known.downgrade_count, IOSHAPE_REPORT_DOWNGRADES); i++)
		put(&line, "; %s", known.downgrades[i].sentence);
	return line.length;
}
