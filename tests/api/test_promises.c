/* SPDX-License-Identifier: Apache-2.0 */
/* What headers and reference promise beyond saving and loading: paths, waiting, words, refusals. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/one_core.h"
#include "support/reader_info.h"
#include "support/report_step.h"
#include "support/scratch.h"
#include "support/write_record.h"

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

static int working_directory;

static void setup(void)
{
	working_directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	ck_assert_int_ge(working_directory, 0);
	scratch_setup();
}

static void teardown(void)
{
	ck_assert_int_eq(fchdir(working_directory), 0);
	close(working_directory);
	unsetenv("IOSHAPE_ENGINE");
	unsetenv("IOSHAPE_STAGING_BYTES");
	scratch_teardown();
}

/* The library's calls of it come here: a directory may fail to become durable. */
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

static void make_one(struct one *one, size_t bytes, uint8_t value)
{
	one->shape[0] = (int64_t)bytes;
	one->memory = malloc(bytes);
	ck_assert_ptr_nonnull(one->memory);
	memset(one->memory, value, bytes);
	one->tensor = (struct ioshape_tensor){
		.name = "one",
		.dtype = IOSHAPE_UINT8,
		.dims = 1,
		.shape = one->shape,
		.data = one->memory,
	};
}

static struct ioshape_context *open_context(const struct ioshape_context_options *options)
{
	struct ioshape_context *context;
	ck_assert_msg(!ioshape_context_open(&context, options), "%s",
		      ioshape_last_error()->sentence);
	return context;
}

/* -EINVAL, and a message with this part. */
static void must_not_open(const struct ioshape_context_options *options, const char *part)
{
	struct ioshape_context *context;

	ck_assert_int_eq(ioshape_context_open(&context, options), -EINVAL);
	ck_assert_ptr_null(context);
	ck_assert_msg(strstr(ioshape_last_error()->sentence, part), "%s",
		      ioshape_last_error()->sentence);
}

static struct ioshape_reader *open_reader(struct ioshape_context *context, const char *path)
{
	struct ioshape_reader *reader;

	ck_assert_msg(!ioshape_reader_open(context, path, NULL, &reader), "%s",
		      ioshape_last_error()->sentence);
	return reader;
}

static uint8_t first_byte(struct ioshape_context *context, const char *path)
{
	struct ioshape_reader *reader = open_reader(context, path);
	uint8_t byte;
	struct ioshape_load_request request = { .tensor = 0, .bytes = 1, .into = &byte };

	ck_assert_msg(!ioshape_reader_load(reader, &request, 1), "%s",
		      ioshape_last_error()->sentence);
	ioshape_reader_free(reader);
	return byte;
}

static struct ioshape_save *begin(struct ioshape_context *context, const char *path,
				  const struct one *one, const struct ioshape_save_options *options)
{
	struct ioshape_save *save;

	ck_assert_msg(!ioshape_save_tensors(context, path, &one->tensor, 1, options, &save), "%s",
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

/* ---- A save that lingers --------------------------------------------------------------------- */

#define LINGER_US 300000
/* Of those, what must be seen of it by somebody who waits for it. */
#define SEEN_S 0.1

/* Set by who is about to wait; and by the save when it lingers. */
static atomic_bool go, lingering;

/* Everything is written, nothing is in place; some time after `go` it goes on. */
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

static struct ioshape_save *begin_lingering(struct ioshape_context *context, const char *path,
					    const struct one *one)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	atomic_store(&go, false);
	atomic_store(&lingering, false);
	options.progress = linger;
	return begin(context, path, one, &options);
}

/* ---- Paths ----------------------------------------------------------------------------------- */

static int leave_the_directory(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)done;
	(void)total;
	return phase == IOSHAPE_PHASE_STAGE ? chdir(user) : 0;
}

