/* SPDX-License-Identifier: Apache-2.0 */
/* Every engine obeys the contract in queue.h. */
#define _GNU_SOURCE
#include "io/queue.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/sandbox.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEPTH 8u
#define BLOCK (64 * 1024u)
#define NOBODY 65534

static const struct io_engine_ops *const engines[] = { &io_engine_uring, &io_engine_uring_async,
						       &io_engine_threads, &io_engine_buffered };
static const enum ioshape_engine kinds[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_URING_ASYNC,
					     IOSHAPE_ENGINE_THREADS, IOSHAPE_ENGINE_BUFFERED };

static const struct io_engine_ops *ops;
static void *engine;
static uint8_t *buffers;
static char why[200];
static int fd; /* file of the requests */

static int open_with(unsigned depth, void *memory, size_t bytes)
{
	struct io_engine_params params = { .depth = depth,
					   .memory = memory,
					   .memory_bytes = bytes };

	memset(why, 'x', sizeof(why));
	return ops->open(&engine, &params, why, sizeof(why));
}

static void open_engine(int which)
{
	ops = engines[which];
	buffers = base_map(DEPTH * BLOCK);
	ck_assert_ptr_nonnull(buffers);
	ck_assert_msg(!open_with(DEPTH, buffers, DEPTH * BLOCK), "%s: %s", ops->id, why);
	ck_assert_uint_lt(strlen(why), sizeof(why));
}

static void close_engine(void)
{
	ck_assert_ptr_null(ops->wait(engine));
	ops->close(engine);
	base_unmap(buffers, DEPTH * BLOCK);
}

static void open_file(const char *name, int flags)
{
	fd = open(scratch_path(name), flags | O_CREAT | O_CLOEXEC, 0666);
	ck_assert_msg(fd >= 0, "open %s: %s", name, strerror(errno));
}

/* Opens an engine and a file; end() closes both. */
static void begin(int which)
{
	open_engine(which);
	open_file("file", O_RDWR);
}

static void end(void)
{
	close(fd);
	close_engine();
}

static struct io_op request(enum io_kind kind, void *data, size_t bytes, uint64_t offset)
{
	return (struct io_op){
		.kind = kind, .fd = fd, .data = data, .bytes = bytes, .offset = offset, .result = 77
	};
}

/* Submits a request and waits for it. Returns its result. */
static int64_t carry_out(enum io_kind kind, void *data, size_t bytes, uint64_t offset)
{
	struct io_op op = request(kind, data, bytes, offset);

	ck_assert_int_eq(ops->submit(engine, &op), 0);
	ck_assert_ptr_eq(ops->wait(engine), &op);
	ck_assert_ptr_null(ops->wait(engine));
	return op.result;
}

static struct test_case all_engines = { .name = "all engines",
					.setup = scratch_setup,
					.teardown = scratch_teardown };

LOOP_TEST(all_engines, a_name_and_no_member_missing, 0, ARRAY_LENGTH(engines))
{
	ops = engines[_i];
	ck_assert_ptr_nonnull(ops->id);
	ck_assert_uint_lt(strlen(ops->id), sizeof(((struct ioshape_report *)0)->engine));
	ck_assert(ops->open && ops->submit && ops->wait && ops->close);
	ck_assert_ptr_eq(io_engine_of(kinds[_i]), ops);
}

LOOP_TEST(all_engines, requests_need_be_neither_aligned_nor_in_the_slabs, 0, ARRAY_LENGTH(engines))
{
	static uint8_t own[3 * 4096], back[3 * 4096];
	uint64_t state = 2;

	begin(_i);
	test_random_fill(&state, own, sizeof(own));
	ck_assert_int_eq(carry_out(IO_WRITE, own + 1, 5001, 7), 5001);
	ck_assert_int_eq(carry_out(IO_READ, back + 3, 5001, 7), 5001);
	ck_assert_mem_eq(own + 1, back + 3, 5001);
	/* Memory at the very end of the buffers works; beyond it nothing is mapped. */
	memcpy(buffers + DEPTH * BLOCK - 11, own, 11);
	ck_assert_int_eq(carry_out(IO_WRITE, buffers + DEPTH * BLOCK - 11, 11, 0), 11);
	ck_assert_int_eq(carry_out(IO_READ, back, 11, 0), 11);
	ck_assert_mem_eq(own, back, 11);
	end();
}

