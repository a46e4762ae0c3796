/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies callers' option structs, fills them from environment variables and checks them, by the
 * table of settings in settings.def.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <ioshape/group.h>
#include <ioshape/tier.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Option structs -------------------------------------------------------------------------- */

/* Sanity limit: a larger size field is uninitialised. */
#define LARGEST_STRUCT_BYTES 4096

static int check_size(size_t size, const char *what, struct base_error *error)
{
	if (size >= sizeof(size_t) && size <= LARGEST_STRUCT_BYTES)
		return 0;
	return base_fail_reason_with(error, -EINVAL, "set its size field to sizeof the struct",
				     "the size field of struct %s says %zu bytes", what, size);
}

int base_take_options(void *into, size_t known, const void *from, const char *what,
		      struct base_error *error)
{
	size_t size;
	int ret;

	memset(into, 0, known);
	memcpy(into, &known, sizeof(known));
	if (!from)
		return 0;
	memcpy(&size, from, sizeof(size));
	ret = check_size(size, what, error);
	if (ret)
		return ret;
	for (size_t i = known; i < size; i++) {
		if (((const unsigned char *)from)[i])
			return base_fail_reason_with(
				error, -EINVAL, "use the headers of this version",
				"struct %s sets a field that this version of the "
				"library (%s) does not know",
				what, ioshape_version());
	}
	memcpy(into, from, MIN(size, known));
	memcpy(into, &known, sizeof(known));
	return 0;
}

int base_give_struct(void *into, const void *from, size_t known, const char *what,
		     struct base_error *error)
{
	size_t size;
	int ret;

	memcpy(&size, into, sizeof(size));
	ret = check_size(size, what, error);
	if (ret)
		return ret;
	/*
	 * Keep the caller's size. Fields of newer headers that this library does not know become
	 * zero.
	 */
	memset((char *)into + sizeof(size), 0, size - sizeof(size));
	if (MIN(size, known) > sizeof(size))
		memcpy((char *)into + sizeof(size), (const char *)from + sizeof(size),
		       MIN(size, known) - sizeof(size));
	return 0;
}

int base_parse_bytes(const char *text, uint64_t *value)
{
	static const char suffixes[] = "KMGT";
	const char *suffix;
	unsigned shift = 0;
	uint64_t number;
	char *end;

	/* strtoull() accepts signs and white space; a size has none. */
	if (*text < '0' || *text > '9')
		return -EINVAL;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno)
		return -ERANGE;
	if (*end) {
		suffix = strchr(suffixes, *end >= 'a' ? *end - 'a' + 'A' : *end);
		if (!suffix || end[1])
			return -EINVAL;
		shift = 10 * (unsigned)(suffix - suffixes + 1);
	}
	if (number > UINT64_MAX >> shift)
		return -ERANGE;
	*value = number << shift;
	return 0;
}

/* ---- Settings -------------------------------------------------------------------------------- */

#define PREFIX "IOSHAPE_"

enum kind { KIND_CHOICE, KIND_BYTES, KIND_COUNT, KIND_TEXT, KIND_NAME, KIND_OTHER, KIND_RETIRED };

struct setting {
	const char *name;
	enum base_settings_owner owner;
	enum kind kind;
	size_t offset; /* offset of the field in the option struct */
	uint64_t least, most;
	/*
	 * Text for messages: the valid values; the words of a choice; the reason of a retired
	 * setting.
	 */
	const char *values;
};

