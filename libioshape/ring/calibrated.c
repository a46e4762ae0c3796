/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mounts have been found to like: remembered by a context, for all its threads, and in a small
 * file for each mount in the user's cache folder. Where there is no such folder the context
 * remembers alone. Files are read as if anybody had written them.
 */
#define _GNU_SOURCE
#include "ring/calibrate.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Mounts that a context remembers; of more the one used longest ago goes. */
#define MOST_MOUNTS 32

/* Clocks of hosts that share the folder may differ by so much. */
#define CLOCKS_S 3600

struct entry {
	char mount[FS_POOL_BYTES]; /* "" if free */
	/* The kernel's number of it, 0 if not known: finding the name out costs more than a small
	 * save, most of it answers of a metadata server. */
	uint64_t number;
	bool known;
	bool trying;
	double not_before; /* nobody tries, because it has failed */
	struct ring_calibration calibration;
	uint64_t used; /* by the count below */
};

/* What the last file of its kind has taught. */
struct lesson {
	uint64_t device;
	bool striped;
	size_t block_bytes;
	struct ring_taught taught;
	uint64_t used; /* by the count below; 0: free */
};

/* Whether direct writes work on a mount. */
struct proof {
	uint64_t mount; /* its number, or that of its device */
	enum ring_direct found;
};

struct ring_memory {
	char cache[PATH_MAX]; /* the user's cache folder; "": none */
	pthread_mutex_t lock;
	struct entry entries[MOST_MOUNTS];
	struct lesson lessons[MOST_MOUNTS];
	uint64_t uses;
	struct proof proofs[MOST_MOUNTS];
	unsigned proof_count; /* the next one replaces number proof_count % MOST_MOUNTS */
};

/* By the environment. Relative ones are to be ignored, says its specification. */
static void find_cache(char cache[PATH_MAX])
{
	const char *given = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
	int length = 0;

	if (given && *given == '/')
		length = snprintf(cache, PATH_MAX, "%s", given);
	else if (home && *home == '/')
		length = snprintf(cache, PATH_MAX, "%s/.cache", home);
	if (length < 0 || length >= PATH_MAX)
		*cache = 0;
}

int ring_memory_open(struct ring_memory **out, struct base_error *error)
{
	struct ring_memory *memory = calloc(1, sizeof(*memory));

	*out = memory;
	if (!memory)
		return base_no_memory(error, "what is known of mounts", sizeof(*memory));
	pthread_mutex_init(&memory->lock, NULL);
	find_cache(memory->cache);
	return 0;
}

void ring_memory_close(struct ring_memory *memory)
{
	if (!memory)
		return;
	pthread_mutex_destroy(&memory->lock);
	free(memory);
}

/* ---- The folder ------------------------------------------------------------------------------ */

/* A descriptor of the folder of that name. Those above it are made as well: "ioshape", and the
 * user's cache itself; but no home. */
static int enter(const struct ring_memory *memory, struct ring_private_folder *shelf, bool make)
{
	static const char *const steps[] = { "", "/ioshape", "/ioshape/mounts" };
	char path[PATH_MAX + 32];
	int fd;

	if (!*memory->cache)
		return -ENOENT;
	for (size_t i = 0; i < ARRAY_LENGTH(steps); i++) {
		snprintf(path, sizeof(path), "%s%s", memory->cache, steps[i]);
		/* The last one belongs to the shelf. */
		if (make && i + 1 < ARRAY_LENGTH(steps))
			mkdir(path, 0700);
	}
	if ((!make && access(path, F_OK)) || ring_private_open(shelf, path, NULL))
		return -ENOENT;
	fd = ring_private_enter(shelf, NULL);
	if (fd < 0)
		ring_private_close(shelf);
	return fd;
}

static void leave(struct ring_private_folder *shelf, int fd)
{
	ring_private_leave(fd);
	ring_private_close(shelf);
}

/* Names of mounts have slashes. The name itself is in the file: two may have one hash. Versions of
 * the library that cannot read each other's files have a file each. */
static void file_name(const char *mount, const char *end, char name[64])
{
	snprintf(name, 64, "%016llx.v%u%s", (unsigned long long)base_hash_text(mount),
		 RING_CALIBRATION_FORMAT, end);
}

static int read_file(const struct ring_memory *memory, const char *mount,
		     struct ring_calibration *calibration)
{
	struct base_buffer text = { 0 };
	struct ring_private_folder shelf;
	uint64_t stamp;
	char name[64];
	int fd = enter(memory, &shelf, false), ret;

	if (fd < 0)
		return -ENOENT;
	file_name(mount, ".txt", name);
	ret = ring_private_get(&shelf, fd, name, RING_CALIBRATION_TEXT_BYTES, &text, &stamp, NULL);
	if (!ret)
		ret = ring_calibration_parse(mount, (const char *)text.data, text.bytes,
					     calibration);
	base_buffer_free(&text);
	leave(&shelf, fd);
	return ret ? -ENOENT : 0;
}

