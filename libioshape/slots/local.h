/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One host without a server: a pool is a file, and locks on bytes of that file say which requests
 * hold a slot and which wait.
 *
 *     ioshape-POOL-HASH.v4.slots    in /dev/shm, or /tmp, or the folder that the address names
 *
 * Each request has an open file description of its own, which owns its locks (F_OFD_SETLK). So
 * threads of a process exclude each other as processes do, a child of fork() inherits no lock, and
 * the kernel frees the slot and the ticket of a process that ends in any way.
 *
 * Bytes that are locked, from LOCAL_LOCKS on:
 *
 *     PRESENT         shared, by each process that has the pool open. The process that closes a
 *                     pool last gets it exclusively, and may remove the file.
 *     MAKER           while the head of the file is written.
 *     holder i        0: a small request beside the slots. From 1 on: the slots of the pool. The
 *                     last one: a request with a deadline in advance of a slot.
 *     urgent line     one byte for the ticket of each waiter that has a deadline,
 *     line            for the ticket of each other waiter,
 *     small line      and, with the same number, for each of these that is small.
 *
 * To ask: a request locks any free slot if no request waits and no slot above the capacity is
 * locked. Otherwise the request takes a ticket: the byte above all that are locked in its line.
 *
 * To look: a waiter is first if no byte below its ticket is locked in its line; the urgent line is
 * before the other one. The first waiter counts the slots that are locked, locks as many as it
 * needs if they are free, writes their records, and gives its ticket back. The first small waiter
 * may lock holder 0 instead. The first urgent waiter may lock one slot more than there are, by the
 * last holder.
 *
 * To release: a request drops all its locks at once. No lock is ever waited for.
 *
 * Contents of the file: a head, a record for each holder, and a ring of records for each line. A
 * record says which request has the lock, for people, and until when the request is taken to be
 * alive. A process that is stopped keeps its locks. So a holder that does not renew its record for
 * a lease, or a waiter for LOCAL_LOOK_NS, is passed over: its locks do not count. A process passes
 * a record over only after it has seen the record unchanged for LOCAL_SURE_NS, because its owner
 * may be about to write it. A holder that was passed over learns from its own clock that its lease
 * is over.
 *
 * The head has a futex word. A process that frees a slot or a ticket while others wait adds 1 and
 * wakes those that are next: the first one in the line, and the first small one. A waiter listens
 * to one of 32 bits, by its ticket, so that hundreds that wait do not all wake at each release. The
 * kernel frees locks of the dead silently, so waiters also look by themselves: the first one every
 * 20 ms.
 *
 * Other users may write to the file. The memory of its first page is only passed to futex(), which
 * fails where a load would raise SIGBUS because the file was cut short. Forged contents can make
 * a holder be passed over, so that more write than there are slots; they do nothing worse. Links
 * are not followed.
 */
#ifndef SLOTS_LOCAL_H
#define SLOTS_LOCAL_H

#include "slots/slots.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>

#define LOCAL_MAGIC "ioslots"
#define LOCAL_VERSION BASE_FORMAT(4u) /* also in the names of files */

#define LOCAL_SLOTS 1000u /* of a pool, at most */
#define LOCAL_SPARE 8u    /* descriptors that are kept for the next requests */

/* Bytes from here on are locked. */
#define LOCAL_LOCKS (INT64_C(1) << 40)
/* Another user may lock any bytes, of which the kernel looks at all each time: so often in one
 * call. */
#define LOCAL_MOST_FINDS 4096u

/* Holders by number. */
#define LOCAL_SMALL 0u
#define LOCAL_FIRST_SLOT 1u
#define LOCAL_URGENT (LOCAL_FIRST_SLOT + LOCAL_SLOTS)
#define LOCAL_HOLDERS (LOCAL_URGENT + 1)

/* A waiter that has not looked for so long is passed over, until it looks again. */
#define LOCAL_LOOK_NS UINT64_C(1000000000)
/* So long a record must stay unchanged before it is believed that its owner shows no life. */
#define LOCAL_SURE_NS UINT64_C(1000000000)

