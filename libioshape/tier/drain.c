/* SPDX-License-Identifier: Apache-2.0 */
/* From the journal to the destinations: one copy after the other, by one process at a time. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct drain {
	struct ioshape_tier *tier;
	struct ioshape_drain_options options;
	char *only; /* the place of a copy; NULL: all */
	struct tier_journal journal;
	uint64_t number;         /* of the last entry that this drain is done with */
	struct base_error first; /* of the failures: those entries wait for the next drain */
};

/* ---- Which ----------------------------------------------------------------------------------- */

/* The next one that waits; NULL: none does. */
static const struct tier_entry *next_waiting(const struct drain *drain)
{
	for (size_t i = 0; i < drain->journal.count; i++) {
		const struct tier_entry *entry = &drain->journal.all[i];

		if (!entry->drained && entry->number > drain->number &&
		    (!drain->only || !strcmp(drain->only, entry->place)))
			return entry;
	}
	return NULL;
}

/* The last one before it that was drained to the same path. */
static const struct tier_entry *drained_before(const struct tier_journal *journal,
					       const struct tier_entry *entry)
{
	for (const struct tier_entry *old = entry; old-- > journal->all;) {
		if (old->drained && !strcmp(old->place, entry->place))
			return old;
	}
	return NULL;
}

/* ---- What becomes of it ---------------------------------------------------------------------- */

static bool are_neighbours(const char *path, const char *other)
{
	const size_t bytes = (size_t)(strrchr(path, '/') - path);

	return (size_t)(strrchr(other, '/') - other) == bytes && !strncmp(path, other, bytes);
}

/* Of the drained copies in its directory the newest stay. What fails here is tried again. */
static void trim(const struct ioshape_tier *tier, const char *path)
{
	struct tier_journal journal;
	struct base_error error = { 0 };
	uint32_t kept = 0;
	uint64_t bytes;

	if (!tier->options.keep_last || tier_journal_read(tier, &journal, &error))
		return;
	for (size_t i = journal.count; i; i--) {
		const struct tier_entry *entry = &journal.all[i - 1];

		if (entry->drained && tier_is_newest(&journal, entry) &&
		    are_neighbours(entry->path, path) && kept++ >= tier->options.keep_last)
			tier_discard(tier, entry, &bytes, &error);
	}
	if (error.code)
		base_log(save_log(tier->context), IOSHAPE_LOG_WARNING, "%s", error.text);
	tier_journal_free(&journal);
}

/* It does not wait any more: `now` is what it is instead; NULL: nothing. */
static int settle(const struct drain *drain, const struct tier_entry *entry,
		  const struct tier_entry *now, struct base_error *error)
{
	const struct ioshape_tier *tier = drain->tier;
	struct io_hold hold = IO_NO_HOLD;
	int ret = tier_lock(tier, &hold, error);

	if (!ret)
		ret = tier_journal_change(tier, entry, now, error);
	/* Other entries that say that its path is drained tell of copies that are not there. */
	for (size_t i = 0; !ret && now && i < drain->journal.count; i++) {
		const struct tier_entry *other = &drain->journal.all[i];

		if (other->drained && other->number != entry->number &&
		    !strcmp(other->place, entry->place))
			ret = tier_journal_change(tier, other, NULL, error);
	}
	if (!ret && now)
		trim(tier, entry->path);
	io_folder_let_go(&hold);
	return ret;
}

/* Of generations so many stay at the destination, too. What fails here is tried with the next. */
static void prune(const struct tier_carry *carry)
{
	struct ioshape_context *context = carry->tier->context;
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	const struct tier_entry *entry = carry->entry;
	struct base_error error = { 0 };
	char *directory;

	options.keep_last = entry->keep_last;
	options.keep_every = entry->keep_every;
	if (!options.keep_last || carry->result != IOSHAPE_DRAINED ||
	    group_parse_name(strrchr(entry->path, '/') + 1).kind != GROUP_NAME_STEP)
		return;
	directory = base_directory_of(entry->path);
	if (directory && group_prune(context, directory, NULL, &options, NULL, &error))
		base_log(save_log(context), IOSHAPE_LOG_WARNING, "%s", error.text);
	free(directory);
}

static int settle_carried(const struct drain *drain, const struct tier_carry *carry,
			  struct base_error *error)
{
	const struct tier_entry *entry = carry->entry;
	struct tier_entry now = *entry;

	/* Of what is older than its destination the time there says so. */
	now.drained = true;
	now.copy_ns = carry->copy.modified_ns;
	now.there_ns = carry->there_ns;
	return settle(drain, entry, carry->result == IOSHAPE_DRAINED_GONE ? NULL : &now, error);
}

