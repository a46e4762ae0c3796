/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing files. One object, from the look at the path to the commit, serves saves, groups and
 * drains. Around it: the order of saves to one path, checks for free space, files of plans, the
 * public handle for bytes in any format, and directories that appear whole.
 */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The order of saves to one path ---------------------------------------------------------- */

int save_order_begin(struct ioshape_context *context, struct save_order *order, const char *path,
		     struct base_error *error)
{
	int ret;

	*order = (struct save_order){ 0 };
	ret = save_absolute_path(path, &order->path, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&context->lock);
	TAILQ_INSERT_TAIL(&context->orders, order, entry);
	pthread_mutex_unlock(&context->lock);
	return 0;
}

static bool may_commit(const struct ioshape_context *context, const struct save_order *order,
		       bool urgent)
{
	const struct save_order *other;
	bool earlier = true;

	TAILQ_FOREACH(other, &context->orders, entry)
	{
		if (other == order)
			earlier = false;
		else if (((earlier && !urgent) || other->committing) &&
			 !strcmp(other->path, order->path))
			return false;
	}
	return true;
}

/* Waits until the save may commit; order->overtaken tells afterwards whether it still should.
 * -ECANCELED: abort_waits was set meanwhile. */
static int save_order_wait(struct ioshape_context *context, struct save_order *order, bool urgent,
			   struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&context->lock);
	while (!order->abort_waits && !may_commit(context, order, urgent))
		pthread_cond_wait(&context->saves_change, &context->lock);
	if (order->abort_waits)
		ret = base_fail_reason(error, -ECANCELED, "the save to \"%s\" was aborted",
				       order->path);
	order->committing = !ret;
	pthread_mutex_unlock(&context->lock);
	return ret;
}

/* Marks all earlier saves to the path as overtaken, after a save was committed. */
static void save_order_committed(struct ioshape_context *context, const struct save_order *order)
{
	struct save_order *other;

	pthread_mutex_lock(&context->lock);
	for (other = TAILQ_FIRST(&context->orders); other != order;
	     other = TAILQ_NEXT(other, entry))
		if (!strcmp(other->path, order->path))
			other->overtaken = true;
	pthread_mutex_unlock(&context->lock);
}

void save_order_end(struct ioshape_context *context, struct save_order *order)
{
	pthread_mutex_lock(&context->lock);
	TAILQ_REMOVE(&context->orders, order, entry);
	pthread_cond_broadcast(&context->saves_change);
	pthread_mutex_unlock(&context->lock);
	free(order->path);
}

/* ---- Checksums of files in other formats ----------------------------------------------------- */

/* The unit is that of checksums in torch zips. */
#define BLOCK_BYTES FORMAT_CHECK_BYTES

static int end_block(struct save_checksums *checksums, struct base_error *error)
{
	if (base_buffer_append(&checksums->crcs, &checksums->crc, sizeof(checksums->crc)))
		return base_no_memory(error, "checksums", checksums->crcs.bytes);
	checksums->crc = 0;
	checksums->filled = 0;
	return 0;
}

int save_checksums_put(struct save_checksums *checksums, struct io_writer *file, const void *data,
		       size_t bytes, uint32_t *crc, struct base_error *error)
{
	const uint8_t *from = data;
	int ret = 0;

	for (size_t piece; !ret && bytes; from += piece, bytes -= piece) {
		const uint32_t before = checksums->crc;

		piece = MIN(bytes, BLOCK_BYTES - checksums->filled);
		/* Both checksums are combined from that of the piece, so that no byte is read
		 * twice. */
		if (crc)
			checksums->crc = 0;
		ret = io_writer_put(file, from, piece, &checksums->crc, error);
		if (crc) {
			*crc = base_crc32_combine(*crc, checksums->crc, piece);
			checksums->crc = base_crc32_combine(before, checksums->crc, piece);
		}
		checksums->filled += piece;
		if (!ret && checksums->filled == BLOCK_BYTES)
			ret = end_block(checksums, error);
	}
	return ret;
}

/* Adds the checksum of the last, incomplete block. */
static int save_checksums_end(struct save_checksums *checksums, struct base_error *error)
{
	return checksums->filled ? end_block(checksums, error) : 0;
}

/* Puts bytes into the file, as io_writer_put() does, and updates the file's checksums. */
static int put(struct save_file *file, const void *data, size_t bytes, uint32_t *crc,
	       struct base_error *error)
{
	if (file->checksums)
		return save_checksums_put(file->checksums, file->writer, data, bytes, crc, error);
	return io_writer_put(file->writer, data, bytes, crc, error);
}

/* Puts bytes whose CRC-32 is known. They are read again only if a block ends within them. */
static int put_summed(struct save_file *file, const void *data, size_t bytes, uint32_t crc32,
		      struct base_error *error)
{
	struct save_checksums *checksums = file->checksums;
	int ret;

