/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All declarations that the Python package uses beyond the public headers. The package contains the
 * library, and both are built together, so this list may change with every commit. No other header
 * repeats a declaration; base.h includes this one.
 *
 * cffi also reads this file. It must hold declarations and comments only, and no macros but the
 * include guard.
 */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ioshape_context;

/* ---- Context options for tests (save/open.c) ------------------------------------------------- */

/* Options that replace rules of the library in tests. Tests pass this struct to
 * ioshape_context_open() as a struct ioshape_context_options, with which it begins. The library
 * recognizes it by its size, which no public struct has. A member of 0 keeps the rule. */
struct save_test_options {
	char options[2048];   /* a struct ioshape_context_options, followed by unused bytes */
	uint64_t block_bytes; /* bytes of an I/O request: a power of two from 64 KiB to 64 MiB */
	uint32_t queue_depth; /* requests in flight of a save: 1 to 64 */
	uint32_t lease_ms;    /* time without a heartbeat after which a writer counts as dead */
};

/* ---- Ranks of this job (base/process.c) ------------------------------------------------------ */

/* Rank of this process, as the launcher's environment variables describe it. */
struct base_job {
	uint32_t rank;
	uint32_t ranks;
	uint32_t local_rank;  /* rank among the ranks of this node */
	uint32_t local_ranks; /* ranks on this node; 1 if the launcher does not say */
	char id[256]; /* name that all ranks of the job share; "" if the launcher does not say */
	char launcher[16]; /* "torchrun", "slurm", "openmpi", "mpich", "pmi", or "alone" */
};

/* Fills `job` from the launcher's environment variables. */
void base_job_find(struct base_job *job);

/* ---- Checksums (base/checksum.c) ------------------------------------------------------------- */

/* Returns the CRC-32 of zip and gzip. `crc` is the result for the bytes before, or 0 at the
 * beginning. */
uint32_t base_crc32(uint32_t crc, const void *data, size_t bytes);
/* Returns the CRC-32 of A followed by B, given both checksums and the length of B. */
uint32_t base_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

/* ---- Differences of tensors (base/statistics.c) ---------------------------------------------- */

/* Sums over the numbers of two tensors A and B. A complex element counts as two numbers. */
struct base_difference {
	uint64_t count;
	uint64_t changed;    /* numbers whose bits differ */
	double squares_of_a; /* of the finite numbers of A */
	double squares;      /* of the differences; infinite or NaN if such a number differs */
};

/* Adds bytes of two tensors to sums, which begin as zeros. Returns false if their type has no
 * statistics: then each byte counts as a number, and there are no squares. */
bool base_difference_add(struct base_difference *sum, uint32_t dtype, const void *a, const void *b,
			 size_t bytes);

/* ---- Parallel memory copies (base/process.c) ------------------------------------------------- */

struct base_copier;

/* Creates a group of threads that copy memory. One thread at a time may use it. Returns NULL if
 * there is no memory; base_copier_copy() then copies without helping threads. */
struct base_copier *base_copier_open(void);
void base_copier_copy(struct base_copier *copier, void *to, const void *from, size_t bytes);
/* Copies memory by this thread and, above 1 MiB, by the helping threads. `copier` may be NULL. */
void base_copier_free(struct base_copier *copier);

/* ---- Lock domains of directories (io/folder.c) ----------------------------------------------- */

/*
 * Writes eight hexadecimal digits and a zero byte that identify the lock domain of a directory to
 * `domain`. Processes of one domain see each other's locks: they use the same mount of the
 * filesystem on the same machine. A second mount of the directory, or another machine, may be
 * another domain. A lock from there says nothing about the writer.
 */
void io_lock_domain(int directory_fd, char *domain);

/* ---- Staging memory of a context (save/open.c) ----------------------------------------------- */

struct ioshape_context;

/*
 * Allocates staging memory now, so that the first background save is as quick as later ones.
 * `bytes` is the size of the tensors and includes the memory of saves that are in progress. With
 * `bytes` 0 it instead returns unused staging memory and I/O buffers to the system. Returns 0, or
 * -ENOMEM above the context's staging_bytes.
 */
int save_reserve(struct ioshape_context *context, uint64_t bytes);

/* ---- Saves that copy after the call has returned (save/save.c) ------------------------------- */

struct ioshape_record;
struct ioshape_save;
struct ioshape_save_options;

/*
 * Saves records in the background like ioshape_save_records(). Records with a 1 in `later` may be
 * copied after the call has returned. They must not change until save_wait_copied() has returned.
 */
int save_records_lazily(struct ioshape_context *context, const char *path,
			const struct ioshape_record *records, const uint8_t *later, size_t count,
			const struct ioshape_save_options *options, struct ioshape_save **out);
