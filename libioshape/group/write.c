/* SPDX-License-Identifier: Apache-2.0 */
/* The writers of a generation: their own part, and those that other ranks send, in one file. */
#include "group/group.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A file that is being written. */
struct writing {
	struct group_part *part;
	struct io_writer *file;    /* once there is one */
	struct format_writer *zip; /* of one part alone, or of a bundle */
	struct stream_listener *listener;
	/* Of the rank that is next, if it comes over the caller's functions: its bytes are on their
	 * way while the one before it is written. */
	struct stream_receiver *next;
	uint32_t next_rank; /* that was called; 0: none */
	/* What such streams are received into, alternating: to touch new memory takes as long as
	 * the bytes do. */
	void *blocks[2];
	unsigned streams;   /* so far */
	uint64_t looked_ns; /* for it */
	struct group_written *written;
	char path[PATH_MAX];
};

/* ---- What other ranks send ------------------------------------------------------------------- */

/* How often it is looked for a rank that was called. */
#define LOOK_NS 20000000u

/* A rank that cannot send its part says so on the board. */
static int fail_as_told(const struct group_part *part, uint32_t rank, struct base_error *theirs,
			struct base_error *error)
{
	if (!theirs->code)
		base_refuse(theirs, -EPROTO, "it wrote what it was to send");
	/* That would mean that there is nothing yet. */
	if (theirs->code == -EAGAIN)
		theirs->code = -EPROTO;
	return group_fail_of_rank(part->group, rank, theirs, error);
}

static int check_failure(struct group_part *part, uint32_t rank, struct base_error *error)
{
	struct group_watched watched = { 0 };
	struct group_written theirs = { 0 };
	int ret = group_look(&part->round, &group_done, rank, &watched, &theirs, error);

	if (!ret)
		ret = fail_as_told(part, rank, &theirs.failure, error);
	return ret == -EAGAIN ? 0 : ret;
}

/* A stream tells that its rank has failed; the message, which follows at once, with what code. */
static int hear_failure(struct group_part *part, uint32_t rank, struct base_error *error)
{
	struct base_error noted = { 0 }, unheard = { 0 };
	struct group_written theirs = { 0 };

	if (!group_hear(&part->round, &group_done, rank, &theirs, NULL, NULL, &unheard)) {
		fail_as_told(part, rank, &theirs.failure, &noted);
		*error = noted;
	}
	return error->code;
}

/* While a stream is waited for. */
static int go_on(void *user, struct base_error *error)
{
	struct group_part *part = user;
	struct ioshape_group *group = part->group;
	uint64_t now_ns = base_now_ns();
	int ret;

	ret = group_round_go_on(&part->round, IOSHAPE_PHASE_WRITE, part->round.done_bytes,
				part->plan.total_bytes, error);
	if (ret)
		return ret;
	if (part->awaited_bytes != part->round.done_bytes || !part->awaited_ns) {
		part->awaited_bytes = part->round.done_bytes;
		part->awaited_ns = now_ns;
	}
	if (now_ns - part->awaited_ns > group->deadline_ns) {
		ret = base_refuse(error, -ETIMEDOUT, "%s sent nothing for %u s (deadline_ms)",
				  GROUP_SHOWN_RANK(group, part->awaited),
				  group->options.deadline_ms / 1000);
		base_error_of_rank(error, part->awaited);
		return ret;
	}
	return check_failure(part, part->awaited, error);
}

static bool writes_for(const struct group_part *part, uint32_t rank)
{
	return group_is_kept(&part->plan, rank) &&
	       group_writer_of(part->group, part->plan.mode, rank) == part->group->options.rank;
}

/* Ranks of other nodes send their parts when they are called, one after the other. */
static int call_next(struct writing *writing, uint32_t after, struct base_error *error)
{
	struct group_part *part = writing->part;
	const struct ioshape_group *group = part->group;
	uint32_t rank = after + 1;

	while (rank < group->options.ranks &&
	       (!writes_for(part, rank) || group_is_local(group, rank)))
		rank++;
	if (writing->next_rank || rank >= group->options.ranks)
		return 0;
	writing->next_rank = rank;
	return group_tell(&part->round, &group_call, &(struct group_call){ rank }, error);
}

