/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: engines, how they are chosen, and buffers going round between whoever
 * fills or empties them and the engine.
 *
 * Writing: take a buffer, fill its buffer, submit it; ...; drain. Reading: take, submit, and
 * finish() each buffer in the order of submission before it is given back.
 */
#ifndef IO_QUEUE_H
#define IO_QUEUE_H

#include "io/depth.h"
#include "io/io.h"

#include <sys/uio.h>

/* ---- Engines (engine_*.c) -------------------------------------------------------------------- */

enum io_kind { IO_WRITE, IO_READ };

/* One request. Filled by the lane, completed by the engine; it stays where it is while in flight.
 */
struct io_op {
	enum io_kind kind;
	int fd;
	void *data; /* inside the engine's memory, or not: the engine copes */
	size_t bytes;
	uint64_t offset;
	int64_t result;     /* set on completion: bytes moved, or a negative errno */
	struct io_op *next; /* for whoever holds the op: free lists, the engine's queues */
	/* Of a write whose bytes do not all lie at `data`: where they lie, in order. */
	const struct iovec *parts;
	unsigned part_count; /* 0: they all do */
};

struct io_engine_params {
	unsigned depth; /* most requests in flight */
	void *memory;   /* memory that most requests will use; registered where the engine can */
	size_t memory_bytes;
	struct base_log log;
};

/*
 * An engine belongs to one thread at a time. No member is NULL. submit() takes the op until wait()
 * hands it back; it fails only if the op was not taken. Requests that the kernel refuses complete
 * with a negative result.
 */
struct io_engine_ops {
	const char *id;
	bool direct; /* opens files for direct I/O, policy permitting */
	/*
	 * `why` receives a clause for the report: on failure the reason, on success what had to be
	 * stepped down, or nothing.
	 */
	int (*open)(void **engine, const struct io_engine_params *params, char *why,
		    size_t why_bytes);
	int (*submit)(void *engine, struct io_op *op);
	/* Waits for one completion. Never fails: with nothing in flight it returns NULL. */
	struct io_op *(*wait)(void *engine);
	/* Nothing may be in flight. */
	void (*close)(void *engine);
};

extern const struct io_engine_ops io_engine_uring;
extern const struct io_engine_ops io_engine_uring_async;
extern const struct io_engine_ops io_engine_threads;
extern const struct io_engine_ops io_engine_buffered;

/* Returns the engine of that name; NULL for AUTO. */
const struct io_engine_ops *io_engine_of(enum ioshape_engine which);

/* ---- Shapes (queue.c) ------------------------------------------------------------------------ */

/*
 * 52 MiB in flight, and a block ready to follow, keep the fastest disks seen busy; the same in
 * larger blocks does not (docs/performance.md). 4 MiB is also what a Lustre client sends at most in
 * one request.
 */
#define IO_BLOCK_BYTES (4 * MIB)
#define IO_DEPTH 14u
/* Reading a large file takes twice as much: devices that report many requests at a time, as virtual
 * ones do, would idle while their blocks are copied. */
#define IO_READ_DEPTH 28u

/* Buffers of a lane, as far as the user did not fix them; at least two blocks. */
#define IO_MOST_LANE_BYTES (128 * MIB)
#define IO_MOST_DEPTH 64u

/* How a file is written: by which engine, in which requests. */
struct io_shape {
	enum ioshape_engine engine;
	size_t block_bytes;   /* of a buffer, and of the largest requests; a multiple of 4096 */
	unsigned depth;       /* buffers: one more than requests in flight at most */
	bool fixed;           /* so many are in flight, whatever they take: the user has said so */
	size_t request_bytes; /* of most of its requests; 0: of block_bytes */
	/* Of files whose requests go to one storage target each; 0 and 0 for others. */
	uint32_t targets;
	uint64_t stripe_bytes;
	bool shared; /* with other hosts, and nothing is known of its targets */
};

/* Returns the shape for reading so many bytes of this filesystem. Pure. */
struct io_shape io_shape_to_read(const struct io_config *config, const struct fs_info *fs,
				 uint64_t bytes);

/*
 * Returns the shape for a new file of about so many bytes (0: not known) on this filesystem, with
 * its layout. `why` receives the words for the choice. Pure.
 */
struct io_shape io_shape_for(const struct io_config *config, const struct fs_info *fs,
			     uint64_t file_bytes, char *why, size_t why_bytes);

/* How long the request at `offset` is to be, of buffers of this size. Pure. */
size_t io_request_bytes(const struct fs_layout *layout, uint64_t offset, size_t block_bytes);

/* ---- Buffers and lanes (queue.c) ------------------------------------------------------------- */

/* As many tensors as are worth it, that end in one block. */
#define IO_MOST_LOANS 16u

/* A stretch of a block that is written from where it lies, and not from the buffer. */
struct io_loan {
	size_t at, bytes; /* in the block */
	const uint8_t *from;
};

struct io_buffer {
	struct io_op op;
	uint8_t *data;   /* shape.block_bytes of it */
	uint64_t offset; /* what was asked for, whatever the engine has made of op since */
	size_t bytes;
	size_t moved; /* on completion: less than bytes only when reading past the end of the file
		       */
	unsigned retries; /* since the last progress */
	bool in_flight;
	uint64_t sent_ns; /* when writing: when it left first */
	/* When reading: the failure, kept until somebody asks for the buffer. 0 if there is none.
	 */
	int failed;
	bool refused; /* the engine did not even take the request */
	/* When writing; in order. */
	struct io_loan loans[IO_MOST_LOANS];
	unsigned loan_count;
	struct iovec parts[2 * IO_MOST_LOANS + 1];
};

