/* SPDX-License-Identifier: Apache-2.0 */
/* TAP for programs whose tests may have to be skipped: libcheck cannot say that. */
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

/* Why the test that runs does not hold. */
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

/* The exit status of the program. */
static inline int tap_end(void)
{
	printf("1..%u\n", tap_count);
	return tap_failures ? 1 : 0;
}

#endif
