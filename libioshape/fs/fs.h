/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a path sits on. It asks the kernel, and changes nothing.
 */
#ifndef FS_FS_H
#define FS_FS_H

#include "base/base.h"

#include <sys/types.h>

/* What kind of filesystem, by its type and, where that can lie, by what it answers. */
enum fs_family {
	FS_OTHER, /* not known here */
	FS_LUSTRE,
	FS_BEEGFS,
	FS_GPFS,
	FS_CEPH,
	FS_NFS,
	FS_WEKA,
	FS_DAOS,
	FS_JUICEFS,
	FS_ALLUXIO,
	FS_GLUSTER,
	FS_FUSE, /* another one in user space */
	FS_XFS,
	FS_EXT,
	FS_BTRFS,
	FS_ZFS,
	FS_TMPFS,
	FS_OVERLAY,
	FS_FAMILIES /* how many there are */
};

/* "lustre", "ext4", ...; for messages and reports. Pure. */
const char *fs_family_name(enum fs_family family);

/* Whether it keeps its files on this host, as far as its family tells. Pure. */
bool fs_is_local(enum fs_family family);

/* The type that statfs() reports for every filesystem in user space, whatever its family. */
#define FS_FUSE_MAGIC 0x65735546

/* Whether the kernel cuts a request of more than about 1 MiB there, and sends its parts at once.
 * Pure. */
bool fs_cuts_requests(enum fs_family family);

/* ---- Layouts: how a file lies on storage targets --------------------------------------------- */

#define FS_TARGET_POOL_BYTES 16 /* with its 0; Lustre takes 15 characters */
#define FS_MOST_PARTS 8
#define FS_MOST_TARGETS 64 /* that are looked at one by one */
#define FS_ALL_TARGETS UINT32_MAX
/* Up to here one stripe is enough by the automatic rule. */
#define FS_ONE_STRIPE_BYTES (100 * MIB)

/* A part of a file's length that is striped in one way. Most files have one. */
struct fs_part {
	uint64_t begin, end;             /* UINT64_MAX: without end */
	uint64_t stripe_bytes;           /* 0: as the filesystem likes */
	uint32_t stripe_count;           /* targets; FS_ALL_TARGETS; 0: as the filesystem likes */
	bool on_metadata;                /* these bytes lie on a metadata server (Data-on-MDT) */
	bool overstriped;                /* several stripes may lie on one target */
	char pool[FS_TARGET_POOL_BYTES]; /* "" if none */
};

struct fs_layout {
	uint32_t count;   /* 0: not striped, or it does not tell */
	uint32_t mirrors; /* copies; 1 as a rule */
	struct fs_part parts[FS_MOST_PARTS];
	/* Asked for, with one part: the numbers of its targets. 0 of them: whichever. */
	uint32_t chosen;
	uint16_t target[FS_MOST_TARGETS];
};

/*
 * From what the filesystem answers. Pure; the bytes are not trusted. -EINVAL if they are no layout,
 * -ENOTSUP for one that is not understood (foreign, released), -E2BIG for more parts than fit: the
 * first ones are in `layout` then.
 */
int fs_lustre_layout(const void *blob, size_t bytes, struct fs_layout *layout);
int fs_ceph_layout(const char *text, size_t bytes, struct fs_layout *layout);
int fs_beegfs_layout(uint32_t pattern, uint32_t chunk_bytes, uint16_t targets,
		     struct fs_layout *layout);

/* The part that byte `offset` is in; NULL if there is none. Pure. */
const struct fs_part *fs_layout_at(const struct fs_layout *layout, uint64_t offset);
/* The part that most of a file of so many bytes is in; NULL if not striped. Pure. */
const struct fs_part *fs_layout_main(const struct fs_layout *layout, uint64_t file_bytes);

/* "8 x 1M, pool flash", "to 100M: 1 x 1M; 8 x 4M", for reports. Pure. Room for 96 is enough for
 * most; longer ones end in "...". */
void fs_layout_text(const struct fs_layout *layout, char *text, size_t text_bytes);

/* ---- Layouts to ask for (layout_request.c, ask.c) -------------------------------------------- */

