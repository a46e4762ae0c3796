# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# A small real GlusterFS volume on this host, with a brick on each target. It uses this host's glusterd,
# whose state lies below /var/lib/glusterd.

: "${folder:?}"
host=$(hostname)
# Several folders are several volumes.
volume=ioshape-$(printf %s "$folder" | cksum | cut -d ' ' -f 1)

ask() {
	gluster --mode=script "$@"
}

stop() {
	local pid
	ask volume stop "$volume" force >/dev/null 2>&1 || true
	ask volume delete "$volume" >/dev/null 2>&1 || true
	[ -e "$folder/glusterd.pid" ] || return 0
	pid=$(cat "$folder/glusterd.pid")
	# The number may belong to another process by now.
	if grep -qs glusterd "/proc/$pid/comm"; then
		kill "$pid"
	fi
}

attach() {
	mount -t glusterfs "$host:/$volume" "$1"
}

start() {
	local bricks=() number
	format_targets
	for number in $(seq "${targets:?}"); do
		mkdir "$folder/target-$number/brick"
		bricks+=("$host:$folder/target-$number/brick")
	done
	mkdir -p /run/gluster /var/log/glusterfs
	ask volume list >/dev/null 2>&1 || glusterd -p "$folder/glusterd.pid"
	for _ in $(seq 40); do
		if ask volume list >/dev/null 2>&1; then
			break
		fi
		sleep 0.5
	done
	ask volume create "$volume" transport tcp "${bricks[@]}" force
	ask volume start "$volume"
}
