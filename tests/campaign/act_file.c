/* SPDX-License-Identifier: Apache-2.0 */
/* Acts that replace one file, in all ways that the library has to write one. */
#define _GNU_SOURCE
#include "base/base.h"
#include "harm.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define NOBODY 65534
#define ASIDE 500 /* first descriptor of a range that saves do not use */

enum way {
	TENSORS,
	SAFETENSORS,
	RECORDS,
	FETCHED,
	WRITER,
	RAW,
	WITH_SUMS, /* a plain file with checksums in a file beside it */
	PART,      /* a part of a file that other processes also write; here it is the whole file */
};

struct variant {
	enum way way;
	enum ioshape_engine engine;
	enum ioshape_direct direct;
	bool small;
	bool background;
	bool borrow;
	bool no_replace; /* there is no older file */
	bool usual;      /* local slots and default blocks, as users have them */
	const char *layout;
	bool linked;   /* the name is a symbolic link to the file */
	bool foreign;  /* the older file belongs to another user and has an ACL */
	bool deadline; /* the save has a deadline of one minute */
	bool forks;    /* the process forks during the save */
	bool nobody;   /* the saving user has no privileges */
	bool no_flag;  /* renameat2() is not supported */
	bool later;    /* records may be copied after the call has returned */
	bool closed;   /* the standard streams are closed, as in a daemon */
};

static struct sample sample;
static uint8_t *new_file;
static size_t new_bytes;
static const char old_file[] = "what was there before";

static int open_context(const struct variant *variant, struct ioshape_context **context)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.coordinator = variant->usual ? harm_coordinator() : "open";
	options.engine = variant->engine;
	options.direct = variant->direct;
	options.staging_bytes = 64 * MIB;
	options.layout = variant->layout;
	return open_context_with(context, &options,
				 (struct test_rules){ .block_bytes = variant->usual ? 0 : 512 * KIB,
						      .queue_depth = 2 });
}

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	memcpy(into, (const uint8_t *)user + offset, bytes);
	return 0;
}

static int begin_save(struct ioshape_context *context, const struct variant *variant,
		      const struct ioshape_save_options *options, struct ioshape_save **handle)
{
	struct ioshape_record records[SAMPLE_TENSORS] = { 0 };
	struct ioshape_tensor tensors[SAMPLE_TENSORS];
	uint8_t later[SAMPLE_TENSORS] = { 0 };
	char names[SAMPLE_TENSORS][32];

	memcpy(tensors, sample.tensors, sizeof(tensors));
	/* Safetensors files hold contiguous tensors only. */
	for (size_t i = 0; variant->way == SAFETENSORS && i < sample.count; i++)
		tensors[i].strides = NULL;
	if (variant->way == TENSORS || variant->way == SAFETENSORS)
		return ioshape_save_tensors(context, "file", tensors, sample.count, options,
					    handle);
	for (size_t i = 0; i < sample.count; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%zu", i);
		records[i].name = names[i];
		records[i].bytes = sample.bytes[i];
		later[i] = variant->later;
		if (variant->way == FETCHED && i % 2) {
			records[i].fetch = fetch;
			records[i].fetch_user = sample.expected[i];
		} else {
			records[i].data = sample.expected[i];
		}
	}
	return save_records_lazily(context, "file", records, later, sample.count, options, handle);
}

/* Forks a worker, which must not be able to use the handle. Returns 0, or a code for run(). */
static int fork_beside(struct ioshape_save *handle)
{
	const pid_t child = fork();
	int status;

	if (!child) {
		const int ret = ioshape_save_wait(handle, -1);

		ioshape_save_free(handle);
		_exit(ret != -EPERM);
	}
	if (waitpid(child, &status, 0) != child || status)
		return harm_wrong("in a forked child: status %#x", (unsigned)status);
	return 0;
}

static int write_file(struct ioshape_context *context, enum way way)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;
	int ret;

	if (way == WITH_SUMS)
		options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	else
		options.part_bytes = options.file_bytes = 2 * MIB;
	ret = harm_heed(ioshape_file_open(context, "file", &options, &file));
	if (ret)
		return ret;
	for (size_t i = 0; !ret && i < sample.count; i++)
		ret = harm_heed(ioshape_file_write(file, sample.expected[i], sample.bytes[i]));
	if (!ret)
		ret = harm_heed(ioshape_file_commit(file, NULL));
	ioshape_file_free(file);
	return ret;
}

