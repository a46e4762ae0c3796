/* SPDX-License-Identifier: Apache-2.0 */
/* Saves on a fast disk of the node, and their copies at the destination. */
#define _GNU_SOURCE
#include "support/tier_case.h"

#include <pthread.h>
#include <sys/wait.h>

static char root[4096]; /* the user's folder on the tier */

static void setup(void)
{
	tier_setup();
	snprintf(root, sizeof(root), "%s/ioshape-%u", scratch_path("tier"), (unsigned)geteuid());
}

static struct test_case tests = { .name = "tier", .setup = setup, .teardown = tier_teardown };

static void save(const char *name, const struct sample *what)
{
	char *copy_path = place_of(name);

	ck_assert_int_eq(sample_save(context, copy_path, what, NULL), 0);
	free(copy_path);
	keep(name);
}

/* ---- Draining -------------------------------------------------------------------------------- */

TEST(tests, a_save_is_on_the_tier_until_it_is_drained)
{
	struct ioshape_tier_copy *copies;
	struct stat here, drained;
	size_t all, count;
	char *copy_path;

	save("a.pt", &sample);
	ck_assert_int_ne(access(there("a.pt"), F_OK), 0);
	ck_assert_int_eq(ioshape_tier_list(tier, &copies, &count), 0);
	ck_assert_uint_eq(count, 1);
	ck_assert_str_eq(copies->path, there("a.pt"));
	ck_assert_uint_eq(copies->number, 1);
	ck_assert_uint_eq(copies->directory, 0);
	must_hold(copies->copy_path, &sample);
	ck_assert_int_eq(stat(copies->copy_path, &here), 0);
	ck_assert_uint_eq(copies->bytes, (uint64_t)here.st_size);
	ck_assert_int_eq(copies->saved_s, here.st_mtime);
	free(copies);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	ck_assert_uint_eq(told.bytes, (uint64_t)here.st_size);
	must_hold(there("a.pt"), &sample);
	ck_assert_uint_eq(waiting(&all), 0);
	ck_assert_uint_eq(all, 1);
	/*
	 * The destination gets the time of the save, and the copy on the tier is still preferred.
	 */
	ck_assert_int_eq(stat(there("a.pt"), &drained), 0);
	ck_assert_int_eq(drained.st_mtime, here.st_mtime);
	ck_assert_int_eq(ioshape_tier_find(tier, there("a.pt"), &copy_path), 0);
	must_hold(copy_path, &sample);
	free(copy_path);
	ck_assert_int_eq(drain(), 0);
	ck_assert_str_eq(told.paths, "");
}

TEST(tests, another_tier_at_the_same_folder_goes_on)
{
	save("a.pt", &sample);
	save("b.pt", &other);
	ioshape_tier_free(tier);
	tier = open_tier(0, 0);
	ck_assert_uint_eq(waiting(NULL), 2);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &sample);
	must_hold(there("b.pt"), &other);
	/* The oldest copy is drained first. */
	ck_assert_ptr_nonnull(strstr(told.paths, "a.pt|"));
	ck_assert(strstr(told.paths, "a.pt|") < strstr(told.paths, "b.pt|"));
}

TEST(tests, of_two_saves_to_one_path_the_later_one_goes)
{
	save("a.pt", &sample);
	save("a.pt", &other);
	ck_assert_uint_eq(waiting(NULL), 1);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_OVERTAKEN], 1);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	must_hold(there("a.pt"), &other);
	/* A second drain replaces the destination. */
	save("a.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &sample);
}

TEST(tests, one_path_alone_can_be_drained)
{
	save("a.pt", &sample);
	save("b.pt", &other);
	ck_assert_int_eq(drain_with(NULL, there("b.pt")), 0);
	ck_assert_uint_eq(waiting(NULL), 1);
	ck_assert_int_ne(access(there("a.pt"), F_OK), 0);
	must_hold(there("b.pt"), &other);
}

