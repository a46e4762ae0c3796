# SPDX-License-Identifier: Apache-2.0
"""Count the tests of the frameworks' own suites that fail with ioshape and pass without it."""

import subprocess

import frameworks

from tests.upstream import run

from .setting import Figure, Outcome, Setting


def measure(setting: Setting, outcome: Outcome) -> None:
    failed, told = 0, []
    for name in run.NAMES:
        setting.say(f"the tests of {name}")
        try:
            stock, ours = run.both(name)
        except (subprocess.CalledProcessError, frameworks.CannotInstall) as problem:
            told.append(f"{name} could not be had ({problem})")
            continue
        except run.CannotTell as problem:
            failed += 1
            told.append(str(problem))
            continue
        worse = run.worse(stock, ours)
        failed += len(worse)
        passed = sum(how == "passed" for how in ours.values())
        told.append(f"{name} {passed} passed" + "".join(f", not {one}" for one in worse))
    outcome.figures.append(Figure("upstream_failed", failed, "<=", 0, "; ".join(told)))
