/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All declarations that the Python package uses beyond the public headers. The package contains the
 * library, and both are built together, so this list may change with every commit. No other header
 * repeats a declaration; base.h includes this one.
 *
 * cffi reads this file, too: declarations and comments, and no macros but this guard.
 */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ioshape_context;

/* ---- What tests set in the place of a rule (save/open.c) ------------------------------------- */

/* Tests give this to ioshape_context_open() for a struct ioshape_context_options, which it begins
 * with. The size tells that: no public struct has it. 0: by rule. */
struct save_test_options {
	char options[2048];
	uint64_t block_bytes; /* of a request: a power of two from 64 KiB to 64 MiB */
	uint32_t queue_depth; /* requests in flight of a save: 1 to 64 */
	uint32_t lease_ms;    /* a writer without a heartbeat for so long counts as dead */
};

/* ---- This process in its job (base/process.c) ------------------------------------------------ */

struct base_job {
	uint32_t rank;
	uint32_t ranks;
	uint32_t local_rank;  /* among the ranks of this node */
	uint32_t local_ranks; /* 1 if the launcher does not say */
	char id[256];         /* shared by all ranks of the job; "" if the launcher does not say */
	char launcher[16];    /* "torchrun", "slurm", "openmpi", "mpich", "pmi", or "alone" */
};

/* Reads the variables of the launcher. */
void base_job_find(struct base_job *job);

/* ---- Checksums (base/checksum.c) ------------------------------------------------------------- */

/* Returns the CRC-32 of zip and gzip. `crc` continues an earlier result; 0 begins. */
uint32_t base_crc32(uint32_t crc, const void *data, size_t bytes);
/* Returns the checksum of A followed by B, given both checksums and the length of B. */
uint32_t base_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

/* ---- Copies by several threads (base/process.c) ---------------------------------------------- */

struct base_copier;

/* For one thread at a time. NULL: there is no memory; the caller then copies alone. */
struct base_copier *base_copier_open(void);
void base_copier_copy(struct base_copier *copier, void *to, const void *from, size_t bytes);
void base_copier_free(struct base_copier *copier);

/* ---- Bytes that grow (base/memory.c) --------------------------------------------------------- */

/* Zero it to begin. After a failed append it is unchanged. */
struct base_buffer {
	uint8_t *data;
	size_t bytes;
	size_t room;
};

void base_buffer_free(struct base_buffer *buffer);

/* ---- Where locks are seen (io/folder.c) ------------------------------------------------------
 */

/*
 * Writes eight hexadecimal digits and a 0 that identify the lock domain of a directory: locks are
 * seen through this mount of its filesystem on this machine. A second mount of the directory, or
 * another machine, may be another domain: a lock there says nothing about the writer.
 */
void io_lock_domain(int directory_fd, char *domain);

/* ---- Checksums beside a file in another format (format/index.c) ---------------------------------
 */

/* A CRC-32 for each block of a file; the last block is as long as what is left. */
struct format_checksums {
	uint64_t file_bytes;
	uint64_t block_bytes;
	uint64_t blocks;
	const uint32_t *crc32; /* `blocks` of them */
	/* When the file was last modified, in nanoseconds since 1970: a file that has another time
	 * is another file. 0 if that is not known. */
	int64_t modified_ns;
};

/* Appends them as the file has them. 0, -ENOMEM, or -EFBIG if they could not be read again. */
int format_checksums_encode(struct base_buffer *out, const struct format_checksums *checksums);

/* ---- Memory of a context (save/open.c) ------------------------------------------------------- */

struct ioshape_context;

/*
 * Makes staging memory now, so that the first background save is as quick as later ones; or gives
 * kept memory (staging and I/O buffers) that no save is using back to the system. `bytes` of
 * tensors, what saves under way hold included; 0 gives memory back. -ENOMEM above the context's
 * staging_bytes.
 */
int save_reserve(struct ioshape_context *context, uint64_t bytes);

/* ---- Saves that copy after the call (save/save.c) -------------------------------------------- */

struct ioshape_record;
struct ioshape_save;
struct ioshape_save_options;

/*
 * Saves as ioshape_save_records() does in the background. Records with a 1 in `later` may be copied
 * after the call has returned. They must then stay as they are until save_wait_copied() has
 * returned.
 */
int save_records_lazily(struct ioshape_context *context, const char *path,
			const struct ioshape_record *records, const uint8_t *later, size_t count,
			const struct ioshape_save_options *options, struct ioshape_save **out);
/*
 * Waits until everything is copied that the save was allowed to copy later.
 *
 * Until this call a thread of the lowest priority copies, and rests as long as it has copied. From
 * this call on it does not rest, and the calling thread and others help. What a function fetches is
 * copied by the save's thread alone, without rests, as is everything if the save has a deadline. A
 * sample tells whether something has changed too early: then the save ends with IOSHAPE_E_CHANGED.
 *
 * If the staging memory cannot hold all of the save, the call that saves has copied everything, and
 * this returns at once. With `borrow` nothing is copied: this waits until the save has ended.
 * Returns 0, also if the save has failed meanwhile; -EPERM in a forked child.
 */
