/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a file front to back. Bytes gather in buffers, full buffers leave through the queue, and
 * in the end the file is synced and renamed into place (atomic_file.c).
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Smallest range to borrow: less is copied faster than the kernel pins its pages. */
#define LEAST_LOAN_BYTES (64 * KIB)

/* First length of a file that is written directly and whose length is not known. */
#define LEAST_LENGTH (64 * MIB)

/* Most interrupted calls in a row. */
#define MAX_INTERRUPTIONS 100

struct io_writer {
	struct io_queue *queue;
	struct io_file_options options;
	struct io_destination file;
	/* Buffer that is being filled; NULL at the beginning of a block. */
	struct io_buffer *buffer;
	size_t used;               /* filled bytes of that buffer */
	size_t block_bytes;        /* the buffer is sent when this much is filled */
	size_t unit;               /* unit of direct I/O; 1: no direct I/O */
	uint64_t submitted;        /* bytes in the blocks that were sent */
	const uint8_t *borrowable; /* memory that puts may borrow from instead of copying */
	size_t borrowable_bytes;
	uint32_t crc;        /* CRC-32 of all bytes put, if want_crc32 */
	bool through_engine; /* at least one block went through the engine */
	bool was_direct;
	bool failed;
	bool ended;    /* the last blocks have been sent */
	bool finished; /* the file is complete and may be committed */
	/*
	 * A server keeps the length of the file, and the final length is known. The length is set
	 * once, when the space is reserved. Neither blocks nor padding go beyond it.
	 */
	bool keeps_length;
	uint64_t length; /* that the file was given ahead of its blocks; 0: none */
	/* Most bytes that this process may write into a file (ulimit -f). */
	uint64_t most_bytes;
	uint64_t first_block_ns; /* when the engine got its first block */
	struct io_pace pace;     /* of the storage, against that of the caller */
	uint64_t plan_ns, write_ns, sync_ns, commit_ns;
	char shape_why[160]; /* for io_writer_choice() */
};

/* ---- Writing without an engine --------------------------------------------------------------- */

static ssize_t write_without_sigpipe(int fd, const void *data, size_t bytes)
{
	struct base_held_sigpipe held;
	ssize_t moved;

	base_hold_sigpipe(&held);
	moved = write(fd, data, bytes);
	/*
	 * A short result may also raise the signal: the reader of a pipe may have closed it
	 * half-way.
	 */
	base_let_sigpipe(&held, moved < (ssize_t)bytes);
	return moved;
}

/*
 * Writes all bytes without an engine: for small files, pipes and devices. Only regular files use
 * `offset`.
 */
static int write_without_engine(struct io_destination *destination, const uint8_t *data,
				size_t bytes, uint64_t offset, struct base_error *error)
{
	struct io_downgrades *downgrades = destination->downgrades;
	int code, interruptions = 0;
	size_t done = 0;
	ssize_t moved;

	while (done < bytes) {
		if (destination->stream)
			moved = write_without_sigpipe(destination->fd, data + done, bytes - done);
		else
			moved = pwrite(destination->fd, data + done, bytes - done,
				       (off_t)(offset + done));
		if (moved < 0 && errno == EINTR && ++interruptions < MAX_INTERRUPTIONS) {
			downgrades->short_results++;
			continue;
		}
		if (moved <= 0) {
			code = moved ? -errno : -EIO;
			return base_fail_with(
				error, code, io_remedy(code), "cannot write \"%s\" at offset %llu",
				destination->path, (unsigned long long)(offset + done));
		}
		interruptions = 0;
		done += (size_t)moved;
		if (done < bytes)
			downgrades->short_results++;
	}
	return 0;
}

/* ---- Progress, cancellation and limits ------------------------------------------------------- */

/* Calls the progress callback and checks for cancellation. Runs before each step. */
static int tell(struct io_writer *writer, enum ioshape_phase phase, struct base_error *error)
{
	const struct io_file_options *options = &writer->options;
	uint64_t done = io_writer_offset(writer);
	bool stop = options->abort && atomic_load_explicit(options->abort, memory_order_relaxed);

	/* The caller's total may be an estimate, so what is done is capped to it. */
	if (!stop && options->progress)
		stop = options->progress(
			       options->progress_user, phase,
			       options->progress_total ? MIN(done, options->progress_total) : done,
			       options->progress_total) &&
		       phase < IOSHAPE_PHASE_COMMIT;
	if (stop)
		return base_fail_reason(error, -ECANCELED, "saving \"%s\" was stopped",
					writer->file.path);
	return 0;
}

/*
 * Checks the length of the file against this process's limits. Beyond ulimit -f, a write would
 * raise a signal that ends the application.
 */
