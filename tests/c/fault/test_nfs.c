/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves and loads over NFS: the kernel's client, versions 3 and 4.2, and a server in user space on
 * this machine. So a test can inspect the server's files, and can act as another host by changing
 * them behind the client's back. If this kernel has no NFS client, the test runs in a machine whose
 * kernel has one: see support/machine.h.
 */
#define _GNU_SOURCE
#include "fs/fs.h"
#include "group/group.h"
#include "support/checkpoint_case.h"
#include "support/machine.h"
#include "support/nfs_case.h"
#include "support/nfs_server.h"
#include "support/report_downgrade.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <ioshape/group.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define LARGE_BYTES (2u << 20)
#define EXPORT_MIB 64

static const char *version; /* version that is mounted */

static bool what_is_saved_is_loaded(void)
{
	static const struct {
		enum ioshape_engine engine;
		const char *name;
	} engines[] = {
		{ IOSHAPE_ENGINE_AUTO, NULL },
		{ IOSHAPE_ENGINE_URING, "uring" },
		{ IOSHAPE_ENGINE_THREADS, "threads" },
		{ IOSHAPE_ENGINE_BUFFERED, "buffered" },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(engines); i++) {
		struct ioshape_report report = IOSHAPE_REPORT_INIT;
		const struct sample *sample = i % 2 ? &old_sample : &new_sample;

		if (save(engines[i].engine, sample, false, &report) || !holds(sample) ||
		    !nothing_is_left_behind())
			return false;
		if (engines[i].name && strcmp(report.engine, engines[i].name) != 0)
			return complain("engine \"%s\": %s", report.engine,
					report.downgrades[0].sentence);
		if (report.direct != (engines[i].engine != IOSHAPE_ENGINE_BUFFERED))
			return complain("%s, direct is %u: %s", report.engine, report.direct,
					report.downgrades[0].sentence);
		/* Only version 4.2 can reserve space. */
		if (!report_downgrade(&report, IOSHAPE_DOWNGRADE_PREALLOCATE) != (*version == '4'))
			return complain("it reserves space, or not: %s",
					report.downgrades[0].sentence);
		if (strncmp(report.filesystem, "nfs", 3) != 0)
			return complain("the report calls it \"%s\"", report.filesystem);
	}
	return true;
}

static bool it_is_known_for_what_it_is(void)
{
	const bool third = *version == '3';
	const char *source = third ? "127.0.0.1:" NFS_SERVER_FOLDER : "127.0.0.1:/export";
	char pool[FS_POOL_BYTES], name[FS_POOL_BYTES];
	struct base_error error = { 0 };
	struct fs_storage storage;
	int fd = open(NFS_CLIENT_FOLDER, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int ret = fs_look_at_storage(fd, NFS_CLIENT_FOLDER, "", &storage, &error);

	close(fd);
	if (ret || fs_pool_of_path(FILE_HERE, name, &error))
		return complain("%s", error.text);
	if (storage.family != FS_NFS ||
	    !strstr(storage.mount.options, third ? "vers=3" : "vers=4.2"))
		return complain("it is taken for %s, %s", fs_family_name(storage.family),
				storage.mount.options);
	if (strcmp(storage.mount.source, source) != 0 ||
	    strcmp(storage.mount.mount_point, NFS_CLIENT_FOLDER) != 0)
		return complain("%s at %s", storage.mount.source, storage.mount.mount_point);
	if (!storage.remote || storage.layout.count)
		return complain("it looks like one that is local, or striped");
	if (storage.total_bytes >> 20 != EXPORT_MIB || storage.free_bytes > storage.total_bytes)
		return complain("it has %llu bytes", (unsigned long long)storage.total_bytes);
	/* All hosts that use this name of the server share the pool. */
	snprintf(pool, sizeof(pool), "nfs:%s", source);
	return !strcmp(name, pool) || complain("the pool is \"%s\"", name);
}

/* Stops the server during a save. A save waits until the server comes back. */
static int lose_the_server(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	atomic_bool *lost = user;

	(void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !atomic_load(lost)) {
		nfs_server_signal(SIGSTOP);
		atomic_store(lost, true);
	}
	return 0;
}

static bool a_server_that_is_away_is_waited_for(void)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *handle = NULL;
	atomic_bool lost = false;
	bool well;

	options.metadata = &new_sample.metadata;
	options.progress = lose_the_server;
	options.progress_user = &lost;
	well = !ioshape_save_tensors(context, FILE_HERE, new_sample.tensors, new_sample.count,
				     &options, &handle) ||
	       complain("%s", ioshape_last_error()->sentence);
	while (well && !atomic_load(&lost) && ioshape_save_wait(handle, 10) == -EINPROGRESS)
		;
	if (well && ioshape_save_wait(handle, 300) != -EINPROGRESS)
		well = complain("it ended without a server");
	nfs_server_signal(SIGCONT);
	well = well &&
	       (!ioshape_save_wait(handle, -1) || complain("%s", ioshape_last_error()->sentence));
	ioshape_save_free(handle);
	ioshape_context_free(context);
	return well && holds(&new_sample) && nothing_is_left_behind();
}

