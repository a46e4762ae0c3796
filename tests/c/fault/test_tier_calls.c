/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes that save on a tier and drain it die before any of their calls, or a call of theirs
 * fails: nothing that was kept is lost, nothing is torn, and nothing older replaces what is newer.
 */
#define _GNU_SOURCE
#include "group/group.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/tier_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* The paths that are saved. Every word of a file is the number of its version. A checkpoint of a
 * group has two such files. */
#define PATHS 3
#define FOLDER 2 /* which of them is a checkpoint of a group */
static const size_t bytes_of[PATHS] = { 3000, (1 << 20) + 5000, 30000 };
#define STEP 7
#define RANKS 2
static const char *const path_of[PATHS] = { "there/small", "there/large", "there/step-0000000007" };

/* Of all processes. */
static struct {
	uint32_t next;        /* version that will be saved */
	uint32_t kept[PATHS]; /* the last that the library called kept */
	uint32_t direct;      /* the last that was saved directly to the first path */
} * shared;

static void setup(void)
{
	shared = tier_calls_setup(sizeof(*shared));
	ck_assert_int_eq(mkdir("tier", 0777), 0);
	ck_assert_int_eq(mkdir("there", 0777), 0);
}

static struct test_case tests = { .name = "tier", .setup = setup, .teardown = tier_calls_teardown };

/* Puts the tier on a filesystem in memory, so that a drain cannot rename. */
static void move_tier_to_memory(char *folder)
{
	ck_assert_int_eq(rmdir("tier"), 0);
	ck_assert_ptr_nonnull(mkdtemp(folder));
	ck_assert_int_eq(symlink(folder, "tier"), 0);
}

/* ---- In a process of its own ----------------------------------------------------------------- */

static int save_file(const char *path, size_t bytes, uint32_t version)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;
	uint32_t *words = malloc(bytes);
	int ret;

	for (size_t i = 0; words && i < bytes / sizeof(*words); i++)
		words[i] = version;
	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	ret = words ? ioshape_file_open(context, path, &options, &file) : -ENOMEM;
	if (!ret) {
		ret = ioshape_file_write(file, words, bytes);
		if (!ret)
			ret = ioshape_file_commit(file, NULL);
		ioshape_file_free(file);
	}
	free(words);
	return ret;
}

static int commit(struct group_attempt *attempt, size_t bytes, uint32_t crc32)
{
	char names[RANKS][FORMAT_SHARD_NAME_BYTES];
	struct format_manifest_file files[RANKS];
	struct format_manifest_shard shards[RANKS];
	struct format_manifest manifest = {
		.step = STEP,
		.saved = 1700000000,
		.mode = IOSHAPE_MODE_EACH,
		.rank_count = RANKS,
		.shards = shards,
		.file_count = RANKS,
		.files = files,
	};

	for (uint32_t rank = 0; rank < RANKS; rank++) {
		format_shard_name(names[rank], rank);
		files[rank] = (struct format_manifest_file){ names[rank], bytes, crc32, false };
		shards[rank] = (struct format_manifest_shard){ .file = rank,
							       .crc32 = crc32,
							       .bytes = bytes };
	}
	snprintf(manifest.attempt, sizeof(manifest.attempt), "%s", attempt->id);
	return group_attempt_commit(attempt, &manifest, false, NULL);
}

/* Saves a checkpoint as a group does. */
static int save_folder(const char *path, size_t bytes, uint32_t version)
{
	char *above = base_directory_of(path), name[FORMAT_SHARD_NAME_BYTES];
	uint32_t *words = malloc(bytes);
	struct group_attempt attempt = GROUP_NO_ATTEMPT;
	int ret = words && above ? 0 : -ENOMEM;

	for (size_t i = 0; words && i < bytes / sizeof(*words); i++)
		words[i] = version;
	if (!ret)
		ret = group_attempt_begin(&attempt, above, STEP, NULL, "0000471a", NULL, NULL);
	for (uint32_t rank = 0; !ret && rank < RANKS; rank++) {
		format_shard_name(name, rank);
		ret = io_folder_put(&attempt.folder, name, words, bytes, NULL);
	}
	if (!ret)
		ret = commit(&attempt, bytes, base_crc32(0, words, bytes));
	group_attempt_abandon(&attempt);
	free(words);
	free(above);
	return ret;
}

