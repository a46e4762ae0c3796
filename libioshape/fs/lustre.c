/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lustre: reads and requests the layouts of files, and lists the storage targets that the client
 * knows. Numbers are those of lustre_user.h in release 2.17, part of Lustre's ABI, so none of its
 * headers is needed. What is read is not trusted: the filesystem may be broken, or a daemon may
 * imitate one.
 */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LAYOUT_XATTR "lustre.lov"

/* ---- The bytes of a layout ------------------------------------------------------------------- */

enum {
	MAGIC_V1 = 0x0bd10bd0,
	MAGIC_V3 = 0x0bd30bd0,
	MAGIC_SPECIFIC = 0x0bd50bd0, /* v3 with chosen OSTs */
	MAGIC_COMPOSITE = 0x0bd60bd0,
	MAGIC_FOREIGN = 0x0bd70bd0,
	MAGIC_EXTENDING = 0x0bd80bd0 /* composite, with extension components */
};

/* Offsets of the fields. A plain layout is followed by its objects. */
enum {
	PATTERN_AT = 4,
	STRIPE_SIZE_AT = 24,
	STRIPE_COUNT_AT = 28,
	V1_BYTES = 32,
	POOL_AT = 32,
	POOL_BYTES = 16,
	V3_BYTES = 48,
	OBJECT_BYTES = 24,
	OBJECT_TARGET_AT = 20,

	SIZE_AT = 4,
	ENTRY_COUNT_AT = 14,
	MIRRORS_AT = 16, /* number of mirrors minus 1 */
	ENTRIES_AT = 32, /* after the header */
	ENTRY_BYTES = 48,
	ENTRY_FLAGS_AT = 4,
	ENTRY_BEGIN_AT = 8,
	ENTRY_END_AT = 16,
	ENTRY_BLOB_AT = 24,
	ENTRY_BLOB_BYTES_AT = 28
};

#define PATTERN_RAID0 0x1u
#define PATTERN_PARITY 0x4u
#define PATTERN_METADATA 0x100u
#define PATTERN_OVERSTRIPING 0x200u
#define PATTERN_FOREIGN 0x400u
#define PATTERN_RELEASED 0x80000000u /* the bytes are archived (HSM) */

#define ENTRY_EXTENSION 0x40u

#define STRIPE_UNIT (64 * KIB)
#define MOST_STRIPES 2000
/*
 * Counts from this value on mean all targets, with several stripes on each unless it is
 * ALL_STRIPES.
 */
#define ALL_STRIPES_LEAST 0xffe0
#define ALL_STRIPES 0xffff

/*
 * ---- Reading ----------------------------------------------------------------------------------
 */

/* The bytes of a layout, with the lowest byte of a number first. */
struct blob {
	const uint8_t *data;
	size_t bytes;
};

static uint64_t take(const struct blob *blob, size_t at, unsigned bytes)
{
	return base_get_le(blob->data + at, bytes);
}

static uint32_t take_32(const struct blob *blob, size_t at)
{
	return (uint32_t)take(blob, at, 4);
}

/* Reads the magic number. Returns 0 if there is none. */
static uint32_t read_magic(const struct blob *blob)
{
	return blob->bytes < 4 ? 0 : take_32(blob, 0);
}

static int read_stripes(const struct blob *blob, uint32_t pattern, struct fs_component *component)
{
	uint64_t size = take_32(blob, STRIPE_SIZE_AT);
	uint32_t count = (uint32_t)take(blob, STRIPE_COUNT_AT, 2);

	if (pattern & PATTERN_METADATA) {
		component->on_metadata = true;
		component->stripe_count = 1;
		return 0;
	}
	if (size % STRIPE_UNIT || (count > MOST_STRIPES && count < ALL_STRIPES_LEAST))
		return -EINVAL;
	component->stripe_bytes = size;
	component->stripe_count = count >= ALL_STRIPES_LEAST ? FS_ALL_TARGETS : count;
	component->overstriped = pattern & PATTERN_OVERSTRIPING ||
				 (count >= ALL_STRIPES_LEAST && count < ALL_STRIPES);
	return 0;
}

