#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Compares the binary interface (ABI) of the library with that of an earlier commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
	cat <<'TEXT'
Usage: bindings/packaging/abi.sh [--help] [COMMIT]

Builds libioshape of COMMIT (the last tag) and of this tree, and prints what abidiff finds in what programs see.
Needs abidiff (Debian: abigail-tools), and git's history.

Exit code: 0 if programs of then run with the library of now, or if its soname has moved; 1 if they do not and
it has not: raise soname_version in meson.build.
TEXT
}

case "${1:-}" in
-h | --help)
	usage
	exit 0
	;;
esac
base=${1:-$(git describe --tags --abbrev=0 2>/dev/null || true)}
[ -n "$base" ] || {
	echo "cannot tell what to compare with: there is no tag yet; name a commit" >&2
	exit 2
}
command -v abidiff >/dev/null || {
	echo "cannot compare binary interfaces: abidiff is not installed; apt-get install abigail-tools" >&2
	exit 2
}
work=$(mktemp -d "${TMPDIR:-/tmp}/ioshape-abi.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/then"
git archive "$base" | tar -x -C "$work/then"

build() { # build SOURCES NAME
	{
		meson setup "$work/$2.build" "$1" --prefix /usr --libdir lib --buildtype=debugoptimized -Db_lto=false &&
			meson compile -C "$work/$2.build" &&
			meson install -C "$work/$2.build" --destdir "$work/$2.tree"
	} >"$work/log" 2>&1 || {
		tail -n 40 "$work/log" >&2
		echo "cannot compare binary interfaces: the library of $1 cannot be built; see above" >&2
		exit 2
	}
}

soname() {
	readelf --dynamic --wide "$1" | sed -n 's/.*soname: \[\(.*\)\].*/\1/p'
}

build "$work/then" old
build "$PWD" new
then=$work/old.tree/usr now=$work/new.tree/usr
# Programs cannot use the symbols that libioshape.so exports for libioshape-tier of the same build.
printf '[suppress_function]\n\tsymbol_version_regexp = ^IOSHAPE_TIER_\n' >"$work/internal"
status=0
abidiff --suppressions "$work/internal" --headers-dir1 "$then/include" --headers-dir2 "$now/include" --drop-private-types --leaf-changes-only \
	"$then/lib/libioshape.so" "$now/lib/libioshape.so" || status=$?
# Bits of abidiff's exit status: 1 and 2 are errors, 4 is a change, 8 is a change that breaks programs.
[ $((status & 3)) = 0 ] || exit 2
moved="$(soname "$then/lib/libioshape.so") -> $(soname "$now/lib/libioshape.so")"
if [ $((status & 8)) != 0 ] && [ "${moved% -> *}" = "${moved#* -> }" ]; then
	echo "since $base programs break, and the soname is still ${moved#* -> }: raise soname_version in meson.build" >&2
	exit 1
fi
echo "since $base: soname $moved; $([ $((status & 8)) = 0 ] && echo "programs of then run" || echo "programs of then need the old one")"
