/* SPDX-License-Identifier: Apache-2.0 */
/* TAP output for programs that may have to skip tests, which libcheck cannot report. */
#ifndef TESTS_SUPPORT_TAP_H
#define TESTS_SUPPORT_TAP_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static unsigned tap_count, tap_failures;

__attribute__((format(printf, 2, 3))) static inline bool tap_ok(bool well, const char *format, ...)
{
	va_list args;

	printf("%sok %u - ", well ? "" : "not ", ++tap_count);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	tap_failures += !well;
	return well;
}

/* Reason why the current test fails. */
static char complaint[4096];

__attribute__((format(printf, 1, 2))) static inline bool complain(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(complaint, sizeof(complaint), format, args);
	va_end(args);
	return false;
}

static inline void tap_skip(const char *name, const char *reason)
{
	printf("ok %u - %s # SKIP %s\n", ++tap_count, name, reason);
	fflush(stdout);
}

/* Prints the plan. Returns the exit status of the program. */
static inline int tap_end(void)
{
	printf("1..%u\n", tap_count);
	return tap_failures ? 1 : 0;
}

#endif
