/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of a group as their readers see them. */
#define _GNU_SOURCE
#include "support/checkpoint_files.h"
#include "support/checkpoint_view.h"
#include "support/reader_info.h"
#include "support/sample.h"

#include <ioshape/group.h>

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANKS 3u

/* ---- Checkpoints with real shards ------------------------------------------------------------ */

/* Returns the seed of a rank's tensors. */
static uint64_t seed_of(uint64_t step, uint32_t rank)
{
	return step * 100 + rank + 1;
}

static void save_shard(const char *path, uint64_t step, uint32_t rank)
{
	struct sample sample;

	sample_make(&sample, seed_of(step, rank), 50000 + 1000 * rank);
	ck_assert_msg(
		!ioshape_save_tensors(context, path, sample.tensors, sample.count, NULL, NULL),
		"%s", message());
	sample_free(&sample);
}

static void save(uint64_t step, bool bundle)
{
	char paths[RANKS][64], *files[RANKS];
	struct group_attempt attempt;

	ck_assert_int_eq(
		group_attempt_begin(&attempt, "runs", step, NULL, CHECKPOINT_JOB, NULL, &error), 0);
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		snprintf(paths[rank], sizeof(paths[rank]), "./part-%u", rank);
		files[rank] = paths[rank];
		save_shard(files[rank], step, rank);
	}
	checkpoint_write(&attempt, !bundle, 1700000000 + (int64_t)step, files, RANKS);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static void check_shard(struct ioshape_checkpoint *checkpoint, uint64_t step, uint32_t rank)
{
	struct ioshape_load_request requests[SAMPLE_TENSORS] = { 0 };
	struct ioshape_reader *reader;
	struct sample sample;
	uint64_t count;
	void *loaded[SAMPLE_TENSORS];

	sample_make(&sample, seed_of(step, rank), 50000 + 1000 * rank);
	ck_assert_msg(!ioshape_checkpoint_open_shard(checkpoint, rank, NULL, &reader), "%s",
		      message());
	count = info_of_reader(reader).tensors;
	ck_assert_uint_eq(count, sample.count);
	for (size_t i = 0; i < count; i++) {
		loaded[i] = malloc(sample.bytes[i] + 1);
		requests[i] = (struct ioshape_load_request){ i, 0, sample.bytes[i], loaded[i] };
	}
	ck_assert_msg(!ioshape_reader_load(reader, requests, count), "%s",
		      ioshape_last_error()->sentence);
	for (size_t i = 0; i < count; i++) {
		REQUIRE(!memcmp(loaded[i], sample.expected[i], sample.bytes[i]));
		free(loaded[i]);
	}
	ioshape_reader_free(reader);
	sample_free(&sample);
}

static struct test_case reading = { .name = "reading", .setup = setup, .teardown = teardown };

LOOP_TEST(reading, every_rank_finds_its_shard, 0, 2)
{
	struct ioshape_checkpoint_info info = { .size = sizeof(info) };
	struct ioshape_shard_info shard = { .size = sizeof(shard) };
	struct ioshape_checkpoint *checkpoint;
	char path[512], name[FORMAT_SHARD_NAME_BYTES];
	uint64_t bytes = 0;
	unsigned before;

	save(7, _i);
	before = scratch_descriptors();
	checkpoint = open_latest();
	ck_assert_int_eq(ioshape_checkpoint_get_info(checkpoint, &info), 0);
	ck_assert_uint_eq(info.step, 7);
	ck_assert_uint_eq(info.ranks, RANKS);
	ck_assert_uint_eq(info.files, _i ? 1 : RANKS);
	ck_assert_int_eq(info.saved_s, 1700000007);
	ck_assert_int_eq(info.mode, _i ? IOSHAPE_MODE_RANK0 : IOSHAPE_MODE_EACH);
	snprintf(path, sizeof(path), "%s/runs/step-0000000007", scratch_directory());
	ck_assert_str_eq(info.path, path);
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		ck_assert_int_eq(ioshape_checkpoint_get_shard(checkpoint, rank, &shard), 0);
		format_shard_name(name, rank);
		ck_assert_str_eq(shard.name, name);
		snprintf(path, sizeof(path), "%s/%s", info.path, _i ? "ranks.zip" : name);
		ck_assert_str_eq(shard.file, path);
		ck_assert(_i ? shard.offset && !(shard.offset % CHECKPOINT_BOUNDARY) :
			       !shard.offset);
		bytes += shard.bytes;
		check_shard(checkpoint, 7, rank);
	}
	ck_assert(_i ? bytes < info.bytes : bytes == info.bytes);
	ck_assert_int_eq(ioshape_checkpoint_get_shard(checkpoint, RANKS, &shard), -ENOENT);
	ioshape_checkpoint_free(checkpoint);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

