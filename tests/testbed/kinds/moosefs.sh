# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# A small real MooseFS on this host: a master, and a chunk server on each target. It refuses loopback
# addresses, so its servers have a network namespace of their own; its mounts are seen everywhere.

: "${folder:?}" "${address:?}" "${namespace:?}"
leave_bytes=$((1 << 30)) # chunk servers keep as much free

stop() {
	local file
	for file in "$folder"/etc/chunks*.cfg; do
		mfschunkserver -c "$file" stop >/dev/null 2>&1 || true
	done
	mfsmaster -c "$folder/etc/master.cfg" stop >/dev/null 2>&1 || true
}

pids_of() {
	case "$1" in
	metadata) pgrep -f "^mfsmaster -c $folder/" || true ;;
	target-*) pgrep -f "^mfschunkserver -c $folder/etc/chunks${1#target-}.cfg " || true ;;
	all) pgrep -f "^mfs(master|chunkserver) -c $folder/" || true ;;
	esac
}

run_server() {
	case "$1" in
	metadata) inside mfsmaster -c "$folder/etc/master.cfg" -a start ;; # -a: from the change logs
	target-*) inside mfschunkserver -c "$folder/etc/chunks${1#target-}.cfg" start ;;
	esac
}

fill() {
	fill_targets $(($1 + leave_bytes))
}

empty() {
	empty_targets
}

attach() {
	inside mfsmount "$1" -H "$address" >>"$folder/up.log" 2>&1
}

write_configuration() {
	local number
	mkdir -p "$folder/etc" "$folder/master"
	cp /var/lib/mfs/metadata.mfs.empty "$folder/master/metadata.mfs"
	echo "$address / rw,alldirs,maproot=0" >"$folder/etc/exports"
	cat >"$folder/etc/master.cfg" <<END
DATA_PATH = $folder/master
WORKING_USER = root
WORKING_GROUP = root
EXPORTS_FILENAME = $folder/etc/exports
MATOML_LISTEN_HOST = $address
MATOCS_LISTEN_HOST = $address
MATOCL_LISTEN_HOST = $address
END
	for number in $(seq "${targets:?}"); do
		mkdir "$folder/target-$number/state" "$folder/target-$number/chunks"
		echo "$folder/target-$number/chunks" >"$folder/etc/disks$number"
		cat >"$folder/etc/chunks$number.cfg" <<END
DATA_PATH = $folder/target-$number/state
WORKING_USER = root
WORKING_GROUP = root
HDD_CONF_FILENAME = $folder/etc/disks$number
HDD_LEAVE_SPACE_DEFAULT = ${leave_bytes}B
MASTER_HOST = $address
CSSERV_LISTEN_HOST = $address
CSSERV_LISTEN_PORT = $((9500 + number))
END
	done
}

start() {
	local number
	format_targets
	write_configuration
	make_namespace
	ip -n "$namespace" link add here type veth peer name there
	ip -n "$namespace" addr add "$address/24" dev here
	ip -n "$namespace" link set here up
	ip -n "$namespace" link set there up
	inside mfsmaster -c "$folder/etc/master.cfg" start
	for number in $(seq "${targets:?}"); do
		inside mfschunkserver -c "$folder/etc/chunks$number.cfg" start
	done
	sleep 3 # until the master knows them
}
