/* SPDX-License-Identifier: Apache-2.0 */
/* States in files: two, of which the newer one that holds counts. */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define AREA_BYTES                                                                                 \
	base_round_up(RULES_MEMBERS * sizeof(struct rules_member) +                                \
			      RULES_JOBS * sizeof(struct rules_job),                               \
		      4096)
#define MOST_SEQ (UINT64_C(1) << 62)
#define CHECKED_FROM offsetof(struct local_header, seq)

/* The same in programs of 32 and 64 bits. */
_Static_assert(sizeof(struct rules_member) == 264, "members have holes");
_Static_assert(sizeof(struct rules_job) == 104, "jobs have holes");
_Static_assert(sizeof(struct local_header) == 184 + 8 * 15, "headers have holes");

static off_t area(unsigned half)
{
	return (off_t)(sizeof(((struct local_file *)NULL)->page) + half * AREA_BYTES);
}

static size_t members_bytes(const struct local_header *header)
{
	return header->member_count * sizeof(struct rules_member);
}

static size_t jobs_bytes(const struct local_header *header)
{
	return header->job_count * sizeof(struct rules_job);
}

static bool lies_inline(const struct local_header *header)
{
	return members_bytes(header) + jobs_bytes(header) <= LOCAL_INLINE_BYTES;
}

static bool header_holds(const struct local_header *header)
{
	return !memcmp(header->magic, LOCAL_MAGIC, sizeof(header->magic)) &&
	       header->version == LOCAL_VERSION && header->seq > 0 && header->seq < MOST_SEQ &&
	       header->member_count <= RULES_MEMBERS && header->job_count <= RULES_JOBS &&
	       header->ahead_ms >= 0 && header->ahead_ms <= RULES_LATEST_MS &&
	       memchr(header->pool, 0, sizeof(header->pool));
}

/* The newer of two comes first. */
static void headers_of(const uint8_t *page, struct local_header headers[2], unsigned order[2])
{
	for (unsigned half = 0; half < 2; half++)
		memcpy(&headers[half], page + half * LOCAL_HALF_BYTES, sizeof(headers[half]));
	order[0] = headers[1].seq > headers[0].seq;
	order[1] = !order[0];
}

bool local_peek(const uint8_t *page, struct local_header *header)
{
	struct local_header headers[2];
	unsigned order[2];

	headers_of(page, headers, order);
	for (unsigned i = 0; i < 2; i++) {
		*header = headers[order[i]];
		if (header_holds(header))
			return true;
	}
	return false;
}

static uint32_t checksum(const struct local_header *header, const struct rules_state *state)
{
	uint32_t crc = base_crc32(0, (const uint8_t *)header + CHECKED_FROM,
				  sizeof(*header) - CHECKED_FROM);

	crc = base_crc32(crc, state->members, members_bytes(header));
	return base_crc32(crc, state->jobs, jobs_bytes(header));
}

/* False where it is not there as a whole. */
static bool read_body(struct local_file *file, const struct local_header *header, unsigned half)
{
	const size_t members = members_bytes(header), jobs = jobs_bytes(header);
	const uint8_t *body = file->page + half * LOCAL_HALF_BYTES + sizeof(*header);
	struct rules_state *state = file->state;
	struct iovec parts[2] = { { state->members, members }, { state->jobs, jobs } };

	if (!lies_inline(header))
		return preadv(file->fd, parts, 2, area(half)) == (ssize_t)(members + jobs);
	memcpy(state->members, body, members);
	memcpy(state->jobs, body + members, jobs);
	return true;
}

static bool take(struct local_file *file, const struct local_header *header, unsigned half)
{
	struct rules_state *state = file->state;

	if (!header_holds(header) || strcmp(header->pool, file->pool) ||
	    !read_body(file, header, half) || checksum(header, state) != header->crc)
		return false;
	state->pool = header->numbers;
	state->member_count = header->member_count;
	state->job_count = header->job_count;
	if (!rules_hold(state))
		return false;
	file->seq = header->seq;
	file->crc = header->crc;
	file->ahead_ms = header->ahead_ms;
	return true;
}

