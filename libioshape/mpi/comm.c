/* SPDX-License-Identifier: Apache-2.0 */
/*
 * struct ioshape_comm over MPI. This file is a library of its own, which uses only public headers.
 *
 * It calls MPI_Isend and MPI_Irecv, and tests now and then whether they are done. A blocking call
 * could not be given up, and it would keep the processor from the training. The pauses between
 * tests grow to a millisecond.
 */
#define _GNU_SOURCE
#include <ioshape/mpi.h>

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

#define MOST_BYTES ((size_t)1 << 30)
#define KEPT_BUFFERS 4u
/* Number of tests before the first pause. */
#define EAGER_TESTS 200u
#define LONGEST_PAUSE_NS 1000000L
/* How long to wait for the end of a request that was cancelled. */
#define CANCEL_MS 1000u

struct buffer {
	struct buffer *next;
	size_t allocated;
	char bytes[];
};

struct mpi_comm {
	struct ioshape_comm comm; /* must be first: the caller has a pointer to it */
	MPI_Comm handle;
	int most_tag;
	pthread_mutex_t lock; /* protects the members below */
	struct buffer *buffers;
	unsigned count;
	bool has_abandoned; /* MPI may still use a buffer, and the handle */
};

static int fail(char *message, size_t size, int code, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

static int fail(char *message, size_t size, int code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (message && size)
		vsnprintf(message, size, format, args);
	va_end(args);
	return code;
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- Buffers --------------------------------------------------------------------------------- */

static struct buffer *take_buffer(struct mpi_comm *comm, size_t bytes)
{
	struct buffer **link, *buffer = NULL;

	pthread_mutex_lock(&comm->lock);
	for (link = &comm->buffers; *link; link = &(*link)->next) {
		if ((*link)->allocated >= bytes) {
			buffer = *link;
			*link = buffer->next;
			comm->count--;
			break;
		}
	}
	pthread_mutex_unlock(&comm->lock);
	if (buffer)
		return buffer;
	buffer = malloc(sizeof(*buffer) + bytes);
	if (buffer)
		buffer->allocated = bytes;
	return buffer;
}

static void return_buffer(struct mpi_comm *comm, struct buffer *buffer)
{
	struct buffer **link, *smallest = buffer;

	pthread_mutex_lock(&comm->lock);
	buffer->next = comm->buffers;
	comm->buffers = buffer;
	if (++comm->count <= KEPT_BUFFERS) {
		smallest = NULL;
	} else {
		for (struct buffer *at = comm->buffers; at; at = at->next)
			if (at->allocated < smallest->allocated)
				smallest = at;
		for (link = &comm->buffers; *link != smallest; link = &(*link)->next)
			;
		*link = smallest->next;
		comm->count--;
	}
	pthread_mutex_unlock(&comm->lock);
	free(smallest);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static int await_request(MPI_Request *request, MPI_Status *status, uint64_t until_ns)
{
	struct timespec pause = { 0, 10000 };
	int done = 0;

	for (unsigned asked = 0;; asked++) {
		if (MPI_Test(request, &done, status) != MPI_SUCCESS)
			return -EIO;
		if (done)
			return 0;
		if (now_ns() >= until_ns)
			return -ETIMEDOUT;
		if (asked < EAGER_TESTS) {
			sched_yield();
			continue;
		}
		nanosleep(&pause, NULL);
		pause.tv_nsec = pause.tv_nsec * 5 / 4;
		if (pause.tv_nsec > LONGEST_PAUSE_NS)
			pause.tv_nsec = LONGEST_PAUSE_NS;
	}
}

/* Waits for a request that uses the caller's buffer, and cancels it after the timeout. *abandoned:
 * MPI may still use the buffer, so it must never be freed or reused. */
static int finish(struct mpi_comm *comm, MPI_Request *request, MPI_Status *status,
		  uint32_t timeout_ms, bool *abandoned)
{
	int ret = await_request(request, status, now_ns() + (uint64_t)timeout_ms * 1000000u);

	*abandoned = false;
	if (!ret || *request == MPI_REQUEST_NULL)
		return ret;
	if (MPI_Cancel(request) != MPI_SUCCESS ||
	    await_request(request, status, now_ns() + CANCEL_MS * UINT64_C(1000000))) {
		*abandoned = true;
		pthread_mutex_lock(&comm->lock);
		comm->has_abandoned = true;
		pthread_mutex_unlock(&comm->lock);
	}
	return ret;
}

static int check_message(const struct mpi_comm *comm, uint32_t rank, uint32_t tag, size_t bytes)
{
	if (rank > INT_MAX || tag > (uint32_t)comm->most_tag)
		return -EINVAL;
	return bytes > MOST_BYTES ? -EMSGSIZE : 0;
}

static int send_to(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		   uint32_t timeout_ms)
{
	struct mpi_comm *comm = user;
	struct buffer *buffer;
	MPI_Request request;
	bool abandoned = false;
	int ret = check_message(comm, to, tag, bytes);

	if (ret)
		return ret;
	buffer = take_buffer(comm, bytes);
	if (!buffer)
		return -ENOMEM;
	memcpy(buffer->bytes, data, bytes);
	if (MPI_Isend(buffer->bytes, (int)bytes, MPI_BYTE, (int)to, (int)tag, comm->handle,
		      &request) != MPI_SUCCESS)
		ret = -EIO;
	else
		ret = finish(comm, &request, MPI_STATUS_IGNORE, timeout_ms, &abandoned);
	if (!abandoned)
		return_buffer(comm, buffer);
	return ret;
}

static int receive_from(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			uint32_t timeout_ms)
{
	struct mpi_comm *comm = user;
	struct buffer *buffer;
	MPI_Request request;
	MPI_Status status;
	bool abandoned = false;
	int ret = check_message(comm, from, tag, bytes), count = 0;

	if (ret)
		return ret;
	buffer = take_buffer(comm, bytes);
	if (!buffer)
		return -ENOMEM;
	if (MPI_Irecv(buffer->bytes, (int)bytes, MPI_BYTE, (int)from, (int)tag, comm->handle,
		      &request) != MPI_SUCCESS)
		ret = -EIO;
	else
		ret = finish(comm, &request, &status, timeout_ms, &abandoned);
	if (!ret &&
	    (MPI_Get_count(&status, MPI_BYTE, &count) != MPI_SUCCESS || (size_t)count != bytes))
		ret = -EPROTO;
	if (!ret)
		memcpy(into, buffer->bytes, bytes);
	if (!abandoned)
		return_buffer(comm, buffer);
	return ret;
}

/* Makes MPI progress: it moves bytes only while the program calls it. */
static void progress(void *user)
{
	struct mpi_comm *comm = user;
	int there;

	MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm->handle, &there, MPI_STATUS_IGNORE);
}

/* ---- Making and freeing ---------------------------------------------------------------------- */

static int check_mpi(char *message, size_t size)
{
	int begun = 0, over = 0;

	MPI_Initialized(&begun);
	MPI_Finalized(&over);
	if (begun && !over)
		return 0;
	return fail(message, size, -EINVAL,
		    "MPI is not in use: call this between MPI_Init_thread() and MPI_Finalize()");
}

static int check_threads(char *message, size_t size)
{
	static const char *const names[] = { "MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED",
					     "MPI_THREAD_SERIALIZED" };
	int level = MPI_THREAD_SINGLE;

	MPI_Query_thread(&level);
	if (level >= MPI_THREAD_MULTIPLE)
		return 0;
	return fail(message, size, -ENOTSUP,
		    "sending data between nodes needs MPI_THREAD_MULTIPLE, but MPI was initialized "
		    "with %s: request it in MPI_Init_thread(), or open the group without a comm",
		    level == MPI_THREAD_SINGLE   ? names[0] :
		    level == MPI_THREAD_FUNNELED ? names[1] :
						   names[2]);
}

EXPORT int ioshape_comm_of_mpi(MPI_Comm parent, struct ioshape_comm **out, char *message,
			       size_t message_bytes)
{
	struct mpi_comm *comm;
	int *most_tag, found = 0, ret;

	if (message && message_bytes)
		*message = 0;
	if (!out)
		return fail(message, message_bytes, -EINVAL, "no pointer for the comm was given");
	*out = NULL;
	ret = check_mpi(message, message_bytes);
	if (!ret)
		ret = check_threads(message, message_bytes);
	if (ret)
		return ret;
	comm = calloc(1, sizeof(*comm));
	if (!comm)
		return fail(message, message_bytes, -ENOMEM, "cannot allocate memory for a comm");
	if (MPI_Comm_dup(parent, &comm->handle) != MPI_SUCCESS) {
		free(comm);
		return fail(message, message_bytes, -EIO, "the communicator cannot be duplicated");
	}
	/* The loss of a rank must fail the save, not end the program. */
	MPI_Comm_set_errhandler(comm->handle, MPI_ERRORS_RETURN);
	MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most_tag, &found);
	comm->most_tag = found ? *most_tag : 32767;
	pthread_mutex_init(&comm->lock, NULL);
	comm->comm = (struct ioshape_comm){
		.size = sizeof(comm->comm),
		.user = comm,
		.send = send_to,
		.receive = receive_from,
		.progress = progress,
	};
	*out = &comm->comm;
	return 0;
}

EXPORT void ioshape_comm_mpi_free(struct ioshape_comm *given)
{
	struct mpi_comm *comm = (struct mpi_comm *)given;

	if (!comm)
		return;
	/* With abandoned requests, MPI_Comm_free() would wait for them. */
	if (!comm->has_abandoned && !check_mpi(NULL, 0))
		MPI_Comm_free(&comm->handle);
	while (comm->buffers) {
		struct buffer *next = comm->buffers->next;

		free(comm->buffers);
		comm->buffers = next;
	}
	pthread_mutex_destroy(&comm->lock);
	free(comm);
}

/* ---- Options of a group ---------------------------------------------------------------------- */

/* Draws a token. It stays empty if the kernel has no random numbers. */
static void make_token(char token[IOSHAPE_MPI_TOKEN_BYTES])
{
	unsigned char random[(IOSHAPE_MPI_TOKEN_BYTES - 1) / 2];

	memset(token, 0, IOSHAPE_MPI_TOKEN_BYTES);
	if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
		return;
	for (size_t i = 0; i < sizeof(random); i++)
		snprintf(token + 2 * i, 3, "%02x", random[i]);
}

EXPORT int ioshape_group_options_of_mpi(MPI_Comm comm, struct ioshape_group_options *options,
					char token[IOSHAPE_MPI_TOKEN_BYTES], char *message,
					size_t message_bytes)
{
	int rank, ranks, local_ranks, ret;
	MPI_Comm local;

	if (message && message_bytes)
		*message = 0;
	if (!options || !token)
		return fail(message, message_bytes, -EINVAL,
			    "options and a buffer for the token are required");
	ret = check_mpi(message, message_bytes);
	if (ret)
		return ret;
	if (MPI_Comm_rank(comm, &rank) != MPI_SUCCESS ||
	    MPI_Comm_size(comm, &ranks) != MPI_SUCCESS ||
	    MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local) !=
		    MPI_SUCCESS)
		return fail(message, message_bytes, -EIO,
			    "MPI does not report which ranks share a node");
	MPI_Comm_size(local, &local_ranks);
	MPI_Comm_free(&local);
	if (!rank)
		make_token(token);
	if (MPI_Bcast(token, IOSHAPE_MPI_TOKEN_BYTES, MPI_CHAR, 0, comm) != MPI_SUCCESS)
		return fail(message, message_bytes, -EIO, "the token cannot be broadcast");
	if (!*token)
		return fail(message, message_bytes, -EIO, "rank 0 cannot get random numbers");
	options->rank = (uint32_t)rank;
	options->ranks = (uint32_t)ranks;
	options->local_ranks = (uint32_t)local_ranks;
	options->token = token;
	return 0;
}
