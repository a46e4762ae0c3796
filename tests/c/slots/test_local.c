/* SPDX-License-Identifier: Apache-2.0 */
/* Slots among the processes of one host, with real processes that die. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/local_pool.h"
#include "support/random.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>

static unsigned entries(void)
{
	char command[160];
	unsigned count = 0;
	FILE *listing;

	snprintf(command, sizeof(command), "ls -A %s | wc -l", pool_folder);
	listing = popen(command, "r");
	MUST(listing && fscanf(listing, "%u", &count) == 1, "no listing");
	pclose(listing);
	return count;
}

static struct test_case tcase = { .name = "local",
				  .setup = folder_setup,
				  .teardown = folder_teardown };

TEST(tcase, an_abandoned_pool_leaves_nothing_behind)
{
	void *pool, *other;

	umask(077);
	pool = open_pool("p", 1, 15000);
	ck_assert_uint_eq(entries(), 0);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_uint_eq(entries(), 1);
	other = open_pool("p", 1, 15000);
	ck_assert_int_eq(ask(other, "b-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	ck_assert_uint_eq(entries(), 1);
	slots_local.close(other);
	ck_assert_uint_eq(entries(), 1);
	slots_local.close(pool);
	ck_assert_uint_eq(entries(), 0);
}

TEST(tcase, the_file_is_for_all_users_whatever_the_umask)
{
	struct stat stat_of;
	void *pool;

	umask(077);
	pool = open_pool("p", 1, 15000);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(stat(pool_file, &stat_of), 0);
	ck_assert_uint_eq(stat_of.st_mode & 07777, 0666);
	slots_local.close(pool);
}

static void *release_soon(void *pool)
{
	usleep(20000);
	give_back(pool, "a-1");
	return NULL;
}

TEST(tcase, a_release_wakes_the_next_at_once)
{
	void *first = open_pool("p", 1, 15000), *second = open_pool("p", 1, 15000);
	pthread_t thread;

	for (int i = 0; i < 5; i++) {
		uint64_t began;

		ck_assert_int_eq(ask(first, "a-1", 1), 0);
		ck_assert_int_eq(ask(second, "b-1", 1), 0);
		ck_assert_int_eq(answer.state, SLOTS_WAITING);
		ck_assert_uint_le(answer.beat_ms, 20);
		/* An earlier event ends the first wait at once. */
		ck_assert_int_eq(slots_local.wait(second, 0, &error), 0);
		ck_assert_int_eq(base_start_thread(&thread, release_soon, first), 0);
		began = base_now_ns();
		/* Only a wake-up can end the wait so early. */
		ck_assert_int_eq(slots_local.wait(second, 20000, &error), 0);
		ck_assert_double_lt(ms_since(began), 20000);
		pthread_join(thread, NULL);
		ck_assert_int_eq(look(second, "b-1"), 0);
		ck_assert_int_eq(answer.state, SLOTS_HOLDING);
		give_back(second, "b-1");
	}
	slots_local.close(second);
	slots_local.close(first);
}

/* Waits for two seconds. Returns how many milliseconds it took. */
static void *wait_long(void *pool)
{
	const uint64_t began = base_now_ns();

	MUST(!slots_local.wait(pool, 2000, NULL), "no wait");
	return (void *)(uintptr_t)ms_since(began);
}

/* Waking hundreds of waiters at each release would keep the processors busy. */
TEST(tcase, a_release_wakes_no_waiter_but_the_next)
{
	void *mine = open_pool("p", 1, 15000), *first = open_pool("p", 1, 15000);
	void *second = open_pool("p", 1, 15000), *waited = NULL;
	pthread_t thread;

	/* On a busy machine the thread may begin to wait only after the release. */
	for (int i = 0; i < 5 && (uintptr_t)waited < 1990; i++) {
		ck_assert_int_eq(ask(mine, "m-1", 1), 0);
		ck_assert_int_eq(ask(first, "a-1", 1), 0);
		ck_assert_int_eq(ask(second, "b-1", 1), 0);
		ck_assert_uint_eq(answer.position, 1);
		ck_assert_int_eq(slots_local.wait(second, 0, &error), 0);
		ck_assert_int_eq(base_start_thread(&thread, wait_long, second), 0);
		usleep(300000);
		give_back(mine, "m-1");
		ck_assert_int_eq(slots_local.wait(first, 20000, &error), 0);
		/* After the first has looked, the second is the next in the queue. */
		pthread_join(thread, &waited);
		ck_assert_int_eq(look(first, "a-1"), 0);
		give_back(second, "b-1");
		give_back(first, "a-1");
	}
	ck_assert_uint_ge((uintptr_t)waited, 1990);
	slots_local.close(second);
	slots_local.close(first);
	slots_local.close(mine);
}

