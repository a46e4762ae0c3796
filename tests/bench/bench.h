/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Interface between the files of bench-worker, the process that runs the benchmarks. It holds
 * tensors and a context. It runs one command of the driver (worker.py) at a time, and measures the
 * operation alone.
 *
 * A command is one line of words that are separated by tabs: a verb, then key=value. The answer is
 * one line of JSON.
 */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <ioshape/group.h>
#include <ioshape/ioshape.h>
#include <ioshape/slots.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Commands and answers (talk.c) ----------------------------------------------------------- */

#define MAX_WORDS 32

struct command {
	const char *verb;
	const char *keys[MAX_WORDS];
	const char *values[MAX_WORDS];
	size_t count;
};

/* Splits the line into words, in place. The command points into the line. */
void parse_command(struct command *command, char *line);
/* Returns the value of the key, or NULL if it was not given. */
const char *command_text(const struct command *command, const char *key);
/* Returns the value of the key. If it is missing, ends the process with an answer that says so. */
const char *command_need(const struct command *command, const char *key);
uint64_t command_number(const struct command *command, const char *key, uint64_t otherwise);

/* Adds a field to the answer, which answer_send() prints. */
void answer_number(const char *name, double value);
void answer_text(const char *name, const char *value);
void answer_send(void);
/* Answers {"error": ...} and ends the process. A command fails in no other way. */
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* ---- Cost of a command (cost.c) -------------------------------------------------------------- */

/* Call cost_begin() right before the operation and cost_end() right after it. */
struct cost {
	uint64_t began_ns;
	double began_cpu_s;
};

void cost_begin(struct cost *cost);
/* Adds "seconds" and "cpu_seconds" (all threads, user and kernel) to the answer, and "began_s" and
 * "ended_s", which are CLOCK_MONOTONIC seconds. */
void cost_end(const struct cost *cost);
double seconds_since(uint64_t began_ns);
uint64_t now_ns(void);

/* Resets the peak of resident memory. Returns the current resident memory in bytes. */
uint64_t memory_reset_peak(void);
/* Adds "extra_bytes" (peak minus `before`) to the answer. */
void memory_answer(uint64_t before);

/* ---- Tensors (workload.c) -------------------------------------------------------------------- */

struct workload {
	struct ioshape_tensor *tensors;
	size_t count;
	uint64_t bytes;
	/* memory with as many bytes in one piece, warm; baselines copy to it, read into it and
	 * write from it */
	uint8_t *twin;
	size_t twin_bytes;
};

/* Torch aligns its tensors to this many bytes. */
#define TENSOR_ALIGNMENT 64

/* Makes tensors like those of a checkpoint: about 300, from a few bytes to a tenth of `bytes`,
 * which is their total size. */
void workload_make_mixed(struct workload *workload, uint64_t bytes);
/* Makes `count` tensors of `each` bytes. */
void workload_make_equal(struct workload *workload, uint64_t count, uint64_t each);
void workload_free(struct workload *workload);
uint64_t tensor_bytes(const struct ioshape_tensor *tensor);
/* Makes the twin hold at least `bytes`, and touches its pages. */
void workload_need_twin(struct workload *workload, uint64_t bytes);
/* Returns a digest of every byte of every tensor. workload_spoil() overwrites all tensors. */
uint64_t workload_digest(const struct workload *workload);
void workload_spoil(struct workload *workload);

/* ---- Subjects: the library (ours.c) and its baselines (plain.c) ------------------------------ */

struct bench {
	struct workload workload;
	struct ioshape_context *context;
	struct ioshape_group *group;
	struct ioshape_save *save; /* the background save, or NULL */
	uint64_t save_began_ns;
	struct ioshape_slot *slot; /* the slot that is held, or NULL */
};

/* Opens a context with the settings that the command names. */
struct ioshape_context *open_context(const struct command *command);
void run_context(struct bench *bench, const struct command *command);
void run_save(struct bench *bench, const struct command *command);
void run_async(struct bench *bench, const struct command *command);
void run_wait(struct bench *bench, const struct command *command);
void run_load(struct bench *bench, const struct command *command);
void end_ours(struct bench *bench);

/* Adds the fields of the report to the answer (ours.c). */
void answer_report(const struct bench *bench, const struct ioshape_report *report);

/* Groups (group.c). Ranks on different "nodes" are connected by sockets (comm.c). */
void run_group(struct bench *bench, const struct command *command);
void run_group_save(struct bench *bench, const struct command *command);
void run_group_async(struct bench *bench, const struct command *command);
void run_group_end(struct bench *bench, const struct command *command);
void end_group(struct bench *bench);
/* Returns the comm that uses these sockets, or NULL if `fds` is NULL. */
const struct ioshape_comm *comm_of(const char *fds, uint32_t rank);

/* Answers the bytes that were copied since the last call (copied.c, or uncounted.c). */
void run_copied(struct bench *bench, const struct command *command);

/* Slots (slots.c, handover.c) and their baselines. */
void run_acquire(struct bench *bench, const struct command *command);
void run_release(struct bench *bench, const struct command *command);
void run_turns(struct bench *bench, const struct command *command);
void run_pings(struct bench *bench, const struct command *command);
void run_flocks(struct bench *bench, const struct command *command);
void run_contend(struct bench *bench, const struct command *command);
void run_stream(struct bench *bench, const struct command *command);
void run_handovers(struct bench *bench, const struct command *command);

void run_memcpy(struct bench *bench, const struct command *command);
void run_write(struct bench *bench, const struct command *command);
void run_dance(struct bench *bench, const struct command *command);
void run_read(struct bench *bench, const struct command *command);
void run_cached(struct bench *bench, const struct command *command);

#endif
