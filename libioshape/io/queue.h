/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the I/O layer: engines, the rules that choose them, and queues, which pass buffers
 * between the code that fills or empties them and the engine.
 *
 * To write: take a buffer, fill it, submit it, …, drain. To read: take a buffer, submit it, and
 * call finish() on each buffer in the order of submission before it is given back.
 */
#ifndef IO_QUEUE_H
#define IO_QUEUE_H

#include "io/depth.h"
#include "io/io.h"

#include <sys/uio.h>

/* ---- Engines (engine_*.c) -------------------------------------------------------------------- */

enum io_kind { IO_WRITE, IO_READ };

/*
 * A request. The queue fills it in and the engine completes it. It must stay at its address while
 * it is in flight.
 */
struct io_op {
	enum io_kind kind;
	int fd;
	/* In the engine's registered memory or elsewhere; engines handle both. */
	void *data;
	size_t bytes;
	uint64_t offset;
	int64_t result;     /* set on completion: bytes moved, or a negative errno */
	struct io_op *next; /* link for the current holder: a free list or a queue of the engine */
	/* For a write whose bytes are not contiguous at `data`: where they are stored, in order. */
	const struct iovec *ranges;
	unsigned range_count; /* 0: all bytes are at `data` */
};

struct io_engine_params {
	unsigned depth; /* most requests in flight */
	/* Memory that most requests use; an engine registers it with the kernel if it can. */
	void *memory;
	size_t memory_bytes;
	struct base_log log;
};

/*
 * The functions of an engine. An engine belongs to one thread at a time. No member is NULL.
 * submit() owns the request until wait() returns it; if submit() fails, the engine has not taken
 * the request. Requests that the kernel refuses complete with a negative result.
 */
struct io_engine_ops {
	const char *id;
	bool direct; /* uses direct I/O where policy and filesystem permit */
	/*
	 * `why` receives a clause for the report: on failure the reason, on success a downgrade or
	 * nothing.
	 */
	int (*open)(void **engine, const struct io_engine_params *params, char *why,
		    size_t why_bytes);
	int (*submit)(void *engine, struct io_op *op);
	/* Waits for one completion. Cannot fail; returns NULL if nothing is in flight. */
	struct io_op *(*wait)(void *engine);
	/* Frees the engine. Nothing may be in flight. */
	void (*close)(void *engine);
};

extern const struct io_engine_ops io_engine_uring;
extern const struct io_engine_ops io_engine_uring_async;
extern const struct io_engine_ops io_engine_threads;
extern const struct io_engine_ops io_engine_buffered;

/* Returns the engine of this name; NULL for AUTO. */
const struct io_engine_ops *io_engine_of(enum ioshape_engine which);

/* ---- Shapes: sizes and numbers of requests (queue.c) ----------------------------------------- */

/*
 * The default block size and number of buffers. 52 MiB in flight, and one block ready to follow,
 * keep the fastest measured disks busy; as many bytes in larger blocks do not
 * (docs/performance.md). A Lustre client also sends at most 4 MiB in one request.
 */
#define IO_BLOCK_BYTES (4 * MIB)
#define IO_DEPTH 14u
/*
 * Buffers for reading a large file, twice as many. Devices that report many completions at a time,
 * as virtual ones do, would otherwise idle while their blocks are copied.
 */
#define IO_READ_DEPTH 28u

/* Limits of a queue's buffers unless the user sets them. There are always at least two blocks. */
#define IO_MOST_QUEUE_BYTES (128 * MIB)
#define IO_MOST_DEPTH 64u

/* How a file is written or read: the engine and its requests. */
struct io_shape {
	enum ioshape_engine engine;
	size_t block_bytes; /* bytes of a buffer and of the largest request; a multiple of 4096 */
	unsigned depth;     /* number of buffers, one more than the most requests in flight */
	/* The user set the depth: keep that many in flight, whatever their latency. */
	bool fixed;
	size_t request_bytes; /* bytes of most requests; 0: block_bytes */
	/* Storage targets and stripe size if each request goes to one target; 0 and 0 otherwise. */
	uint32_t targets;
	uint64_t stripe_bytes;
	/* Other hosts may use the file's targets, and the targets are not known. */
	bool shared;
};

/* Returns the shape for reading `bytes` bytes from this filesystem. Pure. */
struct io_shape io_shape_to_read(const struct io_config *config, const struct fs_info *fs,
				 uint64_t bytes);

/*
 * Returns the shape for a new file of about `file_bytes` bytes (0: not known) on this filesystem,
 * with its layout. `why` receives the reason for the report. Pure.
 */
struct io_shape io_shape_for(const struct io_config *config, const struct fs_info *fs,
			     uint64_t file_bytes, char *why, size_t why_bytes);

/* Returns the length of the request at `offset`, for buffers of `block_bytes`. Pure. */
size_t io_request_bytes(const struct fs_layout *layout, uint64_t offset, size_t block_bytes);

/* ---- Buffers and queues (queue.c) ------------------------------------------------------------ */

/* Borrowed ranges of a block. A block rarely has more tensors that are large enough to borrow. */
#define IO_MOST_LOANS 16u

/* A range of a block that is written from the caller's memory, not from the buffer. */
struct io_loan {
	size_t at, bytes; /* offset in the block, and length */
	const uint8_t *from;
};

struct io_buffer {
	struct io_op op;
	uint8_t *data; /* memory of shape.block_bytes bytes */
	/* File offset and length of the whole request; op describes what is left of it. */
	uint64_t offset;
	size_t bytes;
	/*
	 * Bytes moved so far; in the end less than `bytes` only when a read passes the end of the
	 * file.
	 */
	size_t moved;
	unsigned retries; /* retries since the last progress */
	bool in_flight;
	uint64_t sent_ns; /* when writing: time of the first send */
	/* When reading: the failure, kept until the reader asks for this buffer. 0: none. */
	int failed;
	bool refused; /* submit() failed */
	/* When writing: borrowed ranges, in the order of the file. */
	struct io_loan loans[IO_MOST_LOANS];
	unsigned loan_count;
	struct iovec ranges[2 * IO_MOST_LOANS + 1];
};

