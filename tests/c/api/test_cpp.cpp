/* SPDX-License-Identifier: Apache-2.0 */
/* ioshape.hpp: handles that can be moved, exceptions, and saves that end with their handle. */
#include <ioshape/ioshape.hpp>

extern "C" {
#include "support/check_main.h"
#include "support/scratch.h"
}
#undef fail /* a macro of check's; here it is a function of a class */

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>

static_assert(std::is_default_constructible_v<ioshape::save>, "a save to be assigned later");
static_assert(!std::is_copy_constructible_v<ioshape::save>, "a save has one owner");
static_assert(std::is_nothrow_move_constructible_v<ioshape::save>, "a save can be moved");
static_assert(!std::is_convertible_v<ioshape::save, bool>, "a save is asked, not added up");
static_assert(std::is_nothrow_move_constructible_v<ioshape::group>, "a group can be moved");
static_assert(!std::is_copy_constructible_v<ioshape::group>, "a group has one owner");
static_assert(std::is_base_of_v<std::system_error, ioshape::error>, "as the header says");

namespace
{

struct one {
	std::vector<std::uint8_t> memory;
	std::int64_t shape[1];

	one(std::size_t bytes, std::uint8_t value)
		: memory(bytes, value), shape{ static_cast<std::int64_t>(bytes) }
	{
	}
	std::vector<ioshape_tensor> tensors() const
	{
		return { { "one", IOSHAPE_UINT8, 1, shape, nullptr, memory.data() } };
	}
};

std::uint8_t first_byte(const ioshape::context &context, const char *path)
{
	const ioshape::reader reader(context, path);
	std::uint8_t byte = 0;

	reader.load({ { reader.find_tensor("one"), 0, 1, &byte } });
	return byte;
}

/* The code that a call throws; 0 if it does not. */
template <typename Call> int thrown(Call &&call)
{
	try {
		call();
	} catch (const ioshape::error &error) {
		return error.raw();
	}
	return 0;
}

/* Holds a save before its file takes its place, until it is aborted. */
int hold(void *user, ioshape_phase phase, std::uint64_t, std::uint64_t)
{
	auto *const released = static_cast<std::atomic<bool> *>(user);

	while (phase == IOSHAPE_PHASE_SYNC && !*released)
		usleep(1000);
	return 0;
}

} // namespace

static struct test_case classes = { "classes",        nullptr, nullptr, scratch_setup,
				    scratch_teardown, nullptr, nullptr };

TEST(classes, a_save_can_wait_to_be_assigned)
{
	ioshape::context context;
	const one given(1000, 4);
	ioshape::save save;

	ck_assert(!save);
	ck_assert_ptr_null(save.get());
	ck_assert_int_eq(thrown([&] { save.wait(); }), -EINVAL);
	ck_assert_int_eq(thrown([&] { save.done(); }), -EINVAL);
	save = context.save_tensors_async(scratch_path("a.pt"), given.tensors());
	ck_assert(static_cast<bool>(save));
	save.wait();
	ck_assert(save.done());
	ck_assert_uint_eq(first_byte(context, scratch_path("a.pt")), 4);

	ioshape::save taken = std::move(save);
	ck_assert(!save); /* NOLINT: what a moved one is, is the question */
	ck_assert(static_cast<bool>(taken));
	taken = {};
	ck_assert(!taken);
}

TEST(classes, assigning_over_a_save_under_way_aborts_it)
{
	ioshape::context context;
	const one old(1000, 1), lost(1000, 2), kept(1000, 3);
	ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	std::atomic<bool> released{ false };

	context.save_tensors(scratch_path("a.pt"), old.tensors());
	options.progress = hold;
	options.progress_user = &released;
	ioshape::save save =
		context.save_tensors_async(scratch_path("a.pt"), lost.tensors(), options);
	ioshape::save next = context.save_tensors_async(scratch_path("b.pt"), kept.tensors());
	/* To assign is to abort and then to wait, so by the time of the release it is aborted. */
	std::thread releaser([&] {
		usleep(300000);
		released = true;
	});
	save = std::move(next);
	releaser.join();
	save.wait();
	ck_assert_uint_eq(first_byte(context, scratch_path("a.pt")), 1);
	ck_assert_uint_eq(first_byte(context, scratch_path("b.pt")), 3);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
}

TEST(classes, failures_are_exceptions)
{
	ioshape::context context;

	try {
		ioshape::reader reader(context, scratch_path("missing.pt"));
		ck_abort_msg("opened what is not there");
	} catch (const std::system_error &error) {
		ck_assert(error.code() == std::errc::no_such_file_or_directory);
	}
	scratch_write(scratch_path("text.pt"), "no archive", 10);
	try {
		ioshape::reader reader(context, scratch_path("text.pt"));
		ck_abort_msg("opened what is no archive");
	} catch (const ioshape::error &error) {
		ck_assert(error.code().category() == ioshape::category());
		ck_assert_int_eq(error.raw(), IOSHAPE_E_FORMAT);
		ck_assert_str_eq(error.operation().c_str(), "load");
		ck_assert_str_eq(error.path().c_str(), scratch_path("text.pt"));
	}
}

