/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses the end of an archive and its central directory. The file is untrusted: every value is
 * checked against the file's size, the limits and all other values before it is used.
 *
 * A zip is read from its end. Readers that disagree about the end can see different archives in one
 * file. This parser takes the last end record, as torch and most readers do, and rejects a file
 * with any ambiguity.
 */
#define _GNU_SOURCE
#include "format/format.h"
#include "format/layout.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Source of the bytes to parse, and destination of errors. */
struct format_source {
	uint64_t bytes;
	format_fetch_fn fetch;
	void *user;
	const char *path;
	struct base_error *error;
};

/* Contents of the end records: position of the central directory. */
struct format_end {
	uint64_t count; /* number of entries */
	uint64_t offset;
	uint64_t bytes;
};

#define MOST_COMMENT_BYTES UINT16_MAX
/* Longest distance from the end of the zip64 end record to the end of the file. */
#define TAIL_BYTES (ZIP64_LOCATOR_BYTES + FORMAT_END_BYTES + MOST_COMMENT_BYTES)

/* Calls fetch() after a check that the range lies in the file. */
static int get(const struct format_source *source, uint64_t offset, void *into, size_t bytes)
{
	int ret;

	if (offset > source->bytes || bytes > source->bytes - offset)
		return base_fail_reason(source->error, IOSHAPE_E_DAMAGED,
					"cannot read \"%s\": it refers to bytes %" PRIu64
					" to %" PRIu64 " of itself but has only %" PRIu64
					", so it is truncated or overwritten",
					source->path, offset, offset + bytes, source->bytes);
	ret = source->fetch(source->user, offset, into, bytes);
	return ret ? base_fail(source->error, ret, "cannot read \"%s\" at offset %" PRIu64,
			       source->path, offset) :
		     0;
}

/* ---- Files that are not archives ------------------------------------------------------------- */

/* Returns whether the file begins like a safetensors file: the length of a JSON text, then that
 * text. */
static bool looks_like_safetensors(const uint8_t *head, size_t bytes, uint64_t file_bytes)
{
	return bytes >= 9 && head[8] == '{' && base_get_le(head, 8) < file_bytes;
}

static int refuse_without_end(const struct format_source *source)
{
	uint8_t head[16] = { 0 };
	size_t bytes = MIN(source->bytes, sizeof(head));
	int ret;

	if (!source->bytes)
		return base_fail_reason_with(
			source->error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load \"%s\": it is empty, truncated or never written",
			source->path);
	ret = get(source, 0, head, bytes);
	if (ret)
		return ret;
	if (bytes < 4 ? head[0] == 'P' : base_get_le(head, 4) == FORMAT_LOCAL_SIGNATURE)
		return base_fail_reason_with(
			source->error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load \"%s\": it begins like a torch zip but has no end "
			"record, so it is truncated (%s are left)",
			source->path, BASE_SIZE(source->bytes));
	/* Pickles of protocol 2 to 5. torch.save() before 1.6 began with one, and still does so on
	 * request. */
	if (bytes >= 2 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5)
		return base_fail_reason_with(
			source->error, IOSHAPE_E_FORMAT,
			"load it with torch.load() and save it again",
			"cannot load \"%s\": it is %s", source->path,
			head[1] == 2 ? "a torch file in the old format, from before torch 1.6" :
				       "a plain pickle");
	if (looks_like_safetensors(head, bytes, source->bytes))
		return base_fail_reason_with(
			source->error, IOSHAPE_E_FORMAT, "load it with the safetensors library",
			"cannot load \"%s\": it looks like a safetensors file", source->path);
	return base_fail_reason_with(
		source->error, IOSHAPE_E_FORMAT,
		"check that it was written by torch.save() or by this library",
		"cannot load \"%s\": it has neither the beginning nor the end of a zip",
		source->path);
}

/* ---- The end records ------------------------------------------------------------------------- */

static int refuse_end(const struct format_source *source, const char *what)
{
	return base_fail_reason_with(source->error, IOSHAPE_E_DAMAGED, "use another copy",
				     "cannot load \"%s\": %s, so the file is damaged or truncated",
				     source->path, what);
}

/*
 * Finds the last end record in the tail of the file and sets *position to its offset in the tail.
 */
