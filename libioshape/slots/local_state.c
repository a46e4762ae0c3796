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
_Static_assert(sizeof(struct rules_member) == 272, "members have holes");
_Static_assert(sizeof(struct rules_job) == 136, "jobs have holes");
_Static_assert(sizeof(struct local_header) == 328, "headers have holes");

static off_t area(unsigned half)
{
	return (off_t)(sizeof(((struct local_file *)NULL)->halves) + half * AREA_BYTES);
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

/* Which of two is the newer one, if it holds. */
static unsigned newer_of(const union local_half halves[2])
{
	return halves[1].header.seq > halves[0].header.seq;
}

bool local_peek(const union local_half halves[2], struct local_header *header)
{
	const unsigned newer = newer_of(halves);

	*header = halves[newer].header;
	if (header_holds(header))
		return true;
	*header = halves[!newer].header;
	return header_holds(header);
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
	const uint8_t *body = file->halves[half].bytes + sizeof(*header);
	struct rules_state *state = file->state;
	struct iovec parts[2] = { { state->members, members }, { state->jobs, jobs } };

	if (!lies_inline(header))
		return preadv(file->fd, parts, 2, area(half)) == (ssize_t)(members + jobs);
	memcpy(state->members, body, members);
	memcpy(state->jobs, body + members, jobs);
	return true;
}

static bool take(struct local_file *file, unsigned half)
{
	const struct local_header *header = &file->halves[half].header;
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
	file->ahead_ms = header->ahead_ms;
	return true;
}

static bool is_zero(const uint8_t *bytes, size_t count)
{
	return !bytes[0] && !memcmp(bytes, bytes + 1, count - 1);
}

/*
 * Whoever wrote since we did, wrote where the older of the two lies, with a higher number. (If more
 * than one did, then a higher number lies there all the same.)
 */
static bool is_as_we_left_it(const struct local_file *file)
{
	const off_t older = ((file->seq + 1) & 1) * LOCAL_HALF_BYTES;
	uint64_t seq;

	return file->seq &&
	       pread(file->fd, &seq, sizeof(seq),
		     older + (off_t)offsetof(struct local_header, seq)) == sizeof(seq) &&
	       seq == file->seq - 1;
}

int local_read(struct local_file *file)
{
	ssize_t got;
	unsigned newer;

	if (is_as_we_left_it(file))
		return LOCAL_FOUND;
	file->seq = 0;
	got = pread(file->fd, file->halves, sizeof(file->halves), 0);
	if (got < 0)
		return -errno;
	if ((size_t)got < sizeof(file->halves))
		memset((uint8_t *)file->halves + got, 0, sizeof(file->halves) - (size_t)got);
	newer = newer_of(file->halves);
	if (!take(file, newer)) {
		newer = !newer;
		if (!take(file, newer))
			return is_zero((const uint8_t *)file->halves, sizeof(file->halves)) ?
				       LOCAL_EMPTY :
				       LOCAL_DAMAGED;
	}
	return file->halves[newer].header.flags & LOCAL_GONE ? LOCAL_REMOVED : LOCAL_FOUND;
}

/* Asked anew twice a second: every time would cost as much as the lock. */
static uint64_t largest_file(void)
{
	static _Atomic uint64_t latest, asked_ns;
	const uint64_t now = base_now_ns();

	if (now - atomic_load(&asked_ns) > 500000000) {
		atomic_store(&latest, base_largest_file());
		atomic_store(&asked_ns, now);
	}
	return atomic_load(&latest);
}

static int write_parts(int fd, const struct iovec *parts, int count, off_t at)
{
	size_t wanted = 0;
	ssize_t done;

	for (int i = 0; i < count; i++)
		wanted += parts[i].iov_len;
	if ((uint64_t)at + wanted > largest_file())
		return -EFBIG;
	done = pwritev(fd, parts, count, at);
	if (done < 0)
		return -errno;
	return (size_t)done == wanted ? 0 : -ENOSPC;
}

static int write_bytes(int fd, void *data, size_t bytes, off_t at)
{
	const struct iovec part = { data, bytes };

	return write_parts(fd, &part, 1, at);
}

/* Behind the header in its half of the page. */
static int write_inline(struct local_file *file, struct local_header *header, off_t at)
{
	const size_t members = members_bytes(header), jobs = jobs_bytes(header);
	const size_t bytes = sizeof(*header) + members + jobs;
	uint8_t *body = (uint8_t *)(header + 1);

	memcpy(body, file->state->members, members);
	memcpy(body + members, file->state->jobs, jobs);
	header->crc = base_crc32(0, (uint8_t *)header + CHECKED_FROM, bytes - CHECKED_FROM);
	return write_bytes(file->fd, header, bytes, at);
}

/* The header last: without it the rest does not count. */
static int write_apart(struct local_file *file, struct local_header *header, off_t at)
{
	struct rules_state *state = file->state;
	const size_t members = members_bytes(header), jobs = jobs_bytes(header);
	const struct iovec parts[2] = { { state->members, members }, { state->jobs, jobs } };
	int ret = write_parts(file->fd, parts, 2, area(header->seq & 1));

	if (ret)
		return ret;
	header->crc = checksum(header, state);
	return write_bytes(file->fd, header, sizeof(*header), at);
}

/* Where the numbers are at their end, which takes an enemy: they begin anew, in an empty file. */
static int next_seq(struct local_file *file, uint64_t *seq)
{
	*seq = file->seq + 1;
	if (*seq < MOST_SEQ)
		return 0;
	*seq = 1;
	return ftruncate(file->fd, 0) ? -errno : 0;
}

int local_write(struct local_file *file, uint32_t flags)
{
	const struct rules_state *state = file->state;
	struct local_header *header;
	uint64_t seq;
	off_t at;
	int ret = next_seq(file, &seq);

	/* After a failure nobody knows what is there. */
	file->seq = 0;
	if (ret)
		return ret;
	at = (off_t)((seq & 1) * LOCAL_HALF_BYTES);
	header = &file->halves[seq & 1].header;
	memcpy(header->magic, LOCAL_MAGIC, sizeof(header->magic));
	header->version = LOCAL_VERSION;
	header->seq = seq;
	header->flags = flags;
	header->member_count = state->member_count;
	header->job_count = state->job_count;
	header->unused = 0;
	header->ahead_ms = file->ahead_ms;
	memcpy(header->pool, file->pool, sizeof(header->pool));
	header->numbers = state->pool;
	ret = lies_inline(header) ? write_inline(file, header, at) : write_apart(file, header, at);
	file->seq = ret ? 0 : seq;
	file->latest_fence = MAX(file->latest_fence, state->pool.fence);
	file->latest_epoch = MAX(file->latest_epoch, state->pool.epoch);
	return ret;
}

int local_write_gone(int fd, const struct local_header *latest)
{
	struct local_header header = *latest;

	header.seq++;
	header.flags |= LOCAL_GONE;
	header.member_count = header.job_count = 0;
	header.crc =
		base_crc32(0, (uint8_t *)&header + CHECKED_FROM, sizeof(header) - CHECKED_FROM);
	return write_bytes(fd, &header, sizeof(header),
			   (off_t)((header.seq & 1) * LOCAL_HALF_BYTES));
}
