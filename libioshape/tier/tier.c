/* SPDX-License-Identifier: Apache-2.0 */
/* A tier: its journal and its copies. The journal records which copies wait to be drained and which
 * are drained. Functions for copies find their paths and their state, remove them, and make space
 * for new ones. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Names and texts of journal entries ------------------------------------------------------ */

/* Returns whether a path is absolute and has no ".", ".." or empty names. Only such a path has a
 * copy_path on a tier. */
static bool is_plain_path(const char *path)
{
	const char *name = path;

	if (*path != '/')
		return false;
	while (*name == '/') {
		const size_t bytes = strcspn(++name, "/");

		if (!bytes || (bytes <= 2 && !strncmp(name, "..", bytes)))
			return false;
		name += bytes;
	}
	return true;
}

#define NAME_BYTES 64

static void entry_name(char into[NAME_BYTES], const struct tier_entry *entry)
{
	const int bytes = snprintf(into, NAME_BYTES, "%020" PRIu64, entry->number);

	if (entry->drained)
		snprintf(into + bytes, NAME_BYTES - (size_t)bytes, "-%" PRId64 "-%" PRId64,
			 entry->copy_ns, entry->there_ns);
}

/* Parses the name of an entry and sets everything but the contents of its text. Returns false if
 * the name is no entry's. */
static bool parse_name(const char *name, struct tier_entry *entry)
{
	char again[NAME_BYTES], *end;

	*entry = (struct tier_entry){ 0 };
	entry->number = strtoull(name, &end, 10);
	entry->drained = *end == '-';
	if (entry->drained) {
		entry->copy_ns = strtoll(end + 1, &end, 10);
		entry->there_ns = *end == '-' ? strtoll(end + 1, &end, 10) : 0;
	}
	/* The calls above also accept signs, spaces and other forms. */
	entry_name(again, entry);
	return entry->number && !strcmp(name, again);
}

/* Returns the text of an entry, which the caller frees; NULL if there is no memory. */
static char *entry_text(const struct tier_entry *entry)
{
	char *text;

	return asprintf(&text, "%" PRIu32 " %" PRIu64 " %s", entry->keep_last, entry->keep_every,
			entry->path) < 0 ?
		       NULL :
		       text;
}

/* Parses a number up to `most` and the space behind it. Returns what follows, or NULL if the text
 * is malformed. */
static const char *parse_number(const char *text, uint64_t most, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	return *text >= '0' && *text <= '9' && !errno && *number <= most && *end == ' ' ? end + 1 :
											  NULL;
}

/* Parses the text of an entry and sets *path to the path in it. Returns false if the text is no
 * entry's. */
static bool parse_text(const char *text, struct tier_entry *entry, const char **path)
{
	uint64_t keep_last = 0;
	const char *at = parse_number(text, UINT32_MAX, &keep_last);

	if (at)
		at = parse_number(at, UINT64_MAX, &entry->keep_every);
	entry->keep_last = (uint32_t)keep_last;
	*path = at;
	return at && is_plain_path(at);
}

const char *tier_path_of_entry(const char *name, const char *text, int *drained)
{
	struct tier_entry entry;
	const char *path;

	if (!parse_name(name, &entry) || !parse_text(text, &entry, &path))
		return NULL;
	*drained = entry.drained;
	return path;
}

/* ---- Reading the journal --------------------------------------------------------------------- */

int tier_lock(const struct ioshape_tier *tier, struct io_hold *hold, struct base_error *error)
{
	return io_folder_take(&tier->root, "lock", true, hold, error);
}

struct listing {
	const struct ioshape_tier *tier;
	struct base_buffer entries;
};

static int add_entry(struct listing *listing, struct tier_entry *entry, const char *path,
		     struct base_error *error)
{
	const struct ioshape_tier *tier = listing->tier;

	if (asprintf(&entry->copy_path, "%s%s", tier->files, path) < 0)
		entry->copy_path = NULL;
	else
		entry->path = tier_destination(tier, entry->copy_path);
	if (entry->copy_path && !base_buffer_append(&listing->entries, entry, sizeof(*entry)))
		return 0;
	free(entry->copy_path);
	return base_no_memory(error, "the journal of a tier", listing->entries.bytes);
}

static int found_name(void *user, const char *name, struct base_error *error)
{
	struct listing *listing = user;
	const struct io_folder *journal = &listing->tier->journal;
	char text[PATH_MAX];
	struct tier_entry entry;
	const char *path;
	int ret = -EINVAL;

	if (parse_name(name, &entry))
		ret = io_folder_get_text(journal, name, text);
	if (ret == -ENOENT)
		return 0;
	/* An unreadable entry is an error: skipping it would hide a copy. */
	if (ret && ret != -EINVAL && ret != -ENAMETOOLONG)
		return base_fail(error, ret, "cannot read \"%s/%s\"", journal->path, name);
	if (!ret && parse_text(text, &entry, &path))
		return add_entry(listing, &entry, path, error);
	base_log(save_settings(listing->tier->context).log, IOSHAPE_LOG_WARNING,
		 "\"%s/%s\" is ignored: it is not a journal entry", journal->path, name);
	return 0;
}

static int compare_numbers(const void *left, const void *right)
{
	const struct tier_entry *a = left, *b = right;

	return a->number < b->number ? -1 : a->number > b->number;
}

