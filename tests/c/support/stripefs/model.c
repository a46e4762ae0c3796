/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulated time: the work of each target and of the metadata server, and when it ends.
 *
 * A target serves one part of a request at a time. Its end follows from the model alone, and the
 * next part begins at that same time, even if the machine's clock is late. So errors of the
 * machine's timing do not add up.
 */
#include "stripefs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct event {
	uint64_t at_ns, sequence;
	void (*call)(void *argument);
	void *argument;
};

struct waiter {
	struct waiter *next;
	uint64_t sequence; /* it waits for the requests before this one */
	void (*call)(void *argument);
	void *argument;
};

struct target targets[MAX_TARGETS + 1];

/*
 * Events as a heap: the earliest comes first. Events at one time run in the order in which they
 * were added.
 */
static struct event *events;
static size_t event_count, event_room;
static uint64_t event_sequence, io_sequence, mds_free_at_ns, link_free_at_ns;

/*
 * A server's cache: bytes that were answered but are on no target yet, and the requests that wait
 * for space in it.
 */
static uint64_t cached_bytes;
static struct io *first_waiting, *last_waiting;

static uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* Returns CLOCK_MONOTONIC, divided by the factor of --slow. */
uint64_t now_ns(void)
{
	return (uint64_t)((double)clock_ns() / options.slow);
}

struct timespec model_pause(uint64_t until_ns)
{
	const double until = (double)until_ns * options.slow, now = (double)clock_ns();
	const uint64_t pause = until > now ? (uint64_t)(until - now) + 1 : 0;

	return (struct timespec){ (time_t)(pause / NS_PER_S), (long)(pause % NS_PER_S) };
}

/* ---- Events ---------------------------------------------------------------------------------- */

static bool before(const struct event *a, const struct event *b)
{
	return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->sequence < b->sequence;
}

void model_later(uint64_t at_ns, void (*call)(void *argument), void *argument)
{
	const struct event event = { at_ns, event_sequence++, call, argument };
	size_t at = event_count++;

	if (event_count > event_room) {
		event_room = event_room ? event_room * 2 : 1024;
		events = realloc(events, event_room * sizeof(events[0]));
		if (!events)
			abort();
	}
	for (; at && before(&event, &events[(at - 1) / 2]); at = (at - 1) / 2)
		events[at] = events[(at - 1) / 2];
	events[at] = event;
}

static struct event take_event(void)
{
	const struct event first = events[0], last = events[--event_count];
	size_t at = 0;

	for (;;) {
		size_t child = 2 * at + 1;

		if (child + 1 < event_count && before(&events[child + 1], &events[child]))
			child++;
		if (child >= event_count || !before(&events[child], &last))
			break;
		events[at] = events[child];
		at = child;
	}
	events[at] = last;
	return first;
}

uint64_t model_run(void)
{
	while (event_count && events[0].at_ns <= now_ns()) {
		const struct event event = take_event();

		event.call(event.argument);
	}
	return event_count ? events[0].at_ns : UINT64_MAX;
}

/* ---- Requests -------------------------------------------------------------------------------- */

/*
 * Returns whether an older request of the file is unfinished. A request that waited in a client's
 * cache has its old sequence number but a later position in the list.
 */
static bool has_older(const struct node *node, uint64_t sequence)
{
	const struct io *io = node->oldest;

	while (io && io->sequence >= sequence)
		io = io->next;
	return io || (node->leaving && client_oldest(node) < sequence);
}

static void wake_waiters(struct node *node)
{
	struct waiter **at = &node->waiters;

	while (*at) {
		struct waiter *waiter = *at;

		if (has_older(node, waiter->sequence)) {
			at = &waiter->next;
			continue;
		}
		*at = waiter->next;
		waiter->call(waiter->argument);
		free(waiter);
	}
}

/* Returns whether the request is answered before it is on the targets. */
static bool cached(const struct io *io)
{
	return io->write && (options.server_cache_bytes || io->write_back);
}

/* Frees a request that has been answered and has no parts left. */
static void settle(struct io *io)
{
	struct node *node = io->node;

	if (!io->answered || io->parts_left)
		return;
	*(io->previous ? &io->previous->next : &node->oldest) = io->next;
	*(io->next ? &io->next->previous : &node->newest) = io->previous;
	if (io->write_back)
		client_sent(node);
	free(io);
	wake_waiters(node);
	node_settle(node);
}

