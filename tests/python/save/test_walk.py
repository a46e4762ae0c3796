# SPDX-License-Identifier: Apache-2.0
"""Test that the way of a save through the package is short."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ioshape
import torch

PACKAGE = Path(ioshape.__file__).parent


@contextmanager
def entered() -> Iterator[set[str]]:
    """Yield the modules of the package whose functions this thread calls in the block."""
    modules: set[str] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            modules.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield modules
    finally:
        sys.setprofile(before)


def test_a_save_enters_seven_modules(tmp_path: Path) -> None:
    ioshape.save(torch.ones(1000), tmp_path / "first.pt")
    with entered() as modules:
        ioshape.save(torch.ones(1000), tmp_path / "second.pt")
    assert sorted(modules) == [
        "_core/context.py",
        "_core/structs.py",
        "_core/under_way.py",
        "_save/handle.py",
        "_save/pickling.py",
        "_save/request.py",
        "_save/save.py",
    ]
