/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saving a checkpoint with all ranks, from the first "want" to the verdict. Every rank reports how
 * much it saves, and rank 0 plans. Writers write their files, and the other ranks send them their
 * shards. Writers report what they have written; rank 0 commits the checkpoint and sends the
 * verdict.
 *
 * If nodes have tiers of their own, every node gets the manifest when all files are written. The
 * nodes exchange parity to protect each other; then each one commits its directory and keeps it for
 * the drain.
 */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* State of one rank in one save, from the call that begins it until the save's thread ends. */
struct group_share {
	struct ioshape_group *group;
	uint64_t step;
	uint64_t round;
};

/* ---- Preparing the plan ---------------------------------------------------------------------- */

static void take_sample(struct group_shard *shard)
{
	struct group_sum *sample = &shard->sample;
	struct base_error unused = { 0 };

	if (shard->group->options.ranks < 2 || !save_has_digest(shard->round.save))
		return;
	sample->key.bytes = shard->task->expected_bytes;
	sample->known = !save_take_sample(shard->round.save, sample->key.mac, &unused);
	shard->hashed_bytes = MIN(shard->task->payload_bytes, SAVE_SAMPLE_BYTES);
}

static int begin_plan(struct group_shard *shard, struct base_error *error)
{
	const struct ioshape_group_options *options = &shard->group->options;
	struct group_plan *plan = &shard->plan;

	plan->ranks = calloc(options->ranks, sizeof(*plan->ranks));
	if (!plan->ranks)
		return base_no_memory(error, "a plan", options->ranks * sizeof(*plan->ranks));
	/* Rank 0 sends the plan to the others even if it has failed. */
	plan->count = options->ranks;
	for (uint32_t rank = 0; rank < plan->count; rank++)
		plan->ranks[rank].same = plan->ranks[rank].kept = rank;
	plan->ranks[options->rank].bytes = shard->task->expected_bytes;
	take_sample(shard);
	return 0;
}

static void free_plan(struct group_plan *plan)
{
	free(plan->ranks);
	plan->ranks = NULL;
}

/* ---- Reporting what this rank wants ---------------------------------------------------------- */

static int say_want(struct group_shard *shard, uint64_t bytes, const struct base_error *why,
		    struct base_error *error)
{
	const struct group_want want = {
		.failure = *why,
		.step = shard->step,
		.bytes = bytes,
		.sample = shard->sample,
	};

	return group_tell(&shard->round, &group_want, &want, error);
}

/* ---- Reporting what this rank has written ---------------------------------------------------- */

static int say_done(struct group_shard *shard, const struct group_written *written,
		    struct base_error *error)
{
	return group_tell(&shard->round, &group_done, written, error);
}

/* ---- Collecting what all writers have written ------------------------------------------------ */

/* What rank 0 has received from the writers. */
struct sum {
	struct group_shard *shard;
	struct format_manifest manifest;
	bool *writes; /* by rank: it writes a file */
	/* Shards of the writer that was read last, with memory for those of all ranks. */
	struct group_written_shard *heard;
	uint32_t shards;
};

static int add_shard(struct sum *sum, uint32_t file, uint32_t writer,
		     const struct group_written_shard *written)
{
	const struct ioshape_group *group = sum->shard->group;
	const uint32_t rank = written->rank;

	/* A shard that was listed before has bytes, because no shard is empty. */
	if (rank >= group->options.ranks || sum->manifest.shards[rank].bytes ||
	    !group_is_kept(&sum->shard->plan, rank) ||
	    group_writer_of(group, sum->shard->plan.mode, rank) != writer)
		return -EPROTO;
	sum->manifest.shards[rank] = (struct format_manifest_shard){
		.file = file,
		.crc32 = written->crc32,
		.offset = written->offset,
		.bytes = written->bytes,
	};
	sum->shards++;
	return 0;
}

