/* SPDX-License-Identifier: Apache-2.0 */
/*
 * File formats: torch zips, shard files, safetensors, and checksums beside a file. Writers and
 * parsers are pure: they convert bytes and numbers to bytes and numbers. Only the reader reads
 * files, through io.
 *
 * docs/format.md specifies the formats.
 */
#ifndef FORMAT_ZIP_H
#define FORMAT_ZIP_H

#include "base/base.h"
#include "format/manifest.h"
#include "io/io.h"

#include <ioshape/ioshape.h>

#define FORMAT_FOLDER "archive/" /* the only folder of the zips that this library writes */
/* Length of a record that is not known yet. */
#define FORMAT_UNKNOWN_BYTES UINT64_MAX
#define FORMAT_INDEX_RECORD ".ioshape/index"

/* Records of at least this size begin on a page boundary, smaller ones on a cache line, as in
 * torch. */
#define FORMAT_LARGE_RECORD_BYTES (256 * KIB)
#define FORMAT_LARGE_ALIGNMENT 4096u
#define FORMAT_SMALL_ALIGNMENT 64u

/* Size of the blocks of a record that have a checksum each, so that damage can be located. The last
 * block may be shorter. */
#define FORMAT_CHECK_BYTES (1 * MIB)

/* Limits on what is read, so that a hostile file costs bounded time and memory. */
#define FORMAT_MAX_RECORDS (IOSHAPE_MAX_TENSORS + 64u)
#define FORMAT_MAX_DIRECTORY_BYTES (1 * GIB)
#define FORMAT_MAX_INDEX_BYTES (1 * GIB)
/* Longest name of the folder of a zip: torch names it after the file, so NAME_MAX and the slash. */
#define FORMAT_MAX_FOLDER_BYTES 256u
#define FORMAT_MAX_FULL_NAME_BYTES (IOSHAPE_MAX_NAME_BYTES + FORMAT_MAX_FOLDER_BYTES)

/* ---- Dtypes (tensors.c) ---------------------------------------------------------------------- */

/* Properties of an element type. */
struct format_dtype {
	const char *name;    /* name as in torch: "float32" */
	const char *storage; /* torch's typed storage: "FloatStorage"; NULL if torch has none */
	uint8_t bytes;       /* size of an element */
};

/* Returns the properties of a dtype, or NULL if the value is not a dtype. */
const struct format_dtype *format_dtype_of(uint32_t dtype);

/* ---- Checks of names (names.c; pure) --------------------------------------------------------- */

/* Checks a name that a caller gives to a record, a tensor or an attribute. It must be present, not
 * too long, and valid UTF-8. `what` names the kind of object in the error. Returns 0, or -EINVAL or
 * IOSHAPE_E_LIMIT with an error message. */
int format_check_name(const char *what, const char *name, struct base_error *error);

/* ---- Directory entries (writer.c; pure) ------------------------------------------------------ */

/* Returns the default alignment of a record of this size. */
uint32_t format_default_alignment(uint64_t bytes);

/* Entry of the central directory for one record. */
struct format_entry {
	char *name; /* name, with the folder in a writer */
	uint32_t name_bytes;
	uint32_t crc32;
	uint64_t bytes;
	uint64_t header_offset;
	uint64_t data_offset;
};

/* ---- Strided tensors (tensors.c; pure) ------------------------------------------------------- */

/* How a tensor's elements are stored in its record. */
struct format_layout {
	uint64_t bytes; /* size of the record: these bytes of memory from tensor.data on */
	/* Strides of the saved tensor, in elements. The caller provides the memory, one number for
	 * each dimension. An array of 64 in each layout would make a plan of many tensors large. */
	int64_t *strides;
};

/* Checks a tensor, except whether its name is unique, and decides its layout. Its elements must be
 * one dense block. Returns 0, or -EINVAL or IOSHAPE_E_LIMIT with an error message that names the
 * tensor. */
