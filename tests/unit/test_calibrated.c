/* SPDX-License-Identifier: Apache-2.0 */
/* What is remembered of trials: as text, in the process, on disk; for how long, and for whom. */
#define _GNU_SOURCE
#include "ring/calibrate.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOUNT "lustre:scratch"
#define NOW 1800000000.0
#define DAY 86400.0

static struct ring_calibration sample(void)
{
	return (struct ring_calibration){
		.engine = IOSHAPE_ENGINE_URING_ASYNC,
		.bytes_per_s = 1900000000,
		.measured_at = NOW,
	};
}

static void same(const struct ring_calibration *a, const struct ring_calibration *b)
{
	ck_assert_int_eq(a->engine, b->engine);
	ck_assert_uint_eq(a->bytes_per_s, b->bytes_per_s);
	ck_assert(a->measured_at - b->measured_at < 0.01 && b->measured_at - a->measured_at < 0.01);
}

/* ---- Text ------------------------------------------------------------------------------------ */

static char text[RING_CALIBRATION_TEXT_BYTES];

static size_t print(const struct ring_calibration *calibration)
{
	size_t bytes = ring_calibration_print(MOUNT, calibration, text, sizeof(text));

	ck_assert_uint_gt(bytes, 0);
	ck_assert_uint_eq(bytes, strlen(text));
	return bytes;
}

static struct test_case texts = { .name = "text" };

TEST(texts, what_is_printed_is_parsed)
{
	struct ring_calibration given = sample(), got;

	ck_assert_int_eq(ring_calibration_parse(MOUNT, text, print(&given), &got), 0);
	same(&given, &got);
	ck_assert_uint_eq(ring_calibration_print(MOUNT, &given, text, strlen(text)), 0);
	ck_assert_uint_eq(ring_calibration_print(MOUNT, &given, text, 0), 0);
}

/* Whatever lies there, what comes of it can be used. */
static void parse_soundly(const char *bytes, size_t count)
{
	/* Exactly as long as the bytes, so that a sanitizer sees a read behind them. */
	char *copy = malloc(count + !count);
	struct ring_calibration got;

	memcpy(copy, bytes, count);
	if (!ring_calibration_parse(MOUNT, copy, count, &got)) {
		REQUIRE(got.engine >= IOSHAPE_ENGINE_URING && got.engine != IOSHAPE_ENGINE_NIL &&
			got.engine <= IOSHAPE_ENGINE_URING_ASYNC);
		REQUIRE(got.bytes_per_s && got.measured_at >= 0);
	}
	free(copy);
}

/* The text with one value in place of another. */
static int parse_with(const char *line, const char *instead)
{
	const struct ring_calibration given = sample();
	struct ring_calibration got;
	char changed[2 * sizeof(text)];
	char *at;

	print(&given);
	at = strstr(text, line);
	REQUIRE(at);
	*at = 0;
	snprintf(changed, sizeof(changed), "%s%s%s", text, instead, at + strlen(line));
	return ring_calibration_parse(MOUNT, changed, strlen(changed), &got);
}

TEST(texts, what_is_not_to_the_letter_is_refused)
{
	static const char *const changes[][2] = {
		{ "calibration 3", "calibration 2" },
		{ "mount " MOUNT, "mount other" },
		{ "mount " MOUNT "\n", "mount " MOUNT },
		{ "mount " MOUNT "\n", "mount " MOUNT "\n\n" },
		{ "uring-async", "auto" },
		{ "uring-async", "nil" },
		{ "uring-async", "uringx" },
		{ "uring-async", "uring-async-and-so-on" },
		{ "\nbytes_per_s 1900000000", "\nbytes_per_s 0" },
		{ "\nbytes_per_s 1900000000", "\nbytes_per_s 1000000000000001" },
		{ "\nbytes_per_s 1900000000", "\nbytes_per_s 99999999999999999999" },
		{ "\nbytes_per_s 1900000000", "\nbytes_per_s +1" },
		{ "measured_ms 1", "measured_ms 999999" },
	};

	ck_assert_int_eq(parse_with("bytes_per_s 1", "bytes_per_s 2"), 0);
	for (size_t i = 0; i < ARRAY_LENGTH(changes); i++)
		ck_assert_msg(parse_with(changes[i][0], changes[i][1]) == -EINVAL, "%s",
			      changes[i][1]);
}

