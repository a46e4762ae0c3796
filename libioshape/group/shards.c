/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of the ranks' shards. A writer puts its own shard, and those that other ranks send,
 * into one file. The other ranks send their shards to their writer.
 *
 * A rank that sends makes the complete archive of its shard, with headers and checksums, and sends
 * it as a stream. A writer on the same node gets only references: the bytes are in memory that it
 * maps. That is the staging memory, or, for a save that borrows the caller's memory, a window of a
 * few chunks through which the bytes are copied.
 */
#include "group/group.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Used by both sides ---------------------------------------------------------------------- */

/* Writes the address at which `writer` listens in this round. */
static void stream_address(const struct group_shard *shard, uint32_t writer, char *into,
			   size_t into_bytes)
{
	snprintf(into, into_bytes, "%016llx-%llu-%u", (unsigned long long)shard->group->id,
		 (unsigned long long)shard->round.number, writer);
}

/* Returns the tag of this round's streams. MPI promises only tags up to 32767. The group's id makes
 * it unlikely that groups which use the same functions have equal tags. */
static uint32_t stream_tag(const struct group_shard *shard)
{
	return (uint32_t)((shard->group->id % 16384 + shard->round.number) % 16384);
}

/* Blocks of a stream between nodes. Each block takes two messages, between which both sides wait
 * for each other. With 4 MiB, a save by rank 0 over gloo took a fifth longer. Two streams are
 * received at a time. */
#define STREAM_BLOCK_BYTES (16 * MIB)
#define STREAM_BLOCKS 3u

/* Compares the checksum of this rank's written shard with its digest, on which other ranks rely.
 * Returns IOSHAPE_E_CHANGED if they differ. */
static int check_digest(const struct group_shard *shard, uint32_t crc32, struct base_error *error)
{
	const uint32_t ranks = shard->group->options.ranks, own = shard->group->options.rank;
	bool needed = false;

	for (uint32_t rank = 0; rank < ranks; rank++)
		needed |= rank != own &&
			  shard->plan.ranks[rank].same == shard->plan.ranks[own].same;
	if (!needed || crc32 == shard->digest.crc32)
		return 0;
	return base_fail_reason_with(error, IOSHAPE_E_CHANGED,
				     "do not change it until the save has ended",
				     "the data has changed since the save began");
}

/* ---- The sender: its state ------------------------------------------------------------------- */

/* Fewer bytes are sent as they are: a reference costs as much as copying a few pages. */
#define SMALL_BYTES (32 * KIB)

/* Shards begin at multiples of this in the writer's file. */
#define PAGE_BYTES 4096u

/* Chunks in the window of a save that borrows: one is filled while the others are written. */
#define WINDOW_CHUNKS 4u

/* From this size on, two checksums are combined instead of being computed twice. */
#define COMBINE_BYTES (4 * KIB)

struct sending {
	struct group_shard *shard;
	struct stream_sender *sender;
	bool local;
	uint32_t crc32; /* checksum of all bytes so far */
	uint64_t total_bytes;
	struct group_watched watched; /* rank 0, which may send the verdict meanwhile */
	/* The window of a save that borrows. */
	struct save_chunk *window[WINDOW_CHUNKS];
	uint64_t window_end[WINDOW_CHUNKS]; /* by chunk: end in the stream of what it last held */
	size_t chunks;                      /* number of chunks in the window; 0 without a window */
	size_t current;                     /* chunk that is filled now */
	size_t used;                        /* bytes of it that are used */
};

/* Called while this rank waits for the writer. The writer or the whole save may have failed. */
static int go_on_sending(void *user, struct base_error *error)
{
	struct sending *sending = user;
	struct group_shard *shard = sending->shard;
	struct group_verdict verdict;
	int ret;

	ret = group_round_go_on(&shard->round, IOSHAPE_PHASE_WAIT, shard->round.done_bytes,
				sending->total_bytes, error);
	if (ret)
		return ret;
	ret = group_look(&shard->round, &group_verdict, 0, &sending->watched, &verdict, error);
	if (ret == -EAGAIN)
		return 0;
	/* The save has succeeded. So the writer has all bytes, and its answer is on the way. */
	if (!ret && !verdict.failure.code)
		return 0;
	return ret ? ret :
		     base_fail_reason(
			     error, -EPIPE,
			     "the checkpoint was abandoned before all its data was written");
}

