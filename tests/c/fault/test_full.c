/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves that do not fit on a small, really full filesystem: they fail before they queue, or are
 * skipped. Mounting needs root; all mounts belong to this process.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/open_context.h"
#include "support/report_downgrade.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <ioshape/group.h>
#include <ioshape/slots.h>

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

#define LARGE_BYTES (4u << 20) /* size of a save */
#define LEFT_BYTES (2u << 20)  /* free space on a full filesystem */

#define REQUIRE_SAID(condition, text)                                                              \
	do {                                                                                       \
		if (!(condition))                                                                  \
			return complain("line %d: %s: %s", __LINE__, #condition, text);            \
	} while (0)
#define REQUIRE_THAT(condition) REQUIRE_SAID(condition, "")

static struct sample old_sample, new_sample;
static char where[PATH_MAX / 2], file[PATH_MAX], filler[PATH_MAX];

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

/*
 * Fills the filesystem until about so many bytes are free for users. The reserve of root (ext4) is
 * not counted.
 */
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

static void free_space(void)
{
	int fd = open(where, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	unlink(filler);
	/* ext4 frees the space of a removed file only when it syncs. */
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

static struct ioshape_context *open_context(enum ioshape_full full)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	options.staging_bytes = 64u << 20;
	options.full = full;
	options.log = listen_to;
	/* All filesystems share one pool, so that a held slot blocks every save. */
	options.pool = "full";
	options.slots = 1;
	if (open_context_with(&context, &options,
			      (struct test_rules){ .block_bytes = 256 * 1024, .queue_depth = 4 })) {
		fprintf(stderr, "%s\n", ioshape_last_error()->sentence);
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
	return ioshape_save_tensors(context, path, sample->tensors, sample->count, &options, NULL);
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

static struct ioshape_save *begin(struct ioshape_context *context, const char *path,
				  const struct sample *sample)
{
	struct ioshape_save_options options = options_of(sample);
	struct ioshape_save *save = NULL;

	if (ioshape_save_tensors(context, path, sample->tensors, sample->count, &options, &save))
		fprintf(stderr, "%s\n", ioshape_last_error()->sentence);
	return save;
}

/* ---- fail ------------------------------------------------------------------------------------ */

static bool says_it_all(void)
{
	const struct ioshape_error *error = ioshape_last_error();

	REQUIRE_SAID(!strcmp(error->path, file), error->path);
	REQUIRE_SAID(error->needed_bytes >= LARGE_BYTES, error->sentence);
	REQUIRE_SAID(error->free_bytes < error->needed_bytes, error->sentence);
	REQUIRE_SAID(*error->remedy, error->sentence);
	return true;
}

static bool fails_before_it_queues(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_slot *slot = NULL;
	struct ioshape_file *raw;
	struct ioshape_save *save;

	/* The only slot is taken, so a save that queued would wait forever. */
	REQUIRE_SAID(!ioshape_slot_acquire(context, NULL, &slot), ioshape_last_error()->sentence);
	REQUIRE_THAT(save_to(context, file, &new_sample, &report) == -ENOSPC);
	if (!says_it_all())
		return false;
	REQUIRE_THAT(*ioshape_last_error()->remedy);
	REQUIRE_THAT(!*report.ahead && *report.filesystem);
	save = begin(context, file, &new_sample);
	REQUIRE_SAID(ioshape_save_wait(save, 10000) == -ENOSPC, ioshape_last_error()->sentence);
	if (!says_it_all())
		return false;
	ioshape_save_free(save);
	file_options.expected_bytes = LARGE_BYTES;
	REQUIRE_THAT(ioshape_file_open(context, file, &file_options, &raw) == -ENOSPC);
	REQUIRE_THAT(says_it_all());
	ioshape_slot_free(slot);
	ioshape_context_free(context);
	return holds(&old_sample);
}

/* Checks that a save that fits succeeds. The free space is not checked for small ones. */
static bool what_fits_is_saved(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL);
	struct sample small, fitting;
	int ret;

	sample_make(&small, 3, 1000);
	sample_make(&fitting, 3, LEFT_BYTES / 2);
	ret = save_to(context, file, &small, NULL);
	REQUIRE_SAID(!ret, ioshape_last_error()->sentence);
	ret = save_to(context, file, &fitting, NULL);
	REQUIRE_SAID(!ret, ioshape_last_error()->sentence);
	REQUIRE_THAT(holds(&fitting));
	sample_free(&small);
	sample_free(&fitting);
	ioshape_context_free(context);
	return true;
}

/* ---- skip ------------------------------------------------------------------------------------ */

static bool is_skipped(int ret, const struct ioshape_report *report)
{
	REQUIRE_SAID(ret == IOSHAPE_E_SKIPPED, ioshape_last_error()->sentence);
	REQUIRE_SAID(report_downgrade(report, IOSHAPE_DOWNGRADE_SKIPPED),
		     report->downgrades[0].sentence);
	REQUIRE_THAT(!report->file_bytes && *report->filesystem);
	REQUIRE_SAID(has_heard("skipped (full=skip)"), heard.lines);
	return says_it_all();
}

static bool skips(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_SKIP);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *raw;
	struct ioshape_save *save;
	int ret;

	ret = save_to(context, file, &new_sample, &report);
	if (!is_skipped(ret, &report))
		return false;
	*heard.lines = 0;
	save = begin(context, file, &new_sample);
	ret = ioshape_save_wait(save, -1);
	ioshape_save_get_report(save, &report);
	if (!is_skipped(ret, &report))
		return false;
	ioshape_save_free(save);
	file_options.expected_bytes = LARGE_BYTES;
	ret = ioshape_file_open(context, file, &file_options, &raw);
	REQUIRE_THAT(ret == IOSHAPE_E_SKIPPED && !raw);
	/* The size was not announced, so the write that does not fit fails. */
	REQUIRE_THAT(!ioshape_file_open(context, file, NULL, &raw));
	for (ret = 0; !ret;)
		ret = ioshape_file_write(raw, new_sample.expected[4], 1 << 20);
	REQUIRE_SAID(ret == IOSHAPE_E_SKIPPED, ioshape_last_error()->sentence);
	ioshape_file_free(raw);
	REQUIRE_THAT(holds(&old_sample));
	free_space();
	REQUIRE_THAT(!save_to(context, file, &new_sample, &report));
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* Checks that a full device is not skipped, because what was written to it before is lost. */
static bool a_device_is_not_skipped(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_SKIP);

	REQUIRE_THAT(save_to(context, "/dev/full", &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	return true;
}

/* ---- Files of killed writers are removed when space is needed -------------------------------- */

static int die_at(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)done, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE)
		raise(SIGKILL);
	return 0;
}

static int save_and_die(void *unused)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL);
	struct ioshape_save_options options = options_of(&new_sample);

	(void)unused;
	options.progress = die_at;
	ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count, &options, NULL);
	return 0;
}

