/* SPDX-License-Identifier: Apache-2.0 */
/* Checksums, hashes and MACs. */
#include "base/base.h"

#include <endian.h>
#include <isa-l/crc.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

uint32_t base_crc32(uint32_t crc, const void *data, size_t bytes)
{
	/* The cast removes a const that ISA-L 2.30 forgot in its prototype. */
	return crc32_gzip_refl(crc, (unsigned char *)(uintptr_t)data, bytes);
}

/* ---- Copying and checksumming in one pass ---------------------------------------------------- */

/*
 * Bytes that are copied and checksummed in turn, where the processor cannot do both at once. Small
 * enough that they are still in the first-level caches, large enough for the checksum's wide loops.
 * Measured: 16 to 256 KiB are alike, 1 MiB loses a sixth.
 */
#define PIECE_BYTES (64 * KIB)

#ifdef __x86_64__
/* Shorter copies are often read again soon, and a fence costs as much as copying 4 KiB. */
#define LEAST_FOLDED_BYTES (16 * KIB)

/* Registers whose checksums are independent, which hides the latency of a product. */
#define FOLD_REGISTERS 8
#define FOLD_BYTES (FOLD_REGISTERS * sizeof(__m256i))

/*
 * Powers of x that move a register over 2048 bits, and over 256: x^(n+32) for its first half and
 * x^(n-32) for its second. They are shifted by one bit, because products of reflected words are.
 */
#define FOLD_BY_2048 0x11542778a, 0x1322d1430
#define FOLD_BY_256 0x0f1da05aa, 0x15a546366

#define FOLDING __attribute__((target("avx2,vpclmulqdq")))

FOLDING static inline __m256i fold_factors(long long first, long long second)
{
	return _mm256_set_epi64x(second, first, second, first);
}

/* Moves a register by the distance of `factors`, and adds the bytes that are there. */
FOLDING static inline __m256i fold(__m256i state, __m256i factors, __m256i bytes)
{
	const __m256i first = _mm256_clmulepi64_epi128(state, factors, 0x00);
	const __m256i second = _mm256_clmulepi64_epi128(state, factors, 0x11);

	return _mm256_xor_si256(_mm256_xor_si256(first, second), bytes);
}

/*
 * Copies bytes with stores that bypass the caches, and checksums what it stores. `to` is a multiple
 * of 32, and `bytes` of FOLD_BYTES. See V. Gopal et al., "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction", Intel 2009.
 */
FOLDING static uint32_t copy_and_fold(uint32_t crc, char *to, const char *from, size_t bytes)
{
	const __m256i far = fold_factors(FOLD_BY_2048), near = fold_factors(FOLD_BY_256);
	__m256i state[FOLD_REGISTERS] = { 0 }, next;
	__m256i begin = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)~crc));

	for (const char *end = from + bytes; from < end; from += FOLD_BYTES, to += FOLD_BYTES) {
#pragma GCC unroll 8
		for (size_t i = 0; i < FOLD_REGISTERS; i++) {
			next = _mm256_loadu_si256((const __m256i *)from + i);
			_mm256_stream_si256((__m256i *)to + i, next);
			state[i] = fold(state[i], far, next);
		}
		state[0] = _mm256_xor_si256(state[0], begin);
		begin = _mm256_setzero_si256();
	}
	/* Order these stores before the ordinary stores that publish the bytes to other threads. */
	_mm_sfence();
	for (size_t i = 1; i < FOLD_REGISTERS; i++)
		state[i] = fold(state[i - 1], near, state[i]);
	/* The last register has the checksum of all bytes; ~0 adds nothing to it. */
	return base_crc32(~0u, &state[FOLD_REGISTERS - 1], sizeof(*state));
}

static bool folds(size_t bytes)
{
	return bytes >= LEAST_FOLDED_BYTES && __builtin_cpu_supports("vpclmulqdq") &&
	       __builtin_cpu_supports("avx2");
}

static uint32_t copy_by_folding(uint32_t crc, char *to, const char *from, size_t bytes)
{
	const size_t head = -(uintptr_t)to % sizeof(__m256i);
	const size_t tail = (bytes - head) % FOLD_BYTES, middle = bytes - head - tail;

	memcpy(to, from, head);
	memcpy(to + head + middle, from + head + middle, tail);
	crc = base_crc32(crc, to, head);
	crc = copy_and_fold(crc, to + head, from + head, middle);
	return base_crc32(crc, to + head + middle, tail);
}

