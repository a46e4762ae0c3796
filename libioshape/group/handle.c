/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening checkpoints: that of a step, the newest, or the newest that is good for all ranks of a
 * group. Also what a checkpoint consists of, readers of its shards, and its verification.
 *
 * Verification reads all files completely and compares them with the checksums of the manifest,
 * which cover every byte, including the checksums inside the shards.
 *
 * All ranks of a group load the same checkpoint: the newest complete one, or the newest intact one.
 * Rank 0 goes through the checkpoints in the directory and on the tier, newest first. Each
 * candidate gets a round, in which rank 0 announces it, until one is good for all ranks.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Unusable checkpoints -------------------------------------------------------------------- */

/*
 * Checkpoints that exist but cannot be used, with the reasons. Initialise it to zero. If there is
 * no usable one, a job must not regard this as its first start.
 */
struct unusable {
	size_t count;
	char why[BASE_ERROR_TEXT_BYTES / 2];
};

/* Most reasons in an error message. */
#define MOST_REASONS 3

/* Counts a checkpoint. `why` may be NULL, if the reasons so far are enough. */
static void unusable_add(struct unusable *unusable, const struct base_error *why)
{
	const size_t used = strlen(unusable->why);

	unusable->count++;
	if (why && why->code && unusable->count <= MOST_REASONS)
		snprintf(unusable->why + used, sizeof(unusable->why) - used, "%s%.509s",
			 used ? "; " : "", why->sentence);
}

/* Fails with -ENOENT if no checkpoint was counted, otherwise with IOSHAPE_E_UNUSABLE. */
static int fail_unusable(const struct unusable *unusable, const char *directory,
			 struct base_error *error)
{
	if (!unusable->count)
		return base_fail_reason(error, -ENOENT,
					"cannot load \"%s\": there is no checkpoint in it yet",
					directory);
	return base_fail_reason_with(
		error, IOSHAPE_E_UNUSABLE,
		BASE_WORDS("see what \"ioshape verify --all %s\" reports; to start from scratch, "
			   "move them away",
			   directory),
		"cannot load \"%s\": %zu checkpoint%s in it, and none can be used: %s%s", directory,
		unusable->count, unusable->count > 1 ? "s are" : " is", unusable->why,
		unusable->count > MOST_REASONS ? "; ..." : "");
}

/* ---- Finding the newest checkpoint ----------------------------------------------------------- */

/* Returns whether a checkpoint could not be opened because of what it is. Then an older one may be
 * used instead; not if the failure is this process's own. */
static bool is_its_own_fault(int code)
{
	if (group_is_shortage(code))
		return false;
	switch (code) {
	case -EACCES:
	case -EPERM:
	/* A later version of the library wrote it. The checkpoint before it would be an old
	 * state. */
	case -EOPNOTSUPP:
		return false;
	default:
		return true;
	}
}

/* Most listings of a directory that changes all the time. */
#define MOST_LISTINGS 16

/* A walk over the candidates of a directory, newest first. */
struct walk {
	struct io_folder directory;
	struct group_candidates candidates;
	size_t at; /* position of the next candidate */
	unsigned listings;
};

/*
 * Lists the candidates again, because a newer checkpoint may have appeared and a listed one gone.
 * Returns true if the list has changed; then the walk begins again.
 */
static bool has_changed(struct walk *walk)
{
	struct group_candidates *before = &walk->candidates, now;
	bool changed;

	if (++walk->listings >= MOST_LISTINGS || group_list_by_age(&walk->directory, &now, NULL))
		return false;
	changed = now.count != before->count ||
		  (now.count && memcmp(now.all, before->all, now.count * sizeof(*now.all)));
	if (changed) {
		group_candidates_free(before);
		*before = now;
		walk->at = 0;
	} else {
		group_candidates_free(&now);
	}
	return changed;
}

/*
 * Opens the next candidate. Returns -ENOENT, with an error message, if it has no manifest. Returns
 * -EAGAIN, without an error message, if the walk has begun again. It does so if the list has
 * changed and the candidate is gone, or may be in the wrong position because its age was not
 * readable.
 */
static int open_candidate(struct walk *walk, struct group_checkpoint *checkpoint,
			  struct base_error *error)
{
	const struct group_candidate *candidate = &walk->candidates.all[walk->at];
	const int ret = group_checkpoint_open(checkpoint, &walk->directory, candidate->name,
					      candidate->step, error);

	if ((ret == -ENOENT || candidate->serial == GROUP_UNKNOWN_SERIAL) && has_changed(walk)) {
		group_checkpoint_close(checkpoint);
		base_error_begin(error);
		return -EAGAIN;
	}
	walk->at++;
	return ret != -ENOENT ?
		       ret :
		       base_fail_reason(error, ret, "\"%s/%s\" has no manifest: it is not complete",
					walk->directory.path, candidate->name);
}