START_TEST(a_relative_path_means_what_it_meant_at_the_call)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_context *context = open_context(NULL);
	char away[4096];
	struct one one;

	make_one(&one, 1000, 7);
	ck_assert_int_eq(mkdir(scratch_path("here"), 0777), 0);
	ck_assert_int_eq(mkdir(scratch_path("there"), 0777), 0);
	ck_assert_int_eq(chdir(scratch_path("here")), 0);
	snprintf(away, sizeof(away), "%s", scratch_path("there"));
	options.progress = leave_the_directory;
	options.progress_user = away;
	end(begin(context, "a.pt", &one, &options));
	ck_assert_uint_eq(scratch_entries(scratch_path("there")), 0);
	ck_assert_uint_eq(first_byte(context, scratch_path("here/a.pt")), 7);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

static const char *const same_file[][2] = {
	{ "a.pt", "./a.pt" },
	{ "./a.pt", "a.pt" },
	{ "directory/a.pt", "link/a.pt" },
	{ "link/../a.pt", "a.pt" },
	{ "directory//a.pt", "directory/a.pt" },
};

START_TEST(saves_to_one_file_are_ordered_whatever_they_call_it)
{
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_save *first;
	struct one old, new;

	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert_int_eq(mkdir("directory", 0777), 0);
	ck_assert_int_eq(symlink("directory", "link"), 0);
	make_one(&old, 1000, 1);
	make_one(&new, 1000, 2);
	first = begin_lingering(context, same_file[_i][0], &old);
	atomic_store(&go, true);
	ck_assert_int_eq(
		ioshape_save_tensors(context, same_file[_i][1], &new.tensor, 1, NULL, NULL), 0);
	end(first);
	ck_assert_uint_eq(first_byte(context, same_file[_i][0]), 2);
	ioshape_context_free(context);
	free(old.memory);
	free(new.memory);
}
END_TEST

START_TEST(a_writer_takes_its_turn_where_it_was_opened)
{
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_writer *writer;
	struct ioshape_reader *reader;
	struct ioshape_save *first;
	struct one one;

	make_one(&one, 1000, 1);
	ck_assert_int_eq(mkdir(scratch_path("there"), 0777), 0);
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert_int_eq(ioshape_writer_open(context, "a.pt", NULL, &writer), 0);
	ck_assert_int_eq(write_record(writer, "new", "text", 4, 0), 0);
	first = begin_lingering(context, "a.pt", &one);
	ck_assert_int_eq(chdir("there"), 0);
	atomic_store(&go, true);
	ck_assert_int_eq(ioshape_writer_commit(writer, NULL), 0);
	ioshape_writer_free(writer);
	end(first);
	reader = open_reader(context, scratch_path("a.pt"));
	ck_assert_uint_eq(info_of_reader(reader).records, 1);
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(each_directory_is_tidied_whatever_it_is_called)
{
	static const char stale[] = ".a.pt.ioshape-tmp-deadbeef-0123456789abcdef";
	const struct timespec long_ago[2] = { { .tv_sec = 1 }, { .tv_sec = 1 } };
	struct ioshape_context *context = open_context(NULL);

	for (int i = 0; i < 2; i++) {
		const char *directory = scratch_path(i ? "first" : "second");

		ck_assert_int_eq(mkdir(directory, 0777), 0);
		ck_assert_int_eq(chdir(directory), 0);
		scratch_write(stale, "x", 1);
		ck_assert_int_eq(utimensat(AT_FDCWD, stale, long_ago, 0), 0);
		ck_assert_int_eq(ioshape_save_tensors(context, "a.pt", NULL, 0, NULL, NULL), 0);
		ck_assert_uint_eq(scratch_temporaries("."), 0);
	}
	ioshape_context_free(context);
}
END_TEST

START_TEST(a_path_without_a_name_is_refused_at_once)
{
	static const char *const paths[] = { "", "directory/", "/" };
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_save *save;
	struct one one;

	make_one(&one, 1000, 1);
	for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++) {
		ck_assert_int_eq(
			ioshape_save_tensors(context, paths[i], &one.tensor, 1, NULL, &save),
			-EINVAL);
		ck_assert_ptr_null(save);
		ck_assert_int_eq(
			ioshape_save_tensors(context, paths[i], &one.tensor, 1, NULL, NULL),
			-EINVAL);
	}
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

/* ---- Engines --------------------------------------------------------------------------------- */

START_TEST(the_environment_cannot_ask_for_nil)
{
	setenv("IOSHAPE_ENGINE", "nil", 1);
	must_not_open(NULL, "IOSHAPE_ENGINE");
	setenv("IOSHAPE_ENGINE", "buffered", 1);
	ioshape_context_free(open_context(NULL));
}
END_TEST

static struct ioshape_context *with_engine(enum ioshape_engine engine, enum ioshape_direct direct)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.engine = engine;
	options.direct = direct;
	return open_context(&options);
}

