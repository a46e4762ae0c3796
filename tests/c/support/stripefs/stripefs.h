/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A filesystem that plays a parallel one on a single machine; README.md says what it models.
 *
 * Everything happens on one thread: requests are read from the kernel, change the tree and the
 * contents at once, and are answered when the model says that they would be. So there is nothing to
 * lock, and time is the only thing that is not real. All times are those of the model, in
 * nanoseconds: now_ns() says how they follow from the clock.
 */
#ifndef STRIPEFS_H
#define STRIPEFS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
/* Also the one of files of this program that do not include libfuse's headers themselves. */
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
	MAX_MOUNTS = 64, /* each has a bit */
	MAX_COMPONENTS = 8,
	MAX_POOLS = 16,
	POOL_NAME_BYTES = 16, /* as in lov_user_md_v3, the final zero included */
	/* What memory is given out in, and the largest request. */
	BLOCK_BYTES = 1 << 20,
	/* What space is counted in: every stripe size is a multiple of it. */
	CHUNK_BYTES = 1 << 16,
	CHUNKS_PER_BLOCK = BLOCK_BYTES / CHUNK_BYTES,
	/* In front of each block: where the head of a request that fills it lies. */
	HEAD_ROOM = 4096,
	/* A request of BLOCK_BYTES touches at most so many objects. */
	MAX_PARTS = BLOCK_BYTES / CHUNK_BYTES + 1,
	MAX_IOVECS = CHUNKS_PER_BLOCK * 2 + 4,
	PAGE = 4096,
};

/* ---- Parameters: options.c --------------------------------------------------------------------
 */

enum play { PLAY_LUSTRE, PLAY_BEEGFS, PLAY_CEPH, PLAY_NFS };
/* Back: the kernel's; client: one for each file, with a window of requests. */
enum cache { CACHE_THROUGH, CACHE_BACK, CACHE_CLIENT };
/* Parallel: as on a recent Lustre. Threads: each call waits for its pieces, calls of several
 * threads do not wait for each other. Serial: one write of a file at a time. */
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
	uint64_t start, end; /* end is UINT64_MAX: to the end of the file */
	uint64_t stripe_size;
	/* Of CephFS: an object is full then, and the next ones begin. 0: objects have no end. */
	uint64_t object_size;
	uint16_t count; /* 0 in a directory's default: that of the filesystem; 0xffff: all */
	uint16_t first; /* 0xffff: any */
	bool overstriped, on_mds, made;
	bool by_hand; /* whoever asked for it chose `count` of the targets */
	char pool[POOL_NAME_BYTES];
	uint16_t spread; /* how many targets that is: more than count if objects have an end */
	uint16_t targets[MAX_TARGETS]; /* of a file, once made */
};

struct layout {
	bool composite;
	uint32_t generation;
	unsigned int count; /* 0: none yet */
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
	double slow; /* seconds of the clock in one of the model */
	unsigned int targets;
	double bandwidth; /* of each target, bytes/s */
	double seek_ms;
	uint64_t run_bytes;
	double latency_ms; /* of each data request, on top of the target's time */
	double link;       /* bytes/s into a server that caches; 0: no limit */
	uint64_t server_cache_bytes;
	double mds_latency_ms, mds_rate;
	uint64_t stripe_size;
	unsigned int stripe_count;
	uint64_t capacity; /* of each target */
	uint64_t memory;
	unsigned int window;    /* requests of a file that a client has under way */
	unsigned int fallocate; /* whether there is one */
	bool swap_bytes;
	unsigned int pool_count;
	struct pool pools[MAX_POOLS];
	struct layout progressive;  /* of new files, instead of size and count; none: count is 0 */
	uint64_t used[MAX_TARGETS]; /* bytes that something else has taken */
};

extern struct options options;

/* Exits after --help, and with a sentence on stderr if something is wrong. */
void options_parse(int count, char **arguments);
/* "16Mi", "60M", "4096": whether it is one. */
bool parse_bytes(const char *text, uint64_t *bytes);

/* ---- Layouts: layout.c ------------------------------------------------------------------------
 */

struct piece {
	uint16_t target; /* options.targets: the metadata server's own storage */
	uint32_t object; /* within the file */
	uint64_t offset; /* in the object */
	uint32_t bytes;
};

/* The filesystem's own default. */
void layout_default(struct layout *layout);
/* A file's objects, as the wish says; 0 or a negative errno. Components after the first are made
 * when something is written there. */
int layout_create(struct layout *layout, const struct layout *wish);
int layout_make(struct layout *layout, uint64_t offset, uint64_t bytes);
/* Which objects the bytes lie in, a piece for each; how many. -EIO without a component there. */
int layout_split(const struct layout *layout, uint64_t offset, uint32_t bytes,
		 struct piece pieces[static MAX_PARTS]);
const struct component *layout_component(const struct layout *layout, uint64_t offset);
int layout_target(const struct layout *layout, uint64_t offset);
const struct pool *pool_find(const char *name);