static int save(struct ioshape_context *context, const struct variant *variant)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *handle = NULL;
	int forked = 0, ret;

	if (variant->way == WRITER)
		return harm_heed(sample_write_records(context, "file", &sample));
	if (variant->way >= WITH_SUMS)
		return write_file(context, variant->way);
	if (variant->way == RAW)
		return harm_heed(sample_write_raw(context, "file", &sample));
	/* The metadata has a training step, which safetensors files cannot store. */
	if (variant->way == SAFETENSORS)
		options.format = IOSHAPE_FORMAT_SAFETENSORS;
	else
		options.metadata = &sample.metadata;
	options.replace = variant->no_replace ? IOSHAPE_OFF : IOSHAPE_ON;
	options.borrow = variant->borrow;
	options.deadline_ms = variant->deadline ? 60000 : 0;
	ret = begin_save(context, variant, &options, variant->background ? &handle : NULL);
	if (!handle)
		return harm_heed(ret);
	if (variant->forks)
		forked = fork_beside(handle);
	ret = harm_heed(ioshape_save_wait(handle, -1));
	ioshape_save_free(handle);
	return forked ? forked : ret;
}

/* Moves the three standard streams away or back, by calls in which no faults are injected. While
 * they are away, new descriptors get their numbers. */
static void move_streams(int from, int to)
{
	for (int i = 0; i <= STDERR_FILENO; i++)
		if (dup2(from + i, to + i) < 0)
			abort();
	close_range((unsigned)from, (unsigned)(from + STDERR_FILENO), 0);
}

static int run(const struct act *act, unsigned rank)
{
	const struct variant *variant = act->variant;
	struct ioshape_context *context;
	int ret;

	(void)rank;
	if (variant->no_flag)
		harm_deny("renameat2", EINVAL);
	if (variant->nobody && !getuid() && seteuid(NOBODY))
		return harm_wrong("it cannot be another user");
	if (variant->closed)
		move_streams(STDIN_FILENO, ASIDE);
	ret = harm_heed(open_context(variant, &context));
	if (!ret) {
		ret = save(context, variant);
		ioshape_context_free(context);
	}
	if (variant->closed)
		move_streams(ASIDE, STDIN_FILENO);
	/* The parent reads /proc of this process to find leaks. */
	if (variant->nobody && !getuid() && (seteuid(0) || prctl(PR_SET_DUMPABLE, 1)))
		return harm_wrong("it cannot be root again");
	return ret;
}

/* Gives the old file to another user and lets a third one read it by an ACL. */
static void make_foreign(void)
{
	static const char acl[] = "\2\0\0\0"                   /* version */
				  "\1\0\6\0\377\377\377\377"   /* owner */
				  "\2\0\4\0\322\4\0\0"         /* user 1234: reads */
				  "\4\0\0\0\377\377\377\377"   /* group: nothing */
				  "\20\0\4\0\377\377\377\377"  /* mask */
				  "\40\0\0\0\377\377\377\377"; /* others: nothing */

	/* Best effort: the process or the filesystem may not support this. */
	if (chown("file", 1000, 1000) || chmod("file", 0600) ||
	    setxattr("file", "system.posix_acl_access", acl, sizeof(acl) - 1, 0))
		return;
}

/* A temporary file with the name of a process on another machine. */
#define RELIC ".file.ioshape-tmp-01234567-0123456789abcdef"

/* Gives all files to a user without privileges, also a temporary file that was left long ago. */
static void give_to_nobody(void)
{
	const struct timespec long_ago[2] = { { .tv_sec = 1000000 }, { .tv_sec = 1000000 } };

	scratch_write(RELIC, "x", 1);
	if (utimensat(AT_FDCWD, RELIC, long_ago, 0))
		harm_must(-errno, "leave a file");
	if (!getuid() && (chown("file", NOBODY, NOBODY) || chown(RELIC, NOBODY, NOBODY)))
		harm_must(-errno, "give a file away");
}

static void begin(const struct act *act)
{
	const struct variant *variant = act->variant;

	unlink("file");
	if (variant->linked) {
		scratch_remove("aside");
		if (mkdir("aside", 0700) || symlink("aside/file", "file"))
			harm_must(-errno, "make a link");
	}
	if (!variant->no_replace)
		scratch_write("file", old_file, sizeof(old_file));
	if (variant->foreign)
		make_foreign();
	if (variant->nobody)
		give_to_nobody();
}

/* Looks at the bytes of this part. Other processes decide the length of the file. */
static enum state look_at_part(void)
{
	size_t bytes;
	uint8_t *found = scratch_read("file", &bytes);
	const bool holds = bytes >= sample.total_bytes &&
			   !memcmp(found, new_file, sample.total_bytes);

