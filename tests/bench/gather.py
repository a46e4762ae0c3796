# SPDX-License-Identifier: Apache-2.0
"""Measure ranks that save and load together."""

from . import gather_files, gather_node, gather_torch, same_file
from .setting import Outcome, Setting


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "Ranks are processes of this machine, which begin at one moment. Nodes are told apart by "
        "name only, so that what would go from node to node goes over loopback."
    )
    gather_node.measure(setting, outcome)
    gather_torch.measure(setting, outcome)
    same_file.measure(setting, outcome)
    gather_files.measure(setting, outcome)
    return outcome
