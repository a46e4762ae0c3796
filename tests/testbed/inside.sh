#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# inside.sh: the first process of the machine that machine.sh starts.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
here=$(dirname "${BASH_SOURCE[0]}")
folder=${ioshape_folder:?}
# shellcheck source=tests/testbed/cluster.sh
. "$here/cluster.sh"

# The files of the host are the machine's, and what it writes to them stays in its memory.
take_files() {
	local release modules
	release=$(uname -r)
	modules=/usr/lib/uml/modules
	insmod "$modules/$release/kernel/fs/overlayfs/overlay.ko"
	mount -t tmpfs none /mnt
	mkdir /mnt/{upper,work,root}
	mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work none /mnt/root
	mkdir -p /mnt/root/lib/modules
	mount --bind "$modules" /mnt/root/lib/modules
	mount -t devtmpfs none /mnt/root/dev
	mkdir /mnt/root/dev/{shm,pts}
	ln -s /proc/self/fd /mnt/root/dev/fd
	mount -t tmpfs none /mnt/root/dev/shm
	mount -t devpts none /mnt/root/dev/pts
	mount -t proc none /mnt/root/proc
	mount -t sysfs none /mnt/root/sys
	mount -t hostfs -o "$folder/machine" none "/mnt/root$folder/machine"
}

join_network() {
	ip link set lo up
	ip addr add 10.77.0.2/24 dev vec0
	ip link set vec0 up
}

run() {
	local point
	join_network
	load_kind
	while read -r point; do
		attach "$point"
	done <"$folder/mounts"
	# shellcheck source=/dev/null
	. "$folder/machine/command"
}

if [ "${1:-}" != again ]; then
	take_files
	exec chroot /mnt/root "$0" again
fi
stty -F /dev/tty1 raw
stty -F /dev/tty2 raw
set +e
# By pipes: a command that finds a terminal writes for a reader who watches.
{
	(
		set -e
		run
	) 2>&1 >&3 | cat >/dev/tty2
	exit "${PIPESTATUS[0]}"
} 3>&1 | cat >/dev/tty1
status=${PIPESTATUS[0]}
umount -a -t nfs,nfs4,ceph
stty -F /dev/tty1 raw # once all of it is written
stty -F /dev/tty2 raw
echo "$status" >"$folder/machine/status"
echo o >/proc/sysrq-trigger
sleep infinity
