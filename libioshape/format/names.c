/* SPDX-License-Identifier: Apache-2.0 */
/* Names of records, tensors and attributes: checks of names that callers give, and safe forms for
 * messages and JSON. Also a hash table from names to positions. Pure. */
#define _GNU_SOURCE
#include "format/format.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

bool format_utf8_valid(const char *text, size_t bytes)
{
	for (size_t i = 0, step; i < bytes; i += step) {
		step = base_utf8_bytes(text + i, bytes - i);
		if (!step)
			return false;
	}
	return true;
}

const char *format_show_name(char into[FORMAT_SHOWN_NAME_BYTES], const char *name, size_t bytes)
{
	static const char more[] = "...";
	size_t used = 0;

	for (size_t step; used < bytes; used += step) {
		step = MAX(base_utf8_bytes(name + used, bytes - used), 1);
		if (used + step + sizeof(more) > FORMAT_SHOWN_NAME_BYTES)
			break;
		memcpy(into + used, name + used, step);
		/* The name has a length and may contain NUL, but the result ends at a NUL. */
		if (!into[used])
			into[used] = '?';
	}
	memcpy(into + used, used < bytes ? more : "", used < bytes ? sizeof(more) : 1);
	base_make_plain(into);
	return into;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

int format_json_put(struct base_buffer *out, const char *format, ...)
{
	char line[256];
	va_list arguments;
	int bytes;

	va_start(arguments, format);
	bytes = vsnprintf(line, sizeof(line), format, arguments);
	va_end(arguments);
	return base_buffer_append(out, line, (size_t)bytes);
}

/* Appends a character that must be escaped in a string. */
static int put_escaped(struct base_buffer *out, char character)
{
	static const char letters[] = "\"\\bfnrt", characters[] = "\"\\\b\f\n\r\t";
	const char *found = strchr(characters, character);

	if (found)
		return format_json_put(out, "\\%c", letters[found - characters]);
	return format_json_put(out, "\\u%04x", (unsigned)(unsigned char)character);
}

int format_json_put_string(struct base_buffer *out, const char *text)
{
	size_t run;
	int ret;

	ret = base_buffer_append(out, "\"", 1);
	while (!ret && *text) {
		for (run = 0; (unsigned char)text[run] >= 0x20 && !strchr("\"\\", text[run]);)
			run++;
		ret = base_buffer_append(out, text, run);
		text += run;
		if (!ret && *text)
			ret = put_escaped(out, *text++);
	}
	return ret ? ret : base_buffer_append(out, "\"", 1);
}

/* ---- Checks of names that callers give to records, tensors and attributes -------------------- */

int format_check_name(const char *what, const char *name, struct base_error *error)
{
	size_t bytes;

	if (!name || !*name)
		return base_fail_reason_with(error, -EINVAL, "give it a name",
					     "cannot save a %s without a name", what);
	bytes = strnlen(name, IOSHAPE_MAX_NAME_BYTES + 1);
	if (bytes > IOSHAPE_MAX_NAME_BYTES)
		return base_fail_reason_with(error, IOSHAPE_E_LIMIT, "shorten it",
					     "cannot save %s \"%s\": its name is longer than %u "
					     "bytes",
					     what, FORMAT_SHOWN(name), IOSHAPE_MAX_NAME_BYTES);
	if (!format_utf8_valid(name, bytes))
		return base_fail_reason_with(error, -EINVAL, "encode it in UTF-8",
					     "cannot save %s \"%s\": its name is not valid UTF-8",
					     what, FORMAT_SHOWN(name));
	return 0;
}

/* ---- Hash table from names to positions ------------------------------------------------------ */

/* Open addressing with linear probing; the table is never more than half full. Names come from
 * untrusted files. A file could have millions of names that collide, which would cost quadratic
 * time. A hash with a secret key prevents that. */

struct slot {
	const char *name; /* NULL if the slot is free */
	uint32_t name_bytes;
	uint32_t hash;
	uint64_t position;
};

struct format_names {
	struct slot *slots;
	uint64_t slot_count; /* number of slots, a power of two */
	uint64_t count;
	uint64_t key[2];
};

#define LEAST_SLOTS 16u

/* SipHash-1-3 (Aumasson, Bernstein 2012), folded to 32 bits. */
static uint32_t hash_of(const uint64_t key[2], const char *name, size_t bytes)
{
	uint64_t v[4] = { key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
			  key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573 };
	const uint8_t *at = (const uint8_t *)name;
	uint64_t word, folded;
	size_t left = bytes;

	for (; left >= 8; left -= 8, at += 8) {
		word = base_get_le(at, 8);
		v[3] ^= word;
		base_sip_round(v);
		v[0] ^= word;
	}
	word = (uint64_t)bytes << 56 | base_get_le(at, (unsigned)left);
	v[3] ^= word;
	base_sip_round(v);
	v[0] ^= word;
	v[2] ^= 0xff;
	for (int i = 0; i < 3; i++)
		base_sip_round(v);
	folded = v[0] ^ v[1] ^ v[2] ^ v[3];
	return (uint32_t)(folded ^ folded >> 32);
}

/* Returns the slot that holds the name, or the free slot where it belongs. */
static struct slot *seek(struct slot *slots, uint64_t slot_count, uint32_t hash, const char *name,
			 size_t bytes)
{
	struct slot *slot;

	for (uint64_t at = hash & (slot_count - 1);; at = (at + 1) & (slot_count - 1)) {
		slot = &slots[at];
		if (!slot->name)
			return slot;
		if (slot->hash == hash && slot->name_bytes == bytes &&
		    !memcmp(slot->name, name, bytes))
			return slot;
	}
}

static int grow(struct format_names *names, uint64_t slot_count)
{
	struct slot *slots, *old;

	slots = calloc(slot_count, sizeof(*slots));
	if (!slots)
		return -ENOMEM;
	for (uint64_t i = 0; i < names->slot_count; i++) {
		old = &names->slots[i];
		if (old->name)
			*seek(slots, slot_count, old->hash, old->name, old->name_bytes) = *old;
	}
	free(names->slots);
	names->slots = slots;
	names->slot_count = slot_count;
	return 0;
}

/* Returns the number of slots: at least twice the number of names. The hash has 32 bits, so more
 * slots than 2^32 would stay unused. */
static uint64_t slots_for(uint64_t names)
{
	uint64_t slot_count = LEAST_SLOTS;

	while (slot_count / 2 < names && slot_count < UINT64_C(1) << 32)
		slot_count *= 2;
	return slot_count;
}

int format_names_new(struct format_names **out, uint64_t expected)
{
	struct format_names *names = calloc(1, sizeof(*names));
	int ret;

	*out = NULL;
	if (!names)
		return -ENOMEM;
	/* If the kernel has no entropy yet, which is rare, address space randomization must
	 * suffice. */
	if (getrandom(names->key, sizeof(names->key), GRND_NONBLOCK) != sizeof(names->key)) {
		names->key[0] = (uintptr_t)names;
		names->key[1] = base_now_ns();
	}
	ret = grow(names, slots_for(expected));
	if (ret) {
		free(names);
		return ret;
	}
	*out = names;
	return 0;
}

int format_names_add(struct format_names *names, const char *name, size_t name_bytes,
		     uint64_t position)
{
	uint32_t hash = hash_of(names->key, name, name_bytes);
	struct slot *slot;
	int ret;

	if (name_bytes > UINT32_MAX)
		return -EINVAL;
	if ((names->count + 1) * 2 > names->slot_count) {
		ret = grow(names, names->slot_count * 2);
		if (ret)
			return ret;
	}
	slot = seek(names->slots, names->slot_count, hash, name, name_bytes);
	if (slot->name)
		return -EEXIST;
	*slot = (struct slot){
		.name = name,
		.name_bytes = (uint32_t)name_bytes,
		.hash = hash,
		.position = position,
	};
	names->count++;
	return 0;
}

bool format_names_find(const struct format_names *names, const char *name, size_t name_bytes,
		       uint64_t *position)
{
	uint32_t hash = hash_of(names->key, name, name_bytes);
	const struct slot *slot;

	slot = seek(names->slots, names->slot_count, hash, name, name_bytes);
	if (!slot->name)
		return false;
	*position = slot->position;
	return true;
}

void format_names_free(struct format_names *names)
{
	if (!names)
		return;
	free(names->slots);
	free(names);
}
