# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# A small real NFS server on this host, NFS-Ganesha, which exports a filesystem on the first target. The
# kernel's client mounts it in a machine.

: "${folder:?}" "${kind:?}" "${address:?}"
version=${kind#nfs}

stop() {
	: # what runs in the namespace ends with it
}

pids_of() { # target-1 or all, which is the one server
	pgrep -f "^ganesha.nfsd -f $folder/" || true
}

fill() {
	fill_targets "$1"
}

empty() {
	empty_targets
}

requests() { # of all mounts, as the client counts them
	awk '
		/^device/ { counted = / fstype nfs/ }
		counted && $1 ~ /^[A-Z_]+:$/ && $1 !~ /^(NULL|READ|WRITE|COMMIT):$/ {
			print tolower(substr($1, 1, length($1) - 1)), $2
		}' /proc/self/mountstats
}

attach() { # each mount is a client with a cache of its own
	modprobe nfsv"${version%.*}"
	case "$version" in
	3)
		mount -i -t nfs -o "addr=$address,vers=3,proto=tcp,mountaddr=$address,nolock,nosharecache" \
			"$address:$folder/target-1" "$1"
		;;
	*)
		mount -i -t nfs4 -o "addr=$address,vers=$version,nosharecache" \
			"$address:/export" "$1"
		;;
	esac
}

write_configuration() {
	cat >"$folder/ganesha.conf" <<END
NFS_CORE_PARAM { Protocols = 3, 4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }
NFSv4 { Grace_Period = 10; Lease_Lifetime = 10; RecoveryRoot = "$folder/recovery"; Minor_Versions = 1, 2;
	Delegations = false; }
NFS_KRB5 { Active_krb5 = false; }
LOG { Default_Log_Level = EVENT; }
EXPORT { Export_Id = 7; Path = "$folder/target-1"; Pseudo = "/export"; Access_Type = RW;
	Squash = No_Root_Squash; SecType = sys; Protocols = 3, 4; Transports = TCP; FSAL { Name = VFS; } }
END
}

with_own_run() { # COMMAND...: the servers meet by a socket in /run
	# shellcheck disable=SC2016 # it is the inner shell's $0
	inside unshare --mount sh -ec 'mount --bind "$0" /run; exec "$@"' "$folder/run" "$@"
}

run_server() {
	with_own_run ganesha.nfsd -f "$folder/ganesha.conf" -L "$folder/ganesha.log" -p "$folder/ganesha.pid"
	for _ in $(seq 100); do
		if inside bash -c "</dev/tcp/$address/2049" 2>/dev/null; then
			return
		fi
		sleep 0.1
	done
	echo "testbed: nothing answers at port 2049 of the NFS server after 10 s" >&2
	return 1
}

start() {
	format_targets
	write_configuration
	mkdir -p "$folder"/{recovery,run/rpcbind,run/ganesha}
	with_own_run rpcbind
	run_server
}
