/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks write on the board: numbers and texts, one after the other. */
#include "ckpt/group.h"

#include <string.h>

#define NUMBER_BYTES 8

void ckpt_note_number(struct ckpt_note *note, uint64_t number)
{
	uint8_t bytes[NUMBER_BYTES];

	base_put_le(bytes, number, NUMBER_BYTES);
	note->failed |= base_buffer_append(&note->bytes, bytes, NUMBER_BYTES) != 0;
}

void ckpt_note_text(struct ckpt_note *note, const char *text)
{
	size_t bytes = strlen(text);

	ckpt_note_number(note, bytes);
	note->failed |= base_buffer_append(&note->bytes, text, bytes) != 0;
}

struct ckpt_note_reader ckpt_read_note(const struct base_buffer *note)
{
	return (struct ckpt_note_reader){ note->data, note->bytes, false };
}

uint64_t ckpt_read_number(struct ckpt_note_reader *reader)
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

void ckpt_read_text(struct ckpt_note_reader *reader, char *into, size_t room)
{
	uint64_t bytes = ckpt_read_number(reader);
	size_t kept;

	if (bytes > reader->left) {
		reader->bad = true;
		bytes = 0;
	}
	kept = MIN(bytes, room - 1);
	if (kept)
		memcpy(into, reader->at, kept);
	into[kept] = 0;
	reader->at += bytes;
	reader->left -= bytes;
}