/*
 * Waits until the save has copied all records that it may copy after the call.
 *
 * Before this call, a thread of the lowest priority copies, and rests for as long as it copied.
 * During this call it does not rest, and the calling thread and further threads help it. If a
 * record is fetched by a function, or the save has a deadline, the save's own thread copies
 * everything without rests. A sample of each record shows whether it changed before it was copied.
 * The save then ends with IOSHAPE_E_CHANGED.
 *
 * If the staging memory cannot hold the whole save, the call that saves has copied everything, and
 * this call returns at once. With `borrow` nothing is copied, and this call waits until the save
 * has ended. Returns 0, also if the save has failed meanwhile, or -EPERM in a forked child.
 */
int save_wait_copied(struct ioshape_save *save);

/* ---- More functions of a reader (save/load.c) ------------------------------------------------ */

struct ioshape_reader;

/*
 * Starts to prefetch this record and those that follow it, as far as the reader's buffers reach.
 * The next ioshape_reader_load() or ioshape_reader_load_records() will load them. Does not wait for
 * the data. Returns 0, also where nothing can be prefetched, or -ENOENT if there is no such record.
 */
int save_reader_prefetch(struct ioshape_reader *reader, uint64_t record);
/* Reads bytes [offset, offset + bytes) of the file as they are stored, including headers. Bytes
 * that belong to records are verified as by ioshape_reader_read(). */
int save_reader_read_file(struct ioshape_reader *reader, uint64_t offset, void *into, size_t bytes);
/* Returns the checksums of the blocks of a record, or of the whole file if it is read in another
 * format, and sets *count. They are valid until the reader is freed. Returns NULL if there are
 * none, or in a forked child. */
const uint32_t *save_reader_checks(struct ioshape_reader *reader, uint64_t record, uint64_t *count);

/* ---- Archives within a file (save/file.c) ---------------------------------------------------- */

struct ioshape_file;

struct save_items;

/* Makes the file examine the tensors of the archives that are appended from now on, and add them to
 * `items`, which must live until the file is committed. */
int save_file_examine(struct ioshape_file *file, struct save_items *items);
/* Appends the torch zip that ioshape_save_records() would write for these records. `name` is that
 * of its tensors in alarms. `bytes` receives the length of the zip and may be NULL. If records are
 * invalid (-EINVAL, -EEXIST, IOSHAPE_E_LIMIT), no byte is appended. After any other failure, such
 * as that of `fetch`, the file can only be freed. */
int save_file_write_records(struct ioshape_file *file, const char *name,
			    const struct ioshape_record *records, size_t count, uint64_t *bytes);

/* ---- Checkpoints of many archives (save/items.c) --------------------------------------------- */

/* The result of the rule `unchanged` in one of the processes that save a checkpoint. Bit 0 stands
 * for all tensors, bit n for those of group n. The sets of several processes are united. Groups in
 * `still` that are not in `moves` raise the alarm. */
struct save_standstill {
	uint32_t still;   /* groups whose tensors stand still, but should move */
	uint32_t moves;   /* groups with a tensor that moves, or that cannot be compared */
	char before[600]; /* path of the checkpoint with equal tensors, perhaps cut off */
};

/* The result of judging. */
struct save_verdict {
	uint32_t alarms; /* bits of enum ioshape_alarm */
	char alarm[256]; /* the first one, as a sentence */
	struct save_standstill standstill;
};

/* Makes an empty collection of the tensors that this process saves to, or has loaded from, a
 * checkpoint at `path`. */
int save_items_make(struct ioshape_context *context, const char *path, struct save_items **out);
void save_items_free(struct save_items *items);
/* Judges tensors that were saved, by all rules but `unchanged`, and remembers them as those of the
 * checkpoint before the next one. Returns 0 or IOSHAPE_E_ALARM. */
int save_items_judge(struct save_items *items, struct save_verdict *verdict);
/* Returns the name of the first tensor from number *next on that raised alarms, sets their bits,
 * and moves *next behind it. Returns NULL if there is none. */
const char *save_items_alarm(const struct save_items *items, uint64_t *next, uint32_t *alarms);
/* Judges by the rule `unchanged`. Logs a warning or returns IOSHAPE_E_ALARM. */
int save_items_judge_standstill(struct ioshape_context *context, const char *path,
				const struct save_standstill *standstill,
				struct save_verdict *verdict);
/* Adds the tensor of an archive that was loaded, and its alarms at the save. */
int save_items_add_loaded(struct save_items *items, const struct ioshape_reader *reader,
			  const char *name, uint32_t alarms);
/* Remembers the loaded tensors. `alarms` are those of the checkpoint at the save. */
void save_items_loaded(struct save_items *items, uint32_t alarms);