static struct ioshape_report save_and_report(struct ioshape_context *context, const char *path,
					     const struct one *one)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	options.report = &report;
	ck_assert_msg(!ioshape_save_tensors(context, path, &one->tensor, 1, &options, NULL), "%s",
		      ioshape_last_error()->sentence);
	return report;
}

START_TEST(nil_says_in_the_report_that_nothing_is_written)
{
	struct ioshape_context *context = with_engine(IOSHAPE_ENGINE_NIL, IOSHAPE_DIRECT_PREFER);
	struct ioshape_report report;
	struct one one;

	make_one(&one, 1000, 1);
	report = save_and_report(context, scratch_path("a.pt"), &one);
	ck_assert_str_eq(report.engine, "nil");
	ck_assert_uint_eq(report.fallbacks, 1);
	ck_assert_ptr_nonnull(report_step(&report, IOSHAPE_STEP_NOTHING));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(reading_with_nil_reads)
{
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_context *nil = with_engine(IOSHAPE_ENGINE_NIL, IOSHAPE_DIRECT_PREFER);
	struct one one;

	make_one(&one, 4 * MIB, 9);
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1, NULL, NULL), 0);
	for (int i = 0; i < 3; i++) {
		/* From the cache it could be right by chance. */
		scratch_evict(scratch_path("a.pt"));
		ck_assert_uint_eq(first_byte(nil, scratch_path("a.pt")), 9);
	}
	ioshape_context_free(nil);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(an_engine_asked_for_by_name_takes_small_files_too)
{
	struct ioshape_context *context =
		with_engine(IOSHAPE_ENGINE_THREADS, IOSHAPE_DIRECT_PREFER);
	struct one one;

	make_one(&one, 1000, 3);
	ck_assert_str_eq(save_and_report(context, scratch_path("a.pt"), &one).engine, "threads");
	ck_assert_uint_eq(first_byte(context, scratch_path("a.pt")), 3);
	ioshape_context_free(context);
	context = open_context(NULL);
	ck_assert_str_eq(save_and_report(context, scratch_path("a.pt"), &one).engine, "buffered");
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(direct_io_that_is_required_is_used_for_small_files_too)
{
	struct ioshape_context *context = with_engine(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_REQUIRE);
	struct one one;

	make_one(&one, 1000, 3);
	if (scratch_direct()) {
		ck_assert_uint_eq(save_and_report(context, scratch_path("a.pt"), &one).direct, 1);
		ck_assert_uint_eq(first_byte(context, scratch_path("a.pt")), 3);
	} else {
		ck_assert_int_lt(ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1,
						      NULL, NULL),
				 0);
		ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	}
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

/* ---- Staging memory -------------------------------------------------------------------------- */

static struct ioshape_context *with_staging(uint64_t bytes)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.staging_bytes = bytes;
	return open_context(&options);
}

