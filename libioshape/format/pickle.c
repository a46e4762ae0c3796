/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pickle that torch.load expects: protocol 2, and only opcodes that torch's weights_only
 * unpickler knows. A tensor is written as torch writes it, a call of _rebuild_tensor_v2 on a typed
 * storage, or of _rebuild_tensor_v3 on an untyped one for the dtypes that came later.
 */
#define _GNU_SOURCE
#include "format/format.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Opcodes, named as in Python's pickletools. */
enum {
	PROTO = 0x80,
	EMPTY_DICT = '}',
	EMPTY_TUPLE = ')',
	MARK = '(',
	SETITEMS = 'u',
	TUPLE = 't',
	TUPLE1 = 0x85, /* TUPLE2, TUPLE3 follow */
	BINUNICODE = 'X',
	BININT1 = 'K',
	BININT2 = 'M',
	BININT = 'J',
	LONG1 = 0x8a,
	NEWFALSE = 0x89,
	GLOBAL = 'c',
	BINPUT = 'q',
	BINGET = 'h',
	BINPERSID = 'Q',
	REDUCE = 'R',
	STOP = '.',
};

/* Python's pickle sets as many items at once: it bounds the unpickler's stack. */
#define ITEMS_AT_ONCE 1000u

/* What every tensor repeats is written once and fetched from the unpickler's memo from then on. */
enum {
	MEMO_STORAGE,
	MEMO_CPU,
	MEMO_REBUILD_V2,
	MEMO_REBUILD_V3,
	MEMO_ORDERED_DICT,
	MEMO_UNTYPED_STORAGE,
	MEMO_DTYPE, /* + dtype: its typed storage, or else the dtype itself */
};

#define MOST_DTYPES 58u /* `known` has a bit for each place in the memo */

/* Most bytes that one tensor takes, but for its name and its dimensions (two LONG1 of 64 bits
 * each). */
#define TENSOR_BYTES 1024u
#define DIM_BYTES (2u * 10u)

struct pickler {
	uint8_t *at;    /* behind the last byte; room has been made */
	uint64_t known; /* places of the memo that are filled */
};

static void put_byte(struct pickler *pickler, unsigned byte)
{
	*pickler->at++ = (uint8_t)byte;
}

static void put_bytes(struct pickler *pickler, const void *bytes, size_t count)
{
	memcpy(pickler->at, bytes, count);
	pickler->at += count;
}

static void put_le(struct pickler *pickler, uint64_t value, unsigned bytes)
{
	base_put_le(pickler->at, value, bytes);
	pickler->at += bytes;
}

static void put_text(struct pickler *pickler, const char *text, size_t bytes)
{
	put_byte(pickler, BINUNICODE);
	put_le(pickler, bytes, 4);
	put_bytes(pickler, text, bytes);
}

/* Not negative, below 2^63. */
static void put_count(struct pickler *pickler, uint64_t value)
{
	if (value <= UINT8_MAX) {
		put_byte(pickler, BININT1);
		put_le(pickler, value, 1);
	} else if (value <= UINT16_MAX) {
		put_byte(pickler, BININT2);
		put_le(pickler, value, 2);
	} else if (value <= INT32_MAX) {
		put_byte(pickler, BININT);
		put_le(pickler, value, 4);
	} else {
		put_byte(pickler, LONG1);
		put_byte(pickler, 8);
		put_le(pickler, value, 8);
	}
}

static void put_counts(struct pickler *pickler, const int64_t *values, uint32_t count)
{
	if (!count) {
		put_byte(pickler, EMPTY_TUPLE);
		return;
	}
	if (count > 3)
		put_byte(pickler, MARK);
	for (uint32_t i = 0; i < count; i++)
		put_count(pickler, (uint64_t)values[i]);
	put_byte(pickler, count > 3 ? TUPLE : TUPLE1 + count - 1);
}

/* True if the object came out of the memo; otherwise the caller writes it and then remembers it. */
static bool recall(struct pickler *pickler, unsigned place)
{
	if (!(pickler->known & (UINT64_C(1) << place)))
		return false;
	put_byte(pickler, BINGET);
	put_byte(pickler, place);
	return true;
}

static void remember(struct pickler *pickler, unsigned place)
{
	put_byte(pickler, BINPUT);
	put_byte(pickler, place);
	pickler->known |= UINT64_C(1) << place;
}

static void put_word(struct pickler *pickler, unsigned place, const char *word)
{
	if (recall(pickler, place))
		return;
	put_text(pickler, word, strlen(word));
	remember(pickler, place);
}

