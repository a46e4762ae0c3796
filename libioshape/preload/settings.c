/* SPDX-License-Identifier: Apache-2.0 */
/* Variables of the preload library. */
#define _GNU_SOURCE
#include "preload/preload.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

#define USUAL_BYTES (UINT64_C(64) << 20)
#define USUAL_WAIT_S 60u
#define MOST_WAIT_S 86400u
#define HOLDER "ioshape-holder"

/*
 * Programs that never take slots. Servers that coordinators and shared filesystems need would wait
 * for themselves.
 */
#define BUILT_IN HOLDER ",redis-server,redis-check-aof,valkey-server,ceph-osd,ceph-mon,ceph-fuse"

struct preload_settings preload_settings;

/* The program may change its environment at any time, so the holder's is a copy. */
static char copied[128 << 10];

/* ---- Values ---------------------------------------------------------------------------------- */

/* Returns the number that a text such as "60" or "64M" means, or `otherwise`. */
static uint64_t number_of(const char *text, uint64_t otherwise)
{
	static const char units[] = "KMGT";
	const char *unit;
	char *end;
	uint64_t value;
	unsigned shift;

	if (!text || *text < '0' || *text > '9')
		return otherwise;
	errno = 0;
	value = strtoull(text, &end, 10);
	unit = *end ? strchr(units, *end & ~0x20) : NULL;
	shift = unit ? 10 * (unsigned)(unit - units + 1) : 0;
	if (errno || (*end && (!unit || end[1])) || value > UINT64_MAX >> shift)
		return otherwise;
	return value << shift;
}

/* Calls `matches` for each entry of a list with commas, until it returns true. */
static bool any_entry(const char *list,
		      bool (*matches)(const char *entry, size_t bytes, const char *subject),
		      const char *subject)
{
	while (*list) {
		size_t bytes = strcspn(list, ",");

		if (bytes && matches(list, bytes, subject))
			return true;
		list += bytes + (list[bytes] == ',');
	}
	return false;
}

static bool is_entry(const char *entry, size_t bytes, const char *subject)
{
	return strlen(subject) == bytes && !memcmp(entry, subject, bytes);
}

/* Returns whether an entry is the path `subject` or a folder above it. */
static bool is_above(const char *entry, size_t bytes, const char *subject)
{
	if (*entry != '/')
		return false;
	while (bytes > 1 && entry[bytes - 1] == '/')
		bytes--;
	return !strncmp(entry, subject, bytes) &&
	       (bytes == 1 || !subject[bytes] || subject[bytes] == '/');
}

bool preload_excludes(const char *path)
{
	return any_entry(preload_settings.excluded, is_above, path);
}

/* ---- The program ----------------------------------------------------------------------------- */

/* Fills in the path of the holder, which is in the folder of this library. */
static bool find_holder(void)
{
	char *holder = preload_settings.holder;
	Dl_info library;

	if (!dladdr(&preload_settings, &library) || !realpath(library.dli_fname, holder))
		return false;
	strcpy(strrchr(holder, '/') + 1, HOLDER);
	return true;
}

/* Copies the environment for the holder, without the preloaded libraries. What does not fit is left
 * out. */
static void copy_environment(void)
{
	char *at = copied;
	size_t count = 0;

	for (char **variable = environ; *variable && count < PRELOAD_VARIABLES; variable++) {
		size_t bytes = strlen(*variable) + 1;

		if (bytes > (size_t)(copied + sizeof(copied) - at) ||
		    !strncmp(*variable, "LD_PRELOAD=", 11))
			continue;
		memcpy(at, *variable, bytes);
		preload_settings.environment[count++] = at;
		at += bytes;
	}
}

/* Returns whether this program or its user is excluded. */
static bool is_excluded(void)
{
	const char *name = program_invocation_short_name;
	const char *slash;
	char path[MAILBOX_PATH_BYTES], user[32];
	ssize_t bytes = readlink("/proc/self/exe", path, sizeof(path) - 1);

	path[bytes > 0 ? bytes : 0] = 0;
	slash = strrchr(path, '/');
	snprintf(preload_settings.program, MAILBOX_PROGRAM_BYTES, "%s", name);
	snprintf(user, sizeof(user), "uid=%lu", (unsigned long)getuid());
	for (int i = 0; i < 2; i++) {
		const char *list = i ? preload_settings.excluded : BUILT_IN;

		if (any_entry(list, is_entry, name) || any_entry(list, is_entry, user) ||
		    (slash && any_entry(list, is_entry, slash + 1)))
			return true;
	}
	return false;
}

int preload_restrictions(void)
{
	return prctl(PR_GET_SECCOMP) * 2 + prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0);
}

bool preload_settings_read(void)
{
	const char *on = getenv("IOSHAPE_PRELOAD"), *all = getenv("IOSHAPE_PRELOAD_ALL");
	const char *excluded = getenv("IOSHAPE_PRELOAD_EXCLUDE");
	uint64_t wait_s;

	if (getauxval(AT_SECURE) || (on && !strcmp(on, "off")) || !environ)
		return false;
	preload_settings.everywhere = all && !strcmp(all, "yes");
	preload_settings.bytes = number_of(getenv("IOSHAPE_PRELOAD_BYTES"), USUAL_BYTES);
	wait_s = number_of(getenv("IOSHAPE_PRELOAD_WAIT_S"), USUAL_WAIT_S);
	preload_settings.wait_ms = (wait_s < MOST_WAIT_S ? wait_s : MOST_WAIT_S) * 1000;
	snprintf(preload_settings.excluded, MAILBOX_PATH_BYTES, "%s", excluded ? excluded : "");
	if (is_excluded() || !find_holder())
		return false;
	copy_environment();
	preload_settings.restrictions = preload_restrictions();
	*(void **)&preload_settings.clone = dlsym(RTLD_NEXT, "clone");
	return preload_settings.clone;
}
