/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The base layer, which all other layers use: errors, log, clock, threads, process, settings,
 * checksums and memory. Its only I/O is the environment, /proc and the clock.
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

/*
 * Returns the number of a format that versions of the library share. Tests build a later version.
 */
#ifndef BASE_FORMATS_AHEAD
#define BASE_FORMATS_AHEAD 0
#endif
#define BASE_FORMAT(number) ((number) + BASE_FORMATS_AHEAD)

/*
 * Returns whether an ablation build leaves this mechanism out (tests/bench.sh ablation; process.c).
 */
#ifdef IOSHAPE_ABLATION
bool base_without(const char *mechanism);
#else
#define base_without(mechanism) false
#endif

/* ---- Errors (error.c) ------------------------------------------------------------------------ */

#define BASE_ERROR_TEXT_BYTES 1024

/* Flags: numbers of an error that are set. */
enum { BASE_KNOWS_OFFSET = 1, BASE_KNOWS_RANK = 2, BASE_KNOWS_SPACE = 4 };

/*
 * The first failure of an operation, as a value. Zero it before use. It is stored in handles or on
 * the stack and owns no memory.
 */
struct base_error {
	int code;       /* 0 while nothing has failed */
	unsigned known; /* flags BASE_KNOWS_… of the numbers below */
	/* "save", "load", …; static; NULL: not known */
	const char *operation;
	char text[BASE_ERROR_TEXT_BYTES];     /* sentence and remedy */
	char sentence[BASE_ERROR_TEXT_BYTES]; /* failure and reason */
	char remedy[BASE_ERROR_TEXT_BYTES];   /* advice; "" if there is none */
	char path[PATH_MAX];                  /* path; "" if there is none */
	char record[256];                     /* record; "" if there is none */
	uint64_t offset;                      /* offset in the file */
	uint64_t needed_bytes;
	uint64_t free_bytes; /* UINT64_MAX: not known */
	uint32_t rank;
};

/*
 * Begins an error without a failure. Cheaper than zeroing 7 KiB, which would cost as much as a
 * short operation.
 */
static inline void base_error_begin(struct base_error *error)
{
	error->code = 0;
	error->known = 0;
	error->operation = NULL;
	*error->text = *error->sentence = *error->remedy = *error->path = *error->record = 0;
}

/*
 * Each function below has a form with a remedy: advice, which BASE_WORDS() may print. The form
 * without one keeps the error's present remedy.
 */

/*
 * Records a failure and returns `code`, so that callers can write `return base_fail(...)`. Only the
 * first failure is kept: a failure during clean-up must not hide it. The sentence should be `cannot
 * WHAT "PATH"`; the text of the errno is appended after a colon as the reason. `error` may be NULL.
 */
