/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SipHash-2-4 with a result of 128 bits (Aumasson and Bernstein, 2012), as its authors' test
 * vectors have it. It is written here because no library that is linked everywhere has the like:
 * OpenSSL is there only where hiredis can do TLS (Debian 12's cannot), ISA-L has checksums alone,
 * and containers often forbid the kernel's (AF_ALG).
 */
#include "base/base.h"

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

void base_mac(uint8_t mac[BASE_MAC_BYTES], const uint8_t key[BASE_MAC_BYTES], const void *data,
	      size_t bytes)
{
	const uint64_t first = base_get_le(key, 8), second = base_get_le(key + 8, 8);
	uint64_t v[4] = {
		first ^ 0x736f6d6570736575,
		second ^ 0x646f72616e646f6d ^ 0xee,
		first ^ 0x6c7967656e657261,
		second ^ 0x7465646279746573,
	};
	const uint8_t *at = data;
	size_t left = bytes;

	for (; left >= 8; left -= 8, at += 8)
		take(v, base_get_le(at, 8));
	take(v, (uint64_t)bytes << 56 | base_get_le(at, (unsigned)left));
	v[2] ^= 0xee;
	mix(v, 4);
	base_put_le(mac, v[0] ^ v[1] ^ v[2] ^ v[3], 8);
	v[1] ^= 0xdd;
	mix(v, 4);
	base_put_le(mac + 8, v[0] ^ v[1] ^ v[2] ^ v[3], 8);
}