/* Records by number: holders, then the ring of the urgent line, then that of the other one. */
#define LOCAL_RECORDS (LOCAL_HOLDERS + 2 * LOCAL_WAITERS)

/* What this process has seen of a record, while it waits. */
struct local_watch {
	uint64_t until_ns;  /* in the record */
	uint64_t since_ns;  /* it has been so */
	uint64_t looked_ns; /* last */
};

/* A request of this process that holds or waits. */
struct local_member {
	struct local_member *next;
	struct slots_file_record record;
	int fd; /* owns its locks */
	bool holding, small;
	uint32_t places; /* as asked for */
	uint32_t holder; /* its first one */
	uint32_t given;  /* slots; 0: beside them, being small */
	uint64_t ticket; /* waiter */
};

struct local_pool {
	struct slots_config config;
	char folder[LOCAL_FOLDER_BYTES];
	char name[LOCAL_FILE_NAME_BYTES];
	struct slots_file_record record; /* what all requests of this process have in common */

	pthread_mutex_t lock; /* of all below, but for what waiting takes */
	int folder_fd, fd;    /* -1: not open */
	dev_t dev;
	ino_t ino;
	uint64_t now_ns;        /* when this call began */
	uint64_t looked_ns;     /* when the name was last seen to be this file's */
	uint64_t largest_bytes; /* that a file of this process may have */
	uint64_t base_ns;       /* as in the head */
	uint64_t fence;         /* the latest that this process was given */
	uint32_t turn;          /* of slots: where the next request begins to look */
	unsigned finds;         /* of locks, in this call */
	struct local_member *members;
	int spare[LOCAL_SPARE];
	unsigned spares;
	struct local_watch watches[LOCAL_RECORDS];

	uint32_t *word;       /* the futex word; until the file is mapped, one of this process */
	atomic_bool mapped;   /* from the file */
	atomic_uint listened; /* wake-up bits that the thread which waits listens to */
	uint32_t seen;        /* its value before the latest looks; of the thread that waits */
};

/* ---- The file (local_file.c) ----------------------------------------------------------------- */

/* Writes the name of a pool's file, which is the same in every process. */
void local_file_name(char name[LOCAL_FILE_NAME_BYTES], const char *pool);
/* Fails with IOSHAPE_E_COORDINATOR: "cannot WHAT the pool's file ...", for this reason. */
int local_unreachable(const struct local_pool *pool, const char *what, int code,
		      struct base_error *error);
/* Opens no file yet. 0 or a negative errno. */
int local_file_init(struct local_pool *pool);
/* Opens the file, if it is not open, and reads its head. -ESTALE: another file has its name by now,
 * and this one is closed; IOSHAPE_E_COORDINATOR. */
int local_file_ready(struct local_pool *pool, struct slots_file_head *head,
		     struct base_error *error);
/* Returns a descriptor for a request, or a negative errno. */
int local_file_again(const struct local_pool *pool);
/* Closes the file, and removes it where no process has it open. */
void local_file_close(struct local_pool *pool);

/* Writes a field of the head, or a record. 0 or a negative errno. */
int local_write(const struct local_pool *pool, uint64_t at, const void *data, size_t bytes);
int local_write_record(const struct local_pool *pool, uint32_t number,
		       const struct slots_file_record *record);
/* Reads a record. What is not there reads as zeros, and texts have an end. */
void local_read_record(const struct local_pool *pool, uint32_t number,
		       struct slots_file_record *record);

/* Locks or unlocks a range; 0 bytes mean all from there on. -EAGAIN: another request has it. */
int local_lock(int fd, short type, off_t at, off_t bytes);
/* Finds a lock in a range, the oldest one as a rule. */
bool local_find_lock(struct local_pool *pool, off_t from, off_t to, struct flock *lock);

/* Wakes the processes that sleep in this pool and listen to one of these bits, and ends the next
 * sleep of those that do not sleep. */
void local_wake(struct local_pool *pool, uint32_t bits);
/* Sleeps until one of these bits is woken, or for a time. */
void local_sleep(struct local_pool *pool, uint32_t bits, uint32_t timeout_ms);

#endif
