/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which rank of which job this process is. Of the library and of the Python package, which has it
 * inside; no part of the public interface.
 */
#ifndef BASE_JOB_H
#define BASE_JOB_H

#include <stdint.h>

struct base_job {
	uint32_t rank;
	uint32_t ranks;
	uint32_t local_rank;  /* among the ranks of this node */
	uint32_t local_ranks; /* 1 if nobody says */
	char id[256];         /* what all ranks of the job have in common; "" if nobody says */
	char launcher[16];    /* "torchrun", "slurm", "openmpi", "mpich", "pmi", or "alone" */
};

/* From the variables of the launcher. */
void base_job_find(struct base_job *job);

/* More than so many have no more bandwidth of memory, or leave none to others. */
#define BASE_MOST_COPY_THREADS 8

/*
 * Threads that copy or verify memory: as many as the cores that this process may run on, and no
 * more than its share of the machine's. A rank that has cores of its own has no more than that.
 */
unsigned base_copy_threads(void);

#endif
