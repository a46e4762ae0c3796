/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls by which ranks save together. */
#define _GNU_SOURCE
#include "ckpt/generation.h"
#include "ckpt/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/*
 * Options are checked only when the save has its number: whatever becomes of it, this rank has had
 * its round, and the others are told.
 */
static int begin(struct ioshape_group *group, uint64_t step, const struct ckpt_payload *payload,
		 const struct ioshape_save_options *options, int checked, struct ioshape_save **out,
		 struct base_error *error)
{
	struct ckpt_group_share share = { group, step, ckpt_round_reserve(group) };
	char name[CKPT_STEP_NAME_BYTES], *path = NULL;
	int ret = checked;

	ckpt_step_name(name, step);
	if (!ret && asprintf(&path, "%s/%s", group->directory, name) < 0) {
		path = NULL;
		ret = base_no_memory(error, "a path", sizeof(name));
	}
	if (ret) {
		ckpt_group_give_up(&share, error, NULL);
		return ret;
	}
	ret = ckpt_begin_save(group->context, path, payload, options, &share, out, error);
	free(path);
	return ret;
}

static int save_async(struct ioshape_group *group, uint64_t step,
		      const struct ckpt_payload *payload, const struct ioshape_save_options *given,
		      struct ioshape_save **out)
{
	struct ioshape_save_options options;
	struct base_error error = { 0 };
	int ret;

	if (!group || !out)
		return -EINVAL;
	*out = NULL;
	ret = ckpt_enter(group->context, &error);
	if (ret)
		return ckpt_leave(group->context, ret, &error);
	ret = base_take_options(&options, sizeof(options), given, "ioshape_save_options", &error);
	if (!ret && options.report)
		ret = base_fail(&error, -EINVAL,
				"an asynchronous save cannot fill options.report; ask "
				"ioshape_save_report() when it is done");
	ret = begin(group, step, payload, &options, ret, out, &error);
	return ckpt_leave(group->context, ret, &error);
}

static int save(struct ioshape_group *group, uint64_t step, const struct ckpt_payload *payload,
		const struct ioshape_save_options *given)
{
	struct ioshape_report ignored = IOSHAPE_REPORT_INIT, *report;
	struct ioshape_save_options options;
	struct ioshape_save *save = NULL;
	struct base_error error = { 0 };
	int ret;

	if (!group)
		return -EINVAL;
	ret = ckpt_enter(group->context, &error);
	if (ret)
		return ckpt_leave(group->context, ret, &error);
	ret = base_take_options(&options, sizeof(options), given, "ioshape_save_options", &error);
	report = ret ? NULL : options.report;
	options.report = NULL;
	options.borrow = 1;
	if (!ret && report)
		ret = base_give_struct(report, &ignored, sizeof(ignored), "ioshape_report", &error);
	ret = begin(group, step, payload, &options, ret, &save, &error);
	if (!ret) {
		ret = ioshape_save_wait(save, -1);
		if (report)
			ioshape_save_report(save, report);
		if (ret)
			base_fail_as_told(&error, ret, "%s", ioshape_save_message(save));
		ioshape_save_free(save);
	}
	return ckpt_leave(group->context, ret, &error);
}

IOSHAPE_EXPORT int ioshape_group_save_tensors(struct ioshape_group *group, uint64_t step,
					      const struct ioshape_tensor *tensors, size_t count,
					      const struct ioshape_save_options *options)
{
	const struct ckpt_payload payload = { .tensors = tensors, .count = count };

	return save(group, step, &payload, options);
}

IOSHAPE_EXPORT int ioshape_group_save_records(struct ioshape_group *group, uint64_t step,
					      const struct ioshape_record *records, size_t count,
					      const struct ioshape_save_options *options)
{
	const struct ckpt_payload payload = { .raw = true, .records = records, .count = count };

	return save(group, step, &payload, options);
}

IOSHAPE_EXPORT int ioshape_group_save_tensors_async(struct ioshape_group *group, uint64_t step,
						    const struct ioshape_tensor *tensors,
						    size_t count,
						    const struct ioshape_save_options *options,
						    struct ioshape_save **out)
{
	const struct ckpt_payload payload = { .tensors = tensors, .count = count };

	return save_async(group, step, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_group_save_records_async(struct ioshape_group *group, uint64_t step,
						    const struct ioshape_record *records,
						    size_t count,
						    const struct ioshape_save_options *options,
						    struct ioshape_save **out)
{
	const struct ckpt_payload payload = { .raw = true, .records = records, .count = count };

	return save_async(group, step, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why)
{
	struct base_error error = { 0 }, given = { 0 };
	struct ckpt_group_share share;
	int ret;

	if (!group)
		return -EINVAL;
	ret = ckpt_enter(group->context, &error);
	if (ret)
		return ckpt_leave(group->context, ret, &error);
	share = (struct ckpt_group_share){ group, step, ckpt_round_reserve(group) };
	base_fail_as_told(&given, -ECANCELED, "%s", why && *why ? why : "it has nothing to save");
	ret = ckpt_group_give_up(&share, &given, &error);
	return ckpt_leave(group->context, ret, &error);
}