int save_wait_copied(struct ioshape_save *save);

/* ---- More of a reader (save/load.c) ---------------------------------------------------------- */

struct ioshape_reader;

/*
 * Starts to read this record and those behind it, which the next ioshape_reader_load() or
 * ioshape_reader_load_records() will load, as far as the buffers of a reader go. It waits for
 * nothing. 0, also where nothing can be read ahead; -ENOENT.
 */
int save_reader_expect(struct ioshape_reader *reader, uint64_t record);
/*
 * Reads bytes [offset, offset + bytes) of the file as it is: headers, records and everything.
 * What belongs to records is verified as by ioshape_reader_read().
 */
int save_reader_read_file(struct ioshape_reader *reader, uint64_t offset, void *into, size_t bytes);

/* ---- An archive as a part of a file (save/file.c) -------------------------------------------- */

struct ioshape_file;

/*
 * Appends the torch zip that ioshape_save_records() would make of these records. `bytes` receives
 * its length; it may be NULL. Records that are refused (-EINVAL, -EEXIST, IOSHAPE_E_LIMIT) leave no
 * byte; after any other failure, also one of `fetch`, the file can only be freed.
 */
int save_file_write_records(struct ioshape_file *file, const struct ioshape_record *records,
			    size_t count, uint64_t *bytes);

/* ---- Directories that appear whole (save/file.c) --------------------------------------------- */

/* A directory that is being filled under a temporary name. */
struct save_directory;

/*
 * Makes a directory under a temporary name beside `path`, for files that appear together. Any
 * process may put files there, by their paths, and syncs them. Directories that dead processes left
 * beside it are removed first. Directories above `path` are made if they are missing.
 */
int save_directory_make(struct ioshape_context *context, const char *path,
			struct save_directory **out);
/* Returns where the files go: an absolute path, which belongs to the directory until it is freed.
 * NULL without a directory. */
const char *save_directory_path(const struct save_directory *directory);
/* Gives the directory its name, durably. An empty directory of that name is replaced; -EEXIST if
 * something else has that name. */
int save_directory_commit(struct save_directory *directory);
/* Frees the directory. Without a successful commit it is removed, with the files in it. */
void save_directory_free(struct save_directory *directory);

/* ---- The journal of a tier (tier/names.c) ---------------------------------------------------- */

/* Returns the path of the checkpoint that an entry is about, within `text`, and whether it is
 * drained; NULL if this is no entry. */
const char *tier_path_of_entry(const char *name, const char *text, int *drained);

/* ---- Coordinators, whose pools the operator sees and sets in Python ----------------------------
 */

enum {
	SLOTS_NAME_BYTES = 128, /* of pools and of "ahead" texts, with the final 0 */
	SLOTS_TEXT_BYTES = 64,  /* of jobs and nodes */
	SLOTS_ID_BYTES = 40,    /* of requests: the client's 16 hexadecimal digits, '-', a number */
	SLOTS_KEY_BYTES = 160,
	ADDRESS_HOSTS = 16,
	ADDRESS_HOST_BYTES = 256,   /* a DNS name has at most 253 letters */
	ADDRESS_PATH_BYTES = 108,   /* what fits into a sockaddr_un */
	ADDRESS_SECRET_BYTES = 513, /* of passwords and users, with the final 0 */
	LOCAL_FILE_NAME_BYTES = 160,
	LOCAL_FOLDER_BYTES = 512,
	LOCAL_HEAD_BYTES = 4096, /* then come the records */
	LOCAL_WAITERS = 1024     /* records of each line */
};

struct slots_node {
	char host[ADDRESS_HOST_BYTES];
	uint16_t port;
};

enum slots_address_kind {
	ADDRESS_HOST, /* one server, or nodes of one cluster */
	ADDRESS_UNIX,
	ADDRESS_SENTINEL
};

/* The address of a Redis, taken apart (slots/address.c). */
struct slots_address {
	enum slots_address_kind kind;
	bool tls;
	struct slots_node nodes[ADDRESS_HOSTS]; /* or sentinels */
	size_t node_count;
	char path[ADDRESS_PATH_BYTES];
	char service[ADDRESS_HOST_BYTES]; /* the name that sentinels know the master by */
	char user[ADDRESS_SECRET_BYTES];
	char password[ADDRESS_SECRET_BYTES];
	bool has_password;
	uint32_t database;
};

/* The head of a pool's file on one host (slots/local.h). Programs of 32 and 64 bits share these
 * types: each member has a fixed width, and there is no padding. */
