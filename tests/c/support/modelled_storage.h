/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulates storages with one writer, whose depth is that of the library (io/depth.c) or fixed, and
 * neighbours that come and go. The simulation uses discrete events, so its figures are equal in
 * every run and on every machine.
 */
#ifndef TESTS_SUPPORT_MODELLED_STORAGE_H
#define TESTS_SUPPORT_MODELLED_STORAGE_H

#include "io/depth.h"

#define MODELLED_MOST_SERVERS 16u

/* Model of a storage. Times are in seconds, rates in bytes per second. */
struct modelled_storage {
	const char *name;
	unsigned servers; /* each serves one request at a time; files are striped over all */
	double bandwidth; /* of each server */
	double seek;      /* time before a request that does not continue the last one */
	uint64_t run;   /* most bytes that a server serves in sequence before it turns to others; 0:
			   first come, first served */
	double noise;   /* relative deviation of each request's time, uniform in both directions */
	double latency; /* added to each answer, without occupying a server */
	double slow;    /* factor by which the first server is slower; 0: it is not */
	/*
	 * Write cache of so many bytes, filled at this rate. A write is answered when it is in the
	 * cache.
	 */
	uint64_t cache;
	double cache_bandwidth;
	/* Burst allowance: so many bytes are written at full speed, later ones at this rate. */
	uint64_t tokens;
	double token_rate;
	/* Duration of a pause without answers, and the interval between pauses. */
	double stall, stall_every;
	double arrivals; /* small reads by other users, per second and server */
	/* The writer's view of the storage. */
	bool tells;             /* the stripes are known to the writer, so it knows the servers */
	bool shared;            /* the writer limits itself for the sake of others */
	uint64_t request_bytes; /* size of a request; one server gets it as a whole */
	unsigned buffers;
};

extern const struct modelled_storage modelled_storages[];
extern const unsigned modelled_storage_count;

/* Other users: a constant number of requests, each sent again when it is done. */
struct modelled_neighbour {
	double from, to; /* seconds */
	unsigned depth;  /* requests on each server */
	uint64_t bytes;
	double rest; /* seconds before a request is sent again */
};

struct modelled_run {
	const struct modelled_storage *storage;
	unsigned fixed; /* requests in flight for each target; 0: the library decides */
	double seconds; /* time limit; 0: none */
	uint64_t bytes; /* bytes to write; 0: until the time limit */
	double fill;    /* seconds to fill a buffer */
	struct modelled_neighbour neighbour;
	uint64_t seed;
	/* Called after each answer; may be NULL. */
	void (*watch)(void *user, double now, const struct io_depth *depth);
	void *user;
};

struct modelled_result {
	double seconds, bytes_per_s;
	double neighbour_mean, neighbour_p99; /* seconds of a neighbour's request */
	struct io_depth depth;                /* state at the end */
};

struct modelled_result modelled_write(const struct modelled_run *run);

#endif
