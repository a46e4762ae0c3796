#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Writes the recipes for conda-forge, Spack and EasyBuild from their templates.
set -euo pipefail

usage() {
	cat <<'TEXT'
Usage: bindings/packaging/recipes.sh [--help] ARCHIVE URL HOMEPAGE FOLDER

Writes into FOLDER the recipes for the archive of sources ARCHIVE (python -m build --sdist), which people will
fetch from URL: conda/recipe.yaml, spack/packages/ioshape/package.py and easybuild/ioshape-VERSION-….eb. The
environment variable MAINTAINER is the name that conda-forge knows (default: ioshape).
TEXT
}

case "${1:-}" in
-h | --help)
	usage
	exit 0
	;;
esac
[ $# = 4 ] || {
	usage >&2
	exit 2
}
here=$(dirname "${BASH_SOURCE[0]}")
archive=$1 url=$2 homepage=$3 folder=$4
[[ ${archive##*/} =~ ^ioshape-([0-9.]+)\.tar\.gz$ ]] || {
	echo "cannot fill recipes for \"$archive\": it is not called ioshape-VERSION.tar.gz; make it with python -m build --sdist" >&2
	exit 1
}
version=${BASH_REMATCH[1]}
sha256=$(sha256sum "$archive")

fill() { # fill FROM TO
	mkdir -p "$(dirname "$folder/$2")"
	sed -e "s|@VERSION@|$version|g" -e "s|@SHA256@|${sha256%% *}|g" -e "s|@URL@|$url|g" -e "s|@FOLDER_URL@|${url%/*}|g" \
		-e "s|@HOMEPAGE@|$homepage|g" -e "s|@MAINTAINER@|${MAINTAINER:-ioshape}|g" "$here/$1" >"$folder/$2"
	echo "$folder/$2"
}

fill conda/recipe.yaml conda/recipe.yaml
fill spack/package.py spack/packages/ioshape/package.py
fill easybuild/ioshape-GCCcore-13.3.0.eb "easybuild/ioshape-$version-GCCcore-13.3.0.eb"
