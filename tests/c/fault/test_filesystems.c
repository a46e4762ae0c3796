/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves and loads on small real filesystems in files or in memory. What is saved is loaded, and on
 * a full filesystem a save fails with ENOSPC and leaves the old file. Mounting needs root; all
 * mounts belong to this process and vanish with it.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "fs/fs.h"
#include "io/io.h"
#include "support/passthrough.h"
#include "support/report_downgrade.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define LARGE_BYTES (20u << 20) /* fits into an empty filesystem, not into a full one */

#define ODD_BYTES ((3u << 20) + 4321) /* no multiple of any unit */

enum kind { IMAGE, TMPFS, OVERLAY, FUSE };

static const struct filesystem {
	const char *name;
	enum kind kind;
	const char *mkfs; /* command that creates it */
	unsigned mebibytes;
	enum fs_family family;
	const char *type; /* beginning of the report's name */
	int direct;       /* 1 direct I/O is used, 0 not, -1 depends on the kernel */
	/*
	 * Mount options. They change only how bytes are written, so only that is tested with them.
	 */
	const char *options;
} filesystems[] = {
	{ "ext4", IMAGE, "mkfs.ext4 -q -F", 64, FS_EXT, "ext4", 1, NULL },
	{ "ext4 without extents", IMAGE, "mkfs.ext4 -q -F -O ^extent,^64bit", 64, FS_EXT, "ext4",
	  -1, NULL },
	/* Some kernels accept O_DIRECT here and write through the cache nevertheless. */
	{ "ext4, data=journal", IMAGE, "mkfs.ext4 -q -F", 96, FS_EXT, "ext4", -1, "data=journal" },
	{ "xfs", IMAGE, "mkfs.xfs -q -f", 320, FS_XFS, "xfs", 1, NULL },
	{ "btrfs", IMAGE, "mkfs.btrfs -q -f", 160, FS_BTRFS, "btrfs", -1, NULL },
	{ "btrfs, compressed", IMAGE, "mkfs.btrfs -q -f", 160, FS_BTRFS, "btrfs", -1,
	  "compress-force=zstd" },
	{ "tmpfs", TMPFS, NULL, 64, FS_TMPFS, "tmpfs", -1, NULL },
	{ "overlay", OVERLAY, NULL, 64, FS_OVERLAY, "overlay", -1, NULL },
	/* The library writes to FUSE through the page cache. */
	{ "fuse", FUSE, NULL, 64, FS_FUSE, "fuse", 0, NULL },
	{ "fuse, uncached", FUSE, "direct", 64, FS_FUSE, "fuse", 0, NULL },
	{ "fuse, in order", FUSE, "in-order", 64, FS_FUSE, "fuse", -1, "in order" },
};

static char where[PATH_MAX / 2], file[PATH_MAX];
static struct sample old_sample, new_sample;
static pid_t daemon_pid;

/* ---- Mounting -------------------------------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) static int shell(const char *format, ...)
{
	char command[3 * PATH_MAX];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof(command), format, args);
	va_end(args);
	return system(command);
}

static bool have_program(const char *command)
{
	return !shell("command -v %.*s >/dev/null 2>&1", (int)strcspn(command, " "), command);
}

static const char *mount_image(const struct filesystem *filesystem)
{
	if (!have_program(filesystem->mkfs))
		return "its mkfs is not installed";
	if (shell("cd '%s' && truncate -s %uM image && %s image >/dev/null 2>mkfs.log", where,
		  filesystem->mebibytes, filesystem->mkfs))
		return "mkfs failed";
	if (shell("cd '%s' && mount -o loop,%s image mnt 2>mount.log", where,
		  filesystem->options ? filesystem->options : "rw"))
		return "the kernel does not mount it from a loop device";
	return NULL;
}

static const char *mount_overlay(const struct filesystem *filesystem)
{
	/* On tmpfs, because the upper layer must be able to fill up. */
	if (shell("cd '%s' && mkdir base && mount -t tmpfs -o size=%uM none base && "
		  "mkdir base/lower base/upper base/work && "
		  "mount -t overlay -o lowerdir=base/lower,upperdir=base/upper,workdir=base/work "
		  "none mnt "
		  "2>mount.log",
		  where, filesystem->mebibytes))
		return "the kernel does not mount it";
	return NULL;
}

