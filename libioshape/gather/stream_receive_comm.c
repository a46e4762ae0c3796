/* SPDX-License-Identifier: Apache-2.0 */
/* The receiver's side of a stream between nodes: a thread receives ahead. */
#include "gather/comm_wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct comm_receiver {
	struct gather_receiver base;
	struct comm_link link; /* the thread's */
	size_t block_bytes;
	unsigned blocks;
	uint8_t *memory;
	bool owns_memory;
	bool started;
	pthread_t thread;

	pthread_mutex_t lock; /* of all below */
	pthread_cond_t change;
	uint64_t received;       /* blocks; number i lies in the place i % blocks */
	uint64_t handed;         /* blocks that were handed out */
	uint64_t released;       /* blocks that are not needed any more */
	size_t *sizes;           /* by place */
	uint64_t released_bytes; /* the caller's: of the blocks that were released */
	bool end_seen, finished, stop;
	uint64_t total_bytes; /* said with the end */
	uint32_t crc32;
	struct base_error failure; /* of the thread */
};

/* ---- The thread ------------------------------------------------------------------------------ */

/* Waits until ready() or until nobody wants more; under the lock. The other side hears that we are
 * alive. False if it does not. */
static bool await_consumer(struct comm_receiver *receiver,
			   bool (*ready)(const struct comm_receiver *receiver))
{
	uint64_t said_ns = base_now_ns();
	int ret = 0;

	while (!ret && !receiver->stop && !ready(receiver)) {
		if (base_cond_wait_ms(&receiver->change, &receiver->lock, STREAM_PATIENCE_MS))
			continue;
		pthread_mutex_unlock(&receiver->lock);
		comm_link_progress(&receiver->link);
		if (base_now_ns() - said_ns > base_ms_to_ns(COMM_HOLD_MS)) {
			ret = comm_link_say(&receiver->link, COMM_HOLD, 0, 0, NULL);
			said_ns = base_now_ns();
		}
		pthread_mutex_lock(&receiver->lock);
	}
	return !ret;
}

static unsigned free_places(const struct comm_receiver *receiver)
{
	return receiver->blocks - (unsigned)(receiver->received - receiver->released);
}

static bool has_free_place(const struct comm_receiver *receiver)
{
	return free_places(receiver) > 0;
}

static bool is_finished(const struct comm_receiver *receiver)
{
	return receiver->finished;
}

/* So many blocks can be received; 0 if no more are wanted. */
static int await_places(struct comm_receiver *receiver, unsigned *places, struct base_error *error)
{
	bool alive;

	pthread_mutex_lock(&receiver->lock);
	alive = await_consumer(receiver, has_free_place);
	*places = receiver->stop ? 0 : free_places(receiver);
	pthread_mutex_unlock(&receiver->lock);
	/* To say the sentence. */
	return alive ? 0 : comm_link_say(&receiver->link, COMM_HOLD, 0, 0, error);
}

static int receive_block(struct comm_receiver *receiver, uint64_t bytes, struct base_error *error)
{
	/* Only this thread counts them. */
	const size_t place = receiver->received % receiver->blocks;
	int ret;

	if (!bytes || bytes > receiver->block_bytes)
		return comm_link_mistaken(&receiver->link, error);
	ret = comm_link_receive(&receiver->link, receiver->memory + place * receiver->block_bytes,
				(size_t)bytes, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&receiver->lock);
	receiver->sizes[place] = (size_t)bytes;
	receiver->received++;
	pthread_cond_broadcast(&receiver->change);
	pthread_mutex_unlock(&receiver->lock);
	return 0;
}

static int receive_failure(struct comm_receiver *receiver, uint64_t bytes, struct base_error *error)
{
	char text[STREAM_TEXT_BYTES] = { 0 };
	int ret;

	if (bytes >= sizeof(text))
		return comm_link_mistaken(&receiver->link, error);
	ret = bytes ? comm_link_receive(&receiver->link, text, (size_t)bytes, error) : 0;
	if (ret)
		return ret;
	/* There is nobody to answer. */
	receiver->link.broken = true;
	return base_refuse(error, -ECANCELED, "rank %u failed: %s", receiver->link.other, text);
}

