/* SPDX-License-Identifier: Apache-2.0 */
/* The sender's side of a stream on one host. */
#define _GNU_SOURCE
#include "gather/local_link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A receiver that does not read is not waited for with the reason why we end. */
#define LAST_WORDS_MS 200

struct local_sender {
	struct gather_sender base;
	struct local_link link;
	uint32_t rank;
	bool has_memory;
	bool done;
	uint64_t said; /* bytes that are on their way, those in `batch` not counted */
	uint64_t taken;
	size_t batched;
	uint8_t batch[LOCAL_INLINE_BYTES]; /* small pieces, to go together */
};

static int fail_gone(const struct local_sender *sender, int code, struct base_error *error)
{
	if (code == -ECONNRESET)
		return base_fail_with(error, code, "look for why it ended",
				      "process %d went away before it had all bytes of rank %u",
				      (int)sender->link.pid, sender->rank);
	return base_fail(error, code,
			 "cannot hand the bytes of rank %u to the process that writes them (%d)",
			 sender->rank, (int)sender->link.pid);
}

static int take_reply(struct local_sender *sender, const struct local_head *head, const char *text,
		      struct base_error *error)
{
	switch (head->kind) {
	case LOCAL_TAKEN:
		if (head->a < sender->taken || head->a > sender->said)
			break;
		sender->taken = head->a;
		return 0;
	case LOCAL_DONE:
		sender->done = true;
		sender->taken = sender->said;
		return 0;
	case LOCAL_STOP:
		return base_refuse(error, -ECANCELED, "the bytes of rank %u are not wanted: %s",
				   sender->rank, text);
	}
	return fail_gone(sender, -EPROTO, error);
}

/* All that are there. */
static int take_replies(struct local_sender *sender, struct base_error *error)
{
	char text[STREAM_TEXT_BYTES];
	struct local_head head;
	size_t bytes;
	int ret;

	for (;;) {
		ret = local_link_receive(&sender->link, &head, text, sizeof(text) - 1, &bytes,
					 NULL);
		if (ret == -EAGAIN)
			return 0;
		if (ret)
			return fail_gone(sender, ret, error);
		text[bytes] = 0;
		ret = take_reply(sender, &head, text, error);
		/* Who is done closes. */
		if (ret || sender->done)
			return ret;
	}
}

static int say(struct local_sender *sender, const struct local_head *head, const void *data,
	       size_t bytes, int fd, struct base_error *error)
{
	int ret;

	for (;;) {
		ret = local_link_send(&sender->link, head, data, bytes, fd);
		if (!ret)
			return 0;
		if (ret != -EAGAIN) {
			/* It may have said why. */
			int reply = take_replies(sender, error);

			return reply ? reply : fail_gone(sender, ret, error);
		}
		ret = take_replies(sender, error);
		if (!ret)
			ret = local_link_wait(&sender->link, POLLIN | POLLOUT, &sender->base.wait,
					      error);
		if (ret)
			return ret;
	}
}

/* Says so much of the stream, when it is not too far ahead. */
static int say_part(struct local_sender *sender, const struct local_head *head, const void *data,
		    size_t bytes, size_t advance, struct base_error *error)
{
	int ret = take_replies(sender, error);

	while (!ret && sender->said + advance - sender->taken > LOCAL_AHEAD_BYTES) {
		ret = local_link_wait(&sender->link, POLLIN, &sender->base.wait, error);
		if (!ret)
			ret = take_replies(sender, error);
	}
	if (!ret)
		ret = say(sender, head, data, bytes, -1, error);
	if (!ret)
		sender->said += advance;
	return ret;
}

static int say_bytes(struct local_sender *sender, const void *data, size_t bytes,
		     struct base_error *error)
{
	const struct local_head head = { .kind = LOCAL_BYTES };

	return say_part(sender, &head, data, bytes, bytes, error);
}

static int say_batch(struct local_sender *sender, struct base_error *error)
{
	const size_t bytes = sender->batched;

	sender->batched = 0;
	return bytes ? say_bytes(sender, sender->batch, bytes, error) : 0;
}

static int put(struct gather_sender *base, const void *data, size_t bytes, struct base_error *error)
{
	struct local_sender *sender = (struct local_sender *)base;
	const uint8_t *from = data;
	int ret = 0;

	if (bytes > sizeof(sender->batch) - sender->batched)
		ret = say_batch(sender, error);
	for (; !ret && bytes >= sizeof(sender->batch);
	     from += sizeof(sender->batch), bytes -= sizeof(sender->batch))
		ret = say_bytes(sender, from, sizeof(sender->batch), error);
	if (!ret && bytes) {
		memcpy(sender->batch + sender->batched, from, bytes);
		sender->batched += bytes;
	}
	return ret;
}

static int put_shared(struct gather_sender *base, const void *data, uint64_t offset, size_t bytes,
		      uint32_t crc32, struct base_error *error)
{
	struct local_sender *sender = (struct local_sender *)base;
	const bool whole = bytes <= LOCAL_REFERENCE_BYTES;
	const uint8_t *from = data;
	size_t step;
	int ret;

	/* What costs less to copy than to map. */
	if (!sender->has_memory || bytes < 4 * KIB)
		return put(base, data, bytes, error);
	ret = say_batch(sender, error);
	for (; !ret && bytes; from += step, offset += step, bytes -= step) {
		struct local_head head = { .kind = LOCAL_REFERENCE, .a = offset };

		step = MIN(bytes, LOCAL_REFERENCE_BYTES);
		head.b = step;
		head.crc32 = whole ? crc32 : base_crc32(0, from, step);
		ret = say_part(sender, &head, NULL, 0, step, error);
	}
	return ret;
}

