#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A small real GlusterFS volume of four bricks on this host.
set -euo pipefail

usage() {
	cat <<'END'
Usage: tests/testbed/gluster.sh up FOLDER
       tests/testbed/gluster.sh mount FOLDER MOUNT_POINT
       tests/testbed/gluster.sh down FOLDER

  up     starts a volume whose bricks lie in FOLDER, mounts it at FOLDER/mnt and prints that path. Takes
         about ten seconds.
  mount  mounts it once more: another client, with a cache of its own
  down   unmounts it, removes the volume and FOLDER, and stops the daemon that "up" started

It uses this host's glusterd, whose state lies below /var/lib/glusterd. Needs root, /dev/fuse and the
packages that "tests/support/setup.sh realfs" installs (Debian 12: GlusterFS 10.3).
END
}

# shellcheck source=tests/testbed/commands.sh
. "$(dirname "${BASH_SOURCE[0]}")/commands.sh"
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
	for number in 1 2 3 4; do
		mkdir -p "$folder/brick$number"
		bricks+=("$host:$folder/brick$number")
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

obey "$@"