int format_layout_tensor(const struct ioshape_tensor *tensor, struct format_layout *layout,
			 struct base_error *error);

/*
 * Returns whether the strides visit each element of one dense block exactly once, in any order of
 * the dimensions. Every saved tensor does so. If they do, *elements receives the number of
 * elements. Any numbers are safe: negative or overflowing ones give false. In dimensions of length
 * 0 or 1 the stride may be anything up to the product of the other lengths.
 */
bool format_strides_dense(uint32_t dims, const int64_t *shape, const int64_t *strides,
			  uint64_t *elements);

/* ---- Pickle (tensors.c; pure) ---------------------------------------------------------------- */

/* Appends data.pkl: a pickle (protocol 2) of a dict of tensors in the given order. Tensor i is in
 * storage "data/i". torch.load accepts it with weights_only=True. Returns 0 or -ENOMEM. */
int format_pickle_tensors(struct base_buffer *out, const struct ioshape_tensor *tensors,
			  const struct format_layout *layouts, size_t count);

/* ---- Safetensors (tensors.c; pure) ----------------------------------------------------------- */

/* A safetensors file holds the length of its header, the header in JSON, and the tensors one after
 * the other, in row-major order. */

/* Longest header that the Python package reads; see _formats/safetensors.py. */
#define FORMAT_SAFETENSORS_MAX_HEADER_BYTES (32 * MIB)

/* Checks a tensor for a safetensors file, as format_layout_tensor() does, and sets its layout.
 * Returns 0, or -EINVAL or IOSHAPE_E_LIMIT with an error message. -EINVAL also if the tensor is not
 * contiguous or the format cannot hold it. */
int format_layout_safetensors(const struct ioshape_tensor *tensor, struct format_layout *layout,
			      struct base_error *error);

/* Returns a value below, at or above 0 if tensor `one` is stored before, at the same position as,
 * or behind `other` in the file. */
int format_safetensors_compare(const struct ioshape_tensor *one,
			       const struct ioshape_tensor *other);

/* Appends everything before the first tensor's bytes. The tensors must be checked and in the order
 * of the file. `metadata` may be NULL; of it only attributes can be written. Returns 0, -EINVAL or
 * IOSHAPE_E_LIMIT with an error message, or -ENOMEM. */
int format_safetensors_header(struct base_buffer *out, const struct ioshape_tensor *tensors,
			      size_t count, const struct ioshape_metadata *metadata,
			      struct base_error *error);

/* ---- Index (index.c; pure) ------------------------------------------------------------------- */

/* Row of the tensor table. */
struct format_tensor_row {
	const char *name; /* zero-terminated */
	uint32_t dtype;
	uint32_t dims;
	const int64_t *shape;
	const int64_t *strides;
	uint64_t record; /* position in the central directory; increases from row to row */
};

/* Size of a record's statistics in the index. */
#define FORMAT_STATISTICS_BYTES 56u

/* Statistics of a record. */
struct format_examined {
	struct base_statistics statistics; /* dtype 0: the record was not examined */
	uint32_t alarms;                   /* bits of enum ioshape_alarm that it raised */
};

/* Contents of the index record: checksums of blocks, the tensor table, metadata and statistics. A
 * decoded index owns all that it points to. */
struct format_index {
	uint64_t check_bytes; /* size of a block: the writer's FORMAT_CHECK_BYTES */
	/* format_directory_crc32() of the records, which shows whether the directory is still the
	 * same */
	uint32_t directory_crc32;
	uint64_t records; /* number of records before the index; the index covers all of them */
	const uint64_t
		/* data offsets of these records, so that readers need not read each local header */
		*data_offsets;
	uint64_t check_count;
	/* checksums, for each record in order, for each of its blocks in order */
	const uint32_t *checks;
	/* For each record, the position of its first block in `checks`. Set by the decoder only. */
	const uint64_t *first_check;
	bool has_table;
	uint64_t tensor_count;
	const struct format_tensor_row *tensors;
	struct format_names *names; /* names of the tensors, by position; set by the decoder only */
	struct ioshape_metadata metadata;
	bool has_statistics;
	const struct format_examined *examined; /* for each record */
	uint32_t alarms;                        /* bits of enum ioshape_alarm */
	void *memory; /* memory of a decoded index, for all but the names */
};