static int add_file(struct sum *sum, uint32_t writer, const struct group_written *written)
{
	struct format_manifest *manifest = &sum->manifest;
	struct format_manifest_file *file = &manifest->files[manifest->file_count];
	int ret = 0;

	file->name = strdup(written->name);
	if (!file->name)
		return -ENOMEM;
	file->bytes = written->bytes;
	file->crc32 = written->crc32;
	file->bundle = sum->shard->plan.mode != IOSHAPE_MODE_EACH;
	manifest->file_count++;
	for (uint32_t i = 0; !ret && i < written->count; i++)
		ret = add_shard(sum, manifest->file_count - 1, writer, &written->shards[i]);
	return ret;
}

static bool writes(const void *user, uint32_t rank)
{
	const struct sum *sum = user;

	return sum->writes[rank];
}

static int found_done(void *user, uint32_t rank, const struct base_buffer *body,
		      struct base_error *failure)
{
	struct sum *sum = user;
	struct group_written written = { .shards = sum->heard,
					 .count = sum->shard->group->options.ranks };
	int ret = group_read_message(&group_done, body, &written) ? 0 : -EPROTO;

	if (!ret && written.failure.code)
		return base_propagate(failure, &written.failure);
	if (!ret)
		ret = add_file(sum, rank, &written);
	return ret ? base_fail(failure, ret, "cannot use the file that it has written") : 0;
}

/* Fills in the manifest's entries of shards that are stored once for several ranks. */
static void repeat_shards(struct sum *sum)
{
	const struct group_plan *plan = &sum->shard->plan;
	struct format_manifest_shard *shards = sum->manifest.shards;

	for (uint32_t rank = 0; rank < sum->manifest.rank_count; rank++) {
		shards[rank] = shards[plan->ranks[rank].kept];
		shards[rank].repeats = plan->ranks[rank].same != rank;
		shards[rank].same = plan->ranks[rank].same;
	}
}

static int sum_up(struct sum *sum, const struct group_written *written, struct base_error *error)
{
	struct group_shard *shard = sum->shard;
	const struct ioshape_group *group = shard->group;
	const uint32_t ranks = group->options.ranks;
	uint32_t kept = 0;
	const struct group_collection collection = {
		.what = group_done.name,
		.missing = "did not finish writing",
		.awaits = writes,
		.found = found_done,
		.user = sum,
		.beats = true,
	};
	int ret;

	for (uint32_t rank = 0; rank < ranks; rank++) {
		if (!group_is_kept(&shard->plan, rank))
			continue;
		sum->writes[group_writer_of(group, shard->plan.mode, rank)] = true;
		kept++;
	}
	ret = add_file(sum, 0, written);
	if (ret)
		return base_fail(error, ret, "cannot use the file that rank 0 has written");
	ret = group_round_collect(&shard->round, &collection, error);
	if (ret)
		return ret;
	if (sum->shards != kept)
		return base_fail_reason(error, -EPROTO,
					"%u of %u shards of checkpoint %llu were written",
					sum->shards, kept, (unsigned long long)shard->step);
	repeat_shards(sum);
	return 0;
}

/* ---- Committing ------------------------------------------------------------------------------ */

/* Keeps the committed checkpoint for the drain, if it is on the tier. From then on it is drained
 * even if this process dies. */
static int keep(const struct group_shard *shard, struct base_error *error)
{
	const struct ioshape_group_options *options = &shard->group->options;
	struct group_tier *tier = group_tier_of(options);

	if (!shard->plan.near)
		return 0;
	return tier->ops->keep(tier, shard->task->path, options->keep_last, options->keep_every,
			       error);
}

/* Finds the files of the manifest that this node's ranks wrote. The caller frees the result; NULL
 * if there is no memory. */
static bool *find_files_here(const struct ioshape_group *group,
			     const struct format_manifest *manifest)
{
	bool *here = calloc(manifest->file_count, sizeof(*here));

	for (uint32_t rank = 0; here && rank < group->options.ranks; rank++) {
		if (group_is_local(group, rank))
			here[manifest->shards[rank].file] = true;
	}
	return here;
}

/* Protects and commits this node's files. */
static int commit_here(struct group_shard *shard, struct group_attempt *attempt,
		       const struct format_manifest *manifest, const struct base_buffer *plan,
		       struct base_error *error)
{
	const struct ioshape_group *group = shard->group;
	const struct group_tier *tier = group_tier_of(&group->options);
	bool *here = find_files_here(group, manifest);
	int ret;

