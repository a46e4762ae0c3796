/* SPDX-License-Identifier: Apache-2.0 */
/* The scripts that Redis runs: slots.lua with what it includes, and heal.lua, embedded by the
 * build. */
#ifndef SLOTS_SCRIPT_H
#define SLOTS_SCRIPT_H

#include <stddef.h>

extern const char slots_script[];
extern const size_t slots_script_bytes;
extern const char slots_script_sha1[];

extern const char slots_heal_script[];
extern const size_t slots_heal_script_bytes;
extern const char slots_heal_script_sha1[];

#endif