/* Returns a checksum over everything that the directory says of these entries, without the first
 * folder_bytes bytes of each name (the folder). The index holds it, because the bytes of a record
 * may be intact while its name in the directory is not. */
uint32_t format_directory_crc32(const struct format_entry *entries, uint64_t count,
				size_t folder_bytes);

/* Appends the encoded index. Returns 0, -ENOMEM or IOSHAPE_E_LIMIT. */
int format_index_encode(struct base_buffer *out, const struct format_index *index);

/* Computes the length of an archive whose records follow one another, so that its
 * space can be reserved to the byte. Begin with zeros and add each record. Then add the index, if
 * the archive has one. */
struct format_length {
	uint64_t cursor;          /* end of the last record */
	uint64_t directory_bytes; /* size of the directory without its end record */
	uint64_t records, checks; /* counts for the index */
};

/* Adds a record. `name_bytes` includes the folder. Returns 0, or IOSHAPE_E_LIMIT if the file would
 * exceed 2^63 bytes or the name is too long. */
int format_length_add(struct format_length *length, size_t name_bytes, uint64_t bytes,
		      uint32_t alignment);
/* Adds a member of a shard file. */
int format_length_add_member(struct format_length *length, size_t name_bytes, uint64_t bytes,
			     uint64_t alignment);
/* Adds the index, whose table and metadata are those of `index`. */
int format_length_add_index(struct format_length *length, const struct format_index *index);
/* Returns the length of the whole file. */
uint64_t format_length_of(const struct format_length *length);
/*
 * Decodes the index. The bytes are untrusted. `entries` are the directory entries before the index,
 * against which counts are checked. Tensor names are unique, and shapes and strides fit their
 * records. After success everything in the index is trustworthy except the data offsets, which
 * format_data_fits() checks. Returns 0, IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT, -ENOMEM, or
 * IOSHAPE_E_FORMAT if a later version wrote it. After a failure there is nothing to free.
 */
int format_index_decode(struct format_index *index, const uint8_t *data, size_t bytes,
			const struct format_entry *entries, uint64_t entry_count,
			struct base_error *error);
void format_index_free(struct format_index *index);

/* Checks a caller's metadata against the limits. Returns 0, or -EINVAL or IOSHAPE_E_LIMIT with an
 * error message. */
int format_check_metadata(const struct ioshape_metadata *metadata, struct base_error *error);

/* ---- Files beside a file in another format (index.c; pure) ----------------------------------- */

/* Largest size of such a file, which is read as a whole. It suffices for the checksums of 8 TiB in
 * blocks of 1 MiB. */
#define FORMAT_MOST_BESIDE_BYTES (32 * MIB)

/* The version of the file to which such a file belongs. */
struct format_beside {
	uint64_t file_bytes;
	/* Modification time of the file in nanoseconds since 1970; 0 if unknown. What lies beside a
	 * file with another time belongs to another file. */
	int64_t modified_ns;
};

/* Bounds of the block size of checksums, which is a power of two. */
#define FORMAT_LEAST_CHECK_BYTES (64 * KIB)
#define FORMAT_MOST_CHECK_BYTES (1 * GIB)

#define FORMAT_CHECKSUMS_SUFFIX ".ioshape-sums"

/* One CRC-32 for each block of a file. The last block may be shorter. */
struct format_checksums {
	struct format_beside file;
	uint64_t block_bytes;
	uint64_t blocks;
	const uint32_t *crc32; /* array of `blocks` checksums */
};

/* Appends the checksums to `out` in their file format. Returns 0, -ENOMEM, or -EFBIG if they would
 * be too large to be read again. */
