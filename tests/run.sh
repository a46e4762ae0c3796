#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests. The last line is: N passed, N failed, N skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# In the order in which they run. Each is a function below.
stages=(style gcc house fault asan tsan python gpu)
quick_stages=(style gcc house python)
long_stages=(install valgrind campaign realfs garbled coverage)
# The stages of a lane run one after the other, beside all other stages: they wait more than they compute.
lanes=("python gpu" "fault")
# What they test, beside what has stages of its own.
python_folders=(tests/python tests/integrations tests/system)

usage() {
	cat <<'END'
Usage: tests/run.sh [--quick | --long] [--help] [STAGE...]

Installs missing packages (see tests/support/setup.sh), then runs all stages, or the named ones. Meanwhile it builds
what later stages need:

  style      format and checks of C, C++, Python and shell
  gcc        build with gcc, warnings are errors; unit and API tests
  house      layers, exported symbols, separate headers, messages, versions
  fault      killed processes, failing storage, full filesystems; some acts of the campaign
  asan       build of all with clang, warnings are errors; unit and API tests under AddressSanitizer and
             UndefinedBehaviorSanitizer; each allocation of some acts of the campaign fails
  tsan       unit and API tests under ThreadSanitizer; with --long also tests with little concurrency
  python     the Python package; files exchanged with torch
  gpu        tests that need a GPU; if torch finds none, they count as one skipped test

These stages run only with --long or by name:

  install    examples built against an installed prefix: pkg-config, CMake, C++; the package from its
             source archive and as a wheel, on a system without the libraries of the build
  valgrind   unit tests under valgrind, except the slowest; with --long all, and the API tests
  campaign   a few fixed trials of each kind of tests/campaign.sh; with --long trials for minutes
  realfs     clusters of CephFS, GlusterFS, MooseFS and NFS on this host, each with two clients, also clients of
             the Linux kernel; killed servers
  garbled    the Python tests with every message of the library garbled
  coverage   branch coverage of C and Python; writes it to docs/testing.md

The stages python and gpu run in parallel to the others, and fault in parallel to both; their output comes last.
build/results/seconds.tsv has the elapsed seconds and the CPU seconds of each stage. A complete run without --quick and
--long fails if a stage's CPU time has grown by half (tests/tools/stage_times.py).

  --quick    for daily work: the stages style, gcc, house and python, without slow tests (suite and mark "slow")
             and without those of several programs together (tests/system)
  --long     also the stages above and the longest tests (suite "long" in meson, mark "long" in pytest)

The reports are in build/results. The exit status is 0 if no test failed.
END
}

length=whole # or quick, or long
chosen=()
for argument in "$@"; do
	case "$argument" in
	--quick) length=quick ;;
	--long) length=long ;;
	-h | --help)
		usage
		exit 0
		;;
	*)
		if [[ " ${stages[*]} ${long_stages[*]} " != *" $argument "* ]]; then
			echo "tests/run.sh: there is no stage \"$argument\"; see --help" >&2
			exit 2
		fi
		chosen+=("$argument")
		;;
	esac
done
all_stages=no
if [ ${#chosen[@]} = 0 ]; then
	all_stages=yes
	case "$length" in
	quick) chosen=("${quick_stages[@]}") ;;
	whole) chosen=("${stages[@]}") ;;
	long) chosen=("${stages[@]}" "${long_stages[@]}") ;;
	esac
fi

tests/support/setup.sh "$([ $length = long ] && echo long || echo test)" || exit 1
case " ${chosen[*]} " in
*" realfs "*) tests/support/setup.sh realfs || exit 1 ;;
esac
. tests/support/environment.sh

results=build/results
rm -rf "$results"
mkdir -p "$results"

say() {
	echo
	echo "== $*"
}

# note KIND STATUS REPORT TITLE: for tests/tools/tally.py, which says what the fields are
note() {
	printf '%s\t%s\t%s\t%s\n' "$@" >>"$results/index.tsv"
}

