/* SPDX-License-Identifier: Apache-2.0 */
/* A generation while it is written, and how it takes its place. */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Names that turn out to be taken, and other processes that change what is in our place. */
#define MOST_TRIES 16

/* ---- Names ----------------------------------------------------------------------------------- */

static void make_name(struct group_attempt *attempt, const char *job)
{
	char domain[IO_DOMAIN_BYTES];

	io_lock_domain(attempt->directory.fd, domain);
	snprintf(attempt->id, sizeof(attempt->id), "%.8s-%.8s-%016llx", job, domain,
		 (unsigned long long)group_name_number());
	snprintf(attempt->name, sizeof(attempt->name), ".step-%010llu.%s",
		 (unsigned long long)attempt->step, attempt->id);
}

/* ---- Begin ----------------------------------------------------------------------------------- */

/* -EAGAIN: the name is taken. */
static int make_folder(struct group_attempt *attempt, struct base_error *error)
{
	enum io_lock lock = IO_LOCKED;
	const int ret = io_folder_create_locked(&attempt->folder, &attempt->directory,
						attempt->name, &lock, error);

	if (lock == IO_NO_LOCKS)
		base_log(
			&attempt->log, IOSHAPE_LOG_DEBUG,
			"no locks on directories in %s: what dead jobs leave there is known by age",
			attempt->directory.path);
	return ret;
}

/* Looks at the directory as its server knows it, whatever this host remembers. */
static int look_anew(const struct io_folder *directory, struct io_entry *entry)
{
	io_look_anew(directory->fd, "");
	return io_folder_look(directory, ".", entry, NULL);
}

static int open_directory(struct group_attempt *attempt, const char *directory, uint64_t step,
			  const char *job, const struct base_log *log, struct base_error *error)
{
	struct base_budget budget = base_budget_begin();
	int ret;

	*attempt = (struct group_attempt)GROUP_NO_ATTEMPT;
	attempt->step = step;
	if (log)
		attempt->log = *log;
	ret = io_folder_make(directory, error);
	if (!ret)
		ret = io_folder_open(&attempt->directory, directory, error);
	if (!ret)
		group_tidy(&attempt->directory, job, &attempt->last_serial, &budget, &attempt->log);
	return ret;
}

/* The name was found or not. */
static int end_begin(struct group_attempt *attempt, int ret, struct base_error *error)
{
	if (ret == -EAGAIN)
		base_fail(error, ret, "cannot find a free name in %s", attempt->directory.path);
	if (ret)
		group_attempt_abandon(attempt);
	else
		look_anew(&attempt->directory, &attempt->seen);
	return ret;
}

int group_attempt_begin(struct group_attempt *attempt, const char *directory, uint64_t step,
			const char *job, const struct base_log *log, struct base_error *error)
{
	int ret = open_directory(attempt, directory, step, job, log, error);

	if (ret)
		return ret;
	for (int tries = 0; tries < MOST_TRIES; tries++) {
		make_name(attempt, job);
		ret = make_folder(attempt, error);
		if (ret != -EAGAIN)
			break;
	}
	return end_begin(attempt, ret, error);
}

int group_attempt_join(struct group_attempt *attempt, const char *directory, uint64_t step,
		       const char *name, const char *job, const struct base_log *log,
		       struct base_error *error)
{
	int ret = open_directory(attempt, directory, step, job, log, error);

	if (ret)
		return ret;
	snprintf(attempt->name, sizeof(attempt->name), "%s", name);
	strcpy(attempt->id, group_parse_name(name).id);
	return end_begin(attempt, make_folder(attempt, error), error);
}

/* ---- Commit ---------------------------------------------------------------------------------- */

/* The checkpoint that was replaced, and what happened to it. */
struct replaced {
	enum {
		NOTHING_REPLACED,
		SWAPPED,      /* it has the attempt's name now */
		STEPPED_ASIDE /* it has a name of its own, because the two could not be swapped */
	} how;
	char name[GROUP_ATTEMPT_NAME_BYTES]; /* that it has now */
	struct io_folder folder;             /* locked, if it stepped aside */
};

struct expected {
	const char **names; /* in order */
	uint32_t count, found;
};

