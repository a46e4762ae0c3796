/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encodes and decodes Lustre's layouts: struct lov_user_md of versions 1 and 3, and composite
 * layouts, in this machine's byte order or the other one.
 */
#include "play.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

enum {
	MAGIC_V1 = 0x0BD10BD0,
	MAGIC_V3 = 0x0BD30BD0,
	MAGIC_SPECIFIC = 0x0BD50BD0,
	MAGIC_COMPOSITE = 0x0BD60BD0,
	PATTERN_RAID0 = 1,
	PATTERN_MDT = 0x100,
	PATTERN_OVERSTRIPING = 0x200,
	V1_BYTES = 32,
	V3_BYTES = 48,
	OBJECT_BYTES = 24,
	COMPOSITE_BYTES = 32,
	ENTRY_BYTES = 48,
	ENTRY_INIT = 0x10,
	SETSTRIPE = 0x4008669a,
};

#define GETSTRIPE 0x4008669bu
#define GETOBDCOUNT 0x800866a8u

static void put16(char *at, uint16_t value)
{
	memcpy(at, &value, sizeof(value));
}

static void put32(char *at, uint32_t value)
{
	memcpy(at, &value, sizeof(value));
}

static void put64(char *at, uint64_t value)
{
	memcpy(at, &value, sizeof(value));
}

static uint16_t get16(const char *at)
{
	uint16_t value;

	memcpy(&value, at, sizeof(value));
	return value;
}

static uint32_t get32(const char *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return value;
}

static uint64_t get64(const char *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return value;
}

/* ---- Encoding -------------------------------------------------------------------------------- */

static size_t put_component(char *blob, const struct component *component, uint64_t number,
			    uint16_t generation)
{
	const bool pool = component->pool[0];
	const size_t head = pool ? V3_BYTES : V1_BYTES;
	const uint16_t objects = component->made && !component->on_mds ? component->count : 0;

	memset(blob, 0, head + (size_t)objects * OBJECT_BYTES);
	put32(blob, pool ? MAGIC_V3 : MAGIC_V1);
	put32(blob + 4, component->on_mds      ? PATTERN_MDT :
			component->overstriped ? PATTERN_RAID0 | PATTERN_OVERSTRIPING :
						 PATTERN_RAID0);
	put64(blob + 8, number);
	put64(blob + 16, 0x200000401);
	put32(blob + 24, (uint32_t)component->stripe_size);
	put16(blob + 28, component->on_mds ? 0 : component->count);
	/*
	 * In a directory's default this field is the first target; in a file, the version of its
	 * layout.
	 */
	put16(blob + 30, component->made ? generation : component->first);
	if (pool)
		memcpy(blob + V1_BYTES, component->pool, POOL_NAME_BYTES);
	for (uint16_t i = 0; i < objects; i++) {
		char *object = blob + head + (size_t)i * OBJECT_BYTES;

		put64(object, number << 8 | i);
		put32(object + 20, component->targets[i]);
	}
	return head + (size_t)objects * OBJECT_BYTES;
}

static size_t put_layout(char *blob, const struct layout *layout, uint64_t number)
{
	size_t at = COMPOSITE_BYTES + (size_t)layout->count * ENTRY_BYTES;

	if (!layout->composite)
		return put_component(blob, &layout->components[0], number,
				     (uint16_t)layout->generation);
	memset(blob, 0, at);
	for (unsigned int i = 0; i < layout->count; i++) {
		const struct component *component = &layout->components[i];
		char *entry = blob + COMPOSITE_BYTES + i * ENTRY_BYTES;
		const size_t size = put_component(blob + at, component, number, 0);

		put32(entry, i + 1);
		put32(entry + 4, component->made ? ENTRY_INIT : 0);
		put64(entry + 8, component->start);
		put64(entry + 16, component->end);
		put32(entry + 24, (uint32_t)at);
		put32(entry + 28, (uint32_t)size);
		at += size;
	}
	put32(blob, MAGIC_COMPOSITE);
	put32(blob + 4, (uint32_t)at);
	put32(blob + 8, layout->generation + 1);
	put16(blob + 14, (uint16_t)layout->count);
	return at;
}

ssize_t lustre_get(const struct node *node, char *blob)
{
	struct layout layout;

	if (options.traps & TRAP_NO_LAYOUT)
		return -EOPNOTSUPP;
	if (S_ISREG(node->stat.st_mode)) {
		if (!node->layout->count)
			return -ENODATA;
		return (ssize_t)put_layout(blob, node->layout, node->stat.st_ino);
	}
	if (!S_ISDIR(node->stat.st_mode))
		return -ENODATA;
	if (node->layout)
		return (ssize_t)put_layout(blob, node->layout, 0);
	if (options.traps & TRAP_NO_DEFAULT)
		return -ENODATA;
	layout = *(tree_root()->layout ? tree_root()->layout : (layout_default(&layout), &layout));
	return (ssize_t)put_layout(blob, &layout, 0);
}

