/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls by which ranks save together. */
#define _GNU_SOURCE
#include "group/save/part.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Ranks that another one writes for stage where that one can map it. */
static bool shares_memory(const struct ioshape_group *group)
{
	const uint32_t rank = group->options.rank;

	return group->options.mode != IOSHAPE_MODE_EACH &&
	       group_writer_of(group, IOSHAPE_MODE_NODE, rank) != rank;
}

/* The share on its own, and the path that messages call the save by. Both are to be freed. */
static int make_share(const struct group_share *share, struct group_share **made, char **path,
		      struct base_error *error)
{
	char name[GROUP_STEP_NAME_BYTES];

	group_step_name(name, share->step);
	*made = malloc(sizeof(**made));
	if (*made && asprintf(path, "%s/%s", share->group->directory, name) >= 0) {
		**made = *share;
		return 0;
	}
	free(*made);
	return base_no_memory(error, "a save", sizeof(**made));
}

/* The share belongs to the save, whatever becomes of it. */
static int begin_share(struct group_share *share, const char *path,
		       const struct save_payload *payload,
		       const struct ioshape_save_options *options, bool blocks,
		       struct ioshape_save **out, struct base_error *error)
{
	struct ioshape_group *group = share->group;
	const struct save_collective collective = {
		.ops = &group_save_ops,
		.user = share,
		.owner = group,
		.shared_memory = shares_memory(group),
		.blocks = blocks,
	};

	pthread_mutex_lock(&group->lock);
	group->running++;
	pthread_mutex_unlock(&group->lock);
	return save_begin(group->context, path, payload, options, &collective, out, error);
}

/*
 * Options are checked only when the save has its number: whatever becomes of it, this rank has had
 * its round, and the others are told.
 */
static int begin(struct ioshape_group *group, uint64_t step, const struct save_payload *payload,
		 const struct ioshape_save_options *options, int checked, bool blocks,
		 struct ioshape_save **out, struct base_error *error)
{
	struct group_share share = { group, step, 0 }, *made;
	char *path = NULL;
	int ret = checked;

	/* Memory is given out in the order of rounds: an earlier one never waits for a later one's.
	 */
	pthread_mutex_lock(&group->beginning);
	share.round = group_round_reserve(group);
	if (!ret)
		ret = make_share(&share, &made, &path, error);
	if (ret)
		group_give_up(&share, error, NULL);
	else
		ret = begin_share(made, path, payload, options, blocks, out, error);
	pthread_mutex_unlock(&group->beginning);
	free(path);
	return ret;
}

/* Waits for a save that was begun, and fills the report that its caller asked for. */
static int end(struct ioshape_save *save, struct ioshape_report *report, struct base_error *error)
{
	int ret = ioshape_save_wait(save, -1);

	if (report)
		ioshape_save_get_report(save, report);
	if (ret)
		base_pass_on(error, base_last_error());
	ioshape_save_free(save);
	return ret;
}

/* In the background if `out` is given. */
static int save(struct ioshape_group *group, uint64_t step, const struct save_payload *payload,
		const struct ioshape_save_options *given, struct ioshape_save **out)
{
	struct ioshape_report ignored = IOSHAPE_REPORT_INIT, *report;
	struct ioshape_save_options options;
	struct ioshape_save *save = NULL;
	struct base_error error = { 0 };
	int ret;

	if (out)
		*out = NULL;
	if (!group)
		return base_missing("save");
	ret = save_enter(group->context, &error);
	if (ret)
		return base_leave(ret, "save", group->directory, &error);
	ret = save_take_options(&options, given, payload->kind, out != NULL, &error);
	report = ret ? NULL : options.report;
	if (!ret && step == IOSHAPE_LATEST)
		ret = base_fail(&error, -EINVAL, "no generation can have the number %llu",
				(unsigned long long)step);
	if (!ret && report)
		ret = base_give_struct(report, &ignored, sizeof(ignored), "ioshape_report", &error);
	options.borrow = options.borrow || !out;
	ret = begin(group, step, payload, &options, ret, !out, &save, &error);
	if (out)
		*out = save;
	else if (!ret)
		ret = end(save, report, &error);
	return base_leave(ret, "save", group->directory, &error);
}

IOSHAPE_EXPORT int ioshape_group_save_tensors(struct ioshape_group *group, uint64_t step,
					      const struct ioshape_tensor *tensors, size_t count,
					      const struct ioshape_save_options *options,
					      struct ioshape_save **out)
{
	const struct save_payload payload = { .tensors = tensors, .count = count };

	return save(group, step, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_group_save_records(struct ioshape_group *group, uint64_t step,
					      const struct ioshape_record *records, size_t count,
					      const struct ioshape_save_options *options,
					      struct ioshape_save **out)
{
	const struct save_payload payload = { .kind = SAVE_RECORDS,
					      .records = records,
					      .count = count };

	return save(group, step, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why)
{
	struct base_error error = { 0 }, given = { 0 };
	struct group_share share;
	int ret;

	if (!group)
		return base_missing("fail");
	ret = save_enter(group->context, &error);
	if (ret)
		return base_leave(ret, "fail", group->directory, &error);
	share = (struct group_share){ group, step, group_round_reserve(group) };
	base_refuse(&given, -ECANCELED, "%s", why && *why ? why : "it has nothing to save");
	ret = group_give_up(&share, &given, &error);
	return base_leave(ret, "fail", group->directory, &error);
}
