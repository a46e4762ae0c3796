/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints in a directory. This file parses and writes their names, checks whether one is
 * complete, and finds their ages. It removes what dead processes left, and what retention does not
 * keep. It also has the attempt: a checkpoint while it is written, until its commit.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Names ----------------------------------------------------------------------------------- */

static const char *const aside_words[] = {
	[GROUP_NAME_REPLACED] = ".replaced-",
	[GROUP_NAME_PRUNED] = ".pruned-",
};

static const char drained_word[] = ".drained-";

#define RANDOM_DIGITS 16u

void group_step_name(char into[GROUP_STEP_NAME_BYTES], uint64_t step)
{
	snprintf(into, GROUP_STEP_NAME_BYTES, "step-%010llu", (unsigned long long)step);
}

/* Parses "step-0000001000" as group_step_name() writes it. Returns what follows it, or NULL. */
static const char *parse_step(const char *text, uint64_t *step)
{
	char again[GROUP_STEP_NAME_BYTES];
	size_t digits;

	if (strncmp(text, "step-", 5))
		return NULL;
	digits = strspn(text + 5, "0123456789");
	if (digits < 10 || digits > 20)
		return NULL;
	*step = 0;
	for (size_t i = 0; i < digits; i++)
		*step = *step * 10 + (uint64_t)(text[5 + i] - '0');
	/* Reject numbers that are too large or have a superfluous 0. */
	group_step_name(again, *step);
	return strlen(again) == 5 + digits && !strncmp(text, again, 5 + digits) ?
		       text + 5 + digits :
		       NULL;
}

static bool is_hex(const char *text, size_t digits)
{
	return strspn(text, "0123456789abcdef") == digits;
}

static bool is_id(const char *text)
{
	return is_hex(text, 8) && text[8] == '-' && is_hex(text + 9, 8) && text[17] == '-' &&
	       is_hex(text + 18, RANDOM_DIGITS) && !text[18 + RANDOM_DIGITS];
}

/* Parses "step-0000001000.<random>". */
static bool parse_aside(const char *text, uint64_t *step)
{
	const char *end = parse_step(text, step);

	return end && *end == '.' && is_hex(end + 1, RANDOM_DIGITS) && !end[1 + RANDOM_DIGITS];
}

struct group_name group_parse_name(const char *name)
{
	struct group_name parsed = { .kind = GROUP_NAME_OTHER };
	const char *end;

	if (*name != '.') {
		end = parse_step(name, &parsed.step);
		if (end && !*end)
			parsed.kind = GROUP_NAME_STEP;
		return parsed;
	}
	for (enum group_name_kind kind = GROUP_NAME_REPLACED; kind <= GROUP_NAME_PRUNED; kind++) {
		const size_t bytes = strlen(aside_words[kind]);

		if (!strncmp(name, aside_words[kind], bytes) &&
		    parse_aside(name + bytes, &parsed.step))
			parsed.kind = kind;
	}
	if (parsed.kind == GROUP_NAME_OTHER) {
		const bool drained = !strncmp(name, drained_word, strlen(drained_word));

		end = parse_step(name + (drained ? strlen(drained_word) : 1), &parsed.step);
		if (end && *end == '.' && is_id(end + 1)) {
			parsed.kind = drained ? GROUP_NAME_DRAINED : GROUP_NAME_ATTEMPT;
			memcpy(parsed.id, end + 1, sizeof(parsed.id));
		}
	}
	return parsed;
}

void group_drained_name(char into[GROUP_ATTEMPT_NAME_BYTES], uint64_t step, const char *id)
{
	char step_name[GROUP_STEP_NAME_BYTES];

	group_step_name(step_name, step);
	snprintf(into, GROUP_ATTEMPT_NAME_BYTES, "%s%s.%s", drained_word, step_name, id);
}

/* Writes a new name for a directory that is moved aside. `kind` is GROUP_NAME_REPLACED or
 * GROUP_NAME_PRUNED. */
static void aside_name(char into[GROUP_ATTEMPT_NAME_BYTES], enum group_name_kind kind,
		       uint64_t step, uint64_t number)
{
	char step_name[GROUP_STEP_NAME_BYTES];

	group_step_name(step_name, step);
	snprintf(into, GROUP_ATTEMPT_NAME_BYTES, "%s%s.%016llx", aside_words[kind], step_name,
		 (unsigned long long)number);
}

void group_parity_name(char into[GROUP_PARITY_NAME_BYTES], uint32_t node)
{
	snprintf(into, GROUP_PARITY_NAME_BYTES, "node-%05u.parity", node);
}

bool group_parse_parity_name(const char *name, uint32_t *node)
{
	char again[GROUP_PARITY_NAME_BYTES];
	unsigned number;

	if (sscanf(name, "node-%u.parity", &number) != 1)
		return false;
	*node = number;
	group_parity_name(again, number);
	return !strcmp(again, name);
}

/* ---- One checkpoint -------------------------------------------------------------------------- */

static int read_manifest(struct group_checkpoint *checkpoint, struct base_error *error)
{
	struct base_buffer text = { 0 };
	char path[BASE_ERROR_TEXT_BYTES / 2];
	int ret;

	ret = io_folder_get(&checkpoint->folder, FORMAT_MANIFEST_NAME, FORMAT_MAX_MANIFEST_BYTES,
			    &text, &checkpoint->held, error);
	snprintf(path, sizeof(path), "%s/" FORMAT_MANIFEST_NAME, checkpoint->folder.path);
	if (!ret)
		ret = format_manifest_decode(&checkpoint->manifest, (const char *)text.data,
					     text.bytes, path, error);
	base_buffer_free(&text);
	return ret;
}