static const char *mount_fuse(const struct filesystem *filesystem)
{
	char base[PATH_MAX], mnt[PATH_MAX];

	if (shell("cd '%s' && mkdir base && mount -t tmpfs -o size=%uM none base", where,
		  filesystem->mebibytes))
		return "tmpfs cannot be mounted";
	snprintf(base, sizeof(base), "%s/base", where);
	snprintf(mnt, sizeof(mnt), "%s/mnt", where);
	return passthrough_mount(base, mnt, filesystem->mkfs, &daemon_pid);
}

/* Mounts the filesystem. Returns NULL, or why it cannot be mounted here. */
static const char *mount_one(const struct filesystem *filesystem)
{
	snprintf(where, sizeof(where), "%s/fs", scratch_directory());
	if (shell("mkdir -p '%s/mnt'", where))
		return "no directory";
	snprintf(file, sizeof(file), "%s/mnt/model.pt", where);
	switch (filesystem->kind) {
	case IMAGE:
		return mount_image(filesystem);
	case TMPFS:
		return shell("mount -t tmpfs -o size=%uM none '%s/mnt'", filesystem->mebibytes,
			     where) ?
			       "the kernel does not mount it" :
			       NULL;
	case OVERLAY:
		return mount_overlay(filesystem);
	case FUSE:
		return mount_fuse(filesystem);
	}
	return "not known";
}

static void unmount_one(void)
{
	shell("cd '%s' && umount -l mnt 2>/dev/null; umount -l base 2>/dev/null", where);
	if (daemon_pid > 0) {
		kill(daemon_pid, SIGTERM);
		waitpid(daemon_pid, NULL, 0);
	}
	daemon_pid = 0;
	scratch_remove(where);
}

/* Fills the filesystem until only so many bytes are free. */
static bool fill_up(uint64_t leave_bytes)
{
	static char zeros[1 << 20];
	struct statvfs status;
	char path[PATH_MAX];
	uint64_t free_bytes;
	int fd;

	snprintf(path, sizeof(path), "%s/mnt/filler", where);
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0)
		return false;
	for (;;) {
		if (fstatvfs(fd, &status))
			return false;
		free_bytes = (uint64_t)status.f_bavail * status.f_frsize;
		if (free_bytes <= leave_bytes)
			break;
		if (write(fd, zeros, MIN(free_bytes - leave_bytes, sizeof(zeros))) <= 0)
			break;
		/* With delayed allocation the number of free bytes changes only after a sync. */
		fsync(fd);
	}
	close(fd);
	return true;
}

static void make_room(void)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/mnt/filler", where);
	/*
	 * Some filesystems count removed blocks as free only later. A save must be able to use them
	 * at once.
	 */
	unlink(path);
}

/* ---- Tests ----------------------------------------------------------------------------------- */

static int save(struct ioshape_context *context, const struct sample *sample,
		struct ioshape_report *report)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &sample->metadata;
	options.report = report;
	return ioshape_save_tensors(context, file, sample->tensors, sample->count, &options, NULL);
}

static bool holds(const struct sample *sample)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	char why[512];
	int ret;

	scratch_evict(file);
	ret = sample_check(context, file, sample, why, sizeof(why));
	ioshape_context_free(context);
	return ret ? complain("%s does not hold what it should: %s", file, why) : true;
}

static bool nothing_else_is_there(void)
{
	char directory[PATH_MAX];

	snprintf(directory, sizeof(directory), "%s/mnt", where);
	return scratch_temporaries(directory) ? complain("a temporary file was left behind") : true;
}

static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_AUTO, IOSHAPE_ENGINE_THREADS,
					       IOSHAPE_ENGINE_BUFFERED };

