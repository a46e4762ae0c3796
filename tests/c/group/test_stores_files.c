/* SPDX-License-Identifier: Apache-2.0 */
/* The file store: entries of its folder, and files that other users may have put there. */
#define _GNU_SOURCE
#include "io/io.h"
#include "support/check_main.h"
#include "support/store_case.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

static struct store_case stores;
static char folder[512];

static void setup(void)
{
	scratch_setup();
	store_case_begin(&stores, 1, 4);
	ck_assert_str_eq(stores.ops->id, "files");
	snprintf(folder, sizeof(folder), "%s/.ioshape-store-%s", scratch_directory(), stores.name);
}

static const char *in_folder(const char *name)
{
	static char path[1024];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	return path;
}

static struct test_case tests = { .name = "files", .setup = setup, .teardown = scratch_teardown };

TEST(tests, test_the_folder_is_ours_alone_and_goes_with_rank_0)
{
	struct store *one = store_case_open(&stores, 1), *zero = store_case_open(&stores, 0);
	struct stat stat_of;

	ck_assert(!stat(folder, &stat_of));
	ck_assert_uint_eq(stat_of.st_mode & 07777, 0700);
	store_case_put(one, "s1", "n", "x", 1);
	ck_assert(!stat(in_folder("s1.n"), &stat_of));
	ck_assert_uint_eq(stat_of.st_mode & 07777, 0600);
	ck_assert_uint_eq(scratch_entries(folder), 1);
	store_close(zero);
	ck_assert(access(folder, F_OK));
	/* A rank that puts after the end of rank 0 leaves no files. */
	ck_assert_int_eq(store_put(one, "s1", "m", "x", 1, NULL), IOSHAPE_E_COORDINATOR);
	store_wait(one, 10);
	ck_assert(access(folder, F_OK));
	/* A new rank 0 sees the messages that were put before. */
	zero = store_case_open(&stores, 0);
	store_case_put(one, "s2", "n", "x", 1);
	for (int i = 0; i < 40 && access(in_folder("s1.m"), F_OK); i++)
		store_wait(one, 250);
	store_case_expect(zero, "s1", "n", "x", 1);
	store_case_expect(zero, "s1", "m", "x", 1);
	store_close(one);
	ck_assert(!access(folder, F_OK));
	store_close(zero);
	ck_assert(access(folder, F_OK));
}

TEST(tests, test_a_removed_folder_is_made_again_by_rank_0)
{
	struct store *zero = store_case_open(&stores, 0), *one = store_case_open(&stores, 1);
	struct base_buffer body = { 0 };

	store_case_put(one, "s1", "n", "x", 1);
	store_case_put(zero, "s1", "m", "y", 1);
	scratch_remove(folder);
	ck_assert_int_eq(store_get(one, "s1", "m", &body, NULL), IOSHAPE_E_COORDINATOR);
	ck_assert(!store_case_look(zero, "s1", "n", &body));
	store_case_put(zero, "s1", "k", "z", 1);
	for (int i = 0;
	     i < 40 && (access(in_folder("s1.n"), F_OK) || access(in_folder("s1.m"), F_OK)); i++) {
		store_wait(one, 250);
		store_wait(zero, 250);
	}
	store_case_expect(zero, "s1", "n", "x", 1);
	store_case_expect(one, "s1", "m", "y", 1);
	store_case_expect(one, "s1", "k", "z", 1);
	store_close(one);
	store_close(zero);
	base_buffer_free(&body);
}

/* Heartbeats are put all the time, while the rank waits and while it does not. */
TEST(tests, test_a_lost_message_comes_back_while_others_are_put)
{
	struct store *zero = store_case_open(&stores, 0), *one = store_case_open(&stores, 1);
	uint64_t end;

	store_case_put(one, "s1", "want-1", "x", 1);
	for (int waits = 0; waits < 2; waits++) {
		ck_assert(!unlink(in_folder("s1.want-1")));
		end = base_now_ns() + base_ms_to_ns(2500);
		for (int i = 0; access(in_folder("s1.want-1"), F_OK); i++) {
			ck_assert_uint_lt(base_now_ns(), end);
			store_case_put(one, "life", "beat-1", &i, sizeof(i));
			if (waits)
				store_wait(one, 200);
			else
				usleep(200000);
		}
		store_case_expect(zero, "s1", "want-1", "x", 1);
	}
	store_close(one);
	store_close(zero);
}

