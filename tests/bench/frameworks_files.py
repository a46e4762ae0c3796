# SPDX-License-Identifier: Apache-2.0
"""Count the files that 64 ranks on 8 nodes write: one for each node, and with DCP's own writer.

All ranks are processes of this machine, joined by gloo, and save through
torch.distributed.checkpoint. Only the names of the nodes are simulated.
"""

import json
import subprocess
import sys

from .setting import Figure, Outcome, Setting

RANKS, NODES = 64, 8


def measure(setting: Setting, outcome: Outcome) -> None:
    program = f"{__package__}.frameworks_files_process"
    command = [sys.executable, "-m", program, str(setting.folder), str(RANKS), str(NODES)]
    setting.say(f"DCP, {RANKS} ranks on {NODES} nodes: files")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    outcome.facts["dcp files"] = counts
    outcome.figures.append(
        Figure(
            "dcp_files_ratio",
            counts["ioshape"] / counts["stock"],
            "<=",
            0.2,
            f"{counts['ioshape']} to {counts['stock']} files of {RANKS} ranks on {NODES} nodes",
        )
    )
