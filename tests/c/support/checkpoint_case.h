/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints of a group with one small file, for tests of how they are begun, committed and
 * replaced.
 */
#ifndef TESTS_SUPPORT_CHECKPOINT_CASE_H
#define TESTS_SUPPORT_CHECKPOINT_CASE_H

#include "group/group.h"
#include "support/scratch.h"

#include <ioshape/group.h>

#include <stdio.h>
#include <string.h>

#define CHECKPOINT_JOB "0000471a"

/* Manifest of one rank's file with this text. */
struct checkpoint_case {
	struct format_manifest manifest;
	struct format_manifest_file file;
	struct format_manifest_shard shard;
	char name[FORMAT_SHARD_NAME_BYTES];
};

static inline struct format_manifest *checkpoint_describe(struct checkpoint_case *it, uint64_t step,
							  const char *attempt, const char *text)
{
	uint32_t crc = base_crc32(0, text, strlen(text));

	memset(it, 0, sizeof(*it));
	format_shard_name(it->name, 0);
	it->file = (struct format_manifest_file){ it->name, strlen(text), crc, false };
	it->shard = (struct format_manifest_shard){ .crc32 = crc, .bytes = strlen(text) };
	it->manifest = (struct format_manifest){
		.step = step,
		.saved = 1700000000,
		.mode = IOSHAPE_MODE_EACH,
		.rank_count = 1,
		.shards = &it->shard,
		.file_count = 1,
		.files = &it->file,
	};
	snprintf(it->manifest.attempt, sizeof(it->manifest.attempt), "%s", attempt);
	return &it->manifest;
}

/* Begins an attempt in "runs" and writes the file into it. */
static inline int checkpoint_begin(struct group_attempt *attempt, uint64_t step, const char *job,
				   const char *text, struct base_error *error)
{
	int ret = group_attempt_begin(attempt, "runs", step, NULL, job, NULL, error);

	return ret ? ret :
		     io_folder_put(&attempt->folder, "rank-00000.pt", text, strlen(text), error);
}

static inline int checkpoint_commit(struct group_attempt *attempt, const char *text,
				    bool no_replace, struct base_error *error)
{
	struct checkpoint_case it;

	return group_attempt_commit(attempt,
				    checkpoint_describe(&it, attempt->step, attempt->id, text),
				    no_replace, error);
}

/* Begins, commits and ends an attempt. If the commit fails, the attempt is abandoned. */
static inline int checkpoint_save(uint64_t step, const char *text, bool no_replace,
				  struct base_error *error)
{
	struct group_attempt attempt;
	int ret = checkpoint_begin(&attempt, step, CHECKPOINT_JOB, text, error);

	if (!ret)
		ret = checkpoint_commit(&attempt, text, no_replace, error);
	group_attempt_abandon(&attempt);
	return ret;
}

/* Returns whether "runs/NAME" is a complete checkpoint with this text. */
static inline bool checkpoint_is(const char *name, uint64_t step, const char *text)
{
	struct io_folder runs;
	struct group_checkpoint checkpoint;
	bool is = false;
	char path[512];

	if (io_folder_open(&runs, "runs", NULL))
		return false;
	if (!group_checkpoint_open(&checkpoint, &runs, name, step, NULL)) {
		snprintf(path, sizeof(path), "runs/%s/rank-00000.pt", name);
		is = scratch_same(path, text, strlen(text));
		group_checkpoint_close(&checkpoint);
	}
	io_folder_close(&runs);
	return is;
}

#endif