static int compare_names(const void *left, const void *right)
{
	return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static int find_expected(void *user, const char *name, struct base_error *error)
{
	struct expected *expected = user;

	(void)error;
	expected->found += bsearch(&name, expected->names, expected->count,
				   sizeof(*expected->names), compare_names) != NULL;
	return 0;
}

static int check_files_here(const struct group_attempt *attempt,
			    const struct format_manifest *manifest, struct base_error *error)
{
	struct format_manifest one = { .file_count = 1 };
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		one.files = &manifest->files[i];
		if (attempt->files_here[i])
			ret = group_check_files(&attempt->folder, &one,
						"do all ranks of the node see its tier?", error);
	}
	return ret;
}

/*
 * The sizes of files that others have just written would have to be asked for one by one, and some
 * filesystems ask their writers for them. Their names come in a few answers, however many there
 * are.
 */
static int check_written(const struct group_attempt *attempt,
			 const struct format_manifest *manifest, struct base_error *error)
{
	const struct io_folder *folder = &attempt->folder;
	struct expected expected = { .count = manifest->file_count };
	int ret;

	if (attempt->files_here)
		return check_files_here(attempt, manifest, error);
	if (expected.count > 1) {
		expected.names = malloc(expected.count * sizeof(*expected.names));
		if (!expected.names)
			return base_no_memory(error, "names", expected.count);
		for (uint32_t i = 0; i < expected.count; i++)
			expected.names[i] = manifest->files[i].name;
		qsort(expected.names, expected.count, sizeof(*expected.names), compare_names);
		ret = io_folder_list(folder, find_expected, &expected, error);
		free(expected.names);
		if (ret || expected.found == expected.count)
			return ret;
	}
	return group_check_files(folder, manifest, "all nodes must share the directory", error);
}

uint64_t group_next_serial(const struct group_attempt *attempt)
{
	uint64_t last = attempt->last_serial;
	struct io_entry now;

	/* Listing it again, and reading all manifests there, is spared where nobody else saves. */
	if (look_anew(&attempt->directory, &now) || !io_is_unchanged(&attempt->seen, &now) ||
	    now.links != attempt->seen.links)
		last = MAX(last, group_last_serial(&attempt->directory, &attempt->log));
	return MAX(last + 1, (uint64_t)(base_wall_seconds() * 1000));
}

static int write_manifest(struct group_attempt *attempt, const struct format_manifest *manifest,
			  struct base_error *error)
{
	struct format_manifest numbered = *manifest;
	struct base_buffer text = { 0 };
	int ret;

	if (!numbered.serial)
		numbered.serial = group_next_serial(attempt);
	ret = format_manifest_encode(&text, &numbered);
	if (ret == -ENOMEM)
		base_no_memory(error, "a manifest", text.bytes);
	else if (ret)
		base_fail(error, ret,
			  "cannot write the manifest of %s: what its ranks have written %s",
			  attempt->folder.path,
			  ret == IOSHAPE_E_LIMIT ? "is too much for one" : "does not fit together");
	attempt->last_serial = numbered.serial;
	if (!ret)
		ret = io_folder_put(&attempt->folder, FORMAT_MANIFEST_NAME, text.data, text.bytes,
				    error);
	/* Other ranks have written them: what does not hold must not replace what does. */
	if (!ret)
		ret = check_written(attempt, manifest, error);
	/* Once for the names of all files: their writers have synced what is in them. */
	if (!ret)
		ret = io_folder_sync(&attempt->folder, error);
	base_buffer_free(&text);
	return ret;
}

static bool is_complete(const struct group_attempt *attempt, const char *place)
{
	struct group_generation generation;

	if (group_generation_open(&generation, &attempt->directory, place, attempt->step, NULL))
		return false;
	group_generation_close(&generation);
	return true;
}

/*
 * Filesystems that cannot swap names (NFS): the old one steps aside first. Should we die before the
 * new one has its name, readers and group_tidy() know the old one by the name that it has then. Its
 * lock keeps others from putting it back meanwhile.
 */
static int step_aside(struct group_attempt *attempt, const char *place, struct replaced *old)
{
	int ret;

	group_aside_name(old->name, GROUP_NAME_REPLACED, attempt->step, group_name_number());
	io_folder_close(&old->folder);
	if (!io_folder_open_in(&old->folder, &attempt->directory, place, NULL))
		io_folder_lock(&old->folder);
	ret = io_folder_rename(&attempt->directory, place, old->name);
	old->how = ret ? NOTHING_REPLACED : STEPPED_ASIDE;
	return ret;
}

