/* SPDX-License-Identifier: Apache-2.0 */
/* What BeeGFS' client tells about itself in /proc/fs/beegfs: a folder for each mount. It does not
 * know how full a target is. */
#include "fs/storage.h"
#include "fs/sysfile.h"
#include "fs/text.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

#define PLACE "/proc/fs/beegfs"
#define PATH_BYTES 512
#define MOST_ENTRIES 64
#define MOST_BYTES (1 * MIB)

/* Lines "[Target ID: 101] @ node01 [ID: 1]: Online / Good". */
static uint32_t count_targets(const char *root, const char *entry)
{
	static const char begin[] = "[Target ID:";
	struct base_buffer text = { 0 };
	char path[PATH_BYTES];
	const char *line;
	uint32_t count = 0;

	snprintf(path, sizeof(path), PLACE "/%s/storage_target_state", entry);
	if (!fs_read_whole(root, path, MOST_BYTES, &text)) {
		for (line = (const char *)text.data; line; line = strchr(line, '\n')) {
			line += *line == '\n';
			count += !strncmp(line, begin, sizeof(begin) - 1);
		}
	}
	base_buffer_free(&text);
	return count;
}

/* The value of "NAME = VALUE" in the file of settings of a mount's folder; 0 if it is not there. */
static size_t read_setting(const struct base_buffer *config, const char *name, const char **value)
{
	const size_t name_bytes = strlen(name);
	const char *line;

	for (line = (const char *)config->data; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, name, name_bytes) || strncmp(line + name_bytes, " = ", 3))
			continue;
		*value = line + name_bytes + 3;
		return strcspn(*value, " \t\n");
	}
	return 0;
}

static void read_config(const char *root, const char *entry, struct base_buffer *config)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), PLACE "/%s/config", entry);
	if (fs_read_whole(root, path, MOST_BYTES, config))
		base_buffer_free(config);
}

/* Whether the folder is that of the mount with this file of settings. */
static bool has_settings(const char *root, const char *entry, const char *file, size_t bytes)
{
	struct base_buffer config = { 0 };
	const char *value;
	bool same;

	read_config(root, entry, &config);
	same = read_setting(&config, "cfgFile", &value) == bytes && !memcmp(value, file, bytes);
	base_buffer_free(&config);
	return same;
}

/* The name of the folder of the mount with these options: the only one needs no proof. */
static bool find_folder(const char *root, const char *options, char *name, size_t name_bytes)
{
	char path[PATH_BYTES], only[256] = "";
	unsigned entries = 0, seen = 0;
	const char *file = NULL;
	struct dirent *entry;
	size_t bytes = 0;
	bool found = false;
	DIR *folder;

	if ((size_t)snprintf(path, sizeof(path), "%s" PLACE, root) >= sizeof(path))
		return false;
	folder = opendir(path);
	if (!folder)
		return false;
	fs_find_value(options, strlen(options), ',', "cfgFile", &file, &bytes);
	while (!found && seen++ < MOST_ENTRIES && (entry = readdir(folder))) {
		if (*entry->d_name == '.')
			continue;
		entries++;
		snprintf(only, sizeof(only), "%s", entry->d_name);
		found = bytes && has_settings(root, only, file, bytes);
	}
	closedir(folder);
	snprintf(name, name_bytes, "%s", only);
	return found || entries == 1;
}

uint32_t fs_count_beegfs_targets(const char *root, const char *options)
{
	char folder[256];

	return find_folder(root, options, folder, sizeof(folder)) ? count_targets(root, folder) : 0;
}

void fs_name_beegfs(const char *root, const char *options, char *source, size_t source_bytes)
{
	const char *host, *port = "";
	struct base_buffer config = { 0 };
	size_t host_bytes, port_bytes;
	char folder[256];

	if (!find_folder(root, options, folder, sizeof(folder)))
		return;
	read_config(root, folder, &config);
	host_bytes = read_setting(&config, "sysMgmtdHost", &host);
	port_bytes = read_setting(&config, "connMgmtdPortTCP", &port);
	if (!port_bytes)
		port_bytes = read_setting(&config, "connMgmtdPort", &port);
	if (host_bytes && host_bytes + port_bytes + 2 < source_bytes)
		snprintf(source, source_bytes, "%.*s%s%.*s", (int)host_bytes, host,
			 port_bytes ? ":" : "", (int)port_bytes, port);
	base_buffer_free(&config);
}
