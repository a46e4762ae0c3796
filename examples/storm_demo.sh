#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Shows a checkpoint storm on a laptop, with torch.save and with ioshape.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: examples/storm_demo.sh [--picture FILE] [--help]

Installs missing packages (see tests/support/setup.sh) and builds the Python package into .venv. Then eight ranks
save at the same time to a simulated shared filesystem, first with torch.save, then with ioshape, while other
processes read and write small files. It takes two to three minutes, and ends with a picture and two numbers.

It needs /dev/fuse. As root it simulates two nodes with Lustre; otherwise one node with one mount.

  --picture FILE   write the picture to this file: .svg, .png or .pdf (default: build/storm-demo.svg)
END
}

picture=$PWD/build/storm-demo.svg
case "${1:-}" in
"") ;;
-h | --help)
	usage
	exit 0
	;;
--picture)
	[ $# = 2 ] || {
		usage >&2
		exit 2
	}
	picture=$(cd "$called_from" && realpath -m -- "$2")
	;;
*)
	usage >&2
	exit 2
	;;
esac

if [ ! -r /dev/fuse ] || [ ! -w /dev/fuse ]; then
	echo "storm_demo: the simulated filesystem needs /dev/fuse, which is missing or not accessible for this user;" \
		"in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN" >&2
	exit 1
fi
tests/support/setup.sh bench
tests/support/package.sh
export PATH="$PWD/.venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1 PYTHONPATH
PYTHONPATH=$(python tests/support/tree.py)
# Builds stripefs only, not everything that -Dbench=true enables.
if [ ! -f build/demo/build.ninja ]; then
	meson setup build/demo -Dbench=true --buildtype=release >/dev/null
fi
ninja --quiet -C build/demo tests/c/support/stripefs/stripefs
# The user's settings must not change the results.
unset "${!IOSHAPE_@}"
export IOSHAPE_TEST_BUILD="$PWD/build/demo"
exec python -m tests.bench.storm_demo "$picture"
