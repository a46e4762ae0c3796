/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams between two processes of one user on one host. Frames go over a Unix socket that keeps
 * message boundaries (SOCK_SEQPACKET); its name is in the folder where ranks meet in memory. The
 * bytes stay where they are: the sender passes the fd of its memory, and the receiver maps it.
 */
#define _GNU_SOURCE
#include "group/store.h"
#include "group/stream.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

/* Most bytes within a message: more would not fit into a small socket buffer. */
#define INLINE_BYTES (64 * KIB)
/* Most bytes that a sender may send beyond what was taken. */
#define AHEAD_BYTES (64 * MIB)
/* The receiver sends a credit after this many bytes, and whenever it has nothing else to do. */
#define TELL_BYTES (4 * MIB)
/* How long a failing sender tries to send its error to a receiver that does not read. */
#define LAST_WORDS_MS 200

/* Prefix of a socket's name, and of its name before it listens. */
#define SOCKET_MARK "stream-"
#define HIDDEN_MARK "." SOCKET_MARK
/* Most tries to listen: another listener that removes dead sockets may take ours for dead. */
#define MOST_TRIES 16

/* Time in which a connection must name its rank. Others wait meanwhile. */
#define SILENCE_MS 10000u

struct local_link {
	struct stream_link base;
	int fd;
	/* pidfd, readable when the other process has ended; -1 if the kernel has none. */
	int process_fd;
	pid_t pid; /* process id of the other side; 0 if it is in another pid namespace */
	bool sends;
	/* On the receiver: bytes released, and bytes of these in the last credit. */
	uint64_t released, told;
	uint8_t message[INLINE_BYTES]; /* data of the frame received last */
};

static const struct stream_link_ops local_ops;

/* ---- The socket's name ----------------------------------------------------------------------- */

static int find_address(struct sockaddr_un *to, const char *address, struct base_error *error)
{
	char folder[STORE_FOLDER_BYTES];
	size_t length;
	int ret;

	*to = (struct sockaddr_un){ .sun_family = AF_UNIX };
	if (!*address || strchr(address, '/'))
		return base_fail_reason(error, -EINVAL, "\"%s\" is not a valid name for a socket",
					address);
	ret = store_find_folder(folder, NULL, error);
	if (ret)
		return ret;
	length = (size_t)snprintf(to->sun_path, sizeof(to->sun_path), "%s/" SOCKET_MARK "%s",
				  folder, address);
	if (length >= sizeof(to->sun_path))
		return base_fail_reason(error, -EINVAL, "\"%s\" is too long a name for a socket",
					address);
	return 0;
}

/* ---- Sending and receiving messages ---------------------------------------------------------- */

/* Makes a link of a connected socket, which it owns from then on, even on failure. Returns NULL
 * after a failure; *code is -EPERM if the other process is another user's. */
static struct local_link *take_socket(int fd, bool sends, int *code)
{
	struct local_link *link = calloc(1, sizeof(*link));
	struct ucred other;
	socklen_t bytes = sizeof(other);

	fd = base_register_fd(fd);
	*code = 0;
	if (!link)
		*code = -ENOMEM;
	else if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &bytes))
		*code = -errno;
	else if (!base_is_own_user(other.uid))
		*code = -EPERM;
	if (*code) {
		base_close(fd);
		free(link);
		return NULL;
	}
	link->base.ops = &local_ops;
	link->base.last_words_ms = LAST_WORDS_MS;
	link->fd = fd;
	link->sends = sends;
	link->pid = other.pid;
	link->process_fd = -1;
	/* Watch the process, too: its children may have inherited the socket, which then stays
	 * open. */
#ifdef SYS_pidfd_open
	if (other.pid > 0)
		link->process_fd = base_register_fd((int)syscall(SYS_pidfd_open, other.pid, 0));
#endif
	return link;
}

/* Closes the link. shutdown() ends the connection even if a forked child has the socket. */
static void local_close(struct stream_link *base)
{
	struct local_link *link = (struct local_link *)base;

	shutdown(link->fd, SHUT_RDWR);
	base_close(link->fd);
	base_close(link->process_fd);
	free(link);
}

static bool has_ended(const struct local_link *link)
{
	struct pollfd process = { .fd = link->process_fd, .events = POLLIN };

	if (link->process_fd >= 0)
		return poll(&process, 1, 0) > 0;
	/* Before Linux 5.3 there are no pidfds. Then this is called when nothing has come for a
	 * while. */
	return link->pid > 0 && kill(link->pid, 0) && errno == ESRCH;
}

