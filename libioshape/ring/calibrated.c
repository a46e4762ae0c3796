/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mounts have been found to like: remembered in the process, for all its threads and contexts,
 * and in a small file for each mount in the user's cache folder. Where there is no such folder the
 * process remembers alone. Files are read as if anybody had written them.
 */
#define _GNU_SOURCE
#include "ring/calibrate.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Mounts that a process remembers; of more the one used longest ago goes. */
#define MOST_MOUNTS 32

/* Clocks of hosts that share the folder may differ by so much. */
#define CLOCKS_S 3600

struct entry {
	char mount[FS_POOL_BYTES]; /* "" if free */
	bool known;
	bool trying;
	double not_before; /* nobody tries, because it has failed */
	struct ring_calibration calibration;
	uint64_t watched[RING_WATCHED_SAVES];
	unsigned watched_count;
	uint64_t used; /* by the count below */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct entry entries[MOST_MOUNTS];
static uint64_t uses;
static char *folder; /* NULL: none */

static void before_fork(void)
{
	pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
	pthread_mutex_unlock(&lock);
}

/* Whoever was trying is not here. */
static void in_child(void)
{
	for (size_t i = 0; i < MOST_MOUNTS; i++)
		entries[i].trying = false;
	pthread_mutex_unlock(&lock);
}

static void begin(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}

static void hold(void)
{
	pthread_once(&once, begin);
	pthread_mutex_lock(&lock);
}

static void let_go(void)
{
	pthread_mutex_unlock(&lock);
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* Finding one out costs more than a small save, most of it answers of a metadata server. */
static struct {
	uint64_t mount;
	char name[FS_POOL_BYTES];
} names[MOST_MOUNTS];
static size_t next_name; /* the oldest one */

static bool find_name(uint64_t mount, char name[FS_POOL_BYTES])
{
	bool found = false;

	hold();
	for (size_t i = 0; !found && i < MOST_MOUNTS; i++) {
		found = *names[i].name && names[i].mount == mount;
		if (found)
			memcpy(name, names[i].name, FS_POOL_BYTES);
	}
	let_go();
	return found;
}

int ring_memory_name(const char *path, char name[FS_POOL_BYTES])
{
	uint64_t mount, its;
	int ret = fs_mount_of_directory(path, &mount);

	if (ret || find_name(mount, name))
		return ret;
	ret = fs_pool_of_path(path, name, NULL);
	/* The path may be a link to somewhere else: then that is the file's, and not the
	 * directory's. */
	if (ret || fs_mount_of_path(path, &its) || its != mount)
		return ret;
	hold();
	names[next_name].mount = mount;
	memcpy(names[next_name].name, name, FS_POOL_BYTES);
	next_name = (next_name + 1) % MOST_MOUNTS;
	let_go();
	return 0;
}

/* ---- The folder ------------------------------------------------------------------------------ */

void ring_calibration_prepare(void)
{
	const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
	char *path = NULL;

	/* Relative ones are to be ignored, says its specification. */
	if (cache && *cache == '/') {
		if (asprintf(&path, "%s/ioshape/mounts", cache) < 0)
			path = NULL;
	} else if (home && *home == '/') {
		if (asprintf(&path, "%s/.cache/ioshape/mounts", home) < 0)
			path = NULL;
	}
	hold();
	free(folder);
	folder = path;
	let_go();
}

/* The folder, with those above it that may be missing: "ioshape" and the user's cache itself. */
static int open_shelf(struct ring_shelf *shelf, bool make)
{
	char *path, *slash[2];
	int depth = 0, ret;

	hold();
	path = folder ? strdup(folder) : NULL;
	let_go();
	if (!path)
		return -ENOENT;
	if (!make && access(path, F_OK)) {
		free(path);
		return -ENOENT;
	}
	for (; depth < 2; depth++) {
		slash[depth] = strrchr(path, '/');
		if (!slash[depth] || slash[depth] == path)
			break;
		*slash[depth] = 0;
	}
	while (depth-- > 0) {
		if (mkdir(path, 0700) && errno != EEXIST)
			break;
		*slash[depth] = '/';
	}
	while (depth >= 0)
		*slash[depth--] = '/';
	ret = ring_shelf_open(shelf, path, NULL);
	free(path);
	return ret;
}

/* A descriptor of the folder, and the shelf it belongs to. */
static int enter_shelf(struct ring_shelf *shelf, bool make)
{
	int ret = open_shelf(shelf, make), fd;

	if (ret)
		return ret;
	fd = ring_shelf_enter(shelf, NULL);
	if (fd < 0)
		ring_shelf_close(shelf);
	return fd;
}

static void leave_shelf(struct ring_shelf *shelf, int fd)
{
	ring_shelf_leave(fd);
	ring_shelf_close(shelf);
}

/* Names of mounts have slashes. The name itself is in the file: two may have one hash. */
static void file_name(const char *mount, const char *end, char name[64])
{
	snprintf(name, 64, "%016llx%s", (unsigned long long)base_hash_text(mount), end);
}

static int read_file(const char *mount, struct ring_calibration *calibration)
{
	struct base_buffer text = { 0 };
	struct ring_shelf shelf;
	uint64_t stamp;
	char name[64];
	int fd = enter_shelf(&shelf, false), ret;

	if (fd < 0)
		return -ENOENT;
	file_name(mount, ".txt", name);
	ret = ring_shelf_get(&shelf, fd, name, RING_CALIBRATION_TEXT_BYTES, &text, &stamp, NULL);
	if (!ret)
		ret = ring_calibration_parse(mount, (const char *)text.data, text.bytes,
					     calibration);
	base_buffer_free(&text);
	leave_shelf(&shelf, fd);
	return ret ? -ENOENT : 0;
}

static void write_file(const char *mount, const struct ring_calibration *calibration)
{
	char text[RING_CALIBRATION_TEXT_BYTES], name[64];
	struct ring_shelf shelf;
	size_t bytes = ring_calibration_print(mount, calibration, text, sizeof(text));
	int fd = bytes ? enter_shelf(&shelf, true) : -ENOENT;

	if (fd < 0)
		return;
	file_name(mount, ".txt", name);
	ring_shelf_put(&shelf, fd, name, text, bytes, NULL);
	leave_shelf(&shelf, fd);
}

static int forget_file(void *user, const char *name)
{
	ring_shelf_remove(*(int *)user, name);
	return 0;
}

/* NULL: all. */
static void remove_file(const char *mount)
{
	struct ring_shelf shelf;
	char name[64];
	int fd = enter_shelf(&shelf, false);

	if (fd < 0)
		return;
	if (mount) {
		file_name(mount, ".txt", name);
		ring_shelf_remove(fd, name);
	} else {
		ring_shelf_list(&shelf, fd, forget_file, &fd, NULL);
	}
	leave_shelf(&shelf, fd);
}

/* ---- The process ----------------------------------------------------------------------------- */

/* Under the lock. NULL if there is none. */
static struct entry *find(const char *mount)
{
	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (!strcmp(entries[i].mount, mount)) {
			entries[i].used = ++uses;
			return &entries[i];
		}
	}
	return NULL;
}

/* Under the lock. The one used longest ago makes room; NULL if all are being tried. */
static struct entry *find_or_make(const char *mount)
{
	struct entry *entry = find(mount);

