/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The container level: records written into, and read from, a torch zip; and loading tensors.
 *
 * Record names are relative to the archive's one folder: "data.pkl", "data/0", "version". A reader
 * may be used by one thread at a time; different readers of one context work at the same time.
 */
#ifndef IOSHAPE_CONTAINER_H
#define IOSHAPE_CONTAINER_H

#include <ioshape/tensors.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Saving records -------------------------------------------------------------------------- */

/**
 * Brings bytes [offset, offset + bytes) of a record to `into`.
 *
 * Anything but 0 fails the save with that code if it is a negative errno, and with -EIO otherwise.
 * The function must not save with the same context.
 */
typedef int (*ioshape_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

/** A record in the caller's memory, or of memory that a function reads. */
struct ioshape_record {
	/**
	 * A relative path without ".", ".." or empty parts, unique in the file. Names under
	 * ".ioshape/" are reserved for the library. torch needs "data.pkl", as the first record,
	 * and "version".
	 */
	const char *name;
	const void *data; /**< NULL if there are no bytes, or if `fetch` brings them */
	uint64_t bytes;
	/** Where in the file the data may begin: a power of two up to 4096. 0 chooses: 4096 from
	 * 256 KiB on, 64 below. */
	uint32_t alignment;
	/** For memory that the CPU cannot read, such as a GPU's; NULL otherwise. */
	ioshape_fetch_fn fetch;
	void *fetch_user;
};

/**
 * Saves records to a file: for files with a pickle of the caller's own.
 *
 * The file holds the records in the order of the array. All names are checked before anything is
 * created. All that ioshape_save_tensors() says holds here, too. options->format must be
 * IOSHAPE_FORMAT_TORCH.
 *
 * `fetch` is called in the order of records and offsets, once for each byte; a large record comes
 * in pieces. It is called on the calling thread, which then copies the other records alone, and has
 * brought everything when the call returns. A background save with options->borrow calls it on the
 * saving thread instead, until the save has ended.
 *
 * @param context  an open context
 * @param path     the file to make or to replace
 * @param records  `count` records with different names
 * @param count    number of records
 * @param options  NULL for all defaults
 * @param out      NULL to wait; otherwise receives the save, to be freed with ioshape_save_free(),
 *                 or NULL if the call fails
 * @return 0 or a negative code; -EEXIST: two records have one name
 */
int ioshape_save_records(struct ioshape_context *context, const char *path,
			 const struct ioshape_record *records, size_t count,
			 const struct ioshape_save_options *options, struct ioshape_save **out);

/* ---- Reading --------------------------------------------------------------------------------- */

/** A torch zip that is open for reading: one of this library or of torch.save(). */
struct ioshape_reader;

/** How a file is read. */
struct ioshape_reader_options {
	size_t size;                /**< sizeof(struct ioshape_reader_options) */
	enum ioshape_switch verify; /**< compare checksums while reading */
	/**
	 * 1: what is read into has just been allocated and never been written to. Where it is
	 * large, or many pieces lie side by side, it is then filled in huge pages, several times as
	 * fast, unless they cost the kernel more than small ones.
	 */
	uint32_t fresh_memory;
	ioshape_progress_fn progress;
	void *progress_user; /**< borrowed until the reader is freed */
	/**
	 * Reads a part of a file, such as a member of a bundle: file_bytes bytes from file_offset
	 * on, as if they were the whole of it. Offsets and file_bytes of all calls are then the
	 * part's. 0 and 0: all of the file.
	 */
	uint64_t file_offset;
	uint64_t file_bytes;
	/**
	 * 1: the file may be in any format. One that has checksums beside it
	 * (`NAME.ioshape-sums`) is verified by them; otherwise a torch zip is read as such, and
	 * any other file has nothing to verify. All of the file is then record 0, which has no
	 * name. Checksums beside a file count only if it has not been modified since.
	 */
	uint32_t any_format;
	/**
	 * IOSHAPE_ON: other processes of this host read the same bytes at about the same time. They
	 * come through the page cache then, and the storage is asked for them once (unless the
	 * context requires direct I/O). IOSHAPE_OFF: no other process does. By default it is on if
	 * the job has several ranks on this host, if at most 256 MiB are read, or if another reader
	 * of this host has the file open.
	 */
	enum ioshape_switch shared;
};

#define IOSHAPE_READER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_reader_options)

/** What a file consists of. */
struct ioshape_reader_info {
	size_t size; /**< sizeof(struct ioshape_reader_info): set before the call */
	uint64_t file_bytes;
	uint64_t records;   /**< their indices are 0 and up, in the order of the file */
	uint64_t tensors;   /**< 0 without a table */
	uint32_t has_table; /**< 1: of tensors; the functions for tensors can be used */
	/** What has a checksum of its own, so that parts are verified; 0: whole records only. */
	uint32_t block_bytes;
	uint32_t torch_zip; /**< 0: it is read as a file in another format */
	uint32_t checksums; /**< 1: what is read can be verified */
	/**
	 * For those who bring bytes to where the CPU does not see them, as by GPUDirect Storage: a
	 * descriptor of the file that was opened, for direct reads (O_DIRECT). The reader closes
	 * it. -1 if the file cannot be read directly.
	 */
	int32_t direct_fd;
	uint32_t reserved;
	uint64_t file_offset; /**< where in that file offset 0 is: a part may be open */
};

#define IOSHAPE_READER_INFO_INIT IOSHAPE_SIZED(ioshape_reader_info)

/** A record of a file. */
struct ioshape_record_info {
	size_t size;      /**< sizeof(struct ioshape_record_info): set before the call */
	const char *name; /**< valid until the reader is freed */
	uint64_t bytes;
	uint64_t file_offset; /**< of the record's first byte of data */
	uint32_t crc32;
	uint32_t reserved;
	/**
	 * One CRC-32 for each block_bytes of the record, the last one of what is left. NULL if
	 * there are none. Valid until the reader is freed.
	 */
	const uint32_t *block_crc32;
};

#define IOSHAPE_RECORD_INFO_INIT IOSHAPE_SIZED(ioshape_record_info)

/** A tensor of a file. */
struct ioshape_tensor_info {
	size_t size;      /**< sizeof(struct ioshape_tensor_info): set before the call */
	const char *name; /**< this, shape and strides: valid until the reader is freed */
	enum ioshape_dtype dtype;
	uint32_t dims;
	const int64_t *shape;
	const int64_t *strides; /**< never NULL if dims > 0; in elements */
	/** What ioshape_reader_load() delivers: the tensor's memory in this layout. */
	uint64_t bytes;
	uint64_t record;        /**< index of the record that holds it */
	const char *dtype_name; /**< torch's, without the "torch.": "bfloat16" */
};

#define IOSHAPE_TENSOR_INFO_INIT IOSHAPE_SIZED(ioshape_tensor_info)

/**
 * Opens a torch zip.
 *
 * The file is untrusted: every count and offset in it is checked against limits and the file's
 * size, in bounded time and memory. The reader goes on with the file that it opened, also when that
 * is replaced.
 *
 * @param context  an open context; it must outlive the reader
 * @param path     the file
 * @param options  NULL for all defaults
 * @param out      receives the reader, to be freed with ioshape_reader_free(), or NULL
 * @return 0; IOSHAPE_E_FORMAT, IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT; another negative code
 */
int ioshape_reader_open(struct ioshape_context *context, const char *path,
			const struct ioshape_reader_options *options, struct ioshape_reader **out);

/**
 * Tells what a file consists of.
 *
 * @param reader  the reader
 * @param info    filled; info->size must be set
 * @return 0 or a negative code
 */
int ioshape_reader_get_info(struct ioshape_reader *reader, struct ioshape_reader_info *info);

/**
 * Tells about a record.
 *
 * @param reader  the reader
 * @param index   of the record
 * @param info    filled; info->size must be set
 * @return 0; -ENOENT if there is no such index; another negative code
 */
int ioshape_reader_get_record(struct ioshape_reader *reader, uint64_t index,
			      struct ioshape_record_info *info);

/**
 * Finds a record by its name.
 *
 * @param reader  the reader
 * @param name    of the record
 * @param index   receives its index
 * @return 0; -ENOENT if there is no such name; another negative code
 */
int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name, uint64_t *index);