/* Sends a frame with its data, and passes `fd` along; -1: none. Returns -EAGAIN if that is not
 * possible now, and -ECONNRESET if the other side has closed or its process has ended. */
static int send_message(const struct local_link *link, const struct stream_frame *frame,
			const void *data, int fd)
{
	const size_t bytes = stream_has_data(frame) ? (size_t)frame->bytes : 0;
	uint8_t head[STREAM_FRAME_BYTES];
	struct iovec pieces[2] = { { head, sizeof(head) }, { NULL, bytes } };
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = pieces, .msg_iovlen = bytes ? 2 : 1 };
	ssize_t sent;

	stream_write_frame(head, frame);
	/* sendmsg() does not write to `data`, so dropping const is safe. */
	memcpy(&pieces[1].iov_base, &data, sizeof(data));
	if (fd >= 0) {
		message.msg_control = control.space;
		message.msg_controllen = sizeof(control.space);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(fd));
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	}
	do {
		sent = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (sent < 0 && errno == EINTR);
	if (sent >= 0)
		return 0;
	if (errno == EPIPE || errno == ENOTCONN)
		return -ECONNRESET;
	if (errno == EAGAIN || errno == ENOBUFS)
		return has_ended(link) ? -ECONNRESET : -EAGAIN;
	return -errno;
}

static void close_passed(int *fd)
{
	base_close(*fd);
	*fd = -1;
}

/* Returns the fd that was passed, or -1. Alignment leaves space for two fds where one is
 * expected. This process owns all that were passed; if there is more than one, it closes them
 * and returns -1. */
static int passed_fd(struct msghdr *message)
{
	const struct cmsghdr *head = CMSG_FIRSTHDR(message);
	size_t count;
	int fd = -1;

	if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
		return -1;
	count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(fd);
	for (size_t i = 0; i < count; i++) {
		memcpy(&fd, CMSG_DATA(head) + i * sizeof(fd), sizeof(fd));
		fd = base_register_fd(fd);
		if (count > 1)
			close_passed(&fd);
	}
	return fd;
}

/* Tries to receive a frame. `fd` receives the fd that came along, or -1; NULL: none is accepted. */
static int receive_once(struct local_link *link, struct stream_frame *frame, int *fd)
{
	uint8_t head[STREAM_FRAME_BYTES];
	struct iovec pieces[2] = { { head, sizeof(head) },
				   { link->message, sizeof(link->message) } };
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = pieces, .msg_iovlen = 2 };
	ssize_t got;

	if (fd) {
		message.msg_control = control.space;
		message.msg_controllen = sizeof(control.space);
	}
	do {
		got = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (got < 0 && errno == EINTR);
	if (got < 0)
		return errno == EWOULDBLOCK ? -EAGAIN : -errno;
	if (fd)
		*fd = passed_fd(&message);
	if ((size_t)got < sizeof(head) || message.msg_flags & MSG_TRUNC ||
	    !stream_read_frame(frame, head) ||
	    (size_t)got - sizeof(head) != (stream_has_data(frame) ? frame->bytes : 0)) {
		if (fd)
			close_passed(fd);
		return got ? -EPROTO : -ECONNRESET;
	}
	return 0;
}

/* Receives a frame. Returns -EAGAIN if there is none, -ECONNRESET at the end, and -EPROTO if a
 * message is not a valid frame. */
static int receive_message(struct local_link *link, struct stream_frame *frame, int *fd)
{
	int ret;

	if (fd)
		*fd = -1;
	ret = receive_once(link, frame, fd);
	/* Receive once more, because a last frame may be there. If the other side closes without
	 * having read everything, the kernel reports ECONNRESET once, before its last frame. And a
	 * process may have sent a frame before it ended. */
	if (ret == -ECONNRESET || (ret == -EAGAIN && has_ended(link))) {
		ret = receive_once(link, frame, fd);
		if (ret == -EAGAIN)
			ret = -ECONNRESET;
	}
	return ret;
}

/* ---- The operations of the link -------------------------------------------------------------- */

