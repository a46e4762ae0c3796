/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One host without a server: a pool is a queue in a file.
 *
 *     ioshape-POOL-HASH.v3.slots    in /dev/shm, or /tmp, or the folder that the address names
 *
 * The file is a table of members, each of which holds a slot or waits for one. Whoever changes the
 * table has the whole file locked by flock(), and first lets those in that fit. Nothing in the
 * table is a sum of something else in it, so that every member is true by itself: a process that is
 * killed between two writes leaves a table that only waits for the next one to look.
 *
 * A process that takes part has a POSIX lock on a byte of its own, its number: the kernel drops it
 * when the process ends, children do not inherit it, and it holds between containers that share the
 * file. A member whose number is not locked is dead. But closing any descriptor of a file drops all
 * POSIX locks on it that the process has: so a process opens each file once.
 *
 * Anybody may write to these files, so nothing in them is believed: the file is never mapped
 * (whoever shortened it would end us by SIGBUS), each record is checked before it is used, links
 * are not followed, and no lock is waited for without an end.
 *
 * The version is part of the names: processes of two versions have a queue each.
 */
#ifndef SLOTS_LOCAL_H
#define SLOTS_LOCAL_H

#include "slots/slots.h"

#include <stdatomic.h>
#include <sys/stat.h>

#define LOCAL_NUMBERS 4096u /* processes that take part, times the pools that each has opened */
#define LOCAL_FILE_NAME_BYTES 160

/* ---- The table (local_table.c) --------------------------------------------------------------- */

#define LOCAL_MAGIC "ioslots"
#define LOCAL_VERSION BASE_FORMAT(3u) /* also in the names of files */
#define LOCAL_GONE 1u                 /* flag: the file is being removed; look for the name again */

#define LOCAL_PAGE_BYTES 4096u
/* In the first page, and further on. */
#define LOCAL_FIRST_JOBS 12u
#define LOCAL_FIRST_MEMBERS 8u
#define LOCAL_MORE_JOBS 24u
#define LOCAL_MORE_MEMBERS 1024u
/* Jobs are remembered; the one that was seen least lately is replaced. */
#define LOCAL_JOBS (LOCAL_FIRST_JOBS + LOCAL_MORE_JOBS)
/* Members hold or wait. */
#define LOCAL_MEMBERS (LOCAL_FIRST_MEMBERS + LOCAL_MORE_MEMBERS)
#define LOCAL_WOKEN 64u /* grants in one operation */

/* What the pool is, whoever takes part. All times are CLOCK_MONOTONIC's. All records are shared by
 * programs of 32 and 64 bits: no type without a fixed width, no padding. */
struct local_head {
	char magic[8];
	uint32_t version;
	uint32_t flags;
	char pool[SLOTS_NAME_BYTES];
	uint64_t fence; /* the last one given */
	uint64_t seq;   /* of the last request */
	uint64_t unused_tag;
	uint64_t grants;
	uint64_t free_ns; /* when the pool's bandwidth is free again */
	uint64_t set_pool_rate;
	uint64_t set_job_rate;
	uint64_t set_small_bytes;
	uint64_t minute; /* which one this is */
	uint32_t this_minute;
	uint32_t last_minute; /* grants in them */
	uint32_t set_capacity;
	uint32_t set_express;
	uint32_t capacity;   /* as jobs ask for it, or the rule's */
	uint32_t by_job;     /* 1: a job did; 0: it is the rule's */
	uint32_t member_end; /* records from here on are not used */
	uint32_t job_end;
	uint32_t turn; /* the place that was given last */
	uint32_t unused_number;
	uint64_t set_ms; /* when an operator last set something, since 1970 */
	char unused[248];
};

struct local_job {
	char name[SLOTS_TEXT_BYTES];
	char user[24];    /* of its latest request */
	uint64_t tag;     /* by shares, of its request that was let in last */
	uint64_t written; /* bytes, in these */
	uint64_t writes;  /* slots that it gave back, or lost */
	uint64_t free_ns; /* when its bandwidth is free again */
	uint64_t seen;    /* its latest request's seq */
};

enum local_state { LOCAL_FREE, LOCAL_WAITING, LOCAL_HOLDING };

