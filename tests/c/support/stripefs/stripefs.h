/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A simulated parallel filesystem on a single machine. README.md describes the model.
 *
 * All work happens on one thread, so nothing needs a lock. A request changes the tree and the
 * contents as soon as it is read from the kernel, and is answered when the model says so. Only time
 * is simulated: all times are in nanoseconds of the model, which now_ns() derives from the clock.
 */
#ifndef STRIPEFS_H
#define STRIPEFS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
/*
 * Version of libfuse's interface, also for files that do not include libfuse's headers themselves.
 */
#define FUSE_USE_VERSION 312

#include <fuse_lowlevel.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>

#define NS_PER_S UINT64_C(1000000000)
#define NS_PER_MS UINT64_C(1000000)

enum {
	MAX_TARGETS = 256,
	MAX_MOUNTS = 64, /* each has a bit in a 64-bit mask */
	MAX_COMPONENTS = 8,
	MAX_POOLS = 16,
	POOL_NAME_BYTES = 16, /* as in lov_user_md_v3, with the final zero */
	/* Unit of memory, and the largest request. */
	BLOCK_BYTES = 1 << 20,
	/* Unit of space accounting: every stripe size is a multiple of it. */
	CHUNK_BYTES = 1 << 16,
	CHUNKS_PER_BLOCK = BLOCK_BYTES / CHUNK_BYTES,
	/* Space before each block, for the header of the request that fills it. */
	HEAD_ROOM = 4096,
	/* Most objects that a request of BLOCK_BYTES touches. */
	MAX_PARTS = BLOCK_BYTES / CHUNK_BYTES + 1,
	MAX_IOVECS = CHUNKS_PER_BLOCK * 2 + 4,
	PAGE = 4096,
};

/* ---- Parameters: options.c ------------------------------------------------------------------- */

enum play { PLAY_LUSTRE, PLAY_BEEGFS, PLAY_CEPH, PLAY_NFS };
/*
 * Cache of writes. BACK: the kernel's page cache; CLIENT: a cache for each file with an in-flight
 * limit.
 */
enum cache { CACHE_THROUGH, CACHE_BACK, CACHE_CLIENT };
/*
 * Parallelism of direct I/O. PARALLEL: as on a recent Lustre. THREADS: each call waits for its
 * pieces, but calls of several threads run in parallel. SERIAL: one write of a file at a time.
 */
enum direct { DIRECT_PARALLEL, DIRECT_THREADS, DIRECT_SERIAL, DIRECT_NONE, DIRECT_LATE };

enum trap {
	TRAP_SETSTRIPE_IGNORED = 1 << 0,
	TRAP_SETXATTR_IGNORED = 1 << 1,
	TRAP_NO_DEFAULT = 1 << 2,
	TRAP_NO_LAYOUT = 1 << 3,
	TRAP_POOL_REFUSED = 1 << 4,
};

struct pool {
	char name[POOL_NAME_BYTES];
	uint16_t count;
	uint16_t targets[MAX_TARGETS];
};

struct component {
	uint64_t start, end; /* an end of UINT64_MAX is the end of the file */
	uint64_t stripe_size;
	/*
	 * CephFS: size at which an object is full and the next row of objects begins. 0: unlimited.
	 */
	uint64_t object_size;
	uint16_t count; /* in a directory's default, 0: the filesystem's count; 0xffff: all */
	uint16_t first; /* 0xffff: any target */
	bool overstriped, on_mds, made;
	bool by_hand; /* the caller chose the `count` targets */
	char pool[POOL_NAME_BYTES];
	uint16_t spread; /* number of targets; more than `count` if objects have a maximum size */
	uint16_t targets[MAX_TARGETS]; /* of a file whose objects exist */
};

struct layout {
	bool composite;
	uint32_t generation;
	unsigned int count; /* 0: no objects yet */
	struct component components[MAX_COMPONENTS];
};

