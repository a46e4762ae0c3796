/* SPDX-License-Identifier: Apache-2.0 */
/* What boards share: names, and notes in memory. */
#ifndef GATHER_BOARD_H
#define GATHER_BOARD_H

#include "gather/gather.h"

/* ---- Names (board_names.c) ------------------------------------------------------------------- */

/* Room for "<scope>/<name>", with the final 0. */
#define BOARD_KEY_BYTES (2 * GATHER_NAME_BYTES)

/* Whether it can be a note's or a scope's. */
bool board_is_name(const char *name);
/* -EINVAL for a scope or a name that cannot be one, or too long a note. */
int board_check(const char *scope, const char *name, size_t bytes, struct base_error *error);
/* For collect(): that names with any rank's number would do, too. */
int board_check_prefix(const char *scope, const char *prefix, struct base_error *error);
/* "<prefix>-<rank>" */
void board_name_of(char name[GATHER_NAME_BYTES], const char *prefix, uint32_t rank);
uint64_t board_hash(const char *scope, const char *name);
/* What the names of all ranks' notes have in common: a number for "want" of "want-7". */
uint64_t board_hash_family(const char *name);

/* Of boards' names: 0 or -EINVAL. */
int board_check_config(const struct gather_board_config *config, struct base_error *error);

/* Waits for so long, whatever signals come. */
void board_sleep_ms(uint32_t ms);

/* ---- Notes in memory (board_table.c) --------------------------------------------------------- */

/* In one table, which keeps what a rank has posted itself. */
#define BOARD_MOST_BYTES (1 * GIB)

struct board_entry {
	struct board_entry *next;
	uint64_t hash;
	char scope[GATHER_NAME_BYTES];
	char name[GATHER_NAME_BYTES];
	size_t bytes;
	uint8_t data[];
};

/* Zero it to begin. */
struct board_table {
	struct board_entry **heads;
	size_t room; /* a power of two, or 0 */
	size_t count;
	uint64_t bytes;
};

/* Keeps a copy of the bytes, in the place of those that had the name. 0, -E2BIG or -ENOMEM. */
int board_table_put(struct board_table *table, const char *scope, const char *name,
		    const void *data, size_t bytes, struct base_error *error);
/* Ends with what each() returns, if that is not 0. */
int board_table_each(const struct board_table *table,
		     int (*each)(void *user, const struct board_entry *entry), void *user);
/* All of a scope; NULL: all. */
void board_table_drop(struct board_table *table, const char *scope);
/* Room for the table itself goes, too. */
void board_table_free(struct board_table *table);

#endif