static void put_global(struct pickler *pickler, unsigned place, const char *module,
		       const char *name)
{
	if (recall(pickler, place))
		return;
	put_byte(pickler, GLOBAL);
	put_bytes(pickler, module, strlen(module));
	put_byte(pickler, '\n');
	put_bytes(pickler, name, strlen(name));
	put_byte(pickler, '\n');
	remember(pickler, place);
}

/* ('storage', class, key, 'cpu', count) as a persistent id: an untyped storage counts bytes. */
static void put_storage(struct pickler *pickler, const struct ioshape_tensor *tensor,
			const struct format_dtype *dtype, uint64_t bytes, size_t key)
{
	char digits[24];
	int length = snprintf(digits, sizeof(digits), "%zu", key);

	put_byte(pickler, MARK);
	put_word(pickler, MEMO_STORAGE, "storage");
	if (dtype->storage)
		put_global(pickler, MEMO_DTYPE + (unsigned)tensor->dtype, "torch", dtype->storage);
	else
		put_global(pickler, MEMO_UNTYPED_STORAGE, "torch.storage", "UntypedStorage");
	put_text(pickler, digits, (size_t)length);
	put_word(pickler, MEMO_CPU, "cpu");
	put_count(pickler, dtype->storage ? bytes / dtype->bytes : bytes);
	put_byte(pickler, TUPLE);
	put_byte(pickler, BINPERSID);
}

/* rebuild(storage, offset, size, stride, requires_grad, hooks[, dtype]) */
static void put_tensor(struct pickler *pickler, const struct ioshape_tensor *tensor,
		       const struct format_layout *layout, size_t key)
{
	const struct format_dtype *dtype = format_dtype_of((uint32_t)tensor->dtype);

	put_text(pickler, tensor->name, strlen(tensor->name));
	if (dtype->storage)
		put_global(pickler, MEMO_REBUILD_V2, "torch._utils", "_rebuild_tensor_v2");
	else
		put_global(pickler, MEMO_REBUILD_V3, "torch._utils", "_rebuild_tensor_v3");
	put_byte(pickler, MARK);
	put_storage(pickler, tensor, dtype, layout->bytes, key);
	put_count(pickler, 0);
	put_counts(pickler, tensor->shape, tensor->dims);
	put_counts(pickler, layout->strides, tensor->dims);
	put_byte(pickler, NEWFALSE);
	/* A new one for each tensor: hooks registered on one must not show on another. */
	put_global(pickler, MEMO_ORDERED_DICT, "collections", "OrderedDict");
	put_byte(pickler, EMPTY_TUPLE);
	put_byte(pickler, REDUCE);
	if (!dtype->storage)
		put_global(pickler, MEMO_DTYPE + (unsigned)tensor->dtype, "torch", dtype->name);
	put_byte(pickler, TUPLE);
	put_byte(pickler, REDUCE);
}

int format_pickle_tensors(struct base_buffer *out, const struct ioshape_tensor *tensors,
			  const struct format_layout *layouts, size_t count)
{
	struct pickler pickler = { .known = 0 };
	const size_t begin = out->bytes;
	int ret;

	_Static_assert(IOSHAPE_FLOAT4_E2M1FN_X2 < MOST_DTYPES && MEMO_DTYPE + MOST_DTYPES <= 64,
		       "a dtype without a place in the memo");

	ret = base_buffer_reserve(out, TENSOR_BYTES);
	if (ret)
		return ret;
	pickler.at = out->data + out->bytes;
	put_byte(&pickler, PROTO);
	put_byte(&pickler, 2);
	put_byte(&pickler, EMPTY_DICT);

	for (size_t i = 0; i < count; i++) {
		out->bytes = (size_t)(pickler.at - out->data);
		ret = base_buffer_reserve(out, strlen(tensors[i].name) + TENSOR_BYTES +
						       tensors[i].dims * DIM_BYTES);
		if (ret)
			goto undo;
		pickler.at = out->data + out->bytes;
		if (i % ITEMS_AT_ONCE == 0)
			put_byte(&pickler, MARK);
		put_tensor(&pickler, &tensors[i], &layouts[i], i);
		if ((i + 1) % ITEMS_AT_ONCE == 0 || i + 1 == count)
			put_byte(&pickler, SETITEMS);
	}
	put_byte(&pickler, STOP);
	out->bytes = (size_t)(pickler.at - out->data);
	return 0;
undo:
	out->bytes = begin;
	return ret;
}
