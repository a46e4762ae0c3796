#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# mount.sh: mounts a filesystem that up.sh has started once more; up.sh --help tells.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[ $# = 2 ] || exec "$here/up.sh"
folder=$(realpath -m "$1/..")
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"
load_kind
mount_client "$(realpath -m "$2")"
