/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a path sits on: mount, family, layout, storage targets, free space. Everything here asks the
 * kernel and changes nothing, but fs_create_with_layout() and fs_create_plainly(), which create a
 * file.
 */
#ifndef FS_FS_H
#define FS_FS_H

#include "base/base.h"

#include <sys/types.h>

/* ---- Families (families.c) ------------------------------------------------------------------- */

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

/*
 * Whether files there are written through the page cache unless the caller requires
 * direct I/O. FUSE cuts a direct request into pieces of 128 KiB to 1 MiB, and most daemons serve
 * each piece before the next. Buffered bytes reach the daemon's own cache and leave it in large
 * pieces: a direct save takes four times as long on ceph-fuse. GlusterFS serves direct writes side
 * by side, three times faster than buffered ones. A daemon that answers as Lustre or BeeGFS do
 * passes requests on to them. Pure.
 */
bool fs_writes_cached(enum fs_family family, uint64_t magic);

/* ---- Layouts: how a file lies on storage targets (layout.c) ---------------------------------- */

#define FS_TARGET_POOL_BYTES 16 /* with its 0; Lustre takes 15 characters */
#define FS_MOST_PARTS 8
#define FS_MOST_TARGETS 64 /* that are listed one by one */
#define FS_ALL_TARGETS UINT32_MAX
/* Up to here one stripe is enough by the automatic rule. */
#define FS_ONE_STRIPE_BYTES (100 * MIB)

/* A part of a file's length that is striped in one way. Most files have one. */
struct fs_part {
	uint64_t begin, end;             /* UINT64_MAX: without end */
	uint64_t stripe_bytes;           /* 0: the filesystem's default */
	uint32_t stripe_count;           /* targets; FS_ALL_TARGETS; 0: the filesystem's default */
	bool on_metadata;                /* these bytes lie on a metadata server (Data-on-MDT) */
	bool overstriped;                /* several stripes may lie on one target */
	char pool[FS_TARGET_POOL_BYTES]; /* "" if none */
};

struct fs_layout {
	uint32_t count;   /* 0: not striped, or it does not tell */
	uint32_t mirrors; /* copies; 1 as a rule */
	struct fs_part parts[FS_MOST_PARTS];
	/* Asked for, with one part: the numbers of its targets. 0 of them: any. */
	uint32_t chosen;
	uint16_t target[FS_MOST_TARGETS];
};

/* The part that byte `offset` is in; NULL if there is none. Pure. */
const struct fs_part *fs_layout_at(const struct fs_layout *layout, uint64_t offset);
/* The part that most of a file of so many bytes is in; NULL if not striped. Pure. */
const struct fs_part *fs_layout_main(const struct fs_layout *layout, uint64_t file_bytes);

/* "8 x 1M, pool flash", "to 100M: 1 x 1M; 8 x 4M", for reports. Pure. Room for 96 is enough for
 * most; longer ones end in "...". */
void fs_layout_text(const struct fs_layout *layout, char *text, size_t text_bytes);

/* ---- Layouts to ask for (layout.c) ----------------------------------------------------------- */

enum fs_request_kind {
	FS_REQUEST_AUTO,      /* by size */
	FS_REQUEST_DIRECTORY, /* nothing: the directory's layout */
	FS_REQUEST_LAYOUT     /* this one */
};

struct fs_layout_request {
	enum fs_request_kind kind;
	/* Of FS_REQUEST_LAYOUT; the directory's values replace 0 and "". */
	struct fs_layout layout;
};

/* Whether layouts can be asked for there. Pure. */
bool fs_takes_layouts(enum fs_family family);

/* The setting "layout", see include/ioshape/ioshape.h. Pure. -EINVAL and a sentence. */
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
 * Decides what to ask for: 1 and *ask, or 0 if the directory's own layout is as good. `why`
 * receives a clause for the report. Pure.
 */
int fs_choose_layout(const struct fs_layout_request *request, const struct fs_facts *facts,
		     struct fs_layout *ask, char *why, size_t why_bytes);

/* Targets that are as full as each other, or nearly so: there the filesystem puts files on them in
 * turn, too. */
