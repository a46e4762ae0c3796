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

#include <ioshape/group.h>
#include <ioshape/ioshape.h>
#include <ioshape/slots.h>

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
inline void check(int code)
{
	if (code < 0)
		throw error(code);
}

template <auto Free> struct deleter {
	template <typename Handle> void operator()(Handle *handle) const noexcept
	{
		Free(handle);
	}
};

/* What a function of the C API answers through its last argument. */
template <typename Answer, typename Call, typename... Arguments>
Answer ask(Call call, Arguments... arguments)
{
	Answer answer = {};

	check(call(arguments..., &answer));
	return answer;
}

/* The same for a struct that begins with its size. */
template <typename Struct, typename Call, typename... Arguments>
Struct fill(Call call, Arguments... arguments)
{
	Struct answer = {};

	answer.size = sizeof(answer);
	check(call(arguments..., &answer));
	return answer;
}

/* A save that blocks. `call` takes the options and the place for a handle last. */
template <typename Call, typename... Arguments>
ioshape_report save_now(ioshape_save_options options, Call call, Arguments... arguments)
{
	ioshape_report report = IOSHAPE_REPORT_INIT;

	options.report = &report;
	check(call(arguments..., &options, nullptr));
	return report;
}

/* A handle of the C API, which is freed with its object. */
template <typename Handle, auto Free> class owner
{
public:
	Handle *get() const noexcept
	{
		return handle_.get();
	}

protected:
	owner() = default;
	explicit owner(Handle *handle) noexcept : handle_(handle)
	{
	}

private:
	std::unique_ptr<Handle, deleter<Free>> handle_;
};
} // namespace detail

/* A report as one line of text. */
inline std::string text(const ioshape_report &report)
{
	std::string line(ioshape_report_text(&report, nullptr, 0), '\0');

	ioshape_report_text(&report, line.data(), line.size() + 1);
	return line;
}

/*
 * A save in the background, or none yet. Destroying it, or assigning another to it, before it has
 * ended aborts it: wait() to keep it.
 */
class save : public detail::owner<ioshape_save, ioshape_save_free>
{
public:
	save() = default;
	/* Takes over a handle of the C API. */
	explicit save(ioshape_save *handle) noexcept : owner(handle)
	{
	}
	/* Whether there is one. Without one all else throws -EINVAL. */
	explicit operator bool() const noexcept
	{
		return get() != nullptr;
	}
	bool done() const
	{
		return status().phase == IOSHAPE_PHASE_DONE;
	}
	/* Throws what the save failed with. */
	void wait()
	{
		detail::check(ioshape_save_wait(get(), -1));
	}
	/* False if it has not ended within the time. */
	bool wait_for(std::chrono::milliseconds timeout)
	{
		const int code =
			ioshape_save_wait(get(), timeout.count() < 0 ? 0 : timeout.count());

		if (code == -EINPROGRESS)
			return false;
		detail::check(code);
		return true;
	}
	/* Asks it to stop; wait() then throws -ECANCELED, unless it was done already. */
	void cancel()
	{
		detail::check(ioshape_save_cancel(get()));
	}
	ioshape_report report() const
	{
		return detail::fill<ioshape_report>(ioshape_save_get_report, get());
	}
	ioshape_save_status status() const
	{
		ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

		detail::check(ioshape_save_get_status(get(), &status, nullptr));
		return status;
	}
	/* Where it stands in the queue for a slot; zeros if it does not wait for one. */
	ioshape_place place() const
	{
		ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

		return detail::fill<ioshape_place>(ioshape_save_get_status, get(), &status);
	}
};

class context : public detail::owner<ioshape_context, ioshape_context_free>
{
public:
	context() : context(default_options())
	{
	}
	explicit context(const ioshape_context_options &options) : owner(open(options))
	{
	}
	static ioshape_context_options default_options()
	{
		return IOSHAPE_CONTEXT_OPTIONS_INIT;
	}

