/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The container: a torch zip. The writer and the parser are pure: bytes and numbers in, bytes and
 * numbers out. Only the reader touches files, through io.
 *
 * docs/format.md describes the format.
 */
#ifndef FORMAT_ZIP_H
#define FORMAT_ZIP_H

#include "base/base.h"
#include "format/manifest.h"
#include "io/io.h"

#include <ioshape/ioshape.h>

#define FORMAT_FOLDER "archive/" /* the one folder of files that we write */
/* The length of a record that is not known yet. */
#define FORMAT_UNKNOWN_BYTES UINT64_MAX
#define FORMAT_INDEX_RECORD ".ioshape/index"

/* Records from this size on begin on a page boundary, smaller ones on a cache line, as in torch. */
#define FORMAT_LARGE_RECORD_BYTES (256 * KIB)
#define FORMAT_LARGE_ALIGNMENT 4096u
#define FORMAT_SMALL_ALIGNMENT 64u

/* The unit in which damage is located: one checksum per so many bytes of a record (the last one
 * shorter). */
#define FORMAT_CHECK_BYTES (1 * MIB)

/* Limits on what is read, so that a hostile file costs bounded time and memory. */
#define FORMAT_MAX_RECORDS (IOSHAPE_MAX_TENSORS + 64u)
#define FORMAT_MAX_DIRECTORY_BYTES (1 * GIB)
#define FORMAT_MAX_INDEX_BYTES (1 * GIB)
/* Torch names the folder after the file: NAME_MAX and the slash. */
#define FORMAT_MAX_FOLDER_BYTES 256u
#define FORMAT_MAX_FULL_NAME_BYTES (IOSHAPE_MAX_NAME_BYTES + FORMAT_MAX_FOLDER_BYTES)

/* ---- Dtypes (tensors.c) ------------------------------------------------------------------------
 */

struct format_dtype {
	const char *name;    /* "float32" */
	const char *storage; /* "FloatStorage": torch's typed storage; NULL where torch has none */
	uint8_t bytes;       /* of one element */
};

/* NULL if it is not a dtype. */
const struct format_dtype *format_dtype_of(uint32_t dtype);

/* ---- Checks (names.c; pure) ------------------------------------------------------------------ */

/*
 * A name that a caller gives to a record, a tensor or an attribute (`what`): present, not too long,
 * UTF-8. -EINVAL or IOSHAPE_E_LIMIT with a sentence.
 */
int format_check_name(const char *what, const char *name, struct base_error *error);

/*
 * What a caller wants to call a record, and where it wants it to begin (0: wherever). The library's
 * own folder is not for callers. -EINVAL or IOSHAPE_E_LIMIT with a sentence naming record and path.
 */
int format_check_record(const char *name, uint32_t alignment, const char *path,
			struct base_error *error);

/* ---- Entries (writer.c; pure) ---------------------------------------------------------------- */

/* The alignment that a record of this size gets by default. */
uint32_t format_default_alignment(uint64_t bytes);

/* What the central directory says of one record. */
struct format_entry {
	char *name; /* with the folder */
	uint32_t name_bytes;
	uint32_t crc32;
	uint64_t bytes;
	uint64_t header_offset;
	uint64_t data_offset;
};

/* ---- Strided memory (tensors.c; pure) -------------------------------------------------------- */

/* How a tensor's elements go into its record. */
struct format_layout {
	uint64_t bytes;  /* of the record */
	bool as_it_lies; /* the record is `bytes` of memory from data on; otherwise elements are
			    packed row-major */
	/*
	 * Of the saved tensor, in elements. The caller provides the room, for as many as the tensor
	 * has dimensions: with 64 in each layout a plan of many tensors would be large.
	 */
	int64_t *strides;
};

/*
 * Checks one tensor (all fields but uniqueness of the name) and decides its layout. -EINVAL or
 * IOSHAPE_E_LIMIT with a sentence naming the tensor.
 */
int format_layout_tensor(const struct ioshape_tensor *tensor, struct format_layout *layout,
			 struct base_error *error);

