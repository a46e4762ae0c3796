#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# package.sh: builds the Python package of this tree in build/package and installs it into .venv. Does
# nothing if that is what .venv has. The output is shown only where something fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=build/package
stamp=.venv/package # goes when the environment is made anew
mkdir -p "$folder"

# Two of us would write to one folder.
exec 9>"$folder.lock"
flock 9

sources() { # everything that the build reads, and what it is built for
	pwd
	.venv/bin/python -c 'import cffi, sys; print(sys.version, cffi.__version__)'
	find bindings include libioshape meson.build meson_options.txt pyproject.toml README.md LICENSE \
		-name __pycache__ -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
}

installed() { # its list of files and their checksums: somebody may have installed another one by hand
	sha256sum .venv/lib/python*/site-packages/ioshape-*.dist-info/RECORD
}

wanted=$(sources)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted$(installed 2>/dev/null)" ]; then
	exit
fi

# A copied tree must not go on building the original.
[ "$(cat "$folder/belongs-to" 2>/dev/null)" = "$PWD" ] || rm -rf "$folder"
mkdir -p "$folder"
echo "$PWD" >"$folder/belongs-to"
rm -f "$stamp"
# ninja of the environment, and compilers that the user named, if any.
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip install --disable-pip-version-check \
	--no-build-isolation --no-deps --force-reinstall \
	--config-settings=build-dir="$folder" --config-settings=setup-args=-Dwerror=true \
	. >"$folder.txt" 2>&1 || {
	tail -n 60 "$folder.txt" >&2
	echo "package.sh: the Python package could not be built; all of the output is in $folder.txt" >&2
	exit 1
}
echo "$wanted$(installed)" >"$stamp"
