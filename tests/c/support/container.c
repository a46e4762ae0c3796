/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes torch zips and shard files with the library's writer, of any size: data is zeros, and the
 * file is sparse.
 *
 *   container zip PATH RECORD...
 *   container bundle PATH ALIGNMENT MEMBER...
 *
 * prints name, bytes, data offset and checksum of each record or member. RECORD is NAME=TEXT,
 * NAME:BYTES, NAME:BYTES:ALIGNMENT or NAME:BYTES:unknown (its length is not announced). MEMBER is
 * NAME@FILE, which copies the file, or NAME:BYTES. NAME*COUNT:BYTES makes NAME0, NAME1 and so on.
 */
#define _GNU_SOURCE
#include "format/format.h"

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

static void expect(int result, const struct base_error *error)
{
	if (result)
		give_up("refused", error->text);
}

/* ---- The file -------------------------------------------------------------------------------- */

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

/*
 * Replaces the library's io_writer: zeros are neither written nor checksummed byte by byte.
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

static void put_copy(struct format_writer *writer, const char *path, struct base_error *error)
{
	static uint8_t buffer[300 * KIB];
	int fd = open(path, O_RDONLY);
	ssize_t got;

	while ((got = read(fd, buffer, sizeof(buffer))) > 0)
		expect(format_writer_put(writer, buffer, (size_t)got, error), error);
	if (got)
		give_up(path, strerror(errno));
	close(fd);
}

/* Appends a record or a member. Its bytes are the text, those of the file, or zeros. */
static void add(struct format_writer *writer, const char *name, const char *text, const char *file,
		uint64_t bytes, bool announced, uint32_t alignment)
{
	struct base_error error = { 0 };
	const struct format_entry *entry;
	uint64_t piece, count;

	expect(format_writer_begin(writer, name, announced ? bytes : FORMAT_UNKNOWN_BYTES,
				   alignment, &error),
	       &error);
	if (file)
		put_copy(writer, file, &error);
	if (text)
		expect(format_writer_put(writer, text, bytes, &error), &error);
	for (; !file && !text && bytes; bytes -= piece) {
		piece = MIN(bytes, sizeof(zeros));
		expect(format_writer_put(writer, zeros, piece, &error), &error);
	}
	expect(format_writer_end(writer, &error), &error);
	entry = format_writer_entries(writer, &count) + count - 1;
	printf("%s\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu32 "\n", name, entry->bytes,
	       entry->data_offset, entry->crc32);
}

static void add_specified(struct format_writer *writer, char *specified, bool announced)
{
	const char kind = specified[strcspn(specified, "=@:")];
	char *name = strsep(&specified, "=@:"), *copies = name, *how, *numbered;
	uint64_t bytes, count;
	uint32_t alignment = 0;

	if (kind == '=' || kind == '@') {
		add(writer, name, kind == '=' ? specified : NULL, kind == '@' ? specified : NULL,
		    strlen(specified), announced, 0);
		return;
	}
	how = specified;
	must(how ? base_parse_bytes(strsep(&how, ":"), &bytes) : -EINVAL, name);
	if (how && !strcmp(how, "unknown"))
		announced = false;
	else if (how)
		alignment = (uint32_t)atoi(how);
	name = strsep(&copies, "*");
	if (!copies) {
		add(writer, name, NULL, NULL, bytes, announced, alignment);
		return;
	}
	must(base_parse_bytes(copies, &count), "count");
	for (uint64_t i = 0; i < count; i++) {
		if (asprintf(&numbered, "%s%" PRIu64, name, i) < 0)
			give_up(name, "no memory");
		add(writer, numbered, NULL, NULL, bytes, announced, alignment);
		free(numbered);
	}
}

int main(int argc, char **argv)
{
	const bool bundle = argc > 3 && !strcmp(argv[1], "bundle");
	struct base_error error = { 0 };
	struct format_writer *writer;
	struct io_writer file;
	uint64_t alignment;

	if (!bundle && (argc < 3 || strcmp(argv[1], "zip")))
		give_up("usage", "container zip PATH RECORD... | bundle PATH ALIGNMENT MEMBER...");
	file = (struct io_writer){ .fd = open(argv[2], O_CREAT | O_TRUNC | O_WRONLY, 0666) };
	if (file.fd < 0)
		give_up(argv[2], strerror(errno));
	if (bundle) {
		must(base_parse_bytes(argv[3], &alignment), "alignment");
		expect(format_writer_new_bundle(&writer, format_sink_of_file(&file), argv[2],
						alignment, &error),
		       &error);
	} else {
		expect(format_writer_new(&writer, format_sink_of_file(&file), argv[2], &error),
		       &error);
	}
	for (char **specified = argv + 3 + bundle; *specified; specified++)
		add_specified(writer, *specified, !bundle);
	expect(format_writer_finish(writer, NULL, &error), &error);
	format_writer_free(writer);
	expect(io_writer_finish(&file, &error), &error);
	return 0;
}