/* ---- Atomic directories (save/file.c) -------------------------------------------------------- */

/* A directory that is being filled under a temporary name. */
struct save_directory;

/* Creates a directory under a temporary name beside `path`, for files that shall appear together.
 * Any process may create files in it by their paths, and must sync them. The call creates missing
 * directories above `path`, and first removes directories that dead processes left beside it. */
int save_directory_make(struct ioshape_context *context, const char *path,
			struct save_directory **out);
/* Returns the absolute path of the temporary directory, which is valid until `directory` is freed.
 * Returns NULL if `directory` is NULL. */
const char *save_directory_path(const struct save_directory *directory);
/* Renames the directory to its final name, durably. Replaces an empty directory of that name.
 * Returns -EEXIST if anything else has that name. */
int save_directory_commit(struct save_directory *directory);
/* Frees the directory. If it was not committed successfully, removes it with the files in it. */
void save_directory_free(struct save_directory *directory);

/* ---- Journal of a tier (tier/tier.c) --------------------------------------------------------- */

/* Returns the destination path in the text of a journal entry, as a pointer into `text`. Sets
 * *drained to 1 if the entry is drained. Returns NULL if the name and the text are no journal
 * entry. */
const char *tier_path_of_entry(const char *name, const char *text, int *drained);

/* ---- Coordinators of slots, for the operator's calls in Python ------------------------------- */

enum {
	SLOTS_NAME_BYTES = 128, /* names of pools and "ahead" texts, with the final 0 */
	SLOTS_TEXT_BYTES = 64,  /* names of jobs and nodes, with the final 0 */
	/* ids of requests: the client's 16 hexadecimal digits, '-', a number */
	SLOTS_ID_BYTES = 40,
	SLOTS_KEY_BYTES = 160,       /* keys of pools in a Redis */
	ADDRESS_HOSTS = 16,          /* hosts in an address */
	ADDRESS_HOST_BYTES = 256,    /* a DNS name has at most 253 characters */
	ADDRESS_PATH_BYTES = 108,    /* as much as fits into a sockaddr_un */
	ADDRESS_SECRET_BYTES = 513,  /* passwords and users, with the final 0 */
	LOCAL_FILE_NAME_BYTES = 160, /* names of pool files */
	LOCAL_FOLDER_BYTES = 512,    /* paths of folders of pool files */
	LOCAL_HEAD_BYTES = 4096,     /* head of a pool file; the records follow */
	LOCAL_WAITERS = 1024         /* waiter records of each line */
};

/* One server of a coordinator. */
struct slots_node {
	char host[ADDRESS_HOST_BYTES];
	uint16_t port;
};

/* Kind of a Redis address. */
enum slots_address_kind {
	ADDRESS_HOST,    /* one server, or several nodes of one cluster */
	ADDRESS_UNIX,    /* a socket of this host */
	ADDRESS_SENTINEL /* sentinels that name the server */
};

/* Parsed address of a Redis (slots/address.c). */
struct slots_address {
	enum slots_address_kind kind;
	bool tls;
	struct slots_node nodes[ADDRESS_HOSTS]; /* servers or sentinels */
	size_t node_count;
	char path[ADDRESS_PATH_BYTES];    /* path of the socket */
	char service[ADDRESS_HOST_BYTES]; /* name of the master that the sentinels know */
	char user[ADDRESS_SECRET_BYTES];
	char password[ADDRESS_SECRET_BYTES];
	bool has_password;
	uint32_t database;
};

/* Head of a pool's file on one host (slots/local.h). 32-bit and 64-bit programs share the file, so
 * each member has a fixed width and there is no padding. */
struct slots_file_head {
	char magic[8];
	uint32_t version;
	uint32_t wake;     /* futex word */
	uint64_t base_ns;  /* wall clock minus monotonic clock when the file was created */
	uint32_t capacity; /* slots, as set by the first request that found the pool idle */
	uint32_t by_job;   /* 1 if the job's setting gave the capacity; 0 if the rule did */
	uint64_t mark;     /* random; changes when a request takes a ticket */
	char pool[SLOTS_NAME_BYTES];
};

/* Record of a request that holds a slot or waits for one. */
struct slots_file_record {
	char id[SLOTS_ID_BYTES];
	char job[SLOTS_TEXT_BYTES];
	char node[SLOTS_TEXT_BYTES];
	uint64_t number;   /* fence of a holder, ticket of a waiter */
	uint64_t since_ns; /* time (CLOCK_MONOTONIC) since which it has held or waited */
	uint64_t until_ns; /* time (CLOCK_MONOTONIC) until which the request counts as alive */
	uint64_t bytes;    /* bytes that will be written; 0 if unknown */
	uint64_t passed;   /* bytes written, as of the last heartbeat */
	/* for a holder of several slots: number of the slot whose record is renewed */
	uint32_t first;
	uint32_t weight; /* slots that the request takes */
	uint32_t rank;   /* rank of the process in its job */
	uint32_t pid;    /* process id, in the process' namespace */
	uint32_t urgent; /* 1 if the request has a deadline */
	char unused[28];
};

