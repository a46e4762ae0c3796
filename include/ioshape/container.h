/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The container level: records written into, and read from, a torch zip; and loading tensors.
 *
 * Record names are relative to the archive's one folder: "data.pkl", "data/0", "version". A writer
 * or a reader may be used by one thread at a time; different handles of one context work at the
 * same time.
 */
#ifndef IOSHAPE_CONTAINER_H
#define IOSHAPE_CONTAINER_H

#include <ioshape/tensors.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Writing --------------------------------------------------------------------------------- */

struct ioshape_writer;

struct ioshape_writer_options {
	size_t size; /* sizeof(struct ioshape_writer_options) */
	/*
	 * What all records will hold, if known: lets the file be preallocated, so that a full disk
	 * is noticed at once. An estimate is fine; 0 if unknown.
	 */
	uint64_t expected_bytes;
	ioshape_progress_fn progress;
	void *progress_user; /* borrowed until the writer is freed */
	/* Borrowed during ioshape_writer_open(); NULL for none. */
	const struct ioshape_metadata *metadata;
	uint32_t no_replace; /* as in struct ioshape_save_options */
	uint32_t no_sync;
};

#define IOSHAPE_WRITER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_writer_options)

/* For ioshape_writer_begin(): the length is not known yet. */
#define IOSHAPE_UNKNOWN_BYTES UINT64_MAX

/*
 * Begins a new file that will take its place at `path` when ioshape_writer_commit() succeeds. On
 * failure *out is NULL and ioshape_context_message() says why.
 */
int ioshape_writer_open(struct ioshape_context *context, const char *path,
			const struct ioshape_writer_options *options, struct ioshape_writer **out);

/*
 * Writes one whole record. The memory is borrowed during the call. `alignment` is where in the file
 * the data may begin: a power of two up to 4096; 0 chooses (4096 for large records, 64 for small
 * ones). Torch needs "data.pkl" and "version". Names must be unique (-EEXIST). After any failure
 * but -EINVAL, -EEXIST and IOSHAPE_E_LIMIT the writer can only be freed.
 */
int ioshape_writer_record(struct ioshape_writer *writer, const char *name, const void *data,
			  uint64_t bytes, uint32_t alignment);

/* The same in pieces: begin, any number of writes, end. One record at a time. */
int ioshape_writer_begin(struct ioshape_writer *writer, const char *name, uint64_t bytes,
			 uint32_t alignment);
int ioshape_writer_write(struct ioshape_writer *writer, const void *data, size_t bytes);
/* -EINVAL if fewer or more bytes came than were announced. */
int ioshape_writer_end(struct ioshape_writer *writer);

/*
 * Completes the container, makes it durable and puts it in place. `report` may be NULL. After this,
 * well or not, the writer can only be asked for its message and freed - unless a record was still
 * open: that is -EINVAL, and can be mended by ending it.
 */
int ioshape_writer_commit(struct ioshape_writer *writer, struct ioshape_report *report);

/* The sentence about the writer's last failure; "" if none. Valid until its next call. */
const char *ioshape_writer_message(struct ioshape_writer *writer);

/* NULL is fine. Without a successful commit the file is abandoned, without a trace. */
void ioshape_writer_free(struct ioshape_writer *writer);

/* ---- Whole saves of records ------------------------------------------------------------------ */

/*
 * Brings bytes [offset, offset + bytes) of a record to `into`. Anything but 0 fails the save with
 * that code (if it is a negative errno, else -EIO). It must not save with the same context.
 */