TEST(reading, the_path_holds_after_the_working_directory_changed)
{
	struct ioshape_checkpoint *checkpoint;

	save(7, false);
	checkpoint = open_latest();
	ck_assert_int_eq(chdir("/"), 0);
	check_shard(checkpoint, 7, 1);
	ioshape_checkpoint_free(checkpoint);
}

/*
 * Damages the checkpoint in one of several ways. Returns the error with which opening it must fail.
 */
static int damage(int how)
{
	char garbage[300];

	switch (how) {
	case 0:
		unlink(PLACE(3) "/manifest.json");
		return -ENOENT;
	case 1:
		memset(garbage, 'x', sizeof(garbage));
		scratch_write(PLACE(3) "/manifest.json", garbage, sizeof(garbage));
		return IOSHAPE_E_FORMAT;
	case 2:
		ck_assert_int_eq(truncate(PLACE(3) "/manifest.json", 40), 0);
		return IOSHAPE_E_DAMAGED;
	case 3:
		unlink(PLACE(3) "/rank-00001.pt");
		return IOSHAPE_E_DAMAGED;
	case 4:
		ck_assert_int_eq(truncate(PLACE(3) "/rank-00001.pt", 100), 0);
		return IOSHAPE_E_DAMAGED;
	case 5: /* a link to a file of the right size */
		ck_assert_int_eq(rename(PLACE(3) "/rank-00001.pt", "elsewhere"), 0);
		ck_assert_int_eq(symlink("../../elsewhere", PLACE(3) "/rank-00001.pt"), 0);
		return IOSHAPE_E_DAMAGED;
	case 6:
		scratch_remove(PLACE(3));
		ck_assert_int_eq(rename(PLACE(1), PLACE(3)), 0);
		return IOSHAPE_E_DAMAGED;
	case 7:
		unlink(PLACE(3) "/manifest.json");
		ck_assert_int_eq(mkfifo(PLACE(3) "/manifest.json", 0666), 0);
		return IOSHAPE_E_FORMAT;
	case 8:
		unlink(PLACE(3) "/manifest.json");
		ck_assert_int_eq(
			symlink("../step-0000000002/manifest.json", PLACE(3) "/manifest.json"), 0);
		return -ELOOP;
	}
	return 0;
}

/* Removes the serial number from a manifest, as version 0.1 wrote it. */
static void remove_serial(const char *path)
{
	struct base_buffer text = checkpoint_read(path);
	char *begin, *end, *tail;

	ck_assert_int_eq(base_buffer_append(&text, "", 1), 0);
	begin = strstr((char *)text.data, "  \"serial\"");
	ck_assert_ptr_nonnull(begin);
	end = strchr(begin, '\n') + 1;
	memmove(begin, end, strlen(end) + 1);
	tail = strstr((char *)text.data, "  \"crc32\": ");
	while ((begin = strstr(tail + 1, "  \"crc32\": ")))
		tail = begin;
	sprintf(tail, "  \"crc32\": \"%08x\"\n}\n",
		base_crc32(0, text.data, (size_t)(tail - (char *)text.data)));
	scratch_write(path, text.data, strlen((char *)text.data));
	base_buffer_free(&text);
}

TEST(reading, the_newest_is_what_was_saved_last_whatever_its_step)
{
	struct ioshape_checkpoint *checkpoint;

	save(1000, false);
	save(3000, false);
	save(1100, false);
	ck_assert_uint_eq(latest(), 1100);
	ck_assert_str_eq(steps(), "1000 3000 1100 ");
	ck_assert_int_eq(ioshape_checkpoint_open(context, "runs", 3000, &checkpoint), 0);
	ioshape_checkpoint_free(checkpoint);
	save(1000, false);
	ck_assert_uint_eq(latest(), 1000);
}

