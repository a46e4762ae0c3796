/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints of a group are committed as a whole. What dead processes left is removed, and nothing
 * else.
 */
#define _GNU_SOURCE
/* Included, because its functions for names and serial numbers are static. */
#include "group/checkpoints.c"
#include "support/check_main.h"
#include "support/checkpoint_case.h"
#include "support/lock_domain.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STEP 1000u
#define PLACE "step-0000001000"
#define ANOTHER_JOB "0000471b"
#define MINE "0123456789abcdef"

static struct base_error error;

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	memset(&error, 0, sizeof(error));
}

static void teardown(void)
{
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static bool exists(const char *path)
{
	struct stat status;

	return !lstat(path, &status);
}

/* Returns the name of the only attempt in "runs"; "" if there is none. */
static const char *attempt_name(void)
{
	static char name[256];
	struct dirent *entry;
	DIR *listing = opendir("runs");

	*name = 0;
	while ((entry = readdir(listing)))
		if (group_parse_name(entry->d_name).kind == GROUP_NAME_ATTEMPT)
			snprintf(name, sizeof(name), "%s", entry->d_name);
	closedir(listing);
	return name;
}

static void tidy(const char *job)
{
	struct io_folder runs;
	unsigned before = scratch_descriptors();

	ck_assert_int_eq(io_folder_open(&runs, "runs", NULL), 0);
	group_tidy(&runs, job, NULL, NULL, NULL);
	io_folder_close(&runs);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

/* ---- Names ----------------------------------------------------------------------------------- */

static struct test_case names_case = { .name = "names" };

TEST(names_case, names_are_read_as_they_are_made)
{
	static const uint64_t steps[] = { 0, 1, 1000, 9999999999, 10000000000, UINT64_MAX };
	char name[GROUP_STEP_NAME_BYTES], longer[GROUP_ATTEMPT_NAME_BYTES];
	struct group_name parsed;

	for (size_t i = 0; i < ARRAY_LENGTH(steps); i++) {
		group_step_name(name, steps[i]);
		parsed = group_parse_name(name);
		ck_assert_int_eq(parsed.kind, GROUP_NAME_STEP);
		ck_assert_uint_eq(parsed.step, steps[i]);
		snprintf(longer, sizeof(longer), ".%s.01234567-89abcdef-" MINE, name);
		parsed = group_parse_name(longer);
		ck_assert_int_eq(parsed.kind, GROUP_NAME_ATTEMPT);
		ck_assert_uint_eq(parsed.step, steps[i]);
		ck_assert_str_eq(parsed.id, "01234567-89abcdef-" MINE);
		snprintf(longer, sizeof(longer), ".replaced-%s." MINE, name);
		parsed = group_parse_name(longer);
		ck_assert_int_eq(parsed.kind, GROUP_NAME_REPLACED);
		ck_assert_uint_eq(parsed.step, steps[i]);
		aside_name(longer, GROUP_NAME_PRUNED, steps[i], i);
		parsed = group_parse_name(longer);
		ck_assert_int_eq(parsed.kind, GROUP_NAME_PRUNED);
		ck_assert_uint_eq(parsed.step, steps[i]);
	}
}

TEST(names_case, other_names_are_none_of_ours)
{
	static const char *const names[] = {
		"",
		".",
		"..",
		"step",
		"step-",
		"step-1000",        /* too short */
		"step-00000010000", /* one 0 too many */
		"step-000000100x",
		"step-0000001000 ",
		"step-0000001000.pt",
		"step-18446744073709551616", /* 2^64 */
		"step-99999999999999999999",
		"Step-0000001000",
		".step-0000001000",
		".step-0000001000.01234567-89abcdef-0123456789abcde",
		".step-0000001000.01234567-89abcdef-0123456789abcdef0",
		".step-0000001000.01234567-89ABCDEF-0123456789abcdef",
		".step-0000001000.01234567_89abcdef-0123456789abcdef",
		".replaced-step-0000001000",
		".replaced-step-0000001000.0123",
		".replaced-step-0000001000.0123456789abcdef-",
		".replaced-0000001000.0123456789abcdef",
		".pruned-step-0000001000",
		".pruned-step-0000001000.0123456789abcdefg",
		".model.pt.ioshape-tmp-00000000-0123456789abcdef",
	};

	for (size_t i = 0; i < ARRAY_LENGTH(names); i++)
		ck_assert_msg(group_parse_name(names[i]).kind == GROUP_NAME_OTHER, "%s", names[i]);
}

/* ---- Commit ---------------------------------------------------------------------------------- */

static struct test_case commit = { .name = "commit", .setup = setup, .teardown = teardown };

TEST(commit, a_checkpoint_appears_whole)
{
	unsigned before = scratch_descriptors();
	struct group_attempt attempt;

	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	ck_assert(!exists("runs/" PLACE));
	ck_assert_str_eq(strrchr(group_attempt_path(&attempt), '/') + 1, attempt.name);
	ck_assert_int_eq(group_parse_name(attempt.name).kind, GROUP_NAME_ATTEMPT);
	ck_assert_str_eq(group_parse_name(attempt.name).id, attempt.id);
	ck_assert_int_eq(checkpoint_commit(&attempt, "new", false, &error), 0);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
	ck_assert_uint_eq(scratch_entries("runs"), 1);
	ck_assert_uint_eq(scratch_entries("runs/" PLACE), 2);
	ck_assert_uint_eq(scratch_descriptors(), before);
	group_attempt_abandon(&attempt);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
}

TEST(commit, directories_above_are_made_as_mkdir_p_does)
{
	struct group_attempt attempt;
	struct stat status;
	mode_t mask = umask(027);

	ck_assert_int_eq(
		group_attempt_begin(&attempt, "a/b//c/", STEP, NULL, CHECKPOINT_JOB, NULL, &error),
		0);
	umask(mask);
	ck_assert_int_eq(stat("a/b/c", &status), 0);
	ck_assert_uint_eq(status.st_mode & 07777, 0750);
	ck_assert_int_eq(stat(group_attempt_path(&attempt), &status), 0);
	ck_assert_uint_eq(status.st_mode & 07777, 0750);
	group_attempt_abandon(&attempt);
	ck_assert_uint_eq(scratch_entries("a/b/c"), 0);

	scratch_write("file", "x", 1);
	ck_assert_int_eq(
		group_attempt_begin(&attempt, "file/a", STEP, NULL, CHECKPOINT_JOB, NULL, &error),
		-ENOTDIR);
	group_attempt_abandon(&attempt);
}

/*
 * Writes a checkpoint like that of a job on a machine with another clock. It did not know of the
 * attempt in progress, so its serial number may be any.
 */
static void put_checkpoint(const char *place, uint64_t step, uint64_t serial)
{
	struct base_buffer text = { 0 };
	struct checkpoint_case it;
	char path[64];

	checkpoint_describe(&it, step, "01234567-89abcdef-" MINE, "theirs")->serial = serial;
	ck_assert_int_eq(format_manifest_encode(&text, &it.manifest), 0);
	ck_assert_int_eq(mkdir(place, 0777), 0);
	snprintf(path, sizeof(path), "%s/rank-00000.pt", place);
	scratch_write(path, "theirs", 6);
	snprintf(path, sizeof(path), "%s/manifest.json", place);
	scratch_write(path, text.data, text.bytes);
	base_buffer_free(&text);
}

TEST(commit, what_is_committed_last_is_the_newest_whatever_clocks_say)
{
	const uint64_t ahead = (uint64_t)(base_wall_seconds() * 1000) + 3600000;
	struct group_attempt attempt;
	struct io_folder runs;
	uint64_t serial = 0;

	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	put_checkpoint("runs/step-0000002000", 2000, ahead);
	ck_assert(checkpoint_is("step-0000002000", 2000, "theirs"));
	ck_assert_int_eq(checkpoint_commit(&attempt, "new", false, &error), 0);
	group_attempt_abandon(&attempt);
	ck_assert_int_eq(io_folder_open(&runs, "runs", NULL), 0);
	record_serial(&runs, PLACE, &serial);
	io_folder_close(&runs);
	ck_assert_uint_eq(serial, ahead + 1);
}

/* An entry of that name without a valid checkpoint is replaced even if replacing is not allowed. */
LOOP_TEST(commit, an_incomplete_one_is_replaced_all_the_same, 0, 4)
{
	if (_i == 0) {
		ck_assert_int_eq(mkdir("runs", 0777), 0);
		ck_assert_int_eq(mkdir("runs/" PLACE, 0777), 0);
	} else {
		ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
		if (_i == 1)
			unlink("runs/" PLACE "/manifest.json");
		else if (_i == 2)
			scratch_write("runs/" PLACE "/manifest.json", "{}", 2);
		else
			scratch_write("runs/" PLACE "/rank-00000.pt", "short", 5);
	}
	ck_assert(!checkpoint_is(PLACE, STEP, "old one"));
	ck_assert_int_eq(checkpoint_save(STEP, "new", true, &error), 0);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}

LOOP_TEST(commit, what_is_no_directory_is_in_the_way, 0, 2)
{
	ck_assert_int_eq(mkdir("runs", 0777), 0);
	if (_i)
		ck_assert_int_eq(symlink("/", "runs/" PLACE), 0);
	else
		scratch_write("runs/" PLACE, "mine", 4);
	ck_assert_int_eq(checkpoint_save(STEP, "new", false, &error), -ENOTDIR);
	ck_assert(exists("runs/" PLACE));
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}

TEST(commit, what_somebody_reads_is_replaced_but_not_removed)
{
	struct group_checkpoint reader;
	struct io_folder runs;

	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(io_folder_open(&runs, "runs", &error), 0);
	ck_assert_int_eq(group_checkpoint_open(&reader, &runs, PLACE, STEP, &error), 0);
	ck_assert_int_eq(checkpoint_save(STEP, "new", false, &error), 0);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
	ck_assert(checkpoint_is(attempt_name(), STEP, "old one"));
	tidy(CHECKPOINT_JOB);
	ck_assert(checkpoint_is(attempt_name(), STEP, "old one"));
	group_checkpoint_close(&reader);
	io_folder_close(&runs);
	tidy(CHECKPOINT_JOB);
	ck_assert_uint_eq(scratch_entries("runs"), 1);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
}

TEST(commit, a_directory_removed_under_an_attempt_fails_it)
{
	struct group_attempt attempt;

	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	scratch_remove(group_attempt_path(&attempt));
	ck_assert_int_eq(checkpoint_commit(&attempt, "new", false, &error), -ENOENT);
	group_attempt_abandon(&attempt);
	ck_assert_uint_eq(scratch_entries("runs"), 0);
}

/* An invalid manifest is reported as such, not as a lack of memory. */
TEST(commit, what_makes_no_manifest_is_not_put_in_place)
{
	struct checkpoint_case it;
	struct group_attempt attempt;
	struct format_manifest *manifest;

	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	manifest = checkpoint_describe(&it, STEP, attempt.id, "new");
	it.shard.bytes = 0;
	ck_assert_int_eq(group_attempt_commit(&attempt, manifest, false, &error), -EINVAL);
	manifest->rank_count = FORMAT_MAX_RANKS + 1;
	error = (struct base_error){ 0 };
	ck_assert_int_eq(group_attempt_commit(&attempt, manifest, false, &error), IOSHAPE_E_LIMIT);
	group_attempt_abandon(&attempt);
	ck_assert_uint_eq(scratch_entries("runs"), 0);
}

/*
 * The other ranks report their files to rank 0. Only a look into the attempt shows whether they are
 * there.
 */
LOOP_TEST(commit, without_its_files_it_is_not_put_in_place, 0, 2)
{
	struct group_attempt attempt;
	char path[300];

	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	snprintf(path, sizeof(path), "%s/rank-00000.pt", group_attempt_path(&attempt));
	if (_i)
		scratch_write(path, "ne", 2);
	else
		ck_assert_int_eq(unlink(path), 0);
	ck_assert_int_eq(checkpoint_commit(&attempt, "new", false, &error), IOSHAPE_E_DAMAGED);
	group_attempt_abandon(&attempt);
	ck_assert(checkpoint_is(PLACE, STEP, "old one"));
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}

/* Files of several writers are checked by name. In the last round all of them exist. */
LOOP_TEST(commit, without_the_file_of_one_writer_it_is_not_put_in_place, 0, 4)
{
	struct format_manifest_shard shards[3];
	struct format_manifest_file files[3];
	char names[3][FORMAT_SHARD_NAME_BYTES];
	struct group_attempt attempt;
	struct format_manifest manifest;
	struct checkpoint_case it;
	int expected = _i == 3 ? 0 : IOSHAPE_E_DAMAGED;

	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	manifest = *checkpoint_describe(&it, STEP, attempt.id, "new");
	manifest.rank_count = manifest.file_count = 3;
	manifest.shards = shards;
	manifest.files = files;
	for (uint32_t rank = 0; rank < 3; rank++) {
		format_shard_name(names[rank], rank);
		files[rank] = it.file;
		files[rank].name = names[rank];
		shards[rank] = it.shard;
		shards[rank].file = rank;
		if (rank)
			ck_assert_int_eq(
				io_folder_put(&attempt.folder, names[rank], "new", 3, &error), 0);
	}
	if (_i < 3)
		ck_assert_int_eq(unlinkat(attempt.folder.fd, names[_i], 0), 0);
	ck_assert_int_eq(group_attempt_commit(&attempt, &manifest, false, &error), expected);
	if (_i < 3)
		ck_assert_ptr_nonnull(strstr(error.text, names[_i]));
	group_attempt_abandon(&attempt);
	ck_assert(checkpoint_is(PLACE, STEP, _i == 3 ? "new" : "old one"));
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}

/* ---- Attempts of dead and living processes --------------------------------------------------- */

/* Starts a process that begins an attempt and waits to be killed. */
static pid_t start_attempt(const char *job)
{
	struct group_attempt attempt;
	int ends[2];
	char byte;
	pid_t pid;

	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (!pid) {
		if (checkpoint_begin(&attempt, STEP, job, "new", NULL) ||
		    write(ends[1], "!", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	close(ends[1]);
	ck_assert_int_eq(read(ends[0], &byte, 1), 1);
	close(ends[0]);
	return pid;
}

static void kill_process(pid_t pid)
{
	int status;

	kill(pid, SIGKILL);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert(WIFSIGNALED(status));
}

static struct test_case dead_case = { .name = "dead or alive",
				      .setup = setup,
				      .teardown = teardown };

LOOP_TEST(dead_case, a_dead_process_s_attempt_goes_with_the_next_save, 0, 2)
{
	pid_t pid = start_attempt(_i ? ANOTHER_JOB : CHECKPOINT_JOB);

	tidy(CHECKPOINT_JOB);
	ck_assert(*attempt_name()); /* its process is alive */
	ck_assert_int_eq(checkpoint_save(STEP + 1, "another", false, &error), 0);
	ck_assert(*attempt_name());
	kill_process(pid);
	ck_assert_int_eq(checkpoint_save(STEP + 2, "another", false, &error), 0);
	ck_assert(!*attempt_name());
	ck_assert_uint_eq(scratch_entries("runs"), 2);
}

TEST(dead_case, an_attempt_of_this_process_is_alive)
{
	struct group_attempt attempt;

	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	tidy(CHECKPOINT_JOB);
	ck_assert_int_eq(checkpoint_save(STEP + 1, "another", false, &error), 0);
	ck_assert_int_eq(checkpoint_commit(&attempt, "new", false, &error), 0);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
	ck_assert(checkpoint_is("step-0000001001", STEP + 1, "another"));
}

/* Makes an attempt like one that a process on another machine left. */
static void make_attempt(const char *job, const char *domain, time_t age_s)
{
	struct timespec times[2] = { { .tv_sec = time(NULL) - age_s },
				     { .tv_sec = time(NULL) - age_s } };
	char path[256], file[300];

	snprintf(path, sizeof(path), "runs/.step-0000001000.%s-%s-" MINE, job, domain);
	snprintf(file, sizeof(file), "%s/rank-00000.pt", path);
	mkdir("runs", 0777);
	ck_assert_int_eq(mkdir(path, 0777), 0);
	scratch_write(file, "half", 4);
	ck_assert_int_eq(utimensat(AT_FDCWD, file, times, 0), 0);
	ck_assert_int_eq(utimensat(AT_FDCWD, path, times, 0), 0);
}

/*
 * Tidies with one budget. Returns how many entries of the attempt were removed; its directory goes
 * with the last file.
 */
static unsigned tidy_some(const char *path)
{
	struct base_budget budget = base_budget_begin();
	const unsigned before = scratch_entries(path);
	struct io_folder runs;

	ck_assert_int_eq(io_folder_open(&runs, "runs", NULL), 0);
	group_tidy(&runs, CHECKPOINT_JOB, NULL, &budget, NULL);
	io_folder_close(&runs);
	return before - (exists(path) ? scratch_entries(path) : 0);
}

TEST(dead_case, a_large_attempt_goes_bit_by_bit)
{
	char domain[IO_DOMAIN_BYTES], path[256], file[300];
	unsigned left = BASE_TIDY_ENTRIES + 100, times = 0;

	domain_of(".", domain);
	make_attempt(CHECKPOINT_JOB, domain, 0);
	snprintf(path, sizeof(path), "runs/%s", attempt_name());
	for (unsigned i = 1; i < left; i++) {
		snprintf(file, sizeof(file), "%s/rank-%05u.pt", path, i);
		scratch_write(file, "", 0);
	}
	for (; left; times++) {
		const unsigned removed = tidy_some(path);

		ck_assert_uint_gt(removed, 0);
		ck_assert_uint_le(removed, BASE_TIDY_ENTRIES);
		left -= removed;
	}
	ck_assert_uint_ge(times, 2);
	tidy(CHECKPOINT_JOB);
	ck_assert(!*attempt_name());
}

TEST(dead_case, another_domain_s_attempt_is_dead_if_it_is_this_job_s_or_a_day_old)
{
	char here[IO_DOMAIN_BYTES];

	make_attempt(ANOTHER_JOB, "deadbeef", 23 * 3600);
	tidy(CHECKPOINT_JOB);
	ck_assert(*attempt_name());
	tidy(NULL);
	ck_assert(*attempt_name());
	tidy(ANOTHER_JOB);
	ck_assert(!*attempt_name());

	make_attempt(ANOTHER_JOB, "deadbeef", 25 * 3600);
	tidy(CHECKPOINT_JOB);
	ck_assert(!*attempt_name());

	/* An attempt without a lock domain may belong to any machine. */
	make_attempt(ANOTHER_JOB, IO_NOWHERE, 0);
	tidy(CHECKPOINT_JOB);
	ck_assert(*attempt_name());
	tidy(ANOTHER_JOB);

	domain_of(".", here);
	make_attempt(ANOTHER_JOB, here, 0);
	tidy(NULL);
	ck_assert(!*attempt_name() == !!strcmp(here, IO_NOWHERE));
}

/* The age of an attempt counts from its last write. */
TEST(dead_case, a_file_that_grows_keeps_an_old_attempt)
{
	char path[300];

	make_attempt(ANOTHER_JOB, "deadbeef", 25 * 3600);
	snprintf(path, sizeof(path), "runs/%s/rank-00000.pt", attempt_name());
	scratch_write(path, "still growing", 13);
	tidy(CHECKPOINT_JOB);
	ck_assert(*attempt_name());
}

TEST(dead_case, other_users_and_other_things_stay)
{
	char path[300], inside[400];

	make_attempt(CHECKPOINT_JOB, "deadbeef", 0);
	snprintf(path, sizeof(path), "runs/%s", attempt_name());
	if (!geteuid()) {
		ck_assert_int_eq(chown(path, 65534, (gid_t)-1), 0);
		tidy(CHECKPOINT_JOB);
		ck_assert(*attempt_name());
		ck_assert_int_eq(chown(path, 0, (gid_t)-1), 0);
	}
	/*
	 * A directory inside an attempt was not made by the library, nor was the target of a link.
	 */
	scratch_write("precious", "x", 1);
	snprintf(inside, sizeof(inside), "%s/link", path);
	ck_assert_int_eq(symlink("../../precious", inside), 0);
	snprintf(inside, sizeof(inside), "%s/notes", path);
	ck_assert_int_eq(mkdir(inside, 0777), 0);
	tidy(CHECKPOINT_JOB);
	ck_assert(exists(inside));
	ck_assert_uint_eq(scratch_entries(path), 1);
	ck_assert(exists("precious"));
	rmdir(inside);
	tidy(CHECKPOINT_JOB);
	ck_assert_uint_eq(scratch_entries("runs"), 0);

	/* These have names of attempts, but are not directories. */
	scratch_write("runs/.step-0000001000.01234567-89abcdef-" MINE, "x", 1);
	ck_assert_int_eq(symlink("..", "runs/.step-0000001001.01234567-89abcdef-" MINE), 0);
	scratch_write("runs/mine.pt", "x", 1);
	tidy(CHECKPOINT_JOB);
	ck_assert_uint_eq(scratch_entries("runs"), 3);
	ck_assert(exists("precious"));
}

TEST(dead_case, what_a_killed_drain_was_removing_goes)
{
	char domain[IO_DOMAIN_BYTES], path[PATH_MAX];
	struct io_folder runs;
	int fd;

	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(io_folder_open(&runs, "runs", &error), 0);
	io_lock_domain(runs.fd, domain);
	io_folder_close(&runs);
	snprintf(path, sizeof(path), "runs/." PLACE ".ioshape-tmp-%s-0123456789abcdef", domain);
	ck_assert_int_eq(rename("runs/" PLACE, path), 0);
	/* The drain is alive. */
	fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	tidy(NULL);
	ck_assert(exists(path));
	close(fd);
	tidy(NULL);
	ck_assert_uint_eq(scratch_entries("runs"), 0);
}

/* ---- Children -------------------------------------------------------------------------------- */

/*
 * Starts a child that inherits all descriptors but the library's, like a data-loader worker.
 * Returns when the library's fork handler has run in the child.
 */
static pid_t start_worker(void)
{
	int ends[2];
	char byte;
	pid_t pid;

	ck_assert_int_eq(pipe(ends), 0);
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (!pid) {
		if (write(ends[1], "", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	ck_assert_int_eq(read(ends[0], &byte, 1), 1);
	close(ends[0]);
	close(ends[1]);
	return pid;
}

TEST(dead_case, locks_end_with_their_use_and_not_with_the_children)
{
	struct group_checkpoint reader;
	struct group_attempt attempt;
	struct io_folder runs;
	pid_t of_attempt, of_reader;

	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "old one", &error), 0);
	of_attempt = start_worker();
	ck_assert_int_eq(checkpoint_commit(&attempt, "old one", false, &error), 0);
	ck_assert_int_eq(io_folder_open(&runs, "runs", &error), 0);
	ck_assert_int_eq(group_checkpoint_open(&reader, &runs, PLACE, STEP, &error), 0);
	of_reader = start_worker();
	ck_assert_int_eq(checkpoint_save(STEP, "new", false, &error), 0);
	ck_assert_uint_eq(scratch_entries("runs"), 2);
	group_checkpoint_close(&reader);
	io_folder_close(&runs);
	tidy(CHECKPOINT_JOB);
	ck_assert_uint_eq(scratch_entries("runs"), 1);
	ck_assert(checkpoint_is(PLACE, STEP, "new"));
	kill_process(of_attempt);
	kill_process(of_reader);
}

static int close_them(void *user)
{
	void **both = user;

	group_checkpoint_close(both[0]);
	io_folder_close(&((struct group_attempt *)both[1])->folder);
	return 0;
}

TEST(dead_case, a_child_that_closes_ends_no_lock_of_its_parent)
{
	struct group_checkpoint reader;
	struct group_attempt attempt;
	struct io_folder runs;
	void *both[] = { &reader, &attempt };

	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(io_folder_open(&runs, "runs", &error), 0);
	ck_assert_int_eq(group_checkpoint_open(&reader, &runs, PLACE, STEP, &error), 0);
	ck_assert_int_eq(checkpoint_begin(&attempt, STEP, CHECKPOINT_JOB, "new", &error), 0);
	ck_assert_int_eq(scratch_in_child(close_them, both), 0);
	tidy(CHECKPOINT_JOB);
	ck_assert_int_eq(checkpoint_commit(&attempt, "new", false, &error), 0);
	tidy(CHECKPOINT_JOB);
	ck_assert(checkpoint_is(attempt_name(), STEP, "old one"));
	group_checkpoint_close(&reader);
	io_folder_close(&runs);
}

/* ---- Filesystems that cannot exchange two names ---------------------------------------------- */

#define REPLACED "runs/.replaced-" PLACE "." MINE

TEST(dead_case, what_stepped_aside_comes_back_if_its_place_is_free)
{
	int fd;

	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(rename("runs/" PLACE, REPLACED), 0);
	/* Another process holds its lock. */
	fd = open(REPLACED, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	tidy(NULL);
	ck_assert(exists(REPLACED));
	close(fd);
	tidy(NULL);
	ck_assert(!exists(REPLACED));
	ck_assert(checkpoint_is(PLACE, STEP, "old one"));
}

TEST(dead_case, what_stepped_aside_goes_if_its_place_is_taken)
{
	ck_assert_int_eq(checkpoint_save(STEP, "old one", false, &error), 0);
	ck_assert_int_eq(rename("runs/" PLACE, REPLACED), 0);
	ck_assert_int_eq(mkdir("runs/" PLACE, 0777), 0);
	scratch_write("runs/" PLACE "/x", "x", 1);
	tidy(NULL);
	ck_assert(!exists(REPLACED));
	ck_assert_uint_eq(scratch_entries("runs"), 1);
}
