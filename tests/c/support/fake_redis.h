/* SPDX-License-Identifier: Apache-2.0 */
/* A TCP server in a thread that accepts connections but is not Redis. */
#ifndef TESTS_SUPPORT_FAKE_REDIS_H
#define TESTS_SUPPORT_FAKE_REDIS_H

#include <pthread.h>
#include <stdbool.h>

enum fake_manner {
	FAKE_SILENT,   /* accepts, and never answers */
	FAKE_CLOSES,   /* accepts, and closes */
	FAKE_TRICKLES, /* sends a byte every 100 ms without end: first `words`, then '+' */
	FAKE_HANGS_UP, /* closes when it receives `words`, and never answers */
	FAKE_FLOODS,   /* sends `words` again and again */
	FAKE_SAYS,     /* answers every message with `words` */
	FAKE_FULL      /* never accepts a connection */
};

struct fake_redis {
	enum fake_manner manner;
	const char *words;
	char address[64]; /* "redis://127.0.0.1:port" */
	int listener, full[8];
	bool stop;
	int connections;
	size_t trickled;
	pthread_t thread;
};

void fake_redis_start(struct fake_redis *fake, enum fake_manner manner, const char *words);
void fake_redis_stop(struct fake_redis *fake);
/* Returns the number of connections so far. */
int fake_redis_connections(struct fake_redis *fake);

#endif
