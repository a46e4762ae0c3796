#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the commands of this repository need. If all of it is installed, it does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PATH=$PATH:/usr/sbin:/sbin # where mkfs is, also for those who are not root

usage() {
	cat <<'END'
Usage: tests/support/setup.sh [--help] [build|bench|realfs|test|long|launch]

Installs missing system packages (as root or with passwordless sudo; otherwise it lists them) and creates a Python
environment in .venv. tests/support/package.sh then installs the package there.

  build   packages to build the library and the Python package, and torch (the default)
  bench   build, and packages for benchmarks
  realfs  bench, and packages for small clusters of CephFS, GlusterFS, MooseFS and NFS on this host
  test    build, and packages for all tests except the longest
  long    test, and packages for tests/run.sh --long
  launch  bench, and packages to build and test packages
END
}

case "${1:-build}" in
build | bench | realfs | test | long | launch) purpose=${1:-build} ;;
-h | --help)
	usage
	exit 0
	;;
*)
	usage >&2
	exit 2
	;;
esac

say() {
	echo "setup: $*"
}

fail() {
	echo "setup: $*" >&2
	exit 1
}

# Each thing is asked for by what it does, not by its package: another distribution, or somebody's own
# build of it, is as good.
missing=()

need() { # need PACKAGE COMMAND...: PACKAGE is missing if COMMAND fails
	local package=$1
	shift
	"$@" >/dev/null 2>&1 || missing+=("$package")
}

compiles() { # compiles COMPILER FLAG...: can it make a program?
	echo 'int main(void) { return 0; }' | "$1" -x c - "${@:2}" -o /dev/null
}

has_python_headers() {
	compiles gcc "-I$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
		-include Python.h
}

