#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds libioshape, lets a trainer in C save checkpoints, and opens them with torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: examples/quickstart.sh [--keep] [--help]

Installs what is missing (see tests/support/setup.sh), builds the library and the examples in
build/release, runs the trainers in a temporary folder, and reads their files with torch.

  --keep   leave the temporary folder with the files
END
}

keep=no
for argument in "$@"; do
	case "$argument" in
	--keep) keep=yes ;;
	-h | --help)
		usage
		exit 0
		;;
	*)
		usage >&2
		exit 2
		;;
	esac
done

say() {
	echo
	echo "== $*"
}

say "What is needed"
tests/support/setup.sh build
export PATH="$PWD/.venv/bin:$PATH"

say "Building the library and the examples in build/release"
tests/support/build.sh build/release --buildtype=release -Dexamples=true

folder=$(mktemp -d "${TMPDIR:-/tmp}/ioshape-quickstart.XXXXXX")
clean_up() {
	if [ "$keep" = yes ]; then
		echo "The files are in $folder"
	else
		rm -rf "$folder"
	fi
}
trap clean_up EXIT

say "A trainer in C (examples/trainer.c) saves in the background while it trains"
build/release/examples/trainer "$folder"

say "Started again, it goes on where it was"
build/release/examples/trainer "$folder"

say "The same from C++ (examples/trainer.cpp)"
build/release/examples/trainer_cpp "$folder"

say "Stock torch opens the files (examples/read_back.py)"
python examples/read_back.py "$folder"

say "Done. What to read next: README.md, examples/trainer.c, include/ioshape/tensors.h"