/**
 * Reads bytes [offset, offset + bytes) of a record.
 *
 * Files of this library have a checksum for each MiB of a record: every block that the range
 * touches is read and verified. Files of torch.save() have one for each record, which is verified
 * when all of the record is read. After IOSHAPE_E_DAMAGED what `into` holds is undefined; the error
 * names record and offset.
 *
 * Calls that go through the file front to back are as fast as one ioshape_reader_load(): the reader
 * reads ahead while the caller does other things. The memory for that (block_bytes * queue_depth)
 * is the reader's until the end of the records is reached, another of its functions reads, a call
 * fails, or the reader is freed.
 *
 * @param reader  the reader
 * @param record  index of the record; a file that is read in another format (`any_format`) is
 *                record 0, all of it
 * @param offset  in the record
 * @param into    receives the bytes
 * @param bytes   how many
 * @return 0; -ERANGE if the range leaves the record; IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record, uint64_t offset, void *into,
			size_t bytes);

/**
 * Checks the archive's structure, reads a share of the data, and compares its checksums.
 *
 * Structure are the directory, the index and all headers. What is read of the data is spread evenly
 * over the file from a random place on: MiBs of files of this library, records of files of
 * torch.save().
 *
 * @param reader  the reader
 * @param share   of the data, from 0 (structure only) to 1 (every record)
 * @return 0; IOSHAPE_E_DAMAGED for the first damage; -ENODATA if the file was written without
 *         checksums (torch's set_crc32_options(False)); -EINVAL if it is no such share; another
 *         negative code
 */