	free(found);
	return holds ? STATE_NEW : STATE_OLD;
}

static enum state look(const struct act *act)
{
	const struct variant *variant = act->variant;
	struct stat status;

	if (stat("file", &status))
		return variant->no_replace ? STATE_OLD : STATE_GONE;
	if (variant->way == PART)
		return look_at_part();
	if (variant->foreign && status.st_mode & 07)
		return STATE_TORN;
	if (scratch_same("file", new_file, new_bytes))
		return STATE_NEW;
	if (!variant->no_replace && scratch_same("file", old_file, sizeof(old_file)))
		return STATE_OLD;
	return STATE_TORN;
}

/* Saves in a process without faults. The harmed process is then a fresh one, which runs one-time
 * initialization itself. There is no deadline here, so there is time to tidy up. */
static int save_well(const struct act *act)
{
	struct variant variant = *(const struct variant *)act->variant;
	struct ioshape_context *context;
	int ret;

	if (variant.nobody && !getuid() && (chmod(".", 0777) || seteuid(NOBODY)))
		return -EPERM;
	ret = open_context(&variant, &context);
	if (ret)
		return ret;
	variant.deadline = variant.forks = false;
	ret = save(context, &variant);
	ioshape_context_free(context);
	return ret;
}

static unsigned again(const struct act *act)
{
	const struct variant *variant = act->variant;

	if (variant->no_replace)
		unlink("file");
	harm_alone(save_well, act, "save");
	harm_forget_homeless(".");
	return scratch_entries(".") - 1 - (variant->way == WITH_SUMS) -
	       (variant->linked ? 2 - scratch_entries("aside") : 0);
}

static void open_act(const struct act *act)
{
	const struct variant *variant = act->variant;

	sample_make(&sample, 7, variant->small ? 1000 : variant->usual ? 40 * MIB : 1200000);
	harm_alone(save_well, act, "save");
	new_file = scratch_read("file", &new_bytes);
}

static void close_act(const struct act *act)
{
	(void)act;
	free(new_file);
	sample_free(&sample);
}

#define ACT(id, ...)                                                                               \
	.name = id, .variant = &(const struct variant){ __VA_ARGS__ }, .open = open_act,           \
	.close = close_act, .begin = begin, .run = run, .look = look, .again = again

#define DURABLE(...)                                                                               \
	{                                                                                          \
		ACT(__VA_ARGS__), .durable = true                                                  \
	}

static const struct act acts[] = {
	DURABLE("uring", .engine = IOSHAPE_ENGINE_URING),
	DURABLE("uring with workers", .engine = IOSHAPE_ENGINE_URING_ASYNC, .way = FETCHED),
	DURABLE("threads in the background", .engine = IOSHAPE_ENGINE_THREADS, .background = true),
	DURABLE("buffered", .engine = IOSHAPE_ENGINE_BUFFERED, .direct = IOSHAPE_DIRECT_OFF),
	DURABLE("small", .small = true),
	DURABLE("no replace", .no_replace = true),
	DURABLE("no replace without the flag", .no_replace = true, .no_flag = true),
	DURABLE("stripes", .layout = "stripe_count=2,stripe_size=1M"),
	DURABLE("all stripes", .layout = "stripe_count=all,stripe_size=64K"),
	DURABLE("behind a link", .linked = true),
	DURABLE("of another user", .foreign = true, .small = true),
	{ ACT("by nobody", .nobody = true), .durable = true, .leaves = true },
	DURABLE("before a deadline", .deadline = true, .background = true),
	DURABLE("while a worker is forked", .forks = true, .background = true),
	DURABLE("writer", .way = WRITER),
	DURABLE("lent records in the background", .way = RECORDS, .background = true,
		.borrow = true),
	DURABLE("records that are copied later", .way = RECORDS, .background = true, .later = true),
	DURABLE("with closed streams", .engine = IOSHAPE_ENGINE_URING, .closed = true),
	DURABLE("fetched in the background", .way = FETCHED, .background = true),
	DURABLE("raw", .way = RAW),
	DURABLE("safetensors", .way = SAFETENSORS),
	DURABLE("safetensors in the background", .way = SAFETENSORS, .background = true),
	{ ACT("raw with checksums", .way = WITH_SUMS) },
	{ ACT("part", .way = PART, .no_replace = true) },
	{ ACT("as users have it", .usual = true), .slow = true },
	{ .name = NULL },
};

const struct act *const file_acts = acts;
