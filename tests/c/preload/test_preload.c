/* SPDX-License-Identifier: Apache-2.0 */
/* Programs with the preload library: they take turns and notice nothing (program.c). */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/scratch.h"

#include <ioshape/slots.h>

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char log_path[512];
static struct ioshape_context *context;

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void setup(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	char address[512];

	scratch_setup();
	snprintf(address, sizeof(address), "local:%s", scratch_directory());
	snprintf(log_path, sizeof(log_path), "%s/log", scratch_directory());
	setenv("IOSHAPE_COORDINATOR", address, 1);
	setenv("IOSHAPE_POOL", "shared", 1);
	setenv("IOSHAPE_SLOTS", "1", 1);
	setenv("IOSHAPE_PRELOAD_ALL", "yes", 1);
	setenv("IOSHAPE_PRELOAD_BYTES", "1M", 1);
	setenv("IOSHAPE_PRELOAD_LOG", log_path, 1);
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
}

static void teardown(void)
{
	ioshape_context_free(context);
	scratch_teardown();
}

/* ---- Programs -------------------------------------------------------------------------------- */

/* Starts the program with the library and returns its process id. */
static pid_t start(const char *body)
{
	const char *path = scratch_path("file");
	pid_t child = fork();

	ck_assert_int_ge(child, 0);
	if (!child) {
		setenv("LD_PRELOAD", PRELOAD_LIBRARY, 1);
		execl(PRELOAD_PROGRAM, PRELOAD_PROGRAM, body, path, NULL);
		_exit(127);
	}
	return child;
}

/* Waits for the program, which must succeed. */
static void finish(pid_t child)
{
	int status;

	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
}

static void run(const char *body)
{
	finish(start(body));
}

/* ---- The log --------------------------------------------------------------------------------- */

/* Returns how many lines of the log have this text. */
static unsigned lines_with(const char *text)
{
	FILE *log = fopen(log_path, "r");
	char line[8192];
	unsigned count = 0;

	if (!log)
		return 0;
	while (fgets(line, sizeof(line), log))
		count += strstr(line, text) != NULL;
	fclose(log);
	return count;
}

/* Checks that the log gets `count` lines with this text. Holders end a moment after the program. */
static void must_log(unsigned count, const char *text)
{
	for (int i = 0; i < 500 && lines_with(text) < count; i++)
		poll(NULL, 0, 10);
	ck_assert_uint_eq(lines_with(text), count);
}

/* Returns the process id of the holder of this test's program, or 0. */
static pid_t find_holder(void)
{
	DIR *processes = opendir("/proc");
	const struct dirent *entry;
	pid_t found = 0;

	while (!found && (entry = readdir(processes))) {
		char path[300], text[65536];
		ssize_t bytes;
		int fd;

		if (!isdigit((unsigned char)*entry->d_name))
			continue;
		snprintf(path, sizeof(path), "/proc/%s/exe", entry->d_name);
		bytes = readlink(path, text, sizeof(text) - 1);
		text[bytes > 0 ? bytes : 0] = 0;
		if (!strstr(text, "/ioshape-holder"))
			continue;
		snprintf(path, sizeof(path), "/proc/%s/environ", entry->d_name);
		fd = open(path, O_RDONLY);
		bytes = fd >= 0 ? read(fd, text, sizeof(text)) : 0;
		close(fd);
		if (bytes > 0 && memmem(text, (size_t)bytes, log_path, strlen(log_path)))
			found = (pid_t)atoi(entry->d_name);
	}
	closedir(processes);
	return found;
}

static pid_t wait_for_holder(void)
{
	pid_t holder = 0;

	for (int i = 0; i < 1000 && !holder; i++) {
		holder = find_holder();
		poll(NULL, 0, holder ? 0 : 5);
	}
	ck_assert_int_gt(holder, 0);
	return holder;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

/* Takes the only slot. */
static struct ioshape_slot *take(int64_t timeout_ms)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot = NULL;

	options.timeout_ms = timeout_ms;
	ioshape_slot_acquire(context, &options, &slot);
	return slot;
}

