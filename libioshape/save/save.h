/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the save floor shows to the floor above. Saves, writers, readers and files are public calls;
 * here is what another kind of save is made of.
 */
#ifndef SAVE_SAVE_H
#define SAVE_SAVE_H

#include "base/base.h"
#include "format/format.h"
#include "io/io.h"
#include "slots/slots.h"

#include <pthread.h>

/* ---- Calls on a context (context.c) ----------------------------------------------------- */

/* First in every call: -EINVAL without a context, -EPERM in a forked child. */
int save_enter(const struct ioshape_context *context, struct base_error *error);
/* The same in calls with a path and options; see base_take_options(). */
int save_enter_path(const struct ioshape_context *context, const char *path, void *options,
		    size_t options_bytes, const void *given, const char *what,
		    struct base_error *error);

/* What the context was opened with; the context's own. The pool's name may be NULL. */
const struct base_log *save_log(const struct ioshape_context *context);
const struct io_config *save_config(const struct ioshape_context *context);
const struct slots_config *save_slots_config(const struct ioshape_context *context);
const char *save_pool_name(const struct ioshape_context *context);

/*
 * The path made absolute, its directory's symbolic links resolved if it is there: what it means
 * now, whatever the working directory is by the time it is used. To be freed. -EINVAL if it cannot
 * be a file's.
 */
int save_absolute_path(const char *path, char **absolute, struct base_error *error);

/* ---- Free space (file.c): what a save does that does not fit --------------------------- */

struct save_space {
	struct ioshape_context *context;
	const char *path;             /* absolute */
	const struct fs_found *found; /* at the path; NULL: it is a directory, which may have to be
				       * made */
	uint64_t needed_bytes;
	/* Frees what space can be freed: by default io_clear_space(). */
	void (*clear)(void *user);
	void *clear_user;
};

/*
 * Before the slot: 0 if there is space, or if that cannot be known; otherwise, as the context's
 * `full` says, -ENOSPC or IOSHAPE_E_SKIPPED. Costs one statfs(), and nothing for small files.
 */
int save_space_check(const struct save_space *space, struct io_notes *notes,
		     struct base_error *error);

/* IOSHAPE_E_SKIPPED instead of a lack of space, if the context's `full` says so. */
int save_space_verdict(const struct ioshape_context *context, int ret, struct base_error *error);

/* ---- Storage (slot.c): what lies below a directory -------------------------------- */

/* The file that is to be written. */
struct save_expected {
	const struct fs_layout_request *request;
	uint64_t bytes; /* 0 unknown */
	uint32_t files; /* at a time; 0 unknown */
};

/* Family, targets, and the layout of the directory; zeros where it does not tell. Few
 * system calls, if the memory is of this mount. */
void save_look_at_storage(int directory_fd, const char *directory, struct fs_memory *memory,
			  struct fs_facts *facts);

/* The layout that the file will have (its count is 0 if that is not known), and how many such files
 * may be written at a time; 0 if that is not known. Pure. */
uint32_t save_stripes_of(const struct fs_facts *storage, const struct save_expected *expected,
			 struct fs_layout *layout);

/* ---- Checksums of other formats (file.c) ------------------------------------------- */

/* Those of a file that is being written. Zero it; `crcs` is to be freed. */
struct save_checksums {
	bool beside;             /* they are to be put beside the file */
	struct base_buffer crcs; /* uint32_t, of whole blocks */
	uint32_t crc;            /* of the block that is under way */
	size_t filled;           /* of that block */
};

/* As io_writer_put(): `*crc`, which may be NULL, is continued as well. */
int save_checksums_put(struct save_checksums *checksums, struct io_writer *file, const void *data,
		       size_t bytes, uint32_t *crc, struct base_error *error);

/* ---- Files (file.c) -------------------------------------------------------------------- */

