/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves that do not fit, on small filesystems that are really full: they say so before they queue,
 * wait for room, or are skipped. Mounting takes root; all mounts are this process's own.
 */
#define _GNU_SOURCE
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

__attribute__((format(printf, 1, 2))) static bool complain(const char *format, ...)
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

__attribute__((format(printf, 1, 2))) static int shell(const char *format, ...)
{
	char command[3 * PATH_MAX];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof(command), format, args);
	va_end(args);
	return system(command);
}

static bool write_zeros(const char *path, uint64_t bytes)
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
static void fill_up(uint64_t leave_bytes)
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

static void make_room(void)
{
	unlink(filler);
	sync();
}

static void *make_room_soon(void *unused)
{
	usleep(300000);
	make_room();
	return unused;
}

/* ---- Saves ----------------------------------------------------------------------------------- */

static struct {
	pthread_mutex_t lock;
	char lines[16384];
} heard = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void listen_to(void *user, enum ioshape_log_level level, const char *line)
{
	size_t used;

	(void)user, (void)level;
	pthread_mutex_lock(&heard.lock);
	used = strlen(heard.lines);
	snprintf(heard.lines + used, sizeof(heard.lines) - used, "%s\n", line);
	pthread_mutex_unlock(&heard.lock);
}

static bool has_heard(const char *words)
{
	bool has;

	pthread_mutex_lock(&heard.lock);
	has = strstr(heard.lines, words) != NULL;
	pthread_mutex_unlock(&heard.lock);
	return has;
}

static struct ioshape_context *open_context(enum ioshape_full full, uint32_t full_wait_ms)
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
	options.slots = 1;
	if (ioshape_context_open(&context, &options, message, sizeof(message))) {
		fprintf(stderr, "%s\n", message);
		abort();
	}
	pthread_mutex_lock(&heard.lock);
	*heard.lines = 0;
	pthread_mutex_unlock(&heard.lock);
	return context;
}

static struct ioshape_save_options options_of(const struct sample *sample)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &sample->metadata;
	return options;
}

static int save_to(struct ioshape_context *context, const char *path, const struct sample *sample,
		   struct ioshape_report *report)
{
	struct ioshape_save_options options = options_of(sample);

	options.report = report;
	return ioshape_save_tensors(context, path, sample->tensors, sample->count, &options);
}

static struct ioshape_save *begin(struct ioshape_context *context, const char *path,
				  const struct sample *sample)
{
	struct ioshape_save_options options = options_of(sample);
	struct ioshape_save *save = NULL;

	if (ioshape_save_tensors_async(context, path, sample->tensors, sample->count, &options,
				       &save))
		fprintf(stderr, "%s\n", ioshape_context_message(context));
	return save;
}

static bool holds(const struct sample *sample)
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

/* It waits for room, and has told so. */
static bool is_waiting(struct ioshape_save *save)
{
	enum ioshape_phase phase = IOSHAPE_PHASE_DONE;

	for (int tries = 0; tries < 500; tries++) {
		ioshape_save_progress(save, &phase, NULL, NULL);
		if (phase == IOSHAPE_PHASE_WAIT && has_heard("waits for room"))
			return true;
		usleep(10000);
	}
	return false;
}

/* ---- fail ------------------------------------------------------------------------------------ */

static bool says_it_all(const char *message)
{
	REQUIRE_SAID(strstr(message, file), message);
	REQUIRE_SAID(strstr(message, "it needs 4"), message);
	REQUIRE_SAID(strstr(message, "are free on its filesystem ("), message);
	REQUIRE_SAID(strstr(message, "save elsewhere"), message);
	REQUIRE_SAID(strstr(message, "No space left"), message);
	return true;
}