struct options {
	char **mountpoints;
	unsigned int mount_count;
	const char *backing, *fsname;
	enum play play;
	enum cache cache;
	enum direct direct;
	unsigned int traps;
	double slow; /* seconds of the clock in a second of the model */
	unsigned int targets;
	double bandwidth; /* bytes/s of each target */
	double seek_ms;
	uint64_t run_bytes;
	double latency_ms; /* of each data request, in addition to the target's time */
	double link;       /* bytes/s into a server that caches; 0: unlimited */
	uint64_t server_cache_bytes;
	double mds_latency_ms, mds_rate;
	uint64_t stripe_size;
	unsigned int stripe_count;
	uint64_t capacity; /* bytes of each target */
	uint64_t memory;
	unsigned int window;    /* most requests in flight for each file of a client */
	unsigned int fallocate; /* whether fallocate() is supported */
	unsigned int pool_count;
	struct pool pools[MAX_POOLS];
	struct layout progressive; /* of new files, instead of size and count; a count of 0: none */
	uint64_t used[MAX_TARGETS]; /* bytes that are taken from the beginning, by target */
};

extern struct options options;

/*
 * Parses the command line into `options`. Exits after --help, and with an error message if an
 * option is wrong.
 */
void options_parse(int count, char **arguments);
/* Parses a size such as "16Mi", "60M" or "4096". Returns whether the text is one. */
bool parse_bytes(const char *text, uint64_t *bytes);

/* ---- Layouts: layout.c ----------------------------------------------------------------------- */

struct piece {
	uint16_t target; /* options.targets: the metadata server's own storage */
	uint32_t object; /* number within the file */
	uint64_t offset; /* within the object */
	uint32_t bytes;
};

/* Stores the filesystem's default layout. */
void layout_default(struct layout *layout);
/*
 * Create the objects of a file as requested, and the components of a range that have none yet.
 * Return 0 or a negative errno. Components after the first are created when a range in them is
 * first used.
 */
int layout_create(struct layout *layout, const struct layout *wish);
int layout_make(struct layout *layout, uint64_t offset, uint64_t bytes);
/*
 * Cuts a range into one piece for each object. Returns the number of pieces, or -EIO if no
 * component covers the range.
 */
int layout_split(const struct layout *layout, uint64_t offset, uint32_t bytes,
		 struct piece pieces[static MAX_PARTS]);
const struct component *layout_component(const struct layout *layout, uint64_t offset);
int layout_target(const struct layout *layout, uint64_t offset);
const struct pool *pool_find(const char *name);

/* ---- Memory: store.c ------------------------------------------------------------------------- */

int store_open(const char *folder, uint64_t bytes);
/* Returns a block with undefined contents, or 0 if none is free. */
uint32_t store_take(void);
void store_give(uint32_t block);
char *store_block(uint32_t block);

/* ---- The tree: tree.c ------------------------------------------------------------------------ */

struct block {
	uint32_t index;             /* in the store; 0: none */
	uint16_t reserved, written; /* a bit for each chunk */
};

struct attribute {
	struct attribute *next;
	char *name, *value;
	size_t bytes;
};

struct io;
struct dirty;

struct node {
	struct stat stat;
	uint64_t lookups; /* references of the kernels of all mounts */
	unsigned int opens;
	char *link;
	struct attribute *attributes;
	struct layout *layout; /* of a file; in a directory, the default for new files */
	/* Mounts with current attributes and without old pages: a bit for each. */
	uint64_t known_to, read_by;
	/* Contents of a file. */
	struct block *blocks;
	size_t block_count;
	/* Entries of a directory, oldest first. */
	struct entry *first, *last;
	uint64_t next_cookie;
	struct node *parent; /* of a directory */
	/* Data requests in flight, oldest first, and operations that wait for them. */
	struct io *oldest, *newest;
	struct waiter *waiters;
	/*
	 * Client's cache: a run of bytes that is not queued yet, queued requests, and the number of
	 * requests in flight.
	 */
	uint64_t dirty_begin, dirty_end;
	struct dirty *leaving;
	unsigned int in_flight;
	/*
	 * Last stripe written so far, and the unaligned requests in it. They are counted when a
	 * later stripe is written.
	 */
	uint64_t last_stripe, pending_off;
	bool ever_written;
	int late_error; /* from a write that was answered before it failed; for the next fsync */
};

struct entry {
	struct entry *hash_next, *next, *previous;
	struct node *directory, *node;
	uint64_t known_to; /* mounts that have cached the entry: a bit for each */
	uint64_t cookie;
	char name[];
};

