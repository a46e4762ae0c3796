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
	if ask volume list >/dev/null 2>&1; then
		ask volume stop "$volume" force >/dev/null 2>&1 || true
		ask volume delete "$volume" >/dev/null 2>&1 || true
	else
		rm -rf "/var/lib/glusterd/vols/$volume" # glusterd is gone, and bricks may not be
	fi
	while [ "$(pids_of all)" ]; do
		pids_of all | xargs -r kill
		sleep 0.1
	done
}

own_glusterd() {
	pgrep -f -- "^glusterd -p $folder/glusterd.pid$" || true
}

pids_of() {
	case "$1" in
	target-*) pgrep -f -- "^/usr/sbin/glusterfsd .* --brick-name $folder/$1/brick " || true ;;
	all)
		pgrep -f -- "^/usr/sbin/glusterfsd .* --brick-name $folder/" || true
		own_glusterd
		;;
	esac
}

run_server() {
	ask volume start "$volume" force
}

fill() {
	fill_targets $(($1 + ${target_bytes:?} / 100)) # of which bricks keep 1 % (storage.reserve)
}

empty() {
	empty_targets
}

requests() { # that all bricks have answered
	ask volume profile "$volume" start >/dev/null 2>&1 || true # it counts from now on
	ask volume profile "$volume" info cumulative | awk '
		$NF ~ /^[A-Z]+$/ && $NF !~ /^(READ|WRITE|RELEASE|RELEASEDIR|FORGET)$/ && $(NF - 1) ~ /^[0-9]+$/ {
			print tolower($NF), $(NF - 1)
		}'
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