/*
 * Checks that an open reader keeps its file when the file is replaced. The client renames the open
 * file, and removes it when it is closed.
 */
static bool a_reader_here_keeps_what_it_opened(void)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_reader *reader = NULL;
	bool well = !save(IOSHAPE_ENGINE_AUTO, &old_sample, false, NULL);
	char why[512];

	well = well && (!ioshape_reader_open(context, FILE_HERE, NULL, &reader) ||
			complain("%s", ioshape_last_error()->sentence));
	well = well && !save(IOSHAPE_ENGINE_AUTO, &new_sample, false, NULL);
	if (well && sample_check_reader(reader, &old_sample, why, sizeof(why)))
		well = complain("the reader of the old file: %s", why);
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	return well && holds(&new_sample) && hidden_names_go(NFS_SERVER_FOLDER);
}

/*
 * Checks that opening succeeds at any time, and that reading returns one whole file or ESTALE. The
 * client caches names for a while (actimeo), so it notices a replaced file late.
 */
static bool another_hosts_file_comes_into_sight(void)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_reader *reader;
	bool well = true, seen = false;
	char why[512];
	int ret;

	for (unsigned tries = 0; well && !seen && tries < 250; tries++) {
		if (ioshape_reader_open(context, FILE_HERE, NULL, &reader)) {
			well = complain("opened anew: %s", ioshape_last_error()->sentence);
			break;
		}
		ret = sample_check_reader(reader, &new_sample, why, sizeof(why));
		seen = !ret;
		if (ret && ret != -ESTALE &&
		    sample_check_reader(reader, &old_sample, why, sizeof(why)))
			well = complain("neither the old file nor the new one: %s", why);
		ioshape_reader_free(reader);
		usleep(20000);
	}
	ioshape_context_free(context);
	if (well && !seen)
		return complain("the client does not see the file of another host");
	return well && holds(&new_sample);
}

/*
 * Checks that a reader of a file that another host replaces gets the old file or an error, never a
 * mixture.
 */
static bool a_file_replaced_elsewhere_is_not_mixed_up(void)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_reader *reader = NULL;
	bool well = !save(IOSHAPE_ENGINE_AUTO, &old_sample, false, NULL);
	char why[512] = "";
	int ret;

	well = well && (!ioshape_reader_open(context, FILE_HERE, NULL, &reader) ||
			complain("%s", ioshape_last_error()->sentence));
	if (well &&
	    ioshape_save_tensors(
		    context, NFS_OTHER_FOLDER "/model.pt", new_sample.tensors, new_sample.count,
		    &(struct ioshape_save_options){ .size = sizeof(struct ioshape_save_options),
						    .metadata = &new_sample.metadata },
		    NULL))
		well = complain("%s", ioshape_last_error()->sentence);
	if (well) {
		ret = sample_check_reader(reader, &old_sample, why, sizeof(why));
		printf("# version %s: a file replaced elsewhere reads as %s\n", version,
		       ret ? why : "the old one");
		if (ret && ret != -ESTALE)
			well = complain("%d instead of ESTALE: %s", ret, why);
		if (ret && strcmp(ioshape_last_error()->path, FILE_HERE) != 0)
			well = complain("the error is about %s", ioshape_last_error()->path);
	}
	/* The old file is still open, so the client could open it from its cache. */
	well = well && another_hosts_file_comes_into_sight();
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	return well;
}

struct contender {
	pthread_t thread;
	int ret;
};

static void *contend(void *argument)
{
	struct contender *self = argument;
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_THREADS, IOSHAPE_DIRECT_PREFER);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.replace = IOSHAPE_OFF;
	self->ret = save_with(context, &new_sample, &options);
	ioshape_context_free(context);
	return NULL;
}