struct node *tree_root(void);
void tree_open(void);
struct node *node_of(fuse_ino_t ino);
fuse_ino_t ino_of(const struct node *node);
struct node *node_create(struct node *directory, mode_t mode, const struct fuse_ctx *context);
/* Frees the node if nothing refers to it any more. */
void node_settle(struct node *node);
struct entry *entry_find(struct node *directory, const char *name);
/* Adds an entry that is known to the mount of the current request. */
struct entry *entry_add(struct node *directory, const char *name, struct node *node);
/* Removes an entry. The node loses a link but is not freed. */
void entry_remove(struct entry *entry);
/*
 * Records a change by the mount of the current request: the other mounts lose their cached
 * attributes and, if `modified`, their pages.
 */
void node_touch(struct node *node, bool modified);
uint64_t tree_nodes(void);

/* ---- Contents: content.c --------------------------------------------------------------------- */

/* Takes space on the targets for a range. Returns 0 or -ENOSPC. */
int content_reserve(struct node *node, uint64_t offset, uint64_t bytes);
/*
 * Writes to a reserved range. `staged` is the block that holds `buffer`, or 0. If it fits as a
 * whole it becomes the file's, and `staged` is set to 0.
 */
int content_write(struct node *node, uint64_t offset, const char *buffer, uint32_t bytes,
		  uint32_t *staged);
/*
 * Returns the number of parts, which together cover the range. The parts are valid until the next
 * change of the file.
 */
int content_read(struct node *node, uint64_t offset, uint32_t bytes, struct iovec *parts);
void content_punch(struct node *node, uint64_t offset, uint64_t bytes);
int content_truncate(struct node *node, uint64_t size);

/* ---- Time: model.c --------------------------------------------------------------------------- */

struct part {
	struct part *next, *previous; /* in the target's queue */
	struct io *io;
	struct piece piece;
	uint64_t node_number;
};

struct io {
	struct io *next, *previous; /* of the same file */
	struct io *next_waiting;    /* for space in the server's cache */
	fuse_req_t request;
	struct node *node;
	bool write, answered, write_back;
	uint64_t offset;
	uint32_t bytes;
	int error;
	uint64_t sequence, arrived_ns;
	unsigned int range_count, parts_left;
	struct part parts[];
};

struct target {
	struct part *first, *last; /* waiting parts */
	struct part *current;
	uint64_t free_at_ns;
	uint64_t last_node, last_end;
	uint32_t last_object;
	uint64_t run_bytes;
	double bandwidth, seek_ms;
	uint64_t capacity_bytes, used_bytes;
	/* Faults. */
	double slowness;
	bool full, failing;
	/* Statistics. */
	uint64_t requests, seeks, bytes_read, bytes_written, busy_ns;
	unsigned int queue, longest_queue; /* including the part that is being served */
};

extern struct target targets[MAX_TARGETS + 1];

uint64_t now_ns(void);
/* Returns the time from now until then, by the clock. */
struct timespec model_pause(uint64_t until_ns);
uint64_t target_free(const struct target *target);
void model_open(void);
/*
 * Runs the events that are due. Returns the time of the next one, or UINT64_MAX if there is none.
 */
uint64_t model_run(void);
/* Calls back once at that time. */
void model_later(uint64_t at_ns, void (*call)(void *argument), void *argument);
/* Answers a read or write when the targets are done with it. */
void model_io(fuse_req_t request, struct node *node, bool write, uint64_t offset, uint32_t bytes);
/* Returns the sequence number of a new request. */
uint64_t model_sequence(void);
/*
 * Writes back bytes whose writer was answered before. `sequence` is from the time when they became
 * ready to be sent.
 */
void model_write_back(struct node *node, uint64_t offset, uint32_t bytes, uint64_t sequence);
/* Calls back when all earlier data requests of the file are done. */
void model_flush(struct node *node, void (*call)(void *argument), void *argument);
/* Returns the time at which the metadata server will be done with an operation that arrives now. */
uint64_t model_metadata(void);

/* ---- A client's cache: client.c -------------------------------------------------------------- */

void client_write(struct node *node, uint64_t offset, uint32_t bytes);
/* Queues all dirty bytes of a file. They are sent as the in-flight limit allows. */
void client_flush(struct node *node);
/* Notes that a request is done. */
void client_sent(struct node *node);
void client_send(struct node *node);
/* Returns the sequence number of the oldest queued request. There must be one. */
uint64_t client_oldest(const struct node *node);

/* ---- Answers: answer.c ----------------------------------------------------------------------- */

