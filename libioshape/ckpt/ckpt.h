/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the floors meet: contexts, saves, and the public handles for records.
 */
#ifndef CKPT_CKPT_H
#define CKPT_CKPT_H

#include "base/base.h"
#include "ring/ring.h"
#include "slots/slots.h"
#include "zip/zip.h"

#include <pthread.h>
#include <sys/types.h>

/* ---- Staging (staging.c): memory that asynchronous saves copy tensors into ------------------- */

/* The unit in which it is handed out and handed back. */
#define CKPT_CHUNK_BYTES (16 * MIB)

struct ckpt_chunk {
	struct ckpt_chunk *next;
	uint8_t *memory;
	uint64_t offset; /* in a shared pool's fd */
};

/*
 * Chunks are made at need and kept. A save is admitted when all the chunks that it will hold at a
 * time can be its own: then it can always go on, whatever other saves wait for. First come, first
 * served.
 *
 * The chunks of a shared pool are ranges of one memfd, which can be passed to another process of
 * this host. A forked child that does not execute anything keeps the fd open, and with it the
 * memory if we die before trimming.
 */
struct ckpt_pool {
	pthread_mutex_t lock;
	pthread_cond_t change;
	bool shared;
	int fd; /* shared: -1 before the first chunk was made */
	uint64_t fd_bytes;
	struct ckpt_chunk *ranges; /* shared: parts of the fd without memory, for chunks to come */
	struct ckpt_chunk *free;
	size_t limit;    /* chunks that may be admitted at a time */
	size_t made;     /* chunks that there are, free or not */
	size_t admitted; /* promised to saves, whether they hold them yet or not */
	struct ckpt_waiter *waiters;
};

void ckpt_pool_init(struct ckpt_pool *pool, uint64_t limit_bytes, bool shared);
/* A shared pool's fd, to be passed to another process; the pool's own. */
int ckpt_pool_share(struct ckpt_pool *pool, int *fd, struct base_error *error);
/* Everything has been handed back. */
void ckpt_pool_destroy(struct ckpt_pool *pool);
/* How long a caller waits before its progress callback is asked whether it should. */
#define CKPT_PATIENCE_MS 100

/*
 * Waits for room, or answers -EAGAIN. `chunks` is at most pool->limit. While it waits, `go_on` is
 * asked now and then; anything but 0 ends the waiting with that code.
 */
int ckpt_pool_admit(struct ckpt_pool *pool, size_t chunks, bool refuse,
		    int (*go_on)(void *user, struct base_error *error), void *user,
		    struct base_error *error);
/* Gives up a promise (or, after the chunk was put back, ends it). */
void ckpt_pool_leave(struct ckpt_pool *pool, size_t chunks);
/* A chunk that was promised. -ENOMEM if there is no memory for it after all. */
int ckpt_pool_get(struct ckpt_pool *pool, struct ckpt_chunk **chunk, struct base_error *error);
void ckpt_pool_put(struct ckpt_pool *pool, struct ckpt_chunk *chunk);
/* Makes and prefaults free chunks until there are so many; frees those that nobody uses. */
int ckpt_pool_reserve(struct ckpt_pool *pool, size_t chunks, struct base_error *error);
void ckpt_pool_trim(struct ckpt_pool *pool);

static inline uint64_t ckpt_chunks_for(uint64_t bytes)
{
	return bytes / CKPT_CHUNK_BYTES + (bytes % CKPT_CHUNK_BYTES != 0);
}

/* ---- Slots (slot.c, save_slot.c): the right to write now
 * -------------------------------------------------- */

int ckpt_storage_environment(struct ioshape_context_options *options, struct base_error *error);
void ckpt_storage_defaults(struct ioshape_context_options *options);
int ckpt_storage_check(const struct ioshape_context_options *options, struct fs_wish *wish,
		       struct base_error *error);