struct fs_even_targets {
	uint32_t count; /* 0: some are fuller, or the client does not tell */
	uint16_t number[FS_MOST_TARGETS];
};

/*
 * Decides what to ask for so that the file lies in the part number `place` (from 1 on) of the
 * targets, of so many parts as there are of its stripes: 1 and *ask, or 0 and *ask as it was where
 * that makes no sense. Pure.
 */
int fs_take_place(const struct fs_facts *facts, const struct fs_even_targets *targets,
		  uint32_t place, uint32_t places, struct fs_layout *ask);

/* How many may write at a time so that each storage target has one: by targets and stripes; 0 if
 * that is not known. Pure. */
uint32_t fs_capacity(uint32_t targets, const struct fs_layout *layout, uint64_t file_bytes);

/* Creates a new file (O_EXCL, O_NOFOLLOW, O_CLOEXEC, O_RDWR, and more) as open() does. Returns a
 * descriptor above those of the standard streams, or a negative errno, and then no file is left. */
int fs_create_plainly(int directory_fd, const char *name, mode_t mode, int more_flags);

/*
 * Creates a new file (O_EXCL, O_NOFOLLOW, O_CLOEXEC, O_RDWR) with that layout, and reads the layout
 * back. If the file did not get it, removes the file and creates it plainly: what is returned can
 * be written. A descriptor, or a negative errno; `note` receives a clause if the layout is not as
 * asked for, or "".
 */
int fs_create_with_layout(int directory_fd, const char *name, mode_t mode, enum fs_family family,
			  const struct fs_layout *ask, char *note, size_t note_bytes);

/* Counts the storage targets by one system call; 0 if the filesystem does not tell (lustre.c). */
uint32_t fs_count_targets(int directory_fd, enum fs_family family);

/* ---- Files and directories (storage.c) ------------------------------------------------------ */

struct fs_info {
	/* As /proc/self/mountinfo says it: "ext4", "fuse.sshfs"; otherwise by the magic number. */
	char type[32];
	uint64_t magic;            /* statfs f_type */
	uint64_t block_bytes;      /* preferred unit of I/O (st_blksize) */
	uint32_t memory_alignment; /* for direct I/O, 0 if the kernel did not say */
	uint32_t offset_alignment;
	bool direct_known; /* the kernel said whether direct I/O works ... */
	bool direct_works; /* ... and this is what it said */
	enum fs_family family;
	/* Of this file or directory; its count is 0 if it is not striped. */
	struct fs_layout layout;
};

/* Type and family of the filesystem seen last: reading the mount table costs more than a small
 * save, and a filesystem in user space is asked what it is. Zero it. */
struct fs_memory {
	uint64_t mount; /* its number, if no other will get that; 0: known by device and magic */
	unsigned device_major, device_minor;
	uint64_t magic;
	char type[32];
	enum fs_family family;
	/* Of Lustre, when they were looked at; 0: never. */
	struct fs_even_targets even;
	uint64_t looked_ns;
	/* How many storage targets there are, plus one; 0: they were not counted yet. */
	uint64_t counted_targets;
	/* The layout that the last new file got which asked for nothing, in the directory with this
	 * number; 0: none. */
	uint64_t directory, asked_ns;
	struct fs_layout layout;
};

/* Looks at the targets again after a minute. Borrowed from the memory. */
const struct fs_even_targets *fs_even_targets(int directory_fd, const char *directory,
					      struct fs_memory *memory);

/* Describes what the open file or directory `fd` is on. `memory` may be NULL. */
int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error);

/*
 * Describes a new file that asked for no layout. It has the layout of the file before it in its
 * directory, if that is less than an hour old: this saves the storage a request for each file.
 * `inherits`: its directory is new, too, and has its layout from the one above.
 */
int fs_describe_new(int fd, int directory_fd, bool inherits, const char *path,
		    struct fs_memory *memory, struct fs_info *info, struct base_error *error);

/* Returns fs_count_targets() of the filesystem in the memory, which `directory_fd` is on; counts
 * once. */
uint32_t fs_remembered_targets(int directory_fd, struct fs_memory *memory);

/* How far the kernel reads ahead by itself in a file that is read from its beginning; 0 if it does
 * not tell, as of filesystems that do so themselves. */