static bool fails_before_it_queues(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_writer_options writer_options = IOSHAPE_WRITER_OPTIONS_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_slot *slot = NULL;
	struct ioshape_writer *writer;
	struct ioshape_file *raw;
	struct ioshape_save *save;

	/* Somebody has the only slot: who would queue would wait for ever. */
	REQUIRE_SAID(!ioshape_slot_acquire(context, NULL, &slot), ioshape_context_message(context));
	REQUIRE_THAT(save_to(context, file, &new_sample, &report) == -ENOSPC);
	if (!says_it_all(ioshape_context_message(context)))
		return false;
	REQUIRE_THAT(strstr(ioshape_context_message(context), "full=wait or full=skip"));
	REQUIRE_THAT(report.position == 0 && !report.skipped && *report.filesystem);
	save = begin(context, file, &new_sample);
	REQUIRE_SAID(ioshape_save_wait(save, 10000) == -ENOSPC, ioshape_save_message(save));
	if (!says_it_all(ioshape_save_message(save)))
		return false;
	ioshape_save_free(save);
	writer_options.expected_bytes = file_options.expected_bytes = LARGE_BYTES;
	REQUIRE_THAT(ioshape_writer_open(context, file, &writer_options, &writer) == -ENOSPC);
	REQUIRE_THAT(ioshape_file_open(context, file, &file_options, &raw) == -ENOSPC);
	REQUIRE_THAT(says_it_all(ioshape_context_message(context)));
	ioshape_slot_release(slot);
	ioshape_context_free(context);
	return holds(&old_sample);
}

/* What fits is saved; what is small is not even looked at. */
static bool what_fits_is_saved(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct sample small, fitting;
	int ret;

	sample_make(&small, 3, 1000);
	sample_make(&fitting, 3, LEFT_BYTES / 2);
	ret = save_to(context, file, &small, NULL);
	REQUIRE_SAID(!ret, ioshape_context_message(context));
	ret = save_to(context, file, &fitting, NULL);
	REQUIRE_SAID(!ret, ioshape_context_message(context));
	REQUIRE_THAT(holds(&fitting));
	sample_free(&small);
	sample_free(&fitting);
	ioshape_context_free(context);
	return true;
}

/* ---- skip ------------------------------------------------------------------------------------ */

static bool is_skipped(int ret, const struct ioshape_report *report, const char *message)
{
	REQUIRE_SAID(ret == IOSHAPE_E_SKIPPED, message);
	REQUIRE_THAT(report->skipped == 1 && report->fallbacks >= 1);
	REQUIRE_SAID(strstr(report->fallback_text, "it needs 4"), report->fallback_text);
	REQUIRE_SAID(!strstr(report->fallback_text, "; "), report->fallback_text);
	REQUIRE_THAT(!report->file_bytes && *report->filesystem);
	REQUIRE_SAID(has_heard("skipped (full=skip)"), heard.lines);
	return strstr(message, "skipped") && says_it_all(message);
}