static void write_file(const struct ring_memory *memory, const char *mount,
		       const struct ring_calibration *calibration)
{
	char text[RING_CALIBRATION_TEXT_BYTES], name[64];
	struct ring_private_folder shelf;
	int fd = enter(memory, &shelf, true);
	size_t bytes;

	if (fd < 0)
		return;
	file_name(mount, ".txt", name);
	bytes = ring_calibration_print(mount, calibration, text, sizeof(text));
	if (bytes)
		ring_private_put(&shelf, fd, name, text, bytes, NULL);
	leave(&shelf, fd);
}

/* ---- In memory ------------------------------------------------------------------------------- */

/* Under the lock. NULL if there is none. */
static struct entry *find(struct ring_memory *memory, const char *mount)
{
	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (!strcmp(memory->entries[i].mount, mount)) {
			memory->entries[i].used = ++memory->uses;
			return &memory->entries[i];
		}
	}
	return NULL;
}

/* Under the lock. The one used longest ago makes room; NULL if all are being tried. */
static struct entry *find_or_make(struct ring_memory *memory, const char *mount)
{
	struct entry *entry = find(memory, mount);

	if (entry)
		return entry;
	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (!memory->entries[i].trying && (!entry || memory->entries[i].used < entry->used))
			entry = &memory->entries[i];
	}
	if (!entry)
		return NULL;
	*entry = (struct entry){ .used = ++memory->uses };
	snprintf(entry->mount, sizeof(entry->mount), "%s", mount);
	return entry;
}

int ring_memory_name(struct ring_memory *memory, const char *path, char name[FS_POOL_BYTES])
{
	uint64_t number, its;
	struct entry *entry;
	int ret;

	if (!memory)
		return fs_pool_of_path(path, name, NULL);
	ret = fs_mount_of_directory(path, &number);
	if (ret)
		return ret;
	*name = 0;
	pthread_mutex_lock(&memory->lock);
	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (memory->entries[i].number == number) {
			memory->entries[i].used = ++memory->uses;
			memcpy(name, memory->entries[i].mount, FS_POOL_BYTES);
		}
	}
	pthread_mutex_unlock(&memory->lock);
	if (*name)
		return 0;
	ret = fs_pool_of_path(path, name, NULL);
	/* The path may be a link to somewhere else: then that is the file's, and not the
	 * directory's. */
	if (ret || fs_mount_of_path(path, &its) || its != number)
		return ret;
	pthread_mutex_lock(&memory->lock);
	entry = find_or_make(memory, name);
	if (entry)
		entry->number = number;
	pthread_mutex_unlock(&memory->lock);
	return 0;
}

static bool is_valid(const struct ring_calibration *calibration, double since, double now)
{
	return calibration->measured_at >= since &&
	       calibration->measured_at >= now - RING_CALIBRATION_DAYS * 86400.0 &&
	       calibration->measured_at <= now + CLOCKS_S;
}

static void keep(struct ring_memory *memory, const char *mount,
		 const struct ring_calibration *calibration)
{
	struct entry *entry;

	pthread_mutex_lock(&memory->lock);
	entry = find_or_make(memory, mount);
	if (entry) {
		entry->known = true;
		entry->calibration = *calibration;
	}
	pthread_mutex_unlock(&memory->lock);
}

int ring_memory_get(struct ring_memory *memory, const char *mount, double since, double now,
		    struct ring_calibration *calibration)
{
	const struct entry *entry;
	bool known;

	if (!memory)
		return -ENOENT;
	pthread_mutex_lock(&memory->lock);
	entry = find(memory, mount);
	known = entry && entry->known && is_valid(&entry->calibration, since, now);
	if (known)
		*calibration = entry->calibration;
	pthread_mutex_unlock(&memory->lock);
	if (known)
		return 0;
	if (read_file(memory, mount, calibration) || !is_valid(calibration, since, now))
		return -ENOENT;
	keep(memory, mount, calibration);
	return 0;
}

void ring_memory_put(struct ring_memory *memory, const char *mount,
		     const struct ring_calibration *calibration)
{
	if (!memory)
		return;
	keep(memory, mount, calibration);
	write_file(memory, mount, calibration);
}

/* ---- Turns ----------------------------------------------------------------------------------- */

static void end_trying(struct ring_memory *memory, const char *mount, double not_before)
{
	struct entry *entry;

	pthread_mutex_lock(&memory->lock);
	entry = find(memory, mount);
	if (entry) {
		entry->trying = false;
		entry->not_before = not_before;
	}
	pthread_mutex_unlock(&memory->lock);
}