/*
 * Opens the newest valid checkpoint, and logs newer ones that are not valid. Returns
 * IOSHAPE_E_UNUSABLE if there are some but none is valid.
 *
 * While this function looks at one checkpoint after the other, a newer one may appear and the
 * listed ones may go. So if none is valid, it lists them again, until the list no longer changes.
 */
static int open_newest(struct group_checkpoint *checkpoint, const struct io_folder *directory,
		       const struct base_log *log, struct base_error *error)
{
	struct walk walk = { .directory = *directory };
	struct unusable unusable = { 0 };
	int ret = group_list_by_age(directory, &walk.candidates, error);

	if (ret)
		return ret;
	ret = -ENOENT;
	while (ret && (walk.at < walk.candidates.count || has_changed(&walk))) {
		struct base_error why = { 0 };

		if (!walk.at)
			unusable = (struct unusable){ 0 };
		ret = open_candidate(&walk, checkpoint, &why);
		if (!ret || !why.code)
			continue;
		if (!is_its_own_fault(ret)) {
			*error = why;
			break;
		}
		if (ret != -ENOENT)
			base_log(log, IOSHAPE_LOG_WARNING, "skipping checkpoint %s/%s: %s",
				 directory->path, walk.candidates.all[walk.at - 1].name, why.text);
		unusable_add(&unusable, &why);
	}
	group_candidates_free(&walk.candidates);
	return !ret || error->code ? ret : fail_unusable(&unusable, directory->path, error);
}

/* ---- Opening a checkpoint -------------------------------------------------------------------- */

static int open_found(struct ioshape_checkpoint *checkpoint, const char *path, const uint64_t *step,
		      struct base_error *error)
{
	const char *slash;
	int ret = group_open_directory(&checkpoint->directory, path, error);

	if (!ret && step)
		ret = group_open_step(&checkpoint->found, &checkpoint->directory, *step, error);
	else if (!ret)
		ret = open_newest(&checkpoint->found, &checkpoint->directory,
				  save_settings(checkpoint->context).log, error);
	if (ret)
		return ret;
	slash = strrchr(checkpoint->found.folder.path, '/');
	snprintf(checkpoint->name, sizeof(checkpoint->name), "%s", slash + 1);
	checkpoint->paths = calloc(checkpoint->found.manifest.file_count + 1ull, sizeof(char *));
	checkpoint->shard_names =
		calloc(checkpoint->found.manifest.rank_count + 1ull, sizeof(char *));
	return checkpoint->paths && checkpoint->shard_names ?
		       0 :
		       base_no_memory(error, "a checkpoint",
				      checkpoint->found.manifest.rank_count * sizeof(char *));
}

IOSHAPE_EXPORT int ioshape_checkpoint_open(struct ioshape_context *context, const char *path,
					   uint64_t step, struct ioshape_checkpoint **out)
{
	struct ioshape_checkpoint *checkpoint = NULL;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_null_argument("load");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && !path)
		ret = base_fail_reason(&error, -EINVAL, "no checkpoint directory was given");
	if (ret)
		return base_return(ret, "load", path, &error);
	checkpoint = calloc(1, sizeof(*checkpoint));
	if (!checkpoint) {
		ret = base_no_memory(&error, "a checkpoint", sizeof(*checkpoint));
		return base_return(ret, "load", path, &error);
	}
	checkpoint->context = context;
	checkpoint->directory = (struct io_folder)IO_NO_FOLDER;
	checkpoint->found = (struct group_checkpoint)GROUP_NO_CHECKPOINT;
	pthread_mutex_init(&checkpoint->lock, NULL);
	ret = open_found(checkpoint, path, step == IOSHAPE_LATEST ? NULL : &step, &error);
	if (ret)
		ioshape_checkpoint_free(checkpoint);
	else
		*out = checkpoint;
	return base_return(ret, "load", path, &error);
}

static void free_texts(char **texts, uint32_t count)
{
	for (uint32_t i = 0; texts && i < count; i++)
		free(texts[i]);
	free(texts);
}

/* Frees a checkpoint. A forked child may do so, too: its descriptors are its own, and the parent
 * keeps its lock. */
IOSHAPE_EXPORT void ioshape_checkpoint_free(struct ioshape_checkpoint *checkpoint)
{
	if (!checkpoint)
		return;
	free_texts(checkpoint->paths, checkpoint->found.manifest.file_count);
	free_texts(checkpoint->shard_names, checkpoint->found.manifest.rank_count);
	group_checkpoint_close(&checkpoint->found);
	io_folder_close(&checkpoint->directory);
	pthread_mutex_destroy(&checkpoint->lock);
	free(checkpoint);
}

