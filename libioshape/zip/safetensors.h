/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other container: a safetensors file. It is the length of its header, the header, which is
 * JSON, and the tensors one behind the other, packed row-major. Pure: tensors in, bytes out.
 */
#ifndef ZIP_SAFETENSORS_H
#define ZIP_SAFETENSORS_H

#include "base/base.h"

#include <ioshape/ioshape.h>

/* The Python package reads no longer header: see _safetensors/header.py. */
#define ZIP_SAFETENSORS_MAX_HEADER_BYTES (32 * MIB)

/*
 * Whether the format can hold the tensor, which zip_layout_row_major() has checked. -EINVAL with a
 * sentence.
 */
int zip_safetensors_check(const struct ioshape_tensor *tensor, struct base_error *error);

/* Below, at or above 0, as one tensor lies before the other in the file. */
int zip_safetensors_compare(const struct ioshape_tensor *one, const struct ioshape_tensor *other);

/*
 * Appends what comes before the first tensor's bytes. The tensors are checked and in order. Of the
 * metadata, which may be NULL, only attributes can be written. -EINVAL or IOSHAPE_E_LIMIT with a
 * sentence; -ENOMEM.
 */
int zip_safetensors_header(struct base_buffer *out, const struct ioshape_tensor *tensors,
			   size_t count, const struct ioshape_metadata *metadata,
			   struct base_error *error);

#endif
