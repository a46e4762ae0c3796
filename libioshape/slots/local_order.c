/* SPDX-License-Identifier: Apache-2.0 */
/* Records of requests, locks on bytes of a pool's file, and what follows from both: which request
 * is next, and which slots are free. Calls nothing of local.c and local_file.c. */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Bytes by what their locks mean. Lines are far apart, so that tickets may rise for ever. */
#define LOCAL_LOCKS (INT64_C(1) << 40)
#define PRESENT LOCAL_LOCKS
#define MAKER (LOCAL_LOCKS + 1)
#define HOLDER(number) (LOCAL_LOCKS + 16 + (off_t)(number))
#define URGENT_LINE (2 * LOCAL_LOCKS)
#define LINE (3 * LOCAL_LOCKS)
#define SMALL_LINE (4 * LOCAL_LOCKS)
#define LINE_TICKETS LOCAL_LOCKS

/* Another user may lock any bytes, of which the kernel looks at all each time: so often in one
 * call. */
#define MOST_FINDS 4096u

#define LONGEST_LEASE_NS (UINT64_C(600) * 1000000000)

/* ---- Records --------------------------------------------------------------------------------- */

int local_write(const struct local_pool *pool, uint64_t at, const void *data, size_t bytes)
{
	ssize_t done;

	/* Beyond the limit of file sizes the kernel would end the process, by a signal. */
	if (at + bytes > pool->largest_bytes)
		return -EFBIG;
	done = pwrite(pool->fd, data, bytes, (off_t)at);
	if (done < 0)
		return -errno;
	return (size_t)done == bytes ? 0 : -ENOSPC;
}

static uint64_t offset_of(uint32_t number)
{
	return LOCAL_HEAD_BYTES + (uint64_t)number * sizeof(struct slots_file_record);
}

int local_write_record(const struct local_pool *pool, uint32_t number,
		       const struct slots_file_record *record)
{
	return local_write(pool, offset_of(number), record,
			   offsetof(struct slots_file_record, unused));
}

static void end_text(char *text, size_t room)
{
	text[room - 1] = 0;
	for (; *text; text++) {
		if (*text < ' ' || *text > '~')
			*text = '?';
	}
}

void local_read_record(const struct local_pool *pool, uint32_t number,
		       struct slots_file_record *record)
{
	const ssize_t got = pread(pool->fd, record, sizeof(*record), (off_t)offset_of(number));
	const size_t bytes = (size_t)MAX(got, 0);

	memset((uint8_t *)record + bytes, 0, sizeof(*record) - bytes);
	end_text(record->id, sizeof(record->id));
	end_text(record->job, sizeof(record->job));
	end_text(record->node, sizeof(record->node));
	if (record->until_ns > base_now_ns() + LONGEST_LEASE_NS)
		record->until_ns = 0;
}

/* ---- Locks ----------------------------------------------------------------------------------- */

/* Locks or unlocks a range; 0 bytes mean all from there on. -EAGAIN: another request has it. */
static int set_lock(int fd, short type, off_t at, off_t bytes)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = bytes };

	if (!fcntl(fd, F_OFD_SETLK, &lock))
		return 0;
	return errno == EACCES ? -EAGAIN : -errno;
}

/* Finds a lock in a range, the oldest one as a rule. */
static bool find_lock(struct local_pool *pool, off_t from, off_t to, struct flock *lock)
{
	*lock = (struct flock){
		.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = to - from
	};
	return from < to && pool->finds++ < MOST_FINDS && !fcntl(pool->fd, F_OFD_GETLK, lock) &&
	       lock->l_type != F_UNLCK;
}

/* Tells whether what was found cannot be relied on, because it is not all. */
static bool found_too_many(const struct local_pool *pool)
{
	return pool->finds > MOST_FINDS;
}

static bool is_locked(struct local_pool *pool, off_t from, off_t to)
{
	struct flock lock;

	return find_lock(pool, from, to, &lock);
}

/* Finds the first lock in a range. */
static bool first_lock(struct local_pool *pool, off_t from, off_t to, struct flock *first)
{
	struct flock lock;
	bool found = false;

	for (; find_lock(pool, from, to, &lock); to = lock.l_start) {
		*first = lock;
		found = true;
	}
	return found;
}

/* Returns the byte after a lock. */
static off_t end_of(const struct flock *lock, off_t most)
{
	return lock->l_len ? MIN(lock->l_start + lock->l_len, most) : most;
}

int local_lock_presence(int fd, short type)
{
	return set_lock(fd, type, PRESENT, 1);
}

int local_lock_making(int fd, short type)
{
	return set_lock(fd, type, MAKER, 1);
}