static int read_pool(const struct blob *blob, struct fs_component *component)
{
	const uint8_t *name = blob->data + POOL_AT;
	const uint8_t *end = memchr(name, 0, POOL_BYTES);

	if (!end)
		return -EINVAL;
	for (; name < end; name++) {
		/* The name appears in reports, in names of slot pools and in paths below /proc. */
		if (*name <= ' ' || *name >= 0x7f || *name == '/')
			return -EINVAL;
	}
	memcpy(component->pool, blob->data + POOL_AT, (size_t)(end - (blob->data + POOL_AT)));
	return 0;
}

/* Reads a plain layout, which describes one component. */
static int read_component(struct blob blob, struct fs_component *component)
{
	uint32_t magic = read_magic(&blob), pattern;
	int ret;

	if (magic == MAGIC_FOREIGN)
		return -ENOTSUP;
	if (magic != MAGIC_V1 && magic != MAGIC_V3 && magic != MAGIC_SPECIFIC)
		return -EINVAL;
	if (blob.bytes < (magic == MAGIC_V1 ? V1_BYTES : V3_BYTES))
		return -EINVAL;
	pattern = take_32(&blob, PATTERN_AT);
	if (pattern & (PATTERN_RELEASED | PATTERN_FOREIGN | PATTERN_PARITY))
		return -ENOTSUP;
	/* A directory's layout may lack a pattern. */
	if ((pattern & 0xffff) && !(pattern & (PATTERN_RAID0 | PATTERN_METADATA)))
		return -ENOTSUP;
	ret = read_stripes(&blob, pattern, component);
	if (!ret && magic != MAGIC_V1)
		ret = read_pool(&blob, component);
	return ret;
}

/*
 * Adds a component of a composite layout. Components are listed mirror by mirror, each from the
 * beginning of the file to its end. Only the first mirror counts: new files are written there
 * first.
 */
static int add_component(const struct blob *blob, size_t entry, struct fs_layout *layout)
{
	const struct fs_component *last = layout->count ? &layout->components[layout->count - 1] :
							  NULL;
	uint64_t at = take_32(blob, entry + ENTRY_BLOB_AT);
	uint64_t bytes = take_32(blob, entry + ENTRY_BLOB_BYTES_AT);
	struct fs_component component = {
		.begin = take(blob, entry + ENTRY_BEGIN_AT, 8),
		.end = take(blob, entry + ENTRY_END_AT, 8),
	};
	int ret;

	if (component.begin > component.end || component.begin < (last ? last->end : 0))
		return -EINVAL;
	if (at > blob->bytes || bytes > blob->bytes - at)
		return -EINVAL;
	ret = read_component((struct blob){ blob->data + at, bytes }, &component);
	if (ret)
		return ret;
	/*
	 * An extension component extends the one before it when that is full. For ioshape, it has
	 * done so already.
	 */
	if (take_32(blob, entry + ENTRY_FLAGS_AT) & ENTRY_EXTENSION) {
		if (!last)
			return -EINVAL;
		layout->components[layout->count - 1].end = component.end;
		return 0;
	}
	if (layout->count == FS_MOST_COMPONENTS)
		return -E2BIG;
	layout->components[layout->count++] = component;
	return 0;
}

static int read_composite(struct blob *blob, struct fs_layout *layout)
{
	uint64_t size;
	uint32_t count, mirrors;
	int ret = 0;

	if (blob->bytes < ENTRIES_AT)
		return -EINVAL;
	size = take_32(blob, SIZE_AT);
	count = (uint32_t)take(blob, ENTRY_COUNT_AT, 2);
	mirrors = (uint32_t)take(blob, MIRRORS_AT, 2) + 1;
	if (size > blob->bytes || !count || mirrors > count ||
	    size < ENTRIES_AT + (uint64_t)count * ENTRY_BYTES)
		return -EINVAL;
	blob->bytes = size;
	layout->mirrors = mirrors;
	for (uint32_t i = 0; !ret && i < count; i++) {
		size_t entry = ENTRIES_AT + (size_t)i * ENTRY_BYTES;

		if (i && !take(blob, entry + ENTRY_BEGIN_AT, 8) && layout->components[0].end)
			break;
		ret = add_component(blob, entry, layout);
	}
	return ret;
}

