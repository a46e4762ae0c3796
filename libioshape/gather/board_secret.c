/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What makes the notes in a Redis authentic: every user of the Redis can write there, but only the
 * ranks of the job know its secret. Rank 0 draws it when it opens its board, and leaves it in the
 * checkpoint directory, as a note on a board of files: only this user can read that. Each note in
 * the Redis begins with a MAC by that secret.
 *
 * A job that starts again finds the secret of the life before, until its own rank 0 has drawn one.
 * So a rank that finds a note that is not authentic looks whether there is a new secret.
 */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define SCOPE "redis"
#define NAME "secret"

#define FIRST_PAUSE_MS 5u
#define MOST_PAUSE_MS 250u
#define RANKS_FOR_A_MS 4u /* thousands of ranks look as often, together, as a thousand */

/* ---- Where it lies --------------------------------------------------------------------------- */

/* -EAGAIN: not yet. */
static int look(struct board_secret *secret, struct base_error *error)
{
	struct base_buffer note = { 0 };
	int ret = gather_board_look(secret->files, SCOPE, NAME, &note, error);

	if (!ret && note.bytes != sizeof(secret->key))
		ret = -EAGAIN;
	if (!ret)
		memcpy(secret->key, note.data, sizeof(secret->key));
	base_buffer_free(&note);
	return ret;
}

static int draw(struct board_secret *secret, struct base_error *error)
{
	if (getrandom(secret->key, sizeof(secret->key), 0) != sizeof(secret->key))
		return base_fail(error, -errno, "cannot draw a secret for the ranks of a job");
	return gather_board_post(secret->files, SCOPE, NAME, secret->key, sizeof(secret->key),
				 error);
}

static int await(struct board_secret *secret, const struct gather_board_config *config,
		 struct base_error *error)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(config->deadline_ms);
	const uint32_t most_pause_ms = MAX(MOST_PAUSE_MS, config->ranks / RANKS_FOR_A_MS);
	struct base_error why;
	int ret;

	for (uint32_t pause_ms = FIRST_PAUSE_MS;; pause_ms = MIN(2 * pause_ms, most_pause_ms)) {
		why = (struct base_error){ 0 };
		ret = look(secret, &why);
		if (!ret)
			return 0;
		if (ret != -EAGAIN && ret != IOSHAPE_E_COORDINATOR)
			return base_pass_on(error, &why);
		if (base_now_ns() >= end_ns)
			break;
		board_sleep_ms(pause_ms);
	}
	return base_refuse(error, -ETIMEDOUT,
			   "rank 0 of the group has not left the secret of its notes in \"%s\" "
			   "within %" PRIu32 " s" BASE_REMEDY
			   "see whether it failed, and whether all nodes share that directory",
			   config->directory, config->deadline_ms / 1000);
}

int board_secret_open(struct board_secret *secret, const struct gather_board_config *config,
		      struct base_error *error)
{
	const int ret = gather_board_open(&secret->files, &gather_board_files, config, error);

	if (ret)
		return ret;
	return config->rank ? await(secret, config, error) : draw(secret, error);
}

void board_secret_close(struct board_secret *secret)
{
	gather_board_close(secret->files);
	explicit_bzero(secret, sizeof(*secret));
}

void board_secret_keep(struct board_secret *secret)
{
	gather_board_wait(secret->files, 0);
}

bool board_secret_renew(struct board_secret *secret)
{
	uint8_t before[sizeof(secret->key)];

	memcpy(before, secret->key, sizeof(before));
	return !look(secret, NULL) && memcmp(before, secret->key, sizeof(before)) != 0;
}

/* ---- Notes ----------------------------------------------------------------------------------- */

/* By a key of its own for each place, so that a note says nothing in the place of another one. */
static void sign(const struct board_secret *secret, const char *list, const char *name,
		 const void *note, size_t bytes, uint8_t mac[BASE_MAC_BYTES])
{
	char place[SLOTS_NOTES_LIST_BYTES + GATHER_NAME_BYTES];
	const int length = snprintf(place, sizeof(place), "%s %s", list, name);
	uint8_t key[BASE_MAC_BYTES];

	base_mac(key, secret->key, place, (size_t)length);
	base_mac(mac, key, note, bytes);
}

int board_secret_seal(const struct board_secret *secret, const char *list, const char *name,
		      const void *note, size_t bytes, struct base_buffer *sealed)
{
	uint8_t mac[BASE_MAC_BYTES];

	sign(secret, list, name, note, bytes, mac);
	return base_buffer_append(sealed, mac, sizeof(mac)) ||
			       base_buffer_append(sealed, note, bytes) ?
		       -ENOMEM :
		       0;
}

const uint8_t *board_secret_unseal(const struct board_secret *secret, const char *list,
				   const char *name, const void *sealed, size_t *bytes)
{
	const uint8_t *mac = sealed, *note = mac + BASE_MAC_BYTES;
	uint8_t expected[BASE_MAC_BYTES], different = 0;

	if (*bytes < BASE_MAC_BYTES)
		return NULL;
	*bytes -= BASE_MAC_BYTES;
	sign(secret, list, name, note, *bytes, expected);
	/* In the same time wherever they differ. */
	for (size_t i = 0; i < sizeof(expected); i++)
		different |= mac[i] ^ expected[i];
	return different ? NULL : note;
}
