/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libioshape for C++17: the C API with destructors and exceptions, and nothing else.
 *
 * Handles can be moved, not copied. Failures throw ioshape::error, a std::system_error.
 * Ownership and threads are as the C headers say for the functions called.
 */
#ifndef IOSHAPE_IOSHAPE_HPP
#define IOSHAPE_IOSHAPE_HPP

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <ioshape/ioshape.h>
#include <ioshape/probe.h>

namespace ioshape
{

/* Names for the codes that are not errnos. */
inline const std::error_category &category() noexcept
{
	struct our_category final : std::error_category {
		const char *name() const noexcept override
		{
			return "ioshape";
		}
		std::string message(int code) const override
		{
			return ioshape_strerror(code);
		}
	};
	static const our_category instance;
	return instance;
}

/* A negative code of the C API as a std::error_code: errnos in the generic category, others in
 * ours. */
inline std::error_code make_error_code(int code) noexcept
{
	if (code < 0 && code > -4096)
		return { -code, std::generic_category() };
	return { code, category() };
}

/* What every failure throws: a copy of what ioshape_last_error() tells. what() is for people. */
class error : public std::system_error
{
public:
	/* The call of this thread that has just failed, with `code`. */
	explicit error(int code) : error(code, *ioshape_last_error())
	{
	}
	error(int code, const ioshape_error &last)
		: std::system_error(make_error_code(code)), code_(code)
	{
		if (last.code != code) { /* told by nobody */
			sentence_ = what_ = ioshape_strerror(code);
			return;
		}
		operation_ = last.operation;
		path_ = last.path;
		sentence_ = last.sentence;
		remedy_ = last.remedy;
		record_ = last.record;
		offset_ = last.offset;
		needed_bytes_ = last.needed_bytes;
		free_bytes_ = last.free_bytes;
		rank_ = last.rank;
		what_ = remedy_.empty() ? sentence_ : sentence_ + "; " + remedy_;
	}
	const char *what() const noexcept override
	{
		return what_.c_str();
	}
	/* The code as the C API returned it. */
	int raw() const noexcept
	{
		return code_;
	}
	/* The fields of struct ioshape_error. */
	const std::string &operation() const noexcept
	{
		return operation_;
	}
	const std::string &path() const noexcept
	{
		return path_;
	}
	const std::string &sentence() const noexcept
	{
		return sentence_;
	}
	const std::string &remedy() const noexcept
	{
		return remedy_;
	}
	const std::string &record() const noexcept
	{
		return record_;
	}
	std::uint64_t offset() const noexcept
	{
		return offset_;
	}
	std::uint64_t needed_bytes() const noexcept
	{
		return needed_bytes_;
	}
	std::uint64_t free_bytes() const noexcept
	{
		return free_bytes_;
	}
	std::int64_t rank() const noexcept
	{
		return rank_;
	}

private:
	int code_;
	std::string what_, operation_, path_, sentence_, remedy_, record_;
	std::uint64_t offset_ = UINT64_MAX, needed_bytes_ = UINT64_MAX, free_bytes_ = UINT64_MAX;
	std::int64_t rank_ = -1;
};

namespace detail
{
template <auto Free> struct deleter {
	template <typename Handle> void operator()(Handle *handle) const noexcept
	{
		Free(handle);
	}
};
} // namespace detail

/* What ioshape_probe() found out, with the strings and lists in it. */
using storage_ptr = std::unique_ptr<ioshape_storage, detail::deleter<ioshape_free>>;

class save;
class slot;
class writer;
class file;
class generation;
class reader;

class context
{
public:
	context() : context(default_options())
	{
	}
	explicit context(const ioshape_context_options &options)
	{
		ioshape_context *handle = nullptr;
		const int code = ioshape_context_open(&handle, &options);

		if (code < 0)
			throw error(code);
		handle_.reset(handle);
	}
	static ioshape_context_options default_options()
	{
		return IOSHAPE_CONTEXT_OPTIONS_INIT;
	}
	void reserve(std::uint64_t bytes)
	{
		check(ioshape_context_reserve(get(), bytes));
	}
	void trim()
	{
		check(ioshape_context_reserve(get(), 0));
	}