off_t local_begin_of_line(enum local_line line)
{
	return line == LOCAL_HOLDER_LINE ? HOLDER(0) :
	       line == LOCAL_URGENT_LINE ? URGENT_LINE :
	       line == LOCAL_LINE        ? LINE :
					   SMALL_LINE;
}

uint32_t local_ticket_record(enum local_line line, uint64_t ticket)
{
	return LOCAL_HOLDERS + (line == LOCAL_URGENT_LINE ? 0 : LOCAL_WAITERS) +
	       (uint32_t)(ticket % LOCAL_WAITERS);
}

bool local_is_idle(struct local_pool *pool)
{
	return !is_locked(pool, HOLDER(0), SMALL_LINE);
}

/* ---- Signs of life --------------------------------------------------------------------------- */

/* Tells whether the owner of a record has shown no life for so long that its locks do not count.
 * `until_ns` is what its record says. */
static bool is_silent(struct local_pool *pool, uint32_t number, uint64_t until_ns)
{
	struct local_watch *watch = &pool->watches[number];
	const uint64_t now = base_now_ns();

	if (watch->until_ns != until_ns || now - watch->looked_ns > LOCAL_SURE_NS) {
		watch->until_ns = until_ns;
		watch->since_ns = now;
	}
	watch->looked_ns = now;
	return now > until_ns && now - watch->since_ns >= LOCAL_SURE_NS;
}

static bool is_silent_holder(struct local_pool *pool, uint32_t number)
{
	struct slots_file_record record;

	local_read_record(pool, number, &record);
	if (record.first != number && record.first >= LOCAL_FIRST_SLOT &&
	    record.first < LOCAL_HOLDERS)
		local_read_record(pool, record.first, &record);
	return is_silent(pool, number, record.until_ns);
}

static bool is_silent_waiter(struct local_pool *pool, enum local_line line, uint64_t ticket)
{
	const uint32_t number = local_ticket_record(line, ticket);
	struct slots_file_record record;

	local_read_record(pool, number, &record);
	return is_silent(pool, number, record.number == ticket ? record.until_ns : 0);
}

/* ---- Lines ----------------------------------------------------------------------------------- */

/* Tells whether no waiter that shows life has a byte in this range. */
static bool none_before(struct local_pool *pool, off_t begin, uint64_t ticket, enum local_line line)
{
	const off_t end = begin + (off_t)ticket;
	off_t at = begin;
	struct flock lock;

	for (; first_lock(pool, at, end, &lock); at = end_of(&lock, end)) {
		const off_t found = MAX(at, lock.l_start);

		if (!is_silent_waiter(pool, line, (uint64_t)(found - begin)))
			return false;
	}
	return !found_too_many(pool);
}

static bool is_first(struct local_pool *pool, const struct local_member *member)
{
	if (member->record.urgent)
		return none_before(pool, URGENT_LINE, member->ticket, LOCAL_URGENT_LINE);
	return none_before(pool, URGENT_LINE, LINE_TICKETS, LOCAL_URGENT_LINE) &&
	       none_before(pool, LINE, member->ticket, LOCAL_LINE);
}

static enum local_line line_of(const struct local_member *member)
{
	return member->record.urgent ? LOCAL_URGENT_LINE : LOCAL_LINE;
}

/* Locks the byte above all that are locked in the line. */
static int take_ticket(struct local_pool *pool, struct local_member *member)
{
	const off_t begin = local_begin_of_line(line_of(member)), end = begin + LINE_TICKETS;
	unsigned waiters = 0;
	struct flock lock;
	off_t at = begin;
	int ret;

	for (;;) {
		for (; find_lock(pool, at, end, &lock); at = end_of(&lock, end))
			waiters++;
		if (waiters >= LOCAL_WAITERS || at == end)
			return -E2BIG;
		ret = set_lock(member->fd, F_WRLCK, at, 1);
		if (ret == -EAGAIN)
			continue;
		member->ticket = (uint64_t)(at - begin);
		/* A request that came meanwhile may have gone above a waiter that has left. */
		if (ret || !is_locked(pool, at + 1, end))
			return ret;
		set_lock(member->fd, F_UNLCK, at, 1);
	}
}

int local_queue_up(struct local_pool *pool, struct local_member *member)
{
	int ret = take_ticket(pool, member);

	if (!ret && member->small)
		ret = set_lock(member->fd, F_WRLCK, SMALL_LINE + (off_t)member->ticket, 1);
	if (ret)
		return ret == -EAGAIN ? -E2BIG : ret;
	member->record.number = member->ticket;
	member->record.since_ns = base_now_ns();
	member->record.until_ns = member->record.since_ns + LOCAL_LOOK_NS;
	return local_write_record(pool, local_ticket_record(line_of(member), member->ticket),
				  &member->record);
}

