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
	return bytes + sizeof(struct board_entry);
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

static struct board_entry *new_entry(const char *scope, const char *name, const void *data,
				     size_t bytes)
{
	struct board_entry *entry = malloc(sizeof(*entry) + bytes);

	if (!entry)
		return NULL;
	entry->next = NULL;
	entry->hash = board_hash(scope, name);
	strcpy(entry->scope, scope);
	strcpy(entry->name, name);
	entry->bytes = bytes;
	if (bytes)
		memcpy(entry->data, data, bytes);
	return entry;
}

static void remove_at(struct board_table *table, struct board_entry **at)
{
	struct board_entry *entry = *at;

	*at = entry->next;
	table->bytes -= cost(entry->bytes);
	table->count--;
	free(entry);
}

int board_table_put(struct board_table *table, const char *scope, const char *name,
		    const void *data, size_t bytes, struct base_error *error)
{
	struct board_entry *entry, **at;

	if (table->bytes + cost(bytes) > BOARD_MOST_BYTES)
		return base_refuse(error, -E2BIG, "the board's notes have more than %llu bytes",
				   BOARD_MOST_BYTES);
	entry = new_entry(scope, name, data, bytes);
	/* A table that cannot grow is only slower, unless it has no room at all. */
	if (!entry || (table->count >= table->room && grow(table) && !table->room)) {
		free(entry);
		return base_no_memory(error, "a note", bytes);
	}
	at = find(table, entry->hash, scope, name);
	if (*at)
		remove_at(table, at);
	entry->next = *at;
	*at = entry;
	table->bytes += cost(bytes);
	table->count++;
	return 0;
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

void board_table_drop(struct board_table *table, const char *scope)
{
	for (size_t i = 0; i < table->room; i++) {
		struct board_entry **at = &table->heads[i];

		while (*at) {
			if (scope && strcmp((*at)->scope, scope) != 0)
				at = &(*at)->next;
			else
				remove_at(table, at);
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
