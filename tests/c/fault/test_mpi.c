/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams between the ranks of an MPI program. mpirun starts this program several times, and rank 0
 * reports the results of all ranks.
 */
#define _GNU_SOURCE
#include "group/group.h"
#include "support/stream_case.h"

#include <ioshape/group.h>
#include <ioshape/mpi.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define BLOCK (1 * MIB)
#define BLOCKS 4u
#define TIMEOUT_MS 20000u

static int rank, ranks;
static struct ioshape_comm *comm;

static struct stream_plan plan_of(uint32_t sender, uint32_t tag)
{
	return (struct stream_plan){
		.rank = sender,
		.seed = sender * 100 + tag,
		.pieces = tag % 3 ? 40 : 0,
		.most_bytes = (sender + tag) % 2 ? 9 * MIB + 1 : 77,
	};
}

static void send_plan(uint32_t tag)
{
	const struct stream_plan plan = plan_of((uint32_t)rank, tag);
	struct stream_sender *sender;
	struct stream_memory memory;

	stream_memory_open(&memory, 16 * MIB);
	STREAM_MUST(
		!stream_sender_open_comm(&sender, comm, 0, tag, TIMEOUT_MS, &stream_patient, NULL));
	stream_send_plan(sender, &plan, &memory);
	stream_sender_free(sender, NULL);
	stream_memory_close(&memory);
}

static struct stream_receiver *receive(uint32_t from, uint32_t tag)
{
	struct stream_receiver *receiver;

	STREAM_MUST(!stream_receiver_open_comm(&receiver, comm, from, tag, BLOCK, BLOCKS, NULL,
					       TIMEOUT_MS, &stream_patient, NULL));
	return receiver;
}

static void every_byte_comes_in_its_place(void)
{
	for (uint32_t tag = 1; tag < 6; tag++) {
		if (rank) {
			send_plan(tag);
			continue;
		}
		for (uint32_t from = 1; from < (uint32_t)ranks; from++) {
			const struct stream_plan plan = plan_of(from, tag);
			struct stream_receiver *receiver = receive(from, tag);

			stream_receive_plan(receiver, &plan);
			stream_receiver_free(receiver);
		}
	}
}

/* Checks that a writer receives the next rank's bytes while it writes this one's. */
static void several_come_at_a_time(void)
{
	const uint32_t tag = 7;
	struct stream_receiver *receivers[64];

	if (rank) {
		send_plan(tag);
		return;
	}
	for (int from = 1; from < ranks; from++)
		receivers[from] = receive((uint32_t)from, tag);
	for (int from = ranks - 1; from; from--) {
		const struct stream_plan plan = plan_of((uint32_t)from, tag);

		stream_receive_plan(receivers[from], &plan);
		stream_receiver_free(receivers[from]);
	}
}

static void failing_and_stopping_leave_a_clean_channel(void)
{
	static char bytes[5 * MIB];
	struct base_error error = { 0 };
	int ret = 0;

	if (rank == 1) {
		struct stream_sender *sender;

		STREAM_MUST(!stream_sender_open_comm(&sender, comm, 0, 20, TIMEOUT_MS,
						     &stream_patient, NULL));
		STREAM_MUST(!stream_sender_put(sender, bytes, sizeof(bytes), NULL));
		stream_sender_free(sender, "the disk of its heart is full");
		STREAM_MUST(!stream_sender_open_comm(&sender, comm, 0, 21, TIMEOUT_MS,
						     &stream_patient, NULL));
		while (!ret)
			ret = stream_sender_put(sender, bytes, sizeof(bytes), &error);
		STREAM_MUST(ret == -ECANCELED && strstr(error.text, "stopped receiving"));
		stream_sender_free(sender, NULL);
		send_plan(22);
	} else if (!rank) {
		const struct stream_plan plan = plan_of(1, 22);
		struct stream_receiver *receiver = receive(1, 20);
		const void *data;
		size_t size = 1;

		while (!ret && size)
			ret = stream_receiver_next(receiver, &data, &size, &error);
		STREAM_MUST(ret == -ECANCELED && strstr(error.text, "rank 1 failed: the disk"));
		stream_receiver_free(receiver);
		receiver = receive(1, 21);
		STREAM_MUST(!stream_receiver_next(receiver, &data, &size, NULL) && size);
		stream_receiver_free(receiver);
		receiver = receive(1, 22);
		stream_receive_plan(receiver, &plan);
		stream_receiver_free(receiver);
	}
}