TEST(tests, files_of_any_format_are_carried_with_their_checksums)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_reader_options reading = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	const char *const ends[] = { there("raw"), NULL };
	struct ioshape_reader *reader;
	struct ioshape_file *file;
	char *copy_path = place_of("raw");
	static char bytes[(3 << 20) + 17];

	memset(bytes, 'x', sizeof(bytes));
	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	ck_assert_int_eq(ioshape_file_open(context, copy_path, &options, &file), 0);
	ck_assert_int_eq(ioshape_file_write(file, bytes, sizeof(bytes)), 0);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
	keep("raw");
	ck_assert_int_eq(drain(), 0);
	ck_assert(scratch_same(ends[0], bytes, sizeof(bytes)));
	reading.any_format = 1;
	for (int i = 0; i < 2; i++) {
		ck_assert_int_eq(
			ioshape_reader_open(context, i ? copy_path : ends[0], &reading, &reader),
			0);
		ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
		ck_assert_uint_eq(info.checksums, 1);
		ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
		ioshape_reader_free(reader);
	}
	free(copy_path);
}

TEST(tests, safetensors_files_are_carried_with_their_statistics)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_reader_options reading = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_statistics found = IOSHAPE_STATISTICS_INIT;
	const float numbers[] = { 3, 4 };
	const int64_t shape = 2;
	const struct ioshape_tensor tensor = {
		.name = "w", .dtype = IOSHAPE_FLOAT32, .dims = 1, .shape = &shape, .data = numbers
	};
	struct ioshape_reader *reader;
	char *copy_path = place_of("w");

	options.format = IOSHAPE_FORMAT_SAFETENSORS;
	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	ck_assert_int_eq(ioshape_save_tensors(context, copy_path, &tensor, 1, &options, NULL), 0);
	keep("w");
	ck_assert_int_eq(drain(), 0);
	reading.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(context, there("w"), &reading, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_statistics(reader, 0, &found), 0);
	ck_assert_double_eq(found.sum_squares, 25);
	ioshape_reader_free(reader);
	free(copy_path);
}

/* Files smaller than a block: empty, and one byte. */
LOOP_TEST(tests, small_files_are_carried, 0, 2)
{
	char *copy_path = place_of("small");

	scratch_write(copy_path, "x", (size_t)_i);
	keep("small");
	ck_assert_int_eq(drain(), 0);
	ck_assert(scratch_same(there("small"), "x", (size_t)_i));
	free(copy_path);
}

static const mode_t umasks[] = { 022, 002, 077 };

/* The umask of the save counts, not that of the drain. A replaced file keeps its own mode. */
LOOP_TEST(tests, the_destination_has_the_mode_of_a_direct_save, 0, 3)
{
	const mode_t before = umask(umasks[_i]);
	struct stat status;

	save("a.pt", &sample);
	save("b.pt", &sample);
	ck_assert_int_eq(sample_save(context, there("b.pt"), &other, NULL), 0);
	ck_assert_int_eq(chmod(there("b.pt"), 0640), 0);
	shift_time(there("b.pt"), -60);
	umask(before);
	ck_assert_int_eq(drain(), 0);
	ck_assert_int_eq(stat(there("a.pt"), &status), 0);
	ck_assert_uint_eq(status.st_mode & 07777, 0666 & ~umasks[_i]);
	must_hold(there("b.pt"), &sample);
	ck_assert_int_eq(stat(there("b.pt"), &status), 0);
	ck_assert_uint_eq(status.st_mode & 07777, 0640);
}

static const char *const names[] = { "a\nb|c d\\", "\xff\xfe", "-", ".hidden", "1 2 /x" };

LOOP_TEST(tests, odd_names_are_names, 0, 5)
{
	if (_i == 4)
		ck_assert_int_eq(mkdir(there("1 2 "), 0777), 0);
	save(names[_i], &sample);
	ck_assert_int_eq(drain(), 0);
	must_hold(there(names[_i]), &sample);
}