static int check_limit(const struct io_writer *writer, uint64_t bytes, struct base_error *error)
{
	const struct io_file_options *options = &writer->options;

	if (options->part_bytes && bytes > options->part_bytes)
		return base_fail_reason_with(error, -EFBIG, "give it a larger part",
					     "cannot write \"%s\": this process has a part of %s",
					     writer->file.path, BASE_SIZE(options->part_bytes));
	if (options->part_offset + bytes <= writer->most_bytes || writer->file.stream)
		return 0;
	return base_fail_reason_with(error, -EFBIG, io_remedy(-EFBIG),
				     "cannot write \"%s\": it would be larger than %s",
				     writer->file.path, BASE_SIZE(writer->most_bytes));
}

/* Calls before_block(), which may wait, and reports progress. Runs before each block is sent. */
static int let_pass(struct io_writer *writer, uint64_t bytes, struct base_error *error)
{
	const struct io_file_options *options = &writer->options;

	if (options->before_block)
		options->before_block(options->before_block_user, bytes);
	return tell(writer, IOSHAPE_PHASE_WRITE, error);
}

static int fail_again(const struct io_writer *writer, struct base_error *error)
{
	return base_fail_reason_with(error, -EIO, "save again", "writing \"%s\" failed before",
				     writer->file.path);
}

uint64_t io_writer_offset(const struct io_writer *writer)
{
	return writer->submitted + writer->used;
}

/* Returns the file offset of the writer's byte `offset`. */
static uint64_t in_file(const struct io_writer *writer, uint64_t offset)
{
	return writer->options.part_offset + offset;
}

/* ---- Whether direct writes work on a mount --------------------------------------------------- */

/*
 * Some filesystems accept direct writes and report the failure later, at fsync, when the bytes are
 * no longer in memory. So the first direct block that this process writes to a mount is synced
 * while it is still in memory. If the sync is refused, the file starts over through the page cache.
 * Later files on that mount use the page cache at once.
 */

/* Mounts that are remembered. A further mount replaces the oldest. */
#define MOST_MOUNTS 32

enum direct { DIRECT_UNPROVEN, DIRECT_WORKS, DIRECT_FAILS };

/*
 * What was found on each mount: an enum direct in the last two bits, the mount's number above them.
 * There is no lock: a result that is overwritten is found again.
 */
static _Atomic uint64_t proofs[MOST_MOUNTS];
static atomic_uint proof_count;

/*
 * Returns the number of a mount, which the kernel never reuses. Older kernels have none; the device
 * number, which may be reused, replaces it.
 */
static uint64_t mount_of(const struct fs_memory *on)
{
	return on->mount ? on->mount : (uint64_t)on->device_major << 32 | on->device_minor;
}

static enum direct get_proof(const struct fs_memory *on)
{
	uint64_t proof;

	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		proof = atomic_load(&proofs[i]);
		if (proof && proof >> 2 == mount_of(on))
			return (enum direct)(proof & 3);
	}
	return DIRECT_UNPROVEN;
}

static void put_proof(const struct fs_memory *on, enum direct found)
{
	const uint64_t proof = mount_of(on) << 2 | found;

	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (atomic_load(&proofs[i]) >> 2 == mount_of(on)) {
			atomic_store(&proofs[i], proof);
			return;
		}
	}
	atomic_store(&proofs[atomic_fetch_add(&proof_count, 1) % MOST_MOUNTS], proof);
}

static bool refuses_direct(int code)
{
	return code == -EINVAL || code == -EOPNOTSUPP;
}

/* ---- Space ----------------------------------------------------------------------------------- */

/*
 * Returns the length of the file while it is written, at least its final length. On FUSE, XFS and
 * others a direct write that extends a file waits for all others. The bytes after the expected ones
 * (an index) usually need less than a block. finish() truncates the file to its length.
 */
static uint64_t length_meanwhile(const struct io_writer *writer)
{
	const uint64_t block = writer->queue->shape.block_bytes,
		       bytes = writer->options.expected_bytes;

	return writer->keeps_length || writer->file.shared ?
		       bytes :
		       MAX(bytes, MIN((bytes / block + 2) * block, writer->most_bytes));
}

/* Reserves the space that the file is expected to need. */
static int reserve(struct io_writer *writer, struct base_error *error)
{
	const uint64_t bytes = writer->options.expected_bytes;
	int ret;

	if (bytes <= IO_SMALL_FILE_BYTES || writer->file.stream)
		return 0;
	ret = check_limit(writer, bytes, error);
	if (ret)
		return ret;
	writer->length = length_meanwhile(writer);
	return io_destination_reserve(&writer->file, writer->length, error);
}

/*
 * Sets the length of the file before a direct write would extend it. Such a write waits for all
 * others. The length doubles, because setting it waits for them, too. Files of known length have it
 * since reserve(). This is an optimisation, so a filesystem that refuses is not asked again.
 */
