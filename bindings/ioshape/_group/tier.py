# SPDX-License-Identifier: Apache-2.0
"""Connect a group to a tier: save its checkpoints there, drain them, and find copies to load."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ioshape._core.errors import StorageError
from ioshape._core.structs import sized
from ioshape._native import lib
from ioshape._tier.drain import drain_of, tier_at
from ioshape._tier.route import Passage, past_the_tier

if TYPE_CHECKING:
    from ioshape._core.report import Downgrade
    from ioshape._tier.drain import Drain
    from ioshape._tier.tier import Tier


def near(directory: str, folder: str) -> str | None:
    """Return where a tier stores the checkpoints of a directory; None without a tier.

    `folder` is the folder of the tier; "" means that there is none.
    """
    tier = tier_at(folder)
    return None if tier is None else tier.files + os.path.realpath(directory)


class GroupTier:
    """The tier of a group, or the reason why it cannot be used."""

    def __init__(self, directory: str, folder: str) -> None:
        self._directory = directory
        self._drain: Drain | None = None
        self.tier: Tier | None = None
        #: the downgrade that says why the tier cannot be used
        self.downgrades: tuple[Downgrade, ...] = ()
        if not folder:
            return
        disk = os.path.realpath(folder)
        if os.path.commonpath((os.path.realpath(directory), disk)) == disk:
            self.downgrades = (past_the_tier("its destination is on the tier's disk"),)
            return
        try:
            self._drain = drain_of(folder)
            self.tier = self._drain.tier
        except StorageError as error:
            self.downgrades = (past_the_tier(str(error)),)

    def passage(self, name: str, *, to_the_end: bool) -> GroupPassage | None:
        """Return the passage of a save of the checkpoint with this name; None without a tier.

        With `to_the_end` the save ends when the checkpoint is at its destination.
        """
        if self.tier is None or self._drain is None:
            return None
        directory = os.path.realpath(self._directory)
        copy_path = f"{self.tier.files}{directory}/{name}"
        return GroupPassage(self._drain, copy_path, to_the_end=to_the_end)


class GroupPassage(Passage):
    """The way of a group checkpoint to its destination.

    The library decides whether the tier is used and writes the journal entry. This class has it
    drained.
    """

    def __init__(self, drain: Drain, copy_path: str, *, to_the_end: bool) -> None:
        super().__init__(drain, copy_path, to_the_end=to_the_end)
        self._is_direct = False

    @property
    def folder(self) -> str:
        """The folder of the tier; "" if the save did not use the tier."""
        return "" if self._is_direct else super().folder

    def keep(self) -> None:
        """Hand the saved checkpoint to the drain thread, unless the save went past the tier.

        All ranks of a node call this. The first drain that gets the tier's lock copies the
        checkpoint, even if other ranks die.
        """
        with self._lock:
            if self._ticket is not None or self._is_direct:
                return
            report = sized("ioshape_report")
            lib.ioshape_save_get_report(self.save[0], report)
            downgrades = report.downgrades[0 : min(report.downgrade_count, len(report.downgrades))]
            self._is_direct = any(one.code == lib.IOSHAPE_DOWNGRADE_TIER for one in downgrades)
            if not self._is_direct:
                self._ticket = self._drain.kept(self._copy_path)

    def is_drained(self) -> bool:
        """Return whether the checkpoint, or a later one, is at its destination."""
        return self._is_direct or super().is_drained()
