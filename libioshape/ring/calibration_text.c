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
#define NUMBERS "bytes_per_s %llu\nmeasured_ms %llu\n"

size_t ring_calibration_print(const char *mount, const struct ring_calibration *calibration,
			      char *text, size_t text_bytes)
{
	int length = snprintf(text, text_bytes, BEFORE_NUMBERS NUMBERS "mount %s\n",
			      RING_CALIBRATION_FORMAT, ring_engine_name(calibration->engine),
			      (unsigned long long)calibration->bytes_per_s,
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

int ring_calibration_parse(const char *mount, const char *text, size_t text_bytes,
			   struct ring_calibration *calibration)
{
	char copy[RING_CALIBRATION_TEXT_BYTES], again[RING_CALIBRATION_TEXT_BYTES], engine[16];
	unsigned long long rate, measured_ms;

	memset(calibration, 0, sizeof(*calibration));
	if (text_bytes >= sizeof(copy))
		return -EINVAL;
	memcpy(copy, text, text_bytes);
	copy[text_bytes] = 0;
	if (sscanf(copy, "ioshape calibration %*u\nengine %15s\n" NUMBERS, engine, &rate,
		   &measured_ms) != 3 ||
	    !find_engine(engine, &calibration->engine) || measured_ms > MOST_MS || !rate ||
	    rate > MOST_BYTES_PER_S)
		return -EINVAL;
	calibration->bytes_per_s = rate;
	calibration->measured_at = (double)measured_ms / 1e3;
	/* sscanf() takes much for a number, and any format: what it took must be what is printed.
	 */
	if (ring_calibration_print(mount, calibration, again, sizeof(again)) != text_bytes ||
	    memcmp(again, text, text_bytes) != 0)
		return -EINVAL;
	return 0;
}
