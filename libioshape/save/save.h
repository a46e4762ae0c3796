/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interface of the save layer for the layers above it: the parts of which group saves and
 * drains are made. Plain saves, files and readers are public calls (include/ioshape).
 */
#ifndef SAVE_SAVE_H
#define SAVE_SAVE_H

#include "base/base.h"
#include "format/format.h"
#include "io/io.h"
#include "slots/slots.h"

#include <pthread.h>

/* ---- Calls on a context (context.c) ---------------------------------------------------------- */

/* Checks a context. Every call begins with this. -EINVAL: no context; -EPERM: the process is a
 * forked child. */
int save_enter(const struct ioshape_context *context, struct base_error *error);
/* Checks a context, a path and options, for calls that take all three. See base_take_options(). */
int save_enter_path(const struct ioshape_context *context, const char *path, void *options,
		    size_t options_bytes, const void *given, const char *what,
		    struct base_error *error);

/* Settings with which a context was opened. They belong to the context. */
struct save_settings {
	const struct base_log *log;
	const struct io_config *io;
	const struct slots_config *slots;
	const char *pool_name; /* may be NULL */
};
struct save_settings save_settings(const struct ioshape_context *context);

/*
 * Makes a path absolute, so that it stays valid if the working directory changes. Resolves symbolic
 * links of its directory if that exists. The caller frees *absolute. -EINVAL: the path cannot be
 * that of a file.
 */
int save_absolute_path(const char *path, char **absolute, struct base_error *error);

/* ---- Slots for another program (slot.c) ------------------------------------------------------ */

/* Names the program and the file for which this context takes slots. Call this before it takes the
 * first one. */
void save_name_program(struct ioshape_context *context, const char *program, const char *path);

/* ---- Free space (file.c) --------------------------------------------------------------------- */

struct save_space {
	struct ioshape_context *context;
	const char *path; /* absolute path */
	/* Facts about the path; NULL: the path is a directory that may not exist yet. */
	const struct fs_found *found;
	uint64_t needed_bytes;
	/* Frees space where it can. NULL: io_clear_space(). */
	void (*clear)(void *user);
	void *clear_user;
};

/*
 * Checks the free space before a save waits for its slot. Returns 0 also if the free space cannot
 * be known. If it does not suffice, returns -ENOSPC or IOSHAPE_E_SKIPPED, as the context's `full`
 * demands. Costs one statfs(), and nothing for small files.
 */
int save_space_check(const struct save_space *space, struct io_downgrades *downgrades,
		     struct base_error *error);

/* Replaces a lack of space by IOSHAPE_E_SKIPPED if the context's `full` demands it. */
int save_space_verdict(const struct ioshape_context *context, int ret, struct base_error *error);

/* ---- Storage below a directory (slot.c) ------------------------------------------------------ */

/* Facts about the file that is to be written. */
struct save_expected {
	const struct fs_layout_request *request;
	uint64_t bytes; /* size; 0: unknown */
	uint32_t files; /* files written at a time; 0: unknown */
};

/* Finds the filesystem's family, its storage targets, and the layout of the directory. Unknown
 * facts are zeros. Makes few system calls if the memory is of this mount. */
void save_look_at_storage(int directory_fd, const char *directory, struct fs_memory *memory,
			  struct fs_facts *facts);

/* Computes the layout of the future file; its count is 0 if that is unknown. Returns how many such
 * files may be written at a time; 0: unknown. Pure. */
uint32_t save_stripes_of(const struct fs_facts *storage, const struct save_expected *expected,
			 struct fs_layout *layout);

/* ---- Checksums of files in other formats (file.c) -------------------------------------------- */

/* Checksums of a file that is being written, and statistics of its tensors. Begins as zeros. */
struct save_checksums {
	bool beside;             /* write both to files beside this one */
	struct base_buffer crcs; /* uint32_t for each whole block */
	uint32_t crc;            /* checksum of the current block */
	size_t filled;           /* bytes of the current block so far */
	/* `records` is 0 if there are none; borrowed until the file is committed */
	struct format_statistics statistics;
};

/* Puts bytes into the file and updates its checksums. Also continues `*crc`, unless it is NULL, as
 * io_writer_put() does. */
int save_checksums_put(struct save_checksums *checksums, struct io_writer *file, const void *data,
		       size_t bytes, uint32_t *crc, struct base_error *error);

/* ---- Files (file.c) -------------------------------------------------------------------------- */