struct io_queue {
	struct io_config config;
	struct io_shape shape; /* shape for the current file */
	uint8_t *memory;
	size_t memory_bytes; /* at least shape.depth × shape.block_bytes */
	struct io_buffer *buffers;
	unsigned buffers_made;
	struct io_op *free; /* requests of the free buffers */
	unsigned in_flight;
	/*
	 * Most requests in flight, one less than there are buffers. The spare buffer is filled
	 * while the others are in flight, and leaves as soon as one of them completes. Without it,
	 * devices that report many completions at a time (virtual disks do) would idle while the
	 * next block is copied.
	 */
	unsigned limit;
	/* When writing: full buffers that wait for the in-flight limit, in order. */
	struct io_op *ready;
	unsigned ready_count;
	struct io_depth depth;           /* when writing */
	uint64_t waited_ns;              /* time at which the queue last waited for a completion */
	const struct io_engine_ops *ops; /* NULL until the first block opens the engine */
	void *engine;
	/* Engine that the shape asked for when this one was opened. */
	enum ioshape_engine engine_asked;
	unsigned engine_depth; /* depth that the engine was opened for */
	/* Why the first engine of the rule could not be opened: a negative errno, or 0. */
	int first_code;
	bool engine_failed; /* a request failed: the next file opens a new engine */
	/* The engine's downgrades for the report, or "". */
	char downgrade[256];

	struct fs_memory fs_memory;
	struct base_fresh *fresh; /* memory that reads fill; NULL: not known */

	/* The current file. */
	int fd;
	const char *path;
	const char *verb; /* "write" or "read" */
	bool reading;
	bool direct;         /* fd has O_DIRECT set now */
	uint32_t alignment;  /* required alignment of offsets and sizes while fd is direct */
	uint64_t file_bytes; /* when reading; UINT64_MAX: not known */
	struct io_downgrades *downgrades; /* may be NULL */
};

/*
 * Divides the memory into buffers of a new shape, and allocates more memory if needed. Closes the
 * engine only if the shape needs another one or a larger one; the next file opens it. No buffer may
 * be in use. On -ENOMEM the queue keeps its old shape.
 */
int io_queue_shape(struct io_queue *queue, const struct io_shape *shape, struct base_error *error);

/* Opens the engine unless an earlier file has opened it. Fails only if no engine works. */
int io_queue_start(struct io_queue *queue, struct base_error *error);

/* Begin and end the work on a file. Nothing may be in flight at the end. */
void io_queue_attach(struct io_queue *queue, int fd, const char *path, bool reading,
		     struct io_downgrades *downgrades);
void io_queue_detach(struct io_queue *queue);

/*
 * Switches the file to direct I/O if engine, policy and filesystem permit. If the policy requires
 * it and it cannot be used, returns -ENOTSUP with an error message. Otherwise it records a
 * downgrade.
 */
int io_queue_go_direct(struct io_queue *queue, const struct fs_info *fs, struct base_error *error);

/* Sets or clears O_DIRECT. Returns 0 or a negative errno. */
int io_set_direct(int fd, bool on);

/*
 * Returns the alignment of offsets and sizes that direct I/O needs there; 0 if blocks of this queue
 * do not have it.
 */
uint32_t io_queue_direct_alignment(const struct io_queue *queue, const struct fs_info *fs);

/* Returns a free buffer without waiting; NULL if there is none. */
struct io_buffer *io_queue_free_buffer(struct io_queue *queue);
/* Returns a buffer that is not in flight to the free list. */
static inline void io_queue_give_back(struct io_queue *queue, struct io_buffer *buffer)
{
	buffer->loan_count = 0;
	buffer->op.next = queue->free;
	queue->free = &buffer->op;
}

/*
 * Returns a free buffer in *buffer, waiting for a completion if needed. When writing, completed
 * buffers are free.
 */
int io_queue_take(struct io_queue *queue, struct io_buffer **buffer, struct base_error *error);

/*
 * Queues the transfer of buffer->bytes bytes at buffer->offset.
 *
 * When writing, the queue sends the buffer as soon as the in-flight limit allows. The queue owns
 * the buffer from now on, even after a failure. Failures that are known at once are returned. When
 * reading, failures are kept for io_queue_finish(), because prefetched bytes may never be used.
 */
int io_queue_submit(struct io_queue *queue, struct io_buffer *buffer, struct base_error *error);

/* Waits until this buffer is done and returns its result. Other buffers may complete meanwhile. */
int io_queue_finish(struct io_queue *queue, struct io_buffer *buffer, struct base_error *error);

/* Returns the advice for a failed write or read; "" if there is none. */
const char *io_remedy(int code);

/*
 * Returns how many requests may be left when the next writer begins. That is as many as the storage
 * completes while the next writer creates its file, and at least a share of the requests.
 * `submitted` bytes of this file were sent in `took_ns`; creating this file took `beginning_ns`.
 */
unsigned io_queue_tail(const struct io_queue *queue, uint64_t submitted, uint64_t took_ns,
		       uint64_t beginning_ns);

/* Waits until at most `most` requests are in flight or queued. For writing only. */
int io_queue_reduce(struct io_queue *queue, unsigned most, struct base_error *error);

/* Waits until nothing is in flight, even after failures. Returns the first failure when writing. */
int io_queue_drain(struct io_queue *queue, struct base_error *error);

#endif