/* ---- The sender: staged bytes ---------------------------------------------------------------- */

static uint64_t offset_in_stream(void *sender)
{
	return stream_sender_offset(sender);
}

/* Waits until the writer needs nothing before `offset` any more. */
static int await_taken(void *sender, uint64_t offset, struct base_error *error)
{
	return stream_sender_await_taken(sender, offset, error);
}

/* ---- The sender: borrowed bytes -------------------------------------------------------------- */

/*
 * Allocates the window, above the limit of staging memory. Later saves may already hold all of that
 * memory while they wait for this one to end, so this one must not wait for it.
 */
static int open_window(struct sending *sending, struct base_error *error)
{
	struct save_staging *pool = save_shared_pool(sending->shard->group->context);
	const struct save_task *task = sending->shard->task;
	size_t wanted = MIN(save_chunks_for(task->payload_bytes), WINDOW_CHUNKS);
	int ret = 0;

	while (!ret && sending->chunks < wanted) {
		ret = save_staging_get(pool, &sending->window[sending->chunks], error);
		sending->chunks += !ret;
	}
	return ret;
}

static void close_window(struct sending *sending)
{
	struct save_staging *pool = save_shared_pool(sending->shard->group->context);

	while (sending->chunks)
		save_staging_put(pool, sending->window[--sending->chunks]);
}

/* Finds the next free bytes of the window, *bytes at most. Their offset within a page is the one
 * that they will have in the writer's file, so that it can be written from there. */
static int find_free(struct sending *sending, size_t *bytes, struct base_error *error)
{
	const uint64_t offset = stream_sender_offset(sending->sender);
	int ret;

	sending->used += (offset - sending->used) % PAGE_BYTES;
	if (sending->used >= SAVE_CHUNK_BYTES) {
		sending->window_end[sending->current] = offset;
		sending->current = (sending->current + 1) % sending->chunks;
		ret = await_taken(sending->sender, sending->window_end[sending->current], error);
		if (ret)
			return ret;
		sending->used = offset % PAGE_BYTES;
	}
	*bytes = MIN(*bytes, SAVE_CHUNK_BYTES - sending->used);
	return 0;
}

static int put_through_window(struct sending *sending, const uint8_t *data, size_t bytes,
			      uint32_t *crc, struct base_error *error)
{
	const struct save_chunk *chunk;
	uint32_t piece_crc;
	size_t piece;
	int ret = 0;

	for (*crc = 0; !ret && bytes; data += piece, bytes -= piece) {
		piece = bytes;
		ret = find_free(sending, &piece, error);
		if (ret)
			return ret;
		chunk = sending->window[sending->current];
		piece_crc = base_copy_crc32(0, chunk->memory + sending->used, data, piece);
		ret = stream_sender_put_shared(sending->sender, chunk->memory + sending->used,
					       chunk->offset + sending->used, piece, piece_crc,
					       error);
		*crc = base_crc32_combine(*crc, piece_crc, piece);
		sending->used += piece;
	}
	return ret;
}

/* ---- The sender: sink of its archive --------------------------------------------------------- */

static uint64_t sink_offset(void *to)
{
	const struct sending *sending = to;

	return stream_sender_offset(sending->sender);
}

static int send_out(struct sending *sending, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	uint64_t offset;

	if (sending->local && bytes >= SMALL_BYTES) {
		if (sending->chunks)
			return put_through_window(sending, data, bytes, crc, error);
		if (save_find_staged(sending->shard->round.save, data, &offset)) {
			*crc = base_crc32(0, data, bytes);
			return stream_sender_put_shared(sending->sender, data, offset, bytes, *crc,
							error);
		}
	}
	*crc = base_crc32(0, data, bytes);
	return stream_sender_put(sending->sender, data, bytes, error);
}

