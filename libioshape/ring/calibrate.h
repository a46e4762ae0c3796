/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: which engine, blocks and depth a file is written with, and how that is
 * found out.
 */
#ifndef RING_CALIBRATE_H
#define RING_CALIBRATE_H

#include "ring/destination.h"
#include "ring/ring.h"

/* A file that is large enough to be worth a trial; and one for which it is worth looking up. */
#define RING_TRIAL_FILE_BYTES (128 * MIB)
#define RING_KNOWN_FILE_BYTES (16 * MIB)

/* ---- The choice for one file (calibrate.c) --------------------------------------------------- */

/* Why an engine was chosen. */
enum ring_reason {
	RING_AS_CALIBRATED, /* the calibration is to be followed */
	RING_AS_ASKED,
	RING_SMALL_FILE,
	RING_CALIBRATION_OFF,
	RING_DIRECT_OFF,
	RING_UNKNOWN_MOUNT,
	RING_IN_MEMORY,
	RING_SIZE_UNKNOWN,
	RING_NOT_LARGE,
	RING_NO_REGULAR_FILE,
	RING_NOT_TRIED,
	RING_TRIED_ELSEWHERE,
	RING_TRIAL_FAILED,
};

struct ring_choice {
	enum ring_reason reason;
	struct ring_calibration calibration; /* zeros if it is not followed */
	char mount[FS_POOL_BYTES];           /* "" if it was not looked up */
	char why[128];                       /* for the report */
};

/* The words of a report for it; those of RING_AS_CALIBRATED and RING_TRIAL_FAILED say more. */
const char *ring_reason_text(enum ring_reason reason);

/*
 * Before the file is created. `may_try`: it may take 0.3 s for a trial, only for a large file on a
 * mount of which nothing is known.
 */
void ring_choose(const struct ring_config *config, const char *path, uint64_t expected_bytes,
		 bool may_try, struct ring_choice *choice);

/* The shape of the file with this layout. Pure. `why` receives the words of the report. */
struct ring_shape ring_shape_chosen(const struct ring_config *config,
				    const struct ring_choice *choice, enum fs_family family,
				    const struct fs_layout *layout, uint64_t file_bytes, char *why,
				    size_t why_bytes);

/* ---- Trials (trial.c) ------------------------------------------------------------------------ */

/* A file to try on, its engines, and what is left of time and space. Zero it. */
struct ring_bench {
	struct ring_destination direct, buffered; /* two files: see ring_striping.direct */
	bool has_direct; /* direct I/O works; otherwise all engines write to the second file */
	struct fs_info fs;
	uint64_t room_bytes;  /* of each file */
	uint64_t leave_bytes; /* that must be free besides: some filesystems count late */
	uint64_t at;          /* where the next trial begins ... */
	uint64_t step_bytes;  /* ... on a stripe */
	uint8_t *data;        /* what is written, over and over: RING_BLOCK_BYTES */
	void *engines[8];     /* by enum ioshape_engine; opened at need */
	bool refused[8];
	uint64_t end_ns; /* nothing is begun after this */
};

/* Opens files beside `path`. -ENOTSUP with a sentence where there is nothing to be tried. */
int ring_bench_open(struct ring_bench *bench, const struct ring_config *config, const char *path,
		    struct base_error *error);
void ring_bench_close(struct ring_bench *bench);

/*
 * Writes `bytes` in blocks, and says how fast. Gives up when it has taken `give_up_ns` (0: never):
 * then it is slower than it need be. -ETIME if no time is left, or a negative errno.
 */
int ring_bench_try(struct ring_bench *bench, struct ring_trial *trial, uint64_t bytes,
		   uint64_t give_up_ns);

/* ---- What is remembered (calibrated.c) ------------------------------------------------------- */

/* `memory` may be NULL: then nothing is remembered. */

/* The name of the mount that the file's directory is on, as fs_pool_of_path() gives it; quickly
 * after the first time. 0 or a negative errno. */
int ring_memory_name(struct ring_memory *memory, const char *path, char name[FS_POOL_BYTES]);

/* Of this memory, or of the disk; not what is older than `since` or has expired by `now` (seconds
 * since 1970). -ENOENT. */
int ring_memory_get(struct ring_memory *memory, const char *mount, double since, double now,
		    struct ring_calibration *calibration);
/* Also on disk, if that can be. */
void ring_memory_put(struct ring_memory *memory, const char *mount,
		     const struct ring_calibration *calibration);

/*
 * Who finds nothing remembered and wants to try. -EBUSY while somebody else does, here or in
 * another process of this user. Otherwise ends with ring_memory_tried().
 */
struct ring_turn {
	int lock_fd;
};
int ring_memory_try(struct ring_memory *memory, const char *mount, double now,
		    struct ring_turn *turn);
/* Nobody who has this memory tries again before `not_before`. */
void ring_memory_tried(struct ring_memory *memory, const char *mount, double not_before,
		       struct ring_turn *turn);

/*
 * What files of such a shape have taught on the filesystem that was described last, in this
 * process; zeros if that is nothing.
 */
void ring_memory_recall(struct ring_memory *memory, const struct fs_memory *on,
			const struct ring_shape *shape, struct ring_taught *taught);
void ring_memory_learn(struct ring_memory *memory, const struct fs_memory *on,
		       const struct ring_shape *shape, const struct ring_taught *taught);

/* Whether direct writes work on the filesystem that was described last, as far as this process
 * knows. */
enum ring_direct { RING_DIRECT_UNPROVEN, RING_DIRECT_WORKS, RING_DIRECT_FAILS };

enum ring_direct ring_memory_direct(struct ring_memory *memory, const struct fs_memory *on);
void ring_memory_keep_direct(struct ring_memory *memory, const struct fs_memory *on,
			     enum ring_direct found);

/* ---- As text (calibration_text.c) ------------------------------------------------------------ */

#define RING_CALIBRATION_FORMAT BASE_FORMAT(3u)
#define RING_CALIBRATION_TEXT_BYTES 4096

const char *ring_engine_name(enum ioshape_engine engine);

/* Bytes of text, or 0 if there is not enough room. Pure. */
size_t ring_calibration_print(const char *mount, const struct ring_calibration *calibration,
			      char *text, size_t text_bytes);
/* -EINVAL unless it is to the letter what the former prints for this mount. Pure. */
int ring_calibration_parse(const char *mount, const char *text, size_t text_bytes,
			   struct ring_calibration *calibration);

#endif