static bool skips(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_SKIP, 0);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *raw;
	struct ioshape_save *save;
	int ret;

	ret = save_to(context, file, &new_sample, &report);
	if (!is_skipped(ret, &report, ioshape_context_message(context)))
		return false;
	*heard.lines = 0;
	save = begin(context, file, &new_sample);
	ret = ioshape_save_wait(save, -1);
	ioshape_save_report(save, &report);
	if (!is_skipped(ret, &report, ioshape_save_message(save)))
		return false;
	ioshape_save_free(save);
	file_options.expected_bytes = LARGE_BYTES;
	ret = ioshape_file_open(context, file, &file_options, &raw);
	REQUIRE_THAT(ret == IOSHAPE_E_SKIPPED && !raw);
	/* Not announced: it is found out in the middle. */
	REQUIRE_THAT(!ioshape_file_open(context, file, NULL, &raw));
	for (ret = 0; !ret;)
		ret = ioshape_file_write(raw, new_sample.expected[4], 1 << 20);
	REQUIRE_SAID(ret == IOSHAPE_E_SKIPPED, ioshape_file_message(raw));
	ioshape_file_free(raw);
	REQUIRE_THAT(holds(&old_sample));
	make_room();
	REQUIRE_THAT(!save_to(context, file, &new_sample, &report) && !report.skipped);
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* A device that is full is not skipped: what it got is gone. */
static bool a_device_is_not_skipped(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_SKIP, 0);

	REQUIRE_THAT(save_to(context, "/dev/full", &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	context = open_context(IOSHAPE_FULL_WAIT, 60000);
	REQUIRE_THAT(save_to(context, "/dev/full", &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	return true;
}

/* ---- wait ------------------------------------------------------------------------------------ */

static bool waits(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *raw;
	pthread_t thread;

	pthread_create(&thread, NULL, make_room_soon, NULL);
	REQUIRE_SAID(!save_to(context, file, &new_sample, &report), ioshape_context_message(context));
	pthread_join(thread, NULL);
	REQUIRE_THAT(report.total_s >= 0.25 && report.slot_s < 0.2);
	REQUIRE_SAID(strstr(report.fallback_text, "waited 0."), report.fallback_text);
	REQUIRE_SAID(has_heard("waits for room, at most 60.0 s"), heard.lines);
	REQUIRE_SAID(has_heard("goes on after waiting 0."), heard.lines);
	REQUIRE_THAT(holds(&new_sample));
	fill_up(LEFT_BYTES);
	pthread_create(&thread, NULL, make_room_soon, NULL);
	file_options.expected_bytes = LARGE_BYTES;
	REQUIRE_THAT(!ioshape_file_open(context, file, &file_options, &raw));
	pthread_join(thread, NULL);
	ioshape_file_free(raw);
	ioshape_context_free(context);
	return true;
}

static bool waits_so_long(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 300);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	uint64_t begin_ns = base_now_ns();

	REQUIRE_THAT(save_to(context, file, &new_sample, &report) == -ENOSPC);
	REQUIRE_THAT(base_seconds(base_now_ns() - begin_ns) >= 0.3);
	REQUIRE_THAT(report.total_s < 5);
	REQUIRE_SAID(strstr(ioshape_context_message(context), "after waiting 0.3 s"), ioshape_context_message(context));
	REQUIRE_THAT(says_it_all(ioshape_context_message(context)));
	ioshape_context_free(context);
	return holds(&old_sample);
}

static int stop_after_a_while(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)done, (void)total;
	return phase == IOSHAPE_PHASE_WAIT && ++*(unsigned *)user > 3;
}

static bool waiting_is_ended(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save_options options = options_of(&new_sample);
	struct ioshape_save *save = begin(context, file, &new_sample);
	unsigned calls = 0;

	REQUIRE_THAT(is_waiting(save));
	ioshape_save_cancel(save);
	REQUIRE_THAT(ioshape_save_wait(save, 5000) == -ECANCELED);
	ioshape_save_free(save);
	options.progress = stop_after_a_while;
	options.progress_user = &calls;
	REQUIRE_THAT(ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count,
					  &options) == -ECANCELED);
	REQUIRE_THAT(strstr(ioshape_context_message(context), "waited for room"));
	/* And by freeing everything. */
	save = begin(context, file, &new_sample);
	REQUIRE_THAT(is_waiting(save));
	ioshape_context_free(context);
	ioshape_save_free(save);
	return holds(&old_sample);
}

static bool who_waits_is_in_nobodys_way(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save *save = begin(context, file, &new_sample);

	REQUIRE_THAT(is_waiting(save));
	REQUIRE_SAID(!save_to(context, elsewhere, &new_sample, NULL), ioshape_context_message(context));
	REQUIRE_THAT(!ioshape_save_poll(save));
	unlink(elsewhere);
	make_room();
	REQUIRE_SAID(!ioshape_save_wait(save, 10000), ioshape_save_message(save));
	ioshape_save_free(save);
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* There is room for one at a time, and the last one is what stays. */
static bool order_is_kept(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save *first = begin(context, file, &new_sample), *second;
	struct sample last;

	sample_make(&last, 4, LARGE_BYTES);
	REQUIRE_THAT(is_waiting(first));
	second = begin(context, file, &last);
	unlink(file);
	make_room();
	fill_up(LARGE_BYTES + LARGE_BYTES / 2);
	REQUIRE_SAID(!ioshape_save_wait(first, 10000), ioshape_save_message(first));
	REQUIRE_THAT(ioshape_save_wait(second, 100) == -ETIMEDOUT && holds(&new_sample));
	/* The first file is in its way, and will be until there is room. */
	make_room();
	REQUIRE_SAID(!ioshape_save_wait(second, 10000), ioshape_save_message(second));
	REQUIRE_THAT(holds(&last));
	ioshape_save_free(first);
	ioshape_save_free(second);
	sample_free(&last);
	ioshape_context_free(context);
	return true;
}

/* ---- What killed writers left is room -------------------------------------------------------- */

static int die_at(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)done, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE)
		raise(SIGKILL);
	return 0;
}

