/* SPDX-License-Identifier: Apache-2.0 */
/* Several threads that examine, checksum and copy the bytes of a save, for fast storage. */
#include "save/file.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Fewer bytes are done before a helper begins. */
#define LEAST_BYTES (512 * KIB)

/* Bytes that the threads share at a time. Blocks have as many, unless the user set their size. */
#define MOST_BYTES (4 * MIB)

/* A slice of a tensor, or less at the ends of the bytes. One thread works on it. */
struct save_unit {
	const uint8_t *data;
	uint8_t *to; /* NULL: not copied */
	size_t bytes;
	uint32_t crc;
	struct base_statistics *statistics; /* NULL: not examined */
	struct base_statistics_rest *rest;
	/* Statistics of a unit that does not continue the unit before it. */
	struct base_statistics own;
	struct base_statistics_rest own_rest;
};

/* The slices, and one more because the first one may be shorter. */
#define MOST_UNITS (MOST_BYTES / BASE_STATISTICS_SLICE + 1)

static void work_on(struct save_unit *unit)
{
	size_t piece;

	for (size_t at = 0; at < unit->bytes; at += piece) {
		const uint8_t *data = unit->data + at;

		piece = MIN(unit->bytes - at, SAVE_CACHED_BYTES);
		if (unit->statistics)
			base_statistics_add(unit->statistics, unit->rest, data, piece);
		unit->crc = unit->to ? base_copy_crc32(unit->crc, unit->to + at, data, piece) :
				       base_crc32(unit->crc, data, piece);
	}
}

static void work(void *user)
{
	struct save_parallel *parallel = user;
	unsigned i;

	while ((i = atomic_fetch_add(&parallel->next, 1)) < parallel->count)
		work_on(&parallel->units[i]);
}

static bool start(struct save_parallel *parallel)
{
	if (parallel->units)
		return true;
	parallel->units = calloc(MOST_UNITS, sizeof(*parallel->units));
	if (!parallel->units) {
		/* Without units the save is slower, but complete. */
		parallel->helpers = 0;
		return false;
	}
	base_crew_init(&parallel->crew, BASE_SPIN_NS);
	return true;
}

/* Divides the bytes from `offset` on, at slices of the record. The first unit continues the
 * record's statistics. */
static void divide(struct save_parallel *parallel, struct save_examining *examining,
		   const uint8_t *data, uint8_t *to, size_t bytes)
{
	uint64_t offset = examining->offset;
	struct save_unit *unit = parallel->units;
	size_t piece;

	for (; bytes; data += piece, offset += piece, bytes -= piece, unit++) {
		piece = MIN(bytes, BASE_STATISTICS_SLICE - offset % BASE_STATISTICS_SLICE);
		unit->data = data;
		unit->bytes = piece;
		unit->to = to;
		unit->crc = 0;
		unit->statistics = examining->statistics;
		unit->rest = &examining->rest;
		to = to ? to + piece : NULL;
		if (unit == parallel->units || !unit->statistics)
			continue;
		unit->statistics = &unit->own;
		unit->rest = &unit->own_rest;
		base_statistics_begin(unit->statistics, examining->statistics->dtype);
		base_statistics_restart(unit->rest);
	}
	parallel->count = (unsigned)(unit - parallel->units);
	atomic_store(&parallel->next, 0);
}

/* Puts the units, whose bytes are where they belong. */
static int put_units(struct save_parallel *parallel, struct save_examining *examining,
		     const struct save_sink *sink, struct base_error *error)
{
	int ret = 0;

	for (unsigned i = 0; !ret && i < parallel->count; i++) {
		const struct save_unit *unit = &parallel->units[i];

		if (unit->statistics && i)
			base_statistics_join(examining->statistics, &examining->rest, &unit->own,
					     &unit->own_rest);
		ret = sink->put(sink->to, unit->to ? unit->to : unit->data, unit->bytes, &unit->crc,
				error);
	}
	return ret;
}

int save_parallel_put(struct save_parallel *parallel, struct save_examining *examining,
		      const struct save_sink *sink, const uint8_t *data, size_t *bytes,
		      struct base_error *error)
{
	size_t space, wanted = MIN(*bytes, MOST_BYTES);
	uint64_t begin_ns;
	bool copies;
	uint8_t *to;
	int ret;

	*bytes = 0;
	if (!parallel->helpers || !parallel->file || wanted < LEAST_BYTES ||
	    !io_writer_is_starved(parallel->file))
		return 0;
	ret = io_writer_space(parallel->file, &to, &space, error);
	if (ret)
		return ret;
	copies = data != to && io_writer_copies(parallel->file, data, MIN(wanted, space));
	if (copies || data == to)
		wanted = MIN(wanted, space);
	if (wanted < LEAST_BYTES || !start(parallel))
		return 0;
	*bytes = wanted;
	begin_ns = base_now_ns();
	divide(parallel, examining, data, copies ? to : NULL, wanted);
	base_crew_begin(&parallel->crew, MIN(parallel->helpers, parallel->count - 1), work,
			parallel);
	work(parallel);
	base_crew_finish(&parallel->crew);
	io_writer_spent(parallel->file, base_now_ns() - begin_ns);
	return put_units(parallel, examining, sink, error);
}

void save_parallel_close(struct save_parallel *parallel)
{
	if (!parallel->units)
		return;
	base_crew_dismiss(&parallel->crew);
	free(parallel->units);
	parallel->units = NULL;
}