START_TEST(staging_below_one_chunk_is_refused)
{
	static const uint64_t too_few[] = { 1, MIB, CHUNK_BYTES - 1 };
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	for (size_t i = 0; i < sizeof(too_few) / sizeof(*too_few); i++) {
		options.staging_bytes = too_few[i];
		must_not_open(&options, "staging_bytes");
	}
	setenv("IOSHAPE_STAGING_BYTES", "1M", 1);
	must_not_open(NULL, "IOSHAPE_STAGING_BYTES");
	setenv("IOSHAPE_STAGING_BYTES", "16M", 1);
	ioshape_context_free(open_context(NULL));
}
END_TEST

START_TEST(waiting_for_room_is_in_the_report)
{
	struct ioshape_context *context = with_staging(CHUNK_BYTES);
	struct ioshape_save *first, *second;
	struct one one;

	make_one(&one, 1000, 1);
	first = begin_lingering(context, scratch_path("a.pt"), &one);
	atomic_store(&go, true);
	second = begin(context, scratch_path("b.pt"), &one, NULL);
	end(first);
	ck_assert_double_ge(end(second).stage_s, SEEN_S);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(waiting_for_the_turn_is_in_the_report)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_save *first;
	struct one one;

	make_one(&one, 1000, 1);
	first = begin_lingering(context, scratch_path("a.pt"), &one);
	options.progress = say_go;
	options.report = &report;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1, &options, NULL),
		0);
	ck_assert_double_ge(report.commit_s, SEEN_S);
	ck_assert_double_le(report.commit_s, report.total_s);
	end(first);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

static size_t mapped_bytes(void)
{
	FILE *file = fopen("/proc/self/statm", "re");
	size_t pages;

	ck_assert_ptr_nonnull(file);
	ck_assert_int_eq(fscanf(file, "%zu", &pages), 1);
	fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

START_TEST(what_a_save_holds_counts_as_reserved)
{
	struct ioshape_context *context = with_staging(4 * CHUNK_BYTES);
	struct ioshape_save *save;
	struct one one;
	size_t before;

	make_one(&one, 2 * CHUNK_BYTES, 1);
	save = begin_lingering(context, scratch_path("a.pt"), &one);
	/* The save maps memory for I/O, too, but not any more. */
	while (!atomic_load(&lingering))
		usleep(1000);
	before = mapped_bytes();
	ck_assert_int_eq(ioshape_context_reserve(context, 4 * CHUNK_BYTES), 0);
	/* Two more; what it has handed back and what it still holds are the other two. */
	ck_assert_uint_ge(mapped_bytes() - before, 2 * CHUNK_BYTES);
	ck_assert_uint_lt(mapped_bytes() - before, 3 * CHUNK_BYTES);
	ck_assert_int_eq(ioshape_context_reserve(context, 4 * CHUNK_BYTES + 1), -ENOMEM);
	atomic_store(&go, true);
	end(save);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

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

START_TEST(done_is_never_more_than_total)
{
	enum { COUNT = 2000 };
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_tensor *tensors = calloc(COUNT, sizeof(*tensors));
	char(*names)[16] = calloc(COUNT, sizeof(*names));

	ck_assert(tensors && names);
	for (int i = 0; i < COUNT; i++) {
		snprintf(names[i], sizeof(names[i]), "%d", i);
		tensors[i] = (struct ioshape_tensor){ .name = names[i],
						      .dtype = IOSHAPE_UINT8,
						      .data = names[i] };
	}
	options.progress = note;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, COUNT, &options, NULL),
		0);
	ck_assert_uint_ge(atomic_load(&told.calls), 4);
	ck_assert(!atomic_load(&told.beyond));
	ioshape_context_free(context);
	free(tensors);
	free(names);
}
END_TEST

START_TEST(a_save_larger_than_staging_speaks_from_two_threads)
{
	struct ioshape_context_options small = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_context *context;
	struct one one;

	small.staging_bytes = CHUNK_BYTES;
	keep_to_one_core(); /* helpers would copy and not speak */
	context = open_context(&small);
	make_one(&one, 4 * CHUNK_BYTES, 1);
	told.caller = pthread_self();
	options.progress = note;
	end(begin(context, scratch_path("a.pt"), &one, &options));
	ck_assert_uint_ge(atomic_load(&told.stages_after_a_write), 1);
	ck_assert(!atomic_load(&told.write_in_this_thread));
	ck_assert(!atomic_load(&told.beyond));
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

static int stop_at_plan(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)done;
	(void)total;
	return phase == IOSHAPE_PHASE_PLAN;
}