static bool what_the_dead_left_is_freed(void)
{
	struct ioshape_context *context;

	free_space();
	scratch_in_child(save_and_die, NULL);
	REQUIRE_THAT(scratch_temporaries(where) == 1);
	fill_up(LEFT_BYTES);
	context = open_context(IOSHAPE_FULL_FAIL);
	REQUIRE_SAID(!save_to(context, file, &new_sample, NULL), ioshape_last_error()->sentence);
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* ---- Full in the middle of a save: nothing is reserved, and another writer takes the space --- */

static int fill_once(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	atomic_bool *filled = user;

	(void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !atomic_exchange(filled, true))
		fill_up(0);
	return 0;
}

static bool found_out_late(void)
{
	static const enum ioshape_full rules[] = { IOSHAPE_FULL_FAIL, IOSHAPE_FULL_SKIP };
	static const int codes[] = { -ENOSPC, IOSHAPE_E_SKIPPED };

	for (size_t i = 0; i < ARRAY_LENGTH(rules); i++) {
		struct ioshape_context *context = open_context(rules[i]);
		struct ioshape_save_options options = options_of(&new_sample);
		struct ioshape_report report = IOSHAPE_REPORT_INIT;
		struct ioshape_save *save = NULL;
		atomic_bool filled = false;
		int ret;

		free_space();
		REQUIRE_THAT(!save_to(context, file, &old_sample, NULL));
		options.progress = fill_once;
		options.progress_user = &filled;
		ret = ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count,
					   &options, &save);
		REQUIRE_THAT(!ret && save);
		ret = ioshape_save_wait(save, 20000);
		ioshape_save_get_report(save, &report);
		REQUIRE_SAID(atomic_load(&filled), "it was not filled");
		REQUIRE_SAID(ret == codes[i], ioshape_last_error()->sentence);
		REQUIRE_THAT(!report_downgrade(&report, IOSHAPE_DOWNGRADE_SKIPPED) ==
			     (ret != IOSHAPE_E_SKIPPED));
		ioshape_save_free(save);
		ioshape_context_free(context);
		if (!holds(&old_sample))
			return false;
	}
	return true;
}

