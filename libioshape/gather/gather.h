/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other ranks of a job: messages that they leave each other (stores), and their bytes on the
 * way to the rank that writes them (streams). The layer above knows what the messages and the bytes
 * mean.
 */
#ifndef GATHER_GATHER_H
#define GATHER_GATHER_H

#include "base/base.h"
#include "slots/slots.h"

#include <ioshape/group.h>

/* ---- Stores (store.c, store_*.c) ------------------------------------------------------------- */

/* What a store is opened with. Strings are borrowed until it is closed. */
struct gather_store_config {
	const char *name; /* the same for all ranks of a job, another for other jobs; hex digits */
	uint32_t rank;    /* of ours */
	uint32_t ranks;   /* of all */
	const char *directory; /* of the generations: the store's folder may be made in it */
	const struct slots_config *coordinator; /* redis: its address, password, pool, log */
	uint32_t deadline_ms; /* how long the others wait for what rank 0 does first */
	const char *memory;   /* the folder in memory; NULL: /dev/shm or XDG_RUNTIME_DIR */
};

#define GATHER_MAX_MESSAGE_BYTES (64 * MIB)
#define GATHER_NAME_BYTES 64 /* of messages and scopes, with the final 0: [a-z0-9-] */

/* What collect() calls for each message. */
typedef int gather_found_fn(void *user, uint32_t rank, const struct base_buffer *message);

/*
 * A store keeps messages of ranks: short texts or bytes under names, in scopes (one for each
 * generation). Any rank may put and get; a message that is put again is replaced. The medium may
 * lose messages (a Redis that starts anew): the rank that put one puts it again by itself, for as
 * long as it has not dropped the scope.
 *
 * A store belongs to one thread at a time, and to the process that opened it: a forked child gets
 * -EPERM, and closes nothing. IOSHAPE_E_COORDINATOR: the store is out of reach now; the next call
 * tries anew. Calls return within about two seconds.
 */
struct gather_store;
struct gather_store_ops;

/* In the directory of the generations, for ranks that share nothing else; in the memory of a host
 * that all ranks share; in the coordinator's Redis. */
extern const struct gather_store_ops gather_store_files;
extern const struct gather_store_ops gather_store_memory;
extern const struct gather_store_ops gather_store_redis;

int gather_store_open(struct gather_store **out, const struct gather_store_ops *ops,
		      const struct gather_store_config *config, struct base_error *error);
void gather_store_close(struct gather_store *store); /* NULL is fine */
/* "files", "host", "redis" */
const char *gather_store_id(const struct gather_store *store);

int gather_store_put(struct gather_store *store, const char *scope, const char *name,
		     const void *message, size_t bytes, struct base_error *error);
/* Replaces what `message` holds. -EAGAIN if there is no such message (no sentence). */
int gather_store_get(struct gather_store *store, const char *scope, const char *name,
		     struct base_buffer *message, struct base_error *error);
/*
 * The same for the messages "<prefix>-<rank>" of all ranks for which have[rank] is not set yet, in
 * as few round trips as the medium allows. Calls found() for each one that is there; found() may
 * set have[rank].
 */
int gather_store_collect(struct gather_store *store, const char *scope, const char *prefix,
			 const bool *have, gather_found_fn *found, void *user,
			 struct base_error *error);
/* Waits until it is worth another look, but no longer than timeout_ms. */
void gather_store_wait(struct gather_store *store, uint32_t timeout_ms);
/* Whether the medium knows that the process of this rank has ended. Only memory does. */
bool gather_store_has_ended(struct gather_store *store, uint32_t rank);
/* This rank's messages in the scope are not needed any more; rank 0: no rank's are. */
void gather_store_drop(struct gather_store *store, const char *scope);

/*
 * Which ranks can meet in memory and share it: those for whom this is the same. A host has one, or
 * one for each container that has a /dev/shm of its own.
 */
#define GATHER_PLACE_BYTES 48
void gather_identify_place(char id[GATHER_PLACE_BYTES]);

/* ---- Streams (stream*.c) --------------------------------------------------------------------- */

/*
 * The bytes of one rank, in order, to the rank that writes them. Memory is bounded on both sides:
 * the sender is held up while too much has not been taken yet. Both ends are used by one thread
 * each.
 *
 * While a call waits it asks `go_on` about ten times a second; anything but 0 ends the waiting with
 * that code.
 */
struct gather_wait {
	int (*go_on)(void *user, struct base_error *error);
	void *user;
};

struct gather_sender;

#define GATHER_ADDRESS_BYTES 80 /* of local streams, with the final 0 */

/* Over a socket of this host to the writer who listens at `address`; it is tried until the writer
 * listens, or go_on ends it. memory_fd is passed on; -1 for none. */
