/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drains a tier: copies what waits in the journal to its destinations, one after the other. One
 * process drains a tier at a time. A copy is a file, a checkpoint of a group, or this node's files
 * of such a checkpoint. Files are read and verified on the tier, and written at the destination
 * like any save.
 */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A copy that is being drained. */
struct carry {
	const struct ioshape_tier *tier;
	const struct ioshape_drain_options *options;
	const struct tier_entry *entry;
	/* last entry before it that was drained to the same path; NULL if none is known */
	const struct tier_entry *before;
	struct io_entry copy;
	/* what the copy may replace, and the modification time that it gets */
	struct io_original original;
	uint64_t bytes; /* size of all its files */
	uint64_t done;  /* size of the files that are done */
	/* Results: how it ended, and the modification time at the destination. */
	enum ioshape_drained result;
	int64_t there_ns;
};

/* ---- Comparing the copy with the destination ------------------------------------------------- */

/* Computes the modification time that the destination gets, and what the copy may replace. It may
 * replace anything that is not newer. It may also replace what an earlier drain put there, even if
 * clocks have changed since. */
static int plan(struct carry *carry, const struct io_entry *there, struct base_error *error)
{
	int64_t time_ns;
	int ret = tier_clock_there(carry->tier, carry->entry->path, carry->copy.modified_ns,
				   &time_ns, error);

	if (there && carry->before && carry->before->there_ns == there->modified_ns)
		time_ns = MAX(time_ns, there->modified_ns);
	carry->original = (struct io_original){
		.modified_ns = time_ns,
		.newest_ns = time_ns,
		.mode = carry->copy.mode,
	};
	return ret;
}

/* Sets the result for a destination that is newer. The entry then gets the time that the copy would
 * have had there. */
static void find_newer(struct carry *carry)
{
	carry->result = IOSHAPE_DRAINED_NEWER;
	carry->there_ns = carry->original.modified_ns;
}

/* Returns 0 if the destination was not replaced because another process has just saved there,
 * otherwise `ret`. */
static int unless_newer(struct carry *carry, int ret, struct base_error *error)
{
	struct io_entry there;

	if (ret != -EEXIST || io_look(carry->entry->path, true, &there) ||
	    there.modified_ns <= carry->original.newest_ns)
		return ret;
	base_error_begin(error);
	find_newer(carry);
	return 0;
}

static int see_name(void *user, const char *name, struct base_error *error)
{
	(void)user, (void)name, (void)error;
	return 1;
}

/* Returns whether the path is an empty directory, which any directory may replace, as in a direct
 * save. */
static bool is_empty_folder(const char *path, const struct io_entry *there)
{
	struct io_folder folder;
	bool empty;

	if (there->kind != IO_FOLDER || io_folder_open(&folder, path, NULL))
		return false;
	empty = !io_folder_list(&folder, see_name, NULL, NULL);
	io_folder_close(&folder);
	return empty;
}

static int look_there(struct carry *carry, struct base_error *error)
{
	const char *path = carry->entry->path;
	struct io_entry there;
	int ret = io_look(path, true, &there);
	const bool is_there = !ret && !is_empty_folder(path, &there);

	if (ret && ret != -ENOENT)
		return base_fail(error, ret, "cannot look at \"%s\"", path);
	if (!ret && there.kind != carry->copy.kind)
		return base_fail_reason(error, -EEXIST, "cannot commit \"%s\": %s", path,
					there.kind == IO_FOLDER ?
						"a directory is there" :
						"what is there is not a directory");
	ret = plan(carry, is_there ? &there : NULL, error);
	if (!ret && is_there && there.modified_ns > carry->original.newest_ns)
		find_newer(carry);
	return ret;
}

/* ---- Draining a file ------------------------------------------------------------------------- */

/* Block that is read and written at a time, while prefetching and writing go on. */
#define BLOCK_BYTES (4 * MIB)