static void tell(const struct drain *drain, const struct tier_entry *entry,
		 enum ioshape_drained result, uint64_t bytes, const struct base_error *why)
{
	if (result == IOSHAPE_DRAINED_FAILED) {
		base_leave(why->code, "drain", entry->path, why);
		base_log(save_log(drain->tier->context), IOSHAPE_LOG_WARNING,
			 "\"%s\" was not drained: %s", entry->path, why->text);
	} else if (result != IOSHAPE_DRAINED) {
		base_log(save_log(drain->tier->context), IOSHAPE_LOG_INFO,
			 "\"%s\" is not drained: %s", entry->path,
			 result == IOSHAPE_DRAINED_WAITS     ? why->text :
			 result == IOSHAPE_DRAINED_OVERTAKEN ? "a later save goes instead" :
			 result == IOSHAPE_DRAINED_NEWER     ? "there is a newer one" :
							       "it was removed from the tier");
	}
	if (drain->options.ended)
		drain->options.ended(drain->options.ended_user, entry->path, result, bytes);
}

/* That a copy waits for others is no failure, if there is another one. */
static void note_failure(struct drain *drain, const struct base_error *why)
{
	if (!drain->first.code || drain->first.code == -EAGAIN)
		drain->first = *why;
}

/* -ECANCELED ends the drain; what else fails is told, and stays. */
static int drain_one(struct drain *drain, const struct tier_entry *entry, struct base_error *error)
{
	struct base_error why = { 0 };
	struct tier_carry carry = {
		.tier = drain->tier,
		.options = &drain->options,
		.entry = entry,
		.before = drained_before(&drain->journal, entry),
		.result = IOSHAPE_DRAINED_OVERTAKEN,
	};
	int ret;

	if (!tier_is_newest(&drain->journal, entry)) {
		ret = settle(drain, entry, NULL, &why);
	} else {
		ret = tier_carry(&carry, &why);
		if (!ret && carry.result != IOSHAPE_DRAINED_WAITS)
			ret = settle_carried(drain, &carry, &why);
		if (!ret)
			prune(&carry);
	}
	/* It was changed meanwhile: tried again. */
	if (ret == -EAGAIN && !why.code)
		return 0;
	if (ret == -ECANCELED)
		return base_pass_on(error, &why);
	if (ret)
		carry.result = IOSHAPE_DRAINED_FAILED;
	if (why.code)
		note_failure(drain, &why);
	drain->number = entry->number;
	tell(drain, entry, carry.result, carry.result == IOSHAPE_DRAINED ? carry.bytes : 0, &why);
	return 0;
}

/* ---- All of them ----------------------------------------------------------------------------- */

/* Until nothing waits that has not failed: others save meanwhile. */
static int drain_all(struct drain *drain, struct base_error *error)
{
	const struct tier_entry *entry = NULL;
	int ret;

	do {
		ret = tier_journal_read(drain->tier, &drain->journal, error);
		if (ret)
			return ret;
		entry = next_waiting(drain);
		if (entry)
			ret = drain_one(drain, entry, error);
		tier_journal_free(&drain->journal);
	} while (!ret && entry);
	if (!ret && drain->first.code)
		ret = base_pass_on(error, &drain->first);
	return ret;
}

/* ---- The lock -------------------------------------------------------------------------------- */

#define REST_NS 100000000 /* between two tries, and calls of the progress function */

static int wait_for_lock(const struct drain *drain, struct io_hold *hold, struct base_error *error)
{
	const struct ioshape_drain_options *options = &drain->options;
	const struct timespec pause = { .tv_nsec = REST_NS };
	int ret;

	while ((ret = tier_lock_drain(drain->tier, hold, error)) == -EBUSY) {
		if (options->progress &&
		    options->progress(options->progress_user, IOSHAPE_PHASE_WAIT, 0, 0))
			return base_refuse(error, -ECANCELED, "draining \"%s\" was stopped",
					   drain->tier->root.path);
		nanosleep(&pause, NULL);
	}
	return ret;
}

static int run(struct drain *drain, struct base_error *error)
{
	struct io_hold hold = IO_NO_HOLD;
	int ret;

	ret = wait_for_lock(drain, &hold, error);
	if (!ret)
		ret = drain_all(drain, error);
	io_folder_let_go(&hold);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_drain(struct ioshape_tier *tier,
				      const struct ioshape_drain_options *given)
{
	struct drain drain = { .tier = tier };
	struct base_error error = { 0 };
	int ret;

	if (!tier)
		return base_missing("drain");
	ret = save_enter(tier->context, &error);
	if (!ret)
		ret = base_take_options(&drain.options, sizeof(drain.options), given,
					"ioshape_drain_options", &error);
	if (!ret && drain.options.path)
		ret = tier_enter(tier, drain.options.path, &drain.only, &error);
	if (!ret)
		ret = run(&drain, &error);
	free(drain.only);
	return base_leave(ret, "drain", tier->root.path, &error);
}
