# SPDX-License-Identifier: Apache-2.0
"""Generations on a tier: how they are saved there, and which copy is the nearest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ioshape._core.errors import StorageError
from ioshape._core.structs import sized
from ioshape._native import lib
from ioshape._tier.drain import drain_of
from ioshape._tier.nearest import tier_at
from ioshape._tier.route import Passage, directly

if TYPE_CHECKING:
    from ioshape._core.report import Step
    from ioshape._tier.drain import Drain
    from ioshape._tier.tier import Tier


def near(directory: str, folder: str) -> str | None:
    """Where generations of a directory lie on the tier of that folder ("": of none)."""
    tier = tier_at(folder)
    return None if tier is None else tier.files + os.path.realpath(directory)


class GroupTier:
    """The tier of a group, if it can be used."""

    def __init__(self, directory: str, folder: str) -> None:
        self._directory = directory
        self._drain: Drain | None = None
        self.tier: Tier | None = None
        #: why it cannot
        self.steps: tuple[Step, ...] = ()
        if not folder:
            return
        disk = os.path.realpath(folder)
        if os.path.commonpath((os.path.realpath(directory), disk)) == disk:
            self.steps = directly(directory, "its destination is on the tier's disk").steps
            return
        try:
            self._drain = drain_of(folder)
            self.tier = self._drain.tier
        except StorageError as error:
            self.steps = directly(directory, str(error)).steps

    def passage(self, name: str, *, to_the_end: bool) -> GroupPassage | None:
        """Of a save of the generation of that name, which may end at its destination."""
        if self.tier is None or self._drain is None:
            return None
        directory = os.path.realpath(self._directory)
        place = f"{self.tier.files}{directory}/{name}"
        return GroupPassage(self._drain, place, to_the_end=to_the_end)


class GroupPassage(Passage):
    """Of a generation. The library decides where it is saved, and keeps it; here it is drained."""

    def __init__(self, drain: Drain, place: str, *, to_the_end: bool) -> None:
        super().__init__(drain, place, to_the_end=to_the_end)
        #: where C has put the pointer to the save
        self.save: Any = None
        self._is_direct = False

    @property
    def folder(self) -> str:
        """Of the tier; "" if the save went past it."""
        return "" if self._is_direct else super().folder

    def keep(self) -> None:
        """Has it drained. On all ranks: the first of them does it, whichever is left."""
        with self._lock:
            if self._ticket is not None or self._is_direct:
                return
            report = sized("ioshape_report")
            lib.ioshape_save_get_report(self.save[0], report)
            steps = report.steps[0 : min(report.fallbacks, len(report.steps))]
            self._is_direct = any(step.code == lib.IOSHAPE_STEP_TIER for step in steps)
            if not self._is_direct:
                self._ticket = self._drain.kept(self._place)

    def is_drained(self) -> bool:
        """Whether it is at its destination, or a later one is."""
        return self._is_direct or super().is_drained()
