/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/local_link.h"

#include "gather/store.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

int local_address(struct sockaddr_un *to, const char *address, struct base_error *error)
{
	char place[STORE_PLACE_BYTES];
	size_t length;
	int ret;

	*to = (struct sockaddr_un){ .sun_family = AF_UNIX };
	if (!*address || strchr(address, '/'))
		return base_refuse(error, -EINVAL, "\"%s\" is no name for a socket", address);
	ret = store_find_place(place, NULL, error);
	if (ret)
		return ret;
	length = (size_t)snprintf(to->sun_path, sizeof(to->sun_path), "%s/" LOCAL_SOCKET_MARK "%s",
				  place, address);
	if (length >= sizeof(to->sun_path))
		return base_refuse(error, -EINVAL, "\"%s\" is too long a name for a socket",
				   address);
	return 0;
}

int local_link_take(struct local_link *link, int fd)
{
	struct ucred other;
	socklen_t bytes = sizeof(other);
	int ret = 0;

	*link = (struct local_link){ .fd = base_own(fd), .process_fd = -1 };
	if (getsockopt(link->fd, SOL_SOCKET, SO_PEERCRED, &other, &bytes))
		ret = -errno;
	else if (!base_is_own_user(other.uid))
		ret = -EPERM;
	if (ret) {
		local_link_close(link);
		return ret;
	}
	link->pid = other.pid;
	/* Its children may have inherited the socket: their end of it says nothing. */
#ifdef SYS_pidfd_open
	if (other.pid > 0)
		link->process_fd = base_own((int)syscall(SYS_pidfd_open, other.pid, 0));
#endif
	return 0;
}

void local_link_close(struct local_link *link)
{
	if (link->fd >= 0)
		shutdown(link->fd, SHUT_RDWR);
	base_close(link->fd);
	base_close(link->process_fd);
	link->fd = link->process_fd = -1;
}

static bool has_ended(const struct local_link *link)
{
	struct pollfd process = { .fd = link->process_fd, .events = POLLIN };

	if (link->process_fd >= 0)
		return poll(&process, 1, 0) > 0;
	/* Older than Linux 5.3: then it is asked for when nothing has come for a while. */
	return link->pid > 0 && kill(link->pid, 0) && errno == ESRCH;
}

int local_link_send(struct local_link *link, const struct local_head *head, const void *data,
		    size_t bytes, int fd)
{
	struct local_head copy = *head;
	struct iovec parts[2] = { { &copy, sizeof(copy) }, { NULL, bytes } };
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = bytes ? 2 : 1 };
	ssize_t sent;

	memcpy(&parts[1].iov_base, &data, sizeof(data)); /* it is only read */
	if (fd >= 0) {
		message.msg_control = control.room;
		message.msg_controllen = sizeof(control.room);
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

/* The fd that came along, if any. Where there is room for one, there may be for two, and all of
 * them are ours now: more than one are none. */
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
		fd = base_own(fd);
		if (count > 1)
			close_passed(&fd);
	}
	return fd;
}

static int receive_once(struct local_link *link, struct local_head *head, void *into, size_t room,
			size_t *bytes, int *fd)
{
	struct iovec parts[2] = { { head, sizeof(*head) }, { into, room } };
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = room ? 2 : 1 };
	ssize_t got;

	if (fd) {
		message.msg_control = control.room;
		message.msg_controllen = sizeof(control.room);
	}
	do {
		got = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (got < 0 && errno == EINTR);
	if (got < 0)
		return errno == EWOULDBLOCK ? -EAGAIN : -errno;
	if (fd)
		*fd = passed_fd(&message);
	if ((size_t)got < sizeof(*head) || message.msg_flags & MSG_TRUNC) {
		if (fd)
			close_passed(fd);
		return got ? -EPROTO : -ECONNRESET;
	}
	*bytes = (size_t)got - sizeof(*head);
	return 0;
}

int local_link_receive(struct local_link *link, struct local_head *head, void *into, size_t room,
		       size_t *bytes, int *fd)
{
	int ret;

	if (fd)
		*fd = -1;
	ret = receive_once(link, head, into, room, bytes, fd);
	/* Whoever closes without having read everything causes ECONNRESET, once: before what it
	 * said last, which we want to hear. And it may have said something before it ended. */
	if (ret == -ECONNRESET || (ret == -EAGAIN && has_ended(link))) {
		ret = receive_once(link, head, into, room, bytes, fd);
		if (ret == -EAGAIN)
			ret = -ECONNRESET;
	}
	return ret;
}

int local_link_wait(const struct local_link *link, short events, const struct gather_wait *wait,
		    struct base_error *error)
{
	struct pollfd ready[2] = { { .fd = link->fd, .events = events },
				   { .fd = link->process_fd, .events = POLLIN } };

	if (poll(ready, 2, STREAM_PATIENCE_MS) > 0)
		return 0;
	return stream_go_on(wait, error);
}