enum fs_request_kind {
	FS_REQUEST_AUTO,      /* by size */
	FS_REQUEST_DIRECTORY, /* none: as the directory says */
	FS_REQUEST_LAYOUT     /* this one */
};

struct fs_layout_request {
	enum fs_request_kind kind;
	/* Of FS_REQUEST_LAYOUT; 0 and "" in it are as the directory says. */
	struct fs_layout layout;
};

/* Whether layouts can be asked for there. Pure. */
bool fs_takes_layouts(enum fs_family family);

/* The setting "layout", see include/ioshape/context.h. Pure. -EINVAL and a sentence. */
int fs_layout_request_parse(const char *text, struct fs_layout_request *request,
			    struct base_error *error);

/* What the automatic rule needs to know. */
struct fs_facts {
	enum fs_family family;
	struct fs_layout directory; /* what a file gets that asks for nothing */
	uint32_t targets;           /* 0 unknown */
	uint64_t file_bytes;        /* 0 unknown */
	uint32_t writers;           /* files written at a time; 0 unknown: 1 */
};

/*
 * What to ask for: 1 and *ask, or 0 if the directory's own layout is as good. `why` receives a
 * clause for the report. Pure.
 */
int fs_choose_layout(const struct fs_layout_request *request, const struct fs_facts *facts,
		     struct fs_layout *ask, char *why, size_t why_bytes);

struct fs_storage;

/*
 * What to ask for instead where some of the targets in `storage` could not hold their part of the
 * file: 1, and *ask has such as can. 0 and *ask as it was if all could, or if no choice would do.
 * `turn`, at random, says which of them come first. Pure.
 */
int fs_leave_out_full(const struct fs_facts *facts, const struct fs_storage *storage, uint32_t turn,
		      struct fs_layout *ask);

struct fs_even_targets;

/*
 * What to ask for so that the file lies in the part number `place` (from 1 on) of the targets, of
 * so many parts as there are of its stripes: 1 and *ask, or 0 and *ask as it was where that makes
 * no sense. Pure.
 */
int fs_take_place(const struct fs_facts *facts, const struct fs_even_targets *targets,
		  uint32_t place, uint32_t places, struct fs_layout *ask);

/* Creates a new file (O_EXCL, O_NOFOLLOW, O_CLOEXEC, O_RDWR, and more) as open() does. A descriptor
 * above those of the standard streams, or a negative errno, and then no file. */
int fs_create_plainly(int directory_fd, const char *name, mode_t mode, int more_flags);

/*
 * Creates a new file (O_EXCL, O_NOFOLLOW, O_CLOEXEC, O_RDWR) with that layout, reads it back, and
 * if it cannot be had removes the file and creates it plainly: what is returned can be written. A
 * descriptor, or a negative errno; `note` receives a clause if it is not as asked for, or "".
 */
int fs_create_with_layout(int directory_fd, const char *name, mode_t mode, enum fs_family family,
			  const struct fs_layout *ask, char *note, size_t note_bytes);

/* How many may write at a time so that each storage target has one: by targets and stripes; 0 if
 * that is not known. Pure. */
uint32_t fs_capacity(uint32_t targets, const struct fs_layout *layout, uint64_t file_bytes);

/* ---- Mounts (storage.c): what is the same for all files there -------------------------------- */

struct fs_target {
	char name[64];
	uint16_t number;
	uint64_t total_bytes, free_bytes;
};

/* A line of the mount table. What is longer than its place is cut. */
struct fs_mount {
	char type[32];    /* "lustre", "fuse.juicefs" */
	char source[512]; /* "10.0.0.1@tcp:/scratch", "server:/export" */
	char mount_point[256];
	char options[512]; /* of the mount, then of its filesystem, with a comma between them */
};

struct fs_storage {
	enum fs_family family;
	struct fs_mount mount; /* "" for what the mount table does not tell */
	char variant[32];      /* "FSx for Lustre", "BeeOND", "NFSv4.2 over RDMA"; or "" */
	uint64_t total_bytes, free_bytes;
	uint64_t
		write_unit; /* a request should be a multiple of it: wsize, block size; 0 unknown */
	uint64_t flight_bytes; /* in flight for one file or target, as the client can; 0 unknown */
	uint32_t targets; /* storage targets, of the directory's pool of targets where the client
			   * tells which those are; 0 unknown */
	uint32_t target_count; /* of those in the list below */
	struct fs_target target[FS_MOST_TARGETS];
	struct fs_layout layout;           /* what new files in this directory get */
	bool remote;                       /* other hosts may share it */
	bool rotational_known, rotational; /* of a local disk */
};