/* Callbacks and facts for a save that waits for a slot. */
struct save_watch {
	ioshape_queue_fn queue; /* NULL: none */
	void *queue_user;
	/* The thread that does nothing but wait for the save; NULL: none. The save shares the slot
	 * of a file that this thread has open; otherwise the two would wait for each other. */
	const pthread_t *blocked;
	bool drains; /* the data is on a tier already: other saves go first */
};

/* A slot that one or several files use (slot.c). */
struct save_hold;

struct save_slot {
	struct ioshape_context *context;
	struct save_hold *hold; /* NULL: no slot, or released */
	/* False: the file joined a slot that was held already. */
	bool waited;
	struct ioshape_slot_info info; /* state at the release */
	uint64_t passed;               /* bytes written so far */
	/* Callbacks that can stop the wait for bandwidth; borrowed. */
	const struct io_file_options *options;
};

/* The tensors of a checkpoint that has many archives (items.c). */
struct save_items;

/* A file that the calling thread writes, from the look at its path to the commit. */
struct save_file {
	/* Input. All other members are zero before save_write_file(). */
	struct ioshape_context *context;
	const char *path; /* absolute path; borrowed */
	/* The path as the caller named it, valid while the working directory is still that of the
	 * call. The caller may have no access to directories above it. NULL: use `path`. */
	const char *given;
	struct io_file_options options;
	bool checks_space;     /* check for options.expected_bytes before the wait for a slot */
	bool in_new_directory; /* the directory is new: there are no temporary files to remove */
	/* Write without a slot, because put() waits for other processes that do so, too. */
	bool without_slot;
	struct save_checksums *checksums; /* checksums of the bytes that are put; NULL: none */
	struct save_items *items; /* tensors of archives that are judged together; NULL: none */
	const char *item;         /* name of the archive that is being written; borrowed */
	/* Downgrades before the file was opened, and then of the file. */
	struct io_downgrades downgrades;
	/* Writes all bytes of the file. */
	int (*put)(void *user, struct io_writer *writer, struct base_error *error);
	void *user;

	/* Results. */
	struct fs_found found; /* facts about the path before the wait for a slot */
	struct save_slot slot;
	struct io_queue *queue;
	struct io_writer *writer; /* NULL unless the file is open */
	/* Modification time of the committed file; 0: not committed, or unknown. */
	int64_t modified_ns;
};

struct save_order;

/*
 * Writes one file, from the check of free space to the commit and the report. `order` is its
 * position among saves to the path; NULL: there are no other saves to it.
 */
int save_write_file(struct save_file *file, const struct save_watch *watch,
		    struct save_order *order, struct ioshape_report *report,
		    struct base_error *error);

/* ---- Loads (load.c) -------------------------------------------------------------------------- */

/* Returns the statistics that lie beside the reader's file. They belong to the reader. */
struct format_statistics save_reader_statistics(const struct ioshape_reader *reader);

/*
 * Declares that a reader reads a shard of a collective save to `path`, so that later saves are
 * compared with it. A reader of a whole file needs no such call.
 */
void save_reader_is_part_of(const struct ioshape_reader *reader, const char *path);

/* ---- Background saves (save.c) --------------------------------------------------------------- */

/* The caller's data, borrowed, and its container. */
enum save_kind {
	SAVE_TENSORS = 0,
	SAVE_RECORDS, /* records that include the caller's own pickle */
	SAVE_SAFETENSORS,
};

struct save_payload {
	enum save_kind kind;
	bool checksums; /* for SAVE_SAFETENSORS: write checksums beside the file */
	const struct ioshape_tensor *tensors;
	const struct ioshape_record *records;
	/* 1 for each record that may be copied after the call returns; NULL: none. */
	const uint8_t *later;
	size_t count;
};

/* Checks the options of a save. `formats`: the call allows any format. `background`: the save runs
 * in the background. */
int save_take_options(struct ioshape_save_options *options,
		      const struct ioshape_save_options *given, bool formats, bool background,
		      struct base_error *error);
/* A save as the layer above sees it. It never changes. */
struct save_task {
	const char *path;                    /* absolute path */
	uint64_t payload_bytes;              /* size of all the caller's records */
	uint64_t expected_bytes;             /* size of a file with these records */
	bool borrow;                         /* read the caller's memory instead of staging it */
	struct io_file_options file_options; /* `abort` and `progress` belong to the save */
};