static int seek_end_record(const struct format_source *source, const uint8_t *tail, size_t bytes,
			   size_t *position)
{
	size_t at;

	if (bytes < FORMAT_END_BYTES)
		return refuse_without_end(source);
	for (at = bytes - FORMAT_END_BYTES; base_get_le(tail + at, 4) != FORMAT_END_SIGNATURE; at--)
		if (!at)
			return refuse_without_end(source);
	/* This also rejects a comment that contains the signature, because other readers would see
	 * another archive. */
	if (at + FORMAT_END_BYTES + base_get_le(tail + at + FORMAT_END_COMMENT, 2) != bytes)
		return refuse_end(source, "its end record is not at the end of the file");
	*position = at;
	return 0;
}

/* Returns whether a number of the end record is that of the zip64 end record, or all ones. */
static bool agrees(uint64_t old, uint64_t all_ones, uint64_t number)
{
	return old == number || old == all_ones;
}

/* Reads the zip64 end record. `locator` is at `offset` in the file. *directory_end receives the
 * offset where the directory must end. */
static int read_zip64_end(const struct format_source *source, const uint8_t *locator,
			  uint64_t offset, const uint8_t *record, struct format_end *end,
			  uint64_t *directory_end)
{
	uint64_t begin = base_get_le(locator + ZIP64_LOCATOR_OFFSET, 8);
	uint8_t zip64[ZIP64_END_BYTES];
	int ret;

	if (base_get_le(locator + ZIP64_LOCATOR_DISK, 4) ||
	    base_get_le(locator + ZIP64_LOCATOR_DISKS, 4) > 1)
		return refuse_end(source, "it is one file of a split zip");
	if (begin > offset || offset - begin < ZIP64_END_BYTES)
		return refuse_end(source, "its zip64 locator points to a wrong offset");
	ret = get(source, begin, zip64, sizeof(zip64));
	if (ret)
		return ret;
	if (base_get_le(zip64, 4) != ZIP64_END_SIGNATURE ||
	    base_get_le(zip64 + ZIP64_END_LENGTH, 8) != offset - begin - ZIP64_END_LENGTH_STARTS)
		return refuse_end(source, "its zip64 locator does not point to a zip64 end record");
	if (base_get_le(zip64 + ZIP64_END_DISK, 4) ||
	    base_get_le(zip64 + ZIP64_END_DIRECTORY_DISK, 4))
		return refuse_end(source, "it is one file of a split zip");
	end->count = base_get_le(zip64 + ZIP64_END_COUNT, 8);
	end->bytes = base_get_le(zip64 + ZIP64_END_SIZE, 8);
	end->offset = base_get_le(zip64 + ZIP64_END_OFFSET, 8);
	if (base_get_le(zip64 + ZIP64_END_DISK_COUNT, 8) != end->count ||
	    !agrees(base_get_le(record + FORMAT_END_COUNT, 2), FORMAT_IN_ZIP64_16, end->count) ||
	    !agrees(base_get_le(record + FORMAT_END_SIZE, 4), FORMAT_IN_ZIP64_32, end->bytes) ||
	    !agrees(base_get_le(record + FORMAT_END_OFFSET, 4), FORMAT_IN_ZIP64_32, end->offset))
		return refuse_end(source,
				  "its end record and its zip64 end record contradict each other");
	*directory_end = begin;
	return 0;
}

static int check_end(const struct format_source *source, const struct format_end *end,
		     uint64_t directory_end)
{
	if (end->offset > directory_end || directory_end - end->offset != end->bytes)
		return refuse_end(source, "its directory is not at the offset in its end record");
	if (!end->count)
		return base_fail_reason(
			source->error, IOSHAPE_E_FORMAT,
			"cannot load \"%s\": it is a zip without any record, not a torch zip",
			source->path);
	if (end->count > FORMAT_MAX_RECORDS || end->bytes > FORMAT_MAX_DIRECTORY_BYTES)
		return base_fail_reason(
			source->error, IOSHAPE_E_LIMIT,
			"cannot load \"%s\": it claims %" PRIu64
			" records in a directory of %s, but at most %u in %s are supported",
			source->path, end->count, BASE_SIZE(end->bytes), FORMAT_MAX_RECORDS,
			BASE_SIZE(FORMAT_MAX_DIRECTORY_BYTES));
	if (end->count * FORMAT_CENTRAL_BYTES > end->bytes)
		return refuse_end(source, "its directory is too short for so many records");
	return 0;
}

