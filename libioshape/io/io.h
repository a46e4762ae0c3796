/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O layer moves blocks between aligned memory and files. It has the engines, the queues
 * (request queues: an engine with its buffers), files and directories that appear whole or not at
 * all, and checked reads. All file I/O of the library happens in this layer.
 */
#ifndef IO_RING_H
#define IO_RING_H

#include "base/base.h"
#include "fs/fs.h"

#include <ioshape/ioshape.h>

#include <limits.h>
#include <stdatomic.h>
#include <sys/stat.h>

/* ---- Downgrades for the report --------------------------------------------------------------- */

/*
 * The downgrades of a save, each with its reason. The caller owns the list and copies it into
 * struct ioshape_report at the end.
 */
struct io_downgrades {
	unsigned count;
	unsigned short_results;
	struct ioshape_downgrade list[IOSHAPE_REPORT_DOWNGRADES];
	/* Type of the filesystem; known even if the file could not be created. */
	char filesystem[32];
};

/*
 * Adds a downgrade with its sentence. Does nothing if `downgrades` is NULL; if the list is full, it
 * only counts.
 */
void io_add_downgrade(struct io_downgrades *downgrades, enum ioshape_downgrade_code code,
		      const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Copies the downgrades into the report. */
void io_report_downgrades(const struct io_downgrades *downgrades, struct ioshape_report *report);

/* ---- Settings -------------------------------------------------------------------------------- */

struct io_engine_ops;

struct io_config {
	enum ioshape_engine engine;
	/*
	 * Engines that AUTO tries in this order, ended by NULL; NULL: the rule by filesystem family
	 * decides.
	 */
	const struct io_engine_ops *const *engines;
	enum ioshape_direct direct;
	/* Bytes of a buffer and of a request; 0: chosen for each file. */
	size_t block_bytes;
	/* Number of buffers, which bounds the requests in flight; 0: chosen for each file. */
	unsigned depth;
	unsigned threads; /* threads that copy from the page cache */
	struct base_log log;
	struct fs_layout_request layout; /* stripes of new files */
};

/* ---- Request queues (queue.c) ---------------------------------------------------------------- */

/*
 * An engine and its buffers: the queue of I/O requests of one file. A queue serves one file at a
 * time, and one thread at a time. A context keeps its queues for the next save. The first block of
 * a file opens the engine, so small files never pay for it.
 */
struct io_queue;

/* Creates a queue with the default buffers. *out is NULL on failure; the caller closes the queue.
 */
int io_queue_open(struct io_queue **out, const struct io_config *config, struct base_error *error);
/* Waits until no request is in flight, then frees the queue. NULL is allowed. */
void io_queue_close(struct io_queue *queue);
/*
 * Sets the memory that later reads fill, so that they can fault its pages in ahead. `fresh` is
 * borrowed; NULL, the initial value, means that the memory is not known.
 */
void io_queue_fills(struct io_queue *queue, struct base_fresh *fresh);

/* The way a file would be written: the result of io_choose(). */
struct io_choice {
	const char *engine; /* name of the engine; "" if none can be opened */
	/* Why the first engine of the rule was not opened: a negative errno, or 0. */
	int code;
	char downgrade[256]; /* downgrades of the engine, or "" */
	size_t block_bytes;
	unsigned depth;
	char why[160]; /* reason for the engine and the blocks, as in the report */
};

/*
 * Finds out how a save of about `file_bytes` bytes (0: not known) would be written on this
 * filesystem. Opens an engine to try it, but writes nothing.
 */
void io_choose(const struct io_config *config, const struct fs_info *fs, uint64_t file_bytes,
	       struct io_choice *choice);

/* ---- Atomic files (writer.c, atomic_file.c) -------------------------------------------------- */

/* Attributes of a file or directory that a copy must keep. */
struct io_original {
	int64_t modified_ns; /* modification time that the copy gets; since 1970 */
	uint32_t mode;       /* mode of the copy, unless it replaces a file */
	/*
	 * If the existing file of that name was modified later than this, it stays and the commit
	 * returns -EEXIST.
	 */
	int64_t newest_ns;
};

struct io_file_options {
	uint64_t expected_bytes; /* bytes to preallocate; 0: not known */
	bool exact;              /* the file will have exactly expected_bytes */
	/* Files that are written at the same time, for choosing stripes; 0: not known. */
	uint32_t files;
	/*
	 * This file uses the `target_group`-th of `target_groups` groups of the storage targets,
	 * from 1 on; 0: any target.
	 */
	uint32_t target_group, target_groups;
	bool no_replace;
	bool no_sync;
	/*
	 * 1 + base_umask() at the time of the caller's request, for files that another thread opens
	 * later; 0: use the current umask
	 */
	int umask_then;
	/* Attributes of the original, borrowed; NULL: the file is no copy. */
	const struct io_original *original;
	bool want_crc32; /* the caller will call io_writer_crc32() */
	/*
	 * Budget for removing the files that killed writers left in the directory, before the file
	 * is written. NULL: remove none.
	 */
	struct base_budget *tidying;
	/*
	 * The directory of the file is new and has no readers yet, so the file gets its final name
	 * at once. The caller syncs the directory, and with it the names of all its files, before
	 * it renames the directory into place.
	 */
	bool unseen;
	/*
	 * If part_bytes is not 0, several processes write one file, each its own byte range. This
	 * process writes part_bytes bytes from part_offset on; both are multiples of
	 * IOSHAPE_PART_UNIT. The file has file_bytes bytes, is created if it does not exist, and
	 * has its final name from the beginning.
	 */
	uint64_t part_bytes, part_offset, file_bytes;
	uint64_t deadline_ns; /* from base_deadline_ns(); 0: none */
	/*
	 * Called after each phase and block. If it returns nonzero, the write stops with
	 * -ECANCELED. May be NULL.
	 */
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t progress_total;
	/* Set by another thread: stops the write with -ECANCELED at the next block. May be NULL. */
	const atomic_bool *abort;
	/* Called before a block is sent. It may block, to limit the rate. May be NULL. */
	void (*before_block)(void *user, uint64_t bytes);
	void *before_block_user;
};

/*
 * A file of up to this many bytes is written by one pwrite(). Direct I/O and preallocation would
 * cost more than they gain.
 */
#define IO_SMALL_FILE_BYTES (1 * MIB)

/* A file that is written front to back. */
struct io_writer;

/*
 * Opens the temporary file, or the pipe or device itself. The writer uses `queue` until
 * io_writer_free(). It adds downgrades to `downgrades`, which must outlive the writer.
 */
int io_writer_open(struct io_writer **out, struct io_queue *queue, const char *path,
		   const struct io_file_options *options, struct io_downgrades *downgrades,
		   struct base_error *error);

/*
 * Returns the number of bytes put so far. That is the offset of the next byte, within this
 * process's byte range if it has one.
 */
uint64_t io_writer_offset(const struct io_writer *writer);

/*
 * Appends bytes and continues `*crc` over them (crc may be NULL). The caller may reuse the memory
 * when the call returns, unless it is borrowed. A failure is final: the caller can only free the
 * writer.
 */
int io_writer_put(struct io_writer *writer, const void *data, size_t bytes, uint32_t *crc,
		  struct base_error *error);
/* Adds time that the caller spent on the file's bytes to the time of writing in the report. */
void io_writer_spent(struct io_writer *writer, uint64_t ns);
/* Appends bytes whose CRC-32 the caller already knows, so they are not checksummed again. */
int io_writer_put_summed(struct io_writer *writer, const void *data, size_t bytes, uint32_t crc32,
			 struct base_error *error);

/*
 * Returns whether the storage completes blocks faster than the caller fills them, so that help from
 * another thread makes the file complete earlier. False until that has been measured.
 */
bool io_writer_is_starved(const struct io_writer *writer);

/*
 * Returns in *to where the next bytes will be stored, and in *space how many fit. A caller that
 * produces its bytes there, and then puts them from there, saves a copy. *to is valid until the
 * next call for this writer.
 */
int io_writer_space(struct io_writer *writer, uint8_t **to, size_t *space,
		    struct base_error *error);
/* Returns whether bytes that are put from here next would be copied, not borrowed. Called after
 * io_writer_space(). */
bool io_writer_copies(const struct io_writer *writer, const void *data, size_t bytes);

/*
 * Lets the writer borrow memory. The caller promises that bytes put from there stay unchanged until
 * io_writer_written() has passed them. The writer does not copy long ranges of them if direct I/O
 * accepts their alignment, or if the file is written through the page cache. Replaces what it could
 * borrow before; NULL ends the loan.
 */
void io_writer_borrow(struct io_writer *writer, const void *memory, size_t bytes);
/*
 * Returns the offset, as io_writer_offset() counts, before which no byte is still to be written
 * from borrowed memory.
 */
uint64_t io_writer_written(const struct io_writer *writer);
/*
 * Waits until io_writer_written() has reached `offset`. After a failure it waits until no borrowed
 * memory is in use, and returns a negative errno.
 */
int io_writer_wait_written(struct io_writer *writer, uint64_t offset, struct base_error *error);

/*
 * Marks the writer as failed because its source failed. Final, as failures of io_writer_put() are.
 */
void io_writer_fail(struct io_writer *writer);

/* Returns the CRC-32 of all bytes put; valid only with the option want_crc32. */
uint32_t io_writer_crc32(const struct io_writer *writer);

/*
 * Returns the layout of the file; its count is 0 if the layout is not known. *asked tells whether
 * ioshape requested a layout.
 */
const struct fs_layout *io_writer_layout(const struct io_writer *writer, bool *asked);

/* Returns why the file is written as it is: the engine, and the length of its requests. */
const char *io_writer_choice(const struct io_writer *writer);

/* Fills in what this layer knows of the report: engine, direct, stripes, times and bytes. */
void io_writer_report(const struct io_writer *writer, struct ioshape_report *report);

/*
 * Write the rest, make it durable and rename the file into place. There are three steps so that the
 * next writer can begin early, and so that saves to one path can be committed in order.
 *
 * io_writer_end() sends the last blocks, and waits until few requests are left. *is_little tells
 * whether that is certain: it is false while bytes may be in the page cache. The caller may skip
 * it. io_writer_finish() completes the temporary file and syncs it. io_writer_commit() renames it.
 * After a failure the caller can only free the writer.
 */
int io_writer_end(struct io_writer *writer, bool *is_little, struct base_error *error);
int io_writer_finish(struct io_writer *writer, struct base_error *error);
int io_writer_commit(struct io_writer *writer, struct base_error *error);

/*
 * Returns the modification time of the committed file in nanoseconds since 1970; 0 for pipes,
 * devices and on errors.
 */
int64_t io_writer_modified_ns(const struct io_writer *writer);
/*
 * Writes a small file beside the committed file, under its name plus `suffix`. The small file
 * appears whole, is as durable as the file and grants no more access. Not for pipes and devices.
 */
int io_writer_put_beside(struct io_writer *writer, const char *suffix, const void *data,
			 size_t bytes, struct base_error *error);

/*
 * Frees the writer, and removes the temporary file unless it was committed. Waits until nothing is
 * in flight.
 */
void io_writer_free(struct io_writer *writer);

/*
 * Frees space for a file at `path`. It waits for the space of files that this process has replaced,
 * and removes what killed writers left in the directory.
 */
void io_clear_space(const char *path, const struct base_log *log);

/*
 * Returns whether the filesystem can reserve this many bytes for a file at `path`, or in the
 * directory `path` if in_directory. Releases them at once. Also false if reserving is not supported
 * there.
 */
bool io_can_reserve(const char *path, bool in_directory, uint64_t bytes);

/* ---- Reading (reader.c) ---------------------------------------------------------------------- */

/*
 * A file, or a byte range of one, that is open for reading. It is immutable, so threads can share
 * it. All offsets below count from the beginning of the range, and bytes outside it are never
 * returned.
 */
struct io_input {
	int fd; /* descriptor that reads through the page cache */
	/* Descriptor that reads past the page cache; -1 if not possible or not wanted. */
	int direct_fd;
	uint64_t base; /* file offset at which the range begins; any value */
	uint64_t bytes;
	int64_t modified_ns; /* modification time at the opening, since 1970 */
	/*
	 * Other processes on this host read the same bytes. Past the page cache, each of them would
	 * make the storage read the bytes again.
	 */
	bool shared;
	/* Small files may be read through the page cache, for other processes that read them. */
	bool may_share;
	int claim_fd; /* socket of io_input_claim(); -1: none */
	struct fs_info fs;
	char *path; /* path for messages, with the offset of the range if there is one; owned */
};

/*
 * Opens `bytes` bytes from offset `base` on; 0 and 0 mean the whole file. Returns IOSHAPE_E_DAMAGED
 * if the file is too short for the range.
 */
int io_input_open(struct io_input *input, const char *path, uint64_t base, uint64_t bytes,
		  enum ioshape_direct direct, struct base_error *error);
/* Closes the input, ends its claim and frees its path. Allowed more than once. */
void io_input_close(struct io_input *input);
/*
 * Claims the file for this reader. Returns false if another reader on this host, usually another
 * process, has claimed it. The claim ends with io_input_close(). If the kernel refuses claims, this
 * returns true.
 */
bool io_input_claim(struct io_input *input);

/*
 * Reads exactly these bytes through the page cache; meant for headers. Returns IOSHAPE_E_DAMAGED if
 * the file ends too soon.
 */
int io_input_get(const struct io_input *input, uint64_t offset, void *into, size_t bytes,
		 struct base_error *error);

/*
 * Reads a small file that io_writer_put_beside() has written, replacing the content of `into`.
 * Returns a negative errno without an error message: -EPERM if the file belongs neither to the
 * input's owner nor to root.
 */
int io_input_get_beside(const struct io_input *input, const char *suffix, size_t most_bytes,
			struct base_buffer *into);

/*
 * A contiguous range of the file that goes to one address in memory. Its checksum is taken on the
 * way.
 */
struct io_piece {
	uint64_t offset;
	uint64_t bytes;
	void *into;   /* destination; NULL: the bytes are only checksummed */
	uint32_t crc; /* out: CRC-32 of these bytes alone */
	bool want_crc;
};

/*
 * Reads the pieces, which must be sorted by offset and must not overlap. Stretches in the page
 * cache are copied by several threads. Other stretches are read with direct I/O in large blocks,
 * far ahead. Progress is reported in bytes of pieces. `progress` may be NULL; `error` may not.
 */
int io_read(struct io_queue *queue, const struct io_input *input, struct io_piece *pieces,
	    size_t count, ioshape_progress_fn progress, void *progress_user,
	    struct base_error *error);

/*
 * A reader that reads a file call by call. Sequential reads are prefetched between its calls, up to
 * the offset `end`; random reads are not. For one thread at a time.
 */
struct io_stream;

/* Creates a stream for `input`, which must outlive it. The caller frees it. */
int io_stream_open(struct io_stream **out, const struct io_input *input, uint64_t end,
		   struct base_error *error);
/*
 * Reads as io_read() does. Afterwards the stream keeps using the queue, unless io_stream_is_idle(),
 * so the caller must pass the same queue in the next call. After a failure the caller must stop the
 * stream.
 */
int io_read_onward(struct io_stream *stream, struct io_queue *queue, struct io_piece *pieces,
		   size_t count, ioshape_progress_fn progress, void *progress_user,
		   struct base_error *error);
/*
 * Prefetches from `offset` on for later calls, as far as the buffers allow, without waiting. Call
 * it only while nothing is in flight. Afterwards the stream keeps using the queue, unless
 * io_stream_is_idle(). Best effort; errors are ignored.
 */
void io_stream_prefetch(struct io_stream *stream, struct io_queue *queue, uint64_t offset);
/* Returns whether nothing is prefetched, so that stopping loses nothing. */
bool io_stream_is_idle(const struct io_stream *stream);
/* Waits until nothing is in flight and stops using the queue. The stream can be used again. */
void io_stream_stop(struct io_stream *stream);
/* Stops and frees the stream. NULL is allowed. */
void io_stream_free(struct io_stream *stream);

/* ---- Directories (folder.c) ------------------------------------------------------------------ */

/*
 * An open directory. Operations go through its descriptor and never follow a symbolic link inside
 * it. So they reach the directory that was opened, even if another one has taken its name. Names
 * are entry names without '/'.
 */
struct io_folder {
	int fd;     /* -1 if closed */
	char *path; /* path for messages; owned */
};

#define IO_NO_FOLDER                                                                               \
	{                                                                                          \
		.fd = -1                                                                           \
	}

/* Creates a directory and its missing parents, as mkdir -p does, and makes them durable. */
int io_folder_make(const char *path, struct base_error *error);
/*
 * Creates a directory that only this user may use (mode 0700), unless it exists; its parent must
 * exist. Returns -EACCES if another user created it, or if others may write to it. *ours receives
 * the owner and time of a new file there, as the server reports them.
 */
int io_folder_make_private(const char *path, struct stat *ours, struct base_error *error);
/* Opens a directory. Returns -ENOENT, -ENOTDIR, …; on failure `folder` is closed. */
int io_folder_open(struct io_folder *folder, const char *path, struct base_error *error);
/* Opens a directory inside `parent`, without following a symbolic link. */
int io_folder_open_in(struct io_folder *folder, const struct io_folder *parent, const char *name,
		      struct base_error *error);
/*
 * Creates a directory inside `parent` and opens it. Returns -EEXIST, without an error message, if
 * the name is taken, or if another process has already removed the new directory.
 */
int io_folder_create_in(struct io_folder *folder, const struct io_folder *parent, const char *name,
			struct base_error *error);
/* Closes the directory, which releases its lock. Safe on IO_NO_FOLDER. */
void io_folder_close(struct io_folder *folder);

/* An open file whose lock this process holds. */
struct io_hold {
	int fd; /* -1: none */
};

#define IO_NO_HOLD                                                                                 \
	{                                                                                          \
		.fd = -1                                                                           \
	}

enum io_lock {
	IO_LOCKED,   /* this process holds it */
	IO_BUSY,     /* another open file holds it */
	IO_NO_LOCKS, /* the filesystem has no locks */
};

/* Tries to lock the directory itself, without waiting. */
enum io_lock io_folder_lock(const struct io_folder *folder);

/*
 * Creates a file if it does not exist, and takes its exclusive lock. With `wait` it waits for the
 * lock; otherwise it returns -EBUSY, without an error message, if the lock is taken.
 */
int io_folder_take(const struct io_folder *folder, const char *name, bool wait,
		   struct io_hold *hold, struct base_error *error);
/*
 * Locks a small file against new readers until io_folder_let_go(). Callers use it before they
 * remove what the file describes. Returns -EBUSY, without an error message, if a process reads the
 * file now; -ENOENT if it does not exist. Always succeeds where there are no locks.
 */
int io_folder_claim(const struct io_folder *folder, const char *name, struct io_hold *hold,
		    struct base_error *error);
/* Releases the lock and closes the file. Safe on IO_NO_HOLD. */
void io_folder_let_go(struct io_hold *hold);

/* Returns whether the open directory still has this name in `parent`. */
bool io_folder_is_named(const struct io_folder *folder, const struct io_folder *parent,
			const char *name);

enum io_entry_kind { IO_FILE, IO_FOLDER, IO_OTHER };

struct io_entry {
	enum io_entry_kind kind;
	uint64_t bytes;
	uint32_t owner;   /* user id */
	uint32_t mode;    /* permission bits, the last twelve of st_mode */
	int64_t modified; /* modification time, seconds since 1970 */
	int64_t modified_ns;
	uint64_t device, inode; /* identity of the file */
	/* Number of names; of a directory, usually 2 + its subdirectories. */
	uint64_t links;
};

/*
 * Describes an entry of the directory; "." is the directory itself. Returns -ENOENT, without an
 * error message, if there is no entry of that name.
 */
int io_folder_look(const struct io_folder *folder, const char *name, struct io_entry *entry,
		   struct base_error *error);

/*
 * Makes an NFS client revalidate its attributes of a path with the server. If `path` is "", that of
 * the open file `fd`.
 */
void io_revalidate(int fd, const char *path);

/*
 * Describes the file at a path, following a symbolic link if `follow`. Returns a negative errno
 * without an error message.
 */
int io_look(const char *path, bool follow, struct io_entry *entry);
/* Returns whether both describe the same file, unmodified in between. */
bool io_is_unchanged(const struct io_entry *before, const struct io_entry *now);

/*
 * Calls `found` for each name except "." and "..". A nonzero result of `found` ends the listing and
 * is returned. Returns IOSHAPE_E_LIMIT after a million entries.
 */
int io_folder_list(const struct io_folder *folder,
		   int (*found)(void *user, const char *name, struct base_error *error), void *user,
		   struct base_error *error);

/*
 * Describes a file in the directory as fs_describe() does. It uses an unnamed temporary file where
 * the filesystem supports those, else any existing regular file, else the directory. If the kernel
 * does not report whether direct I/O works, this tries to set O_DIRECT.
 */
int io_folder_describe_file(const struct io_folder *folder, struct fs_info *info,
			    struct base_error *error);

/* Syncs the directory, so that the names in it are on stable storage. */
int io_folder_sync(const struct io_folder *folder, struct base_error *error);

/*
 * Renames an entry. A directory replaces another one only if that is empty. Returns a negative
 * errno without an error message.
 */
int io_folder_rename(const struct io_folder *folder, const char *from, const char *to);
/*
 * Exchanges two entries atomically. Returns a negative errno without an error message: -EOPNOTSUPP
 * if the filesystem cannot exchange names.
 */
int io_folder_swap(const struct io_folder *folder, const char *one, const char *other);

/*
 * Removes the directory `name`, which `folder` has open. First it removes the file `first` (may be
 * NULL) durably, then the other files, then the directory.
 *
 * If `first` is NULL, the directory never had its final name, and its subdirectories are removed
 * too. Otherwise subdirectories are not ioshape's: they stay, and the directory stays as well
 * (-ENOTEMPTY). `hold` (may be NULL) is a claim of `first`, which is released after `first` is
 * removed.
 *
 * Returns -EBUSY, without an error message, if the only files left are open over NFS on this host.
 * Returns -EAGAIN, without an error message, if `budget` (may be NULL) is spent; a later call
 * removes the rest.
 */
int io_folder_remove(const struct io_folder *folder, const struct io_folder *parent,
		     const char *name, const char *first, struct io_hold *hold,
		     struct base_budget *budget, struct base_error *error);

/* ---- Atomic directories (atomic_dir.c) ------------------------------------------------------- */

/*
 * Creates a directory as io_folder_create_in() does, and locks it where locks work: *lock is
 * IO_LOCKED or IO_NO_LOCKS. Returns -EAGAIN, without an error message, if the caller must try
 * another name.
 */
int io_folder_create_locked(struct io_folder *folder, const struct io_folder *parent,
			    const char *name, enum io_lock *lock, struct base_error *error);

/*
 * A directory that is being filled under a temporary name. If the process dies, a later save
 * removes it, as it removes temporary files.
 */
struct io_new_folder {
	struct io_folder above;
	struct io_folder folder;      /* locked where locks work */
	char *name;                   /* final name; owned */
	char temporary[NAME_MAX + 1]; /* temporary name; "" once the directory has its final name */
};

#define IO_NO_NEW_FOLDER                                                                           \
	{                                                                                          \
		.above = IO_NO_FOLDER, .folder = IO_NO_FOLDER                                      \
	}

/*
 * Removes temporary files and directories whose writers are dead, as far as the budget allows
 * (NULL: all of them). Touches nothing that a living process writes. Best effort; errors are
 * ignored.
 */
void io_remove_stale(int directory_fd, const char *directory, struct base_budget *budget,
		     const struct base_log *log);

struct io_clock;

/* Does the same for one entry, if its name is a temporary one. Returns -EAGAIN, without an error
 * message, if the budget does not suffice to look at it. */
int io_remove_if_stale(const struct io_folder *parent, const char *name, struct io_clock *clock,
		       struct base_budget *budget, const struct base_log *log);

/*
 * Creates the temporary directory beside `path`, which must be absolute. On failure `made` is
 * closed. `tidying` is as in struct io_file_options.
 */
int io_new_folder_make(struct io_new_folder *made, const char *path, struct base_budget *tidying,
		       const struct base_log *log, struct base_error *error);
/*
 * Renames the directory to its final name, durably. Returns -EEXIST if anything but an empty
 * directory has that name.
 */
int io_new_folder_commit(struct io_new_folder *made, struct base_error *error);
/*
 * Renames the directory to its final name, durably, and replaces a directory of that name if it was
 * not modified after `newest_ns` (-EEXIST otherwise). Removes the old directory afterwards. `first`
 * (may be NULL) is a file in the old directory that readers hold; returns -EBUSY if one does. On
 * filesystems that cannot exchange names, the name is missing for a moment.
 */
int io_new_folder_replace(struct io_new_folder *made, const char *first, int64_t newest_ns,
			  struct base_error *error);
/* Gives a filled copy of a directory the modification time and the mode of its original. */
int io_folder_resemble(const struct io_folder *folder, const struct io_original *original,
		       struct base_error *error);
/* Closes the directory, and removes it unless it was committed. Safe on IO_NO_NEW_FOLDER. */
void io_new_folder_close(struct io_new_folder *made, const struct base_log *log);

/*
 * Removes a file or a directory tree if it is still what `looked_at` describes, unmodified. Returns
 * -ESTALE, without an error message, if it is not. A process that replaces it during the removal
 * does so as if it did not exist. `first` (may be NULL) is a file in the directory that readers
 * hold. Returns -EBUSY, without an error message, if one does.
 */
int io_folder_discard(const struct io_folder *folder, const char *name,
		      const struct io_entry *looked_at, const char *first,
		      struct base_error *error);

/* ---- Small files (folder.c) ------------------------------------------------------------------ */

/*
 * Writes a small file under a temporary name and renames it, replacing what has the name. Syncs its
 * bytes if `durable`. `mode` is as for open(). Returns 0 or a negative errno.
 */
int io_put_whole(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		 mode_t mode);

/*
 * Replaces the content of `into` by the content of a regular file. Returns -EPERM if it is not a
 * regular file, -EFBIG if it is longer than most_bytes. *status is the file's state before the
 * read.
 */
int io_read_whole(int fd, size_t most_bytes, struct base_buffer *into, struct stat *status);

static inline int64_t io_modified_ns(const struct stat *status)
{
	return (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

/*
 * Writes a new small file and syncs it. Its name is durable only after io_folder_sync(). Meant for
 * directories that have no readers yet. On failure the file does not exist.
 */
int io_folder_put(const struct io_folder *folder, const char *name, const void *data, size_t bytes,
		  struct base_error *error);

/*
 * Reads a small file into `into`, replacing its content. If `hold` is not NULL, it receives a
 * shared lock, where locks work, which makes io_folder_claim() fail until io_folder_let_go().
 * Returns -ENOENT, without an error message, if the file does not exist or is being removed.
 */
int io_folder_get(const struct io_folder *folder, const char *name, size_t most_bytes,
		  struct base_buffer *into, struct io_hold *hold, struct base_error *error);
/*
 * Reads the first bytes of a file, at most `bytes`, and returns their number. Returns a negative
 * errno, such as -ENOENT, without an error message.
 */
ssize_t io_folder_peek(const struct io_folder *folder, const char *name, void *into, size_t bytes);

/*
 * Stores a short text as a symbolic link, which appears atomically and is never followed. It is
 * durable only after io_folder_sync(). Returns -EEXIST without an error message.
 */
int io_folder_put_text(const struct io_folder *folder, const char *name, const char *text,
		       struct base_error *error);
/*
 * Reads a text that io_folder_put_text() stored. Returns a negative errno without an error message:
 * -EINVAL if the entry is not a symbolic link.
 */
int io_folder_get_text(const struct io_folder *folder, const char *name, char into[PATH_MAX]);
/* Removes a text. Succeeds if it does not exist. */
int io_folder_drop_text(const struct io_folder *folder, const char *name, struct base_error *error);

/* ---- Detecting dead writers (folder.c) ------------------------------------------------------- */

/*
 * Eight hexadecimal digits that identify this boot of this machine; IO_NOWHERE if the kernel does
 * not tell.
 */
#define IO_NOWHERE "00000000"
const char *io_machine_tag(void);

/* Bytes that io_lock_domain() (internal.h) writes, with the final 0. */
#define IO_DOMAIN_BYTES 9
/*
 * Returns whether the eight digits in a name are those of this lock domain. Always false for
 * IO_NOWHERE.
 */
bool io_is_lock_domain(const char *digits, const char domain[IO_DOMAIN_BYTES]);

/*
 * The clock of the server that sets the modification times of files in a directory. It may differ
 * from the clock of this machine.
 */
struct io_clock {
	int directory_fd;
	int64_t now; /* seconds since 1970; 0: not asked yet; negative: unknown */
};

/*
 * Returns whether `touched` (seconds since 1970) is more than a day ago by the server's clock.
 * Creates a file to read that clock, once.
 */
bool io_is_abandoned(struct io_clock *clock, int64_t touched);
/*
 * Returns in *now_ns the time by the server's clock, in nanoseconds since 1970. Creates a file to
 * read it.
 */
int io_time_in(const char *directory, int64_t *now_ns, struct base_error *error);

#endif
