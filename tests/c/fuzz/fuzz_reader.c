/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses any bytes as an archive, locates its records and decodes its index. Accepted archives must
 * be consistent.
 *
 * With FUZZ_FILES defined it is a program that tries the files on its command line: for compilers
 * without libFuzzer, and to examine findings.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/format.h"
#include "format/layout.h"
#include "fuzz.h"

struct input {
	const uint8_t *data;
	size_t bytes;
};

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	const struct input *input = user;

	MUST(offset <= input->bytes && bytes <= input->bytes - offset);
	memcpy(into, input->data + offset, bytes);
	return 0;
}

static void check_entry(const struct format_directory *directory, uint64_t i)
{
	const struct format_entry *entry = &directory->entries[i];
	uint64_t position;

	MUST(entry->name_bytes && entry->name_bytes <= IOSHAPE_MAX_NAME_BYTES);
	MUST(strlen(entry->name) == entry->name_bytes);
	MUST(format_utf8_valid(entry->name, entry->name_bytes));
	MUST(format_names_find(directory->names, entry->name, entry->name_bytes, &position));
	MUST(position == i);
}

static int compare_entries(const void *a, const void *b)
{
	const struct format_entry *left = a, *right = b;

	return left->data_offset < right->data_offset ? -1 : left->data_offset > right->data_offset;
}

/* Checks that located records overlap neither each other nor the directory. */
static void check_apart(const struct format_directory *directory)
{
	struct format_entry *entries = calloc(directory->count, sizeof(*entries));
	uint64_t limit;

	MUST(entries);
	memcpy(entries, directory->entries, directory->count * sizeof(*entries));
	qsort(entries, directory->count, sizeof(*entries), compare_entries);
	for (uint64_t i = 0; i < directory->count; i++) {
		limit = i + 1 < directory->count ? entries[i + 1].header_offset : directory->offset;
		MUST(entries[i].header_offset < entries[i].data_offset);
		MUST(entries[i].data_offset <= limit);
		MUST(entries[i].bytes <= limit - entries[i].data_offset);
	}
	free(entries);
}

static void check_index(const struct format_index *index, const struct format_directory *directory)
{
	uint64_t sum = 0;

	/* The reader uses these offsets only after format_data_fits() has checked them. */
	for (uint64_t i = 0; i < index->records; i++) {
		const struct format_entry *entry = &directory->entries[i];
		const uint64_t offset = index->data_offsets[i];

		MUST(index->first_check[i] <= index->check_count);
		if (!format_data_fits(directory, i, offset))
			continue;
		MUST(offset >= entry->header_offset + FORMAT_LOCAL_BYTES);
		MUST(offset <= directory->offset && entry->bytes <= directory->offset - offset);
	}
	for (uint64_t i = 0; i < index->check_count; i++)
		sum += index->checks[i];
	for (uint64_t i = 0; i < index->tensor_count; i++) {
		const struct format_tensor_row *row = &index->tensors[i];

		MUST(row->record < index->records && format_dtype_of(row->dtype));
		MUST(row->dims <= IOSHAPE_MAX_DIMS && strlen(row->name) <= IOSHAPE_MAX_NAME_BYTES);
		for (uint32_t d = 0; d < row->dims; d++)
			sum += (uint64_t)row->shape[d] + (uint64_t)row->strides[d];
	}
	for (size_t i = 0; i < index->metadata.attribute_count; i++)
		sum += strlen(index->metadata.attributes[i].name) +
		       strlen(index->metadata.attributes[i].value);
	for (size_t i = 0; i < index->metadata.blob_bytes; i++)
		sum += ((const uint8_t *)index->metadata.blob)[i];
	*(volatile uint64_t *)&sum = sum; /* keeps the compiler from removing the reads */
}

/*
 * Decodes the last record as an index, whatever its name and checksum are: an attacker can choose
 * both.
 */
static void try_index(const struct input *input, const struct format_directory *directory)
{
	const struct format_entry *last = &directory->entries[directory->count - 1];
	struct base_error error = { 0 };
	struct format_index index = { 0 };
	uint8_t *copy;

	if (!last->data_offset)
		return;
	copy = malloc(last->bytes + 1); /* exact, so that sanitizers detect a read beyond */
	MUST(copy);
	copy = realloc(copy, last->bytes ? last->bytes : 1);
	MUST(copy);
	memcpy(copy, input->data + last->data_offset, last->bytes);
	if (!format_index_decode(&index, copy, last->bytes, directory->entries,
				 directory->count - 1, &error)) {
		check_index(&index, directory);
		format_index_free(&index);
	}
	free(copy);
}

static void try_archive(struct input *input)
{
	struct format_directory directory;
	struct base_error error = { 0 };
	bool all = true;
	int ret;

	ret = format_parse(&directory, input->bytes, fetch, input, "fuzz.pt", &error);
	MUST((ret != 0) == (error.code != 0));
	MUST(format_utf8_valid(error.text, strlen(error.text)));
	if (ret)
		return;
	MUST(directory.count && directory.offset <= input->bytes);
	for (uint64_t i = 0; i < directory.count; i++) {
		check_entry(&directory, i);
		all &= !format_locate(&directory, i, fetch, input, "fuzz.pt", NULL);
	}
	if (all)
		check_apart(&directory);
	try_index(input, &directory);
	format_directory_free(&directory);
}

/*
 * Tries bytes that contain a directory with correct end records. End records depend on all bytes
 * before them, so mutations hardly ever find correct ones.
 */
static void try_with_end(const uint8_t *data, size_t bytes)
{
	static const uint8_t signature[] = "PK\x01\x02";
	const uint8_t *directory = memmem(data, bytes, signature, 4), *next;
	const uint8_t *stop = memmem(data, bytes, "PK\x06\x06", 4);
	struct base_buffer archive = { 0 };
	uint64_t count = 0;
	uint8_t end[FORMAT_END_BYTES] = { 0 };

	if (!directory || (stop && stop < directory))
		return;
	if (stop)
		bytes = (size_t)(stop - data);
	for (next = directory; next; count++)
		next = memmem(next + 4, (size_t)(data + bytes - next - 4), signature, 4);
	if (count >= UINT16_MAX)
		return;
	base_put_le(end, FORMAT_END_SIGNATURE, 4);
	base_put_le(end + FORMAT_END_DISK_COUNT, count, 2);
	base_put_le(end + FORMAT_END_COUNT, count, 2);
	base_put_le(end + FORMAT_END_SIZE, (uint64_t)(data + bytes - directory), 4);
	base_put_le(end + FORMAT_END_OFFSET, (uint64_t)(directory - data), 4);
	MUST(!base_buffer_append(&archive, data, bytes));
	MUST(!base_buffer_append(&archive, end, sizeof(end)));
	try_archive(&(struct input){ archive.data, archive.bytes });
	base_buffer_free(&archive);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	try_archive(&(struct input){ data, bytes });
	try_with_end(data, bytes);
	return 0;
}

#ifdef FUZZ_FILES
static void try_file(const char *path)
{
	struct base_buffer file = { 0 };
	uint8_t part[4096];
	size_t got;
	FILE *stream = fopen(path, "rb");

	if (!stream) {
		perror(path);
		exit(1);
	}
	while ((got = fread(part, 1, sizeof(part), stream)) > 0)
		MUST(!base_buffer_append(&file, part, got));
	fclose(stream);
	LLVMFuzzerTestOneInput(file.data, file.bytes);
	base_buffer_free(&file);
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		try_file(argv[i]);
	printf("%d files tried\n", argc - 1);
	return 0;
}
#endif