START_TEST(the_plan_is_told_before_space_is_reserved)
{
	struct ioshape_writer_options options = IOSHAPE_WRITER_OPTIONS_INIT;
	struct ioshape_context *context = open_context(NULL);
	const struct rlimit limit = { 2 << 20, 2 << 20 };
	struct ioshape_writer *writer;

	/* Reserving it would be refused. */
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	options.expected_bytes = 4 << 20;
	options.progress = stop_at_plan;
	ck_assert_int_eq(ioshape_writer_open(context, scratch_path("a.pt"), &options, &writer),
			 -ECANCELED);
	ck_assert_ptr_null(writer);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ioshape_context_free(context);
}
END_TEST

/* ---- Words ----------------------------------------------------------------------------------- */

static struct {
	pthread_mutex_t lock;
	char lines[8192];
} heard = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void listen(void *user, enum ioshape_log_level level, const char *line)
{
	size_t used;

	(void)user;
	pthread_mutex_lock(&heard.lock);
	used = strlen(heard.lines);
	snprintf(heard.lines + used, sizeof(heard.lines) - used, "%d %s\n", level, line);
	pthread_mutex_unlock(&heard.lock);
}

static struct ioshape_context *with_log(enum ioshape_engine engine, enum ioshape_log_level level)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.engine = engine;
	options.log = listen;
	options.log_level = level;
	return open_context(&options);
}

