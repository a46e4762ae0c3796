/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define MOST_AT_A_TIME (256 * KIB)
#define MOST_IN_A_ROW 16 /* then others have a turn */

size_t wire_put_head(uint8_t raw[WIRE_MOST_HEAD_BYTES], const struct wire_head *head)
{
	const size_t scope = strlen(head->scope), name = strlen(head->name);

	raw[0] = (uint8_t)head->type;
	raw[1] = (uint8_t)scope;
	raw[2] = (uint8_t)name;
	raw[3] = 0;
	base_put_le(raw + 4, head->id, 4);
	base_put_le(raw + 8, head->number, 4);
	base_put_le(raw + 12, head->body_bytes, 4);
	memcpy(raw + WIRE_HEAD_BYTES, head->scope, scope);
	memcpy(raw + WIRE_HEAD_BYTES + scope, head->name, name);
	return WIRE_HEAD_BYTES + scope + name;
}

/* 0 at the moment: nothing has come. */
static ssize_t take(int fd, void *into, size_t bytes)
{
	ssize_t got;

	do {
		got = recv(fd, into, MIN(bytes, MOST_AT_A_TIME), MSG_DONTWAIT);
	} while (got < 0 && errno == EINTR);
	if (got > 0)
		return got;
	if (!got)
		return -ECONNRESET;
	return errno == EAGAIN ? 0 : -errno;
}

static bool is_sound(const uint8_t *raw)
{
	return raw[1] < GATHER_NAME_BYTES && raw[2] < GATHER_NAME_BYTES && !raw[3] &&
	       base_get_le(raw + 12, 4) <= GATHER_MAX_NOTE_BYTES;
}

static size_t whole_head(const struct wire_input *input)
{
	if (input->raw_bytes < WIRE_HEAD_BYTES)
		return WIRE_HEAD_BYTES;
	return WIRE_HEAD_BYTES + input->raw[1] + input->raw[2];
}

static void understand(struct wire_input *input)
{
	const uint8_t *raw = input->raw;
	struct wire_head *head = &input->head;

	head->type = raw[0];
	head->id = (uint32_t)base_get_le(raw + 4, 4);
	head->number = (uint32_t)base_get_le(raw + 8, 4);
	head->body_bytes = (uint32_t)base_get_le(raw + 12, 4);
	memcpy(head->scope, raw + WIRE_HEAD_BYTES, raw[1]);
	head->scope[raw[1]] = 0;
	memcpy(head->name, raw + WIRE_HEAD_BYTES + raw[1], raw[2]);
	head->name[raw[2]] = 0;
	input->has_head = true;
}

static int read_head(struct wire_input *input, int fd)
{
	ssize_t got;

	while (input->raw_bytes < whole_head(input)) {
		got = take(fd, input->raw + input->raw_bytes, whole_head(input) - input->raw_bytes);
		if (got <= 0)
			return (int)got;
		input->raw_bytes += (size_t)got;
		if (input->raw_bytes == WIRE_HEAD_BYTES && !is_sound(input->raw))
			return -EPROTO;
	}
	understand(input);
	return WIRE_HEAD;
}

int wire_read(struct wire_input *input, int fd)
{
	const size_t whole = input->head.body_bytes;
	uint8_t unwanted[4096];
	ssize_t got;

	if (!input->has_head)
		return read_head(input, fd);
	for (int i = 0; i < MOST_IN_A_ROW && input->body_bytes < whole; i++) {
		const size_t missing = whole - input->body_bytes;

		if (input->body)
			got = take(fd, input->body + input->body_bytes, missing);
		else
			got = take(fd, unwanted, MIN(missing, sizeof(unwanted)));
		if (got <= 0)
			return (int)got;
		input->body_bytes += (size_t)got;
	}
	return input->body_bytes < whole ? WIRE_NOTHING : WIRE_WHOLE;
}

void wire_next(struct wire_input *input)
{
	input->raw_bytes = 0;
	input->has_head = false;
	input->body = NULL;
	input->body_bytes = 0;
}

ssize_t wire_write(int fd, const uint8_t *head, size_t head_bytes, const void *body,
		   size_t body_bytes, size_t sent)
{
	struct iovec parts[2];
	struct msghdr message = { .msg_iov = parts };
	ssize_t ret;

	if (sent < head_bytes) {
		parts[message.msg_iovlen].iov_base = (void *)(uintptr_t)(head + sent);
		parts[message.msg_iovlen++].iov_len = head_bytes - sent;
	}
	sent = sent > head_bytes ? sent - head_bytes : 0;
	if (sent < body_bytes) {
		parts[message.msg_iovlen].iov_base =
			(void *)(uintptr_t)((const uint8_t *)body + sent);
		parts[message.msg_iovlen++].iov_len = MIN(body_bytes - sent, MIB);
	}
	do {
		ret = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (ret < 0 && errno == EINTR);
	if (ret >= 0)
		return ret;
	return errno == EAGAIN ? 0 : -errno;
}
