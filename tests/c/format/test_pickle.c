/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of data.pkl, compared with those of torch and with the rules of pickle. tests/python
 * checks what torch reads from them.
 */
#define _GNU_SOURCE
#include "format/format.h"
#include "support/check_main.h"
#include "support/fail_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST(...)                                                                                  \
	(const int64_t[])                                                                          \
	{                                                                                          \
		__VA_ARGS__                                                                        \
	}

static struct base_buffer pickle_of(const struct ioshape_tensor *tensors, size_t count)
{
	struct format_layout *layouts = calloc(count + 1, sizeof(*layouts));
	struct base_buffer out = { 0 };

	for (size_t i = 0; i < count; i++) {
		layouts[i].strides = calloc(tensors[i].dims + 1, sizeof(int64_t));
		REQUIRE(!format_layout_tensor(&tensors[i], &layouts[i], NULL));
	}
	ck_assert_int_eq(format_pickle_tensors(&out, tensors, layouts, count), 0);
	for (size_t i = 0; i < count; i++)
		free(layouts[i].strides);
	free(layouts);
	return out;
}

static void expect_bytes(const struct base_buffer *out, const void *bytes, size_t count)
{
	ck_assert_uint_eq(out->bytes, count);
	ck_assert_mem_eq(out->data, bytes, count);
}

static struct test_case tests_case = { .name = "pickle" };

TEST(tests_case, an_empty_dict_is_an_empty_dict)
{
	struct base_buffer out = pickle_of(NULL, 0);

	expect_bytes(&out, "\x80\x02}.", 4);
	base_buffer_free(&out);
}

/* As torch.save writes it, except that only values that are used again enter the memo. */
TEST(tests_case, tensors_are_pickled_as_torch_pickles_them)
{
	static const char expected[] = "\x80\x02}("
				       "X\1\0\0\0a"
				       "ctorch._utils\n_rebuild_tensor_v2\nq\x02"
				       "("
				       "(X\7\0\0\0storageq\x00"
				       "ctorch\nFloatStorage\nq\x0d"
				       "X\1\0\0\0000"
				       "X\3\0\0\0cpuq\x01"
				       "K\x06tQ"
				       "K\x00"
				       "K\x02K\x03\x86"
				       "K\x03K\x01\x86"
				       "\x89"
				       "ccollections\nOrderedDict\nq\x04)R"
				       "tR"
				       "X\1\0\0\0b"
				       "ctorch._utils\n_rebuild_tensor_v3\nq\x03"
				       "("
				       "(h\x00"
				       "ctorch.storage\nUntypedStorage\nq\x05"
				       "X\1\0\0\0001"
				       "h\x01"
				       "K\x06tQ"
				       "K\x00"
				       "K\x03\x85"
				       "K\x01\x85"
				       "\x89"
				       "h\x04)R"
				       "ctorch\nuint16\nq\x14"
				       "tR"
				       "X\1\0\0\0c"
				       "h\x02"
				       "("
				       "(h\x00h\x0dX\1\0\0\0002h\x01K\x01tQ"
				       "K\x00))\x89h\x04)R"
				       "tR"
				       "u.";
	static const float data[6];
	const struct ioshape_tensor tensors[] = {
		{ "a", IOSHAPE_FLOAT32, 2, LIST(2, 3), NULL, data },
		{ "b", IOSHAPE_UINT16, 1, LIST(3), NULL, data },
		{ "c", IOSHAPE_FLOAT32, 0, NULL, NULL, data },
	};
	struct base_buffer out = pickle_of(tensors, ARRAY_LENGTH(tensors));

	expect_bytes(&out, expected, sizeof(expected) - 1);
	base_buffer_free(&out);
}

