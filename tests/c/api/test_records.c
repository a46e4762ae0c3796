/* SPDX-License-Identifier: Apache-2.0 */
/* Records saved in one call: blocking, in the background, and borrowed. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/gate.h"
#include "support/open_context.h"
#include "support/random.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MOST 8
#define LARGE 4 /* index of the record that begins a page of the file */

enum way { BLOCKING, BACKGROUND, BORROWED, WAYS };

static struct ioshape_context *context;

static struct ioshape_context *open_with(uint64_t staging_bytes)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *opened;

	options.staging_bytes = staging_bytes;
	options.examine = "off"; /* alarms would be in some of the files that are compared */
	ck_assert_int_eq(open_context_with(&opened, &options,
					   (struct test_rules){ .block_bytes = 256 * 1024,
								.queue_depth = 4 }),
			 0);
	return opened;
}

/* ---- Records and their sources --------------------------------------------------------------- */

/* State of a fetch function for one record, and counters for all records. */
struct fetched {
	const uint8_t *memory;
	uint64_t bytes;
	uint64_t next; /* expected offset of the next fetch */
	unsigned number;
	uint64_t fail_from; /* first byte that cannot be fetched */
	int code;
};

static struct {
	unsigned number; /* number of the last record fetched */
	unsigned calls;
	size_t largest;
	bool other_thread;
	bool disorder;
	bool elsewhere; /* fetched into memory other than the block that is written; such blocks are
			   pages of the file */
	pthread_t caller;
} calls;

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	struct fetched *fetched = user;

	calls.calls++;
	calls.disorder |= offset != fetched->next || fetched->number < calls.number || !bytes ||
			  bytes > fetched->bytes - offset;
	calls.number = fetched->number;
	calls.other_thread |= !pthread_equal(pthread_self(), calls.caller);
	calls.largest = bytes > calls.largest ? bytes : calls.largest;
	calls.elsewhere |= fetched->number == LARGE && ((uintptr_t)into - offset) % 4096;
	if (calls.disorder)
		return -EBADMSG;
	if (offset + bytes > fetched->fail_from)
		return fetched->code;
	memcpy(into, fetched->memory + offset, bytes);
	fetched->next = offset + bytes;
	return 0;
}

struct given {
	struct ioshape_record records[MOST];
	struct fetched fetched[MOST];
	size_t count;
	uint64_t bytes;
	uint8_t *memory;
};

static struct given given;

static void give(struct given *to, const char *name, size_t bytes, uint32_t alignment)
{
	struct ioshape_record *record = &to->records[to->count];

	ck_assert_uint_lt(to->count, MOST);
	*record = (struct ioshape_record){
		.name = name,
		.data = bytes ? to->memory + to->bytes : NULL,
		.bytes = bytes,
		.alignment = alignment,
	};
	to->fetched[to->count] = (struct fetched){
		.memory = to->memory + to->bytes,
		.bytes = bytes,
		.number = (unsigned)to->count,
		.fail_from = UINT64_MAX,
	};
	to->bytes += bytes;
	to->count++;
}

/* Makes records like those of torch.save; one has `large_bytes`. */
static void give_all(struct given *to, size_t large_bytes)
{
	size_t room = large_bytes + 2 * MIB;
	uint64_t state = 7;

	*to = (struct given){ .memory = malloc(room) };
	ck_assert_ptr_nonnull(to->memory);
	test_random_fill(&state, to->memory, room);
	give(to, "data.pkl", 1234, 0);
	give(to, "byteorder", 6, 1);
	give(to, "data/0", 300001, 0);
	give(to, "data/1", 0, 0);
	give(to, "data/2", large_bytes, 0);
	give(to, "data/3", 77, 4096);
	give(to, "version", 2, 64);
	give(to, ".data/serialization_id", 40, 0);
}

