/* SPDX-License-Identifier: Apache-2.0 */
/* Verifying a file, or a sample of it, without keeping what is read. */
#include "save/load/load.h"

#include <errno.h>
#include <stdlib.h>

/* What of a file is read. */
struct sample {
	const struct ioshape_reader *reader;
	double share;
	uint64_t pieces;
};

/* Records, or the one that is all of a plain file. */
static uint64_t entry_count(const struct ioshape_reader *reader)
{
	return reader->zip.plain ? 1 : save_reader_records(reader);
}

/*
 * What has a checksum of its own: a block or a record. If all is read, whole records are fewer. An
 * empty record is a piece, too, since its checksum can be wrong.
 */
static uint64_t piece_bytes(const struct sample *sample, uint64_t record)
{
	const struct zip_reader *zip = &sample->reader->zip;

	return zip->has_index && sample->share < 1 ? zip->index.check_bytes :
						     zip->directory.entries[record].bytes;
}

static uint64_t piece_count(const struct sample *sample, uint64_t record)
{
	const uint64_t bytes = sample->reader->zip.directory.entries[record].bytes;

	return bytes ? (bytes - 1) / piece_bytes(sample, record) + 1 : 1;
}

static struct zip_range piece(const struct sample *sample, uint64_t record, uint64_t number)
{
	const uint64_t bytes = sample->reader->zip.directory.entries[record].bytes;
	const uint64_t length = piece_bytes(sample, record), offset = number * length;

	return (struct zip_range){ record, offset, MIN(length, bytes - offset), NULL };
}

/* Evenly spread, from a random one on: whoever looks often has looked at all. */
static size_t choose(const struct sample *sample, struct zip_range *ranges, size_t room)
{
	const double step = 1 / sample->share, pieces = (double)sample->pieces;
	double next = (double)(base_random() >> 11) / (double)(1ull << 53) * MIN(step, pieces);
	uint64_t before = 0;
	size_t count = 0;

	for (uint64_t record = 0; record < entry_count(sample->reader); record++) {
		const uint64_t own = piece_count(sample, record);

		for (; count < room && next < (double)(before + own); next += step)
			ranges[count++] = piece(sample, record, (uint64_t)next - before);
		before += own;
	}
	return count;
}

static int verify_sample(struct ioshape_reader *reader, double share)
{
	struct sample sample = { .reader = reader, .share = share };
	struct zip_range *ranges;
	size_t count;
	int ret;

	for (uint64_t record = 0; record < entry_count(reader); record++)
		sample.pieces += piece_count(&sample, record);
	count = (size_t)((double)sample.pieces * share) + 1;
	ranges = calloc(count, sizeof(*ranges));
	if (!ranges)
		return base_no_memory(&reader->error, "verifying", count * sizeof(*ranges));
	count = share > 0 ? choose(&sample, ranges, count) : 0;
	ret = count ? save_reader_read(reader, ranges, count, true) : 0;
	if (!ret)
		ret = zip_reader_check_headers(&reader->zip, &reader->error);
	free(ranges);
	return ret;
}

static int refuse_to_verify(struct ioshape_reader *reader)
{
	const char *path = reader->zip.input.path;

	if (reader->beside.code)
		return base_pass_on(&reader->error, &reader->beside);
	if (reader->zip.plain)
		return base_refuse(&reader->error, -ENODATA,
				   "cannot verify \"%s\": no checksums of it are known" BASE_REMEDY
				   "write it with them (checksums of an atomic file)",
				   path);
	return base_refuse(&reader->error, -ENODATA,
			   "cannot verify \"%s\": it was written without checksums "
			   "(torch.serialization.set_crc32_options)" BASE_REMEDY
			   "save it again with them",
			   path);
}

IOSHAPE_EXPORT int ioshape_reader_verify(struct ioshape_reader *reader, double share)
{
	int ret = save_reader_enter(reader);

	if (!ret && !(share >= 0 && share <= 1))
		ret = base_refuse(&reader->error, -EINVAL,
				  "cannot verify a share of %g of a file" BASE_REMEDY
				  "give one from 0 to 1",
				  share);
	/* Damage there hides damage in the file, also in an archive with checksums of its own. */
	if (!ret && reader->beside.code && reader->beside.code != -ENODATA)
		ret = base_pass_on(&reader->error, &reader->beside);
	if (!ret && share > 0 && reader->zip.no_checksums)
		ret = refuse_to_verify(reader);
	if (!ret)
		ret = verify_sample(reader, share);
	return save_reader_leave(reader, "verify", ret);
}