struct local_member {
	char id[SLOTS_ID_BYTES];
	char job[SLOTS_TEXT_BYTES];
	char node[SLOTS_TEXT_BYTES];
	uint64_t bytes;
	uint64_t passed;
	uint64_t fence;
	uint64_t tag;         /* the queue is in this order (0: urgent) ... */
	uint64_t seq;         /* ... and of those alike in this one */
	uint64_t since_ns;    /* it holds, or waits */
	uint64_t deadline_ns; /* without a heartbeat it is taken for dead then */
	uint32_t state;       /* enum local_state */
	uint32_t rank;
	uint32_t weight; /* asked for */
	uint32_t given;  /* 0: express */
	uint32_t lease_ms;
	uint32_t process; /* its number */
	uint16_t small;   /* 1: may be let past the queue */
	uint8_t places;   /* as in slots.lua: so many ... */
	uint8_t place;    /* ... and a holder's, from 1 on; 0: none */
	uint32_t wake;    /* where its process listens for a grant; 0: nowhere */
};

/* The file. A pool with few jobs and members needs the first page alone. */
struct local_image {
	struct local_head head;
	struct local_job first_jobs[LOCAL_FIRST_JOBS];
	struct local_member first_members[LOCAL_FIRST_MEMBERS];
	struct local_job more_jobs[LOCAL_MORE_JOBS];
	char unused[1024];
	struct local_member more_members[LOCAL_MORE_MEMBERS];
};

#define LOCAL_PAGES (sizeof(struct local_image) / LOCAL_PAGE_BYTES)

struct local_table {
	uint64_t now_ns;  /* during an operation */
	uint64_t wall_ms; /* since 1970 */
	uint64_t latest_fence;
	uint32_t woken_count;
	uint32_t woken[LOCAL_WOKEN]; /* where those listen that waited and were let in */
	bool changed[LOCAL_PAGES];
	size_t changed_end; /* no page from here on was */
	union {
		struct local_image image;
		uint8_t bytes[sizeof(struct local_image)];
	};
};

struct local_job *local_job(struct local_table *table, uint32_t index);
struct local_member *local_member(struct local_table *table, uint32_t index);
/* A record was changed, and is to be written. */
void local_changed(struct local_table *table, const void *record);

/* An empty pool. */
void local_clear(struct local_table *table, const char *pool);

/* Empty: nothing was ever written. Removed: somebody unlinks the file, or died meanwhile. Damaged:
 * all of it, or a record that was dropped. */
enum local_found { LOCAL_FOUND, LOCAL_EMPTY, LOCAL_DAMAGED, LOCAL_RECORD_DAMAGED, LOCAL_REMOVED };

/* Reads the file. enum local_found, or a negative errno. `now_ns` and `wall_ms` are set. */
int local_read(struct local_table *table, int fd, const char *pool);
/* Writes what was changed. 0 or a negative errno. */
int local_write(struct local_table *table, int fd);
/* The head alone, read without a lock. */
bool local_read_head(int fd, struct local_head *head);
/* For others that have the file open: it is about to be removed. 0 or a negative errno. */
int local_write_gone(int fd, const struct local_head *latest);

/* ---- The queue (local_queue.c) --------------------------------------------------------------- */

/* Operations on a table that was read. Pure: no memory is allocated, nothing read or written. */

/* -ENOSPC if the pool is full. */
int local_queue_acquire(struct local_table *table, const struct slots_config *config,
			const struct slots_request *request, uint32_t process, uint32_t wake,
			struct slots_answer *answer);
void local_queue_beat(struct local_table *table, const struct slots_config *config,
		      const struct slots_beat *beat, struct slots_answer *answer);
/* False if there is no such member. */
bool local_queue_release(struct local_table *table, const char *id, uint64_t passed);
bool local_queue_kick(struct local_table *table, const char *id);
/* Finds it, or replaces the one that was seen least lately. */
struct local_job *local_job_named(struct local_table *table, const char *name);
void local_queue_set(struct local_table *table, const struct ioshape_pool_settings *settings);
/* All that this process held and waited for is forgotten. */
void local_queue_bury(struct local_table *table, uint32_t process);
/* Processes that would have to be dead for the queue to move: those of the holders, and of the
 * first that waits, if there is one. Fills in up to `room`, each once, and says how many. */
uint32_t local_queue_in_the_way(struct local_table *table, uint32_t *processes, uint32_t room);
/* Whether the operator has set anything. */
bool local_is_set(const struct local_head *head);

struct local_usage {
	uint64_t used; /* slots, by weight */
	uint32_t holders, waiters, express;
};

