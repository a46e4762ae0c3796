/* SPDX-License-Identifier: Apache-2.0 */
/* What a context is told about filesystems: its options, variables, defaults. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_FULL_WAIT_MS 600000u
#define LEAST_TARGET_BYTES (64 * KIB)

int ckpt_storage_environment(struct ioshape_context_options *options, struct base_error *error)
{
	static const char *const calibrations[] = { "auto", "off", "again", NULL };
	static const char *const fulls[] = { "fail", "wait", "skip", NULL };
	int calibrate = options->calibrate, full = options->full, ret = 0;
	const char *layout = getenv("IOSHAPE_LAYOUT");

	if ((!options->layout || !*options->layout) && layout && *layout)
		options->layout = layout;
	if (!calibrate)
		ret = base_env_choice("IOSHAPE_CALIBRATE", calibrations, &calibrate, error);
	if (!ret && !full)
		ret = base_env_choice("IOSHAPE_FULL", fulls, &full, error);
	if (!ret && !options->full_wait_ms)
		ret = base_env_count("IOSHAPE_FULL_WAIT_MS", &options->full_wait_ms, error);
	if (!ret && !options->target_bytes)
		ret = base_env_bytes("IOSHAPE_TARGET_BYTES", &options->target_bytes, error);
	options->calibrate = (enum ioshape_calibrate)calibrate;
	options->full = (enum ioshape_full)full;
	return ret;
}

void ckpt_storage_defaults(struct ioshape_context_options *options)
{
	if (!options->layout || !*options->layout)
		options->layout = "auto";
	if (!options->full_wait_ms)
		options->full_wait_ms = DEFAULT_FULL_WAIT_MS;
}

int ckpt_storage_check(const struct ioshape_context_options *options, struct fs_wish *wish,
		       struct base_error *error)
{
	if ((unsigned)options->calibrate > IOSHAPE_CALIBRATE_AGAIN ||
	    (unsigned)options->full > IOSHAPE_FULL_SKIP)
		return base_fail(error, -EINVAL,
				 "the context options calibrate and full are %d and %d, which "
				 "their enums do not have",
				 (int)options->calibrate, (int)options->full);
	if (options->target_bytes && options->target_bytes < LEAST_TARGET_BYTES)
		return base_fail(error, -EINVAL, "target_bytes is %llu; it takes 64K or more",
				 (unsigned long long)options->target_bytes);
	return fs_wish_parse(options->layout, wish, error);
}
