/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small filesystems that are really full, for tests of what saves do then. Mounting takes root; all
 * mounts are this process's own. Each program includes this once, and defines _GNU_SOURCE.
 */
#ifndef TESTS_SUPPORT_FULL_CASE_H
#define TESTS_SUPPORT_FULL_CASE_H

#include "base/base.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define LARGE_BYTES (4u << 20) /* of what is saved */
#define LEFT_BYTES (2u << 20)  /* on what is full */

static char complaint[4096];

__attribute__((format(printf, 1, 2))) static inline bool complain(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(complaint, sizeof(complaint), format, args);
	va_end(args);
	return false;
}

#define REQUIRE_SAID(condition, text)                                                              \
	do {                                                                                       \
		if (!(condition))                                                                  \
			return complain("line %d: %s: %s", __LINE__, #condition, text);            \
	} while (0)
#define REQUIRE_THAT(condition) REQUIRE_SAID(condition, "")

static struct sample old_sample, new_sample;
static char where[PATH_MAX / 2], file[PATH_MAX], filler[PATH_MAX], elsewhere[PATH_MAX];

/* ---- Filesystems ----------------------------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) static inline int shell(const char *format, ...)
{
	char command[3 * PATH_MAX];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof(command), format, args);
	va_end(args);
	return system(command);
}

static inline bool write_zeros(const char *path, uint64_t bytes)
{
	static char zeros[1 << 18];
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
	bool well = fd >= 0;

	for (uint64_t done = 0; well && done < bytes; done += sizeof(zeros))
		well = write(fd, zeros, MIN(bytes - done, sizeof(zeros))) > 0;
	if (fd >= 0) {
		fsync(fd);
		close(fd);
	}
	return well;
}

/* Leaves about so much room; what root may have besides (ext4) does not count. */
static inline void fill_up(uint64_t leave_bytes)
{
	struct statvfs status;
	uint64_t free_bytes;

	for (int tries = 0; tries < 4 && !statvfs(where, &status); tries++) {
		free_bytes = (uint64_t)status.f_bfree * status.f_frsize;
		if (free_bytes <= leave_bytes)
			return;
		write_zeros(filler, free_bytes - leave_bytes);
	}
}

static inline void make_room(void)
{
	int fd = open(where, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	unlink(filler);
	/* Until then ext4 keeps what it had. */
	if (fd >= 0) {
		syncfs(fd);
		close(fd);
	}
}

/* ---- Saves ----------------------------------------------------------------------------------- */

static struct {
	pthread_mutex_t lock;
	char lines[16384];
} heard = { .lock = PTHREAD_MUTEX_INITIALIZER };

static inline void listen_to(void *user, enum ioshape_log_level level, const char *line)
{
	size_t used;

	(void)user, (void)level;
	pthread_mutex_lock(&heard.lock);
	used = strlen(heard.lines);
	snprintf(heard.lines + used, sizeof(heard.lines) - used, "%s\n", line);
	pthread_mutex_unlock(&heard.lock);
}

static inline bool has_heard(const char *words)
{
	bool has;

	pthread_mutex_lock(&heard.lock);
	has = strstr(heard.lines, words) != NULL;
	pthread_mutex_unlock(&heard.lock);
	return has;
}

static inline struct ioshape_context *open_with_slots(enum ioshape_full full, uint32_t full_wait_ms,
						      uint32_t slots)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	char message[1024];

	options.block_bytes = 256 * 1024;
	options.queue_depth = 4;
	options.staging_bytes = 64u << 20;
	options.full = full;
	options.full_wait_ms = full_wait_ms;
	options.log = listen_to;
	/* One for all filesystems, so that what holds a slot is in everybody's way. */
	options.pool = "room";
	options.slots = slots;
	if (ioshape_context_open(&context, &options, message, sizeof(message))) {
		fprintf(stderr, "%s\n", message);
		abort();
	}
	pthread_mutex_lock(&heard.lock);
	*heard.lines = 0;
	pthread_mutex_unlock(&heard.lock);
	return context;
}

static inline struct ioshape_context *open_context(enum ioshape_full full, uint32_t full_wait_ms)
{
	return open_with_slots(full, full_wait_ms, 1);
}

static inline struct ioshape_save_options options_of(const struct sample *sample)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &sample->metadata;
	return options;
}