int tier_journal_read(const struct ioshape_tier *tier, struct tier_journal *journal,
		      struct base_error *error)
{
	struct listing listing = { .tier = tier };
	int ret = io_folder_list(&tier->journal, found_name, &listing, error);

	/* The buffer's memory comes from malloc(), which is aligned for the struct. */
	journal->all = (struct tier_entry *)(void *)listing.entries.data;
	journal->count = listing.entries.bytes / sizeof(*journal->all);
	if (ret)
		tier_journal_free(journal);
	else if (journal->count)
		qsort(journal->all, journal->count, sizeof(*journal->all), compare_numbers);
	return ret;
}

void tier_journal_free(struct tier_journal *journal)
{
	for (size_t i = 0; i < journal->count; i++)
		free(journal->all[i].copy_path);
	free(journal->all);
	*journal = (struct tier_journal){ 0 };
}

const struct tier_entry *tier_newest(const struct tier_journal *journal, const char *copy_path)
{
	for (size_t i = journal->count; i; i--) {
		if (!strcmp(journal->all[i - 1].copy_path, copy_path))
			return &journal->all[i - 1];
	}
	return NULL;
}

/* ---- Changing the journal -------------------------------------------------------------------- */

/* Retries for numbers that are taken by a file that is no entry. */
#define MOST_TAKEN 16

/* Adds an entry, durably. Its number follows those of the journal. */
static int journal_add(const struct ioshape_tier *tier, const struct tier_journal *journal,
		       struct tier_entry *entry, struct base_error *error)
{
	char name[NAME_BYTES], *text = entry_text(entry);
	int ret = -EEXIST;

	if (!text)
		return base_no_memory(error, "an entry of a tier's journal", strlen(entry->path));
	entry->number = journal->count ? journal->all[journal->count - 1].number : 0;
	for (int tries = 0; ret == -EEXIST && tries < MOST_TAKEN; tries++) {
		entry->number++;
		entry_name(name, entry);
		ret = io_folder_put_text(&tier->journal, name, text, error);
	}
	if (ret == -EEXIST)
		base_fail(error, ret, "cannot make \"%s/%s\"", tier->journal.path, name);
	if (!ret)
		ret = io_folder_sync(&tier->journal, error);
	free(text);
	return ret;
}

