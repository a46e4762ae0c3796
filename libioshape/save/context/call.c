/* SPDX-License-Identifier: Apache-2.0 */
/* What every call on a context begins with, and what others may see of a context. */
#include "save/context/context.h"

#include <errno.h>
#include <stdio.h>

int save_enter(const struct ioshape_context *context, struct base_error *error)
{
	if (!context)
		return base_refuse(error, -EINVAL,
				   "no context was given" BASE_REMEDY "open one first");
	if (context->owner != base_pid())
		return base_refuse(error, -EPERM,
				   "this context belongs to the parent process" BASE_REMEDY
				   "open one after the fork");
	return 0;
}

int save_enter_path(const struct ioshape_context *context, const char *path, void *options,
		    size_t options_bytes, const void *given, const char *what,
		    struct base_error *error)
{
	int ret = save_enter(context, error);

	if (!ret)
		ret = base_take_options(options, options_bytes, given, what, error);
	if (!ret && !path)
		ret = base_refuse(error, -EINVAL, "no path was given");
	return ret;
}

/* ---- What it was opened with ----------------------------------------------------------------- */

const struct base_log *save_log(const struct ioshape_context *context)
{
	return &context->log;
}

const struct ring_config *save_config(const struct ioshape_context *context)
{
	return &context->config;
}

const struct slots_config *save_slots_config(const struct ioshape_context *context)
{
	return &context->slots.config;
}

const char *save_pool_name(const struct ioshape_context *context)
{
	return context->slots.pool_name;
}
