/* SPDX-License-Identifier: Apache-2.0 */
/* Locks on bytes: who may change the state, and who is still there. */
#include "slots/local.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define LOOKED_AT 64u /* processes at a time */
#define ROUNDS 16     /* whoever gets the slot may be dead as well */

int local_lock_byte(int fd, int64_t byte, short type)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1 };

	return fcntl(fd, F_SETLK, &lock) ? -errno : 0;
}

pid_t local_locker(int fd, int64_t byte, int64_t bytes)
{
	struct flock lock = {
		.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = bytes
	};

	if (fcntl(fd, F_GETLK, &lock))
		return -1;
	if (lock.l_type == F_UNLCK)
		return 0;
	return lock.l_pid > 0 ? lock.l_pid : -1;
}

static bool is_own(const struct local_file *file, uint32_t number)
{
	return file->own[number / 64] >> number % 64 & 1;
}

static bool is_alive(const struct local_file *file, uint32_t number)
{
	if (number >= LOCAL_NUMBERS)
		return false;
	/* The kernel does not tell us of our own locks. */
	return is_own(file, number) || local_locker(file->fd, LOCAL_NUMBER_BYTE(number), 1);
}

bool local_others(struct local_file *file)
{
	return local_locker(file->fd, LOCAL_NUMBER_BYTE(0), 2 * (int64_t)LOCAL_NUMBERS);
}

int local_take_number(struct local_pool *pool, struct local_file *file, int64_t now,
		      struct base_error *error)
{
	/* Somewhere else for each process: the first try is the last as a rule. */
	uint32_t number = (uint32_t)getpid() * 2654435761u % LOCAL_NUMBERS;

	if (pool->opened == file->opened)
		return 0;
	for (uint32_t i = 0; i < LOCAL_NUMBERS; i++, number = (number + 1) % LOCAL_NUMBERS) {
		if (is_own(file, number) ||
		    local_lock_byte(file->fd, LOCAL_NUMBER_BYTE(number), F_WRLCK))
			continue;
		file->own[number / 64] |= UINT64_C(1) << number % 64;
		pool->number = number;
		pool->opened = file->opened;
		/* Somebody may have had it and died. */
		rules_bury(file->state, now, number);
		return 0;
	}
	return base_fail(error, IOSHAPE_E_COORDINATOR,
			 "all %u places of the pool's file \"%s/%s\" are taken", LOCAL_NUMBERS,
			 file->folder, file->name);
}

void local_drop_number(struct local_pool *pool, struct local_file *file)
{
	if (pool->opened != file->opened)
		return;
	local_end_wake(pool, file);
	local_lock_byte(file->fd, LOCAL_NUMBER_BYTE(pool->number), F_UNLCK);
	file->own[pool->number / 64] &= ~(UINT64_C(1) << pool->number % 64);
	pool->opened = 0;
}

bool local_bury_dead(struct local_file *file, int64_t now)
{
	uint32_t processes[LOOKED_AT], count;
	bool found = false, more = true;

	for (int round = 0; round < ROUNDS && more; round++) {
		more = false;
		count = rules_in_the_way(file->state, processes, LOOKED_AT);
		for (uint32_t i = 0; i < count; i++) {
			if (is_alive(file, processes[i]))
				continue;
			rules_bury(file->state, now, processes[i]);
			local_remove_fifo(file, processes[i]);
			found = more = true;
		}
	}
	return found;
}
