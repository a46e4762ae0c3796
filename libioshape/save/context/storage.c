/* SPDX-License-Identifier: Apache-2.0 */
/* What lies below a directory, and how many files may be written there at a time. */
#include "save/save.h"

#include <string.h>

void save_look_at_storage(int directory_fd, const char *directory, struct fs_memory *memory,
			  struct fs_facts *facts)
{
	struct fs_info info;

	memset(facts, 0, sizeof(*facts));
	if (fs_describe(directory_fd, directory, memory, &info, NULL))
		return;
	facts->family = info.family;
	facts->directory = info.layout;
	facts->targets = fs_count_targets(directory_fd, info.family);
}

uint32_t save_stripes_of(const struct fs_facts *storage, const struct save_expected *expected,
			 struct fs_layout *layout)
{
	struct fs_facts facts = *storage;

	facts.file_bytes = expected->bytes;
	facts.writers = expected->files;
	if (fs_choose_layout(expected->request, &facts, layout, NULL, 0) <= 0)
		*layout = facts.directory;
	return fs_capacity(facts.targets, layout, facts.file_bytes);
}
