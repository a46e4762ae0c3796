#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# An epilog of slurmd. When a job has ended on a node in any way, it drains the job's checkpoints
# from the node's disk to their destinations. It runs as root on each node. Adapt the lines marked
# "<--", then set in slurm.conf
#
#	Epilog=/etc/slurm/epilog.d/*
#
# The node takes the next job when all epilogs have ended. Checkpoints that are not drained by then
# stay on the disk. The timer of examples/deploy/systemd drains them later, or the user's next job
# that saves there.
#
# A private /tmp of a job (job_container/tmpfs) or a BeeOND is gone before this runs. Drain it at
# the end of the job's script (docs/tiers.md).
set -u

tier=${TIER:-/local/nvme}                # <-- the value of IOSHAPE_TIER in jobs
ioshape=${IOSHAPE:-/opt/ioshape/bin/ioshape} # <-- the command, on all nodes
limit=${LIMIT:-600}                      # <-- seconds that a node may wait for it

[ -d "$tier/ioshape-$SLURM_JOB_UID" ] || exit 0

# Only the user may read and write the tier. With --rate the drain would be slower than the storage.
runuser -u "$SLURM_JOB_USER" -- timeout --kill-after=10 "$limit" "$ioshape" drain "$tier" 2>&1 |
	logger --tag ioshape-drain

# A nonzero status would make Slurm drain the node, which takes it out of service.
exit 0