struct file {
	struct carry *carry;
	const char *from, *to; /* paths of the copy and of the destination */
	struct io_entry copy;
	struct io_original original;
	bool of_checkpoint;
	int64_t there_ns; /* result: modification time at the destination */
	/* The following members are used while the file is copied. */
	struct ioshape_reader *reader;
	struct save_checksums checksums;
};

/* Returns whether the file at this path is still the one that was looked at, and unchanged. */
static bool is_still_there(const char *path, const struct io_entry *copy)
{
	struct io_entry now;

	return !io_look(path, false, &now) && io_is_unchanged(copy, &now);
}

static bool was_written(const struct file *file)
{
	struct io_entry now;

	return !io_look(file->from, false, &now) && now.inode == file->copy.inode &&
	       !io_is_unchanged(&file->copy, &now);
}

static int put_block(struct file *file, struct io_writer *writer, uint64_t at, void *block,
		     size_t bytes, struct base_error *error)
{
	if (save_reader_read_file(file->reader, at, block, bytes))
		return base_propagate(error, base_last_error());
	if (file->checksums.beside)
		return save_checksums_put(&file->checksums, writer, block, bytes, NULL, error);
	return io_writer_put(writer, block, bytes, NULL, error);
}

static int put_all(void *user, struct io_writer *writer, struct base_error *error)
{
	struct file *file = user;
	const uint64_t bytes = file->copy.bytes;
	void *block = malloc(BLOCK_BYTES);
	int ret = block ? 0 : base_no_memory(error, "a copy buffer", BLOCK_BYTES);
	size_t piece;

	for (uint64_t at = 0; !ret && at < bytes; at += piece) {
		piece = MIN(BLOCK_BYTES, bytes - at);
		ret = put_block(file, writer, at, block, piece, error);
	}
	free(block);
	/* A process that replaces the file leaves these bytes unchanged, but one that writes into
	 * it does not. */
	if (!ret && was_written(file))
		ret = -EAGAIN;
	return ret;
}

/* Opens the copy. The destination gets the checksums and statistics beside it, too. */
static int open_copy(struct file *file, struct base_error *error)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;

	options.any_format = 1;
	if (ioshape_reader_open(file->carry->tier->context, file->from, &options, &file->reader) ||
	    ioshape_reader_get_info(file->reader, &info))
		return is_still_there(file->from, &file->copy) ?
			       base_propagate(error, base_last_error()) :
			       -EAGAIN;
	file->checksums.beside = info.checksums && !info.torch_zip;
	file->checksums.statistics = save_reader_statistics(file->reader);
	/* The file is open now. This check shows that it is the one that was looked at. */
	return is_still_there(file->from, &file->copy) && info.file_bytes == file->copy.bytes ?
		       0 :
		       -EAGAIN;
}

/* Reports the progress of all files of the copy. */
static int tell_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	const struct file *file = user;
	const struct carry *carry = file->carry;
	const struct ioshape_drain_options *options = carry->options;

	(void)total;
	/* A directory ends when it is in place, and not with one of its files. */
	if (!options->progress || (file->of_checkpoint && phase >= IOSHAPE_PHASE_COMMIT))
		return 0;
	return options->progress(options->progress_user, phase,
				 MIN(carry->done + done, carry->bytes), carry->bytes);
}

static int write_there(struct file *file, struct base_error *error)
{
	const uint64_t bytes = file->copy.bytes;
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .blocked = &self, .drains = true };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct save_file save = {
		.context = file->carry->tier->context,
		.path = file->to,
		.options = {
			.expected_bytes = bytes,
			.exact = true,
			.umask_then = 1 + (int)(0666 & ~file->copy.mode),
			.original = &file->original,
			.progress = tell_progress,
			.progress_user = file,
			.progress_total = bytes,
		},
		.checks_space = bytes > 0,
		.checksums = file->checksums.beside ? &file->checksums : NULL,
		.put = put_all,
		.user = file,
	};
	int ret;

	ret = save_write_file(&save, &watch, NULL, &report, error);
	file->there_ns = save.modified_ns;
	return ret;
}