/* ---- Memory: store.c --------------------------------------------------------------------------
 */

int store_open(const char *folder, uint64_t bytes);
/* 0: there is none. What is in it is undefined. */
uint32_t store_take(void);
void store_give(uint32_t block);
char *store_block(uint32_t block);
uint64_t store_free_bytes(void);

/* ---- The tree: tree.c -------------------------------------------------------------------------
 */

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

/* A file's copy in the archive: hsm.c. */
struct archive {
	uint32_t flags; /* as Lustre has them */
	bool wanted;    /* to be archived, since then */
	bool changed;   /* meanwhile */
	uint64_t begun_ns;
};

struct node {
	struct stat stat;
	uint64_t lookups; /* the kernels' references */
	unsigned int opens;
	char *link;
	struct attribute *attributes;
	struct layout *layout; /* of a file; of a directory: for new files */
	/* Which mounts know the attributes as they are now, and have no old pages: a bit for each.
	 */
	uint64_t known_to, read_by;
	/* Contents of a file. */
	struct block *blocks;
	size_t block_count;
	/* A directory's entries, oldest first. */
	struct entry *first, *last;
	uint64_t next_cookie;
	struct node *parent; /* of a directory */
	/* Data requests under way, oldest first, and who waits for them. */
	struct io *oldest, *newest;
	struct waiter *waiters;
	/* A client's cache: a run of bytes that are not asked to be written yet, those that are,
	 * and how many requests are under way. */
	uint64_t dirty_begin, dirty_end;
	struct dirty *leaving;
	unsigned int in_flight;
	/* Requests that started off a stripe in the last stripe so far: counted when it is not the
	 * last any more. */
	uint64_t last_stripe, pending_off;
	bool ever_written;
	int late_error; /* of a write that was answered before it failed: for the next fsync */
	struct archive archive;
};

struct entry {
	struct entry *hash_next, *next, *previous;
	struct node *directory, *node;
	uint64_t known_to; /* which mounts know it: a bit for each */
	uint64_t cookie;
	char name[];
};

struct node *tree_root(void);
void tree_open(void);
struct node *node_of(fuse_ino_t ino);
fuse_ino_t ino_of(const struct node *node);
struct node *node_create(struct node *directory, mode_t mode, const struct fuse_ctx *context);
/* Frees it if nothing refers to it any more. */
void node_settle(struct node *node);
struct entry *entry_find(struct node *directory, const char *name);
/* Known to the mount that asks. */
struct entry *entry_add(struct node *directory, const char *name, struct node *node);
/* Does not free the node, which has a link less. */
void entry_remove(struct entry *entry);
/* Changed by the mount that asks: the others no longer know it; modified: nor what is in it. */
void node_touch(struct node *node, bool modified);
uint64_t tree_nodes(void);
/* The one with that number that has a name; NULL: there is none. */
struct node *node_numbered(uint64_t number);

/* ---- Contents: content.c ----------------------------------------------------------------------
 */

/* Takes space on the targets for these bytes, or -ENOSPC. */
int content_reserve(struct node *node, uint64_t offset, uint64_t bytes);
/* Reserved before. staged: the block that buffer is, or 0; taken (set to 0) if it fits as it is. */
int content_write(struct node *node, uint64_t offset, const char *buffer, uint32_t bytes,
		  uint32_t *staged);
/* How many parts; together exactly these bytes. They hold until the next change of the file. */
int content_read(struct node *node, uint64_t offset, uint32_t bytes, struct iovec *parts);
void content_punch(struct node *node, uint64_t offset, uint64_t bytes);
int content_truncate(struct node *node, uint64_t size);

/* ---- Time: model.c ----------------------------------------------------------------------------
 */

struct part {
	struct part *next, *previous; /* in the target's queue */
	struct io *io;
	struct piece piece;
	uint64_t node_number;
};

struct io {
	struct io *next, *previous; /* of the same file */
	struct io *next_waiting;    /* for room in a server's cache */
	fuse_req_t request;
	struct node *node;
	bool write, answered, write_back;
	uint64_t offset;
	uint32_t bytes;
	int error;
	uint64_t sequence, arrived_ns;
	unsigned int part_count, parts_left;
	struct part parts[];
};

struct target {
	struct part *first, *last; /* what waits */
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
	unsigned int queue, longest_queue; /* the one being served included */
};

extern struct target targets[MAX_TARGETS + 1];

uint64_t now_ns(void);
/* From now to then, by the clock. */
struct timespec model_pause(uint64_t until_ns);
uint64_t target_free(const struct target *target);
void model_open(void);
/* Runs what is due, and says when something is next; UINT64_MAX: never. */
uint64_t model_run(void);
/* Calls back at that time; once. */
void model_later(uint64_t at_ns, void (*call)(void *argument), void *argument);
/* Answers a read or write when the targets are done with it. */
void model_io(fuse_req_t request, struct node *node, bool write, uint64_t offset, uint32_t bytes);
/* The place of a request among all. */
uint64_t model_sequence(void);
/* Bytes whose writer has been answered; their place is when they were ready to leave. */
void model_write_back(struct node *node, uint64_t offset, uint32_t bytes, uint64_t sequence);
/* Calls back when all data requests of this file that came before are done. */
void model_flush(struct node *node, void (*call)(void *argument), void *argument);
/* When the metadata server is done with an operation that comes now. */
uint64_t model_metadata(void);

