# SPDX-License-Identifier: Apache-2.0
"""The options of a save, as one value from the public call to the option structs of C."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ioshape._core.config import is_durable, tier_folder
from ioshape._native import lib

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from ioshape._core.report import Progress


def due_in(deadline: float | None) -> float | None:
    """Return the time.monotonic() at which a deadline in seconds from now ends; None for none."""
    return None if deadline is None else time.monotonic() + deadline


def left_ms(due: float | None) -> int:
    """Return the milliseconds left, for options of C: 0 for no deadline, -1 if it is over."""
    if due is None:
        return 0
    left = math.ceil((due - time.monotonic()) * 1000)
    return left if left > 0 else -1


@dataclass(frozen=True)
class SaveRequest:
    """The options of a save.

    Settings are read when it is made, and the deadline counts from then on.
    """

    durable: bool = True
    replace: bool = True
    progress: Callable[[Progress], object] | None = None
    #: deadline by time.monotonic(); None: there is no deadline
    due: float | None = None
    #: folder of the tier; "": the save uses none
    tier: str = ""
    #: whether the save ends only when the file is at the destination, and not on the tier
    to_destination: bool = False
    #: whether to write a checksum of each MiB into a file beside the saved file
    checksums: bool = False

    @classmethod
    def of(
        cls,
        durable: bool | Literal["destination"] | None = None,
        replace: bool = True,
        progress: Callable[[Progress], object] | None = None,
        deadline: float | None = None,
        *,
        tier: str | os.PathLike[str] | Literal[False] | None = False,
        checksums: bool = False,
    ) -> SaveRequest:
        """Make a request of the arguments of a public call."""
        return cls(
            durable=durable == "destination" or is_durable(durable),
            replace=replace,
            progress=progress,
            due=due_in(deadline),
            tier=tier_folder(tier),
            to_destination=durable == "destination",
            checksums=checksums,
        )

    def set_in(self, options: Any) -> None:
        """Set the fields that the option structs of records and of files have in common."""
        options.sync = lib.IOSHAPE_ON if self.durable else lib.IOSHAPE_OFF
        options.replace = lib.IOSHAPE_ON if self.replace else lib.IOSHAPE_OFF
        options.deadline_ms = left_ms(self.due)
