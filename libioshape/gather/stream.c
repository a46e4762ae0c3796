/* SPDX-License-Identifier: Apache-2.0 */
#include "gather/stream.h"

#include <errno.h>

int stream_go_on(const struct gather_wait *wait, struct base_error *error)
{
	int ret = wait->go_on ? wait->go_on(wait->user, error) : 0;

	return ret ? base_fail(error, ret, "a rank's bytes are not waited for any longer") : 0;
}

/* Keeps the first failure. */
static int keep(struct base_error *kept, int ret, struct base_error *error)
{
	if (!ret)
		return 0;
	if (!kept->code)
		base_fail(kept, ret, "a stream between ranks failed");
	if (error && !error->code)
		*error = *kept;
	return kept->code;
}

int gather_sender_put(struct gather_sender *sender, const void *data, size_t bytes,
		      struct base_error *error)
{
	int ret = sender->failure.code;

	if (!ret && sender->ended)
		ret = base_refuse(&sender->failure, -EINVAL, "bytes were put into an ended stream");
	if (!ret && bytes)
		ret = sender->ops->put(sender, data, bytes, &sender->failure);
	if (!ret)
		sender->offset += bytes;
	return keep(&sender->failure, ret, error);
}

int gather_sender_put_shared(struct gather_sender *sender, const void *data, uint64_t offset,
			     size_t bytes, uint32_t crc32, struct base_error *error)
{
	int ret = sender->failure.code;

	if (!ret && sender->ended)
		ret = base_refuse(&sender->failure, -EINVAL, "bytes were put into an ended stream");
	if (!ret && bytes)
		ret = sender->ops->put_shared(sender, data, offset, bytes, crc32, &sender->failure);
	if (!ret)
		sender->offset += bytes;
	return keep(&sender->failure, ret, error);
}

uint64_t gather_sender_offset(const struct gather_sender *sender)
{
	return sender->offset;
}

uint64_t gather_sender_taken(struct gather_sender *sender)
{
	return sender->ops->taken(sender);
}

int gather_sender_await_taken(struct gather_sender *sender, uint64_t offset,
			      struct base_error *error)
{
	int ret = sender->failure.code;

	if (!ret && offset > sender->offset)
		ret = base_refuse(&sender->failure, -EINVAL,
				  "bytes of a stream are waited for that were not put");
	if (!ret && !sender->ended)
		ret = sender->ops->await_taken(sender, offset, &sender->failure);
	return keep(&sender->failure, ret, error);
}

int gather_sender_end(struct gather_sender *sender, uint32_t crc32, struct base_error *error)
{
	int ret = sender->failure.code;

	if (!ret && !sender->ended)
		ret = sender->ops->end(sender, crc32, &sender->failure);
	if (!ret)
		sender->ended = true;
	return keep(&sender->failure, ret, error);
}

void gather_sender_free(struct gather_sender *sender, const char *why)
{
	if (sender)
		sender->ops->close(sender, why ? why : "it gave up");
}

static void release(struct gather_receiver *receiver, uint64_t offset)
{
	if (offset <= receiver->released)
		return;
	receiver->released = MIN(offset, receiver->offset);
	receiver->ops->release(receiver);
}

int gather_receiver_next(struct gather_receiver *receiver, const void **data, size_t *bytes,
			 struct base_error *error)
{
	int ret = receiver->failure.code;

	*data = NULL;
	*bytes = 0;
	if (!receiver->holds)
		release(receiver, receiver->offset);
	if (!ret && !receiver->ended) {
		receiver->summed = receiver->lasts = false;
		ret = receiver->ops->next(receiver, data, bytes, &receiver->failure);
		receiver->ended = !ret && !*bytes;
	}
	if (ret == -EAGAIN && !receiver->failure.code)
		return ret;
	if (!ret)
		receiver->offset += *bytes;
	return keep(&receiver->failure, ret, error);
}

void gather_receiver_hold(struct gather_receiver *receiver)
{
	receiver->holds = true;
}

bool gather_receiver_lasts(const struct gather_receiver *receiver)
{
	return receiver->holds && receiver->lasts;
}

void gather_receiver_release(struct gather_receiver *receiver, uint64_t offset)
{
	release(receiver, offset);
}

bool gather_receiver_summed(const struct gather_receiver *receiver, uint32_t *crc32)
{
	*crc32 = receiver->run_crc32;
	return receiver->summed;
}

uint32_t gather_receiver_crc32(const struct gather_receiver *receiver)
{
	return receiver->crc32;
}

void gather_receiver_free(struct gather_receiver *receiver)
{
	if (receiver)
		receiver->ops->close(receiver);
}
