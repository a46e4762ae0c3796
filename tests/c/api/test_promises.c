/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Promises of headers and reference beyond saving and loading: paths, waiting, log lines, refusals.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/one_core.h"
#include "support/reader_info.h"
#include "support/report_downgrade.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define CHUNK_BYTES (16 * MIB)
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* Replaces the fsync() that the library calls. The sync of a directory may fail. */
static bool directories_fail;

int fsync(int fd)
{
	struct stat status;

	if (directories_fail && !fstat(fd, &status) && S_ISDIR(status.st_mode)) {
		errno = EIO;
		return -1;
	}
	return (int)syscall(SYS_fsync, fd);
}

/* ---- One tensor ------------------------------------------------------------------------------ */

struct one {
	int64_t shape[1];
	struct ioshape_tensor tensor;
	uint8_t *memory;
};

static int working_directory;
static struct ioshape_context *context;
static struct one one;

static void make_one(struct one *made, size_t bytes, uint8_t value)
{
	made->shape[0] = (int64_t)bytes;
	made->memory = realloc(made->memory, bytes);
	ck_assert_ptr_nonnull(made->memory);
	memset(made->memory, value, bytes);
	made->tensor = (struct ioshape_tensor){
		.name = "one",
		.dtype = IOSHAPE_UINT8,
		.dims = 1,
		.shape = made->shape,
		.data = made->memory,
	};
}

static struct ioshape_context *open_context(const struct ioshape_context_options *options)
{
	struct ioshape_context *opened;

	ck_assert_int_eq(ioshape_context_open(&opened, options), 0);
	return opened;
}

/* Replaces the default context of the test. */
static void open_another(const struct ioshape_context_options *options)
{
	ioshape_context_free(context);
	context = open_context(options);
}

static void setup(void)
{
	working_directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	ck_assert_int_ge(working_directory, 0);
	scratch_setup();
	context = open_context(NULL);
	make_one(&one, 1000, 1);
}

static void teardown(void)
{
	ioshape_context_free(context);
	free(one.memory);
	ck_assert_int_eq(fchdir(working_directory), 0);
	close(working_directory);
	scratch_teardown();
}

static struct ioshape_reader *open_reader(const char *path)
{
	struct ioshape_reader *reader;

	ck_assert_msg(!ioshape_reader_open(context, path, NULL, &reader), "%s",
		      ioshape_last_error()->sentence);
	return reader;
}

static uint8_t first_byte(const char *path)
{
	struct ioshape_reader *reader = open_reader(path);
	uint8_t byte;
	struct ioshape_load_request request = { .tensor = 0, .bytes = 1, .into = &byte };

	ck_assert_msg(!ioshape_reader_load(reader, &request, 1), "%s",
		      ioshape_last_error()->sentence);
	ioshape_reader_free(reader);
	return byte;
}

static struct ioshape_save *begin(const char *path, const struct one *given,
				  const struct ioshape_save_options *options)
{
	struct ioshape_save *save;

	ck_assert_msg(!ioshape_save_tensors(context, path, &given->tensor, 1, options, &save), "%s",
		      ioshape_last_error()->sentence);
	return save;
}

static struct ioshape_report end(struct ioshape_save *save)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	ck_assert_msg(!ioshape_save_wait(save, -1), "%s", ioshape_last_error()->sentence);
	ck_assert_int_eq(ioshape_save_get_report(save, &report), 0);
	ioshape_save_free(save);
	return report;
}

/* ---- A save that is delayed before its commit ------------------------------------------------ */

#define LINGER_US 300000
/* Least part of the delay that a waiting thread must notice. */
#define SEEN_S 0.1

/* `go` is set by the thread that is about to wait, `lingering` by the save when it is delayed. */
static atomic_bool go, lingering;

/* Delays the save when all is written but not committed, until some time after `go`. */
static int linger(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)done;
	(void)total;
	if (phase != IOSHAPE_PHASE_SYNC)
		return 0;
	atomic_store(&lingering, true);
	while (!atomic_load(&go))
		usleep(1000);
	usleep(LINGER_US);
	return 0;
}