static void publish_end(struct comm_receiver *receiver, const struct comm_head *head)
{
	pthread_mutex_lock(&receiver->lock);
	receiver->end_seen = true;
	receiver->total_bytes = head->a;
	receiver->crc32 = (uint32_t)head->b;
	pthread_cond_broadcast(&receiver->change);
	pthread_mutex_unlock(&receiver->lock);
}

static int receive_granted(struct comm_receiver *receiver, unsigned granted, bool *at_end,
			   struct base_error *error)
{
	struct comm_head head;
	int ret = 0;

	while (!ret && granted--) {
		ret = comm_link_hear(&receiver->link, &head, error);
		if (ret)
			break;
		switch (head.kind) {
		case COMM_BLOCK:
			ret = receive_block(receiver, head.a, error);
			break;
		case COMM_END:
			publish_end(receiver, &head);
			*at_end = true;
			return 0;
		case COMM_FAIL:
			ret = receive_failure(receiver, head.a, error);
			break;
		default:
			ret = comm_link_mistaken(&receiver->link, error);
		}
	}
	return ret;
}

static int receive_all(struct comm_receiver *receiver, struct base_error *error)
{
	bool at_end = false;
	unsigned places;
	int ret;

	while (!at_end) {
		ret = await_places(receiver, &places, error);
		if (ret)
			return ret;
		if (!places)
			return comm_link_say(&receiver->link, COMM_STOP, 0, 0, error);
		ret = comm_link_say(&receiver->link, COMM_GRANT, places, receiver->block_bytes,
				    error);
		if (!ret)
			ret = receive_granted(receiver, places, &at_end, error);
		if (ret)
			return ret;
	}
	pthread_mutex_lock(&receiver->lock);
	await_consumer(receiver, is_finished);
	at_end = receiver->finished;
	pthread_mutex_unlock(&receiver->lock);
	/* All bytes have come: if it does not hear this that is no failure of ours. */
	comm_link_say(&receiver->link, at_end ? COMM_DONE : COMM_STOP, 0, 0, NULL);
	return 0;
}

static void *run(void *argument)
{
	struct comm_receiver *receiver = argument;
	struct base_error error = { 0 };

	if (receive_all(receiver, &error)) {
		pthread_mutex_lock(&receiver->lock);
		receiver->failure = error;
		pthread_cond_broadcast(&receiver->change);
		pthread_mutex_unlock(&receiver->lock);
	}
	return NULL;
}

/* ---- Who takes the bytes --------------------------------------------------------------------- */

static int take_end(struct comm_receiver *receiver, struct base_error *error)
{
	if (receiver->total_bytes != receiver->base.offset)
		return base_refuse(error, -EPROTO,
				   "rank %u has sent %llu bytes, of which %llu have come",
				   receiver->base.rank, (unsigned long long)receiver->total_bytes,
				   (unsigned long long)receiver->base.offset);
	receiver->base.crc32 = receiver->crc32;
	receiver->finished = true;
	pthread_cond_broadcast(&receiver->change);
	return 0;
}

