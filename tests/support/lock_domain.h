/* SPDX-License-Identifier: Apache-2.0 */
/* The lock domain that names in a directory have. */
#ifndef TESTS_SUPPORT_LOCK_DOMAIN_H
#define TESTS_SUPPORT_LOCK_DOMAIN_H

#include "ring/ring.h"

#include <fcntl.h>
#include <unistd.h>

static inline void domain_of(const char *directory, char domain[RING_DOMAIN_BYTES])
{
	int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	ring_lock_domain(fd, domain);
	close(fd);
}

#endif
