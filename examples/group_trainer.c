/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trainer for MPI whose ranks save together. Each rank fits its own rows of a matrix. Every few
 * steps all ranks save one checkpoint in the background. The checkpoint holds the rows of all ranks
 * or does not exist. When you start the trainer again, it resumes from the newest checkpoint.
 *
 *	meson setup build -Dmpi=enabled -Dexamples=true && meson compile -C build
 *	mpirun -n 8 build/examples/group_trainer DIRECTORY [STEPS]
 *
 * or, with an installed library,
 *
 *	mpicc group_trainer.c $(pkg-config --cflags --libs ioshape-mpi) -o group_trainer
 *
 * This run trains STEPS steps beyond those of the checkpoint. With IOSHAPE_MODE=rank0, rank 0
 * writes one file for all ranks. With IOSHAPE_MODE=each, every rank writes its own file.
 */
#include <ioshape/group.h>
#include <ioshape/ioshape.h>
#include <ioshape/mpi.h>

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define ROWS 64 /* rows of one rank */
#define COLUMNS 1024
#define SAVE_EVERY 10
#define KEEP 2 /* complete checkpoints that stay on disk */

static const char usage[] = "usage: %s DIRECTORY [STEPS]\n"
			    "Trains STEPS steps in this run (default: 30), beyond those of the "
			    "checkpoint in DIRECTORY.\n";

struct model {
	int rank;
	uint64_t step;
	double loss;
	float weights[ROWS][COLUMNS];
	float momentum[ROWS][COLUMNS];
};

