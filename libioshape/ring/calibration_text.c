/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration as text, in a small file that anybody may have changed. */
#include "ring/calibrate.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Nothing writes faster, and no year is larger. */
#define MOST_BYTES_PER_S 1000000000000000ull
#define MOST_MS 10000000000000ull

static const char *const names[] = {
	[IOSHAPE_ENGINE_AUTO] = "auto",       [IOSHAPE_ENGINE_URING] = "uring",
	[IOSHAPE_ENGINE_THREADS] = "threads", [IOSHAPE_ENGINE_BUFFERED] = "buffered",
	[IOSHAPE_ENGINE_NIL] = "nil",         [IOSHAPE_ENGINE_URING_ASYNC] = "uring-async",
};

const char *ring_engine_name(enum ioshape_engine engine)
{
	return (unsigned)engine < ARRAY_LENGTH(names) ? names[engine] : "?";
}

/* ---- Printing -------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static size_t add(char *text, size_t room, const char *format,
							...)
{
	const size_t used = strlen(text);
	va_list args;
	int length;

	va_start(args, format);
	length = vsnprintf(text + used, room - used, format, args);
	va_end(args);
	return length < 0 ? room : used + (size_t)length;
}

static size_t add_trial(char *text, size_t room, const char *word, const struct ring_trial *trial)
{
	return add(text, room, "%s %s %llu %u %llu\n", word, ring_engine_name(trial->engine),
		   (unsigned long long)trial->block_bytes, trial->depth,
		   (unsigned long long)trial->bytes_per_s);
}

size_t ring_calibration_print(const char *mount, const struct ring_calibration *calibration,
			      char *text, size_t text_bytes)
{
	const struct ring_trial chosen = { calibration->engine, calibration->block_bytes,
					   calibration->depth, calibration->bytes_per_s };
	size_t length;

	if (!text_bytes)
		return 0;
	*text = 0;
	add(text, text_bytes, "ioshape calibration 1\nmount %s\nmeasured_ms %llu\ntook_us %llu\n",
	    mount, (unsigned long long)(calibration->measured_at * 1e3),
	    (unsigned long long)(calibration->took_s * 1e6));
	add(text, text_bytes, "usual %llu\n", (unsigned long long)calibration->usual_bytes_per_s);
	add(text, text_bytes, "target %llu %u\n",
	    (unsigned long long)calibration->target_bytes_per_s, calibration->seek_us);
	add_trial(text, text_bytes, "chosen", &chosen);
	for (uint32_t i = 0; i < calibration->trial_count; i++)
		add_trial(text, text_bytes, "trial", &calibration->trials[i]);
	length = add(text, text_bytes, "end\n");
	return length < text_bytes ? length : 0;
}

/* ---- Parsing --------------------------------------------------------------------------------- */

struct cursor {
	const char *at, *end;
};

static bool take(struct cursor *cursor, const char *word)
{
	const size_t length = strlen(word);

	if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, word, length) != 0)
		return false;
	cursor->at += length;
	return true;
}

/* Digits, no more than `most`, without zeros before them. */
static bool take_number(struct cursor *cursor, uint64_t most, uint64_t *value)
{
	const char *begin = cursor->at;

	*value = 0;
	for (; cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9'; cursor->at++) {
		if (*value > (most - (uint64_t)(*cursor->at - '0')) / 10)
			return false;
		*value = *value * 10 + (uint64_t)(*cursor->at - '0');
	}
	return cursor->at > begin && (*begin != '0' || cursor->at == begin + 1);
}

/* An engine that moves bytes. "uring-async" begins like "uring": a space ends the name. */
static bool take_engine(struct cursor *cursor, enum ioshape_engine *engine)
{
	for (unsigned i = IOSHAPE_ENGINE_URING; i < ARRAY_LENGTH(names); i++) {
		const struct cursor before = *cursor;

		if (i != IOSHAPE_ENGINE_NIL && take(cursor, names[i]) && take(cursor, " ")) {
			*engine = (enum ioshape_engine)i;
			return true;
		}
		*cursor = before;
	}
	return false;
}

static bool take_trial(struct cursor *cursor, struct ring_trial *trial)
{
	uint64_t depth;
	bool well;

	well = take_engine(cursor, &trial->engine) &&
	       take_number(cursor, 64 * MIB, &trial->block_bytes) && take(cursor, " ") &&
	       take_number(cursor, RING_MOST_DEPTH, &depth) && take(cursor, " ") &&
	       take_number(cursor, MOST_BYTES_PER_S, &trial->bytes_per_s) && take(cursor, "\n");
	if (!well)
		return false;
	trial->depth = (uint32_t)depth;
	/* Both are by rule, or neither is. */
	if (!trial->block_bytes || !trial->depth)
		return !trial->block_bytes && !trial->depth;
	return trial->block_bytes >= 64 * KIB && trial->block_bytes % 4096 == 0 &&
	       trial->block_bytes * trial->depth <= RING_MOST_LANE_BYTES;
}

static bool take_head(struct cursor *cursor, const char *mount,
		      struct ring_calibration *calibration)
{
	uint64_t measured_ms, took_us, seek_us;
	bool well;

	well = take(cursor, "ioshape calibration 1\nmount ") && take(cursor, mount) &&
	       take(cursor, "\nmeasured_ms ") && take_number(cursor, MOST_MS, &measured_ms) &&
	       take(cursor, "\ntook_us ") && take_number(cursor, MOST_MS, &took_us) &&
	       take(cursor, "\nusual ") &&
	       take_number(cursor, MOST_BYTES_PER_S, &calibration->usual_bytes_per_s) &&
	       take(cursor, "\ntarget ") &&
	       take_number(cursor, MOST_BYTES_PER_S, &calibration->target_bytes_per_s) &&
	       take(cursor, " ") && take_number(cursor, UINT32_MAX, &seek_us) && take(cursor, "\n");
	if (!well)
		return false;
	calibration->seek_us = (uint32_t)seek_us;
	calibration->measured_at = (double)measured_ms / 1e3;
	calibration->took_s = (double)took_us / 1e6;
	return true;
}

int ring_calibration_parse(const char *mount, const char *text, size_t text_bytes,
			   struct ring_calibration *calibration)
{
	struct cursor cursor = { text, text + text_bytes };
	struct ring_trial chosen;

	memset(calibration, 0, sizeof(*calibration));
	if (!take_head(&cursor, mount, calibration) || !take(&cursor, "chosen ") ||
	    !take_trial(&cursor, &chosen) || !chosen.bytes_per_s)
		return -EINVAL;
	while (take(&cursor, "trial ")) {
		if (calibration->trial_count == RING_MOST_TRIALS ||
		    !take_trial(&cursor, &calibration->trials[calibration->trial_count++]))
			return -EINVAL;
	}
	if (!take(&cursor, "end\n") || cursor.at != cursor.end)
		return -EINVAL;
	calibration->engine = chosen.engine;
	calibration->block_bytes = chosen.block_bytes;
	calibration->depth = chosen.depth;
	calibration->bytes_per_s = chosen.bytes_per_s;
	return 0;
}
