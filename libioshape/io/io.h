/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moving blocks between aligned memory and files: engines, lanes (an engine with its buffers),
 * files that appear whole or not at all, and checked reads. All file I/O of the library happens on
 * this floor.
 */
#ifndef IO_RING_H
#define IO_RING_H

#include "base/base.h"
#include "fs/fs.h"

#include <ioshape/ioshape.h>

#include <limits.h>
#include <stdatomic.h>
#include <sys/stat.h>

/* ---- Notes for the report -------------------------------------------------------------------- */

/* What was not as preferred, and why. They end up in struct ioshape_report. */
struct io_notes {
	unsigned count;
	unsigned short_results;
	struct ioshape_step steps[IOSHAPE_REPORT_STEPS];
	char filesystem[32]; /* that the file is on: known also where it cannot be begun */
};

void io_note(struct io_notes *notes, enum ioshape_step_code code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void io_notes_report(const struct io_notes *notes, struct ioshape_report *report);

/* ---- Settings -------------------------------------------------------------------------------- */

struct io_engine_ops;

struct io_config {
	enum ioshape_engine engine;
	/* What AUTO tries, in order, ended by NULL. NULL: by the rule. */
	const struct io_engine_ops *const *engines;
	enum ioshape_direct direct;
	size_t block_bytes; /* of a buffer, and of a request; 0: chosen for each file */
	unsigned depth;     /* buffers, and requests in flight; 0: chosen for each file */
	unsigned threads;   /* that read cached files */
	struct base_log log;
	struct fs_layout_request layout; /* of new files */
};

/* ---- Lanes (queue.c) ------------------------------------------------------------------------- */

/*
 * An engine and its buffers. A lane serves one file at a time, in one thread at a time; a context
 * keeps lanes for the next save. The engine is opened at the first block: small files never pay for
 * it.
 */
struct io_lane;

int io_lane_open(struct io_lane **out, const struct io_config *config, struct base_error *error);
/* Waits until nothing is in flight. */
void io_lane_close(struct io_lane *lane);
/* What is read from now on goes to such memory; NULL, as in the beginning: nobody knows. Borrowed.
 */
void io_lane_fills(struct io_lane *lane, struct base_fresh *fresh);

/* How a file would be written. */
struct io_choice {
	const char *engine; /* its name; "" if none can be opened */
	int code;           /* why it is not the engine of the rule: a negative errno, or 0 */
	bool buffers_refused;
	char note[256]; /* what was not as preferred, or "" */
	size_t block_bytes;
	unsigned depth;
	char why[160]; /* of engine and blocks, as in the report */
};

/* Tries what a save of about so many bytes (0: not known) would do on this filesystem; writes
 * nothing. */
void io_choose(const struct io_config *config, const struct fs_info *fs, uint64_t file_bytes,
	       struct io_choice *choice);

/* ---- Files that appear whole or not at all (writer.c, atomic_file.c) ------------------------- */

/* Of a file or a directory that is a copy of another one. */
struct io_original {
	int64_t modified_ns; /* since 1970: the time that the copy gets */
	uint32_t mode;       /* that it gets, unless it replaces a file */
	/* What has its name stays, and the commit answers -EEXIST, if that was modified later. */
	int64_t newest_ns;
};

struct io_file_options {
	uint64_t expected_bytes; /* to preallocate; 0 unknown */
	bool exact;              /* it will have just as many */
	uint32_t files;          /* that are written at a time, for their stripes; 0 unknown */
	uint32_t place, places;  /* that part of the storage targets, from 1 on; 0: any */
	bool no_replace;
	bool no_sync;
	/* Of a file that another thread opens than the one that asked for it: 1 + base_umask() when
	 * it was asked for; 0: the umask is that of now. */
	int umask_then;
	const struct io_original *original; /* borrowed; NULL: it is no copy */
	bool want_crc32;                    /* io_writer_crc32() will be asked */
	/* First remove what killed writers left in the directory, as far as this reaches. NULL: do
	 * not. */
	struct base_budget *tidying;
	/* Its directory is new and not read by anybody yet: the file has its name from the
	 * beginning. Whoever gives the directory its own name syncs it before, and with it the
	 * names of all files in it. */
	bool unseen;
	/*
	 * If not 0, other processes write the file, too, and this one so many bytes from
	 * part_offset on, both multiples of IOSHAPE_PART_UNIT. The file, of file_bytes, is made if
	 * it is not there, and has its name from the beginning.
	 */
	uint64_t part_bytes, part_offset, file_bytes;
	uint64_t deadline_ns; /* base_deadline_ns(); 0: none */
	/* Told about each block written and each phase; not 0 stops with -ECANCELED. May be NULL.
	 */
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t progress_total;
	/* Set by another thread to stop the write with -ECANCELED at the next block. May be NULL.
	 */
	const atomic_bool *abort;
	/* Told before a block leaves; it may take its time. May be NULL. */
	void (*before_block)(void *user, uint64_t bytes);
	void *before_block_user;
};

/*
 * Up to here a file is written with one pwrite: setting up direct I/O and preallocating would cost
 * more than they bring.
 */
#define IO_SMALL_FILE_BYTES (1 * MIB)

/* A file being written from its first byte to its last. */
struct io_writer;

/*
 * Opens the temporary file (or the pipe or device itself). `lane` is used until commit or abort.
 * Notes are collected in `notes`, which outlives the writer.
 */
int io_writer_open(struct io_writer **out, struct io_lane *lane, const char *path,
		   const struct io_file_options *options, struct io_notes *notes,
		   struct base_error *error);

/* Bytes put so far: the offset of the next one, in its part if it has one. */
uint64_t io_writer_offset(const struct io_writer *writer);

/*
 * Appends bytes, continuing `*crc` over them on the way (crc may be NULL). The memory is free again
 * when it returns. A failure is final: only abort remains.
 */
int io_writer_put(struct io_writer *writer, const void *data, size_t bytes, uint32_t *crc,
		  struct base_error *error);
/* The same for bytes whose CRC-32 is known: they are not looked at. */
int io_writer_put_summed(struct io_writer *writer, const void *data, size_t bytes, uint32_t crc32,
			 struct base_error *error);

/*
 * Where the next bytes will lie, and for how many there is room. Who makes them there, and puts
 * them from there, saves a copy. Valid until the next call for this writer.
 */
int io_writer_room(struct io_writer *writer, uint8_t **to, size_t *room, struct base_error *error);

/*
 * Lending: bytes that are put from this memory from now on stay as they are until
 * io_writer_settled() has passed them. So they need not be copied, where they lie in memory as in
 * the file, to a page. It takes the place of what was lent before; NULL: nothing is.
 */
void io_writer_lend(struct io_writer *writer, const void *memory, size_t bytes);
/* Nothing of the file before this offset is written from lent memory any more. */
uint64_t io_writer_settled(const struct io_writer *writer);
/* Waits until that is so for `offset`. After a failure: until nothing at all is lent. */
int io_writer_settle(struct io_writer *writer, uint64_t offset, struct base_error *error);

/* What was to follow could not be had: final, too. */
void io_writer_fail(struct io_writer *writer);

/* With want_crc32: the CRC-32 of all bytes put. */
uint32_t io_writer_crc32(const struct io_writer *writer);

/* How its file lies; its count is 0 if that is not known. *asked: it was asked for. */
const struct fs_layout *io_writer_layout(const struct io_writer *writer, bool *asked);

/* Returns why the file is written as it is: the engine, and the length of its requests. */
const char *io_writer_choice(const struct io_writer *writer);

/* Fills engine, direct, stripes, times and bytes as far as this floor knows them. */
void io_writer_report(const struct io_writer *writer, struct ioshape_report *report);

/*
 * The rest is written, made durable and put in place. In steps, so that the next writer can begin
 * early, and saves to one path can take their places in order: end() sends the last blocks, and
 * waits until little of the file is under way, if that shows (*is_little): not while much of it is
 * in the page cache. It may be left out. finish() ends with a complete durable temporary file,
 * commit() renames it. After a failure only abort remains.
 */
int io_writer_end(struct io_writer *writer, bool *is_little, struct base_error *error);
int io_writer_finish(struct io_writer *writer, struct base_error *error);
int io_writer_commit(struct io_writer *writer, struct base_error *error);

/*
 * After the commit: when the file was modified, in nanoseconds since 1970; 0 if nobody knows, as of
 * pipes.
 */
int64_t io_writer_modified_ns(const struct io_writer *writer);
/*
 * After the commit: puts a small file beside it, whose name has `suffix` in addition, whole, with
 * no more access than the file gives, and as durable. Not beside pipes and devices.
 */
int io_writer_put_beside(struct io_writer *writer, const char *suffix, const void *data,
			 size_t bytes, struct base_error *error);

/* Frees the writer; without commit the temporary file is removed. Nothing is in flight afterwards.
 */
void io_writer_free(struct io_writer *writer);

/*
 * Makes what room can be made for a file at `path`: waits for the space of files that this process
 * has replaced, and removes what killed writers left behind in its directory.
 */
void io_clear_space(const char *path, const struct base_log *log);

/*
 * Whether the filesystem reserves so much for a file at `path`, or in the directory of that name;
 * it is given back at once. False, too, where that cannot be tried.
 */
bool io_can_reserve(const char *path, bool in_directory, uint64_t bytes);

/* ---- Reading (reader.c) ---------------------------------------------------------------------- */

/*
 * A file, or a part of one, open for reading; immutable, so several threads can share it. All
 * offsets below count from the beginning of the part, and nothing outside it is ever returned.
 */
struct io_input {
	int fd;        /* page cache */
	int direct_fd; /* past it; -1 if not possible or not wanted */
	uint64_t base; /* where in the file the part begins: anywhere */
	uint64_t bytes;
	int64_t modified_ns; /* when it was opened, since 1970 */
	/* Other processes of the host want the same bytes: past the page cache each would have the
	 * storage read them again. */
	bool shared;
	bool may_share; /* it may go through the page cache, for other processes that read it */
	int claim_fd;   /* -1 without io_input_claim() */
	struct fs_info fs;
	char *path; /* for messages, which say of a part where it begins; owned */
};

/* The part of `bytes` bytes from `base` on, which the file must have (otherwise IOSHAPE_E_DAMAGED);
 * 0 and 0 for all of it. */
int io_input_open(struct io_input *input, const char *path, uint64_t base, uint64_t bytes,
		  enum ioshape_direct direct, struct base_error *error);
void io_input_close(struct io_input *input);
/*
 * Returns false if another reader on this host has claimed the file: another process, as a rule.
 * The claim ends with io_input_close(). If the kernel refuses claims, this returns true.
 */
bool io_input_claim(struct io_input *input);

/* Exactly these bytes through the page cache: for headers. A file that ends too soon is
 * IOSHAPE_E_DAMAGED. */
int io_input_get(const struct io_input *input, uint64_t offset, void *into, size_t bytes,
		 struct base_error *error);

/*
 * All of a small file beside it, as io_writer_put_beside() has put it there: in the place of what
 * `into` holds. A negative errno without a sentence, -EPERM if it is not of the same user.
 */
int io_input_get_beside(const struct io_input *input, const char *suffix, size_t most_bytes,
			struct base_buffer *into);

/* A run of the file that goes to one place in memory and is checksummed on its way. */
struct io_piece {
	uint64_t offset;
	uint64_t bytes;
	void *into;   /* NULL: only checksum it */
	uint32_t crc; /* out: of these bytes, beginning from 0 */
	bool want_crc;
};

/*
 * Reads the pieces, which are sorted by offset and do not overlap. What lies in the page cache is
 * taken from there by several threads; the rest is read directly in big blocks, far ahead. Progress
 * as for files, in bytes of pieces; `progress` may be NULL, `error` may not.
 */
int io_read(struct io_lane *lane, const struct io_input *input, struct io_piece *pieces,
	    size_t count, ioshape_progress_fn progress, void *progress_user,
	    struct base_error *error);

/*
 * The same for a reader that reads call by call: once it has shown that it reads onward, what
 * follows is read ahead between its calls, up to `end`. In one thread at a time.
 */
struct io_stream;

int io_stream_open(struct io_stream **out, const struct io_input *input, uint64_t end,
		   struct base_error *error);
/*
 * As io_read(). Afterwards the lane belongs to the stream, unless io_stream_is_idle(), and is
 * to be given again in the next call. After a failure the stream must be stopped.
 */
int io_read_onward(struct io_stream *stream, struct io_lane *lane, struct io_piece *pieces,
		   size_t count, ioshape_progress_fn progress, void *progress_user,
		   struct base_error *error);
/*
 * Where nothing is under way: sends for what lies there and behind it, for the calls to come, as
 * far as buffers go, and waits for nothing. The lane belongs to the stream afterwards, unless
 * io_stream_is_idle(). That it cannot be done is nobody's failure.
 */
void io_stream_expect(struct io_stream *stream, struct io_lane *lane, uint64_t offset);
/* Nothing has been read ahead: stopping loses nothing. */
bool io_stream_is_idle(const struct io_stream *stream);
/* Waits until nothing is in flight, and lets go of the lane. It can go on from there. */
void io_stream_stop(struct io_stream *stream);
/* NULL is fine. */
void io_stream_free(struct io_stream *stream);

/* ---- Directories (folder.c) ------------------------------------------------------------------ */

/*
 * An open directory. What is done in it is done by its descriptor, and never through a symbolic
 * link in it: the same directory, whatever has taken its name since. Names are those of entries,
 * without '/'.
 */
struct io_folder {
	int fd;     /* -1 if closed */
	char *path; /* for messages; owned */
};

#define IO_NO_FOLDER                                                                               \
	{                                                                                          \
		.fd = -1                                                                           \
	}

/* Makes a directory and those above it where they are missing, as mkdir -p does; durably. */
int io_folder_make(const char *path, struct base_error *error);
/*
 * Makes a folder of this user alone, mode 0700, if it is not there; not those above it. -EACCES if
 * another user made it, or others may write to it. *ours is what a file has that this process makes
 * there: its owner and its time, as the server gives them.
 */
int io_folder_make_own(const char *path, struct stat *ours, struct base_error *error);
/* -ENOENT, -ENOTDIR, ...; on failure it is closed. */
int io_folder_open(struct io_folder *folder, const char *path, struct base_error *error);
int io_folder_open_in(struct io_folder *folder, const struct io_folder *parent, const char *name,
		      struct base_error *error);
/* A new one, opened. -EEXIST, without a sentence, if the name is taken, or somebody was quick to
 * remove it. */
int io_folder_create_in(struct io_folder *folder, const struct io_folder *parent, const char *name,
			struct base_error *error);
/* Safe on IO_NO_FOLDER. Ends its lock. */
void io_folder_close(struct io_folder *folder);

/* A file whose lock is held: as that of a directory. */
struct io_hold {
	int fd; /* -1: none */
};

#define IO_NO_HOLD                                                                                 \
	{                                                                                          \
		.fd = -1                                                                           \
	}

enum io_lock {
	IO_LOCKED,   /* it is ours now, or was */
	IO_BUSY,     /* somebody else has it */
	IO_NO_LOCKS, /* not to be had here */
};

/* Locks the directory itself, without waiting. */
enum io_lock io_folder_lock(const struct io_folder *folder);

/*
 * Takes the lock of a file, which is made if it is not there: waits for it, or else answers -EBUSY,
 * without a sentence, if somebody has it.
 */
int io_folder_take(const struct io_folder *folder, const char *name, bool wait,
		   struct io_hold *hold, struct base_error *error);
/*
 * Keeps others from beginning to read a small file, until io_folder_let_go(): before what it
 * describes is removed. -EBUSY, without a sentence, if somebody reads it now; -ENOENT if there is
 * none. Where there are no locks it always succeeds.
 */
int io_folder_claim(const struct io_folder *folder, const char *name, struct io_hold *hold,
		    struct base_error *error);
/* Safe on IO_NO_HOLD. */
void io_folder_let_go(struct io_hold *hold);

/* Whether it is (still) the one of this name. */
bool io_folder_is_named(const struct io_folder *folder, const struct io_folder *parent,
			const char *name);

enum io_entry_kind { IO_FILE, IO_FOLDER, IO_OTHER };

struct io_entry {
	enum io_entry_kind kind;
	uint64_t bytes;
	uint32_t owner;   /* user id */
	uint32_t mode;    /* who may do what: the last twelve bits */
	int64_t modified; /* seconds since 1970 */
	int64_t modified_ns;
	uint64_t device, inode; /* which one it is */
	uint64_t links;         /* names of a file; of a directory, what is below it, mostly */
};

/* -ENOENT, without a sentence, if there is nothing. The name "." is the directory itself. */
int io_folder_look(const struct io_folder *folder, const char *name, struct io_entry *entry,
		   struct base_error *error);

/* Has an NFS client ask its server what a path, or with "" the open file `fd`, is by now. */
void io_look_anew(int fd, const char *path);

/* As io_folder_look() for a path, behind a symbolic link if `follow`; a negative errno without a
 * sentence. */
int io_look(const char *path, bool follow, struct io_entry *entry);
/* Whether it is the same file, and nobody has written it since. */
bool io_is_unchanged(const struct io_entry *before, const struct io_entry *now);

/*
 * Tells each name, "." and ".." left out; anything but 0 ends it with that code. IOSHAPE_E_LIMIT
 * after a million.
 */
int io_folder_list(const struct io_folder *folder,
		   int (*found)(void *user, const char *name, struct base_error *error), void *user,
		   struct base_error *error);

/*
 * Describes a file in the directory as fs_describe() does: a new one without a name where the
 * filesystem has such files, else any that is there, else the directory. Where the kernel does not
 * say whether direct I/O works, this tells whether O_DIRECT can be set.
 */
int io_folder_describe_file(const struct io_folder *folder, struct fs_info *info,
			    struct base_error *error);

/* What there is in it is on stable storage, names included. */
int io_folder_sync(const struct io_folder *folder, struct base_error *error);

/* Neither has a sentence. A directory takes the name of another only if that is empty. */
int io_folder_rename(const struct io_folder *folder, const char *from, const char *to);
/* -EOPNOTSUPP if the filesystem cannot. */
int io_folder_swap(const struct io_folder *folder, const char *one, const char *other);

/*
 * Removes a directory: the file `first` in it (may be NULL), durably, then its other files, then
 * itself. `folder` is what is open under that name. Without `first` it never had its own name, and
 * directories in it go, too. Else they are no business of ours: they stay, and so does it
 * (-ENOTEMPTY). `hold` (may be NULL), a claim of `first`, is let go when that
 * is removed. -EBUSY, without a sentence: nothing but files is left that somebody on this host has
 * open over NFS. -EAGAIN, without a sentence: the budget (may be NULL) is spent, and something is
 * left for the next time.
 */
int io_folder_remove(const struct io_folder *folder, const struct io_folder *parent,
		     const char *name, const char *first, struct io_hold *hold,
		     struct base_budget *budget, struct base_error *error);

/* ---- Directories that appear whole (atomic_dir.c) -------------------------------------------- */

/* As io_folder_create_in(), locked where locks work: *lock is IO_LOCKED or IO_NO_LOCKS.
 * -EAGAIN, without a sentence: try another name. */
int io_folder_create_locked(struct io_folder *folder, const struct io_folder *parent,
			    const char *name, enum io_lock *lock, struct base_error *error);

/* A directory under a temporary name, which dead processes leave behind as they do files. */
struct io_new_folder {
	struct io_folder above;
	struct io_folder folder;      /* locked, where locks work */
	char *name;                   /* that it will have; owned */
	char temporary[NAME_MAX + 1]; /* "" once it has its name */
};

#define IO_NO_NEW_FOLDER                                                                           \
	{                                                                                          \
		.above = IO_NO_FOLDER, .folder = IO_NO_FOLDER                                      \
	}

/* Make one beside `path`, which is absolute. On failure it is closed. `tidying` is as in
 * struct io_file_options. */
int io_new_folder_make(struct io_new_folder *made, const char *path, struct base_budget *tidying,
		       const struct base_log *log, struct base_error *error);
/* Gives it its name, durably; -EEXIST if more than an empty directory has that. */
int io_new_folder_commit(struct io_new_folder *made, struct base_error *error);
/*
 * The same, and it takes the place of a directory that was modified at `newest_ns` at the latest
 * (-EEXIST if later). That one goes, `first` in it (may be NULL) before all else; -EBUSY, if
 * somebody holds that file. Where two names cannot be swapped, there is nothing for a moment.
 */
int io_new_folder_replace(struct io_new_folder *made, const char *first, int64_t newest_ns,
			  struct base_error *error);
/* Of a copy of a directory, when it is filled: its time, and who may enter it. */
int io_folder_resemble(const struct io_folder *folder, const struct io_original *original,
		       struct base_error *error);
/* Removes it unless it was committed. Safe on IO_NO_NEW_FOLDER. */
void io_new_folder_close(struct io_new_folder *made, const struct base_log *log);

/*
 * Removes a file, or a directory with all in it, if it is the one that was looked at, unchanged:
 * -ESTALE, without a sentence, if it is not. Whoever replaces it meanwhile does so as if it had not
 * been there. `first` (may be NULL) is a file of a directory that readers hold: -EBUSY, without a
 * sentence, if one does.
 */
int io_folder_discard(const struct io_folder *folder, const char *name,
		      const struct io_entry *looked_at, const char *first,
		      struct base_error *error);

/* ---- Small files (folder.c) ------------------------------------------------------------------ */

/*
 * A new file that appears whole, in place of what has the name: on stable storage, or as it comes.
 * `mode` as for open(). Lists know it by its dot until then. 0 or a negative errno.
 */
int io_put_whole(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		 mode_t mode);

/* Replaces what `into` holds by all of a regular file. -EPERM if it is none, -EFBIG if it is longer
 * than that. *status is what it was before. */
int io_read_whole(int fd, size_t most_bytes, struct base_buffer *into, struct stat *status);

static inline int64_t io_modified_ns(const struct stat *status)
{
	return (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

/* A new small file in a directory that nobody reads yet, on stable storage; its name is after a
 * sync. After a failure it is not there. */
int io_folder_put(const struct io_folder *folder, const char *name, const void *data, size_t bytes,
		  struct base_error *error);

/*
 * Reads a small file: appends it to `into`. `hold` may be NULL; otherwise it holds off
 * io_folder_claim(), where locks work, until io_folder_let_go().
 * -ENOENT, without a sentence, if there is none, or if it is just being removed.
 */
int io_folder_get(const struct io_folder *folder, const char *name, size_t most_bytes,
		  struct base_buffer *into, struct io_hold *hold, struct base_error *error);
/* The first bytes of a file, as many as there are and have room; -ENOENT and others without a
 * sentence. */
ssize_t io_folder_peek(const struct io_folder *folder, const char *name, void *into, size_t bytes);

/*
 * Small texts that appear whole, as symbolic links that nobody follows. They last only after a
 * sync. -EEXIST without a sentence.
 */
int io_folder_put_text(const struct io_folder *folder, const char *name, const char *text,
		       struct base_error *error);
/* 0, or a negative errno without a sentence: -EINVAL if it is something else. */
int io_folder_get_text(const struct io_folder *folder, const char *name, char into[PATH_MAX]);
/* Removes one; it may be gone already. */
int io_folder_drop_text(const struct io_folder *folder, const char *name, struct base_error *error);

/* ---- Who is dead (folder.c) ------------------------------------------------------------------ */

/* Eight hex digits that stand for this boot of this machine; IO_NOWHERE if it does not tell. */
#define IO_NOWHERE "00000000"
const char *io_machine_tag(void);

/* What io_lock_domain() of internal.h writes. */
#define IO_DOMAIN_BYTES 9
/* Whether the digits that a name has are of this domain. */
bool io_is_lock_domain(const char *digits, const char domain[IO_DOMAIN_BYTES]);

/* The clock that gives files in a directory their times: its server's, and not ours. */
struct io_clock {
	int directory_fd;
	int64_t now; /* seconds since 1970; 0: not asked yet, below: it does not tell */
};

/* Whether what was last touched then has been left alone for a day. Asks by a new file, once. */
bool io_is_abandoned(struct io_clock *clock, int64_t touched);
/* What time it is by that clock: nanoseconds since 1970, of a new file. */
int io_time_in(const char *directory, int64_t *now_ns, struct base_error *error);

#endif