static bool is_free(void)
{
	struct ioshape_slot *slot = take(-1);
	const bool was_free = slot != NULL;

	ioshape_slot_free(slot);
	return was_free;
}

static void wait_until_held(void)
{
	for (int i = 0; i < 1000 && is_free(); i++)
		poll(NULL, 0, 5);
	ck_assert(!is_free());
}

/* ---- Large writes take slots ----------------------------------------------------------------- */

static struct test_case writes = { .name = "writes", .setup = setup, .teardown = teardown };

static const char *const ways[] = { "write",      "one-write", "offset",    "pieces",
				    "stream",     "copy",      "sendfile",  "sendfile64",
				    "splice",     "errno",     "unnoticed", "without-descriptors",
				    "small-files" };

LOOP_TEST(writes, a_large_write_takes_a_slot_and_returns_it, 0, (int)(sizeof(ways) / sizeof(*ways)))
{
	run(ways[_i]);
	must_log(1, "/file\" pool=\"shared\"");
	must_log(lines_with("program=\"preload-program\""), "end=close");
	ck_assert(is_free());
}

static const char *const others[] = { "small", "scattered", "pipes" };

LOOP_TEST(writes, other_writes_take_none, 0, (int)(sizeof(others) / sizeof(*others)))
{
	run(others[_i]);
	poll(NULL, 0, 300);
	must_log(0, "");
}

TEST(writes, a_program_waits_for_its_turn)
{
	struct ioshape_slot *slot = take(1000);
	pid_t child = start("write");

	poll(NULL, 0, 1000);
	ck_assert_int_eq(waitpid(child, NULL, WNOHANG), 0);
	ioshape_slot_free(slot);
	finish(child);
	must_log(1, "end=close");
}

static char ahead[128];

static int note_who_is_ahead(void *user, const struct ioshape_place *place)
{
	(void)user;
	if (*place->ahead)
		snprintf(ahead, sizeof(ahead), "%s", place->ahead);
	return *place->ahead != 0;
}

TEST(writes, operators_see_the_program_and_its_file)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot;
	pid_t child = start("steadily");

	wait_until_held();
	options.waiting = note_who_is_ahead;
	ck_assert_int_eq(ioshape_slot_acquire(context, &options, &slot), -ECANCELED);
	ck_assert_ptr_nonnull(strstr(ahead, ":preload-program:"));
	ck_assert_str_eq(ahead + strlen(ahead) - strlen("/file"), "/file");
	finish(child);
}

TEST(writes, a_program_that_waits_too_long_writes)
{
	struct ioshape_slot *slot = take(1000);
	const double begin = now_s();

	setenv("IOSHAPE_PRELOAD_WAIT_S", "1", 1);
	run("write");
	ck_assert_double_ge(now_s() - begin, 1);
	must_log(1, "held_s=0.000 bytes=0 end=timeout");
	ioshape_slot_free(slot);
}

TEST(writes, a_program_that_does_not_wait_writes)
{
	struct ioshape_slot *slot = take(1000);

	setenv("IOSHAPE_PRELOAD_WAIT_S", "0", 1);
	run("write");
	must_log(0, "end=close");
	ioshape_slot_free(slot);
}

TEST(writes, a_pause_returns_the_slot)
{
	pid_t child = start("pause");

	wait_until_held();
	must_log(1, "end=pause");
	ck_assert(is_free());
	finish(child);
	must_log(1, "end=close");
}

TEST(writes, a_slow_program_returns_the_slot)
{
	run("slowly");
	must_log(1, "end=slow");
}

TEST(writes, files_of_one_program_share_a_slot)
{
	run("two-files");
	must_log(1, "end=close");
	must_log(1, "");
}

TEST(writes, threads_share_a_slot)
{
	run("threads");
	for (int i = 0; i < 500 && !lines_with("pool=\"shared\""); i++)
		poll(NULL, 0, 10);
	ck_assert_uint_ge(lines_with("pool=\"shared\""), 1);
	must_log(0, "end=timeout");
	ck_assert(is_free());
}