/* Copies a file. Returns 0, -EAGAIN without an error message if the file changed meanwhile, -EEXIST
 * if the destination is newer, or another negative code. */
static int carry_file(struct file *file, struct base_error *error)
{
	int ret = open_copy(file, error);

	if (!ret)
		ret = write_there(file, error);
	base_buffer_free(&file->checksums.crcs);
	ioshape_reader_free(file->reader);
	return ret;
}

/* Copies the file of this name from the copy to another directory. */
static int carry_named(struct carry *carry, const char *to, const char *name,
		       const struct io_entry *copy, const struct io_original *original,
		       struct base_error *error)
{
	struct file file = {
		.carry = carry,
		.copy = *copy,
		.original = *original,
		.of_checkpoint = true,
	};
	char *from_path = NULL, *to_path = NULL;
	int ret;

	if (asprintf(&from_path, "%s/%s", carry->entry->copy_path, name) < 0)
		from_path = NULL;
	if (asprintf(&to_path, "%s/%s", to, name) < 0)
		to_path = NULL;
	file.from = from_path;
	file.to = to_path;
	ret = from_path && to_path ? carry_file(&file, error) :
				     base_no_memory(error, "a path", strlen(to));
	carry->done += copy->bytes;
	free(from_path);
	free(to_path);
	return ret;
}

/* ---- Draining a checkpoint of a group -------------------------------------------------------- */

/* Each node copies the files that it has into one hidden directory beside the destination. The node
 * that finds all files there adds the manifest, which every node has, and renames the directory
 * into place. */

/* A checkpoint, and its destination. */
struct gathering {
	struct carry *carry;
	struct group_checkpoint here;
	struct io_folder there; /* directory of the checkpoints */
	const char *name;       /* name of the checkpoint in it */
	/* name of the hidden directory for its files */
	char together[GROUP_ATTEMPT_NAME_BYTES];
	struct io_folder folder; /* hidden directory */
};

/* ---- State of the destination ---------------------------------------------------------------- */

/* Returns whether the checkpoint is at its destination. Another node, or this one before a crash,
 * may have put it there. */
static bool is_committed(struct gathering *gathering)
{
	struct carry *carry = gathering->carry;
	const struct format_manifest *manifest = &gathering->here.manifest;
	struct group_checkpoint found;
	struct io_entry entry;
	bool same;

	if (group_checkpoint_open(&found, &gathering->there, gathering->name, manifest->step, NULL))
		return false;
	same = !strcmp(found.manifest.attempt, manifest->attempt) &&
	       !io_folder_look(&found.folder, ".", &entry, NULL);
	if (same)
		carry->there_ns = entry.modified_ns;
	group_checkpoint_close(&found);
	return same;
}

/* Returns whether to give up waiting. That is so if a newer checkpoint is at the destination and
 * the missing files have not come for a day. A node with them was then lost. */
static bool is_given_up(const struct gathering *gathering)
{
	const struct carry *carry = gathering->carry;
	const struct base_log *log = save_settings(carry->tier->context).log;
	struct io_clock clock = { .directory_fd = carry->tier->root.fd };

	return io_is_abandoned(&clock, carry->copy.modified) &&
	       group_last_serial(&gathering->there, log) > gathering->here.manifest.serial;
}

static int wait_for_others(struct gathering *gathering, struct base_error *error)
{
	struct carry *carry = gathering->carry;

	if (is_given_up(gathering)) {
		io_folder_remove(&gathering->folder, &gathering->there, gathering->together, NULL,
				 NULL, NULL, NULL);
		find_newer(carry);
		return 0;
	}
	carry->result = IOSHAPE_DRAINED_WAITS;
	base_fail_reason_with(error, -EAGAIN, "drain the tiers of those nodes, too",
			      "\"%s\" waits for the files of other nodes", carry->entry->path);
	return 0;
}

/* ---- Copying the files of this node ---------------------------------------------------------- */