TEST(tcase, an_interrupt_ends_this_wait_or_the_next)
{
	void *pool = open_pool("p", 1, 15000);
	uint64_t began = base_now_ns();

	/* The first request opens the file, which has the word that ends waits. */
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	slots_local.interrupt(pool);
	ck_assert_int_eq(slots_local.wait(pool, 20000, &error), 0);
	ck_assert_double_lt(ms_since(began), 20000);
	began = base_now_ns();
	ck_assert_int_eq(slots_local.wait(pool, 30, &error), 0);
	ck_assert_double_ge(ms_since(began), 29);
	slots_local.close(pool);
}

TEST(tcase, a_killed_holder_gives_its_slot_to_the_next_long_before_its_lease_ends)
{
	void *pool = open_pool("p", 1, 15000);

	for (int i = 0; i < 3; i++) {
		struct player holder = start_player(stay_in, "h-1");

		ck_assert_int_eq(hear(&holder), 'h');
		ck_assert_int_eq(ask(pool, "a-1", 1), 0);
		ck_assert_int_eq(answer.state, SLOTS_WAITING);
		wait_for_slot(pool, "a-1", 50);
		ck_assert_int_eq(answer.state, SLOTS_WAITING);
		end_player(&holder, SIGKILL);
		wait_for_slot(pool, "a-1", 5000);
		ck_assert_int_eq(answer.state, SLOTS_HOLDING);
		ck_assert_int_eq(give_back(pool, "a-1"), 0);
	}
	slots_local.close(pool);
	ck_assert_uint_eq(entries(), 0);
}

/* Holds a slot in a PID namespace, where process IDs differ from those here. */
static void stay_in_another_namespace(void (*tell)(char), const char *id)
{
	if (unshare(CLONE_NEWPID) && unshare(CLONE_NEWUSER | CLONE_NEWPID)) {
		tell('-');
		return;
	}
	if (!fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		stay_in(tell, id);
	}
	for (;;)
		pause();
}

TEST(tcase, a_holder_in_another_pid_namespace_is_seen_to_live_and_to_die)
{
	void *pool = open_pool("p", 1, 15000);
	struct player holder;
	char told;

	ck_assert_int_eq(ask(pool, "a-0", 1), 0);
	ck_assert_int_eq(give_back(pool, "a-0"), 0);
	holder = start_player(stay_in_another_namespace, "h-1");
	told = hear(&holder);
	if (told == '-') {
		fprintf(stderr, "skipped: no namespaces can be made here\n");
		end_player(&holder, 0);
	} else {
		ck_assert_int_eq(told, 'h');
		ck_assert_int_eq(ask(pool, "a-1", 1), 0);
		ck_assert_int_eq(answer.state, SLOTS_WAITING);
		wait_for_slot(pool, "a-1", 100);
		ck_assert_int_eq(answer.state, SLOTS_WAITING);
		end_player(&holder, SIGKILL);
		wait_for_slot(pool, "a-1", 5000);
		ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	}
	slots_local.close(pool);
}