/* ---- What a checkpoint consists of ----------------------------------------------------------- */

static int enter(struct ioshape_checkpoint *checkpoint, const void *result,
		 struct base_error *error)
{
	int ret = save_enter(checkpoint->context, error);

	if (!ret && !result)
		ret = base_fail_reason(error, -EINVAL,
				       "no pointer for the result was given, for %s",
				       checkpoint->found.folder.path);
	return ret;
}

IOSHAPE_EXPORT int ioshape_checkpoint_get_info(struct ioshape_checkpoint *checkpoint,
					       struct ioshape_checkpoint_info *info)
{
	struct ioshape_checkpoint_info full = { .size = sizeof(full) };
	const struct format_manifest *manifest;
	struct base_error error = { 0 };
	int ret;

	if (!checkpoint)
		return base_null_argument("load");
	manifest = &checkpoint->found.manifest;
	full.step = manifest->step;
	full.ranks = manifest->rank_count;
	full.files = manifest->file_count;
	full.bytes = group_checkpoint_bytes(&checkpoint->found);
	full.saved_s = manifest->saved;
	full.mode = (enum ioshape_mode)manifest->mode;
	full.path = checkpoint->found.folder.path;
	full.serial = manifest->serial;
	for (uint32_t rank = 0; rank < manifest->rank_count; rank++)
		full.distinct += !manifest->shards[rank].repeats;
	ret = enter(checkpoint, info, &error);
	if (!ret)
		ret = base_give_struct(info, &full, sizeof(full), "ioshape_checkpoint_info",
				       &error);
	return base_return(ret, "load", checkpoint->found.folder.path, &error);
}

static const char *path_of(struct ioshape_checkpoint *checkpoint, uint32_t file)
{
	char **path = &checkpoint->paths[file];

	pthread_mutex_lock(&checkpoint->lock);
	if (!*path && asprintf(path, "%s/%s", checkpoint->found.folder.path,
			       checkpoint->found.manifest.files[file].name) < 0)
		*path = NULL;
	pthread_mutex_unlock(&checkpoint->lock);
	return *path;
}

/* Returns the name of a shard in a shard file, such as "rank-00007.pt". */
static const char *shard_name(struct ioshape_checkpoint *checkpoint, uint32_t rank)
{
	char name[FORMAT_SHARD_NAME_BYTES], **kept = &checkpoint->shard_names[rank];

	format_shard_name(name, rank);
	pthread_mutex_lock(&checkpoint->lock);
	if (!*kept)
		*kept = strdup(name);
	pthread_mutex_unlock(&checkpoint->lock);
	return *kept;
}

static int find_shard(struct ioshape_checkpoint *checkpoint, uint32_t rank,
		      struct ioshape_shard_info *info, struct base_error *error)
{
	const struct format_manifest *manifest = &checkpoint->found.manifest;
	const struct format_manifest_shard *shard;
	const struct format_manifest_file *file;

	if (rank >= manifest->rank_count)
		return base_fail_reason(
			error, -ENOENT,
			"%s has shards of %u ranks, counted from 0, and none of rank %u",
			checkpoint->found.folder.path, manifest->rank_count, rank);
	shard = &manifest->shards[rank];
	file = &manifest->files[shard->file];
	info->file = path_of(checkpoint, shard->file);
	info->name = file->bundle ? shard_name(checkpoint, shard->holder) : file->name;
	info->offset = shard->offset;
	info->bytes = shard->bytes;
	info->crc32 = shard->crc32;
	info->same_as = shard->repeats ? shard->same : rank;
	return info->file && info->name ? 0 : base_no_memory(error, "a name", 1);
}

IOSHAPE_EXPORT int ioshape_checkpoint_get_shard(struct ioshape_checkpoint *checkpoint,
						uint32_t rank, struct ioshape_shard_info *info)
{
	struct ioshape_shard_info full = { .size = sizeof(full) };
	struct base_error error = { 0 };
	int ret;

	if (!checkpoint)
		return base_null_argument("load");
	ret = enter(checkpoint, info, &error);
	if (!ret)
		ret = find_shard(checkpoint, rank, &full, &error);
	if (!ret)
		ret = base_give_struct(info, &full, sizeof(full), "ioshape_shard_info", &error);
	return base_return(ret, "load", checkpoint->found.folder.path, &error);
}

static int check_name(const struct ioshape_checkpoint *checkpoint, struct base_error *error)
{
	if (io_folder_is_named(&checkpoint->found.folder, &checkpoint->directory, checkpoint->name))
		return 0;
	return base_fail_reason_with(error, -ESTALE, "open it again",
				     "\"%s\" was replaced or removed after it was opened",
				     checkpoint->found.folder.path);
}