static uint64_t taken(struct gather_sender *base)
{
	struct local_sender *sender = (struct local_sender *)base;

	if (!base->failure.code && !base->ended)
		take_replies(sender, &base->failure);
	/* What is behind that has been copied. */
	return sender->taken == sender->said ? base->offset : sender->taken;
}

static int await_taken(struct gather_sender *base, uint64_t offset, struct base_error *error)
{
	struct local_sender *sender = (struct local_sender *)base;
	int ret = 0;

	/* What is behind that has been copied. */
	offset = MIN(offset, sender->said);
	while (!ret && sender->taken < offset) {
		ret = take_replies(sender, error);
		if (!ret && sender->taken < offset)
			ret = local_link_wait(&sender->link, POLLIN, &base->wait, error);
	}
	return ret;
}

static int end(struct gather_sender *base, uint32_t crc32, struct base_error *error)
{
	struct local_sender *sender = (struct local_sender *)base;
	const struct local_head head = { .kind = LOCAL_END, .a = base->offset, .b = crc32 };
	int ret = say_batch(sender, error);

	if (!ret)
		ret = say(sender, &head, NULL, 0, -1, error);
	while (!ret && !sender->done) {
		ret = take_replies(sender, error);
		if (!ret && !sender->done)
			ret = local_link_wait(&sender->link, POLLIN, &base->wait, error);
	}
	return ret;
}

static void say_last_words(struct local_sender *sender, const char *why)
{
	const struct local_head head = { .kind = LOCAL_FAIL };
	const uint64_t until = base_now_ns() + base_ms_to_ns(LAST_WORDS_MS);
	struct pollfd ready = { .fd = sender->link.fd, .events = POLLOUT };

	while (local_link_send(&sender->link, &head, why, MIN(strlen(why), STREAM_TEXT_BYTES - 1),
			       -1) == -EAGAIN &&
	       base_now_ns() < until)
		poll(&ready, 1, LAST_WORDS_MS / 4);
}

static void close_sender(struct gather_sender *base, const char *why)
{
	struct local_sender *sender = (struct local_sender *)base;

	if (!base->ended)
		say_last_words(sender, why);
	local_link_close(&sender->link);
	free(sender);
}

static const struct stream_sender_ops ops = {
	.put = put,
	.put_shared = put_shared,
	.taken = taken,
	.await_taken = await_taken,
	.end = end,
	.close = close_sender,
};

/* ---- Connecting ------------------------------------------------------------------------------ */

/* The caller does not want to wait any longer, because of `why`: the rank that it names counts. */
static int fail_unanswered(int code, struct base_error *why, const char *path,
			   struct base_error *error)
{
	base_rephrase_with(why, code,
			   "processes in containers that do not share /dev/shm cannot reach each "
			   "other: let them share it, or give each its own node name",
			   "%s: nobody listens at \"%s\" for the bytes of this rank", why->sentence,
			   path);
	return base_pass_on(error, why);
}

static int connect_until(int fd, const char *address, const struct gather_wait *wait,
			 struct base_error *error)
{
	uint64_t pause_ms = 1;
	struct base_error why = { 0 };
	struct sockaddr_un to;
	int ret = local_address(&to, address, error);

	while (!ret && connect(fd, (const struct sockaddr *)&to, sizeof(to))) {
		/* Nobody listens yet, or too many have come at once. */
		if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR)
			return base_fail(error, -errno, "cannot connect to the socket \"%s\"",
					 to.sun_path);
		ret = stream_go_on(wait, &why);
		if (ret)
			return fail_unanswered(ret, &why, to.sun_path, error);
		poll(NULL, 0, (int)pause_ms);
		pause_ms = MIN(pause_ms * 2, STREAM_PATIENCE_MS);
	}
	return ret;
}

int gather_sender_open_local(struct gather_sender **out, const char *address, uint32_t rank,
			     int memory_fd, const struct gather_wait *wait,
			     struct base_error *error)
{
	const struct local_head hello = { .kind = LOCAL_HELLO, .a = LOCAL_MAGIC, .b = rank };
	struct local_sender *sender = calloc(1, sizeof(*sender));
	int ret, fd;

	*out = NULL;
	if (!sender)
		return base_no_memory(error, "a stream between ranks", sizeof(*sender));
	sender->base.ops = &ops;
	sender->base.wait = *wait;
	sender->link = (struct local_link){ .fd = -1, .process_fd = -1 };
	sender->rank = rank;
	sender->has_memory = memory_fd >= 0;
	fd = base_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	if (fd < 0) {
		ret = base_fail_with(error, -errno, "raise ulimit -n",
				     "cannot make a socket to send bytes of a rank");
		goto out;
	}
	ret = connect_until(fd, address, wait, error);
	if (ret) {
		base_close(fd);
		goto out;
	}
	ret = local_link_take(&sender->link, fd);
	if (ret) {
		base_fail(error, ret, "another user's process listens at \"%s\"", address);
		goto out;
	}
	ret = say(sender, &hello, NULL, 0, memory_fd, error);
out:
	if (ret) {
		local_link_close(&sender->link);
		free(sender);
	} else {
		*out = &sender->base;
	}
	return ret;
}