/* Makes a fetch function the source of these records. */
static void let_fetch(struct given *of, unsigned which)
{
	for (size_t i = 0; i < of->count; i++) {
		if (!(which >> i & 1))
			continue;
		of->records[i].data = NULL;
		of->records[i].fetch = fetch;
		of->records[i].fetch_user = &of->fetched[i];
	}
	memset(&calls, 0, sizeof(calls));
	calls.caller = pthread_self();
}

/* Sets of records to fetch: none, some that are not the first ones, and all. */
static const unsigned fetches[] = { 0, 1 << 2 | 1 << 4, (1 << MOST) - 1 };

static void setup(void)
{
	scratch_setup();
	give_all(&given, 3 * MIB + 5);
	context = open_with(64 * MIB);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	free(given.memory);
	scratch_teardown();
}

/* ---- Saves ----------------------------------------------------------------------------------- */

static int save_by(enum way way, const char *path, const struct ioshape_record *records,
		   size_t count, const struct ioshape_save_options *options,
		   struct ioshape_report *report)
{
	struct ioshape_save_options own = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *save;
	int ret;

	if (options)
		own = *options;
	own.borrow = way == BORROWED;
	if (way == BLOCKING) {
		own.report = report;
		ret = ioshape_save_records(context, path, records, count, &own, NULL);
	} else {
		ret = ioshape_save_records(context, path, records, count, &own, &save);
		ck_assert(!ret == !!save);
	}
	if (ret || way == BLOCKING)
		return ret;
	ret = ioshape_save_wait(save, -1);
	if (report)
		ck_assert_int_eq(ioshape_save_get_report(save, report), 0);
	ioshape_save_free(save);
	return ret;
}

/* Saves the reference file: with a blocking call, from memory. */
static void save_expected(const char *path, const struct given *of,
			  const struct ioshape_metadata *metadata)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_record records[MOST];
	const uint8_t *at = of->memory;

	options.metadata = metadata;
	for (size_t i = 0; i < of->count; i++) {
		records[i] = of->records[i];
		records[i].data = records[i].bytes ? at : NULL;
		records[i].fetch = NULL;
		at += records[i].bytes;
	}
	ck_assert_int_eq(ioshape_save_records(context, path, records, of->count, &options, NULL),
			 0);
}

static void must_be_the_same(const char *path, const char *as)
{
	size_t bytes;
	uint8_t *wanted = scratch_read(as, &bytes);

	ck_assert_msg(scratch_same(path, wanted, bytes), "%s is not as %s", path, as);
	free(wanted);
}

static struct test_case records_tests = { .name = "records", .setup = setup, .teardown = teardown };

LOOP_TEST(records_tests, every_way_makes_the_file, 0, (int)COUNT(fetches) * WAYS)
{
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	enum way way = (enum way)(_i % WAYS);
	struct ioshape_reader *reader;

	metadata.step = 12;
	metadata.blob = "blob";
	metadata.blob_bytes = 4;
	options.metadata = &metadata;
	save_expected(scratch_path("expected"), &given, &metadata);
	let_fetch(&given, fetches[_i / WAYS]);
	ck_assert_int_eq(
		save_by(way, scratch_path("file"), given.records, given.count, &options, &report),
		0);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
	ck_assert_uint_ge(report.file_bytes, given.bytes);
	ck_assert_str_eq(report.mode, "single");
	ck_assert((report.stage_s > 0) == (way == BACKGROUND));
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ioshape_reader_free(reader);
}

LOOP_TEST(records_tests, no_records_make_a_file, 0, WAYS)
{
	struct given none = { .count = 0 };

	save_expected(scratch_path("expected"), &none, NULL);
	ck_assert_int_eq(save_by((enum way)_i, scratch_path("file"), NULL, 0, NULL, NULL), 0);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
}