static void grow(struct io_writer *writer, uint64_t end)
{
	const uint64_t length = MIN(MAX(2 * end, LEAST_LENGTH), writer->most_bytes);

	if (!writer->queue->direct || writer->file.shared || end <= writer->length)
		return;
	writer->length = ftruncate(writer->file.fd, (off_t)length) ? UINT64_MAX : length;
}

/* ---- Borrowed memory ------------------------------------------------------------------------- */

/*
 * A block can borrow ranges of the caller's memory. The buffer holds the bytes between them, and
 * the request lists buffer and borrowed ranges in file order. So requests have the same boundaries
 * as if all bytes had been copied. Direct I/O demands whole units of the file, and an alignment of
 * the memory that depends on the device: NVMe accepts multiples of 4 bytes.
 */

void io_writer_borrow(struct io_writer *writer, const void *memory, size_t bytes)
{
	writer->borrowable = memory;
	writer->borrowable_bytes = memory ? bytes : 0;
}

/* Alignments that a request demands of a borrowed range. */
struct loan_rule {
	size_t unit;   /* its offset in the file and its length are multiples of this */
	size_t memory; /* its address is a multiple of this */
};

/* Returns the rule for the next range. Whether the writer writes directly is known only after the
 * first block. */
static struct loan_rule rule_of_loans(const struct io_writer *writer)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	const uint32_t told = writer->file.fs.memory_alignment;

	if (writer->through_engine && !writer->queue->direct)
		return (struct loan_rule){ 1, 1 };
	return (struct loan_rule){ MAX(writer->unit, page),
				   writer->through_engine && told ? told : page };
}

static bool is_borrowable(const struct io_writer *writer, const uint8_t *data, size_t bytes)
{
	return writer->borrowable && data >= writer->borrowable &&
	       bytes <= writer->borrowable_bytes &&
	       (size_t)(data - writer->borrowable) <= writer->borrowable_bytes - bytes;
}

/*
 * Returns the last borrowed range of the block if `data` continues it, in the file and in memory;
 * else NULL.
 */
static struct io_loan *loan_before(const struct io_writer *writer, const uint8_t *data)
{
	struct io_buffer *buffer = writer->buffer;
	struct io_loan *last;

	if (!buffer->loan_count)
		return NULL;
	last = &buffer->loans[buffer->loan_count - 1];
	return last->at + last->bytes == writer->used && last->from + last->bytes == data ? last :
											    NULL;
}

/* Returns how many of the next bytes must be copied; 0 if bytes from `data` on can be borrowed. */
static size_t must_copy(const struct io_writer *writer, const uint8_t *data, size_t bytes)
{
	const struct loan_rule rule = rule_of_loans(writer);
	const size_t past = (size_t)(io_writer_offset(writer) % rule.unit);
	const size_t head = past ? rule.unit - past : 0;
	size_t least = MAX(LEAST_LOAN_BYTES, rule.unit);

	/* Pipes are not written through a queue. */
	if (base_without("borrowing") || writer->file.stream ||
	    !is_borrowable(writer, data, bytes) || ((uintptr_t)data + head) % rule.memory)
		return bytes;
	if (!head && loan_before(writer, data))
		least = rule.unit;
	else if (writer->buffer->loan_count == IO_MOST_LOANS)
		return bytes;
	return bytes < head + least ? bytes : head;
}

/* Borrows as many whole units as `bytes` has, and returns their number of bytes. */
static size_t borrow(struct io_writer *writer, const uint8_t *data, size_t bytes)
{
	struct io_buffer *buffer = writer->buffer;
	struct io_loan *loan = loan_before(writer, data);

	bytes -= bytes % rule_of_loans(writer).unit;
	if (!loan) {
		loan = &buffer->loans[buffer->loan_count++];
		*loan = (struct io_loan){ .at = writer->used, .from = data };
	}
	loan->bytes += bytes;
	return bytes;
}

/* Copies the borrowed ranges of the current buffer into it, which ends the borrowing. */
static void fill_in(struct io_writer *writer)
{
	struct io_buffer *buffer = writer->buffer;

	if (!buffer)
		return;
	for (unsigned i = 0; i < buffer->loan_count; i++)
		memcpy(buffer->data + buffer->loans[i].at, buffer->loans[i].from,
		       buffer->loans[i].bytes);
	buffer->loan_count = 0;
}

uint64_t io_writer_written(const struct io_writer *writer)
{
	const struct io_queue *queue = writer->queue;
	uint64_t written = io_writer_offset(writer);

	for (unsigned i = 0; i < queue->shape.depth; i++) {
		const struct io_buffer *buffer = &queue->buffers[i];
		/* The queue does not know the offset of the buffer that is being filled. */
		const uint64_t offset = buffer == writer->buffer ?
						writer->submitted :
						buffer->offset - writer->options.part_offset;

		if (buffer->loan_count)
			written = MIN(written, offset + buffer->loans[0].at);
	}
	return written;
}