static int save_at(const char *path, unsigned which, uint32_t version)
{
	return which == FOLDER ? save_folder(path, bytes_of[which], version) :
				 save_file(path, bytes_of[which], version);
}

static int save_on_tier(unsigned which)
{
	const uint32_t version = ++shared->next;
	char *copy_path;
	int ret = ioshape_tier_path(tier, path_of[which], bytes_of[which], &copy_path);

	if (ret)
		return ret;
	ret = save_at(copy_path, which, version);
	ioshape_free(copy_path);
	if (!ret)
		ret = ioshape_tier_keep(tier, path_of[which], NULL);
	if (!ret)
		shared->kept[which] = version;
	return ret;
}

/* ---- What is there --------------------------------------------------------------------------- */

/* Returns the version in a file: 0 if there is none, UINT32_MAX if it is torn. */
static uint32_t version_of_file(const char *path, size_t bytes)
{
	/* Another process may remove the file, but not the open one. */
	const int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint32_t *words, version;
	char opened[32];
	size_t length;

	if (fd < 0)
		return 0;
	snprintf(opened, sizeof(opened), "/proc/self/fd/%d", fd);
	words = (uint32_t *)(void *)scratch_read(opened, &length);
	close(fd);
	version = length == bytes ? words[0] : UINT32_MAX;
	for (size_t i = 0; i < length / sizeof(*words); i++)
		if (words[i] != version)
			version = UINT32_MAX;
	free(words);
	return version;
}

/* Returns the version in an open directory, which its successor may replace and remove. */
static uint32_t version_of_open_folder(int fd)
{
	char path[64], name[FORMAT_SHARD_NAME_BYTES];
	uint32_t versions[RANKS];

	for (uint32_t rank = 0; rank < RANKS; rank++) {
		format_shard_name(name, rank);
		snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", fd, name);
		versions[rank] = version_of_file(path, bytes_of[FOLDER]);
	}
	return versions[0] == versions[1] ? versions[0] : UINT32_MAX;
}

static uint32_t version_of_folder(const char *folder)
{
	struct stat then, now;
	bool replaced = true;
	uint32_t version = 0;
	int fd;

	/* A folder that is replaced meanwhile may be removed in part, or whole. */
	while (replaced) {
		fd = open(folder, O_RDONLY | O_DIRECTORY);
		if (fd < 0)
			return 0;
		ck_assert_int_eq(fstat(fd, &then), 0);
		version = version_of_open_folder(fd);
		replaced = stat(folder, &now) || now.st_ino != then.st_ino;
		close(fd); /* not before, or its inode could be the new folder's */
	}
	return version;
}

static uint32_t version_there(unsigned which)
{
	return which == FOLDER ? version_of_folder(path_of[which]) :
				 version_of_file(path_of[which], bytes_of[which]);
}

/* Returns the version of the copy on the tier. */
static uint32_t version_of_copy(void)
{
	char path[4096], here[2048];

	ck_assert_ptr_nonnull(getcwd(here, sizeof(here)));
	snprintf(path, sizeof(path), "tier/ioshape-%u/files%s/%s", (unsigned)geteuid(), here,
		 path_of[FOLDER]);
	return version_of_folder(path);
}

static int drain_and_list(void *unused)
{
	struct ioshape_tier_copy *copies;
	size_t count, waiting = 0;
	int ret;

	(void)unused;
	ret = tier_calls_open("tier");
	if (!ret)
		ret = ioshape_tier_drain(tier, NULL);
	if (ret)
		fprintf(stderr, "%s\n", ioshape_last_error()->sentence);
	if (!ret)
		ret = ioshape_tier_list(tier, &copies, &count);
	for (size_t i = 0; !ret && i < count; i++)
		waiting += copies[i].number != 0;
	if (!ret)
		free(copies);
	tier_calls_close();
	_exit(ret ? 1 : waiting ? 2 : 0);
}

