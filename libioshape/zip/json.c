/* SPDX-License-Identifier: Apache-2.0 */
#include "zip/json.h"

#include "zip/zip.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int zip_json_fail(struct zip_json *json, int code, const char *problem)
{
	if (!json->problem)
		json->problem = problem;
	return code;
}

static int malformed(struct zip_json *json, const char *problem)
{
	return zip_json_fail(json, IOSHAPE_E_DAMAGED, problem);
}

/* ---- Characters ------------------------------------------------------------------------------ */

/* The next one, 0 at the end: a 0 in the text is never allowed either. */
static char peek(const struct zip_json *json)
{
	return json->at < json->bytes ? json->text[json->at] : '\0';
}

static void skip_space(struct zip_json *json)
{
	while (json->at < json->bytes && memchr(" \t\n\r", json->text[json->at], 4))
		json->at++;
}

/* Takes this character, behind white space, if it is the next. */
static bool take(struct zip_json *json, char character)
{
	skip_space(json);
	if (peek(json) != character)
		return false;
	json->at++;
	return true;
}

static bool is_digit(char character)
{
	return character >= '0' && character <= '9';
}

/* ---- Strings --------------------------------------------------------------------------------- */

/* What follows a backslash, and what it stands for; the slash need not be escaped. */
static const char escape_letters[] = "\"\\bfnrt/", escaped_characters[] = "\"\\\b\f\n\r\t/";

/* Where decoded bytes go; nowhere if `into` is NULL. */
struct sink {
	char *into;
	size_t room; /* without the final 0 */
	size_t bytes;
};

static int sink_put(struct zip_json *json, struct sink *sink, const char *text, size_t bytes)
{
	if (!sink->into)
		return 0;
	if (bytes > sink->room - sink->bytes)
		return zip_json_fail(json, IOSHAPE_E_LIMIT, "a string is too long");
	memcpy(sink->into + sink->bytes, text, bytes);
	sink->bytes += bytes;
	return 0;
}

static int hex4(struct zip_json *json, uint32_t *value)
{
	static const char digits[] = "0123456789abcdef0123456789ABCDEF";
	const char *digit;

	*value = 0;
	for (int i = 0; i < 4; i++, json->at++) {
		digit = peek(json) ? strchr(digits, peek(json)) : NULL;
		if (!digit)
			return malformed(json, "\\u has no four hexadecimal digits");
		*value = *value * 16 + (uint32_t)(digit - digits) % 16;
	}
	return 0;
}

static size_t encode_utf8(char into[4], uint32_t point)
{
	static const uint8_t marks[] = { 0, 0, 0xc0, 0xe0, 0xf0 };
	size_t bytes = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;

	for (size_t i = bytes; i-- > 1; point >>= 6)
		into[i] = (char)(0x80 | (point & 0x3f));
	into[0] = (char)(marks[bytes] | point);
	return bytes;
}

/* Behind "\u". */
static int read_point(struct zip_json *json, struct sink *sink)
{
	uint32_t point, low;
	char utf8[4];
	int ret = hex4(json, &point);

	if (ret)
		return ret;
	if (point >= 0xd800 && point < 0xdc00) {
		if (json->bytes - json->at < 2 || memcmp(json->text + json->at, "\\u", 2))
			return malformed(json, "half a surrogate pair");
		json->at += 2;
		ret = hex4(json, &low);
		if (ret)
			return ret;
		if (low < 0xdc00 || low > 0xdfff)
			return malformed(json, "half a surrogate pair");
		point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
	} else if (point >= 0xdc00 && point <= 0xdfff) {
		return malformed(json, "half a surrogate pair");
	}
	if (!point)
		return malformed(json, "a NUL in a string");
	return sink_put(json, sink, utf8, encode_utf8(utf8, point));
}

/* Behind a backslash. */
static int read_escape(struct zip_json *json, struct sink *sink)
{
	const char *letter;

	if (peek(json) == 'u') {
		json->at++;
		return read_point(json, sink);
	}
	letter = peek(json) ? strchr(escape_letters, peek(json)) : NULL;
	if (!letter)
		return malformed(json, "an unknown escape");
	json->at++;
	return sink_put(json, sink, &escaped_characters[letter - escape_letters], 1);
}