LOOP_TEST(records_tests, many_small_records_are_saved, 0, WAYS)
{
	const size_t many = scratch_rounds(20000);
	struct ioshape_record *records = calloc(many, sizeof(*records));
	char(*names)[16] = calloc(many, sizeof(*names));
	struct ioshape_reader *reader;

	for (size_t i = 0; i < many; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%zu", i);
		records[i] = (struct ioshape_record){ .name = names[i],
						      .data = given.memory + i,
						      .bytes = i % 50 };
	}
	ck_assert_int_eq(save_by((enum way)_i, scratch_path("file"), records, many, NULL, NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	for (size_t i = 0; i < many; i += 997) {
		uint8_t bytes[50];

		ck_assert_int_eq(ioshape_reader_read(reader, i, 0, bytes, i % 50), 0);
		ck_assert_int_eq(memcmp(bytes, given.memory + i, i % 50), 0);
	}
	ioshape_reader_free(reader);
	free(names);
	free(records);
}

/* ---- Arguments ------------------------------------------------------------------------------- */

static char long_name[IOSHAPE_MAX_NAME_BYTES + 2];

static const struct {
	struct ioshape_record record;
	int code;
} refused[] = {
	{ { .name = NULL }, -EINVAL },
	{ { .name = "" }, -EINVAL },
	{ { .name = long_name }, IOSHAPE_E_LIMIT },
	{ { .name = "\xff" }, -EINVAL },
	{ { .name = "/a" }, -EINVAL },
	{ { .name = "a/../b" }, -EINVAL },
	{ { .name = "a//b" }, -EINVAL },
	{ { .name = "a/" }, -EINVAL },
	{ { .name = ".ioshape/index" }, -EINVAL },
	{ { .name = "data.pkl" }, -EEXIST }, /* the name is used already */
	{ { .name = "x", .alignment = 3 }, -EINVAL },
	{ { .name = "x", .alignment = 8192 }, -EINVAL },
	{ { .name = "x", .bytes = 1 }, -EINVAL },
	{ { .name = "x", .data = "y", .bytes = 1, .fetch = fetch }, -EINVAL },
	{ { .name = "x", .data = "y", .fetch = fetch }, -EINVAL },
	{ { .name = "x", .data = "y", .bytes = UINT64_MAX }, -EINVAL },
	{ { .name = "x", .data = "y", .bytes = UINT64_MAX - 1 }, IOSHAPE_E_LIMIT },
	{ { .name = "x", .data = "y", .bytes = (uint64_t)1 << 63 }, IOSHAPE_E_LIMIT },
};

LOOP_TEST(records_tests, a_record_that_makes_no_sense_is_refused_before_anything_is_created, 0,
	  WAYS)
{
	const char *path = scratch_path("missing/file");

	memset(long_name, 'x', sizeof(long_name) - 1);
	for (size_t i = 0; i < COUNT(refused); i++) {
		/* In the last record: the ones before it are valid. */
		struct given all = given;
		int ret;

		all.records[MOST - 1] = refused[i].record;
		let_fetch(&all, 1);
		ret = save_by((enum way)_i, path, all.records, MOST, NULL, NULL);
		/* An error of -ENOENT would mean that the directory was looked at. */
		ck_assert_msg(ret == refused[i].code, "%zu: %d", i, ret);
		ck_assert_msg(strstr(ioshape_last_error()->path, "missing/file") != NULL, "%zu", i);
		ck_assert_uint_eq(calls.calls, 0);
	}
}

LOOP_TEST(records_tests, too_many_records_are_refused, 0, WAYS)
{
	ck_assert_int_eq(
		save_by((enum way)_i, scratch_path("file"), given.records, 4194368, NULL, NULL),
		IOSHAPE_E_LIMIT);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

LOOP_TEST(records_tests, what_is_there_may_have_to_stay, 0, WAYS)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	scratch_write(scratch_path("file"), "old", 3);
	options.replace = IOSHAPE_OFF;
	ck_assert_int_eq(save_by((enum way)_i, scratch_path("file"), given.records, given.count,
				 &options, NULL),
			 -EEXIST);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
}

/* ---- Fetch functions ------------------------------------------------------------------------- */

LOOP_TEST(records_tests, each_byte_is_fetched_once_and_in_order, 0, 2 * WAYS)
{
	enum way way = (enum way)(_i % WAYS);
	bool large = _i / WAYS;
	struct given all;

	/* Five chunks of staging memory, of which there are two. */
	give_all(&all, large ? 70 * MIB : 20 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB);
	save_expected(scratch_path("expected"), &all, NULL);
	let_fetch(&all, 1 << 0 | 1 << 3 | 1 << 4 | 1 << 7);
	ck_assert_int_eq(save_by(way, scratch_path("file"), all.records, all.count, NULL, NULL), 0);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
	ck_assert(!calls.disorder);
	for (size_t i = 0; i < all.count; i++)
		ck_assert_uint_eq(all.fetched[i].next,
				  all.records[i].fetch ? all.fetched[i].bytes : 0);
	ck_assert_int_eq(calls.other_thread, way == BORROWED);
	ck_assert(!calls.elsewhere);
	ck_assert_uint_le(calls.largest, 16 * MIB);
	ck_assert_uint_ge(calls.calls, 4);
	free(all.memory);
}

static const struct {
	int answer, code;
} failures[] = {
	{ -ENODEV, -ENODEV }, { -1, -1 },        { 1, -EIO },      { IOSHAPE_E_DAMAGED, -EIO },
	{ INT_MIN, -EIO },    { INT_MAX, -EIO }, { -4095, -4095 }, { -4096, -EIO },
};

/* -EINPROGRESS from a fetch function must not be passed on. */
TEST(records_tests, a_failure_does_not_look_like_a_save_under_way)
{
	struct given all;

	give_all(&all, 5 * MIB);
	let_fetch(&all, 1 << 4);
	all.fetched[4].next = 0;
	all.fetched[4].code = -EINPROGRESS;
	all.fetched[4].fail_from = 0;
	ck_assert_int_eq(
		save_by(BORROWED, scratch_path("file"), all.records, all.count, NULL, NULL), -EIO);
	free(all.memory);
}

LOOP_TEST(records_tests, what_cannot_be_fetched_fails_the_save, 0, 2 * WAYS)
{
	enum way way = (enum way)(_i % WAYS);
	bool large = _i / WAYS;
	struct given all;

	give_all(&all, large ? 70 * MIB : 5 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB);
	scratch_write(scratch_path("file"), "old", 3);
	for (size_t i = 0; i < (large ? 2 : COUNT(failures)); i++) {
		int ret;

		let_fetch(&all, 1 << 4);
		all.fetched[4].next = 0;
		all.fetched[4].code = failures[i].answer;
		all.fetched[4].fail_from = i % 2 ? all.fetched[4].bytes - 1 : 0;
		ret = save_by(way, scratch_path("file"), all.records, all.count, NULL, NULL);
		ck_assert_msg(ret == failures[i].code, "%zu: %d", i, ret);
		ck_assert_str_eq(ioshape_last_error()->record, "data/2");
		ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
		ck_assert(scratch_same(scratch_path("file"), "old", 3));
		ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	}
	/* All staging memory must be free again. */
	let_fetch(&all, 1 << 4);
	all.fetched[4].next = 0;
	all.fetched[4].fail_from = UINT64_MAX;
	ck_assert_int_eq(save_by(way, scratch_path("file"), all.records, all.count, NULL, NULL), 0);
	free(all.memory);
}

struct stop {
	enum ioshape_phase phase;
	uint64_t from;
};

static int stop_there(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	const struct stop *stop = user;

	(void)total;
	return phase == stop->phase && done >= stop->from;
}

LOOP_TEST(records_tests, fetching_can_be_stopped, 0, WAYS)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct stop stop = { _i == BACKGROUND ? IOSHAPE_PHASE_STAGE : IOSHAPE_PHASE_WRITE,
			     20 * MIB };
	struct given all;

	give_all(&all, 60 * MIB);
	let_fetch(&all, 1 << 4);
	options.progress = stop_there;
	options.progress_user = &stop;
	ck_assert_int_eq(
		save_by((enum way)_i, scratch_path("file"), all.records, all.count, &options, NULL),
		-ECANCELED);
	ck_assert_uint_ge(all.fetched[4].next, 15 * MIB);
	ck_assert_uint_le(all.fetched[4].next, 40 * MIB);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	free(all.memory);
}

static struct ioshape_save *begin_gated(struct gate *gate, enum ioshape_phase phase, uint64_t from,
					const char *path, const struct given *of, bool borrow)
{
	struct ioshape_save_options options = gate_options(gate, phase, from);
	struct ioshape_save *save;

	options.borrow = borrow;
	ck_assert_int_eq(
		ioshape_save_records(context, path, of->records, of->count, &options, &save), 0);
	sem_wait(&gate->reached);
	return save;
}

/* Waits until the save has ended, and frees it. Returns its result. */
static int end(struct ioshape_save *save)
{
	int ret = ioshape_save_wait(save, -1);

	ioshape_save_free(save);
	return ret;
}

/* ---- Borrowed memory ------------------------------------------------------------------------- */

TEST(records_tests, what_is_borrowed_is_read_after_the_call)
{
	struct ioshape_record records[MOST];
	char names[MOST][64];
	struct given passed = given;
	struct ioshape_save *save;
	struct gate gate;

	memcpy(records, given.records, sizeof(records));
	for (size_t i = 0; i < given.count; i++) {
		snprintf(names[i], sizeof(names[i]), "%s", records[i].name);
		passed.records[i].name = names[i];
	}
	save = begin_gated(&gate, IOSHAPE_PHASE_PLAN, 0, scratch_path("file"), &passed, true);
	/* Only the names and the array were copied. */
	memset(names, 0xff, sizeof(names));
	memset(&passed, 0xff, sizeof(passed));
	memset(given.memory, 42, given.bytes);
	sem_post(&gate.opened);
	ck_assert_int_eq(end(save), 0);
	save_expected(scratch_path("expected"), &given, NULL);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
}

TEST(records_tests, tensors_can_be_borrowed_too)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	int64_t shape[2] = { 300, 200 }, strides[2] = { 1, 300 };
	char name[] = "tensor", lying[] = "lying";
	/* One tensor is transposed; the other is contiguous. */
	struct ioshape_tensor tensors[] = {
		{ name, IOSHAPE_FLOAT32, 2, shape, strides, given.memory },
		{ lying, IOSHAPE_UINT8, 2, shape, NULL, given.memory },
	};
	struct ioshape_save *save;

	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("expected"), tensors, 2, NULL, NULL), 0);
	options.borrow = 1;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("file"), tensors, 2, &options, &save),
		0);
	memset(shape, 0xff, sizeof(shape));
	memset(strides, 0xff, sizeof(strides));
	memset(name, 'x', sizeof(name) - 1);
	memset(tensors, 0xff, sizeof(tensors));
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ck_assert_int_eq(ioshape_save_get_report(save, &report), 0);
	ck_assert_double_eq(report.stage_s, 0);
	ioshape_save_free(save);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
}

