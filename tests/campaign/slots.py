# SPDX-License-Identifier: Apache-2.0
"""Harm clients of a pool and its coordinator, in the scenes of chaos_scenes.py in turn."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos_scenes import SCENES
from nodes import NotPermitted

from .trial import CannotTry, Trial

ROUNDS = 10


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    del work

    def attempt(seed: int) -> Trial:
        name = sorted(SCENES)[seed % len(SCENES)]
        try:
            verdict = SCENES[name](seed, ROUNDS)
        except NotPermitted as error:
            raise CannotTry(f"slots: {error}") from error
        findings = [f"{name}: {fault}" for fault in verdict.faults()]
        counts = {"slots_granted": verdict.counts["got"] + verdict.counts["saved"]}
        return Trial(counts | {"slots_wrong": len(findings)}, findings=findings)

    yield attempt