static int read_end(const struct format_source *source, const uint8_t *tail, size_t bytes,
		    struct format_end *end)
{
	const uint8_t *record, *locator;
	uint64_t directory_end;
	size_t at = 0;
	int ret;

	ret = seek_end_record(source, tail, bytes, &at);
	if (ret)
		return ret;
	record = tail + at;
	directory_end = source->bytes - bytes + at;
	if (!agrees(base_get_le(record + FORMAT_END_DISK, 2), FORMAT_IN_ZIP64_16, 0) ||
	    !agrees(base_get_le(record + FORMAT_END_DIRECTORY_DISK, 2), FORMAT_IN_ZIP64_16, 0) ||
	    base_get_le(record + FORMAT_END_DISK_COUNT, 2) !=
		    base_get_le(record + FORMAT_END_COUNT, 2))
		return refuse_end(source, "it is one file of a split zip");
	end->count = base_get_le(record + FORMAT_END_COUNT, 2);
	end->bytes = base_get_le(record + FORMAT_END_SIZE, 4);
	end->offset = base_get_le(record + FORMAT_END_OFFSET, 4);
	/* All ones without a locator are valid: 65,535 records do not need zip64. check_end()
	 * rejects numbers that are wrong. */
	locator = record - ZIP64_LOCATOR_BYTES;
	if (at >= ZIP64_LOCATOR_BYTES && base_get_le(locator, 4) == ZIP64_LOCATOR_SIGNATURE) {
		ret = read_zip64_end(source, locator, directory_end - ZIP64_LOCATOR_BYTES, record,
				     end, &directory_end);
		if (ret)
			return ret;
	}
	return check_end(source, end, directory_end);
}

/* Finds the end record and the zip64 records. Accepts them if they agree with each other, with the
 * file's size and with the limits. */
static int find_end(const struct format_source *source, struct format_end *end)
{
	size_t bytes = (size_t)MIN(source->bytes, TAIL_BYTES);
	uint8_t *tail;
	int ret;

	if (source->bytes > FORMAT_MAX_FILE_BYTES)
		return base_fail_reason(source->error, IOSHAPE_E_LIMIT,
					"cannot load \"%s\": it has %s, which is above the limit",
					source->path, BASE_SIZE(source->bytes));
	tail = malloc(MAX(bytes, 1));
	if (!tail)
		return base_no_memory(source->error, "the end of the file", bytes);
	ret = get(source, source->bytes - bytes, tail, bytes);
	if (!ret)
		ret = read_end(source, tail, bytes, end);
	free(tail);
	return ret;
}

/* ---- Reading the directory ------------------------------------------------------------------- */

/* Reader of the directory, which is in memory. check_end() has compared its size with the file. */
struct walk {
	struct format_source source;
	struct format_end end;
	struct format_directory *directory;
	size_t at; /* offset of the next entry in the directory */
};

/* Encoded entry. */
struct raw_entry {
	const uint8_t *head;
	char *name;
	const uint8_t *extra;
	uint32_t name_bytes, extra_bytes;
};

static int refuse(const struct format_source *source, int code, const char *name, size_t name_bytes,
		  const char *what)
{
	char shown[FORMAT_SHOWN_NAME_BYTES];

	base_fail_reason(source->error, code, "cannot load \"%s\": record '%s' %s", source->path,
			 format_show_name(shown, name, name_bytes), what);
	base_error_in_record(source->error, shown);
	return code;
}

/* ---- One entry ------------------------------------------------------------------------------- */

/* Finds the next entry, which ends inside the directory. */
static int next_raw(struct walk *walk, struct raw_entry *raw)
{
	uint8_t *head = walk->directory->memory + walk->at;
	const size_t left = walk->end.bytes - walk->at;
	size_t bytes = FORMAT_CENTRAL_BYTES;

	if (left >= bytes && base_get_le(head, 4) != FORMAT_CENTRAL_SIGNATURE)
		return base_fail_reason_with(
			walk->source.error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load \"%s\": its directory is damaged near offset %" PRIu64,
			walk->source.path, walk->end.offset + walk->at);
	if (left >= bytes) {
		raw->head = head;
		raw->name = (char *)head + bytes;
		raw->name_bytes = (uint32_t)base_get_le(head + FORMAT_CENTRAL_NAME, 2);
		raw->extra = head + bytes + raw->name_bytes;
		raw->extra_bytes = (uint32_t)base_get_le(head + FORMAT_CENTRAL_EXTRA, 2);
		bytes += (size_t)raw->name_bytes + raw->extra_bytes +
			 base_get_le(head + FORMAT_CENTRAL_COMMENT, 2);
	}
	if (left < bytes)
		return base_fail_reason_with(
			walk->source.error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load \"%s\": its directory ends inside an entry, so the "
			"file is damaged",
			walk->source.path);
	walk->at += bytes;
	return 0;
}