	if (checksums && bytes > BLOCK_BYTES - checksums->filled)
		return save_checksums_put(checksums, file->writer, data, bytes, NULL, error);
	ret = io_writer_put_summed(file->writer, data, bytes, crc32, error);
	if (ret || !checksums)
		return ret;
	checksums->crc = base_crc32_combine(checksums->crc, crc32, bytes);
	checksums->filled += bytes;
	return checksums->filled == BLOCK_BYTES ? end_block(checksums, error) : 0;
}

static struct format_beside version_of(const struct io_writer *file)
{
	return (struct format_beside){ io_writer_offset(file), io_writer_modified_ns(file) };
}

static struct format_checksums checksums_of(const struct save_checksums *checksums,
					    const struct io_writer *file)
{
	return (struct format_checksums){
		.file = version_of(file),
		.block_bytes = BLOCK_BYTES,
		.blocks = checksums->crcs.bytes / sizeof(uint32_t),
		.crc32 = (const uint32_t *)(const void *)checksums->crcs.data,
	};
}

/* Writes encoded bytes to a file beside the committed one. `ret` is the result of encoding. A
 * failure is only a downgrade. */
static void put_small(struct io_writer *file, const char *suffix, const char *what, int ret,
		      const struct base_buffer *bytes, struct io_downgrades *downgrades)
{
	struct base_error error = { 0 };

	if (ret == -ENOMEM)
		base_no_memory(&error, what, bytes->bytes);
	else if (ret)
		base_fail(&error, ret, "cannot store a %s file for a file of %s", what,
			  BASE_SIZE(io_writer_offset(file)));
	else
		ret = io_writer_put_beside(file, suffix, bytes->data, bytes->bytes, &error);
	if (ret)
		io_add_downgrade(downgrades, IOSHAPE_DOWNGRADE_CHECKSUMS, "%s file not written: %s",
				 what, error.text);
}

static void put_beside(const struct save_checksums *checksums, struct io_writer *file,
		       struct io_downgrades *downgrades)
{
	const struct format_checksums all = checksums_of(checksums, file);
	struct format_statistics statistics = checksums->statistics;
	struct base_buffer bytes = { 0 };

	if (!checksums->beside || !all.file.modified_ns)
		return;
	put_small(file, FORMAT_CHECKSUMS_SUFFIX, "checksum", format_checksums_encode(&bytes, &all),
		  &bytes, downgrades);
	bytes.bytes = 0;
	statistics.file = all.file;
	if (statistics.index.records)
		put_small(file, FORMAT_STATISTICS_SUFFIX, "statistics",
			  format_statistics_encode(&bytes, &statistics), &bytes, downgrades);
	base_buffer_free(&bytes);
}

/* ---- Free space ------------------------------------------------------------------------------ */

/*
 * Free space is checked before a save queues for its slot, so that no save waits for a slot that it
 * cannot use. Nothing is reserved, so other writers may take the space meanwhile. Then opening or
 * writing the file fails, and the setting `full` decides then, too.
 */

static bool is_lack_of_space(int code)
{
	return code == -ENOSPC || code == -EDQUOT;
}

/* ---- Checking -------------------------------------------------------------------------------- */

static bool fits(const struct save_space *space, struct fs_space *seen)
{
	int ret = space->found ? fs_space_of_found(space->path, space->found, seen) :
				 fs_space_of_directory(space->path, seen);

	/* If the path cannot be looked at, or is a pipe, opening it will report that. */
	return ret || space->needed_bytes <= seen->free_bytes;
}

/*
 * Returns whether the filesystem counts removed files as free only later. XFS counts them when a
 * background thread has processed them, btrfs in its next transaction. A reservation gets their
 * space at once.
 */
static bool counts_late(const struct fs_space *seen)
{
	static const char *const late[] = { "xfs", "btrfs", "ext4" };
	char type[32];

	fs_magic_name(seen->magic, type, sizeof(type));
	for (size_t i = 0; i < ARRAY_LENGTH(late); i++) {
		if (!strcmp(type, late[i]))
			return true;
	}
	return false;
}

static bool fits_after_all(const struct save_space *space, struct fs_space *seen)
{
	return fits(space, seen) || (counts_late(seen) && io_can_reserve(space->path, !space->found,
									 space->needed_bytes));
}

static void clear(const struct save_space *space)
{
	if (space->clear)
		space->clear(space->clear_user);
	else
		io_clear_space(space->path, &space->context->log);
}

static int fail_too_little(const struct save_space *space, const struct fs_space *seen,
			   struct base_error *error)
{
	bool fails = space->context->full == IOSHAPE_FULL_FAIL;
	const uint64_t replaced_bytes = space->found ? fs_replaced_bytes(space->path) : 0;
	bool replaces = replaced_bytes && seen->free_bytes + replaced_bytes >= space->needed_bytes;
	char type[32];

