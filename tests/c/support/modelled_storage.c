/* SPDX-License-Identifier: Apache-2.0 */
#include "support/modelled_storage.h"

#include "base/base.h"
#include "support/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_JOBS 4096u
#define MOST_TOLD 65536u
#define PASSER_BYTES (256 * KIB)

/*
 * Models of storages. The members that are not set are 0: no seeks, no noise, no cache, and no
 * neighbours.
 */
const struct modelled_storage modelled_storages[] = {
	{ .name = "hdd",
	  .servers = 1,
	  .bandwidth = 60e6,
	  .seek = 0.008,
	  .run = 16 * MIB,
	  .latency = 0.0003,
	  .request_bytes = MIB,
	  .buffers = 64 },
	{ .name = "ssd",
	  .servers = 8,
	  .bandwidth = 250e6,
	  .noise = 0.2,
	  .latency = 0.0001,
	  .request_bytes = MIB,
	  .buffers = 64 },
	{ .name = "one slow target",
	  .servers = 8,
	  .bandwidth = 250e6,
	  .latency = 0.0002,
	  .slow = 3,
	  .tells = true,
	  .request_bytes = MIB,
	  .buffers = 64 },
	{ .name = "far away",
	  .servers = 1,
	  .bandwidth = 1e9,
	  .latency = 0.020,
	  .noise = 0.1,
	  .request_bytes = 4 * MIB,
	  .buffers = 32 },
	{ .name = "write-back cache",
	  .servers = 1,
	  .bandwidth = 200e6,
	  .cache = 256 * MIB,
	  .cache_bandwidth = 2e9,
	  .latency = 0.0001,
	  .request_bytes = 4 * MIB,
	  .buffers = 14 },
	{ .name = "nfs",
	  .servers = 4,
	  .bandwidth = 300e6,
	  .latency = 0.001,
	  .noise = 0.3,
	  .stall = 0.005,
	  .stall_every = 0.25,
	  .shared = true,
	  .request_bytes = MIB,
	  .buffers = 64 },
	{ .name = "throttled",
	  .servers = 1,
	  .bandwidth = 1e9,
	  .tokens = 128 * MIB,
	  .token_rate = 100e6,
	  .latency = 0.0005,
	  .request_bytes = 4 * MIB,
	  .buffers = 14 },
	{ .name = "shared",
	  .servers = 1,
	  .bandwidth = 500e6,
	  .latency = 0.0002,
	  .noise = 0.1,
	  .arrivals = 1000,
	  .request_bytes = MIB,
	  .buffers = 64 },
};
const unsigned modelled_storage_count = ARRAY_LENGTH(modelled_storages);

enum kind { OURS, NEIGHBOUR, PASSER };

struct job {
	struct job *next; /* in a server's queue, or in the list of free jobs */
	enum kind kind;
	unsigned server;
	uint64_t offset, bytes;
	double sent;
};

enum event_kind { SERVED, ANSWERED, SENT_AGAIN, PASSES, FILLED, BEGINS };

struct event {
	double at;
	uint64_t sequence;
	enum event_kind kind;
	struct job *job;
	unsigned server;
};

struct server {
	struct job *queue;
	struct job *current;
	uint64_t last_end, in_a_row;
};

struct world {
	const struct modelled_run *run;
	const struct modelled_storage *storage;
	struct io_depth depth;
	double now;
	uint64_t random, sequence;
	struct server servers[MODELLED_MOST_SERVERS];
	struct event events[MOST_JOBS];
	unsigned event_count;
	struct job jobs[MOST_JOBS], *free;
	/* Requests of our own file: ready to be sent, in flight, and done. */
	uint64_t next_offset, done_bytes, ready[256];
	unsigned ready_count, in_flight;
	bool filling;
	double cache_free_at, token_at;
	uint64_t cached, tokens;
	struct job *uncached, **uncached_end;
	double told[MOST_TOLD];
	unsigned told_count;
};

static double chance(struct world *world)
{
	return (double)(test_random(&world->random) >> 11) / (double)(1ull << 53);
}

static void later(struct world *world, double at, enum event_kind kind, struct job *job,
		  unsigned server)
{
	if (world->event_count == MOST_JOBS)
		abort();
	world->events[world->event_count++] =
		(struct event){ at, world->sequence++, kind, job, server };
}

static struct event next_event(struct world *world)
{
	unsigned first = 0;
	struct event event;

	for (unsigned i = 1; i < world->event_count; i++) {
		const struct event *one = &world->events[i], *best = &world->events[first];

		if (one->at < best->at || (one->at <= best->at && one->sequence < best->sequence))
			first = i;
	}
	event = world->events[first];
	world->events[first] = world->events[--world->event_count];
	return event;
}

static struct job *new_job(struct world *world, enum kind kind, unsigned server, uint64_t offset,
			   uint64_t bytes)
{
	struct job *job = world->free;

	if (!job)
		abort();
	world->free = job->next;
	*job = (struct job){
		.kind = kind, .server = server, .offset = offset, .bytes = bytes, .sent = world->now
	};
	return job;
}