/* Finds the zip64 field in an extra field. Sets *bytes to its length, or 0 if there is none.
 * Returns NULL if the fields are malformed. */
static const uint8_t *find_zip64(const uint8_t *extra, size_t extra_bytes, size_t *bytes)
{
	const uint8_t *found = extra;
	size_t length;

	*bytes = 0;
	for (size_t at = 0; extra_bytes - at >= FORMAT_FIELD_HEAD_BYTES; at += length) {
		length = base_get_le(extra + at + 2, 2);
		at += FORMAT_FIELD_HEAD_BYTES;
		if (length > extra_bytes - at)
			return NULL;
		if (base_get_le(extra + at - FORMAT_FIELD_HEAD_BYTES, 2) != ZIP64_FIELD_ID)
			continue;
		if (*bytes)
			return NULL; /* two fields are ambiguous */
		found = extra + at;
		*bytes = length;
	}
	return found;
}

/* Numbers of an entry, in full width. */
struct numbers {
	uint64_t size, packed, offset;
};

/* Takes the next 8 bytes of the zip64 field if the old field is all ones. Returns false if the
 * field is too short. */
static bool take_zip64(uint64_t *number, const uint8_t **field, size_t *left)
{
	if (*number != FORMAT_IN_ZIP64_32)
		return true;
	if (*left < 8)
		return false;
	*number = base_get_le(*field, 8);
	*field += 8;
	*left -= 8;
	return true;
}

static int read_numbers(const struct format_source *source, const struct raw_entry *raw,
			struct numbers *numbers)
{
	const uint8_t *field;
	size_t left;

	numbers->size = base_get_le(raw->head + FORMAT_CENTRAL_SIZE, 4);
	numbers->packed = base_get_le(raw->head + FORMAT_CENTRAL_PACKED, 4);
	numbers->offset = base_get_le(raw->head + FORMAT_CENTRAL_OFFSET, 4);
	if (numbers->size != FORMAT_IN_ZIP64_32 && numbers->packed != FORMAT_IN_ZIP64_32 &&
	    numbers->offset != FORMAT_IN_ZIP64_32)
		return 0;
	field = find_zip64(raw->extra, raw->extra_bytes, &left);
	if (!field || !take_zip64(&numbers->size, &field, &left) ||
	    !take_zip64(&numbers->packed, &field, &left) ||
	    !take_zip64(&numbers->offset, &field, &left))
		return refuse(source, IOSHAPE_E_DAMAGED, raw->name, raw->name_bytes,
			      "lacks its zip64 sizes; the directory is damaged: use another copy");
	return 0;
}

/* Rejects records with features that the library does not support. */
static int check_features(const struct format_source *source, const struct raw_entry *raw)
{
	uint64_t flags = base_get_le(raw->head + FORMAT_CENTRAL_FLAGS, 2);
	struct numbers numbers;
	int ret;

	if (flags & (FORMAT_FLAG_ENCRYPTED | FORMAT_FLAG_STRONG | FORMAT_FLAG_MASKED))
		return refuse(source, IOSHAPE_E_FORMAT, raw->name, raw->name_bytes,
			      "is encrypted; unpack the archive and store it without encryption");
	if (flags & FORMAT_FLAG_PATCH)
		return refuse(source, IOSHAPE_E_FORMAT, raw->name, raw->name_bytes,
			      "is a patch of another file, which is not supported");
	if (base_get_le(raw->head + FORMAT_CENTRAL_METHOD, 2) == FORMAT_METHOD_STORED)
		return 0;
	ret = read_numbers(source, raw, &numbers);
	if (ret)
		return ret;
	/* A reader that trusts the method decompresses garbage, and torch would not notice. */
	if (numbers.size && numbers.size == numbers.packed)
		return refuse(source, IOSHAPE_E_DAMAGED, raw->name, raw->name_bytes,
			      "is marked as compressed but has its full size; the directory is "
			      "damaged: use another copy");
	return refuse(source, IOSHAPE_E_FORMAT, raw->name, raw->name_bytes,
		      "is compressed; torch zips are stored: repack the archive without "
		      "compression (zip -0)");
}