#define OFFSET_CONTEXT(name) offsetof(struct ioshape_context_options, name)
#define OFFSET_GROUP(name) offsetof(struct ioshape_group_options, name)
#define OFFSET_TIER(name) offsetof(struct ioshape_tier_options, name)
#define OFFSET_PACKAGE(name) 0
#define ROW(owner, name, kind, least, most, values)                                                \
	{ #name, BASE_SETTINGS_##owner, KIND_##kind, OFFSET_##owner(name), least, most, values },
#define CHOICE(owner, name, words, about, user) ROW(owner, name, CHOICE, 0, 0, words)
#define BYTES(owner, name, least, most, values, otherwise, about, user)                            \
	ROW(owner, name, BYTES, least, most, values)
#define COUNT(owner, name, least, most, otherwise, about, user)                                    \
	ROW(owner, name, COUNT, least, most, #least " to " #most)
#define TEXT(owner, name, most, values, otherwise, about, user)                                    \
	ROW(owner, name, TEXT, 1, most, values)
#define NAME(owner, name, most, values, otherwise, about, user)                                    \
	ROW(owner, name, NAME, 1, most, values)
#define PATH(owner, name, most, values, otherwise, about, user)                                    \
	ROW(owner, name, TEXT, 1, most, values)
#define RULES(owner, name, most, values, otherwise, about, user)                                   \
	ROW(owner, name, TEXT, 1, most, values)
#define SWITCH(owner, name, otherwise, about, user) ROW(owner, name, OTHER, 0, 0, "yes, no")
#define RETIRED(name, why) ROW(PACKAGE, name, RETIRED, 0, 0, why)

static const struct setting settings[] = {
#include "base/settings.def"
};

/* ---- Messages -------------------------------------------------------------------------------- */

/* Writes the name of the environment variable of a setting. */
static void name_variable(const char *name, char into[BASE_SETTING_NAME_BYTES])
{
	size_t used = (size_t)snprintf(into, BASE_SETTING_NAME_BYTES, PREFIX);

	for (const char *at = name; *at && used < BASE_SETTING_NAME_BYTES - 1; at++)
		into[used++] = *at >= 'a' && *at <= 'z' ? (char)(*at - 'a' + 'A') : *at;
	into[used] = 0;
}

/*
 * Writes the valid values for a message, without the markup of the reference; a choice's words get
 * commas.
 */
static void show_values(const struct setting *setting, char *into, size_t bytes)
{
	size_t used = 0;

	for (const char *at = setting->values; *at && used + 3 < bytes; at++) {
		if (*at == ' ' && setting->kind == KIND_CHOICE)
			into[used++] = ',';
		if (*at != '`')
			into[used++] = *at;
	}
	into[used] = 0;
}

/* Fails for a value that is not valid. `where` names the variable or the field. */
static int refuse_number(const struct setting *setting, const char *where, const char *value,
			 struct base_error *error)
{
	char values[256];

	show_values(setting, values, sizeof(values));
	return base_fail_reason_with(error, -EINVAL, BASE_WORDS("it takes %s", values),
				     "%s cannot be \"%.64s\"", where, value);
}

/*
 * Fails for a text that is not valid. The message omits the text: it may be an address with a
 * password, given for the wrong setting.
 */
static int refuse_text(const struct setting *setting, const char *where, struct base_error *error)
{
	char values[256];

	show_values(setting, values, sizeof(values));
	return base_fail_reason_with(error, -EINVAL, BASE_WORDS("it takes %s", values),
				     "%s is too long, or has a character that is not allowed",
				     where);
}

/* ---- Fields ---------------------------------------------------------------------------------- */

static bool has_text(const struct setting *setting)
{
	return setting->kind == KIND_TEXT || setting->kind == KIND_NAME;
}

/*
 * Returns whether the field is a uint64_t, as sizes are. Other numbers are a uint32_t or an enum.
 */
static bool is_wide(const struct setting *setting)
{
	return setting->kind == KIND_BYTES;
}

static uint64_t number_in(const struct setting *setting, const void *field)
{
	uint64_t wide;
	uint32_t number;

	if (is_wide(setting)) {
		memcpy(&wide, field, sizeof(wide));
		return wide;
	}
	memcpy(&number, field, sizeof(number));
	return number;
}

static void put_number(const struct setting *setting, void *field, uint64_t value)
{
	const uint32_t number = (uint32_t)value;

	if (is_wide(setting))
		memcpy(field, &value, sizeof(value));
	else
		memcpy(field, &number, sizeof(number));
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* Returns the index of a word in a list of words; the number of words if it is not in the list. */
static uint64_t find_word(const char *words, const char *word)
{
	size_t bytes = strlen(word);
	uint64_t index = 0;

	while (*words) {
		size_t length = strcspn(words, " ");

		if (length == bytes && !memcmp(words, word, bytes))
			break;
		index++;
		words += length + (words[length] == ' ');
	}
	return index;
}

static bool is_good_text(const struct setting *setting, const char *text)
{
	const unsigned char *at = (const unsigned char *)text;
	size_t bytes = strlen(text);

	while (*at >= ' ' && *at != 0x7f &&
	       (setting->kind != KIND_NAME || (*at > ' ' && *at < 0x7f)))
		at++;
	return !*at && bytes >= setting->least && bytes <= setting->most;
}

static bool is_good_number(const struct setting *setting, uint64_t number)
{
	if (setting->kind == KIND_CHOICE)
		return number < find_word(setting->values, "");
	return number >= setting->least && number <= setting->most;
}

static int take_text(const struct setting *setting, const char *variable, const char **field,
		     struct base_error *error)
{
	const char *text = secure_getenv(variable);
	bool given = *field && **field;

	if (!given)
		*field = text && *text ? text : NULL;
	if (!*field || is_good_text(setting, *field))
		return 0;
	return refuse_text(setting, given ? setting->name : variable, error);
}

static int take_number(const struct setting *setting, const char *variable, void *field,
		       struct base_error *error)
{
	uint64_t number = number_in(setting, field);
	const char *text = secure_getenv(variable);
	char given[24];

	if (number) {
		snprintf(given, sizeof(given), "%llu", (unsigned long long)number);
		return is_good_number(setting, number) ?
			       0 :
			       refuse_number(setting, setting->name, given, error);
	}
	if (!text || !*text)
		return 0;
	if (setting->kind == KIND_CHOICE)
		number = find_word(setting->values, text);
	else if (base_parse_bytes(text, &number))
		number = 0; /* 0 is never valid */
	if (!is_good_number(setting, number))
		return refuse_number(setting, variable, text, error);
	put_number(setting, field, number);
	return 0;
}

int base_settings_take(enum base_settings_owner owner, void *options, struct base_error *error)
{
	int ret = 0;

	for (size_t i = 0; !ret && i < ARRAY_LENGTH(settings); i++) {
		const struct setting *setting = &settings[i];
		void *field = (char *)options + setting->offset;
		char variable[BASE_SETTING_NAME_BYTES];

		if (setting->owner != owner)
			continue;
		name_variable(setting->name, variable);
		ret = has_text(setting) ? take_text(setting, variable, field, error) :
					  take_number(setting, variable, field, error);
	}
	return ret;
}

int base_settings_blame(struct base_error *error, const char *field, const char *text)
{
	char variable[BASE_SETTING_NAME_BYTES];

	name_variable(field, variable);
	/* base_settings_take() stores the environment's own pointer. */
	return base_rephrase(error, error->code, "%s: %s",
			     text && secure_getenv(variable) == text ? variable : field,
			     error->sentence);
}

/* ---- Unknown variables ----------------------------------------------------------------------- */

/*
 * Returns whether the variable belongs to ioshape but is not a setting: those of the package, of
 * the preload library and of tests.
 */
static bool is_other(const char *name)
{
	static const char tests[] = PREFIX "TEST_", preload[] = PREFIX "PRELOAD";

	return !strcmp(name, PREFIX "PASSWORD") || !strcmp(name, PREFIX "RUN") ||
	       !strcmp(name, PREFIX "INTEGRATIONS") || !strncmp(name, tests, strlen(tests)) ||
	       !strncmp(name, preload, strlen(preload));
}

/* Returns the setting of a variable; NULL if there is none. */
static const struct setting *setting_of(const char *name)
{
	char variable[BASE_SETTING_NAME_BYTES];

	for (size_t i = 0; i < ARRAY_LENGTH(settings); i++) {
		name_variable(settings[i].name, variable);
		if (!strcmp(variable, name))
			return &settings[i];
	}
	return NULL;
}

static void warn_of(const struct base_log *log, const char *name)
{
	const struct setting *setting = setting_of(name);

	if (!setting)
		base_log(log, IOSHAPE_LOG_WARNING,
			 "there is no setting %s; \"ioshape settings\" lists them", name);
	else if (setting->kind == KIND_RETIRED)
		base_log(log, IOSHAPE_LOG_WARNING, "%s does nothing any more: %s; unset it", name,
			 setting->values);
}

void base_settings_warn(const struct base_log *log)
{
	static atomic_flag warned = ATOMIC_FLAG_INIT;

	if (!log->write || atomic_flag_test_and_set(&warned))
		return;
	for (char **at = environ; at && *at; at++) {
		char name[2 * BASE_SETTING_NAME_BYTES];

		snprintf(name, sizeof(name), "%.*s", (int)strcspn(*at, "="), *at);
		if (!strncmp(name, PREFIX, strlen(PREFIX)) && !is_other(name))
			warn_of(log, name);
	}
}
