/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that listens on a TCP port, and is no Redis. */
#ifndef TESTS_SUPPORT_FAKE_REDIS_H
#define TESTS_SUPPORT_FAKE_REDIS_H

#include <pthread.h>
#include <stdbool.h>

enum fake_manner {
	FAKE_SILENT,   /* accepts, and never answers */
	FAKE_CLOSES,   /* accepts, and closes */
	FAKE_TRICKLES, /* a byte every 100 ms, without an end: of the words, then '+' */
	FAKE_HANGS_UP, /* closes at these words, and answers nothing to others */
	FAKE_FLOODS,   /* says its words again and again */
	FAKE_SAYS,     /* answers the same to whatever comes */
	FAKE_FULL      /* does not even accept */
};

struct fake_redis {
	enum fake_manner manner;
	const char *words;
	char address[64]; /* "redis://127.0.0.1:port" */
	int listener, full[8];
	bool stop;
	int connections;
	size_t trickled;
	char heard[1024]; /* the beginning of all that was said to it */
	size_t heard_bytes;
	pthread_mutex_t lock;
	pthread_t thread;
};

void fake_redis_start(struct fake_redis *fake, enum fake_manner manner, const char *words);
void fake_redis_stop(struct fake_redis *fake);
/* How many came so far. */
int fake_redis_connections(struct fake_redis *fake);
/* How often these words were said to it, as far as it remembers. */
int fake_redis_heard(struct fake_redis *fake, const char *words);

#endif
