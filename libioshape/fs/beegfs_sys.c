/* SPDX-License-Identifier: Apache-2.0 */
/* What BeeGFS' client tells about itself in /proc/fs/beegfs: a folder for each mount. It does not
 * know how full a target is. */
#include "fs/storage.h"
#include "fs/sysfile.h"
#include "fs/words.h"

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

/* Whether the folder is that of the mount with this file of settings: "cfgFile = /etc/...". */
static bool has_settings(const char *root, const char *entry, const char *file, size_t bytes)
{
	struct base_buffer text = { 0 };
	char path[PATH_BYTES];
	const char *at;
	bool same = false;

	snprintf(path, sizeof(path), PLACE "/%s/config", entry);
	if (!fs_read_whole(root, path, MOST_BYTES, &text)) {
		at = strstr((const char *)text.data, "cfgFile = ");
		same = at && !strncmp(at + 10, file, bytes) && strchr("\n \t", at[10 + bytes]);
	}
	base_buffer_free(&text);
	return same;
}

uint32_t fs_count_beegfs_targets(const char *root, const char *options)
{
	uint32_t count = 0, fitting = 0;
	unsigned entries = 0, seen = 0;
	const char *file = NULL;
	struct dirent *entry;
	char path[PATH_BYTES];
	size_t bytes = 0;
	DIR *folder;

	if ((size_t)snprintf(path, sizeof(path), "%s" PLACE, root) >= sizeof(path))
		return 0;
	folder = opendir(path);
	if (!folder)
		return 0;
	fs_find_value(options, strlen(options), ',', "cfgFile", &file, &bytes);
	while (seen++ < MOST_ENTRIES && (entry = readdir(folder))) {
		if (*entry->d_name == '.')
			continue;
		entries++;
		count = count_targets(root, entry->d_name);
		if (file && has_settings(root, entry->d_name, file, bytes))
			fitting = count;
	}
	closedir(folder);
	/* The only one needs no proof. */
	return entries == 1 ? count : fitting;
}