/* Characters up to the next quote or backslash. */
static int read_run(struct zip_json *json, struct sink *sink)
{
	size_t begin = json->at;

	while (json->at < json->bytes && json->text[json->at] != '"' &&
	       json->text[json->at] != '\\') {
		if ((unsigned char)json->text[json->at] < 0x20)
			return malformed(json, "a control character in a string");
		json->at++;
	}
	if (!zip_utf8_valid(json->text + begin, json->at - begin))
		return malformed(json, "a string is not UTF-8");
	return sink_put(json, sink, json->text + begin, json->at - begin);
}

static int read_string(struct zip_json *json, struct sink *sink)
{
	int ret = 0;

	if (!take(json, '"'))
		return malformed(json, "a string was expected");
	while (!ret) {
		ret = read_run(json, sink);
		if (ret)
			break;
		if (json->at == json->bytes)
			return malformed(json, "a string does not end");
		if (json->text[json->at++] == '"')
			break;
		ret = read_escape(json, sink);
	}
	if (!ret && sink->into)
		sink->into[sink->bytes] = '\0';
	return ret;
}

int zip_json_string(struct zip_json *json, char *into, size_t room)
{
	struct sink sink = { .into = into, .room = room - 1 };

	return read_string(json, &sink);
}

/* ---- Numbers and words ----------------------------------------------------------------------- */

/* A whole number without a sign, behind which no other kind of number goes on. */
static int read_digits(struct zip_json *json, uint64_t *value)
{
	*value = 0;
	if (!is_digit(peek(json)))
		return malformed(json, "a whole number was expected");
	if (peek(json) == '0' && json->at + 1 < json->bytes && is_digit(json->text[json->at + 1]))
		return malformed(json, "a number begins with 0");
	for (; is_digit(peek(json)); json->at++)
		if (__builtin_mul_overflow(*value, 10, value) ||
		    __builtin_add_overflow(*value, (uint64_t)(peek(json) - '0'), value))
			return malformed(json, "a number does not fit into 64 bits");
	if (peek(json) && strchr(".eE", peek(json)))
		return malformed(json, "a whole number was expected");
	return 0;
}

int zip_json_u64(struct zip_json *json, uint64_t *value)
{
	skip_space(json);
	return read_digits(json, value);
}

int zip_json_i64(struct zip_json *json, int64_t *value)
{
	bool negative = take(json, '-');
	uint64_t most = (uint64_t)INT64_MAX + negative, digits;
	int ret = read_digits(json, &digits);

	if (ret)
		return ret;
	if (digits > most)
		return malformed(json, "a number does not fit into 64 bits");
	*value = (int64_t)(negative ? -digits : digits);
	return 0;
}

static bool take_word(struct zip_json *json, const char *word)
{
	size_t bytes = strlen(word);

	skip_space(json);
	if (json->bytes - json->at < bytes || memcmp(json->text + json->at, word, bytes) != 0)
		return false;
	json->at += bytes;
	return true;
}

int zip_json_bool(struct zip_json *json, bool *value)
{
	*value = take_word(json, "true");
	return *value || take_word(json, "false") ? 0 :
						    malformed(json, "true or false was expected");
}

static bool skip_digits(struct zip_json *json)
{
	size_t begin = json->at;

	while (is_digit(peek(json)))
		json->at++;
	return json->at > begin;
}

/* Any number that JSON knows. */
static int skip_number(struct zip_json *json)
{
	bool zero, good;

	take(json, '-');
	zero = peek(json) == '0';
	json->at += zero;
	good = zero || skip_digits(json);
	if (good && peek(json) == '.') {
		json->at++;
		good = skip_digits(json);
	}
	if (good && (peek(json) == 'e' || peek(json) == 'E')) {
		json->at++;
		json->at += peek(json) == '+' || peek(json) == '-';
		good = skip_digits(json);
	}
	return good ? 0 : malformed(json, "a value was expected");
}

/* ---- Objects and arrays ---------------------------------------------------------------------- */

/* `more`: it is not empty. */
static int enter(struct zip_json *json, const char brackets[2], const char *problem, bool *more)
{
	*more = false;
	if (!take(json, brackets[0]))
		return malformed(json, problem);
	if (json->depth == ZIP_JSON_MAX_DEPTH)
		return zip_json_fail(json, IOSHAPE_E_LIMIT, "values are nested too deeply");
	*more = !take(json, brackets[1]);
	json->depth += *more;
	return 0;
}

