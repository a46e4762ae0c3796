/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of chaos-client share: its context, its log, its luck, and one save. */
#ifndef TESTS_SUPPORT_CHAOS_CLIENT_H
#define TESTS_SUPPORT_CHAOS_CLIENT_H

#include "support/sample.h"

#include <signal.h>
#include <stdatomic.h>

extern struct ioshape_context *context;
extern volatile sig_atomic_t stop; /* SIGTERM has come */

uint64_t now_ns(void);
void sleep_ms(uint64_t ms);
uint64_t chance(uint64_t most); /* up to, but not, `most` */
uint64_t new_seed(void);        /* of a sample; no two are alike */

__attribute__((noreturn)) void give_up(const char *what, const char *why);
__attribute__((format(printf, 2, 3))) void note(uint64_t at_ns, const char *format, ...);

/* When a save had its slot for sure: from its file's creation until its bytes were safe; and what
 * the log tells of the slot. */
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

/* What is in a file that holds one of these samples, whichever: 0 and its seed, or a code, and why.
 */
int check_reader(struct ioshape_reader *reader, uint64_t *seed, char *why, size_t why_bytes);
int check_file(const char *path, uint64_t *seed, char *why, size_t why_bytes);

/* chaos_crowd.c */
int crowd_run(const char *mode, int argc, char **argv); /* behind the log, the name and the seed */
int crowd_check_generations(const char *directory);

#endif
