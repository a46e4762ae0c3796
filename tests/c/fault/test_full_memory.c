/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory when none is free: an error, never SIGBUS. A small tmpfs that belongs to this
 * process simulates a container whose memory is full. Mounting it needs root or a user namespace.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/store_case.h"
#include "support/tap.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PART (16 * MIB)

static const char *mount_small(void)
{
	if (unshare(CLONE_NEWNS) && unshare(CLONE_NEWUSER | CLONE_NEWNS))
		return "no mounts of one's own are allowed here";
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("none", "/tmp", "tmpfs", 0, "size=40m"))
		return "tmpfs cannot be mounted here";
	return NULL;
}

static bool holds(const uint8_t *memory, int value)
{
	return memory[0] == value && !memcmp(memory, memory + 1, PART - 1);
}

static void fill_up(void)
{
	void *first, *second, *third;
	struct stat status;
	int fd = open("/tmp/memory", O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	tap_ok(fd >= 0 && !base_shared_grow(fd, 3 * PART), "a file grows without taking memory");
	tap_ok(!base_shared_map(fd, 0, PART, &first), "the first part is there");
	tap_ok(!base_shared_map(fd, PART, PART, &second), "the second part is there");
	memset(first, 1, PART);
	memset(second, 2, PART);
	tap_ok(base_shared_map(fd, 2 * PART, PART, &third) == -ENOMEM && !third,
	       "the third is an error");
	tap_ok(!fstat(fd, &status) && (uint64_t)status.st_blocks * 512 == 2 * PART,
	       "of the third nothing is left");
	tap_ok(holds(first, 1) && holds(second, 2), "the other parts are as they were");
	base_unmap(first, PART);
	base_shared_drop(fd, 0, PART);
	tap_ok(!base_shared_map(fd, 2 * PART, PART, &third), "what one gives back another gets");
	memset(third, 3, PART);
	tap_ok(holds(third, 3) && holds(second, 2), "and can use");
	base_unmap(second, PART);
	base_unmap(third, PART);
	close(fd);
}

/* Takes all memory but `bytes`. */
static bool leave_free(uint64_t bytes)
{
	int fd = open("/tmp/filler", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	struct statvfs memory;
	struct stat filler;
	bool well = fd >= 0 && !fstat(fd, &filler) && !statvfs("/tmp", &memory) &&
		    !posix_fallocate(fd, 0,
				     filler.st_size + (off_t)(memory.f_bavail * memory.f_bsize) -
					     (off_t)bytes);

	close(fd);
	return well;
}

/*
 * Checks that a put fails while the memory is full, and succeeds when memory is free again.
 */
static void fill_stores(void)
{
	static uint8_t big[200000];
	struct base_error error = { 0 };
	struct store *of[2];
	struct store_case stores;

	scratch_setup();
	store_case_begin(&stores, 0, 2);
	stores.memory = "/tmp";
	for (uint32_t i = 0; i < 2; i++)
		of[i] = store_case_open(&stores, i);
	store_case_put(of[0], "s1", "before", "x", 1);
	tap_ok(leave_free(64 * KIB), "the memory is full");
	tap_ok(store_put(of[1], "s1", "big", big, sizeof(big), &error) == IOSHAPE_E_COORDINATOR &&
		       strstr(error.sentence, "No space left"),
	       "a message that has no room is to be put again");
	store_case_expect(of[1], "s1", "before", "x", 1);
	tap_ok(!unlink("/tmp/filler"), "there is memory again");
	store_case_put(of[1], "s1", "big", big, sizeof(big));
	store_case_expect(of[0], "s1", "big", big, sizeof(big));
	for (int i = 1; i >= 0; i--)
		store_close(of[i]);
	scratch_teardown();
}

int main(void)
{
	const char *why_not = mount_small();

	if (why_not) {
		tap_skip("shared memory that is full", why_not);
	} else {
		fill_up();
		fill_stores();
	}
	return tap_end();
}