/*
 * Makes progress towards returning the borrowed memory: waits for one request, or copies the
 * borrowed ranges of the current buffer.
 */
static int return_some(struct io_writer *writer, struct base_error *error)
{
	struct io_queue *queue = writer->queue;

	/* The current buffer is the only one that still borrows. */
	if (io_writer_written(writer) >= writer->submitted) {
		fill_in(writer);
		return 0;
	}
	if (!queue->in_flight)
		return base_fail_reason_with(error, -EIO, "save again",
					     "requests for \"%s\" were lost", writer->file.path);
	return io_queue_reduce(queue, queue->in_flight + queue->ready_count - 1, error);
}

int io_writer_wait_written(struct io_writer *writer, uint64_t offset, struct base_error *error)
{
	int ret = 0;

	offset = MIN(offset, io_writer_offset(writer));
	while (!ret && !writer->failed && io_writer_written(writer) < offset)
		ret = return_some(writer, error);
	writer->failed |= ret != 0;
	if (!writer->failed)
		return 0;
	io_queue_drain(writer->queue, NULL);
	if (writer->buffer)
		writer->buffer->loan_count = 0;
	return ret ? ret : fail_again(writer, error);
}

/* ---- Blocks ---------------------------------------------------------------------------------- */

static int start_engine(struct io_writer *writer, struct base_error *error)
{
	struct io_queue *queue = writer->queue;
	int ret = io_queue_start(queue, error);

	if (ret)
		return ret;
	writer->first_block_ns = base_now_ns();
	io_queue_attach(queue, writer->file.fd, writer->file.path, false, writer->file.downgrades);
	writer->through_engine = true;
	if (queue->config.direct == IOSHAPE_DIRECT_PREFER &&
	    get_proof(&queue->fs_memory) == DIRECT_FAILS)
		io_add_downgrade(writer->file.downgrades, IOSHAPE_DOWNGRADE_DIRECT,
				 "no direct I/O on %s: it failed on an earlier file",
				 writer->file.fs.type);
	else
		ret = io_queue_go_direct(queue, &writer->file.fs, error);
	writer->was_direct = queue->direct;
	return ret;
}

/* Returns whether the next block must be followed by prove_direct(). */
static bool must_prove_direct(const struct io_writer *writer)
{
	const struct io_queue *queue = writer->queue;

	/* A filesystem that answers STATX_DIOALIGN knows whether direct I/O works. */
	return queue->direct && queue->config.direct == IOSHAPE_DIRECT_PREFER &&
	       !writer->submitted && !writer->file.fs.direct_known &&
	       get_proof(&queue->fs_memory) == DIRECT_UNPROVEN;
}

/*
 * Writes the first block again through the page cache: to a new temporary file, or to the shared
 * file.
 */
static int write_again(struct io_writer *writer, const struct io_buffer *first, size_t bytes,
		       struct base_error *error)
{
	struct io_queue *queue = writer->queue;
	struct io_buffer *buffer = io_queue_free_buffer(queue);
	int ret;

	/* Usually both are the same buffer. */
	memmove(buffer->data, first->data, bytes);
	buffer->offset = first->offset;
	buffer->bytes = bytes;
	io_queue_detach(queue);
	writer->was_direct = false;
	writer->file.buffered = true;
	ret = io_destination_begin_again(&writer->file, error);
	if (!ret)
		ret = reserve(writer, error);
	if (ret) {
		io_queue_give_back(queue, buffer);
		return ret;
	}
	io_queue_attach(queue, writer->file.fd, writer->file.path, false, writer->file.downgrades);
	return io_queue_submit(queue, buffer, error);
}

/*
 * Syncs the first block, which was just submitted with `bytes` bytes of the file. If direct writes
 * fail, writes it again through the page cache. The block's bytes must be in the buffer itself, so
 * the caller calls fill_in() before it submits the block.
 */
static int prove_direct(struct io_writer *writer, const struct io_buffer *first, size_t bytes,
			struct base_error *error)
{
	struct io_queue *queue = writer->queue;
	struct base_error late = { 0 };
	int ret = io_queue_drain(queue, error);

	if (ret)
		return ret;
	if (queue->direct)
		ret = io_destination_sync(&writer->file, &late);
	if (ret && !refuses_direct(ret)) {
		if (error)
			*error = late;
		return ret;
	}
	put_proof(&queue->fs_memory, queue->direct && !ret ? DIRECT_WORKS : DIRECT_FAILS);
	if (!ret)
		return 0;
	io_add_downgrade(
		writer->file.downgrades, IOSHAPE_DOWNGRADE_DIRECT,
		"written through the page cache: %s accepts direct writes, but fsync fails after "
		"them: %s",
		writer->file.fs.type, ioshape_strerror(ret));
	return write_again(writer, first, bytes, error);
}

bool io_writer_is_starved(const struct io_writer *writer)
{
	return writer->pace.starved;
}