/* A context's pools, and what they are opened with. */
struct ckpt_slots {
	char *address, *password, *pool_name; /* the last two may be NULL */
	struct slots_config config;           /* of all pools, but for their names */
	struct slots_policy policy;
	struct fs_wish layout; /* of new files */
	pthread_mutex_t lock;  /* of what follows */
	struct ckpt_pool_use *pools;
	struct ckpt_pool_of_mount *mounts;
};

/* Who is told while a save waits. */
struct ckpt_watch {
	ioshape_queue_fn queue; /* NULL: nobody */
	void *queue_user;
	/* The thread that does nothing but wait for the save; NULL if there is none. The save
	 * shares the slot of a file that this thread has open, or the two would wait for each
	 * other. */
	const pthread_t *blocked;
};

/* The slot of one save. */
struct ckpt_slot {
	struct ioshape_context *context;
	struct slots_slot *slot;         /* NULL once it was released, or shared */
	struct ckpt_shared_slot *shared; /* NULL once it was released, or its own */
	struct ioshape_slot_info info;   /* as of the release */
	uint64_t passed;                 /* bytes */
	/* Who may stop it while it waits for bandwidth. */
	const atomic_bool *abort;
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t progress_total;
};

/*
 * Waits for a slot of the pool that the path belongs to. Afterwards, well or not, it is released,
 * as often as one likes.
 */
int ckpt_slot_take(struct ckpt_slot *slot, struct ioshape_context *context, const char *path,
		   const struct ring_file_options *options, const struct ckpt_watch *watch,
		   struct base_error *error);
/* For ring_file_options.before_block; `user` is the slot. */
void ckpt_slot_pass(void *user, uint64_t bytes);
void ckpt_slot_release(struct ckpt_slot *slot);
/* The same, for ring_file_options.nearly_written. */
void ckpt_slot_hand_over(void *user);

/* ---- Slots that are shared (shared_slot.c) --------------------------------------------------- */

/*
 * The slots of open handles are shared among all of this context in one pool: a thread that has two
 * files open at a time must not wait for itself.
 */
struct ckpt_shared_slot;

/* Takes one, or joins one that is held; NULL if the file needs none. Failures but those of waiting
 * are notes in `seen`. */
int ckpt_shared_slot_take(struct ckpt_shared_slot **shared, struct ioshape_context *context,
			  const char *path, const struct ring_file_options *options,
			  struct ckpt_slot *seen, struct base_error *error);
/* The one that a file has which this thread opened in this pool; NULL if there is none. */
struct ckpt_shared_slot *ckpt_shared_slot_of_thread(struct ioshape_context *context,
						    const struct slots_pool *pool,
						    pthread_t thread);
/* As ckpt_slot_pass(); `user` is the shared slot, or NULL. */
void ckpt_shared_slot_pass(void *user, uint64_t bytes);
/* Fills `seen` for the report. NULL is fine. */
void ckpt_shared_slot_release(struct ckpt_shared_slot *shared, struct ioshape_context *context,
			      struct ckpt_slot *seen);

/* After the release: what the report has to say. */
void ckpt_slot_report(const struct ckpt_slot *slot, struct ring_notes *notes,
		      struct ioshape_report *report);

/* ---- Contexts (context.c, turns.c) ----------------------------------------------------------- */

/* Lanes that are kept for the next save; more than so many at a time come and go. */
#define CKPT_KEPT_LANES 8

/* Directories remembered as tidied of stale temporary files. */
#define CKPT_KEPT_DIRECTORIES 256

struct ioshape_context {
	pid_t owner;     /* the process that opened it */
	uint64_t number; /* unlike the address never used again in this process */
	struct base_log log;
	struct ring_config config;
	unsigned copy_threads;
	enum ioshape_staging_full staging_full;
	enum ioshape_full full;
	uint32_t full_wait_ms;
	_Atomic uint64_t targets_looked_ns; /* when storage targets were last looked at: room.c */
	struct ckpt_pool pool;
	struct ckpt_pool shared_pool; /* of ranks that hand their bytes to another process */
	struct ckpt_slots slots;

