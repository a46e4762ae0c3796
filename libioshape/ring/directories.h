/* SPDX-License-Identifier: Apache-2.0 */
/* Part of ring.h: directories (folder*.c, new_folder.c). */
#ifndef RING_DIRECTORIES_H
#define RING_DIRECTORIES_H

#include "base/base.h"
#include "fs/fs.h"

#include <limits.h>

/*
 * An open directory. What is done in it is done by its descriptor, and never through a symbolic
 * link in it: the same directory, whatever has taken its name since. Names are those of entries,
 * without '/'.
 */
struct ring_folder {
	int fd;     /* -1 if closed */
	char *path; /* for messages; owned */
};

#define RING_NO_FOLDER                                                                             \
	{                                                                                          \
		.fd = -1                                                                           \
	}

/* Makes a directory and those above it where they are missing, as mkdir -p does; durably. */
int ring_folder_make(const char *path, struct base_error *error);
/* -ENOENT, -ENOTDIR, ...; on failure it is closed. */
int ring_folder_open(struct ring_folder *folder, const char *path, struct base_error *error);
int ring_folder_open_in(struct ring_folder *folder, const struct ring_folder *parent,
			const char *name, struct base_error *error);
/* A new one, opened. -EEXIST, without a sentence, if the name is taken, or somebody was quick to
 * remove it. */
int ring_folder_create_in(struct ring_folder *folder, const struct ring_folder *parent,
			  const char *name, struct base_error *error);
/* Safe on RING_NO_FOLDER. Ends its lock. */
void ring_folder_close(struct ring_folder *folder);

enum ring_lock {
	RING_LOCKED,   /* it is ours now, or was */
	RING_BUSY,     /* somebody else has it */
	RING_NO_LOCKS, /* not to be had here */
};

/* Locks the directory itself, without waiting. */
enum ring_lock ring_folder_lock(const struct ring_folder *folder);

/* As ring_folder_create_in(), locked where locks work: *lock is RING_LOCKED or RING_NO_LOCKS.
 * -EAGAIN, without a sentence: try another name. */
int ring_folder_create_locked(struct ring_folder *folder, const struct ring_folder *parent,
			      const char *name, enum ring_lock *lock, struct base_error *error);

/* Whether it is (still) the one of this name. */
bool ring_folder_is_named(const struct ring_folder *folder, const struct ring_folder *parent,
			  const char *name);

/* Of a file or a directory that is a copy of another one. */
struct ring_original {
	int64_t modified_ns; /* since 1970: the time that the copy gets */
	uint32_t mode;       /* that it gets, unless it replaces a file */
	/* What has its name stays, and the commit answers -EEXIST, if that was modified later. */
	int64_t newest_ns;
};

enum ring_entry_kind { RING_FILE, RING_FOLDER, RING_OTHER };

struct ring_entry {
	enum ring_entry_kind kind;
	uint64_t bytes;
	uint32_t owner;   /* user id */
	uint32_t mode;    /* who may do what: the last twelve bits */
	int64_t modified; /* seconds since 1970 */
	int64_t modified_ns;
	uint64_t device, inode; /* which one it is */
	uint64_t links;         /* names of a file; of a directory, what is below it, mostly */
};

/* -ENOENT, without a sentence, if there is nothing. The name "." is the directory itself. */
int ring_folder_look(const struct ring_folder *folder, const char *name, struct ring_entry *entry,
		     struct base_error *error);

/* The directory itself, as its server knows it, whatever this host remembers. */
int ring_folder_look_anew(const struct ring_folder *folder, struct ring_entry *entry);

/* As ring_folder_look() for a path, behind a symbolic link if `follow`; a negative errno without a
 * sentence. */
int ring_look(const char *path, bool follow, struct ring_entry *entry);
/* Whether it is the same file, and nobody has written it since. */
bool ring_is_unchanged(const struct ring_entry *before, const struct ring_entry *now);

/*
 * Tells each name, "." and ".." left out; anything but 0 ends it with that code. IOSHAPE_E_LIMIT
 * after a million.
 */
int ring_folder_list(const struct ring_folder *folder,
		     int (*found)(void *user, const char *name, struct base_error *error),
		     void *user, struct base_error *error);

/*
 * Describes a file in the directory as fs_describe() does: a new one without a name where the
 * filesystem has such files, else any that is there, else the directory. Where the kernel does not
 * say whether direct I/O works, this tells whether O_DIRECT can be set.
 */
int ring_folder_describe_file(const struct ring_folder *folder, struct fs_info *info,
			      struct base_error *error);

/* What there is in it is on stable storage, names included. */
int ring_folder_sync(const struct ring_folder *folder, struct base_error *error);

/* Neither has a sentence. A directory takes the name of another only if that is empty. */
int ring_folder_rename(const struct ring_folder *folder, const char *from, const char *to);
/* -EOPNOTSUPP if the filesystem cannot. */
int ring_folder_swap(const struct ring_folder *folder, const char *one, const char *other);

/* ---- Texts, and what has to go (folder_texts.c) ---------------------------------------------- */

/*
 * Small texts that appear whole, as symbolic links that nobody follows. They last only after a
 * sync. -EEXIST without a sentence.
 */
int ring_folder_put_text(const struct ring_folder *folder, const char *name, const char *text,
			 struct base_error *error);
