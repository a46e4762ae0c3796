#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# An epilog of slurmd: when a job has ended on a node, whatever way, what it has saved on the node's disk
# is carried to where it belongs. It runs as root on each node. Adapt the lines marked "<--", then in
# slurm.conf
#
#	Epilog=/etc/slurm/epilog.d/*
#
# The node takes the next job when all epilogs have ended. What is not carried by then stays on the disk:
# the timer of examples/deploy/systemd goes on, or the user's next job here that saves there.
#
# What a job has in a /tmp of its own (job_container/tmpfs), or on a BeeOND, is gone before this runs:
# drain it at the end of the job's own script (docs/tiers.md).
set -u

tier=${TIER:-/local/nvme}                # <-- what jobs have in IOSHAPE_TIER
ioshape=${IOSHAPE:-/opt/ioshape/bin/ioshape} # <-- the command, on all nodes
limit=${LIMIT:-600}                      # <-- seconds that a node may wait for it

[ -d "$tier/ioshape-$SLURM_JOB_UID" ] || exit 0

# Only the user may read and write what is there. --rate would keep it slower than the storage.
runuser -u "$SLURM_JOB_USER" -- timeout --kill-after=10 "$limit" "$ioshape" drain "$tier" 2>&1 |
	logger --tag ioshape-drain

# A status that is not 0 would take the node away from Slurm.
exit 0