	if (entry)
		return entry;
	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (!entries[i].trying && (!entry || entries[i].used < entry->used))
			entry = &entries[i];
	}
	if (!entry)
		return NULL;
	*entry = (struct entry){ .used = ++uses };
	snprintf(entry->mount, sizeof(entry->mount), "%s", mount);
	return entry;
}

static bool is_valid(const struct ring_calibration *calibration, double since, double now)
{
	return calibration->measured_at >= since &&
	       calibration->measured_at >= now - RING_CALIBRATION_DAYS * 86400.0 &&
	       calibration->measured_at <= now + CLOCKS_S;
}

static void keep(const char *mount, const struct ring_calibration *calibration)
{
	struct entry *entry;

	hold();
	entry = find_or_make(mount);
	if (entry) {
		entry->known = true;
		entry->calibration = *calibration;
		entry->watched_count = 0;
	}
	let_go();
}

int ring_memory_get(const char *mount, double since, double now,
		    struct ring_calibration *calibration)
{
	const struct entry *entry;
	bool known;

	hold();
	entry = find(mount);
	known = entry && entry->known && is_valid(&entry->calibration, since, now);
	if (known)
		*calibration = entry->calibration;
	let_go();
	if (known)
		return 0;
	if (read_file(mount, calibration) || !is_valid(calibration, since, now))
		return -ENOENT;
	keep(mount, calibration);
	return 0;
}