	if (!here)
		return base_no_memory(error, "files of a node", manifest->file_count);
	attempt->files_here = here;
	ret = tier->ops->protect(&shard->round, manifest, plan, &attempt->folder,
				 shard->unprotected, error);
	if (!ret)
		ret = group_attempt_commit(attempt, manifest, false, error);
	attempt->files_here = NULL;
	free(here);
	return ret ? ret : keep(shard, error);
}

/* Lets all nodes commit their files, with the manifest. Called on rank 0. */
static int commit_spread(struct group_shard *shard, struct group_attempt *attempt,
			 struct format_manifest *manifest, struct base_error *error)
{
	const struct group_tier *tier = group_tier_of(&shard->group->options);
	struct group_answers answers = { .remark = shard->unprotected };
	struct group_commit commit = { 0 };
	struct base_error own = { 0 };
	int ret = tier->ops->plan(shard->group, manifest, &commit.plan, error);

	manifest->serial = group_next_serial(attempt);
	if (!ret && format_manifest_encode(&commit.manifest, manifest))
		ret = base_no_memory(error, "a manifest", manifest->rank_count);
	if (!ret)
		ret = group_tell(&shard->round, &group_commit, &commit, error);
	if (!ret) {
		commit_here(shard, attempt, manifest, &commit.plan, &own);
		ret = group_collect_answers(&shard->round, &group_kept, "did not commit its files",
					    &answers, error);
	}
	if (!ret && own.code)
		ret = group_fail_of_rank(shard->group, 0, &own, error);
	if (!ret && answers.failure.code)
		ret = base_propagate(error, &answers.failure);
	if (!ret)
		shard->group->last_serial = MAX(shard->group->last_serial, manifest->serial);
	base_buffer_free(&commit.manifest);
	base_buffer_free(&commit.plan);
	return ret;
}

/* ---- Committing on the other nodes ----------------------------------------------------------- */

static int read_manifest(const struct ioshape_group *group, const struct base_buffer *text,
			 struct format_manifest *manifest, struct base_error *error)
{
	const int ret = format_manifest_decode(manifest, (const char *)text->data, text->bytes,
					       "the manifest of rank 0", error);

	if (ret || manifest->rank_count == group->options.ranks)
		return ret;
	return base_fail_reason_with(
		error, IOSHAPE_E_DAMAGED, "save again",
		"the manifest of rank 0 is damaged: it has %u ranks, and the group has "
		"%u",
		manifest->rank_count, group->options.ranks);
}

/* Waits for the commit message. Returns -ECANCELED, without an error message, if the verdict is
 * there already: without a commit it is a failure. */
static int await_commit(struct group_shard *shard, struct group_commit *commit,
			struct base_error *error)
{
	struct group_watched watched = { 0 };
	struct group_verdict verdict;
	int ret;

	for (;;) {
		ret = group_look(&shard->round, &group_commit, 0, &watched, commit, error);
		if (ret != -EAGAIN)
			return ret;
		ret = group_look(&shard->round, &group_verdict, 0, &watched, &verdict, error);
		if (ret != -EAGAIN)
			return ret ? ret : -ECANCELED;
		ret = group_round_go_on(&shard->round, IOSHAPE_PHASE_SYNC, shard->round.done_bytes,
					shard->plan.total_bytes, error);
		if (ret)
			return ret;
		group_round_rest(&shard->round);
	}
}

static void follow_commit(struct group_shard *shard, struct group_attempt *attempt,
			  struct base_error *error)
{
	struct group_answer answer = { 0 };
	struct base_error unsaid = { 0 };
	struct format_manifest manifest = { 0 };
	struct group_commit commit = { 0 };
	int ret = await_commit(shard, &commit, &answer.failure);

	if (!ret) {
		ret = read_manifest(shard->group, &commit.manifest, &manifest, &answer.failure);
		if (!ret)
			ret = commit_here(shard, attempt, &manifest, &commit.plan, &answer.failure);
		memcpy(answer.remark, shard->unprotected, sizeof(answer.remark));
		group_tell(&shard->round, &group_kept, &answer, &unsaid);
	}
	if (ret && answer.failure.code && !error->code)
		base_propagate(error, &answer.failure);
	format_manifest_free(&manifest);
	base_buffer_free(&commit.manifest);
	base_buffer_free(&commit.plan);
}

