/* SPDX-License-Identifier: Apache-2.0 */
/* Locks: who may change the table, and which processes still exist. */
#include "slots/local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define LOOKED_AT 256u /* processes at a time */
#define ROUNDS 16      /* the one that gets the slot may be dead as well */

/* In another call than the numbers: flock() costs half as much, and all depends on that. */
int local_lock(int fd)
{
	return flock(fd, LOCK_EX | LOCK_NB) ? -errno : 0;
}

/* The kernel tells it nowhere else. A line: "1: FLOCK  ADVISORY  WRITE 4711 00:1a:123 0 EOF". */
pid_t local_locker(const struct local_file *file)
{
	FILE *locks = fopen("/proc/locks", "re");
	unsigned long long ino;
	unsigned major, minor;
	char line[256];
	pid_t found = 0;
	int pid;

	while (locks && !found && fgets(line, sizeof(line), locks)) {
		if (sscanf(line, "%*d: FLOCK %*s %*s %d %x:%x:%llu", &pid, &major, &minor, &ino) ==
			    4 &&
		    ino == file->ino && makedev(major, minor) == file->dev)
			found = pid;
	}
	if (locks)
		fclose(locks);
	return found;
}

/* Not side by side: the kernel would join them and cut them apart. */
static off_t byte_of(uint32_t number)
{
	return (off_t)((INT64_C(1) << 40) + 2 * (int64_t)number);
}

static int lock_number(int fd, uint32_t number, short type)
{
	struct flock lock = {
		.l_type = type, .l_whence = SEEK_SET, .l_start = byte_of(number), .l_len = 1
	};

	return fcntl(fd, F_SETLK, &lock) ? -errno : 0;
}

/* Whether another process has one of so many numbers. */
static bool is_locked(int fd, uint32_t number, uint32_t count)
{
	struct flock lock = {
		.l_type = F_WRLCK,
		.l_whence = SEEK_SET,
		.l_start = byte_of(number),
		.l_len = 2 * (off_t)count,
	};

	/* A process that cannot be asked about is taken to be alive. */
	return fcntl(fd, F_GETLK, &lock) || lock.l_type != F_UNLCK;
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
	return is_own(file, number) || is_locked(file->fd, number, 1);
}

bool local_others(int fd)
{
	return is_locked(fd, 0, LOCAL_NUMBERS);
}

int local_take_number(struct local_pool *pool, struct local_file *file, struct base_error *error)
{
	uint32_t number;

	if (pool->opened == file->opened)
		return 0;
	/* Somewhere else for each process: the first try is the last as a rule. */
	number = (uint32_t)getpid() * 2654435761u % LOCAL_NUMBERS;
	for (uint32_t i = 0; i < LOCAL_NUMBERS; i++, number = (number + 1) % LOCAL_NUMBERS) {
		if (is_own(file, number) || lock_number(file->fd, number, F_WRLCK))
			continue;
		file->own[number / 64] |= UINT64_C(1) << number % 64;
		pool->number = number;
		pool->opened = file->opened;
		/* Somebody may have had it and died. */
		local_queue_bury(file->table, number);
		return 0;
	}
	return base_refuse(error, IOSHAPE_E_COORDINATOR,
			   "all %u places of the pool's file \"%s/%s\" are taken", LOCAL_NUMBERS,
			   file->folder, file->name);
}

void local_drop_number(struct local_pool *pool, struct local_file *file)
{
	if (pool->opened != file->opened)
		return;
	lock_number(file->fd, pool->number, F_UNLCK);
	file->own[pool->number / 64] &= ~(UINT64_C(1) << pool->number % 64);
	pool->opened = 0;
}

bool local_bury_dead(struct local_file *file)
{
	uint32_t processes[LOOKED_AT], count;
	bool found = false, more = true;

	for (int round = 0; round < ROUNDS && more; round++) {
		more = false;
		count = local_queue_in_the_way(file->table, processes, LOOKED_AT);
		for (uint32_t i = 0; i < count; i++) {
			if (is_alive(file, processes[i]))
				continue;
			local_queue_bury(file->table, processes[i]);
			found = more = true;
		}
	}
	return found;
}
