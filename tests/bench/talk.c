/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "bench.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void parse_command(struct command *command, char *line)
{
	char *rest = line, *word;

	memset(command, 0, sizeof(*command));
	rest[strcspn(rest, "\n")] = 0;
	command->verb = strsep(&rest, "\t");
	while ((word = strsep(&rest, "\t"))) {
		if (command->count == MAX_WORDS)
			fail("more than %d words", MAX_WORDS);
		command->keys[command->count] = strsep(&word, "=");
		command->values[command->count] = word ? word : "";
		command->count++;
	}
}

const char *command_text(const struct command *command, const char *key)
{
	for (size_t i = 0; i < command->count; i++) {
		if (!strcmp(command->keys[i], key))
			return command->values[i];
	}
	return NULL;
}

const char *command_need(const struct command *command, const char *key)
{
	const char *value = command_text(command, key);

	if (!value)
		fail("%s needs %s=", command->verb, key);
	return value;
}

uint64_t command_number(const struct command *command, const char *key, uint64_t otherwise)
{
	const char *text = command_text(command, key);
	uint64_t value;
	char *end;

	if (!text)
		return otherwise;
	errno = 0;
	value = strtoull(text, &end, 10);
	if (errno || *end || end == text)
		fail("%s=%s is not a number", key, text);
	return value;
}

static char answer[65536];
static size_t answer_used;

static void add(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void add(const char *format, ...)
{
	size_t room = sizeof(answer) - answer_used;
	va_list args;
	int bytes;

	va_start(args, format);
	bytes = vsnprintf(answer + answer_used, room, format, args);
	va_end(args);
	if (bytes < 0 || (size_t)bytes >= room)
		abort(); /* answers have a few short fields */
	answer_used += (size_t)bytes;
}

static void add_name(const char *name)
{
	add("%s\"%s\": ", answer_used ? ", " : "{", name);
}

void answer_number(const char *name, double value)
{
	add_name(name);
	add("%.17g", value);
}

void answer_text(const char *name, const char *value)
{
	add_name(name);
	add("\"");
	for (; *value; value++) {
		unsigned char byte = (unsigned char)*value;

		if (byte == '"' || byte == '\\')
			add("\\%c", byte);
		else if (byte < ' ')
			add("\\u%04x", byte);
		else
			add("%c", byte);
	}
	add("\"");
}

void answer_send(void)
{
	if (printf("%s}\n", answer_used ? answer : "{") < 0 || fflush(stdout))
		exit(1); /* the driver has ended */
	answer_used = 0;
}

void fail(const char *format, ...)
{
	char text[2048];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	answer_used = 0;
	answer_text("error", text);
	answer_send();
	exit(1);
}
