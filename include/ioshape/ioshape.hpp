/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libioshape for C++17: the C API with destructors and exceptions.
 *
 * Each member calls the C function of its name, and the reference of that function in the C headers
 * describes it. A member throws ioshape::error, a std::system_error, if the C function fails.
 * Handles can be moved but not copied. Declare a context before the objects that are made from it.
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

/* Returns the error category of the codes in enum ioshape_code, which are not errnos. */
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

/* Converts a negative code of the C API to a std::error_code. Errnos get the generic category,
 * other codes ioshape::category(). */
inline std::error_code make_error_code(int code) noexcept
{
	if (code < 0 && code > -4096)
		return { -code, std::generic_category() };
	return { code, category() };
}

/* Exception that every failure throws: a copy of the details that ioshape_last_error() returns. */
class error : public std::system_error
{
public:
	/* Describes the call of this thread that has just failed with `code`. */
	explicit error(int code) : error(code, *ioshape_last_error())
	{
	}
	/* Describes a failure with `code` by the given details, if these belong to that code. */
	error(int code, const ioshape_error &last)
		: std::system_error(make_error_code(code)), code_(code)
	{
		if (last.code != code) { /* no call of this thread recorded this code */
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
	/* Returns the sentence and the remedy, for people. */
	const char *what() const noexcept override
	{
		return what_.c_str();
	}
	/* Returns the code as the C API returned it. */
	int raw() const noexcept
	{
		return code_;
	}
	/* Returns the operation that failed, as in struct ioshape_error. */
	const std::string &operation() const noexcept
	{
		return operation_;
	}
	/* Returns the path of the file or directory that the error is about. */
	const std::string &path() const noexcept
	{
		return path_;
	}
	/* Returns what failed and why, in one sentence. */
	const std::string &sentence() const noexcept
	{
		return sentence_;
	}
	/* Returns what to do about the failure; "" if no remedy is known. */
	const std::string &remedy() const noexcept
	{
		return remedy_;
	}
	/*
	 * Returns the name of the record or tensor that the error is about; "" if it is about none.
	 */
	const std::string &record() const noexcept
	{
		return record_;
	}
	/* Returns the offset in the file where the failure is; UINT64_MAX if there is none. */
	std::uint64_t offset() const noexcept
	{
		return offset_;
	}
	/* Returns the bytes that the save needs; UINT64_MAX if the error is not about space. */
	std::uint64_t needed_bytes() const noexcept
	{
		return needed_bytes_;
	}
	/* Returns the bytes free at the destination; UINT64_MAX if unknown, or if the error is not
	 * about space. */
	std::uint64_t free_bytes() const noexcept
	{
		return free_bytes_;
	}
	/* Returns the rank of the group that failed; -1 if no rank of a group did. */
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
/* Throws ioshape::error if `code` is negative. */
inline void check(int code)
{
	if (code < 0)
		throw error(code);
}

/* Deleter for std::unique_ptr that calls a function of the C API. */
template <auto Free> struct deleter {
	template <typename Handle> void operator()(Handle *handle) const noexcept
	{
		Free(handle);
	}
};

/* Calls a function of the C API and returns what it writes to its last argument. */
template <typename Answer, typename Call, typename... Arguments>
Answer ask(Call call, Arguments... arguments)
{
	Answer answer = {};

	check(call(arguments..., &answer));
	return answer;
}

/* Calls a function of the C API and returns the struct that it fills, after setting the struct's
 * size. */
template <typename Struct, typename Call, typename... Arguments>
Struct fill(Call call, Arguments... arguments)
{
	Struct answer = {};

	answer.size = sizeof(answer);
	check(call(arguments..., &answer));
	return answer;
}

/* Performs a blocking save and returns its report. `call` takes the options and the handle as its
 * last two arguments. */
template <typename Call, typename... Arguments>
ioshape_report save_now(ioshape_save_options options, Call call, Arguments... arguments)
{
	ioshape_report report = IOSHAPE_REPORT_INIT;

	options.report = &report;
	check(call(arguments..., &options, nullptr));
	return report;
}

/* Base class that owns a handle of the C API and frees it. */
template <typename Handle, auto Free> class owner
{
public:
	/* Returns the C handle, which this object keeps owning; nullptr if there is none. */
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

/* Returns a report as one line of text. */
inline std::string text(const ioshape_report &report)
{
	std::string line(ioshape_report_text(&report, nullptr, 0), '\0');

	ioshape_report_text(&report, line.data(), line.size() + 1);
	return line;
}

/* A background save, or an empty object. Destroying the object, or assigning to it, aborts a save
 * that has not ended. Call wait() first to keep the save. */
class save : public detail::owner<ioshape_save, ioshape_save_free>
{
public:
	/* Creates an empty object. */
	save() = default;
	/* Takes ownership of a handle of the C API. */
	explicit save(ioshape_save *handle) noexcept : owner(handle)
	{
	}
	/* Returns whether there is a save. If there is none, the other members throw -EINVAL. */
	explicit operator bool() const noexcept
	{
		return get() != nullptr;
	}
	/* Returns whether the save has ended, successfully or not. */
	bool done() const
	{
		return status().phase == IOSHAPE_PHASE_DONE;
	}
	/* Waits until the save has ended. Throws the error with which it failed. */
	void wait()
	{
		detail::check(ioshape_save_wait(get(), -1));
	}
	/* Waits until the save has ended, for `timeout` at most, and returns whether it has. Throws
	 * the error with which it failed. A negative timeout does not wait. */
	bool wait_for(std::chrono::milliseconds timeout)
	{
		const int code =
			ioshape_save_wait(get(), timeout.count() < 0 ? 0 : timeout.count());

		if (code == -EINPROGRESS)
			return false;
		detail::check(code);
		return true;
	}
	/* Asks the save to stop and returns at once. wait() then throws -ECANCELED, unless the new
	 * file was already in place. */
	void cancel()
	{
		detail::check(ioshape_save_cancel(get()));
	}
	/* Returns the report of a save that has ended. Throws -EINPROGRESS if it has not. */
	ioshape_report report() const
	{
		return detail::fill<ioshape_report>(ioshape_save_get_report, get());
	}
	/* Returns the state of the save. */
	ioshape_save_status status() const
	{
		ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

		detail::check(ioshape_save_get_status(get(), &status, nullptr));
		return status;
	}
	/* Returns the position in the queue for a slot; all zeros if the save does not wait for
	 * one. */
	ioshape_place place() const
	{
		ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

		return detail::fill<ioshape_place>(ioshape_save_get_status, get(), &status);
	}
};

/* Settings, cached memory, I/O engines and background saves. It must outlive every object that is
 * made from it. Any thread may use it. */
class context : public detail::owner<ioshape_context, ioshape_context_free>
{
public:
	/* Opens a context with all defaults. */
	context() : context(default_options())
	{
	}
	/* Opens a context with these settings. */
	explicit context(const ioshape_context_options &options) : owner(open(options))
	{
	}
	/* Returns settings with all defaults. */
	static ioshape_context_options default_options()
	{
		return IOSHAPE_CONTEXT_OPTIONS_INIT;
	}

	/* Saves tensors and returns the report when they are on stable storage and the file is in
	 * place. options.report is not used. */
	ioshape_report save_tensors(const std::string &path,
				    const std::vector<ioshape_tensor> &tensors,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_save_tensors, get(), path.c_str(),
					tensors.data(), tensors.size());
	}
	/* Saves tensors in the background. Returns when the tensors may be changed; with
	 * options.borrow at once. */
	save save_tensors_async(const std::string &path, const std::vector<ioshape_tensor> &tensors,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_save_tensors, get(), path.c_str(),
							tensors.data(), tensors.size(), &options));
	}

	/* Saves records and returns the report when they are on stable storage and the file is in
	 * place. options.report is not used. */
	ioshape_report save_records(const std::string &path,
				    const std::vector<ioshape_record> &records,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_save_records, get(), path.c_str(),
					records.data(), records.size());
	}
	/* Saves records in the background. Returns when the records may be changed; with
	 * options.borrow at once. */
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

/* The ranks of a job that save together. The context, and what options.comm and options.tier point
 * to, must outlive it. Its destructor aborts saves that have not ended. Call wait() on them first
 * to keep them. */
class group : public detail::owner<ioshape_group, ioshape_group_free>
{
public:
	/* Opens the group. Waits until all ranks of the job have done so. */
	group(const context &context, const std::string &directory,
	      const ioshape_group_options &options)
		: owner(detail::ask<ioshape_group *>(ioshape_group_open, context.get(),
						     directory.c_str(), &options))
	{
	}

