/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensors to save, and whether a file holds them: of many dtypes, shapes and strides, with numbers
 * that follow from a seed. Public API only.
 */
#ifndef TESTS_SUPPORT_SAMPLE_H
#define TESTS_SUPPORT_SAMPLE_H

#include <ioshape/ioshape.h>

#define SAMPLE_TENSORS 9

struct sample {
	uint64_t seed;
	struct ioshape_tensor tensors[SAMPLE_TENSORS];
	size_t count;
	int64_t shapes[SAMPLE_TENSORS][4], strides[SAMPLE_TENSORS][4];
	void *memory[SAMPLE_TENSORS];
	/* What a file holds of each. */
	void *expected[SAMPLE_TENSORS];
	uint64_t bytes[SAMPLE_TENSORS];
	uint64_t total_bytes;
	struct ioshape_attribute attributes[2];
	struct ioshape_metadata metadata;
};

/* `large_bytes` of one tensor; the others have a quarter of a megabyte together. */
void sample_make(struct sample *sample, uint64_t seed, size_t large_bytes);
void sample_free(struct sample *sample);

/* Overwrites the tensors, as training does after an asynchronous save has returned. */
void sample_spoil(struct sample *sample);

/* Saves them. Without options, with their metadata and nothing else. */
int sample_save(struct ioshape_context *context, const char *path, const struct sample *sample,
		const struct ioshape_save_options *options);

/* What a file holds of them: as it is, or as the records data/0, data/1, ... */
int sample_write_raw(struct ioshape_context *context, const char *path,
		     const struct sample *sample);
int sample_write_records(struct ioshape_context *context, const char *path,
			 const struct sample *sample);

/* All tensors in one call, into memory for `total_bytes`. -EBADMSG if one is not as it was saved.
 */
int sample_load(struct ioshape_reader *reader, const struct sample *sample, void *into);

/* 0 if the file holds just these tensors and metadata, bit for bit; else a code, and why in `why`.
 */
int sample_check(struct ioshape_context *context, const char *path, const struct sample *sample,
		 char *why, size_t why_bytes);

/* The same for a file that is open. */
int sample_check_reader(struct ioshape_reader *reader, const struct sample *sample, char *why,
			size_t why_bytes);

/* A context for tests: small blocks, few threads. Fails the test if it cannot be had. */
struct ioshape_context *sample_context(enum ioshape_engine engine, enum ioshape_direct direct);

#endif
