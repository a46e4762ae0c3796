/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of a pool in its file. It is written by pages: the kernel copies one without looking
 * for signals, so that a kill leaves a page as it was or as it was to be, as a rule. Where it does
 * not, a record that makes no sense is dropped: its writer asks again, or loses its slot.
 */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LONGEST_LEASE_MS (600u * 1000)
#define LONGEST_LEASE_NS (LONGEST_LEASE_MS * UINT64_C(1000000))
#define MOST_NUMBER (UINT64_C(1) << 62) /* neither counters nor fences ever get there */

/* The same in programs of 32 and 64 bits. */
_Static_assert(sizeof(struct local_head) == 512, "heads have holes");
_Static_assert(sizeof(struct local_job) == 128, "jobs have holes");
_Static_assert(sizeof(struct local_member) == 256, "members have holes");
_Static_assert(offsetof(struct local_image, more_jobs) == LOCAL_PAGE_BYTES, "not a page");
_Static_assert(offsetof(struct local_image, more_members) == 2 * LOCAL_PAGE_BYTES, "not a page");
_Static_assert(sizeof(struct local_image) % LOCAL_PAGE_BYTES == 0, "not pages");

struct local_job *local_job(struct local_table *table, uint32_t index)
{
	return index < LOCAL_FIRST_JOBS ? &table->image.first_jobs[index] :
					  &table->image.more_jobs[index - LOCAL_FIRST_JOBS];
}

struct local_member *local_member(struct local_table *table, uint32_t index)
{
	return index < LOCAL_FIRST_MEMBERS ?
		       &table->image.first_members[index] :
		       &table->image.more_members[index - LOCAL_FIRST_MEMBERS];
}

void local_changed(struct local_table *table, const void *record)
{
	const size_t page = (size_t)((const uint8_t *)record - table->bytes) / LOCAL_PAGE_BYTES;

	table->changed[page] = true;
	table->changed_end = MAX(table->changed_end, page + 1);
}

/* Fences rise in this process, whatever becomes of the file. */
static void raise_fence(struct local_table *table)
{
	struct local_head *head = &table->image.head;

	if (table->latest_fence <= MOST_NUMBER)
		head->fence = MAX(head->fence, table->latest_fence);
}

void local_clear(struct local_table *table, const char *pool)
{
	struct local_head *head = &table->image.head;

	memset(&table->image, 0, sizeof(table->image));
	memcpy(head->magic, LOCAL_MAGIC, sizeof(head->magic));
	head->version = LOCAL_VERSION;
	snprintf(head->pool, sizeof(head->pool), "%s", pool);
	raise_fence(table);
	local_changed(table, head);
}

/* ---- Checking -------------------------------------------------------------------------------- */

/* Whether it is the table of a pool at all. */
static bool head_holds(const struct local_head *head)
{
	return !memcmp(head->magic, LOCAL_MAGIC, sizeof(head->magic)) &&
	       head->version == LOCAL_VERSION && memchr(head->pool, 0, sizeof(head->pool)) &&
	       head->member_end <= LOCAL_MEMBERS && head->job_end <= LOCAL_JOBS;
}

/*
 * A number that makes no sense begins again at 0: with it go neither settings nor members. A fence
 * may be far ahead of the time, because a clock can be set back.
 */
static bool check_numbers(struct local_table *table)
{
	struct local_head *head = &table->image.head;
	uint64_t *const numbers[] = { &head->fence, &head->seq, &head->grants };
	bool good = true;

	for (size_t i = 0; i < ARRAY_LENGTH(numbers); i++) {
		if (*numbers[i] <= MOST_NUMBER)
			continue;
		*numbers[i] = 0;
		local_changed(table, head);
		good = false;
	}
	return good;
}

static bool text_holds(const char *text, size_t room)
{
	for (size_t i = 0; i < room; i++) {
		if (!text[i])
			return true;
		if (text[i] < ' ' || text[i] > '~')
			return false;
	}
	return false;
}

static bool member_holds(const struct local_member *member, uint64_t now)
{
	return member->state == LOCAL_FREE ||
	       ((member->state == LOCAL_WAITING || member->state == LOCAL_HOLDING) &&
		text_holds(member->id, sizeof(member->id)) && member->id[0] &&
		text_holds(member->job, sizeof(member->job)) &&
		text_holds(member->node, sizeof(member->node)) && member->tag <= MOST_NUMBER &&
		member->seq <= MOST_NUMBER && member->weight > 0 && member->lease_ms > 0 &&
		member->lease_ms <= LONGEST_LEASE_MS && member->process < LOCAL_NUMBERS &&
		member->small <= 1 && member->places <= SLOTS_MOST_PLACES &&
		member->place <= member->places && member->deadline_ns <= now + LONGEST_LEASE_NS);
}

