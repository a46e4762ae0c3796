#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# exports.sh MAP VERSION NM TO.map TO.list CORE.a [TIER.a]: what libioshape.so shows.
#
# TO.map is MAP, and the functions of the core that libioshape-tier calls. Their version has the library's in its
# name, so that no program starts with two libraries that were built apart. TO.list has these functions, one a line.
set -eu
LC_ALL=C
export LC_ALL

map=$1
version=$2
nm=$3
to_map=$4
to_list=$5
core=$6
shift 6

symbols() {
	"$nm" "$@" | awk 'NF > 1 { print $NF }' | sort -u
}

: >"$to_list"
if [ $# -gt 0 ]; then
	symbols --extern-only --defined-only "$core" >"$to_list.core"
	sed -n 's/^[[:space:]]*\([a-z0-9_]*\);$/\1/p' "$map" | sort -u >"$to_list.shown"
	symbols --undefined-only "$1" | comm -12 "$to_list.core" - | comm -23 - "$to_list.shown" >"$to_list"
	rm "$to_list.core" "$to_list.shown"
fi
cp "$map" "$to_map"
if [ -s "$to_list" ]; then
	{
		printf 'IOSHAPE_TIER_%s {\n\tglobal:\n' "$version"
		sed 's/.*/\t\t&;/' "$to_list"
		printf '};\n'
	} >>"$to_map"
fi