static void explain_missing(const struct ioshape_checkpoint *checkpoint, const char *path,
			    struct base_error *error)
{
	if (!group_is_of_nodes(&checkpoint->found.folder))
		return;
	base_error_begin(error);
	base_fail_reason_with(
		error, -ENOENT,
		"open it there, or at its destination after all nodes have drained it",
		"cannot open \"%s\": it is on the tier of another node", path);
}

static int open_reader(struct ioshape_checkpoint *checkpoint, uint32_t rank,
		       const struct ioshape_reader_options *given, struct ioshape_reader **out,
		       struct base_error *error)
{
	struct ioshape_reader_options options;
	struct ioshape_shard_info shard;
	int ret;

	ret = base_take_options(&options, sizeof(options), given, "ioshape_reader_options", error);
	if (!ret && (options.file_offset || options.file_bytes))
		ret = base_fail_reason_with(
			error, -EINVAL, "leave file_offset and file_bytes at 0",
			"the checkpoint determines where a rank's shard starts in its file");
	if (!ret)
		ret = find_shard(checkpoint, rank, &shard, error);
	if (ret)
		return ret;
	options.size = sizeof(options);
	options.file_offset = shard.offset;
	options.file_bytes = shard.bytes;
	ret = ioshape_reader_open(checkpoint->context, shard.file, &options, out);
	if (ret == -ENOENT)
		explain_missing(checkpoint, shard.file, error);
	if (ret)
		/* ioshape_reader_open() has set the error message. */
		return ret;
	ret = check_name(checkpoint, error);
	if (ret) {
		ioshape_reader_free(*out);
		*out = NULL;
		return ret;
	}
	save_reader_is_part_of(*out, checkpoint->found.folder.path);
	return 0;
}

IOSHAPE_EXPORT int ioshape_checkpoint_open_shard(struct ioshape_checkpoint *checkpoint,
						 uint32_t rank,
						 const struct ioshape_reader_options *options,
						 struct ioshape_reader **out)
{
	struct base_error error = { 0 };
	int ret;

	if (!out || !checkpoint)
		return base_null_argument("load");
	*out = NULL;
	ret = save_enter(checkpoint->context, &error);
	if (!ret)
		ret = open_reader(checkpoint, rank, options, out, &error);
	return error.code ? base_return(ret, "load", checkpoint->found.folder.path, &error) : ret;
}

/* ---- Verifying: progress --------------------------------------------------------------------- */

/* Pieces of a file, which several threads read if the file is cached. */
#define PIECES 16u

struct verifying {
	struct ioshape_checkpoint *checkpoint;
	struct io_queue *queue;
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t done, total; /* bytes of the reads that have ended; bytes in all */
};

/* Reports the progress of one of several reads as that of all. */
static int tell(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct verifying *verifying = user;

	(void)total;
	return verifying->progress(verifying->progress_user, phase,
				   MIN(verifying->done + done, verifying->total), verifying->total);
}

/* ---- Verifying: files ------------------------------------------------------------------------ */

static int read_crc(struct verifying *verifying, const struct io_input *input, uint64_t offset,
		    uint64_t bytes, ioshape_progress_fn progress, uint32_t *crc,
		    struct base_error *error)
{
	struct io_piece pieces[PIECES] = { 0 };
	uint64_t begin = 0, end;
	int ret;

	for (unsigned i = 0; i < PIECES; i++, begin = end) {
		end = bytes / PIECES * (i + 1) + (i + 1 == PIECES ? bytes % PIECES : 0);
		pieces[i] = (struct io_piece){ offset + begin, end - begin, .want_crc = true };
	}
	*crc = 0;
	ret = io_read(verifying->queue, input, pieces, PIECES, progress, verifying, error);
	for (unsigned i = 0; i < PIECES; i++)
		*crc = base_crc32_combine(*crc, pieces[i].crc, pieces[i].bytes);
	return ret;
}

/* Checks that a shard has the checksum of the manifest. */
static int check_shard(struct verifying *verifying, const struct io_input *input, uint32_t rank,
		       const char *path, ioshape_progress_fn progress, struct base_error *error)
{
	const struct format_manifest_shard *shard =
		&verifying->checkpoint->found.manifest.shards[rank];
	uint32_t crc;
	int ret = read_crc(verifying, input, shard->offset, shard->bytes, progress, &crc, error);

	if (ret || crc == shard->crc32)
		return ret;
	base_fail_reason_with(
		error, IOSHAPE_E_DAMAGED, "load another checkpoint",
		"\"%s\" is damaged: the checksum of the shard of rank %u does not match "
		"the manifest",
		path, rank);
	base_error_of_rank(error, rank);
	return IOSHAPE_E_DAMAGED;
}