/* Each number as pickle writes it, up to 63 bits. */
TEST(tests_case, numbers_take_the_smallest_opcode_that_holds_them)
{
	static const struct {
		int64_t number;
		const char *bytes;
		size_t count;
	} cases[] = {
		{ 2, "K\x02", 2 },
		{ 255, "K\xff", 2 },
		{ 256, "M\x00\x01", 3 },
		{ 65535, "M\xff\xff", 3 },
		{ 65536, "J\x00\x00\x01\x00", 5 },
		{ INT32_MAX, "J\xff\xff\xff\x7f", 5 },
		{ INT64_C(1) << 31, "\x8a\x08\x00\x00\x00\x80\x00\x00\x00\x00", 10 },
		{ INT64_MAX, "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", 10 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		const struct ioshape_tensor tensor = {
			"a", IOSHAPE_UINT8, 2, LIST(cases[i].number, 0), NULL, NULL,
		};
		struct base_buffer out = pickle_of(&tensor, 1);
		char expected[32] = "K\x00";

		memcpy(expected + 2, cases[i].bytes, cases[i].count);
		memcpy(expected + 2 + cases[i].count, "K\x00\x86", 3);
		ck_assert_ptr_nonnull(memmem(out.data, out.bytes, expected, cases[i].count + 5));
		base_buffer_free(&out);
	}
}

TEST(tests_case, more_than_three_dimensions_become_a_marked_tuple)
{
	static const char data[120];
	const struct ioshape_tensor tensor = {
		"a", IOSHAPE_UINT8, 5, LIST(1, 2, 3, 4, 5), NULL, data,
	};
	static const char expected[] =
		"K\x00(K\x01K\x02K\x03K\x04K\x05t(K\x78K\x3cK\x14K\x05K\x01t\x89";
	struct base_buffer out = pickle_of(&tensor, 1);

	ck_assert_ptr_nonnull(memmem(out.data, out.bytes, expected, sizeof(expected) - 1));
	base_buffer_free(&out);
}

/* ---- An interpreter of pickles that counts --------------------------------------------------- */

struct walk {
	size_t items;        /* items set in all */
	size_t most_at_once; /* by one SETITEMS */
	size_t globals;
	size_t deepest; /* objects on the stack */
	uint64_t memo;  /* bitmap of used memo entries */
};

static size_t bytes_of_line(const uint8_t *at)
{
	return (size_t)((const uint8_t *)strchr((const char *)at, '\n') - at) + 1;
}

/*
 * Counts the operations of a pickle. Aborts the test at anything that the protocol or torch's
 * unpickler would refuse.
 */
static struct walk walk_pickle(const uint8_t *at, size_t bytes)
{
	const uint8_t *end = at + bytes;
	struct walk walk = { 0 };
	size_t marks[4], depth = 0, marked = 0;

	ck_assert_mem_eq(at, "\x80\x02", 2);
	for (at += 2; *at != '.';) {
		REQUIRE(at < end);
		switch (*at++) {
		case '}':
		case ')':
		case 0x89:
			depth++;
			break;
		case '(':
			REQUIRE(marked < 4);
			marks[marked++] = depth;
			break;
		case 't':
			depth = marks[--marked] + 1;
			break;
		case 0x85:
		case 0x86:
		case 0x87:
			depth -= at[-1] - 0x85u;
			break;
		case 'X':
			at += 4 + base_get_le(at, 4);
			depth++;
			break;
		case 'K':
			at += 1;
			depth++;
			break;
		case 'M':
			at += 2;
			depth++;
			break;
		case 'J':
			at += 4;
			depth++;
			break;
		case 0x8a:
			at += 1 + at[0];
			depth++;
			break;
		case 'c':
			at += bytes_of_line(at);
			at += bytes_of_line(at);
			walk.globals++;
			depth++;
			break;
		case 'q':
			REQUIRE(*at < 64);
			REQUIRE(!(walk.memo & (UINT64_C(1) << *at)));
			walk.memo |= UINT64_C(1) << *at++;
			break;
		case 'h':
			REQUIRE(*at < 64);
			REQUIRE(walk.memo & (UINT64_C(1) << *at++));
			depth++;
			break;
		case 'Q':
			break;
		case 'R':
			depth--;
			break;
		case 'u':
			REQUIRE((depth - marks[--marked]) % 2 == 0);
			walk.most_at_once = MAX(walk.most_at_once, (depth - marks[marked]) / 2);
			walk.items += (depth - marks[marked]) / 2;
			depth = marks[marked];
			break;
		default:
			ck_abort_msg("opcode %02x", at[-1]);
		}
		walk.deepest = MAX(walk.deepest, depth);
	}
	ck_assert_ptr_eq(at + 1, end);
	ck_assert_uint_eq(depth, 1);
	ck_assert_uint_eq(marked, 0);
	return walk;
}

static struct ioshape_tensor *many_tensors(size_t count, char (*names)[48])
{
	static const int64_t shape[4] = { 2, 1, 70000, 3 };
	static const char data[1];
	struct ioshape_tensor *tensors = calloc(count, sizeof(*tensors));

	for (size_t i = 0; i < count; i++) {
		snprintf(names[i], sizeof(names[i]), "layers.%zu.weight", i);
		tensors[i] = (struct ioshape_tensor){
			.name = names[i],
			.dtype = (enum ioshape_dtype)(1 + i % IOSHAPE_FLOAT4_E2M1FN_X2),
			.dims = (uint32_t)(i % 5),
			.shape = shape,
			.data = data,
		};
	}
	return tensors;
}

TEST(tests_case, items_are_set_a_thousand_at_a_time)
{
	static const size_t counts[] = { 1, 2, 999, 1000, 1001, 2000, 100000 };

	for (size_t i = 0; i < ARRAY_LENGTH(counts); i++) {
		char(*names)[48] = calloc(counts[i], sizeof(*names));
		struct ioshape_tensor *tensors = many_tensors(counts[i], names);
		struct base_buffer out = pickle_of(tensors, counts[i]);
		struct walk walk = walk_pickle(out.data, out.bytes);

		ck_assert_uint_eq(walk.items, counts[i]);
		ck_assert_uint_eq(walk.most_at_once, MIN(counts[i], 1000));
		ck_assert_uint_le(walk.deepest, 2 * 1000 + 64);
		base_buffer_free(&out);
		free(tensors);
		free(names);
	}
}

/* torch's unpickler looks up each global, which must not happen for each tensor. */
TEST(tests_case, globals_are_named_once)
{
	char(*names)[48] = calloc(5000, sizeof(*names));
	struct ioshape_tensor *tensors = many_tensors(5000, names);
	struct base_buffer out = pickle_of(tensors, 5000);
	struct walk walk = walk_pickle(out.data, out.bytes);

	/* Each dtype or its storage class, two functions, OrderedDict and UntypedStorage. */
	ck_assert_uint_eq(walk.globals, IOSHAPE_FLOAT4_E2M1FN_X2 + 4);
	base_buffer_free(&out);
	free(tensors);
	free(names);
}

TEST(tests_case, without_memory_nothing_is_appended)
{
	char(*names)[48] = calloc(300, sizeof(*names));
	struct ioshape_tensor *tensors = many_tensors(300, names);
	struct format_layout *layouts = calloc(300, sizeof(*layouts));
	struct base_buffer out = { 0 };
	int64_t strides[4];
	unsigned long nth;
	int ret = -ENOMEM;

	for (size_t i = 0; i < 300; i++) {
		layouts[i].strides = strides;
		REQUIRE(!format_layout_tensor(&tensors[i], &layouts[i], NULL));
	}
	base_buffer_append(&out, "before", 6);
	for (nth = 1; ret; nth++) {
		fail_memory_at(nth);
		ret = format_pickle_tensors(&out, tensors, layouts, 300);
		fail_memory_at(0);
		ck_assert(ret == 0 || ret == -ENOMEM);
		if (ret)
			ck_assert_uint_eq(out.bytes, 6);
	}
	ck_assert_uint_gt(nth, 3);
	ck_assert_mem_eq(out.data, "before", 6);
	walk_pickle(out.data + 6, out.bytes - 6);
	base_buffer_free(&out);
	free(layouts);
	free(tensors);
	free(names);
}

TEST(tests_case, the_longest_names_and_most_dimensions_fit)
{
	int64_t shape[IOSHAPE_MAX_DIMS];
	char name[IOSHAPE_MAX_NAME_BYTES + 1];
	struct ioshape_tensor tensors[64];
	struct base_buffer out;

	memset(name, 'n', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	for (size_t i = 0; i < IOSHAPE_MAX_DIMS; i++)
		shape[i] = 0;
	shape[63] = INT64_MAX / 16; /* widest strides and numbers */
	for (size_t i = 0; i < ARRAY_LENGTH(tensors); i++)
		tensors[i] = (struct ioshape_tensor){
			name, (enum ioshape_dtype)(1 + i % 22), IOSHAPE_MAX_DIMS, shape, NULL, NULL,
		};
	out = pickle_of(tensors, ARRAY_LENGTH(tensors));
	ck_assert_uint_eq(walk_pickle(out.data, out.bytes).items, ARRAY_LENGTH(tensors));
	base_buffer_free(&out);
}