	/* Saves this rank's tensors and returns the report when the shards of all ranks are on
	 * stable storage and the checkpoint is in place. */
	ioshape_report save_tensors(std::uint64_t step, const std::vector<ioshape_tensor> &tensors,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_group_save_tensors, get(), step,
					tensors.data(), tensors.size());
	}
	/* Saves this rank's records and returns the report when the shards of all ranks are on
	 * stable storage and the checkpoint is in place. */
	ioshape_report save_records(std::uint64_t step, const std::vector<ioshape_record> &records,
				    const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return detail::save_now(options, ioshape_group_save_records, get(), step,
					records.data(), records.size());
	}

	/* Saves this rank's tensors in the background. Returns when the tensors may be changed;
	 * with options.borrow at once. */
	save save_tensors_async(std::uint64_t step, const std::vector<ioshape_tensor> &tensors,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_group_save_tensors, get(), step,
							tensors.data(), tensors.size(), &options));
	}
	/* Saves this rank's records in the background. Returns when the records may be changed;
	 * with options.borrow at once. */
	save save_records_async(std::uint64_t step, const std::vector<ioshape_record> &records,
				const ioshape_save_options &options = IOSHAPE_SAVE_OPTIONS_INIT)
	{
		return save(detail::ask<ioshape_save *>(ioshape_group_save_records, get(), step,
							records.data(), records.size(), &options));
	}
	/* Tells the other ranks that this one contributes nothing to a checkpoint. Call it instead
	 * of a save. The saves of the other ranks for this step then fail and give `why` as the
	 * reason. */
	void fail(std::uint64_t step, const std::string &why)
	{
		detail::check(ioshape_group_fail(get(), step, why.c_str()));
	}
	/* Returns the step of the newest complete checkpoint, which is the same on all ranks. All
	 * ranks call this function. Returns std::nullopt if there is no checkpoint at all. */
	std::optional<std::uint64_t> latest()
	{
		return newest(nullptr);
	}
	/*
	 * Returns the step of the newest intact checkpoint, which is the same on all ranks. All
	 * ranks call this function, and together they read every byte. `passed_over` receives the
	 * steps of newer checkpoints that are not intact. Returns std::nullopt if there is no
	 * checkpoint at all.
	 */
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