/* Whether another one follows. */
static int go_on(struct zip_json *json, char bracket, bool *more)
{
	*more = take(json, ',');
	if (*more)
		return 0;
	if (!take(json, bracket))
		return malformed(json, "a comma or a closing bracket was expected");
	json->depth--;
	return 0;
}

/* The name of a member, and that this object did not have it before. Names are told apart by their
 * hashes: what two that differ have in common in 64 bits is no accident. */
static int read_name(struct zip_json *json, char name[ZIP_JSON_MAX_NAME_BYTES + 1],
		     uint64_t hashes[ZIP_JSON_MAX_MEMBERS], unsigned count)
{
	int ret;

	if (count == ZIP_JSON_MAX_MEMBERS)
		return zip_json_fail(json, IOSHAPE_E_LIMIT, "an object has too many members");
	ret = zip_json_string(json, name, ZIP_JSON_MAX_NAME_BYTES + 1);
	if (ret)
		return ret;
	hashes[count] = base_hash_text(name);
	for (unsigned i = 0; i < count; i++)
		if (hashes[i] == hashes[count])
			return malformed(json, "an object has a member twice");
	return take(json, ':') ? 0 : malformed(json, "a colon was expected");
}

int zip_json_object(struct zip_json *json,
		    int (*member)(void *user, struct zip_json *json, const char *name), void *user)
{
	uint64_t hashes[ZIP_JSON_MAX_MEMBERS];
	char name[ZIP_JSON_MAX_NAME_BYTES + 1];
	bool more;
	int ret = enter(json, "{}", "an object was expected", &more);

	for (unsigned count = 0; !ret && more; count++) {
		ret = read_name(json, name, hashes, count);
		if (!ret)
			ret = member(user, json, name);
		if (!ret)
			ret = go_on(json, '}', &more);
	}
	return ret;
}

int zip_json_array(struct zip_json *json, int (*element)(void *user, struct zip_json *json),
		   void *user)
{
	bool more;
	int ret = enter(json, "[]", "an array was expected", &more);

	while (!ret && more) {
		ret = element(user, json);
		if (!ret)
			ret = go_on(json, ']', &more);
	}
	return ret;
}

static int skip_element(void *user, struct zip_json *json)
{
	(void)user;
	return zip_json_skip(json);
}

static int skip_member(void *user, struct zip_json *json, const char *name)
{
	(void)user;
	(void)name;
	return zip_json_skip(json);
}

int zip_json_skip(struct zip_json *json)
{
	struct sink nowhere = { 0 };

	if (json->skipped++ == ZIP_JSON_MAX_SKIPPED)
		return zip_json_fail(json, IOSHAPE_E_LIMIT, "it has too many unknown values");
	skip_space(json);
	switch (peek(json)) {
	case '{':
		return zip_json_object(json, skip_member, NULL);
	case '[':
		return zip_json_array(json, skip_element, NULL);
	case '"':
		return read_string(json, &nowhere);
	default:
		if (take_word(json, "true") || take_word(json, "false") || take_word(json, "null"))
			return 0;
		return skip_number(json);
	}
}

int zip_json_end(struct zip_json *json)
{
	skip_space(json);
	return json->at == json->bytes ? 0 : malformed(json, "something follows the end");
}

/* ---- Writing --------------------------------------------------------------------------------- */

int zip_json_put(struct base_buffer *out, const char *format, ...)
{
	char line[256];
	va_list arguments;
	int bytes;

	va_start(arguments, format);
	bytes = vsnprintf(line, sizeof(line), format, arguments);
	va_end(arguments);
	return base_buffer_append(out, line, (size_t)bytes);
}

/* A character that cannot stand in a string as it is. */
static int put_escaped(struct base_buffer *out, char character)
{
	const char *found = strchr(escaped_characters, character);

	if (found)
		return zip_json_put(out, "\\%c", escape_letters[found - escaped_characters]);
	return zip_json_put(out, "\\u%04x", (unsigned)(unsigned char)character);
}

int zip_json_put_string(struct base_buffer *out, const char *text)
{
	size_t run;
	int ret;

	ret = base_buffer_append(out, "\"", 1);
	while (!ret && *text) {
		for (run = 0; (unsigned char)text[run] >= 0x20 && !strchr("\"\\", text[run]);)
			run++;
		ret = base_buffer_append(out, text, run);
		text += run;
		if (!ret && *text)
			ret = put_escaped(out, *text++);
	}
	return ret ? ret : base_buffer_append(out, "\"", 1);
}
