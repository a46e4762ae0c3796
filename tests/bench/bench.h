/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process in which the benchmarks happen: it holds tensors and a context and does what the
 * driver asks, one command at a time, timing the thing itself and nothing around it.
 *
 * A command is a line of words parted by tabs: a verb, then key=value. The answer is one line of
 * JSON.
 */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <ioshape/group.h>
#include <ioshape/ioshape.h>
#include <ioshape/slots.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Commands and answers (talk.c)
 * ------------------------------------------------------------------ */

#define MAX_WORDS 32

struct command {
	const char *verb;
	const char *keys[MAX_WORDS];
	const char *values[MAX_WORDS];
	size_t count;
};

/* Cuts the line into words, in place. */
void parse_command(struct command *command, char *line);
/* NULL if it was not given. */
const char *command_text(const struct command *command, const char *key);
/* Ends the process with an answer that says so if the value is missing. */
const char *command_need(const struct command *command, const char *key);
uint64_t command_number(const struct command *command, const char *key, uint64_t otherwise);

/* The answer grows by these, and leaves with answer_send(). */
void answer_number(const char *name, double value);
void answer_text(const char *name, const char *value);
void answer_send(void);
/* The only way in which a command fails: the answer is {"error": ...} and the process ends. */
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* ---- What a command costs (cost.c)
 * ------------------------------------------------------------------- */

/* Begin right before the thing to be measured, end right after it; answers in seconds. */
struct cost {
	uint64_t began_ns;
	double began_cpu_s;
};

void cost_begin(struct cost *cost);
/* Adds "seconds", "cpu_seconds" (all threads, user and kernel) and, on the clock of this machine,
 * "began_s" and "ended_s" to the answer. */
void cost_end(const struct cost *cost);
double seconds_since(uint64_t began_ns);
uint64_t now_ns(void);

/* Sets the peak of resident memory back to what there is now, in bytes. */
uint64_t memory_reset_peak(void);
/* Adds "extra_bytes" (peak less what there was) and "pinned_bytes" to the answer. */
void memory_answer(uint64_t before);

/* ---- Tensors (workload.c)
 * ------------------------------------------------------------------------------ */

struct workload {
	struct ioshape_tensor *tensors;
	size_t count;
	uint64_t bytes;
	/* As many bytes in one piece, warm: what baselines copy to, read into and write from. */
	uint8_t *twin;
	size_t twin_bytes;
};

/* Torch aligns its tensors to this. */
#define TENSOR_ALIGNMENT 64

/* A checkpoint's mix: about 300 tensors, from a few bytes to a tenth of all, `bytes` together. */
void workload_make_mixed(struct workload *workload, uint64_t bytes);
/* `count` tensors of `each` bytes. */
void workload_make_equal(struct workload *workload, uint64_t count, uint64_t each);
void workload_free(struct workload *workload);
uint64_t tensor_bytes(const struct ioshape_tensor *tensor);
/* Makes the twin hold at least so many bytes, and touches them. */
void workload_need_twin(struct workload *workload, uint64_t bytes);
/* A number that stands for every byte of every tensor, and a way to spoil them all. */
uint64_t workload_digest(const struct workload *workload);
void workload_spoil(struct workload *workload);

/* ---- Subjects: the library (ours.c) and what it is compared with (plain.c)
 * ---------------------------------- */

struct bench {
	struct workload workload;
	struct ioshape_context *context;
	struct ioshape_group *group;
	struct ioshape_save *save; /* in the background */
	uint64_t save_began_ns;
	struct ioshape_slot *slot; /* that is held */
};

/* With the settings that the command names. */
struct ioshape_context *open_context(const struct command *command);
void run_context(struct bench *bench, const struct command *command);
void run_save(struct bench *bench, const struct command *command);
void run_async(struct bench *bench, const struct command *command);
void run_wait(struct bench *bench, const struct command *command);
void run_load(struct bench *bench, const struct command *command);
void end_ours(struct bench *bench);

/* Adds what it says to the answer (ours.c). */
void answer_report(const struct bench *bench, const struct ioshape_report *report);

/* Groups (group.c), and their ways between nodes (comm.c): sockets to the others, by their rank. */
void run_group(struct bench *bench, const struct command *command);
void run_group_save(struct bench *bench, const struct command *command);
void run_group_async(struct bench *bench, const struct command *command);
void run_group_end(struct bench *bench, const struct command *command);
void end_group(struct bench *bench);
/* NULL for NULL. */
const struct ioshape_comm *comm_of(const char *fds, uint32_t rank);

/* Bytes that were copied since the last time it was asked (copied.c, or uncounted.c). */
void run_copied(struct bench *bench, const struct command *command);

/* Slots (slots.c, handover.c), and what they are compared with. */
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
