/* SPDX-License-Identifier: Apache-2.0 */
#include "gather/board.h"

#define LEAST_PAUSE_MS 5u
#define LEAST_CHECK_MS 1000u
#define MOST_CHECK_MS 5000u

void board_own_begin(struct board_own *own)
{
	*own = (struct board_own){
		.pause_ms = LEAST_PAUSE_MS,
		.check_ms = LEAST_CHECK_MS,
		.check_ns = base_now_ns() + base_ms_to_ns(LEAST_CHECK_MS),
	};
}

int board_own_keep(struct board_own *own, const char *scope, const char *name, const void *note,
		   size_t bytes, struct base_error *error)
{
	/* Answers may come soon. */
	own->pause_ms = LEAST_PAUSE_MS;
	/* Sooner than before, never later: signs of life are posted all the time. */
	own->check_ms = LEAST_CHECK_MS;
	own->check_ns = MIN(own->check_ns, base_now_ns() + base_ms_to_ns(LEAST_CHECK_MS));
	return board_table_put(&own->notes, scope, name, note, bytes, error);
}

void board_own_see(struct board_own *own, uint64_t stamp)
{
	for (size_t i = 0; i < ARRAY_LENGTH(own->stamps); i++) {
		if (own->stamps[i] == stamp)
			return;
	}
	own->stamps[own->next_stamp] = stamp;
	own->next_stamp = (own->next_stamp + 1) % ARRAY_LENGTH(own->stamps);
	own->pause_ms = LEAST_PAUSE_MS;
}

void board_own_sleep(struct board_own *own, uint32_t timeout_ms, uint32_t most_pause_ms)
{
	board_sleep_ms(MIN(timeout_ms, own->pause_ms));
	own->pause_ms = MIN(2 * own->pause_ms, most_pause_ms);
}

bool board_own_is_due(struct board_own *own)
{
	const uint64_t now_ns = base_now_ns();

	if (now_ns < own->check_ns)
		return false;
	own->check_ms = MIN(2 * own->check_ms, MOST_CHECK_MS);
	own->check_ns = now_ns + base_ms_to_ns(own->check_ms);
	return true;
}
