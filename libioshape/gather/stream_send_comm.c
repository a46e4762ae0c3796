/* SPDX-License-Identifier: Apache-2.0 */
/* The sender's side of a stream between nodes. */
#include "gather/comm_wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct comm_sender {
	struct gather_sender base;
	struct comm_link link;
	uint64_t granted; /* blocks that may be sent now */
	size_t block_bytes;
	uint8_t *block; /* small pieces on their way to fill one; made at need */
	size_t filled;
	bool end_said; /* what is left is to hear the receiver's last word */
	bool stopped;  /* that has been heard: it wants nothing more, and hears nothing more */
};

static int take_grant(struct comm_sender *sender, const struct comm_head *head,
		      struct base_error *error)
{
	if (!head->a || head->a > COMM_MOST_BLOCKS || !head->b || head->b > COMM_MOST_BLOCK_BYTES ||
	    (sender->block_bytes && head->b != sender->block_bytes))
		return comm_link_mistaken(&sender->link, error);
	sender->granted = head->a;
	sender->block_bytes = head->b;
	return 0;
}

/* Hears the receiver until it says something else than to wait. */
static int hear(struct comm_sender *sender, struct comm_head *head, struct base_error *error)
{
	int ret;

	do {
		ret = stream_go_on(&sender->base.wait, error);
		if (!ret)
			ret = comm_link_hear(&sender->link, head, error);
	} while (!ret && head->kind == COMM_HOLD);
	if (ret || head->kind != COMM_STOP)
		return ret;
	sender->stopped = true;
	return base_refuse(error, -ECANCELED, "rank %u, which writes, wants no more of our bytes",
			   sender->link.other);
}

static int await_grant(struct comm_sender *sender, struct base_error *error)
{
	struct comm_head head;
	int ret;

	if (sender->granted)
		return 0;
	ret = hear(sender, &head, error);
	if (ret)
		return ret;
	return head.kind == COMM_GRANT ? take_grant(sender, &head, error) :
					 comm_link_mistaken(&sender->link, error);
}

static int send_block(struct comm_sender *sender, const void *data, size_t bytes,
		      struct base_error *error)
{
	int ret = await_grant(sender, error);

	if (ret)
		return ret;
	sender->granted--;
	ret = comm_link_say(&sender->link, COMM_BLOCK, bytes, 0, error);
	return ret ? ret : comm_link_send(&sender->link, data, bytes, error);
}

/* As much as there is room for. */
static int fill_block(struct comm_sender *sender, const uint8_t **data, size_t *bytes,
		      struct base_error *error)
{
	const size_t piece = MIN(*bytes, sender->block_bytes - sender->filled);

	if (!sender->block)
		sender->block = base_map(sender->block_bytes);
	if (!sender->block)
		return base_no_memory(error, "a block of bytes to send", sender->block_bytes);
	memcpy(sender->block + sender->filled, *data, piece);
	sender->filled += piece;
	*data += piece;
	*bytes -= piece;
	if (sender->filled < sender->block_bytes)
		return 0;
	sender->filled = 0;
	return send_block(sender, sender->block, sender->block_bytes, error);
}

static int put(struct gather_sender *base, const void *data, size_t bytes, struct base_error *error)
{
	struct comm_sender *sender = (struct comm_sender *)base;
	const uint8_t *from = data;
	int ret = 0;

	/* How large blocks are is said with the first grant. */
	if (!sender->block_bytes)
		ret = await_grant(sender, error);
	if (!ret && sender->filled)
		ret = fill_block(sender, &from, &bytes, error);
	for (; !ret && bytes >= sender->block_bytes;
	     from += sender->block_bytes, bytes -= sender->block_bytes)
		ret = send_block(sender, from, sender->block_bytes, error);
	if (!ret && bytes)
		ret = fill_block(sender, &from, &bytes, error);
	return ret;
}

static int put_shared(struct gather_sender *base, const void *data, uint64_t offset, size_t bytes,
		      uint32_t crc32, struct base_error *error)
{
	(void)offset;
	(void)crc32;
	return put(base, data, bytes, error);
}

/* What was put has been sent, or copied. */
static uint64_t taken(struct gather_sender *base)
{
	return base->offset;
}

static int await_taken(struct gather_sender *base, uint64_t offset, struct base_error *error)
{
	(void)base;
	(void)offset;
	(void)error;
	return 0;
}

static int end(struct gather_sender *base, uint32_t crc32, struct base_error *error)
{
	struct comm_sender *sender = (struct comm_sender *)base;
	struct comm_head head;
	int ret = 0;

	if (sender->filled)
		ret = send_block(sender, sender->block, sender->filled, error);
	if (!ret)
		ret = await_grant(sender, error);
	if (!ret)
		ret = comm_link_say(&sender->link, COMM_END, base->offset, crc32, error);
	if (!ret) {
		sender->end_said = true;
		ret = hear(sender, &head, error);
	}
	if (!ret && head.kind != COMM_DONE)
		ret = comm_link_mistaken(&sender->link, error);
	return ret;
}

static int wait_no_longer(void *user, struct base_error *error)
{
	const uint64_t *until_ns = user;

	return base_now_ns() < *until_ns ? 0 : base_refuse(error, -ETIMEDOUT, "no word came");
}

/* In its turn, so that the next stream between the two finds nothing in its way. */
static void say_why(struct comm_sender *sender, const char *why)
{
	const size_t bytes = MIN(strlen(why), STREAM_TEXT_BYTES - 1);
	uint64_t until_ns = base_now_ns() + base_ms_to_ns(sender->link.timeout_ms);
	struct comm_head last;

	sender->base.wait = (struct gather_wait){ wait_no_longer, &until_ns };
	if (sender->end_said)
		hear(sender, &last, NULL);
	else if (!await_grant(sender, NULL) &&
		 !comm_link_say(&sender->link, COMM_FAIL, bytes, 0, NULL) && bytes)
		comm_link_send(&sender->link, why, bytes, NULL);
}

static void close_sender(struct gather_sender *base, const char *why)
{
	struct comm_sender *sender = (struct comm_sender *)base;

	if (!base->ended && !sender->stopped && !sender->link.broken)
		say_why(sender, why);
	base_unmap(sender->block, sender->block_bytes);
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

int gather_sender_open_comm(struct gather_sender **out, const struct ioshape_comm *comm,
			    uint32_t to, uint32_t tag, uint32_t timeout_ms,
			    const struct gather_wait *wait, struct base_error *error)
{
	struct comm_sender *sender = calloc(1, sizeof(*sender));

	*out = NULL;
	if (!sender)
		return base_no_memory(error, "a stream between ranks", sizeof(*sender));
	sender->base.ops = &ops;
	sender->base.wait = *wait;
	sender->link = (struct comm_link){
		.comm = comm,
		.other = to,
		.tag = tag,
		.timeout_ms = timeout_ms,
	};
	*out = &sender->base;
	return 0;
}
