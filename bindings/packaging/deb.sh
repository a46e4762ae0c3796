#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Debian packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
	cat <<'TEXT'
Usage: bindings/packaging/deb.sh [--help] [FOLDER]

Builds libioshape1, libioshape-dev, python3-ioshape, ioshape-tools and their source package from a copy of
this tree, and leaves them in FOLDER (dist). It needs Debian 12 or newer with dpkg-dev and what
bindings/packaging/debian/control lists as Build-Depends ("apt-get build-dep" knows the source package).

DEBFULLNAME and DEBEMAIL say who stands for the packages. The same commit gives the same bytes.
TEXT
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
mkdir -p "${1:-dist}"
folder=$(realpath "${1:-dist}")
version=$(sed -n "s/^\tversion: '\([0-9.]*\)',.*/\1/p" meson.build)
maintainer="${DEBFULLNAME:-The libioshape maintainers} <${DEBEMAIL:-ioshape@packages.invalid}>"
# The time of the commit; in an archive of sources, the time when the archive was made.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y meson.build)}"
export SOURCE_DATE_EPOCH

work=$(mktemp -d "${TMPDIR:-/tmp}/ioshape-deb.XXXXXX")
trap 'rm -rf "$work"' EXIT
# The packages contain file modes, which must not depend on the caller's umask.
umask 022

sources() {
	if [ -e .git ]; then
		git ls-files -z
	else # an archive of sources, perhaps with build outputs; tests/house compares the list with .gitignore
		find . \( -path ./.venv -o -path ./build -o -name __pycache__ -o -name .hypothesis -o -name .mypy_cache \
			-o -name .pytest_cache -o -name .ruff_cache -o -name '*.egg-info' -o -path ./dist -o -name '.mesonpy-*' \
			-o -path './scratch-*' -o -name secrets -o -name 'secrets.??????' \) -prune -o -type f -print0
	fi
}

tree=$work/ioshape-$version
mkdir "$tree"
# bindings/licenses is left out: it has the licenses of libraries that only wheels contain.
sources | grep -zvE '^(\./)?(bindings/licenses|bindings/packaging/debian)/' |
	tar --null --no-recursion --files-from=- -c | tar -x -C "$tree" --no-same-permissions
cp -r bindings/packaging/debian "$tree/debian"
chmod -R u+w,go-w,a+rX "$tree"
escaped=$(printf '%s' "$maintainer" | sed 's,[/&\],\\&,g')
sed -i "s/@MAINTAINER@/$escaped/" "$tree/debian/control"
cat >"$tree/debian/changelog" <<TEXT
ioshape ($version) unstable; urgency=medium

  * Version $version; CHANGELOG.md of the source tells what is new.

 -- $maintainer  $(date -uR -d "@$SOURCE_DATE_EPOCH")
TEXT
(cd "$tree" && dpkg-buildpackage --no-sign) >"$work/log.txt" 2>&1 || {
	tail -n 60 "$work/log.txt" >&2
	echo "bindings/packaging/deb.sh: the packages could not be built; see above" >&2
	exit 1
}
for file in "$work"/*.deb "$work"/*.dsc "$work"/*.tar.* "$work"/*.changes "$work"/*.buildinfo; do
	mv "$file" "$folder"
	echo "$folder/${file##*/}"
done
