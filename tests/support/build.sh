#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# build.sh FOLDER [OPTION...]: configures FOLDER with these options of meson where that has not been done,
# and builds what changed. The output is shown only where something fails. Without options FOLDER is one
# that several scripts use: each of these always has the same options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=$1
shift
if [ $# = 0 ]; then
	export CC=clang CXX=clang++
	case "$folder" in
	build/gcc)
		export CC=gcc CXX=g++
		set -- -Dexamples=true -Dmpi=enabled
		;;
	# It serves the sanitizers' tests and the fuzz targets, which clang alone can make.
	build/asan) set -- -Db_sanitize=address,undefined -Db_lundef=false -Dfuzz=true -Dexamples=true ;;
	build/tsan) set -- -Db_sanitize=thread -Db_lundef=false ;;
	# Unoptimised: the branches of the source, not those that a compiler makes of them. Nor does it know
	# then what fits into what.
	build/coverage)
		export CC=gcc CXX=g++
		set -- -Db_coverage=true -Doptimization=0 -Dfuzz=true -Dexamples=true -Dmpi=enabled \
			-Dc_args=-Wno-format-truncation
		;;
	*)
		echo "build.sh: which options has $folder?" >&2
		exit 2
		;;
	esac
	set -- "$@" -Dtests=true -Dwerror=true
fi

# A copied tree must not go on building the original, nor a folder keep the options of the past.
wanted="$PWD ${CC:-} ${CXX:-} $*"
if [ "$(cat "$folder/configured" 2>/dev/null)" != "$wanted" ]; then
	rm -rf "$folder"
	mkdir -p "$folder"
	meson setup "$folder" . "$@" >"$folder/setup.txt" 2>&1 || {
		cat "$folder/setup.txt" >&2
		exit 1
	}
	echo "$wanted" >"$folder/configured"
fi
ninja --quiet -C "$folder"