	pthread_mutex_t lock; /* of all below */
	pthread_cond_t saves_change;
	struct ring_lane *lanes[CKPT_KEPT_LANES];
	size_t lane_count;
	char *tidied[CKPT_KEPT_DIRECTORIES];
	size_t tidied_count;
	struct ckpt_turn *turns;               /* saves that have begun, oldest first */
	struct ckpt_shared_slot *shared_slots; /* of open handles */
	struct ioshape_save *background;       /* handles not yet freed; async.c */
};

/* First in every call: -EINVAL without a context, -EPERM in a forked child. */
int ckpt_enter(const struct ioshape_context *context, struct base_error *error);

/* Last in every call: keeps the sentence for ioshape_context_message(), and returns `code`. */
int ckpt_leave(struct ioshape_context *context, int code, const struct base_error *error);

int ckpt_take_lane(struct ioshape_context *context, struct ring_lane **lane,
		   struct base_error *error);
void ckpt_return_lane(struct ioshape_context *context, struct ring_lane *lane);

/* True once for each directory. The path is absolute. */
bool ckpt_should_tidy(struct ioshape_context *context, const char *path);

/*
 * The path made absolute, its directory's symbolic links resolved if it is there: what it means
 * now, whatever the working directory is by the time it is used. To be freed. -EINVAL if it cannot
 * be a file's.
 */
int ckpt_absolute_path(const char *path, char **absolute, struct base_error *error);

/* Whether a save has the room that it needs, for other saves to the same file. */
enum ckpt_turn_room { CKPT_ROOM_UNKNOWN, CKPT_ROOM_AWAITED, CKPT_ROOM_TAKEN };

/* A save's place among those to the same file: they commit in the order in which they began. */
struct ckpt_turn {
	struct ckpt_turn *next;
	char *path;               /* absolute; owned */
	bool abort_waits;         /* set under the context's lock to stop waiting */
	enum ckpt_turn_room room; /* under the context's lock */
};

int ckpt_turn_begin(struct ioshape_context *context, struct ckpt_turn *turn, const char *path,
		    struct base_error *error);
/* Waits until no earlier save to this path is left. -ECANCELED if abort_waits is set meanwhile. */
int ckpt_turn_wait(struct ioshape_context *context, struct ckpt_turn *turn,
		   struct base_error *error);
void ckpt_turn_end(struct ioshape_context *context, struct ckpt_turn *turn);

void ckpt_turn_note_room(struct ioshape_context *context, struct ckpt_turn *turn,
			 enum ckpt_turn_room room);
/* An earlier save to this path waits for room: it goes first. */
bool ckpt_turn_is_behind(struct ioshape_context *context, const struct ckpt_turn *turn);
/* A later save to this path has room: it will wait for this one before it ends. */
bool ckpt_turn_is_overtaken(struct ioshape_context *context, const struct ckpt_turn *turn);

/* ---- Room (room.c): what a save does that does not fit --------------------------------------- */

struct ckpt_room {
	struct ioshape_context *context;
	const char *path;  /* absolute */
	bool in_directory; /* the path is that of a directory, which may have to be made */
	uint64_t needed_bytes;
	const struct ring_file_options *options; /* who may stop it while it waits */
	struct ckpt_turn *turn;                  /* NULL: of no file */
	/* Makes what room can be made: by default ring_clear_room(). */
	void (*clear)(void *user);
	void *clear_user;
	/* Zeros. */
	struct fs_room seen;
	struct base_error why; /* it does not fit */
	unsigned failures;     /* of writes, for want of room */
	uint64_t waited_ns;
};

/*
 * Before the slot: 0 if there is room, or nobody knows; otherwise what the context's `full` says:
 * -ENOSPC, IOSHAPE_E_SKIPPED, or after waiting 0, -ENOSPC, or -ECANCELED. Costs one statfs(), and
 * nothing for small files.
 */
int ckpt_room_await(struct ckpt_room *room, struct base_error *error);