/* ---- The verdict ----------------------------------------------------------------------------- */

static int commit(struct sum *sum, struct group_attempt *attempt,
		  const struct group_written *written, struct base_error *error)
{
	struct group_shard *shard = sum->shard;
	const uint32_t ranks = shard->group->options.ranks;
	struct format_manifest *manifest = &sum->manifest;
	int ret;

	manifest->step = shard->step;
	manifest->saved = (int64_t)time(NULL);
	manifest->mode = shard->plan.mode;
	snprintf(manifest->attempt, sizeof(manifest->attempt), "%s", attempt->id);
	manifest->rank_count = ranks;
	manifest->shards = calloc(ranks, sizeof(*manifest->shards));
	manifest->files = calloc(ranks, sizeof(*manifest->files));
	sum->writes = calloc(ranks, sizeof(*sum->writes));
	sum->heard = calloc(ranks, sizeof(*sum->heard));
	if (!manifest->shards || !manifest->files || !sum->writes || !sum->heard)
		return base_no_memory(error, "a manifest", ranks * sizeof(*manifest->shards));
	ret = sum_up(sum, written, error);
	if (ret)
		return ret;
	for (uint32_t i = 0; i < manifest->file_count; i++)
		shard->report->checkpoint_bytes += manifest->files[i].bytes;
	if (group_is_spread(shard))
		return commit_spread(shard, attempt, manifest, error);
	ret = group_attempt_commit(attempt, manifest, shard->task->file_options.no_replace, error);
	if (ret)
		return ret;
	shard->group->last_serial = MAX(shard->group->last_serial, attempt->last_serial);
	return keep(shard, error);
}

static int say_verdict(struct group_shard *shard, const struct base_error *failure,
		       struct base_error *error)
{
	struct group_verdict verdict = {
		.failure = *failure,
		.checkpoint_bytes = shard->report->checkpoint_bytes,
	};

	strcpy(verdict.unprotected, shard->unprotected);
	return group_tell(&shard->round, &group_verdict, &verdict, error);
}

/* ---- Saving on rank 0 ------------------------------------------------------------------------ */

/* Removes old checkpoints. The one just saved stays, even if the job has gone back to earlier
 * steps. */
static void retain(const struct group_shard *shard)
{
	const struct ioshape_group *group = shard->group;
	const struct ioshape_prune_options options = {
		.size = sizeof(options),
		.keep_last = group->options.keep_last,
		.keep_every = group->options.keep_every,
	};
	struct base_error why = { 0 };

	/* On the tier, the drain does this. */
	if (!options.keep_last || shard->plan.near)
		return;
	if (group_prune(group->context, group->directory, group->job, &options, NULL, &why))
		base_log(save_settings(group->context).log, IOSHAPE_LOG_WARNING,
			 "old checkpoints of %s were not removed: %s", group->directory, why.text);
}

/* Records a failure of rank 0 itself. A group of one rank does not name it. */
static int fail_here(const struct group_shard *shard, const struct base_error *own,
		     struct base_error *error)
{
	if (shard->group->store)
		return group_fail_of_rank(shard->group, 0, own, error);
	return base_propagate(error, own);
}

/* Makes the plan and tells the other ranks: the plan, or why there is none. *told: they were
 * told. */
static int plan_and_tell(struct group_shard *shard, struct group_attempt *attempt,
			 const struct base_error *own, bool *told, struct base_error *error)
{
	struct base_error unsaid = { 0 };
	int ret;

	ret = own->code ? fail_here(shard, own, error) : group_make_plan(shard, attempt, error);
	ret = save_space_verdict(shard->group->context, ret, error);
	if (!shard->group->store)
		return ret;
	if (!ret)
		group_round_forget(&shard->round);
	*told = !group_tell_plan(shard, GROUP_NO_QUESTION, error, &unsaid);
	if (!ret && !*told)
		ret = base_propagate(error, &unsaid);
	return ret;
}

