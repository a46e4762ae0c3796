/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: plans, which are everything about a save but the bytes. */
#ifndef SAVE_PLAN_H
#define SAVE_PLAN_H

#include "save/save.h"

/* A record to be written, and where its bytes are. */
struct save_record {
	const char *name; /* the plan's own */
	uint64_t bytes;
	uint64_t start;   /* in what is staged: one record behind the other */
	const void *data; /* where it lies as it is saved, unless one of the next two is set */
	const struct ioshape_tensor *packed; /* must be packed row-major */
	ioshape_fetch_fn fetch;
	void *fetch_user;
	uint32_t alignment; /* 0: by size */
	bool later;         /* may be copied after the call */
	uint32_t sample;    /* of what is copied later: a checksum of what it was in the call */
};

struct save_plan {
	const char *path; /* for messages; borrowed */
	struct save_record *records;
	size_t count;
	size_t own; /* of the first records, whose bytes are the plan's; the rest is the payload */
	bool safetensors;        /* that container, without an index; otherwise a torch zip */
	bool checksums;          /* are to be put beside the file */
	bool fetches;            /* a function of the caller's fetches some record */
	bool later;              /* some record may be copied after the call */
	uint64_t payload_bytes;  /* sum of the records of the payload */
	uint64_t staged_bytes;   /* the same, with what lies between them when they are staged */
	uint64_t expected_bytes; /* of the file, to the byte */
	struct zip_index index;  /* table and metadata */
	void *memory;            /* names, shapes and strides of the copies */
	void *metadata_memory;
	/* Of tensors only. */
	struct ioshape_tensor *tensors; /* copies: only `data` is still the caller's */
	struct zip_layout *layouts;
	struct zip_tensor_row *rows; /* of a zip */
	struct base_buffer head;     /* data.pkl, or the header of a safetensors file */
};

/*
 * Checks everything and copies it: afterwards only the payload's bytes are still the caller's, and
 * the path. -EINVAL, -EEXIST or IOSHAPE_E_LIMIT for bad arguments.
 */
int save_plan_make(struct save_plan *plan, const char *path, const struct save_payload *payload,
		   const struct ioshape_metadata *metadata, struct base_error *error);
void save_plan_free(struct save_plan *plan);

/*
 * Copies bytes [offset, offset + bytes) of a record from the caller's memory, packed if need be, or
 * has them fetched: only that can fail.
 */
int save_plan_copy(const struct save_plan *plan, size_t record, uint64_t offset, void *into,
		   size_t bytes, struct base_error *error);

/*
 * Checks metadata given by a caller (NULL: none) and copies it, with all it points to, into one
 * piece of memory to be freed with free().
 */
int save_take_metadata(struct ioshape_metadata *into, void **memory,
		       const struct ioshape_metadata *from, struct base_error *error);

#endif
