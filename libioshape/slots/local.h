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

/* Write the name of a pool's file, which is the same in every process. */
void local_file_name(char name[LOCAL_FILE_NAME_BYTES], const char *pool);

#endif