/*
 * Returns whether the report gives a reason for each downgrade, and the alignment that the kernel
 * reports.
 */
static bool tells_the_truth(const struct filesystem *filesystem, enum ioshape_engine engine,
			    const struct ioshape_report *report)
{
	bool buffered = engine == IOSHAPE_ENGINE_BUFFERED;
	struct base_error error = { 0 };
	struct fs_info info;
	int fd, ret;

	if (report->direct && buffered)
		return complain("direct with the engine \"buffered\"");
	if (!report->direct && !buffered && filesystem->kind != FUSE &&
	    !report_downgrade(report, IOSHAPE_DOWNGRADE_DIRECT))
		return complain("not direct, and why not is not said: \"%s\"",
				report->downgrades[0].sentence);
	if (engine == IOSHAPE_ENGINE_THREADS && strcmp(report->engine, "threads") != 0)
		return complain("the engine is \"%s\"", report->engine);
	fd = open(file, O_RDONLY | O_CLOEXEC);
	ret = fs_describe(fd, file, NULL, &info, &error);
	close(fd);
	if (ret)
		return complain("%s", error.text);
	if (info.family != filesystem->family)
		return complain("a file there is taken for %s", fs_family_name(info.family));
	if (strcmp(info.type, report->filesystem) != 0)
		return complain("the report says %s; the file says %s", report->filesystem,
				info.type);
	if (info.layout.count || *report->stripes)
		return complain("it has stripes: \"%s\"", report->stripes);
	return true;
}

/*
 * Returns whether files must be written in order. Several requests in flight may overtake each
 * other.
 */
static bool is_in_order(const struct filesystem *filesystem)
{
	return filesystem->kind == FUSE && filesystem->options;
}

/* Checks that with every engine, blocking and in the background, a load returns what was saved. */
static bool round_trip(const struct filesystem *filesystem)
{
	for (size_t i = 0; i < ARRAY_LENGTH(engines); i++) {
		struct ioshape_context *context = sample_context(engines[i], IOSHAPE_DIRECT_PREFER);
		struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
		struct ioshape_report report = IOSHAPE_REPORT_INIT;
		struct ioshape_save *handle;
		bool well;

		if (is_in_order(filesystem) && engines[i] != IOSHAPE_ENGINE_BUFFERED) {
			ioshape_context_free(context);
			continue;
		}
		well = !save(context, &new_sample, &report) ||
		       complain("%s", ioshape_last_error()->sentence);
		well = well && holds(&new_sample);
		if (well &&
		    strncmp(report.filesystem, filesystem->type, strlen(filesystem->type)) != 0)
			well = complain("the report calls it \"%s\"", report.filesystem);
		if (well && i < 2 && filesystem->direct >= 0 &&
		    (int)report.direct != filesystem->direct)
			well = complain("direct is %u: %s", report.direct,
					report.downgrades[0].sentence);
		well = well && tells_the_truth(filesystem, engines[i], &report);
		options.metadata = &old_sample.metadata;
		well = well && (!ioshape_save_tensors(context, file, old_sample.tensors,
						      old_sample.count, &options, &handle) ||
				complain("%s", ioshape_last_error()->sentence));
		if (well) {
			well = !ioshape_save_wait(handle, -1) ||
			       complain("%s", ioshape_last_error()->sentence);
			ioshape_save_free(handle);
		}
		well = well && holds(&old_sample) && nothing_else_is_there();
		ioshape_context_free(context);
		if (!well)
			return false;
	}
	return true;
}

static bool does_not_replace(const struct filesystem *filesystem)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	int ret;

	(void)filesystem;
	options.replace = IOSHAPE_OFF;
	options.metadata = &new_sample.metadata;
	ret = ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count, &options,
				   NULL);
	if (ret != -EEXIST) {
		ioshape_context_free(context);
		return complain("replacing it said %d", ret);
	}
	unlink(file);
	ret = ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count, &options,
				   NULL);
	if (ret)
		complain("%s", ioshape_last_error()->sentence);
	ioshape_context_free(context);
	return !ret && holds(&new_sample) && nothing_else_is_there();
}

