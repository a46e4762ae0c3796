/* SPDX-License-Identifier: Apache-2.0 */
/* Finds a downgrade in a report. */
#ifndef SUPPORT_REPORT_DOWNGRADE_H
#define SUPPORT_REPORT_DOWNGRADE_H

#include <ioshape/ioshape.h>

#include <stddef.h>

/* Returns the sentence of the first downgrade of this kind; NULL if there is none. */
static inline const char *report_downgrade(const struct ioshape_report *report,
					   enum ioshape_downgrade_code code)
{
	for (uint32_t i = 0; i < report->downgrade_count && i < IOSHAPE_REPORT_DOWNGRADES; i++) {
		if (report->downgrades[i].code == code)
			return report->downgrades[i].sentence;
	}
	return NULL;
}

#endif