/* Copies the files that are here and not at the destination. */
static int bring_all(struct gathering *gathering, struct base_error *error)
{
	const struct format_manifest *manifest = &gathering->here.manifest;
	struct carry *carry = gathering->carry;
	struct io_original original = {
		.modified_ns = carry->original.modified_ns,
		.newest_ns = INT64_MAX, /* any node's copy of a file is the same */
	};
	struct io_entry copy, there;
	int ret = 0;

	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		const struct format_manifest_file *listed = &manifest->files[i];

		ret = io_folder_look(&gathering->here.folder, listed->name, &copy, error);
		if (ret == -ENOENT) {
			ret = 0;
			continue;
		}
		original.mode = copy.mode;
		if (!ret && (io_folder_look(&gathering->folder, listed->name, &there, NULL) ||
			     there.bytes != listed->bytes))
			ret = carry_named(carry, gathering->folder.path, listed->name, &copy,
					  &original, error);
		else
			carry->done += copy.bytes;
	}
	return ret;
}

/* ---- Putting the checkpoint in place --------------------------------------------------------- */

static int put_manifest(struct gathering *gathering, struct base_error *error)
{
	struct base_buffer text = { 0 };
	int ret;

	ret = io_folder_get(&gathering->here.folder, FORMAT_MANIFEST_NAME,
			    FORMAT_MAX_MANIFEST_BYTES, &text, NULL, error);
	/* A node that died may have left one here. */
	if (!ret) {
		ret = io_put_whole(gathering->folder.fd, FORMAT_MANIFEST_NAME, text.data,
				   text.bytes, true, 0666);
		if (ret)
			base_fail(error, ret, "cannot write \"%s/" FORMAT_MANIFEST_NAME "\"",
				  gathering->folder.path);
	}
	base_buffer_free(&text);
	return ret;
}

/* Renames the hidden directory into place and takes its modification time. */
static int replace(struct gathering *gathering, struct base_error *error)
{
	struct carry *carry = gathering->carry;
	const struct ioshape_drain_options *options = carry->options;
	struct io_new_folder made = {
		.above = gathering->there,
		.folder = gathering->folder,
		.name = (char *)(uintptr_t)gathering->name,
	};
	struct io_entry there;
	int ret = io_folder_resemble(&gathering->folder, &carry->original, error);

	snprintf(made.temporary, sizeof(made.temporary), "%s", gathering->together);
	if (!ret)
		ret = io_folder_look(&made.folder, ".", &there, error);
	if (!ret)
		ret = io_new_folder_replace(&made, FORMAT_MANIFEST_NAME, carry->original.newest_ns,
					    error);
	if (ret)
		return unless_newer(carry, ret, error);
	carry->there_ns = there.modified_ns;
	if (options->progress)
		options->progress(options->progress_user, IOSHAPE_PHASE_DONE, carry->bytes,
				  carry->bytes);
	return 0;
}

/* Completes the checkpoint. If locks work between the nodes, one node at a time does so. If the
 * hidden directory has lost its name, another node has put the checkpoint in place. */
static int commit_checkpoint(struct gathering *gathering, struct base_error *error)
{
	int ret = 0;

	if (io_folder_lock(&gathering->folder) == IO_BUSY)
		return wait_for_others(gathering, error);
	if (io_folder_is_named(&gathering->folder, &gathering->there, gathering->together)) {
		ret = put_manifest(gathering, error);
		if (!ret)
			ret = replace(gathering, error);
		if (!ret)
			return 0;
	} else {
		ret = base_fail_reason_with(error, -EAGAIN, "drain again",
					    "cannot find \"%s\" by its name",
					    gathering->folder.path);
	}
	if (!is_committed(gathering))
		return ret;
	base_error_begin(error);
	return 0;
}

/* ---- The whole checkpoint -------------------------------------------------------------------- */