struct io_lane {
	struct io_config config;
	struct io_shape shape; /* of the file of the moment */
	uint8_t *memory;
	size_t memory_bytes; /* at least what the shape takes */
	struct io_buffer *buffers;
	unsigned buffers_made;
	struct io_op *free; /* buffers' ops that nobody uses */
	unsigned in_flight;
	/*
	 * Most requests in flight, whatever the depth is: one less than there are buffers. The one
	 * left over is filled while the others are under way, and leaves the moment one of them is
	 * done. Devices that report many completions at a time (virtual disks do) would idle while
	 * the next block is copied.
	 */
	unsigned limit;
	struct io_op *ready; /* when writing: full buffers that may not leave yet, in order */
	unsigned ready_count;
	struct io_depth depth;           /* when writing */
	uint64_t waited_ns;              /* when the last request came back that was waited for */
	const struct io_engine_ops *ops; /* NULL until the first block needs it */
	void *engine;
	enum ioshape_engine engine_asked; /* when it was opened */
	unsigned engine_depth;            /* what it was opened for */
	int first_code;                   /* why the engine of the rule could not be opened; 0 */
	bool buffers_refused;             /* it could, but they are not registered */
	bool engine_failed;               /* a request failed: the next file gets a new one */
	char step_down[256]; /* why the engine is not, or not quite, the preferred one; "" if it is
			      */

	struct fs_memory fs_memory;
	struct base_fresh *fresh; /* that is read into; NULL if that is not known */

	/* The file of the moment. */
	int fd;
	const char *path;
	const char *verb; /* "write" or "read" */
	bool reading;
	bool direct;            /* fd is in O_DIRECT mode now */
	uint32_t alignment;     /* of offsets and sizes while it is */
	uint64_t file_bytes;    /* when reading; UINT64_MAX if not known */
	struct io_notes *notes; /* may be NULL */
};

/*
 * Cuts the buffers anew, and gets more memory for them if it takes more. The engine is closed only
 * if it is another one, or too small; the next file opens it. While no buffer is taken. On -ENOMEM
 * the lane keeps the shape that it had.
 */
int io_lane_shape(struct io_lane *lane, const struct io_shape *shape, struct base_error *error);

/* Opens the engine unless a former file did. -EINVAL and the like only if no engine at all works.
 */
int io_lane_start(struct io_lane *lane, struct base_error *error);

/* Begins and ends work on one file. Nothing may be in flight at the end. */
void io_lane_attach(struct io_lane *lane, int fd, const char *path, bool reading,
		    struct io_notes *notes);
void io_lane_detach(struct io_lane *lane);

/*
 * Switches the file to direct I/O if engine, policy and filesystem agree. -ENOTSUP, with a
 * sentence, if they do not and the policy is to require it; otherwise a note says why not.
 */
int io_lane_go_direct(struct io_lane *lane, const struct fs_info *fs, struct base_error *error);

/* Sets or clears O_DIRECT. 0 or a negative errno. */
int io_set_direct(int fd, bool on);

/*
 * What offsets and sizes must be multiples of for direct I/O there; 0 if it cannot be done in
 * blocks of this lane.
 */
uint32_t io_lane_direct_alignment(const struct io_lane *lane, const struct fs_info *fs);

/* A free buffer; NULL if all are in flight. */
struct io_buffer *io_lane_free_buffer(struct io_lane *lane);
static inline void io_lane_give_back(struct io_lane *lane, struct io_buffer *buffer)
{
	buffer->loan_count = 0;
	buffer->op.next = lane->free;
	lane->free = &buffer->op;
}

/* A free buffer, waiting for the engine to finish one if need be. When writing, finished buffers
 * are free. */
int io_lane_take(struct io_lane *lane, struct io_buffer **buffer, struct base_error *error);

/*
 * Sends buffer->bytes of the buffer to or from buffer->offset. When writing, as soon as it may; the
 * buffer is the lane's from here on, also after a failure, and a failure that comes back at once is
 * reported. When reading, failures wait for io_lane_finish(): nobody may ever ask for what is
 * read ahead.
 */
int io_lane_submit(struct io_lane *lane, struct io_buffer *buffer, struct base_error *error);

/* Waits until this buffer is done, and tells how it went; others may be done on the way. */
int io_lane_finish(struct io_lane *lane, struct io_buffer *buffer, struct base_error *error);

/* What to do about a failed write or read; "" if nothing is known to
 * help. */
const char *io_remedy(int code);

/* How many may be left when the next writer begins: what the storage completes while that one
 * creates its file, and a part of the requests at least. Of a file of which so much was sent in so
 * long, and that took so long to be created itself. */
unsigned io_lane_tail(const struct io_lane *lane, uint64_t submitted, uint64_t took_ns,
		      uint64_t beginning_ns);

/* When writing: waits until at most so many requests are in flight or wait to be sent. */
int io_lane_settle(struct io_lane *lane, unsigned most, struct base_error *error);

/* Waits until nothing is in flight, come what may; when writing, the first failure is reported. */
int io_lane_drain(struct io_lane *lane, struct base_error *error);

#endif