/* ---- No free inodes: statfs() shows free space, but no file can be created ------------------- */

static bool no_inodes(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL);
	char path[PATH_MAX + 16];
	int ret;

	free_space();
	write_zeros(filler, 1);
	for (unsigned i = 0; i < 100; i++) {
		snprintf(path, sizeof(path), "%s/small%u", where, i);
		if (!write_zeros(path, 1))
			break;
	}
	ret = save_to(context, file, &new_sample, NULL);
	REQUIRE_THAT(ret == -ENOSPC);
	REQUIRE_SAID(*ioshape_last_error()->remedy, ioshape_last_error()->sentence);
	ioshape_context_free(context);
	return holds(&old_sample);
}

/* ---- Groups ---------------------------------------------------------------------------------- */

#define RANKS 2

struct scene {
	enum ioshape_full full;
	enum ioshape_mode mode;
	int code;
};

static int play_rank(const struct scene *scene, uint32_t rank)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_save_options save_options;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *context;
	struct ioshape_group *group;
	const struct ioshape_error *error;
	char checkpoints[PATH_MAX];
	uint64_t latest = 0;
	struct sample sample;
	int ret;

	/* Equal parts of ranks would be stored once. */
	sample_make(&sample, 100 + rank, LARGE_BYTES);
	save_options = options_of(&sample);
	options.rank = rank;
	options.ranks = options.local_ranks = RANKS;
	options.mode = scene->mode;
	options.token = scratch_directory();
	options.deadline_ms = 20000;
	context = open_context(scene->full);
	snprintf(checkpoints, sizeof(checkpoints), "%s/runs/checkpoints", where);
	if (ioshape_group_open(context, checkpoints, &options, &group)) {
		fprintf(stderr, "%s\n", ioshape_last_error()->sentence);
		return 10;
	}
	save_options.report = &report;
	ret = ioshape_group_save_tensors(group, 2, sample.tensors, sample.count, &save_options,
					 NULL);
	error = ioshape_last_error();
	if (ret != scene->code || error->code != ret) {
		fprintf(stderr, "rank %u: %d %s\n", options.rank, ret, error->sentence);
		return 11;
	}
	if (!report_downgrade(&report, IOSHAPE_DOWNGRADE_SKIPPED) != (ret != IOSHAPE_E_SKIPPED))
		return 12;
	/*
	 * The sizes are those of all parts. Rank 0 has checked the space, and the other ranks
	 * report its error.
	 */
	if (error->needed_bytes < RANKS * LARGE_BYTES || error->free_bytes > LEFT_BYTES)
		return 13;
	if (ioshape_group_get_latest(group, NULL, &latest) != -ENOENT)
		return 15;
	ioshape_group_free(group);
	ioshape_context_free(context);
	sample_free(&sample);
	return 0;
}