/*
 * Whether these strides visit each element of one dense block exactly once, in whatever order of
 * the dimensions: what a saved tensor always does. Where it is true *elements is their number. Safe
 * for any numbers: negative or overflowing ones make it false. Lengths of 0 and 1 leave the stride
 * free, up to the product of the other lengths.
 */
bool format_strides_dense(uint32_t dims, const int64_t *shape, const int64_t *strides,
			  uint64_t *elements);

/* Copies bytes [offset, offset + bytes) of the packed, row-major form of the tensor. Any offsets.
 */
void format_pack(const struct ioshape_tensor *tensor, size_t element_bytes, uint64_t offset,
		 void *into, size_t bytes);

/* ---- Pickle (tensors.c; pure) ---------------------------------------------------------------- */

/*
 * Appends data.pkl: a pickle (protocol 2) of a dict of tensors in the given order, tensor i in
 * storage "data/i", that torch.load accepts with weights_only=True.
 */
int format_pickle_tensors(struct base_buffer *out, const struct ioshape_tensor *tensors,
			  const struct format_layout *layouts, size_t count);

/* ---- Safetensors (tensors.c; pure) -------------------------------------------------------------
 */

/*
 * The other container: the length of its header, the header, which is JSON, and the tensors one
 * behind the other, packed row-major.
 */

/* The Python package reads no longer header: see _formats/safetensors.py. */
#define FORMAT_SAFETENSORS_MAX_HEADER_BYTES (32 * MIB)

/*
 * As format_layout_tensor(), for a container whose tensors are all row-major. -EINVAL with a
 * sentence, too, if the format cannot hold the tensor.
 */
int format_layout_safetensors(const struct ioshape_tensor *tensor, struct format_layout *layout,
			      struct base_error *error);

/* Below, at or above 0, as one tensor lies before the other in the file. */
int format_safetensors_compare(const struct ioshape_tensor *one,
			       const struct ioshape_tensor *other);

/*
 * Appends what comes before the first tensor's bytes. The tensors are checked and in order. Of the
 * metadata, which may be NULL, only attributes can be written. -EINVAL or IOSHAPE_E_LIMIT with a
 * sentence; -ENOMEM.
 */
int format_safetensors_header(struct base_buffer *out, const struct ioshape_tensor *tensors,
			      size_t count, const struct ioshape_metadata *metadata,
			      struct base_error *error);

/* ---- Index (index.c; pure) ------------------------------------------------------------------- */

/* A row of the tensor table. */
struct format_tensor_row {
	const char *name; /* zero-terminated */
	uint32_t dtype;
	uint32_t dims;
	const int64_t *shape;
	const int64_t *strides;
	uint64_t record; /* position in the central directory; increases from row to row */
};

/* The extra record: checksums of blocks, tensor table, metadata. Decoded, it owns all it points to.
 */
struct format_index {
	uint64_t check_bytes;     /* FORMAT_CHECK_BYTES of the writer */
	uint32_t directory_crc32; /* format_directory_crc32() of those records: is it still the same
				     directory? */
	uint64_t records;         /* records before the index, all of which it covers */
	const uint64_t
		*data_offsets; /* of those records: saves readers a look at each local header */
	uint64_t check_count;
	const uint32_t *checks; /* for each record in order, for each block of it in order */
	/* Only decoded: for each record, the position of its first block in checks. */
	const uint64_t *first_check;
	bool has_table;
	uint64_t tensor_count;
	const struct format_tensor_row *tensors;
	struct format_names *names; /* of the tensors, by position; only decoded */
	struct ioshape_metadata metadata;
	void *memory; /* of a decoded index, for all but the names */
};

/*
 * Compute one checksum over all that the directory says of these entries, whose names begin with a
 * folder of folder_bytes that does not count. The index carries it: a record may have every bit
 * right and stand under a name that has not.
 */
uint32_t format_directory_crc32(const struct format_entry *entries, uint64_t count,
				size_t folder_bytes);

int format_index_encode(struct base_buffer *out, const struct format_index *index);

/*
 * How long an archive will be whose records were placed one behind the other, so that its space can
 * be reserved to the byte. Zero it; add each record; then add the index, unless it has none.
 */