LOOP_TEST(all_engines, a_request_may_begin_in_the_slabs_and_end_behind_them, 0,
	  ARRAY_LENGTH(engines))
{
	uint8_t *memory = base_map(2 * BLOCK);

	ops = engines[_i];
	ck_assert_int_eq(open_with(DEPTH, memory, BLOCK), 0);
	open_file("file", O_RDWR);
	memset(memory, 'm', 2 * BLOCK);
	ck_assert_int_eq(carry_out(IO_WRITE, memory + BLOCK - 100, 4096, 0), 4096);
	ck_assert_int_eq(carry_out(IO_WRITE, memory + BLOCK, 4096, 4096), 4096);
	ck_assert_int_eq(carry_out(IO_READ, memory + BLOCK - 1, 8192, 0), 8192);
	close(fd);
	ops->close(engine);
	ck_assert(scratch_same(scratch_path("file"), memory, 8192));
	base_unmap(memory, 2 * BLOCK);
}

LOOP_TEST(all_engines, as_many_requests_as_it_was_opened_for_can_be_in_flight, 0,
	  ARRAY_LENGTH(engines))
{
	struct io_op requests[DEPTH], *op;
	bool seen[DEPTH] = { 0 };
	uint8_t *data;
	size_t bytes;

	begin(_i);
	for (unsigned round = 0; round < 20; round++) {
		memset(seen, 0, sizeof(seen));
		for (unsigned i = 0; i < DEPTH; i++) {
			memset(buffers + i * BLOCK, (int)(round + i), BLOCK);
			requests[i] = request(IO_WRITE, buffers + i * BLOCK, BLOCK, i * BLOCK);
			ck_assert_int_eq(ops->submit(engine, &requests[i]), 0);
		}
		/* Each request is completed once, in any order, and only its result has changed. */
		for (unsigned i = 0; i < DEPTH; i++) {
			op = ops->wait(engine);
			ck_assert(op >= requests && op < requests + DEPTH);
			ck_assert(!seen[op - requests]);
			seen[op - requests] = true;
			ck_assert_int_eq(op->result, BLOCK);
			ck_assert_uint_eq(op->bytes, BLOCK);
			ck_assert_uint_eq(op->offset, (uint64_t)(op - requests) * BLOCK);
			ck_assert_ptr_eq(op->data, buffers + (size_t)(op - requests) * BLOCK);
		}
		ck_assert_ptr_null(ops->wait(engine));
	}
	data = scratch_read(scratch_path("file"), &bytes);
	ck_assert_uint_eq(bytes, DEPTH * BLOCK);
	for (unsigned i = 0; i < DEPTH; i++)
		ck_assert_uint_eq(data[i * BLOCK + BLOCK - 1], 19 + i);
	free(data);
	end();
}

/* Submits and waits in random order, over several files in turn. */
LOOP_TEST(all_engines, any_order_of_calls_over_many_files_loses_nothing, 0, ARRAY_LENGTH(engines))
{
	static uint8_t expected[16 * BLOCK];
	struct io_op requests[DEPTH], *op;
	uint64_t state = 3 + (uint64_t)_i;

	open_engine(_i);
	for (int file = 0; file < 12; file++) {
		unsigned in_flight = 0, sent = 0;
		struct io_op *idle = NULL;

		for (unsigned i = 0; i < DEPTH; i++) {
			requests[i].data = buffers + i * BLOCK;
			requests[i].next = idle;
			idle = &requests[i];
		}
		open_file("file", O_RDWR | O_TRUNC);
		while (sent < 16 || in_flight) {
			if (idle && sent < 16 && (!in_flight || test_random_below(&state, 2))) {
				op = idle;
				idle = op->next;
				*op = request(IO_WRITE, op->data, BLOCK, sent * BLOCK);
				memset(op->data, (int)test_random(&state), BLOCK);
				memcpy(expected + sent * BLOCK, op->data, BLOCK);
				ck_assert_int_eq(ops->submit(engine, op), 0);
				in_flight++;
				sent++;
			} else {
				op = ops->wait(engine);
				ck_assert_ptr_nonnull(op);
				ck_assert_int_eq(op->result, BLOCK);
				op->next = idle;
				idle = op;
				in_flight--;
			}
		}
		close(fd);
		ck_assert(scratch_same(scratch_path("file"), expected, sizeof(expected)));
	}
	close_engine();
}

