# SPDX-License-Identifier: Apache-2.0
"""The setting "trace": a log of all saves' reports, which "ioshape trace" reads.

Each process appends one line of JSON to its own file as a save ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

from ioshape._core.descriptors import open_file
from ioshape._core.job import job

if TYPE_CHECKING:
    from ioshape._core.report import Report

_warned = False


def record(
    folder: str, report: Report, *, background: bool = False, error: BaseException | None = None
) -> None:
    """Append a save's report to the trace in a folder; "" for none. Never fail the save."""
    try:
        if folder:
            _append(folder, report, background, error)
    except Exception as problem:  # no problem with the trace may fail a checkpoint
        _warn(f"reports of saves are not recorded (setting trace): {problem}")


def _append(folder: str, report: Report, background: bool, error: BaseException | None) -> None:
    this_job = job()
    line = {
        "ioshape": "save",
        "host": this_job.node,
        "rank": this_job.rank,
        "pid": os.getpid(),
        "job": this_job.id,
        "background": background,
        "error": None if error is None else str(error) or repr(error),
        **asdict(report),
    }
    text = json.dumps(line, separators=(",", ":")) + "\n"
    name = f"{this_job.node.replace('/', '_')}-{this_job.rank:05d}-{os.getpid()}.jsonl"
    path = os.path.join(folder, name)  # noqa: PTH118
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        file = open_file(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        file = open_file(path, flags, 0o666)
    try:
        # Written by one call, so that lines of several threads do not mix.
        if os.write(file, text.encode()) != len(text.encode()):
            raise OSError(f"{path}: not enough free space for a line")
    finally:
        os.close(file)


def _warn(sentence: str) -> None:
    """Warn once per process. Even if the program turns warnings into errors, raise nothing."""
    global _warned  # noqa: PLW0603
    if _warned:
        return
    _warned = True
    with contextlib.suppress(Exception):
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