/* Removes what dead drains left at the destination. */
static void tidy(const struct gathering *gathering)
{
	const struct base_log *log = save_settings(gathering->carry->tier->context).log;
	const struct io_folder *there = &gathering->there, *folder = &gathering->folder;
	struct base_budget budget = base_budget_begin();

	io_remove_stale(folder->fd, folder->path, &budget, log);
	group_tidy(there, NULL, NULL, &budget, log);
}

static int open_together(struct gathering *gathering, struct base_error *error)
{
	const struct format_manifest *manifest = &gathering->here.manifest;
	char *path;
	int ret;

	group_drained_name(gathering->together, manifest->step, manifest->attempt);
	if (asprintf(&path, "%s/%s", gathering->there.path, gathering->together) < 0)
		return base_no_memory(error, "a path", strlen(gathering->there.path));
	ret = io_folder_make(path, error);
	if (!ret)
		ret = io_folder_open(&gathering->folder, path, error);
	free(path);
	if (!ret)
		tidy(gathering);
	return ret;
}

static int gather(struct gathering *gathering, struct base_error *error)
{
	struct carry *carry = gathering->carry;
	struct base_error missing = { 0 };
	int ret;

	if (is_committed(gathering))
		return 0;
	ret = look_there(carry, error);
	if (ret || carry->result != IOSHAPE_DRAINED)
		return ret;
	ret = open_together(gathering, error);
	if (!ret)
		ret = bring_all(gathering, error);
	/* The failure may come from another node that put the checkpoint in place meanwhile. */
	if (ret && ret != -ECANCELED && is_committed(gathering)) {
		base_error_begin(error);
		return 0;
	}
	if (ret)
		return ret;
	ret = group_check_files(&gathering->folder, &gathering->here.manifest, "", &missing);
	if (!ret)
		return commit_checkpoint(gathering, error);
	if (is_committed(gathering))
		return 0;
	return ret == IOSHAPE_E_DAMAGED ? wait_for_others(gathering, error) :
					  base_propagate(error, &missing);
}

/* Opens the checkpoint on this tier. Returns -EAGAIN, without an error message, if it was replaced
 * meanwhile. */
static int open_here(struct gathering *gathering, struct base_error *error)
{
	const struct carry *carry = gathering->carry;
	const struct group_name name = group_parse_name(gathering->name);
	struct io_folder above = IO_NO_FOLDER;
	char *path = base_directory_of(carry->entry->copy_path);
	int ret;

	if (!path)
		return base_no_memory(error, "a path", strlen(carry->entry->copy_path));
	ret = io_folder_open(&above, path, error);
	free(path);
	if (ret)
		return ret;
	ret = group_checkpoint_open(&gathering->here, &above, gathering->name, name.step, error);
	io_folder_close(&above);
	if (ret && !is_still_there(carry->entry->copy_path, &carry->copy)) {
		base_error_begin(error);
		return -EAGAIN;
	}
	return ret != -ENOENT ? ret :
				base_fail_reason(error, IOSHAPE_E_DAMAGED,
						 "\"%s\" has no manifest: it is not a checkpoint",
						 carry->entry->copy_path);
}

/* Removes what a failed drain has copied, unless other nodes add to it. */
static void remove_copied(const struct gathering *gathering)
{
	if (gathering->folder.fd >= 0 && !group_is_of_nodes(&gathering->here.folder) &&
	    io_folder_is_named(&gathering->folder, &gathering->there, gathering->together))
		io_folder_remove(&gathering->folder, &gathering->there, gathering->together, NULL,
				 NULL, NULL, NULL);
}

/* Copies a checkpoint, or this node's files of it. As long as files of other nodes are missing, the
 * result is IOSHAPE_DRAINED_WAITS with an error message. */