struct slots_file_head {
	char magic[8];
	uint32_t version;
	uint32_t wake;     /* the futex word */
	uint64_t base_ns;  /* the wall clock less the monotonic one, when the file was made */
	uint32_t capacity; /* as the first request asked for it that found the pool idle */
	uint32_t by_job;   /* 1: a job's setting did; 0: the rule */
	char pool[SLOTS_NAME_BYTES];
};

/* A request that holds or waits. */
struct slots_file_record {
	char id[SLOTS_ID_BYTES];
	char job[SLOTS_TEXT_BYTES];
	char node[SLOTS_TEXT_BYTES];
	uint64_t number; /* holder: its fence; waiter: its ticket */
	uint64_t since_ns;
	uint64_t until_ns; /* taken to be alive until then, by CLOCK_MONOTONIC */
	uint64_t bytes;    /* that will be written; 0 unknown */
	uint64_t passed;   /* as of the last heartbeat */
	uint32_t first; /* holder of several slots: the number of the one whose record is renewed */
	uint32_t weight;
	uint32_t rank;
	uint32_t pid; /* in its namespace */
	uint32_t urgent;
	char unused[28];
};

/* Lines of locks: on holders, on tickets of urgent waiters, on tickets of others. */
enum local_line { LOCAL_HOLDER_LINE, LOCAL_URGENT_LINE, LOCAL_LINE, LOCAL_LINES };

/* Where a pool is kept. */
struct slots_coordinator {
	const char *id; /* "redis" or "local" */
	uint32_t lease_ms;
	uint32_t default_capacity;
	uint64_t small_bytes; /* a request up to here may be let past the queue */
	uint32_t express;     /* so many of them at a time */
	/* "redis" */
	struct slots_address address; /* with the password, wherever that came from */
	char key[SLOTS_KEY_BYTES]; /* the first key of the pool, which the script is called with */
	const char *registry;      /* key of a sorted set: names of pools, by when they were used */
	/* "local" */
	char folder[LOCAL_FOLDER_BYTES];
	char file[LOCAL_FILE_NAME_BYTES]; /* of the pool, in the folder */
	uint32_t version;                 /* in the file's head */
	uint64_t locks[LOCAL_LINES +
		       1]; /* offsets at which lines of locks begin, or the last ends */
	uint32_t holders;  /* records before those of the lines */
};

/* Finds where a context keeps a pool; NULL: all pools. Reads the password file. 0 or a code. */
int save_find_coordinator(struct ioshape_context *context, const char *pool,
			  struct slots_coordinator *found);

/* Writes the name of the pool that saves to a path use, of at most SLOTS_NAME_BYTES. 0 or a code.
 */
int save_pool_of_path(struct ioshape_context *context, const char *path, char *name, size_t bytes);

/* The rules of pools as Redis runs them, and their SHA-1 (slots/slots.lua). */
extern const char slots_script[];
extern const char slots_script_sha1[];

/* ---- What a path sits on, and what a save would do there (save/probe.c) ----------------
 */

enum { PROBE_TARGETS = 64 };

struct save_probe_target {
	char name[64];
	uint64_t total_bytes, free_bytes;
};

/* Members are the attributes of ioshape.types.Storage in Python, which describes them. */
struct save_probe {
	char directory[4096];
	char family[32];
	char type[32];
	char source[512];
	char mount_point[256];
	char options[512];
	uint64_t total_bytes, free_bytes;
	uint32_t memory_alignment, offset_alignment;
	int direct, rotational; /* 0, 1, or -1: unknown */
	bool remote;
	uint32_t target_count;
	uint32_t targets_listed;
	struct save_probe_target targets[PROBE_TARGETS];
	char stripes[256];
	uint64_t stripe_bytes;
	int64_t stripe_count; /* -1 in such counts: all targets */
	uint32_t mirrors;
	char target_pool[64];
	bool is_file;
	char file_stripes[256];
	int64_t file_stripe_count;
	uint64_t for_bytes;
	char engine[32];
	char choice[160];
	uint64_t block_bytes;
	uint32_t queue_depth;
	int uring_errno;
	char engine_note[512];
	bool buffers_refused;
	char stripes_asked[256];
	int64_t asked_stripe_count;
	char stripes_why[256];
	char pool[SLOTS_NAME_BYTES];
	uint32_t writers;
	char writers_why[256];
};

/*
 * Describes the directory that a path is or is in, and what a save there of a file of so many bytes
 * (0: 4 GiB) would do, if `files` are written at the same time (0: not known). Nothing is written:
 * at most, an empty file without a name is opened for a moment. 0 or a code.
 */
int save_probe_path(struct ioshape_context *context, const char *path, uint64_t bytes,
		    uint32_t files, struct save_probe *found);

/* ---- The table of settings (base/settings.def), a row ---------------------------------------- */

struct base_setting_row {
	const char *name, *owner, *kind, *words;
	uint64_t least, most;
	const char *values, *otherwise, *about, *user;
};

#endif
