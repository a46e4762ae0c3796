# SPDX-License-Identifier: Apache-2.0
"""What the caller of a save asked for, as one value from the public call to C's options."""

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
    """When so many seconds are over."""
    return None if deadline is None else time.monotonic() + deadline


def left_ms(due: float | None) -> int:
    """As options of C have it: 0 for none, below 0 if it is over."""
    if due is None:
        return 0
    left = math.ceil((due - time.monotonic()) * 1000)
    return left if left > 0 else -1


@dataclass(frozen=True)
class SaveRequest:
    """How to save. Settings are looked up when it is made, and the deadline runs from then on."""

    durable: bool = True
    replace: bool = True
    progress: Callable[[Progress], object] | None = None
    #: by time.monotonic(); None: there is no deadline
    due: float | None = None
    #: the folder of the tier; "": none is wanted
    tier: str = ""
    #: the save ends at the destination, and not on the tier
    to_destination: bool = False
    #: of each MiB, in a file beside it
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
        """Takes the arguments of a public call."""
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
        """Writes what the option structs of records and of files both have."""
        options.sync = lib.IOSHAPE_ON if self.durable else lib.IOSHAPE_OFF
        options.replace = lib.IOSHAPE_ON if self.replace else lib.IOSHAPE_OFF
        options.deadline_ms = left_ms(self.due)
