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
/* The hash of a note; and of all that collect() would find with this one's prefix, 0 if it has
 * none. */
uint64_t board_hash(const char *scope, const char *name);
uint64_t board_hash_family(const char *scope, const char *name);
uint64_t board_hash_prefix(const char *scope, const char *prefix);

/* Of boards' names: 0 or -EINVAL. */
int board_check_config(const struct gather_board_config *config, struct base_error *error);

/* Waits for so long, whatever signals come. */
void board_sleep_ms(uint32_t ms);

/* ---- Notes in memory (board_table.c) --------------------------------------------------------- */

/* In one table: with everything that belongs to the notes. */
#define BOARD_MOST_BYTES (1 * GIB)

struct board_table;

/* A note's bytes. They do not change; whoever uses it counts. */
struct board_note {
	struct board_table *table;
	uint32_t users; /* atomic */
	size_t bytes;
	uint8_t data[];
};

struct board_entry {
	struct board_entry *next;
	uint64_t hash;
	char scope[GATHER_NAME_BYTES];
	char name[GATHER_NAME_BYTES];
	struct board_note *note;
};

/* Zero it to begin. One thread at a time, but for board_note_new() and board_note_leave(). */
struct board_table {
	struct board_entry **heads;
	size_t room; /* a power of two, or 0 */
	size_t count;
	uint64_t bytes; /* of all notes that anybody uses; atomic */
};

/* With one user, to be filled. NULL: too many bytes, -ENOSPC, or no memory, -ENOMEM, in *code. */
struct board_note *board_note_new(struct board_table *table, size_t bytes, int *code);
struct board_note *board_note_use(struct board_note *note);
void board_note_leave(struct board_note *note); /* NULL is fine */

/* Takes over the caller's use of the note. 0 or -ENOMEM, and then the note is left. */
int board_table_put(struct board_table *table, const char *scope, const char *name,
		    struct board_note *note);
/* Belongs to the table; NULL if there is none. */
struct board_note *board_table_get(const struct board_table *table, const char *scope,
				   const char *name);
/* Whether there are notes of this scope. */
bool board_table_has_scope(const struct board_table *table, const char *scope);
/* Ends with what each() returns, if that is not 0. */
int board_table_each(const struct board_table *table,
		     int (*each)(void *user, const struct board_entry *entry), void *user);
/* Copies the bytes into the table. 0, -ENOSPC or -ENOMEM, with a sentence. */
int board_table_keep(struct board_table *table, const char *scope, const char *name,
		     const void *bytes, size_t count, struct base_error *error);
/* All of a scope; NULL: all. */
void board_table_drop(struct board_table *table, const char *scope);
/* Room for the table itself goes, too. Notes that are in use stay valid until they are left, as
 * long as the struct is there. */
void board_table_free(struct board_table *table);

#endif
