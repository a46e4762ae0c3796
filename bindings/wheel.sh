#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel that runs on other machines: it contains the libraries that it needs.
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
# The build requirements are installed here, because pip would choose those of the target machine.
python - >"$work/requires.txt" <<'END'
import json, pathlib, re
text = pathlib.Path("pyproject.toml").read_text(encoding="utf-8")
print(*json.loads(re.search(r"^requires = (\[.*\])$", text, re.MULTILINE)[1]), sep="\n")
END
quietly python -m pip install --disable-pip-version-check --requirement bindings/wheel.txt \
	--requirement "$work/requires.txt"

# zig compiles for the glibc that torch's wheels need, whichever glibc this machine has. It must not see this
# machine's C library headers, so the folder include has links to only the headers that are needed.
glibc=2.28
machine=$(uname -m)
if [ -n "$root" ]; then
	libc=$(echo "$root"/usr/lib/*-linux-gnu/libc.so)
	[ -e "$libc" ] || {
		echo "cannot build for the machine of \"$root\": it has no usr/lib/MACHINE-linux-gnu/libc.so; see --help" >&2
		exit 1
	}
	machine=${libc#"$root"/usr/lib/} machine=${machine%%-*}
	export PKG_CONFIG_SYSTEM_INCLUDE_PATH="$root/usr/include" # not passed to the compiler: other glibc
	export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_LIBDIR="$root/usr/lib/$machine-linux-gnu/pkgconfig"
fi
include=$root$(PKG_CONFIG_SYSROOT_DIR='' pkg-config --variable=includedir liburing)
mkdir -p "$work/include/$machine-linux-gnu"
for header in liburing liburing.h isa-l isa-l.h hiredis; do
	ln -s "$include/$header" "$work/include/"
done
for header in "$root/usr/include/$machine-linux-gnu"/python3*; do # Debian keeps some of Python's headers there
	[ ! -d "$header" ] || ln -s "$header" "$work/include/$machine-linux-gnu/"
done
zig=$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
cat >"$work/cc" <<END
#!/bin/sh
exec "$zig" cc -target $machine-linux-gnu.$glibc -isystem "$work/include" "\$@"
END
chmod +x "$work/cc"
export CC="$work/cc" LDFLAGS=-s ZIG_GLOBAL_CACHE_DIR="$work/zig" ZIG_LOCAL_CACHE_DIR="$work/zig"
# For reproducible builds: no build paths, no build time and no local file modes in the wheel.
export CFLAGS="-ffile-prefix-map=$PWD=. -ffile-prefix-map=$work=."
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y meson.build)}"
export SOURCE_DATE_EPOCH
umask 022

options=()
if [ -n "$root" ]; then
	LDFLAGS+=" -L$root/usr/lib/$machine-linux-gnu"
	export _PYTHON_HOST_PLATFORM=linux-$machine # becomes the platform tag of the wheel
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
# meson-python tags the wheel for the interpreter that it runs in. The extension needs less: bindings/meson.build
# sets limited_api 3.10, and tests/install compares its symbols with that.
quietly python -m wheel tags --remove --python-tag cp310 --abi-tag abi3 "$work"/built/*.whl
# auditwheel can repair wheels of other machines, but accepts only --plat names of the machine that it runs on.
# So platform.machine() is replaced.
quietly python -c "import platform; platform.machine = lambda: '$machine'
import auditwheel.main; raise SystemExit(auditwheel.main.main())" repair \
	--plat "manylinux_${glibc/./_}_$machine" --wheel-dir "$work/repaired" "$work"/built/*.whl
mkdir -p "$folder"
name=$(basename "$work"/repaired/*.whl)
mv "$work/repaired/$name" "$folder"
echo "$folder/$name"