# check TITLE COMMAND...: a command that is one test by itself; its output is shown if it fails
check() {
	local title=$1 log status=0
	shift
	log=$(mktemp "$results/check-XXXXXX.log")
	"$@" >"$log" 2>&1 || status=$?
	note check "$status" "" "$title"
	case $status in
	0) echo "ok: $title" ;;
	77)
		echo "skipped: $title"
		tail -n 1 "$log"
		;;
	*)
		echo "FAILED: $title"
		tail -n 60 "$log"
		;;
	esac
	return "$status"
}

# What the stages need that is built, in the order in which they need it: folders of tests/support/build.sh,
# "package" and "later".
declare -A needs=(
	[gcc]="build/gcc"
	[house]="build/gcc package" # benchmarks import it
	[install]="package" # examples/quickstart.sh wants it
	[asan]="build/asan"
	[tsan]="build/tsan"
	[valgrind]="build/gcc"
	[python]="build/gcc package"
	[gpu]="package"
	[fault]="build/gcc"
	[campaign]="build/gcc build/asan package"
	[realfs]="build/gcc package"
	[garbled]="build/gcc"
	[coverage]="build/coverage package later"
)
[ $length != long ] || needs[python]+=" later" # two versions meet
declare -A title=(
	[package]="the Python package is built and installed in .venv"
	[later]="the later version is built"
)

# Builds all that is needed, one after the other: beside the tests of earlier stages, many of which wait more
# than they compute. Leaves for each what it said, and then its status.
build_ahead() {
	local name log
	for name in $(printf '%s\n' "$@" | awk '!seen[$0]++'); do
		log=$results/built-${name##*/}
		case "$name" in
		build/*) tests/support/build.sh "$name" ;;
		*) "tests/support/$name.sh" ;;
		esac >"$log.log" 2>&1
		echo $? >"$log.new"
		mv "$log.new" "$log.status"
	done
}

# outcome NAME: waits for that build, says what it said, and ends as it did
outcome() {
	local log=$results/built-${1##*/}
	until [ -e "$log.status" ]; do
		kill -0 "$builder" 2>/dev/null || [ -e "$log.status" ] || return 1
		sleep 0.2
	done
	cat "$log.log"
	return "$(cat "$log.status")"
}

declare -A built # by name: how its build went in this run

# build NAME...: waits until they are built
build() {
	local name
	for name in "$@"; do
		if [ -z "${built[$name]:-}" ]; then
			built[$name]=failed
			# The stages beside these ask, too: it counts as one test all the same.
			if mkdir "$results/counted-${name##*/}" 2>/dev/null; then
				check "${title[$name]:-build in $name}" outcome "$name" && built[$name]=well
			else
				outcome "$name" >/dev/null && built[$name]=well
			fi
		fi
		[ "${built[$name]}" = well ] || {
			echo "not run: $name is not built"
			return 1
		}
	done
}

# Sanitizers of this age lose their way where the kernel randomises addresses by more bits than they know.
without_randomised_addresses() {
	if setarch -R true 2>/dev/null; then
		setarch -R "$@"
	else
		"$@"
	fi
}

# meson_tests STAGE FOLDER OPTION...: the C tests in FOLDER that the options select
meson_tests() {
	local stage=$1 folder=$2 status=0 selection=() threads
	shift 2
	case "$length" in
	quick) selection=(--no-suite long --no-suite slow) ;;
	whole) selection=(--no-suite long) ;;
	esac
	rm -f "$folder"/meson-logs/"$stage"*
	# Many tests wait more than they compute; under a checker they compute more.
	threads=$(($(nproc) * ${threads_per_core:-4}))
	MESON_TESTTHREADS=$threads without_randomised_addresses meson test -C "$folder" \
		--no-rebuild --print-errorlogs --logbase "$stage" "${selection[@]}" "$@" || status=$?
	# meson adds the name of a wrapper to that of its log.
	cp "$folder"/meson-logs/"$stage"*.json "$results/$stage.json" 2>/dev/null
	note meson "$status" "$stage.json" "$stage: C tests in $folder"
}