	/* Blocks until the tensors are durable and in place. */
	ioshape_report save_tensors(const std::string &path,
				    const std::vector<ioshape_tensor> &tensors,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_save_tensors, get(), path.c_str(),
					tensors.data(), tensors.size());
	}
	/* Returns when the tensors may be changed; with options.borrow, at once. */
	save save_tensors_async(const std::string &path, const std::vector<ioshape_tensor> &tensors,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_save_tensors, get(), path.c_str(),
							tensors.data(), tensors.size(), &options));
	}

	/* Blocks until the records are durable and in place. */
	ioshape_report save_records(const std::string &path,
				    const std::vector<ioshape_record> &records,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_save_records, get(), path.c_str(),
					records.data(), records.size());
	}
	/* Returns when the records may be changed; with options.borrow, at once. */
	save save_records_async(const std::string &path, const std::vector<ioshape_record> &records,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_save_records, get(), path.c_str(),
							records.data(), records.size(), &options));
	}

private:
	static ioshape_context *open(const ioshape_context_options &options)
	{
		ioshape_context *handle = nullptr;

		detail::check(ioshape_context_open(&handle, &options));
		return handle;
	}
};

/*
 * All ranks of a job, which save together. Opening it waits until all have come. The context, and
 * what options.comm points to, must outlive it. Its destructor aborts saves under way: wait() for
 * them before.
 */
class group : public detail::owner<ioshape_group, ioshape_group_free>
{
public:
	group(const context &context, const std::string &directory,
	      const ioshape_group_options &options)
		: owner(detail::ask<ioshape_group *>(ioshape_group_open, context.get(),
						     directory.c_str(), &options))
	{
	}

	/* Blocks until the parts of all ranks are durable and in place. */
	ioshape_report save_tensors(std::uint64_t step, const std::vector<ioshape_tensor> &tensors,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_group_save_tensors, get(), step,
					tensors.data(), tensors.size());
	}
	ioshape_report save_records(std::uint64_t step, const std::vector<ioshape_record> &records,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_group_save_records, get(), step,
					records.data(), records.size());
	}

	/* Returns when this rank's tensors may be changed; with options.borrow, at once. */
	save save_tensors_async(std::uint64_t step, const std::vector<ioshape_tensor> &tensors,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_group_save_tensors, get(), step,
							tensors.data(), tensors.size(), &options));
	}
	save save_records_async(std::uint64_t step, const std::vector<ioshape_record> &records,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_group_save_records, get(), step,
							records.data(), records.size(), &options));
	}
	/* In the place of a save: the others' calls for this generation fail and say why. */
	void fail(std::uint64_t step, const std::string &why)
	{
		detail::check(ioshape_group_fail(get(), step, why.c_str()));
	}
	/* The newest complete generation, the same on all ranks, which all ask; none if there is
	 * none. */
	std::optional<std::uint64_t> latest()
	{
		return newest(nullptr);
	}
	/* The newest intact one, of which every byte has been read, the same on all ranks, which
	 * all ask; none if there is none. `passed_over` receives the steps of newer ones. */
	std::optional<std::uint64_t> intact(std::vector<std::uint64_t> *passed_over = nullptr)
	{
		ioshape_search_options options = IOSHAPE_SEARCH_OPTIONS_INIT;

		options.intact = 1;
		options.passed_over = [](void *user, std::uint64_t passed) {
			if (auto *steps = static_cast<std::vector<std::uint64_t> *>(user))
				steps->push_back(passed);
		};
		options.passed_over_user = passed_over;
		return newest(&options);
	}

private:
	std::optional<std::uint64_t> newest(const ioshape_search_options *options)
	{
		std::uint64_t step = 0;
		const int code = ioshape_group_get_latest(get(), options, &step);

		if (code == -ENOENT)
			return std::nullopt;
		detail::check(code);
		return step;
	}
};

/* Bytes in somebody else's format. Without commit() the file is abandoned. */
class file : public detail::owner<ioshape_file, ioshape_file_free>
{
public:
	file(const context &context, const std::string &path,
	     const ioshape_file_options &options = IOSHAPE_FILE_OPTIONS_INIT)
		: owner(detail::ask<ioshape_file *>(ioshape_file_open, context.get(), path.c_str(),
						    &options))
	{
	}
	void write(const void *data, std::size_t bytes)
	{
		detail::check(ioshape_file_write(get(), data, bytes));
	}
	ioshape_report commit()
	{
		return detail::fill<ioshape_report>(ioshape_file_commit, get());
	}
};

