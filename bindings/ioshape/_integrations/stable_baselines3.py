# SPDX-License-Identifier: Apache-2.0
"""Make Stable-Baselines3 write its zip archives and pickles to files of ioshape."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ioshape._files.open import open as open_file
from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from types import ModuleType


def patch(save_util: Any) -> None:
    """Make the module write to files of ioshape from now on.

    Versions before 2.2 do not close their archives, and files of ioshape appear only when they are
    closed. These versions are left alone.
    """
    if "close" not in save_util.save_to_zip_file.__code__.co_names:
        return
    by_sb3 = save_util.open_path

    @functools.wraps(by_sb3)
    def open_path(path: Any, mode: str, verbose: int = 0, suffix: str | None = None) -> Any:
        if mode != "w" or not isinstance(path, (str, Path)):
            return by_sb3(path, mode, verbose, suffix)
        named = Path(path)
        if not named.suffix and suffix:
            named = Path(f"{named}.{suffix}")
        if named.is_dir():
            named = Path(f"{named}_2")  # like SB3
        named.parent.mkdir(parents=True, exist_ok=True)
        return open_file(named, "wb")

    save_util.open_path = open_path


def follow(save_util: ModuleType, *, load: bool) -> None:  # noqa: ARG001 - it replaces nothing that loads
    """Patch the module that saves. "ioshape run" calls this when it has been imported."""
    if is_tested("stable_baselines3"):
        patch(save_util)
