/* SPDX-License-Identifier: Apache-2.0 */
/* Copies by several threads, which wait for the next one without a spin. */
#include "base/base.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SLICE_BYTES (256 * KIB)

/* Below this, nobody is woken. */
#define PARALLEL_BYTES (1 * MIB)

struct base_copier {
	struct base_crew crew;
	unsigned helpers;
	char *to;
	const char *from;
	size_t bytes;
	_Atomic size_t next; /* byte that nobody has taken yet */
};

struct base_copier *base_copier_open(void)
{
	struct base_copier *copier = calloc(1, sizeof(*copier));

	if (!copier)
		return NULL;
	base_crew_init(&copier->crew);
	copier->helpers = base_copy_threads() - 1;
	return copier;
}

static void copy_slices(void *user)
{
	struct base_copier *copier = user;
	size_t at;

	while ((at = atomic_fetch_add(&copier->next, SLICE_BYTES)) < copier->bytes)
		memcpy(copier->to + at, copier->from + at, MIN(copier->bytes - at, SLICE_BYTES));
}

void base_copier_copy(struct base_copier *copier, void *to, const void *from, size_t bytes)
{
	if (!copier) {
		memcpy(to, from, bytes);
		return;
	}
	copier->to = to;
	copier->from = from;
	copier->bytes = bytes;
	atomic_store(&copier->next, 0);
	base_crew_begin(&copier->crew, bytes < PARALLEL_BYTES ? 0 : copier->helpers, copy_slices,
			copier);
	copy_slices(copier);
	base_crew_finish(&copier->crew);
}

void base_copier_free(struct base_copier *copier)
{
	if (!copier)
		return;
	base_crew_dismiss(&copier->crew);
	free(copier);
}