/* Ranges of lock bytes in a pool's file: for holders, for tickets of waiters with a deadline, and
 * for tickets of the other waiters. */
enum local_line { LOCAL_HOLDER_LINE, LOCAL_URGENT_LINE, LOCAL_LINE, LOCAL_LINES };

/* Location of a pool at its coordinator. */
struct slots_coordinator {
	const char *id;            /* kind of coordinator: "redis" or "local" */
	uint32_t lease_ms;         /* length of a lease */
	uint32_t default_capacity; /* slots of a pool without a setting */
	/* largest request that the small-file bypass may grant ahead of the queue */
	uint64_t small_bytes;
	uint32_t bypass; /* number of such requests at a time */
	/* The following members are for "redis". */
	/* includes the password, from the address, the file or the variable */
	struct slots_address address;
	char key[SLOTS_KEY_BYTES]; /* first key of the pool, with which the script is called */
	/* The following members are for "local". */
	char folder[LOCAL_FOLDER_BYTES];  /* folder of the pool files */
	char file[LOCAL_FILE_NAME_BYTES]; /* name of the pool's file in the folder */
	uint32_t version;                 /* version in the file's head */
	/* offsets at which the ranges of lock bytes begin; the last one is the end of the last
	 * range */
	uint64_t locks[LOCAL_LINES + 1];
	uint32_t holders; /* number of holder records, which precede those of the waiters */
};

/* Finds where a context keeps a pool; with NULL, where it keeps its pools. Reads the password file.
 * Returns 0 or a negative code. */
int save_find_coordinator(struct ioshape_context *context, const char *pool,
			  struct slots_coordinator *found);

/* Writes the name of the pool that saves to a path use to `name`, which holds `bytes` bytes;
 * SLOTS_NAME_BYTES are enough. Returns 0 or a negative code. */
int save_pool_of_path(struct ioshape_context *context, const char *path, char *name, size_t bytes);

/* Lua script with the rules of pools, which Redis runs, and its SHA-1 (slots/slots.lua). */
extern const char slots_script[];
extern const char slots_script_sha1[];

/* ---- Probe: the storage below a path, and how a save would use it (save/probe.c) ------------- */

enum { PROBE_TARGETS = 64 };

/* One storage target. */
struct save_probe_target {
	char name[64];
	uint64_t total_bytes, free_bytes;
};

/* Result of a probe. The members are the attributes of ioshape.types.Storage in Python, which
 * documents them. */
struct save_probe {
	char directory[4096];
	char family[32];
	char type[32];
	char source[512];
	char mount_point[256];
	char options[512];
	uint64_t total_bytes, free_bytes;
	uint32_t memory_alignment, offset_alignment;
	int direct; /* 0 or 1; -1 if unknown */
	bool remote;
	uint32_t target_count;
	uint32_t targets_listed;
	struct save_probe_target targets[PROBE_TARGETS];
	char stripes[256];
	uint64_t stripe_bytes;
	int64_t stripe_count; /* -1 in stripe counts means all targets */
	uint32_t mirrors;
	char target_pool[64];
	bool is_file;
	char file_stripes[256];
	uint64_t for_bytes;
	char engine[32];
	char choice[160];
	uint64_t block_bytes;
	uint32_t queue_depth;
	int uring_errno;
	char engine_note[512];
	char stripes_asked[256];
	char stripes_why[256];
	char pool[SLOTS_NAME_BYTES];
	uint32_t writers;
	char writers_why[256];
};

/*
 * Describes the directory of a path, or the path itself if it is a directory. Also describes what a
 * save of a file of `bytes` bytes (0: 4 GiB) would do there. `files` is the number of files that
 * are written at the same time; 0 if unknown. The call writes no data. At most it opens an empty
 * unnamed file for a moment. Returns 0 or a negative code.
 */
int save_probe_path(struct ioshape_context *context, const char *path, uint64_t bytes,
		    uint32_t files, struct save_probe *found);

/* ---- One row of the table of settings (base/settings.def) ------------------------------------ */

/* A setting, as Python lists it. */
struct base_setting_row {
	const char *name, *owner, *kind, *words;
	uint64_t least, most;
	const char *values, *otherwise, *about, *user;
};

#endif