static int write_and_commit(struct group_shard *shard, struct group_attempt *attempt,
			    struct base_error *error)
{
	struct group_written written = { 0 };
	struct sum sum = { .shard = shard };
	struct base_error own = { 0 };
	int ret;

	if (group_write_shards(shard, &written, &own))
		ret = fail_here(shard, &own, error);
	else
		ret = commit(&sum, attempt, &written, error);
	format_manifest_free(&sum.manifest);
	free(sum.writes);
	free(sum.heard);
	free(written.shards);
	return save_space_verdict(shard->group->context, ret, error);
}

static int lead(struct group_shard *shard, const struct base_error *own, struct base_error *error)
{
	struct group_attempt attempt = GROUP_NO_ATTEMPT;
	struct base_error unsaid = { 0 };
	bool told = false;
	int ret;

	ret = plan_and_tell(shard, &attempt, own, &told, error);
	if (!ret)
		ret = write_and_commit(shard, &attempt, error);
	/* Ranks that have not received the plan give up at their deadline. */
	if (told)
		say_verdict(shard, error, &unsaid);
	group_attempt_abandon(&attempt);
	/* A save with a deadline leaves this to the next save. */
	if (!ret && !shard->task->file_options.deadline_ns)
		retain(shard);
	return ret;
}

static int lead_nowhere(struct group_shard *shard, const struct base_error *why,
			struct base_error *error)
{
	struct base_error named = { 0 };

	fail_here(shard, why, &named);
	return group_tell_plan(shard, GROUP_NO_QUESTION, &named, error);
}

/* ---- Receiving the verdict ------------------------------------------------------------------- */

/* Returns whether the checkpoint is committed. Rank 0 may have committed it and ended before this
 * rank received the verdict. */
static bool is_committed(struct group_shard *shard)
{
	struct io_folder directory = IO_NO_FOLDER;
	struct group_checkpoint checkpoint;
	char step_name[GROUP_STEP_NAME_BYTES];
	bool ours = false;

	/* This node's directory says nothing about those of other nodes. */
	if (group_is_spread(shard))
		return false;
	group_step_name(step_name, shard->step);
	if (io_folder_open(&directory, group_directory_of(shard), NULL))
		return false;
	if (!group_checkpoint_open(&checkpoint, &directory, step_name, shard->step, NULL)) {
		ours = !strcmp(checkpoint.manifest.attempt,
			       group_parse_name(shard->plan.attempt).id);
		if (ours)
			shard->report->checkpoint_bytes = group_checkpoint_bytes(&checkpoint);
		group_checkpoint_close(&checkpoint);
	}
	io_folder_close(&directory);
	return ours;
}

/* Waits for the verdict. *heard says whether it was received. The code alone does not tell, because
 * a verdict may have the code of a lost rank 0. */
static int await_verdict(struct group_shard *shard, bool *heard, struct base_error *error)
{
	struct group_verdict verdict;
	int ret = group_hear(&shard->round, &group_verdict, 0, &verdict, error);

	*heard = !ret;
	if (!ret) {
		shard->report->checkpoint_bytes = verdict.checkpoint_bytes;
		strcpy(shard->unprotected, verdict.unprotected);
		ret = base_propagate(error, &verdict.failure);
	} else if (ret == -ETIMEDOUT && is_committed(shard)) {
		/* Rank 0 has ended, perhaps before it could keep the checkpoint. */
		base_error_begin(error);
		ret = keep(shard, error);
	}
	return ret;
}

/* ---- Saving on the other ranks --------------------------------------------------------------- */

/* Returns whether the plan makes this rank write a file. */
static bool has_file(const struct group_shard *shard)
{
	const struct ioshape_group *group = shard->group;

	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		if (group_is_kept(&shard->plan, rank) &&
		    group_writer_of(group, shard->plan.mode, rank) == group->options.rank)
			return true;
	return false;
}

/* Writes this rank's file, or sends its shard to its writer, or does nothing if another rank's copy
 * of the shard is stored. */