TEST(records_tests, a_blocking_save_ignores_borrow)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.borrow = 1;
	save_expected(scratch_path("expected"), &given, NULL);
	ck_assert_int_eq(ioshape_save_records(context, scratch_path("file"), given.records,
					      given.count, &options, NULL),
			 0);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
}

/* Saves in the background. Returns the error of the call. */
static void *save_copied(void *path)
{
	return (void *)(intptr_t)save_by(BACKGROUND, path, given.records, given.count, NULL, NULL);
}

TEST(records_tests, a_borrowed_save_needs_no_staging_memory)
{
	char path[512];
	struct ioshape_save *first;
	pthread_t second;
	struct gate gate;
	void *ret;

	ioshape_context_free(context);
	context = open_with(16 * MIB);
	first = begin_gated(&gate, IOSHAPE_PHASE_WRITE, 0, scratch_path("first"), &given, false);
	/* From now on this save queues for staging memory. */
	snprintf(path, sizeof(path), "%s", scratch_path("second"));
	ck_assert_int_eq(pthread_create(&second, NULL, save_copied, path), 0);
	usleep(100000);
	ck_assert_int_eq(
		save_by(BORROWED, scratch_path("third"), given.records, given.count, NULL, NULL),
		0);
	ck_assert_int_eq(ioshape_save_wait(first, 0), -EINPROGRESS);
	sem_post(&gate.opened);
	pthread_join(second, &ret);
	ck_assert_int_eq((int)(intptr_t)ret, 0);
	ck_assert_int_eq(end(first), 0);
	must_be_the_same(scratch_path("third"), scratch_path("first"));
}

