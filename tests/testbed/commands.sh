# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# The commands of ceph.sh and gluster.sh, which source it once they have usage(). It sets `folder`. They
# define start, stop, and attach MOUNT_POINT, and end with: obey "$@".

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
	usage
	exit 0
fi

refuse() {
	usage >&2
	exit 2
}

[ $# -ge 2 ] || refuse
folder=$(realpath -m "$2")

mount_client() {
	mkdir -p "$1"
	attach "$1"
	echo "$1" >>"$folder/mounts"
}

down() {
	local mounted
	[ -e "$folder" ] || return 0
	while read -r mounted; do
		umount -l "$mounted" 2>/dev/null || true # a client may be gone already
	done < <(cat "$folder/mounts" 2>/dev/null)
	stop
	rm -rf --one-file-system "$folder"
}

obey() {
	case "$1" in
	up)
		down
		mkdir -p "$folder"
		if ! (start && mount_client "$folder/mnt") >"$folder/up.log" 2>&1; then
			tail -n 5 "$folder/up.log" >&2
			down
			exit 1
		fi
		echo "$folder/mnt"
		;;
	mount)
		[ $# = 3 ] || refuse
		mount_client "$(realpath -m "$3")"
		;;
	down) down ;;
	*) refuse ;;
	esac
}
