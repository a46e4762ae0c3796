/* SPDX-License-Identifier: Apache-2.0 */
/* Records that somebody else has made, to be saved in one call. */
#include "ckpt/plan.h"

#include <errno.h>
#include <string.h>

static int check_record(const struct ioshape_record *record, const char *path,
			struct base_error *error)
{
	int ret = zip_check_record(record->name, record->alignment, path, error);

	if (ret)
		return ret;
	if (record->reserved)
		return base_fail(error, -EINVAL,
				 "record \"%s\" for %s sets its reserved field; zero the struct "
				 "before filling it in",
				 ZIP_SHOWN(record->name), path);
	if (record->data && record->fetch)
		return base_fail(error, -EINVAL,
				 "record \"%s\" for %s has both data and a function to fetch it; "
				 "give one",
				 ZIP_SHOWN(record->name), path);
	if (record->bytes == IOSHAPE_UNKNOWN_BYTES)
		return base_fail(error, -EINVAL,
				 "record \"%s\" for %s must have a known size; use a writer for "
				 "what has none",
				 ZIP_SHOWN(record->name), path);
	if (record->bytes && !record->data && !record->fetch)
		return base_fail(error, -EINVAL, "record \"%s\" for %s has %llu bytes but no data",
				 ZIP_SHOWN(record->name), path, (unsigned long long)record->bytes);
	return 0;
}

static const char *name_of(const struct ckpt_payload *payload, size_t i)
{
	return payload->records[i].name;
}

int ckpt_plan_records(struct ckpt_plan *plan, const struct ckpt_payload *payload,
		      struct base_error *error)
{
	struct ckpt_arena arena;
	size_t copy_bytes = 0;
	int ret = 0;

	for (size_t i = 0; !ret && i < payload->count; i++) {
		const struct ioshape_record *record = &payload->records[i];

		ret = check_record(record, plan->path, error);
		if (!ret)
			ret = ckpt_count_copy(&copy_bytes, ckpt_room_for(strlen(record->name) + 1),
					      "names of the records", error);
	}
	/* As from a writer of records. */
	if (!ret)
		ret = ckpt_check_unique(plan, payload, name_of, -EEXIST, error);
	if (!ret)
		ret = ckpt_plan_room(plan, payload->count, copy_bytes, &arena, error);
	for (size_t i = 0; !ret && i < payload->count; i++) {
		const struct ioshape_record *from = &payload->records[i];

		plan->records[i] = (struct ckpt_record){
			.name = ckpt_hand_out(&arena, from->name, strlen(from->name) + 1),
			.bytes = from->bytes,
			.alignment = from->alignment,
			.data = from->data,
			.fetch = from->fetch,
			.fetch_user = from->fetch_user,
		};
		plan->fetches |= from->fetch && from->bytes;
	}
	return ret;
}