typedef int (*ioshape_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

struct ioshape_record {
	const char *name; /* as for ioshape_writer_record() */
	const void *data; /* NULL if there are no bytes, or if `fetch` brings them */
	uint64_t bytes;
	uint32_t alignment; /* 0 chooses */
	uint32_t reserved;  /* 0 */
	/* For memory that the CPU cannot read, such as a GPU's; NULL otherwise. */
	ioshape_fetch_fn fetch;
	void *fetch_user;
};

/*
 * As ioshape_save_tensors(), but saves records, in the given order: for files with a pickle of the
 * caller's own. The file is the one that a writer given the same records would make. All names are
 * checked before anything is created (-EEXIST: two are the same).
 *
 * `fetch` is called in the order of records and offsets, once for each byte; a large record comes
 * in pieces. It is called on the calling thread.
 */
int ioshape_save_records(struct ioshape_context *context, const char *path,
			 const struct ioshape_record *records, size_t count,
			 const struct ioshape_save_options *options);

/*
 * The same in the background; what ioshape_save_tensors_async() says holds here, too. `fetch` is
 * called on the calling thread, which then copies the other records, too, without help from others;
 * it has brought everything by the time the call returns. With options->borrow it is called on the
 * saving thread, until the save has ended.
 */
int ioshape_save_records_async(struct ioshape_context *context, const char *path,
			       const struct ioshape_record *records, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);

/* ---- Reading --------------------------------------------------------------------------------- */

struct ioshape_reader;

struct ioshape_reader_options {
	size_t size;        /* sizeof(struct ioshape_reader_options) */
	uint32_t no_verify; /* 1: do not compare checksums while reading */
	/*
	 * 1: what is read into has just been allocated and never been written to. Large pieces of
	 * it are then filled in huge pages where the kernel has them, several times as fast.
	 */
	uint32_t fresh_memory;
	ioshape_progress_fn progress;
	void *progress_user; /* borrowed until the reader is freed */
	/*
	 * Reads a part of a file, such as a member of a bundle: file_bytes bytes from file_offset
	 * on, as if they were the whole of it. Offsets and file_bytes of all calls are then the
	 * part's. 0 and 0: all of the file.
	 */
	uint64_t file_offset;
	uint64_t file_bytes;
};

#define IOSHAPE_READER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_reader_options)

struct ioshape_record_info {
	size_t size;      /* sizeof(struct ioshape_record_info): set before the call */
	const char *name; /* valid until the reader is freed */
	uint64_t bytes;
	uint64_t file_offset; /* of the record's first byte of data */
	uint32_t crc32;
	uint32_t reserved;
};

struct ioshape_tensor_info {
	size_t size;      /* sizeof(struct ioshape_tensor_info): set before the call */
	const char *name; /* this and shape, strides: valid until the reader is freed */
	enum ioshape_dtype dtype;
	uint32_t dims;
	const int64_t *shape;
	const int64_t *strides; /* never NULL if dims > 0; in elements */
	/* What ioshape_reader_load() delivers: the tensor's memory in this layout. */
	uint64_t bytes;
	uint64_t record; /* index of the record that holds it */
};

/*
 * Opens a torch zip: one that this library wrote, or torch.save(). The file is untrusted: every
 * count and offset in it is checked against the limits and the file's size, in bounded time and
 * memory. On failure *out is NULL and ioshape_context_message() says why.
 */
int ioshape_reader_open(struct ioshape_context *context, const char *path,
			const struct ioshape_reader_options *options, struct ioshape_reader **out);

/* The number of records, in the order of the file. */
uint64_t ioshape_reader_records(struct ioshape_reader *reader);
/* -ENOENT if there is no such index. */
int ioshape_reader_record(struct ioshape_reader *reader, uint64_t index,
			  struct ioshape_record_info *info);
/* -ENOENT if there is no such name. */
int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name, uint64_t *index);

/*
 * Reads bytes [offset, offset + bytes) of a record into `into`. Checksums are verified over the
 * blocks that the range touches where the file has checksums per block, and over the whole record
 * where it has only that one and all of it is read. -ERANGE if the range leaves the record.
 * IOSHAPE_E_DAMAGED names record and offset in the message; what `into` then holds is undefined.
 */
int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record, uint64_t offset, void *into,
			size_t bytes);

/* The length of the file. */
uint64_t ioshape_reader_file_bytes(struct ioshape_reader *reader);

/*
 * Reads bytes [offset, offset + bytes) of the file as it lies: headers, records and all. What
 * belongs to records is verified as by ioshape_reader_read(). -ERANGE if the range leaves the file.
 *
 * Calls of this and of ioshape_reader_read() that go through the file front to back are as fast as
 * one ioshape_reader_load(): what follows is read while the caller does other things. The memory
 * for that (block_bytes * queue_depth) is the reader's until the end of the records is reached,
 * another of its functions reads, or it is freed.
 */
int ioshape_reader_read_file(struct ioshape_reader *reader, uint64_t offset, void *into,
			     size_t bytes);

/*
 * Reads every record and compares every checksum; IOSHAPE_E_DAMAGED names the first damage.
 * -ENODATA if the file was written without checksums (torch's set_crc32_options(False)).
 */
int ioshape_reader_verify(struct ioshape_reader *reader);

/*
 * Tensors, for files written through the tensor calls. Others have records only: the functions
 * below then answer IOSHAPE_E_NO_TABLE.
 */
int ioshape_reader_tensors(struct ioshape_reader *reader, uint64_t *count);
int ioshape_reader_tensor(struct ioshape_reader *reader, uint64_t index,
			  struct ioshape_tensor_info *info);
int ioshape_reader_find_tensor(struct ioshape_reader *reader, const char *name, uint64_t *index);

/* One tensor, or a range of its bytes, to be read into the caller's memory. */
struct ioshape_load_request {
	uint64_t tensor; /* index */
	uint64_t offset; /* in bytes of its memory */
	uint64_t bytes;
	void *into;
};

/*
 * Loads any number of tensors or ranges at once, in the order of the file and with reads far ahead:
 * many in one call is much faster than one at a time. Failures as in ioshape_reader_read().
 */
int ioshape_reader_load(struct ioshape_reader *reader, const struct ioshape_load_request *requests,
			size_t count);

/*
 * What was given as metadata at the save. metadata->size must be set; its pointers are valid until
 * the reader is freed.
 */
int ioshape_reader_metadata(struct ioshape_reader *reader, struct ioshape_metadata *metadata);

/* The sentence about the reader's last failure; "" if none. Valid until its next call. */
const char *ioshape_reader_message(struct ioshape_reader *reader);

/* NULL is fine. */
void ioshape_reader_free(struct ioshape_reader *reader);

#ifdef __cplusplus
}
#endif

#endif
