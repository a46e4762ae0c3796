# SPDX-License-Identifier: Apache-2.0
"""Run the program harm, which kills acts of the library at their calls or makes calls fail."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .trial import CannotTry, Trial

PROGRAM = Path("build/gcc/tests/campaign/harm").resolve()
PATIENCE_S = 900


@dataclass
class Harm:
    """The output of one run of the program."""

    harmed: int = 0
    #: Messages by the kind of finding.
    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, act: str, said: str) -> None:
        for line in said.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "harmed":
                self.harmed += int(rest)
            else:
                self.found.setdefault(kind, []).append(f"{act}: {rest}")

    def trial(self, name: str, kinds: tuple[str, ...]) -> Trial:
        """Return the result as the campaign counts it."""
        counts = {name: self.harmed}
        counts |= {f"{name}_{kind}": len(self.found.get(kind, [])) for kind in kinds}
        return Trial(counts, findings=[s for all_ in self.found.values() for s in all_])


def check() -> None:
    """Raise CannotTry if the program is not built."""
    if not PROGRAM.exists():
        raise CannotTry(f"kills or faults: there is no {PROGRAM}")


def run(mode: str, seed: int, count: int, work: Path, **told: Path | None) -> Harm:
    """Run each act `count` times, acts of several ranks less often.

    `told` are further settings, which the program gets as environment variables.
    """
    harm = Harm()
    listed = subprocess.run([PROGRAM, "list", mode], capture_output=True, text=True, check=True)
    arguments = [mode, str(seed), str(count)]
    environment = os.environ | {f"HARM_{name.upper()}": str(it) for name, it in told.items() if it}
    # More threads than processors, because most acts wait more than they compute.
    with ThreadPoolExecutor(1 + (os.cpu_count() or 1)) as threads:
        acts = listed.stdout.splitlines()
        for act, said in zip(
            acts,
            threads.map(lambda act: _run_act(act, arguments, work, environment), acts),
            strict=True,
        ):
            harm.add(act, said)
    return harm


def _run_act(act: str, arguments: list[str], work: Path, environment: Mapping[str, str]) -> str:
    """Run one act and return the output."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        command = [str(PROGRAM), *arguments, act]
        ended = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ends with {ended.returncode}: {ended.stderr}")
    return ended.stdout