/* Fails for a damaged file; names the rank if the damage is in a shard. */
static int fail_damaged(struct verifying *verifying, const struct io_input *input, uint32_t file,
			const char *path, struct base_error *error)
{
	const struct format_manifest *manifest = &verifying->checkpoint->found.manifest;

	for (uint32_t rank = 0; rank < manifest->rank_count; rank++) {
		int ret = manifest->shards[rank].file == file ?
				  check_shard(verifying, input, rank, path, NULL, error) :
				  0;

		if (ret)
			return ret;
	}
	return base_fail_reason_with(error, IOSHAPE_E_DAMAGED, "load another checkpoint",
				     "\"%s\" is damaged: its checksum does not match the manifest",
				     path);
}

/* Opens a file and checks that it has the size of the manifest. */
static int open_file(const struct verifying *verifying, uint32_t file, const char **path,
		     struct io_input *input, struct base_error *error)
{
	struct ioshape_checkpoint *checkpoint = verifying->checkpoint;
	const struct format_manifest_file *expected = &checkpoint->found.manifest.files[file];
	int ret;

	*path = path_of(checkpoint, file);
	if (!*path)
		return base_no_memory(error, "a path", 1);
	ret = io_input_open(input, *path, 0, 0, save_settings(checkpoint->context).io->direct,
			    error);
	if (ret == -ENOENT)
		explain_missing(checkpoint, *path, error);
	if (ret)
		return ret;
	ret = check_name(checkpoint, error);
	if (!ret && input->bytes != expected->bytes)
		ret = base_fail_reason(error, IOSHAPE_E_DAMAGED,
				       "\"%s\" has %llu bytes, but the manifest says %llu", *path,
				       (unsigned long long)input->bytes,
				       (unsigned long long)expected->bytes);
	if (ret)
		io_input_close(input);
	return ret;
}

static int verify_file(struct verifying *verifying, uint32_t file, struct base_error *error)
{
	const struct format_manifest_file *expected =
		&verifying->checkpoint->found.manifest.files[file];
	struct io_input input;
	const char *path;
	uint32_t crc = 0;
	int ret = open_file(verifying, file, &path, &input, error);

	if (ret) {
		base_error_about(error, "verify", path);
		return ret;
	}
	ret = read_crc(verifying, &input, 0, expected->bytes, verifying->progress ? tell : NULL,
		       &crc, error);
	if (!ret && crc != expected->crc32)
		ret = fail_damaged(verifying, &input, file, path, error);
	if (ret)
		base_error_about(error, "verify", path);
	io_input_close(&input);
	verifying->done += expected->bytes;
	return ret;
}

static int open_queue(struct verifying *verifying, struct base_error *error)
{
	return io_queue_open(&verifying->queue, save_settings(verifying->checkpoint->context).io,
			     error);
}

/* ---- Verifying: shards ----------------------------------------------------------------------- */

/* Returns whether the rank's own copy of its shard is stored, not that of another rank. */
static bool is_stored(const struct verifying *verifying, uint32_t rank)
{
	return verifying->checkpoint->found.manifest.shards[rank].holder == rank;
}

static int verify_shard(struct verifying *verifying, uint32_t rank, struct base_error *error)
{
	const uint32_t file = verifying->checkpoint->found.manifest.shards[rank].file;
	struct io_input input;
	const char *path;
	int ret = open_file(verifying, file, &path, &input, error);

	if (!ret) {
		ret = check_shard(verifying, &input, rank, path, tell, error);
		io_input_close(&input);
	}
	if (ret)
		base_error_about(error, "verify", path);
	return ret;
}

/*
 * Compares the shards of ranks `first`, `first` + `stride`, ... completely with the checksums of
 * the manifest. Returns IOSHAPE_E_DAMAGED for the first one that differs. `progress` must not be
 * NULL.
 */
static int verify_shards(struct ioshape_checkpoint *checkpoint, uint32_t first, uint32_t stride,
			 ioshape_progress_fn progress, void *progress_user,
			 struct base_error *error)
{
	struct verifying verifying = {
		.checkpoint = checkpoint,
		.progress = progress,
		.progress_user = progress_user,
		.total = group_checkpoint_bytes(&checkpoint->found),
	};
	int ret = open_queue(&verifying, error);

	for (uint64_t rank = first; !ret && rank < checkpoint->found.manifest.rank_count;
	     rank += stride) {
		if (!is_stored(&verifying, (uint32_t)rank))
			continue;
		ret = verify_shard(&verifying, (uint32_t)rank, error);
		verifying.done += checkpoint->found.manifest.shards[rank].bytes;
	}
	io_queue_close(verifying.queue);
	return ret;
}

/* ---- Verifying: a whole checkpoint ----------------------------------------------------------- */

