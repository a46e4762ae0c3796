/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SipHash-2-4 with a result of 128 bits (Aumasson and Bernstein, 2012), as its authors' test
 * vectors have it. It is written here because no library that is linked everywhere has the like:
 * OpenSSL is there only where hiredis can do TLS (Debian 12's cannot), ISA-L has checksums alone,
 * and containers often forbid the kernel's (AF_ALG).
 */
#include "base/base.h"

#include <endian.h>
#include <string.h>

static void mix(uint64_t v[4], unsigned rounds)
{
	while (rounds--)
		base_sip_round(v);
}

static void take(uint64_t v[4], uint64_t word)
{
	v[3] ^= word;
	mix(v, 2);
	v[0] ^= word;
}

/* One load: shards of many gigabytes come here. */
static uint64_t get_word(const uint8_t *from)
{
	uint64_t word;

	memcpy(&word, from, sizeof(word));
	return le64toh(word);
}

void base_mac_begin(struct base_mac *state, const uint8_t key[BASE_MAC_BYTES])
{
	const uint64_t first = base_get_le(key, 8), second = base_get_le(key + 8, 8);

	*state = (struct base_mac){ .v = {
					    first ^ 0x736f6d6570736575,
					    second ^ 0x646f72616e646f6d ^ 0xee,
					    first ^ 0x6c7967656e657261,
					    second ^ 0x7465646279746573,
				    } };
}

void base_mac_put(struct base_mac *state, const void *data, size_t bytes)
{
	const unsigned had = (unsigned)(state->bytes % 8);
	const uint8_t *at = data;
	uint64_t v[4];
	size_t left = bytes;

	state->bytes += bytes;
	for (unsigned i = had; i && i < 8 && left; i++, left--)
		state->tail |= (uint64_t)*at++ << (8 * i);
	if (had && had + bytes < 8)
		return;
	memcpy(v, state->v, sizeof(v));
	if (had)
		take(v, state->tail);
	for (; left >= 8; left -= 8, at += 8)
		take(v, get_word(at));
	memcpy(state->v, v, sizeof(v));
	state->tail = base_get_le(at, (unsigned)left);
}

void base_mac_end(struct base_mac *state, uint8_t mac[BASE_MAC_BYTES])
{
	uint64_t *v = state->v;

	take(v, state->bytes << 56 | state->tail);
	v[2] ^= 0xee;
	mix(v, 4);
	base_put_le(mac, v[0] ^ v[1] ^ v[2] ^ v[3], 8);
	v[1] ^= 0xdd;
	mix(v, 4);
	base_put_le(mac + 8, v[0] ^ v[1] ^ v[2] ^ v[3], 8);
}

void base_mac(uint8_t mac[BASE_MAC_BYTES], const uint8_t key[BASE_MAC_BYTES], const void *data,
	      size_t bytes)
{
	struct base_mac state;

	base_mac_begin(&state, key);
	base_mac_put(&state, data, bytes);
	base_mac_end(&state, mac);
}
