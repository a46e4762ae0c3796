/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All declarations that the Python package uses beyond the public headers. The package contains the
 * library, and both are built together, so this list may change with every commit. No other header
 * repeats a declaration; base.h includes this one.
 *
 * cffi reads this file, too: declarations and comments, and no macros but this guard.
 */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <stddef.h>
#include <stdint.h>

/* ---- This process in its job (base/job.c) ---------------------------------------------------- */

struct base_job {
	uint32_t rank;
	uint32_t ranks;
	uint32_t local_rank;  /* among the ranks of this node */
	uint32_t local_ranks; /* 1 if the launcher does not say */
	char id[256];         /* shared by all ranks of the job; "" if the launcher does not say */
	char launcher[16];    /* "torchrun", "slurm", "openmpi", "mpich", "pmi", or "alone" */
};

/* Reads the variables of the launcher. */
void base_job_find(struct base_job *job);

/* ---- Checksums (base/checksum.c) ------------------------------------------------------------- */

/* Returns the CRC-32 of zip and gzip. `crc` continues an earlier result; 0 begins. */
uint32_t base_crc32(uint32_t crc, const void *data, size_t bytes);
/* Returns the checksum of A followed by B, given both checksums and the length of B. */
uint32_t base_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

/* ---- Copies by several threads (base/copier.c) ----------------------------------------------- */

struct base_copier;

/* For one thread at a time. NULL: there is no memory; the caller then copies alone. */
struct base_copier *base_copier_open(void);
void base_copier_copy(struct base_copier *copier, void *to, const void *from, size_t bytes);
void base_copier_free(struct base_copier *copier);

/* ---- Bytes that grow (base/memory.c) --------------------------------------------------------- */

/* Zero it to begin. After a failed append it is unchanged. */
struct base_buffer {
	uint8_t *data;
	size_t bytes;
	size_t room;
};

void base_buffer_free(struct base_buffer *buffer);

/* ---- Where locks are seen (ring/liveness.c) ---------------------------------------------------- */

/*
 * Writes eight hexadecimal digits and a 0 that identify the lock domain of a directory: locks are
 * seen through this mount of its filesystem on this machine. A second mount of the directory, or
 * another machine, may be another domain: a lock there says nothing about the writer.
 */
void ring_lock_domain(int directory_fd, char *domain);

/* ---- Checksums beside a file in another format (zip/checksums.c) ----------------------------- */

/* A CRC-32 for each block of a file; the last block is as long as what is left. */
struct zip_checksums {
	uint64_t file_bytes;
	uint64_t block_bytes;
	uint64_t blocks;
	const uint32_t *crc32; /* `blocks` of them */
	/* When the file was last modified, in nanoseconds since 1970: a file that has another time
	 * is another file. 0 if that is not known. */
	int64_t modified_ns;
};

/* Appends them as the file has them. 0, -ENOMEM, or -EFBIG if they could not be read again. */
int zip_checksums_encode(struct base_buffer *out, const struct zip_checksums *checksums);

/* ---- The journal of a tier (tier/names.c) ---------------------------------------------------- */

/* Returns the path of the checkpoint that an entry is about, within `text`, and whether it is
 * drained; NULL if this is no entry. */
const char *tier_path_of_entry(const char *name, const char *text, int *drained);

/* ---- The table of settings (base/settings.def), a row ---------------------------------------- */

struct base_setting_row {
	const char *name, *owner, *kind, *words;
	uint64_t least, most;
	const char *values, *otherwise, *about, *user;
};

#endif