static int say_go(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)done;
	(void)total;
	if (phase == IOSHAPE_PHASE_SYNC)
		atomic_store(&go, true);
	return 0;
}

static struct ioshape_save *begin_lingering(const char *path, const struct one *given)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	atomic_store(&go, false);
	atomic_store(&lingering, false);
	options.progress = linger;
	return begin(path, given, &options);
}

/* ---- Paths ----------------------------------------------------------------------------------- */

static int leave_the_directory(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)done;
	(void)total;
	return phase == IOSHAPE_PHASE_STAGE ? chdir(user) : 0;
}

static struct test_case tests = { .name = "promises", .setup = setup, .teardown = teardown };

TEST(tests, a_relative_path_means_what_it_meant_at_the_call)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	char away[4096];

	make_one(&one, 1000, 7);
	ck_assert_int_eq(mkdir(scratch_path("here"), 0777), 0);
	ck_assert_int_eq(mkdir(scratch_path("there"), 0777), 0);
	ck_assert_int_eq(chdir(scratch_path("here")), 0);
	snprintf(away, sizeof(away), "%s", scratch_path("there"));
	options.progress = leave_the_directory;
	options.progress_user = away;
	end(begin("a.pt", &one, &options));
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	ck_assert_uint_eq(first_byte(scratch_path("here/a.pt")), 7);
}

static const char *const same_file[][2] = {
	{ "a.pt", "./a.pt" },
	{ "./a.pt", "a.pt" },
	{ "directory/a.pt", "link/a.pt" },
	{ "link/../a.pt", "a.pt" },
	{ "directory//a.pt", "directory/a.pt" },
};

LOOP_TEST(tests, saves_to_one_file_are_ordered_whatever_they_call_it, 0, COUNT(same_file))
{
	struct ioshape_save *first;
	struct one new = { 0 };

	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert_int_eq(mkdir("directory", 0777), 0);
	ck_assert_int_eq(symlink("directory", "link"), 0);
	make_one(&new, 1000, 2);
	first = begin_lingering(same_file[_i][0], &one);
	atomic_store(&go, true);
	ck_assert_int_eq(
		ioshape_save_tensors(context, same_file[_i][1], &new.tensor, 1, NULL, NULL), 0);
	end(first);
	ck_assert_uint_eq(first_byte(same_file[_i][0]), 2);
	free(new.memory);
}

TEST(tests, a_file_takes_its_turn_where_it_was_opened)
{
	struct ioshape_file *file;
	struct ioshape_save *first;

	ck_assert_int_eq(mkdir(scratch_path("there"), 0777), 0);
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert_int_eq(ioshape_file_open(context, "a.pt", NULL, &file), 0);
	ck_assert_int_eq(ioshape_file_write(file, "text", 4), 0);
	first = begin_lingering("a.pt", &one);
	ck_assert_int_eq(chdir("there"), 0);
	atomic_store(&go, true);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
	end(first);
	ck_assert(scratch_same(scratch_path("a.pt"), "text", 4));
}

TEST(tests, each_directory_is_tidied_whatever_it_is_called)
{
	static const char stale[] = ".a.pt.ioshape-tmp-deadbeef-0123456789abcdef";
	const struct timespec long_ago[2] = { { .tv_sec = 1 }, { .tv_sec = 1 } };

	for (int i = 0; i < 2; i++) {
		const char *directory = scratch_path(i ? "first" : "second");

		ck_assert_int_eq(mkdir(directory, 0777), 0);
		ck_assert_int_eq(chdir(directory), 0);
		scratch_write(stale, "x", 1);
		ck_assert_int_eq(utimensat(AT_FDCWD, stale, long_ago, 0), 0);
		ck_assert_int_eq(ioshape_save_tensors(context, "a.pt", NULL, 0, NULL, NULL), 0);
		ck_assert_uint_eq(scratch_temporaries("."), 0);
	}
}

/* ---- Engines --------------------------------------------------------------------------------- */