/*
 * Parses a layout. Returns -EINVAL if the bytes are not a layout, -ENOTSUP if it is not supported
 * (foreign, released). Returns -E2BIG if there are more components than fit; then `layout` has the
 * first ones. Pure.
 */
static int parse_layout(const void *data, size_t bytes, struct fs_layout *layout)
{
	struct blob blob = { .data = data, .bytes = bytes };
	uint32_t magic = read_magic(&blob);
	struct fs_layout found = { .count = 1,
				   .mirrors = 1,
				   .components = { { .end = UINT64_MAX } } };
	int ret;

	if (magic == MAGIC_COMPOSITE || magic == MAGIC_EXTENDING) {
		memset(&found, 0, sizeof(found));
		ret = read_composite(&blob, &found);
	} else {
		ret = read_component(blob, &found.components[0]);
	}
	memset(layout, 0, sizeof(*layout));
	if (!ret || ret == -E2BIG)
		*layout = found;
	return ret;
}

/*
 * Buffers for a layout. The first is enough for some dozen stripes, the second for the longest
 * layout.
 */
#define SMALL_BYTES 2048
#define LARGE_BYTES 65536

/*
 * Reads the layout of an open file or directory. *answered tells whether the bytes are a Lustre
 * layout, supported or not. Returns 0, -E2BIG if only the first components fit, or another negative
 * code.
 */
static int read_layout(int fd, struct fs_layout *layout, bool *answered)
{
	uint8_t small[SMALL_BYTES], *large = NULL;
	ssize_t got = fgetxattr(fd, LAYOUT_XATTR, small, sizeof(small));
	int ret;

	*answered = false;
	memset(layout, 0, sizeof(*layout));
	if (got < 0 && errno == ERANGE) {
		large = malloc(LARGE_BYTES);
		if (!large)
			return -ENOMEM;
		got = fgetxattr(fd, LAYOUT_XATTR, large, LARGE_BYTES);
	}
	if (got < 0) {
		ret = -errno;
	} else {
		ret = parse_layout(large ? large : small, (size_t)got, layout);
		*answered = ret != -EINVAL;
	}
	free(large);
	return ret;
}

static int read_open_layout(int fd, bool directory, struct fs_layout *layout)
{
	bool answered;

	(void)directory;
	return read_layout(fd, layout, &answered);
}

/* ---- Requesting a layout --------------------------------------------------------------------- */

/*
 * A Lustre client creates the file without objects (O_LOV_DELAY_CREATE), and then sets its layout.
 * Without a layout the file cannot be written, and the caller removes it.
 */

#define SET_STRIPES 0x4008669au
#define DELAY_CREATE 0x2100
#define ANY_TARGET 0xffffu

#define REQUEST_BYTES 2048

static void put16(uint8_t *to, size_t at, uint16_t value)
{
	memcpy(to + at, &value, sizeof(value));
}

static void put32(uint8_t *to, size_t at, uint32_t value)
{
	memcpy(to + at, &value, sizeof(value));
}

/* Writes a plain layout: v3 if it names a pool, otherwise v1. Returns its length. */
static size_t put_component(uint8_t *to, const struct fs_component *component)
{
	const bool pool = *component->pool;

	put32(to, 0, pool ? MAGIC_V3 : MAGIC_V1);
	put32(to, PATTERN_AT, PATTERN_RAID0 | (component->overstriped ? PATTERN_OVERSTRIPING : 0));
	put32(to, STRIPE_SIZE_AT, (uint32_t)component->stripe_bytes);
	put16(to, STRIPE_COUNT_AT, (uint16_t)MIN(component->stripe_count, ALL_STRIPES));
	put16(to, STRIPE_COUNT_AT + 2, ANY_TARGET);
	if (pool)
		memcpy(to + POOL_AT, component->pool, FS_TARGET_POOL_BYTES);
	return pool ? V3_BYTES : V1_BYTES;
}