static bool is_zero(const uint8_t *bytes, size_t count)
{
	return !bytes[0] && !memcmp(bytes, bytes + 1, count - 1);
}

int local_read(struct local_file *file)
{
	ssize_t got = pread(file->fd, file->page, sizeof(file->page), 0);
	struct local_header headers[2];
	unsigned order[2];

	if (got < 0)
		return -errno;
	memset(file->page + got, 0, sizeof(file->page) - (size_t)got);
	headers_of(file->page, headers, order);
	/* As we left it: nobody else was there. */
	if (file->seq && headers[order[0]].seq == file->seq && headers[order[0]].crc == file->crc)
		return LOCAL_FOUND;
	file->seq = 0;
	for (unsigned i = 0; i < 2; i++) {
		if (take(file, &headers[order[i]], order[i]))
			return headers[order[i]].flags & LOCAL_GONE ? LOCAL_REMOVED : LOCAL_FOUND;
	}
	return is_zero(file->page, sizeof(file->page)) ? LOCAL_EMPTY : LOCAL_DAMAGED;
}

/* `done` is what a write said. */
static int as_error(ssize_t done, size_t wanted)
{
	if (done < 0)
		return -errno;
	return (size_t)done == wanted ? 0 : -ENOSPC;
}

/* Behind the header in its half of the page. */
static int write_inline(struct local_file *file, struct local_header *header, unsigned half)
{
	const size_t members = members_bytes(header), jobs = jobs_bytes(header);
	uint8_t *place = file->page + half * LOCAL_HALF_BYTES, *body = place + sizeof(*header);
	const size_t bytes = sizeof(*header) + members + jobs;

	memcpy(body, file->state->members, members);
	memcpy(body + members, file->state->jobs, jobs);
	memcpy(place, header, sizeof(*header));
	header->crc = base_crc32(0, place + CHECKED_FROM, bytes - CHECKED_FROM);
	memcpy(place + offsetof(struct local_header, crc), &header->crc, sizeof(header->crc));
	return as_error(pwrite(file->fd, place, bytes, (off_t)(half * LOCAL_HALF_BYTES)), bytes);
}

/* The header last: without it the rest does not count. */
static int write_apart(struct local_file *file, struct local_header *header, unsigned half)
{
	struct rules_state *state = file->state;
	const size_t members = members_bytes(header), jobs = jobs_bytes(header);
	const struct iovec parts[2] = { { state->members, members }, { state->jobs, jobs } };
	int ret = as_error(pwritev(file->fd, parts, 2, area(half)), members + jobs);

	if (ret)
		return ret;
	header->crc = checksum(header, state);
	return as_error(pwrite(file->fd, header, sizeof(*header), (off_t)(half * LOCAL_HALF_BYTES)),
			sizeof(*header));
}

int local_write(struct local_file *file, uint32_t flags)
{
	const unsigned half = (file->seq + 1) & 1;
	const struct rules_state *state = file->state;
	struct local_header header = {
		.magic = LOCAL_MAGIC,
		.version = LOCAL_VERSION,
		.seq = file->seq + 1,
		.flags = flags,
		.member_count = state->member_count,
		.job_count = state->job_count,
		.ahead_ms = file->ahead_ms,
		.numbers = state->pool,
	};
	int ret;

	memcpy(header.pool, file->pool, sizeof(header.pool));
	ret = lies_inline(&header) ? write_inline(file, &header, half) :
				     write_apart(file, &header, half);
	/* After a failure nobody knows what is there. */
	file->seq = ret ? 0 : header.seq;
	file->crc = header.crc;
	file->latest_fence = MAX(file->latest_fence, state->pool.fence);
	file->latest_epoch = MAX(file->latest_epoch, state->pool.epoch);
	return ret;
}