TEST(tests, a_name_may_be_as_long_as_names_are)
{
	char name[256];

	memset(name, 'n', 255);
	name[255] = 0;
	save(name, &sample);
	ck_assert_int_eq(drain(), 0);
	must_hold(there(name), &sample);
	ck_assert(has_copy(name));
}

/* ---- Which version is newer ------------------------------------------------------------------ */

TEST(tests, what_is_newer_at_the_destination_stays)
{
	save("a.pt", &sample);
	ck_assert_int_eq(sample_save(context, there("a.pt"), &other, NULL), 0);
	shift_time(there("a.pt"), 5);
	ck_assert(!has_copy("a.pt"));
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_NEWER], 1);
	must_hold(there("a.pt"), &other);
	ck_assert_uint_eq(waiting(NULL), 0);
	ck_assert(!has_copy("a.pt"));
	/* A later save on the tier is newer again. */
	shift_time(there("a.pt"), -10);
	save("a.pt", &sample);
	ck_assert(has_copy("a.pt"));
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &sample);
}

TEST(tests, what_replaces_a_drained_one_is_nearest)
{
	save("a.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	ck_assert(has_copy("a.pt"));
	ck_assert_int_eq(sample_save(context, there("a.pt"), &other, NULL), 0);
	shift_time(there("a.pt"), 1);
	ck_assert(!has_copy("a.pt"));
	ck_assert(!has_copy("b.pt"));
}

/* What an earlier drain wrote is older than later saves, whatever the clock says. */
TEST(tests, a_clock_that_was_set_back_loses_no_save)
{
	char *copy_path;

	save("a.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	save("a.pt", &other);
	copy_path = place_of("a.pt");
	shift_time(copy_path, -3600);
	free(copy_path);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	must_hold(there("a.pt"), &other);
}

static bool meddled;

static int put_newer_there(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !meddled) {
		meddled = true;
		ck_assert_int_eq(sample_save(context, there("a.pt"), &other, NULL), 0);
		shift_time(there("a.pt"), 1);
	}
	return 0;
}

TEST(tests, what_comes_to_the_destination_meanwhile_stays)
{
	save("a.pt", &sample);
	ck_assert_int_eq(drain_with(put_newer_there, NULL), 0);
	ck_assert(meddled);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_NEWER], 1);
	must_hold(there("a.pt"), &other);
}

static int save_again(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !meddled) {
		meddled = true;
		save("a.pt", &other);
	}
	return 0;
}

TEST(tests, a_copy_that_is_replaced_while_it_is_drained_goes_too)
{
	save("a.pt", &sample);
	ck_assert_int_eq(drain_with(save_again, NULL), 0);
	ck_assert(meddled);
	must_hold(there("a.pt"), &other);
	ck_assert_uint_eq(waiting(NULL), 0);
	ck_assert(has_copy("a.pt"));
}

/* ---- Failures -------------------------------------------------------------------------------- */

TEST(tests, a_damaged_copy_is_never_carried)
{
	char *copy_path = place_of("a.pt");

	save("a.pt", &sample);
	save("b.pt", &other);
	flip(copy_path, LARGE / 2);
	for (int i = 0; i < 2; i++) {
		ck_assert_int_eq(drain(), IOSHAPE_E_DAMAGED);
		ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_FAILED], 1);
		ck_assert_ptr_nonnull(strstr(told.why, copy_path));
		ck_assert_int_ne(access(there("a.pt"), F_OK), 0);
		ck_assert_uint_eq(waiting(NULL), 1);
	}
	/* The failure did not stop the drain of the other copy. */
	must_hold(there("b.pt"), &other);
	free(copy_path);
}