int ioshape_reader_verify(struct ioshape_reader *reader, double share);

/**
 * Tells about a tensor.
 *
 * @param reader  the reader
 * @param index   of the tensor
 * @param info    filled; info->size must be set
 * @return 0; -ENOENT if there is no such index; IOSHAPE_E_NO_TABLE if the file was not written
 *         through the calls for tensors; another negative code
 */
int ioshape_reader_get_tensor(struct ioshape_reader *reader, uint64_t index,
			      struct ioshape_tensor_info *info);

/**
 * Finds a tensor by its name.
 *
 * @param reader  the reader
 * @param name    of the tensor
 * @param index   receives its index
 * @return 0; -ENOENT if there is no such name; IOSHAPE_E_NO_TABLE; another negative code
 */
int ioshape_reader_find_tensor(struct ioshape_reader *reader, const char *name, uint64_t *index);

/** One tensor, or a range of its bytes, to be read into the caller's memory. */
struct ioshape_load_request {
	uint64_t tensor; /**< index */
	uint64_t offset; /**< in bytes of its memory */
	uint64_t bytes;
	void *into;
};

/**
 * Loads any number of tensors or ranges at once.
 *
 * They are read in the order of the file, far ahead: many in one call are much faster than one at a
 * time. Ranges may overlap.
 *
 * @param reader    the reader
 * @param requests  what to read, and where to
 * @param count     number of requests
 * @return 0; -ENOENT, -ERANGE, IOSHAPE_E_NO_TABLE, IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_reader_load(struct ioshape_reader *reader, const struct ioshape_load_request *requests,
			size_t count);

/**
 * Loads any number of records or ranges at once, as ioshape_reader_load() does tensors. The file
 * needs no table; one in another format (`any_format`) is record 0, all of it.
 *
 * @param reader    the reader
 * @param requests  what to read, and where to; `tensor` is the index of a record
 * @param count     number of requests
 * @return 0; -ENOENT, -ERANGE, IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_reader_load_records(struct ioshape_reader *reader,
				const struct ioshape_load_request *requests, size_t count);

/**
 * Tells what was given as metadata at the save; zeros for a file that has none.
 *
 * @param reader    the reader
 * @param metadata  filled, with pointers that are valid until the reader is freed; metadata->size
 *                  must be set
 * @return 0 or a negative code
 */
int ioshape_reader_get_metadata(struct ioshape_reader *reader, struct ioshape_metadata *metadata);

/**
 * Frees a reader.
 *
 * @param reader  the reader; NULL is fine
 */
void ioshape_reader_free(struct ioshape_reader *reader);

#ifdef __cplusplus
}
#endif

#endif