int base_fail_with(struct base_error *error, int code, const char *remedy, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
#define base_fail(error, code, ...) base_fail_with(error, code, NULL, __VA_ARGS__)

/* Records a failure whose sentence states the reason itself: no text of an errno is appended. */
int base_fail_reason_with(struct base_error *error, int code, const char *remedy,
			  const char *format, ...) __attribute__((format(printf, 4, 5)));
#define base_fail_reason(error, code, ...) base_fail_reason_with(error, code, NULL, __VA_ARGS__)

/*
 * Replaces the sentence of a failure; its path, record and numbers stay. The arguments may include
 * the old sentence.
 */
int base_rephrase_with(struct base_error *error, int code, const char *remedy, const char *format,
		       ...) __attribute__((format(printf, 4, 5)));
#define base_rephrase(error, code, ...) base_rephrase_with(error, code, NULL, __VA_ARGS__)

/* Prints into a text that lives as long as the enclosing block; for remedies. */
#define BASE_WORDS(...) base_words((char[BASE_ERROR_TEXT_BYTES]){ 0 }, __VA_ARGS__)
const char *base_words(char into[BASE_ERROR_TEXT_BYTES], const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* Records -ENOMEM with the purpose and size of the memory, and returns it. */
int base_no_memory(struct base_error *error, const char *purpose, uint64_t bytes);

/* Copies the failure `inner` to `error`, unless that has one. Returns the code of `inner`. */
int base_propagate(struct base_error *error, const struct base_error *inner);

/*
 * Ends a public call that can fail: stores a failure for ioshape_last_error() of this thread.
 * `operation` and `path` are used unless the error has its own. Returns `code`.
 */
int base_return(int code, const char *operation, const char *path, const struct base_error *error);
/* Ends a public call because a required argument is NULL: returns -EINVAL. */
int base_null_argument(const char *operation);
/*
 * Returns the failure of this thread's last failed public call, for public functions that call
 * others.
 */
const struct base_error *base_last_error(void);

/*
 * Rotates the letters of a text in the build that proves that no program parses messages
 * (-Dgarble=true). Otherwise does nothing.
 */
void base_garble(char *text);

/*
 * Returns the length of the UTF-8 sequence at the beginning of a text of `size` bytes. Returns 0 if
 * it is not valid: overlong forms, surrogates, code points above U+10FFFF and NUL are not.
 */
size_t base_utf8_bytes(const char *text, size_t size);

/*
 * Replaces by "?", in place, each character that a terminal would act on or not show, and each byte
 * that is not UTF-8. Names in files and directories may come from an attacker. All error messages,
 * log lines and report texts pass through this function, so that no caller can forget it.
 */
void base_make_plain(char *text);

/*
 * Prints a size for messages: "38.2 MiB", "512 bytes". The text of BASE_SIZE() lives as long as the
 * enclosing block.
 */
#define BASE_SIZE_BYTES 24
#define BASE_SIZE(bytes) base_size((char[BASE_SIZE_BYTES]){ 0 }, bytes)
const char *base_size(char into[BASE_SIZE_BYTES], uint64_t bytes);

/*
 * Add details to a failure; they do nothing without one. The first value stays, because the code
 * nearest to the failure knows best.
 */
void base_error_about(struct base_error *error, const char *operation, const char *path);
void base_error_in_record(struct base_error *error, const char *record);
void base_error_at(struct base_error *error, uint64_t offset);
void base_error_of_rank(struct base_error *error, uint32_t rank);
void base_error_space(struct base_error *error, uint64_t needed_bytes, uint64_t free_bytes);

/* ---- Log (error.c) --------------------------------------------------------------------------- */

struct base_log {
	ioshape_log_fn write; /* NULL: messages are dropped */
	void *user;
	enum ioshape_log_level level;
};

/* Sends a message to the log callback if its level is enabled. */
void base_log(const struct base_log *log, enum ioshape_log_level level, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* ---- Clock, deadlines and waits (process.c) -------------------------------------------------- */

/* Returns the monotonic clock in nanoseconds. */
uint64_t base_now_ns(void);
/* Returns the wall-clock time in seconds since 1970. */
double base_wall_seconds(void);

/* Initialises a condition variable that waits by the monotonic clock, which cannot be set. */
void base_cond_init(pthread_cond_t *condition);
/* Waits as pthread_cond_wait() does, for at most timeout_ms. Returns false after a timeout. */
bool base_cond_wait_ms(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t timeout_ms);

/*
 * Returns the deadline that is `ms` milliseconds from now; a negative `ms` means now. Returns 0, no
 * deadline, for 0.
 */
uint64_t base_deadline_ns(int64_t ms);

/*
 * Limits of the removal of stale files in one save, because the save waits meanwhile. The next save
 * removes the rest. Functions that take a budget accept NULL: no limit.
 */
#define BASE_TIDY_NS UINT64_C(2000000000)
#define BASE_TIDY_ENTRIES 10000u

struct base_budget {
	uint64_t until_ns; /* end of the time; 0: it begins with the first look */
	uint32_t entries;  /* entries that may still be removed; 0: the budget is spent */
};

/* Returns a full budget, whose time begins with the first look. */
struct base_budget base_budget_begin(void);
/* Returns whether there is time left to look at one more entry. */
bool base_budget_look(struct base_budget *budget);
/* Returns whether the caller may remove one more entry, and counts it. */
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

/* Starts a thread of the library, which blocks all signals. Returns 0 or a negative errno. */
int base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);

/* ---- Helper threads (process.c) -------------------------------------------------------------- */

#define BASE_MOST_HELPERS 64u

/* A pool of helper threads that wait for work. Only process.c uses its members. */
struct base_crew {
	pthread_t threads[BASE_MOST_HELPERS];
	unsigned started;
	pid_t owner;          /* process that started the threads */
	uint64_t spin_ns;     /* time for which a thread looks for a change before it sleeps */
	pthread_mutex_t lock; /* protects the members below */
	pthread_cond_t begins, ends;
	void (*work)(void *user);
	void *user;
	/* Read without the lock only to find out when to take it. */
	_Atomic unsigned openings; /* helpers that may still begin */
	_Atomic unsigned busy;     /* helpers that are working */
	bool dismissed;
};

/* The spin_ns of pools that work on blocks: longer than it takes to send one to the storage. */
#define BASE_SPIN_NS 100000u

/*
 * Initialises the pool without starting threads. A thread that has nothing to do looks for work for
 * spin_ns before it sleeps, because waking it up takes about 50 us.
 */
void base_crew_init(struct base_crew *crew, uint64_t spin_ns);

/*
 * Makes at most `wanted` helpers call work(user) once each, while the caller works, too. The work
 * must not depend on a helper: one that is not scheduled in time does not begin.
 */
void base_crew_begin(struct base_crew *crew, unsigned wanted, void (*work)(void *user), void *user);

/* Keeps further helpers from beginning, and waits for those that have begun. */
void base_crew_finish(struct base_crew *crew);

/* Ends the threads. Does nothing in a child of fork(), which has none of them. */
void base_crew_dismiss(struct base_crew *crew);

/* ---- Copies by several threads (process.c; its functions are in internal.h) ------------------ */

/* Most threads for copies: more do not gain memory bandwidth, or leave none to other threads. */
#define BASE_MOST_COPY_THREADS 8

/*
 * Returns how many threads copy or verify memory: at most the cores that this process may use, and
 * at most its share of the machine's. A rank that is bound to cores uses no others.
 */
unsigned base_copy_threads(void);

/* ---- This process (process.c) ---------------------------------------------------------------- */

/* Returns the process id. Costs no system call, so that short public calls can check for a fork. */
pid_t base_pid(void);
/* Returns a random number for names, unique and never 0. Not for secrets. */
uint64_t base_random(void);
/*
 * Returns the largest file size, in bytes, that this process may write (RLIMIT_FSIZE). Beyond it,
 * the kernel sends SIGXFSZ, which would end the application.
 */
uint64_t base_largest_file(void);

/*
 * Returns whether `user` is the user of this process. All layers ask here. In a user namespace, the
 * overflow user (65534) stands for all users without a number there, so it never matches.
 */
bool base_is_own_user(uid_t user);
/*
 * Returns whether the number stands for one user alone. Also works for a number that a server maps
 * this user to.
 */
bool base_is_one_user(uid_t user);

/* ---- Descriptors (process.c) ----------------------------------------------------------------- */

/*
 * Registers a descriptor, so that a child of fork() loses it. Otherwise the child would keep locks
 * of a dead parent, and the space of removed files; close-on-exec helps only if the child calls
 * exec. The library registers every descriptor that it keeps: base_register_fd(open(...)). In a
 * child, its number refers to nothing useful. Moves the descriptor as base_above_streams() does,
 * and returns the new one; negative values are passed through.
 */
int base_register_fd(int fd);
/*
 * Moves a descriptor to a number above the standard streams. A daemon that has closed these may
 * still write messages to 2, or put a log there with dup2(). Neither must reach a checkpoint or a
 * connection, and we must not close that log. So everything the library opens goes through this or
 * base_register_fd(); tests/house checks it. Returns -1 and sets errno, with fd closed, if no
 * number is free.
 */
int base_above_streams(int fd);
/*
 * Unregisters a descriptor before other code closes it. Returns whether it was registered: in a
 * child, the parent's descriptors are not.
 */
bool base_unregister_fd(int fd);
/* Closes a registered descriptor. Does nothing for -1. */
int base_close(int fd);

/* ---- SIGPIPE (process.c) --------------------------------------------------------------------- */

/* A thread's signal mask, and whether SIGPIPE was already pending. */
struct base_held_sigpipe {
	sigset_t before;
	bool was_pending;
};

/*
 * Block SIGPIPE around writes to pipes and sockets: a reader that closed its end must cause an
 * error, not a signal that ends the application. `raised` tells that a write failed or was short,
 * so that a signal may be pending and must be taken back. Both functions keep errno.
 */
void base_hold_sigpipe(struct base_held_sigpipe *held);
void base_let_sigpipe(const struct base_held_sigpipe *held, bool raised);

/* ---- Options (settings.c) -------------------------------------------------------------------- */

/*
 * Copies a caller's option struct, which begins with `size_t size`, into `into`, a struct of
 * `known` bytes. The caller's headers may be older or newer. If `from` is NULL, `into` is zero
 * except its size. Returns -EINVAL if bytes that this library does not know are not zero, or if the
 * size is impossible. `what` names the struct in the message.
 */
int base_take_options(void *into, size_t known, const void *from, const char *what,
		      struct base_error *error);

/* Copies a struct to the caller and writes no more than the caller's `size`. */
int base_give_struct(void *into, const void *from, size_t known, const char *what,
		     struct base_error *error);

/*
 * Parses a size such as "4194304" or "4M": a whole number and at most one suffix. Returns -EINVAL,
 * or -ERANGE above 64 bits.
 */
int base_parse_bytes(const char *text, uint64_t *value);

/* ---- Settings (settings.c, settings.def) ----------------------------------------------------- */

/*
 * The option struct that has a setting's field: struct ioshape_context_options,
 * ioshape_group_options or ioshape_tier_options. BASE_SETTINGS_PACKAGE are settings of the Python
 * package only.
 */
enum base_settings_owner {
	BASE_SETTINGS_CONTEXT,
	BASE_SETTINGS_GROUP,
	BASE_SETTINGS_TIER,
	BASE_SETTINGS_PACKAGE
};

/*
 * Fills the fields that an option struct leaves at zero from environment variables, and checks all
 * fields. Fields without a value stay zero, which means the default. Returns -EINVAL with a message
 * that names the field or variable and the valid values. Texts point into the environment.
 */
int base_settings_take(enum base_settings_owner owner, void *options, struct base_error *error);

/* Bytes of the longest name of a variable, with the final 0. */
#define BASE_SETTING_NAME_BYTES 32

/*
 * Adds to a failure the name of the field or variable that `text` came from. Returns the failure's
 * code.
 */
int base_settings_blame(struct base_error *error, const char *field, const char *text);

/*
 * Logs a warning, once in a process, for each variable IOSHAPE_… that is not a setting. The warning
 * names the most similar setting or, for a retired one, the reason.
 */
void base_settings_warn(const struct base_log *log);

/* ---- Checksum (checksum.c; the plain ones are in internal.h) --------------------------------- */

/*
 * Copies bytes and checksums them in one pass. The checksum is that of the copy, even if another
 * thread changes the original meanwhile. Long copies bypass the caches if the processor can
 * checksum what it stores.
 */
uint32_t base_copy_crc32(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);
/*
 * Copies and checksums bytes that no other thread can change. Long copies bypass the caches, so use
 * it if the copy is not needed at once. On processors without VPCLMULQDQ this is 1.4 times as fast
 * in a micro-benchmark.
 */
uint32_t base_crc32_move(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);

/*
 * Up to this many bytes, checksumming cached bytes a second time costs less than combining
 * checksums.
 */
#define BASE_CRC32_TWICE_BYTES (16 * KIB)

/* ---- Hashes (checksum.c) --------------------------------------------------------------------- */

/* Returns a hash of a text (FNV-1a), which distinguishes texts but gives no security. */
uint64_t base_hash_text(const char *text);

static inline uint64_t base_rotate(uint64_t word, unsigned bits)
{
	return word << bits | word >> (64 - bits);
}

/*
 * Computes a round of SipHash (Aumasson and Bernstein, 2012), for MACs and for tables of hostile
 * names.
 */
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

/*
 * Returns the umask of the process, without changing it as umask() does; -1 if the kernel does not
 * tell it.
 */
int base_umask(void);

/* ---- Message authentication (checksum.c) ----------------------------------------------------- */

#define BASE_MAC_BYTES 16 /* also the bytes of a key */

/*
 * Computes the MAC of bytes. Without the key, an attacker can only repeat bytes and MACs that it
 * has seen.
 */
void base_mac(uint8_t mac[BASE_MAC_BYTES], const uint8_t key[BASE_MAC_BYTES], const void *data,
	      size_t bytes);

/* The state of a MAC over bytes that arrive in pieces, however they are divided. */
struct base_mac {
	uint64_t v[4];
	uint64_t tail; /* last bytes, fewer than 8 */
	uint64_t bytes;
};

/* Begin a MAC and add bytes to it. */
void base_mac_begin(struct base_mac *state, const uint8_t key[BASE_MAC_BYTES]);
void base_mac_put(struct base_mac *state, const void *data, size_t bytes);
/* Returns the MAC. `state` cannot be used afterwards. */
void base_mac_end(struct base_mac *state, uint8_t mac[BASE_MAC_BYTES]);

/* ---- Statistics of tensors (statistics.c) ---------------------------------------------------- */

/* Facts about the elements of a tensor. A complex element counts as two numbers. */
struct base_statistics {
	uint32_t dtype; /* an enum ioshape_dtype; 0: the elements are not examined */
	uint64_t count; /* numbers, including the following two kinds */
	uint64_t nans, infinities;
	uint64_t zeros;
	/* Extremes of the finite numbers. Without such numbers, the minimum is infinite, and the
	 * maximum minus infinity. */
	double minimum, maximum;
	double sum_squares; /* of finite numbers, to about six digits; may be infinite */
};

/* Begins statistics. Returns whether elements of this type are examined. */
bool base_statistics_begin(struct base_statistics *statistics, uint32_t dtype);
/* Returns how many numbers so many bytes have. */
uint64_t base_statistics_count(uint32_t dtype, uint64_t bytes);

#define BASE_STATISTICS_BLOCK 4096u
/* Sums of squares are taken for each slice of a tensor, so that several threads can take them. */
#define BASE_STATISTICS_SLICE (256 * KIB)
/* The state of statistics between calls. Begins as zeros. */
struct base_statistics_rest {
	double slices;      /* sum of squares of the slices that are complete */
	size_t slice_bytes; /* bytes of the current slice, without those below */
	size_t bytes;       /* bytes that are not added yet, because they are less than a block */
	uint8_t block[BASE_STATISTICS_BLOCK];
};
/* Adds bytes of a tensor. The statistics do not depend on how the bytes are divided. */
void base_statistics_add(struct base_statistics *statistics, struct base_statistics_rest *rest,
			 const void *data, size_t bytes);
/* Begins the state of another tensor. */
static inline void base_statistics_restart(struct base_statistics_rest *rest)
{
	rest->slices = 0;
	rest->slice_bytes = rest->bytes = 0;
}
/*
 * Adds bytes whose statistics another thread has taken with `next` and `next_rest`. They begin and
 * end at a slice of the tensor, or end the tensor.
 */
void base_statistics_join(struct base_statistics *statistics, struct base_statistics_rest *rest,
			  const struct base_statistics *next,
			  const struct base_statistics_rest *next_rest);
/* Adds the rest at the end of a tensor. */
void base_statistics_end(struct base_statistics *statistics, struct base_statistics_rest *rest);
/* Adds bytes with an instruction set that is at most `most`, so that tests reach all of them. */
enum base_instructions { BASE_PORTABLE, BASE_AVX2, BASE_AVX512, BASE_INSTRUCTION_SETS };
void base_statistics_add_with(struct base_statistics *statistics, struct base_statistics_rest *rest,
			      const void *data, size_t bytes, enum base_instructions most);
/* Returns whether all numbers are finite and equal. Integers beyond 2^53 are compared rounded. */
bool base_statistics_constant(const struct base_statistics *statistics);

/* ---- Memory (memory.c) ----------------------------------------------------------------------- */

/*
 * Maps page-aligned memory: huge pages where the kernel has them, not inherited by forked children,
 * because kernel I/O may be writing to it. Returns NULL if there is none; base_unmap() frees it.
 */
void *base_map(size_t bytes);
void base_unmap(void *memory, size_t bytes);
/* Touches every page now rather than at first use. Keeps the contents, so it is always safe. */
void base_prefault(void *memory, size_t bytes);

/* ---- Fresh memory: huge pages for loads (memory.c) ------------------------------------------- */

struct base_extent {
	uintptr_t begin, end;
};

struct base_fresh;

/*
 * Shortest stretch that is prepared. Each stretch costs the process one or two of its 65,530
 * mappings, so shorter ones are not worth it.
 */
#define BASE_FRESH_LEAST_BYTES (4 * MIB)

/*
 * Begins to prepare the caller's memory, which has never been written and will be filled. At most
 * `most` stretches get huge pages. Sorts the list `extents`, which is not needed afterwards.
 * Returns NULL if no stretch is long enough, or without memory.
 */
struct base_fresh *base_fresh_open(struct base_extent *extents, size_t count, size_t most);
/* Returns how many mappings this may have added to the process; 0 for NULL. */
size_t base_fresh_count(const struct base_fresh *fresh);
/*
 * Prepares a range just before it is filled. Threads may call it concurrently. Does nothing for
 * NULL.
 */
void base_fresh_prepare(struct base_fresh *fresh, const void *memory, size_t bytes);
/* Frees the record of the memory, not the memory. NULL is allowed. */
void base_fresh_close(struct base_fresh *fresh);

/* ---- Shared memory (memory.c) ---------------------------------------------------------------- */

/*
 * Creates a memfd without memory, sealed against shrinking: its owner cannot make processes that
 * map it crash. It disappears with the last process that has it open or mapped. Returns a negative
 * errno on failure.
 */
int base_shared_open(void);
/* Makes the memfd longer without allocating memory. Returns -EFBIG if RLIMIT_FSIZE forbids it. */
int base_shared_grow(int fd, uint64_t bytes);
/*
 * Allocates a range of whole pages and maps it for writing; children of fork() do not inherit it.
 * Returns -ENOMEM if there is none, so that a later touch cannot fail. base_unmap() undoes the
 * mapping; base_shared_drop() frees the memory.
 */
int base_shared_map(int fd, uint64_t offset, size_t bytes, void **memory);
void base_shared_drop(int fd, uint64_t offset, size_t bytes);
/*
 * Maps all of another process's memfd for reading; base_unmap() undoes it. *view is NULL if it is
 * empty. Returns -EPERM if it is not sealed against shrinking.
 */
int base_shared_view(int fd, const void **view, uint64_t *bytes);

/* ---- Texts and bytes (memory.c) -------------------------------------------------------------- */

/* Overwrites and frees a text that may hold a password. NULL is allowed. */
void base_free_secret(char *text);

/*
 * Returns the directory part of a path ("." if it has none), which the caller frees; NULL without
 * memory.
 */
char *base_directory_of(const char *path);

/* A byte buffer that grows. All zeros is an empty buffer. A failed append leaves it unchanged. */
struct base_buffer {
	uint8_t *data;
	size_t bytes;
	size_t allocated;
};

/* Reserve memory for `more` bytes; append bytes. */
int base_buffer_reserve(struct base_buffer *buffer, size_t more); /* returns 0 or -ENOMEM */
int base_buffer_append(struct base_buffer *buffer, const void *data, size_t bytes);
void base_buffer_free(struct base_buffer *buffer);

/* ---- Little-endian numbers, as the formats on disk have them --------------------------------- */

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

/*
 * Returns the next multiple of `alignment`, a power of two. The caller ensures that it does not
 * overflow.
 */
static inline uint64_t base_round_up(uint64_t value, uint64_t alignment)
{
	return (value + alignment - 1) & ~(alignment - 1);
}

#endif
