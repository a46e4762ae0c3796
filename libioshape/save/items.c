/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints that consist of many archives, such as those of torch.distributed.checkpoint: the
 * tensors that one process saves to them or loads from them, judged together as those of a file. */
#include "save/file.h"

#include <stdlib.h>
#include <string.h>

struct save_items {
	pthread_mutex_t lock; /* protects what save_items_add() changes */
	struct save_compare compare;
	/* The tensors of all archives, as a file has them. */
	struct save_plan plan;
	struct format_entry *entries;
	size_t space; /* number of tensors for which there is memory */
};

int save_items_make(struct ioshape_context *context, const char *path, struct save_items **out)
{
	struct base_error error = { 0 };
	struct save_items *items = NULL;
	char *absolute;
	int ret;

	if (!out)
		return base_null_argument("save");
	ret = save_enter(context, &error);
	if (!ret)
		ret = save_absolute_path(path, &absolute, &error);
	if (!ret) {
		items = calloc(1, sizeof(*items));
		if (!items) {
			free(absolute);
			ret = base_no_memory(&error, "statistics", sizeof(*items));
		}
	}
	*out = items;
	if (ret)
		return base_return(ret, "save", path, &error);
	pthread_mutex_init(&items->lock, NULL);
	items->compare.context = context;
	items->compare.path = absolute;
	items->compare.shared = true;
	items->plan.index.has_statistics = items->plan.index.has_table = true;
	return 0;
}

void save_items_free(struct save_items *items)
{
	if (!items)
		return;
	for (size_t i = 0; i < items->plan.count; i++)
		free((void *)(uintptr_t)items->plan.records[i].name);
	save_plan_free(&items->plan);
	free((void *)(uintptr_t)items->compare.path);
	free(items->entries);
	pthread_mutex_destroy(&items->lock);
	free(items);
}

/* Makes memory for one more tensor. */
static int grow(struct save_items *items, struct base_error *error)
{
	struct save_plan *plan = &items->plan;
	const size_t space = MAX(64, 2 * items->space);
	void *records, *rows, *examined, *entries;

	if (plan->count < items->space)
		return 0;
	records = reallocarray(plan->records, space, sizeof(*plan->records));
	plan->records = records ? records : plan->records;
	rows = reallocarray(plan->rows, space, sizeof(*plan->rows));
	plan->rows = rows ? rows : plan->rows;
	examined = reallocarray(plan->examined, space, sizeof(*plan->examined));
	plan->examined = examined ? examined : plan->examined;
	entries = reallocarray(items->entries, space, sizeof(*items->entries));
	items->entries = entries ? entries : items->entries;
	if (!records || !rows || !examined || !entries)
		return base_no_memory(error, "statistics", space * sizeof(*plan->examined));
	items->space = space;
	plan->index.tensors = plan->rows;
	plan->index.examined = plan->examined;
	return 0;
}

/* Adds a tensor, which belongs to a group. */
static int add(struct save_items *items, const char *name, uint8_t group,
	       const struct format_examined *examined, const struct format_entry *entry,
	       struct base_error *error)
{
	static char no_name[] = ""; /* the name tells a pickle from a tensor; these are tensors */
	struct save_plan *plan = &items->plan;
	const size_t at = plan->count;
	int ret = grow(items, error);
	char *copy;

	if (ret)
		return ret;
	copy = strdup(name);
	if (!copy)
		return base_no_memory(error, "names", strlen(name));
	plan->records[at] = (struct save_record){ .name = copy, .group = group };
	plan->rows[at] = (struct format_tensor_row){ .name = copy, .record = at };
	plan->examined[at] = *examined;
	items->entries[at] = (struct format_entry){
		.name = no_name,
		.bytes = entry->bytes,
		.crc32 = entry->crc32,
	};
	plan->index.tensor_count = ++plan->count;
	return 0;
}

/* ---- Saving ---------------------------------------------------------------------------------- */

int save_items_add(struct save_items *items, const char *name, const struct save_plan *archive,
		   const struct format_entry *entries, struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&items->lock);
	for (size_t i = 0; !ret && i < archive->count; i++)
		if (archive->records[i].dtype)
			ret = add(items, name, archive->records[i].group, &archive->examined[i],
				  &entries[i], error);
	pthread_mutex_unlock(&items->lock);
	return ret;
}

/* Ends a comparison, and fills in the verdict. */
static void end_compare(struct save_compare *compare, bool saved, struct save_verdict *verdict)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	save_compare_end(compare, saved, &report);
	verdict->alarms = compare->alarms;
	memcpy(verdict->alarm, compare->alarm, sizeof(verdict->alarm));
	verdict->standstill = compare->standstill;
}

int save_items_judge(struct save_items *items, struct save_verdict *verdict)
{
	struct base_error error = { 0 };
	int ret;

	ret = save_enter(items->compare.context, &error);
	if (!ret && items->plan.count)
		ret = save_examine(&items->compare, &items->plan, items->entries, &error);
	end_compare(&items->compare, !ret, verdict);
	return base_return(ret, "save", items->compare.path, &error);
}

const char *save_items_alarm(const struct save_items *items, uint64_t *next, uint32_t *alarms)
{
	while (*next < items->plan.count) {
		const uint64_t i = (*next)++;

		*alarms = items->plan.examined[i].alarms;
		if (*alarms)
			return items->plan.records[i].name;
	}
	return NULL;
}

int save_items_judge_standstill(struct ioshape_context *context, const char *path,
				const struct save_standstill *standstill,
				struct save_verdict *verdict)
{
	struct save_compare compare = { .context = context, .path = path };
	struct base_error error = { 0 };
	int ret;

	ret = save_enter(context, &error);
	if (!ret) {
		ret = save_examine_standstill(&compare, standstill, &error);
		end_compare(&compare, false, verdict);
	}
	return base_return(ret, "save", path, &error);
}

/* ---- Loading --------------------------------------------------------------------------------- */

int save_items_add_loaded(struct save_items *items, const struct ioshape_reader *reader,
			  const char *name, uint32_t alarms)
{
	const struct format_reader *zip = save_reader_zip(reader);
	struct base_error error = { 0 };
	int ret = 0;

	if (!zip->has_index || !zip->index.has_statistics)
		return 0;
	for (uint64_t i = 0; !ret && i < zip->index.records; i++) {
		struct format_examined examined = zip->index.examined[i];

		examined.alarms |= alarms;
		if (examined.statistics.dtype)
			ret = add(items, name, 0, &examined, &zip->directory.entries[i], &error);
	}
	return base_return(ret, "load", zip->input.path, &error);
}

void save_items_loaded(struct save_items *items, uint32_t alarms)
{
	items->plan.index.alarms = alarms;
	save_compare_loaded(items->compare.context, items->compare.path, items->entries,
			    items->plan.count, &items->plan.index, true);
}
