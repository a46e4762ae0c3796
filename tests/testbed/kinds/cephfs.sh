# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# A small real CephFS on this host: a monitor, a manager, OSDs on the targets, and a metadata server. It
# listens on loopback only, the monitor on a port that is free.

: "${folder:?}"
ceph_address=127.0.0.1
export CEPH_CONF=$folder/ceph.conf

# A server that the monitor had missed for a while has begun anew, with another process id.
servers() { # PATTERN: process ids of this cluster's programs whose command line matches it
	local pid
	for pid in $(pgrep -f "$1"); do
		if grep -qsFxz "CEPH_CONF=$CEPH_CONF" "/proc/$pid/environ"; then
			echo "$pid"
		fi
	done
}

pids_of() {
	case "$1" in
	metadata) servers '^ceph-mds ' ;;
	target-*) servers "^ceph-osd -i $((${1#target-} - 1))\$" ;;
	all) servers '^ceph-(mon|mgr|osd|mds) ' ;;
	esac
}

run_server() {
	case "$1" in
	metadata) ceph-mds -i m ;;
	target-*) ceph-osd -i $((${1#target-} - 1)) ;;
	esac
}

# OSDs call themselves full from a part of their space on, which is made less here.
fill() {
	ceph osd set-full-ratio "$(ceph osd df --format json | python3 -c '
import json, sys
nodes = json.load(sys.stdin)["nodes"]
print(max((1024 * node["kb_used"] + int(sys.argv[1])) / (1024 * node["kb"]) for node in nodes))' "$1")"
}

empty() {
	ceph osd set-full-ratio 0.95
}

stop() {
	local how
	for how in TERM KILL KILL; do
		servers '^ceph-' | xargs -r kill -s "$how" 2>/dev/null || true
		for _ in $(seq 100); do
			[ "$(servers '^ceph-')" ] || return 0
			sleep 0.1
		done
	done
	echo "testbed: cannot stop the processes $(servers '^ceph-' | xargs)" >&2
	return 1
}

requests() { # that the metadata server has answered
	ceph daemon "$folder"/mds.m.*.asok perf dump mds_server | python3 -c '
import json, sys
for name, told in json.load(sys.stdin)["mds_server"].items():
    if name.startswith("req_"):
        print(name.removeprefix("req_").removesuffix("_latency"), told["avgcount"])'
}

attach() {
	ceph-fuse "$1" >>"$folder/up.log" 2>&1
}

write_configuration() {
	local port
	port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
	cat >"$CEPH_CONF" <<END
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = $ceph_address:$port
public network = $ceph_address/32
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 64
osd crush chooseleaf type = 0
run dir = $folder
log file = $folder/\$name.log
admin socket = $folder/\$name.\$pid.asok
pid file = $folder/\$name.pid
keyring = $folder/keyring
osd objectstore = bluestore
osd memory target = 939524096
# The throttle counts pieces before the kernel joins them: a disk would have them as one request.
bluestore max blob size = 1048576
# A disk of this machine may be fuller than a monitor likes.
mon data avail crit = 1
mon data avail warn = 1
[client]
pid file =
[mon.a]
mon data = $folder/mon
[mgr.x]
mgr data = $folder/mgr
[mds.m]
mds data = $folder/mds
[osd]
osd data = $folder/osd\$id
END
}

start_osd() { # NUMBER
	mkdir -p "$folder/osd$1" && ceph-osd -i "$1" --mkfs && ceph-osd -i "$1"
}

start() {
	local number device osds=()
	mkdir -p "$folder"/{mon,mgr,mds}
	write_configuration
	monmaptool --create --add a "$(sed -n 's/^mon host = //p' "$CEPH_CONF")" \
		--fsid "$(sed -n 's/^fsid = //p' "$CEPH_CONF")" "$folder/monmap"
	ceph-mon --mkfs -i a --monmap "$folder/monmap"
	ceph-mon -i a
	ceph-mgr -i x
	number=0
	while read -r device; do
		printf '[osd.%s]\nbluestore block path = %s\n' "$number" "$device" >>"$CEPH_CONF"
		ceph osd create
		number=$((number + 1))
	done <"$folder/devices"
	for number in $(seq 0 $((number - 1))); do
		start_osd "$number" &
		osds+=($!)
	done
	for number in "${osds[@]}"; do
		wait "$number"
	done
	ceph osd pool create data 64
	ceph osd pool create meta 8
	ceph fs new fs meta data
	ceph-mds -i m
	for _ in $(seq 60); do
		if ceph fs status 2>/dev/null | grep -q active; then
			return
		fi
		sleep 1
	done
	echo "testbed: the metadata server is not active after 60 s" >&2
	return 1
}