/* A slot, for those who do their own I/O. It is released when it is destroyed. */
class slot : public detail::owner<ioshape_slot, ioshape_slot_free>
{
public:
	/* Waits for it. */
	slot(const context &context, const ioshape_slot_options &options)
		: owner(detail::ask<ioshape_slot *>(ioshape_slot_acquire, context.get(), &options))
	{
	}
	/* Before so many bytes are written. */
	void pace(std::uint64_t bytes)
	{
		detail::check(ioshape_slot_pace(get(), bytes));
	}
	ioshape_slot_info info() const
	{
		return detail::fill<ioshape_slot_info>(ioshape_slot_get_info, get());
	}
};

/* Records and tensors of a file. */
class reader : public detail::owner<ioshape_reader, ioshape_reader_free>
{
public:
	reader(const context &context, const std::string &path,
	       const ioshape_reader_options &options = IOSHAPE_READER_OPTIONS_INIT)
		: owner(detail::ask<ioshape_reader *>(ioshape_reader_open, context.get(),
						      path.c_str(), &options))
	{
	}
	/* Takes over a handle of the C API. */
	explicit reader(ioshape_reader *handle) noexcept : owner(handle)
	{
	}

	ioshape_reader_info info() const
	{
		return detail::fill<ioshape_reader_info>(ioshape_reader_get_info, get());
	}
	ioshape_record_info record(std::uint64_t index) const
	{
		return detail::fill<ioshape_record_info>(ioshape_reader_get_record, get(), index);
	}
	std::uint64_t find_record(const std::string &name) const
	{
		return detail::ask<std::uint64_t>(ioshape_reader_find_record, get(), name.c_str());
	}
	void read(std::uint64_t record, std::uint64_t offset, void *into, std::size_t bytes) const
	{
		detail::check(ioshape_reader_read(get(), record, offset, into, bytes));
	}
	void verify() const
	{
		detail::check(ioshape_reader_verify(get(), 1));
	}

	ioshape_tensor_info tensor(std::uint64_t index) const
	{
		return detail::fill<ioshape_tensor_info>(ioshape_reader_get_tensor, get(), index);
	}
	std::uint64_t find_tensor(const std::string &name) const
	{
		return detail::ask<std::uint64_t>(ioshape_reader_find_tensor, get(), name.c_str());
	}
	void load(const std::vector<ioshape_load_request> &requests) const
	{
		detail::check(ioshape_reader_load(get(), requests.data(), requests.size()));
	}
	/* One whole tensor into memory of tensor(index).bytes bytes. */
	void load(std::uint64_t index, void *into) const
	{
		load({ { index, 0, tensor(index).bytes, into } });
	}
	/* The same with indexes of records: the file needs no table. */
	void load_records(const std::vector<ioshape_load_request> &requests) const
	{
		detail::check(ioshape_reader_load_records(get(), requests.data(), requests.size()));
	}
	ioshape_metadata metadata() const
	{
		return detail::fill<ioshape_metadata>(ioshape_reader_get_metadata, get());
	}
};

/* A complete checkpoint of all ranks of a job, open for reading. It goes before its context. */
class generation : public detail::owner<ioshape_generation, ioshape_generation_free>
{
public:
	/* Throws -ENOENT if there is none of this step. */
	generation(const context &context, const std::string &directory, std::uint64_t step)
		: owner(detail::ask<ioshape_generation *>(ioshape_generation_open, context.get(),
							  directory.c_str(), step))
	{
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

		detail::check(
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
		return detail::ask<std::uint64_t>(ioshape_generation_prune, context.get(),
						  directory.c_str(), &options);
	}
	ioshape_generation_info info() const
	{
		return detail::fill<ioshape_generation_info>(ioshape_generation_get_info, get());
	}
	ioshape_part_info part(std::uint32_t rank) const
	{
		return detail::fill<ioshape_part_info>(ioshape_generation_get_part, get(), rank);
	}
	/* What a rank saved. */
	reader
	part_reader(std::uint32_t rank,
		    const ioshape_reader_options &options = IOSHAPE_READER_OPTIONS_INIT) const
	{
		return reader(detail::ask<ioshape_reader *>(ioshape_generation_open_part, get(),
							    rank, &options));
	}
	void verify() const
	{
		detail::check(ioshape_generation_verify(get(), nullptr, nullptr));
	}
};

} // namespace ioshape

#endif
