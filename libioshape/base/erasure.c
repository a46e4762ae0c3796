/* SPDX-License-Identifier: Apache-2.0 */
/* Reed-Solomon codes, by ISA-L: the first parity is an exclusive or, the second that of RAID 6. */
#include "base/base.h"

#include <isa-l/erasure_code.h>
#include <string.h>

/* Of an even length, while a piece of the sum is in the caches nearest to the core. */
#define PIECE_BYTES (64 * KIB)
#define TABLE_BYTES 32

void base_erasure_add(void *sum, const void *element, size_t bytes, uint8_t coefficient)
{
	uint8_t table[TABLE_BYTES], *to = sum;
	const uint8_t *from = element;

	ec_init_tables(1, 1, &coefficient, table);
	for (size_t piece; bytes; to += piece, from += piece, bytes -= piece) {
		piece = MIN(bytes, PIECE_BYTES);
		/* The cast takes away a const that ISA-L forgot. */
		ec_encode_data_update((int)piece, 1, 1, 0, table, (uint8_t *)(uintptr_t)from, &to);
	}
}

bool base_erasure_solve(unsigned data, const unsigned *have, unsigned wanted, uint8_t *coefficients)
{
	uint8_t rows[(BASE_MOST_DATA + BASE_MOST_PARITY) * BASE_MOST_DATA];
	uint8_t known[BASE_MOST_DATA * BASE_MOST_DATA], inverse[BASE_MOST_DATA * BASE_MOST_DATA];

	gf_gen_rs_matrix(rows, (int)(data + BASE_MOST_PARITY), (int)data);
	for (unsigned i = 0; i < data; i++)
		memcpy(known + i * data, rows + have[i] * data, data);
	if (gf_invert_matrix(known, inverse, (int)data))
		return false;
	/* The row of what is wanted, in terms of what there is. */
	for (unsigned i = 0; i < data; i++) {
		coefficients[i] = 0;
		for (unsigned j = 0; j < data; j++)
			coefficients[i] ^= gf_mul(rows[wanted * data + j], inverse[j * data + i]);
	}
	return true;
}