	fs_space_type(seen, type, sizeof(type));
	base_fail_reason_with(
		error, -ENOSPC,
		BASE_WORDS("free space%s save elsewhere%s", fails ? "," : " or",
			   fails ? ", or set full=skip" : ""),
		"cannot save \"%s\": needs %s, %s are free on its "
		"filesystem (%s)%s",
		space->path, BASE_SIZE(space->needed_bytes), BASE_SIZE(seen->free_bytes), type,
		replaces ? ", where the old file stays until the new one is complete" : "");
	base_error_space(error, space->needed_bytes, seen->free_bytes);
	return -ENOSPC;
}

/* Returns whether the file is on a filesystem with storage targets. */
static bool has_targets(const struct save_space *space)
{
	char *directory = base_directory_of(space->path);
	struct io_folder folder = IO_NO_FOLDER;
	struct fs_info info;
	const bool has = directory && !io_folder_open(&folder, directory, NULL) &&
			 !fs_describe(folder.fd, directory, NULL, &info, NULL) &&
			 fs_takes_layouts(info.family);

	io_folder_close(&folder);
	free(directory);
	return has;
}

/* Explains a write that met a full disk although statfs() reports enough space. statfs() counts the
 * whole filesystem, and one storage target may be full. */
static void explain_lack(const struct save_space *space, struct base_error *error)
{
	const char *why = NULL;
	struct fs_space seen;

	if (!fits(space, &seen) || seen.free_bytes == UINT64_MAX || error->code != -ENOSPC)
		return;
	if (seen.no_inodes)
		why = "its inodes are used up";
	else if (has_targets(space))
		why = "one of its storage targets may be full, see lfs df -h or beegfs-df";
	if (why)
		base_rephrase(error, error->code, "%s (%s are free on the whole filesystem: %s)",
			      error->sentence, BASE_SIZE(seen.free_bytes), why);
}

/* ---- Skipping saves -------------------------------------------------------------------------- */

int save_space_verdict(const struct ioshape_context *context, int ret, struct base_error *error)
{
	if (!is_lack_of_space(ret) || context->full != IOSHAPE_FULL_SKIP)
		return ret;
	return base_rephrase(error, IOSHAPE_E_SKIPPED, "skipped (full=skip): %s", error->sentence);
}

int save_space_check(const struct save_space *space, struct io_downgrades *downgrades,
		     struct base_error *error)
{
	const struct ioshape_context *context = space->context;
	struct fs_space seen;
	int ret;

	if (space->needed_bytes <= IO_SMALL_FILE_BYTES)
		return 0;
	if (fits(space, &seen))
		return 0;
	clear(space);
	if (fits_after_all(space, &seen))
		return 0;
	fs_space_type(&seen, downgrades->filesystem, sizeof(downgrades->filesystem));
	ret = fail_too_little(space, &seen, error);
	return save_space_verdict(context, ret, error);
}

/* ---- Removing stale temporary files ---------------------------------------------------------- */

/* Hashes the directory of a path. If two directories collide, one is not tidied. */
static uint64_t hash_directory(const char *path)
{
	char *directory = base_directory_of(path);
	const uint64_t hash = directory ? base_hash_text(directory) : 0;

	free(directory);
	return hash;
}

/* Returns the position of a directory among the tidied ones, or their number. The caller holds the
 * lock. */
static size_t find_tidied(const struct ioshape_context *context, uint64_t hash)
{
	size_t i = 0;

	while (i < context->tidied_count && context->tidied[i] != hash)
		i++;
	return i;
}

static bool should_tidy(struct ioshape_context *context, const char *path)
{
	const uint64_t hash = hash_directory(path);
	bool fresh;

	pthread_mutex_lock(&context->lock);
	/* With so many directories, the job saves into ever new ones, which contain no stale
	 * files. */
	fresh = find_tidied(context, hash) == context->tidied_count &&
		context->tidied_count < SAVE_KEPT_DIRECTORIES;
	if (fresh)
		context->tidied[context->tidied_count++] = hash;
	pthread_mutex_unlock(&context->lock);
	return fresh;
}

/* Decides whether a save removes what dead processes left in its directory. The first save into a
 * directory does, and later ones as long as something is left. Returns NULL, or `budget`, which
 * end_tidying() takes. */
static struct base_budget *begin_tidying(struct ioshape_context *context, const char *path,
					 struct base_budget *budget)
{
	if (!should_tidy(context, path))
		return NULL;
	*budget = base_budget_begin();
	return budget;
}

