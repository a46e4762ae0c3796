/* SPDX-License-Identifier: Apache-2.0 */
/* A struct ioshape_comm among ranks that one process forks: a socket from each to each. */
#ifndef TESTS_SUPPORT_WIRES_H
#define TESTS_SUPPORT_WIRES_H

#include <ioshape/group.h>

#include <stdbool.h>
#include <stdint.h>

#define WIRES_RANKS 8

struct wires {
	uint32_t ranks, rank;
	int fds[WIRES_RANKS][WIRES_RANKS][2]; /* [from][to]: reading end, writing end */
	struct ioshape_comm comm;
};

/* Before the forks; false if there are no sockets. */
bool wires_lay(struct wires *wires, uint32_t ranks);

/* In a rank: only its own ends stay open, so that whoever dies closes its. */
const struct ioshape_comm *wires_be(struct wires *wires, uint32_t rank);

/* All ends that are open here. */
void wires_cut(struct wires *wires);

#endif