static bool of_two_that_must_not_replace_one_wins(void)
{
	struct contender two[2];

	unlink(FILE_HERE);
	for (unsigned i = 0; i < 2; i++)
		pthread_create(&two[i].thread, NULL, contend, &two[i]);
	for (unsigned i = 0; i < 2; i++)
		pthread_join(two[i].thread, NULL);
	if (two[0].ret + two[1].ret != -EEXIST || (two[0].ret && two[1].ret))
		return complain("they ended with %d and %d", two[0].ret, two[1].ret);
	if (save(IOSHAPE_ENGINE_AUTO, &old_sample, true, NULL) != -EEXIST)
		return complain("a third one replaced it");
	return holds(&new_sample) && nothing_is_left_behind();
}

/* Reports on the pipe that the save is writing, then sleeps until the process is killed. */
static int stop_while_writing(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	int *pipe_end = user;

	(void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done) {
		if (write(*pipe_end, "w", 1) != 1)
			_exit(2);
		pause();
	}
	return 0;
}

/* Returns a child that has stopped in the middle of a save. */
static pid_t writer_in_the_middle(void)
{
	int ends[2];
	pid_t child;
	char byte;

	fflush(NULL);
	if (pipe(ends))
		return -1;
	child = fork();
	if (!child) {
		struct ioshape_context *context =
			sample_context(IOSHAPE_ENGINE_THREADS, IOSHAPE_DIRECT_PREFER);
		struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

		options.progress = stop_while_writing;
		options.progress_user = &ends[1];
		_exit(save_with(context, &new_sample, &options) ? 1 : 0);
	}
	close(ends[1]);
	if (read(ends[0], &byte, 1) != 1)
		complain("the writer ended early");
	close(ends[0]);
	return child;
}

/*
 * Checks that the temporary file of a living writer is kept, and that of a dead writer is removed
 * by the next save.
 */
static bool leftovers_go_when_their_writer_is_dead(void)
{
	bool well = !save(IOSHAPE_ENGINE_AUTO, &old_sample, false, NULL);
	pid_t child = writer_in_the_middle();

	if (well && scratch_temporaries(NFS_SERVER_FOLDER) != 1)
		well = complain("no temporary file of the writer in the middle");
	well = well && !save(IOSHAPE_ENGINE_AUTO, &old_sample, false, NULL);
	if (well && scratch_temporaries(NFS_SERVER_FOLDER) != 1)
		well = complain("the file of a living writer was taken away");
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	well = well && holds(&old_sample);
	well = well && !save(IOSHAPE_ENGINE_AUTO, &new_sample, false, NULL);
	return well && nothing_is_left_behind() && holds(&new_sample);
}

/*
 * Fills the server until only so many bytes are free, and checks that this lasts. The server frees
 * the space of removed files a little later, and some of it may be reserved for the client.
 */
static bool fill_up(uint64_t leave_bytes)
{
	int fd = open(NFS_SERVER_FOLDER "/filler", O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
	struct statvfs status;
	uint64_t room = 0;
	off_t end = 0;
	bool well = fd >= 0;
	int ret;

	for (unsigned looks = 0, calm = 0; well && calm < 3; looks++, calm++) {
		well = !fstatvfs(fd, &status) && looks < 300;
		room = (uint64_t)status.f_bavail * status.f_frsize;
		if (well && room > leave_bytes) {
			calm = 0;
			ret = posix_fallocate(fd, end, (off_t)(room - leave_bytes));
			/* A busy machine interrupts it. */
			well = !ret || ret == ENOSPC || ret == EINTR;
			end += ret ? 0 : (off_t)(room - leave_bytes);
		}
		usleep(100000);
	}
	if (fd >= 0)
		close(fd);
	return well || complain("cannot fill the server");
}

static bool on_a_full_server_the_old_file_stays(void)
{
	static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_THREADS,
						       IOSHAPE_ENGINE_BUFFERED };
	bool well = !save(IOSHAPE_ENGINE_AUTO, &old_sample, false, NULL) &&
		    hidden_names_go(NFS_SERVER_FOLDER) && fill_up(1 << 20);

	for (size_t i = 0; well && i < ARRAY_LENGTH(engines); i++) {
		int ret = save(engines[i], &new_sample, false, NULL);

		if (ret != -ENOSPC)
			well = complain("engine %zu: %d instead of ENOSPC", i, ret);
		else if (ioshape_last_error()->code != -ENOSPC ||
			 strcmp(ioshape_last_error()->path, FILE_HERE) != 0 ||
			 !*ioshape_last_error()->remedy)
			well = complain("engine %zu: the error is %d, about \"%s\"", i,
					ioshape_last_error()->code, ioshape_last_error()->path);
		well = well && nothing_is_left_behind() && holds(&old_sample);
	}
	unlink(NFS_SERVER_FOLDER "/filler");
	return well && !save(IOSHAPE_ENGINE_AUTO, &new_sample, false, NULL) && holds(&new_sample);
}