IOSHAPE_EXPORT int ioshape_checkpoint_verify(struct ioshape_checkpoint *checkpoint,
					     ioshape_progress_fn progress, void *progress_user)
{
	struct verifying verifying = {
		.checkpoint = checkpoint,
		.progress = progress,
		.progress_user = progress_user,
	};
	struct base_error error = { 0 };
	int ret;

	if (!checkpoint)
		return base_null_argument("verify");
	verifying.total = group_checkpoint_bytes(&checkpoint->found);
	ret = save_enter(checkpoint->context, &error);
	if (!ret)
		ret = open_queue(&verifying, &error);
	for (uint32_t file = 0; !ret && file < checkpoint->found.manifest.file_count; file++)
		ret = verify_file(&verifying, file, &error);
	io_queue_close(verifying.queue);
	return base_return(ret, "verify", checkpoint->found.folder.path, &error);
}

/* ---- The newest checkpoint that is good for all ranks ---------------------------------------- */

/* How long other hosts may not see a checkpoint that rank 0 sees, because NFS caches names. */
#define MOST_RETRY_NS 10000000000ull

/* The search, as rank 0 keeps it. The other ranks receive its results. */
struct search {
	const struct ioshape_search_options *options;
	bool begun, looked;
	struct walk near, there;
	/* Holders of the candidates of `near`, if nodes have tiers. */
	struct group_spreads *spreads;
	struct unusable unusable;
	struct base_error unseen; /* why the tier could not be listed */
};

static const struct group_tier_ops *tiers_of(const struct ioshape_group *group)
{
	return group_tier_of(&group->options)->ops;
}

static const char *directory_of(const struct ioshape_group *group, const struct group_found *found)
{
	return found->near ? group->near : group->directory;
}

/* Sends `found` from rank 0 to all other ranks, which receive it. */
static int share(struct group_round *round, const struct group_message *message,
		 struct group_found *found, struct base_error *error)
{
	int ret;

	if (!round->group->options.rank)
		return group_tell(round, message, found, error);
	ret = group_hear(round, message, 0, found, error);
	if (!ret && found->near && !round->group->near)
		ret = base_fail_reason(error, -EPROTO, "cannot read the message of rank 0 about %s",
				       round->group->directory);
	return ret;
}

/* ---- Rank 0: finding the next candidate ------------------------------------------------------ */

static int begin_walk(struct walk *walk, const char *path, struct base_error *failure)
{
	const int ret = group_open_directory(&walk->directory, path, failure);

	return ret ? ret : group_list_by_age(&walk->directory, &walk->candidates, failure);
}

static void begin_search(struct ioshape_group *group, struct search *search,
			 struct base_error *failure)
{
	search->begun = true;
	/* The directory on the tier need not exist. */
	if (!group_has_tiers(group) && group->near &&
	    begin_walk(&search->near, group->near, &search->unseen) &&
	    search->unseen.code != -ENOENT)
		base_log(save_settings(group->context).log, IOSHAPE_LOG_WARNING, "%s",
			 search->unseen.text);
	begin_walk(&search->there, group->directory, failure);
}

/* Returns whether the next candidate of the tiers cannot be restored from them, but has been
 * drained. */
static bool is_drained_only(const struct ioshape_group *group, const struct search *search)
{
	const uint64_t serial = search->near.candidates.all[search->near.at].serial;
	const struct group_candidates *there = &search->there.candidates;
	struct base_error unseen = { 0 };
	bool drained = false;

	for (size_t i = search->there.at; i < there->count; i++)
		drained |= there->all[i].serial == serial;
	return drained && tiers_of(group)->check(search->spreads, search->near.at, &unseen);
}

/* Returns the walk with the newest candidate that is left, or NULL if there is none. If both walks
 * have that candidate, returns that of the tier. */
static struct walk *next_walk(const struct ioshape_group *group, struct search *search)
{
	struct walk *near = &search->near, *there = &search->there;

	for (; near->at < near->candidates.count; near->at++) {
		if (there->at < there->candidates.count &&
		    near->candidates.all[near->at].serial < there->candidates.all[there->at].serial)
			break;
		if (!group_has_tiers(group) || !is_drained_only(group, search))
			return near;
	}
	return there->at < there->candidates.count ? there : NULL;
}

/* Fails because nothing was found. An empty directory means a first start only if the tier was
 * listed, too. */
static void fail_search(const struct ioshape_group *group, const struct search *search,
			struct base_error *failure)
{
	const struct base_error *unseen = &search->unseen;

	fail_unusable(&search->unusable, group->directory, failure);
	if (failure->code == -ENOENT && unseen->code && unseen->code != -ENOENT) {
		base_error_begin(failure);
		base_propagate(failure, unseen);
	}
}

/* Finds the next candidate. If it is known to be unusable, found->failure has the reason, and it is
 * passed over. found->step is IOSHAPE_LATEST if there are no more. */