static void end_job(struct world *world, struct job *job)
{
	job->next = world->free;
	world->free = job;
}

/* ---- Servers --------------------------------------------------------------------------------- */

/*
 * Returns where a server stores the request: for a file that is striped over all servers, the
 * offset in the server's object.
 */
static uint64_t place_of(const struct world *world, const struct job *job)
{
	if (job->kind != OURS)
		return job->offset;
	return job->offset / world->storage->servers / job->bytes * job->bytes;
}

static double service(struct world *world, const struct job *job, bool seeks)
{
	const struct modelled_storage *storage = world->storage;
	double took = (double)job->bytes / storage->bandwidth;

	if (job->kind == OURS && storage->tokens) {
		if (world->tokens >= job->bytes)
			world->tokens -= job->bytes;
		else
			took = (double)job->bytes / storage->token_rate;
	}
	if (storage->slow > 0 && !job->server)
		took *= storage->slow;
	took *= 1 + storage->noise * (2 * chance(world) - 1);
	return took + (seeks ? storage->seek : 0);
}

static bool goes_on(const struct world *world, const struct server *server, const struct job *job)
{
	return place_of(world, job) == server->last_end;
}

static void serve(struct world *world, unsigned number)
{
	struct server *server = &world->servers[number];
	struct job **at = &server->queue, *job;
	bool seeks;

	if (server->current || !server->queue)
		return;
	if (world->storage->run && server->in_a_row < world->storage->run) {
		while (*at && !goes_on(world, server, *at))
			at = &(*at)->next;
		if (!*at)
			at = &server->queue;
	}
	job = *at;
	*at = job->next;
	seeks = !goes_on(world, server, job);
	server->in_a_row =
		(seeks || server->in_a_row >= world->storage->run ? 0 : server->in_a_row) +
		job->bytes;
	server->last_end = place_of(world, job) + job->bytes;
	server->current = job;
	later(world, world->now + service(world, job, seeks), SERVED, NULL, number);
}

static void enqueue(struct world *world, struct job *job)
{
	struct job **at = &world->servers[job->server].queue;

	while (*at)
		at = &(*at)->next;
	job->next = NULL;
	*at = job;
	serve(world, job->server);
}

/* ---- The cache ------------------------------------------------------------------------------- */

static void admit(struct world *world)
{
	while (world->uncached && world->cached + world->uncached->bytes <= world->storage->cache) {
		struct job *job = world->uncached, *stored;

		world->uncached = job->next;
		if (!world->uncached)
			world->uncached_end = &world->uncached;
		world->cached += job->bytes;
		world->cache_free_at = fmax(world->cache_free_at, world->now) +
				       (double)job->bytes / world->storage->cache_bandwidth;
		later(world, world->cache_free_at + world->storage->latency, ANSWERED, job, 0);
		stored = new_job(world, PASSER, job->server, job->offset, job->bytes);
		stored->sent = -1; /* a copy in the cache, which is freed when it is served */
		enqueue(world, stored);
	}
}

/* ---- The writer ------------------------------------------------------------------------------ */

static bool all_sent(const struct world *world)
{
	return world->run->bytes && world->next_offset >= world->run->bytes;
}

static void fill(struct world *world)
{
	if (world->filling || all_sent(world) ||
	    world->in_flight + world->ready_count >= world->storage->buffers)
		return;
	world->filling = true;
	later(world, world->now + world->run->fill, FILLED, NULL, 0);
}

static void send(struct world *world)
{
	const struct modelled_storage *storage = world->storage;
	unsigned kept = 0;

	for (unsigned i = 0; i < world->ready_count; i++) {
		const uint64_t offset = world->ready[i];
		struct job *job;

		if (world->in_flight + 1 >= storage->buffers ||
		    !io_depth_allows(&world->depth, offset)) {
			world->ready[kept++] = offset;
			continue;
		}
		job = new_job(world, OURS,
			      (unsigned)(offset / storage->request_bytes) % storage->servers,
			      offset, storage->request_bytes);
		io_depth_sent(&world->depth, offset, job->bytes);
		world->in_flight++;
		if (storage->cache) {
			*world->uncached_end = job;
			job->next = NULL;
			world->uncached_end = &job->next;
			admit(world);
		} else {
			enqueue(world, job);
		}
	}
	world->ready_count = kept;
	fill(world);
}

static void answer_ours(struct world *world, struct job *job)
{
	const struct modelled_run *run = world->run;

	world->in_flight--;
	world->done_bytes += job->bytes;
	io_depth_answered(&world->depth, job->offset, job->bytes, (uint64_t)(job->sent * 1e9),
			  (uint64_t)(world->now * 1e9), !world->ready_count);
	end_job(world, job);
	send(world);
	if (run->watch)
		run->watch(run->user, world->now, &world->depth);
}

