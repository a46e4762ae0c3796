/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The filesystem layer: the mount, family, layout, storage targets and free space of a path. It
 * only asks the kernel and changes nothing; except fs_create_with_layout() and fs_create_plainly(),
 * which create a file.
 */
#ifndef FS_FS_H
#define FS_FS_H

#include "base/base.h"

#include <sys/types.h>

/* ---- Families (families.c) ------------------------------------------------------------------- */

/*
 * Kinds of filesystems. They follow from the type in the mount table and, if that can be wrong,
 * from the answers of the filesystem.
 */
enum fs_family {
	FS_OTHER, /* unknown type */
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
	FS_FUSE, /* another filesystem in user space */
	FS_XFS,
	FS_EXT,
	FS_BTRFS,
	FS_ZFS,
	FS_TMPFS,
	FS_OVERLAY,
	FS_FAMILIES /* number of families */
};

/* Returns the name of a family for messages and reports, such as "lustre". Pure. */
const char *fs_family_name(enum fs_family family);

/* Returns whether filesystems of this family keep their files on this host. Pure. */
bool fs_is_local(enum fs_family family);

/* The magic number that statfs() reports for all filesystems in user space, of any family. */
#define FS_FUSE_MAGIC 0x65735546

/*
 * Returns whether the kernel cuts requests longer than about 1 MiB there, and sends the pieces at
 * once. Pure.
 */
bool fs_cuts_requests(enum fs_family family);

/*
 * Returns whether files there are written through the page cache unless the caller requires direct
 * I/O.
 *
 * FUSE cuts a direct request into pieces of 128 KiB to 1 MiB, and most daemons serve each piece
 * before the next. Buffered bytes reach the daemon's own cache and leave it in large pieces: a
 * direct save takes four times as long on ceph-fuse. GlusterFS serves direct writes in parallel,
 * three times faster than buffered ones. A daemon that answers as Lustre or BeeGFS do passes
 * requests on to them. Pure.
 */
bool fs_writes_cached(enum fs_family family, uint64_t magic);

/* ---- Layouts: stripes of a file on storage targets (layout.c) -------------------------------- */

#define FS_TARGET_POOL_BYTES 16 /* with the final 0; Lustre allows 15 characters */
#define FS_MOST_COMPONENTS 8
#define FS_MOST_TARGETS 64 /* most targets that are listed individually */
#define FS_ALL_TARGETS UINT32_MAX
/* Files up to this size get one stripe by the automatic rule. */
#define FS_ONE_STRIPE_BYTES (100 * MIB)

/* A component: a range of a file that is striped in one way. Most files have one. */
struct fs_component {
	uint64_t begin, end;             /* end UINT64_MAX: no end */
	uint64_t stripe_bytes;           /* 0: the filesystem's default */
	uint32_t stripe_count;           /* targets; FS_ALL_TARGETS; 0: the filesystem's default */
	bool on_metadata;                /* the bytes are on a metadata server (Data-on-MDT) */
	bool overstriped;                /* several stripes may share a target */
	char pool[FS_TARGET_POOL_BYTES]; /* pool of targets; "" if none */
};

/* A file's layout: its components in order. */
struct fs_layout {
	uint32_t count;   /* number of components; 0: not striped, or not known */
	uint32_t mirrors; /* copies of the file; usually 1 */
	struct fs_component components[FS_MOST_COMPONENTS];
	/* For a request, which has one component: the indexes of its OSTs. 0 of them: any. */
	uint32_t chosen;
	uint16_t target[FS_MOST_TARGETS];
};

/* Returns the component of byte `offset`; NULL if there is none. Pure. */
const struct fs_component *fs_layout_at(const struct fs_layout *layout, uint64_t offset);
/* Returns the component that has most of a file of file_bytes; NULL if not striped. Pure. */
const struct fs_component *fs_layout_main(const struct fs_layout *layout, uint64_t file_bytes);

/*
 * Prints a layout for reports: "8 x 1M, pool flash", "to 100M: 1 x 1M; 8 x 4M". 96 bytes are enough
 * for most; longer texts end in "...". Pure.
 */
void fs_layout_text(const struct fs_layout *layout, char *text, size_t text_bytes);

/* ---- Layout requests (layout.c) -------------------------------------------------------------- */

enum fs_request_kind {
	FS_REQUEST_AUTO,      /* choose by the size of the file */
	FS_REQUEST_DIRECTORY, /* request nothing; use the directory's layout */
	FS_REQUEST_LAYOUT     /* request this layout */
};