LOOP_TEST(all_engines, the_end_of_the_file_cuts_reads_short, 0, ARRAY_LENGTH(engines))
{
	scratch_write(scratch_path("file"), "0123456789", 10);
	begin(_i);
	ck_assert_int_eq(carry_out(IO_READ, buffers, BLOCK, 0), 10);
	ck_assert_mem_eq(buffers, "0123456789", 10);
	ck_assert_int_eq(carry_out(IO_READ, buffers, BLOCK, 7), 3);
	ck_assert_int_eq(carry_out(IO_READ, buffers, BLOCK, 10), 0);
	ck_assert_int_eq(carry_out(IO_READ, buffers, BLOCK, 1 << 30), 0);
	end();
}

LOOP_TEST(all_engines, what_the_kernel_refuses_completes_with_its_code, 0, ARRAY_LENGTH(engines))
{
	scratch_write(scratch_path("file"), "0123456789", 10);
	ck_assert_int_eq(symlink("/dev/full", scratch_path("full")), 0);
	open_engine(_i);
	open_file("full", O_RDWR);
	ck_assert_int_eq(carry_out(IO_WRITE, buffers, BLOCK, 0), -ENOSPC);
	close(fd);
	open_file("file", O_RDONLY);
	ck_assert_int_eq(carry_out(IO_WRITE, buffers, BLOCK, 0), -EBADF);
	ck_assert_int_eq(carry_out(IO_READ, buffers, BLOCK, 0), 10);
	close(fd);
	open_file("file", O_WRONLY);
	ck_assert_int_eq(carry_out(IO_READ, buffers, BLOCK, 0), -EBADF);
	end();
}

