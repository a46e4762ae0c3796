/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A struct ioshape_comm between two forked processes, over sockets. It checks that tags and sizes
 * match.
 */
#ifndef TESTS_SUPPORT_PAIR_COMM_H
#define TESTS_SUPPORT_PAIR_COMM_H

#include <ioshape/group.h>

#include <stdbool.h>
#include <stdint.h>

struct pair_comm {
	int fds[2][2];     /* for each direction, the ends of rank 0 and of rank 1 */
	bool synchronous;  /* a send returns when the other side has received */
	uint32_t rank;     /* rank of this process */
	uint64_t messages; /* messages received so far */
	struct ioshape_comm comm;
};

/* Opens the channels, before the fork. Each of the two processes then calls pair_comm_be(). */
void pair_comm_open(struct pair_comm *pair, bool synchronous);
const struct ioshape_comm *pair_comm_be(struct pair_comm *pair, uint32_t rank);
void pair_comm_close(struct pair_comm *pair);

#endif
