/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the fs floor: numbers and words out of texts that somebody else wrote. Nothing here needs
 * a 0 at the end of the text or looks beyond `end`.
 */
#ifndef FS_WORDS_H
#define FS_WORDS_H

#include "fs/fs.h"

/* A decimal number that ends at `stop`; moves *at behind that. */
bool fs_take_number(const char **at, const char *end, char stop, unsigned *number);

/* A word of at least one character that ends at a space or the end and fits; moves *at behind it.
 */
bool fs_take_word(const char **at, const char *end, char *word, size_t word_bytes);

/* Moves *at behind the next space; false if there is none. */
bool fs_skip_word(const char **at, const char *end);

/* The decimal number that all of the text is. */
bool fs_whole_number(const char *text, size_t bytes, uint64_t *number);

/* What stands behind "NAME" + '=' in a list with `separator` between its members; false if it is
 * not there. `value` is not ended by a 0. */
bool fs_find_value(const char *list, size_t bytes, char separator, const char *name,
		   const char **value, size_t *value_bytes);

#endif