static int carry_checkpoint(struct carry *carry, struct base_error *error)
{
	struct gathering gathering = {
		.carry = carry,
		.here = GROUP_NO_CHECKPOINT,
		.there = IO_NO_FOLDER,
		.folder = IO_NO_FOLDER,
		.name = strrchr(carry->entry->path, '/') + 1,
	};
	char *above = NULL;
	int ret = open_here(&gathering, error);

	if (!ret) {
		above = base_directory_of(carry->entry->path);
		ret = above ? io_folder_make(above, error) :
			      base_no_memory(error, "a path", strlen(carry->entry->path));
	}
	if (!ret)
		ret = io_folder_open(&gathering.there, above, error);
	if (!ret)
		ret = gather(&gathering, error);
	if (ret || carry->result == IOSHAPE_DRAINED_NEWER)
		remove_copied(&gathering);
	io_folder_close(&gathering.folder);
	io_folder_close(&gathering.there);
	group_checkpoint_close(&gathering.here);
	free(above);
	return ret;
}

/* ---- Draining any copy ----------------------------------------------------------------------- */

static int carry_alone(struct carry *carry, struct base_error *error)
{
	struct file file = {
		.carry = carry,
		.from = carry->entry->copy_path,
		.to = carry->entry->path,
		.copy = carry->copy,
	};
	int ret = look_there(carry, error);

	if (ret || carry->result != IOSHAPE_DRAINED)
		return ret;
	file.original = carry->original;
	ret = carry_file(&file, error);
	carry->there_ns = file.there_ns;
	return unless_newer(carry, ret, error);
}

/* Drains one copy. Returns -EAGAIN without an error message if the copy changed meanwhile. */
static int carry_copy(struct carry *carry, struct base_error *error)
{
	int ret = tier_look(carry->entry->copy_path, &carry->copy, &carry->bytes, error);

	carry->result = ret == -ENOENT ? IOSHAPE_DRAINED_GONE : IOSHAPE_DRAINED;
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	if (carry->copy.kind == IO_OTHER)
		return base_fail_reason(error, -EINVAL, "\"%s\" is neither a file nor a directory",
					carry->entry->copy_path);
	ret = tier_check_links(carry->entry->path, error);
	if (ret)
		return ret;
	return carry->copy.kind == IO_FOLDER ? carry_checkpoint(carry, error) :
					       carry_alone(carry, error);
}

/* ---- The drain ------------------------------------------------------------------------------- */

struct drain {
	struct ioshape_tier *tier;
	struct ioshape_drain_options options;
	char *only; /* path of the only copy to drain; NULL for all */
	struct tier_journal journal;
	uint64_t number;         /* number of the last entry that this drain has finished */
	struct base_error first; /* first failure; entries that failed wait for the next drain */
};

/* ---- Choosing entries ------------------------------------------------------------------------ */

/* Returns the next entry that waits, or NULL if none does. */
static const struct tier_entry *next_waiting(const struct drain *drain)
{
	for (size_t i = 0; i < drain->journal.count; i++) {
		const struct tier_entry *entry = &drain->journal.all[i];

		if (!entry->drained && entry->number > drain->number &&
		    (!drain->only || !strcmp(drain->only, entry->copy_path)))
			return entry;
	}
	return NULL;
}

/* Returns the last entry before this one that was drained to the same path, or NULL if there is
 * none. */
static const struct tier_entry *drained_before(const struct tier_journal *journal,
					       const struct tier_entry *entry)
{
	for (const struct tier_entry *old = entry; old-- > journal->all;) {
		if (old->drained && !strcmp(old->copy_path, entry->copy_path))
			return old;
	}
	return NULL;
}

/* ---- Recording results ----------------------------------------------------------------------- */

static bool are_neighbours(const char *path, const char *other)
{
	const size_t bytes = (size_t)(strrchr(path, '/') - path);

	return (size_t)(strrchr(other, '/') - other) == bytes && !strncmp(path, other, bytes);
}

/* Removes drained copies in the directory of `path`, except the newest `keep_last` ones. Failures
 * are logged, and the next drain tries again. */
