/* SPDX-License-Identifier: Apache-2.0 */
/* The password that lies in a file. */
#define _GNU_SOURCE
#include "slots/redis.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Reads the file's beginning. Returns its bytes, or -errno. */
static ssize_t read_beginning(const char *path, char *text, size_t room)
{
	/* A FIFO without a writer is not waited for. */
	int fd = base_above_streams(open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
	ssize_t got = 1, bytes = 0;

	if (fd < 0)
		return -errno;
	while (got > 0 && (size_t)bytes < room) {
		got = TEMP_FAILURE_RETRY(read(fd, text + bytes, room - (size_t)bytes));
		if (got > 0)
			bytes += got;
	}
	if (got < 0)
		bytes = -errno;
	close(fd);
	return bytes;
}

static int refuse(const struct redis_pool *pool, const char *why, struct base_error *error)
{
	return base_refuse(
		error, IOSHAPE_E_COORDINATOR,
		"the password file \"%s\" %s" BASE_REMEDY
		"have its first line hold the password, and let this user read it (chgrp "
		"GROUP, chmod 440)",
		pool->config.password_file, why);
}

int redis_read_password(struct redis_pool *pool, struct base_error *error)
{
	struct slots_address *address = &pool->address;
	char text[ADDRESS_SECRET_BYTES + 1], why[96];
	const char *end;
	ssize_t bytes;
	int ret = 0;

	if (!pool->config.password_file)
		return 0;
	bytes = read_beginning(pool->config.password_file, text, sizeof(text));
	end = bytes > 0 ? memchr(text, '\n', (size_t)bytes) : NULL;
	if (end)
		bytes = end - text;
	if (bytes > 0 && text[bytes - 1] == '\r')
		bytes--;
	snprintf(why, sizeof(why), "cannot be read (%s)", strerror(bytes < 0 ? (int)-bytes : 0));
	if (end && !bytes) {
		ret = 0; /* an empty line: none is needed */
	} else if (bytes > 0 && bytes < ADDRESS_SECRET_BYTES) {
		memcpy(address->password, text, (size_t)bytes);
		address->password[bytes] = 0;
		address->has_password = true;
	} else if (!address->has_password) {
		ret = refuse(pool,
			     bytes < 0 ? why :
			     !bytes    ? "is empty" :
					 "begins with a line that is longer than a password can be",
			     error);
	}
	explicit_bzero(text, sizeof(text));
	return ret;
}
