/* SPDX-License-Identifier: Apache-2.0 */
/* What was not as preferred, for reports. */
#include "ring/ring.h"

#include <stdio.h>
#include <string.h>

void ring_note(struct ring_notes *notes, enum ioshape_step_code code, const char *format, ...)
{
	struct ioshape_step *step;
	va_list args;

	if (!notes)
		return;
	if (notes->count < IOSHAPE_REPORT_STEPS) {
		step = &notes->steps[notes->count];
		step->code = code;
		va_start(args, format);
		vsnprintf(step->sentence, sizeof(step->sentence), format, args);
		va_end(args);
		base_make_plain(step->sentence);
		base_garble(step->sentence);
	}
	notes->count++;
}

void ring_notes_report(const struct ring_notes *notes, struct ioshape_report *report)
{
	report->fallbacks = notes->count;
	memcpy(report->steps, notes->steps, sizeof(report->steps));
}
