/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hash table from names to positions: open addressing, linear probing, never more than half full.
 *
 * Names come from files that nobody vouches for. A hash with a secret key keeps a file with
 * millions of names that were made to collide from costing quadratic time.
 */
#define _GNU_SOURCE
#include "zip/zip.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct slot {
	const char *name; /* NULL: free */
	uint32_t name_bytes;
	uint32_t hash;
	uint64_t position;
};

struct zip_names {
	struct slot *slots;
	uint64_t room; /* a power of two */
	uint64_t count;
	uint64_t key[2];
};

#define LEAST_ROOM 16u

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

/* The slot that holds the name, or the free one where it belongs. */
static struct slot *seek(struct slot *slots, uint64_t room, uint32_t hash, const char *name,
			 size_t bytes)
{
	struct slot *slot;

	for (uint64_t at = hash & (room - 1);; at = (at + 1) & (room - 1)) {
		slot = &slots[at];
		if (!slot->name)
			return slot;
		if (slot->hash == hash && slot->name_bytes == bytes &&
		    !memcmp(slot->name, name, bytes))
			return slot;
	}
}

static int grow(struct zip_names *names, uint64_t room)
{
	struct slot *slots, *old;

	slots = calloc(room, sizeof(*slots));
	if (!slots)
		return -ENOMEM;
	for (uint64_t i = 0; i < names->room; i++) {
		old = &names->slots[i];
		if (old->name)
			*seek(slots, room, old->hash, old->name, old->name_bytes) = *old;
	}
	free(names->slots);
	names->slots = slots;
	names->room = room;
	return 0;
}

/* Twice as many slots as names; the hash has 32 bits, so more room than that would not be used. */
static uint64_t room_for(uint64_t names)
{
	uint64_t room = LEAST_ROOM;

	while (room / 2 < names && room < UINT64_C(1) << 32)
		room *= 2;
	return room;
}

int zip_names_new(struct zip_names **out, uint64_t expected)
{
	struct zip_names *names = calloc(1, sizeof(*names));
	int ret;

	*out = NULL;
	if (!names)
		return -ENOMEM;
	/* Without entropy, which hardly happens, what the address space's layout hides has to do.
	 */
	if (getrandom(names->key, sizeof(names->key), GRND_NONBLOCK) != sizeof(names->key)) {
		names->key[0] = (uintptr_t)names;
		names->key[1] = base_now_ns();
	}
	ret = grow(names, room_for(expected));
	if (ret) {
		free(names);
		return ret;
	}
	*out = names;
	return 0;
}

int zip_names_add(struct zip_names *names, const char *name, size_t name_bytes, uint64_t position)
{
	uint32_t hash = hash_of(names->key, name, name_bytes);
	struct slot *slot;
	int ret;

	if (name_bytes > UINT32_MAX)
		return -EINVAL;
	if ((names->count + 1) * 2 > names->room) {
		ret = grow(names, names->room * 2);
		if (ret)
			return ret;
	}
	slot = seek(names->slots, names->room, hash, name, name_bytes);
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

bool zip_names_find(const struct zip_names *names, const char *name, size_t name_bytes,
		    uint64_t *position)
{
	uint32_t hash = hash_of(names->key, name, name_bytes);
	const struct slot *slot;

	slot = seek(names->slots, names->room, hash, name, name_bytes);
	if (!slot->name)
		return false;
	*position = slot->position;
	return true;
}

void zip_names_free(struct zip_names *names)
{
	if (!names)
		return;
	free(names->slots);
	free(names);
}
