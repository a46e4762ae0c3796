# SPDX-License-Identifier: Apache-2.0
"""Kill programs that save through frameworks at random moments, and let the frameworks load."""

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

#: Kills in one trial, and in one trial of the short form.
KILLS, FEW_KILLS = 20, 4

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs"
PATIENCE_S = 900


@dataclass(frozen=True)
class Scene:
    """A program whose arguments are a folder, a number of kills and a seed.

    It exits with 0 if the newest visible checkpoint was whole at all times, and no saved one was
    lost. Otherwise its last line of output says what was wrong.
    """

    program: str
    #: Module that the program imports. If it is not installed, the scene is skipped.
    needs: str

    def is_here(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


# Trials take these scenes in turn. To add one, add a line here and a program in
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