/* Sends the current buffer: a full block or, at the end of the file, what it has. */
static int send_block(struct io_writer *writer, struct base_error *error)
{
	struct io_buffer *buffer = writer->buffer;
	const uint64_t begin_ns = base_now_ns();
	size_t bytes = writer->used;
	uint64_t now_ns;
	bool prove;
	int ret;

	ret = check_limit(writer, writer->submitted + bytes, error);
	if (!ret)
		ret = let_pass(writer, bytes, error);
	if (ret)
		return ret;
	if (writer->file.stream) {
		ret = write_without_engine(&writer->file, buffer->data, bytes, writer->submitted,
					   error);
		if (ret)
			return ret;
		io_queue_give_back(writer->queue, buffer);
	} else {
		ret = writer->through_engine ? 0 : start_engine(writer, error);
		if (ret)
			return ret;
		prove = must_prove_direct(writer);
		if (prove)
			fill_in(writer);
		buffer->offset = in_file(writer, writer->submitted);
		/*
		 * Direct I/O writes whole units, so the tail is padded; finish() truncates the
		 * padding.
		 */
		buffer->bytes = writer->queue->direct ?
					base_round_up(bytes, writer->queue->alignment) :
					bytes;
		memset(buffer->data + bytes, 0, buffer->bytes - bytes);
		grow(writer, buffer->offset + buffer->bytes);
		writer->buffer = NULL; /* owned by the queue now, even after a failure */
		ret = io_queue_submit(writer->queue, buffer, error);
		if (!ret && prove)
			ret = prove_direct(writer, buffer, bytes, error);
		if (ret)
			return ret;
	}
	writer->buffer = NULL;
	writer->used = 0;
	writer->submitted += bytes;
	now_ns = base_now_ns();
	writer->pace.waited_ns += now_ns - begin_ns;
	io_pace_judge(&writer->pace, writer->submitted,
		      writer->queue->shape.depth * writer->queue->shape.block_bytes, now_ns);
	return 0;
}

/*
 * Returns the length of the block at `offset`. On stripes a block ends at a stripe's end, unless
 * the user set the block size.
 */
static size_t block_at(const struct io_writer *writer, uint64_t offset)
{
	const struct io_queue *queue = writer->queue;
	const size_t whole = queue->shape.block_bytes, unit = MAX(writer->unit, 4096);
	size_t bytes;

	if (queue->config.block_bytes)
		return whole;
	/* Whatever the stripes are, the next block must begin at a unit of direct I/O. */
	bytes = io_request_bytes(&writer->file.fs.layout, offset, whole) / unit * unit;
	return bytes ? bytes : whole;
}

/* Returns in *to where the next bytes go, and in *space how many fit into the block. */
static int find_space(struct io_writer *writer, uint8_t **to, size_t *space,
		      struct base_error *error)
{
	uint64_t begin_ns;
	int ret;

	if (!writer->buffer) {
		begin_ns = base_now_ns();
		ret = io_queue_take(writer->queue, &writer->buffer, error);
		if (ret)
			return ret;
		writer->pace.waited_ns += base_now_ns() - begin_ns;
		writer->block_bytes = block_at(writer, in_file(writer, writer->submitted));
	}
	*to = writer->buffer->data + writer->used;
	*space = writer->block_bytes - writer->used;
	return 0;
}

/* Copies or borrows the next bytes, as many as can be treated in one way. Returns their number. */
static size_t put_piece(struct io_writer *writer, uint8_t *to, const uint8_t *data, size_t bytes,
			uint32_t *crc)
{
	size_t piece = must_copy(writer, data, bytes);
	const uint8_t *summed = to;

	if (!piece) {
		piece = borrow(writer, data, bytes);
		summed = data;
	} else if (data == to) {
		/* The caller produced them in the buffer, at io_writer_space(). */
	} else if (crc) {
		*crc = base_copy_crc32(*crc, to, data, piece);
		return piece;
	} else {
		memcpy(to, data, piece);
	}
	if (crc)
		*crc = base_crc32(*crc, summed, piece);
	return piece;
}

static int append(struct io_writer *writer, const uint8_t *data, size_t bytes, uint32_t *crc,
		  struct base_error *error)
{
	size_t piece, space;
	uint8_t *to;
	int ret = 0;

	while (!ret && bytes) {
		ret = find_space(writer, &to, &space, error);
		if (ret)
			break;
		piece = put_piece(writer, to, data, MIN(bytes, space), crc);
		writer->used += piece;
		bytes -= piece;
		data += piece;
		if (piece == space)
			ret = send_block(writer, error);
	}
	return ret;
}

