/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes that save on a tier and drain it at the same time die before any of their calls.
 * Nothing that was kept is lost, nothing is torn, and nothing older replaces what is newer.
 * tests/campaign/act_tier.c tries each call of one process.
 */
#define _GNU_SOURCE
#include "group/group.h"
#include "support/calls.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>
#include <ioshape/tier.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

/* Handles of a process. */
static struct ioshape_context *context;
static struct ioshape_tier *tier;

static char in_memory[] = "/dev/shm/ioshape-tier-XXXXXX";

/* Puts the tier on a filesystem in memory, so that a drain cannot rename. */
static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	ck_assert_ptr_ne(shared, MAP_FAILED);
	calls_record();
	ck_assert_ptr_nonnull(mkdtemp(in_memory));
	ck_assert_int_eq(symlink(in_memory, "tier"), 0);
	ck_assert_int_eq(mkdir("there", 0777), 0);
}

static void teardown(void)
{
	scratch_remove(in_memory);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static struct test_case tests = { .name = "tier", .setup = setup, .teardown = teardown };

static int open_tier(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_tier_options tier_options = IOSHAPE_TIER_OPTIONS_INIT;
	int ret;

	options.coordinator = "open";
	ret = ioshape_context_open(&context, &options);
	return ret ? ret : ioshape_tier_open(context, "tier", &tier_options, &tier);
}

static void close_tier(void)
{
	ioshape_tier_free(tier);
	ioshape_context_free(context);
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

static int drain_and_list(void *unused)
{
	struct ioshape_tier_copy *copies;
	size_t count, waiting = 0;
	int ret;

	(void)unused;
	ret = open_tier();
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
	close_tier();
	_exit(ret ? 1 : waiting ? 2 : 0);
}

static int save_beside(void *unused)
{
	int ret;

	(void)unused;
	ret = open_tier();
	if (!ret)
		ret = save_file("there/beside", 100, 1);
	close_tier();
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
	ret = open_tier();
	for (int i = 0; !ret && i < 20; i++)
		ret = save_on_tier((unsigned)test_random_below(&process->random, PATHS));
	_exit(ret != 0);
}

static int drain_until_death(void *argument)
{
	const struct process *process = argument;
	int ret;

	calls_begin(CALLS_KILL, process->dies, 0);
	ret = open_tier();
	for (int i = 0; !ret && i < 6; i++)
		ret = ioshape_tier_drain(tier, NULL);
	_exit(ret != 0);
}

/* Saves directly until the clock shows that this file is newer. */
static int save_directly(void *unused)
{
	struct stat first, now;
	int ret = open_tier();

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
	close_tier();
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
	uint32_t seen[PATHS] = { 0 };
	uint64_t random = 17;
	unsigned killed = 0;

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
	/* The others had ended before. */
	ck_assert_uint_gt(killed, (unsigned)rounds / 4);
}
