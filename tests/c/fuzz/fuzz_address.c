/* SPDX-License-Identifier: Apache-2.0 */
/* Parses any text as a coordinator's address, as a node that a Redis names, and as settings. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fs/fs.h"
#include "fuzz.h"
#include "slots/address.h"

static bool has_end(const char *text, size_t room)
{
	return memchr(text, 0, room);
}

static void check_address(const struct slots_address *address)
{
	MUST(address->node_count <= ADDRESS_HOSTS);
	MUST((address->kind == ADDRESS_UNIX) == !address->node_count);
	for (size_t i = 0; i < address->node_count; i++) {
		const struct slots_node *node = &address->nodes[i];

		MUST(*node->host && has_end(node->host, sizeof(node->host)) && node->port);
	}
	MUST(has_end(address->path, sizeof(address->path)));
	MUST(has_end(address->service, sizeof(address->service)));
	MUST(has_end(address->user, sizeof(address->user)));
	MUST(has_end(address->password, sizeof(address->password)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fs_layout_request request;
	struct slots_address address;
	struct base_error error = { 0 };
	struct slots_node node;
	uint64_t number;
	char *text = malloc(bytes + 1);
	int ret;

	MUST(text);
	if (bytes)
		memcpy(text, data, bytes);
	text[bytes] = 0;
	ret = address_parse(&address, text, &error);
	MUST(!ret || ret == -EINVAL);
	MUST(ret == error.code);
	if (!ret)
		check_address(&address);
	if (!address_parse_node(&node, (const char *)data, bytes))
		MUST(has_end(node.host, sizeof(node.host)));
	base_parse_bytes(text, &number);
	if (!fs_layout_request_parse(text, &request, NULL))
		MUST(has_end(request.component.pool, sizeof(request.component.pool)));
	free(text);
	return 0;
}