/* A file in a format that the library does not know. If it is destroyed without commit(), it is
 * abandoned and leaves no temporary file. The context must outlive it. */
class file : public detail::owner<ioshape_file, ioshape_file_free>
{
public:
	/* Begins a new file, which appears at `path` when it is committed. */
	file(const context &context, const std::string &path,
	     const ioshape_file_options &options = IOSHAPE_FILE_OPTIONS_INIT)
		: owner(detail::ask<ioshape_file *>(ioshape_file_open, context.get(), path.c_str(),
						    &options))
	{
	}
	/* Appends bytes. */
	void write(const void *data, std::size_t bytes)
	{
		detail::check(ioshape_file_write(get(), data, bytes));
	}
	/* Makes the file durable, puts it in place and returns the report. */
	ioshape_report commit()
	{
		return detail::fill<ioshape_report>(ioshape_file_commit, get());
	}
};

/* A slot for programs that do their own I/O. The destructor releases it. The context must outlive
 * it. */
class slot : public detail::owner<ioshape_slot, ioshape_slot_free>
{
public:
	/* Waits for a slot. */
	slot(const context &context, const ioshape_slot_options &options)
		: owner(detail::ask<ioshape_slot *>(ioshape_slot_acquire, context.get(), &options))
	{
	}
	/* Waits until the bandwidth limits allow the next bytes. Call it before each piece that you
	 * write. */
	void pace(std::uint64_t bytes)
	{
		detail::check(ioshape_slot_pace(get(), bytes));
	}
	/* Returns the state of the slot, and how it was acquired. */
	ioshape_slot_info info() const
	{
		return detail::fill<ioshape_slot_info>(ioshape_slot_get_info, get());
	}
};

/* A file that is open for reading. The context must outlive it. One thread at a time may use it. */
class reader : public detail::owner<ioshape_reader, ioshape_reader_free>
{
public:
	/* Opens a torch zip, or with options.any_format a file in any format. */
	reader(const context &context, const std::string &path,
	       const ioshape_reader_options &options = IOSHAPE_READER_OPTIONS_INIT)
		: owner(detail::ask<ioshape_reader *>(ioshape_reader_open, context.get(),
						      path.c_str(), &options))
	{
	}
	/* Takes ownership of a handle of the C API. */
	explicit reader(ioshape_reader *handle) noexcept : owner(handle)
	{
	}