uint32_t local_position(struct local_pool *pool, const struct local_member *member, uint32_t *ahead)
{
	uint32_t position = 0;
	struct flock lock;

	*ahead = LOCAL_RECORDS;
	for (enum local_line line = LOCAL_URGENT_LINE; line <= line_of(member); line++) {
		const off_t begin = local_begin_of_line(line);
		const uint64_t most = line == line_of(member) ? member->ticket : LINE_TICKETS;
		const off_t end = begin + (off_t)most;

		for (off_t at = begin; find_lock(pool, at, end, &lock); at = end_of(&lock, end)) {
			*ahead = local_ticket_record(line,
						     (uint64_t)(MAX(at, lock.l_start) - begin));
			position++;
		}
	}
	if (!position && find_lock(pool, HOLDER(LOCAL_FIRST_SLOT), HOLDER(LOCAL_HOLDERS), &lock))
		*ahead = (uint32_t)(MAX(lock.l_start, HOLDER(0)) - HOLDER(0));
	return position;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

/*
 * A fence is made of the time, in units of 256 ns, so that it rises with each grant, and of the
 * number of the holder. No two are alike, because a holder is locked for longer than a unit.
 */
#define FENCE_TIME_SHIFT 8
#define FENCE_HOLDER_BITS 10
_Static_assert(LOCAL_HOLDERS <= 1u << FENCE_HOLDER_BITS, "the holder does not fit in a fence");

static uint64_t fence_time(const struct local_pool *pool, uint64_t now)
{
	return (pool->base_ns + now) >> FENCE_TIME_SHIFT;
}

static uint64_t next_fence(struct local_pool *pool, uint64_t now, uint32_t holder)
{
	pool->fence = MAX(pool->fence + 1, (fence_time(pool, now) << FENCE_HOLDER_BITS) + holder);
	return pool->fence;
}

/* Drops all locks of a request: what it holds, and its tickets. */
static int drop_locks(const struct local_pool *pool, const struct local_member *member)
{
	while (member->holding &&
	       fence_time(pool, base_now_ns()) == fence_time(pool, member->record.since_ns))
		;
	/* The whole file: then the kernel allocates nothing. */
	return set_lock(member->fd, F_UNLCK, 0, 0);
}

/* Returns the wake-up bit of the first waiter in a line; 0: there is none. */
static uint32_t first_bit(struct local_pool *pool, off_t line)
{
	struct flock lock;

	if (!first_lock(pool, line, line + LINE_TICKETS, &lock))
		return 0;
	return local_wake_bit((uint64_t)(MAX(lock.l_start, line) - line));
}

/* Wakes those that may be next, if any wait: after a lock was dropped. A first waiter that is
 * stopped does not pass it on: then the others see by themselves that it shows no life. */
static void wake_waiters(struct local_pool *pool)
{
	uint32_t bits;

	/* A request that takes its ticket after this looks after this, too. */
	if (!is_locked(pool, URGENT_LINE, SMALL_LINE))
		return;
	bits = first_bit(pool, URGENT_LINE);
	if (!bits)
		bits = first_bit(pool, LINE);
	bits |= first_bit(pool, SMALL_LINE);
	local_wake(pool, bits && !found_too_many(pool) ? bits : UINT32_MAX);
}

void local_member_free(struct local_pool *pool, struct local_member *member)
{
	struct local_member **link = &pool->members;
	const bool keep = !drop_locks(pool, member) && pool->spares < LOCAL_SPARE;

	while (*link && *link != member)
		link = &(*link)->next;
	if (*link)
		*link = member->next;
	if (keep)
		pool->spare[pool->spares++] = member->fd;
	else
		base_close(member->fd);
	free(member);
	wake_waiters(pool);
}

static void drop_holders(const struct local_member *member)
{
	set_lock(member->fd, F_UNLCK, HOLDER(0), LOCAL_HOLDERS);
}

/* Makes a member a holder, by the locks that it has just taken. */
static int hold(struct local_pool *pool, struct local_member *member, const uint32_t *numbers,
		uint32_t count, uint32_t given)
{
	const uint64_t now = base_now_ns();
	struct slots_file_record record = member->record;
	int ret = 0;

	record.number = next_fence(pool, now, numbers[0]);
	record.since_ns = now;
	record.until_ns = now + base_ms_to_ns(pool->config.lease_ms);
	record.first = numbers[0];
	for (uint32_t i = 0; i < count && !ret; i++)
		ret = local_write_record(pool, numbers[i], &record);
	/* A process that was stopped before it wrote may have been passed over. */
	if (!ret && base_now_ns() - pool->now_ns > LOCAL_SURE_NS / 2)
		ret = -EAGAIN;
	if (ret) {
		drop_holders(member);
		return ret;
	}
	member->record = record;
	member->holding = true;
	member->holder = record.first;
	member->given = given;
	return 0;
}

static int hold_one(struct local_pool *pool, struct local_member *member, uint32_t number,
		    uint32_t given)
{
	int ret = set_lock(member->fd, F_WRLCK, HOLDER(number), 1);

	return ret ? ret : hold(pool, member, &number, 1, given);
}

int local_take_at_once(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	const uint32_t number = LOCAL_FIRST_SLOT + pool->turn % capacity;
	int ret;

	if (member->record.weight != 1 ||
	    is_locked(pool, HOLDER(LOCAL_FIRST_SLOT + capacity), SMALL_LINE))
		return -EAGAIN;
	ret = hold_one(pool, member, number, 1);
	if (!ret)
		pool->turn = number - LOCAL_FIRST_SLOT + 1;
	return ret;
}

enum slot_state { SLOT_FREE, SLOT_IN_USE, SLOT_SILENT };

struct slot_states {
	uint32_t in_use;
	uint8_t of[LOCAL_HOLDERS]; /* enum slot_state */
};

static void note_slots(struct local_pool *pool, struct slot_states *states)
{
	const off_t end = HOLDER(LOCAL_HOLDERS);
	struct flock lock;

	for (off_t at = HOLDER(LOCAL_FIRST_SLOT); first_lock(pool, at, end, &lock);
	     at = end_of(&lock, end)) {
		/* Slots of a request that lie side by side are one lock. */
		for (off_t one = MAX(at, lock.l_start); one < end_of(&lock, end); one++) {
			const uint32_t number = (uint32_t)(one - HOLDER(0));
			const bool silent = is_silent_holder(pool, number);

			states->of[number] = silent ? SLOT_SILENT : SLOT_IN_USE;
			states->in_use += !silent;
		}
	}
}

/* Locks free slots for a request, of those that may be in use at the same time. -EAGAIN: there are
 * not enough. */
static int lock_free(struct local_pool *pool, const struct local_member *member, uint32_t capacity,
		     const struct slot_states *states, uint32_t *numbers, uint32_t needed)
{
	uint32_t slots[LOCAL_SLOTS], count = 0, locked = 0;
	int ret = 0;

	/* Requests that look at the same time must choose among the same slots. */
	for (uint32_t i = LOCAL_FIRST_SLOT; i < LOCAL_URGENT && count < capacity; i++) {
		if (states->of[i] != SLOT_SILENT)
			slots[count++] = i;
	}
	for (uint32_t i = 0; i < count && locked < needed && !ret; i++) {
		const uint32_t number = slots[(pool->turn + i) % count];

		if (states->of[number] == SLOT_IN_USE)
			continue;
		ret = set_lock(member->fd, F_WRLCK, HOLDER(number), 1);
		numbers[locked] = number;
		locked += !ret;
	}
	if (!ret && locked < needed)
		ret = -EAGAIN;
	if (ret)
		drop_holders(member);
	return ret;
}

/* Takes as many slots as a request needs, or none: -EAGAIN. */
static int take_slots(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	const uint32_t weight = member->record.weight, needed = MIN(weight, capacity);
	const bool urgent = member->record.urgent;
	struct slot_states states = { 0 };
	uint32_t numbers[LOCAL_SLOTS];
	int ret;

	note_slots(pool, &states);
	if (states.in_use + (urgent ? 0 : needed) > capacity || found_too_many(pool))
		return -EAGAIN;
	ret = lock_free(pool, member, capacity, &states, numbers, needed);
	if (ret == -EAGAIN && urgent)
		return hold_one(pool, member, LOCAL_URGENT, weight);
	if (!ret)
		ret = hold(pool, member, numbers, needed, weight);
	if (!ret)
		pool->turn = member->holder - LOCAL_FIRST_SLOT + 1;
	return ret;
}

/* Takes what the request needs, if it is its turn: else -EAGAIN. */
static int take_turn(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	int ret = is_first(pool, member) ? take_slots(pool, member, capacity) : -EAGAIN;

	if (ret == -EAGAIN && member->small &&
	    none_before(pool, SMALL_LINE, member->ticket, LOCAL_LINE))
		ret = hold_one(pool, member, LOCAL_SMALL, 0);
	return ret;
}

int local_look(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	int ret = take_turn(pool, member, capacity);

	if (ret == -EAGAIN && found_too_many(pool))
		ret = -E2BIG;
	if (ret)
		return ret;
	/* The next waiter may find another slot free. */
	set_lock(member->fd, F_UNLCK, URGENT_LINE, 0);
	wake_waiters(pool);
	return 0;
}