/* Makes the next save into the directory remove the rest. */
static void tidy_again(struct ioshape_context *context, const char *path)
{
	size_t i;

	pthread_mutex_lock(&context->lock);
	i = find_tidied(context, hash_directory(path));
	if (i < context->tidied_count)
		context->tidied[i] = context->tidied[--context->tidied_count];
	pthread_mutex_unlock(&context->lock);
}

/* Ends what begin_tidying() began. If the budget was too small, the next save continues. `budget`
 * may be NULL. */
static void end_tidying(struct ioshape_context *context, const char *path,
			const struct base_budget *budget)
{
	if (budget && base_budget_is_spent(budget))
		tidy_again(context, path);
}

/* ---- One file -------------------------------------------------------------------------------- */

static struct save_space space_of(const struct save_file *file)
{
	return (struct save_space){
		.context = file->context,
		.path = file->path,
		.found = &file->found,
		.needed_bytes = file->options.expected_bytes,
	};
}

static int open_writer(struct save_file *file, struct base_error *error)
{
	struct ioshape_context *context = file->context;
	struct io_file_options *options = &file->options;
	const struct fs_layout *layout;
	struct base_budget budget;
	bool asked;
	int ret;

	ret = save_take_queue(context, &file->queue, error);
	if (ret)
		return ret;
	options->unseen = file->in_new_directory;
	if (!file->in_new_directory && !options->deadline_ns)
		options->tidying = begin_tidying(context, file->path, &budget);
	ret = io_writer_open(&file->writer, file->queue, file->given ? file->given : file->path,
			     options, &file->downgrades, error);
	end_tidying(context, file->path, options->tidying);
	options->tidying = NULL;
	if (ret)
		return ret;
	layout = io_writer_layout(file->writer, &asked);
	if (!asked)
		save_slots_record_layout(&context->slots, file->found.mount, layout);
	return 0;
}

/* Opens the file: checks the free space, waits for a slot, and opens the writer. `watch` is NULL
 * for the public handle of a file, because all such files of a context share a slot. */
static int open_file(struct save_file *file, const struct save_watch *watch,
		     struct base_error *error)
{
	struct io_file_options *options = &file->options;
	const struct save_space space = space_of(file);
	int ret = 0;

	/* This is the only look at the path before the wait; the free space and the slot both use
	 * its result. */
	if (file->in_new_directory)
		fs_find_directory(file->path, &file->found);
	else
		fs_find(file->path, &file->found);
	if (file->checks_space)
		ret = save_space_check(&space, &file->downgrades, error);
	if (!ret && !file->without_slot) {
		ret = save_slot_take(&file->slot, file->context, file->path, &file->found, options,
				     watch, error);
	}
	return ret ? ret : open_writer(file, error);
}

/* Returns the code with which a save ends after a failure, and adds an explanation to the error. */
static int explain(const struct save_file *file, int ret, struct base_error *error)
{
	const struct save_space space = space_of(file);
	const struct fs_found *found = &file->found;

	if (!file->checks_space || !is_lack_of_space(ret))
		return ret;
	/* Bytes that went to a pipe or a device cannot be skipped. */
	if (!found->code && !found->absent && !found->regular)
		return ret;
	explain_lack(&space, error);
	base_error_space(error, space.needed_bytes, UINT64_MAX);
	return save_space_verdict(space.context, ret, error);
}

/*
 * Brings all bytes to stable storage. Releases the slot early, when few requests are left in
 * flight. If the next writer began later, the storage would idle while the slowest target finishes
 * and while the file is renamed.
 */
static int finish(struct save_file *file, struct base_error *error)
{
	bool is_little = false;
	int ret = 0;

	if (file->checksums)
		ret = save_checksums_end(file->checksums, error);
	if (!ret)
		ret = io_writer_end(file->writer, &is_little, error);
	if (!ret && is_little)
		save_slot_release(&file->slot);
	return ret ? ret : io_writer_finish(file->writer, error);
}

/* Writes each downgrade of the report to the log, and how the file was written. If the save was
 * skipped, its caller logs that instead of the downgrades. */
static void log_save(const struct save_file *file, const struct ioshape_report *report,
		     bool skipped)
{
	const struct base_log *log = &file->context->log;
	const struct ioshape_slot_info *slot = &file->slot.info;
	char turn[256] = "";

	for (size_t i = 0; !skipped && i < MIN(report->downgrade_count, IOSHAPE_REPORT_DOWNGRADES);
	     i++)
		base_log(log, IOSHAPE_LOG_INFO, "saving %s: %s", file->path,
			 report->downgrades[i].sentence);
	if (slot->fence)
		snprintf(turn, sizeof(turn), "slot %llu of pool %s, capacity %u%s%s, ",
			 (unsigned long long)slot->fence, slot->pool, slot->capacity,
			 slot->bypass ? ", small-file bypass" : "",
			 slot->lost ? ", lost before the save ended" : "");
	base_log(log, IOSHAPE_LOG_DEBUG,
		 "%s: %llu bytes, %s engine%s (%s), %swrite %.3f s, sync %.3f s, commit %.3f s",
		 file->path, (unsigned long long)report->file_bytes, report->engine,
		 report->direct ? ", direct I/O" : "",
		 file->writer ? io_writer_choice(file->writer) : "no file", turn, report->write_s,
		 report->sync_s, report->commit_s);
}

