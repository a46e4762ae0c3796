/* SPDX-License-Identifier: Apache-2.0 */
/* The address of a Redis, taken apart. Pure; the text may come from anywhere. */
#ifndef SLOTS_ADDRESS_H
#define SLOTS_ADDRESS_H

#include "base/base.h"

/*
 * redis://, rediss://, unix://, sentinel://, as include/ioshape/ioshape.h says. -EINVAL names the
 * part that is wrong, but quotes nothing of the text: who forgets to escape a password finds its
 * pieces in any part.
 */
int address_parse(struct slots_address *address, const char *text, struct base_error *error);

/*
 * "host:port" as Redis writes it in redirects: an IPv6 host has no brackets, and none, left "",
 * means the one that answered. 0 or -EINVAL.
 */
int address_parse_node(struct slots_node *node, const char *text, size_t bytes);

#endif
