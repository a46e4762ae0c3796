/* SPDX-License-Identifier: Apache-2.0 */
/* Makes calls of an act fail, from each position in the code in turn. */
#define _GNU_SOURCE
#include "harm_run.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Error codes by the names of calls. The first class that lists the name applies. */
static const struct {
	const char *names; /* NULL: all other names */
	int codes[10];
} classes[] = {
	{ " fallocate64 ftruncate64 flock renameat2 linkat link ",
	  { EIO, ENOSPC, EDQUOT, ESTALE, EINTR, EINVAL, EOPNOTSUPP } },
	{ " fsync fsync-directory close-temporary renameat renameat2 linkat fallocate64 ftruncate64"
	  " mkdir mkdirat link ",
	  { EIO, ENOSPC, EDQUOT, ESTALE, ETIMEDOUT, EINTR } },
	{ " pwrite64 pwrite64-temporary pread64 read write __io_uring_get_cqe ",
	  { EIO, ENOSPC, EDQUOT, ESTALE, ETIMEDOUT, EINTR, EAGAIN, CALLS_SHORT } },
	{ " open64 openat64 opendir fopen64 dup dup3 ",
	  { EMFILE, ENFILE, EIO, EACCES, ESTALE, ETIMEDOUT, ENOMEM, ENOENT, EINTR } },
	{ " socket eventfd memfd_create accept4 ", { EMFILE, ENFILE, ENOMEM, EPERM } },
	{ " recvmsg send sendmsg sendto connect bind listen ",
	  { ECONNRESET, ETIMEDOUT, ENOBUFS, EINTR, EACCES } },
	{ " poll ", { EINTR, ENOMEM } },
	{ " io_uring_submit io_uring_submit_and_wait ", { EAGAIN, EBUSY, EINTR, ENOMEM, EPERM } },
	{ " getaddrinfo ", { EAGAIN } },
	{ NULL, { EIO, ESTALE, EPERM, ENOMEM, EINTR } },
};

static int choose_code(const char *name)
{
	char word[64];
	unsigned most = 0;
	size_t i = 0;

	if (calls_is_memory(name))
		return ENOMEM;
	snprintf(word, sizeof(word), " %s ", name);
	for (char *c = word + 1; c[1]; c++)
		*c = *c == ' ' ? '-' : *c;
	while (classes[i].names && !strstr(classes[i].names, word))
		i++;
	while (most < ARRAY_LENGTH(classes[i].codes) && classes[i].codes[most])
		most++;
	return classes[i].codes[harm_random(most)];
}

/* Bit map of return addresses of calls that were seen in any run. */
#define MOST_SITES (1u << 24)
static uint8_t seen[MOST_SITES / 8];

/* Marks the position as seen. Returns whether it was seen before. */
static bool see(uint32_t site)
{
	uint8_t *byte = &seen[site % MOST_SITES / 8];
	const uint8_t bit = (uint8_t)(1 << site % 8);
	const bool before = *byte & bit;

	*byte |= bit;
	return before;
}

/* Calls that came only because another one had failed. The last one found is tried first. */
static struct harm found[CALLS_MOST];
static unsigned found_count;

static void discover(void)
{
	const struct calls_record *record = calls_record();
	const unsigned long count = MIN(atomic_load(&record->count), CALLS_MOST);
	struct harm next = harm;

	for (unsigned long i = 0; i < count; i++) {
		const char *name = atomic_load(&record->names[i]);

		if (!name || see(record->sites[i]) || harm.also || found_count == CALLS_MOST)
			continue;
		next.also = i + 1;
		next.also_name = name;
		next.also_code = choose_code(name);
		found[found_count++] = next;
	}
}

/* Returns whether call `nth` is not the expected one. With threads the order of calls varies
 * between runs, and the chosen code may be impossible for another call. */
static bool is_other(unsigned long nth, const char *name)
{
	return name && strcmp(name, harm_name_of(nth)) != 0;
}

static void fail(struct harm one)
{
	harm = one;
	harm_run();
	if (is_other(one.nth, one.name) || is_other(one.also, one.also_name))
		return;
	harmed++;
	harm_judge();
	discover();
}

/* Makes exactly these calls fail and prints all calls, to reproduce a finding. */
void harm_once(char **numbers, int count)
{
	const struct calls_record *record = calls_record();
	struct harm one = { .mode = CALLS_FAIL };

	one.rank = (unsigned)atoi(numbers[0]);
	one.nth = (unsigned long)atol(numbers[1]);
	one.code = atoi(numbers[2]);
	if (count > 4) {
		one.also = (unsigned long)atol(numbers[3]);
		one.also_code = atoi(numbers[4]);
	}
	fail(one);
	for (unsigned long i = 0; i < MIN(atomic_load(&record->count), CALLS_MOST); i++)
		printf("call %lu %x %s %d\n", i + 1, record->sites[i], harm_name_of(i + 1),
		       record->codes[i]);
}

/* ---- Choice of calls ------------------------------------------------------------------------- */

/* The recorded calls of a run without failures, grouped by their position in the code. */
static struct {
	unsigned long calls;
	unsigned places;
	unsigned place[CALLS_MOST];
	const char *names[CALLS_MOST];
} plan;

static void make_plan(unsigned rank)
{
	const struct calls_record *record = calls_record();

	plan.calls = harm_count_calls(rank);
	for (unsigned long i = 0; i < plan.calls; i++) {
		unsigned long first = 0;

		while (record->sites[first] != record->sites[i])
			first++;
		plan.place[i] = first < i ? plan.place[first] : plan.places++;
		plan.names[i] = harm_name_of(i + 1);
		see(record->sites[i]);
	}
}

/* Chooses one of the calls from this position, which fails alone or with all later ones. */
static struct harm harm_at(unsigned rank, unsigned place)
{
	struct harm one = { .rank = rank };
	unsigned calls = 0;

	for (unsigned long i = 0; i < plan.calls; i++)
		if (plan.place[i] == place && harm_random(++calls) == 0)
			one.nth = i + 1;
	one.name = plan.names[one.nth - 1];
	one.code = choose_code(one.name);
	one.mode = !harm_passes(one.code) && harm_random(3) == 0 ? CALLS_FAIL_FROM : CALLS_FAIL;
	return one;
}

void harm_faults(uint64_t seed, unsigned count)
{
	const unsigned rank = (unsigned)(seed % harm_ranks());
	/* The positions are tried in turn, with half of the trials of each seed. Acts start at
	 * different positions, because their first calls are alike. */
	uint64_t next = base_hash_text(act->name) + seed / harm_ranks() * ((count + 1) / 2);

	make_plan(rank);
	while (harmed < count)
		fail(harmed % 2 && found_count ? found[--found_count] :
						 harm_at(rank, (unsigned)(next++ % plan.places)));
}

void harm_memory(void)
{
	make_plan(0);
	for (unsigned long i = 0; i < plan.calls; i++) {
		struct harm one = { .nth = i + 1, .code = ENOMEM, .name = plan.names[i] };

		if (!calls_is_memory(one.name))
			continue;
		one.mode = CALLS_FAIL;
		fail(one);
		one.mode = CALLS_FAIL_FROM;
		fail(one);
	}
}