static void messages_have_a_time_and_a_size(void)
{
	char bytes[100] = { 0 };
	const uint64_t began = base_now_ns();

	if (!rank) {
		STREAM_MUST(comm->receive(comm->user, 1, 30, bytes, sizeof(bytes), 200) ==
			    -ETIMEDOUT);
		STREAM_MUST(base_now_ns() - began >= base_ms_to_ns(200));
	}
	STREAM_MUST(!MPI_Barrier(MPI_COMM_WORLD));
	if (rank == 1) {
		/* The next receive must not get the message that was given up. */
		STREAM_MUST(!comm->send(comm->user, 0, 31, "one", 4, TIMEOUT_MS));
		STREAM_MUST(!comm->send(comm->user, 0, 31, "three", 6, TIMEOUT_MS));
		STREAM_MUST(!comm->send(comm->user, 0, 31, "longer than expected", 21, TIMEOUT_MS));
	} else if (!rank) {
		STREAM_MUST(!comm->receive(comm->user, 1, 31, bytes, 4, TIMEOUT_MS));
		STREAM_MUST(!strcmp(bytes, "one"));
		STREAM_MUST(comm->receive(comm->user, 1, 31, bytes, 10, TIMEOUT_MS) == -EPROTO);
		STREAM_MUST(comm->receive(comm->user, 1, 31, bytes, 10, TIMEOUT_MS) < 0);
	}
	STREAM_MUST(comm->send(comm->user, 0, UINT32_MAX, bytes, 1, 10) == -EINVAL);
	STREAM_MUST(comm->send(comm->user, 0, 1, bytes, (size_t)2 * GIB, 10) == -EMSGSIZE);
	comm->progress(comm->user);
}

static void options_are_the_jobs(void)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	char token[IOSHAPE_MPI_TOKEN_BYTES], first[IOSHAPE_MPI_TOKEN_BYTES], message[200];

	STREAM_MUST(!ioshape_group_options_of_mpi(MPI_COMM_WORLD, &options, token, message,
						  sizeof(message)));
	STREAM_MUST(options.rank == (uint32_t)rank && options.ranks == (uint32_t)ranks);
	/* All ranks run on this host. */
	STREAM_MUST(options.local_ranks == (uint32_t)ranks);
	STREAM_MUST(options.token == token && strlen(token) == 32);
	memcpy(first, token, sizeof(first));
	STREAM_MUST(!MPI_Bcast(first, sizeof(first), MPI_CHAR, 0, MPI_COMM_WORLD));
	STREAM_MUST(!memcmp(first, token, sizeof(first)));
	STREAM_MUST(!ioshape_group_options_of_mpi(MPI_COMM_WORLD, &options, token, NULL, 0));
	STREAM_MUST(memcmp(first, token, sizeof(first)) != 0);
	STREAM_MUST(ioshape_group_options_of_mpi(MPI_COMM_WORLD, NULL, token, NULL, 0) == -EINVAL);
}

/* ---- Failures of MPI ------------------------------------------------------------------------- */

/*
 * Name of the call that fails; empty: none. The program replaces MPI functions by means of MPI's
 * profiling interface.
 */
static const char *refused = "";

#define BEFORE_MPI(name, parameters, arguments)                                                    \
	int name parameters                                                                        \
	{                                                                                          \
		return strcmp(refused, #name) ? P##name arguments : MPI_ERR_OTHER;                 \
	}

/* Memory of the newest receive, and memory of a receive that was given up. */
static const void *last_memory, *given_up;

static bool may_use(const char *name, const void *memory)
{
	STREAM_MUST(!given_up || memory != given_up);
	last_memory = memory;
	return strcmp(refused, name) != 0;
}

int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm in,
	      MPI_Request *request)
{
	return may_use("MPI_Isend", data) ? PMPI_Isend(data, count, type, to, tag, in, request) :
					    MPI_ERR_OTHER;
}

int MPI_Irecv(void *into, int count, MPI_Datatype type, int from, int tag, MPI_Comm in,
	      MPI_Request *request)
{
	return may_use("MPI_Irecv", into) ? PMPI_Irecv(into, count, type, from, tag, in, request) :
					    MPI_ERR_OTHER;
}

BEFORE_MPI(MPI_Test, (MPI_Request * request, int *done, MPI_Status *status),
	   (request, done, status))
BEFORE_MPI(MPI_Cancel, (MPI_Request * request), (request))
BEFORE_MPI(MPI_Get_count, (const MPI_Status *status, MPI_Datatype type, int *count),
	   (status, type, count))
BEFORE_MPI(MPI_Comm_dup, (MPI_Comm from, MPI_Comm *into), (from, into))
BEFORE_MPI(MPI_Comm_size, (MPI_Comm of, int *into), (of, into))
BEFORE_MPI(MPI_Bcast, (void *data, int count, MPI_Datatype type, int root, MPI_Comm in),
	   (data, count, type, root, in))