static int sink_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	struct sending *sending = to;
	struct group_shard *shard = sending->shard;
	uint32_t piece_crc = 0;
	int ret;

	ret = send_out(sending, data, bytes, &piece_crc, error);
	if (ret)
		return ret;
	if (crc && bytes < COMBINE_BYTES)
		*crc = base_crc32(*crc, data, bytes);
	else if (crc)
		*crc = base_crc32_combine(*crc, piece_crc, bytes);
	sending->crc32 = base_crc32_combine(sending->crc32, piece_crc, bytes);
	return group_round_go_on(&shard->round, IOSHAPE_PHASE_WRITE,
				 MIN(stream_sender_offset(sending->sender), sending->total_bytes),
				 sending->total_bytes, error);
}

static const struct format_sink_ops sink_ops = { .offset = sink_offset, .put = sink_put };

/* ---- The sender: sending --------------------------------------------------------------------- */

/* Waits until the writer calls this rank: over the caller's functions, ranks send one after the
 * other. */
static int await_call(struct sending *sending, uint32_t writer, struct base_error *error)
{
	struct group_shard *shard = sending->shard;
	struct group_call call = { 0 };
	int ret;

	for (;;) {
		struct group_watched unused = { 0 };

		ret = group_look(&shard->round, &group_call, writer, &unused, &call, error);
		if (ret && ret != -EAGAIN)
			return ret;
		if (call.rank >= shard->group->options.rank)
			return 0;
		ret = go_on_sending(sending, error);
		if (ret)
			return ret;
		group_round_rest(&shard->round);
	}
}

static int open_sender(struct sending *sending, struct base_error *error)
{
	struct group_shard *shard = sending->shard;
	const struct ioshape_group *group = shard->group;
	const struct stream_wait wait = { go_on_sending, sending };
	uint32_t writer = group_writer_of(group, shard->plan.mode, group->options.rank);
	char address[STREAM_ADDRESS_BYTES];
	int ret, fd;

	sending->local = group_is_local(group, writer);
	if (!sending->local) {
		ret = await_call(sending, writer, error);
		/* From here on the writer receives, so failures are sent on the stream. */
		if (!ret)
			ret = group_tell(&shard->round, &group_here, NULL, error);
		return ret ? ret :
			     stream_sender_open_comm(&sending->sender, group->options.comm, writer,
						     stream_tag(shard), group->options.deadline_ms,
						     &wait, error);
	}
	if (shard->task->borrow && shard->task->payload_bytes) {
		ret = open_window(sending, error);
		if (ret)
			return ret;
	}
	ret = save_shared_fd(group->context, &fd, error);
	if (ret)
		return ret;
	stream_address(shard, writer, address, sizeof(address));
	return stream_sender_open_local(&sending->sender, address, group->options.rank, fd, &wait,
					error);
}

static int send_shard(struct sending *sending, struct base_error *error)
{
	const struct group_shard *shard = sending->shard;
	const struct format_sink sink = { &sink_ops, sending };
	struct format_writer *zip = NULL;
	int ret;

	ret = format_writer_new(&zip, sink, shard->task->path, error);
	if (!ret)
		ret = save_write_payload(shard->round.save, zip, NULL, error);
	format_writer_free(zip);
	if (!ret)
		ret = check_digest(sending->shard, sending->crc32, error);
	if (!ret)
		ret = stream_sender_end(sending->sender, sending->crc32, error);
	return ret;
}

int group_send_shard(struct group_shard *shard, struct base_error *error)
{
	struct sending sending = { .shard = shard, .total_bytes = shard->task->expected_bytes };
	const struct ioshape_group *group = shard->group;
	const uint32_t rank = group->options.rank;
	uint64_t begin_ns = base_now_ns();
	int ret;

	ret = open_sender(&sending, error);
	if (!ret) {
		const struct save_outlet outlet = { offset_in_stream, await_taken, sending.sender };

		save_keep_chunks(shard->round.save, &outlet);
		ret = send_shard(&sending, error);
		save_keep_chunks(shard->round.save, NULL);
		shard->report->file_bytes = stream_sender_offset(sending.sender);
	}
	/* The stream reports the end of the writer's process sooner than the writer's lock does.
	 * But the stream knows only the process, so name the rank here. */
	if (ret == -ECONNRESET) {
		const struct base_error gone = *error;

		memset(error, 0, sizeof(*error));
		ret = group_fail_of_rank(group, group_writer_of(group, shard->plan.mode, rank),
					 &gone, error);
	}
	stream_sender_free(sending.sender, ret ? error->text : NULL);
	close_window(&sending);
	shard->report->write_s = base_seconds(base_now_ns() - begin_ns);
	return ret;
}