/* Kinds of metadata operations, for the statistics. */
enum kind {
	OP_LOOKUP,
	OP_GETATTR,
	OP_SETATTR,
	OP_CREATE,
	OP_OPEN,
	OP_CLOSE,
	OP_UNLINK,
	OP_RENAME,
	OP_LINK,
	OP_SYMLINK,
	OP_READLINK,
	OP_MKNOD,
	OP_MKDIR,
	OP_RMDIR,
	OP_READDIR,
	OP_GETXATTR,
	OP_SETXATTR,
	OP_IOCTL,
	OP_STATFS,
	OP_FSYNC,
	OP_FALLOCATE,
	OP_KINDS,
};

/*
 * Counts the operation, and answers when the metadata server is done with it. This also holds for
 * the functions below.
 */
void answer_error(fuse_req_t request, enum kind kind, int error);
void answer_entry(fuse_req_t request, enum kind kind, struct node *node);
/* Answers at once, without counting: a client that knows the name does not ask the server. */
void answer_known_entry(fuse_req_t request, struct node *node);
void answer_attributes(fuse_req_t request, enum kind kind, struct node *node);
/* Returns how many seconds the kernel may cache names and attributes. */
double answer_valid_s(void);
void answer_open(fuse_req_t request, struct node *node, const struct fuse_file_info *file);
void answer_create(fuse_req_t request, struct node *node, const struct fuse_file_info *file);
/* Answers with a copy of the bytes. */
void answer_bytes(fuse_req_t request, enum kind kind, const void *bytes, size_t count);
void answer_statfs(fuse_req_t request, const struct statvfs *statfs);
void answer_ioctl(fuse_req_t request, int result, const void *bytes, size_t count);
/*
 * Answers getxattr or listxattr with a copy of the value. `room` is the size of the caller's
 * buffer; 0: the caller asks for the size of the value.
 */
void answer_value(fuse_req_t request, const void *value, size_t bytes, size_t room);
/* Answers after all data requests of the file so far. Fails if one of them failed late. */
void answer_synced(fuse_req_t request, struct node *node);
/* Sends an answer to the kernel, with flags that libfuse has no option for. */
ssize_t answer_send(int device, struct iovec *parts, int count, void *mount);

/* ---- Operations ------------------------------------------------------------------------------ */

/* Add the operations of names.c, io.c, attributes.c and play.c to the table. */
void names_operations(struct fuse_lowlevel_ops *operations);
void io_operations(struct fuse_lowlevel_ops *operations);
void attributes_operations(struct fuse_lowlevel_ops *operations);
void play_operations(struct fuse_lowlevel_ops *operations);

/* A client of the storage. Its kernel has its own cache of names, attributes and pages. */
struct mount {
	struct fuse_session *session;
	uint64_t bit;
	bool initialized;
};

/* Bit of the mount whose request is being served. */
extern uint64_t asking;

/* Block that holds the data of the current request, directly behind its header. */
extern uint32_t staged_block;

/* Gives a new file the layout of its directory or of the filesystem; no layout if `delayed`. */
void file_lay_out(struct node *node, const struct node *directory, bool delayed);

/* ---- Faults and statistics: statistics.c, control.c ------------------------------------------ */

struct statistics {
	uint64_t started_ns;
	uint64_t operations[OP_KINDS];
	uint64_t write_requests, read_requests;
	uint64_t bytes_written, bytes_read;
	uint64_t crossing, off_stripe, misaligned;
	uint64_t direct_writes, direct_reads; /* requests with O_DIRECT */
};

extern struct statistics statistics;

/* While set, no request is answered. */
extern bool frozen;

void statistics_reset(void);
/* Counts a write request. Called before the file changes. */
void statistics_write(struct node *node, uint64_t offset, uint32_t bytes);
/* Returns the statistics as JSON, to be freed. */
char *statistics_text(void);
int control_open(const char *folder);
void control_serve(int listener);

/* ---- Layouts of the simulated filesystem: play.c --------------------------------------------- */

/*
 * Gets a layout attribute into a buffer of 64 KiB. Returns its length or a negative errno;
 * -EOPNOTSUPP if the filesystem has no attribute of this name.
 */
ssize_t layout_attribute(const struct node *node, const char *name, char *blob);
int set_layout_attribute(struct node *node, const char *name, const char *value, size_t bytes);

/* ---- Space of each target as files: sysfs.c -------------------------------------------------- */

void sysfs_open(const char *folder);
/* Schedules an update of the files after the used space has changed. */
void sysfs_renew(void);

#endif