static int fail_link(const struct local_link *link, int code, struct base_error *error)
{
	if (code != -ECONNRESET)
		return base_fail(error, code,
				 link->sends ? "cannot send the data of rank %u to the process "
					       "that writes it (%d)" :
					       "cannot receive the data of rank %u (process %d)",
				 link->base.rank, (int)link->pid);
	if (link->sends)
		return base_fail_with(error, code, "find out why it ended",
				      "process %d ended before it had all data of rank %u",
				      (int)link->pid, link->base.rank);
	return base_fail_with(error, code, "find out why it ended",
			      "rank %u (process %d) ended before all of its data had arrived",
			      link->base.rank, (int)link->pid);
}

static int local_send(struct stream_link *base, const struct stream_frame *frame, const void *data,
		      struct base_error *error)
{
	const struct local_link *link = (struct local_link *)base;
	int ret = send_message(link, frame, data, -1);

	return ret && ret != -EAGAIN ? fail_link(link, ret, error) : ret;
}

static int local_receive(struct stream_link *base, struct stream_frame *frame, const void **data,
			 bool must, struct base_error *error)
{
	struct local_link *link = (struct local_link *)base;
	int ret = receive_message(link, frame, NULL);

	(void)must;
	*data = link->message;
	return ret && ret != -EAGAIN ? fail_link(link, ret, error) : ret;
}

/* Waits for a frame or for the end of the other side; also for space in the socket, if a credit is
 * still to be sent. */
static bool local_wait(struct stream_link *base, bool to_send)
{
	const struct local_link *link = (struct local_link *)base;
	const bool sends = to_send || link->told < link->released;
	struct pollfd ready[2] = {
		{ .fd = link->fd, .events = (short)(POLLIN | (sends ? POLLOUT : 0)) },
		{ .fd = link->process_fd, .events = POLLIN },
	};

	return poll(ready, 2, STREAM_POLL_MS) > 0;
}

/* Sends a credit if it is due. If the sender has closed, receiving reports that. */
static void local_release(struct stream_link *base, uint64_t offset, bool idle)
{
	struct local_link *link = (struct local_link *)base;
	const struct stream_frame credit = {
		.kind = STREAM_CREDIT, .offset = offset, .bytes = AHEAD_BYTES, .block = INLINE_BYTES
	};

	link->released = offset;
	if (offset - link->told < (idle ? 1 : TELL_BYTES))
		return;
	if (!send_message(link, &credit, NULL, -1))
		link->told = offset;
}

static const struct stream_link_ops local_ops = {
	.send = local_send,
	.receive = local_receive,
	.wait = local_wait,
	.release = local_release,
	.close = local_close,
};

/* ---- Opening and closing the listener -------------------------------------------------------- */

/* The connection of a rank whose stream was not asked for yet. Ranks connect in any order. */
struct arrival {
	struct local_link *link; /* NULL: the rank has not connected */
	int memory_fd;
};

struct stream_listener {
	int fd;
	struct sockaddr_un at;    /* its address; the path is empty before the socket listens */
	struct arrival *arrivals; /* by rank */
	uint32_t ranks;
};

/* Listens, then gives the socket its name: a socket that has its name and does not listen is dead.
 * Returns -ENOENT if its first name was removed meanwhile. */
static int listen_at(int fd, const struct sockaddr_un *at)
{
	struct sockaddr_un before = { .sun_family = AF_UNIX };
	int ret = 0;

	snprintf(before.sun_path, sizeof(before.sun_path), "%.*s/" HIDDEN_MARK "%016llx",
		 (int)(strrchr(at->sun_path, '/') - at->sun_path), at->sun_path,
		 (unsigned long long)base_random());
	if (bind(fd, (const struct sockaddr *)&before, sizeof(before)))
		return -errno;
	if (listen(fd, SOMAXCONN) || link(before.sun_path, at->sun_path))
		ret = errno == EEXIST ? -EADDRINUSE : -errno;
	unlink(before.sun_path);
	return ret;
}