static void do_own_shard(struct group_shard *shard, struct base_error *own)
{
	const struct ioshape_group *group = shard->group;
	const uint32_t rank = group->options.rank;
	const bool writes = has_file(shard);
	struct group_written written = { 0 };
	int ret = 0;

	if (writes)
		ret = group_write_shards(shard, &written, own);
	else if (group_is_kept(&shard->plan, rank))
		ret = group_send_shard(shard, own);
	/* A rank that sends its shard reports only failures: success is reported by its writer. */
	if (writes || ret) {
		written.failure = *own;
		shard->round.silent = say_done(shard, &written, own) != 0;
	}
	free(written.shards);
}

/* Waits for the verdict, even if this rank's shard failed, because the verdict names the cause. */
static int await_end(struct group_shard *shard, const struct base_error *own,
		     struct base_error *error)
{
	struct base_error told = { 0 };
	bool heard;
	int ret;

	ret = await_verdict(shard, &heard, &told);
	/* A committed checkpoint has this rank's shard, whatever failed here afterwards. */
	if (!ret)
		return 0;
	*error = own->code && (!heard || save_is_stopped(shard->round.save)) ? *own : told;
	return error->code;
}

static int follow(struct group_shard *shard, struct base_error *error)
{
	/* Attempt on this node's own tier. */
	struct group_attempt attempt = GROUP_NO_ATTEMPT;
	struct group_written nothing = { 0 };
	struct base_error own = { 0 };
	int ret = group_await_plan(shard, &attempt, error);

	if (ret) {
		/* Rank 0 may have planned with this rank already. */
		nothing.failure = *error;
		say_done(shard, &nothing, &own);
	} else {
		do_own_shard(shard, &own);
		if (attempt.folder.fd >= 0)
			follow_commit(shard, &attempt, &own);
		ret = await_end(shard, &own, error);
	}
	group_attempt_abandon(&attempt);
	return ret;
}

/* Saves on a rank other than 0. `own` is what failed on this rank before; its code is 0 if nothing
 * did. */
static int take_shard(struct group_shard *shard, const struct base_error *own,
		      struct base_error *error)
{
	struct base_error unsaid = { 0 };
	int ret;

	ret = say_want(shard, shard->task->expected_bytes, own, error);
	if (ret)
		return ret;
	if (own->code) {
		*error = *own;
		return own->code;
	}
	ret = follow(shard, error);
	/* Tells rank 0 that this rank has given up, so that rank 0 does not wait for it. */
	if (ret)
		say_want(shard, 0, error, &unsaid);
	return ret;
}

/* ---- One save -------------------------------------------------------------------------------- */

static void report_group(const struct group_shard *shard, uint64_t begin_ns, double own_s)
{
	static const char *const modes[] = { "", "each", "node", "rank0" };
	struct ioshape_report *report = shard->report;

	report->group_s = MAX(base_seconds(base_now_ns() - begin_ns) - own_s, 0);
	report->repeated_bytes = shard->plan.repeated_bytes;
	snprintf(report->mode, sizeof(report->mode), "%s", modes[shard->plan.mode]);
	snprintf(report->why, sizeof(report->why), "%s", shard->plan.why);
	base_log(save_settings(shard->group->context).log, IOSHAPE_LOG_DEBUG,
		 "%s: %llu bytes read to find identical shards", shard->task->path,
		 (unsigned long long)shard->hashed_bytes);
}

static void report_unprotected(struct group_shard *shard)
{
	io_add_downgrade(&shard->downgrades, IOSHAPE_DOWNGRADE_PARITY,
			 "without parity, and lost if a node fails before it is drained: %s",
			 shard->unprotected);
	io_report_downgrades(&shard->downgrades, shard->report);
}

/* Reports a skipped save. Called on all ranks, whatever they had written by then. */
static void report_skip(struct group_shard *shard, const struct base_error *why)
{
	io_add_downgrade(&shard->downgrades, IOSHAPE_DOWNGRADE_SKIPPED, "%s", why->sentence);
	io_report_downgrades(&shard->downgrades, shard->report);
}

static int prepare(struct group_shard *shard, struct base_error *error)
{
	if (save_is_stopped(shard->round.save))
		return base_fail_reason(error, -ECANCELED, "the save to \"%s\" was stopped",
					shard->task->path);
	return begin_plan(shard, error);
}

