/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page that the ranks of a board map: counters of what was posted, by the families of notes'
 * names
 * ("want" of "want-7"), and a futex to sleep on. Inotify would do for wakes, but a user may have
 * 128 instances of it on a host, and each post would wake every rank. Private to this floor.
 */
#ifndef GATHER_NEWS_H
#define GATHER_NEWS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define NEWS_FAMILIES 32u /* as many as a futex has bits for who is to be woken */

struct news_page {
	atomic_uint posts; /* the futex */
	atomic_int moved;  /* why the notes are elsewhere now; 0: they are not */
	atomic_int closed; /* rank 0 is done: that the folder goes is as it should be */
	atomic_uint of_family[NEWS_FAMILIES];
};

/* Zero it to begin. */
struct news {
	struct news_page *page;
	/* What was looked for since the last wait, and what had been posted by then. */
	uint32_t watched;
	uint32_t seen[NEWS_FAMILIES];
};

/* Of a new file; of one that is there. 0 or a negative errno. */
int news_make(struct news *news, int folder_fd);
int news_find(struct news *news, int folder_fd);
void news_unmap(struct news *news);

/* After a note was posted. */
void news_tell(struct news *news, const char *name);
/* Before a note is looked for: the next wait ends when it is posted. */
void news_watch(struct news *news, const char *name);
/* Until something comes that was looked for, or the ranks move. Forgets what was looked for. */
void news_wait(struct news *news, uint64_t until_ns);
/* All ranks are to move; unless another reason was given first. */
void news_move(struct news *news, int why);

#endif