TEST(texts, damaged_texts_do_no_harm)
{
	struct ring_calibration given = sample(), got;
	uint64_t state = 9;
	size_t bytes = print(&given);

	for (size_t i = 0; i < bytes; i++) {
		ck_assert_int_eq(ring_calibration_parse(MOUNT, text, i, &got), -EINVAL);
		parse_soundly(text, i);
	}
	for (unsigned round = 0; round < scratch_rounds(20000); round++) {
		char damaged[sizeof(text)];

		memcpy(damaged, text, bytes);
		for (unsigned n = 0; n <= round % 3; n++)
			damaged[test_random_below(&state, bytes)] = (char)test_random(&state);
		parse_soundly(damaged, bytes);
		damaged[test_random_below(&state, bytes)] =
			"0123456789 \n"[test_random_below(&state, 12)];
		parse_soundly(damaged, bytes - test_random_below(&state, 3));
	}
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static char cache[4096], unset_home[] = "HOME";
static struct ring_memory *memory;

/* As another context, which has nothing in memory yet. */
static void begin_anew(void)
{
	ring_memory_close(memory);
	ck_assert_int_eq(ring_memory_open(&memory, NULL), 0);
}

/* The folder of this test alone. Nothing is there yet. */
static void setup(void)
{
	scratch_setup();
	snprintf(cache, sizeof(cache), "%s", scratch_path("cache"));
	setenv("XDG_CACHE_HOME", cache, 1);
	begin_anew();
}

static void teardown(void)
{
	ring_memory_close(memory);
	memory = NULL;
	scratch_teardown();
}

static const char *file_of(const char *mount, const char *end)
{
	static char path[8192];

	snprintf(path, sizeof(path), "%s/ioshape/mounts/%016llx.v%u%s", cache,
		 (unsigned long long)base_hash_text(mount), RING_CALIBRATION_FORMAT, end);
	return path;
}

static int get(double now, struct ring_calibration *got)
{
	return ring_memory_get(memory, MOUNT, 0, now, got);
}

static struct test_case memories = { .name = "memory", .setup = setup, .teardown = teardown };

TEST(memories, it_is_remembered_in_memory_and_on_disk)
{
	struct ring_calibration given = sample(), got;
	struct stat status;

	ck_assert_int_eq(get(NOW, &got), -ENOENT);
	/* Looking makes no folder. */
	ck_assert_int_ne(access(cache, F_OK), 0);
	ring_memory_put(memory, MOUNT, &given);
	ck_assert_int_eq(get(NOW, &got), 0);
	same(&given, &got);
	ck_assert_int_eq(stat(file_of(MOUNT, ".txt"), &status), 0);
	ck_assert_uint_eq(status.st_mode & 077, 0);
	ck_assert_int_eq(stat(scratch_path("cache/ioshape/mounts"), &status), 0);
	ck_assert_uint_eq(status.st_mode & 077, 0);
}

TEST(memories, another_process_reads_it_from_disk)
{
	struct ring_calibration given = sample(), got;

	ring_memory_put(memory, MOUNT, &given);
	begin_anew();
	ck_assert_int_eq(get(NOW + 1, &got), 0);
	same(&given, &got);
	begin_anew();
	ck_assert_int_eq(unlink(file_of(MOUNT, ".txt")), 0);
	ck_assert_int_eq(get(NOW + 1, &got), -ENOENT);
}

TEST(memories, it_expires)
{
	struct ring_calibration given = sample(), got;

	ring_memory_put(memory, MOUNT, &given);
	for (int round = 0; round < 2; round++) {
		ck_assert_int_eq(get(NOW + 6.9 * DAY, &got), 0);
		ck_assert_int_eq(get(NOW + 7.1 * DAY, &got), -ENOENT);
		/* A clock that was wrong. */
		ck_assert_int_eq(get(NOW - 0.5 * 3600, &got), 0);
		ck_assert_int_eq(get(NOW - 2 * 3600, &got), -ENOENT);
		/* calibrate=again */
		ck_assert_int_eq(ring_memory_get(memory, MOUNT, NOW - 1, NOW, &got), 0);
		ck_assert_int_eq(ring_memory_get(memory, MOUNT, NOW + 1, NOW, &got), -ENOENT);
		/* The same for what is on disk. */
		begin_anew();
	}
}

TEST(memories, what_others_put_there_is_ignored)
{
	struct ring_calibration given = sample(), got;
	const char *path;

	/* Makes the folder. */
	ring_memory_put(memory, "other", &given);
	path = file_of(MOUNT, ".txt");
	scratch_write(path, "garbage\n", 8);
	ck_assert_int_eq(get(NOW, &got), -ENOENT);
	ck_assert_int_eq(truncate(path, 1 << 20), 0);
	ck_assert_int_eq(get(NOW, &got), -ENOENT);
	/* Of another mount with the same name of file, or put there by hand. */
	unlink(path);
	scratch_write(scratch_path("elsewhere"), text,
		      ring_calibration_print(MOUNT, &given, text, sizeof(text)));
	ck_assert_int_eq(symlink(scratch_path("elsewhere"), path), 0);
	ck_assert_int_eq(get(NOW, &got), -ENOENT);
	unlink(path);
	ck_assert_int_eq(mkfifo(path, 0600), 0);
	ck_assert_int_eq(get(NOW, &got), -ENOENT);
	/* And it is replaced. */
	ring_memory_put(memory, MOUNT, &given);
	begin_anew();
	ck_assert_int_eq(get(NOW, &got), 0);
}

static void remembers_alone(void)
{
	struct ring_calibration given = sample(), got;
	struct ring_turn turn;

	begin_anew();
	ring_memory_put(memory, MOUNT, &given);
	ck_assert_int_eq(get(NOW, &got), 0);
	ck_assert_int_eq(ring_memory_try(memory, MOUNT, NOW, &turn), 0);
	ring_memory_tried(memory, MOUNT, 0, &turn);
}

TEST(memories, without_a_folder_the_context_remembers_alone)
{
	struct stat status;

	scratch_write(scratch_path("file"), "", 0);
	setenv("XDG_CACHE_HOME", scratch_path("file"), 1);
	remembers_alone();
	ck_assert_int_eq(stat(scratch_path("file"), &status), 0);
	ck_assert(S_ISREG(status.st_mode));
	/* Nor is one made for a home that is not there; relative ones are to be ignored. */
	setenv("XDG_CACHE_HOME", "here", 1);
	setenv(unset_home, scratch_path("nobody"), 1);
	remembers_alone();
	ck_assert_int_ne(access("here", F_OK), 0);
	ck_assert_int_ne(access(scratch_path("nobody"), F_OK), 0);
	unsetenv("XDG_CACHE_HOME");
	unsetenv(unset_home);
	remembers_alone();
}

TEST(memories, a_home_has_a_cache)
{
	struct ring_calibration given = sample();

	ck_assert_int_eq(mkdir(scratch_path("home"), 0700), 0);
	unsetenv("XDG_CACHE_HOME");
	setenv(unset_home, scratch_path("home"), 1);
	begin_anew();
	ring_memory_put(memory, MOUNT, &given);
	snprintf(cache, sizeof(cache), "%s", scratch_path("home/.cache"));
	ck_assert_int_eq(access(file_of(MOUNT, ".txt"), F_OK), 0);
}

TEST(memories, more_mounts_than_it_has_room_for)
{
	struct ring_calibration given = sample(), got;
	char mount[64];

	setenv("XDG_CACHE_HOME", "nowhere", 1);
	unsetenv(unset_home);
	begin_anew();
	ring_memory_put(memory, MOUNT, &given);
	for (int i = 0; i < 100; i++) {
		snprintf(mount, sizeof(mount), "mount-%d", i);
		ring_memory_put(memory, mount, &given);
		ck_assert_int_eq(ring_memory_get(memory, mount, 0, NOW, &got), 0);
		/* What is used is kept. */
		ck_assert_int_eq(get(NOW, &got), 0);
	}
	ck_assert_int_eq(ring_memory_get(memory, "mount-0", 0, NOW, &got), -ENOENT);
}

/* ---- Turns ----------------------------------------------------------------------------------- */

static int child_tries(void *unused)
{
	struct ring_turn turn;
	int ret;

	(void)unused;
	begin_anew();
	ret = ring_memory_try(memory, MOUNT, NOW, &turn);

	return ret == -EBUSY ? 1 : ret ? 2 : 0;
}

TEST(memories, one_of_all_processes_tries)
{
	struct ring_turn turn, other;

	ck_assert_int_eq(ring_memory_try(memory, MOUNT, NOW, &turn), 0);
	ck_assert_int_eq(ring_memory_try(memory, MOUNT, NOW, &other), -EBUSY);
	ck_assert_int_eq(WEXITSTATUS(scratch_in_child(child_tries, NULL)), 1);
	/* Other mounts are no concern of it. */
	ck_assert_int_eq(ring_memory_try(memory, "other", NOW, &other), 0);
	ring_memory_tried(memory, "other", 0, &other);
	ring_memory_tried(memory, MOUNT, 0, &turn);
	ck_assert_int_eq(scratch_in_child(child_tries, NULL), 0);
	ck_assert_int_eq(ring_memory_try(memory, MOUNT, NOW, &turn), 0);
	/* It has failed. */
	ring_memory_tried(memory, MOUNT, NOW + 600, &turn);
	ck_assert_int_eq(ring_memory_try(memory, MOUNT, NOW + 599, &turn), -EBUSY);
	ck_assert_int_eq(ring_memory_try(memory, MOUNT, NOW + 600, &turn), 0);
	ring_memory_tried(memory, MOUNT, 0, &turn);
}

/* ---- What files have taught ------------------------------------------------------------------ */

TEST(memories, what_files_teach_belongs_to_their_device_and_their_kind)
{
	const struct fs_memory disk = { .device_major = 8 }, other = { .device_major = 9 };
	const struct ring_shape plain = { .block_bytes = 4 * MIB },
				striped = { .block_bytes = 4 * MIB, .targets = 8 },
				small = { .block_bytes = MIB };
	const struct ring_taught given = { 4 * MIB, 7, 2000000 };
	struct ring_taught got;

	ring_memory_learn(memory, &disk, &plain, &given);
	ring_memory_recall(memory, &disk, &plain, &got);
	ck_assert_uint_eq(got.request_bytes, given.request_bytes);
	ck_assert_uint_eq(got.window, given.window);
	ck_assert_uint_eq(got.least_ns, given.least_ns);
	ring_memory_recall(memory, &other, &plain, &got);
	ck_assert_uint_eq(got.window, 0);
	ring_memory_recall(memory, &disk, &striped, &got);
	ck_assert_uint_eq(got.window, 0);
	ring_memory_recall(memory, &disk, &small, &got);
	ck_assert_uint_eq(got.window, 0);
	/* Of many devices those that are used are kept. */
	for (unsigned i = 100; i < 200; i++) {
		ring_memory_learn(memory, &(struct fs_memory){ .device_major = i }, &plain, &given);
		ring_memory_recall(memory, &disk, &plain, &got);
		ck_assert_uint_eq(got.window, 7);
	}
	ring_memory_recall(memory, &(struct fs_memory){ .device_major = 100 }, &plain, &got);
	ck_assert_uint_eq(got.window, 0);
	/* Without a memory. */
	ring_memory_learn(NULL, &disk, &plain, &given);
	ring_memory_recall(NULL, &disk, &plain, &got);
	ck_assert_uint_eq(got.window, 0);
}

static void *use_all(void *seed)
{
	uint64_t state = (uint64_t)(uintptr_t)seed;
	struct ring_calibration given = sample(), got;
	const struct ring_shape shape = { .block_bytes = MIB };
	struct ring_taught taught = { MIB, 3, 1 };
	struct ring_turn turn;
	char mount[32];

	for (unsigned i = 0; i < 300; i++) {
		const struct fs_memory on = { .device_minor =
						      (unsigned)test_random_below(&state, 40) };

		snprintf(mount, sizeof(mount), "mount-%u", (unsigned)test_random_below(&state, 40));
		switch (test_random_below(&state, 5)) {
		case 0:
			ring_memory_put(memory, mount, &given);
			break;
		case 1:
			ring_memory_learn(memory, &on, &shape, &taught);
			break;
		case 2:
			ring_memory_recall(memory, &on, &shape, &taught);
			if (taught.window != 3 && taught.window)
				return seed;
			taught.window = 3;
			break;
		case 3:
			if (!ring_memory_try(memory, mount, NOW, &turn))
				ring_memory_tried(memory, mount, 0, &turn);
			break;
		default:
			if (!ring_memory_get(memory, mount, 0, NOW, &got) &&
			    got.bytes_per_s != given.bytes_per_s)
				return seed;
		}
	}
	return NULL;
}

TEST(memories, threads_share_it)
{
	pthread_t threads[4];
	void *failed;

	for (uintptr_t i = 0; i < ARRAY_LENGTH(threads); i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, use_all, (void *)(i + 1)), 0);
	for (size_t i = 0; i < ARRAY_LENGTH(threads); i++) {
		pthread_join(threads[i], &failed);
		ck_assert_ptr_null(failed);
	}
}

int main(void)
{
	return check_run("ring/calibrated");
}