/* Reads the position of the record and checks it as far as the directory alone allows. */
static int read_position(const struct walk *walk, const struct raw_entry *raw,
			 struct format_entry *entry)
{
	const struct format_source *source = &walk->source;
	uint64_t end = walk->end.offset; /* records precede the directory */
	uint64_t least = FORMAT_LOCAL_BYTES + raw->name_bytes;
	struct numbers numbers;
	int ret;

	ret = read_numbers(source, raw, &numbers);
	if (ret)
		return ret;
	/* torch reads nothing for a folder, and returns uninitialized memory. */
	if (numbers.size &&
	    base_get_le(raw->head + FORMAT_CENTRAL_ATTRIBUTES, 4) & FORMAT_ATTRIBUTE_FOLDER)
		return refuse(source, IOSHAPE_E_DAMAGED, raw->name, raw->name_bytes,
			      "is marked as a folder but has contents; the directory is damaged: "
			      "use another copy");
	if (numbers.size != numbers.packed)
		return refuse(source, IOSHAPE_E_DAMAGED, raw->name, raw->name_bytes,
			      "is stored but has two different sizes; the directory is damaged: "
			      "use another copy");
	if (base_get_le(raw->head + FORMAT_CENTRAL_DISK, 2) || numbers.offset > end ||
	    least > end - numbers.offset || numbers.size > end - numbers.offset - least)
		return refuse(
			source, IOSHAPE_E_DAMAGED, raw->name, raw->name_bytes,
			"is outside the file; the file is truncated or damaged: use another copy");
	entry->crc32 = (uint32_t)base_get_le(raw->head + FORMAT_CENTRAL_CRC, 4);
	entry->bytes = numbers.size;
	entry->header_offset = numbers.offset;
	return 0;
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* Takes the folder from the first name, as torch does. */
static int take_folder(const struct walk *walk, const struct raw_entry *raw)
{
	const char *slash = memchr(raw->name, '/', raw->name_bytes);

	if (!slash || slash == raw->name)
		return refuse(&walk->source, IOSHAPE_E_FORMAT, raw->name, raw->name_bytes,
			      "is not in a folder, so this is a zip but not a torch zip");
	walk->directory->folder = raw->name;
	walk->directory->folder_bytes = (size_t)(slash - raw->name) + 1;
	if (walk->directory->folder_bytes > FORMAT_MAX_FOLDER_BYTES)
		return refuse(&walk->source, IOSHAPE_E_LIMIT, raw->name, raw->name_bytes,
			      "is in a folder whose name is too long");
	return 0;
}

static int check_name(const struct walk *walk, const struct raw_entry *raw)
{
	const struct format_directory *directory = walk->directory;
	const struct format_source *source = &walk->source;

	if (raw->name_bytes > directory->folder_bytes + IOSHAPE_MAX_NAME_BYTES)
		return refuse(source, IOSHAPE_E_LIMIT, raw->name, raw->name_bytes,
			      "has a name that is too long");
	if (!format_utf8_valid(raw->name, raw->name_bytes))
		return refuse(source, IOSHAPE_E_FORMAT, raw->name, raw->name_bytes,
			      "has a name that is not UTF-8");
	if (raw->name_bytes < directory->folder_bytes ||
	    memcmp(raw->name, directory->folder, directory->folder_bytes))
		return refuse(
			source, IOSHAPE_E_FORMAT, raw->name, raw->name_bytes,
			"is in another folder than the first record; a torch zip has one folder");
	return 0;
}

/* Returns whether the entry is a folder. Repacking tools list folders as empty entries; they are no
 * records. */
static bool is_folder(const struct raw_entry *raw, const struct format_entry *entry)
{
	return !entry->bytes && raw->name[raw->name_bytes - 1] == '/';
}

/* ---- The directory --------------------------------------------------------------------------- */

static int walk_entry(struct walk *walk)
{
	struct format_directory *directory = walk->directory;
	struct format_entry entry = { 0 };
	struct raw_entry raw;
	int ret;

	ret = next_raw(walk, &raw);
	if (!ret && !directory->folder_bytes)
		ret = take_folder(walk, &raw);
	if (!ret)
		ret = check_name(walk, &raw);
	/* This check precedes that of the sizes, which may differ in zips with other features. */
	if (!ret)
		ret = check_features(&walk->source, &raw);
	if (!ret)
		ret = read_position(walk, &raw, &entry);
	if (ret || is_folder(&raw, &entry))
		return ret;
	if (raw.name_bytes == directory->folder_bytes)
		return refuse(&walk->source, IOSHAPE_E_DAMAGED, raw.name, raw.name_bytes,
			      "is a folder but has contents; the directory is damaged");
	entry.name = raw.name + directory->folder_bytes;
	entry.name_bytes = raw.name_bytes - (uint32_t)directory->folder_bytes;
	directory->entries[directory->count++] = entry;
	return 0;
}

static int compare_offsets(const void *a, const void *b)
{
	const struct format_entry *left = a, *right = b;

	return left->header_offset < right->header_offset ?
		       -1 :
		       left->header_offset > right->header_offset;
}

static int walk_directory(struct walk *walk)
{
	struct format_directory *directory = walk->directory;
	int ret = 0;

	for (uint64_t i = 0; i < walk->end.count && !ret; i++)
		ret = walk_entry(walk);
	if (!ret && walk->at != walk->end.bytes)
		ret = base_fail_reason_with(
			walk->source.error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load \"%s\": its directory is longer than its %" PRIu64
			" entries, so the file is damaged",
			walk->source.path, walk->end.count);
	if (!ret && !directory->count)
		ret = base_fail_reason(
			walk->source.error, IOSHAPE_E_FORMAT,
			"cannot load \"%s\": it is a zip of empty folders, not a torch zip",
			walk->source.path);
	if (ret)
		return ret;
	/* The final 0 replaces a byte behind the name, which was read. */
	for (uint64_t i = 0; i < directory->count; i++)
		directory->entries[i].name[directory->entries[i].name_bytes] = '\0';
	/* Some tools list records in another order than that of the file. */
	qsort(directory->entries, directory->count, sizeof(*directory->entries), compare_offsets);
	return 0;
}

static int read_directory(struct walk *walk)
{
	struct format_directory *directory = walk->directory;

	/* The last byte is the final 0 of the last name. */
	directory->memory = malloc(walk->end.bytes + 1);
	directory->entries = malloc(walk->end.count * sizeof(*directory->entries));
	if (!directory->memory || !directory->entries)
		return base_no_memory(walk->source.error, "the directory of an archive",
				      walk->end.bytes);
	return get(&walk->source, walk->end.offset, directory->memory, walk->end.bytes);
}

/* Checks that names are unique. */
static int index_names(const struct format_source *source, struct format_directory *directory)
{
	const struct format_entry *entry;
	int ret;

	ret = format_names_new(&directory->names, directory->count);
	for (uint64_t i = 0; i < directory->count && !ret; i++) {
		entry = &directory->entries[i];
		ret = format_names_add(directory->names, entry->name, entry->name_bytes, i);
		if (ret == -EEXIST)
			return refuse(
				source, IOSHAPE_E_DAMAGED, entry->name, entry->name_bytes,
				"occurs twice; the archive cannot be trusted: use another copy");
	}
	if (ret)
		return base_no_memory(source->error, "an index of names", directory->count);
	return 0;
}

/* ---- Overlaps -------------------------------------------------------------------------------- */

static uint64_t least_end(const struct format_directory *directory, uint64_t position)
{
	const struct format_entry *entry = &directory->entries[position];

	return entry->header_offset + FORMAT_LOCAL_BYTES + directory->folder_bytes +
	       entry->name_bytes + entry->bytes;
}

/* Returns the offset of the next record's header, or of the directory. */
static uint64_t limit_of(const struct format_directory *directory, uint64_t position)
{
	return position + 1 < directory->count ? directory->entries[position + 1].header_offset :
						 directory->offset;
}

static int check_overlaps(const struct format_source *source,
			  const struct format_directory *directory)
{
	const struct format_entry *entry;

	for (uint64_t i = 0; i < directory->count; i++) {
		entry = &directory->entries[i];
		if (least_end(directory, i) > limit_of(directory, i))
			return refuse(source, IOSHAPE_E_DAMAGED, entry->name, entry->name_bytes,
				      "overlaps the data after it; the directory is damaged: use "
				      "another copy");
	}
	return 0;
}

/* ---- Public functions of the parser ---------------------------------------------------------- */

int format_parse(struct format_directory *directory, uint64_t file_bytes, format_fetch_fn fetch,
		 void *user, const char *path, struct base_error *error)
{
	struct walk walk = {
		.source = { file_bytes, fetch, user, path, error },
		.directory = directory,
	};
	int ret;

	memset(directory, 0, sizeof(*directory));
	ret = find_end(&walk.source, &walk.end);
	if (ret)
		return ret;
	directory->offset = walk.end.offset;
	ret = read_directory(&walk);
	if (!ret)
		ret = walk_directory(&walk);
	if (!ret)
		ret = index_names(&walk.source, directory);
	if (!ret)
		ret = check_overlaps(&walk.source, directory);
	if (ret)
		format_directory_free(directory);
	return ret;
}

bool format_data_fits(const struct format_directory *directory, uint64_t position,
		      uint64_t data_offset)
{
	const struct format_entry *entry = &directory->entries[position];
	uint64_t least = least_end(directory, position) - entry->bytes;

	/* The least end fits, so no difference can wrap. */
	return data_offset >= least && data_offset - least <= UINT16_MAX &&
	       data_offset - least <= limit_of(directory, position) - (least + entry->bytes);
}

/* Returns whether the numbers of the local header agree with the entry. Numbers in zip64 fields are
 * not compared. */
static bool local_agrees(const uint8_t *head, const struct format_entry *entry)
{
	uint64_t flags = base_get_le(head + FORMAT_LOCAL_FLAGS, 2);
	uint64_t packed = base_get_le(head + FORMAT_LOCAL_PACKED, 4);
	uint64_t size = base_get_le(head + FORMAT_LOCAL_SIZE, 4);

	if (base_get_le(head + FORMAT_LOCAL_METHOD, 2) != FORMAT_METHOD_STORED ||
	    flags & FORMAT_FLAG_ENCRYPTED)
		return false;
	if (flags & FORMAT_FLAG_DESCRIPTOR)
		return true; /* the numbers follow the data, and those in the header do not count */
	return base_get_le(head + FORMAT_LOCAL_CRC, 4) == entry->crc32 &&
	       (packed == FORMAT_IN_ZIP64_32 || packed == entry->bytes) &&
	       (size == FORMAT_IN_ZIP64_32 || size == entry->bytes);
}

int format_locate(struct format_directory *directory, uint64_t position, format_fetch_fn fetch,
		  void *user, const char *path, struct base_error *error)
{
	/* The directory's offset was found to be in the file. */
	struct format_source source = { directory->offset, fetch, user, path, error };
	struct format_entry *entry = &directory->entries[position];
	size_t name_bytes = directory->folder_bytes + entry->name_bytes;
	uint8_t head[FORMAT_LOCAL_BYTES + FORMAT_MAX_FULL_NAME_BYTES];
	uint64_t data_offset;
	int ret;

	ret = get(&source, entry->header_offset, head, FORMAT_LOCAL_BYTES + name_bytes);
	if (ret)
		return ret;
	data_offset = entry->header_offset + FORMAT_LOCAL_BYTES + name_bytes +
		      base_get_le(head + FORMAT_LOCAL_EXTRA, 2);
	if (base_get_le(head, 4) != FORMAT_LOCAL_SIGNATURE ||
	    base_get_le(head + FORMAT_LOCAL_NAME, 2) != name_bytes ||
	    memcmp(head + FORMAT_LOCAL_BYTES, entry->name - directory->folder_bytes, name_bytes) ||
	    !local_agrees(head, entry) || !format_data_fits(directory, position, data_offset))
		return base_fail_reason_with(
			error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load \"%s\": the data at offset %" PRIu64
			" is not the record that the directory lists, so the file is damaged",
			path, entry->header_offset);
	entry->data_offset = data_offset;
	return 0;
}

void format_directory_free(struct format_directory *directory)
{
	format_names_free(directory->names);
	free(directory->entries);
	free(directory->memory);
	memset(directory, 0, sizeof(*directory));
}