int format_checksums_encode(struct base_buffer *out, const struct format_checksums *checksums);
/* Decodes a file of checksums. The bytes are untrusted. After success the checksums are valid, and
 * the struct owns them. Returns 0, -ENOMEM, IOSHAPE_E_DAMAGED, or IOSHAPE_E_FORMAT if a later
 * version wrote the bytes or they are something else. After a failure there is nothing to free. */
int format_checksums_decode(struct format_checksums *checksums, const uint8_t *data, size_t bytes);
void format_checksums_free(struct format_checksums *checksums);

/* Earlier versions refuse a file of checksums with anything else in it. So statistics have a file
 * of their own. */
#define FORMAT_STATISTICS_SUFFIX ".ioshape-stats"

/* Statistics of the tensors of a file, in the order of the file. */
struct format_statistics {
	struct format_beside file;
	struct format_entry *tensors; /* only sizes and checksums; the names are "" */
	struct format_index index;    /* only statistics; `records` counts the tensors */
};

/* Appends the statistics to `out` in their file format. Returns 0, -ENOMEM or -EFBIG. */
int format_statistics_encode(struct base_buffer *out, const struct format_statistics *statistics);
/* Decodes a file of statistics as format_checksums_decode() decodes checksums. */
int format_statistics_decode(struct format_statistics *statistics, const uint8_t *data,
			     size_t bytes);
void format_statistics_free(struct format_statistics *statistics);

/* ---- Names (names.c; pure): a hash table from name to position ------------------------------- */

struct format_names; /* borrows the names */

/* Creates an empty table with memory for `expected` names. Returns 0 or -ENOMEM. */
int format_names_new(struct format_names **out, uint64_t expected);
/* Adds a name, which the table borrows. The table grows as needed. Returns 0, -EEXIST if the name
 * is already in it, or -ENOMEM. */
int format_names_add(struct format_names *names, const char *name, size_t name_bytes,
		     uint64_t position);
/* Finds a name and sets *position. Returns false if the table does not have it. */
bool format_names_find(const struct format_names *names, const char *name, size_t name_bytes,
		       uint64_t *position);
void format_names_free(struct format_names *names);

/* The following functions append JSON. They return 0 or -ENOMEM. */
/* Appends a string of valid UTF-8 in quotes. Escapes only the characters that JSON requires, in the
 * shortest form. */
int format_json_put_string(struct base_buffer *out, const char *text);
/* Appends formatted text of at most 255 bytes. */
__attribute__((format(printf, 2, 3))) int format_json_put(struct base_buffer *out,
							  const char *format, ...);

/* Returns whether the text is valid UTF-8 without NUL. `bytes` is its length. */
bool format_utf8_valid(const char *text, size_t bytes);

/* Writes a name from a file to `into` in a form that is safe in a message. It is shortened if it is
 * long, and cleaned by base_make_plain(). Returns `into`. */
#define FORMAT_SHOWN_NAME_BYTES 128u
const char *format_show_name(char into[FORMAT_SHOWN_NAME_BYTES], const char *name, size_t bytes);
/* Returns a zero-terminated name in a form that is safe in a message. The result is valid until the
 * end of the enclosing block. */
#define FORMAT_SHOWN(name)                                                                         \
	format_show_name((char[FORMAT_SHOWN_NAME_BYTES]){ 0 }, name, strlen(name))

/* ---- Parser (parse.c) ------------------------------------------------------------------------ */

/* Reads bytes of the archive, from a file, or in tests and fuzzing from memory. Returns 0 or a
 * negative code. */