/* ---- The writer: its state ------------------------------------------------------------------- */

/* A file that this rank writes. */
struct writing {
	struct group_shard *shard;
	struct io_writer *file;    /* NULL before it was opened */
	struct format_writer *zip; /* archive of a single shard, or shard file */
	struct stream_listener *listener;
	/* Stream of the next rank on another node. Its bytes travel while the shard before it is
	 * written. */
	struct stream_receiver *next;
	uint32_t next_rank; /* rank that was called; 0: none */
	/* Memory into which these streams are received, alternating. It is reused, because touching
	 * new memory takes as long as receiving the bytes. */
	void *blocks[2];
	unsigned streams;   /* number of such streams so far */
	uint64_t looked_ns; /* time of the last look for the rank that was called */
	struct group_written *written;
	char path[PATH_MAX];
};

/* ---- The writer: shards of other ranks ------------------------------------------------------- */

/* Interval between two looks for the rank that was called. */
#define LOOK_NS 20000000u

/* Fails as `rank` said in its message. A rank that cannot send its shard puts one into the
 * store. */
static int fail_as_told(const struct group_shard *shard, uint32_t rank, struct base_error *theirs,
			struct base_error *error)
{
	if (!theirs->code)
		base_fail_reason(theirs, -EPROTO, "it wrote its shard instead of sending it");
	/* -EAGAIN would mean to the caller that there is no message yet. */
	if (theirs->code == -EAGAIN)
		theirs->code = -EPROTO;
	return group_fail_of_rank(shard->group, rank, theirs, error);
}

static int check_failure(struct group_shard *shard, uint32_t rank, struct base_error *error)
{
	struct group_watched watched = { 0 };
	struct group_written theirs = { 0 };
	int ret = group_look(&shard->round, &group_done, rank, &watched, &theirs, error);

	if (!ret)
		ret = fail_as_told(shard, rank, &theirs.failure, error);
	return ret == -EAGAIN ? 0 : ret;
}

/* Waits for the message of a rank that failed. The stream says only that the rank failed; the
 * message, which follows at once, has the code. */
static int hear_failure(struct group_shard *shard, uint32_t rank, struct base_error *error)
{
	struct base_error named = { 0 }, unheard = { 0 };
	struct group_written theirs = { 0 };

	if (!group_hear(&shard->round, &group_done, rank, &theirs, &unheard)) {
		fail_as_told(shard, rank, &theirs.failure, &named);
		*error = named;
	}
	return error->code;
}

/* Called while the writer waits for a stream. Checks for a timeout and for a failure of its
 * rank. */
static int go_on_writing(void *user, struct base_error *error)
{
	struct group_shard *shard = user;
	struct ioshape_group *group = shard->group;
	uint64_t now_ns = base_now_ns();
	int ret;

	ret = group_round_go_on(&shard->round, IOSHAPE_PHASE_WRITE, shard->round.done_bytes,
				shard->plan.total_bytes, error);
	if (ret)
		return ret;
	if (shard->awaited_bytes != shard->round.done_bytes || !shard->awaited_ns) {
		shard->awaited_bytes = shard->round.done_bytes;
		shard->awaited_ns = now_ns;
	}
	if (now_ns - shard->awaited_ns > group->deadline_ns) {
		ret = base_fail_reason(error, -ETIMEDOUT, "%s sent nothing for %u s (deadline_ms)",
				       GROUP_SHOWN_RANK(group, shard->awaited),
				       group->options.deadline_ms / 1000);
		base_error_of_rank(error, shard->awaited);
		return ret;
	}
	return check_failure(shard, shard->awaited, error);
}

static bool writes_for(const struct group_shard *shard, uint32_t rank)
{
	return group_is_kept(&shard->plan, rank) &&
	       group_writer_of(shard->group, shard->plan.mode, rank) == shard->group->options.rank;
}

