#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds ioshape and shows what it does for a training on four ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

usage() {
	cat <<'END'
Usage: examples/quickstart.sh [--keep] [--help]

Installs missing packages (see tests/support/setup.sh), and builds the Python package into .venv and the C library
in build/release. Then, in a temporary folder (below TMPDIR, or /tmp; 1 GB), it

  1. trains on four ranks that save in the background, kills all of them during a save, and resumes
  2. trains again without a kill, with ioshape, torch.save, and torch.save under "ioshape run";
     compares losses and stalls
  3. verifies the checkpoint files, and opens them with torch in a process without ioshape
  4. saves from C and C++

  --keep   keep the temporary folder with the files
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

say "Installing what is missing, then building; the first time this takes minutes"
tests/support/setup.sh build
export PATH="$PWD/.venv/bin:$PATH"
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

# train NAME PROGRAM OPTION...: trains on four ranks. Their output goes to NAME.txt, that of torchrun to torchrun.txt.
# torchrun alone brings the ranks together: there is no server to start.
train() {
	torchrun --standalone --nproc-per-node 4 "${@:2}" "${size[@]}" >"$1.txt" 2>torchrun.txt
}

must_train() {
	train "$@" || {
		cat torchrun.txt >&2
		fail "this training failed: ${*:2}"
	}
}

# Prints each step's loss with all its digits. A repeated step with an equal loss counts once.
losses() {
	sort -n "$1/losses.txt" | uniq
}

same_losses() { # same_losses FOLDER FOLDER
	cmp -s <(losses "$1") <(losses "$2") || fail "the losses in $1 and $2 differ"
	echo "every loss the same to the last bit"
}

count() { # count FOLDER PATTERN: of files
	find "$1" -type f -name "$2" | wc -l
}

# The last line of a program's output, or the first and the last.
last() { tail -n 1; }
ends() { sed -n '1p;$p'; }

say "Four ranks train and save every 10 steps in the background (examples/train.py)." \
	"kill -9 ends all of them while they save at step 20."
! train killed "$root/examples/train.py" ours --kill-at-step 20 ||
	fail "the training ended without an error, although it should have been killed"
echo "torchrun saw: $(grep -o 'Signal 9 (SIGKILL)' torchrun.txt | head -n 1 ||
	tail -n 20 torchrun.txt)"
echo "on disk: $(count ours 'step-*.pt') complete checkpoint files, $(count ours '.*') unfinished files"

say "Started again, it resumes from the newest checkpoint that all ranks have"
must_train resumed "$root/examples/train.py" ours
grep -E '^(resuming|step)' resumed.txt

say "The same training without a kill, with three ways to save: are the losses the same, and how" \
	"long do saves stall training? (The first save of a process also allocates memory.)"
compare() { # compare TITLE FOLDER PROGRAM...: the losses with those of the killed training
	must_train "$2" "${@:3}" "$2"
	printf '%-29s %s; %s\n' "$1" "$(same_losses "$2" ours)" "$(last <"$2.txt")"
}
compare 'torch.save, not durable' plain "$root/examples/plain_train.py"
compare 'torch.save with "ioshape run"' run -m ioshape run "$root/examples/plain_train.py"
compare 'ioshape.save_async' whole "$root/examples/train.py"

say "The files of the four ranks have the right checksums (ioshape verify), and torch opens them in a" \
	"process without ioshape (examples/stock_load.py). Of each output, the first and the last line:"
ioshape verify ours/step-000030-*.pt | ends
python "$root/examples/stock_load.py" ours/step-000030-*.pt | ends

say "A trainer in C saves in the background, then resumes (examples/trainer.c); one in C++ (examples/trainer.cpp)"
"$root/build/release/examples/trainer" . | ends
"$root/build/release/examples/trainer" . | ends
"$root/build/release/examples/trainer_cpp" . | last
python "$root/examples/read_back.py" . >read_back.txt || {
	cat read_back.txt >&2
	fail "torch reads something else from the files of these trainers"
}
echo "torch reads the same values from their files (examples/read_back.py)"

say "Done. What to read next"
cat <<'END'
  diff examples/plain_train.py examples/train.py   what changes in a training script
  docs/migration.md                                what else changes, and what does not
  docs/python.md, docs/api.md                      the Python package and the C library
  examples/group_train.py, examples/slurm.sbatch   one checkpoint of all ranks; a batch job
  ioshape bench FOLDER                             compares torch.save and ioshape on your filesystem
END