/* Returns whether the folder has so many checkpoints and nothing else. */
static bool checkpoints_are(unsigned count)
{
	if (!hidden_names_go("runs"))
		return false;
	return scratch_entries("runs") == count ||
	       complain("%u names instead of %u", scratch_entries("runs"), count);
}

/* NFS cannot exchange two names, so the old checkpoint is renamed first. */
static bool a_checkpoint_is_replaced(void)
{
	struct base_error error = { 0 };
	bool well;

	well = (!checkpoint_save(7, "the old one", false, &error) &&
		!checkpoint_save(7, "the new one", false, &error)) ||
	       complain("%s", error.text);
	if (well && !checkpoint_is("step-0000000007", 7, "the new one"))
		well = complain("the new one is not there");
	return well && checkpoints_are(1);
}

static bool prune(struct ioshape_context *context, uint64_t should_go)
{
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	uint64_t removed = 0;

	options.keep_last = 1;
	if (ioshape_checkpoint_prune(context, "runs", &options, &removed))
		return complain("%s", ioshape_last_error()->sentence);
	return removed == should_go || complain("%u were removed", (unsigned)removed);
}

/* Checks that with version 4 other hosts see the locks of readers. */
static bool a_checkpoint_that_is_read_is_not_pruned(void)
{
	const char *reading = *version == '3' ? "runs" : NFS_OTHER_FOLDER "/runs";
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_checkpoint *checkpoint = NULL;
	struct base_error error = { 0 };
	bool well;

	well = (!checkpoint_save(7, "read", false, &error) &&
		!checkpoint_save(8, "newer", false, &error)) ||
	       complain("%s", error.text);
	well = well && (!ioshape_checkpoint_open(context, reading, 7, &checkpoint) ||
			complain("%s", ioshape_last_error()->sentence));
	well = well && prune(context, 0) && checkpoint_is("step-0000000007", 7, "read");
	ioshape_checkpoint_free(checkpoint);
	well = well && prune(context, 1) && checkpoints_are(1);
	ioshape_context_free(context);
	return well;
}

static const struct {
	const char *name;
	bool (*test)(void);
	bool alike; /* versions do not differ; the second one is tested only if tests may take long
		     */
} tests[] = {
	{ "what is saved is loaded, and on the server", what_is_saved_is_loaded, false },
	{ "it is known for what it is", it_is_known_for_what_it_is, false },
	{ "a server that is away is waited for", a_server_that_is_away_is_waited_for, true },
	{ "a reader here keeps the file that it opened", a_reader_here_keeps_what_it_opened, true },
	{ "a file replaced by another host is not mixed up",
	  a_file_replaced_elsewhere_is_not_mixed_up, false },
	{ "of two that must not replace one wins", of_two_that_must_not_replace_one_wins, false },
	{ "leftovers go when their writer is dead", leftovers_go_when_their_writer_is_dead, true },
	{ "on a full server the old file stays", on_a_full_server_the_old_file_stays, true },
	{ "a checkpoint is replaced", a_checkpoint_is_replaced, true },
	{ "a checkpoint that is read is not pruned", a_checkpoint_that_is_read_is_not_pruned,
	  false },
};

static void test_version(const char *which, bool all)
{
	version = which;
	if (!tap_ok(nfs_server_mount(version) && !chdir(NFS_CLIENT_FOLDER), "version %s is mounted",
		    version))
		return;
	for (size_t i = 0; i < ARRAY_LENGTH(tests); i++)
		if ((all || !tests[i].alike) &&
		    !tap_ok(tests[i].test(), "version %s: %s", version, tests[i].name))
			printf("# %s\n", complaint);
	scratch_remove("runs");
	if (chdir("/run"))
		perror("chdir");
	nfs_server_unmount();
}

static int run(void)
{
	scratch_setup();
	sample_make(&old_sample, 1, 1u << 20);
	sample_make(&new_sample, 2, LARGE_BYTES);
	if (tap_ok(nfs_server_start(EXPORT_MIB), "the server runs")) {
		test_version("4.2", true);
		test_version("3", scratch_long());
	}
	sample_free(&old_sample);
	sample_free(&new_sample);
	scratch_teardown();
	return tap_end();
}

int main(void)
{
	static const char *const modules[] = { "nfsv3", "nfsv4", NULL };
	const char *why_not = nfs_server_missing();
	int status =
		why_not ? -1 :
			  machine_run("nfs4", modules, scratch_long() ? 1500 : 250, run, &why_not);

	if (status < 0) {
		tap_skip("saves and loads over NFS", why_not);
		status = tap_end();
	}
	return status;
}
