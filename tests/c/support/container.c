/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes zip archives with the library's layout, of any size: data is zeros, and the file is
 * sparse. Lists and verifies archives with the library's reader. Writes shard files with the
 * library's code, into a sparse file.
 *
 *   container write PATH RECORD...
 *   container list PATH    prints name, bytes, data offset and checksum of each record
 *   container verify PATH  compares all checksums
 *   container bundle PATH ALIGNMENT MEMBER...    prints the members as list does
 *
 * RECORD is NAME=TEXT, NAME:BYTES, NAME:BYTES:ALIGNMENT or NAME:BYTES:unknown (as if the length
 * were not known beforehand). NAME*COUNT:BYTES makes NAME0, NAME1 and so on. MEMBER is NAME@FILE,
 * which copies the file, NAME:BYTES or NAME*COUNT:BYTES.
 */
#include "format/writer.c"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void give_up(const char *what, const char *why)
{
	fprintf(stderr, "container: %s: %s\n", what, why);
	exit(1);
}

static void must(int result, const char *what)
{
	if (result)
		give_up(what, ioshape_strerror(result));
}

/* ---- Writing --------------------------------------------------------------------------------- */

struct output {
	int fd;
	uint64_t cursor;
	struct format_entry *entries;
	uint64_t count;
};

/* Returns the checksum of zeros, by doubling the length. */
static uint32_t crc_of_zeros(uint64_t bytes)
{
	uint32_t result = 0, power = base_crc32(0, "", 1);

	for (uint64_t length = 1; bytes; bytes >>= 1, length *= 2) {
		if (bytes & 1)
			result = base_crc32_combine(result, power, length);
		power = base_crc32_combine(power, power, length);
	}
	return result;
}

static void write_at(struct output *output, uint64_t offset, const void *data, size_t bytes)
{
	if (pwrite(output->fd, data, bytes, (off_t)offset) != (ssize_t)bytes)
		give_up("cannot write", strerror(errno));
}

static void add(struct output *output, const char *name, const char *text, uint64_t bytes,
		uint32_t alignment, bool unknown)
{
	uint64_t announced = unknown ? FORMAT_UNKNOWN_BYTES : bytes;
	struct base_buffer buffer = { 0 };
	struct format_extent extent;
	struct format_entry *entry;

	output->entries =
		reallocarray(output->entries, output->count + 1, sizeof(*output->entries));
	entry = &output->entries[output->count++];
	entry->name_bytes = (uint32_t)asprintf(&entry->name, FORMAT_FOLDER "%s", name);
	entry->bytes = bytes;
	entry->crc32 = text ? base_crc32(0, text, bytes) : crc_of_zeros(bytes);
	entry->header_offset = output->cursor;
	if (!alignment)
		alignment = format_default_alignment(announced);
	must(lay_out_record(output->cursor, entry->name_bytes, announced, alignment, &extent),
	     name);
	must(encode_header(&buffer, entry->name, &extent, announced), name);
	write_at(output, output->cursor, buffer.data, buffer.bytes);
	if (text)
		write_at(output, extent.data_offset, text, bytes);
	buffer.bytes = 0;
	must(encode_descriptor(&buffer, entry->crc32, bytes, extent.zip64), name);
	write_at(output, extent.data_offset + bytes, buffer.data, buffer.bytes);
	output->cursor = extent.data_offset + bytes + buffer.bytes;
	base_buffer_free(&buffer);
}

static void add_specified(struct output *output, char *record)
{
	char *equals = strchr(record, '='), *name = strsep(&record, ":="), *count, *numbered;
	uint64_t bytes, copies;
	uint32_t alignment = 0;
	bool unknown;

	if (!record)
		give_up(name, "NAME=TEXT or NAME:BYTES");
	if (equals && record == equals + 1) {
		add(output, name, record, strlen(record), 0, false);
		return;
	}
	must(base_parse_bytes(strsep(&record, ":"), &bytes), "bytes");
	unknown = record && !strcmp(record, "unknown");
	if (record && !unknown)
		alignment = (uint32_t)atoi(record);
	count = name;
	name = strsep(&count, "*");
	if (!count) {
		add(output, name, NULL, bytes, alignment, unknown);
		return;
	}
	must(base_parse_bytes(count, &copies), "count");
	for (uint64_t i = 0; i < copies; i++) {
		if (asprintf(&numbered, "%s%" PRIu64, name, i) < 0)
			give_up(name, "no memory");
		add(output, numbered, NULL, bytes, alignment, unknown);
		free(numbered);
	}
}

static void write_container(const char *path, char **records)
{
	struct output output = { .fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0666) };
	struct base_buffer directory = { 0 };

	if (output.fd < 0)
		give_up(path, strerror(errno));
	while (*records)
		add_specified(&output, *records++);
	must(encode_directory(&directory, output.entries, output.count, output.cursor), path);
	write_at(&output, output.cursor, directory.data, directory.bytes);
	close(output.fd);
	base_buffer_free(&directory);
	for (uint64_t i = 0; i < output.count; i++)
		free(output.entries[i].name);
	free(output.entries);
}

/* ---- Shard files ----------------------------------------------------------------------------- */

/*
 * Replaces the library's io_writer for shard files: zeros are neither written nor checksummed byte
 * by byte.
 */
struct io_writer {
	int fd;
	uint64_t bytes;
};

static const uint8_t zeros[MIB];

uint64_t io_writer_offset(const struct io_writer *file)
{
	return file->bytes;
}