/* Appends bytes and continues both `*crc` and the checksum of the whole file. */
static int append_checked(struct io_writer *writer, const uint8_t *data, size_t bytes,
			  uint32_t *crc, struct base_error *error)
{
	uint32_t part = 0;
	int ret;

	if (!crc)
		return append(writer, data, bytes, &writer->crc, error);
	if (bytes <= BASE_CRC32_TWICE_BYTES) {
		writer->crc = base_crc32(writer->crc, data, bytes);
		return append(writer, data, bytes, crc, error);
	}
	ret = append(writer, data, bytes, &part, error);
	*crc = base_crc32_combine(*crc, part, bytes);
	writer->crc = base_crc32_combine(writer->crc, part, bytes);
	return ret;
}

/* Appends bytes. Their checksum is continued in `*crc` (may be NULL), or is already `*known`. */
static int put(struct io_writer *writer, const void *data, size_t bytes, uint32_t *crc,
	       const uint32_t *known, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	if (writer->failed)
		return fail_again(writer, error);
	if (known) {
		ret = append(writer, data, bytes, NULL, error);
		writer->crc = base_crc32_combine(writer->crc, *known, bytes);
	} else if (writer->options.want_crc32) {
		ret = append_checked(writer, data, bytes, crc, error);
	} else {
		ret = append(writer, data, bytes, crc, error);
	}
	writer->failed = ret != 0;
	writer->write_ns += base_now_ns() - begin;
	return ret;
}

int io_writer_space(struct io_writer *writer, uint8_t **to, size_t *space, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	if (writer->failed)
		return fail_again(writer, error);
	ret = find_space(writer, to, space, error);
	writer->failed = ret != 0;
	writer->write_ns += base_now_ns() - begin;
	return ret;
}

bool io_writer_copies(const struct io_writer *writer, const void *data, size_t bytes)
{
	return must_copy(writer, data, bytes) == bytes;
}

int io_writer_put(struct io_writer *writer, const void *data, size_t bytes, uint32_t *crc,
		  struct base_error *error)
{
	return bytes ? put(writer, data, bytes, crc, NULL, error) : 0;
}

void io_writer_spent(struct io_writer *writer, uint64_t ns)
{
	writer->write_ns += ns;
}

int io_writer_put_summed(struct io_writer *writer, const void *data, size_t bytes, uint32_t crc32,
			 struct base_error *error)
{
	return bytes ? put(writer, data, bytes, NULL, &crc32, error) : 0;
}

void io_writer_fail(struct io_writer *writer)
{
	writer->failed = true;
}

/* ---- Ending the file ------------------------------------------------------------------------- */

/*
 * Returns whether all of the file can be written by one plain write. False if the caller asked for
 * an engine or for direct I/O by name: then small files use it, too.
 */
static bool is_small(const struct io_writer *writer)
{
	const struct io_config *config = &writer->queue->config;

	return writer->buffer && !writer->through_engine && !writer->file.stream &&
	       writer->used <= IO_SMALL_FILE_BYTES && config->direct != IOSHAPE_DIRECT_REQUIRE &&
	       (config->engine == IOSHAPE_ENGINE_AUTO || config->engine == IOSHAPE_ENGINE_BUFFERED);
}

/*
 * Returns whether the end of the file must not be padded to a unit of direct I/O. That is so if
 * padding would exceed ulimit -f, or if the file must keep its length. Then the bytes after the
 * last whole unit go through the page cache.
 */
static bool ends_unpadded(const struct io_writer *writer)
{
	return writer->buffer && !writer->file.stream &&
	       (writer->keeps_length ||
		in_file(writer, writer->submitted) + base_round_up(writer->used, writer->unit) >
			writer->most_bytes);
}

/* Sends the whole units of direct I/O, and keeps the rest in the buffer. */
static int send_units(struct io_writer *writer, struct base_error *error)
{
	const size_t rest = writer->used % writer->unit;
	uint8_t *kept;
	int ret;

	fill_in(writer);
	if (!rest)
		return send_block(writer, error);
	if (rest == writer->used)
		return 0;
	kept = malloc(rest);
	if (!kept)
		return base_no_memory(error, "the end of a file", rest);
	writer->used -= rest;
	memcpy(kept, writer->buffer->data + writer->used, rest);
	ret = send_block(writer, error);
	if (!ret)
		ret = append(writer, kept, rest, NULL, error);
	free(kept);
	return ret;
}

/*
 * Sends all that goes through the engine. What stays in the buffer is checked against limits here.
 */
static int send_last(struct io_writer *writer, struct base_error *error)
{
	const bool small = is_small(writer);
	int ret = 0;

	if (writer->ended || !writer->buffer)
		return 0;
	if (!small)
		ret = ends_unpadded(writer) ? send_units(writer, error) : send_block(writer, error);
	if (!ret && writer->buffer)
		ret = check_limit(writer, writer->submitted + writer->used, error);
	if (!ret && writer->buffer)
		ret = let_pass(writer, writer->used, error);
	writer->ended = !ret;
	return ret;
}

