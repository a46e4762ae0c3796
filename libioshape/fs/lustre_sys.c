/* SPDX-License-Identifier: Apache-2.0 */
/* What Lustre's client tells about itself in /sys/fs/lustre; up to 2.11 it was /proc/fs/lustre. */
#include "fs/storage.h"
#include "fs/sysfile.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 512
/* Entries of a folder that are looked at: hosts mount several filesystems of thousands of targets.
 */
#define MOST_ENTRIES 20000
/* Of a list of a pool's targets. */
#define MEMBERS_BYTES (1 * MIB)

/* Its defaults: requests of 4 MiB, eight in flight to each target. */
#define REQUEST_BYTES (4 * MIB)
#define REQUESTS 8
#define MOST_REQUEST_BYTES (64 * MIB)
#define MOST_REQUESTS 256

/* The last one is for root alone; newer clients have lists of pools there. */
static const char *const places[] = { "/sys/fs/lustre", "/proc/fs/lustre",
				      "/sys/kernel/debug/lustre" };

struct look {
	const char *root;
	const char *place;
	const char *name;
	size_t name_bytes;
	struct fs_storage *storage;
	struct base_buffer members; /* of the pool that new files lie in; empty if not known */
	uint32_t targets;           /* seen so far */
	bool tuned;                 /* sizes of requests are read */
};

static bool read_value(const struct look *look, const char *kind, const char *entry,
		       const char *file, uint64_t *value)
{
	char path[PATH_BYTES];

	if ((size_t)snprintf(path, sizeof(path), "%s/%s/%s/%s", look->place, kind, entry, file) >=
	    sizeof(path))
		return false;
	return !fs_read_number(look->root, path, value);
}

/* ---- Targets --------------------------------------------------------------------------------- */

/* "scratch-OST0003-osc-ffff8f3a1c2d4800": the last part differs between mounts of one filesystem.
 * The bytes of the first; 0 if it is another filesystem's. */
static size_t target_name(const struct look *look, const char *entry)
{
	const char *behind = entry + look->name_bytes, *end;

	if (strncmp(entry, look->name, look->name_bytes) != 0 || strncmp(behind, "-OST", 4) != 0)
		return 0;
	end = strstr(behind + 4, "-osc");
	return end ? (size_t)(end - entry) : 0;
}

static bool is_listed(const struct fs_storage *storage, const char *name, size_t bytes)
{
	for (uint32_t i = 0; i < storage->target_count; i++) {
		if (!strncmp(storage->target[i].name, name, bytes) &&
		    !storage->target[i].name[bytes])
			return true;
	}
	return false;
}

/* Lines "scratch-OST0003_UUID". */
static bool is_member(const struct look *look, const char *name, size_t bytes)
{
	const char *line;

	if (!look->members.bytes)
		return true;
	for (line = (const char *)look->members.data; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (!strncmp(line, name, bytes) && (line[bytes] == '_' || line[bytes] == '\n'))
			return true;
	}
	return false;
}

/* A size of requests is the same for all targets, or nearly so: that of the first is taken. */
static void read_tuning(struct look *look, const char *entry)
{
	uint64_t pages, requests, page = (uint64_t)sysconf(_SC_PAGESIZE);

	if (look->tuned)
		return;
	if (!read_value(look, "osc", entry, "max_pages_per_rpc", &pages) ||
	    !read_value(look, "osc", entry, "max_rpcs_in_flight", &requests))
		return;
	if (!pages || pages > MOST_REQUEST_BYTES / page || !requests || requests > MOST_REQUESTS)
		return;
	look->storage->write_unit = pages * page;
	look->storage->flight_bytes = pages * page * requests;
	look->tuned = true;
}

