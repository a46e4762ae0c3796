# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# The CephFS of cephfs.sh with another client: the kernel's, which mounts it in a machine.

: "${here:?}" "${address:?}"
# shellcheck source=tests/testbed/kinds/cephfs.sh
. "$here/kinds/cephfs.sh"
ceph_address=$address
for program in ceph ceph-mon ceph-mgr ceph-osd ceph-mds; do
	eval "$program() { inside $program \"\$@\"; }"
done

attach() { # each mount is a client with a cache of its own
	modprobe ceph
	mount -i -t ceph -o "name=admin,ms_mode=crc,noshare" "$(sed -n 's/^mon host = //p' "$CEPH_CONF"):/" "$1"
}