struct limited {
	enum ioshape_engine engine;
	bool announced;
	bool fits;
};

/*
 * Saves with a limit on the size of files. A write beyond the limit ends the process with a signal.
 */
static int save_within_limit(void *argument)
{
	const struct limited *limited = argument;
	const struct rlimit limit = { ODD_BYTES - !limited->fits, ODD_BYTES - !limited->fits };
	struct ioshape_context *context = sample_context(limited->engine, IOSHAPE_DIRECT_PREFER);
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *handle = NULL;
	int ret = setrlimit(RLIMIT_FSIZE, &limit);

	options.expected_bytes = limited->announced ? ODD_BYTES : 0;
	if (!ret)
		ret = ioshape_file_open(context, file, &options, &handle);
	if (!ret)
		ret = ioshape_file_write(handle, new_sample.expected[4], ODD_BYTES);
	if (!ret)
		ret = ioshape_file_commit(handle, NULL);
	ioshape_file_free(handle);
	ioshape_context_free(context);
	return ret != (limited->fits ? 0 : -EFBIG);
}

/*
 * Checks that a file that just fits into RLIMIT_FSIZE is saved; one that is a byte too large is an
 * error.
 */
static bool minds_the_limit(const struct filesystem *filesystem)
{
	(void)filesystem;
	for (unsigned i = 0; i < 4 * ARRAY_LENGTH(engines); i++) {
		struct limited limited = { engines[i / 4], i & 1, i & 2 };
		int status;

		unlink(file);
		status = scratch_in_child(save_within_limit, &limited);
		if (status)
			return complain("engine %u, %s, %s: status %x", i / 4,
					limited.announced ? "announced" : "unannounced",
					limited.fits ? "fits" : "does not fit", status);
		if (limited.fits && !scratch_same(file, new_sample.expected[4], ODD_BYTES))
			return complain("engine %u: it is not what it should be", i / 4);
	}
	unlink(file);
	return nothing_else_is_there();
}

/* Writes a file of unknown length, so that the disk fills up in the middle. */
static int save_unannounced(struct ioshape_context *context)
{
	struct ioshape_file *written;
	int ret = ioshape_file_open(context, file, NULL, &written);

	for (unsigned i = 0; !ret && i < LARGE_BYTES >> 20; i++)
		ret = ioshape_file_write(written, (const char *)new_sample.expected[4] + (i << 20),
					 1 << 20);
	if (!ret)
		ret = ioshape_file_commit(written, NULL);
	ioshape_file_free(written);
	return ret;
}

static bool fails_when_full(bool announced)
{
	for (size_t i = 0; i < ARRAY_LENGTH(engines); i++) {
		struct ioshape_context *context = sample_context(engines[i], IOSHAPE_DIRECT_PREFER);
		struct ioshape_report report = IOSHAPE_REPORT_INIT;
		const struct ioshape_error *error;
		int ret = announced ? save(context, &new_sample, &report) :
				      save_unannounced(context);

		ioshape_context_free(context);
		error = ioshape_last_error();
		if (ret != -ENOSPC || error->code != -ENOSPC || strcmp(error->path, file) != 0)
			return complain("engine %zu: %d instead of ENOSPC, \"%s\"", i, ret,
					error->sentence);
		/* Where space can be reserved, the save fails before it writes a byte. */
		if (announced && error->needed_bytes == UINT64_MAX &&
		    !report_downgrade(&report, IOSHAPE_DOWNGRADE_PREALLOCATE))
			return complain("engine %zu: noticed late, \"%s\"", i, error->sentence);
		if (announced && !*report.filesystem)
			return complain("engine %zu: the report does not name the filesystem", i);
		if (!nothing_else_is_there() || !holds(&old_sample))
			return false;
	}
	return true;
}