static int commit_in_order(struct save_file *file, struct save_order *order,
			   struct ioshape_report *report, struct base_error *error)
{
	/* All parts of one file must be committed, so none of them may overtake another. */
	const bool urgent = file->options.deadline_ns > 0 && !file->options.part_bytes;
	const uint64_t begin = base_now_ns();
	int ret = order ? save_order_wait(file->context, order, urgent, error) : 0;

	report->commit_s += base_seconds(base_now_ns() - begin);
	if (ret)
		return ret;
	if (order && order->overtaken) {
		io_add_downgrade(
			&file->downgrades, IOSHAPE_DOWNGRADE_OVERTAKEN,
			"a later save to the same file had a deadline and is already committed");
	} else {
		ret = io_writer_commit(file->writer, error);
		if (!ret)
			file->modified_ns = io_writer_modified_ns(file->writer);
		if (!ret && file->checksums)
			put_beside(file->checksums, file->writer, &file->downgrades);
	}
	if (!ret && order)
		save_order_committed(file->context, order);
	return ret;
}

/*
 * Ends a save: finishes the file, waits for earlier saves to the path (`order` may be NULL),
 * commits the file, and fills in the report. `ret` is the result so far; after a failure only the
 * report is filled in.
 */
static int commit(struct save_file *file, struct save_order *order, int ret,
		  struct ioshape_report *report, struct base_error *error)
{
	bool skipped;

	if (!ret)
		ret = finish(file, error);
	ret = explain(file, ret, error);
	/* The save may now wait for earlier saves to the path, and these may be waiting for
	 * slots. */
	save_slot_release(&file->slot);
	if (!file->without_slot)
		save_slot_report(&file->slot, &file->downgrades, report);
	skipped = ret == IOSHAPE_E_SKIPPED;
	if (skipped)
		io_add_downgrade(&file->downgrades, IOSHAPE_DOWNGRADE_SKIPPED, "%s",
				 error->sentence);
	if (!ret)
		ret = commit_in_order(file, order, report, error);
	snprintf(report->filesystem, sizeof(report->filesystem), "%s", file->downgrades.filesystem);
	if (file->writer)
		io_writer_report(file->writer, report);
	io_report_downgrades(&file->downgrades, report);
	snprintf(report->mode, sizeof(report->mode), "single");
	log_save(file, report, skipped);
	return ret;
}

/* Closes the file. Removes it if it was not committed. */
static void close_file(struct save_file *file)
{
	io_writer_free(file->writer);
	file->writer = NULL;
	save_slot_release(&file->slot);
	if (file->queue)
		save_return_queue(file->context, file->queue);
	file->queue = NULL;
}

int save_write_file(struct save_file *file, const struct save_watch *watch,
		    struct save_order *order, struct ioshape_report *report,
		    struct base_error *error)
{
	int ret = open_file(file, watch, error);

	if (!ret)
		ret = file->put(file->user, file->writer, error);
	ret = commit(file, order, ret, report, error);
	close_file(file);
	return ret;
}

void save_report_end(struct ioshape_report *report, uint64_t begin_ns, uint64_t deadline_ns)
{
	const uint64_t now = base_now_ns();

	report->total_s = base_seconds(now - begin_ns);
	report->started_s = base_wall_seconds() - report->total_s;
	if (!deadline_ns)
		return;
	/* The result must not be 0, which means that there was no deadline. */
	report->deadline_left_s = now < deadline_ns ? base_seconds(deadline_ns - now) :
						      -base_seconds(now - deadline_ns + 1);
}

/* ---- Torch zips ------------------------------------------------------------------------------ */

/* The destination of an archive: a file, from the offset `begin` on. */
struct destination {
	struct save_file *file;
	uint64_t begin;
};

static uint64_t offset_in_archive(void *to)
{
	const struct destination *destination = to;

	return io_writer_offset(destination->file->writer) - destination->begin;
}

static int put_in_file(void *to, const void *data, size_t bytes, uint32_t *crc,
		       struct base_error *error)
{
	const struct destination *destination = to;

	return put(destination->file, data, bytes, crc, error);
}

static int put_summed_in_file(void *to, const void *data, size_t bytes, uint32_t crc32,
			      struct base_error *error)
{
	const struct destination *destination = to;