int tier_journal_change(const struct ioshape_tier *tier, const struct tier_entry *entry,
			const struct tier_entry *now, struct base_error *error)
{
	char name[NAME_BYTES], next[NAME_BYTES];
	int ret;

	entry_name(name, entry);
	if (now) {
		entry_name(next, now);
		ret = io_folder_rename(&tier->journal, name, next);
		if (ret && ret != -ENOENT)
			base_fail(error, ret, "cannot rename \"%s/%s\"", tier->journal.path, name);
		ret = ret == -ENOENT ? 0 : ret;
	} else {
		ret = io_folder_drop_text(&tier->journal, name, error);
	}
	return ret ? ret : io_folder_sync(&tier->journal, error);
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Opens the user's own folder, creates it if necessary, and makes its name durable. */
static int open_root(struct ioshape_tier *tier, const char *given, struct base_error *error)
{
	struct io_folder folder = IO_NO_FOLDER;
	struct stat ours;
	char *path = NULL, *absolute = realpath(given, NULL);
	int ret;

	if (!absolute)
		return base_fail(error, -errno, "cannot open the tier \"%s\"", given);
	if (asprintf(&path, "%s/ioshape-%u", strcmp(absolute, "/") ? absolute : "",
		     (unsigned)geteuid()) < 0) {
		path = NULL;
		ret = base_no_memory(error, "a path", strlen(absolute));
	} else {
		ret = io_folder_make_private(path, &ours, error);
	}
	if (!ret)
		ret = io_folder_open(&tier->root, path, error);
	/* Where every user may create folders, this process may not be allowed to list them. */
	if (!ret && !io_folder_open(&folder, absolute, NULL))
		ret = io_folder_sync(&folder, error);
	io_folder_close(&folder);
	free(path);
	free(absolute);
	return ret;
}

static int open_folders(struct ioshape_tier *tier, const char *given, struct base_error *error)
{
	char *journal = NULL;
	int ret = open_root(tier, given, error);

	if (ret)
		return ret;
	if (asprintf(&tier->files, "%s/files", tier->root.path) < 0)
		tier->files = NULL;
	if (asprintf(&journal, "%s/journal", tier->root.path) < 0)
		journal = NULL;
	if (!tier->files || !journal)
		ret = base_no_memory(error, "a path", strlen(tier->root.path));
	if (!ret) {
		tier->files_bytes = strlen(tier->files);
		ret = io_folder_make(tier->files, error);
	}
	if (!ret)
		ret = io_folder_make(journal, error);
	if (!ret)
		ret = io_folder_open(&tier->journal, journal, error);
	free(journal);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_open(struct ioshape_context *context, const char *folder,
				     const struct ioshape_tier_options *given,
				     struct ioshape_tier **out)
{
	struct ioshape_tier_options options;
	struct base_error error = { 0 };
	struct ioshape_tier *tier = NULL;
	int ret;

	if (!out)
		return base_null_argument("save");
	*out = NULL;
	ret = save_enter_path(context, folder, &options, sizeof(options), given,
			      "ioshape_tier_options", &error);
	if (!ret)
		ret = base_settings_take(BASE_SETTINGS_TIER, &options, &error);
	if (!ret) {
		tier = calloc(1, sizeof(*tier));
		if (!tier)
			ret = base_no_memory(&error, "a tier", sizeof(*tier));
	}
	if (!ret) {
		tier->of_groups.ops = &tier_for_groups;
		tier->context = context;
		tier->options = options;
		tier->root = tier->journal = (struct io_folder)IO_NO_FOLDER;
		ret = open_folders(tier, folder, &error);
	}
	if (ret)
		ioshape_tier_free(tier);
	else
		*out = tier;
	return base_return(ret, "save", folder, &error);
}

IOSHAPE_EXPORT void ioshape_tier_free(struct ioshape_tier *tier)
{
	if (!tier || save_enter(tier->context, NULL))
		return;
	io_folder_close(&tier->journal);
	io_folder_close(&tier->root);
	free(tier->files);
	free(tier);
}

/* ---- Paths of copies ------------------------------------------------------------------------- */

/* Appends the names of a path that does not exist yet to the part that exists. */
static int add_names(struct base_buffer *made, const char *names, const char *path,
		     struct base_error *error)
{
	while (*names) {
		const size_t bytes = strcspn(names, "/");

		if (bytes == 2 && !strncmp(names, "..", 2))
			return base_fail_reason_with(
				error, -EINVAL, "give a path without \"..\"",
				"cannot find a path on the tier for \"%s\": its "
				"directory does not exist, or it ends in \"..\"",
				path);
		if (bytes && !(bytes == 1 && *names == '.') &&
		    (base_buffer_append(made, "/", 1) || base_buffer_append(made, names, bytes)))
			return base_no_memory(error, "a path", strlen(path));
		names += bytes + (names[bytes] == '/');
	}
	return 0;
}

/* Resolves the links in as much of an absolute path as exists, without its last name. Sets *names
 * to the rest. Returns NULL if there is no memory. */
static char *resolve_above(char *path, const char **names)
{
	char *resolved, *slash = strrchr(path, '/');

	for (;;) {
		*names = slash + 1;
		*slash = 0;
		resolved = realpath(*path ? path : "/", NULL);
		*slash = '/';
		if (resolved || slash == path || errno == ENOMEM)
			return resolved;
		for (slash--; *slash != '/';)
			slash--;
	}
}

/* Computes the path on the tier of an absolute path. */
static int resolve(const struct ioshape_tier *tier, char *absolute, char **copy_path,
		   struct base_error *error)
{
	struct base_buffer made = { 0 };
	const char *names;
	char *above = resolve_above(absolute, &names);
	int ret = 0;

	if (!above || base_buffer_append(&made, tier->files, tier->files_bytes) ||
	    base_buffer_append(&made, above, strcmp(above, "/") ? strlen(above) : 0))
		ret = base_no_memory(error, "a path", strlen(absolute));
	if (!ret)
		ret = add_names(&made, names, absolute, error);
	if (!ret && base_buffer_append(&made, "", 1))
		ret = base_no_memory(error, "a path", made.bytes);
	free(above);
	*copy_path = (char *)made.data;
	return ret;
}

/* Makes a path absolute. A trailing slash is allowed: "runs/step-10/" is "runs/step-10". */
static int make_absolute(const char *path, char **absolute, struct base_error *error)
{
	size_t bytes = strlen(path);
	char *given;
	int ret;

	while (bytes > 1 && path[bytes - 1] == '/')
		bytes--;
	given = strndup(path, bytes);
	if (!given)
		return base_no_memory(error, "a path", bytes);
	ret = save_absolute_path(given, absolute, error);
	free(given);
	return ret;
}

static int find_copy(const struct ioshape_tier *tier, const char *path, char **copy_path,
		     struct base_error *error)
{
	const size_t root = strlen(tier->root.path);
	const char *destination;
	char *absolute;
	int ret = make_absolute(path, &absolute, error);

	if (ret)
		return ret;
	ret = resolve(tier, absolute, copy_path, error);
	free(absolute);
	if (ret)
		return ret;
	destination = tier_destination(tier, *copy_path);
	if (!strncmp(destination, tier->root.path, root) && destination[root] == '/')
		return base_fail_reason_with(error, -EINVAL, "give the path of its destination",
					     "\"%s\" is on the tier itself", path);
	if (!is_plain_path(destination))
		return base_fail_reason(error, -EINVAL, "\"%s\" is not a path that can be saved to",
					path);
	return 0;
}

int tier_enter(const struct ioshape_tier *tier, const char *path, char **copy_path,
	       struct base_error *error)
{
	int ret = save_enter(tier->context, error);

	*copy_path = NULL;
	if (!ret && (!path || !*path))
		ret = base_fail_reason(error, -EINVAL, "no path was given");
	if (!ret)
		ret = find_copy(tier, path, copy_path, error);
	if (ret) {
		free(*copy_path);
		*copy_path = NULL;
	}
	return ret;
}

/* ---- Links ----------------------------------------------------------------------------------- */

/*
 * A destination is recorded with its links resolved, and drained hours later. Meanwhile, another
 * user who may write to a directory above it could put a link there. The drain would follow it with
 * the rights of the user who saved, and overwrite a file elsewhere. So a drain follows only links
 * of root and of its own user. That is the kernel's rule for directories to which every user may
 * write (fs.protected_symlinks), here for all directories.
 */

/* The kernel follows no more links in one path. */
#define MOST_LINKS 40

/* Finds the first link of a path and cuts `path` behind it. *rest receives what follows the link.
 * Returns -ENOENT if the path has no link as far as it exists. */
static int find_link(char *path, const char **rest, struct stat *link)
{
	for (char *at = path + 1;; at++) {
		const char before = *at;

		if (before && before != '/')
			continue;
		*at = 0;
		if (lstat(path, link))
			return -errno;
		if (S_ISLNK(link->st_mode)) {
			*rest = before ? at + 1 : at;
			return 0;
		}
		*at = before;
		if (!before)
			return -ENOENT;
	}
}

/* Returns the path that a link stands for, followed by `rest`. The caller frees it. */
static char *follow(char *link, const char *rest)
{
	char text[PATH_MAX], *path = NULL;
	const ssize_t bytes = readlink(link, text, sizeof(text) - 1);

	if (bytes < 0)
		return NULL;
	text[bytes] = 0;
	strrchr(link, '/')[1] = 0;
	if (asprintf(&path, "%s%s%s%s", *text == '/' ? "" : link, text, *rest ? "/" : "", rest) < 0)
		return NULL;
	return path;
}

static int refuse(const char *destination, const char *path, uid_t owner, struct base_error *error)
{
	return base_fail_reason_with(
		error, -EPERM, "remove the link, or replace it with your own",
		"cannot save \"%s\": the link \"%s\" on its path belongs to user "
		"%u, who could redirect the save",
		destination, path, (unsigned)owner);
}

int tier_check_links(const char *destination, struct base_error *error)
{
	char *path = strdup(destination), *next;
	const char *rest = NULL;
	struct stat link;
	int ret = path ? 0 : base_no_memory(error, "a path", strlen(destination));

	for (int links = 0; !ret && !find_link(path, &rest, &link); links++) {
		if (link.st_uid && !base_is_own_user(link.st_uid))
			ret = refuse(destination, path, link.st_uid, error);
		else if (links == MOST_LINKS)
			ret = base_fail(error, -ELOOP, "cannot save \"%s\"", destination);
		if (ret)
			break;
		next = follow(path, rest);
		free(path);
		path = next;
		if (!path)
			ret = base_no_memory(error, "a path", strlen(destination));
	}
	free(path);
	return ret;
}

/* ---- State of copies ------------------------------------------------------------------------- */

/* Bytes below a folder, including files that are being written. */
struct below {
	const struct io_folder *folder;
	uint64_t bytes;
};

static int add_bytes(void *user, const char *name, struct base_error *error)
{
	struct below *below = user, inner = { .bytes = 0 };
	struct io_folder folder;
	struct io_entry entry;
	int ret = io_folder_look(below->folder, name, &entry, error);

	if (ret)
		return ret == -ENOENT ? 0 : ret;
	if (entry.kind == IO_FILE)
		below->bytes += entry.bytes;
	if (entry.kind != IO_FOLDER ||
	    /* the folder was removed meanwhile */
	    io_folder_open_in(&folder, below->folder, name, NULL))
		return 0;
	inner.folder = &folder;
	ret = io_folder_list(&folder, add_bytes, &inner, error);
	io_folder_close(&folder);
	below->bytes += inner.bytes;
	return ret;
}

/* Adds up the bytes of a directory with everything in it. Returns -ENOENT without an error message
 * if there is none. */
static int count_below(const char *path, uint64_t *bytes, struct base_error *error)
{
	struct io_folder folder;
	struct below below = { .folder = &folder };
	int ret = io_folder_open(&folder, path, NULL);

	if (ret)
		return ret == -ENOENT ? ret : base_fail(error, ret, "cannot open \"%s\"", path);
	ret = io_folder_list(&folder, add_bytes, &below, error);
	io_folder_close(&folder);
	*bytes = below.bytes;
	return ret;
}

int tier_look(const char *copy_path, struct io_entry *copy, uint64_t *bytes,
	      struct base_error *error)
{
	const int ret = io_look(copy_path, false, copy);

	if (ret)
		return ret == -ENOENT ? ret :
					base_fail(error, ret, "cannot look at \"%s\"", copy_path);
	if (bytes && copy->kind == IO_FOLDER)
		return count_below(copy_path, bytes, error);
	if (bytes)
		*bytes = copy->bytes;
	return 0;
}

/* ---- Removing copies ------------------------------------------------------------------------- */

/*
 * Removes a copy if it is still the one that the caller looked at. The caller holds the journal's
 * lock. Returns, without an error message, -EBUSY if a process reads the copy, -ENOENT if it is
 * gone, or -ESTALE if it is another one. With `durably`, the removal also survives a power failure.
 */
static int drop(const char *copy_path, const struct io_entry *copy, bool durably,
		struct base_error *error)
{
	static const char *const beside[] = { FORMAT_CHECKSUMS_SUFFIX, FORMAT_STATISTICS_SUFFIX };
	char *above = base_directory_of(copy_path), small[NAME_MAX + 1];
	const char *name = strrchr(copy_path, '/') + 1;
	struct io_folder folder = IO_NO_FOLDER;
	int ret;

	if (!above)
		return base_no_memory(error, "a path", strlen(copy_path));
	ret = io_folder_open(&folder, above, error);
	if (!ret)
		ret = io_folder_discard(&folder, name, copy, FORMAT_MANIFEST_NAME, error);
	/* The small files beside the file have no use any more. */
	for (size_t i = 0; !ret && i < ARRAY_LENGTH(beside); i++)
		if (snprintf(small, sizeof(small), "%s%s", name, beside[i]) <= NAME_MAX)
			ret = io_folder_drop_text(&folder, small, error);
	if (!ret && durably)
		ret = io_folder_sync(&folder, error);
	io_folder_close(&folder);
	free(above);
	return ret;
}

/* Removes the copy of a drained entry, if it is still the copy that was drained. *bytes receives
 * its size. Returns codes as drop() does. */
static int discard_copy(const struct tier_entry *entry, uint64_t *bytes, struct base_error *error)
{
	struct io_entry copy;
	int ret = tier_look(entry->copy_path, &copy, bytes, error);

	if (!ret && (copy.kind == IO_OTHER || copy.modified_ns != entry->copy_ns))
		ret = -ESTALE;
	return ret ? ret : drop(entry->copy_path, &copy, false, error);
}

int tier_discard(const struct ioshape_tier *tier, const struct tier_entry *entry, uint64_t *bytes,
		 struct base_error *error)
{
	const int ret = discard_copy(entry, bytes, error);

	if (ret)
		*bytes = 0;
	if (ret == -EBUSY)
		return 0;
	/* The copy is gone, or was replaced by one that will have an entry of its own. */
	return !ret || ret == -ENOENT || ret == -ESTALE ?
		       tier_journal_change(tier, entry, NULL, error) :
		       ret;
}

/* ---- Space ----------------------------------------------------------------------------------- */

static int count_bytes(const struct ioshape_tier *tier, uint64_t *bytes, struct base_error *error)
{
	struct below below = { .folder = &tier->root };
	const int ret = add_bytes(&below, "files", error);

	*bytes = below.bytes;
	return ret;
}

/* Computes how many bytes must be removed. */
static int find_lack(const struct ioshape_tier *tier, uint64_t needed, uint64_t *lack,
		     struct base_error *error)
{
	const uint64_t most = tier->options.most_bytes;
	struct fs_space space;
	uint64_t used = 0;
	int ret = fs_space_of_directory(tier->root.path, &space);

	if (ret)
		return base_fail(error, ret, "cannot look at \"%s\"", tier->root.path);
	*lack = needed > space.free_bytes ? needed - space.free_bytes : 0;
	if (!most)
		return 0;
	ret = count_bytes(tier, &used, error);
	if (__builtin_add_overflow(used, needed, &used))
		used = UINT64_MAX;
	*lack = MAX(*lack, used > most ? used - most : 0);
	return ret;
}

/* Returns whether an entry's copy may be removed for space: drained copies may, oldest first. */
static bool may_go(const struct tier_journal *journal, const struct tier_entry *entry)
{
	return entry->drained && tier_is_newest(journal, entry);
}

/* Checks that removable copies are large enough. Otherwise none is removed, because that would not
 * help. */
static int check_enough(const struct ioshape_tier *tier, const char *destination, uint64_t needed,
			uint64_t lack, const struct tier_journal *journal, struct base_error *error)
{
	struct io_entry copy;
	size_t waiting = 0;
	uint64_t bytes;

	for (size_t i = 0; i < journal->count && lack; i++) {
		const struct tier_entry *entry = &journal->all[i];

		waiting += !entry->drained;
		if (may_go(journal, entry) && !tier_look(entry->copy_path, &copy, &bytes, NULL))
			lack -= MIN(lack, bytes);
	}
	if (!lack)
		return 0;
	base_fail_reason_with(
		error, -ENOSPC, "drain it, or save directly",
		"cannot save \"%s\" on the tier \"%s\": it needs %s, and the saves there "
		"must be drained first (%zu saves)",
		destination, tier->root.path, BASE_SIZE(needed), waiting);
	base_error_space(error, needed, UINT64_MAX);
	return -ENOSPC;
}

static int free_bytes(const struct ioshape_tier *tier, const char *destination, uint64_t needed,
		      struct base_error *error)
{
	struct tier_journal journal;
	uint64_t lack = 0, bytes;
	int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	ret = find_lack(tier, needed, &lack, error);
	if (!ret)
		ret = check_enough(tier, destination, needed, lack, &journal, error);
	/*
	 * Filesystems may report removed files as free only later, so the bytes are counted here.
	 */
	for (size_t i = 0; !ret && lack && i < journal.count; i++) {
		if (!may_go(&journal, &journal.all[i]))
			continue;
		ret = tier_discard(tier, &journal.all[i], &bytes, error);
		lack -= MIN(lack, bytes);
	}
	tier_journal_free(&journal);
	return ret;
}

static int reserve_space(const struct ioshape_tier *tier, const char *destination, uint64_t needed,
			 struct base_error *error)
{
	struct io_hold hold = IO_NO_HOLD;
	uint64_t lack = 0;
	int ret = find_lack(tier, needed, &lack, error);

	if (ret || !lack)
		return ret;
	ret = tier_lock(tier, &hold, error);
	if (!ret)
		ret = free_bytes(tier, destination, needed, error);
	io_folder_let_go(&hold);
	return ret;
}

/* Removes the directory at a copy_path, because a directory cannot replace another one. It may be
 * removed if it is drained or was never kept. */
static int clear_path(const struct ioshape_tier *tier, const char *copy_path,
		      struct base_error *error)
{
	struct io_hold hold = IO_NO_HOLD;
	struct tier_journal journal = { 0 };
	const struct tier_entry *entry;
	struct io_entry copy;
	uint64_t bytes;
	int ret = tier_look(copy_path, &copy, NULL, error);

	if (ret || copy.kind != IO_FOLDER)
		return ret == -ENOENT ? 0 : ret;
	ret = tier_lock(tier, &hold, error);
	if (!ret)
		ret = tier_journal_read(tier, &journal, error);
	entry = ret ? NULL : tier_newest(&journal, copy_path);
	if (entry && entry->drained)
		ret = tier_discard(tier, entry, &bytes, error);
	if (!ret && !entry) {
		ret = drop(copy_path, &copy, false, error);
		/* Another process reads or replaces it, and the save will find out. */
		if (ret == -EBUSY || ret == -ENOENT || ret == -ESTALE)
			ret = 0;
	}
	tier_journal_free(&journal);
	io_folder_let_go(&hold);
	return ret;
}

int tier_prepare(const struct ioshape_tier *tier, const char *copy_path, uint64_t bytes,
		 struct base_error *error)
{
	const char *destination = tier_destination(tier, copy_path);
	char *above = base_directory_of(copy_path);
	int ret = above ? tier_check_links(destination, error) :
			  base_no_memory(error, "a path", strlen(copy_path));

	if (!ret)
		ret = clear_path(tier, copy_path, error);
	if (!ret)
		ret = reserve_space(tier, destination, bytes, error);
	if (!ret)
		ret = io_folder_make(above, error);
	free(above);
	return ret;
}

/* ---- Before a save --------------------------------------------------------------------------- */

/* Passes a path to the caller, or frees it if the call has failed. */
static void give(char **into, char *copy_path, int ret)
{
	*into = ret ? NULL : copy_path;
	if (ret)
		free(copy_path);
}

IOSHAPE_EXPORT int ioshape_tier_path(struct ioshape_tier *tier, const char *path, uint64_t bytes,
				     char **copy_path)
{
	struct base_error error = { 0 };
	char *found;
	int ret;

	if (!tier || !copy_path)
		return base_null_argument("save");
	ret = tier_enter(tier, path, &found, &error);
	if (!ret)
		ret = tier_prepare(tier, found, bytes, &error);
	give(copy_path, found, ret);
	return base_return(ret, "save", path, &error);
}

/* ---- After a save ---------------------------------------------------------------------------- */

/* Returns whether the copy waits to be drained, or was drained in its present state. */
static bool is_kept(const struct tier_journal *journal, const char *copy_path,
		    const struct io_entry *copy)
{
	const struct tier_entry *newest = tier_newest(journal, copy_path);

	return newest && (!newest->drained || newest->copy_ns == copy->modified_ns);
}

int tier_keep(const struct ioshape_tier *tier, const char *copy_path, uint32_t keep_last,
	      uint64_t keep_every, bool once, struct base_error *error)
{
	struct tier_entry entry = {
		.keep_last = keep_last,
		.keep_every = keep_every,
		.path = tier_destination(tier, copy_path),
	};
	struct tier_journal journal = { 0 };
	struct io_hold hold = IO_NO_HOLD;
	struct io_entry copy;
	int ret = tier_lock(tier, &hold, error);

	if (!ret)
		ret = tier_look(copy_path, &copy, NULL, error);
	if (ret == -ENOENT)
		base_fail_reason(error, ret, "\"%s\" was not saved on the tier \"%s\"", entry.path,
				 tier->root.path);
	if (!ret && copy.kind == IO_FOLDER &&
	    group_parse_name(strrchr(copy_path, '/') + 1).kind != GROUP_NAME_STEP)
		ret = base_fail_reason_with(
			error, -EINVAL, "save it directly",
			"\"%s\" is a directory, and not a checkpoint of a group", entry.path);
	if (!ret)
		ret = tier_journal_read(tier, &journal, error);
	if (!ret && !(once && is_kept(&journal, copy_path, &copy)))
		ret = journal_add(tier, &journal, &entry, error);
	tier_journal_free(&journal);
	io_folder_let_go(&hold);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_keep(struct ioshape_tier *tier, const char *path,
				     const struct ioshape_tier_keep_options *given)
{
	struct ioshape_tier_keep_options options;
	struct base_error error = { 0 };
	char *copy_path;
	int ret;

	if (!tier)
		return base_null_argument("save");
	ret = tier_enter(tier, path, &copy_path, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given,
					"ioshape_tier_keep_options", &error);
	if (!ret && options.reserved)
		ret = base_fail_reason(&error, -EINVAL, "options.reserved is %u", options.reserved);
	if (!ret)
		ret = tier_keep(tier, copy_path, options.keep_last, options.keep_every, false,
				&error);
	free(copy_path);
	return base_return(ret, "save", path, &error);
}

/* ---- The nearest copy ------------------------------------------------------------------------ */

/* A clock that counts whole seconds gives the start of the current second. Other clocks tick at
 * least a hundred times a second. */
#define SECOND_NS INT64_C(1000000000)
#define TICK_NS (SECOND_NS / 100)

/*
 * Converts a time of the tier's clock to the clock of the destination, which showed `there_ns`
 * between two readings of the tier's clock. If both may be the same clock, within the precision of
 * their ticks, the time stays as it is. The result is not later than the destination's present
 * time.
 */
static int64_t time_there(int64_t time_ns, int64_t before_ns, int64_t there_ns, int64_t after_ns)
{
	const int64_t tick_ns = there_ns % SECOND_NS ? TICK_NS : SECOND_NS;
	const bool same = there_ns > before_ns - tick_ns && there_ns < after_ns + TICK_NS;

	if (same)
		return MIN(time_ns, MAX(there_ns, after_ns));
	return MIN(time_ns + there_ns - after_ns, there_ns);
}

/* Returns the directory of a path. If the path is a link to a file, that is the directory of the
 * file, which a save would replace. */
static char *directory_of(const char *destination)
{
	char *real = realpath(destination, NULL);
	char *directory = base_directory_of(real ? real : destination);

	free(real);
	return directory;
}

int tier_clock_there(const struct ioshape_tier *tier, const char *destination, int64_t time_ns,
		     int64_t *there_ns, struct base_error *error)
{
	char *directory = directory_of(destination);
	int64_t before_ns = 0, now_there_ns = 0, after_ns = 0;
	int ret;

	if (!directory)
		return base_no_memory(error, "a path", strlen(destination));
	ret = io_time_in(tier->root.path, &before_ns, error);
	if (!ret)
		ret = io_time_in(directory, &now_there_ns, error);
	if (!ret)
		ret = io_time_in(tier->root.path, &after_ns, error);
	*there_ns = time_there(time_ns, before_ns, now_there_ns, after_ns);
	free(directory);
	return ret;
}

/* Returns the modification time up to which the destination counts as no newer than the copy. */
static int64_t age_there(const struct ioshape_tier *tier, const struct tier_entry *entry,
			 const char *destination, const struct io_entry *copy,
			 const struct io_entry *there)
{
	int64_t time_ns;

	if (entry && entry->drained && entry->copy_ns == copy->modified_ns)
		return copy->kind == IO_FOLDER || copy->bytes == there->bytes ?
			       entry->there_ns :
			       there->modified_ns - 1;
	/* If the destination's clock cannot be read, its time is assumed to be that of the tier. */
	if (tier_clock_there(tier, destination, copy->modified_ns, &time_ns, NULL))
		return copy->modified_ns;
	return time_ns;
}

static int find(const struct ioshape_tier *tier, const char *copy_path, struct base_error *error)
{
	const char *destination = tier_destination(tier, copy_path);
	struct tier_journal journal;
	struct io_entry copy, there;
	int64_t age;
	int ret = tier_look(copy_path, &copy, NULL, error);

	if (ret)
		return ret;
	/* If the destination cannot be read for any reason, the copy is used. */
	if (io_look(destination, true, &there))
		return 0;
	ret = tier_journal_read(tier, &journal, error);
	if (ret)
		return ret;
	age = age_there(tier, tier_newest(&journal, copy_path), destination, &copy, &there);
	tier_journal_free(&journal);
	return there.modified_ns > age ? -ENOENT : 0;
}

IOSHAPE_EXPORT int ioshape_tier_find(struct ioshape_tier *tier, const char *path, char **copy_path)
{
	struct base_error error = { 0 };
	char *found;
	int ret;

	if (!tier || !copy_path)
		return base_null_argument("load");
	ret = tier_enter(tier, path, &found, &error);
	if (!ret)
		ret = find(tier, found, &error);
	give(copy_path, found, ret);
	return ret == -ENOENT ? ret : base_return(ret, "load", path, &error);
}

/* ---- Listing copies -------------------------------------------------------------------------- */

/* State of the public list. The text of a row is the path of the copy, and the destination is the
 * end of that text. */
struct copy_list {
	const struct ioshape_tier *tier;
	struct ioshape_tier_copy *copies;
	size_t count;
	char *text; /* memory for the next text */
};

static int list_one(struct copy_list *listing, const struct tier_entry *entry,
		    struct base_error *error)
{
	struct ioshape_tier_copy *listed = &listing->copies[listing->count];
	struct io_entry copy;
	uint64_t bytes;
	int ret = tier_look(entry->copy_path, &copy, &bytes, error);

	if (ret)
		return ret == -ENOENT ? 0 : ret;
	*listed = (struct ioshape_tier_copy){
		.path = tier_destination(listing->tier, listing->text),
		.copy_path = listing->text,
		.bytes = bytes,
		.saved_s = copy.modified,
		.number = entry->drained ? 0 : entry->number,
		.directory = copy.kind == IO_FOLDER,
	};
	listing->text = stpcpy(listing->text, entry->copy_path) + 1;
	listing->count++;
	return 0;
}

/* Makes the list in one piece of memory, in which the texts follow the rows. */
static int list(const struct ioshape_tier *tier, struct ioshape_tier_copy **copies, size_t *count,
		struct base_error *error)
{
	struct copy_list listing = { .tier = tier };
	struct tier_journal journal;
	size_t bytes = 1;
	int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	for (size_t i = 0; i < journal.count; i++)
		bytes += sizeof(*listing.copies) + strlen(journal.all[i].copy_path) + 1;
	listing.copies = malloc(bytes);
	if (!listing.copies)
		ret = base_no_memory(error, "a list of copies", bytes);
	listing.text = (char *)(listing.copies + journal.count);
	for (int drained = 0; drained < 2; drained++) {
		for (size_t i = 0; !ret && i < journal.count; i++) {
			const struct tier_entry *entry = &journal.all[i];

			if (entry->drained == drained && tier_is_newest(&journal, entry))
				ret = list_one(&listing, entry, error);
		}
	}
	tier_journal_free(&journal);
	if (ret)
		free(listing.copies);
	*copies = ret ? NULL : listing.copies;
	*count = ret ? 0 : listing.count;
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_list(struct ioshape_tier *tier, struct ioshape_tier_copy **copies,
				     size_t *count)
{
	struct base_error error = { 0 };
	int ret;

	if (!tier || !copies || !count)
		return base_null_argument("list");
	*copies = NULL;
	*count = 0;
	ret = save_enter(tier->context, &error);
	if (!ret)
		ret = list(tier, copies, count, &error);
	return base_return(ret, "list", tier->root.path, &error);
}

/* ---- Forgetting copies that can never be drained --------------------------------------------- */

static bool waits(const struct tier_journal *journal, const char *copy_path)
{
	const struct tier_entry *newest = tier_newest(journal, copy_path);

	return newest && !newest->drained;
}

/* Removes the copy of a waiting entry, durably. A copy that came back after a power failure would
 * have no entry and look as if it had not been given up. */
static int forget_copy(const struct ioshape_tier *tier, const char *copy_path, uint64_t *bytes,
		       struct base_error *error)
{
	struct io_entry copy;
	int ret = tier_look(copy_path, &copy, bytes, error);

	if (!ret)
		ret = drop(copy_path, &copy, true, error);
	if (ret == -EBUSY || ret == -ESTALE)
		base_fail_reason_with(error, ret, "try again after that has ended",
				      "cannot forget \"%s\": it is being %s on the tier \"%s\"",
				      tier_destination(tier, copy_path),
				      ret == -EBUSY ? "read" : "saved", tier->root.path);
	return ret == -ENOENT ? 0 : ret; /* -ENOENT: it was removed by hand */
}

/* Removes the copy and its entries. The caller holds the journal's lock. `given` may be a path
 * whose links have changed since it was kept. */
static int forget_kept(const struct ioshape_tier *tier, const char *given, const char *copy_path,
		       uint64_t *bytes, struct base_error *error)
{
	const char *kept = copy_path;
	struct tier_journal journal;
	int ret = tier_journal_read(tier, &journal, error);

	if (ret)
		return ret;
	for (size_t i = 0; i < journal.count; i++) {
		if (!strcmp(journal.all[i].path, given) &&
		    waits(&journal, journal.all[i].copy_path))
			kept = journal.all[i].copy_path;
	}
	if (!waits(&journal, kept))
		ret = base_fail_reason(error, -ENOENT,
				       "no save for \"%s\" waits on the tier \"%s\"",
				       tier_destination(tier, copy_path), tier->root.path);
	if (!ret)
		ret = forget_copy(tier, kept, bytes, error);
	/* Entries before the newest go, too, because the newest one only supersedes them. */
	for (size_t i = 0; i < journal.count && !ret; i++) {
		if (!strcmp(journal.all[i].copy_path, kept))
			ret = tier_journal_change(tier, &journal.all[i], NULL, error);
	}
	tier_journal_free(&journal);
	return ret;
}

static int forget(const struct ioshape_tier *tier, const char *given, const char *copy_path,
		  uint64_t *bytes, struct base_error *error)
{
	struct io_hold drain = IO_NO_HOLD, hold = IO_NO_HOLD;
	int ret = tier_lock_drain(tier, &drain, error);

	if (ret == -EBUSY)
		base_fail_reason_with(error, ret, "end that drain, or try again after it has ended",
				      "cannot forget \"%s\": a process is draining the tier \"%s\"",
				      given, tier->root.path);
	if (!ret)
		ret = tier_lock(tier, &hold, error);
	if (!ret)
		ret = forget_kept(tier, given, copy_path, bytes, error);
	io_folder_let_go(&hold);
	io_folder_let_go(&drain);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_forget(struct ioshape_tier *tier, const char *path, uint64_t *bytes)
{
	struct base_error error = { 0 };
	uint64_t of_copy = 0;
	char *copy_path;
	int ret;

	if (!tier)
		return base_null_argument("forget");
	ret = tier_enter(tier, path, &copy_path, &error);
	if (!ret)
		ret = forget(tier, path, copy_path, &of_copy, &error);
	free(copy_path);
	if (bytes)
		*bytes = ret ? 0 : of_copy;
	return base_return(ret, "forget", path, &error);
}