# The same with time for checkers that make programs many times slower.
slow_meson_tests() {
	threads_per_core=3 CK_TIMEOUT_MULTIPLIER=10 meson_tests "$@" --timeout-multiplier 10
}

# python_tests STAGE PATH OPTION...: these Python tests; they find programs and libraries in build/gcc, or
# in the folder $programs
python_tests() {
	local stage=$1 status=0 selection=(-m "not gpu and not realfs")
	shift
	case "$length" in
	quick) selection=(-m "not gpu and not realfs and not long and not slow") ;;
	whole) selection=(-m "not gpu and not realfs and not long") ;;
	esac
	IOSHAPE_TEST_BUILD="$PWD/${programs:-build/gcc}" python -m pytest -q --tb=short --junitxml "$results/$stage.xml" \
		"${selection[@]}" "$@" || status=$?
	note pytest "$status" "$stage.xml" "$stage: Python tests"
}

stage_style() {
	local c_files=() shell_files=()
	mapfile -t c_files < <(find include libioshape examples tests -name '*.[ch]' -o -name '*.[ch]pp')
	mapfile -t shell_files < <(
		find tests examples bindings docs libioshape .ci -name '*.sh' -o -name '*.sbatch' -o -path '.ci/*' -type f
	)
	check "C and C++ are formatted" clang-format --dry-run -Werror "${c_files[@]}"
	check "Python is formatted" ruff format --check .
	check "ruff finds nothing" ruff check .
	check "mypy finds nothing" mypy
	check "shellcheck finds nothing" shellcheck "${shell_files[@]}"
	check "codespell finds nothing" codespell
}

stage_gcc() {
	build build/gcc && meson_tests gcc build/gcc --no-suite fault
}

stage_house() {
	build build/gcc package && python_tests house tests/house
}

stage_install() {
	# One process for what is installed, and one for the wheel.
	python_tests install tests/install -n 2 --dist loadfile
}

stage_asan() {
	local one_in=25 # an act takes 10 CPU seconds
	[ $length != long ] || one_in=1
	build build/asan || return
	local -x ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1
	local -x UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
	slow_meson_tests asan build/asan --no-suite fault
	check "each allocation of some acts fails" harmed_acts build/asan $one_in memory
}

stage_tsan() {
	local options_of_tests=()
	[ "$length" = long ] || options_of_tests=(--no-suite in_order)
	build build/tsan &&
		TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1:die_after_fork=0 \
			slow_meson_tests tsan build/tsan --no-suite fault --no-suite alone \
			"${options_of_tests[@]}"
}

stage_valgrind() {
	local options=(
		--quiet
		--error-exitcode=99
		--leak-check=full
		--errors-for-leak-kinds=definite
		--suppressions="'$PWD/tests/c/support/valgrind.supp'"
	) options_of_tests=()
	[ "$length" = long ] || options_of_tests=(--suite unit --no-suite slow --no-suite inputs)
	build build/gcc &&
		slow_meson_tests valgrind build/gcc "${options_of_tests[@]}" --no-suite fault \
			--wrap "valgrind ${options[*]}"
}

stage_python() {
	local processes=$(($(nproc) * 2)) folders=("${python_folders[@]}") names
	# Slow tests wait more than they compute; quick ones do not, and each process takes 0.8 GB and 10 CPU seconds
	# before its first test, for torch. Who has nothing left to do takes from the others.
	[ $length != quick ] || { folders=(tests/python tests/integrations) processes=$(($(nproc) * 3 / 2)); }
	read -ra names <<<"${needs[python]}"
	build "${names[@]}" &&
		python_tests python "${folders[@]}" -n $((processes < 12 ? processes : 12)) --dist worksteal
}

# The torch of .venv must be one that is built for the GPU.
stage_gpu() {
	build package || return
	if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
		note check 77 "" "no GPU"
		echo "skipped: no GPU"
		return
	fi
	python_tests gpu tests/python/device/test_{device,direct}.py tests/python/save/test_lazy.py tests/python/group/test_shared.py -m gpu
}

