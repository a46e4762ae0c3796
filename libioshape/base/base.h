/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lowest floor: what every other floor stands on. No I/O but the environment and the clock.
 */
#ifndef BASE_BASE_H
#define BASE_BASE_H

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <ioshape/context.h>

/* Marks the definition of a public function; everything else is hidden. */
#define IOSHAPE_EXPORT __attribute__((visibility("default")))

#define ARRAY_LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define KIB 1024ull
#define MIB (1024ull * KIB)
#define GIB (1024ull * MIB)

/* ---- Errors (error.c) ------------------------------------------------------------------------ */

#define BASE_ERROR_TEXT_BYTES 1024

/*
 * The first failure of an operation: a code and the sentence that goes with it. Zero it before use.
 * It lives in handles or on the stack and owns nothing.
 */
struct base_error {
	int code; /* 0 while nothing has failed */
	char text[BASE_ERROR_TEXT_BYTES];
};

/*
 * Records a failure and returns `code`, so that `return base_fail(...)` reads well. The first
 * failure is the one that is kept: what fails while cleaning up must not hide it. The sentence
 * should name path, operation and remedy; the text of the code is appended to it after a colon.
 * `error` may be NULL.
 */
int base_fail(struct base_error *error, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* The same for a sentence that has the text of the code in it already: told by somebody else. */
int base_fail_as_told(struct base_error *error, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* The same for -ENOMEM, naming what the memory was for. */
int base_no_memory(struct base_error *error, const char *purpose, uint64_t bytes);

/* ---- Log (log.c) ----------------------------------------------------------------------------- */

struct base_log {
	ioshape_log_fn write; /* NULL: nobody listens */
	void *user;
	enum ioshape_log_level level;
};

void base_log(const struct base_log *log, enum ioshape_log_level level, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* ---- Clock (clock.c) ------------------------------------------------------------------------- */

/* Monotonic; nanoseconds. */
uint64_t base_now_ns(void);
/* By the clock on the wall: since 1970. */
double base_wall_seconds(void);

/* A condition variable that waits by this clock, which nobody can set. */
void base_cond_init(pthread_cond_t *condition);
/* pthread_cond_wait() for at most so long; false if the time is over. */
bool base_cond_wait_ms(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t timeout_ms);

static inline uint64_t base_ms_to_ns(uint64_t ms)
{
	return ms * 1000000;
}

static inline double base_seconds(uint64_t ns)
{
	return (double)ns / 1e9;
}

/* ---- Threads (thread.c) ---------------------------------------------------------------------- */

/* A thread of the library's: it blocks all signals. 0 or a negative errno. */
int base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);

/* ---- This process (process.c) ---------------------------------------------------------------- */

/* A number that nobody else draws, never 0: for names. Not for secrets. */
uint64_t base_random(void);
/* As getpid(), which costs as much as everything else that a short call of ours does. */
pid_t base_pid(void);
/* How large its files may get, in bytes. For a write beyond that the kernel sends a signal,
 * SIGXFSZ, that would end the application. */
uint64_t base_largest_file(void);

/* ---- SIGPIPE (sigpipe.c) --------------------------------------------------------------------- */

/* What a thread's mask was, and whether a signal had come to it before. */
struct base_held_sigpipe {
	sigset_t before;
	bool was_pending;
};

/*
 * Around writes to pipes and sockets: a reader that went away must be an error, not a signal that
 * ends the application. `raised`: a write in between failed or was short, so that there may be a
 * signal to take back. Both leave errno alone.
 */
void base_hold_sigpipe(struct base_held_sigpipe *held);
void base_let_sigpipe(const struct base_held_sigpipe *held, bool raised);

/* ---- Options (options.c) --------------------------------------------------------------------- */

/*
 * Takes over a caller's option struct that begins with `size_t size` into `into`, a struct of
 * `known` bytes, whatever the age of the caller's headers. NULL leaves zeros. -EINVAL if bytes that
 * this library does not know are not zero, or if the size is impossible; `what` names the struct in
 * the sentence.
 */
int base_take_options(void *into, size_t known, const void *from, const char *what,
		      struct base_error *error);

/* The other way round, for structs that are filled: writes no more than the caller's `size`. */
int base_give_struct(void *into, const void *from, size_t known, const char *what,
		     struct base_error *error);

/*
 * Environment variables. An unset or empty one leaves *value alone. -EINVAL, naming the variable,
 * its value and what is allowed, if it cannot be understood. Sizes take K, M, G, T (binary).
 */
int base_env_bytes(const char *variable, uint64_t *value, struct base_error *error);
int base_env_count(const char *variable, uint32_t *value, struct base_error *error);
/* `words` are the choices for 0, 1, 2, ..., ended by NULL. */
int base_env_choice(const char *variable, const char *const *words, int *value,
		    struct base_error *error);

/* "4194304", "4M": a whole number and at most one suffix. -EINVAL, or -ERANGE above 64 bits. */
int base_parse_bytes(const char *text, uint64_t *value);

/* ---- Checksum (checksum.c) ------------------------------------------------------------------- */

/* CRC-32 of zip and gzip. `crc` continues an earlier result; 0 begins. */
uint32_t base_crc32(uint32_t crc, const void *data, size_t bytes);

/* Copies and checksums in one pass, while each piece is in the first-level caches. */
uint32_t base_copy_crc32(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);

/* The checksum of A followed by B, given both checksums and the length of B. */
uint32_t base_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

/*
 * Up to here checksumming bytes, which are in a cache, a second time costs less than combining
 * checksums.
 */
#define BASE_CRC32_TWICE_BYTES (16 * KIB)

/* A number for a text (FNV-1a): to tell texts apart, not to trust one. */
uint64_t base_hash_text(const char *text);

/* ---- Memory (memory.c) ----------------------------------------------------------------------- */

/*
 * Page-aligned memory straight from the kernel: with huge pages where it has them, not inherited by
 * forked children (kernel I/O may be writing to it). NULL if there is none.
 */
void *base_map(size_t bytes);
void base_unmap(void *memory, size_t bytes);
/*
 * Memory of somebody else's, never written to, that will be filled from beginning to end: wishes
 * for huge pages. True if there was something to wish for.
 */
bool base_expect_fill(void *memory, size_t bytes);
/* Touches every page now rather than at first use. Safe at any time: contents stay. */
void base_prefault(void *memory, size_t bytes);

/* ---- Memory that other processes can map (shared.c) ------------------------------------------ */

/*
 * A memfd: an fd without any memory yet, sealed against shrinking. Whoever maps it cannot be hurt
 * by what its owner does, and it is gone with the last process that holds it. Negative errno.
 */
int base_shared_open(void);
/* Makes it longer; takes no memory yet. -EFBIG if RLIMIT_FSIZE forbids that. */
int base_shared_grow(int fd, uint64_t bytes);
/*
 * Gets memory for a part of it and maps that for writing, not inherited by forked children. Whole
 * pages. -ENOMEM if there is none: a later touch cannot fail. base_unmap() undoes the mapping,
 * base_shared_drop() gives the memory back.
 */
int base_shared_map(int fd, uint64_t offset, size_t bytes, void **memory);
void base_shared_drop(int fd, uint64_t offset, size_t bytes);
/*
 * Somebody else's, all of it, for reading: base_unmap(). *view is NULL if it is empty. -EPERM if it
 * is not sealed against shrinking.
 */
int base_shared_view(int fd, const void **view, uint64_t *bytes);

/* ---- Texts and bytes (memory.c) -------------------------------------------------------------- */

/* Frees a text that may hold a password, and leaves no copy. NULL is fine. */
void base_free_secret(char *text);

/* Bytes that grow. Zero it to begin. After a failed append it is unchanged. */
struct base_buffer {
	uint8_t *data;
	size_t bytes;
	size_t room;
};

int base_buffer_reserve(struct base_buffer *buffer, size_t more); /* 0 or -ENOMEM */
int base_buffer_append(struct base_buffer *buffer, const void *data, size_t bytes);
void base_buffer_free(struct base_buffer *buffer);

/* ---- Little-endian numbers (inline: the formats on disk are little-endian) ------------------- */

static inline void base_put_le(uint8_t *to, uint64_t value, unsigned bytes)
{
	for (unsigned i = 0; i < bytes; i++)
		to[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t base_get_le(const uint8_t *from, unsigned bytes)
{
	uint64_t value = 0;

	for (unsigned i = 0; i < bytes; i++)
		value |= (uint64_t)from[i] << (8 * i);
	return value;
}

/* The next multiple of `alignment`, a power of two. The caller knows that it does not overflow. */
static inline uint64_t base_round_up(uint64_t value, uint64_t alignment)
{
	return (value + alignment - 1) & ~(alignment - 1);
}

#endif
