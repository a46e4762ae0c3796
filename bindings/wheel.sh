#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the wheel that can be given away.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: bindings/wheel.sh [--help] [FOLDER]

Builds the Python package and leaves in FOLDER (dist) a wheel that carries liburing, ISA-L and hiredis:
for every CPython from 3.10 on, on every Linux with glibc 2.28 or newer. It needs python3 with venv and the
headers of python3, pkg-config, and the libraries (Debian: python3-venv python3-dev pkg-config liburing-dev
libisal-dev libhiredis-dev). The rest comes through pip, into an environment that goes again.
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

work=$(mktemp -d "${TMPDIR:-/tmp}/ioshape-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

quietly() { # quietly COMMAND...: its output is shown only if it fails
	"$@" >"$work/log.txt" 2>&1 || {
		cat "$work/log.txt" >&2
		echo "bindings/wheel.sh: this failed: $*" >&2
		exit 1
	}
}

quietly python3 -m venv "$work/tools"
PATH="$work/tools/bin:$PATH"
quietly python -m pip install --disable-pip-version-check --requirement bindings/wheel.txt

# A compiler for the glibc that torch's wheels ask for, whatever this machine has. It looks for no headers of
# this machine, whose C library is another one: it is shown those that are needed.
glibc=2.28
machine=$(uname -m)
include=$(pkg-config --variable=includedir liburing)
mkdir -p "$work/include/$machine-linux-gnu"
for header in liburing liburing.h isa-l isa-l.h hiredis; do
	ln -s "$include/$header" "$work/include/"
done
for header in "/usr/include/$machine-linux-gnu"/python3*; do # Debian has a part of Python's there
	[ ! -d "$header" ] || ln -s "$header" "$work/include/$machine-linux-gnu/"
done
zig=$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
cat >"$work/cc" <<END
#!/bin/sh
exec "$zig" cc -target $machine-linux-gnu.$glibc -isystem "$work/include" "\$@"
END
chmod +x "$work/cc"
export CC="$work/cc" LDFLAGS=-s ZIG_GLOBAL_CACHE_DIR="$work/zig" ZIG_LOCAL_CACHE_DIR="$work/zig"

quietly python -m pip wheel --no-deps --wheel-dir "$work/built" .
# meson-python names the interpreter that it ran in. The extension is compiled for less: bindings/meson.build
# says limited_api 3.10, and tests/install compares its symbols with that.
quietly python -m wheel tags --remove --python-tag cp310 --abi-tag abi3 "$work"/built/*.whl
quietly python -m auditwheel repair --plat "manylinux_${glibc/./_}_$machine" \
	--wheel-dir "$work/repaired" "$work"/built/*.whl
mkdir -p "$folder"
name=$(basename "$work"/repaired/*.whl)
mv "$work/repaired/$name" "$folder"
echo "$folder/$name"
