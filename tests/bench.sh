#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Measures the library against what the machine can do; see usage.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: tests/bench.sh [--json FILE] [--size BYTES] [--rounds N] [--dir DIR] [--on WHAT] [--help] NAME...

Installs what is missing (see tests/support/setup.sh), builds for release and measures:

  save   durable saves, against fio, write() + fsync, and a careful replacement of a tiny file
  load   verified loads, against fio with a cold cache and against read() with a warm one
  nil    the work of the processor in saves and loads: an engine completes each request at once and
         moves no byte. Local filesystems report which alignment of memory they accept without a copy;
         others make the figures of zero copies worse (default size: 2G; about 1 minute; 8 GiB of
         memory)
  async  how long a save in the background holds the caller, against memcpy
  torch  the Python package, against torch.save, torch.load, safetensors, torch's distributed
         checkpoint, fio and memcpy
  slots  taking turns, through a redis-server of its own and on this host: what a turn costs, how
         soon the next one runs, how fair it is, how true the bandwidth (about 3 minutes)
  gather ranks that save together: one writer for a node, and for all of them over gloo, against one
         process, memcpy, fio and gloo; loads at once against torch.load (about 8 minutes)
  storm  ranks of several nodes that save at once, against torch.save, on filesystems that play
         spinning disks and flash, as striped as large ones or telling nothing of it, while a
         neighbour reads small files. Their time runs slower than the clock: --rounds beyond 3,
         --size and --dir have no say in it. Takes root (about 13 minutes; 5 with --on)
  realfs saves, and loads by clients with an empty cache, against torch.save and torch.load, on small real
         clusters of CephFS and GlusterFS that run on this host (default size: 512M). Takes root
         (about 5 minutes)
  ablation  each contested mechanism left out alone: what saves, loads and storms take without it, on the disk and
         on models of storage. Takes root (default size: 512M; about 30 minutes)
  tier   saves on the disk of the node that are drained to a filesystem of spinning disks, which is
         simulated: against fio there, saves to it, torch.save and cp; what neighbours of the drains of 32
         nodes feel; loads from either. Takes root
  fs     the engine of the rule against the best of all, on filesystems of several
         kinds and on the disk; requests that cross stripes; how much is in flight, on modelled storages.
         --size has no say in it (about 3 minutes)
  preload  programs that know nothing of ioshape, with the preload library and without: a storm of cp and
         numpy while a neighbour reads small files, a build, small writes, and the table of programs
         that must not notice it. --size and --dir have no say in the storm. Takes root (about 10 minutes)
  examine  what examining tensors costs saves; comparing two files exactly; published bugs and healthy
         trainings (default size: 2G; about 3 minutes)
  gpu    saves from a GPU and loads to one, against pinned copies, fio and, where it is installed,
         fastsafetensors. Without a GPU it says so, and measures nothing
  frameworks  training frameworks under ioshape run and with its plug-ins, against themselves
  simulate  what one Redis has to do for a cluster of 100,000 nodes, simulated (docs/scale.md).
         --size, --rounds and --dir have no say in it (about 4 minutes)
  house  the source itself: lines, circles of calls, public functions, settings, and what the last
         runs of tests/run.sh took
  english  how plainly comments, docstrings and pages are written; tests/tools/english.py PATH lists
         the places
  launch packages, built and used in Debian roots of their own. Takes root, /dev/fuse and Debian's archive.
         None of --size, --rounds and --dir has a say in it

  --json FILE    write the figures and all samples to FILE
  --size BYTES   of tensors in the large runs, such as 512M (default: 4G; 2G for torch, frameworks and,
                 of all ranks, for gather; each takes 12 GiB of memory)
  --rounds N     how often everything is measured in turn (default: 7)
  --dir DIR      measure the filesystem of this directory (default: build/bench); a folder is made
                 in it and removed at the end
  --on WHAT      for storm and preload: on a small real cluster on this host, with four storage targets
                 of 60 MB/s and 8 ms for each request, NFS with one: cephfs, glusterfs, moosefs, or
                 what a kernel's client mounts: ceph, nfs3, nfs4.1 or nfs4.2. For ablation: one of its
                 scenes alone, such as load_cold or storm_hdd1

Settings of the library (IOSHAPE_ENGINE and so on) are taken from the environment. On a quiet
machine the large runs are done in about 5 minutes. The exit status tells whether they could be done,
not whether the targets were met: the table does.
END
}

fail() {
	echo "bench: $*" >&2
	exit 1
}

known() { # whether the usage lists a benchmark of this name
	[[ $'\n'$(usage) == *$'\n'"  $1 "* ]]
}

from_caller() { # a path as the caller meant it, from here
	(cd "$called_from" && realpath -m -- "$1")
}

main() {
	directory=build/bench
	arguments=()
	names=()
	while [ $# -gt 0 ]; do
		case "$1" in
		-h | --help)
			usage
			exit 0
			;;
		--dir | --json | --size | --rounds | --on)
			[ $# -gt 1 ] || fail "$1 needs a value"
			value=$2
			case "$1" in
			--dir) directory=$(from_caller "$value") ;;
			--json) arguments+=(--json "$(from_caller "$value")") ;;
			*) arguments+=("$1" "$value") ;;
			esac
			shift 2
			;;
		*)
			names+=("$1")
			arguments+=("$1")
			shift
			;;
		esac
	done

	[ ${#names[@]} -gt 0 ] || fail "name at least one benchmark; --help lists them"
	for name in "${names[@]}"; do
		known "$name" || fail "there is no benchmark $name; --help lists them"
	done

	# The same for every benchmark, so that each works by itself in a fresh clone; the driver installs what a
	# benchmark declares beyond it.
	tests/support/setup.sh bench || exit 1
	tests/support/package.sh || exit 1 # the package of this tree, into .venv
	export PATH="$PWD/.venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1 PYTHONPATH
	PYTHONPATH=$(python tests/support/tree.py)
	build=build/release
	tests/support/build.sh $build --buildtype=release -Dbench=true || exit 1
	export IOSHAPE_TEST_BUILD="$PWD/$build"

	mkdir -p "$directory"
	folder=$(mktemp -d "$(realpath "$directory")/ioshape-bench-XXXXXX")
	driver=
	# shellcheck disable=SC2317 # the trap calls it
	clean_up() {
		[ -z "$driver" ] || kill "$driver" 2>/dev/null || true
		wait
		rm -rf "$folder"
	}
	trap clean_up EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM HUP

	# In the background, so that a signal to this script is heeded at once.
	python -m tests.bench --worker "$build/tests/bench/bench-worker" --folder "$folder" "${arguments[@]}" &
	driver=$!
	status=0
	wait "$driver" || status=$?
	driver=
	exit "$status"
}

# As a whole, so that the script may be edited while it runs.
main "$@"