struct fs_layout_request {
	enum fs_request_kind kind;
	/* For FS_REQUEST_LAYOUT. Fields that are 0 or "" take the directory's values. */
	struct fs_component component;
};

/* Returns whether layouts can be requested there. Pure. */
bool fs_takes_layouts(enum fs_family family);

/*
 * Parses the setting "layout", which include/ioshape/ioshape.h documents. Returns -EINVAL with an
 * error message if it is not valid. Pure.
 */
int fs_layout_request_parse(const char *text, struct fs_layout_request *request,
			    struct base_error *error);

/* Inputs of the automatic rule. */
struct fs_facts {
	enum fs_family family;
	struct fs_layout directory; /* layout of a new file that requests none */
	uint32_t targets;           /* storage targets; 0: not known */
	uint64_t file_bytes;        /* size of the file; 0: not known */
	/* Files that are written at the same time; 0: not known, counts as 1. */
	uint32_t writers;
};

/*
 * Decides which layout to request. Returns 1 and *ask, or 0 if the directory's layout is as good.
 * `why` receives a clause for the report. Pure.
 */
int fs_choose_layout(const struct fs_layout_request *request, const struct fs_facts *facts,
		     struct fs_layout *ask, char *why, size_t why_bytes);

/*
 * Targets that are about equally full. On such targets the filesystem itself would also place files
 * in turn.
 */
struct fs_even_targets {
	uint32_t count; /* number of targets; 0: not equally full, or not known */
	uint16_t number[FS_MOST_TARGETS];
};

/*
 * Requests the OSTs of group number `group` (from 1 on) of `groups` equal groups of the targets,
 * each with as many targets as the file has stripes. Returns 1 and *ask, or 0, without changing
 * *ask, if that makes no sense. Pure.
 */
int fs_take_target_group(const struct fs_facts *facts, const struct fs_even_targets *targets,
			 uint32_t group, uint32_t groups, struct fs_layout *ask);

/*
 * Returns how many files can be written at the same time with one on each storage target, by
 * targets and stripes; 0 if not known. Pure.
 */
uint32_t fs_capacity(uint32_t targets, const struct fs_layout *layout, uint64_t file_bytes);

/*
 * Creates a new file (O_EXCL, O_NOFOLLOW, O_CLOEXEC, O_RDWR and `more_flags`) as open() does.
 * Returns a descriptor above the standard streams. On failure returns a negative errno and leaves
 * no file.
 */
int fs_create_plainly(int directory_fd, const char *name, mode_t mode, int more_flags);

/*
 * Creates a new file (O_EXCL, O_NOFOLLOW, O_CLOEXEC, O_RDWR) with a layout, and reads the layout
 * back. If the file did not get it and cannot be written, replaces it by a plain one. Returns a
 * descriptor or a negative errno. `why` receives a clause if the layout is not as requested; else
 * "".
 */
int fs_create_with_layout(int directory_fd, const char *name, mode_t mode, enum fs_family family,
			  const struct fs_layout *ask, char *why, size_t why_bytes);

/*
 * Counts the storage targets by one system call. Returns 0 if the filesystem does not tell
 * (lustre.c).
 */
uint32_t fs_count_targets(int directory_fd, enum fs_family family);

/* ---- Files and directories (storage.c) ------------------------------------------------------- */

/* The filesystem of an open file or directory. */
struct fs_info {
	/*
	 * Type as in /proc/self/mountinfo: "ext4", "fuse.sshfs"; otherwise a name for the magic
	 * number.
	 */
	char type[32];
	uint64_t magic;            /* statfs f_type */
	uint64_t block_bytes;      /* preferred unit of I/O (st_blksize) */
	uint32_t memory_alignment; /* for direct I/O; 0 if the kernel does not tell */
	uint32_t offset_alignment;
	bool direct_known; /* the kernel tells whether direct I/O works … */
	bool direct_works; /* … and this is its answer */
	enum fs_family family;
	/* Layout of this file or directory; its count is 0 if it is not striped. */
	struct fs_layout layout;
};

/*
 * A cache of the last filesystem that was described. Reading the mount table costs more than a
 * small save, and identifying a filesystem in user space takes several calls. Zero it before use.
 */
struct fs_memory {
	/* Unique number of the mount; 0: identified by device and magic number. */
	uint64_t mount;
	unsigned device_major, device_minor;
	uint64_t magic;
	char type[32];
	enum fs_family family;
	/* For Lustre: its evenly filled targets, and the time of that list; 0: never listed. */
	struct fs_even_targets even;
	uint64_t looked_ns;
	/* Storage targets plus one; 0: not counted yet. */
	uint64_t counted_targets;
	/*
	 * The layout that the last new file without a request got, in the directory with this inode
	 * number; 0: none.
	 */
	uint64_t directory, asked_ns;
	struct fs_layout layout;
};