	/* Blocks until the tensors are durable and in place. */
	ioshape_report save_tensors(const std::string &path,
				    const std::vector<ioshape_tensor> &tensors,
				    ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		options.report = &report;
		check(ioshape_save_tensors(get(), path.c_str(), tensors.data(), tensors.size(),
					   &options, nullptr));
		return report;
	}

	/* Returns when the tensors may be changed; with options.borrow, at once. */
	inline save
	save_tensors_async(const std::string &path, const std::vector<ioshape_tensor> &tensors,
			   const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT);

	/* Blocks until the records are durable and in place. */
	ioshape_report save_records(const std::string &path,
				    const std::vector<ioshape_record> &records,
				    ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		options.report = &report;
		check(ioshape_save_records(get(), path.c_str(), records.data(), records.size(),
					   &options, nullptr));
		return report;
	}

	/* Returns when the records may be changed; with options.borrow, at once. */
	inline save
	save_records_async(const std::string &path, const std::vector<ioshape_record> &records,
			   const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT);

	/* What a path sits on, and what a save would do there. */
	storage_ptr probe(const std::string &path,
			  const ioshape_probe_options &options = IOSHAPE_PROBE_OPTIONS_INIT)
	{
		ioshape_storage *storage = nullptr;

		check(ioshape_probe(get(), path.c_str(), &options, &storage));
		return storage_ptr(storage);
	}

	ioshape_context *get() const noexcept
	{
		return handle_.get();
	}

private:
	friend class writer;
	friend class file;
	friend class generation;
	friend class reader;
	friend class slot;
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	std::unique_ptr<ioshape_context, detail::deleter<ioshape_context_free>> handle_;
};

/*
 * A save in the background, or none yet. Destroying it, or assigning another to it, before it has
 * ended aborts it: wait() to keep it.
 */
class save
{
public:
	save() = default;
	/* Whether there is one. Without one all else throws -EINVAL. */
	explicit operator bool() const noexcept
	{
		return handle_ != nullptr;
	}
	bool done() const
	{
		return status().phase == IOSHAPE_PHASE_DONE;
	}
	/* Throws what the save failed with. */
	void wait()
	{
		check(ioshape_save_wait(get(), -1));
	}
	/* False if it has not ended within the time. */
	bool wait_for(std::chrono::milliseconds timeout)
	{
		const int code =
			ioshape_save_wait(get(), timeout.count() < 0 ? 0 : timeout.count());

		if (code == -EINPROGRESS)
			return false;
		check(code);
		return true;
	}
	/* Asks it to stop; wait() then throws -ECANCELED, unless it was done already. */
	void cancel()
	{
		check(ioshape_save_cancel(get()));
	}
	ioshape_report report() const
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		check(ioshape_save_get_report(get(), &report));
		return report;
	}
	ioshape_save_status status() const
	{
		ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

		check(ioshape_save_get_status(get(), &status, nullptr));
		return status;
	}
	/* Where it stands in the queue for a slot; zeros if it does not wait for one. */
	ioshape_place place() const
	{
		ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;
		ioshape_place place = {};

		place.size = sizeof(place);
		check(ioshape_save_get_status(get(), &status, &place));
		return place;
	}
	ioshape_save *get() const noexcept
	{
		return handle_.get();
	}

private:
	friend class context;
	friend class group;
	explicit save(ioshape_save *handle) : handle_(handle)
	{
	}
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	std::unique_ptr<ioshape_save, detail::deleter<ioshape_save_free>> handle_;
};

