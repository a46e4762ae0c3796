/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lowest floor: what every other floor stands on. No I/O but the environment and the clock.
 */
#ifndef BASE_BASE_H
#define BASE_BASE_H

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "internal.h"

#include <ioshape/group.h>
#include <ioshape/ioshape.h>

/* Marks the definition of a public function; everything else is hidden. */
#define IOSHAPE_EXPORT __attribute__((visibility("default")))

#define ARRAY_LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define KIB 1024ull
#define MIB (1024ull * KIB)
#define GIB (1024ull * MIB)

/* The number of a format that versions of the library share. Tests build a later version. */
#ifndef BASE_FORMATS_AHEAD
#define BASE_FORMATS_AHEAD 0
#endif
#define BASE_FORMAT(number) ((number) + BASE_FORMATS_AHEAD)

/* Whether tests/bench.sh ablation leaves this mechanism out, in a build of its own (process.c). */
#ifdef IOSHAPE_ABLATION
bool base_without(const char *mechanism);
#else
#define base_without(mechanism) false
#endif

/* ---- Errors (error.c) ------------------------------------------------------------------------ */

#define BASE_ERROR_TEXT_BYTES 1024

/* Which numbers of an error are set. */
enum { BASE_KNOWS_OFFSET = 1, BASE_KNOWS_RANK = 2, BASE_KNOWS_SPACE = 4 };

/*
 * The first failure of an operation, as a value. Zero it before use. It lives in handles or on the
 * stack and owns nothing.
 */
struct base_error {
	int code;                             /* 0 while nothing has failed */
	unsigned known;                       /* which numbers below are set */
	const char *operation;                /* "save", "load", ...; static; NULL: not said */
	char text[BASE_ERROR_TEXT_BYTES];     /* sentence and remedy */
	char sentence[BASE_ERROR_TEXT_BYTES]; /* what failed, and why */
	char remedy[BASE_ERROR_TEXT_BYTES];   /* what to do about it; "" if nothing is known */
	char path[PATH_MAX];                  /* "" if there is none */
	char record[256];                     /* "" if it is about none */
	uint64_t offset;                      /* of the file */
	uint64_t needed_bytes;
	uint64_t free_bytes; /* UINT64_MAX: not known */
	uint32_t rank;
};

/* As good as zeros, where 7 KiB of them would cost as much as the operation. */
static inline void base_error_begin(struct base_error *error)
{
	error->code = 0;
	error->known = 0;
	error->operation = NULL;
	*error->text = *error->sentence = *error->remedy = *error->path = *error->record = 0;
}

/*
 * Each has a form with a remedy: what to do about it, in words that may be BASE_WORDS(). In the
 * form without one the remedy that the error has stays.
 */

/*
 * Records a failure and returns `code`, so that `return base_fail(...)` reads well. The first
 * failure is the one that is kept: what fails while cleaning up must not hide it. The sentence
 * should be `cannot WHAT "PATH"`; the text of the errno is appended to it after a colon, because it
 * says why. `error` may be NULL.
 */
