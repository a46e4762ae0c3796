/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the save layer. Plans, which hold everything about a save but its bytes; the order of
 * saves to one path; slots of files; and the transfer of a plan's bytes to a file.
 */
#ifndef SAVE_FILE_H
#define SAVE_FILE_H

#include "save/context.h"

/* ---- Plans (plan.c) -------------------------------------------------------------------------- */

/* A record to be written, and the source of its bytes. */
struct save_record {
	const char *name; /* owned by the plan */
	uint64_t bytes;
	uint64_t start;   /* position in staging memory, where records follow each other */
	const void *data; /* the bytes as they are saved, unless `fetch` is set */
	ioshape_fetch_fn fetch;
	void *fetch_user;
	uint32_t alignment; /* 0: chosen by the size */
	uint32_t dtype;     /* type of the elements; 0: not examined */
	uint8_t group;      /* group of tensors that change together; 0: none */
	bool later;         /* may be copied after the call */
	uint32_t sample;    /* if copied later: checksum of sample bytes, taken during the call */
};

struct save_plan {
	const char *path; /* for error messages; borrowed */
	struct save_record *records;
	size_t count;
	/* Number of leading records whose bytes belong to the plan; the others are the payload. */
	size_t own;
	/* A safetensors file, which has no index; otherwise a torch zip. */
	bool safetensors;
	ioshape_name_fn tensor_name; /* names the tensors of records in alarms; NULL: none */
	void *tensor_name_user;
	bool checksums;         /* write checksums beside the file */
	bool fetches;           /* a function of the caller fetches some record */
	bool later;             /* some record may be copied after the call */
	uint64_t payload_bytes; /* size of all records of the payload */
	/* Payload_bytes plus the gaps between records in staging memory. */
	uint64_t staged_bytes;
	uint64_t expected_bytes;   /* exact size of the file */
	struct format_index index; /* table of tensors, metadata, and statistics */
	/* Statistics of each record, filled while it is written; NULL: nothing is examined. */
	struct format_examined *examined;
	void *memory; /* names, shapes and strides */
	void *metadata_memory;
	/* Members for tensors only. */
	struct ioshape_tensor *tensors; /* copies, in which only `data` is still the caller's */
	struct format_layout *layouts;
	struct format_tensor_row *rows; /* table of tensors in a zip */
	struct base_buffer head;        /* data.pkl, or the header of a safetensors file */
};

/*
 * Checks the arguments and copies all but the payload's bytes and the path, which stay the
 * caller's. With `examine`, the save takes statistics of the tensors. -EINVAL, -EEXIST or
 * IOSHAPE_E_LIMIT: the arguments are not valid.
 */
int save_plan_make(struct save_plan *plan, const char *path, const struct save_payload *payload,
		   const struct ioshape_metadata *metadata, bool examine, struct base_error *error);
void save_plan_free(struct save_plan *plan);

/*
 * Copies bytes [offset, offset + bytes) of a record, from memory or by the caller's function. Only
 * such a function can fail.
 */
int save_plan_copy(const struct save_plan *plan, size_t record, uint64_t offset, void *into,
		   size_t bytes, struct base_error *error);

/* ---- Order (file.c) -------------------------------------------------------------------------- */

/*
 * The position of a save among saves to one path, which commit in the order in which they began. A
 * save with a deadline waits only for a save that is committing at the moment. Earlier saves that
 * it overtakes do not commit at all, as if it had replaced their files at once.
 */
struct save_order {
	TAILQ_ENTRY(save_order) entry;
	char *path; /* absolute path; owned */
	/* The context's lock protects these. */
	bool abort_waits; /* end save_order_wait() */
	bool committing;
	/* Fixed while `committing`, because no other save commits to the path then. */
	bool overtaken;
};

/* Takes the position behind all saves to the path that have begun. */
int save_order_begin(struct ioshape_context *context, struct save_order *order, const char *path,
		     struct base_error *error);
/* Gives the position up, committed or not, and wakes the saves behind it. */
void save_order_end(struct ioshape_context *context, struct save_order *order);

/* ---- Examined saves (examine.c) -------------------------------------------------------------- */

