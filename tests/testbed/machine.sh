#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# machine.sh: runs a command where the kernel's client mounts a cluster; up.sh --help describes it.
set -euo pipefail
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
[ $# -gt 1 ] || exec "$here/up.sh"
folder=$(realpath -m "$1/..")
shift
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"
load_kind
own=$folder/machine

write_command() { # COMMAND...: as the machine runs it
	{
		export -p
		printf 'cd %q\n' "$PWD"
		printf '%q ' "$@"
	} >"$own/command"
}

start_machine() {
	# Its own messages and the two streams of the command are three consoles.
	inside env LD_PRELOAD="$own/wide_registers.so" linux.uml mem=4G uml_dir="$own/" rootfstype=hostfs rootflags=/ ro quiet loglevel=1 \
		init="$here/inside.sh" ioshape_folder="$folder" \
		vec0:transport=tap,ifname=machine,gro=1 \
		ssl=null con=null con0=null,fd:1 con1=null,fd:3 con2=null,fd:4 \
		3>&1 4>&2 >"$own/console" 2>&1 </dev/null &
}

# shellcheck disable=SC2317 # the trap calls it
end_machine() { # all processes that it is made of, also if it hangs
	local pid
	for pid in $(ip netns pids "$namespace"); do
		! grep -qs linux.uml "/proc/$pid/comm" || kill -KILL "$pid"
	done
}

rm -rf "$own"
mkdir "$own"
"${CC:-cc}" -shared -fPIC -o "$own/wide_registers.so" "$here/wide_registers.c"
write_command "$@"
start_machine
trap end_machine EXIT
trap 'exit 143' INT TERM
wait || true
trap - INT TERM
[ -s "$own/status" ] || {
	tail -n 5 "$own/console" >&2
	echo "machine.sh: the machine ended before the command; above are its last words" >&2
	exit 1
}
exit "$(cat "$own/status")"