/* What is told while a save waits. */
struct save_watch {
	ioshape_queue_fn queue; /* may be NULL */
	void *queue_user;
	/* The thread that does nothing but wait for the save; NULL if there is none. The save
	 * shares the slot of a file that this thread has open, or the two would wait for each
	 * other. */
	const pthread_t *blocked;
	bool drains; /* it is on a tier already: saves of others go first */
};

/* What one file has of a slot (slot.c). */
struct save_hold;

struct save_slot {
	struct ioshape_context *context;
	struct save_hold *hold;                /* NULL once it was released, or if there is none */
	bool waited;                           /* for it; otherwise this file joined others */
	struct ioshape_slot_info info;         /* as of the release */
	uint64_t passed;                       /* bytes */
	const struct io_file_options *options; /* what may stop it; borrowed */
};

/* A file that the calling thread writes: from the look at its path to the commit. */
struct save_file {
	/* What is asked for. All else is zero before save_write_file(). */
	struct ioshape_context *context;
	const char *path; /* absolute; borrowed */
	/* The same as the caller named it, while the working directory is still that of the call:
	 * the caller may not be allowed to look into the directories above that. NULL: `path`. */
	const char *given;
	struct io_file_options options;
	bool checks_space;     /* for options.expected_bytes, before it waits for the slot */
	bool in_new_directory; /* no writer has left anything behind there */
	bool without_slot;     /* put() waits for other processes that do the same */
	struct save_checksums *checksums; /* of what is put, to go beside it; NULL: none */
	struct io_notes notes;            /* of what was before the file, and then of the file */
	/* Puts all of it. */
	int (*put)(void *user, struct io_writer *writer, struct base_error *error);
	void *user;

	/* What becomes of it. */
	struct fs_found found; /* at the path, before the wait for a slot */
	struct save_slot slot;
	struct io_lane *lane;
	struct io_writer *writer; /* NULL before and after */
	int64_t modified_ns;      /* of the file in place; 0: it is not, or nobody knows */
};

struct save_order;

/*
 * From the free space and the slot to the commit and the report. `order` is the file's place among
 * saves to its path; NULL if there are no others.
 */
int save_write_file(struct save_file *file, const struct save_watch *watch,
		    struct save_order *order, struct ioshape_report *report,
		    struct base_error *error);

/* ---- Loads (load.c) ------------------------------------------------------------------- */

/*
 * A reader of a part of a collective save, which was saved as `path`. A reader of a whole file
 * needs no such call.
 */
void save_reader_is_part_of(const struct ioshape_reader *reader, const char *path);

/* ---- Saves in the background (save.c) -------------------------------------------------------- */

/* What a caller wants to be saved, borrowed, and in which container. */
enum save_kind {
	SAVE_TENSORS = 0,
	SAVE_RECORDS, /* with a pickle of the caller's own */
	SAVE_SAFETENSORS,
};

struct save_payload {
	enum save_kind kind;
	bool checksums; /* of SAVE_SAFETENSORS: they are to be put beside the file */
	const struct ioshape_tensor *tensors;
	const struct ioshape_record *records;
	const uint8_t *later; /* 1 for each record that may be copied after the call; NULL: none */
	size_t count;
};

/* Checks the options of a save that blocks, or of one in the background. `formats`: any format may
 * be asked for. */
int save_take_options(struct ioshape_save_options *options,
		      const struct ioshape_save_options *given, bool formats, bool background,
		      struct base_error *error);
/* What a save is, as the floor above sees it. It never changes. */
struct save_task {
	const char *path;                    /* absolute */
	uint64_t payload_bytes;              /* of all the caller's records */
	uint64_t expected_bytes;             /* of a file that holds it */
	bool borrow;                         /* nothing is staged: the caller's memory is read */
	struct io_file_options file_options; /* abort and progress are the save's */
};

