# SPDX-License-Identifier: Apache-2.0
"""The setting "trace": what saves reported, written down as they end, for "ioshape trace"."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

from ioshape._core import config
from ioshape._core.descriptors import open_file
from ioshape._core.job import job

if TYPE_CHECKING:
    from ioshape._core.report import Report

_warned = False


def record(report: Report, *, background: bool = False, error: BaseException | None = None) -> None:
    """Appends a line, if that is wanted. No save fails because of it."""
    try:
        folder = config.value_of("trace")
        if folder:
            _append(folder, report, background, error)
    except Exception as problem:  # whatever it is, the checkpoint is worth more
        _warn(f"reports of saves are not recorded (setting trace): {problem}")


def _append(folder: str, report: Report, background: bool, error: BaseException | None) -> None:
    place = job()
    line = {
        "ioshape": "save",
        "host": place.node,
        "rank": place.rank,
        "pid": os.getpid(),
        "job": place.id,
        "background": background,
        "error": None if error is None else str(error) or repr(error),
        **asdict(report),
    }
    text = json.dumps(line, separators=(",", ":")) + "\n"
    name = f"{place.node.replace('/', '_')}-{place.rank:05d}-{os.getpid()}.jsonl"
    path = os.path.join(folder, name)  # noqa: PTH118
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        file = open_file(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        file = open_file(path, flags, 0o666)
    try:
        # In one call, so that lines of threads do not get into each other.
        if os.write(file, text.encode()) != len(text.encode()):
            raise OSError(f"{path}: no room for all of a line")
    finally:
        os.close(file)


def _warn(sentence: str) -> None:
    """Once; and not as an exception, whatever the program has made of warnings."""
    global _warned  # noqa: PLW0603
    if _warned:
        return
    _warned = True
    with contextlib.suppress(Exception):
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