struct format_length {
	uint64_t cursor;          /* the end of the last record */
	uint64_t directory_bytes; /* without its end */
	uint64_t records, checks; /* for the index */
};

/* Add a record; `name_bytes` with the folder. -EINVAL for a wrong alignment. IOSHAPE_E_LIMIT if the
 * file would pass 2^63 bytes or the name is too long. */
int format_length_add(struct format_length *length, size_t name_bytes, uint64_t bytes,
		      uint32_t alignment);
/* Add a member of a bundle. */
int format_length_add_member(struct format_length *length, size_t name_bytes, uint64_t bytes,
			     uint64_t alignment);
/* Its table and metadata are those of `index`. */
int format_length_add_index(struct format_length *length, const struct format_index *index);
/* Of the whole file. */
uint64_t format_length_of(const struct format_length *length);
/*
 * The bytes are untrusted. `entries` are those of the directory before the index, against which
 * counts are checked. Tensor names are unique, shapes and strides fit their records: after success
 * all of the index can be believed but its data offsets, which format_data_fits() checks.
 * IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT, -ENOMEM; IOSHAPE_E_FORMAT if a later version wrote it. On
 * failure there is nothing to free.
 */
int format_index_decode(struct format_index *index, const uint8_t *data, size_t bytes,
			const struct format_entry *entries, uint64_t entry_count,
			struct base_error *error);
void format_index_free(struct format_index *index);

/* Checks metadata given by a caller against the limits. -EINVAL or IOSHAPE_E_LIMIT with a sentence.
 */
int format_check_metadata(const struct ioshape_metadata *metadata, struct base_error *error);

/* ---- Checksums beside a file in another format (index.c; pure) --------------------------- */

/* What a block of checksums may have: a power of two between these. */
#define FORMAT_LEAST_CHECK_BYTES (64 * KIB)
#define FORMAT_MOST_CHECK_BYTES (1 * GIB)

#define FORMAT_CHECKSUMS_SUFFIX ".ioshape-sums"
/* The most that the file of checksums has: for 8 TiB in blocks of 1 MiB. It is read as a whole. */
#define FORMAT_MOST_CHECKSUMS_BYTES (32 * MIB)

/* struct format_checksums and format_checksums_encode() are in internal.h. */
/*
 * The bytes are untrusted; afterwards the checksums are valid, and owned. IOSHAPE_E_FORMAT if a
 * later version wrote them or it is something else; IOSHAPE_E_DAMAGED, -ENOMEM; nothing to free
 * then.
 */
int format_checksums_decode(struct format_checksums *checksums, const uint8_t *data, size_t bytes);
void format_checksums_free(struct format_checksums *checksums);

/* ---- Names (names.c; pure): a hash table from name to position ------------------------------- */

struct format_names; /* names are borrowed */

int format_names_new(struct format_names **out, uint64_t expected);
/* -EEXIST if the name is there, -ENOMEM. Grows. */
int format_names_add(struct format_names *names, const char *name, size_t name_bytes,
		     uint64_t position);
/* false if it is not there */
bool format_names_find(const struct format_names *names, const char *name, size_t name_bytes,
		       uint64_t *position);
void format_names_free(struct format_names *names);

/* Each appends JSON; 0 or -ENOMEM. */
/* A string of valid UTF-8, in quotes: escaped is what must be, as shortly as JSON can. */
int format_json_put_string(struct base_buffer *out, const char *text);
/* Anything else, of at most 255 bytes. */
__attribute__((format(printf, 2, 3))) int format_json_put(struct base_buffer *out,
							  const char *format, ...);

/* Valid UTF-8, no NUL (given by length). */
bool format_utf8_valid(const char *text, size_t bytes);

/*
 * A name from a file, fit for a message: shortened where it is long, and as base_make_plain()
 * leaves it. Returns `into`.
 */