TEST(classes, metadata_and_records_travel)
{
	ioshape::context context;
	ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	ioshape_record record = {};
	std::string text(4, 0);

	metadata.step = 12;
	options.metadata = &metadata;
	record.name = "text";
	record.data = "text";
	record.bytes = 4;
	const ioshape_report report =
		context.save_records(scratch_path("a.pt"), { record }, options);
	ck_assert_uint_eq(
		ioshape::text(report).find(std::to_string(report.file_bytes) + " bytes in "), 0);

	const ioshape::reader reader(context, scratch_path("a.pt"));
	reader.read(reader.find_record("text"), 0, &text[0], text.size());
	ck_assert_str_eq(text.c_str(), "text");
	text.assign(4, 0);
	reader.load_records({ { reader.find_record("text"), 0, text.size(), &text[0] } });
	ck_assert_str_eq(text.c_str(), "text");
	ck_assert_int_eq(reader.metadata().step, 12);
	ck_assert_uint_eq(reader.info().has_table, 0);
	ck_assert_int_eq(thrown([&] { reader.tensor(0); }), IOSHAPE_E_NO_TABLE);
	reader.verify();
}

TEST(classes, records_are_saved_in_one_call)
{
	ioshape::context context;
	ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	ioshape_record record = {};
	std::string text("text"), read(4, 0);

	record.name = "text";
	record.data = text.data();
	record.bytes = text.size();
	const std::vector<ioshape_record> records{ record };
	ck_assert_uint_gt(context.save_records(scratch_path("a.pt"), records).file_bytes, 4);
	ioshape::save save = context.save_records_async(scratch_path("b.pt"), records);
	options.borrow = 1;
	ioshape::save next = context.save_records_async(scratch_path("c.pt"), records, options);
	save.wait();
	next.wait();
	ck_assert_int_eq(next.status().phase, IOSHAPE_PHASE_DONE);
	ck_assert_uint_eq(next.status().done_bytes, next.status().total_bytes);
	for (const char *name : { "a.pt", "b.pt", "c.pt" }) {
		const ioshape::reader reader(context, scratch_path(name));

		reader.read(reader.find_record("text"), 0, &read[0], read.size());
		ck_assert_str_eq(read.c_str(), "text");
	}
	ck_assert_int_eq(thrown([&] { ioshape::save().status(); }), -EINVAL);
	ck_assert_int_eq(thrown([&] {
				 context.save_records(scratch_path("d.pt"), { record, record });
			 }),
			 -EEXIST);
	ck_assert_int_eq(
		thrown([&] {
			context.save_records_async(scratch_path("d.pt"), { record, record });
		}),
		-EEXIST);
}

TEST(classes, safetensors_are_saved_in_one_call)
{
	ioshape::context context;
	ioshape_tensor tensor = {};
	const float number = 1.5F;
	std::size_t bytes[2];

	tensor.name = "number";
	tensor.dtype = IOSHAPE_FLOAT32;
	tensor.data = &number;
	const std::vector<ioshape_tensor> tensors{ tensor };
	ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	options.format = IOSHAPE_FORMAT_SAFETENSORS;
	context.save_tensors(scratch_path("a.safetensors"), tensors, options);
	ioshape::save save =
		context.save_tensors_async(scratch_path("b.safetensors"), tensors, options);
	save.wait();
	std::unique_ptr<std::uint8_t, decltype(&std::free)> files[] = {
		{ scratch_read(scratch_path("a.safetensors"), &bytes[0]), std::free },
		{ scratch_read(scratch_path("b.safetensors"), &bytes[1]), std::free },
	};
	const char expected[] =
		"{\"number\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}";
	for (int i = 0; i < 2; i++) {
		ck_assert_uint_eq(bytes[i], 8 + 64 + sizeof(number));
		ck_assert_int_eq(memcmp(files[i].get() + 8, expected, sizeof(expected) - 1), 0);
		ck_assert_int_eq(memcmp(files[i].get() + 8 + 64, &number, sizeof(number)), 0);
	}
	ck_assert_int_eq(
		thrown([&] {
			context.save_tensors(scratch_path("c"), { tensor, tensor }, options);
		}),
		-EINVAL);
}

TEST(classes, a_file_is_there_when_it_is_committed)
{
	ioshape::context context;

	{
		ioshape::file abandoned(context, scratch_path("file"));
		abandoned.write("bytes", 5);
	}
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ioshape::file file(context, scratch_path("file"));
	file.write("by", 2);
	file.write("tes", 3);
	ck_assert_uint_eq(file.commit().file_bytes, 5);
	ck_assert(scratch_same(scratch_path("file"), "bytes", 5));
	ck_assert_int_eq(thrown([&] { file.write("more", 4); }), -EINVAL);
	ck_assert_int_eq(thrown([&] { ioshape::file(context, scratch_path("no/file")); }), -ENOENT);
}

