# SPDX-License-Identifier: Apache-2.0
"""Counts saves that torch itself wrote under patch() or "ioshape run", and reports them at exit.

If the program passes a file object, torch writes it, unless the file was just opened (opened.py).
Replacing it would lose what the program has written to it, and not every file object is a file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from ioshape._core import terminal as _terminal
from ioshape._core.descriptors import is_pythons
from ioshape._core.under_way import after_saves

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# Programs write to memory for many reasons. If they wrote less than this, it is no checkpoint.
_LITTLE_BYTES = 1 << 20

#: for each calling package: number of saves, bytes, bytes written to files
_counts: dict[str, tuple[int, int, int]] = {}


def count(who: str, n_bytes: int, *, to_file: bool) -> None:
    """Count a save that ioshape did not write.

    Args:
        who: the package that saved, as the report at exit names it.
        n_bytes: its size.
        to_file: whether it went to a file.
    """
    saves, all_bytes, file_bytes = _counts.get(who, (0, 0, 0))
    _counts[who] = (saves + 1, all_bytes + n_bytes, file_bytes + n_bytes * to_file)


@contextlib.contextmanager
def counted(file: Any) -> Iterator[None]:
    """Count the bytes that the block writes to a file object of the program."""
    before = _position(file)
    yield
    written = _position(file) - before
    count(_caller(), max(0, written), to_file=_is_file(file))


def _position(file: Any) -> int:
    try:
        return int(file.tell()) if is_pythons(file) else 0
    except Exception:
        return 0


def _is_file(file: Any) -> bool:
    try:
        return is_pythons(file) and int(file.fileno()) >= 0
    except Exception:
        return False


def _caller() -> str:
    """Return the name of the top-level package that called torch.save."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("ioshape", "torch", "contextlib"):
            return name
        frame = frame.f_back
    return "torch"


def _tell() -> None:
    worth = {
        who: (saves, all_bytes)
        for who, (saves, all_bytes, file_bytes) in _counts.items()
        if file_bytes or all_bytes >= _LITTLE_BYTES
    }
    _counts.clear()  # exit handlers may run twice: multiprocessing runs its own
    if not worth:
        return
    of_each = ", ".join(
        f"{who} {saves} ({n_bytes / (1 << 20):.1f} MiB)"
        for who, (saves, n_bytes) in sorted(worth.items())
    )
    _terminal.say(
        f"torch itself wrote saves to file objects, neither atomic nor durable: {of_each}; "
        'give torch.save a path, or a file of ioshape.open(path, "wb")'
    )


after_saves(_tell)
# The parent reports its own saves; a child must not report them again.
os.register_at_fork(after_in_child=_counts.clear)
