/* SPDX-License-Identifier: Apache-2.0 */
/* A struct ioshape_comm between two processes that one process forks: over sockets, and strict
 * about tags and sizes. */
#ifndef TESTS_SUPPORT_PAIR_COMM_H
#define TESTS_SUPPORT_PAIR_COMM_H

#include <ioshape/group.h>

#include <stdbool.h>
#include <stdint.h>

struct pair_comm {
	int fds[2][2];     /* by direction: the end of rank 0 and that of rank 1 */
	bool synchronous;  /* a send ends when the other side has received */
	uint32_t rank;     /* which one this process is */
	uint64_t messages; /* received; for tests */
	struct ioshape_comm comm;
};

/* Before the fork; and in each of the two processes. */
void pair_comm_open(struct pair_comm *pair, bool synchronous);
const struct ioshape_comm *pair_comm_be(struct pair_comm *pair, uint32_t rank);
void pair_comm_close(struct pair_comm *pair);

#endif