/*
 * Returns the evenly filled targets, and lists them again after a minute. Borrowed from the memory.
 */
const struct fs_even_targets *fs_even_targets(int directory_fd, const char *directory,
					      struct fs_memory *memory);

/* Describes the filesystem of the open file or directory `fd`. `memory` may be NULL. */
int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error);

/*
 * Describes a new file that requested no layout. It takes the layout of the last such file in its
 * directory if that is less than an hour old, which saves a request to the storage for each file.
 * With `inherits` the directory is new, too, and has its layout from its parent.
 */
int fs_describe_new(int fd, int directory_fd, bool inherits, const char *path,
		    struct fs_memory *memory, struct fs_info *info, struct base_error *error);

/*
 * Returns fs_count_targets() for the filesystem in the memory, which `directory_fd` must be on.
 * Counts only once.
 */
uint32_t fs_remembered_targets(int directory_fd, struct fs_memory *memory);

/* ---- Mounts: properties common to all files (storage.c) -------------------------------------- */

/* A storage target. */
struct fs_target {
	char name[64];
	uint16_t number;
	uint64_t total_bytes, free_bytes;
};

/* A line of the mount table. Longer values are cut. */
struct fs_mount {
	char type[32];    /* "lustre", "fuse.juicefs" */
	char source[512]; /* "10.0.0.1@tcp:/scratch", "server:/export" */
	char mount_point[256];
	char options[512]; /* options of the mount, a comma, options of its filesystem */
};

/* All that can be found out about a mount. */
struct fs_storage {
	enum fs_family family;
	struct fs_mount mount; /* fields are "" if the mount table does not tell */
	uint64_t total_bytes, free_bytes;
	uint32_t targets;      /* storage targets; 0: not known */
	uint32_t target_count; /* entries of the list below */
	struct fs_target target[FS_MOST_TARGETS];
	struct fs_layout layout; /* layout of new files in this directory */
	bool remote;             /* other hosts may share it */
};

/*
 * Finds out all about the mount of an open directory without writing to it. Costs up to some
 * hundred system calls. `root` is prepended to /proc and /sys ("" except in tests).
 */
int fs_look_at_storage(int directory_fd, const char *path, const char *root,
		       struct fs_storage *storage, struct base_error *error);

/* ---- Looking at a path (storage.c) ----------------------------------------------------------- */

/*
 * What exists at a path, with symbolic links followed. Costs one system call, which asks neither
 * for the length nor for times.
 */
struct fs_found {
	int code;      /* a negative errno: the path cannot be looked at, or has no directory */
	bool absent;   /* nothing exists there, or a link without a target */
	bool dangling; /* it is a link without a target */
	bool regular;
	/*
	 * Identifies the mount: equal for all paths on it, and for no others while it is mounted.
	 * It is the directory's mount if the path does not exist.
	 */
	uint64_t mount;
	unsigned device_major, device_minor;
};

/* Looks at a path. */
void fs_find(const char *path, struct fs_found *found);
/* Fills in the result of fs_find() for a path that is known not to exist. */
void fs_find_directory(const char *path, struct fs_found *found);

/* ---- Free space (storage.c) ------------------------------------------------------------------ */

struct fs_space {
	/*
	 * Bytes that this user can still write, as the filesystem reports; UINT64_MAX if it does
	 * not. A single storage target or a quota may be full although the filesystem has space.
	 */
	uint64_t free_bytes;
	bool no_inodes; /* no inodes are left, so no file can be created */
	uint64_t magic;
	unsigned device_major, device_minor;
};

/*
 * Finds the space for a file at `path` by one statfs() of the file found there (links followed) or
 * of its directory. Returns -EINVAL if it is not a regular file, such as a pipe. Returns -ENOENT if
 * the directory does not exist or the path is a link without a target.
 */
int fs_space_of_found(const char *path, const struct fs_found *found, struct fs_space *space);

/*
 * Returns the allocated bytes of the file at `path`, which become free only after it is replaced.
 */
uint64_t fs_replaced_bytes(const char *path);

/* Finds the space for a directory that may not exist yet, nor its parents. */
int fs_space_of_directory(const char *path, struct fs_space *space);

/*
 * Returns the free bytes on the filesystem of an open file, by one fstatfs(); UINT64_MAX if not
 * known.
 */
