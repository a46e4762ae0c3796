# SPDX-License-Identifier: Apache-2.0
"""Count bytes that frameworks write under "ioshape run" without ioshape, as strace sees them.

Each scene runs two ranks.
"""

import sys

import frameworks
import witness

from .setting import Figure, Outcome, Setting

SCENES = (
    *("dcp", "lightning", "accelerate", "trainer", "deepspeed", "sb3"),
    *("composer", "torchtune", "torchtitan", "nvrx"),
)


def measure(setting: Setting, outcome: Outcome) -> None:
    past, told = 0, []
    for scene in SCENES:
        framework = witness.INSTALLED_AS.get(scene)
        setting.say(f"strace watches {scene}")
        folder = setting.folder / scene
        folder.mkdir()
        try:
            python = str(frameworks.environment(framework)) if framework else sys.executable
        except frameworks.CannotInstall as problem:
            told.append(f"{scene} was not tried: {problem}")
            continue
        in_files, found = witness.watch(scene, folder, python)
        past += sum(found.values())
        told.append(f"{scene} {sum(found.values())} of {in_files}")
    outcome.figures.append(Figure("bypassed_bytes", past, "<=", 0, "; ".join(told)))
