#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A TaskProlog of Slurm. It preloads the library that makes large writes of every program take slots
# (docs/preload.md). Adapt the lines marked "<--", then set in slurm.conf
#
#	TaskProlog=/etc/slurm/task_prolog.sh
#
# slurmstepd runs it as the job's user before each task, and gives the task what it prints after
# "export". A job opts out with IOSHAPE_PRELOAD=off, and the operator excludes users and partitions
# here.
set -u

library=${LIBRARY:-/opt/ioshape/lib/ioshape/libioshape-preload.so} # <-- on all nodes
coordinator=${COORDINATOR:-redis://ioshape@redis.cluster}          # <-- the Redis of the cluster
password_file=/etc/ioshape/password                                # <-- readable for users
excluded_users=" root backup "                                     # <-- names between spaces
excluded_partitions=" debug "                                      # <-- names between spaces

[ "${IOSHAPE_PRELOAD:-on}" != off ] || exit 0
[[ "$excluded_users" != *" ${SLURM_JOB_USER:-} "* ]] || exit 0
[[ "$excluded_partitions" != *" ${SLURM_JOB_PARTITION:-} "* ]] || exit 0
# A node without the library runs its tasks as before.
[ -r "$library" ] || exit 0

# Libraries that the job preloads itself stay in front.
echo "export LD_PRELOAD=${LD_PRELOAD:+$LD_PRELOAD:}$library"
echo "export IOSHAPE_PRELOAD_LOG=${IOSHAPE_PRELOAD_LOG:-syslog}"
[ -n "${IOSHAPE_COORDINATOR:-}" ] || echo "export IOSHAPE_COORDINATOR=$coordinator"
[ -n "${IOSHAPE_PASSWORD_FILE:-}" ] || echo "export IOSHAPE_PASSWORD_FILE=$password_file"