/* Calls the next rank on another node after rank `after`. These ranks send one after the other. */
static int call_next(struct writing *writing, uint32_t after, struct base_error *error)
{
	struct group_shard *shard = writing->shard;
	const struct ioshape_group *group = shard->group;
	uint32_t rank = after + 1;

	while (rank < group->options.ranks &&
	       (!writes_for(shard, rank) || group_is_local(group, rank)))
		rank++;
	if (writing->next_rank || rank >= group->options.ranks)
		return 0;
	writing->next_rank = rank;
	return group_tell(&shard->round, &group_call, &(struct group_call){ rank }, error);
}

/*
 * Opens the stream of the rank that was called, if that rank has come. A receive cannot be
 * cancelled, so it must not begin earlier. The stream's first blocks travel while the shard before
 * it is written.
 */
static int receive_next(struct writing *writing, struct base_error *error)
{
	struct group_shard *shard = writing->shard;
	const struct ioshape_group *group = shard->group;
	const struct stream_wait wait = { go_on_writing, shard };
	struct group_watched watched = { 0 };
	uint64_t now_ns = base_now_ns();
	void **memory;
	int ret;

	if (!writing->next_rank || writing->next || now_ns - writing->looked_ns < LOOK_NS)
		return 0;
	writing->looked_ns = now_ns;
	ret = group_look(&shard->round, &group_here, writing->next_rank, &watched, NULL, error);
	if (ret)
		return ret == -EAGAIN ? 0 : ret;
	memory = &writing->blocks[writing->streams++ % 2];
	if (!*memory)
		*memory = base_map(STREAM_BLOCKS * STREAM_BLOCK_BYTES);
	if (!*memory)
		return base_no_memory(error, "receive buffers", STREAM_BLOCKS * STREAM_BLOCK_BYTES);
	return stream_receiver_open_comm(&writing->next, group->options.comm, writing->next_rank,
					 stream_tag(shard), STREAM_BLOCK_BYTES, STREAM_BLOCKS,
					 *memory, group->options.deadline_ms, &wait, error);
}

static int open_stream(struct writing *writing, uint32_t rank, struct stream_receiver **receiver,
		       struct base_error *error)
{
	struct group_shard *shard = writing->shard;
	const struct stream_wait wait = { go_on_writing, shard };
	int ret;

	shard->awaited = rank;
	shard->awaited_ns = 0;
	if (group_is_local(shard->group, rank))
		return stream_receiver_open_local(receiver, writing->listener, rank, &wait, error);
	ret = call_next(writing, rank - 1, error);
	while (!ret && !writing->next) {
		ret = receive_next(writing, error);
		if (!ret && !writing->next)
			ret = go_on_writing(shard, error);
		if (!ret && !writing->next)
			group_round_rest(&shard->round);
	}
	if (ret)
		return ret;
	*receiver = writing->next;
	writing->next = NULL;
	writing->next_rank = 0;
	return call_next(writing, rank, error);
}

/* Puts a run of bytes. The file is written from the memory in which they arrived. If a checksum
 * came with them, they are not read for it again. */
static int put_run(struct writing *writing, const struct stream_receiver *receiver,
		   const void *data, size_t bytes, struct base_error *error)
{
	uint32_t crc32;
	int ret;

	if (stream_receiver_lasts(receiver))
		io_writer_borrow(writing->file, data, bytes);
	if (stream_receiver_summed(receiver, &crc32))
		ret = format_writer_put_summed(writing->zip, data, bytes, crc32, error);
	else
		ret = format_writer_put(writing->zip, data, bytes, error);
	io_writer_borrow(writing->file, NULL, 0);
	return ret;
}

/* Waits until fewer bytes of the file are in flight: only then can the sender go on. */
static int await_less(struct writing *writing, struct base_error *error)
{
	return io_writer_wait_written(writing->file, io_writer_written(writing->file) + 1, error);
}

/* Receives one shard, which begins at offset `begin` of the file. */
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
					MAX(io_writer_written(writing->file), begin) - begin);
	}
}

/* Ends the member of `rank`, and records its position and checksum. */
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
	writing->written->shards[writing->written->count++] =
		(struct group_written_shard){ rank, entry->crc32, entry->data_offset,
					      entry->bytes };
	return 0;
}

