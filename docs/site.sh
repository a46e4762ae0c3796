#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the site from docs/; see usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: docs/site.sh [--environment | --serve [PORT]] [--help]

Builds the pages of docs/, the README, CONTRIBUTING.md and CHANGELOG.md into build/site, to be read in a
browser: open build/site/index.html. The Python reference comes from the package, which it builds into .venv;
tests/support/setup.sh makes .venv. The search shows excerpts only if the site is served, because a browser lets
no page read other files. The site loads nothing from elsewhere. A link or an anchor that leads nowhere ends the
build, and so does a page that docs/site/pages.py does not list.

  --environment   only makes build/site-env, the Python environment that builds it
  --serve [PORT]  builds, and serves it on this machine (default: 8000) until Ctrl-C
END
}

environment=build/site-env

make_environment() {
	local wanted
	wanted=$(pwd && python3 --version && cat docs/site/requirements.txt)
	if [ "$(cat $environment/complete 2>/dev/null)" = "$wanted" ]; then
		return
	fi
	echo "site: making $environment"
	rm -rf $environment
	python3 -m venv $environment
	$environment/bin/python -m pip --disable-pip-version-check -q install -r docs/site/requirements.txt
	echo "$wanted" >$environment/complete
}

build() {
	if [ ! -x .venv/bin/python ]; then
		echo 'cannot build the Python reference of the site: there is no ".venv"; run tests/support/setup.sh' >&2
		exit 1
	fi
	tests/support/package.sh
	# Pages that have gone must not stay.
	rm -rf build/site-pages
	$environment/bin/python docs/site/pages.py build/site-pages
	$environment/bin/python -m sphinx -q -W --keep-going -j auto -c docs/site -d build/site-read build/site-pages build/site
	echo "site: build/site/index.html"
}

case "${1:-}" in
-h | --help)
	usage
	;;
--environment)
	make_environment
	;;
"" | --serve)
	make_environment
	build
	if [ "${1:-}" = --serve ]; then
		exec $environment/bin/python -m http.server --bind 127.0.0.1 --directory build/site "${2:-8000}"
	fi
	;;
*)
	usage >&2
	exit 2
	;;
esac