/* A background save that several processes do together. */
struct save_collective {
	/* Replaces the writing of a file. Called on the save's thread; its result is that of the
	 * save. NULL: the save belongs to this process alone. */
	int (*run)(void *user, struct ioshape_save *save, const struct save_task *task,
		   struct ioshape_report *report, struct base_error *error);
	void *user;
	const void *owner; /* argument of save_stop_background_of() */
	/* Another process writes the bytes: stage them in memory that it can map. */
	bool shared_memory;
	bool blocks;  /* the calling thread does nothing but wait for the save */
	bool started; /* set by save_begin(): run() is called, even if save_begin() fails */
};

/* Begins a background save. `collective` is NULL if the save belongs to this process alone. */
int save_begin(struct ioshape_context *context, const char *path,
	       const struct save_payload *payload, const struct ioshape_save_options *options,
	       struct save_collective *collective, struct ioshape_save **out,
	       struct base_error *error);

/* Records the progress of a save, and passes it on to the caller's callback. An
 * ioshape_progress_fn. */
int save_track(void *save, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes);
/* Returns whether the save was asked to stop. */
bool save_is_stopped(const struct ioshape_save *save);
/* Returns callbacks that record the save's position in the queue for a slot. */
struct save_watch save_watch_of(struct ioshape_save *save);
/* Writes all records of the save and the end of the archive. `file` is the file to which they go;
 * NULL: they do not go to a file. */
int save_write_payload(struct ioshape_save *save, struct format_writer *zip, struct io_writer *file,
		       struct base_error *error);

/* ---- Digests of collective saves (digest.c) -------------------------------------------------- */

/* Largest number of payload bytes that a sample reads. */
#define SAVE_SAMPLE_BYTES (512 * KIB)

/* Checksums of the file that the save writes. */
struct save_digest {
	uint8_t mac[BASE_MAC_BYTES]; /* MAC of all bytes */
	uint32_t crc32;              /* CRC-32 of all bytes */
	uint64_t bytes;
};

/* Returns whether the bytes can be read before the save writes them. */
bool save_has_digest(const struct ioshape_save *save);
/* Computes a MAC over a few bytes. Saves of equal bytes have equal samples; other saves rarely
 * do. */
int save_take_sample(struct ioshape_save *save, uint8_t mac[BASE_MAC_BYTES],
		     struct base_error *error);
/*
 * Reads all bytes, and compares them with the previous save, as writing does. If the key is drawn
 * at random after the bytes are fixed, different bytes have different digests, even if an attacker
 * chose them. Calls `go_on` now and then; if that fails, the call ends with its code.
 */
int save_take_digest(struct ioshape_save *save, const uint8_t key[BASE_MAC_BYTES],
		     struct save_digest *digest, int (*go_on)(void *user, struct base_error *error),
		     void *user, struct base_error *error);

/* Stops the background saves of an owner without waiting for them. */
void save_stop_background_of(struct ioshape_context *context, const void *owner);

/* ---- Staging memory that another process can map (staging.c) --------------------------------- */

/* Size of a chunk, the unit of staging memory. */
#define SAVE_CHUNK_BYTES (16 * MIB)

struct save_staging;

struct save_chunk {
	struct save_chunk *next;
	uint8_t *memory;
	uint64_t offset; /* position in the memfd */
};

static inline uint64_t save_chunks_for(uint64_t bytes)
{
	return bytes / SAVE_CHUNK_BYTES + (bytes % SAVE_CHUNK_BYTES != 0);
}

/* Fills in the memfd that contains all shared staging memory. It belongs to the context. */
int save_shared_fd(struct ioshape_context *context, int *fd, struct base_error *error);
/* Returns the pool of shared staging memory. Its chunks may be taken above the limit of saves. */
struct save_staging *save_shared_pool(struct ioshape_context *context);
/* Takes a chunk; saves take promised ones. -ENOMEM: there is no memory for it after all. */
int save_staging_get(struct save_staging *pool, struct save_chunk **chunk,
		     struct base_error *error);
/* Puts a chunk back, which is kept for later. */
void save_staging_put(struct save_staging *pool, struct save_chunk *chunk);
/* Finds the position in the memfd of bytes that the save is reading. Returns false if they are not
 * in staging memory. */
bool save_find_staged(const struct ioshape_save *save, const void *data, uint64_t *offset);

/* A consumer that still needs staged bytes after it received them. */
struct save_outlet {
	uint64_t (*offset)(void *to); /* returns how many bytes it has received */
	/* Waits until it needs no byte before this offset any more. */
	int (*await)(void *to, uint64_t offset, struct base_error *error);
	void *to;
};

/* Keeps chunks until the outlet needs them no more, instead of giving them back at once. NULL ends
 * that. */
void save_keep_chunks(struct ioshape_save *save, const struct save_outlet *outlet);

#endif