	return put_summed(destination->file, data, bytes, crc32, error);
}

/* Puts the torch zip of a plan into the file, after its current end. `compare` may be NULL. */
static int put_archive(struct save_file *file, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error)
{
	static const struct format_sink_ops ops = { offset_in_archive, put_in_file,
						    put_summed_in_file };
	struct destination destination = { file, io_writer_offset(file->writer) };
	struct format_writer *zip;
	uint64_t count;
	int ret;

	ret = format_writer_new(&zip, (struct format_sink){ &ops, &destination }, plan->path,
				error);
	if (ret)
		return ret;
	save_source_to_file(source, file->writer);
	ret = save_write_records(zip, plan, source, compare, error);
	if (!ret && file->items && plan->examined)
		ret = save_items_add(file->items, file->item, plan,
				     format_writer_entries(zip, &count), error);
	format_writer_free(zip);
	return ret;
}

/* ---- Safetensors files ----------------------------------------------------------------------- */

/* A file, and the checksum of the current record. */
struct segment {
	struct save_file *file;
	uint32_t crc32;
};

static int put_in_segment(void *to, const void *data, size_t bytes, const uint32_t *crc,
			  struct base_error *error)
{
	struct segment *segment = to;

	if (!crc)
		return put(segment->file, data, bytes, &segment->crc32, error);
	segment->crc32 = base_crc32_combine(segment->crc32, *crc, bytes);
	return put_summed(segment->file, data, bytes, *crc, error);
}

/* The save of a plan. */
struct saving {
	struct save_file file;
	const struct save_plan *plan;
	const struct save_source *source;
	struct save_compare compare;
	/* Sizes and checksums of the records of a safetensors file. */
	struct format_entry *entries;
};

static int put_safetensors(struct saving *saving, struct base_error *error)
{
	static char no_name[] = ""; /* the name tells a pickle from a tensor; these are tensors */
	const struct save_plan *plan = saving->plan;
	const struct save_source *source = saving->source;
	struct format_entry *entries = calloc(plan->count, sizeof(*entries));
	int ret = 0;

	saving->entries = entries;
	if (!entries)
		return base_no_memory(error, "checksums", plan->count * sizeof(*entries));
	save_source_to_file(source, saving->file.writer);
	for (size_t i = 0; !ret && i < plan->count; i++) {
		struct segment segment = { .file = &saving->file };

		ret = save_bring_record(plan, i, source,
					&(struct save_sink){ put_in_segment, &segment }, error);
		entries[i].name = no_name;
		entries[i].bytes = plan->records[i].bytes;
		entries[i].crc32 = segment.crc32;
	}
	if (!ret)
		ret = save_examine(&saving->compare, plan, entries, error);
	if (plan->examined && saving->file.checksums)
		saving->file.checksums->statistics = (struct format_statistics){
			.tensors = entries + plan->own,
			.index = {
				.records = plan->count - plan->own,
				.examined = plan->examined + plan->own,
				.alarms = saving->compare.alarms,
			},
		};
	return ret;
}

/* ---- Files of plans -------------------------------------------------------------------------- */

static int put_plan(void *user, struct io_writer *writer, struct base_error *error)
{
	struct saving *saving = user;

	(void)writer; /* saving->file has the writer */
	if (saving->plan->safetensors)
		return put_safetensors(saving, error);
	return put_archive(&saving->file, saving->plan, saving->source, &saving->compare, error);
}

int save_write(struct ioshape_context *context, const char *given, const struct save_plan *plan,
	       const struct save_source *source, const struct io_file_options *options,
	       const struct save_watch *watch, struct save_order *order,
	       struct ioshape_report *report, struct base_error *error)
{
	struct save_checksums checksums = { .beside = true };
	struct saving saving = {
		.file = {
			.context = context,
			.path = order->path,
			.given = given,
			.options = *options,
			.checks_space = true,
			.checksums = plan->checksums ? &checksums : NULL,
			.put = put_plan,
			.user = &saving,
		},
		.plan = plan,
		.source = source,
		.compare = { .context = context, .path = order->path },
	};
	struct io_file_options *file_options = &saving.file.options;
	int ret;

	file_options->expected_bytes = file_options->progress_total = plan->expected_bytes;
	file_options->exact = true;
	ret = save_write_file(&saving.file, watch, order, report, error);
	base_buffer_free(&checksums.crcs);
	free(saving.entries);
	save_compare_end(&saving.compare, !ret && !order->overtaken, report);
	return ret;
}

/* ---- The public handle of a file ------------------------------------------------------------- */

struct ioshape_file {
	struct save_file file;
	struct save_checksums checksums;
	char *path; /* absolute path */
	uint64_t begin_ns;
	bool committed;          /* commit was tried: only the error and free() remain */
	struct base_error error; /* error of the last failed call */
};

