/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the save floor: plans, which are everything about a save but its bytes; files on their
 * way, from the slot to the commit; and how the bytes of a plan come to a file.
 */
#ifndef SAVE_FILE_H
#define SAVE_FILE_H

#include "save/context.h"

/* ---- Plans (plan.c) -------------------------------------------------------------------------- */

/* A record to be written, and where its bytes are. */
struct save_record {
	const char *name; /* the plan's own */
	uint64_t bytes;
	uint64_t start;   /* in what is staged: one record behind the other */
	const void *data; /* where it lies as it is saved, unless one of the next two is set */
	const struct ioshape_tensor *packed; /* must be packed row-major */
	ioshape_fetch_fn fetch;
	void *fetch_user;
	uint32_t alignment; /* 0: by size */
	bool later;         /* may be copied after the call */
	uint32_t sample;    /* of what is copied later: a checksum of what it was in the call */
};

struct save_plan {
	const char *path; /* for messages; borrowed */
	struct save_record *records;
	size_t count;
	size_t own; /* of the first records, whose bytes are the plan's; the rest is the payload */
	bool safetensors;          /* that container, without an index; otherwise a torch zip */
	bool checksums;            /* are to be put beside the file */
	bool fetches;              /* a function of the caller's fetches some record */
	bool later;                /* some record may be copied after the call */
	uint64_t payload_bytes;    /* sum of the records of the payload */
	uint64_t staged_bytes;     /* the same, with what lies between them when they are staged */
	uint64_t expected_bytes;   /* of the file, to the byte */
	struct format_index index; /* table and metadata */
	void *memory;              /* names, shapes and strides of the copies */
	void *metadata_memory;
	/* Of tensors only. */
	struct ioshape_tensor *tensors; /* copies: only `data` is still the caller's */
	struct format_layout *layouts;
	struct format_tensor_row *rows; /* of a zip */
	struct base_buffer head;        /* data.pkl, or the header of a safetensors file */
};

/*
 * Checks everything and copies it: afterwards only the payload's bytes are still the caller's, and
 * the path. -EINVAL, -EEXIST or IOSHAPE_E_LIMIT for bad arguments.
 */
int save_plan_make(struct save_plan *plan, const char *path, const struct save_payload *payload,
		   const struct ioshape_metadata *metadata, struct base_error *error);
void save_plan_free(struct save_plan *plan);

/*
 * Copies bytes [offset, offset + bytes) of a record from the caller's memory, packed if need be, or
 * has them fetched: only that can fail.
 */
int save_plan_copy(const struct save_plan *plan, size_t record, uint64_t offset, void *into,
		   size_t bytes, struct base_error *error);

/* ---- Order (file.c) -------------------------------------------------------------------------- */

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
int save_compare_records(struct save_compare *compare, const struct format_entry *entries,
			 uint64_t count, struct base_error *error);
/* Last, whether or not there was the call above: what is in place is what the next save is compared
 * with. */
void save_compare_end(struct save_compare *compare, bool in_place, struct ioshape_report *report);

/* Remembers a file that is read: a job that restarts saves to the series that it has loaded from.
 * Any path. */
void save_compare_loaded(struct ioshape_context *context, const char *path,
			 const struct format_reader *zip);

/* ---- Slots of files (slot.c) ----------------------------------------------------------------- */

/*
 * Waits for a slot of the pool that the path belongs to, where that was found. Without a `watch` it
 * is the slot of an open file: all of a context in one pool share one, and so does a save that the
 * thread which opened them waits for, or a thread would wait for itself. Afterwards, well or not,
 * it is released, as often as one likes. The options are borrowed until then: their place and
 * before_block are set here.
 */
int save_slot_take(struct save_slot *slot, struct ioshape_context *context, const char *path,
		   const struct fs_found *found, struct io_file_options *options,
		   const struct save_watch *watch, struct base_error *error);
void save_slot_release(struct save_slot *slot);
/* After the release: what the report has to say. */
void save_slot_report(const struct save_slot *slot, struct io_notes *notes,
		      struct ioshape_report *report);

/* ---- Bytes of a plan (plan.c) ---------------------------------------------------------------- */

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
	void (*to_file)(void *user, struct io_writer *file);
	void *user;
};

/* A source: the caller's own memory. Zero all but the plan. */
struct save_direct {
	const struct save_plan *plan;
	struct io_writer *file; /* which what does not lie as it is saved is made in, or else */
	uint8_t *scratch;       /* here; made at need, to be freed */
};
int save_direct_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error);
void save_direct_to_file(void *direct, struct io_writer *file);

/* Puts all bytes of a record, in order, wherever `put` brings them. */
int save_bring_record(const struct save_plan *plan, size_t i, const struct save_source *source,
		      int (*put)(void *to, const void *data, size_t bytes,
				 struct base_error *error),
		      void *to, struct base_error *error);

/* All records of a plan, and the end of the archive. `compare` may be NULL. */
int save_write_records(struct format_writer *zip, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error);

/* ---- One save (file.c) ----------------------------------------------------------------------- */

/* The last of every report: how long the save took, and how long before its deadline it ended. */
void save_report_end(struct ioshape_report *report, uint64_t begin_ns, uint64_t deadline_ns);

/* What the caller's options say about the file: of a save or a file. */
#define SAVE_FILE_OPTIONS(given)                                                                   \
	((struct io_file_options){                                                                 \
		.progress = (given)->progress,                                                     \
		.progress_user = (given)->progress_user,                                           \
		.no_replace = (given)->replace == IOSHAPE_OFF,                                     \
		.no_sync = (given)->sync == IOSHAPE_OFF,                                           \
		.deadline_ns = base_deadline_ns((given)->deadline_ms),                             \
	})

/*
 * One save, from the slot to the report, on the calling thread. The save has its place in the
 * order. Of the options what follows from plan and order is filled in here. `given`: as in struct
 * save_file.
 */
int save_write(struct ioshape_context *context, const char *given, const struct save_plan *plan,
	       const struct save_source *source, const struct io_file_options *options,
	       const struct save_watch *watch, struct save_order *order,
	       struct ioshape_report *report, struct base_error *error);

#endif