/*
 * All that can be found out about the mount of an open directory without writing to it. Costs up to
 * some hundred system calls: once for each mount. `root` is put before /proc and /sys ("" but in
 * tests).
 */
int fs_look_at_storage(int directory_fd, const char *path, const char *root,
		       struct fs_storage *storage, struct base_error *error);

/*
 * A clause about targets with less than `bytes` free, the fullest first: "OST0003 (1.0 MiB free),
 * OST0001 (...)", and how many more; "" if there is none, or nobody knows. Pure (space.c).
 */
void fs_name_full_targets(const struct fs_storage *storage, uint64_t bytes, char *into,
			  size_t into_bytes);

/* The servers' number, by the quickest way; 0 if it does not tell. */
uint32_t fs_count_targets(int directory_fd, enum fs_family family);

/* ---- Reading ahead (read_ahead.c) ------------------------------------------------------------ */

/* How far the kernel reads ahead by itself in a file that is read from its beginning; 0 if it does
 * not tell, as of filesystems that do so themselves. */
uint64_t fs_read_ahead_of(int fd);
/* Of a device with this number; `root` as everywhere on this floor. */
uint64_t fs_read_ahead_bytes(const char *root, unsigned device_major, unsigned device_minor);

/* ---- Files ----------------------------------------------------------------------------------- */

struct fs_info {
	char type[32]; /* as /proc/self/mountinfo says it: "ext4", "fuse.sshfs"; else from the magic
			*/
	uint64_t magic;            /* statfs f_type */
	uint64_t block_bytes;      /* preferred unit of I/O (st_blksize) */
	uint32_t memory_alignment; /* for direct I/O, 0 if the kernel did not say */
	uint32_t offset_alignment;
	bool direct_known; /* the kernel said whether direct I/O works ... */
	bool direct_works; /* ... and this is what it said */
	enum fs_family family;
	struct fs_layout
		layout; /* of this file or directory; its count is 0 if it is not striped */
};

/* Targets that are as full as each other, or nearly so: there the filesystem puts files on them in
 * turn, too. */
struct fs_even_targets {
	uint32_t count; /* 0: some are fuller, or nobody tells */
	uint16_t number[FS_MOST_TARGETS];
};

/* Type and family of the filesystem seen last: reading the mount table costs more than a small
 * save, and a filesystem in user space is asked what it is. Zero it. */
struct fs_memory {
	uint64_t mount; /* its number, if no other will get that; 0: known by device and magic */
	unsigned device_major, device_minor;
	uint64_t magic;
	char type[32];
	enum fs_family family;
	uint32_t targets; /* storage targets, if they were counted; 0 if it does not tell */
	bool counted;
	/* The fullest of them, as of then. */
	uint64_t least_free_bytes, looked_ns;
	struct fs_even_targets even; /* as of then, too */
	/* What a new file got that asked for nothing, in the directory with this number. */
	uint64_t directory, asked_ns;
	struct fs_layout layout;
	uint64_t next_directory; /* of the file that is described next; 0: it is asked for */
};

/*
 * The file that is described next is a new one, which has asked for nothing: it is not asked for
 * its layout either if another one there has been within the hour. `inherits`: its directory is
 * new, too, and has its layout from the one above.
 */
void fs_expect_layout(struct fs_memory *memory, int directory_fd, bool inherits);

/* fs_count_targets(), once for what is in the memory: `directory_fd` is on it. */
uint32_t fs_remembered_targets(int directory_fd, struct fs_memory *memory);

/*
 * fs_look_at_storage() where a file of so many bytes might meet a full target, on filesystems whose
 * files can be put on others. Not for small files, nor soon again where there was plenty.
 */
bool fs_targets_are_low(int directory_fd, const char *directory, uint64_t bytes,
			struct fs_memory *memory, struct fs_storage *storage);

