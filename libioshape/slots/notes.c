/* SPDX-License-Identifier: Apache-2.0 */
/* Messages that ranks leave each other in a Redis: hashes beside a pool's keys. A group's store
 * uses them. */
#define _GNU_SOURCE
#include "slots/redis.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_BYTES (SLOTS_KEY_BYTES + SLOTS_NOTES_LIST_BYTES)

struct slots_notes {
	struct redis_client client;
};

/* Writes the key of a list. Its hash tag puts it on the cluster node that has the pool's keys, and
 * users.acl allows the name. */
static void name_key(const struct slots_notes *notes, char key[KEY_BYTES], const char *list)
{
	snprintf(key, KEY_BYTES, "{ios:%s}:board:%s", notes->client.config.pool, list);
}

int slots_notes_open(struct slots_notes **out, const struct slots_config *config,
		     struct base_error *error)
{
	struct slots_notes *notes;
	int ret;

	*out = NULL;
	if (!config || !config->address || slots_coordinator_of(config->address) != &slots_redis)
		return base_refuse(error, -EINVAL,
				   "ranks cannot exchange messages through the coordinator: it is "
				   "not a Redis");
	notes = calloc(1, sizeof(*notes));
	if (!notes)
		return base_no_memory(error, "a message store", sizeof(*notes));
	ret = client_open(&notes->client, config, error);
	notes->client.most_reply_bytes = SLOTS_NOTES_REPLY_BYTES;
	if (ret)
		slots_notes_close(notes);
	else
		*out = notes;
	return ret;
}

void slots_notes_close(struct slots_notes *notes)
{
	if (notes)
		client_close(&notes->client);
	free(notes);
}

/* Sends a command and ignores its answer. */
static int tell(struct slots_notes *notes, struct link_command *command, struct base_error *error)
{
	redisReply *reply;
	int ret = client_call(&notes->client, command, &reply, error);

	freeReplyObject(reply);
	return ret;
}

int slots_notes_put(struct slots_notes *notes, const char *list, const char *name, const void *data,
		    size_t bytes, struct base_error *error)
{
	struct link_command command = { 0 };
	char key[KEY_BYTES];
	int ret;

	name_key(notes, key, list);
	link_add_texts(&command, "HSET", key, name);
	link_add_bytes(&command, bytes ? data : "", bytes);
	ret = tell(notes, &command, error);
	if (ret)
		return ret;
	/* Without an expiry the list would stay for ever. */
	command = (struct link_command){ 0 };
	link_add_texts(&command, "PEXPIRE", key);
	link_add_numbers(&command, SLOTS_NOTES_KEPT_MS);
	return tell(notes, &command, error);
}

static int not_understood(const char *key, struct base_error *error)
{
	return base_refuse_with(error, IOSHAPE_E_COORDINATOR, "check that it is a Redis",
				"the coordinator's answer about the messages in %s is not valid",
				key);
}

static int read_notes(const redisReply *reply, size_t count, const char *key,
		      int (*found)(void *user, size_t index, const void *data, size_t bytes),
		      void *user, struct base_error *error)
{
	int ret = 0;

	if (reply->type != REDIS_REPLY_ARRAY || reply->elements != count)
		return not_understood(key, error);
	for (size_t i = 0; i < count && !ret; i++) {
		const redisReply *note = reply->element[i];

		if (note->type == REDIS_REPLY_STRING)
			ret = found(user, i, note->str, note->len);
		else if (note->type != REDIS_REPLY_NIL)
			ret = not_understood(key, error);
	}
	return ret;
}

int slots_notes_get(struct slots_notes *notes, const char *list, const char *const *names,
		    size_t count,
		    int (*found)(void *user, size_t index, const void *data, size_t bytes),
		    void *user, struct base_error *error)
{
	struct link_command command = { 0 };
	char key[KEY_BYTES];
	redisReply *reply;
	int ret;

	name_key(notes, key, list);
	link_add_texts(&command, "HMGET", key);
	for (size_t i = 0; i < count; i++)
		link_add_texts(&command, names[i]);
	ret = client_call(&notes->client, &command, &reply, error);
	if (!ret)
		ret = read_notes(reply, count, key, found, user, error);
	freeReplyObject(reply);
	return ret;
}

int slots_notes_remove(struct slots_notes *notes, const char *list, struct base_error *error)
{
	struct link_command command = { 0 };
	char key[KEY_BYTES];

	name_key(notes, key, list);
	link_add_texts(&command, "DEL", key);
	return tell(notes, &command, error);
}
