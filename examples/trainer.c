/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small trainer in C. It fits a linear model by gradient descent and saves a checkpoint in the
 * background every few steps. When you start it again, it resumes from the last checkpoint.
 *
 *	trainer DIRECTORY [STEPS]
 *
 * This run trains STEPS steps beyond those of the checkpoint.
 *
 * In Python, torch.load("DIRECTORY/model.pt") returns a dict with "weights", "bias", "momentum" and
 * "loss".
 */
#include <ioshape/ioshape.h>

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INPUTS 1024
#define OUTPUTS 512
#define SAVE_EVERY 10
#define RATE 0.5f
#define FRICTION 0.5f

static const char usage[] = "usage: %s DIRECTORY [STEPS]\n"
			    "Trains STEPS steps in this run (default: 30), beyond those of the "
			    "checkpoint in DIRECTORY.\n";

struct model {
	float weights[OUTPUTS][INPUTS];
	float bias[OUTPUTS];
	float momentum[OUTPUTS][INPUTS];
	double loss;
	int64_t step;
};

/* Returns the target of a weight. Any fixed pattern is good enough. */
static float true_weight(int output, int input)
{
	return (float)((output * 7 + input * 3) % 11) / 11.0f;
}

static void train_one_step(struct model *model)
{
	double loss = 0;

	for (int o = 0; o < OUTPUTS; o++) {
		for (int i = 0; i < INPUTS; i++) {
			float error = model->weights[o][i] - true_weight(o, i);

			model->momentum[o][i] = FRICTION * model->momentum[o][i] - RATE * error;
			model->weights[o][i] += model->momentum[o][i];
			loss += (double)error * (double)error;
		}
		model->bias[o] *= 0.9f;
	}
	model->loss = loss / ((double)OUTPUTS * INPUTS);
	model->step++;
}

/* ---- Checkpoints ----------------------------------------------------------------------------- */

static const int64_t matrix_shape[] = { OUTPUTS, INPUTS };
static const int64_t vector_shape[] = { OUTPUTS };

#define TENSORS 4

/* Lists the tensors of a checkpoint. Saving and loading use the same list. */
static void describe(struct model *model, struct ioshape_tensor tensors[TENSORS])
{
	tensors[0] = (struct ioshape_tensor){ "weights", IOSHAPE_FLOAT32, 2, matrix_shape,
					      NULL,      model->weights };
	tensors[1] = (struct ioshape_tensor){ "bias", IOSHAPE_FLOAT32, 1, vector_shape,
					      NULL,   model->bias };
	tensors[2] = (struct ioshape_tensor){ "momentum", IOSHAPE_FLOAT32, 2, matrix_shape,
					      NULL,       model->momentum };
	tensors[3] =
		(struct ioshape_tensor){ "loss", IOSHAPE_FLOAT64, 0, NULL, NULL, &model->loss };
}

/* Loads the state of an earlier run. Returns 0, -ENOENT if there is none, or another negative
 * code. */
static int resume(struct ioshape_context *context, const char *path, struct model *model)
{
	struct ioshape_load_request requests[TENSORS];
	struct ioshape_tensor tensors[TENSORS];
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_reader *reader;
	int ret;

	ret = ioshape_reader_open(context, path, NULL, &reader);
	if (ret == -ENOENT)
		return ret;
	if (ret) {
		fprintf(stderr, "trainer: %s\n", ioshape_last_error()->sentence);
		return ret;
	}
	describe(model, tensors);
	for (int i = 0; !ret && i < TENSORS; i++) {
		struct ioshape_tensor_info info = { .size = sizeof(info) };

		ret = ioshape_reader_find_tensor(reader, tensors[i].name, &requests[i].tensor);
		if (!ret)
			ret = ioshape_reader_get_tensor(reader, requests[i].tensor, &info);
		requests[i].offset = 0;
		requests[i].bytes = info.bytes;
		/* `data` is const because saving only reads it. It points into `model`, which
		 * loading fills. */
		requests[i].into = (char *)model + ((const char *)tensors[i].data - (char *)model);
	}
	if (!ret)
		ret = ioshape_reader_load(reader, requests, TENSORS);
	if (!ret)
		ret = ioshape_reader_get_metadata(reader, &metadata);
	if (!ret)
		model->step = metadata.step;
	else
		fprintf(stderr, "trainer: %s\n", ioshape_last_error()->sentence);
	ioshape_reader_free(reader);
	return ret;
}

static int begin_save(struct ioshape_context *context, const char *path, struct model *model,
		      struct ioshape_save **save)
{
	const struct ioshape_attribute attributes[] = { { "written by", "examples/trainer.c" } };
	const struct ioshape_metadata metadata = {
		.size = sizeof(metadata),
		.step = model->step,
		.attributes = attributes,
		.attribute_count = 1,
	};
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_tensor tensors[TENSORS];
	int ret;

	options.metadata = &metadata;
	describe(model, tensors);
	ret = ioshape_save_tensors(context, path, tensors, TENSORS, &options, save);
	if (ret)
		fprintf(stderr, "trainer: %s\n", ioshape_last_error()->sentence);
	return ret;
}

/* Waits for the background save, if there is one, and prints what it wrote. */
static int end_save(struct ioshape_save **save, const char *path)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	int ret;

	if (!*save)
		return 0;
	ret = ioshape_save_wait(*save, -1);
	if (ret) {
		fprintf(stderr, "trainer: %s\n", ioshape_last_error()->sentence);
	} else {
		ioshape_save_get_report(*save, &report);
		/* ioshape_report_text() would tell all of the report. */
		printf("  saved %s: %.1f MiB in %.3f s\n", path,
		       (double)report.file_bytes / (1 << 20), report.total_s);
	}
	ioshape_save_free(*save);
	*save = NULL;
	return ret;
}

static void print_log(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user;
	(void)level;
	fprintf(stderr, "ioshape: %s\n", message);
}

static int train(struct ioshape_context *context, const char *path, struct model *model,
		 int64_t steps)
{
	struct ioshape_save *save = NULL;
	int ret;

	ret = resume(context, path, model);
	if (ret && ret != -ENOENT)
		return ret;
	if (ret)
		printf("starting from step 0\n");
	else
		printf("resuming from step %" PRId64 ", loss %.6f\n", model->step, model->loss);
	ret = 0;
	for (int64_t end = model->step + steps; !ret && model->step < end;) {
		train_one_step(model);
		if (model->step % SAVE_EVERY)
			continue;
		printf("step %" PRId64 ", loss %.6f\n", model->step, model->loss);
		ret = end_save(&save, path);
		if (!ret)
			ret = begin_save(context, path, model, &save);
	}
	return ret ? ret : end_save(&save, path);
}

int main(int argc, char **argv)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	char path[4096];
	struct model *model;
	int ret;

	if (argc < 2 || argc > 3) {
		fprintf(stderr, usage, argv[0]);
		return 2;
	}
	snprintf(path, sizeof(path), "%s/model.pt", argv[1]);
	model = calloc(1, sizeof(*model));
	if (!model)
		return 1;
	options.log = print_log;
	ret = ioshape_context_open(&context, &options);
	if (ret) {
		fprintf(stderr, "trainer: %s\n", ioshape_last_error()->sentence);
		free(model);
		return 1;
	}
	ret = train(context, path, model, argc > 2 ? strtoll(argv[2], NULL, 10) : 30);
	ioshape_context_free(context);
	free(model);
	return ret ? 1 : 0;
}