TEST(classes, a_slot_is_held_as_long_as_it_lives)
{
	const std::string address = std::string("local:") + scratch_directory();
	ioshape_context_options settings = ioshape::context::default_options();
	ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;

	settings.coordinator = address.c_str();
	settings.pool = "p";
	settings.slots = 1;
	ioshape::context context(settings);
	options.timeout_ms = -1;
	{
		ioshape::slot slot(context, options);

		slot.pace(5);
		const ioshape_slot_info info = slot.info();

		ck_assert_str_eq(info.pool, "p");
		ck_assert_int_eq(thrown([&] { ioshape::slot(context, options); }), -EAGAIN);
	}
	ioshape::slot again(context, options);
	ck_assert_int_eq(thrown([&] { ioshape::save().place(); }), -EINVAL);
}

TEST(classes, checkpoints_are_looked_for)
{
	ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	const std::string directory = scratch_directory();
	ioshape::context context;

	ck_assert(ioshape::checkpoint::steps(context, directory).empty());
	options.keep_last = 1;
	ck_assert_uint_eq(ioshape::checkpoint::prune(context, directory, options), 0);
	ck_assert_int_eq(thrown([&] { ioshape::checkpoint::latest(context, directory); }), -ENOENT);
	ck_assert_int_eq(thrown([&] { ioshape::checkpoint(context, directory, 7); }), -ENOENT);
	ck_assert_int_eq(thrown([&] { ioshape::checkpoint::steps(context, "nowhere"); }), -ENOENT);
}

/* What a rank of two has seen. */
struct seen {
	std::uint64_t before = 0, after = 0;
	ioshape_report report = IOSHAPE_REPORT_INIT;
	int failed = 0;
	std::int64_t rank = -1;
};

static seen save_as(std::uint32_t rank, std::string directory)
{
	ioshape::context context;
	ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	const one first(100000, static_cast<std::uint8_t>(10 + rank));
	one second(200000, static_cast<std::uint8_t>(20 + rank));
	seen seen;

	options.rank = rank;
	options.ranks = options.local_ranks = 2;
	options.token = directory.c_str();
	options.deadline_ms = 20000;
	ioshape::group opened(context, directory, options);
	ioshape::group group = std::move(opened);
	seen.before = ioshape::checkpoint::steps(context, directory).size();
	seen.report = group.save_tensors(1, first.tensors());
	ioshape::save save = group.save_tensors_async(2, second.tensors());
	second.memory.assign(second.memory.size(), 99);
	save.wait();
	try {
		if (rank)
			group.fail(3, "nothing learned");
		else
			group.save_tensors(3, first.tensors());
	} catch (const ioshape::error &error) {
		seen.failed = error.raw();
		seen.rank = error.rank();
	}
	seen.after = ioshape::checkpoint::latest(context, directory).info().step;
	return seen;
}

static std::uint8_t first_byte_of(const ioshape::context &context, const std::string &directory,
				  std::uint64_t step, std::uint32_t rank)
{
	const ioshape::checkpoint checkpoint(context, directory, step);
	const ioshape::reader reader = checkpoint.shard_reader(rank);
	std::uint8_t byte = 0;

	reader.load({ { reader.find_tensor("one"), 0, 1, &byte } });
	return byte;
}

TEST(classes, ranks_save_together)
{
	const std::string directory = scratch_path("run");
	auto other = std::async(std::launch::async, save_as, 1, directory);
	const seen first = save_as(0, directory), second = other.get();
	ioshape::context context;

	for (const seen &seen : { first, second }) {
		ck_assert_uint_eq(seen.before, 0);
		ck_assert_uint_eq(seen.after, 2);
		ck_assert_uint_gt(seen.report.checkpoint_bytes, 200000);
	}
	ck_assert_int_lt(first.failed, 0);
	ck_assert_int_eq(first.rank, 1);
	ck_assert_int_eq(second.failed, 0);
	for (std::uint32_t rank = 0; rank < 2; rank++) {
		ck_assert_uint_eq(first_byte_of(context, directory, 1, rank), 10 + rank);
		ck_assert_uint_eq(first_byte_of(context, directory, 2, rank), 20 + rank);
	}
	ck_assert(ioshape::checkpoint::steps(context, directory) ==
		  (std::vector<std::uint64_t>{ 1, 2 }));
	ioshape::checkpoint::latest(context, directory).verify();
	ck_assert_uint_eq(scratch_entries(directory.c_str()), 2);
}

TEST(classes, a_group_that_nobody_joins_is_an_exception)
{
	ioshape::context context;
	ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;

	options.ranks = options.local_ranks = 2;
	options.token = scratch_directory();
	options.deadline_ms = 1000;
	ck_assert_int_eq(thrown([&] { ioshape::group(context, scratch_path("run"), options); }),
			 -ETIMEDOUT);
}
