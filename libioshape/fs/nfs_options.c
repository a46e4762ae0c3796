/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/storage.h"
#include "fs/text.h"

#include <stdio.h>
#include <string.h>

/* As the kernel bounds them; more is a text that is not of its making. */
#define MOST_TRANSFER (1 * GIB)
#define MOST_CONNECTIONS 1024

static uint64_t number_of(const char *options, size_t bytes, const char *name, uint64_t most)
{
	uint64_t number;

	return fs_find_number(options, bytes, ',', name, &number) && number <= most ? number : 0;
}

/* "3", "4.2", or "4" with the other half in an option of its own. */
static void read_version(const char *options, size_t bytes, struct fs_nfs_options *nfs)
{
	uint64_t major = 0, minor;
	const char *value, *dot;
	size_t value_bytes;

	if (!fs_find_value(options, bytes, ',', "vers", &value, &value_bytes) &&
	    !fs_find_value(options, bytes, ',', "nfsvers", &value, &value_bytes))
		return;
	minor = number_of(options, bytes, "minorversion", 9);
	dot = memchr(value, '.', value_bytes);
	if (dot && !fs_whole_number(dot + 1, value_bytes - (size_t)(dot + 1 - value), &minor))
		return;
	if (!fs_whole_number(value, dot ? (size_t)(dot - value) : value_bytes, &major) ||
	    major < 2 || major > 9 || minor > 9)
		return;
	nfs->version = (uint32_t)major;
	nfs->minor = (uint32_t)minor;
}

void fs_nfs_options(const char *options, size_t bytes, struct fs_nfs_options *nfs)
{
	const char *value;
	size_t value_bytes;

	memset(nfs, 0, sizeof(*nfs));
	read_version(options, bytes, nfs);
	if (fs_find_value(options, bytes, ',', "proto", &value, &value_bytes) &&
	    value_bytes < sizeof(nfs->proto) && !memchr(value, 0, value_bytes))
		memcpy(nfs->proto, value, value_bytes);
	nfs->write_bytes = number_of(options, bytes, "wsize", MOST_TRANSFER);
	nfs->connections = (uint32_t)number_of(options, bytes, "nconnect", MOST_CONNECTIONS);
}

void fs_nfs_text(const struct fs_nfs_options *nfs, char *text, size_t text_bytes)
{
	char version[16] = "", over[24] = "", connections[32] = "";

	if (nfs->version >= 4)
		snprintf(version, sizeof(version), "v%u.%u", nfs->version, nfs->minor);
	else if (nfs->version)
		snprintf(version, sizeof(version), "v%u", nfs->version);
	if (!strncmp(nfs->proto, "rdma", 4))
		snprintf(over, sizeof(over), " over RDMA");
	else if (!strncmp(nfs->proto, "tcp", 3))
		snprintf(over, sizeof(over), " over TCP");
	else if (*nfs->proto)
		snprintf(over, sizeof(over), " over %s", nfs->proto);
	if (nfs->connections > 1)
		snprintf(connections, sizeof(connections), " x %u", nfs->connections);
	snprintf(text, text_bytes, "NFS%s%s%s", version, over, connections);
}