static void train_one_step(struct model *model)
{
	double loss = 0;

	for (int r = 0; r < ROWS; r++) {
		for (int c = 0; c < COLUMNS; c++) {
			/* Any fixed pattern is good enough as a target. */
			float wanted = (float)(((model->rank * ROWS + r) * 7 + c * 3) % 11) / 11.0f;
			float error = model->weights[r][c] - wanted;

			model->momentum[r][c] = 0.5f * model->momentum[r][c] - 0.5f * error;
			model->weights[r][c] += model->momentum[r][c];
			loss += (double)error * (double)error;
		}
	}
	model->step++;
	/* Data-parallel training communicates, too, while a background save runs. */
	MPI_Allreduce(&loss, &model->loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

/* ---- Checkpoints ----------------------------------------------------------------------------- */

#define TENSORS 2

static void describe(const struct model *model, struct ioshape_tensor tensors[TENSORS])
{
	static const int64_t shape[] = { ROWS, COLUMNS };

	tensors[0] = (struct ioshape_tensor){ "weights", IOSHAPE_FLOAT32, 2, shape,
					      NULL,      model->weights };
	tensors[1] = (struct ioshape_tensor){ "momentum", IOSHAPE_FLOAT32, 2, shape,
					      NULL,       model->momentum };
}

static int load_tensor(struct ioshape_reader *reader, const char *name, void *into)
{
	struct ioshape_load_request request = { .bytes = sizeof(float) * ROWS * COLUMNS,
						.into = into };
	int ret = ioshape_reader_find_tensor(reader, name, &request.tensor);

	return ret ? ret : ioshape_reader_load(reader, &request, 1);
}

/* Loads the newest checkpoint, which is the same for all ranks. Returns -ENOENT if there is
 * none. */
static int resume(struct ioshape_context *context, struct ioshape_group *group,
		  const char *directory, struct model *model)
{
	struct ioshape_checkpoint *checkpoint = NULL;
	struct ioshape_reader *reader = NULL;
	uint64_t step;
	int ret;

	ret = ioshape_group_get_latest(group, NULL, &step);
	if (!ret)
		ret = ioshape_checkpoint_open(context, directory, step, &checkpoint);
	if (!ret)
		ret = ioshape_checkpoint_open_shard(checkpoint, (uint32_t)model->rank, NULL,
						    &reader);
	if (!ret)
		ret = load_tensor(reader, "weights", model->weights);
	if (!ret)
		ret = load_tensor(reader, "momentum", model->momentum);
	if (!ret)
		model->step = step;
	else if (ret != -ENOENT)
		fprintf(stderr, "group_trainer, rank %d: %s\n", model->rank,
			ioshape_last_error()->sentence);
	ioshape_reader_free(reader);
	ioshape_checkpoint_free(checkpoint);
	return ret;
}

/* Waits for the background save, if there is one, and prints its report on rank 0. */
static int end_save(struct ioshape_save **save, int rank)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	char text[1024];
	int ret;

	if (!*save)
		return 0;
	ret = ioshape_save_wait(*save, -1);
	ioshape_save_get_report(*save, &report);
	if (ret)
		fprintf(stderr, "group_trainer, rank %d: %s\n", rank,
			ioshape_last_error()->sentence);
	else if (!rank) {
		ioshape_report_text(&report, text, sizeof(text));
		printf("  saved %s\n", text);
	}
	ioshape_save_free(*save);
	*save = NULL;
	return ret;
}

static int begin_save(struct ioshape_group *group, const struct model *model,
		      struct ioshape_save **save)
{
	struct ioshape_tensor tensors[TENSORS];
	int ret;

	describe(model, tensors);
	ret = ioshape_group_save_tensors(group, model->step, tensors, TENSORS, NULL, save);
	if (ret)
		fprintf(stderr, "group_trainer, rank %d: %s\n", model->rank,
			ioshape_last_error()->sentence);
	return ret;
}

static int train(struct ioshape_context *context, struct ioshape_group *group,
		 const char *directory, struct model *model, uint64_t steps)
{
	struct ioshape_save *save = NULL;
	int ret;

	ret = resume(context, group, directory, model);
	if (ret && ret != -ENOENT)
		return ret;
	if (!model->rank && !ret)
		printf("resuming from step %" PRIu64 "\n", model->step);
	else if (!model->rank)
		printf("starting from step 0\n");
	ret = 0;
	for (uint64_t end = model->step + steps; !ret && model->step < end;) {
		train_one_step(model);
		if (model->step % SAVE_EVERY)
			continue;
		if (!model->rank)
			printf("step %" PRIu64 ", loss %.6f\n", model->step, model->loss);
		fflush(stdout);
		ret = end_save(&save, model->rank);
		if (!ret)
			ret = begin_save(group, model, &save);
	}
	return ret ? ret : end_save(&save, model->rank);
}

/* ---- The group ------------------------------------------------------------------------------- */

static int run(struct ioshape_context *context, struct ioshape_comm *comm, const char *directory,
	       struct model *model, uint64_t steps)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	char token[IOSHAPE_MPI_TOKEN_BYTES], message[512];
	struct ioshape_group *group;
	int ret;

	ret = ioshape_group_options_of_mpi(MPI_COMM_WORLD, &options, token, message,
					   sizeof(message));
	if (ret) {
		fprintf(stderr, "group_trainer, rank %d: %s\n", model->rank, message);
		return ret;
	}
	options.comm = comm;
	options.keep_last = KEEP;
	ret = ioshape_group_open(context, directory, &options, &group);
	if (ret) {
		fprintf(stderr, "group_trainer, rank %d: %s\n", model->rank,
			ioshape_last_error()->sentence);
		return ret;
	}
	ret = train(context, group, directory, model, steps);
	ioshape_group_free(group);
	return ret;
}

int main(int argc, char **argv)
{
	struct ioshape_context *context = NULL;
	struct ioshape_comm *comm = NULL;
	struct model *model;
	char message[512];
	int provided, ret;

	MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
	if (argc < 2 || argc > 3) {
		fprintf(stderr, usage, argv[0]);
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	model = calloc(1, sizeof(*model));
	if (!model)
		MPI_Abort(MPI_COMM_WORLD, 1);
	MPI_Comm_rank(MPI_COMM_WORLD, &model->rank);
	/* Without a comm the modes "each" and "node" still work. */
	if (ioshape_comm_of_mpi(MPI_COMM_WORLD, &comm, message, sizeof(message)) && !model->rank)
		fprintf(stderr,
			"group_trainer: modes that send data between nodes cannot be used: %s\n",
			message);
	ret = ioshape_context_open(&context, NULL);
	if (ret)
		fprintf(stderr, "group_trainer: %s\n", ioshape_last_error()->sentence);
	else
		ret = run(context, comm, argv[1], model,
			  argc > 2 ? strtoull(argv[2], NULL, 10) : 30);
	ioshape_context_free(context);
	/* A failed call of the group failed on all ranks. MPI may have lost a rank, though, and
	 * MPI_Finalize would then wait for it forever. */
	if (ret)
		MPI_Abort(MPI_COMM_WORLD, 1);
	ioshape_comm_mpi_free(comm);
	free(model);
	MPI_Finalize();
	return 0;
}
