/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between two processes of one user on one host, over a Unix socket that keeps them apart
 * (SOCK_SEQPACKET). It has a name in the folder of place.h. Private to this floor.
 */
#ifndef GATHER_LOCAL_LINK_H
#define GATHER_LOCAL_LINK_H

#include "gather/stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Bytes that travel within a message: more would not fit into a small socket buffer. */
#define LOCAL_INLINE_BYTES (64 * KIB)
/* One reference: how finely the sender learns what has been taken. */
#define LOCAL_REFERENCE_BYTES (8 * MIB)
/* How far a sender may be ahead of what was taken. */
#define LOCAL_AHEAD_BYTES (64 * MIB)
/* The receiver says what it has taken this often, and whenever it has nothing to do. */
#define LOCAL_TELL_BYTES (4 * MIB)

#define LOCAL_SOCKET_MARK "stream-"

#define LOCAL_MAGIC UINT64_C(0x32656d6165727473) /* "stream" and the version of what follows */

enum local_kind {
	/* From the sender. */
	LOCAL_HELLO = 1, /* a: LOCAL_MAGIC; b: rank; with the fd of its memory, if any */
	LOCAL_BYTES,     /* they follow */
	LOCAL_REFERENCE, /* a: offset in the memory; b: bytes; crc32: of them */
	LOCAL_END,       /* a: bytes in all; b: checksum */
	LOCAL_FAIL,      /* a text follows */
	/* From the receiver. */
	LOCAL_TAKEN, /* a: bytes in all */
	LOCAL_DONE,  /* everything was taken, the end was seen */
	LOCAL_STOP,  /* a text follows */
};

/* Before each message; one host, so the machine's own numbers. */
struct local_head {
	uint32_t kind;
	uint32_t crc32;
	uint64_t a, b;
};

struct local_link {
	int fd;
	int process_fd; /* ready when the other process has ended; -1 if the kernel has no such */
	pid_t pid;      /* of the other side; 0 if it is not to be seen from here */
};

/* Where the socket of this name is. -EINVAL if the name is none. */
int local_address(struct sockaddr_un *to, const char *address, struct base_error *error);
/* Takes over a connected socket, also where it fails. -EPERM: it is somebody else's process. */
int local_link_take(struct local_link *link, int fd);
/* Nothing is sent after it, also if a forked child has the socket. */
void local_link_close(struct local_link *link);
/*
 * -EAGAIN: not now. -ECONNRESET: the other side has closed, or its process has ended. fd: passed
 * along; -1 for none.
 */
int local_link_send(struct local_link *link, const struct local_head *head, const void *data,
		    size_t bytes, int fd);
/* Besides: -EPROTO. *bytes are those after the head. fd: NULL refuses any; *fd is -1 if there is
 * none. */
int local_link_receive(struct local_link *link, struct local_head *head, void *into, size_t room,
		       size_t *bytes, int *fd);
/* Waits a little for these events, or for the end of the other side; then asks go_on. */
int local_link_wait(const struct local_link *link, short events, const struct gather_wait *wait,
		    struct base_error *error);

/* A connection that has said whose it is. The link and the fd are the caller's then. */
int listener_await(struct gather_listener *listener, uint32_t rank, struct local_link *link,
		   int *memory_fd, const struct gather_wait *wait, struct base_error *error);

#endif
