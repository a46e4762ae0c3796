// SPDX-License-Identifier: Apache-2.0
// The C++ interface: handles clean up after themselves, and failures are exceptions.
//
//	trainer_cpp DIRECTORY
#include <ioshape/ioshape.hpp>

#include <cstdio>
#include <numeric>

int main(int argc, char **argv)
{
	if (argc != 2) {
		std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
		return 2;
	}
	const std::string path = std::string(argv[1]) + "/model_cpp.pt";
	try {
		ioshape::context context;
		std::vector<float> weights(256 * 128);
		std::iota(weights.begin(), weights.end(), 0.0f);
		const std::vector<std::int64_t> shape{ 256, 128 };
		const std::vector<ioshape_tensor> tensors{
			{ "weights", IOSHAPE_FLOAT32, 2, shape.data(), nullptr, weights.data() }
		};

		// The save runs in the background: `weights` may change as soon as the call
		// returns.
		ioshape::save save = context.save_tensors_async(path, tensors);
		const std::vector<float> expected = weights;
		weights.assign(weights.size(), -1.0f);
		save.wait();
		const ioshape_report report = save.report(); // ioshape::text() tells all of it
		std::printf("saved %s: %.1f MiB in %.3f s\n", path.c_str(),
			    static_cast<double>(report.file_bytes) / (1 << 20), report.total_s);

		ioshape::reader reader(context, path);
		reader.load(reader.find_tensor("weights"), weights.data());
		if (weights != expected) {
			std::fprintf(stderr,
				     "trainer_cpp: the loaded values differ from the saved ones\n");
			return 1;
		}
		std::printf("loaded %zu values, equal to the saved ones\n", weights.size());
		return 0;
	} catch (const ioshape::error &error) {
		std::fprintf(stderr, "trainer_cpp: %s\n", error.what());
		return 1;
	}
}