# One process: tests of one kind share a cluster.
stage_realfs() {
	build build/gcc package && python_tests realfs tests/system/test_{clusters,realfs,realfs_harm,kernel_clients}.py -m realfs
}

# The package with every sentence of the library garbled: a test that fails here shows code that reads sentences.
stage_garbled() {
	local site=$PWD/build/garbled/site
	mkdir -p build/garbled/build
	build build/gcc && check "the garbled package is built" \
		pip install -q --disable-pip-version-check --no-build-isolation --no-deps --upgrade --target "$site" \
		--config-settings=build-dir=build/garbled/build --config-settings=setup-args=-Dgarble=true . &&
		PYTHONPATH=$site python_tests garbled "${python_folders[@]}" -n "$(nproc)" --dist worksteal -m "not gpu and not realfs and not wording and not long"
	cp "$results/garbled.xml" build/ # for "tests/bench.sh house"
}

# harmed_acts FOLDER ONE_IN MODE...: one in so many of the campaign's acts, which the commit chooses
harmed_acts() {
	local folder=$1 one_in=$2 program=$PWD/$1/tests/campaign/harm seed mode act said number=0
	shift 2
	seed=$((16#$(git rev-parse --short=4 HEAD)))
	for mode in "$@"; do
		while read -r act; do
			((number++ % one_in == seed % one_in)) || continue
			rm -rf "$folder/act"
			mkdir "$folder/act"
			said=$(cd "$folder/act" && "$program" "$mode" $seed 4 "$act" </dev/null) || return
			! grep -v "^harmed " <<<"$said" || return
		done < <("$program" list "$mode")
	done
}

stage_fault() {
	build build/gcc || return
	# Other stages compute beside these.
	threads_per_core=2 meson_tests fault build/gcc --suite fault
	check "some acts of the campaign are harmed" harmed_acts build/gcc 10 kills faults
}

# The ledger gets nothing.
stage_campaign() {
	local kind how=(--short) at_once=$(($(nproc) * 3 / 2)) # they wait much
	[ $length != long ] || how=(--seed 1 --seconds 300) at_once=1
	build build/gcc build/asan package || return
	local -x PYTHONPATH
	PYTHONPATH=$(python tests/support/tree.py)
	check "campaign: its kinds" python -m tests.campaign --kinds || return
	for kind in $(python -m tests.campaign --kinds); do
		[ "$(jobs -rp | wc -l)" -lt "$at_once" ] || wait -n
		check "campaign: $kind" python -m tests.campaign "$kind" "${how[@]}" &
	done
	wait
}

# failing_acts FOLDER: those of the campaign, each in a folder of its own
failing_acts() {
	local program=$PWD/$1/tests/campaign/harm act
	"$program" list faults | while read -r act; do
		rm -rf "$1/act"
		mkdir "$1/act"
		(cd "$1/act" && "$program" faults 1 400 "$act") || return
	done
}

# All that calls the library: C tests, the inputs that fuzzing found, the campaign's acts, Python tests.
stage_coverage() {
	local programs=build/coverage name
	local site=$PWD/$programs/site-packages package=$PWD/$programs/package
	build $programs package later || return
	mkdir -p "$package"
	check "the package that counts is built" \
		pip install -q --disable-pip-version-check --no-build-isolation --no-deps --upgrade --target "$site" \
		--config-settings=build-dir="$package" --config-settings=setup-args=-Db_coverage=true \
		--config-settings=setup-args=-Doptimization=0 . || return
	find $programs -name '*.gcda' -delete
	slow_meson_tests coverage $programs
	mkdir -p $programs/kept
	tar -C $programs/kept -xf tests/c/fuzz/kept.tar.xz
	for name in tests/c/fuzz/corpus/*; do
		name=${name##*/}
		check "inputs of $name" find "tests/c/fuzz/corpus/$name" "$programs/kept/$name" -type f \
			-exec "$programs/tests/c/fuzz/fuzz-$name" {} +
	done
	check "acts whose calls fail" failing_acts $programs
	COVERAGE_FILE=$PWD/$programs/python PYTHONPATH=$site python_tests coverage-python "${python_folders[@]}" -n "$(nproc)" --dist worksteal \
		--cov=ioshape --cov-branch --cov-report="json:$results/coverage-python.json"
	check "branch coverage is written to docs/testing.md" \
		python tests/tools/branch_coverage.py $programs "$results/coverage-python.json"
}

# stages_of LANE: those of the chosen stages that are in this lane
stages_of() {
	local stage found=()
	for stage in "${chosen[@]}"; do
		[[ " $1 " != *" $stage "* ]] || found+=("$stage")
	done
	echo "${found[*]}"
}

beside=() # a line of stages for each lane
for lane in "${lanes[@]}"; do
	of_lane=$(stages_of "$lane")
	[ -z "$of_lane" ] || beside+=("$of_lane")
done
in_front=()
for stage in "${chosen[@]}"; do
	[[ " ${lanes[*]} " == *" $stage "* ]] || in_front+=("$stage")
done
if [ ${#in_front[@]} = 0 ]; then
	read -ra in_front <<<"${beside[0]}"
	beside=("${beside[@]:1}")
fi

# First what the lanes wait for: they take longest.
read -ra stages_ahead <<<"${beside[*]} ${in_front[*]}"
ahead=()
for stage in "${stages_ahead[@]}"; do
	read -ra names <<<"${needs[$stage]:-}"
	ahead+=("${names[@]}")
done

set -m # in a process group of its own, which ends with us
build_ahead "${ahead[@]}" </dev/null &
builder=$!
set +m
started=("-$builder")
trap 'kill -- "${started[@]}" 2>/dev/null' EXIT

# count_cpu_s: sets cpu_s to the CPU seconds of what this shell has started and waited for
count_cpu_s() {
	local file=$results/times-$BASHPID # in a pipe or $(…), "times" would tell of another shell
	times >"$file"
	cpu_s=$(awk -F '[ms ]+' 'NR == 2 { printf "%d", $1 * 60 + $2 + $3 * 60 + $4 }' "$file")
}

run_stages() {
	local stage began before cpu_s
	for stage in "$@"; do
		say "$stage"
		began=$SECONDS
		count_cpu_s
		before=$cpu_s
		"stage_$stage"
		count_cpu_s
		echo "== $stage took $((SECONDS - began)) s, and $((cpu_s - before)) s of processors"
		printf '%s\t%s\t%s\n' "$stage" "$((SECONDS - began))" "$((cpu_s - before))" >>"$results/seconds.tsv"
	done
}

runners=()
set -m
for number in "${!beside[@]}"; do
	read -ra of_lane <<<"${beside[$number]}"
	run_stages "${of_lane[@]}" </dev/null >"$results/lane-$number.log" 2>&1 &
	runners+=("$!")
	started+=("-$!")
done
set +m
# Without our jobs: a stage may wait for its own. The stages beside take longest and wait much, so these only get what
# they leave of the processors. In a quick run all take equally long.
(
	[ ${#beside[@]} = 0 ] || [ $length = quick ] || renice -n 10 $BASHPID >/dev/null
	run_stages "${in_front[@]}"
)
for number in "${!beside[@]}"; do
	wait "${runners[$number]}"
	cat "$results/lane-$number.log"
done

say "all"
[ $all_stages$length != yeswhole ] || check "no stage's CPU time has grown by half" \
	python tests/tools/stage_times.py "$results/seconds.tsv"
if [ $all_stages = yes ] && [ $length != long ]; then
	# For "tests/bench.sh house".
	name=$([ $length = quick ] && echo quick || echo run)
	echo "$SECONDS $(git describe --always --dirty 2>/dev/null || echo unknown)" >"build/seconds-$name"
fi
python tests/tools/tally.py "$results"