LOOP_TEST(all_engines, memory_out_of_reach_is_an_error_and_no_crash, 0,
	  !scratch_under_valgrind() ? ARRAY_LENGTH(engines) : 0)
{
	void *gone = mmap(NULL, BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	ck_assert_ptr_ne(gone, MAP_FAILED);
	begin(_i);
	ck_assert_int_eq(carry_out(IO_WRITE, gone, BLOCK, 0), -EFAULT);
	munmap(gone, BLOCK);
	close(fd);
	close_engine();
}

LOOP_TEST(all_engines, it_works_without_slabs, 0, ARRAY_LENGTH(engines))
{
	uint8_t byte = 'y';

	ops = engines[_i];
	ck_assert_int_eq(open_with(1, NULL, 0), 0);
	ck_assert_str_eq(why, "");
	open_file("file", O_RDWR);
	ck_assert_int_eq(carry_out(IO_WRITE, &byte, 1, 0), 1);
	close(fd);
	ops->close(engine);
}

LOOP_TEST(all_engines, closing_gives_everything_back, 0, ARRAY_LENGTH(engines))
{
	unsigned before = scratch_descriptors();

	for (int i = 0; i < 20; i++) {
		open_engine(_i);
		close_engine();
	}
	ck_assert_uint_eq(scratch_descriptors(), before);
}

LOOP_TEST(all_engines, threads_of_an_engine_take_no_signals, 0, ARRAY_LENGTH(engines))
{
	open_engine(_i);
	/*
	 * All other threads block signals that an application may handle, so SIGUSR1 stays pending.
	 */
	for (int i = 0; i < 20; i++) {
		sigset_t set, pending;

		sigemptyset(&set);
		sigaddset(&set, SIGUSR1);
		sigprocmask(SIG_BLOCK, &set, NULL);
		kill(getpid(), SIGUSR1);
		usleep(1000);
		sigpending(&pending);
		ck_assert(sigismember(&pending, SIGUSR1));
	}
	close_engine();
	signal(SIGUSR1, SIG_IGN);
}

/* ---- io_uring where it is refused ------------------------------------------------------------ */

struct refusal {
	int call, code;
};

static int is_refused(void *argument)
{
	const struct refusal *refusal = argument;

	ops = &io_engine_uring;
	if (sandbox_refuse(refusal->call, refusal->code))
		return 99;
	return open_with(DEPTH, NULL, 0) == -refusal->code && *why ? 0 : 1;
}

static struct test_case uring = { .name = "uring",
				  .setup = scratch_setup,
				  .teardown = scratch_teardown };

TEST(uring, a_refused_ring_says_why)
{
	static struct refusal refusals[] = {
		{ __NR_io_uring_setup, EPERM },
		{ __NR_io_uring_setup, ENOSYS },
		{ __NR_io_uring_enter, EPERM },
		{ __NR_io_uring_enter, ENOSYS },
	};
	unsigned before = scratch_descriptors();

	for (size_t i = 0; i < ARRAY_LENGTH(refusals); i++)
		ck_assert_int_eq(scratch_in_child(is_refused, &refusals[i]), 0);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

static int works_unregistered(void *unused)
{
	/*
	 * Enough for the ring itself, which newer kernels count, too; not enough for the buffers.
	 */
	const struct rlimit little = { 4 * BLOCK, 4 * BLOCK };
	struct io_op op;

	(void)unused;
	fd = open(scratch_path("file"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	buffers = base_map(DEPTH * BLOCK);
	memset(buffers, 'u', DEPTH * BLOCK);
	if (setrlimit(RLIMIT_MEMLOCK, &little) || (!geteuid() && setuid(NOBODY)))
		return 99;
	ops = &io_engine_uring;
	if (open_with(DEPTH, buffers, DEPTH * BLOCK))
		return 1;
	if (!*why)
		return 2;
	op = request(IO_WRITE, buffers, BLOCK, 0);
	if (ops->submit(engine, &op) || ops->wait(engine) != &op || op.result != BLOCK)
		return 3;
	close(fd);
	ops->close(engine);
	base_unmap(buffers, DEPTH * BLOCK);
	return 0;
}

TEST(uring, memory_that_may_not_be_locked_is_used_unregistered)
{
	ck_assert_int_eq(scratch_in_child(works_unregistered, NULL), 0);
}

/* Runs in a sandbox that is closed later: requests must fail, and no call may wait forever. */
static int fails_when_shut_out(void *unused)
{
	struct io_op first, second;

	ops = &io_engine_uring;
	(void)unused;
	buffers = base_map(DEPTH * BLOCK);
	if (open_with(DEPTH, buffers, DEPTH * BLOCK) || sandbox_refuse(__NR_io_uring_enter, EPERM))
		return 99;
	open_file("file", O_RDWR);
	first = request(IO_WRITE, buffers, BLOCK, 0);
	if (ops->submit(engine, &first) || ops->wait(engine) != &first || first.result != -EPERM)
		return 1;
	second = request(IO_WRITE, buffers, BLOCK, 0);
	if (ops->submit(engine, &second) != -EPERM)
		return 2;
	if (ops->wait(engine))
		return 3;
	close(fd);
	ops->close(engine);
	base_unmap(buffers, DEPTH * BLOCK);
	return 0;
}

TEST(uring, a_ring_that_is_shut_out_later_fails_and_does_not_hang)
{
	ck_assert_int_eq(scratch_in_child(fails_when_shut_out, NULL), 0);
}
