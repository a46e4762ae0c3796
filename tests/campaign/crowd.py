# SPDX-License-Identifier: Apache-2.0
"""Let many processes of several users save through two mounts, and harm them."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .power import APART
from .trial import CannotTry, Trial

PASSTHROUGH = Path("build/gcc/tests/c/fault/passthrough").resolve()
PATIENCE_S = 300.0
MOST_TOLD = 20


def apart() -> list[str]:
    """Return the command that makes namespaces.

    Without root there is one user, which is root in the namespace, and so may mount.
    """
    return [*APART[:-1], *([] if os.geteuid() == 0 else ["--map-root-user"]), "--"]


def storm(seed: int, work: Path) -> dict[str, Any]:
    """Run crowd_storm.py in its own namespaces, with which all its processes end."""
    ended = subprocess.run(
        [*apart(), sys.executable, "-m", "tests.campaign.crowd_storm", str(seed), str(work)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        start_new_session=True,  # Ctrl-C reaches only this process, which ends the storm
    )
    if ended.returncode:
        raise RuntimeError(f"crowd, seed {seed}: {ended.stderr}")
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CannotTry("crowd: there is no /dev/fuse, or no right to use it")
    if not PASSTHROUGH.exists():
        raise CannotTry("crowd: libfuse 3 is not installed")
    if subprocess.run([*apart(), "true"], capture_output=True, check=False).returncode:
        raise CannotTry("crowd: no namespaces of its own for mounts and processes")
    if os.geteuid():
        print("crowd: all processes are of one user, because this one is not root", flush=True)

    def attempt(seed: int) -> Trial:
        told = storm(seed, work)
        findings = told["findings"]
        counts = {"crowd_storms": 1, "crowd_broken": len(findings)}
        return Trial(counts, findings=findings[:MOST_TOLD])

    yield attempt
