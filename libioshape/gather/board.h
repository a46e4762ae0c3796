/* SPDX-License-Identifier: Apache-2.0 */
/* What boards share: names, and notes in memory. */
#ifndef GATHER_BOARD_H
#define GATHER_BOARD_H

#include "gather/gather.h"

/* ---- Boards (board.c) ------------------------------------------------------------------------ */

/*
 * What a kind of board does. No member is NULL. Names are good, and the process is the one that
 * opened the board.
 */
struct gather_board_ops {
	const char *id;
	int (*open)(struct gather_board **out, const struct gather_board_config *config,
		    struct base_error *error);
	int (*post)(struct gather_board *board, const char *scope, const char *name,
		    const void *note, size_t bytes, struct base_error *error);
	int (*look)(struct gather_board *board, const char *scope, const char *name,
		    struct base_buffer *note, struct base_error *error);
	int (*collect)(struct gather_board *board, const char *scope, const char *prefix,
		       const bool *have, gather_found_fn *found, void *user,
		       struct base_error *error);
	void (*wait)(struct gather_board *board, uint32_t timeout_ms);
	bool (*is_gone)(struct gather_board *board, uint32_t rank);
	void (*drop)(struct gather_board *board, const char *scope);
	void (*close)(struct gather_board *board);
};

/* The first member of each kind's own struct. */
struct gather_board {
	const struct gather_board_ops *ops;
	struct gather_board_config config;
	pid_t pid;
	const char *remark;
};

/* For open(): of so many bytes, zeros but for what is above; or NULL, with a sentence. */
void *board_new(size_t bytes, const struct gather_board_ops *ops,
		const struct gather_board_config *config, struct base_error *error);
/* is_gone() of boards whose medium does not know. */
bool board_cannot_tell(struct gather_board *board, uint32_t rank);

/* ---- Names (board_names.c) ------------------------------------------------------------------- */

/* Room for "<scope>/<name>", with the final 0. */
#define BOARD_KEY_BYTES (2 * GATHER_NAME_BYTES)

/* Whether it can be a note's or a scope's. */
bool board_is_name(const char *name);
/* "<prefix>-<rank>" */
void board_name_of(char name[GATHER_NAME_BYTES], const char *prefix, uint32_t rank);
uint64_t board_hash(const char *scope, const char *name);
/* What the names of all ranks' notes have in common: a number for "want" of "want-7". */
uint64_t board_hash_family(const char *name);

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

/* ---- Our own notes (board_own.c) ------------------------------------------------------------- */

/*
 * For media that lose notes and wake nobody: what we posted, when to look whether it is still
 * there, and how long to sleep before the medium is asked again.
 */
struct board_own {
	struct board_table notes;
	uint64_t stamps[16]; /* of notes seen lately: others are news */
	unsigned next_stamp;
	uint32_t pause_ms; /* of the next wait */
	uint32_t check_ms; /* between looks for our own notes */
	uint64_t check_ns; /* the next one */
};

void board_own_begin(struct board_own *own);
int board_own_keep(struct board_own *own, const char *scope, const char *name, const void *note,
		   size_t bytes, struct base_error *error);
/* A note with this stamp was read. */
void board_own_see(struct board_own *own, uint64_t stamp);
/* Longer each time, until something is posted or news are seen. */
void board_own_sleep(struct board_own *own, uint32_t timeout_ms, uint32_t most_pause_ms);
/* Whether it is time to look for our own notes; then that is for the next time as well. */
bool board_own_is_due(struct board_own *own);

/* ---- The secret of a job (board_secret.c) ---------------------------------------------------- */

/* For media that others can write to. Zero it to begin. */
struct board_secret {
	struct gather_board *files; /* where it lies; NULL: it is not known */
	uint8_t key[BASE_MAC_BYTES];
};

/* Rank 0 draws it; the others wait until it has. To be closed also after a failure. */
int board_secret_open(struct board_secret *secret, const struct gather_board_config *config,
		      struct base_error *error);
/* Rank 0: nobody can read it any more. */
void board_secret_close(struct board_secret *secret);
/* Rank 0, now and then: leaves it again if an earlier life of the job took it away as it ended. */
void board_secret_keep(struct board_secret *secret);
/* The others: whether rank 0 has drawn another one than was known. */
bool board_secret_renew(struct board_secret *secret);

/* Appends the note of this name in this list as it goes to the medium: 0 or -ENOMEM. */
int board_secret_seal(const struct board_secret *secret, const char *list, const char *name,
		      const void *note, size_t bytes, struct base_buffer *sealed);
/* The note in what came from there; NULL if no rank of the job has put it in this place. `bytes` is
 * changed to the note's. */
const uint8_t *board_secret_unseal(const struct board_secret *secret, const char *list,
				   const char *name, const void *sealed, size_t *bytes);

#endif