TEST(tcase, killed_waiters_are_passed_over)
{
	void *pool = open_pool("p", 1, 15000), *mine = open_pool("p", 1, 15000);
	struct player waiters[5];
	char ids[5][8];

	ck_assert_int_eq(ask(mine, "m-1", 1), 0);
	for (int i = 0; i < 5; i++) {
		snprintf(ids[i], sizeof(ids[i]), "w%d-1", i);
		waiters[i] = start_player(stay_in, ids[i]);
		ck_assert_int_eq(hear(&waiters[i]), 'w');
	}
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_uint_eq(answer.position, 5);
	ck_assert_uint_le(answer.beat_ms, 200);
	for (int i = 0; i < 5; i++)
		end_player(&waiters[i], SIGKILL);
	ck_assert_int_eq(give_back(mine, "m-1"), 0);
	ck_assert_int_eq(look(pool, "a-1"), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
	slots_local.close(mine);
}

/* Takes and releases slots forever, as fast as possible. */
static void take_turns(void (*tell)(char), const char *argument)
{
	void *pool = open_pool("p", 2, 15000);
	char id[40];

	(void)tell;
	for (unsigned i = 0;; i++) {
		snprintf(id, sizeof(id), "%s%d-%u", argument, (int)getpid(), i);
		if (ask(pool, id, 1))
			scratch_leave_child(7);
		if (i % 4)
			wait_for_slot(pool, id, 5);
		give_back(pool, id);
	}
}

TEST(tcase, kills_at_any_moment_leave_a_usable_state_and_no_slot_used)
{
	static const char *const names[] = { "a", "b", "c", "d" };
	void *pool = open_pool("p", 2, 15000);
	struct player players[4];
	uint64_t seed = 5, fence = 0;
	char id[40];

	for (int i = 0; i < 4; i++)
		players[i] = start_player(take_turns, names[i]);
	for (int i = 0; i < 300; i++) {
		const uint64_t victim = test_random_below(&seed, 4);

		snprintf(id, sizeof(id), "me-%d", i);
		ck_assert_msg(!ask(pool, id, 1), "%s", error.text);
		wait_for_slot(pool, id, 10000);
		ck_assert_int_eq(answer.state, SLOTS_HOLDING);
		ck_assert_uint_gt(answer.fence, fence);
		fence = answer.fence;
		ck_assert_msg(!give_back(pool, id), "%s", error.text);
		usleep((useconds_t)test_random_below(&seed, 3000));
		ck_assert(WIFSIGNALED(end_player(&players[victim], SIGKILL)));
		players[victim] = start_player(take_turns, names[victim]);
	}
	for (int i = 0; i < 4; i++)
		end_player(&players[i], SIGKILL);
	ck_assert_uint_eq(pool_warnings, 0);
	/* A request finds the slots that the last dead processes held. */
	ck_assert_int_eq(ask(pool, "last", 2), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_int_eq(give_back(pool, "last"), 0);
	/* A request for more than all slots is granted when no other is held. */
	ck_assert_int_eq(ask(pool, "all", 1000), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
}

TEST(tcase, whatever_is_written_into_the_file_the_next_call_goes_on)
{
	void *pool = open_pool("p", 2, 15000);
	uint64_t seed = 17, fence = 0;
	uint8_t bytes[8192];
	char id[40];
	int fd;

	ck_assert_int_eq(ask(pool, "first", 1), 0);
	fd = open(pool_file, O_RDWR | O_CLOEXEC);
	for (int i = 0; i < 200; i++) {
		test_random_fill(&seed, bytes, sizeof(bytes));
		if (i % 4 == 0)
			REQUIRE(!ftruncate(fd, (off_t)test_random_below(&seed, 5000)));
		else if (i % 4 == 1)
			REQUIRE(pwrite(fd, bytes, sizeof(bytes), 0) == sizeof(bytes));
		else if (i % 4 == 2)
			REQUIRE(!ftruncate(fd, (off_t)GIB) && pwrite(fd, bytes, 4096, 0) == 4096);
		snprintf(id, sizeof(id), "a-%d", i);
		ck_assert_msg(!ask(pool, id, 2), "%s", error.text);
		give_back(pool, "first");
		REQUIRE(!look(pool, id) && answer.state == SLOTS_HOLDING);
		REQUIRE(answer.fence > fence);
		fence = answer.fence;
		REQUIRE(!give_back(pool, id));
	}
	ck_assert_uint_gt(pool_warnings, 50);
	close(fd);
	slots_local.close(pool);
}

static void require_untouched(const char *path, mode_t mode, const char *content)
{
	struct stat stat_of;
	char found[64] = "";
	int fd;

	ck_assert_int_eq(stat(path, &stat_of), 0);
	ck_assert_uint_eq(stat_of.st_mode & 07777, mode);
	ck_assert_uint_eq((uint64_t)stat_of.st_size, strlen(content));
	fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(read(fd, found, sizeof(found) - 1), (ssize_t)strlen(content));
	ck_assert_str_eq(found, content);
	close(fd);
}

static void write_private(const char *path, const char *content)
{
	int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(write(fd, content, strlen(content)), (ssize_t)strlen(content));
	close(fd);
}

static void overwrite(size_t at, const void *data, size_t bytes)
{
	int fd = open(pool_file, O_RDWR | O_CLOEXEC);

	MUST(fd >= 0 && pwrite(fd, data, bytes, (off_t)at) == (ssize_t)bytes, "not overwritten");
	close(fd);
}

TEST(tcase, a_damaged_head_costs_no_slot)
{
	const uint64_t wrong = UINT64_MAX;
	void *pool = open_pool("p", 1, 15000);
	uint64_t fence;

	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	fence = answer.fence;
	overwrite(offsetof(struct slots_file_head, base_ns), &wrong, sizeof(wrong));
	ck_assert_int_eq(ask(pool, "a-2", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	ck_assert_uint_eq(pool_warnings, 1);
	ck_assert_int_eq(look(pool, "a-1"), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	give_back(pool, "a-1");
	ck_assert_int_eq(look(pool, "a-2"), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_uint_gt(answer.fence, fence);
	ck_assert_uint_eq(pool_warnings, 1);
	slots_local.close(pool);
	ck_assert_uint_eq(entries(), 0);
}

/* Changes some fields of the slot file, in the head and in records of holders and waiters. */
static void forge(int fd, uint64_t *seed)
{
	static const uint32_t numbers[] = { LOCAL_SMALL, LOCAL_FIRST_SLOT, LOCAL_FIRST_SLOT + 1,
					    LOCAL_HOLDERS + LOCAL_WAITERS,
					    LOCAL_HOLDERS + LOCAL_WAITERS + 1 };

	for (uint64_t i = 1 + test_random_below(seed, 4); i; i--) {
		const uint64_t which = test_random_below(seed, 6);
		const bool head = which == 5;
		const size_t from =
			head ? 0 :
			       LOCAL_HEAD_BYTES + numbers[which] * sizeof(struct slots_file_record);
		const size_t room = head ? sizeof(struct slots_file_head) :
					   sizeof(struct slots_file_record);
		const uint8_t value =
			(uint8_t)(test_random_below(seed, 2) ? test_random(seed) : 0xff);

		REQUIRE(pwrite(fd, &value, 1, (off_t)(from + test_random_below(seed, room))) == 1);
	}
}

TEST(tcase, forged_contents_crash_no_process_and_give_no_slot_twice)
{
	void *pool = open_pool("p", 1, 15000), *other = open_pool("p", 1, 15000);
	const uint32_t one = 1;
	uint64_t seed = 23;
	char id[40];
	int fd;

	ck_assert_int_eq(ask(pool, "first", 1), 0);
	fd = open(pool_file, O_RDWR | O_CLOEXEC);
	for (int i = 0; i < 5000; i++) {
		snprintf(id, sizeof(id), "a-%d", i);
		REQUIRE(!ask(i % 2 ? pool : other, id, 1 + i % 3));
		forge(fd, &seed);
		REQUIRE(!look(i % 2 ? pool : other, id));
		REQUIRE(!look(pool, "first"));
		REQUIRE(!give_back(i % 2 ? pool : other, id));
		/* The lock counts, whatever the file contains. */
		if (i % 16 == 0) {
			REQUIRE(pwrite(fd, &one, sizeof(one),
				       offsetof(struct slots_file_head, capacity)) == sizeof(one));
			if (!look(pool, "first") && answer.state == SLOTS_HOLDING) {
				REQUIRE(!ask(other, "second", 1));
				REQUIRE(answer.state == SLOTS_WAITING);
				REQUIRE(!give_back(other, "second"));
			}
		}
	}
	close(fd);
	slots_local.close(pool);
	slots_local.close(other);
}

/* Locks the file for good, as another user can. */
static void keep_locked(void (*tell)(char), const char *argument)
{
	struct flock whole = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	int fd = open(pool_file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);

	(void)argument;
	if (fd < 0 || fchmod(fd, 0666) || fcntl(fd, F_SETLK, &whole))
		scratch_leave_child(6);
	tell('l');
	for (;;)
		pause();
}

TEST(tcase, a_file_that_is_kept_locked_ends_in_a_sentence)
{
	void *pool = open_pool("p", 1, 15000);
	struct player hostile = start_player(keep_locked, NULL);

	ck_assert_int_eq(hear(&hostile), 'l');
	for (int i = 0; i < 2; i++) {
		ck_assert_int_eq(ask(pool, "a-1", 1), IOSHAPE_E_COORDINATOR);
		ck_assert_msg(strstr(error.text, "locked"), "%s", error.text);
	}
	end_player(&hostile, SIGKILL);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
}

static void try_to_lock(void (*tell)(char), const char *argument)
{
	struct flock whole = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	int fd = open(pool_file, O_RDWR | O_CLOEXEC);

	(void)argument;
	tell(fd >= 0 && fcntl(fd, F_SETLK, &whole) ? 'n' : 'l');
}

TEST(tcase, a_pool_in_use_cannot_be_locked_away)
{
	void *pool = open_pool("p", 1, 15000);
	struct player hostile;

	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	give_back(pool, "a-1");
	hostile = start_player(try_to_lock, NULL);
	ck_assert_int_eq(hear(&hostile), 'n');
	end_player(&hostile, 0);
	slots_local.close(pool);
}

/* ---- Stopped processes ----------------------------------------------------------------------- */

#define SHORT_LEASE_MS 600u

/* Holds a slot or waits for one. Looks at the request after each SIGCONT, and reports its state. */
static void hold_for_a_short_lease(void (*tell)(char), const char *id)
{
	static const char letters[] = {
		[SLOTS_NONE] = 'n', [SLOTS_WAITING] = 'w', [SLOTS_HOLDING] = 'h'
	};
	void *pool = open_pool("p", 1, SHORT_LEASE_MS);

	MUST(!ask(pool, id, 1), "%s", error.text);
	for (;;) {
		tell(letters[answer.state]);
		raise(SIGSTOP);
		MUST(!look(pool, id), "%s", error.text);
	}
}

static void await_stop(const struct player *player)
{
	int status;

	MUST(waitpid(player->pid, &status, WUNTRACED) == player->pid && WIFSTOPPED(status),
	     "it does not stop");
}

TEST(tcase, a_stopped_holder_keeps_its_slot_for_its_lease_and_learns_of_the_loss)
{
	void *pool = open_pool("p", 1, 60000);
	struct player holder = start_player(hold_for_a_short_lease, "h-1");
	uint64_t began;

	ck_assert_int_eq(hear(&holder), 'h');
	began = base_now_ns();
	await_stop(&holder);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	wait_for_slot(pool, "a-1", 20000);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_double_ge(ms_since(began), SHORT_LEASE_MS / 2);
	/* The stopped holder no longer counts; the new one does. */
	ck_assert_int_eq(ask(pool, "a-2", 1), 0);
	wait_for_slot(pool, "a-2", 300);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	kill(holder.pid, SIGCONT);
	ck_assert_int_eq(hear(&holder), 'n');
	/* When the old holder drops its lock, no slot becomes free. */
	wait_for_slot(pool, "a-2", 300);
	ck_assert_int_eq(look(pool, "a-2"), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	end_player(&holder, SIGKILL);
	slots_local.close(pool);
}

TEST(tcase, a_stopped_waiter_is_passed_over_and_is_first_again_when_it_goes_on)
{
	void *pool = open_pool("p", 1, 60000), *mine = open_pool("p", 1, 60000);
	struct player waiter;

	ck_assert_int_eq(ask(mine, "m-1", 1), 0);
	waiter = start_player(hold_for_a_short_lease, "w-1");
	ck_assert_int_eq(hear(&waiter), 'w');
	await_stop(&waiter);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(ask(pool, "a-2", 1), 0);
	ck_assert_uint_eq(answer.position, 2);
	give_back(mine, "m-1");
	ck_assert_int_eq(look(pool, "a-1"), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	wait_for_slot(pool, "a-1", 20000);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	kill(waiter.pid, SIGCONT);
	ck_assert_int_eq(hear(&waiter), 'w');
	await_stop(&waiter);
	give_back(pool, "a-1");
	ck_assert_int_eq(look(pool, "a-2"), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	kill(waiter.pid, SIGCONT);
	ck_assert_int_eq(hear(&waiter), 'h');
	end_player(&waiter, SIGKILL);
	slots_local.close(pool);
	slots_local.close(mine);
}

TEST(tcase, a_process_of_another_version_has_a_pool_of_its_own)
{
	void *pool = open_pool("p", 1, 15000);
	char other[400];

	/* The name that version 3 used. */
	snprintf(other, sizeof(other), "%s/ioshape-p-%016llx.v3.slots", pool_folder,
		 (unsigned long long)base_hash_text("p"));
	write_private(other, "version 3");
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
	require_untouched(other, 0600, "version 3");
}

TEST(tcase, what_is_no_file_in_its_place_is_not_followed)
{
	void *pool = open_pool("p", 1, 15000);
	char target[128];

	snprintf(target, sizeof(target), "%s/target", pool_folder);
	for (int i = 0; i < 4; i++) {
		if (i == 0)
			ck_assert_int_eq(symlink(target, pool_file), 0);
		else if (i == 1)
			ck_assert_int_eq(mkfifo(pool_file, 0666), 0);
		else if (i == 2)
			ck_assert_int_eq(mkdir(pool_file, 0777), 0);
		else
			ck_assert_int_eq(symlink("/dev/zero", pool_file), 0);
		ck_assert_int_eq(ask(pool, "a-1", 1), IOSHAPE_E_COORDINATOR);
		ck_assert_int_ne(access(target, F_OK), 0);
		ck_assert_int_eq(remove(pool_file), 0);
		ck_assert_int_eq(ask(pool, "a-1", 1), 0);
		ck_assert_int_eq(answer.state, SLOTS_HOLDING);
		ck_assert_int_eq(give_back(pool, "a-1"), 0);
		/* Also if the file is replaced while the pool is open. */
		ck_assert_int_eq(unlink(pool_file), 0);
		usleep(600000);
	}
	slots_local.close(pool);
}

TEST(tcase, a_private_file_in_its_place_stays_private_and_as_it_was)
{
	char secret[128];
	void *pool = open_pool("p", 1, 15000);

	snprintf(secret, sizeof(secret), "%s/secret", pool_folder);
	write_private(secret, "mine");
	ck_assert_int_eq(link(secret, pool_file), 0);
	ck_assert_int_eq(ask(pool, "a-1", 1), IOSHAPE_E_COORDINATOR);
	require_untouched(secret, 0600, "mine");
	/* Also for a file that was moved there and has no other name. */
	ck_assert_int_eq(unlink(secret), 0);
	ck_assert_int_eq(ask(pool, "a-1", 1), IOSHAPE_E_COORDINATOR);
	require_untouched(pool_file, 0600, "mine");
	ck_assert_int_eq(unlink(pool_file), 0);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	slots_local.close(pool);
}

TEST(tcase, a_maker_that_died_before_its_file_was_for_everybody_does_not_close_the_pool)
{
	void *pool = open_pool("p", 1, 15000);
	struct stat stat_of;

	write_private(pool_file, "");
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(stat(pool_file, &stat_of), 0);
	ck_assert_uint_eq(stat_of.st_mode & 07777, 0666);
	slots_local.close(pool);
}

TEST(tcase, processes_meet_again_after_the_file_was_removed)
{
	void *pool = open_pool("p", 1, 15000);
	struct player holder;

	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(unlink(pool_file), 0);
	holder = start_player(stay_in, "h-1");
	ck_assert_int_eq(hear(&holder), 'h');
	usleep(600000);
	ck_assert_int_eq(look(pool, "a-1"), 0);
	ck_assert_int_eq(answer.state, SLOTS_NONE);
	ck_assert_int_eq(ask(pool, "a-2", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	end_player(&holder, SIGKILL);
	wait_for_slot(pool, "a-2", 2000);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
}

static void stay_in_as_somebody(void (*tell)(char), const char *argument)
{
	umask(077);
	if (!geteuid() && (setgid(4711) || setuid(4711)))
		scratch_leave_child(5);
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* a change of the user clears this setting */
	stay_in(tell, argument);
}

TEST(tcase, users_share_a_pool)
{
	struct player other = start_player(stay_in_as_somebody, "o-1"), third;
	void *pool;

	umask(077);
	ck_assert_int_eq(hear(&other), 'h');
	third = start_player(stay_in_as_somebody, "t-1");
	ck_assert_int_eq(hear(&third), 'w');
	if (!geteuid())
		ck_assert_int_eq(seteuid(4712), 0);
	pool = open_pool("p", 1, 15000);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	if (!geteuid())
		ck_assert_int_eq(seteuid(0), 0);
	ck_assert_int_eq(seteuid(getuid()), 0);
	end_player(&third, SIGKILL);
	end_player(&other, SIGKILL);
	ck_assert_int_eq(seteuid(getuid() ? getuid() : 4712), 0);
	wait_for_slot(pool, "a-1", 2000);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
	ck_assert_int_eq(seteuid(getuid()), 0);
}

static void open_and_close(void (*tell)(char), const char *inherited)
{
	void *pool = open_pool("p", 1, 15000);

	(void)inherited;
	if (ask(pool, "child", 1))
		scratch_leave_child(8);
	tell(answer.state == SLOTS_WAITING ? 'w' : 'h');
	wait_for_slot(pool, "child", 100);
	tell(answer.state == SLOTS_WAITING ? 'w' : 'h');
	slots_local.close(pool);
	tell('c');
}

TEST(tcase, a_forked_child_leaves_its_parents_slot_alone)
{
	void *pool = open_pool("p", 1, 15000);

	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	for (int i = 0; i < 2; i++) {
		struct player child = start_player(open_and_close, NULL);

		ck_assert_int_eq(hear(&child), 'w');
		ck_assert_int_eq(hear(&child), 'w');
		ck_assert_int_eq(hear(&child), 'c');
		ck_assert_int_eq(end_player(&child, 0), 0);
	}
	ck_assert_int_eq(look(pool, "a-1"), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(pool);
}

static _Atomic pid_t *orphan;

/* Holds a slot, and forks a child that lives on when the holder is killed. */
static void hold_and_fork(void (*tell)(char), const char *id)
{
	void *pool = open_pool("p", 1, 15000);

	MUST(!ask(pool, id, 1) && answer.state == SLOTS_HOLDING, "%s", error.text);
	if (!fork()) {
		*orphan = getpid(); /* The child has left fork(), so it has closed inherited
				       descriptors. */
		for (;;)
			pause();
	}
	while (!*orphan)
		usleep(1000);
	tell('f');
	for (;;)
		pause();
}

TEST(tcase, a_child_does_not_keep_the_slot_of_a_parent_that_died)
{
	void *pool = open_pool("p", 1, 15000);
	struct player parent;

	orphan = mmap(NULL, sizeof(*orphan), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	MUST(orphan != MAP_FAILED, "no memory");
	parent = start_player(hold_and_fork, "h-1");
	ck_assert_int_eq(hear(&parent), 'f');
	end_player(&parent, SIGKILL);
	ck_assert_int_eq(kill(*orphan, 0), 0);
	ck_assert_int_eq(ask(pool, "a-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	/* The child does not keep the slot file in use. */
	slots_local.close(pool);
	ck_assert_uint_eq(entries(), 0);
	kill(*orphan, SIGKILL);
	munmap(orphan, sizeof(*orphan));
}

TEST(tcase, two_opens_of_a_pool_stand_apart)
{
	void *first = open_pool("p", 1, 15000), *second = open_pool("p", 1, 15000);
	struct player waiter;

	ck_assert_int_eq(ask(first, "a-1", 1), 0);
	ck_assert_int_eq(ask(second, "b-1", 1), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	slots_local.close(second);
	waiter = start_player(stay_in, "w-1");
	ck_assert_int_eq(hear(&waiter), 'w');
	second = open_pool("p", 1, 15000);
	ck_assert_int_eq(ask(second, "b-2", 1), 0);
	ck_assert_uint_eq(answer.position, 1); /* b-1 was released with its pool; w-1 is ahead */
	slots_local.close(first);
	end_player(&waiter, SIGKILL);
	wait_for_slot(second, "b-2", 1000);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_local.close(second);
}

TEST(tcase, a_long_queue_is_kept_as_well)
{
	/* Longer than this test takes under a sanitizer on a busy machine. */
	void *pool = open_pool("p", 1, 600000), *other = open_pool("p", 1, 600000);
	char id[40];

	for (int i = 0; i < 300; i++) {
		snprintf(id, sizeof(id), "a-%d", i);
		ck_assert_int_eq(ask(pool, id, 1), 0);
	}
	for (int i = 0; i < 300; i++) {
		snprintf(id, sizeof(id), "a-%d", i);
		ck_assert_int_eq(look(pool, id), 0);
		ck_assert_int_eq(answer.state, SLOTS_HOLDING);
		ck_assert_int_eq(give_back(pool, id), 0);
	}
	ck_assert_uint_eq(pool_warnings, 0);
	slots_local.close(other);
	slots_local.close(pool);
}

static void limit_files(rlim_t bytes)
{
	struct rlimit limit;

	MUST(!getrlimit(RLIMIT_FSIZE, &limit), "no limit");
	limit.rlim_cur = bytes;
	MUST(!setrlimit(RLIMIT_FSIZE, &limit), "no limit");
	usleep(600000); /* until the limit is read again */
}

/* Without the check, a signal of the kernel would end the process. */
TEST(tcase, a_limit_of_file_sizes_is_an_error_with_a_remedy)
{
	void *pool = open_pool("p", 1, 15000);
	int ret;

	limit_files(1024);
	ret = ask(pool, "a-1", 1);
	limit_files(RLIM_INFINITY);
	ck_assert_int_eq(ret, IOSHAPE_E_COORDINATOR);
	ck_assert_msg(strstr(error.text, "ulimit -f"), "%s", error.text);
	ck_assert_int_eq(ask(pool, "c-1", 1), 0);
	slots_local.close(pool);
}

TEST(tcase, what_may_be_a_password_is_not_repeated)
{
	static const struct {
		const struct slots_ops *ops;
		const char *address;
	} wrong[] = {
		{ &slots_local, "local:redis://me:tr0ub4dor@host" },
		{ &slots_open, "open:redis://me:tr0ub4dor@host" },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		struct slots_config config = { .address = wrong[i].address, .pool = "p" };
		void *pool;

		error.code = 0;
		ck_assert_int_eq(wrong[i].ops->open(&pool, &config, &error), -EINVAL);
		ck_assert_msg(strstr(error.text, wrong[i].ops->id), "%s", error.text);
		ck_assert_msg(!strstr(error.text, "tr0ub4dor"), "%s", error.text);
	}
}

TEST(tcase, addresses_that_mean_nothing_are_refused)
{
	static const char *const wrong[] = { "local:", "local:relative", "local:?", "localx" };

	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		struct slots_config config = { .address = wrong[i], .pool = "p" };
		void *pool;

		ck_assert_int_eq(slots_local.open(&pool, &config, NULL), -EINVAL);
		ck_assert_ptr_null(pool);
	}
	ck_assert_ptr_eq(slots_coordinator_of("local"), &slots_local);
	ck_assert_ptr_eq(slots_coordinator_of("local:/tmp"), &slots_local);
}