static void trim(const struct ioshape_tier *tier, const char *path)
{
	struct tier_journal journal;
	struct base_error error = { 0 };
	uint32_t kept = 0;
	uint64_t bytes;

	if (!tier->options.keep_last || tier_journal_read(tier, &journal, &error))
		return;
	for (size_t i = journal.count; i; i--) {
		const struct tier_entry *entry = &journal.all[i - 1];

		if (entry->drained && tier_is_newest(&journal, entry) &&
		    are_neighbours(entry->path, path) && kept++ >= tier->options.keep_last)
			tier_discard(tier, entry, &bytes, &error);
	}
	if (error.code)
		base_log(save_settings(tier->context).log, IOSHAPE_LOG_WARNING, "%s", error.text);
	tier_journal_free(&journal);
}

/* Records that an entry no longer waits: changes it to `now`, or removes it if `now` is NULL. */
static int record_end(const struct drain *drain, const struct tier_entry *entry,
		      const struct tier_entry *now, struct base_error *error)
{
	const struct ioshape_tier *tier = drain->tier;
	struct io_hold hold = IO_NO_HOLD;
	int ret = tier_lock(tier, &hold, error);

	if (!ret)
		ret = tier_journal_change(tier, entry, now, error);
	/* Other drained entries of this path describe copies that no longer exist. */
	for (size_t i = 0; !ret && now && i < drain->journal.count; i++) {
		const struct tier_entry *other = &drain->journal.all[i];

		if (other->drained && other->number != entry->number &&
		    !strcmp(other->copy_path, entry->copy_path))
			ret = tier_journal_change(tier, other, NULL, error);
	}
	if (!ret && now)
		trim(tier, entry->path);
	io_folder_let_go(&hold);
	return ret;
}

/* Removes old checkpoints of a group at the destination, as the save has asked. Failures are
 * logged, and the next drain tries again. */
static void prune(const struct carry *carry)
{
	struct ioshape_context *context = carry->tier->context;
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	const struct tier_entry *entry = carry->entry;
	struct base_error error = { 0 };
	char *directory;

	options.keep_last = entry->keep_last;
	options.keep_every = entry->keep_every;
	if (!options.keep_last || carry->result != IOSHAPE_DRAINED ||
	    group_parse_name(strrchr(entry->path, '/') + 1).kind != GROUP_NAME_STEP)
		return;
	directory = base_directory_of(entry->path);
	if (directory && group_prune(context, directory, NULL, &options, NULL, &error))
		base_log(save_settings(context).log, IOSHAPE_LOG_WARNING, "%s", error.text);
	free(directory);
}

static int record_carried(const struct drain *drain, const struct carry *carry,
			  struct base_error *error)
{
	const struct tier_entry *entry = carry->entry;
	struct tier_entry now = *entry;

	/* If the destination is newer, there_ns is the time that the copy would have had there. */
	now.drained = true;
	now.copy_ns = carry->copy.modified_ns;
	now.there_ns = carry->there_ns;
	return record_end(drain, entry, carry->result == IOSHAPE_DRAINED_GONE ? NULL : &now, error);
}

static void tell_result(const struct drain *drain, const struct tier_entry *entry,
			enum ioshape_drained result, uint64_t bytes, const struct base_error *why)
{
	if (result == IOSHAPE_DRAINED_FAILED) {
		base_return(why->code, "drain", entry->path, why);
		base_log(save_settings(drain->tier->context).log, IOSHAPE_LOG_WARNING,
			 "\"%s\" was not drained: %s", entry->path, why->text);
	} else if (result != IOSHAPE_DRAINED) {
		base_log(save_settings(drain->tier->context).log, IOSHAPE_LOG_INFO,
			 "\"%s\" is not drained: %s", entry->path,
			 result == IOSHAPE_DRAINED_WAITS     ? why->text :
			 result == IOSHAPE_DRAINED_OVERTAKEN ? "a later save is drained instead" :
			 result == IOSHAPE_DRAINED_NEWER     ? "its destination has a newer one" :
							       "it was removed from the tier");
	}
	if (drain->options.ended)
		drain->options.ended(drain->options.ended_user, entry->path, result, bytes);
}