TEST(reading, those_of_version_0_1_are_ordered_by_time)
{
	/* Their times are in 2023: 1700000000 s plus as many seconds as the step. */
	save(3, false);
	save(2, false);
	remove_serial(PLACE(3) "/manifest.json");
	ck_assert_uint_eq(latest(), 2);
	remove_serial(PLACE(2) "/manifest.json");
	ck_assert_uint_eq(latest(), 3);
	ck_assert_str_eq(steps(), "2 3 ");
	save(1, false);
	ck_assert_uint_eq(latest(), 1);
	ck_assert_str_eq(steps(), "2 3 1 ");
}

LOOP_TEST(reading, one_that_does_not_hold_is_passed_over, 0, 9)
{
	struct ioshape_checkpoint *checkpoint;
	int expected, ret;
	unsigned before;

	save(1, false);
	save(2, false);
	save(3, false);
	before = scratch_descriptors();
	ck_assert_uint_eq(latest(), 3);
	expected = damage(_i);
	ck_assert_uint_eq(latest(), 2);
	ck_assert_str_eq(steps(), _i == 6 ? "2 " : "1 2 ");
	/* The renamed checkpoint does not count as the newest one. */
	if (expected != -ENOENT && _i != 6)
		ck_assert_msg(strstr(logged, "step-0000000003"), "%s", logged);
	ret = ioshape_checkpoint_open(context, "runs", 3, &checkpoint);
	ck_assert_msg(ret == expected || (_i == 2 && ret == IOSHAPE_E_FORMAT), "%d: %s", ret,
		      message());
	ck_assert_ptr_null(checkpoint);
	ck_assert_int_eq(ioshape_checkpoint_open(context, "runs", 2, &checkpoint), 0);
	ioshape_checkpoint_free(checkpoint);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

TEST(reading, where_there_is_none_the_answer_is_plain)
{
	struct ioshape_checkpoint *checkpoint;
	size_t count = 1;
	uint64_t *found;

	ck_assert_int_eq(ioshape_checkpoint_open(context, "nowhere", IOSHAPE_LATEST, &checkpoint),
			 -ENOENT);
	ck_assert_int_eq(ioshape_checkpoint_list(context, "nowhere", &found, &count), -ENOENT);
	ck_assert_int_eq(mkdir("runs", 0777), 0);
	ck_assert_int_eq(mkdir("runs/.step-0000000009.01234567-01234567-0123456789abcdef", 0777),
			 0);
	ck_assert_int_eq(ioshape_checkpoint_open(context, "runs", IOSHAPE_LATEST, &checkpoint),
			 -ENOENT);
	ck_assert_ptr_null(checkpoint);
	ck_assert_str_eq(steps(), "");
}

TEST(reading, one_that_stepped_aside_is_found)
{
	const char *aside = "runs/.replaced-step-0000000003.0123456789abcdef";
	struct ioshape_checkpoint *checkpoint;

	save(2, false);
	save(3, false);
	ck_assert_int_eq(rename(PLACE(3), aside), 0);
	ck_assert_uint_eq(latest(), 3);
	ck_assert_str_eq(steps(), "2 3 ");
	ck_assert_int_eq(ioshape_checkpoint_open(context, "runs", 3, &checkpoint), 0);
	check_shard(checkpoint, 3, 0);
	ioshape_checkpoint_free(checkpoint);
	/* When another checkpoint has this step, the renamed one counts as replaced. */
	ck_assert_int_eq(rename(aside, PLACE(3)), 0);
	save(3, false);
	ck_assert_str_eq(steps(), "2 3 ");
}

TEST(reading, a_reader_does_not_mix_old_and_new)
{
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;

	save(3, false);
	checkpoint = open_latest();
	save(3, false);
	ck_assert_int_eq(ioshape_checkpoint_open_shard(checkpoint, 0, NULL, &reader), -ESTALE);
	ck_assert_ptr_null(reader);
	ck_assert_str_ne(ioshape_last_error()->remedy, "");
	ck_assert_int_eq(ioshape_checkpoint_verify(checkpoint, NULL, NULL), -ESTALE);
	ioshape_checkpoint_free(checkpoint);
}

static int use_in_child(void *checkpoint)
{
	struct ioshape_checkpoint_info info = { .size = sizeof(info) };
	struct ioshape_reader *reader;
	int ret = ioshape_checkpoint_get_info(checkpoint, &info) != -EPERM ||
		  ioshape_checkpoint_open_shard(checkpoint, 0, NULL, &reader) != -EPERM ||
		  ioshape_checkpoint_verify(checkpoint, NULL, NULL) != -EPERM;

	ioshape_checkpoint_free(checkpoint);
	return ret;
}

TEST(reading, a_forked_child_touches_nothing)
{
	struct ioshape_checkpoint *checkpoint;

	save(3, false);
	checkpoint = open_latest();
	ck_assert_int_eq(scratch_in_child(use_in_child, checkpoint), 0);
	check_shard(checkpoint, 3, 0);
	ioshape_checkpoint_free(checkpoint);
}

TEST(reading, wrong_arguments_are_refused)
{
	struct ioshape_checkpoint_info info = { .size = 4096 };
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;
	uint64_t *found;
	size_t count;

	save(3, false);
	ck_assert_int_eq(ioshape_checkpoint_open(context, NULL, 1, &checkpoint), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_open(context, "runs", 1, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_open(NULL, "runs", 1, &checkpoint), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_list(context, NULL, &found, &count), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_list(context, "runs", NULL, &count), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_prune(context, NULL, NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_get_info(NULL, &info), -EINVAL);
	checkpoint = open_latest();
	ck_assert_int_eq(ioshape_checkpoint_get_info(checkpoint, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_get_shard(checkpoint, 0, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_checkpoint_open_shard(checkpoint, 0, NULL, NULL), -EINVAL);
	options.file_offset = 1;
	ck_assert_int_eq(ioshape_checkpoint_open_shard(checkpoint, 0, &options, &reader), -EINVAL);
	ioshape_checkpoint_free(checkpoint);
	ioshape_checkpoint_free(NULL);
	ioshape_free(NULL);
}

/* ---- Verifying ------------------------------------------------------------------------------- */

static int verify(ioshape_progress_fn progress, void *user)
{
	struct ioshape_checkpoint *checkpoint = open_latest();
	int ret = ioshape_checkpoint_verify(checkpoint, progress, user);

	ioshape_checkpoint_free(checkpoint);
	return ret;
}

struct progress {
	uint64_t done, total, calls, stop_after;
};

static int see_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct progress *progress = user;

	REQUIRE(phase == IOSHAPE_PHASE_READ);
	REQUIRE(done >= progress->done && done <= total);
	REQUIRE(!progress->total || total == progress->total);
	progress->done = done;
	progress->total = total;
	return ++progress->calls == progress->stop_after;
}

static struct test_case verifying = { .name = "verifying", .setup = setup, .teardown = teardown };

LOOP_TEST(verifying, all_is_read_and_compared, 0, 2)
{
	struct progress progress = { 0 };

	save(3, _i);
	ck_assert_msg(!verify(see_progress, &progress), "%s", message());
	ck_assert_uint_gt(progress.total, RANKS * 50000);
	ck_assert_uint_ge(progress.calls, RANKS);
	progress = (struct progress){ .stop_after = 3 };
	ck_assert_int_eq(verify(see_progress, &progress), -ECANCELED);
	ck_assert_uint_eq(progress.calls, 3);
}

static void flip(const char *path, size_t at)
{
	char byte;
	int fd = open(path, O_RDWR | O_CLOEXEC);

	ck_assert_int_eq(pread(fd, &byte, 1, (off_t)at), 1);
	byte ^= 1;
	ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)at), 1);
	close(fd);
}

LOOP_TEST(verifying, a_changed_bit_is_found_wherever_it_is, 0, 2)
{
	const char *path = _i ? PLACE(3) "/ranks.zip" : PLACE(3) "/rank-00001.pt";
	struct stat status;

	save(3, _i);
	ck_assert_int_eq(stat(path, &status), 0);
	/* Offsets from the first byte to the last, including those between shards. */
	for (off_t at = 0; at < status.st_size; at += status.st_size / 40) {
		flip(path, (size_t)at);
		ck_assert_int_eq(verify(NULL, NULL), IOSHAPE_E_DAMAGED);
		ck_assert_str_eq(ioshape_last_error()->path, scratch_path(path));
		flip(path, (size_t)at);
	}
	flip(path, (size_t)status.st_size - 1);
	ck_assert_int_eq(verify(NULL, NULL), IOSHAPE_E_DAMAGED);
	flip(path, (size_t)status.st_size - 1);
	ck_assert_int_eq(verify(NULL, NULL), 0);
}