static int check_file(const struct io_folder *folder, const struct format_manifest_file *file,
		      const char *remedy, struct base_error *error)
{
	struct io_entry entry;
	int ret = io_folder_look(folder, file->name, &entry, error);

	if (ret == -ENOENT)
		return base_fail_reason_with(error, IOSHAPE_E_DAMAGED, remedy,
					     "\"%s/%s\" is missing: the checkpoint is incomplete",
					     folder->path, file->name);
	if (ret)
		return ret;
	if (entry.kind == IO_FILE && entry.bytes == file->bytes)
		return 0;
	return base_fail_reason_with(
		error, IOSHAPE_E_DAMAGED, remedy,
		"\"%s/%s\" has %llu bytes, but the manifest says %llu: it was changed",
		folder->path, file->name, (unsigned long long)entry.bytes,
		(unsigned long long)file->bytes);
}

int group_check_files(const struct io_folder *folder, const struct format_manifest *manifest,
		      const char *remedy, struct base_error *error)
{
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++)
		ret = check_file(folder, &manifest->files[i], remedy, error);
	return ret;
}

static int see_parity(void *user, const char *name, struct base_error *error)
{
	uint32_t node;

	(void)user, (void)error;
	return group_parse_parity_name(name, &node);
}

bool group_is_of_nodes(const struct io_folder *folder)
{
	return io_folder_list(folder, see_parity, NULL, NULL) == 1;
}

/* Checks the files of this node. Files that are missing are regarded as those of other nodes. */
static int check_own_files(const struct group_checkpoint *checkpoint, struct base_error *error)
{
	const struct io_folder *folder = &checkpoint->folder;
	const struct format_manifest *manifest = &checkpoint->manifest;
	struct io_entry entry;
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		ret = io_folder_look(folder, manifest->files[i].name, &entry, error);
		if (!ret)
			ret = check_file(folder, &manifest->files[i], "use another checkpoint",
					 error);
		ret = ret == -ENOENT ? 0 : ret;
	}
	return ret;
}

static int check(const struct group_checkpoint *checkpoint, uint64_t step, struct base_error *error)
{
	const struct format_manifest *manifest = &checkpoint->manifest;
	struct base_error incomplete = { 0 };
	int ret;

	if (manifest->step != step)
		return base_fail_reason(
			error, IOSHAPE_E_DAMAGED,
			"%s has the manifest of step %llu: the directory was renamed",
			checkpoint->folder.path, (unsigned long long)manifest->step);
	ret = group_check_files(&checkpoint->folder, manifest, "use another checkpoint",
				&incomplete);
	if (ret == IOSHAPE_E_DAMAGED && group_is_of_nodes(&checkpoint->folder))
		return check_own_files(checkpoint, error);
	return ret ? base_propagate(error, &incomplete) : 0;
}

int group_checkpoint_open(struct group_checkpoint *checkpoint, const struct io_folder *directory,
			  const char *name, uint64_t step, struct base_error *error)
{
	struct base_error unopened = { 0 };
	int ret;

	*checkpoint = (struct group_checkpoint)GROUP_NO_CHECKPOINT;
	ret = io_folder_open_in(&checkpoint->folder, directory, name, &unopened);
	if (ret == -ENOENT)
		return ret;
	if (ret)
		return base_fail(error, ret, "cannot open the checkpoint %s/%s", directory->path,
				 name);
	ret = read_manifest(checkpoint, error);
	if (!ret)
		ret = check(checkpoint, step, error);
	if (ret)
		group_checkpoint_close(checkpoint);
	return ret;
}

void group_checkpoint_close(struct group_checkpoint *checkpoint)
{
	format_manifest_free(&checkpoint->manifest);
	io_folder_let_go(&checkpoint->held);
	io_folder_close(&checkpoint->folder);
}

uint64_t group_checkpoint_bytes(const struct group_checkpoint *checkpoint)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < checkpoint->manifest.file_count; i++)
		bytes += checkpoint->manifest.files[i].bytes;
	return bytes;
}

int group_open_directory(struct io_folder *directory, const char *path, struct base_error *error)
{
	/* realpath() fails if the working directory was removed: then keep the relative path. */
	char *absolute = *path == '/' ? NULL : realpath(path, NULL);
	const int ret = io_folder_open(directory, absolute ? absolute : path, error);

	free(absolute);
	/* Keep the path as the user wrote it, but without final slashes, because names are appended
	 * to it. */
	for (size_t end = ret ? 0 : strlen(directory->path);
	     end > 1 && directory->path[end - 1] == '/';)
		directory->path[--end] = 0;
	return ret;
}

/* ---- Serial numbers -------------------------------------------------------------------------- */

/* Reads the serial number from the beginning of the manifest. To read all manifests of large jobs
 * completely would take long. */
static int peek_serial(const struct io_folder *directory, const char *name, uint64_t *serial)
{
	char path[NAME_MAX + 1 + sizeof(FORMAT_MANIFEST_NAME)];
	char head[FORMAT_MANIFEST_HEAD_BYTES];
	ssize_t bytes;

	snprintf(path, sizeof(path), "%s/" FORMAT_MANIFEST_NAME, name);
	bytes = io_folder_peek(directory, path, head, sizeof(head));
	*serial = bytes < 0 ? GROUP_UNKNOWN_SERIAL :
			      format_manifest_peek_serial(head, (size_t)bytes);
	return (int)MIN(bytes, 0);
}