static void open_with(enum ioshape_engine engine, enum ioshape_direct direct)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.engine = engine;
	options.direct = direct;
	open_another(&options);
}

static int save_one(void)
{
	return ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1, NULL, NULL);
}

static struct ioshape_report save_and_report(void)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	options.report = &report;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1, &options, NULL),
		0);
	return report;
}

TEST(tests, an_engine_asked_for_by_name_takes_small_files_too)
{
	ck_assert_str_eq(save_and_report().engine, "buffered");
	open_with(IOSHAPE_ENGINE_THREADS, IOSHAPE_DIRECT_PREFER);
	ck_assert_str_eq(save_and_report().engine, "threads");
	ck_assert_uint_eq(first_byte(scratch_path("a.pt")), 1);
}

TEST(tests, direct_io_that_is_required_is_used_for_small_files_too)
{
	open_with(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_REQUIRE);
	if (scratch_direct()) {
		ck_assert_uint_eq(save_and_report().direct, 1);
		ck_assert_uint_eq(first_byte(scratch_path("a.pt")), 1);
	} else {
		ck_assert_int_lt(save_one(), 0);
		ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	}
}

/* ---- Staging memory -------------------------------------------------------------------------- */

static void open_with_staging(uint64_t bytes)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.staging_bytes = bytes;
	open_another(&options);
}

TEST(tests, waiting_for_room_is_in_the_report)
{
	struct ioshape_save *first, *second;

	open_with_staging(CHUNK_BYTES);
	first = begin_lingering(scratch_path("a.pt"), &one);
	atomic_store(&go, true);
	second = begin(scratch_path("b.pt"), &one, NULL);
	end(first);
	ck_assert_double_ge(end(second).stage_s, SEEN_S);
}

TEST(tests, waiting_for_the_turn_is_in_the_report)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *first = begin_lingering(scratch_path("a.pt"), &one);

	options.progress = say_go;
	options.report = &report;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1, &options, NULL),
		0);
	ck_assert_double_ge(report.commit_s, SEEN_S);
	ck_assert_double_le(report.commit_s, report.total_s);
	end(first);
}

/* ---- Progress -------------------------------------------------------------------------------- */

static struct {
	atomic_uint calls, stages_after_a_write;
	atomic_bool wrote, beyond, write_in_this_thread;
	pthread_t caller;
} told;

static int note(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	atomic_fetch_add(&told.calls, 1);
	if (done > total)
		atomic_store(&told.beyond, true);
	if (phase == IOSHAPE_PHASE_STAGE && atomic_load(&told.wrote))
		atomic_fetch_add(&told.stages_after_a_write, 1);
	if (phase == IOSHAPE_PHASE_WRITE) {
		atomic_store(&told.wrote, true);
		if (pthread_equal(pthread_self(), told.caller))
			atomic_store(&told.write_in_this_thread, true);
	}
	return 0;
}

TEST(tests, done_is_never_more_than_total)
{
	enum { MANY = 2000 };
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_tensor *tensors = calloc(MANY, sizeof(*tensors));
	char(*names)[16] = calloc(MANY, sizeof(*names));

	ck_assert(tensors && names);
	for (int i = 0; i < MANY; i++) {
		snprintf(names[i], sizeof(names[i]), "%d", i);
		tensors[i] = (struct ioshape_tensor){ .name = names[i],
						      .dtype = IOSHAPE_UINT8,
						      .data = names[i] };
	}
	options.progress = note;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, MANY, &options, NULL),
		0);
	ck_assert_uint_ge(atomic_load(&told.calls), 4);
	ck_assert(!atomic_load(&told.beyond));
	free(tensors);
	free(names);
}

TEST(tests, a_save_larger_than_staging_speaks_from_two_threads)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	keep_to_one_core(); /* with several threads, helpers would copy without reporting progress
			     */
	open_with_staging(CHUNK_BYTES);
	make_one(&one, 4 * CHUNK_BYTES, 1);
	told.caller = pthread_self();
	options.progress = note;
	end(begin(scratch_path("a.pt"), &one, &options));
	ck_assert_uint_ge(atomic_load(&told.stages_after_a_write), 1);
	ck_assert(!atomic_load(&told.write_in_this_thread));
	ck_assert(!atomic_load(&told.beyond));
}