/*
 * Writes a layout with chosen OSTs: always version 3, followed by the OSTs, whose first one is the
 * starting OST. Returns its length.
 */
static size_t put_chosen(uint8_t *to, const struct fs_layout *ask)
{
	_Static_assert(V3_BYTES + FS_MOST_TARGETS * OBJECT_BYTES <= REQUEST_BYTES,
		       "all targets fit");
	put_component(to, &ask->components[0]);
	put32(to, 0, MAGIC_SPECIFIC);
	put16(to, STRIPE_COUNT_AT + 2, ask->target[0]);
	for (uint32_t i = 0; i < ask->chosen; i++)
		put32(to, V3_BYTES + i * OBJECT_BYTES + OBJECT_TARGET_AT, ask->target[i]);
	return V3_BYTES + ask->chosen * OBJECT_BYTES;
}

/* Writes the layout for the client. Returns its length. Pure. */
static size_t make_request(const struct fs_layout *ask, uint8_t blob[REQUEST_BYTES])
{
	memset(blob, 0, REQUEST_BYTES);
	return ask->chosen ? put_chosen(blob, ask) : put_component(blob, &ask->components[0]);
}

/* Returns whether a layout is the file's own. A default layout comes without objects. */
static bool has_objects(const uint8_t *blob, size_t bytes)
{
	uint32_t magic;
	uint16_t count;

	if (bytes < V1_BYTES)
		return false;
	memcpy(&magic, blob, sizeof(magic));
	memcpy(&count, blob + STRIPE_COUNT_AT, sizeof(count));
	if (magic == MAGIC_V1)
		return count && bytes >= V1_BYTES + (size_t)count * OBJECT_BYTES;
	if (magic == MAGIC_V3)
		return count && bytes >= V3_BYTES + (size_t)count * OBJECT_BYTES;
	/* In a composite layout, later components get their objects when they are written. */
	return true;
}

static void read_back(int fd, struct fs_answer *answer)
{
	uint8_t *blob = malloc(LARGE_BYTES);
	ssize_t bytes;

	if (!blob)
		return;
	bytes = fgetxattr(fd, LAYOUT_XATTR, blob, LARGE_BYTES);
	if (bytes > 0 && has_objects(blob, (size_t)bytes) &&
	    parse_layout(blob, (size_t)bytes, &answer->got))
		answer->got.count = 0;
	free(blob);
}

static int create_file(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		       struct fs_answer *answer)
{
	/* The ioctl writes its answer here, too. */
	uint8_t blob[REQUEST_BYTES];
	int fd = fs_create_plainly(directory_fd, name, mode, DELAY_CREATE);

	if (fd < 0) {
		if (fd != -EEXIST)
			fs_refused(answer, "creating a file without objects");
		return fd;
	}
	make_request(ask, blob);
	if (ioctl(fd, SET_STRIPES, blob))
		fs_refused(answer, "setstripe");
	/*
	 * The client may report success without setting the layout, or EEXIST after setting it. So
	 * read the layout back.
	 */
	read_back(fd, answer);
	return fd;
}

/*
 * ---- Storage targets --------------------------------------------------------------------------
 */

#define COUNT_TARGETS 0x800866a8UL
/* A working filesystem has no more targets. */
#define MOST_TARGETS 65536

uint32_t fs_count_targets(int directory_fd, enum fs_family family)
{
	/*
	 * The ioctl uses an int, although its number says long. 0 asks for the targets that hold
	 * data.
	 */
	union {
		int count;
		uint64_t space;
	} argument = { .space = 0 };

	if (family != FS_LUSTRE || ioctl(directory_fd, COUNT_TARGETS, &argument) ||
	    argument.count <= 0 || argument.count > MOST_TARGETS)
		return 0;
	return (uint32_t)argument.count;
}