static void answer(void *argument)
{
	struct io *io = argument;
	struct iovec parts[MAX_IOVECS];

	if (io->error && !cached(io))
		fuse_reply_err(io->request, io->error);
	else if (io->write)
		fuse_reply_write(io->request, io->bytes);
	else
		fuse_reply_iov(io->request, parts,
			       content_read(io->node, io->offset, io->bytes, parts));
	io->answered = true;
	settle(io);
}

static void answer_after_latency(struct io *io, uint64_t at_ns)
{
	at_ns += (uint64_t)(options.latency_ms * NS_PER_MS);
	if (at_ns > now_ns())
		model_later(at_ns, answer, io);
	else
		answer(io);
}

/* ---- Targets --------------------------------------------------------------------------------- */

static bool continues(const struct target *target, const struct part *part)
{
	return part->node_number == target->last_node &&
	       part->piece.object == target->last_object && part->piece.offset == target->last_end;
}

/*
 * Returns the part that a target serves next: the one that continues the last one, until run_bytes
 * were served in a row; else the oldest.
 */
static struct part *next_part(struct target *target)
{
	struct part *part = target->first;

	if (target->run_bytes < options.run_bytes)
		while (part && !continues(target, part))
			part = part->next;
	if (!part) {
		part = target->first;
		target->run_bytes = 0;
	} else if (!continues(target, part) || target->run_bytes >= options.run_bytes) {
		target->run_bytes = 0;
	}
	return part;
}

static void finish(void *argument);

static void serve(struct target *target, uint64_t at_ns)
{
	struct part *part = target->first ? next_part(target) : NULL;
	uint64_t from_ns = at_ns, took_ns;
	bool seek;

	if (!part)
		return;
	*(part->previous ? &part->previous->next : &target->first) = part->next;
	*(part->next ? &part->next->previous : &target->last) = part->previous;
	seek = !continues(target, part);
	took_ns = (uint64_t)(((seek ? target->seek_ms / 1000 : 0) +
			      part->piece.bytes / target->bandwidth) *
			     target->slowness * NS_PER_S);
	if (part->io->arrived_ns > from_ns)
		from_ns = part->io->arrived_ns;
	target->last_node = part->node_number;
	target->last_object = part->piece.object;
	target->last_end = part->piece.offset + part->piece.bytes;
	target->run_bytes += part->piece.bytes;
	target->requests++;
	target->seeks += seek;
	*(part->io->write ? &target->bytes_written : &target->bytes_read) += part->piece.bytes;
	target->busy_ns += took_ns;
	target->current = part;
	target->free_at_ns = from_ns + took_ns;
	model_later(target->free_at_ns, finish, target);
}

static void enqueue(struct io *io)
{
	for (unsigned int i = 0; i < io->range_count; i++) {
		struct part *part = &io->parts[i];
		struct target *target = &targets[part->piece.target];

		part->next = NULL;
		part->previous = target->last;
		*(target->last ? &target->last->next : &target->first) = part;
		target->last = part;
		if (++target->queue > target->longest_queue)
			target->longest_queue = target->queue;
		if (!target->current)
			serve(target, target->free_at_ns);
	}
}

/* ---- A server that answers from its memory --------------------------------------------------- */

static void admit(struct io *io)
{
	uint64_t at_ns = now_ns();

	if (options.link > 0) {
		if (link_free_at_ns > at_ns)
			at_ns = link_free_at_ns;
		at_ns += (uint64_t)(io->bytes / options.link * NS_PER_S);
		link_free_at_ns = at_ns;
	}
	cached_bytes += io->bytes;
	enqueue(io);
	answer_after_latency(io, at_ns);
}

static void admit_waiting(void)
{
	while (first_waiting && cached_bytes + first_waiting->bytes <= options.server_cache_bytes) {
		struct io *io = first_waiting;

		first_waiting = io->next_waiting;
		admit(io);
	}
}

static void admit_or_wait(struct io *io)
{
	if (!first_waiting && cached_bytes + io->bytes <= options.server_cache_bytes) {
		admit(io);
		return;
	}
	*(first_waiting ? &last_waiting->next_waiting : &first_waiting) = io;
	last_waiting = io;
}