static int put_shard_of(struct writing *writing, uint32_t rank, struct base_error *error)
{
	struct group_shard *shard = writing->shard;
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
		ret = base_fail_reason(
			error, -EIO,
			"the data from %s was damaged in transit: its checksum does not match",
			GROUP_SHOWN_RANK(shard->group, rank));
		base_error_of_rank(error, rank);
	}
	/* Before the receiver is freed, the file must stop reading from its memory. */
	if (ret)
		io_writer_fail(writing->file);
	io_writer_wait_written(writing->file, UINT64_MAX, NULL);
	stream_receiver_free(receiver);
	/* A stream that broke off may leave bytes behind, or a rank that does not receive any
	 * more. */
	if (ret && ret != -ECANCELED && !group_is_local(shard->group, rank))
		shard->group->comm_failed = true;
	/* If the error names a rank, its stream has reported a failure. If it names none, this
	 * process was stopped. */
	return ret == -ECANCELED && error->known & BASE_KNOWS_RANK ?
		       hear_failure(shard, rank, error) :
		       ret;
}

/* ---- The writer: its own shard --------------------------------------------------------------- */

static int put_own_member(struct writing *writing, uint32_t rank, struct base_error *error)
{
	struct format_writer *zip = NULL;
	uint32_t crc;
	int ret;

	ret = format_writer_new(&zip, format_sink_of_member(writing->zip),
				writing->shard->task->path, error);
	if (!ret)
		ret = save_write_payload(writing->shard->round.save, zip, writing->file, error);
	format_writer_free(zip);
	if (!ret)
		ret = end_member(writing, rank, &crc, error);
	return ret ? ret : check_digest(writing->shard, crc, error);
}

/* ---- The writer: the file -------------------------------------------------------------------- */

static int put_bundle(struct writing *writing, struct io_writer *file, struct base_error *error)
{
	struct group_shard *shard = writing->shard;
	const struct ioshape_group *group = shard->group;
	char name[FORMAT_SHARD_NAME_BYTES];
	int ret;

	ret = format_writer_new_bundle(&writing->zip, format_sink_of_file(file), writing->path,
				       shard->plan.alignment, error);
	for (uint32_t rank = 0; !ret && rank < group->options.ranks; rank++) {
		if (!writes_for(shard, rank))
			continue;
		format_shard_name(name, rank);
		ret = format_writer_begin(writing->zip, name, FORMAT_UNKNOWN_BYTES, 0, error);
		if (ret)
			break;
		if (rank == group->options.rank)
			ret = put_own_member(writing, rank, error);
		else
			ret = put_shard_of(writing, rank, error);
	}
	return ret ? ret : format_writer_finish(writing->zip, NULL, error);
}

static int put_single(struct writing *writing, struct io_writer *file, struct base_error *error)
{
	int ret = format_writer_new(&writing->zip, format_sink_of_file(file), writing->path, error);

	return ret ? ret :
		     save_write_payload(writing->shard->round.save, writing->zip, file, error);
}

static int put_file(void *user, struct io_writer *file, struct base_error *error)
{
	struct writing *writing = user;
	const struct group_shard *shard = writing->shard;
	struct group_written *written = writing->written;
	bool single = shard->plan.mode == IOSHAPE_MODE_EACH;
	int ret;

	writing->file = file;
	ret = single ? put_single(writing, file, error) : put_bundle(writing, file, error);
	if (ret)
		return ret;
	written->bytes = io_writer_offset(file);
	written->crc32 = io_writer_crc32(file);
	if (single)
		written->shards[written->count++] =
			(struct group_written_shard){ shard->group->options.rank, written->crc32, 0,
						      written->bytes };
	return single ? check_digest(shard, written->crc32, error) : 0;
}

/* Frees the writer's state. Ranks that still send are told to stop. */
static void end_writing(struct writing *writing)
{
	stream_receiver_free(writing->next);
	for (size_t i = 0; i < ARRAY_LENGTH(writing->blocks); i++)
		base_unmap(writing->blocks[i], STREAM_BLOCKS * STREAM_BLOCK_BYTES);
	stream_listener_close(writing->listener);
	format_writer_free(writing->zip);
}

