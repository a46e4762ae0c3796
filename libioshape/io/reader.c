/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads files. An input has two descriptors: one through the page cache and, where possible, one
 * for direct I/O. Stretches that are in the page cache are copied by several threads. So are
 * stretches that belong there because other processes will read them. Others are read with direct
 * I/O, in large blocks, in order, far ahead: the pieces of this call and of probable later calls.
 *
 * Offsets in this file count from the beginning of the file, even if the input is a byte range.
 * Direct I/O is aligned by them, and the page cache is asked by them.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef __NR_cachestat
#define __NR_cachestat 451 /* Linux 6.5; one number on all architectures */
#endif

/* Bytes of one pread(): they stay in the second-level cache until they are checksummed. */
#define SIP_BYTES (256 * KIB)

/* Below this, threads are not worth starting. */
#define PARALLEL_BYTES (8 * MIB)

/* How far ahead of the copying threads the kernel is asked to read. */
#define AHEAD_BYTES (64 * MIB)
/*
 * Bytes of one readahead(2), which reads no more than one device request; those are seldom smaller.
 */
#define ASK_BYTES (512 * KIB)

/* Most threads that copy from blocks. More find too few pieces in a block. */
#define MOST_CONSUMERS 4u

/* Unit in which the reader decides whether bytes are cached. */
#define STRETCH_BYTES (64 * MIB)

/* Pieces with gaps up to this size are read in one request. */
#define GAP_BYTES (256 * KIB)

/* ---- The file -------------------------------------------------------------------------------- */

static int open_buffered(struct io_input *input, const char *path, struct base_error *error)
{
	struct stat status;

	/*
	 * O_NONBLOCK: a pipe must be refused, not waited for. It means nothing for regular files.
	 */
	input->fd = base_register_fd(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
	if (input->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s\"", path);
	if (fstat(input->fd, &status))
		return base_fail(error, -errno, "cannot look at \"%s\"", path);
	if (S_ISDIR(status.st_mode))
		return base_fail_with(error, -EISDIR, "give the name of a file",
				      "cannot load \"%s\"", path);
	if (!S_ISREG(status.st_mode))
		return base_fail_reason(error, -ESPIPE,
					"cannot load \"%s\": it is not a regular file", path);
	input->bytes = (uint64_t)status.st_size;
	input->modified_ns = io_modified_ns(&status);
	return fs_describe(input->fd, path, NULL, &input->fs, error);
}

/*
 * Opens the input for direct I/O, through /proc: so it is the same file even if another one has
 * taken its name.
 */
static int open_direct(struct io_input *input, enum ioshape_direct direct, struct base_error *error)
{
	char same_file[64];

	if (direct == IOSHAPE_DIRECT_OFF)
		return 0;
	errno = EOPNOTSUPP;
	if (!input->fs.direct_known || input->fs.direct_works) {
		snprintf(same_file, sizeof(same_file), "/proc/self/fd/%d", input->fd);
		input->direct_fd =
			base_register_fd(open(same_file, O_RDONLY | O_CLOEXEC | O_DIRECT));
	}
	if (input->direct_fd < 0 && direct == IOSHAPE_DIRECT_REQUIRE)
		return base_fail_with(error, -errno, "use direct=prefer",
				      "cannot use direct I/O on \"%s\" (%s), which was required",
				      input->path, input->fs.type);
	return 0;
}

/* Restricts the input to a byte range. */
static int take_part(struct io_input *input, const char *path, uint64_t base, uint64_t bytes,
		     struct base_error *error)
{
	char *named;

	if (!base && !bytes)
		return 0;
	if (base > input->bytes || bytes > input->bytes - base)
		return base_fail_reason_with(
			error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load %s from offset %llu of \"%s\": it has only "
			"%s, so it was truncated or is another file",
			BASE_SIZE(bytes), (unsigned long long)base, path, BASE_SIZE(input->bytes));
	if (asprintf(&named, "%s (part at offset %llu)", path, (unsigned long long)base) < 0)
		return base_no_memory(error, "a path", strlen(path));
	free(input->path);
	input->path = named;
	input->base = base;
	input->bytes = bytes;
	return 0;
}

int io_input_open(struct io_input *input, const char *path, uint64_t base, uint64_t bytes,
		  enum ioshape_direct direct, struct base_error *error)
{
	int ret;

	memset(input, 0, sizeof(*input));
	input->fd = input->direct_fd = input->claim_fd = -1;
	input->path = strdup(path);
	if (!input->path)
		return base_no_memory(error, "a path", strlen(path));
	ret = open_buffered(input, path, error);
	if (!ret)
		ret = take_part(input, path, base, bytes, error);
	if (!ret)
		ret = open_direct(input, direct, error);
	if (ret)
		io_input_close(input);
	return ret;
}

void io_input_close(struct io_input *input)
{
	base_close(input->claim_fd);
	base_close(input->direct_fd);
	base_close(input->fd);
	free(input->path);
	memset(input, 0, sizeof(*input));
	input->fd = input->direct_fd = input->claim_fd = -1;
}

bool io_input_claim(struct io_input *input)
{
	/*
	 * An abstract name, which only one socket of the host can have; the kernel frees it with
	 * the socket.
	 */
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	struct stat status;
	socklen_t bytes;

	if (fstat(input->fd, &status))
		return true;
	bytes = (socklen_t)snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1,
				    "ioshape-load-%llx-%llx", (unsigned long long)status.st_dev,
				    (unsigned long long)status.st_ino);
	bytes += (socklen_t)offsetof(struct sockaddr_un, sun_path) + 1;
	input->claim_fd = base_register_fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
	return input->claim_fd < 0 ||
	       !bind(input->claim_fd, (const struct sockaddr *)&name, bytes) || errno != EADDRINUSE;
}