/* Runs all ranks of a scene. Returns whether all of them ended with 0 and left no attempt. */
static bool play(const struct scene *scene)
{
	pid_t pids[RANKS];
	bool well = true;
	int status;

	for (uint32_t rank = 0; rank < RANKS; rank++) {
		pids[rank] = fork();
		if (!pids[rank])
			scratch_leave_child(play_rank(scene, rank));
	}
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		waitpid(pids[rank], &status, 0);
		if (status && well) {
			snprintf(complaint, sizeof(complaint),
				 "full %d, mode %d, rank %u: status %x", scene->full, scene->mode,
				 rank, status);
			well = false;
		}
	}
	/* Nothing may remain of the attempt. */
	return well && !shell("[ -z \"$(find '%s/runs' -name '*step*' 2>/dev/null)\" ]", where);
}

static bool groups_fail_or_skip(void)
{
	for (enum ioshape_mode mode = IOSHAPE_MODE_EACH; mode <= IOSHAPE_MODE_RANK0; mode++) {
		const struct scene fails = { IOSHAPE_FULL_FAIL, mode, -ENOSPC };
		const struct scene skipping = { IOSHAPE_FULL_SKIP, mode, IOSHAPE_E_SKIPPED };

		if (!play(&fails) || !play(&skipping))
			return false;
	}
	return holds(&old_sample);
}

/* ---- Other programs as tests ----------------------------------------------------------------- */

static const struct kind {
	const char *name;
	const char *mount; /* commands that mount it in the scratch directory */
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
	unsigned kinds; /* a bit for each kind */
};

static void test_one(const struct full_test *test, unsigned kind, const char *why_not)
{
	struct ioshape_context *context;
	char name[256];

	snprintf(name, sizeof(name), "%s: %s", kinds[kind].name, test->name);
	snprintf(where, sizeof(where), "%s/mnt", scratch_directory());
	snprintf(file, sizeof(file), "%s/model.pt", where);
	snprintf(filler, sizeof(filler), "%s/filler", where);
	if (!why_not && shell("cd '%s' && mkdir -p mnt && { %s; } >mount.log 2>&1",
			      scratch_directory(), kinds[kind].mount))
		why_not = "the kernel does not mount it";
	if (why_not) {
		tap_skip(name, why_not);
		return;
	}
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	if (save_to(context, file, &old_sample, NULL))
		printf("# %s\n", ioshape_last_error()->sentence);
	ioshape_context_free(context);
	fill_up(LEFT_BYTES);
	if (!tap_ok(test->test(), "%s", name))
		printf("# %s\n", complaint);
	shell("cd '%s' && umount -l mnt; rm -f image", scratch_directory());
}

/* ---- Main ------------------------------------------------------------------------------------ */

static const struct full_test tests[] = {
	{ "what does not fit fails before it queues", fails_before_it_queues, 3 },
	{ "what fits is saved", what_fits_is_saved, 3 },
	{ "what does not fit is skipped", skips, 3 },
	{ "a device is not skipped", a_device_is_not_skipped, 1 },
	{ "what the dead left is freed", what_the_dead_left_is_freed, 3 },
	{ "found out in the middle", found_out_late, 4 },
	{ "no inodes", no_inodes, 8 },
	{ "a group that does not fit fails, or is skipped", groups_fail_or_skip, 1 },
};

int main(void)
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
		for (unsigned test = 0; test < ARRAY_LENGTH(tests); test++) {
			if (tests[test].kinds & 1u << kind)
				test_one(&tests[test], kind, why_not);
		}
	}
	sample_free(&old_sample);
	sample_free(&new_sample);
	scratch_teardown();
	return tap_end();
}