/* Returns whether a process has the file at this path open. */
static bool has_open(pid_t process, const char *path)
{
	char name[64], target[PATH_MAX];
	bool found = false;

	for (int fd = 0; fd < 64 && !found; fd++) {
		ssize_t bytes;

		snprintf(name, sizeof(name), "/proc/%d/fd/%d", (int)process, fd);
		bytes = readlink(name, target, sizeof(target) - 1);
		target[bytes > 0 ? bytes : 0] = 0;
		found = !strcmp(target, path);
	}
	return found;
}

TEST(writes, a_file_that_is_renamed_is_synced)
{
	const char *before = scratch_path("file"), *after = scratch_path("renamed");
	pid_t child = start("steadily"), holder;

	wait_until_held();
	holder = wait_for_holder();
	for (int i = 0; i < 500 && !has_open(holder, before); i++)
		poll(NULL, 0, 10);
	ck_assert_int_eq(rename(before, after), 0);
	ck_assert(has_open(holder, after));
	finish(child);
}

TEST(writes, a_bandwidth_limit_holds)
{
	const double begin = now_s();

	setenv("IOSHAPE_RATE", "2M", 1);
	setenv("IOSHAPE_PRELOAD_BYTES", "64K", 1);
	run("write"); /* 4 MiB */
	ck_assert_double_ge(now_s() - begin, 1);
	must_log(1, "end=close");
}

/* ---- Other processes ------------------------------------------------------------------------- */

static struct test_case processes = { .name = "processes", .setup = setup, .teardown = teardown };

TEST(processes, a_forked_child_has_a_turn_of_its_own)
{
	char parent[32];
	pid_t child = start("forked");

	snprintf(parent, sizeof(parent), "pid=%d ", (int)child);
	finish(child);
	must_log(1, "/file.child\" pool=\"shared\"");
	ck_assert_uint_eq(lines_with(parent) + 1, lines_with(""));
	ck_assert_uint_ge(lines_with("/file\" pool=\"shared\""), 1);
	must_log(0, "end=timeout");
}

TEST(processes, a_child_of_vfork_disturbs_no_turn)
{
	run("vforked");
	must_log(1, "end=close");
	must_log(1, "");
}

TEST(processes, a_killed_program_frees_its_slot)
{
	pid_t child = start("steadily");
	struct ioshape_slot *slot;
	double begin;

	wait_until_held();
	kill(child, SIGKILL);
	begin = now_s();
	slot = take(10000); /* shorter than a lease */
	ck_assert_ptr_nonnull(slot);
	ck_assert_double_lt(now_s() - begin, 10);
	ioshape_slot_free(slot);
	waitpid(child, NULL, 0);
	must_log(1, "end=exit");
}

/* ---- Failures -------------------------------------------------------------------------------- */

static struct test_case failures = { .name = "failures", .setup = setup, .teardown = teardown };

TEST(failures, a_program_whose_holder_dies_writes_on)
{
	pid_t child = start("steadily");

	wait_until_held();
	kill(wait_for_holder(), SIGKILL);
	finish(child);
	ck_assert(is_free());
	must_log(0, "");
}

TEST(failures, a_waiting_program_whose_holder_dies_writes_on)
{
	struct ioshape_slot *slot = take(1000);
	const double begin = now_s();
	pid_t child = start("one-write");

	kill(wait_for_holder(), SIGKILL);
	finish(child);
	ck_assert_double_lt(now_s() - begin, 8);
	ioshape_slot_free(slot);
}

TEST(failures, a_waiting_program_whose_holder_stops_writes_on)
{
	struct ioshape_slot *slot = take(1000);
	const double begin = now_s();
	pid_t child = start("one-write"), holder;

	poll(NULL, 0, 500);
	holder = wait_for_holder();
	kill(holder, SIGSTOP);
	finish(child);
	ck_assert_double_lt(now_s() - begin, 15);
	kill(holder, SIGKILL);
	ioshape_slot_free(slot);
}

TEST(failures, the_holder_may_die_at_any_moment)
{
	for (int i = 0; i < 20; i++) {
		pid_t child = start("one-write"), holder = 0;

		for (int j = 0; j < 100 && !holder; j++)
			holder = find_holder();
		poll(NULL, 0, i / 2);
		if (holder)
			kill(holder, i % 2 ? SIGKILL : SIGTERM);
		finish(child);
	}
}

