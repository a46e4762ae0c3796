#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the wheel that can be given away.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: bindings/wheel.sh [--root ROOT] [--help] [FOLDER]

Builds the Python package and leaves in FOLDER (dist) a wheel that carries liburing, ISA-L and hiredis:
for every CPython from 3.10 on, on every Linux with glibc 2.28 or newer. It needs python3 with venv and the
headers of python3, pkg-config, and the libraries (Debian: python3-venv python3-dev pkg-config liburing-dev
libisal-dev libhiredis-dev). The rest comes through pip, into an environment that goes again.

--root ROOT builds for another kind of machine: ROOT has what it needs of that, and nothing of it is run. It
takes that machine's binutils, too (Debian: binutils-aarch64-linux-gnu).

    mmdebstrap --variant=extract --architectures=arm64 bookworm ROOT \
        --include=libc6-dev,libhiredis-dev,libisal-dev,libpython3-dev,liburing-dev

The same commit gives the same bytes, with the same versions of the libraries and of bindings/wheel.txt.
END
}

root=
folder=dist
while [ $# -gt 0 ]; do
	case "$1" in
	-h | --help)
		usage
		exit 0
		;;
	--root)
		[ $# -gt 1 ] || {
			usage >&2
			exit 2
		}
		root=$(realpath -e "$2")
		shift
		;;
	-*)
		usage >&2
		exit 2
		;;
	*)
		folder=$1
		;;
	esac
	shift
done

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
# What the build asks for, too: pip would get that for the machine that the wheel is for.
python - >"$work/requires.txt" <<'END'
import json, pathlib, re
text = pathlib.Path("pyproject.toml").read_text(encoding="utf-8")
print(*json.loads(re.search(r"^requires = (\[.*\])$", text, re.MULTILINE)[1]), sep="\n")
END
quietly python -m pip install --disable-pip-version-check --requirement bindings/wheel.txt \
	--requirement "$work/requires.txt"

# A compiler for the glibc that torch's wheels ask for, whatever this machine has. It looks for no headers of
# this machine, whose C library is another one: it is shown those that are needed.
glibc=2.28
machine=$(uname -m)
if [ -n "$root" ]; then
	libc=$(echo "$root"/usr/lib/*-linux-gnu/libc.so)
	[ -e "$libc" ] || {
		echo "cannot build for the machine of \"$root\": it has no usr/lib/MACHINE-linux-gnu/libc.so; see --help" >&2
		exit 1
	}
	machine=${libc#"$root"/usr/lib/} machine=${machine%%-*}
	export PKG_CONFIG_SYSTEM_INCLUDE_PATH="$root/usr/include" # has another glibc
	export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_LIBDIR="$root/usr/lib/$machine-linux-gnu/pkgconfig"
fi
include=$root$(PKG_CONFIG_SYSROOT_DIR='' pkg-config --variable=includedir liburing)
mkdir -p "$work/include/$machine-linux-gnu"
for header in liburing liburing.h isa-l isa-l.h hiredis; do
	ln -s "$include/$header" "$work/include/"
done
for header in "$root/usr/include/$machine-linux-gnu"/python3*; do # Debian has a part of Python's there
	[ ! -d "$header" ] || ln -s "$header" "$work/include/$machine-linux-gnu/"
done
zig=$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
cat >"$work/cc" <<END
#!/bin/sh
exec "$zig" cc -target $machine-linux-gnu.$glibc -isystem "$work/include" "\$@"
END
chmod +x "$work/cc"
export CC="$work/cc" LDFLAGS=-s ZIG_GLOBAL_CACHE_DIR="$work/zig" ZIG_LOCAL_CACHE_DIR="$work/zig"
# Neither where nor when it was built is in the wheel, nor who may read the files that it was built from.
export CFLAGS="-ffile-prefix-map=$PWD=. -ffile-prefix-map=$work=."
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y meson.build)}"
export SOURCE_DATE_EPOCH
umask 022

options=()
if [ -n "$root" ]; then
	LDFLAGS+=" -L$root/usr/lib/$machine-linux-gnu"
	export _PYTHON_HOST_PLATFORM=linux-$machine # what the wheel is called by
	export AUDITWHEEL_LD_LIBRARY_PATH=$root/usr/lib/$machine-linux-gnu
	cat >"$work/cross.txt" <<END
[binaries]
c = '$work/cc'
objcopy = '$machine-linux-gnu-objcopy'
pkg-config = 'pkg-config'
[properties]
sys_root = '$root'
pkg_config_libdir = '$PKG_CONFIG_LIBDIR'
[host_machine]
system = 'linux'
cpu_family = '$machine'
cpu = '$machine'
endian = 'little'
END
	options=(--config-settings=setup-args=--cross-file="$work/cross.txt")
fi
quietly python -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work/built" "${options[@]}" .
# meson-python names the interpreter that it ran in. The extension is compiled for less: bindings/meson.build
# says limited_api 3.10, and tests/install compares its symbols with that.
quietly python -m wheel tags --remove --python-tag cp310 --abi-tag abi3 "$work"/built/*.whl
# auditwheel knows other machines' wheels, but takes no name of a platform that is not this machine's.
quietly python -c "import platform; platform.machine = lambda: '$machine'
import auditwheel.main; raise SystemExit(auditwheel.main.main())" repair \
	--plat "manylinux_${glibc/./_}_$machine" --wheel-dir "$work/repaired" "$work"/built/*.whl
mkdir -p "$folder"
name=$(basename "$work"/repaired/*.whl)
mv "$work/repaired/$name" "$folder"
echo "$folder/$name"
