/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a path sits on, and what a save would do there. "ioshape doctor" is made of it.
 */
#ifndef IOSHAPE_PROBE_H
#define IOSHAPE_PROBE_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What to look for. */
struct ioshape_probe_options {
	size_t size;       /**< sizeof(struct ioshape_probe_options) */
	uint64_t bytes;    /**< of a file that is to be saved; 0: 4 GiB */
	uint32_t files;    /**< that are written at the same time; 0: not known */
	uint32_t reserved; /**< 0 */
};

#define IOSHAPE_PROBE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_probe_options)

/**
 * Tells what a path sits on, and what a save would do there and why.
 *
 * The answer is an object of JSON, which is no part of the stable interface: members may be added
 * and, between minor versions, change. The members are the attributes of `ioshape.Storage` in
 * Python, whose reference describes them; one that nothing is known about, or that does not apply,
 * may be missing. Names of files are as the filesystem has them, so the text is UTF-8 if they are.
 *
 * Nothing is written (at most, an empty file without a name is opened for a moment), and only the
 * kernel and the filesystem are asked. Any thread may call this.
 *
 * @param context  an open context
 * @param path     a directory, or a file; one that does not exist yet needs its directory
 * @param options  NULL for all defaults
 * @param out      receives the text, to be freed with ioshape_free(), or NULL
 * @return 0 or a negative code
 */
int ioshape_probe(struct ioshape_context *context, const char *path,
		  const struct ioshape_probe_options *options, char **out);
#ifdef __cplusplus
}
#endif

#endif
