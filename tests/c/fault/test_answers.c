/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts and types that FUSE filesystems report, through a real mount: one that passes requests
 * on, and one with prepared answers. Mounting needs root; all mounts belong to this process and
 * vanish with it.
 */
#define _GNU_SOURCE
#include "fs/fs.h"
#include "support/layouts.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SOURCE "mgs@tcp:/scr/folder"

static pid_t daemon_pid;

#define WANT(condition)                                                                            \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			snprintf(complaint, sizeof(complaint), "line %d: %s", __LINE__,            \
				 #condition);                                                      \
			return false;                                                              \
		}                                                                                  \
	} while (0)

/* ---- Mounting -------------------------------------------------------------------------------- */

static const char *mount_answering(void)
{
	const char *program = getenv("IOSHAPE_TEST_ANSWERING");
	char answers[512], mnt[512];
	struct stat before, now;

	if (!program || !*program)
		return "libfuse 3 is not installed";
	if (access("/dev/fuse", R_OK | W_OK))
		return "there is no /dev/fuse";
	snprintf(answers, sizeof(answers), "%s", scratch_path("answers"));
	snprintf(mnt, sizeof(mnt), "%s", scratch_path("mnt"));
	if (mkdir(answers, 0755) || mkdir(mnt, 0755) || stat(mnt, &before))
		return "no directory";
	daemon_pid = fork();
	if (!daemon_pid) {
		execl(program, program, answers, mnt, SOURCE, (char *)NULL);
		_exit(127);
	}
	for (int tries = 0; tries < 500; tries++) {
		if (!stat(mnt, &now) && now.st_dev != before.st_dev)
			return NULL;
		usleep(10000);
	}
	return "the daemon does not mount";
}

static void unmount_answering(void)
{
	umount2(scratch_path("mnt"), MNT_DETACH);
	if (daemon_pid > 0) {
		kill(daemon_pid, SIGTERM);
		waitpid(daemon_pid, NULL, 0);
	}
	daemon_pid = 0;
	scratch_remove(scratch_path("mnt"));
	scratch_remove(scratch_path("answers"));
}

/* ---- Looking at files ------------------------------------------------------------------------ */

static void answer(const char *question, const void *bytes, size_t count)
{
	char name[256];

	snprintf(name, sizeof(name), "answers/%s", question);
	scratch_write(scratch_path(name), bytes, count);
}

static void answer_text(const char *question, const char *text)
{
	answer(question, text, strlen(text));
}

static unsigned asked(void)
{
	size_t bytes = 0;
	unsigned count = 0;
	uint8_t *log;

	if (access(scratch_path("answers/asked"), F_OK))
		return 0;
	log = scratch_read(scratch_path("answers/asked"), &bytes);
	for (size_t i = 0; i < bytes; i++)
		count += log[i] == '\n';
	free(log);
	unlink(scratch_path("answers/asked"));
	return count;
}

