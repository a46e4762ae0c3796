/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Storages as models, one writer on them whose depth is the library's (io/depth.c) or fixed, and
 * neighbours who come and go. Discrete events: the same figures in every run, on every machine.
 */
#ifndef TESTS_SUPPORT_MODELLED_STORAGE_H
#define TESTS_SUPPORT_MODELLED_STORAGE_H

#include "io/depth.h"

#define MODELLED_MOST_SERVERS 16u

/* Times in seconds, rates in bytes per second. */
struct modelled_storage {
	const char *name;
	unsigned servers; /* each serves one request at a time; stripes go round over them */
	double bandwidth; /* of each */
	double seek;      /* before a request that does not go on where the last one ended */
	uint64_t run;     /* bytes that a server serves in a row if it can; 0: in order */
	double noise;     /* of each request's time, as a part of it: evenly to both sides */
	double latency;   /* added to each answer; it occupies nobody */
	double slow;      /* how many times slower the first server is; 0: it is not */
	/* Answered when in a cache of so many bytes, filled at this rate. */
	uint64_t cache;
	double cache_bandwidth;
	/* So many bytes as fast as the servers, then at this rate. */
	uint64_t tokens;
	double token_rate;
	/* No answers for so long in each period. */
	double stall, stall_every;
	double arrivals; /* small reads of others, each second, on each server */
	/* How the writer sees it. */
	bool tells;             /* its stripes: the writer knows the servers */
	bool shared;            /* the writer takes care of others */
	uint64_t request_bytes; /* of which a server gets each as a whole */
	unsigned buffers;
};

extern const struct modelled_storage modelled_storages[];
extern const unsigned modelled_storage_count;

/* Others who write or read: so many requests, each sent again when it is done. */
struct modelled_neighbour {
	double from, to; /* seconds */
	unsigned depth;  /* on each server */
	uint64_t bytes;
	double rest; /* before it is sent again */
};

struct modelled_run {
	const struct modelled_storage *storage;
	unsigned fixed; /* requests in flight for each target; 0: the library's */
	double seconds; /* ends then, or with the bytes; 0: with the bytes */
	uint64_t bytes; /* 0: with the time */
	double fill;    /* seconds to fill a buffer */
	struct modelled_neighbour neighbour;
	uint64_t seed;
	/* Told after each answer; may be NULL. */
	void (*watch)(void *user, double now, const struct io_depth *depth);
	void *user;
};

struct modelled_result {
	double seconds, bytes_per_s;
	double neighbour_mean, neighbour_p99; /* seconds of a request of theirs */
	struct io_depth depth;                /* in the end */
};

struct modelled_result modelled_write(const struct modelled_run *run);

#endif