/* -EAGAIN: another process changed something at the same time. */
static int try_to_place(struct group_attempt *attempt, const char *place, bool no_replace,
			struct replaced *old)
{
	struct io_entry entry;
	int ret;

	/* Directories take no name of another that holds something. */
	ret = io_folder_rename(&attempt->directory, attempt->name, place);
	if (ret != -ENOTEMPTY && ret != -EEXIST)
		return ret;
	if (no_replace && is_complete(attempt, place))
		return -EEXIST;
	/* For the second time another generation has come before us: the one that we had moved, or
	 * a new one. */
	if (old->how == STEPPED_ASIDE &&
	    io_folder_look(&attempt->directory, old->name, &entry, NULL) != -ENOENT)
		return -EBUSY;
	old->how = NOTHING_REPLACED;
	ret = io_folder_swap(&attempt->directory, attempt->name, place);
	if (!ret) {
		old->how = SWAPPED;
		strcpy(old->name, attempt->name);
		return 0;
	}
	if (ret == -EOPNOTSUPP)
		ret = step_aside(attempt, place, old);
	return !ret || ret == -ENOENT ? -EAGAIN : ret;
}

/* As it was before, as far as that can be done. */
static void take_back(struct group_attempt *attempt, const char *place, bool placed,
		      struct replaced *old)
{
	if (old->how == SWAPPED) {
		io_folder_swap(&attempt->directory, attempt->name, place);
		return;
	}
	if (placed)
		io_folder_rename(&attempt->directory, place, attempt->name);
	if (old->how == STEPPED_ASIDE)
		io_folder_rename(&attempt->directory, old->name, place);
}

static int put_in_place(struct group_attempt *attempt, const char *place, bool no_replace,
			struct replaced *old, struct base_error *error)
{
	int ret = -EAGAIN;

	for (int tries = 0; ret == -EAGAIN && tries < MOST_TRIES; tries++)
		ret = try_to_place(attempt, place, no_replace, old);
	if (ret) {
		take_back(attempt, place, false, old);
		return base_fail_with(
			error, ret, ret == -EEXIST ? "choose another step" : "",
			"cannot put \"%s/%s\" in place%s", attempt->directory.path, place,
			ret == -EEXIST ? " without replacing what is there" :
			ret == -ENOENT ? ", because it was removed while it was written" :
					 "");
	}
	ret = io_folder_sync(&attempt->directory, error);
	if (ret)
		take_back(attempt, place, true, old);
	return ret;
}

/* It is not needed any more: what fails here is left to the next group_tidy(). */
static void remove_replaced(struct group_attempt *attempt, const struct replaced *old)
{
	struct base_error error = { 0 };
	struct io_folder folder;
	int ret;

	if (old->how == NOTHING_REPLACED ||
	    io_folder_open_in(&folder, &attempt->directory, old->name, NULL))
		return;
	ret = group_remove_generation(&folder, &attempt->directory, old->name, NULL, &error);
	if (ret == -EBUSY)
		base_log(&attempt->log, IOSHAPE_LOG_INFO,
			 "%s was replaced while a process reads it; a later save removes it",
			 folder.path);
	else if (ret)
		base_log(&attempt->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	io_folder_close(&folder);
}

int group_attempt_commit(struct group_attempt *attempt, const struct format_manifest *manifest,
			 bool no_replace, struct base_error *error)
{
	struct replaced old = { .folder = IO_NO_FOLDER };
	char place[GROUP_STEP_NAME_BYTES];
	int ret;

	group_step_name(place, attempt->step);
	ret = write_manifest(attempt, manifest, error);
	if (!ret)
		ret = put_in_place(attempt, place, no_replace, &old, error);
	if (!ret) {
		attempt->committed = true;
		remove_replaced(attempt, &old);
		group_attempt_abandon(attempt);
	}
	io_folder_close(&old.folder);
	return ret;
}

void group_attempt_abandon(struct group_attempt *attempt)
{
	struct base_error error = { 0 };
	int ret = 0;

	if (attempt->folder.fd >= 0 && !attempt->committed &&
	    io_folder_is_named(&attempt->folder, &attempt->directory, attempt->name))
		ret = io_folder_remove(&attempt->folder, &attempt->directory, attempt->name,
				       FORMAT_MANIFEST_NAME, NULL, NULL, &error);
	/* What is busy goes with the next attempt. */
	if (ret && ret != -EBUSY)
		base_log(&attempt->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	io_folder_close(&attempt->folder);
	io_folder_close(&attempt->directory);
}
