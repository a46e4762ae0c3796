#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# build.sh FOLDER OPTION...: configures FOLDER with these options of meson where that has not been done,
# and builds what changed. The output is shown only where something fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=$1
shift

# A copied tree must not go on building the original, nor a folder keep the options of the past.
wanted="$PWD ${CC:-} ${CXX:-} $*"
if [ "$(cat "$folder/configured" 2>/dev/null)" != "$wanted" ]; then
	rm -rf "$folder"
	mkdir -p "$folder"
	meson setup "$folder" . "$@" >"$folder/setup.txt" 2>&1 || {
		cat "$folder/setup.txt" >&2
		exit 1
	}
	echo "$wanted" >"$folder/configured"
fi
ninja --quiet -C "$folder"