/*
 * The one that was called, if it has come: only then it is received, because that cannot be broken
 * off. Its first blocks travel while the rank before it is still being written.
 */
static int receive_next(struct writing *writing, struct base_error *error)
{
	struct group_part *part = writing->part;
	const struct ioshape_group *group = part->group;
	const struct stream_wait wait = { go_on, part };
	struct group_watched watched = { 0 };
	uint64_t now_ns = base_now_ns();
	void **memory;
	int ret;

	if (!writing->next_rank || writing->next || now_ns - writing->looked_ns < LOOK_NS)
		return 0;
	writing->looked_ns = now_ns;
	ret = group_look(&part->round, &group_here, writing->next_rank, &watched, NULL, error);
	if (ret)
		return ret == -EAGAIN ? 0 : ret;
	memory = &writing->blocks[writing->streams++ % 2];
	if (!*memory)
		*memory = base_map(GROUP_STREAM_BLOCKS * GROUP_STREAM_BLOCK_BYTES);
	if (!*memory)
		return base_no_memory(error, "blocks of bytes to receive",
				      GROUP_STREAM_BLOCKS * GROUP_STREAM_BLOCK_BYTES);
	return stream_receiver_open_comm(&writing->next, group->options.comm, writing->next_rank,
					 group_stream_tag(part), GROUP_STREAM_BLOCK_BYTES,
					 GROUP_STREAM_BLOCKS, *memory, group->options.deadline_ms,
					 &wait, error);
}

static int open_stream(struct writing *writing, uint32_t rank, struct stream_receiver **receiver,
		       struct base_error *error)
{
	struct group_part *part = writing->part;
	const struct stream_wait wait = { go_on, part };
	int ret;

	part->awaited = rank;
	part->awaited_ns = 0;
	if (group_is_local(part->group, rank))
		return stream_receiver_open_local(receiver, writing->listener, rank, &wait, error);
	ret = call_next(writing, rank - 1, error);
	while (!ret && !writing->next) {
		ret = receive_next(writing, error);
		if (!ret && !writing->next)
			ret = go_on(part, error);
		if (!ret && !writing->next)
			group_round_rest(&part->round);
	}
	if (ret)
		return ret;
	*receiver = writing->next;
	writing->next = NULL;
	writing->next_rank = 0;
	return call_next(writing, rank, error);
}

/* The file is written from where the bytes have come, and of those whose sum came with them no byte
 * is looked at. */
static int put_run(struct writing *writing, const struct stream_receiver *receiver,
		   const void *data, size_t bytes, struct base_error *error)
{
	uint32_t crc32;
	int ret;

	if (stream_receiver_lasts(receiver))
		io_writer_lend(writing->file, data, bytes);
	if (stream_receiver_summed(receiver, &crc32))
		ret = format_writer_put_summed(writing->zip, data, bytes, crc32, error);
	else
		ret = format_writer_put(writing->zip, data, bytes, error);
	io_writer_lend(writing->file, NULL, 0);
	return ret;
}

/* Nothing goes on before the file has less under way. */
static int await_less(struct writing *writing, struct base_error *error)
{
	return io_writer_settle(writing->file, io_writer_settled(writing->file) + 1, error);
}

/* Of the rank whose part begins there in the file. */
static int receive(struct writing *writing, struct stream_receiver *receiver, uint64_t begin,
		   struct base_error *error)
{
	const void *data;
	size_t bytes;
	int ret;

	for (;;) {
		ret = stream_receiver_next(receiver, &data, &bytes, error);
		if (ret == -EAGAIN && !error->code)
			ret = await_less(writing, error);
		else if (ret || !bytes)
			return ret;
		else
			ret = put_run(writing, receiver, data, bytes, error);
		if (!ret)
			ret = receive_next(writing, error);
		if (ret)
			return ret;
		stream_receiver_release(receiver,
					MAX(io_writer_settled(writing->file), begin) - begin);
	}
}

/* What the bundle has got of this rank. */
static int end_member(struct writing *writing, uint32_t rank, uint32_t *crc,
		      struct base_error *error)
{
	const struct format_entry *entry;
	uint64_t count;
	int ret = format_writer_end(writing->zip, error);

