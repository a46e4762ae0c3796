/* SPDX-License-Identifier: Apache-2.0 */
/* Which pools a host has: the files in a folder where anybody may put some. */
#define _GNU_SOURCE
#include "slots/slots.h"
#include "support/check_main.h"
#include "support/local_pool.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>

#define DAYS_S (24 * 3600L)

static struct test_case tests = { .name = "names",
				  .setup = folder_setup,
				  .teardown = folder_teardown };

static const char *path_of(const char *name)
{
	static char path[400];

	snprintf(path, sizeof(path), "%s/%s", pool_folder, name);
	return path;
}

static const char *file_of(const char *pool)
{
	char name[LOCAL_FILE_NAME_BYTES];

	local_file_name(name, pool);
	return path_of(name);
}

static void use_until_killed(void (*tell)(char), const char *name)
{
	void *pool = open_pool(name, 1, 15000);

	if (ask(pool, "a-1", 1))
		scratch_leave_child(8);
	tell('h');
	for (;;)
		pause();
}

/* A pool that only the killed have used. */
static void leave(const char *name, uint32_t capacity_set)
{
	struct ioshape_pool_settings settings = { .capacity = capacity_set };
	struct player player = start_player(use_until_killed, name);

	MUST(hear(&player) == 'h', "it does not begin");
	if (capacity_set) {
		void *pool = open_pool(name, 1, 15000);

		MUST(!slots_local.set(pool, &settings, &error), "%s", error.text);
		slots_local.close(pool);
	}
	end_player(&player, SIGKILL);
}

static void make_old(const char *path)
{
	const struct timespec times[2] = { { .tv_sec = time(NULL) - 2 * DAYS_S },
					   { .tv_sec = time(NULL) - 2 * DAYS_S } };

	MUST(!utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW), "no time");
}

static void must_list(const char *expected)
{
	void *pool = open_pool("p", 1, 15000);
	struct base_buffer names = { 0 };

	ck_assert_int_eq(slots_local.names(pool, &names, &error), 0);
	ck_assert_int_eq(base_buffer_append(&names, "", 1), 0);
	ck_assert_str_eq((char *)names.data, expected);
	base_buffer_free(&names);
	slots_local.close(pool);
}

static bool exists(const char *path)
{
	struct stat stat;

	return !lstat(path, &stat);
}

TEST(tests, what_is_no_file_of_a_pool_is_no_pool)
{
	char target[400], copied[400];
	uint8_t *content;
	size_t bytes;

	leave("q", 0);
	must_list("q\n");
	/* The file of one pool under the name of another; two names; a link; a folder; a word. */
	snprintf(copied, sizeof(copied), "%s", file_of("r"));
	content = scratch_read(file_of("q"), &bytes);
	scratch_write(copied, content, bytes);
	free(content);
	must_list("q\n");
	MUST(!unlink(copied), "it stays");
	snprintf(target, sizeof(target), "%s", file_of("q"));
	MUST(!link(target, copied), "no link");
	must_list("");
	MUST(!unlink(copied), "it stays");
	MUST(!symlink(target, copied), "no link");
	must_list("q\n");
	MUST(!unlink(copied), "it stays");
	MUST(!mkdir(copied, 0700), "no folder");
	must_list("q\n");
	MUST(!rmdir(copied), "it stays");
	scratch_write(copied, "text", 4);
	scratch_write(path_of("ioshape-.slots"), "text", 4);
	scratch_write(path_of("others-file.slots"), "text", 4);
	must_list("q\n");
}

TEST(tests, old_pools_that_nobody_uses_are_removed)
{
	leave("q", 0);
	make_old(file_of("q"));
	must_list("");
	ck_assert(!exists(file_of("q")));
}

/* What an operator has set is kept, whoever uses it. */
TEST(tests, old_pools_that_were_set_are_kept)
{
	leave("q", 3);
	make_old(file_of("q"));
	must_list("q\n");
	ck_assert(exists(file_of("q")));
}

/* As another user can do. */
static void hold_lock(void (*tell)(char), const char *path)
{
	const int fd = open(path, O_RDWR | O_CLOEXEC);
	struct flock whole = { .l_type = F_WRLCK, .l_whence = SEEK_SET };

	if (fd < 0 || fcntl(fd, F_SETLK, &whole))
		scratch_leave_child(8);
	tell('h');
	for (;;)
		pause();
}

TEST(tests, old_pools_that_somebody_has_open_are_kept)
{
	struct player player;

	leave("q", 0);
	player = start_player(stay_in, "a-1"); /* in "p" */
	ck_assert_int_eq(hear(&player), 'h');
	make_old(file_of("p"));
	make_old(file_of("q"));
	{
		void *pool = open_pool("z", 1, 15000);
		struct base_buffer names = { 0 };

		ck_assert_int_eq(slots_local.names(pool, &names, &error), 0);
		base_buffer_free(&names);
		slots_local.close(pool);
	}
	ck_assert(exists(file_of("p")) && !exists(file_of("q")));
	end_player(&player, SIGKILL);
}

TEST(tests, an_old_file_of_something_else_is_kept)
{
	struct player player;

	scratch_write(file_of("q"), "text", 4);
	make_old(file_of("q"));
	must_list("");
	ck_assert(exists(file_of("q")));
	unlink(file_of("q"));
	leave("q", 0);
	player = start_player(hold_lock, file_of("q"));
	ck_assert_int_eq(hear(&player), 'h');
	make_old(file_of("q"));
	must_list("q\n");
	ck_assert(exists(file_of("q")));
	end_player(&player, SIGKILL);
}

TEST(tests, a_folder_that_is_gone_is_an_error)
{
	void *pool = open_pool("p", 1, 15000);
	struct base_buffer names = { 0 };

	ck_assert_int_eq(rmdir(pool_folder), 0);
	ck_assert_int_eq(slots_local.names(pool, &names, &error), IOSHAPE_E_COORDINATOR);
	base_buffer_free(&names);
	slots_local.close(pool);
	ck_assert_int_eq(mkdir(pool_folder, 0700), 0);
}

/* A Redis may tell of more. */
TEST(tests, a_status_has_so_many_rows_and_no_more)
{
	const struct ioshape_member member = { .id = "id", .job = "job", .node = "node" };
	const struct ioshape_pool_job job = { .job = "job", .user = "user" };
	struct ioshape_pool_status *status;

	ck_assert_int_eq(slots_status_new(&status, "p", "redis", &error), 0);
	for (unsigned i = 0; i < 2 * SLOTS_LISTED; i++) {
		slots_status_add(status, i % 2, &member);
		slots_status_add(status, i % 2, &member);
		slots_status_add_job(status, &job);
	}
	ck_assert_uint_eq(status->holder_listed, SLOTS_LISTED);
	ck_assert_uint_eq(status->waiter_listed, SLOTS_LISTED);
	ck_assert_uint_eq(status->job_listed, SLOTS_LISTED_JOBS);
	ck_assert_str_eq(status->holders[SLOTS_LISTED - 1].node, "node");
	ck_assert_str_eq(status->waiters[SLOTS_LISTED - 1].id, "id");
	ck_assert_str_eq(status->jobs[SLOTS_LISTED_JOBS - 1].user, "user");
	ioshape_pool_status_free(status);
}

int main(void)
{
	return check_run("local_names");
}