static int end(struct io_writer *writer, bool *is_little, struct base_error *error)
{
	struct io_queue *queue = writer->queue;
	int ret = send_last(writer, error);
	unsigned tail;

	/* Much of a file in the page cache is still unwritten. */
	if (ret || !writer->through_engine || !queue->direct)
		return ret;
	tail = io_queue_tail(queue, writer->submitted, base_now_ns() - writer->first_block_ns,
			     writer->plan_ns);
	ret = io_queue_reduce(queue, tail, error);
	*is_little = !ret && queue->direct;
	return ret;
}

int io_writer_end(struct io_writer *writer, bool *is_little, struct base_error *error)
{
	const uint64_t begin = base_now_ns();
	int ret;

	*is_little = false;
	if (writer->failed)
		return fail_again(writer, error);
	ret = end(writer, is_little, error);
	writer->failed = ret != 0;
	writer->write_ns += base_now_ns() - begin;
	return ret;
}

/*
 * Writes what is left in the buffer without the engine. Nothing is in flight, so direct I/O can be
 * switched off.
 */
static int put_rest(struct io_writer *writer, struct base_error *error)
{
	int ret = is_small(writer) ? 0 : io_set_direct(writer->file.fd, false);

	if (ret)
		return base_fail(error, ret,
				 "cannot write the end of \"%s\" through the page cache",
				 writer->file.path);
	fill_in(writer);
	ret = write_without_engine(&writer->file, writer->buffer->data, writer->used,
				   in_file(writer, writer->submitted), error);
	if (ret)
		return ret;
	io_queue_give_back(writer->queue, writer->buffer);
	writer->buffer = NULL;
	writer->submitted += writer->used;
	writer->used = 0;
	return 0;
}

static int write_rest(struct io_writer *writer, struct base_error *error)
{
	int ret = send_last(writer, error);

	if (!ret)
		ret = io_queue_drain(writer->queue, error);
	if (writer->through_engine)
		writer->was_direct = writer->queue->direct;
	return ret || !writer->buffer ? ret : put_rest(writer, error);
}

/*
 * Truncates the file to its length. The padding of the last block, or an estimate that was too
 * large, may have left bytes after the end.
 */
static int cut(struct io_writer *writer, struct base_error *error)
{
	int interruptions = 0, ret;
	struct stat status;

	/* In a file of several writers, padding never exceeds this writer's range. */
	if (writer->file.stream || writer->file.shared ||
	    (writer->keeps_length && writer->submitted == writer->options.expected_bytes))
		return 0;
	do {
		ret = ftruncate(writer->file.fd, (off_t)writer->submitted) ? -errno : 0;
	} while (ret == -EINTR && ++interruptions < MAX_INTERRUPTIONS);
	/* Some FUSE filesystems cannot shrink files; there may be nothing to truncate. */
	if ((ret == -EOPNOTSUPP || ret == -ENOSYS) && !fstat(writer->file.fd, &status) &&
	    (uint64_t)status.st_size == writer->submitted)
		return 0;
	if (ret)
		return base_fail(error, ret, "cannot truncate \"%s\" to its length",
				 writer->file.path);
	return 0;
}

static int finish(struct io_writer *writer, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	ret = write_rest(writer, error);
	if (!ret &&
	    (writer->through_engine || writer->options.expected_bytes > IO_SMALL_FILE_BYTES))
		ret = cut(writer, error);
	writer->write_ns += base_now_ns() - begin;
	if (ret)
		return ret;
	ret = io_destination_resemble(&writer->file, error);
	if (!ret)
		ret = tell(writer, IOSHAPE_PHASE_SYNC, error);
	if (!ret && !writer->options.no_sync) {
		begin = base_now_ns();
		ret = io_destination_sync(&writer->file, error);
		if (writer->was_direct && refuses_direct(ret))
			put_proof(&writer->queue->fs_memory, DIRECT_FAILS);
		writer->sync_ns = base_now_ns() - begin;
	}
	return ret;
}

int io_writer_finish(struct io_writer *writer, struct base_error *error)
{
	int ret;

	if (writer->failed)
		return fail_again(writer, error);
	ret = finish(writer, error);
	writer->failed = ret != 0;
	writer->finished = !ret;
	return ret;
}

int io_writer_commit(struct io_writer *writer, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	if (!writer->finished)
		return base_fail_reason(error, -EIO,
					"cannot rename \"%s\" into place before it is complete",
					writer->file.path);
	ret = tell(writer, IOSHAPE_PHASE_COMMIT, error);
	/* Detach the queue before the descriptor is closed: an engine may keep the file open. */
	if (writer->through_engine)
		io_queue_detach(writer->queue);
	if (!ret)
		ret = io_destination_commit(&writer->file, error);
	writer->commit_ns = base_now_ns() - begin;
	if (!ret)
		tell(writer, IOSHAPE_PHASE_DONE, NULL);
	return ret;
}

