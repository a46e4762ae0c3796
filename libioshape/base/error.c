/* SPDX-License-Identifier: Apache-2.0 */
/* Errors as values, their messages, the log, and the last error that callers can ask for. */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>

/* ---- Cleaning texts that contain foreign names ----------------------------------------------- */

/* Follows Unicode 15, table 3-7. */
size_t base_utf8_bytes(const char *text, size_t size)
{
	const uint8_t *at = (const uint8_t *)text;
	uint8_t lowest = 0x80, highest = 0xbf;
	size_t need;

	if (at[0] < 0x80)
		return at[0] ? 1 : 0;
	if (at[0] < 0xc2 || at[0] > 0xf4)
		return 0;
	need = at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
	if (size < need)
		return 0;
	if (at[0] == 0xe0)
		lowest = 0xa0;
	else if (at[0] == 0xed)
		highest = 0x9f;
	else if (at[0] == 0xf0)
		lowest = 0x90;
	else if (at[0] == 0xf4)
		highest = 0x8f;
	if (at[1] < lowest || at[1] > highest)
		return 0;
	for (size_t i = 2; i < need; i++)
		if ((at[i] & 0xc0) != 0x80)
			return 0;
	return need;
}

/*
 * Returns whether a terminal would act on a character or not show it: C0, DEL, C1, line separators,
 * direction marks and invisible characters.
 */
static bool acts(const char *character, size_t bytes)
{
	const uint8_t *at = (const uint8_t *)character;

	if (bytes == 1)
		return at[0] < 0x20 || at[0] == 0x7f;
	if (bytes == 2)
		return at[0] == 0xc2 && at[1] < 0xa0;
	if (bytes == 3 && at[0] == 0xe2 && at[1] == 0x80) /* U+200B-200F, U+2028-202E */
		return (at[2] >= 0x8b && at[2] <= 0x8f) || (at[2] >= 0xa8 && at[2] <= 0xae);
	if (bytes == 3 && at[0] == 0xe2 && at[1] == 0x81) /* U+2060-206F */
		return at[2] >= 0xa0 && at[2] <= 0xaf;
	return bytes == 3 && !memcmp(at, "\xef\xbb\xbf", 3);
}

void base_make_plain(char *text)
{
	size_t left = strlen(text), bytes;
	char *into = text;

	for (const char *from = text; left; from += bytes, left -= bytes) {
		bytes = base_utf8_bytes(from, left);
		if (bytes && !acts(from, bytes)) {
			memmove(into, from, bytes);
			into += bytes;
		} else {
			*into++ = '?';
			bytes = MAX(bytes, 1);
		}
	}
	*into = 0;
}

/* ---- Errors ---------------------------------------------------------------------------------- */

IOSHAPE_EXPORT const char *ioshape_strerror(int code)
{
	const char *text = NULL;

	switch (code) {
	case 0:
		return "success";
	case IOSHAPE_E_FORMAT:
		return "not a torch zip that ioshape can read";
	case IOSHAPE_E_DAMAGED:
		return "the file is damaged";
	case IOSHAPE_E_LIMIT:
		return "above a limit";
	case IOSHAPE_E_NO_TABLE:
		return "the file has no tensor table";
	case IOSHAPE_E_COORDINATOR:
		return "the slot coordinator cannot be used";
	case IOSHAPE_E_SKIPPED:
		return "skipped because the free space is too small";
	case IOSHAPE_E_ALARM:
		return "the content looks wrong, compared with the previous checkpoint";
	case IOSHAPE_E_CHANGED:
		return "the data changed before it was copied";
	case IOSHAPE_E_UNUSABLE:
		return "checkpoints exist, but none can be used";
	}
	/*
	 * In the C locale, strerror_l() neither translates nor shares a buffer between threads.
	 * That locale is a constant, so it need not be freed. strerrordesc_np() exists only since
	 * glibc 2.32.
	 */
	if (code < 0 && code >= -EHWPOISON)
		text = strerror_l(-code, newlocale(LC_ALL_MASK, "C", (locale_t)0));
	return text ? text : "unknown error";
}

static void put(char *into, size_t bytes, const char *text)
{
	const size_t length = strnlen(text, bytes - 1);

	/* memmove(), because `text` may be `into` itself. */
	memmove(into, text, length);
	into[length] = 0;
}

/* Joins sentence and remedy in one line. */
static void error_line(const struct base_error *error, char *into, size_t bytes)
{
	put(into, bytes, error->sentence);
	if (*error->remedy) {
		put(into + strlen(into), bytes - strlen(into), "; ");
		put(into + strlen(into), bytes - strlen(into), error->remedy);
	}
}

/*
 * Appends `end` to a text, which is shortened if needed. `end` states the reason and must not be
 * lost, even if a path is very long.
 */