/* A save in the background that several processes do together. */
struct save_collective {
	/* Replaces the writing of a file, on the save's thread. The save ends as it does. NULL: the
	 * save is this process's alone. */
	int (*run)(void *user, struct ioshape_save *save, const struct save_task *task,
		   struct ioshape_report *report, struct base_error *error);
	void *user;
	const void *owner;  /* for save_stop_background_of() */
	bool shared_memory; /* another process writes the bytes: they are staged where it can map
			       them */
	bool blocks;        /* the thread that begins the save does nothing but wait for it */
	bool started;       /* set by save_begin(): run() is called, also if the beginning fails */
};

/* Begins a save; `collective` is NULL for one of this process alone. */
int save_begin(struct ioshape_context *context, const char *path,
	       const struct save_payload *payload, const struct ioshape_save_options *options,
	       struct save_collective *collective, struct ioshape_save **out,
	       struct base_error *error);

/* An ioshape_progress_fn for all that a save does: notes how far it is, and tells the caller's. */
int save_track(void *save, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes);
bool save_is_stopped(const struct ioshape_save *save);
/* Notes where it stands in the queue for a slot. */
struct save_watch save_watch_of(struct ioshape_save *save);
/* All records of the save, and the end of the archive. `file`: where they go; NULL: to no file. */
int save_write_payload(struct ioshape_save *save, struct format_writer *zip, struct io_writer *file,
		       struct base_error *error);

/* ---- Digests of collective saves (digest.c) --------------------------------------- */

/* The most that a sample reads of the payload. */
#define SAVE_SAMPLE_BYTES (512 * KIB)

/* Sums of the file that the save writes. */
struct save_digest {
	uint8_t mac[BASE_MAC_BYTES]; /* of all bytes */
	uint32_t crc32;              /* of all bytes */
	uint64_t bytes;
};

/* Returns whether the bytes can be read before the save writes them. */
bool save_has_digest(const struct ioshape_save *save);
/* Reads a few bytes. Saves of equal bytes have equal samples; others rarely have. */
int save_take_sample(struct ioshape_save *save, uint8_t mac[BASE_MAC_BYTES],
		     struct base_error *error);
/*
 * Reads all bytes, and compares them with the save before, as writing does. If the key is drawn at
 * random after the bytes are there, different bytes have different digests, even if an attacker
 * chose them. `go_on` is called now and then; a failure of it ends the call.
 */
int save_take_digest(struct ioshape_save *save, const uint8_t key[BASE_MAC_BYTES],
		     struct save_digest *digest, int (*go_on)(void *user, struct base_error *error),
		     void *user, struct base_error *error);

/* Asks those to stop that belong to this owner. */
void save_stop_background_of(struct ioshape_context *context, const void *owner);

/* ---- Staging memory that another process can map (staging.c) -------------------------------
 */

/* The unit in which it is handed out and handed back. */
#define SAVE_CHUNK_BYTES (16 * MIB)

struct save_chunk {
	struct save_chunk *next;
	uint8_t *memory;
	uint64_t offset; /* in the fd */
};

static inline uint64_t save_chunks_for(uint64_t bytes)
{
	return bytes / SAVE_CHUNK_BYTES + (bytes % SAVE_CHUNK_BYTES != 0);
}

/* The fd of all such memory; the context's own. */
int save_shared_fd(struct ioshape_context *context, int *fd, struct base_error *error);
/* A chunk besides those of saves, and above their limit. */
int save_shared_get(struct ioshape_context *context, struct save_chunk **chunk,
		    struct base_error *error);
void save_shared_put(struct ioshape_context *context, struct save_chunk *chunk);
/* Where in the fd the bytes lie that the save is reading. False if they lie somewhere else. */
bool save_find_staged(const struct ioshape_save *save, const void *data, uint64_t *offset);

/* What uses staged bytes after they have been handed out. */
struct save_outlet {
	uint64_t (*offset)(void *to); /* bytes that it was given */
	/* Waits until it needs nothing before this offset any more. */
	int (*await)(void *to, uint64_t offset, struct base_error *error);
	void *to;
};

/* Chunks go back only when the outlet does not need them any more. NULL ends that. */
void save_keep_chunks(struct ioshape_save *save, const struct save_outlet *outlet);

#endif
