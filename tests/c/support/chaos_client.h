/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Interface between the source files of chaos-client: its context, its log, random numbers, and one
 * save.
 */
#ifndef TESTS_SUPPORT_CHAOS_CLIENT_H
#define TESTS_SUPPORT_CHAOS_CLIENT_H

#include "support/sample.h"

#include <signal.h>
#include <stdatomic.h>

extern struct ioshape_context *context;
extern volatile sig_atomic_t stop; /* set by SIGTERM */

uint64_t now_ns(void);
void sleep_ms(uint64_t ms);
uint64_t chance(uint64_t most); /* random number below `most` */
uint64_t new_seed(void);        /* unique seed for a sample */

__attribute__((noreturn)) void give_up(const char *what, const char *why);
__attribute__((format(printf, 2, 3))) void note(uint64_t at_ns, const char *format, ...);

/*
 * Time during which a save certainly held its slot: from the creation of its file until its bytes
 * were safe. The other members are what the library's log reports about the slot.
 */
struct span {
	_Atomic uint64_t begin_ns, end_ns;
	_Atomic uint64_t fence;
	atomic_bool express, lost;
};

int on_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total);
void note_asked(unsigned turn, const char *path, uint64_t seed);
void note_saved(unsigned turn, int ret, const struct ioshape_report *report,
		const struct span *span);

void save_once(unsigned turn, const char *path, size_t large_bytes);

/*
 * Verify that a file holds a sample of any seed. Return 0 and the seed, or an error code and the
 * reason in `why`.
 */
int check_reader(struct ioshape_reader *reader, uint64_t *seed, char *why, size_t why_bytes);
int check_file(const char *path, uint64_t *seed, char *why, size_t why_bytes);

/* Defined in chaos_crowd.c. */
int crowd_run(const char *mode, int argc, char **argv); /* argv: after LOG, NAME and SEED */
int crowd_check_checkpoints(const char *directory);

#endif