int io_writer_put(struct io_writer *file, const void *data, size_t bytes, uint32_t *crc,
		  struct base_error *error)
{
	(void)error;
	if (data != zeros) {
		if (pwrite(file->fd, data, bytes, (off_t)file->bytes) != (ssize_t)bytes)
			give_up("cannot write", strerror(errno));
		if (crc)
			*crc = base_crc32(*crc, data, bytes);
	} else if (crc) {
		*crc = base_crc32_combine(*crc, crc_of_zeros(bytes), bytes);
	}
	file->bytes += bytes;
	return 0;
}

int io_writer_put_summed(struct io_writer *file, const void *data, size_t bytes, uint32_t crc32,
			 struct base_error *error)
{
	(void)crc32;
	return io_writer_put(file, data, bytes, NULL, error);
}

int io_writer_finish(struct io_writer *file, struct base_error *error)
{
	(void)error;
	if (ftruncate(file->fd, (off_t)file->bytes))
		give_up("cannot extend", strerror(errno));
	return 0;
}

void io_writer_free(struct io_writer *file)
{
	close(file->fd);
}

static void expect(int result, const struct base_error *error)
{
	if (result)
		give_up("refused", error->text);
}

static void put_copy(struct format_writer *bundle, const char *path, struct base_error *error)
{
	static uint8_t buffer[300 * KIB];
	int fd = open(path, O_RDONLY);
	ssize_t got;

	while ((got = read(fd, buffer, sizeof(buffer))) > 0)
		expect(format_writer_put(bundle, buffer, (size_t)got, error), error);
	if (got)
		give_up(path, strerror(errno));
	close(fd);
}

static void add_member(struct format_writer *bundle, const char *name, const char *file,
		       uint64_t bytes)
{
	struct base_error error = { 0 };
	const struct format_entry *member;
	uint64_t piece, count;

	expect(format_writer_begin(bundle, name, FORMAT_UNKNOWN_BYTES, 0, &error), &error);
	if (file)
		put_copy(bundle, file, &error);
	for (; !file && bytes; bytes -= piece) {
		piece = MIN(bytes, sizeof(zeros));
		expect(format_writer_put(bundle, zeros, piece, &error), &error);
	}
	expect(format_writer_end(bundle, &error), &error);
	member = format_writer_entries(bundle, &count) + count - 1;
	printf("%s\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu32 "\n", name, member->bytes,
	       member->data_offset, member->crc32);
}

static void add_specified_member(struct format_writer *bundle, char *specified)
{
	char *name, *numbered;
	uint64_t bytes, copies;

	if (strchr(specified, '@')) {
		name = strsep(&specified, "@");
		add_member(bundle, name, specified, 0);
		return;
	}
	name = strsep(&specified, ":");
	must(specified ? base_parse_bytes(specified, &bytes) : -EINVAL, name);
	specified = name;
	name = strsep(&specified, "*");
	if (!specified) {
		add_member(bundle, name, NULL, bytes);
		return;
	}
	must(base_parse_bytes(specified, &copies), "count");
	for (uint64_t i = 0; i < copies; i++) {
		if (asprintf(&numbered, "%s%" PRIu64, name, i) < 0)
			give_up(name, "no memory");
		add_member(bundle, numbered, NULL, bytes);
		free(numbered);
	}
}

static void write_bundle(const char *path, const char *alignment, char **members)
{
	struct io_writer file = { .fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0666) };
	struct base_error error = { 0 };
	struct format_writer *bundle;
	uint64_t bytes;

	if (file.fd < 0)
		give_up(path, strerror(errno));
	must(base_parse_bytes(alignment, &bytes), "alignment");
	expect(format_writer_new_bundle(&bundle, format_sink_of_file(&file), path, bytes, &error),
	       &error);
	while (*members)
		add_specified_member(bundle, *members++);
	expect(format_writer_finish(bundle, NULL, &error), &error);
	format_writer_free(bundle);
	expect(io_writer_finish(&file, &error), &error);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static void list(const struct format_reader *reader)
{
	for (uint64_t i = 0; i < reader->directory.count; i++) {
		const struct format_entry *entry = &reader->directory.entries[i];

		printf("%s\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu32 "\n", entry->name, entry->bytes,
		       entry->data_offset, entry->crc32);
	}
}

static void verify(const struct format_reader *reader, struct base_error *error)
{
	const struct io_config config = {
		.block_bytes = MIB,
		.depth = 4,
		.threads = 2,
	};
	struct format_range *ranges = calloc(reader->directory.count, sizeof(*ranges));
	struct io_queue *queue;

	for (uint64_t i = 0; i < reader->directory.count; i++) {
		ranges[i].record = i;
		ranges[i].bytes = reader->directory.entries[i].bytes;
	}
	if (io_queue_open(&queue, &config, error) ||
	    format_reader_read(reader, queue, NULL, ranges, reader->directory.count, true, NULL,
			       NULL, error))
		give_up("damaged", error->text);
	io_queue_close(queue);
	free(ranges);
}

int main(int argc, char **argv)
{
	struct base_error error = { 0 };
	struct format_reader reader;

	if (argc >= 3 && !strcmp(argv[1], "write")) {
		write_container(argv[2], argv + 3);
		return 0;
	}
	if (argc >= 4 && !strcmp(argv[1], "bundle")) {
		write_bundle(argv[2], argv[3], argv + 4);
		return 0;
	}
	if (argc != 3)
		give_up("usage",
			"container write PATH RECORD... | bundle PATH ALIGNMENT MEMBER... | "
			"list PATH | verify PATH");
	if (format_reader_open(&reader, argv[2], 0, 0, IOSHAPE_DIRECT_PREFER, &error))
		give_up("refused", error.text);
	if (!strcmp(argv[1], "list"))
		list(&reader);
	else
		verify(&reader, &error);
	format_reader_close(&reader);
	return 0;
}