#define FORMAT_SHOWN_NAME_BYTES 128u
const char *format_show_name(char into[FORMAT_SHOWN_NAME_BYTES], const char *name, size_t bytes);
/* The same for a zero-terminated name, valid until the end of the block it stands in. */
#define FORMAT_SHOWN(name)                                                                         \
	format_show_name((char[FORMAT_SHOWN_NAME_BYTES]){ 0 }, name, strlen(name))

/* ---- Parsing (parse.c) ----------------------------------------------------------------------- */

/* Reads bytes of the archive: from a file, or in tests and fuzzing from memory. 0 or a negative
 * code. */
typedef int (*format_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

struct format_directory {
	/* In the order of the directory: that of the file, but for some repacking tools. Names
	 * without the folder. */
	struct format_entry *entries;
	uint64_t count;
	/* The entries as they lie in the file; NULL if that is the order of the directory. */
	uint64_t *order;
	struct format_names *names;
	uint64_t offset; /* of the central directory: where the last record ends at the latest */
	void *memory;
};

/*
 * Finds and checks the end record, the zip64 records and the central directory: everything inside
 * the file, stored and not encrypted, no two records overlapping, names unique, valid and under one
 * folder. data_offset stays 0: it takes a look at each local header, which format_locate() does;
 * our own index tells all of them at once. IOSHAPE_E_FORMAT, IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT, or
 * what fetch answered.
 */
int format_parse(struct format_directory *directory, uint64_t file_bytes, format_fetch_fn fetch,
		 void *user, const char *path, struct base_error *error);
/* Reads one local header, checks it against the entry, and sets the entry's data_offset. */
int format_locate(struct format_directory *directory, uint64_t position, format_fetch_fn fetch,
		  void *user, const char *path, struct base_error *error);
/* Whether the record's data could begin there: behind its header and before the next record. */
bool format_data_fits(const struct format_directory *directory, uint64_t position,
		      uint64_t data_offset);
void format_directory_free(struct format_directory *directory);

/* ---- Writer (writer.c) ----------------------------------------------------------------------- */

/*
 * Where a writer's bytes go, front to back. Called by the one thread that has the writer. The sink
 * belongs to the caller, who ends and frees it.
 */
struct format_sink_ops {
	/* Bytes put so far: where in the archive the next one lies. */
	uint64_t (*offset)(void *to);
	/*
	 * Appends bytes, of which there are some, continuing `*crc` over them on the way (crc may
	 * be NULL). The memory is free again when it returns.
	 */
	int (*put)(void *to, const void *data, size_t bytes, uint32_t *crc,
		   struct base_error *error);
	/* Appends bytes whose CRC-32 is known. NULL where format_writer_put_summed() is not called.
	 */
	int (*put_summed)(void *to, const void *data, size_t bytes, uint32_t crc32,
			  struct base_error *error);
};

struct format_sink {
	const struct format_sink_ops *ops;
	void *to;
};

/* A file; io_writer_finish(), io_writer_commit() and io_writer_free() are left to the caller.
 */
struct format_sink format_sink_of_file(struct io_writer *file);

/* Turns records into the bytes of an archive. */
struct format_writer;

/* A torch zip. `path` is for messages. */
int format_writer_new(struct format_writer **out, struct format_sink sink, const char *path,
		      struct base_error *error);

#define FORMAT_MAX_MEMBER_ALIGNMENT (4 * GIB)

/*
 * A bundle: a zip whose stored records are whole files, its members, one after the other, without a
 * folder and without an index. Members begin on multiples of `alignment`: a multiple of
 * FORMAT_LARGE_ALIGNMENT, at most FORMAT_MAX_MEMBER_ALIGNMENT.
 */
int format_writer_new_bundle(struct format_writer **out, struct format_sink sink, const char *path,
			     uint64_t alignment, struct base_error *error);

/*
 * A record: begin, put any number of times, end. `name` without the folder. `bytes` may be
 * FORMAT_UNKNOWN_BYTES, and is for members. alignment 0: by size. Of the calls only a refused one
 * (-EINVAL, -EEXIST) is without consequences; after another failure only free() remains.
 */
int format_writer_begin(struct format_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error);
int format_writer_put(struct format_writer *writer, const void *data, size_t bytes,
		      struct base_error *error);
/* Puts bytes of a bundle's member whose CRC-32 is known: they are not looked at. */
int format_writer_put_summed(struct format_writer *writer, const void *data, size_t bytes,
			     uint32_t crc32, struct base_error *error);
int format_writer_end(struct format_writer *writer, struct base_error *error);

/*
 * The open member of a bundle, to put an archive into: offsets are the member's, and a writer of an
 * archive can be finished and freed while the member stays open. Valid until the member's end.
 */
struct format_sink format_sink_of_member(struct format_writer *bundle);

/*
 * Puts the index (its table and metadata from `index`, which may be NULL; the rest is filled in
 * here; a bundle has none) and the directory.
 */
int format_writer_finish(struct format_writer *writer, const struct format_index *index,
			 struct base_error *error);
/* What the directory will say of the records so far; of none while one is open. */
const struct format_entry *format_writer_entries(const struct format_writer *writer,
						 uint64_t *count);
/* NULL is fine. */
void format_writer_free(struct format_writer *writer);

/* ---- Reader (reader.c) -------------------------------------------------- */

/* An open archive. Immutable after opening. */
struct format_reader {
	struct io_input input;
	struct format_directory directory;
	bool has_index;
	struct format_index index;
	/* torch.serialization.set_crc32_options(False): every checksum is 0, and says nothing. Or a
	 * plain file without any. */
	bool no_checksums;
	/* No archive: the directory has one entry, without a header, which is all of the file. */
	bool plain;
	/* Why the index that the file has is not used: it does not fit, or is too new. Otherwise
	 * code 0. */
	struct base_error index_problem;
};

/*
 * Of the file, or of `bytes` bytes from `base` on: io_input_open(). All offsets count from there.
 *
 * An index whose own checksum is right but which does not fit the directory means that another tool
 * has repacked the archive. Its records are then read like those of any torch zip.
 */
int format_reader_open(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, struct base_error *error);
/* A file in any format, as an archive of one nameless record that is all of it, without checksums.
 */
int format_reader_open_plain(struct format_reader *reader, const char *path, uint64_t base,
			     uint64_t bytes, enum ioshape_direct direct, struct base_error *error);
/* Have a plain file verified by decoded checksums, whose memory the reader takes.
 * IOSHAPE_E_DAMAGED if they are of a file of another length. */
int format_reader_add_checksums(struct format_reader *reader, struct format_checksums *checksums,
				struct base_error *error);
void format_reader_close(struct format_reader *reader);
/* Looks at all local headers, which loading does not need. */
int format_reader_check_headers(const struct format_reader *reader, struct base_error *error);

/* Part of a record, to be read and verified. */
struct format_range {
	uint64_t record;
	uint64_t offset;
	uint64_t bytes;
	void *into; /* NULL: verify only */
};

/*
 * Reads ranges, in any order, as one sequential pass. With `verify`, blocks that a range touches
 * only in part are read whole and verified; records without block checksums are verified when read
 * whole. Ranges of one record may overlap; what overlaps is read again. `stream`, or NULL, is the
 * reader's, and may have begun to read them. -ENOENT for a record that is not
 * there, -ERANGE for a range that leaves its record, IOSHAPE_E_DAMAGED with the place of the
 * damage.
 */
int format_reader_read(const struct format_reader *reader, struct io_lane *lane,
		       struct io_stream *stream, const struct format_range *ranges, size_t count,
		       bool verify, ioshape_progress_fn progress, void *progress_user,
		       struct base_error *error);

/*
 * Reads bytes [offset, offset + bytes) of the file, which has them: records, verified as above, and
 * what lies between them. `stream` is the reader's: calls that continue each other find their bytes
 * in memory.
 */
int format_reader_read_file(const struct format_reader *reader, struct io_lane *lane,
			    struct io_stream *stream, uint64_t offset, void *into, uint64_t bytes,
			    bool verify, ioshape_progress_fn progress, void *progress_user,
			    struct base_error *error);
/* Where the last record of the caller's ends, and with it what is read onward. */
uint64_t format_reader_data_end(const struct format_reader *reader);

#endif
