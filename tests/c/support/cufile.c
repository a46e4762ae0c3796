/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for libcufile.so.0, with a "GPU" whose memory is the CPU's. Like the real library it
 * reads from any offset to any address, may read less than it was asked for, and may be called by
 * many threads.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

struct result {
	int code;
	int cuda_code;
};

struct description {
	int kind;
	union {
		int descriptor;
		void *pointer;
	} handle;
	const void *operations;
};

#define KIND_OF_DESCRIPTOR 1
#define NOT_SUPPORTED 5009
#define MOST_BYTES ((1u << 20) + 4099u) /* limit of one call */

/* Settings and counters of the tests. */
struct cufile_play {
	int refuses;             /* whether files are refused */
	uint64_t fails_after;    /* number of reads after which reads fail; 0: never */
	uint64_t garbles;        /* number of the read to corrupt, counted from 1; 0: none */
	_Atomic uint64_t reads;  /* read calls */
	_Atomic uint64_t bytes;  /* bytes read */
	_Atomic int64_t handles; /* registered handles */
};

extern struct cufile_play cufile_play;
struct cufile_play cufile_play;

struct result cuFileHandleRegister(void **handle, const struct description *description);
struct result cuFileHandleRegister(void **handle, const struct description *description)
{
	int *descriptor;

	if (cufile_play.refuses || description->kind != KIND_OF_DESCRIPTOR)
		return (struct result){ NOT_SUPPORTED, 0 };
	descriptor = malloc(sizeof(*descriptor));
	if (!descriptor)
		abort();
	*descriptor = description->handle.descriptor;
	*handle = descriptor;
	cufile_play.handles++;
	return (struct result){ 0, 0 };
}

void cuFileHandleDeregister(void *handle);
void cuFileHandleDeregister(void *handle)
{
	free(handle);
	cufile_play.handles--;
}

/*
 * Reads through an aligned buffer: direct reads need aligned memory, and a GPU's address need not
 * be aligned.
 */
static ssize_t read_anywhere(int descriptor, char *into, size_t bytes, off_t offset)
{
	const size_t unit = 4096;
	const size_t before = (size_t)offset % unit;
	const size_t whole = (before + bytes + unit - 1) / unit * unit;
	char *aligned = aligned_alloc(unit, whole);
	ssize_t count;

	if (!aligned)
		abort();
	count = pread(descriptor, aligned, whole, offset - (off_t)before);
	count = count < 0 ? count : count - (ssize_t)before;
	if (count > (ssize_t)bytes)
		count = (ssize_t)bytes;
	for (ssize_t i = 0; i < count; i++)
		into[i] = aligned[before + (size_t)i];
	free(aligned);
	return count;
}

ssize_t cuFileRead(void *handle, void *base, size_t bytes, off_t offset, off_t into);
ssize_t cuFileRead(void *handle, void *base, size_t bytes, off_t offset, off_t into)
{
	const uint64_t number = ++cufile_play.reads;
	ssize_t count;

	if (cufile_play.fails_after && number > cufile_play.fails_after) {
		errno = EIO;
		return -1;
	}
	if (bytes > MOST_BYTES)
		bytes = MOST_BYTES;
	count = read_anywhere(*(const int *)handle, (char *)base + into, bytes, offset);
	if (count > 0 && number == cufile_play.garbles)
		((char *)base)[into] ^= 1;
	if (count > 0)
		cufile_play.bytes += (uint64_t)count;
	return count;
}