static int stop_at_plan(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)done;
	(void)total;
	return phase == IOSHAPE_PHASE_PLAN;
}

TEST(tests, the_plan_is_told_before_space_is_reserved)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	const struct rlimit limit = { 2 << 20, 2 << 20 };
	struct ioshape_file *file;

	/* Reserving the space would fail with an error. */
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	options.expected_bytes = 4 << 20;
	options.progress = stop_at_plan;
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("a.pt"), &options, &file),
			 -ECANCELED);
	ck_assert_ptr_null(file);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

/* ---- Log ------------------------------------------------------------------------------------- */

/* Number of log lines of each level, and whether a line lacked the name of the file. */
static struct {
	atomic_uint lines[IOSHAPE_LOG_DEBUG + 1];
	atomic_bool nameless;
} heard;

static void listen(void *user, enum ioshape_log_level level, const char *line)
{
	(void)user;
	atomic_fetch_add(&heard.lines[level], 1);
	if (!strstr(line, "/a.pt"))
		atomic_store(&heard.nameless, true);
}

static const struct {
	enum ioshape_engine engine;
	enum ioshape_log_level level; /* log level of the context */
	const char *path;
	unsigned lines[IOSHAPE_LOG_DEBUG + 1];
} logged[] = {
	/* A background save that fails. */
	{ IOSHAPE_ENGINE_AUTO, IOSHAPE_LOG_ERROR, "no/a.pt", { [IOSHAPE_LOG_ERROR] = 1 } },
	/* One debug line for each save. */
	{ IOSHAPE_ENGINE_BUFFERED, IOSHAPE_LOG_DEBUG, "a.pt", { [IOSHAPE_LOG_DEBUG] = 1 } },
	{ IOSHAPE_ENGINE_BUFFERED, IOSHAPE_LOG_INFO, "a.pt", { 0 } },
};

LOOP_TEST(tests, the_log_has_a_line_for_what_matters_at_its_level, 0, COUNT(logged))
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_save *save;

	options.engine = logged[_i].engine;
	options.log = listen;
	options.log_level = logged[_i].level;
	open_another(&options);
	save = begin(scratch_path(logged[_i].path), &one, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), *logged[_i].path == 'n' ? -ENOENT : 0);
	ioshape_save_free(save);
	for (int level = 0; level <= IOSHAPE_LOG_DEBUG; level++)
		ck_assert_uint_eq(atomic_load(&heard.lines[level]), logged[_i].lines[level]);
	ck_assert(!atomic_load(&heard.nameless));
}

/* ---- Refusals -------------------------------------------------------------------------------- */

TEST(tests, too_much_to_say_about_tensors_is_refused_up_front)
{
	enum { MANY = 400000, DIMS = IOSHAPE_MAX_DIMS };
	static const int64_t shape[DIMS]; /* zeros: no elements */
	struct ioshape_tensor *tensors = calloc(MANY, sizeof(*tensors));
	char(*names)[8] = calloc(MANY, sizeof(*names));

	ck_assert(tensors && names);
	for (int i = 0; i < MANY; i++) {
		snprintf(names[i], sizeof(names[i]), "%d", i);
		tensors[i] = (struct ioshape_tensor){
			.name = names[i], .dtype = IOSHAPE_INT8, .dims = DIMS, .shape = shape
		};
	}
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, MANY, NULL, NULL),
		IOSHAPE_E_LIMIT);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	free(tensors);
	free(names);
}

/* This is the only failure after which the new file is in place. */
TEST(tests, a_directory_that_does_not_become_durable_fails_the_save_in_place)
{
	ck_assert_int_eq(save_one(), 0);
	memset(one.memory, 2, 1000);
	directories_fail = true;
	ck_assert_int_eq(save_one(), -EIO);
	directories_fail = false;
	ck_assert_uint_eq(first_byte(scratch_path("a.pt")), 2);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}
