/* SPDX-License-Identifier: Apache-2.0 */
/* Finds a downgrade in a report. */
#ifndef SUPPORT_REPORT_STEP_H
#define SUPPORT_REPORT_STEP_H

#include <ioshape/ioshape.h>

#include <stddef.h>

/* Returns the sentence of the first downgrade of this kind; NULL if there is none. */
static inline const char *report_step(const struct ioshape_report *report,
				      enum ioshape_step_code code)
{
	for (uint32_t i = 0; i < report->fallbacks && i < IOSHAPE_REPORT_STEPS; i++) {
		if (report->steps[i].code == code)
			return report->steps[i].sentence;
	}
	return NULL;
}

#endif