int MPI_Comm_get_attr(MPI_Comm of, int key, void *into, int *found)
{
	*found = 0;
	return strcmp(refused, "MPI_Comm_get_attr") ? PMPI_Comm_get_attr(of, key, into, found) :
						      MPI_SUCCESS;
}

static int level_told = MPI_THREAD_MULTIPLE;

int MPI_Query_thread(int *level)
{
	*level = level_told;
	return MPI_SUCCESS;
}

/* Replaces libc's function. It fails like a kernel that lacks the call. */
ssize_t getrandom(void *into, size_t bytes, unsigned flags)
{
	(void)flags;
	if (!strcmp(refused, "getrandom")) {
		errno = ENOSYS;
		return -1;
	}
	return getentropy(into, bytes) ? -1 : (ssize_t)bytes;
}

static int send_while_refused(const char *name, uint32_t tag)
{
	int ret;

	refused = name;
	ret = comm->send(comm->user, (uint32_t)rank, tag, "bytes", 6, 100);
	refused = "";
	return ret;
}

static int receive_while_refused(const char *name, uint32_t tag, char *into)
{
	int ret;

	refused = name;
	ret = comm->receive(comm->user, (uint32_t)rank, tag, into, 6, 100);
	refused = "";
	return ret;
}

static void what_mpi_refuses_is_an_error(void)
{
	char bytes[6];

	STREAM_MUST(send_while_refused("MPI_Isend", 40) == -EIO);
	STREAM_MUST(receive_while_refused("MPI_Irecv", 40, bytes) == -EIO);
	/* A short message is sent at once, before the receiver waits for it. */
	STREAM_MUST(!send_while_refused("", 41));
	STREAM_MUST(receive_while_refused("MPI_Get_count", 41, bytes) == -EPROTO);
}

static struct ioshape_comm *other_comm(void)
{
	struct ioshape_comm *other;

	STREAM_MUST(!ioshape_comm_of_mpi(MPI_COMM_SELF, &other, NULL, 0));
	return other;
}

/*
 * MPI may still write to the memory of a receive that was given up, and does not say when it no
 * longer will.
 */
static void memory_that_mpi_may_write_to_is_not_used_again(const char *name)
{
	struct ioshape_comm *mine = comm;
	const int my_rank = rank;
	char bytes[6] = "";

	comm = other_comm();
	rank = 0;
	STREAM_MUST(receive_while_refused(name, 50, bytes) ==
		    (strcmp(name, "MPI_Test") ? -ETIMEDOUT : -EIO));
	given_up = last_memory;
	STREAM_MUST(!comm->send(comm->user, 0, 51, "other", 6, TIMEOUT_MS));
	STREAM_MUST(!comm->receive(comm->user, 0, 51, bytes, 6, TIMEOUT_MS));
	STREAM_MUST(!strcmp(bytes, "other"));
	given_up = NULL;
	ioshape_comm_mpi_free(comm);
	comm = mine;
	rank = my_rank;
}

static void what_cannot_be_given_up_keeps_its_memory(void)
{
	memory_that_mpi_may_write_to_is_not_used_again("MPI_Cancel");
	memory_that_mpi_may_write_to_is_not_used_again("MPI_Test");
}

static void *receive_nothing(void *bytes)
{
	const size_t size = *(size_t *)bytes;
	char *into = malloc(size);

	STREAM_MUST(into);
	STREAM_MUST(comm->receive(comm->user, (uint32_t)rank, 60, into, size, 300) == -ETIMEDOUT);
	free(into);
	return NULL;
}

static void many_messages_at_a_time_are_given_up(void)
{
	size_t sizes[] = { 3, 1 * MIB, 2, 5, 1, 4, 100 };
	pthread_t threads[ARRAY_LENGTH(sizes)];

	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++)
		STREAM_MUST(!pthread_create(&threads[i], NULL, receive_nothing, &sizes[i]));
	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++)
		STREAM_MUST(!pthread_join(threads[i], NULL));
}

static void refused_comm(const char *name, int code)
{
	struct ioshape_comm *other;
	char message[200];

	refused = name;
	STREAM_MUST(ioshape_comm_of_mpi(MPI_COMM_SELF, &other, message, sizeof(message)) == code);
	refused = "";
	STREAM_MUST(!other == !!code && !*message == !code);
	ioshape_comm_mpi_free(other);
}