	if (ret)
		return ret;
	entry = format_writer_entries(writing->zip, &count) + count - 1;
	*crc = entry->crc32;
	writing->written->parts[writing->written->count++] =
		(struct group_written_part){ rank, entry->crc32, entry->data_offset, entry->bytes };
	return 0;
}

static int put_part_of(struct writing *writing, uint32_t rank, struct base_error *error)
{
	struct group_part *part = writing->part;
	struct stream_receiver *receiver = NULL;
	uint32_t crc;
	int ret;

	ret = open_stream(writing, rank, &receiver, error);
	if (!ret) {
		stream_receiver_hold(receiver);
		ret = receive(writing, receiver, io_writer_offset(writing->file), error);
	}
	if (!ret)
		ret = end_member(writing, rank, &crc, error);
	if (!ret && stream_receiver_crc32(receiver) != crc) {
		ret = base_refuse(error, -EIO,
				  "what %s sent was damaged on its way: its checksum is another",
				  GROUP_SHOWN_RANK(part->group, rank));
		base_error_of_rank(error, rank);
	}
	/* The file reads no more of its memory. */
	if (ret)
		io_writer_fail(writing->file);
	io_writer_settle(writing->file, UINT64_MAX, NULL);
	stream_receiver_free(receiver);
	/* What was broken off may leave bytes behind, or a rank that hears nothing more. */
	if (ret && ret != -ECANCELED && !group_is_local(part->group, rank))
		part->group->comm_failed = true;
	/* Of a rank, and not of this one, which may have been stopped, too. */
	return ret == -ECANCELED && error->known & BASE_KNOWS_RANK ?
		       hear_failure(part, rank, error) :
		       ret;
}

/* ---- Our own part ---------------------------------------------------------------------------- */

static int put_own_member(struct writing *writing, uint32_t rank, struct base_error *error)
{
	struct format_writer *zip = NULL;
	uint32_t crc;
	int ret;

	ret = format_writer_new(&zip, format_sink_of_member(writing->zip),
				writing->part->task->path, error);
	if (!ret)
		ret = save_write_payload(writing->part->round.save, zip, writing->file, error);
	format_writer_free(zip);
	if (!ret)
		ret = end_member(writing, rank, &crc, error);
	return ret ? ret : group_check_digest(writing->part, crc, error);
}

/* ---- The file -------------------------------------------------------------------------------- */

static int put_bundle(struct writing *writing, struct io_writer *file, struct base_error *error)
{
	struct group_part *part = writing->part;
	const struct ioshape_group *group = part->group;
	char name[FORMAT_PART_NAME_BYTES];
	int ret;

	ret = format_writer_new_bundle(&writing->zip, format_sink_of_file(file), writing->path,
				       part->plan.alignment, error);
	for (uint32_t rank = 0; !ret && rank < group->options.ranks; rank++) {
		if (!writes_for(part, rank))
			continue;
		format_part_name(name, rank);
		ret = format_writer_begin(writing->zip, name, FORMAT_UNKNOWN_BYTES, 0, error);
		if (ret)
			break;
		if (rank == group->options.rank)
			ret = put_own_member(writing, rank, error);
		else
			ret = put_part_of(writing, rank, error);
	}
	return ret ? ret : format_writer_finish(writing->zip, NULL, error);
}

static int put_single(struct writing *writing, struct io_writer *file, struct base_error *error)
{
	int ret = format_writer_new(&writing->zip, format_sink_of_file(file), writing->path, error);

	return ret ? ret : save_write_payload(writing->part->round.save, writing->zip, file, error);
}

static int put_file(void *user, struct io_writer *file, struct base_error *error)
{
	struct writing *writing = user;
	const struct group_part *part = writing->part;
	struct group_written *written = writing->written;
	bool single = part->plan.mode == IOSHAPE_MODE_EACH;
	int ret;

	writing->file = file;
	ret = single ? put_single(writing, file, error) : put_bundle(writing, file, error);
	if (ret)
		return ret;
	written->bytes = io_writer_offset(file);
	written->crc32 = io_writer_crc32(file);
	if (single)
		written->parts[written->count++] =
			(struct group_written_part){ part->group->options.rank, written->crc32, 0,
						     written->bytes };
	return single ? group_check_digest(part, written->crc32, error) : 0;
}