/* Begins a call on an open file, and clears the last error. */
static int enter(struct ioshape_file *file)
{
	if (!file)
		return base_null_argument("save");
	memset(&file->error, 0, sizeof(file->error));
	if (file->committed)
		return base_fail_reason_with(&file->error, -EINVAL, "open a new one",
					     "%s is already committed", file->path);
	return save_enter(file->file.context, &file->error);
}

/* Ends a call on an open file. */
static int leave(struct ioshape_file *file, int ret)
{
	if (!file)
		return ret;
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&file->file.context->log, IOSHAPE_LOG_INFO, "%s", file->error.text);
	return base_return(ret, "save", file->path, &file->error);
}

static int make_file(struct ioshape_context *context, const char *path,
		     const struct ioshape_file_options *options, struct ioshape_file **out,
		     struct base_error *error)
{
	struct ioshape_file *made = calloc(1, sizeof(*made));
	struct save_file *file;
	int ret;

	if (!made)
		return base_no_memory(error, "a file", sizeof(*made));
	file = &made->file;
	made->begin_ns = base_now_ns();
	file->context = context;
	file->options = SAVE_FILE_OPTIONS(options);
	file->options.expected_bytes = file->options.progress_total = options->expected_bytes;
	file->options.part_bytes = options->part_bytes;
	file->options.part_offset = options->part_offset;
	file->options.file_bytes = options->file_bytes;
	file->checks_space = true;
	made->checksums.beside = options->checksums != IOSHAPE_CHECKSUMS_NONE;
	if (made->checksums.beside)
		file->checksums = &made->checksums;
	/* The commit comes later, and the application may have changed its working directory by
	 * then. */
	ret = save_absolute_path(path, &made->path, error);
	file->path = made->path;
	if (!ret) {
		ret = open_file(file, NULL, error);
		ret = explain(file, ret, error);
	}
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&context->log, IOSHAPE_LOG_INFO, "%s", error->text);
	if (ret) {
		ioshape_file_free(made);
		return ret;
	}
	*out = made;
	return 0;
}

static int check_part(const struct ioshape_file_options *options, struct base_error *error)
{
	const uint64_t bytes = options->part_bytes, offset = options->part_offset;

	if (!bytes && !offset && !options->file_bytes)
		return 0;
	if (!bytes || bytes % IOSHAPE_PART_UNIT || offset % IOSHAPE_PART_UNIT ||
	    bytes > INT64_MAX || offset > INT64_MAX - bytes)
		return base_fail_reason_with(
			error, -EINVAL,
			"set part_bytes; both must be multiples of IOSHAPE_PART_UNIT",
			"options.part_offset is %llu and options.part_bytes is "
			"%llu",
			(unsigned long long)offset, (unsigned long long)bytes);
	if (options->checksums)
		return base_fail_reason_with(error, -EINVAL, "leave it at IOSHAPE_CHECKSUMS_NONE",
					     "options.checksums is set for a part of a file");
	return 0;
}

IOSHAPE_EXPORT int ioshape_file_open(struct ioshape_context *context, const char *path,
				     const struct ioshape_file_options *given,
				     struct ioshape_file **out)
{
	struct ioshape_file_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_null_argument("save");
	*out = NULL;
	ret = save_enter_path(context, path, &options, sizeof(options), given,
			      "ioshape_file_options", &error);
	if (!ret && (unsigned)options.checksums > IOSHAPE_CHECKSUMS_BESIDE)
		ret = base_fail_reason_with(&error, -EINVAL,
					    "use a value of enum ioshape_keep_checksums",
					    "options.checksums is %u", (unsigned)options.checksums);
	if (!ret)
		ret = check_part(&options, &error);
	if (!ret)
		ret = make_file(context, path, &options, out, &error);
	return base_return(ret, "save", path, &error);
}

IOSHAPE_EXPORT int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes)
{
	int ret = enter(file);

	if (!ret && bytes && !data)
		ret = base_fail_reason(&file->error, -EINVAL, "no data was given for %s",
				       file->path);
	if (!ret)
		ret = explain(&file->file, put(&file->file, data, bytes, NULL, &file->error),
			      &file->error);
	return leave(file, ret);
}

int save_file_examine(struct ioshape_file *file, struct save_items *items)
{
	int ret = enter(file);

	if (!ret && file->file.context->examines)
		file->file.items = items;
	return leave(file, ret);
}