static int name_file(struct writing *writing, struct base_error *error)
{
	const struct group_shard *shard = writing->shard;
	const struct ioshape_group *group = shard->group;
	char *name = writing->written->name;
	int bytes;

	if (shard->plan.mode == IOSHAPE_MODE_EACH)
		format_shard_name(name, group->options.rank);
	else if (shard->plan.mode == IOSHAPE_MODE_NODE)
		snprintf(name, FORMAT_SHARD_NAME_BYTES, "node-%05u.zip",
			 group->ranks[group->options.rank].node);
	else
		snprintf(name, FORMAT_SHARD_NAME_BYTES, "ranks.zip");
	bytes = snprintf(writing->path, sizeof(writing->path), "%s/%s/%s",
			 group_directory_of(shard), shard->plan.attempt, name);
	if (bytes < 0 || (size_t)bytes >= sizeof(writing->path))
		return base_fail(error, -ENAMETOOLONG, "cannot write into \"%s\"",
				 group_directory_of(shard));
	return 0;
}

/* Returns the size of the file that this rank writes, or 0 if it would be too large. Writing
 * reports that in time. */
static uint64_t expected_bytes(const struct group_shard *shard)
{
	struct format_length length = { 0 };
	char name[FORMAT_SHARD_NAME_BYTES];
	int ret = 0;

	if (shard->plan.mode == IOSHAPE_MODE_EACH)
		return shard->task->expected_bytes;
	for (uint32_t rank = 0; !ret && rank < shard->group->options.ranks; rank++) {
		if (!writes_for(shard, rank))
			continue;
		format_shard_name(name, rank);
		ret = format_length_add_member(&length, strlen(name), shard->plan.ranks[rank].bytes,
					       shard->plan.alignment);
	}
	return ret ? 0 : format_length_of(&length);
}

uint32_t group_count_files(const struct group_shard *shard, enum ioshape_mode mode)
{
	const struct ioshape_group *group = shard->group;
	/* By writer. Without memory the result is the highest possible number, which serves as
	 * well. */
	bool *counted = calloc(group->options.ranks, sizeof(*counted));
	uint32_t files = 0;

	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		const uint32_t writer = group_writer_of(group, mode, rank);

		if (!group_is_kept(&shard->plan, rank) || (counted && counted[writer]))
			continue;
		files++;
		if (counted)
			counted[writer] = true;
	}
	free(counted);
	return files;
}

static int begin_file(struct writing *writing, struct io_file_options *options,
		      struct base_error *error)
{
	struct group_shard *shard = writing->shard;
	const struct ioshape_group *group = shard->group;
	char address[STREAM_ADDRESS_BYTES];
	uint32_t count = 0, senders = 0; /* ranks of this node that send */

	*options = shard->task->file_options;
	options->progress = group_round_track;
	options->progress_user = &shard->round;
	options->want_crc32 = true;
	options->no_replace = false; /* applies to the checkpoint, not to its files */
	options->no_sync = false;    /* the manifest lists only what is on stable storage */
	for (uint32_t rank = 0; rank < group->options.ranks; rank++) {
		if (!writes_for(shard, rank))
			continue;
		count++;
		senders += rank != group->options.rank && group_is_local(group, rank);
	}
	options->expected_bytes = expected_bytes(shard);
	options->exact = options->expected_bytes > 0;
	options->progress_total = options->expected_bytes;
	options->files = group_count_files(shard, shard->plan.mode);
	writing->written->shards = calloc(count, sizeof(*writing->written->shards));
	if (!writing->written->shards)
		return base_no_memory(error, "shards", count * sizeof(*writing->written->shards));
	if (!senders)
		return 0;
	/* Listen before waiting for a slot, so that other ranks can connect meanwhile. */
	stream_address(shard, group->options.rank, address, sizeof(address));
	return stream_listener_open(&writing->listener, address, group->options.ranks, error);
}

int group_write_shards(struct group_shard *shard, struct group_written *written,
		       struct base_error *error)
{
	const struct save_watch watch = save_watch_of(shard->round.save);
	struct writing writing = { .shard = shard, .written = written };
	struct save_file file = {
		.context = shard->group->context,
		.path = writing.path,
		.downgrades = shard->downgrades,
		.in_new_directory = true,
		.put = put_file,
		.user = &writing,
	};
	int ret;

	ret = name_file(&writing, error);
	if (!ret)
		ret = begin_file(&writing, &file.options, error);
	if (!ret)
		ret = save_write_file(&file, &watch, NULL, shard->report, error);
	end_writing(&writing);
	return ret;
}
