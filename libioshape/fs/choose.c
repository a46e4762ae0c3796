/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which layout to ask for, and how many may write at a time. docs/layouts.md has the rule in words.
 */
#include "fs/fs.h"

#include <stdio.h>
#include <string.h>

/* Files up to so many bytes get so many stripes: the rule of FSx for Lustre's own layout. */
static const struct step {
	uint64_t bytes;
	uint32_t stripes;
} steps[] = {
	{ FS_ONE_STRIPE_BYTES, 1 },
	{ 10 * GIB, 8 },
	{ 100 * GIB, 16 },
	{ UINT64_MAX, 32 },
};

/* Below the first a block of ours would be cut into many small requests; the second is what Lustre
 * itself begins with, and what its clients send at most in one request. */
#define LEAST_STRIPE_BYTES (1 * MIB)
#define GOOD_STRIPE_BYTES (4 * MIB)

/* Enough for any filesystem, and too few to be a storm. */
#define MOST_CAPACITY 64u

/* What stripes and parts are multiples of. */
#define STRIPE_UNIT (64 * KIB)

#define LUSTRE_DEFAULT_STRIPES 1u
#define BEEGFS_DEFAULT_STRIPES 4u

bool fs_takes_layouts(enum fs_family family)
{
	return family == FS_LUSTRE || family == FS_BEEGFS || family == FS_CEPH;
}

static uint32_t stripes_by_size(const struct fs_facts *facts)
{
	const uint32_t writers = MAX(facts->writers, 1);
	const struct step *step = steps;
	uint32_t stripes;

	while (facts->file_bytes > step->bytes)
		step++;
	stripes = step->stripes;
	/* Each target serves one file at a time. */
	if (facts->targets)
		stripes = MIN(stripes, MAX(facts->targets / writers, 1));
	return stripes;
}

static int choose_by_size(const struct fs_facts *facts, struct fs_layout *ask, char *why,
			  size_t why_bytes)
{
	const struct fs_layout *own = &facts->directory;
	const struct fs_part *part = own->count ? &own->parts[0] : NULL;
	const uint32_t wanted = stripes_by_size(facts);
	/* BeeGFS says nothing about directories. On Lustre nothing was set if nothing is told. */
	const uint32_t had = part && part->stripe_count ? part->stripe_count :
			     facts->family == FS_BEEGFS ? BEEGFS_DEFAULT_STRIPES :
							  LUSTRE_DEFAULT_STRIPES;

	if (facts->family == FS_CEPH) {
		snprintf(why, why_bytes,
			 "the directory's layout: CephFS spreads a file's objects by itself");
		return 0;
	}
	if (!facts->file_bytes) {
		snprintf(why, why_bytes, "the directory's layout: the file's size is not known");
		return 0;
	}
	if (own->count > 1 || own->mirrors > 1 || (part && part->on_metadata)) {
		snprintf(why, why_bytes, "the directory's layout: it is %s",
			 own->mirrors > 1 ? "mirrored" : "progressive");
		return 0;
	}
	if (had >= wanted) {
		snprintf(why, why_bytes, "the directory's layout: %u stripe%s would do", wanted,
			 wanted == 1 ? "" : "s");
		return 0;
	}
	ask->count = ask->mirrors = 1;
	ask->parts[0] = (struct fs_part){ .end = UINT64_MAX, .stripe_count = wanted };
	if (part) {
		ask->parts[0].stripe_bytes = part->stripe_bytes;
		memcpy(ask->parts[0].pool, part->pool, sizeof(part->pool));
		if (part->stripe_bytes && part->stripe_bytes < LEAST_STRIPE_BYTES)
			ask->parts[0].stripe_bytes = GOOD_STRIPE_BYTES;
	}
	snprintf(why, why_bytes, "%u stripes by size: the directory gives %s%u", wanted,
		 part && part->stripe_count ? "" : "probably ", had);
	return 1;
}

/* A part ends with a whole stripe: that of the directory, or of what divides it. */
static uint64_t stripe_that_fits(uint64_t stripe_bytes, uint64_t end)
{
	if (end == UINT64_MAX)
		return stripe_bytes;
	while (stripe_bytes > STRIPE_UNIT && (end % stripe_bytes || stripe_bytes % STRIPE_UNIT))
		stripe_bytes /= 2;
	return MAX(stripe_bytes, STRIPE_UNIT);
}

/* What a user leaves out is as the directory has it. Asked for nothing, a server would take what is
 * set for the whole filesystem. */
static void fill_in(struct fs_part *part, const struct fs_layout *directory)
{
	const struct fs_part *own = fs_layout_at(directory, part->begin);

	if (own && own->on_metadata)
		own = fs_layout_at(directory, own->end);
	if (!own)
		return;
	if (!part->stripe_count)
		part->stripe_count = own->stripe_count;
	if (!part->stripe_bytes && own->stripe_bytes)
		part->stripe_bytes = stripe_that_fits(own->stripe_bytes, part->end);
	if (!*part->pool)
		memcpy(part->pool, own->pool, sizeof(own->pool));
}

static bool is_same(const struct fs_layout *one, const struct fs_layout *other)
{
	if (one->count != other->count || one->mirrors != other->mirrors)
		return false;
	for (uint32_t i = 0; i < one->count; i++) {
		const struct fs_part *a = &one->parts[i], *b = &other->parts[i];

		if (a->begin != b->begin || a->end != b->end ||
		    a->stripe_bytes != b->stripe_bytes || a->stripe_count != b->stripe_count ||
		    a->on_metadata != b->on_metadata || a->overstriped != b->overstriped ||
		    strcmp(a->pool, b->pool) != 0)
			return false;
	}
	return true;
}