int save_file_write_records(struct ioshape_file *file, const char *name,
			    const struct ioshape_record *records, size_t count, uint64_t *bytes)
{
	const struct save_payload payload = {
		.kind = SAVE_RECORDS,
		.records = records,
		.count = count,
	};
	struct save_direct direct = { 0 };
	const struct save_source source = { save_direct_next, save_direct_to_file, &direct, NULL };
	struct save_plan plan;
	uint64_t begin;
	int ret = enter(file);

	if (bytes)
		*bytes = 0;
	if (!ret)
		ret = save_plan_make(&plan, file->path, &payload, NULL, file->file.items != NULL,
				     &file->error);
	if (ret)
		return leave(file, ret);
	file->file.item = name;
	direct.plan = &plan;
	begin = io_writer_offset(file->file.writer);
	ret = put_archive(&file->file, &plan, &source, NULL, &file->error);
	if (ret) /* an incomplete archive must not be committed */
		io_writer_fail(file->file.writer);
	else if (bytes)
		*bytes = io_writer_offset(file->file.writer) - begin;
	save_direct_end(&direct);
	save_plan_free(&plan);
	return leave(file, explain(&file->file, ret, &file->error));
}

IOSHAPE_EXPORT int ioshape_file_commit(struct ioshape_file *file, struct ioshape_report *report)
{
	struct ioshape_report full = IOSHAPE_REPORT_INIT;
	struct save_order order;
	int ret = enter(file);

	/* Check now that the report can be delivered, not after the work is done. */
	if (!ret && report)
		ret = base_give_struct(report, &full, sizeof(full), "ioshape_report", &file->error);
	if (!ret)
		ret = save_order_begin(file->file.context, &order, file->path, &file->error);
	if (ret)
		return leave(file, ret);
	file->committed = true;
	ret = commit(&file->file, &order, 0, &full, &file->error);
	save_order_end(file->file.context, &order);
	save_report_end(&full, file->begin_ns, file->file.options.deadline_ns);
	if (report)
		base_give_struct(report, &full, sizeof(full), "ioshape_report", NULL);
	return leave(file, ret);
}

IOSHAPE_EXPORT void ioshape_file_free(struct ioshape_file *file)
{
	if (!file || save_enter(file->file.context, NULL))
		return;
	close_file(&file->file);
	base_buffer_free(&file->checksums.crcs);
	free(file->path);
	free(file);
}

/* ---- Directories that appear whole ----------------------------------------------------------- */

struct save_directory {
	struct ioshape_context *context;
	struct io_new_folder made;
	char *path; /* final absolute path */
};

/* Returns a copy of a path without slashes at its end. The caller frees it. */
static char *without_slashes(const char *path)
{
	size_t bytes = strlen(path);

	while (bytes > 1 && path[bytes - 1] == '/')
		bytes--;
	return strndup(path, bytes);
}

static int make(struct save_directory *directory, const char *path, struct base_error *error)
{
	struct ioshape_context *context = directory->context;
	char *given = without_slashes(path);
	struct base_budget budget, *tidying;
	int ret;

	if (!given)
		return base_no_memory(error, "a path", strlen(path));
	ret = save_absolute_path(given, &directory->path, error);
	free(given);
	if (ret)
		return ret;
	tidying = begin_tidying(context, directory->path, &budget);
	ret = io_new_folder_make(&directory->made, directory->path, tidying, &context->log, error);
	end_tidying(context, directory->path, tidying);
	return ret;
}

int save_directory_make(struct ioshape_context *context, const char *path,
			struct save_directory **out)
{
	struct base_error error = { 0 };
	struct save_directory *directory = NULL;
	int ret;

	if (!out)
		return base_null_argument("save");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && !path)
		ret = base_fail_reason(&error, -EINVAL, "no path was given");
	if (!ret) {
		directory = calloc(1, sizeof(*directory));
		if (!directory)
			ret = base_no_memory(&error, "a directory", sizeof(*directory));
	}
	if (!ret) {
		directory->context = context;
		directory->made = (struct io_new_folder)IO_NO_NEW_FOLDER;
		ret = make(directory, path, &error);
	}
	if (ret)
		save_directory_free(directory);
	else
		*out = directory;
	return base_return(ret, "save", path, &error);
}

const char *save_directory_path(const struct save_directory *directory)
{
	return directory ? directory->made.folder.path : NULL;
}

int save_directory_commit(struct save_directory *directory)
{
	struct base_error error = { 0 };
	int ret;

	if (!directory)
		return base_null_argument("save");
	ret = save_enter(directory->context, &error);
	if (!ret && !*directory->made.temporary)
		ret = base_fail_reason(&error, -EINVAL, "\"%s\" is already committed",
				       directory->path);
	if (!ret)
		ret = io_new_folder_commit(&directory->made, &error);
	return base_return(ret, "save", directory->path, &error);
}

void save_directory_free(struct save_directory *directory)
{
	if (!directory || save_enter(directory->context, NULL))
		return;
	io_new_folder_close(&directory->made, &directory->context->log);
	free(directory->path);
	free(directory);
}
