/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second thread that gets memory ready for what is read past the page cache: pages cost as much
 * as copying into them, and the device would idle meanwhile.
 */
#include "ring/read.h"

static void *prepare_all(void *argument)
{
	struct ring_preparer *preparer = argument;
	const struct ring_piece *piece;
	uint64_t end = atomic_load(&preparer->reading->done);

	for (size_t i = 0; i < preparer->count && !atomic_load(&preparer->stop); i++) {
		piece = &preparer->pieces[i];
		end += piece->bytes;
		/* Not what has been filled meanwhile. */
		if (piece->into && end > atomic_load(&preparer->reading->done))
			base_fresh_prepare(preparer->fresh, piece->into, piece->bytes);
	}
	return NULL;
}

void ring_preparer_start(struct ring_preparer *preparer, const struct ring_reading *reading,
			 const struct ring_piece *pieces, size_t count)
{
	const struct ring_lane *lane = reading->lane;

	*preparer = (struct ring_preparer){
		.fresh = lane->fresh, .reading = reading, .pieces = pieces, .count = count
	};
	/* Without it whoever fills the memory prepares it. */
	if (lane->fresh && lane->config.threads > 1)
		preparer->runs = !base_start_thread(&preparer->thread, prepare_all, preparer);
}

void ring_preparer_stop(struct ring_preparer *preparer)
{
	if (!preparer->runs)
		return;
	atomic_store(&preparer->stop, true);
	pthread_join(preparer->thread, NULL);
}
