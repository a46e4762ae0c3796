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

#define BEFORE_NUMBERS "ioshape calibration %u\nengine %s\n"
#define NUMBERS                                                                                    \
	"block_bytes %llu\ndepth %u\nbytes_per_s %llu\nusual_bytes_per_s %llu\n"                   \
	"target_bytes_per_s %llu\nseek_us %u\nmeasured_ms %llu\n"

size_t ring_calibration_print(const char *mount, const struct ring_calibration *calibration,
			      char *text, size_t text_bytes)
{
	int length = snprintf(
		text, text_bytes, BEFORE_NUMBERS NUMBERS "mount %s\n", RING_CALIBRATION_FORMAT,
		ring_engine_name(calibration->engine), (unsigned long long)calibration->block_bytes,
		calibration->depth, (unsigned long long)calibration->bytes_per_s,
		(unsigned long long)calibration->usual_bytes_per_s,
		(unsigned long long)calibration->target_bytes_per_s, calibration->seek_us,
		(unsigned long long)(calibration->measured_at * 1e3 + 0.5), mount);

	return length < 0 || (size_t)length >= text_bytes ? 0 : (size_t)length;
}

/* An engine that moves bytes. */
static bool find_engine(const char *name, enum ioshape_engine *engine)
{
	for (unsigned i = IOSHAPE_ENGINE_URING; i < ARRAY_LENGTH(names); i++) {
		*engine = (enum ioshape_engine)i;
		if (*engine != IOSHAPE_ENGINE_NIL && !strcmp(names[i], name))
			return true;
	}
	return false;
}

static bool is_sound(const struct ring_calibration *calibration)
{
	const uint64_t block = calibration->block_bytes;
	const uint32_t depth = calibration->depth;

	if (!calibration->bytes_per_s || calibration->bytes_per_s > MOST_BYTES_PER_S ||
	    calibration->usual_bytes_per_s > MOST_BYTES_PER_S ||
	    calibration->target_bytes_per_s > MOST_BYTES_PER_S)
		return false;
	/* Both are by rule, or neither is. */
	if (!block || !depth)
		return !block && !depth;
	return block >= 64 * KIB && block <= 64 * MIB && block % 4096 == 0 &&
	       depth <= RING_MOST_DEPTH && block * depth <= RING_MOST_LANE_BYTES;
}

int ring_calibration_parse(const char *mount, const char *text, size_t text_bytes,
			   struct ring_calibration *calibration)
{
	char copy[RING_CALIBRATION_TEXT_BYTES], again[RING_CALIBRATION_TEXT_BYTES], engine[16];
	unsigned long long block, rate, usual, target, measured_ms;

	memset(calibration, 0, sizeof(*calibration));
	if (text_bytes >= sizeof(copy))
		return -EINVAL;
	memcpy(copy, text, text_bytes);
	copy[text_bytes] = 0;
	if (sscanf(copy, "ioshape calibration %*u\nengine %15s\n" NUMBERS, engine, &block,
		   &calibration->depth, &rate, &usual, &target, &calibration->seek_us,
		   &measured_ms) != 8 ||
	    !find_engine(engine, &calibration->engine) || measured_ms > MOST_MS)
		return -EINVAL;
	calibration->block_bytes = block;
	calibration->bytes_per_s = rate;
	calibration->usual_bytes_per_s = usual;
	calibration->target_bytes_per_s = target;
	calibration->measured_at = (double)measured_ms / 1e3;
	/* sscanf() takes much for a number, and any format: what it took must be what is printed.
	 */
	if (!is_sound(calibration) ||
	    ring_calibration_print(mount, calibration, again, sizeof(again)) != text_bytes ||
	    memcmp(again, text, text_bytes) != 0)
		return -EINVAL;
	return 0;
}