static int next(struct gather_receiver *base, const void **data, size_t *bytes,
		struct base_error *error)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;
	size_t place;
	int ret = 0;

	pthread_mutex_lock(&receiver->lock);
	if (receiver->received == receiver->handed && base->released < base->offset &&
	    !receiver->failure.code) {
		pthread_mutex_unlock(&receiver->lock);
		return -EAGAIN;
	}
	while (!ret && receiver->received == receiver->handed && !receiver->end_seen &&
	       !receiver->failure.code) {
		if (base_cond_wait_ms(&receiver->change, &receiver->lock, STREAM_PATIENCE_MS))
			continue;
		pthread_mutex_unlock(&receiver->lock);
		ret = stream_go_on(&base->wait, error);
		pthread_mutex_lock(&receiver->lock);
	}
	if (!ret && receiver->received > receiver->handed) {
		place = receiver->handed++ % receiver->blocks;
		*data = receiver->memory + place * receiver->block_bytes;
		*bytes = receiver->sizes[place];
		base->lasts = true;
	} else if (!ret && receiver->failure.code) {
		*error = receiver->failure;
		base_error_of_rank(error, base->rank);
		ret = error->code;
	} else if (!ret) {
		ret = take_end(receiver, error);
		base_error_of_rank(error, base->rank);
	}
	pthread_mutex_unlock(&receiver->lock);
	return ret;
}

/* Whole blocks: all of their bytes. */
static void release(struct gather_receiver *base)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;

	pthread_mutex_lock(&receiver->lock);
	while (receiver->released < receiver->handed) {
		const size_t bytes = receiver->sizes[receiver->released % receiver->blocks];

		if (receiver->released_bytes + bytes > base->released)
			break;
		receiver->released_bytes += bytes;
		receiver->released++;
	}
	pthread_cond_broadcast(&receiver->change);
	pthread_mutex_unlock(&receiver->lock);
}

/* The thread may be in a function of the caller's, which ends after timeout_ms at the latest. */
static void close_receiver(struct gather_receiver *base)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;

	if (receiver->started) {
		pthread_mutex_lock(&receiver->lock);
		receiver->stop = true;
		pthread_cond_broadcast(&receiver->change);
		pthread_mutex_unlock(&receiver->lock);
		pthread_join(receiver->thread, NULL);
	}
	pthread_cond_destroy(&receiver->change);
	pthread_mutex_destroy(&receiver->lock);
	if (receiver->owns_memory)
		base_unmap(receiver->memory, receiver->blocks * receiver->block_bytes);
	free(receiver->sizes);
	free(receiver);
}

static const struct stream_receiver_ops ops = {
	.next = next,
	.release = release,
	.close = close_receiver,
};

int gather_receiver_open_comm(struct gather_receiver **out, const struct ioshape_comm *comm,
			      uint32_t from, uint32_t tag, size_t block_bytes, unsigned blocks,
			      void *memory, uint32_t timeout_ms, const struct gather_wait *wait,
			      struct base_error *error)
{
	struct comm_receiver *receiver = calloc(1, sizeof(*receiver));
	int ret;

	*out = NULL;
	if (!receiver)
		return base_no_memory(error, "a stream between ranks", sizeof(*receiver));
	receiver->base = (struct gather_receiver){ .ops = &ops, .wait = *wait, .rank = from };
	receiver->link = (struct comm_link){
		.comm = comm,
		.other = from,
		.tag = tag,
		.timeout_ms = timeout_ms,
	};
	receiver->block_bytes = MIN(block_bytes, COMM_MOST_BLOCK_BYTES);
	receiver->blocks = MIN(MAX(blocks, 1u), COMM_MOST_BLOCKS);
	pthread_mutex_init(&receiver->lock, NULL);
	base_cond_init(&receiver->change);
	receiver->sizes = calloc(receiver->blocks, sizeof(*receiver->sizes));
	receiver->owns_memory = !memory;
	receiver->memory = memory ? memory : base_map(receiver->blocks * receiver->block_bytes);
	if (!receiver->sizes || !receiver->memory) {
		ret = base_no_memory(error, "blocks of bytes to receive",
				     receiver->blocks * receiver->block_bytes);
		goto fail;
	}
	ret = base_start_thread(&receiver->thread, run, receiver);
	if (ret) {
		base_fail(error, ret, "cannot start a thread to receive from rank %u", from);
		goto fail;
	}
	receiver->started = true;
	*out = &receiver->base;
	return 0;
fail:
	close_receiver(&receiver->base);
	return ret;
}