/* ---- Decoding -------------------------------------------------------------------------------- */

/* Reads the list of targets of a layout that names each target. */
static int take_targets(struct component *component, const char *blob, size_t bytes)
{
	if (!component->count || component->count > MAX_TARGETS ||
	    bytes < V3_BYTES + (size_t)component->count * OBJECT_BYTES)
		return -EINVAL;
	for (unsigned int i = 0; i < component->count; i++) {
		const uint32_t target = get32(blob + V3_BYTES + (size_t)i * OBJECT_BYTES + 20);

		if (target >= options.targets)
			return -EINVAL;
		component->targets[i] = (uint16_t)target;
	}
	component->by_hand = true;
	return 0;
}

static int take_component(struct component *component, const char *blob, size_t bytes)
{
	const uint32_t magic = bytes >= V1_BYTES ? get32(blob) : 0;
	const bool pool = magic == MAGIC_V3 || magic == MAGIC_SPECIFIC;
	uint32_t pattern;

	if (magic != MAGIC_V1 && !pool)
		return -EINVAL;
	pattern = get32(blob + 4);
	component->on_mds = pattern == PATTERN_MDT;
	component->overstriped = pattern == (PATTERN_RAID0 | PATTERN_OVERSTRIPING);
	if (pattern > PATTERN_RAID0 && !component->on_mds && !component->overstriped)
		return -EINVAL;
	component->stripe_size = get32(blob + 24);
	component->count = get16(blob + 28);
	component->first = get16(blob + 30);
	if (component->stripe_size % CHUNK_BYTES)
		return -EINVAL;
	if (pool) {
		if (bytes < V3_BYTES)
			return -EINVAL;
		memcpy(component->pool, blob + V1_BYTES, POOL_NAME_BYTES);
		component->pool[POOL_NAME_BYTES - 1] = '\0';
		if (component->pool[0] && !pool_find(component->pool) &&
		    options.traps & TRAP_POOL_REFUSED)
			return -EINVAL;
	}
	if (component->first != UINT16_MAX && component->first >= options.targets)
		return -EINVAL;
	/* A component on the metadata server has one stripe: the whole component. */
	if (component->on_mds &&
	    (component->start || component->stripe_size != component->end || component->count > 1))
		return -EINVAL;
	return magic == MAGIC_SPECIFIC ? take_targets(component, blob, bytes) : 0;
}

static int take_composite(struct layout *layout, const char *blob, size_t bytes)
{
	const unsigned int count = bytes >= COMPOSITE_BYTES ? get16(blob + 14) : 0;
	uint64_t end = 0;
	int result = 0;

	/* Mirrors are not supported. */
	if (!count || count > MAX_COMPONENTS || get16(blob + 16) ||
	    bytes < COMPOSITE_BYTES + (size_t)count * ENTRY_BYTES || get32(blob + 4) > bytes)
		return -EINVAL;
	for (unsigned int i = 0; i < count && !result; i++) {
		const char *entry = blob + COMPOSITE_BYTES + i * ENTRY_BYTES;
		struct component *component = &layout->components[i];
		const uint32_t at = get32(entry + 24), size = get32(entry + 28);

		component->start = get64(entry + 8);
		component->end = get64(entry + 16);
		if (component->start != end || component->end <= end || at > bytes ||
		    size > bytes - at)
			return -EINVAL;
		end = component->end;
		result = take_component(component, blob + at, size);
		if (!result && end != UINT64_MAX &&
		    (end % CHUNK_BYTES || (component->stripe_size && end % component->stripe_size)))
			result = -EINVAL;
	}
	layout->composite = true;
	layout->count = count;
	return result;
}

static int take_layout(struct layout *layout, const char *blob, size_t bytes)
{
	memset(layout, 0, sizeof(*layout));
	if (bytes >= 4 && get32(blob) == MAGIC_COMPOSITE)
		return take_composite(layout, blob, bytes);
	layout->count = 1;
	layout->components[0].end = UINT64_MAX;
	if (take_component(&layout->components[0], blob, bytes) || layout->components[0].on_mds)
		return -EINVAL;
	return 0;
}

