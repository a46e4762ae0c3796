# SPDX-License-Identifier: Apache-2.0
"""Programs that save through frameworks are killed at random moments; the frameworks judge."""

import contextlib
import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .trial import Trial

#: In one trial, and in one of the short form.
KILLS, FEW_KILLS = 20, 4

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs"
PATIENCE_S = 900


@dataclass(frozen=True)
class Scene:
    """A program, to be called with a folder, how many kills, and a seed.

    It ends with 0 if at all times the newest checkpoint that anybody could see was whole, and
    nothing was lost that had been saved. Otherwise it says so in its last line of output.
    """

    program: str
    #: what it imports; where that is not installed, it is not tried
    needs: str

    def is_here(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


# They take turns: each trial is one of them. A new one is a line here, and a program in
# tests/support/programs.
SCENES = (
    Scene("dcp_kills", "torch"),
    Scene("hugging_kills", "transformers"),
    Scene("lightning_kills", "lightning"),
)


def play(scene: Scene, kills: int, seed: int, work: Path) -> Trial:
    with tempfile.TemporaryDirectory(dir=work) as folder:
        ended = subprocess.run(
            [sys.executable, PROGRAMS / f"{scene.program}.py", folder, str(kills), str(seed)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    said = (ended.stdout + ended.stderr).splitlines() or [f"it ends with {ended.returncode}"]
    bad = int(ended.returncode != 0)
    findings = [f"{scene.program}: {said[-1]}"] if bad else []
    return Trial(
        {"framework_kills": kills, "framework_kills_bad": bad},
        findings=findings,
    )


@contextlib.contextmanager
def trials(work: Path, kills: int = KILLS) -> Iterator[Callable[[int], Trial]]:
    def attempt(seed: int) -> Trial:
        scene = SCENES[seed % len(SCENES)]
        return play(scene, kills, seed, work) if scene.is_here() else Trial()

    yield attempt


short = functools.partial(trials, kills=FEW_KILLS)