static void look_for_next(struct ioshape_group *group, struct search *search,
			  struct group_found *found)
{
	struct base_error *failure = &found->failure;
	struct group_checkpoint checkpoint;
	struct walk *walk;
	int ret;

	*found = (struct group_found){ .step = IOSHAPE_LATEST };
	if (!search->begun)
		begin_search(group, search, failure);
	if (failure->code)
		return;
	do {
		walk = next_walk(group, search);
		if (!walk) {
			found->step = IOSHAPE_LATEST;
			fail_search(group, search, failure);
			return;
		}
		found->near = walk == &search->near;
		found->step = walk->candidates.all[walk->at].step;
		if (found->near && group_has_tiers(group)) {
			ret = tiers_of(group)->check(search->spreads, walk->at++, failure);
		} else {
			ret = open_candidate(walk, &checkpoint, failure);
			if (!ret)
				group_checkpoint_close(&checkpoint);
		}
	} while (ret == -EAGAIN && !failure->code);
}

/* ---- All ranks: checking whether it is intact ------------------------------------------------ */

/* Opens a checkpoint that rank 0 has found. Retries for MOST_RETRY_NS, because a network filesystem
 * may show it on this host a little later. */
static int open_patiently(struct group_round *round, const struct group_found *found,
			  struct ioshape_checkpoint **checkpoint)
{
	struct ioshape_group *group = round->group;
	const uint64_t begin_ns = base_now_ns();
	int ret;

	for (;;) {
		ret = ioshape_checkpoint_open(group->context, directory_of(group, found),
					      found->step, checkpoint);
		if (ret != -ENOENT || !group->options.rank ||
		    base_now_ns() - begin_ns > MOST_RETRY_NS)
			return ret;
		group_round_beat(round);
		group_round_rest(round);
	}
}

/* Checks that the saves of this rank's share of the shards raised no alarm. */
static int check_alarms(struct ioshape_checkpoint *checkpoint, uint32_t first, uint32_t stride,
			struct base_error *error)
{
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_reader *reader;
	int ret = 0;

	for (uint64_t rank = first; !ret && rank < checkpoint->found.manifest.rank_count;
	     rank += stride) {
		ret = ioshape_checkpoint_open_shard(checkpoint, (uint32_t)rank, NULL, &reader);
		if (ret)
			return base_propagate(error, base_last_error());
		ioshape_reader_get_info(reader, &info);
		ioshape_reader_free(reader);
		if (info.alarms)
			ret = base_fail_reason(
				error, IOSHAPE_E_ALARM,
				"the content of rank %u in \"%s\" looked wrong when it "
				"was saved",
				(unsigned int)rank, checkpoint->found.folder.path);
	}
	return ret;
}

/* Checks this rank's share of the shards, whichever ranks saved them. */
static void check_share(struct group_round *round, bool healthy, struct group_found *found)
{
	const struct ioshape_group_options *options = &round->group->options;
	struct ioshape_checkpoint *checkpoint;

	if (open_patiently(round, found, &checkpoint)) {
		base_propagate(&found->failure, base_last_error());
		return;
	}
	if (!verify_shards(checkpoint, options->rank, options->ranks, group_round_track, round,
			   &found->failure) &&
	    healthy)
		check_alarms(checkpoint, options->rank, options->ranks, &found->failure);
	ioshape_checkpoint_free(checkpoint);
}

/* What the ranks reported. */
struct checks {
	uint32_t lowest; /* lowest rank with a failure, which is `failure` */
	struct base_error *failure;
};

/* Records one report. All are collected: the failure of the lowest rank is the reason for passing
 * the checkpoint over. */
static int found_check(void *user, uint32_t rank, const struct base_buffer *body,
		       struct base_error *failure)
{
	struct checks *checks = user;
	struct group_found found;

	if (!group_read_message(&group_checked, body, &found))
		return base_fail_reason(failure, -EPROTO, "cannot read the result of its check");
	if (found.failure.code && rank < checks->lowest) {
		*checks->failure = found.failure;
		checks->lowest = rank;
	}
	return 0;
}

static int collect_checks(struct group_round *round, struct base_error *failure,
			  struct base_error *error)
{
	struct checks checks = {
		.lowest = failure->code ? 0 : UINT32_MAX,
		.failure = failure,
	};
	const struct group_collection collection = {
		.what = group_checked.name,
		.missing = "did not report whether its share is intact",
		.found = found_check,
		.user = &checks,
		.beats = true,
	};

	return group_round_collect(round, &collection, error);
}

static int check_intact(struct group_round *round, bool healthy, struct group_found *found,
			struct base_error *error)
{
	struct base_error lost = { 0 };
	int ret = 0;

