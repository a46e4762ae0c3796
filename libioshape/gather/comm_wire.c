/* SPDX-License-Identifier: Apache-2.0 */
#include "gather/comm_wire.h"

#include <errno.h>
#include <string.h>

#define MAGIC UINT32_C(0x316d7473) /* "stm1" */

static int fail(struct comm_link *link, int code, const char *doing, struct base_error *error)
{
	link->broken = true;
	return base_fail_with(error, code < 0 ? code : -EIO, "look whether that rank is alive",
			      "%s rank %u, with the functions for bytes between nodes, failed",
			      doing, link->other);
}

int comm_link_send(struct comm_link *link, const void *data, size_t bytes, struct base_error *error)
{
	int ret = link->broken ? -EPIPE : 0;

	if (!ret)
		ret = link->comm->send(link->comm->user, link->other, link->tag, data, bytes,
				       link->timeout_ms);
	return ret ? fail(link, ret, "sending to", error) : 0;
}

int comm_link_receive(struct comm_link *link, void *into, size_t bytes, struct base_error *error)
{
	int ret = link->broken ? -EPIPE : 0;

	if (!ret)
		ret = link->comm->receive(link->comm->user, link->other, link->tag, into, bytes,
					  link->timeout_ms);
	return ret ? fail(link, ret, "receiving from", error) : 0;
}

int comm_link_say(struct comm_link *link, enum comm_kind kind, uint64_t a, uint64_t b,
		  struct base_error *error)
{
	uint8_t bytes[COMM_HEAD_BYTES] = { 0 };

	base_put_le(bytes, MAGIC, 4);
	base_put_le(bytes + 4, (uint64_t)kind, 4);
	base_put_le(bytes + 8, a, 8);
	base_put_le(bytes + 16, b, 8);
	return comm_link_send(link, bytes, sizeof(bytes), error);
}

int comm_link_hear(struct comm_link *link, struct comm_head *head, struct base_error *error)
{
	uint8_t bytes[COMM_HEAD_BYTES];
	int ret = comm_link_receive(link, bytes, sizeof(bytes), error);

	if (ret)
		return ret;
	if (base_get_le(bytes, 4) != MAGIC)
		return comm_link_mistaken(link, error);
	head->kind = (uint32_t)base_get_le(bytes + 4, 4);
	head->a = base_get_le(bytes + 8, 8);
	head->b = base_get_le(bytes + 16, 8);
	return 0;
}

int comm_link_mistaken(struct comm_link *link, struct base_error *error)
{
	link->broken = true;
	return base_refuse_with(
		error, -EPROTO,
		"do both use the same version of this library, and functions that keep "
		"messages in order?",
		"rank %u sent something else than expected", link->other);
}

void comm_link_progress(const struct comm_link *link)
{
	if (link->comm->progress)
		link->comm->progress(link->comm->user);
}
