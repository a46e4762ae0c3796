# SPDX-License-Identifier: Apache-2.0
"""Try damaged, truncated and hostile files with load, verify, inspect and extract."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .trial import CannotTry, Trial

if TYPE_CHECKING:
    from .files_process import Shared
    from .files_tried import Base

MEMORY = Path("/dev/shm")  # folder of the files
STARTS_S = 600.0
HANGS_S = 60.0


def in_child(call: Callable[[int], None]) -> tuple[int, int]:
    """Run a function in a child. Return its pid, and a pipe that the function can write to."""
    heard, say = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            call(say)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(say)
    return child, heard


def watch(child: int, heard: int, shared: Shared) -> tuple[list[str], str]:
    """Return the lines that the child wrote, and how it died, or "" if it did not."""
    text = b""
    seen, since, hangs = shared.get(), time.monotonic(), False
    try:
        while not hangs:
            if select.select([heard], [], [], 1.0)[0]:
                piece = os.read(heard, 65536)
                if not piece:
                    break
                text += piece
            now = shared.get()
            if now != seen:
                seen, since = now, time.monotonic()
            limit_s = HANGS_S if now[0] >= 0 else STARTS_S
            hangs = time.monotonic() - since > limit_s
    except BaseException:
        hangs = True
        raise
    finally:
        if hangs:
            os.kill(child, signal.SIGKILL)
        os.close(heard)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    death = f"hangs for {HANGS_S:.0f} s" if hangs else f"ends the process with {status}"
    return text.decode().splitlines(), death if status else ""


def run(seed: int, valid: list[Base], folder: Path, work: Path) -> Trial:
    """Try the files in one process. When it dies, another one continues after that file."""
    from .files_process import FILES, Shared, file_of, try_all  # noqa: PLC0415
    from .files_tried import WAYS  # noqa: PLC0415

    findings: list[str] = []
    silent, first = 0, 0
    worst = {"bad_seconds_max": 0.0, "bad_mib_max": 0.0}

    def finding(index: int, way: str, sentence: str) -> None:
        file = file_of(seed, index, valid)
        keep = work / f"seed-{seed}-file-{index}.pt"
        keep.write_bytes(file.data)
        findings.append(f"{way} of {file.how} of {file.of}: {sentence}; the file is {keep}")

    while first < FILES:
        shared = Shared()
        start = first
        child = in_child(lambda say: try_all(seed, start, valid, shared, folder, say))  # noqa: B023
        lines, death = watch(*child, shared)
        for line in lines:
            index, way, sentence, is_silent = json.loads(line)
            finding(index, way, sentence)
            silent += is_silent
        first, number, seconds, mib = shared.get()
        worst["bad_seconds_max"] = max(worst["bad_seconds_max"], round(seconds, 2))
        worst["bad_mib_max"] = max(worst["bad_mib_max"], round(mib, 1))
        if first < 0:
            raise RuntimeError("files: not even the valid file could be tried")
        if death:
            finding(first, list(WAYS)[number], death)
            first += 1
    counts = {"bad_files": FILES, "bad_silent": silent}
    if len(findings) > silent:
        counts["fuzz_findings_open"] = len(findings) - silent
    return Trial(counts, worst, findings=findings)


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    if not MEMORY.is_dir():
        raise CannotTry(f"files: {MEMORY} is not there")
    # torch and boto3 are large, so only this kind imports them.
    from .files_store import connect  # noqa: PLC0415
    from .files_tried import bases  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        valid = bases(folder)
        connect(folder)
        yield lambda seed: run(seed, valid, folder, work)