has_nfs_server() {
	ganesha.nfsd -v && ls /usr/lib/*/ganesha/libfsalvfs.so
}

look_for_missing() {
	missing=()
	need gcc compiles gcc
	need g++ g++ --version
	need libc6-dev compiles gcc -pthread -include pthread.h
	need pkg-config pkg-config --version
	need liburing-dev pkg-config --atleast-version 2.3 liburing
	need libisal-dev pkg-config --atleast-version 2.30 libisal
	need libhiredis-dev pkg-config --atleast-version 0.14 hiredis
	need python3 python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'
	need python3-venv python3 -c 'import ensurepip, venv'
	need python3-dev has_python_headers
	need util-linux flock --version
	if [ "$purpose" != build ]; then
		need check pkg-config --atleast-version 0.15 check
		need redis-server redis-server --version
		need libfuse3-dev pkg-config --atleast-version 3.14 fuse3
		need fuse3 fusermount3 --version
		need fio fio --version
		need util-linux findmnt --version
	fi
	# Real parallel filesystems, on this host (tests/testbed).
	if [ "$purpose" = realfs ] || [ "$purpose" = long ]; then
		need ceph-mon command -v ceph-mon
		need ceph-mgr command -v ceph-mgr
		need ceph-osd command -v ceph-osd
		need ceph-mds command -v ceph-mds
		need ceph-fuse command -v ceph-fuse
		need ceph-common command -v ceph
		need glusterfs-server command -v glusterd
		need glusterfs-client command -v mount.glusterfs
		need moosefs-master command -v mfsmaster
		need moosefs-chunkserver command -v mfschunkserver
		need moosefs-client command -v mfsmount
		need iproute2 command -v ip
		need xfsprogs command -v mkfs.xfs
		need nfs-ganesha-vfs has_nfs_server
		need netbase ls /etc/services # for its port mapper
		need rpcbind command -v rpcbind
		need kmod command -v insmod
		# Whose clients of NFS and CephFS are tested. Only for that processor.
		[ "$(uname -m)" != x86_64 ] || need user-mode-linux linux.uml --version
	fi
	if [ "$purpose" = launch ]; then
		need abigail-tools command -v abidiff
		need buildah command -v buildah
		need g++-aarch64-linux-gnu command -v aarch64-linux-gnu-g++
		need lintian command -v lintian
		need mmdebstrap command -v mmdebstrap
		need qemu-user-static command -v qemu-aarch64-static
	fi
	case "$purpose" in
	test | long) ;;
	*) return 0 ;;
	esac
	need clang compiles clang
	need libclang-rt-14-dev compiles clang -fsanitize=address
	need shellcheck shellcheck --version
	need groff-base groff --version
	need cmake cmake --version
	need binutils nm --version
	need valgrind valgrind --version
	need strace strace --version
	need redis-sentinel redis-sentinel --version
	need redis-tools redis-cli --version
	need openssl openssl version
	need systemd systemd-analyze --version
	need e2fsprogs mkfs.ext4 -V
	need xfsprogs mkfs.xfs -V
	need btrfs-progs mkfs.btrfs --version
	need qemu-system-common qemu-storage-daemon --version
	need iproute2 ip -V
	need git git --version
	need make make --version
	need patch patch --version
	need perl perl --version
	need unzip unzip -v
	need zip zip -v
	need util-linux setarch --version
	need libopenmpi-dev pkg-config --atleast-version 4.0 ompi-c
	need openmpi-bin mpirun --version
	[ "$purpose" = long ] || return 0
	need abigail-tools command -v abidiff
	# Without a configuration Slurm's programs do not even tell their version.
	need slurmctld command -v slurmctld
	need slurmd command -v slurmd
	need slurm-client command -v srun
	need munge command -v munged
	need prometheus command -v promtool
	# Programs of tests/support/preloaded_table.py.
	need busybox busybox true
	need bzip2 bzip2 --help
	need cpio cpio --version
	need ffmpeg ffmpeg -version
	need gnupg gpg --version
	need lz4 lz4 --version
	need rsync rsync --version
	need sqlite3 sqlite3 --version
	need xz-utils xz --version
	need zstd zstd --version
}

install_missing() {
	local as_root=()
	local install="apt-get install -y --no-install-recommends ${missing[*]}"

	command -v apt-get >/dev/null ||
		fail "there is no apt-get; install the equivalents of these Debian packages: ${missing[*]}"
	if [ "$(id -u)" != 0 ]; then
		sudo -n true 2>/dev/null ||
			fail "packages are missing, and this user cannot install them; run: sudo $install"
		as_root=(sudo -n)
	fi
	say "installing system packages: ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	# Another package manager at work is waited for, not an error.
	"${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 -qq update ||
		say "cannot update the package lists; continuing with the old lists"
	"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
		apt-get -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 -qq install -y --no-install-recommends \
		"${missing[@]}" >/dev/null || fail "the installation failed; see its output above, and run: $install"
	look_for_missing
	[ ${#missing[@]} = 0 ] ||
		fail "these packages are still missing after the installation: ${missing[*]}"
}

run_pip() { # run_pip LIST COMMAND...: with what a file in tests/support names
	local list=tests/support/$1
	shift
	.venv/bin/python -m pip --disable-pip-version-check "$@" --requirement "$list" \
		>.venv/installed.txt 2>&1 || {
		tail -n 20 .venv/installed.txt >&2
		fail "cannot install the Python packages of $list; see the output above"
	}
}

make_venv() {
	local stamp=.venv/complete wanted
	# A copied folder must not use the original's environment, whose scripts hold absolute paths.
	wanted=$(pwd && python3 -c 'import sys; print(sys.version, sys.base_prefix)' &&
		cat tests/support/{requirements,callers,wheels}.txt)
	if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null
	then
		return
	fi
	[ ! -L .venv ] ||
		fail ".venv is a link to $(readlink .venv), which may belong to another tree; remove the link"
	say "creating the Python environment .venv (torch is large: this may take minutes)"
	python3 -m venv --clear .venv
	run_pip requirements.txt install
	run_pip callers.txt install --no-deps
	run_pip wheels.txt download --dest .venv/wheels
	echo "$wanted" >"$stamp"
}

look_for_missing
[ ${#missing[@]} = 0 ] || install_missing
make_venv
case "$purpose" in
test | long)
	docs/site.sh --environment || say "docs/site.sh cannot install its packages: the tests of the site are skipped"
	;;
esac
say "everything for '$purpose' is installed"