/* Copies with stores that bypass the caches, for processors without VPCLMULQDQ. */
__attribute__((target("avx2"))) static void copy_past_cache(char *to, const char *from,
							    size_t bytes)
{
	size_t done = -(uintptr_t)to % sizeof(__m256i);

	memcpy(to, from, done);
	for (; done + sizeof(__m256i) <= bytes; done += sizeof(__m256i))
		_mm256_stream_si256((__m256i *)(to + done),
				    _mm256_loadu_si256((const __m256i *)(from + done)));
	memcpy(to + done, from + done, bytes - done);
	_mm_sfence();
}

static void copy_large(char *to, const char *from, size_t bytes)
{
	if (bytes == PIECE_BYTES && __builtin_cpu_supports("avx2"))
		copy_past_cache(to, from, bytes);
	else
		memcpy(to, from, bytes);
}
#else
static bool folds(size_t bytes)
{
	(void)bytes;
	return false;
}

static uint32_t copy_by_folding(uint32_t crc, char *to, const char *from, size_t bytes)
{
	memcpy(to, from, bytes);
	return base_crc32(crc, to, bytes);
}

static void copy_large(char *to, const char *from, size_t bytes)
{
	memcpy(to, from, bytes);
}
#endif

uint32_t base_copy_crc32(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes)
{
	if (folds(bytes))
		return copy_by_folding(crc, to, from, bytes);
	for (size_t done = 0, piece; done < bytes; done += piece) {
		piece = MIN(bytes - done, PIECE_BYTES);
		memcpy((char *)to + done, (const char *)from + done, piece);
		crc = base_crc32(crc, (char *)to + done, piece);
	}
	return crc;
}

uint32_t base_crc32_move(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes)
{
	if (folds(bytes))
		return copy_by_folding(crc, to, from, bytes);
	for (size_t done = 0, piece; done < bytes; done += piece) {
		piece = MIN(bytes - done, PIECE_BYTES);
		crc = base_crc32(crc, (const char *)from + done, piece);
		copy_large((char *)to + done, (const char *)from + done, piece);
	}
	return crc;
}

/*
 * CRC-32 uses polynomials over GF(2), modulo P, with bits reflected: the top bit of a word is x^0.
 * The checksum of A‖B is crc(A)·x^(8·|B|) + crc(B).
 */
#define POLYNOMIAL 0xedb88320u

static uint32_t multiply(uint32_t a, uint32_t b)
{
	uint32_t product = 0;

	for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
		if (a & bit)
			product ^= b;
		b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
	}
	return product;
}

/*
 * x^(2^k) for k = 0 to 31. The square of the last one is the first one, so they suffice for all k.
 */
static const uint32_t powers[32] = {
	0x40000000, 0x20000000, 0x08000000, 0x00800000, 0x00008000, 0xedb88320, 0xb1e6b092,
	0xa06a2517, 0xed627dae, 0x88d14467, 0xd7bbfe6a, 0xec447f11, 0x8e7ea170, 0x6427800e,
	0x4d47bae0, 0x09fe548f, 0x83852d0f, 0x30362f1a, 0x7b5a9cc3, 0x31fec169, 0x9fec022a,
	0x6c8dedc4, 0x15d6874d, 0x5fde7a4e, 0xbad90e37, 0x2e4e5eef, 0x4eaba214, 0xa8a472c0,
	0x429a969e, 0x148d302a, 0xc40ba6d0, 0xc4e22c3c,
};

uint32_t base_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b)
{
	/* A byte is x^8: k begins at 3. */
	for (unsigned k = 3; bytes_b && crc_a; bytes_b >>= 1, k++)
		if (bytes_b & 1)
			crc_a = multiply(powers[k % 32], crc_a);
	return crc_a ^ crc_b;
}

uint64_t base_hash_text(const char *text)
{
	uint64_t hash = 0xcbf29ce484222325;

	for (; *text; text++)
		hash = (hash ^ (unsigned char)*text) * 0x100000001b3;
	return hash;
}

/* ---- Message authentication ------------------------------------------------------------------ */

/*
 * SipHash-2-4 with a 128-bit result (Aumasson and Bernstein, 2012), checked by its authors' test
 * vectors. It is implemented here because no library that is always linked has a MAC. OpenSSL is
 * linked only if hiredis supports TLS (not in Debian 12), ISA-L has only checksums, and containers
 * often forbid the kernel's AF_ALG.
 */

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

/* Loads a word at once, since shards of many gigabytes pass through here. */
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
