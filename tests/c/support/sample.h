/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sample tensors of many dtypes, shapes and strides, with values from a seed, and checks that a
 * file holds them. Uses the public API only.
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
	/* Contents of each tensor in a file. */
	void *expected[SAMPLE_TENSORS];
	uint64_t bytes[SAMPLE_TENSORS];
	uint64_t total_bytes;
	struct ioshape_attribute attributes[2];
	struct ioshape_metadata metadata;
};

/* Makes a sample. One tensor has `large_bytes`; the others have 256 KiB together. */
void sample_make(struct sample *sample, uint64_t seed, size_t large_bytes);
void sample_free(struct sample *sample);

/* Overwrites the tensors, as training does after a background save has returned. */
void sample_spoil(struct sample *sample);

/* Saves the tensors. Without options it also saves their metadata. */
int sample_save(struct ioshape_context *context, const char *path, const struct sample *sample,
		const struct ioshape_save_options *options);

/*
 * Write the tensors' bytes without the library's tensor formats: as a raw file, or as the records
 * data/0, data/1, ...
 */
int sample_write_raw(struct ioshape_context *context, const char *path,
		     const struct sample *sample);
int sample_write_records(struct ioshape_context *context, const char *path,
			 const struct sample *sample);

/*
 * Loads all tensors in one call, into memory of `total_bytes`. Returns -EBADMSG if one differs from
 * what was saved.
 */
int sample_load(struct ioshape_reader *reader, const struct sample *sample, void *into);

/*
 * Returns 0 if the file holds exactly these tensors and metadata, bit for bit; else a code, and the
 * reason in `why`.
 */
int sample_check(struct ioshape_context *context, const char *path, const struct sample *sample,
		 char *why, size_t why_bytes);

/* Checks an open file like sample_check(). */
int sample_check_reader(struct ioshape_reader *reader, const struct sample *sample, char *why,
			size_t why_bytes);

/* Opens a context with small blocks and few threads. Fails the test if it cannot. */
struct ioshape_context *sample_context(enum ioshape_engine engine, enum ioshape_direct direct);

#endif