static int choose_wished(const struct fs_layout_request *request, const struct fs_facts *facts,
			 struct fs_layout *ask, char *why, size_t why_bytes)
{
	const struct fs_part *part;

	*ask = request->layout;
	if (ask->count > 1 && facts->family != FS_LUSTRE) {
		/* Where there are no components: the one that most of the file would be in. */
		part = facts->file_bytes ? fs_layout_main(&request->layout, facts->file_bytes) :
					   &request->layout.parts[request->layout.count - 1];
		ask->parts[0] = *part;
		ask->parts[0].begin = 0;
		ask->parts[0].end = UINT64_MAX;
		ask->count = 1;
	}
	for (uint32_t i = 0; i < ask->count; i++)
		fill_in(&ask->parts[i], &facts->directory);
	if (is_same(ask, &facts->directory)) {
		snprintf(why, why_bytes, "as asked for, which is the directory's layout");
		return 0;
	}
	snprintf(why, why_bytes, "as asked for");
	return 1;
}

int fs_choose_layout(const struct fs_layout_request *request, const struct fs_facts *facts,
		     struct fs_layout *ask, char *why, size_t why_bytes)
{
	memset(ask, 0, sizeof(*ask));
	if (why_bytes)
		*why = 0;
	if (!fs_takes_layouts(facts->family)) {
		snprintf(why, why_bytes, "no layouts to ask for on %s",
			 fs_family_name(facts->family));
		return 0;
	}
	switch (request->kind) {
	case FS_REQUEST_AUTO:
		return choose_by_size(facts, ask, why, why_bytes);
	case FS_REQUEST_LAYOUT:
		return choose_wished(request, facts, ask, why, why_bytes);
	default:
		snprintf(why, why_bytes, "the directory's layout, as asked for");
		return 0;
	}
}

/* ---- Full targets ---------------------------------------------------------------------------- */

static uint32_t count_roomy(const struct fs_storage *storage, uint64_t bytes)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < storage->target_count; i++)
		count += storage->target[i].free_bytes >= bytes;
	return count;
}

/* Many files are made at a time: each begins with another of the targets. */
static void choose_roomy(const struct fs_storage *storage, uint64_t bytes, uint32_t turn,
			 struct fs_layout *ask)
{
	for (uint32_t i = 0; ask->chosen < ask->parts[0].stripe_count; i++) {
		const struct fs_target *target =
			&storage->target[(turn + i) % storage->target_count];

		if (target->free_bytes >= bytes)
			ask->target[ask->chosen++] = target->number;
	}
}

int fs_leave_out_full(const struct fs_facts *facts, const struct fs_storage *storage, uint32_t turn,
		      struct fs_layout *ask)
{
	const struct fs_layout *layout = ask->count ? ask : &facts->directory;
	const struct fs_part *part = fs_layout_main(layout, facts->file_bytes);
	const uint32_t known = storage->target_count;
	const uint32_t wanted = MIN(part && part->stripe_count ? part->stripe_count : 1, known);
	struct fs_layout roomy = { .count = 1, .mirrors = 1 };
	struct fs_part *only = &roomy.parts[0];
	uint32_t stripes = wanted;

	while (stripes && count_roomy(storage, facts->file_bytes / stripes + 1) < stripes)
		stripes--;
	if (!stripes || count_roomy(storage, facts->file_bytes / wanted + 1) == known)
		return 0;
	if (part)
		*only = *part;
	only->begin = 0;
	only->end = UINT64_MAX;
	only->stripe_count = stripes;
	only->on_metadata = only->overstriped = false;
	choose_roomy(storage, facts->file_bytes / stripes + 1, turn, &roomy);
	*ask = roomy;
	return 1;
}

/* ---- Parts of the targets -------------------------------------------------------------------- */

int fs_take_place(const struct fs_facts *facts, const struct fs_even_targets *targets,
		  uint32_t place, uint32_t places, struct fs_layout *ask)
{
	const struct fs_layout *layout = ask->count ? ask : &facts->directory;
	const uint32_t stripes = layout->count ? MAX(layout->parts[0].stripe_count, 1u) :
						 LUSTRE_DEFAULT_STRIPES;
	struct fs_part part = layout->count ? layout->parts[0] : (struct fs_part){ 0 };

	if (facts->family != FS_LUSTRE || layout->count > 1 || layout->mirrors > 1 ||
	    layout->chosen || part.on_metadata || part.overstriped || part.pool[0] ||
	    targets->count != facts->targets || places < 2 || place > places ||
	    stripes > targets->count / places)
		return 0;
	part.end = UINT64_MAX;
	part.stripe_count = stripes;
	*ask = (struct fs_layout){ .count = 1, .mirrors = 1, .parts = { part } };
	for (uint32_t i = 0; i < stripes; i++)
		ask->target[ask->chosen++] = targets->number[(place - 1) * stripes + i];
	return 1;
}

/* ---- Writers at a time ----------------------------------------------------------------------- */

uint32_t fs_capacity(uint32_t targets, const struct fs_layout *layout, uint64_t file_bytes)
{
	const struct fs_part *part = fs_layout_main(layout, file_bytes);

	if (!targets || !part || !part->stripe_count)
		return 0;
	return MIN(MAX(targets / part->stripe_count, 1), MOST_CAPACITY);
}
