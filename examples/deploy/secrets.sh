#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the passwords and certificates of a coordinator.
set -euo pipefail

usage() {
	cat <<'TEXT'
Usage: examples/deploy/secrets.sh [--help] FOLDER NAME...

Creates FOLDER with the secrets of a coordinator with TLS that has these host names or IP addresses:

  ca.crt                   for the nodes: SSL_CERT_FILE
  server.crt, server.key   for the Redis
  users.acl                for the Redis: docs/coordinator/users.acl with new passwords
  password                 for the nodes: IOSHAPE_PASSWORD_FILE. Give it a group with all users
                           who save: chgrp GROUP password && chmod 440 password
  admin-password           for you

The private key of the authority is deleted. After ten years, or for other names, create all secrets again.
TEXT
}

case "${1:-}" in
-h | --help)
	usage
	exit 0
	;;
esac
[ $# -ge 2 ] || {
	usage >&2
	exit 2
}
folder=$(realpath -m -- "$1")
shift
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
acl=$here/../../docs/coordinator/users.acl
[ -e "$acl" ] || acl=$here/../coordinator/users.acl # its place in the package ioshape-tools

[ ! -e "$folder" ] || {
	echo "cannot create secrets in \"$folder\": it exists, and its secrets may be in use; name a new folder" >&2
	exit 1
}
umask 077
work=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$work"' EXIT

names=
for name in "$@"; do
	case "$name" in
	*:*) kind=IP ;;
	*[!0-9.]*) kind=DNS ;;
	*) kind=IP ;;
	esac
	names=${names:+$names,}$kind:$name
done

make() { # make OPTION...: runs openssl, and shows its output only if it fails
	openssl "$@" >"$work/log" 2>&1 || {
		cat "$work/log" >&2
		echo "cannot create certificates: openssl failed, see above; check that it is installed and that the names are valid" >&2
		exit 1
	}
}

curve=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
make req -x509 "${curve[@]}" -days 3650 -subj "/CN=ioshape coordinator authority" \
	-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
	-keyout "$work/ca.key" -out "$work/ca.crt"
make req "${curve[@]}" -subj "/CN=$1" -keyout "$work/server.key" -out "$work/request"
printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" >"$work/extensions"
make x509 -req -in "$work/request" -CA "$work/ca.crt" -CAkey "$work/ca.key" -days 3650 -set_serial 1 \
	-extfile "$work/extensions" -out "$work/server.crt"
openssl rand -hex 24 >"$work/password"
openssl rand -hex 24 >"$work/admin-password"
# The passwords are not arguments, because all users of the machine can read arguments.
sed -f - "$acl" >"$work/users.acl" <<SED
s/>CHANGE-THIS-ONE-TOO />$(cat "$work/admin-password") /
s/>CHANGE-THIS />$(cat "$work/password") /
SED
rm "$work/ca.key" "$work/request" "$work/extensions" "$work/log"
chmod 644 "$work/ca.crt"
mv -T "$work" "$folder"
trap - EXIT
echo "created $folder for $names; keep it out of version control"
