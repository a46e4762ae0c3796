/* SPDX-License-Identifier: Apache-2.0 */
/* Parses the address of a Redis (address.c). Private to the slots layer. */
#ifndef SLOTS_ADDRESS_H
#define SLOTS_ADDRESS_H

#include "base/base.h"

/*
 * Parses redis://, rediss://, unix:// and sentinel:// addresses, as include/ioshape/ioshape.h
 * describes them. The text may be untrusted. -EINVAL: the error names the wrong part, but quotes
 * nothing. If a user forgets to escape a password, its pieces can land in any part.
 */
int address_parse(struct slots_address *address, const char *text, struct base_error *error);
/*
 * Parses "host:port" as Redis writes it in redirects. An IPv6 host needs no brackets there. A
 * missing host, left as "", means the server that sent the redirect. Returns 0 or -EINVAL.
 */
int address_parse_node(struct slots_node *node, const char *text, size_t bytes);

#endif