/* Fails because the file ends at `offset`, counted from the beginning of the file. */
static int cut_short(const struct io_input *input, uint64_t offset, struct base_error *error)
{
	return base_fail_reason(
		error, IOSHAPE_E_DAMAGED,
		"\"%s\" ends at offset %llu, before the end of the requested data: it "
		"was truncated while open",
		input->path, (unsigned long long)(offset - input->base));
}

int io_input_get(const struct io_input *input, uint64_t offset, void *into, size_t bytes,
		 struct base_error *error)
{
	size_t done = 0;
	ssize_t got;

	/* The file has other bytes after the input's range. */
	if (offset > input->bytes || bytes > input->bytes - offset)
		return cut_short(input, input->base + input->bytes, error);
	while (done < bytes) {
		got = pread(input->fd, (char *)into + done, bytes - done,
			    (off_t)(input->base + offset + done));
		if (got < 0 && errno == EINTR)
			continue;
		/*
		 * GlusterFS opens files late (performance.open-behind), and another client may have
		 * replaced the file.
		 */
		if (got < 0)
			return base_fail(error, errno == ENOENT ? -ESTALE : -errno,
					 "cannot read \"%s\" at offset %llu", input->path,
					 (unsigned long long)(offset + done));
		if (!got)
			return cut_short(input, input->base + offset + done, error);
		done += (size_t)got;
	}
	return 0;
}

/* ---- The small file beside the input --------------------------------------------------------- */