	check_share(round, healthy, found);
	if (round->group->options.rank) {
		ret = group_tell(round, &group_checked, found, error);
	} else if (collect_checks(round, &found->failure, &lost)) {
		/* The search cannot go on without that rank. The failure that the others receive
		 * names it. */
		found->failure = lost;
		found->step = IOSHAPE_LATEST;
	}
	return ret ? ret : share(round, &group_intact, found, error);
}

/* ---- All ranks: trying one candidate after the other ----------------------------------------- */

/* Gives each node the files that it wants of a candidate. If that fails, the candidate is passed
 * over. */
static int restore(struct group_round *round, const struct search *search,
		   struct group_found *found, struct base_error *error)
{
	struct base_error *failure = &found->failure;
	int ret = tiers_of(round->group)
			  ->restore(round, search->spreads, search->near.at - 1, failure, error);

	/* Whatever failed on a node, an older checkpoint may be available: do not end the
	 * search. */
	if (failure->code && !is_its_own_fault(failure->code))
		base_rephrase(failure, IOSHAPE_E_DAMAGED, "%s", failure->sentence);
	return ret ? ret : share(round, &group_whole, found, error);
}

static int try_in(struct group_round *round, struct search *search, struct group_found *found,
		  struct base_error *error)
{
	struct ioshape_group *group = round->group;
	int ret = 0;

	if (group_has_tiers(group) && !search->looked)
		ret = tiers_of(group)->look(round, &search->spreads, &search->near.candidates,
					    error);
	search->looked = true;
	if (!ret && !group->options.rank)
		look_for_next(group, search, found);
	if (!ret)
		ret = share(round, &group_next, found, error);
	if (!ret && !found->failure.code && found->near && group_has_tiers(group))
		ret = restore(round, search, found, error);
	if (!ret && !found->failure.code && search->options->intact)
		ret = check_intact(round, search->options->healthy, found, error);
	return ret;
}

/* Tries the next candidate, in a round of its own. */
static int try_next(struct ioshape_group *group, struct search *search, struct group_found *found,
		    struct base_error *error)
{
	struct group_round round;
	int ret;

	group_round_begin(&round, group, group_round_reserve(group), NULL);
	ret = try_in(&round, search, found, error);
	group_round_end(&round);
	return ret;
}

static void say_where(const struct ioshape_group *group,
		      const struct ioshape_search_options *options, const struct group_found *found)
{
	if (options->directory)
		*options->directory = directory_of(group, found);
}

static void pass_over(const struct ioshape_group *group, struct search *search,
		      struct group_found *found)
{
	const struct ioshape_search_options *options = search->options;

	unusable_add(&search->unusable, &found->failure);
	if (!options->intact && !group->options.rank)
		base_log(save_settings(group->context).log, IOSHAPE_LOG_WARNING,
			 "skipping checkpoint %llu of %s: %s", (unsigned long long)found->step,
			 directory_of(group, found), found->failure.text);
	if (!options->intact)
		return;
	base_return(found->failure.code, "load", directory_of(group, found), &found->failure);
	say_where(group, options, found);
	if (options->passed_over)
		options->passed_over(options->passed_over_user, found->step);
}

static void end_walk(struct walk *walk)
{
	group_candidates_free(&walk->candidates);
	io_folder_close(&walk->directory);
}

static int find(struct ioshape_group *group, const struct ioshape_search_options *options,
		struct group_found *found, struct base_error *error)
{
	struct search search = {
		.options = options,
		.near.directory = IO_NO_FOLDER,
		.there.directory = IO_NO_FOLDER,
	};
	int ret;

	for (;;) {
		ret = try_next(group, &search, found, error);
		if (ret || !found->failure.code)
			break;
		if (found->step == IOSHAPE_LATEST || !is_its_own_fault(found->failure.code)) {
			ret = base_propagate(error, &found->failure);
			break;
		}
		pass_over(group, &search, found);
	}
	end_walk(&search.near);
	end_walk(&search.there);
	if (search.spreads)
		tiers_of(group)->free(search.spreads);
	return ret;
}

/* ---- Public calls of the search -------------------------------------------------------------- */

IOSHAPE_EXPORT int ioshape_group_get_latest(struct ioshape_group *group,
					    const struct ioshape_search_options *given,
					    uint64_t *step)
{
	struct ioshape_search_options options;
	struct base_error error = { 0 };
	struct group_found found = { 0 };
	int ret;

	if (!group || !step)
		return base_null_argument("load");
	*step = 0;
	ret = save_enter(group->context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_search_options",
					&error);
	if (!ret)
		ret = find(group, &options, &found, &error);
	if (!ret) {
		*step = found.step;
		say_where(group, &options, &found);
	}
	return base_return(ret, "load", group->directory, &error);
}