static void read_target(struct look *look, const char *entry)
{
	struct fs_storage *storage = look->storage;
	size_t bytes = target_name(look, entry);
	uint64_t total, available;
	struct fs_target *target;

	if (!bytes || bytes >= sizeof(target->name) || is_listed(storage, entry, bytes) ||
	    !is_member(look, entry, bytes))
		return;
	look->targets++;
	read_tuning(look, entry);
	if (storage->target_count == ARRAY_LENGTH(storage->target))
		return;
	/* One that is switched off has no numbers. */
	if (!read_value(look, "osc", entry, "kbytestotal", &total) ||
	    !read_value(look, "osc", entry, "kbytesavail", &available) ||
	    total > UINT64_MAX / KIB || available > total)
		return;
	target = &storage->target[storage->target_count++];
	memcpy(target->name, entry, bytes);
	target->name[bytes] = 0;
	target->number = (uint16_t)strtoul(entry + look->name_bytes + strlen("-OST"), NULL, 16);
	target->total_bytes = total * KIB;
	target->free_bytes = available * KIB;
}

/* ---- Pools of targets ------------------------------------------------------------------------ */

static void read_members(struct look *look, const char *entry)
{
	const struct fs_part *part = fs_layout_main(&look->storage->layout, 0);
	const char *behind = entry + look->name_bytes;
	char path[PATH_BYTES];

	if (look->members.bytes || !part || !*part->pool ||
	    strncmp(entry, look->name, look->name_bytes) != 0 || strncmp(behind, "-clilov", 7) != 0)
		return;
	if ((size_t)snprintf(path, sizeof(path), "%s/lov/%s/pools/%s", look->place, entry,
			     part->pool) >= sizeof(path))
		return;
	if (fs_read_whole(look->root, path, MEMBERS_BYTES, &look->members))
		base_buffer_free(&look->members);
}

/* ---- Layout of directories without one ------------------------------------------------------- */

/* "scratch-clilov-ffff8f3a1c2d4800" */
static void read_default(struct look *look, const char *entry)
{
	const char *behind = entry + look->name_bytes;
	struct fs_layout *layout = &look->storage->layout;
	char path[PATH_BYTES], count[16];
	uint64_t size, targets;

	if (strncmp(entry, look->name, look->name_bytes) != 0 || strncmp(behind, "-clilov", 7) != 0)
		return;
	if (!look->storage->targets && read_value(look, "lov", entry, "numobd", &targets) &&
	    targets <= UINT16_MAX)
		look->storage->targets = (uint32_t)targets;
	snprintf(path, sizeof(path), "%s/lov/%s/stripecount", look->place, entry);
	if (layout->count || !read_value(look, "lov", entry, "stripesize", &size) || !size ||
	    size % (64 * KIB) || size > UINT32_MAX ||
	    fs_read_line(look->root, path, count, sizeof(count)))
		return;
	layout->count = 1;
	layout->mirrors = 1;
	layout->parts[0].end = UINT64_MAX;
	layout->parts[0].stripe_bytes = size;
	/* -1: all. */
	layout->parts[0].stripe_count = *count == '-' ? FS_ALL_TARGETS :
							(uint32_t)(unsigned short)atoi(count);
}

/* ---- All of it ------------------------------------------------------------------------------- */

static void each_entry(struct look *look, const char *kind,
		       void (*read_entry)(struct look *look, const char *entry))
{
	char path[PATH_BYTES];
	struct dirent *entry;
	unsigned seen = 0;
	DIR *folder;

	if ((size_t)snprintf(path, sizeof(path), "%s%s/%s", look->root, look->place, kind) >=
	    sizeof(path))
		return;
	folder = opendir(path);
	while (folder && seen++ < MOST_ENTRIES && (entry = readdir(folder)))
		read_entry(look, entry->d_name);
	if (folder)
		closedir(folder);
}

void fs_look_at_lustre(const char *root, const char *name, size_t name_bytes,
		       struct fs_storage *storage)
{
	struct look look = {
		.root = root, .name = name, .name_bytes = name_bytes, .storage = storage
	};

	storage->write_unit = REQUEST_BYTES;
	storage->flight_bytes = REQUEST_BYTES * REQUESTS;
	for (size_t i = 0; i < ARRAY_LENGTH(places) && name_bytes; i++) {
		look.place = places[i];
		each_entry(&look, "lov", read_members);
		each_entry(&look, "lov", read_default);
	}
	for (size_t i = 0; i < ARRAY_LENGTH(places) && name_bytes; i++) {
		look.place = places[i];
		each_entry(&look, "osc", read_target);
	}
	if (!storage->targets || look.members.bytes)
		storage->targets = look.targets;
	base_buffer_free(&look.members);
}