/* Keeps the first failure. That a copy waits for other nodes gives way to a real failure. */
static void record_failure(struct drain *drain, const struct base_error *why)
{
	if (!drain->first.code || drain->first.code == -EAGAIN)
		drain->first = *why;
}

/* Drains one entry. Returns -ECANCELED to end the drain. Other failures are reported, and the entry
 * keeps waiting. */
static int drain_one(struct drain *drain, const struct tier_entry *entry, struct base_error *error)
{
	struct base_error why = { 0 };
	struct carry carry = {
		.tier = drain->tier,
		.options = &drain->options,
		.entry = entry,
		.before = drained_before(&drain->journal, entry),
		.result = IOSHAPE_DRAINED_OVERTAKEN,
	};
	int ret;

	if (!tier_is_newest(&drain->journal, entry)) {
		ret = record_end(drain, entry, NULL, &why);
	} else {
		ret = carry_copy(&carry, &why);
		if (!ret && carry.result != IOSHAPE_DRAINED_WAITS)
			ret = record_carried(drain, &carry, &why);
		if (!ret)
			prune(&carry);
	}
	/* The copy changed meanwhile: try it again. */
	if (ret == -EAGAIN && !why.code)
		return 0;
	if (ret == -ECANCELED)
		return base_propagate(error, &why);
	if (ret)
		carry.result = IOSHAPE_DRAINED_FAILED;
	if (why.code)
		record_failure(drain, &why);
	drain->number = entry->number;
	tell_result(drain, entry, carry.result, carry.result == IOSHAPE_DRAINED ? carry.bytes : 0,
		    &why);
	return 0;
}

/* ---- Draining everything --------------------------------------------------------------------- */

/* Drains until no entry waits, or all that wait have failed. The journal is read again each time,
 * because other processes save meanwhile. */
static int drain_all(struct drain *drain, struct base_error *error)
{
	const struct tier_entry *entry = NULL;
	int ret;

	do {
		ret = tier_journal_read(drain->tier, &drain->journal, error);
		if (ret)
			return ret;
		entry = next_waiting(drain);
		if (entry)
			ret = drain_one(drain, entry, error);
		tier_journal_free(&drain->journal);
	} while (!ret && entry);
	if (!ret && drain->first.code)
		ret = base_propagate(error, &drain->first);
	return ret;
}

/* ---- Waiting for the lock -------------------------------------------------------------------- */

/* pause between two tries, and between calls of the progress function \ */
#define REST_NS 100000000

static int wait_for_lock(const struct drain *drain, struct io_hold *hold, struct base_error *error)
{
	const struct ioshape_drain_options *options = &drain->options;
	const struct timespec pause = { .tv_nsec = REST_NS };
	int ret;

	while ((ret = tier_lock_drain(drain->tier, hold, error)) == -EBUSY) {
		if (options->progress &&
		    options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0, 0))
			return base_fail_reason(error, -ECANCELED, "draining \"%s\" was stopped",
						drain->tier->root.path);
		nanosleep(&pause, NULL);
	}
	return ret;
}

static int run(struct drain *drain, struct base_error *error)
{
	struct io_hold hold = IO_NO_HOLD;
	int ret;

	ret = wait_for_lock(drain, &hold, error);
	if (!ret)
		ret = drain_all(drain, error);
	io_folder_let_go(&hold);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_drain(struct ioshape_tier *tier,
				      const struct ioshape_drain_options *given)
{
	struct drain drain = { .tier = tier };
	struct base_error error = { 0 };
	int ret;

	if (!tier)
		return base_null_argument("drain");
	ret = save_enter(tier->context, &error);
	if (!ret)
		ret = base_take_options(&drain.options, sizeof(drain.options), given,
					"ioshape_drain_options", &error);
	if (!ret && drain.options.path)
		ret = tier_enter(tier, drain.options.path, &drain.only, &error);
	if (!ret)
		ret = run(&drain, &error);
	free(drain.only);
	return base_return(ret, "drain", tier->root.path, &error);
}