/* Looks again after a minute. Borrowed from the memory. */
const struct fs_even_targets *fs_even_targets(int directory_fd, const char *directory,
					      struct fs_memory *memory);

/*
 * Whether files there are written through the page cache unless the caller requires
 * direct I/O. FUSE cuts a direct request into pieces of 128 KiB to 1 MiB, and most daemons serve
 * each piece before the next. Buffered bytes reach the daemon's own cache and leave it in large
 * pieces: a direct save takes four times as long on ceph-fuse. GlusterFS serves direct writes side
 * by side, three times faster than buffered ones. A daemon that answers as Lustre or BeeGFS do
 * passes requests on to them. Pure.
 */
bool fs_writes_cached(enum fs_family family, uint64_t magic);

/* Describes what the open file or directory `fd` is on. `memory` may be NULL. */
int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error);

/* ---- What is at a path (pool.c) -------------------------------------------------------------- */

/* Behind symbolic links. A name is asked for once, and neither its length nor its times. */
struct fs_found {
	int code;      /* a negative errno: it cannot be looked at, or has no directory */
	bool absent;   /* there is nothing, or a link that leads to nothing yet */
	bool dangling; /* it is such a link */
	bool regular;
	uint64_t mount; /* as fs_mount_of_path() tells it; of its directory if there is nothing */
	unsigned device_major, device_minor;
};

void fs_find(const char *path, struct fs_found *found);
/* What the same finds where there is known to be nothing. */
void fs_find_directory(const char *path, struct fs_found *found);

/* ---- Free space (space.c) -------------------------------------------------------------------- */

struct fs_space {
	/* For new bytes of this user, as the filesystem says it; UINT64_MAX if it does not. One
	 * storage target may be full, or a quota, while there is space on the whole. */
	uint64_t free_bytes;
	bool no_inodes; /* no file can be created any more, whatever there is free */
	uint64_t magic;
	unsigned device_major, device_minor;
};

/*
 * What there is for a file at `path`: by one statfs(), of what was found there (behind a symbolic
 * link), or of its directory. -EINVAL for what is no regular file, such as a pipe; -ENOENT if there
 * is no such directory, or the link leads to nothing yet.
 */
int fs_space_of_found(const char *path, const struct fs_found *found, struct fs_space *space);
int fs_space_of_path(const char *path, struct fs_space *space);

/* Of the file that is there: they are free only when it has been replaced. */
uint64_t fs_replaced_bytes(const char *path);

/* The same for a directory that may have to be made first, with those above it. */
int fs_space_of_directory(const char *path, struct fs_space *space);

/* What there is on the filesystem of an open file, by one fstatfs(); UINT64_MAX if it does not say.
 */
uint64_t fs_free_bytes_behind(int fd);

/* The filesystem's type for messages, as in struct fs_info; reads the mount table. */
void fs_space_type(const struct fs_space *space, char *type, size_t type_bytes);

/* ---- Pools (pool.c) -------------------------------------------------------------------------- */

#define FS_POOL_BYTES 128

/* What a pool's name is made of. */
#define FS_POOL_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@+/-"

/*
 * A name for the storage behind a mount, the same on all hosts that share it: "nfs:server:/export",
 * "lustre:fs1", or "lustre:fs1.flash" for a pool of its targets ("" if none). What one host alone
 * can reach has `host` in its name. Made of characters that are safe in file names' neighbourhood
 * and in Redis: no space, no brace. Pure.
 */
void fs_pool_of_mount(const char *type, const char *source, const char *target_pool,
		      const char *host, char name[FS_POOL_BYTES]);

/*
 * The same for the file or directory `path`, whose last part need not exist. The pool of targets is
 * that of its directory: whoever asks once for each mount, as saves do, takes turns in the pool of
 * the directory that was first.
 */
int fs_pool_of_path(const char *path, char name[FS_POOL_BYTES], struct base_error *error);

/* A number that is the same for paths on one mount, and for no others while it is mounted. It costs
 * one system call. 0 or a negative errno. */
int fs_mount_of_path(const char *path, uint64_t *mount);

/* A name for a statfs magic number: "nfs", "lustre"; "0x…" for one not known here. Pure. */
void fs_magic_name(uint64_t magic, char *type, size_t type_bytes);

#endif
