/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks write on the board: numbers, texts and errors, one after the other. */
#include "group/group.h"

#include <string.h>

#define NUMBER_BYTES 8

void group_note_number(struct group_note *note, uint64_t number)
{
	uint8_t bytes[NUMBER_BYTES];

	base_put_le(bytes, number, NUMBER_BYTES);
	note->failed |= base_buffer_append(&note->bytes, bytes, NUMBER_BYTES) != 0;
}

void group_note_bytes(struct group_note *note, const void *data, size_t bytes)
{
	group_note_number(note, bytes);
	note->failed |= base_buffer_append(&note->bytes, data, bytes) != 0;
}

void group_note_text(struct group_note *note, const char *text)
{
	group_note_bytes(note, text, strlen(text));
}

/* Nothing but the code where nothing has failed. */
void group_note_error(struct group_note *note, const struct base_error *error)
{
	group_note_number(note, (uint64_t)(int64_t)error->code);
	if (!error->code)
		return;
	group_note_text(note, error->sentence);
	group_note_text(note, error->remedy);
	group_note_text(note, error->path);
	group_note_text(note, error->record);
	group_note_number(note, error->known);
	group_note_number(note, error->offset);
	group_note_number(note, error->needed_bytes);
	group_note_number(note, error->free_bytes);
	group_note_number(note, error->rank);
}

struct group_note_reader group_read_note(const struct base_buffer *note)
{
	return (struct group_note_reader){ note->data, note->bytes, false };
}

uint64_t group_read_number(struct group_note_reader *reader)
{
	uint64_t number;

	if (reader->bad || reader->left < NUMBER_BYTES) {
		reader->bad = true;
		return 0;
	}
	number = base_get_le(reader->at, NUMBER_BYTES);
	reader->at += NUMBER_BYTES;
	reader->left -= NUMBER_BYTES;
	return number;
}

void group_read_text(struct group_note_reader *reader, char *into, size_t into_bytes)
{
	size_t bytes;
	const uint8_t *at = group_read_bytes(reader, &bytes);
	const size_t kept = MIN(bytes, into_bytes - 1);

	if (kept)
		memcpy(into, at, kept);
	into[kept] = 0;
}

const uint8_t *group_read_bytes(struct group_note_reader *reader, size_t *bytes)
{
	const uint64_t length = group_read_number(reader);
	const uint8_t *at = reader->at;

	reader->bad |= length > reader->left;
	*bytes = reader->bad ? 0 : length;
	/* An empty note has no place. */
	if (*bytes)
		reader->at += *bytes;
	reader->left -= *bytes;
	return at;
}

int group_read_error(struct group_note_reader *reader, struct base_error *error)
{
	int code = (int)(int64_t)group_read_number(reader);
	struct base_error said = { 0 };
	char remedy[BASE_ERROR_TEXT_BYTES];

	reader->bad |= code > 0;
	if (!code || reader->bad)
		return 0;
	group_read_text(reader, said.sentence, sizeof(said.sentence));
	group_read_text(reader, remedy, sizeof(remedy));
	base_rephrase(&said, code, "%s" BASE_REMEDY "%s", said.sentence, remedy);
	group_read_text(reader, said.path, sizeof(said.path));
	group_read_text(reader, said.record, sizeof(said.record));
	said.known = (unsigned)group_read_number(reader);
	said.offset = group_read_number(reader);
	said.needed_bytes = group_read_number(reader);
	said.free_bytes = group_read_number(reader);
	said.rank = (uint32_t)group_read_number(reader);
	return reader->bad ? 0 : base_pass_on(error, &said);
}
