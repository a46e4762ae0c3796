/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A filesystem that is mounted twice on one host, as for two pods: neither mount sees the locks of
 * the other. The second mount shows times of a clock that is two days late. Files being written
 * through one mount must survive clean-ups through the other.
 */
#define _GNU_SOURCE
#include "group/group.h"
#include "io/atomic_file.h"
#include "support/file_writer.h"
#include "support/passthrough.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <time.h>

static const char *const mounts[] = { "one", "two" };
static pid_t daemons[ARRAY_LENGTH(mounts)];

/* ---- Mounting -------------------------------------------------------------------------------- */

static const char *mount_both(void)
{
	const char *why_not = NULL;

	if (geteuid())
		return "mounting takes root";
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return "mounts of one's own are not allowed here";
	if (mkdir("base", 0777))
		return "no directory";
	for (size_t i = 0; !why_not && i < ARRAY_LENGTH(mounts); i++)
		why_not = mkdir(mounts[i], 0777) ?
				  "no directory" :
				  passthrough_mount("base", mounts[i], i ? "late" : NULL,
						    &daemons[i]);
	return why_not;
}

static void unmount_both(void)
{
	for (size_t i = 0; i < ARRAY_LENGTH(mounts); i++) {
		umount2(mounts[i], MNT_DETACH);
		if (daemons[i] > 0) {
			kill(daemons[i], SIGTERM);
			waitpid(daemons[i], NULL, 0);
		}
	}
}

/* ---- Tests ----------------------------------------------------------------------------------- */

static unsigned tidy(const char *directory)
{
	int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	const unsigned before = scratch_temporaries(directory);

	io_remove_stale(fd, directory, NULL, NULL);
	close(fd);
	return before - scratch_temporaries(directory);
}

static bool spares_the_living(void)
{
	struct file_write write = file_write_defaults();
	int ret = file_write_open(&write, "one/file");

	if (!ret)
		ret = io_writer_put(write.writer, "new", 3, NULL, &write.error);
	if (!ret && tidy("two"))
		complain("a living writer's file was removed");
	if (!ret)
		ret = file_write_end(&write);
	file_write_close(&write);
	if (ret)
		return complain("%s", write.error.text);
	return !*complaint && scratch_same("two/file", "new", 3);
}

static int begin_and_die(void *argument)
{
	struct file_write write = file_write_defaults();

	(void)argument;
	return file_write_open(&write, "one/dead");
}

static bool removes_the_dead(void)
{
	if (scratch_in_child(begin_and_die, NULL) || scratch_temporaries("base") != 1)
		return complain("no process died with a temporary file");
	if (tidy("two"))
		return complain("from the other mount nobody can know that it is dead");
	return tidy("one") == 1 || complain("nothing was removed");
}

/* Checks that the age of temporary files is measured by the server's clock, not by the host's. */
static bool goes_by_the_server(void)
{
	static const char young[] = "base/.a.ioshape-tmp-01234567-0123456789abcdef";
	static const char old[] = "base/.b.ioshape-tmp-01234567-0123456789abcdef";
	const time_t then = time(NULL) - 25 * 3600;
	const struct timespec times[2] = { { .tv_sec = then }, { .tv_sec = then } };

	scratch_write(young, "x", 1);
	scratch_write(old, "x", 1);
	if (utimensat(AT_FDCWD, old, times, 0))
		return complain("its time cannot be set");
	if (tidy("two") != 1 || access(young, F_OK))
		return complain("not the one, and nothing else, that is more than a day old");
	return !unlink(young) && !scratch_temporaries("base");
}

static bool spares_attempts(void)
{
	struct group_attempt attempt;
	struct io_folder other;
	struct base_error error = { 0 };
	int ret = group_attempt_begin(&attempt, "one/runs", 1, NULL, "0000471a", NULL, &error);
	bool there;

	if (!ret)
		ret = io_folder_open(&other, "two/runs", &error);
	if (ret)
		return complain("%s", error.text);
	group_tidy(&other, "0000471b", NULL, NULL, NULL);
	io_folder_close(&other);
	there = io_folder_is_named(&attempt.folder, &attempt.directory, attempt.name) &&
		scratch_entries("base/runs") == 1;
	group_attempt_abandon(&attempt);
	return there || complain("another job's attempt was removed");
}

static const struct {
	const char *name;
	bool (*test)(void);
} tests[] = {
	{ "a living writer of the other mount keeps its file", spares_the_living },
	{ "a dead writer's file goes, through its own mount", removes_the_dead },
	{ "a file's age goes by the server's clock", goes_by_the_server },
	{ "an attempt of the other mount stays", spares_attempts },
};

int main(void)
{
	const char *why_not;

	scratch_setup();
	if (chdir(scratch_directory()))
		return 1;
	why_not = mount_both();
	for (size_t i = 0; i < ARRAY_LENGTH(tests); i++) {
		*complaint = 0;
		if (why_not)
			tap_skip(tests[i].name, why_not);
		else if (!tap_ok(tests[i].test(), "%s", tests[i].name))
			printf("# %s\n", complaint);
	}
	unmount_both();
	if (!chdir("/"))
		scratch_teardown();
	return tap_end();
}