int gather_sender_open_local(struct gather_sender **out, const char *address, uint32_t rank,
			     int memory_fd, const struct gather_wait *wait,
			     struct base_error *error);
/* Over the caller's functions. `tag` is the same on both sides, and new for each stream. */
int gather_sender_open_comm(struct gather_sender **out, const struct ioshape_comm *comm,
			    uint32_t to, uint32_t tag, uint32_t timeout_ms,
			    const struct gather_wait *wait, struct base_error *error);
/* Appends bytes. The memory is free again when it returns. */
int gather_sender_put(struct gather_sender *sender, const void *data, size_t bytes,
		      struct base_error *error);
/*
 * The same for bytes in the shared memory, at `offset` of its fd: they are not copied, and must
 * stay as they are until gather_sender_await_taken() returns for them. Their checksum goes with
 * them, so that nobody need look at them again. Over functions it is the same as the above.
 */
int gather_sender_put_shared(struct gather_sender *sender, const void *data, uint64_t offset,
			     size_t bytes, uint32_t crc32, struct base_error *error);
/* Bytes put so far. */
uint64_t gather_sender_offset(const struct gather_sender *sender);
/* Waits until nobody needs what was put before `offset`. */
int gather_sender_await_taken(struct gather_sender *sender, uint64_t offset,
			      struct base_error *error);
/* Says that this was all, with a checksum of it, and waits until all has been taken. */
int gather_sender_end(struct gather_sender *sender, uint32_t crc32, struct base_error *error);
/* Without an end the receiver is told why, or that we are gone. NULL is fine. */
void gather_sender_free(struct gather_sender *sender, const char *why);

/* Where the ranks of this host bring their bytes to. */
struct gather_listener;

int gather_listener_open(struct gather_listener **out, const char *address,
			 struct base_error *error);
void gather_listener_close(struct gather_listener *listener); /* NULL is fine */

struct gather_receiver;

/* The stream of this rank: waits until it has come. */
int gather_receiver_open_local(struct gather_receiver **out, struct gather_listener *listener,
			       uint32_t rank, const struct gather_wait *wait,
			       struct base_error *error);
/*
 * `blocks` blocks of block_bytes are received ahead, on a thread of its own. `memory` is so much,
 * the caller's until the receiver is freed; NULL: the receiver's own, which is new each time.
 */
int gather_receiver_open_comm(struct gather_receiver **out, const struct ioshape_comm *comm,
			      uint32_t from, uint32_t tag, size_t block_bytes, unsigned blocks,
			      void *memory, uint32_t timeout_ms, const struct gather_wait *wait,
			      struct base_error *error);
/*
 * The next run of bytes, valid until the next call; *bytes is 0 at the end. A sender that failed or
 * went away is an error that names the rank and says what it said.
 */
int gather_receiver_next(struct gather_receiver *receiver, const void **data, size_t *bytes,
			 struct base_error *error);
/*
 * From now on bytes stay as they are until they are released; but where gather_receiver_lasts()
 * denies it of the run handed out last, only until the next call. That is then -EAGAIN, without a
 * sentence, where nothing goes on before something is released.
 */
void gather_receiver_hold(struct gather_receiver *receiver);
bool gather_receiver_lasts(const struct gather_receiver *receiver);
/* All before this offset in the stream is not needed any more. */
void gather_receiver_release(struct gather_receiver *receiver, uint64_t offset);
/* The checksum that the sender has given for the run handed out last. False: none. */
bool gather_receiver_summed(const struct gather_receiver *receiver, uint32_t *crc32);
/* After the end: the sender's checksum. */
uint32_t gather_receiver_crc32(const struct gather_receiver *receiver);
/* Before the end the sender is told to stop. NULL is fine. */
void gather_receiver_free(struct gather_receiver *receiver);

/* ---- Which mode (mode.c; pure) --------------------------------------------------------------- */

struct gather_facts {
	uint32_t ranks, nodes;
	uint64_t bytes;      /* of all ranks */
	uint64_t most_bytes; /* of one rank */
	uint32_t targets;    /* storage targets of the filesystem; 0 unknown */
	uint32_t stripes;    /* over which one file goes; 0 unknown */
	uint32_t capacity;   /* writers at a time; 0 unknown */
	bool shared;         /* ranks of a node can share memory */
	bool comm;           /* bytes can travel between nodes */
	bool apart;          /* each node writes to a disk of its own */
};

/* `why` receives a clause for the report, also where what was asked for is not possible. */
enum ioshape_mode gather_choose_mode(enum ioshape_mode asked, const struct gather_facts *facts,
				     char *why, size_t why_bytes);

#endif
