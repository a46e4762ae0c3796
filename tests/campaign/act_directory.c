/* SPDX-License-Identifier: Apache-2.0 */
/* Acts that make a directory whose files appear together. */
#define _GNU_SOURCE
#include "harm.h"
#include "internal.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct sample sample;
static uint8_t *file;
static size_t file_bytes;

static int fill(struct ioshape_context *context)
{
	struct save_directory *directory;
	char path[4096];
	int ret;

	ret = harm_heed(save_directory_make(context, "made", &directory));
	if (ret)
		return ret;
	snprintf(path, sizeof(path), "%s/file", save_directory_path(directory));
	ret = harm_heed(sample_save(context, path, &sample, NULL));
	if (!ret)
		ret = harm_heed(save_directory_commit(directory));
	save_directory_free(directory);
	return ret;
}

static int make(const struct act *act)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	int ret;

	(void)act;
	options.coordinator = "open";
	ret = harm_heed(ioshape_context_open(&context, &options));
	if (ret)
		return ret;
	ret = fill(context);
	ioshape_context_free(context);
	return ret;
}

static int run(const struct act *act, unsigned rank)
{
	(void)rank;
	return make(act);
}

/* A temporary folder with the name of a process on another machine. */
#define RELIC ".made.ioshape-tmp-01234567-0123456789abcdef"

static const struct timespec long_ago[2] = { { .tv_sec = 1000000 }, { .tv_sec = 1000000 } };

/* Leaves the temporary folder of a process that died long ago. */
static void leave_relic(void)
{
	scratch_remove(RELIC);
	if (mkdir(RELIC, 0700))
		harm_must(-errno, "leave a folder");
	scratch_write(RELIC "/file", "x", 1);
	if (utimensat(AT_FDCWD, RELIC "/file", long_ago, 0) ||
	    utimensat(AT_FDCWD, RELIC, long_ago, 0))
		harm_must(-errno, "leave a folder");
}

static void begin(const struct act *act)
{
	scratch_remove("made");
	if (act->variant)
		leave_relic();
}

static enum state look(const struct act *act)
{
	(void)act;
	if (access("made", F_OK))
		return STATE_OLD;
	/* The save of a file may leave a temporary file that it could not remove. A later save
	 * there removes it. */
	return scratch_same("made/file", file, file_bytes) &&
			       scratch_entries("made") == 1 + scratch_temporaries("made") ?
		       STATE_NEW :
		       STATE_TORN;
}

static unsigned again(const struct act *act)
{
	scratch_remove("made");
	/* A removal that stops half-way makes the folder new, and it stays for a day. */
	if (act->variant && utimensat(AT_FDCWD, RELIC, long_ago, 0) && errno != ENOENT)
		harm_must(-errno, "let a day pass");
	harm_alone(make, act, "make a directory");
	return scratch_entries(".") - 1 - harm_homeless(".");
}

static void open_act(const struct act *act)
{
	sample_make(&sample, 7, 20000);
	harm_alone(make, act, "make a directory");
	file = scratch_read("made/file", &file_bytes);
}

static void close_act(const struct act *act)
{
	(void)act;
	free(file);
	sample_free(&sample);
}

static const bool relic = true;

static const struct act acts[] = {
	{ .name = "directory",
	  .open = open_act,
	  .close = close_act,
	  .begin = begin,
	  .run = run,
	  .look = look,
	  .again = again,
	  .durable = true,
	  .leaves = true },
	{ .name = "directory where another machine died",
	  .variant = &relic,
	  .open = open_act,
	  .close = close_act,
	  .begin = begin,
	  .run = run,
	  .look = look,
	  .again = again,
	  .leaves = true },
	{ .name = NULL },
};

const struct act *const directory_acts = acts;
