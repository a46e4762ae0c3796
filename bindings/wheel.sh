#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the wheel that can be given away.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: bindings/wheel.sh [--help] [FOLDER]

Builds the Python package with pip and leaves in FOLDER (dist) a wheel that carries liburing, ISA-L and
hiredis: for every CPython from 3.10 on, and the Linux systems that its name tells. What it takes is in .venv
after tests/support/setup.sh test.
END
}

case "${1:-}" in
-h | --help)
	usage
	exit 0
	;;
-*)
	usage >&2
	exit 2
	;;
esac
[ $# -le 1 ] || {
	usage >&2
	exit 2
}
folder=${1:-dist}

[ ! -d .venv/bin ] || PATH="$PWD/.venv/bin:$PATH"
work=$(mktemp -d "${TMPDIR:-/tmp}/ioshape-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

quietly() { # quietly COMMAND...: its output is shown only if it fails
	"$@" >"$work/log.txt" 2>&1 || {
		cat "$work/log.txt" >&2
		echo "bindings/wheel.sh: this failed: $*" >&2
		exit 1
	}
}

quietly python -m pip wheel --no-deps --wheel-dir "$work/built" .
# meson-python names the interpreter that it ran in. The extension is compiled for less: bindings/meson.build
# says limited_api 3.10, and tests/install compares its symbols with that.
quietly python -m wheel tags --remove --python-tag cp310 --abi-tag abi3 "$work"/built/*.whl
quietly python -m auditwheel repair --wheel-dir "$work/repaired" "$work"/built/*.whl
mkdir -p "$folder"
name=$(basename "$work"/repaired/*.whl)
mv "$work/repaired/$name" "$folder"
echo "$folder/$name"