uint64_t fs_read_ahead_of(int fd);

/* ---- Mounts (storage.c): what is the same for all files there ------------------------------- */

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
	char options[512]; /* of the mount, then of its filesystem, with a comma between them */
};

struct fs_storage {
	enum fs_family family;
	struct fs_mount mount; /* "" for what the mount table does not tell */
	uint64_t total_bytes, free_bytes;
	/* Storage targets, of the directory's pool of targets where the client tells which those
	 * are; 0 unknown. */
	uint32_t targets;
	uint32_t target_count; /* of those in the list below */
	struct fs_target target[FS_MOST_TARGETS];
	struct fs_layout layout;           /* what new files in this directory get */
	bool remote;                       /* other hosts may share it */
	bool rotational_known, rotational; /* of a local disk */
};

/*
 * Finds out all about the mount of an open directory without writing to it. Costs up to some
 * hundred system calls. `root` is put before /proc and /sys ("" but in tests).
 */
int fs_look_at_storage(int directory_fd, const char *path, const char *root,
		       struct fs_storage *storage, struct base_error *error);

/* ---- What is at a path (storage.c) ----------------------------------------------------------- */

/* Behind symbolic links. One system call looks up a name, and asks neither for its length nor for
 * its times. */
struct fs_found {
	int code;      /* a negative errno: it cannot be looked at, or has no directory */
	bool absent;   /* there is nothing, or a link that leads to nothing yet */
	bool dangling; /* it is such a link */
	bool regular;
	/* A number that is the same for paths on one mount, and for no others while it is mounted;
	 * of the directory if there is nothing. */
	uint64_t mount;
	unsigned device_major, device_minor;
};

void fs_find(const char *path, struct fs_found *found);
/* The result of fs_find() where nothing is known to be there. */
void fs_find_directory(const char *path, struct fs_found *found);

/* ---- Free space (storage.c) --------------------------------------------------------------------
 */

struct fs_space {
	/* For new bytes of this user, as the filesystem says it; UINT64_MAX if it does not. One
	 * storage target may be full, or a quota, while there is space on the whole. */
	uint64_t free_bytes;
	bool no_inodes; /* no file can be created any more, whatever there is free */
	uint64_t magic;
	unsigned device_major, device_minor;
};

/*
 * Looks up the space for a file at `path`: by one statfs(), of what was found there (behind a
 * symbolic link), or of its directory. -EINVAL for what is no regular file, such as a pipe; -ENOENT
 * if there is no such directory, or the link leads to nothing yet.
 */
int fs_space_of_found(const char *path, const struct fs_found *found, struct fs_space *space);

/* The bytes of the file at `path`: they become free only when it has been replaced. */
uint64_t fs_replaced_bytes(const char *path);

/* The space for a directory that may have to be made first, with those above it. */
int fs_space_of_directory(const char *path, struct fs_space *space);

/* The free bytes on the filesystem of an open file, by one fstatfs(); UINT64_MAX if it does not
 * say.
 */
uint64_t fs_free_bytes_behind(int fd);

/* The filesystem's type for messages, as in struct fs_info; reads the mount table. */
void fs_space_type(const struct fs_space *space, char *type, size_t type_bytes);

/*
 * Writes a clause about targets with less than `bytes` free, the fullest first: "OST0003 (1.0 MiB
 * free), OST0001 (...)", and how many more; "" if there is none, or the list is empty. Pure.
 */
void fs_name_full_targets(const struct fs_storage *storage, uint64_t bytes, char *into,
			  size_t into_bytes);

/* ---- Names of slot pools (storage.c) ------------------------------------------------------------
 */

#define FS_POOL_BYTES 128

/* What a pool's name is made of. */
#define FS_POOL_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@+/-"

/*
 * Names the storage behind the file or directory `path`, whose last part need not exist. All hosts
 * that share the storage get the same name: "nfs:server:/export", "lustre:fs1", or
 * "lustre:fs1.flash" for a pool of its targets. What one host alone can reach has the host in its
 * name. The pool of targets is that of the path's directory: a caller that asks once for each
 * mount, as saves do, takes turns in the pool of the directory that was first.
 */
