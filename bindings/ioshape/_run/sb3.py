# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3 writes a zip archive, or a pickle, to a file that it opens: here to ours."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ioshape._files.open import open as open_file


def patch(save_util: Any) -> None:
    """From now on the module opens files of ours to write.

    Not before 2.2: that leaves archives open, and ours are in place when they are closed.
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
            named = Path(f"{named}_2")  # as SB3 does
        named.parent.mkdir(parents=True, exist_ok=True)
        return open_file(named, "wb")

    save_util.open_path = open_path
