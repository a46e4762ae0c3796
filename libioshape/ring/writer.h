/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the ring floor: a file that is being written, for those who open it and who write it. */
#ifndef RING_WRITER_H
#define RING_WRITER_H

#include "ring/destination.h"
#include "ring/lane.h"

struct ring_writer {
	struct ring_lane *lane;
	struct ring_file_options options;
	struct ring_notes *notes;
	struct ring_destination file;
	struct ring_striping striping;
	struct fs_info fs;
	struct ring_buffer *buffer; /* being filled; NULL at a block's boundary */
	size_t used;                /* bytes of it that are filled */
	size_t block_bytes;         /* it leaves when so much of it is */
	uint64_t submitted;         /* bytes that have left in full blocks */
	const uint8_t *lent;        /* what is put from there need not be copied */
	size_t lent_bytes;
	uint32_t crc;        /* of all bytes put, if wanted */
	bool through_engine; /* at least one block has */
	bool was_direct;
	bool handed_over; /* options.nearly_written was told */
	bool nil;         /* the engine drops everything: there is no file */
	bool failed;
	bool finished; /* complete: may be committed */
	/*
	 * Its length is kept by a server, and known: it is set once, with the space, and neither a
	 * block nor its padding lies beyond it.
	 */
	bool keeps_length;
	uint64_t most_bytes;     /* that this process may write into one file (ulimit -f) */
	uint64_t first_block_ns; /* when the engine got its first block */
	uint64_t plan_ns, write_ns, sync_ns, commit_ns;
	char shape_why[160]; /* for the report */
};

/* Runs before each step: the one place that progress and abort are heeded. */
int ring_writer_tell(struct ring_writer *writer, enum ioshape_phase phase,
		     struct base_error *error);
/* Beyond the limit a write would end the application. */
int ring_writer_check_limit(const struct ring_writer *writer, uint64_t bytes,
			    struct base_error *error);

/* Reserves the space that the file is expected to need (writer_open.c). */
int ring_writer_reserve(struct ring_writer *writer, struct base_error *error);

/* ---- Whether direct writes work (direct_proof.c) ----------------------------------------------
 */

enum ring_direct { RING_DIRECT_UNPROVEN, RING_DIRECT_WORKS, RING_DIRECT_FAILS };

/* Whether direct writes work on the filesystem that was described last, as far as this process
 * knows. `proofs` may be NULL: then nothing is remembered. */
enum ring_direct ring_proofs_get(struct ring_proofs *proofs, const struct fs_memory *on);
void ring_proofs_put(struct ring_proofs *proofs, const struct fs_memory *on,
		     enum ring_direct found);

/* Whether a filesystem answers so because it cannot do direct I/O. Pure. */
bool ring_refuses_direct(int code);
/* Whether the block that is sent next must be followed by ring_writer_prove_direct(). */
bool ring_writer_must_prove_direct(const struct ring_writer *writer);
/*
 * Syncs the first block, which has just been submitted with so many bytes of the file. If direct
 * writes turn out not to work, writes it again through the page cache. The block's bytes must lie
 * in the buffer itself: call ring_writer_fill_in() before it is submitted.
 */
int ring_writer_prove_direct(struct ring_writer *writer, const struct ring_buffer *first,
			     size_t bytes, struct base_error *error);

/* ---- Copies (copy.c) ------------------------------------------------------------------------- */

/* Of a copy: before it is synced, it gets what it has in common with its original. */
int ring_writer_resemble(struct ring_writer *writer, struct base_error *error);
/* Just before it is put in place. -EEXIST: what is there is newer. */
int ring_writer_check_newest(const struct ring_writer *writer, struct base_error *error);

/* ---- Lent memory (lend.c) -------------------------------------------------------------------- */

/* How many of the next bytes, which fit into the buffer, must be copied; 0: they may be borrowed,
 * whole pages of them. */
size_t ring_writer_must_copy(const struct ring_writer *writer, const uint8_t *data, size_t bytes);
/* Adds them to the block, which is sent from there. */
size_t ring_writer_borrow(struct ring_writer *writer, const uint8_t *data, size_t bytes);
/* Copies what the block being filled has borrowed. */
void ring_writer_fill_in(struct ring_writer *writer);

#endif
