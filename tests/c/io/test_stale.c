/* SPDX-License-Identifier: Apache-2.0 */
/* Temporary files of dead writers are removed, and nothing else. */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "support/check_main.h"
#include "support/file_writer.h"
#include "support/lock_domain.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NOBODY 65534

static char here[IO_DOMAIN_BYTES]; /* lock domain of the test's directory */

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	domain_of(".", here);
}

static void teardown(void)
{
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static unsigned tidy(void)
{
	int fd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	unsigned before = scratch_descriptors(), entries = scratch_entries(".");

	io_remove_stale(fd, ".", NULL, NULL);
	ck_assert_uint_eq(scratch_descriptors(), before);
	close(fd);
	return entries - scratch_entries(".");
}

/* Returns a new name of a temporary file. */
static const char *temporary_name(const char *domain)
{
	static char name[NAME_MAX];
	static unsigned count;

	snprintf(name, sizeof(name), ".model.pt.ioshape-tmp-%s-%016x", domain, ++count);
	return name;
}

static void make_old(const char *name, time_t seconds)
{
	struct timespec times[2] = { { .tv_sec = time(NULL) - seconds },
				     { .tv_sec = time(NULL) - seconds } };

	ck_assert_int_eq(utimensat(AT_FDCWD, name, times, AT_SYMLINK_NOFOLLOW), 0);
}

/* ---- Living and dead writers ----------------------------------------------------------------- */

struct child {
	pid_t pid, worker;
	int to_parent;
};

/* Forks a child like a data-loader worker, which reports its process ID and waits. */
static bool start_worker(int fd)
{
	const pid_t pid = fork(), own = getpid();

	if (pid)
		return pid > 0;
	if (write(fd, &own, sizeof(own)) < 0)
		_exit(1);
	for (;;)
		pause();
}

/* Starts a process that begins to write "file", forks a worker, and waits. */
static struct child start_writer(void)
{
	struct file_write write = file_write_defaults();
	struct child child;
	int ends[2];

	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	child.pid = fork();
	ck_assert_int_ge(child.pid, 0);
	if (!child.pid) {
		static char data[300 * 1024]; /* some of it has been written by the engine */

		if (file_write_open(&write, "file") ||
		    io_writer_put(write.writer, data, sizeof(data), NULL, NULL))
			_exit(1);
		if (!start_worker(ends[1]))
			_exit(1);
		for (;;)
			pause();
	}
	close(ends[1]);
	ck_assert_int_eq(read(ends[0], &child.worker, sizeof(child.worker)), sizeof(child.worker));
	child.to_parent = ends[0];
	return child;
}

static bool is_locked(const char *name)
{
	int fd = open(name, O_RDONLY | O_CLOEXEC);
	bool locked = flock(fd, LOCK_SH | LOCK_NB);

	close(fd);
	return locked;
}

/* Kills the writer; its worker lives on. */
static void kill_writer(const struct child *child)
{
	glob_t found;
	int status;

	kill(child->pid, SIGKILL);
	ck_assert_int_eq(waitpid(child->pid, &status, 0), child->pid);
	ck_assert(WIFSIGNALED(status));
	/* The kernel frees a ring later, and with it the files that were written through it. */
	ck_assert_int_eq(glob(".file.*", 0, NULL, &found), 0);
	for (int tries = 0; is_locked(found.gl_pathv[0]) && tries < 2000; tries++)
		usleep(5000);
	globfree(&found);
}

static void end_worker(const struct child *child)
{
	kill(child->worker, SIGKILL);
	close(child->to_parent);
}

static struct test_case writers = { .name = "writers", .setup = setup, .teardown = teardown };

TEST(writers, what_is_being_written_is_kept_until_its_writer_was_killed)
{
	struct child child = start_writer();

	ck_assert_uint_eq(tidy(), 0);
	ck_assert_uint_eq(scratch_temporaries("."), 1);
	kill_writer(&child);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 0);
	end_worker(&child);
}

TEST(writers, what_this_process_writes_is_kept_at_every_step)
{
	struct file_write write = file_write_defaults();

	ck_assert_int_eq(file_write_open(&write, "file"), 0);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_eq(io_writer_put(write.writer, "new", 3, NULL, NULL), 0);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_eq(io_writer_finish(write.writer, NULL), 0);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_eq(io_writer_commit(write.writer, NULL), 0);
	ck_assert_uint_eq(tidy(), 0);
	file_write_close(&write);
	ck_assert(scratch_same("file", "new", 3));
}

static unsigned heard;

static void listen(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user;
	ck_assert_int_eq(level, IOSHAPE_LOG_WARNING);
	(void)message;
	heard++;
}