static int run_shard(struct group_shard *shard, struct base_error *error)
{
	const struct save_task *task = shard->task;
	struct base_error own = { 0 }, failure = { 0 };
	int ret;

	prepare(shard, &own);
	group_round_track(&shard->round, IOSHAPE_PHASE_WAIT, 0, task->expected_bytes);
	ret = shard->group->options.rank ? take_shard(shard, &own, &failure) :
					   lead(shard, &own, &failure);
	if (ret == IOSHAPE_E_SKIPPED)
		report_skip(shard, &failure);
	if (ret)
		base_rephrase(error, base_propagate(error, &failure), "%s was not saved: %s",
			      task->path, failure.sentence);
	else
		save_track(shard->round.save, IOSHAPE_PHASE_DONE, shard->report->checkpoint_bytes,
			   shard->report->checkpoint_bytes);
	if (!ret && *shard->unprotected)
		report_unprotected(shard);
	free_plan(&shard->plan);
	return ret;
}

static void leave(struct group_share *share)
{
	struct ioshape_group *group = share->group;

	free(share);
	pthread_mutex_lock(&group->lock);
	group->running--;
	pthread_cond_broadcast(&group->change);
	pthread_mutex_unlock(&group->lock);
}

/* Runs on the thread of the save, instead of writing a file. */
static int run(void *user, struct ioshape_save *save, const struct save_task *task,
	       struct ioshape_report *report, struct base_error *error)
{
	struct group_share *share = user;
	uint64_t begin_ns = base_now_ns();
	struct group_shard shard = {
		.group = share->group,
		.task = task,
		.step = share->step,
		.report = report,
	};
	int ret;

	group_round_begin(&shard.round, share->group, share->round, task->file_options.abort);
	shard.round.save = save;
	ret = run_shard(&shard, error);
	group_round_end(&shard.round);
	report_group(&shard, begin_ns,
		     report->slot_s + report->plan_s + report->write_s + report->sync_s);
	leave(share);
	return ret;
}

/* Tells the other ranks that this one could not even begin the save. */
static int give_up(const struct group_share *share, const struct base_error *why,
		   struct base_error *error)
{
	struct group_shard shard = { .group = share->group, .step = share->step };
	int ret = 0;

	group_round_begin(&shard.round, share->group, share->round, NULL);
	if (share->group->store && share->group->options.rank)
		ret = say_want(&shard, 0, why, error);
	else if (share->group->store)
		ret = lead_nowhere(&shard, why, error);
	group_round_end(&shard.round);
	return ret;
}

/* ---- Public calls ---------------------------------------------------------------------------- */

/* Returns whether this rank stages in shared memory: another rank of its node may write its
 * shard. */
static bool shares_memory(const struct ioshape_group *group)
{
	const uint32_t rank = group->options.rank;

	return group->options.mode != IOSHAPE_MODE_EACH &&
	       group_writer_of(group, IOSHAPE_MODE_NODE, rank) != rank;
}

/* Allocates the share, and the path by which error messages name the save. The caller frees
 * both. */
static int make_share(const struct group_share *share, struct group_share **made, char **path,
		      struct base_error *error)
{
	char name[GROUP_STEP_NAME_BYTES];

	group_step_name(name, share->step);
	*made = malloc(sizeof(**made));
	if (*made && asprintf(path, "%s/%s", share->group->directory, name) >= 0) {
		**made = *share;
		return 0;
	}
	free(*made);
	return base_no_memory(error, "a save", sizeof(**made));
}

/* Begins the save, which owns the share from then on, even if the call fails. */
static int begin_share(struct group_share *share, const char *path,
		       const struct save_payload *payload,
		       const struct ioshape_save_options *options, bool blocks,
		       struct ioshape_save **out, struct base_error *error)
{
	struct ioshape_group *group = share->group;
	struct save_collective collective = {
		.run = run,
		.user = share,
		.owner = group,
		.shared_memory = shares_memory(group),
		.blocks = blocks,
	};
	int ret;

