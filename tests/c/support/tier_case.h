/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tier, a destination beside it, and the log of a drain, for tests of both. One test at a time.
 */
#ifndef TESTS_SUPPORT_TIER_CASE_H
#define TESTS_SUPPORT_TIER_CASE_H

#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/tier.h>

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LARGE ((size_t)6 << 20)

static struct ioshape_context *context;
static struct ioshape_tier *tier;
static struct sample sample, other;

static struct {
	unsigned count[IOSHAPE_DRAINED_WAITS + 1];
	uint64_t bytes;
	char paths[8192], why[1024];
} told;

static inline void ended(void *user, const char *path, enum ioshape_drained result, uint64_t bytes)
{
	(void)user;
	told.count[result]++;
	told.bytes += bytes;
	strcat(strcat(told.paths, path), "|");
	if (result == IOSHAPE_DRAINED_FAILED)
		snprintf(told.why, sizeof(told.why), "%s", ioshape_last_error()->sentence);
}

static inline int drain_with(ioshape_progress_fn progress, const char *path)
{
	struct ioshape_drain_options options = IOSHAPE_DRAIN_OPTIONS_INIT;

	memset(&told, 0, sizeof(told));
	options.ended = ended;
	options.progress = progress;
	options.path = path;
	return ioshape_tier_drain(tier, &options);
}

static inline int drain(void)
{
	return drain_with(NULL, NULL);
}

static inline struct ioshape_tier *open_tier(uint64_t most_bytes, uint32_t keep_last)
{
	struct ioshape_tier_options options = IOSHAPE_TIER_OPTIONS_INIT;
	struct ioshape_tier *opened;

	options.most_bytes = most_bytes;
	options.keep_last = keep_last;
	ck_assert_msg(!ioshape_tier_open(context, scratch_path("tier"), &options, &opened), "%s",
		      ioshape_last_error()->sentence);
	return opened;
}

static inline void tier_setup(void)
{
	scratch_setup();
	ck_assert_int_eq(mkdir(scratch_path("tier"), 0777), 0);
	ck_assert_int_eq(mkdir(scratch_path("there"), 0777), 0);
	sample_make(&sample, 1, LARGE);
	sample_make(&other, 2, LARGE);
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	tier = open_tier(0, 0);
}

static inline void tier_teardown(void)
{
	ioshape_tier_free(tier);
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries(scratch_path("there")), 0);
	sample_free(&other);
	sample_free(&sample);
	scratch_teardown();
}

/* Returns the path of NAME at the destination. */
static inline const char *there(const char *name)
{
	static char paths[4][4096];
	static unsigned next;
	char *path = paths[next++ % 4];

	snprintf(path, sizeof(*paths), "%s/%s", scratch_path("there"), name);
	return path;
}

static inline char *place_of(const char *name)
{
	char *copy_path;

	ck_assert_msg(!ioshape_tier_path(tier, there(name), LARGE, &copy_path), "%s",
		      ioshape_last_error()->sentence);
	return copy_path;
}

static inline void keep(const char *name)
{
	ck_assert_msg(!ioshape_tier_keep(tier, there(name), NULL), "%s",
		      ioshape_last_error()->sentence);
}

static inline void must_hold(const char *path, const struct sample *what)
{
	char why[512];

	ck_assert_msg(!sample_check(context, path, what, why, sizeof(why)), "%s", why);
}

static inline bool has_copy(const char *name)
{
	char *copy_path = NULL;
	const int ret = ioshape_tier_find(tier, there(name), &copy_path);

	ck_assert(!ret || ret == -ENOENT);
	ck_assert(!ret == (copy_path != NULL));
	free(copy_path);
	return !ret;
}

/* Returns how many copies wait to be drained, and stores how many there are in `all`. */
static inline size_t waiting(size_t *all)
{
	struct ioshape_tier_copy *copies;
	size_t count, waits = 0;

	ck_assert_int_eq(ioshape_tier_list(tier, &copies, &count), 0);
	for (size_t i = 0; i < count; i++)
		waits += copies[i].number != 0;
	free(copies);
	if (all)
		*all = count;
	return waits;
}

static inline void shift_time(const char *path, int64_t seconds)
{
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT } };
	struct stat status;

	ck_assert_int_eq(stat(path, &status), 0);
	times[1] = status.st_mtim;
	times[1].tv_sec += seconds;
	ck_assert_int_eq(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* Flips a bit without changing the file's times, as a failing disk does. */
static inline void flip(const char *path, off_t offset)
{
	const int fd = open(path, O_RDWR | O_CLOEXEC);
	struct timespec times[2];
	struct stat status;
	char byte;

	ck_assert_int_eq(fstat(fd, &status), 0);
	ck_assert_int_eq(pread(fd, &byte, 1, offset), 1);
	byte ^= 1;
	ck_assert_int_eq(pwrite(fd, &byte, 1, offset), 1);
	times[0] = status.st_atim;
	times[1] = status.st_mtim;
	ck_assert_int_eq(futimens(fd, times), 0);
	ck_assert_int_eq(close(fd), 0);
}

#endif
