# SPDX-License-Identifier: Apache-2.0
"""Save over a tier and directly, while savers and drains are killed at any moment."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .trial import Trial

PATIENCE_S = 300.0


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    def attempt(seed: int) -> Trial:
        """Run tier_process.py, which forks the other processes."""
        ended = subprocess.run(
            [sys.executable, "-m", "tests.campaign.tier_process", str(seed), str(work)],
            env=os.environ | {"IOSHAPE_COORDINATOR": "open"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"tier, seed {seed}: {ended.stderr}")
        told = json.loads(ended.stdout)
        return Trial(told["counts"], findings=told["findings"])

    yield attempt
