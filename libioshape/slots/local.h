/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator for one host, without a server. A pool is a file, and locks on bytes of that file
 * say which requests hold a slot and which wait.
 *
 *     ioshape-POOL-HASH.v5.slots    in /dev/shm, in /tmp, or in the folder that the address names
 *
 * Each request has an open file description of its own, which owns its locks (F_OFD_SETLK). So
 * threads of a process exclude each other as processes do, and a child of fork() inherits no lock.
 * The kernel frees the slot and the ticket of a process that ends in any way.
 *
 * These bytes are locked, from LOCAL_LOCKS on:
 *
 *     PRESENT         A shared lock of each process that has the pool open. The process that closes
 *                     a pool last gets an exclusive lock, and may remove the file.
 *     MAKER           Locked while the head of the file is written.
 *     holder i        0: a small request that writes beside the slots. From 1 on: the slots of the
 *                     pool. The last one: a request with a deadline, in advance of a slot.
 *     urgent line     One byte for the ticket of each waiter that has a deadline.
 *     line            One byte for the ticket of each other waiter.
 *     small line      One byte for each small waiter of the line, with the number of its ticket.
 *
 * Ask: If no request waits and no slot above the capacity is locked, a request for one slot tries
 * to lock the next slot in turn. If it gets none, it takes a ticket: the byte above all that are
 * locked in its line. Then it changes the mark in the head, which each request reads when it
 * begins: while the mark stays, no request has begun to wait.
 *
 * Look: A waiter is first if no byte below its ticket is locked in its line. The urgent line goes
 * before the other one. The first waiter counts the locked slots. If enough are free it locks as
 * many as it needs, writes their records, and gives its ticket back. The first small waiter may
 * lock holder 0 instead. The first urgent waiter may exceed the capacity by one, by locking the
 * last holder.
 *
 * Release: The request drops all its locks at once. No process ever waits for a lock.
 *
 * The file contains a head, a record for each holder, and a ring of records for each line. A record
 * names the request that has the lock, for operators, and the time until which the request counts
 * as alive. A stopped process keeps its locks. So other requests ignore the locks of a holder that
 * has not renewed its record for a lease, and of a waiter that has not renewed it for
 * LOCAL_LOOK_NS. A process ignores them only after it has seen the record unchanged for
 * LOCAL_SURE_NS, because the owner may be about to write it. A holder that is ignored learns from
 * its own clock that its lease is over.
 *
 * The head has a futex word. A process that frees a slot or a ticket while others wait adds 1 to
 * it. It then wakes the first waiter of the line and the first small one. Each waiter listens to
 * one of 32 bits, chosen by its ticket, so that a release does not wake hundreds of waiters. The
 * kernel frees locks of dead processes without a wake-up, so waiters also poll; the first one polls
 * every 20 ms.
 *
 * Other users may write to the file. Memory that maps its first page is only passed to futex(). If
 * the file was cut short, futex() fails where a load would raise SIGBUS. Forged contents can at
 * most make requests ignore a holder, so that more write than there are slots. Symbolic links are
 * not followed.
 */
#ifndef SLOTS_LOCAL_H
#define SLOTS_LOCAL_H

#include "slots/slots.h"

#define LOCAL_MAGIC "ioslots"
#define LOCAL_VERSION BASE_FORMAT(5u) /* also part of the name of the file */

#define LOCAL_SLOTS 1000u /* largest number of slots of a pool */
#define LOCAL_SPARE 8u    /* open descriptors that are kept for later requests */

/* First byte that is locked. */
#define LOCAL_LOCKS (INT64_C(1) << 40)
/* Look-ups of locks in one call. Another user may lock any number of bytes, and the kernel walks
 * through all of them at each look-up. */
#define LOCAL_MOST_FINDS 4096u

/* Numbers of holders. */
#define LOCAL_SMALL 0u
#define LOCAL_FIRST_SLOT 1u
#define LOCAL_URGENT (LOCAL_FIRST_SLOT + LOCAL_SLOTS)
#define LOCAL_HOLDERS (LOCAL_URGENT + 1)

/* A waiter that has not renewed its record for so long is ignored, until it renews it again. */
#define LOCAL_LOOK_NS UINT64_C(1000000000)
/* A record must stay unchanged for so long before its owner counts as dead or stopped. */
#define LOCAL_SURE_NS UINT64_C(1000000000)

/* Number of records: those of holders, then the ring of the urgent line, then that of the other
 * line. */
#define LOCAL_RECORDS (LOCAL_HOLDERS + 2 * LOCAL_WAITERS)

/* Writes the name of a pool's file. All processes derive the same name. */
void local_file_name(char name[LOCAL_FILE_NAME_BYTES], const char *pool);

#endif