inline save context::save_tensors_async(const std::string &path,
					const std::vector<ioshape_tensor> &tensors,
					const ioshape_save_options &options)
{
	ioshape_save *handle = nullptr;

	check(ioshape_save_tensors(get(), path.c_str(), tensors.data(), tensors.size(), &options,
				   &handle));
	return save(handle);
}

inline save context::save_records_async(const std::string &path,
					const std::vector<ioshape_record> &records,
					const ioshape_save_options &options)
{
	ioshape_save *handle = nullptr;

	check(ioshape_save_records(get(), path.c_str(), records.data(), records.size(), &options,
				   &handle));
	return save(handle);
}

/*
 * All ranks of a job, which save together. Opening it waits until all have come. The context, and
 * what options.comm points to, must outlive it. Its destructor aborts saves under way: wait() for
 * them before.
 */
class group
{
public:
	group(const context &context, const std::string &directory,
	      const ioshape_group_options &options)
		: context_(context.get())
	{
		ioshape_group *handle = nullptr;

		check(ioshape_group_open(context_, directory.c_str(), &options, &handle));
		handle_.reset(handle);
	}

	/* Blocks until the parts of all ranks are durable and in place. */
	ioshape_report save_tensors(std::uint64_t step, const std::vector<ioshape_tensor> &tensors,
				    ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		options.report = &report;
		check(ioshape_group_save_tensors(get(), step, tensors.data(), tensors.size(),
						 &options, nullptr));
		return report;
	}
	ioshape_report save_records(std::uint64_t step, const std::vector<ioshape_record> &records,
				    ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		options.report = &report;
		check(ioshape_group_save_records(get(), step, records.data(), records.size(),
						 &options, nullptr));
		return report;
	}

	/* Returns when this rank's tensors may be changed; with options.borrow, at once. */
	save save_tensors_async(std::uint64_t step, const std::vector<ioshape_tensor> &tensors,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		ioshape_save *handle = nullptr;

		check(ioshape_group_save_tensors(get(), step, tensors.data(), tensors.size(),
						 &options, &handle));
		return save(handle);
	}
	save save_records_async(std::uint64_t step, const std::vector<ioshape_record> &records,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		ioshape_save *handle = nullptr;

		check(ioshape_group_save_records(get(), step, records.data(), records.size(),
						 &options, &handle));
		return save(handle);
	}
	/* In the place of a save: the others' calls for this generation fail and say why. */
	void fail(std::uint64_t step, const std::string &why)
	{
		check(ioshape_group_fail(get(), step, why.c_str()));
	}
	/* The newest complete generation, the same on all ranks, which all ask; none if there is
	 * none. */
	std::optional<std::uint64_t> latest()
	{
		std::uint64_t step = 0;
		const int code = ioshape_group_get_latest(get(), &step);

		if (code == -ENOENT)
			return std::nullopt;
		check(code);
		return step;
	}
	ioshape_group *get() const noexcept
	{
		return handle_.get();
	}

private:
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	ioshape_context *context_;
	std::unique_ptr<ioshape_group, detail::deleter<ioshape_group_free>> handle_;
};

/* Records into a container. Without commit() the file is abandoned. */
class writer
{
public:
	writer(const context &context, const std::string &path,
	       const ioshape_writer_options &options = IOSHAPE_WRITER_OPTIONS_INIT)
	{
		ioshape_writer *handle = nullptr;

		context.check(ioshape_writer_open(context.get(), path.c_str(), &options, &handle));
		handle_.reset(handle);
	}
	void record(const std::string &name, const void *data, std::uint64_t bytes,
		    std::uint32_t alignment = 0)
	{
		begin(name, bytes, alignment);
		write(data, bytes);
		end();
	}
	void begin(const std::string &name, std::uint64_t bytes = IOSHAPE_UNKNOWN_BYTES,
		   std::uint32_t alignment = 0)
	{
		check(ioshape_writer_begin_record(get(), name.c_str(), bytes, alignment));
	}
	void write(const void *data, std::size_t bytes)
	{
		check(ioshape_writer_write(get(), data, bytes));
	}
	void end()
	{
		check(ioshape_writer_end_record(get()));
	}
	ioshape_report commit()
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		check(ioshape_writer_commit(get(), &report));
		return report;
	}
	ioshape_writer *get() const noexcept
	{
		return handle_.get();
	}

