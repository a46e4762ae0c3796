/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the save floor: files on their way, from the slot to the commit, and what the public
 * handles on such files have in common.
 */
#ifndef SAVE_FILE_H
#define SAVE_FILE_H

#include "save/context/context.h"
#include "save/plan/plan.h"

/* ---- Order (order.c) ------------------------------------------------------------------------- */

/*
 * A save's place among those to the same file: they commit in the order in which they began. One
 * with a deadline waits for none that is not at it just now; what it overtakes does not commit at
 * all, as if it had been replaced at once.
 */
struct save_order {
	TAILQ_ENTRY(save_order) entry;
	char *path; /* absolute; owned */
	/* Under the context's lock. */
	bool abort_waits; /* stop waiting */
	bool committing;
	bool overtaken; /* settled while `committing`: then nobody else commits to this path */
};

int save_order_begin(struct ioshape_context *context, struct save_order *order, const char *path,
		     struct base_error *error);
/* Waits until the save may commit, unless it was overtaken then. -ECANCELED if abort_waits is set
 * meanwhile. */
int save_order_wait(struct ioshape_context *context, struct save_order *order, bool urgent,
		    struct base_error *error);
/* It is in place. */
void save_order_committed(struct ioshape_context *context, const struct save_order *order);
void save_order_end(struct ioshape_context *context, struct save_order *order);

/* ---- Stale bytes (unchanged.c) --------------------------------------------------------------- */

/* A save among those of its series. Zero all but the first two. */
struct save_compare {
	struct ioshape_context *context;
	const char *path;       /* absolute; borrowed */
	struct save_seen *seen; /* what will be remembered of it */
	TAILQ_ENTRY(save_compare) entry;
	uint64_t compared_bytes, unchanged_bytes;
};

/*
 * Compares, when all records are put and before the archive is finished: with what was saved and
 * loaded before in the series, and with saves to it that are under way. If all that is large is as
 * it was, says so in the log, or answers IOSHAPE_E_UNCHANGED, as the context's `unchanged` has it.
 */
int save_compare_records(struct save_compare *compare, const struct zip_entry *entries,
			 uint64_t count, struct base_error *error);
/* Last, whether or not there was the call above: what is in place is what the next save is compared
 * with. */
void save_compare_end(struct save_compare *compare, bool in_place, struct ioshape_report *report);

/* Remembers a file that is read: a job that restarts saves to the series that it has loaded from.
 * Any path. */
void save_compare_loaded(struct ioshape_context *context, const char *path,
			 const struct zip_reader *zip);

/* ---- Slots of files (slot/slot.c) ------------------------------------------------------------ */

/* The slot of one save. */
struct save_slot {
	struct ioshape_context *context;
	struct slots_slot *slot;         /* NULL once it was released, or shared */
	struct save_shared_slot *shared; /* NULL once it was released, or its own */
	struct ioshape_slot_info info;   /* as of the release */
	uint32_t places;                 /* writers that have storage targets of their own */
	uint64_t passed;                 /* bytes */
	/* What may stop it while it waits for bandwidth. */
	const atomic_bool *abort;
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t progress_total;
};

/*
 * Waits for a slot of the pool that the path belongs to, where that was found. Afterwards, well or
 * not, it is released, as often as one likes.
 */
int save_slot_take(struct save_slot *slot, struct ioshape_context *context, const char *path,
		   const struct fs_found *found, const struct ring_file_options *options,
		   const struct save_watch *watch, struct base_error *error);
/* For ring_file_options.place. */
uint32_t save_slot_place(const struct save_slot *slot, uint32_t *places);
/* For ring_file_options.before_block; `user` is the slot. */
void save_slot_pass(void *user, uint64_t bytes);
void save_slot_release(struct save_slot *slot);

/*
 * The slots of open handles are shared among all of this context in one pool: a thread that has two
 * files open at a time must not wait for itself.
 */
struct save_shared_slot;

/* Takes one, or joins one that is held; NULL if the file needs none. Failures but those of waiting
 * are notes in `seen`. */
int save_shared_slot_take(struct save_shared_slot **shared, struct ioshape_context *context,
			  const char *path, const struct fs_found *found,
			  const struct ring_file_options *options, struct save_slot *seen,
			  struct base_error *error);
/* As save_slot_pass(); `user` is the shared slot, or NULL. */
void save_shared_slot_pass(void *user, uint64_t bytes);
/* Fills `seen` for the report. NULL is fine. */
void save_shared_slot_release(struct save_shared_slot *shared, struct ioshape_context *context,
			      struct save_slot *seen);

/* After the release: what the report has to say. */
void save_slot_report(const struct save_slot *slot, struct ring_notes *notes,
		      struct ioshape_report *report);

/* After a write that ended with `ret`: what the save ends with, and a sentence that says more. */
int save_space_explain(const struct save_space *space, int ret, struct base_error *error);

/* ---- Checksums of other formats (checksums.c) ------------------------------------------------ */

/* After the commit. What it points to is theirs. */
struct zip_checksums save_checksums_of(const struct save_checksums *checksums,
				       const struct ring_writer *file);