static int save_beside(void *unused)
{
	int ret;

	(void)unused;
	ret = tier_calls_open("tier");
	if (!ret)
		ret = save_file("there/beside", 100, 1);
	tier_calls_close();
	_exit(ret ? 1 : 0);
}

/* Saves beside them until the temporary files of dead processes are gone. It takes several saves
 * if the kernel releases their locks late. */
static void must_be_tidy(void)
{
	for (int tries = 0; tries < 500; tries++) {
		ck_assert_int_eq(scratch_in_child(save_beside, NULL), 0);
		if (!scratch_temporaries("there"))
			return;
		usleep(10000);
	}
	ck_abort_msg("a temporary file stays");
}

/* Drains what is left, and requires that nothing waits and no temporary file stays. */
static void must_be_drained(void)
{
	const int status = scratch_in_child(drain_and_list, NULL);

	ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status), "%x", (unsigned)status);
	must_be_tidy();
}

/* ---- Each call ------------------------------------------------------------------------------- */

static const struct scene {
	unsigned which;
	bool replaces; /* an older version is there */
	bool saves;    /* it is the save that is harmed, and not the drain */
	bool no_swap;  /* as on NFS */
} scenes[] = {
	{ .which = 0 },
	{ .which = 0, .replaces = true },
	{ .which = 0, .saves = true },
	{ .which = 1, .replaces = true },
	{ .which = FOLDER },
	{ .which = FOLDER, .replaces = true },
	{ .which = FOLDER, .replaces = true, .no_swap = true },
	{ .which = FOLDER, .saves = true },
};
#define SCENES ((int)(sizeof(scenes) / sizeof(*scenes)))

struct harm {
	const struct scene *scene;
	enum calls_mode mode;
	unsigned long nth;
	int code;
};

static int prepare(void *argument)
{
	const struct harm *harm = argument;
	const struct scene *scene = harm->scene;
	int ret = tier_calls_open("tier");

	if (!ret && scene->replaces)
		ret = save_on_tier(scene->which);
	if (!ret && scene->replaces)
		ret = ioshape_tier_drain(tier, NULL);
	if (!ret && !scene->saves)
		ret = save_on_tier(scene->which);
	tier_calls_close();
	_exit(ret != 0);
}

static int act(void *argument)
{
	const struct harm *harm = argument;
	int ret;

	if (harm->scene->no_swap)
		calls_deny("renameat2", EINVAL);
	calls_begin(harm->mode, harm->nth, harm->code);
	ret = tier_calls_open("tier");
	if (!ret)
		ret = harm->scene->saves ? save_on_tier(harm->scene->which) :
					   ioshape_tier_drain(tier, NULL);
	calls_end();
	tier_calls_close();
	_exit(ret != 0);
}

static void begin_scene(struct harm *harm)
{
	scratch_remove("tier");
	scratch_remove("there");
	ck_assert_int_eq(mkdir("tier", 0777), 0);
	ck_assert_int_eq(mkdir("there", 0777), 0);
	memset(shared, 0, sizeof(*shared));
	ck_assert_int_eq(scratch_in_child(prepare, harm), 0);
}

/* Returns whether the process made an nth call. */
static bool harm_once(struct harm *harm)
{
	const unsigned which = harm->scene->which;
	const uint32_t old = harm->scene->replaces ? 1 : 0;
	uint32_t found;
	int status;

	begin_scene(harm);
	status = scratch_in_child(act, harm);
	ck_assert_msg(WIFEXITED(status) || WTERMSIG(status) == SIGKILL, "%lu: %x", harm->nth,
		      (unsigned)status);
	found = version_there(which);
	/* Where names cannot be swapped there is nothing for a moment. */
	ck_assert_msg(found == old || found == shared->next ||
			      (!found && harm->scene->no_swap && WIFSIGNALED(status)),
		      "%lu: %u is there", harm->nth, found);
	/* Who says that it was drained, speaks the truth. */
	if (WIFEXITED(status) && !WEXITSTATUS(status) && !harm->scene->saves)
		ck_assert_msg(found == shared->next, "%lu (%s): %u was not drained", harm->nth,
			      calls_record()->names[harm->nth - 1], found);
	must_be_drained();
	found = version_there(which);
	ck_assert_msg(found != UINT32_MAX && found >= shared->kept[which], "%lu: %u is there",
		      harm->nth, found);
	ck_assert_msg(found || harm->scene->saves, "%lu: it is gone", harm->nth);
	return harm->nth <= atomic_load(&calls_record()->count);
}