static void a_comm_takes_threads_and_a_communicator(void)
{
	static const int levels[] = { MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED,
				      MPI_THREAD_SERIALIZED };

	for (size_t i = 0; i < ARRAY_LENGTH(levels); i++) {
		level_told = levels[i];
		refused_comm("", -ENOTSUP);
	}
	level_told = MPI_THREAD_MULTIPLE;
	refused_comm("MPI_Comm_dup", -EIO);
	/* MPI guarantees tags up to 32767 in any case. */
	refused_comm("MPI_Comm_get_attr", 0);
	STREAM_MUST(ioshape_comm_of_mpi(MPI_COMM_SELF, NULL, NULL, 0) == -EINVAL);
}

static void refused_options(const char *name)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	char token[IOSHAPE_MPI_TOKEN_BYTES], message[200];

	refused = name;
	STREAM_MUST(ioshape_group_options_of_mpi(MPI_COMM_SELF, &options, token, message,
						 sizeof(message)) == -EIO);
	refused = "";
	STREAM_MUST(*message && !options.ranks && !options.token);
}

static void options_that_mpi_refuses_are_an_error(void)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;

	refused_options("MPI_Comm_size");
	refused_options("MPI_Bcast");
	refused_options("getrandom");
	STREAM_MUST(ioshape_group_options_of_mpi(MPI_COMM_SELF, &options, NULL, NULL, 0) ==
		    -EINVAL);
}

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	{ "every_byte_comes_in_its_place", every_byte_comes_in_its_place },
	{ "several_come_at_a_time", several_come_at_a_time },
	{ "failing_and_stopping_leave_a_clean_channel",
	  failing_and_stopping_leave_a_clean_channel },
	{ "messages_have_a_time_and_a_size", messages_have_a_time_and_a_size },
	{ "options_are_the_jobs", options_are_the_jobs },
	{ "what_mpi_refuses_is_an_error", what_mpi_refuses_is_an_error },
	{ "what_cannot_be_given_up_keeps_its_memory", what_cannot_be_given_up_keeps_its_memory },
	{ "many_messages_at_a_time_are_given_up", many_messages_at_a_time_are_given_up },
	{ "a_comm_takes_threads_and_a_communicator", a_comm_takes_threads_and_a_communicator },
	{ "options_that_mpi_refuses_are_an_error", options_that_mpi_refuses_are_an_error },
};

/*
 * Checks that with a lower thread level than needed, the library refuses with a message and does
 * nothing else.
 */
static int refuse(void)
{
	char message[300];

	PMPI_Query_thread(&level_told);
	STREAM_MUST(ioshape_comm_of_mpi(MPI_COMM_WORLD, &comm, message, sizeof(message)) ==
		    -ENOTSUP);
	STREAM_MUST(!comm && strstr(message, "MPI_THREAD_MULTIPLE"));
	STREAM_MUST(strstr(message, "MPI_THREAD_FUNNELED"));
	if (!rank)
		printf("1..1\nok 1 - fewer threads are refused with a sentence\n");
	return MPI_Finalize();
}

int main(int argc, char **argv)
{
	const int wanted = argc > 1 && !strcmp(argv[1], "funneled") ? MPI_THREAD_FUNNELED :
								      MPI_THREAD_MULTIPLE;
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	char message[300];
	int level;

	STREAM_MUST(ioshape_group_options_of_mpi(MPI_COMM_WORLD, &options, message, NULL, 0) ==
		    -EINVAL);
	STREAM_MUST(ioshape_comm_of_mpi(MPI_COMM_WORLD, &comm, message, sizeof(message)) ==
		    -EINVAL);
	STREAM_MUST(strstr(message, "MPI is not in use"));
	STREAM_MUST(!MPI_Init_thread(&argc, &argv, wanted, &level));
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (wanted == MPI_THREAD_FUNNELED)
		return refuse();
	STREAM_MUST(level == MPI_THREAD_MULTIPLE && ranks > 1 && ranks <= 64);
	if (ioshape_comm_of_mpi(MPI_COMM_WORLD, &comm, message, sizeof(message)))
		stream_fail(message);
	if (!rank)
		printf("1..%zu\n", ARRAY_LENGTH(tests));
	/* A failed check aborts its rank, and mpirun then ends the others. */
	for (size_t i = 0; i < ARRAY_LENGTH(tests); i++) {
		tests[i].run();
		STREAM_MUST(!MPI_Barrier(MPI_COMM_WORLD));
		if (!rank)
			printf("ok %zu - %s\n", i + 1, tests[i].name);
	}
	ioshape_comm_mpi_free(NULL);
	level = MPI_Finalize();
	/* Freeing after MPI_Finalize() is allowed. */
	ioshape_comm_mpi_free(comm);
	STREAM_MUST(ioshape_comm_of_mpi(MPI_COMM_WORLD, &comm, message, sizeof(message)) ==
		    -EINVAL);
	return level;
}