/* ---- Interface ------------------------------------------------------------------------------- */

static void finish(void *argument)
{
	struct target *target = argument;
	struct part *part = target->current;
	struct io *io = part->io;
	const uint64_t at_ns = target->free_at_ns;

	target->current = NULL;
	target->queue--;
	if (target->failing)
		io->error = EIO;
	serve(target, at_ns);
	if (--io->parts_left)
		return;
	if (!cached(io)) {
		answer_after_latency(io, at_ns);
		return;
	}
	/* The write was reported as successful, so the next fsync of the file reports the error. */
	if (io->error)
		io->node->late_error = io->error;
	if (!io->write_back)
		cached_bytes -= io->bytes;
	settle(io);
	admit_waiting();
}

uint64_t model_sequence(void)
{
	return ++io_sequence;
}

static struct io *new_io(struct node *node, uint64_t offset, uint32_t bytes,
			 const struct piece *pieces, unsigned int count)
{
	struct io *io = calloc(1, sizeof(*io) + count * sizeof(io->parts[0]));

	if (!io)
		abort();
	io->node = node;
	io->offset = offset;
	io->bytes = bytes;
	io->sequence = model_sequence();
	io->arrived_ns = now_ns();
	io->range_count = io->parts_left = count;
	for (unsigned int i = 0; i < count; i++) {
		io->parts[i].io = io;
		io->parts[i].piece = pieces[i];
		io->parts[i].node_number = node->stat.st_ino;
	}
	io->previous = node->newest;
	*(node->newest ? &node->newest->next : &node->oldest) = io;
	node->newest = io;
	return io;
}

void model_io(fuse_req_t request, struct node *node, bool write, uint64_t offset, uint32_t bytes)
{
	struct piece pieces[MAX_PARTS];
	const int count = layout_split(node->layout, offset, bytes, pieces);
	struct io *io;

	if (count < 0) {
		fuse_reply_err(request, -count);
		return;
	}
	io = new_io(node, offset, bytes, pieces, (unsigned int)count);
	io->request = request;
	io->write = write;
	if (cached(io))
		admit_or_wait(io);
	else
		enqueue(io);
}

void model_write_back(struct node *node, uint64_t offset, uint32_t bytes, uint64_t sequence)
{
	struct piece pieces[MAX_PARTS];
	const int count = layout_split(node->layout, offset, bytes, pieces);
	struct io *io;

	if (count < 0) {
		node->late_error = -count;
		node->in_flight--;
		return;
	}
	io = new_io(node, offset, bytes, pieces, (unsigned int)count);
	io->sequence = sequence;
	io->write = io->write_back = io->answered = true;
	enqueue(io);
}

void model_flush(struct node *node, void (*call)(void *argument), void *argument)
{
	struct waiter *waiter;

	if (!node->oldest && !node->leaving) {
		call(argument);
		return;
	}
	waiter = calloc(1, sizeof(*waiter));
	if (!waiter)
		abort();
	*waiter = (struct waiter){ node->waiters, io_sequence + 1, call, argument };
	node->waiters = waiter;
}

uint64_t model_metadata(void)
{
	uint64_t at_ns = now_ns();

	if (options.mds_rate > 0) {
		if (mds_free_at_ns > at_ns)
			at_ns = mds_free_at_ns;
		at_ns += (uint64_t)(NS_PER_S / options.mds_rate);
		mds_free_at_ns = at_ns;
	}
	return at_ns + (uint64_t)(options.mds_latency_ms * NS_PER_MS);
}

uint64_t target_free(const struct target *target)
{
	return target->full ? 0 : target->capacity_bytes - target->used_bytes;
}

void model_open(void)
{
	for (unsigned int i = 0; i <= options.targets; i++) {
		targets[i].bandwidth = options.bandwidth;
		targets[i].seek_ms = options.seek_ms;
		targets[i].slowness = 1;
		targets[i].capacity_bytes = options.capacity;
		targets[i].used_bytes = i < options.targets ? options.used[i] : 0;
		targets[i].last_node = UINT64_MAX;
	}
	/* The metadata server stores data on flash. */
	targets[options.targets].seek_ms = 0;
}