int base_fail_with(struct base_error *error, int code, const char *remedy, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
#define base_fail(error, code, ...) base_fail_with(error, code, NULL, __VA_ARGS__)

/* Records a failure whose sentence says why by itself: no errno's text is appended. */
int base_refuse_with(struct base_error *error, int code, const char *remedy, const char *format,
		     ...) __attribute__((format(printf, 4, 5)));
#define base_refuse(error, code, ...) base_refuse_with(error, code, NULL, __VA_ARGS__)

/*
 * Tells the same failure in other words: what it is about stays. Its own sentence may be among the
 * arguments.
 */
int base_rephrase_with(struct base_error *error, int code, const char *remedy, const char *format,
		       ...) __attribute__((format(printf, 4, 5)));
#define base_rephrase(error, code, ...) base_rephrase_with(error, code, NULL, __VA_ARGS__)

/* Prints into a text that lives as long as its block: for remedies. */
#define BASE_WORDS(...) base_words((char[BASE_ERROR_TEXT_BYTES]){ 0 }, __VA_ARGS__)
const char *base_words(char into[BASE_ERROR_TEXT_BYTES], const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* The same for -ENOMEM, naming what the memory was for. */
int base_no_memory(struct base_error *error, const char *purpose, uint64_t bytes);

/* The failure of something else as that of `error`. Returns its code. */
int base_pass_on(struct base_error *error, const struct base_error *inner);

/*
 * Last in every public call that can fail: a failure becomes what ioshape_last_error() tells this
 * thread, about `operation` and `path` unless the error knows better. Returns `code`.
 */
int base_leave(int code, const char *operation, const char *path, const struct base_error *error);
/* The same where an argument that is needed is NULL: -EINVAL. */
int base_missing(const char *operation);
/* What the thread's last public call that failed, failed with: for calls that make such calls. */
const struct base_error *base_last_error(void);

/*
 * Rotates the letters of a text, in the build that proves that no program reads sentences
 * (-Dgarble=true); else nothing.
 */
void base_garble(char *text);

/* The bytes of the UTF-8 sequence that begins a text of `room` bytes, at least 1. 0 if there is
 * none: no overlong forms, no surrogates, nothing above U+10FFFF, no NUL. */
size_t base_utf8_bytes(const char *text, size_t room);

/*
 * Replaces by "?", in place, each character that a terminal would act on or not show, and each byte
 * that is not UTF-8. Names in files and directories may be an attacker's. All sentences, log lines
 * and notes of reports pass through it, so that no caller can forget it.
 */
void base_make_plain(char *text);

/* "38.2 MiB", "512 bytes": for sentences. In BASE_SIZE() the text lives as long as its block. */
#define BASE_SIZE_BYTES 24
#define BASE_SIZE(bytes) base_size((char[BASE_SIZE_BYTES]){ 0 }, bytes)
const char *base_size(char into[BASE_SIZE_BYTES], uint64_t bytes);

/*
 * What the error is about. After a failure; nothing happens without one. What was set first stays:
 * who is nearer to the failure knows better.
 */
void base_error_about(struct base_error *error, const char *operation, const char *path);
void base_error_in_record(struct base_error *error, const char *record);
void base_error_at(struct base_error *error, uint64_t offset);
void base_error_of_rank(struct base_error *error, uint32_t rank);
void base_error_space(struct base_error *error, uint64_t needed_bytes, uint64_t free_bytes);

/* ---- Log (error.c) --------------------------------------------------------------------------- */

struct base_log {
	ioshape_log_fn write; /* NULL: nobody listens */
	void *user;
	enum ioshape_log_level level;
};

void base_log(const struct base_log *log, enum ioshape_log_level level, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* ---- Clock, deadlines and waits (process.c) -------------------------------------------------- */

/* Monotonic; nanoseconds. */
uint64_t base_now_ns(void);
/* By the clock on the wall: since 1970. */
double base_wall_seconds(void);

/* A condition variable that waits by this clock, which nobody can set. */
void base_cond_init(pthread_cond_t *condition);
/* pthread_cond_wait() for at most so long; false if the time is over. */
bool base_cond_wait_ms(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t timeout_ms);

/* When so many ms from now are over; below 0: they are. 0 for 0: there is no deadline. */
uint64_t base_deadline_ns(int64_t ms);

/*
 * Limits how much of dead processes' files a save removes, because the save waits meanwhile. The
 * next save removes the rest. NULL, where a budget is expected, is one without end.
 */
#define BASE_TIDY_NS UINT64_C(2000000000)
#define BASE_TIDY_ENTRIES 10000u

struct base_budget {
	uint64_t until_ns; /* 0: its time begins with the first look */
	uint32_t entries;  /* that may still be removed; 0: the budget is spent */
};

struct base_budget base_budget_begin(void);
/* Whether there is time left to look at one more entry. */
bool base_budget_look(struct base_budget *budget);
/* Whether one more entry may be removed: the caller does it then. */
bool base_budget_take(struct base_budget *budget);
static inline bool base_budget_is_spent(const struct base_budget *budget)
{
	return !budget->entries;
}

static inline uint64_t base_ms_to_ns(uint64_t ms)
{
	return ms * 1000000;
}

static inline double base_seconds(uint64_t ns)
{
	return (double)ns / 1e9;
}

/* ---- Threads (process.c) --------------------------------------------------------------------- */

/* A thread of the library's: it blocks all signals. 0 or a negative errno. */
int base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);

/* ---- Threads that help (process.c) ----------------------------------------------------------- */

#define BASE_MOST_HELPERS 64u

/* They wait for work from one job to the next. What is in here belongs to process.c. */
struct base_crew {
	pthread_t threads[BASE_MOST_HELPERS];
	unsigned started;
	pid_t owner;          /* the process that has them */
	pthread_mutex_t lock; /* of what follows */
	pthread_cond_t begins, ends;
	void (*work)(void *user);
	void *user;
	unsigned places; /* for helpers that have not begun */
	unsigned busy;   /* helpers that work */
	bool dismissed;
};

void base_crew_init(struct base_crew *crew);

/*
 * So many helpers, or fewer, call work(user) once each, beside what the caller does itself. None of
 * them may be needed: a helper that does not run in time does not begin.
 */
void base_crew_begin(struct base_crew *crew, unsigned wanted, void (*work)(void *user), void *user);

/* No helper begins any more; those that have begun have returned. */
void base_crew_finish(struct base_crew *crew);

/* Ends the threads. In a child, which has none of them, it does nothing. */
void base_crew_dismiss(struct base_crew *crew);

/* ---- Copies by several threads (process.c; its functions are in internal.h) ------------------ */

/* More than so many have no more bandwidth of memory, or leave none to others. */
#define BASE_MOST_COPY_THREADS 8

/*
 * Threads that copy or verify memory: as many as the cores that this process may run on, and no
 * more than its share of the machine's. A rank that has cores of its own has no more than that.
 */
unsigned base_copy_threads(void);

/* ---- This process (process.c) ---------------------------------------------------------------- */

/* A number that nobody else draws, never 0: for names. Not for secrets. */
uint64_t base_random(void);
/* As getpid(), which costs as much as everything else that a short call of ours does. */
pid_t base_pid(void);
/* How large its files may get, in bytes. For a write beyond that the kernel sends a signal,
 * SIGXFSZ, that would end the application. */
uint64_t base_largest_file(void);

/*
 * Whether what belongs to this user is ours: every floor asks here. In a user namespace "nobody" is
 * all users that have no number there, so it is none of them.
 */
bool base_is_own_user(uid_t user);
/* Whether the number stands for one user alone: also for a server's name for us. */
bool base_is_one_user(uid_t user);

/* ---- Descriptors (process.c) ----------------------------------------------------------------- */

/*
 * A child of fork() must not keep what the library has open: it would keep locks when this process
 * has died, and the space of files that were removed. Close-on-exec helps only if it executes
 * something. Whoever opens a file keeps it by this: base_own(open(...)). In a child, its number
 * leads nowhere. Returns what base_above_streams() makes of fd; negative ones are fine.
 */
int base_own(int fd);
/*
 * The same file under a number above those of the standard streams. A daemon that has closed these
 * still writes messages to 2, and may let dup2() put a log there: neither must meet a checkpoint or
 * a connection, nor must we close that log. So whatever the library opens goes through this or
 * base_own(); tests/house looks. Returns -1 with errno, and fd closed, if there is no number left.
 */
int base_above_streams(int fd);
/* Before somebody else closes it. Whether it was ours: in a child, what the parent had is not. */
bool base_disown(int fd);
/* As close(), of one that was kept; -1 is fine. */
int base_close(int fd);

/* ---- SIGPIPE (process.c) --------------------------------------------------------------------- */

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

/* ---- Options (settings.c) -------------------------------------------------------------------- */

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

/* "4194304", "4M": a whole number and at most one suffix. -EINVAL, or -ERANGE above 64 bits. */
int base_parse_bytes(const char *text, uint64_t *value);

/* ---- Settings (settings.c, settings.def) ------------------------------------------------------
 */

/* Which option struct has a setting's field: struct ioshape_context_options or
 * struct ioshape_group_options. The others are those of the Python package. */
enum base_settings_owner {
	BASE_SETTINGS_CONTEXT,
	BASE_SETTINGS_GROUP,
	BASE_SETTINGS_TIER,
	BASE_SETTINGS_PACKAGE
};

/*
 * Fills what an option struct leaves at zero from variables, and checks both. Defaults are left at
 * zero. -EINVAL, naming field or variable and what it takes. Texts are the environment's own.
 */
int base_settings_take(enum base_settings_owner owner, void *options, struct base_error *error);

/* The longest name of a variable, with its end. */
#define BASE_SETTING_NAME_BYTES 32

/* A failure because of a text: names the field that it was given in, or the variable that it came
 * from. Returns the failure's code. */
int base_settings_blame(struct base_error *error, const char *field, const char *text);

/* Logs a warning for each variable IOSHAPE_... that is no setting, with the nearest that is one, or
 * with the reason if the setting is retired: once in a process. */
void base_settings_warn(const struct base_log *log);

/* ---- Checksum (checksum.c; the plain ones are in internal.h) --------------------------------- */

/*
 * Copies and checksums in one pass, while each piece is in the first-level caches. The checksum is
 * that of the copy, even if somebody changes the original meanwhile.
 */
uint32_t base_copy_crc32(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);
/*
 * The same of what nobody else can change, to where it is not needed at once: the checksum is that
 * of the original, and the stores go past the caches: 1.4 times as fast in a micro-benchmark.
 */
uint32_t base_crc32_move(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);

/*
 * Up to here checksumming bytes, which are in a cache, a second time costs less than combining
 * checksums.
 */
#define BASE_CRC32_TWICE_BYTES (16 * KIB)

/* ---- Hashes (checksum.c) --------------------------------------------------------------------- */

/* A number for a text (FNV-1a): to tell texts apart, not to trust one. */
uint64_t base_hash_text(const char *text);

static inline uint64_t base_rotate(uint64_t word, unsigned bits)
{
	return word << bits | word >> (64 - bits);
}

/* A round of SipHash (Aumasson and Bernstein, 2012): for MACs, and for tables of hostile names. */
static inline void base_sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[2] += v[3];
	v[1] = base_rotate(v[1], 13) ^ v[0];
	v[3] = base_rotate(v[3], 16) ^ v[2];
	v[0] = base_rotate(v[0], 32);
	v[2] += v[1];
	v[0] += v[3];
	v[1] = base_rotate(v[1], 17) ^ v[2];
	v[3] = base_rotate(v[3], 21) ^ v[0];
	v[2] = base_rotate(v[2], 32);
}

/* ---- The umask (process.c) ------------------------------------------------------------------- */

/* The process's, without changing it as umask() does; -1 if the kernel does not tell. */
int base_umask(void);

/* ---- Authentic bytes (checksum.c) ------------------------------------------------------------ */

#define BASE_MAC_BYTES 16 /* of a key as well */

/* Who does not have the key cannot make the MAC of any bytes but those that it has seen one of. */
void base_mac(uint8_t mac[BASE_MAC_BYTES], const uint8_t key[BASE_MAC_BYTES], const void *data,
	      size_t bytes);

/* Computes the MAC of bytes that come in pieces, wherever they are cut. */
struct base_mac {
	uint64_t v[4];
	uint64_t tail; /* the last bytes, less than 8 */
	uint64_t bytes;
};

void base_mac_begin(struct base_mac *state, const uint8_t key[BASE_MAC_BYTES]);
void base_mac_put(struct base_mac *state, const void *data, size_t bytes);
/* Ends it: `state` is used up. */
void base_mac_end(struct base_mac *state, uint8_t mac[BASE_MAC_BYTES]);

/* ---- Memory (memory.c) ----------------------------------------------------------------------- */

/*
 * Page-aligned memory straight from the kernel: with huge pages where it has them, not inherited by
 * forked children (kernel I/O may be writing to it). NULL if there is none.
 */
void *base_map(size_t bytes);
void base_unmap(void *memory, size_t bytes);
/* Touches every page now rather than at first use. Safe at any time: contents stay. */
void base_prefault(void *memory, size_t bytes);

/* ---- Memory that is filled for the first time (memory.c) ------------------------------------- */

struct base_extent {
	uintptr_t begin, end;
};

struct base_fresh;

/* Each stretch costs the process one or two of the 65,530 mappings it may have: shorter ones are
 * not worth it. */
#define BASE_FRESH_LEAST_BYTES (4 * MIB)

/*
 * Memory of somebody else's that has never been written to and will be filled: at most so many
 * stretches of it in huge pages. The list is sorted, and not needed any more. NULL if nothing is
 * large enough, or there is no memory to remember it.
 */
struct base_fresh *base_fresh_open(struct base_extent *extents, size_t count, size_t most);
/* How many mappings the process may have got by it; 0 for NULL. */
size_t base_fresh_count(const struct base_fresh *fresh);
/* Before this part of it is filled; threads may do so side by side. Nothing for NULL. */
void base_fresh_prepare(struct base_fresh *fresh, const void *memory, size_t bytes);
void base_fresh_close(struct base_fresh *fresh);

/* ---- Memory that other processes can map (memory.c) ------------------------------------------ */

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

/* The directory that the last part of a path is in, to be freed; NULL without memory. */
char *base_directory_of(const char *path);

/* struct base_buffer, bytes that grow, is in internal.h. */
int base_buffer_reserve(struct base_buffer *buffer, size_t more); /* 0 or -ENOMEM */
int base_buffer_append(struct base_buffer *buffer, const void *data, size_t bytes);

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