static void shorten(char *text, size_t bytes, const char *end)
{
	const size_t most = bytes - strlen(end) - 1;

	if (strlen(text) > most)
		memcpy(text + most - 3, "...", 4);
	snprintf(text + strlen(text), bytes - strlen(text), "%s", end);
}

/*
 * Fills in an error. `reason` is appended to the sentence. If `remedy` is NULL, the error keeps its
 * own.
 */
__attribute__((format(printf, 5, 0))) static void fill(struct base_error *error, int code,
						       const char *reason, const char *remedy,
						       const char *format, va_list args)
{
	char whole[2 * PATH_MAX];

	error->code = code;
	vsnprintf(whole, sizeof(whole), format, args);
	if (remedy)
		put(error->remedy, sizeof(error->remedy), remedy);
	base_make_plain(error->remedy);
	put(error->sentence, sizeof(error->sentence), whole);
	base_make_plain(error->sentence);
	shorten(error->sentence, sizeof(error->sentence), reason);
	error_line(error, error->text, sizeof(error->text));
}

int base_fail_with(struct base_error *error, int code, const char *remedy, const char *format, ...)
{
	char reason[128] = "";
	va_list args;

	if (!error || error->code)
		return code;
	/* For the library's own codes, the sentence already states the reason. */
	if (code > -4096)
		snprintf(reason, sizeof(reason), ": %.120s", ioshape_strerror(code));
	va_start(args, format);
	fill(error, code, reason, remedy, format, args);
	va_end(args);
	return code;
}

int base_fail_reason_with(struct base_error *error, int code, const char *remedy,
			  const char *format, ...)
{
	va_list args;

	if (!error || error->code)
		return code;
	va_start(args, format);
	fill(error, code, "", remedy, format, args);
	va_end(args);
	return code;
}

int base_rephrase_with(struct base_error *error, int code, const char *remedy, const char *format,
		       ...)
{
	va_list args;

	if (!error)
		return code;
	va_start(args, format);
	fill(error, code, "", remedy, format, args);
	va_end(args);
	return code;
}

const char *base_words(char into[BASE_ERROR_TEXT_BYTES], const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(into, BASE_ERROR_TEXT_BYTES, format, args);
	va_end(args);
	return into;
}

int base_no_memory(struct base_error *error, const char *purpose, uint64_t bytes)
{
	return base_fail_reason_with(error, -ENOMEM,
				     "free memory or lower the limits in the options",
				     "cannot allocate %s for %s", BASE_SIZE(bytes), purpose);
}

int base_propagate(struct base_error *error, const struct base_error *inner)
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

	/* 1023.95 would be printed as 1024.0. */
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

/* ---- Details of an error --------------------------------------------------------------------- */

/* Returns whether the error lacks a number, and marks it as set. */
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

/* ---- The last error of a thread -------------------------------------------------------------- */

/* Per thread, so that threads that share a context do not read each other's errors. */
static _Thread_local struct base_error last;
static _Thread_local struct ioshape_error shown;

int base_return(int code, const char *operation, const char *path, const struct base_error *error)
{
	if (code >= 0)
		return code;
	/* An inner public call has already stored and garbled this error. */
	if (error == &last)
		return code;
	last = *error;
	if (!last.code)
		base_fail_reason(&last, code, "cannot %s: %s", operation, ioshape_strerror(code));
	base_error_about(&last, operation, path);
	base_garble(last.sentence);
	base_garble(last.remedy);
	return code;
}

int base_null_argument(const char *operation)
{
	struct base_error error = { 0 };

	base_fail_reason(&error, -EINVAL, "required argument is NULL");
	return base_return(-EINVAL, operation, NULL, &error);
}

const struct base_error *base_last_error(void)
{
	return &last;
}

IOSHAPE_EXPORT const struct ioshape_error *ioshape_last_error(void)
{
	const bool has_space = last.known & BASE_KNOWS_SPACE;

	shown = (struct ioshape_error){
		.size = sizeof(shown),
		.code = last.code,
		.operation = last.operation ? last.operation : "",
		.path = last.path,
		.sentence = last.sentence,
		.remedy = last.remedy,
		.record = last.record,
		.offset = last.known & BASE_KNOWS_OFFSET ? last.offset : UINT64_MAX,
		.needed_bytes = has_space ? last.needed_bytes : UINT64_MAX,
		.free_bytes = has_space ? last.free_bytes : UINT64_MAX,
		.rank = last.known & BASE_KNOWS_RANK ? (int64_t)last.rank : -1,
	};
	return &shown;
}

/* ---- The log --------------------------------------------------------------------------------- */

void base_log(const struct base_log *log, enum ioshape_log_level level, const char *format, ...)
{
	char line[BASE_ERROR_TEXT_BYTES];
	va_list args;

	if (!log || !log->write || level > log->level)
		return;
	va_start(args, format);
	vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	base_make_plain(line);
	log->write(log->user, level, line);
}