/*
 * After a try that ended with *ret: true if it ended for want of room and is to be tried again;
 * then *ret and the error are cleared, the try is abandoned by the caller, slot included, and
 * ckpt_room_await() comes next. `repeats`: its bytes can be had once more. Otherwise *ret and the
 * error are what the save ends with.
 */
bool ckpt_room_again(struct ckpt_room *room, int *ret, bool repeats, struct base_error *error);

/* What the report has to say. */
void ckpt_room_note(const struct ckpt_room *room, int ret, struct ring_notes *notes,
		    const struct base_error *error);

/* For what is not tried again: IOSHAPE_E_SKIPPED instead of a want of room, if `full` says so. */
int ckpt_room_verdict(const struct ioshape_context *context, int ret, struct base_error *error);
void ckpt_room_note_skip(struct ring_notes *notes, const struct base_error *error);

/* ---- Files on their way (output.c) ----------------------------------------------------------- */

struct ckpt_output {
	struct ioshape_context *context;
	bool in_new_directory; /* nobody has left anything behind there */
	struct ring_lane *lane;
	struct ring_writer *file;
	struct ring_notes notes;
};

/*
 * Takes a lane of output->context and begins a file at `path`, which is the same as `absolute`, but
 * for messages. Of the options what follows from the path is filled in here. Afterwards, well or
 * not, it is closed with ckpt_output_close().
 */
int ckpt_output_open(struct ckpt_output *output, const char *path, const char *absolute,
		     const struct ring_file_options *options, struct base_error *error);

/*
 * The end of every save: waits for its turn, puts the finished file in place, and adds to the
 * report what the file and the notes have to say. `ret` is how it went so far: after a failure
 * there is only the report.
 */
int ckpt_output_commit(struct ckpt_output *output, struct ckpt_turn *turn, int ret,
		       struct ioshape_report *report, struct base_error *error);

/* Abandons the file if it was not committed. A zip writer, if there is one, owns it. Afterwards
 * another can be opened: the notes stay. */
void ckpt_output_close(struct ckpt_output *output, struct zip_writer *zip);

/* What the public handles of files have in common. Zero it, and set output.context. */
struct ckpt_handle {
	struct ckpt_output output;
	struct ckpt_shared_slot *slot; /* NULL before and after */
	struct ckpt_slot slot_seen;    /* what became of it */
	char *path;                    /* absolute */
	uint64_t begin_ns;
	bool committed;          /* or tried to: only the message and free() remain */
	struct base_error error; /* of the last call that failed */
};

/* Afterwards, well or not, it is closed with ckpt_handle_close(). */
int ckpt_handle_open(struct ckpt_handle *handle, struct ioshape_context *context, const char *path,
		     const struct ring_file_options *options, struct base_error *error);

/* First in every call on an open handle. Forgets the last failure. */
int ckpt_handle_enter(struct ckpt_handle *handle);

/* Last in those that write: what becomes of a want of room. */
int ckpt_handle_leave(struct ckpt_handle *handle, int ret);

/* A commit: enter, begin a turn; (the caller finishes the file;) end. After the end, which fills
 * `report` unless it is NULL, the turn has ended, too. */
int ckpt_handle_begin_commit(struct ckpt_handle *handle, struct ckpt_turn *turn,
			     struct ioshape_report *report);
int ckpt_handle_end_commit(struct ckpt_handle *handle, struct ckpt_turn *turn, int ret,
			   uint64_t payload_bytes, struct ioshape_report *report);

void ckpt_handle_close(struct ckpt_handle *handle, struct zip_writer *zip);

/* ---- Plans (plan*.c): everything about a save but the bytes ---------------------------------- */

/* What a caller wants to be saved, borrowed: tensors, or records with a pickle of its own. */
struct ckpt_payload {
	bool raw; /* records */
	const struct ioshape_tensor *tensors;
	const struct ioshape_record *records;
	size_t count;
};