void ring_memory_put(const char *mount, const struct ring_calibration *calibration)
{
	keep(mount, calibration);
	write_file(mount, calibration);
}

void ring_memory_drop(const char *mount)
{
	hold();
	for (size_t i = 0; i < MOST_MOUNTS; i++) {
		if (*entries[i].mount && (!mount || !strcmp(entries[i].mount, mount)))
			entries[i].known = false;
	}
	let_go();
	remove_file(mount);
}

int ring_calibration_recall(const char *mount, struct ring_calibration *calibration)
{
	ring_calibration_prepare();
	return ring_memory_get(mount, 0, base_wall_seconds(), calibration);
}

void ring_calibration_forget(const char *mount)
{
	ring_calibration_prepare();
	ring_memory_drop(mount);
}

/* ---- Turns ----------------------------------------------------------------------------------- */

static void end_trying(const char *mount, double not_before)
{
	struct entry *entry;

	hold();
	entry = find(mount);
	if (entry) {
		entry->trying = false;
		entry->not_before = not_before;
	}
	let_go();
}

/* Of the processes of this user, where locks work. */
static int lock_file(const char *mount, struct ring_turn *turn)
{
	struct ring_shelf shelf;
	char name[64];
	int fd = enter_shelf(&shelf, true), ret = 0;

	turn->lock_fd = -1;
	if (fd < 0)
		return 0;
	file_name(mount, ".lock", name);
	turn->lock_fd =
		openat(fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
	if (turn->lock_fd >= 0 && flock(turn->lock_fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
		ret = -EBUSY;
	if (ret) {
		close(turn->lock_fd);
		turn->lock_fd = -1;
	}
	leave_shelf(&shelf, fd);
	return ret;
}

int ring_memory_try(const char *mount, double now, struct ring_turn *turn)
{
	struct entry *entry;
	int ret = -EBUSY;

	hold();
	entry = find_or_make(mount);
	if (entry && !entry->trying && now >= entry->not_before) {
		entry->trying = true;
		ret = 0;
	}
	let_go();
	if (ret)
		return ret;
	ret = lock_file(mount, turn);
	if (ret)
		end_trying(mount, 0);
	return ret;
}

void ring_memory_tried(const char *mount, double not_before, struct ring_turn *turn)
{
	if (turn->lock_fd >= 0) {
		/* A forked child may hold it as well. */
		flock(turn->lock_fd, LOCK_UN);
		close(turn->lock_fd);
	}
	turn->lock_fd = -1;
	end_trying(mount, not_before);
}

/* ---- Drift ----------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
	const uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

	return (left > right) - (left < right);
}

static uint64_t median(const struct entry *entry)
{
	uint64_t sorted[RING_WATCHED_SAVES];

	memcpy(sorted, entry->watched, sizeof(sorted));
	qsort(sorted, RING_WATCHED_SAVES, sizeof(sorted[0]), compare);
	return sorted[RING_WATCHED_SAVES / 2];
}

/*
 * Saves cost more than the bytes of a trial: copies, checksums, neighbours. So they are compared
 * with the first ones after the trial, not with the trial itself.
 */
static bool has_drifted(uint64_t usual, uint64_t now)
{
	return now > usual * RING_DRIFT || now < usual / RING_DRIFT;
}

void ring_memory_watch(const char *mount, uint64_t bytes_per_s, double now)
{
	struct ring_calibration calibration;
	bool drifted = false, settled = false;
	struct entry *entry;
	uint64_t middle;

	hold();
	entry = find(mount);
	if (!entry || !entry->known) {
		let_go();
		return;
	}
	entry->watched[entry->watched_count++ % RING_WATCHED_SAVES] = bytes_per_s;
	if (entry->watched_count >= RING_WATCHED_SAVES) {
		middle = median(entry);
		if (!entry->calibration.usual_bytes_per_s) {
			entry->calibration.usual_bytes_per_s = middle;
			settled = true;
		} else if (has_drifted(entry->calibration.usual_bytes_per_s, middle)) {
			drifted = now - entry->calibration.measured_at >= RING_LEAST_AGE_S;
		}
	}
	calibration = entry->calibration;
	let_go();
	if (settled)
		write_file(mount, &calibration);
	if (drifted)
		ring_memory_drop(mount);
}
