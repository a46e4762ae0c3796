#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# requests.sh: counts requests that clients of a filesystem have sent to its servers; up.sh --help tells.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[ $# = 1 ] || exec "$here/up.sh"
folder=$(realpath -ms "$1/..")
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"
load_kind
requests | awk '
	{ count[$1] += $2 }
	END {
		printf "{"
		for (name in count)
			if (count[name])
				printf "%s\"%s\": %d", between++ ? ", " : "", name, count[name]
		print "}"
	}'