/* A save in the comparison with the checkpoint before it. All members but the first two begin as
 * zeros. */
struct save_compare {
	struct ioshape_context *context;
	const char *path;       /* absolute path; borrowed */
	struct save_seen *seen; /* the facts that will be remembered of it */
	TAILQ_ENTRY(save_compare) entry;
	uint64_t compared_bytes, unchanged_bytes; /* of large tensors */
	uint32_t alarms;                          /* bits of enum ioshape_alarm */
	char alarm[256];                          /* the first one, as a sentence */
	/* Other processes save parts of the checkpoint. So `standstill` has the result of the rule
	 * `unchanged`, which raises no alarm here. */
	bool shared;
	struct save_standstill standstill;
};

/*
 * Compares a save with what was saved and loaded before in its family of checkpoints, and with
 * saves of the family that are under way. Called when all records are put, before the archive is
 * finished. `entries` has one entry for each record of the plan. For each alarm, logs a warning or
 * returns IOSHAPE_E_ALARM, as the context's `examine` demands.
 */
int save_examine(struct save_compare *compare, const struct save_plan *plan,
		 const struct format_entry *entries, struct base_error *error);
/* Raises the alarm `unchanged` of a checkpoint that several processes saved, if no tensors of a
 * group move. For that, `compare` needs only its first two members. */
int save_examine_standstill(struct save_compare *compare, const struct save_standstill *standstill,
			    struct base_error *error);
/* Ends the comparison, even if save_examine() was not called. If the file is in place, the next
 * save is compared with it. */
void save_compare_end(struct save_compare *compare, bool committed, struct ioshape_report *report);

/* Remembers a file that was loaded, because a restarted job saves to the family from which it
 * loaded. `entries` has its records, and `index`, which may be NULL, their names and statistics.
 * `path` may be relative. A `shared` checkpoint may have tensors that other processes will save. */
void save_compare_loaded(struct ioshape_context *context, const char *path,
			 const struct format_entry *entries, uint64_t count,
			 const struct format_index *index, bool shared);

/* Returns the archive that a reader has open (load.c). */
const struct format_reader *save_reader_zip(const struct ioshape_reader *reader);

/* ---- Checkpoints of many archives (items.c) -------------------------------------------------- */

/* Adds the tensors of an archive that has been written. Several threads may call it. */
int save_items_add(struct save_items *items, const char *name, const struct save_plan *archive,
		   const struct format_entry *entries, struct base_error *error);

/* ---- Slots of files (slot.c) ----------------------------------------------------------------- */

/*
 * Waits for a slot of the path's pool. A save passes `watch`. An open file passes NULL: all open
 * files of a context in one pool share a slot. A save also shares it if the thread that opened the
 * files waits for the save; otherwise this thread would wait for itself.
 *
 * After this call, even after a failure, save_slot_release() may be called any number of times.
 * Until the release the options are borrowed; this call sets their `target_group`, `target_groups`
 * and `before_block`.
 */
int save_slot_take(struct save_slot *slot, struct ioshape_context *context, const char *path,
		   const struct fs_found *found, struct io_file_options *options,
		   const struct save_watch *watch, struct base_error *error);
void save_slot_release(struct save_slot *slot);
/* Counts a save that raised `alarms` in the path's pool, for the operator. Best effort. */
void save_count_alarms(struct ioshape_context *context, const char *path, uint32_t alarms);
/* Fills in the slot's part of the report. Called after the release. */
void save_slot_report(const struct save_slot *slot, struct io_downgrades *downgrades,
		      struct ioshape_report *report);

/* ---- Several threads (parallel.c) ------------------------------------------------------------ */

/* Bytes that are examined just before they are written, and still are in a cache then. */
#define SAVE_CACHED_BYTES (128 * KIB)

/* The destination of a record's bytes. */
struct save_sink {
	/* Appends bytes. *crc is their CRC-32, if that is known; otherwise `crc` is NULL. */
	int (*put)(void *to, const void *data, size_t bytes, const uint32_t *crc,
		   struct base_error *error);
	void *to;
};