static bool describe(const char *name, struct fs_memory *memory, struct fs_info *info)
{
	char path[256];
	int fd, ret;

	snprintf(path, sizeof(path), "mnt/%s", name);
	fd = open(scratch_path(path), O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ret = fs_describe(fd, name, memory, info, NULL);
	close(fd);
	return !ret;
}

static bool has_layout(const struct fs_info *info, const char *want)
{
	char text[96];

	fs_layout_text(&info->layout, text, sizeof(text));
	if (!strcmp(text, want))
		return true;
	printf("# layout \"%s\"\n", text);
	return false;
}

static void make_lustre(struct layout_bytes *blob, uint16_t stripes, const char *pool)
{
	const struct layout_plain plain = { 0, LAYOUT_RAID0, 1 << 20, stripes, pool, stripes };

	blob->bytes = 0;
	layout_add_plain(blob, &plain);
}

/* ---- Tests ----------------------------------------------------------------------------------- */

static bool a_file_with_a_layout_of_lustre(void)
{
	struct fs_memory memory = { 0 };
	struct layout_bytes blob = { 0 };
	struct fs_info info;

	make_lustre(&blob, 8, "flash");
	answer("_file.lustre.lov", blob.data, blob.bytes);
	WANT(describe("file", &memory, &info));
	WANT(info.family == FS_LUSTRE && memory.family == FS_LUSTRE);
	WANT(!strcmp(info.type, "fuse.answering"));
	WANT(has_layout(&info, "8 x 1M, pool flash"));
	/* The answer is cached: from now on there is one question for each file. */
	asked();
	WANT(describe("file", &memory, &info));
	WANT(info.family == FS_LUSTRE && has_layout(&info, "8 x 1M, pool flash"));
	WANT(asked() == 1);
	/* A file without a layout belongs to the same filesystem as the one before. */
	WANT(describe("directory/file", &memory, &info));
	WANT(info.family == FS_LUSTRE && has_layout(&info, ""));
	return true;
}

static bool a_layout_longer_than_most(void)
{
	struct layout_bytes blob = { 0 };
	struct fs_info info;

	make_lustre(&blob, 300, NULL);
	answer("_file.lustre.lov", blob.data, blob.bytes);
	WANT(describe("file", NULL, &info));
	WANT(has_layout(&info, "300 x 1M"));
	return true;
}

static bool a_layout_that_is_not_understood(void)
{
	const struct layout_plain released = { 0, LAYOUT_RAID0 | LAYOUT_RELEASED, 1 << 20, 4, NULL,
					       0 };
	struct layout_bytes blob = { 0 };
	struct fs_info info;

	layout_add_plain(&blob, &released);
	answer("_file.lustre.lov", blob.data, blob.bytes);
	WANT(describe("file", NULL, &info));
	WANT(info.family == FS_LUSTRE && has_layout(&info, ""));
	answer_text("_file.lustre.lov", "no such thing here, and more than a few bytes of it");
	WANT(describe("file", NULL, &info));
	WANT(info.family == FS_FUSE && has_layout(&info, ""));
	return true;
}

static bool a_directory_without_one_that_counts_targets(void)
{
	static const int count = 12, none = -3;
	struct fs_storage *storage = calloc(1, sizeof(*storage));
	struct fs_info info;
	int fd = open(scratch_path("mnt"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	bool well;

	answer("_.ioctl-800866a8", &count, sizeof(count));
	well = describe("", NULL, &info) && info.family == FS_LUSTRE && has_layout(&info, "") &&
	       fs_count_targets(fd, FS_LUSTRE) == 12 &&
	       !fs_look_at_storage(fd, "mnt", "", storage, NULL) && storage->targets == 12 &&
	       storage->family == FS_LUSTRE && storage->remote &&
	       !strcmp(storage->mount.source, SOURCE);
	answer("_.ioctl-800866a8", &none, sizeof(none));
	well &= !fs_count_targets(fd, FS_LUSTRE);
	free(storage);
	close(fd);
	WANT(well);
	return true;
}

static bool a_pool_of_targets_names_the_pool_of_slots(void)
{
	char name[FS_POOL_BYTES];
	struct layout_bytes blob = { 0 };

	make_lustre(&blob, 4, "flash");
	answer("_directory.lustre.lov", blob.data, blob.bytes);
	make_lustre(&blob, 4, NULL);
	answer("_.lustre.lov", blob.data, blob.bytes);
	WANT(!fs_pool_of_path(scratch_path("mnt/directory/new"), name, NULL));
	WANT(!strcmp(name, "fuse.answering:" SOURCE ".flash"));
	WANT(!fs_pool_of_path(scratch_path("mnt/directory/file"), name, NULL));
	WANT(!strcmp(name, "fuse.answering:" SOURCE ".flash"));
	WANT(!fs_pool_of_path(scratch_path("mnt/directory"), name, NULL));
	WANT(!strcmp(name, "fuse.answering:" SOURCE ".flash"));
	WANT(!fs_pool_of_path(scratch_path("mnt/file"), name, NULL));
	WANT(!strcmp(name, "fuse.answering:" SOURCE));
	return true;
}

static bool ceph_files_and_directories(void)
{
	unsigned open_before = scratch_descriptors();
	struct fs_memory memory = { 0 };
	struct fs_info info;

	answer_text("_.ceph.dir.layout",
		    "stripe_unit=1048576 stripe_count=4 object_size=4194304 pool=data");
	answer_text("_file.ceph.file.layout",
		    "stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=data");
	WANT(describe("file", &memory, &info));
	WANT(info.family == FS_CEPH && has_layout(&info, "1 x 4M, pool data"));
	WANT(describe("", NULL, &info));
	WANT(info.family == FS_CEPH && has_layout(&info, "4 x 1M, pool data"));
	/* A directory without a layout of its own. */
	WANT(describe("directory/inner", &memory, &info));
	WANT(info.family == FS_CEPH && has_layout(&info, ""));
	WANT(scratch_descriptors() == open_before);
	return true;
}

static bool beegfs(void)
{
	static const struct {
		uint32_t pattern, chunk_bytes;
		uint16_t targets;
	} stripes = { 1, 512 << 10, 4 };
	struct fs_info info;

	answer_text("_file.ioctl-80066616", "_FhGFS_");
	answer("_file.ioctl-800c6619", &stripes, sizeof(stripes));
	WANT(describe("file", NULL, &info));
	WANT(info.family == FS_BEEGFS && has_layout(&info, "4 x 512K"));
	answer_text("_file.ioctl-80066616", "other_");
	WANT(describe("file", NULL, &info));
	WANT(info.family == FS_FUSE && has_layout(&info, ""));
	return true;
}

static bool one_that_is_none_of_them_is_asked_once(void)
{
	struct fs_memory memory = { 0 };
	struct fs_info info;

	WANT(describe("file", &memory, &info));
	WANT(info.family == FS_FUSE && has_layout(&info, ""));
	WANT(asked() == 5);
	WANT(describe("file", &memory, &info) && describe("directory", &memory, &info));
	WANT(info.family == FS_FUSE);
	WANT(asked() == 0);
	return true;
}

static const struct {
	const char *name;
	bool (*test)(void);
} tests[] = {
	{ "a file with a layout of Lustre's", a_file_with_a_layout_of_lustre },
	{ "a layout longer than most", a_layout_longer_than_most },
	{ "a layout that is not understood", a_layout_that_is_not_understood },
	{ "a directory without one that counts targets",
	  a_directory_without_one_that_counts_targets },
	{ "a pool of targets names the pool of slots", a_pool_of_targets_names_the_pool_of_slots },
	{ "files and directories of Ceph", ceph_files_and_directories },
	{ "BeeGFS", beegfs },
	{ "one that is none of them is asked once", one_that_is_none_of_them_is_asked_once },
};

int main(void)
{
	const char *why_not = NULL;

	scratch_setup();
	if (geteuid())
		why_not = "mounting takes root";
	else if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		why_not = "mounts of one's own are not allowed here";
	for (size_t i = 0; i < ARRAY_LENGTH(tests); i++) {
		const char *reason = why_not ? why_not : mount_answering();

		if (reason)
			tap_skip(tests[i].name, reason);
		else if (!tap_ok(tests[i].test(), "%s", tests[i].name))
			printf("# %s\n", complaint);
		if (!why_not)
			unmount_answering();
	}
	scratch_teardown();
	return tap_end();
}
