#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# harm.sh: kills servers of a filesystem that up.sh has started, and fills it; up.sh --help tells.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[ $# -ge 2 ] || exec "$here/up.sh"
folder=$(realpath -ms "$1/..")
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"
load_kind

case "$2 ${3:-}" in
"stop metadata" | "stop target-"[1-9]* | "stop all") stop_server "$3" ;;
"start metadata" | "start target-"[1-9]*) run_server "$3" >>"$folder/up.log" 2>&1 ;;
"fill "[0-9]*) fill $(($3 * 1000000)) ;;
"empty ") empty ;;
*) exec "$here/up.sh" ;;
esac