TEST(writers, a_writer_tidies_when_it_is_told_to_and_says_so)
{
	struct child child = start_writer();
	struct file_write write = file_write_defaults();
	struct base_budget budget = base_budget_begin();

	kill_writer(&child);
	write.config.log = (struct base_log){ listen, NULL, IOSHAPE_LOG_INFO };
	ck_assert_int_eq(file_write_all(&write, "other", "new", 3), 0);
	ck_assert_uint_eq(scratch_temporaries("."), 1);
	ck_assert_uint_eq(heard, 0);

	write = file_write_defaults();
	write.config.log = (struct base_log){ listen, NULL, IOSHAPE_LOG_INFO };
	write.options.tidying = &budget;
	ck_assert_int_eq(file_write_all(&write, "other", "new", 3), 0);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	ck_assert_uint_eq(heard, 1);
	ck_assert(scratch_same("other", "new", 3));
	end_worker(&child);
}

/* ---- Similar names and other kinds of files -------------------------------------------------- */

static struct test_case alike = { .name = "look-alikes", .setup = setup, .teardown = teardown };

TEST(alike, names_that_are_not_quite_right_are_kept)
{
	static const char *const patterns[] = {
		"model.pt.ioshape-tmp-%s-0123456789abcdef", /* not hidden */
		".model.pt.ioshape-tmp-%s-0123456789abcde",
		".model.pt.ioshape-tmp-%s-0123456789abcdef0",
		".model.pt.ioshape-tmp-%s-0123456789abcdef~",
		".model.pt.ioshape-tmp-%s-0123456789ABCDEF",
		".model.pt.ioshape-tmp-%s_0123456789abcdef",
		".model.pt.ioshape-tmp-%s0-0123456789abcdef",
		".model.pt.ioshape-tmp--%s-0123456789abcdef",
		".model.pt.ioshape-temp-%s-0123456789abcdef",
		".model.pt.ioshape-tmp-0123456789abcdef",
		".model.pt",
		".ioshape-tmp-",
		"-0123456789abcdef",
		".",
	};
	char name[NAME_MAX];
	unsigned count;

	for (size_t i = 0; i + 1 < ARRAY_LENGTH(patterns); i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
		snprintf(name, sizeof(name), patterns[i], here);
#pragma GCC diagnostic pop
		scratch_write(name, "x", 1);
		make_old(name, 10 * 24 * 3600);
	}
	count = scratch_entries(".");
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_uint_eq(scratch_entries("."), count);
}

TEST(alike, names_that_are_right_are_removed)
{
	char shortest[NAME_MAX];

	scratch_write(temporary_name(here), "x", 1);
	scratch_write(temporary_name(here), "", 0);
	/* The destination's name may be anything, and may be cut to nothing. */
	snprintf(shortest, sizeof(shortest), "..ioshape-tmp-%s-0123456789abcdef", here);
	scratch_write(shortest, "x", 1);
	ck_assert_uint_eq(tidy(), 3);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

/* Locks the file after a short time, like a slow writer. */
static void *lock_soon(void *file)
{
	usleep(2000);
	flock(*(int *)file, LOCK_EX);
	return NULL;
}

/*
 * A writer that has not locked its file yet must not be taken for dead, unless it never locks it.
 */
TEST(alike, who_has_just_made_a_file_is_given_time_to_lock_it)
{
	unsigned kept = 0;

	for (int round = 0; round < 20; round++) {
		const char *name = temporary_name(here);
		pthread_t writer;
		int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);

		ck_assert_int_ge(file, 0);
		ck_assert_int_eq(pthread_create(&writer, NULL, lock_soon, &file), 0);
		/* On a busy machine the thread may be too late. */
		kept += !tidy();
		pthread_join(writer, NULL);
		close(file);
		tidy();
		ck_assert_uint_eq(scratch_entries("."), 0);
	}
	ck_assert_uint_gt(kept, 0);
}

TEST(alike, links_and_pipes_are_kept)
{
	scratch_write("precious", "x", 1);
	ck_assert_int_eq(symlink("precious", temporary_name(here)), 0);
	ck_assert_int_eq(symlink("nowhere", temporary_name(here)), 0);
	ck_assert_int_eq(mkfifo(temporary_name(here), 0666), 0);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_uint_eq(scratch_entries("."), 4);
	ck_assert(scratch_same("precious", "x", 1));
}

static const char *make_directory(const char *domain)
{
	static char file[NAME_MAX + 8];
	const char *name = temporary_name(domain);

	ck_assert_int_eq(mkdir(name, 0777), 0);
	snprintf(file, sizeof(file), "%s/a", name);
	scratch_write(file, "x", 1);
	return file;
}

TEST(alike, directories_go_with_their_files)
{
	make_directory(here);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

/* Makes nested directories with a file in the innermost one. */
static void nest(const char *name, int levels)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s", name);
	for (int level = 0; level < levels; level++) {
		strcat(path, "/inner");
		ck_assert_int_eq(mkdir(path, 0777), 0);
	}
	strcat(path, "/file");
	scratch_write(path, "x", 1);
}

