/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "zip/entries.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int zip_grow(void **array, uint64_t count, uint64_t *room, size_t element_bytes)
{
	uint64_t more = *room ? *room * 2 : 64;
	void *larger;

	if (count < *room)
		return 0;
	larger = reallocarray(*array, more, element_bytes);
	if (!larger)
		return -ENOMEM;
	*array = larger;
	*room = more;
	return 0;
}

bool zip_entries_have(const struct zip_entries *entries, const char *name)
{
	return entries->names &&
	       zip_names_find(entries->names, name, strlen(name), &(uint64_t){ 0 });
}

int zip_entries_add(struct zip_entries *entries, const char *folder, const char *name,
		    const struct zip_place *place)
{
	const size_t folder_bytes = strlen(folder), name_bytes = strlen(name);
	struct zip_entry *entry;
	void *list = entries->list;
	int ret;

	ret = entries->names ? 0 : zip_names_new(&entries->names, 0);
	if (!ret)
		ret = zip_grow(&list, entries->count, &entries->room, sizeof(*entries->list));
	entries->list = list;
	if (ret)
		return ret;
	entry = &entries->list[entries->count];
	entry->name = malloc(folder_bytes + name_bytes + 1);
	if (!entry->name)
		return -ENOMEM;
	entries->count++; /* the name is freed with the entries from now on */
	memcpy(entry->name, folder, folder_bytes);
	memcpy(entry->name + folder_bytes, name, name_bytes + 1);
	entry->name_bytes = (uint32_t)(folder_bytes + name_bytes);
	entry->crc32 = 0;
	entry->bytes = 0;
	entry->header_offset = place->header_offset;
	entry->data_offset = place->data_offset;
	return zip_names_add(entries->names, entry->name + folder_bytes, name_bytes,
			     entries->count - 1);
}

void zip_entries_free(struct zip_entries *entries)
{
	zip_names_free(entries->names);
	for (uint64_t i = 0; i < entries->count; i++)
		free(entries->list[i].name);
	free(entries->list);
	memset(entries, 0, sizeof(*entries));
}

int zip_put_directory(const struct zip_sink *sink, const struct zip_entries *entries,
		      const char *path, struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	/* A file that could not be read again must not be written. */
	if (zip_directory_bytes(entries->list, entries->count) > ZIP_MAX_DIRECTORY_BYTES)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "the directory of %s would pass %llu bytes" BASE_REMEDY
				   "use fewer or shorter names",
				   path, ZIP_MAX_DIRECTORY_BYTES);
	ret = zip_encode_directory(&bytes, entries->list, entries->count,
				   sink->ops->offset(sink->to));
	if (ret)
		base_fail(error, ret, "cannot build the directory of %s", path);
	else
		ret = sink->ops->put(sink->to, bytes.data, bytes.bytes, NULL, error);
	base_buffer_free(&bytes);
	return ret;
}