/* Returns a listening socket, or a negative errno. */
static int listen_again(const struct sockaddr_un *at)
{
	int fd, ret = -ENOENT;

	for (int tries = 0; ret == -ENOENT && tries < MOST_TRIES; tries++) {
		fd = base_register_fd(
			socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
		ret = fd < 0 ? -errno : listen_at(fd, at);
		if (ret)
			base_close(fd);
	}
	return ret ? ret : fd;
}

static bool has_our_mark(const char *name)
{
	return !strncmp(name, SOCKET_MARK, strlen(SOCKET_MARK)) ||
	       !strncmp(name, HIDDEN_MARK, strlen(HIDDEN_MARK));
}

static bool is_dead(const struct sockaddr_un *at)
{
	const int fd = base_above_streams(
		socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	const bool refused = fd >= 0 && connect(fd, (const struct sockaddr *)at, sizeof(*at)) &&
			     errno == ECONNREFUSED;

	if (fd >= 0)
		close(fd);
	return refused;
}

/* Removes sockets of writers that were killed, in the folder of `beside`. */
static void remove_dead(const struct sockaddr_un *beside)
{
	char folder[sizeof(beside->sun_path)];
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	struct base_budget budget = base_budget_begin();
	struct dirent *entry;
	DIR *listing;

	snprintf(folder, sizeof(folder), "%.*s",
		 (int)(strrchr(beside->sun_path, '/') - beside->sun_path), beside->sun_path);
	listing = opendir(folder);
	while (listing && base_budget_look(&budget) && (entry = readdir(listing))) {
		if (!has_our_mark(entry->d_name) ||
		    snprintf(at.sun_path, sizeof(at.sun_path), "%s/%s", folder, entry->d_name) >=
			    (int)sizeof(at.sun_path))
			continue;
		if (is_dead(&at) && base_budget_take(&budget))
			unlink(at.sun_path);
	}
	if (listing)
		closedir(listing);
}

int stream_listener_open(struct stream_listener **out, const char *address, uint32_t ranks,
			 struct base_error *error)
{
	struct stream_listener *listener = calloc(1, sizeof(*listener));
	struct sockaddr_un at;
	int ret = 0;

	*out = NULL;
	if (!listener)
		return base_no_memory(error, "a socket of a writer", sizeof(*listener));
	listener->fd = -1;
	listener->ranks = ranks;
	listener->arrivals = calloc(ranks, sizeof(*listener->arrivals));
	if (!listener->arrivals)
		ret = base_no_memory(error, "ranks of this host",
				     ranks * sizeof(*listener->arrivals));
	if (!ret)
		ret = find_address(&at, address, error);
	if (ret)
		goto fail;
	remove_dead(&at);
	listener->fd = listen_again(&at);
	if (listener->fd < 0) {
		ret = listener->fd;
		base_fail_with(error, ret, "end the process that listens there, or raise ulimit -n",
			       "cannot listen at \"%s\" for the other ranks of this host",
			       at.sun_path);
		goto fail;
	}
	listener->at = at;
	*out = listener;
	return 0;
fail:
	stream_listener_close(listener);
	return ret;
}

static void drop(struct arrival *arrival)
{
	if (!arrival->link)
		return;
	local_close(&arrival->link->base);
	base_close(arrival->memory_fd);
	arrival->link = NULL;
}

void stream_listener_close(struct stream_listener *listener)
{
	if (!listener)
		return;
	for (uint32_t rank = 0; listener->arrivals && rank < listener->ranks; rank++)
		drop(&listener->arrivals[rank]);
	if (*listener->at.sun_path)
		unlink(listener->at.sun_path);
	base_close(listener->fd);
	free(listener->arrivals);
	free(listener);
}

/* ---- Accepting connections ------------------------------------------------------------------- */

/* Waits for the hello of a connection, and keeps the connection for its rank. Closes one that sends
 * no hello. Fails if go_on ends the wait. */
static int take_hello(struct stream_listener *listener, struct local_link *link,
		      const struct stream_wait *wait, struct base_error *error)
{
	const uint64_t begin_ns = base_now_ns();
	struct arrival arrival = { link, -1 };
	struct stream_frame hello;
	int ret, stopped = 0;

	while ((ret = receive_message(link, &hello, &arrival.memory_fd)) == -EAGAIN && !stopped &&
	       base_now_ns() - begin_ns < base_ms_to_ns(SILENCE_MS)) {
		if (!local_wait(&link->base, false))
			stopped = stream_go_on(wait, error);
	}
	if (ret || hello.kind != STREAM_HELLO || hello.offset >= listener->ranks) {
		drop(&arrival);
		return stopped;
	}
	/* If a rank has connected again, it has given up its earlier connection. */
	drop(&listener->arrivals[hello.offset]);
	listener->arrivals[hello.offset] = arrival;
	return 0;
}

/* Accepts a connection. Returns 1 if there is none. */
static int accept_next(struct stream_listener *listener, const struct stream_wait *wait,
		       struct base_error *error)
{
	const int fd =
		base_above_streams(accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
	struct local_link *link;
	int ret;

	if (fd < 0 && errno == EAGAIN)
		return 1;
	if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
		return 0;
	if (fd < 0)
		return base_fail_with(
			error, -errno, "raise ulimit -n",
			"cannot accept connections from other ranks of this host at \"%s\"",
			listener->at.sun_path);
	link = take_socket(fd, false, &ret);
	/* Ignore connections of other users. */
	return link ? take_hello(listener, link, wait, error) : 0;
}

int stream_receiver_open_local(struct stream_receiver **out, struct stream_listener *listener,
			       uint32_t rank, const struct stream_wait *wait,
			       struct base_error *error)
{
	struct arrival *arrival = &listener->arrivals[rank];
	struct pollfd ready = { .fd = listener->fd, .events = POLLIN };
	struct local_link *link;
	int ret;

	*out = NULL;
	/* Accept all that are waiting: the last connection of the rank counts. */
	for (;;) {
		ret = accept_next(listener, wait, error);
		if (ret > 0) {
			if (arrival->link)
				break;
			ret = poll(&ready, 1, STREAM_POLL_MS) > 0 ? 0 : stream_go_on(wait, error);
		}
		if (ret)
			return ret;
	}
	link = arrival->link;
	arrival->link = NULL;
	link->base.rank = rank;
	return stream_receiver_new(out, &link->base, arrival->memory_fd, wait, error);
}

/* ---- Connecting ------------------------------------------------------------------------------ */

/* Fails because go_on ended the wait with `why`. If that names a rank, the error keeps it. */
static int fail_unanswered(int code, struct base_error *why, const char *path,
			   struct base_error *error)
{
	base_rephrase_with(why, code,
			   "processes in containers that do not share /dev/shm cannot reach each "
			   "other: let them share it, or give each its own node name",
			   "%s: no process listens at \"%s\" for the data of this rank",
			   why->sentence, path);
	return base_propagate(error, why);
}

static int connect_until(int fd, const char *address, const struct stream_wait *wait,
			 struct base_error *error)
{
	uint64_t pause_ms = 1;
	struct base_error why = { 0 };
	struct sockaddr_un to;
	int ret = find_address(&to, address, error);

	while (!ret && connect(fd, (const struct sockaddr *)&to, sizeof(to))) {
		/* No writer listens yet, or too many ranks have connected at once. */
		if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR)
			return base_fail(error, -errno, "cannot connect to the socket \"%s\"",
					 to.sun_path);
		ret = stream_go_on(wait, &why);
		if (ret)
			return fail_unanswered(ret, &why, to.sun_path, error);
		poll(NULL, 0, (int)pause_ms);
		pause_ms = MIN(pause_ms * 2, STREAM_POLL_MS);
	}
	return ret;
}

static int send_hello(const struct local_link *link, int memory_fd, const struct stream_wait *wait,
		      struct base_error *error)
{
	const struct stream_frame hello = { .kind = STREAM_HELLO, .offset = link->base.rank };
	struct pollfd ready = { .fd = link->fd, .events = POLLOUT };
	int ret = 0;

	while (!ret) {
		ret = send_message(link, &hello, NULL, memory_fd);
		if (ret != -EAGAIN)
			return ret ? fail_link(link, ret, error) : 0;
		ret = poll(&ready, 1, STREAM_POLL_MS) > 0 ? 0 : stream_go_on(wait, error);
	}
	return ret;
}

int stream_sender_open_local(struct stream_sender **out, const char *address, uint32_t rank,
			     int memory_fd, const struct stream_wait *wait,
			     struct base_error *error)
{
	const struct stream_frame credit = { .bytes = AHEAD_BYTES, .block = INLINE_BYTES };
	struct local_link *link;
	int ret, fd;

	*out = NULL;
	fd = base_register_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	if (fd < 0)
		return base_fail_with(error, -errno, "raise ulimit -n",
				      "cannot make a socket to send the data of a rank");
	ret = connect_until(fd, address, wait, error);
	if (ret) {
		base_close(fd);
		return ret;
	}
	link = take_socket(fd, true, &ret);
	if (!link)
		return base_fail(error, ret,
				 ret == -EPERM ? "another user's process listens at \"%s\"" :
						 "cannot use the connection to \"%s\"",
				 address);
	link->base.rank = rank;
	ret = send_hello(link, memory_fd, wait, error);
	if (ret) {
		local_close(&link->base);
		return ret;
	}
	return stream_sender_new(out, &link->base, memory_fd >= 0, &credit, wait, error);
}
