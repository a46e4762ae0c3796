/* SPDX-License-Identifier: Apache-2.0 */
/* The sender's side of a stream between nodes: a thread sends a block while the next is filled. */
#include "gather/comm_wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 2u

struct comm_sender {
	struct gather_sender base;

	/* The thread's while it runs. */
	struct comm_link link;
	uint64_t granted; /* blocks that may be sent now */
	bool end_said;    /* what is left is to hear the receiver's last word */
	bool stopped;     /* that has been heard: it wants nothing more, and hears nothing more */
	struct gather_wait wait; /* for the receiver's word: the caller's, or the thread's */

	size_t block_bytes; /* as said with the first grant; 0 before that */
	uint8_t *memory;    /* block number i lies in the place i % BLOCKS */
	size_t filled;      /* bytes of block number `full` */

	bool runs;
	pthread_t thread;
	pthread_mutex_t lock; /* of all below */
	pthread_cond_t change;
	uint64_t full; /* blocks; only the caller counts them */
	uint64_t sent;
	size_t last_bytes; /* of the last one, if it is not a whole one */
	bool stop;
	struct base_error failure; /* of the thread */
};

static int take_grant(struct comm_sender *sender, const struct comm_head *head,
		      struct base_error *error)
{
	if (!head->a || head->a > COMM_MOST_BLOCKS || !head->b || head->b > COMM_MOST_BLOCK_BYTES ||
	    (sender->block_bytes && head->b != sender->block_bytes))
		return comm_link_mistaken(&sender->link, error);
	sender->granted = head->a;
	/* Only the first time: from then on two threads read it. */
	if (!sender->block_bytes)
		sender->block_bytes = head->b;
	return 0;
}

