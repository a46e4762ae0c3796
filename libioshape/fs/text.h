/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the fs floor: reads numbers and words from texts that others wrote. Where a length or an
 * `end` is given, the text needs no 0 at its end and nothing beyond it is read.
 */
#ifndef FS_WORDS_H
#define FS_WORDS_H

#include "fs/fs.h"

/* A decimal number that ends at `stop`; moves *at behind that. */
bool fs_take_number(const char **at, const char *end, char stop, unsigned *number);

/* The decimal number that all of the text is. */
bool fs_whole_number(const char *text, size_t bytes, uint64_t *number);

/* The value after "NAME=" in a list with `separator` between its members; false if it is
 * not there. `value` is not ended by a 0. */
bool fs_find_value(const char *list, size_t bytes, char separator, const char *name,
		   const char **value, size_t *value_bytes);

/* The same where the value is a decimal number; false if it is none. */
bool fs_find_number(const char *list, size_t bytes, char separator, const char *name,
		    uint64_t *number);

#endif
