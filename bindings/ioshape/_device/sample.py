# SPDX-License-Identifier: Apache-2.0
"""Detection of changes to storages of a device while they wait to be copied, by samples."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ioshape._core.errors import Facts, StorageError, raised_for
from ioshape._native import lib

if TYPE_CHECKING:
    from ioshape._device.stream import CopyStream

# The C library uses these numbers for host memory (libioshape/save/staging.c).
_PIECES = 16
_PIECE_BYTES = 64


def _some_of(memory: torch.Tensor) -> torch.Tensor:
    step = (memory.numel() - _PIECE_BYTES) // (_PIECES - 1)
    return memory.as_strided((_PIECES, _PIECE_BYTES), (step, 1))


class Sample:
    """Sampled bytes of storages of one device. Create it on the caller's stream."""

    def __init__(self, storages: list[torch.Tensor], names: list[str], path: str) -> None:
        self._path = path
        # Smaller storages are skipped: a step that changes them changes large ones as well.
        looked_at = [
            (name, _some_of(memory))
            for name, memory in zip(names, storages, strict=True)
            if memory.numel() >= _PIECES * _PIECE_BYTES
        ]
        self._names = [name for name, _ in looked_at]
        self._rows = [rows for _, rows in looked_at]
        self._first: torch.Tensor | None = None
        # Without free memory on the device there is no sample. A save must not fail because of
        # that.
        with contextlib.suppress(RuntimeError):
            self._first = torch.cat(self._rows) if self._rows else None

    def compare(self, stream: CopyStream) -> None:
        """Compare the storages with the sample, after all copies that were queued so far.

        Raises:
            StorageError: A storage has changed.
        """
        first = self._first
        if first is None:
            return
        differ = torch.zeros(len(self._rows), dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            there = stream.pinned(len(self._rows))
            stream.compute(
                lambda: (torch.cat(self._rows) != first).view(len(self._rows), -1).any(1), there
            )
            stream.record().synchronize()
            differ = there
        for name, has_changed in zip(self._names, differ.tolist(), strict=True):
            if has_changed:
                raise self._changed(name)

    def _changed(self, name: str) -> StorageError:
        return raised_for(
            Facts(
                lib.IOSHAPE_E_CHANGED,
                f"cannot save \"{self._path}\": record '{name}' changed before ioshape had copied "
                "it",
                self._path,
                "save",
                "change it only after the save has copied it",
                name,
            )
        )