/* Hears the receiver until it says something else than to wait. */
static int hear(struct comm_sender *sender, struct comm_head *head, struct base_error *error)
{
	int ret;

	do {
		ret = stream_go_on(&sender->wait, error);
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

/* ---- The thread ------------------------------------------------------------------------------ */

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

static int go_on_sending(void *user, struct base_error *error)
{
	struct comm_sender *sender = user;
	bool stop;

	pthread_mutex_lock(&sender->lock);
	stop = sender->stop;
	pthread_mutex_unlock(&sender->lock);
	return stop ? base_refuse(error, -ECANCELED, "the rank's bytes are not sent any longer") :
		      0;
}

/* Whether there is one, and what it is; under the lock. */
static bool take_block(const struct comm_sender *sender, const uint8_t **data, size_t *bytes)
{
	const uint64_t number = sender->sent;

	if (number == sender->full)
		return false;
	*data = sender->memory + number % BLOCKS * sender->block_bytes;
	*bytes = number + 1 == sender->full && sender->last_bytes ? sender->last_bytes :
								    sender->block_bytes;
	return true;
}

static void *send_blocks(void *argument)
{
	struct comm_sender *sender = argument;
	struct base_error error = { 0 };
	const uint8_t *data;
	size_t bytes;
	int ret = 0;

	pthread_mutex_lock(&sender->lock);
	while (!ret) {
		if (!take_block(sender, &data, &bytes)) {
			if (sender->stop)
				break;
			pthread_cond_wait(&sender->change, &sender->lock);
			continue;
		}
		pthread_mutex_unlock(&sender->lock);
		ret = send_block(sender, data, bytes, &error);
		pthread_mutex_lock(&sender->lock);
		sender->sent += !ret;
		sender->failure = error;
		pthread_cond_broadcast(&sender->change);
	}
	pthread_mutex_unlock(&sender->lock);
	return NULL;
}

/* ---- Who gives the bytes --------------------------------------------------------------------- */

/* The thread may be in a function of the caller's, which ends after timeout_ms at the latest. */
static void end_thread(struct comm_sender *sender)
{
	if (!sender->runs)
		return;
	pthread_mutex_lock(&sender->lock);
	sender->stop = true;
	pthread_cond_broadcast(&sender->change);
	pthread_mutex_unlock(&sender->lock);
	pthread_join(sender->thread, NULL);
	sender->runs = false;
	sender->wait = sender->base.wait;
}

/* Waits until no more than so many blocks are left to be sent. */
static int await_sent(struct comm_sender *sender, uint64_t most, struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&sender->lock);
	while (!ret && !sender->failure.code && sender->full - sender->sent > most) {
		if (base_cond_wait_ms(&sender->change, &sender->lock, STREAM_PATIENCE_MS))
			continue;
		pthread_mutex_unlock(&sender->lock);
		ret = stream_go_on(&sender->base.wait, error);
		pthread_mutex_lock(&sender->lock);
	}
	if (!ret && sender->failure.code) {
		*error = sender->failure;
		ret = error->code;
	}
	pthread_mutex_unlock(&sender->lock);
	return ret;
}

/* How large blocks are is said with the first grant. */
static int begin(struct comm_sender *sender, struct base_error *error)
{
	int ret = await_grant(sender, error);

	if (ret || sender->memory)
		return ret;
	sender->memory = base_map(BLOCKS * sender->block_bytes);
	if (!sender->memory)
		return base_no_memory(error, "blocks of bytes to send",
				      BLOCKS * sender->block_bytes);
	sender->wait = (struct gather_wait){ go_on_sending, sender };
	ret = base_start_thread(&sender->thread, send_blocks, sender);
	sender->runs = !ret;
	return ret ? base_fail(error, ret, "cannot start a thread to send to rank %u",
			       sender->link.other) :
		     0;
}

/* What the block being filled has is handed over. */
static void hand_over(struct comm_sender *sender)
{
	pthread_mutex_lock(&sender->lock);
	sender->last_bytes = sender->filled < sender->block_bytes ? sender->filled : 0;
	sender->full++;
	sender->filled = 0;
	pthread_cond_broadcast(&sender->change);
	pthread_mutex_unlock(&sender->lock);
}

static int put(struct gather_sender *base, const void *data, size_t bytes, struct base_error *error)
{
	struct comm_sender *sender = (struct comm_sender *)base;
	const uint8_t *from = data;
	size_t piece;
	int ret = sender->memory ? 0 : begin(sender, error);

	for (; !ret && bytes; from += piece, bytes -= piece) {
		piece = MIN(bytes, sender->block_bytes - sender->filled);
		if (!sender->filled)
			ret = await_sent(sender, BLOCKS - 1, error);
		if (ret)
			break;
		memcpy(sender->memory + sender->full % BLOCKS * sender->block_bytes +
			       sender->filled,
		       from, piece);
		sender->filled += piece;
		if (sender->filled == sender->block_bytes)
			hand_over(sender);
	}
	return ret;
}

static int put_shared(struct gather_sender *base, const void *data, uint64_t offset, size_t bytes,
		      uint32_t crc32, struct base_error *error)
{
	(void)offset;
	(void)crc32;
	return put(base, data, bytes, error);
}

/* What was put has been copied. */
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
		hand_over(sender);
	ret = await_sent(sender, 0, error);
	end_thread(sender);
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

	sender->wait = (struct gather_wait){ wait_no_longer, &until_ns };
	if (sender->end_said)
		hear(sender, &last, NULL);
	else if (!await_grant(sender, NULL) &&
		 !comm_link_say(&sender->link, COMM_FAIL, bytes, 0, NULL) && bytes)
		comm_link_send(&sender->link, why, bytes, NULL);
}

static void close_sender(struct gather_sender *base, const char *why)
{
	struct comm_sender *sender = (struct comm_sender *)base;

	end_thread(sender);
	if (!base->ended && !sender->stopped && !sender->link.broken)
		say_why(sender, why);
	pthread_cond_destroy(&sender->change);
	pthread_mutex_destroy(&sender->lock);
	base_unmap(sender->memory, BLOCKS * sender->block_bytes);
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
	sender->base.wait = sender->wait = *wait;
	pthread_mutex_init(&sender->lock, NULL);
	base_cond_init(&sender->change);
	sender->link = (struct comm_link){
		.comm = comm,
		.other = to,
		.tag = tag,
		.timeout_ms = timeout_ms,
	};
	*out = &sender->base;
	return 0;
}