int64_t io_writer_modified_ns(const struct io_writer *writer)
{
	struct stat status;

	/* By the descriptor, since another file may have taken the name. */
	if (writer->file.stream || fstat(writer->file.lock_fd, &status))
		return 0;
	return io_modified_ns(&status);
}

int io_writer_put_beside(struct io_writer *writer, const char *suffix, const void *data,
			 size_t bytes, struct base_error *error)
{
	const uint64_t begin = base_now_ns();
	const int ret = io_destination_put_beside(&writer->file, suffix, data, bytes, error);

	writer->commit_ns += base_now_ns() - begin;
	return ret;
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Chooses engine, blocks and depth for this file. */
static int take_shape(struct io_writer *writer, struct base_error *error)
{
	const struct io_shape shape = io_shape_for(&writer->queue->config, &writer->file.fs,
						   writer->options.expected_bytes,
						   writer->shape_why, sizeof(writer->shape_why));
	const int ret = io_queue_shape(writer->queue, &shape, error);

	writer->unit = MAX(io_queue_direct_alignment(writer->queue, &writer->file.fs), 1);
	return ret;
}

static int open_file(struct io_writer *writer, const char *path, struct base_error *error)
{
	const struct io_file_options *options = &writer->options;
	struct io_destination *file = &writer->file;
	int ret = io_destination_open(file, path, error);

	if (!ret)
		ret = tell(writer, IOSHAPE_PHASE_PLAN, error);
	if (ret)
		return ret;
	snprintf(file->downgrades->filesystem, sizeof(file->downgrades->filesystem), "%s",
		 file->fs.type);
	/*
	 * With direct=require the end is padded. GlusterFS opens the file with O_DIRECT on its
	 * servers as well; they refuse writes of partial units and report it at fsync.
	 */
	writer->keeps_length = options->exact && !file->stream &&
			       options->expected_bytes > IO_SMALL_FILE_BYTES &&
			       writer->queue->config.direct != IOSHAPE_DIRECT_REQUIRE &&
			       !fs_is_local(file->fs.family);
	ret = take_shape(writer, error);
	return ret ? ret : reserve(writer, error);
}

int io_writer_open(struct io_writer **out, struct io_queue *queue, const char *path,
		   const struct io_file_options *options, struct io_downgrades *downgrades,
		   struct base_error *error)
{
	uint64_t begin = base_now_ns();
	struct io_writer *writer;
	int ret;

	*out = NULL;
	writer = calloc(1, sizeof(*writer));
	if (!writer)
		return base_no_memory(error, "a file writer", sizeof(*writer));
	writer->queue = queue;
	writer->options = *options;
	/* Other writers look at a shared file even if its directory is new. */
	writer->options.unseen = options->unseen && !options->part_bytes;
	writer->most_bytes = base_largest_file();
	writer->file.options = &writer->options;
	writer->file.config = &queue->config;
	writer->file.memory = &queue->fs_memory;
	writer->file.downgrades = downgrades;
	ret = open_file(writer, path, error);
	writer->plan_ns = base_now_ns() - begin;
	if (ret) {
		io_writer_free(writer);
		return ret;
	}
	*out = writer;
	return 0;
}

void io_writer_free(struct io_writer *writer)
{
	if (!writer)
		return;
	io_queue_drain(writer->queue, NULL);
	if (writer->buffer)
		io_queue_give_back(writer->queue, writer->buffer);
	io_queue_detach(writer->queue);
	io_destination_close(&writer->file);
	free(writer);
}

/* ---- Results for the report ------------------------------------------------------------------ */

uint32_t io_writer_crc32(const struct io_writer *writer)
{
	return writer->crc;
}

const struct fs_layout *io_writer_layout(const struct io_writer *writer, bool *asked)
{
	*asked = writer->file.asked.count != 0;
	return &writer->file.fs.layout;
}

const char *io_writer_choice(const struct io_writer *writer)
{
	return writer->file.stream    ? "not a regular file" :
	       writer->through_engine ? writer->shape_why :
					"small file: one write call";
}

void io_writer_report(const struct io_writer *writer, struct ioshape_report *report)
{
	const struct io_queue *queue = writer->queue;

	report->file_bytes = io_writer_offset(writer);
	report->plan_s += base_seconds(writer->plan_ns);
	report->write_s += base_seconds(writer->write_ns);
	report->sync_s += base_seconds(writer->sync_ns);
	report->commit_s += base_seconds(writer->commit_ns);
	/* A plain write is reported as what the buffered engine does. */
	snprintf(report->engine, sizeof(report->engine), "%s",
		 writer->through_engine ? queue->ops->id : "buffered");
	report->direct = writer->was_direct;
	fs_layout_text(&writer->file.fs.layout, report->stripes, sizeof(report->stripes));
}
