/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Digests of the file that a collective save would write, computed before it is written. Ranks use
 * them to find out that they save the same bytes.
 *
 * Only bytes that can be read twice have a digest: staged bytes, if all are staged at once, and
 * those in the caller's memory. A function of the caller is called only once for each byte, so
 * bytes that it fetches have a digest only once they are staged.
 */
#include "save/background.h"

#include <stdlib.h>
#include <string.h>

/* From this length on, checksums are combined instead of computed twice. */
#define COMBINE_BYTES (4 * KIB)

/* Both checksums read this many bytes at a time, so that the second one finds them in the cache. */
#define CACHED_BYTES (64 * KIB)

/* Half of a sample is pieces, spread evenly over the payload. */
#define PIECES 64u
#define PIECE_BYTES (SAVE_SAMPLE_BYTES / 2 / PIECES)
/* The other half differs between ranks with the same weights. It has the pickle, which is the first
 * record, and records up to this size, such as states of random generators. */
#define SMALL_BYTES (16 * KIB)

bool save_has_digest(const struct ioshape_save *save)
{
	const struct save_stage *stage = &save->stage;

	return save->request.task.borrow ? !save->request.plan.fetches :
					   stage->chunk_count <= stage->admitted;
}

/* ---- Sources --------------------------------------------------------------------------------- */

/* Returns staged bytes as stage_next() of save.c does, but keeps every chunk. A save_source
 * function. */
static int next_staged(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		       struct base_error *error)
{
	const struct ioshape_save *save = user;
	const uint64_t at = save->request.plan.records[record].start + offset;
	const uint64_t within = at % SAVE_CHUNK_BYTES;

	(void)error;
	*data = save->stage.chunks[at / SAVE_CHUNK_BYTES]->memory + within;
	*bytes = MIN(*bytes, SAVE_CHUNK_BYTES - within);
	return 0;
}

/* Returns the source of a save's bytes. The caller frees direct->scratch. */
static struct save_source source_of(struct ioshape_save *save, struct save_direct *direct)
{
	*direct = (struct save_direct){ .plan = &save->request.plan };
	return save->request.task.borrow ?
		       (struct save_source){ save_direct_next, NULL, direct, NULL } :
		       (struct save_source){ next_staged, NULL, save, NULL };
}

/* ---- Samples --------------------------------------------------------------------------------- */

struct sample {
	const struct save_plan *plan;
	struct save_source source;
	struct base_mac mac;
};

static int take_bytes(struct sample *sample, size_t record, uint64_t offset, uint64_t bytes,
		      struct base_error *error)
{
	const void *data = sample->plan->records[record].data;
	int ret = 0;
	size_t run;

	for (uint64_t done = 0; !ret && done < bytes; done += run) {
		run = bytes - done;
		ret = sample->source.next(sample->source.user, record, offset + done, &data, &run,
					  error);
		if (!ret)
			base_mac_put(&sample->mac, data, run);
	}
	return ret;
}

static int take_small(struct sample *sample, struct base_error *error)
{
	const struct save_plan *plan = sample->plan;
	uint64_t left = SAVE_SAMPLE_BYTES / 2;
	int ret = 0;

	for (size_t i = plan->own; !ret && i < plan->count; i++) {
		const uint64_t bytes = plan->records[i].bytes;
		const uint64_t taken = i == plan->own || bytes <= SMALL_BYTES ? MIN(bytes, left) :
										0;

		ret = take_bytes(sample, i, 0, taken, error);
		left -= taken;
	}
	return ret;
}

static int take_pieces(struct sample *sample, struct base_error *error)
{
	const struct save_plan *plan = sample->plan;
	const uint64_t step = MAX(plan->payload_bytes / PIECES, PIECE_BYTES);
	uint64_t begin = 0, run; /* position of the record in the payload */
	size_t record = plan->own;
	int ret = 0;

	for (uint64_t i = 0; !ret && i < PIECES && i * step < plan->payload_bytes; i++) {
		const uint64_t end = MIN(i * step + PIECE_BYTES, plan->payload_bytes);

		for (uint64_t at = i * step; !ret && at < end; at += run) {
			while (at >= begin + plan->records[record].bytes)
				begin += plan->records[record++].bytes;
			run = MIN(end, begin + plan->records[record].bytes) - at;
			ret = take_bytes(sample, record, at - begin, run, error);
		}
	}
	return ret;
}

int save_take_sample(struct ioshape_save *save, uint8_t mac[BASE_MAC_BYTES],
		     struct base_error *error)
{
	static const uint8_t no_key[BASE_MAC_BYTES];
	struct sample sample = { .plan = &save->request.plan };
	struct save_direct direct;
	int ret;

	sample.source = source_of(save, &direct);
	base_mac_begin(&sample.mac, no_key);
	ret = take_small(&sample, error);
	if (!ret)
		ret = take_pieces(&sample, error);
	base_mac_end(&sample.mac, mac);
	save_direct_end(&direct);
	return ret;
}

/* ---- Digests of a whole file ----------------------------------------------------------------- */

/* A sink that computes checksums and stores nothing. */
struct digesting {
	struct save_digest *digest;
	struct base_mac mac;
	int (*go_on)(void *user, struct base_error *error);
	void *user;
};

static uint64_t sink_offset(void *to)
{
	const struct digesting *digesting = to;

	return digesting->digest->bytes;
}

static int sink_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	struct digesting *digesting = to;
	struct save_digest *digest = digesting->digest;
	uint32_t piece = 0;
	size_t run;

	for (size_t at = 0; at < bytes; at += run) {
		run = MIN(bytes - at, CACHED_BYTES);
		piece = base_crc32(piece, (const uint8_t *)data + at, run);
		base_mac_put(&digesting->mac, (const uint8_t *)data + at, run);
	}
	digest->bytes += bytes;
	digest->crc32 = base_crc32_combine(digest->crc32, piece, bytes);
	if (crc && bytes < COMBINE_BYTES)
		*crc = base_crc32(*crc, data, bytes);
	else if (crc)
		*crc = base_crc32_combine(*crc, piece, bytes);
	return digesting->go_on(digesting->user, error);
}

static const struct format_sink_ops sink_ops = { .offset = sink_offset, .put = sink_put };

int save_take_digest(struct ioshape_save *save, const uint8_t key[BASE_MAC_BYTES],
		     struct save_digest *digest, int (*go_on)(void *user, struct base_error *error),
		     void *user, struct base_error *error)
{
	struct digesting digesting = { .digest = digest, .go_on = go_on, .user = user };
	struct save_direct direct;
	const struct save_source source = source_of(save, &direct);
	struct format_writer *zip = NULL;
	int ret;

	memset(digest, 0, sizeof(*digest));
	base_mac_begin(&digesting.mac, key);
	ret = format_writer_new(&zip, (struct format_sink){ &sink_ops, &digesting },
				save->request.path, error);
	if (!ret)
		ret = save_write_records(zip, &save->request.plan, &source, &save->compare, error);
	if (!ret)
		base_mac_end(&digesting.mac, digest->mac);
	format_writer_free(zip);
	save_direct_end(&direct);
	return ret;
}