typedef int (*format_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

/* Decoded central directory of a zip. */
struct format_directory {
	/* Entries in the order of the file. Names are without the folder. */
	struct format_entry *entries;
	uint64_t count;
	struct format_names *names;
	uint64_t offset; /* offset of the central directory, which the last record cannot exceed */
	const char *folder; /* folder of all records with its slash; not zero-terminated */
	size_t folder_bytes;
	uint8_t *memory; /* bytes of the central directory, with the names */
};

/*
 * Finds and checks the end record, the zip64 records and the central directory. All records must be
 * inside the file, stored, not encrypted and not overlapping. Names must be unique, valid and under
 * one folder. data_offset stays 0, because it needs each local header, which format_locate() reads.
 * An index of this library has all these offsets at once. Returns 0, IOSHAPE_E_FORMAT,
 * IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT, or the code that `fetch` returned.
 */
int format_parse(struct format_directory *directory, uint64_t file_bytes, format_fetch_fn fetch,
		 void *user, const char *path, struct base_error *error);
/* Reads the local header of an entry, checks it against the entry, and sets the entry's
 * data_offset. */
int format_locate(struct format_directory *directory, uint64_t position, format_fetch_fn fetch,
		  void *user, const char *path, struct base_error *error);
/* Returns whether the record's data can begin at `data_offset`: behind its header and before the
 * next record. */
bool format_data_fits(const struct format_directory *directory, uint64_t position,
		      uint64_t data_offset);
void format_directory_free(struct format_directory *directory);

/* ---- Writer (writer.c) ----------------------------------------------------------------------- */

/* Sink of a writer's bytes, from front to back. The thread that uses the writer calls it. The
 * caller owns the sink, ends it and frees it. */
struct format_sink_ops {
	/* Returns the number of bytes put so far, which is the offset of the next byte in the
	 * archive. */
	uint64_t (*offset)(void *to);
	/* Appends bytes, at least one, and continues `*crc` over them (`crc` may be NULL). The
	 * caller may reuse the memory when the call returns. */
	int (*put)(void *to, const void *data, size_t bytes, uint32_t *crc,
		   struct base_error *error);
	/*
	 * Appends bytes whose CRC-32 is known. NULL if format_writer_put_summed() is never called.
	 */
	int (*put_summed)(void *to, const void *data, size_t bytes, uint32_t crc32,
			  struct base_error *error);
};

/* A sink with its state. */
struct format_sink {
	const struct format_sink_ops *ops;
	void *to;
};

/* Returns a sink that writes to a file. The caller still calls io_writer_finish(),
 * io_writer_commit() and io_writer_free(). */
struct format_sink format_sink_of_file(struct io_writer *file);

/* Turns records into the bytes of an archive. */
struct format_writer;

/* Creates a writer of a torch zip. `path` is for messages. */
int format_writer_new(struct format_writer **out, struct format_sink sink, const char *path,
		      struct base_error *error);

#define FORMAT_MAX_MEMBER_ALIGNMENT (4 * GIB)

/* Creates a writer of a shard file (bundle). This zip stores whole files as its members, one after
 * the other, without a folder and without an index. Members begin on multiples of `alignment`,
 * which is a multiple of FORMAT_LARGE_ALIGNMENT and at most FORMAT_MAX_MEMBER_ALIGNMENT; otherwise
 * format_writer_begin() fails. */
int format_writer_new_bundle(struct format_writer **out, struct format_sink sink, const char *path,
			     uint64_t alignment, struct base_error *error);

/*
 * Begins a record; put it in any number of calls, then end it. `name` is without the folder, and
 * unique. `bytes` may be FORMAT_UNKNOWN_BYTES for members of shard files. `alignment` 0 depends on
 * the size. After a failure the writer can only be freed.
 */
int format_writer_begin(struct format_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error);
/* Appends bytes to the open record. */
int format_writer_put(struct format_writer *writer, const void *data, size_t bytes,
		      struct base_error *error);
/* Appends bytes whose CRC-32 is known, so they are not read again. In a record of an archive, those
 * are read again in which a block of FORMAT_CHECK_BYTES ends. */
int format_writer_put_summed(struct format_writer *writer, const void *data, size_t bytes,
			     uint32_t crc32, struct base_error *error);
/* Ends the open record. -EIO: its bytes are not as many as were announced. */
int format_writer_end(struct format_writer *writer, struct base_error *error);

/* Returns a sink that writes to the open member of a shard file, so that an archive can be put into
 * it. Its offsets count from the start of the member. A writer of an archive on it can be finished
 * and freed while the member stays open. The sink is valid until the member ends. */
struct format_sink format_sink_of_member(struct format_writer *bundle);

/* Appends the index and the directory. The table and the metadata of the index come from `index`,
 * which may be NULL; this call fills in the rest. A shard file has no index. */
int format_writer_finish(struct format_writer *writer, const struct format_index *index,
			 struct base_error *error);
/* Returns the directory entries of the records so far. */
const struct format_entry *format_writer_entries(const struct format_writer *writer,
						 uint64_t *count);
/* Frees a writer; NULL is allowed. */
void format_writer_free(struct format_writer *writer);

/* ---- Reader (reader.c) ----------------------------------------------------------------------- */

/* An open archive. It does not change after it is opened. */
struct format_reader {
	struct io_input input;
	struct format_directory directory;
	bool has_index;
	struct format_index index;
	/* No checksums are known. torch.serialization.set_crc32_options(False) writes every
	 * checksum as 0. Or the file is plain and has no checksums beside it. */
	bool no_checksums;
	/* The file is not an archive. The directory then has one entry, without a header, which is
	 * the whole file. */
	bool plain;
	/* Reason why the index in the file is not used: it does not fit, or is too new. Otherwise
	 * its code is 0. */
	struct base_error index_problem;
};

/*
 * Opens a zip, or `bytes` bytes from `base` on, as io_input_open() does. All offsets count from
 * `base`.
 *
 * If the index has a valid checksum but does not fit the directory, another tool has repacked the
 * archive. Its records are then read like those of any torch zip.
 */
int format_reader_open(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, struct base_error *error);
/* Opens a file in any format as an archive with one nameless record, which is the whole file,
 * without checksums. */
int format_reader_open_plain(struct format_reader *reader, const char *path, uint64_t base,
			     uint64_t bytes, enum ioshape_direct direct, struct base_error *error);
/* Adds decoded checksums to a plain file, so that reads are verified. The reader takes their
 * memory. Returns 0, or IOSHAPE_E_DAMAGED if they belong to a file of another length. */
int format_reader_add_checksums(struct format_reader *reader, struct format_checksums *checksums,
				struct base_error *error);
void format_reader_close(struct format_reader *reader);
/* Reads and checks all local headers, which loading does not need. */
int format_reader_check_headers(const struct format_reader *reader, struct base_error *error);

/* Range of a record to be read and verified. */
struct format_range {
	uint64_t record;
	uint64_t offset;
	uint64_t bytes;
	void *into; /* receives the bytes; NULL to verify only */
};

/*
 * Reads ranges, in any order, in one sequential pass. With `verify`, a block that a range touches
 * only in part is read whole and verified. Records without block checksums are verified if they are
 * read whole. Every range is within its record. Ranges of one record may overlap; the overlap is
 * read again. `stream` is the reader's, which may have begun to read the ranges, or NULL. Returns
 * 0, IOSHAPE_E_DAMAGED with the position of the damage, or another code.
 */
int format_reader_read(const struct format_reader *reader, struct io_queue *queue,
		       struct io_stream *stream, const struct format_range *ranges, size_t count,
		       bool verify, ioshape_progress_fn progress, void *progress_user,
		       struct base_error *error);

/* Reads bytes [offset, offset + bytes) of the file: records, which are verified as in
 * format_reader_read(), and the bytes between them. The range must lie in the file. `stream` is the
 * reader's: sequential calls find their bytes prefetched. */
int format_reader_read_file(const struct format_reader *reader, struct io_queue *queue,
			    struct io_stream *stream, uint64_t offset, void *into, uint64_t bytes,
			    bool verify, ioshape_progress_fn progress, void *progress_user,
			    struct base_error *error);
/* Returns the end of the last record of the caller, up to which sequential reads prefetch. */
uint64_t format_reader_data_end(const struct format_reader *reader);

#endif
