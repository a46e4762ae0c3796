/* SPDX-License-Identifier: Apache-2.0 */
/* A gate in the progress callback: a save stops in a phase until the gate is opened. */
#ifndef TESTS_SUPPORT_GATE_H
#define TESTS_SUPPORT_GATE_H

#include <ioshape/ioshape.h>

#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

struct gate {
	enum ioshape_phase phase;
	uint64_t from; /* bytes done */
	sem_t reached, opened;
	atomic_bool passed;
	atomic_uint calls;
};

static inline int gate_stand_still(void *user, enum ioshape_phase phase, uint64_t done,
				   uint64_t total)
{
	struct gate *gate = user;

	(void)total;
	atomic_fetch_add(&gate->calls, 1);
	if (phase != gate->phase || done < gate->from || atomic_exchange(&gate->passed, true))
		return 0;
	sem_post(&gate->reached);
	sem_wait(&gate->opened);
	return 0;
}

/* Returns options of a save that stops once, in this phase, after `from` bytes. */
static inline struct ioshape_save_options gate_options(struct gate *gate, enum ioshape_phase phase,
						       uint64_t from)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	*gate = (struct gate){ .phase = phase, .from = from };
	sem_init(&gate->reached, 0, 0);
	sem_init(&gate->opened, 0, 0);
	options.progress = gate_stand_still;
	options.progress_user = gate;
	return options;
}

#define GATE_LATER_US 200000

/* Opens the gate after a delay. A thread function for pthread_create(). */
static inline void *gate_open_later(void *gate)
{
	usleep(GATE_LATER_US);
	sem_post(&((struct gate *)gate)->opened);
	return NULL;
}

#endif