/* The examination of a record. */
struct save_examining {
	struct base_statistics *statistics; /* NULL: no examination */
	struct base_statistics_rest rest;
	uint64_t offset; /* bytes of the record that were put */
};

struct save_unit;

/*
 * Threads that help to examine, checksum and copy the bytes of a save, if the storage is faster
 * than one thread. They start at need. All zeros: none helps.
 */
struct save_parallel {
	unsigned helpers;       /* most threads beside the save's own */
	struct io_writer *file; /* file that is written; NULL: none */
	struct base_crew crew;
	struct save_unit *units; /* the bytes in progress; NULL: not started */
	unsigned count;
	_Atomic unsigned next; /* first unit that no thread has taken */
};

/*
 * Puts at most *bytes next bytes of a record by several threads, and examines them. Returns in
 * *bytes how many; 0 if the calling thread is as fast alone. File and statistics are those of one
 * thread.
 */
int save_parallel_put(struct save_parallel *parallel, struct save_examining *examining,
		      const struct save_sink *sink, const uint8_t *data, size_t *bytes,
		      struct base_error *error);
void save_parallel_close(struct save_parallel *parallel);

/* ---- Bytes of a plan (plan.c) ---------------------------------------------------------------- */

/* The source of the payload's bytes. */
struct save_source {
	/*
	 * Returns the next run of a record's bytes from `offset` on: at least one byte, at most
	 * *bytes. The run stays valid until the next call.
	 */
	int (*next)(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		    struct base_error *error);
	/* Declares that all bytes go to this file unchanged. So the source may let the file borrow
	 * its memory, and may make bytes directly in the file's blocks. */
	void (*to_file)(void *user, struct io_writer *file);
	void *user;
	struct save_parallel *parallel; /* NULL: one thread writes the bytes */
};

/* Declares that all bytes of the source go to this file unchanged. */
void save_source_to_file(const struct save_source *source, struct io_writer *file);

/* A source that reads the caller's own memory. All members but the plan and `parallel.helpers`
 * begin as zeros. */
struct save_direct {
	const struct save_plan *plan;
	/* Bytes that must be made are made in its blocks; NULL: in `scratch`. */
	struct io_writer *file;
	uint8_t *scratch; /* allocated at need */
	struct save_parallel parallel;
};
int save_direct_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error);
void save_direct_to_file(void *direct, struct io_writer *file);
/* Returns the source. */
struct save_source save_direct_source(struct save_direct *direct,
				      const struct ioshape_context *context);
/* Lets several threads work, if the context allows that. Returns them. */
struct save_parallel *save_direct_parallel(struct save_direct *direct,
					   const struct ioshape_context *context);
void save_direct_end(struct save_direct *direct);

/* Passes all bytes of a record to the sink, in order. */
int save_bring_record(const struct save_plan *plan, size_t i, const struct save_source *source,
		      const struct save_sink *sink, struct base_error *error);

/* Writes all records of a plan and the end of the archive. `compare` may be NULL. */
int save_write_records(struct format_writer *zip, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error);

/* ---- One save (file.c) ----------------------------------------------------------------------- */

/* Completes a report: the duration of the save, and the time between its end and its deadline. */
void save_report_end(struct ioshape_report *report, uint64_t begin_ns, uint64_t deadline_ns);

/* The file options that follow from the caller's options for a save or a file. */
#define SAVE_FILE_OPTIONS(given)                                                                   \
	((struct io_file_options){                                                                 \
		.progress = (given)->progress,                                                     \
		.progress_user = (given)->progress_user,                                           \
		.no_replace = (given)->replace == IOSHAPE_OFF,                                     \
		.no_sync = (given)->sync == IOSHAPE_OFF,                                           \
		.deadline_ns = base_deadline_ns((given)->deadline_ms),                             \
	})

/*
 * Runs one save, from the slot to the report, on the calling thread. The caller has begun `order`.
 * This fills in those options that follow from plan and order. `given` is the path as in struct
 * save_file.
 */
int save_write(struct ioshape_context *context, const char *given, const struct save_plan *plan,
	       const struct save_source *source, const struct io_file_options *options,
	       const struct save_watch *watch, struct save_order *order,
	       struct ioshape_report *report, struct base_error *error);

#endif