/* After ioshape_save_free() or the end of the context, the library must not read the memory. */
LOOP_TEST(records_tests, a_borrowed_save_dropped_on_its_way_lets_go_of_the_memory, 0, 2)
{
	const size_t bytes = 30 * MIB;
	uint8_t *memory =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct given one = { .records = { { .name = "one", .data = memory, .bytes = bytes } },
			     .count = 1 };
	struct ioshape_save *save;
	unsigned calls_before;
	pthread_t opener;
	struct gate gate;

	ck_assert_ptr_ne(memory, MAP_FAILED);
	memset(memory, 1, bytes);
	scratch_write(scratch_path("file"), "old", 3);
	save = begin_gated(&gate, IOSHAPE_PHASE_WRITE, MIB, scratch_path("file"), &one, true);
	calls_before = atomic_load(&gate.calls);
	pthread_create(&opener, NULL, gate_open_later, &gate);
	if (_i) {
		ioshape_context_free(context);
		context = NULL;
	} else {
		ioshape_save_free(save);
	}
	munmap(memory, bytes);
	pthread_join(opener, NULL);
	if (_i)
		ioshape_save_free(save);
	/* The save stopped without writing the rest. */
	ck_assert_uint_eq(atomic_load(&gate.calls), calls_before);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

TEST(records_tests, borrowed_and_copied_saves_to_one_path_keep_their_order)
{
	struct ioshape_save *saves[3];
	struct gate gates[3];

	saves[0] =
		begin_gated(&gates[0], IOSHAPE_PHASE_SYNC, 0, scratch_path("file"), &given, true);
	given.count--;
	saves[1] =
		begin_gated(&gates[1], IOSHAPE_PHASE_PLAN, 0, scratch_path("file"), &given, false);
	given.count--;
	saves[2] =
		begin_gated(&gates[2], IOSHAPE_PHASE_PLAN, 0, scratch_path("file"), &given, true);
	sem_post(&gates[2].opened);
	sem_post(&gates[1].opened);
	usleep(50000);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(ioshape_save_wait(saves[i], 0), -EINPROGRESS);
	sem_post(&gates[0].opened);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(end(saves[i]), 0);
	save_expected(scratch_path("expected"), &given, NULL);
	must_be_the_same(scratch_path("file"), scratch_path("expected"));
}

/* ---- Progress -------------------------------------------------------------------------------- */

struct seen {
	enum ioshape_phase phase;
	uint64_t done, total;
};

static struct seen ask(struct ioshape_save *save)
{
	struct ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

	ck_assert_int_eq(ioshape_save_get_status(save, &status, NULL), 0);
	return (struct seen){ status.phase, status.done_bytes, status.total_bytes };
}

LOOP_TEST(records_tests, a_save_under_way_says_how_far_it_is, 0, 10)
{
	static const enum ioshape_phase phases[] = { IOSHAPE_PHASE_PLAN, IOSHAPE_PHASE_WRITE,
						     IOSHAPE_PHASE_SYNC, IOSHAPE_PHASE_COMMIT,
						     IOSHAPE_PHASE_DONE };
	bool borrow = _i % 2;
	enum ioshape_phase phase = phases[_i / 2];
	uint64_t from = phase == IOSHAPE_PHASE_WRITE ? MIB : 0;
	struct ioshape_save *save;
	struct seen seen;
	struct gate gate;

	save = begin_gated(&gate, phase, from, scratch_path("file"), &given, borrow);
	seen = ask(save);
	/* A save is done when it has ended, not at its last progress call. */
	ck_assert_int_eq(seen.phase, phase == IOSHAPE_PHASE_DONE ? IOSHAPE_PHASE_COMMIT : phase);
	ck_assert_uint_ge(seen.total, given.bytes);
	ck_assert_uint_lt(seen.total, given.bytes + 40000);
	if (phase == IOSHAPE_PHASE_PLAN)
		ck_assert_uint_eq(seen.done, 0);
	else if (phase == IOSHAPE_PHASE_WRITE)
		ck_assert(seen.done >= from && seen.done < seen.total);
	else
		ck_assert_uint_eq(seen.done, seen.total);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	seen = ask(save);
	ck_assert_int_eq(seen.phase, IOSHAPE_PHASE_DONE);
	ck_assert_uint_eq(seen.done, seen.total);
	ioshape_save_free(save);
}

/* Polls the status without a callback. */
LOOP_TEST(records_tests, progress_never_goes_back, 0, WAYS)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct seen before = { 0 }, seen;
	struct ioshape_save *save;
	struct given all;

	/*
	 * One save fits into the staging memory; the other is staged and written at the same time.
	 */
	give_all(&all, _i == BACKGROUND ? 40 * MIB : 100 * MIB);
	options.borrow = _i == BORROWED;
	ck_assert_int_eq(ioshape_save_records(context, scratch_path("file"), all.records, all.count,
					      &options, &save),
			 0);
	do {
		seen = ask(save);
		ck_assert_uint_le(seen.done, seen.total);
		ck_assert_int_ge(seen.phase, before.phase);
		if (seen.phase == before.phase)
			ck_assert(seen.done >= before.done && seen.total == before.total);
		/*
		 * The handle exists only after staging. A save that is larger than the staging
		 * memory is being written by then.
		 */
		if (seen.phase == IOSHAPE_PHASE_STAGE)
			ck_assert(_i == BACKGROUND && seen.done == seen.total);
		before = seen;
		/* A save that is done has ended. */
		ck_assert(seen.phase != IOSHAPE_PHASE_DONE || !ioshape_save_wait(save, 0));
	} while (seen.phase != IOSHAPE_PHASE_DONE);
	ck_assert_uint_eq(seen.done, seen.total);
	ck_assert_int_eq(ioshape_save_wait(save, 0), 0);
	ioshape_save_free(save);
	free(all.memory);
}

LOOP_TEST(records_tests, a_failed_save_is_done_as_far_as_it_came, 0, 2)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct stop stop = { IOSHAPE_PHASE_WRITE, 2 * MIB };
	struct ioshape_save *save;
	struct seen seen;

	options.borrow = (uint32_t)_i;
	ck_assert_int_eq(ioshape_save_records(context, scratch_path("missing/file"), given.records,
					      given.count, &options, &save),
			 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ENOENT);
	seen = ask(save);
	ck_assert_int_eq(seen.phase, IOSHAPE_PHASE_DONE);
	ck_assert_uint_eq(seen.done, 0);
	ck_assert_uint_ge(seen.total, given.bytes);
	ioshape_save_free(save);

	options.progress = stop_there;
	options.progress_user = &stop;
	ck_assert_int_eq(ioshape_save_records(context, scratch_path("file"), given.records,
					      given.count, &options, &save),
			 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ECANCELED);
	seen = ask(save);
	ck_assert_int_eq(seen.phase, IOSHAPE_PHASE_DONE);
	ck_assert(seen.done >= 2 * MIB && seen.done < seen.total);
	ioshape_save_free(save);
}