	/* Returns what the file consists of. */
	ioshape_reader_info info() const
	{
		return detail::fill<ioshape_reader_info>(ioshape_reader_get_info, get());
	}
	/* Returns the description of a record. */
	ioshape_record_info record(std::uint64_t index) const
	{
		return detail::fill<ioshape_record_info>(ioshape_reader_get_record, get(), index);
	}
	/* Returns the index of the record with this name. Throws -ENOENT if there is none. */
	std::uint64_t find_record(const std::string &name) const
	{
		return detail::ask<std::uint64_t>(ioshape_reader_find_record, get(), name.c_str());
	}
	/* Reads and verifies bytes [offset, offset + bytes) of a record. */
	void read(std::uint64_t record, std::uint64_t offset, void *into, std::size_t bytes) const
	{
		detail::check(ioshape_reader_read(get(), record, offset, into, bytes));
	}
	/* Verifies the structure of the file and all of its data. */
	void verify() const
	{
		detail::check(ioshape_reader_verify(get(), 1));
	}

	/* Returns the description of a tensor. */
	ioshape_tensor_info tensor(std::uint64_t index) const
	{
		return detail::fill<ioshape_tensor_info>(ioshape_reader_get_tensor, get(), index);
	}
	/* Returns the index of the tensor with this name. Throws -ENOENT if there is none. */
	std::uint64_t find_tensor(const std::string &name) const
	{
		return detail::ask<std::uint64_t>(ioshape_reader_find_tensor, get(), name.c_str());
	}
	/* Loads any number of tensors, or ranges of them. */
	void load(const std::vector<ioshape_load_request> &requests) const
	{
		detail::check(ioshape_reader_load(get(), requests.data(), requests.size()));
	}
	/* Loads one whole tensor. `into` holds tensor(index).bytes bytes. */
	void load(std::uint64_t index, void *into) const
	{
		load({ { index, 0, tensor(index).bytes, into } });
	}
	/* Loads any number of records, or ranges of them. `tensor` in each request is the index of
	 * a record. */
	void load_records(const std::vector<ioshape_load_request> &requests) const
	{
		detail::check(ioshape_reader_load_records(get(), requests.data(), requests.size()));
	}
	/* Returns the metadata that was given to the save. Its pointers are valid until the reader
	 * is destroyed. */
	ioshape_metadata metadata() const
	{
		return detail::fill<ioshape_metadata>(ioshape_reader_get_metadata, get());
	}
};

/* A complete checkpoint of all ranks of a job, open for reading. The context must outlive it. */
class checkpoint : public detail::owner<ioshape_checkpoint, ioshape_checkpoint_free>
{
public:
	/* Opens the checkpoint of this step. Throws -ENOENT if there is none. */
	checkpoint(const context &context, const std::string &directory, std::uint64_t step)
		: owner(detail::ask<ioshape_checkpoint *>(ioshape_checkpoint_open, context.get(),
							  directory.c_str(), step))
	{
	}
	/* Opens the newest complete checkpoint. Throws -ENOENT if there is no checkpoint at all. */
	static checkpoint latest(const context &context, const std::string &directory)
	{
		return checkpoint(context, directory, IOSHAPE_LATEST);
	}
	/* Returns the steps of all complete checkpoints, oldest first. */
	static std::vector<std::uint64_t> steps(const context &context,
						const std::string &directory)
	{
		std::uint64_t *found = nullptr;
		std::size_t count = 0;

		detail::check(
			ioshape_checkpoint_list(context.get(), directory.c_str(), &found, &count));
		const std::unique_ptr<std::uint64_t, detail::deleter<ioshape_free>> owner(found);
		std::vector<std::uint64_t> steps(count);

		for (std::size_t i = 0; i < count; i++)
			steps[i] = found[i];
		return steps;
	}
	/* Removes the checkpoints that are not to be kept and returns how many it removed. */
	static std::uint64_t prune(const context &context, const std::string &directory,
				   const ioshape_prune_options &options)
	{
		return detail::ask<std::uint64_t>(ioshape_checkpoint_prune, context.get(),
						  directory.c_str(), &options);
	}
	/* Returns the description of the checkpoint. */
	ioshape_checkpoint_info info() const
	{
		return detail::fill<ioshape_checkpoint_info>(ioshape_checkpoint_get_info, get());
	}
	/* Returns the location of a rank's shard. */
	ioshape_shard_info shard(std::uint32_t rank) const
	{
		return detail::fill<ioshape_shard_info>(ioshape_checkpoint_get_shard, get(), rank);
	}
	/* Opens a rank's shard for reading. */
	reader
	shard_reader(std::uint32_t rank,
		     const ioshape_reader_options &options = IOSHAPE_READER_OPTIONS_INIT) const
	{
		return reader(detail::ask<ioshape_reader *>(ioshape_checkpoint_open_shard, get(),
							    rank, &options));
	}
	/* Reads all files of the checkpoint and verifies them. */
	void verify() const
	{
		detail::check(ioshape_checkpoint_verify(get(), nullptr, nullptr));
	}
};

} // namespace ioshape

#endif