/* A record to be written, and where its bytes are to be had. */
struct ckpt_record {
	const char *name; /* the plan's own */
	uint64_t bytes;
	uint64_t start;   /* in the payload: what is staged, one record behind the other */
	const void *data; /* where it lies as it is saved, unless one of the next two is set */
	const struct ioshape_tensor *packed; /* must be packed row-major */
	ioshape_fetch_fn fetch;
	void *fetch_user;
	uint32_t alignment; /* 0: by size */
};

struct ckpt_plan {
	const char *path; /* for messages; borrowed */
	struct ckpt_record *records;
	size_t count;
	size_t own; /* of the first records, whose bytes are the plan's; the rest is the payload */
	bool fetches;            /* some record is brought by a function of the caller's */
	uint64_t payload_bytes;  /* sum of the records of the payload */
	uint64_t expected_bytes; /* of the file, the index not counted */
	struct zip_index index;  /* table and metadata */
	void *memory;            /* names, shapes and strides of the copies */
	void *metadata_memory;
	/* Of tensors only. */
	struct ioshape_tensor *tensors; /* copies: only `data` is still the caller's */
	struct zip_layout *layouts;
	struct zip_tensor_row *rows;
	struct base_buffer pickle; /* data.pkl */
};

/*
 * Checks everything and copies it: afterwards only the payload's bytes are still the caller's, and
 * the path. -EINVAL, -EEXIST or IOSHAPE_E_LIMIT for bad arguments.
 */
int ckpt_plan_make(struct ckpt_plan *plan, const char *path, const struct ckpt_payload *payload,
		   const struct ioshape_metadata *metadata, struct base_error *error);
void ckpt_plan_free(struct ckpt_plan *plan);

/*
 * Copies bytes [offset, offset + bytes) of a record from the caller's memory, packed if need be, or
 * has them fetched: only that can fail.
 */
int ckpt_plan_copy(const struct ckpt_plan *plan, size_t record, uint64_t offset, void *into,
		   size_t bytes, struct base_error *error);

/*
 * Checks metadata given by a caller (NULL: none) and copies it, with all it points to, into one
 * piece of memory to be freed with free().
 */
int ckpt_take_metadata(struct ioshape_metadata *into, void **memory,
		       const struct ioshape_metadata *from, struct base_error *error);

/* ---- Saving (save.c) ------------------------------------------------------------------------- */

/* Where the bytes of the payload come from. */
struct ckpt_source {
	/*
	 * The next run of bytes of a record from `offset` on: at least one, at most *bytes. It
	 * stays valid until the next call.
	 */
	int (*next)(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		    struct base_error *error);
	/* Goes back to the beginning; false if that is not possible any more. */
	bool (*restart)(void *user);
	void *user;
};

/* A source: the caller's own memory. Zero all but the plan. */
struct ckpt_direct {
	const struct ckpt_plan *plan;
	uint8_t *scratch; /* for what does not lie as it is saved; made at need, to be freed */
	bool fetched;     /* something: callers' functions bring each byte once */
};
int ckpt_direct_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error);
bool ckpt_direct_restart(void *user);

/* All records of a plan, and the end of the archive. */
int ckpt_write_records(struct zip_writer *zip, const struct ckpt_plan *plan,
		       const struct ckpt_source *source, struct base_error *error);

/* What the caller's options say about the file. */
struct ring_file_options ckpt_file_options(const struct ioshape_save_options *options);

/*
 * One save, from the slot to the report, on the calling thread. The turn has begun. Of the options
 * what follows from plan and turn is filled in here.
 */
int ckpt_save(struct ioshape_context *context, const char *path, const struct ckpt_plan *plan,
	      const struct ckpt_source *source, const struct ring_file_options *options,
	      const struct ckpt_watch *watch, struct ckpt_turn *turn, struct ioshape_report *report,
	      struct base_error *error);

/* Ends what is in the background, without a trace, and lets go of its handles. For the end of a
 * context. */
void ckpt_end_background(struct ioshape_context *context);
struct ioshape_group;
/* Asks those of one group to stop. */
void ckpt_stop_background_of(struct ioshape_context *context, const struct ioshape_group *group);

#endif
