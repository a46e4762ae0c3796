/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>

IOSHAPE_EXPORT const char *ioshape_strerror(int code)
{
	const char *text = NULL;

	switch (code) {
	case 0:
		return "success";
	case IOSHAPE_E_FORMAT:
		return "not a torch zip that this library reads";
	case IOSHAPE_E_DAMAGED:
		return "the file is damaged";
	case IOSHAPE_E_LIMIT:
		return "above a limit";
	case IOSHAPE_E_NO_TABLE:
		return "the file has no tensor table";
	case IOSHAPE_E_COORDINATOR:
		return "the coordinator of slots cannot be used";
	case IOSHAPE_E_SKIPPED:
		return "skipped for want of space";
	case IOSHAPE_E_UNCHANGED:
		return "nothing large has changed since the save before";
	case IOSHAPE_E_CHANGED:
		return "what was saved has changed before it was copied";
	case IOSHAPE_E_UNUSABLE:
		return "there are checkpoints, and none can be used";
	}
	/*
	 * In the C locale this neither translates nor shares a buffer between threads, and that
	 * locale is a constant: nothing to free. strerrordesc_np() came with glibc 2.32 only.
	 */
	if (code < 0 && code >= -EHWPOISON)
		text = strerror_l(-code, newlocale(LC_ALL_MASK, "C", (locale_t)0));
	return text ? text : "unknown error";
}

static void put(char *into, size_t bytes, const char *text)
{
	const size_t length = strnlen(text, bytes - 1);

	memcpy(into, text, length);
	into[length] = 0;
}

/* The sentence of a path that is longer than it may be: the end says why, and must not be lost. */
static void shorten(char *text, size_t bytes, const char *end)
{
	const size_t most = bytes - strlen(end) - 1;

	if (strlen(text) > most)
		memcpy(text + most - 3, "...", 4);
	snprintf(text + strlen(text), bytes - strlen(text), "%s", end);
}

/* How long the sentence is that this beginning of a format makes. */
static int length_of(const char *format, int bytes, va_list args)
{
	char beginning[BASE_ERROR_TEXT_BYTES];

	snprintf(beginning, sizeof(beginning), "%.*s", bytes, format);
	/* The whole of it has been checked against its arguments where it stands. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	return vsnprintf(NULL, 0, beginning, args);
#pragma GCC diagnostic pop
}

/*
 * The remedy is told from the sentence in the format, where the two are ours: in what is put into
 * it, anything may stand.
 */
__attribute__((format(printf, 4, 0))) static void
fill(struct base_error *error, int code, const char *reason, const char *format, va_list args)
{
	const char *separator = strstr(format, BASE_REMEDY);
	char whole[2 * PATH_MAX];
	int length = 0;
	va_list again;

	error->code = code;
	if (separator) {
		va_copy(again, args);
		length = length_of(format, (int)(separator - format), again);
		va_end(again);
	}
	vsnprintf(whole, sizeof(whole), format, args);
	if (separator && (size_t)length < sizeof(whole)) {
		whole[length] = 0;
		put(error->remedy, sizeof(error->remedy), whole + length + 1);
		base_make_plain(error->remedy);
	}
	put(error->sentence, sizeof(error->sentence), whole);
	base_make_plain(error->sentence);
	shorten(error->sentence, sizeof(error->sentence), reason);
	base_error_line(error, error->text, sizeof(error->text));
}

int base_fail(struct base_error *error, int code, const char *format, ...)
{
	char reason[128] = "";
	va_list args;

	if (!error || error->code)
		return code;
	/* What a code of our own means, the sentence says better. */
	if (code > -4096)
		snprintf(reason, sizeof(reason), ": %.120s", ioshape_strerror(code));
	va_start(args, format);
	fill(error, code, reason, format, args);
	va_end(args);
	return code;
}

int base_refuse(struct base_error *error, int code, const char *format, ...)
{
	va_list args;

	if (!error || error->code)
		return code;
	va_start(args, format);
	fill(error, code, "", format, args);
	va_end(args);
	return code;
}

int base_rephrase(struct base_error *error, int code, const char *format, ...)
{
	va_list args;

	if (!error)
		return code;
	va_start(args, format);
	fill(error, code, "", format, args);
	va_end(args);
	return code;
}

int base_no_memory(struct base_error *error, const char *purpose, uint64_t bytes)
{
	return base_refuse(error, -ENOMEM,
			   "cannot allocate %s for %s" BASE_REMEDY
			   "free memory or lower the limits in the options",
			   BASE_SIZE(bytes), purpose);
}

int base_pass_on(struct base_error *error, const struct base_error *inner)
{
	if (error && !error->code)
		*error = *inner;
	return inner->code;
}

void base_garble(char *text)
{
#ifdef IOSHAPE_GARBLE
	for (; *text; text++) {
		if (*text >= 'a' && *text <= 'z')
			*text = (char)('a' + (*text - 'a' + 1) % 26);
		else if (*text >= 'A' && *text <= 'Z')
			*text = (char)('A' + (*text - 'A' + 1) % 26);
	}
#else
	(void)text;
#endif
}

const char *base_size(char into[BASE_SIZE_BYTES], uint64_t bytes)
{
	static const char *const units[] = { "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	double size = (double)bytes / 1024;
	size_t unit = 0;

	/* 1023.95 would be shown as 1024.0. */
	while (size >= 1023.95 && unit + 1 < ARRAY_LENGTH(units)) {
		size /= 1024;
		unit++;
	}
	if (bytes < KIB)
		snprintf(into, BASE_SIZE_BYTES, "%u bytes", (unsigned)bytes);
	else
		snprintf(into, BASE_SIZE_BYTES, "%.1f %s", size, units[unit]);
	return into;
}

void base_error_line(const struct base_error *error, char *into, size_t bytes)
{
	put(into, bytes, error->sentence);
	if (*error->remedy) {
		put(into + strlen(into), bytes - strlen(into), "; ");
		put(into + strlen(into), bytes - strlen(into), error->remedy);
	}
}

/* ---- What a sentence is about ---------------------------------------------------------------- */

static bool lacks(struct base_error *error, unsigned what)
{
	bool wanted = error && error->code && !(error->known & what);

	if (wanted)
		error->known |= what;
	return wanted;
}

void base_error_about(struct base_error *error, const char *operation, const char *path)
{
	if (!error || !error->code)
		return;
	if (!error->operation)
		error->operation = operation;
	if (path && !*error->path)
		put(error->path, sizeof(error->path), path);
}

void base_error_in_record(struct base_error *error, const char *record)
{
	if (error && error->code && !*error->record)
		put(error->record, sizeof(error->record), record);
}

void base_error_at(struct base_error *error, uint64_t offset)
{
	if (lacks(error, BASE_KNOWS_OFFSET))
		error->offset = offset;
}

void base_error_of_rank(struct base_error *error, uint32_t rank)
{
	if (lacks(error, BASE_KNOWS_RANK))
		error->rank = rank;
}

void base_error_space(struct base_error *error, uint64_t needed_bytes, uint64_t free_bytes)
{
	if (lacks(error, BASE_KNOWS_SPACE)) {
		error->needed_bytes = needed_bytes;
		error->free_bytes = free_bytes;
	}
}