/* 0, or a negative errno without a sentence: -EINVAL if it is something else. */
int ring_folder_get_text(const struct ring_folder *folder, const char *name, char into[PATH_MAX]);
/* Removes one; it may be gone already. */
int ring_folder_drop_text(const struct ring_folder *folder, const char *name,
			  struct base_error *error);

/*
 * Removes a file, or a directory with all in it, if it is the one that was looked at, unchanged:
 * -ESTALE, without a sentence, if it is not. Whoever replaces it meanwhile does so as if it had not
 * been there. `first` (may be NULL) is a file of a directory that readers hold: -EBUSY, without a
 * sentence, if one does.
 */
int ring_folder_discard(const struct ring_folder *folder, const char *name,
			const struct ring_entry *looked_at, const char *first,
			struct base_error *error);

/* ---- Small files ----------------------------------------------------------------------------- */

/* A file whose lock is held: as that of a directory. */
struct ring_hold {
	int fd; /* -1: none */
};

#define RING_NO_HOLD                                                                               \
	{                                                                                          \
		.fd = -1                                                                           \
	}

/* A new small file in a directory that nobody reads yet, on stable storage; its name is after a
 * sync. After a failure it is not there. */
int ring_folder_put(const struct ring_folder *folder, const char *name, const void *data,
		    size_t bytes, struct base_error *error);

/*
 * Reads a small file: appends it to `into`. `hold` may be NULL; otherwise it holds off
 * ring_folder_claim(), where locks work, until ring_folder_let_go().
 * -ENOENT, without a sentence, if there is none, or if it is just being removed.
 */
int ring_folder_get(const struct ring_folder *folder, const char *name, size_t most_bytes,
		    struct base_buffer *into, struct ring_hold *hold, struct base_error *error);
/* The first bytes of a file, as many as there are and have room; -ENOENT and others without a
 * sentence. */
ssize_t ring_folder_peek(const struct ring_folder *folder, const char *name, void *into,
			 size_t bytes);
/*
 * Takes the lock of a file, which is made if it is not there: waits for it, or else answers -EBUSY,
 * without a sentence, if somebody has it.
 */
int ring_folder_take(const struct ring_folder *folder, const char *name, bool wait,
		     struct ring_hold *hold, struct base_error *error);
/* Safe on RING_NO_HOLD. */
void ring_folder_let_go(struct ring_hold *hold);

/*
 * Keeps others from beginning to read a small file, until ring_folder_let_go(): before what it
 * describes is removed. -EBUSY, without a sentence, if somebody reads it now; -ENOENT if there is
 * none. Where there are no locks it always succeeds.
 */
int ring_folder_claim(const struct ring_folder *folder, const char *name, struct ring_hold *hold,
		      struct base_error *error);

/*
 * Removes a directory: the file `first` in it (may be NULL), durably, then its other files, then
 * itself. `folder` is what is open under that name. Without `first` it never had its own name, and
 * directories in it go, too. Else they are no business of ours: they stay, and so does it
 * (-ENOTEMPTY). `hold` (may be NULL), a claim of `first`, is let go when that
 * is removed. -EBUSY, without a sentence: nothing but files is left that somebody on this host has
 * open over NFS.
 */
int ring_folder_remove(const struct ring_folder *folder, const struct ring_folder *parent,
		       const char *name, const char *first, struct ring_hold *hold,
		       struct base_error *error);
/* Removes as ring_folder_remove() does, as far as the budget reaches: -EAGAIN, without a sentence,
 * if something is left for the next time. */
int ring_folder_remove_some(const struct ring_folder *folder, const struct ring_folder *parent,
			    const char *name, const char *first, struct ring_hold *hold,
			    struct base_budget *budget, struct base_error *error);

/* A directory under a temporary name, which dead processes leave behind as they do files
 * (new_folder.c). */
struct ring_new_folder {
	struct ring_folder above;
	struct ring_folder folder;    /* locked, where locks work */
	char *name;                   /* that it will have; owned */
	char temporary[NAME_MAX + 1]; /* "" once it has its name */
};

#define RING_NO_NEW_FOLDER                                                                         \
	{                                                                                          \
		.above = RING_NO_FOLDER, .folder = RING_NO_FOLDER                                  \
	}

/* Make one beside `path`, which is absolute. On failure it is closed. `tidying` is as in
 * struct ring_file_options. */
int ring_new_folder_make(struct ring_new_folder *made, const char *path,
			 struct base_budget *tidying, const struct base_log *log,
			 struct base_error *error);
/* Gives it its name, durably; -EEXIST if more than an empty directory has that. */
int ring_new_folder_commit(struct ring_new_folder *made, struct base_error *error);
/*
 * The same, and it takes the place of a directory that was modified at `newest_ns` at the latest
 * (-EEXIST if later). That one goes, `first` in it (may be NULL) before all else; -EBUSY, if
 * somebody holds that file. Where two names cannot be swapped, there is nothing for a moment.
 */
int ring_new_folder_replace(struct ring_new_folder *made, const char *first, int64_t newest_ns,
			    struct base_error *error);
/* Of a copy of a directory, when it is filled: its time, and who may enter it. */
int ring_folder_resemble(const struct ring_folder *folder, const struct ring_original *original,
			 struct base_error *error);
/* Removes it unless it was committed. Safe on RING_NO_NEW_FOLDER. */
void ring_new_folder_close(struct ring_new_folder *made, const struct base_log *log);

#endif