TEST(tests, test_what_is_no_message_is_not_read)
{
	struct store *zero = store_case_open(&stores, 0);
	struct store_case_found found = { 0 };
	struct base_buffer body = { 0 };
	struct base_error error = { 0 };
	bool have[4] = { 0 };
	int fd;

	scratch_write(scratch_path("secret"), "secret", 6);
	ck_assert(!symlink(scratch_path("secret"), in_folder("s1.link")));
	ck_assert_int_eq(store_get(zero, "s1", "link", &body, NULL), -EPERM);
	ck_assert(!mkfifo(in_folder("s1.pipe"), 0600));
	ck_assert_int_eq(store_get(zero, "s1", "pipe", &body, NULL), -EPERM);
	ck_assert(!mkdir(in_folder("s1.folder"), 0700));
	ck_assert_int_eq(store_get(zero, "s1", "folder", &body, NULL), -EPERM);
	/* A sparse file that is too large; reading it must not allocate its size. */
	fd = open(in_folder("s1.large"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	ck_assert(!ftruncate(fd, 1l << 40));
	close(fd);
	ck_assert_int_eq(store_get(zero, "s1", "large", &body, NULL), -EFBIG);
	/* Names that only resemble those of ranks. */
	scratch_write(in_folder("s1.want-4"), "note of 4", 9);
	scratch_write(in_folder("s1.want-01"), "note of 1", 9);
	scratch_write(in_folder("s1.want-1x"), "note of 1", 9);
	scratch_write(in_folder("s1.want-"), "note of 0", 9);
	scratch_write(in_folder("s1.want-4294967297"), "note of 1", 9);
	scratch_write(in_folder("s1.want-99999999999999999999"), "note of 1", 9);
	scratch_write(in_folder(".s1.want-1"), "note of 1", 9);
	found.have = have;
	ck_assert_int_eq(store_collect(zero, "s1", "want", have, store_case_count, &found, &error),
			 0);
	ck_assert_uint_eq(found.calls, 0);
	/* A drop does not affect scopes whose name has this one as prefix. */
	store_case_put(zero, "s11", "n", "x", 1);
	store_drop(zero, "s1");
	ck_assert(access(in_folder("s1.link"), F_OK));
	store_case_expect(zero, "s11", "n", "x", 1);
	rmdir(in_folder("s1.folder"));
	store_close(zero);
	ck_assert(access(folder, F_OK));
	ck_assert(scratch_same(scratch_path("secret"), "secret", 6));
	base_buffer_free(&body);
}

TEST(tests, test_a_folder_of_others_is_not_used)
{
	struct base_error error = { 0 };
	struct store *store;

	ck_assert(!symlink(scratch_directory(), folder));
	ck_assert_int_lt(store_case_try(&stores, 0, 100, &store, &error), 0);
	ck_assert(!unlink(folder));
	scratch_write(folder, "", 0);
	ck_assert_int_lt(store_case_try(&stores, 1, 100, &store, NULL), 0);
	ck_assert(!unlink(folder));
	ck_assert(!mkdir(folder, 0700));
	ck_assert(!chmod(folder, 0777));
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(store_case_try(&stores, 0, 100, &store, &error), -EACCES);
	ck_assert_uint_eq(scratch_entries(folder), 0);
	ck_assert(!chmod(folder, 0700));
	if (!geteuid()) {
		ck_assert(!chown(folder, 12345, (gid_t)-1));
		ck_assert_int_eq(store_case_try(&stores, 0, 100, &store, NULL), -EACCES);
	}
}

TEST(tests, test_folders_of_dead_jobs_are_removed_after_a_day)
{
	const time_t now = time(NULL);
	const struct timespec old[2] = { { now - 25 * 3600, 0 }, { now - 25 * 3600, 0 } };
	const struct timespec young[2] = { { now - 23 * 3600, 0 }, { now - 23 * 3600, 0 } };
	char dead[600], alive[600], other[600], file[700];
	struct store *store;

	snprintf(dead, sizeof(dead), "%s/.ioshape-store-dead", scratch_directory());
	snprintf(alive, sizeof(alive), "%s/.ioshape-store-alive", scratch_directory());
	snprintf(other, sizeof(other), "%s/.other-store", scratch_directory());
	ck_assert(!mkdir(dead, 0700) && !mkdir(alive, 0700) && !mkdir(other, 0700));
	snprintf(file, sizeof(file), "%s/s1.n", dead);
	scratch_write(file, "x", 1);
	ck_assert(!utimensat(AT_FDCWD, dead, old, 0));
	ck_assert(!utimensat(AT_FDCWD, other, old, 0));
	ck_assert(!utimensat(AT_FDCWD, alive, young, 0));
	/* Only rank 0 removes old folders. */
	store = store_case_open(&stores, 1);
	ck_assert(!access(dead, F_OK));
	store_close(store);
	store = store_case_open(&stores, 0);
	ck_assert(access(dead, F_OK));
	ck_assert(!access(alive, F_OK));
	ck_assert(!access(other, F_OK));
	store_close(store);
}

/* A writer is killed again and again while it puts; the reader sees only whole messages. */
TEST(tests, test_messages_are_whole_whenever_the_writer_dies)
{
	static uint8_t bytes[300000];
	struct store *zero = store_case_open(&stores, 0);
	struct base_buffer body = { 0 };
	unsigned seen = 0;

	for (int round = 0; round < 20; round++) {
		const pid_t pid = fork();
		int status;

		if (!pid) {
			struct store *one = store_case_open(&stores, 1);

			for (unsigned i = 0;; i++) {
				memset(bytes, (int)i, sizeof(bytes));
				store_case_put(one, "s1", "n", bytes, sizeof(bytes));
			}
		}
		/* Lets the writer put some messages before it is killed. */
		for (const unsigned before = seen; seen < before + 30 + (unsigned)round % 5;) {
			if (!store_case_look(zero, "s1", "n", &body)) {
				/* The old message remains until the new one replaces it. */
				REQUIRE(!seen);
				continue;
			}
			seen++;
			REQUIRE(body.bytes == sizeof(bytes));
			REQUIRE(!memcmp(body.data, body.data + 1, body.bytes - 1));
		}
		kill(pid, SIGKILL);
		ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	}
	ck_assert_uint_gt(seen, 0);
	store_close(zero);
	ck_assert(access(folder, F_OK));
	base_buffer_free(&body);
}

TEST(tests, test_a_limit_of_file_sizes_is_an_error_and_no_signal)
{
	static const uint8_t bytes[20000];
	struct store *store = store_case_open(&stores, 0);
	struct base_error error = { 0 };
	struct rlimit before, small;

	ck_assert(!getrlimit(RLIMIT_FSIZE, &before));
	small = before;
	small.rlim_cur = 10000;
	ck_assert(!setrlimit(RLIMIT_FSIZE, &small));
	ck_assert_int_eq(store_put(store, "s1", "n", bytes, sizeof(bytes), &error), -EFBIG);
	ck_assert(!setrlimit(RLIMIT_FSIZE, &before));
	ck_assert_uint_eq(scratch_entries(folder), 0);
	store_close(store);
}
