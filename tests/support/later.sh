#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# later.sh: builds the Python package as a later version of it would be, in which every format that
# versions share has another number, in build/later/site. Quick if nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=build/later
mkdir -p "$folder"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip install --disable-pip-version-check \
	--no-build-isolation --no-deps --upgrade --target "$folder/site" \
	--config-settings=build-dir="$folder/build" --config-settings=setup-args=-Dformats_ahead=100 \
	. >"$folder/output.txt" 2>&1 || {
	tail -n 60 "$folder/output.txt" >&2
	exit 1
}