static int save_and_die(void *unused)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct ioshape_save_options options = options_of(&new_sample);

	(void)unused;
	options.progress = die_at;
	ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count, &options);
	return 0;
}

static bool the_dead_make_room(void)
{
	struct ioshape_context *context;

	make_room();
	scratch_in_child(save_and_die, NULL);
	REQUIRE_THAT(scratch_temporaries(where) == 1);
	fill_up(LEFT_BYTES);
	context = open_context(IOSHAPE_FULL_FAIL, 0);
	REQUIRE_SAID(!save_to(context, file, &new_sample, NULL), ioshape_context_message(context));
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* ---- Found out late: the filesystem reserves nothing, and another writer takes the room ------- */

static int fill_it(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	atomic_uint *times = user;

	(void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && atomic_load(times)) {
		atomic_fetch_sub(times, 1);
		fill_up(0);
	}
	return 0;
}

static bool found_out_late(void)
{
	static const enum ioshape_full rules[] = { IOSHAPE_FULL_FAIL, IOSHAPE_FULL_SKIP,
						   IOSHAPE_FULL_WAIT };
	static const int codes[] = { -ENOSPC, IOSHAPE_E_SKIPPED, 0 };

	for (size_t i = 0; i < 2 * ARRAY_LENGTH(rules); i++) {
		struct ioshape_context *context = open_context(rules[i / 2], 60000);
		struct ioshape_save_options options = options_of(&new_sample);
		struct ioshape_report report = IOSHAPE_REPORT_INIT;
		struct ioshape_save *save = NULL;
		atomic_uint times = 1;
		pthread_t thread;
		int ret;

		make_room();
		REQUIRE_THAT(!save_to(context, file, &old_sample, NULL));
		options.progress = fill_it;
		options.progress_user = &times;
		ret = ioshape_save_tensors_async(context, file, new_sample.tensors,
						 new_sample.count, &options, &save);
		REQUIRE_THAT(!ret && save);
		if (codes[i / 2] == 0) {
			REQUIRE_SAID(is_waiting(save), heard.lines);
			/* The room that its first try had is given back. */
			REQUIRE_THAT(!scratch_temporaries(where));
			pthread_create(&thread, NULL, make_room_soon, NULL);
			pthread_join(thread, NULL);
		}
		ret = ioshape_save_wait(save, 20000);
		ioshape_save_report(save, &report);
		REQUIRE_SAID(!atomic_load(&times), "it was not filled");
		REQUIRE_SAID(ret == codes[i / 2], ioshape_save_message(save));
		REQUIRE_THAT(report.skipped == (ret == IOSHAPE_E_SKIPPED));
		REQUIRE_SAID(ret || strstr(report.fallback_text, "waited "), report.fallback_text);
		ioshape_save_free(save);
		ioshape_context_free(context);
		if (!holds(ret ? &old_sample : &new_sample))
			return false;
	}
	return true;
}

/* Bytes that a caller brings once cannot be written again. */
static int fetch_zeros(void *user, uint64_t offset, void *into, size_t bytes)
{
	(void)user, (void)offset;
	memset(into, 0, bytes);
	return 0;
}

static bool what_cannot_be_repeated_fails(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	const struct ioshape_record record = { .name = "data.pkl",
					       .bytes = LARGE_BYTES,
					       .fetch = fetch_zeros };
	atomic_uint times = 1;
	int ret;

	make_room();
	options.progress = fill_it;
	options.progress_user = &times;
	ret = ioshape_save_records(context, file, &record, 1, &options);
	REQUIRE_THAT(ret == -ENOSPC);
	REQUIRE_SAID(strstr(ioshape_context_message(context), "not tried again"), ioshape_context_message(context));
	ioshape_context_free(context);
	return !scratch_temporaries(where);
}

/* ---- Inodes: statfs() shows room, and nothing can be created ---------------------------------- */

static bool no_inodes(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	char path[PATH_MAX + 16];
	pthread_t thread;
	int ret;

	make_room();
	write_zeros(filler, 1);
	for (unsigned i = 0; i < 100; i++) {
		snprintf(path, sizeof(path), "%s/small%u", where, i);
		if (!write_zeros(path, 1))
			break;
	}
	ret = save_to(context, file, &new_sample, NULL);
	REQUIRE_THAT(ret == -ENOSPC);
	REQUIRE_SAID(strstr(ioshape_context_message(context), "are free on the whole filesystem"), ioshape_context_message(context));
	ioshape_context_free(context);
	context = open_context(IOSHAPE_FULL_WAIT, 400);
	REQUIRE_THAT(save_to(context, file, &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	context = open_context(IOSHAPE_FULL_WAIT, 60000);
	pthread_create(&thread, NULL, make_room_soon, NULL);
	ret = save_to(context, file, &new_sample, &report);
	pthread_join(thread, NULL);
	REQUIRE_SAID(!ret, ioshape_context_message(context));
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* ---- Groups ---------------------------------------------------------------------------------- */

#define RANKS 2

struct scene {
	enum ioshape_full full;
	enum ioshape_mode mode;
	bool background;
	int code;
	uint32_t full_wait_ms;
};

static const struct scene *scene;

static int play_rank(void *argument)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_save_options save_options = options_of(&new_sample);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *context;
	struct ioshape_group *group;
	struct ioshape_save *save;
	const char *message;
	char checkpoints[PATH_MAX];
	uint64_t latest = 0;
	int ret;

	options.rank = (uint32_t)(uintptr_t)argument;
	options.ranks = options.local_ranks = RANKS;
	options.mode = scene->mode;
	options.token = scratch_directory();
	/* Shorter than what is waited for room: ranks are alive meanwhile. */
	options.deadline_ms = 1000;
	context = open_context(scene->full, scene->full_wait_ms);
	snprintf(checkpoints, sizeof(checkpoints), "%s/runs/checkpoints", where);
	if (ioshape_group_open(context, checkpoints, &options, &group)) {
		fprintf(stderr, "%s\n", ioshape_context_message(context));
		return 10;
	}
	if (ioshape_group_save_tensors_async(group, 2, new_sample.tensors, new_sample.count,
					     &save_options, &save))
		return 11;
	ret = ioshape_save_wait(save, 20000);
	ioshape_save_report(save, &report);
	message = ioshape_save_message(save);
	if (ret != scene->code) {
		fprintf(stderr, "rank %u: %d %s\n", options.rank, ret, message);
		return 12;
	}
	if (report.skipped != (ret == IOSHAPE_E_SKIPPED))
		return 13;
	if (ret && (!strstr(message, "it needs 8") || !strstr(message, checkpoints))) {
		fprintf(stderr, "rank %u: %s\n", options.rank, message);
		return 14;
	}
	if (report.skipped && !strstr(report.fallback_text, "it needs 8"))
		return 15;
	if (!ret && !options.rank && !strstr(report.fallback_text, "waited "))
		return 16;
	ret = ioshape_group_latest(group, &latest);
	if (scene->code ? ret != -ENOENT : ret || latest != 2)
		return 17;
	ioshape_save_free(save);
	ioshape_group_free(group);
	ioshape_context_free(context);
	return 0;
}

/* All ranks of a scene; the statuses of those that did not end well. */
static bool play(const struct scene *which, useconds_t room_after_us)
{
	pid_t pids[RANKS];
	bool well = true;
	int status;

	scene = which;
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		pids[rank] = fork();
		if (!pids[rank])
			scratch_leave_child(play_rank((void *)(uintptr_t)rank));
	}
	if (room_after_us) {
		usleep(room_after_us);
		make_room();
	}
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		waitpid(pids[rank], &status, 0);
		if (status && well) {
			snprintf(complaint, sizeof(complaint),
				 "full %d, mode %d, rank %u: status %x", which->full, which->mode,
				 rank, status);
			well = false;
		}
	}
	return well;
}

static bool leaves_nothing(void)
{
	REQUIRE_THAT(!shell("[ -z \"$(find '%s/runs' -name '*step*' 2>/dev/null)\" ]", where));
	return true;
}

static bool groups_fail_or_skip(void)
{
	for (enum ioshape_mode mode = IOSHAPE_MODE_EACH; mode <= IOSHAPE_MODE_RANK0; mode++) {
		const struct scene fails = { IOSHAPE_FULL_FAIL, mode, true, -ENOSPC, 0 };
		const struct scene skipping = { IOSHAPE_FULL_SKIP, mode, true, IOSHAPE_E_SKIPPED,
						0 };

		if (!play(&fails, 0) || !leaves_nothing() || !play(&skipping, 0) ||
		    !leaves_nothing())
			return false;
	}
	return holds(&old_sample);
}

static bool groups_wait(void)
{
	for (enum ioshape_mode mode = IOSHAPE_MODE_EACH; mode <= IOSHAPE_MODE_RANK0; mode++) {
		const struct scene waiting = { IOSHAPE_FULL_WAIT, mode, true, 0, 60000 };

		if (!play(&waiting, mode == IOSHAPE_MODE_EACH ? 1700000 : 400000))
			return false;
		shell("rm -rf '%s/runs'", where);
		fill_up(LEFT_BYTES);
	}
	const struct scene too_long = { IOSHAPE_FULL_WAIT, IOSHAPE_MODE_NODE, true, -ENOSPC, 300 };

	return play(&too_long, 0) && leaves_nothing();
}

/* ---- All of them ----------------------------------------------------------------------------- */

static const struct kind {
	const char *name;
	const char *mount; /* what it takes, in the scratch directory */
} kinds[] = {
	{ "tmpfs", "mount -t tmpfs -o size=24M none mnt" },
	{ "ext4", "truncate -s 24M image && mkfs.ext4 -q -F image && mount -o loop image mnt" },
	{ "ext4 that reserves nothing", "truncate -s 24M image && "
					"mkfs.ext4 -q -F -O ^extent,^64bit,^has_journal image && "
					"mount -o loop image mnt" },
	{ "tmpfs with few inodes", "mount -t tmpfs -o size=24M,nr_inodes=8 none mnt" },
};

static const struct {
	const char *name;
	bool (*test)(void);
	unsigned kinds; /* a bit for each */
} tests[] = {
	{ "what does not fit fails before it queues", fails_before_it_queues, 3 },
	{ "what fits is saved", what_fits_is_saved, 3 },
	{ "what does not fit is skipped", skips, 3 },
	{ "a device is not skipped", a_device_is_not_skipped, 1 },
	{ "a save waits for room", waits, 3 },
	{ "it waits so long", waits_so_long, 1 },
	{ "waiting is ended", waiting_is_ended, 1 },
	{ "who waits is in nobody's way", who_waits_is_in_nobodys_way, 1 },
	{ "saves to one file keep their order", order_is_kept, 1 },
	{ "what the dead left is room", the_dead_make_room, 3 },
	{ "a group that does not fit fails, or is skipped", groups_fail_or_skip, 1 },
	{ "a group waits for room", groups_wait, 1 },
	{ "found out in the middle", found_out_late, 4 },
	{ "what cannot be repeated fails", what_cannot_be_repeated_fails, 4 },
	{ "no inodes", no_inodes, 8 },
};

static void test_one(unsigned test, unsigned kind, const char *why_not)
{
	struct ioshape_context *context;
	char name[256];

	snprintf(name, sizeof(name), "%s: %s", kinds[kind].name, tests[test].name);
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
	if (!tap_ok(tests[test].test(), "%s", name))
		printf("# %s\n", complaint);
	shell("cd '%s' && umount -l mnt; rm -f image", scratch_directory());
}

int main(void)
{
	const char *why_not = NULL;

	scratch_setup();
	if (geteuid())
		why_not = "mounting takes root";
	else if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		why_not = "mounts of one's own are not allowed here";
	sample_make(&old_sample, 1, 1u << 20);
	sample_make(&new_sample, 2, LARGE_BYTES);
	for (unsigned kind = 0; kind < ARRAY_LENGTH(kinds); kind++) {
		for (unsigned test = 0; test < ARRAY_LENGTH(tests); test++) {
			if (tests[test].kinds & 1u << kind)
				test_one(test, kind, why_not);
		}
	}
	sample_free(&old_sample);
	sample_free(&new_sample);
	scratch_teardown();
	return tap_end();
}