/* Of the processes of this user, where locks work. */
static int lock_file(const struct ring_memory *memory, const char *mount, struct ring_turn *turn)
{
	struct ring_private_folder shelf;
	char name[64];
	int fd = enter(memory, &shelf, true), ret = 0;

	turn->lock_fd = -1;
	if (fd < 0)
		return 0;
	file_name(mount, ".lock", name);
	turn->lock_fd = base_own(
		openat(fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
	if (turn->lock_fd >= 0 && flock(turn->lock_fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
		ret = -EBUSY;
	if (ret) {
		base_close(turn->lock_fd);
		turn->lock_fd = -1;
	}
	leave(&shelf, fd);
	return ret;
}

int ring_memory_try(struct ring_memory *memory, const char *mount, double now,
		    struct ring_turn *turn)
{
	struct entry *entry;
	int ret = -EBUSY;

	turn->lock_fd = -1;
	if (!memory)
		return 0;
	pthread_mutex_lock(&memory->lock);
	entry = find_or_make(memory, mount);
	if (entry && !entry->trying && now >= entry->not_before) {
		entry->trying = true;
		ret = 0;
	}
	pthread_mutex_unlock(&memory->lock);
	if (ret)
		return ret;
	ret = lock_file(memory, mount, turn);
	if (ret)
		end_trying(memory, mount, 0);
	return ret;
}

void ring_memory_tried(struct ring_memory *memory, const char *mount, double not_before,
		       struct ring_turn *turn)
{
	base_close(turn->lock_fd);
	turn->lock_fd = -1;
	if (memory)
		end_trying(memory, mount, not_before);
}

/* ---- What files have taught ------------------------------------------------------------------ */

static uint64_t device_of(const struct fs_memory *on)
{
	return (uint64_t)on->device_major << 32 | on->device_minor;
}

/* Under the lock. Of the same device and shape; else the one used longest ago. */
static struct lesson *find_lesson(struct ring_memory *memory, const struct fs_memory *on,
				  const struct ring_shape *shape)
{
	const uint64_t device = device_of(on);
	struct lesson *lesson = &memory->lessons[0];

	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		struct lesson *one = &memory->lessons[i];

		if (one->used && one->device == device && one->striped == (shape->targets > 0) &&
		    one->block_bytes == shape->block_bytes) {
			lesson = one;
			break;
		}
		if (one->used < lesson->used)
			lesson = one;
	}
	if (lesson->device != device || lesson->striped != (shape->targets > 0) ||
	    lesson->block_bytes != shape->block_bytes)
		*lesson = (struct lesson){ .device = device,
					   .striped = shape->targets > 0,
					   .block_bytes = shape->block_bytes };
	lesson->used = ++memory->uses;
	return lesson;
}

void ring_memory_recall(struct ring_memory *memory, const struct fs_memory *on,
			const struct ring_shape *shape, struct ring_taught *taught)
{
	memset(taught, 0, sizeof(*taught));
	if (!memory)
		return;
	pthread_mutex_lock(&memory->lock);
	*taught = find_lesson(memory, on, shape)->taught;
	pthread_mutex_unlock(&memory->lock);
}

void ring_memory_learn(struct ring_memory *memory, const struct fs_memory *on,
		       const struct ring_shape *shape, const struct ring_taught *taught)
{
	if (!memory)
		return;
	pthread_mutex_lock(&memory->lock);
	find_lesson(memory, on, shape)->taught = *taught;
	pthread_mutex_unlock(&memory->lock);
}

/* ---- Whether direct writes work ----------------------------------------------------------------
 */

/* The number of a device that is gone may be another one's by now, that of a mount is not. */
static uint64_t mount_of(const struct fs_memory *on)
{
	return on->mount ? on->mount : device_of(on);
}

/* Call it with the lock held. Returns NULL if nothing is known of the mount. */
static struct proof *find_proof(struct ring_memory *memory, uint64_t mount)
{
	for (size_t i = 0; i < MIN(memory->proof_count, MOST_MOUNTS); i++) {
		if (memory->proofs[i].mount == mount)
			return &memory->proofs[i];
	}
	return NULL;
}

enum ring_direct ring_memory_direct(struct ring_memory *memory, const struct fs_memory *on)
{
	enum ring_direct found = RING_DIRECT_UNPROVEN;
	const struct proof *proof;

	if (!memory)
		return found;
	pthread_mutex_lock(&memory->lock);
	proof = find_proof(memory, mount_of(on));
	if (proof)
		found = proof->found;
	pthread_mutex_unlock(&memory->lock);
	return found;
}

void ring_memory_keep_direct(struct ring_memory *memory, const struct fs_memory *on,
			     enum ring_direct found)
{
	struct proof *proof;

	if (!memory)
		return;
	pthread_mutex_lock(&memory->lock);
	proof = find_proof(memory, mount_of(on));
	if (!proof)
		proof = &memory->proofs[memory->proof_count++ % MOST_MOUNTS];
	*proof = (struct proof){ mount_of(on), found };
	pthread_mutex_unlock(&memory->lock);
}