/* Ranks that still send something are told to stop. */
static void end_writing(struct writing *writing)
{
	stream_receiver_free(writing->next);
	for (size_t i = 0; i < ARRAY_LENGTH(writing->blocks); i++)
		base_unmap(writing->blocks[i], GROUP_STREAM_BLOCKS * GROUP_STREAM_BLOCK_BYTES);
	stream_listener_close(writing->listener);
	format_writer_free(writing->zip);
}

static int name_file(struct writing *writing, struct base_error *error)
{
	const struct group_part *part = writing->part;
	const struct ioshape_group *group = part->group;
	char *name = writing->written->name;
	int bytes;

	if (part->plan.mode == IOSHAPE_MODE_EACH)
		format_part_name(name, group->options.rank);
	else if (part->plan.mode == IOSHAPE_MODE_NODE)
		snprintf(name, FORMAT_PART_NAME_BYTES, "node-%05u.zip",
			 group->ranks[group->options.rank].node);
	else
		snprintf(name, FORMAT_PART_NAME_BYTES, "ranks.zip");
	bytes = snprintf(writing->path, sizeof(writing->path), "%s/%s/%s", group_place_of(part),
			 part->plan.attempt, name);
	if (bytes < 0 || (size_t)bytes >= sizeof(writing->path))
		return base_fail(error, -ENAMETOOLONG, "cannot write into \"%s\"",
				 group_place_of(part));
	return 0;
}

/* Of the file that this rank writes; 0 if it would be too large, which is found out in time. */
static uint64_t expected_bytes(const struct group_part *part)
{
	struct format_length length = { 0 };
	char name[FORMAT_PART_NAME_BYTES];
	int ret = 0;

	if (part->plan.mode == IOSHAPE_MODE_EACH)
		return part->task->expected_bytes;
	for (uint32_t rank = 0; !ret && rank < part->group->options.ranks; rank++) {
		if (!writes_for(part, rank))
			continue;
		format_part_name(name, rank);
		ret = format_length_add_member(&length, strlen(name), part->plan.ranks[rank].bytes,
					       part->plan.alignment);
	}
	return ret ? 0 : format_length_of(&length);
}

static int begin_file(struct writing *writing, struct io_file_options *options,
		      struct base_error *error)
{
	struct group_part *part = writing->part;
	const struct ioshape_group *group = part->group;
	char address[STREAM_ADDRESS_BYTES];
	uint32_t count = 0, senders = 0; /* on this node */

	*options = part->task->file_options;
	options->progress = group_round_track;
	options->progress_user = &part->round;
	options->want_crc32 = true;
	options->no_replace = false; /* that is for the generation */
	options->no_sync = false;    /* a manifest vouches for what is on stable storage */
	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		if (!writes_for(part, rank))
			continue;
		count++;
		senders += rank != group->options.rank && group_is_local(group, rank);
	}
	options->expected_bytes = expected_bytes(part);
	options->exact = options->expected_bytes > 0;
	options->progress_total = options->expected_bytes;
	options->files = group_count_files(part, part->plan.mode);
	writing->written->parts = calloc(count, sizeof(*writing->written->parts));
	if (!writing->written->parts)
		return base_no_memory(error, "parts", count * sizeof(*writing->written->parts));
	if (!senders)
		return 0;
	/* Before the slot: the others may come now. */
	group_stream_address(part, group->options.rank, address, sizeof(address));
	return stream_listener_open(&writing->listener, address, error);
}

int group_write_parts(struct group_part *part, struct group_written *written,
		      struct base_error *error)
{
	const struct save_watch watch = save_watch_of(part->round.save);
	struct writing writing = { .part = part, .written = written };
	struct save_file file = {
		.context = part->group->context,
		.path = writing.path,
		.notes = part->notes,
		.in_new_directory = true,
		.put = put_file,
		.user = &writing,
	};
	int ret;

	ret = name_file(&writing, error);
	if (!ret)
		ret = begin_file(&writing, &file.options, error);
	if (!ret)
		ret = save_write_file(&file, &watch, NULL, part->report, error);
	end_writing(&writing);
	return ret;
}