static inline int save_to(struct ioshape_context *context, const char *path,
			  const struct sample *sample, struct ioshape_report *report)
{
	struct ioshape_save_options options = options_of(sample);

	options.report = report;
	return ioshape_save_tensors(context, path, sample->tensors, sample->count, &options);
}

static inline bool holds(const struct sample *sample)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	char why[512] = "";
	int ret = sample_check(context, file, sample, why, sizeof(why));

	ioshape_context_free(context);
	REQUIRE_SAID(!ret, why);
	REQUIRE_SAID(!scratch_temporaries(where), "a temporary file was left");
	return true;
}

/* ---- Programs of tests ----------------------------------------------------------------------- */

static const struct kind {
	const char *name;
	const char *mount; /* what it takes, in the scratch directory */
} kinds[] = {
	{ "tmpfs", "mount -t tmpfs -o size=24M none mnt" },
	{ "ext4", "truncate -s 24M image && mkfs.ext4 -q -F image && mount -o loop image mnt" },
	{ "ext4 that reserves nothing", "truncate -s 48M image && "
					"mkfs.ext4 -q -F -O ^extent,^64bit,^has_journal image && "
					"mount -o loop image mnt" },
	{ "tmpfs with few inodes", "mount -t tmpfs -o size=24M,nr_inodes=8 none mnt" },
};

struct full_test {
	const char *name;
	bool (*test)(void);
	unsigned kinds; /* a bit for each */
};

static inline void test_one(const struct full_test *test, unsigned kind, const char *why_not)
{
	struct ioshape_context *context;
	char name[256];

	snprintf(name, sizeof(name), "%s: %s", kinds[kind].name, test->name);
	snprintf(where, sizeof(where), "%s/mnt", scratch_directory());
	snprintf(file, sizeof(file), "%s/model.pt", where);
	snprintf(filler, sizeof(filler), "%s/filler", where);
	snprintf(elsewhere, sizeof(elsewhere), "%s/elsewhere.pt", scratch_directory());
	if (!why_not && shell("cd '%s' && mkdir -p mnt && { %s; } >mount.log 2>&1",
			      scratch_directory(), kinds[kind].mount))
		why_not = "the kernel does not mount it";
	if (why_not) {
		tap_skip(name, why_not);
		return;
	}
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	if (save_to(context, file, &old_sample, NULL))
		printf("# %s\n", ioshape_context_message(context));
	ioshape_context_free(context);
	fill_up(LEFT_BYTES);
	if (!tap_ok(test->test(), "%s", name))
		printf("# %s\n", complaint);
	shell("cd '%s' && umount -l mnt; rm -f image", scratch_directory());
}

static inline int run_tests(const struct full_test *tests, unsigned count)
{
	const char *why_not = NULL;

	scratch_setup();
	if (geteuid())
		why_not = "mounting takes root";
	else if (unshare(CLONE_NEWNS) || mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL))
		why_not = "mounts of one's own are not allowed here";
	sample_make(&old_sample, 1, 1u << 20);
	sample_make(&new_sample, 2, LARGE_BYTES);
	for (unsigned kind = 0; kind < ARRAY_LENGTH(kinds); kind++) {
		for (unsigned test = 0; test < count; test++) {
			if (tests[test].kinds & 1u << kind)
				test_one(&tests[test], kind, why_not);
		}
	}
	sample_free(&old_sample);
	sample_free(&new_sample);
	scratch_teardown();
	return tap_end();
}

#endif