static unsigned long step(void)
{
	return scratch_long() ? 1 : 11;
}

/* A process that dies before each of its calls. */
LOOP_TEST(tests, whoever_dies_at_any_call_loses_nothing, 0, SCENES)
{
	struct harm harm = { .scene = &scenes[_i], .mode = CALLS_KILL, .nth = 1 };

	while (harm_once(&harm))
		harm.nth += step();
	ck_assert_uint_gt(harm.nth, 50);
}

static const int codes[] = { EIO, ENOSPC };

LOOP_TEST(tests, whatever_call_fails_nothing_is_lost, 0, 2 * SCENES)
{
	struct harm harm = {
		.scene = &scenes[_i / 2],
		.mode = CALLS_FAIL,
		.nth = 1 + (unsigned long)_i % 2,
		.code = codes[_i % 2],
	};

	while (harm_once(&harm))
		harm.nth += 2 * step();
}

static int forget(void *argument)
{
	const struct harm *harm = argument;
	int ret;

	calls_begin(harm->mode, harm->nth, harm->code);
	ret = tier_calls_open("tier");
	if (!ret)
		ret = ioshape_tier_forget(tier, path_of[harm->scene->which], NULL);
	calls_end();
	tier_calls_close();
	_exit(ret != 0);
}

/* Harms a call that forgets a save. The save must then be drained whole, or not at all. */
static void must_be_forgotten_or_drained(struct harm *harm)
{
	int status;

	begin_scene(harm);
	status = scratch_in_child(forget, harm);
	must_be_drained();
	if (WIFEXITED(status) && !WEXITSTATUS(status))
		ck_assert_msg(!version_there(harm->scene->which), "%lu: it was forgotten",
			      harm->nth);
	else
		ck_assert_msg(version_there(harm->scene->which) <= 1, "%lu: it is torn", harm->nth);
	if (!version_there(FOLDER))
		ck_assert_uint_eq(version_of_copy(), 0);
}

LOOP_TEST(tests, what_is_forgotten_is_carried_whole_or_not_at_all, 0, 4)
{
	static const struct scene forgotten[] = { { .which = 1 }, { .which = FOLDER } };
	struct harm harm = {
		.scene = &forgotten[_i / 2],
		.mode = _i % 2 ? CALLS_FAIL : CALLS_KILL,
		.nth = 1,
		.code = EIO,
	};

	do
		must_be_forgotten_or_drained(&harm);
	while (harm.nth++ <= atomic_load(&calls_record()->count));
	ck_assert_uint_gt(harm.nth, 8);
}

/* Removing an old copy makes space for the next save. */
TEST(tests, a_copy_that_is_half_removed_does_not_come_back)
{
	static const struct scene scene = { .which = FOLDER, .replaces = true, .saves = true };
	struct harm harm = { .scene = &scene, .mode = CALLS_FAIL, .code = ESTALE };
	unsigned tried = 0;
	long at = -1;

	do {
		harm.nth = (unsigned long)(at + 1);
		begin_scene(&harm);
		ck_assert_uint_eq(version_of_copy(), 1);
		scratch_in_child(act, &harm);
		ck_assert_msg(version_of_copy() != UINT32_MAX, "%lu: it is torn", harm.nth);
		must_be_drained();
		tried++;
		at = calls_find("unlinkat", harm.nth);
	} while (at >= 0);
	ck_assert_uint_gt(tried, 4);
}

/* ---- Anywhere -------------------------------------------------------------------------------- */

#define ROUNDS 40
#define LONG_ROUNDS 700

struct process {
	uint64_t random;
	unsigned long dies; /* before this call */
};

