#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds ioshape and shows what it does for a training on four ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

usage() {
	cat <<'END'
Usage: examples/quickstart.sh [--keep] [--help]

Installs what is missing (see tests/support/setup.sh), builds the Python package into .venv and the C
library in build/release, and in a temporary folder (below TMPDIR, or /tmp; it takes 1 GB)

  1. trains on four ranks that save in the background; kills them all while they save; goes on
  2. compares the losses with those of a training that nobody killed
  3. trains the same with torch.save, and with torch.save under "ioshape run"; compares the stalls
  4. verifies the files, and opens them with torch in a process without ioshape
  5. saves from C and C++

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

say() { # say LINE...
	echo
	printf '== %s\n' "$1"
	[ $# = 1 ] || printf '   %s\n' "${@:2}"
}

fail() {
	echo "quickstart: $*" >&2
	exit 1
}

say "What is needed"
tests/support/setup.sh build
export PATH="$PWD/.venv/bin:$PATH"

say "Building the Python package into .venv, the C library and its examples in build/release"
tests/support/package.sh
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
cd "$folder"

# The four ranks share the machine, so each has one thread. The user's settings must not change the
# results.
export OMP_NUM_THREADS=1
unset "${!IOSHAPE_@}"
size=(--steps 30 --save-every 10 --width 384 --layers 4)

# train PROGRAM FOLDER OPTION...: trains on four ranks. Output of torchrun itself goes to
# torchrun.txt. torchrun alone connects the ranks: no server has to be started.
train() {
	torchrun --standalone --nproc-per-node 4 "$@" "${size[@]}" 2>torchrun.txt
}

must_train() {
	train "$@" || {
		cat torchrun.txt >&2
		fail "this training failed: $*"
	}
}

# Prints each step's loss with all its digits. A repeated step with an equal loss counts once.
losses() {
	sort -n "$1/losses.txt" | uniq
}

same_losses() { # same_losses FOLDER FOLDER
	cmp -s <(losses "$1") <(losses "$2") || fail "the losses in $1 and $2 differ"
	echo "yes: $(losses "$1" | wc -l) steps, every loss the same to the last bit"
}

say "Four ranks train (examples/train.py) and save every 10 steps, all in the same second." \
	"At step 20, in the middle of a save, kill -9 hits them all."
! train "$root/examples/train.py" ours --kill-at-step 20 ||
	fail "the training ended well although it was to be killed"
echo "torchrun saw: $(grep -o 'Signal 9 (SIGKILL)' torchrun.txt | head -n 1 ||
	tail -n 20 torchrun.txt)"
find ours -type f -printf '%12s bytes %f\n' | sort -k 3


say "Started again, it goes on from the newest checkpoint that all ranks have"
must_train "$root/examples/train.py" ours
# Shows the files that the killed ranks were writing, if they had begun.
grep 'left behind' torchrun.txt || true

say "The same training, and nobody kills it"
must_train "$root/examples/train.py" whole | tee whole.txt
echo "Are the losses of the killed training those of this one?"
same_losses ours whole

say "The same training with plain torch.save (examples/plain_train.py)"
must_train "$root/examples/plain_train.py" plain | tee plain.txt
same_losses plain whole

say "That script again, unchanged, under \"ioshape run\": now its saves are durable and atomic"
must_train -m ioshape run "$root/examples/plain_train.py" run | tee run.txt
same_losses run whole

say "How long training stood still" \
	"(The first save of a process makes memory that later ones use again.)"
stall() { # stall TITLE FILE
	printf '%-34s %s\n' "$1" "$(tail -n 1 "$2")"
}
stall 'torch.save, not durable' plain.txt
stall 'torch.save under "ioshape run"' run.txt
stall 'ioshape.save_async' whole.txt

say "Every checksum of the files is right (ioshape verify)"
ioshape verify ours/*.pt

say "torch opens them in a process that has no ioshape (examples/stock_load.py)"
python "$root/examples/stock_load.py" ours/step-000030-*.pt

say "A trainer in C (examples/trainer.c) saves in the background while it trains"
"$root/build/release/examples/trainer" .

say "Started again, it goes on where it was"
"$root/build/release/examples/trainer" .

say "The same from C++ (examples/trainer.cpp)"
"$root/build/release/examples/trainer_cpp" .

say "torch opens their files, too (examples/read_back.py)"
python "$root/examples/read_back.py" .

say "Done. What to read next"
cat <<'END'
  diff examples/plain_train.py examples/train.py   what changes in a training script
  docs/migration.md                                what changes besides, and what does not
  docs/python.md                                   the Python package; docs/api.md: the C library
  examples/group_train.py                          the same training, whose ranks make one checkpoint together
  examples/slurm.sbatch                            the same as a batch job on a cluster
  ioshape bench FOLDER                             torch.save and ioshape on a filesystem of yours
END
