/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Named tensors become one durable safetensors file, as the original library would write it.
 */
#ifndef IOSHAPE_SAFETENSORS_H
#define IOSHAPE_SAFETENSORS_H

#include <ioshape/tensors.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Saves tensors to a safetensors file.
 *
 * All that ioshape_save_tensors() says holds here, too: the file is durable and appears whole or
 * not at all, by a save that blocks or one in the background.
 *
 * The file is the one that the original library makes of the same tensors, to the byte: large
 * elements before small ones, then by name. Tensors with strides are packed row-major.
 *
 * The attributes of options->metadata become the file's "__metadata__", in their order; without
 * options->metadata there is none.
 *
 * The file holds no checksums. With options->checksums there are some beside it.
 *
 * Refused with -EINVAL: the dtypes IOSHAPE_COMPLEX32 and IOSHAPE_COMPLEX128, which the format does
 * not have; a tensor called "__metadata__"; metadata with a step or a blob. IOSHAPE_E_LIMIT: the
 * header would have more than 32 MiB, the most that the Python package reads.
 *
 * @param context  an open context
 * @param path     the file to make or to replace
 * @param tensors  `count` tensors with different names
 * @param count    number of tensors; 0 is fine
 * @param options  NULL for all defaults
 * @param out      NULL to wait; otherwise receives the save, to be freed with ioshape_save_free(),
 *                 or NULL if the call fails
 * @return 0 or a negative code
 */
int ioshape_save_safetensors(struct ioshape_context *context, const char *path,
			     const struct ioshape_tensor *tensors, size_t count,
			     const struct ioshape_save_options *options, struct ioshape_save **out);

#ifdef __cplusplus
}
#endif

#endif