/* What every operation begins with: members whose time is over go, those that fit come in. */
void local_tick(struct local_table *table);
struct local_usage local_count(struct local_table *table);
/* It has a deadline: no tag of others is so low. */
bool local_is_urgent(const struct local_member *member);
/* Waiters in the order of the queue, holders in that of their grants: the one after `last`, which
 * is NULL to begin with. */
struct local_member *local_next(struct local_table *table, enum local_state state,
				const struct local_member *last);
uint64_t local_small_bytes(const struct local_head *head);
uint32_t local_express(const struct local_head *head);

/* ---- Bandwidth (local_pace.c) ---------------------------------------------------------------- */

/*
 * `wanted` above 0: a share of the bandwidth, at least so many bytes, from when pool and job have
 * it free again. Below 0: so much of the last share comes back. It was the last one that was given,
 * unless others came after it; then nobody loses.
 */
void local_queue_pace(struct local_table *table, const struct slots_config *config, int64_t wanted,
		      struct slots_grant *grant);
/* What was given in advance at a rate that the operator has replaced is owed by nobody. */
void local_forget_paces(struct local_table *table);

/* ---- How many may write (local_capacity.c) --------------------------------------------------- */

uint32_t local_capacity(const struct local_head *head);
/* Takes what the job asks for that finds the pool empty, or its rule's number. */
void local_choose_capacity(struct local_table *table, const struct slots_config *config,
			   const struct slots_request *request);

/* ---- Status (local_status.c) ----------------------------------------------------------------- */

/* `usual` is the capacity where nobody asked for one. */
void local_status(struct local_table *table, uint32_t usual, struct ioshape_pool_status *status);

/* ---- Files (local_file.c) -------------------------------------------------------------------- */

/* One file in this process, shared by all pools that use it. */
struct local_file {
	struct local_file *next;
	unsigned references; /* under the lock of the list */
	char folder[512];
	char name[LOCAL_FILE_NAME_BYTES];
	char pool[SLOTS_NAME_BYTES];
	struct base_log log;
	int folder_fd;
	dev_t folder_dev;
	ino_t folder_ino;

	pthread_mutex_t lock; /* of all below */
	int fd;               /* -1: not open */
	dev_t dev;
	ino_t ino;
	uint64_t opened;    /* how many times: numbers of an earlier file are worth nothing */
	uint64_t looked_ns; /* when the name was last seen to be this file's */
	uint64_t impatient_until_ns;      /* somebody kept the lock: not everyone waits for that */
	uint64_t own[LOCAL_NUMBERS / 64]; /* numbers that pools of this process have */
	struct local_table *table;
};

struct local_pool {
	struct slots_config config;
	const char *folder; /* NULL: the default */
	_Atomic(struct local_file *) file;
	uint64_t opened; /* of the file when the number was taken; 0: it has none. Its lock. */
	uint32_t number;
	int interrupt;  /* eventfd */
	int wake_fd;    /* a socket; -1: none could be had */
	uint32_t wake;  /* its name; 0: none */
	unsigned hasty; /* waits in a row that ended at once; of the thread that waits */
};

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

/* Has the file to itself, with its table read, until local_leave(). */
int local_enter(struct local_file *file, struct base_error *error);
/* Writes what was changed, and lets others in. */
int local_leave(struct local_file *file, struct base_error *error);
/* Instead of that: removes the file. Nobody else takes part in it. */
void local_retire(struct local_file *file);

/* ---- Who is alive (local_alive.c) ------------------------------------------------------------ */

/* All inside of local_enter(). Takes a number for the pool, if it has none. */
int local_take_number(struct local_pool *pool, struct local_file *file, struct base_error *error);
void local_drop_number(struct local_pool *pool, struct local_file *file);
/* What dead processes held is given to the next. True if there was one. */
bool local_bury_dead(struct local_file *file);
/* Whether any other process takes part. */
bool local_others(int fd);

/* Tries to lock the whole file. 0 or a negative errno. */
int local_lock(int fd);
/* Who has it locked, for the sentence; 0 if that cannot be seen. */
pid_t local_locker(const struct local_file *file);

/* ---- Waking (local_wake.c) ------------------------------------------------------------------- */

void local_open_wake(struct local_pool *pool);
void local_wake(const uint32_t *wakes, uint32_t count);
int local_wait(void *pool, uint32_t timeout_ms, struct base_error *error);

/* ---- All pools of a folder (local_names.c) --------------------------------------------------- */

/* /dev/shm, or where that cannot be written /tmp, or what the address says. */
const char *local_folder(const struct local_pool *pool);

int local_names(void *pool, struct base_buffer *names, struct base_error *error);

#endif