private:
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	std::unique_ptr<ioshape_writer, detail::deleter<ioshape_writer_free>> handle_;
};

/* Bytes in somebody else's format. Without commit() the file is abandoned. */
class file
{
public:
	file(const context &context, const std::string &path,
	     const ioshape_file_options &options = IOSHAPE_FILE_OPTIONS_INIT)
	{
		ioshape_file *handle = nullptr;

		context.check(ioshape_file_open(context.get(), path.c_str(), &options, &handle));
		handle_.reset(handle);
	}
	void write(const void *data, std::size_t bytes)
	{
		check(ioshape_file_write(get(), data, bytes));
	}
	ioshape_report commit()
	{
		ioshape_report report = IOSHAPE_REPORT_INIT;

		check(ioshape_file_commit(get(), &report));
		return report;
	}
	ioshape_file *get() const noexcept
	{
		return handle_.get();
	}

private:
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	std::unique_ptr<ioshape_file, detail::deleter<ioshape_file_free>> handle_;
};

/* A slot, for those who do their own I/O. It is released when it is destroyed. */
class slot
{
public:
	/* Waits for it. */
	slot(const context &context, const ioshape_slot_options &options)
	{
		ioshape_slot *handle = nullptr;

		context.check(ioshape_slot_acquire(context.get(), &options, &handle));
		handle_.reset(handle);
	}
	/* Before so many bytes are written. */
	void pace(std::uint64_t bytes)
	{
		check(ioshape_slot_pace(get(), bytes));
	}
	ioshape_slot_info info() const
	{
		ioshape_slot_info info = {};

		info.size = sizeof(info);
		check(ioshape_slot_get_info(get(), &info));
		return info;
	}
	ioshape_slot *get() const noexcept
	{
		return handle_.get();
	}

private:
	static void check(int code)
	{
		if (code < 0)
			throw error(code);
	}
	std::unique_ptr<ioshape_slot, detail::deleter<ioshape_slot_free>> handle_;
};

/* Records and tensors of a file. */
class reader
{
public:
	reader(const context &context, const std::string &path,
	       const ioshape_reader_options &options = IOSHAPE_READER_OPTIONS_INIT)
	{
		ioshape_reader *handle = nullptr;

		context.check(ioshape_reader_open(context.get(), path.c_str(), &options, &handle));
		handle_.reset(handle);
	}

	ioshape_reader_info info() const
	{
		ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;

		check(ioshape_reader_get_info(get(), &info));
		return info;
	}
	ioshape_record_info record(std::uint64_t index) const
	{
		ioshape_record_info info = {};

		info.size = sizeof(info);
		check(ioshape_reader_get_record(get(), index, &info));
		return info;
	}
	std::uint64_t find_record(const std::string &name) const
	{
		std::uint64_t index = 0;

		check(ioshape_reader_find_record(get(), name.c_str(), &index));
		return index;
	}
	void read(std::uint64_t record, std::uint64_t offset, void *into, std::size_t bytes) const
	{
		check(ioshape_reader_read(get(), record, offset, into, bytes));
	}
	void read_file(std::uint64_t offset, void *into, std::size_t bytes) const
	{
		check(ioshape_reader_read_file(get(), offset, into, bytes));
	}
	void verify() const
	{
		check(ioshape_reader_verify(get()));
	}