static int set_layout(struct node *node, const char *blob, size_t bytes)
{
	struct layout wish;
	int result = take_layout(&wish, blob, bytes);

	if (result)
		return result;
	if (S_ISREG(node->stat.st_mode))
		return node->layout->count ? -EEXIST : layout_create(node->layout, &wish);
	if (!node->layout)
		node->layout = malloc(sizeof(*node->layout));
	if (!node->layout)
		abort();
	for (unsigned int i = 0; i < wish.count; i++)
		if (!wish.components[i].stripe_size)
			wish.components[i].stripe_size = options.stripe_size;
	*node->layout = wish;
	return 0;
}

int lustre_set(struct node *node, const char *blob, size_t bytes)
{
	int result;

	if (!S_ISREG(node->stat.st_mode) && !S_ISDIR(node->stat.st_mode))
		return -EINVAL;
	if (!bytes && S_ISDIR(node->stat.st_mode)) {
		free(node->layout);
		node->layout = NULL;
		return 0;
	}
	if (bytes < V1_BYTES)
		return -ERANGE;
	if (options.traps & TRAP_SETXATTR_IGNORED)
		return 0;
	result = set_layout(node, blob, bytes);
	/* As the real client does, so that copying all attributes of a file does not fail. */
	return result == -EEXIST ? 0 : result;
}

/* ---- ioctl ----------------------------------------------------------------------------------- */

static void do_setstripe(fuse_req_t request, struct node *node, uint64_t address)
{
	static char blob[MOST_LAYOUT_BYTES];
	size_t bytes = V1_BYTES;
	int result = caller_read(request, blob, address, bytes) ? 0 : -EFAULT;

	if (!result && get32(blob) != MAGIC_V1) {
		bytes = get32(blob) == MAGIC_COMPOSITE ? get32(blob + 4) : V3_BYTES;
		if (get32(blob) == MAGIC_SPECIFIC)
			bytes += (size_t)get16(blob + 28) * OBJECT_BYTES;
		if (bytes < V1_BYTES || bytes > sizeof(blob))
			result = -EINVAL;
		else if (!caller_read(request, blob, address, bytes))
			result = -EFAULT;
	}
	/* This trap simulates a server that ignores the request and returns success. */
	if (!result && !(options.traps & TRAP_SETSTRIPE_IGNORED)) {
		result = set_layout(node, blob, bytes);
		/*
		 * For a file, the resulting layout is written back to the caller's buffer. The
		 * caller must not pass constant memory.
		 */
		if (!result && S_ISREG(node->stat.st_mode) &&
		    (lustre_get(node, blob) < 0 ||
		     !caller_write(request, blob, address,
				   get32(blob) == MAGIC_V3 ? V3_BYTES : V1_BYTES)))
			result = -EFAULT;
	}
	answer_ioctl(request, result, NULL, 0);
}

static void do_getstripe(fuse_req_t request, const struct node *node, uint64_t address)
{
	static char blob[MOST_LAYOUT_BYTES], asked[V1_BYTES];
	ssize_t bytes = lustre_get(node, blob);
	size_t room;

	if (bytes > 0) {
		if (!caller_read(request, asked, address, V1_BYTES)) {
			bytes = -EFAULT;
		} else {
			room = V1_BYTES + (size_t)get16(asked + 28) * OBJECT_BYTES;
			if ((size_t)bytes > room)
				bytes = (ssize_t)room;
			bytes = caller_write(request, blob, address, (size_t)bytes) ? 0 : -EFAULT;
		}
	}
	answer_ioctl(request, (int)bytes, NULL, 0);
}

static void do_count(fuse_req_t request, uint64_t address)
{
	char answer[8];
	uint32_t count;

	if (!caller_read(request, answer, address, sizeof(count))) {
		answer_ioctl(request, -EFAULT, NULL, 0);
		return;
	}
	/*
	 * The caller asks for the number of metadata servers if this is not 0, else for that of
	 * targets.
	 */
	count = get32(answer) ? 1 : options.targets;
	/* The caller's buffer has four bytes, whatever size the number of the ioctl says. */
	if (caller_write(request, &count, address, sizeof(count)))
		answer_ioctl(request, 0, NULL, 0);
	else
		answer_ioctl(request, -EFAULT, NULL, 0);
}

bool lustre_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address)
{
	if (options.traps & TRAP_NO_LAYOUT)
		return false;
	if (command == SETSTRIPE)
		do_setstripe(request, node, address);
	else if (command == GETSTRIPE)
		do_getstripe(request, node, address);
	else if (command == GETOBDCOUNT && S_ISDIR(node->stat.st_mode))
		do_count(request, address);
	else
		return false;
	return true;
}