TEST(tests, a_destination_that_is_missing_keeps_its_copy_waiting)
{
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	save("run/a.pt", &sample);
	save("b.pt", &sample);
	ck_assert_int_eq(rmdir(there("run")), 0);
	ck_assert_int_eq(drain(), -ENOENT);
	ck_assert_ptr_nonnull(strstr(told.why, "there/run"));
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_FAILED], 1);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("run/a.pt"), &sample);
}

TEST(tests, a_copy_that_is_gone_is_said)
{
	char *copy_path = place_of("a.pt");

	save("a.pt", &sample);
	ck_assert_int_eq(unlink(copy_path), 0);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_GONE], 1);
	ck_assert_int_eq(ioshape_tier_keep(tier, there("a.pt"), NULL), -ENOENT);
	free(copy_path);
}

/* ---- Forgetting copies ----------------------------------------------------------------------- */

TEST(tests, what_can_never_be_drained_is_forgotten_with_its_copy)
{
	uint64_t bytes = 0;
	struct stat status;
	char *copy_path, *gone;
	size_t all;

	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	save("run/a.pt", &sample);
	save("run/a.pt", &other);
	save("b.pt", &sample);
	copy_path = place_of("run/a.pt");
	gone = place_of("b.pt");
	ck_assert_int_eq(stat(copy_path, &status), 0);
	ck_assert_int_eq(rmdir(there("run")), 0);
	ck_assert_int_eq(drain_with(NULL, there("run/a.pt")), -ENOENT);
	ck_assert_int_eq(ioshape_tier_forget(tier, there("run/a.pt"), &bytes), 0);
	ck_assert_uint_eq(bytes, (uint64_t)status.st_size);
	ck_assert_int_ne(access(copy_path, F_OK), 0);
	ck_assert(!has_copy("run/a.pt"));
	ck_assert_uint_eq(waiting(&all), 1);
	ck_assert_uint_eq(all, 1);
	/* A copy whose file was removed by hand is forgotten, too. */
	ck_assert_int_eq(unlink(gone), 0);
	ck_assert_int_eq(ioshape_tier_forget(tier, there("b.pt"), &bytes), 0);
	ck_assert_uint_eq(bytes, 0);
	ck_assert_int_eq(drain(), 0);
	ck_assert_str_eq(told.paths, "");
	free(gone);
	free(copy_path);
}

TEST(tests, only_what_waits_is_forgotten)
{
	save("a.pt", &sample);
	ck_assert_int_eq(ioshape_tier_forget(tier, there("b.pt"), NULL), -ENOENT);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, there("b.pt")));
	ck_assert_int_eq(ioshape_tier_forget(tier, scratch_path("there"), NULL), -ENOENT);
	ck_assert_int_eq(ioshape_tier_forget(tier, "", NULL), -EINVAL);
	ck_assert_int_eq(ioshape_tier_forget(tier, NULL, NULL), -EINVAL);
	ck_assert_int_eq(drain(), 0);
	ck_assert_int_eq(ioshape_tier_forget(tier, there("a.pt"), NULL), -ENOENT);
	ck_assert(has_copy("a.pt"));
	/* The entry of a drained copy that was replaced on the tier is removed, too. */
	save("a.pt", &other);
	ck_assert_int_eq(ioshape_tier_forget(tier, there("a.pt"), NULL), 0);
	ck_assert(!has_copy("a.pt"));
	must_hold(there("a.pt"), &sample);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &sample);
}

/* The path in the list is accepted even if links on it lead elsewhere now. */
TEST(tests, what_was_kept_is_forgotten_by_the_name_that_it_was_kept_by)
{
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	save("run/a.pt", &sample);
	ck_assert_int_eq(rmdir(there("run")), 0);
	ck_assert_int_eq(symlink("elsewhere", there("run")), 0);
	ck_assert_int_eq(mkdir(there("elsewhere"), 0777), 0);
	ck_assert_int_eq(ioshape_tier_forget(tier, there("run/a.pt"), NULL), 0);
	ck_assert_uint_eq(waiting(NULL), 0);
}