	ioshape_tensor_info tensor(std::uint64_t index) const
	{
		ioshape_tensor_info info = {};

		info.size = sizeof(info);
		check(ioshape_reader_get_tensor(get(), index, &info));
		return info;
	}
	std::uint64_t find_tensor(const std::string &name) const
	{
		std::uint64_t index = 0;

		check(ioshape_reader_find_tensor(get(), name.c_str(), &index));
		return index;
	}
	void load(const std::vector<ioshape_load_request> &requests) const
	{
		check(ioshape_reader_load(get(), requests.data(), requests.size()));
	}
	/* One whole tensor into memory of tensor(index).bytes bytes. */
	void load(std::uint64_t index, void *into) const
	{
		const ioshape_load_request request = { index, 0, tensor(index).bytes, into };

		check(ioshape_reader_load(get(), &request, 1));
	}
	ioshape_metadata metadata() const
	{
		ioshape_metadata metadata = IOSHAPE_METADATA_INIT;

		check(ioshape_reader_get_metadata(get(), &metadata));
		return metadata;
	}
	ioshape_reader *get() const noexcept
	{
		return handle_.get();
	}

private:
	friend class generation;
	explicit reader(ioshape_reader *handle) : handle_(handle)
	{
	}
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	std::unique_ptr<ioshape_reader, detail::deleter<ioshape_reader_free>> handle_;
};

/* A complete checkpoint of all ranks of a job, open for reading. Before its context it goes. */
class generation
{
public:
	/* Throws -ENOENT if there is none of this step. */
	generation(const context &context, const std::string &directory, std::uint64_t step)
		: context_(context.get())
	{
		ioshape_generation *handle = nullptr;

		check(ioshape_generation_open(context_, directory.c_str(), step, &handle));
		handle_.reset(handle);
	}
	/* The newest complete one; throws -ENOENT if there is none. */
	static generation latest(const context &context, const std::string &directory)
	{
		return generation(context, directory, IOSHAPE_LATEST);
	}
	/* The steps of all complete ones, oldest first. */
	static std::vector<std::uint64_t> steps(const context &context,
						const std::string &directory)
	{
		std::uint64_t *found = nullptr;
		std::size_t count = 0;

		context.check(
			ioshape_generation_list(context.get(), directory.c_str(), &found, &count));
		const std::unique_ptr<std::uint64_t, detail::deleter<ioshape_free>> owner(found);
		std::vector<std::uint64_t> steps(count);

		for (std::size_t i = 0; i < count; i++)
			steps[i] = found[i];
		return steps;
	}
	/* Removes those that are not to be kept; returns how many went. */
	static std::uint64_t prune(const context &context, const std::string &directory,
				   const ioshape_prune_options &options)
	{
		std::uint64_t removed = 0;

		context.check(ioshape_generation_prune(context.get(), directory.c_str(), &options,
						       &removed));
		return removed;
	}
	ioshape_generation_info info() const
	{
		ioshape_generation_info info = {};

		info.size = sizeof(info);
		check(ioshape_generation_get_info(get(), &info));
		return info;
	}
	ioshape_part_info part(std::uint32_t rank) const
	{
		ioshape_part_info info = {};

		info.size = sizeof(info);
		check(ioshape_generation_get_part(get(), rank, &info));
		return info;
	}
	/* What a rank saved. */
	ioshape::reader
	part_reader(std::uint32_t rank,
		    const ioshape_reader_options &options = IOSHAPE_READER_OPTIONS_INIT) const
	{
		ioshape_reader *handle = nullptr;

		check(ioshape_generation_open_part(get(), rank, &options, &handle));
		return ioshape::reader(handle);
	}
	void verify() const
	{
		check(ioshape_generation_verify(get(), nullptr, nullptr));
	}
	ioshape_generation *get() const noexcept
	{
		return handle_.get();
	}

private:
	void check(int code) const
	{
		if (code < 0)
			throw error(code);
	}
	ioshape_context *context_;
	std::unique_ptr<ioshape_generation, detail::deleter<ioshape_generation_free>> handle_;
};

} // namespace ioshape

#endif
