# SPDX-License-Identifier: Apache-2.0
"""Measure ranks that save and load together."""

import importlib

from . import gather_files, gather_node, gather_torch, same_file
from .setting import Figure, Outcome, Setting


def measure_chaos(setting: Setting, outcome: Outcome) -> None:
    # The module is imported here because its dependencies are not needed without --chaos.
    campaign = importlib.import_module("tests.bench.gather_chaos")
    kills = int(setting.chaos)
    setting.say(f"{kills} kills")
    found = campaign.measure(kills)
    outcome.facts["chaos"] = found
    faults = {
        name: int(found[name])
        for name in ("bad_generations", "lost_generations", "hangs", "leftovers", "broken")
    }
    outcome.figures.append(
        Figure(
            "chaos_bad_generations",
            sum(faults[name] for name in ("bad_generations", "lost_generations", "hangs")),
            "<=",
            0,
            f"{found['kills']} kills; {', '.join(f'{n} {what}' for what, n in faults.items())}",
        )
    )


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
    if setting.chaos:
        measure_chaos(setting, outcome)
    return outcome