TEST(alike, directories_in_a_directory_go_with_it)
{
	char outer[NAME_MAX], link[NAME_MAX + 8];
	const char *file = make_directory(here);

	snprintf(outer, sizeof(outer), "%.*s", (int)(strlen(file) - 2), file);
	nest(outer, 4);
	ck_assert_int_eq(mkdir("precious", 0777), 0);
	scratch_write("precious/file", "x", 1);
	snprintf(link, sizeof(link), "%s/link", outer);
	ck_assert_int_eq(symlink("../precious", link), 0);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 1);
	ck_assert(scratch_same("precious/file", "x", 1));
}

/* The directory may be in use on another host, whose lock is not visible here. */
TEST(alike, a_directory_of_another_domain_is_as_old_as_its_newest_file)
{
	const char *file = make_directory("deadbeef");
	char name[NAME_MAX];

	snprintf(name, sizeof(name), "%.*s", (int)(strlen(file) - 2), file);
	make_old(name, 25 * 3600);
	ck_assert_uint_eq(tidy(), 0);
	make_old(file, 25 * 3600);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

/* A partly removed directory has a new time, so the rest goes when that is a day old. */
TEST(alike, what_could_not_be_removed_whole_goes_a_day_later)
{
	const char *file = make_directory("deadbeef");
	char name[NAME_MAX], inner[NAME_MAX + 8];

	snprintf(name, sizeof(name), "%.*s", (int)(strlen(file) - 2), file);
	snprintf(inner, sizeof(inner), "%s/inner", name);
	nest(name, 20);
	make_old(file, 25 * 3600);
	make_old(inner, 25 * 3600);
	make_old(name, 25 * 3600);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_eq(system("rm -r .model*/inner"), 0);
	ck_assert_uint_eq(tidy(), 0);
	make_old(name, 25 * 3600);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

TEST(alike, a_directory_that_is_being_filled_stays)
{
	struct base_budget budget = base_budget_begin();
	struct io_new_folder made;
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/ready", scratch_directory());
	ck_assert_int_eq(io_new_folder_make(&made, path, &budget, NULL, NULL), 0);
	make_old(made.temporary, 3 * 24 * 3600);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_eq(io_new_folder_commit(&made, NULL), 0);
	ck_assert_uint_eq(tidy(), 0);
	io_new_folder_close(&made, NULL);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_uint_eq(scratch_entries("."), 1);
}

/* An unknown domain counts as another one. */
LOOP_TEST(alike, files_of_other_domains_are_kept_for_a_day, 0, 2)
{
	const char *name = temporary_name(_i ? "deadbeef" : IO_NOWHERE);

	scratch_write(name, "x", 1);
	ck_assert_uint_eq(tidy(), 0);
	make_old(name, 23 * 3600);
	ck_assert_uint_eq(tidy(), 0);
	make_old(name, 25 * 3600);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

/* To ask for the server's time would take a file. */
TEST(alike, a_recent_file_of_another_domain_is_not_opened)
{
	const char *name = temporary_name("01234567");
	int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	char event[4096];

	ck_assert_int_ge(watch, 0);
	scratch_write(name, "x", 1);
	ck_assert_int_ge(inotify_add_watch(watch, name, IN_OPEN), 0);
	ck_assert_int_ge(inotify_add_watch(watch, ".", IN_CREATE), 0);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_lt(read(watch, event, sizeof(event)), 0);
	ck_assert_int_eq(errno, EAGAIN);
	close(watch);
}

TEST(writers, a_lock_is_heeded_however_old_the_file_is)
{
	struct child child = start_writer();

	/* A held lock counts more than the age. */
	ck_assert_int_eq(system("touch -d '3 days ago' .file*"), 0);
	ck_assert_uint_eq(tidy(), 0);
	kill_writer(&child);
	ck_assert_uint_eq(tidy(), 1);
	end_worker(&child);
}

TEST_IF(alike, files_of_other_users_are_kept, !geteuid())
{
	const char *name = temporary_name(here);

	scratch_write(name, "x", 1);
	ck_assert_int_eq(chown(name, NOBODY, NOBODY), 0);
	make_old(name, 25 * 3600);
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_uint_eq(scratch_entries("."), 1);
}

TEST_IF(alike, what_root_gave_to_the_owner_of_the_file_goes, !geteuid())
{
	const char *name = temporary_name(here);

	scratch_write(name, "x", 1);
	scratch_write("model.pt", "x", 1);
	ck_assert_int_eq(chown(name, NOBODY, NOBODY), 0);
	/* The destination belongs to root, so the temporary file is not root's own. */
	ck_assert_uint_eq(tidy(), 0);
	ck_assert_int_eq(chown("model.pt", NOBODY, NOBODY), 0);
	ck_assert_uint_eq(tidy(), 1);
	ck_assert_uint_eq(scratch_entries("."), 1);
}

/* ---- Removal in portions --------------------------------------------------------------------- */

/*
 * Tidies with one budget. Returns how many entries were removed; the directory goes with its last
 * one.
 */
static unsigned tidy_some(const char *directory)
{
	const unsigned before = scratch_entries(directory);
	int fd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct base_budget budget = base_budget_begin();

	io_remove_stale(fd, ".", &budget, NULL);
	close(fd);
	return before - (access(directory, F_OK) ? 0 : scratch_entries(directory));
}

/* Repeats until all is removed. On a slow machine a budget removes less. */
static void remove_bit_by_bit(const char *directory, unsigned entries)
{
	unsigned times = 0;

	while (entries) {
		const unsigned removed = tidy_some(directory);

		ck_assert_uint_gt(removed, 0);
		ck_assert_uint_le(removed, BASE_TIDY_ENTRIES);
		entries -= removed;
		times++;
	}
	ck_assert_uint_ge(times, 2);
}

TEST(alike, what_many_dead_writers_left_goes_bit_by_bit)
{
	const unsigned entries = BASE_TIDY_ENTRIES + 100;

	for (unsigned i = 0; i < entries; i++)
		scratch_write(temporary_name(here), "", 0);
	remove_bit_by_bit(".", entries);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

TEST(alike, a_large_directory_of_a_dead_writer_goes_bit_by_bit)
{
	const char *name = temporary_name(here);
	const unsigned entries = BASE_TIDY_ENTRIES + 100;
	char file[2 * NAME_MAX];

	ck_assert_int_eq(mkdir(name, 0777), 0);
	for (unsigned i = 0; i < entries; i++) {
		snprintf(file, sizeof(file), "%s/%u", name, i);
		scratch_write(file, "", 0);
	}
	remove_bit_by_bit(name, entries);
	tidy();
	ck_assert_uint_eq(scratch_entries("."), 0);
}

TEST(alike, a_save_that_lacks_the_space_does_not_leave_it_for_the_next)
{
	for (unsigned i = 0; i < BASE_TIDY_ENTRIES + 100; i++)
		scratch_write(temporary_name(here), "", 0);
	io_clear_space("file", NULL);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

TEST(alike, a_budget_whose_time_is_over_removes_nothing)
{
	int fd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct base_budget budget = base_budget_begin();

	budget.until_ns = base_now_ns();
	scratch_write(temporary_name(here), "x", 1);
	io_remove_stale(fd, ".", &budget, NULL);
	ck_assert_uint_eq(scratch_temporaries("."), 1);
	ck_assert(base_budget_is_spent(&budget));
	close(fd);
}

TEST(alike, a_directory_that_cannot_be_listed_is_left_alone)
{
	scratch_write(temporary_name(here), "x", 1);
	io_remove_stale(-1, ".", NULL, NULL);
	ck_assert_uint_eq(scratch_temporaries("."), 1);
}

TEST(alike, a_lock_domain_is_one_filesystem_on_this_machine)
{
	char again[IO_DOMAIN_BYTES];

	ck_assert_uint_eq(strlen(here), 8);
	ck_assert_uint_eq(strspn(here, "0123456789abcdef"), 8);
	domain_of("..", again);
	ck_assert(io_is_lock_domain(again, here));
	domain_of("/proc", again);
	ck_assert(!io_is_lock_domain(again, here));
	io_lock_domain(-1, again);
	ck_assert_str_eq(again, IO_NOWHERE);
	ck_assert(!io_is_lock_domain(again, again));
}

/* Writers tidy while others write: no writer may lose its file. */
static int write_all_the_time(void *argument)
{
	char name[32];

	snprintf(name, sizeof(name), "file-%d", *(int *)argument);
	for (int i = 0; i < 60; i++) {
		struct file_write write = file_write_defaults();
		struct base_budget budget = base_budget_begin();

		write.options.tidying = &budget;
		write.options.no_sync = true;
		if (file_write_all(&write, name, "new", 3)) {
			fprintf(stderr, "%s\n", write.error.text);
			return 1;
		}
	}
	return 0;
}

TEST(writers, writers_that_tidy_do_not_disturb_each_other)
{
	pid_t children[4];
	int status;

	for (int i = 0; i < 4; i++) {
		children[i] = fork();
		ck_assert_int_ge(children[i], 0);
		if (!children[i])
			_exit(write_all_the_time(&i));
	}
	for (int i = 0; i < 4; i++) {
		ck_assert_int_eq(waitpid(children[i], &status, 0), children[i]);
		ck_assert_int_eq(status, 0);
	}
	ck_assert_uint_eq(scratch_entries("."), 4);
}
