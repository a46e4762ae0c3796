/* SPDX-License-Identifier: Apache-2.0 */
/* Returns the lock domain that names of temporary files in a directory contain. */
#ifndef TESTS_SUPPORT_LOCK_DOMAIN_H
#define TESTS_SUPPORT_LOCK_DOMAIN_H

#include "io/io.h"

#include <fcntl.h>
#include <unistd.h>

static inline void domain_of(const char *directory, char domain[IO_DOMAIN_BYTES])
{
	int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	io_lock_domain(fd, domain);
	close(fd);
}

#endif