/* ---- A client's cache: client.c ----------------------------------------------------------------
 */

void client_write(struct node *node, uint64_t offset, uint32_t bytes);
/* What is dirty is on its way, or will be when the window allows. */
void client_flush(struct node *node);
/* A request is done. */
void client_sent(struct node *node);
void client_send(struct node *node);
/* The place of the first that has not left; there is one. */
uint64_t client_oldest(const struct node *node);

/* ---- Answers: answer.c ------------------------------------------------------------------------
 */

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

/* Each counts the operation and answers when the metadata server is done with it. */
void answer_error(fuse_req_t request, enum kind kind, int error);
void answer_entry(fuse_req_t request, enum kind kind, struct node *node);
/* At once, as a client that knows the name already does not ask for it. */
void answer_known_entry(fuse_req_t request, struct node *node);
void answer_attributes(fuse_req_t request, enum kind kind, struct node *node);
/* How long the kernel keeps what it is told. */
double answer_valid_s(void);
void answer_open(fuse_req_t request, struct node *node, const struct fuse_file_info *file);
void answer_create(fuse_req_t request, struct node *node, const struct fuse_file_info *file);
/* Copies the bytes. */
void answer_bytes(fuse_req_t request, enum kind kind, const void *bytes, size_t count);
void answer_statfs(fuse_req_t request, const struct statvfs *statfs);
void answer_ioctl(fuse_req_t request, int result, const void *bytes, size_t count);
/* What getxattr and listxattr answer: a value for which there is room for so many bytes; 0: its
 * size is asked for. Copies it. */
void answer_value(fuse_req_t request, const void *value, size_t bytes, size_t room);
/* Fails unless error is 0, after all data requests of the file so far. */
void answer_synced(fuse_req_t request, struct node *node);
/* What the kernel is told besides what libfuse has an option for. */
ssize_t answer_send(int device, struct iovec *parts, int count, void *mount);

/* ---- Operations -------------------------------------------------------------------------------
 */

/* names.c, io.c, attributes.c, play.c fill in theirs. */
void names_operations(struct fuse_lowlevel_ops *operations);
void io_operations(struct fuse_lowlevel_ops *operations);
void attributes_operations(struct fuse_lowlevel_ops *operations);
void play_operations(struct fuse_lowlevel_ops *operations);

/* One client of the storage: its kernel keeps names, attributes and pages of its own. */
struct mount {
	struct fuse_session *session;
	uint64_t bit;
	bool initialized;
};

/* The bit of the mount whose request is being served. */
extern uint64_t asking;

/* The block that the request now being served was read into, directly behind its head. */
extern uint32_t staged_block;

/* Gives a new file the layout of its directory, or the filesystem's; none at all if that is to
 * come. */
void file_lay_out(struct node *node, const struct node *directory, bool delayed);

/* ---- Faults and figures: statistics.c, control.c ----------------------------------------------
 */

struct statistics {
	uint64_t started_ns;
	uint64_t operations[OP_KINDS];
	uint64_t write_requests, read_requests;
	uint64_t bytes_written, bytes_read;
	uint64_t crossing, off_stripe, misaligned;
	uint64_t direct_writes, direct_reads; /* requests with O_DIRECT */
};

extern struct statistics statistics;

/* Nothing is answered. */
extern bool frozen;

/* What the archive does: as it should; no request is taken, as there is no coordinator, or the
 * right to ask is missing; nothing is done; nothing can be done. */
enum archive_order {
	ARCHIVE_WELL,
	ARCHIVE_OFF,
	ARCHIVE_REFUSED,
	ARCHIVE_STUCK,
	ARCHIVE_FAILING,
};
extern enum archive_order archive_order;

/* A file's content has changed. */
void hsm_changed(struct node *node);

void statistics_reset(void);
/* Counts a write request, before the file changes. */
void statistics_write(struct node *node, uint64_t offset, uint32_t bytes);
/* JSON, to be freed. */
char *statistics_text(void);
int control_open(const char *folder);
void control_serve(int listener);

/* ---- What the filesystem that is played says about layouts: play.c --------------------------- */

/* Into a buffer of 64 KiB; how long it is, or a negative errno: -EOPNOTSUPP if the name means
 * nothing. */
ssize_t layout_attribute(const struct node *node, const char *name, char *blob);
int set_layout_attribute(struct node *node, const char *name, const char *value, size_t bytes);

/* ---- What the machine shows of each target: sysfs.c -------------------------------------------
 */

void sysfs_open(const char *folder);
/* Soon: used space has changed. */
void sysfs_renew(void);

#endif
