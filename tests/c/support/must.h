/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Assertions of test helpers. They also work in programs without libcheck, and in children of
 * tests.
 */
#ifndef TESTS_SUPPORT_MUST_H
#define TESTS_SUPPORT_MUST_H

#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MUST(condition, ...)                                                                       \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			int must_code = errno;                                                     \
                                                                                                   \
			fprintf(stderr, "%s:%d: %s (%s): ", __FILE__, __LINE__, #condition,        \
				strerror(must_code));                                              \
			fprintf(stderr, __VA_ARGS__);                                              \
			fputc('\n', stderr);                                                       \
			ck_abort_msg(__VA_ARGS__);                                                 \
		}                                                                                  \
	} while (0)

#endif