size_t fs_lustre_name(const char *source, const char **name)
{
	/* Server names contain colons, but none directly before a slash. */
	const char *colon = strstr(source, ":/");

	if (!colon)
		return 0;
	*name = colon + 2;
	return strcspn(*name, "/");
}

#define PATH_BYTES 512
/*
 * Most entries of a folder that are read. A host may mount several filesystems with thousands of
 * targets.
 */
#define MOST_ENTRIES 20000

/* Folders to look in. Clients up to 2.11 use the second. */
static const char *const folders[] = { "/sys/fs/lustre", "/proc/fs/lustre" };

/* The state of listing the targets. */
struct look {
	const char *root;
	const char *folder;
	const char *name; /* name of the filesystem */
	size_t name_bytes;
	struct fs_storage *storage;
	uint32_t targets; /* targets seen so far */
};

/*
 * Returns the length of the target's name in an entry such as
 * "scratch-OST0003-osc-ffff8f3a1c2d4800", whose last part differs between mounts of one filesystem.
 * Returns 0 if it belongs to another filesystem.
 */
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

static bool read_kib(const struct look *look, const char *entry, const char *file, uint64_t *bytes)
{
	char path[PATH_BYTES];
	uint64_t kib;

	if ((size_t)snprintf(path, sizeof(path), "%s/osc/%s/%s", look->folder, entry, file) >=
		    sizeof(path) ||
	    fs_read_number(look->root, path, &kib) || kib > UINT64_MAX / KIB)
		return false;
	*bytes = kib * KIB;
	return true;
}

static void read_target(struct look *look, const char *entry)
{
	struct fs_storage *storage = look->storage;
	struct fs_target *target = &storage->target[storage->target_count];
	size_t bytes = target_name(look, entry);

	if (!bytes || bytes >= sizeof(target->name) || is_listed(storage, entry, bytes))
		return;
	look->targets++;
	if (storage->target_count == ARRAY_LENGTH(storage->target))
		return;
	/* A deactivated target has no numbers. */
	if (!read_kib(look, entry, "kbytestotal", &target->total_bytes) ||
	    !read_kib(look, entry, "kbytesavail", &target->free_bytes) ||
	    target->free_bytes > target->total_bytes)
		return;
	memcpy(target->name, entry, bytes);
	target->name[bytes] = 0;
	target->number = (uint16_t)strtoul(entry + look->name_bytes + strlen("-OST"), NULL, 16);
	storage->target_count++;
}

static void read_targets(struct look *look)
{
	char path[PATH_BYTES];
	struct dirent *entry;
	unsigned seen = 0;
	DIR *folder;

	if ((size_t)snprintf(path, sizeof(path), "%s%s/osc", look->root, look->folder) >=
	    sizeof(path))
		return;
	folder = opendir(path);
	while (folder && seen++ < MOST_ENTRIES && (entry = readdir(folder)))
		read_target(look, entry->d_name);
	if (folder)
		closedir(folder);
}

void fs_list_lustre_targets(const char *root, struct fs_storage *storage)
{
	struct look look = { .root = root, .storage = storage };

	look.name_bytes = fs_lustre_name(storage->mount.source, &look.name);
	for (size_t i = 0; i < ARRAY_LENGTH(folders) && look.name_bytes; i++) {
		look.folder = folders[i];
		read_targets(&look);
	}
	if (!storage->targets)
		storage->targets = look.targets;
}

/* ---- The product ----------------------------------------------------------------------------- */

static bool answers_as_lustre(int fd)
{
	struct fs_layout layout;
	bool answered;

	read_layout(fd, &layout, &answered);
	/* A directory without its own layout may answer nothing. */
	return answered || fs_count_targets(fd, FS_LUSTRE);
}

const struct fs_product fs_lustre = {
	.family = FS_LUSTRE,
	.answers = answers_as_lustre,
	.read_layout = read_open_layout,
	.create = create_file,
};