static int forget_meanwhile(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done && !meddled) {
		meddled = true;
		ck_assert_int_eq(ioshape_tier_forget(tier, there("a.pt"), NULL), -EBUSY);
	}
	return 0;
}

TEST(tests, nothing_is_forgotten_during_a_drain)
{
	save("a.pt", &sample);
	ck_assert_int_eq(drain_with(forget_meanwhile, NULL), 0);
	ck_assert(meddled);
	must_hold(there("a.pt"), &sample);
}

/* ---- Stopped drains -------------------------------------------------------------------------- */

static int stop_in_the_middle(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	return phase == IOSHAPE_PHASE_WRITE && done > total / 2;
}

TEST(tests, a_drain_that_is_stopped_goes_on_later)
{
	save("a.pt", &sample);
	save("b.pt", &other);
	ck_assert_int_eq(drain_with(stop_in_the_middle, NULL), -ECANCELED);
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	ck_assert_uint_eq(waiting(NULL), 2);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &sample);
	must_hold(there("b.pt"), &other);
}

TEST(tests, what_is_no_entry_of_the_journal_is_left_alone)
{
	static const char *const garbage[] = { "x", "00000000000000000000", "1",
					       "00000000000000000002-1" };
	char path[8192], target[8192];

	snprintf(target, sizeof(target), "%s", there("target"));
	scratch_write(target, "target", 6);
	for (int i = 0; i < 4; i++) {
		snprintf(path, sizeof(path), "%s/journal/%s", root, garbage[i]);
		scratch_write(path, "garbage", 7);
	}
	/* Links with valid names whose targets are invalid or point outside. */
	snprintf(path, sizeof(path), "%s/journal/%020d", root, 3);
	ck_assert_int_eq(symlink(target, path), 0);
	snprintf(path, sizeof(path), "%s/journal/%020d", root, 4);
	ck_assert_int_eq(symlink("0 0 /a/../b", path), 0);
	snprintf(path, sizeof(path), "%s/journal/%020d", root, 5);
	ck_assert_int_eq(symlink("0 0 relative", path), 0);
	save("a.pt", &sample);
	ck_assert_uint_eq(waiting(NULL), 1);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	ck_assert(scratch_same(target, "target", 6));
	snprintf(path, sizeof(path), "%s/journal", root);
	ck_assert_uint_eq(scratch_entries(path), 8);
}

/* ---- Links that are created later ------------------------------------------------------------ */

#define SOMEBODY 65533

/* Replaces the file by a link of this user to "precious", which does not belong to the save. */
static void put_link(const char *name, uid_t user)
{
	const char *path = there(name);
	char aside[8192];

	snprintf(aside, sizeof(aside), "%s.aside", path);
	if (rename(path, aside))
		ck_assert_int_eq(errno, ENOENT);
	ck_assert_int_eq(symlink(there("precious"), path), 0);
	ck_assert_int_eq(lchown(path, user, user), 0);
}

