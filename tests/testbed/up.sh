#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# up.sh: starts a small real parallel filesystem on this host.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

usage() {
	cat <<'END'
Usage: tests/testbed/up.sh KIND [OPTION]...
       tests/testbed/mount.sh MOUNT_POINT ANOTHER
       tests/testbed/harm.sh MOUNT_POINT stop|start SERVER
       tests/testbed/harm.sh MOUNT_POINT fill MB|empty
       tests/testbed/requests.sh MOUNT_POINT
       tests/testbed/machine.sh MOUNT_POINT COMMAND...
       tests/testbed/down.sh MOUNT_POINT

up.sh starts a cluster, mounts it and prints the mount point. KIND is one of:
  cephfs     a monitor, a manager, a metadata server and OSDs, mounted by ceph-fuse; takes half a minute
  glusterfs  a volume of bricks that each hold whole files; takes ten seconds
  moosefs    a master and chunk servers, in a network namespace of their own; takes ten seconds
  ceph       the servers of cephfs, for the Linux kernel's client
  nfs3, nfs4.1, nfs4.2
             NFS-Ganesha, which exports a filesystem on the first target, for the Linux kernel's client;
             takes two seconds

Options:
  --targets N        storage targets, each on a loop device of its own; 4 unless given
  --mb-per-s N       each target reads and writes no more than N megabytes a second
  --ms-per-seek N    each target serves a request every N milliseconds at most; up to 1000
  --folder FOLDER    for the cluster's files; a new one in /var/tmp unless given

mount.sh mounts it once more: another client, with a cache of its own.
harm.sh kills a server (SIGKILL), and starts it again. SERVER is target-1, target-2, ...; metadata, which
glusterfs and nfs have not; or all, which only stops. fill takes the free space of each target but for MB megabytes, and
empty returns it. The filesystem shows that some seconds later.
requests.sh prints how many requests other than reads and writes the clients have sent so far: as JSON, by
kind of request. The servers count those of cephfs and glusterfs, and the clients of a machine, where
requests.sh has to run, those of nfs. Others are not counted: {}.
machine.sh runs COMMAND where the kernel's client mounts ceph, nfs3, nfs4.1 or nfs4.2 at all these mount
points: in a machine of its own, User-mode Linux. The command sees this host's files, its working directory
and environment. What it writes outside the mount points is lost when it ends, except its output.
down.sh unmounts all clients, stops the servers and removes the folder, also after a crash.

They need root, /dev/fuse, loop devices, and the packages that "tests/support/setup.sh realfs" installs.
Machines need an x86-64 processor and /dev/net/tun.
Slow targets also need the blkio controller of control groups, version 1. MooseFS leaves what it gets to this
host's page cache: there slow targets show only under a load that lasts.
END
}

refuse() {
	[ $# = 0 ] || echo "up.sh: $1" >&2
	usage >&2
	exit 2
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
	usage
	exit 0
fi
[ $# -gt 0 ] || refuse
kind=$1 targets=4 mb_per_s='' ms_per_seek='' folder=''
case "$kind" in
cephfs | ceph | glusterfs | moosefs | nfs3 | nfs4.1 | nfs4.2) ;;
*) refuse "there is no kind \"$kind\"" ;;
esac
shift
while [ $# -gt 0 ]; do
	[ $# -gt 1 ] || refuse "$1 takes a value"
	case "$1" in
	--targets) targets=$2 ;;
	--mb-per-s) mb_per_s=$2 ;;
	--ms-per-seek) ms_per_seek=$2 ;;
	--folder) folder=$2 ;;
	*) refuse "there is no option $1" ;;
	esac
	shift 2
done
for number in "$targets" "${mb_per_s:-1}" "${ms_per_seek:-1}"; do
	[[ $number =~ ^[1-9][0-9]{0,3}$ ]] || refuse "\"$number\" is no whole number from 1 to 9999"
done

[ "${ms_per_seek:-1}" -le 1000 ] || refuse "--ms-per-seek is at most 1000"

folder=$(realpath -m "${folder:-/var/tmp/ioshape-$kind-$$}")
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"
[ -z "$mb_per_s$ms_per_seek" ] || can_be_slow
[ ! -e "$folder/kind" ] || down
mkdir -p "$folder"
echo "$kind" >"$folder/kind"
load_kind
# No condition: within one bash goes on after failures.
set +e
(
	set -e
	make_targets
	! mounts_in_machine || make_machine_network
	start
	mount_client "$folder/mnt"
) >"$folder/up.log" 2>&1
status=$?
set -e
if [ $status != 0 ]; then
	tail -n 5 "$folder/up.log" >&2
	echo "up.sh: cannot start $kind in $folder (exit status $status); above are its last words" >&2
	down
	exit 1
fi
echo "$folder/mnt"