/* After the commit, if they are to be put there. A failure is a note. */
void save_checksums_put_beside(const struct save_checksums *checksums, struct ring_writer *file,
			       struct ring_notes *notes);

/* ---- One file (output.c) --------------------------------------------------------------------- */

struct save_output {
	struct ioshape_context *context;
	const char *path;      /* absolute */
	bool in_new_directory; /* no writer has left anything behind there */
	bool urgent;           /* it has a deadline */
	struct fs_found found; /* at the path, before the wait for a slot */
	struct ring_lane *lane;
	struct ring_writer *file;
	const struct save_checksums *checksums; /* NULL: none */
	struct ring_notes notes;
};

/* The one look at the path before the wait, for the free space and for the slot. */
void save_output_find(struct save_output *output);

/*
 * Takes a lane and begins the file at output->path; `path` is the same, for messages. Of the
 * options what follows from the path is filled in here. Afterwards, well or not, it is closed with
 * save_output_close().
 */
int save_output_open(struct save_output *output, const char *path,
		     const struct ring_file_options *options, struct base_error *error);

/*
 * The end of every save: waits for earlier saves to the path (`order` may be NULL), puts the
 * finished file in place, and adds to the report what the file and the notes have to say. `ret` is
 * how it went so far: after a failure there is only the report.
 */
int save_output_commit(struct save_output *output, struct save_order *order, int ret,
		       struct ioshape_report *report, struct base_error *error);

/* Abandons the file if it was not committed. A caller that frees the file itself sets output->file
 * to NULL. */
void save_output_close(struct save_output *output);

/* What the public handles of files have in common. Zero it, and set output.context. */
struct save_handle {
	struct save_output output;
	struct save_shared_slot *slot; /* NULL before and after */
	struct save_slot slot_seen;    /* what became of it */
	char *path;                    /* absolute */
	uint64_t begin_ns;
	uint64_t deadline_ns;
	bool committed;          /* or tried to: only the message and free() remain */
	struct base_error error; /* of the last call that failed */
};

/* Afterwards, well or not, it is closed with save_handle_close(). */
int save_handle_open(struct save_handle *handle, struct ioshape_context *context, const char *path,
		     const struct ring_file_options *options, struct base_error *error);

/* First in every call on an open handle; -EINVAL if that is NULL. Forgets the last failure. */
int save_handle_enter(struct save_handle *handle);
/* The same in calls with bytes to be written. */
int save_handle_enter_with(struct save_handle *handle, const void *data, size_t bytes);

/* Last in those that write: what becomes of a lack of space. */
int save_handle_leave(struct save_handle *handle, int ret);

/* A commit: begin, which gives the file its place in the order; the caller finishes the file; end,
 * which fills `report` unless it is NULL and gives the place up; `compare` may be NULL. */
int save_handle_begin_commit(struct save_handle *handle, struct save_order *order,
			     struct ioshape_report *report);
int save_handle_end_commit(struct save_handle *handle, struct save_order *order, int ret,
			   struct save_compare *compare, uint64_t payload_bytes,
			   struct ioshape_report *report);

/* A zip writer that owns the file has been freed, and output.file is NULL. */
void save_handle_close(struct save_handle *handle);

/* ---- Archives (write.c) ---------------------------------------------------------------------- */

/* Where the bytes of the payload come from. */
struct save_source {
	/*
	 * The next run of bytes of a record from `offset` on: at least one, at most *bytes. It
	 * stays valid until the next call.
	 */
	int (*next)(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		    struct base_error *error);
	/* This file is what they go to, byte by byte: what stays may be lent to it, and what is
	 * made can be made where it will lie. */
	void (*to_file)(void *user, struct ring_writer *file);
	void *user;
};

/* A source: the caller's own memory. Zero all but the plan. */
struct save_direct {
	const struct save_plan *plan;
	struct ring_writer *file; /* which what does not lie as it is saved is made in, or else */
	uint8_t *scratch;         /* here; made at need, to be freed */
};
int save_direct_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error);
void save_direct_to_file(void *direct, struct ring_writer *file);

/* All records of a plan, and the end of the archive. `compare` may be NULL. */
int save_write_records(struct zip_writer *zip, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error);

/* The last of every report: how long it took, and whether that was in time. */
void save_report_end(struct ioshape_report *report, uint64_t begin_ns, uint64_t deadline_ns,
		     int ret);

/* What the caller's options say about the file: of a save, a writer or a file. */
#define SAVE_FILE_OPTIONS(given)                                                                   \
	((struct ring_file_options){                                                               \
		.progress = (given)->progress,                                                     \
		.progress_user = (given)->progress_user,                                           \
		.no_replace = (given)->replace == IOSHAPE_OFF,                                     \
		.no_sync = (given)->sync == IOSHAPE_OFF,                                           \
		.deadline_ns = base_deadline_ns((given)->deadline_ms),                             \
	})

/*
 * One save, from the slot to the report, on the calling thread. The save has its place in the
 * order. Of the options what follows from plan and order is filled in here.
 */
int save_write(struct ioshape_context *context, const char *path, const struct save_plan *plan,
	       const struct save_source *source, const struct ring_file_options *options,
	       const struct save_watch *watch, struct save_order *order,
	       struct ioshape_report *report, struct base_error *error);

#endif
