/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A struct ioshape_comm among forked ranks, with a socket from each rank to each other rank. A
 * message that is not the expected one is -EPROTO.
 */
#ifndef TESTS_SUPPORT_WIRES_H
#define TESTS_SUPPORT_WIRES_H

#include <ioshape/group.h>

#include <stdbool.h>
#include <stdint.h>

#define WIRES_RANKS 8

struct wires {
	uint32_t ranks, rank;
	bool synchronous;  /* set it before the forks: a send returns when the peer has received */
	uint64_t messages; /* messages received so far */
	int fds[WIRES_RANKS][WIRES_RANKS][2]; /* [from][to]: reading end, writing end */
	struct ioshape_comm comm;
};

/* Opens the sockets before the forks. Returns false if it cannot. */
bool wires_lay(struct wires *wires, uint32_t ranks);

/*
 * Makes the process this rank: it keeps only its own ends, so that the ends of a rank that dies are
 * closed.
 */
const struct ioshape_comm *wires_be(struct wires *wires, uint32_t rank);

/* Closes all ends that are open in this process. */
void wires_cut(struct wires *wires);

#endif