START_TEST(what_is_not_as_preferred_is_logged)
{
	struct ioshape_context *context = with_log(IOSHAPE_ENGINE_NIL, IOSHAPE_LOG_INFO);
	struct one one;

	make_one(&one, 1000, 1);
	save_and_report(context, scratch_path("a.pt"), &one);
	ck_assert_ptr_eq(strstr(heard.lines, "3 saving "), heard.lines);
	ck_assert_ptr_nonnull(strstr(heard.lines, scratch_path("a.pt")));
	ck_assert_ptr_nonnull(strstr(heard.lines, "writes nothing"));
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(a_background_save_that_fails_is_logged)
{
	struct ioshape_context *context = with_log(IOSHAPE_ENGINE_AUTO, IOSHAPE_LOG_ERROR);
	struct ioshape_save *save;
	char expected[2048];
	struct one one;

	make_one(&one, 1000, 1);
	save = begin(context, scratch_path("missing/a.pt"), &one, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ENOENT);
	snprintf(expected, sizeof(expected), "1 %s; %s\n", ioshape_last_error()->sentence,
		 ioshape_last_error()->remedy);
	ck_assert_str_eq(heard.lines, expected);
	ioshape_save_free(save);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

START_TEST(each_save_is_a_line_for_who_debugs)
{
	struct ioshape_context *context = with_log(IOSHAPE_ENGINE_BUFFERED, IOSHAPE_LOG_INFO);
	struct one one;

	make_one(&one, 1000, 1);
	save_and_report(context, scratch_path("a.pt"), &one);
	ck_assert_str_eq(heard.lines, "");
	ioshape_context_free(context);

	context = with_log(IOSHAPE_ENGINE_BUFFERED, IOSHAPE_LOG_DEBUG);
	save_and_report(context, scratch_path("a.pt"), &one);
	ck_assert_ptr_eq(strstr(heard.lines, "4 "), heard.lines);
	ck_assert_ptr_nonnull(strstr(heard.lines, scratch_path("a.pt")));
	ck_assert_ptr_nonnull(strstr(heard.lines, "buffered engine"));
	ck_assert_ptr_eq(strchr(heard.lines, '\n') + 1, heard.lines + strlen(heard.lines));
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

/* ---- Refusals -------------------------------------------------------------------------------- */

START_TEST(too_much_to_say_about_tensors_is_refused_up_front)
{
	enum { COUNT = 400000, DIMS = IOSHAPE_MAX_DIMS };
	static const int64_t shape[DIMS]; /* zeros: no elements */
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_tensor *tensors = calloc(COUNT, sizeof(*tensors));
	char(*names)[8] = calloc(COUNT, sizeof(*names));

	ck_assert(tensors && names);
	for (int i = 0; i < COUNT; i++) {
		snprintf(names[i], sizeof(names[i]), "%d", i);
		tensors[i] = (struct ioshape_tensor){
			.name = names[i], .dtype = IOSHAPE_INT8, .dims = DIMS, .shape = shape
		};
	}
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, COUNT, NULL, NULL),
		IOSHAPE_E_LIMIT);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ioshape_context_free(context);
	free(tensors);
	free(names);
}
END_TEST

START_TEST(results_need_somewhere_to_go)
{
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_reader *reader;
	struct one one;

	make_one(&one, 1000, 1);
	save_and_report(context, scratch_path("a.pt"), &one);
	reader = open_reader(context, scratch_path("a.pt"));
	ck_assert_int_eq(ioshape_reader_get_record(reader, 0, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "data.pkl", NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_info(reader, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_tensor(reader, 0, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_find_tensor(reader, "one", NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_metadata(reader, NULL), -EINVAL);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, scratch_path("a.pt")));
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

/* As a newer header may have it. */
struct grown {
	struct ioshape_metadata metadata;
	uint64_t more;
};

static int save_with(struct ioshape_context *context, const struct ioshape_metadata *metadata)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = metadata;
	return ioshape_save_tensors(context, scratch_path("a.pt"), NULL, 0, &options, NULL);
}

START_TEST(metadata_has_a_size_and_can_grow)
{
	struct ioshape_context *context = open_context(NULL);
	struct grown grown = { .metadata = IOSHAPE_METADATA_INIT };
	struct ioshape_reader *reader;

	grown.metadata.step = 5;
	ck_assert_int_eq(save_with(context, &grown.metadata), 0);
	grown.metadata.size = sizeof(grown);
	ck_assert_int_eq(save_with(context, &grown.metadata), 0);
	grown.more = 1;
	ck_assert_int_eq(save_with(context, &grown.metadata), -EINVAL);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, "ioshape_metadata"));

	reader = open_reader(context, scratch_path("a.pt"));
	grown.metadata.step = 0;
	ck_assert_int_eq(ioshape_reader_get_metadata(reader, &grown.metadata), 0);
	ck_assert_int_eq(grown.metadata.step, 5);
	ck_assert_uint_eq(grown.metadata.size, sizeof(grown));
	ck_assert_uint_eq(grown.more, 0);
	grown.metadata.size = 0;
	ck_assert_int_eq(ioshape_reader_get_metadata(reader, &grown.metadata), -EINVAL);
	ck_assert_int_eq(save_with(context, &grown.metadata), -EINVAL);
	ioshape_reader_free(reader);
	ioshape_context_free(context);
}
END_TEST

START_TEST(a_commit_with_an_open_record_can_be_tried_again)
{
	struct ioshape_context *context = open_context(NULL);
	struct ioshape_writer *writer;
	struct ioshape_reader *reader;

	ck_assert_int_eq(ioshape_writer_open(context, scratch_path("a.pt"), NULL, &writer), 0);
	ck_assert_int_eq(ioshape_writer_begin_record(writer, "open", IOSHAPE_UNKNOWN_BYTES, 0), 0);
	ck_assert_int_eq(ioshape_writer_commit(writer, NULL), -EINVAL);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, "open"));
	ck_assert_int_eq(ioshape_writer_write(writer, "text", 4), 0);
	ck_assert_int_eq(ioshape_writer_end_record(writer), 0);
	ck_assert_msg(!ioshape_writer_commit(writer, NULL), "%s", ioshape_last_error()->sentence);
	ck_assert_int_eq(ioshape_writer_commit(writer, NULL), -EINVAL);
	ioshape_writer_free(writer);
	reader = open_reader(context, scratch_path("a.pt"));
	ck_assert_uint_eq(info_of_reader(reader).records, 1);
	ck_assert_int_eq(ioshape_reader_verify(reader), 0);
	ioshape_reader_free(reader);
	ioshape_context_free(context);
}
END_TEST

