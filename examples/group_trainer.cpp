// SPDX-License-Identifier: Apache-2.0
// A trainer of four processes on one host that save together. Each process owns a quarter of the
// weights. A checkpoint holds all four quarters or does not exist. When you start the trainer
// again, it resumes from the newest checkpoint.
//
//	group_trainer_cpp DIRECTORY [STEPS]
//
// This run trains STEPS steps beyond those of the checkpoint. The trainer needs neither MPI nor a
// server: the ranks find each other through shared memory of the host. After `unzip
// DIRECTORY/step-0000000030/node-00000.zip`, torch.load("rank-00002.pt") returns a dict with the
// "weights" and the "momentum" of rank 2.
#include <ioshape/ioshape.hpp>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <unistd.h>

namespace
{

constexpr std::uint32_t ranks = 4;
constexpr std::int64_t rows = 128, columns = 1024; // of one rank
constexpr std::uint64_t save_every = 10;
constexpr std::uint32_t keep = 2; // complete checkpoints that stay on disk

constexpr char usage[] = "usage: %s DIRECTORY [STEPS]\n"
			 "Trains STEPS steps in this run (default: 30), beyond those of the "
			 "checkpoint in DIRECTORY.\n";

struct rank_model {
	std::uint32_t rank;
	std::uint64_t step = 0;
	std::vector<float> weights = std::vector<float>(rows * columns);
	std::vector<float> momentum = std::vector<float>(rows * columns);

	// Trains one step towards a fixed pattern and returns the mean loss of this rank.
	double train_one_step()
	{
		const std::int64_t first = rank * rows;
		double loss = 0;

		for (std::int64_t i = 0; i < rows * columns; i++) {
			const std::int64_t row = first + i / columns, column = i % columns;
			const float wanted =
				static_cast<float>((row * 7 + column * 3) % 11) / 11.0f;
			const float error = weights[i] - wanted;

			momentum[i] = 0.5f * momentum[i] - 0.5f * error;
			weights[i] += momentum[i];
			loss += static_cast<double>(error) * static_cast<double>(error);
		}
		step++;
		return loss / (rows * columns);
	}
	// Returns the tensors that this rank adds to a checkpoint.
	std::vector<ioshape_tensor> tensors() const
	{
		static const std::int64_t shape[] = { rows, columns };

		return { { "weights", IOSHAPE_FLOAT32, 2, shape, nullptr, weights.data() },
			 { "momentum", IOSHAPE_FLOAT32, 2, shape, nullptr, momentum.data() } };
	}
};

// Loads the newest checkpoint on all ranks. Returns false if there is none.
bool resume(ioshape::context &context, ioshape::group &group, const std::string &directory,
	    rank_model &model)
{
	const std::optional<std::uint64_t> step = group.latest();

	if (!step)
		return false;
	// While the checkpoint is open, retention does not remove it.
	const ioshape::checkpoint checkpoint(context, directory, *step);
	const ioshape::reader reader = checkpoint.shard_reader(model.rank);

	reader.load(reader.find_tensor("weights"), model.weights.data());
	reader.load(reader.find_tensor("momentum"), model.momentum.data());
	model.step = *step;
	return true;
}

void train(std::uint32_t rank, const std::string &job, const std::string &directory,
	   std::uint64_t steps)
{
	ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	ioshape::context context;
	rank_model model{ rank };

	options.rank = rank;
	options.ranks = options.local_ranks = ranks;
	options.token = job.c_str(); // ranks of another such job do not join
	options.keep_last = keep;
	options.deadline_ms = 10000;
	ioshape::group group(context, directory, options);
	ioshape::save saving;
	const bool resumed = resume(context, group, directory, model);
	if (rank == 0)
		std::printf(resumed ? "resuming from step %llu\n" : "starting from step 0\n",
			    static_cast<unsigned long long>(model.step));
	for (const std::uint64_t end = model.step + steps; model.step < end;) {
		const double loss = model.train_one_step();

		if (model.step % save_every)
			continue;
		if (saving)
			saving.wait(); // the previous save is durable now, or this throws
		saving = group.save_tensors_async(model.step, model.tensors());
		if (rank == 0)
			std::printf("step %llu, loss %.6f\n",
				    static_cast<unsigned long long>(model.step), loss);
		std::fflush(stdout);
	}
	if (!saving)
		return;
	saving.wait();
	const ioshape_report report = saving.report();
	if (rank == 0)
		std::printf("saved %s\n", ioshape::text(report).c_str());
}

// Runs one rank and returns the exit status of its process.
int run(std::uint32_t rank, const std::string &job, const std::string &directory,
	std::uint64_t steps)
{
	try {
		train(rank, job, directory, steps);
	} catch (const ioshape::error &error) {
		std::fprintf(stderr, "group_trainer_cpp, rank %u: %s\n", rank, error.what());
		return 1;
	}
	return 0;
}

} // namespace

int main(int argc, char **argv)
{
	if (argc < 2 || argc > 3) {
		std::fprintf(stderr, usage, argv[0]);
		return 2;
	}
	const std::uint64_t steps = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 30;
	const std::string job = "group_trainer " + std::to_string(getpid());

	// Each child opens its own context, because contexts are not inherited by fork().
	for (std::uint32_t rank = 0; rank < ranks; rank++) {
		const pid_t child = fork();

		if (child < 0) {
			std::perror("group_trainer_cpp: fork");
			return 1;
		}
		if (child == 0) {
			const int status = run(rank, job, argv[1], steps);

			std::fflush(stdout);
			_exit(status);
		}
	}
	int failed = 0, status;
	while (wait(&status) > 0)
		failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
	return failed ? 1 : 0;
}