/* Raises *last to the serial number of the directory `name`, if it is a checkpoint. */
static void record_serial(const struct io_folder *directory, const char *name, uint64_t *last)
{
	const enum group_name_kind kind = group_parse_name(name).kind;
	uint64_t serial;

	if (kind == GROUP_NAME_OTHER || kind == GROUP_NAME_ATTEMPT || kind == GROUP_NAME_DRAINED)
		return;
	peek_serial(directory, name, &serial);
	if (serial < FORMAT_MAX_SERIAL)
		*last = MAX(*last, serial);
}

struct newest {
	const struct io_folder *directory;
	uint64_t serial;
};

static int see_serial(void *user, const char *name, struct base_error *error)
{
	struct newest *newest = user;

	(void)error;
	record_serial(newest->directory, name, &newest->serial);
	return 0;
}

uint64_t group_last_serial(const struct io_folder *directory, const struct base_log *log)
{
	struct newest newest = { .directory = directory };
	struct base_error error = { 0 };

	if (io_folder_list(directory, see_serial, &newest, &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
	return newest.serial;
}

/* ---- Listing candidates ---------------------------------------------------------------------- */

static int add_candidate(void *user, const char *name, struct base_error *error)
{
	struct group_candidate candidate = { 0 };
	struct group_name parsed = group_parse_name(name);
	struct base_buffer *list = user;

	if (parsed.kind == GROUP_NAME_OTHER || parsed.kind == GROUP_NAME_ATTEMPT ||
	    parsed.kind == GROUP_NAME_DRAINED)
		return 0;
	candidate.step = parsed.step;
	candidate.aside = parsed.kind != GROUP_NAME_STEP;
	snprintf(candidate.name, sizeof(candidate.name), "%s", name);
	if (base_buffer_append(list, &candidate, sizeof(candidate)))
		return base_no_memory(error, "a list of checkpoints", list->bytes);
	return 0;
}

static int compare_steps(const void *left, const void *right)
{
	const struct group_candidate *a = left, *b = right;

	if (a->step != b->step)
		return a->step < b->step ? 1 : -1;
	return a->aside != b->aside ? a->aside - b->aside : strcmp(a->name, b->name);
}

static int compare_ages(const void *left, const void *right)
{
	const struct group_candidate *a = left, *b = right;

	if (a->serial != b->serial)
		return a->serial < b->serial ? 1 : -1;
	return compare_steps(left, right);
}

static int list_checkpoints(const struct io_folder *directory, struct group_candidates *candidates,
			    struct base_error *error)
{
	struct base_buffer list = { 0 };
	int ret = io_folder_list(directory, add_candidate, &list, error);

	*candidates = (struct group_candidates){ 0 };
	if (ret) {
		base_buffer_free(&list);
		return ret;
	}
	/* The cast is valid: malloc() allocated the buffer, so it is aligned for any struct. */
	candidates->all = (struct group_candidate *)(void *)list.data;
	candidates->count = list.bytes / sizeof(*candidates->all);
	if (candidates->count)
		qsort(candidates->all, candidates->count, sizeof(*candidates->all), compare_steps);
	return 0;
}

void group_candidates_free(struct group_candidates *candidates)
{
	free(candidates->all);
	*candidates = (struct group_candidates){ 0 };
}

static void sort_by_age(struct group_candidates *candidates)
{
	if (candidates->count)
		qsort(candidates->all, candidates->count, sizeof(*candidates->all), compare_ages);
}

/*
 * Reads the serial numbers of all candidates. Drops those that were moved aside and have no
 * manifest: they are being removed, or their remover died.
 */
static void look_at_ages(const struct io_folder *directory, struct group_candidates *candidates)
{
	size_t kept = 0;

	for (size_t i = 0; i < candidates->count; i++) {
		struct group_candidate *candidate = &candidates->all[i];

		if (peek_serial(directory, candidate->name, &candidate->serial) == -ENOENT &&
		    candidate->aside)
			continue;
		candidates->all[kept++] = *candidate;
	}
	candidates->count = kept;
}

int group_list_by_age(const struct io_folder *directory, struct group_candidates *candidates,
		      struct base_error *error)
{
	int ret = list_checkpoints(directory, candidates, error);

	look_at_ages(directory, candidates);
	sort_by_age(candidates);
	return ret;
}

/* ---- Opening the checkpoint of a step -------------------------------------------------------- */

int group_open_step(struct group_checkpoint *checkpoint, const struct io_folder *directory,
		    uint64_t step, struct base_error *error)
{
	struct group_candidates candidates;
	char name[GROUP_STEP_NAME_BYTES];
	int ret;

	group_step_name(name, step);
	ret = group_checkpoint_open(checkpoint, directory, name, step, error);
	if (ret != -ENOENT)
		return ret;
	ret = list_checkpoints(directory, &candidates, error);
	if (ret)
		return ret;
	ret = -ENOENT;
	for (size_t i = 0; ret == -ENOENT && i < candidates.count; i++)
		if (candidates.all[i].step == step)
			ret = group_checkpoint_open(checkpoint, directory, candidates.all[i].name,
						    step, error);
	group_candidates_free(&candidates);
	if (ret == -ENOENT)
		base_fail(error, ret, "there is no complete checkpoint of step %llu in %s",
			  (unsigned long long)step, directory->path);
	return ret;
}

bool group_is_shortage(int code)
{
	return code == -ENOMEM || code == -EMFILE || code == -ENFILE;
}

/* ---- Listing complete checkpoints ------------------------------------------------------------ */

/*
 * Reduces the list to complete checkpoints, one for each step, and sorts it by age, newest first. A
 * candidate that cannot be read counts as missing. But if this process runs out of memory or
 * descriptors, that says nothing about the candidate, so the call fails.
 */
static int keep_complete(const struct io_folder *directory, struct group_candidates *candidates,
			 struct base_error *error)
{
	struct group_checkpoint checkpoint;
	size_t kept = 0;
	int ret;

	for (size_t i = 0; i < candidates->count; i++) {
		struct group_candidate *candidate = &candidates->all[i];
		struct base_error why = { 0 };

		if (kept && candidates->all[kept - 1].step == candidate->step)
			continue;
		ret = group_checkpoint_open(&checkpoint, directory, candidate->name,
					    candidate->step, &why);
		if (group_is_shortage(ret))
			return base_propagate(error, &why);
		if (ret)
			continue;
		candidate->serial = checkpoint.manifest.serial;
		group_checkpoint_close(&checkpoint);
		candidates->all[kept++] = *candidate;
	}
	candidates->count = kept;
	sort_by_age(candidates);
	return 0;
}

/* Lists the complete checkpoints, oldest first. The caller frees *steps. */
static int list_steps(const struct io_folder *directory, uint64_t **steps, size_t *count,
		      struct base_error *error)
{
	struct group_candidates candidates;
	int ret = list_checkpoints(directory, &candidates, error);

	if (ret)
		return ret;
	ret = keep_complete(directory, &candidates, error);
	*count = ret ? 0 : candidates.count;
	*steps = ret ? NULL : calloc(MAX(*count, 1), sizeof(**steps));
	if (!ret && !*steps)
		ret = base_no_memory(error, "a list of steps", *count * sizeof(**steps));
	for (size_t i = 0; !ret && i < *count; i++)
		(*steps)[i] = candidates.all[*count - 1 - i].step;
	group_candidates_free(&candidates);
	return ret;
}

IOSHAPE_EXPORT int ioshape_checkpoint_list(struct ioshape_context *context, const char *path,
					   uint64_t **steps, size_t *count)
{
	struct io_folder directory = IO_NO_FOLDER;
	struct base_error error = { 0 };
	int ret;

	if (!steps || !count)
		return base_null_argument("list");
	*steps = NULL;
	*count = 0;
	ret = save_enter(context, &error);
	if (!ret && !path)
		ret = base_fail_reason(&error, -EINVAL, "no checkpoint directory was given");
	if (!ret)
		ret = group_open_directory(&directory, path, &error);
	if (!ret)
		ret = list_steps(&directory, steps, count, &error);
	io_folder_close(&directory);
	return base_return(ret, "list", path, &error);
}

/* ---- Which attempts are dead ----------------------------------------------------------------- */

struct tidying {
	const struct io_folder *directory;
	const char *job;       /* hash of the job; NULL: none */
	uint64_t *last_serial; /* see group_tidy(); may be NULL */
	struct io_clock *clock;
	const struct base_log *log;
	struct base_budget *budget;
};

struct last_touch {
	const struct io_folder *folder;
	int64_t seconds;
	struct base_budget *budget;
};

static int see_touch(void *user, const char *name, struct base_error *error)
{
	struct last_touch *last = user;
	struct io_entry entry;
	int ret = base_budget_look(last->budget) ?
			  io_folder_look(last->folder, name, &entry, error) :
			  -EAGAIN;

	if (!ret)
		last->seconds = MAX(last->seconds, entry.modified);
	return ret == -ENOENT ? 0 : ret;
}

static bool is_untouched(const struct tidying *tidying, const struct io_folder *folder)
{
	struct last_touch last = { folder, 0, tidying->budget };

	return !see_touch(&last, ".", NULL) && !io_folder_list(folder, see_touch, &last, NULL) &&
	       io_is_abandoned(tidying->clock, last.seconds);
}

static bool is_ours(const struct io_folder *folder)
{
	struct io_entry entry;

	return !io_folder_look(folder, ".", &entry, NULL) && base_is_own_user(entry.owner);
}

static bool is_this_job(const struct tidying *tidying, const char *id)
{
	return tidying->job && !strncmp(id, tidying->job, 8);
}

static bool is_this_domain(const struct tidying *tidying, const char *id)
{
	char domain[IO_DOMAIN_BYTES];

	io_lock_domain(tidying->directory->fd, domain);
	return io_is_lock_domain(id + 9, domain);
}

static bool is_dead(const struct tidying *tidying, struct io_folder *folder, const char *id)
{
	switch (io_folder_lock(folder)) {
	case IO_BUSY:
		return false;
	case IO_LOCKED:
		return is_this_domain(tidying, id) || is_this_job(tidying, id) ||
		       is_untouched(tidying, folder);
	case IO_NO_LOCKS:
		break;
	}
	return is_this_job(tidying, id) || is_untouched(tidying, folder);
}

/* ---- Removing what dead processes left ------------------------------------------------------- */

/* Removes the directory `name`, which is open as `folder`, manifest first. Returns -EBUSY, without
 * an error message and without touching anything, if a process reads it. Returns -EAGAIN, without
 * an error message, if the budget did not suffice for all of it. */
static int remove_open(const struct io_folder *folder, const struct io_folder *directory,
		       const char *name, struct base_budget *budget, struct base_error *error)
{
	struct io_hold claim;
	int ret;

	ret = io_folder_claim(folder, FORMAT_MANIFEST_NAME, &claim, error);
	if (!ret || ret == -ENOENT)
		ret = io_folder_remove(folder, directory, name, FORMAT_MANIFEST_NAME, &claim,
				       budget, error);
	io_folder_let_go(&claim);
	return ret;
}

static void remove_it(const struct tidying *tidying, const struct io_folder *folder,
		      const char *name, const char *what)
{
	struct base_error error = { 0 };
	int ret = remove_open(folder, tidying->directory, name, tidying->budget, &error);

	if (!ret)
		base_log(tidying->log, IOSHAPE_LOG_WARNING, "removed %s, %s", folder->path, what);
	else if (ret == -EAGAIN)
		base_log(tidying->log, IOSHAPE_LOG_WARNING,
			 "removed some files of %s, %s: the next save removes more", folder->path,
			 what);
	else if (ret != -EBUSY)
		base_log(tidying->log, IOSHAPE_LOG_WARNING, "%s", error.text);
}

/* Tidies a directory that was moved aside. Its process died between the two renames of a
 * replacement, or while it pruned; or it is still doing so. */
static void tidy_aside(const struct tidying *tidying, const struct io_folder *folder,
		       const char *name, const struct group_name *parsed)
{
	char step_name[GROUP_STEP_NAME_BYTES];
	struct io_entry entry;
	int ret;

	if (parsed->kind == GROUP_NAME_PRUNED &&
	    io_folder_look(folder, FORMAT_MANIFEST_NAME, &entry, NULL) == -ENOENT) {
		remove_it(tidying, folder, name, "which another process had started to remove");
		return;
	}
	group_step_name(step_name, parsed->step);
	ret = io_folder_look(tidying->directory, step_name, &entry, NULL);
	if (!ret) {
		remove_it(tidying, folder, name, "which had been replaced");
	} else if (ret == -ENOENT) {
		ret = io_folder_rename(tidying->directory, name, step_name);
		base_log(tidying->log, IOSHAPE_LOG_WARNING,
			 ret ? "%s: cannot rename it to %s" : "%s: renamed back to %s",
			 folder->path, step_name);
	}
}

static int tidy_one(void *user, const char *name, struct base_error *error)
{
	const struct tidying *tidying = user;
	struct group_name parsed = group_parse_name(name);
	struct io_folder folder;

	(void)error;
	/* The names are listed here anyway, which saves another listing. */
	if (tidying->last_serial)
		record_serial(tidying->directory, name, tidying->last_serial);
	/* A temporary name is that of a copy on a tier that a drain was removing. */
	if (parsed.kind == GROUP_NAME_OTHER)
		io_remove_if_stale(tidying->directory, name, tidying->clock, tidying->budget,
				   tidying->log);
	if (parsed.kind == GROUP_NAME_OTHER || parsed.kind == GROUP_NAME_STEP ||
	    !base_budget_look(tidying->budget))
		return 0;
	if (io_folder_open_in(&folder, tidying->directory, name, NULL))
		return 0;
	if (!is_ours(&folder))
		goto out;
	/*
	 * Compare the name only after taking the lock. The attempt may have been committed between
	 * the open and the lock, and would be a complete checkpoint by now.
	 */
	if (parsed.kind == GROUP_NAME_DRAINED) {
		/* Nodes that still drain into it hold no lock on it, so age decides. */
		if (is_untouched(tidying, &folder))
			remove_it(tidying, &folder, name,
				  "to which no process has added files for long");
	} else if (parsed.kind == GROUP_NAME_ATTEMPT) {
		if (is_dead(tidying, &folder, parsed.id) &&
		    io_folder_is_named(&folder, tidying->directory, name))
			remove_it(tidying, &folder, name, "left behind by a dead process");
	} else if (io_folder_lock(&folder) != IO_BUSY &&
		   io_folder_is_named(&folder, tidying->directory, name)) {
		tidy_aside(tidying, &folder, name, &parsed);
	}
out:
	io_folder_close(&folder);
	return 0;
}

void group_tidy(const struct io_folder *directory, const char *job, uint64_t *last_serial,
		struct base_budget *budget, const struct base_log *log)
{
	struct io_clock clock = { .directory_fd = directory->fd };
	struct tidying tidying = { directory, job, last_serial, &clock, log, budget };
	struct base_error error = { 0 };

	if (io_folder_list(directory, tidy_one, &tidying, &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
}

/* Decides which checkpoints go; `steps` are sorted by age, oldest first. Returns their number.
 * Pure. */
static size_t retention(const uint64_t *steps, size_t count, uint32_t keep_last,
			uint64_t keep_every, bool *goes)
{
	size_t going = 0;

	for (size_t i = 0; i < count; i++) {
		/* Counting from the end keeps the newest one, however few are kept. */
		bool is_last = !keep_last || count - i <= keep_last;
		bool is_multiple = keep_every && steps[i] % keep_every == 0;

		goes[i] = !is_last && !is_multiple;
		going += goes[i];
	}
	return going;
}

/* ---- Pruning old checkpoints ----------------------------------------------------------------- */

struct pruning {
	struct io_folder directory;
	const struct ioshape_prune_options *options;
	const struct base_log *log;
	uint64_t removed;
};

/*
 * Renames the directory before removing it, so that group_tidy() can remove the rest if this
 * process dies. While the directory still has its manifest, group_tidy() gives its name back: it
 * may be another checkpoint than the one that was to go.
 */
static int rename_and_remove(struct pruning *pruning, const struct io_folder *folder,
			     const char *name, uint64_t step, struct io_hold *claim,
			     struct base_error *error)
{
	char doomed[GROUP_ATTEMPT_NAME_BYTES];
	struct io_entry manifest;
	int ret;

	aside_name(doomed, GROUP_NAME_PRUNED, step, base_random());
	ret = io_folder_rename(&pruning->directory, name, doomed);
	/* Another process has pruned it already. */
	if (ret == -ENOENT)
		return 0;
	if (ret)
		return base_fail(error, ret, "cannot remove \"%s\" (rename)", folder->path);
	/* The checkpoint was replaced just now, so this has renamed the new one: rename it back. */
	if (!io_folder_is_named(folder, &pruning->directory, doomed)) {
		io_folder_rename(&pruning->directory, doomed, name);
		return 0;
	}
	/* Without this sync, a power failure might bring back the old name, without a manifest. */
	ret = io_folder_sync(&pruning->directory, error);
	if (!ret)
		ret = io_folder_remove(folder, &pruning->directory, doomed, FORMAT_MANIFEST_NAME,
				       claim, NULL, error);
	/* The manifest is still there, because the files belong to another user or the storage
	 * failed. The checkpoint is complete, so it gets its name back. */
	if (ret && !io_folder_look(folder, FORMAT_MANIFEST_NAME, &manifest, NULL)) {
		io_folder_rename(&pruning->directory, doomed, name);
		return ret;
	}
	/* Files remain that are not the checkpoint's. Rename the directory back, so that they are
	 * where the error message says. */
	if (ret == -ENOTEMPTY)
		io_folder_rename(&pruning->directory, doomed, name);
	pruning->removed++;
	return ret;
}

/*
 * Removes a checkpoint that was validated but is not held open. The claim keeps readers away from
 * its manifest, and the lock keeps group_tidy() from renaming it back.
 */
static int remove_checkpoint(struct pruning *pruning, struct io_folder *folder, uint64_t step,
			     uint64_t bytes, struct base_error *error)
{
	char name[GROUP_STEP_NAME_BYTES];
	struct io_hold claim;
	int ret;

	group_step_name(name, step);
	ret = io_folder_claim(folder, FORMAT_MANIFEST_NAME, &claim, error);
	if (!ret && io_folder_lock(folder) == IO_BUSY)
		ret = -EBUSY;
	if (ret == -EBUSY)
		base_log(pruning->log, IOSHAPE_LOG_INFO, "%s was not removed: a process uses it",
			 folder->path);
	if (!ret && io_folder_is_named(folder, &pruning->directory, name)) {
		if (pruning->options->removing)
			pruning->options->removing(pruning->options->removing_user, step, bytes);
		if (pruning->options->dry_run)
			pruning->removed++;
		else
			ret = rename_and_remove(pruning, folder, name, step, &claim, error);
	}
	io_folder_let_go(&claim);
	return ret == -EBUSY || ret == -ENOENT ? 0 : ret;
}

static int prune_step(struct pruning *pruning, uint64_t step, struct base_error *error)
{
	struct group_checkpoint checkpoint;
	struct base_error why = { 0 };
	struct io_folder folder;
	char name[GROUP_STEP_NAME_BYTES];
	uint64_t bytes;
	int ret;

	group_step_name(name, step);
	ret = group_checkpoint_open(&checkpoint, &pruning->directory, name, step, &why);
	if (group_is_shortage(ret))
		return base_propagate(error, &why);
	/* The checkpoint is gone, damaged or replaced by now, so it is not the one that was
	 * chosen. */
	if (ret)
		return 0;
	bytes = group_checkpoint_bytes(&checkpoint);
	folder = checkpoint.folder;
	checkpoint.folder = (struct io_folder)IO_NO_FOLDER;
	group_checkpoint_close(&checkpoint);
	ret = remove_checkpoint(pruning, &folder, step, bytes, error);
	io_folder_close(&folder);
	return ret;
}

static int prune(struct pruning *pruning, struct base_error *error)
{
	const struct ioshape_prune_options *options = pruning->options;
	uint64_t *steps = NULL;
	bool *goes = NULL;
	size_t count = 0;
	int ret = 0, failed;

	if (!options->keep_last)
		return 0;
	ret = list_steps(&pruning->directory, &steps, &count, error);
	if (!ret) {
		goes = calloc(MAX(count, 1), sizeof(*goes));
		if (!goes)
			ret = base_no_memory(error, "a list of steps", count);
	}
	if (!ret)
		retention(steps, count, options->keep_last, options->keep_every, goes);
	/* A checkpoint that cannot be removed does not stop the removal of the others. */
	for (size_t i = 0; goes && i < count; i++) {
		failed = goes[i] ? prune_step(pruning, steps[i], error) : 0;
		if (!ret)
			ret = failed;
	}
	free(goes);
	free(steps);
	return ret;
}

int group_prune(struct ioshape_context *context, const char *path, const char *job,
		const struct ioshape_prune_options *options, uint64_t *removed,
		struct base_error *error)
{
	struct pruning pruning = {
		.directory = IO_NO_FOLDER,
		.options = options,
		.log = save_settings(context).log,
	};
	struct base_budget budget = base_budget_begin();
	int ret = group_open_directory(&pruning.directory, path, error);

	/* Only a save of the job has a budget, because it must not wait until everything is
	 * removed. */
	if (!ret && !options->dry_run)
		group_tidy(&pruning.directory, job, NULL, job ? &budget : NULL,
			   save_settings(context).log);
	if (!ret)
		ret = prune(&pruning, error);
	io_folder_close(&pruning.directory);
	if (removed)
		*removed = pruning.removed;
	return ret;
}

IOSHAPE_EXPORT int ioshape_checkpoint_prune(struct ioshape_context *context, const char *path,
					    const struct ioshape_prune_options *given,
					    uint64_t *removed)
{
	struct ioshape_prune_options options;
	struct base_error error = { 0 };
	int ret;

	if (removed)
		*removed = 0;
	ret = save_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_prune_options",
					&error);
	if (!ret && !path)
		ret = base_fail_reason(&error, -EINVAL, "no checkpoint directory was given");
	if (!ret)
		ret = group_prune(context, path, NULL, &options, removed, &error);
	return base_return(ret, "prune", path, &error);
}

/* Most tries for a free name, and most tries to commit while other processes change the
 * directory. */
#define MOST_TRIES 16

/* ---- Names of attempts ----------------------------------------------------------------------- */

static void make_name(struct group_attempt *attempt, const char *job)
{
	char domain[IO_DOMAIN_BYTES];

	io_lock_domain(attempt->directory.fd, domain);
	snprintf(attempt->id, sizeof(attempt->id), "%.8s-%.8s-%016llx", job, domain,
		 (unsigned long long)base_random());
	snprintf(attempt->name, sizeof(attempt->name), ".step-%010llu.%s",
		 (unsigned long long)attempt->step, attempt->id);
}

/* ---- Beginning an attempt -------------------------------------------------------------------- */

/* Creates and locks the attempt's directory. Returns -EAGAIN if the name is taken. */
static int make_folder(struct group_attempt *attempt, struct base_error *error)
{
	enum io_lock lock = IO_LOCKED;
	const int ret = io_folder_create_locked(&attempt->folder, &attempt->directory,
						attempt->name, &lock, error);

	if (lock == IO_NO_LOCKS)
		base_log(&attempt->log, IOSHAPE_LOG_DEBUG,
			 "directories in %s cannot be locked: leftovers of dead jobs are "
			 "recognised by age",
			 attempt->directory.path);
	return ret;
}

/* Gets the state of the directory from its server, past what this host has cached. */
static int revalidate(const struct io_folder *directory, struct io_entry *entry)
{
	io_revalidate(directory->fd, "");
	return io_folder_look(directory, ".", entry, NULL);
}

static int open_directory(struct group_attempt *attempt, const char *directory, const char *job,
			  struct base_error *error)
{
	struct base_budget budget = base_budget_begin();
	int ret = io_folder_make(directory, error);

	if (!ret)
		ret = io_folder_open(&attempt->directory, directory, error);
	if (!ret)
		group_tidy(&attempt->directory, job, &attempt->last_serial, &budget, &attempt->log);
	return ret;
}

static int make_named(struct group_attempt *attempt, const char *name, struct base_error *error)
{
	snprintf(attempt->name, sizeof(attempt->name), "%s", name);
	strcpy(attempt->id, group_parse_name(name).id);
	return make_folder(attempt, error);
}

static int make_new(struct group_attempt *attempt, const char *job, struct base_error *error)
{
	int ret = -EAGAIN;

	for (int tries = 0; ret == -EAGAIN && tries < MOST_TRIES; tries++) {
		make_name(attempt, job);
		ret = make_folder(attempt, error);
	}
	return ret;
}

int group_attempt_begin(struct group_attempt *attempt, const char *directory, uint64_t step,
			const char *name, const char *job, const struct base_log *log,
			struct base_error *error)
{
	int ret;

	*attempt = (struct group_attempt)GROUP_NO_ATTEMPT;
	attempt->step = step;
	if (log)
		attempt->log = *log;
	ret = open_directory(attempt, directory, job, error);
	if (!ret)
		ret = name ? make_named(attempt, name, error) : make_new(attempt, job, error);
	if (ret == -EAGAIN)
		base_fail(error, ret, "cannot find a free name in %s", attempt->directory.path);
	if (ret)
		group_attempt_abandon(attempt);
	else
		revalidate(&attempt->directory, &attempt->seen);
	return ret;
}

/* ---- Committing an attempt ------------------------------------------------------------------- */

/* The checkpoint that was replaced, and how. */
struct replaced {
	enum {
		NOTHING_REPLACED,
		SWAPPED,      /* swapped: it has the attempt's name now */
		STEPPED_ASIDE /* moved aside: the filesystem cannot swap names */
	} how;
	char name[GROUP_ATTEMPT_NAME_BYTES]; /* its present name */
	struct io_folder folder;             /* open and locked if it was moved aside */
};

struct expected {
	const char **names; /* sorted */
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
						"check that all ranks of the node see its tier",
						error);
	}
	return ret;
}

/*
 * Checks that all files of the manifest exist, by listing the directory. Their writers, on other
 * hosts, have just written them. To look at each file would take one request per file, and some
 * filesystems would ask its writer for the size. A listing takes a few requests in all. If a name
 * is missing, or there is only one file, looks at each file.
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

	/* If the directory has not changed since the attempt began, do not list it and read all
	 * manifests again. */
	if (revalidate(&attempt->directory, &now) || !io_is_unchanged(&attempt->seen, &now) ||
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
		base_fail(error, ret, "cannot write the manifest of %s: the files of its ranks %s",
			  attempt->folder.path,
			  ret == IOSHAPE_E_LIMIT ? "exceed the limits of a manifest" :
						   "are inconsistent");
	attempt->last_serial = numbered.serial;
	if (!ret)
		ret = io_folder_put(&attempt->folder, FORMAT_MANIFEST_NAME, text.data, text.bytes,
				    error);
	/* Other ranks have written the files: an incomplete checkpoint must not replace a complete
	 * one. */
	if (!ret)
		ret = check_written(attempt, manifest, error);
	/* One sync makes the names of all files durable. Their writers have synced the contents. */
	if (!ret)
		ret = io_folder_sync(&attempt->folder, error);
	base_buffer_free(&text);
	return ret;
}

static bool is_complete(const struct group_attempt *attempt, const char *step_name)
{
	struct group_checkpoint checkpoint;

	if (group_checkpoint_open(&checkpoint, &attempt->directory, step_name, attempt->step, NULL))
		return false;
	group_checkpoint_close(&checkpoint);
	return true;
}

/*
 * Moves the old checkpoint aside, because the filesystem cannot swap names (NFS). If this process
 * dies before the new one has its name, readers and group_tidy() find the old one by its new name.
 * Its lock keeps other processes from renaming it back meanwhile.
 */
static int step_aside(struct group_attempt *attempt, const char *step_name, struct replaced *old)
{
	int ret;

	aside_name(old->name, GROUP_NAME_REPLACED, attempt->step, base_random());
	io_folder_close(&old->folder);
	if (!io_folder_open_in(&old->folder, &attempt->directory, step_name, NULL))
		io_folder_lock(&old->folder);
	ret = io_folder_rename(&attempt->directory, step_name, old->name);
	old->how = ret ? NOTHING_REPLACED : STEPPED_ASIDE;
	return ret;
}

/* Tries once to give the attempt its final name. Returns -EAGAIN if another process changed
 * something at the same time. */
static int try_to_commit(struct group_attempt *attempt, const char *step_name, bool no_replace,
			 struct replaced *old)
{
	struct io_entry entry;
	int ret;

	/* A rename replaces a directory only if that is empty. */
	ret = io_folder_rename(&attempt->directory, attempt->name, step_name);
	if (ret != -ENOTEMPTY && ret != -EEXIST)
		return ret;
	if (no_replace && is_complete(attempt, step_name))
		return -EEXIST;
	/* If the old checkpoint is still aside, another process has committed a new one meanwhile.
	 * If it is not, another process has renamed it back: replace it again. */
	if (old->how == STEPPED_ASIDE &&
	    io_folder_look(&attempt->directory, old->name, &entry, NULL) != -ENOENT)
		return -EBUSY;
	old->how = NOTHING_REPLACED;
	ret = io_folder_swap(&attempt->directory, attempt->name, step_name);
	if (!ret) {
		old->how = SWAPPED;
		strcpy(old->name, attempt->name);
		return 0;
	}
	if (ret == -EOPNOTSUPP)
		ret = step_aside(attempt, step_name, old);
	return !ret || ret == -ENOENT ? -EAGAIN : ret;
}

/* Undoes the renames, as far as possible. */
static void take_back(struct group_attempt *attempt, const char *step_name, bool renamed,
		      struct replaced *old)
{
	if (old->how == SWAPPED) {
		io_folder_swap(&attempt->directory, attempt->name, step_name);
		return;
	}
	if (renamed)
		io_folder_rename(&attempt->directory, step_name, attempt->name);
	if (old->how == STEPPED_ASIDE)
		io_folder_rename(&attempt->directory, old->name, step_name);
}

static int commit_as(struct group_attempt *attempt, const char *step_name, bool no_replace,
		     struct replaced *old, struct base_error *error)
{
	int ret = -EAGAIN;

	for (int tries = 0; ret == -EAGAIN && tries < MOST_TRIES; tries++)
		ret = try_to_commit(attempt, step_name, no_replace, old);
	if (ret) {
		take_back(attempt, step_name, false, old);
		return base_fail_with(error, ret, ret == -EEXIST ? "choose another step" : "",
				      "cannot commit \"%s/%s\"%s", attempt->directory.path,
				      step_name,
				      ret == -EEXIST ? " without replacing an existing checkpoint" :
				      ret == -ENOENT ? ", because it was removed during the save" :
						       "");
	}
	ret = io_folder_sync(&attempt->directory, error);
	if (ret)
		take_back(attempt, step_name, true, old);
	return ret;
}

/* Removes the replaced checkpoint. If that fails, the next group_tidy() does it. */
static void remove_replaced(struct group_attempt *attempt, const struct replaced *old)
{
	struct base_error error = { 0 };
	struct io_folder folder;
	int ret;

	if (old->how == NOTHING_REPLACED ||
	    io_folder_open_in(&folder, &attempt->directory, old->name, NULL))
		return;
	ret = remove_open(&folder, &attempt->directory, old->name, NULL, &error);
	if (ret == -EBUSY)
		base_log(&attempt->log, IOSHAPE_LOG_INFO,
			 "%s was replaced while a process reads it; a later save removes the old "
			 "files",
			 folder.path);
	else if (ret)
		base_log(&attempt->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	io_folder_close(&folder);
}

int group_attempt_commit(struct group_attempt *attempt, const struct format_manifest *manifest,
			 bool no_replace, struct base_error *error)
{
	struct replaced old = { .folder = IO_NO_FOLDER };
	char step_name[GROUP_STEP_NAME_BYTES];
	int ret;

	group_step_name(step_name, attempt->step);
	ret = write_manifest(attempt, manifest, error);
	if (!ret)
		ret = commit_as(attempt, step_name, no_replace, &old, error);
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
	/* A busy attempt is removed by the next one. */
	if (ret && ret != -EBUSY)
		base_log(&attempt->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	io_folder_close(&attempt->folder);
	io_folder_close(&attempt->directory);
}
