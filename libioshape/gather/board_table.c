/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 64u

/* Entries count with their notes, so that many empty notes have a limit as well. */
static uint64_t cost(size_t bytes)
{
	return bytes + sizeof(struct board_note) + sizeof(struct board_entry);
}

struct board_note *board_note_new(struct board_table *table, size_t bytes, int *code)
{
	struct board_note *note;

	*code = -ENOSPC;
	if (__atomic_add_fetch(&table->bytes, cost(bytes), __ATOMIC_RELAXED) > BOARD_MOST_BYTES)
		goto give_back;
	*code = -ENOMEM;
	note = malloc(sizeof(*note) + bytes);
	if (!note)
		goto give_back;
	note->table = table;
	note->users = 1;
	note->bytes = bytes;
	*code = 0;
	return note;

give_back:
	__atomic_sub_fetch(&table->bytes, cost(bytes), __ATOMIC_RELAXED);
	return NULL;
}

struct board_note *board_note_use(struct board_note *note)
{
	__atomic_add_fetch(&note->users, 1, __ATOMIC_RELAXED);
	return note;
}

void board_note_leave(struct board_note *note)
{
	if (!note || __atomic_sub_fetch(&note->users, 1, __ATOMIC_ACQ_REL))
		return;
	__atomic_sub_fetch(&note->table->bytes, cost(note->bytes), __ATOMIC_RELAXED);
	free(note);
}

static struct board_entry **find(const struct board_table *table, uint64_t hash, const char *scope,
				 const char *name)
{
	struct board_entry **at = &table->heads[hash & (table->room - 1)];

	while (*at && ((*at)->hash != hash || strcmp((*at)->name, name) != 0 ||
		       strcmp((*at)->scope, scope) != 0))
		at = &(*at)->next;
	return at;
}

static int grow(struct board_table *table)
{
	const size_t room = table->room ? 2 * table->room : FIRST_ROOM;
	struct board_entry **heads = calloc(room, sizeof(struct board_entry *)), *entry, *next;

	if (!heads)
		return -ENOMEM;
	for (size_t i = 0; i < table->room; i++) {
		for (entry = table->heads[i]; entry; entry = next) {
			next = entry->next;
			entry->next = heads[entry->hash & (room - 1)];
			heads[entry->hash & (room - 1)] = entry;
		}
	}
	free(table->heads);
	table->heads = heads;
	table->room = room;
	return 0;
}

static int add(struct board_table *table, uint64_t hash, const char *scope, const char *name,
	       struct board_note *note)
{
	struct board_entry *entry = malloc(sizeof(*entry)), **at;

	if (!entry)
		return -ENOMEM;
	at = &table->heads[hash & (table->room - 1)];
	entry->next = *at;
	entry->hash = hash;
	strcpy(entry->scope, scope);
	strcpy(entry->name, name);
	entry->note = note;
	*at = entry;
	table->count++;
	return 0;
}

int board_table_put(struct board_table *table, const char *scope, const char *name,
		    struct board_note *note)
{
	const uint64_t hash = board_hash(scope, name);
	struct board_entry *there;
	int ret = 0;

	/* With some room it is only slower if there is no memory to grow. */
	if (table->count >= table->room && grow(table) && !table->room)
		ret = -ENOMEM;
	there = ret ? NULL : *find(table, hash, scope, name);
	if (there) {
		board_note_leave(there->note);
		there->note = note;
	} else if (!ret) {
		ret = add(table, hash, scope, name, note);
	}
	if (ret)
		board_note_leave(note);
	return ret;
}

struct board_note *board_table_get(const struct board_table *table, const char *scope,
				   const char *name)
{
	struct board_entry *entry;

	if (!table->room)
		return NULL;
	entry = *find(table, board_hash(scope, name), scope, name);
	return entry ? entry->note : NULL;
}

static int has_scope(void *scope, const struct board_entry *entry)
{
	return !strcmp(entry->scope, scope);
}

bool board_table_has_scope(const struct board_table *table, const char *scope)
{
	return board_table_each(table, has_scope, (void *)(uintptr_t)scope);
}

int board_table_each(const struct board_table *table,
		     int (*each)(void *user, const struct board_entry *entry), void *user)
{
	const struct board_entry *entry;
	int ret = 0;

	for (size_t i = 0; i < table->room && !ret; i++) {
		for (entry = table->heads[i]; entry && !ret; entry = entry->next)
			ret = each(user, entry);
	}
	return ret;
}

int board_table_keep(struct board_table *table, const char *scope, const char *name,
		     const void *bytes, size_t count, struct base_error *error)
{
	struct board_note *note;
	int ret;

	note = board_note_new(table, count, &ret);
	if (note) {
		if (count)
			memcpy(note->data, bytes, count);
		ret = board_table_put(table, scope, name, note);
	}
	if (ret == -ENOSPC)
		return base_fail(error, ret, "the board's notes have more than %llu bytes",
				 BOARD_MOST_BYTES);
	return ret ? base_no_memory(error, "a note", count) : 0;
}

void board_table_drop(struct board_table *table, const char *scope)
{
	struct board_entry **at, *entry;

	for (size_t i = 0; i < table->room; i++) {
		at = &table->heads[i];
		while ((entry = *at)) {
			if (scope && strcmp(entry->scope, scope) != 0) {
				at = &entry->next;
				continue;
			}
			*at = entry->next;
			board_note_leave(entry->note);
			free(entry);
			table->count--;
		}
	}
}

void board_table_free(struct board_table *table)
{
	board_table_drop(table, NULL);
	free(table->heads);
	table->heads = NULL;
	table->room = 0;
}
