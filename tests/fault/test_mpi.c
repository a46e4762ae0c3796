/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams between the ranks of an MPI program; mpirun starts this several times. Rank 0 tells the
 * results of all.
 */
#define _GNU_SOURCE
#include "gather/gather.h"
#include "support/stream_case.h"

#include <ioshape/mpi.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

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
	struct gather_sender *sender;
	struct stream_memory memory;

	stream_memory_open(&memory, 16 * MIB);
	STREAM_MUST(
		!gather_sender_open_comm(&sender, comm, 0, tag, TIMEOUT_MS, &stream_patient, NULL));
	stream_send_plan(sender, &plan, &memory);
	gather_sender_free(sender, NULL);
	stream_memory_close(&memory);
}

static struct gather_receiver *receive(uint32_t from, uint32_t tag)
{
	struct gather_receiver *receiver;

	STREAM_MUST(!gather_receiver_open_comm(&receiver, comm, from, tag, BLOCK, BLOCKS, NULL,
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
			struct gather_receiver *receiver = receive(from, tag);

			stream_receive_plan(receiver, &plan);
			gather_receiver_free(receiver);
		}
	}
}

/* As a writer does: the next rank's bytes come in while this one's are written. */
static void several_come_at_a_time(void)
{
	const uint32_t tag = 7;
	struct gather_receiver *receivers[64];

	if (rank) {
		send_plan(tag);
		return;
	}
	for (int from = 1; from < ranks; from++)
		receivers[from] = receive((uint32_t)from, tag);
	for (int from = ranks - 1; from; from--) {
		const struct stream_plan plan = plan_of((uint32_t)from, tag);

		stream_receive_plan(receivers[from], &plan);
		gather_receiver_free(receivers[from]);
	}
}

static void failing_and_stopping_leave_a_clean_channel(void)
{
	static char bytes[5 * MIB];
	struct base_error error = { 0 };
	int ret = 0;

	if (rank == 1) {
		struct gather_sender *sender;

		STREAM_MUST(!gather_sender_open_comm(&sender, comm, 0, 20, TIMEOUT_MS,
						     &stream_patient, NULL));
		STREAM_MUST(!gather_sender_put(sender, bytes, sizeof(bytes), NULL));
		gather_sender_free(sender, "the disk of its heart is full");
		STREAM_MUST(!gather_sender_open_comm(&sender, comm, 0, 21, TIMEOUT_MS,
						     &stream_patient, NULL));
		while (!ret)
			ret = gather_sender_put(sender, bytes, sizeof(bytes), &error);
		STREAM_MUST(ret == -ECANCELED && strstr(error.text, "wants no more"));
		gather_sender_free(sender, NULL);
		send_plan(22);
	} else if (!rank) {
		const struct stream_plan plan = plan_of(1, 22);
		struct gather_receiver *receiver = receive(1, 20);
		const void *data;
		size_t size = 1;

		while (!ret && size)
			ret = gather_receiver_next(receiver, &data, &size, &error);
		STREAM_MUST(ret == -ECANCELED && strstr(error.text, "rank 1 failed: the disk"));
		gather_receiver_free(receiver);
		receiver = receive(1, 21);
		STREAM_MUST(!gather_receiver_next(receiver, &data, &size, NULL) && size);
		gather_receiver_free(receiver);
		receiver = receive(1, 22);
		stream_receive_plan(receiver, &plan);
		gather_receiver_free(receiver);
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
		/* What was given up is not what the next one receives. */
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
	/* All are on this host. */
	STREAM_MUST(options.local_ranks == (uint32_t)ranks);
	STREAM_MUST(options.token == token && strlen(token) == 32);
	memcpy(first, token, sizeof(first));
	STREAM_MUST(!MPI_Bcast(first, sizeof(first), MPI_CHAR, 0, MPI_COMM_WORLD));
	STREAM_MUST(!memcmp(first, token, sizeof(first)));
	STREAM_MUST(!ioshape_group_options_of_mpi(MPI_COMM_WORLD, &options, token, NULL, 0));
	STREAM_MUST(memcmp(first, token, sizeof(first)) != 0);
	STREAM_MUST(ioshape_group_options_of_mpi(MPI_COMM_WORLD, NULL, token, NULL, 0) == -EINVAL);
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
};

/* With fewer threads than it takes: said, and nothing else. */
static int refuse(void)
{
	char message[300];

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
	char message[300];
	int level;

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
	/* A rank in which something does not hold aborts, and mpirun ends the others. */
	for (size_t i = 0; i < ARRAY_LENGTH(tests); i++) {
		tests[i].run();
		STREAM_MUST(!MPI_Barrier(MPI_COMM_WORLD));
		if (!rank)
			printf("ok %zu - %s\n", i + 1, tests[i].name);
	}
	ioshape_comm_mpi_free(comm);
	ioshape_comm_mpi_free(NULL);
	return MPI_Finalize();
}