/* ---- Events ---------------------------------------------------------------------------------- */

static double answered_at(struct world *world)
{
	const struct modelled_storage *storage = world->storage;
	double at = world->now + storage->latency;

	if (storage->stall_every > 0) {
		const double since = fmod(at, storage->stall_every);

		if (since < storage->stall)
			at += storage->stall - since;
	}
	return at;
}

static void served(struct world *world, unsigned number)
{
	struct job *job = world->servers[number].current;

	world->servers[number].current = NULL;
	if (job->kind == PASSER) {
		if (job->sent < 0)
			world->cached -= job->bytes;
		end_job(world, job);
		admit(world);
	} else {
		later(world, job->kind == OURS ? answered_at(world) : world->now, ANSWERED, job, 0);
	}
	serve(world, number);
}

static uint64_t elsewhere(struct world *world)
{
	return (1ull << 50) + test_random_below(&world->random, 1u << 30) * 4096;
}

static void pass(struct world *world, unsigned number)
{
	enqueue(world, new_job(world, PASSER, number, elsewhere(world), PASSER_BYTES));
	later(world, world->now - log(1 - chance(world)) / world->storage->arrivals, PASSES, NULL,
	      number);
}

static void answered(struct world *world, struct job *job)
{
	const struct modelled_neighbour *neighbour = &world->run->neighbour;

	if (job->kind == OURS) {
		answer_ours(world, job);
		return;
	}
	if (world->told_count < MOST_TOLD)
		world->told[world->told_count++] = world->now - job->sent;
	if (world->now + neighbour->rest < neighbour->to)
		later(world, world->now + neighbour->rest * (0.5 + chance(world)), SENT_AGAIN, NULL,
		      job->server);
	end_job(world, job);
}

static void take(struct world *world, const struct event *event)
{
	const struct modelled_neighbour *neighbour = &world->run->neighbour;

	switch (event->kind) {
	case SERVED:
		served(world, event->server);
		break;
	case ANSWERED:
		answered(world, event->job);
		break;
	case SENT_AGAIN:
		enqueue(world, new_job(world, NEIGHBOUR, event->server, elsewhere(world),
				       neighbour->bytes));
		break;
	case PASSES:
		pass(world, event->server);
		break;
	case FILLED:
		world->filling = false;
		world->ready[world->ready_count++] = world->next_offset;
		world->next_offset += world->storage->request_bytes;
		send(world);
		break;
	case BEGINS:
		for (unsigned server = 0; server < world->storage->servers; server++)
			for (unsigned i = 0; i < neighbour->depth; i++)
				later(world, world->now, SENT_AGAIN, NULL, server);
		break;
	}
}

static void begin(struct world *world, const struct modelled_run *run)
{
	const struct modelled_storage *storage = run->storage;
	const unsigned targets = storage->tells ? storage->servers : 1;
	const struct io_depth_options options = {
		.request_bytes = storage->request_bytes,
		.targets = targets,
		.stripe_bytes = storage->tells ? storage->request_bytes : 0,
		.most = run->fixed ? run->fixed : MAX((storage->buffers - 1) / targets, 1),
		.fixed = run->fixed != 0,
		.pauses = storage->tells,
		.shared = storage->shared,
	};

	world->run = run;
	world->storage = storage;
	world->random = run->seed;
	world->tokens = storage->tokens;
	world->uncached_end = &world->uncached;
	for (unsigned i = 0; i < MOST_JOBS; i++)
		end_job(world, &world->jobs[i]);
	io_depth_begin(&world->depth, &options);
	if (run->neighbour.depth)
		later(world, run->neighbour.from, BEGINS, NULL, 0);
	if (storage->arrivals > 0)
		for (unsigned i = 0; i < storage->servers; i++)
			later(world, chance(world) / storage->arrivals, PASSES, NULL, i);
	fill(world);
}

static int compare(const void *a, const void *b)
{
	const double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

struct modelled_result modelled_write(const struct modelled_run *run)
{
	struct world *world = calloc(1, sizeof(*world));
	struct modelled_result result = { 0 };

	if (!world)
		abort();
	begin(world, run);
	for (;;) {
		const struct event event = next_event(world);

		world->now = event.at;
		if (run->seconds > 0 && world->now > run->seconds)
			break;
		take(world, &event);
		if (run->bytes && world->done_bytes >= run->bytes)
			break;
	}
	result.seconds = world->now;
	result.bytes_per_s = (double)world->done_bytes / world->now;
	qsort(world->told, world->told_count, sizeof(world->told[0]), compare);
	for (unsigned i = 0; i < world->told_count; i++)
		result.neighbour_mean += world->told[i] / world->told_count;
	if (world->told_count)
		result.neighbour_p99 = world->told[world->told_count * 99 / 100];
	result.depth = world->depth;
	free(world);
	return result;
}