static int save_until_death(void *argument)
{
	struct process *process = argument;
	int ret;

	calls_begin(CALLS_KILL, process->dies, 0);
	ret = tier_calls_open("tier");
	for (int i = 0; !ret && i < 20; i++)
		ret = save_on_tier((unsigned)test_random_below(&process->random, PATHS));
	_exit(ret != 0);
}

static int drain_until_death(void *argument)
{
	const struct process *process = argument;
	int ret;

	calls_begin(CALLS_KILL, process->dies, 0);
	ret = tier_calls_open("tier");
	for (int i = 0; !ret && i < 6; i++)
		ret = ioshape_tier_drain(tier, NULL);
	_exit(ret != 0);
}

/* Saves directly until the clock shows that this file is newer. */
static int save_directly(void *unused)
{
	struct stat first, now;
	int ret = tier_calls_open("tier");

	(void)unused;
	scratch_write("first", "", 0);
	if (stat("first", &first))
		_exit(1);
	do {
		scratch_write("now", "", 0);
		if (stat("now", &now))
			_exit(1);
	} while (now.st_mtim.tv_sec == first.st_mtim.tv_sec &&
		 now.st_mtim.tv_nsec == first.st_mtim.tv_nsec);
	shared->direct = ++shared->next;
	if (!ret)
		ret = save_at(path_of[0], 0, shared->direct);
	/* Nor is what is saved next as old as it. */
	do {
		scratch_write("first", "", 0);
		if (stat("first", &first))
			_exit(1);
	} while (now.st_mtim.tv_sec == first.st_mtim.tv_sec &&
		 now.st_mtim.tv_nsec == first.st_mtim.tv_nsec);
	tier_calls_close();
	_exit(ret != 0);
}

static pid_t begin_process(int (*body)(void *), struct process *process, uint64_t *random)
{
	pid_t child;

	process->random = test_random(random);
	process->dies = 1 + test_random_below(random, 1500);
	fflush(NULL);
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child)
		body(process);
	return child;
}

/* Reads the versions of all files, also while processes work on them. */
static void look(uint32_t seen[PATHS])
{
	for (unsigned i = 0; i < PATHS; i++) {
		const uint32_t found = version_there(i);

		ck_assert_msg(found != UINT32_MAX && found >= seen[i], "%s: %u after %u",
			      path_of[i], found, seen[i]);
		seen[i] = found;
	}
}

TEST(tests, whoever_dies_anywhere_nothing_older_comes_back)
{
	const int rounds = scratch_long() ? LONG_ROUNDS : ROUNDS;
	char memory[] = "/dev/shm/ioshape-tier-XXXXXX";
	uint32_t seen[PATHS] = { 0 };
	uint64_t random = 17;
	unsigned killed = 0;

	move_tier_to_memory(memory);
	for (int round = 0; round < rounds; round++) {
		struct process processes[2];
		pid_t children[2];
		int status, left = 2;

		children[0] = begin_process(save_until_death, &processes[0], &random);
		children[1] = begin_process(drain_until_death, &processes[1], &random);
		while (left) {
			look(seen);
			for (int i = 0; i < 2; i++) {
				if (!children[i] || waitpid(children[i], &status, WNOHANG) <= 0)
					continue;
				ck_assert_msg(WIFEXITED(status) || WTERMSIG(status) == SIGKILL,
					      "%x", (unsigned)status);
				ck_assert_msg(WIFSIGNALED(status) || !WEXITSTATUS(status),
					      "process %d failed", i);
				killed += WIFSIGNALED(status);
				children[i] = 0;
				left--;
			}
		}
		look(seen);
		if (round % 3 == 1)
			ck_assert_int_eq(scratch_in_child(save_directly, NULL), 0);
		if (round % 3 == 1)
			look(seen);
		if (round % 4 != 3)
			continue;
		must_be_drained();
		look(seen);
		for (unsigned i = 0; i < PATHS; i++)
			ck_assert_uint_ge(seen[i], shared->kept[i]);
		ck_assert_uint_ge(seen[0], shared->direct);
	}
	scratch_remove(memory);
	/* The others had ended before. */
	ck_assert_uint_gt(killed, (unsigned)rounds / 4);
}