/* After ENOSPC the old file remains. When there is space again, the save succeeds. */
static bool survives_being_full(const struct filesystem *filesystem)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	int ret = save(context, &old_sample, NULL);

	(void)filesystem;
	if (ret)
		complain("%s", ioshape_last_error()->sentence);
	if (!ret && (!fill_up(4 << 20) || !fails_when_full(true) || !fails_when_full(false)))
		ret = -1;
	make_room();
	if (!ret) {
		ret = save(context, &new_sample, NULL);
		if (ret)
			complain("with room again: %s", ioshape_last_error()->sentence);
	}
	ioshape_context_free(context);
	return !ret && holds(&new_sample);
}

/* Checks that the storage information agrees with the mount and with statvfs(). */
static bool is_known(const struct filesystem *filesystem)
{
	char mnt[PATH_MAX], name[FS_POOL_BYTES];
	struct base_error error = { 0 };
	struct fs_storage storage;
	struct statvfs status;
	int fd, ret;

	snprintf(mnt, sizeof(mnt), "%s/mnt", where);
	fd = open(mnt, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	ret = fs_look_at_storage(fd, mnt, "", &storage, &error);
	close(fd);
	if (ret || statvfs(mnt, &status) || fs_pool_of_path(file, name, &error))
		return complain("%s", error.text);
	if (storage.family != filesystem->family ||
	    strncmp(storage.mount.type, filesystem->type, strlen(filesystem->type)) != 0)
		return complain("it is taken for %s, of type %s", fs_family_name(storage.family),
				storage.mount.type);
	if (strncmp(storage.mount.mount_point, mnt, sizeof(storage.mount.mount_point) - 1) != 0)
		return complain("mounted at %s", storage.mount.mount_point);
	if (filesystem->kind == IMAGE && strncmp(storage.mount.source, "/dev/loop", 9) != 0)
		return complain("its source is %s", storage.mount.source);
	if (storage.total_bytes != (uint64_t)status.f_blocks * status.f_frsize ||
	    storage.free_bytes > storage.total_bytes || !storage.free_bytes)
		return complain("%llu bytes of %llu are free",
				(unsigned long long)storage.free_bytes,
				(unsigned long long)storage.total_bytes);
	/* A FUSE daemon may use storage that others share, so its filesystem counts as remote. */
	if (storage.remote != (filesystem->kind == FUSE) || storage.targets || storage.layout.count)
		return complain("it looks like one that is shared, or striped");
	if (!strchr(name, '@') != (filesystem->kind == FUSE))
		return complain("its pool is \"%s\"", name);
	return true;
}

static const struct {
	const char *name;
	bool (*test)(const struct filesystem *filesystem);
} tests[] = {
	{ "it is known for what it is", is_known },
	{ "what is saved is loaded", round_trip },
	{ "what must not be replaced is not", does_not_replace },
	{ "a file may be as large as ulimit -f says", minds_the_limit },
	{ "on a full one the old file stays", survives_being_full },
};

static void test_one(const struct filesystem *filesystem, const char *why_not)
{
	char name[256];

	if (!why_not)
		why_not = mount_one(filesystem);
	for (size_t i = 0; i < ARRAY_LENGTH(tests); i++) {
		if (why_not) {
			snprintf(name, sizeof(name), "%s: %s", filesystem->name, tests[i].name);
			tap_skip(name, why_not);
		} else if (filesystem->options && tests[i].test != round_trip) {
			continue;
		} else if (!tap_ok(tests[i].test(filesystem), "%s: %s", filesystem->name,
				   tests[i].name)) {
			printf("# %s\n", complaint);
		}
	}
	if (*where)
		unmount_one();
}

int main(void)
{
	const char *why_not = NULL;

	scratch_setup();
	if (geteuid())
		why_not = "mounting takes root";
	else if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		why_not = "mounts of one's own are not allowed here";
	sample_make(&old_sample, 1, 3u << 20);
	sample_make(&new_sample, 2, LARGE_BYTES);
	for (size_t i = 0; i < ARRAY_LENGTH(filesystems); i++)
		test_one(&filesystems[i], why_not);
	sample_free(&old_sample);
	sample_free(&new_sample);
	scratch_teardown();
	return tap_end();
}
