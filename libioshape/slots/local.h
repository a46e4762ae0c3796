/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One host without a server: the state of a pool lies in a file that the processes change in turn.
 *
 *     ioshape-POOL-HASH.slots    in /dev/shm, or /tmp, or the folder that the address names
 *     ioshape-HASH-NUMBER.wake   FIFOs of those that wait
 *
 * Anybody may write to these files, so nothing in them is believed: the file is never mapped (who
 * shortened it would end us by SIGBUS), a state is checked before it is used, links are not
 * followed, and no lock is waited for without an end.
 *
 * The file begins with two pages' halves, each a header with as much behind it as fits; a larger
 * state's members and jobs lie in one of two areas further on. A state is written where the older
 * of the two lies, so that the newer one holds until the write is complete.
 *
 * Who changes the state has the whole file locked by flock(). Who takes part in the pool has a
 * POSIX lock on a byte of its own, its number: it ends with the process, children do not inherit
 * it, and it holds between containers that share the file. But closing any descriptor of a file
 * drops all POSIX locks on it that the process has: so a process opens each file once.
 */
#ifndef SLOTS_LOCAL_H
#define SLOTS_LOCAL_H

#include "slots/rules.h"

#include <stdatomic.h>
#include <sys/stat.h>

#define LOCAL_NUMBERS 4096u /* processes that take part, times the pools that each has opened */
#define LOCAL_FILE_NAME_BYTES 160
#define LOCAL_HALF_BYTES 2048u

#define LOCAL_MAGIC "ioslots"
#define LOCAL_VERSION 1u
#define LOCAL_GONE 1u /* flag: the file is being removed; look for the name anew */

struct local_header {
	char magic[8];
	uint32_t version;
	uint32_t crc; /* of all that follows, members and jobs included */
	uint64_t seq; /* of two that hold the higher one counts */
	uint32_t flags;
	uint32_t member_count;
	uint32_t job_count;
	uint32_t unused;
	int64_t ahead_ms; /* of the clock: time went on where the clock was set back */
	char pool[SLOTS_NAME_BYTES];
	struct rules_numbers numbers;
};

#define LOCAL_INLINE_BYTES (LOCAL_HALF_BYTES - sizeof(struct local_header))

union local_half {
	struct local_header header;
	uint8_t bytes[LOCAL_HALF_BYTES];
};

/* One file in this process, shared by all pools that use it. */
struct local_file {
	struct local_file *next;
	unsigned references; /* under the lock of the list */
	char folder[512];
	char name[LOCAL_FILE_NAME_BYTES];
	char pool[SLOTS_NAME_BYTES];
	uint64_t hash; /* of the pool's name */
	struct base_log log;
	int folder_fd;
	dev_t folder_dev;
	ino_t folder_ino;

	pthread_mutex_t lock; /* of all below */
	int fd;               /* -1: not open */
	dev_t dev;
	ino_t ino;
	uint64_t opened; /* how many times: numbers of an earlier file are worth nothing */
	int64_t looked;  /* host's clock when the name was last seen to be this file's */
	uint64_t impatient_until_ns;      /* somebody kept the lock: not everyone waits for him */
	uint64_t own[LOCAL_NUMBERS / 64]; /* numbers that pools of this process have */

	/* What was read or written last. */
	uint64_t seq; /* of what is in memory; 0: nothing that counts */
	int64_t ahead_ms;
	uint64_t latest_fence, latest_epoch;
	struct rules_state *state;
	union local_half halves[2]; /* the file's first page */
};

struct local_pool {
	struct slots_config config;
	const char *folder; /* NULL: the default */
	_Atomic(struct local_file *) file;
	uint64_t opened; /* of the file when the number was taken; 0: it has none. Its lock. */
	uint32_t number;
	int interrupt;        /* eventfd */
	_Atomic int fifo;     /* -1: none yet */
	uint64_t fifo_opened; /* of the file when it was made */
	unsigned hasty;       /* waits in a row that ended at once; of the thread that waits */
};

/* ---- Files (local_file.c) -------------------------------------------------------------------- */

/* The name of a pool's file: the same in every process. */
void local_file_name(char name[LOCAL_FILE_NAME_BYTES], const char *pool);
/* Finds the pool's file, or prepares it: local_enter() opens it. IOSHAPE_E_COORDINATOR. */
int local_file_get(struct local_file **out, const struct local_pool *pool,
		   struct base_error *error);
void local_file_put(struct local_file *file);
/* Whether one pool only uses it. */
bool local_file_is_last(const struct local_file *file);
/* Meanwhile this process neither opens nor closes files of pools. */
void local_files_hold(void);
void local_files_go_on(void);
/* Of those: the one that is open here, if one is. To close another descriptor of it would drop all
 * its locks. */
struct local_file *local_files_find(const struct stat *stat);

/*
 * Has the file to itself, with its state read, until local_leave(). *now is the clock that the
 * pool goes by.
 */
int local_enter(struct local_file *file, int64_t *now, struct base_error *error);
/* Writes the state, if it was changed, and lets others in. */
int local_leave(struct local_file *file, bool changed, struct base_error *error);

/* Instead of that: removes the file. Nobody else takes part in it. */
void local_retire(struct local_file *file);

/* ---- States in files (local_state.c) --------------------------------------------------------- */

/* Empty: nothing was ever written. Removed: somebody unlinks the file, or died while he did. */
enum local_found { LOCAL_FOUND, LOCAL_EMPTY, LOCAL_DAMAGED, LOCAL_REMOVED };

/* Reads the newest state that holds into file->state. enum local_found, or a negative errno. */
int local_read(struct local_file *file);
/* 0 or a negative errno. */
int local_write(struct local_file *file, uint32_t flags);
/* The newest header in a file's first page that seems to be one; false if there is none. */
bool local_peek(const union local_half halves[2], struct local_header *header);

/* For others that have the file open: it is about to be removed. 0 or a negative errno. */
int local_write_gone(int fd, const struct local_header *latest);

/* ---- Who is alive (local_alive.c) ------------------------------------------------------------ */

/* All inside of local_enter(). Takes a number for the pool, if it has none. */
int local_take_number(struct local_pool *pool, struct local_file *file, int64_t now,
		      struct base_error *error);
void local_drop_number(struct local_pool *pool, struct local_file *file);
/* What dead processes held is given to the next. True if there was one. */
bool local_bury_dead(struct local_file *file, int64_t now);
/* Whether any other process takes part. */
bool local_others(int fd);

/* Tries to lock the whole file. 0 or a negative errno. */
int local_lock(int fd);
/* Who has it locked, for the sentence; 0 if that cannot be seen. */
pid_t local_locker(const struct local_file *file);

/* ---- Waking (local_wake.c) ------------------------------------------------------------------- */

/* Before the first request waits: others find the FIFO by its name. Without one only time wakes. */
void local_expect_wake(struct local_pool *pool, struct local_file *file);
void local_end_wake(struct local_pool *pool, struct local_file *file);
void local_wake(struct local_file *file, const uint32_t *numbers, uint32_t count);
/* The FIFO of one that died. */
void local_remove_fifo(struct local_file *file, uint32_t number);
int local_wait(struct local_pool *pool, uint32_t timeout_ms, struct base_error *error);

/* ---- All pools of a folder (local_names.c) --------------------------------------------------- */

/* FIFOs of a pool in which nobody takes part. */
void local_remove_fifos(int folder_fd, uint64_t hash);

/* /dev/shm, or where that cannot be written /tmp, or what the address says. */
const char *local_folder(const struct local_pool *pool);

int local_names(void *pool, struct base_buffer *names, struct base_error *error);

#endif