/* Opens the file beside the input, by the input's own name, in which links have been followed. */
static int open_beside(const struct io_input *input, const char *suffix)
{
	char same_file[64], name[PATH_MAX + NAME_MAX];
	ssize_t bytes;
	int fd;

	snprintf(same_file, sizeof(same_file), "/proc/self/fd/%d", input->fd);
	bytes = readlink(same_file, name, PATH_MAX);
	if (bytes < 0 || bytes == PATH_MAX)
		return -ENOENT;
	snprintf(name + bytes, NAME_MAX, "%s", suffix);
	fd = base_register_fd(open(name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
	return fd < 0 ? -errno : fd;
}

int io_input_get_beside(const struct io_input *input, const char *suffix, size_t most_bytes,
			struct base_buffer *into)
{
	struct stat file, beside;
	const int fd = open_beside(input, suffix);
	int ret;

	if (fd < 0)
		return fd;
	ret = fstat(input->fd, &file) ? -errno : io_read_whole(fd, most_bytes, into, &beside);
	/* Another user may have put the file there; it says nothing about ours. */
	if (!ret && beside.st_uid != file.st_uid && beside.st_uid)
		ret = -EPERM;
	base_close(fd);
	return ret;
}

/* ---- State of calls and streams -------------------------------------------------------------- */

/* One call of io_read() or io_read_onward(). */
struct reading {
	struct io_queue *queue;
	const struct io_input *input;
	ioshape_progress_fn progress;
	void *progress_user;
	/* All bytes go through the page cache, cached or not. */
	bool all_cached;
	uint64_t total;
	_Atomic uint64_t done;
	/* Time of the next progress call, except for the last one. */
	uint64_t tell_ns;
	struct base_error *error;
};

static uint64_t piece_end(const struct io_piece *piece)
{
	return piece->offset + piece->bytes;
}

/*
 * A thread that faults in the memory of pieces ahead. While it runs, it reads the pieces' addresses
 * and lengths.
 */
struct preparer {
	pthread_t thread;
	bool runs;
	_Atomic bool stop;
	struct base_fresh *fresh;
	const struct reading *reading;
	const struct io_piece *pieces;
	size_t count;
};

/* Consecutive calls that read onward. */
struct run {
	uint64_t end;
	uint64_t bytes; /* bytes of all these calls */
};

/*
 * The blocks of one file that are in flight or kept. They are in file order, and only bytes that no
 * piece wants are left out. The blocks of the call's pieces come first; prefetched blocks wait in
 * their buffers.
 */
struct io_stream {
	const struct io_input *input;
	uint64_t end; /* end of prefetching */

	struct io_queue *queue;  /* NULL while nothing is in flight or kept */
	struct io_buffer **fifo; /* buffers in order of submission, oldest at `head` */
	unsigned head, queued;
	/* Where the next request begins if it continues the last one. */
	uint64_t next_offset;
	uint64_t ahead_end; /* end of this call's prefetching */
	/* No bytes before this offset are in the page cache. */
	uint64_t clear_end;

	/* The current call. */
	struct reading *reading;
	struct preparer preparer;
	struct io_piece *pieces;
	size_t count;
	size_t piece; /* first incomplete piece */
	size_t scout; /* first piece that no request covers yet */

	/* A range that was found in the page cache. */
	uint64_t cached_begin, cached_end;

	/*
	 * For the page cache: how far the kernel was asked to read ahead; how far the stream has
	 * checked what is cached; whether all of that was cached.
	 */
	uint64_t asked_end, looked_end;
	bool all_there;
	struct base_crew crew;

	/* For direct reads: bytes of the blocks that the stream has waited for, and the pace of the
	 * storage. */
	uint64_t consumed;
	struct io_pace pace;

	/* Distinguish sequential reads from random ones. */
	struct run run;   /* sequential reads that the stream serves */
	struct run aside; /* small reads elsewhere */
};

/*
 * Time between progress calls. A Python callback usually has to wait for the interpreter's lock, so
 * not at every block.
 */
#define TELL_EACH_NS 10000000u

static int tell(struct reading *reading)
{
	const uint64_t done = atomic_load(&reading->done);
	const uint64_t now_ns = reading->progress ? base_now_ns() : 0;

	if (!reading->progress || (now_ns < reading->tell_ns && done < reading->total))
		return 0;
	reading->tell_ns = now_ns + TELL_EACH_NS;
	if (reading->progress(reading->progress_user, IOSHAPE_PHASE_READ, done, reading->total))
		return base_fail_reason(reading->error, -ECANCELED,
					"reading \"%s\" was stopped by its progress callback",
					reading->input->path);
	return 0;
}

/* ---- Finding what is in the page cache ------------------------------------------------------- */

struct cachestat_range {
	uint64_t offset, bytes;
};

struct cachestat_result {
	uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

/* Estimates from 16 pages whether most of a range is cached. For kernels without cachestat(). */
static bool is_sampled_cached(int fd, uint64_t offset, uint64_t bytes)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), samples = 16;
	uint64_t begin = offset / page * page, span = offset + bytes - begin;
	unsigned char state;
	unsigned hits = 0;
	uint8_t *view;

	view = mmap(NULL, span, PROT_READ, MAP_SHARED, fd, (off_t)begin);
	if (view == MAP_FAILED)
		/* Some filesystems cannot map files; reading through the cache is always right. */
		return true;
	for (uint64_t i = 0; i < samples; i++) {
		if (!mincore(view + span * i / samples / page * page, page, &state))
			hits += state & 1;
	}
	munmap(view, span);
	return hits > samples / 2;
}

/* Counts the cached bytes of a range. Returns false if the kernel cannot tell. */
static bool count_cached(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached)
{
	struct cachestat_range range = { offset, bytes };
	struct cachestat_result result;

	if (syscall(__NR_cachestat, fd, &range, &result, 0))
		return false;
	*cached = result.cached * (uint64_t)sysconf(_SC_PAGESIZE);
	return true;
}

static bool is_cached(int fd, uint64_t offset, uint64_t bytes)
{
	uint64_t cached;

	if (!count_cached(fd, offset, bytes, &cached))
		return is_sampled_cached(fd, offset, bytes);
	return cached > bytes / 2;
}

/* ---- Reading ahead through the page cache ---------------------------------------------------- */

/*
 * Returns whether the file must be read by one thread, in order: on FUSE. Its daemon reads ahead by
 * the kernel's reads. If it is asked ahead, or by several threads, ceph-fuse takes twice as long.
 */
static bool is_read_in_order(const struct io_input *input)
{
	return input->fs.magic == FS_FUSE_MAGIC;
}

/*
 * Asks the kernel to read a range ahead. Best effort; errors are ignored, since the bytes are read
 * when they are copied.
 */
static void ask_for(struct io_stream *stream, uint64_t begin, uint64_t end)
{
	const struct io_input *input = stream->input;
	uint64_t step, stretch, cached;

	for (begin = MAX(begin, stream->asked_end); begin < end; begin += step) {
		step = MIN(end - begin, ASK_BYTES);
		if (begin >= stream->looked_end) {
			stretch = MIN(STRETCH_BYTES, input->base + input->bytes - begin);
			stream->looked_end = begin + stretch;
			stream->all_there = count_cached(input->fd, begin, stretch, &cached) &&
					    cached >= stretch;
		}
		if (!stream->all_there && !is_read_in_order(input))
			readahead(input->fd, (off_t)begin, step);
	}
	stream->asked_end = MAX(stream->asked_end, end);
}

static void ask_ahead(struct io_stream *stream, uint64_t offset)
{
	ask_for(stream, offset, MIN(offset + AHEAD_BYTES, stream->end));
}

/* ---- Copying from the page cache ------------------------------------------------------------- */

/* The pieces that several threads copy from the page cache. */
struct job {
	struct io_stream *stream;
	bool asks;              /* asks the kernel to read ahead */
	pthread_mutex_t asking; /* protects the stream and `asked` */
	size_t asked;           /* pieces that were asked for */
	struct reading *reading;
	struct io_piece *pieces;
	size_t count;
	size_t batch;        /* pieces taken at a time */
	_Atomic size_t next; /* first piece that no thread has taken yet */
	_Atomic bool stop;
	struct hand *hands;    /* the calling thread's is the first */
	_Atomic unsigned used; /* hands in use */
};

/* The state of a copying thread. */
struct hand {
	struct job *job;
	/* Buffer for pieces that are only checksummed; allocated when needed. */
	uint8_t *scratch;
	struct base_error error;
};

static int read_piece(struct hand *hand, struct io_piece *piece)
{
	const struct io_input *input = hand->job->reading->input;
	uint8_t *to = piece->into;
	uint64_t done, sip;
	int ret = 0;

	if (!to && !hand->scratch) {
		hand->scratch = malloc(SIP_BYTES);
		if (!hand->scratch)
			return base_no_memory(&hand->error, "verifying", SIP_BYTES);
	}
	for (done = 0; !ret && done < piece->bytes; done += sip) {
		sip = MIN(piece->bytes - done, SIP_BYTES);
		to = piece->into ? (uint8_t *)piece->into + done : hand->scratch;
		if (piece->into)
			base_fresh_prepare(hand->job->reading->queue->fresh, to, sip);
		ret = io_input_get(input, piece->offset + done - input->base, to, sip,
				   &hand->error);
		if (!ret && piece->want_crc)
			piece->crc = base_crc32(piece->crc, to, sip);
	}
	atomic_fetch_add(&hand->job->reading->done, piece->bytes);
	return ret;
}

/* Asks the kernel to read ahead: the pieces after `from`, and then what follows the last piece. */
static void read_ahead(struct job *job, uint64_t from)
{
	/* Rounded, so that each call asks for a whole unit or nothing. */
	const uint64_t limit = (from + AHEAD_BYTES) / ASK_BYTES * ASK_BYTES;
	const struct io_piece *piece;
	uint64_t begin, end;

	while (job->asked < job->count && job->pieces[job->asked].offset < limit) {
		begin = end = job->pieces[job->asked].offset;
		for (; job->asked < job->count && end - begin < ASK_BYTES; job->asked++) {
			piece = &job->pieces[job->asked];
			if (piece->offset > end + GAP_BYTES)
				break;
			end = MAX(end, piece_end(piece));
		}
		ask_for(job->stream, begin, end);
	}
	if (job->asked == job->count)
		ask_for(job->stream, piece_end(&job->pieces[job->count - 1]),
			MIN(limit, job->stream->ahead_end));
}

/*
 * Copies pieces until none is left. Only the calling thread (`speaks`) may call the progress
 * callback.
 */
static void work(struct hand *hand, bool speaks)
{
	struct job *job = hand->job;
	size_t begin, end;
	int ret = 0;

	while (!ret && !atomic_load(&job->stop)) {
		begin = atomic_fetch_add(&job->next, job->batch);
		if (begin >= job->count)
			break;
		end = MIN(begin + job->batch, job->count);
		/* One thread asks for all of them. */
		if (job->asks && !pthread_mutex_trylock(&job->asking)) {
			read_ahead(job, job->pieces[begin].offset);
			pthread_mutex_unlock(&job->asking);
		}
		for (size_t i = begin; !ret && i < end; i++)
			ret = read_piece(hand, &job->pieces[i]);
		if (!ret && speaks)
			ret = tell(job->reading);
	}
	if (ret)
		atomic_store(&job->stop, true);
}

static void help(void *user)
{
	struct job *job = user;

	work(&job->hands[atomic_fetch_add(&job->used, 1)], false);
}

static int read_cached(struct io_stream *stream, struct reading *reading, struct io_piece *pieces,
		       size_t count, uint64_t bytes)
{
	const bool is_alone = bytes < PARALLEL_BYTES || is_read_in_order(reading->input);
	const unsigned wanted = is_alone ? 1 :
					   MIN(reading->queue->config.threads, BASE_MOST_HELPERS);
	struct hand *hands = calloc(wanted, sizeof(*hands));
	struct job job = { .stream = stream,
			   .asking = PTHREAD_MUTEX_INITIALIZER,
			   .reading = reading,
			   .pieces = pieces,
			   .count = count,
			   .hands = hands,
			   .used = 1,
			   .asks = reading->all_cached &&
				   (bytes >= ASK_BYTES || stream->ahead_end) };
	int ret;

	if (!hands)
		return base_no_memory(reading->error, "reading threads", wanted * sizeof(*hands));
	/* The reader has gone back, so ask again. */
	if (stream->asked_end > piece_end(&pieces[count - 1]) + AHEAD_BYTES)
		stream->asked_end = stream->looked_end = 0;
	/* Take small pieces in batches of about a check block, large ones one by one. */
	job.batch = MAX(1, MIN(64, count * MIB / MAX(bytes, 1)));
	for (unsigned i = 0; i < wanted; i++)
		hands[i].job = &job;
	base_crew_begin(&stream->crew, wanted - 1, help, &job);
	work(&hands[0], true);
	base_crew_finish(&stream->crew);
	ret = reading->error ? reading->error->code : 0;
	for (unsigned i = 0; i < wanted; i++) {
		if (hands[i].error.code && !ret) {
			ret = hands[i].error.code;
			if (reading->error)
				*reading->error = hands[i].error;
		}
		free(hands[i].scratch);
	}
	free(hands);
	/*
	 * The last bytes may have been read by another thread, so progress is reported once more.
	 */
	return ret ? ret : tell(reading);
}

/* ---- Faulting memory in ahead ---------------------------------------------------------------- */

/*
 * A second thread faults in the destination memory of direct reads. Faulting pages in costs as much
 * as copying into them, and the device would idle meanwhile.
 */

static void *prepare_all(void *argument)
{
	struct preparer *preparer = argument;
	const struct io_piece *piece;
	uint64_t end = atomic_load(&preparer->reading->done);

	for (size_t i = 0; i < preparer->count && !atomic_load(&preparer->stop); i++) {
		piece = &preparer->pieces[i];
		end += piece->bytes;
		/* Skip pieces that were filled meanwhile. */
		if (piece->into && end > atomic_load(&preparer->reading->done))
			base_fresh_prepare(preparer->fresh, piece->into, piece->bytes);
	}
	return NULL;
}

/* Starts the thread if the memory may be fresh and threads are allowed; otherwise does nothing. */
static void start_preparer(struct preparer *preparer, const struct reading *reading,
			   const struct io_piece *pieces, size_t count)
{
	const struct io_queue *queue = reading->queue;

	*preparer = (struct preparer){
		.fresh = queue->fresh, .reading = reading, .pieces = pieces, .count = count
	};
	/* Without the thread, consume_piece() prepares the memory. */
	if (queue->fresh && queue->config.threads > 1)
		preparer->runs = !base_start_thread(&preparer->thread, prepare_all, preparer);
}

static void stop_preparer(struct preparer *preparer)
{
	if (!preparer->runs)
		return;
	atomic_store(&preparer->stop, true);
	pthread_join(preparer->thread, NULL);
}

/* ---- Blocks ---------------------------------------------------------------------------------- */

static struct io_buffer *buffer_at(const struct io_stream *stream, unsigned at)
{
	return stream->fifo[(stream->head + at) % stream->queue->shape.depth];
}

static uint64_t buffer_end(const struct io_buffer *buffer)
{
	return buffer->offset + buffer->bytes;
}

/* Frees the oldest block, which must not be in flight. */
static void let_go(struct io_stream *stream)
{
	io_queue_give_back(stream->queue, buffer_at(stream, 0));
	stream->head = (stream->head + 1) % stream->queue->shape.depth;
	stream->queued--;
}

static bool covers(const struct io_stream *stream, uint64_t offset)
{
	return stream->queue && stream->queued && offset >= buffer_at(stream, 0)->offset &&
	       offset < stream->next_offset;
}

/*
 * Frees the blocks before `offset`; frees all of them if `offset` is before the first. Their
 * failures do not matter, since no piece needs them.
 */
static void go_to(struct io_stream *stream, uint64_t offset)
{
	bool back = offset < stream->next_offset && !covers(stream, offset);

	while (stream->queued && (back || buffer_end(buffer_at(stream, 0)) <= offset)) {
		io_queue_finish(stream->queue, buffer_at(stream, 0), NULL);
		let_go(stream);
	}
	if (back) {
		stream->next_offset = 0;
		stream->clear_end = 0;
	}
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* Returns where prefetching from `from` on ends; `from` itself if there is nothing to prefetch. */
static uint64_t ahead_limit(struct io_stream *stream, uint64_t from)
{
	uint64_t wanted = MIN(from + stream->queue->shape.block_bytes, stream->ahead_end), next;

	if (wanted <= from)
		return from;
	stream->clear_end = MAX(stream->clear_end, from);
	if (stream->clear_end < wanted) {
		next = MIN(stream->clear_end + STRETCH_BYTES, stream->end);
		if (is_cached(stream->input->fd, stream->clear_end, next - stream->clear_end))
			stream->ahead_end = stream->clear_end;
		else
			stream->clear_end = next;
	}
	return MIN(wanted, stream->clear_end);
}

/*
 * Finds the next request: as many of the coming pieces as fit in a block, from an aligned offset
 * on, across small gaps. After the last piece it prefetches. Returns false if all is requested.
 */
static bool next_request(struct io_stream *stream, uint64_t *offset, size_t *bytes)
{
	uint64_t block = stream->queue->shape.block_bytes, unit = stream->queue->alignment;
	uint64_t begin = stream->next_offset, end;
	size_t i;

	while (stream->scout < stream->count &&
	       (!stream->pieces[stream->scout].bytes ||
		piece_end(&stream->pieces[stream->scout]) <= stream->next_offset))
		stream->scout++;
	if (stream->scout < stream->count)
		begin = MAX(begin, stream->pieces[stream->scout].offset / unit * unit);
	end = begin;
	for (i = stream->scout; i < stream->count && end < begin + block; i++) {
		if (stream->pieces[i].offset > end + GAP_BYTES && end > begin)
			break;
		end = MAX(end, piece_end(&stream->pieces[i]));
	}
	if (i == stream->count && end < begin + block)
		end = ahead_limit(stream, end);
	if (end == begin)
		return false;
	*offset = begin;
	*bytes = MIN(base_round_up(end, unit) - begin, block);
	stream->next_offset = begin + *bytes;
	return true;
}

/* Sends requests until `most` blocks are in flight or kept. */
static void fill_queue(struct io_stream *stream, unsigned most)
{
	struct io_queue *queue = stream->queue;
	struct io_buffer *buffer;

	while (stream->queued < most) {
		buffer = io_queue_free_buffer(queue);
		if (!buffer)
			break;
		if (!next_request(stream, &buffer->offset, &buffer->bytes)) {
			io_queue_give_back(queue, buffer);
			break;
		}
		stream->fifo[(stream->head + stream->queued++) % queue->shape.depth] = buffer;
		/* The buffer keeps a failure until its bytes are needed. */
		io_queue_submit(queue, buffer, NULL);
	}
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

static void consume_piece(const struct io_stream *stream, struct io_piece *piece,
			  const struct io_buffer *buffer, uint64_t begin, uint64_t end)
{
	const uint8_t *from = buffer->data + (begin - buffer->offset);
	uint8_t *to = piece->into ? (uint8_t *)piece->into + (begin - piece->offset) : NULL;
	size_t bytes = end - begin;

	if (to && !stream->preparer.runs)
		base_fresh_prepare(stream->queue->fresh, to, bytes);
	if (!to)
		piece->crc = base_crc32(piece->crc, from, bytes);
	else if (piece->want_crc)
		piece->crc = base_crc32_move(piece->crc, to, from, bytes);
	else
		memcpy(to, from, bytes);
}

/* A block whose pieces several threads take. */
struct block {
	struct io_stream *stream;
	const struct io_buffer *buffer;
	uint64_t end;
	_Atomic size_t next; /* first piece that no thread has taken */
};

static void consume_pieces(void *user)
{
	struct block *block = user;
	struct io_stream *stream = block->stream;
	uint64_t from, to;
	size_t i;

	while ((i = atomic_fetch_add(&block->next, 1)) < stream->count) {
		struct io_piece *piece = &stream->pieces[i];

		if (piece->offset >= block->end)
			break;
		from = MAX(piece->offset, block->buffer->offset);
		to = MIN(piece_end(piece), block->end);
		if (from >= to)
			continue;
		consume_piece(stream, piece, block->buffer, from, to);
		atomic_fetch_add(&stream->reading->done, to - from);
	}
}

/* Copies the bytes of a block to the pieces that contain them. Several threads copy if the storage
 * is faster than one. */
static int consume(struct io_stream *stream, struct io_buffer *buffer)
{
	struct reading *reading = stream->reading;
	struct block block = { stream, buffer, buffer->offset + buffer->moved, stream->piece };
	const unsigned threads = MIN(stream->queue->config.threads, MOST_CONSUMERS);

	base_crew_begin(&stream->crew, stream->pace.starved ? threads - 1 : 0, consume_pieces,
			&block);
	consume_pieces(&block);
	base_crew_finish(&stream->crew);
	while (stream->piece < stream->count &&
	       piece_end(&stream->pieces[stream->piece]) <= block.end)
		stream->piece++;
	if (buffer->moved < buffer->bytes && stream->piece < stream->count &&
	    stream->pieces[stream->piece].offset < buffer->offset + buffer->bytes)
		return cut_short(reading->input, block.end, reading->error);
	return tell(reading);
}

/* Waits for a block, and judges the storage. */
static int await_block(struct io_stream *stream, struct io_buffer *buffer)
{
	const struct io_queue *queue = stream->queue;
	const uint64_t begin_ns = base_now_ns();
	const int ret = io_queue_finish(stream->queue, buffer, stream->reading->error);
	const uint64_t now_ns = base_now_ns();

	stream->consumed += buffer->bytes;
	stream->pace.waited_ns += now_ns - begin_ns;
	io_pace_judge(&stream->pace, stream->consumed,
		      queue->shape.depth * queue->shape.block_bytes, now_ns);
	return ret;
}

/* ---- Direct reads ---------------------------------------------------------------------------- */

static int take_queue(struct io_stream *stream, struct reading *reading)
{
	struct io_queue *queue = reading->queue;
	int ret = io_queue_start(queue, reading->error);

	if (ret)
		return ret;
	stream->fifo = calloc(queue->shape.depth, sizeof(struct io_buffer *));
	if (!stream->fifo)
		return base_no_memory(reading->error, "a read queue",
				      queue->shape.depth * sizeof(struct io_buffer *));
	stream->queue = queue;
	stream->head = stream->queued = 0;
	stream->next_offset = stream->clear_end = 0;
	io_queue_attach(queue, stream->input->direct_fd, stream->input->path, true, NULL);
	queue->direct = true;
	queue->alignment = io_queue_direct_alignment(queue, &stream->input->fs);
	queue->file_bytes = stream->input->base + stream->input->bytes;
	return 0;
}

static int begin_ahead(struct io_stream *stream, struct reading *reading, uint64_t offset)
{
	int ret = take_queue(stream, reading);

	if (ret)
		return ret;
	stream->next_offset = offset / stream->queue->alignment * stream->queue->alignment;
	stream->ahead_end = stream->end;
	stream->count = stream->scout = 0;
	fill_queue(stream, stream->queue->limit);
	return 0;
}

static int read_direct(struct io_stream *stream, struct reading *reading, struct io_piece *pieces,
		       size_t count, uint64_t keep)
{
	struct io_buffer *buffer;
	unsigned at = 0; /* next block to consume, counted from the oldest */
	int ret = stream->queue ? 0 : take_queue(stream, reading);

	if (ret)
		return ret;
	stream->reading = reading;
	stream->pieces = pieces;
	stream->count = count;
	stream->piece = stream->scout = 0;
	go_to(stream, pieces[0].offset);
	start_preparer(&stream->preparer, reading, pieces, count);
	while (!ret && stream->piece < count) {
		fill_queue(stream, stream->queue->limit);
		if (at == stream->queued) {
			if (!at)
				break;  /* pieces without bytes */
			let_go(stream); /* blocks kept for looking back occupy all buffers */
			at--;
			continue;
		}
		buffer = buffer_at(stream, at);
		ret = await_block(stream, buffer);
		/* Use the spare buffer before this block is copied. */
		fill_queue(stream, stream->queue->shape.depth);
		if (!ret)
			ret = consume(stream, buffer);
		if (!ret && !at && buffer_end(buffer) <= keep)
			let_go(stream);
		else
			at++;
	}
	stop_preparer(&stream->preparer);
	if (!ret)
		fill_queue(stream, stream->queue->shape.depth);
	stream->reading = NULL;
	stream->pieces = NULL;
	return ret;
}

void io_stream_stop(struct io_stream *stream)
{
	struct io_queue *queue = stream->queue;

	if (!queue)
		return;
	io_queue_drain(queue, NULL);
	while (stream->queued)
		let_go(stream);
	io_queue_detach(queue);
	free(stream->fifo);
	stream->fifo = NULL;
	stream->queue = NULL;
}

/*
 * A sequential read may begin up to this far before the end of the last one: readers verify whole
 * blocks of 1 MiB, even if they need only part of one. Blocks are kept for this, at most this share
 * of the buffers.
 */
#define LOOK_BACK_BYTES (1 * MIB)
#define LOOK_BACK_SHARE 4

/* Reads up to this length use the page cache until they turn out to be sequential. */
#define SMALL_BYTES (256 * KIB)

/* ---- Choosing between page cache and direct I/O ---------------------------------------------- */

/* Sets the queue's buffers for reading this file. */
static int shape_to_read(struct io_queue *queue, const struct io_input *input,
			 struct base_error *error)
{
	const struct io_shape shape = io_shape_to_read(&queue->config, &input->fs, input->bytes);

	return io_queue_shape(queue, &shape, error);
}

/* Returns the end of the pieces that are within one stretch from `first` on; at least one piece. */
static size_t take_stretch(const struct io_piece *pieces, size_t count, size_t first,
			   uint64_t *bytes)
{
	uint64_t limit = pieces[first].offset + STRETCH_BYTES;
	size_t i;

	*bytes = 0;
	for (i = first; i < count && (i == first || piece_end(&pieces[i]) <= limit); i++)
		*bytes += pieces[i].bytes;
	return i;
}

/*
 * Returns whether most of the bytes from `offset` on are cached. For small reads it checks all that
 * would be prefetched, since the kernel's own read-ahead reaches less far. One check serves many
 * small reads.
 */
static bool is_cached_onward(struct io_stream *stream, uint64_t offset)
{
	uint64_t end = MIN(offset + STRETCH_BYTES, stream->ahead_end);

	if (offset >= stream->cached_begin && offset < stream->cached_end)
		return true;
	if (!is_cached(stream->input->fd, offset, end - offset))
		return false;
	stream->cached_begin = offset;
	stream->cached_end = end;
	return true;
}

static bool goes_cached(struct io_stream *stream, const struct reading *reading,
			const struct io_piece *pieces, size_t first, size_t last)
{
	uint64_t offset = pieces[first].offset, end = piece_end(&pieces[last - 1]);

	if (covers(stream, offset))
		return false;
	if (reading->all_cached)
		return true;
	if (end - offset < SMALL_BYTES && end < stream->ahead_end)
		return is_cached_onward(stream, offset);
	return is_cached(stream->input->fd, offset, end - offset);
}

/* Reads all pieces. Adjacent stretches that are read in one way are combined. */
static int read_stretches(struct io_stream *stream, struct reading *reading,
			  struct io_piece *pieces, size_t count, uint64_t keep)
{
	uint64_t bytes, run_bytes;
	size_t first, end, next;
	bool cached;
	int ret = 0;

	for (first = 0; !ret && first < count; first = end) {
		end = take_stretch(pieces, count, first, &run_bytes);
		cached = goes_cached(stream, reading, pieces, first, end);
		while (end < count) {
			next = take_stretch(pieces, count, end, &bytes);
			if (goes_cached(stream, reading, pieces, end, next) != cached)
				break;
			end = next;
			run_bytes += bytes;
		}
		if (cached)
			ret = read_cached(stream, reading, pieces + first, end - first, run_bytes);
		else
			ret = read_direct(stream, reading, pieces + first, end - first, keep);
	}
	return ret;
}

/*
 * Largest input that is read through the page cache for other processes. That costs a lone process
 * tens of milliseconds at most.
 */
#define SMALL_INPUT_BYTES (256 * MIB)

/*
 * Returns whether the call reads most of a small file, which other processes may load at the same
 * time. Not for byte ranges, since the page cache would read more than the range. Not on FUSE,
 * where filling the cache is too slow to do it for processes that may never read it.
 */
static bool is_most_of_a_small_one(const struct reading *reading)
{
	const struct io_input *input = reading->input;

	return input->may_share && input->bytes <= SMALL_INPUT_BYTES &&
	       input->fs.magic != FS_FUSE_MAGIC && reading->total > input->bytes / 2;
}

static bool is_all_cached(const struct reading *reading)
{
	const struct io_input *input = reading->input;

	return input->shared || input->direct_fd < 0 || is_most_of_a_small_one(reading) ||
	       !io_queue_direct_alignment(reading->queue, &input->fs);
}

/*
 * Begins a call: turns the pieces' offsets into file offsets, until finish(). It always calls the
 * progress callback, however little is read.
 */
static int begin(struct reading *reading, struct io_piece *pieces, size_t count)
{
	const struct io_input *input = reading->input;

	for (size_t i = 0; i < count; i++) {
		reading->total += pieces[i].bytes;
		pieces[i].crc = 0;
		pieces[i].offset += input->base;
	}
	reading->all_cached = is_all_cached(reading);
	/* The file has other bytes after the input's range. */
	if (count && piece_end(&pieces[count - 1]) > input->base + input->bytes)
		return cut_short(input, input->base + input->bytes, reading->error);
	return tell(reading);
}

static void finish(const struct reading *reading, struct io_piece *pieces, size_t count)
{
	for (size_t i = 0; i < count; i++)
		pieces[i].offset -= reading->input->base;
}

int io_read(struct io_queue *queue, const struct io_input *input, struct io_piece *pieces,
	    size_t count, ioshape_progress_fn progress, void *progress_user,
	    struct base_error *error)
{
	struct reading reading = {
		.queue = queue,
		.input = input,
		.progress = progress,
		.progress_user = progress_user,
		.error = error,
	};
	struct io_stream stream = { .input = input };
	int ret;

	ret = shape_to_read(queue, input, error);
	if (ret)
		return ret;
	base_crew_init(&stream.crew, BASE_SPIN_NS);
	ret = begin(&reading, pieces, count);
	if (!ret)
		ret = read_stretches(&stream, &reading, pieces, count, UINT64_MAX);
	io_stream_stop(&stream);
	base_crew_dismiss(&stream.crew);
	finish(&reading, pieces, count);
	return ret;
}

/* ---- Sequential reads, call by call ---------------------------------------------------------- */

static bool continues(const struct run *run, uint64_t begin)
{
	return run->bytes && begin <= run->end + GAP_BYTES && begin + LOOK_BACK_BYTES >= run->end;
}

/*
 * Adds a call to the run, or begins a new run. Returns the bytes that were read in the run before
 * it.
 */
static uint64_t add_to(struct run *run, bool goes_on, uint64_t begin, uint64_t end)
{
	uint64_t before = goes_on ? run->bytes : 0;

	run->bytes = before + (goes_on ? end - MIN(MAX(begin, run->end), end) : end - begin);
	run->end = goes_on ? MAX(run->end, end) : end;
	return before;
}

/*
 * Returns whether a call is a small read elsewhere. It then goes through the page cache, without a
 * check of what is cached, and leaves the stream as it is. Otherwise *before receives the bytes of
 * its run so far.
 */
static bool is_aside(struct io_stream *stream, uint64_t block, uint64_t begin, uint64_t end,
		     uint64_t *before)
{
	bool covered = covers(stream, begin);
	bool goes_on = covered || continues(&stream->run, begin);
	uint64_t small = stream->queue ? block : SMALL_BYTES;
	/* A small step back to bytes that are no longer kept must not restart the stream. */
	bool elsewhere = !covered && (!goes_on || begin < stream->run.end);

	if (stream->queue && elsewhere && end - begin < small) {
		if (add_to(&stream->aside, continues(&stream->aside, begin), begin, end) < block)
			return true;
		/* The reads elsewhere have become the sequential ones; the stream's run is over. */
		stream->run = stream->aside;
		stream->aside.bytes = 0;
		goes_on = true;
	}
	*before = add_to(&stream->run, goes_on, begin, end);
	return !stream->queue && end - begin < small && *before < block / 8;
}

/*
 * Returns how far to prefetch: further for longer runs, up to the queue's buffers; not at all after
 * a jump, because random readers rarely use what is prefetched.
 */
static uint64_t ahead_of(const struct io_stream *stream, const struct io_queue *queue,
			 uint64_t before, uint64_t begin, uint64_t end)
{
	uint64_t block = queue->shape.block_bytes, all = stream->end - stream->input->base;
	uint64_t bytes = MIN(before, all / 8) * 4 + (end - begin) / 8;

	if (end >= stream->end || bytes < block / 2)
		return 0;
	if (bytes >= block * queue->shape.depth || bytes >= stream->end - end)
		return stream->end;
	return end + bytes;
}

static int read_onward(struct io_stream *stream, struct reading *reading, struct io_piece *pieces,
		       size_t count)
{
	const struct io_queue *queue = reading->queue;
	uint64_t look_back = queue->shape.block_bytes * queue->shape.depth / LOOK_BACK_SHARE;
	uint64_t offset = pieces[0].offset, end = piece_end(&pieces[count - 1]), before = 0;

	stream->ahead_end = 0;
	if (is_aside(stream, queue->shape.block_bytes, offset, end, &before))
		return read_cached(stream, reading, pieces, count, reading->total);
	stream->ahead_end = ahead_of(stream, queue, before, offset, end);
	look_back = MIN(end, MIN(look_back, LOOK_BACK_BYTES));
	return read_stretches(stream, reading, pieces, count, end - look_back);
}

int io_read_onward(struct io_stream *stream, struct io_queue *queue, struct io_piece *pieces,
		   size_t count, ioshape_progress_fn progress, void *progress_user,
		   struct base_error *error)
{
	struct reading reading = {
		.queue = queue,
		.input = stream->input,
		.progress = progress,
		.progress_user = progress_user,
		.error = error,
	};
	int ret = stream->queue ? 0 : shape_to_read(queue, stream->input, error);

	if (ret)
		return ret;
	ret = begin(&reading, pieces, count);
	if (!ret && reading.total)
		ret = read_onward(stream, &reading, pieces, count);
	finish(&reading, pieces, count);
	return ret;
}

void io_stream_prefetch(struct io_stream *stream, struct io_queue *queue, uint64_t offset)
{
	const uint64_t begin = stream->input->base + offset;
	struct reading reading = { .queue = queue, .input = stream->input };

	if (begin >= stream->end || shape_to_read(queue, stream->input, NULL))
		return;
	reading.total = stream->end - begin; /* all of it will be read */
	if (is_all_cached(&reading))
		ask_ahead(stream, begin);
	else if (!is_cached(stream->input->fd, begin, MIN(STRETCH_BYTES, stream->end - begin)))
		begin_ahead(stream, &reading, begin);
}

bool io_stream_is_idle(const struct io_stream *stream)
{
	return !stream->queue ||
	       stream->next_offset <= base_round_up(stream->run.end, stream->queue->alignment);
}

int io_stream_open(struct io_stream **out, const struct io_input *input, uint64_t end,
		   struct base_error *error)
{
	struct io_stream *stream = calloc(1, sizeof(*stream));

	*out = stream;
	if (!stream)
		return base_no_memory(error, "reading ahead", sizeof(*stream));
	stream->input = input;
	stream->end = input->base + MIN(end, input->bytes);
	base_crew_init(&stream->crew, BASE_SPIN_NS);
	return 0;
}

void io_stream_free(struct io_stream *stream)
{
	if (!stream)
		return;
	io_stream_stop(stream);
	base_crew_dismiss(&stream->crew);
	free(stream);
}