static const char *const lacks[] = { "without-memory", "reused", "all-closed" };

LOOP_TEST(failures, a_program_that_lacks_something_writes, 0, (int)(sizeof(lacks) / sizeof(*lacks)))
{
	run(lacks[_i]);
	/* A descriptor that was closed in silence counts as a pause. */
	for (int i = 0; i < 500 && !is_free(); i++)
		poll(NULL, 0, 10);
	ck_assert(is_free());
}

TEST(failures, a_program_without_a_coordinator_writes)
{
	setenv("IOSHAPE_COORDINATOR", "unix:///nonexistent/socket", 1);
	setenv("IOSHAPE_UNREACHABLE", "fail", 1);
	run("write");
	must_log(1, "end=refused error=\"");
}

TEST(failures, a_program_with_wrong_settings_writes)
{
	setenv("IOSHAPE_COORDINATOR", "nonsense", 1);
	setenv("IOSHAPE_PRELOAD_WAIT_S", "-1", 1);
	run("write");
	must_log(1, "end=refused");
}

TEST(failures, a_signal_ends_the_wait)
{
	struct ioshape_slot *slot = take(1000);
	const double begin = now_s();

	run("alarmed");
	ck_assert_double_lt(now_s() - begin, 30);
	ioshape_slot_free(slot);
}

TEST(failures, a_signal_handler_may_write)
{
	struct ioshape_slot *slot = take(1000);

	run("handler");
	ioshape_slot_free(slot);
}

TEST(failures, a_cancelled_thread_disturbs_no_other)
{
	struct ioshape_slot *slot = take(1000);

	setenv("IOSHAPE_PRELOAD_WAIT_S", "2", 1);
	run("cancelled");
	ioshape_slot_free(slot);
}

/* ---- Exclusions ------------------------------------------------------------------------------ */

static struct test_case exclusions = { .name = "exclusions", .setup = setup, .teardown = teardown };

static void must_be_excluded_by(const char *entry)
{
	char list[600];

	snprintf(list, sizeof(list), "other,%s,/nowhere", entry);
	setenv("IOSHAPE_PRELOAD_EXCLUDE", list, 1);
	run("write");
	poll(NULL, 0, 300);
	must_log(0, "");
}

TEST(exclusions, a_program_can_be_excluded)
{
	must_be_excluded_by("preload-program");
}

TEST(exclusions, a_user_can_be_excluded)
{
	char user[32];

	snprintf(user, sizeof(user), "uid=%u", (unsigned)getuid());
	must_be_excluded_by(user);
}

TEST(exclusions, a_folder_can_be_excluded)
{
	must_be_excluded_by(scratch_directory());
}

TEST(exclusions, what_resembles_an_entry_is_not_excluded)
{
	char list[600];
	const char *file = scratch_path("file");

	snprintf(list, sizeof(list), "preload,%.*s,uid=%u0", (int)strlen(file) - 1, file,
		 (unsigned)getuid() + 1);
	setenv("IOSHAPE_PRELOAD_EXCLUDE", list, 1);
	run("write");
	must_log(1, "end=close");
}

TEST(exclusions, the_library_can_be_switched_off)
{
	setenv("IOSHAPE_PRELOAD", "off", 1);
	run("write");
	poll(NULL, 0, 300);
	must_log(0, "");
}

TEST(exclusions, local_filesystems_are_left_alone)
{
	unsetenv("IOSHAPE_PRELOAD_ALL");
	run("write");
	poll(NULL, 0, 300);
	must_log(0, "end=close");
}

TEST(exclusions, saves_of_ioshape_have_their_slots_already)
{
	pid_t child = fork();

	ck_assert_int_ge(child, 0);
	if (!child) {
		setenv("LD_PRELOAD", PRELOAD_LIBRARY, 1);
		execl(PRELOAD_PROGRAM, PRELOAD_PROGRAM, "write",
		      scratch_path(".file.ioshape-tmp-00000000-0123"), NULL);
		_exit(127);
	}
	finish(child);
	poll(NULL, 0, 300);
	must_log(0, "");
}