/* The one failure after which the new file is there all the same. */
START_TEST(a_directory_that_does_not_become_durable_fails_the_save_in_place)
{
	struct ioshape_context *context = open_context(NULL);
	struct one one;

	make_one(&one, 1000, 1);
	save_and_report(context, scratch_path("a.pt"), &one);
	memset(one.memory, 2, 1000);
	directories_fail = true;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), &one.tensor, 1, NULL, NULL),
		-EIO);
	directories_fail = false;
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, "is in place"));
	ck_assert_uint_eq(first_byte(context, scratch_path("a.pt")), 2);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	ioshape_context_free(context);
	free(one.memory);
}
END_TEST

static TCase *add_case(Suite *suite, const char *name)
{
	TCase *added = tcase_create(name);

	tcase_add_checked_fixture(added, setup, teardown);
	tcase_set_timeout(added, 30);
	suite_add_tcase(suite, added);
	return added;
}

int main(void)
{
	Suite *suite = suite_create("promises");
	TCase *paths = add_case(suite, "paths"), *engines = add_case(suite, "engines");
	TCase *staging = add_case(suite, "staging"), *progress = add_case(suite, "progress");
	TCase *words = add_case(suite, "words"), *refusals = add_case(suite, "refusals");

	tcase_add_test(paths, a_relative_path_means_what_it_meant_at_the_call);
	tcase_add_loop_test(paths, saves_to_one_file_are_ordered_whatever_they_call_it, 0,
			    sizeof(same_file) / sizeof(*same_file));
	tcase_add_test(paths, a_writer_takes_its_turn_where_it_was_opened);
	tcase_add_test(paths, each_directory_is_tidied_whatever_it_is_called);
	tcase_add_test(paths, a_path_without_a_name_is_refused_at_once);
	tcase_add_test(engines, the_environment_cannot_ask_for_nil);
	tcase_add_test(engines, nil_says_in_the_report_that_nothing_is_written);
	tcase_add_test(engines, reading_with_nil_reads);
	tcase_add_test(engines, an_engine_asked_for_by_name_takes_small_files_too);
	tcase_add_test(engines, direct_io_that_is_required_is_used_for_small_files_too);
	tcase_add_test(staging, staging_below_one_chunk_is_refused);
	tcase_add_test(staging, waiting_for_room_is_in_the_report);
	tcase_add_test(staging, waiting_for_the_turn_is_in_the_report);
	tcase_add_test(staging, what_a_save_holds_counts_as_reserved);
	tcase_add_test(progress, done_is_never_more_than_total);
	tcase_add_test(progress, a_save_larger_than_staging_speaks_from_two_threads);
	tcase_add_test(progress, the_plan_is_told_before_space_is_reserved);
	tcase_add_test(words, what_is_not_as_preferred_is_logged);
	tcase_add_test(words, a_background_save_that_fails_is_logged);
	tcase_add_test(words, each_save_is_a_line_for_who_debugs);
	tcase_add_test(refusals, too_much_to_say_about_tensors_is_refused_up_front);
	tcase_add_test(refusals, results_need_somewhere_to_go);
	tcase_add_test(refusals, metadata_has_a_size_and_can_grow);
	tcase_add_test(refusals, a_commit_with_an_open_record_can_be_tried_again);
	tcase_add_test(refusals, a_directory_that_does_not_become_durable_fails_the_save_in_place);
	return check_main(suite);
}
