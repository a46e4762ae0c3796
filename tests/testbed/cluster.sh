# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the kinds of clusters have in common. Sourced, with `here` and `folder` set. Each file in kinds/
# defines start, stop, attach MOUNT_POINT, and for harm.sh: pids_of SERVER, run_server SERVER, fill BYTES and
# empty; for requests.sh: requests, which prints lines with the name of a request and how many there were. The files in `folder` tell of a cluster: kind, devices, mounts.

: "${here:?}" "${folder:?}"

target_bytes=$((16 << 30)) # of each, all of it a hole until it is written
throttle=/sys/fs/cgroup/blkio/blkio.throttle
# A network of its own, which some kinds have. Several folders are several namespaces.
namespace=ioshape-$(printf %s "$folder" | cksum | cut -d ' ' -f 1)
address=10.77.0.1

load_kind() {
	if [ ! -e "$folder/kind" ]; then
		echo "testbed: there is no cluster in $folder; tests/testbed/up.sh starts one" >&2
		return 1
	fi
	kind=$(cat "$folder/kind")
	# nfs3, nfs4.1 and nfs4.2 differ in how they are mounted.
	# shellcheck source=/dev/null
	. "$here/kinds/${kind%%[0-9]*}.sh"
}

requests() {
	: # of a kind that does not count them
}

# Whether machine.sh mounts it, and not this host, whose kernel may lack the client.
mounts_in_machine() {
	case "$kind" in
	ceph | nfs*) ;;
	*) return 1 ;;
	esac
}

inside() {
	nsenter --net="/run/netns/$namespace" "$@"
}

make_namespace() {
	ip netns add "$namespace"
	ip -n "$namespace" link set lo up
}

remove_namespace() { # with all that still runs in it
	[ -e "/run/netns/$namespace" ] || return 0
	for _ in $(seq 100); do
		[ "$(ip netns pids "$namespace")" ] || break
		ip netns pids "$namespace" | xargs -r kill -KILL 2>/dev/null || true
		sleep 0.1
	done
	ip netns del "$namespace"
}

make_machine_network() {
	make_namespace
	ip -n "$namespace" tuntap add dev machine mode tap
	ip -n "$namespace" addr add "$address/24" dev machine
	ip -n "$namespace" link set machine up
}

can_be_slow() {
	[ -w "$throttle.write_bps_device" ] || {
		echo "testbed: cannot slow targets down: there is no $throttle.write_bps_device; mount the blkio" \
			"controller of control groups (version 1), or leave --mb-per-s and --ms-per-seek out" >&2
		return 1
	}
}

limit() { # DEVICE BYTES_PER_S REQUESTS_PER_S; 0: no limit
	local number way
	number=$(cat "/sys/class/block/${1##*/}/dev")
	for way in read write; do
		echo "$number $2" >"$throttle.${way}_bps_device"
		echo "$number $3" >"$throttle.${way}_iops_device"
	done
}

make_targets() { # `targets` devices, named in the file "devices"
	local number device
	for number in $(seq "${targets:?}"); do
		truncate -s "$target_bytes" "$folder/target$number"
		device=$(losetup --find --show --direct-io=on "$folder/target$number")
		echo "$device" >>"$folder/devices"
		if [ "$mb_per_s$ms_per_seek" ]; then
			limit "$device" $((${mb_per_s:-0} * 1000000)) $((ms_per_seek ? 1000 / ms_per_seek : 0))
		fi
	done
}

format_targets() { # each as a filesystem that is mounted at target-N, for servers that keep files
	local number=0 device
	while read -r device; do
		number=$((number + 1))
		mkfs.xfs -q -f "$device"
		mkdir "$folder/target-$number"
		mount "$device" "$folder/target-$number"
	done <"$folder/devices"
}

remove_targets() {
	local mounted device
	for mounted in "$folder"/target-*; do
		umount -l "$mounted" 2>/dev/null || true
	done
	[ -e "$folder/devices" ] || return 0
	while read -r device; do
		# After a restart of the host the device may be another's.
		losetup -O BACK-FILE -n "$device" 2>/dev/null | grep -qF "$folder/target" || continue
		[ ! -w "$throttle.write_bps_device" ] || limit "$device" 0 0
		losetup -d "$device"
	done <"$folder/devices"
}

fill_targets() { # BYTES: of filesystems at target-N leaves no more free
	local mounted free size
	for mounted in "$folder"/target-*/; do
		free=$(($(stat -f -c '%a * %S' "$mounted")))
		size=$(stat -c %s "$mounted/filler" 2>/dev/null || echo 0)
		if [ "$free" -gt "$1" ]; then
			fallocate -o "$size" -l $((free - $1)) "$mounted/filler"
		fi
	done
}

empty_targets() {
	rm -f "$folder"/target-*/filler
}

stop_server() { # SERVER: by SIGKILL, as a crash does
	local pids
	pids=$(pids_of "$1")
	if [ ! "$pids" ]; then
		echo "testbed: no server \"$1\" runs in $folder" >&2
		return 1
	fi
	echo "$pids" | xargs kill -s KILL
	while [ "$(pids_of "$1")" ]; do
		sleep 0.1
	done
}

mount_client() {
	mkdir -p "$1"
	echo "$1" >>"$folder/mounts"
	! mounts_in_machine || return 0
	attach "$1"
	mountpoint -q "$1" # mfsmount has no status of its own
}

down() {
	local mounted
	[ -e "$folder" ] || return 0
	load_kind
	while read -r mounted; do
		umount -l "$mounted" 2>/dev/null || true # a client may be gone already
	done < <(cat "$folder/mounts" 2>/dev/null)
	stop
	remove_namespace
	remove_targets
	rm -rf --one-file-system "$folder"
}
