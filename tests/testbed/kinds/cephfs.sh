# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# A small real CephFS on this host: a monitor, a manager, OSDs on the targets, and a metadata server. It
# listens on loopback only, the monitor on a port that is free.

: "${folder:?}"
ceph_address=127.0.0.1
export CEPH_CONF=$folder/ceph.conf

servers() { # their numbers: one that the monitor had missed for a while has begun anew, with another
	local file
	for file in /proc/[0-9]*; do
		if grep -qs '^ceph-' "$file/comm" && grep -qsFxz "CEPH_CONF=$CEPH_CONF" "$file/environ"; then
			echo "${file#/proc/}"
		fi
	done
}

stop() {
	local how
	for how in TERM KILL KILL; do
		servers | xargs -r kill -s "$how" 2>/dev/null || true
		for _ in $(seq 100); do
			[ "$(servers)" ] || return 0
			sleep 0.1
		done
	done
	echo "testbed: cannot stop the processes $(servers | xargs)" >&2
	return 1
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
osd pool default pg num = 8
osd crush chooseleaf type = 0
run dir = $folder
log file = $folder/\$name.log
admin socket = $folder/\$name.\$pid.asok
pid file = $folder/\$name.pid
keyring = $folder/keyring
osd objectstore = bluestore
osd memory target = 939524096
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

start() {
	local number device
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
		mkdir -p "$folder/osd$number"
		ceph-osd -i "$number" --mkfs
		ceph-osd -i "$number"
		number=$((number + 1))
	done <"$folder/devices"
	ceph osd pool create data 8
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