static void save_old(const char *path)
{
	const struct timespec times[2] = { { .tv_sec = 1 }, { .tv_sec = 1 } };

	scratch_write(path, "precious", 8);
	ck_assert_int_eq(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* Neither a directory on the path nor the file itself may be such a link. */
LOOP_TEST(tests, a_link_of_another_user_leads_no_drain_elsewhere, 0, 2)
{
	const char *name = _i ? "run/a.pt" : "run/deep/a.pt";

	if (geteuid()) /* only root can create a link of another user */
		return;
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	ck_assert_int_eq(mkdir(there("run/deep"), 0777), 0);
	save(name, &sample);
	if (_i) {
		save_old(there("precious"));
		put_link(name, SOMEBODY);
	} else {
		ck_assert_int_eq(mkdir(there("precious"), 0777), 0);
		save_old(there("precious/a.pt"));
		put_link("run/deep", SOMEBODY);
	}
	ck_assert_int_eq(drain(), -EPERM);
	ck_assert_ptr_nonnull(strstr(told.why, "belongs to user 65533"));
	ck_assert(scratch_same(there(_i ? "precious" : "precious/a.pt"), "precious", 8));
	ck_assert_uint_eq(waiting(NULL), 1);
	/* The remedy that the error suggests. */
	ck_assert_int_eq(unlink(there(_i ? name : "run/deep")), 0);
	if (!_i)
		ck_assert_int_eq(mkdir(there("run/deep"), 0777), 0);
	ck_assert_int_eq(drain(), 0);
	must_hold(there(name), &sample);
}

/* An administrator who moves a filesystem leaves a link. */
TEST(tests, a_link_of_the_user_is_followed)
{
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	ck_assert_int_eq(mkdir(there("precious"), 0777), 0);
	save("run/a.pt", &sample);
	put_link("run", geteuid());
	ck_assert_int_eq(drain(), 0);
	must_hold(there("precious/a.pt"), &sample);
}

TEST(tests, what_would_be_led_elsewhere_is_not_saved_on_the_tier)
{
	char *copy_path = NULL;

	if (geteuid())
		return;
	save_old(there("precious"));
	put_link("a.pt", SOMEBODY);
	ck_assert_int_eq(ioshape_tier_path(tier, there("a.pt"), 1, &copy_path), -EPERM);
}

TEST(tests, paths_that_have_no_place_are_refused)
{
	struct ioshape_tier *none = tier;
	char *copy_path = NULL;

	ck_assert_int_eq(ioshape_tier_path(tier, there("gone/../x"), 0, &copy_path), -EINVAL);
	ck_assert_int_eq(ioshape_tier_path(tier, "/", 0, &copy_path), -EINVAL);
	ck_assert_int_eq(ioshape_tier_path(tier, "", 0, &copy_path), -EINVAL);
	ck_assert_int_eq(ioshape_tier_path(tier, NULL, 0, &copy_path), -EINVAL);
	ck_assert_int_eq(ioshape_tier_path(tier, root, 0, &copy_path), 0);
	free(copy_path);
	snprintf(told.paths, sizeof(told.paths), "%s/x", root);
	ck_assert_int_eq(ioshape_tier_path(tier, told.paths, 0, &copy_path), -EINVAL);
	ck_assert_ptr_null(copy_path);
	ck_assert_int_eq(ioshape_tier_open(context, there("none"), NULL, &none), -ENOENT);
	ck_assert_ptr_null(none);
}

/* Links on the path are resolved; components that do not exist are taken literally. */
TEST(tests, one_destination_has_one_place)
{
	char *one, *two;

	ck_assert_int_eq(symlink(scratch_path("there"), scratch_path("link")), 0);
	one = place_of("new/./x//a.pt");
	ck_assert_int_eq(ioshape_tier_path(tier, scratch_path("link/new/x/a.pt/"), 0, &two), 0);
	ck_assert_str_eq(one, two);
	free(one);
	free(two);
}

/* ---- Space ----------------------------------------------------------------------------------- */

static int place_for(uint64_t bytes)
{
	char *copy_path = NULL;
	const int ret = ioshape_tier_path(tier, there("new.pt"), bytes, &copy_path);

	ck_assert(!ret == (copy_path != NULL));
	free(copy_path);
	return ret;
}

TEST(tests, what_is_drained_makes_room_the_oldest_first)
{
	save("a.pt", &sample);
	save("b.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	save("c.pt", &sample);
	ioshape_tier_free(tier);
	tier = open_tier(4 * LARGE, 0);
	ck_assert_int_eq(place_for(LARGE / 2), 0);
	ck_assert(has_copy("a.pt"));
	ck_assert_int_eq(place_for(3 * LARGE / 2), 0);
	ck_assert(!has_copy("a.pt"));
	ck_assert(has_copy("b.pt"));
	/* Copies that wait stay. If too much space is needed, nothing is removed. */
	ck_assert_int_eq(place_for(3 * LARGE), -ENOSPC);
	ck_assert(has_copy("b.pt"));
	ck_assert_int_eq(place_for(5 * LARGE / 2), 0);
	ck_assert(!has_copy("b.pt"));
	ck_assert(has_copy("c.pt"));
	ck_assert_int_eq(drain(), 0);
	must_hold(there("c.pt"), &sample);
	ck_assert_int_eq(place_for(5 * LARGE), -ENOSPC);
}

TEST(tests, what_was_saved_again_and_waits_does_not_go)
{
	save("a.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	save("a.pt", &other);
	ioshape_tier_free(tier);
	tier = open_tier(LARGE, 0);
	ck_assert_int_eq(place_for(LARGE / 2), -ENOSPC);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &other);
}

/* A save that is not kept yet, at the path of a drained copy. */
TEST(tests, what_is_not_kept_yet_does_not_go)
{
	char *copy_path = place_of("a.pt");

	save("a.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	ck_assert_int_eq(sample_save(context, copy_path, &other, NULL), 0);
	ioshape_tier_free(tier);
	tier = open_tier(LARGE, 0);
	place_for(LARGE / 2);
	must_hold(copy_path, &other);
	keep("a.pt");
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &other);
	free(copy_path);
}

TEST(tests, so_many_drained_copies_stay_in_each_directory)
{
	ioshape_tier_free(tier);
	tier = open_tier(0, 2);
	ck_assert_int_eq(mkdir(there("run"), 0777), 0);
	save("a.pt", &sample);
	save("b.pt", &sample);
	save("run/a.pt", &sample);
	save("c.pt", &sample);
	ck_assert_int_eq(drain(), 0);
	ck_assert(!has_copy("a.pt"));
	ck_assert(has_copy("b.pt"));
	ck_assert(has_copy("c.pt"));
	ck_assert(has_copy("run/a.pt"));
	must_hold(there("a.pt"), &sample);
}

/* ---- Processes ------------------------------------------------------------------------------- */

static int use_all(void *unused)
{
	struct ioshape_tier *another;
	struct ioshape_tier_copy *copies;
	size_t count;
	char *copy_path;
	const int answers[] = {
		ioshape_tier_open(context, scratch_path("tier"), NULL, &another),
		ioshape_tier_path(tier, "/x", 0, &copy_path),
		ioshape_tier_keep(tier, "/x", NULL),
		ioshape_tier_find(tier, "/x", &copy_path),
		ioshape_tier_list(tier, &copies, &count),
		ioshape_tier_drain(tier, NULL),
		ioshape_tier_forget(tier, "/x", NULL),
	};
	int other_answers = 0;

	(void)unused;
	for (int i = 0; i < 7; i++)
		other_answers += answers[i] != -EPERM;
	ioshape_tier_free(tier);
	ioshape_context_free(context);
	scratch_leave_child(other_answers);
}

TEST(tests, a_forked_child_is_refused)
{
	int status;

	save("a.pt", &sample);
	status = scratch_in_child(use_all, NULL);
	ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status), "%x", (unsigned)status);
	ck_assert_int_eq(drain(), 0);
	must_hold(there("a.pt"), &sample);
}

TEST(tests, without_a_handle_calls_are_refused)
{
	struct ioshape_tier_copy *copies;
	size_t count;
	char *copy_path;

	ck_assert_int_eq(ioshape_tier_open(context, scratch_path("tier"), NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_tier_path(NULL, "/x", 0, &copy_path), -EINVAL);
	ck_assert_int_eq(ioshape_tier_keep(NULL, "/x", NULL), -EINVAL);
	ck_assert_int_eq(ioshape_tier_find(NULL, "/x", &copy_path), -EINVAL);
	ck_assert_int_eq(ioshape_tier_list(NULL, &copies, &count), -EINVAL);
	ck_assert_int_eq(ioshape_tier_drain(NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_tier_forget(NULL, "/x", NULL), -EINVAL);
	ioshape_tier_free(NULL);
}

static bool drains;

static int say_that_it_drains(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	const int *pipes = user;
	char byte = 0;

	(void)done, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE && !drains) {
		drains = true;
		if (write(pipes[1], &byte, 1) != 1 || read(pipes[2], &byte, 1) != 1)
			return 1;
	}
	return 0;
}

static int drain_in_a_process(void *pipes)
{
	struct ioshape_drain_options options = IOSHAPE_DRAIN_OPTIONS_INIT;
	int ret;

	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	tier = open_tier(0, 0);
	options.progress = say_that_it_drains;
	options.progress_user = pipes;
	ret = ioshape_tier_drain(tier, &options);
	ioshape_tier_free(tier);
	ioshape_context_free(context);
	scratch_leave_child(ret ? 1 : 0);
}

static int let_it_go_on(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	const int *pipes = user;
	char byte = 0;

	(void)done, (void)total;
	if (phase == IOSHAPE_PHASE_WAIT && !meddled) {
		meddled = true;
		return write(pipes[3], &byte, 1) != 1;
	}
	return 0;
}

TEST(tests, one_process_drains_and_others_wait_for_it)
{
	struct ioshape_drain_options options = IOSHAPE_DRAIN_OPTIONS_INIT;
	int pipes[4], status;
	pid_t child;
	char byte;

	save("a.pt", &sample);
	save("b.pt", &other);
	ck_assert_int_eq(pipe(pipes), 0);
	ck_assert_int_eq(pipe(pipes + 2), 0);
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child)
		drain_in_a_process(pipes);
	ck_assert_int_eq(read(pipes[0], &byte, 1), 1);
	/* The child holds the lock, and pauses until this process waits for it. */
	memset(&told, 0, sizeof(told));
	options.ended = ended;
	options.progress = let_it_go_on;
	options.progress_user = pipes;
	ck_assert_int_eq(ioshape_tier_drain(tier, &options), 0);
	ck_assert(meddled);
	ck_assert_str_eq(told.paths, "");
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
	must_hold(there("a.pt"), &sample);
	must_hold(there("b.pt"), &other);
}

#define SAVERS 4

static void *save_some(void *number)
{
	char name[64];

	for (int i = 0; i < 5; i++) {
		snprintf(name, sizeof(name), "%d-%d.pt", *(int *)number, i);
		/* The buffers of there() belong to one thread. */
		char path[4096], *copy_path;

		snprintf(path, sizeof(path), "%s/there/%s", scratch_directory(), name);
		if (ioshape_tier_path(tier, path, 0, &copy_path) ||
		    sample_save(context, copy_path, i % 2 ? &sample : &other, NULL) ||
		    ioshape_tier_keep(tier, path, NULL) || ioshape_tier_drain(tier, NULL))
			return number;
		free(copy_path);
	}
	return NULL;
}

TEST(tests, threads_save_and_drain_side_by_side)
{
	pthread_t threads[SAVERS];
	int numbers[SAVERS];
	char name[64];
	void *failed;

	for (int i = 0; i < SAVERS; i++) {
		numbers[i] = i;
		ck_assert_int_eq(pthread_create(&threads[i], NULL, save_some, &numbers[i]), 0);
	}
	for (int i = 0; i < SAVERS; i++) {
		ck_assert_int_eq(pthread_join(threads[i], &failed), 0);
		ck_assert_ptr_null(failed);
	}
	ck_assert_uint_eq(waiting(NULL), 0);
	for (int i = 0; i < 5 * SAVERS; i++) {
		snprintf(name, sizeof(name), "%d-%d.pt", i / 5, i % 5);
		must_hold(there(name), i % 5 % 2 ? &sample : &other);
	}
}