/* Drops what makes no sense. False if there was such a thing. */
static bool check_records(struct local_table *table)
{
	struct local_head *head = &table->image.head;
	const uint64_t now = table->now_ns;
	bool good = check_numbers(table);

	for (uint32_t i = 0; i < head->member_end; i++) {
		struct local_member *member = local_member(table, i);

		member->since_ns = MIN(member->since_ns, now);
		if (member_holds(member, now))
			continue;
		memset(member, 0, sizeof(*member));
		local_changed(table, member);
		good = false;
	}
	for (uint32_t i = 0; i < head->job_end; i++) {
		struct local_job *job = local_job(table, i);

		if (text_holds(job->name, sizeof(job->name)) &&
		    text_holds(job->user, sizeof(job->user)))
			continue;
		memset(job, 0, sizeof(*job));
		strcpy(job->name, "?");
		local_changed(table, job);
		good = false;
	}
	return good;
}

/* ---- Reading --------------------------------------------------------------------------------- */

static void read_clocks(struct local_table *table)
{
	struct timespec wall;

	clock_gettime(CLOCK_REALTIME_COARSE, &wall); /* a few ms are fine, and it costs a third */
	table->wall_ms = (uint64_t)wall.tv_sec * 1000 + (uint64_t)wall.tv_nsec / 1000000;
	table->now_ns = base_now_ns();
}

/* What is not there reads as zeros. 0 or a negative errno. */
static int read_pages(struct local_table *table, int fd, size_t from, size_t to)
{
	/* From the whole table: the compiler takes `bytes` for the head alone, which begins it. */
	uint8_t *into = (uint8_t *)table + offsetof(struct local_table, bytes) + from;
	ssize_t got = to > from ? pread(fd, into, to - from, (off_t)from) : 0;

	if (got < 0)
		return -errno;
	memset(into + got, 0, to - from - (size_t)got);
	return 0;
}

static size_t bytes_used(const struct local_head *head)
{
	const size_t pages = offsetof(struct local_image, more_members);

	if (head->member_end > LOCAL_FIRST_MEMBERS)
		return pages +
		       (head->member_end - LOCAL_FIRST_MEMBERS) * sizeof(struct local_member);
	return head->job_end > LOCAL_FIRST_JOBS ? pages : LOCAL_PAGE_BYTES;
}

static bool is_zero(const struct local_head *head)
{
	const uint8_t *bytes = (const uint8_t *)head;

	return !bytes[0] && !memcmp(bytes, bytes + 1, sizeof(*head) - 1);
}

int local_read(struct local_table *table, int fd, const char *pool)
{
	const struct local_head *head = &table->image.head;
	int ret = read_pages(table, fd, 0, LOCAL_PAGE_BYTES);

	memset(table->changed, 0, sizeof(table->changed));
	table->changed_end = 0;
	table->woken_count = 0;
	read_clocks(table);
	if (ret)
		return ret;
	if (is_zero(head))
		return LOCAL_EMPTY;
	if (!head_holds(head) || strcmp(head->pool, pool) != 0)
		return LOCAL_DAMAGED;
	if (head->flags & LOCAL_GONE)
		return LOCAL_REMOVED;
	ret = read_pages(table, fd, LOCAL_PAGE_BYTES, bytes_used(head));
	if (ret)
		return ret;
	ret = check_records(table) ? LOCAL_FOUND : LOCAL_RECORD_DAMAGED;
	raise_fence(table);
	return ret;
}

bool local_read_head(int fd, struct local_head *head)
{
	return pread(fd, head, sizeof(*head), 0) == sizeof(*head) && head_holds(head);
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* Asked twice a second: every time would cost as much as the lock. */
static uint64_t largest_file(uint64_t now)
{
	static _Atomic uint64_t latest, asked_ns;

	if (now - atomic_load(&asked_ns) > 500000000) {
		atomic_store(&latest, base_largest_file());
		atomic_store(&asked_ns, now);
	}
	return atomic_load(&latest);
}

/* Beyond the limit of file sizes the kernel would end the process, by a signal. */
static int write_bytes(int fd, const void *data, size_t bytes, off_t at, uint64_t now)
{
	ssize_t done;

	if ((uint64_t)at + bytes > largest_file(now))
		return -EFBIG;
	done = pwrite(fd, data, bytes, at);
	if (done < 0)
		return -errno;
	return (size_t)done == bytes ? 0 : -ENOSPC;
}

int local_write(struct local_table *table, int fd)
{
	const size_t most = table->changed_end;
	int ret = 0;

	for (size_t begin = 0; begin < most && !ret; begin++) {
		size_t end = begin;

		while (end < most && table->changed[end])
			end++;
		if (end > begin)
			ret = write_bytes(fd, table->bytes + begin * LOCAL_PAGE_BYTES,
					  (end - begin) * LOCAL_PAGE_BYTES,
					  (off_t)(begin * LOCAL_PAGE_BYTES), table->now_ns);
		begin = MAX(begin, end);
	}
	table->latest_fence = MAX(table->latest_fence, table->image.head.fence);
	return ret;
}

int local_write_gone(int fd, const struct local_head *latest)
{
	struct local_head head = *latest;

	head.flags |= LOCAL_GONE;
	return write_bytes(fd, &head, sizeof(head), 0, base_now_ns());
}