int fs_pool_of_path(const char *path, char name[FS_POOL_BYTES], struct base_error *error);

/* A name for a statfs magic number: "nfs", "lustre"; "0x…" for one not known here. Pure
 * (families.c). */
void fs_magic_name(uint64_t magic, char *type, size_t type_bytes);

/* ==== Between the files of this folder ======================================================== */

/* ---- Small texts below /proc and /sys; `root` is put before the path (families.c) ------------ */

/* Reads no more than `most` bytes of a file, ended by a 0, into a zeroed buffer, to be freed either
 * way. 0 or a negative errno. */
int fs_read_whole(const char *root, const char *path, size_t most, struct base_buffer *text);
/* Reads the first line, without its end. 0 or a negative errno; -E2BIG if it does not fit. */
int fs_read_line(const char *root, const char *path, char *line, size_t line_bytes);
/* Reads the number that is the first line. 0 or a negative errno. */
int fs_read_number(const char *root, const char *path, uint64_t *number);
/* Reads the decimal number that all of the text is. */
bool fs_whole_number(const char *text, size_t bytes, uint64_t *number);

/* ---- Families (families.c) ----------------------------------------------------------------------
 */

/* Whether hosts share filesystems of this type as a rule. Pure. */
bool fs_type_is_shared(const char *type);
/* By the type in the mount table, or if that is not known by statfs' f_type. Pure. */
enum fs_family fs_family_of(const char *type, uint64_t magic);

/* ---- Creating files with a layout ------------------------------------------------------------ */

/* What came of a request. */
struct fs_answer {
	struct fs_layout got; /* read back; its count is 0 if nothing was told */
	bool plain;           /* the file can be used in any case: it was created plainly */
	char why[96];         /* what was refused, a clause; "" if nothing was */
};

/* Keeps what failed, and errno's words for it; the first time counts (layout.c). */
void fs_refused(struct fs_answer *answer, const char *what);

/* ---- Products that tell of their layouts (lustre.c, beegfs_ceph.c) ----------------------------
 */

struct fs_product {
	enum fs_family family;
	/* Returns whether an open file or directory is on this product, by what it answers. */
	bool (*answers)(int fd);
	/* Reads the layout of an open file, or what new files in an open directory get. 0, -E2BIG
	 * if only the first parts fit, or another negative code. */
	int (*read_layout)(int fd, bool directory, struct fs_layout *layout);
	/*
	 * Creates a file (O_EXCL); `answer` says whether it has the layout. A descriptor or a
	 * negative errno. After an error no file is left, except with -EEXIST: that file is not
	 * ours. NULL: it takes no layouts.
	 */
	int (*create)(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		      struct fs_answer *answer);
};

extern const struct fs_product fs_lustre, fs_beegfs, fs_ceph;

/* ---- Lustre (lustre.c) ----------------------------------------------------------------------- */

/* Finds "scratch" in "10.0.0.1@tcp:10.0.0.2@tcp:/scratch/folder", a mount's source. The bytes of
 * the name and where it begins; 0 if there is none. Pure. */
size_t fs_lustre_name(const char *source, const char **name);

/* Lists the targets of the mount, their space, and how many there are, from /sys/fs/lustre, or
 * /proc/fs/lustre of older clients. Values that cannot be read stay as they are. */
void fs_list_lustre_targets(const char *root, struct fs_storage *storage);

/* ---- BeeGFS and CephFS (beegfs_ceph.c) ------------------------------------------------------- */

/* Puts "mgmt01:8008", the management server, in the place of the mount table's "beegfs_nodev",
 * which is the same for all. Nothing if /proc/fs/beegfs does not tell. */
void fs_name_beegfs(const char *root, const char *options, char *source, size_t source_bytes);
/* A cluster's id is a UUID as text. */
#define FS_CEPH_ID_BYTES 36
/*
 * Makes "CLUSTER-ID.FILESYSTEM", or the cluster's id alone if the mount does not tell the
 * filesystem's name. `cluster_id` is what the mount answered, or "". False if the id is not known.
 * Pure.
 */
bool fs_ceph_name(const struct fs_mount *mount, const char *cluster_id, char *name,
		  size_t name_bytes);

#endif