uint64_t fs_free_bytes_behind(int fd);

/* Writes the filesystem's type for messages, as in struct fs_info. Reads the mount table. */
void fs_space_type(const struct fs_space *space, char *type, size_t type_bytes);

/* ---- Names of slot pools (storage.c) --------------------------------------------------------- */

#define FS_POOL_BYTES 128

/* Characters of a pool's name. */
#define FS_POOL_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@+/-"

/*
 * Names the storage of the file or directory `path`, which need not exist but whose directory must.
 * All hosts that share the storage get the same name: "nfs:server:/export", "lustre:fs1", or
 * "lustre:fs1.flash" for a pool of its targets. If only this host can reach the storage, the name
 * contains the host.
 *
 * The pool of targets is that of the path's directory. Saves ask once for each mount, so all their
 * slots on it come from the pool of the directory that was first.
 */
int fs_pool_of_path(const char *path, char name[FS_POOL_BYTES], struct base_error *error);

/*
 * Writes a name for a magic number of statfs(): "nfs", "lustre"; "0x…" if it is not known. Pure
 * (families.c).
 */
void fs_magic_name(uint64_t magic, char *type, size_t type_bytes);

/* ==== Private to this folder ================================================================== */

/* ---- Small texts below /proc and /sys (families.c) ------------------------------------------- */

/*
 * Reads a file up to about `most` bytes, ended by a 0, into a zeroed buffer, which the caller frees
 * even on failure. `root` is prepended to the path. Returns 0 or a negative errno.
 */
int fs_read_whole(const char *root, const char *path, size_t most, struct base_buffer *text);
/*
 * Reads the first line of a file, without its newline. Returns 0 or a negative errno; -E2BIG if it
 * does not fit.
 */
int fs_read_line(const char *root, const char *path, char *line, size_t line_bytes);
/* Reads a number from the first line of a file. Returns 0 or a negative errno. */
int fs_read_number(const char *root, const char *path, uint64_t *number);
/* Parses a text that is a decimal number as a whole. Returns false if it is not. */
bool fs_whole_number(const char *text, size_t bytes, uint64_t *number);

/* ---- Families (families.c) ------------------------------------------------------------------- */

/* Returns whether several hosts usually share filesystems of this type. Pure. */
bool fs_type_is_shared(const char *type);
/*
 * Returns the family by the type in the mount table; if that is not known, by the magic number of
 * statfs(). Pure.
 */
enum fs_family fs_family_of(const char *type, uint64_t magic);

/* ---- Creating files with a layout ------------------------------------------------------------ */

/* The result of creating a file with a layout. */
struct fs_answer {
	struct fs_layout got; /* layout read back; its count is 0 if not known */
	/* The file can be written whatever its layout is. */
	bool plain;
	char why[96]; /* clause about what was refused; "" if nothing was */
};

/* Records what failed, with the text of errno. Only the first failure is kept (layout.c). */
void fs_refused(struct fs_answer *answer, const char *what);

/* ---- Filesystems with readable layouts (lustre.c, beegfs_ceph.c) ----------------------------- */

/* A filesystem whose layouts can be read. */
struct fs_product {
	enum fs_family family;
	/* Returns whether an open file or directory is on this filesystem, by what it answers. */
	bool (*answers)(int fd);
	/*
	 * Reads the layout of an open file, or the layout of new files in an open directory.
	 * Returns 0, -E2BIG if only the first components fit, or another negative code.
	 */
	int (*read_layout)(int fd, bool directory, struct fs_layout *layout);
	/*
	 * Creates a file (O_EXCL) with a layout; `answer` tells which it got. Returns a descriptor
	 * or a negative errno. On failure no file is left, except with -EEXIST, when the file is
	 * not ours. NULL: layouts cannot be requested.
	 */
	int (*create)(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		      struct fs_answer *answer);
};

extern const struct fs_product fs_lustre, fs_beegfs, fs_ceph;

/* ---- Lustre (lustre.c) ----------------------------------------------------------------------- */

/*
 * Finds the filesystem's name in a mount's source: "scratch" in
 * "10.0.0.1@tcp:10.0.0.2@tcp:/scratch/folder". Returns its length and sets *name; 0 if there is
 * none. Pure.
 */
size_t fs_lustre_name(const char *source, const char **name);

/*
 * Lists the targets of the mount, their space and their number, from /sys/fs/lustre, or from
 * /proc/fs/lustre with older clients. Values that cannot be read stay unchanged.
 */
void fs_list_lustre_targets(const char *root, struct fs_storage *storage);

#endif
