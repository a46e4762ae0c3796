#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# down.sh: removes a filesystem that up.sh has started; up.sh --help tells.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[ $# = 1 ] || exec "$here/up.sh"
# By name: after a crash the mount point may refuse to be looked at.
folder=$(realpath -ms "$1/..")
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"
down
