/* SPDX-License-Identifier: Apache-2.0 */
/* What a context is told about slots: its options, variables, defaults. */
#include "ckpt/slot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_LEASE_MS 15000u
#define DEFAULT_STALL_MS 120000u
#define DEFAULT_STAGGER_MOST_MS 120000u
#define LONGEST_STAGGER_MS (24u * 3600 * 1000)

static void env_text(const char *variable, const char **value)
{
	const char *text = getenv(variable);

	if ((!*value || !**value) && text && *text)
		*value = text;
}

int ckpt_slots_environment(struct ioshape_context_options *options, struct base_error *error)
{
	static const char *const aways[] = { "stagger", "wait", "fail", NULL };
	int away = options->away, ret = 0;

	env_text("IOSHAPE_COORDINATOR", &options->coordinator);
	env_text("IOSHAPE_PASSWORD_FILE", &options->password_file);
	env_text("IOSHAPE_POOL", &options->pool);
	env_text("IOSHAPE_JOB", &options->job);
	if (!away)
		ret = base_env_choice("IOSHAPE_AWAY", aways, &away, error);
	if (!ret && !options->share)
		ret = base_env_count("IOSHAPE_SHARE", &options->share, error);
	if (!ret && !options->slots)
		ret = base_env_count("IOSHAPE_SLOTS", &options->slots, error);
	if (!ret && !options->lease_ms)
		ret = base_env_count("IOSHAPE_LEASE_MS", &options->lease_ms, error);
	if (!ret && !options->stall_ms)
		ret = base_env_count("IOSHAPE_STALL_MS", &options->stall_ms, error);
	if (!ret && !options->stagger_most_ms)
		ret = base_env_count("IOSHAPE_STAGGER_MOST_MS", &options->stagger_most_ms, error);
	if (!ret && !options->rate)
		ret = base_env_bytes("IOSHAPE_RATE", &options->rate, error);
	options->away = (enum ioshape_away)away;
	return ret;
}

void ckpt_slots_defaults(struct ioshape_context_options *options)
{
	if (!options->coordinator || !*options->coordinator)
		options->coordinator = "local";
	if (!options->lease_ms)
		options->lease_ms = DEFAULT_LEASE_MS;
	if (!options->stall_ms)
		options->stall_ms = DEFAULT_STALL_MS;
	if (!options->stagger_most_ms)
		options->stagger_most_ms = DEFAULT_STAGGER_MOST_MS;
}

int ckpt_check_pool_name(const char *name, struct base_error *error)
{
	size_t bytes = strlen(name);

	if (!bytes)
		return base_fail(error, -EINVAL, "the pool's name is empty; give one, or none");
	if (bytes >= SLOTS_NAME_BYTES)
		return base_fail(error, -EINVAL, "the pool's name has %zu characters; it takes %d",
				 bytes, SLOTS_NAME_BYTES - 1);
	/* Not repeated: who mistakes one for the other gives an address, with its password. */
	if (strspn(name, FS_POOL_CHARACTERS) != bytes)
		return base_fail(error, -EINVAL,
				 "the pool's name has a character that none can have; it takes "
				 "letters, digits and ._:@+/-");
	return 0;
}

int ckpt_slots_check(const struct ioshape_context_options *options, struct base_error *error)
{
	if ((unsigned)options->away > IOSHAPE_AWAY_FAIL)
		return base_fail(error, -EINVAL,
				 "the context option away is %d, which its enum does not have",
				 (int)options->away);
	if (options->share > 1000)
		return base_fail(error, -EINVAL, "share is %u; it takes 1 to 1000", options->share);
	if (options->slots > SLOTS_MOST_CAPACITY)
		return base_fail(error, -EINVAL, "slots is %u; it takes 1 to %u", options->slots,
				 SLOTS_MOST_CAPACITY);
	if (options->lease_ms < 300 || options->lease_ms > 600000)
		return base_fail(error, -EINVAL, "lease_ms is %u; it takes 300 to 600000",
				 options->lease_ms);
	if (options->stall_ms < options->lease_ms)
		return base_fail(error, -EINVAL,
				 "stall_ms is %u; it takes no less than lease_ms, %u",
				 options->stall_ms, options->lease_ms);
	if (options->stagger_most_ms > LONGEST_STAGGER_MS)
		return base_fail(error, -EINVAL,
				 "stagger_most_ms is %u; it takes at most %u, a day",
				 options->stagger_most_ms, LONGEST_STAGGER_MS);
	return options->pool && *options->pool ? ckpt_check_pool_name(options->pool, error) : 0;
}