	pthread_mutex_lock(&group->lock);
	group->running++;
	pthread_mutex_unlock(&group->lock);
	ret = save_begin(group->context, path, payload, options, &collective, out, error);
	if (ret && !collective.started) {
		give_up(share, error, NULL);
		leave(share);
	}
	return ret;
}

/*
 * Reserves the save's round, then begins the save. `checked` is the result of checking the options.
 * Even if they are wrong, this rank takes its round and tells the other ranks.
 */
static int begin(struct ioshape_group *group, uint64_t step, const struct save_payload *payload,
		 const struct ioshape_save_options *options, int checked, bool blocks,
		 struct ioshape_save **out, struct base_error *error)
{
	struct group_share share = { group, step, 0 }, *made;
	char *path = NULL;
	int ret = checked;

	/* Staging memory is given out in the order of rounds, so that a round never waits for
	 * memory of a later one. */
	pthread_mutex_lock(&group->beginning);
	share.round = group_round_reserve(group);
	if (!ret)
		ret = make_share(&share, &made, &path, error);
	if (ret)
		give_up(&share, error, NULL);
	else
		ret = begin_share(made, path, payload, options, blocks, out, error);
	pthread_mutex_unlock(&group->beginning);
	free(path);
	return ret;
}

/* Waits for a save and fills its caller's report. */
static int end(struct ioshape_save *save, struct ioshape_report *report, struct base_error *error)
{
	int ret = ioshape_save_wait(save, -1);

	if (report)
		ioshape_save_get_report(save, report);
	if (ret)
		base_propagate(error, base_last_error());
	ioshape_save_free(save);
	return ret;
}

/* Saves, in the background if `out` is not NULL. */
static int save(struct ioshape_group *group, uint64_t step, const struct save_payload *payload,
		const struct ioshape_save_options *given, struct ioshape_save **out)
{
	struct ioshape_report ignored = IOSHAPE_REPORT_INIT, *report;
	struct ioshape_save_options options;
	struct ioshape_save *save = NULL;
	struct base_error error = { 0 };
	int ret;

	if (out)
		*out = NULL;
	if (!group)
		return base_null_argument("save");
	ret = save_enter(group->context, &error);
	if (ret)
		return base_return(ret, "save", group->directory, &error);
	ret = save_take_options(&options, given, false, out != NULL, &error);
	report = ret ? NULL : options.report;
	if (!ret && step == IOSHAPE_LATEST)
		ret = base_fail(&error, -EINVAL, "no checkpoint can have the step %llu",
				(unsigned long long)step);
	if (!ret && report)
		ret = base_give_struct(report, &ignored, sizeof(ignored), "ioshape_report", &error);
	options.borrow = options.borrow || !out;
	ret = begin(group, step, payload, &options, ret, !out, &save, &error);
	if (out)
		*out = save;
	else if (!ret)
		ret = end(save, report, &error);
	return base_return(ret, "save", group->directory, &error);
}

IOSHAPE_EXPORT int ioshape_group_save_tensors(struct ioshape_group *group, uint64_t step,
					      const struct ioshape_tensor *tensors, size_t count,
					      const struct ioshape_save_options *options,
					      struct ioshape_save **out)
{
	const struct save_payload payload = { .tensors = tensors, .count = count };

	return save(group, step, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_group_save_records(struct ioshape_group *group, uint64_t step,
					      const struct ioshape_record *records, size_t count,
					      const struct ioshape_save_options *options,
					      struct ioshape_save **out)
{
	const struct save_payload payload = { .kind = SAVE_RECORDS,
					      .records = records,
					      .count = count };

	return save(group, step, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why)
{
	struct base_error error = { 0 }, given = { 0 };
	struct group_share share;
	int ret;

	if (!group)
		return base_null_argument("fail");
	ret = save_enter(group->context, &error);
	if (ret)
		return base_return(ret, "fail", group->directory, &error);
	share = (struct group_share){ group, step, group_round_reserve(group) };
	base_fail_reason(&given, -ECANCELED, "%s", why && *why ? why : "it has nothing to save");
	ret = give_up(&share, &given, &error);
	return base_return(ret, "fail", group->directory, &error);
}
